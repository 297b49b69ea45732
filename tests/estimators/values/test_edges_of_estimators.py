"""Value estimators at their edges: missing flags, bounds of gamma and lambda, memory, masks, NaN, chunks.

Speed is measured in ``benchmarks/bench_gae.py``; here operations and bytes are counted.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.estimators import (
    GAE,
    ClipPPOLoss,
    TD0Estimator,
    TD1Estimator,
    TDLambdaEstimator,
    VTrace,
    generalized_advantage_estimate,
    td_lambda_return_estimate,
    vtrace_advantage_estimate,
)
from flatroll.modules import GRUModule, LSTMModule

BatchOf = Callable[..., TensorDict]
PeakOf = Callable[[Callable[[], object]], int]


def norm_critic() -> TensorDictModule:
    return TensorDictModule(
        lambda x: x.square().sum(-1, keepdim=True).sqrt(), in_keys=["observation"], out_keys=["state_value"]
    )


def wide_critic() -> TensorDictModule:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 256), nn.Tanh(), nn.Linear(256, 1))
    return TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])


def actor() -> ProbabilisticTensorDictSequential:
    logits = TensorDictModule(lambda x: x, ["observation"], ["logits"])
    choose = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    return ProbabilisticTensorDictSequential(logits, choose)


def compact(batch: TensorDict) -> tuple[TensorDict, TensorDict]:
    """The batch without next observations, and those that no row of it holds."""
    ids = batch["collector", "traj_ids"]
    row = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])]).nonzero().squeeze(-1)
    final = TensorDict({"row": row, ("next", "observation"): batch["next", "observation"][row]}, [len(row)])
    return batch.exclude(("next", "observation")), final


class Ops(TorchDispatchMode):
    """Counts the torch operations of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


OPTIONS: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.8}


def test_missing_terminated_is_an_error_not_done(batch_of: BatchOf) -> None:
    """``done`` in its place would make every truncation a termination."""
    batch = batch_of([(3, "truncated")]).exclude(("next", "terminated"))
    for kind in (GAE, TDLambdaEstimator):
        with pytest.raises(KeyError, match="no entry"):
            kind(**OPTIONS, value_network=norm_critic())(batch)


def test_no_loop_over_time(batch_of: BatchOf) -> None:
    """The number of torch operations does not depend on the rows."""
    counts = []
    for rows in (16, 2048):
        batch = batch_of([(rows, "truncated")])
        batch["action"] = torch.zeros(rows, dtype=torch.int64)
        batch["action_log_prob"] = -torch.rand(rows, dtype=torch.float64)
        vtrace = VTrace(gamma=0.9, actor_network=actor(), value_network=norm_critic())
        for estimator in (GAE(**OPTIONS, value_network=norm_critic()), vtrace):
            with Ops() as ops:
                estimator(batch)
            counts.append(ops.count)
    assert counts[:2] == counts[2:] and max(counts) <= 100


@pytest.mark.parametrize("lmbda", [0.0, 1e-9, 1.0])
@pytest.mark.parametrize("gamma", [0.0, 1e-9, 1.0])
def test_factors_at_and_near_their_bounds(batch_of: BatchOf, gamma: float, lmbda: float) -> None:
    """With lambda near 0 the estimate is TD(0), with 1 it is TD(1)."""
    batch = batch_of([(5, "truncated"), (1, "terminated"), (4, "cut")])
    for kind in (GAE, TDLambdaEstimator):
        out = kind(gamma=gamma, lmbda=lmbda, value_network=norm_critic())(batch.clone())
        if lmbda < 1.0:
            td0 = TD0Estimator(gamma=gamma, value_network=norm_critic())(batch.clone())
            torch.testing.assert_close(out["advantage"], td0["advantage"], rtol=1e-6, atol=1e-6)
        elif kind is TDLambdaEstimator:
            td1 = TD1Estimator(gamma=gamma, value_network=norm_critic())(batch.clone())
            torch.testing.assert_close(out["advantage"], td1["advantage"])


