"""Checkpoints and folders of `TrajectoryReplayBuffer`: crashes in between, several ranks, files that are made up."""

import errno
import gc
import json
import shutil
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flatroll.buffers import ReplayBuffer
from flatroll.datasets import TrajectoryReplayBuffer
from flatroll.datasets.trajectories.rows import LANE, check_marks, from_trajectories
from flatroll.disk import Folder
from flatroll.disk.segments import RowsName

T, B = 4, 3


def fields(number: int) -> dict[str, Any]:
    """Rewards say trajectory, step and lane."""
    step, lane = torch.meshgrid(torch.arange(T), torch.arange(B), indexing="ij")
    rewards = (number * 10_000 + step * 100 + lane).float()
    return {"rewards": rewards, "max_episode_length": 9, "model_weights_id": f"w{number}"}


def made(count: int = 0, path: Path | None = None, **options: Any) -> TrajectoryReplayBuffer:
    given: dict[str, Any] = {} if path is None else {"auto_save": True, "auto_save_path": path, "sync": False}
    buffer = TrajectoryReplayBuffer(**{**given, "segment_bytes": 400, **options})
    buffer.add_trajectories([fields(i) for i in range(count)])
    return buffer


def numbers(path: Path) -> list[int]:
    """What a run finds in a folder, whose rows are those of these trajectories."""
    buffer = made(path=path)
    found = buffer.trajectory_ids
    assert all(torch.equal(buffer.trajectory(i)["rewards"], fields(i)["rewards"]) for i in found)
    buffer.close()
    return found


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A checkpoint of six trajectories."""
    buffer = made(6)
    buffer.save_checkpoint(tmp_path / "saved")
    buffer.close()
    return tmp_path / "saved"


# The folder of a run.


def test_values_and_flags_of_several_rollouts_have_more_steps() -> None:
    steps = torch.arange(6.0)[:, None]
    flags = torch.tensor([1, 0, 0, 1, 1, 0, 0, 1]).bool()[
        :, None
    ]  # before the first step of each of two rollouts
    values = torch.tensor([0.0, 1, 2, -1, 3, 4, 5, -1])[:, None]  # after the last step of each
    buffer = made()
    buffer.add_trajectories([{"prev_values": values, "rewards": steps, "dones": flags}])
    trajectory = buffer.trajectory(0)
    assert torch.equal(trajectory["prev_values"], steps)
    assert trajectory["dones"].view(-1).tolist() == [False, False, True, False, False, True]
    buffer.close()


def test_a_run_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    buffer = made(3, tmp_path / "run")
    index = buffer.trajectory_index
    assert len({entry["uuid"] for entry in index.values()}) == buffer.trajectory_counter == 3
    assert index[2] == {
        "uuid": index[2]["uuid"],
        "trajectory_id": 2,
        "num_samples": T * B,
        "shape": (T, B),
        "max_episode_length": 9,
        "model_weights_id": "w2",
    }
    buffer.close()
    again = made(path=tmp_path / "run")
    assert again.trajectory_index == index and again.trajectory_counter == 3
    again.clear()
    again.close()
    for number in (3, 4):  # numbers are given once, and rows counted on
        again = made(path=tmp_path / "run")
        again.add_trajectories([fields(number)])
        assert again.trajectory_ids == [number]
        again.flush()
        assert torch.equal(again.trajectory(number)["rewards"], fields(number)["rewards"])
        names = [RowsName.parse(file.name) for file in (tmp_path / "run").glob("*.rows")]
        assert max(name.end for name in names if name) == (number + 1) * T * B
        again.clear()
        again.close()


def test_notes_of_other_rows_do_not_count(tmp_path: Path) -> None:
    buffer = made(5, tmp_path / "run", max_size=5 * T * B)
    buffer.save_checkpoint(tmp_path / "run")
    buffer.add_trajectories([fields(i) for i in range(5, 8)])
    buffer.flush()
    other = made()
    other.load_checkpoint(tmp_path / "run")
    assert other.trajectory_ids[-5:] == buffer.trajectory_ids == [3, 4, 5, 6, 7]
    buffer.close()
    other.close()


def test_own_folder_gives_the_generator_back(tmp_path: Path) -> None:
    buffer = made(3, tmp_path / "run")
    buffer.save_checkpoint(tmp_path / "run")
    would_come = buffer.sample(9)["rewards"]
    buffer.load_checkpoint(tmp_path / "run")
    assert torch.equal(buffer.sample(9)["rewards"], would_come)
    with pytest.raises(ValueError, match="this buffer's own folder"):
        buffer.load_checkpoint(tmp_path / "run", True, 0, 2)
    buffer.close()


def test_what_was_evicted_is_gone_from_the_cache_too() -> None:
    buffer = made(2, max_size=2 * T * B)
    assert len(buffer.trajectory(0)["rewards"]) == T
    buffer.add_trajectories([fields(2)])
    with pytest.raises(KeyError, match="trajectory 0 is not stored; trajectory_ids has those from 1 to 2"):
        buffer.trajectory(0)
    buffer.close()


def test_after_close() -> None:
    buffer = made(2)
    folder = Path(buffer.storage.path)
    buffer.close()
    buffer.close()
    assert not folder.exists()
    assert len(buffer.sample(5)["rewards"]) == 5
    for call in (
        buffer.clear,
        buffer.flush,
        lambda: buffer.add_trajectories([fields(0)]),
        lambda: buffer.save_checkpoint(folder),
        lambda: buffer.load_checkpoint(folder),
    ):
        with pytest.raises(ValueError, match="the buffer is closed"):
            call()
    assert len(buffer) == 2


def test_a_buffer_that_nobody_has_leaves_no_folder() -> None:
    buffer = made(2)
    folder = Path(buffer.storage.path)
    del buffer
    gc.collect()  # an error in between would be a warning
    assert not folder.exists()


@pytest.mark.parametrize(
    ("wrong", "error", "text"),
    [
        (fields(0), TypeError, r"must be a list of trajectories, got one dict"),
        ([{"x": torch.zeros(2, 3).to_sparse()}], TypeError, "dense tensor"),
        ([{0: torch.zeros(2, 3)}], TypeError, "names of fields must be strings, got 0"),
        (
            [{"x": torch.zeros(2, 3), "max_episode_length": "x"}],
            TypeError,
            "max_episode_length must be an integer",
        ),
    ],
)
def test_what_is_no_trajectory(wrong: Any, error: type[Exception], text: str) -> None:
    buffer = made()
    with pytest.raises(error, match=text):
        buffer.add_trajectories(wrong)
    assert len(buffer) == 0
    buffer.close()


@pytest.mark.parametrize("options", [{"seed": None}, {"max_size": 0}])
def test_arguments(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be an integer"):
        TrajectoryReplayBuffer(**options)
    buffer = made(1)
    buffer.sample_window_size = -1
    with pytest.raises(ValueError, match="sample_window_size must be an integer of at least 0, got -1"):
        buffer.sample(1)
    buffer.close()


# Loads.


def test_lanes_of_a_trajectory_follow_each_other() -> None:
    rows, records = from_trajectories([{"rewards": torch.zeros(2, 3)}], 0)
    assert rows is not None
    check_marks(rows, records, 0)
    rows[LANE][4:] += 1
    with pytest.raises(ValueError, match="do not match the recorded trajectories"):
        check_marks(rows, records, 0)


def test_a_load_keeps_what_has_room(saved: Path, tmp_path: Path) -> None:
    buffer = made(2, max_size=30)
    buffer.load_checkpoint(saved)
    assert buffer.trajectory_ids == [4, 5]
    assert buffer.total_samples == len(buffer.buffer) == 2 * T * B
    assert set((buffer.sample(100)["rewards"] // 10_000).tolist()) == {4, 5}
    buffer.close()
    buffer = made(0, max_size=2 * T * B)  # just enough
    buffer.load_checkpoint(saved)
    assert buffer.trajectory_ids == [4, 5]
    buffer.close()
    small = made(0, tmp_path / "small", max_size=5)
    with pytest.raises(ValueError, match="has 12 rows, more than max_size=5"):
        small.load_checkpoint(saved)
    assert not (tmp_path / "small" / "loading").exists()  # the next run would go on with it
    small.close()


def test_a_load_of_other_fields_changes_nothing(saved: Path) -> None:
    buffer = made()
    buffer.add_trajectories([{"x": torch.zeros(2, 3)}])
    with pytest.raises(ValueError, match="differ from those of the buffer in the entries rewards, x"):
        buffer.load_checkpoint(saved)
    assert buffer.sample(2)["x"].tolist() == [0, 0]
    buffer.close()


def test_what_was_loaded_may_be_saved_again(saved: Path) -> None:
    buffer = made()
    buffer.load_checkpoint(saved, True, 0, 2)  # a share must not take the place of all
    with pytest.raises(FileExistsError, match="neither loaded nor published"):
        buffer.save_checkpoint(saved)
    buffer.load_checkpoint(saved)
    buffer.add_trajectories([fields(6)])
    buffer.save_checkpoint(saved)
    buffer.close()
    other = made()
    other.load_checkpoint(saved)
    assert other.trajectory_ids == list(range(7))
    other.close()


@pytest.mark.parametrize("at", ["stage", "staged", "clear", "rows", "loaded"])
def test_a_load_into_a_run_is_old_or_new(
    saved: Path, tmp_path: Path, at: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder as it is at some moment of a load: a run that was killed then leaves it so."""
    run, left = tmp_path / "run", tmp_path / "left"
    made(3, run, segment_bytes=4000).close()
    buffer = made(path=run)
    buffer.clear()
    buffer.add_trajectories([fields(3), fields(4)])
    buffer.flush()

    def stop(*_: Any, **__: Any) -> None:
        buffer.storage._log._disk.acquire()
        shutil.copytree(run, left)
        buffer.storage._log._disk.release()
        raise KeyboardInterrupt

    def second(call: Callable[..., Any]) -> Callable[..., Any]:
        calls: list[int] = []

        def stops(*arguments: Any, **options: Any) -> Any:
            calls.append(1)
            return call(*arguments, **options) if len(calls) < 2 else stop()

        return stops

    with monkeypatch.context() as patch:
        if at == "stage":
            patch.setattr(Folder, "publish", stop)
        elif at == "staged":
            patch.setattr(TrajectoryReplayBuffer, "clear", stop)
        elif at == "clear":
            patch.setattr(ReplayBuffer, "extend", stop)
        elif at == "rows":
            patch.setattr(ReplayBuffer, "extend", second(ReplayBuffer.extend))
        else:
            patch.setattr(shutil, "rmtree", lambda path: (next(path.glob("*.rows")).unlink(), stop()))
        with pytest.raises(KeyboardInterrupt):
            buffer.load_checkpoint(saved)
    expected = [3, 4] if at == "stage" else list(range(6))
    other = made()
    other.load_checkpoint(left)  # who reads it then sees the same
    assert other.trajectory_ids == expected
    assert numbers(left) == expected
    assert not (left / "loading").exists()
    assert numbers(left) == expected
    if at == "stage":
        assert buffer.trajectory_ids == expected
    buffer.load_checkpoint(saved)
    assert buffer.trajectory_ids == list(range(6))
    buffer.close()
    other.close()


