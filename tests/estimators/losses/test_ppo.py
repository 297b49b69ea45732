"""The clipped PPO loss against hand-made numbers, masks, shared trunks and recurrent networks."""

import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, TransformedDistribution
from torch.distributions.transforms import TanhTransform

from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.modules import GRUModule, set_recurrent_mode

BatchOf = Callable[..., TensorDict]


def head(distribution: Any, *in_keys: str) -> ProbabilisticTensorDictModule:
    return ProbabilisticTensorDictModule(
        list(in_keys),
        ["action"],
        distribution_class=distribution,
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )


def table_actor() -> ProbabilisticTensorDictSequential:
    """The observation is the logits."""
    net = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["logits"])
    return ProbabilisticTensorDictSequential(net, head(Categorical, "logits"))


def first_column() -> TensorDictModule:
    return TensorDictModule(lambda x: x[..., :1], in_keys=["observation"], out_keys=["state_value"])


def scored(ratios: list[float], advantages: list[float]) -> TensorDict:
    """Two equal actions per row, so each has probability 1/2; ``ratios`` is 1/2 over the sampled probability."""
    n = len(ratios)
    return TensorDict(
        {
            "observation": torch.zeros(n, 2),
            "action": torch.zeros(n, dtype=torch.int64),
            "action_log_prob": math.log(0.5) - torch.tensor(ratios).log(),
            "advantage": torch.tensor(advantages).unsqueeze(-1),
            "value_target": torch.zeros(n, 1),
        },
        [n],
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "clip", "loss"),
    [
        (1.1, 1.0, 0.2, -1.1),
        (1.5, 1.0, 0.2, -1.2),
        (1.5, -1.0, 0.2, 1.5),  # the pessimistic one: no clipping of a move that hurts
        (0.5, 1.0, 0.2, -0.5),
        (0.5, -1.0, 0.2, 0.8),
        (1.5, 1.0, (0.2, 0.4), -1.4),
        (0.5, -1.0, (0.2, 0.4), 0.8),
    ],
)
def test_objective_of_one_row(
    ratio: float, advantage: float, clip: float | tuple[float, float], loss: float
) -> None:
    out = ClipPPOLoss(table_actor(), clip_epsilon=clip)(scored([ratio], [advantage]))
    assert out["loss_objective"].item() == pytest.approx(loss, abs=1e-6)
    assert out["clip_fraction"].item() == float(ratio != 1.1)


def test_diagnostics() -> None:
    out = ClipPPOLoss(table_actor(), first_column())(scored([1.5, 1.0, 1.0, 0.5], [1.0] * 4))
    assert out["clip_fraction"].item() == 0.5
    assert out["kl_approx"].item() == pytest.approx(-math.log(0.75) / 4, abs=1e-6)
    assert out["max_ratio"].item() == pytest.approx(1.5)
    assert out["mean_ratio"].item() == pytest.approx(1.0)
    assert out["ESS"].item() == pytest.approx(16 / (1.5**2 + 1 + 1 + 0.25) / 4)
    assert out["entropy"].item() == pytest.approx(math.log(2))
    assert out["loss_entropy"].item() == pytest.approx(-0.01 * math.log(2))
    assert set(out.keys()) == {
        "loss_objective",
        "loss_critic",
        "loss_entropy",
        "kl_approx",
        "clip_fraction",
        "entropy",
        "ESS",
        "max_ratio",
        "mean_ratio",
        "explained_variance",
    }
    assert all(number.shape == () for number in out.values())


def test_critic_terms() -> None:
    batch = scored([1.0] * 3, [1.0] * 3)
    batch["observation"] = torch.tensor([[0.5, 0.5], [3.0, 3.0], [1.0, 1.0]])
    batch["action_log_prob"] = torch.full((3,), math.log(0.5))
    batch["value_target"] = torch.tensor([[0.0], [1.0], [2.0]])
    batch["state_value"] = torch.tensor([[0.5], [1.0], [0.9]])
    losses = {}
    for kind in ("l1", "l2", "smooth_l1"):
        out = ClipPPOLoss(table_actor(), first_column(), loss_critic_type=kind, critic_coeff=2.0)(batch)
        losses[kind] = out["loss_critic"].item()
    assert losses["l1"] == pytest.approx(2 * 3.5 / 3)
    assert losses["l2"] == pytest.approx(2 * 5.25 / 3)
    assert losses["smooth_l1"] == pytest.approx(2 * (0.125 + 1.5 + 0.5) / 3)
    error = batch["value_target"] - batch["observation"][:, :1]
    variances = error.var(correction=0) / batch["value_target"].var(correction=0)
    assert out["explained_variance"].item() == pytest.approx(1 - variances.item())
    batch["value_target"][1] = 4.0  # the move from 1 to 3 is clipped to 1.2, farther from the target
    clipped = ClipPPOLoss(table_actor(), first_column(), loss_critic_type="l1", clip_value=True)(batch)
    assert clipped["loss_critic"].item() == pytest.approx((0.5 + 2.8 + 1.0) / 3)
    assert clipped["value_clip_fraction"].item() == pytest.approx(1 / 3)


