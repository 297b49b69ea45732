"""`actor`, `critic` and `q_network` fit an env's spaces, train, and have the log-probabilities of float64."""

import copy
from functools import partial
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn
from torch.distributions import (
    AffineTransform,
    Bernoulli,
    Categorical,
    Independent,
    Normal,
    TanhTransform,
    TransformedDistribution,
    kl_divergence,
)

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.estimators import GAE, ClipPPOLoss, DQNLoss, SACLoss
from flatroll.layout import run_starts
from flatroll.layout.tensordict_seam import call_policy
from flatroll.modules import (
    Gaussian,
    JointBernoulli,
    JointCategorical,
    SquashedGaussian,
    actor,
    critic,
    q_network,
    set_epsilon,
    update_norms,
)
from flatroll.modules.by_space import MEMORIES
from flatroll.rollouts import Collector, evaluate

VECTOR = spaces.Box(-np.inf, np.inf, (3,), np.float32)
ACTIONS: dict[str, spaces.Space[Any]] = {
    "discrete": spaces.Discrete(3),
    "discrete from 5": spaces.Discrete(3, start=5),
    "multi discrete": spaces.MultiDiscrete([2, 4]),
    "grid of choices": spaces.MultiDiscrete([[2, 3], [3, 2]]),  # type: ignore[list-item]
    "flags": spaces.MultiBinary(3),
    "grid of flags": spaces.MultiBinary((2, 2)),
    "few integers": spaces.Box(np.array([-1, 250]), np.array([1, 255]), dtype=np.int16),
    "few unsigned integers": spaces.Box(3, 6, (2, 2), np.uint8),
    "bounded": spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 5.0], np.float32)),
    "bounded alike": spaces.Box(-2.0, 2.0, (2, 2), np.float32),
    "unbounded": spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "half bounded": spaces.Box(0.0, np.inf, (2,), np.float64),
    "dict": spaces.Dict(move=spaces.Box(-1, 1, (2,)), press=spaces.MultiDiscrete([2, 2])),
    "tuple": spaces.Tuple((spaces.Discrete(2), spaces.Dict(grip=spaces.MultiBinary(2)))),
}
OBSERVATIONS: dict[str, spaces.Space[Any]] = {
    "float64": spaces.Box(-np.inf, np.inf, (3,), np.float64),
    "number": spaces.Discrete(4, start=2),
    "numbers": spaces.MultiDiscrete([2, 3]),
    "flags": spaces.MultiBinary(3),
    "small image": spaces.Box(0, 255, (7, 6, 3), np.uint8),
    "stacked image": spaces.Box(0, 255, (4, 36, 36), np.uint8),
    "stacked colours": spaces.Box(0, 255, (2, 8, 8, 3), np.uint8),
    "grey": spaces.Box(0, 255, (9, 9), np.uint8),
    "dict": spaces.Dict(
        eye=spaces.Box(0, 255, (8, 8, 3), np.uint8), body=spaces.Dict(leg=VECTOR, side=spaces.Discrete(2))
    ),
    "tuple": spaces.Tuple((VECTOR, spaces.Discrete(2))),
    "partly empty": spaces.Dict(
        a=spaces.Box(-1, 1, (3, 0)), b=VECTOR, c=spaces.Box(0, 255, (3, 0, 2), np.uint8)
    ),
}


class Samples(gym.Env[Any, Any]):
    """Shows samples of its space in episodes of 5 steps, and takes any action of its space."""

    def __init__(self, observation: Any, action: Any) -> None:
        self.observation_space, self.action_space, self.at = copy.deepcopy(observation), action, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        self.observation_space.seed(seed)
        self.at = 0
        return self.observation_space.sample(), {}

    def step(self, action: Any) -> Any:
        # A Gaussian knows no bounds.
        assert isinstance(self.action_space, spaces.Box) or self.action_space.contains(action), action
        self.at += 1
        return self.observation_space.sample(), float(self.at % 2), False, self.at == 5, {}


def make(observation: Any = VECTOR, action: Any = ACTIONS["discrete"], envs: int = 4) -> Any:
    return gym.vector.SyncVectorEnv([partial(Samples, observation, action)] * envs)


