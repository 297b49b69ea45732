"""Each published set from files in its real form, made here, with the traps that its form has."""

import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from set_files import pixels, rlds, saved, trajectory, write_archive, write_atari, write_d4rl, write_trials

from flatroll import export as module
from flatroll.datasets import (
    AtariDQNExperienceReplay,
    D4RLExperienceReplay,
    GenDGRLExperienceReplay,
    LeRobotExperienceReplay,
    OpenMLExperienceReplay,
    OpenXExperienceReplay,
    RobosetExperienceReplay,
    VD4RLExperienceReplay,
    fetch_url,
    read_atari_dqn,
    read_rlds,
    read_roboset,
)
from flatroll.layout import audit

h5py = pytest.importorskip("h5py")


def no_errors(rows: Any) -> bool:
    return not [finding for finding in audit(rows) if finding.severity == "error"]


# -- D4RL --------------------------------------------------------------------------------------------------------------


def test_a_set_by_name_from_a_mirror(tmp_path: Path) -> None:
    mirror, root = tmp_path / "mirror", tmp_path / "sets"
    mirror.mkdir()
    write_d4rl(mirror / "hopper-random-v2.hdf5")
    url = f"{mirror.as_uri()}/{{dataset_id}}.hdf5"
    data = D4RLExperienceReplay("hopper-random-v2", batch_size=3, root=root, download_url=url)
    assert len(data) == 7
    (mirror / "FK1-v4(expert)").mkdir()
    name = "FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"  # with brackets, which addresses quote
    write_trials(mirror / f"{name}.h5")
    urls = [f"{mirror.as_uri()}/{{dataset_id}}.h5"]
    assert len(RobosetExperienceReplay(name, root=root, download_url=urls)) > 0
    with pytest.raises(ValueError, match="has no set 'hoper-random-v2': did you mean 'hopper-random-v2'"):
        D4RLExperienceReplay("hoper-random-v2", root=root, download_url=url)
    with pytest.raises(ValueError, match="pass fetch or download_url, not both"):
        D4RLExperienceReplay("hopper-random-v2", root=root, download_url=url, fetch=lambda *_: mirror)
    with pytest.raises(OSError, match="hopper-random-v1"):
        D4RLExperienceReplay("hopper-random-v1", root=root, download_url=url)
    call = r"D4RLExperienceReplay\('hopper-random-v1', download_url='https://HOST/{dataset_id}.SUFFIX'\)"
    with pytest.raises(FileNotFoundError, match=rf"{call} downloads from a mirror; or pass fetch="):
        D4RLExperienceReplay("hopper-random-v1", root=root)
    assert not [path for path in root.iterdir() if path.name.startswith(".fetched-")]


def test_d4rl(tmp_path: Path) -> None:
    def fetch(name: str, folder: Path) -> None:
        write_d4rl(folder / f"{name}.hdf5")
        fetched.append(folder)

    fetched: list[Path] = []
    data = D4RLExperienceReplay("maze-v1", batch_size=3, root=tmp_path, fetch=fetch)
    rows = data[:]
    assert len(data) == 7 and no_errors(rows) and data.sample().batch_size == (3,)
    # The peer takes the first observation of the next episode for the one after a timeout.
    assert rows["collector", "next_known"].tolist() == [True, True, False, True, False, True, False]
    assert rows["next", "done"].view(-1).tolist() == [False, False, True, False, True, False, False]
    assert data.data_path == tmp_path / "maze-v1" and not fetched[0].exists()
    again = D4RLExperienceReplay("maze-v1", root=tmp_path, download=False)
    assert torch.equal(again[:]["observation"], rows["observation"]) and len(fetched) == 1
    D4RLExperienceReplay("maze-v1", root=tmp_path, download="force", fetch=fetch)
    assert len(fetched) == 2
    options = {"root": tmp_path, "download": "force", "fetch": fetch}
    ends = D4RLExperienceReplay("maze-v1", terminate_on_end=True, **options)  # type: ignore[arg-type]
    assert len(ends) == 5
    terminals = D4RLExperienceReplay("maze-v1", use_truncated_as_done=False, **options)  # type: ignore[arg-type]
    assert terminals[:]["next", "done"].view(-1).nonzero().tolist() == [[2]]
    assert terminals[:]["next", "truncated"].view(-1).nonzero().tolist() == [[4]]
    with pytest.raises(ValueError, match="leave out direct_download"):
        D4RLExperienceReplay("maze-v1", from_env=True, direct_download=True)
    with pytest.raises(ValueError, match="direct_download=False would use"):
        D4RLExperienceReplay("maze-v1", direct_download=False)


