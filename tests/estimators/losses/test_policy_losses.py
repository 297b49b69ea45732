"""What the policy-gradient losses share, and the ones that are not the clipped one."""

import math
import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_composite_lp_aggregate,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Distribution, Independent, Normal

from flatroll.estimators import (
    GAE,
    A2CLoss,
    ClipPPOLoss,
    HardUpdate,
    KLPENPPOLoss,
    PPOLoss,
    ReinforceLoss,
    ValueEstimators,
    VTrace,
)

POLICY_LOSSES = [PPOLoss, ClipPPOLoss, KLPENPPOLoss, A2CLoss, ReinforceLoss]


def actor_of(net: nn.Module, *, reads: str = "observation") -> ProbabilisticTensorDictSequential:
    choose = ProbabilisticTensorDictModule(
        ["logits"],
        ["action"],
        distribution_class=Categorical,
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )
    return ProbabilisticTensorDictSequential(TensorDictModule(net, [reads], ["logits"]), choose)


def critic_of(net: nn.Module, *, reads: str = "observation") -> TensorDictModule:
    return TensorDictModule(net, [reads], ["state_value"])


def random_batch(rows: int = 12) -> TensorDict:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    logits = numbers(rows, 2)
    action = torch.randint(2, (rows,), generator=generator)
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[rows // 2] = True
    return TensorDict(
        {
            "observation": numbers(rows, 3),
            "logits": logits,
            "action": action,
            "action_log_prob": Categorical(logits=logits).log_prob(action),
            "advantage": numbers(rows, 1),
            "value_target": numbers(rows, 1),
            "state_value": numbers(rows, 1),
            "next": {
                "observation": numbers(rows, 3),
                "reward": numbers(rows, 1),
                "done": done,
                "terminated": done,
            },
        },
        [rows],
    )


def networks() -> tuple[ProbabilisticTensorDictSequential, TensorDictModule]:
    torch.manual_seed(0)
    return actor_of(nn.Linear(3, 2)), critic_of(nn.Linear(3, 1))


def total(out: TensorDict) -> Tensor:
    return torch.stack([out[key].sum() for key in out.keys() if key.startswith("loss")]).sum()  # noqa: SIM118


def gradients(loss: nn.Module, batch: TensorDict, *of: nn.Module) -> list[Tensor]:
    parameters = [parameter for module in of for parameter in module.parameters()]
    grads = torch.autograd.grad(total(loss(batch)), parameters, allow_unused=True)
    return [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads, strict=True)]


def test_objectives_of_one_row() -> None:
    """Two equal actions; the one taken had probability 0.4."""
    batch = random_batch(1)
    batch.update({"observation": torch.zeros(1, 3), "advantage": torch.full((1, 1), 3.0)})
    batch["action_log_prob"] = torch.tensor([math.log(0.4)])
    batch["logits"] = torch.tensor([[math.log(0.4), math.log(0.6)]])
    actor = actor_of(nn.Linear(3, 2, bias=False))
    assert PPOLoss(actor)(batch)["loss_objective"].item() == pytest.approx(-1.25 * 3)
    assert A2CLoss(actor)(batch)["loss_objective"].item() == pytest.approx(3 * math.log(2))
    assert ReinforceLoss(actor)(batch)["loss_actor"].item() == pytest.approx(3 * math.log(2))
    kl = 0.4 * math.log(0.4 / 0.5) + 0.6 * math.log(0.6 / 0.5)
    out = KLPENPPOLoss(actor, beta=0.5)(batch)
    assert out["kl"].item() == pytest.approx(kl, abs=1e-6)
    assert out["loss_objective"].item() == pytest.approx(-1.25 * 3 + 0.5 * kl)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_keys_that_are_written(kind: Any) -> None:
    actor, critic = networks()
    for loss in (kind(actor), kind(actor, critic), kind(actor, critic, clip_value=0.1)):
        assert set(loss(random_batch()).keys()) == set(loss.out_keys)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
