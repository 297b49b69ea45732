"""The same losses and gradients as torchrl where torchrl is right."""

import warnings
from types import ModuleType
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
)
from tensordict.nn.distributions import NormalParamExtractor
from torch import Tensor, nn
from torch.distributions import Categorical

import flatroll.estimators as ours

CLOSE = {"rtol": 1e-4, "atol": 1e-4}
ROWS = 64

# the peer's losses warn when no updater of theirs moves their targets
pytestmark = pytest.mark.filterwarnings("ignore:No target network updater:UserWarning")


@pytest.fixture(scope="module")
def theirs() -> ModuleType:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing torchrl warns about packages that are not there
        pytest.importorskip("torchrl")
        import torchrl.modules
        import torchrl.objectives

        module: ModuleType = torchrl.objectives
    return module


@pytest.fixture
def batch() -> TensorDict:
    torch.manual_seed(0)
    done = torch.rand(ROWS, 1) < 0.3
    return TensorDict(
        {
            "observation": torch.randn(ROWS, 3),
            "action": torch.randint(4, (ROWS,)),
            "action_log_prob": -torch.rand(ROWS) - 0.8,
            "logits": torch.randn(ROWS, 4),
            "advantage": torch.randn(ROWS, 1),
            "value_target": torch.randn(ROWS, 1),
            "state_value": torch.randn(ROWS, 1),
            "next": {
                "observation": torch.randn(ROWS, 3),
                "reward": torch.randn(ROWS, 1),
                "done": done,
                "terminated": done & (torch.rand(ROWS, 1) < 0.5),
            },
        },
        [ROWS],
    )


def mlp(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Linear(inputs, 16), nn.Tanh(), nn.Linear(16, outputs))


def discrete_actor() -> ProbabilisticTensorDictSequential:
    choose = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    net = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
    return ProbabilisticTensorDictSequential(net, choose)


def critic_network() -> TensorDictModule:
    return TensorDictModule(mlp(3, 1), ["observation"], ["state_value"])


def evaluated(
    loss: nn.Module, batch: TensorDictBase, *networks: nn.Module
) -> tuple[TensorDict, list[Tensor], TensorDictBase]:
    """The losses, the gradients of their sum, and the batch as the loss left it."""
    batch = batch.clone()
    parameters = [parameter for network in networks for parameter in network.parameters()]
    for parameter in parameters:
        parameter.grad = None
    torch.manual_seed(1)
    out = loss(batch)
    sum(out[key] for key in out.keys() if key.startswith("loss")).backward()  # noqa: SIM118
    grads = [parameter.grad for parameter in parameters]
    assert all(grad is not None for grad in grads)
    return out, [grad.clone() for grad in grads if grad is not None], batch


