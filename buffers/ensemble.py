"""The replay buffer ensemble, which samples several replay buffers as one."""

import copy
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal, NoReturn, Self, TypeAlias, TypeVar, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils import _pytree as pytree

from flatroll.buffers.checkpointers.rows import (
    StorageEnsembleCheckpointer,
    checkpointer_with_hooks,
)
from flatroll.buffers.checkpointers.saving import SavedFolders, SavesToFolders, load_from, versions_in
from flatroll.buffers.index.saved_tables import check_saved_generator
from flatroll.buffers.remote import BufferHandle, Service
from flatroll.buffers.replay_buffer import ReplayBuffer, torchrl_names
from flatroll.buffers.samplers.sampler import Sampler
from flatroll.buffers.sharing import pickle_by_value, reseed_in_worker
from flatroll.buffers.storages.storage import Storage
from flatroll.buffers.transforms.transform import TransformLike, apply, insert_transform
from flatroll.buffers.writers import Writer, check_tensordicts, has_priorities
from flatroll.disk import DamagedFileError, Folder, LoadedVersion, Version
from flatroll.disk.checkpoint import Apply, Others, SaveOptions, read_tree
from flatroll.disk.manifest import read_manifest
from flatroll.disk.state_tree import Packer, damaged
from flatroll.layout.checks import check_whole_number
from flatroll.layout.inspect.text import Facts
from flatroll.layout.keys import NestedKey, require
from flatroll.layout.tensordict_seam import leaves, nest
from flatroll.layout.transfers import upload

#: The entry of samples with the index of each row's member.
BUFFER_IDS: NestedKey = ("collector", "buffer_ids")


#: Attributes with one part per member.
_PARTS = ("storage", "sampler", "writer")
#: Sampling weights of the members: unnormalised numbers, ``"sampleable"``, or None for equal weights.
Shares: TypeAlias = Iterable[float] | Tensor | Literal["sampleable"] | None
Part = TypeVar("Part")
#: Chooses several members of an ensemble.
Several: TypeAlias = slice | list[int] | range | Tensor | NDArray[Any]
#: Dtype and shape of each entry of a sample, by key.
Form = dict[Any, tuple[Any, torch.Size, torch.device | None]]


def pick(parts: Sequence[Part], index: int | Several, name: str) -> Part | list[Part]:
    """Return the part of member ``index``, or a list of parts for several members.

    Raises:
        TypeError: ``index`` is not a valid index.
        IndexError: there is no such member.

    >>> pick("abc", -1, "ensemble"), pick("abc", torch.tensor([2, 0]), "ensemble")
    ('c', ['c', 'a'])
    """
    if isinstance(index, slice):
        return list(parts[index])

    numbers: Any = index.tolist() if isinstance(index, Tensor | np.ndarray) else index
    several = isinstance(numbers, list | range)
    chosen: Sequence[int] = numbers if several else [numbers]
    for number in chosen:
        if type(number) is not int:
            raise TypeError(
                f"{name} is indexed by member, rb[0], and a member by row, rb[0][:]; several members are rb[:2] or "
                f"rb[[0, 2]]; got {index!r}"
            )
        if not -len(parts) <= number < len(parts):
            raise IndexError(f"{name} has {len(parts)} members, got index {number}")

    if several:
        return [parts[number] for number in chosen]
    return parts[chosen[0]]


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
        """Return the part of member ``index``, or a list for a slice or several indices."""
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
        self.checkpointer: Any = None  # a StorageEnsembleCheckpointer; each member has its own checkpointer

    @property
    def max_size(self) -> int:
        """Total number of slots of all members."""
        return sum(storage.max_size for storage in self.parts)

    @property
    def nbytes(self) -> int:
        """Total bytes of all members' storages."""
        return sum(storage.nbytes for storage in self.parts)


class WriterEnsemble(_Parts[Writer]):
    """The writers of an ensemble's members."""


