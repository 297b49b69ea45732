"""What the losses ask of an actor, and that they compile."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import nn
from torch.distributions import Categorical, Normal

from flatroll.estimators import ClipPPOLoss, DQNLoss
from flatroll.estimators.policies import distribution


def rows() -> TensorDict:
    return TensorDict({"a": torch.arange(3.0), ("in", "a"): torch.ones(3)}, [3])


def test_distributions() -> None:
    def choose(into: str) -> Any:
        return ProbabilisticTensorDictModule(["loc", "scale"], [into], distribution_class=Normal)

    parts: list[Any] = [TensorDictModule(lambda a: (a, a + 1), ["a"], ["loc", "scale"]), choose("action")]
    for actor in (
        ProbabilisticTensorDictSequential(*parts),
        ProbabilisticTensorDictSequential(dict(zip("xy", parts, strict=True))),
        ProbabilisticTensorDictSequential(parts[0], choose("first"), parts[1]),  # works on a copy
    ):
        batch = rows()
        dist = distribution(actor, batch)
        expected = actor.get_dist(again := rows())
        assert type(dist) is type(expected)
        torch.manual_seed(0)
        drawn = dist.sample()
        torch.manual_seed(0)
        assert (drawn == expected.sample()).all()
        assert set(batch.keys()) == set(again.keys())


@pytest.mark.parametrize("kind", [ClipPPOLoss, DQNLoss])
def test_losses_compile_in_one_graph(kind: Any) -> None:
    torch.manual_seed(0)
    values = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
    choose = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    critic = TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"])
    networks: Any = ProbabilisticTensorDictSequential(values, choose), critic
    loss = DQNLoss(nn.Linear(3, 4)) if kind is DQNLoss else kind(*networks, normalize_advantage=True)
    following = {
        "observation": torch.randn(5, 3),
        "reward": torch.ones(5, 1),
        "terminated": torch.arange(5) > 3,
    }
    columns = {name: torch.randn(5) for name in ("action_log_prob", "advantage", "value_target")}
    action = {"observation": torch.randn(5, 3), "action": torch.tensor([0, 3, 2, 1, 1])}
    batch = TensorDict({**columns, **action, "next": following}, [5])
    expected = loss(batch.clone())
    found = torch.compile(loss, backend="eager", fullgraph=True)(batch)
    for name, number in expected.items():
        torch.testing.assert_close(found[name], number)
