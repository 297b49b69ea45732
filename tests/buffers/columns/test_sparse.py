"""Columns of which most rows are zeros."""

from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.buffers.columns.sparse import SparseColumn


@examples(40, derandomize=True)
@given(
    rows=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.uint8, torch.bool, torch.float16]),
    shape=st.sampled_from([(), (2,), (1, 3)]),
    seed=st.integers(0, 99),
)
def test_any_writes_read_like_a_plain_column(rows: int, dtype: Any, shape: Any, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    plain = torch.zeros((rows, *shape), dtype=dtype)
    column = SparseColumn(rows, shape, dtype)
    for _ in range(12):
        count = int(torch.randint(0, rows + 1, (), generator=random))
        values = torch.randint(0, 3, (count, *shape), generator=random).to(dtype)
        values[torch.rand(count, generator=random) < 0.6] = 0
        slots = torch.randperm(rows, generator=random)[:count]
        if torch.rand((), generator=random) < 0.5:
            first = int(torch.randint(0, rows - count + 1, (), generator=random))
            slots = torch.arange(first, first + count)
            column.write(first, values)
        else:
            column.put(slots, values)
        plain[slots] = values
        assert torch.equal(column.take(torch.arange(rows)), plain)
        again = SparseColumn(0, shape, dtype)
        again.load_state_dict(column.state_dict(rows))
        assert torch.equal(again.take(torch.arange(rows)), plain)
    assert len(column._entries) <= 2 * rows + 2  # room is used again


def test_minus_zero_and_nan_are_kept_bit_by_bit() -> None:
    column = SparseColumn(3, (1,), torch.float32)
    column.write(0, torch.tensor([[-0.0], [torch.nan], [0.0]]))
    got = column.take(torch.arange(3)).view(torch.int32)
    assert torch.equal(got, torch.tensor([[-0.0], [torch.nan], [0.0]]).view(torch.int32))


def batch(first: int, count: int) -> TensorDict:
    step = torch.arange(first, first + count)
    kept = step % 8 == 0
    state = torch.where(kept[:, None, None], step[:, None, None] + 1.0, 0.0).expand(count, 1, 64).contiguous()
    done = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict(
        {
            "step": step,
            "recurrent_state": state,
            "is_init": (step == 0)[:, None],
            "collector": {"has_state": kept, "traj_ids": torch.zeros_like(step)},
            "next": {"done": done, "terminated": done.clone(), "truncated": done.clone()},
        },
        [count],
    )


@pytest.mark.parametrize("compact", [False, True])
def test_states_of_every_8th_row_take_little_room(compact: bool) -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(4000, compact_obs=compact, sparse=["recurrent_state"]),
        sampler=SliceSampler(slice_len=16),
    )
    for first in range(0, 10_000, 500):  # around the ring twice
        data = batch(first, 500)
        if compact:
            data["next", "step"] = data["step"] + 1
        buffer.extend(data)
    assert buffer.stats()["bytes_per_row"] < 256 / 8 + 32
    assert buffer.storage.nbytes < 4000 * (2 * 256 / 8 + 32)
    sample = buffer.sample(160)
    starts = sample["is_init"].squeeze(1)
    assert (sample["step"][starts] % 8 == 0).all()
    expected = (sample["step"] + 1.0) * sample["collector", "has_state"]
    assert torch.equal(sample["recurrent_state"][:, 0, 5], expected)
    again = ReplayBuffer(
        storage=LazyTensorStorage(4000, compact_obs=compact, sparse=["recurrent_state"]),
        sampler=SliceSampler(slice_len=16),
    )
    again.load_state_dict(buffer.state_dict())
    assert (again[:] == buffer[:]).all()


def test_errors_say_what_is_wrong() -> None:
    with pytest.raises(
        TypeError, match=r"sparse must be a list of keys, got the string 'state': write \['state'\]"
    ):
        LazyTensorStorage(10, sparse="state")
    with pytest.raises(
        TypeError, match=r"codec must be a dict by entry, e.g. codec=\{'observation': 'zstd'\}, got 'zstd'"
    ):
        LazyTensorStorage(10, codec="zstd")  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"frame_stack must be a dict by entry, e.g. frame_stack=\{'observation': 4\}, got 4"
    ):
        LazyTensorStorage(10, frame_stack=4)  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match=r"sparse names \['observation'\], which frame_stack or codec name as well"
    ):
        LazyTensorStorage(10, sparse=["observation"], frame_stack={"observation": 4})
    with pytest.raises(ValueError, match=r"sparse names \['state'\], not in the batch"):
        ReplayBuffer(storage=LazyTensorStorage(10, sparse=["state"])).extend(batch(0, 4))
