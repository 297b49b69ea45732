"""Names and ways to call that scripts of the references use: keyword calls, parameters by name, coefficients, keys."""

import copy
import pickle
import re
import warnings
from collections.abc import Callable
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
    set_composite_lp_aggregate,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from flatroll.estimators import (
    GAE,
    A2CLoss,
    ClipPPOLoss,
    DQNLoss,
    HardUpdate,
    KLPENPPOLoss,
    LossModule,
    PPOLoss,
    ReinforceLoss,
    SACLoss,
    SoftUpdate,
    TD0Estimator,
    VTrace,
)

POLICY_LOSSES = [PPOLoss, ClipPPOLoss, KLPENPPOLoss, A2CLoss, ReinforceLoss]
Networks = tuple[ProbabilisticTensorDictSequential, TensorDictModule]

#: What calls by keyword return, in this order: the out_keys of torchrl's losses.
TUPLES: dict[Any, tuple[str, ...]] = {
    PPOLoss: ("loss_objective", "entropy", "loss_entropy", "loss_critic"),
    ClipPPOLoss: (
        *("loss_objective", "clip_fraction", "entropy", "loss_entropy", "loss_critic"),
        *("ESS", "kl_approx", "max_ratio", "mean_ratio"),
    ),
    KLPENPPOLoss: ("loss_objective", "kl", "entropy", "loss_entropy", "loss_critic"),
    A2CLoss: ("loss_objective", "loss_critic", "entropy", "loss_entropy"),
    ReinforceLoss: ("loss_actor", "loss_value"),
    DQNLoss: ("loss",),
    SACLoss: ("loss_actor", "loss_qvalue", "loss_alpha", "alpha", "entropy"),
}


