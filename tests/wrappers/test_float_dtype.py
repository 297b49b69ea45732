"""as_vector_env(dtype=): floating observations in the dtype asked for, everywhere an observation comes out."""

from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from torch import nn

from flatroll.rollouts import rollout
from flatroll.wrappers import CompactObs, NextObservationDelta, as_vector_env
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, make_scripted

MODES = pytest.mark.parametrize("mode", ["NextStep", "SameStep", "Disabled"])
LENGTHS = [[3, 1, 4], [2, 5]]


def leaves(tree: Any) -> list[Any]:
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, tuple) else None
    return [tree] if children is None else [leaf for child in children for leaf in leaves(child)]


def zeros(env: Any) -> Any:
    return np.zeros(env.num_envs, np.int64)


@MODES
@pytest.mark.parametrize("backend", ["sync", "native"])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_all_observations_of_an_env_have_the_dtype(mode: Any, backend: Any, framework: str) -> None:
    script = Script(2, lengths=LENGTHS, obs="float64")
    env = as_vector_env(
        make_scripted(script, backend=backend, autoreset_mode=mode), dtype=torch.float32, framework=framework
    )
    plain = as_vector_env(make_scripted(script, backend=backend, autoreset_mode=mode), framework=framework)
    assert env.single_observation_space.dtype == env.observation_space.dtype == np.float32
    results = [(env.reset(seed=0)[0], plain.reset(seed=0)[0])]
    for _ in range(8):
        (obs, *_, info), (expected, *_, plain_info) = env.step(zeros(env)), plain.step(zeros(env))
        results.append((obs, expected))
        if "final_obs" in info:
            results.append((info["final_obs"], plain_info["final_obs"]))
        assert env.observation_space.contains(np.asarray(obs))
    for obs, expected in results:
        assert str(obs.dtype).endswith("float32") and str(expected.dtype).endswith("float64")
        np.testing.assert_array_equal(np.asarray(obs), np.asarray(expected))


@MODES
def test_only_the_floating_entries_of_a_dict_are_cast(mode: Any) -> None:
    script = Script(2, lengths=LENGTHS, obs="dict")
    raw = make_scripted(script, autoreset_mode=mode)
    env = as_vector_env(raw, dtype=torch.float16)
    kinds = [leaf.dtype for leaf in leaves(raw.reset(seed=0)[0])]
    assert {kind.kind for kind in kinds} > {"f"}  # there are others
    expected = [np.dtype("f2") if kind.kind == "f" else kind for kind in kinds]
    seen = [env.reset(seed=0)[0], *(env.step(zeros(env))[0] for _ in range(8))]
    assert all([leaf.dtype for leaf in leaves(obs)] == expected for obs in seen)


def test_nothing_is_copied_where_the_dtype_is_right() -> None:
    class Keeps(gym.vector.VectorEnv):  # type: ignore[type-arg]
        num_envs, metadata = 1, {"autoreset_mode": "NextStep"}
        single_observation_space = gym.spaces.Box(-1, 1, (3,), np.float32)
        single_action_space = gym.spaces.Discrete(2)
        shown = np.zeros((1, 3), np.float32)

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            return self.shown, {}

    env = as_vector_env(Keeps(), dtype=torch.float32, own_buffers=False)
    assert env.reset()[0] is Keeps.shown


@MODES
@pytest.mark.parametrize("wrap", [CompactObs, NextObservationDelta, lambda env: env])
def test_rollouts_and_wrappers_follow(mode: Any, wrap: Any) -> None:
    script = Script(2, lengths=LENGTHS, obs="float64")
    make = lambda: make_scripted(script, autoreset_mode=mode)  # noqa: E731
    batch = rollout(wrap(as_vector_env(make(), dtype=torch.float32)), num_steps=9, seed=0)
    plain = rollout(wrap(make()), num_steps=9, seed=0)
    assert batch["observation"].dtype == torch.float32 and plain["observation"].dtype == torch.float64
    assert torch.equal(batch["observation"], plain["observation"].float())
    for key in [("next", "observation")] if ("next", "observation") in batch.keys(True) else []:
        assert torch.equal(batch[key], plain[key].float()) and batch[key].dtype == torch.float32


def test_a_torch_env_is_cast_and_its_final_observations_too() -> None:
    env = as_vector_env(ScriptedTorchEnv(Script(2, lengths=LENGTHS)), dtype=torch.float64)
    env.reset()
    for _ in range(5):
        obs, *_, info = env.step(torch.zeros(2, dtype=torch.int64))
        assert obs.dtype == info["final_obs"].dtype == torch.float64


def test_bounds_beyond_the_dtype_become_infinite() -> None:
    big = np.finfo(np.float64).max
    raw = gym.wrappers.TransformObservation(
        gym.make("CartPole-v1"),
        lambda obs: obs.astype(np.float64),
        gym.spaces.Box(-big, big, (4,), np.float64),
    )
    space = as_vector_env(raw, dtype=torch.float32).single_observation_space
    assert isinstance(space, gym.spaces.Box) and np.isinf(space.low).all() and np.isinf(space.high).all()


def test_a_float32_policy_takes_a_float64_env() -> None:
    env = make_scripted(Script(2, obs="float64"), autoreset_mode="SameStep")
    policy = nn.Sequential(nn.Linear(3, 5), nn.Flatten())
    batch = rollout(env, lambda obs: policy(obs).argmax(-1), num_steps=4, obs_dtype=torch.float32)
    assert batch["observation"].dtype == batch["next", "observation"].dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16, "float32"])
def test_another_dtype_is_refused(dtype: Any) -> None:
    with pytest.raises(ValueError, match=r"must be torch.float16, torch.float32 or torch.float64"):
        as_vector_env(gym.make("CartPole-v1"), dtype=dtype)


def test_an_adapted_env_keeps_its_dtype() -> None:
    env = as_vector_env(make_scripted(Script(2, obs="float64")))
    with pytest.raises(ValueError, match=r"adapted already.*as_vector_env\(bare_env, dtype=torch.float32\)"):
        as_vector_env(env, dtype=torch.float32)
    assert as_vector_env(env, dtype=torch.float64) is env
