"""No illegal action is ever taken: random ones, those of actors, and those of action values.

``python -m tests.rollouts.test_masks STEPS SEED`` is the long form: so many steps of each policy.
"""

import math
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
from flatroll.layout.spaces import first_options, option_counts
from flatroll.modules import ActionMask, CombinedCategorical, JointBernoulli, actor, critic, q_network
from flatroll.rollouts import Collector, RandomPolicy, evaluate, rollout

MODES = ("NextStep", "SameStep")
#: The action space of each kind, and the shape of a mask.
KINDS: dict[str, tuple[spaces.Space[Any], tuple[int, ...]]] = {
    "discrete": (spaces.Discrete(6), (6,)),
    "multi": (spaces.MultiDiscrete([2, 3]), (5,)),
    "flags": (spaces.MultiBinary(3), (6,)),
    "integers": (spaces.Box(np.array([-1, 250]), np.array([1, 253]), dtype=np.int16), (7,)),
    "by choice": (spaces.MultiDiscrete([4, 4, 4]), (3, 4)),
    "flags by choice": (spaces.MultiBinary((2, 2)), (2, 2, 2)),
    "combinations": (spaces.Box(np.array([0, 5]), np.array([1, 7]), dtype=np.uint8), (2, 3)),
}


class Masked(gym.vector.VectorEnv[Any, Any, Any]):
    """Allows some actions at random in each step, none in an episode's last observation, and notes illegal ones."""

    def __init__(
        self, num_envs: int = 8, place: str = "obs", mode: str = "NextStep", kind: str = "discrete"
    ) -> None:
        self.num_envs, self.place = num_envs, place
        self.single_action_space, self.mask_shape = KINDS[kind]
        counts = option_counts(self.single_action_space)
        assert counts is not None
        self.counts, self.first = counts, first_options(self.single_action_space)
        self.combined = kind == "combinations"
        self.metadata = {"autoreset_mode": AutoresetMode(mode)}
        numbers, mask = spaces.Box(-1, 1, (3,)), spaces.Box(0, 1, self.mask_shape, np.int8)
        self.single_observation_space = (
            spaces.Dict(observation_of=numbers, action_mask=mask) if place == "obs" else numbers
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
        size = math.prod(self.mask_shape)
        mask = (self.rng.random((self.num_envs, size)) < 0.4).astype(np.int8)
        at = 0
        for count in (size,) if self.combined else self.counts:  # one option of each choice at least
            mask[np.arange(self.num_envs), at + self.rng.integers(count, size=self.num_envs)] = 1
            at += count
        mask[final] = 0
        self.mask = mask.reshape(-1, *self.mask_shape) * (not self.hopeless)
        numbers = self.rng.uniform(-1, 1, (self.num_envs, 3)).astype(np.float32)
        if self.place == "obs":
            return {"observation_of": numbers, "action_mask": self.mask}, {}
        return numbers, {"action_mask": self.mask, "_action_mask": ~final}

    def step(self, actions: Any) -> Any:
        choices = np.asarray(actions, np.int64).reshape(self.num_envs, -1) - self.first
        if self.combined:
            legal = self.mask[np.arange(self.num_envs), choices[:, 0], choices[:, 1]] == 1
        else:
            flat = self.mask.reshape(self.num_envs, -1)
            legal = np.take_along_axis(flat, choices + np.cumsum([0, *self.counts[:-1]]), 1).all(1)
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


CASES = [
    (place, mode, kind)
    for place in ("obs", "info")
    for mode in MODES
    for kind in KINDS
    # an actor must know of a mask of combinations when it is made
    if (place, kind) != ("info", "combinations")
]


@pytest.mark.parametrize(("place", "mode", "kind"), CASES)
def test_illegal_actions_are_never_taken(place: str, mode: str, kind: str) -> None:
    for name, batch in play(1000, 0, place, mode, kind).items():
        # in rows by name, though the env's last masks are empty
        assert batch["action_mask"].flatten(1).any(-1).all(), name
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
    for kind in KINDS:
        env = Masked(kind=kind)
        env.hopeless = True
        for name, policy in policies(env).items():
            with pytest.raises(ValueError, match=r"at least one action in each .*, got none in "):
                next(Collector(env, policy, frames_per_batch=8, seed=0))
                pytest.fail(name)


class Shows(gym.Env[Any, Any]):
    """Episodes of `length` steps; the observation is the step, beside a mask that counts the steps, too."""

    def __init__(self, action_space: spaces.Space[Any], mask: spaces.Space[Any], length: int = 3) -> None:
        self.action_space, self.length = action_space, length
        self.observation_space = spaces.Dict(at=spaces.Box(0, 99, (1,)), action_mask=mask)

    def seen(self) -> dict[str, Any]:
        def values(space: Any) -> Any:
            if isinstance(space, spaces.Dict):
                return {name: values(part) for name, part in space.items()}
            return np.full(space.shape, self.count, space.dtype)

        mask = values(self.observation_space["action_mask"])
        return {"at": np.full(1, self.count, np.float32), "action_mask": mask}

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.count = 1
        return self.seen(), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        return self.seen(), 1.0, self.count == self.length + 1, False, {}


@pytest.mark.parametrize("shape", [(2, 3), (5, 2, 2)])
def test_an_entry_that_masks_no_action_is_an_ordinary_entry(shape: tuple[int, ...]) -> None:
    # It is stored as it is, whatever its shape, and is an input of the networks.
    lengths = [2, 3]
    mask = spaces.Box(0, 99, shape, np.float64)
    envs = [lambda n=n: Shows(spaces.Box(-1, 1, (2,)), mask, n) for n in lengths]
    for mode in MODES:
        env = gym.vector.SyncVectorEnv(envs, autoreset_mode=AutoresetMode(mode))
        policy = actor(env, hidden=(4,))
        assert "action_mask" in policy.in_keys and "action_mask" in critic(env).in_keys
        with pytest.warns(
            UserWarning, match=r"which is no mask of Box\(.* \(possible: none, since it has no"
        ):
            batches = [rollout(env, num_steps=9, seed=0)]
        batches += [rollout(env, policy, num_steps=9, seed=0)]
        for batch in batches:
            assert batch["action_mask"].dtype is torch.float64
            for key in ("action_mask", ("next", "action_mask")):
                at = batch[(*key[:-1], "at") if isinstance(key, tuple) else "at"]
                assert torch.equal(batch[key], at.double().view(-1, *(1,) * len(shape)).expand(-1, *shape))
        with pytest.raises(ValueError, match=r"action_mask=True needs an action space with choices"):
            actor(env, action_mask=True)
        with pytest.raises(ValueError, match=r"action_mask=True needs a Discrete action space"):
            q_network(env, action_mask=True)


def test_a_policy_sees_masks_as_the_env_gave_them() -> None:
    # One env ends while the others continue; the mask holds weights, not only 0 and 1.
    seen: list[Tensor] = []

    def act(mask: Tensor) -> Tensor:
        seen.append(mask.clone())
        return torch.zeros(len(mask), 3, dtype=torch.int64)

    mask = spaces.Box(0, 99, (3, 4), np.int32)
    envs = [lambda n=n: Shows(spaces.MultiDiscrete([4, 4, 4]), mask, n) for n in (2, 3)]
    policy = TensorDictModule(act, ["action_mask"], ["action"])
    rollout(gym.vector.SyncVectorEnv(envs), policy, num_steps=6, seed=0)
    assert all(one.dtype is torch.int32 for one in seen)
    # by step and env: all ones in the steps that only reset, else what the env counts
    assert [one[:, 0, 0].tolist() for one in seen[:5]] == [[1, 1], [2, 2], [1, 3], [1, 1], [2, 1]]


@pytest.mark.parametrize("action", [spaces.Discrete(4), spaces.MultiBinary(2), spaces.MultiDiscrete([2, 2])])
def test_a_mask_of_the_wrong_shape_is_refused_when_the_actor_is_made(action: spaces.Space[Any]) -> None:
    for shape in ((3,), (2, 2), (5, 3)):
        env = Shows(action, spaces.Box(0, 1, shape, np.int8))
        with pytest.raises(
            ValueError, match=r"observation\['action_mask'\] must be a mask of .*\(4,\).* got shape"
        ):
            actor(env)
        plain = actor(env, action_mask=False)
        assert not any(isinstance(part, ActionMask) for part in plain)
        if len(shape) == 1:
            with pytest.raises(
                ValueError, match=r"action_mask must have shape \(1, 4\) for .*, got \(1, 3\)"
            ):
                rollout(env, num_steps=2)
        else:
            with pytest.warns(
                UserWarning, match=r"is no mask of .* \(possible: \(4,\)\), so random actions ignore"
            ):
                rollout(env, num_steps=2)


def test_parts_of_an_action_have_their_own_masks() -> None:
    action = spaces.Dict(go=spaces.Discrete(3), press=spaces.MultiBinary(2), aim=spaces.Box(-1, 1, (1,)))
    masks = spaces.Dict(press=spaces.Box(0, 1, (4,), np.int8))
    env = Shows(action, masks)
    policy = actor(env, hidden=(4,))
    rows = TensorDict({"at": torch.zeros(500, 1)}, [500])
    rows["action_mask", "press"] = torch.tensor([1, 0, 0, 1]).expand(500, -1)
    out = policy(rows)
    assert torch.equal(out["action", "press"], torch.tensor([0, 1], dtype=torch.int8).expand(500, -1))
    assert out["action", "go"].unique().tolist() == [0, 1, 2]
    assert torch.equal(out["action", "press_log_prob"], torch.zeros(500))
    drawn = RandomPolicy(action)(rows.select("action_mask"))
    assert torch.equal(drawn["action", "press"], out["action", "press"])
    for wrong in ({"aim": (2,)}, {"press": (4,), "jump": (2,)}):
        parts = {name: spaces.Box(0, 1, shape, np.int8) for name, shape in wrong.items()}
        with pytest.raises(
            ValueError, match=r"observation\[\('action_mask', '(aim|jump)'\)\] must be a mask of"
        ):
            actor(Shows(action, spaces.Dict(parts)))
    rows["action_mask", "jump"] = rows["action_mask", "press"]
    with pytest.raises(
        ValueError,
        match=r"masks for \['jump'\], but the parts of the action space are \['go', 'press', 'aim'\]",
    ):
        RandomPolicy(action)(rows.select("action_mask"))


class Silent(gym.Env[Any, Any]):
    """Tells its mask, which forbids 0, in each second step only, and never at a reset."""

    observation_space, action_space = spaces.Box(0, 99, (1,)), spaces.MultiBinary(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.count += 1
        info = {"action_mask": np.array([0, 1, 0, 1], np.int8)} if self.count % 2 else {}
        return np.full(1, self.count, np.float32), 1.0, self.count == 5, False, info


@pytest.mark.parametrize("kind", [np.array, list])
@pytest.mark.parametrize("mode", MODES)
def test_an_env_that_tells_no_mask_allows_all(mode: str, kind: Any) -> None:
    class Tells(Silent):
        def step(self, action: Any) -> Any:
            *rest, info = super().step(action)
            return *rest, {name: kind(mask) for name, mask in info.items()}

    class Shorter(Tells):
        def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
            found = super().reset()
            self.count = 2  # other steps than its neighbour's
            return found

    env = gym.vector.SyncVectorEnv([Tells, Shorter], autoreset_mode=AutoresetMode(mode))
    for policy in (None, actor(env, hidden=(4,), action_mask=True)):
        keys = ["action_mask"] if policy is None else []
        batch = next(Collector(env, policy, frames_per_batch=400, seed=0, info_keys=keys))
        # Shorter resets at count 2, whose observation is 0; its masks come at 3 and 5
        told = batch["observation"].squeeze(-1) % 2 == 1
        assert (batch["action"][told] == 1).all()
        assert (batch["action"][~told] == 0).any()
        if policy is not None:
            assert batch["action_mask"][~told].all()
            assert torch.equal(policy.get_dist(batch).log_prob(batch["action"]), batch["action_log_prob"])


def test_distributions_of_masked_flags_and_combinations_are_those_of_the_legal_actions() -> None:
    torch.manual_seed(0)
    logits = torch.randn(50, 3, requires_grad=True)
    mask = torch.tensor([1, 0, 0, 1, 1, 1]).expand(50, -1)  # off, on, free
    masked = ActionMask("logits", binary=True)(TensorDict({"logits": logits, "action_mask": mask}, [50]))[
        "logits"
    ]
    dist = JointBernoulli(masked)
    free = torch.distributions.Bernoulli(logits=logits[:, 2])
    torch.testing.assert_close(dist.entropy(), free.entropy())
    assert torch.equal(dist.mode[:, :2], torch.tensor([0, 1], dtype=torch.int8).expand(50, -1))
    drawn = dist.sample((200,))
    assert not drawn[..., 0].any() and drawn[..., 1].all() and 0 < drawn[..., 2].float().mean() < 1
    torch.testing.assert_close(dist.log_prob(drawn), free.log_prob(drawn[..., 2].float()))
    (dist.entropy().sum() + dist.log_prob(drawn).sum()).backward()
    assert logits.grad is not None and logits.grad.isfinite().all() and not logits.grad[:, :2].any()
    kl = torch.distributions.kl_divergence(dist, JointBernoulli(masked.roll(1, 0)))
    other = torch.distributions.Bernoulli(logits=logits[:, 2].roll(1, 0))
    torch.testing.assert_close(kl, torch.distributions.kl_divergence(free, other))

    logits = torch.randn(7, 24, dtype=torch.float64)
    start = torch.tensor([0, -5, 100])
    dist = CombinedCategorical(logits, nvec=(2, 3, 4), start=start)
    plain = Categorical(logits=logits)
    drawn = dist.sample((300,))
    at = ((drawn - start) * torch.tensor([12, 4, 1])).sum(-1)
    assert drawn.shape == (300, 7, 3) and at.min() >= 0 and at.max() == 23
    torch.testing.assert_close(dist.log_prob(drawn), plain.log_prob(at))  # type: ignore[no-untyped-call]
    assert torch.equal(dist.entropy(), plain.entropy())  # type: ignore[no-untyped-call]
    assert torch.equal(((dist.mode - start) * torch.tensor([12, 4, 1])).sum(-1), logits.argmax(-1))
    shifted = CombinedCategorical(logits.roll(1, 0), nvec=(2, 3, 4), start=start)
    wanted = torch.distributions.kl_divergence(plain, Categorical(logits=logits.roll(1, 0)))
    assert torch.equal(torch.distributions.kl_divergence(dist, shifted), wanted)
    with pytest.raises(
        ValueError, match=r"logits must have shape \[\*B, 24\], a number for each combination of nvec"
    ):
        CombinedCategorical(logits[:, 1:], nvec=(2, 3, 4))
    with pytest.raises(ValueError, match=r"counts must be left out with binary=True"):
        ActionMask("logits", counts=(2,), binary=True)


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
    for place, mode, kind in CASES:
        play(steps, seed, place, mode, kind)
        print(f"{place} {mode} {kind}: no illegal action in {steps:,} steps of each policy", flush=True)
