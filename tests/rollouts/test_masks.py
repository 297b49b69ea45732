"""No illegal action is ever taken: random ones, those of actors, and those of action values.

``python -m tests.rollouts.test_masks STEPS SEED`` is the long form: so many steps of each policy.
"""

import sys
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, MultiStepTransform, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss, DQNLoss
from flatroll.modules import ActionMask, actor, critic, q_network
from flatroll.rollouts import Collector, evaluate

MODES = ("NextStep", "SameStep")
COUNTS = {"discrete": (6,), "multi": (2, 3)}


class Masked(gym.vector.VectorEnv[Any, Any, Any]):
    """Allows some actions at random in each step, none in an episode's last observation, and notes illegal ones."""

    def __init__(
        self, num_envs: int = 8, place: str = "obs", mode: str = "NextStep", kind: str = "discrete"
    ) -> None:
        self.num_envs, self.place, self.counts = num_envs, place, COUNTS[kind]
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        total = sum(self.counts)
        numbers, mask = spaces.Box(-1, 1, (3,)), spaces.Box(0, 1, (total,), np.int8)
        self.single_observation_space = (
            spaces.Dict(observation_of=numbers, action_mask=mask) if place == "obs" else numbers
        )
        self.single_action_space = (
            spaces.Discrete(6) if kind == "discrete" else spaces.MultiDiscrete([*self.counts])
        )
        self.observation_space = batch_space(self.single_observation_space, num_envs)
        self.action_space = batch_space(self.single_action_space, num_envs)
        self.illegal = self.steps = 0
        self.hopeless = False

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.ended = np.zeros(self.num_envs, bool)
        return self.show(self.ended)

    def show(self, final: Any) -> Any:
        mask = (self.rng.random((self.num_envs, sum(self.counts))) < 0.4).astype(np.int8)
        at = 0
        for count in self.counts:  # one option of each choice at least
            mask[np.arange(self.num_envs), at + self.rng.integers(count, size=self.num_envs)] = 1
            at += count
        mask[final] = 0
        self.mask = mask * (not self.hopeless)
        numbers = self.rng.uniform(-1, 1, (self.num_envs, 3)).astype(np.float32)
        if self.place == "obs":
            return {"observation_of": numbers, "action_mask": self.mask}, {}
        return numbers, {"action_mask": self.mask, "_action_mask": ~final}

    def step(self, actions: Any) -> Any:
        choices = np.asarray(actions).reshape(self.num_envs, -1) + np.cumsum([0, *self.counts[:-1]])
        legal = np.take_along_axis(self.mask, choices, 1).all(1)
        self.illegal += int((~legal & ~self.ended).sum())
        self.steps += int((~self.ended).sum())
        ends = (self.rng.random(self.num_envs) < 0.1) & ~self.ended
        reward = (~self.ended).astype(np.float32)  # a step that only resets pays nothing
        if self.metadata["autoreset_mode"] == AutoresetMode.NEXT_STEP:
            self.ended = ends
            return (*(shown := self.show(ends))[:1], reward, ends, np.zeros_like(ends), shown[1])
        final, last = self.show(ends)
        obs, info = self.show(np.zeros_like(ends))
        if ends.any():
            info |= {"final_info": last, "_final_info": ends, "_final_obs": ends}
            info["final_obs"] = np.full(self.num_envs, None, object)
            for i in np.flatnonzero(ends):
                info["final_obs"][i] = (
                    {key: value[i] for key, value in final.items()} if self.place == "obs" else final[i]
                )
        return obs, reward, ends, np.zeros_like(ends), info


def policies(env: Any) -> dict[str, Any]:
    """A policy of each kind; their weights are far from uniform."""
    found: dict[str, Any] = {"random": None}
    found["actor"] = actor(env, hidden=(8,), action_mask=True)
    found["recurrent"] = actor(env, hidden=(8,), action_mask=True, recurrent="gru")
    if isinstance(env.single_action_space, spaces.Discrete):
        found["values"] = q_network(env, hidden=(8,), action_mask=True, epsilon=0.3)
    for policy in filter(None, found.values()):
        with torch.no_grad():
            for weight in policy.parameters():
                weight.mul_(3.0)
    return found


