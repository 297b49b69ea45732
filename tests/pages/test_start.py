"""README, the tour and the cheat sheet: rows, returns, values and samples are those of plain loops and recursions."""

import gymnasium as gym
import numpy as np
import torch
from plain_loop import assert_as_played, assert_equal_but, assert_slices, per_env, plain_gae
from tensordict import TensorDict
from torch import Tensor


def cartpoles(count: int) -> gym.vector.VectorEnv:
    return gym.make_vec("CartPole-v1", num_envs=count)


def assert_sums(rows: TensorDict, num_envs: int) -> list[float]:
    """Step counts and sums of rewards are those of a plain loop over the rows; return the sums of ended episodes."""
    ended = []
    for stream in per_env(rows, num_envs):
        step, total = 0, 0.0
        for row in stream.unbind(0):
            if row["is_init"]:
                step, total = 0, 0.0
            if "step_count" in row:
                assert (row["step_count"].item(), row["next", "step_count"].item()) == (step, step + 1)
            step += 1
            total += row["next", "reward"].item()
            assert row["next", "episode_reward"].item() == total
            if row["next", "terminated"] or row["next", "truncated"]:
                ended.append(total)
    return ended


def test_the_readmes_first_batch(until) -> None:
    batch = until("README.md", "timeline_svg(batch))")["batch"]
    assert batch.batch_size == (400,)
    assert_as_played(batch, cartpoles(4), seed=0)


def test_the_tours_batch_and_returns(until) -> None:
    space = until("docs/tour.md", "the first row that ends an episode")
    batch, done = space["batch"], space["done"]
    assert_as_played(batch, cartpoles(4), seed=0)
    assert assert_sums(batch, 4) == batch["next", "episode_reward"][done].tolist() == [22, 13, 11, 14]
    assert space["last"] == 21


def gru_by_hand(rows: TensorDict, policy: torch.nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Features of each row, and the states before and after it: float64, step by step, zeros where episodes start."""
    weights = {name: value.detach().double() for name, value in policy.named_parameters()}
    inner = rows["observation"].double() @ weights["module.0.module.layers.0.weight"].T
    inner = (inner + weights["module.0.module.layers.0.bias"]).tanh()
    given = inner @ weights["module.1.gru.weight_ih_l0"].T + weights["module.1.gru.bias_ih_l0"]
    before, after = torch.zeros(2, len(rows), 32, dtype=torch.float64)
    for i in range(len(rows)):
        if rows["is_init"][i]:
            state = torch.zeros(32, dtype=torch.float64)
        elif i == 0 or rows["collector", "traj_ids"][i] != rows["collector", "traj_ids"][i - 1]:
            state = rows["recurrent_state"][i].flatten().double()  # a run that began in an earlier batch
        else:
            state = after[i - 1]
        before[i] = state
        held = weights["module.1.gru.weight_hh_l0"] @ state + weights["module.1.gru.bias_hh_l0"]
        (r_x, z_x, n_x), (r_h, z_h, n_h) = given[i].chunk(3), held.chunk(3)
        reset, update = torch.sigmoid(r_x + r_h), torch.sigmoid(z_x + z_h)
        new = torch.tanh(n_x + reset * n_h)
        after[i] = (1 - update) * new + update * state
    return inner, before, after


def test_the_tours_recurrent_batch_advantages_and_slices(until) -> None:
    space = until("docs/tour.md", 'print(len(sample), "rows,"')
    batch, policy, value, sample = (space[name] for name in ("batch", "policy", "value", "sample"))
    assert_as_played(batch, cartpoles(4), seed=0)
    assert_sums(batch, 4)

    _, before, after = gru_by_hand(batch, policy)
    np.testing.assert_allclose(batch["recurrent_state"].flatten(1), before, atol=1e-5)
    np.testing.assert_allclose(batch["next", "recurrent_state"].flatten(1), after, atol=1e-5)
    logits = after @ policy[2].module.weight.double().T + policy[2].module.bias.double()
    chosen = logits.log_softmax(-1).gather(1, batch["action"][:, None]).flatten()
    np.testing.assert_allclose(batch["action_log_prob"].flatten(), chosen.detach(), atol=1e-5)

    def value_of(features: Tensor) -> Tensor:
        layer = value[-1].module
        return (features @ layer.weight.double().T + layer.bias.double()).flatten().detach()

    # The next observation of a row, seen after it.
    following = TensorDict({"observation": batch["next", "observation"]}, [len(batch)])
    following["recurrent_state"] = after[:, None]
    following["is_init"] = torch.zeros(len(batch), 1, dtype=torch.bool)
    following["collector", "traj_ids"] = torch.arange(len(batch))  # each a run of its own
    _, _, later = gru_by_hand(following, policy)
    advantage = plain_gae(batch, value_of(after), value_of(later), 0.99, 0.95)
    np.testing.assert_allclose(batch["advantage"].flatten(), advantage, atol=1e-4)
    np.testing.assert_allclose(batch["value_target"].flatten(), advantage + value_of(after), atol=1e-4)

    assert_equal_but(space["buffer"][:], batch)
    assert assert_slices(sample, batch, 32) >= 16


def test_the_tours_training_counts_every_reward_once(until) -> None:
    """A step pays 1: a row belongs to a counted return, or to one of four episodes open at either end."""
    space = until("docs/tour.md", 'print(f"mean return {first:.0f} at first')
    batch = space["batch"]
    assert torch.equal(batch["next", "episode_reward"], batch["next", "step_count"].float())
    rows = space["collector"].frames - 1024  # the first batch was taken before the loop
    assert abs(rows - sum(space["returns"])) <= 4 * 500


def test_the_cheat_sheets_batch_and_buffers(until) -> None:
    space = until("docs/cheat_sheet.md", 'by_error.sample()["priority_weight"].shape')
    batch, few = space["batch"], space["few"]
    bare = gym.make_vec("CartPole-v1", num_envs=8, vectorization_mode="sync")
    assert_as_played(few, bare, seed=0)
    assert_as_played(batch, bare, seed=0)
    assert_sums(batch, 8)

    ended = [row["next", "episode_reward"].item() for row in batch.unbind(0) if row["next", "done"]]
    assert space["returns"].tolist() == ended
    for name in ("slices", "by_error"):
        assert_equal_but(space[name][:], batch)
    assert_slices(space["slices"].sample(), batch, 16)
