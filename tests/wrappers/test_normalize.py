"""`NormalizeObservation` counts each observation of an env once; last ones are normalised by the same statistics."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.disk import Checkpoint
from flatroll.rollouts import Collector
from flatroll.wrappers import (
    CompactObs,
    NextObservationDelta,
    NormalizeObservation,
    StepCounter,
    as_vector_env,
)
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, make_scripted

MODES = ("NextStep", "SameStep", "Disabled")
SCRIPT = Script(3, lengths=[[3, 5, 1], [2, 4], [7]], ends=["terminated", "truncated", "both"])
STEPS = 20


def moments(shown: list[Any]) -> tuple[Any, Any]:
    rows = np.unique(
        np.concatenate(shown).astype(np.float64), axis=0
    )  # each observation is (env, episode, step)
    return rows, (rows.mean(0), rows.var(0))


def assert_normalized(obs: Any, raw: Any, shown: list[Any]) -> None:
    _, (mean, var) = moments(shown)
    np.testing.assert_allclose(
        obs, np.clip((raw - mean) / np.sqrt(var + 1e-8), -10, 10), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("obs", ["float32", "float64"])
def test_each_observation_counts_once_before_it_is_normalised(mode: Any, obs: Any) -> None:
    script = Script(3, SCRIPT.lengths, SCRIPT.ends, obs)
    env = NormalizeObservation(make_scripted(script, autoreset_mode=mode))
    twin = as_vector_env(make_scripted(script, autoreset_mode=mode))
    raw, _ = twin.reset()
    shown, out = [raw], env.reset()[0]
    assert_normalized(out, raw, shown)
    ends = 0
    for _ in range(STEPS):
        raw, _, terminated, truncated, info = twin.step([0, 0, 0])
        out, _, _, _, own = env.step([0, 0, 0])
        done, shown = terminated | truncated, [*shown, raw]
        if twin.same_step:
            shown.append(info["final_obs"][done])
        assert out.dtype == obs and env.observation_space.contains(out)
        assert_normalized(out, raw, shown)
        if twin.same_step:
            assert_normalized(own["final_obs"][done], info["final_obs"][done], shown)
            ends += done.sum()
    statistics, (rows, (mean, var)) = env.statistics["observation"], moments(shown)
    assert statistics.count == len(rows) and (ends > 5) == twin.same_step
    np.testing.assert_allclose(statistics.mean, mean, rtol=1e-12)
    np.testing.assert_allclose(statistics.var, var, rtol=1e-12)


def test_masked_resets_count_what_was_reset() -> None:
    env = NormalizeObservation(make_scripted(SCRIPT, autoreset_mode="Disabled", backend="native"))
    env.reset()
    env.step([0, 0, 0])
    assert env.statistics["observation"].count == 6
    env.reset(options={"reset_mask": np.array([True, False, True])})
    assert env.statistics["observation"].count == 8


def test_hidden_last_observations_are_not_counted() -> None:
    bare = as_vector_env(make_scripted(SCRIPT, backend="native", autoreset_mode="SameStep"), final_obs=None)
    env = NormalizeObservation(bare)
    env.reset()
    for step in range(STEPS):
        info = env.step([0, 0, 0])[4]
        assert "final_obs" not in info and env.statistics["observation"].count == 3 * (step + 2)


def test_step_limits_and_compact_observations_around_it() -> None:
    """A limit resets rows in the step that ends them, with last observations that pass through the wrapper."""
    inner = NormalizeObservation(make_scripted(SCRIPT, autoreset_mode="Disabled"), clip=None)
    env = CompactObs(StepCounter(inner, max_steps=2))
    env.reset()
    for _ in range(STEPS):
        _, _, terminated, truncated, info = env.step([0, 0, 0])
        done = terminated | truncated
        np.testing.assert_array_equal(info["_final_obs"], done)
        mean, var = (getattr(inner.statistics["observation"], name).numpy() for name in ("mean", "var"))
        back = info["final_obs"] * np.sqrt(var + 1e-8) + mean
        assert (np.abs(back[done][:, 2] - np.round(back[done][:, 2])) < 1e-4).all()
        assert ((back[done][:, 2] > 0.5) & (back[done][:, 2] < 2.5)).all()  # the number of the last step


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_floating_leaves_have_statistics_of_their_own_and_others_stay(kind: Any) -> None:
    script = Script(3, SCRIPT.lengths, SCRIPT.ends, kind)
    env, twin = (wrap(make_scripted(script)) for wrap in (NormalizeObservation, as_vector_env))
    assert list(env.statistics) == (["policy"] if kind == "dict" else ["0"])
    (out, _), (raw, _) = env.reset(), twin.reset()
    key: Any = "policy" if kind == "dict" else 0
    assert_normalized(out[key], raw[key], [raw[key]])
    others = (out["critic"]["image"], raw["critic"]["image"]) if kind == "dict" else (out[1], raw[1])
    np.testing.assert_array_equal(*others)
    assert env.observation_space.contains(out) and env.single_observation_space[key].high.max() == 10


def test_images_are_left_alone() -> None:
    env = NormalizeObservation(make_scripted(Script(3, obs="uint8")))
    obs, _ = env.reset()
    assert obs.dtype == np.uint8 and env.statistics == {} and env.state_dict() == {}


def test_a_single_env_and_torch_envs() -> None:
    env = NormalizeObservation(gym.make("CartPole-v1"))
    assert env.reset(seed=0)[0].shape == (1, 4)
    on_torch = NormalizeObservation(ScriptedTorchEnv(SCRIPT))
    obs, _ = on_torch.reset()
    assert isinstance(obs, torch.Tensor) and abs(obs.mean().item()) < 1e-6
    for _ in range(STEPS):
        obs = on_torch.step(torch.zeros(3, dtype=torch.int64))[0]
    assert obs.dtype is torch.float32 and on_torch.statistics["observation"].count > 3 * STEPS


def test_saved_loaded_and_frozen(tmp_path: Any) -> None:
    env = NormalizeObservation(make_scripted(SCRIPT))
    env.reset()
    env.step([0, 0, 0])
    Checkpoint(tmp_path, norm=env).save()
    other = NormalizeObservation(make_scripted(SCRIPT))
    Checkpoint(tmp_path, norm=other).load()
    other.update_running_mean = False
    state = other.state_dict()
    mean, var = state["observation.mean"].numpy(), state["observation.var"].numpy()
    raw = as_vector_env(make_scripted(SCRIPT)).reset()[0]
    np.testing.assert_allclose(other.reset()[0], (raw - mean) / np.sqrt(var + 1e-8), rtol=1e-6)
    assert all(state[name].equal(value) for name, value in env.state_dict().items())
    assert all(state[name].equal(value) for name, value in other.state_dict().items())
    with pytest.raises(ValueError, match="state_dict must hold tensors of shapes"):
        NormalizeObservation(make_scripted(Script(3, obs="dict"))).load_state_dict(state)


def test_collectors_take_it_and_buffers_warn() -> None:
    env = NormalizeObservation(make_scripted(SCRIPT, autoreset_mode="SameStep"))
    batch = next(iter(Collector(env, None, frames_per_batch=30, total_frames=30)))
    assert batch["observation"].abs().max() <= 10 and env.statistics["observation"].count > 30
    buffer = ReplayBuffer(storage=LazyTensorStorage(100), sampler=SliceSampler(slice_len=2), batch_size=4)
    with pytest.warns(UserWarning, match="differ in scale"):
        buffer.extend(batch)


def test_bad_input() -> None:
    class Broken(gym.Env[Any, Any]):
        observation_space, action_space = spaces.Box(-1, 1, (2,), np.float32), spaces.Discrete(2)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return np.zeros(2, np.float32), {}

        def step(self, action: Any) -> Any:
            return np.array([0, np.nan], np.float32), 0.0, False, False, {}

    env = NormalizeObservation(Broken())
    env.reset()
    before = env.state_dict()
    with pytest.raises(ValueError, match="the observation must be finite, got nan in row 0 of 1"):
        env.step([0])
    assert all(before[name].equal(value) for name, value in env.state_dict().items())
    with pytest.raises(ValueError, match="NextObservationDelta is inside NormalizeObservation"):
        NormalizeObservation(NextObservationDelta(make_scripted(SCRIPT)))
    with pytest.raises(ValueError, match="is already in this stack"):
        NormalizeObservation(NormalizeObservation(make_scripted(SCRIPT)))
    for wrong in ({"clip": 0.0}, {"epsilon": 0.0}):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            NormalizeObservation(make_scripted(SCRIPT), **wrong)
