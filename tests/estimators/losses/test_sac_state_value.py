"""The first version of SAC, with a network of state values, against a reference in float64."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Independent, Normal

from flatroll.estimators import HardUpdate, SACLoss, SoftUpdate

ROWS, ALPHA, GAMMA = 10, 0.2, 0.9


class OneSigma(Independent):
    """A Gaussian that always draws the point one deviation above its mean."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale), 1)

    def rsample(self, sample_shape: Any = ()) -> Tensor:
        return self.mean + self.stddev


class StateAction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(5, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.net(torch.cat([observation, action], -1)).tanh()


def made(**options: Any) -> tuple[SACLoss, TensorDict]:
    torch.manual_seed(0)
    loc = TensorDictModule(nn.Linear(3, 2), ["observation"], ["loc"])
    spread = TensorDictModule(lambda x: torch.full_like(x, 0.5), ["loc"], ["scale"])
    draw = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=OneSigma)
    actor = ProbabilisticTensorDictSequential(loc, spread, draw)
    qvalue = TensorDictModule(StateAction(), ["observation", "action"], ["state_action_value"])
    value = TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"])
    loss = SACLoss(actor, qvalue, value, alpha_init=ALPHA, loss_function="l2", **options).double()
    for parameter in loss.parameters():  # the copies differ from what they are copies of
        if not parameter.requires_grad:
            parameter.add_(0.1)
    end = torch.rand(ROWS, 1) < 0.3
    batch: dict[str, Any] = {
        "observation": torch.randn(ROWS, 3).double(),
        "action": torch.randn(ROWS, 2).double(),
        "next": {
            "observation": torch.randn(ROWS, 3).double(),
            "reward": torch.randn(ROWS, 1).double(),
            "terminated": end,
            "done": end,
        },
    }
    return loss.make_value_estimator(gamma=GAMMA), TensorDict(batch, [ROWS])


@pytest.mark.parametrize("delayed", [True, False])
def test_equals_the_reference(delayed: bool) -> None:
    loss, batch = made(delay_value=delayed, delay_qvalue=delayed, delay_actor=delayed)
    out = loss(batch)
    seen, action, after = batch["observation"], batch["action"], batch["next"]
    prefix = "target_" if delayed else ""
    actor, critics, value = (
        getattr(loss, prefix + name) for name in ("actor_network", "qvalue_network", "value_network")
    )
    with torch.no_grad():
        draw = actor[0].module(seen) + 0.5
        log_prob = Normal(draw - 0.5, 0.5).log_prob(draw).sum(-1, keepdim=True)
        worst = torch.stack([q.module(seen, draw) for q in critics]).amin(0)
        of_states = (loss.value_network.module(seen) - worst + ALPHA * log_prob).square().mean()
        target = after["reward"] + GAMMA * value.module(after["observation"]) * ~after["terminated"]
        errors = torch.stack([q.module(seen, action) - target for q in loss.qvalue_network])
    torch.testing.assert_close(out["loss_value"], of_states)
    torch.testing.assert_close(out["loss_qvalue"], errors.square().sum(0).mean())
    torch.testing.assert_close(batch["td_error"], errors.abs().amax(0).squeeze(-1))
    assert set(out.keys()) == set(loss.out_keys) and ("next", "observation") in loss.in_keys


def test_each_loss_moves_its_own_network() -> None:
    loss, batch = made()
    own = {
        "loss_value": loss.value_network,
        "loss_qvalue": loss.qvalue_network,
        "loss_actor": loss.actor_network,
    }
    for name, network in own.items():
        loss.zero_grad()
        loss(batch)[name].backward()
        moved = {p for p in loss.parameters() if p.grad is not None and p.grad.any()}
        assert moved == set(network.parameters()), name


def test_updaters_move_the_copy() -> None:
    loss, _ = made()
    copy, net = loss.target_value_network.module.weight, loss.value_network.module.weight
    wanted = 0.5 * copy + 0.5 * net.detach()
    SoftUpdate(loss, tau=0.5).step()
    torch.testing.assert_close(copy, wanted)
    HardUpdate(loss, value_network_update_interval=1).step()
    torch.testing.assert_close(copy, net.detach())


def test_without_any_copy_the_error_names_every_flag() -> None:
    loss, _ = made(delay_value=False, delay_qvalue=False)
    with pytest.raises(ValueError, match=r"delay_value=True .*delay_qvalue=True or delay_actor=True"):
        SoftUpdate(loss, tau=0.5)


def test_what_the_network_writes() -> None:
    loss, batch = made()
    loss.set_keys(value="worth")
    with pytest.raises(KeyError, match=r"value_network wrote no entry 'worth'.*set_keys\(value=...\)"):
        loss(batch)
    with pytest.raises(TypeError, match=r"value_network must be a tensordict module.*got Linear"):
        SACLoss(loss.actor_network, loss.qvalue_network, nn.Linear(3, 1))  # type: ignore[arg-type]


def test_arguments_of_public_scripts_that_change_nothing() -> None:
    (plain, batch), (named, _) = (
        made(),
        made(action_spec=object(), skip_done_states=True, deactivate_vmap=True),
    )
    torch.testing.assert_close(plain(batch)["loss_qvalue"], named(batch)["loss_qvalue"])
