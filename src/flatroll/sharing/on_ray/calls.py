"""A few calls that hide Ray: make an actor, call it, wait, get and put; and batches in a form for its object store.
Nothing else in flatroll imports Ray."""

import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import ceil
from typing import Any, Protocol

import numpy as np
import psutil
import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from flatroll.sharing.worker import Failure, WorkerDied

#: Arguments of ``ray.init`` that are allowed only when it starts a cluster.
_OF_STARTERS = {"num_cpus", "num_gpus", "resources", "labels", "object_store_memory", "include_dashboard"}
_LARGEST_DEFAULT_STORE = 2**30  # bytes
#: Ray's errors for a lost actor, node or result. Not every version has all of them.
_DEATHS = (
    "RayActorError", "ActorUnschedulableError", "LocalRayletDiedError", "NodeDiedError", "ObjectLostError",
    "OutOfDiskError", "OutOfMemoryError", "RaySystemError", "WorkerCrashedError",
)  # fmt: skip


def attempt(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function in an actor: its result, or a `Failure` with what it raised."""
    try:
        return function(*arguments)
    except BaseException as error:
        return Failure.of(error)


class Calls(Protocol):
    """The part of Ray that flatroll uses. Tests substitute one that runs in their own process."""

    def make(self, kind: type, options: Mapping[str, Any]) -> Any:
        """Return a new actor ``kind()``; ``options`` are those of ``ray.remote``."""

    def call(
        self, actor: Any, method: str, *arguments: Any, returns: int = 1, group: str | None = None
    ) -> Any:
        """Begin a call; return a reference to its result, or a list of them. Arguments that are references come as
        what they refer to. The calls of one actor run one after the other, in this order; those of a ``group`` that the
        actor's options name in ``concurrency_groups`` run in parallel with the others."""

    def wait(self, references: Sequence[Any], timeout: float | None = None) -> list[Any]:
        """Wait for one of these results and return all that are ready; none after ``timeout`` seconds."""
        ...

    def get(self, reference: Any) -> Any:
        """Return a result, or a `Failure`. Its arrays are read-only views of the object store: copy them at once.

        Raises:
            WorkerDied: the actor or the node that held the result has died.
        """

    def put(self, value: Any) -> Any:
        """Store a value once for many calls; return a reference to it."""

    def kill(self, actor: Any) -> None:
        """Kill an actor, even in the middle of a call."""

    def store_bytes(self) -> int:
        """Return the size of the object store, summed over all nodes."""
        ...

    def close(self) -> None:
        """End the cluster if it was started here."""


class RayCalls:
    """Calls Ray, which is started or joined if this process has not done so.

    A cluster that the environment names is joined (Ray's own rules of ``address="auto"``: ``RAY_ADDRESS``, or one that
    ``ray start`` started on this machine). Else a local one is started: on the loopback interface only, without a
    dashboard, with a bounded object store. ``close()`` ends a cluster that was started here, and no other.

    Args:
        config: arguments of ``ray.init``; those for starting one are ignored when it joins a cluster.
        cpus: number of CPUs of a local cluster, as many as actors will request, even if the machine has fewer cores.

    Raises:
        ImportError: Ray is not installed; the message names the extra.
    """

    def __init__(self, config: Mapping[str, Any] | None = None, cpus: float = 0.0) -> None:
        self._ray: Any = import_ray()
        self._started = False
        if self._ray.is_initialized():
            return

        given = {"logging_level": logging.WARNING, **(config or {})}
        joining = {name: value for name, value in given.items() if name not in _OF_STARTERS}

        try:
            if given.get("address") != "local":
                self._ray.init(**{"address": "auto", **joining})
                return
        except ConnectionError as error:
            # Ray's message if no cluster is named; if a named one does not answer, that is an error.
            if "address" in given or "any running Ray instance" not in str(error):
                raise

        store = min(_LARGEST_DEFAULT_STORE, psutil.virtual_memory().available // 4)
        own = {
            "include_dashboard": False,
            "num_cpus": max(os.cpu_count() or 1, ceil(cpus)),
            "object_store_memory": store,
        }

        with _on_loopback():
            self._ray.init(**(own | given | {"address": "local"}))
        self._started = True

    def make(self, kind: type, options: Mapping[str, Any]) -> Any:
        # Ray must not restart an actor: it would reuse the ids of its rows.
        return self._ray.remote(**options, max_restarts=0, max_task_retries=0)(kind).remote()

    def call(
        self, actor: Any, method: str, *arguments: Any, returns: int = 1, group: str | None = None
    ) -> Any:
        function = getattr(actor, method)
        options: dict[str, Any] = {}
        if returns != 1:
            options["num_returns"] = returns
        if group is not None:
            options["concurrency_group"] = group
        if options:
            function = function.options(**options)
        return function.remote(*arguments)

    def wait(self, references: Sequence[Any], timeout: float | None = None) -> list[Any]:
        return list(self._ray.wait(list(references), num_returns=1, timeout=timeout)[0])

    def get(self, reference: Any) -> Any:
        errors = self._ray.exceptions
        try:
            return self._ray.get(reference)
        except tuple(getattr(errors, name) for name in _DEATHS if hasattr(errors, name)) as error:
            raise WorkerDied(f"the actor is gone: {error}") from error
        except errors.RayTaskError as error:  # not in `attempt`: arguments or results that cannot be pickled
            cause = error.cause
            if not isinstance(cause, BaseException):
                cause = error
            return Failure.of(cause, trace=str(error))

    def put(self, value: Any) -> Any:
        return self._ray.put(value)

    def kill(self, actor: Any) -> None:
        if self._ray.is_initialized():
            self._ray.kill(actor, no_restart=True)

    def store_bytes(self) -> int:
        return int(self._ray.cluster_resources().get("object_store_memory", 0))

    def close(self) -> None:
        if self._started:
            self._started = False
            self._ray.shutdown()


def import_ray() -> Any:
    """Return the module ``ray``; ImportError with the extra's name if it is missing."""
    try:
        import ray  # pyright: ignore[reportMissingImports]
        import ray.exceptions  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        raise ImportError(
            f"RayCollector and RayReplayBuffer need Ray ({error}): pip install 'flatroll[ray]'"
        ) from error
    return ray


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Let a local Ray listen on 127.0.0.1 only.

    On Linux it would use the address visible to other machines, even if 127.0.0.1 is requested. On macOS and Windows
    this switch of Ray's is off by default.
    """
    from ray._private import ray_constants  # pyright: ignore[reportMissingImports]

    name = "ENABLE_RAY_CLUSTER"
    before = getattr(ray_constants, name, None)
    try:
        if before:
            setattr(ray_constants, name, False)
        yield
    finally:
        if before:
            setattr(ray_constants, name, before)


def put_named(calls: Calls, **values: Any) -> list[Any]:
    """Store each value; TypeError with the name of the first that cannot be pickled."""
    references = []
    for name, value in values.items():
        try:
            references.append(calls.put(value))
        except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
            raise TypeError(
                f"{name} cannot be sent to an actor, because pickling fails: {error}. Create such objects in the "
                "actor, in a function that is sent instead"
            ) from error
    return references


Key = str | tuple[str, ...]


@dataclass(frozen=True)
class Packed:
    """A tensordict as arrays.

    Attributes:
        shape: its batch size.
        columns: an array for each entry, by key.
        dtypes: torch dtype of columns whose dtype NumPy lacks; their arrays hold the bits as int16.
    """

    shape: tuple[int, ...]
    columns: dict[Key, np.ndarray[Any, Any]]
    dtypes: dict[Key, torch.dtype]

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(array.nbytes for array in self.columns.values())


def pack_batches(value: Any) -> Any:
    """Convert tensordicts, also in tuples, to `Packed`; return anything else unchanged.

    Arrays share memory with tensors on the CPU.

    Raises:
        TypeError: an entry is not a tensor.

    >>> packed = pack_batches(TensorDict({"reward": torch.ones(2)}, [2]))
    >>> packed.columns, unpack_batches(packed)["reward"]
    ({'reward': array([1., 1.], dtype=float32)}, tensor([1., 1.]))
    """
    if isinstance(value, tuple):
        return tuple(map(pack_batches, value))
    if not isinstance(value, TensorDictBase):
        return value

    columns = {}
    dtypes = {}
    for key, entry in value.items(True, True, is_leaf=is_leaf_nontensor):
        if not isinstance(entry, Tensor):
            raise TypeError(
                f"entry {key!r} is of type {type(entry).__name__}: only tensors go through Ray's object store, "
                "leave it out or convert it to a tensor"
            )

        column = entry.detach().cpu()
        if column.dtype is torch.bfloat16:
            dtypes[key] = column.dtype
            column = column.view(torch.int16)
        columns[key] = column.numpy()

    return Packed(tuple(value.batch_size), columns, dtypes)


def unpack_batches(value: Any) -> Any:
    """Invert `pack_batches`; the result owns its memory and does not refer to the object store."""
    if isinstance(value, tuple):
        return tuple(map(unpack_batches, value))
    if not isinstance(value, Packed):
        return value

    batch = TensorDict({}, value.shape)
    for key, array in value.columns.items():
        column = torch.from_numpy(np.array(array))
        if key in value.dtypes:
            column = column.view(value.dtypes[key])
        batch.set(key, column)
    return batch
