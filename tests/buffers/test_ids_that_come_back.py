"""An id that comes back where its trajectory does not go on: two writers with one number."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler

JOINED = "only id, done, is_init and step_count are compared, not the stored next observation"


def steps(writer: int, first: int, count: int, **options: Any) -> TensorDict:
    """Steps of the one episode of ``writer``, all under id 7."""
    at = torch.arange(first, first + count)
    now = torch.stack([torch.full_like(at, writer), at], -1).float()
    later = {"observation": now + torch.tensor([0.0, 1.0]), "done": torch.zeros(count, 1, dtype=torch.bool)}
    marks = {"is_init": (at == 0).unsqueeze(-1), "collector": {"traj_ids": torch.full((count,), 7)}}
    counted = {"step_count": at.unsqueeze(-1)} if options.get("step_count", True) else {}
    return TensorDict({"observation": now, **marks, **counted, "next": later}, [count])


def sliced(compact: bool = False) -> ReplayBuffer:
    generator = torch.Generator().manual_seed(0)
    storage = LazyTensorStorage(100, compact_obs=compact)
    return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=6), generator=generator)


@pytest.mark.xfail(strict=False, reason=JOINED)
@pytest.mark.parametrize("step_count", [True, False])
@pytest.mark.parametrize("compact", [False, True])
def test_rows_of_two_writers_are_not_joined(compact: bool, step_count: bool) -> None:
    """Refused, or cut: no slice of six rows is then there."""
    buffer = sliced(compact)
    buffer.extend(steps(0, 0, 3, step_count=step_count))
    try:
        buffer.extend(steps(1, 3, 3, step_count=step_count))
    except ValueError as error:
        assert "writer=" in str(error)
        return
    with pytest.raises(RuntimeError, match="no stored trajectory has 6 rows"):
        buffer.sample(6)


@pytest.mark.parametrize("compact", [False, True])
def test_rows_of_one_writer_are_joined(compact: bool) -> None:
    buffer = sliced(compact)
    buffer.extend(steps(0, 0, 3))
    buffer.extend(steps(0, 3, 3))
    assert buffer.sample(6)["observation"][:, 1].tolist() == [0, 1, 2, 3, 4, 5]
