"""The same numbers and gradients as torchrl where torchrl is right: every run ends with done."""

import inspect
import warnings
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical

from flatroll import estimators

BatchOf = Callable[..., TensorDict]
RUNS = [(7, "terminated"), (1, "truncated"), (12, "truncated"), (3, "terminated"), (1, "terminated")]
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(scope="module")
def peer() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing torchrl warns about packages that are not there
        pytest.importorskip("torchrl")
        import torchrl.objectives.value.functional

        module: ModuleType = torchrl.objectives.value
    return module


NUMBERS = {"gamma": 0.97, "lmbda": 0.9}
# What each function takes, in the order of both libraries.
ARGUMENTS = {
    "generalized_advantage_estimate": "gamma lmbda value next_value reward done terminated",
    "td0_return_estimate": "gamma next_value reward terminated",
    "td0_advantage_estimate": "gamma value next_value reward done terminated",
    "td1_return_estimate": "gamma next_value reward done terminated",
    "td1_advantage_estimate": "gamma value next_value reward done terminated",
    "td_lambda_return_estimate": "gamma lmbda next_value reward done terminated",
    "td_lambda_advantage_estimate": "gamma lmbda value next_value reward done terminated",
    "vtrace_advantage_estimate": "gamma log_pi log_mu value next_value reward done terminated",
    "reward2go": "reward done gamma",
}


def columns(dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    names = ("value", "next_value", "reward", "log_pi", "log_mu")
    numbers = torch.randn(5, 4, 30, 1, generator=generator, dtype=dtype)
    done = torch.rand(4, 30, 1, generator=generator) < 0.2
    done[:, -1] = True
    terminated = done & (torch.rand(4, 30, 1, generator=generator) < 0.5)
    of = {name: column.clone().requires_grad_() for name, column in zip(names, numbers, strict=True)}
    return {**NUMBERS, **of, "done": done, "terminated": terminated}


def in_one(out: Any) -> Tensor:
    return torch.stack(out if isinstance(out, tuple) else [out])


@pytest.mark.parametrize("prefix", ["", "vec_"])
@pytest.mark.parametrize("name", ARGUMENTS)
def test_function(peer: ModuleType, name: str, prefix: str) -> None:
    if not hasattr(peer.functional, prefix + name):
        pytest.skip("torchrl has one form of it")
    given = columns()
    arguments = [given[key] for key in ARGUMENTS[name].split()]
    ours = in_one(getattr(estimators, prefix + name)(*arguments))
    theirs = in_one(getattr(peer.functional, prefix + name)(*arguments))
    torch.testing.assert_close(ours, theirs, **CLOSE)
    weights = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1), dtype=ours.dtype)
    read = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
    grads = [torch.autograd.grad((weights * out).sum(), read, retain_graph=True) for out in (ours, theirs)]
    torch.testing.assert_close(*grads, **CLOSE)


@pytest.mark.parametrize("name", ["td_lambda_return_estimate", "vec_generalized_advantage_estimate"])
def test_function_with_factors_of_each_row(peer: ModuleType, name: str) -> None:
    given = columns() | {"gamma": torch.rand(4, 30, 1).double(), "lmbda": torch.rand(4, 30, 1).double()}
    arguments = [given[key] for key in ARGUMENTS[name.removeprefix("vec_")].split()]
    ours, theirs = (getattr(module, name)(*arguments) for module in (estimators, peer.functional))
    torch.testing.assert_close(in_one(ours), in_one(theirs), **CLOSE)


@pytest.mark.parametrize("time_dim", [-3, 1])
def test_function_along_another_dim(peer: ModuleType, time_dim: int) -> None:
    given = {
        k: x.transpose(0, 1) if isinstance(x, Tensor) and time_dim == -3 else x for k, x in columns().items()
    }
    for name in ("td_lambda_return_estimate", "generalized_advantage_estimate", "td1_return_estimate"):
        arguments = [given[key] for key in ARGUMENTS[name].split()]
        ours, theirs = (
            getattr(module, name)(*arguments, time_dim=time_dim) for module in (estimators, peer.functional)
        )
        torch.testing.assert_close(in_one(ours), in_one(theirs), **CLOSE)


@pytest.fixture
def critic() -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    return TensorDictModule(net, ["observation"], ["state_value"])


MODULES: dict[str, dict[str, Any]] = {
    "GAE": NUMBERS,
    "TD0Estimator": {"gamma": 0.97},
    "TD1Estimator": {"gamma": 0.97},
    "TDLambdaEstimator": NUMBERS,
}
WRITTEN = ("advantage", "value_target", "state_value")


