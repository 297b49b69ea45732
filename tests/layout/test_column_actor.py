"""Policies called on columns give what they give when called as they are, and others are called as they are."""

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from tensordict import TensorDictBase
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
)
from torch import Tensor, nn
from torch.distributions import Categorical

from flatroll.layout.column_actor import ColumnActor, draw_choice
from flatroll.modules import Gaussian, MinGRUModule, actor, q_network
from flatroll.rollouts import Collector

ENVS = 5


class Wandering(gym.Env[Any, Any]):
    """An env of any spaces with random observations, whose episodes have 3 to 9 steps."""

    def __init__(self, observation: Any, action: Any) -> None:
        self.observation_space = observation
        self.action_space = action
        self._left = 0

    def _observe(self) -> Any:
        seen = self.observation_space.sample()
        if isinstance(seen, dict) and "action_mask" in seen:
            seen["action_mask"][..., 0] = 1  # one action is always legal
            if isinstance(self.action_space, spaces.MultiDiscrete | spaces.MultiBinary):
                seen["action_mask"][...] = 1
                seen["action_mask"][..., -1] = 0
        return seen

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        if seed is not None:
            self.observation_space.seed(seed)
        self._left = int(self.np_random.integers(3, 10))
        return self._observe(), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.action_space.contains(action), action
        self._left -= 1
        return self._observe(), 1.0, self._left == 0, False, {}


NUMBERS = spaces.Box(-2.0, 2.0, (3,), np.float32)
FREE = spaces.Box(-np.inf, np.inf, (2, 2), np.float32)
UNEQUAL = spaces.Box(np.array([-1.0, 0.0], np.float32), np.array([1.0, 3.0], np.float32))


def masked(shape: tuple[int, ...]) -> spaces.Dict:
    return spaces.Dict({"observation": NUMBERS, "action_mask": spaces.Box(0, 1, shape, np.int8)})


CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "choice": (NUMBERS, spaces.Discrete(4), {}),
    "choice from 2 on": (NUMBERS, spaces.Discrete(4, start=2), {}),
    "choice, masked": (masked((4,)), spaces.Discrete(4), {}),
    "choices": (NUMBERS, spaces.MultiDiscrete([2, 5, 3]), {}),
    "choices, one": (NUMBERS, spaces.MultiDiscrete([4]), {}),
    "choices, masked": (masked((5,)), spaces.MultiDiscrete([2, 3]), {}),
    "choices, masked in combination": (masked((2, 3)), spaces.MultiDiscrete([2, 3]), {}),
    "flags": (NUMBERS, spaces.MultiBinary((2, 2)), {}),
    "flags, masked": (masked((6,)), spaces.MultiBinary(3), {}),
    "integers": (NUMBERS, spaces.Box(-1, 2, (2,), np.int32), {}),
    "numbers": (NUMBERS, FREE, {}),
    "numbers, std by the observation": (NUMBERS, FREE, {"std": "dependent"}),
    "numbers, squashed": (NUMBERS, UNEQUAL, {}),
    "numbers, squashed to one bound": (NUMBERS, spaces.Box(-1.0, 1.0, (2,), np.float32), {}),
    "float64": (spaces.Box(-2.0, 2.0, (3,), np.float64), spaces.Discrete(4), {}),
    "several entries": (
        spaces.Dict({"a": NUMBERS, "b": spaces.Dict({"c": spaces.Discrete(3)})}),
        spaces.Discrete(4),
        {},
    ),
    "images": (spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Discrete(4), {}),
    "no norm": (NUMBERS, spaces.Discrete(4), {"norm": False}),
    "gru": (NUMBERS, spaces.Discrete(4), {"recurrent": "gru"}),
    "lstm": (NUMBERS, spaces.Discrete(4), {"recurrent": "lstm"}),
    "gru, numbers": (NUMBERS, FREE, {"recurrent": "gru"}),
}


def make_policy(observation: Any, action: Any, options: dict[str, Any]) -> Any:
    torch.manual_seed(4)
    policy = actor(Wandering(observation, action), **options)
    for weight in policy.parameters():
        weight.data += 0.3 * torch.randn_like(weight)
    return policy


def collect(
    policy: Any, observation: Any, action: Any, mode: Any = "NextStep", **options: Any
) -> tuple[TensorDictBase, Any, bool]:
    """Three batches in one, the state of the generator after them, and whether the last step was on columns."""
    made = [lambda: Wandering(observation, action)] * ENVS
    env = gym.vector.SyncVectorEnv(made, autoreset_mode=mode)
    torch.manual_seed(11)
    collector = Collector(env, policy, frames_per_batch=40, total_frames=120, seed=3, **options)
    batch: Any = torch.cat(list(collector))  # type: ignore[arg-type]
    used: Any = collector._runner._module
    return batch, torch.get_rng_state(), used._on_columns is not None


