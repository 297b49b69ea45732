"""The scan operators (gradients, shapes, one graph in torch.compile, memory) and the networks made of them."""

import sys

import interpreters
import pytest
import torch
from tensordict import TensorDict
from torch import nn

from flatroll.modules import GRU, LSTM, GRUModule, LSTMModule, set_recurrent_mode
from flatroll.modules.backends import choice as backends
from flatroll.modules.backends import scan
from flatroll.modules.backends.packing import run_index

IN, HIDDEN = 3, 4
KINDS = [GRUModule, LSTMModule]
SIZES = [
    torch.tensor([3, 3, 2, 1]),
    torch.tensor([3, 3, 2, 1, 0, 0, 0, 0, 0]),
    torch.tensor([9]),
    torch.ones(9).long(),
]


def arguments(lstm, sizes, bias=True):
    """Random arguments of an operator; more first states than runs where sizes are filled up."""
    generator = torch.Generator().manual_seed(0)
    gates, rows = (4 if lstm else 3) * HIDDEN, 9

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).requires_grad_()

    first = [random(max(len(sizes), int(sizes[0])), HIDDEN) for _ in range(1 + lstm)]
    biases = [random(gates), random(gates)] if bias else [None, None]
    return [random(rows, IN), *first, random(gates, IN), random(gates, HIDDEN), *biases, sizes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("operator", [scan.gru_scan, scan.lstm_scan])
def test_gradients_by_differences(operator, sizes, bias):
    lstm = operator is scan.lstm_scan
    *given, sizes = arguments(lstm, sizes, bias)
    assert torch.autograd.gradcheck(lambda *x: operator(*x, sizes)[: 1 + lstm], given)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("operator", [scan.gru_scan, scan.lstm_scan])
def test_the_operators_keep_the_rules_of_torch(operator):
    """Schema, autograd registration, and shapes without data as with it."""
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(operator, arguments(operator is scan.lstm_scan, SIZES[1]), test_utils=checks)


@pytest.mark.parametrize("starts", [[1, 0, 0, 1, 1, 0], [1, 0] * 3, [1] * 6, [1] + [0] * 5])
def test_order_of_fixed_shape(starts):
    starts = torch.tensor(starts).bool()
    order, place, sizes = scan.run_order(starts)
    index = run_index(starts)
    assert order.shape == place.shape == sizes.shape == starts.shape
    assert order[place].equal(torch.arange(6))
    assert (
        sizes[: len(index.batch_sizes)].equal(index.batch_sizes) and not sizes[len(index.batch_sizes) :].any()
    )
    assert order[: len(index.first)].equal(index.first)


def module_of(kind, layers=2, **options):
    torch.manual_seed(0)
    options = {"in_key": "observation", "out_key": "features", **options}
    return kind(IN, HIDDEN, layers, **options)


def batch_of(module, seed, rows=16):
    generator = torch.Generator().manual_seed(seed)
    batch = TensorDict({"is_init": torch.rand(rows, 1, generator=generator) < 0.3}, [rows])
    batch["observation"] = torch.randn(rows, IN, generator=generator)
    for key, default in module.make_tensordict_primer().defaults.items():
        batch[key] = torch.randn(rows, *default.shape, generator=generator)
    return batch


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("kind", KINDS)
def test_one_graph_for_any_resets(kind, layers):
    module = module_of(kind, layers, python_based=True)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    compiled = torch.compile(module, fullgraph=True, backend=count)
    for seed in range(4):
        expected, found = batch_of(module, seed), batch_of(module, seed)
        with set_recurrent_mode("recurrent"):
            module(expected)
            compiled(found)
        torch.testing.assert_close(found.to_dict(), expected.to_dict())
        grads = [
            torch.autograd.grad(batch["features"].square().sum(), list(module.parameters()))
            for batch in (found, expected)
        ]
        torch.testing.assert_close(*grads)
    assert len(graphs) == 1
    stepped = compiled(batch_of(module, 0))  # the mode is no longer set: another graph
    assert stepped["features"].equal(module(batch_of(module, 0))["features"])
    assert len(graphs) == 2


@pytest.mark.filterwarnings("ignore")
def test_the_mode_may_be_set_inside_a_graph():
    module = module_of(GRUModule, python_based=True)

    def train(batch):
        with set_recurrent_mode("recurrent"):
            return module(batch)["features"]

    torch.compiler.reset()
    found = torch.compile(train, fullgraph=True, backend="eager")(batch_of(module, 0))
    torch.testing.assert_close(found, train(batch_of(module, 0)))


@pytest.mark.parametrize("kind", KINDS)
def test_python_based_and_back_on_the_same_weights(kind):
    module = module_of(kind, dropout=0.5).eval()
    name = type(module).__name__[:-6].lower()
    stock, weights = getattr(module, name), dict(module.named_parameters())
    batches = {}
    for step in ("stock", "python", "again"):
        if step != "stock":
            assert (module.make_python_based if step == "python" else module.make_cudnn_based)() is module
        net = getattr(module, name)
        assert type(net) is ({"GRU": GRU, "LSTM": LSTM}[stock.mode] if step == "python" else type(stock))
        assert (net.dropout, net.training) == (0.5, False)
        assert all(weight is weights[key] for key, weight in module.named_parameters())
        with set_recurrent_mode(True):
            batches[step] = module(batch_of(module, 0))
    torch.testing.assert_close(batches["python"].to_dict(), batches["stock"].to_dict())
    assert batches["again"]["features"].equal(batches["stock"]["features"])


@pytest.mark.parametrize(("kind", "stock"), [(GRU, nn.GRU), (LSTM, nn.LSTM)])
def test_networks_of_operators_equal_the_stock_networks(kind, stock):
    ours, theirs = (
        kind(IN, HIDDEN, 2, dtype=torch.float64),
        stock(IN, HIDDEN, 2, dtype=torch.float64, batch_first=True),
    )
    ours.load_state_dict(theirs.state_dict())
    rows = torch.randn(5, 7, IN, dtype=torch.float64)
    torch.testing.assert_close(ours(rows), theirs(rows))
    state = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    states = (state, state.cos()) if stock is nn.LSTM else state
    torch.testing.assert_close(ours(rows, states), theirs(rows, states))
    theirs.load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match=r"got bidirectional=True, batch_first=True: use torch.nn"):
        kind(IN, HIDDEN, bidirectional=True)


