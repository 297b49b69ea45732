"""LRU, S6, FFM and gated DeltaNet: against loops written from their papers, and in collectors."""

import copy
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor
from torch.nn import functional as F

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.layout import run_ends, run_starts
from flatroll.modules import DeltaNetModule, FFMModule, LRUModule, S6Module, actor, set_recurrent_mode
from flatroll.modules.backends import delta_rule
from flatroll.modules.by_space import MEMORIES
from flatroll.rollouts import Collector
from flatroll.wrappers.testing import Script, ScriptedVectorEnv

IN, HIDDEN = 3, 8
KEYS: dict[str, Any] = {"in_key": "observation", "out_key": "features"}
KINDS: list[Any] = [LRUModule, S6Module, FFMModule, DeltaNetModule]
#: One layer of a module on a row and the state before it: the output and the state after it.
Cell = Callable[[Any, int, Tensor, Tensor], tuple[Tensor, Tensor]]


def lru_cell(net: LRUModule, layer: int, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    into = net.inputs[layer].weight.view(HIDDEN, 2, -1)  # type: ignore[operator]
    out = net.outputs[layer].weight.view(HIDDEN, HIDDEN, 2)  # type: ignore[operator]
    matrix_b = into[:, 0] + 1j * into[:, 1]
    real_part_of_c, minus_imaginary = out[..., 0], out[..., 1]
    matrix_c = real_part_of_c - 1j * minus_imaginary
    factor = torch.exp(-torch.exp(net.log_rates[layer]) + 1j * torch.exp(net.log_angles[layer]))
    before = torch.complex(state[0::2], state[1::2])
    now = factor * before + torch.exp(net.log_scales[layer]) * (matrix_b @ row.to(matrix_b.dtype))
    seen = (matrix_c @ now).real + net.outputs[layer].bias + net.skips[layer].weight @ row  # type: ignore[operator]
    if layer + 1 < net.num_layers:
        seen = F.gelu(seen)
    return seen, torch.stack([now.real, now.imag], -1).flatten()


def s6_cell(net: S6Module, layer: int, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    n = net.state_size
    if layer:
        row = row / torch.sqrt(row.square().mean() + 1e-5)
    x, z, s, b, c = (net.inputs[layer].weight @ row).split([HIDDEN, HIDDEN, HIDDEN, n, n])  # type: ignore[operator]
    step, u = F.softplus(s + net.step_bias[layer]), F.silu(x)
    now = []
    for k in range(n):
        rate = torch.exp(net.log_rates[layer, k])
        now.append(torch.exp(-step * rate) * state.view(n, HIDDEN)[k] + step * u * b[k])
    y = sum(c[k] * now[k] for k in range(n)) + net.skips[layer] * u
    return net.outputs[layer](y * F.silu(z)), torch.cat(now)


def ffm_cell(net: FFMModule, layer: int, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    m, c = net.memory_size, net.context_size
    x, gate, out, skip = net.inputs[layer](row).split([m, m, HIDDEN, HIDDEN])
    x = x * torch.sigmoid(gate)
    rate, frequency = net.rates[layer].abs(), net.frequencies[layer]
    factor = torch.exp(-rate[:, None] + 1j * frequency[None, :])
    before = torch.complex(state[0::2], state[1::2]).view(m, c)
    now = factor * before + x[:, None]
    column = torch.stack([now.real, now.imag], -1).flatten()
    seen = F.layer_norm(net.outputs[layer](column), (HIDDEN,))
    share = torch.sigmoid(out)
    return seen * share + skip * (1 - share), column


def delta_cell(net: DeltaNetModule, layer: int, row: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    heads = net.num_heads
    size = HIDDEN // heads
    parts = (net.inputs[layer].weight @ row).split([HIDDEN] * 4 + [heads] * 2)  # type: ignore[operator]
    q, k, v = (F.silu(part).view(heads, size) for part in parts[:3])
    gate, a, e = parts[3:]
    a = torch.exp(-torch.exp(net.log_rates[layer]) * F.softplus(a + net.step_bias[layer]))
    reads, memories = [], []
    for head, memory in enumerate(state.view(heads, size, size)):
        key = k[head] / torch.sqrt(k[head] @ k[head] + 1e-6)
        query = q[head] / torch.sqrt(q[head] @ q[head] + 1e-6)
        write = torch.sigmoid(e[head])
        # the paper's S maps keys to values; the state holds its transpose
        s = memory.T
        s = a[head] * s @ (torch.eye(size, dtype=s.dtype) - write * torch.outer(key, key))
        s = s + write * torch.outer(v[head], key)
        read = s @ query
        reads.append(read / torch.sqrt((read * read).mean() + 1e-5) * net.norms[layer])
        memories.append(s.T.flatten())
    return net.outputs[layer](torch.cat(reads) * F.silu(gate)), torch.cat(memories)


CELLS: dict[Any, Cell] = {
    LRUModule: lru_cell,
    S6Module: s6_cell,
    FFMModule: ffm_cell,
    DeltaNetModule: delta_cell,
}


def module_of(kind: Any, layers: int = 2, dtype: torch.dtype = torch.float64, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(IN, HIDDEN, layers, dtype=dtype, **KEYS, **options)


def batch_of(module: Any, lengths: list[int], dtype: torch.dtype = torch.float64) -> TensorDict:
    generator = torch.Generator().manual_seed(sum(lengths))
    starts = torch.cat([torch.arange(length) == 0 for length in lengths])
    rows = len(starts)
    observation = torch.randn(rows, IN, generator=generator, dtype=dtype)
    batch = TensorDict({"is_init": starts, "observation": observation}, [rows])
    for key, zero in module.make_tensordict_primer().defaults.items():
        batch[key] = torch.randn(rows, *zero.shape, generator=generator, dtype=dtype)
    return batch


def in_loops(module: Any, batch: TensorDict) -> tuple[Tensor, Tensor]:
    """Outputs and states after each row, one row of one layer after the other."""
    cell = CELLS[type(module)]
    outputs: list[Tensor] = []
    states: list[Tensor] = []
    for i, start in enumerate(run_starts(batch).tolist()):
        before = batch["recurrent_state"][i] if start else states[-1]
        row = batch["observation"][i]
        after = []
        for layer in range(module.num_layers):
            row, state = cell(module, layer, row, before[layer])
            after.append(state)
        outputs.append(row)
        states.append(torch.stack(after))
    return torch.stack(outputs), torch.stack(states)


@pytest.mark.cover(2)
@pytest.mark.parametrize("lengths", [[7], [1] * 5, [4, 1, 1, 9, 2], [70, 3]], ids=str)
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_outputs_states_and_gradients_are_those_of_the_papers_loop(
    kind: Any, layers: int, lengths: list[int]
) -> None:
    module = module_of(kind, layers)
    batch = batch_of(module, lengths)
    wanted = [batch[key].requires_grad_() for key in ("observation", "recurrent_state")]
    wanted += list(module.parameters())
    expected = in_loops(module, batch)
    with set_recurrent_mode("recurrent"):
        module(batch)
    lasts = run_ends(batch)
    found = batch["features"], batch["next", "recurrent_state"][lasts]
    expected = expected[0], expected[1][lasts]
    close: Any = {"rtol": 1e-10, "atol": 1e-10}
    torch.testing.assert_close(found, expected, **close)
    weights = [torch.randn_like(x) for x in found]
    grads = [torch.autograd.grad(values, wanted, weights) for values in (found, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-8, atol=1e-9)


@examples(20)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=8),
    kind=st.sampled_from(KINDS),
    single=st.booleans(),
)
def test_steps_equal_runs(lengths: list[int], kind: Any, single: bool) -> None:
    """Stored states of any kind at first rows; float32 to 1e-5, float64 to 1e-10."""
    dtype = torch.float32 if single else torch.float64
    module = module_of(kind, dtype=dtype)
    batch = batch_of(module, lengths, dtype)
    rows = len(batch)
    expected = []
    state = batch["recurrent_state"][:1]
    with torch.no_grad():
        for i in range(rows):
            if batch["is_init"][i]:
                state = batch["recurrent_state"][i : i + 1]
            step = TensorDict(
                {
                    "observation": batch["observation"][i : i + 1],
                    "is_init": torch.zeros(1, 1, dtype=torch.bool),
                    "recurrent_state": state,
                },
                [1],
            )
            module(step)
            expected.append(step["features"])
            state = step["next", "recurrent_state"]
        with set_recurrent_mode("recurrent"):
            module(batch)
    limit = 1e-5 if single else 1e-10
    torch.testing.assert_close(batch["features"], torch.cat(expected), rtol=limit, atol=limit)


@pytest.mark.parametrize("kind", KINDS)
def test_the_order_of_runs_does_not_matter(kind: Any) -> None:
    module = module_of(kind)
    lengths = [5, 1, 12, 3]
    batch = batch_of(module, lengths)
    parts = batch.split(lengths)
    with set_recurrent_mode("recurrent"), torch.no_grad():
        alone = [module(part.clone())["features"] for part in parts]
        for order in itertools.permutations(range(4)):
            joined = torch.cat([parts[i] for i in order])
            expected = torch.cat([alone[i] for i in order])
            torch.testing.assert_close(module(joined)["features"], expected, rtol=1e-12, atol=1e-12)


def test_layers_of_a_selective_state_space_do_not_fade_out() -> None:
    """What a layer puts out is a product of three factors below 1: without a norm three layers leave 1e-4 of it."""
    rows = torch.randn(64, 16, generator=torch.manual_seed(0))
    gradients = []
    for layers in (1, 3):
        torch.manual_seed(0)
        net = S6Module(16, 16, num_layers=layers, in_key="observation", out_key="features", state="zero")
        batch = TensorDict(
            {"observation": rows.clone().requires_grad_(), "is_init": torch.arange(64) % 16 == 0}, [64]
        )
        with set_recurrent_mode(True):
            net(batch)["features"].square().sum().sqrt().backward()
        gradients.append(batch["observation"].grad.norm())
    assert gradients[1] > 0.1 * gradients[0]


@pytest.mark.parametrize("recurrent", MEMORIES)
@pytest.mark.parametrize("autoreset", ["NextStep", "SameStep", "Disabled"])
def test_slices_of_a_collected_buffer_reproduce_what_was_acted(
    recurrent: Any, autoreset: str, tmp_path: Any
) -> None:
    torch.manual_seed(0)
    env = ScriptedVectorEnv(Script(3, lengths=[[9, 1, 4], [2, 7], [30]]), autoreset_mode=autoreset)
    policy = actor(env, hidden=(8,), recurrent=recurrent, norm=False)
    [memory] = [part for part in policy.module if hasattr(part, "make_tensordict_primer")]
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(60),
        sampler=SliceSampler(slice_len=5, fill=False),
        generator=torch.Generator().manual_seed(0),
    )
    for _ in Collector(env, policy, frames_per_batch=30, total_frames=120, replay_buffer=buffer):
        pass
    buffer.dumps(tmp_path)
    again = ReplayBuffer(
        storage=LazyTensorStorage(60),
        sampler=SliceSampler(slice_len=5, fill=False),
        generator=torch.Generator(),
    )
    again.loads(tmp_path)
    for held in (buffer, again):
        sample = held.sample(30)
        assert set(memory.make_tensordict_primer().defaults) <= set(sample.keys())
        with set_recurrent_mode("recurrent"), torch.no_grad():
            log_prob = policy.get_dist(sample.clone()).log_prob(sample["action"])
        torch.testing.assert_close(log_prob, sample["action_log_prob"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_weights_are_saved_and_loaded(kind: Any) -> None:
    module = module_of(kind)
    batch = batch_of(module, [6, 3])
    other = copy.deepcopy(module)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(1.0)
    other.load_state_dict(module.state_dict())
    with set_recurrent_mode("recurrent"):
        assert other(batch.clone())["features"].equal(module(batch.clone())["features"])


@pytest.mark.parametrize("kind", KINDS)
def test_zero_states_need_no_column(kind: Any) -> None:
    module = module_of(kind, state="zero")
    batch = batch_of(module, [4, 2])
    zeros = batch.clone()
    zeros["recurrent_state"].zero_()
    del batch["recurrent_state"]
    with set_recurrent_mode("recurrent"):
        expected = module_of(kind)(zeros)["features"]
        torch.testing.assert_close(module(batch)["features"], expected)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_zeros_have_finite_gradients(kind: Any) -> None:
    module = module_of(kind, state="zero", dtype=torch.float32)
    batch = batch_of(module, [4, 2], torch.float32).exclude("recurrent_state")
    batch["observation"] = torch.zeros_like(batch["observation"]).requires_grad_()
    with set_recurrent_mode("recurrent"):
        module(batch)["features"].sum().backward()
    assert batch["observation"].grad.abs().max() < 1e4
    assert all(weight.grad is None or weight.grad.isfinite().all() for weight in module.parameters())


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_and_long_runs_stay_finite(kind: Any) -> None:
    module = module_of(kind, dtype=torch.float32)
    batch = batch_of(module, [3000, 2], torch.float32)
    batch["observation"] *= 10.0
    for autocast in (False, True):
        with set_recurrent_mode("recurrent"), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            rows = module(batch.clone())
        assert rows["features"].isfinite().all() and rows["next", "recurrent_state"].isfinite().all()


@pytest.mark.parametrize("rows", [2, 4, 8, 16, 32, 64, None])
def test_chunks_of_any_length_and_the_loop_give_the_same(
    rows: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs, next states and gradients; also with the length that the batch chooses."""
    module = module_of(DeltaNetModule)
    batch = batch_of(module, [65, 1, 2, 64, 17, 33, 16])
    batch["recurrent_state"].requires_grad_()
    batch["observation"].requires_grad_()
    inputs = [batch["observation"], batch["recurrent_state"], *module.parameters()]
    results = []
    for by_loop in (True, False):
        if not by_loop:
            monkeypatch.setattr(delta_rule, "_loops", lambda rows, stored: False)
            if rows is not None:
                monkeypatch.setattr(delta_rule, "_CHUNK_ROWS", (rows,))
        with set_recurrent_mode("recurrent"):
            found = module(batch.copy())
        outputs = [found["features"], found["next", "recurrent_state"]]
        total = sum((x * torch.arange(x.numel()).view_as(x).cos()).sum() for x in outputs)
        results.append((outputs, torch.autograd.grad(total, inputs)))
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


def test_chunks_have_second_derivatives(monkeypatch: pytest.MonkeyPatch) -> None:
    module = module_of(DeltaNetModule, 1)
    batch = batch_of(module, [3, 2])
    observation = batch["observation"].requires_grad_()
    starts = batch["is_init"]

    def compute(rows: Tensor) -> Tensor:
        out: Tensor = module.over_runs(rows, (batch["recurrent_state"],), starts)[0]
        return out

    with pytest.raises(RuntimeError, match="the gated delta rule is differentiable once"):
        torch.autograd.gradgradcheck(compute, observation)
    monkeypatch.setattr(delta_rule, "_loops", lambda rows, stored: False)
    assert torch.autograd.gradgradcheck(compute, observation)


def test_the_ring_of_the_unit() -> None:
    """Squares of moduli are uniform between those of the ring, angles below the largest; the scale is kept."""
    torch.manual_seed(0)
    module = LRUModule(4, 4000, ring=(0.5, 0.9), max_phase=0.3, dtype=torch.float64, **KEYS)
    factor, _ = module.terms(0, torch.zeros(1, 4, dtype=torch.float64))
    squares = factor.detach().abs().square()
    assert 0.25 <= squares.min() <= 0.26 and 0.8 <= squares.max() <= 0.81
    assert abs(float(squares.mean()) - 0.53) < 0.01
    assert factor.angle().min() >= 0.0 and 0.29 < factor.angle().max() <= 0.3
    torch.testing.assert_close(module.log_scales.exp().square(), 1 - squares)


def test_the_delta_rule_replaces_what_a_key_holds() -> None:
    """One head, nothing fades: writing a second value under a key leaves nothing of the first one."""
    module = module_of(DeltaNetModule, 1, num_heads=1)
    with torch.no_grad():
        module.log_rates.fill_(-60.0)  # keeps all
        module.inputs[0].weight[-1] = 0.0
        module.inputs[0].weight[-1, 0] = 50.0  # writes all where the first number is 1
        # keys depend on the first number only
        module.inputs[0].weight[HIDDEN : 2 * HIDDEN, 1:] = 0.0
    row = torch.tensor([[1.0, 2.0, -1.0], [1.0, -3.0, 0.5]], dtype=torch.float64)
    zero = torch.zeros(1, 1, HIDDEN * HIDDEN, dtype=torch.float64)
    _, (once,) = module.step(row[1:], (zero,))
    _, (before,) = module.step(row[:1], (zero,))
    _, (twice,) = module.step(row[1:], (before,))
    assert not torch.allclose(before, once)
    torch.testing.assert_close(twice, once, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: DeltaNetModule(3, 10, **KEYS), "num_heads must divide hidden_size, got num_heads=4 and hidden_size="),
        (lambda: DeltaNetModule(3, 8, num_heads=0, **KEYS), "num_heads must be an integer of at least 1, got 0"),
        (lambda: S6Module(3, 8, state_size=0, **KEYS), "state_size must be an integer of at least 1, got 0"),
        (lambda: FFMModule(3, 8, memory_size=0, **KEYS), "memory_size must be an integer of at least 1, got 0"),
        (lambda: FFMModule(3, 8, context_size=0, **KEYS), "context_size must be an integer of at least 1, got 0"),
        (lambda: FFMModule(3, 8, max_period=0, **KEYS), "max_period must be an integer of at least 1, got 0"),
        (lambda: LRUModule(3, 8, ring=(0.9, 1.0), **KEYS), "ring must be two floats between 0 and 1 in ascending"),
        (lambda: LRUModule(3, 8, max_phase=0.0, **KEYS), "max_phase must lie in (0, 6.28"),
        (lambda: LRUModule(3, 8, max_phase=2 * math.tau, **KEYS), "max_phase must lie in (0, 6.28"),
    ],
)  # fmt: skip
def test_bad_arguments(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=r" must ") as raised:
        make()
    assert message in str(raised.value)
