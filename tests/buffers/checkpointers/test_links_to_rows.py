"""Checkpoints of buffers whose rows are files: no row is written, and a crash leaves the old rows or the new ones."""

import errno
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    DiskStorage,
    DiskStorageCheckpointer,
    ImmutableDatasetWriter,
    LazyTensorStorage,
    PrioritizedSampler,
    PrioritizedSliceSampler,
    RandomSampler,
    ReplayBuffer,
    ReplayBufferEnsemble,
    SamplerWithoutReplacement,
    SliceSampler,
    SliceSamplerWithoutReplacement,
    TensorStorageCheckpointer,
)
from flatroll.buffers.storages.disk.forms import FrameForm
from flatroll.disk import Checkpoint, DamagedFileError, Folder, Ragged, files

CAPACITY = 48
SAMPLERS: dict[str, Callable[[], Any]] = {
    "random": RandomSampler,
    "fresh": lambda: RandomSampler(max_policy_lag=30),
    "once": SamplerWithoutReplacement,
    "slices": lambda: SliceSampler(slice_len=4),
    "slices once": lambda: SliceSamplerWithoutReplacement(slice_len=4),
    "prioritized": lambda: PrioritizedSampler(CAPACITY, alpha=0.7, beta=0.5),
    "prioritized slices": lambda: PrioritizedSliceSampler(CAPACITY, alpha=0.7, beta=0.5, slice_len=4),
}
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "compact": {"compact_obs": True},
    "frames": {"frame_stack": {"observation": 4}},
    "zstd": {"codec": {"observation": "zstd"}},
    "compact frames": {"compact_obs": True, "frame_stack": {"observation": 4}},
}
OPERATIONS = ("create", "write", "sync", "rename", "remove", "sync_folder", "link")


def batch(first: int, count: int) -> TensorDict:
    """Rows ``first ...`` of one stream: episodes of 11 steps, stacks of 4 frames."""
    row = torch.arange(first, first + count)
    stacks = (row[:, None] + torch.arange(5))[..., None].to(torch.uint8)
    return TensorDict(
        {
            "observation": stacks[:, :4].clone(),
            "row": row,
            "is_init": (row % 11 == 0)[:, None],
            "collector": {"policy_version": row},
            "next": {
                "observation": stacks[:, 1:].clone(),
                "reward": row[:, None].float(),
                "done": (row % 11 == 10)[:, None],
            },
        },
        [count],
    )


def opened(path: Path, sampler: Any = None, capacity: int = CAPACITY, seed: int = 0, **options: Any) -> Any:
    storage = DiskStorage(capacity, path, **{"sync": False, "segment_bytes": 500, **options})
    return ReplayBuffer(
        storage=storage,
        sampler=RandomSampler() if sampler is None else sampler,
        batch_size=12,
        generator=torch.Generator().manual_seed(seed),
    )


def abandon(buffer: Any) -> None:
    """As if the process had ended here: what is not in a file is lost, and the folder is free."""
    buffer.storage._closing.detach()
    log = buffer.storage._log
    if log.thread is not None:
        log.thread.join()
    log.closed = True
    log.folder.close()


def rows_in(buffer: Any) -> list[int]:
    """The rows by age."""
    if not len(buffer):
        return []
    rows: list[int] = buffer[buffer.ring.stored()]["row"].tolist()
    return rows


def same(left: Any, right: Any) -> bool:
    keys = set(left.keys(True, True))
    return keys == set(right.keys(True, True)) and all(torch.equal(left.get(k), right.get(k)) for k in keys)


def drawn(buffer: Any, count: int) -> list[Any]:
    found = []
    for _ in range(count):
        sample, info = buffer.sample(return_info=True)
        found.append(sample.set("index", info["index"]))
        if isinstance(buffer.sampler, PrioritizedSampler):
            buffer.update_priority(info["index"], (info["index"] % 5 + 1).float(), info["index_generation"])
    return found


