"""Replay buffers for tensordicts, which write positions into samples, and prioritized replay buffers."""

import math
from collections.abc import Callable
from typing import Any, TypedDict, Unpack

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.index.ring import Ring
from flatroll.buffers.replay_buffer import ReplayBuffer
from flatroll.buffers.samplers.prioritized import PrioritizedSampler
from flatroll.buffers.samplers.sampler import Sampler
from flatroll.buffers.storages.item_kinds import TensorDicts
from flatroll.buffers.storages.list import ListStorage
from flatroll.buffers.storages.records import Rows
from flatroll.buffers.storages.storage import Storage
from flatroll.buffers.transforms.transform import TransformLike
from flatroll.buffers.writers import TensorDictRoundRobinWriter, Writer, check_tensordicts, has_priorities
from flatroll.layout.checks import check_keys, check_type
from flatroll.layout.keys import NestedKey

_INDEX = "index"
_GENERATION = "index_generation"

#: Entries that the buffer adds to samples. They are not stored when a sample is passed to extend.
_SAMPLE_ENTRIES = (_INDEX, "priority_weight", _GENERATION)


class Options(TypedDict, total=False):
    """Keyword arguments shared by all replay buffers; `ReplayBuffer` documents them."""

    writer: Writer | None
    collate_fn: Callable[[Any], Any] | None
    prefetch: int | None
    transform: TransformLike | None
    batch_size: int | None
    dim_extend: int | None
    generator: torch.Generator | None
    shared: bool
    compilable: bool | None


class TensorDictReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` of tensordicts that writes the positions of a sample's rows into the sample.

    A sample has the entry ``"index"`` (int64 ``[N]``, or ``[N, ndim]``), the positions of its rows, and, with a
    prioritized sampler, ``"priority_weight"`` (float32 ``[N]``) and ``"index_generation"`` (int64 ``[N]``). They are
    written before transforms see the sample. These three names are the buffer's own: batches to store may have them,
    as samples do, but they are not stored.

    With a prioritized sampler, a batch to store that has the entry ``priority_key`` sets the priorities of its rows,
    and `update_tensordict_priority` takes a sample as it is. Several values per row are reduced to one by the
    sampler's ``reduction``.

    Args:
        priority_key: entry of the priorities, default ``"td_error"``.
        storage, sampler, options: the arguments of `ReplayBuffer`; the default writer is `TensorDictRoundRobinWriter`.

    Raises:
        TypeError: at ``extend`` and ``add``, data are not tensordicts.
        ValueError: at ``extend`` and ``add``, a priority that is negative, NaN or infinite. Nothing is stored then.

    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage
    >>> buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(10), batch_size=3)
    >>> rows = buffer.extend(TensorDict({"x": torch.arange(5.0)}, [5]))
    >>> sample = buffer.sample()
    >>> torch.equal(sample["x"], sample["index"].float())
    True
    """

    def __init__(
        self,
        storage: Storage | None = None,
        *,
        priority_key: NestedKey = "td_error",
        sampler: Sampler | None = None,
        **options: Unpack[Options],
    ) -> None:
        check_keys(priority_key=priority_key)
        self.priority_key = priority_key
        if options.get("writer") is None:
            options["writer"] = TensorDictRoundRobinWriter()
        super().__init__(storage=storage, sampler=sampler, **options)

    @override
    def _write(self, data: Any, final: TensorDictBase | None, prioritize: bool = True) -> Tensor:
        check_tensordicts(data, type(self).__name__, "ReplayBuffer takes anything")
        return super()._write(_without_sample_entries(data), final, prioritize)

    @override
    def _store(self, ring: Ring, rows: Rows, filled: bool, prioritize: bool) -> Tensor:
        # Checked before rows are stored.
        priorities = self._given_priorities(rows) if prioritize else []
        slots = super()._store(ring, rows, filled, prioritize)

        with self.lock:
            for part, priority in priorities:
                self.sampler.update_priority(ring, slots[part], priority, None)
        return slots

    def _given_priorities(self, rows: Rows) -> list[tuple[slice, Tensor]]:
        """The priorities that new rows come with, checked: (which rows, their values ``[n, ...]``)."""
        if not has_priorities(self.sampler):
            return []

        priorities = []
        column = rows.columns.get(self.priority_key)
        if column is not None:
            priorities.append((slice(None), column))
        for i, item in enumerate(rows.items):  # with a ListStorage each item may have one
            value = item.get(self.priority_key, None)
            if value is not None:
                priorities.append((slice(i, i + 1), value[None]))

        for part, priority in priorities:
            if not ((priority >= 0) & (priority < math.inf)).all():
                raise ValueError(
                    f"batch[{self.priority_key!r}] must be finite and not negative, got "
                    f"{float(priority.min())} ... {float(priority.max())} in rows "
                    f"[{part.start or 0}:{part.stop or ''}]: it is the priority_key; pass abs(td_error), or "
                    "another priority_key"
                )

        return priorities

    @override
    def overwrite(self, index: Any, data: Any) -> None:
        super().overwrite(index, _without_sample_entries(data))

    @override
    def _inform(self, values: Any, info: dict[str, Tensor]) -> Any:
        if isinstance(values, list):  # items of a ListStorage: do not change the stored ones
            for i, item in enumerate(values):
                entries = {key: _spread(entry[i : i + 1], item.batch_size)[0] for key, entry in info.items()}
                values[i] = item.clone(recurse=False).update(entries)
            return values

        assert isinstance(self.storage.structure, TensorDicts)
        device = next(iter(values.values())).device
        for key, entry in info.items():
            values[key] = _spread(entry, self.storage.structure.inner).to(device)
        return values

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of the rows of a sample to its entry ``priority_key``.

        Rows that were overwritten since the sample was drawn are left out, if the sample still has its
        ``"index_generation"``.

        Args:
            data: the sample, in its own batch shape, reshaped, or a part of it. Of a buffer of whole trajectories,
                the time dimension must still be there.

        Raises:
            KeyError: ``priority_key`` or ``"index"`` is missing.
            TypeError: the sampler has no priorities, or ``data`` is not a tensordict.
            ValueError: a negative or infinite priority, or NaN.
        """
        check_tensordicts(data, "update_tensordict_priority", "update_priority takes index and priority")
        index = data.get(_INDEX, None)
        priority = data.get(self.priority_key, None)
        generation = data.get(_GENERATION, None)
        if index is None or priority is None:
            missing = _INDEX if index is None else self.priority_key
            raise KeyError(
                f"data has no entry {missing!r}: update_tensordict_priority "
                f"takes a sample of this buffer, with its {_INDEX!r} and with the new priorities in "
                f"{self.priority_key!r} (priority_key)"
            )

        # Batch dims of a stored item: 0 for rows, 1 for whole trajectories.
        inner = 0
        structure = self.storage.structure
        if isinstance(structure, TensorDicts):
            inner = len(structure.inner)
        elif isinstance(self.storage, ListStorage) and index.numel():
            inner = len(self.storage.read_rows(index.reshape(-1)[:1])[0].batch_size)

        dims = data.batch_dims - inner
        if dims < 0:
            raise ValueError(
                f"data has batch size {list(data.batch_size)}, items have {inner} batch dimensions of their own: pass "
                "the sample in its original shape"
            )

        index = _one_each(index, dims, inner)
        priority = _one_each(priority, dims, 0)
        if generation is not None:
            generation = _one_each(generation, dims, inner)
        self.update_priority(index, priority, generation)


class PrioritizedReplayBuffer(ReplayBuffer):
    """A `ReplayBuffer` with a `PrioritizedSampler`, for data of any kind.

    ``sample(return_info=True)`` gives ``info["index"]``, ``info["priority_weight"]`` and
    ``info["index_generation"]``, which ``update_priority`` takes.

    Args:
        alpha, beta, eps, dtype: see `PrioritizedSampler`.
        storage: default ``ListStorage(1000)``.
        options: the other arguments of `ReplayBuffer` but ``sampler``.

    >>> buffer = PrioritizedReplayBuffer(alpha=0.7, beta=0.9, storage=ListStorage(10), batch_size=4)
    >>> rows = buffer.extend(list(range(10)))
    >>> buffer.update_priority(rows, torch.tensor([0.0] * 9 + [1.0]))
    >>> buffer.sample()
    [9, 9, 9, 9]
    """

    def __init__(
        self,
        storage: Storage | None = None,
        *,
        alpha: float,
        beta: float,
        eps: float = 1e-8,
        dtype: torch.dtype = torch.float,
        **options: Unpack[Options],
    ) -> None:
        if storage is None:
            storage = ListStorage()
        check_type("storage", storage, Storage, "a storage such as LazyTensorStorage(max_size)")
        sampler = PrioritizedSampler(storage.most_rows, alpha, beta, eps, dtype)
        super().__init__(storage, sampler=sampler, **options)


class TensorDictPrioritizedReplayBuffer(TensorDictReplayBuffer):
    """A `TensorDictReplayBuffer` with a `PrioritizedSampler`.

    Args:
        alpha, beta, eps, reduction: see `PrioritizedSampler`.
        priority_key: see `TensorDictReplayBuffer`.
        storage: default ``ListStorage(1000)``.
        options: the other arguments of `ReplayBuffer` but ``sampler``.

    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage
    >>> buffer = TensorDictPrioritizedReplayBuffer(
    ...     alpha=0.7, beta=0.5, storage=LazyTensorStorage(10), batch_size=4)
    >>> rows = buffer.extend(TensorDict({"x": torch.arange(5.0)}, [5]))
    >>> sample = buffer.sample()
    >>> sample["td_error"] = sample["x"]
    >>> buffer.update_tensordict_priority(sample)
    >>> sorted(sample.keys())
    ['index', 'index_generation', 'priority_weight', 'td_error', 'x']
    """

    def __init__(
        self,
        storage: Storage | None = None,
        *,
        alpha: float,
        beta: float,
        priority_key: NestedKey = "td_error",
        eps: float = 1e-8,
        reduction: str = "max",
        **options: Unpack[Options],
    ) -> None:
        if storage is None:
            storage = ListStorage()
        check_type("storage", storage, Storage, "a storage such as LazyTensorStorage(max_size)")
        sampler = PrioritizedSampler(storage.most_rows, alpha, beta, eps, reduction=reduction)
        super().__init__(priority_key=priority_key, storage=storage, sampler=sampler, **options)


def _without_sample_entries(data: Any) -> Any:
    """``data`` without the entries that the buffer writes into samples."""
    if isinstance(data, list):
        return [_without_sample_entries(item) for item in data]
    if isinstance(data, TensorDictBase) and any(data.get(key, None) is not None for key in _SAMPLE_ENTRIES):
        return data.exclude(*_SAMPLE_ENTRIES)
    return data


def _spread(entry: Tensor, inner: torch.Size) -> Tensor:
    """``entry`` ``[N, ...]`` repeated over the batch size ``inner`` of an item: ``[N, *inner, ...]``."""
    if not inner:
        return entry

    spread = entry.reshape(len(entry), *[1] * len(inner), *entry.shape[1:])
    return spread.expand(len(entry), *inner, *entry.shape[1:]).contiguous()


def _one_each(entry: Tensor, dims: int, inner: int) -> Tensor:
    """The inverse of `_spread`, ``[N, ...]``; ``entry`` has ``dims`` batch dimensions and ``inner`` ones of items."""
    items = entry.reshape(math.prod(entry.shape[:dims]), *entry.shape[dims:])
    if not inner:
        return items

    first = items.flatten(1, inner)[:, 0]
    # All steps of an item must refer to the same stored item.
    if not (items == _spread(first, items.shape[1 : 1 + inner])).all():
        raise ValueError(
            f"data refers to several items of the buffer along its last {inner} batch dimensions, which must belong "
            "to one item: pass the sample in its original shape [N, T]"
        )

    return first
