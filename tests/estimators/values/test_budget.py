"""``shifted_budget``: one call on exactly T + budget places for each series, and the rows that do not fit."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from flatroll.estimators import GAE, TD0Estimator, TDLambdaEstimator
from flatroll.estimators.values.extended_stream import Budgeted
from flatroll.modules import GRUModule

BatchOf = Callable[..., TensorDict]


def places(text: str, budget: int) -> tuple[str, str]:
    """The stream of one series of rows "-" that go on, "c" bootstrapped ends and "t" terminated ones.

    Returns its places, "0" row 0, "0'" what follows it, and which rows are valid.
    """
    opened = torch.tensor([[x == "c" for x in text]])
    stream = Budgeted.of(opened, budget)
    shown = [
        f"{row}{chr(39) * ins}"
        for row, ins in zip(stream.source.tolist(), stream.inserted.tolist(), strict=True)
    ]
    return " ".join(shown), "".join("01"[v] for v in stream.valid[0].tolist())


@pytest.mark.parametrize(
    ("series", "budget", "stream", "valid"),
    [
        ("----", 1, "0 1 2 3 3", "1111"),  # the last row goes on outside of the batch: marked "c" by run_ends
        ("---c", 1, "0 1 2 3 3'", "1111"),
        ("-c-c", 1, "0 1 1' 2 3", "1110"),
        ("-c-c", 2, "0 1 1' 2 3 3'", "1111"),
        ("cccc", 1, "0 0' 1 1' 2", "1100"),
        ("cccc", 3, "0 0' 1 1' 2 2' 3", "1110"),
        ("cccc", 9, "0 0' 1 1' 2 2' 3 3' 3 3 3 3 3", "1111"),
        ("-t-t", 1, "0 1 2 3 3", "1111"),  # nothing stands behind a termination
        ("c", 1, "0 0'", "1"),
        ("t", 2, "0 0 0", "1"),
    ],
)
def test_places(series: str, budget: int, stream: str, valid: str) -> None:
    assert places(series, budget) == (stream, valid)


def test_series_have_places_of_their_own() -> None:
    opened = torch.tensor([[False, True, False], [True, True, True], [False, False, True]])
    together = Budgeted.of(opened, 1)
    for i in range(3):
        alone = Budgeted.of(opened[i : i + 1], 1)
        rows, spots = slice(3 * i, 3 * i + 3), slice(4 * i, 4 * i + 4)
        assert (together.source[spots] - 3 * i).tolist() == alone.source.tolist()
        assert (together.position[rows] - 4 * i).tolist() == alone.position.tolist()
        assert together.inserted[spots].tolist() == alone.inserted.tolist()
        assert together.valid[i].tolist() == alone.valid[0].tolist()


class Calls:
    """A critic that keeps the observations of each call."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.network = TensorDictModule(self.value, in_keys=["observation"], out_keys=["state_value"])

    def value(self, observation: Tensor) -> Tensor:
        self.seen.append(observation)
        return observation.square().sum(-1, keepdim=True).sqrt()


RUNS = st.lists(
    st.tuples(st.integers(1, 5), st.sampled_from(["terminated", "truncated", "both", "cut"])),
    min_size=1,
    max_size=7,
)


@examples(60)
@given(runs=RUNS, budget=st.integers(1, 8), compact=st.booleans())
def test_valid_rows_are_those_of_the_batch_up_to_there(
    batch_of: BatchOf, runs: list[tuple[int, str]], budget: int, compact: bool
) -> None:
    """Values are exact; the trace of the last valid row is cut there, which a batch of the valid rows has, too."""
    batch, calls = batch_of(runs), Calls()
    options: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.8, "value_network": calls.network}
    given = batch.exclude(("next", "observation")) if compact else batch.clone()
    ids = batch["collector", "traj_ids"]
    row = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])]).nonzero().squeeze(-1)
    final = TensorDict({"row": row, ("next", "observation"): batch["next", "observation"][row]}, [len(row)])
    extra = {"final": final} if compact else {}
    for estimator in (
        GAE(**options, shifted=True, shifted_budget=budget),
        TDLambdaEstimator(**options, shifted=True, shifted_budget=budget),
    ):
        calls.seen.clear()
        out = estimator(given.clone(), **extra)
        assert [len(x) for x in calls.seen] == [len(batch) + budget]
        valid = out["shifted_valid"]
        count = int(valid.sum())
        assert count > 0 and valid[:count].all()
        assert count >= len(batch) - max(len(runs) - budget, 0)
        shifted = type(estimator)(**options)(batch[:count].clone())
        for key in ("advantage", "value_target", "state_value"):
            torch.testing.assert_close(out[key][:count], shifted[key])
            assert not out[key][count:].any()


