"""Networks read the entries that ``in_keys`` names, and no others."""

from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.estimators import GAE, ClipPPOLoss, DQNLoss, SACLoss
from flatroll.modules import actor, critic, q_network, update_norms
from flatroll.rollouts import Collector
from flatroll.wrappers import as_vector_env

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
GROUPS = spaces.Dict(
    policy=VECTOR,
    critic=spaces.Dict(height=spaces.Box(-1, 1, (2,), np.float32), contact=spaces.Discrete(3)),
    action_mask=spaces.MultiBinary(2),
)


class Robot(gym.Env[Any, Any]):
    """Its critic knows more than its policy; the first action is always legal."""

    observation_space = GROUPS

    def __init__(self, action: "spaces.Space[Any]") -> None:
        self.action_space = action
        self.at = 0

    def observe(self) -> dict[str, Any]:
        seen: dict[str, Any] = self.observation_space.sample()
        seen["action_mask"] = np.array([1, self.at % 2], np.int8)
        return seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.at = 0
        return self.observe(), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return self.observe(), float(self.at), False, self.at == 5, {}


def robots(action: "spaces.Space[Any] | None" = None) -> Any:
    return gym.vector.SyncVectorEnv([partial(Robot, action or spaces.Discrete(2))] * 4)


def rows(count: int = 6) -> TensorDict:
    return TensorDict(
        {
            "policy": torch.randn(count, 3),
            "critic": {"height": torch.randn(count, 2), "contact": torch.randint(3, (count,))},
            "action_mask": torch.ones(count, 2, dtype=torch.bool),
        },
        [count],
    )


def read_by(network: Any) -> set[Any]:
    """The entries that a network reads and does not write itself."""
    made = {key for part in network.module for key in part.out_keys}
    return {key for key in network.in_keys if key not in made}


def test_an_actor_runs_without_what_it_is_not_told_to_read() -> None:
    policy = actor(robots(), in_keys=["policy"])
    assert read_by(policy) == {"policy", "action_mask"}
    assert policy(rows().exclude("critic"))["action"].shape == (6,)  # as on a robot
    assert read_by(actor(robots())) == {"policy", ("critic", "height"), ("critic", "contact"), "action_mask"}


@pytest.mark.parametrize(
    ("in_keys", "read"),
    [
        (["policy", "critic"], {"policy", ("critic", "height"), ("critic", "contact")}),
        ([("critic", "height")], {("critic", "height")}),
        ((("critic", "height"), "policy"), {"policy", ("critic", "height")}),
    ],
)
def test_a_critic_may_read_more_or_less_than_its_actor(in_keys: Any, read: set[Any]) -> None:
    policy = actor(robots(), in_keys=["policy"])
    value = critic(robots(), in_keys=in_keys, actor=policy)
    assert read_by(value) == read
    assert value(rows())["state_value"].shape == (6, 1)
    if "policy" in read:
        shared = [part for part in value.module if part in list(policy.module)]
        assert [norm.in_key for norm in shared] == ["policy"]


def test_entries_are_read_in_the_order_that_is_given() -> None:
    torch.manual_seed(0)
    first = critic(robots(), in_keys=["policy", ("critic", "height")], norm=False)
    torch.manual_seed(0)
    second = critic(robots(), in_keys=[("critic", "height"), "policy"], norm=False)
    weight = next(first.parameters())
    with torch.no_grad():
        next(second.parameters()).copy_(torch.cat([weight[:, 3:], weight[:, :3]], 1))
    batch = rows()
    torch.testing.assert_close(first(batch.clone())["state_value"], second(batch.clone())["state_value"])


