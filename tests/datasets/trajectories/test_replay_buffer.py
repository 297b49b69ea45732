"""`TrajectoryReplayBuffer`: RLinf's names and semantics, checkpoints, index, ranks, failing writes."""

import asyncio
import errno
import json
import os
import pickle
import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.buffers import PrioritizedSliceSampler
from flatroll.datasets import TrajectoryCache, TrajectoryReplayBuffer
from flatroll.datasets.trajectories.sources import share
from flatroll.disk import Checkpoint, files
from flatroll.disk.segments import Segment

T, B = 4, 3


@dataclass
class Trajectory:
    """As RLinf's: some fields are None, flags have a step more."""

    rewards: Tensor
    dones: Tensor
    curr_obs: dict[str, Tensor] | None = None
    prev_logprobs: Tensor | None = None
    max_episode_length: int = 0
    model_weights_id: str = ""


def trajectory(number: int, steps: int = T, lanes: int = B) -> Trajectory:
    """Rewards say trajectory, step and lane; an episode ends after step 1."""
    step, lane = torch.meshgrid(torch.arange(steps), torch.arange(lanes), indexing="ij")
    dones = torch.zeros(steps + 1, lanes, 1, dtype=torch.bool)
    dones[2] = True
    return Trajectory(
        rewards=(number * 10_000 + step * 100 + lane).float(),
        dones=dones,
        curr_obs={"states": torch.stack([torch.full_like(step, number), step], -1)},
        max_episode_length=9,
        model_weights_id=f"w{number}",
    )


