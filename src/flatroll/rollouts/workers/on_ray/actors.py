"""`Actors`: workers are actors of a Ray cluster; windows are sent through its object store."""

import copy
import importlib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import inf, prod
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from flatroll.layout.keys import POLICY_VERSION
from flatroll.rollouts.workers.transport import (
    END,
    READY,
    WINDOW,
    WITHOUT_END,
    Job,
    LocalWindow,
    Note,
    Ready,
    RowsElsewhere,
    Wake,
)
from flatroll.rollouts.workers.worker import Signals, WindowMaker, as_columns
from flatroll.sharing.block import BlockColumn, dtype_name
from flatroll.sharing.on_ray.calls import Calls, Packed, attempt, pack_batches, put_named, unpack_batches
from flatroll.sharing.worker import Failure, WorkerDied

_ASIDE = "aside"  # concurrency group of calls answered while collecting
_LOOK = 0.1  # seconds between checks of Wake by a waiting thread: ray.wait accepts no descriptors
_PATIENCE = 5.0  # timeout in seconds of step_seconds


class Answer(NamedTuple):
    """An actor's answer about a window: its note, the number of bytes, and whether there are rows."""

    note: Note
    nbytes: int
    has_rows: bool


class CollectorActor:
    """Creates a collector and collects a window per call. Rows and errors are returned as plain values."""

    _collector: Any = None
    _maker: WindowMaker | None = None
    _began = inf  # time at which the current window was begun
    #: For a `MultiCollector`, which counts updates itself: the driver's version at each update.
    _versions: list[int] | None = None

    def start(
        self,
        create_env_fn: Any,
        policy: Any,
        policy_factory: Any,
        options: Any,
        job: Job,
        own: Mapping[str, Any],
    ) -> Ready | Failure:
        """Create the collector.

        Args:
            create_env_fn, policy, policy_factory, options: these fields of ``job``, which are sent once for all
                actors.
            job: see `Job`.
            own: ``workers`` and ``num_threads``; with more than one worker, further arguments of a `MultiCollector`.
        """
        parts = {"create_env_fn": create_env_fn, "policy": policy, "policy_factory": policy_factory}
        made: Ready | Failure = attempt(self._start, replace(job, **parts, options=options), dict(own))
        return made

    def _start(self, job: Job, own: dict[str, Any]) -> Ready:
        self._given, self._signals = GivenWeights(), Signals()
        workers = own.pop("workers")
        if workers == 1:
            torch.set_num_threads(own["num_threads"])
            self._maker = WindowMaker(job, self._signals, self._given, 0)
            self._collector = self._maker.collector
            return self._maker.ready()

        self._versions = [0]
        # Imported by its public name: MultiCollector's module imports the transports.
        multi_collector = importlib.import_module("flatroll.rollouts").MultiCollector
        self._collector = multi_collector(
            job.create_env_fn,
            job.policy,
            num_workers=workers,
            policy_factory=job.policy_factory,
            sync=job.sync,
            **job.collector_arguments(),
            **own,
            **job.options,
        )

        return Ready(None, 0)

    def collect(self, version: int, weights: Any, rows: int, limit: int) -> tuple[Answer | Failure, Any]:
        """Collect a window; return an `Answer` or a `Failure`, and the rows and their *final*, packed.

        Args:
            version: version of the weights.
            weights: a byte array and its layout; None if the actor has this version.
            rows: rows of the window.
            limit: total rows to collect; -1: no limit.
        """
        found: Any = attempt(self._collect, version, weights, rows, limit)
        return (found, None) if isinstance(found, Failure) else found

    def _collect(self, version: int, weights: Any, rows: int, limit: int) -> tuple[Answer, Any]:
        maker = self._maker
        if maker is None:
            return self._collect_of_many(version, weights, limit)

        self._began = monotonic()
        self._given.give(version, weights)
        maker.ask(rows, limit)
        note, tables = maker.make(0.0)
        self._began = inf

        return _answer(note, tables)

    def _collect_of_many(self, version: int, weights: Any, limit: int) -> tuple[Answer, Any]:
        """Collect from a `MultiCollector`."""
        collector = self._collector
        versions = self._versions
        assert versions is not None

        if weights is not None or version != versions[-1]:
            if weights is None:
                named = None
            else:
                named = unflatten_weights(*weights)
            collector.update_policy_weights_(named)
            versions.append(version)

        if limit != collector.total_frames:
            collector.total_frames = limit
        batch = next(collector, None)
        held = sum(worker["rows_held"] for worker in collector.stats()["workers"])
        note = Note(collector.frames, 0, (), held, 0.0, (version, version, version))
        if batch is None:
            return _answer(note, [])

        if batch.get(POLICY_VERSION, None) is not None:
            batch[POLICY_VERSION] = torch.tensor(versions)[batch[POLICY_VERSION]]
        tables = [as_columns(table) for table in (batch, collector.final) if table is not None]
        return _answer(note._replace(rows=len(batch), shape=tuple(batch.shape)), tables)

    def cut(self, window: int) -> None:
        """Make ``collect`` call number ``window``, counted from 1, return the rows collected so far."""
        self._signals.cut(window)

    def stop(self) -> None:
        """End the current window and all requested ones at the next step."""
        if self._maker is not None:
            self._signals.stop()

    def step_seconds(self) -> float:
        """Return the seconds since the current step, or the window if it has no step yet, began; 0 if idle."""
        beat = float(self._signals.beat[0])
        if beat == inf:
            last = self._began
        else:
            last = beat
        return max(0.0, monotonic() - last)

    def close(self) -> None:
        """Close the env."""
        if self._collector is not None:
            self._collector.shutdown()


