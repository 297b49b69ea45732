"""Chooses members of an ensemble, joins their samples, and exposes their storages, writers and samplers."""

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, Literal, TypeAlias, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils import _pytree as pytree

from flatroll.buffers.samplers.sampler import Sampler
from flatroll.buffers.storages.item_kinds import leaves, nest
from flatroll.buffers.storages.storage import Storage
from flatroll.buffers.transforms.transform import TransformLike
from flatroll.buffers.writers import Writer
from flatroll.layout.checks import whole_number

#: How likely each member of an ensemble is: numbers of any sum, their number of rows, or None for equally.
Shares: TypeAlias = Iterable[float] | Tensor | Literal["sampleable"] | None
Part = TypeVar("Part")
#: Chooses several members of an ensemble.
Several: TypeAlias = slice | list[int] | range | Tensor | NDArray[Any]
#: Dtype and shape of all that a sample consists of, by key.
Form = dict[Any, tuple[Any, torch.Size]]


def pick(parts: Sequence[Part], index: int | Several, name: str) -> Part | list[Part]:
    """The part of member ``index`` of the ensemble ``name``, or a list of those of several members.

    Raises:
        TypeError: ``index`` does not choose members.
        IndexError: there is no such member.

    >>> pick("abc", -1, "ensemble"), pick("abc", torch.tensor([2, 0]), "ensemble")
    ('c', ['c', 'a'])
    """
    if isinstance(index, slice):
        return list(parts[index])
    numbers: Any = index.tolist() if isinstance(index, Tensor | np.ndarray) else index
    several = isinstance(numbers, list | range)
    for number in numbers if several else [numbers]:
        if type(number) is not int:
            raise TypeError(
                f"{name} is indexed by member, rb[0], and a member by row, rb[0][:]; several members are rb[:2] or "
                f"rb[[0, 2]]; got {index!r}"
            )
        if not -len(parts) <= number < len(parts):
            raise IndexError(f"{name} has {len(parts)} members, got index {number}")
    return [parts[number] for number in numbers] if several else parts[numbers]


class _Parts(Sequence[Part]):
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
    def __getitem__(self, index: Several) -> list[Part]: ...

    def __getitem__(self, index: int | Several) -> Part | list[Part]:
        """The part of member ``index``, or of several members: a slice, or their numbers."""
        return pick(self.parts, index, type(self).__name__)

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
        self.transforms = list(transforms or [None] * len(storages))
        self.checkpointer: Any = None  # a StorageEnsembleCheckpointer; each member has its own

    @property
    def max_size(self) -> int:
        """Number of slots of all members together."""
        return sum(storage.max_size for storage in self.parts)

    @property
    def nbytes(self) -> int:
        """Bytes of all members' storages together."""
        return sum(storage.nbytes for storage in self.parts)


class WriterEnsemble(_Parts[Writer]):
    """The writers of an ensemble's members."""


