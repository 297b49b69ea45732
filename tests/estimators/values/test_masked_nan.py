"""NaN in what must not be read: masked rows, and numbers whose factor is 0."""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical

from flatroll.estimators import (
    GAE,
    TD0Estimator,
    TD1Estimator,
    TDLambdaEstimator,
    VTrace,
    generalized_advantage_estimate,
    reward2go,
    td0_return_estimate,
    td_lambda_return_estimate,
    vtrace_advantage_estimate,
)
from flatroll.layout import split_trajectories

NAN = float("nan")
Column = list[float]


@dataclass
class Series:
    """A random series of rows; what is NaN or inf stands in rewards and next values."""

    gamma: Column
    lmbda: Column
    rho: Column
    reward: Column
    value: Column
    next_value: Column
    terminated: list[bool]
    ends: list[bool]


def random_series(seed: int) -> Series:
    choose = random.Random(seed)
    rows = range(choose.randint(1, 17))
    rubbish, share = choose.choice([NAN, math.inf, -math.inf]), choose.choice([0.0, 0.1, 0.3])
    numbers = [[choose.gauss(0, 1) for _ in rows] for _ in range(3)]
    for column in (numbers[0], numbers[2]):
        for i in rows:
            column[i] = rubbish if choose.random() < share else column[i]
    factors = [[choose.choice([0.0, 0.5, 1.0]) for _ in rows] for _ in range(3)]
    flags = [[choose.random() < 0.2 for _ in rows] for _ in range(2)]
    return Series(*factors, *numbers, *flags)


# Each reference is a sum over all rows behind, term by term, which leaves out terms whose factor is 0: O(N^2).


def product(factor: float, number: float) -> float:
    return factor * number if factor else 0.0


def traced(s: Series, decay: Column, term: Callable[[int, bool], float]) -> Column:
    """The sum of ``term(k, whether a run ends there)``, times the decays of all rows from t to k - 1."""
    sums = []
    for t in range(len(s.reward)):
        total, weight = 0.0, 1.0
        for k in range(t, len(s.reward)):
            last = s.ends[k] or s.terminated[k] or k == len(s.reward) - 1
            total, weight = total + weight * term(k, last), weight * decay[k]
            if last or not weight:
                break
        sums.append(total)
    return sums


def bootstrap(s: Series, k: int, share: float = 1.0) -> float:
    return product(0.0 if s.terminated[k] else s.gamma[k] * share, s.next_value[k])


def reference_td0(s: Series) -> Column:
    return [r + bootstrap(s, k) for k, r in enumerate(s.reward)]


def reference_lambda(s: Series) -> Column:
    decay = [g * x for g, x in zip(s.gamma, s.lmbda, strict=True)]
    return traced(s, decay, lambda k, last: s.reward[k] + bootstrap(s, k, 1.0 if last else 1.0 - s.lmbda[k]))


def reference_gae(s: Series) -> Column:
    decay = [g * x for g, x in zip(s.gamma, s.lmbda, strict=True)]
    return traced(s, decay, lambda k, last: s.reward[k] + bootstrap(s, k) - s.value[k])


def reference_sums(s: Series) -> Column:
    return traced(s, s.gamma, lambda k, last: s.reward[k])


def reference_vtrace(s: Series) -> Column:
    """Advantages; the same weights stand for rho and for c."""
    decay = [g * x for g, x in zip(s.gamma, s.rho, strict=True)]
    residuals = traced(
        s, decay, lambda k, last: product(s.rho[k], s.reward[k] + bootstrap(s, k) - s.value[k])
    )
    advantages = []
    for t, rho in enumerate(s.rho):
        last = s.ends[t] or s.terminated[t] or t == len(s.rho) - 1
        ahead = bootstrap(s, t) if last else product(s.gamma[t], residuals[t + 1] + s.value[t + 1])
        advantages.append(product(rho, s.reward[t] + ahead - s.value[t]))
    return advantages


Columns = dict[str, Tensor]
FUNCTIONS: dict[str, tuple[Callable[[Series], Column], Callable[[Columns], Tensor]]] = {
    "td0": (
        reference_td0,
        lambda c: td0_return_estimate(c["gamma"], c["next_value"], c["reward"], c["terminated"]),
    ),
    "td lambda": (
        reference_lambda,
        lambda c: td_lambda_return_estimate(
            c["gamma"], c["lmbda"], c["next_value"], c["reward"], c["done"], c["terminated"], time_dim=-2
        ),
    ),
    "gae": (
        reference_gae,
        lambda c: generalized_advantage_estimate(
            c["gamma"], c["lmbda"], c["value"], c["next_value"], c["reward"], c["done"], c["terminated"]
        )[0],
    ),
    "reward to go": (reference_sums, lambda c: reward2go(c["reward"], c["done"], c["gamma"])),
    "v-trace": (
        reference_vtrace,
        lambda c: vtrace_advantage_estimate(
            c["gamma"],
            c["rho"].log(),
            torch.zeros_like(c["rho"]),
            *(c[name] for name in ("value", "next_value", "reward", "done", "terminated")),
        )[0],
    ),
}
SHAPES = {
    "[1, T, 1]": lambda x: x.view(1, -1, 1),
    "[T]": lambda x: x,
    "[T, 2]": lambda x: torch.stack([x, x], -1),
}


