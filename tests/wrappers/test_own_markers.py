"""Markers of one's own: the page's examples against the script, the step's own observations and infos, the check."""

import importlib
import sys
import types
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor

from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, MarkerWrapper, RewardSum, StepCounter, TrajId, as_vector_env
from flatroll.wrappers.testing import (
    ContractError,
    Script,
    ScriptedEnv,
    ScriptedTorchEnv,
    ScriptedVectorEnv,
    check_marker,
    decode,
    expected_rows,
    make_scripted,
)

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "own_marker.md"
MODES = ("NextStep", "SameStep", "Disabled")
SCRIPT = Script(2, lengths=[[3, 1, 4], [2, 5]], ends=[["terminated", "truncated", "both"], ["truncated"]])
GOAL = [0, 0, 3]


# --- the page -----------------------------------------------------------------------------------------------


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What is defined after each Python block of the page."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1]))
    docs = importlib.import_module("test_docs")
    module = types.ModuleType("own_marker_page")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    defined = []
    for block, _ in docs.runnable(docs.blocks_of(PAGE.read_text())):
        docs.run_block(block, module.__dict__, PAGE)
        defined.append(dict(module.__dict__))
    return defined


def distance(place: tuple[int, int, int]) -> float:
    return float(sum(abs(at - to) for at, to in zip(place, GOAL, strict=True)))


def goal_distance(env: int, episode: int, step: int) -> Any:
    return [distance((env, episode, step))]


def way(env: int, episode: int, step: int) -> Any:
    return [0.0, 0.0, float(step)]


def progress(env: int, episode: int, step: int) -> Any:
    reached = distance((env, episode, step + 1))
    return [distance((env, episode, step)) - reached - 0.25 * (step + 1)]


def naive(env: int, episode: int, step: int) -> Any:
    return [distance((env, episode, step)) - distance((env, episode, step + 1))]


#: The page's columns, and what stands in them in the row of (env, episode, step).
COLUMNS: dict[Any, Callable[[int, int, int], Any]] = {
    "goal_distance": goal_distance,
    "way": way,
    ("next", "progress"): progress,
}


def rows_of(batch: Any) -> list[tuple[int, int, int]]:
    return [(env, episode, step) for env, episode, step in batch["observation"].int().tolist()]


def made(backend: str, mode: Any) -> Any:
    if backend == "native":
        return ScriptedVectorEnv(SCRIPT, autoreset_mode=mode, final_info=True)
    return make_scripted(SCRIPT, backend=backend, autoreset_mode=mode)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["sync", "async", "native"])
@pytest.mark.parametrize("mode", MODES)
def test_the_columns_of_the_page_are_those_of_the_script(page: Any, backend: str, mode: str) -> None:
    names = page[-1]
    env = names["Progress"](names["Way"](names["GoalDistance"](made(backend, mode), GOAL)), GOAL)
    collector = Collector(env, frames_per_batch=26)
    batches = [next(collector) for _ in range(3)]
    collector.shutdown()

    batch = torch.cat(batches)
    true = expected_rows(SCRIPT, 80, autoreset_mode=mode)[["env", "episode", "step"]][: len(batch)]
    assert sorted(rows_of(batch)) == sorted(true.tolist())
    ended = batch["next", "done"].flatten()
    assert ended.sum() > 20
    for key, value in COLUMNS.items():
        assert batch[key].tolist() == [value(*row) for row in rows_of(batch)], key


def test_each_block_of_the_page_makes_these_columns(page: Any) -> None:
    # The first block leaves the batch of its last mode.
    first = page[0]["batch"]
    assert first["next", "done"].sum() > 15
    for key, value in COLUMNS.items():
        assert first[key].tolist() == [value(*row) for row in rows_of(first)], key
    # The second block says that the naive marker is right under NEXT_STEP alone.
    for mode in MODES:
        env = page[1]["Naive"](make_scripted(SCRIPT, autoreset_mode=mode), GOAL)
        batch = next(Collector(env, frames_per_batch=60))
        right = torch.tensor([naive(*row) for row in rows_of(batch)]) == batch["next", "progress"]
        ended = batch["next", "done"]
        assert right[~ended].all()
        assert right[ended].all() if mode == "NextStep" else not right[ended].any()


