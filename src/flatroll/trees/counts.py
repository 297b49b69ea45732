"""State counts of a batch or a run, and a sampler that prefers rare states."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers import Draw, RandomSampler, Ring
from flatroll.buffers.samplers.sampler import StoredColumns
from flatroll.layout.checks import check_key_names, check_number, check_rows, check_tensors
from flatroll.layout.keys import NestedKey, plain_key, require
from flatroll.trees.rows import GrowingColumns, RowNumbers, flat_columns


class StateCounter:
    """Counts how often each state was seen, over all batches passed to it.

    Args:
        keys: entries that make a state. Default ``"observation"``. Round or crop them beforehand to count cells.

    >>> from tensordict import TensorDict
    >>> counter = StateCounter("cell")
    >>> counter.add(TensorDict({"cell": torch.tensor([4, 4, 9])}, [3]))
    tensor([2, 2, 1])
    >>> counter.add(TensorDict({"cell": torch.tensor([9, 5])}, [2])), len(counter)
    (tensor([2, 1]), 3)
    """

    def __init__(self, keys: Sequence[NestedKey] | NestedKey = "observation") -> None:
        self.keys = _of_state(keys)
        self._states = RowNumbers(self.keys)
        self._counts = GrowingColumns()

    def __len__(self) -> int:
        """Number of distinct states seen."""
        return len(self._states)

    def add(self, batch: TensorDictBase) -> Tensor:
        """Count the rows of a batch ``[*B]``, and return the counts of their states so far, int64 ``[*B]``.

        Raises:
            KeyError: an entry is missing.
            TypeError: an entry has another dtype or shape than before.
        """
        before = len(self)
        states = self._states.insert(_state_columns(batch, self.keys)).cpu()
        new = torch.arange(before, len(self))
        self._counts.set(new, {"count": torch.zeros_like(new)})

        if not len(states):
            return torch.zeros(batch.batch_size, dtype=torch.int64)
        counts = self._counts.column("count")
        counts.index_add_(0, states, torch.ones_like(states))
        return counts[states].reshape(batch.batch_size)

    def count(self, batch: TensorDictBase) -> Tensor:
        """Return the counts of a batch's states, int64 ``[*B]``, without counting the batch."""
        states = self._states.find(_state_columns(batch, self.keys)).cpu()
        if not len(self):
            return torch.zeros(batch.batch_size, dtype=torch.int64)
        counts = torch.where(states < 0, 0, self._counts.column("count")[states.clamp(min=0)])
        return counts.reshape(batch.batch_size)


def _of_state(keys: Sequence[NestedKey] | NestedKey) -> list[NestedKey]:
    """Return the argument ``keys`` as a list; raise if it is empty."""
    names = check_key_names("keys", keys, one=True)
    if not names:
        raise ValueError("keys must name at least one entry, got an empty list")
    return names


def _state_columns(batch: TensorDictBase, keys: list[NestedKey]) -> list[Tensor]:
    """Return the entries of a state as columns ``[N, *F]``."""
    check_rows(batch, values=True)
    for key in keys:
        check_tensors(**{f"batch[{key!r}]": require(batch, key)})
    return list(flat_columns(batch, keys).values())


def count_states(batch: TensorDictBase, keys: Sequence[NestedKey] | NestedKey = "observation") -> Tensor:
    """Count, for each row, how many rows of the batch have its state.

    ``count_states(batch, keys) ** -0.5`` is an exploration bonus, and ``batch[first]`` with ``first`` of
    `first_of_state` has each state once. To count over several batches, use `StateCounter`.

    Args:
        batch: ``[*B]``.
        keys: one entry or a list of entries that make a state, compared exactly. Default ``"observation"``.

    Returns:
        int64 ``[*B]``, at least 1.

    >>> from tensordict import TensorDict
    >>> batch = TensorDict({"x": torch.tensor([0.5, 0.0, -0.0]), "y": torch.tensor([1, 2, 2])}, [3])
    >>> count_states(batch, ["x", "y"])
    tensor([1, 2, 2])
    """
    counter = StateCounter(keys)
    counter.add(batch)
    return counter.count(batch)