def check(sample: dict[str, Any]) -> None:
    """The fields of a sample belong together."""
    rewards, states = sample["rewards"].long(), sample["curr_obs"]["states"]
    assert torch.equal(rewards // 10_000, states[:, 0])
    assert torch.equal(rewards % 10_000 // 100, states[:, 1])
    assert torch.equal(sample["dones"].view(-1), states[:, 1] == 1)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Any]:
    made = []

    def make_buffer(count: int = 0, path: str = "", **options: Any) -> TrajectoryReplayBuffer:
        given: dict[str, Any] = (
            {"auto_save": True, "auto_save_path": tmp_path / path, "sync": False} if path else {}
        )
        buffer = TrajectoryReplayBuffer(**{**given, "segment_bytes": 2000, **options})
        buffer.add_trajectories([trajectory(i) for i in range(count)])
        made.append(buffer)
        return buffer

    yield make_buffer
    for buffer in made:
        buffer.close()


def rlinf_folder(path: Path, count: int, ending: str = ".pt") -> Path:
    """A folder as RLinf writes it."""
    path.mkdir()
    index = {}
    for i in range(count):
        fields = {name: value for name, value in vars(trajectory(i)).items() if value is not None}
        if ending == ".pt":
            torch.save(fields, path / f"trajectory_{i}_w{i}.pt")
        else:
            (path / f"trajectory_{i}_w{i}.pkl").write_bytes(pickle.dumps(fields))
        index[str(i)] = {
            "num_samples": T * B,
            "trajectory_id": i,
            "shape": [T, B],
            "model_weights_id": f"w{i}",
        }
    metadata = {"trajectory_format": ending[1:], "size": count, "trajectory_counter": count, "seed": 3}
    (path / "metadata.json").write_text(json.dumps(metadata))
    (path / "trajectory_index.json").write_text(
        json.dumps({"trajectory_index": index, "trajectory_id_list": list(range(count))})
    )
    return path


def test_samples_are_of_the_window(make: Any) -> None:
    buffer = make(10, sample_window_size=3)
    assert (len(buffer), buffer.total_samples) == (10, 10 * T * B)
    sample = buffer.sample(num_chunks=500)
    check(sample)
    assert set(sample) == {"rewards", "dones", "curr_obs"}
    assert sample["rewards"].shape == (500,)
    drawn, counts = torch.unique(sample["rewards"], return_counts=True)
    assert set((drawn // 10_000).tolist()) == {7, 8, 9}
    assert len(drawn) == 3 * T * B
    assert counts.max() < 40  # 14 expected
    buffer.sample_window_size = 0
    assert len(set((buffer.sample(500)["rewards"] // 10_000).tolist())) == 10


def test_all_kinds_of_trajectories(make: Any) -> None:
    x = torch.arange(12.0).view(4, 3)
    buffer = make()
    buffer.add_trajectories([{"x": x}, TensorDict({"x": x}, [4, 3]), {"x": x, "none": None}])
    flat = TensorDict(
        {"x": torch.arange(5.0), "is_init": torch.tensor([1, 0, 0, 1, 0]).bool().unsqueeze(1)}, [5]
    )
    assert torch.equal(buffer.trajectory(1)["x"], x)
    other = make()
    other.add_trajectories([flat])  # two runs
    assert [r.rows for _, r in other._records] == [3, 2]
    assert torch.equal(other.trajectory(1)["x"].view(-1), torch.tensor([3.0, 4.0]))
    assert other.add_trajectories([]) is None


def test_slices_stay_in_an_episode_of_a_lane(make: Any) -> None:
    buffer = make(5)
    rewards = buffer.sample_slices(200, 2)["rewards"].view(200, 2)
    assert (rewards.diff() == 100).all()
    assert set((rewards[:, 0] % 10_000 // 100).tolist()) == {0, 2}  # episodes are steps 0-1 and 2-3
    with pytest.raises(RuntimeError, match="no stored trajectory has 3 consecutive rows"):
        buffer.sample_slices(2, 3)


def test_priorities(make: Any) -> None:
    keys: dict[str, Any] = {
        "traj_key": TrajectoryReplayBuffer.traj_key,
        "end_key": TrajectoryReplayBuffer.end_key,
    }
    buffer = make(
        5,
        max_size=100,
        sampler=PrioritizedSliceSampler(100, 1.0, 1.0, slice_len=2, truncated_key=None, **keys),
    )
    buffer.buffer.update_priority(torch.arange(60), 0.0)
    buffer.buffer.update_priority(torch.tensor([24]), 1.0)
    rows, info = buffer.buffer.sample(8, return_info=True)
    assert set(rows["rewards"].tolist()) == {20_000.0, 20_100.0}
    assert set(info["index"].tolist()) == {24, 25}


def test_the_buffer_of_the_rows_refuses_changes(make: Any, tmp_path: Path) -> None:
    """What is known of the trajectories would be wrong of other rows; the text names the method that does it."""
    buffer = make(2)
    inner = buffer.buffer
    inner.dumps(tmp_path / "rows", sync=False)
    changes: list[tuple[Any, str]] = [
        (lambda: inner.extend(inner[:2]), "add_trajectories"),
        (lambda: inner.add(inner[0]), "add_trajectories"),
        (inner.empty, "clear"),
        (lambda: inner.loads(tmp_path / "rows"), "load_checkpoint"),
        (lambda: Checkpoint(tmp_path / "rows", buffer=inner).load(), "load_checkpoint"),
        (lambda: inner.load_state_dict({}), "load_checkpoint"),
    ]
    for change, way_out in changes:
        with pytest.raises(RuntimeError, match=f"without updating the trajectories .*: call its {way_out}"):
            change()
    check(buffer.sample(50))
    assert buffer.total_samples == len(inner) == 2 * T * B
    buffer.add_trajectories([trajectory(2)])
    assert buffer.trajectory(2)["rewards"][0, 0] == 20_000


def test_eviction(make: Any, tmp_path: Path) -> None:
    buffer = make(0, "run", max_size=5 * T * B + 3)
    for i in range(40):
        buffer.add_trajectories([trajectory(i)])
    assert buffer.trajectory_ids == [35, 36, 37, 38, 39]
    assert buffer.total_samples == 5 * T * B
    buffer.flush()
    # Two versions, and the files that only the older one names.
    assert sum(file.stat().st_size for file in (tmp_path / "run").iterdir()) < 50_000
    check(buffer.sample(100))
    with pytest.raises(ValueError, match="more than max_size"):
        buffer.add_trajectories([trajectory(0, 100)])
    with pytest.raises(KeyError, match="trajectory 3 is not stored"):
        buffer.trajectory(3)


def test_a_run_finds_what_it_left(make: Any) -> None:
    buffer = make(7, "run")
    buffer.close()
    again = make(0, "run")
    assert again.trajectory_ids == list(range(7))
    again.add_trajectories([trajectory(7)])
    assert again.trajectory_ids[-1] == 7
    assert torch.equal(again.trajectory(6)["rewards"], trajectory(6).rewards)
    check(again.sample(200))
    assert (again.sample_slices(100, 2)["rewards"].view(100, 2).diff() == 100).all()


def test_cache(make: Any) -> None:
    buffer = make(7, cache_size=2)
    for i in range(4):
        assert torch.equal(buffer.trajectory(i)["rewards"], trajectory(i).rewards)
    assert buffer.trajectory(3) is buffer.trajectory(3)
    assert buffer.get_stats()["cache_size"] == 2
    buffer.clear_cache()
    assert buffer.get_stats() | {"bytes": 0, "rows_unflushed": 0} == {
        "num_trajectories": 7,
        "total_samples": 84,
        "cache_size": 0,
        "bytes": 0,
        "rows_unflushed": 0,
    }
    assert make(1, enable_cache=False).get_stats()["cache_size"] == 0
    cache = TrajectoryCache(2)
    for i in range(3):
        cache.put(i, {"i": i})
    assert [cache.get(i) for i in range(3)] == [None, {"i": 1}, {"i": 2}]


def test_ready(make: Any) -> None:
    buffer = make(2)
    assert buffer.is_ready(2)
    assert not buffer.is_ready(3)
    assert asyncio.run(buffer.is_ready_async(2))


# What RLinf's loses, by the numbers of the notes on it.


@pytest.mark.parametrize("auto_save", [False, True])
def test_a_checkpoint_has_what_its_index_lists(make: Any, tmp_path: Path, auto_save: bool) -> None:
    buffer = make(10, "run" if auto_save else "", sample_window_size=3)
    buffer.save_checkpoint(tmp_path / "saved")  # before the first sample
    other = make()
    other.load_checkpoint(tmp_path / "saved")
    assert other.trajectory_ids == buffer.trajectory_ids == list(range(10))
    assert all(torch.equal(other.trajectory(i)["rewards"], trajectory(i).rewards) for i in range(10))
    if auto_save:
        buffer.save_checkpoint(tmp_path / "run")
        buffer.load_checkpoint(tmp_path / "run")
        assert len(buffer) == 10
        buffer.close()
        other.load_checkpoint(tmp_path / "run")
        assert len(other) == 10


def test_the_index_says_what_is_there(make: Any) -> None:
    buffer = make(20, sample_window_size=0)
    assert len(buffer.sample(1000)["rewards"]) == 1000  # of 240 rows
    assert buffer.total_samples == 20 * T * B == len(buffer.buffer)


def test_fields_beside_the_usual_ones_are_kept(make: Any) -> None:
    buffer = make(2)
    lacks = trajectory(2)
    lacks.curr_obs = None
    more = trajectory(2)
    more.prev_logprobs = torch.zeros(T, B)
    for wrong in ([lacks], [more], [trajectory(2), more]):
        with pytest.raises(ValueError, match=r"lacks the entry|did not have|prev_logprobs"):
            buffer.add_trajectories(wrong)
    assert len(buffer) == 2
    assert buffer.total_samples == len(buffer.buffer) == 2 * T * B
    without_rewards = make()
    without_rewards.add_trajectories([{"x": torch.zeros(2, 3)}])
    assert without_rewards.sample(3)["x"].shape == (3,)
    for wrong, error in (
        ({"x": torch.zeros(2, 3), "y": torch.zeros(2, 2)}, ValueError),
        ({"x": torch.zeros(2)}, ValueError),
        ({"x": "text"}, TypeError),
        (3, TypeError),
    ):
        with pytest.raises(error, match=r"\[T, B|must be a"):
            make().add_trajectories([wrong])


def test_random_numbers_come_from_the_seed_and_go_on_after_a_load(make: Any, tmp_path: Path) -> None:
    np.random.seed(0)
    random.seed(0)
    torch.manual_seed(0)
    before = (
        np.random.get_state(legacy=False)["state"]["key"].copy(),
        random.getstate(),
        torch.get_rng_state(),
    )
    buffer = make(5)
    buffer.sample(8)
    buffer.save_checkpoint(tmp_path / "saved")
    would_come = buffer.sample(8)["rewards"]
    other = make(1, seed=7)
    other.load_checkpoint(tmp_path / "saved")
    assert torch.equal(other.sample(8)["rewards"], would_come)
    assert (np.random.get_state(legacy=False)["state"]["key"] == before[0]).all()
    assert random.getstate() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])
    assert torch.equal(make(5, seed=3).sample(4)["rewards"], make(5, seed=3).sample(4)["rewards"])


def test_clear_and_failing_writes_leave_what_was_there(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(5, "run")
    buffer.clear()
    assert (len(buffer), buffer.total_samples) == (0, 0)
    with pytest.raises(RuntimeError, match="empty buffer"):
        buffer.sample(3)
    buffer.clear_cache()
    buffer.add_trajectories([trajectory(5)])  # after clear_cache
    assert buffer.trajectory_ids == [5]  # numbers go on

    def failing(descriptor: int, data: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(files, "write", failing)
    with pytest.raises(OSError, match="No space"):
        for i in range(6, 20_000):
            buffer.add_trajectories([trajectory(i)])
    monkeypatch.undo()
    number = buffer.trajectory_ids[-1]
    buffer.add_trajectories([trajectory(number + 1)])
    buffer.close()
    again = make(0, "run")
    assert again.trajectory_ids == list(range(5, number + 2))
    check(again.sample(100))


class _Plant:
    def __reduce__(self) -> Any:
        return os.mkdir, (os.environ["PLANTED"],)


def test_the_checkpoint_does_not_choose_its_format(
    make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted"))
    path = rlinf_folder(tmp_path / "rlinf", 2, ".pkl")
    (tmp_path / "trajectory_0_x.pkl").write_bytes(pickle.dumps(_Plant()))
    buffer = make(1)
    with pytest.raises(FileNotFoundError, match="allow_pickle=True"):
        buffer.load_checkpoint(path)
    with pytest.raises(ValueError, match="allow_pickle=True"):
        make(trajectory_format="pkl")
    index = json.loads((path / "trajectory_index.json").read_text())
    index["trajectory_index"]["0"]["model_weights_id"] = "/../../trajectory_0_x"
    (path / "trajectory_index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match="has no file"):
        buffer.load_checkpoint(path)
    torch.save(_Plant(), path / "trajectory_0_w0.pt")
    index["trajectory_index"]["0"]["model_weights_id"] = "w0"
    index["trajectory_id_list"] = [0]
    (path / "trajectory_index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="no trajectory can be read"):
        buffer.load_checkpoint(path)
    assert not (tmp_path / "planted").exists()
    assert buffer.trajectory_ids == [0]  # as before


def test_more_ranks_than_trajectories(make: Any, tmp_path: Path) -> None:
    make(4).save_checkpoint(tmp_path / "saved")
    buffer = make(1)
    for rank, ranks, text in (
        (5, 8, "4 trajectories cannot be divided among 8 ranks"),
        (0, 0, "world_size must be an integer of at least 1, got 0"),
        (4, 4, "local_rank must be below world_size=4, got 4"),
        (-1, 4, "local_rank must be an integer of at least 0, got -1"),
    ):
        with pytest.raises(ValueError, match=text):
            buffer.load_checkpoint(tmp_path / "saved", True, rank, ranks)
    assert len(buffer) == 1


def test_a_sample_is_one_gather(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many trajectories it is from; `benchmarks/disk/bench_store.py` has the times."""
    buffer = make(50, sample_window_size=0)
    buffer.flush()
    calls = []
    read = type(buffer.storage).read_rows
    monkeypatch.setattr(type(buffer.storage), "read_rows", lambda *a, **k: calls.append(1) or read(*a, **k))
    check(buffer.sample(4096))
    assert len(calls) == 1


# Shares and checkpoints of several ranks.


def test_shares_are_disjoint_complete_and_balanced() -> None:
    generator = torch.Generator().manual_seed(0)
    for count in (9, 10, 31):
        rows = torch.randint(1, 50, (count,), generator=generator).tolist()
        for ranks in range(1, 10):
            shares = [share(rows, rank, ranks) for rank in range(ranks)]
            assert [i for part in shares for i in part] == list(range(count))
            assert all(len(part) for part in shares)
            if count == 31:
                sums = [sum(rows[i] for i in part) for part in shares]
                assert max(sums) - min(sums) <= 2 * max(rows)


@pytest.mark.parametrize("world_size", [1, 2, 5, 9])
def test_each_rank_reads_only_its_files(
    make: Any, tmp_path: Path, world_size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(36).save_checkpoint(tmp_path / "saved")
    read: set[int] = set()
    whole = Segment.read

    def reading(segment: Segment, *arguments: Any) -> Any:
        if segment.folder == tmp_path / "saved":
            read.add(segment.first)
        return whole(segment, *arguments)

    monkeypatch.setattr(Segment, "read", reading)
    buffer, seen = make(), []
    files_there = len(list((tmp_path / "saved").glob("*.rows")))
    for rank in range(world_size):
        read.clear()
        buffer.load_checkpoint(
            tmp_path / "saved", is_distributed=True, local_rank=rank, world_size=world_size
        )
        assert len(read) <= files_there // world_size + 3
        assert buffer.total_samples == len(buffer) * T * B == len(buffer.buffer)
        check(buffer.sample(50))
        seen += buffer.trajectory_ids
    assert seen == list(range(36))
    assert files_there > 5


def test_several_ranks_save_and_any_number_loads(make: Any, tmp_path: Path) -> None:
    ranks = [make(3, seed=rank) for rank in range(2)]
    barrier = threading.Barrier(2)

    def save(rank: int) -> None:
        ranks[rank].save_checkpoint(tmp_path / "saved", local_rank=rank, world_size=2, barrier=barrier.wait)

    for _ in range(2):  # twice: the second goes on from the first
        threads = [threading.Thread(target=save, args=(rank,)) for rank in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(600)
    other, rewards = make(), []
    other.load_checkpoint(tmp_path / "saved")
    assert other.trajectory_ids == list(range(6))  # two ranks have the same numbers
    assert (other.sample_slices(50, 2)["rewards"].view(50, 2).diff() == 100).all()
    for rank in range(3):
        other.load_checkpoint(tmp_path / "saved", True, rank, 3)
        rewards += [other.trajectory(i)["rewards"] for i in other.trajectory_ids]
    assert torch.equal(torch.stack(rewards), torch.stack([trajectory(i % 3).rewards for i in range(6)]))
    with pytest.raises(ValueError, match="several ranks need a barrier"):
        ranks[0].save_checkpoint(tmp_path / "b", local_rank=0, world_size=2)


@pytest.mark.parametrize("ending", [".pt", ".pkl"])
def test_rlinf_folders(make: Any, tmp_path: Path, ending: str) -> None:
    path = rlinf_folder(tmp_path / "rlinf", 5, ending)
    buffer = make(trajectory_format=ending[1:], allow_pickle=ending == ".pkl")
    buffer.load_checkpoint(path)
    assert torch.equal(buffer.trajectory(4)["rewards"], trajectory(4).rewards)
    assert torch.equal(buffer.trajectory(4)["dones"], trajectory(4).dones[1:])
    check(buffer.sample(100))
    buffer.load_checkpoint(path, True, 1, 2)
    assert buffer.trajectory_ids in ([2, 3, 4], [3, 4])
    buffer.add_trajectories([trajectory(9)])
    assert buffer.trajectory_ids[-1] == 5


def test_damaged_checkpoints_change_nothing(make: Any, tmp_path: Path) -> None:
    make(18).save_checkpoint(tmp_path / "saved")
    last = sorted((tmp_path / "saved").glob("*.rows"))[-1]
    memory = bytearray(last.read_bytes())
    memory[-5] ^= 1
    last.unlink()
    last.write_bytes(memory)
    buffer = make(2)
    with pytest.raises(ValueError, match="the checksum of"):
        buffer.load_checkpoint(tmp_path / "saved")
    assert buffer.trajectory_ids == [0, 1]
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        buffer.load_checkpoint(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="holds no checkpoint"):
        buffer.load_checkpoint(tmp_path / "empty")
    other = make(1)
    with pytest.raises(FileExistsError, match="neither loaded nor published"):
        other.save_checkpoint(tmp_path / "saved")


def test_a_checkpoint_writes_no_rows(make: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = make(18, "run")
    buffer.flush()
    written = []
    write = files.write
    monkeypatch.setattr(
        files, "write", lambda d, data: written.append(len(memoryview(data).cast("B"))) or write(d, data)
    )
    buffer.save_checkpoint(tmp_path / "saved")
    assert len(written) == 3  # the manifest, and for other programs the index and the metadata
    assert {"trajectory_index.json", "metadata.json"} < {path.name for path in (tmp_path / "saved").iterdir()}
    names = list((tmp_path / "saved").glob("*.rows"))
    assert names
    assert all(name.stat().st_nlink == 2 for name in names)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"trajectory_format": "zip"}, "trajectory_format must be 'pt' or 'pkl'"),
        ({"auto_save": True}, "auto_save_path must name a folder"),
        ({"sample_window_size": -1}, "sample_window_size"),
        ({"cache_size": 0}, "cache_size"),
    ],
)
def test_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        TrajectoryReplayBuffer(**options)
