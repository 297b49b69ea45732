"""Where next values come from: the extended stream, finals of compact batches, NaN and hidden observations."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from flatroll.estimators import GAE
from flatroll.estimators.values.evaluate import Chunks
from flatroll.modules import GRUModule, recurrent_mode, set_recurrent_mode

BatchOf = Callable[..., TensorDict]
GaeLoop = Callable[[TensorDictBase, TensorDictModuleBase, float, float], Tensor]


class Calls:
    """A critic that keeps the observations of each call."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.network = TensorDictModule(self.value, in_keys=["observation"], out_keys=["state_value"])

    def value(self, observation: Tensor) -> Tensor:
        assert not observation.isnan().any()
        self.seen.append(observation)
        return observation.square().sum(-1, keepdim=True).sqrt()


class Leaky(TensorDictModuleBase):
    """A memory stepped row by row: ``h = h / 2 + sum(x)``, from the stored state where ``is_init``; value h."""

    in_keys = ["observation", "state", "is_init"]  # noqa: RUF012
    out_keys = ["state_value", ("next", "state")]  # noqa: RUF012

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[int] = []

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        assert recurrent_mode() is True
        self.rows.append(len(batch))
        state = torch.zeros(1, dtype=torch.float64)
        values = []
        for i in range(len(batch)):
            start = i == 0 or bool(batch["is_init"][i])
            state = (batch["state"][i] if start else state) / 2 + batch["observation"][i].sum()
            values.append(state)
        batch["state_value"] = torch.stack(values)
        batch["next", "state"] = batch["state_value"]
        return batch


def stepped(batch: TensorDict, gamma: float, lmbda: float) -> Tensor:
    """The advantage of :class:`Leaky`, each run stepped alone, its memory going on into the final observation."""
    advantages = []
    ids = batch["collector", "traj_ids"]
    for run in (batch[ids == number] for number in ids.unique()):
        state, values = run["state"][0], []
        for x in [*run["observation"], run["next", "observation"][-1]]:
            state = state / 2 + x.sum()
            values.append(state)
        advantage = torch.zeros(1, dtype=torch.float64)
        rows = []
        for i in reversed(range(len(run))):
            alive = 1.0 - float(run["next", "terminated"][i])
            delta = run["next", "reward"][i] + gamma * alive * values[i + 1] - values[i]
            advantage = delta + gamma * lmbda * advantage
            rows.append(advantage)
        advantages.append(torch.stack(rows[::-1]))
    return torch.cat(advantages)


def test_shifted_evaluates_each_row_and_each_open_end_once(mixed: TensorDict) -> None:
    calls = Calls()
    two = GAE(gamma=0.9, lmbda=0.8, value_network=calls.network)(mixed.clone())
    assert sum(len(x) for x in calls.seen) == 32
    calls.seen.clear()
    one = GAE(gamma=0.9, lmbda=0.8, value_network=calls.network, shifted=True)(mixed.clone())
    assert [len(x) for x in calls.seen] == [16 + 4]  # four of the six runs do not end terminated
    torch.testing.assert_close(one["advantage"], two["advantage"])
    torch.testing.assert_close(one["next", "state_value"], two["next", "state_value"])


@pytest.mark.parametrize("memory", [False, True])
def test_a_hook_counts_n_plus_k_rows(mixed: TensorDict, memory: bool) -> None:
    """N rows and one for each of the four runs that are not terminated, in one call, a recurrent network's too."""
    torch.manual_seed(0)
    gru = GRUModule(3, 3, in_key="observation", out_key="h")
    net = TensorDictModule(nn.Linear(3, 1), ["h" if memory else "observation"], ["state_value"])
    critic = TensorDictSequential(gru, net).double() if memory else net.double()
    mixed["recurrent_state"] = torch.zeros(16, 1, 3, dtype=torch.float64)
    rows: list[int] = []
    net.module.register_forward_hook(lambda module, args, out: rows.append(len(args[0])))
    one = GAE(gamma=0.9, lmbda=0.8, value_network=critic, shifted=True)(mixed.clone())
    assert rows == [20]
    rows.clear()
    two = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(mixed.clone())
    assert sum(rows) == (20 if memory else 32)
    for key in ("advantage", "value_target", "state_value", ("next", "state_value")):
        torch.testing.assert_close(one[key], two[key])


