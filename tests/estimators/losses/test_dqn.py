"""Q-learning: targets by hand, recurrent networks against stepping, what samples of buffers bring along."""

import re
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from flatroll.buffers import (
    LazyTensorStorage,
    MultiStepTransform,
    NextStateReconstructor,
    ReplayBuffer,
    SliceSampler,
    TensorDictPrioritizedReplayBuffer,
)
from flatroll.estimators import (
    GAE,
    DQNLoss,
    TD0Estimator,
    TD1Estimator,
    TDLambdaEstimator,
    ValueEstimators,
)
from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode

BatchOf = Callable[..., TensorDict]
RUNS = [(5, "terminated"), (1, "truncated"), (4, "cut"), (1, "both"), (3, "truncated"), (2, "cut")]


def table(*, scale: float = 1.0) -> TensorDictModule:
    """The observation is the values of the actions, times a learned factor."""
    net = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    net.weight.data = scale * torch.eye(3, dtype=torch.float64)
    return TensorDictModule(net, ["observation"], ["action_value"])


def played(batch: TensorDict, actions: int = 3) -> TensorDict:
    batch["action"] = torch.randint(actions, (len(batch),), generator=torch.Generator().manual_seed(1))
    return batch


def recurrent(kind: Any = GRUModule) -> TensorDictSequential:
    torch.manual_seed(0)
    memory = kind(3, 4, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(4, 3), ["features"], ["action_value"])
    return TensorDictSequential(memory, head).double()


def stepped(network: TensorDictSequential, batch: TensorDict, ends: Tensor) -> tuple[Tensor, Tensor]:
    """Values of the rows and of what follows them, one step at a time, from the state of each run's first row."""
    states = [key for key in network.in_keys if str(key).startswith("recurrent_state")]
    values, next_values = [], []
    carried: dict[Any, Tensor] = {}
    with set_recurrent_mode(False):
        for i in range(len(batch)):
            first = i == 0 or bool(ends[i - 1])
            row = batch[i : i + 1].select("observation", *states).clone()
            row.update(carried if not first else {})
            row["is_init"] = torch.zeros(1, 1, dtype=torch.bool)  # states are those that were stored
            network(row)
            carried = {key: row["next", key] for key in states}
            following = TensorDict({"observation": batch["next", "observation"][i : i + 1], **carried}, [1])
            following["is_init"] = torch.zeros(1, 1, dtype=torch.bool)
            values.append(row["action_value"])
            next_values.append(network(following)["action_value"])
    return torch.cat(values), torch.cat(next_values)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["l1", "l2", "smooth_l1"])
def test_against_the_formula(batch_of: BatchOf, double: bool, kind: Any) -> None:
    batch = played(batch_of(RUNS))
    loss = DQNLoss(table(), double_dqn=double, loss_function=kind, reduction="none")
    assert loss.target_value_network is not None
    turn = torch.tensor([[0.5, 1.0, 0.0], [0.0, -1.0, 2.0], [1.0, 0.0, 0.3]], dtype=torch.float64)
    loss.target_value_network.module.weight.data = turn
    out = loss(batch)["loss"]
    for i in range(len(batch)):
        after = batch["next", "observation"][i]
        best = turn @ after
        worth = best[after.argmax()] if double else best.max()
        target = batch["next", "reward"][i, 0] + 0.99 * worth * ~batch["next", "terminated"][i, 0]
        error = (batch["observation"][i, batch["action"][i]] - target).abs().item()
        expected = {"l1": error, "l2": error**2, "smooth_l1": error**2 / 2 if error < 1 else error - 0.5}
        assert out[i].item() == pytest.approx(expected[kind])
        assert batch["td_error"][i].item() == pytest.approx(error)


