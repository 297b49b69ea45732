"""Delayed networks: how they start, move, are saved, and what is refused."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import nn

from flatroll.estimators import DQNLoss, HardUpdate, SoftUpdate


def network(*layers: nn.Module) -> TensorDictModule:
    return TensorDictModule(nn.Sequential(*(layers or (nn.Linear(2, 3),))), ["observation"], ["action_value"])


def weights(module: nn.Module) -> torch.Tensor:
    return nn.utils.parameters_to_vector(module.parameters()).detach().clone()


def apart(loss: DQNLoss) -> tuple[torch.Tensor, torch.Tensor]:
    """Move the network away from its copy; the weights of both."""
    assert loss.target_value_network is not None
    with torch.no_grad():
        for parameter in loss.value_network.parameters():
            parameter.add_(torch.randn_like(parameter))
    return weights(loss.value_network), weights(loss.target_value_network)


def test_a_copy_starts_equal_and_does_not_learn() -> None:
    loss = DQNLoss(network())
    assert loss.target_value_network is not None
    assert torch.equal(weights(loss.value_network), weights(loss.target_value_network))
    assert not any(parameter.requires_grad for parameter in loss.target_value_network.parameters())
    assert all(parameter.requires_grad for parameter in loss.value_network.parameters())
    assert DQNLoss(network(), delay_value=False).target_value_network is None


@pytest.mark.parametrize("argument", [{"tau": 0.1}, {"eps": 0.9}])
def test_soft_update_moves_by_a_share(argument: dict[str, float]) -> None:
    loss = DQNLoss(network())
    updater = SoftUpdate(loss, **argument)
    source, target = apart(loss)
    for _ in range(3):
        updater.step()
        target = 0.9 * target + 0.1 * source
    torch.testing.assert_close(weights(loss.target_value_network), target)  # type: ignore[arg-type]
    assert torch.equal(weights(loss.value_network), source)


def test_hard_update_copies_at_every_nth_step() -> None:
    """The peer copies at every (n + 1)-th."""
    loss = DQNLoss(network())
    updater = HardUpdate(loss, value_network_update_interval=3)
    moved = []
    for _ in range(7):
        source, _ = apart(loss)
        updater.step()
        moved.append(torch.equal(weights(loss.target_value_network), source))  # type: ignore[arg-type]
    assert moved == [False, False, True, False, False, True, False]


def test_running_statistics_are_copied() -> None:
    loss = DQNLoss(network(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)))
    loss.value_network(TensorDict({"observation": torch.randn(8, 2)}, [8]))
    SoftUpdate(loss, tau=0.0).step()
    buffers = zip(loss.value_network.buffers(), loss.target_value_network.buffers(), strict=True)  # type: ignore[union-attr]
    assert all(torch.equal(source, target) for source, target in buffers)


def test_an_updater_made_late_leaves_loaded_targets_alone() -> None:
    loss = DQNLoss(network())
    apart(loss)
    saved = copy.deepcopy(loss.state_dict())
    fresh = DQNLoss(network())
    fresh.load_state_dict(saved)
    target = weights(fresh.target_value_network)  # type: ignore[arg-type]
    updater = HardUpdate(fresh)
    assert torch.equal(weights(fresh.target_value_network), target)  # type: ignore[arg-type]
    updater.init_()
    assert torch.equal(weights(fresh.target_value_network), weights(fresh.value_network))  # type: ignore[arg-type]


def test_the_counter_is_saved() -> None:
    loss = DQNLoss(network())
    updater, again = (HardUpdate(loss, value_network_update_interval=5) for _ in range(2))
    for _ in range(3):
        updater.step()
    again.load_state_dict(updater.state_dict())
    assert again.counter == 3
    assert SoftUpdate(loss, tau=0.1).state_dict() == {}


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, r"pass either eps \(the share of the old parameters\) or tau \(1 - eps\), got None and None"),
        ({"eps": 0.9, "tau": 0.1}, "got 0.9 and 0.1"),
        ({"tau": 1.5}, r"tau must lie in \[0, 1\], got 1.5"),
        ({"eps": -0.1}, r"eps must lie in \[0, 1\], got -0.1"),
    ],
)
def test_bad_shares(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        SoftUpdate(DQNLoss(network()), **options)


def test_bad_loss() -> None:
    with pytest.raises(
        ValueError, match=r"this DQNLoss has no delayed network: build it with delay_value=True"
    ):
        SoftUpdate(DQNLoss(network(), delay_value=False), tau=0.1)
    with pytest.raises(TypeError, match="loss_module must be a loss of flatroll, got Linear"):
        HardUpdate(nn.Linear(1, 1))  # type: ignore[arg-type]
    with pytest.raises(
        ValueError, match="value_network_update_interval must be an integer of at least 1, got 0"
    ):
        HardUpdate(DQNLoss(network()), value_network_update_interval=0)
