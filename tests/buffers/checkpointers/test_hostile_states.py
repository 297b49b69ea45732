"""A saved state is data, never trusted: what was changed in it is refused, and nothing has changed then."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from crafted_states import CRAFTED as NAMED
from crafted_states import REBUILT, filled, new, same, use
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer
from flatroll.disk import Folder, LoadedVersion, Ragged
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


def changed_tables(path: Path, good: LoadedVersion, change: Callable[[Any], None]) -> bool:
    """Publish the good version with changed tables; whether the tables have what ``change`` changes."""
    with Folder(path, write=True, sync=False, keep=1) as folder:
        folder.load()
        tree = unpack(good.json, good.tensors)
        try:
            change(tree["buffer"])
            folder.publish(*pack(tree))
        except (KeyError, TypeError):  # rows, which are files of their own, or what is no data
            return False
    return True


@pytest.mark.parametrize("kind", sorted({kind for kind, _ in NAMED} - {"frames", "zstd", "items"}))
def test_what_ended_the_process_once_is_refused_in_files_too(kind: str, tmp_path: Path) -> None:
    filled(kind, 60).dumps(tmp_path / "saved", sync=False)
    good, other, count = Folder(tmp_path / "saved").load(), filled(kind, 30), 0
    before = other.state_dict()
    for number, (crafted, change) in enumerate([*NAMED, *REBUILT]):
        if crafted != kind or not changed_tables(tmp_path / "saved", good, change):
            continue
        count += 1
        if number >= len(NAMED):  # these tables are built anew
            one, twin = new(kind), new(kind)
            one.loads(tmp_path / "saved", strict=True)
            twin.load_state_dict(filled(kind, 60).state_dict())
            assert same(one[:], twin[:])
            use(one)
            continue
        with pytest.raises(ValueError, match=r"."):
            other.loads(tmp_path / "saved", strict=True)
        assert same(other.state_dict(), before), number
    assert count
    use(other)


ROWS: list[tuple[str, str, Callable[[Any], Any]]] = [
    ("slices", "next/done", lambda done: done[:, :0]),
    ("slices", "next/done", lambda done: done.expand(-1, 3).contiguous()),
    ("slices", "next/done", lambda done: done.int()),
    ("plain", "number", lambda values: values.int()),
    ("frames", "observation#back", lambda back: back.index_fill(0, torch.tensor([0]), 2**31 - 1)),
    ("frames", "observation#back", lambda back: torch.full_like(back, 2**31 - 1)),
    ("frames", "observation#back", lambda back: back.clone().fill_(-1)),
    ("frames", "observation#frames.values", lambda frames: Ragged(frames.values[:0], frames.lengths * 0)),
    ("zstd", "observation#rows", lambda rows: Ragged(rows.values.flip(0), rows.lengths)),
    ("zstd", "observation#rows", lambda rows: Ragged(rows.values[:0], rows.lengths * 0)),
    ("zstd", "state", lambda state: Ragged(state.values.repeat(2, 1), state.lengths * 2)),
    ("zstd frames", "observation#frames.rows.each", lambda each: Ragged(-each.values, each.lengths)),
    ("zstd frames", "observation#frames.rows.each", lambda each: Ragged(each.values + 2**40, each.lengths)),
]


@pytest.mark.parametrize("number", range(len(ROWS)))
def test_crafted_rows_with_right_checksums_are_refused(number: int, tmp_path: Path) -> None:
    kind, name, change = ROWS[number]
    filled(kind, 60).dumps(tmp_path, sync=False)
    reader = Folder(tmp_path)
    loaded = reader.load()
    columns = reader.read_rows()
    with Folder(tmp_path, write=True, sync=False, overwrite=True) as folder:
        folder.append({**columns, name: change(columns[name])}, first=loaded.head)
        folder.publish(loaded.json, loaded.tensors)
    other = filled(kind, 30)
    before = other.state_dict()
    with pytest.raises(ValueError, match=r"."):
        other.loads(tmp_path, strict=True)
    assert same(other.state_dict(), before)
    use(other)
