"""Columns that users write, in storages of theirs."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers import (
    After,
    Column,
    ColumnStorage,
    LazyMemmapStorage,
    LazyTensorStorage,
    ReplayBuffer,
    SliceSampler,
)


class HalfColumn(Column):
    """Float32 values in two bytes each."""

    def __init__(self, rows: int, shape: torch.Size) -> None:
        self.dtype, self.shape = torch.float32, shape
        self.data = torch.zeros(rows, *shape, dtype=torch.float16)

    def write(self, slot: int, values: Tensor, after: After | None = None) -> None:
        self.data[slot : slot + len(values)] = values

    def put(self, slots: Tensor, values: Tensor, after: After | None = None) -> None:
        self.data[slots] = values.half()

    def take(self, slots: Tensor) -> Tensor:
        return self.data[slots].float()

    def pool(self) -> "HalfColumn":
        return HalfColumn(0, self.shape)

    def grow(self, rows: int) -> None:
        more = self.data.new_zeros(max(0, rows - len(self.data)), *self.shape)
        self.data = torch.cat([self.data, more])

    @property
    def nbytes(self) -> int:
        return 2 * self.data.numel()


class HalfStorage(LazyTensorStorage):
    """Observations in two bytes a number."""

    def make_column(self, key: Any, dtype: torch.dtype, shape: torch.Size) -> Column | None:
        return HalfColumn(self.capacity, shape) if key == "observation" else None


class HalfMemmapStorage(LazyMemmapStorage):
    """The same, with the other columns in files."""

    make_column = HalfStorage.make_column  # type: ignore[assignment]


@pytest.mark.parametrize("compact", [False, True])
def test_a_column_of_ones_own_gives_what_a_plain_one_gives(world: Any, compact: bool) -> None:
    """Small whole numbers are the same in two bytes; slices, next observations, a ring that wraps, a state."""
    kinds: list[type[ColumnStorage]] = [LazyTensorStorage, HalfStorage, HalfMemmapStorage]
    buffers = []
    for kind in kinds:
        storage: Any = kind(40, compact_obs=compact)
        generator = torch.Generator().manual_seed(0)
        sampler = SliceSampler(slice_len=4)
        buffers.append(ReplayBuffer(storage=storage, sampler=sampler, batch_size=16, generator=generator))
    for episode in range(8):
        batch = world.to_batch(world.episode(0, episode, 13))
        samples = []
        for buffer in buffers:
            buffer.extend(batch)
            samples.append(buffer.sample())
        assert all(bool((sample == samples[0]).all()) for sample in samples)
    columns = [buffer.storage.columns["observation"] for buffer in buffers]
    assert [type(column) for column in columns[1:]] == [HalfColumn] * 2
    assert columns[1].nbytes == columns[0].nbytes // 2

    options: dict[str, Any] = {"sampler": SliceSampler(slice_len=4), "generator": torch.Generator()}
    other = ReplayBuffer(storage=HalfStorage(40, compact_obs=compact), **options)
    other.load_state_dict(buffers[1].state_dict())
    assert bool((other[:] == buffers[0][:]).all())
    plain = ReplayBuffer(storage=LazyTensorStorage(40, compact_obs=compact), **options)
    plain.extend(world.to_batch(world.episode(0, 0, 13)))
    with pytest.raises(ValueError, match="in a HalfColumn as batch"):
        plain.load_state_dict(buffers[1].state_dict())


@pytest.mark.parametrize("size", [1, 2])
def test_a_column_that_rounds_keeps_no_more_next_observations(world: Any, size: int) -> None:
    """An episode in pieces of ``size`` rows: a row's next observation is that of the next piece, as it was rounded."""
    plain, half = (
        ReplayBuffer(storage=kind(400, compact_obs=True), sampler=SliceSampler(slice_len=4), batch_size=8)
        for kind in (LazyTensorStorage, HalfStorage)
    )
    batch = world.to_batch(world.episode(0, 0, 200))  # more pieces than the pool has at first
    for key in ("observation", ("next", "observation")):
        batch[key] = batch[key] + 0.1  # not a number of two bytes
    for buffer in (plain, half):
        for first in range(0, 200, size):
            buffer.extend(batch[first : first + size])
    pools = [buffer.storage.pool.entries["observation"] for buffer in (plain, half)]
    assert len(pools[1].data) == len(pools[0].data)
    later = half[:]["next", "observation"]
    assert torch.equal(later, batch["next", "observation"].half().float())
    assert torch.equal(later[:-1], half[:]["observation"][1:])


def test_a_column_of_ones_own_cannot_be_shared_by_processes() -> None:
    buffer = ReplayBuffer(storage=HalfMemmapStorage(4))
    buffer.extend(TensorDict({"observation": torch.zeros(2, 3), "action": torch.zeros(2)}, [2]))
    with pytest.raises(RuntimeError, match="the buffer has a HalfColumn, which other processes cannot see"):
        buffer.storage.enter_process()


def test_a_half_written_column_cannot_be_made() -> None:
    class Half(Column):
        def take(self, slots: Tensor) -> Tensor:
            raise AssertionError

    with pytest.raises(TypeError, match="abstract"):
        Half()  # type: ignore[abstract]