def as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no policy be called on columns."""
    monkeypatch.setattr(ColumnActor, "of", lambda policy: None)


def assert_equal(ours: TensorDictBase, theirs: TensorDictBase) -> None:
    """The same columns and bits, up to the last digits of log-probabilities."""
    keys = sorted(map(str, ours.keys(True, True)))
    assert keys == sorted(map(str, theirs.keys(True, True)))
    for key in ours.keys(True, True):
        one, other = ours[key], theirs[key]
        assert one.dtype == other.dtype, key
        if key == "action_log_prob":
            torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(one, other), key


@pytest.mark.parametrize("mode", [*gym.vector.AutoresetMode][:2], ids=["next step", "same step"])
@pytest.mark.parametrize("name", CASES)
def test_an_actor_gives_the_same_on_columns(name: str, mode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    observation, action, options = CASES[name]
    more: dict[str, Any] = {"obs_dtype": torch.float32} if name == "float64" else {}
    policy = make_policy(observation, action, options)
    ours, generator, direct = collect(policy, observation, action, mode, **more)
    assert direct

    as_it_is(monkeypatch)
    theirs, expected, direct = collect(policy, observation, action, mode, **more)
    assert not direct
    assert_equal(ours, theirs)
    assert torch.equal(generator, expected)
    assert len(ours["action"].reshape(len(ours), -1).unique(dim=0)) > 1


@pytest.mark.parametrize("epsilon", [0.0, 0.5])
def test_a_network_of_values_gives_the_same_on_columns(
    epsilon: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    space = spaces.Discrete(4)
    policy = q_network(Wandering(masked((4,)), space), epsilon=epsilon)
    ours, generator, direct = collect(policy, masked((4,)), space)
    assert direct

    as_it_is(monkeypatch)
    theirs, expected, _ = collect(policy, masked((4,)), space)
    assert_equal(ours, theirs)
    assert torch.equal(generator, expected)


def own_actor(*more: TensorDictModuleBase, distribution: Any = Categorical, **options: Any) -> Any:
    """An actor of plain parts, of other parts in between, and of a distribution."""
    torch.manual_seed(4)
    net = TensorDictModule(nn.Linear(3, 4), ["observation"], ["logits"])
    options = {"default_interaction_type": InteractionType.RANDOM, "return_log_prob": True} | options
    sampler = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=distribution, **options
    )
    return ProbabilisticTensorDictSequential(net, *more, sampler)


def test_an_actor_of_plain_parts_gives_the_same_on_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = MinGRUModule(3, 8, in_key="observation", out_key="features")
    body = TensorDictSequential(memory, TensorDictModule(nn.Linear(8, 4), ["features"], ["logits"]))
    sampler: Any = own_actor()[-1]
    for policy in (own_actor(), ProbabilisticTensorDictSequential(body, sampler)):
        ours, generator, direct = collect(policy, NUMBERS, spaces.Discrete(4))
        assert direct
        with monkeypatch.context() as context:
            as_it_is(context)
            theirs, expected, _ = collect(policy, NUMBERS, spaces.Discrete(4))
        assert_equal(ours, theirs)
        assert torch.equal(generator, expected)


class ScaleAndLoc(nn.Module):
    """Deviations and means, in this order."""

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        return observation.exp(), observation - 5.0


def test_a_distribution_takes_its_parameters_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    net = TensorDictModule(ScaleAndLoc(), ["observation"], ["scale", "loc"])
    sampler = ProbabilisticTensorDictModule(
        ["scale", "loc"],
        ["action"],
        distribution_class=Gaussian,
        default_interaction_type=InteractionType.RANDOM,
        return_log_prob=True,
    )
    policy = ProbabilisticTensorDictSequential(net, sampler)
    space = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    ours, generator, direct = collect(policy, NUMBERS, space)
    assert direct

    as_it_is(monkeypatch)
    theirs, expected, _ = collect(policy, NUMBERS, space)
    assert_equal(ours, theirs)
    assert torch.equal(generator, expected)


class Doubled(TensorDictModuleBase):
    """A module of one's own."""

    in_keys = ["logits"]  # noqa: RUF012
    out_keys = ["logits"]  # noqa: RUF012

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        return tensordict.set("logits", 2 * tensordict["logits"])


class Sharper(Categorical):
    """A distribution of one's own, which draws and scores otherwise."""

    def __init__(self, logits: Tensor) -> None:
        super().__init__(logits=3 * logits)  # type: ignore[no-untyped-call]


class MaskedGRU(MinGRUModule):
    """A module of one's own, which is called by another ``forward``."""

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        out: TensorDictBase = super().forward(tensordict)
        return out.set("features", out["features"].clamp(min=0.0))


def with_probabilities() -> Any:
    """An actor whose network writes probabilities, in place of logits."""
    net = TensorDictModule(nn.Sequential(nn.Linear(3, 4), nn.Softmax(-1)), ["observation"], ["probs"])
    sampler = ProbabilisticTensorDictModule(
        ["probs"], ["action"], distribution_class=Categorical, default_interaction_type=InteractionType.RANDOM
    )
    return ProbabilisticTensorDictSequential(net, sampler)


def with_memory() -> Any:
    memory = MaskedGRU(3, 8, in_key="observation", out_key="features")
    head = TensorDictModule(nn.Linear(8, 4), ["features"], ["logits"])
    return ProbabilisticTensorDictSequential(memory, head, own_actor()[-1])


