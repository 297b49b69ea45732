"""Flat batches with resets against stepping row by row, and rollout against training."""

import itertools

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.layout import run_starts
from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode
from flatroll.modules.backends import dense, packing

IN, HIDDEN = 3, 5
KINDS = [GRUModule, LSTMModule]
BACKENDS = ["packed", "pad", "scan"]
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-13}


def module_of(kind, dtype=torch.float64, **options):
    torch.manual_seed(0)
    return kind(IN, HIDDEN, in_key="observation", out_key="features", **options).to(dtype)


def batch_of(module, starts, dtype=torch.float64):
    """Rows of random input, with a random state stored at every row."""
    generator = torch.Generator().manual_seed(1)
    starts = torch.as_tensor(starts, dtype=torch.bool)
    batch = TensorDict({"is_init": starts.unsqueeze(-1)}, starts.shape)
    batch["observation"] = torch.randn(*starts.shape, IN, generator=generator, dtype=dtype)
    for key, default in module.make_tensordict_primer().defaults.items():
        batch[key] = torch.randn(*starts.shape, *default.shape, generator=generator, dtype=dtype)
    return batch


def state_keys(module):
    return list(module.make_tensordict_primer().defaults)


def step_by_step(module, batch):
    """The oracle: the stock network on one row after another, the stored state loaded at each start."""
    starts = run_starts(batch)
    outputs, after, states = [], [], ()
    for row in range(batch.shape[0]):
        if starts[row]:
            states = tuple(batch[key][row].unsqueeze(1) for key in state_keys(module))
        hx = states if len(states) > 1 else states[0]
        output, final = module.net(batch["observation"][row].view(1, 1, -1), hx)
        states = final if isinstance(final, tuple) else (final,)
        outputs.append(output.view(-1))
        after.append([state.squeeze(1) for state in states])
    return torch.stack(outputs), [torch.stack(column) for column in zip(*after, strict=True)]


def leaves(module, batch):
    inputs = [batch["observation"], *(batch[key] for key in state_keys(module))]
    return [value.requires_grad_() for value in inputs] + list(module.parameters())


def weighted_sum(*values):
    """A loss whose gradient differs at every entry."""
    return sum((value * torch.arange(value.numel()).view_as(value).cos()).sum() for value in values)


RESETS = {
    "none": [0] * 14,
    "first": [1] + [0] * 13,
    "last": [0] * 13 + [1],
    "adjacent": [0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 0],
    "all": [1] * 14,
    "equal": [1, 0] * 7,
    "long stretch": [0] * 12 + [1, 0],
}


@pytest.mark.cover(2)
@pytest.mark.parametrize("starts", RESETS.values(), ids=RESETS.keys())
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_equal_stepping(kind, layers, dtype, backend, starts):
    module = module_of(kind, dtype, num_layers=layers, recurrent_backend=backend)
    batch = batch_of(module, starts, dtype)
    wanted = leaves(module, batch)
    expected, expected_states = step_by_step(module, batch)
    last = run_starts(batch).roll(-1)
    last[-1] = True
    expected_grads = torch.autograd.grad(
        weighted_sum(expected, *(state[last] for state in expected_states)), wanted, allow_unused=True
    )
    with set_recurrent_mode("recurrent"):
        module(batch)
    states = [batch["next", key] for key in state_keys(module)]
    grads = torch.autograd.grad(
        weighted_sum(batch["features"], *(state[last] for state in states)), wanted, allow_unused=True
    )
    close = {"atol": TOLERANCE[dtype], "rtol": 10 * TOLERANCE[dtype]}
    torch.testing.assert_close(batch["features"], expected, **close)
    for state, expected_state in zip(states, expected_states, strict=True):
        torch.testing.assert_close(state[last], expected_state[last], **close)
        if kind is GRUModule and layers == 1:
            torch.testing.assert_close(state, expected_state, **close)
        else:
            assert not state[~last].any()
    for grad, expected_grad in zip(grads, expected_grads, strict=True):
        torch.testing.assert_close(grad, expected_grad, atol=20 * close["atol"], rtol=20 * close["rtol"])