def play(steps: int, seed: int, place: str, mode: str, kind: str) -> dict[str, Any]:
    """Collect with each policy; return the batches by its name."""
    torch.manual_seed(seed)
    batches = {}
    for name, policy in policies(Masked(1, place, mode, kind)).items():
        env = Masked(64, place, mode, kind)
        keys = ["action_mask"] if place == "info" and policy is None else []
        first = 0 if policy is None else steps // 4  # random actions, then those of the policy
        options: dict[str, Any] = {"init_random_frames": first, "info_keys": keys, "seed": seed}
        total = -(-steps // 512) * 512
        for batch in Collector(env, policy, frames_per_batch=512, total_frames=total, **options):
            batches[name] = batch
        case = f"{name}, {place}, {mode}, {kind}"
        assert env.steps >= steps and env.illegal == 0, f"{case}: {env.illegal} illegal actions"
    return batches


@pytest.mark.parametrize("kind", COUNTS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("place", ["obs", "info"])
def test_illegal_actions_are_never_taken(place: str, mode: str, kind: str) -> None:
    for name, batch in play(1000, 0, place, mode, kind).items():
        assert batch["action_mask"].any(-1).all(), (
            name
        )  # in rows by name, though the env's last masks are empty
        assert not batch["next", "action_mask"][batch["next", "done"].squeeze(-1)].any(), name
        follows = ~batch["next", "done"].squeeze(-1)[:-1] & (batch["collector", "traj_ids"].diff() == 0)
        assert torch.equal(batch["action_mask"][1:][follows], batch["next", "action_mask"][:-1][follows])


def test_the_first_random_frames_are_legal_and_so_are_evaluations() -> None:
    env = Masked()
    policy = policies(env)["actor"]
    next(Collector(env, policy, frames_per_batch=200, init_random_frames=100, seed=0))
    evaluate(env, policy, episodes=8, seed=0)
    evaluate(env, episodes=8, seed=0)
    assert env.steps > 200 and env.illegal == 0


@pytest.mark.parametrize("place", ["obs", "info"])
def test_masked_actors_train_with_ppo(place: str) -> None:
    env = Masked(place=place)
    policy = actor(env, hidden=(8,), action_mask=True)
    value = critic(env, hidden=(8,), actor=policy)
    batch = next(Collector(env, policy, frames_per_batch=128, seed=0))
    GAE(gamma=0.9, lmbda=0.9, value_network=value)(batch)
    losses = ClipPPOLoss(policy, value)(batch)
    assert losses["max_ratio"] == pytest.approx(1.0, abs=1e-4)
    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    assert all(weight.grad.isfinite().all() for weight in policy.parameters())


def test_log_probability_and_entropy_count_legal_actions_only() -> None:
    env = Masked()
    policy = actor(env, hidden=(8,), norm=False)
    with torch.no_grad():
        policy[1].module.weight.mul_(200.0)
    batch = next(Collector(env, policy, frames_per_batch=64, seed=0))
    for i, row in enumerate(batch):
        allowed = row["action_mask"].bool()
        dist = policy.get_dist(row.select("observation_of", "action_mask").unsqueeze(0))
        raw = policy[1].module(policy[0].module(row["observation_of"]))
        legal = Categorical(logits=raw[allowed].double())
        torch.testing.assert_close(dist.entropy()[0].double(), legal.entropy(), rtol=1e-4, atol=1e-6)  # type: ignore[no-untyped-call]
        at = int(allowed[: row["action"]].sum())
        exact = legal.log_prob(torch.tensor(at))  # type: ignore[no-untyped-call]
        torch.testing.assert_close(batch["action_log_prob"][i].double(), exact.detach(), rtol=1e-4, atol=1e-5)
        assert (dist.probs[0][~allowed] == 0).all()


def values(observation: Tensor) -> Tensor:
    """Action values that differ from row to row."""
    return (observation.sum(-1, keepdim=True) * 7 + torch.arange(6.0)).sin() * 5


def plain() -> TensorDictModule:
    """Values whose network does not read the mask."""
    return TensorDictModule(values, ["observation_of"], ["action_value"])


@pytest.mark.parametrize("double", [True, False])
@pytest.mark.parametrize("mode", MODES)
def test_the_target_of_dqn_is_over_legal_actions(mode: str, double: bool) -> None:
    batch = next(Collector(Masked(mode=mode), frames_per_batch=200, seed=0))
    loss = DQNLoss(plain(), double_dqn=double).make_value_estimator(gamma=0.9)
    out = loss(batch)
    done = batch["next", "done"].squeeze(-1)
    legal = batch["next", "action_mask"].bool()
    after = values(batch["next", "observation_of"])
    best = torch.stack(
        [row[ok].max() if ok.any() else torch.tensor(0.0) for row, ok in zip(after, legal, strict=True)]
    )
    target = 1.0 + 0.9 * best * ~done
    assert (best < after.amax(-1))[~done].any()
    assert out["target_value"] == pytest.approx(float(target.mean()), abs=1e-5)
    chosen = values(batch["observation_of"]).gather(1, batch["action"].unsqueeze(1)).squeeze(1)
    torch.testing.assert_close(batch["td_error"], (chosen - target).abs())
    # a network that reads the mask gives the same, on rows and on slices
    reads = TensorDictModule(values, ["observation_of"], ["action_value"])
    masked = TensorDictSequential(reads, ActionMask("action_value", strict=False))
    assert DQNLoss(masked).make_value_estimator(gamma=0.9)(batch)["target_value"] == out["target_value"]


def test_recurrent_values_are_masked_in_slices() -> None:
    env = Masked()
    net = q_network(env, hidden=(8,), recurrent="gru")
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(400, compact_obs=True), sampler=SliceSampler(slice_len=8), batch_size=64
    )
    buffer.extend(next(Collector(env, net, frames_per_batch=400, seed=0)))
    sample = buffer.sample()
    out = DQNLoss(net)(sample)
    assert out["target_value"].abs() < 10  # an illegal action would be worth the lowest number
    out["loss"].backward()


def test_rows_of_n_steps_have_the_mask_of_the_observation_they_reach() -> None:
    batch = next(Collector(Masked(), frames_per_batch=400, seed=0))
    masks = {
        tuple(seen.tolist()): mask
        for rows in (batch, batch["next"])
        for seen, mask in zip(rows["observation_of"], rows["action_mask"], strict=True)
    }
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(400, compact_obs=True),
        transform=MultiStepTransform(n_steps=3, gamma=0.9),
        batch_size=256,
    )
    buffer.extend(batch)
    sample = buffer.sample()
    assert sample["steps_to_next_obs"].max() == 3
    for seen, mask in zip(sample["next", "observation_of"], sample["next", "action_mask"], strict=True):
        assert torch.equal(masks[tuple(seen.tolist())], mask)
    out = DQNLoss(plain()).make_value_estimator(gamma=0.9)(sample)
    legal = sample["next", "action_mask"].bool()
    best = values(sample["next", "observation_of"]).masked_fill(~legal, -torch.inf).amax(-1, keepdim=True)
    after = torch.where(sample["next", "terminated"], 0.0, sample["gamma"] * best)
    assert out["target_value"] == pytest.approx(float((sample["next", "reward"] + after).mean()), abs=1e-5)


