"""`RayReplayBuffer`: a replay buffer in an actor of a Ray cluster, for several trainers."""

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.replay_buffer import ReplayBuffer
from flatroll.buffers.transforms.transform import Transform
from flatroll.buffers.writers import has_priorities
from flatroll.layout.checks import check_seed, check_whole_number
from flatroll.layout.inspect.text import Facts
from flatroll.sharing.on_ray.calls import Calls, RayCalls, attempt, pack_batches, put_named, unpack_batches
from flatroll.sharing.worker import Failure, WorkerDied


class Weight(NamedTuple):
    """The weight of a buffer in an ensemble of buffers.

    Attributes:
        total: number of rows, or the sum of P = ``(priority + eps) ** alpha`` of the rows that can be drawn.
        least: smallest P, infinite without rows. Without priorities 1.
        beta: exponent of the importance weights. Without priorities 0.
        unit: rows that are drawn together, as a slice.
    """

    total: float
    least: float
    beta: float
    unit: int


class BufferActor:
    """Holds the buffer. Batches are packed, errors are returned as values."""

    _buffer: Any = None

    def start(self, kind: Callable[..., Any], parts: Mapping[str, Any], options: Mapping[str, Any]) -> Any:
        """Create the buffer ``kind(**parts(), **options)``; return None or a `Failure`."""
        return attempt(self._start, kind, parts, dict(options))

    def _start(self, kind: Callable[..., Any], parts: Mapping[str, Any], options: dict[str, Any]) -> None:
        seed = options.pop("seed")
        if seed is not None:
            options["generator"] = torch.Generator().manual_seed(check_seed("seed", seed))
        self._buffer = kind(**{name: make() for name, make in parts.items()}, **options)

    def run(self, method: str, *arguments: Any) -> Any:
        """Call a method of the buffer; return its packed result or a `Failure`."""
        return attempt(self._run, method, *arguments)

    def _run(self, method: str, *arguments: Any) -> Any:
        target = self if method in ("draw", "weight") else self._buffer
        function = getattr(target, method)
        return pack_batches(function(*map(unpack_batches, arguments)))

    def draw(self, rows: int) -> tuple[Any, dict[str, Any], Weight]:
        """Return a sample of the buffer, its info, and the buffer's weight."""
        sample, info = self._buffer.sample(rows, True)
        return sample, info, self.weight()

    def weight(self) -> Weight:
        """Return the buffer's weight in an ensemble."""
        buffer = self._buffer
        sampler = buffer.sampler

        unit = getattr(sampler, "slice_len", 1)
        if unit is None:
            raise ValueError(
                f"{type(sampler).__name__} in a RayReplayBufferEnsemble needs slice_len: shards give different numbers "
                "of slices, so num_slices alone does not determine their length"
            )

        if not len(buffer) or not has_priorities(sampler):
            return Weight(float(len(buffer)), 1.0, 0.0, unit)

        total, least = sampler.mass(buffer.ring)
        return Weight(total, least, sampler.beta, unit)

    def extend(self, rows: Any) -> Any:
        """Extend the buffer with packed rows and their *final*; return the number of rows or a `Failure`."""
        return attempt(self._extend, rows)

    def _extend(self, rows: Any) -> int:
        batch, final = unpack_batches(rows)
        options = {}
        if final is not None:
            options["final"] = final
        return len(self._buffer.extend(batch, **options))


