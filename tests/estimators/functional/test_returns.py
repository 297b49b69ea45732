"""Returns and advantages of tensors against their definitions, written as sums over each run alone in float64.

The definitions do not recurse: each row adds up what lies behind it in its run, so they share nothing with the
scans. A run is (rows, way to end).
"""

import itertools
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck

from flatroll import estimators
from flatroll.estimators import (
    generalized_advantage_estimate,
    reward2go,
    td0_advantage_estimate,
    td0_return_estimate,
    td1_advantage_estimate,
    td1_return_estimate,
    td_lambda_advantage_estimate,
    td_lambda_return_estimate,
    vtrace_advantage_estimate,
)

Pair = tuple[Tensor, Tensor]


@dataclass
class Data:
    """Columns ``[N]`` of runs end to end, in float64."""

    value: Tensor
    next_value: Tensor
    reward: Tensor
    log_pi: Tensor
    log_mu: Tensor
    gamma: Tensor
    lmbda: Tensor
    done: Tensor
    terminated: Tensor
    ends: Tensor

    def cast(self, dtype: torch.dtype) -> "Data":
        return self.map(lambda x: x.to(dtype) if x.is_floating_point() else x)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Data":
        return Data(**{name: function(column) for name, column in vars(self).items()})

    def runs(self) -> list["Data"]:
        stops = [0, *(self.ends.nonzero().squeeze(-1) + 1).tolist()]
        return [self.map(lambda x, a=a, b=b: x[a:b]) for a, b in itertools.pairwise(stops)]


def random_data(runs: Sequence[tuple[int, str]], seed: int = 0) -> Data:
    generator = torch.Generator().manual_seed(seed)
    rows = sum(length for length, _ in runs)
    numbers = torch.randn(5, rows, generator=generator, dtype=torch.float64)
    factors = torch.rand(2, rows, generator=generator, dtype=torch.float64)
    done, terminated, ends = torch.zeros(3, rows, dtype=torch.bool)
    row = -1
    for length, end in runs:
        row += length
        done[row], terminated[row], ends[row] = end != "cut", end in ("terminated", "both"), True
    return Data(*numbers, *factors, done, terminated, ends)


def sums(run: Data, factor: Tensor, terms: Tensor) -> Tensor:
    """``sum_k (product of the factors of rows t .. t + k - 1) * terms[t + k]`` for each row t."""
    out = torch.zeros_like(terms)
    for t in range(len(terms)):
        weight = 1.0
        for k in range(t, len(terms)):
            out[t] += weight * terms[k]
            weight *= float(factor[k])
    return out


def bootstraps(run: Data) -> Tensor:
    return run.next_value * ~run.terminated


def gae_alone(run: Data) -> Pair:
    residual = run.reward + run.gamma * bootstraps(run) - run.value
    advantage = sums(run, run.gamma * run.lmbda, residual)
    return advantage, advantage + run.value


def td_lambda_alone(run: Data) -> Tensor:
    share = 1.0 - run.lmbda
    share[-1] = 1.0
    return sums(run, run.gamma * run.lmbda, run.reward + run.gamma * share * bootstraps(run))


def vtrace_alone(run: Data, rho_thresh: float = 1.0, c_thresh: float = 1.0) -> Pair:
    ratio = (run.log_pi - run.log_mu).exp()
    rho, c = ratio.clamp(max=rho_thresh), ratio.clamp(max=c_thresh)
    residual = rho * (run.reward + run.gamma * bootstraps(run) - run.value)
    target = run.value + sums(run, run.gamma * c, residual)
    following = torch.cat([target[1:], bootstraps(run)[-1:]])
    return rho * (run.reward + run.gamma * following - run.value), target


def with_lmbda(run: Data, number: float) -> Data:
    return Data(**{**vars(run), "lmbda": torch.full_like(run.lmbda, number)})


