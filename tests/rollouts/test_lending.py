"""What a collector lends to the env's stack is lent for its own steps only."""

from typing import Any

import gymnasium as gym
import pytest

from flatroll.rollouts import Collector
from flatroll.wrappers import StepCounter, TrajId, as_vector_env, find_stream
from flatroll.wrappers.stream import NOTHING_LENT, Lending, VectorStream


class Remembers(gym.Wrapper[Any, Any, Any, Any]):
    """Notes what is lent in each step; the step with number `fails` raises."""

    fails = -1

    def __init__(self) -> None:
        super().__init__(gym.make("CartPole-v1"))
        self.seen: list[Lending] = []
        self.stream: VectorStream | None = None

    def step(self, action: Any) -> Any:
        assert self.stream is not None
        self.seen.append(self.stream.lending)
        if len(self.seen) == self.fails:
            raise RuntimeError("broken")
        return super().step(action)


def watched() -> tuple[Remembers, Any]:
    base = Remembers()
    env = TrajId(StepCounter(as_vector_env(base)))
    base.stream = find_stream(env)
    return base, env


def test_random_actions_are_lent_and_drawn() -> None:
    base, env = watched()
    next(iter(Collector(env, frames_per_batch=4)))
    assert {*base.seen} == {Lending(arrays=True, markers=True, drawn=True)}
    assert base.stream is not None
    assert base.stream.lending is NOTHING_LENT
    assert not (base.stream.may_alias or base.stream.may_alias_markers or base.stream.drawn)


def test_an_unknown_wrapper_may_keep_the_arrays() -> None:
    base, env = watched()
    next(iter(Collector(gym.vector.VectorWrapper(env), frames_per_batch=4)))
    assert {*base.seen} == {NOTHING_LENT}


def test_nothing_is_lent_after_a_step_that_failed() -> None:
    base, env = watched()
    base.fails = 3
    with pytest.raises(RuntimeError, match="broken"):
        next(iter(Collector(env, frames_per_batch=4)))
    assert base.stream is not None
    assert base.stream.lending is NOTHING_LENT
    env.reset()
    env.step([0])
    assert base.seen[-1] is NOTHING_LENT
