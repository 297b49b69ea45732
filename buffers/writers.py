"""Writers, which decide which rows are stored, and in which slots."""

from collections.abc import Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.index.ring import Ring
from flatroll.buffers.index.top_k_ring import RankedRing
from flatroll.buffers.index.trajectory_index import TrajectoryIndex
from flatroll.buffers.samplers.sampler import Sampler, overrides
from flatroll.buffers.storages.records import Rows
from flatroll.buffers.storages.storage import Storage
from flatroll.buffers.transforms.transform import TransformLike, apply_inverses
from flatroll.layout.checks import check_choice
from flatroll.layout.keys import MASK, REWARD, NestedKey, marker, require, without_next


class Writer:
    """Decides which slots new rows take. One writer belongs to one buffer, which calls it under its lock.

    Args:
        compilable: see `Storage`.

    Attributes:
        chooses: whether :meth:`choose` sees all rows of a batch that is larger than the storage.
        checks: whether the buffer calls :meth:`check`; True if it is overridden.
        stateful: whether slots depend on what the writer knows of the rows, so that processes cannot share the
            buffer. The buffer calls :meth:`choose` only then. True if it or :meth:`state_dict` is overridden.
    """

    chooses: bool = False
    checks: bool = False
    stateful: bool = False

    def __init__(self, compilable: bool = False) -> None:
        return

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.checks = overrides(cls, Writer, "check")
        cls.stateful = overrides(cls, Writer, "choose", "state_dict")

    def fits(self, storage: Storage, sampler: Sampler) -> None:
        """Raise an error if the writer cannot work with this storage and sampler."""
        return

    def ring(self, capacity: int, indexed: bool, first: int = 0) -> Ring:
        """Return a ring of ``capacity`` slots, a `TrajectoryIndex` if ``indexed``."""
        if indexed:
            return TrajectoryIndex(capacity, first)
        return Ring(capacity, first)

    def check(self, batch: object) -> None:
        """Raise an error if ``batch`` may not be written."""
        return

    def check_change(self, data: object) -> None:
        """Raise an error if stored rows may not be overwritten with ``data``."""
        return

    def choose(self, ring: Ring, rows: Rows) -> tuple[Tensor, Tensor] | None:
        """Choose which rows to keep and their slots, both int64 ``[K]``; None for all rows in ring order."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the writer's state for :meth:`load_state_dict`."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the writer from a :meth:`state_dict`."""
        return


class RoundRobinWriter(Writer):
    """Stores rows one after another; in a full storage each overwrites the oldest one."""


class TensorDictRoundRobinWriter(RoundRobinWriter):
    """A `RoundRobinWriter` that accepts only tensordicts and lists of tensordicts.

    Positions are not stored with the rows: `TensorDictReplayBuffer` writes them into samples.

    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(4), writer=TensorDictRoundRobinWriter())
    >>> buffer.extend(torch.zeros(3))
    Traceback (most recent call last):
    TypeError: TensorDictRoundRobinWriter takes tensordicts, got Tensor: RoundRobinWriter takes anything
    """

    def check(self, batch: object) -> None:
        """Raise TypeError unless ``batch`` is a tensordict or a list of tensordicts."""
        check_tensordicts(batch, type(self).__name__, "RoundRobinWriter takes anything")


class ImmutableDatasetWriter(Writer):
    """Rejects every write: for the buffer of a fixed dataset, given as ``TensorStorage(dataset)``.

    ``extend``, ``add``, ``buffer[i] = ...`` and ``empty`` raise RuntimeError. The storage's own contents count as
    stored from the start, and a state can be loaded.

    >>> from flatroll.buffers import ReplayBuffer, TensorStorage
    >>> buffer = ReplayBuffer(storage=TensorStorage(torch.arange(5)), writer=ImmutableDatasetWriter())
    >>> len(buffer)
    5
    >>> buffer.add(torch.tensor(9))
    Traceback (most recent call last):
    RuntimeError: this dataset is immutable: extend a ReplayBuffer of your own with its rows, to change them there
    """

    def ring(self, capacity: int, indexed: bool, first: int = 0) -> Ring:
        """Return the ring; RuntimeError if the buffer was emptied (``first`` > 0), which is a write too."""
        if first:
            self.check(None)
        return super().ring(capacity, indexed)

    def check(self, batch: object) -> None:
        """Raise RuntimeError: the dataset is read-only."""
        raise RuntimeError(
            "this dataset is immutable: extend a ReplayBuffer of your own with its rows, to change them there"
        )

    def check_change(self, data: object) -> None:
        """Raise RuntimeError: the dataset is read-only."""
        self.check(data)