@pytest.mark.parametrize("key", [("collector", "mask"), "shifted_valid"])
def test_rows_that_do_not_count_may_hold_anything(kind: Any, key: Any) -> None:
    """NaN and inf there reach neither the losses nor the gradients."""
    actor, critic = networks()
    loss = kind(actor, critic, clip_value=0.1, normalize_advantage=True)
    loss.eval()  # the penalty stays as it is
    batch = random_batch()
    expected, grads = loss(batch[:8]), gradients(loss, batch[:8], actor, critic)
    batch[key] = torch.arange(12) < 8
    for name in ("advantage", "value_target", "state_value"):
        batch[name][8:] = torch.nan
    batch["action_log_prob"][8:] = -torch.inf
    out = loss(batch)
    for name in out.keys():  # noqa: SIM118
        torch.testing.assert_close(out[name], expected[name])
    torch.testing.assert_close(gradients(loss, batch, actor, critic), grads)


@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_reductions_agree(kind: Any) -> None:
    actor, critic = networks()
    batch = random_batch()
    batch["shifted_valid"] = torch.arange(12) % 3 != 0
    mean, summed, rows = (
        kind(actor, critic, reduction=reduction).eval()(batch) for reduction in ("mean", "sum", "none")
    )
    for name in (name for name in mean.keys() if name.startswith("loss")):  # noqa: SIM118
        assert rows[name].shape == (12,)
        assert not rows[name][::3].any()
        torch.testing.assert_close(summed[name], rows[name].sum())
        torch.testing.assert_close(mean[name], summed[name] / 8)


def test_flat_and_padded_batches_give_the_same_losses() -> None:
    actor, critic = networks()
    loss = ClipPPOLoss(actor, critic, normalize_advantage=True)
    batch = random_batch()
    flat, shaped = loss(batch), loss(batch.reshape(3, 4))
    for name in flat.keys():  # noqa: SIM118
        torch.testing.assert_close(flat[name], shaped[name])


def test_one_row_keeps_its_advantage() -> None:
    batch = random_batch(1)
    actor, _ = networks()
    out = A2CLoss(actor, normalize_advantage=True)(batch)
    torch.testing.assert_close(out["loss_objective"], A2CLoss(actor)(batch)["loss_objective"])


def test_separate_losses_leave_the_shared_trunk_to_the_policy() -> None:
    torch.manual_seed(0)
    trunk = TensorDictModule(nn.Linear(3, 4), ["observation"], ["features"])
    head = actor_of(nn.Linear(4, 2), reads="features")
    actor = ProbabilisticTensorDictSequential(trunk, *head)
    value = critic_of(nn.Linear(4, 1), reads="features")
    batch = random_batch()
    of_policy = gradients(PPOLoss(actor), batch, trunk)
    for critic in (value, TensorDictSequential(trunk, value)):
        together = gradients(PPOLoss(actor, critic), batch, trunk, value)
        apart = gradients(PPOLoss(actor, critic, separate_losses=True), batch, trunk, value)
        torch.testing.assert_close(apart[:2], of_policy)
        torch.testing.assert_close(apart[2:], together[2:])
        assert not torch.allclose(together[0], of_policy[0])
    assert all(parameter.requires_grad for parameter in trunk.parameters())


@pytest.mark.parametrize("way", ["gae", "GAE", ValueEstimators.GAE, GAE, "ready"])
def test_the_loss_computes_advantages_that_are_not_there(way: Any) -> None:
    actor, critic = networks()
    batch = random_batch()
    expected = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(batch.clone())
    bare = batch.exclude("advantage", "value_target", "state_value")
    keys = set(bare.keys(True, True))
    loss = A2CLoss(actor, critic, clip_value=0.1)
    with pytest.raises(KeyError, match=re.escape("loss.make_value_estimator(...)")):
        loss(bare)
    if way == "ready":
        loss.make_value_estimator(GAE(gamma=0.9, lmbda=0.8, value_network=critic))
    else:
        assert loss.make_value_estimator(way, gamma=0.9, lmbda=0.8) is loss
    out = loss(bare)
    for name, number in loss(expected).items():
        torch.testing.assert_close(out[name], number)
    assert set(bare.keys(True, True)) == keys
    assert not any("value_estimator" in name for name in loss.state_dict())
    torch.testing.assert_close(loss(batch)["loss_objective"], A2CLoss(actor)(batch)["loss_objective"])