def test_without_critic_or_entropy() -> None:
    batch = scored([1.0], [1.0])
    keys = {"loss_objective", "kl_approx", "clip_fraction", "ESS", "max_ratio", "mean_ratio"}
    assert set(ClipPPOLoss(table_actor(), entropy_bonus=False)(batch).keys()) == keys
    loss = ClipPPOLoss(table_actor(), first_column(), entropy_bonus=False, critic_coeff=None)
    assert set(loss(batch).keys()) == keys == set(loss.out_keys)


@pytest.mark.parametrize("key", [("collector", "mask"), "shifted_valid"])
def test_rows_that_are_not_real_count_nowhere(key: Any) -> None:
    batch = scored([1.5, 0.7, 1.0, 1.0], [1.0, -2.0, 0.5, 1.0])
    batch["value_target"] = torch.randn(4, 1)
    loss = ClipPPOLoss(table_actor(), first_column(), normalize_advantage=True)
    expected = loss(batch[:3])
    batch[key] = torch.tensor([True, True, True, False])
    batch["action_log_prob"][3] = -1e9  # a ratio of inf in the padding
    batch["advantage"][3] = torch.nan
    out = loss(batch)
    for key in out.keys():  # noqa: SIM118 - a tensordict iterates over its rows
        torch.testing.assert_close(out[key], expected[key])
    rows = ClipPPOLoss(table_actor(), first_column(), reduction="none")(batch)
    assert rows["loss_objective"].shape == (4,)
    assert rows["loss_objective"][3] == rows["loss_critic"][3] == rows["loss_entropy"][3] == 0.0
    total = ClipPPOLoss(table_actor(), first_column(), reduction="sum")(batch)
    torch.testing.assert_close(total["loss_objective"], rows["loss_objective"].sum())


def test_normalize_advantage() -> None:
    batch = scored([1.0, 1.0, 1.0], [1.0, 2.0, 6.0])
    out = ClipPPOLoss(table_actor(), normalize_advantage=True, reduction="none")(batch)
    advantage = torch.tensor([1.0, 2.0, 6.0])
    torch.testing.assert_close(-out["loss_objective"], (advantage - 3.0) / advantage.std())


def test_the_batch_stays_as_it_is() -> None:
    batch = scored([1.0, 1.0], [1.0, 1.0])
    keys = set(batch.keys(True, True))
    ClipPPOLoss(table_actor(), first_column())(batch)
    assert set(batch.keys(True, True)) == keys


class TanhNormal(TransformedDistribution):
    """No closed form of the entropy."""

    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Independent(Normal(loc, scale), 1), TanhTransform(cache_size=1))


@pytest.mark.parametrize("kind", ["normal", "independent", "tanh"])
def test_continuous_actions_are_joint_over_their_dims(kind: str) -> None:
    torch.manual_seed(0)
    distribution = {
        "normal": Normal,
        "independent": lambda loc, scale: Independent(Normal(loc, scale), 1),
        "tanh": TanhNormal,
    }[kind]
    loc = TensorDictModule(nn.Linear(3, 2), ["observation"], ["loc"])
    scale = TensorDictModule(lambda x: torch.ones(len(x), 2), ["observation"], ["scale"])
    actor = ProbabilisticTensorDictSequential(loc, scale, head(distribution, "loc", "scale"))
    batch = TensorDict({"observation": torch.randn(500, 3)}, [500])
    with torch.no_grad():
        actor(batch)
    batch["advantage"] = torch.randn(500, 1)
    out = ClipPPOLoss(actor, samples_mc_entropy=4)(batch)
    torch.testing.assert_close(out["loss_objective"], -batch["advantage"].mean())  # ratio 1 everywhere
    assert out["ESS"].item() == pytest.approx(1.0)
    gaussian = 1 + math.log(2 * math.pi)  # of two dims of unit scale
    if kind == "tanh":
        assert out["entropy"].item() < gaussian
        assert out["loss_entropy"].requires_grad
    else:
        assert out["entropy"].item() == pytest.approx(gaussian, abs=1e-5)


def test_a_trunk_shared_with_the_critic_may_run_once() -> None:
    torch.manual_seed(0)
    runs: list[int] = []
    trunk_net = nn.Linear(2, 4)
    trunk_net.register_forward_hook(lambda *_: runs.append(1))
    trunk = TensorDictModule(trunk_net, ["observation"], ["features"])
    actor = ProbabilisticTensorDictSequential(
        trunk, TensorDictModule(nn.Linear(4, 2), ["features"], ["logits"]), head(Categorical, "logits")
    )
    value = TensorDictModule(nn.Linear(4, 1), ["features"], ["state_value"])
    batch = scored([1.0, 0.9], [1.0, -1.0])
    batch["observation"] = torch.randn(2, 2)
    batch["features"] = torch.full((2, 4), 1e6)  # what the collector stored is stale, and not read
    once = ClipPPOLoss(actor, value)(batch)
    assert len(runs) == 1
    twice = ClipPPOLoss(actor, TensorDictSequential(trunk, value))(batch)
    assert len(runs) == 3
    for key in ("loss_objective", "loss_critic"):
        torch.testing.assert_close(once[key], twice[key])
    (once["loss_objective"] + once["loss_critic"]).backward()
    assert trunk_net.weight.grad is not None and trunk_net.weight.grad.abs().sum() > 0


