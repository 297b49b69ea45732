"""A user's own loss: the TD3 loss of docs/howto/own_loss.md against a slow computation, row by row."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from flatroll.estimators import HardUpdate, LossModule, OffPolicyLoss, PolicyGradientLoss

PAGE = Path(__file__).parents[3] / "docs" / "howto" / "own_loss.md"
GAMMA = 0.9


@pytest.fixture(scope="module")
def page() -> dict[str, Any]:
    """What the page's code defines, after it has printed what the page says."""
    text = PAGE.read_text()
    namespace: dict[str, Any] = {"__name__": "own_loss"}
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        for block in re.findall(r"```python\n(.*?)```", text, re.S):
            exec(compile(block, str(PAGE), "exec"), namespace)
    claimed = re.findall(r"```text\n(.*?)```", text, re.S)
    assert printed.getvalue() == "".join(claimed)
    return namespace


@pytest.fixture
def loss(page: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    actor = TensorDictModule(nn.Sequential(nn.Linear(3, 2), nn.Tanh()), ["observation"], ["action"])
    layers = [nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1)]
    critic = TensorDictModule(page["Critic"](*layers), ["observation", "action"], ["state_action_value"])
    made = page["TD3Loss"](actor, critic, low=-0.8, high=0.8, noise=0.5, noise_clip=0.4)
    for name in ("target_actor_network", "target_qvalue_network"):
        for parameter in getattr(made, name).parameters():
            parameter.data += 0.3 * torch.randn_like(parameter)
    return made.make_value_estimator("td0", gamma=GAMMA)


def transitions(rows: int = 7) -> TensorDict:
    generator = torch.Generator().manual_seed(1)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    following = {
        "observation": draw(rows, 3),
        "reward": draw(rows, 1),
        "terminated": torch.arange(rows).unsqueeze(-1) % 3 == 2,
    }
    return TensorDict(
        {"observation": draw(rows, 3), "action": draw(rows, 2).clamp(-1, 1), "next": following}, [rows]
    )


def by_hand(loss: Any, batch: TensorDict, noise: Tensor) -> tuple[list[Tensor], list[Tensor], list[float]]:
    """Losses of critics and actor and the TD error of each row, computed one row at a time."""
    actor, target_actor = loss.actor_network.module, loss.target_actor_network.module
    critics = [critic.module for critic in loss.qvalue_network]
    target_critics = [critic.module for critic in loss.target_qvalue_network]
    of_critics, of_actor, errors = [], [], []
    for row in range(batch.shape[0]):
        now, after = batch["observation"][row], batch["next", "observation"][row]
        with torch.no_grad():
            action = target_actor(after) + noise[row].clamp(-0.4, 0.4)
            ahead = min(float(critic(after, action.clamp(-0.8, 0.8))) for critic in target_critics)
            target = float(batch["next", "reward"][row])
            if not batch["next", "terminated"][row]:
                target += GAMMA * ahead
        found = [critic(now, batch["action"][row]).squeeze() - target for critic in critics]
        of_critics.append(found[0] ** 2 + found[1] ** 2)
        errors.append(max(abs(float(error.detach())) for error in found))
        of_actor.append(-critics[0](now, actor(now)).squeeze())
    return of_critics, of_actor, errors


def gradients(loss: Any, total: Tensor, network: nn.Module) -> list[Tensor]:
    return list(torch.autograd.grad(total, list(network.parameters()), retain_graph=True))


def test_losses_gradients_and_priorities_are_those_of_the_slow_computation(loss: Any) -> None:
    batch = transitions()
    torch.manual_seed(2)
    losses = loss(batch)
    torch.manual_seed(2)
    of_critics, of_actor, errors = by_hand(loss, batch, 0.5 * torch.randn(7, 2))
    expected = {"loss_qvalue": torch.stack(of_critics).mean(), "loss_actor": torch.stack(of_actor).mean()}
    for name, number in expected.items():
        torch.testing.assert_close(losses[name], number)
    torch.testing.assert_close(batch["td_error"], torch.tensor(errors))
    for name, network in (("loss_qvalue", loss.qvalue_network), ("loss_actor", loss.actor_network)):
        torch.testing.assert_close(
            gradients(loss, losses[name], network), gradients(loss, expected[name], network)
        )


def test_each_loss_reaches_its_own_networks_only(loss: Any) -> None:
    losses = loss(transitions())
    losses["loss_actor"].backward(retain_graph=True)
    assert all(parameter.grad is None for parameter in loss.qvalue_network.parameters())
    assert all(parameter.grad is not None for parameter in loss.actor_network.parameters())
    loss.zero_grad()
    losses["loss_qvalue"].backward()
    assert all(parameter.grad is None for parameter in loss.actor_network.parameters())
    assert all(parameter.grad is not None for parameter in loss.qvalue_network.parameters())


def test_rows_that_do_not_count(loss: Any) -> None:
    """Padding, rows whose next observation is NaN, and weights: a loss gets them from its base."""
    batch = transitions()
    batch["collector", "mask"] = torch.arange(7) != 5
    batch["next", "observation"][3, 0] = float("nan")
    batch["priority_weight"] = torch.arange(1.0, 8.0)
    torch.manual_seed(2)
    losses = loss(batch)
    torch.manual_seed(2)
    of_critics, of_actor, errors = by_hand(loss, batch, 0.5 * torch.randn(7, 2))
    counted = [0, 1, 2, 4, 6]
    weights = batch["priority_weight"]
    for name, rows in (("loss_qvalue", of_critics), ("loss_actor", of_actor)):
        mean = sum(weights[row] * rows[row] for row in counted) / weights[counted].sum()
        torch.testing.assert_close(losses[name], mean)
    assert batch["td_error"][3] == 0.0
    torch.testing.assert_close(batch["td_error"][counted], torch.tensor(errors)[counted])


def test_updaters_find_the_target_copies(loss: Any) -> None:
    assert set(loss.delayed_networks()) == {"actor_network", "qvalue_network"}
    HardUpdate(loss, value_network_update_interval=1).step()
    for name in ("actor_network", "qvalue_network"):
        pairs = zip(
            getattr(loss, name).parameters(), getattr(loss, f"target_{name}").parameters(), strict=True
        )
        assert all(torch.equal(parameter, copy) for parameter, copy in pairs)


def test_it_is_a_loss_like_the_others(loss: Any, page: dict[str, Any]) -> None:
    assert isinstance(loss, (OffPolicyLoss, LossModule))
    assert issubclass(page["SquaredAdvantageLoss"], PolicyGradientLoss)
    assert "TD3Loss" in repr(loss)
    renamed = transitions()
    renamed["next", "score"] = renamed["next", "reward"]
    del renamed["next", "reward"]
    loss.set_keys(reward="score")
    torch.manual_seed(2)
    assert loss(renamed)["loss_qvalue"].isfinite()