def peer_is_right_about(batch: TensorDict, valid: Tensor) -> Tensor:
    """Rows of series in which the last row that counts is not terminated (there torchrl bootstraps it)."""
    last = valid.sum(-1, keepdim=True) - 1
    terminated = batch["next", "terminated"].squeeze(-1).gather(-1, last)
    return (~terminated | valid.all(-1, keepdim=True)).expand_as(valid)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("average", [False, True])
def test_module(
    peer: ModuleType, batch_of: BatchOf, critic: TensorDictModule, name: str, average: bool
) -> None:
    averaged = "average_gae" if name == "GAE" else "average_rewards"
    arguments = {**MODULES[name], "value_network": critic, averaged: average}
    batch = batch_of(RUNS, dtype=torch.float32)
    theirs = getattr(peer, name)(**arguments)(batch.clone())
    for shifted in (False, True):
        ours = getattr(estimators, name)(**arguments, shifted=shifted)(batch.clone())
        for key in WRITTEN:
            torch.testing.assert_close(ours[key], theirs[key], **CLOSE)


@pytest.mark.parametrize("name", MODULES)
def test_gradients_of_a_module(
    peer: ModuleType, batch_of: BatchOf, critic: TensorDictModule, name: str
) -> None:
    """To the reward: torchrl keeps gradients from the critic's parameters, whatever ``differentiable`` says."""
    grads = []
    for module in (estimators, peer):
        batch = batch_of(RUNS, dtype=torch.float32)
        reward = batch["next", "reward"].requires_grad_()
        out = getattr(module, name)(**MODULES[name], value_network=critic, differentiable=True)(batch)
        weights = torch.arange(len(batch)).unsqueeze(-1) / 10
        grads.append(torch.autograd.grad((weights * out["advantage"]).sum(), reward)[0])
    torch.testing.assert_close(*grads, **CLOSE)


@pytest.mark.parametrize("budget", [1, 2, 4])
@pytest.mark.parametrize("name", MODULES)
def test_module_with_a_budget(
    peer: ModuleType, batch_of: BatchOf, critic: TensorDictModule, name: str, budget: int
) -> None:
    runs = [(4, "truncated"), (3, "truncated"), (2, "terminated"), (1, "truncated"), (5, "truncated")]
    flat = batch_of([*runs, *runs[::-1]], dtype=torch.float32)
    batch = flat.reshape(2, 15).refine_names(None, "time")
    options = {**MODULES[name], "value_network": critic, "shifted": True, "shifted_budget": budget}
    ours = getattr(estimators, name)(**options)(batch.clone())
    theirs = getattr(peer, name)(**options)(batch.clone())
    assert torch.equal(ours["shifted_valid"], theirs["shifted_valid"])
    right = peer_is_right_about(batch, ours["shifted_valid"])
    assert right.any()
    for key in WRITTEN:
        rows = right & ours["shifted_valid"] if key == "state_value" else right
        torch.testing.assert_close(ours[key][rows], theirs[key][rows], **CLOSE)


@pytest.mark.parametrize("options", [{}, {"rho_thresh": 1.5, "c_thresh": 0.7}], ids=str)
def test_vtrace(
    peer: ModuleType, batch_of: BatchOf, critic: TensorDictModule, options: dict[str, float]
) -> None:
    """torchrl weighs the action that the actor would choose now, so the batch holds just that."""
    logits = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
    choose = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    actor = ProbabilisticTensorDictSequential(logits, choose)
    batch = batch_of(RUNS, dtype=torch.float32)
    batch["action"] = actor.get_dist(batch.copy()).mode
    batch["action_log_prob"] = -torch.rand(len(batch)) - 0.8
    arguments = {"gamma": 0.97, "actor_network": actor, "value_network": critic, **options}
    theirs, ours = (module.VTrace(**arguments)(batch.clone()) for module in (peer, estimators))
    for key in WRITTEN:
        torch.testing.assert_close(ours[key], theirs[key], **CLOSE)


@pytest.mark.parametrize("name", [*MODULES, "VTrace"])
def test_takes_the_peers_arguments(
    peer: ModuleType, batch_of: BatchOf, critic: TensorDictModule, name: str
) -> None:
    """Every argument of torchrl's but two that have other forms here, with its default or one that means the same."""
    options: dict[str, Any] = {
        key: parameter.default
        for key, parameter in inspect.signature(getattr(peer, name).__init__).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    assert options.pop("auto_reset_env", False) is False  # bootstrap_missing="current"
    assert options.pop("shifted_budget") == 1  # None: as many as it takes
    options |= MODULES.get(name, {"gamma": 0.97})
    extra = {"actor_network": _actor()} if name == "VTrace" else {}
    getattr(estimators, name)(value_network=critic, **options, **extra)


def _actor() -> ProbabilisticTensorDictSequential:
    logits = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
    choose = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    return ProbabilisticTensorDictSequential(logits, choose)