class SamplerEnsemble(_Parts[Sampler]):
    """The samplers of an ensemble's members, and the probability of drawing from each member.

    Args:
        samplers: one per member.
        p: unnormalised probability of each member, not negative; ``"sampleable"`` uses the number of stored rows.
            None: all are equally likely. It may be set later.
        sample_from_all: sample each member once, in order.
        num_buffer_sampled: number of members per sample, default all. They are drawn with replacement, unless
            ``sample_from_all``.

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
        """Number of members per sample; setting None means all."""
        return self._num_buffer_sampled

    @num_buffer_sampled.setter
    def num_buffer_sampled(self, value: int | None) -> None:
        if value is None:
            value = len(self)
        count = check_whole_number("num_buffer_sampled", value)
        self._check_choice(count != len(self))
        self._num_buffer_sampled = count

    def _check_choice(self, chosen: bool) -> None:
        """Raise TypeError if members are ``chosen`` although each is sampled once."""
        if chosen and self.sample_from_all:
            raise TypeError("sample_from_all=True takes each member once: leave out p and num_buffer_sampled")

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

        numbers = value if isinstance(value, Tensor) else list(value)
        shares = torch.as_tensor(numbers, dtype=torch.float64)
        fits = shares.shape == (len(self),) and (shares >= 0).all()
        if not fits or not 0 < float(shares.sum()) < torch.inf:
            raise ValueError(
                f"p must have one number per member ({len(self)}), none negative and not all 0, got {value}"
            )

        self._p = shares.cpu() / shares.sum().cpu()

    def weights(self, rows: list[int]) -> Tensor:
        """Return unnormalised probabilities float64 ``[members]``, given the ``rows`` each stores."""
        if isinstance(self.p, str):
            return torch.tensor(rows, dtype=torch.float64)
        if self.p is None:
            return torch.ones(len(self), dtype=torch.float64)
        return self.p

    def draw(self, rows: list[int], generator: torch.Generator | None = None) -> list[int]:
        """Draw the members of a sample, given the number of ``rows`` in each."""
        if self.sample_from_all:
            return list(range(len(self)))

        weights = self.weights(rows)
        if not weights.any():
            raise RuntimeError("cannot sample: all members are empty, extend them with rb[i].extend(batch)")

        drawn = torch.multinomial(weights, self.num_buffer_sampled, replacement=True, generator=generator)
        return [int(member) for member in drawn]


def collate_members(parts: list[Any], members: list[int], stack: bool) -> Any:
    """Join the samples of ``members``: stacked ``[n, ...]``, or concatenated.

    Raises:
        ValueError: the samples differ; the message names the members, the entry and a fix.

    >>> collate_members([torch.zeros(2), torch.ones(2)], members=[0, 1], stack=False)
    tensor([0., 0., 1., 1.])
    """
    # lists of items, from a ListStorage
    listed = [member for member, part in zip(members, parts, strict=True) if isinstance(part, list)]
    if listed and not stack:
        return [item for part in parts for item in part]
    if listed:
        raise ValueError(
            f"member {listed[0]} returns a list of items, which cannot be stacked: stack=False returns one "
            "list; or pass collate_fn="
        )

    tensordicts = all(isinstance(part, TensorDictBase) for part in parts)
    columns = []
    if tensordicts:
        with suppress(TypeError):  # non-tensor entries: join the tensordicts instead
            columns = [leaves(part) for part in parts]

    if columns:
        forms: list[Form] = []
        for each in columns:
            forms.append({key: _form_of(column) for key, column in each.items()})
    else:
        forms = [_form(part) for part in parts]
    _check_alike(forms, members, stack)

    join: Any = torch.stack if stack else torch.cat
    if not columns:
        if tensordicts:
            return join(parts)
        return pytree.tree_map(lambda *of_parts: join(of_parts), *parts)

    joined = {key: join([each[key] for each in columns]) for key in columns[0]}
    first = parts[0]
    rows = [len(parts), len(first)]
    if not stack:
        rows = [sum(map(len, parts))]
    made = nest(joined, *rows, *first.batch_size[1:])

    if first.device is None:
        return made
    return made.to(first.device)


def _check_alike(forms: list[Form], members: list[int], stack: bool) -> None:
    """ValueError unless all members' samples have the first one's entries, dtypes, shapes and devices."""
    first = members[0]
    for member, form in zip(members, forms, strict=True):
        if form == forms[0]:
            continue

        for key in forms[0] | form:
            expected = forms[0].get(key)
            got = form.get(key)
            if expected is None or got is None:
                has, lacks = (first, member) if got is None else (member, first)
                raise ValueError(
                    f"member {has} returns {_shown(key)} and member {lacks} does not: transform the members' "
                    "samples to the same form (stack=False needs the same entries as well)"
                )

            dtype, shape, device = expected
            other_dtype, other_shape, other_device = got
            if device != other_device:
                raise ValueError(
                    f"member {first} returns {_shown(key)} on {device}, member {member} on {other_device}: move the "
                    "members' samples to one device with a transform of each buffer, lambda td: td.to(device)"
                )

            # The number of rows may differ unless they are stacked.
            if dtype != other_dtype or shape[1:] != other_shape[1:] or len(shape) != len(other_shape):
                raise ValueError(
                    f"member {first} returns {_shown(key)} as {dtype} {list(shape)}, member "
                    f"{member} as {other_dtype} {list(other_shape)}: transform the members' samples to the "
                    "same form"
                )
            if stack and shape != other_shape:
                raise ValueError(
                    f"member {first} returns {shape[0]} rows, member {member} {other_shape[0]} rows, which "
                    "cannot be stacked: stack=False concatenates them"
                )


def _form(part: Any) -> Form:
    """Return dtypes and shapes of any kind of sample; types for non-tensor entries."""
    if isinstance(part, TensorDictBase):
        entries: Any = part.items(True, True)
    else:
        entries = pytree.tree_flatten_with_path(part)[0]

    form: Form = {}
    for key, value in entries:
        if isinstance(value, Tensor):
            form[key] = _form_of(value)
        else:
            form[key] = type(value).__name__, torch.Size([]), None
    return form


def _form_of(value: Tensor) -> tuple[Any, torch.Size, torch.device | None]:
    """Return what samples must have in common to be joined: dtype, shape and device."""
    return value.dtype, value.shape, value.device


def _shown(key: Any) -> str:
    """Return the key of an entry or the path of a tree leaf, for errors."""
    if isinstance(key, str) or (key and isinstance(key[0], str)):
        return f"the entry {key!r}"
    if key:
        return f"the entry {pytree.keystr(key)}"
    return "its data"


class ReplayBufferEnsemble(SavesToFolders, Facts):
    """Samples from several replay buffers, such as several datasets, or demonstrations and new data.

    A sample of B rows combines samples of B / n rows from n = ``num_buffer_sampled`` members, after the members' own
    transforms: stacked ``[n, B / n]``, or with ``stack=False`` concatenated ``[B]``. In tensordicts ``("collector",
    "buffer_ids")`` (int64, batch shape) is the member of each row. The ensemble's transforms are applied last. Write
    to the members themselves: ``rb[0].extend(batch)``.

    Args:
        rbs: the members. Alternatively pass ``storages``, ``samplers`` and ``writers``.
        storages: the members' storages and transforms.
        samplers: the members' samplers, with ``p``, ``sample_from_all`` and ``num_buffer_sampled``; default a
            `RandomSampler` each.
        writers: the members' writers, default a `RoundRobinWriter` each.
        transform, batch_size: see `ReplayBuffer`.
        collate_fn: combines the list of the members' samples, instead of stacking them.
        p, sample_from_all, num_buffer_sampled: how members are chosen, see `SamplerEnsemble`.
        stack: whether samples are stacked, default True. With False the members' samples may have different numbers
            of rows, as slices of short trajectories do.
        generator: CPU random generator of all draws, also for members without their own.

    Raises:
        TypeError: a member is not a `ReplayBuffer`, or both members and parts are given.
        ValueError: ``p`` does not fit, or ``batch_size`` is not divisible by the number of members sampled.

    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage
    >>> rb = ReplayBufferEnsemble(
    ...     ReplayBuffer(storage=LazyTensorStorage(10), transform=lambda td: td.rename_key_("old", "x")),
    ...     ReplayBuffer(storage=LazyTensorStorage(10)), sample_from_all=True, batch_size=6)
    >>> rows = rb[0].extend(TensorDict({"old": torch.zeros(10)}, [10]))
    >>> rows = rb[1].extend(TensorDict({"x": torch.ones(5)}, [5]))
    >>> sample = rb.sample()
    >>> sample.batch_size, sample["x"].tolist(), sample["collector", "buffer_ids"].tolist()
    (torch.Size([2, 3]), [[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], [[0, 0, 0], [1, 1, 1]])
    """

    def __init__(
        self,
        *rbs: ReplayBuffer,
        storages: StorageEnsemble | None = None,
        samplers: SamplerEnsemble | None = None,
        writers: WriterEnsemble | None = None,
        transform: TransformLike | None = None,
        batch_size: int | None = None,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        p: Shares = None,
        sample_from_all: bool = False,
        num_buffer_sampled: int | None = None,
        stack: bool = True,
        generator: torch.Generator | None = None,
    ) -> None:
        if not rbs:
            rbs = _members(storages, samplers, writers)
        elif storages is not None or samplers is not None or writers is not None:
            raise TypeError("pass the members, or storages, samplers and writers, not both")

        for rb in rbs:
            if not isinstance(rb, ReplayBuffer):
                raise TypeError(f"members must be ReplayBuffers, got {type(rb).__name__}")

        if samplers is None:
            samplers = SamplerEnsemble(
                *(rb.sampler for rb in rbs),
                p=p,
                sample_from_all=sample_from_all,
                num_buffer_sampled=num_buffer_sampled,
            )
        elif p is not None or sample_from_all or num_buffer_sampled is not None:
            raise TypeError("p, sample_from_all and num_buffer_sampled must be passed to SamplerEnsemble")

        if generator is not None and generator.device.type != "cpu":
            raise ValueError(f"generator must be a CPU generator, got {generator.device}")

        self._members = rbs
        self.sampler = samplers
        self.storage = storages or StorageEnsemble(*(rb.storage for rb in rbs))
        self.writer = writers or WriterEnsemble(*(rb.writer for rb in rbs))

        self.batch_size = batch_size
        self.collate_fn = collate_fn
        self.stack = stack
        self.generator = generator
        self._process = os.getpid()
        self.saves = SavedFolders()
        self.service = Service()

        self.transforms: list[TransformLike] = []
        if transform is not None:
            self.append_transform(transform)
        if batch_size is not None:
            self._rows(batch_size)

        for rb in rbs:
            rb.generator = rb.generator or generator

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        for name in _PARTS:  # the members' states contain their parts, which match within each state
            state[name] = copy.copy(state[name])
            state[name].parts = ()
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        for name in _PARTS:
            getattr(self, name).parts = tuple(getattr(rb, name) for rb in self._members)

    def __len__(self) -> int:
        return sum(map(len, self._members))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self._members))})"

    def _facts(self) -> dict[str, str]:
        """What a notebook shows: the statistics, and each member."""
        members = {f"member {i}": repr(member) for i, member in enumerate(self._members)}
        numbers = self.stats()
        hidden = torchrl_names(numbers)
        shown = {name: number for name, number in numbers.items() if name not in hidden}
        return {name: f"{number:,}" for name, number in shown.items()} | members

    @overload
    def __getitem__(self, index: int) -> ReplayBuffer: ...

    @overload
    def __getitem__(self, index: Several) -> list[ReplayBuffer]: ...

    def __getitem__(self, index: int | Several) -> ReplayBuffer | list[ReplayBuffer]:
        """Return member ``index``, or a list of members for a slice or several indices.

        ``ReplayBufferEnsemble(*rb[[0, 2]])`` samples from these only.
        """
        return pick(self._members, index, "the ensemble")

    # -- reading -----------------------------------------------------------------------------------------------

    @overload
    def sample(self, batch_size: int | None = None, return_info: Literal[False] = False) -> Any: ...

    @overload
    def sample(
        self, batch_size: int | None = None, *, return_info: Literal[True]
    ) -> tuple[Any, dict[str, Tensor]]: ...

    def sample(self, batch_size: int | None = None, return_info: bool = False) -> Any:
        """Draw ``batch_size`` rows from the members, ``[n, batch_size / n]`` or ``[batch_size]``.

        Args:
            batch_size: rows, default that of the ensemble.
            return_info: return ``(sample, info)``: ``info["buffer_ids"]`` and ``info["index"]`` are each row's member
                and its position there; other entries are those of all drawn members. Stacked like the sample;
                concatenated with ``stack=False`` or a ``collate_fn``.

        Raises:
            RuntimeError: a drawn member is empty, or holds no trajectory long enough.
            ValueError: the batch size is missing or does not fit; the samples cannot be joined.
        """
        sample, info, _ = self._next_sample(batch_size)

        if return_info:
            return sample, info
        return sample

    def __iter__(self) -> Iterator[Any]:
        """Iterate over samples forever or, if all members sample without replacement, until each has ended a pass."""
        ended: set[int] = set()
        while True:
            sample, _, now = self._next_sample(None)
            yield sample

            ended |= now
            drawable = self.sampler.weights([len(rb) for rb in self._members]).nonzero().flatten().tolist()
            if ended.issuperset(drawable):
                return

    def _next_sample(self, batch_size: int | None) -> tuple[Any, dict[str, Tensor], set[int]]:
        """Return a sample, its info, and the members whose pass ended with it."""
        if self._process != os.getpid():
            self._process = os.getpid()
            reseed_in_worker(self.generator)

        rows = self._rows(batch_size)
        members = self.sampler.draw([len(rb) for rb in self._members], self.generator)

        parts = []
        infos = []
        ended = set()
        for member in members:
            if not len(self._members[member]):
                raise RuntimeError(
                    f"cannot sample from member {member}, which is empty: extend it with rb[{member}].extend(batch), "
                    "or use p=0"
                )

            part, info, end = self._members[member].next_sample(rows)
            if end:
                ended.add(member)
            parts.append(part)
            infos.append(info)

        stack = self.stack and self.collate_fn is None
        if self.collate_fn is None:
            sample = collate_members(parts, members, stack)
        else:
            for i, part in enumerate(parts):
                if isinstance(part, TensorDictBase):
                    parts[i] = part.clone(recurse=False)
                    set_ids(parts[i], torch.tensor(members[i]))
            sample = self.collate_fn(parts)

        entries = [key for key in infos[0] if all(key in info for info in infos)]
        info = {key: collate_members([each[key] for each in infos], members, stack) for key in entries}

        # The member of each row, and the last row of each member: the row after it does not continue it.
        counts = torch.tensor([len(each["index"]) for each in infos])
        ids = torch.tensor(members).repeat_interleave(counts)
        ends = torch.zeros(len(ids), dtype=torch.bool)
        ends[counts.cumsum(0) - 1] = True
        if stack:
            ids = ids.view(len(members), -1)
            ends = ends.view(len(members), -1)
        if self.collate_fn is None and isinstance(sample, TensorDictBase):
            set_ids(sample, ids)
        info["buffer_ids"] = ids

        for transform in self.transforms:
            sample = apply(transform, sample, lambda: ends)

        return sample, info, ended

    def _rows(self, batch_size: int | None) -> int:
        """Return the rows per drawn member; ValueError if the batch size does not fit."""
        size = batch_size
        if size is None:
            size = self.batch_size
        count = self.sampler.num_buffer_sampled
        if size is None:
            raise ValueError("batch_size must be given to ReplayBufferEnsemble(...) or to sample(...)")

        if isinstance(size, bool) or not isinstance(size, int) or size < 1 or size % count:
            raise ValueError(
                f"batch_size must be a positive multiple of the {count} members a sample is made of "
                f"(num_buffer_sampled), got {size!r}"
            )

        return size // count

    # -- writing -----------------------------------------------------------------------------------------------

    def extend(self, data: Any, final: TensorDictBase | None = None) -> NoReturn:
        """Raise RuntimeError: write to a member instead."""
        raise RuntimeError(
            f"an ensemble cannot choose one of its {len(self._members)} members for new data: extend one of them, "
            "rb[0].extend(batch)"
        )

    def add(self, data: Any) -> NoReturn:
        """Raise RuntimeError, as :meth:`extend` does."""
        self.extend(data)

    def append_transform(self, transform: TransformLike, *, invert: bool = False) -> Self:
        """Append a transform of the ensemble's samples; see `ReplayBuffer.append_transform`."""
        return self.insert_transform(len(self.transforms), transform, invert=invert)

    def insert_transform(self, index: int, transform: TransformLike, *, invert: bool = False) -> Self:
        """Add a transform before the one at ``index``; see `ReplayBuffer.insert_transform`."""
        insert_transform(self.transforms, index, transform, invert)
        return self

    def handle(self) -> BufferHandle:
        """Return a `BufferHandle` for other processes; see `ReplayBuffer.handle`."""
        return self.service.handle(self)

    def empty(self) -> None:
        """Remove all rows from all members."""
        for rb in self._members:
            rb.empty()

    def update_priority(
        self,
        index: Tensor,
        priority: Tensor | float,
        *,
        buffer_ids: Tensor,
        generation: Tensor | None = None,
    ) -> None:
        """Set the priorities of rows in each member; members without priorities are skipped.

        Args:
            index: ``info["index"]``.
            priority: one value, or one per row.
            buffer_ids: ``info["buffer_ids"]``.
            generation: ``info["index_generation"]``; rows overwritten since are then left out.

        Raises:
            TypeError: no member has priorities.
            ValueError: a negative priority or NaN, or sizes that differ.
            IndexError: a position outside a member.
        """
        priority = torch.as_tensor(priority)
        for member, rb in self._prioritized():
            mask = buffer_ids == member
            if not mask.any():
                continue

            of_index = index[upload(mask, index.device)]
            of_priority = priority[upload(mask, priority.device)] if priority.ndim else priority
            of_generation = None if generation is None else generation[upload(mask, generation.device)]
            rb.update_priority(of_index, of_priority, of_generation)

    def update_tensordict_priority(self, data: TensorDictBase) -> None:
        """Set the priorities of a sample's rows from the sample; members without priorities are skipped.

        Raises:
            TypeError: no member has priorities, or one with priorities is not a `TensorDictReplayBuffer`.
            KeyError: ``("collector", "buffer_ids")``, ``"index"`` or a member's ``priority_key`` is missing.
            ValueError: a negative or infinite priority, or NaN.
        """
        prioritized = self._prioritized()
        check_tensordicts(data, "update_tensordict_priority", "update_priority takes index and priority")

        # Each element along the first dimension goes to its member as a whole. If one mixes members (for
        # example in a transposed sample), rows are updated one by one.
        ids = require(data, BUFFER_IDS)
        rows_ids = ids.reshape(len(ids), -1)
        if not (rows_ids == rows_ids[:, :1]).all():
            data = data.reshape(-1)
            rows_ids = ids.reshape(-1, 1)

        for member, rb in prioritized:
            mask = rows_ids[:, 0] == member
            if not mask.any():
                continue

            update = getattr(rb, "update_tensordict_priority", None)
            if update is None:
                raise TypeError(
                    f"member {member} is a {type(rb).__name__}, whose samples have no index: use "
                    "TensorDictReplayBuffer, or update_priority with the index in the info"
                )
            update(data[mask])

    def _prioritized(self) -> list[tuple[int, ReplayBuffer]]:
        """Return the members with priorities and their indices; TypeError if there are none."""
        members = [(i, rb) for i, rb in enumerate(self._members) if has_priorities(rb.sampler)]
        if not members:
            raise TypeError("no member has priorities: use PrioritizedSampler")
        return members

    # -- state -------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, int | float]:
        """Return the members' `ReplayBuffer.stats` summed, and the number of members as ``buffers``."""
        each = [rb.stats() for rb in self._members]

        keys = dict.fromkeys(key for numbers in each for key in numbers if key != "bytes_per_row")
        total = {key: sum(numbers.get(key, 0) for numbers in each) for key in keys}
        return {"buffers": len(each), **total, **torchrl_names(total)}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of the states of the members and of the random generator."""
        members = [rb.state_dict() for rb in self._members]
        generator = None if self.generator is None else self.generator.get_state()
        return {"members": members, "generator": generator}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore members and random state from a :meth:`state_dict`; the same samples follow.

        Raises:
            ValueError: the number of members differs, a member does not fit (see `ReplayBuffer`), or only one side
                has a generator.
        """
        check_saved_generator(state["generator"], self.generator, "ensemble")
        if len(state["members"]) != len(self._members):
            raise ValueError(f"the state has {len(state['members'])} members, not {len(self._members)}")

        pairs = list(zip(self._members, state["members"], strict=True))
        for rb, saved in pairs:  # check all before loading any
            rb.check_state_dict(saved)
        for rb, saved in pairs:
            rb.load_state_dict(saved)

        if self.generator is not None:
            self.generator.set_state(state["generator"])

    def register_save_hook(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(rows, path=path)`` before rows of a member are written; see `ReplayBuffer`."""
        for checkpointer in [checkpointer_with_hooks(rb.storage) for rb in self._members]:
            checkpointer.register_save_hook(hook)

    def register_load_hook(self, hook: Callable[..., Any]) -> None:
        """Call ``hook(rows)`` on a member's loaded rows before they are stored; see `ReplayBuffer`."""
        for checkpointer in [checkpointer_with_hooks(rb.storage) for rb in self._members]:
            checkpointer.register_load_hook(hook)

    def save_version(self, path: Path, others: Others, options: SaveOptions) -> Version:
        """Publish a version of the ensemble, its members (each in its own folder) and ``others``."""
        checkpointer = self.storage.checkpointer
        if checkpointer is not None and not isinstance(checkpointer, StorageEnsembleCheckpointer):
            raise TypeError(
                f"an ensemble has a StorageEnsembleCheckpointer, and each member its own, got {checkpointer!r}: set "
                "ensemble[0].storage.checkpointer"
            )

        packer = Packer()
        packer.add("others", dict(others))  # refuse unsupported values before writing rows
        known = self.saves.of(path)
        with Folder(path, write=True, log=False, resume=known.folder, **options._asdict()) as folder:
            if folder.version is None and folder.versions() and not options.overwrite:
                raise FileExistsError(
                    f"{path} holds version {folder.versions()[0]}, which this ensemble has neither loaded nor saved: "
                    "load it first, save to another folder, or start again with overwrite=True"
                )
            known.folder = folder

            # Keep the member versions that the ensemble's versions name until the new version is published.
            named = []
            for number in folder.versions():
                with suppress(DamagedFileError):
                    extra = read_manifest(path, number).extra
                    if extra:
                        named.append(extra.get("members", []))

            saved = []
            for i, member in enumerate(self._members):
                inner = path / f"member-{i}"
                needed = [versions[i] for versions in named if i < len(versions)]
                oldest = min(needed, default=0)
                there = member.saved_versions(inner)
                keep = max(1, sum(version >= oldest for version in there) + 1)
                inner_options = options._replace(keep=keep, overwrite=True)
                saved.append(list(member.save_version(inner, {}, inner_options)))

            generator = None if self.generator is None else self.generator.get_state()
            packer.add("buffer", {"generator": generator, "members": saved})
            facts = {"kind": "ensemble", "members": [number for number, _ in saved]}
            return folder.publish(packer.tree, packer.tensors, extra=facts)

    def load_version(self, path: Path, number: int | None, strict: bool) -> tuple[Others, Apply]:
        """Read and check a version; return the values saved with the ensemble, and a function that loads the rest."""
        rows = sum(member.storage.max_size for member in self._members)

        def read(version: LoadedVersion) -> tuple[dict[str, Any], Others, list[Apply]]:
            tree = read_tree(version, rows)
            state = tree["buffer"]
            if state is None or (isinstance(state, dict) and "ring" in state):
                kind = "a run without a buffer" if state is None else "a single buffer"
                raise ValueError(f"{kind} was saved, not an ensemble: load it the way it was saved")
            if not isinstance(state, dict) or not isinstance(state.get("members"), list):
                raise damaged("it is not the state of an ensemble")

            saved = state["members"]
            if len(saved) != len(self._members):
                raise ValueError(f"the state has {len(saved)} members, not {len(self._members)}")

            applies = []
            try:
                for i, (member, each) in enumerate(zip(self._members, saved, strict=True)):
                    _, load = member.load_version(path / f"member-{i}", each[0], True)
                    applies.append(load)
            except FileNotFoundError as error:  # the previous version may be complete
                raise DamagedFileError(f"a member is missing: {error}") from None

            return state, tree["others"], applies

        (state, others, applies), folder = load_from(path, read, number, strict)
        check_saved_generator(state.get("generator"), self.generator, "ensemble")

        def apply() -> None:
            for load in applies:
                load()
            if self.generator is not None:
                self.generator.set_state(state["generator"])
            self.saves.of(path).folder = folder

        return others, apply

    def reopen(self) -> None:
        """Call `ReplayBuffer.reopen` of each member."""
        for member in self._members:
            member.reopen()

    def saved_versions(self, path: Path) -> list[int]:
        """Return the numbers of the versions in a folder, the newest first."""
        return versions_in(path)


pickle_by_value(ReplayBufferEnsemble)


def _members(
    storages: StorageEnsemble | None, samplers: SamplerEnsemble | None, writers: WriterEnsemble | None
) -> tuple[ReplayBuffer, ...]:
    """Create the members from their parts."""
    if storages is None:
        raise TypeError("ReplayBufferEnsemble needs members, or storages=")

    for name, parts in (("samplers", samplers), ("writers", writers)):
        if parts is not None and len(parts) != len(storages):
            raise ValueError(f"{name} has {len(parts)} members, storages has {len(storages)}")

    members = []
    for i, storage in enumerate(storages):
        sampler = None if samplers is None else samplers[i]
        writer = None if writers is None else writers[i]
        transform = storages.transforms[i]
        members.append(ReplayBuffer(storage, sampler=sampler, writer=writer, transform=transform))
    return tuple(members)


def set_ids(sample: TensorDictBase, ids: Tensor) -> None:
    """Write ``ids``, expanded to the sample's batch shape, on the device of the other entries."""
    device = next((value.device for value in sample.values(True, True) if isinstance(value, Tensor)), None)
    missing = sample.batch_dims - ids.ndim
    ids = ids.reshape(*ids.shape, *[1] * missing).expand(sample.batch_size)
    sample.set(BUFFER_IDS, ids.to(device, copy=True))
