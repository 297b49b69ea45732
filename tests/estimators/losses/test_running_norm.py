"""Networks behind a `RunningNorm` in losses: all copies that a loss makes see the owner's statistics."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.estimators import DQNLoss, SACLoss, SoftUpdate
from flatroll.modules import RunningNorm
from flatroll.rollouts import Collector
from flatroll.wrappers.testing import Script, make_scripted

SCRIPT = Script(3, lengths=[[3, 5, 1], [2, 4], [7]], action="box")


class Gaussian(Independent):  # type: ignore[type-arg]
    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale), 1)


class Head(nn.Linear):
    """A mean and a deviation."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        loc, scale = super().forward(x).chunk(2, -1)
        return loc, scale.exp()


class Joined(nn.Linear):
    """A value of an observation and an action."""

    def forward(self, x: Tensor, action: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([x, action], -1))


def agent(norm: RunningNorm) -> tuple[Any, Any]:
    torch.manual_seed(0)
    sampler = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=Gaussian, return_log_prob=True
    )
    head = TensorDictModule(Head(3, 4), [norm.out_key], ["loc", "scale"])
    critic = TensorDictModule(Joined(5, 1), [norm.out_key, "action"], ["state_action_value"])
    return ProbabilisticTensorDictSequential(norm, head, sampler), TensorDictSequential(norm, critic)


@pytest.mark.filterwarnings("ignore:actions must lie")  # the policy is not bounded
@pytest.mark.parametrize("compact", [False, True])
def test_soft_actor_critic_with_a_buffer_of_raw_rows(compact: bool) -> None:
    """Losses of raw rows behind the norm are those of bare networks on normalised rows, before and after updates."""
    norm = RunningNorm("observation", shape=(3,))
    actor, critic = agent(norm)
    loss = SACLoss(actor, critic)
    updater = SoftUpdate(loss, tau=0.1)
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    buffer = ReplayBuffer(storage=LazyTensorStorage(300, compact_obs=compact), batch_size=32)
    collector = Collector(
        make_scripted(SCRIPT), actor, frames_per_batch=30, total_frames=150, compact_obs=compact
    )
    for batch in collector:
        norm.update(batch, final=collector.final)
        buffer.extend(batch, final=collector.final) if compact else buffer.extend(batch)
        assert buffer[:].get("observation_norm", None) is None
        sample = buffer.sample()
        bare = copy.deepcopy(loss)
        for part in bare.modules():  # the same networks on rows that are normalised already
            if isinstance(part, RunningNorm):
                part.statistics.mean.zero_(), part.statistics.var.fill_(1.0 - norm.epsilon)
        by_hand = sample.clone()
        for key in ("observation", ("next", "observation")):
            by_hand[key] = norm(observation=sample[key].float())
        torch.manual_seed(1)
        losses = loss(sample)
        torch.manual_seed(1)
        expected = bare(by_hand)
        for name in ("loss_actor", "loss_qvalue"):
            torch.testing.assert_close(losses[name], expected[name], rtol=1e-4, atol=1e-5)
        optimizer.zero_grad()
        (losses["loss_actor"] + losses["loss_qvalue"] + losses["loss_alpha"]).backward()
        optimizer.step()
        updater.step()
    owners = {id(part.statistics) for part in loss.modules() if isinstance(part, RunningNorm)}
    assert owners == {id(norm.statistics)} and norm.statistics.count > 150


def test_delayed_copies_share_the_statistics_and_not_the_weights() -> None:
    norm = RunningNorm("observation", shape=(3,))
    net = TensorDictSequential(norm, TensorDictModule(nn.Linear(3, 5), [norm.out_key], ["action_value"]))
    loss = DQNLoss(net, delay_value=True)
    norm.update(TensorDict({"observation": torch.randn(20, 3)}, [20]))
    target: Any = loss.target_value_network
    assert target[0].statistics is norm.statistics and target[1].module.weight is not net[1].module.weight
    updater = SoftUpdate(loss, tau=0.5)
    before = norm.statistics.mean.clone()
    updater.step()
    assert norm.statistics.mean.equal(before) and norm.statistics.count == 20
    state = loss.state_dict()
    loss.load_state_dict(state)
