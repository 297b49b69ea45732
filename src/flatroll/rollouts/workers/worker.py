"""What runs in a worker: a `Collector`, whose batches go into the worker's mailbox."""

import random
import warnings
from collections.abc import Callable, Mapping
from math import inf
from time import monotonic
from typing import Any

import numpy as np
import torch
from tensordict import TensorDictBase, is_leaf_nontensor
from torch import Tensor, nn

from flatroll.layout.keys import next_key
from flatroll.rollouts.collector import Collector
from flatroll.rollouts.workers.messages import END, GO, READY, Note, Signals
from flatroll.sharing.channel import Channel, Closed
from flatroll.sharing.mailbox import Outbox
from flatroll.sharing.weights import SharedWeights
from flatroll.wrappers.markers import RewardSum, find_wrapper


def work(
    channel: Channel,
    *,
    create_env_fn: Any,
    policy: Any,
    policy_factory: Callable[[], Any] | None,
    postproc: Callable[[Any], Any] | None,
    weights: SharedWeights,
    first_version: int,
    signals: Signals,
    sync: bool,
    slots: int,
    seed: int,
    timed: bool,
    **arguments: Any,
) -> None:
    """Collect one window for each request (sync), or window after window, until the owner closes the channel.

    Args:
        channel: to the owner.
        create_env_fn, postproc, arguments: as in `Collector`.
        policy: likewise, unless ``policy_factory`` makes it here.
        weights: the policy's, from the owner.
        first_version: the version of the policy that has version 0 in ``weights``.
        signals: numbers that the owner writes while a window is at work.
        sync: whether a window is made for each request, with the weights that are there when it begins; else
            window after window, and weights are looked for before each vector step.
        slots: windows that may wait for the owner.
        seed: of env, random actions, torch, NumPy and `random`.
        timed: whether to show when each step begins.
    """
    for set_seed in (random.seed, torch.manual_seed, np.random.seed):
        set_seed(seed)
    if policy_factory is not None:
        policy = policy_factory()
    watch = Watch(signals, weights, first_version, policy, looks=not sync, timed=timed)
    rows = RowCount(postproc)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "split_trajs=True")  # the owner has warned
        collector = Collector(
            create_env_fn,
            policy,
            seed=seed,
            interruptor=watch,
            postproc=None if postproc is None else rows,
            **arguments,
        )
    with collector:
        watch.attach(collector)
        env = collector.env[0] if isinstance(collector.env, tuple) else collector.env
        returns = find_wrapper(env, RewardSum)
        channel.send(READY, None if returns is None else next_key(returns.key))
        _collect(channel, collector, watch, Outbox(channel, slots), rows, sync)


def _collect(
    channel: Channel, collector: Collector, watch: "Watch", outbox: Outbox, rows: "RowCount", sync: bool
) -> None:
    """Make windows and put them into the mailbox until the channel is closed."""
    waited, going = 0.0, False
    while True:
        began = monotonic()
        channel.feed()
        request = channel.pop(GO) if going else (GO, channel.receive(GO))
        waited += monotonic() - began
        if request is not None:
            collector.frames_per_batch, collector.total_frames = request[1]
        going = not sync
        watch.begin_window()
        batch = next(collector, None)
        watch.end_window()
        note = Note(collector.frames, 0, (), collector.rows_held, waited, watch.versions())
        if batch is None:  # all that was asked for is collected
            channel.send(END, note)
            going = False
            continue
        tables = [batch] if collector.final is None else [batch, collector.final]
        columns = [_columns(table) for table in tables]
        note = note._replace(
            rows=len(batch) if rows.before is None else rows.before, shape=tuple(batch.shape)
        )
        began = monotonic()
        outbox.put(*columns, note=note)
        waited += monotonic() - began


class Watch:
    """The `Collector`'s interruptor, asked before each vector step: looks at signals, and at weights if it should."""

    def __init__(
        self,
        signals: Signals,
        weights: SharedWeights,
        first_version: int,
        policy: Any,
        *,
        looks: bool,
        timed: bool,
    ) -> None:
        self._numbers, self._beat = signals.numbers, signals.beat
        self._weights, self._first, self._looks, self._timed = weights, first_version, looks, timed
        # The tensors themselves, which stay the policy's as long as its parameters are not exchanged.
        self._state = policy.state_dict() if isinstance(policy, nn.Module) else {}
        self._collector: Collector | None = None
        self._window = 0
        self._seen = -1  # the version that the policy has
        self._oldest, self._sum, self._steps = 0, 0, 0  # of the window's steps

    def attach(self, collector: Collector) -> None:
        """Tell this collector of new versions; the policy gets the newest weights."""
        self._collector = collector
        self._fetch()

    def begin_window(self) -> None:
        """Count a window, and get the newest weights."""
        self._window += 1
        if self._weights.version != self._seen:
            self._fetch()
        self._sum, self._steps = 0, 0

    def end_window(self) -> None:
        """No step is under way."""
        self._beat[0] = inf

    def versions(self) -> tuple[int, float, int] | None:
        """The versions of the window's steps: oldest, mean, newest; None without a step."""
        if not self._steps:
            return None
        first = self._first
        return self._oldest + first, self._sum / self._steps + first, self._seen + first

    def _fetch(self) -> None:
        self._seen = self._weights.fetch_into(self._state)
        assert self._collector is not None
        self._collector.policy_version = self._first + self._seen

    def is_set(self) -> bool:
        """Whether to deliver the rows there are. Raises `Closed` once the owner wants this process to end."""
        cut, stop = self._numbers
        if stop:
            raise Closed("the owner of this worker stops it")
        if self._looks and self._weights.version != self._seen:
            self._fetch()
        if self._timed:
            self._beat[0] = monotonic()
        if not self._steps:
            self._oldest = self._seen  # the window may have begun with an older one
        self._steps += 1
        self._sum += self._seen
        return bool(cut >= self._window)


class RowCount:
    """Calls ``postproc``, and keeps the number of rows that it was given (None: it was not called)."""

    def __init__(self, postproc: Callable[[Any], Any] | None) -> None:
        self._postproc = postproc
        self.before: int | None = None

    def __call__(self, batch: Any) -> Any:
        self.before = len(batch)
        assert self._postproc is not None
        return self._postproc(batch)


def _columns(table: Any) -> Mapping[Any, Tensor]:
    """The columns by key; TypeError for what has none, or is no tensor."""
    if not isinstance(table, TensorDictBase) or not table.batch_dims:
        raise TypeError(
            "a worker's batch must be a tensordict with a first dimension of rows, got "
            f"{type(table).__name__} {list(getattr(table, 'shape', []))}: let postproc return such a one"
        )
    columns = dict(table.items(True, True, is_leaf=is_leaf_nontensor))
    for key, column in columns.items():
        if not isinstance(column, Tensor):
            raise TypeError(
                f"column {key!r} is no tensor but of type {type(column).__name__}: it cannot be shared between "
                "processes"
            )
    return columns
