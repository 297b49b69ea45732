"""The worker side of every transport: a `Collector` that makes windows and their notes."""

import random
import warnings
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic
from typing import Any, Protocol

import numpy as np
import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor, nn

from flatroll.layout.keys import next_key
from flatroll.rollouts.collector import Collector
from flatroll.rollouts.workers.transport import Job, Note, Ready
from flatroll.sharing.block import Block, BlockColumn, Table
from flatroll.sharing.channel import Closed
from flatroll.wrappers.adapt_env import scales_by_running_statistics
from flatroll.wrappers.markers import RewardSum, find_wrapper


class Weights(Protocol):
    """A worker's source of the policy's weights: the newest `version` and a copy of it."""

    @property
    def version(self) -> int: ...

    def fetch_into(self, state: Mapping[str, Tensor]) -> int:
        """Copy the newest weights into these tensors; return their version."""
        ...


class WindowMaker:
    """Creates a worker's collector; each call of `make` returns a window and its `Note`.

    Args:
        job: see `Job`.
        signals: numbers that the owner writes while a window is collected.
        weights: weights of the policy.
        first_version: the policy version of version 0 in ``weights``.
    """

    def __init__(self, job: Job, signals: "Signals", weights: Weights, first_version: int) -> None:
        for set_seed in (random.seed, torch.manual_seed, np.random.seed):
            set_seed(job.seed)
        if job.policy_factory is None:
            policy = job.policy
        else:
            policy = job.policy_factory()

        options = dict(job.options)
        self._counted = RowCount(options.pop("postproc", None))
        self._watch = Watch(signals, weights, first_version, policy, looks=not job.sync, timed=job.timed)

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "split_trajs=True")  # the owner has warned already
            if self._counted.postproc is None:
                postproc = None
            else:
                postproc = self._counted

            self.collector = Collector(
                job.create_env_fn,
                policy,
                interruptor=self._watch,
                postproc=postproc,
                **job.collector_arguments(),
                **options,
            )

        self._watch.attach(self.collector)

    def ready(self) -> Ready:
        """Return the message for the owner once the collector exists."""
        collector = self.collector
        if isinstance(collector.env, tuple):
            env = collector.env[0]
        else:
            env = collector.env
        returns = find_wrapper(env, RewardSum)
        leaves: Any = collector.spec.items(True, True)
        row_bytes = sum(spec.shape[1:].numel() * spec.dtype.itemsize for _, spec in leaves)
        scaled = scales_by_running_statistics(env)

        if returns is None:
            key = None
        else:
            key = next_key(returns.key)
        return Ready(key, row_bytes, scaled)

    def ask(self, rows: int, limit: int) -> None:
        """Set the window size to ``rows`` and the total limit to ``limit`` rows (-1: no limit)."""
        self.collector.frames_per_batch = rows
        self.collector.total_frames = limit

    def make(self, waited: float) -> tuple[Note, list[Mapping[Any, Tensor]]]:
        """Collect a window; return its note, and the columns of its rows and of its *final* if there is one.

        There are no columns once the limit is reached. ``waited`` is passed on in the note.
        """
        collector = self.collector
        watch = self._watch
        watch.begin_window()
        batch = next(collector, None)
        watch.end_window()
        note = Note(collector.frames, 0, (), collector.rows_held, waited, watch.versions())
        if batch is None:
            return note, []

        before = self._counted.before
        if before is None:
            rows = len(batch)
        else:
            rows = before
        note = note._replace(rows=rows, shape=tuple(batch.shape))

        return note, [as_columns(table) for table in (batch, collector.final) if table is not None]


