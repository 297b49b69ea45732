"""Whose memory loaded rows are in, and what is in slots that no file has."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer
from flatroll.buffers.checkpointers import rows as copying
from flatroll.buffers.checkpointers.rows import TensorStorageCheckpointer
from flatroll.buffers.checkpointers.saving import Span
from flatroll.buffers.columns.column import Column, TensorColumn
from flatroll.kernels.rows.host_memory import host_memory


class OwnMemory(LazyTensorStorage):
    """Keeps ``x`` in memory that the user has chosen."""

    def make_column(self, key: object, dtype: torch.dtype, shape: torch.Size) -> Column | None:
        if key != "x":
            return None
        self.chosen = torch.zeros(8, *shape, dtype=dtype)
        return TensorColumn(self.chosen)


def filled(path: Path) -> TensorDict:
    """The rows of a full ring, saved in ``path``."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    rows = torch.arange(11)
    for part in TensorDict({"x": rows.float(), "y": rows.to(torch.uint16)}, [11]).split(4):
        buffer.extend(part)
    buffer.dumps(path)
    found: TensorDict = buffer[:]
    return found


def test_a_new_storage_takes_over_what_was_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected, made = filled(tmp_path), []

    def noted(*args: object) -> torch.Tensor:
        made.append(host_memory(*args))  # type: ignore[arg-type]
        return made[-1]

    monkeypatch.setattr(copying, "host_memory", noted)
    buffer = ReplayBuffer(storage=LazyTensorStorage(8))
    buffer.loads(tmp_path)
    columns: dict[str, Any] = buffer.storage.columns  # type: ignore[attr-defined]
    addresses = [column.data.data_ptr() for column in columns.values()]
    assert addresses == [memory.data_ptr() for memory in made]
    buffer.loads(tmp_path)  # somebody may have the old memory: it stays, and is written to
    assert addresses == [column.data.data_ptr() for column in columns.values()]
    assert bool((buffer[:] == expected).all())


def test_a_ring_that_was_not_full_has_room_for_the_rest(tmp_path: Path) -> None:
    first, second = (ReplayBuffer(storage=LazyTensorStorage(8)) for _ in range(2))
    first.extend(torch.arange(5.0))
    first.dumps(tmp_path)
    second.loads(tmp_path)
    second.extend(torch.arange(5.0, 8.0))
    assert second[:].tolist() == list(range(8))


def test_memory_that_somebody_chose_stays(tmp_path: Path) -> None:
    expected = filled(tmp_path / "saved")
    own, mapped = OwnMemory(8), LazyMemmapStorage(8, scratch_dir=tmp_path / "files")
    for storage in (own, mapped):
        buffer = ReplayBuffer(storage=storage)
        buffer.loads(tmp_path / "saved")
        assert bool((buffer[:] == expected).all())
    assert sorted(own.chosen.tolist()) == list(range(3, 11))
    (file,) = (tmp_path / "files").rglob("x*")
    assert sorted(torch.from_file(str(file), size=8).tolist()) == list(range(3, 11))


def test_two_buffers_loaded_from_one_state_share_nothing(tmp_path: Path) -> None:
    filled(tmp_path)
    first, second, third = (ReplayBuffer(storage=LazyTensorStorage(8)) for _ in range(3))
    first.loads(tmp_path)
    state = first.state_dict()
    second.load_state_dict(state)
    third.load_state_dict(state)
    expected = first[:].clone()
    second.extend(expected[:5] * 0)
    assert bool((third[:] == expected).all()) and bool((first[:] == expected).all())


def test_slots_of_no_file_are_zeros(monkeypatch: pytest.MonkeyPatch) -> None:
    def used(rows: int, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        return torch.full((rows, *shape), 7, dtype=dtype)

    monkeypatch.setattr(copying, "host_memory", used)
    storage = LazyTensorStorage(6)
    buffer = ReplayBuffer(storage=storage)
    buffer.extend(TensorDict({"x": torch.arange(6.0), "y": torch.arange(6).to(torch.uint16)}, [6]))
    spans = [
        Span(
            torch.tensor(slots),
            lambda targets, values=values: {"x": values.float(), "y": values.to(torch.uint16)},
        )  # type: ignore[misc]
        for slots, values in (
            ([-1, 1], torch.tensor([9, 1])),
            ([4, 0], torch.tensor([5, 3])),
            ([3], torch.tensor([4])),
        )
    ]
    tables = {**storage.tables(0)}
    restored = TensorStorageCheckpointer().restore(storage, tables, spans, 6)["columns"]
    for name in ("x", "y"):
        assert restored[name]["values"].tolist() == [3, 1, 0, 4, 5, 0]
