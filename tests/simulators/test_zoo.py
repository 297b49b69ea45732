"""Environment packages of others: collected rows against a plain loop with the same seeds and actions.

`make simulators NAMES=zoo` writes docs/compatibility/zoo.md from what the tests record.
"""

import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
from gymnasium.vector import AutoresetMode, SyncVectorEnv
from zoo import LIMIT, Entry, actions_of, count_wrong, play, play_vector, registered, same_rows

from flatroll.rollouts import rollout

ENVS = 2
STEPS = 60
SEED = 5
UNSURE = "later rows differ between two plain loops with equal seeds and actions"
Record = Callable[[str, object], None]


def crafter() -> Any:
    import crafter  # pyright: ignore[reportMissingImports]
    from shimmy.openai_gym_compatibility import (  # pyright: ignore[reportMissingImports]
        GymV21CompatibilityV0,
    )

    env = crafter.Env(seed=SEED)
    env.seed = lambda seed: None  # which shimmy calls
    return gym.wrappers.TimeLimit(GymV21CompatibilityV0(env=env), LIMIT)


def miniworld() -> Any:
    import pyglet  # pyright: ignore[reportMissingImports]

    pyglet.options["headless"] = True
    import miniworld  # pyright: ignore[reportMissingImports]  # noqa: F401  (registers its envs)

    return gym.make("MiniWorld-OneRoom-v0", max_episode_steps=LIMIT, disable_env_checker=True)


ENTRIES = [
    *registered("minigrid", "minigrid", "MiniGrid-DoorKey-5x5-v0", "BabyAI-GoToRedBall-v0"),
    *registered("minigrid", "minigrid", "MiniGrid-DoorKey-5x5-v0", wrapper="minigrid.wrappers:ImgObsWrapper"),
    *registered("ale-py", "ale_py", "ALE/Pong-v5", "ALE/Breakout-v5"),
    *registered("highway-env", "highway_env", "highway-fast-v0", "parking-v0"),
    *registered("ap-gym", "ap_gym", "LightDark-v0", "CircleSquare-v0"),
    Entry("crafter", "Env, by shimmy", crafter),
    Entry("miniworld", "MiniWorld-OneRoom-v0", miniworld),
    *registered(
        "or-gym-inventory",
        "or_gym_inventory",
        "or_gym_inventory/InvManagementBacklog-v0",
        "or_gym_inventory/NetInvMgmtBacklog-v0",
        "or_gym_inventory/Newsvendor-v0",
    ),
    *registered("numberlink", "numberlink", "NumberLinkRGB-v0"),
    *registered("gymnasium-sudoku", "gymnasium_sudoku", "sudoku-v0"),
    *registered(
        "gymnasium-robotics",
        "gymnasium_robotics",
        "FetchReach-v4",
        "PointMaze_UMaze-v3",
        "AdroitHandDoor-v1",
        "FrankaKitchen-v1",
    ),
    *registered("flappy-bird-gymnasium", "flappy_bird_gymnasium", "FlappyBird-v0", use_lidar=False),
    *registered("hybrid-platform", "gym_platform", "Platform-v0"),
    *registered("tetris-gymnasium", "tetris_gymnasium.envs", "tetris_gymnasium/Tetris"),
    *registered("popgym", "popgym", "popgym-RepeatPreviousEasy-v0", "popgym-BattleshipEasy-v0"),
    *registered("gym-pusht", "gym_pusht", "gym_pusht/PushT-v0"),
    *registered("panda-gym", "panda_gym", "PandaReach-v3"),
    *registered("mo-gymnasium", "mo_gymnasium", "deep-sea-treasure-v0"),
    *registered("buffalo-gym", "buffalo_gym", "Bandit-v0"),
    *registered("gym-anytrading", "gym_anytrading", "stocks-v0"),
    *registered("vizdoom", "vizdoom.gymnasium_wrapper", "VizdoomBasic-v1", "VizdoomBasic-MultiBinary-v1"),
    *registered("seals", "seals", "seals/Branching-v0", "seals/CliffWorld7x4-v0"),
]

MODES = ("single", *AutoresetMode)


def made(entry: Entry, mode: Any) -> Any:
    if mode == "single":
        return entry.make()
    return SyncVectorEnv([entry.make] * ENVS, autoreset_mode=mode)


