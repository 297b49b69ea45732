"""Every refusal says what was expected, what came, and the way out; and the primer."""

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import nn

from flatroll.modules import (
    DeltaNetModule,
    FFMModule,
    GRUModule,
    LRUModule,
    LSTMModule,
    MinGRUModule,
    S6Module,
    TensorDictPrimer,
    set_recurrent_mode,
)

KEYS = {"in_key": "observation", "out_key": "features"}


def batch_of(**entries):
    columns = {
        "observation": torch.zeros(4, 3),
        "recurrent_state": torch.zeros(4, 2, 5),
        "is_init": torch.tensor([True, False, True, False]),
    }
    columns.update(entries)
    return TensorDict({key: value for key, value in columns.items() if value is not None}, [4])


BUILDS = {
    "unknown backend": (
        {**KEYS, "recurrent_backend": "cudnn"},
        ValueError,
        r"recurrent_backend must be 'auto', 'packed', 'scan', 'pad' or 'triton', got 'cudnn'",
    ),
    "unknown state": (
        {**KEYS, "state": "zeros"},
        ValueError,
        r"state must be 'stored' or 'zero', got 'zeros'",
    ),
    "both in_key and in_keys": (
        {**KEYS, "in_keys": ["a", "b"]},
        ValueError,
        r"exactly one of in_key and in_keys must be given, got 'observation' and \['a', 'b'\]",
    ),
    "no out_key": (
        {"in_key": "observation"},
        ValueError,
        r"exactly one of out_key and out_keys must be given, got None and None",
    ),
    "too few in_keys": (
        {"in_keys": ["a"], "out_key": "b"},
        ValueError,
        r"in_keys must be \[input, recurrent_state\] or these and is_init, got \['a'\]",
    ),
    "too many out_keys": (
        {"in_key": "a", "out_keys": ["b", "c", "d"]},
        ValueError,
        r"out_keys must be \[output, next recurrent_state\], got \['b', 'c', 'd'\]",
    ),
    "a string of in_keys": (
        {"in_keys": "observation", "out_key": "b"},
        TypeError,
        r"in_keys must be a list of keys, got the string 'observation': pass in_key='observation'",
    ),
    "one key read twice": (
        {"in_keys": ["a", "a"], "out_key": "b"},
        ValueError,
        r"in_keys must be different keys, got \['a', 'a'\]",
    ),
    "one key written twice": (
        {"in_key": "a", "out_keys": [("next", "h"), ("next", "h")]},
        ValueError,
        r"out_keys must be different keys, got \[\('next', 'h'\), \('next', 'h'\)\]",
    ),
    "unknown default mode": (
        {**KEYS, "default_recurrent_mode": "recurent"},
        ValueError,
        r"default_recurrent_mode must be True, False, None, 'recurrent' or 'sequential', got 'recurent'",
    ),
    "time first": ({**KEYS, "batch_first": False}, ValueError, r"batch_first must be True, got False"),
    "an unknown argument": (
        {**KEYS, "hiden_size": 5},
        TypeError,
        r"^GRUModule\(\) got an unexpected keyword argument 'hiden_size'",
    ),
    "sizes and a network": (
        {**KEYS, "gru": nn.GRU(3, 5, batch_first=True)},
        ValueError,
        r"gru already has its sizes, leave out input_size and hidden_size: got input_size=3, hidden_size=5",
    ),
}


@pytest.mark.parametrize(("options", "error", "text"), BUILDS.values(), ids=BUILDS.keys())
def test_refused_when_built(options, error, text):
    with pytest.raises(error, match=text):
        GRUModule(3, 5, **options)


def test_refused_networks():
    with pytest.raises(ValueError, match=r"input_size and hidden_size, or an existing gru=, must be given"):
        GRUModule(3, **KEYS)
    with pytest.raises(
        ValueError, match=r"batch_first must be True, got False: build gru with batch_first=True"
    ):
        GRUModule(gru=nn.GRU(3, 5), **KEYS)
    with pytest.raises(TypeError, match=r"gru must be a torch.nn.GRU, got LSTM"):
        GRUModule(gru=nn.LSTM(3, 5, batch_first=True), **KEYS)
    with pytest.raises(ValueError, match=r"lstm must not project its output, got proj_size=2"):
        LSTMModule(lstm=nn.LSTM(3, 5, proj_size=2, batch_first=True), **KEYS)


