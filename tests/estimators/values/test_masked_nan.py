"""NaN in what must not be read: masked rows, and numbers whose factor is 0."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor

from flatroll.estimators import (
    GAE,
    TD0Estimator,
    TD1Estimator,
    TDLambdaEstimator,
    generalized_advantage_estimate,
    td_lambda_return_estimate,
)
from flatroll.layout import split_trajectories

NAN = float("nan")
Column = list[float]


def lambda_returns(
    gamma: Column, lmbda: Column, next_value: Column, reward: Column, terminated: list[bool], ends: list[bool]
) -> Column:
    """``G[t]`` as the sum over all rows behind, term by term, leaving out those whose factor is 0; O(N^2)."""
    returns = []
    for t in range(len(reward)):
        total, weight = 0.0, 1.0
        for k in range(t, len(reward)):
            last = ends[k] or terminated[k] or k == len(reward) - 1
            total += weight * reward[k]
            factor = weight * gamma[k] * (1.0 if last else 1.0 - lmbda[k])
            if factor and not terminated[k]:
                total += factor * next_value[k]
            weight *= gamma[k] * lmbda[k]
            if last or not weight:
                break
        returns.append(total)
    return returns


def column(values: Column | list[bool], dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(values, dtype=dtype).view(1, -1, 1)


def given_and_got(seed: int, grad: bool) -> tuple[Column, Column]:
    """A random series ``[1, T, 1]`` with NaN next values: what the loop says, and the library."""
    choose = random.Random(seed)
    rows = choose.randint(1, 17)
    terminated = [choose.random() < 0.2 for _ in range(rows)]
    ends = [choose.random() < 0.2 for _ in range(rows)]
    reward = [choose.gauss(0, 1) for _ in range(rows)]
    next_value = [NAN if choose.random() < 0.3 else choose.gauss(0, 1) for _ in range(rows)]
    gamma, lmbda = ([choose.choice([0.0, 0.5, 1.0]) for _ in range(rows)] for _ in range(2))
    got = td_lambda_return_estimate(
        column(gamma),
        column(lmbda),
        column(next_value),
        column(reward).requires_grad_(grad),
        column([a or b for a, b in zip(terminated, ends, strict=False)], torch.bool),
        column(terminated, torch.bool),
        time_dim=-2,
    )
    return lambda_returns(gamma, lmbda, next_value, reward, terminated, ends), got.flatten().tolist()


@pytest.mark.xfail(strict=False, reason="0 * NaN: a factor of 0 is multiplied, not selected")
@pytest.mark.parametrize("grad", [False, True], ids=["fused", "torch"])
def test_lambda_returns_read_nothing_whose_factor_is_zero(grad: bool) -> None:
    for seed in range(200):
        wanted, got = given_and_got(seed, grad)
        assert got == pytest.approx(wanted, nan_ok=True), seed


@pytest.mark.xfail(strict=False, reason="0 * NaN: a trace of 0 carries NaN backward")
@pytest.mark.parametrize("grad", [False, True], ids=["fused", "torch"])
def test_a_trace_of_zero_is_td0(grad: bool) -> None:
    """The NaN next value of the last row, which only that row reads."""
    reward, flags = torch.ones(3).requires_grad_(grad), torch.zeros(3, dtype=torch.bool)
    returns = td_lambda_return_estimate(0.5, 0.0, torch.tensor([2.0, 4.0, NAN]), reward, flags, flags)
    assert returns.tolist() == pytest.approx([2.0, 3.0, NAN], nan_ok=True)


@pytest.mark.xfail(strict=False, reason="as above")
def test_a_trace_of_zero_keeps_gae_to_one_row() -> None:
    flags = torch.zeros(3, 1, dtype=torch.bool)
    value, one = torch.zeros(3, 1), torch.ones(3, 1)
    following = torch.tensor([[2.0], [4.0], [NAN]])
    advantage, _ = generalized_advantage_estimate(0.5, 0.0, value, following, one, flags, flags)
    assert advantage.flatten().tolist() == pytest.approx([2.0, 3.0, NAN], nan_ok=True)


@pytest.mark.xfail(strict=False, reason="0 * NaN: gamma of 0 reads the next value")
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
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("make", ESTIMATORS.values(), ids=ESTIMATORS)
@pytest.mark.parametrize("rubbish", [NAN, math.inf])
def test_rubbish_in_padding_changes_no_number(
    make: Callable[[TensorDictModule], Callable[[TensorDict], TensorDict]],
    rubbish: float,
    mixed: TensorDict,
    critic: TensorDictModule,
) -> None:
    padded = split_trajectories(mixed)
    real, dirty = padded["collector", "mask"], padded.clone()
    for key in ("observation", ("next", "observation"), ("next", "reward")):
        dirty[key][~real] = rubbish
    for key in ("is_init", ("next", "done"), ("next", "terminated")):
        dirty[key][~real] = True
    clean, dirty = make(critic)(padded), make(critic)(dirty)
    for key in ("advantage", "value_target"):
        assert torch.equal(clean[key][real], dirty[key][real])