def hooked(net: nn.Module) -> TensorDictModule:
    network = TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])
    network.register_forward_hook(lambda module, args, out: out.set("state_value", 2 * out["state_value"]))
    return network


def picked(net: nn.Module) -> TensorDictModule:
    network = TensorDictModule(lambda x: (x, 2 * net(x)), ["observation"], ["rest", "state_value"])
    return network.select_out_keys("state_value")


class Twice(TensorDictModule):
    def forward(self, *args: Any, **options: Any) -> Any:
        out = super().forward(*args, **options)
        return out.set("state_value", 2 * out["state_value"])


WRAPPED: dict[str, Callable[[nn.Module], TensorDictModule]] = {
    "tensor": lambda net: TensorDictModule(lambda x: 2 * net(x), ["observation"], ["state_value"]),
    "one of two": lambda net: TensorDictModule(
        lambda x: (x, 2 * net(x)), ["observation"], ["x", "state_value"]
    ),
    "dict": lambda net: TensorDictModule(
        lambda x: {"state_value": 2 * net(x)}, ["observation"], ["state_value"]
    ),
    "list": lambda net: TensorDictModule(lambda x: (2 * net(x)).tolist(), ["observation"], ["state_value"]),
    "method": lambda net: TensorDictModule(net, ["observation"], ["state_value"], method="forward"),
    "arguments by name": lambda net: TensorDictModule(
        lambda *, x: 2 * net(x), in_keys={"x": "observation"}, out_keys=["state_value"]
    ),
    "hook": hooked,
    "subclass": lambda net: Twice(net, in_keys=["observation"], out_keys=["state_value"]),
    "selected": picked,
}


@pytest.mark.parametrize("name", WRAPPED)
@pytest.mark.parametrize("shifted", [False, True])
def test_a_network_is_called_as_it_is_made(mixed: TensorDict, name: str, shifted: bool) -> None:
    net = nn.Linear(3, 1).double()
    network = WRAPPED[name](net)
    out = GAE(gamma=0.9, lmbda=0.8, value_network=network, shifted=shifted)(mixed)
    expected = network(TensorDict({"observation": mixed["observation"]}, [16]))["state_value"]
    torch.testing.assert_close(out["state_value"], expected.detach().to(out["state_value"].dtype))


def test_stream_without_an_open_end_is_the_batch_itself(batch_of: BatchOf) -> None:
    batch, calls = batch_of([(3, "terminated"), (2, "both")]), Calls()
    GAE(gamma=0.9, lmbda=0.8, value_network=calls.network, shifted=True)(batch)
    assert [x.data_ptr() for x in calls.seen] == [batch["observation"].data_ptr()]


@pytest.mark.parametrize("chunk", [{}, {"value_chunk_size": 4}, {"num_chunks": 3}], ids=str)
def test_recurrent_network_equals_stepping(mixed: TensorDict, chunk: dict[str, int]) -> None:
    mixed["state"] = torch.randn(
        16, 1, dtype=torch.float64
    )  # stored states; only those of first rows are read
    critic, expected = Leaky(), stepped(mixed, 0.9, 0.8)
    for shifted in (False, True):
        out = GAE(gamma=0.9, lmbda=0.8, value_network=critic, shifted=shifted, **chunk)(mixed.clone())
        torch.testing.assert_close(out["advantage"], expected)
        assert sum(critic.rows) == 20  # never the two calls, which would forget what came before
        critic.rows.clear()