def test_without_a_copy_the_target_holds_still(batch_of: BatchOf) -> None:
    """No gradient flows through the next value."""
    batch = played(batch_of([(4, "cut")]))
    loss = DQNLoss(table(), delay_value=False, reduction="sum")
    loss(batch)["loss"].backward()
    value = batch["observation"].gather(1, batch["action"].unsqueeze(1))
    target = batch["next", "reward"] + 0.99 * batch["next", "observation"].amax(1, keepdim=True)
    expected = torch.zeros(3, 3, dtype=torch.float64)
    for error, action, seen in zip(value - target, batch["action"], batch["observation"], strict=True):
        expected[action] += 2 * error * seen
    torch.testing.assert_close(loss.value_network.module.weight.grad, expected)


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("delay", [False, True])
def test_a_recurrent_network_gives_what_stepping_gives(
    batch_of: BatchOf, kind: Any, double: bool, delay: bool
) -> None:
    if double and not delay:
        return
    batch = played(batch_of(RUNS))
    ends = torch.zeros(len(batch), dtype=torch.bool)
    ends[torch.tensor([rows for rows, _ in RUNS]).cumsum(0) - 1] = True
    network = recurrent(kind)
    batch.update(network[0].make_tensordict_primer().expand([len(batch)]))
    for key in [key for key in batch.keys() if key.startswith("recurrent_state")]:  # noqa: SIM118
        batch[key] = torch.randn_like(batch[key])  # slices begin anywhere
    loss = DQNLoss(network, double_dqn=double, delay_value=delay)
    target = loss.target_value_network
    if target is not None:
        with torch.no_grad():
            for parameter in target.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
    with set_recurrent_mode(False):  # the loss sets the mode by itself
        out = loss(batch)
    value, online = stepped(network, batch, ends)
    with torch.no_grad():
        following = stepped(target or network, batch, ends)[1]
        worth = (
            following.gather(1, online.argmax(1, keepdim=True)) if double else following.amax(1, keepdim=True)
        )
        goal = batch["next", "reward"] + 0.99 * worth * ~batch["next", "terminated"]
    expected = (value.gather(1, batch["action"].unsqueeze(1)) - goal).square().mean()
    torch.testing.assert_close(out["loss"], expected)
    parameters = list(network.parameters())
    torch.testing.assert_close(
        torch.autograd.grad(out["loss"], parameters), torch.autograd.grad(expected, parameters)
    )


def test_burn_in_rows_warm_the_memory_up_and_count_nowhere(batch_of: BatchOf) -> None:
    batch = played(batch_of(RUNS))
    network = recurrent()
    batch.update(network[0].make_tensordict_primer().expand([len(batch)]))
    rows = DQNLoss(network, reduction="none")(batch.clone())["loss"]
    loss = DQNLoss(network, burn_in=2)
    step = torch.cat([torch.arange(rows) for rows, _ in RUNS])
    torch.testing.assert_close(loss(batch)["loss"], rows[step >= 2].mean())
    seen = batch["observation"].requires_grad_()
    for kind in ("td0", "td_lambda"):
        (gradient,) = torch.autograd.grad(loss.make_value_estimator(kind)(batch)["loss"], seen)
        assert gradient[step >= 2].any(-1).all() and not gradient[step < 2].any()
    (gradient,) = torch.autograd.grad(DQNLoss(network)(batch)["loss"], seen)
    assert gradient[step < 2].any(-1).all()
    with pytest.warns(UserWarning, match="no row counts"):
        all_of_it = DQNLoss(network, burn_in=10)(batch)["loss"]
    assert all_of_it.item() == 0.0
    all_of_it.backward()  # nothing to learn is no error


@pytest.mark.parametrize("kind", ["td0", "td_lambda"])
def test_rows_side_by_side_give_what_rows_end_to_end_give(batch_of: BatchOf, kind: str) -> None:
    batch = played(batch_of([(5, "terminated"), (3, "cut"), (2, "truncated"), (6, "cut")]))
    network = recurrent()
    batch.update(network[0].make_tensordict_primer().expand([len(batch)]))
    loss = DQNLoss(network, reduction="none", burn_in=1).make_value_estimator(kind)
    flat = loss(batch)["loss"]
    torch.testing.assert_close(loss(batch.reshape(2, 8))["loss"].flatten(), flat)


