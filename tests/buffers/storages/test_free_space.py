"""Sizes: what fits is asked before it is taken, and what is taken is reported."""

import sys
from pathlib import Path
from typing import Any

import interpreters
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyMemmapStorage, LazyTensorStorage, ListStorage, ReplayBuffer, SliceSampler
from flatroll.buffers.storages import free_space as sizes

GIB = 1 << 30
CPU = torch.device("cpu")


def rows(count: int, **entries: Any) -> TensorDict:
    obs = torch.zeros(count, 250)
    done = torch.zeros(count, 1, dtype=torch.bool)
    return TensorDict({"observation": obs, "next": {"observation": obs, "done": done}, **entries}, [count])


@pytest.mark.parametrize(
    ("options", "ways"),
    [
        ({}, "LazyMemmapStorage, compact_obs=True or frame_stack and codec for images"),
        ({"compact_obs": True}, "LazyMemmapStorage or frame_stack and codec for images"),
    ],
)
def test_what_cannot_fit_is_refused_before_anything_is_taken(
    options: dict[str, Any], ways: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sizes, "free_memory", lambda device: 3 * GIB)
    buffer = ReplayBuffer(storage=LazyTensorStorage(1 << 22, **options))
    each = 1001 if options else 2001
    for _ in range(2):
        with pytest.raises(MemoryError) as error:
            buffer.extend(rows(2))
        needed = f"{each * (1 << 22) / GIB:.4g} GiB ({1 << 22} rows of {each} bytes)"
        assert str(error.value) == (
            f"the storage needs {needed}, 3 GiB of memory are free on cpu: use a smaller max_size, {ways}"
        )
        assert len(buffer) == 0 and not buffer.storage.allocated
    with pytest.raises(RuntimeError, match="cannot sample from an empty buffer"):
        buffer.sample(1)


def test_ways_out_are_those_that_are_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sizes, "free_memory", lambda device: 0)
    with pytest.raises(
        MemoryError, match=r"\(10 rows of 8 bytes\).*max_size, LazyMemmapStorage or frame_stack"
    ):
        ReplayBuffer(storage=LazyTensorStorage(10)).extend(torch.zeros(3, 2))


def test_limits_of_the_process_count() -> None:
    code = """if True:
        import resource, torch, psutil
        from flatroll.buffers import LazyTensorStorage, ReplayBuffer
        import flatroll.buffers.storages.free_space as sizes
        ReplayBuffer(storage=LazyTensorStorage(10)).extend(torch.zeros(10))
        used = psutil.Process().memory_info()
        for limit, taken in ((resource.RLIMIT_DATA, used.data), (resource.RLIMIT_AS, used.vms)):
            resource.setrlimit(limit, (taken + (64 << 20), resource.RLIM_INFINITY))
            assert 0 < sizes.free_memory(torch.device("cpu")) <= 64 << 20
            try:
                ReplayBuffer(storage=LazyTensorStorage(1 << 20)).extend(torch.zeros(10, 32))
            except MemoryError as error:
                assert "128 MiB (1048576 rows of 128 bytes)" in str(error), error
                print("refused")
            resource.setrlimit(limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    """
    run = [sys.executable, "-c", code]
    found = interpreters.run(run, check=True, env={"PYTHONPATH": "src"})
    assert found.stdout.split() == ["refused", "refused"]


def group(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def limits(tmp_path: Path, lines: str) -> list[int]:
    (tmp_path / "groups").write_text(lines)
    return list(sizes._group_limits(tmp_path / "groups", tmp_path / "root"))


def test_control_groups_of_version_2(tmp_path: Path) -> None:
    stat = "anon 5\ninactive_file 20\nactive_file 7\n"
    group(tmp_path / "root/pod/box", {"memory.max": "100\n", "memory.current": "70\n", "memory.stat": stat})
    group(tmp_path / "root/pod", {"memory.max": "max\n", "memory.current": "90\n", "memory.stat": stat})
    group(tmp_path / "root", {"memory.max": "500\n", "memory.current": "90\n", "memory.stat": "anon 5\n"})
    assert limits(tmp_path, "0::/pod/box\n") == [50, 410]
    assert limits(tmp_path, "0::/\n") == [410]
    assert limits(tmp_path, "0::/not/seen/from/here\n") == [410]
    assert limits(tmp_path, "0::/../outside\n") == [410]


def test_control_groups_of_version_1(tmp_path: Path) -> None:
    files = {"memory.limit_in_bytes": "100\n", "memory.usage_in_bytes": "70\n"}
    stat = {"memory.stat": "inactive_file 1\ntotal_inactive_file 20\n"}
    group(tmp_path / "root/memory/box", files | stat)
    assert limits(tmp_path, "4:memory:/box\n3:cpuset,cpu:/\n0::/\n") == [50]
    group(tmp_path / "root/memory/box", {"memory.limit_in_bytes": "what\n"})
    assert limits(tmp_path, "4:memory:/box\n") == []
    assert list(sizes._group_limits(tmp_path / "none", tmp_path)) == []


def test_devices_that_cannot_be_asked_are_not() -> None:
    sizes.check_memory(1 << 40, 1 << 20, torch.device("meta"))
    assert sizes.free_memory(CPU) > 0


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        OSError, match=r"needs 8192 TiB .*are free on the disk of .*: use a smaller max_size$"
    ):
        sizes.check_disk(1 << 43, 1 << 10, tmp_path / "not" / "there")
    sizes.check_disk(1 << 43, 1 << 10, tmp_path, spare=1 << 53)


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("kind", [LazyTensorStorage, LazyMemmapStorage])
def test_bytes_are_those_of_the_columns(world: Any, kind: Any, compact: bool) -> None:
    storage = kind(100, compact_obs=compact)
    buffer = ReplayBuffer(storage=storage, sampler=SliceSampler(slice_len=2), batch_size=4)
    assert storage.bytes_per_row == storage.nbytes == storage.bytes_saved == 0
    assert buffer.stats() == {
        "rows": 0,
        "capacity": 100,
        "rows_written": 0,
        "bytes_per_row": 0,
        "bytes": 0,
        "bytes_saved": 0,
        "size": 0,
        "write_count": 0,
        "utilization": 0.0,
    }
    buffer.extend(world.to_batch(world.episode(0, 0, 30) + world.episode(0, 1, 8)[:5]))
    # observation 3 * 4, step_count 8, is_init 1, id 8; next: reward 4, done, terminated and truncated 1 each
    each = 12 + 8 + 1 + 8 + 4 + 3 + (0 if compact else 12 + 8)
    assert storage.bytes_per_row == each
    pool = 64 * 20 if compact else 0
    assert storage.nbytes == 100 * each + pool
    assert storage.bytes_saved == (100 * 20 - pool if compact else 0)
    found = buffer.stats()
    assert buffer.index is not None
    assert found.pop("bytes") == storage.nbytes + buffer.index.nbytes
    assert found == {
        "rows": 35,
        "capacity": 100,
        "rows_written": 35,
        "bytes_per_row": each,
        "bytes_saved": storage.bytes_saved,
        "trajectories": 2,
        "open_trajectories": 1,
        "size": 35,
        "write_count": 35,
        "utilization": 0.35,
    }


def test_items_have_no_size() -> None:
    buffer = ReplayBuffer(storage=ListStorage(3))
    buffer.extend(["a", 1])
    assert buffer.stats()["rows"] == 2 and buffer.storage.nbytes == buffer.storage.bytes_per_row == 0