def test_recurrent_network_where_only_ids_mark_the_cuts(mixed: TensorDict) -> None:
    """Windows that begin inside an episode: no ``is_init`` there, and a state that is not the first one."""
    mixed["state"] = torch.randn(16, 1, dtype=torch.float64)
    mixed["is_init"].zero_()
    out = GAE(gamma=0.9, lmbda=0.8, value_network=Leaky())(mixed)
    torch.testing.assert_close(out["advantage"], stepped(mixed, 0.9, 0.8))
    assert not mixed["is_init"].any()


def test_gru_critic_equals_stepping_it(mixed: TensorDict) -> None:
    torch.manual_seed(0)
    gru = GRUModule(
        input_size=3, hidden_size=4, in_keys=["observation", "rs"], out_keys=["h", ("next", "rs")]
    )
    critic = TensorDictSequential(gru, TensorDictModule(nn.Linear(4, 1), ["h"], ["state_value"])).double()
    mixed["rs"] = torch.zeros(16, 1, 4, dtype=torch.float64)
    out = GAE(gamma=0.9, lmbda=0.8, value_network=critic, num_chunks=2)(mixed.clone())
    ids = mixed["collector", "traj_ids"]
    with torch.no_grad(), set_recurrent_mode(False):
        for number in ids.unique():
            run = mixed[ids == number]
            state, seen = run["rs"][:1], [*run["observation"], run["next", "observation"][-1]]
            for i, x in enumerate(seen):
                step = {"observation": x[None], "rs": state, "is_init": torch.tensor([[i == 0]])}
                stepped_to = critic(TensorDict(step, [1]))
                state = stepped_to["next", "rs"]
                if i < len(run):
                    torch.testing.assert_close(
                        out["state_value"][ids == number][i], stepped_to["state_value"][0]
                    )
            if not run["next", "terminated"][-1]:
                last = out["next", "state_value"][ids == number][-1]
                torch.testing.assert_close(last, stepped_to["state_value"][0])


def test_nan_never_reaches_the_network(mixed: TensorDict, gae_loop: GaeLoop) -> None:
    """The row's own number stands in, element by element, as the references have it."""
    ids = mixed["collector", "traj_ids"]
    last = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])])
    filled = mixed.clone()
    filled["next", "observation"][last, 1] = filled["observation"][last, 1]
    mixed["next", "observation"][last, 1] = torch.nan
    calls = Calls()
    expected = gae_loop(filled, calls.network, 0.9, 0.8)
    for shifted in (False, True):
        gae = GAE(gamma=0.9, lmbda=0.8, value_network=calls.network, shifted=shifted)
        with pytest.warns(UserWarning, match=r"is NaN in 4 rows that are not terminated") as caught:
            out = gae(mixed.clone())
        assert caught[0].filename == __file__
        torch.testing.assert_close(out["advantage"], expected)
        assert out["next", "observation"].isnan().any()  # the batch itself stays as it was
        gae(mixed.clone())  # warnings are errors: it says so once


def test_compact_without_final_takes_the_own_observation_and_says_so_once(
    mixed: TensorDict, gae_loop: GaeLoop
) -> None:
    ids = mixed["collector", "traj_ids"]
    last = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])])
    approximate = mixed.clone()
    approximate["next", "observation"][last] = approximate["observation"][last]
    calls = Calls()
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=calls.network)
    thin = mixed.exclude(("next", "observation"))
    text = "no entry ('next', 'observation') and no final= came with it"
    with pytest.warns(UserWarning, match=re.escape(text)):
        out = gae(thin.clone())
    torch.testing.assert_close(out["advantage"], gae_loop(approximate, calls.network, 0.9, 0.8))
    gae(thin.clone())  # warnings are errors: no second one


def test_compact_batch_of_terminated_runs_is_exact_and_silent(batch_of: BatchOf, gae_loop: GaeLoop) -> None:
    batch, calls = batch_of([(3, "terminated"), (2, "both")]), Calls()
    expected = gae_loop(batch, calls.network, 0.9, 0.8)
    out = GAE(gamma=0.9, lmbda=0.8, value_network=calls.network)(batch.exclude(("next", "observation")))
    torch.testing.assert_close(out["advantage"], expected)