class TensorDictMaxValueWriter(Writer):
    """Keeps the ``max_size`` highest-ranked items: rows, or whole trajectories of batches ``[N, T]``.

    A new item replaces the stored item of the lowest rank if its own rank is higher. Of items of equal rank the
    earlier one is kept. ``extend`` returns the position of each item, -1 where it was not kept.

    Each item takes time in the logarithm of the capacity. Rows are not in time order, so slice samplers, n-step
    transforms, ``compact_obs`` and prioritized samplers are not supported.

    Args:
        rank_key: entry by which items are ranked, default ``("next", "reward")``.
        reduction: makes one rank of an item's several values: ``"sum"`` (default), ``"max"``, ``"min"``, ``"mean"``
            or ``"median"`` (the lower one of two).
        compilable: see `Storage`.

    Raises:
        ValueError: an unknown ``reduction``; at ``extend``, a rank that is NaN (nothing is stored then).
        TypeError: at ``extend``, a batch of no tensordict, or a sampler or storage that follows trajectories.
        KeyError: at ``extend``, a batch without ``rank_key``.

    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(3), writer=TensorDictMaxValueWriter(rank_key="score"))
    >>> buffer.extend(TensorDict({"score": torch.tensor([9, 5, 7])}, [3]))
    tensor([0, 1, 2])
    >>> buffer.extend(TensorDict({"score": torch.tensor([5, 6])}, [2])), buffer[:]["score"]
    (tensor([-1,  1]), tensor([9, 6, 7]))
    """

    chooses = True

    def __init__(
        self, rank_key: NestedKey | None = None, reduction: str = "sum", compilable: bool = False
    ) -> None:
        if rank_key is None:
            rank_key = REWARD
        self.rank_key = rank_key
        self.reduction = check_choice("reduction", reduction, _REDUCTIONS)

    def fits(self, storage: Storage, sampler: Sampler) -> None:
        """Raise ValueError for storages of several dimensions, TypeError for samplers that follow writes."""
        if storage.ndim > 1:
            raise ValueError(
                f"TensorDictMaxValueWriter ranks the items of one dimension, the storage has ndim={storage.ndim}: use "
                "ndim=1, where batches [N, T] are N items of T steps"
            )
        if has_priorities(sampler):
            raise TypeError(
                f"{type(sampler).__name__} keeps priorities in the order of a ring, but TensorDictMaxValueWriter "
                "keeps the best rows in any order: use RandomSampler or SamplerWithoutReplacement"
            )
        if sampler.follows_writes:
            raise TypeError(
                f"{type(sampler).__name__} overrides claimed or entered, but TensorDictMaxValueWriter does not "
                "keep rows in the order of the ring: read the ring in draw() instead"
            )

    @override
    def ring(self, capacity: int, indexed: bool, first: int = 0) -> Ring:
        if indexed:
            raise TypeError(
                "TensorDictMaxValueWriter keeps the best rows, which do not follow each other: slices, n-step and "
                "compact_obs need RoundRobinWriter; whole trajectories are kept as batches [N, T]"
            )
        return RankedRing(capacity, first)

    def check(self, batch: object) -> None:
        """Raise TypeError unless ``batch`` is a tensordict or a list of them, KeyError if it has no rank."""
        check_tensordicts(batch, type(self).__name__, "their rank_key is what is compared")
        items: Any = batch
        if not isinstance(batch, list):
            items = [batch]
        for item in items:
            require(item, self.rank_key)

    def check_change(self, data: object) -> None:
        """Raise ValueError if ``data`` contains ``rank_key``."""
        if isinstance(data, TensorDictBase) and data.get(self.rank_key, None) is not None:
            raise ValueError(
                f"batch[{self.rank_key!r}] cannot be changed in place: it is what rows are ranked by. Leave the "
                "entry out, or extend with new rows"
            )

    def choose(self, ring: Ring, rows: Rows) -> tuple[Tensor, Tensor]:
        """Choose the highest-ranked rows and free slots for them; ValueError if a rank is NaN."""
        assert isinstance(ring, RankedRing)
        # Items of a list may differ in shape and are reduced one by one; columns [N, ...] all at once.
        parts = [item.get(self.rank_key)[None] for item in rows.items]
        reduced = []
        for part in parts or [rows.columns[self.rank_key]]:
            values = part.detach().to("cpu", torch.float64)
            if values.ndim > 1:
                values = getattr(values.flatten(1), _REDUCTIONS[self.reduction])(1)
            if not isinstance(values, Tensor):  # median also returns indices
                values = values.values
            reduced.append(values)

        ranks = torch.cat(reduced)  # float64 [N]
        nan = ranks.isnan()
        if nan.any():
            raise ValueError(f"batch[{self.rank_key!r}] gives item {int(nan.nonzero()[0])} the rank NaN")

        return ring.choose(ranks)