def test_samples_of_a_compact_buffer(batch_of: BatchOf) -> None:
    """Slices, with the next observations that the storage gives back, and without any: no row guesses."""
    batch = played(batch_of([(9, "terminated"), (7, "truncated"), (8, "cut")]))
    network = recurrent()
    batch.update(network[0].make_tensordict_primer().expand([len(batch)]))
    loss = DQNLoss(network, reduction="none")
    losses = {}
    for name, options, stored, transform in [
        ("full", {}, batch, None),
        ("compact", {"compact_obs": True}, batch, None),
        ("reconstructed", {}, batch.exclude(("next", "observation")), NextStateReconstructor()),
        ("bare", {}, batch.exclude(("next", "observation")), None),
    ]:
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(30, **options),
            sampler=SliceSampler(slice_len=4),
            generator=torch.Generator().manual_seed(0),
            transform=transform,
            batch_size=16,
        )
        buffer.extend(stored)
        sample = buffer.sample()
        losses[name] = loss(sample)["loss"]
        assert sample["td_error"].shape == sample.batch_size
    torch.testing.assert_close(losses["compact"], losses["full"])
    ended = sample["next", "done"].squeeze(-1) & ~sample["next", "terminated"].squeeze(-1)
    for name in ("reconstructed", "bare"):
        torch.testing.assert_close(losses[name], losses["full"].masked_fill(ended, 0.0))


def test_n_step_rows_of_a_buffer(batch_of: BatchOf) -> None:
    """The peer bootstraps through terminal states there."""
    batch = played(batch_of([(4, "terminated"), (5, "truncated")]))
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(9), transform=MultiStepTransform(n_steps=3, gamma=0.9), batch_size=64
    )
    buffer.extend(batch)
    sample, info = buffer.sample(return_info=True)
    loss = DQNLoss(table(), reduction="none").make_value_estimator(gamma=0.5)  # the rows bring their own
    out = loss(sample)["loss"]
    ends = {0: 3, 1: 3, 2: 3, 3: 3, 4: 8, 5: 8, 6: 8, 7: 8, 8: 8}
    for value, i in zip(out, info["index"].tolist(), strict=True):
        last = min(i + 2, ends[i])
        reward = sum(0.9**k * batch["next", "reward"][i + k, 0] for k in range(last - i + 1))
        worth = batch["next", "observation"][last].max() * ~batch["next", "terminated"][last, 0]
        target = reward + 0.9 ** (last - i + 1) * worth
        chosen = batch["observation"][i, batch["action"][i]]
        assert value.item() == pytest.approx((chosen - target).item() ** 2)
    with pytest.raises(ValueError, match="rewards span several rows"):
        loss.make_value_estimator("td1")(sample)
    steps_only = sample.exclude("gamma")
    torch.testing.assert_close(loss.make_value_estimator(gamma=0.9)(steps_only)["loss"], out)
    network = recurrent()
    sample.update(network[0].make_tensordict_primer().expand([len(sample)]))
    with pytest.raises(ValueError, match="next observations are several rows ahead"):
        DQNLoss(network)(sample)


@pytest.mark.parametrize(("kind", "lmbda"), [("td0", 0.0), ("td1", 1.0), ("td_lambda", 0.6)])
def test_lambda_returns_stay_in_their_run(batch_of: BatchOf, kind: str, lmbda: float) -> None:
    batch = played(batch_of(RUNS))
    arguments = {"lmbda": lmbda} if kind == "td_lambda" else {}
    loss = DQNLoss(table(), reduction="none", loss_function="l1").make_value_estimator(
        kind, gamma=0.9, **arguments
    )
    out = loss(batch)["loss"]
    expected, first = [], 0
    for rows, _ in RUNS:
        after = torch.zeros((), dtype=torch.float64)
        targets = []
        for i in reversed(range(first, first + rows)):
            worth = batch["next", "observation"][i].max() * ~batch["next", "terminated"][i, 0]
            mixed = worth if i == first + rows - 1 else (1 - lmbda) * worth + lmbda * after
            after = batch["next", "reward"][i, 0] + 0.9 * mixed
            targets.append((batch["observation"][i, batch["action"][i]] - after).abs())
        expected += targets[::-1]
        first += rows
    torch.testing.assert_close(out, torch.stack(expected))