class SamplerEnsemble(_Parts[Sampler]):
    """The samplers of an ensemble's members, and the probability of drawing from each member.

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
        self.sample_from_all = sample_from_all
        self.num_buffer_sampled = num_buffer_sampled
        self.p = p

    @property
    def num_buffer_sampled(self) -> int:
        """How many members a sample is made of; None sets it to as many as there are."""
        return self._num_buffer_sampled

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        count = whole_number("num_buffer_sampled", len(self) if value is None else value)
        self._check_choice(count != len(self))
        self._num_buffer_sampled = count

    def _check_choice(self, chosen: bool) -> None:
        """TypeError if members are ``chosen`` although each is taken once."""
        if chosen and self.sample_from_all:
            raise TypeError(
                "sample_from_all=True takes each member once: leave p and num_buffer_sampled out, or sample_from_all"
            )

    @property
    def p(self) -> Tensor | Literal["sampleable"] | None:
        """Probabilities of drawing from each member, float64; or ``"sampleable"``; None means equal ones."""
        return self._p

    @p.setter
    def p(self, value: Shares) -> None:
        self._check_choice(value is not None)
        if value is None or isinstance(value, str):
            if value not in (None, "sampleable"):
                raise ValueError(f"p must be one number per member or 'sampleable', got {value!r}")
            self._p: Tensor | Literal["sampleable"] | None = value
            return
        shares = torch.as_tensor(value if isinstance(value, Tensor) else list(value), dtype=torch.float64)
        fits = shares.shape == (len(self),) and bool((shares >= 0).all())
        if not fits or not 0 < float(shares.sum()) < torch.inf:
            raise ValueError(
                f"p must have one number per member ({len(self)}), none negative and not all 0, got {value}"
            )
        self._p = shares.cpu() / shares.sum().cpu()

    def weights(self, rows: list[int]) -> Tensor:
        """Return unnormalised probabilities float64 ``[members]``, given the ``rows`` each stores."""
        if isinstance(self.p, str):
            return torch.tensor(rows, dtype=torch.float64)
        return torch.ones(len(self), dtype=torch.float64) if self.p is None else self.p

    def draw(self, rows: list[int], generator: torch.Generator | None = None) -> list[int]:
        """Draw the members that a sample is made of, given the number of ``rows`` that each stores."""
        if self.sample_from_all:
            return list(range(len(self)))
        weights = self.weights(rows)
        if not bool(weights.any()):
            raise RuntimeError("cannot sample: all members are empty, extend them with rb[i].extend(batch)")
        drawn = torch.multinomial(weights, self.num_buffer_sampled, replacement=True, generator=generator)
        return [int(member) for member in drawn]


def collate_members(parts: list[Any], members: list[int], stack: bool) -> Any:
    """Join the samples of ``members``: stacked ``[n, ...]``, or concatenated.

    Raises:
        ValueError: they do not fit; the text names the members, the entry and the way out.

    >>> collate_members([torch.zeros(2), torch.ones(2)], members=[0, 1], stack=False)
    tensor([0., 0., 1., 1.])
    """
    # Lists of items, of a ListStorage
    listed = [member for member, part in zip(members, parts, strict=True) if isinstance(part, list)]
    if listed and not stack:
        return [item for part in parts for item in part]
    if listed:
        raise ValueError(
            f"member {listed[0]} gives a list of items, which cannot be stacked: stack=False gives one list, "
            "collate_fn makes something else of the members' samples"
        )
    join: Any = torch.stack if stack else torch.cat
    first, columns = parts[0], []
    tensordicts = all(isinstance(part, TensorDictBase) for part in parts)
    if tensordicts:
        with suppress(TypeError):  # entries that are no tensors: the tensordicts are joined as they are
            columns = [leaves(part) for part in parts]
    forms = [{k: (c.dtype, c.shape) for k, c in each.items()} for each in columns]
    _check_alike(forms or [_form(part) for part in parts], members, stack)
    if not columns:
        return join(parts) if tensordicts else pytree.tree_map(lambda *of_parts: join(of_parts), *parts)
    joined = {key: join([each[key] for each in columns]) for key in columns[0]}
    rows = (len(parts), len(first)) if stack else (sum(map(len, parts)),)
    made = nest(joined, torch.Size([*rows, *first.batch_size[1:]]))
    return made if first.device is None else made.to(first.device)


def _check_alike(forms: list[Form], members: list[int], stack: bool) -> None:
    """ValueError unless all members' samples have the first one's entries, dtypes and shapes."""
    first = members[0]
    for member, form in zip(members, forms, strict=True):
        if form == forms[0]:
            continue
        for key in forms[0] | form:
            expected, got = forms[0].get(key), form.get(key)
            if expected is None or got is None:
                has, lacks = (first, member) if got is None else (member, first)
                raise ValueError(
                    f"member {has} gives {_shown(key)} and member {lacks} does not: make their samples alike with "
                    "transforms of the members (stack=False needs the same entries, too)"
                )
            # The number of rows may differ unless they are stacked.
            if expected[0] != got[0] or expected[1][1:] != got[1][1:] or len(expected[1]) != len(got[1]):
                raise ValueError(
                    f"member {first} gives {_shown(key)} as {expected[0]} {list(expected[1])}, member {member} as "
                    f"{got[0]} {list(got[1])}: make them alike with transforms of the members"
                )
            if stack and expected[1] != got[1]:
                raise ValueError(
                    f"member {first} gives {expected[1][0]} rows, member {member} {got[1][0]} rows, which cannot be "
                    "stacked: stack=False lays them end to end"
                )


def _form(part: Any) -> Form:
    """Dtypes and shapes of a sample of any kind; for entries that are no tensors, their type."""
    if isinstance(part, TensorDictBase):
        entries: Any = part.items(True, True)
    else:
        entries = pytree.tree_flatten_with_path(part)[0]
    form: Form = {}
    for key, value in entries:
        is_tensor = isinstance(value, Tensor)
        form[key] = (value.dtype, value.shape) if is_tensor else (type(value).__name__, torch.Size([]))
    return form


def _shown(key: Any) -> str:
    """The key of an entry, or the path to a leaf of a tree, for an error."""
    if isinstance(key, str) or (key and isinstance(key[0], str)):
        return f"the entry {key!r}"
    return f"the entry {pytree.keystr(key)}" if key else "its data"