OTHERS: dict[str, Callable[[], Any]] = {
    "a part of one's own": lambda: own_actor(Doubled()),
    "a distribution of one's own": lambda: own_actor(distribution=Sharper),
    "probabilities": with_probabilities,
    "a function that makes a distribution": lambda: own_actor(distribution=lambda logits: Sharper(logits)),
    "a subclass with another forward": with_memory,
    "two actions": lambda: make_policy(NUMBERS, spaces.Dict({"a": spaces.Discrete(2), "b": FREE}), {}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_policies_are_called_as_they_are(name: str) -> None:
    assert ColumnActor.of(OTHERS[name]()) is None


@pytest.mark.parametrize("kind", ["deterministic", "mode", "mean"])
def test_other_interaction_types_are_called_as_they_are(kind: str) -> None:
    policy = make_policy(NUMBERS, FREE, {})
    options: Any = {"exploration_type": InteractionType.from_str(kind)}
    batch, _, direct = collect(policy, NUMBERS, FREE, **options)
    assert not direct
    policy(out := batch.select("observation"))
    torch.testing.assert_close(out["loc"], batch["action"])


def test_what_comes_later_is_seen() -> None:
    """Hooks, other parts, another distribution and other keys, after the first step."""
    observation, action, options = CASES["choice"]

    def hook(policy: Any) -> None:
        policy[1].register_forward_hook(lambda *_: None)

    def replace(policy: Any) -> None:
        policy.module[1] = Doubled()

    def redraw(policy: Any) -> None:
        policy[-1].distribution_class = Sharper

    def reread(policy: Any) -> None:
        policy[1].in_keys = ["other"]

    def validate(policy: Any) -> None:
        policy[-1].distribution_kwargs["validate_args"] = True

    for change in (hook, replace, redraw, reread, validate):
        policy = make_policy(observation, action, options)
        direct = ColumnActor.of(policy)
        assert direct is not None
        assert direct({"observation": torch.zeros(2, 3)})
        change(policy)
        assert not direct({"observation": torch.zeros(2, 3)}), change.__name__


def test_a_hook_runs_at_every_step() -> None:
    observation, action, options = CASES["choice"]
    policy = make_policy(observation, action, options)
    calls = []
    policy[1].register_forward_hook(lambda *_: calls.append(1))
    batch, _, direct = collect(policy, observation, action)
    assert not direct
    assert len(calls) * ENVS >= len(batch)


@pytest.mark.parametrize("name", ["choice", "choices", "flags", "choices, masked in combination"])
def test_numbers_that_are_not_finite_are_refused_as_by_the_distribution(name: str) -> None:
    observation, action, options = CASES[name]
    policy = make_policy(observation, action, options)
    env = gym.vector.SyncVectorEnv([lambda: Wandering(observation, action)] * ENVS)
    collector = Collector(env, policy, frames_per_batch=ENVS, total_frames=-1, seed=3)
    batches = iter(collector)
    next(batches)
    used: Any = collector._runner._module
    assert used._on_columns is not None
    with torch.no_grad():
        next(policy.parameters())[:] = float("nan")
    with pytest.raises((RuntimeError, ValueError), match=r"finite|nan|p_in|must be"):
        next(batches)


def test_nothing_is_built_at_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """After the first step no distribution is made and the policy's own call does not run."""
    observation, action, options = CASES["choice"]
    policy = make_policy(observation, action, options)
    made = []
    build = Categorical.__init__
    monkeypatch.setattr(Categorical, "__init__", lambda *a, **k: (made.append(1), build(*a, **k))[1])
    _, _, direct = collect(policy, observation, action)
    assert direct
    assert len(made) == 1


def test_options_are_drawn_as_by_multinomial() -> None:
    torch.manual_seed(0)
    logits = torch.randn(20_000, 6).mul_(4)
    logits[:, 3] = -torch.inf
    torch.manual_seed(1)
    drawn = draw_choice(logits)
    assert drawn is not None
    ours = drawn[0].unsqueeze(-1)
    torch.manual_seed(1)
    theirs = torch.multinomial(logits.softmax(-1), 1, True)
    assert (ours != theirs).sum() <= 1
    assert not (ours == 3).any()


def test_odd_logits_are_left_to_the_distribution() -> None:
    assert draw_choice(torch.zeros(4)) is None
    assert draw_choice(torch.full((2, 3), -torch.inf)) is None
    assert draw_choice(torch.tensor([[0.0, torch.nan]])) is None
    assert draw_choice(torch.tensor([[0.0, torch.inf]])) is None


def test_autocast_is_left_to_the_policy() -> None:
    policy = make_policy(*CASES["choice"])
    direct = ColumnActor.of(policy)
    assert direct is not None
    with torch.autocast("cpu"):
        assert not direct({"observation": torch.zeros(2, 3)})


def test_a_column_that_is_missing_is_left_to_the_policy() -> None:
    direct = ColumnActor.of(make_policy(*CASES["choice"]))
    assert direct is not None
    assert not direct({"other": torch.zeros(2, 3)})