# --- true_next, step_info -----------------------------------------------------------------------------------


class Pair(gym.Wrapper[Any, Any, Any, Any]):
    """Adds entries to info: a nested one, one that only resets return, one that only steps return, floats."""

    def reset(self, **arguments: Any) -> Any:
        obs, info = self.env.reset(**arguments)
        return obs, {**info, "of": {"t": 0.0}, "born": 7, "half": -1.0}

    def step(self, action: Any) -> Any:
        *result, info = self.env.step(action)
        t = info["t"]
        return *result, {**info, "of": {"t": float(t)}, "made": t, "half": t / 2}


@pytest.mark.parametrize("kind", ["float32", "float64", "uint8", "discrete", "dict", "tuple"])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_the_steps_own_observations_and_infos(kind: Any, mode: Any, framework: Any) -> None:
    script = Script(2, lengths=SCRIPT.lengths, ends=SCRIPT.ends, obs=kind)
    vector = gym.vector.SyncVectorEnv(
        [lambda i=i: Pair(ScriptedEnv(script, i)) for i in range(2)], autoreset_mode=AutoresetMode(mode)
    )
    env: Any = RewardSum(as_vector_env(vector, framework=framework))
    true = {(row["vector_step"], row["env"]): row for row in expected_rows(script, 30, autoreset_mode=mode)}
    env.reset(seed=0)
    for k in range(30):
        obs, *_, info = env.step(np.zeros(2, np.int64))
        led_to = env.stream.true_next(obs, info)
        own = env.stream.step_info(info)
        returns = own["episode_reward"]
        plain = {name: own[name] for name in ("t", "made", "half", "_made")}
        plain["of"] = own["of"]["t"]
        shown = decode(kind, led_to if framework == "numpy" else _as_numpy(led_to))
        for i in (i for i in range(2) if (k, i) in true):
            row = true[k, i]
            after = int(row["step"]) + 1
            assert shown[i].tolist() == [i, row["episode"], after]
            assert {name: float(entry[i]) for name, entry in plain.items()} == {
                **{"t": after, "made": after, "half": after / 2, "_made": True, "of": after},
            }
            assert float(returns[i]) == 100 * row["episode"] * after + after * (after + 1) / 2
        if mode != "NextStep" and bool(env.stream.ended.any()):
            assert "final_info" not in own and "final_obs" in own
            assert set(own) >= {"t", "of", "born", "made", "half", "episode_reward"}
            assert not bool(own["born"][np.asarray(env.stream.ended)].any())  # the step returned none


def _as_numpy(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _as_numpy(leaf) for name, leaf in tree.items()}
    if isinstance(tree, tuple):
        return tuple(map(_as_numpy, tree))
    assert isinstance(tree, Tensor)
    return tree.numpy()


@pytest.mark.parametrize("final_obs", ["dense", "absent"])
def test_what_the_env_hides_is_unknown(final_obs: Any) -> None:
    # Neither of the two gives final_info; the second gives no last observation, either.
    bare = ScriptedVectorEnv(SCRIPT, autoreset_mode="SameStep", final_obs=final_obs)
    env = as_vector_env(bare)
    env.reset(seed=0)
    hidden = 0
    for _ in range(12):
        obs, *_, info = env.step(np.zeros(2, np.int64))
        stream: Any = env
        led_to = stream.true_next(obs, info)
        assert (np.isnan(led_to).all(-1) == (stream.ended & (final_obs == "absent"))).all()
        own = stream.step_info({**info, "speed": obs[:, 2], "lives": obs[:, 2].astype(int)})
        if not stream.ended.any():
            assert own["lives"].tolist() == obs[:, 2].tolist()
            continue
        hidden += 1
        # The two entries are like a wrapper's, so they are passed on; "t" is the env's own.
        assert own["speed"].tolist() == obs[:, 2].tolist()
        with pytest.raises(
            ValueError, match=r"info\['t'\] of a step that ends an episode is unknown: .*final_info"
        ):
            own["t"]
        assert (own["_t"] == ~stream.ended).all()
    assert hidden > 3