def ppo(env: Any, policy: Any, value: Any, updates: int = 2) -> Any:
    """Make some updates from one batch; the weights move, and the first ratio is 1."""
    batch = next(Collector(env, policy, frames_per_batch=32, seed=0))
    GAE(gamma=0.9, lmbda=0.9, value_network=value)(batch)
    loss = ClipPPOLoss(policy, value, entropy_coeff=0.01)
    before = [weight.clone() for weight in loss.parameters()]
    optimizer = torch.optim.Adam(loss.parameters(), lr=1e-2)
    for update in range(updates):
        losses = loss(batch)
        if not update:
            assert losses["max_ratio"] == pytest.approx(1.0, abs=1e-3)
        optimizer.zero_grad()
        (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
        optimizer.step()
    moved = [not torch.equal(old, new) for old, new in zip(before, loss.parameters(), strict=True)]
    assert all(moved) and all(weight.isfinite().all() for weight in loss.parameters())
    return batch


@pytest.mark.filterwarnings("ignore:actions must lie in .0.0, inf.")  # a Gaussian knows no bounds
@pytest.mark.parametrize("kind", ACTIONS)
def test_each_action_space_trains_with_ppo(kind: str) -> None:
    env = make(action=ACTIONS[kind])
    policy = actor(env, hidden=(8,))
    batch = ppo(env, policy, critic(env, hidden=(8,), actor=policy))
    assert batch.get("_features", None) is None
    assert evaluate(env, policy, episodes=4, seed=0).lengths.tolist() == [5] * 4


@pytest.mark.parametrize("kind", OBSERVATIONS)
def test_each_observation_space_trains_with_ppo(kind: str) -> None:
    env = make(OBSERVATIONS[kind])
    policy = actor(env, hidden=(8,), cnn="impala" if kind == "small image" else "small")
    ppo(env, policy, critic(env, hidden=(8,), actor=policy, shared=kind == "dict"))


@pytest.mark.parametrize("recurrent", MEMORIES)
@pytest.mark.parametrize("shared", [True, False])
def test_recurrent_actors_and_critics_train_with_ppo(recurrent: Any, shared: bool) -> None:
    env = make(OBSERVATIONS["dict"], ACTIONS["dict"])
    policy = actor(env, hidden=(8, 4), recurrent=recurrent)
    value = critic(env, hidden=(8, 4), recurrent=recurrent, actor=policy, shared=shared)
    batch = ppo(env, policy, value)
    [memory] = [part for part in policy.module if hasattr(part, "make_tensordict_primer")]
    for state, zero in memory.make_tensordict_primer().defaults.items():
        assert batch[state].shape == (32, *zero.shape) and batch[state][~run_starts(batch)].any()


def test_the_deviation_may_depend_on_the_observation() -> None:
    env = make(action=ACTIONS["bounded"])
    policy = actor(env, std="dependent", norm=False)
    ppo(env, policy, critic(env, norm=False))
    rows = TensorDict({"observation": torch.randn(5, 3)}, [5])
    assert len(policy(rows)["scale"].unique()) > 2
    fixed = actor(env, norm=False)(rows.select("observation"))["scale"]
    assert torch.equal(fixed, torch.ones(5, 2))


@pytest.mark.filterwarnings("ignore:actions must lie in .0.0, inf.")
@pytest.mark.parametrize("kind", ACTIONS)
def test_log_probabilities_are_those_of_float64(kind: str) -> None:
    env = make(action=ACTIONS[kind])
    policy = actor(env, hidden=(16,), norm=False)
    with torch.no_grad():
        for weight in policy.parameters():
            weight.mul_(8.0)  # far from uniform, tanh saturated
    batch = next(Collector(env, policy, frames_per_batch=256, seed=0))
    precise = copy.deepcopy(policy).double()
    wide = batch.double() if not batch.is_empty() else batch
    for key in batch.keys(True, True):
        if not batch[key].is_floating_point():
            wide[key] = batch[key]
    loss = ClipPPOLoss(policy, normalize_advantage=False)
    loss64 = ClipPPOLoss(precise)
    batch["advantage"], wide["advantage"] = torch.ones(256, 1), torch.ones(256, 1).double()
    ours, theirs = loss(batch), loss64(wide)
    assert abs(float(ours["max_ratio"]) - 1.0) < 1e-3 and abs(float(theirs["max_ratio"]) - 1.0) < 1e-3
    torch.testing.assert_close(ours["entropy"].double(), theirs["entropy"], rtol=0.05, atol=0.05)


def test_a_saturated_tanh_keeps_its_log_probability() -> None:
    env = make(action=ACTIONS["bounded"])
    policy = actor(env, norm=False)
    with torch.no_grad():
        policy[1].module.linear.bias.fill_(9.0)
    batch = next(Collector(env, policy, frames_per_batch=64, seed=0))
    assert (batch["action"] == torch.tensor([1.0, 5.0])).any()
    loc, raw = batch["loc"].double(), batch["base_sample", "action"].double()
    slope = (
        2.0 * (np.log(2.0) - raw - nn.functional.softplus(-2.0 * raw))
        + torch.tensor([1.0, 2.5]).double().log()
    )
    exact = (Normal(loc, 1.0).log_prob(raw) - slope).sum(-1)  # type: ignore[no-untyped-call]
    torch.testing.assert_close(batch["action_log_prob"].double(), exact, rtol=1e-5, atol=1e-5)
    assert ClipPPOLoss(policy)(batch.set("advantage", torch.ones(64, 1)))["max_ratio"] == pytest.approx(
        1.0, abs=1e-4
    )
    at_bounds = SquashedGaussian(torch.zeros(1, 2), torch.ones(1, 2), low=-1.0, high=1.0)
    assert at_bounds.log_prob(torch.tensor([[1.0, -1.0]])).isfinite()  # type: ignore[no-untyped-call]


def test_the_squashed_normal_is_that_of_torch() -> None:
    loc, scale = torch.randn(50, 2), torch.rand(50, 2) + 0.1
    same = TransformedDistribution(
        Independent(Normal(loc, scale), 1), [TanhTransform(), AffineTransform(0.0, 2.0)]
    )
    ours: Any = SquashedGaussian(loc, scale, low=-2.0, high=2.0)
    action = 1.9 * torch.rand(50, 2)
    torch.testing.assert_close(ours.log_prob(action), same.log_prob(action), atol=1e-3, rtol=1e-3)
    drawn = ours.sample()
    inside = (drawn.abs() < 1.9).all(-1)  # nearer to the limit, atanh loses digits
    found, expected = ours.log_prob(drawn)[inside], same.log_prob(drawn)[inside]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_a_squashed_action_lies_within_its_bounds() -> None:
    low, high = torch.tensor([-0.1, 1e30, -3e38]), torch.tensor([0.7, 3e30, 3e38])
    dist = SquashedGaussian(torch.zeros(10_000, 3), torch.full((10_000, 3), 20.0), low=low, high=high)
    drawn = dist.sample()  # type: ignore[no-untyped-call]
    assert (drawn >= low).all() and (drawn <= high).all() and (drawn == high).any()
    torch.testing.assert_close(dist.deterministic_sample[0], torch.tensor([0.3, 2e30, 0.0]))


def test_the_joint_distributions_are_those_of_torch() -> None:
    logits = torch.randn(7, 5)
    dist = JointCategorical(logits, nvec=(2, 3), shape=(2,), start=torch.tensor([4, 0]))
    parts = [Categorical(logits=part) for part in logits.split([2, 3], -1)]  # type: ignore[no-untyped-call]
    drawn = dist.sample((6,))
    assert drawn.shape == (6, 7, 2) and drawn.dtype is torch.int64
    expected = parts[0].log_prob(drawn[..., 0] - 4) + parts[1].log_prob(drawn[..., 1])  # type: ignore[no-untyped-call]
    torch.testing.assert_close(dist.log_prob(drawn), expected)
    torch.testing.assert_close(dist.entropy(), parts[0].entropy() + parts[1].entropy())  # type: ignore[no-untyped-call]
    assert torch.equal(dist.mode, torch.stack([parts[0].mode + 4, parts[1].mode], -1))
    other = JointCategorical(torch.zeros(7, 5), nvec=(2, 3), shape=(2,))
    flat = [Categorical(logits=torch.zeros(7, n)) for n in (2, 3)]
    divergence = sum(kl_divergence(p, q) for p, q in zip(parts, flat, strict=True))
    torch.testing.assert_close(kl_divergence(dist, other), divergence)
    flags = JointBernoulli(logits, shape=(5, 1))
    plain = Independent(Bernoulli(logits=logits.unsqueeze(-1)), 2)
    pressed = flags.sample()
    assert pressed.dtype is torch.int8 and pressed.shape == (7, 5, 1)
    torch.testing.assert_close(flags.log_prob(pressed), plain.log_prob(pressed.float()))  # type: ignore[no-untyped-call]
    torch.testing.assert_close(flags.entropy(), plain.entropy())  # type: ignore[no-untyped-call]
    normal = Gaussian(torch.zeros(3, 2, 2), torch.ones(3, 2, 2), event_dims=2)
    assert normal.log_prob(torch.zeros(3, 2, 2)).shape == (3,) and not normal.deterministic_sample.any()  # type: ignore[no-untyped-call]


def test_modes_are_taken_where_nothing_is_sampled() -> None:
    for action in ACTIONS.values():
        env = make(action=action)
        policy = actor(env, norm=False)
        rows = TensorDict({"observation": torch.randn(5, 3)}, [5])
        with set_interaction_type(InteractionType.DETERMINISTIC):
            first, second = (policy(rows.clone()).select("action") for _ in range(2))
        assert (first == second).all()
        drawn = [policy(rows.clone()).select("action") for _ in range(9)]
        assert not all((first == other).all() for other in drawn)


@pytest.mark.parametrize("name", ACTIONS)
@pytest.mark.parametrize("scored", [True, False])
def test_a_collector_draws_the_actions_that_the_actor_draws(name: str, scored: bool) -> None:
    policy = actor(make(action=ACTIONS[name]), norm=False)
    policy.module[-1].return_log_prob = scored
    rows = TensorDict({"observation": torch.randn(5, 3)}, [5])
    found, expected = rows.clone(), rows.clone()
    for batch, call in ((found, partial(call_policy, policy)), (expected, policy)):
        torch.manual_seed(3)
        call(batch)
    leaves: Any = expected.select("action").items(True, True)
    for key, drawn in leaves:
        torch.testing.assert_close(found[key], drawn)
    if scored and name not in ("dict", "tuple"):
        torch.testing.assert_close(
            found["action_log_prob"], expected["action_log_prob"], atol=1e-5, rtol=1e-5
        )


def test_a_gaussian_scores_what_it_draws() -> None:
    loc, scale = torch.randn(6, 2, 2, requires_grad=True), torch.rand(6, 2, 2) + 0.1
    dist = Gaussian(loc, scale, event_dims=2)
    drawn, log_prob = dist.rsample_and_log_prob((3,))
    torch.testing.assert_close(log_prob, dist.log_prob(drawn))  # type: ignore[no-untyped-call]
    assert drawn.shape == (3, 6, 2, 2) and log_prob.shape == (3, 6)
    # moving the mean moves the sample with it: the density there stays
    assert torch.autograd.grad(log_prob.sum() + drawn.sum(), loc)[0].eq(3.0).all()


def test_what_is_printed() -> None:
    env = make(OBSERVATIONS["dict"], ACTIONS["multi discrete"])
    shown = repr(actor(env, recurrent="gru", hidden=(32, 16)))
    for part in (
        "RunningNorm",
        "Encoder",
        "ImageEntry",
        "Conv2d(3, 16",
        "GRUModule",
        "in_features=16",
        "JointCategorical",
    ):
        assert part in shown, part
    policy = actor(make())
    assert isinstance(policy[1].module.layers[0], nn.Linear)  # parts are there to be replaced
    policy[1].module.layers[1] = nn.ReLU()
    assert policy(TensorDict({"observation": torch.zeros(2, 3)}, [2]))["action"].shape == (2,)


def test_weights_are_orthogonal() -> None:
    policy = actor(make(), hidden=(32, 32))
    weight = policy[1].module.layers[2].weight
    torch.testing.assert_close(weight @ weight.T, 2.0 * torch.eye(32), atol=1e-4, rtol=0)
    assert float(policy[2].module.weight.detach().norm()) == pytest.approx(0.01 * 3**0.5, rel=1e-3)
    assert not policy[2].module.bias.any()


def test_norms_are_one_module_for_actor_and_critic() -> None:
    env = make()
    policy = actor(env)
    value = critic(env, actor=policy)
    assert value[0] is policy[0]
    batch = next(Collector(env, policy, frames_per_batch=40, seed=0))
    policy[0].update(batch)
    assert policy[0].statistics.count > 40
    assert batch.get("observation_norm", None) is None
    assert type(actor(env, norm=False)[0]).__name__ == "TensorDictModule"


def test_one_call_updates_the_norms_of_all_entries_once() -> None:
    env = make(spaces.Dict(lidar=VECTOR, goal=VECTOR, image=spaces.Box(0, 255, (8, 8, 3), np.uint8)))
    policy = actor(env)
    own = critic(env)  # with norms of its own
    batch = next(Collector(env, policy, frames_per_batch=40, seed=0))
    loss = ClipPPOLoss(policy, own)
    update_norms(loss, batch)
    norms = [policy[0], policy[1], own[0], own[1]]
    assert {norm.in_key for norm in norms} == {"lidar", "goal"}
    count = float(norms[0].statistics.count)
    assert count > 40 and all(float(norm.statistics.count) == count for norm in norms)
    net = q_network(env)
    targets = DQNLoss(net)  # whose target network is a copy with the same statistics
    update_norms(targets, batch)
    assert float(net[0].statistics.count) == count
    batch["lidar"][3] = float("nan")
    with pytest.raises(ValueError, match="must be finite"):
        update_norms(policy, batch)
    assert all(float(norm.statistics.count) == count for norm in norms)  # neither entry has counted it
    update_norms(nn.Linear(1, 1), batch)
    with pytest.raises(
        TypeError, match="network must be a policy, a loss or another torch module, got TensorDict"
    ):
        update_norms(batch, batch)  # type: ignore[arg-type]


def test_a_q_network_is_policy_and_network_of_dqn() -> None:
    env = make(OBSERVATIONS["dict"])
    for recurrent in (None, "gru"):
        net = q_network(env, hidden=(8, 8), recurrent=recurrent, epsilon=0.5)
        batch = next(Collector(env, net, frames_per_batch=64, seed=0))
        loss = DQNLoss(net)
        loss(batch)["loss"].backward()
        assert all(weight.grad is not None for weight in net.parameters())
        greedy = batch["action_value"].argmax(-1)
        assert 0.3 < (batch["action"] == greedy).float().mean() < 0.95
        assert evaluate(env, net, episodes=4).lengths.tolist() == [5] * 4
        set_epsilon(net, 0.0)
        batch = next(Collector(env, net, frames_per_batch=64, seed=0))
        assert torch.equal(batch["action"], batch["action_value"].argmax(-1))


def test_a_q_network_of_continuous_actions_is_one_of_sac() -> None:
    env = make(OBSERVATIONS["dict"], ACTIONS["bounded"])
    policy, net = actor(env, hidden=(8,), std="dependent"), q_network(env, hidden=(8,))
    buffer = ReplayBuffer(storage=LazyTensorStorage(64), batch_size=16)
    buffer.extend(next(Collector(env, policy, frames_per_batch=64, seed=0)))
    losses = SACLoss(policy, net)(buffer.sample())
    (losses["loss_actor"] + losses["loss_qvalue"]).backward()


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (
            lambda: actor(make(action=spaces.Text(3))),
            ValueError,
            "action space must be a Discrete, MultiDiscrete",
        ),
        (
            lambda: actor(
                SimpleNamespace(observation_space=VECTOR, action_space=spaces.Dict(a=spaces.Text(3)))
            ),
            ValueError,
            "action space 'a' must be a Discrete",
        ),
        (lambda: actor(make(spaces.Box(-1, 1, (0,)))), ValueError, "must have an entry with numbers"),
        (
            lambda: actor(make(action=spaces.Box(-1, 1, (3, 0)))),
            ValueError,
            "action space must have numbers to",
        ),
        (
            lambda: actor(
                SimpleNamespace(observation_space=VECTOR, action_space=spaces.Box(0, 2048, (2,), np.int64))
            ),
            ValueError,
            "a Box of floats or of integers with at most 4096 values in all, .* got Box",
        ),
        (
            lambda: actor(SimpleNamespace(observation_space=spaces.Text(3), action_space=spaces.Discrete(2))),
            ValueError,
            "observation entries must be Box, Discrete, MultiDiscrete or MultiBinary, got Text",
        ),
        (lambda: actor(object()), TypeError, "env.observation_space must be a gymnasium space, got NoneType"),
        (
            lambda: actor(make(action=ACTIONS["unbounded"]), squash=True),
            ValueError,
            "squash=True needs finite bounds",
        ),
        (lambda: actor(make(), hidden=(), recurrent="gru"), ValueError, "hidden must have at least one size"),
        (lambda: actor(make(), hidden=(0,)), ValueError, "hidden must be an integer of at least 1, got 0"),
        (
            lambda: actor(make(), recurrent="rnn"),  # type: ignore[arg-type]
            ValueError,
            "recurrent must be None, 'gru', 'lstm', 'mingru', 'linear', 'lru', 's6', 'ffm', 'deltanet' or "
            "'transformer', got 'rnn'",
        ),
        (lambda: actor(make(), std="none"), ValueError, "std must be 'independent' or 'dependent'"),  # type: ignore[arg-type]
        (lambda: critic(make(), shared=True), ValueError, "shared=True needs the actor"),
        (
            lambda: q_network(make(action=ACTIONS["flags"])),
            ValueError,
            "q_network needs a Discrete action space",
        ),
        (lambda: q_network(make(action=ACTIONS["discrete from 5"])), ValueError, "that counts from 0"),
        (lambda: q_network(make(), epsilon=2.0), ValueError, r"epsilon must lie in \[0, 1\], got 2.0"),
        (
            lambda: q_network(make(action=ACTIONS["bounded"]), epsilon=0.1),
            ValueError,
            r"epsilon=0.1 needs a Discrete action space, got Box",
        ),
        (lambda: set_epsilon(q_network(make()), -0.1), ValueError, r"epsilon must lie in \[0, 1\], got -0.1"),
        (lambda: set_epsilon(critic(make()), 0.1), ValueError, "network must have an EpsilonGreedy"),
        (
            lambda: q_network(make(action=ACTIONS["bounded"]), recurrent="gru"),
            ValueError,
            "needs a Discrete action space, with one value per action",
        ),
    ],
)
def test_bad_input(call: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        call()


def test_observations_of_another_shape_are_refused() -> None:
    several = spaces.Dict(kind=spaces.MultiDiscrete([2, 3]), image=spaces.Box(0, 255, (8, 8), np.uint8))
    for space, key, column in (
        (VECTOR, "observation", torch.zeros(6, 2)),
        (several, "kind", torch.zeros(6, 1, dtype=torch.int64)),
        (
            several,
            "image",
            torch.zeros(6, 4, 8, dtype=torch.uint8),
        ),  # six rows hold as many numbers as three images
    ):
        net = actor(SimpleNamespace(observation_space=space, action_space=spaces.Discrete(2)), norm=False)
        rows = TensorDict({"observation": torch.zeros(6, 3), "kind": torch.zeros(6, 2).long()}, [6])
        rows["image"] = torch.zeros(6, 8, 8, dtype=torch.uint8)
        net(rows.clone())
        with pytest.raises(
            ValueError, match=r"must have shape \('\*', .*, got \(6, .*another space needs another network"
        ):
            net(rows.set(key, column))


def test_print_says_which_images_are_divided_by_255() -> None:
    networks = [actor(make(observation=OBSERVATIONS[name])) for name in ("stacked image", "number")]
    assert ["divided by 255" in repr(network) for network in networks] == [True, False]


@pytest.mark.parametrize("low", [np.finfo(np.float32).tiny, -np.finfo(np.float32).max])
def test_the_largest_numbers_of_float32_are_no_bounds(low: float) -> None:
    """Raw pools of envpool declare unbounded actions so; as_vector_env gives infinite bounds."""
    unbounded = actor(make(action=spaces.Box(low, np.finfo(np.float32).max, (2,))))
    with set_interaction_type(InteractionType.RANDOM):
        rows = unbounded(TensorDict({"observation": torch.zeros(64, 3)}, [64]))
    assert rows["action"].abs().max() < 10
    assert rows["action_log_prob"].isfinite().all()