def networks(*, action: str = "action", obs: str = "observation") -> Networks:
    torch.manual_seed(0)
    net = TensorDictModule(nn.Linear(3, 2), [obs], ["logits"])
    choose = ProbabilisticTensorDictModule(
        ["logits"], [action], distribution_class=Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(net, choose), TensorDictModule(
        nn.Linear(3, 1), [obs], ["state_value"]
    )


def rows(count: int = 6, *, action: str = "action", obs: str = "observation") -> TensorDict:
    torch.manual_seed(1)
    done = torch.arange(count).unsqueeze(-1) == count // 2
    logits = torch.randn(count, 2)
    chosen = torch.randint(2, (count,))
    return TensorDict(
        {
            obs: torch.randn(count, 3), "logits": logits, action: chosen,
            f"{action}_log_prob": Categorical(logits=logits).log_prob(chosen),
            "advantage": torch.randn(count, 1), "value_target": torch.randn(count, 1),
            "state_value": torch.randn(count, 1),
            "next": {obs: torch.randn(count, 3), "reward": torch.randn(count, 1), "done": done, "terminated": done},
        },
        [count],
    )  # fmt: skip


def by_keyword(batch: TensorDict, loss: Any) -> dict[str, Tensor]:
    """The batch's entries for a call by keyword, without the distribution's parameters unless the loss reads them."""
    batch = batch if isinstance(loss, KLPENPPOLoss) else batch.exclude("logits")
    return dict(batch.flatten_keys("_").items())


def dqn() -> DQNLoss:
    torch.manual_seed(0)
    return DQNLoss(TensorDictModule(nn.Linear(3, 2), ["observation"], ["action_value"]))


def sac() -> SACLoss:
    torch.manual_seed(0)
    spread = TensorDictModule(lambda x: (x, x.exp()), ["observation"], ["loc", "scale"])
    head = ProbabilisticTensorDictModule(
        ["loc", "scale"],
        ["action"],
        distribution_class=Normal,
        default_interaction_type=InteractionType.RANDOM,
    )
    both = TensorDictModule(Critic(6, 1), ["observation", "action"], ["state_action_value"])
    return SACLoss(ProbabilisticTensorDictSequential(spread, head), both)


class Critic(nn.Linear):
    """A linear function of observation and action."""

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(torch.cat([observation, action], -1))


class TestNetworks:
    """``actor=`` and ``critic=``, as the tutorial's recipes call them."""

    @pytest.mark.parametrize("kind", POLICY_LOSSES)
    def test_both_names(self, kind: Any) -> None:
        actor, critic = networks()
        loss, batch = kind(actor=actor, critic=critic), rows()
        assert loss.actor_network is actor and loss.critic_network is critic
        name = loss.loss_names[1]
        torch.testing.assert_close(loss(batch)[name], kind(actor, critic)(batch)[name])
        with pytest.raises(TypeError, match=re.escape("pass actor_network= or actor=, not both")):
            kind(actor, actor=actor)
        with pytest.raises(TypeError, match=re.escape("pass critic_network= or critic=, not both")):
            kind(actor, critic, critic=critic)
        with pytest.raises(TypeError, match=f"{kind.__name__} needs an actor_network"):
            kind(critic=critic)

    @pytest.mark.parametrize(
        ("name", "way_out"),
        [
            ("entropy_coef", "use entropy_coeff="),
            ("normalise_advantage", "use normalize_advantage="),
            ("clip_epsilom", "use clip_epsilon="),
            ("gamma", re.escape("use make_value_estimator(gamma=...)")),
            ("advantage_key", re.escape("use set_keys(advantage=...)")),
        ],
    )
    def test_misspelt_arguments(self, name: str, way_out: str) -> None:
        text = f"ClipPPOLoss got an unexpected keyword argument '{name}': {way_out}"
        options: dict[str, Any] = {name: 0.1}
        with pytest.raises(TypeError, match=text):
            ClipPPOLoss(*networks(), **options)

    def test_initialising_anew_keeps_target_copies_equal(self) -> None:
        loss = dqn()
        before = loss.value_network.module.weight.clone()  # type: ignore[union-attr, operator]
        loss.reset_parameters_recursive()
        weight = loss.value_network_params["module", "weight"]
        assert not torch.equal(weight, before)
        torch.testing.assert_close(loss.target_value_network_params["module", "weight"], weight.data)


class TestKeywords:
    """Calls with tensors in place of a tensordict."""

    @pytest.mark.parametrize("kind", POLICY_LOSSES)
    def test_they_give_what_a_tensordict_gives(self, kind: Any) -> None:
        loss, batch = kind(*networks(action="act", obs="pixels")), rows(action="act", obs="pixels")
        loss.eval()  # the penalty stays as it is
        batch["collector", "mask"] = torch.arange(6) < 4
        expected, found = loss(batch), loss(**by_keyword(batch, loss))
        assert isinstance(found, tuple) and len(found) == len(TUPLES[kind])
        for name, number in zip(TUPLES[kind], found, strict=True):
            torch.testing.assert_close(number, expected[name])
        assert loss.out_keys[: len(found)] == list(TUPLES[kind]) and set(loss.out_keys) == set(
            expected.keys()
        )
        assert set(loss.in_keys) <= set(batch.keys(True, True))
        torch.testing.assert_close(loss(tensordict=batch), expected)
        if kind is not KLPENPPOLoss:
            first = [batch[key] for key in loss.in_keys]  # by position, in the order of in_keys
            torch.testing.assert_close(loss(*first, collector_mask=batch["collector", "mask"]), found)

    def test_advantages_computed_on_the_way(self) -> None:
        loss, batch = A2CLoss(*networks()).make_value_estimator(), rows()
        batch = batch.exclude("advantage", "value_target", "state_value", "logits", "action_log_prob")
        assert ("next", "reward") in loss.in_keys and "advantage" not in loss.in_keys
        expected = loss(batch)
        for name, number in zip(TUPLES[A2CLoss], loss(**by_keyword(batch, loss)), strict=True):
            torch.testing.assert_close(number, expected[name])

    @pytest.mark.parametrize("make", [dqn, sac])
    def test_off_policy(self, make: Callable[[], Any]) -> None:
        loss, batch = make(), rows().select("observation", "action", "next")
        if make is sac:
            batch["action"] = torch.randn(6, 3)
        batch["priority_weight"], batch["gamma"] = torch.rand(6) + 0.1, torch.rand(6)
        batch["steps_to_next_obs"], batch["collector", "next_known"] = torch.ones(6), torch.arange(6) > 0
        torch.manual_seed(3)
        expected = loss(batch)
        torch.manual_seed(3)
        found = loss(**by_keyword(batch.exclude("td_error"), loss))
        found = found if make is sac else (found,)  # a loss of one output returns that
        for name, number in zip(TUPLES[type(loss)], found, strict=True):
            torch.testing.assert_close(number, expected[name])

    @pytest.mark.parametrize("kind", [PPOLoss, ClipPPOLoss, KLPENPPOLoss, A2CLoss, ReinforceLoss])
    def test_tuples_are_those_of_torchrl(self, kind: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # importing torchrl warns about packages that are not there
            peers: Any = pytest.importorskip("torchrl.objectives")
            options = {} if kind is ReinforceLoss else {"clip_value": 0.5}
            peer = getattr(peers, kind.__name__)(*networks(), **options)
            loss = kind(*networks(), **options)
        assert loss.out_keys[: loss.tuple_length] == list(peer.out_keys)

    def test_estimators_return_advantage_and_target(self) -> None:
        columns = dict(rows().select("observation", "next").flatten_keys("_").items())
        _, critic = networks()
        estimators: list[Any] = [
            GAE(gamma=0.9, lmbda=0.8, value_network=critic),
            TD0Estimator(gamma=0.9, value_network=critic),
        ]
        for estimator in estimators:
            advantage, value_target = estimator(**columns)
            expected = estimator(rows())
            torch.testing.assert_close(advantage, expected["advantage"])
            torch.testing.assert_close(value_target, expected["value_target"])
            estimator.set_keys(sample_log_prob="log_prob")  # it reads none; scripts set it for all estimators
            only = estimator.select_out_keys("state_value")(**columns)
            torch.testing.assert_close(only, expected["state_value"])

    @pytest.mark.parametrize("keywords", [True, False])
    def test_selected_outputs(self, keywords: bool) -> None:
        loss, batch = PPOLoss(*networks()), rows()
        everything = loss(batch)
        assert loss.select_out_keys("loss_critic", "loss_objective") is loss
        out = loss(**by_keyword(batch, loss)) if keywords else loss(batch)
        found = dict(zip(loss.out_keys, out, strict=True)) if keywords else dict(out.items())
        assert set(found) == {"loss_critic", "loss_objective"}
        torch.testing.assert_close(found["loss_critic"], everything["loss_critic"])
        loss.set_keys(advantage="advantage")
        assert loss.out_keys == ["loss_critic", "loss_objective"]
        assert set(loss.reset_out_keys()(batch).keys()) == set(everything.keys())
        only: Any = loss.select_out_keys("loss_objective")
        torch.testing.assert_close(only(**by_keyword(batch, loss)), everything["loss_objective"])
        with pytest.raises(
            ValueError, match=re.escape("PPOLoss writes no ['loss_actor']; it writes ['loss_obj")
        ):
            loss.select_out_keys("loss_actor")

    def test_what_it_does_not_read(self) -> None:
        loss, batch = PPOLoss(*networks()), rows()
        with pytest.raises(
            TypeError, match=r"PPOLoss reads no entry for the keyword obs: .* named observation, "
        ):
            loss(obs=batch["observation"])
        with pytest.raises(
            KeyError, match=r"PPOLoss: batch has no entry 'advantage': .*make_value_estimator"
        ):
            loss(**by_keyword(batch.exclude("advantage"), loss))
        with pytest.raises(KeyError, match="PPOLoss: batch has no entry 'action_log_prob'"):
            loss(**by_keyword(batch.exclude("action_log_prob"), loss))

    def test_columns_of_one_feature_are_not_taken_for_rows(self) -> None:
        """All tensors are [N, 1]: with a batch [N, 1] a log-probability [N] would broadcast to [N, N]."""
        spread = TensorDictModule(lambda x: (x, torch.ones_like(x)), ["observation"], ["loc", "scale"])
        head = ProbabilisticTensorDictModule(
            ["loc", "scale"],
            ["action"],
            distribution_class=lambda loc, scale: Independent(Normal(loc, scale), 1),
        )
        loss = A2CLoss(ProbabilisticTensorDictSequential(spread, head), entropy_bonus=False)
        columns = {name: torch.rand(5, 1) for name in ("observation", "action", "advantage")}
        for call in (lambda: loss(**columns), lambda: loss(TensorDict(columns, [5, 1]))):
            with pytest.raises(ValueError, match=r"one number per row \[5, 1\], got \(5,\)"):
                call()
        assert loss(TensorDict(columns, [5]))["loss_objective"].shape == ()

    def test_a_loss_of_ones_own_needs_nothing_for_it(self) -> None:
        class Mean(LossModule):
            def __init__(self) -> None:
                super().__init__()
                self.in_keys, self.out_keys = ["x"], ["loss"]

            def forward(self, batch: Any) -> TensorDict:
                return TensorDict({"loss": self.reduce(self.inputs_of(batch), batch["x"])})

        loss = Mean()
        assert loss(x=torch.ones(3, 1)) == loss(torch.ones(3)) == 1.0
        with pytest.raises(
            ValueError, match=re.escape("batch['loss'] must have shape (3,) or (3, 1), got (3, 2)")
        ):
            loss(TensorDict({"x": torch.ones(3, 2)}, [3]))


class TestParameters:
    """``<name>_params``, by which scripts hand networks to optimizers."""

    @pytest.mark.parametrize("functional", [True, False])
    def test_an_optimizer_of_them_trains_the_network(self, functional: bool) -> None:
        actor, critic = networks()
        loss = ClipPPOLoss(actor, critic, functional=functional)
        assert loss.functional is functional
        assert {*loss.critic_network_params.parameters()} == {*critic.parameters()}
        before = [parameter.clone() for parameter in actor.parameters()]
        optimizer = torch.optim.SGD(loss.actor_network_params.flatten_keys().values(), lr=0.1)
        loss(rows())["loss_objective"].backward()
        optimizer.step()
        assert not any(map(torch.equal, before, actor.parameters()))
        assert set(loss.state_dict()) == {
            *(f"actor_network.{name}" for name in actor.state_dict()),
            *(f"critic_network.{name}" for name in critic.state_dict()),
            "entropy_coeff", "critic_coeff", "clip_epsilon",
        }  # fmt: skip

    def test_separate_losses_leave_shared_parameters_to_the_actor(self) -> None:
        actor, _ = networks()
        trunk: Any = actor[0].module
        critic = TensorDictModule(nn.Sequential(trunk, nn.Linear(2, 1)), ["observation"], ["state_value"])
        together, apart = (PPOLoss(actor, critic, separate_losses=x) for x in (False, True))
        assert len([*together.critic_network_params.parameters()]) == 4
        assert [*apart.critic_network_params.parameters()] == [*critic.module[1].parameters()]  # type: ignore[index]
        assert apart.actor_network_params["module", "0", "module", "weight"] is trunk.weight
        assert apart.critic_network_params["module", "0", "weight"].data_ptr() == trunk.weight.data_ptr()

    def test_target_copies(self) -> None:
        loss = dqn()
        key = ("module", "weight")
        assert loss.target_value_network_params[key] is loss.target_value_network.module.weight  # type: ignore[union-attr]
        loss.value_network_params[key].data.add_(1.0)
        SoftUpdate(loss, tau=0.5).step()
        moved = loss.value_network_params[key] - loss.target_value_network_params[key]
        torch.testing.assert_close(moved, torch.full((2, 3), 0.5))
        HardUpdate(loss, value_network_update_interval=1).step()
        torch.testing.assert_close(loss.target_value_network_params[key], loss.value_network_params[key].data)
        assert PPOLoss(networks()[0]).critic_network_params is None

    def test_without_a_copy_the_target_is_the_network_itself(self) -> None:
        actor, critic = networks()
        target = A2CLoss(actor, critic).target_critic_network_params["module", "weight"]
        assert target.data_ptr() == critic.module.weight.data_ptr() and not target.requires_grad  # type: ignore[union-attr, operator]

    def test_an_ensemble_has_an_entry_for_each_critic(self) -> None:
        loss = sac()
        assert {*loss.qvalue_network_params.parameters()} == {*loss.qvalue_network.parameters()}
        assert set(loss.target_qvalue_network_params.keys()) == {"0", "1"}
        assert loss.actor_network_params.is_empty()


class TestCoefficients:
    """Factors that a schedule changes between calls."""

    @pytest.mark.parametrize("way", ["assign", "copy_"])
    @pytest.mark.parametrize(
        ("name", "number", "of"),
        [
            ("entropy_coeff", 0.5, "loss_entropy"),
            ("critic_coeff", 3.0, "loss_critic"),
            ("clip_value", 0.01, "loss_critic"),
            ("clip_epsilon", 0.05, "loss_objective"),
        ],
    )
    def test_a_change_counts_from_the_next_call(self, name: str, number: float, of: str, way: str) -> None:
        batch, options = rows(), {"clip_value": 0.3, "critic_coeff": 1.0}
        loss, expected = (ClipPPOLoss(*networks(), **x) for x in (options, {**options, name: number}))
        before = loss(batch)[of]
        if way == "assign":
            setattr(loss, name, number)
        else:
            getattr(loss, name).copy_(number)
        assert isinstance(getattr(loss, name), Tensor)
        torch.testing.assert_close(loss(batch)[of], expected(batch)[of])
        assert loss(batch)[of] != before
        loss.load_state_dict(ClipPPOLoss(*networks(), **options).state_dict())
        torch.testing.assert_close(loss(batch)[of], before)

    def test_a_pair_of_bounds_is_two_of_them(self) -> None:
        batch = rows()
        loss = ClipPPOLoss(*networks(), clip_epsilon=(0.1, 0.1))
        torch.testing.assert_close(
            loss(batch)["loss_objective"], ClipPPOLoss(*networks(), clip_epsilon=0.1)(batch)["loss_objective"]
        )
        loss.clip_epsilon_high = 2.0
        expected = ClipPPOLoss(*networks(), clip_epsilon=(0.1, 2.0))
        torch.testing.assert_close(loss(batch), expected(batch))
        with pytest.raises(
            AttributeError, match="has clip_epsilon_low and clip_epsilon_high, but no clip_epsilon"
        ):
            loss.clip_epsilon = 0.1
        with pytest.raises(ValueError, match="clip_epsilon_low must be above 0, and below 1"):
            loss.clip_epsilon_low = 1.0
        with pytest.raises(ValueError, match="a pair of numbers"):
            ClipPPOLoss(*networks(), clip_epsilon=(0.1, 0.2, 0.3))

    @pytest.mark.parametrize("kind", [PPOLoss, A2CLoss, ReinforceLoss])
    @pytest.mark.parametrize("bad", [True, "0.2", [0.2], torch.ones(2), float("nan"), -1.0, 0.0])
    def test_bad_clip_values(self, kind: Any, bad: Any) -> None:
        with pytest.raises(
            ValueError, match=r"clip_value(=True| must be a float or a scalar tensor| must be above)"
        ):
            kind(*networks(), clip_value=bad)

    def test_clip_values(self) -> None:
        for value in (0.2, torch.tensor(0.2), torch.tensor([0.2]), True):
            loss = ClipPPOLoss(*networks(), clip_value=value)
            assert loss.clip_value is not None and loss.clip_value.item() == pytest.approx(0.2)
        for value in (None, False):
            assert ClipPPOLoss(*networks(), clip_value=value).clip_value is None
        loss = PPOLoss(*networks(), clip_value=0.2)
        with pytest.raises(KeyError, match="PPOLoss: batch has no entry 'state_value'"):
            loss(rows().exclude("state_value"))
        with pytest.raises(ValueError, match="entropy_coeff must be finite, got inf"):
            loss.entropy_coeff = float("inf")  # type: ignore[assignment]

    @pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
    def test_the_dtype_of_the_losses_stays_that_of_the_networks(self, dtype: torch.dtype) -> None:
        actor, critic = (network.to(dtype) for network in networks())
        batch = rows().apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
        losses = ClipPPOLoss(actor, critic, clip_value=0.1)(batch)
        assert {x.dtype for x in losses.values()} == {dtype}

    def test_no_reduction_said_is_the_mean(self) -> None:
        for kind in (PPOLoss, ReinforceLoss):
            assert kind(*networks(), reduction=None).reduction == "mean"

    def test_reset(self) -> None:
        loss = KLPENPPOLoss(*networks(), beta=0.5, dtarg=1e-6)
        for _ in range(2):
            loss(rows())
        assert loss.beta == 2.0
        loss.reset()
        assert loss.beta == 0.5
        loss.beta = 0.25  # type: ignore[assignment]
        assert loss.beta == 0.25 and isinstance(loss.beta, Tensor)
        dqn().reset()  # adapts nothing


def parts_actor() -> tuple[ProbabilisticTensorDictSequential, TensorDict]:
    """An actor of two actions, and a batch of them."""
    net = TensorDictModule(
        lambda x: (x[..., :2], x, x.exp()),
        ["observation"],
        [("params", "turn", "logits"), ("params", "push", "loc"), ("params", "push", "scale")],
    )
    names: Any = {"turn": ("arm", "turn"), "push": ("leg", "push")}
    arguments = {"distribution_map": {"turn": Categorical, "push": Normal}, "name_map": names}
    choose = ProbabilisticTensorDictModule(
        ["params"], list(names.values()), distribution_class=CompositeDistribution, distribution_kwargs=arguments,
        return_log_prob=True, default_interaction_type=InteractionType.RANDOM,
    )  # fmt: skip
    actor = ProbabilisticTensorDictSequential(net, choose)
    return actor, actor(rows().exclude("action", "action_log_prob", "logits"))


class TestKeys:
    """Names of entries."""

    def test_attributes(self) -> None:
        for thing in (
            ClipPPOLoss(*networks()),
            GAE(gamma=0.9, lmbda=0.9, value_network=networks()[1]),
            dqn(),
        ):
            assert thing.tensor_keys.reward == "reward"
            thing.set_keys(reward=("env", "score"))
            for twin in (thing, copy.deepcopy(thing)):
                assert twin.tensor_keys.reward == twin.tensor_keys["reward"] == ("env", "score")
            with pytest.raises(AttributeError, match="no key is called rewards; the keys are a"):
                _ = thing.tensor_keys.rewards
        assert pickle.loads(pickle.dumps(thing.tensor_keys)).reward == ("env", "score")

    def test_those_of_the_actor_are_taken(self) -> None:
        loss = PPOLoss(*networks(action="act"))
        assert loss.tensor_keys.action == "act" and loss.tensor_keys.sample_log_prob == "act_log_prob"
        torch.testing.assert_close(loss(rows(action="act")), PPOLoss(*networks())(rows()))

    @pytest.mark.parametrize("whole", [True, False])
    def test_an_actor_that_samples_on_the_way(self, whole: bool) -> None:
        """Its distribution is one of both samples, or of the last one."""
        plain, critic = networks(action="act")
        spread = TensorDictModule(lambda x: (x, torch.ones_like(x)), ["seen"], ["loc", "scale"])
        blur = ProbabilisticTensorDictModule(["loc", "scale"], ["observation"], distribution_class=Normal)
        loss = PPOLoss(
            ProbabilisticTensorDictSequential(spread, blur, *plain, return_composite=whole), critic
        )
        batch = rows(action="act")
        batch["seen"], batch["observation_log_prob"] = torch.randn(6, 3), torch.zeros(6, 3)
        assert loss(batch)["loss_objective"].isfinite()
        if whole:
            assert set(loss.tensor_keys.action) == {"act", "observation"}
            with pytest.raises(KeyError, match="PPOLoss: batch has no entry 'observation_log_prob'"):
                loss(batch.exclude("observation_log_prob"))
        else:
            assert loss.tensor_keys.action == "act" and loss.tensor_keys.sample_log_prob == "act_log_prob"

    def test_sample_log_prob(self) -> None:
        batch = rows().rename_key_("action_log_prob", "sampled")
        loss = ClipPPOLoss(*networks())
        loss.set_keys(sample_log_prob="sampled")
        torch.testing.assert_close(loss(batch), ClipPPOLoss(*networks())(rows()))

    def test_lists_for_an_action_of_parts(self) -> None:
        with set_composite_lp_aggregate(False):
            actor, batch = parts_actor()
            loss = PPOLoss(actor)
            expected = loss(batch)
            assert loss.tensor_keys.action == [("arm", "turn"), ("leg", "push")]
            renamed = batch.rename_key_(("arm", "turn_log_prob"), "one").rename_key_(
                ("leg", "push_log_prob"), "two"
            )
            loss.set_keys(sample_log_prob=["one", "two"])
            torch.testing.assert_close(loss(renamed), expected)
            assert {"one", "two", ("arm", "turn"), ("leg", "push")} <= set(loss.in_keys)
            with pytest.raises(KeyError, match="PPOLoss: batch has no entry 'two'"):
                loss(renamed.exclude("two"))
            with pytest.raises(KeyError, match=re.escape("PPOLoss: batch has no entry ('arm', 'turn')")):
                loss(batch.exclude(("arm", "turn")))
            loss.set_keys(sample_log_prob=["one"])
            assert loss.tensor_keys.sample_log_prob == "one"

    def test_vtrace_takes_actions_of_parts(self) -> None:
        with set_composite_lp_aggregate(False):
            actor, batch = parts_actor()
            critic = networks()[1]
            found = A2CLoss(actor, critic).make_value_estimator("vtrace")(
                batch.exclude("advantage", "value_target")
            )
            log_prob = batch["arm", "turn_log_prob"] + batch["leg", "push_log_prob"].sum(-1)
            whole = batch.exclude(("arm", "turn_log_prob"), ("leg", "push_log_prob")).set("sum", log_prob)
            estimator = VTrace(gamma=0.99, actor_network=actor, value_network=critic)
            estimator.set_keys(sample_log_prob=["sum"])
            torch.testing.assert_close(A2CLoss(actor, critic)(estimator(whole)), found)

    @pytest.mark.parametrize("suffix", ["", "_log_prob"])
    def test_a_coefficient_of_the_entropy_for_each_part(self, suffix: str) -> None:
        with set_composite_lp_aggregate(False):
            actor, batch = parts_actor()
            found = PPOLoss(
                actor, entropy_coeff={("arm", f"turn{suffix}"): 0.1, ("leg", f"push{suffix}"): 0.01}
            )(batch)
            observation = batch["observation"]
            turn, push = Categorical(logits=observation[:, :2]), Normal(observation, observation.exp())
            expected = 0.1 * turn.entropy() + 0.01 * push.entropy().sum(-1)
            torch.testing.assert_close(found["loss_entropy"], -expected.mean())
            with pytest.raises(
                KeyError, match=re.escape("has no number for the action's part ('leg', 'push')")
            ):
                PPOLoss(actor, entropy_coeff={("arm", "turn"): 0.1})(batch)
            with pytest.raises(KeyError, match=r"names \['foot'\], but the action's parts are"):
                PPOLoss(actor, entropy_coeff={("arm", "turn"): 0.1, ("leg", "push"): 0.1, "foot": 1.0})(batch)
        batch = rows()
        torch.testing.assert_close(
            PPOLoss(*networks(), entropy_coeff={"action": 0.3})(batch),
            PPOLoss(*networks(), entropy_coeff=0.3)(batch),
        )
        for bad in ({}, {"action": float("nan")}, {"action": True}):
            with pytest.raises(ValueError, match="entropy_coeff"):
                PPOLoss(*networks(), entropy_coeff=bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [-1.0, float("nan"), float("inf")])
def test_weights_that_are_none(bad: float) -> None:
    loss, batch = dqn(), rows()
    batch["priority_weight"] = torch.ones(6)
    batch["priority_weight"][2] = bad
    with pytest.raises(ValueError, match="DQNLoss: weights of rows must be finite and at least 0, got "):
        loss(batch)
    batch["collector", "mask"] = torch.arange(6) != 2  # where no row counts, anything may stand
    assert loss(batch)["loss"].isfinite()