@pytest.mark.parametrize("recurrent", [None, "gru"])
def test_an_actor_trains_beside_a_privileged_critic(recurrent: Any) -> None:
    env = robots()
    policy = actor(env, in_keys=["policy"], recurrent=recurrent)
    value = critic(env, in_keys=["policy", "critic"], actor=policy)
    batch = next(Collector(env, policy, frames_per_batch=40, seed=0))
    assert ("critic", "height") in batch.keys(True)

    loss = ClipPPOLoss(policy, value)
    losses = loss(GAE(gamma=0.9, lmbda=0.9, value_network=value)(batch))
    (losses["loss_objective"] + losses["loss_critic"]).backward()
    assert all(weight.grad is not None for weight in value.parameters())

    update_norms(loss, batch)  # those of both, the shared ones once
    counts = {
        part.in_key: float(part.statistics.count) for part in value.module if hasattr(part, "statistics")
    }
    assert counts.keys() == {"policy", ("critic", "height")} and len({*counts.values()}) == 1


def test_networks_of_action_values_read_what_they_are_told() -> None:
    env = robots()
    net = q_network(env, in_keys=["policy"])
    batch = next(Collector(env, net, frames_per_batch=40, seed=0))
    DQNLoss(net)(batch)["loss"].backward()
    assert read_by(net) == {"policy", "action_mask"}

    moving = robots(spaces.Box(-1, 1, (2,), np.float32))
    policy = actor(moving, in_keys=["policy"], std="dependent", action_mask=False)
    rated = q_network(moving, in_keys=["policy", "critic"])
    assert read_by(rated) == {"policy", ("critic", "height"), ("critic", "contact"), "action"}
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=16)
    buffer.extend(next(Collector(moving, policy, frames_per_batch=64, seed=0)))
    assert SACLoss(policy, rated)(buffer.sample())["loss_qvalue"].isfinite()


class Trainer:
    """The interface of rsl_rl's VecEnv: observations come in groups, which a configuration gives to networks."""

    num_envs = 4
    num_actions = 2
    max_episode_length = 5
    device = "cpu"

    def __init__(self) -> None:
        self.at = torch.zeros(4, dtype=torch.int64)

    def get_observations(self) -> TensorDict:
        at = self.at[:, None].float()
        return TensorDict({"policy": at.expand(4, 3), "height": 10 * at}, [4])

    def step(self, actions: torch.Tensor) -> Any:
        self.at += 1
        done = self.at == 5
        self.at[done] = 0
        return self.get_observations(), torch.ones(4), done.long(), {"time_outs": done}


def test_the_groups_of_rsl_rl_are_in_keys() -> None:
    groups = {"actor": ["policy"], "critic": ["policy", "height"]}
    env = as_vector_env(Trainer(), autoreset_mode="SameStep")  # type: ignore[arg-type]
    policy = actor(env, in_keys=groups["actor"])
    value = critic(env, in_keys=groups["critic"], actor=policy)
    assert read_by(policy) == {"policy"} and read_by(value) == {"policy", "height"}
    batch = next(Collector(env, policy, frames_per_batch=16))
    assert value(batch)["state_value"].shape == (16, 1)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: actor(robots(), in_keys=["privileged"]),
            ValueError,
            r"in_keys names 'privileged', which the observation does not have: its entries are \['policy', \('critic'",
        ),
        (
            lambda: actor(robots(), in_keys="policy"),
            TypeError,
            r"got the string 'policy': write \['policy'\]",
        ),
        (lambda: actor(robots(), in_keys=[3]), TypeError, "in_keys must be a list of keys"),  # type: ignore[list-item]
        (lambda: critic(robots(), in_keys=[]), ValueError, r"in_keys must name an entry, got \[\]"),
        (
            lambda: critic(robots(), in_keys=["critic", ("critic", "height")]),
            ValueError,
            r"in_keys names \('critic', 'height'\) twice",
        ),
        (
            lambda: q_network(robots(), in_keys=["policy", "action_mask"]),
            ValueError,
            "in_keys names 'action_mask', the mask of the actions, which is read besides: leave it out",
        ),
        (
            lambda: critic(robots(), in_keys=["policy"], actor=actor(robots()), shared=True),
            ValueError,
            "needs a body of the critic's own, but shared=True takes the actor's",
        ),
    ],
)
def test_bad_input(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()
