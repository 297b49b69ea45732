"""brax, navix and jumanji: rows of a collector against the simulator's own steps from the same states."""

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from jax_trace import count_false, record_states

from flatroll.layout import audit
from flatroll.rollouts import Collector
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import check_vector_env

jax = pytest.importorskip("jax")
E, T = 8, 60


def check(
    env: Any,
    own: Callable[[Any, Any], tuple[Any, ...]],
    report: Any,
    name: str,
    package: str,
    ends: int,
    atol: float,
) -> None:
    """Every row, the contract, and a second run from one seed; at least so many ends."""
    adapted = as_vector_env(env, num_envs=E)
    states = record_states(adapted.source)
    start = time.perf_counter()
    adapted.reset(seed=0)
    adapted.step(adapted.action_space.sample())
    first = time.perf_counter() - start
    batches = []
    for _ in range(2):
        states.clear()
        batches.append(next(iter(Collector(adapted, frames_per_batch=E * T, seed=0))))
    batch, again = batches
    false, over = count_false(batch, states, own, E, atol), int(batch["next", "done"].sum())
    report(
        name,
        package,
        mode="SAME_STEP",
        rows=len(batch),
        false=false,
        known=over,
        unknown=0,
        first_seconds=first,
    )
    assert false == 0 and over >= ends and audit(batch) == []
    assert all(torch.equal(value, again[key]) for key, value in batch.items(True, True))
    assert adapted.source._step._cache_size() == 1
    check_vector_env(adapted, steps=40)


def test_brax(report: Any) -> None:
    envs = pytest.importorskip("brax.envs")
    env = envs.create("inverted_pendulum", episode_length=25, auto_reset=False)

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        after = env.step(state, action)
        cut = after.info["truncation"] > 0
        return after.obs, after.reward, (after.done > 0) & ~cut, cut

    check(env, own, report, "brax inverted_pendulum", "brax", 10, 1e-4)
    for wrapped in (envs.create("fast"), envs.create("fast", auto_reset=False, batch_size=4)):
        with pytest.raises(TypeError, match="auto_reset=False"):
            as_vector_env(wrapped, num_envs=4)


def test_navix(report: Any) -> None:
    navix = pytest.importorskip("navix")
    env = navix.make("Navix-Empty-5x5-v0", max_steps=20)

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        after = env._step(state, action)
        return after.observation, after.reward, after.step_type == 2, after.step_type == 1

    check(env, own, report, "navix Empty-5x5", "navix", 10, 0.0)


def test_jumanji(report: Any) -> None:
    jumanji = pytest.importorskip("jumanji")
    env = jumanji.make("Snake-v1", time_limit=20)

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        _, now = env.step(state, action)
        cut = now.last() & (now.discount != 0)
        return now.observation.grid, now.reward, now.last() & ~cut, cut

    adapted = as_vector_env(env, num_envs=E)
    states = record_states(adapted.source)
    start = time.perf_counter()
    adapted.reset(seed=0)
    adapted.step(adapted.action_space.sample())
    first = time.perf_counter() - start
    states.clear()
    batch = next(iter(Collector(adapted, frames_per_batch=E * T, seed=0)))
    assert audit(batch) == [] and set(batch.keys()) >= {"grid", "action_mask", "step_count_"}
    over = int(batch["next", "done"].sum())
    batch["next", "observation"] = batch["next", "grid"]
    false = count_false(batch, states, own, E)
    report(
        "jumanji Snake",
        "jumanji",
        mode="SAME_STEP",
        rows=len(batch),
        false=false,
        known=over,
        unknown=0,
        first_seconds=first,
    )
    assert false == 0 and over >= 5
    check_vector_env(adapted, steps=40)
