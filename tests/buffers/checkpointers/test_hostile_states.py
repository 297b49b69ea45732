"""A saved state is data, never trusted: what was changed in it is refused, and nothing has changed then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer
from flatroll.disk import Folder
from flatroll.disk.state_tree import pack, unpack


def made(rows: int = 0) -> ReplayBuffer:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(40, compact_obs=True, frame_stack={"observation": 2}, sparse=["state"]),
        sampler=PrioritizedSliceSampler(40, alpha=0.7, beta=0.5, slice_len=3),
        batch_size=6,
        generator=torch.Generator().manual_seed(0),
    )
    for first in range(0, rows, 10):
        row = torch.arange(first, first + 10)
        stacks = row[:, None, None] + torch.arange(3)[:, None].float()
        root = {
            "observation": stacks[:, :2].contiguous(),
            "state": (row % 3 == 0)[:, None].float(),
            "row": row,
        }
        after = {"observation": stacks[:, 1:].contiguous(), "done": (row % 7 == 6)[:, None]}
        buffer.extend(TensorDict(root | {"next": after}, [10]))
    return buffer


def put(path: str, value: Any, field: str | None = None) -> Callable[[Any], None]:
    """Set what stands at ``path`` of a state, or a field of the table there; ``value`` may be a function of it."""

    def change(state: Any) -> None:
        *way, last = path.split("/")
        for name in way:
            state = state[name]
        if field is None:
            state[last] = value(state[last]) if callable(value) else value
        else:
            state[last][field] = value

    return change


CRAFTED: list[Callable[[Any], Any]] = [
    put("ring/fragments", lambda table: table[:3]),
    put("ring/fragments", np.zeros(64)),
    put("ring/fragments", 10**6, field="chain"),
    put("ring/fragments", 10**6, field="pool"),
    put("ring/state", 2**40, field="end"),
    put("ring/state", 2**40, field="written"),
    put("ring/state", -5, field="head"),
    put("ring/spare", lambda spare: spare[:1]),
    put("ring/capacity", 2**40),
    put("ring/capacity", -5),
    put("ring", {}),
    put("ring", []),
    put("keys", None),
    put("keys", {"done": 5}),
    put("keys/done", 5),
    put("keys/traj", ()),
    put("keys/more_done", [1]),
    put("storage", 5),
    put("storage/structure", ["tree", [1]]),
    put("storage/structure", ["nothing"]),
    put("storage/like", {}),
    put("storage/like", {"row": (torch.int64, torch.Size([2]))}),
    put("storage/kinds", {}),
    put("storage/pool", {}),
    put("storage/pool/observation/values", lambda values: values[:1]),
    put("storage/lanes", torch.Size([7])),
    put("sampler", {}),
    put("sampler/priority", lambda values: values * torch.nan),
    put("sampler/written", 2**40),
    put("generator", torch.zeros(5, dtype=torch.uint8)),
    put("ahead", [5]),
    lambda state: state.clear(),
]


def test_crafted_tables_are_refused(tmp_path: Path) -> None:
    saved = made(60)
    saved.dumps(tmp_path)
    other = made(20)
    before = other[:]
    reader = Folder(tmp_path).load()
    for number, change in enumerate(CRAFTED):
        tree = unpack(reader.json, reader.tensors)
        change(tree["buffer"])
        with Folder(tmp_path, write=True, sync=False, keep=1) as folder:
            folder.load()
            folder.publish(*pack(tree))
        for buffer in (other, made()):
            with pytest.raises(ValueError, match=r"."):
                buffer.loads(tmp_path, strict=True)
        assert bool((other[:] == before).all()), number
        other.sample()


def test_other_rows_than_the_tables_count_are_refused(tmp_path: Path) -> None:
    saved, other = made(60), made()
    saved.dumps(tmp_path)
    loaded = Folder(tmp_path).load()
    for head in (loaded.head + 1, loaded.end):
        with Folder(tmp_path, write=True, sync=False, keep=1) as folder:
            folder.load()
            folder.publish(loaded.json, loaded.tensors, head=head)
        with pytest.raises(ValueError, match=r"it counts the rows 20 \.\.\. 59"):
            other.loads(tmp_path)
    with Folder(tmp_path, write=True, sync=False, overwrite=True) as folder:
        folder.append({"row": torch.arange(40)}, first=20)
        folder.publish(loaded.json, loaded.tensors)
    with pytest.raises(ValueError, match="a part has the tensors"):
        other.loads(tmp_path)
    with Folder(tmp_path, write=True, sync=False, overwrite=True) as folder:
        folder.append({"more": torch.arange(40)}, first=20)
        folder.publish(loaded.json, loaded.tensors)
    with pytest.raises(ValueError, match="have an entry 'more'"):
        other.loads(tmp_path)
    assert len(other) == 0