CALLS = {
    "int is_init": (
        "both",
        {"is_init": torch.tensor([1, 0, 1, 0])},
        TypeError,
        r"batch\['is_init'\] must be bool, got torch.int64",
    ),
    "no is_init": ("sequential", {"is_init": None}, KeyError, r"no entry 'is_init': .*InitTracker"),
    "no marker": ("recurrent", {"is_init": None}, KeyError, r"Any one of 'is_init'"),
    "no input": ("both", {"observation": None}, KeyError, r"batch has no entry 'observation'"),
    "wrong input size": (
        "both",
        {"observation": torch.zeros(4, 2)},
        ValueError,
        r"batch\['observation'\] must have shape \(4, 3\) \(input_size=3\), got \(4, 2\)",
    ),
    "wrong input type": (
        "both",
        {"observation": torch.zeros(4, 3, dtype=torch.float64)},
        TypeError,
        r"batch\['observation'\] must be torch.float32 like the weights, got torch.float64: cast it",
    ),
    "input that is no float": (
        "both",
        {"observation": torch.zeros(4, 3, dtype=torch.int64)},
        TypeError,
        r"batch\['observation'\] must be torch.float32 like the weights, got torch.int64: cast it$",
    ),
    "wrong state size": (
        "both",
        {"recurrent_state": torch.zeros(4, 1, 5)},
        ValueError,
        r"batch\['recurrent_state'\] must have shape \(4, 2, 5\) "
        r"\(num_layers x hidden_size = 2 x 5\), got \(4, 1, 5\)",
    ),
    "state lost on the way": (
        "sequential",
        {"recurrent_state": None},
        KeyError,
        r"no entry 'recurrent_state', and some rows are not is_init rows: "
        r"carry \('next', 'recurrent_state'\)",
    ),
    "state not collected": (
        "recurrent",
        {"recurrent_state": None},
        KeyError,
        r"no entry 'recurrent_state', the state each run starts from: .*make_tensordict_primer",
    ),
}


@pytest.mark.parametrize(
    ("mode", "entries", "error", "text"),
    [
        pytest.param(mode, *rest, id=f"{name}, {mode}")
        for name, (modes, *rest) in CALLS.items()
        for mode in (["sequential", "recurrent"] if modes == "both" else [modes])
    ],
)
def test_refused_when_called(mode, entries, error, text):
    module = GRUModule(3, 5, 2, **KEYS)
    with set_recurrent_mode(mode), pytest.raises(error, match=text):
        module(batch_of(**entries))


@pytest.mark.parametrize(
    "kind", [GRUModule, LSTMModule, MinGRUModule, LRUModule, S6Module, FFMModule, DeltaNetModule]
)
def test_batches_without_rows(kind):
    """A step of no env is a step; a pass over no run is a mistake."""
    module = kind(3, 8, 2, **KEYS)
    for shape in ((0,), (2, 0)):
        batch = TensorDict({"is_init": torch.zeros(*shape, 1, dtype=torch.bool)}, shape)
        batch["observation"] = torch.zeros(*shape, 3)
        batch.update(module.make_tensordict_primer().expand(shape))
        assert module(batch)["features"].shape == (*shape, 8)
        with (
            set_recurrent_mode(True),
            pytest.raises(ValueError, match=r"at least one row, got .* \[(2, )?0\]"),
        ):
            module(batch)


def test_a_bidirectional_network_makes_no_single_steps():
    module = GRUModule(3, 5, bidirectional=True, **KEYS)
    with pytest.raises(RuntimeError, match=r"cannot make single steps, .* set_recurrent_mode\('recurrent'\)"):
        module(batch_of())


def test_recurrent_mode_needs_a_time_dimension():
    row = TensorDict({"observation": torch.zeros(3), "is_init": torch.tensor(True)}, [])
    with set_recurrent_mode(True), pytest.raises(ValueError, match=r"at least one batch dimension"):
        GRUModule(3, 5, **KEYS)(row)


def test_the_way_out_of_a_missing_state_works():
    module = GRUModule(3, 5, 2, default_recurrent_mode=True, **KEYS)
    batch = batch_of(recurrent_state=None)
    batch.update(module.make_tensordict_primer().expand(batch.batch_size))
    assert module(batch)["features"].shape == (4, 5)


