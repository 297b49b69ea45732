"""TorchRL's losses and buffers read flat batches as they are; `specs` says what their rows hold."""

import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # importing it warns about packages that are not there
    pytest.importorskip("torchrl")
    from torchrl import objectives
    from torchrl.data import LazyTensorStorage, SliceSampler, TensorDictReplayBuffer
    from torchrl.modules import QValueActor, TanhNormal, ValueOperator
    from torchrl.objectives.value import GAE

from flatroll.layout import run_ends, run_starts
from flatroll.rollouts import Collector
from flatroll.trainers.torchrl import spec_of, specs
from flatroll.wrappers import StepCounter
from flatroll.wrappers.testing import Script, make_scripted


def pendulum() -> Any:
    return gym.make_vec("Pendulum-v1", 3, "sync", max_episode_steps=7)


def cartpole() -> Any:
    return gym.make_vec("CartPole-v1", 3, "sync", max_episode_steps=7)


def continuous_actor() -> Any:
    body = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor())
    draw: Any = ProbabilisticTensorDictModule(
        ["loc", "scale"],
        ["action"],
        distribution_class=TanhNormal,
        distribution_kwargs={"low": -2.0, "high": 2.0},
        return_log_prob=True,
        default_interaction_type="random",
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(body, ["observation"], ["loc", "scale"]), draw)


def discrete_actor() -> Any:
    draw: Any = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["logits"]), draw
    )


def deterministic_actor() -> Any:
    return TensorDictModule(nn.Linear(3, 1), ["observation"], ["action"])


def state_value(size: int) -> Any:
    return ValueOperator(nn.Linear(size, 1))


class OfPair(nn.Module):
    """The value of an observation and an action."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        value: Tensor = self.layer(torch.cat([observation, action], -1))
        return value


def action_value() -> Any:
    return ValueOperator(OfPair(), in_keys=["observation", "action"])


BOUNDS = {"action_spec": spec_of(spaces.Box(-2.0, 2.0, (1,)))}
CONTINUOUS: dict[str, Callable[[], Any]] = {
    "SAC": lambda: objectives.SACLoss(continuous_actor(), action_value(), **BOUNDS),
    "TD3": lambda: objectives.TD3Loss(deterministic_actor(), action_value(), **BOUNDS),
    "DDPG": lambda: objectives.DDPGLoss(deterministic_actor(), action_value()),
    "CQL": lambda: objectives.CQLLoss(continuous_actor(), action_value(), **BOUNDS),
    "IQL": lambda: objectives.IQLLoss(continuous_actor(), action_value(), state_value(3)),
    "REDQ": lambda: objectives.REDQLoss(continuous_actor(), action_value(), **BOUNDS),
    "CrossQ": lambda: objectives.CrossQLoss(continuous_actor(), action_value(), **BOUNDS),
    "BC": lambda: objectives.BCLoss(continuous_actor()),
}
DISCRETE: dict[str, Callable[[], Any]] = {
    "ClipPPO": lambda: objectives.ClipPPOLoss(discrete_actor(), state_value(4)),
    "A2C": lambda: objectives.A2CLoss(discrete_actor(), state_value(4)),
    "REINFORCE": lambda: objectives.ReinforceLoss(discrete_actor(), state_value(4)),
    "DQN": lambda: objectives.DQNLoss(
        QValueActor(nn.Linear(4, 2), in_keys=["observation"], action_space="categorical"),
        action_space="categorical",
        delay_value=False,
    ),
    "DiscreteSAC": lambda: objectives.DiscreteSACLoss(
        discrete_actor(),
        TensorDictModule(nn.Linear(4, 2), ["observation"], ["action_value"]),
        action_space="categorical",
        num_actions=2,
    ),
}


def backpropagate(loss: Any, batch: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of target networks that are not updated here, and the like
        values = loss(batch)
        total = sum(values[name].sum() for name in list(values.keys()) if name.startswith("loss"))
        total.backward()
    gradients = [parameter.grad for parameter in loss.parameters() if parameter.grad is not None]
    assert gradients
    assert all(bool(gradient.isfinite().all()) for gradient in gradients)
    assert any(bool(gradient.any()) for gradient in gradients)


def built(make: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        return make()


@pytest.mark.parametrize("name", CONTINUOUS)
def test_a_continuous_loss_reads_a_batch(name: str) -> None:
    actor = continuous_actor()
    batch = next(Collector(pendulum(), actor, frames_per_batch=30, set_truncated=True, seed=0))
    backpropagate(built(CONTINUOUS[name]), batch)


@pytest.mark.parametrize("name", DISCRETE)
def test_a_discrete_loss_reads_a_batch(name: str) -> None:
    batch = next(Collector(cartpole(), discrete_actor(), frames_per_batch=30, set_truncated=True, seed=0))
    if name in ("ClipPPO", "A2C", "REINFORCE"):
        GAE(gamma=0.99, lmbda=0.95, value_network=state_value(4))(batch)
    backpropagate(built(DISCRETE[name]), batch)


def test_torchrl_buffers_take_batches_and_slice_them_by_trajectory() -> None:
    env = StepCounter(make_scripted(Script(2, lengths=[[3, 6], [5, 2]]), autoreset_mode="Disabled"))
    sampler = SliceSampler(slice_len=4, traj_key=("collector", "traj_ids"), strict_length=False)
    buffer = TensorDictReplayBuffer(storage=LazyTensorStorage(64), sampler=sampler, batch_size=16)
    for batch in Collector(env, frames_per_batch=32, total_frames=64, seed=0):
        # The second window goes on with trajectories of the first, which are no neighbours in this buffer.
        ends = run_ends(batch)
        batch["run"] = run_starts(batch).cumsum(0) + 1000 * int(batch["step_count"].sum())
        assert ends[-1]
        buffer.extend(batch)
    for _ in range(10):
        sample = buffer.sample()
        ids, steps = sample["collector", "traj_ids"], sample["step_count"].flatten()
        inside = (ids[1:] == ids[:-1]) & ~sample["next", "truncated"].flatten()[:-1]
        assert (steps[1:] == steps[:-1] + 1)[inside].all()


def test_specs_describe_the_rows_of_a_batch() -> None:
    for obs in ("float32", "uint8", "int64", "dict"):
        for action in ("discrete", "box", "dict"):
            env = make_scripted(Script(2, obs=obs, action=action))  # type: ignore[arg-type]
            found = specs(env)
            batch = next(Collector(env, frames_per_batch=10))
            roots = batch.select(*found.keys(True, True))
            for row in roots.unbind(0):
                assert found.is_in(row), (obs, action)


def test_spec_of_spaces() -> None:
    assert spec_of(spaces.Discrete(4)).n == 4
    assert spec_of(spaces.MultiBinary(3)).shape == torch.Size([3])
    assert spec_of(spaces.MultiDiscrete([2, 5])).rand().shape == torch.Size([2])
    box = spec_of(spaces.Box(-1.0, 2.0, (2,)))
    assert (box.low.tolist(), box.high.tolist()) == ([-1.0, -1.0], [2.0, 2.0])
    assert not hasattr(spec_of(spaces.Box(-1.0, float("inf"), (2,))).space, "minimum")
    with pytest.raises(TypeError, match=r"start at 0, got Discrete\(4, start=1\)"):
        spec_of(spaces.Discrete(4, start=1))
    with pytest.raises(TypeError, match="TorchRL has no spec for Text"):
        spec_of(spaces.Text(3))
