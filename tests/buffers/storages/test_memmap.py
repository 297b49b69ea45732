"""Rows in files: what is there, what is refused, what is left behind, and that nobody notices otherwise."""

import copy
import errno
import gc
import os
import pickle
import shutil
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.buffers.storages.memmap import file_names

Usage = namedtuple("Usage", "total used free")


def numbers(first: int, count: int) -> TensorDict:
    n = torch.arange(first, first + count)
    return TensorDict({"n": n, "next": {"n2": n * 2}}, [count])


def descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_each_column_has_a_file(tmp_path: Path) -> None:
    folder = tmp_path / "made" / "here"
    buffer = ReplayBuffer(storage=LazyMemmapStorage(5, scratch_dir=folder))
    assert not folder.exists()
    buffer.extend(numbers(0, 3))
    files = {path.name: path.stat().st_size for path in folder.iterdir()}
    assert files.pop("ring.lock") == 0 and files.pop("ring.counters") > 0
    assert files == {"n.memmap": 40, "next.n2.memmap": 40}
    assert buffer.extend(numbers(3, 4)).tolist() == [3, 4, 0, 1]
    assert buffer[:]["n"].tolist() == [5, 6, 2, 3, 4]
    stored = torch.from_file(str(folder / "next.n2.memmap"), size=5, dtype=torch.int64)
    assert stored.tolist() == [10, 12, 4, 6, 8]