def check_goes_on(buffer: Any, other: Any, first: int) -> None:
    """Both have the same rows in the same slots, draw the same ones, and store and draw the same afterwards."""
    assert same(other[:], buffer[:]) and rows_in(other) == rows_in(buffer)
    assert all(map(same, drawn(other, 2), drawn(buffer, 2)))
    first = -(-first // 11) * 11  # a trajectory that is open at a save is cut, so one begins
    for one in (buffer, other):
        one.extend(batch(first, 9))
    assert same(other[:], buffer[:]) and all(map(same, drawn(other, 2), drawn(buffer, 2)))


# -- resumed is never stopped ------------------------------------------------------------------------------------------

STATES = {"one row": (1,), "filling": (21, 9), "full": (30, 18), "wrapped": (30, 30, 25)}
PAIRS = [
    (sampler, form)
    for i, sampler in enumerate(SAMPLERS)
    for form in (list(FORMS)[i % 5], list(FORMS)[(i + 2) % 5])
]


def check_resumed(place: Path, sampler: str, form: str, state: str, unflushed: bool) -> None:
    """Killed after the checkpoint, with newer rows in its folder: the run continues as if it had not been."""

    def new(name: str, seed: int = 0) -> Any:
        return opened(place / name, SAMPLERS[sampler](), seed=seed, segment_bytes=1000, **FORMS[form])

    buffer, first = new("rows"), 0
    for count in STATES[state]:
        if first:
            drawn(buffer, 1)
            buffer.dumps(place / "saved", sync=False)
        buffer.extend(batch(first, count))
        first += count
    if not unflushed:
        buffer.storage.flush()
    if first > 11:
        drawn(buffer, 1)
    buffer.dumps(place / "saved", sync=False)
    killed, fresh = new("own"), new("fresh", seed=8)
    killed.loads(place / "saved")
    killed.extend(batch(88, 20))
    killed.storage.flush()
    killed.extend(batch(108, 3))
    abandon(killed)
    again = new("own", seed=9)
    assert rows_in(again)[-1] >= 107
    for one in (again, fresh):
        one.loads(place / "saved")
        one.loads(place / "saved")
    assert all(map(same, drawn(fresh, 1), drawn(again, 1))) if first > 11 else same(fresh[:], again[:])
    again.loads(place / "saved")
    if first > 11:
        check_goes_on(buffer, again, first)
    else:
        assert same(buffer[:], again[:])
    again.dumps(place / "saved", sync=False)  # it continues from what it has loaded
    rows = rows_in(again)
    again.storage.close()
    reopened = new("own")
    assert rows_in(reopened)[-len(rows) :] == rows
    for one in (buffer, fresh, reopened):
        one.storage.close()


@pytest.mark.parametrize(("sampler", "form"), PAIRS)
def test_resumed_is_never_stopped(tmp_path: Path, sampler: str, form: str) -> None:
    check_resumed(tmp_path, sampler, form, "wrapped", True)


@pytest.mark.parametrize("state", STATES)
def test_resumed_in_every_state(tmp_path: Path, state: str) -> None:
    check_resumed(tmp_path / "1", "prioritized", "compact", state, False)
    check_resumed(tmp_path / "2", "slices once", "compact frames", state, True)


def test_an_empty_buffer_and_one_that_was_emptied(tmp_path: Path) -> None:
    buffer, other = opened(tmp_path / "rows"), opened(tmp_path / "other")
    buffer.dumps(tmp_path / "saved")
    other.extend(batch(0, 30))
    other.loads(tmp_path / "saved")
    assert not len(other)
    other.extend(batch(0, 70))
    buffer.extend(batch(0, 30))
    buffer.empty()
    buffer.dumps(tmp_path / "saved")
    other.loads(tmp_path / "saved")
    assert not len(other) and other.ring.written == CAPACITY
    for one in (buffer, other):
        one.extend(batch(5, 7))
    assert same(other[:], buffer[:]) and rows_in(other) == list(range(5, 12))
    other.storage.flush()
    abandon(other)
    assert rows_in(opened(tmp_path / "other")) == list(range(5, 12))


def test_checkpoint_of_a_run(tmp_path: Path) -> None:
    def run() -> tuple[Any, Any, Checkpoint]:
        buffer = opened(tmp_path / "run" / "rows", SAMPLERS["prioritized"]())
        policy = torch.nn.Linear(2, 1)
        return buffer, policy, Checkpoint(tmp_path / "run", buffer=buffer, policy=policy, sync=False)

    buffer, policy, checkpoint = run()
    for step in range(3):
        buffer.extend(batch(22 * step, 22))
        drawn(buffer, 1)
        assert checkpoint.save(step=step) == step + 1
    rows, weight = buffer[:], policy.weight.clone()
    expected = drawn(buffer, 2)
    buffer.extend(batch(66, 22))
    abandon(buffer)
    buffer, policy, checkpoint = run()
    assert checkpoint.load() == {"step": 2} and checkpoint.versions() == [3, 2]
    assert torch.equal(policy.weight, weight) and same(buffer[:], rows)
    assert all(map(same, drawn(buffer, 2), expected))
    assert checkpoint.load(version=2) == {"step": 1} and rows_in(buffer) == list(range(44))


def test_an_ensemble(tmp_path: Path) -> None:
    def new(name: str) -> Any:
        members = [opened(tmp_path / name / str(i), capacity=30 + i) for i in range(2)]
        return ReplayBufferEnsemble(*members, batch_size=8, generator=torch.Generator().manual_seed(0))

    ensemble, other = new("rows"), new("other")
    for first in (0, 40):
        for member in ensemble[:]:
            member.extend(batch(first, 40))
        ensemble.sample()
        ensemble.dumps(tmp_path / "saved", sync=False)
    other.loads(tmp_path / "saved")
    assert same(other.sample(), ensemble.sample()) and rows_in(other[1]) == list(range(49, 80))


# -- how the rows get there --------------------------------------------------------------------------------------------


def numbers_of(path: Path) -> set[int]:
    """Which files of rows a folder has, whatever their names."""
    return {file.stat().st_ino for file in path.glob("*.rows")}


def test_no_row_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[str] = []
    create = files.create
    monkeypatch.setattr(files, "create", lambda path: (written.append(path.name), create(path))[1])
    buffer, other = opened(tmp_path / "rows", capacity=500), opened(tmp_path / "other", capacity=500)
    for first in range(0, 330, 110):
        buffer.extend(batch(first, 110))
        buffer.storage.flush()
        written.clear()
        buffer.dumps(tmp_path / "saved", sync=False)
        assert not [name for name in written if ".rows" in name]
        assert numbers_of(tmp_path / "rows") <= numbers_of(tmp_path / "saved")
    written.clear()
    other.loads(tmp_path / "saved")
    assert not [name for name in written if ".rows" in name]
    assert numbers_of(tmp_path / "other") == numbers_of(tmp_path / "rows")
    kept = {file.name for file in (tmp_path / "other").glob("*.rows")}
    other.loads(tmp_path / "saved")  # files that are there already keep their names
    assert {file.name for file in (tmp_path / "other").glob("*.rows")} == kept


def test_files_outlive_the_storage_that_wrote_them(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "rows")
    buffer.extend(batch(0, 40))
    buffer.dumps(tmp_path / "saved", sync=False)
    for first in range(40, 200, 20):
        buffer.extend(batch(first, 20))
    buffer.storage.close()
    shutil.rmtree(tmp_path / "rows")
    other = opened(tmp_path / "other")
    other.loads(tmp_path / "saved")
    assert rows_in(other) == list(range(40))


@pytest.mark.parametrize("number", [errno.EXDEV, errno.EMLINK])
def test_copies_where_there_are_no_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def link(source: Path, target: Path) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(files, "link", link)
    buffer, other = opened(tmp_path / "rows"), opened(tmp_path / "other")
    buffer.extend(batch(0, 60))
    buffer.dumps(tmp_path / "saved", sync=False)
    other.loads(tmp_path / "saved")
    assert same(other[:], buffer[:])
    assert not numbers_of(tmp_path / "saved") & (
        numbers_of(tmp_path / "rows") | numbers_of(tmp_path / "other")
    )


def test_rows_of_a_log_that_does_not_sync_are_synced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = opened(tmp_path / "rows", segment_bytes=1 << 20)
    buffer.extend(batch(0, 20))
    buffer.storage.flush()
    synced: list[str] = []
    monkeypatch.setattr(files, "sync", lambda descriptor: synced.append(os.readlink(f"/dev/fd/{descriptor}")))
    buffer.dumps(tmp_path / "saved")
    assert sum(name.endswith(".rows") for name in synced) == len(numbers_of(tmp_path / "saved"))


def test_the_folder_of_the_rows_itself_is_refused_and_one_in_it_is_not(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "rows")
    buffer.extend(batch(0, 60))
    for call in (
        buffer.dumps,
        buffer.loads,
        Checkpoint(tmp_path / "rows" / ".." / "rows", buffer=buffer).save,
    ):
        with pytest.raises(ValueError, match="is the folder of the rows themselves"):
            call(*([tmp_path / "rows"] if call in (buffer.dumps, buffer.loads) else []))
    inside = tmp_path / "rows" / "checkpoint"
    buffer.dumps(inside, sync=False)
    rows = buffer[:]
    buffer.extend(batch(60, 40))
    buffer.storage.close()
    again = opened(tmp_path / "rows")
    again.loads(inside)
    assert same(again[:], rows)
    again.extend(batch(60, 40))
    again.dumps(inside, sync=False)
    assert Folder(inside).versions() == [2, 1]


def test_a_thread_saves_while_another_writes(tmp_path: Path) -> None:
    buffer, other = opened(tmp_path / "rows", flush_rows=5), opened(tmp_path / "other")
    buffer.extend(batch(0, 44))
    ended = threading.Event()

    def write() -> None:
        first = 44
        while not ended.is_set():
            buffer.extend(batch(first, 11))
            first += 11

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(6):
            buffer.dumps(tmp_path / "saved", wait=False, sync=False)
            buffer.saves.join()
            other.loads(tmp_path / "saved")
            rows = rows_in(other)
            assert rows == list(range(rows[0], rows[0] + len(rows))) and len(rows) > 30
    finally:
        ended.set()
        writer.join()


def test_rows_that_a_step_writer_holds_are_saved(tmp_path: Path) -> None:
    buffer, other = opened(tmp_path / "rows"), opened(tmp_path / "other")
    with buffer.writer_for(2, window=4) as writer:
        for step in range(6):
            now = torch.tensor([step, 10 + step])
            after = {("next", "row"): now + 1, ("next", "terminated"): torch.zeros(2, dtype=torch.bool)}
            writer.write({"row": now, ("next", "reward"): torch.ones(2), **after})
        assert len(buffer) == 8
        buffer.dumps(tmp_path / "saved", sync=False)
    other.loads(tmp_path / "saved")
    assert rows_in(other) == [0, 1, 2, 3, 10, 11, 12, 13, 4, 5, 14, 15]


# -- crashes and errors ------------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here: nothing that comes later happens."""


def each_crash(
    place: Path,
    monkeypatch: pytest.MonkeyPatch,
    prepare: Callable[[Path], Any],
    act: Callable[[Any, Path], None],
    error: type[BaseException] | OSError = Killed,
    most: int = 300,
) -> Any:
    """Yield (folder, buffer, whether ``act`` came to its end) for each operation on the disk at which it was stopped.

    After `Killed` no operation happens; an OSError is raised once.
    """
    real = {name: getattr(files, name) for name in OPERATIONS}
    for stop in range(most):
        folder = place / str(stop)
        buffer, left, ended = prepare(folder), stop, False

        def until(name: str) -> Any:
            def call(*arguments: Any, **named: Any) -> Any:
                nonlocal left
                left -= 1
                if left == -1 or (left < 0 and error is Killed):
                    raise error
                return real[name](*arguments, **named)

            return call

        with monkeypatch.context() as patch:
            for name in OPERATIONS:
                patch.setattr(files, name, until(name))
            try:
                act(buffer, folder)
                ended = left >= 0
            except (Killed, OSError):
                pass
            if error is Killed:
                abandon(buffer)  # here, so that its thread ends at once
        yield folder, buffer, ended
        shutil.rmtree(folder)
        if ended:
            return
    raise AssertionError("it never came to its end")


def few_files(folder: Path, sampler: Any = None) -> Any:
    """A buffer with 10 rows in a file."""
    return opened(folder, sampler, capacity=320, segment_bytes=1 << 20)


def test_a_kill_in_a_save_leaves_the_old_version_or_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prepare(folder: Path) -> Any:
        buffer = few_files(folder / "rows")
        buffer.extend(batch(0, 14))
        buffer.dumps(folder / "saved", sync=False)
        buffer.extend(batch(14, 5))  # no block is full: no thread begins to write it
        return buffer

    found = []
    for folder, _, ended in each_crash(
        tmp_path, monkeypatch, prepare, lambda buffer, folder: buffer.dumps(folder / "saved", keep=1)
    ):
        other = few_files(folder / "other")
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # what a kill leaves is no damage
            other.loads(folder / "saved")
        found.append(rows_in(other) == list(range(19)))
        assert found[-1] or (rows_in(other) == list(range(14)) and not ended)
        other.storage.close()
    assert len(found) > 20 and not found[0] and found == sorted(found)


@pytest.mark.parametrize("own", [0, 24])
def test_a_kill_in_a_load_leaves_the_old_rows_or_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int
) -> None:
    """The rows in the files of the storage's folder, some of which no version names yet."""
    buffer = few_files(tmp_path / "rows")
    buffer.extend(batch(200, 27))
    buffer.dumps(tmp_path / "saved", sync=False)

    def prepare(folder: Path) -> Any:
        buffer = few_files(folder)
        for first in range(0, own, 12):
            buffer.extend(batch(first, 12))
            buffer.storage.flush()
        return buffer

    found = []
    for folder, _, ended in each_crash(
        tmp_path / "each", monkeypatch, prepare, lambda buffer, folder: buffer.loads(tmp_path / "saved")
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            other = few_files(folder)
        rows = rows_in(other)
        found.append(rows == list(range(200, 227)))
        assert found[-1] or (rows == list(range(own)) and not ended)
        other.extend(batch(0, 5))
        other.storage.close()
        assert rows_in(few_files(folder)) == rows + list(range(5))
    assert len(found) > 8 and not found[0] and found == sorted(found)


@pytest.mark.parametrize("empties", [False, True])
def test_a_kill_as_the_first_file_goes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, empties: bool
) -> None:
    """Rows that no version names yet are found again, though those before them are gone."""

    def small(folder: Path) -> Any:
        return opened(folder, capacity=10, segment_bytes=1)

    def prepare(folder: Path) -> Any:
        buffer = small(folder)
        for first in range(0, 10, 5):
            buffer.extend(batch(first, 5))
            buffer.storage.flush()
        return buffer

    def act(buffer: Any, folder: Path) -> None:
        if empties:
            buffer.empty()
        else:
            buffer.extend(batch(10, 2))
            buffer.storage.flush()

    found = []
    for folder, _, _ in each_crash(tmp_path, monkeypatch, prepare, act):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rows = rows_in(small(folder))
        if empties:
            assert rows in ([], list(range(10)))
        else:
            assert rows == list(range(rows[-1] - 9, rows[-1] + 1)) and 9 <= rows[-1] <= 11, rows
        found.append(rows)
    assert found[0] == list(range(10)) and found[-1] == ([] if empties else list(range(2, 12)))


