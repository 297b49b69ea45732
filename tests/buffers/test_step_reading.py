"""Reading the rows of a step writer: stored and waiting ones mixed, from storages of all kinds."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flatroll.buffers import (
    LazyMemmapStorage,
    LazyTensorStorage,
    MultiStepTransform,
    ReplayBuffer,
    StepWriter,
)
from flatroll.buffers.columns.column import TensorColumn
from flatroll.buffers.index.ring import Ring
from flatroll.buffers.steps.stored import StepPositions

ENVS, WINDOW, STEPS, ENTRIES = 3, 4, 22, ["observation", ("next", "observation"), ("next", "terminated")]


class ScaledColumn(TensorColumn):
    """Keeps whole numbers up to 127 in one byte each."""

    def __init__(self, rows: int, shape: torch.Size) -> None:
        super().__init__(torch.zeros(rows, *shape, dtype=torch.int8))
        self.dtype = torch.float32

    def put(self, slots: Any, values: Any, after: Any = None) -> None:
        super().put(slots, values.to(torch.int8), after)

    def write(self, slot: int, values: Any, after: Any = None) -> None:
        super().write(slot, values.to(torch.int8), after)

    def take(self, slots: Any) -> Any:
        return super().take(slots).float()

    def pool(self) -> "ScaledColumn":
        return ScaledColumn(0, self.shape)


class ScaledStorage(LazyTensorStorage):
    def make_column(self, key: Any, dtype: torch.dtype, shape: torch.Size) -> Any:
        return ScaledColumn(self.capacity, shape) if key == "observation" else None


CAPACITY = ENVS * WINDOW * 4
STORAGES: dict[str, Callable[[Path], Any]] = {
    "full": lambda path: LazyTensorStorage(CAPACITY),
    "compact": lambda path: LazyTensorStorage(CAPACITY, compact_obs=True),
    "frames": lambda path: LazyTensorStorage(
        CAPACITY, compact_obs=True, frame_stack={"observation": 2}, codec={"observation": "zstd"}
    ),
    "files": lambda path: LazyMemmapStorage(CAPACITY, scratch_dir=path, compact_obs=True),
    "own column": lambda path: ScaledStorage(CAPACITY, compact_obs=True),
}


def observation(episode: Any, step: int) -> Any:
    """Two frames of numbers that tell the env, its episode and the step; float32 ``[E, 2, 3]``."""
    frames = [np.stack([np.arange(ENVS), episode, np.full(ENVS, s)], -1) for s in (step, step + 1)]
    return np.stack(frames, 1).astype(np.float32)


def played(writer: StepWriter) -> list[dict[Any, Any]]:
    """Write `STEPS` steps; an episode has 7."""
    written = []
    for t in range(STEPS):
        episode, step = np.full(ENVS, t // 7), t % 7
        written.append(
            {
                "observation": observation(episode, step),
                "action": np.arange(ENVS) + 1j * t,
                ("next", "observation"): observation(episode, step + 1),
                ("next", "terminated"): np.full(ENVS, step == 6),
            }
        )
        writer.write(written[-1])
    return written


@pytest.fixture(params=STORAGES)
def writer(request: Any, tmp_path: Path) -> StepWriter:
    buffer = ReplayBuffer(storage=STORAGES[request.param](tmp_path), batch_size=8)
    return buffer.writer_for(ENVS, window=WINDOW)


@pytest.mark.parametrize("entries", [None, ENTRIES, ["action"], [("next", "observation")]])
def test_stored_and_waiting_rows_in_any_order(writer: StepWriter, entries: Any) -> None:
    written = played(writer)
    assert (writer.oldest, writer.steps, len(writer)) == (4, STEPS, 18 * ENVS)
    random = np.random.default_rng(0)
    for first in (4, 18, 20):  # stored ones among them, hardly any, none
        steps, envs = random.integers(first, STEPS, 50), random.integers(0, ENVS, 50)
        rows = writer.read_columns(steps, envs, entries)
        assert list(rows) == (entries or list(rows))
        for key in entries or written[0]:
            expected = np.stack([written[t][key][e] for t, e in zip(steps, envs, strict=True)])
            assert torch.equal(rows[key], torch.from_numpy(expected).view(rows[key].shape)), key
        whole = writer.read(steps, envs)
        assert all(torch.equal(whole[key], rows[key]) for key in rows)
        assert set(rows) == set(entries or whole.keys(True, True)) - {"next", "collector"}


def test_rows_of_one_step_are_given_as_one_number(writer: StepWriter) -> None:
    written = played(writer)
    for t in (5, 21):
        for steps, envs in (
            (t, range(ENVS)),
            (torch.tensor(t), torch.arange(ENVS)),
            (np.uint8(t), [0, 1, 2]),
        ):
            rows = writer.read_columns(steps, envs, ["observation"])["observation"]
            assert torch.equal(rows, torch.from_numpy(written[t]["observation"]))


def test_columns_are_transformed_as_rows_are() -> None:
    transform = MultiStepTransform(n_steps=3, gamma=0.5)
    buffer = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), transform=transform)
    writer = buffer.writer_for(ENVS, window=WINDOW)
    for t in range(STEPS):
        now, later = observation(np.zeros(ENVS), t), observation(np.zeros(ENVS), t + 1)
        flags = np.zeros(ENVS, np.bool_)
        next_entries = {"observation": later, "reward": np.ones(ENVS), "terminated": flags}
        writer.write({"observation": now, "next": next_entries})
    steps, envs = [10, 19, 21], [0, 1, 2]
    rows, columns = writer.read(steps, envs), writer.read_columns(steps, envs)
    assert set(columns) == set(rows.keys(True, True)) - {"next", "collector"}
    assert all(torch.equal(rows[key], value) for key, value in columns.items())
    assert columns["next", "reward"].flatten().tolist() == [1.75, 1.75, 1.0]


def test_wrong_positions_and_entries(writer: StepWriter) -> None:
    with pytest.raises(IndexError, match="steps 0 to 0 were requested, 0 to -1 are available"):
        writer.read_columns(0, 0)
    written = played(writer)
    with pytest.raises(KeyError, match="there is no entry 'nothing' to read"):
        writer.read_columns(STEPS - 1, 0, ["nothing"])
    with pytest.raises(KeyError, match="there is no entry 'nothing' to read"):
        writer.read_columns(5, 0, ["nothing"])
    with pytest.raises(TypeError, match="integers, got float64 and int64"):
        writer.read_columns(np.zeros(2), 0)
    for steps, envs in (([3, 5], 0), (STEPS, 0), (5, ENVS), (5, [0, -1])):
        with pytest.raises(IndexError, match=r"steps 3 to 5|steps 22 to 22|envs must be from 0 to 2, got"):
            writer.read_columns(steps, envs)
    values = writer.read_columns([5], [1], ["observation"])["observation"]
    assert torch.equal(values[0], torch.from_numpy(written[5]["observation"][1]))


def test_windows_of_unequal_lengths() -> None:
    """`flush` makes short windows, after which a step's window cannot be computed but must be searched."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(200 * ENVS))
    writer = buffer.writer_for(ENVS, window=20)
    random = np.random.default_rng(1)
    for t in range(170):
        flags = np.zeros(ENVS, np.bool_)
        writer.write({"at": np.arange(ENVS) + 10 * t, ("next", "done"): flags})
        if random.random() < 0.3:
            writer.flush()
    steps, envs = random.integers(0, 170, 500), random.integers(0, ENVS, 500)
    assert writer.read_columns(steps, envs)["at"].tolist() == (10 * steps + envs).tolist()


