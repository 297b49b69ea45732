"""Padding may hold anything: no number of it reaches a loss, a gradient or a priority."""

import math
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from flatroll.estimators import (
    A2CLoss,
    ClipPPOLoss,
    DiscreteSACLoss,
    DQNLoss,
    PPOLoss,
    ReinforceLoss,
    SACLoss,
)

ROWS, REAL = 12, 8


def module(net: nn.Module, reads: list[str], writes: list[str]) -> TensorDictModule:
    return TensorDictModule(net, in_keys=reads, out_keys=writes)


def actor(continuous: bool = False) -> ProbabilisticTensorDictSequential:
    keys = ["loc", "scale"] if continuous else ["logits"]
    net = nn.Sequential(nn.Linear(3, 2), NormalParamExtractor()) if continuous else nn.Linear(3, 2)
    kind = Normal if continuous else Categorical
    head = ProbabilisticTensorDictModule(keys, ["action"], distribution_class=kind)
    return ProbabilisticTensorDictSequential(module(net, ["observation"], keys), head)


def critic() -> TensorDictModule:
    return module(nn.Linear(3, 1), ["observation"], ["state_value"])


def values() -> TensorDictModule:
    return module(nn.Linear(3, 2), ["observation"], ["action_value"])


LOSSES: dict[str, Any] = {
    "ppo": lambda: PPOLoss(actor(), critic()),
    "clipped ppo": lambda: ClipPPOLoss(actor(), critic(), normalize_advantage=True),
    "a2c": lambda: A2CLoss(actor(), critic()),
    "reinforce": lambda: ReinforceLoss(actor(), critic()),
    "dqn": lambda: DQNLoss(values()),
    "discrete sac": lambda: DiscreteSACLoss(actor(), values()),
    "sac": lambda: SACLoss(
        actor(continuous=True),
        module(nn.Bilinear(3, 1, 1), ["observation", "action"], ["state_action_value"]),
    ),
    "sac with values of states": lambda: SACLoss(
        actor(continuous=True),
        module(nn.Bilinear(3, 1, 1), ["observation", "action"], ["state_action_value"]),
        value_network=critic(),
    ),
}


def padded(rubbish: float, continuous: bool) -> TensorDict:
    torch.manual_seed(0)
    column = torch.randn(ROWS, 1)
    action = column if continuous else torch.randint(2, (ROWS,))
    batch: dict[str, Any] = {
        **{"observation": torch.randn(ROWS, 3), "action": action, "action_log_prob": torch.randn(ROWS)},
        **{"advantage": torch.randn(ROWS, 1), "value_target": torch.randn(ROWS, 1)},
        "collector": {"mask": torch.arange(ROWS) < REAL},
        "next": {
            "observation": torch.randn(ROWS, 3),
            "reward": torch.randn(ROWS, 1),
            "terminated": column > 1,
            "done": column > 1,
        },
    }
    made = TensorDict(batch, [ROWS])
    for entry in made.values(include_nested=True, leaves_only=True):
        if entry.is_floating_point():
            entry[REAL:] = rubbish
    return made


@pytest.mark.parametrize("rubbish", [math.nan, math.inf])
@pytest.mark.parametrize("name", LOSSES)
def test_rubbish_in_padding_reaches_nothing(name: str, rubbish: float) -> None:
    torch.manual_seed(0)
    loss, outputs, gradients = LOSSES[name](), [], []
    for anything in (0.0, rubbish):
        batch = padded(anything, continuous=name.startswith("sac"))
        loss.zero_grad()
        torch.manual_seed(1)
        out = loss(batch)
        terms: list[Tensor] = [x for key, x in out.items() if str(key).startswith("loss")]
        torch.stack(terms).sum().backward()
        outputs.append(out.detach())
        gradients.append([x.grad.clone() for x in loss.parameters() if x.grad is not None])
        if "td_error" in batch:
            assert not batch["td_error"][REAL:].any() and batch["td_error"][:REAL].all()
    for key in outputs[0].keys():  # noqa: SIM118
        assert torch.equal(outputs[0][key], outputs[1][key]) and outputs[0][key].isfinite(), key
    assert gradients[0] and all(map(torch.equal, *gradients))