class Floating(ScriptedVectorEnv):
    def _info(self) -> dict[str, Any]:
        return {"t": self.clock.step.astype(np.float32), "in": {"t": self.clock.step * 1.0}}


def test_hidden_floats_are_nan() -> None:
    env: Any = as_vector_env(Floating(SCRIPT, autoreset_mode="SameStep"))
    env.reset(seed=0)
    for _ in range(12):
        *_, info = env.step(np.zeros(2, np.int64))
        for entry in (env.step_info(info)["t"], env.step_info(info)["in"]["t"]):
            assert (np.isnan(entry) == env.ended).all()
        assert not np.isnan(info["t"]).any()


def test_hidden_rows_of_images_are_zeros_and_known_tells() -> None:
    script = Script(2, lengths=SCRIPT.lengths, obs="uint8")
    env: Any = as_vector_env(ScriptedVectorEnv(script, autoreset_mode="SameStep", final_obs="absent"))
    env.reset(seed=0)
    for _ in range(6):
        obs, *_, info = env.step(np.zeros(2, np.int64))
        led_to = env.true_next(obs, info)
        known = np.ones(2, bool) if env.known is None else env.known
        assert (led_to[known] == obs[known]).all() and not led_to[~known].any()


@pytest.mark.parametrize("limit", [1, 2])
def test_a_step_limit_over_a_same_step_env_knows_the_rows_that_it_ends(limit: int) -> None:
    # The env ends the episodes of env 0, and the limit those of env 1; both have their own final_info.
    script = Script(2, lengths=[[2], [9]])
    vector = gym.vector.SyncVectorEnv(
        [lambda i=i: Pair(ScriptedEnv(script, i)) for i in range(2)], autoreset_mode=AutoresetMode.SAME_STEP
    )
    env: Any = StepCounter(vector, max_steps=limit)
    env.reset(seed=0)
    for k in range(8):
        obs, *_, info = env.step(np.zeros(2, np.int64))
        own = env.stream.step_info(info)
        assert own["t"].tolist() == own["of"]["t"].tolist() == own["made"].tolist() == [k % limit + 1] * 2
        assert env.stream.true_next(obs, info)[:, 2].tolist() == [k % limit + 1] * 2


def test_no_value_is_read_on_a_device() -> None:
    script = Script(4, lengths=SCRIPT.lengths[:1] * 4)
    env: Any = as_vector_env(ScriptedTorchEnv(script, device="meta"))
    env.reset(seed=0)
    for _ in range(4):
        obs, *_, info = env.step(torch.zeros(4, dtype=torch.int64, device="meta"))
        assert env.true_next(obs, info).device.type == "meta"
        assert env.step_info({**info, "a": obs[:, 0]})["a"].device.type == "meta"


@pytest.mark.parametrize("mode", MODES)
def test_collected_infos_within_dicts_are_the_steps_own(mode: Any) -> None:
    # Before, one env's reset under DISABLED set the entry to 0 for all others.
    vector = gym.vector.SyncVectorEnv(
        [lambda i=i: Pair(ScriptedEnv(SCRIPT, i)) for i in range(2)], autoreset_mode=AutoresetMode(mode)
    )
    keys = [("of", "t"), "t", "half", "made"]
    batch = next(Collector(vector, frames_per_batch=60, info_keys=keys))
    step = batch["observation"][:, 2] + 1
    for key, share in zip(keys, (1, 1, 0.5, 1), strict=True):
        name = key if isinstance(key, tuple) else (key,)
        assert batch[("next", *name)].flatten().tolist() == (share * step).tolist(), key
    assert batch["of", "t"].flatten().tolist() == batch["observation"][:, 2].tolist()


# --- check_marker -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("marker", [InitTracker, StepCounter, TrajId, RewardSum])
def test_our_own_markers_pass(marker: Any) -> None:
    check_marker(marker)
    check_marker(lambda env: marker(as_vector_env(env, framework="torch")))