@pytest.mark.parametrize("network", [table(), recurrent()], ids=["rows", "memory"])
def test_returns_stop_before_a_row_whose_next_observation_is_not_known(
    batch_of: BatchOf, network: Any
) -> None:
    """The row before it bootstraps from its observation, which is known; the rows behind it are a run of their own."""
    batch = played(batch_of([(6, "cut")]))
    if isinstance(network, TensorDictSequential):
        batch.update(network[0].make_tensordict_primer().expand([6]))
    loss = DQNLoss(network, reduction="none").make_value_estimator("td_lambda", gamma=0.9, lmbda=0.7)
    before = loss(batch[:3].clone())["loss"]
    batch["next", "observation"][3, 0] = torch.nan
    out = loss(batch)["loss"]
    torch.testing.assert_close(out[:3], before)
    assert out[3] == 0 and out[4:].all()
    if not isinstance(network, TensorDictSequential):  # a memory goes on
        torch.testing.assert_close(out[4:], loss(batch[4:].clone())["loss"])


def test_integer_observations_are_all_known(batch_of: BatchOf) -> None:
    batch = played(batch_of(RUNS))
    for td in (batch, batch["next"]):
        td["observation"] = (10 * td["observation"]).int()
    net = TensorDictModule(lambda x: x.double(), ["observation"], ["action_value"])
    expected = DQNLoss(net)(batch.clone())["loss"]
    for td in (batch, batch["next"]):
        td["observation"] = td["observation"].double()
    torch.testing.assert_close(DQNLoss(net)(batch)["loss"], expected)


def test_values_without_a_dim_of_actions(batch_of: BatchOf) -> None:
    net = TensorDictModule(lambda x: x[..., 0], ["observation"], ["action_value"])
    with pytest.raises(ValueError, match=re.escape("of shape [16] and one dim of actions, got (16,)")):
        DQNLoss(net)(played(batch_of(RUNS)))


def test_rows_whose_next_observation_is_not_known_count_nowhere(batch_of: BatchOf) -> None:
    batch = played(batch_of(RUNS))
    loss = DQNLoss(table(), reduction="none")
    expected = loss(batch.clone())["loss"]
    hidden = batch.clone()
    hidden["collector", "next_known"] = torch.ones(len(batch), dtype=torch.bool)
    hidden["collector", "next_known"][[4, 5]] = False  # one of them is terminated
    out = loss(hidden)["loss"]
    keep = torch.arange(len(batch)) != 5
    torch.testing.assert_close(out, torch.where(keep, expected, 0.0))
    assert hidden["td_error"][5] == 0.0
    batch["next", "observation"][[4, 5], 1] = torch.nan
    torch.testing.assert_close(loss(batch)["loss"], out)
    DQNLoss(table())(batch)["loss"].backward()


def test_priority_weights(batch_of: BatchOf) -> None:
    batch = played(batch_of(RUNS))
    rows = DQNLoss(table(), reduction="none")(batch)["loss"]
    weights = batch["priority_weight"] = torch.rand(len(batch), dtype=torch.float64)
    batch["collector", "mask"] = torch.arange(len(batch)) > 3
    mean = (rows * weights)[4:].sum() / weights[4:].sum()
    torch.testing.assert_close(DQNLoss(table())(batch)["loss"], mean)
    torch.testing.assert_close(DQNLoss(table(), reduction="sum")(batch)["loss"], (rows * weights)[4:].sum())
    plain = DQNLoss(table(), use_prioritized_weights=False)(batch)["loss"]
    torch.testing.assert_close(plain, rows[4:].mean())
    with pytest.raises(KeyError, match="no entry 'priority_weight'"):
        DQNLoss(table(), use_prioritized_weights=True)(batch.exclude("priority_weight"))