@pytest.mark.parametrize("way", ["vtrace", VTrace])
def test_vtrace_takes_the_actor_of_the_loss(way: Any) -> None:
    actor, critic = networks()
    batch = random_batch().exclude("advantage", "value_target", "state_value")
    expected = VTrace(gamma=0.9, actor_network=actor, value_network=critic)(batch.clone())
    loss = A2CLoss(actor, critic)
    out = loss.make_value_estimator(way, gamma=0.9)(batch)
    torch.testing.assert_close(out["loss_critic"], loss(expected)["loss_critic"])


def test_the_estimator_follows_the_names_of_the_loss() -> None:
    actor, critic = networks()
    batch = random_batch().exclude("advantage", "value_target", "state_value")
    loss = A2CLoss(actor, critic).make_value_estimator()
    expected = loss(batch)
    batch.rename_key_(("next", "reward"), ("next", "score"))
    loss.set_keys(reward="score")
    torch.testing.assert_close(loss(batch)["loss_objective"], expected["loss_objective"])


def test_advantages_of_a_delayed_critic() -> None:
    actor, critic = networks()
    loss = ReinforceLoss(actor, critic, delay_value=True).make_value_estimator()
    assert loss.target_critic_network is not None
    batch = random_batch().exclude("advantage", "value_target")
    before = loss(batch)
    with torch.no_grad():
        for parameter in critic.parameters():
            parameter.add_(1.0)
    torch.testing.assert_close(loss(batch)["loss_actor"], before["loss_actor"])
    HardUpdate(loss, value_network_update_interval=1).step()
    assert not torch.equal(loss(batch)["loss_actor"], before["loss_actor"])


def test_an_estimator_needs_a_critic_and_known_arguments() -> None:
    actor, critic = networks()
    with pytest.raises(ValueError, match=re.escape("no critic_network: give GAE a value_network=")):
        A2CLoss(actor).make_value_estimator()
    with pytest.raises(ValueError, match=r"value_type must be .*'gae'.*, got 'sarsa'"):
        A2CLoss(actor, critic).make_value_estimator("sarsa")
    with pytest.raises(ValueError, match="this GAE already has its arguments: leave out gamma"):
        A2CLoss(actor).make_value_estimator(GAE(gamma=0.9, lmbda=0.9, value_network=critic), gamma=0.9)
    with pytest.raises(ValueError, match=re.escape("gamma must lie in [0, 1], got 2")):
        A2CLoss(actor, critic).make_value_estimator(gamma=2.0)
    A2CLoss(actor).make_value_estimator(value_network=critic)


