"""Envs of every kind, single and vectorized, in their autoreset modes: a log makes their rows again, bit by bit.

Real simulators: tests/simulators/test_*_replay_log.py.
"""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import pytest
import torch
from env_kinds import VALID, EnvKind, close
from forms import is_long
from gymnasium.vector import AutoresetMode, VectorEnv
from replay_logs import MODES, assert_equal, check_log, collect, vector
from scripted_pool import ScriptedPool

from flatroll.datasets import ReplayLog, ReplayMismatchError
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import Script, ScriptedRslEnv, ScriptedTorchEnv, make_scripted

SCRIPT = Script(3, lengths=[[3, 1, 4], [2, 5], [6]], ends=["terminated", "truncated", "both"])


class Case(NamedTuple):
    """An env of Gymnasium's registry, how it is vectorized, and its autoreset mode."""

    name: str
    kind: str
    mode: str


CONTROL = ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "MountainCarContinuous-v0", "Pendulum-v1"]
#: Steps of these draw from the env's generator.
TEXT = ["FrozenLake-v1", "Taxi-v4", "Blackjack-v1", "CliffWalking-v1"]
KINDS = ["sync", "async"]
EACH = [Case(name, kind, mode) for name in CONTROL + TEXT for kind in KINDS for mode in MODES]
#: In the quick form each env once: with all kinds and modes among them.
ONCE = [Case(name, KINDS[place % 2], MODES[place % 3]) for place, name in enumerate(CONTROL + TEXT)]


@pytest.mark.parametrize("case", EACH if is_long() else ONCE, ids=lambda case: "-".join(case))
def test_envs_of_gymnasium(tmp_path: Path, case: Case) -> None:
    # Short episodes: the time limit is in the log's description.
    env = vector(case.name, case.mode, case.kind, max_episode_steps=20)
    check_log(tmp_path / "log", env)
    env.close()


@pytest.mark.parametrize("name", CONTROL + TEXT)
def test_single_envs_of_gymnasium(tmp_path: Path, name: str) -> None:
    check_log(tmp_path / "log", gym.make(name, max_episode_steps=20))


@contextlib.contextmanager
def warned(text: str | None) -> Iterator[None]:
    if text is None:
        yield
        return
    with pytest.warns(UserWarning, match=text):
        yield


MODED = [(kind, mode) for kind in VALID for mode in kind.modes]


@pytest.mark.parametrize(
    ("kind", "mode"), MODED if is_long() else MODED[::3], ids=lambda value: getattr(value, "name", value)
)
def test_scripted_envs_of_other_makers(
    tmp_path: Path, kind: EnvKind, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Spaces, masks and infos of all forms."""
    if kind.shares_metadata:
        other = AutoresetMode.NEXT_STEP if mode != "NextStep" else AutoresetMode.SAME_STEP
        monkeypatch.setitem(VectorEnv.metadata, "autoreset_mode", other)
    envs: list[Any] = []

    def make() -> Any:
        envs.append(kind.make(mode))
        return envs[-1]

    try:
        with warned(kind.warns or kind.warns_random):
            check_log(tmp_path / "log", make, info_keys=list(kind.info_keys))
    finally:
        for env in envs:
            close(env)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("obs", ["float64", "uint8", "dict", "tuple"])
def test_scripted_vector_envs(tmp_path: Path, mode: str, obs: Any) -> None:
    def make() -> Any:
        script = Script(3, lengths=[[3, 1, 4], [2, 5], [6]], obs=obs, action="dict")
        return make_scripted(script, backend="native", autoreset_mode=mode, reuse_buffer=True)  # type: ignore[arg-type]

    check_log(tmp_path / "log", make)


TORCH: dict[str, Callable[[], Any]] = {
    "same step": lambda: ScriptedTorchEnv(SCRIPT),
    "same step, buffers": lambda: ScriptedTorchEnv(SCRIPT, reuse_obs=True),
    "same step, ids": lambda: ScriptedTorchEnv(SCRIPT, final_obs="ids"),
    "same step, no last observations": lambda: ScriptedTorchEnv(SCRIPT, final_obs="absent"),
    "disabled": lambda: ScriptedTorchEnv(SCRIPT, autoreset=False),
    "one env": lambda: ScriptedTorchEnv(Script(1, lengths=[3, 1, 4])),
    "double": lambda: as_vector_env(
        ScriptedTorchEnv(Script(3, lengths=[3, 1, 4], obs="dict", action="dict")), dtype=torch.float64
    ),
    "rsl_rl": lambda: as_vector_env(
        ScriptedRslEnv(Script(3, lengths=[3, 5, 2], action="box")), autoreset_mode="SameStep"
    ),
}


@pytest.mark.parametrize("name", TORCH)
@pytest.mark.filterwarnings("ignore:.*last observation.*:UserWarning")
def test_envs_in_torch(tmp_path: Path, name: str) -> None:
    seed = None if name == "rsl_rl" else 7  # it takes none
    check_log(tmp_path / "log", TORCH[name], seed=seed)


def test_a_scripted_pool(tmp_path: Path) -> None:
    check_log(tmp_path / "log", ScriptedPool, seed=None)


@pytest.mark.parametrize(
    ("name", "num_envs"), [("CartPole-v1", 4), ("Pendulum-v1", 1), ("FrozenLake-v1", 3)], ids=str
)
@pytest.mark.filterwarnings("ignore:.*precision lowered:UserWarning")  # envpool's own
def test_envpool(tmp_path: Path, name: str, num_envs: int) -> None:
    envpool = pytest.importorskip("envpool")

    def make() -> Any:
        return envpool.make_gymnasium(name, num_envs=num_envs, num_threads=1, seed=3, max_episode_steps=15)

    check_log(tmp_path / "log", make, seed=None)  # its seed is the function's


@pytest.mark.parametrize("sticky", [0.0, 0.25] if is_long() else [0.25])
def test_atari_of_envpool(tmp_path: Path, sticky: float) -> None:
    envpool = pytest.importorskip("envpool")

    def make() -> Any:
        return envpool.make_gymnasium(
            "Pong-v5",
            num_envs=2,
            num_threads=1,
            seed=3,
            img_height=16,
            img_width=16,
            repeat_action_probability=sticky,
            max_episode_steps=10,
        )

    check_log(tmp_path / "log", make, seed=None, batches=2, rows=30)


def test_a_log_of_envpool_holds_one_seed(tmp_path: Path) -> None:
    """The one of the function: a reader with another one finds the first row that differs."""
    envpool = pytest.importorskip("envpool")

    def make(seed: int) -> Any:
        return lambda: envpool.make_gymnasium("CartPole-v1", num_envs=2, num_threads=1, seed=seed)

    rows = collect(tmp_path / "log", make(3), seed=None)
    with ReplayLog(tmp_path / "log", create_env_fn=make(3)) as log:
        assert_equal(log.rows(100, 150), rows[100:150])
    with (
        ReplayLog(tmp_path / "log", create_env_fn=make(4)) as log,
        pytest.raises(ReplayMismatchError, match=r"row 0, .* create_env_fn makes another one"),
    ):
        log.rows()
