"""The storages, writers and samplers of an ensemble's members."""

from collections.abc import Iterable, Iterator
from typing import Generic, Literal, TypeAlias, TypeVar, overload

import torch
from torch import Tensor

from flatroll.buffers.samplers.base import Sampler
from flatroll.buffers.storages.base import Storage
from flatroll.buffers.transforms.base import TransformLike
from flatroll.buffers.writers import Writer

#: How likely each member of an ensemble is.
Shares: TypeAlias = Iterable[float] | Tensor | Literal["sampleable"] | None
Part = TypeVar("Part")


class _Parts(Generic[Part]):
    """One part of each member of an ensemble, in order."""

    def __init__(self, *parts: Part) -> None:
        if not parts:
            raise TypeError(f"{type(self).__name__} needs at least one member")
        self.parts = parts

    def __len__(self) -> int:
        return len(self.parts)

    @overload
    def __getitem__(self, index: int) -> Part: ...

    @overload
    def __getitem__(self, index: slice) -> list[Part]: ...

    def __getitem__(self, index: int | slice) -> Part | list[Part]:
        """The part of member ``index``, or of several members."""
        return list(self.parts[index]) if isinstance(index, slice) else self.parts[index]

    def __iter__(self) -> Iterator[Part]:
        return iter(self.parts)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(type(part).__name__ for part in self.parts)})"


class StorageEnsemble(_Parts[Storage]):
    """The storages of an ensemble's members.

    Args:
        storages: one per member.
        transforms: one per member, or None for none; see `ReplayBuffer`.

    >>> from flatroll.buffers import LazyTensorStorage
    >>> StorageEnsemble(LazyTensorStorage(10), LazyTensorStorage(5)).max_size
    15
    """

    def __init__(self, *storages: Storage, transforms: list[TransformLike | None] | None = None) -> None:
        super().__init__(*storages)
        if transforms is not None and len(transforms) != len(storages):
            raise ValueError(f"transforms must have one entry per storage, got {len(transforms)}")
        self.transforms = [None] * len(storages) if transforms is None else list(transforms)

    @property
    def max_size(self) -> int:
        """Slots of all members."""
        return sum(storage.max_size for storage in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all members."""
        return sum(storage.nbytes for storage in self.parts)


class WriterEnsemble(_Parts[Writer]):
    """The writers of an ensemble's members."""


class SamplerEnsemble(_Parts[Sampler]):
    """The samplers of an ensemble's members, and which members a sample is made of.

    Args:
        samplers: one per member.
        p: how likely each member is, not negative, of any sum; ``"sampleable"`` for its number of stored rows. None:
            all are equally likely. It may be set later.
        sample_from_all: a sample is made of each member once, in order.
        num_buffer_sampled: how many members a sample is made of, default as many as there are. They are drawn with
            replacement, unless ``sample_from_all``.

    Raises:
        ValueError: ``p`` has not one number per member, or a negative one; ``num_buffer_sampled`` is below 1.
        TypeError: ``sample_from_all`` together with ``p`` or another ``num_buffer_sampled``.

    >>> from flatroll.buffers import RandomSampler
    >>> ensemble = SamplerEnsemble(RandomSampler(), RandomSampler(), p=[1, 3])
    >>> ensemble.p
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """

    def __init__(
        self,
        *samplers: Sampler,
        p: Shares = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
    ) -> None:
        super().__init__(*samplers)
        count = len(samplers) if num_buffer_sampled is None else num_buffer_sampled
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(
                f"num_buffer_sampled must be an integer of at least 1, got {num_buffer_sampled!r}"
            )
        if sample_from_all and (p is not None or count != len(samplers)):
            raise TypeError(
                "sample_from_all=True takes each member once: leave p and num_buffer_sampled out, or sample_from_all"
            )
        self.sample_from_all = sample_from_all
        self.num_buffer_sampled = count
        self.p = p

    @property
    def p(self) -> Tensor | Literal["sampleable"] | None:
        """Probabilities of the members, float64; ``"sampleable"``, or None for equal ones."""
        return self._p

    @p.setter
    def p(self, value: Shares) -> None:
        if value is None or isinstance(value, str):
            if value not in (None, "sampleable"):
                raise ValueError(f"p must be one number per member or 'sampleable', got {value!r}")
            self._p: Tensor | Literal["sampleable"] | None = value
            return
        shares = torch.as_tensor(value if isinstance(value, Tensor) else list(value), dtype=torch.float64)
        if (
            shares.shape != (len(self),)
            or not bool((shares >= 0).all())
            or not 0 < float(shares.sum()) < torch.inf
        ):
            raise ValueError(
                f"p must have one number per member ({len(self)}), none negative and not all 0, got {value}"
            )
        self._p = shares.cpu() / shares.sum().cpu()

    def weights(self, rows: list[int]) -> Tensor:
        """Probabilities of the members, up to a factor, where they hold ``rows`` rows; float64."""
        if isinstance(self.p, str):
            return torch.tensor(rows, dtype=torch.float64)
        return torch.ones(len(self), dtype=torch.float64) if self.p is None else self.p

    def draw(self, rows: list[int], generator: torch.Generator | None = None) -> list[int]:
        """The members that a sample is made of, where they hold ``rows`` rows."""
        if self.sample_from_all:
            return list(range(len(self)))
        weights = self.weights(rows)
        if not bool(weights.any()):
            raise RuntimeError("cannot sample: all members are empty, extend them with rb[i].extend(batch)")
        drawn = torch.multinomial(weights, self.num_buffer_sampled, replacement=True, generator=generator)
        return [int(member) for member in drawn]