def first_of_state(batch: TensorDictBase, keys: Sequence[NestedKey] | NestedKey = "observation") -> Tensor:
    """Mark the first row of each state, bool ``[*B]``: ``batch[first_of_state(batch)]`` has no duplicates.

    >>> from tensordict import TensorDict
    >>> first_of_state(TensorDict({"x": torch.tensor([7, 8, 7])}, [3]), "x")
    tensor([ True,  True, False])
    """
    names = _of_state(keys)
    states = RowNumbers(names).insert(_state_columns(batch, names))
    # State numbers grow by one at each new state, so the running maximum grows exactly there.
    highest = states.cummax(0).values if len(states) else states
    new = torch.ones_like(states, dtype=torch.bool)
    new[1:] = highest[1:] > highest[:-1]
    return new.reshape(batch.batch_size)


class CountSampler(RandomSampler):
    """Draws rows with a probability that decreases with the count of their state.

    A row's weight is ``count ** -power``, where the count is that of the stored rows with its state. With ``power`` 1
    each state is drawn equally often, however many rows it has; with 0 each row is. After a write, the next draw takes
    time in the number of stored rows; the others take time in its logarithm for each row.

    The storage must be a column storage (`LazyTensorStorage`, `LazyMemmapStorage`), since states are read from it.
    After ``buffer[index] = ...`` has changed states in place, call ``buffer.mark_update(index)``.

    Args:
        keys: one entry or a list of entries that make a state. Default ``"observation"``.
        power: at least 0. Default 1.0.

    >>> from tensordict import TensorDict
    >>> from flatroll.buffers import LazyTensorStorage, ReplayBuffer
    >>> buffer = ReplayBuffer(storage=LazyTensorStorage(10), sampler=CountSampler("cell"), batch_size=1000)
    >>> rows = buffer.extend(TensorDict({"cell": torch.tensor([3, 3, 3, 3, 8])}, [5]))
    >>> 400 < int((buffer.sample()["cell"] == 8).sum()) < 600
    True
    """

    def __init__(self, keys: Sequence[NestedKey] | NestedKey = "observation", power: float = 1.0) -> None:
        self.keys = _of_state(keys)
        self.power = float(check_number("power", power, least=0))
        self._storage: Any = None
        self._drawn_from: tuple[tuple[int, int], int] | None = None
        self._sums = torch.empty(0, dtype=torch.float64)
        self._slots = torch.empty(0, dtype=torch.int64)

    @override
    def attach(self, storage: StoredColumns) -> None:
        self._storage = storage

    @override
    def draw(self, ring: Ring, batch_size: int, generator: torch.Generator | None, follow: bool) -> Draw:
        version = ring.version
        ring.check_not_empty()
        now = (version, len(ring))
        if self._drawn_from != now:
            self._weigh(ring)
            self._drawn_from = now

        # Row i is drawn if the number lies between the sum of the weights before it and that sum plus its own weight.
        at = torch.rand(batch_size, generator=generator, dtype=torch.float64) * self._sums[-1]
        ranks = torch.searchsorted(self._sums, at, right=True).clamp(max=len(self._sums) - 1)
        slots = self._slots[ranks]
        following = ring.follow(slots) if follow else None
        return Draw(slots, follow=following, version=version)

    @override
    def mark_update(self, ring: Ring, slots: Tensor) -> None:
        self._drawn_from = None  # the rows may have new states now

    @override
    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._drawn_from = None

    def _weigh(self, ring: Ring) -> None:
        """Add up the weights of the stored rows."""
        self._slots = ring.slots_by_age(torch.arange(len(ring)))
        columns: Mapping[NestedKey, Any] = self._storage.columns
        missing = [key for key in self.keys if plain_key(key) not in columns]
        if missing:
            raise KeyError(
                f"the stored rows have no entry {missing[0]!r}; they have {', '.join(map(repr, columns)) or 'none'}"
            )

        states = RowNumbers(self.keys).insert(
            [columns[plain_key(key)].take(self._slots) for key in self.keys]
        )
        states = states.cpu()  # rows are drawn on the host
        weights = torch.bincount(states).double() ** -self.power
        self._sums = weights[states].cumsum(0)