def assert_same(out: TensorDict, expected: TensorDict) -> None:
    for key in expected.keys():  # noqa: SIM118
        number = expected[key].float().mean()  # the peer leaves some diagnostics unreduced
        torch.testing.assert_close(out[key], number, **CLOSE)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("PPOLoss", {}),
        ("PPOLoss", {"normalize_advantage": True, "clip_value": 0.2, "critic_coeff": 0.5}),
        ("ClipPPOLoss", {"clip_epsilon": (0.1, 0.3), "loss_critic_type": "l2"}),
        ("KLPENPPOLoss", {"dtarg": 0.5, "beta": 0.7}),  # near the divergence, so that beta stays
        ("A2CLoss", {}),
        ("A2CLoss", {"clip_value": 0.1, "loss_critic_type": "l1", "entropy_coeff": 0.1}),
        ("ReinforceLoss", {}),
        ("ReinforceLoss", {"clip_value": 0.1, "loss_critic_type": "l2"}),
    ],
    ids=lambda x: x if isinstance(x, str) else "-".join(x) or "default",
)
def test_policy_losses(theirs: ModuleType, batch: TensorDict, name: str, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    networks = discrete_actor(), critic_network()
    expected, their_grads, _ = evaluated(getattr(theirs, name)(*networks, **options), batch, *networks)
    out, grads, _ = evaluated(getattr(ours, name)(*networks, **options), batch, *networks)
    assert_same(out, expected)
    torch.testing.assert_close(grads, their_grads, **CLOSE)


@pytest.mark.parametrize("their_kind", ["TD0", "TD1", "TDLambda", "GAE"])  # their VTrace weighs other actions
@pytest.mark.parametrize("name", ["ClipPPOLoss", "A2CLoss", "ReinforceLoss"])
def test_advantages_that_the_loss_computes(
    theirs: ModuleType, batch: TensorDict, name: str, their_kind: str
) -> None:
    batch = batch.exclude("advantage", "value_target", "state_value")
    batch["next", "done"][-1] = True
    batch["next", "truncated"] = batch["next", "done"] & ~batch["next", "terminated"]
    networks = discrete_actor(), critic_network()
    peer, loss = getattr(theirs, name)(*networks), getattr(ours, name)(*networks)
    peer.make_value_estimator(getattr(theirs.ValueEstimators, their_kind), gamma=0.9)
    loss.make_value_estimator(getattr(ours.ValueEstimators, their_kind), gamma=0.9)
    expected, their_grads, _ = evaluated(peer, batch, *networks)
    out, grads, _ = evaluated(loss, batch, *networks)
    assert_same(out, expected)
    torch.testing.assert_close(grads, their_grads, **CLOSE)


@pytest.mark.parametrize("name", ["PPOLoss", "ClipPPOLoss", "A2CLoss", "ReinforceLoss"])
@pytest.mark.parametrize("key", ["shifted_valid", ("collector", "mask")])
def test_policy_losses_of_the_rows_that_count(
    theirs: ModuleType, batch: TensorDict, name: str, key: Any
) -> None:
    """The losses; the peer's diagnostics count all rows."""
    batch[key] = torch.rand(ROWS) < 0.7
    networks = discrete_actor(), critic_network()
    expected, their_grads, _ = evaluated(getattr(theirs, name)(*networks), batch, *networks)
    out, grads, _ = evaluated(getattr(ours, name)(*networks), batch, *networks)
    losses = [name for name in expected.keys() if name.startswith("loss")]  # noqa: SIM118
    assert_same(out, expected.select(*losses))
    torch.testing.assert_close(grads, their_grads, **CLOSE)


def test_beta_of_the_gradient_is_that_of_the_loss(theirs: ModuleType, batch: TensorDict) -> None:
    """The peer's gradient is that of the beta it has just changed to."""
    torch.manual_seed(0)
    actor = discrete_actor()
    batch = batch.exclude("value_target")
    options = {"entropy_bonus": False, "beta": 0.7}
    _, steady, _ = evaluated(ours.KLPENPPOLoss(actor, dtarg=0.5, **options), batch, actor)
    changing = ours.KLPENPPOLoss(actor, dtarg=0.01, **options)
    _, grads, _ = evaluated(changing, batch, actor)
    assert changing.beta.item() == pytest.approx(1.4)
    torch.testing.assert_close(grads, steady)
    _, their_grads, _ = evaluated(
        theirs.KLPENPPOLoss(actor, critic_network(), dtarg=0.01, **options),
        batch.update({"value_target": torch.zeros(ROWS, 1)}),
        actor,
    )
    assert not torch.allclose(their_grads[0], steady[0], **CLOSE)


@pytest.mark.parametrize("double", [False, True])
@pytest.mark.parametrize("kind", ["l1", "l2", "smooth_l1"])
@pytest.mark.parametrize("weighted", [False, True])
def test_dqn(theirs: ModuleType, batch: TensorDict, double: bool, kind: str, weighted: bool) -> None:
    from torchrl.modules import QValueActor

    if weighted:
        batch["priority_weight"] = torch.rand(ROWS)
    network = QValueActor(mlp(3, 4), in_keys=["observation"], action_space="categorical")
    peer = theirs.DQNLoss(network, double_dqn=double, loss_function=kind, action_space="categorical")
    peer.make_value_estimator(gamma=0.9)
    loss = ours.DQNLoss(network, double_dqn=double, loss_function=kind).make_value_estimator(gamma=0.9)
    assert loss.target_value_network is not None
    move_targets(loss, peer.target_value_network_params, [loss.target_value_network], stacked=False)
    expected, their_grads, theirs_after = evaluated(peer, batch, network)
    out, grads, after = evaluated(loss, batch, network)
    assert_same(out, expected)
    torch.testing.assert_close(grads, their_grads, **CLOSE)
    # absolute, where the peer's is squared
    torch.testing.assert_close(after["td_error"] ** 2, theirs_after["td_error"].squeeze(-1), **CLOSE)


def move_targets(loss: nn.Module, params: Any, targets: Any, *, stacked: bool) -> None:
    """Move our targets away from the networks, and the peer's to the same place."""
    with torch.no_grad():
        for i, target in enumerate(targets):
            for parameter in target.parameters():
                parameter.add_(0.3 * torch.randn_like(parameter))
            for key, value in TensorDict.from_module(target).items(True, True):
                place = params[key].data
                (place[i] if stacked else place).copy_(value.data)


class StateAction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(5, 1)

    def forward(self, observation: Tensor, action: Tensor) -> Tensor:
        return self.net(torch.cat([observation, action], -1))


def continuous_actor() -> ProbabilisticTensorDictSequential:
    from torchrl.modules import TanhNormal

    net = TensorDictModule(
        nn.Sequential(nn.Linear(3, 4), NormalParamExtractor()), ["observation"], ["loc", "scale"]
    )
    choose = ProbabilisticTensorDictModule(
        ["loc", "scale"], ["action"], distribution_class=TanhNormal, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(net, choose)


def compare_sac(
    peer: Any, loss: Any, batch: TensorDict, actor: nn.Module, critics: list[TensorDictModuleBase]
) -> None:
    peer.make_value_estimator(gamma=0.9)
    loss.make_value_estimator(gamma=0.9)
    move_targets(loss, peer.target_qvalue_network_params, loss.target_qvalue_network, stacked=True)
    expected, their_grads, theirs_after = evaluated(peer, batch, actor)
    out, grads, after = evaluated(loss, batch, actor)
    assert_same(out, expected)
    torch.testing.assert_close(grads, their_grads, **CLOSE)
    torch.testing.assert_close(loss.log_alpha.grad, peer.log_alpha.grad, **CLOSE)
    torch.testing.assert_close(after["td_error"], theirs_after["td_error"], **CLOSE)
    for i, critic in enumerate(critics):
        for key, parameter in TensorDict.from_module(critic).items(True, True):
            torch.testing.assert_close(parameter.grad, peer.qvalue_network_params[key].grad[i], **CLOSE)


@pytest.mark.parametrize("weighted", [False, True])
def test_sac(theirs: ModuleType, batch: TensorDict, weighted: bool) -> None:
    from torchrl.data import Bounded

    if weighted:
        batch["priority_weight"] = torch.rand(ROWS)
    batch["action"] = 2 * torch.rand(ROWS, 2) - 1
    actor = continuous_actor()
    keys = {"in_keys": ["observation", "action"], "out_keys": ["state_action_value"]}
    critics = [TensorDictModule(StateAction(), **keys) for _ in range(2)]
    peer = theirs.SACLoss(actor, critics, alpha_init=0.3, action_spec=Bounded(-1, 1, (2,)))
    compare_sac(peer, ours.SACLoss(actor, critics, alpha_init=0.3), batch, actor, critics)


@pytest.mark.parametrize("weighted", [False, True])
def test_discrete_sac(theirs: ModuleType, batch: TensorDict, weighted: bool) -> None:
    if weighted:
        batch["priority_weight"] = torch.rand(ROWS)
    actor = discrete_actor()
    critics = [TensorDictModule(mlp(3, 4), ["observation"], ["action_value"]) for _ in range(2)]
    peer = theirs.DiscreteSACLoss(actor, critics, action_space="categorical", num_actions=4, alpha_init=0.3)
    compare_sac(peer, ours.DiscreteSACLoss(actor, critics, alpha_init=0.3), batch, actor, critics)


@pytest.mark.parametrize(("kind", "their_kind"), [("td1", "TD1"), ("td_lambda", "TDLambda")])
def test_lambda_returns_of_action_values(
    theirs: ModuleType, batch: TensorDict, kind: str, their_kind: str
) -> None:
    """Slices end with done, so the peer is right about the boundaries."""
    from torchrl.modules import QValueActor

    batch["next", "done"][-1] = True
    network = QValueActor(mlp(3, 4), in_keys=["observation"], action_space="categorical")
    peer = theirs.DQNLoss(network, action_space="categorical")
    peer.make_value_estimator(getattr(theirs.ValueEstimators, their_kind), gamma=0.9)
    loss = ours.DQNLoss(network).make_value_estimator(kind, gamma=0.9)
    expected, their_grads, _ = evaluated(peer, batch, network)
    out, grads, _ = evaluated(loss, batch, network)
    assert_same(out, expected)
    torch.testing.assert_close(grads, their_grads, **CLOSE)