# Each function on columns, and what it must give on one run alone: tuples of tensors.
FUNCTIONS: dict[str, tuple[Callable[..., tuple[Tensor, ...]], Callable[[Data], tuple[Tensor, ...]]]] = {
    "gae": (
        lambda d, **k: generalized_advantage_estimate(
            d.gamma, d.lmbda, d.value, d.next_value, d.reward, d.done, d.terminated, **k
        ),
        gae_alone,
    ),
    "td0": (
        lambda d, **k: (
            td0_return_estimate(d.gamma, d.next_value, d.reward, d.terminated),
            td0_advantage_estimate(d.gamma, d.value, d.next_value, d.reward, d.done, d.terminated),
        ),
        lambda run: (
            td_lambda_alone(with_lmbda(run, 0.0)),
            td_lambda_alone(with_lmbda(run, 0.0)) - run.value,
        ),
    ),
    "td1": (
        lambda d, **k: (
            td1_return_estimate(d.gamma, d.next_value, d.reward, d.done, d.terminated, **k),
            td1_advantage_estimate(d.gamma, d.value, d.next_value, d.reward, d.done, d.terminated, **k),
        ),
        lambda run: (
            td_lambda_alone(with_lmbda(run, 1.0)),
            td_lambda_alone(with_lmbda(run, 1.0)) - run.value,
        ),
    ),
    "td_lambda": (
        lambda d, **k: (
            td_lambda_return_estimate(d.gamma, d.lmbda, d.next_value, d.reward, d.done, d.terminated, **k),
            td_lambda_advantage_estimate(
                d.gamma, d.lmbda, d.value, d.next_value, d.reward, d.done, d.terminated, **k
            ),
        ),
        lambda run: (td_lambda_alone(run), td_lambda_alone(run) - run.value),
    ),
    "vtrace": (
        lambda d, **k: vtrace_advantage_estimate(
            d.gamma, d.log_pi, d.log_mu, d.value, d.next_value, d.reward, d.done, d.terminated, **k
        ),
        vtrace_alone,
    ),
    "reward2go": (
        lambda d, **k: (reward2go(d.reward, d.done, d.gamma, **k),),
        lambda run: (sums(run, run.gamma, run.reward),),
    ),
}
EACH = pytest.mark.parametrize("name", FUNCTIONS)
RUNS = st.lists(
    st.tuples(st.integers(1, 7), st.sampled_from(["terminated", "truncated", "both", "cut"])),
    min_size=1,
    max_size=6,
)
MIXED = [(4, "terminated"), (1, "both"), (3, "cut"), (1, "truncated"), (5, "truncated"), (2, "cut")]


def expected(name: str, data: Data) -> list[Tensor]:
    alone = [FUNCTIONS[name][1](run) for run in data.runs()]
    return [torch.cat(parts) for parts in zip(*alone, strict=True)]


def assert_close(actual: Sequence[Tensor], wanted: Sequence[Tensor], **tolerance: float) -> None:
    for a, b in zip(actual, wanted, strict=True):
        torch.testing.assert_close(a.double(), b, **tolerance)


@EACH
@examples(30)
@given(
    runs=RUNS,
    seed=st.integers(0, 5),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    gamma=st.sampled_from([0.0, 0.97, 1.0, None]),
    lmbda=st.sampled_from([0.0, 1e-9, 0.9, 1.0, None]),
    form=st.sampled_from(["flat", "column", "batch"]),
)
def test_each_run_gets_what_its_definition_gives_it_alone(
    name: str,
    runs: list[tuple[int, str]],
    seed: int,
    dtype: torch.dtype,
    gamma: float | None,
    lmbda: float | None,
    form: str,
) -> None:
    data = random_data(runs, seed)
    if gamma is not None:
        data.gamma.fill_(gamma)
    if lmbda is not None:
        data.lmbda.fill_(lmbda)
    wanted = expected(name, data)
    shape = {"flat": (-1,), "column": (-1, 1), "batch": (1, -1, 1)}[form]
    shaped = data.cast(dtype).map(lambda x: x.view(shape))
    if gamma is not None:
        shaped.gamma = gamma  # type: ignore[assignment]  # a number does, too
    out = FUNCTIONS[name][0](shaped, ends=shaped.ends)
    assert all(x.shape == shaped.reward.shape and x.dtype is dtype for x in out)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype is torch.float32 else {"rtol": 1e-9, "atol": 1e-9}
    assert_close([x.reshape(-1) for x in out], wanted, **tolerance)


