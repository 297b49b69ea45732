"""What saves and loads keep: kills, full rings, markers at the root, filters, planted pickles, edits during a save."""

import contextlib
import pickle
import re
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    FlatStorageCheckpointer,
    H5StorageCheckpointer,
    LazyMemmapStorage,
    LazyTensorStorage,
    NestedStorageCheckpointer,
    PrioritizedSampler,
    ReplayBuffer,
    SliceSampler,
    TensorStorageCheckpointer,
)
from flatroll.buffers.checkpointers.saving import RowCopy
from flatroll.disk import files
from flatroll.rollouts import Collector
from flatroll.wrappers import StepCounter

KINDS = [TensorStorageCheckpointer, FlatStorageCheckpointer, NestedStorageCheckpointer, H5StorageCheckpointer]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__[:4])


def rows_of(first: int, count: int, ends: int = 9) -> TensorDict:
    """Rows of episodes of ``ends`` steps, known by their done only; the root has what the reset said."""
    row = torch.arange(first, first + count)
    off = torch.zeros(count, 1, dtype=torch.bool)
    done = (row % ends == ends - 1)[:, None]
    return TensorDict(
        {
            "observation": row[:, None].double(),
            "action": row,
            **{name: off.clone() for name in ("done", "terminated", "truncated")},
            "next": {
                "observation": row[:, None].double() + 1,
                "reward": row[:, None].float(),
                "done": done,
                "terminated": done,
                "truncated": off.clone(),
            },
        },
        [count],
    )


def made(kind: Any, capacity: int = 60, sampler: Any = None, **options: Any) -> ReplayBuffer:
    return ReplayBuffer(
        storage=LazyTensorStorage(capacity, **options),
        sampler=SliceSampler(slice_len=5) if sampler is None else sampler,
        checkpointer=kind(),
        batch_size=100,
        generator=torch.Generator().manual_seed(0),
    )


def equal(left: TensorDict, right: TensorDict) -> bool:
    return left.batch_size == right.batch_size and bool((left == right).all())


class Killed(BaseException):
    """The process ends here: nothing that comes later happens."""


