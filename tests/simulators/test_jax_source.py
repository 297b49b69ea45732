"""Pure JAX functions as an env: rows, memory, compilations, seeds, and the errors of functions that are not pure."""

from typing import Any

import numpy as np
import pytest
import torch
from gymnasium import spaces

from flatroll.layout import audit
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import FunctionalEnv, InitTracker, StepCounter, TrajId, as_functional, as_vector_env
from flatroll.wrappers.testing import check_vector_env

jax = pytest.importorskip("jax")
jnp = jax.numpy


def first(key: Any) -> tuple[Any, Any]:
    """An episode is a number; it lasts as many steps as the number says, and every third is cut."""
    episode = jax.random.randint(key, (), 1, 7)
    return jnp.stack([episode, 0]).astype(jnp.float32), {"episode": episode, "t": 0}


def after(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
    t = state["t"] + 1
    obs = jnp.stack([state["episode"], t]).astype(jnp.float32)
    over = t >= state["episode"]
    cut = over & (state["episode"] % 3 == 0)
    return obs, {"episode": state["episode"], "t": t}, action * 1.0, over & ~cut, cut, {"doubled": 2 * t}


COUNT = FunctionalEnv(first, after, spaces.Discrete(5), name="Count")


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_every_row_is_what_the_functions_say(framework: str) -> None:
    env = as_vector_env(COUNT, num_envs=8, framework=framework)
    batch = rollout(TrajId(InitTracker(env)), num_steps=40, seed=0, info_keys=["doubled"])
    episode, t = batch["observation"].unbind(-1)
    last, later = batch["next", "observation"].unbind(-1)
    assert len(batch) == 320
    assert (last == episode).all() and (later == t + 1).all()
    over = later >= episode
    assert (batch["next", "done"].squeeze(-1) == over).all() and over.sum() > 20
    assert (batch["next", "truncated"].squeeze(-1) == over & (episode % 3 == 0)).all()
    assert (batch["next", "reward"].squeeze(-1) == batch["action"]).all()
    assert (batch["is_init"].squeeze(-1) == (t == 0)).all()
    assert (batch["doubled"].squeeze(-1) == 2 * t).all() and (
        batch["next", "doubled"].squeeze(-1) == 2 * later
    ).all()
    assert audit(batch) == []
    check_vector_env(as_vector_env(COUNT, num_envs=8, framework=framework), steps=40)


def test_one_compiled_call_a_step_and_one_compilation_for_batches_of_any_length() -> None:
    traced = []

    def step(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        traced.append(1)
        return after(key, state, action)

    env = as_vector_env(FunctionalEnv(first, step, spaces.Discrete(5)), num_envs=4)
    source, calls = env.source, []
    compiled = source._step
    source._step = lambda *given: calls.append(1) or compiled(*given)
    before = len(traced)
    for frames in (4, 20, 7, 50):
        next(iter(Collector(env, frames_per_batch=frames)))
    assert compiled._cache_size() == 1 and len(traced) == before + 1
    assert len(calls) == 1 + 5 + 2 + 13  # 50 rows of 4 envs, and so on: each collector takes what it needs


def test_nothing_is_copied_on_the_way_out_or_in() -> None:
    def observe(key: Any) -> tuple[Any, Any]:
        return jax.random.uniform(key, (4096,)), key

    large = FunctionalEnv(
        observe,
        lambda key, state, action: (*observe(key), 0.0, state[0] % 2 == 0, False, {}),
        spaces.Box(-1, 1, (65_536,)),
    )
    # 128 KB of observations, 2 MB of actions: small ones are copied, which is faster.
    actions = torch.zeros(8, 65_536)
    for framework in ("numpy", "torch"):
        env = as_vector_env(large, num_envs=8, framework=framework)
        source = env.source.source if framework == "torch" else env.source
        env.reset(seed=0)
        obs, _, terminated, _, info = env.step(actions)
        assert terminated.any() and not terminated.all()
        for shown, kept in ((obs, source._obs), (info["final_obs"], source._final)):
            at = shown.data_ptr() if framework == "torch" else shown.ctypes.data
            assert at == kept.unsafe_buffer_pointer()
            shown[0] = 0  # may be written into
    assert source._take(actions.numpy()).unsafe_buffer_pointer() == actions.data_ptr()
    assert source._take(actions).unsafe_buffer_pointer() == actions.data_ptr()
    assert source._take(np.zeros(8, np.int64)).dtype == np.int32
    assert source._take(torch.zeros(8, dtype=torch.int64)).dtype == np.int32


def test_what_was_returned_may_be_written_into() -> None:
    # The state of this env is its observation, as in Gymnasium's phys2d.
    walk = FunctionalEnv(
        lambda key: (state := jax.random.uniform(key, (8192,)), state),  # not copied
        lambda key, state, action: (state + 1, state + 1, 0.0, state[0] > 5, False, {}),
        spaces.Discrete(2),
    )
    runs = []
    for spoils in (False, True):
        env, seen = as_vector_env(walk, num_envs=4), []
        obs, _ = env.reset(seed=3)
        for _ in range(20):
            seen.append(obs.copy())
            obs_, reward, terminated, _, info = env.step(np.zeros(4, np.int64))
            if spoils:
                obs[:], reward[:] = np.nan, np.nan
                if terminated.any():  # else they are the observations
                    info["final_obs"][:] = np.nan
            obs = obs_
        runs.append(np.stack(seen))
    assert np.array_equal(*runs) and np.isfinite(runs[0]).all()


def test_seeds() -> None:
    def run(seed: Any) -> Any:
        return rollout(as_vector_env(COUNT, num_envs=8), num_steps=10, seed=seed)["observation"]

    assert torch.equal(run(1), run(1)) and not torch.equal(run(1), run(2))
    env = as_vector_env(COUNT, num_envs=3)
    alike = env.reset(seed=[5, 5, 6])[0]
    assert (alike[0] == alike[1]).all()
    shown = env.reset()[0]
    assert not np.array_equal(shown, env.reset(seed=7)[0]) or not np.array_equal(shown, env.reset()[0])
    other, same = (as_vector_env(COUNT, num_envs=3) for _ in range(2))
    other.reset(seed=1)
    same.reset(seed=1)
    for _ in range(5):  # sources around the same functions have states of their own
        one, two = other.step([0, 0, 0]), same.step([0, 0, 0])
        assert np.array_equal(one[0], two[0])


def test_limits_and_masked_resets() -> None:
    env = as_vector_env(COUNT, num_envs=6)
    env.reset(seed=0)
    before = env.step(np.zeros(6, np.int64))[0].copy()
    mask = np.array([True, False] * 3)
    after_it = env.reset(options={"reset_mask": mask})[0]
    assert (after_it[mask, 1] == 0).all() and np.array_equal(after_it[~mask], before[~mask])
    limited = FunctionalEnv(first, after, spaces.Discrete(5), max_episode_steps=2)
    for env in (
        as_vector_env(limited, num_envs=6),
        StepCounter(as_vector_env(COUNT, num_envs=6), max_steps=2),
    ):
        batch = rollout(env, num_steps=30, seed=0)
        t, long = batch["next", "observation"][:, 1], batch["observation"][:, 0] > 2
        assert t.max() == 2 and (batch["next", "truncated"].squeeze(-1) >= (long & (t == 2))).all()
        assert audit(batch) == []


def test_trees_and_reserved_names() -> None:
    def observe(t: Any) -> Any:
        return {"step_count": t, "eye": (jnp.zeros((2, 2), jnp.uint8), t > 2), "key": jnp.zeros(3)}

    tree = FunctionalEnv(
        lambda key: (observe(0), (jnp.int32(0), jax.random.key(0))),
        lambda key, state, action: (
            observe(state[0] + 1), (state[0] + 1, jax.random.fold_in(state[1], 1)), 1.0, state[0] > 4, False, {}
        ),
        spaces.Dict(a=spaces.Discrete(2), b=spaces.Box(-1, 1, (2,))),
    )  # fmt: skip
    env = as_vector_env(tree, num_envs=3)
    check_vector_env(env, steps=30)
    assert set(env.single_observation_space.spaces) == {"step_count_", "eye", "key"}
    assert ("eye", "1") in rollout(env, num_steps=9).keys(True)


def bad(**changed: Any) -> FunctionalEnv:
    return FunctionalEnv(**{"reset": first, "step": after, "action_space": spaces.Discrete(5), **changed})


def if_on_a_value(key: Any, state: Any, action: Any) -> tuple[Any, ...]:
    return after(key, state, action if state["t"] > 2 else 0)


class Counts:
    """Not pure: the functions remember."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, key: Any, state: Any, action: Any) -> tuple[Any, ...]:
        self.steps += 1
        obs, state, reward, terminated, truncated, info = after(key, state, action)
        return obs, state, reward, terminated, truncated | (self.steps > 10), info


@pytest.mark.parametrize(
    ("env", "text"),
    [
        (bad(step=if_on_a_value), r"step of .* must be a pure JAX function, step\(key.*\n.*jax.lax.cond"),
        (bad(step=lambda state, action: after(0, state, action)), r"step\(key, state, action\) -> "),
        (bad(step=Counts().step), "whose steps changes with each call: keep what changes in the state"),
        (
            bad(step=lambda k, s, a: after(k, s, a + np.random.randint(9))),
            "whose result changes with each call",
        ),
        (bad(reset=lambda key: first(key)[0]), r"reset\(key\) -> \(observation, state\)"),
        (bad(step=lambda k, s, a: after(k, s, a)[:5]), "got 5 values"),
        (
            bad(step=lambda k, s, a: (after(k, s, a)[0], s["t"], 0.0, False, False, {})),
            r"state of the structure .* returns, \(\) at \['episode'\], got none$",
        ),
        (bad(step=lambda k, s, a: (s["t"], *after(k, s, a)[1:])), "observation of the structure and shapes"),
        (
            bad(step=lambda k, s, a: (*after(k, s, a)[:2], jnp.zeros(2), False, False, {})),
            "reward .* one number",
        ),
        (bad(step=lambda k, s, a: (*after(k, s, a)[:5], 3)), "info of .* must be a dict"),
        (bad(action_space=object()), "action_space must be a Gymnasium space"),
        (bad(observation_space=spaces.Box(0, 1, (3,))), "observation_space of .* shapes and dtypes"),
    ],
)
def test_functions_that_are_not_what_they_must_be(env: FunctionalEnv, text: str) -> None:
    with pytest.raises(TypeError, match=text):
        as_vector_env(env, num_envs=2)


def test_arguments() -> None:
    with pytest.raises(TypeError, match=r"num_envs is needed.*as_vector_env\(env, num_envs="):
        Collector(COUNT, frames_per_batch=4)
    with pytest.raises(ValueError, match="num_envs must be an integer"):
        as_vector_env(COUNT, num_envs=0)
    with pytest.raises(ValueError, match="always 'SameStep'"):
        as_vector_env(COUNT, num_envs=2, autoreset_mode="NextStep")
    with pytest.raises(TypeError, match=r"FunctionalEnv\(reset, step, \.\.\.\)"):
        as_functional(object())
    env = as_vector_env(COUNT, num_envs=2, device="cpu")
    env.reset(seed=0)
    with pytest.raises(ValueError, match=r"actions must have shape \(2,\)"):
        env.step([0, 0, 0])
    with pytest.raises(TypeError, match="actions must be castable to int64"):
        env.step([0.5, 0.5])
    with pytest.raises(ValueError, match=r"actions must lie in \[0, 4\]"):  # JAX itself would clamp it
        env.step([0, 7])


def test_jax_s_own_switch_finds_what_is_not_finite() -> None:
    nan = FunctionalEnv(
        lambda key: (jnp.ones(2), jnp.float32(1)),
        lambda key, state, action: (jnp.ones(2) * jnp.log(state), state - 1, 0.0, False, False, {}),
        spaces.Discrete(2),
    )
    env = as_vector_env(nan, num_envs=2)
    env.reset(seed=0)
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        for _ in range(4):
            env.step([0, 0])