@EACH
def test_series_and_features_are_independent(name: str) -> None:
    """``[B, T, F]`` and ``[B, T, F, G]``: every column is what it is alone, flags of one feature serve all."""
    torch.manual_seed(0)
    single = random_data(MIXED)
    rows = len(single.reward)
    for features in ((3,), (2, 3)):
        shape, ones = (2, rows, *features), (1, rows, *[1] * len(features))
        wide = single.map(
            lambda x, s=shape, o=ones: x.view(o) if x.dtype is torch.bool else torch.randn(s).double()
        )
        flags = {
            flag: getattr(wide, flag).expand(2, rows, *ones[2:]) for flag in ("done", "terminated", "ends")
        }
        wide = Data(
            **{
                **vars(wide),
                **flags,
                "gamma": torch.rand(shape).double(),
                "lmbda": torch.rand(shape).double(),
            }
        )
        if name == "td0" and len(features) > 1:
            continue  # it has no time_dim
        out = FUNCTIONS[name][0](wide, **({} if name == "td0" else {"ends": wide.ends, "time_dim": 1}))
        for b in range(2):
            for f in (
                torch.cartesian_prod(*[torch.arange(n) for n in features]).reshape(-1, len(features)).tolist()
            ):
                index = (b, slice(None), *f)
                alone = wide.map(lambda x, i=index: x[i] if x.shape == shape else x[b].reshape(-1))  # noqa: B023
                assert_close([x[index] for x in out], expected(name, alone))


@EACH
def test_one_factor_per_row(name: str) -> None:
    """``[N]`` factors beside ``[N, 1]`` columns, and ``[B, T]`` beside ``[B, T, 1]``."""
    data = random_data(MIXED)
    wanted = expected(name, data)
    for shape in ((-1, 1), (2, 8, 1)):
        if shape[0] == 2:
            data.ends[7] = True
            wanted = expected(name, data)
        shaped = data.map(lambda x, s=shape: x.view(s))
        shaped.gamma, shaped.lmbda = shaped.gamma.squeeze(-1), shaped.lmbda.squeeze(-1)
        assert_close([x.reshape(-1) for x in FUNCTIONS[name][0](shaped, ends=shaped.ends)], wanted)


@EACH
def test_a_batch_of_one_row_and_of_none(name: str) -> None:
    for end in ("terminated", "cut"):
        data = random_data([(1, end)])
        assert_close(FUNCTIONS[name][0](data, ends=data.ends), expected(name, data))
    empty = random_data([(1, "cut")]).map(lambda x: x[:0])
    assert all(x.shape == (0,) for x in FUNCTIONS[name][0](empty, ends=empty.ends))


@EACH
def test_nothing_leaks_over_a_truncation(name: str) -> None:
    """Two episodes of value 1 and 100, no reward, no discount: a leak would give 99."""
    if name == "reward2go":
        pytest.skip("there is no value in it")
    value = torch.tensor([1.0, 1.0, 100.0, 100.0])
    none, one = torch.zeros(4), torch.ones(4)
    truncated = torch.tensor([False, True, False, True])
    data = Data(value, value, none, none, none, one, 0.95 * one, truncated, truncated & False, truncated)
    out = FUNCTIONS[name][0](data, ends=data.ends)
    for x in out:
        assert x.tolist() in ([0.0] * 4, value.tolist())