def test_a_clear_is_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = tmp_path / "run"
    buffer = made(6, run, segment_bytes=100_000)
    for i in range(6, 9):  # files that no version names
        buffer.flush()
        buffer.add_trajectories([fields(i)])
    buffer.flush()
    seen: list[list[int]] = []
    publish = Folder.publish

    def looking(folder: Folder, *arguments: Any, **options: Any) -> Any:
        shutil.copytree(run, tmp_path / f"left{len(seen)}")
        seen.append([])
        return publish(folder, *arguments, **options)

    monkeypatch.setattr(Folder, "publish", looking)
    buffer.clear()
    monkeypatch.undo()
    buffer.close()
    # All until the second version is there, which names none; the third lets the files go.
    left = [numbers(tmp_path / f"left{i}") for i in range(len(seen))]
    assert left == [list(range(9)), list(range(9)), []]
    assert numbers(run) == []


def test_a_clear_that_fails_can_be_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = made(3, tmp_path / "run")
    buffer.flush()

    def failing(*_: Any, **__: Any) -> None:
        raise OSError("full")

    monkeypatch.setattr(Folder, "publish", failing)
    with pytest.raises(OSError, match="full"):
        buffer.clear()
    monkeypatch.undo()
    assert len(buffer) == len(buffer.buffer) == 0
    buffer.add_trajectories([fields(3)])
    buffer.close()
    assert numbers(tmp_path / "run") == [3]


