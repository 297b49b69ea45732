"""The same numbers as torchrl where torchrl is right: every run ends with done."""

import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn
from torch.distributions import Categorical

from flatroll.estimators import GAE, ClipPPOLoss

BatchOf = Callable[..., TensorDict]
RUNS = [(7, "terminated"), (1, "truncated"), (12, "truncated"), (3, "terminated"), (1, "terminated")]


@pytest.fixture(scope="module")
def objectives() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing torchrl warns about packages that are not there
        pytest.importorskip("torchrl")
        import torchrl.objectives.value.functional

        module: ModuleType = torchrl.objectives
    return module


@pytest.fixture
def batch(batch_of: BatchOf) -> TensorDict:
    batch = batch_of(RUNS, dtype=torch.float32)
    batch["action"] = torch.randint(4, (len(batch),))
    batch["action_log_prob"] = -torch.rand(len(batch)) - 0.8
    return batch


@pytest.fixture
def networks() -> tuple[ProbabilisticTensorDictSequential, TensorDictModule]:
    torch.manual_seed(0)
    logits = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
    choice = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    critic = TensorDictModule(
        nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1)), ["observation"], ["state_value"]
    )
    return ProbabilisticTensorDictSequential(logits, choice), critic


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_epsilon": (0.1, 0.3), "loss_critic_type": "l2", "entropy_coeff": 0.1, "critic_coeff": 0.5},
        {"normalize_advantage": True, "clip_value": True, "clip_epsilon": 0.1},
        {"clip_value": 0.05, "loss_critic_type": "l1"},
    ],
    ids=["default", "pair", "normalized", "clipped value"],
)
def test_clip_ppo_loss(
    objectives: ModuleType, batch: TensorDict, networks: Any, options: dict[str, Any]
) -> None:
    actor, critic = networks
    GAE(gamma=0.97, lmbda=0.9, value_network=critic)(batch)
    batch["state_value"] += 0.1 * torch.randn_like(batch["state_value"])
    losses, grads = [], []
    for kind in (objectives.ClipPPOLoss, ClipPPOLoss):
        out = kind(actor, critic, **options)(batch)
        total = out["loss_objective"] + out["loss_critic"] + out["loss_entropy"]
        losses.append(out)
        parameters = [*actor.parameters(), *critic.parameters()]
        for parameter in parameters:
            parameter.grad = None
        total.backward()
        grads.append([parameter.grad for parameter in parameters])
    theirs, ours = losses
    for key in set(theirs.keys()) | set(ours.keys()):
        torch.testing.assert_close(ours[key], theirs[key].reshape(()), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(grads[1], grads[0], rtol=1e-4, atol=1e-4)