@EACH
def test_nan_behind_a_termination_and_of_another_run_stays_there(name: str) -> None:
    data = random_data(MIXED)
    wanted = expected(name, data)
    data.next_value[data.terminated] = torch.nan
    assert_close(FUNCTIONS[name][0](data, ends=data.ends), wanted)
    data.reward[-1] = torch.nan
    for out, clean in zip(FUNCTIONS[name][0](data, ends=data.ends), wanted, strict=True):
        torch.testing.assert_close(out[:-2], clean[:-2])  # the last run has two rows


def test_td1_reads_a_next_value_only_where_it_bootstraps() -> None:
    data = random_data(MIXED)
    wanted = expected("td1", data)
    data.next_value[~data.ends] = torch.nan
    assert_close(FUNCTIONS["td1"][0](data, ends=data.ends), wanted)


@EACH
def test_gradients(name: str) -> None:
    data = random_data([(3, "terminated"), (1, "truncated"), (2, "cut"), (2, "truncated")])
    names = ["value", "next_value", "reward", "log_pi", "gamma", "lmbda"]

    def of(*columns: Tensor) -> tuple[Tensor, ...]:
        changed = Data(**{**vars(data), **dict(zip(names, columns, strict=True))})
        return FUNCTIONS[name][0](changed, ends=data.ends)

    inputs = [getattr(data, n).clone().requires_grad_() for n in names]
    assert gradcheck(of, inputs)
    assert gradgradcheck(of, inputs)


@EACH
def test_inside_transforms_of_torch_func(name: str) -> None:
    """Many critics at a time, and the gradient of each: as one by one."""
    data = random_data([(3, "terminated"), (1, "truncated"), (2, "cut"), (2, "truncated")])

    def of(next_value: Tensor, reward: Tensor) -> Tensor:
        changed = Data(**{**vars(data), "next_value": next_value, "reward": reward})
        return torch.stack(FUNCTIONS[name][0](changed, ends=data.ends)).square().sum()

    columns = [torch.stack([x, 2 * x, -x]) for x in (data.next_value, data.reward)]
    grads = torch.vmap(torch.func.grad(of, argnums=(0, 1)))(*columns)
    inputs = [x.clone().requires_grad_() for x in columns]
    total = sum(of(*(x[i] for x in inputs)) for i in range(3))
    wanted = torch.autograd.grad(total, inputs, materialize_grads=True, allow_unused=True)
    torch.testing.assert_close(grads, wanted)


@EACH
def test_compiles_as_one_graph_with_gradients(name: str) -> None:
    data = random_data(MIXED).cast(torch.float32).map(lambda x: x.unsqueeze(-1))

    def of(reward: Tensor, next_value: Tensor) -> tuple[Tensor, ...]:
        changed = Data(
            **{**vars(data), "reward": reward, "next_value": next_value, "gamma": 0.97, "lmbda": 0.9}
        )
        return FUNCTIONS[name][0](changed, ends=data.ends)

    compiled = torch.compile(of, backend="aot_eager", fullgraph=True)
    inputs = [data.reward.requires_grad_(), data.next_value.requires_grad_()]
    wanted, actual = of(*inputs), compiled(*inputs)
    torch.testing.assert_close(actual, wanted)
    grads = [
        torch.autograd.grad(sum(x.sum() for x in out), inputs, allow_unused=True) for out in (wanted, actual)
    ]
    torch.testing.assert_close(grads[1], grads[0])


@EACH
def test_reads_no_number_on_the_host(name: str) -> None:
    """The meta device has none to read."""
    data = random_data(MIXED).map(lambda x: x.unsqueeze(-1).to("meta"))
    for out in FUNCTIONS[name][0](data, ends=data.ends):
        assert out.shape == (16, 1)


