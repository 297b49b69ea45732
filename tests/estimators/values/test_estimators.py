"""Every estimator module: each run of a batch gets what it gets alone, by whatever way the values come."""

import copy
import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict, TensorDictBase, TensorDictParams
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.autograd import gradcheck
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import (
    GAE,
    TD0Estimator,
    TD1Estimator,
    TDLambdaEstimator,
    VTrace,
    generalized_advantage_estimate,
    td0_return_estimate,
    td1_return_estimate,
    td_lambda_return_estimate,
    vtrace_advantage_estimate,
)
from flatroll.modules import GRUModule

BatchOf = Callable[..., TensorDict]
Pair = tuple[Tensor, Tensor]
G, L = 0.9, 0.8

RUNS = st.lists(
    st.tuples(st.integers(1, 6), st.sampled_from(["terminated", "truncated", "both", "cut"])),
    min_size=1,
    max_size=5,
)


def norm_critic() -> TensorDictModule:
    """A critic that is not linear, in float64, without parameters."""
    return TensorDictModule(
        lambda x: x.square().sum(-1, keepdim=True).sqrt(), in_keys=["observation"], out_keys=["state_value"]
    )


def actor() -> ProbabilisticTensorDictSequential:
    """Four actions; the logits are the observation's three numbers and 0."""
    logits = TensorDictModule(lambda x: torch.cat([x, 0 * x[..., :1]], -1), ["observation"], ["logits"])
    choose = ProbabilisticTensorDictModule(
        ["logits"],
        ["action"],
        distribution_class=Categorical,
        distribution_kwargs={"validate_args": False},  # it would read the device
    )
    return ProbabilisticTensorDictSequential(logits, choose)


KINDS: dict[str, Callable[..., Any]] = {
    "gae": lambda critic, gamma=G, **k: GAE(gamma=gamma, lmbda=L, value_network=critic, **k),
    "td0": lambda critic, gamma=G, **k: TD0Estimator(gamma=gamma, value_network=critic, **k),
    "td1": lambda critic, gamma=G, **k: TD1Estimator(gamma=gamma, value_network=critic, **k),
    "td_lambda": lambda critic, gamma=G, **k: TDLambdaEstimator(
        gamma=gamma, lmbda=L, value_network=critic, **k
    ),
    "vtrace": lambda critic, gamma=G, **k: VTrace(
        gamma=gamma, actor_network=actor(), value_network=critic, **k
    ),
}
EACH = pytest.mark.parametrize("kind", KINDS)


def acted(batch: TensorDict) -> TensorDict:
    """The batch with actions and the log-probability under some other policy."""
    generator = torch.Generator().manual_seed(len(batch))
    batch["action"] = torch.randint(4, batch.batch_size, generator=generator)
    batch["action_log_prob"] = -0.5 - torch.rand(batch.batch_size, generator=generator, dtype=torch.float64)
    return batch


def of_columns(kind: str, run: TensorDictBase, value: Tensor, next_value: Tensor) -> Pair:
    """Advantage and target of one run, by the functions on tensors."""
    after = run["next"]
    columns = next_value, after["reward"], after["done"], after["terminated"]
    if kind == "gae":
        return generalized_advantage_estimate(G, L, value, *columns)
    if kind == "vtrace":
        log_pi = actor().get_dist(run.select("observation")).log_prob(run["action"])
        return vtrace_advantage_estimate(
            G, log_pi.unsqueeze(-1), run["action_log_prob"].unsqueeze(-1), value, *columns
        )
    if kind == "td0":
        target = td0_return_estimate(G, next_value, after["reward"], after["terminated"])
    elif kind == "td1":
        target = td1_return_estimate(G, *columns)
    else:
        target = td_lambda_return_estimate(G, L, *columns)
    return target - value, target


def alone(kind: str, batch: TensorDict) -> Pair:
    """The same of each run of the batch by itself."""
    ids, critic = batch["collector", "traj_ids"], norm_critic()
    pairs = []
    for number in ids.unique():
        run = batch[ids == number]
        value = critic(run.select("observation"))["state_value"]
        next_value = critic(run["next"].select("observation"))["state_value"]
        pairs.append(of_columns(kind, run, value, next_value))
    return torch.cat([a for a, _ in pairs]), torch.cat([t for _, t in pairs])


def compact(batch: TensorDict) -> tuple[TensorDict, TensorDict]:
    """The batch without next observations, and those that no row of it holds."""
    ids = batch["collector", "traj_ids"]
    row = torch.cat([ids[1:] != ids[:-1], torch.tensor([True])]).nonzero().squeeze(-1)
    final = TensorDict({"row": row, ("next", "observation"): batch["next", "observation"][row]}, [len(row)])
    return batch.exclude(("next", "observation")), final


@EACH
@examples(25)
@given(
    runs=RUNS,
    way=st.sampled_from(
        [{}, {"shifted": True}, {"single_call": True}, {"shifted": True, "shifted_budget": 5}]
    ),
    chunk=st.sampled_from([{}, {"value_chunk_size": 3}, {"num_chunks": 2}, {"num_chunk": 3}]),
    seed=st.integers(0, 5),
)
def test_each_run_gets_what_it_gets_alone(
    batch_of: BatchOf,
    kind: str,
    runs: list[tuple[int, str]],
    way: dict[str, Any],
    chunk: dict[str, int],
    seed: int,
) -> None:
    batch = acted(batch_of(runs, seed=seed))
    advantage, target = alone(kind, batch)
    estimator = KINDS[kind](norm_critic(), **way, **chunk)
    thin, final = compact(batch)
    for out in (estimator(batch), estimator(thin, final=final)):
        torch.testing.assert_close(out["advantage"], advantage)
        torch.testing.assert_close(out["value_target"], target)
        if way:
            assert out["shifted_valid"].all() and out["shifted_valid"].shape == batch.batch_size