def test_primer_of_gru_and_lstm():
    primer = GRUModule(3, 5, 2, **KEYS).double().make_tensordict_primer()
    assert isinstance(primer, TensorDictPrimer)
    assert list(primer.defaults) == ["recurrent_state"]
    assert primer.defaults["recurrent_state"].equal(torch.zeros(2, 5, dtype=torch.float64))
    assert not primer.defaults["recurrent_state"].requires_grad
    keys = list(LSTMModule(3, 5, **KEYS).make_tensordict_primer().defaults)
    assert keys == ["recurrent_state_h", "recurrent_state_c"]


def test_primed_rows_own_their_memory():
    primer = TensorDictPrimer({("agent", "h"): torch.ones(2)})
    primed = primer.expand((3, 2))
    primed["agent", "h"][0, 0] = 7
    assert primed["agent", "h"].sum() == 24
    assert primer.defaults["agent", "h"].tolist() == [1, 1]
    assert primer.expand(4, device="meta")["agent", "h"].device.type == "meta"


def test_primer_needs_states_that_can_be_carried():
    module = GRUModule(3, 5, in_keys=["observation", "h"], out_keys=["features", ("next", "state")])
    text = r"in_key 'h' needs out_key \('next', 'h'\), got \('next', 'state'\)"
    with pytest.raises(RuntimeError, match=text):
        module.make_tensordict_primer()


def test_a_primer_of_shapes():
    space, like = gym.spaces.Box(-1.0, 1.0, (2,)), torch.empty(3, dtype=torch.float64)
    primer = TensorDictPrimer(
        {"h": space, "c": like.numpy(), "w": torch.ones(1)}, default_value={"h": 0.5, "c": 2.0}
    )
    assert {key: (x.tolist(), x.dtype) for key, x in primer.defaults.items()} == {
        "h": ([0.5, 0.5], torch.float32),
        "c": ([2.0, 2.0, 2.0], torch.float64),
        "w": ([1.0], torch.float32),
    }
    with pytest.raises(ValueError, match=r"a number for each of \['h'\].*got \['w'\]"):
        TensorDictPrimer({"h": space, "w": torch.ones(1)}, default_value={"w": 1.0})
    with pytest.raises(TypeError, match=r"primers\['h'\] must be a tensor, a space or a spec, got int"):
        TensorDictPrimer({"h": 3})


def test_an_existing_network_may_be_turned():
    """``batch_first`` is no weight: after the line that the error gives, the module computes what the network did."""
    net, rows = nn.LSTM(3, 5), torch.randn(4, 1, 3)
    wanted, _ = net(rows)
    with pytest.raises(
        ValueError, match=r"or set lstm.batch_first = True, which leaves its weights as they are"
    ):
        LSTMModule(lstm=net, **KEYS)
    net.batch_first = True
    is_init = torch.tensor([True, False, False, False])
    batch = TensorDict({"observation": rows[:, 0], "is_init": is_init}, [4])
    with set_recurrent_mode(True):
        out = LSTMModule(lstm=net, state="zero", **KEYS)(batch)["features"]
    torch.testing.assert_close(out, wanted[:, 0])


@pytest.mark.filterwarnings("ignore")
def test_states_are_carried_in_a_torchrl_env():
    """By a primer of its own, since only a transform of the env can tell the env's specs of the states."""
    envs = pytest.importorskip("torchrl.envs")
    data = pytest.importorskip("torchrl.data")
    gru = GRUModule(4, 5, **KEYS)
    head = TensorDictModule(
        lambda x: torch.eye(2, dtype=torch.long)[(x[..., 0] > 0).long()], ["features"], ["action"]
    )
    specs = {key: data.Unbounded(x.shape) for key, x in gru.make_tensordict_primer().defaults.items()}
    parts = envs.Compose(envs.InitTracker(), envs.TensorDictPrimer(specs, expand_specs=True))
    env = envs.TransformedEnv(envs.GymEnv("CartPole-v1"), parts)
    with torch.no_grad():
        rows = env.rollout(20, TensorDictSequential(gru, head), break_when_any_done=False)
        assert rows["recurrent_state"][1:].any()
        with set_recurrent_mode(True):
            again = gru(rows.select("observation", "is_init", "recurrent_state", ("next", "done")))
    torch.testing.assert_close(again["features"], rows["features"])