@EACH
def test_terminated_defaults_to_done(name: str) -> None:
    data = random_data(MIXED)
    out = (
        FUNCTIONS[name][0](Data(**{**vars(data), "terminated": None}), ends=data.ends)
        if name != "td0"
        else (
            td0_return_estimate(data.gamma, data.next_value, data.reward, done=data.done),
            td0_advantage_estimate(data.gamma, data.value, data.next_value, data.reward, data.done),
        )
    )
    data.terminated = data.done
    assert_close(out, expected(name, data))


# --- one estimate is another one ---


def on_policy() -> Data:
    """Next values that are the values of the rows behind, the same policy."""
    data = random_data(MIXED)
    inside = ~data.ends
    data.next_value[:-1][inside[:-1]] = data.value[1:][inside[:-1]]
    data.log_pi = data.log_mu
    data.gamma.fill_(0.97)
    data.lmbda.fill_(0.9)
    return data


def test_lambda_one_is_td1_and_lambda_zero_is_td0() -> None:
    data = random_data(MIXED)
    columns = data.next_value, data.reward, data.done, data.terminated
    torch.testing.assert_close(
        td_lambda_return_estimate(0.97, 1.0, *columns, ends=data.ends),
        td1_return_estimate(0.97, *columns, ends=data.ends),
    )
    torch.testing.assert_close(
        td_lambda_return_estimate(0.97, 0.0, *columns, ends=data.ends),
        td0_return_estimate(0.97, data.next_value, data.reward, data.terminated),
    )


def test_the_target_of_gae_is_the_lambda_return() -> None:
    data = on_policy()
    wanted = FUNCTIONS["td_lambda"][0](data, ends=data.ends)
    advantage, target = FUNCTIONS["gae"][0](data, ends=data.ends)
    assert_close((target, advantage), wanted)


def test_vtrace_on_policy_is_td1() -> None:
    """Weights of 1: target and advantage of the lambda-return with lambda 1."""
    data = on_policy()
    target, advantage = FUNCTIONS["td1"][0](data, ends=data.ends)
    assert_close(FUNCTIONS["vtrace"][0](data, ends=data.ends), (advantage, target))


def test_td1_without_a_value_is_the_reward_to_go() -> None:
    data = random_data(MIXED)
    returns = td1_return_estimate(0.97, torch.zeros(16).double(), data.reward, data.done, ends=data.ends)
    torch.testing.assert_close(returns, reward2go(data.reward, data.done, 0.97, ends=data.ends))


def test_lambda_return_is_the_mixture_of_n_step_returns() -> None:
    """``(1 - lmbda) * sum_n lmbda^(n-1) G^(n)``, what is left of the weights on the longest."""
    data, gamma, lmbda = random_data([(6, "truncated")]), 0.9, 0.7
    n_step = [
        sum(gamma**k * data.reward[k] for k in range(n)) + gamma**n * data.next_value[n - 1]
        for n in range(1, 7)
    ]
    mixture = (1 - lmbda) * sum(lmbda ** (n - 1) * n_step[n - 1] for n in range(1, 6)) + lmbda**5 * n_step[5]
    out = td_lambda_return_estimate(gamma, lmbda, data.next_value, data.reward, data.done, data.terminated)
    torch.testing.assert_close(out[0], mixture)


@pytest.mark.parametrize(("rho", "c"), [(1.0, 1.0), (2.0, 0.5), (0.3, 1.5), (math.inf, math.inf)])
def test_vtrace_thresholds(rho: float, c: float) -> None:
    data = random_data(MIXED)
    alone = [vtrace_alone(run, rho, c) for run in data.runs()]
    wanted = [torch.cat(parts) for parts in zip(*alone, strict=True)]
    for thresholds in ((rho, c), (torch.tensor(rho), torch.tensor(c)), (torch.full((16,), rho), c)):
        out = FUNCTIONS["vtrace"][0](data, ends=data.ends, rho_thresh=thresholds[0], c_thresh=thresholds[1])
        assert_close(out, wanted)