def test_a_disk_that_fails_in_a_load_leaves_the_buffer_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its rows, those that no file has yet, too, and its sampler and generator; it goes on, and another load works."""

    def sampler() -> PrioritizedSampler:
        return PrioritizedSampler(320, alpha=0.7, beta=0.5)

    buffer = few_files(tmp_path / "rows", sampler())
    buffer.extend(batch(200, 27))
    buffer.dumps(tmp_path / "saved", sync=False)

    def prepare(folder: Path) -> Any:
        buffer = few_files(folder, sampler())
        buffer.extend(batch(0, 12))
        buffer.storage.flush()
        buffer.extend(batch(12, 5))
        drawn(buffer, 1)
        return buffer

    (untouched,) = drawn(prepare(tmp_path / "untouched"), 1)
    failed = 0
    for folder, used, _ in each_crash(
        tmp_path / "each",
        monkeypatch,
        prepare,
        lambda buffer, folder: buffer.loads(tmp_path / "saved"),
        OSError(errno.ENOSPC, "full"),
    ):
        if rows_in(used) == list(range(17)):  # else what failed was to remove a file, which may stay
            failed += 1
            assert same(drawn(used, 1)[0], untouched)
            used.extend(batch(17, 9))
            used.storage.flush()
            assert rows_in(used) == list(range(26))
            used.loads(tmp_path / "saved")
        assert rows_in(used) == list(range(200, 227))
        used.storage.close()
        assert rows_in(few_files(folder)) == list(range(200, 227))
    assert failed > 5


def run(path: Path, told: int) -> None:
    """Write and save for good, and tell after each save how many rows there were."""
    buffer, first = opened(path / "rows", flush_rows=7), 0
    while True:
        for _ in range(3):
            buffer.extend(batch(first, 5))
            first += 5
        buffer.dumps(path / "saved", sync=False)
        os.write(told, b"%d\n" % first)


def test_a_run_that_is_killed(tmp_path: Path) -> None:
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        try:
            run(tmp_path, writes)
        finally:
            os._exit(1)
    os.close(writes)
    with open(reads) as told:
        saved = [int(told.readline()) for _ in range(5)]
        os.kill(child, signal.SIGKILL)
        saved += map(int, told.read().split())
    os.waitpid(child, 0)
    own, other = opened(tmp_path / "rows"), opened(tmp_path / "other")
    rows = rows_in(own)
    assert rows == list(range(rows[0], rows[0] + len(rows))) and rows[-1] >= saved[-1] - 1
    other.loads(tmp_path / "saved")
    assert rows_in(other)[-1] in (saved[-1] - 1, saved[-1] + 14)
    own.loads(tmp_path / "saved")
    assert same(own[:], other[:])


def test_a_damaged_file_falls_back_to_the_version_before(tmp_path: Path) -> None:
    buffer, other = opened(tmp_path / "rows"), opened(tmp_path / "other")
    other.extend(batch(0, 5))
    for first in (0, 20):
        buffer.extend(batch(first, 20))
        buffer.dumps(tmp_path / "saved", sync=False)
    newest = max((tmp_path / "saved").glob("*.rows"))
    data = bytearray(newest.read_bytes())
    data[-3] ^= 1
    newest.unlink()
    newest.write_bytes(data)
    with pytest.raises(DamagedFileError, match=newest.name):
        other.loads(tmp_path / "saved", strict=True)
    assert rows_in(other) == list(range(5))
    with pytest.warns(RuntimeWarning, match="version 1 .* was loaded"):
        other.loads(tmp_path / "saved")
    assert rows_in(other) == list(range(20))


def test_who_may_save_where(tmp_path: Path) -> None:
    buffer, other = opened(tmp_path / "rows"), opened(tmp_path / "other")
    for one in (buffer, other):
        one.extend(batch(0, 20))
    buffer.dumps(tmp_path / "saved", sync=False)
    with pytest.raises(FileExistsError, match="neither loaded nor published"):
        other.dumps(tmp_path / "saved", sync=False)
    with Folder(tmp_path / "saved", write=True), pytest.raises(BlockingIOError):
        buffer.dumps(tmp_path / "saved", sync=False)
    other.loads(tmp_path / "saved")
    other.dumps(tmp_path / "saved", sync=False)
    with pytest.raises(FileExistsError):
        buffer.dumps(tmp_path / "saved", sync=False)
    buffer.extend(batch(20, 20))
    buffer.dumps(tmp_path / "saved", sync=False, overwrite=True, keep=1)
    other.loads(tmp_path / "saved")
    assert rows_in(other) == list(range(40)) and Folder(tmp_path / "saved").versions() == [3]


def test_a_full_disk_in_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    buffer, other = opened(tmp_path / "rows"), opened(tmp_path / "other")
    buffer.extend(batch(0, 20))
    buffer.dumps(tmp_path / "saved", sync=False)
    buffer.extend(batch(20, 20))
    for name in ("write", "link"):
        with monkeypatch.context() as patch:
            patch.setattr(files, name, full)
            with pytest.raises(OSError, match="full"):
                buffer.dumps(tmp_path / "saved", sync=False)
        if name == "write":
            buffer.storage.flush()
    other.loads(tmp_path / "saved")
    assert rows_in(other) == list(range(20))
    buffer.dumps(tmp_path / "saved", sync=False)
    other.loads(tmp_path / "saved")
    assert rows_in(other) == list(range(40))


# -- what does not fit -------------------------------------------------------------------------------------------------


def test_other_storages(tmp_path: Path) -> None:
    disk, compact = opened(tmp_path / "rows"), opened(tmp_path / "compact", compact_obs=True)
    memory = ReplayBuffer(storage=LazyTensorStorage(CAPACITY), generator=torch.Generator())
    for buffer, name in ((disk, "disk saved"), (compact, "compact saved"), (memory, "memory saved")):
        buffer.extend(batch(0, 30))
        buffer.dumps(tmp_path / name, sync=False)
    fits: list[tuple[Any, str, str]] = [
        (memory, "disk saved", "in a DiskColumn .* extend this buffer with other"),
        (disk, "memory saved", "in a DiskColumn .* extend this buffer with other"),
        (opened(tmp_path / "new 1"), "memory saved", "in a DiskColumn .* extend this buffer with other"),
        (opened(tmp_path / "new 2", capacity=40), "disk saved", "make it with max_size=48"),
        (opened(tmp_path / "new 3", codec={"observation": "zstd"}), "disk saved", r"DiskColumn \(zstd\)"),
        (opened(tmp_path / "new 4", frame_stack={"observation": 4}), "disk saved", r"DiskColumn \(frames\)"),
        (opened(tmp_path / "new 5", compact_obs=True), "disk saved", "compact_obs=True needs"),
        (compact, "disk saved", "compact_obs=True needs"),
        (disk, "compact saved", "compact_obs=True"),
        (opened(tmp_path / "new 6", SliceSampler(slice_len=2)), "disk saved", "without a trajectory index"),
    ]
    for buffer, name, text in fits:
        rows = rows_in(buffer)
        with pytest.raises(ValueError, match=text):
            buffer.loads(tmp_path / name)
        assert rows_in(buffer) == rows
    other = opened(tmp_path / "new 7")
    other.extend(TensorDict({"row": torch.arange(3.0)}, [3]))
    with pytest.raises(ValueError, match="extend this buffer with other"):
        other.loads(tmp_path / "disk saved")
    with pytest.raises(ValueError, match="not the folder of a DiskStorage"):
        DiskStorage(CAPACITY, tmp_path / "disk saved")
    disk.storage.checkpointer = TensorStorageCheckpointer()
    with pytest.raises(TypeError, match="DiskStorageCheckpointer"):
        disk.dumps(tmp_path / "tensors")
    memory.storage.checkpointer = DiskStorageCheckpointer()
    with pytest.raises(TypeError, match="is for a DiskStorage, this is a LazyTensorStorage"):
        memory.dumps(tmp_path / "links")
    with pytest.raises(TypeError, match="does not accept hooks"):
        other.register_save_hook(lambda rows, path: rows)
    with pytest.raises(RuntimeError, match="stay in its folder"):
        other.state_dict()


def test_read_only(tmp_path: Path) -> None:
    def read(name: str) -> Any:
        storage = DiskStorage(path=tmp_path / name, read_only=True)
        generator = torch.Generator().manual_seed(0)
        sampler, writer = SAMPLERS["prioritized"](), ImmutableDatasetWriter()
        return ReplayBuffer(
            storage=storage, sampler=sampler, writer=writer, batch_size=9, generator=generator
        )

    for name in ("rows", "others"):
        buffer = opened(tmp_path / name, SAMPLERS["prioritized"]())
        buffer.extend(batch(0 if name == "rows" else 1, CAPACITY))
        buffer.storage.close()
    buffer, again, others = read("rows"), read("rows"), read("others")
    drawn(buffer, 3)
    buffer.dumps(tmp_path / "saved", sync=False)
    assert numbers_of(tmp_path / "saved") == numbers_of(tmp_path / "rows")
    again.loads(tmp_path / "saved")
    assert all(map(same, drawn(again, 3), drawn(buffer, 3)))
    rows = others[:]
    with pytest.raises(ValueError, match="does not have the rows of the checkpoint"):
        others.loads(tmp_path / "saved")
    assert same(others[:], rows)
    for file in (tmp_path / "rows").glob("*.rows"):
        file.unlink()  # as a writer may: the maps still have them
    buffer.dumps(tmp_path / "saved", sync=False)
    other = opened(tmp_path / "other", SAMPLERS["prioritized"]())
    other.writer = ImmutableDatasetWriter()
    other.loads(tmp_path / "saved")
    assert rows_in(other) == list(range(CAPACITY))


def test_states_that_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables and rows that do not fit together are refused, and nothing changes."""
    buffer, other = opened(tmp_path / "rows", compact_obs=True), opened(tmp_path / "other", compact_obs=True)
    buffer.extend(batch(0, 60))
    other.extend(batch(0, 20))
    real = type(buffer.storage).tables
    key: Any = "observation"
    crafted: list[Callable[[dict[str, Any]], Any]] = [
        lambda log: log.pop("offset"),
        lambda log: log.update(offset=-1),
        lambda log: log.update(offset=2**62),
        lambda log: log.update(offset=1),
        lambda log: log.update(offset=True),
        lambda log: log.update(layout=None),
        lambda log: log["layout"].update(kind="other"),
        lambda log: log["layout"].update(pairs=[]),
        lambda log: log["layout"].update(seams=["x"]),
        lambda log: log["layout"]["entries"].pop(),
        lambda log: log["layout"]["entries"][0].__setitem__(3, "zstd"),
        lambda log: log["layout"]["entries"][0].__setitem__(2, [3]),
        lambda log: log["layout"]["entries"][0].__setitem__(0, "other"),
    ]
    for number, change in enumerate(crafted):

        def tables(storage: Any, pool_rows: int, change: Any = change) -> dict[str, Any]:
            made = real(storage, pool_rows)
            change(made["log"])
            return made

        with monkeypatch.context() as patch:
            patch.setattr(type(buffer.storage), "tables", tables)
            buffer.dumps(tmp_path / str(number), sync=False)
        with pytest.raises(ValueError, match="damaged"):
            other.loads(tmp_path / str(number))
        assert rows_in(other) == list(range(20)) and key in other[:]