class TestPenalty:
    """The factor of the divergence."""

    def moved(self, dtarg: float, **options: Any) -> float:
        actor, _ = networks()
        loss = KLPENPPOLoss(actor, dtarg=dtarg, **options)
        loss(random_batch())
        return loss.beta.item()

    def test_it_follows_the_divergence(self) -> None:
        actor, _ = networks()
        kl = KLPENPPOLoss(actor)(random_batch())["kl"].item()
        assert self.moved(dtarg=kl / 1.6) == 2.0
        assert self.moved(dtarg=kl / 1.6, increment=3.0, beta=0.5) == 1.5
        assert self.moved(dtarg=kl) == 1.0
        assert self.moved(dtarg=1.6 * kl) == 0.5
        assert self.moved(dtarg=1.6 * kl, decrement=0.1) == pytest.approx(0.1)

    def test_it_stands_still_in_eval_mode_and_resets(self) -> None:
        actor, _ = networks()
        loss = KLPENPPOLoss(actor, beta=0.5)
        loss.eval()(random_batch())
        assert loss.beta.item() == 0.5
        loss.train()(random_batch())
        assert loss.state_dict()["beta"].item() == loss.beta.item() == 1.0
        loss.reset()
        assert loss.beta.item() == 0.5

    def test_without_a_closed_form_it_is_sampled(self) -> None:
        class Unknown(Distribution):
            """No divergence is registered for it."""

            def __init__(self, loc: Tensor, scale: Tensor) -> None:
                self.known = Independent(Normal(loc, scale), 1)
                super().__init__(self.known.batch_shape, self.known.event_shape, validate_args=False)

            def sample(self, sample_shape: Any = ()) -> Tensor:
                return self.known.sample(sample_shape)

            def log_prob(self, value: Tensor) -> Tensor:
                return self.known.log_prob(value)

        def actor(kind: Any) -> ProbabilisticTensorDictSequential:
            params = TensorDictModule(
                lambda x: (x[:, :2], torch.ones(len(x), 2)), ["observation"], ["loc", "scale"]
            )
            choose = ProbabilisticTensorDictModule(
                ["loc", "scale"], ["action"], distribution_class=kind, return_log_prob=True
            )
            return ProbabilisticTensorDictSequential(params, choose)

        torch.manual_seed(0)
        batch = random_batch(2000)
        batch["action"] = torch.rand(2000, 2) - 0.5
        batch["loc"], batch["scale"] = batch["observation"][:, :2] + 0.3, torch.ones(2000, 2)
        loss = KLPENPPOLoss(actor(Unknown), samples_mc_kl=8, entropy_bonus=False)
        kl = loss(batch)["kl"].item()
        assert kl == pytest.approx(0.3**2, rel=0.1)  # half of the squared move in two dims
        assert kl != pytest.approx(0.3**2, rel=1e-5)
        torch.manual_seed(0)
        assert KLPENPPOLoss(actor(Unknown), entropy_bonus=False)(batch)["kl"].item() != kl  # one sample a row

    def test_the_batch_must_say_how_its_actions_were_sampled(self) -> None:
        actor, _ = networks()
        with pytest.raises(KeyError, match=r"no entry 'logits': .*the policy must write it when it acts"):
            KLPENPPOLoss(actor)(random_batch().exclude("logits"))

    @pytest.mark.parametrize(
        ("options", "text"),
        [
            ({"increment": 0.5}, "increment must be at least 1, got 0.5"),
            ({"decrement": 1.5}, r"decrement must lie in \(0, 1\], got 1.5"),
        ],
    )
    def test_bad_factors(self, options: dict[str, Any], text: str) -> None:
        with pytest.raises(ValueError, match=text):
            KLPENPPOLoss(networks()[0], **options)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"burn_in": -1}, ValueError, "burn_in must be an integer of at least 0, got -1"),
        ({"burn_in": 1.5}, ValueError, "burn_in must be an integer of at least 0, got 1.5"),
        ({"clip_value": True}, ValueError, "clip_value=True uses the clip_epsilon of ClipPPOLoss"),
        ({"entropy_coef": 0.1}, TypeError, "unexpected keyword argument 'entropy_coef'"),
    ],
)
def test_bad_arguments(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        A2CLoss(*networks(), **options)


@pytest.mark.parametrize("name", ["entropy_bonus", "entropy_coeff", "entropy_coef", "samples_mc_entropy"])
def test_reinforce_refuses_options_of_an_entropy_term(name: str) -> None:
    text = f"ReinforceLoss has no entropy term and does not take {name}=: use A2CLoss instead"
    with pytest.raises(TypeError, match=re.escape(text)):
        ReinforceLoss(*networks(), **{name: 1})  # type: ignore[arg-type]


def test_delay_needs_a_critic() -> None:
    with pytest.raises(ValueError, match="delay_value=True needs a critic_network"):
        ReinforceLoss(networks()[0], delay_value=True)


def test_an_empty_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=re.escape("A2CLoss needs at least one row, got a batch [0]")):
        A2CLoss(*networks())(random_batch()[:0])


def test_an_overflowing_ratio_beyond_the_limit_leaves_no_nan() -> None:
    actor, critic = networks()
    batch = random_batch()
    batch["advantage"].abs_()
    batch["action_log_prob"][0] -= 200.0  # float32 ends at exp(88)
    out = ClipPPOLoss(actor, critic)(batch)
    out["loss_objective"].backward()
    grads = [parameter.grad for parameter in actor.parameters()]
    assert out["loss_objective"].isfinite()
    assert all(grad is not None and grad.isfinite().all() for grad in grads)
    assert 0.0 < out["ESS"] <= 1.0