class Signals:
    """Shared numbers that worker and owner exchange at each vector step without a system call.

    Args:
        block: the memory of another process's `Signals`. Default: new memory.
    """

    def __init__(self, block: Block | None = None) -> None:
        made = block is None
        if block is None:
            self._block = Block(
                [Table(1, {"numbers": BlockColumn("int64", (2,)), "beat": BlockColumn("float64", ())})]
            )
        else:
            self._block = block

        arrays = self._block.arrays()
        #: int64 [2]: number of the last window to deliver early; whether to stop (0 or 1).
        self.numbers = arrays["numbers"][0]

        #: float64 [1]: start of the current step (``time.monotonic()``), inf if there is none.
        self.beat = arrays["beat"]
        if made:
            self.beat[0] = inf

    def cut(self, window: int) -> None:
        """Make the worker deliver window number ``window``, counted from 1, with the rows collected so far."""
        self.numbers[0] = window

    def stop(self) -> None:
        """Make the worker stop at its next step."""
        self.numbers[1] = 1

    def __reduce__(self) -> tuple[Any, ...]:
        return Signals, (self._block,)


class Watch:
    """The `Collector`'s interruptor: before each vector step it checks signals and, if asked to, new weights."""

    def __init__(
        self,
        signals: Signals,
        weights: Weights,
        first_version: int,
        policy: Any,
        *,
        looks: bool,
        timed: bool,
    ) -> None:
        self._numbers = signals.numbers
        self._beat = signals.beat
        self._weights = weights
        self._first = first_version
        self._looks = looks
        self._timed = timed

        # The policy's own tensors, valid until its parameters are replaced.
        if isinstance(policy, nn.Module):
            self._state = policy.state_dict()
        else:
            self._state = {}

        self._collector: Collector | None = None
        self._window = 0
        self._seen = -1  # version of the policy

        # of the window's steps
        self._oldest = 0
        self._sum = 0
        self._steps = 0

    def attach(self, collector: Collector) -> None:
        """Attach to a collector, which is notified of new versions; load the newest weights."""
        self._collector = collector
        self._fetch()

    def begin_window(self) -> None:
        """Count a window and load the newest weights."""
        self._window += 1
        if self._weights.version != self._seen:
            self._fetch()
        self._sum = 0
        self._steps = 0

    def end_window(self) -> None:
        """Record that no step is running."""
        self._beat[0] = inf

    def versions(self) -> tuple[int, float, int] | None:
        """Return the oldest, mean and newest version of the window's steps; None without a step."""
        if not self._steps:
            return None
        first = self._first
        return self._oldest + first, self._sum / self._steps + first, self._seen + first

    def _fetch(self) -> None:
        self._seen = self._weights.fetch_into(self._state)
        assert self._collector is not None
        self._collector.policy_version = self._first + self._seen

    def is_set(self) -> bool:
        """Return whether to deliver early; raise `Closed` if the owner wants this process to stop."""
        cut, stop = self._numbers
        if stop:
            raise Closed("the owner of this worker stops it")

        if self._looks and self._weights.version != self._seen:
            self._fetch()
        if self._timed:
            self._beat[0] = monotonic()
        if not self._steps:
            self._oldest = self._seen  # the window may have begun with an older version

        self._steps += 1
        self._sum += self._seen
        return bool(cut >= self._window)


class RowCount:
    """Calls ``postproc`` and stores the number of rows passed to it (None: not called)."""

    def __init__(self, postproc: Callable[[Any], Any] | None) -> None:
        self.postproc = postproc
        self.before: int | None = None

    def __call__(self, batch: Any) -> Any:
        self.before = len(batch)
        assert self.postproc is not None
        return self.postproc(batch)


def as_columns(table: Any) -> Mapping[Any, Tensor]:
    """Return the columns by key; TypeError if there are none, or one is not a tensor."""
    if not isinstance(table, TensorDictBase) or not table.batch_dims:
        raise TypeError(
            "a worker's batch must be a tensordict with a first dimension of rows, got "
            f"{type(table).__name__} {list(getattr(table, 'shape', []))}: let postproc return one"
        )

    columns = dict(table.items(True, True, is_leaf=is_leaf_nontensor))

    for key, column in columns.items():
        if not isinstance(column, Tensor):
            raise TypeError(
                f"column {key!r} is not a tensor but of type {type(column).__name__}: it cannot be shared between "
                "processes"
            )

    return columns