def _answer(note: Note, tables: Sequence[Mapping[Any, Tensor]]) -> tuple[Answer, Any]:
    """Return the result of `CollectorActor.collect`; rows and *final* as for ``RayReplayBuffer.extend_reference``."""
    batches = [TensorDict(dict(table), [len(next(iter(table.values())))]) for table in tables]
    packed: list[Packed] = [pack_batches(batch) for batch in batches]
    nbytes = sum(each.nbytes for each in packed)

    if packed:
        rows_and_final = (*packed, None)[:2]
    else:
        rows_and_final = None
    return Answer(note, nbytes, bool(packed)), rows_and_final


class GivenWeights:
    """Weights passed with a call, for a `Watch`."""

    version = -1  # none received so far

    def __init__(self) -> None:
        self._state: dict[str, Tensor] = {}

    def give(self, version: int, weights: Any) -> None:
        """Set a byte array and its layout as this version; None keeps the weights."""
        self.version = version
        if weights is not None:
            self._state = unflatten_weights(*weights)

    def fetch_into(self, state: Mapping[str, Tensor]) -> int:
        """Copy the weights into these tensors, once per version; return the version."""
        for name, value in self._state.items():
            state[name].detach().copy_(value)
        self._state = {}
        return self.version


class Actors:
    """The transport of `RayCollector`: each worker is an actor, each window the result of a call.

    Args:
        calls: Ray, or a substitute.
        configs: options of ``ray.remote`` for each actor.
        env_functions: env function of each actor, see `RayCollector`.
        in_flight: windows per actor that are being collected or wait in the object store.
        workers: workers per actor; more than 1 are processes of a `MultiCollector` in the actor.
        own: further arguments of that `MultiCollector`; always contains ``num_threads``.
        by_reference: leave rows in the object store for a buffer that fetches them.
        with_signals: whether actors must answer calls while collecting, which `Link.cut` and `Link.quiet` need.
    """

    def __init__(
        self,
        calls: Calls,
        configs: Sequence[Mapping[str, Any]],
        *,
        in_flight: int,
        workers: int,
        own: Mapping[str, Any],
        by_reference: bool,
        with_signals: bool,
    ) -> None:
        self.calls = calls
        self.in_flight = in_flight
        self.by_reference = by_reference

        # a reference; None for the policy's initial weights
        self.version = 0
        self.weights = None
        self.makes_policies = True
        self.writers_of_each = workers
        self.served = 0  # counts received messages
        self._with_signals = with_signals

        if with_signals:
            group = {"concurrency_groups": {_ASIDE: 1}}
        else:
            group = {}
        self._configs = [{**config, **group} for config in configs]
        self._own = {**own, "workers": workers}

        # By id of the object sent, which the entry keeps alive: its reference.
        self._sent: dict[int, tuple[Any, Any]] = {}
        self._layout: Any = None  # layout of the weights, once known
        self._flat: Any = None
        self._largest = 0  # bytes per window
        self._closed = False

    def share(self, state: Mapping[str, Tensor]) -> None:
        if state:
            self._layout = weight_layout(state)
            self._flat = flatten_weights(state, self._layout)

    def publish(self, state: Mapping[str, Tensor]) -> None:
        if state:
            if self._layout is None:  # the policy was created in the actors
                self._layout = weight_layout(state)
            self._flat = flatten_weights(state, self._layout)
            # Stored once for all actors. The store drops the previous version once the last call that uses it
            # has finished.
            self.weights = self.calls.put((self._flat, self._layout))

        self.version += 1

    def fetch_into(self, state: Mapping[str, Tensor]) -> None:
        if self._flat is not None:
            for name, value in unflatten_weights(self._flat, self._layout).items():
                state[name].copy_(value)

    def start(self, job: Job) -> "Actor":
        if id(job.options) not in self._sent:
            put_named(self.calls, **job.options)  # one by one, so that an error names the argument
        sent = [
            self._send(name, value)
            for name, value in {
                "create_env_fn": job.create_env_fn,
                "policy": job.policy,
                "policy_factory": job.policy_factory,
                "arguments": job.options,
            }.items()
        ]

        config = self._configs[job.place]
        actor = self.calls.make(CollectorActor, config)
        starting = self.calls.call(actor, "start", *sent, job.without_parts(), self._own)
        return Actor(self, actor, job, config, starting)

    def _send(self, name: str, value: Any) -> Any:
        """Store a value once for all actors; return its reference."""
        if id(value) not in self._sent:
            sent = _on_cpu(value) if name == "policy" else value
            self._sent[id(value)] = value, put_named(self.calls, **{name: sent})[0]
        return self._sent[id(value)][1]

    def check_store(self, window: int, in_step: bool) -> None:
        """Raise MemoryError if the object store cannot hold all windows in flight at this window size."""
        if window <= self._largest:
            return

        self._largest, count = window, len(self._configs)
        # room for this version and the next
        if self._flat is None:
            weights = 0
        else:
            weights = 2 * self._flat.nbytes
        need = count * self.in_flight * window + weights
        room = self.calls.store_bytes()
        if need > room:
            if in_step:
                each = ""
            else:
                each = f" x max_in_flight={self.in_flight}"

            raise MemoryError(
                f"{count} collectors{each} windows of {window:,} bytes and {weights:,} bytes of weights need "
                f"{need:,} bytes of the object store, which has {room:,}: use a smaller frames_per_batch, "
                f"fewer collectors, or a larger store, ray_init_config={{'object_store_memory': {2 * need}}}"
            )

    @staticmethod
    def under_way(link: Any) -> int:
        """Number of windows of an actor that are being collected or wait in the object store."""
        return len(link.under_way)

    def wait(self, links: "Sequence[Actor]", timeout: float | None, wake: Wake | None = None) -> None:
        # Longest wait first: Ray returns the first references that are ready.
        heads = {
            link.head: link for link in sorted(links, key=lambda link: link.served) if link.head is not None
        }
        ends = inf if timeout is None else monotonic() + timeout

        while not (wake is not None and wake.is_set()):
            left = max(0.0, ends - monotonic())
            seconds = left if wake is None else min(left, _LOOK)
            if seconds == inf:
                timeout = None
            else:
                timeout = seconds
            ready = self.calls.wait(list(heads), timeout)
            for head in ready:
                heads[head].is_ready = True
            if ready or wake is None or monotonic() >= ends:
                return

    def end(self, links: "Sequence[Actor]", timeout: float) -> None:
        ends = monotonic() + timeout
        if timeout > 0 and self._with_signals:  # otherwise `close` waits for all requested windows
            for link in links:
                self.calls.call(link.actor, "stop", group=_ASIDE)

        if timeout > 0:
            closing = [self.calls.call(link.actor, "close") for link in links]
        else:
            closing = []

        while closing and (left := ends - monotonic()) > 0:
            ready = self.calls.wait(closing, left)
            closing = [reference for reference in closing if reference not in ready]

        for link in links:
            link.kill()
            link.forget()

    def close(self) -> None:
        if not self._closed:
            self.calls.close()
            self._closed = True