def test_prioritized_buffers_take_the_errors(batch_of: BatchOf) -> None:
    batch = played(batch_of(RUNS))
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=1.0,
        beta=1.0,
        storage=LazyTensorStorage(16, compact_obs=True),
        batch_size=200,
        generator=torch.Generator().manual_seed(0),
    )
    buffer.extend(batch)
    loss = DQNLoss(table(), reduction="none")
    rows = loss(batch)["loss"]  # squares
    for _ in range(2):  # each row is drawn, so that each gets its priority
        sample = buffer.sample()
        out = loss(sample)["loss"]
        buffer.update_tensordict_priority(sample)
    torch.testing.assert_close(out, rows[sample["index"]] * sample["priority_weight"])
    weights = 1 / batch["td_error"][sample["index"]]
    torch.testing.assert_close(
        sample["priority_weight"].double(), weights / weights.max(), rtol=1e-5, atol=1e-5
    )


def test_padded_slices_count_their_real_rows_only(batch_of: BatchOf) -> None:
    batch = played(batch_of([(2, "terminated"), (7, "truncated")]))
    network = recurrent()
    batch.update(network[0].make_tensordict_primer().expand([len(batch)]))
    losses = []
    for pad in (False, True):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(9),
            sampler=SliceSampler(slice_len=4, pad_output=pad, fill=False),
            batch_size=32,
            generator=torch.Generator().manual_seed(0),
        )
        buffer.extend(batch)
        sample = buffer.sample()
        losses.append(DQNLoss(network)(sample)["loss"])
    assert not sample["collector", "mask"].all()
    torch.testing.assert_close(losses[0], losses[1])


def test_actions_by_index_and_one_hot(batch_of: BatchOf) -> None:
    batch = played(batch_of(RUNS))
    expected = DQNLoss(table())(batch)["loss"]
    one_hot = nn.functional.one_hot(batch["action"], 3)
    for action in (
        batch["action"].unsqueeze(-1),
        batch["action"].int(),
        one_hot,
        one_hot.bool(),
        one_hot.double(),
    ):
        batch["action"] = action
        torch.testing.assert_close(DQNLoss(table())(batch)["loss"], expected)
    batch["action"] = torch.zeros(len(batch), 2, dtype=torch.int64)
    with pytest.raises(ValueError, match=re.escape("integer of shape (16,), or one-hot (16, 3)")):
        DQNLoss(table())(batch)
    batch["action"] = torch.zeros(len(batch))
    with pytest.raises(TypeError, match=r"must be integers, got torch.float32"):
        DQNLoss(table())(batch)
    with pytest.raises(ValueError, match=re.escape("a one-hot action must have shape (16, 3), got (16,)")):
        DQNLoss(table(), action_space="one-hot")(batch)


@pytest.mark.parametrize(
    "space", ["one_hot", "one-hot", type("OneHot", (), {})()], ids=["underscore", "hyphen", "spec"]
)
def test_an_action_space_by_name_or_spec(batch_of: BatchOf, space: Any) -> None:
    batch = played(batch_of(RUNS))
    wanted = DQNLoss(table(), action_space=gym.spaces.Discrete(3))(batch)["loss"]
    batch["action"] = nn.functional.one_hot(batch["action"], 3)
    torch.testing.assert_close(DQNLoss(table(), action_space=space)(batch)["loss"], wanted)