@EACH
@pytest.mark.parametrize("way", [{}, {"shifted": True}, {"shifted": True, "shifted_budget": 2}], ids=str)
def test_a_batch_with_time_in_any_dim(batch_of: BatchOf, kind: str, way: dict[str, Any]) -> None:
    flat = acted(batch_of([(4, "terminated"), (4, "cut"), (3, "truncated"), (1, "cut")]))
    advantage, target = alone(kind, flat)
    batch = flat.reshape(3, 4).exclude("collector")
    wanted = advantage.view(3, 4, 1), target.view(3, 4, 1)
    other, by_name = batch.transpose(0, 1).clone(), batch.transpose(0, 1).clone().refine_names("time", None)
    plain = KINDS[kind](norm_critic(), **way)
    for named, estimator, call in (
        (batch.clone(), plain, {}),
        (other.clone(), KINDS[kind](norm_critic(), time_dim=0, **way), {}),
        (by_name, plain, {}),
        (other.clone(), plain, {"time_dim": 0}),
    ):
        out = estimator(named, **call)
        turned = out if out.batch_size == batch.batch_size else out.transpose(0, 1)
        torch.testing.assert_close((turned["advantage"], turned["value_target"]), wanted)
        turned_value = estimator.value_estimate(named, **call)
        torch.testing.assert_close(turned_value if out is turned else turned_value.transpose(0, 1), wanted[1])


@EACH
def test_writes_the_same_entries_whatever_the_data(batch_of: BatchOf, kind: str) -> None:
    batch = acted(batch_of([(3, "truncated"), (2, "terminated")]))
    before, estimator = batch.clone(), KINDS[kind](norm_critic())
    out = estimator(batch)
    assert out is batch
    added = {"advantage", "value_target", "state_value", ("next", "state_value")}
    assert set(out.keys(True, True)) - set(before.keys(True, True)) == added == set(estimator.out_keys)
    assert all((out[key] == before[key]).all() for key in before.keys(True, True))
    assert set(estimator.in_keys) <= set(before.keys(True, True))


