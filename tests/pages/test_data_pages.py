"""docs/datasets, docs/disk and docs/layout/forms.md: what their blocks store is compared with values from elsewhere.

Files are read by safetensors, rows are computed anew by hand or by a plain loop, envs are played again.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import ReplayBuffer
from flatroll.datasets import TrajectoryReplayBuffer

DATASETS = "docs/datasets.md"
TRAJECTORIES = "docs/datasets/trajectories.md"
DISK = "docs/disk.md"
FOLDER = "docs/disk/folder.md"
STORAGE = "docs/disk/storage.md"
FORMS = "docs/layout/forms.md"


def read_file(file: Path) -> dict[str, torch.Tensor]:
    """What is in a file, as safetensors reads it."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(file, "pt") as opened:
        return {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118


def stored(folder: str | Path) -> dict[str, torch.Tensor]:
    """The columns of a folder's files of rows, end to end."""
    columns: dict[str, list[torch.Tensor]] = {}
    for file in sorted(Path(folder).glob("*.rows")):
        for name, values in read_file(file).items():
            columns.setdefault(name, []).append(values)
    return {name: torch.cat(parts) for name, parts in columns.items()}


def stored_state(folder: str | Path) -> list[bytes]:
    """The bytes of each tensor in the newest file of a state."""
    zstandard = pytest.importorskip("zstandard")
    found = []
    for name, values in read_file(sorted(Path(folder).glob("*.state"))[-1]).items():
        content = values.numpy().tobytes()
        found.append(zstandard.ZstdDecompressor().decompress(content) if name.endswith(".zstd") else content)
    return found


def same_rows(batch: Any, expected: dict[Any, torch.Tensor]) -> None:
    """The batch has these columns, bit for bit, and no others."""
    found = dict(batch.items(True, True))
    assert set(found) == set(expected)
    for key, values in expected.items():
        assert found[key].dtype is values.dtype and torch.equal(found[key], values), key


def walks(count: int = 100, length: int = 5) -> dict[Any, torch.Tensor]:
    """The rows of the page's walks, one number after the other."""
    rows = [(number, step) for number in range(count) for step in range(length)]
    place = torch.tensor([[float(number + step)] for number, step in rows])
    return {
        "observation": place,
        "action": torch.ones(len(rows), 1),
        "is_init": torch.tensor([[step == 0] for _, step in rows]),
        ("collector", "traj_ids"): torch.tensor([number for number, _ in rows]),
        ("next", "observation"): place + 1,
        ("next", "reward"): torch.ones(len(rows), 1),
        ("next", "done"): torch.tensor([[step == length - 1] for _, step in rows]),
    }


# -- data sets ---------------------------------------------------------------------------------------------------------


def test_a_converted_set(until: Any) -> None:
    space = until(DATASETS, "def walk(number, length=5):")
    same_rows(space["data"][:], walks())
    columns = stored(f"{space['home']}/walks")
    assert torch.equal(columns["observation"], walks()["observation"])
    assert columns["next/observation"].view(-1).tolist() == [
        number + 5 for number in range(100)
    ]  # last ones alone
    sample = space["data"].sample()
    slices = sample["observation"].view(8, 4)
    assert (slices.diff() == 1).all()
    assert (sample["collector", "traj_ids"].view(8, 4).diff() == 0).all()
    assert torch.equal(sample["next", "observation"], sample["observation"] + 1)


def test_cloning_the_walks(until: Any) -> None:
    space = until(DATASETS, "policy = torch.nn.Linear(1, 1)")
    weight, bias = (float(value.detach()) for value in space["policy"].parameters())
    errors = [(weight * place / 100 + bias - 1) ** 2 for place in range(104)]
    assert math.fsum(errors) / len(errors) < 0.1


def test_files_that_fetch_made(until: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("h5py")
    monkeypatch.setenv("HOME", str(tmp_path))
    space = until(DATASETS, "def fetch(dataset_id, folder):")
    rows = space["data"][:]
    seen = np.random.default_rng(0).normal(size=(1000, 3))
    assert np.array_equal(rows["observation"].numpy(), seen)
    ends = np.arange(1000) % 100 == 99
    following = seen[np.minimum(np.arange(1000) + ~ends, 999)]
    assert np.array_equal(rows["next", "observation"].numpy(), following)
    assert np.array_equal(rows["collector", "next_known"].numpy(), ~ends)
    assert np.array_equal(rows["next", "truncated"].view(-1).numpy(), ends)
    assert not rows["next", "terminated"].any() and rows["next", "reward"].eq(1).all()
    assert rows["collector", "traj_ids"].tolist() == [row // 100 for row in range(1000)]


def test_a_stream(until: Any) -> None:
    space = until(DATASETS, "def episodes(count=6, length=5):")
    numbers: list[float] = []
    for batch in space["stream"]:
        slices = batch.reshape(-1, 3)
        assert (slices["observation"].diff() == 1).all() and (slices["action"].diff() == 0).all()
        assert torch.equal(batch["next", "observation"], batch["observation"] + 1)
        assert torch.equal(batch["next", "terminated"].view(-1), batch["observation"] == 4)
        assert batch["next", "reward"].eq(1).all()
        numbers += slices["action"][:, 0].tolist()
    assert sorted(numbers) == [0, 1, 2, 3, 4, 5]  # each episode once


def test_a_preprocessed_set(until: Any) -> None:
    space = until(DATASETS, "def with_norm(rows):")
    rows = walks()
    expected = {**rows, "norm": rows["observation"][:, 0].abs()}
    same_rows(space["changed"][:], expected)
    same_rows(space["data"][:], rows)  # untouched
    assert torch.equal(stored(f"{space['home']}/with_norm")["norm"], expected["norm"])


def test_a_loader(until: Any) -> None:
    space = until(DATASETS, "rows = data.as_dataset(")
    loader = space["DataLoader"](space["rows"], batch_size=None, collate_fn=space["rows"].collate)
    seen = torch.cat(list(loader))
    order = (seen["collector", "traj_ids"] * 10 + seen["observation"].view(-1)).argsort()
    same_rows(seen[order], walks())  # every row once
    assert not torch.equal(order, torch.arange(500))


# -- trajectories ------------------------------------------------------------------------------------------------------


def given(space: dict[str, Any]) -> list[dict[str, Any]]:
    """The page's trajectories, made anew with the same seed."""
    torch.manual_seed(0)
    return [space["trajectory"](number) for number in range(5)]


def check_trajectory(found: dict[str, Any], number: int, right: dict[str, Any]) -> None:
    step = torch.arange(4)[:, None].expand(4, 3)
    assert torch.equal(found["rewards"], number * 100.0 + step)
    assert torch.equal(found["dones"], step == 3)  # without the value before the first step
    assert torch.equal(found["curr_obs"]["states"], right["curr_obs"]["states"])


def test_trajectories_on_disk(until: Any) -> None:
    torch.manual_seed(0)
    space = until(TRAJECTORIES, "def trajectory(number, steps=4, envs=3):")
    right = given(space)
    for number in range(5):
        check_trajectory(space["buffer"].trajectory(number), number, right[number])
    sample = space["sample"]
    for reward, state in zip(sample["rewards"].tolist(), sample["curr_obs"]["states"], strict=True):
        number, step = divmod(int(reward), 100)
        assert number in (3, 4)
        assert bool((right[number]["curr_obs"]["states"][step] == state).all(-1).any())
    space["buffer"].flush()
    columns = stored("trajectories")
    lanes = torch.stack([one["curr_obs"]["states"].transpose(0, 1) for one in right])
    assert torch.equal(columns["curr_obs/states"].view(5, 3, 4, 2), lanes)
    assert columns["rewards"].view(5, 3, 4)[:, 0].tolist() == [
        [100 * number + step for step in range(4)] for number in range(5)
    ]
    space["buffer"].close()


def test_a_checkpoint_of_trajectories_and_its_shares(until: Any) -> None:
    torch.manual_seed(0)
    space = until(TRAJECTORIES, 'buffer.save_checkpoint("checkpoint")')
    right = given(space)
    for rank, numbers in enumerate([[0, 1], [2, 3, 4]]):
        part = TrajectoryReplayBuffer()
        part.load_checkpoint("checkpoint", is_distributed=True, local_rank=rank, world_size=2)
        assert part.trajectory_ids == numbers
        for number in numbers:
            check_trajectory(part.trajectory(number), number, right[number])
        part.close()


# -- saves -------------------------------------------------------------------------------------------------------------


def episodes_of_the_page(space: dict[str, Any], count: int) -> TensorDict:
    """Its random episodes, drawn anew with the same seed."""
    torch.manual_seed(0)
    return torch.cat([space["episode"](number) for number in range(count)])


def test_a_saved_buffer(until: Any) -> None:
    torch.manual_seed(0)
    space = until(DISK, 'buffer.dumps("buffer")')
    right = episodes_of_the_page(space, 20)
    for buffer in (space["buffer"], space["again"]):
        same_rows(buffer[:], dict(right.items(True, True)))
    columns = stored("buffer")
    assert torch.equal(columns["observation"], right["observation"])
    assert "next/observation" not in columns  # each once
    sample = space["again"].sample()
    rows = (sample["observation"][:, None] == right["observation"]).all(-1).long().argmax(1).view(4, 8)
    assert (rows.diff() == 1).all() and (rows // 50 == rows[:, :1] // 50).all()


def test_a_save_in_half_precision(until: Any) -> None:
    space = until(DISK, "halves.register_save_hook(")
    rows = space["halves"][:]
    columns = stored("halves")
    assert columns["observation"].dtype is torch.float16
    assert torch.equal(columns["observation"], rows["observation"].half())
    again = ReplayBuffer(storage=space["LazyTensorStorage"](1000), batch_size=32)
    again.register_load_hook(lambda rows: rows.apply(lambda x: x.float() if x.is_floating_point() else x))
    again.loads("halves")
    assert again[:]["observation"].dtype is torch.float32
    assert torch.equal(again[:]["next", "observation"], rows["next", "observation"].half().float())
    assert torch.equal(again[:]["collector", "traj_ids"], rows["collector", "traj_ids"])


def test_a_whole_run(until: Any) -> None:
    space = until(DISK, 'Checkpoint("whole-run", buffer=buffer')
    there = stored_state("whole-run")
    for parameter in space["policy"].parameters():
        assert parameter.detach().numpy().tobytes() in there
    for moments in space["optimizer"].state.values():
        assert float(moments["step"]) == 3
        assert moments["exp_avg"].numpy().tobytes() in there
        assert moments["exp_avg_sq"].numpy().tobytes() in there
    assert torch.equal(stored("whole-run")["observation"], space["buffer"][:]["observation"])


def test_a_policy_alone(until: Any) -> None:
    space = until(DISK, ".load(partial=True))")
    trained, saved = (list(space[name].parameters()) for name in ("policy", "saved"))
    assert len(trained) == len(saved)
    assert all(torch.equal(one, other) for one, other in zip(trained, saved, strict=True))


# -- folders -----------------------------------------------------------------------------------------------------------


def test_a_folder(until: Any) -> None:
    space = until(FOLDER, 'with Folder("run", write=True) as folder:\n    folder.append(columns)\n')
    columns = space["columns"]
    assert columns["observation"].unique().numel() == 24
    for name, right in columns.items():
        assert torch.equal(space["rows"][name], right) and torch.equal(stored("run")[name], right)
    assert set(space["rows"]) == {"observation", "next/reward", "next/done"}


def test_a_folder_that_goes_on(until: Any) -> None:
    space = until(FOLDER, "folder.append(columns, first=end)")
    reader = space["Folder"]("run")
    assert reader.load().json == {"epoch": 2} and reader.load().tensors["weights"].tolist() == [1, 1, 1]
    assert reader.load(1).json == {"epoch": 1}
    reader.load()
    twice = {name: torch.cat([values, values]) for name, values in space["columns"].items()}
    rows = reader.read_rows()
    for name, values in twice.items():
        assert torch.equal(rows[name], values[4:]) and torch.equal(stored("run")[name], values)


def test_an_inspected_folder(until: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Its numbers, counted in the columns: runs end at done rows, the first one has lost its head."""
    space = until(FOLDER, 'main(["inspect", "run", "--verify"])')
    assert space["main"](["inspect", "run", "--verify"]) == 0
    said = capsys.readouterr().out
    done = torch.cat([space["columns"]["next/done"]] * 2)[4:].view(-1)
    ends = done.nonzero().view(-1).tolist()
    lengths = [end - before for end, before in zip(ends, [-1, *ends], strict=False)]
    assert lengths == [2, 3, 3]
    for line in (
        f"{len(lengths)} trajectories",
        f"{len(lengths)} ended, 0 open",
        f"length: {min(lengths)} to {max(lengths)}, mean {sum(lengths) / len(lengths):.6g}",
        f"return: {min(lengths)} to {max(lengths)}, mean {sum(lengths) / len(lengths):.6g}",  # rewards of 1
    ):
        assert line in said


def steps_until(end: int) -> dict[Any, torch.Tensor]:
    row = torch.arange(end)
    return {
        "observation": row,
        ("next", "observation"): row + 1,
        ("next", "done"): row % 5 == 4,
    }


def test_a_storage_of_files(until: Any) -> None:
    space = until(STORAGE, 'storage = DiskStorage(1_000_000, "rows"')
    columns = stored("rows")
    assert columns["observation"].tolist() == list(range(24))
    assert torch.equal(columns["next/done"].view(-1), steps_until(24)["next", "done"])
    reopened = ReplayBuffer(
        storage=space["DiskStorage"](path="rows", read_only=True), sampler=space["SliceSampler"](slice_len=3)
    )
    same_rows(reopened[:], steps_until(24))
    slices = reopened.sample(30)["observation"].view(10, 3)
    assert (slices.diff() == 1).all() and (slices // 5 == slices[:, :1] // 5).all()


def test_a_long_run_that_is_resumed(until: Any) -> None:
    space = until(STORAGE, 'buffer.dumps("long-run")')
    columns = stored("long-run/rows")
    assert columns["observation"].tolist() == list(range(20))  # what came after the save is gone
    same_rows(space["buffer"][:], steps_until(20))
    slices = space["expected"]["observation"].view(2, 3)
    assert (slices.diff() == 1).all() and (slices // 5 == slices[:, :1] // 5).all()


# -- other forms -------------------------------------------------------------------------------------------------------


def test_each_observation_once(until: Any) -> None:
    space = until(FORMS, "flat = TED2Flat()(rows)")
    # Runs of rows 0, 1 and of row 2: each run's observations, and then its last next one.
    assert space["flat"]["observation"].tolist() == [0, 1, 2, 5, 6]
    again = space["Flat2TED"]()(space["flat"])
    same_rows(again.select(*space["rows"].keys(True, True)), dict(space["rows"].items(True, True)))


def runs_by_hand(batch: TensorDict) -> list[list[int]]:
    """Row numbers of each run: a run ends with a done row, and where the trajectory changes."""
    ids = batch["collector", "traj_ids"].tolist()
    done = batch["next", "done"].view(-1).tolist()
    runs: list[list[int]] = [[]]
    for row in range(len(batch)):
        runs[-1].append(row)
        if row + 1 < len(batch) and (done[row] or ids[row] != ids[row + 1]):
            runs.append([])
    return runs


def test_padded_trajectories(until: Any) -> None:
    space = until(FORMS, "padded = split_trajectories(batch)")
    batch, padded = space["batch"], space["padded"]
    played = [(0, 0, 3), (0, 1, 2), (1, 0, 2), (1, 1, 3)]  # env, episode, steps within five
    seen = [[env, episode, step] for env, episode, steps in played for step in range(steps)]
    assert batch["observation"].tolist() == seen
    for entry, rows in zip(padded.unbind(0), runs_by_hand(batch), strict=True):
        for key in batch.keys(True, True):
            assert torch.equal(entry[key][: len(rows)], batch[key][rows]), key
            assert not entry[key][len(rows) :].any(), key
        assert entry["collector", "mask"].tolist() == [place < len(rows) for place in range(3)]


def test_next_observations_as_differences(until: Any) -> None:
    space = until(FORMS, "small = rollout(NextObservationDelta(")
    small, restored = space["small"], space["restored"]
    env = space["gym"].make("CartPole-v1")
    seen = env.reset(seed=0)[0]
    for row in range(5):
        assert np.array_equal(restored["observation"][row].numpy(), seen)
        after = env.step(int(restored["action"][row]))[0]
        delta = (after - seen).astype(np.float16)
        assert np.array_equal(small["next", "delta", "observation"][row].numpy(), delta)
        found = restored["next", "observation"][row].numpy()
        assert np.allclose(found, after, rtol=0, atol=float(np.abs(after - seen).max()) * 2**-10 + 1e-6)
        seen = after