@pytest.mark.parametrize("kind", [GRU, LSTM])
@pytest.mark.parametrize(
    ("rows", "state", "text"),
    [
        (torch.zeros(7, IN), None, r"input must have shape \[B, T, 3\], T at least 1, got \(7, 3\)"),
        (torch.zeros(5, 7, IN + 1), None, r"got \(5, 7, 4\)"),
        (torch.zeros(5, 0, IN), None, r"got \(5, 0, 3\)"),
        (nn.utils.rnn.pack_sequence([torch.zeros(7, IN)]), None, r"got PackedSequence"),
        (torch.zeros(2, 7, IN), (1, 3, HIDDEN), r"state must have shape \(1, 2, 4\), got \(1, 3, 4\)"),
    ],
)
def test_networks_of_operators_check_their_shapes(kind, rows, state, text):
    """More states than runs would be cut in silence."""
    hx = None if state is None else torch.zeros(state) if kind is GRU else (torch.zeros(state),) * 2
    with pytest.raises(ValueError, match=text):
        kind(IN, HIDDEN)(rows, hx)


@pytest.mark.parametrize("kind", KINDS)
def test_a_network_of_operators_may_be_given(kind):
    name = kind.__name__[:-6]
    net = {"GRU": GRU, "LSTM": LSTM}[name](IN, HIDDEN)
    module = kind(in_key="observation", out_key="features", **{name.lower(): net})
    assert module.net is net
    stock = module.make_cudnn_based().net
    again = kind(in_key="observation", out_key="features", python_based=True, **{name.lower(): stock}).net
    assert type(again) is type(net)
    assert all(x is y for x, y in zip(again.parameters(), stock.parameters(), strict=True))
    with pytest.raises(
        ValueError, match=r"recurrent_backend='pad' needs the stock network, .*make_cudnn_based"
    ):
        module_of(kind, recurrent_backend="pad", python_based=True)
    with pytest.raises(ValueError, match=r"recurrent_backend='scan' does not support bidirectional"):
        module_of(kind, recurrent_backend="scan", bidirectional=True)


