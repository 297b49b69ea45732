"""brax, navix and jumanji: rows of a collector against the simulator's own steps from the same states."""

from typing import Any

import pytest
from jax_trace import check_simulator, count_false

from flatroll.wrappers import as_vector_env

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