# Several ranks.


def save_ranks(
    path: Path, buffers: list[TrajectoryReplayBuffer], ranks: list[int] | None = None
) -> list[str]:
    """Let each buffer save as a rank, on a thread of its own; the errors."""
    barrier, errors = threading.Barrier(len(buffers), timeout=600), list[str]()

    def save(buffer: TrajectoryReplayBuffer, rank: int) -> None:
        try:
            buffer.save_checkpoint(path, local_rank=rank, world_size=len(buffers), barrier=barrier.wait)
        except (OSError, RuntimeError, ValueError) as error:
            errors.append(f"{type(error).__name__}: {error}")

    threads = [
        threading.Thread(target=save, args=(buffer, rank))
        for buffer, rank in zip(buffers, ranks or range(len(buffers)), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    return errors


def loaded(path: Path) -> list[float]:
    """The trajectories' first rewards."""
    buffer = made()
    buffer.load_checkpoint(path)
    rewards = [float(buffer.trajectory(i)["rewards"][0, 0]) / 10_000 for i in buffer.trajectory_ids]
    buffer.close()
    return rewards


def test_saves_of_ranks_that_do_not_finish(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved"
    buffers = [made(2), made(1)]
    assert save_ranks(path, buffers) == []
    before = loaded(path)
    for buffer in buffers:
        buffer.add_trajectories([fields(7)])
    full = OSError(errno.ENOSPC, "full")
    for _ in range(4):  # more often than a folder keeps versions
        save = buffers[1].storage.save
        monkeypatch.setattr(buffers[1].storage, "save", lambda *a, **k: (_ for _ in ()).throw(full))
        errors = save_ranks(path, buffers)
        assert any("full" in error for error in errors)
        assert any("rank 1 of 2 has not saved" in error for error in errors)
        monkeypatch.setattr(buffers[1].storage, "save", save)
        assert loaded(path) == before == [0, 1, 0]
    # Rank 1 is missing, and what it saved the last time is not taken for this.
    with pytest.raises((OSError, RuntimeError, ValueError), match="rank 1 of 2 has not saved"):
        buffers[0].save_checkpoint(path, local_rank=0, world_size=2, barrier=lambda: None)
    assert loaded(path) == before
    assert save_ranks(path, buffers) == []
    assert loaded(path) == [0, 1, 7, 0, 7]
    # A run that has loaded it goes on; one that has not is refused.
    others = [made(1), made(1)]
    assert all("neither saved nor loaded" in error for error in save_ranks(path, others))
    for rank, buffer in enumerate(others):
        buffer.load_checkpoint(path)
        buffer.load_checkpoint(path, True, rank, 2)
    assert save_ranks(path, others) == []
    assert loaded(path) == [0, 1, 7, 0, 7]
    for buffer in (*buffers, *others):
        buffer.close()


def test_ranks_of_another_run_and_made_up_ones(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    buffers = [made(2), made(1)]
    save_ranks(path, buffers)
    save_ranks(tmp_path / "other", buffers)
    for buffer in buffers:
        buffer.close()
    shutil.move(path / "rank-1-of-2", tmp_path / "kept")
    with pytest.raises(FileNotFoundError):
        loaded(path)
    shutil.copytree(tmp_path / "other" / "rank-1-of-2", path / "rank-1-of-2")
    with pytest.raises(ValueError, match="belongs to another run"):
        loaded(path)
    shutil.rmtree(path / "rank-1-of-2")
    (path / "rank-1-of-2").symlink_to(tmp_path / "kept")
    with pytest.raises(ValueError, match="links are not followed"):
        loaded(path)
    for noted in ([[1, "../.."]], "..", [1, 1], [["1", "a"]], {"a": 1}, [[1]], 3):
        with Folder(path, write=True) as folder:
            folder.load()
            folder.publish({"ranks": noted})
        with pytest.raises((ValueError, FileNotFoundError)):
            loaded(path)


# Files that are made up.


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("lane", lambda v: v + (1 << 20)),
        ("lane", lambda v: v * 0),
        ("lane", lambda v: v.flip(0)),
        ("lane", lambda v: -v - 1),
        ("lane", lambda v: v.float()),
        ("lane", lambda v: v[:, None].repeat(1, 2)),
        ("place", lambda v: v * 0),
        ("place", lambda v: v + 1),
        ("place", lambda v: -v),
        ("done", lambda v: v.float()),
    ],
)
@pytest.mark.parametrize("noted", [True, False])
def test_marks_that_are_made_up(saved: Path, tmp_path: Path, key: str, value: Any, noted: bool) -> None:
    """With right checksums, so that only what they say is wrong."""
    reader, path = Folder(saved), tmp_path / "made_up"
    state = reader.load().json
    columns = reader.read_rows()
    assert isinstance(state, dict)
    columns[f"_trajectory/{key}"] = value(columns[f"_trajectory/{key}"]).contiguous()
    with Folder(path, write=True) as folder:
        folder.append(columns)
        folder.publish(state if noted else {**state, "trajectories": [[], 0, "", -1]})
    buffer = made(1)
    try:
        buffer.load_checkpoint(path)
    except ValueError:
        assert buffer.trajectory_ids == [0]
    else:  # other numbers or fewer trajectories, but rows that are theirs
        assert not noted
        assert all(len(buffer.trajectory(i)["rewards"]) for i in buffer.trajectory_ids)
    buffer.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state[0].append([9, 2, 3, 0, ""]),
        lambda state: state[0].append([5, 0, 3, 0, ""]),
        lambda state: state[0][0].__setitem__(0, 2**50),
        lambda state: state[0][0].__setitem__(0, 1),
        lambda state: state[0][0].__setitem__(1, T * 2),
        lambda state: state[0][0].__setitem__(slice(1, 3), [-T, -B]),
        lambda state: state.__setitem__(1, 0),
        lambda state: state.__setitem__(1, 2**60),
        lambda state: state.__setitem__(2, "00"),
        lambda state: state.pop(),
    ],
)
def test_states_that_are_made_up(saved: Path, change: Callable[[Any], Any]) -> None:
    with Folder(saved, write=True) as folder:
        noted: Any = folder.load().json
        change(noted["trajectories"])
        folder.publish(noted)
    buffer = made(1)
    try:
        buffer.load_checkpoint(saved)
    except ValueError:
        assert buffer.trajectory_ids == [0]
    else:  # the rows themselves say what they are
        assert buffer.trajectory_ids == list(range(6))
    buffer.close()


