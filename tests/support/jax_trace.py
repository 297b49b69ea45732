"""The states of JAX simulators before each step, and a simulator's own steps from them, beside the rows of a batch."""

from collections.abc import Callable
from typing import Any

import numpy as np
from traces import Counts, assert_same

from flatroll.layout import audit
from flatroll.rollouts import Collector
from flatroll.wrappers.testing import check_vector_env


def check_simulator(
    env: Any,  # adapted
    report: Any,  # the fixture, of which env is
    name: str,
    package: str,
    count: Callable[
        [Any, list[Any]], int
    ],  # of a batch and the states before its steps: how many rows are false
    *,
    steps: int,
    ends: int,  # at least so many in a batch
) -> Any:
    """Check every row of a batch, the contract, and a second run from one seed; return the batch."""
    states = record_states(env.source)
    batches = []
    for _ in range(2):
        states.clear()
        batches.append(next(iter(Collector(env, frames_per_batch=env.num_envs * steps, seed=0))))
    batch, again = batches
    counts = Counts(len(batch), count(batch, states), int(batch["next", "done"].sum()))
    report.add(name, package, "SameStep", counts)
    assert counts.false == 0 and counts.known >= ends and audit(batch) == []
    assert_same(batch, again)
    assert env.source._step._cache_size() == 1
    check_vector_env(env, steps=40)
    return batch


def record_states(source: Any) -> list[Any]:
    """A list that gets the states of all envs before each step of a source."""
    states: list[Any] = []
    step = source._step

    def recorded(key: Any, state: Any, actions: Any) -> Any:
        states.append(state[0])
        return step(key, state, actions)

    recorded._cache_size = step._cache_size  # type: ignore[attr-defined]
    source._step = recorded
    return states


def count_false(
    batch: Any,  # of whole vector steps, env after env
    states: list[Any],  # before each of them
    own: Callable[
        [Any, Any], tuple[Any, ...]
    ],  # (state, action) -> observation, reward, terminated, truncated
    num_envs: int,
    atol: float = 1e-5,
    key: str = "observation",  # of what the first of these is
) -> int:
    """How many rows differ from the simulator's own step of the same state with the same action."""
    import jax

    step = jax.jit(jax.vmap(own))
    rows = np.arange(len(batch)).reshape(num_envs, -1)  # [E, T]
    wrong = np.zeros(len(batch), bool)
    for t, state in enumerate(states):
        at = rows[:, t]
        action = batch["action"][at].numpy()
        obs, reward, terminated, truncated = step(state, action)
        pairs = [(obs, batch["next", key][at]), (reward, batch["next", "reward"][at].squeeze(-1))]
        if terminated is not None:
            pairs.append((terminated, batch["next", "terminated"][at].squeeze(-1)))
            pairs.append((truncated, batch["next", "truncated"][at].squeeze(-1)))
        for theirs, ours in pairs:
            close = np.isclose(np.asarray(theirs, np.float64), ours.double().numpy(), atol=atol, rtol=1e-5)
            wrong[at] |= ~close.reshape(num_envs, -1).all(1)
    return int(wrong.sum())
