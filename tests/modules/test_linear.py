"""Memories by a scan or by chunks over flat batches, against stepping them."""

import re

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import nn

from flatroll.layout import run_ends, run_starts
from flatroll.modules import (
    BurnIn,
    DeltaNetModule,
    FFMModule,
    LinearRecurrentModule,
    LRUModule,
    MinGRUModule,
    S6Module,
    set_recurrent_mode,
)

IN, HIDDEN = 3, 8
KINDS = [MinGRUModule, LinearRecurrentModule, LRUModule, S6Module, FFMModule, DeltaNetModule]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


def module_of(kind, layers=2, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return kind(IN, HIDDEN, layers, in_key="observation", out_key="features", dtype=dtype, **options)


def batch_of(module, starts, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    starts = torch.as_tensor(starts, dtype=torch.bool)
    batch = TensorDict({"is_init": starts.unsqueeze(-1)}, starts.shape)
    batch["observation"] = torch.randn(*starts.shape, IN, generator=generator, dtype=dtype)
    [first] = module.make_tensordict_primer().defaults.values()
    batch["recurrent_state"] = torch.randn(*starts.shape, *first.shape, generator=generator, dtype=dtype)
    return batch


def exact(module, batch, states):
    """The states that are exact in recurrent mode: those of all rows, or of the last rows of runs."""
    if isinstance(module, DeltaNetModule):
        return states[run_ends(batch)]
    return states


def stepped(module, batch):
    """Row by row in sequential mode, the stored state loaded at the first row of each run."""
    outputs, after, state = [], [], None
    for row, first in enumerate(run_starts(batch).tolist()):
        step = batch[row : row + 1].select("observation", "recurrent_state").copy()
        step["is_init"] = torch.zeros(1, 1, dtype=torch.bool)
        if not first:
            step["recurrent_state"] = state
        module(step)
        state = step["next", "recurrent_state"]
        outputs.append(step["features"])
        after.append(state)
    return torch.cat(outputs), torch.cat(after)


def weighted_sum(*values):
    return sum((value * torch.arange(value.numel()).view_as(value).cos()).sum() for value in values)


@pytest.mark.cover(2)
@pytest.mark.parametrize("starts", [[0] * 7, [1] * 7, [0, 0, 1, 1, 0, 0, 1]], ids=str)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_equal_stepping(kind, layers, dtype, starts):
    module = module_of(kind, layers, dtype)
    batch = batch_of(module, starts, dtype)
    wanted = [batch[key].requires_grad_() for key in ("observation", "recurrent_state")] + list(
        module.parameters()
    )
    features, states = stepped(module, batch)
    expected = (features, exact(module, batch, states))
    with set_recurrent_mode("recurrent"):
        module(batch)
    found = (batch["features"], exact(module, batch, batch["next", "recurrent_state"]))
    times = 100 if kind is DeltaNetModule else 10  # its vectors are scaled to length 1
    close = {"atol": times * TOLERANCE[dtype], "rtol": times * TOLERANCE[dtype]}
    torch.testing.assert_close(found, expected, **close)
    grads = [torch.autograd.grad(weighted_sum(*values), wanted) for values in (found, expected)]
    torch.testing.assert_close(*grads, **close)
    inner = ~run_starts(batch)
    assert not grads[0][1][inner].any(), "only the states of first rows are read"


@examples(25)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6), kind=st.sampled_from(KINDS))
def test_any_runs(lengths, kind):
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    module = module_of(kind)
    batch = batch_of(module, torch.cat([torch.ones(1), ids.diff()]) > 0)
    with torch.no_grad():
        expected, _ = stepped(module, batch)
        with set_recurrent_mode("recurrent"):
            torch.testing.assert_close(module(batch)["features"], expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_crosses_a_boundary_and_no_nan_does(kind):
    module = module_of(kind)
    batch = batch_of(module, [1, 0, 0, 1, 0, 1])
    batch["recurrent_state"][[1, 2, 4]] = torch.nan
    batch["observation"].requires_grad_()
    with set_recurrent_mode("recurrent"):
        module(batch)["features"][3:5].sum().backward()
    reached = batch["observation"].grad.ne(0).all(-1)
    assert reached.tolist() == [False] * 3 + [True] * 2 + [False]
    assert all(p.grad is None or p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_lanes_are_runs_of_their_own(kind):
    module = module_of(kind)
    lanes = batch_of(module, [[0, 0, 1, 0], [0, 0, 0, 0]])
    parts = [lane.clone() for lane in lanes.unbind(0)]
    with set_recurrent_mode("recurrent"):
        whole = module(lanes)["features"]
        for lane, part in zip(whole, parts, strict=True):
            torch.testing.assert_close(lane, module(part)["features"], atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_a_rollout_restarts_from_zeros_and_training_recomputes_it(kind):
    module, envs = module_of(kind), 3
    generator = torch.Generator().manual_seed(0)
    step = TensorDict({"is_init": torch.ones(envs, 1, dtype=torch.bool)}, [envs])
    steps = []
    for _ in range(20):
        step["observation"] = torch.randn(envs, IN, generator=generator, dtype=torch.float64)
        steps.append(module(step).clone())
        carried = step["next"].clone()
        step = TensorDict({"is_init": torch.rand(envs, 1, generator=generator) < 0.2}, [envs]).update(carried)
    flat = torch.stack(steps, 1)[:, 7:].reshape(-1)
    flat["collector", "traj_ids"] = torch.arange(envs).repeat_interleave(13)
    again = flat.clone()
    with set_recurrent_mode("recurrent"):
        module(again)
    torch.testing.assert_close(again["features"], flat["features"])
    assert not flat["recurrent_state"][flat["is_init"].squeeze(-1)].any()


@pytest.mark.parametrize("kind", KINDS)
def test_an_in_place_activation_leaves_the_state_alone(kind):
    module = module_of(kind)
    batch = batch_of(module, [1, 0, 1])
    for mode in (True, False):
        with set_recurrent_mode(mode), torch.no_grad():
            module(batch)
            state = batch["next", "recurrent_state"].clone()
            nn.functional.relu_(batch["features"])
            assert batch["next", "recurrent_state"].equal(state)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind is not DeltaNetModule])
def test_one_graph(kind):
    module = module_of(kind, default_recurrent_mode=True)
    torch.compiler.reset()
    found = torch.compile(module, fullgraph=True, backend="eager")(batch_of(module, [1, 0, 0, 1, 0]))
    torch.testing.assert_close(found.to_dict(), module(batch_of(module, [1, 0, 0, 1, 0])).to_dict())


def test_min_gru_by_hand():
    """One unit, weights 1, no bias: z = sigmoid(x), h' = (1 - z) h + z x."""
    module = MinGRUModule(1, 1, bias=False, in_key="observation", out_key="features", state="zero")
    nn.init.ones_(module.gates[0].weight)
    rows = TensorDict({"observation": torch.ones(2, 1), "is_init": torch.tensor([True, False])}, [2])
    with set_recurrent_mode(True):
        module(rows)
    # z = sigmoid(1) = 0.731059; h = 0.731059, then 0.268941 * 0.731059 + 0.731059
    torch.testing.assert_close(rows["features"], torch.tensor([[0.731059], [0.927670]]), atol=1e-6, rtol=0)


def test_the_unit_fades_at_its_rate_and_keeps_the_scale_of_its_input():
    module = module_of(LinearRecurrentModule, layers=1, decay=(0.5, 0.5))
    a, _ = module.terms(0, torch.zeros(1, IN, dtype=torch.float64))
    torch.testing.assert_close(a, torch.full((1, HIDDEN), 0.5, dtype=torch.float64))
    batch = batch_of(module, [1] + [0] * 4999)
    batch["observation"] = torch.randn(
        5000, IN, dtype=torch.float64, generator=torch.Generator().manual_seed(0)
    )
    with set_recurrent_mode(True), torch.no_grad():
        states = module(batch)["next", "recurrent_state"].squeeze(1)
        inputs = module.inputs[0](batch["observation"])
    torch.testing.assert_close(states.std(0), inputs.std(0), atol=0, rtol=0.05)


@pytest.mark.parametrize("kind", KINDS)
def test_bad_input(kind):
    keys = {"in_key": "observation", "out_key": "features"}
    for arguments, text in (
        ((0, 8), r"input_size must be an integer of at least 1, got 0"),
        ((3, 8, 1.5), r"num_layers must be an integer of at least 1, got 1.5"),
    ):
        with pytest.raises(ValueError, match=text):
            kind(*arguments, **keys)
    with pytest.raises(ValueError, match=r"dropout must lie in \[0, 1\), got 1"):
        kind(3, 8, dropout=1, **keys)
    module = module_of(kind)
    with (
        set_recurrent_mode(True),
        pytest.raises(ValueError, match=re.escape(kind.state_meaning) + r" = 2 x \d+\), got"),
    ):
        module(batch_of(module_of(kind, layers=1), [1, 0]))
    with pytest.raises(
        ValueError, match=r"decay must be two floats between 0 and 1 in ascending order, got \(0.9, 1\)"
    ):
        LinearRecurrentModule(3, 5, decay=(0.9, 1), **keys)


@pytest.mark.parametrize("kind", KINDS)
def test_states_can_be_burnt_in(kind):
    module = module_of(kind)
    batch = batch_of(module, [1, 0, 0, 0, 1, 0, 0, 0])
    kept = BurnIn(module, burn_in=2).forward(batch)
    with set_recurrent_mode(True), torch.no_grad():
        whole, rest = module(batch)["features"], module(kept)["features"]
    torch.testing.assert_close(rest, whole[[2, 3, 6, 7]])


@pytest.mark.parametrize("kind", KINDS)
def test_dropout_between_layers(kind):
    module = module_of(kind, dropout=0.5, default_recurrent_mode=True)
    batch = batch_of(module, [1, 0, 0])
    assert not module(batch.clone())["features"].equal(module(batch.clone())["features"])
    module.eval()
    assert module(batch.clone())["features"].equal(module(batch.clone())["features"])
