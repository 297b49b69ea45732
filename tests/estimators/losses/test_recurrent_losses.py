"""An LSTM that actor and critic share, trained with PPO on slices of a buffer, burn-in rows out of the loss."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, A2CLoss, ClipPPOLoss, PPOLoss
from flatroll.layout import run_ends
from flatroll.modules import LSTMModule, set_recurrent_mode


def agent(kind: torch.dtype = torch.float64) -> tuple[Any, TensorDictModule, TensorDictSequential]:
    """Actor, value head on its features, and the critic that stands alone."""
    torch.manual_seed(0)
    memory = LSTMModule(3, 8, in_key="observation", out_key="features")
    policy = TensorDictModule(nn.Linear(8, 2), ["features"], ["logits"])
    choose = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    head = TensorDictModule(nn.Linear(8, 1), ["features"], ["state_value"])
    actor = ProbabilisticTensorDictSequential(memory, policy, choose).to(kind)
    return actor, head.to(kind), TensorDictSequential(memory, head)


def play(actor: Any, lengths: list[int], dtype: torch.dtype = torch.float64) -> TensorDict:
    """Episodes in which the reward is for naming the sign of the first observation, which is shown only once."""
    parts = []
    with torch.no_grad(), set_recurrent_mode(False):
        for number, rows in enumerate(lengths):
            state = actor[0].make_tensordict_primer().expand([1])
            seen = torch.randn(rows + 1, 3, dtype=dtype)
            seen[1:, 0] = 0.0
            for i in range(rows):
                row = TensorDict({"observation": seen[i : i + 1], "is_init": torch.tensor([[i == 0]])}, [1])
                row.update(state)
                actor(row)
                state = row["next"].clone()
                right = row["action"] == int(seen[0, 0] > 0)
                last = torch.tensor([[i == rows - 1]])
                row["collector", "traj_ids"] = torch.tensor([number])
                row["next"].update(
                    {
                        "observation": seen[i + 1 : i + 2],
                        "reward": right.to(dtype).unsqueeze(-1),
                        "terminated": last,
                        "truncated": torch.zeros_like(last),
                        "done": last,
                    }
                )
                parts.append(row)
    return torch.cat(parts)


def slices(batch: TensorDict, critic: Any, length: int, rows: int, seed: int = 0) -> TensorDict:
    """A sample of a buffer that stores advantages, too."""
    GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(len(batch)),
        sampler=SliceSampler(slice_len=length, fill=False),
        generator=torch.Generator().manual_seed(seed),
    )
    buffer.extend(batch)
    return buffer.sample(rows)


def step_through(actor: Any, head: Any, sample: TensorDict, burn_in: int) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probability, value and place in its slice of each row by single steps, the first without gradient."""
    log_probs, values, steps = [], [], []
    ends = run_ends(sample)
    state, step = None, 0
    with set_recurrent_mode(False):
        for i in range(len(sample)):
            row = sample[i : i + 1].select("observation", "recurrent_state_h", "recurrent_state_c").clone()
            row["is_init"] = torch.zeros(1, 1, dtype=torch.bool)  # from the stored state
            if state is not None:
                row.update(state)
            with torch.set_grad_enabled(step >= burn_in):
                log_probs.append(actor.get_dist(row).log_prob(sample["action"][i : i + 1]))
                values.append(head(row)["state_value"][:, 0])
            steps.append(step)
            state, step = (None, 0) if ends[i] else (row["next"], step + 1)
    return torch.cat(log_probs), torch.cat(values), torch.tensor(steps)


@pytest.mark.parametrize("burn_in", [0, 2])
def test_losses_and_gradients_are_those_of_stepping(burn_in: int) -> None:
    actor, head, critic = agent()
    sample = slices(play(actor, [7, 3, 9, 1, 5]), critic, length=4, rows=24)
    with torch.no_grad():  # the policy has moved since
        for parameter in actor.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    loss = ClipPPOLoss(actor, head, burn_in=burn_in, loss_critic_type="l2", entropy_bonus=False)
    seen = sample["observation"].requires_grad_()
    out = loss(sample)
    log_prob, value, step = step_through(actor, head, sample, burn_in)
    ratio = (log_prob - sample["action_log_prob"]).exp()
    advantage = sample["advantage"].squeeze(-1)
    gain = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
    error = (value - sample["value_target"].squeeze(-1)).square()
    counts = step >= burn_in
    expected = -gain[counts].mean(), error[counts].mean()
    torch.testing.assert_close((out["loss_objective"], out["loss_critic"]), expected)
    weights = [*actor.parameters(), *head.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(out["loss_objective"] + out["loss_critic"], [*weights, seen], retain_graph=True),
        torch.autograd.grad(sum(expected), [*weights, seen]),  # type: ignore[arg-type]
    )
    (of_seen,) = torch.autograd.grad(out["loss_objective"] + out["loss_critic"], seen)
    assert (
        of_seen[counts].all() and not of_seen[~counts].any()
    )  # exactly 0 where rows only warm the memory up


def test_the_policy_that_acted_has_ratio_one_on_every_slice() -> None:
    actor, head, critic = agent()
    sample = slices(play(actor, [7, 3, 9, 1, 5]), critic, length=4, rows=24)
    out = ClipPPOLoss(actor, head)(sample)
    assert out["max_ratio"].item() == pytest.approx(1.0)
    assert out["mean_ratio"].item() == pytest.approx(1.0)


def test_burn_in_longer_than_some_slices() -> None:
    actor, head, critic = agent()
    sample = slices(play(actor, [7, 1, 2]), critic, length=4, rows=24)
    ends = run_ends(sample)
    out = A2CLoss(actor, head, burn_in=3, reduction="none")(sample)
    firsts = torch.cat([torch.tensor([True]), ends[:-1]])
    length_so_far = (
        torch.arange(len(sample)) - torch.where(firsts, torch.arange(len(sample)), 0).cummax(0).values
    )
    assert ((out["loss_objective"] != 0) == (length_so_far >= 3)).all()
    with pytest.warns(UserWarning, match="no row counts"):
        assert A2CLoss(actor, head, burn_in=4)(sample)["loss_objective"].item() == 0.0


def test_it_learns_to_remember() -> None:
    actor, head, critic = agent(torch.float32)
    loss = PPOLoss(actor, head, normalize_advantage=True, burn_in=0)
    weights = [*actor.parameters(), *head.parameters()]
    optimizer = torch.optim.Adam(weights, lr=2e-2)
    share = 0.0
    for update in range(40):
        batch = play(actor, [5] * 16, torch.float32)
        share = batch["next", "reward"][batch["next", "done"]].mean().item()
        if share > 0.95 and update > 5:
            break
        GAE(gamma=0.9, lmbda=0.9, value_network=critic)(batch)
        for _ in range(3):
            losses = loss(batch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            optimizer.step()
    assert share > 0.9  # 0.5 without a memory