class RayReplayBuffer(Facts):
    """A `ReplayBuffer` in a Ray actor; any process of the cluster may use it.

    Only the actor writes. Each call is a round trip to it and much slower than a local buffer, so a single trainer
    should use an ordinary `ReplayBuffer` that a `RayCollector` fills. For several trainers, ``prefetch`` samples are
    requested ahead. Requires Ray: ``pip install 'flatroll[ray]'``.

    Parts are given as functions that create them in the actor. Pickled into a Ray task or actor, it remains the same
    buffer.

    Args:
        storage: a function that makes the storage, such as ``partial(LazyTensorStorage, 100_000)``.
        sampler, writer, transform: likewise. Default: those of the buffer.
        batch_size: rows per sample.
        prefetch: number of samples requested ahead, possibly drawn before the latest ``extend`` or
            ``update_priority``; needs ``batch_size``. Default None: none.
        seed: seed of all draws. Default None: random.
        buffer_cls: the class of the buffer. Default: `ReplayBuffer`.
        remote_config: options of ``ray.remote`` for the actor. Default: no reserved CPU, no restart.
        ray_init_config: see `flatroll.rollouts.RayCollector`.
        calls: runs the actor. Default: Ray.
        options: further arguments of the buffer, such as ``collate_fn``.

    Raises:
        ImportError: Ray is not installed.
        TypeError: a part is not a function, or cannot be pickled.
        WorkerDied: the actor died; restore its rows from a saved ``state_dict``.
        BaseException: raised by the buffer, with the actor's traceback as its cause.

    >>> from functools import partial
    >>> from flatroll.buffers import LazyTensorStorage
    >>> with RayReplayBuffer(storage=partial(LazyTensorStorage, 100), batch_size=4) as buffer:  # doctest: +SKIP
    ...     len(buffer)
    0
    """

    _actor: Any = None  # None until it has been created

    def __init__(
        self,
        *,
        storage: Callable[[], Any] | None = None,
        sampler: Callable[[], Any] | None = None,
        writer: Callable[[], Any] | None = None,
        transform: Callable[[], Any] | None = None,
        batch_size: int | None = None,
        prefetch: int | None = None,
        seed: int | None = None,
        buffer_cls: Callable[..., Any] = ReplayBuffer,
        remote_config: Mapping[str, Any] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        calls: Calls | None = None,
        **options: Any,
    ) -> None:
        parts = {"storage": storage, "sampler": sampler, "writer": writer, "transform": transform}
        parts = {name: part for name, part in parts.items() if part is not None}

        for name, part in parts.items():
            if not callable(part) or isinstance(part, Transform):  # a class is callable as well
                raise TypeError(
                    f"{name} must be a function that makes one in the actor, such as partial(LazyTensorStorage, 1000) "
                    f"for a storage, got {type(part).__name__}"
                )

        if prefetch:
            check_whole_number("prefetch", prefetch)
            if batch_size is None:
                raise ValueError("prefetch needs a batch_size: samples are drawn ahead")

        config = {"num_cpus": 0, **(remote_config or {})}
        if config.pop("max_restarts", 0):
            raise ValueError("remote_config must leave max_restarts at 0: a restarted buffer would be empty")

        self.batch_size = batch_size
        self.prefetch = prefetch

        self._under_way: deque[Any] = deque()
        self._calls = RayCalls(ray_init_config) if calls is None else calls

        try:
            put_named(self._calls, **parts, **options)  # one by one, so that an error names the argument
            self._actor = self._calls.make(BufferActor, config)
            settings = {"batch_size": batch_size, "seed": seed, **options}
            self.result(self._calls.call(self._actor, "start", buffer_cls, parts, settings))
        except BaseException:
            self.shutdown()
            raise

    def result(self, reference: Any) -> Any:
        """Wait for the result of a call that `begin` began, and copy it out."""
        try:
            answer = self._calls.get(reference)
        except WorkerDied as error:
            raise WorkerDied(
                f"the replay buffer's actor: {error}. Make a new buffer, and give it the last state_dict that was saved"
            ) from error

        if isinstance(answer, Failure):
            answer.throw("the replay buffer's actor")
        return unpack_batches(answer)

    def _run(self, method: str, *arguments: Any) -> Any:
        return self.result(self.begin(method, *arguments))

    def begin(self, method: str, *arguments: Any) -> Any:
        """Begin a call of the buffer's method without waiting; return a reference for `result`."""
        if self._actor is None:
            raise RuntimeError("the buffer is closed (by shutdown): make a new one")

        return self._calls.call(self._actor, "run", method, *map(pack_batches, arguments))

    # -- writing -----------------------------------------------------------------------------------------------

    def extend(self, data: Any, final: TensorDictBase | None = None) -> Tensor:
        """As `ReplayBuffer.extend`."""
        arguments = [data]
        if final is not None:
            arguments.append(final)
        positions: Tensor = self._run("extend", *arguments)
        return positions

    def extend_reference(self, rows: Any, place: int = 0) -> int:
        """Store packed rows with their *final* from the object store, without a copy through this process.

        Args:
            rows: a reference to the result of `flatroll.sharing.on_ray.calls.pack_batches` for ``(batch, final)``.
            place: index of the collector's actor that made them; not used here.

        Returns:
            Number of rows.
        """
        if self._actor is None:
            raise RuntimeError("the buffer is closed (by shutdown): make a new one")

        count: int = self.result(self._calls.call(self._actor, "extend", rows))
        return count

    def add(self, data: Any) -> int:
        """As `ReplayBuffer.add`."""
        return int(self._run("add", data))

    def update_priority(self, index: Any, priority: Any, generation: Tensor | None = None) -> None:
        """As `ReplayBuffer.update_priority`; pending samples were drawn before."""
        self._run("update_priority", index, priority, generation)

    def note_waiting(self, rows: int) -> None:
        """As `ReplayBuffer.note_waiting`."""
        self._run("note_waiting", rows)

    def empty(self) -> None:
        """Remove all rows and drop pending samples."""
        self._run("empty")
        self._under_way.clear()

    # -- reading -----------------------------------------------------------------------------------------------

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """As `ReplayBuffer.sample`; returns the oldest pending sample, if there is one."""
        if not self.prefetch or batch_size not in (None, self.batch_size):
            sample, info = self._run("sample", batch_size, True)
        else:
            while len(self._under_way) <= self.prefetch:
                self._under_way.append(self.begin("sample", None, True))
            sample, info = self.result(self._under_way.popleft())

        if return_info:
            return sample, info
        return sample

    def __iter__(self) -> Iterator[Any]:
        """Iterate over samples forever."""
        while True:
            yield self.sample()

    def __len__(self) -> int:
        return int(self._run("__len__"))

    def __getitem__(self, index: Any) -> Any:
        """As `ReplayBuffer.__getitem__`."""
        return self._run("__getitem__", index)

    def stats(self) -> dict[str, Any]:
        """As `ReplayBuffer.stats`."""
        return dict(self._run("stats"))

    # -- state -------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """As `ReplayBuffer.state_dict`; all rows are copied to this process."""
        return dict(self._run("state_dict"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """As `ReplayBuffer.load_state_dict`; pending samples are dropped."""
        self._run("load_state_dict", state)
        self._under_way.clear()

    def shutdown(self) -> None:
        """Stop the actor, which drops its rows, and Ray if it was started here; a second call does nothing."""
        actor = self._actor
        self._actor = None
        self._under_way.clear()
        if actor is not None:
            self._calls.kill(actor)
        self._calls.close()

    def __enter__(self) -> "RayReplayBuffer":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def __getstate__(self) -> dict[str, Any]:
        return {"_actor": self._actor, "batch_size": self.batch_size, "prefetch": self.prefetch}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._under_way = deque()
        self._calls = RayCalls()

    def _facts(self) -> dict[str, Any]:
        """What `repr` and notebooks show."""
        state = "closed" if self._actor is None else "in an actor"
        return {"": state, "prefetch": self.prefetch or 0}