_REDUCTIONS = {"sum": "sum", "max": "amax", "min": "amin", "mean": "mean", "median": "median"}


def check_tensordicts(batch: object, who: str, instead: str) -> None:
    """Raise TypeError unless ``batch`` is a tensordict or a list of tensordicts."""
    if not isinstance(batch, list):
        batch = [batch]
    for item in batch:
        if not isinstance(item, TensorDictBase):
            raise TypeError(f"{who} takes tensordicts, got {type(item).__name__}: {instead}")


def check_rows(batch: TensorDictBase, ndim: int) -> None:
    """Raise ValueError unless ``batch`` has ``ndim`` batch dimensions and no padding rows."""
    if batch.batch_dims == 0:
        raise ValueError("batch has batch size []: use add for one row, or batch.unsqueeze(0)")

    if batch.batch_dims != ndim or batch.get(MASK, None) is None:
        return

    padding = ~marker(batch, MASK)
    if padding.any():
        raise ValueError(
            f"the batch has {int(padding.sum())} rows of padding, where batch[{MASK!r}] is False: extend with "
            'batch[batch["collector", "mask"]], or with flatroll.layout.join(batch) of split trajectories'
        )


def before_storing(
    data: object,
    transforms: Sequence[TransformLike],
    not_compared: set[NestedKey],
    final: TensorDictBase | None = None,
) -> Any:
    """Apply the ``inv`` of ``transforms``, last one first, to a batch to store.

    The root keys of entries that it changes are added to ``not_compared``: what two batches say of one observation
    may be changed in two ways, by a normalisation that moves on.
    """
    given = _versions(data)  # keeps the tensors alive, so that their ids are not reused
    data = apply_inverses(transforms, data, final)

    kept = {(id(value), version) for value, version in given.values()}
    for key, (value, version) in _versions(data).items():
        if (id(value), version) not in kept:
            not_compared.add(without_next(key))
    return data


def _versions(data: object) -> dict[NestedKey, tuple[Tensor, int]]:
    """The tensors of a tensordict by key, and how often each was written to in place."""
    if not isinstance(data, TensorDictBase):
        return {}

    versions = {}
    for key, value in data.items(True, True):
        if isinstance(value, Tensor):
            version = 0 if value.is_inference() else value._version
            versions[key] = value, version
    return versions


def has_priorities(sampler: Sampler) -> bool:
    """Return whether ``sampler`` draws by priorities."""
    return overrides(type(sampler), Sampler, "update_priority")