@pytest.mark.parametrize("kind", [TensorStorageCheckpointer, H5StorageCheckpointer])
def test_a_kill_at_any_operation_leaves_the_old_or_the_new_version(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any
) -> None:
    few, left, done = (
        ("action", ("next", "done")),
        0,
        False,
    )  # columns: each is written with several operations
    old = rows_of(0, 50).select(*few)
    names = ("create", "write", "sync", "rename", "remove", "sync_folder")
    real = {name: getattr(files, name) for name in names}
    found = []
    for kill in range(200):
        folder, buffer = tmp_path / str(kill), made(kind)
        buffer.extend(old)
        buffer.dumps(folder)
        before = buffer[:].clone()
        buffer.extend(rows_of(50, 30).select(*few))
        left = kill

        def until(name: str) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left < 0:
                    raise Killed
                return real[name](*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            for name in names:
                patch.setattr(files, name, until(name))
            try:
                buffer.dumps(folder)
            except Killed:
                done = False
            else:
                done = True
        other = made(kind)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what a kill leaves is no damage
            other.loads(folder)
        new = equal(other[:], buffer[:])
        assert new or equal(other[:], before)
        assert new or not done
        found.append(new)
        if done:
            break
    assert done and not found[0] and found[-1] and len(found) > 3


@each_kind
def test_the_seam_of_a_full_ring(tmp_path: Path, kind: Any) -> None:
    buffer, other = made(kind), made(kind)
    for first in range(0, 143, 13):
        buffer.extend(
            rows_of(first, 13, ends=1000)
        )  # one episode: only the cursor says where the ring is cut
        buffer.dumps(tmp_path)
    other.loads(tmp_path)
    for _ in range(20):
        sample = other.sample()
        inside = ~sample["is_init"][1:, 0] if "is_init" in sample else ~sample["next", "done"][:-1, 0]
        step = sample["observation"][:, 0]
        assert bool((step[1:] == step[:-1] + 1)[inside].all())


@each_kind
def test_root_markers_come_back(tmp_path: Path, kind: Any) -> None:
    buffer, used = made(kind), made(kind)
    buffer.extend(rows_of(0, 80))
    garbage = rows_of(0, 60)
    for name in ("done", "terminated", "truncated"):
        garbage[name] = ~garbage[name]
    used.extend(garbage)
    buffer.dumps(tmp_path)
    used.loads(tmp_path)
    assert equal(used[:], buffer[:]) and not bool(used[:]["done"].any())


@each_kind
def test_a_ring_that_is_full_exactly_to_its_end(tmp_path: Path, kind: Any) -> None:
    buffer, used = made(kind), made(kind)
    used.extend(rows_of(7, 5))
    for _ in range(2):
        buffer.extend(rows_of(0, 60))
        buffer.dumps(tmp_path)
        used.loads(tmp_path)
        assert equal(used[:], buffer[:]) and used.extend(rows_of(0, 1)).tolist() == [0]


def test_h5_filters(tmp_path: Path) -> None:
    plain, packed, filtered = (
        made(H5StorageCheckpointer, 5000),
        made(lambda: H5StorageCheckpointer(h5_kwargs={"compression": "gzip"}), 5000),
        made(
            lambda: H5StorageCheckpointer(
                checkpoint_file="rows.h5",
                h5_kwargs={"compression": "gzip", "shuffle": True, "compression_opts": 9},
            ),
            5000,
        ),
    )
    sizes = []
    for buffer in (plain, packed, filtered):
        buffer.extend(rows_of(0, 4000))
        buffer.dumps(tmp_path)
        sizes.append((tmp_path / buffer.storage.checkpointer.checkpoint_file).stat().st_size)
        other = made(H5StorageCheckpointer, 5000)
        other.storage.checkpointer = buffer.storage.checkpointer
        other.loads(tmp_path)
        assert equal(other[:], buffer[:])
    assert sizes[0] > 2 * sizes[1] > 2 * sizes[2]
    assert sizes[0] < 4000 * 80, "no group per trajectory"


class Planted:
    """Runs when it is unpickled."""

    def __reduce__(self) -> Any:
        return open, ("planted", "w")


@pytest.mark.parametrize("kind", [TensorStorageCheckpointer, H5StorageCheckpointer])
def test_planted_pickles_do_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.chdir(tmp_path)
    buffer, other = made(kind), made(kind)
    buffer.extend(rows_of(0, 80))
    buffer.dumps(tmp_path / "saved")
    for name in ("prefetch.pkl", "other.pickle", "state.pt", "meta.pickle"):
        (tmp_path / "saved" / name).write_bytes(pickle.dumps(Planted()))
    other.loads(tmp_path / "saved")
    assert equal(other[:], buffer[:]) and not (tmp_path / "planted").exists()
    for file in (tmp_path / "saved").iterdir():  # a payload in the place of any file is damage
        content = file.read_bytes()
        file.write_bytes(pickle.dumps(Planted()))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with contextlib.suppress(ValueError):
                other.loads(tmp_path / "saved")
        file.write_bytes(content)
    assert not (tmp_path / "planted").exists()


def test_no_load_path_knows_pickle() -> None:
    """In disk/ and in the checkpointers nothing can unpickle, in whatever way."""
    root = Path(__file__).parents[3] / "src" / "flatroll"
    sources = [*(root / "disk").rglob("*.py"), *(root / "buffers" / "checkpointers").rglob("*.py")]
    assert len(sources) > 10
    words = r"\b(import (cloud)?pickle|pickle\.\w|torch\.load|allow_pickle|weights_only|joblib|eval\(|exec\()"
    wrong = [
        f"{file.name}: {line.strip()}"
        for file in sources
        for line in file.read_text().splitlines()
        if re.search(words, line)
    ]
    assert wrong == []


def test_another_capacity_other_shifts_and_priorities(tmp_path: Path) -> None:
    buffer = made(FlatStorageCheckpointer)
    n_step = rows_of(0, 80)
    n_step["next", "observation"] += 2  # three steps on: not the shift of the observations
    n_step["steps_to_next_obs"] = torch.full((80, 1), 3)
    buffer.extend(n_step)
    buffer.dumps(tmp_path / "n-step")
    other = made(FlatStorageCheckpointer)
    other.loads(tmp_path / "n-step")
    assert equal(other[:], buffer[:])
    with pytest.raises(
        ValueError, match=r"room for 60 rows, this storage for 70: make it with max_size=60; to continue"
    ):
        made(FlatStorageCheckpointer, 70).loads(tmp_path / "n-step")

    def prioritized() -> ReplayBuffer:
        return made(TensorStorageCheckpointer, sampler=PrioritizedSampler(60, alpha=0.7, beta=0.5))

    buffer, other = prioritized(), prioritized()
    buffer.extend(rows_of(0, 70))
    buffer.update_priority(torch.arange(60), torch.rand(60) + 0.1)
    buffer.dumps(tmp_path / "priorities")
    other.loads(tmp_path / "priorities")
    assert torch.equal(other.sample(50)["action"], buffer.sample(50)["action"])


def test_new_rows_have_the_highest_priority_that_was_ever_given(tmp_path: Path) -> None:
    """Also where it was lowered since, so that no stored row has it."""

    def prioritized() -> ReplayBuffer:
        return made(TensorStorageCheckpointer, sampler=PrioritizedSampler(60, alpha=0.7, beta=0.5))

    buffer, other = prioritized(), prioritized()
    buffer.extend(rows_of(0, 40))
    for highest in (50.0, 0.5):
        buffer.update_priority(torch.arange(40), torch.full((40,), highest))
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    for each in (buffer, other):
        each.extend(rows_of(40, 10))
    before, after = buffer.sampler.state_dict()["priority"], other.sampler.state_dict()["priority"]
    assert torch.equal(before, after) and after[45] > 10 * after[0]


def test_rows_edited_while_files_are_written_are_in_the_next_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, other = made(TensorStorageCheckpointer), made(TensorStorageCheckpointer)
    buffer.extend(rows_of(0, 40))
    buffer.dumps(tmp_path)
    buffer[3] = buffer[20]

    publish, edited = files.publish, list[int]()

    def edit_first(*args: Any, **options: Any) -> None:
        if not edited:
            edited.append(5)
            buffer[5] = buffer[20]  # all is copied, and the writers may go on
        publish(*args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(files, "publish", edit_first)
        buffer.dumps(tmp_path)
    assert edited
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert equal(other[:], buffer[:]) and equal(other[5], buffer[20])


def test_the_first_rows_may_come_while_an_empty_buffer_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer, other = made(TensorStorageCheckpointer), made(TensorStorageCheckpointer)
    begin = RowCopy.begin
    thread = threading.Thread(target=buffer.extend, args=(rows_of(0, 20),))

    def beside(*arguments: Any) -> None:
        thread.start()
        thread.join(0.2)  # it waits for the save
        begin(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(RowCopy, "begin", beside)
        buffer.dumps(tmp_path)
    thread.join()
    other.loads(tmp_path)
    assert len(other) == 0 and len(buffer) == 20
    buffer.dumps(tmp_path)
    other.loads(tmp_path)
    assert equal(other[:], buffer[:])


def test_nobody_writes_or_draws_while_the_tables_are_copied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = made(TensorStorageCheckpointer)
    buffer.extend(rows_of(0, 40))
    tables, free = buffer.tables, []

    def watched(ahead: list[Any]) -> dict[str, Any]:
        def look() -> None:
            for lock in (buffer.write_lock, buffer.lock):
                if lock.acquire(blocking=False):
                    lock.release()
                    free.append(lock)

        thread = threading.Thread(target=look)
        thread.start()
        thread.join()
        return tables(ahead)

    monkeypatch.setattr(buffer, "tables", watched)
    buffer.dumps(tmp_path)
    assert free == []


def test_the_references_example_of_a_checkpoint(tmp_path: Path) -> None:
    """Three envs, rows [3, time], an HDF5 file; imports changed."""
    import gymnasium as gym

    env = StepCounter(gym.make_vec("CartPole-v1", num_envs=3))
    torch.manual_seed(0)
    collector = Collector(env, policy=None, total_frames=210, frames_per_batch=21)
    rb = ReplayBuffer(storage=LazyMemmapStorage(100, ndim=2))
    rb_test = ReplayBuffer(storage=LazyMemmapStorage(100, ndim=2))
    rb.storage.checkpointer = H5StorageCheckpointer()
    rb_test.storage.checkpointer = H5StorageCheckpointer()
    for _i, data in enumerate(collector):
        rb.extend(data.reshape(3, -1))  # seven steps of each env
        assert rb._storage.max_size == 102
        rb.dumps(tmp_path)
        rb_test.loads(tmp_path)
        assert equal(rb_test[:], rb[:])
    collector.shutdown()


@pytest.mark.parametrize("kind", [TensorStorageCheckpointer, H5StorageCheckpointer])
def test_rows_that_are_overwritten_while_a_full_ring_is_saved(tmp_path: Path, kind: Any) -> None:
    class During(kind):  # type: ignore[misc]
        """Rows come while the first ones are written, as from another thread."""

        extended = False

        def dump(self, storage: Any, slots: torch.Tensor) -> Any:
            dumped = super().dump(storage, slots)
            if not self.extended:
                self.extended = True
                buffer.extend(rows(8000, 500))
            return dumped

    def rows(first: int, count: int) -> TensorDict:
        number = torch.arange(first, first + count)
        done = torch.zeros(count, 1, dtype=torch.bool)
        return TensorDict(
            {"observation": number[:, None].float().expand(-1, 1000), "next": {"done": done}}, [count]
        )

    buffer = ReplayBuffer(storage=LazyTensorStorage(8000), checkpointer=During())
    buffer.extend(rows(0, 8000))
    buffer.dumps(tmp_path / "saved")
    other = ReplayBuffer(storage=LazyTensorStorage(8000), checkpointer=kind())
    other.loads(tmp_path / "saved")
    assert equal(other[:], buffer[:])