class Left(MarkerWrapper):
    """Steps left of 500, with room for faults."""

    def __init__(self, env: Any) -> None:
        super().__init__(env, "left")
        self.left: Any = np.zeros(self.num_envs, np.int64)

    def _on_reset(self, obs: Any, info: Any, rows: Any) -> None:
        self.left = np.where(rows, 500, self.left)
        info["left"] = self.left.copy()

    def begins(self, terminated: Any, truncated: Any) -> Any:
        return self.stream.first

    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        self.left = np.where(self.begins(*result[2:4]), 500, self.left - 1)
        result[4]["left"] = self.entry()
        return result

    def entry(self) -> Any:
        return self.left.copy()


class StateAtEnds(Left):
    def begins(self, terminated: Any, truncated: Any) -> Any:
        return terminated | truncated


class AllRows(Left):
    def _on_reset(self, obs: Any, info: Any, rows: Any) -> None:
        super()._on_reset(obs, info, np.ones_like(rows))


class OneArray(Left):
    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        self.left[...] = np.where(self.stream.first, 500, self.left - 1)
        result[4]["left"] = self.left
        return result


class OneNumber(Left):
    def entry(self) -> Any:
        return self.left[0]


class Nothing(Left):
    def step(self, actions: Any) -> Any:
        return self.env.step(actions)


class OwnReward(Left):
    """Adds to the reward what the returned observation says."""

    def step(self, actions: Any) -> Any:
        obs, reward, *rest = super().step(actions)
        return obs, reward + obs[:, 2], *rest


class InfoOfReset(Left):
    describes_step = True

    def step(self, actions: Any) -> Any:
        result = self.env.step(actions)
        result[4]["left"] = result[4]["t"] + 0
        return result


FAULTS: list[tuple[Any, str]] = [
    (
        StateAtEnds,
        r"column 'left' differs in \d+ of 57 rows: env 0, episode 1, step 0, whose .* 499 \(NextStep\)",
    ),
    (AllRows, r"column 'left' differs in \d of \d+ rows: env 1, .* 500 \(after a reset of env 0\)"),
    (OneArray, r"NextStep: info\['left'\] changed after it was returned"),
    (
        OneNumber,
        r"info\['left'\] of OneNumber must be numbers with one row for each of 2 envs, and is int64 after",
    ),
    (Nothing, r"info\['left'\] of Nothing is missing after step"),
    (
        OwnReward,
        r"column \('next', 'reward'\) differs in \d+ of 57 rows: .*step 2, whose step ended the episode",
    ),
    (InfoOfReset, r"column \('next', 'left'\) differs in \d+ of 57 rows: .*3 \(NextStep\), 0 \(SameStep\)"),
]


def test_a_right_marker_passes_with_envs_of_ones_own() -> None:
    check_marker(Left)
    for name in ("CartPole-v1", "Acrobot-v1"):
        check_marker(Left, partial(_make, name, max_episode_steps=20), steps=60)


def _make(name: str, mode: AutoresetMode, **arguments: Any) -> Any:
    options: Any = {"autoreset_mode": mode}
    return gym.make_vec(name, 2, vectorization_mode="sync", vector_kwargs=options, **arguments)


@pytest.mark.parametrize(("marker", "text"), FAULTS, ids=lambda x: getattr(x, "__name__", None))
def test_planted_faults_are_named(marker: Any, text: str) -> None:
    with pytest.raises(ContractError, match=text):
        check_marker(marker)


def _other_seed(mode: AutoresetMode) -> Any:
    return make_scripted(Script(2, lengths=3 + (mode is AutoresetMode.SAME_STEP)), autoreset_mode=mode)


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ((7,), TypeError, "wrap must be a function that wraps an env"),
        ((Left, 7), TypeError, "make_env must be a function of the autoreset mode"),
        (
            (as_vector_env,),
            TypeError,
            "wrap must return an env with a flatroll.wrappers.MarkerWrapper around it, got",
        ),
        (
            (Left, lambda mode: make_scripted(SCRIPT)),
            ValueError,
            "make_env must make an env in the given autoreset",
        ),
        (
            (Left, _other_seed),
            ValueError,
            r"env 0 plays others \(SameStep\) than before \(NextStep\), from episode 0",
        ),
        ((Left, partial(_make, "CartPole-v1")), ValueError, "steps=3 must be enough for an episode to end"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, error: Any, text: str) -> None:
    steps = 3 if "steps=3" in text else 40
    with pytest.raises(error, match=text):
        check_marker(*arguments, steps=steps)