@EACH
def test_a_second_call_gives_the_same(batch_of: BatchOf, kind: str) -> None:
    batch, estimator = acted(batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")])), None
    for options in ({}, {"shifted": True}, {"shifted": True, "shifted_budget": 1}):
        estimator = KINDS[kind](norm_critic(), **options)
        first = estimator(batch).clone()
        batch["state_value"] += 7.0
        batch["next", "state_value"] += 7.0
        assert (estimator(batch) == first).all()


@EACH
def test_takes_entries_as_keywords(batch_of: BatchOf, kind: str) -> None:
    batch = acted(batch_of([(3, "truncated"), (2, "terminated")])).exclude("collector", "is_init")
    estimator = KINDS[kind](norm_critic())
    wanted = estimator(batch.clone())
    names = {"_".join((key,) if isinstance(key, str) else key): batch[key] for key in estimator.in_keys}
    advantage, target, *_ = estimator(**names)
    torch.testing.assert_close((advantage, target), (wanted["advantage"], wanted["value_target"]))


@EACH
def test_multi_reward(batch_of: BatchOf, kind: str) -> None:
    """Two rewards, two values, one done."""
    batch = acted(batch_of([(3, "truncated"), (2, "terminated"), (1, "cut")]))
    wanted = alone(kind, batch)
    batch["next", "reward"] = batch["next", "reward"].repeat(1, 2) * torch.tensor([1.0, 0.0])
    critic = TensorDictModule(
        lambda x: x.square().sum(-1, keepdim=True).sqrt().repeat(1, 2), ["observation"], ["state_value"]
    )
    out = KINDS[kind](critic)(batch)
    assert out["advantage"].shape == (6, 2)
    torch.testing.assert_close((out["advantage"][:, :1], out["value_target"][:, :1]), wanted)


@EACH
def test_runs_on_a_device_without_reading_it(batch_of: BatchOf, kind: str) -> None:
    """The meta device has no numbers: two calls, or a stream of fixed length, wait for none."""
    batch = acted(batch_of([(3, "truncated"), (2, "terminated")])).to("meta")
    for options in ({}, {"shifted": True, "shifted_budget": 2}, {"num_chunks": 2}):
        assert KINDS[kind](norm_critic(), **options)(batch.clone())["advantage"].device.type == "meta"


@EACH
@pytest.mark.parametrize("way", [{}, {"shifted": True}, {"shifted": True, "shifted_budget": 3}], ids=str)
def test_gradients_through_everything(batch_of: BatchOf, kind: str, way: dict[str, Any]) -> None:
    """To the critic's weights and the reward."""
    batch = acted(batch_of([(3, "truncated"), (1, "terminated"), (2, "cut")]))
    net = nn.Sequential(nn.Linear(3, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    critic = TensorDictModule(net, ["observation"], ["state_value"])
    estimator = KINDS[kind](critic, differentiable=True, **way)
    weights = TensorDict.from_module(critic)
    names = list(weights.keys(True, True))

    def of(reward: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        given = batch.clone()
        given["next", "reward"] = reward
        own = weights.clone(False)
        for name, parameter in zip(names, parameters, strict=True):
            own[name] = parameter
        out = estimator(given, params=own)
        return out["advantage"], out["value_target"]

    inputs = [
        x.detach().clone().requires_grad_() for x in (batch["next", "reward"], *map(weights.get, names))
    ]
    assert gradcheck(of, inputs)
    assert not KINDS[kind](critic, **way)(batch)["advantage"].requires_grad


@EACH
def test_an_empty_batch_stays_one(batch_of: BatchOf, kind: str) -> None:
    batch = acted(batch_of([(3, "truncated")]))[:0]
    for way in ({}, {"shifted": True}):
        assert KINDS[kind](norm_critic(), **way)(batch.clone())["advantage"].shape == (0, 1)


@EACH
def test_copies_and_pickles(batch_of: BatchOf, kind: str) -> None:
    if kind == "vtrace":
        pytest.skip("its actor here is a lambda")
    batch, estimator = batch_of([(3, "truncated"), (2, "terminated")]), KINDS[kind](linear_critic())
    wanted = estimator(batch.clone())["advantage"]
    for other in (copy.deepcopy(estimator), pickle.loads(pickle.dumps(estimator))):
        assert torch.equal(other(batch.clone())["advantage"], wanted)


@pytest.mark.parametrize("truncated_key", [("next", "truncated"), None], ids=["marked", "env's words"])
@EACH
def test_slices_of_a_buffer_are_runs_of_their_own(batch_of: BatchOf, kind: str, truncated_key: Any) -> None:
    """Slices of the same trajectory side by side, too: each bootstraps from what follows it."""
    runs = [(7, "terminated"), (3, "truncated"), (9, "truncated"), (5, "terminated")]
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(24),
        sampler=SliceSampler(slice_len=4, truncated_key=truncated_key),
        batch_size=48,
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(acted(batch_of(runs)))
    sample = buffer.sample()
    starts = [*sample["is_init"].squeeze(-1).nonzero().squeeze(-1).tolist(), len(sample)]
    assert len(starts) > 10
    pieces = [sample[a:b].clone() for a, b in itertools.pairwise(starts)]
    for way in ({}, {"shifted": True}):
        estimator = KINDS[kind](norm_critic(), **way)
        alone = torch.cat([estimator(piece.clone())["advantage"] for piece in pieces])
        torch.testing.assert_close(estimator(sample.clone())["advantage"], alone)


# --- values that are there already, and other parameters ---


@EACH
def test_without_a_network_both_values_are_in_the_batch(batch_of: BatchOf, kind: str) -> None:
    batch = acted(batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")]))
    wanted = alone(kind, batch)
    estimator = KINDS[kind](None)
    with pytest.raises(KeyError, match="no entry 'state_value': the value network writes it"):
        estimator(batch)
    norm_critic()(batch)
    batch["next", "state_value"] = norm_critic()(batch["next"].select("observation"))["state_value"]
    batch["next", "state_value"][batch["next", "terminated"]] = torch.nan
    out = estimator(batch)
    torch.testing.assert_close((out["advantage"], out["value_target"]), wanted)


@EACH
def test_the_network_can_be_replaced(batch_of: BatchOf, kind: str) -> None:
    batch = acted(batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")]))
    wanted = alone(kind, batch)
    estimator = KINDS[kind](norm_critic())

    # another network, which reads another entry
    estimator.value_network = TensorDictModule(
        lambda x: 2 * x.norm(dim=-1, keepdim=True), ["half"], ["state_value"]
    )
    batch["half"] = batch["observation"] / 2
    batch["next", "half"] = batch["next", "observation"] / 2
    out = estimator(batch)
    torch.testing.assert_close((out["advantage"], out["value_target"]), wanted)
    assert ("next", "half") in estimator.in_keys

    # none: the batch holds both values now
    estimator.value_network = None
    out = estimator(batch)
    torch.testing.assert_close((out["advantage"], out["value_target"]), wanted)
    assert ("next", "half") not in estimator.in_keys


class Counting:
    """A critic that counts its rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.network = TensorDictModule(self.value, ["observation"], ["state_value"])

    def value(self, observation: Tensor) -> Tensor:
        self.rows += len(observation)
        return observation.square().sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize(
    ("options", "both", "roots"),
    [({}, 0, 7), ({"shifted": True}, 0, 2), ({"shifted": True, "shifted_budget": 3}, 0, 10)],
    ids=["two calls", "shifted", "budget"],
)
def test_skip_existing(batch_of: BatchOf, options: dict[str, Any], both: int, roots: int) -> None:
    """``both`` values there: no call; the rows' own: only what follows is evaluated (K rows, where shifted)."""
    batch, critic = batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")]), Counting()
    wanted = GAE(gamma=G, lmbda=L, value_network=critic.network)(batch.clone())
    for there, rows in ((("state_value",), roots), (("state_value", ("next", "state_value")), both)):
        critic.rows = 0
        estimator = GAE(gamma=G, lmbda=L, value_network=critic.network, skip_existing=True, **options)
        given = batch.clone().update(wanted.select(*there))
        torch.testing.assert_close(estimator(given)["advantage"], wanted["advantage"])
        assert critic.rows == rows
    critic.rows = 0
    GAE(gamma=G, lmbda=L, value_network=critic.network)(given)
    assert critic.rows == 14  # what stands there is not read unless asked


def scaled(critic: TensorDictModule, factor: float) -> TensorDictParams:
    return TensorDict.from_module(critic).apply(lambda x: factor * x)


def linear_critic(**options: Any) -> TensorDictModule:
    torch.manual_seed(0)
    return TensorDictModule(
        nn.Linear(3, 1, bias=False, dtype=torch.float64), ["observation"], ["state_value"]
    )


@EACH
def test_other_parameters(batch_of: BatchOf, kind: str) -> None:
    batch, critic = acted(batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")])), linear_critic()
    estimator, own = KINDS[kind](critic), critic.module.weight.detach().clone()
    out = estimator(batch.clone(), params=scaled(critic, 2.0), target_params=scaled(critic, -1.0))
    value = critic(batch.select("observation"))["state_value"].detach()
    next_value = critic(batch["next"].select("observation"))["state_value"].detach()
    torch.testing.assert_close(out["state_value"], 2 * value)
    over = batch["next", "terminated"]
    torch.testing.assert_close(out["next", "state_value"], (-next_value).masked_fill(over, 0.0))
    same = estimator(batch.clone(), scaled(critic, 2.0))  # by position, too
    torch.testing.assert_close(same["next", "state_value"], (2 * next_value).masked_fill(over, 0.0))
    torch.testing.assert_close(critic.module.weight, own)


def test_one_call_has_one_set_of_parameters(batch_of: BatchOf) -> None:
    batch, critic = batch_of([(3, "truncated"), (2, "terminated")]), linear_critic()
    gae = GAE(gamma=G, lmbda=L, value_network=critic, shifted=True)
    with pytest.raises(ValueError, match=re.escape("leave target_params out, or shifted=True")):
        gae(batch, target_params=scaled(critic, 0.5))
    doubled = gae(batch.clone(), params=scaled(critic, 2.0))["state_value"]
    torch.testing.assert_close(doubled, 2 * gae(batch)["state_value"])


def test_other_parameters_behind_a_memory_and_of_a_compact_batch(batch_of: BatchOf) -> None:
    """No two calls will do there: the stream is evaluated twice."""
    batch = batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")])
    torch.manual_seed(0)
    gru = GRUModule(3, 4, in_key="observation", out_key="h")
    head = TensorDictModule(nn.Linear(4, 1, bias=False), ["h"], ["state_value"])
    memory = TensorDictSequential(gru, head).double()
    batch["recurrent_state"] = torch.zeros(7, 1, 4, dtype=torch.float64)
    thin, final = compact(batch)
    for rows, network, extra in ((batch, memory, {}), (thin, linear_critic(), {"final": final})):
        twice = TensorDict.from_module(network).clone()
        last = ("module", "1", "module", "weight") if network is memory else ("module", "weight")
        twice[last] = 2.0 * twice[last]
        gae = GAE(gamma=G, lmbda=L, value_network=network)
        plain = gae(rows.clone(), **extra)
        mixed = gae(rows.clone(), target_params=twice, **extra)
        torch.testing.assert_close(mixed["state_value"], plain["state_value"])
        torch.testing.assert_close(mixed["next", "state_value"], 2 * plain["next", "state_value"])


@EACH
def test_value_estimate_writes_nothing(batch_of: BatchOf, kind: str) -> None:
    batch = acted(batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")]))
    before = set(batch.keys(True, True))
    estimator, critic = KINDS[kind](norm_critic()), norm_critic()
    target = alone(kind, batch)[1]
    torch.testing.assert_close(estimator.value_estimate(batch), target)
    next_value = critic(batch["next"].select("observation"))["state_value"]
    for known in (next_value, next_value.squeeze(-1)):
        torch.testing.assert_close(estimator.value_estimate(batch, next_value=known), target)
    turned = batch.unsqueeze(-1)
    found = estimator.value_estimate(turned, next_value=next_value.unsqueeze(1), time_dim=0)
    torch.testing.assert_close(found, target.unsqueeze(1))
    with pytest.raises(
        ValueError, match=re.escape("next_value must have the reward's shape (7, 1), got (6, 1)")
    ):
        estimator.value_estimate(batch, next_value=next_value[:-1])
    for dim in (2, -3):
        with pytest.raises(
            ValueError, match=re.escape(f"time_dim must name a batch dim of (7, 1), got {dim}")
        ):
            estimator.value_estimate(turned, time_dim=dim)
    thin, final = compact(batch)
    torch.testing.assert_close(estimator.value_estimate(thin, final=final), target)
    assert set(batch.keys(True, True)) == before


@pytest.mark.parametrize("kind", ["td0", "td1", "td_lambda"])
def test_targets_from_given_next_values_need_no_network(batch_of: BatchOf, kind: str) -> None:
    batch = batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")])
    next_value = norm_critic()(batch["next"].select("observation"))["state_value"]
    target = KINDS[kind](None).value_estimate(batch, next_value=next_value)
    torch.testing.assert_close(target, alone(kind, batch)[1])


@pytest.mark.parametrize("kind", ["gae", "vtrace"])
@pytest.mark.parametrize(
    "way", [{}, {"shifted": True}, {"shifted": True, "shifted_budget": 1}, {"num_chunks": 3}], ids=str
)
def test_where_next_values_are_known_the_network_sees_the_rows_alone(
    batch_of: BatchOf, kind: str, way: dict[str, Any]
) -> None:
    """Given in the call, or standing in the batch."""
    batch, calls = acted(batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")])), Counting()
    advantage, target = alone(kind, batch)
    next_value = norm_critic()(batch["next"].select("observation"))["state_value"]
    estimator = KINDS[kind](calls.network, **way)
    torch.testing.assert_close(estimator.value_estimate(batch, next_value=next_value), target)
    assert calls.rows == 7
    batch["next", "state_value"] = next_value
    out = KINDS[kind](calls.network, skip_existing=True, **way)(batch)
    torch.testing.assert_close(out["advantage"], advantage)
    assert calls.rows == 14
    with pytest.raises(
        ValueError, match=re.escape("next_value must have the reward's shape (7, 1), got (6, 1)")
    ):
        estimator.value_estimate(batch, next_value=next_value[:6])


# --- rewards ---


@pytest.mark.parametrize("kind", ["td0", "td1", "td_lambda"])
def test_average_rewards_leaves_the_batch_its_own(batch_of: BatchOf, kind: str) -> None:
    batch = batch_of([(5, "truncated"), (4, "terminated")])
    reward = batch["next", "reward"].clone()
    batch["collector", "mask"] = torch.arange(9) < 8
    batch["is_init"][8] = True  # the padding is a run of its own
    real = reward[:8]
    expected = batch.clone()
    expected["next", "reward"] = (reward - real.mean()) / real.std()
    estimator = KINDS[kind](norm_critic(), average_rewards=True)
    wanted = KINDS[kind](norm_critic())(expected)["value_target"]
    for _ in range(2):
        torch.testing.assert_close(estimator(batch)["value_target"], wanted)
    assert torch.equal(batch["next", "reward"], reward)


@EACH
def test_factors_of_each_row_follow_it(batch_of: BatchOf, kind: str) -> None:
    """A discount ``[*B, T]`` is that of its row: with time in any dim, over n steps, for all features of a reward."""
    batch = acted(batch_of([(4, "terminated"), (4, "cut"), (3, "truncated"), (5, "cut")])).reshape(4, 4)
    batch = batch.exclude("collector")
    batch["next", "reward"] = batch["next", "reward"].unsqueeze(-1) * torch.tensor([[1.0], [3.0]])
    critic = TensorDictModule(
        lambda x: x.square().sum(-1, keepdim=True).sqrt().unsqueeze(-2).repeat_interleave(2, -2),
        ["observation"],
        ["state_value"],
    )
    gamma = torch.rand(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    estimator, turned = KINDS[kind](critic, gamma), KINDS[kind](critic, gamma.T, time_dim=0)
    for steps in (None, torch.randint(1, 4, (4, 4), generator=torch.Generator().manual_seed(0))):
        if steps is not None:
            batch["steps_to_next_obs"] = steps
        power = gamma if steps is None else gamma**steps
        wanted = []
        for row in range(4):  # each series alone, each feature alone
            for feature in range(2):
                part = batch[row].clone().exclude("steps_to_next_obs")
                part["next", "reward"] = part["next", "reward"][:, feature]
                wanted.append(KINDS[kind](norm_critic(), power[row])(part)["advantage"])
        out = estimator(batch.clone())["advantage"]
        torch.testing.assert_close(out, torch.stack(wanted).view(4, 2, 4, 1).transpose(1, 2))
        again = turned(batch.transpose(0, 1).clone())["advantage"]
        torch.testing.assert_close(again.transpose(0, 1), out)


@EACH
def test_n_step_rows(batch_of: BatchOf, kind: str) -> None:
    """``gamma`` to the power of the steps that a row spans; one call over the rows cannot serve them."""
    batch = acted(batch_of([(4, "truncated"), (3, "terminated")]))
    steps = torch.tensor([[2], [2], [2], [1], [2], [2], [1]])
    batch["steps_to_next_obs"] = steps
    value = norm_critic()(batch.select("observation"))["state_value"]
    next_value = norm_critic()(batch["next"].select("observation"))["state_value"]
    columns = next_value, batch["next", "reward"], batch["next", "done"], batch["next", "terminated"]
    out = KINDS[kind](norm_critic())(batch.clone())
    gammas = G ** steps.double()
    if kind == "td0":
        wanted = td0_return_estimate(gammas, next_value, batch["next", "reward"], batch["next", "terminated"])
        torch.testing.assert_close(out["value_target"], wanted)
    elif kind == "gae":
        torch.testing.assert_close(
            (out["advantage"], out["value_target"]),
            generalized_advantage_estimate(gammas, L, value, *columns),
        )
    text = "n-step rows are followed by an observation several rows later"
    for estimator, rows in (
        (KINDS[kind](norm_critic(), shifted=True), batch),
        (KINDS[kind](norm_critic()), batch.exclude(("next", "observation"))),
    ):
        with pytest.raises(ValueError, match=text):
            estimator(rows)


# --- standardising ---


@pytest.mark.parametrize("kind", ["gae", "vtrace"])
def test_average_is_over_the_rows_that_count(batch_of: BatchOf, kind: str) -> None:
    batch = acted(batch_of([(5, "truncated"), (4, "terminated"), (3, "cut")]))
    plain = KINDS[kind](norm_critic())(batch.clone())["advantage"]
    name = {"gae": "average_gae", "vtrace": "average_adv"}[kind]
    whole = KINDS[kind](norm_critic(), **{name: True})(batch.clone())["advantage"]
    torch.testing.assert_close(whole, (plain - plain.mean()) / plain.std())
    batch["collector", "mask"] = torch.arange(12) < 9
    real = plain[:9]
    masked = KINDS[kind](norm_critic(), **{name: True})(batch.clone())["advantage"]
    torch.testing.assert_close(masked[:9], (real - real.mean()) / real.std())
    del batch["collector", "mask"]
    fixed = KINDS[kind](norm_critic(), shifted=True, shifted_budget=1, **{name: True})(batch)
    kept = fixed["advantage"][fixed["shifted_valid"]]
    assert 0 < len(kept) < 12
    torch.testing.assert_close((kept.mean(), kept.std()), (kept.new_tensor(0.0), kept.new_tensor(1.0)))


def test_average_within_groups(batch_of: BatchOf) -> None:
    batch = batch_of([(5, "truncated"), (4, "terminated"), (3, "cut")])
    batch["task"] = torch.tensor([3] * 5 + [8] * 4 + [3] * 3)
    plain = GAE(gamma=G, lmbda=L, value_network=norm_critic())(batch.clone())["advantage"]
    out = GAE(gamma=G, lmbda=L, value_network=norm_critic(), average_gae=True, group_key="task")(batch)
    for task in (3, 8):
        of = plain[batch["task"] == task]
        torch.testing.assert_close(out["advantage"][batch["task"] == task], (of - of.mean()) / of.std())
    with pytest.raises(KeyError, match="no entry 'job'"):
        GAE(gamma=G, lmbda=L, value_network=norm_critic(), average_gae=True, group_key="job")(batch)


# --- numbers that are not finite ---


def test_a_network_that_gives_nan_is_named_with_the_row(batch_of: BatchOf) -> None:
    batch = batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")])
    batch["observation"][4] = 0.0
    divides = TensorDictModule(lambda x: 0.0 / x[..., :1], ["observation"], ["state_value"])
    assert not GAE(gamma=G, lmbda=L, value_network=divides)(batch.clone())["advantage"].isfinite().all()
    gae = GAE(gamma=G, lmbda=L, value_network=divides, check_finite=True)
    text = (
        "the value of the observation of row 4 is nan, and the inputs of value_network are finite there: "
        "value_network has diverged"
    )
    with pytest.raises(ValueError, match=re.escape(text)):
        gae(batch)
    with pytest.raises(ValueError, match=re.escape("of row (0, 4) is nan")):
        gae(batch.unsqueeze(0))


def test_data_that_are_not_finite_are_named_with_the_row(batch_of: BatchOf) -> None:
    gae = GAE(gamma=G, lmbda=L, value_network=norm_critic(), check_finite=True)
    batch = batch_of([(3, "truncated"), (2, "terminated"), (2, "cut")])
    assert gae(batch.clone())["advantage"].isfinite().all()
    broken = batch.clone()
    broken["observation"][3, 1] = torch.nan
    text = "the value of the observation of row 3 is nan, and 'observation' is not finite there: fix the data"
    with pytest.raises(ValueError, match=re.escape(text)):
        gae(broken)
    broken = batch.clone()
    broken["next", "observation"][2, 0] = torch.inf
    with pytest.raises(
        ValueError, match=re.escape("value of the next observation of row 2 is inf, and ('next',")
    ):
        gae(broken)
    broken = batch.clone()
    broken["next", "reward"][5] = torch.nan
    with pytest.raises(ValueError, match="the reward of row 5 is nan"):
        gae(broken)
    for shape, dim, row in (((1, 7), None, "(0, 5)"), ((7, 1), 0, "(5, 0)")):
        with pytest.raises(ValueError, match=re.escape(f"the reward of row {row} is nan")):
            gae(broken.reshape(*shape), time_dim=dim)


# --- V-trace ---


def test_vtrace_weighs_the_action_of_the_batch(batch_of: BatchOf) -> None:
    """The same policy: weights of 1, whatever it would choose now."""
    batch = acted(batch_of([(5, "truncated"), (4, "terminated")]))
    batch["action_log_prob"] = actor().get_dist(batch.select("observation")).log_prob(batch["action"])
    out = VTrace(gamma=G, actor_network=actor(), value_network=norm_critic())(batch.clone())
    torch.testing.assert_close(out["value_target"], alone("td1", batch)[1])


def test_vtrace_of_several_action_dims_and_renamed_entries(batch_of: BatchOf) -> None:
    batch = acted(batch_of([(5, "truncated"), (4, "terminated")]))
    wanted = VTrace(gamma=G, actor_network=actor(), value_network=norm_critic())(batch.clone())
    logits = TensorDictModule(
        lambda x: torch.cat([x, 0 * x[..., :1]], -1).unsqueeze(1).expand(-1, 2, -1),
        ["observation"],
        ["logits"],
    )
    choose = ProbabilisticTensorDictModule(["logits"], ["act"], distribution_class=Categorical)
    pair = ProbabilisticTensorDictSequential(logits, choose)
    batch["act"] = batch["action"].unsqueeze(-1).expand(-1, 2)
    batch["mu"] = 2 * batch["action_log_prob"].unsqueeze(-1)
    vtrace = VTrace(gamma=G, actor_network=pair, value_network=norm_critic(), c_thresh=9.0, rho_thresh=9.0)
    vtrace.set_keys(action="act", sample_log_prob="mu")
    assert {"act", "mu"} <= set(vtrace.in_keys) and "action" not in vtrace.in_keys
    out = vtrace(batch.exclude("action", "action_log_prob"))
    value = norm_critic()(batch.select("observation"))["state_value"]
    next_value = norm_critic()(batch["next"].select("observation"))["state_value"]
    log_pi = 2 * actor().get_dist(batch.select("observation")).log_prob(batch["action"]).unsqueeze(-1)
    after = batch["next"]
    expected = vtrace_advantage_estimate(
        G,
        log_pi,
        batch["mu"],
        value,
        next_value,
        after["reward"],
        after["done"],
        after["terminated"],
        9.0,
        9.0,
    )
    torch.testing.assert_close((out["advantage"], out["value_target"]), expected)
    assert not torch.allclose(out["advantage"], wanted["advantage"])


@pytest.mark.parametrize("chunk", [{}, {"value_chunk_size": 4}, {"num_chunks": 3}], ids=str)
def test_vtrace_with_a_memory_in_actor_and_critic(batch_of: BatchOf, chunk: dict[str, int]) -> None:
    """One trunk; each run is what it is alone, with no ``is_init`` but where the runs are cut by their ids."""
    torch.manual_seed(0)
    gru = GRUModule(3, 4, in_key="observation", out_key="h")
    logits = TensorDictModule(nn.Linear(4, 4), ["h"], ["logits"])
    choose = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    policy = ProbabilisticTensorDictSequential(gru, logits, choose).double()
    critic = TensorDictSequential(gru, TensorDictModule(nn.Linear(4, 1), ["h"], ["state_value"])).double()
    batch = acted(batch_of([(5, "truncated"), (1, "cut"), (4, "terminated"), (3, "cut")]))
    batch["recurrent_state"] = torch.randn(13, 1, 4, dtype=torch.float64)
    batch["is_init"].zero_()
    vtrace = VTrace(gamma=G, actor_network=policy, value_network=critic, **chunk)
    ids = batch["collector", "traj_ids"]
    wanted = torch.cat([vtrace(batch[ids == number])["advantage"] for number in ids.unique()])
    torch.testing.assert_close(vtrace(batch)["advantage"], wanted)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: KINDS["vtrace"](norm_critic(), rho_thresh=-1.0),
            ValueError,
            "rho_thresh must be at least 0",
        ),
        (lambda: KINDS["vtrace"](norm_critic(), c_thresh=torch.tensor(-1.0)), ValueError, "c_thresh must be"),
        (
            lambda: VTrace(gamma=G, actor_network=norm_critic(), value_network=norm_critic()),
            TypeError,
            "actor_network must be a tensordict module with get_dist",
        ),
        (
            lambda: VTrace(gamma=2.0, actor_network=actor(), value_network=None),
            ValueError,
            "gamma must lie in",
        ),
        (
            lambda: TD0Estimator(gamma=-0.1, value_network=None),
            ValueError,
            "gamma must lie in [0, 1], got -0.1",
        ),
        (
            lambda: TDLambdaEstimator(gamma=0.9, lmbda=1.5, value_network=None),
            ValueError,
            "lmbda must lie in [0, 1], got 1.5",
        ),
        (
            lambda: KINDS["gae"](norm_critic(), shifted="yes"),
            ValueError,
            "shifted must be True or False, got 'yes'",
        ),
        (
            lambda: KINDS["gae"](norm_critic(), shifted=True, single_call=False),
            ValueError,
            "single_call is another name for shifted, got False and True",
        ),
        (
            lambda: KINDS["gae"](norm_critic(), shifted=True, shifted_budget=0),
            ValueError,
            "shifted_budget must be an integer of at least 1, got 0",
        ),
        (
            lambda: KINDS["gae"](norm_critic(), shifted_budget=2),
            ValueError,
            "shifted_budget=2 sets the length of the",
        ),
        (lambda: KINDS["gae"](norm_critic(), budget=2), TypeError, "unexpected keyword argument 'budget'"),
        (lambda: KINDS["gae"](norm_critic(), gamma="0.9"), TypeError, "gamma must be a number"),
        (
            lambda: KINDS["gae"](norm_critic(), gamma=torch.ones(0)),
            ValueError,
            "gamma must be a number or one",
        ),
        (
            lambda: KINDS["gae"](norm_critic(), num_chunks=1.5),
            ValueError,
            "num_chunks must be an integer of at least 1, got 1.5",
        ),
        (
            lambda: KINDS["gae"](norm_critic(), group_key="task"),
            ValueError,
            "group_key='task' names the groups",
        ),
    ],
    ids=[
        "rho",
        "c",
        "actor",
        "gamma",
        "gamma of td0",
        "lmbda",
        "shifted",
        "single_call",
        "0",
        "budget",
        "unknown",
        "text",
        "none",
        "half a chunk",
        "group of nothing",
    ],
)
def test_bad_arguments(call: Callable[[], Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        call()


@EACH
@pytest.mark.parametrize(
    ("key", "text"),
    [
        (("next", "reward"), "no entry ('next', 'reward'): the collector writes it"),
        (("next", "terminated"), "no entry ('next', 'terminated'): the collector writes it"),
        ("observation", "no entry 'observation': the collector writes it"),
    ],
    ids=["reward", "terminated", "observation"],
)
def test_missing_entries_are_named_with_their_writer(
    batch_of: BatchOf, kind: str, key: Any, text: str
) -> None:
    batch = acted(batch_of([(3, "truncated")])).exclude(key)
    with pytest.raises(KeyError, match=re.escape(text)):
        KINDS[kind](norm_critic())(batch)


def test_values_and_finals_that_do_not_fit(batch_of: BatchOf) -> None:
    batch = batch_of([(3, "truncated")])
    alone = GAE(gamma=G, lmbda=L, value_network=None)
    batch["state_value"] = batch["next", "state_value"] = torch.zeros(3)
    with pytest.raises(
        ValueError, match=re.escape("the batch must hold values of the reward's shape (3, 1), got")
    ):
        alone(batch)
    thin, final = compact(batch)
    gae = GAE(gamma=G, lmbda=L, value_network=norm_critic())
    with pytest.raises(TypeError, match=r"final must be a tensordict, the collector\.final of this"):
        gae(thin, final=final["next", "observation"])
    with pytest.raises(KeyError, match="final has no entry 'row', the rows of the batch that its"):
        gae(thin, final=final.exclude("row"))
    with pytest.warns(UserWarning, match=re.escape("no entry ('next', 'observation') and final= holds none")):
        gae(thin, final=final.exclude(("next", "observation")))


def test_missing_log_probability_and_chunk_dim(batch_of: BatchOf) -> None:
    batch = acted(batch_of([(3, "truncated")]))
    with pytest.raises(KeyError, match=re.escape("the policy writes it when it acts (return_log_prob=True)")):
        KINDS["vtrace"](norm_critic())(batch.exclude("action_log_prob"))
    with pytest.raises(ValueError, match="value_chunk_dim must name one of 1 batch dims, got 1"):
        GAE(gamma=G, lmbda=L, value_network=norm_critic(), num_chunks=2, value_chunk_dim=1)(batch)
    with pytest.raises(ValueError, match=re.escape("at least one batch dimension (time), got batch size []")):
        GAE(gamma=G, lmbda=L, value_network=norm_critic())(batch[0])


def test_chunks_along_another_dim(batch_of: BatchOf) -> None:
    flat = batch_of([(4, "terminated"), (4, "cut"), (3, "truncated"), (1, "cut")])
    batch = flat.reshape(3, 4)
    wanted = GAE(gamma=G, lmbda=L, value_network=norm_critic())(batch.clone())["advantage"]
    seen: list[torch.Size] = []

    def value(x: Tensor) -> Tensor:
        seen.append(x.shape[:-1])
        return x.square().sum(-1, keepdim=True).sqrt()

    critic = TensorDictModule(value, ["observation"], ["state_value"])
    options: dict[str, Any] = {"value_chunk_size": 3, "value_chunk_dim": 1}
    out = GAE(gamma=G, lmbda=L, value_network=critic, **options)(batch.clone())
    assert set(seen) == {torch.Size([3, 3]), torch.Size([3, 1])}
    torch.testing.assert_close(out["advantage"], wanted)
    seen.clear()
    out = GAE(gamma=G, lmbda=L, value_network=critic, shifted=True, **options)(batch)
    assert max(shape[0] for shape in seen) == 9  # 3 rows of each of the 3 series
    torch.testing.assert_close(out["advantage"], wanted)
    seen.clear()
    turned, options = (
        batch.transpose(0, 1).clone(),
        {"value_chunk_size": 1, "value_chunk_dim": 0, "time_dim": 0},
    )
    out = GAE(gamma=G, lmbda=L, value_network=critic, **options)(turned)
    assert set(seen) == {torch.Size([3, 1])}  # one step of each of the 3 series, whatever dim is time
    torch.testing.assert_close(out["advantage"].transpose(0, 1), wanted)


def test_gamma_and_lmbda_of_several_numbers_move_with_the_module(batch_of: BatchOf) -> None:
    batch = batch_of([(3, "truncated"), (2, "terminated")])
    batch["next", "reward"] = batch["next", "reward"].repeat(1, 2)
    critic = TensorDictModule(
        lambda x: x.square().sum(-1, keepdim=True).sqrt().repeat(1, 2), ["observation"], ["state_value"]
    )
    gamma, lmbda = torch.tensor([0.5, 0.9]), torch.tensor([0.0, 0.8])
    gae = GAE(gamma=gamma, lmbda=lmbda, value_network=critic)
    out = gae(batch.clone())["advantage"]
    for i in range(2):
        of = GAE(gamma=gamma[i], lmbda=lmbda[i], value_network=critic)
        assert of.gamma == pytest.approx(float(gamma[i])) and isinstance(of.gamma, float)
        torch.testing.assert_close(out[:, i], of(batch.clone())["advantage"][:, i], rtol=1e-6, atol=1e-6)
    assert set(gae.state_dict()) == {"gamma", "lmbda"}
    assert gae.to("meta").gamma.device.type == "meta"
    with pytest.raises(ValueError, match=re.escape("gamma must lie in [0, 1], got 1.5")):
        GAE(gamma=torch.tensor([0.5, 1.5]), lmbda=0.9, value_network=critic)
