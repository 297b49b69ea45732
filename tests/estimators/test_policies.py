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

from flatroll.estimators import ClipPPOLoss, DQNLoss, VTrace, reward2go
from flatroll.estimators.distributions import distribution


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


def quiet_rows(**columns: Any) -> TensorDict:
    following = {"reward": torch.ones(6, 1), "terminated": torch.zeros(6, 1, dtype=torch.bool)}
    following["done"] = torch.tensor([[0], [0], [1], [0], [0], [1]], dtype=torch.bool)
    seen = {"observation": torch.randn(6, 3), "action": torch.zeros(6, dtype=torch.int64)}
    return TensorDict({**seen, "next": {**following, **columns}}, [6])


def test_rows_that_count_nowhere_are_told_of_once() -> None:
    lonely = quiet_rows(done=torch.ones(6, 1, dtype=torch.bool))  # each row a run, none holds what comes next
    loss = DQNLoss(nn.Linear(3, 2))
    with pytest.warns(UserWarning, match=r"most rows of the batch \(6 of 6\)"):
        loss(lonely)
    assert loss(lonely)["loss"] == 0.0  # a second warning would be an error here
    short = DQNLoss(nn.Linear(3, 2), burn_in=3)
    with pytest.warns(UserWarning, match="no run of the batch has more than burn_in=3 rows"):
        short(quiet_rows(observation=torch.randn(6, 3)))


def test_a_network_with_too_few_outputs_is_named() -> None:
    batch = quiet_rows(observation=torch.randn(6, 3)).set("action", torch.full((6,), 2))
    with pytest.raises(
        ValueError, match=r"one of the 2 that value_network evaluates, got actions from 2 to 2"
    ):
        DQNLoss(nn.Linear(3, 2))(batch)


def test_vtrace_sums_the_parts_of_a_log_probability_as_the_losses_do() -> None:
    torch.manual_seed(0)
    head: list[Any] = [
        TensorDictModule(lambda x: (x, torch.ones_like(x)), ["observation"], ["loc", "scale"]),
        ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal),
    ]
    actor, critic = (
        ProbabilisticTensorDictSequential(*head),
        TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"]),
    )
    batch = quiet_rows(observation=torch.randn(6, 3)).set("action", torch.randn(6, 3))
    parts = torch.randn(6, 3)
    estimator = VTrace(gamma=0.9, value_network=critic, actor_network=actor)
    found = estimator(batch.copy().set("action_log_prob", parts))["advantage"]
    torch.testing.assert_close(
        found, estimator(batch.copy().set("action_log_prob", parts.sum(-1)))["advantage"]
    )


def test_tensors_are_asked_for() -> None:
    ends = torch.ones(1, dtype=torch.bool)
    with pytest.raises(TypeError, match=r"reward must be a tensor, got list: torch.as_tensor\(reward\)"):
        reward2go([1.0], ends, 0.9)  # type: ignore[arg-type]