def test_memory_does_not_depend_on_the_longest_run(peak_of: PeakOf) -> None:
    """Nothing is padded: one run of 1,500 rows beside 1,500 runs of one row takes as much as equal runs."""
    rows = 3000
    value, next_value, reward = torch.randn(3, rows, 1)
    peaks = []
    for runs in ([1500] + [1] * 1500, [2] * 1500, [3000]):
        done = torch.zeros(rows, 1, dtype=torch.bool)
        done[torch.tensor(runs).cumsum(0) - 1] = True
        for grad in (False, True):
            columns = value, next_value, reward.clone().requires_grad_(grad), done
            peaks.append(peak_of(lambda c=columns: generalized_advantage_estimate(0.99, 0.95, *c)))
            peaks.append(peak_of(lambda c=columns: td_lambda_return_estimate(0.99, 0.95, *c[1:])))
    assert max(peaks) <= 15 * 4 * rows  # a few columns; padding takes 750 times as many


def test_the_trace_is_not_filtered() -> None:
    """A reward 599 steps away still counts, with its exact weight."""
    reward = torch.zeros(600, 1, dtype=torch.float64)
    reward[-1] = 1.0
    done = torch.zeros(600, 1, dtype=torch.bool)
    done[-1] = True
    advantage, _ = generalized_advantage_estimate(0.97, 0.97, 0 * reward, 0 * reward, reward, done)
    assert advantage[0].item() == pytest.approx(0.97 ** (2 * 599), rel=1e-9)  # 1.4e-16


@pytest.mark.parametrize("runs", [[(5, "truncated")] * 4, [(64, "truncated")] * 64], ids=["4 x 5", "64 x 64"])
def test_one_call_keeps_every_row_and_its_trace(
    batch_of: BatchOf, gae_loop: Callable[..., Tensor], runs: list[tuple[int, str]]
) -> None:
    """``shifted=True`` without a budget leaves out no row and cuts no trace."""
    batch = batch_of(runs)
    out = GAE(**OPTIONS, value_network=norm_critic(), shifted=True)(batch.clone())
    assert out["shifted_valid"].all()
    torch.testing.assert_close(out["advantage"], gae_loop(batch, norm_critic(), 0.9, 0.8))


def test_compact_and_one_call_is_exact(batch_of: BatchOf, gae_loop: Callable[..., Tensor]) -> None:
    """The values at truncations and at the end of the batch are those of the final observations."""
    batch = batch_of([(5, "truncated"), (5, "terminated"), (5, "cut"), (5, "truncated")])
    thin, final = compact(batch)
    for budget in (None, 4):
        gae = GAE(**OPTIONS, value_network=norm_critic(), shifted=True, shifted_budget=budget)
        out = gae(thin.clone(), final=final)
        torch.testing.assert_close(out["advantage"], gae_loop(batch, norm_critic(), 0.9, 0.8))


@pytest.mark.parametrize("options", [{}, {"shifted": True}], ids=str)
def test_an_old_mask_masks_nothing(batch_of: BatchOf, options: dict[str, Any]) -> None:
    """A ``shifted_valid`` in the input, such as a buffer gives, is written anew and not read."""
    batch = batch_of([(4, "truncated"), (3, "terminated")])
    wanted = GAE(**OPTIONS, value_network=norm_critic())(batch.clone())
    batch["shifted_valid"] = torch.arange(7) < 2
    for kind in (GAE, TDLambdaEstimator):
        out = kind(**OPTIONS, value_network=norm_critic(), **options)(batch.clone())
        assert out["shifted_valid"].all()
        torch.testing.assert_close(out["advantage"], wanted["advantage"])


