"""A loss gives the same numbers for a batch as for the entries that it says it reads.

`UpdateStep.epochs` and compiled updates pass these entries alone.
"""

from collections.abc import Callable
from copy import deepcopy
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict

from flatroll.estimators import (
    GAE,
    A2CLoss,
    ClipPPOLoss,
    DQNLoss,
    KLPENPPOLoss,
    LossModule,
    PPOLoss,
    ReinforceLoss,
    SACLoss,
    update_step,
)
from flatroll.estimators.updates import columns_read_by
from flatroll.layout import run_ends
from flatroll.layout.tensordict_seam import nest
from flatroll.modules import actor, critic, q_network
from flatroll.rollouts import rollout
from flatroll.wrappers import StepCounter

BOX = spaces.Box(-1, 1, (2,), np.float32)
ACTIONS: dict[str, spaces.Space[Any]] = {
    "Discrete": spaces.Discrete(3),
    "Box": BOX,
    "MultiDiscrete": spaces.MultiDiscrete([3, 2]),
    "Dict": spaces.Dict(turn=spaces.Discrete(3), push=BOX),
    "Tuple": spaces.Tuple((spaces.Discrete(3), BOX)),
    "Dict in a Dict": spaces.Dict(arm=spaces.Dict(turn=spaces.Discrete(3)), push=BOX),
    "Dict of one": spaces.Dict(push=BOX),
}
OF_PARTS = ("Dict", "Tuple", "Dict in a Dict", "Dict of one")
POLICY_LOSSES = (PPOLoss, ClipPPOLoss, KLPENPPOLoss, A2CLoss, ReinforceLoss)


class Game(gym.Env[Any, Any]):
    """Episodes of 5 steps with random observations."""

    def __init__(self, action_space: spaces.Space[Any]) -> None:
        self.observation_space = spaces.Box(-1, 1, (3,), np.float32)
        self.action_space = action_space

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.steps = 0
        return self.np_random.random(3, np.float32), {}

    def step(self, action: Any) -> Any:
        self.steps += 1
        return self.np_random.random(3, np.float32), float(self.steps), self.steps == 5, False, {}


def game(action: str) -> Any:
    return StepCounter(gym.vector.SyncVectorEnv([lambda: Game(ACTIONS[action])] * 2))


def played(action: str, **options: Any) -> tuple[Any, Any, TensorDict]:
    """An actor, a critic, and 24 rows that the actor has collected."""
    torch.manual_seed(0)
    env = game(action)
    policy = actor(env, hidden=(8,), **options)
    value = critic(env, hidden=(8,), **options)
    rows = rollout(env, policy, 12, seed=0)
    with torch.no_grad():  # the policy has changed since, so that the ratios are not 1
        for weights in policy.parameters():
            weights.add_(0.1 * torch.randn_like(weights))
    return policy, value, rows


def check_that_it_reads_no_more(loss: LossModule, batch: TensorDict) -> None:
    """The loss, and what it writes, are the same for the entries that `epochs` would pass."""
    columns = columns_read_by(loss, batch)
    found = []
    for rows in (batch.copy(), nest(columns, *batch.batch_size)):
        torch.manual_seed(0)
        found.append(dict(deepcopy(loss)(rows).detach().items()))  # a copy, as a call may move beta
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("action", ACTIONS)
@pytest.mark.parametrize("kind", POLICY_LOSSES)
def test_epochs_and_calls_give_equal_losses(kind: Any, action: str) -> None:
    policy, value, rows = played(action)
    batch = GAE(gamma=0.9, lmbda=0.8, value_network=value)(rows)
    loss = kind(policy, value)
    check_that_it_reads_no_more(loss, batch)
    copies = [deepcopy(loss) for _ in range(2)]
    one, other = (update_step(copy, torch.optim.SGD(copy.parameters(), lr=0.0)) for copy in copies)
    once = one(batch.copy())
    epochs = other.epochs(batch, epochs=1, minibatch=len(batch))
    policy_loss = loss.loss_names[0]
    torch.testing.assert_close(epochs[policy_loss][0], once[policy_loss])


@pytest.mark.parametrize("action", OF_PARTS)
def test_the_ratio_is_that_of_the_summed_log_probabilities(action: str) -> None:
    """An independent value: add up what the actor stored, and what it says now."""
    policy, value, rows = played(action)
    batch = GAE(gamma=0.9, lmbda=0.8, value_network=value)(rows)
    names = [
        key for key in rows.keys(True, True) if str(key).endswith("_log_prob')") or key == "action_log_prob"
    ]
    stored = sum(rows[name].detach().reshape(24, -1).sum(-1) for name in names)
    now = policy.get_dist(rows.copy()).log_prob(rows.copy())
    total = (
        now
        if isinstance(now, torch.Tensor)
        else sum(x.reshape(24, -1).sum(-1) for x in now.values(True, True))
    )
    expected = -((total - stored).exp() * batch["advantage"].squeeze(-1)).mean()
    loss = PPOLoss(policy, value)
    found = update_step(loss, torch.optim.SGD(loss.parameters(), lr=0.0)).epochs(
        batch, epochs=1, minibatch=24
    )
    torch.testing.assert_close(found["loss_objective"][0], expected.detach(), rtol=1e-4, atol=1e-5)


