"""A profiler's trace shows where a training loop spends its time; without one nothing is recorded."""

from collections import Counter
from typing import Any

import gymnasium as gym
import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.layout.profiling import call_in_range
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector, rollout


def loop(policy: Any) -> None:
    """Two batches of 8 steps of 4 envs; two samples and one pass in two minibatches of each."""
    env = gym.make_vec("CartPole-v1", num_envs=4)
    value = critic(env)
    loss = ClipPPOLoss(actor(env), value)
    step = update_step(loss, torch.optim.SGD(loss.parameters(), lr=1e-3))
    gae = GAE(gamma=0.9, lmbda=0.9, value_network=value)
    buffer = ReplayBuffer(storage=LazyTensorStorage(32), batch_size=16)
    for batch in Collector(env, policy, frames_per_batch=32, total_frames=64, seed=0):
        if batch.get("action_log_prob", None) is None:
            batch["action_log_prob"] = torch.zeros(32)
        buffer.extend(gae(batch))
        for _ in range(2):
            step(buffer.sample())
        step.epochs(buffer[:], epochs=1, minibatch=16)


def ranges_of(policy: Any) -> Counter[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        loop(policy)
    names = (event.name for event in profiler.events())
    return Counter(name.removeprefix("flatroll.") for name in names if name.startswith("flatroll."))


def push_left(obs: torch.Tensor) -> torch.Tensor:
    return torch.zeros(len(obs), dtype=torch.int64)


@pytest.mark.parametrize("policy", [actor(gym.make_vec("CartPole-v1", num_envs=4)), push_left])
def test_a_trace_names_the_parts_of_a_loop(policy: Any) -> None:
    found = ranges_of(policy)
    assert found["policy"] == found["env_step"] >= 16  # and the steps that only reset
    del found["policy"], found["env_step"]
    assert found == {"collector": 2, "extend": 2, "sample": 4, "update": 8}


def test_nothing_is_recorded_without_a_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str) -> None:
        raise AssertionError(name)

    monkeypatch.setattr(torch.profiler, "record_function", refuse)
    loop(actor(gym.make_vec("CartPole-v1", num_envs=4)))


def test_rows_are_the_same_with_a_profiler() -> None:
    env = gym.make_vec("CartPole-v1", num_envs=4)
    policy = actor(env)
    torch.manual_seed(0)
    plain = rollout(env, policy, num_steps=20, seed=0)
    torch.manual_seed(0)
    with profile(activities=[ProfilerActivity.CPU]):
        profiled = rollout(env, policy, num_steps=20, seed=0)
    assert (plain == profiled).all()


def test_an_error_goes_through() -> None:
    with profile(activities=[ProfilerActivity.CPU]), pytest.raises(ZeroDivisionError):
        call_in_range("nothing", divmod, 1, 0)