def rlinf(path: Path, **more: Any) -> Path:
    """A folder of one trajectory, as RLinf writes it."""
    path.mkdir()
    torch.save({**fields(0), **more}, path / "trajectory_0_w0.pt")
    entry = {"num_samples": T * B, "trajectory_id": 0, "shape": [T, B], "model_weights_id": "w0"}
    index = {"trajectory_index": {"0": entry}, "trajectory_id_list": [0]}
    (path / "trajectory_index.json").write_text(json.dumps(index))
    (path / "metadata.json").write_text(json.dumps({"trajectory_counter": 1}))
    return path


def refused(path: Path, text: str) -> None:
    buffer = made(1)
    with pytest.raises(ValueError, match=text):
        buffer.load_checkpoint(path)
    assert buffer.trajectory_ids == [0]
    buffer.close()


def test_rlinf_files_that_are_made_up(tmp_path: Path) -> None:
    for i, (value, text) in enumerate(
        [
            (torch.zeros(1).expand(T, B, 10**9), "claim"),
            (torch.zeros(T, B, device="meta"), "not a dense tensor"),
            (torch.zeros(T, B).to_sparse(), "not a dense tensor"),
            (["text"], "must be a dense tensor"),
        ]
    ):
        refused(rlinf(tmp_path / f"{i}", x=value), text)
    again: dict[str, Any] = {}
    for _ in range(60):
        again = {"a": again, "b": again}
    refused(rlinf(tmp_path / "again", x=again), "occurs twice")
    path = rlinf(tmp_path / "flipped", x=torch.zeros(T, B, 50))
    file = path / "trajectory_0_w0.pt"
    whole = file.read_bytes()
    file.write_bytes(whole.replace(bytes(400), bytes(399) + b"1", 1))
    refused(path, "checksum")
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data/0", bytes(10**6))
    refused(path, "compressed")
    file.write_bytes(whole[: len(whole) // 2])
    refused(path, "not a zip file")
    index = json.loads((path / "trajectory_index.json").read_text())
    for key, value in (("num_samples", 10**30), ("num_samples", -1), ("num_samples", float("inf"))):
        index["trajectory_index"]["0"][key] = value
        (path / "trajectory_index.json").write_text(json.dumps(index))
        refused(path, "the index of trajectories has invalid numbers")


def test_rlinf_leaves_out_what_is_no_tensor(tmp_path: Path) -> None:
    path = rlinf(tmp_path / "rlinf", curr_obs={"x": torch.ones(T, B), "task_descriptions": ["a", "b"]})
    buffer = made()
    with pytest.warns(RuntimeWarning, match="curr_obs/task_descriptions are not tensors"):
        buffer.load_checkpoint(path)
    assert set(buffer.sample(2)["curr_obs"]) == {"x"}
    buffer.close()


# The contract.


def test_the_calls_of_rlinfs_tutorial(tmp_path: Path) -> None:
    """Names and arguments as its pages have them, and what they say of the results."""
    buffer = TrajectoryReplayBuffer(
        seed=1234,
        enable_cache=True,
        cache_size=5,
        sample_window_size=100,
        auto_save=True,
        auto_save_path=str(tmp_path / "buffer"),
        trajectory_format="pt",
    )
    buffer.add_trajectories([fields(i) for i in range(8)])
    assert buffer.sample(num_chunks=256)["rewards"].shape == (256,)
    buffer.save_checkpoint(str(tmp_path / "ckpt"))
    buffer.load_checkpoint(load_path=str(tmp_path / "ckpt"), is_distributed=True, local_rank=0, world_size=4)
    assert (buffer.size, len(buffer), buffer.total_samples) == (2, 2, 2 * T * B)
    assert buffer.is_ready(2)
    stats = buffer.get_stats()
    assert [stats[name] for name in ("num_trajectories", "total_samples", "cache_size")] == [2, 24, 0]
    buffer.clear_cache()
    buffer.clear()
    buffer.close(wait=True)


def test_other_programs_find_the_index_and_the_metadata(tmp_path: Path) -> None:
    """In a checkpoint, in that of each rank, and in a run's folder that was closed; loads read none of it."""

    def check(folder: Path, buffer: TrajectoryReplayBuffer) -> None:
        index = json.loads((folder / "trajectory_index.json").read_text())
        assert index["trajectory_id_list"] == buffer.trajectory_ids
        entries = {int(number): entry for number, entry in index["trajectory_index"].items()}
        shaped = {number: {**entry, "shape": tuple(entry["shape"])} for number, entry in entries.items()}
        assert shaped == buffer.trajectory_index
        assert json.loads((folder / "metadata.json").read_text()) == {
            "trajectory_format": "pt",
            "size": len(buffer),
            "total_samples": buffer.total_samples,
            "trajectory_counter": buffer.trajectory_counter,
            "seed": 1234,
        }

    buffer = made(3, tmp_path / "run")
    for _ in range(2):
        buffer.save_checkpoint(tmp_path / "saved")
        check(tmp_path / "saved", buffer)
        buffer.add_trajectories([fields(3)])
    both = threading.Barrier(2, timeout=600)

    def save(rank: int, one: TrajectoryReplayBuffer) -> None:
        one.save_checkpoint(tmp_path / "ranks", local_rank=rank, world_size=2, barrier=both.wait)

    second = made(2, tmp_path / "second")
    threads = [threading.Thread(target=save, args=pair) for pair in enumerate((buffer, second))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    check(tmp_path / "ranks/rank-0-of-2", buffer)
    check(tmp_path / "ranks/rank-1-of-2", second)
    second.close()
    check(tmp_path / "second", second)
    for name in ("saved", "ranks", "second"):
        loaded = TrajectoryReplayBuffer()
        loaded.load_checkpoint(tmp_path / name)
        assert loaded.total_samples > 0
        loaded.close()
    buffer.close()