@pytest.mark.parametrize("grad", [False, True], ids=["fused", "torch"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_nothing_is_read_whose_factor_is_zero(name: str, shape: str, grad: bool) -> None:
    reference, function = FUNCTIONS[name]
    for seed in range(60):
        series = random_series(seed)
        columns = {
            key: torch.tensor(x, dtype=torch.bool if isinstance(x[0], bool) else torch.float64)
            for key, x in vars(series).items()
        }
        columns["done"] = columns.pop("ends") | columns["terminated"]
        columns = {key: SHAPES[shape](x) for key, x in columns.items()}
        columns["reward"].requires_grad_(grad)
        wanted = SHAPES[shape](torch.tensor(reference(series), dtype=torch.float64))
        got = function(columns)
        assert torch.allclose(got, wanted, equal_nan=True), (seed, got, wanted)


@pytest.mark.parametrize("grad", [False, True], ids=["fused", "torch"])
def test_a_trace_of_zero_is_td0(grad: bool) -> None:
    """The NaN next value of the last row, which only that row reads."""
    reward, flags = torch.ones(3).requires_grad_(grad), torch.zeros(3, dtype=torch.bool)
    returns = td_lambda_return_estimate(0.5, 0.0, torch.tensor([2.0, 4.0, NAN]), reward, flags, flags)
    assert returns.tolist() == pytest.approx([2.0, 3.0, NAN], nan_ok=True)


def test_a_trace_of_zero_keeps_gae_to_one_row() -> None:
    flags = torch.zeros(3, 1, dtype=torch.bool)
    value, one = torch.zeros(3, 1), torch.ones(3, 1)
    following = torch.tensor([[2.0], [4.0], [NAN]])
    advantage, _ = generalized_advantage_estimate(0.5, 0.0, value, following, one, flags, flags)
    assert advantage.flatten().tolist() == pytest.approx([2.0, 3.0, NAN], nan_ok=True)


def test_a_discount_of_zero_reads_no_next_value() -> None:
    flags = torch.zeros(2, dtype=torch.bool)
    gamma = torch.tensor([0.0, 0.5])
    returns = td_lambda_return_estimate(gamma, 0.5, torch.tensor([NAN, 2.0]), torch.ones(2), flags, flags)
    assert returns.tolist() == [1.0, 2.0]


# --- masked rows: nothing in them counts ---------------------------------------------------------------------------


ESTIMATORS: dict[str, Callable[[TensorDictModule], Callable[[TensorDict], TensorDict]]] = {
    "td0": lambda net: TD0Estimator(gamma=0.9, value_network=net),
    "td1": lambda net: TD1Estimator(gamma=0.9, value_network=net),
    "td lambda": lambda net: TDLambdaEstimator(gamma=0.9, lmbda=0.7, value_network=net, average_rewards=True),
    "gae": lambda net: GAE(gamma=0.9, lmbda=0.7, value_network=net, average_gae=True),
    "shifted": lambda net: GAE(gamma=0.9, lmbda=0.7, value_network=net, shifted=True),
    "budget": lambda net: GAE(gamma=0.9, lmbda=0.7, value_network=net, shifted=True, shifted_budget=2),
    "chunks": lambda net: GAE(gamma=0.9, lmbda=0.7, value_network=net, value_chunk_size=2),
    "v-trace": lambda net: VTrace(gamma=0.9, actor_network=actor(), value_network=net, average_adv=True),
}


def actor() -> ProbabilisticTensorDictSequential:
    torch.manual_seed(1)
    net = TensorDictModule(nn.Linear(3, 2, dtype=torch.float64), ["observation"], ["logits"])
    head = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    return ProbabilisticTensorDictSequential(net, head)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize("rubbish", [NAN, math.inf])
def test_rubbish_in_padding_changes_no_number(
    make: Callable[[TensorDictModule], Callable[[TensorDict], TensorDict]],
    rubbish: float,
    mixed: TensorDict,
    critic: TensorDictModule,
) -> None:
    mixed["action"], mixed["action_log_prob"] = torch.zeros(16, dtype=torch.long), torch.zeros(16)
    padded = split_trajectories(mixed)
    real, dirty = padded["collector", "mask"], padded.clone()
    for key in ("observation", ("next", "observation"), ("next", "reward"), "action_log_prob"):
        dirty[key][~real] = rubbish
    for key in ("is_init", ("next", "done"), ("next", "terminated")):
        dirty[key][~real] = True
    estimator = make(critic)
    estimator.differentiable = True
    gradients = []
    for batch in (padded, dirty):
        critic.zero_grad()
        (estimator(batch)["value_target"][real] * torch.arange(16)[:, None]).sum().backward()
        gradients.append(critic.module.weight.grad.clone())
    assert torch.equal(*gradients) and gradients[0].any()
    for key in ("advantage", "value_target"):
        assert torch.equal(padded[key][real], dirty[key][real])