def test_versions_with_fewer_rows_and_files_of_another_form_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = opened(tmp_path / "rows", frame_stack={"observation": 4})
    buffer.extend(batch(0, 20))
    publish = Folder.publish

    def later(*args: Any, head: int, **options: Any) -> Any:
        return publish(*args, head=head + 1, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "publish", later)
        buffer.dumps(tmp_path / "fewer", sync=False)
    with pytest.raises(ValueError, match=r"it counts the rows 0 \.\.\. 19, but has 1 \.\.\. 19"):
        buffer.loads(tmp_path / "fewer")
    with monkeypatch.context() as patch:
        patch.setattr(FrameForm, "encode", lambda form, x: Ragged(x[:, -1], torch.ones(len(x)).long()))
        patch.setattr(FrameForm, "check", lambda form, column: None)
        other = opened(tmp_path / "other", frame_stack={"observation": 4})
        other.extend(batch(0, 20))
        other.dumps(tmp_path / "form", sync=False)
    with pytest.raises(ValueError, match="the first row of a file has no complete stack"):
        buffer.loads(tmp_path / "form")
    buffer.extend(batch(20, 4))
    assert rows_in(buffer) == list(range(24))


def test_a_load_cuts_in_the_folder_too_and_leaves_nothing_due(tmp_path: Path) -> None:
    """Row 20 looks as if it went on from row 19; numbers may go back, and rows wait for a whole file as ever."""
    buffer = opened(tmp_path / "rows", SAMPLERS["slices"](), segment_bytes=10_000)
    buffer.extend(batch(0, 20))
    buffer.dumps(tmp_path / "saved", sync=False)
    other = opened(tmp_path / "other", SAMPLERS["slices"]())
    other.extend(batch(0, 48))
    other.loads(tmp_path / "saved")
    other.extend(batch(20, 3))
    log = other.storage._log
    if log.thread is not None:
        log.thread.join()
    assert other.stats()["rows_unflushed"] == 1  # of files of 2
    other.storage.close()
    again = opened(tmp_path / "other", SAMPLERS["slices"]())
    assert rows_in(again) == list(range(23))
    assert again.index.trajectories == other.index.trajectories == 4