@examples(60)
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=8),
    kind=st.sampled_from(KINDS),
    backend=st.sampled_from(BACKENDS),
    markers=st.sampled_from(["is_init", "done", "traj_ids"]),
)
def test_any_run_lengths_and_any_marker(lengths, kind, backend, markers):
    module = module_of(kind, recurrent_backend=backend)
    ids = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    starts = torch.cat([torch.ones(1, dtype=torch.bool), ids.diff() != 0])
    batch = batch_of(module, starts)
    expected, _ = step_by_step(module, batch)
    if markers != "is_init":
        del batch["is_init"]
        done = starts.roll(-1).unsqueeze(-1)
        column = {"done": ("next", "done"), "traj_ids": ("collector", "traj_ids")}[markers]
        batch[column] = done if markers == "done" else ids
    with set_recurrent_mode("recurrent"), torch.no_grad():
        torch.testing.assert_close(module(batch)["features"], expected.detach(), atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize(("dense_steps", "packed_rows"), [(1, 1), (2, 5), (3, 10**9), (10**9, 4)])
@pytest.mark.parametrize("kind", KINDS)
def test_the_cut_into_pieces_changes_nothing(kind, dense_steps, packed_rows, monkeypatch):
    module = module_of(kind, num_layers=2, recurrent_backend="packed")
    batch = batch_of(module, ([1] + [0] * 6 + [1, 1, 1, 0, 0, 1, 0]) * 3)
    with set_recurrent_mode("recurrent"), torch.no_grad():
        expected = module(batch.clone())
        monkeypatch.setattr(packing, "DENSE_STEPS", dense_steps)
        monkeypatch.setattr(packing, "PACKED_ROWS", packed_rows)
        found = module(batch.clone())
    torch.testing.assert_close(found.to_dict(), expected.to_dict(), atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_no_gradient_crosses_a_boundary(kind, backend):
    module = module_of(kind, recurrent_backend=backend)
    batch = batch_of(module, [1, 0, 0, 1, 1, 0, 0, 0])
    batch["observation"].requires_grad_()
    with set_recurrent_mode("recurrent"):
        module(batch)["features"][4:].sum().backward()
    reached = batch["observation"].grad.ne(0).all(-1)
    assert reached.tolist() == [False] * 4 + [True] * 4
    assert not batch["observation"].grad[:4].any()


@pytest.mark.parametrize("shape", [(3, 4), (16, 32), (1, 7), (9, 1)])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_flat_equals_reshaped_bit_for_bit(kind, dtype, shape):
    module = module_of(kind, dtype, num_layers=2)
    flat = batch_of(module, ([1] + [0] * (shape[1] - 1)) * shape[0], dtype)
    square = flat.clone().reshape(shape)
    with set_recurrent_mode("recurrent"):
        module(flat)
        module(square)
    first = tuple(square[key][:, 0].transpose(0, 1).contiguous() for key in state_keys(module))
    manual, _ = module.net(square["observation"], first if len(first) > 1 else first[0])
    assert flat["features"].view(*shape, HIDDEN).equal(manual)
    assert square["features"].equal(manual)
    for key in state_keys(module):
        assert flat["next", key].view_as(square["next", key]).equal(square["next", key])


@pytest.mark.parametrize("options", [{}, {"num_layers": 3}, {"bias": False}], ids=str)
@pytest.mark.parametrize("shape", [(1, 40), (3, 9), (15, 2), (2, 1)])
def test_few_long_runs_of_a_gru_are_the_stock_call_with_its_gradients(shape, options):
    """Their gradient is written out: bits of the outputs as of the stock call, gradients except for rounding."""
    module = module_of(GRUModule, **options)
    batch = batch_of(module, ([1] + [0] * (shape[1] - 1)) * shape[0])
    wanted = leaves(module, batch)
    index = packing.run_index(batch["is_init"].flatten())
    results = []
    for run in (dense.dense_gru, packing.dense):
        first = (batch["recurrent_state"].index_select(0, index.first).transpose(0, 1),)
        assert dense.few_long_runs(module.net, batch["observation"], first, index)
        results.append(run(module.net, batch["observation"], first, index))
    grads = [torch.autograd.grad(weighted_sum(out, *finals), wanted) for out, finals in results]
    assert results[0][0].equal(results[1][0]) and results[0][1][0].equal(results[1][1][0])
    torch.testing.assert_close(*grads, atol=1e-11, rtol=1e-11)
    with set_recurrent_mode(True):
        features = module(batch)["features"]
    assert features.equal(results[1][0])
    torch.autograd.grad(features.relu_().sum(), wanted, allow_unused=True)  # what it needs is its own


def test_more_runs_or_no_gradients_are_the_stock_call_itself():
    module = module_of(GRUModule)
    batch = batch_of(module, [1, 0] * dense.RUNS)
    index = packing.run_index(batch["is_init"].flatten())
    assert not dense.few_long_runs(module.net, batch["observation"], (), index)
    index = packing.run_index(batch["is_init"].flatten()[:10])
    assert dense.few_long_runs(module.net, batch["observation"][:10], (), index)
    with torch.no_grad():
        assert not dense.few_long_runs(module.net, batch["observation"][:10], (), index)
    with set_recurrent_mode(True):
        (grad,) = torch.autograd.grad(
            module(batch[:1])["features"].sum(), module.gru.weight_hh_l0, create_graph=True
        )
        with pytest.raises(RuntimeError, match="no autograd formula was registered"):
            torch.autograd.grad(grad.sum(), module.gru.weight_hh_l0)


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_leading_dims_are_runs_of_their_own(kind):
    module = module_of(kind)
    batch = batch_of(module, [[[0, 0, 1, 0], [0, 0, 0, 0]], [[1, 1, 0, 0], [0, 0, 0, 1]]])
    parts = [part.clone() for part in batch.reshape(4, 4).unbind(0)]
    with set_recurrent_mode("recurrent"):
        whole = module(batch)["features"].reshape(4, 4, HIDDEN)
        for found, part in zip(whole, parts, strict=True):
            torch.testing.assert_close(found, module(part)["features"], atol=1e-13, rtol=1e-13)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_training_recomputes_what_the_rollout_recorded(kind, layers):
    """Three envs, episodes ended at random, a stale state left at every reset; then windows cut at random."""
    module = module_of(kind, torch.float32, num_layers=layers)
    generator = torch.Generator().manual_seed(2)
    envs, steps = 3, 40
    step = TensorDict({"is_init": torch.ones(envs, 1, dtype=torch.bool)}, [envs])
    recorded = []
    for _ in range(steps):
        step["observation"] = torch.randn(envs, IN, generator=generator)
        with set_recurrent_mode("sequential"), torch.no_grad():
            module(step)
        recorded.append(step.clone())
        carried = step["next"].clone()
        step = TensorDict({"is_init": torch.rand(envs, 1, generator=generator) < 0.1}, [envs]).update(carried)
    stream = torch.stack(recorded, 1)
    ids = torch.arange(envs).unsqueeze(1) * steps + stream["is_init"].squeeze(-1).cumsum(1)
    stream["collector", "traj_ids"] = ids
    for key in state_keys(module):
        assert not stream[key][stream["is_init"].squeeze(-1)].any(), "the state used is the state stored"
    for _ in range(10):
        begin = torch.randint(0, steps - 9, (envs,), generator=generator).tolist()
        window = torch.cat([stream[env, at : at + 9] for env, at in enumerate(begin)])
        again = window.clone()
        with set_recurrent_mode("recurrent"), torch.no_grad():
            module(again)
        torch.testing.assert_close(again["features"], window["features"], atol=1e-6, rtol=1e-5)


def test_gru_step_by_hand():
    """One unit, all weights 1, no bias: r = z = sigmoid(x + h), n = tanh(x + r h), h' = (1 - z) n + z h."""
    module = GRUModule(1, 1, bias=False, in_key="observation", out_key="features")
    for weight in module.parameters():
        nn.init.ones_(weight)
    batch = TensorDict(
        {"observation": torch.tensor([[1.0], [1.0]]), "is_init": torch.tensor([True, False])}, [2]
    )
    batch["recurrent_state"] = torch.full((2, 1, 1), 0.5)
    module(batch)
    # row 0 is reset: z = sigmoid(1) = 0.731059, n = tanh(1) = 0.761594, h' = 0.268941 * 0.761594
    # row 1 carries: z = sigmoid(1.5) = 0.817574, n = tanh(1.408787) = 0.887236, h' = 0.182426 n + 0.408787
    expected = torch.tensor([[0.204824], [0.570642]])
    torch.testing.assert_close(batch["features"], expected, atol=2e-6, rtol=0)
    torch.testing.assert_close(batch["next", "recurrent_state"].squeeze(-1), expected, atol=2e-6, rtol=0)
    assert batch["recurrent_state"].flatten().tolist() == [0.0, 0.5]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
@pytest.mark.parametrize("shape", [(), (4,), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_sequential_steps_equal_the_stock_network(kind, shape, layers, bias):
    module = module_of(kind, num_layers=layers, bias=bias)
    batch = batch_of(module, torch.zeros(shape))
    before = tuple(
        batch[key].reshape(-1, layers, HIDDEN).transpose(0, 1).contiguous() for key in state_keys(module)
    )
    expected, after = module.net(
        batch["observation"].reshape(-1, 1, IN), before if len(before) > 1 else before[0]
    )
    module(batch)
    torch.testing.assert_close(batch["features"], expected.reshape(*shape, HIDDEN))
    for key, state in zip(state_keys(module), after if isinstance(after, tuple) else (after,), strict=True):
        torch.testing.assert_close(batch["next", key], state.transpose(0, 1).reshape(*shape, layers, HIDDEN))


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_of_many_rows_equals_steps_of_few(kind, layers):
    module = module_of(kind, num_layers=layers)
    batch = batch_of(module, torch.arange(300) % 7 == 0)
    parts = torch.cat([module(part.clone()) for part in batch.split(100)])
    torch.testing.assert_close(module(batch).to_dict(), parts.to_dict())
    state = batch["next", state_keys(module)[0]].clone()
    batch["features"].detach().zero_()
    assert batch["next", state_keys(module)[0]].equal(state)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_state_is_zeros_on_first_rows(kind):
    module = module_of(kind)
    batch = batch_of(module, [1, 1])
    primed = batch.clone().update(module.make_tensordict_primer().expand(2))
    module(batch.exclude(*state_keys(module), inplace=True))
    module(primed)
    assert batch["features"].equal(primed["features"])
    assert batch["recurrent_state" if kind is GRUModule else "recurrent_state_c"].shape == (2, 1, HIDDEN)


@pytest.mark.parametrize("backend", ["auto", *BACKENDS])
@pytest.mark.parametrize("kind", KINDS)
def test_runs_from_zeros_need_no_stored_state(kind, backend):
    module = module_of(kind, num_layers=2, recurrent_backend=backend, state="zero")
    stored = module_of(kind, num_layers=2, recurrent_backend=backend)
    batch = batch_of(module, [1, 0, 0, 1, 0, 1])
    bare = batch.exclude(*state_keys(module))
    zeros = batch.clone().update(module.make_tensordict_primer().expand(6))
    with set_recurrent_mode("recurrent"):
        expected = stored(zeros)["features"]
        assert module(batch)["features"].equal(expected)
        assert module(bare)["features"].equal(expected)
    step = batch_of(module, [0, 0])
    assert module(step.clone())["features"].equal(stored(step)["features"]), "a rollout carries its states"


def test_a_nan_state_does_not_survive_a_reset():
    module = module_of(GRUModule)
    batch = batch_of(module, [1, 1])
    batch["recurrent_state"].fill_(torch.nan)
    assert module(batch)["features"].isfinite().all()


@pytest.mark.parametrize("mode", ["sequential", "recurrent"])
@pytest.mark.parametrize("kind", KINDS)
def test_in_a_sequence_of_modules_an_in_place_activation_leaves_the_state_alone(kind, mode):
    module = module_of(kind)
    head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(HIDDEN, 2).double())
    policy = TensorDictSequential(module, TensorDictModule(head, in_keys=["features"], out_keys=["logits"]))
    batch = batch_of(module, [1, 0, 0, 1, 0])
    alone = batch.clone()
    with set_recurrent_mode(mode):
        policy(batch)["logits"].sum().backward()
        module(alone)
    for key in state_keys(module):
        assert batch["next", key].equal(alone["next", key])
    assert policy.in_keys == module.in_keys
    assert ("next", state_keys(module)[0]) in policy.out_keys


def test_called_with_tensors():
    module = module_of(GRUModule)
    batch = batch_of(module, [1, 0])
    features, state = module(
        observation=batch["observation"], recurrent_state=batch["recurrent_state"], is_init=batch["is_init"]
    )
    module(batch)
    assert features.equal(batch["features"])
    assert state.equal(batch["next", "recurrent_state"])


class NoHostSync(TorchDispatchMode):
    """Refuse what would make a host wait for its device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert name not in ("aten::_local_scalar_dense", "aten::nonzero", "aten::item"), name
        assert not (name == "aten::index.Tensor" and any(i.dtype is torch.bool for i in args[1])), name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_makes_no_host_sync(kind):
    module = module_of(kind, num_layers=2)
    batch = batch_of(module, [1, 0, 1])
    with NoHostSync():
        module(batch)
    module, batch = module.to("meta"), batch.to("meta")
    assert module(batch)["features"].shape == (3, HIDDEN)
    assert module(batch.exclude(*state_keys(module)))["features"].shape == (3, HIDDEN)


def test_dropout_between_layers_acts_in_training_mode_only():
    module = module_of(GRUModule, num_layers=2, dropout=0.5)
    ragged, one_run = batch_of(module, [1, 0, 0, 1, 0]), batch_of(module, [1, 0, 0])
    for mode, batch in (("recurrent", ragged), ("recurrent", one_run), ("sequential", ragged)):
        with set_recurrent_mode(mode):
            module.train()
            assert not module(batch.clone())["features"].equal(module(batch.clone())["features"])
            module.eval()
            assert module(batch.clone())["features"].equal(module(batch.clone())["features"])


def test_bidirectional_runs_see_both_directions():
    module = module_of(GRUModule, bidirectional=True)
    batch = batch_of(module, [1, 0, 0, 1, 0])
    with set_recurrent_mode("recurrent"):
        module(batch)
    for begin, end in ((0, 3), (3, 5)):
        state = batch["recurrent_state"][begin].unsqueeze(1)
        expected, final = module.net(batch["observation"][begin:end].unsqueeze(0), state)
        torch.testing.assert_close(batch["features"][begin:end], expected[0])
        torch.testing.assert_close(batch["next", "recurrent_state"][end - 1], final.squeeze(1))


@pytest.mark.parametrize("kind", KINDS)
def test_an_existing_network_is_wrapped_as_it_is(kind):
    net = (nn.GRU if kind is GRUModule else nn.LSTM)(IN, HIDDEN, num_layers=2, batch_first=True)
    name = type(net).__name__.lower()
    module = kind(in_key="observation", out_key="features", **{name: net})
    assert getattr(module, name) is net
    assert set(module.state_dict()) == {f"{name}.{key}" for key in net.state_dict()}
    other = kind(IN, HIDDEN, 2, in_key="observation", out_key="features")
    getattr(other, name).load_state_dict(net.state_dict())
    batch = batch_of(module, [1, 0, 1], torch.float32)
    assert other(batch.clone())["features"].equal(module(batch)["features"])


def test_renamed_and_nested_keys():
    module = GRUModule(
        IN,
        HIDDEN,
        in_keys=[("agent", "obs"), ("agent", "h"), "first"],
        out_keys=["y", ("next", "agent", "h")],
        done_key="over",
        traj_key="episode",
        default_recurrent_mode=True,
    )
    reference = module_of(GRUModule, torch.float32)
    reference.gru.load_state_dict(module.gru.state_dict())
    batch = batch_of(reference, [1, 0, 0, 1, 0, 1], torch.float32)
    renamed = TensorDict(
        {
            "agent": {"obs": batch["observation"], "h": batch["recurrent_state"]},
            "first": torch.tensor([1, 0, 0, 0, 0, 0]).bool(),
            "over": torch.tensor([0, 0, 1, 0, 0, 0]).bool(),
            "episode": torch.tensor([0, 0, 0, 1, 1, 2]),
        },
        [6],
    )
    with set_recurrent_mode(True):
        assert module(renamed)["y"].equal(reference(batch)["features"])
    assert list(module.make_tensordict_primer().defaults) == [("agent", "h")]
    assert renamed["next", "agent", "h"].shape == (6, 1, HIDDEN)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_same_features_and_final_states_as_torchrl(kind):
    peers = pytest.importorskip("torchrl.modules")
    module = module_of(kind, torch.float32, num_layers=2)
    peer = getattr(peers, kind.__name__)(IN, HIDDEN, 2, in_key="observation", out_key="features")
    peer.load_state_dict(module.state_dict())
    batch = batch_of(module, [1, 0, 0, 0, 1, 0, 0, 1, 0], torch.float32)
    theirs = batch.clone()
    with set_recurrent_mode("recurrent"), peers.set_recurrent_mode("recurrent"):
        module(batch)
        peer(theirs)
    for key in ["features", *(("next", key) for key in state_keys(module))]:
        torch.testing.assert_close(batch[key], theirs[key], atol=1e-6, rtol=1e-5)


def test_the_state_after_a_row_steps_the_next_row():
    """("next", state) of row i is the state row i + 1 would be stepped from."""
    module = module_of(GRUModule)
    batch = batch_of(module, [1, 0, 0, 0])
    with set_recurrent_mode("recurrent"):
        module(batch)
    for row, after in itertools.pairwise(range(4)):
        carried = batch[after].clone()
        carried["recurrent_state"] = batch["next", "recurrent_state"][row]
        torch.testing.assert_close(module(carried)["features"], batch["features"][after])
