"""Actions so close to -1 and 1 that float32 has lost what tanh made them of: the log-probability is the sample's."""

import math
import warnings
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    CompositeDistribution,
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal, TanhTransform, TransformedDistribution

from flatroll.estimators import A2CLoss, DiscreteSACLoss, PPOLoss, SACLoss, VTrace
from flatroll.rollouts import Collector

SCALE = 0.3


class Squashed(TransformedDistribution):
    def __init__(self, loc: Tensor, scale: Tensor, cache: int = 0) -> None:
        super().__init__(Independent(Normal(loc, scale), 1), TanhTransform(cache_size=cache))


class Cached(Squashed):
    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(loc, scale, cache=1)


class OfRows(Independent):
    def __init__(self, loc: Tensor, scale: Tensor) -> None:
        super().__init__(TransformedDistribution(Normal(loc, scale), TanhTransform()), 1)


def torchrl(loc: Tensor, scale: Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing torchrl warns about packages that are not there
        modules: Any = pytest.importorskip("torchrl.modules")
    return modules.TanhNormal(loc, scale)


KINDS = [Squashed, Cached, OfRows, torchrl]


def actor(kind: Any, loc: float, *, keep: bool = True) -> ProbabilisticTensorDictSequential:
    """An actor of two numbers that learns a shift of ``loc``."""
    net = nn.Linear(3, 2)
    nn.init.zeros_(net.weight)
    nn.init.constant_(net.bias, loc)
    params: Any = TensorDictModule(net, ["observation"], ["loc"])
    spread: Any = TensorDictModule(lambda x: torch.full_like(x, SCALE), ["loc"], ["scale"])
    head: Any = ProbabilisticTensorDictModule(
        ["loc", "scale"],
        ["action"],
        distribution_class=kind,
        return_log_prob=keep,
        default_interaction_type=InteractionType.RANDOM,
    )
    return ProbabilisticTensorDictSequential(params, spread, head)


def critic() -> TensorDictModule:
    def worth(observation: Tensor, action: Any) -> Tensor:
        parts = [action] if isinstance(action, Tensor) else list(action.values())
        return sum(part.sum(-1, keepdim=True) for part in parts) + 0 * observation[..., :1]  # type: ignore[no-any-return]

    return TensorDictModule(worth, ["observation", "action"], ["state_action_value"])


def transitions(rows: int = 256) -> TensorDict:
    over = torch.zeros(rows, 1, dtype=torch.bool)
    seen, after = torch.zeros(rows, 3), torch.zeros(rows, 3)
    following = {"observation": after, "reward": torch.zeros(rows, 1), "done": over, "terminated": over}
    return TensorDict({"observation": seen, "action": torch.ones(rows, 2), "next": following}, [rows])


def entropy(loc: float) -> float:
    """Entropy of two numbers of a tanh-Normal far from 0, whose ``log (1 - tanh(u)^2)`` is ``log 4 - 2 u``."""
    of_normal = 0.5 + 0.5 * math.log(2 * math.pi) + math.log(SCALE)
    return 2 * (of_normal + math.log(4) - 2 * loc)


class Still(gym.Env[Any, Any]):
    observation_space = gym.spaces.Box(-1, 1, (3,))
    action_space = gym.spaces.Box(-1, 1, (2,))

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        return np.zeros(3, np.float32), {}

    def step(self, action: Any) -> Any:
        return np.zeros(3, np.float32), 1.0, False, False, {}


def collected(policy: Any, **options: Any) -> TensorDict:
    env = gym.vector.SyncVectorEnv([Still] * 2)
    torch.manual_seed(0)
    with Collector(env, policy, frames_per_batch=64, total_frames=64, seed=0, **options) as collector:
        return next(iter(collector))


@pytest.mark.parametrize("loc", [8.0, 9.0, 12.0, 20.0, 50.0])
@pytest.mark.parametrize("kind", KINDS)
def test_sac_scores_the_sample(kind: Any, loc: float) -> None:
    loss = SACLoss(actor(kind, loc), critic(), num_qvalue_nets=1, alpha_init=1.0)
    torch.manual_seed(0)
    out = loss(transitions())
    assert out["entropy"] == pytest.approx(entropy(loc), abs=0.15)
    # the actor gains entropy alone, d(2 u) / d loc = 2 of each number, as its action does not change any more
    out["loss_actor"].backward()
    bias = loss.actor_network[0].module.bias
    torch.testing.assert_close(bias.grad, torch.full((2,), 2.0), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_estimates_of_entropy(kind: Any) -> None:
    batch = transitions().set("advantage", torch.zeros(256, 1)).set("action", torch.zeros(256, 2))
    torch.manual_seed(0)
    assert A2CLoss(actor(kind, 12.0))(batch)["entropy"] == pytest.approx(entropy(12.0), abs=0.15)


@pytest.mark.parametrize("loc", [0.5, 12.0])
@pytest.mark.parametrize("kind", KINDS)
def test_a_collector_keeps_what_the_action_was_made_of(kind: Any, loc: float) -> None:
    policy = actor(kind, loc)
    batch = collected(policy)
    base = batch["base_sample", "action"]
    assert -batch["action_log_prob"].mean() == pytest.approx(entropy(loc), abs=0.5) or loc < 1
    torch.testing.assert_close(base.tanh(), batch["action"], rtol=1e-5, atol=2e-6)
    batch["advantage"] = torch.randn(64, 1)
    out = PPOLoss(policy)(batch)
    assert out["max_ratio"] == pytest.approx(1.0, abs=1e-3) and out["kl_approx"].abs() < 1e-4
    # d log p / d loc is the noise over the scale
    expected = -(batch["advantage"] * (base - loc) / SCALE**2).mean(0)
    A2CLoss(policy)(batch)["loss_objective"].backward()
    bias = policy[0].module.bias
    torch.testing.assert_close(bias.grad, expected, rtol=1e-3, atol=1e-3)
    values = TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"])
    advantage = VTrace(gamma=0.9, actor_network=policy, value_network=values)(batch)["advantage"]
    assert advantage.isfinite().all()


def test_torchrls_actor_keeps_it_too() -> None:
    policy = actor(torchrl, 12.0)
    ProbabilisticActor = pytest.importorskip("torchrl.modules").ProbabilisticActor

    theirs = ProbabilisticActor(
        policy[:-1],
        in_keys=["loc", "scale"],
        distribution_class=torchrl,
        return_log_prob=True,
        default_interaction_type=InteractionType.RANDOM,
    )
    batch = collected(theirs).set("advantage", torch.ones(64, 1))
    assert PPOLoss(theirs)(batch)["max_ratio"] == pytest.approx(1.0, abs=1e-3)


def test_an_action_that_has_changed_is_scored_as_it_is() -> None:
    policy = actor(Squashed, 0.2)
    batch = collected(policy)
    batch["action"][::2] = 0.5
    batch["advantage"] = torch.ones(64, 1)
    expected = A2CLoss(policy)(batch.exclude("base_sample"))
    torch.testing.assert_close(A2CLoss(policy)(batch)["loss_objective"], expected["loss_objective"])


def test_a_policy_without_log_probabilities_keeps_nothing() -> None:
    assert "base_sample" not in collected(actor(Squashed, 0.2, keep=False)).keys()  # noqa: SIM118


@pytest.mark.parametrize("kind", [Squashed, torchrl])
def test_a_batch_without_it_is_told_of(kind: Any) -> None:
    batch = collected(actor(kind, 12.0)).exclude("base_sample").set("advantage", torch.ones(64, 1))
    loss = A2CLoss(actor(kind, 12.0))
    with pytest.warns(
        UserWarning, match=r"128 of 128 numbers of the batch's actions .* return_log_prob=True"
    ):
        loss(batch)
    loss(batch)  # a second warning would be an error here


def composite(**parts: Any) -> ProbabilisticTensorDictSequential:
    """An actor of a part for each name; a tanh-Normal at 12, or a categorical distribution."""

    def params(observation: Tensor) -> tuple[Tensor, ...]:
        rows = observation.shape[0]
        at = {"logits": torch.zeros(rows, 2), "loc": torch.full((rows, 2), 12.0) + 0 * shift}
        return tuple(at.get(key[-1], torch.full((rows, 2), SCALE)) for key in keys)

    shift = nn.Parameter(torch.zeros(2))
    keys: list[Any] = [
        ("params", part, name)
        for part, kind in parts.items()
        for name in (["logits"] if kind is Categorical else ["loc", "scale"])
    ]
    names = {part: ("action", part) for part in parts}
    head: Any = ProbabilisticTensorDictModule(
        ["params"],
        list(names.values()),
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": parts, "name_map": names},
    )
    net: Any = TensorDictModule(params, ["observation"], keys)
    return ProbabilisticTensorDictSequential(net, head)


def test_sac_takes_an_action_of_parts() -> None:
    batch = transitions().exclude("action")
    batch["action"] = TensorDict({"arm": torch.ones(256, 2), "leg": torch.ones(256, 2)}, [256])
    loss = SACLoss(composite(arm=Squashed, leg=torchrl), critic(), num_qvalue_nets=1)
    torch.manual_seed(0)
    out = loss(batch)
    assert out["entropy"] == pytest.approx(2 * entropy(12.0), abs=0.3)
    # target_entropy="auto": minus the four numbers of both parts
    torch.testing.assert_close(out["loss_alpha"].detach(), loss.log_alpha.detach() * (out["entropy"] + 4))
    with pytest.raises(TypeError, match="Categorical has no rsample: for discrete actions"):
        SACLoss(composite(arm=Squashed, leg=Categorical), critic(), num_qvalue_nets=1)(batch)


def test_a_part_that_the_actor_declares_as_one_action() -> None:
    """TorchRL's composite actors write the part ``"arm"`` of an action under ``("action", "arm")``."""
    whole = composite(arm=Squashed)
    head: Any = ProbabilisticTensorDictModule(
        ["params"],
        ["action"],
        distribution_class=CompositeDistribution,
        distribution_kwargs={"distribution_map": {"arm": Squashed}},
    )
    parts: list[Any] = [whole[0], head]
    batch = transitions().exclude("action")
    batch["action"] = TensorDict({"arm": torch.ones(256, 2)}, [256])
    out = SACLoss(ProbabilisticTensorDictSequential(*parts), critic(), num_qvalue_nets=1)(batch)
    assert out["entropy"] == pytest.approx(entropy(12.0), abs=0.15)


def test_masked_choices_of_discrete_sac() -> None:
    """An action that is masked out has the logit -inf, and counts nowhere."""

    def logits(observation: Tensor) -> Tensor:
        return torch.stack([shift, 0 * shift, shift - math.inf]).expand(len(observation), 3)

    shift = nn.Parameter(torch.tensor(0.0))
    parts: list[Any] = [
        TensorDictModule(logits, ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(["logits"], ["action"], distribution_class=Categorical),
    ]
    values = TensorDictModule(lambda x: torch.ones(len(x), 3), ["observation"], ["action_value"])
    batch = transitions().set("action", torch.zeros(256, dtype=torch.int64))
    out = DiscreteSACLoss(ProbabilisticTensorDictSequential(*parts), [values], alpha_init=3.0)(batch)
    assert out["entropy"] == pytest.approx(math.log(2.0)) and out["loss_qvalue"].isfinite()
    assert out["loss_actor"].detach() == pytest.approx(-3.0 * math.log(2.0) - 1.0)
    out["loss_actor"].backward()
    assert shift.grad == pytest.approx(0.0, abs=1e-6)