class LateWriter:
    """The lock of a log, for which its writing thread waits until ``go`` is set."""

    def __init__(self, lock: Any) -> None:
        self.lock = lock
        self.reached = threading.Event()
        self.go = threading.Event()

    def __enter__(self) -> None:
        if threading.current_thread().name == "flatroll rows":
            self.reached.set()
            assert self.go.wait(200)
        self.lock.acquire()

    def __exit__(self, *error: object) -> None:
        self.lock.release()


def test_a_thread_that_was_to_write_replaced_rows_writes_what_is_due_now(tmp_path: Path) -> None:
    buffer = opened(tmp_path / "rows", segment_bytes=10_000)
    buffer.extend(batch(0, 20))
    buffer.dumps(tmp_path / "saved", sync=False)
    other = opened(tmp_path / "other")
    log = other.storage._log
    late = log._disk = LateWriter(log._disk)
    other.extend(batch(0, 48))
    assert late.reached.wait(200)

    other.loads(tmp_path / "saved")
    other.extend(batch(20, 3))
    late.go.set()
    log.thread.join()
    assert other.stats()["rows_unflushed"] == 1  # of files of 2
    assert rows_in(other) == list(range(23))


# -- without a checkpoint ----------------------------------------------------------------------------------------------


def test_opened_anew_without_a_checkpoint(tmp_path: Path) -> None:
    """The rows are there in order; slots are counted from the oldest one, and priorities and draws begin anew."""
    buffer = opened(tmp_path / "rows", SAMPLERS["prioritized"]())
    buffer.extend(batch(0, 66))
    drawn(buffer, 2)
    rows = rows_in(buffer)
    buffer.storage.close()
    again = opened(tmp_path / "rows", SAMPLERS["prioritized"]())
    memory = ReplayBuffer(
        storage=LazyTensorStorage(CAPACITY),
        sampler=SAMPLERS["prioritized"](),
        batch_size=12,
        generator=torch.Generator().manual_seed(0),
    )
    memory.extend(batch(66 - len(rows), len(rows)))
    assert rows_in(again) == rows and again[:]["row"].tolist() == rows
    assert all(map(same, drawn(again, 3), drawn(memory, 3)))


if __name__ == "__main__":  # all combinations
    import itertools
    import tempfile

    for combination in itertools.product(SAMPLERS, FORMS, STATES, [False, True]):
        with tempfile.TemporaryDirectory() as folder:
            check_resumed(Path(folder), *combination)
        print(*combination)