def test_far_rewards_are_not_truncated() -> None:
    """A filter that stops at 1e-7 of the discount would not see the reward 400 rows on."""
    reward = torch.zeros(401, dtype=torch.float64)
    reward[-1] = 1e30
    done = torch.arange(401) == 400
    assert reward2go(reward, done, 0.9)[0].item() == pytest.approx(1e30 * 0.9**400)
    none = torch.zeros(401, dtype=torch.float64)
    advantage, _ = generalized_advantage_estimate(0.95, 0.95, none, none, reward, done)
    assert advantage[0].item() == pytest.approx(1e30 * 0.9025**400)


def test_vec_names_are_the_same_functions() -> None:
    names = [name for name in estimators.__all__ if name.startswith("vec_")]
    assert len(names) == 5
    for name in names:
        assert getattr(estimators, name) is getattr(estimators, name.removeprefix("vec_"))


ONE, NO = torch.ones(3), torch.zeros(3, dtype=torch.bool)
BAD: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "gamma above 1": (lambda: reward2go(ONE, NO, 1.01), ValueError, "gamma must lie in [0, 1], got 1.01"),
    "gamma of nan": (lambda: td0_return_estimate(math.nan, ONE, ONE, NO), ValueError, "got nan"),
    "gamma of a row": (
        lambda: td1_return_estimate(torch.tensor([0.5, 1.5, 0.5]), ONE, ONE, NO),
        ValueError,
        "gamma must lie in [0, 1], got 1.5",
    ),
    "lmbda below 0": (
        lambda: td_lambda_return_estimate(0.9, -0.5, ONE, ONE, NO),
        ValueError,
        "lmbda must lie in [0, 1], got -0.5",
    ),
    "gamma of another shape": (
        lambda: reward2go(ONE, NO, torch.ones(2)),
        ValueError,
        "gamma must be a number, one per row (3,) or broadcast to the reward (3,), got shape (2,)",
    ),
    "int reward": (
        lambda: reward2go(torch.ones(3, dtype=torch.int64), NO, 0.9),
        TypeError,
        "reward must be floating, got torch.int64: cast it, e.g. with .float()",
    ),
    "float done": (lambda: reward2go(ONE, ONE, 0.9), TypeError, "done must be bool, got torch.float32"),
    "shape of a value": (
        lambda: td_lambda_return_estimate(0.9, 0.9, torch.ones(2), ONE, NO),
        ValueError,
        "next_state_value and reward must have one shape, got (2,) and (3,)",
    ),
    "shape of a log-probability": (
        lambda: vtrace_advantage_estimate(0.9, torch.ones(2), ONE, ONE, ONE, ONE, NO),
        ValueError,
        "log_pi must have the reward's shape (3,), where feature dims may be 1 or missing, got (2,)",
    ),
    "shape of a flag": (
        lambda: td1_return_estimate(0.9, ONE, ONE, NO[:2]),
        ValueError,
        "done must have the reward's shape (3,), where feature dims may be 1 or missing, got (2,)",
    ),
    "no flag": (
        lambda: td0_return_estimate(0.9, ONE, ONE),
        ValueError,
        "pass terminated= (the rows that are not bootstrapped), or done=",
    ),
    "rolling_gamma": (
        lambda: td1_return_estimate(0.9, ONE, ONE, NO, rolling_gamma=False),
        ValueError,
        "rolling_gamma=False (one row's gamma for all later rewards) is not supported, as it is no recursion",
    ),
    "threshold": (
        lambda: vtrace_advantage_estimate(0.9, ONE, ONE, ONE, ONE, ONE, NO, rho_thresh=-1.0),
        ValueError,
        "rho_thresh must be at least 0, got -1.0",
    ),
    "time_dim": (
        lambda: reward2go(torch.ones(3, 2), torch.zeros(3, 2, dtype=torch.bool), 0.9, time_dim=2),
        ValueError,
        "time_dim must name a dim of the reward (3, 2), got 2",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    call, error, text = BAD[name]
    with pytest.raises(error, match=re.escape(text)):
        call()
