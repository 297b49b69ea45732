"""Networks called without tensordict's wrapping do what they do with it."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_skip_existing,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from flatroll.estimators import ClipPPOLoss, DQNLoss
from flatroll.estimators.direct import through, written
from flatroll.estimators.policies import distribution


class Doubling(TensorDictModule):
    def forward(self, tensordict: Any, *args: Any, **kwargs: Any) -> Any:
        return tensordict.set("b", 2 * tensordict["a"])


def two(a: Tensor) -> tuple[Tensor, Tensor]:
    return a + 1, a + 2


def named(*, x: Tensor) -> Tensor:
    return x + 3


def networks() -> dict[str, Any]:
    one = nn.Identity()
    chain = [TensorDictModule(two, ["a"], ["b", "c"]), TensorDictModule(one, ["c"], [("deep", "d")])]
    hooked = TensorDictModule(one, ["a"], ["b"])
    hooked.register_forward_hook(lambda module, args, out: out.set("b", out["b"] * 5))
    return {
        "one": TensorDictModule(one, ["a"], ["b"]),
        "two": TensorDictModule(two, ["a"], ["b", "c"]),
        "first": TensorDictModule(two, ["a"], ["b", "_"]),
        "nested": TensorDictModule(one, [("in", "a")], [("out", "b")]),
        "mapping": TensorDictModule(lambda a: {"b": a, "c": a + 1}, ["a"], ["b"]),
        "by name": TensorDictModule(named, {"x": "a"}, ["b"]),
        "subclass": Doubling(one, ["a"], ["b"]),
        "hook": hooked,
        "selected": TensorDictModule(two, ["a"], ["b", "c"]).select_out_keys("b"),
        "chain": TensorDictSequential(*chain),
        "chain by name": TensorDictSequential(dict(zip("xy", chain, strict=True))),
        "selected chain": TensorDictSequential(*chain, selected_out_keys=["b"]),
        "twice": TensorDictSequential(*2 * [TensorDictModule(lambda a: a + 1, ["a"], ["a"])]),
    }


def rows() -> TensorDict:
    return TensorDict({"a": torch.arange(3.0), ("in", "a"): torch.ones(3)}, [3])


@pytest.mark.parametrize("name", networks())
def test_the_same_is_written(name: str) -> None:
    network = networks()[name]
    expected = network(rows())
    found = through(network, rows())
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    assert (found == expected).all()
    for key in network.out_keys:
        if key != "_" and key != "a":
            batch = rows()
            torch.testing.assert_close(written(network, batch, key), expected[key])
            assert set(batch.keys(True, True)) == {"a", ("in", "a")}
    assert written(network, rows(), "nowhere") is None


def test_modes_and_errors_are_those_of_the_call() -> None:
    network = TensorDictModule(nn.Identity(), ["a"], ["b"])
    with set_skip_existing(True):
        assert through(network, rows().set("b", torch.zeros(3)))["b"].sum() == 0
    with pytest.raises(KeyError, match="missing"):
        through(TensorDictModule(lambda x: x + 1, ["missing"], ["b"]), rows())
    with pytest.raises(ValueError, match=r"returned 2 tensors: give each a key"):
        through(TensorDictModule(two, ["a"], ["b"]), rows())


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