def test_nan_in_the_data_changes_no_entry(batch_of: BatchOf) -> None:
    """With a NaN in a next observation the output has the same entries, and a clipped critic loss is finite."""
    batch = batch_of([(4, "truncated"), (3, "terminated")])
    logits = TensorDictModule(nn.Linear(3, 4).double(), ["observation"], ["logits"])
    choose = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    batch["action"] = torch.zeros(7, dtype=torch.int64)
    batch["action_log_prob"] = torch.full((7,), -1.0).double()
    keys = []
    for row in (None, 6, 3):
        given = batch.clone()
        if row is not None:
            given["next", "observation"][row] = torch.nan
        gae = GAE(**OPTIONS, value_network=norm_critic())
        if row == 3:  # truncated there: the approximation is announced
            with pytest.warns(UserWarning, match="is NaN in 1 rows that are not terminated"):
                out = gae(given)
        else:
            out = gae(given)
        keys.append(set(out.keys(True, True)))
        assert out["advantage"].isfinite().all()
        loss = ClipPPOLoss(ProbabilisticTensorDictSequential(logits, choose), norm_critic(), clip_value=True)
        assert loss(out)["loss_critic"].isfinite()
    assert keys[0] == keys[1] == keys[2]


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
def test_recurrent_critics_need_no_switch(batch_of: BatchOf, kind: Any) -> None:
    """A batch of several trajectories gives what each trajectory gives alone."""
    memory = kind(3, 4, in_key="observation", out_key="h")
    critic = TensorDictSequential(memory, TensorDictModule(nn.Linear(4, 1), ["h"], ["state_value"])).double()
    batch = batch_of([(4, "truncated"), (3, "terminated"), (2, "cut")])
    batch.update(memory.make_tensordict_primer().expand(9).double())
    ids = batch["collector", "traj_ids"]
    gae = GAE(**OPTIONS, value_network=critic)
    wanted = torch.cat([gae(batch[ids == number])["advantage"] for number in ids.unique()])
    torch.testing.assert_close(gae(batch)["advantage"], wanted)