def test_keys_that_look_alike_have_files_of_their_own(tmp_path: Path) -> None:
    keys: list[Any] = [
        ("a", "b"), "a.b", ("a", "B"), "a%2Eb", "A.B", "../up", ("..", "up"), "", " ", "é", "con/cat", "x" * 300,
        "x" * 299 + "y", "ring", "ring.lock", ".pool", "a~1",
    ]  # fmt: skip
    names = list(file_names(keys).values())
    assert len({name.casefold() for name in names}) == len(keys)
    assert all("/" not in name and len(name) < 250 and name.endswith(".memmap") for name in names)
    data = {str(i) if key == "" else key: torch.full((4,), i) for i, key in enumerate(keys)}
    batch = TensorDict({}, [4])
    for key, column in data.items():
        batch.set(key, column)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path))
    buffer.extend(batch)
    assert bool((buffer[:] == batch).all())
    assert not (tmp_path.parent / "up.memmap").exists()


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", ["float32", "uint8", "dict", "scalar"])
def test_samples_are_those_of_memory(
    world: Any, kind: str, compact: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when the rows are read ahead from a disk, because they do not fit in memory."""
    monkeypatch.setattr(
        "flatroll.buffers.storages.memmap.free_memory", lambda device: 0 if kind == "uint8" else 1 << 40
    )
    steps = world.windows(world.writers(3, 5), [(i % 3, 7) for i in range(12)])
    samples = []
    for storage in (LazyMemmapStorage(37, compact_obs=compact), LazyTensorStorage(37, compact_obs=compact)):
        buffer = ReplayBuffer(
            storage=storage,
            sampler=SliceSampler(slice_len=4),
            batch_size=32,
            generator=torch.Generator().manual_seed(1),
        )
        found = []
        for i in range(0, len(steps), 7):
            buffer.extend(world.to_batch(steps[i : i + 7], kind))
            found += [buffer.sample(), buffer[:]]
        samples.append(found)
    assert all(bool((mapped == held).all()) for mapped, held in zip(*samples, strict=True))


def test_images_trees_and_tensors() -> None:
    images = ReplayBuffer(storage=LazyMemmapStorage(10), batch_size=1)
    image = TensorDict(
        {"img": torch.randint(255, (3, 64, 64), dtype=torch.uint8), "labels": torch.randint(100, ())}
    )
    images.add(image)
    assert bool((images[0] == image).all()) and images[:].batch_size == (1,)
    assert images.sample(8)["img"].shape == (8, 3, 64, 64) and images.sample(8)["img"].dtype is torch.uint8
    tree = {"a": {"b": torch.randn(3), "c": [torch.zeros(3, 2), (torch.ones(3, 10),)]}}
    trees = ReplayBuffer(storage=LazyMemmapStorage(10))
    trees.extend(tree)
    assert len(trees) == 3 and torch.equal(trees[:]["a"]["b"], tree["a"]["b"])
    assert trees.sample(2)["a"]["c"][1][0].shape == (2, 10)
    dtypes = [torch.bool, torch.bfloat16, torch.complex64, torch.uint16, torch.float16]
    for dtype in dtypes:
        values = torch.arange(6).view(6, 1).to(dtype)
        buffer = ReplayBuffer(storage=LazyMemmapStorage(4))
        buffer.extend(values)
        assert buffer[:].dtype is dtype and torch.equal(buffer[:], values[2:])
    nothing = ReplayBuffer(storage=LazyMemmapStorage(4))
    nothing.extend(TensorDict({"none": torch.zeros(2, 0), "one": torch.ones(2)}, [2]))
    assert nothing[:]["none"].shape == (2, 0)


def test_rows_can_be_overwritten_in_place() -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(4))
    buffer.extend(numbers(0, 4))
    buffer[1:3] = TensorDict({"n": torch.tensor([7, 8])}, [2])
    assert buffer["n"].tolist() == [0, 7, 8, 3]


def stacks(first: int, count: int, length: int = 9) -> TensorDict:
    """Rows of episodes of ``length`` steps whose observation is the last three frames, the first one repeated."""
    number = torch.arange(first, first + count)
    step, episode = number % length, number // length

    def stacked(step: torch.Tensor) -> torch.Tensor:
        shown = (step[:, None] - torch.arange(2, -1, -1)).clamp(min=0)
        frames = (episode[:, None] * 16 + shown).to(torch.uint8)
        return frames[..., None, None].expand(-1, 3, 6, 6).contiguous()

    done = (step == length - 1)[:, None]
    data = {
        "observation": stacked(step),
        "next": {"observation": stacked(step + 1), "done": done, "truncated": done},
    }
    return TensorDict(data, [count])


@pytest.mark.parametrize("compact", [False, True])
def test_frame_stacks_in_files(compact: bool, tmp_path: Path) -> None:
    """Stacks that share nothing need more frames than there was room for at first: a second file."""

    def made(storage: Any) -> ReplayBuffer:
        generator = torch.Generator().manual_seed(1)
        return ReplayBuffer(
            storage=storage, sampler=SliceSampler(slice_len=4), batch_size=64, generator=generator
        )

    def drawn(buffer: ReplayBuffer) -> list[TensorDict]:
        return [buffer[:], *(buffer.sample() for _ in range(5))]

    options: dict[str, Any] = {"compact_obs": compact, "frame_stack": {"observation": 3}}
    files = made(LazyMemmapStorage(400, scratch_dir=tmp_path, auto_cleanup=True, **options))
    plain, loaded = made(LazyTensorStorage(400, compact_obs=compact)), made(LazyMemmapStorage(400, **options))
    for first in range(0, 999, 37):
        batch = stacks(first, 37)
        if first < 300:
            batch["observation"] = torch.randint(255, (37, 3, 6, 6), dtype=torch.uint8)
            batch["next", "observation"][:-1] = batch["observation"][1:]
        for buffer in (files, plain):
            buffer.extend(batch)
    loaded.load_state_dict(files.state_dict())
    expected = drawn(plain)
    for buffer in (files, loaded):
        assert all(bool((mine == held).all()) for mine, held in zip(drawn(buffer), expected, strict=True))
    assert (tmp_path / "observation.1.frames").exists()
    with pytest.raises(TypeError, match="frame stacks in files cannot be copied: load state_dict"):
        copy.deepcopy(files)
    del files, buffer
    gc.collect()
    assert list(tmp_path.iterdir()) == []


def test_frame_stacks_in_files_stay_in_their_process() -> None:
    buffer = ReplayBuffer(storage=LazyMemmapStorage(40, frame_stack={"observation": 3}), batch_size=4)
    buffer.extend(stacks(0, 30))
    with pytest.raises(RuntimeError, match="the buffer has a frame_stack, which other processes cannot see"):
        pickle.dumps(buffer)
    with pytest.raises(
        ValueError, match="frame_stack of 'observation' must be an integer of at least 1, got 0"
    ):
        LazyMemmapStorage(40, frame_stack={"observation": 0})


# -- files that come and go ------------------------------------------------------------------------------------------


def test_temporary_files_go_with_the_storage() -> None:
    storage = LazyMemmapStorage(4, compact_obs=True)
    buffer = ReplayBuffer(storage=storage)
    batch = TensorDict(
        {"x": torch.arange(3), "next": {"x": torch.arange(3), "done": torch.ones(3, dtype=bool)}}, [3]
    )
    buffer.extend(batch)
    folder = storage.folder
    assert folder is not None and (folder / "x.pool").exists()
    rows = buffer[:]
    del buffer, storage
    gc.collect()
    assert not folder.exists() and rows["x"].tolist() == [0, 1, 2]


def test_temporary_files_go_with_the_process() -> None:
    code = (
        "import torch\n"
        "from flatroll.buffers import LazyMemmapStorage, ReplayBuffer\n"
        "buffer = ReplayBuffer(storage=LazyMemmapStorage(4)); buffer.extend(torch.zeros(2))\n"
        "print(buffer.storage.folder)\nraise ValueError\n"
    )
    found = interpreters.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"})
    folder = Path(found.stdout.strip())
    assert folder.name.startswith("flatroll-") and not folder.exists()


def test_files_of_a_given_folder_stay_unless_asked_otherwise(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("kept")
    for clean in (None, True):
        buffer = ReplayBuffer(
            storage=LazyMemmapStorage(4, scratch_dir=tmp_path, auto_cleanup=clean, existsok=True)
        )
        buffer.extend(numbers(0, 3))
        del buffer
        gc.collect()
        assert (tmp_path / "n.memmap").exists() is (clean is None)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
    storage = LazyMemmapStorage(4, auto_cleanup=False)
    ReplayBuffer(storage=storage).extend(numbers(0, 3))
    folder = storage.folder
    del storage
    gc.collect()
    assert folder is not None and folder.exists()
    shutil.rmtree(folder)


def test_files_that_are_there_are_not_overwritten_unasked(tmp_path: Path) -> None:
    first = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path))
    late = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path))
    first.extend(numbers(0, 3))
    with pytest.raises(FileExistsError, match=r"ring.counters already exists: .*existsok=True"):
        LazyMemmapStorage(4, scratch_dir=tmp_path)
    with pytest.raises(
        FileExistsError, match=r"n.memmap already exists: pass another scratch_dir, or existsok"
    ):
        late.extend(numbers(7, 3))
    assert len(late) == 0 and not late.storage.allocated
    second = ReplayBuffer(storage=LazyMemmapStorage(4, scratch_dir=tmp_path, existsok=True))
    second.extend(numbers(7, 2))
    first.extend(numbers(3, 1))  # whose files have no name any more
    assert first["n"].tolist() == [0, 1, 2, 3] and second["n"].tolist() == [7, 8]


# -- space -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
def test_a_disk_without_space_is_refused_before_anything_is_made(
    given: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 40, 0, 1500))
    folder = tmp_path / "rows" if given else None
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder))
    with pytest.raises(
        OSError, match=r"needs 1.562 KiB \(100 rows of 16 bytes\), 1.465 KiB are free on the disk of"
    ):
        buffer.extend(numbers(0, 3))
    assert list(tmp_path.iterdir()) == [] and len(buffer) == 0
    monkeypatch.setattr("shutil.disk_usage", lambda path: Usage(1 << 40, 0, 1 << 40))
    buffer.extend(numbers(0, 3))
    assert buffer["n"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("fails", [1, 2, 3])
@pytest.mark.parametrize("given", [False, True])
def test_a_disk_that_fills_up_meanwhile_leaves_nothing_behind(
    given: bool, fails: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    reserve, calls = os.posix_fallocate, []

    def full(file: int, first: int, size: int) -> None:
        calls.append(size)
        if len(calls) == fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        reserve(file, first, size)

    folder = tmp_path / "rows" if given else None
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=folder, compact_obs=False))
    with monkeypatch.context() as patch:
        patch.setattr("os.posix_fallocate", full)
        with pytest.raises(OSError, match=r"\(100 rows of 16 bytes\), the disk of .* is full") as error:
            buffer.extend(numbers(0, 3))
    assert error.value.errno == errno.ENOSPC
    assert list(tmp_path.iterdir()) == [] and len(buffer) == 0
    buffer.extend(numbers(0, 3))
    assert buffer["n"].tolist() == [0, 1, 2]


def test_a_pool_that_cannot_grow_loses_no_row(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(300, compact_obs=True), sampler=SliceSampler(slice_len=2), batch_size=200
    )
    steps = [step for i in range(80) for step in world.episode(0, i, 2)]
    buffer.extend(world.to_batch(steps[:100]))

    def full(file: int, first: int, size: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OSError, match="no space for 128 rows of 12 bytes"):
        patch.setattr("os.posix_fallocate", full)
        buffer.extend(world.to_batch(steps[100:]))
    for more in range(2):
        assert len(buffer) == 100 + 60 * more
        sample = buffer.sample()
        assert torch.equal(sample["next", "observation"], sample["observation"] + torch.tensor([0, 0, 1]))
        if not more:
            buffer.extend(world.to_batch(steps[100:]))


def test_a_file_system_that_cannot_reserve_gives_files_of_full_length(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unable(file: int, first: int, size: int) -> None:
        raise OSError(errno.EOPNOTSUPP, "Operation not supported")

    monkeypatch.setattr("os.posix_fallocate", unable)
    buffer = ReplayBuffer(storage=LazyMemmapStorage(100, scratch_dir=tmp_path))
    buffer.extend(numbers(0, 3))
    assert (tmp_path / "n.memmap").stat().st_size == 800 and buffer["n"].tolist() == [0, 1, 2]
    monkeypatch.delattr("os.posix_fallocate")
    other = ReplayBuffer(storage=LazyMemmapStorage(100))
    other.extend(numbers(0, 3))
    assert other["n"].tolist() == [0, 1, 2]


def test_a_buffer_larger_than_the_memory_it_may_use() -> None:
    """64 MiB of data memory, a storage of 256 MiB: in memory it is refused, in files it extends and samples."""
    code = """if True:
        import resource, psutil, torch
        from tensordict import TensorDict
        from flatroll.buffers import LazyMemmapStorage, LazyTensorStorage, ReplayBuffer, SliceSampler

        def batch(first, count=256):
            n = torch.arange(first, first + count)
            image = (n % 251).to(torch.uint8)[:, None].expand(-1, 8192)
            done = (n % 50 == 49)[:, None]
            return TensorDict({"image": image, "n": n, "next": {"done": done, "truncated": done}}, [count])

        def buffer(storage):
            return ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=8), batch_size=64)

        buffer(LazyTensorStorage(512)).extend(batch(0))  # what is loaded on the way does not count
        buffer(LazyTensorStorage(512)).extend(batch(0))
        limit = psutil.Process().memory_info().data + (64 << 20)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        rows = 1 << 15
        try:
            buffer(LazyTensorStorage(rows)).extend(batch(0))
        except MemoryError as error:
            print(str(error)[:51])
        large = buffer(LazyMemmapStorage(rows))
        for first in range(0, rows + 2560, 256):
            large.extend(batch(first))
        assert len(large) == rows
        for _ in range(20):
            sample = large.sample()
            assert bool((sample["image"] == (sample["n"] % 251).to(torch.uint8)[:, None]).all())
            begins = sample["is_init"][1:, 0]
            assert bool((sample["n"][1:] == sample["n"][:-1] + 1)[~begins].all())
            assert int(sample["n"].min()) >= 2560
        print(large.storage.nbytes >> 20, large.storage._large)
    """
    found = interpreters.run([sys.executable, "-c", code], env={"PYTHONPATH": "src"})
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines() == ["the storage needs 256.3 MiB (32768 rows of 8202 byt", "256 True"]


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="counts the entries of /proc/self/fd")
def test_descriptors_stay_as_they_are_over_many_episodes() -> None:
    buffer = ReplayBuffer(
        storage=LazyMemmapStorage(500, compact_obs=True), sampler=SliceSampler(slice_len=2), batch_size=4
    )
    done = torch.arange(1000) % 2 == 1
    batch = TensorDict({"x": torch.arange(1000), "next": {"x": torch.arange(1, 1001), "done": done}}, [1000])
    buffer.extend(batch[:400])
    buffer.extend(batch)
    gc.collect()  # what earlier tests left
    before = descriptors()
    for _ in range(200):  # 100_000 episodes
        buffer.extend(batch)
        buffer.sample()
    assert descriptors() == before
    del buffer
    gc.collect()
    assert descriptors() < before


# -- copies and arguments --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
def test_deep_copies_have_files_of_their_own(world: Any, compact: bool, tmp_path: Path) -> None:
    storage = LazyMemmapStorage(20, compact_obs=compact, scratch_dir=tmp_path)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=4), batch_size=8)
    early = copy.deepcopy(buffer)
    steps = world.episode(0, 0, 30)
    for changed in (buffer, early):
        changed.extend(world.to_batch(steps[:10]))
    other = copy.deepcopy(buffer)
    other.extend(world.to_batch(steps[10:]))
    assert (len(buffer), len(other), len(early)) == (10, 20, 10)
    assert len({b.storage.folder for b in (buffer, other, early)}) == 3
    sample = other.sample()
    assert torch.equal(sample["next", "observation"], sample["observation"] + torch.tensor([0, 0, 1]))
    plain = ReplayBuffer(storage=LazyMemmapStorage(20))
    plain.extend(numbers(0, 3))
    twin = copy.deepcopy(plain)
    twin.extend(numbers(3, 2))
    assert plain["n"].tolist() == [0, 1, 2] and twin["n"].tolist() == [0, 1, 2, 3, 4]


def test_one_storage_is_for_one_buffer() -> None:
    storage = LazyMemmapStorage(20)
    ReplayBuffer(storage=storage).extend(numbers(0, 3))
    with pytest.raises(ValueError, match=r"already belongs to another buffer: make one .* buffer"):
        ReplayBuffer(storage=storage).extend(numbers(0, 3))


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(
        ValueError, match=r"device must be 'cpu' for files, got 'cuda:0'.*td.to\('cuda:0'\), or use"
    ):
        LazyMemmapStorage(10, device="cuda:0")
    with pytest.raises(
        ValueError, match=r"codec=\{'observation': 'zstd'\} is not supported for files: use LazyTensorStorage"
    ):
        LazyMemmapStorage(10, codec={"observation": "zstd"})
    with pytest.raises(ValueError, match="max_size must be an integer of at least 1, got 0"):
        LazyMemmapStorage(0)
    with pytest.raises(ValueError, match="ndim must be an integer of at least 1, got 0"):
        LazyMemmapStorage(1, ndim=0)