class Actor:
    """A worker in an actor.

    Attributes:
        head: the reference that is answered next; None if nothing is pending.
        served: message count when something of it was received last.
        is_ready: whether the head has been answered.
    """

    def __init__(
        self, actors: Actors, actor: Any, job: Job, config: Mapping[str, Any], starting: Any
    ) -> None:
        self.name = f"collector {job.place} (writer {job.writer})"
        self.actor = actor
        self.served = 0
        self.is_ready = False
        self._actors = actors
        self._job = job
        self._config = config
        self._starting = starting  # the call that creates the collector, until answered

        #: (Request number, reference to the answer, reference to the rows), oldest first.
        self.under_way: deque[tuple[int, Any, Any]] = deque()
        self._asked = 0
        self._request = (0, WITHOUT_END)
        self._ended = False
        self._version = -1  # version of the weights sent last
        self._windows = 0
        self._began = -inf  # time of its last request received while idle

    def __str__(self) -> str:
        return self.name

    @property
    def head(self) -> Any:
        if self._starting is not None:
            return self._starting
        if self.under_way:
            return self.under_way[0][1]
        return None

    def ask(self, rows: int, limit: int) -> None:
        self._asked, self._request, self._ended = self._asked + 1, (rows, limit), False
        if self._job.sync:
            self._call()

    def go_on(self, windows: int) -> None:
        while not self._ended and len(self.under_way) < min(self._actors.in_flight, windows):
            self._call()

    def _call(self) -> None:
        actors = self._actors
        if self._version == actors.version:
            weights = None
        else:
            weights = actors.weights

        self._version = actors.version
        self._windows += 1
        if not self.under_way:
            self._began = monotonic()
        answer, rows = actors.calls.call(
            self.actor, "collect", actors.version, weights, *self._request, returns=2
        )
        self.under_way.append((self._asked, answer, rows))

    def cut(self) -> None:
        self._actors.calls.call(self.actor, "cut", self._windows, group=_ASIDE)

    def receive(self) -> tuple[str, Any] | None:
        if not self.is_ready or self.head is None:
            return None

        actors = self._actors
        answer = self._get(self.head)
        if isinstance(answer, Failure):
            if self._starting is not None:
                phase = ", while its collector was made"
            else:
                phase = ""
            answer.throw(self.name + phase)

        if self._starting is not None:
            actors.check_store(answer.row_bytes * self._job.frames_per_batch, self._job.sync)
            self._starting = None
            self.is_ready = False
            return READY, answer

        number, _, reference = self.under_way[0]
        window: LocalWindow | None = None
        if answer.has_rows:
            actors.check_store(answer.nbytes, self._job.sync)
            if actors.by_reference:
                window = RowsElsewhere([], answer.note, reference=reference)
            else:
                tables = [
                    dict(unpack_batches(table).items(True, True))
                    for table in self._get(reference)
                    if table is not None
                ]
                window = LocalWindow(tables, answer.note)

        self.under_way.popleft()
        self.is_ready = False
        actors.served += 1
        self.served = actors.served
        if window is not None:
            return WINDOW, window
        if number != self._asked:  # it has collected everything requested already
            self.go_on(1)
            return None
        self._ended = True

        return END, answer.note

    def _get(self, reference: Any) -> Any:
        try:
            return self._actors.calls.get(reference)
        except WorkerDied as error:
            raise WorkerDied(f"{self.name}: {error}") from error

    def quiet(self, since: float, limit: float) -> float:
        # Waiting for a slow learner does not count: the actor was idle until the request.
        quiet = monotonic() - max(since, self._began)
        calls = self._actors.calls
        if self._actors.writers_of_each > 1:  # a MultiCollector watches its own workers
            return 0.0
        if quiet < limit:
            return quiet

        asked = calls.call(self.actor, "step_seconds", group=_ASIDE)
        if not calls.wait([asked], _PATIENCE):
            return quiet

        try:
            seconds = calls.get(asked)
        except WorkerDied:  # the next receive() reports it
            return 0.0
        return float(seconds)

    def not_ready(self, limit: float) -> str:
        asks = {name: value for name, value in self._config.items() if name != "concurrency_groups"}
        return (
            f"no node had room for an actor, or its env took too long to be made, within start_timeout={limit} s: "
            f"{self.name} asks for {asks}. Ask for less with remote_configs, or add nodes"
        )

    def kill(self) -> None:
        self._actors.calls.kill(self.actor)

    def forget(self) -> None:
        """Drop all pending references."""
        self._starting = None
        self.under_way.clear()