@pytest.mark.parametrize(
    "options", [{}, {"shifted": True}, {"shifted": True, "shifted_budget": 400}, {"compact": True}], ids=str
)
def test_chunks_bound_the_memory(batch_of: BatchOf, peak_of: PeakOf, options: dict[str, Any]) -> None:
    """Observations are not stacked before they are split into chunks.

    In chunks the peak grows by the columns that are written, 40 bytes a row here; in one piece by 2,000.
    """
    more = {key: value for key, value in options.items() if key != "compact"}
    peaks: dict[bool, list[int]] = {True: [], False: []}
    for rows in (5_000, 20_000):
        batch, final = batch_of([(50, "truncated")] * (rows // 50), dtype=torch.float32), None
        if "compact" in options:
            batch, final = compact(batch)
        outs = []
        for chunked in (True, False):
            chunk = {"value_chunk_size": 500} if chunked else {}
            gae = GAE(**OPTIONS, value_network=wide_critic(), **more, **chunk)
            given = batch.clone()
            peaks[chunked].append(peak_of(lambda g=gae, b=given, f=final: g(b, final=f)))
            outs.append(given["advantage"])
        torch.testing.assert_close(outs[0], outs[1])
    grows = {chunked: (many - few) / 15_000 for chunked, (few, many) in peaks.items()}
    assert grows[True] < 40 < 2000 < grows[False]
    assert peaks[True][0] < 1.7e6  # a chunk's activations, and the columns


@pytest.mark.parametrize("chunk", [{"value_chunk_size": 5}, {"num_chunks": 3}], ids=str)
def test_chunks_cut_no_run_of_a_memory(batch_of: BatchOf, chunk: dict[str, int]) -> None:
    """A chunk ends with a run, so a stored state that is stale is read nowhere but at starts."""
    torch.manual_seed(0)
    memory = GRUModule(3, 4, in_key="observation", out_key="h")
    critic = TensorDictSequential(memory, TensorDictModule(nn.Linear(4, 1), ["h"], ["state_value"])).double()
    batch = batch_of([(14, "truncated"), (3, "terminated"), (9, "cut"), (1, "truncated")])
    batch["recurrent_state"] = torch.randn(27, 1, 4, dtype=torch.float64)  # of older weights
    whole = GAE(**OPTIONS, value_network=critic)(batch.clone())["advantage"]
    torch.testing.assert_close(GAE(**OPTIONS, value_network=critic, **chunk)(batch)["advantage"], whole)


def test_vtrace_averages_over_the_rows_that_count(batch_of: BatchOf) -> None:
    """``average_adv`` takes its moments over the rows that ``shifted_valid`` keeps."""
    batch = batch_of([(4, "truncated"), (3, "truncated"), (4, "truncated")])
    batch["action"] = torch.zeros(11, dtype=torch.int64)
    batch["action_log_prob"] = -torch.rand(11, dtype=torch.float64)
    vtrace = VTrace(
        gamma=0.9,
        actor_network=actor(),
        value_network=norm_critic(),
        average_adv=True,
        shifted=True,
        shifted_budget=1,
    )
    out = vtrace(batch)
    kept = out["advantage"][out["shifted_valid"]]
    assert len(kept) == 9
    torch.testing.assert_close((kept.mean(), kept.std()), (kept.new_tensor(0.0), kept.new_tensor(1.0)))


@pytest.mark.parametrize("number", [-0.1, 1.1, float("nan"), torch.tensor(1.1)], ids=str)
def test_factors_are_checked(number: Any) -> None:
    """Modules and functions refuse gamma and lambda outside [0, 1]."""
    text = "must lie in [0, 1]"
    one, no = torch.ones(3), torch.zeros(3, dtype=torch.bool)
    calls: list[Callable[[], object]] = [
        lambda: GAE(gamma=number, lmbda=0.9, value_network=None),
        lambda: GAE(gamma=0.9, lmbda=number, value_network=None),
        lambda: VTrace(gamma=number, actor_network=actor(), value_network=None),
        lambda: TD1Estimator(gamma=number, value_network=None),
        lambda: generalized_advantage_estimate(number, 0.9, one, one, one, no),
        lambda: generalized_advantage_estimate(0.9, number, one, one, one, no),
        lambda: vtrace_advantage_estimate(number, one, one, one, one, one, no),
        lambda: td_lambda_return_estimate(0.9, torch.as_tensor(number).expand(3), one, one, no),
    ]
    for call in calls:
        with pytest.raises(ValueError, match=re.escape(text)):
            call()


def test_vtrace_weighs_the_action_that_was_taken(batch_of: BatchOf) -> None:
    """The weight is the probability of the batch's action, not of one drawn now."""
    batch = batch_of([(6, "truncated")])
    batch["action"] = torch.arange(6) % 3
    batch["action_log_prob"] = actor().get_dist(batch.select("observation")).log_prob(batch["action"])
    out = VTrace(gamma=0.9, actor_network=actor(), value_network=norm_critic())(batch.clone())
    td1 = TD1Estimator(gamma=0.9, value_network=norm_critic())(batch)
    torch.testing.assert_close(out["value_target"], td1["value_target"])  # on policy: every weight is 1


def test_a_termination_before_the_rows_left_out_stands(batch_of: BatchOf) -> None:
    """With a budget, a termination in the last row that counts is not bootstrapped."""
    batch: TensorDictBase = batch_of([(2, "truncated"), (3, "terminated"), (1, "truncated")])
    out = GAE(**OPTIONS, value_network=norm_critic(), shifted=True, shifted_budget=1)(batch)
    assert out["shifted_valid"].tolist() == [True] * 5 + [False]
    residual = batch["next", "reward"][4] - out["state_value"][4]
    torch.testing.assert_close(out["advantage"][4], residual)


def test_several_columns_of_done_are_refused(batch_of: BatchOf) -> None:
    batch = batch_of([(4, "terminated")])
    batch["next", "done"] = batch["next", "done"].expand(4, 3)
    text = re.escape("batch[('next', 'done')] must have shape (4,) or (4, 1), got (4, 3)")
    with pytest.raises(ValueError, match=text):
        GAE(**OPTIONS, value_network=norm_critic())(batch)