def test_a_mask_that_allows_nothing_is_refused() -> None:
    rows = TensorDict({"logits": torch.zeros(3, 5), "action_mask": torch.ones(3, 5)}, [3])
    rows["action_mask"][1, :2] = 0
    ActionMask("logits")(rows.clone())
    with pytest.raises(ValueError, match=r"at least one action in each row, got none in rows \[1\] of 3"):
        ActionMask("logits", counts=(2, 3))(rows.clone())
    padded = rows.clone().set(("collector", "mask"), torch.tensor([True, False, True]))
    ActionMask("logits", counts=(2, 3))(padded)
    with pytest.raises(
        ValueError, match=r"action_mask'\] must have shape \(3, 5\), one number for each action"
    ):
        ActionMask("logits")(rows.set("action_mask", torch.ones(3, 4)))
    for kind in COUNTS:
        env = Masked(kind=kind)
        env.hopeless = True
        for name, policy in policies(env).items():
            with pytest.raises(ValueError, match=r"at least one action in each .*, got none in "):
                next(Collector(env, policy, frames_per_batch=8, seed=0))
                pytest.fail(name)


def test_dqn_refuses_masks_of_another_shape_or_without_the_next() -> None:
    batch = next(Collector(Masked(), frames_per_batch=16, seed=0))
    with pytest.raises(
        ValueError, match=r"the next action_mask must have shape \(16, 6\), one number for each"
    ):
        DQNLoss(plain())(batch.clone().set(("next", "action_mask"), torch.ones(16, 5)))
    with pytest.raises(KeyError, match="action_mask"):
        DQNLoss(plain())(batch.exclude(("next", "action_mask")))


if __name__ == "__main__":
    steps, seed = (int(text) for text in sys.argv[1:])
    for place in ("obs", "info"):
        for mode in MODES:
            for kind in COUNTS:
                play(steps, seed, place, mode, kind)
                print(
                    f"{place} {mode} {kind}: no illegal action in {steps:,} steps of each policy", flush=True
                )