class Env:
    """An env of D4RL, as far as its data set goes."""

    def get_dataset(self) -> dict[str, Any]:
        return {
            "observations": np.arange(14, dtype=np.float32).reshape(7, 2),
            "actions": np.ones((7, 1), np.float32),
            "rewards": np.arange(7.0),
            "terminals": np.array([0, 0, 1, 0, 0, 0, 0], bool),
            "timeouts": np.array([0, 0, 0, 0, 1, 0, 0], bool),
            "infos/qpos": np.zeros((7, 3)),
            "metadata/algorithm": "SAC",
        }


class Wrapped:
    unwrapped = Env()


def test_d4rl_from_an_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_d4rl(tmp_path / "steps.hdf5")
    file = D4RLExperienceReplay("file", root=tmp_path, fetch=lambda *_: tmp_path / "steps.hdf5")
    made: list[str] = []

    def make(name: str) -> Wrapped:
        made.append(name)
        return Wrapped()

    modules = __import__("sys").modules
    monkeypatch.setitem(modules, "d4rl", types.ModuleType("d4rl"))
    monkeypatch.setitem(modules, "gym", types.SimpleNamespace(make=make))
    gym_set = D4RLExperienceReplay("maze2d-umaze-v1", 4, from_env=True, root=tmp_path)
    sets = [gym_set, D4RLExperienceReplay("env", from_env=True, root=tmp_path, fetch=lambda *_: Env())]
    arrays = Env().get_dataset()
    sets.append(D4RLExperienceReplay("arrays", from_env=True, root=tmp_path, fetch=lambda *_: arrays))
    for data in sets:
        assert bool((data[:] == file[:]).all()) and set(data[:].keys(True)) == set(file[:].keys(True))
    assert made == ["maze2d-umaze-v1"] and gym_set.sample().batch_size == (4,)
    with pytest.raises(TypeError, match=r"with get_dataset\(\), or the arrays.*got int"):
        D4RLExperienceReplay("other", from_env=True, root=tmp_path, fetch=lambda *_: 3)
    with pytest.raises(ValueError, match="did you mean 'maze2d-umaze-v1'"):
        D4RLExperienceReplay("maze2d-umaze-v3", from_env=True, root=tmp_path)
    monkeypatch.setitem(modules, "d4rl", None)
    with pytest.raises(ImportError, match="only old versions of Python can install"):
        D4RLExperienceReplay("maze2d-large-v1", from_env=True, root=tmp_path)
    assert len(made) == 1


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "name", "near"),
    [
        (D4RLExperienceReplay, "hoper-medium-v2", "did you mean 'hopper-medium-v2'"),
        (D4RLExperienceReplay, "???", "179 sets, such as 'halfcheetah-random-v2'"),
        (RobosetExperienceReplay, "DAPG(expert)/dor_v2d-v1", r"did you mean 'DAPG\(expert\)/door_v2d-v1'"),
        (GenDGRLExperienceReplay, "bigfish-1M", "did you mean .*'bigfish-1M_S'"),
    ],
)
def test_unknown_names_say_what_is_like_them(kind: Any, name: str, near: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=near):
        kind(name, 4, root=tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", [D4RLExperienceReplay, RobosetExperienceReplay])
def test_known_names_need_a_fetch(kind: Any, tmp_path: Path) -> None:
    names = kind.available_datasets
    assert len(set(names)) == len(names) == {D4RLExperienceReplay: 179, RobosetExperienceReplay: 20}[kind]
    with pytest.raises(FileNotFoundError, match="pass fetch="):
        kind(names[-1], 4, root=tmp_path)


def test_arguments_that_no_set_takes(tmp_path: Path) -> None:
    with pytest.raises(
        TypeError,
        match=r"AtariDQNExperienceReplay takes no argument mp_start_method, num_procs; .*preprocess",
    ):
        AtariDQNExperienceReplay("Pong/5", root=tmp_path, num_procs=4, mp_start_method="fork")  # type: ignore[call-arg]


# -- Atari DQN ---------------------------------------------------------------------------------------------------------


def test_atari_frames_of_all_parts(tmp_path: Path) -> None:
    data = AtariDQNExperienceReplay("Pong/5", root=tmp_path, fetch=lambda name, folder: write_atari(folder))
    rows = data[:]
    assert len(data) == 24 and no_errors(rows) and rows["observation"].shape == (24, 6, 5)
    ends = rows["next", "terminated"].view(-1).nonzero().view(-1).tolist()
    assert ends == [4, 5, 11, 14, 20]
    ids = rows["collector", "traj_ids"]
    assert ids.tolist() == [0] * 5 + [1] + [2] * 6 + [3] * 3 + [4] * 6 + [5] * 3
    known = rows["collector", "next_known"]
    assert (~known).nonzero().view(-1).tolist() == [
        *ends,
        23,
    ]  # the peer fills zeros in
    assert torch.equal(rows["next", "observation"][known], rows["observation"].roll(-1, 0)[known])
    assert rows["next", "reward"].shape == (24, 1)


@pytest.mark.parametrize("chunk_rows", [1, 2, 5, 100])
def test_atari_stacks_do_not_reach_into_another_game(tmp_path: Path, chunk_rows: int) -> None:
    write_atari(tmp_path)
    single = torch.cat(list(read_atari_dqn(tmp_path, chunk_rows=chunk_rows)))
    rows = torch.cat(list(read_atari_dqn(tmp_path, frame_stack=4, chunk_rows=chunk_rows)))
    frames, ids = single["observation"], single["collector", "traj_ids"]
    for row in range(len(rows)):
        for back in range(4):
            same_game = row >= back and ids[row - back] == ids[row]
            expected = frames[row - back] if same_game else torch.zeros_like(frames[0])
            assert torch.equal(rows["observation"][row, 3 - back], expected)
    known = rows["collector", "next_known"]
    assert torch.equal(rows["next", "observation"][known], rows["observation"].roll(-1, 0)[known])
    for key in (("collector", "traj_ids"), "is_init", "action", ("next", "done")):
        assert torch.equal(rows[key], single[key])


def test_atari_stacks_are_single_frames_on_disk(tmp_path: Path) -> None:
    def fetch(name: str, folder: Path) -> None:
        write_atari(folder)

    data = AtariDQNExperienceReplay(
        "Pong/1", 8, root=tmp_path, fetch=fetch, frame_stack={"observation": 4}, slice_len=2
    )
    (tmp_path / "files").mkdir()
    write_atari(tmp_path / "files")
    rows = torch.cat(list(read_atari_dqn(tmp_path / "files", frame_stack=4)))
    assert torch.equal(data[:]["observation"], rows["observation"])
    assert torch.equal(data[:]["next", "observation"], rows["next", "observation"])
    assert data.sample()["observation"].shape == (8, 4, 6, 5)
    with pytest.raises(ValueError, match="not both"):
        AtariDQNExperienceReplay("Pong/1", slice_len=2, sampler=data.sampler)


@pytest.mark.parametrize("name", ["Pong", "Pong/6", "../Pong/1", "Pong/1; rm -r /"])
def test_names_of_no_atari_run(tmp_path: Path, name: str) -> None:
    """The peer puts the name into a shell's command."""
    with pytest.raises(ValueError, match="dataset_id must be"):
        AtariDQNExperienceReplay(name, root=tmp_path / "root")


# -- Gen-DGRL ----------------------------------------------------------------------------------------------------------


def test_gen_dgrl(tmp_path: Path) -> None:
    members = {"a/0.npy": saved(trajectory(3)), "a/1.npy": saved(trajectory(2, done=False))}
    file = write_archive(tmp_path / "bigfish.tar.xz", dict(members))
    data = GenDGRLExperienceReplay("bigfish-1M_E", 4, root=tmp_path / "root", fetch=lambda *_: file)
    rows = data[:]
    assert len(data) == 5 and no_errors(rows)
    assert rows["observation"][:, 0].tolist() == [0, 1, 2, 0, 1] and rows["observation"].dtype is torch.uint8
    assert rows["next", "observation"][:, 0].tolist() == [1, 2, 3, 1, 2]
    assert rows["next", "terminated"].view(-1).tolist() == [False, False, True, False, False]
    assert rows["next", "truncated"].view(-1).tolist() == [False] * 4 + [True]
    with pytest.raises(ValueError, match="available_datasets"):
        GenDGRLExperienceReplay("bigfish", root=tmp_path)


# -- V-D4RL ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["npz", "hdf5"])
def test_vd4rl(tmp_path: Path, form: str) -> None:
    def fetch(name: str, folder: Path) -> None:
        if form == "npz":
            for number, length in enumerate((4, 3)):
                np.savez_compressed(folder / f"{number}.npz", **pixels(length))
            return
        with h5py.File(folder / "steps.hdf5", "w") as file:
            for key, first in pixels(4).items():
                file[key] = np.concatenate([first, pixels(3)[key]])

    data = VD4RLExperienceReplay("walker", 4, root=tmp_path, fetch=fetch, totensor=False)
    rows = data[:]
    assert no_errors(rows) and rows["pixels"].dtype is torch.uint8
    assert rows["pixels"][:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1]
    assert rows["next", "pixels"][:, 0, 0, 0].tolist() == [1, 2, 3, 1, 2]
    # The action and reward of a file's row led to its image: the peer gives them to the image itself.
    assert rows["action"].view(-1).tolist() == [1, 2, 3, 1, 2] == rows["next", "reward"].view(-1).tolist()
    assert rows["next", "state", "position"].view(-1).tolist() == [0.5, 1.0, 1.5, 0.5, 1.0]
    assert rows["next", "terminated"].view(-1).tolist() == [False, False, True, False, True]
    sample = VD4RLExperienceReplay("walker", 2, root=tmp_path, image_size=4).sample()
    assert sample["next", "pixels"].shape == (2, 3, 4, 4) and sample["pixels"].dtype is torch.float32


# -- RoboSet, Open X, LeRobot ------------------------------------------------------------------------------------------


def test_roboset(tmp_path: Path) -> None:
    def fetch(name: str, folder: Path) -> None:
        write_trials(folder / "0.h5")

    data = RobosetExperienceReplay(
        "FK1(expert)/open-v4", 4, root=tmp_path, fetch=lambda _, folder: write_trials(folder / "0.h5")
    )
    rows = data[:]
    assert no_errors(rows) and rows["collector", "traj_ids"].tolist() == [0, 0, 0, 1, 1, 2]
    # The peer leaves zeros as the last next observation of each trial.
    assert rows["next", "observation"].view(-1).tolist() == [2, 3, 3, 2, 2, 1]
    assert rows["collector", "next_known"].tolist() == [True, True, False, True, False, False]
    assert rows["next", "info", "qpos"].view(-1).tolist() == [20, 30, 30, 20, 20, 10]
    assert rows["next", "terminated"].view(-1).nonzero().view(-1).tolist() == [2]
    assert rows["next", "truncated"].view(-1).nonzero().view(-1).tolist() == [4, 5]


def test_ids_and_flags_of_several_files(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    for number in range(2):
        write_d4rl(tmp_path / f"{number}.hdf5")
        with h5py.File(tmp_path / f"{number}.h5", "w") as file:
            for name, values in (("observations", [1.0, 2]), ("actions", [1.0, 2]), ("rewards", [1.0, 2])):
                file[f"Trial0/{name}"] = np.array(values)[:, None]
            # An episode that ends with both is cut: its value may be bootstrapped.
            file["Trial0/done"] = file["Trial0/truncated"] = np.array([False, True])
    files = sorted(tmp_path.glob("*.hdf5"))
    rows: Any = D4RLExperienceReplay("maze", root=tmp_path / "sets", fetch=lambda *_: files)[:]
    ids = rows["collector", "traj_ids"].chunk(2)
    assert torch.equal(ids[1], ids[0] + int(ids[0][-1]) + 1) and no_errors(rows)
    trials = torch.cat(list(read_roboset(sorted(tmp_path.glob("*.h5")))))
    assert trials["next", "truncated"].view(-1).tolist() == [False, True] * 2
    assert not trials["next", "terminated"].any() and trials["collector", "traj_ids"].tolist() == [0, 0, 1, 1]


def test_openx_episodes_of_steps(tmp_path: Path) -> None:
    def fetch(name: str, folder: Path) -> Any:
        return rlds()

    data = OpenXExperienceReplay("reach", 2, root=tmp_path, fetch=fetch, shuffle=False)
    rows = data[:]
    assert no_errors(rows) and sorted(map(str, rows.keys())) == sorted(
        ["observation", "action", "is_init", "collector", "next"]
    )
    assert rows["observation", "state"].view(-1).tolist() == [0, 1, 2, 0, 1]
    assert rows["next", "observation", "state"].view(-1).tolist() == [
        1,
        2,
        3,
        1,
        2,
    ]  # that of the last step is there
    assert rows["next", "terminated"].view(-1).tolist() == [False, False, True, False, False]
    assert rows["next", "truncated"].view(-1).tolist() == [False] * 4 + [True]
    assert [batch["index"].tolist() for batch in data] == [[0, 1], [2, 3], [4]]
    slices = OpenXExperienceReplay("reach", 8, root=tmp_path, slice_len=2)
    assert slices.sample().batch_size == (8,)
    padded = OpenXExperienceReplay("reach", 12, root=tmp_path, slice_len=3, strict_length=False, pad=True)
    assert padded.sample().batch_size == (12,)
    with pytest.raises(ValueError, match="rows in order"):
        OpenXExperienceReplay("reach", root=tmp_path, shuffle=False, slice_len=2)


def test_episodes_of_steps_that_are_none() -> None:
    for wrong, text in [
        ([{"observation": 1}], "a row needs two"),
        ([{"observation": 1, "is_last": True}, {"observation": 2}], "continues after step 0"),
        ([{"observation": np.ones(2)}, {"observation": np.ones(3)}], "the same shape and dtype in all steps"),
    ]:
        with pytest.raises(ValueError, match=text):
            list(read_rlds([wrong]))
    with pytest.raises(KeyError, match="without 'observation'"):
        list(read_rlds([[{"observation": 1}, {"action": 1}]]))
    with pytest.raises(ValueError, match="episode 0 has 1 rewards for 2 actions"):
        list(read_rlds([[{"observation": 1, "reward": 1.0}, {"observation": 2}, {"observation": 3}]]))


def test_rewards_of_steps_belong_to_their_actions() -> None:
    """RLDS: the last step's action and reward are invalid. Some demonstrations have their only reward there."""

    def steps(*rewards: float | None) -> list[dict[str, float]]:
        return [{"observation": 1.0} | ({} if r is None else {"reward": r}) for r in rewards]

    (rows,) = read_rlds([steps(0, 1, 5)])
    assert rows["next", "reward"].tolist() == [[0], [1]]
    (rows,) = read_rlds([steps(None, None, None)])  # no reward is no column, as in all other readers
    assert ("next", "reward") not in rows.keys(True) and no_errors(rows)
    (rows,) = read_rlds([steps(0, 0, None)])
    assert rows["next", "reward"].tolist() == [[0], [0]]
    for lost in (steps(0, 0, 1), steps(None, None, 1)):
        with pytest.warns(UserWarning, match="shift the rewards one step earlier"):
            list(read_rlds([lost]))


def test_lerobot_and_openx_in_its_form(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    source = torch.cat(list(read_rlds(rlds())))
    module.export(source, tmp_path / "folder", "lerobot")
    sets = [
        LeRobotExperienceReplay("me/reach", root=tmp_path / "l", fetch=lambda *_: tmp_path / "folder"),
        OpenXExperienceReplay("reach", root=tmp_path / "x", fetch=lambda *_: tmp_path / "folder"),
    ]
    for data in sets:
        for key in source.keys(True, True):
            assert torch.equal(data[:][key], source[key])


# -- OpenML ------------------------------------------------------------------------------------------------------------


def test_openml(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    pandas = pytest.importorskip("pandas")
    features = pandas.DataFrame(
        {"age": [20, 30, 40, None, 50], "color": pandas.Categorical(["b", "a", "c", "a", "b"])}
    )
    label = pandas.Series(["no", "yes", "no", "yes", "yes"])
    data = OpenMLExperienceReplay("adult_num", 2, root=tmp_path, fetch=lambda *_: (features, label))
    rows = data[:]
    assert rows["X"].shape == (4, 2) and rows["y"].tolist() == [0, 1, 0, 1] and data.max_outcome_val == 1
    assert torch.allclose(rows["X"].mean(0), torch.zeros(2).double())
    assert torch.allclose(rows["X"].std(0, correction=0), torch.ones(2).double())
    assert sorted(torch.cat([batch["index"] for batch in data]).tolist()) == [0, 1, 2, 3]
    one_hot = OpenMLExperienceReplay("adult_onehot", 2, root=tmp_path, fetch=lambda *_: (features, label))
    assert one_hot[:]["X"][:, 1:].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 1, 0]]
    with pytest.raises(ValueError, match="name must be 'adult_num', "):
        OpenMLExperienceReplay("iris", root=tmp_path)


# -- fetching ----------------------------------------------------------------------------------------------------------


def test_a_file_is_fetched_whole_or_not_at_all(tmp_path: Path) -> None:
    source = tmp_path / "source.bin"
    source.write_bytes(b"x" * 5000)
    (tmp_path / "into").mkdir()
    assert fetch_url(source.as_uri(), tmp_path / "into", max_bytes=5000).read_bytes() == source.read_bytes()
    with pytest.raises(ValueError, match="more than max_bytes=4999"):
        fetch_url(source.as_uri(), tmp_path / "copy", max_bytes=4999)
    with pytest.raises(OSError):
        fetch_url((tmp_path / "absent").as_uri(), tmp_path / "copy", max_bytes=10)
    with pytest.raises(ValueError, match="must begin with"):
        fetch_url("ftp:x", tmp_path / "copy", max_bytes=10)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["into", "source.bin"]


def test_a_missing_library_names_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_d4rl(tmp_path / "steps.hdf5")
    monkeypatch.setitem(__import__("sys").modules, "h5py", None)
    with pytest.raises(ImportError, match=r"flatroll\[h5\]"):
        D4RLExperienceReplay("maze", root=tmp_path, fetch=lambda *_: tmp_path / "steps.hdf5")
    assert (
        sorted(path.name for path in tmp_path.iterdir()) == ["steps.hdf5"] or not (tmp_path / "maze").exists()
    )