@pytest.mark.parametrize("rows", [[5], []], ids=["one of many", "none"])
def test_final_of_another_batch(mixed: TensorDict, rows: list[int]) -> None:
    final = TensorDict(
        {"row": torch.tensor(rows, dtype=torch.int64), ("next", "observation"): torch.zeros(len(rows), 3)},
        [len(rows)],
    )
    text = f"final has no next observation for row {9 if rows else 5}, which ends a run without terminating"
    with pytest.raises(ValueError, match=re.escape(text)):
        GAE(gamma=0.9, lmbda=0.8, value_network=Calls().network)(
            mixed.exclude(("next", "observation")), final=final
        )


@pytest.fixture
def hidden(batch_of: BatchOf) -> TensorDict:
    """Rows 0-2 truncated with a hidden final observation, 3-4 terminated with a hidden one, 5-7 cut."""
    batch = batch_of([(3, "truncated"), (2, "terminated"), (3, "cut")])
    known = torch.ones(8, dtype=torch.bool)
    known[[2, 4]] = False
    batch["collector", "next_known"] = known
    batch["next", "observation"][~known] = 1e6  # what lies there is another episode's
    return batch


def test_hidden_final_observation_is_an_error(hidden: TensorDict) -> None:
    text = (
        "the env hid the final observation of 1 truncated rows (the first is row 2), so their next value is "
        "unknown: choose bootstrap_missing='current'"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        GAE(gamma=0.9, lmbda=0.8, value_network=Calls().network)(hidden)
    GAE(gamma=0.9, lmbda=0.8, value_network=Calls().network)(hidden[3:])  # terminated: nothing is missing


@pytest.mark.parametrize("shifted", [False, True])
def test_hidden_final_observation_current(hidden: TensorDict, gae_loop: GaeLoop, shifted: bool) -> None:
    calls, filled = Calls(), hidden.clone()
    filled["next", "observation"][2] = filled["observation"][2]
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=calls.network, shifted=shifted, bootstrap_missing="current")
    out = gae(hidden)
    torch.testing.assert_close(out["advantage"], gae_loop(filled, calls.network, 0.9, 0.8))


@pytest.mark.parametrize("shifted", [False, True])
def test_hidden_final_observations_and_nan(hidden: TensorDict, gae_loop: GaeLoop, shifted: bool) -> None:
    """NaN behind a termination is silent, behind a cut it is told of; the hidden row is neither."""
    hidden["collector", "next_known"][4] = True
    filled, calls = hidden.clone(), Calls()
    for row in (2, 4, 7):
        filled["next", "observation"][row] = filled["observation"][row]
    options: Any = {"gamma": 0.9, "lmbda": 0.8, "shifted": shifted, "bootstrap_missing": "current"}
    hidden["next", "observation"][[2, 4]] = torch.nan
    GAE(**options, value_network=calls.network)(hidden.clone())  # warnings are errors
    hidden["next", "observation"][7] = torch.nan
    with pytest.warns(UserWarning, match="is NaN in 1 rows that are not terminated"):
        out = GAE(**options, value_network=calls.network)(hidden)
    torch.testing.assert_close(out["advantage"], gae_loop(filled, calls.network, 0.9, 0.8))


@pytest.mark.parametrize("shifted", [False, True])
def test_hidden_final_observation_mask(hidden: TensorDict, gae_loop: GaeLoop, shifted: bool) -> None:
    """The row is gone: the one before is cut there and bootstraps from its observation, which is known."""
    calls = Calls()
    rest = hidden[torch.arange(8) != 2]
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=calls.network, shifted=shifted, bootstrap_missing="mask")
    out = gae(hidden)
    assert out["shifted_valid"].tolist() == [i != 2 for i in range(8)]
    kept = out[out["shifted_valid"]]
    torch.testing.assert_close(kept["advantage"], gae_loop(rest, calls.network, 0.9, 0.8))
    assert out["advantage"][2].item() == 0.0
    assert out["value_target"][2] == out["state_value"][2]
    gae.bootstrap_missing = "current"
    assert gae(out)["shifted_valid"].all()  # what an earlier estimator left out is not left out now


