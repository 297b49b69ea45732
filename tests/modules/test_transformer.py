"""TransformerModule: cached steps, flat passes and a plain loop give the same numbers and gradients."""

import itertools
import math
import warnings
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout import run_starts
from flatroll.modules import BurnIn, FFMModule, LRUModule, TransformerModule, set_recurrent_mode

IN, WIDTH, HEADS = 3, 8, 2
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10, torch.bfloat16: 0.2}
POSITIONS = ["rotary", "learned", None]
KEYS = {"in_key": "observation", "out_key": "features"}


def module_of(layers=2, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    module = TransformerModule(IN, WIDTH, layers, HEADS, **KEYS, dtype=dtype, **options)
    for weight in module.parameters():  # biases, norms and distances are not those of the start
        torch.nn.init.normal_(weight, std=0.4)
    return module


def batch_of(lengths, dtype=torch.float64, seed=1):
    generator = torch.Generator().manual_seed(seed)
    starts = torch.cat([torch.arange(length) == 0 for length in lengths])
    rows = torch.randn(len(starts), IN, generator=generator, dtype=torch.float64).to(dtype)
    return TensorDict({"observation": rows, "is_init": starts.unsqueeze(-1)}, [len(starts)])


def flat(module, batch, burn_in=0):
    with set_recurrent_mode("recurrent", burn_in=burn_in):
        return module(batch.copy())["features"]


def stepped(module, batch):
    """Row by row in sequential mode; the cache is carried over run ends, too, and reset by is_init."""
    step = module.make_tensordict_primer().expand(1)
    outputs = []
    for row in batch.split(1):
        step = module(step.update(row))
        outputs.append(step["features"])
        step = carried(step)
    return torch.cat(outputs)


def carried(step):
    return TensorDict({key: step["next", key] for key in TransformerModule.state_keys}, step.batch_size)


def reference(module, batch):
    """The network by its definition, run by run and row by row, with a loop over keys."""
    net = module.network
    outputs = []
    for run in batch["observation"].tensor_split(run_starts(batch).nonzero().flatten()[1:]):
        hidden = list(net.embed(run))
        for layer, block in enumerate(net.blocks):
            normed = [block.attention_norm(x) for x in hidden]
            heads = [block.projection(x).view(3, HEADS, -1) for x in normed]
            gathered = []
            for i, (query, _, _) in enumerate(heads):
                least = 0 if module.context is None else max(0, i - module.context + 1)
                scores = []
                for j in range(least, i + 1):
                    key = heads[j][1]
                    if module.position == "rotary":
                        score = (turned(query, i) * turned(key, j)).sum(-1)
                    else:
                        score = (query * key).sum(-1)
                    score = score / math.sqrt(WIDTH // HEADS)
                    if module.position == "learned":
                        score = score + net.distances[layer, :, i - j]
                    scores.append(score)
                weights = torch.stack(scores).softmax(0)
                values = torch.stack([heads[j][2] for j in range(least, i + 1)])
                gathered.append((weights[..., None] * values).sum(0).flatten())
            hidden = [merged(block, *pair) for pair in zip(hidden, gathered, strict=True)]
        outputs += [net.norm(x) for x in hidden]
    return torch.stack(outputs)


def turned(vector, position):
    """Pairs of features, as complex numbers, times a unit of the pair's angle."""
    half = vector.shape[-1] // 2
    angles = position * 10_000.0 ** -(torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(vector[..., ::2], vector[..., 1::2]) * torch.polar(
        torch.ones(half).double(), angles
    )
    return torch.stack([pairs.real, pairs.imag], -1).flatten(-2)


def merged(block, hidden, gathered):
    hidden = passed(block.attention_gate, hidden, block.attention_out(gathered))
    return passed(block.mlp_gate, hidden, block.mlp(block.mlp_norm(hidden)))


def passed(gate, x, y):
    if gate is None:
        return x + y
    y = y.relu()
    of_new = gate.of_new.weight @ y
    of_stream = gate.of_stream.weight @ x
    r, z = (of_new[: 2 * WIDTH] + of_stream).view(2, -1)
    z = (z - gate.bias).sigmoid()
    h = (of_new[2 * WIDTH :] + gate.of_reset.weight @ (r.sigmoid() * x)).tanh()
    return (1 - z) * x + z * h


def grads(module, out):
    weights = torch.arange(out.numel(), dtype=out.dtype).view_as(out).cos()
    return torch.autograd.grad((out * weights).sum(), list(module.parameters()), materialize_grads=True)


# --- the same numbers ---------------------------------------------------------------------------------------------


@pytest.mark.cover(2)
@pytest.mark.parametrize(
    "lengths", [[1], [3, 1, 9, 2], [6, 4, 10, 10], [9, 9], [100, 1, 70, 5, 5, 64, 65]], ids=str
)
@pytest.mark.parametrize("context", [1, 7, 64, None])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("gate", [None, "gtrxl"])
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_cached_steps_equal_the_flat_pass(lengths, context, position, gate, layers, dtype):
    if position == "learned" and context is None:
        return
    module = module_of(layers, dtype, context=context, position=position, gate=gate)
    batch = batch_of(lengths, dtype)
    with torch.no_grad():
        found = flat(module, batch)
        torch.testing.assert_close(found, stepped(module, batch), atol=TOLERANCE[dtype], rtol=0)
    assert found.dtype == dtype and found.shape == (len(batch), WIDTH)


@pytest.mark.cover(2)
@pytest.mark.parametrize("lengths", [[2, 90, 1, 12, 70, 10], [20, 4, 24, 23, 1], [30, 30]], ids=str)
@pytest.mark.parametrize("context", [1, 5, 40, None])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("gate", [None, "gtrxl"])
@pytest.mark.parametrize("layers", [1, 2])
def test_outputs_and_gradients_are_those_of_the_definition(lengths, context, position, gate, layers):
    if position == "learned" and context is None:
        return
    module = module_of(layers, context=context, position=position, gate=gate)
    batch = batch_of(lengths)
    found = flat(module, batch)
    expected = reference(module, batch)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(grads(module, found), grads(module, expected), atol=1e-8, rtol=1e-8)


@examples(40)
@given(
    lengths=st.lists(st.integers(1, 150), min_size=1, max_size=8),
    context=st.sampled_from([1, 2, 7, 33, 64, None]),
    position=st.sampled_from(["rotary", None]),
)
def test_runs_are_computed_as_if_alone(lengths, context, position):
    module = module_of(context=context, position=position)
    batch = batch_of(lengths)
    alone = torch.cat([flat(module, run) for run in batch.split(lengths)])
    together = flat(module, batch)
    torch.testing.assert_close(together, alone, atol=1e-10, rtol=0)
    torch.testing.assert_close(grads(module, together), grads(module, alone), atol=1e-8, rtol=1e-8)


def test_any_order_of_runs():
    lengths = [5, 80, 1, 33, 6, 80]
    module = module_of(context=16)
    runs = batch_of(lengths).split(lengths)
    order = [3, 1, 5, 0, 4, 2]
    found = flat(module, torch.cat([runs[i] for i in order])).split([lengths[i] for i in order])
    for i, out in zip(order, found, strict=True):
        torch.testing.assert_close(out, flat(module, runs[i]), atol=1e-12, rtol=0)


def test_rows_of_two_batch_dims_are_one_run_each():
    module = module_of(context=4)
    batch = batch_of([6, 6])
    wide = batch.reshape(2, 6)
    assert torch.equal(flat(module, wide).flatten(0, 1), flat(module, batch))


def test_steps_of_many_envs_with_their_own_resets():
    module = module_of(context=5)
    batch = torch.stack([batch_of([4, 9, 7]), batch_of([13, 6, 1], seed=2)])
    outputs = []
    step = module.make_tensordict_primer().expand(2)
    for t in range(20):
        step = module(step.update(batch[:, t]))
        outputs.append(step["features"])
        step = carried(step)
    torch.testing.assert_close(torch.stack(outputs, 1), flat(module, batch), atol=1e-10, rtol=0)


@pytest.mark.parametrize("position", POSITIONS)
def test_one_compiled_graph(position):
    module = module_of(context=6, position=position)
    batch = batch_of([3, 9, 1])

    def compute(observation, is_init):
        with set_recurrent_mode("recurrent"):
            return module(TensorDict({"observation": observation, "is_init": is_init}, [13]))["features"]

    compiled = torch.compile(compute, backend="eager", fullgraph=True)
    found = compiled(batch["observation"], batch["is_init"])
    expected = flat(module, batch)
    torch.testing.assert_close(found, expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(grads(module, found), grads(module, expected), atol=1e-9, rtol=1e-9)


# --- gradients ----------------------------------------------------------------------------------------------------


def test_no_gradient_crosses_a_run_end_or_the_context():
    module = module_of(1, context=4)
    batch = batch_of([3, 50, 10])
    rows = batch["observation"].requires_grad_()
    (grad,) = torch.autograd.grad(flat(module, batch)[40].sum(), rows)
    assert grad.abs().sum(-1).nonzero().flatten().tolist() == [37, 38, 39, 40]
    (grad,) = torch.autograd.grad(flat(module, batch)[53].sum(), rows)
    assert grad.abs().sum(-1).nonzero().flatten().tolist() == [53]


@pytest.mark.parametrize("context", [3, None])
def test_gradients_through_steps(context):
    """With a gradient the cache is not written in place, so that the loop is differentiable."""
    module = module_of(context=context)
    batch = batch_of([5, 40])
    found, expected = stepped(module, batch), flat(module, batch)
    torch.testing.assert_close(grads(module, found), grads(module, expected), atol=1e-8, rtol=1e-8)


def test_gradients_of_gradients_pass_the_padding():
    from flatroll.modules.backends.attention import GroupedRuns, _Pad, _Unpad

    places = GroupedRuns(
        torch.tensor([True, False, False, True, True, False, False]), None, torch.device("cpu")
    ).places
    rows = torch.randn(7, 2, dtype=torch.float64, requires_grad=True)

    def around(rows):
        return _Unpad.apply(_Pad.apply(rows, *places) ** 3, *places)

    assert torch.equal(around(rows), rows**3)
    assert torch.autograd.gradcheck(around, rows) and torch.autograd.gradgradcheck(around, rows)


# --- burn-in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("layers", "context"), [(1, 4), (2, 4), (3, 2)])
def test_after_burn_in_outputs_are_those_of_the_whole_episode(layers, context):
    module = module_of(layers, context=context, position="learned")
    episode = batch_of([40])
    burn_in = layers * (context - 1)
    part = episode[11:].clone()
    part["is_init"][0] = True
    found, whole = flat(module, part, burn_in), flat(module, episode)[11:]
    torch.testing.assert_close(found[burn_in:], whole[burn_in:], atol=1e-10, rtol=0)
    assert not torch.allclose(found[:burn_in], whole[:burn_in])


def test_burn_in_rows_are_context_without_gradient():
    module = module_of(2, context=8, gate="gtrxl")
    batch = batch_of([12, 2, 9])
    rows = batch["observation"].requires_grad_()
    found = flat(module, batch, burn_in=3)
    assert torch.equal(found, flat(module, batch))

    head = torch.zeros(23, dtype=torch.bool)
    head[[0, 1, 2, 12, 13, 14, 15, 16]] = True
    (grad,) = torch.autograd.grad(found.sum(), rows, retain_graph=True)
    assert torch.equal(grad.abs().sum(-1) == 0, head)

    # by hand: keys and values of the first rows are constants
    def constants(block, inputs, projected):
        return torch.where(head[:, None], projected.detach(), projected)

    for block in module.network.blocks:
        block.projection.register_forward_hook(constants)
    expected = flat(module, batch)
    expected = torch.where(head[:, None], expected.detach(), expected)
    torch.testing.assert_close(grads(module, found), grads(module, expected), atol=1e-10, rtol=0)


def test_runs_that_begin_inside_an_episode_are_said_once():
    module = module_of(context=8, layers=3)
    batch = batch_of([12, 5])
    batch["step_count"] = torch.cat([torch.arange(12), torch.arange(4, 9)]).unsqueeze(-1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flat(module, batch, burn_in=2)
        flat(module, batch[:12])
    with pytest.warns(UserWarning, match=r"1 of 2 runs begin inside an episode.*burn_in=21 makes"):
        flat(module, batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        flat(module, batch)

    module = module_of()
    batch = batch_of([4])
    batch["is_init"][0] = False
    with pytest.warns(UserWarning, match=r"all rows of the episode before them"):
        flat(module, batch)


def test_the_transform_for_stored_states_names_the_way():
    with pytest.raises(ValueError, match=r"pass burn_in= to the loss"):
        BurnIn(module_of(context=4), 2)


# --- the cache ----------------------------------------------------------------------------------------------------


def test_steps_write_in_place_and_allocate_no_cache():
    module = module_of(context=4)
    step = module.make_tensordict_primer().expand(3)
    places = set()
    with torch.no_grad():
        for t in range(20):
            step["observation"] = torch.randn(3, IN, dtype=torch.float64)
            step["is_init"] = torch.tensor([t == 0, t % 3 == 0, t % 7 == 0])
            step = carried(module(step))
            places.add(step["_cache"].data_ptr())
    assert len(places) == 1
    assert step["_cache_steps"].tolist() == [20, 2, 6]


def test_steps_without_a_gradient_follow_those_with_one():
    module = module_of(context=4)
    batch = batch_of([9])
    step = module.make_tensordict_primer().expand(1)
    outputs = []
    for row in batch.split(1):
        with torch.set_grad_enabled(len(outputs) in (2, 3, 6)):
            step = module(step.update(row))
        outputs.append(step["features"])
        step = carried(step)
    torch.testing.assert_close(torch.cat(outputs), flat(module, batch), atol=1e-10, rtol=0)


def test_a_cache_without_limit_doubles():
    module = module_of()
    slots = []
    step = module.make_tensordict_primer().expand(2)
    with torch.no_grad():
        for t in range(70):
            step["observation"] = torch.randn(2, IN, dtype=torch.float64)
            step["is_init"] = torch.tensor([t == 0, t % 9 == 0])
            step = carried(module(step))
            slots.append(step["_cache"].shape[-2])
    assert [slots.index(size) for size in (32, 64, 128)] == [0, 32, 64]


def test_a_step_of_first_rows_needs_no_cache():
    module = module_of(context=4)
    first = TensorDict(
        {
            "observation": torch.zeros(2, IN, dtype=torch.float64),
            "is_init": torch.ones(2, 1, dtype=torch.bool),
        },
        [2],
    )
    out = module(first.copy())
    assert out["next", "_cache"].shape == (2, 2, 2, HEADS, 4, WIDTH // HEADS)
    first["is_init"][1] = False
    with pytest.raises(KeyError, match=r"carry \('next', '_cache'\)"):
        module(first)


def test_a_recorded_batch_gets_no_cache():
    batch = batch_of([4, 3])
    with set_recurrent_mode("recurrent"):
        module_of(context=4)(batch)
    assert sorted(batch.keys(True, True)) == ["features", "is_init", "observation"]


def test_dropout_in_training_mode_only():
    module = module_of(dropout=0.5, context=4)
    batch = batch_of([9])
    assert not torch.equal(flat(module, batch), flat(module, batch))
    module.eval()
    assert torch.equal(flat(module, batch), flat(module, batch))


def test_autocast():
    module = module_of(dtype=torch.float32, context=4)
    batch = batch_of([9, 3], torch.float32)
    with torch.no_grad(), torch.autocast("cpu"):
        found, steps = flat(module, batch), stepped(module, batch)
    with torch.no_grad():
        torch.testing.assert_close(found.float(), flat(module, batch), atol=0.2, rtol=0)
    torch.testing.assert_close(steps.float(), found.float(), atol=0.2, rtol=0)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"num_heads": 3}, r"divisible by num_heads, got embed_size=8 and num_heads=3"),
        ({"num_heads": 8}, r"must be even, got embed_size=8 and num_heads=8"),
        ({"context": 0}, r"context must be an integer of at least 1, got 0"),
        ({"position": "learned"}, r"needs context=, got None"),
        ({"position": "sine"}, r"position must be 'rotary', 'learned' or None, got 'sine'"),
        ({"gate": True}, r"gate must be 'gtrxl' or None"),
        ({"embed_size": 0}, r"embed_size must be an integer of at least 1"),
        ({"input_size": 0}, r"input_size must be"),
        ({"num_layers": 0}, r"num_layers must be"),
        ({"num_heads": 0}, r"num_heads must be"),
        ({"mlp_ratio": 0}, r"mlp_ratio must be"),
        ({"dropout": 1.0}, r"dropout must lie in"),
        (
            {"in_key": None, "in_keys": ["observation", "cache", "_steps"]},
            r"must begin with '_', got 'cache'",
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_wrong_arguments(arguments, text):
    with pytest.raises(ValueError, match=text):
        TransformerModule(**{"input_size": IN, "embed_size": WIDTH, **KEYS, **arguments})


def test_unknown_argument():
    with pytest.raises(TypeError, match=r"TransformerModule\(\) got an unexpected keyword argument 'layers'"):
        TransformerModule(IN, WIDTH, **KEYS, layers=2)


def test_a_cache_that_nobody_could_carry():
    module = TransformerModule(
        IN, WIDTH, in_key="observation", out_keys=["features", "_after", "_steps_after"]
    )
    with pytest.raises(
        RuntimeError, match=r"in_key '_cache' needs out_key \('next', '_cache'\), got '_after'"
    ):
        module.make_tensordict_primer()


@pytest.mark.parametrize("columns", [False, True])
def test_wrong_inputs(columns):
    module = module_of(context=4, dtype=torch.float32)

    def step(**changes):
        entries = {
            "observation": torch.zeros(2, IN),
            "is_init": torch.zeros(2, 1, dtype=torch.bool),
            **dict(module.make_tensordict_primer().expand(2)),
            **changes,
        }
        if columns:
            module.on_columns(entries)
        else:
            module(TensorDict(entries, [2]))

    step()
    cache = module.make_tensordict_primer().expand(2)["_cache"]
    with pytest.raises(ValueError, match=r"must have shape \(2, 2, 2, 2, 4, 4\).*got \(2, 2, 2, 2, 5, 4\)"):
        step(_cache=cache.new_zeros(2, 2, 2, 2, 5, 4))
    with pytest.raises(ValueError, match=r"is on meta, the weights are on cpu"):
        step(_cache=cache.to("meta"))
    with pytest.raises(TypeError, match=r"must be torch.float32 like the weights, got torch.float64"):
        step(_cache=cache.double())
    for steps in (torch.zeros(2), torch.zeros(2, dtype=torch.int64, device="meta")):
        with pytest.raises(ValueError, match=r"'_cache_steps' of the cache must be int64 \[2\] on cpu, got"):
            step(_cache_steps=steps)
    if columns:
        with pytest.raises(ValueError, match=r"must have shape \(2, 2, 2, 2, 4, 4\).*got \(3, "):
            step(_cache=cache.new_zeros(3, 2, 2, 2, 4, 4))
        with pytest.raises(ValueError, match=r"must be int64 \[2\] on cpu, got torch.int64 \[1\]"):
            step(_cache_steps=torch.zeros(1, dtype=torch.int64))
    else:
        with pytest.raises(ValueError, match=r"must have shape \(2, 3\) \(input_size=3\), got \(2, 5\)"):
            step(observation=torch.zeros(2, 5))


def test_wrong_rows():
    module = module_of(context=4)
    with pytest.raises(ValueError, match=r"at least one row"):
        flat(module, batch_of([3])[:0])
    with pytest.raises(TypeError, match=r"must be torch.float64 like the weights"):
        flat(module, batch_of([3], torch.float32))
    with pytest.raises(KeyError, match=r"no boundary marker|is_init"):
        flat(module, batch_of([3]).exclude("is_init"))
    batch = batch_of([6])
    batch["step_count"] = torch.tensor([[0], [1], [2], [4], [3], [5]])
    with pytest.raises(ValueError, match=r"row 3 does not follow row 2"):
        flat(module, batch)


# --- windows ------------------------------------------------------------------------------------------------------


def in_windows(module, batch, sizes):
    """Flat passes over windows, each from the caches that the one before left."""
    caches = None
    outputs = []
    for window in batch.split(sizes):
        with module.begin_from(caches) as after:
            outputs.append(flat(module, window))
        caches = after
    return torch.cat(outputs)


def with_done(batch):
    ends = torch.cat([batch["is_init"][1:], torch.zeros(1, 1, dtype=torch.bool)])
    batch["next", "done"] = ends
    return batch


@examples(25)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=6),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    context=st.sampled_from([1, 2, 7, 33, 64, None]),
    position=st.sampled_from(POSITIONS),
)
def test_any_cut_into_windows_gives_the_same_numbers(lengths, cuts, context, position):
    if position == "learned" and context is None:
        return
    module = module_of(context=context, position=position)
    batch = with_done(batch_of(lengths))
    edges = sorted({0, len(batch), *(int(cut * len(batch)) for cut in cuts)})
    sizes = [stop - first for first, stop in itertools.pairwise(edges)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = in_windows(module, batch, sizes)
    torch.testing.assert_close(found, flat(module, batch), atol=1e-10, rtol=0)


def test_gradients_end_at_a_cut():
    module = module_of(1, context=8)
    batch = with_done(batch_of([12]))
    with module.begin_from(None) as after:
        flat(module, batch[:5])
    rows = batch[5:].clone()
    rows["observation"].requires_grad_()
    with module.begin_from(after):
        flat(module, rows)[0].sum().backward()
    assert rows["observation"].grad.abs().sum(-1).nonzero().flatten().tolist() == [0]
    assert not after["_cache"].requires_grad


def test_caches_of_a_window_are_those_of_steps():
    module = module_of(3, context=4, gate="gtrxl")
    batch = with_done(batch_of([3, 6, 9]))[:-2]
    with module.begin_from(None) as after:
        flat(module, batch)
    step = module.make_tensordict_primer().expand(1).clone()
    with torch.no_grad():
        for row in batch.exclude("next").split(1):
            step = carried(module(step.update(row)))
    torch.testing.assert_close(after["_cache"], step["_cache"], atol=1e-12, rtol=0)
    assert after["_cache_steps"].tolist() == step["_cache_steps"].tolist() == [7]


def test_padding_has_no_cache():
    module = module_of(context=4)
    rows = with_done(batch_of([9, 5]))
    mask = torch.tensor([[True] * 5, [True] * 2 + [False] * 3])
    padded = torch.stack([rows[:5], rows[9:14]])
    padded["collector", "mask"] = mask
    padded["is_init"] &= mask.unsqueeze(-1)
    padded["next", "done"] &= mask.unsqueeze(-1)
    with module.begin_from(None) as after:
        flat(module, padded)
    assert after["_cache_steps"].tolist() == [5, 2]


def test_windows_that_do_not_follow_one_another():
    module = module_of(context=4)
    batch = with_done(batch_of([6, 6]))
    batch["collector", "traj_ids"] = torch.arange(2).repeat_interleave(6)
    with module.begin_from(None) as after:
        flat(module, batch[:4])
    with (
        module.begin_from(after),
        pytest.raises(ValueError, match=r"0 runs .* inside an episode, got caches for 1"),
    ):
        flat(module, batch[6:])
    with (
        module.begin_from(after),
        pytest.raises(ValueError, match=r"trajectories \[1\], got caches for \[0\]"),
    ):
        flat(module, batch[9:])
    with module.begin_from({}), pytest.raises(KeyError, match=r"caches have no entry '_cache'"):
        flat(module, batch[4:])
    after["_cache"] = after["_cache"].float()
    with module.begin_from(after), pytest.raises(TypeError, match=r"must be torch.float64 like the weights"):
        flat(module, batch[4:])
    with module.begin_from(None) as unfilled:
        flat(module, batch[:4].exclude("next"))  # nobody knows whether its run goes on
    assert unfilled == {}


@pytest.mark.parametrize("position", ["rotary", "learned", None])
def test_a_traced_step_is_the_step(position: Any) -> None:
    """`torch.jit.trace` sees no loop of numbers, whose results it would keep."""
    net = TransformerModule(3, 8, context=4, position=position, in_key="observation", out_key="features")

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def forward(self, *columns: Tensor) -> Tensor:
            keys = ("observation", "_cache", "_cache_steps", "is_init")
            rows = TensorDict(dict(zip(keys, columns, strict=True)), [2])
            out: Tensor = self.net(rows)["features"]
            return out

    empty = net.make_tensordict_primer().expand(2)
    rest = (empty["_cache"].clone(), empty["_cache_steps"], torch.ones(2, 1, dtype=torch.bool))
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the trace: shapes become constants
        traced = torch.jit.trace(Step(), (torch.randn(2, 3), *rest), check_trace=False)  # type: ignore[no-untyped-call]
        other = torch.randn(2, 3)
        torch.testing.assert_close(traced(other, *rest), Step()(other, *[x.clone() for x in rest]))


@pytest.mark.parametrize("gradient", [False, True])
def test_a_nan_ends_with_its_episode(gradient: bool) -> None:
    """It stays in the cache, in a slot that the next episode does not see."""
    net = TransformerModule(3, 8, context=4, in_key="observation", out_key="features")
    first = torch.tensor([[True]])
    with torch.set_grad_enabled(gradient):
        rows = net.make_tensordict_primer().expand(1).clone()
        step = net(rows.update({"observation": torch.full((1, 3), torch.nan), "is_init": first}))
        assert step["features"].isnan().all()
        kept = {key: step["next", key] for key in ("_cache", "_cache_steps")}
        after = net(TensorDict({**kept, "observation": torch.randn(1, 3), "is_init": first}, [1]))
    assert after["features"].isfinite().all()


@pytest.mark.parametrize("kind", [LRUModule, FFMModule])
def test_memories_of_complex_numbers_are_float32_or_float64(kind: Any) -> None:
    with pytest.raises(
        ValueError, match=r"dtype must be None, torch\.float32 or torch\.float64, got torch\.bfloat16"
    ):
        kind(3, 8, dtype=torch.bfloat16, in_key="observation", out_key="features")
