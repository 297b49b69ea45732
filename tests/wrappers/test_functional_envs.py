"""Which envs are taken for pure JAX functions, told without importing JAX; the real ones: tests/simulators/."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import interpreters
import numpy as np
import pytest
from gymnasium import spaces

from flatroll.rollouts import Collector
from flatroll.wrappers import FunctionalEnv, as_functional, as_vector_env
from flatroll.wrappers.on_jax.functional import find_family, gym_space

SOURCE = Path(__file__).parents[2] / "src"


def simulator(module: str, name: str = "Env", **attributes: Any) -> Any:
    """An object of a class of this module, as an env of that simulator is."""
    return type(name, (), {"__module__": module, **attributes})()


@pytest.mark.parametrize(
    "module",
    [
        "gymnax.environments.x",
        "craftax.x",
        "brax.envs.ant",
        "mujoco_playground._src.x",
        "jumanji.x",
        "navix.x",
    ],
)
def test_simulators_are_known_by_their_package(module: str) -> None:
    assert find_family(simulator(module)) is not None
    assert find_family(simulator("somebody." + module)) is None


def test_a_functional_env_of_gymnasium_s_and_its_vector_env() -> None:
    class FuncEnv:
        __module__ = "gymnasium.experimental.functional"

    class CartPole(FuncEnv):
        action_space = spaces.Discrete(2)

    class FunctionalJaxVectorEnv(gym.vector.VectorEnv[Any, Any, Any]):
        __module__ = "gymnasium.envs.functional_jax_env"
        func_env, num_envs, time_limit = CartPole(), 3, 200

    class CartPoleJaxVectorEnv(FunctionalJaxVectorEnv):
        pass

    assert as_functional(CartPole()).max_episode_steps is None
    assert as_functional(CartPoleJaxVectorEnv()).max_episode_steps == 200
    assert as_functional(CartPoleJaxVectorEnv(), max_episode_steps=9).max_episode_steps == 9
    # jumanji's games end by their own limit.
    assert as_functional(simulator("jumanji.x", action_spec=None, time_limit=7)).max_episode_steps is None


def test_wrappers_that_batch_or_reset_are_refused() -> None:
    bare = simulator("brax.envs.ant")
    for name in ("AutoResetWrapper", "VmapWrapper", "BraxAutoResetWrapper"):
        wrapped = simulator("brax.envs.wrappers.training", name)
        wrapped.env = bare
        outer = simulator("brax.envs.wrappers.training", "EpisodeWrapper")
        outer.env = wrapped
        for env in (wrapped, outer):
            with pytest.raises(TypeError, match=rf"wrapper {name}.*auto_reset=False"):
                as_vector_env(env, num_envs=2)
    with pytest.raises(TypeError, match="wrapper LogWrapper"):
        as_vector_env(simulator("gymnax.wrappers.purerl", "LogWrapper"), num_envs=2)


def test_gymnax_s_two_kinds_of_ends() -> None:
    """Before 1.0, and in craftax, `done` holds the limit: a longer one takes it away."""

    class Params(SimpleNamespace):
        def replace(self, **changed: Any) -> "Params":
            return Params(**{**vars(self), **changed})

    def terminal(self: Any, state: Any, params: Any) -> Any:
        return (state["at"] > 5) | (state["time"] >= params.max_timesteps)

    def step_env(self: Any, key: Any, state: Any, action: Any, params: Any) -> Any:
        after = {"at": state["at"] + action, "time": state["time"] + 1}
        return after["at"], after, 1.0, self.is_terminal(after, params), {}

    env = simulator(
        "craftax.x",
        default_params=Params(max_timesteps=10),
        is_terminal=terminal,
        step_env=step_env,
        reset_env=lambda self, key, params: (0, {"at": 0, "time": 0}),
        action_space=lambda self, params: SimpleNamespace(n=4),
    )
    step = as_functional(env).step
    for at, time, ends in (
        (0, 0, (False, False)),
        (9, 0, (True, False)),
        (0, 9, (False, True)),
        (9, 9, (True, False)),
    ):
        state = {"at": np.int32(at), "time": np.int32(time)}
        assert tuple(map(bool, step(None, state, 1)[3:5])) == ends
    assert as_functional(env, params=Params(max_timesteps=3)).step(
        None, {"at": np.int32(0), "time": np.int32(2)}, 1
    )[4]
    with pytest.raises(TypeError, match="params= is for envs of gymnax and craftax"):
        as_functional(simulator("brax.envs.ant"), params=1)


def test_spaces() -> None:
    assert gym_space(SimpleNamespace(n=np.array(3))) == spaces.Discrete(3)
    assert gym_space(SimpleNamespace(num_values=np.array([2, 3]))) == spaces.MultiDiscrete([2, 3])
    box = gym_space(SimpleNamespace(minimum=-1.0, maximum=[1.0, 2.0], shape=(2,), dtype=np.float32))
    assert box == spaces.Box(np.array([-1, -1], np.float32), np.array([1, 2], np.float32))
    nested = gym_space(
        SimpleNamespace(spaces={"a": SimpleNamespace(n=2), "b": SimpleNamespace(spaces=[box])})
    )
    assert nested == spaces.Dict(a=spaces.Discrete(2), b=spaces.Tuple([box]))
    with pytest.raises(TypeError, match="action_space must be a Gymnasium space"):
        gym_space(object())


def test_errors_that_need_no_jax() -> None:
    env = FunctionalEnv(lambda key: (key, key), lambda *given: given, spaces.Discrete(2), name="Own")
    with pytest.raises(
        TypeError, match=r"num_envs is needed: Own is a single env.*as_vector_env\(env, num_envs="
    ):
        Collector(env, frames_per_batch=4)
    with pytest.raises(ValueError, match="functional JAX envs are always 'SameStep'"):
        as_vector_env(env, num_envs=2, autoreset_mode="NextStep")
    with pytest.raises(TypeError, match=r"got int: write its two functions"):
        as_functional(3)


def test_no_env_but_a_functional_one_imports_jax() -> None:
    program = (
        f"import sys; sys.path.insert(0, {str(SOURCE)!r}); import gymnasium\n"
        "from flatroll.wrappers import as_vector_env\n"
        "as_vector_env(gymnasium.make_vec('CartPole-v1', num_envs=2)).reset(seed=0)\n"
        "assert not {'jax', 'gymnax', 'brax'} & set(sys.modules)"
    )
    interpreters.run([sys.executable, "-c", program], check=True, kind=interpreters.OfLibraries)