def test_all_that_fits_is_all_of_it(batch_of: BatchOf) -> None:
    batch = batch_of([(4, "truncated"), (3, "terminated"), (1, "cut"), (2, "truncated")])
    exact = GAE(gamma=0.9, lmbda=0.8, value_network=Calls().network)(batch.clone())
    for budget in (3, 4, 20):
        gae = GAE(gamma=0.9, lmbda=0.8, value_network=Calls().network, shifted=True, shifted_budget=budget)
        out = gae(batch.clone())
        assert out["shifted_valid"].all()
        torch.testing.assert_close(out["advantage"], exact["advantage"])
        torch.testing.assert_close(out["next", "state_value"], exact["next", "state_value"])


def test_a_termination_in_the_last_valid_row_stands(batch_of: BatchOf) -> None:
    """Row 5 is moved out, row 4 is the last that counts, and the env ended it: nothing is bootstrapped there."""
    batch = batch_of([(2, "truncated"), (3, "terminated"), (1, "truncated")])
    td0 = TD0Estimator(gamma=0.9, value_network=Calls().network, shifted=True, shifted_budget=1)
    out = td0(batch)
    assert out["shifted_valid"].tolist() == [True] * 5 + [False]
    assert out["value_target"][4] == batch["next", "reward"][4]


def test_compact_batch_without_final_says_so(batch_of: BatchOf) -> None:
    batch = batch_of([(2, "truncated"), (2, "cut")])
    td0 = TD0Estimator(gamma=0.9, value_network=Calls().network, shifted=True, shifted_budget=2)
    with pytest.warns(UserWarning, match="no final= came with it"):
        out = td0(batch.exclude(("next", "observation")))
    stands_in = out["state_value"]
    torch.testing.assert_close(out["next", "state_value"][[1, 3]], stands_in[[1, 3]])
    torch.testing.assert_close(out["next", "state_value"][[0, 2]], stands_in[[1, 3]])
    other = TensorDict({"row": torch.tensor([1]), ("next", "observation"): torch.zeros(1, 3).double()}, [1])
    with pytest.raises(ValueError, match=re.escape("final has no next observation for row 3")):
        td0(batch.exclude(("next", "observation")), final=other)


@pytest.mark.parametrize("chunk", [{}, {"value_chunk_size": 3}, {"num_chunks": 2}], ids=str)
@pytest.mark.parametrize("shape", [(12,), (3, 4)], ids=str)
def test_a_memory_meets_each_run_in_order(
    batch_of: BatchOf, chunk: dict[str, int], shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    gru = GRUModule(3, 4, in_key="observation", out_key="h")
    critic = TensorDictSequential(gru, TensorDictModule(nn.Linear(4, 1), ["h"], ["state_value"])).double()
    batch = batch_of([(4, "terminated"), (2, "cut"), (2, "truncated"), (3, "truncated"), (1, "cut")])
    batch["recurrent_state"] = torch.randn(12, 1, 4, dtype=torch.float64)  # only those of first rows are read
    batch = batch.reshape(shape)
    exact = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch.clone())
    for budget, fits in ((5, True), (2, len(shape) == 2), (1, False)):
        gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic, shifted=True, shifted_budget=budget, **chunk)
        out = gae(batch.clone())
        valid = out["shifted_valid"]
        assert bool(valid.all()) is fits
        torch.testing.assert_close(out["state_value"][valid], exact["state_value"][valid])
        torch.testing.assert_close(out["next", "state_value"][valid], exact["next", "state_value"][valid])
        if fits:
            torch.testing.assert_close(out["advantage"], exact["advantage"])


def test_gradients_reach_the_network_and_stay_finite(batch_of: BatchOf) -> None:
    """The gradient of a norm at 0 is NaN: places left over must not hold zeros."""
    batch = batch_of([(4, "truncated"), (3, "terminated")])
    net = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    critic = TensorDictModule(
        lambda x: net(x).square().sum(-1, keepdim=True).sqrt(), ["observation"], ["state_value"]
    )
    options: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.8, "value_network": critic, "differentiable": True}
    grads = []
    for more in ({}, {"shifted": True, "shifted_budget": 6}):
        target = GAE(**options, **more)(batch.clone())["value_target"]
        grads.append(torch.autograd.grad(target.square().sum(), net.weight)[0])
    torch.testing.assert_close(grads[1], grads[0])


def test_static_shapes_compile_once(batch_of: BatchOf) -> None:
    """Batches of other runs, one graph: the network sees the same shapes."""
    shapes: set[torch.Size] = set()

    def value(x: Tensor) -> Tensor:
        shapes.add(x.shape)
        return x.sum(-1, keepdim=True)

    critic = TensorDictModule(value, ["observation"], ["state_value"])
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=critic, shifted=True, shifted_budget=2)
    batches: list[TensorDictBase] = [
        batch_of([(6, "cut")]),
        batch_of([(2, "truncated"), (2, "terminated"), (2, "cut")]),
        batch_of([(1, "truncated")] * 6),
    ]
    for batch in batches:
        gae(batch)
    assert shapes == {torch.Size([8, 3])}