ESTIMATORS: dict[str, tuple[str, dict[str, Any]]] = {
    "GAE": ("gae", {}),
    "GAE, by groups": ("gae", {"average_gae": True, "group_key": "task"}),
    "GAE, values that are there": ("gae", {"skip_existing": True}),
    "TD(lambda)": ("td_lambda", {}),
    "TD(0)": ("td0", {}),
    "V-trace": ("vtrace", {}),
}


@pytest.mark.parametrize("action", ["Discrete", "Dict", "Tuple"])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_loss_that_estimates_reads_what_its_estimator_reads(name: str, action: str) -> None:
    policy, value, batch = played(action)
    kind, options = ESTIMATORS[name]
    batch["task"] = torch.arange(24) % 3
    batch["state_value"] = torch.randn(24, 1)
    batch["next", "state_value"] = torch.randn(24, 1)
    loss = ClipPPOLoss(policy, value).make_value_estimator(kind, **options)
    check_that_it_reads_no_more(loss, batch)


def test_n_step_rows_are_discounted_by_their_steps_either_way() -> None:
    policy, value, batch = played("Discrete")
    batch["steps_to_next_obs"] = torch.randint(1, 4, (24, 1))
    loss = A2CLoss(policy, value).make_value_estimator("td0", gamma=0.5)
    check_that_it_reads_no_more(loss, batch)
    frozen = torch.optim.SGD(loss.parameters(), lr=0.0)
    found = update_step(loss, frozen).epochs(batch, epochs=1, minibatch=24)["loss_objective"][0]
    with torch.no_grad():
        now = value(batch.copy())["state_value"]
        after = value(TensorDict({"observation": batch["next", "observation"]}, [24]))["state_value"]
        discount = 0.5 ** batch["steps_to_next_obs"] * ~batch["next", "terminated"]
        advantage = (batch["next", "reward"] + discount * after - now).squeeze(-1)
        log_prob = policy.get_dist(batch.copy()).log_prob(batch["action"])
    torch.testing.assert_close(found, -(log_prob * advantage).mean())


def test_shuffled_rows_are_refused_either_way() -> None:
    """The estimator finds them by their step counts, which `epochs` passes on."""
    policy, value, batch = played("Discrete")
    del batch["next", "observation"]
    loss = ClipPPOLoss(policy, value).make_value_estimator("gae", bootstrap_missing="current")
    step = update_step(loss, torch.optim.SGD(loss.parameters(), lr=0.0))
    with pytest.raises(ValueError, match="'step_count' is"):
        step(batch[torch.randperm(24)])
    with pytest.raises(ValueError, match="'step_count' is"):
        step.epochs(batch, epochs=1, minibatch=24)


@pytest.mark.parametrize("action", ["Discrete", "Dict"])
def test_series_of_recurrent_networks(action: str) -> None:
    policy, value, rows = played(action, recurrent="gru")
    batch = rows.reshape(2, 12)
    assert run_ends(batch).any()
    for loss in (
        ClipPPOLoss(policy, value, burn_in=1).make_value_estimator("gae"),
        A2CLoss(policy, value).make_value_estimator("vtrace"),
    ):
        check_that_it_reads_no_more(loss, batch)


def sac(action: str) -> tuple[LossModule, TensorDict]:
    policy, _, batch = played(action)
    return SACLoss(policy, q_network(game(action), hidden=(8,))), batch


def dqn(**options: Any) -> tuple[LossModule, TensorDict]:
    _, _, batch = played("Discrete")
    batch["action_mask"] = torch.rand(24, 3) < 0.7
    batch["next", "action_mask"] = torch.rand(24, 3) < 0.7
    return DQNLoss(q_network(game("Discrete"), hidden=(8,)), **options), batch


@pytest.mark.parametrize(
    "make", [partial(sac, "Box"), dqn, partial(dqn, double_dqn=True)], ids=["SAC", "DQN", "double DQN"]
)
def test_off_policy_losses(make: Callable[[], tuple[LossModule, TensorDict]]) -> None:
    loss, batch = make()
    batch["priority_weight"] = torch.rand(24)
    batch["steps_to_next_obs"] = torch.randint(1, 4, (24, 1))
    check_that_it_reads_no_more(loss, batch)
    batch["gamma"] = torch.rand(24, 1)
    batch["collector", "next_known"] = torch.rand(24) < 0.8
    batch["collector", "mask"] = torch.rand(24) < 0.8
    check_that_it_reads_no_more(loss, batch)


def test_a_call_by_keyword_takes_the_parts_log_probabilities() -> None:
    policy, value, rows = played("Dict")
    batch = GAE(gamma=0.9, lmbda=0.8, value_network=value)(rows)
    loss = ClipPPOLoss(policy, value)
    columns = columns_read_by(loss, batch)
    named = {"_".join(key) if isinstance(key, tuple) else key: column for key, column in columns.items()}
    tensors = {name: column for name, column in named.items() if not name.startswith("params")}
    torch.testing.assert_close(loss(**tensors)[0], loss(batch)["loss_objective"])


def test_a_compiled_update_of_an_action_of_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # whether it is one graph
    policy, value, rows = played("Dict")
    batch = GAE(gamma=0.9, lmbda=0.8, value_network=value)(rows)
    losses = []
    for compile in (False, True):
        loss = ClipPPOLoss(deepcopy(policy), deepcopy(value))
        step = update_step(loss, torch.optim.SGD(loss.parameters(), lr=0.1), compile=compile)
        losses.append(step(batch.copy()).select("loss_objective", "loss_critic", "kl_approx").to_dict())
        assert step.compiled is compile
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