def test_hidden_final_observation_mask_within_a_budget(hidden: TensorDict) -> None:
    """Both leave rows out: the hidden one keeps its value as target, the displaced one has nothing."""
    options: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.8, "bootstrap_missing": "mask", "shifted": True}
    exact = GAE(**options, value_network=Calls().network)(hidden.clone())
    out = GAE(**options, value_network=Calls().network, shifted_budget=1)(hidden)
    assert exact["shifted_valid"].tolist() == [i != 2 for i in range(8)]
    assert out["shifted_valid"].tolist() == [i not in (2, 7) for i in range(8)]
    torch.testing.assert_close(out["advantage"][:5], exact["advantage"][:5])
    assert out["value_target"][2] == out["state_value"][2] and not out["value_target"][7].any()


def test_hidden_final_observation_mask_of_a_compact_batch_twice(hidden: TensorDict) -> None:
    final = TensorDict(
        {"row": torch.tensor([7]), ("next", "observation"): hidden["next", "observation"][7:]}, [1]
    )
    thin = hidden.exclude(("next", "observation"))
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=Calls().network, bootstrap_missing="mask", average_gae=True)
    first = gae(thin, final=final)["advantage"].clone()
    assert torch.equal(gae(thin, final=final)["advantage"], first)
    rows, left_out = first[thin["shifted_valid"]], first[~thin["shifted_valid"]]
    assert left_out.tolist() == [[0.0]]
    torch.testing.assert_close((rows.mean(), rows.std()), (rows.new_tensor(0.0), rows.new_tensor(1.0)))


def test_hidden_final_observation_with_compact_batch(hidden: TensorDict, gae_loop: GaeLoop) -> None:
    calls, filled = Calls(), hidden.clone()
    filled["next", "observation"][2] = filled["observation"][2]
    gae = GAE(gamma=0.9, lmbda=0.8, value_network=calls.network, bootstrap_missing="current")
    expected = gae_loop(filled, calls.network, 0.9, 0.8)
    next_obs = hidden["next", "observation"]
    for rows in ([7], [2, 7]):
        final = TensorDict({"row": torch.tensor(rows), ("next", "observation"): next_obs[rows]}, [len(rows)])
        out = gae(hidden.exclude(("next", "observation")), final=final)
        torch.testing.assert_close(out["advantage"], expected)
    nothing = TensorDict(
        {"row": torch.empty(0, dtype=torch.int64), ("next", "observation"): next_obs[:0]}, [0]
    )
    out = gae(hidden[:5].exclude(("next", "observation")), final=nothing)
    torch.testing.assert_close(out["advantage"], expected[:5])


def test_chunks_bound_the_rows_of_a_call(batch_of: BatchOf) -> None:
    batch, calls = batch_of([(50, "cut"), (50, "truncated")]), Calls()
    arguments: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.8, "value_network": calls.network}
    whole = GAE(**arguments)(batch.clone())["advantage"]
    for shifted in (False, True):
        calls.seen.clear()
        out = GAE(**arguments, shifted=shifted, value_chunk_size=16)(batch.clone())
        assert max(len(x) for x in calls.seen) == 16
        torch.testing.assert_close(out["advantage"], whole)
    calls.seen.clear()
    GAE(**arguments, num_chunk=4)(batch)
    assert [len(x) for x in calls.seen] == [25] * 8


@pytest.mark.parametrize(
    ("size", "stops", "spans"),
    [
        (4, [2, 4, 9, 10], [(0, 4), (4, 9), (9, 10)]),  # a run longer than a chunk goes alone
        (20, [2, 10], [(0, 10)]),
        (1, [3, 6, 10], [(0, 3), (3, 6), (6, 10)]),
    ],
    ids=["mixed", "all", "one row"],
)
def test_chunks_hold_whole_runs(size: int, stops: list[int], spans: list[tuple[int, int]]) -> None:
    assert list(Chunks(size=size).spans(10, torch.tensor(stops))) == spans