def test_a_value_that_the_batch_holds_is_not_the_critics() -> None:
    actor, _ = networks()
    other = TensorDictModule(nn.Linear(3, 1), ["observation"], ["worth"])
    with pytest.raises(
        KeyError, match=r"critic_network wrote no entry 'state_value': its out_keys are \['worth'\]"
    ):
        A2CLoss(actor, other)(random_batch())


class OneHot(Categorical):
    """A distribution of one-hot actions that does not say so in its event_shape."""

    def log_prob(self, value: Tensor) -> Tensor:
        return super().log_prob(value.argmax(-1))


def test_the_shapes_of_actions() -> None:
    batch = random_batch()
    net = TensorDictModule(lambda x: x[..., :2], ["observation"], ["logits"])
    choose = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=OneHot)
    one_hot = batch.clone().set("action", nn.functional.one_hot(batch["action"], 2))
    out = A2CLoss(ProbabilisticTensorDictSequential(net, choose))(one_hot)
    plain = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    expected = A2CLoss(ProbabilisticTensorDictSequential(net, plain))(batch)
    torch.testing.assert_close(out["loss_objective"], expected["loss_objective"])
    spread = TensorDictModule(lambda x: (x, x.exp()), ["observation"], ["loc", "scale"])
    each = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Normal)
    with pytest.raises(
        ValueError, match=re.escape("must have the shape (12, 3) of the actor's Normal, got (12, 1)")
    ):
        A2CLoss(ProbabilisticTensorDictSequential(spread, each))(batch.set("action", torch.zeros(12, 1)))


@pytest.mark.parametrize("aggregate", [True, False])
@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_actions_of_several_parts(kind: Any, aggregate: bool) -> None:
    """As if their log-probabilities, entropies and divergences had been added up by hand."""
    net = TensorDictModule(
        lambda x: (x[..., :2], x, x.exp()),
        ["observation"],
        [("params", "turn", "logits"), ("params", "push", "loc"), ("params", "push", "scale")],
    )
    names: Any = {"turn": ("action", "turn"), "push": ("action", "push")}
    kinds = {"turn": Categorical, "push": Normal}
    arguments = {"distribution_map": kinds, "name_map": names}
    keys = list(names.values())
    torch.manual_seed(0)
    with set_composite_lp_aggregate(aggregate):
        choose = ProbabilisticTensorDictModule(
            ["params"], keys, distribution_class=CompositeDistribution, distribution_kwargs=arguments,
            return_log_prob=True, default_interaction_type=InteractionType.RANDOM,
        )  # fmt: skip
        actor = ProbabilisticTensorDictSequential(net, choose)
        batch = actor(random_batch().exclude("action", "action_log_prob", "logits"))
        observation = batch["observation"].clone().requires_grad_()
        loss = kind(actor) if kind is ReinforceLoss else kind(actor, entropy_coeff=0.1)
        if aggregate:
            loss.set_keys(sample_log_prob=choose.log_prob_keys[0])
        losses = loss(batch.set("observation", observation))
    turn, push = Categorical(logits=observation[..., :2]), Normal(observation, observation.exp())
    log_prob = turn.log_prob(batch["action", "turn"]) + push.log_prob(batch["action", "push"]).sum(-1)
    ratio = (log_prob - log_prob.detach()).exp() if issubclass(kind, PPOLoss) else log_prob
    expected = -(ratio * batch["advantage"].squeeze(-1)).mean()
    names_of_loss = loss.loss_names[0], "loss_entropy"
    torch.testing.assert_close(losses[names_of_loss[0]], expected)
    if kind is not ReinforceLoss:
        entropy = (turn.entropy() + push.entropy().sum(-1)).mean()
        torch.testing.assert_close(losses["loss_entropy"], -0.1 * entropy)
    grads = [
        torch.autograd.grad(x, observation, retain_graph=True)[0]
        for x in (losses[names_of_loss[0]], expected)
    ]
    torch.testing.assert_close(*grads)