def test_recurrent_networks_read_the_flat_batch(batch_of: BatchOf) -> None:
    """The probabilities that stepping recorded come back as ratio 1, whatever the mode around the loss."""
    torch.manual_seed(0)
    gru = GRUModule(
        input_size=3, hidden_size=4, in_keys=["observation", "rs"], out_keys=["features", ("next", "rs")]
    )
    actor = ProbabilisticTensorDictSequential(
        gru, TensorDictModule(nn.Linear(4, 2), ["features"], ["logits"]), head(Categorical, "logits")
    ).double()
    value = TensorDictModule(nn.Linear(4, 1), ["features"], ["state_value"]).double()
    batch = batch_of([(4, "terminated"), (1, "cut"), (3, "truncated")])
    rows, state = [], torch.zeros(1, 1, 4, dtype=torch.float64)
    with torch.no_grad(), set_recurrent_mode(False):
        for i in range(len(batch)):
            row = batch[i : i + 1].clone()
            row["rs"] = torch.zeros_like(state) if row["is_init"].item() else state
            actor(row)
            state = row["next", "rs"]
            rows.append(row)
    played = torch.cat(rows)
    GAE(gamma=0.9, lmbda=0.8, value_network=TensorDictSequential(gru, value))(played)
    with set_recurrent_mode(False):
        out = ClipPPOLoss(actor, value)(played)
    assert out["max_ratio"].item() == pytest.approx(1.0)
    assert out["clip_fraction"].item() == 0.0
    assert out["explained_variance"].item() < 1.0
    out["loss_objective"].backward()
    assert all(p.grad is not None for p in gru.parameters())


@pytest.mark.parametrize(
    ("missing", "text"),
    [
        ("advantage", "no entry 'advantage': call an estimator on the batch, e.g. flatroll.estimators.GAE"),
        ("advantage", "Or let the loss compute it: loss.make_value_estimator(...)"),
        ("value_target", "no entry 'value_target': call an estimator"),
        (
            "action_log_prob",
            "no entry 'action_log_prob': the policy writes it when it acts (return_log_prob=True)",
        ),
        ("action", "no entry 'action': the policy writes it"),
    ],
)
def test_missing_entry(missing: str, text: str) -> None:
    with pytest.raises(KeyError, match=re.escape(text)):
        ClipPPOLoss(table_actor(), first_column())(scored([1.0], [1.0]).exclude(missing))


def test_renamed_keys() -> None:
    batch = scored([1.5], [1.0])
    expected = ClipPPOLoss(table_actor())(batch)
    batch.rename_key_("action_log_prob", ("old", "log_prob"))
    loss = ClipPPOLoss(table_actor())
    loss.set_keys(sample_log_prob=("old", "log_prob"))
    assert ("old", "log_prob") in loss.in_keys
    torch.testing.assert_close(loss(batch)["loss_objective"], expected["loss_objective"])
    with pytest.raises(ValueError, match="no key is called log_prob; the keys are action, advantage"):
        loss.set_keys(log_prob="x")


@pytest.mark.parametrize(
    ("changes", "error", "text"),
    [
        (
            {"clip_epsilon": 0.0},
            ValueError,
            "clip_epsilon must be above 0, and below 1 on the lower side, got",
        ),
        ({"clip_epsilon": (1.0, 0.2)}, ValueError, "got (1.0, 0.2)"),
        ({"clip_epsilon": (0.2, 0.3), "clip_value": True}, ValueError, "needs one clip_epsilon, not a pair"),
        (
            {"loss_critic_type": "huber"},
            ValueError,
            "loss_critic_type must be 'l1', 'l2' or 'smooth_l1', got",
        ),
        ({"reduction": "max"}, ValueError, "reduction must be 'mean', 'sum' or 'none', got 'max'"),
        (
            {"actor_network": first_column()},
            TypeError,
            "actor_network must be a tensordict module with get_dist",
        ),
        ({"critic_network": nn.Linear(1, 1)}, TypeError, "critic_network must be a tensordict module, e.g."),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_arguments(changes: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        ClipPPOLoss(**{"actor_network": table_actor(), **changes})


def test_action_of_another_shape() -> None:
    """A trailing dim would broadcast to N x N log-probabilities."""
    batch = scored([1.0, 1.0], [1.0, 1.0])
    batch["action"] = batch["action"].unsqueeze(-1)
    text = "the action must have the shape (2,) of the actor's Categorical, got (2, 1)"
    with pytest.raises(ValueError, match=re.escape(text)):
        ClipPPOLoss(table_actor())(batch)


def test_critic_that_writes_another_key() -> None:
    critic = TensorDictModule(lambda x: x[..., :1], in_keys=["observation"], out_keys=["v"])
    with pytest.raises(
        KeyError, match=re.escape("critic_network wrote no entry 'state_value': its out_keys are ['v']")
    ):
        ClipPPOLoss(table_actor(), critic)(scored([1.0], [1.0]))