def test_a_plain_module_and_other_names(batch_of: BatchOf) -> None:
    batch = played(batch_of(RUNS))
    expected = DQNLoss(table())(batch)["loss"]
    torch.testing.assert_close(DQNLoss(table().module)(batch)["loss"], expected)
    network = TensorDictModule(table().module, ["seen"], ["q"])
    for old, new in [
        ("observation", "seen"),
        (("next", "observation"), ("next", "seen")),
        ("action", "move"),
        (("next", "reward"), ("next", "score")),
        (("next", "terminated"), ("next", "dead")),
    ]:
        batch.rename_key_(old, new)
    loss = DQNLoss(network)
    loss.set_keys(action_value="q", action="move", reward="score", terminated="dead", priority="surprise")
    torch.testing.assert_close(loss(batch)["loss"], expected)
    assert ("next", "score") in loss.in_keys and batch["surprise"].shape == (16,)


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("action", "no entry 'action': the policy writes it"),
        (("next", "reward"), "the collector writes it"),
        (("next", "terminated"), "the collector writes it"),
        ("observation", "no entry 'observation': the collector writes it"),
    ],
)
def test_missing_entries(batch_of: BatchOf, missing: Any, text: str) -> None:
    with pytest.raises(KeyError, match=text):
        DQNLoss(table())(played(batch_of(RUNS)).exclude(missing))


def test_a_network_that_writes_another_key(batch_of: BatchOf) -> None:
    network = TensorDictModule(table().module, ["observation"], ["q"])
    with pytest.raises(KeyError, match=re.escape("wrote no entry 'action_value': its out_keys are ['q']")):
        DQNLoss(network)(played(batch_of(RUNS)))


def test_an_integer_reward(batch_of: BatchOf) -> None:
    batch = played(batch_of(RUNS))
    batch["next", "reward"] = batch["next", "reward"].long()
    with pytest.raises(TypeError, match=r"must be floating, got torch.int64: cast it with"):
        DQNLoss(table())(batch)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"double_dqn": True, "delay_value": False}, ValueError, "double_dqn=True needs delay_value=True"),
        (
            {"loss_function": "huber"},
            ValueError,
            "loss_function must be 'l1', 'l2' or 'smooth_l1', got 'huber'",
        ),
        ({"action_space": "binary"}, ValueError, "must be 'categorical' or 'one-hot', got 'binary'"),
        ({"use_prioritized_weights": "no"}, ValueError, "must be True, False or 'auto', got 'no'"),
        ({"value_network": len}, TypeError, "value_network must be a tensordict module or a torch.nn.Module"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DQNLoss(**{"value_network": table(), **options})


@pytest.mark.parametrize(
    ("kinds", "gamma", "lmbda"),
    [
        (["td0", "TD0", ValueEstimators.TD0, TD0Estimator], 0.9, 0.0),
        (["td1", "TD1", ValueEstimators.TD1, TD1Estimator], 0.9, 1.0),
        (["td_lambda", "TDLambda", TDLambdaEstimator, "gae", "GAE", ValueEstimators.GAE, GAE], 0.9, 0.95),
    ],
)
def test_estimators_by_name_and_class(kinds: list[Any], gamma: float, lmbda: float) -> None:
    loss = DQNLoss(table())
    for kind in kinds:
        assert loss.make_value_estimator(kind, gamma=gamma) is loss
        assert (loss.gamma, loss.lmbda) == (gamma, lmbda)
        if ValueEstimators.TD0 not in kinds:
            assert loss.make_value_estimator(kind).gamma == 0.99


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"value_type": "sarsa"}, ValueError, "value_type must be 'td0', .*, got 'sarsa'"),
        ({"value_type": DQNLoss}, ValueError, "a name in ValueEstimators or one of its classes, got <class"),
        ({"value_type": "VTrace"}, ValueError, "DQNLoss learns action values: use 'td0', 'td1' or"),
        ({"gamma": 1.5}, ValueError, r"gamma must lie in \[0, 1\], got 1.5"),
        ({"value_type": "td_lambda", "lmbda": -1}, ValueError, r"lmbda must lie in \[0, 1\], got -1"),
        ({"lmbda": 0.5}, TypeError, "td0 takes gamma, got lmbda"),
    ],
)
def test_bad_estimators(arguments: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=text):
        DQNLoss(table()).make_value_estimator(**arguments)
