"""Soft actor-critic: targets by hand, which network each loss moves, ensembles, refusals."""

import math
import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal

from flatroll.estimators import DiscreteSACLoss, HardUpdate, SACLoss
from flatroll.modules import GRUModule

ROWS = 10


class Gaussian(Independent):
    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(Normal(loc, scale), 1)


def continuous_actor(scale: float = 0.1, reads: str = "observation") -> ProbabilisticTensorDictSequential:
    net = nn.Linear(3 if reads == "observation" else 4, 2)
    loc = TensorDictModule(net, [reads], ["loc"])
    spread = TensorDictModule(lambda x: torch.full_like(x, scale), ["loc"], ["scale"])
    choose = ProbabilisticTensorDictModule(["loc", "scale"], ["action"], distribution_class=Gaussian)
    return ProbabilisticTensorDictSequential(loc, spread, choose)


def discrete_actor() -> ProbabilisticTensorDictSequential:
    choose = ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical)
    net = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
    return ProbabilisticTensorDictSequential(net, choose)


class StateAction(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        self.net = nn.Linear(size + 2, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.net(torch.cat([observation, action], -1))


def continuous_critic(reads: str = "observation") -> TensorDictModule:
    net = StateAction(3 if reads == "observation" else 4)
    return TensorDictModule(net, [reads, "action"], ["state_action_value"])


def discrete_critic() -> TensorDictModule:
    return TensorDictModule(nn.Linear(3, 4), ["observation"], ["action_value"])


def transitions(discrete: bool = False) -> TensorDict:
    torch.manual_seed(0)
    done = torch.arange(ROWS).unsqueeze(1) % 3 == 0
    return TensorDict(
        {
            "observation": torch.randn(ROWS, 3),
            "action": torch.randint(4, (ROWS,)) if discrete else torch.randn(ROWS, 2),
            "next": {
                "observation": torch.randn(ROWS, 3),
                "reward": torch.randn(ROWS, 1),
                "done": done,
                "terminated": done & (torch.arange(ROWS).unsqueeze(1) % 2 == 0),
            },
        },
        [ROWS],
    )


def made(discrete: bool, **options: Any) -> tuple[SACLoss | DiscreteSACLoss, TensorDict]:
    torch.manual_seed(0)
    if discrete:
        return DiscreteSACLoss(discrete_actor(), discrete_critic(), **options), transitions(True)
    return SACLoss(continuous_actor(), continuous_critic(), **options), transitions()


each_kind = pytest.mark.parametrize("discrete", [False, True])


def test_continuous_by_hand() -> None:
    """An actor that is as good as certain, so that its action is known."""
    torch.manual_seed(0)
    actor = continuous_actor(scale=1e-6)
    critics: list[TensorDictModuleBase] = [continuous_critic() for _ in range(3)]
    loss = SACLoss(actor, critics, alpha_init=0.2, loss_function="l2", reduction="none")
    batch = transitions()
    loss.make_value_estimator(gamma=0.9)
    out = loss(batch)
    act = actor[0].module
    log_prob = 2 * (-math.log(1e-6) - math.log(2 * math.pi) / 2)  # give or take the draw
    with torch.no_grad():
        after, seen = batch["next", "observation"], batch["observation"]
        following = torch.stack([critic.module(after, act(after)) for critic in critics]).amin(0)
        target = batch["next", "reward"] + 0.9 * (following - 0.2 * log_prob) * ~batch["next", "terminated"]
        errors = [(critic.module(seen, batch["action"]) - target).squeeze(1) for critic in critics]
        squares = torch.stack(errors).square().sum(0)
        of_actor = torch.stack([critic.module(seen, act(seen)) for critic in critics]).amin(0).squeeze(1)
    torch.testing.assert_close(out["loss_qvalue"], squares, rtol=0.5, atol=0.5)
    torch.testing.assert_close(out["loss_actor"], 0.2 * log_prob - of_actor, rtol=0.1, atol=1.0)
    torch.testing.assert_close(batch["td_error"], torch.stack(errors).abs().amax(0), rtol=0.1, atol=0.5)
    assert out["alpha"].item() == pytest.approx(0.2)


def test_discrete_by_hand() -> None:
    torch.manual_seed(0)
    actor = discrete_actor()
    critics: list[TensorDictModuleBase] = [discrete_critic() for _ in range(2)]
    loss = DiscreteSACLoss(actor, critics, alpha_init=0.2, loss_function="l2", reduction="none")
    batch = transitions(discrete=True)
    out = loss.make_value_estimator(gamma=0.9)(batch)
    with torch.no_grad():
        for i in range(ROWS):
            after, seen = batch["next", "observation"][i], batch["observation"][i]
            p, q = actor[0].module(after).softmax(-1), torch.minimum(*(c.module(after) for c in critics))
            worth = sum(p[a] * (q[a] - 0.2 * p[a].log()) for a in range(4))
            target = batch["next", "reward"][i, 0] + 0.9 * worth * ~batch["next", "terminated"][i, 0]
            values = [critic.module(seen)[batch["action"][i]] for critic in critics]
            squares = sum((value - target) ** 2 for value in values)
            assert out["loss_qvalue"][i].item() == pytest.approx(float(squares), rel=1e-4)
            error = max(abs(value - target) for value in values)
            assert batch["td_error"][i].item() == pytest.approx(float(error), rel=1e-4)
            p, q = actor[0].module(seen).softmax(-1), torch.minimum(*(c.module(seen) for c in critics))
            actors = sum(p[a] * (0.2 * p[a].log() - q[a]) for a in range(4))
            assert out["loss_actor"][i].item() == pytest.approx(float(actors), rel=1e-4)
            entropy = -(p * p.log()).sum()
            alpha = math.log(0.2) * (entropy - 0.98 * math.log(4))
            assert out["loss_alpha"][i].item() == pytest.approx(float(alpha), abs=1e-5)


@each_kind
def test_each_loss_moves_its_own_network(discrete: bool) -> None:
    loss, batch = made(discrete)
    own = {
        "loss_actor": loss.actor_network,
        "loss_qvalue": loss.qvalue_network,
        "loss_alpha": loss.log_alpha,
    }
    for name in own:
        for parameter in loss.parameters():
            parameter.grad = None
        loss(batch)[name].backward()
        for other, holder in own.items():
            parameters = list(holder.parameters()) if isinstance(holder, nn.Module) else [holder]
            moved = [parameter.grad is not None and bool(parameter.grad.any()) for parameter in parameters]
            assert all(moved) if other == name else not any(moved), (name, other)
    assert all(parameter.requires_grad for parameter in loss.qvalue_network.parameters())


@each_kind
def test_what_is_written(discrete: bool) -> None:
    loss, batch = made(discrete)
    out = loss(batch)
    assert set(out.keys()) == set(loss.out_keys)
    assert all(number.shape == () for number in out.values())
    assert batch["td_error"].shape == (ROWS,) and not batch["td_error"].requires_grad
    assert set(batch.keys()) == {"observation", "action", "next", "td_error"}


@each_kind
def test_rows_that_do_not_count(discrete: bool) -> None:
    loss, batch = made(discrete, reduction="none", target_entropy=0.5)
    torch.manual_seed(1)
    rows = loss(batch)
    batch["shifted_valid"] = torch.arange(ROWS) % 2 == 0
    batch["next", "observation"][4] = torch.nan  # what follows is not known
    keep = batch["shifted_valid"] & (torch.arange(ROWS) != 4)
    torch.manual_seed(1)
    out = loss(batch)
    for name in ("loss_actor", "loss_qvalue", "loss_alpha"):
        torch.testing.assert_close(out[name], torch.where(keep, rows[name], 0.0))
    assert batch["td_error"][4] == 0.0
    loss.reduction = "mean"
    torch.manual_seed(1)
    torch.testing.assert_close(loss(batch)["loss_qvalue"], rows["loss_qvalue"][keep].mean())


@each_kind
def test_a_single_network_is_copied_and_initialised_anew(discrete: bool) -> None:
    loss, _ = made(discrete, num_qvalue_nets=3)
    members = list(loss.qvalue_network)
    first = [next(member.parameters()) for member in members]
    assert len(members) == 3
    assert not torch.equal(first[0], first[1]) and not torch.equal(first[1], first[2])

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(4))

        def forward(self, x: Tensor) -> Tensor:
            return self.scale * x.sum(-1, keepdim=True)

    odd = TensorDictModule(Odd(), ["observation"], ["action_value"])
    with pytest.raises(ValueError, match=r"Odd, whose parameters cannot be re-initialised .*pass a list"):
        DiscreteSACLoss(discrete_actor(), odd)
    DiscreteSACLoss(discrete_actor(), [odd, odd])
    DiscreteSACLoss(discrete_actor(), odd, num_qvalue_nets=1)


@each_kind
def test_delayed_networks(discrete: bool) -> None:
    loss, _ = made(discrete, delay_actor=True)
    assert set(loss.delayed_networks()) == {"qvalue_network", "actor_network"}
    with torch.no_grad():
        for parameter in loss.qvalue_network.parameters():
            parameter.add_(1.0)
    assert loss.target_qvalue_network is not None
    pairs = list(zip(loss.qvalue_network.parameters(), loss.target_qvalue_network.parameters(), strict=True))
    assert not any(torch.equal(*pair) for pair in pairs)
    HardUpdate(loss, value_network_update_interval=1).step()
    assert all(torch.equal(*pair) for pair in pairs)
    loss, batch = made(discrete, delay_qvalue=False)
    assert loss.delayed_networks() == {}
    loss(batch)["loss_qvalue"].backward()


@each_kind
def test_alpha(discrete: bool) -> None:
    loss, batch = made(discrete, alpha_init=0.5, fixed_alpha=True)
    assert "log_alpha" not in dict(loss.named_parameters()) and "log_alpha" in loss.state_dict()
    total = loss(batch).select("loss_actor", "loss_qvalue", "loss_alpha").sum(reduce=True)
    total.backward()
    loss, batch = made(discrete, alpha_init=0.5, min_alpha=0.2, max_alpha=0.6)
    loss.log_alpha.data.fill_(3.0)
    assert loss(batch)["alpha"].item() == pytest.approx(0.6)
    loss.log_alpha.data.fill_(-9.0)
    assert loss(batch)["alpha"].item() == pytest.approx(0.2)
    low, high = made(discrete, target_entropy=-100.0)[0], made(discrete, target_entropy=100.0)[0]
    for aimed, sign in ((low, 1.0), (high, -1.0)):
        aimed(batch)["loss_alpha"].backward()
        assert aimed.log_alpha.grad is not None and aimed.log_alpha.grad.sign().item() == sign


def test_values_without_a_trailing_dim() -> None:
    class Bare(nn.Module):
        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net = net

        def forward(self, *columns: Tensor) -> Tensor:
            return self.net(*columns).squeeze(-1)

    loss, batch = made(False)
    bare = [TensorDictModule(Bare(c.module), c.in_keys, c.out_keys) for c in loss.qvalue_network]
    outs = []
    for each in (loss, SACLoss(loss.actor_network, bare)):
        torch.manual_seed(1)
        outs.append(each(batch.clone()).to_dict())
    torch.testing.assert_close(*outs)


def test_a_shared_trunk() -> None:
    torch.manual_seed(0)
    trunk = TensorDictModule(nn.Linear(3, 4), ["observation"], ["features"])
    actor = ProbabilisticTensorDictSequential(trunk, *continuous_actor(reads="features"))
    critic = continuous_critic(reads="features")
    batch = transitions()
    loss = SACLoss(actor, critic)
    loss(batch)["loss_qvalue"].backward()
    assert trunk.module.weight.grad is not None
    trunk.module.weight.grad = None
    apart = SACLoss(actor, critic, separate_losses=True)
    apart(batch)["loss_qvalue"].backward()
    assert trunk.module.weight.grad is None
    whole = SACLoss(actor, TensorDictSequential(trunk, critic), separate_losses=True, num_qvalue_nets=1)
    whole(batch)["loss_qvalue"].backward()
    assert trunk.module.weight.grad is None and critic.module.net.weight.grad is not None
    assert all(parameter.requires_grad for parameter in trunk.parameters())


def test_wrong_networks() -> None:
    with pytest.raises(TypeError, match="actor_network must be a tensordict module with get_dist"):
        SACLoss(continuous_critic(), continuous_critic())
    with pytest.raises(
        TypeError, match=r"qvalue_network of a loss\) must be a tensordict module or a list of them"
    ):
        SACLoss(continuous_actor(), nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match="Categorical has no rsample: for discrete actions use DiscreteSACLoss"
    ):
        SACLoss(discrete_actor(), discrete_critic())(transitions(True))
    with pytest.raises(TypeError, match=r"needs a distribution with logits, e.g. Categorical, got Gaussian"):
        DiscreteSACLoss(continuous_actor(), discrete_critic())(transitions(True))
    memory = GRUModule(3, 4, in_key="observation", out_key="features")
    recurrent = TensorDictSequential(memory, continuous_critic(reads="features"))
    with pytest.raises(
        TypeError, match="SACLoss reads rows independently, but a recurrent module needs the preceding rows"
    ):
        SACLoss(continuous_actor(), recurrent)
    silent = TensorDictModule(StateAction(), ["observation", "action"], ["q"])
    with pytest.raises(
        KeyError, match=re.escape("wrote no entry 'state_action_value': its out_keys are ['q']")
    ):
        SACLoss(continuous_actor(), silent)(transitions())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"num_qvalue_nets": 0}, "num_qvalue_nets must be an integer of at least 1, got 0"),
        ({"alpha_init": 0.0}, "alpha_init must be above 0"),
        ({"alpha_init": 2.0, "max_alpha": 1.0}, "between min_alpha and max_alpha, got 2.0, None and 1.0"),
        ({"target_entropy": "low"}, "target_entropy must be a number or 'auto', got 'low'"),
        ({"loss_function": "huber"}, "loss_function must be 'l1', 'l2' or 'smooth_l1', got 'huber'"),
    ],
    ids=lambda x: "-".join(x) if isinstance(x, dict) else "",
)
def test_bad_arguments(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        SACLoss(continuous_actor(), continuous_critic(), **options)


@each_kind
@pytest.mark.parametrize(
    "missing", ["action", ("next", "reward"), ("next", "terminated"), ("next", "observation")]
)
def test_missing_entries(discrete: bool, missing: Any) -> None:
    loss, batch = made(discrete)
    with pytest.raises(KeyError, match=re.escape(f"batch has no entry {missing!r}")):
        loss(batch.exclude(missing))


def test_values_that_the_acting_network_wrote_are_not_the_critics() -> None:
    batch = transitions(discrete=True).set("action_value", torch.zeros(ROWS, 4))
    critic = TensorDictModule(nn.Linear(3, 4), ["observation"], ["worth"])
    with pytest.raises(KeyError, match=r"wrote no entry 'action_value': its out_keys are \['worth'\]"):
        DiscreteSACLoss(discrete_actor(), critic)(batch)


def test_a_tensor_for_target_entropy() -> None:
    loss, batch = made(False, target_entropy=torch.tensor(-2.0), alpha_init=0.5)
    expected = made(False, target_entropy=-2.0, alpha_init=0.5)[0]
    for number in (-2.0, -3.0):
        loss.target_entropy.fill_(number)  # a buffer, which a schedule may change
        expected.target_entropy = number
        losses = []
        for each in (loss, expected):
            each.load_state_dict(loss.state_dict(), strict=False)
            torch.manual_seed(1)
            losses.append(each(batch)["loss_alpha"])
        torch.testing.assert_close(*losses)
    assert loss.state_dict()["target_entropy"] == -3.0


@each_kind
def test_delays_are_attributes_and_scripts_may_name_the_log_probability(discrete: bool) -> None:
    loss, _ = made(discrete, delay_actor=True, delay_qvalue=False)
    assert loss.delay_actor and not loss.delay_qvalue
    assert discrete or loss.delay_value
    loss.set_keys(log_prob="log_p", value="worth")
    assert (loss.tensor_keys.log_prob, loss.tensor_keys.value) == ("log_p", "worth")


def test_the_action_has_the_key_that_the_actor_writes() -> None:
    net = TensorDictModule(lambda x: (x, torch.ones_like(x)), ["observation"], ["loc", "scale"])
    choose = ProbabilisticTensorDictModule(["loc", "scale"], ["act"], distribution_class=Gaussian)
    parts: list[Any] = [net, choose]
    value = TensorDictModule(
        lambda o, a: (o + a).sum(-1, keepdim=True), ["observation", "act"], ["state_action_value"]
    )
    loss = SACLoss(ProbabilisticTensorDictSequential(*parts), [value])
    batch = transitions().exclude("action").set("act", torch.zeros(ROWS, 3))
    assert loss(batch)["loss_qvalue"].isfinite() and loss.tensor_keys.action == "act"
