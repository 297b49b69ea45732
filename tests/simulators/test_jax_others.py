"""brax, navix, jumanji and craftax: rows of a collector against the simulator's own steps from the same states."""

from dataclasses import replace
from typing import Any

import pytest
from jax_trace import check_simulator, count_false

from flatroll.wrappers import as_functional, as_vector_env

jax = pytest.importorskip("jax")
E, T = 8, 60


def test_brax(report: Any) -> None:
    envs = pytest.importorskip("brax.envs")
    env = envs.create("inverted_pendulum", episode_length=25, auto_reset=False)

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        after = env.step(state, action)
        cut = after.info["truncation"] > 0
        return after.obs, after.reward, (after.done > 0) & ~cut, cut

    def false(batch: Any, states: Any) -> int:
        return count_false(batch, states, own, E, 1e-4)

    adapted = report.start(lambda: env, num_envs=E)
    check_simulator(adapted, report, "brax inverted_pendulum", "brax", false, steps=T, ends=10)
    for wrapped in (envs.create("fast"), envs.create("fast", auto_reset=False, batch_size=4)):
        with pytest.raises(TypeError, match="auto_reset=False"):
            as_vector_env(wrapped, num_envs=4)


def test_navix(report: Any) -> None:
    navix = pytest.importorskip("navix")
    env = navix.make("Navix-Empty-5x5-v0", max_steps=20)

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        after = env._step(state, action)
        return after.observation, after.reward, after.step_type == 2, after.step_type == 1

    def false(batch: Any, states: Any) -> int:
        return count_false(batch, states, own, E, 0.0)

    adapted = report.start(lambda: env, num_envs=E)
    check_simulator(adapted, report, "navix Empty-5x5", "navix", false, steps=T, ends=10)


def test_jumanji(report: Any) -> None:
    jumanji = pytest.importorskip("jumanji")
    env = jumanji.make("Snake-v1", time_limit=20)

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        _, now = env.step(state, action)
        cut = now.last() & (now.discount != 0)
        return now.observation.grid, now.reward, now.last() & ~cut, cut

    def false(batch: Any, states: Any) -> int:
        return count_false(batch, states, own, E, key="grid")

    adapted = report.start(lambda: env, num_envs=E)
    batch = check_simulator(adapted, report, "jumanji Snake", "jumanji", false, steps=T, ends=5)
    assert set(batch.keys()) >= {"grid", "action_mask", "step_count_"}


def test_craftax(report: Any) -> None:
    craftax = pytest.importorskip("craftax.craftax_env")
    env = craftax.make_craftax_env_from_name("Craftax-Classic-Symbolic-v1", auto_reset=False)
    limit = 30
    endless, params = env.default_params, env.default_params.replace(max_timesteps=limit)
    whole = as_functional(env, params=params)

    def key_of(state: Any) -> Any:
        """In place of a step's own key, so that the same state and action make the same step again."""
        return jax.random.fold_in(jax.random.PRNGKey(3), state.timestep)

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        obs, after, reward, _, _ = env.step_env(key_of(state), state, action, params)
        over = env.is_terminal(after, endless)
        return obs, reward, over, ~over & (after.timestep >= limit)

    def false(batch: Any, states: Any) -> int:
        return count_false(batch, states, own, E)

    known = replace(whole, step=lambda key, state, action: whole.step(key_of(state), state, action))
    adapted = report.start(lambda: known, num_envs=E)
    check_simulator(adapted, report, "craftax Classic-Symbolic", "craftax", false, steps=T, ends=E)