def told(error: Exception) -> str:
    """An error as a cell of a table."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    text = re.sub(r" at 0x[0-9a-f]+", "", text)  # another one in each run
    if len(text) > 200:
        text = f"{text[:200]} …"
    return f"`{text.replace('|', '/').replace('`', chr(39))}`"


class Row:
    """What the tests of an entry record: a row of the page."""

    def __init__(self, record: Record, entry: Entry) -> None:
        self._record = record
        self.rows = self.wrong = self.ends = 0
        self.modes: list[str] = []
        self.remarks: dict[str, list[str]] = {}
        for name, cell in (("package", entry.package), ("id", entry.name)):
            record(name, cell)
        record("version", version(entry.package))

    def add(self, mode: str, rows: int, wrong: int, ends: int) -> None:
        self.modes.append(mode)
        self.rows += rows
        self.wrong += wrong
        self.ends += ends

    def remark(self, mode: str, text: str) -> None:
        self.remarks.setdefault(text, []).append(mode)

    def close(self) -> None:
        remarks = "; ".join(f"{', '.join(modes)}: {text}" for text, modes in self.remarks.items())
        cells = {"modes": ", ".join(self.modes) or "none", "rows": f"{self.rows:,}"}
        cells |= {"wrong": f"{self.wrong:,}", "ends": f"{self.ends:,}", "remarks": remarks}
        for name, cell in cells.items():
            self._record(name, cell)


def name_of(mode: Any) -> str:
    return mode if isinstance(mode, str) else mode.value


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some packages write files where they run."""
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("entry", ENTRIES, ids=str)
def test_rows_are_those_of_a_plain_loop(entry: Entry, record_property: Record) -> None:
    row = Row(record_property, entry)
    try:
        entry.make().reset(seed=SEED)
    except Exception as error:  # whatever it is, the page says it
        row.remark("not made", f"the env's own {told(error)}")
        row.close()
        return

    for mode in MODES:
        try:
            env = made(entry, mode)
        except Exception as error:  # whatever it is, the page says it
            row.remark(name_of(mode), f"Gymnasium's own {told(error)}")
            continue
        count = 1 if mode == "single" else ENVS
        space = env.action_space if mode == "single" else env.single_action_space
        try:
            batch = rollout(env, num_steps=STEPS, seed=SEED)
        except Exception as error:  # whatever it is, the page says it
            row.remark(name_of(mode), told(error))
            continue
        finally:
            env.close()

        of_envs = batch.reshape(count, STEPS)
        actions = [actions_of(space, of_envs["action"][index]) for index in range(count)]
        resets = AutoresetMode.DISABLED if mode == "single" else mode
        loops = [play(entry.make, SEED, actions, resets) for _ in range(2)]
        compared = wrong = ends = 0
        for index, (own, again) in enumerate(zip(*loops, strict=True)):
            sure = same_rows(own, again)  # the rows that two plain loops have in common
            compared += sure
            wrong += count_wrong(of_envs[index], own[:sure])
            ends += sum(terminated or truncated for *_, terminated, truncated in own[:sure])
        if compared < len(batch):
            row.remark(name_of(mode), UNSURE)
        row.add(name_of(mode), compared, wrong, ends)
    row.close()
    assert row.wrong == 0


# ale-py's own vector env: frames are preprocessed and stacked in C++, and each mode is its own.
ATARI: dict[str, dict[str, Any]] = {
    "breakout": {},
    "breakout, episodic_life=True": {"episodic_life": True, "max_num_frames_per_episode": 2000},
    "pong, continuous=True": {"continuous": True},
    "pong, grayscale=False, stack_num=2": {"grayscale": False, "stack_num": 2},
    "pong, batch_size=1": {"batch_size": 1},
}


OTHER = {
    AutoresetMode.NEXT_STEP: AutoresetMode.SAME_STEP,
    AutoresetMode.SAME_STEP: AutoresetMode.NEXT_STEP,
    AutoresetMode.DISABLED: AutoresetMode.NEXT_STEP,
}


def atari(name: str, mode: AutoresetMode) -> Any:
    ale = pytest.importorskip("ale_py")
    options = {"img_height": 32, "img_width": 32, "noop_max": 5, "max_num_frames_per_episode": 4 * LIMIT}
    return ale.AtariVectorEnv(name.partition(",")[0], ENVS, autoreset_mode=mode, **options | ATARI[name])


@pytest.mark.parametrize("name", ATARI)
def test_rows_of_the_vector_env_of_ale_py(name: str, record_property: Record) -> None:
    row = Row(record_property, Entry("ale-py", f"AtariVectorEnv, {name}", lambda: None))
    for mode in AutoresetMode:
        try:
            env = atari(name, mode)
        except ValueError as error:  # ale-py 0.12.1 has no Disabled
            row.remark(name_of(mode), f"ale-py's own {told(error)}")
            continue
        # The mode of an env that is made later must not count.
        atari(name, OTHER[mode]).close()
        try:
            batch = rollout(env, num_steps=3 * STEPS, seed=SEED)
        except Exception as error:  # whatever it is, the page says it
            row.remark(name_of(mode), told(error))
            continue
        finally:
            env.close()
        of_envs = batch.reshape(ENVS, 3 * STEPS)
        actions = [actions_of(env.single_action_space, of_envs["action"][index]) for index in range(ENVS)]
        expected = play_vector(atari(name, mode), SEED, actions)
        wrong = sum(count_wrong(of_envs[index], own) for index, own in enumerate(expected))
        if wrong:
            row.remark(name_of(mode), f"{wrong} rows are wrong")
        row.add(name_of(mode), len(batch), wrong, int(batch["next", "done"].sum()))
    row.close()
    assert row.wrong == 0