def test_overwritten_rows_have_no_position() -> None:
    ring, positions = Ring(8), StepPositions(num_envs=2)
    for window in range(3):  # of two steps each; the third overwrites the first
        ring.claim(4), ring.publish(4)
        positions.append(ring, 2 * window, 4 * window % 8, 2)
    for step in range(6):
        found = positions.find(torch.tensor([2 * step]), ring, stored=6, window=2)
        assert (found is None) == (step < 2)


def test_rows_that_are_overwritten_while_they_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another writer overwrites the first two windows then; what is read are no rows of it."""
    buffer = ReplayBuffer(storage=LazyTensorStorage(32), generator=torch.Generator().manual_seed(0))
    writer = buffer.writer_for(1, window=8)
    for t in range(28):
        writer.write({"observation": np.full((1, 2000), t), ("next", "done"): np.array([False])})
    foreign = buffer[:12].clone()
    foreign["observation"][:] = -1
    foreign["collector", "traj_ids"][:] = 1 << 40
    read, late = buffer.storage.read_rows, [foreign]

    def interrupted(*arguments: Any, **options: Any) -> Any:
        if late:
            buffer.extend(late.pop())
        return read(*arguments, **options)

    monkeypatch.setattr(buffer.storage, "read_rows", interrupted)
    steps = writer.sample(100)["observation"]  # too much for one call under the lock
    assert not late and writer.oldest == 8 and steps.min() >= 8 and steps.max() == 27
    late.append(foreign)
    with pytest.raises(IndexError, match="another writer has overwritten"):
        writer.read([*range(8, 28)] * 10, 0)