def _on_cpu(policy: Any) -> Any:
    """Return the policy, or a CPU copy if it has parameters on another device, which nodes may not have."""
    if isinstance(policy, nn.Module) and any(
        value.device.type != "cpu" for value in policy.state_dict().values()
    ):
        return copy.deepcopy(policy).cpu()
    return policy


def weight_layout(state: Mapping[str, Tensor]) -> dict[str, BlockColumn]:
    """Return the dtype and shape of each weight, by name.

    Raises:
        TypeError: an entry is not a tensor.

    >>> weight_layout(torch.nn.Linear(2, 1).state_dict())["weight"]
    BlockColumn(dtype='float32', shape=(1, 2))
    """
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"weight {name!r} is of type {type(value).__name__}: only tensors can be sent")
    return {name: BlockColumn(dtype_name(value), tuple(value.shape)) for name, value in state.items()}


def flatten_weights(state: Mapping[str, Tensor], layout: Mapping[str, BlockColumn]) -> np.ndarray[Any, Any]:
    """Return the concatenated bytes of all weights, uint8 ``[bytes]``.

    Raises:
        ValueError: names, dtypes or shapes differ from ``layout``.
    """
    came = weight_layout(state)
    if came != dict(layout):
        names = [name for name in {**layout, **came} if layout.get(name) != came.get(name)]
        changes = ", ".join(f"{name!r} was {layout.get(name)}, got {came.get(name)}" for name in names[:3])
        raise ValueError(
            f"the policy's weights have changed their names or shapes ({changes}): its actors cannot load them, "
            "create a new collector"
        )

    parts = [state[name].detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy() for name in layout]
    if parts:
        return np.concatenate(parts)
    return np.zeros(0, np.uint8)


def unflatten_weights(flat: np.ndarray[Any, Any], layout: Mapping[str, BlockColumn]) -> dict[str, Tensor]:
    """Return the weights in new memory; the inverse of `flatten_weights`.

    >>> state = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor(3)}
    >>> layout = weight_layout(state)
    >>> unflatten_weights(flatten_weights(state, layout), layout)
    {'a': tensor([1., 2.]), 'b': tensor(3)}
    """
    state = {}
    start = 0
    for name, column in layout.items():
        dtype: torch.dtype = getattr(torch, column.dtype)
        end = start + prod(column.shape) * dtype.itemsize
        # Copied, because the offset in the array may be unaligned for the dtype.
        state[name] = torch.from_numpy(flat[start:end].copy()).view(dtype).view(column.shape)
        start = end

    return state