@pytest.mark.parametrize("backend", ["auto", "packed", "pad", "scan"])
@pytest.mark.parametrize("kind", KINDS)
def test_under_autocast_states_keep_their_precision(kind, backend):
    """Whatever the lengths of runs and the rows of a step; the stock LSTM gave bfloat16 for some of them."""
    module = module_of(kind, recurrent_backend=backend)
    ragged, one_run, step = batch_of(module, 0), batch_of(module, 1), batch_of(module, 2, rows=300)
    one_run["is_init"].zero_()
    for batch, mode in ((ragged, True), (one_run, True), (step, False)):
        with set_recurrent_mode(mode), torch.autocast("cpu", torch.bfloat16):
            found = module(batch.clone())["features"]
            found.sum().backward()
        with set_recurrent_mode(mode):
            expected = module(batch)["features"]
        assert found.dtype is torch.float32
        torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)
    assert module.net.weight_hh_l0.grad.isfinite().all()


def test_auto_takes_the_backend_that_measured_faster():
    def choice(net, lengths):
        starts = torch.zeros(sum(lengths), dtype=torch.bool)
        starts[torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
        return backends.fastest_backend(net, torch.zeros(sum(lengths), IN), run_index(starts))

    gru, lstm = nn.GRU(IN, HIDDEN, batch_first=True), nn.LSTM(IN, HIDDEN, batch_first=True)
    few_long, many_short, wide = [100, 50], [5, 4, 3, 2] * 5, [2, 1] * 200
    assert [choice(gru, x) for x in (few_long, many_short, wide)] == ["scan", "scan", "packed"]
    assert [choice(lstm, x) for x in (few_long, many_short, wide)] == ["packed", "scan", "packed"]
    assert [choice(GRU(IN, HIDDEN), x) for x in (few_long, many_short, wide)] == ["scan"] * 3
    assert choice(nn.GRU(IN, HIDDEN, bidirectional=True, batch_first=True), many_short) == "packed"


MEMORY = """
import resource, torch
from tensordict import TensorDict
from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode
torch.set_num_threads(1)
def passes(kind, backend, rows, long):
    module = kind(32, 64, in_key="observation", out_key="features", recurrent_backend=backend)
    starts = torch.ones(rows, 1, dtype=torch.bool)
    starts[1:long] = False
    batch = TensorDict({"observation": torch.randn(rows, 32), "is_init": starts}, [rows])
    batch.update(module.make_tensordict_primer().expand(rows))
    with set_recurrent_mode(True):
        module(batch)["features"].sum().backward()
for rows, long in ((64, 8), (4096, 1024)):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for kind in (GRUModule, LSTMModule):
        for backend in ("packed", "scan", "auto"):
            passes(kind, backend, rows, long)
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in bytes elsewhere")
def test_peak_memory_goes_with_real_rows():
    """Padding a run of 1,024 rows and 3,072 runs of one row to 3,073 x 1,024 would take over 700 MB.

    Of the 4,096 rows there are, 4 x 64 gates are 4 MB; some such arrays are alive at a time.
    """
    command = [sys.executable, "-c", MEMORY]
    kilobytes = int(interpreters.run(command, check=True).stdout)
    assert kilobytes < 64 * 1024
