"""Recurrent policies in collectors: states wired by themselves, kept in few rows, recomputed to the same numbers."""

from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn
from torch.distributions import Categorical

from flatroll.layout import run_starts
from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import (
    CompactObs,
    InitTracker,
    RecurrentPrimer,
    StepCounter,
    as_vector_env,
    find_wrapper,
    set_recurrent_primers_from,
)
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, ScriptedVectorEnv

LENGTHS = [[9, 1, 4], [2, 7], [12]]
MODES = ["NextStep", "SameStep", "Disabled", "torch"]


def make(which: str = "SameStep", lengths: Any = LENGTHS) -> Any:
    own = Script(len(lengths), lengths=lengths)
    if which == "torch":
        return ScriptedTorchEnv(own)
    return ScriptedVectorEnv(own, autoreset_mode=which)


def actor(kind: Any = GRUModule, layers: int = 1) -> Any:
    torch.manual_seed(0)
    return ProbabilisticTensorDictSequential(
        kind(3, 4, layers, in_key="observation", out_key="features"),
        TensorDictModule(nn.Linear(4, 5), in_keys=["features"], out_keys=["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        ),
    )


class Counter(nn.Module):
    """Counts its own steps in a state of 7, 8, 9, ...; declares it, or leaves that to others."""

    in_keys = ("observation", "state", "is_init")
    out_keys = ("action", ("next", "state"))

    def forward(self, td: Any) -> Any:
        td["next", "state"] = td["state"] + 1
        td["action"] = torch.zeros(td.shape, dtype=torch.int64)
        return td


class Declared(Counter):
    def make_tensordict_primer(self) -> Any:
        return SimpleNamespace(defaults={"state": torch.full((1,), 7.0)})


# --- wiring ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", MODES)
def test_an_env_made_for_a_policy_has_what_the_policy_needs(which: str) -> None:
    env = as_vector_env(make(which), policy=Declared())
    _, info = env.reset(seed=0)
    assert info["state"].tolist() == [[7.0]] * 3
    assert torch.as_tensor(info["is_init"]).all()
    info["state"] += 1  # yours to keep
    assert env.reset(seed=0)[1]["state"].tolist() == [[7.0]] * 3


def test_states_of_one_name_in_two_places() -> None:
    """One of them was lost where only the last name of a key counted."""
    keys = [("agent", "h"), ("critic", "h")]
    sizes = [(3, 4), (4, 5)]
    parts = [
        GRUModule(*size, in_keys=[x, key], out_keys=[y, ("next", *key)])
        for size, key, x, y in zip(sizes, keys, ("observation", "f"), ("f", "features"), strict=True)
    ]
    act = TensorDictModule(lambda f: (f[..., 0] > 0).long(), ["features"], ["action"])
    policy = TensorDictSequential(*parts, act)
    env = as_vector_env(make(), policy=policy)
    _, info = env.reset(seed=0)
    assert (info["agent"]["h"].shape, info["critic"]["h"].shape) == ((3, 1, 4), (3, 1, 5))
    check_features(policy, next(Collector(env, policy, frames_per_batch=20)))


def check_features(policy: Any, batch: TensorDict) -> None:
    with set_recurrent_mode("recurrent"), torch.no_grad():
        again = policy(batch.clone())
    torch.testing.assert_close(again["features"], batch["features"], atol=1e-5, rtol=0)


def test_asked_twice_nothing_changes() -> None:
    env = as_vector_env(make(), policy=Declared())
    assert as_vector_env(env, policy=Declared()) is env
    assert set_recurrent_primers_from(env, Declared()) is env
    collector = Collector(env, Declared(), frames_per_batch=10)
    assert collector.env.env is env  # TrajId alone was added
    collector.set_recurrent_primers_from(Declared())
    first = next(collector)
    collector.set_recurrent_primers_from(Declared())
    plain = Collector(make(), Declared(), frames_per_batch=10)
    for batch in (first, next(collector)):
        assert (batch == next(plain)).all()


def test_a_policy_without_memory_gets_nothing() -> None:
    env = as_vector_env(make())
    assert as_vector_env(env, policy=nn.Linear(3, 2)) is env
    assert find_wrapper(env, InitTracker) is None
    with pytest.raises(
        ValueError, match=r"no recurrent part: no module of it has make_tensordict_primer\(\)"
    ):
        RecurrentPrimer(make(), nn.Linear(3, 2))


@pytest.mark.parametrize("by", ["env", "collector"])
def test_states_of_a_policy_that_hides_them(by: str) -> None:
    env: Any = make()
    if by == "env":
        env = set_recurrent_primers_from(env, Declared())
    collector = Collector(env, Counter(), frames_per_batch=10, total_frames=30)
    if by == "collector":
        collector.set_recurrent_primers_from(Declared())
    batch = torch.cat(list(collector))
    assert torch.equal(batch["state"], 7 + batch["observation"][:, 2:])
    if by == "env":
        again = rollout(env, Counter(), 5)
        assert torch.equal(again["state"], 7 + again["observation"][:, 2:])
        other = rollout(
            env, lambda obs: torch.zeros(3, dtype=torch.int64), 5
        )  # a policy that writes no state
        assert "state" not in other


def test_states_that_come_too_late_are_refused() -> None:
    class Own(Counter):
        def forward(self, td: Any) -> Any:
            td["state"] = torch.full((3, 1), 7.0)
            return super().forward(td)

    collector = Collector(make(), Own(), frames_per_batch=10)
    next(collector)
    with pytest.raises(
        RuntimeError, match=r"'state'.* collected without them: set them before the first batch"
    ):
        collector.set_recurrent_primers_from(Declared())


def test_one_state_cannot_start_in_two_ways() -> None:
    class Other(Counter):
        def make_tensordict_primer(self) -> Any:
            return SimpleNamespace(defaults={"state": torch.zeros(2)})

    env = as_vector_env(make(), policy=Declared())
    with pytest.raises(ValueError, match=r"'state' is declared twice, with shapes \(1,\) and \(2,\) per row"):
        as_vector_env(env, policy=Other())


def two_modules(first: str, second: str) -> TensorDictSequential:
    return TensorDictSequential(
        GRUModule(3, 4, in_keys=["observation", first], out_keys=["f", ("next", first)]),
        GRUModule(4, 4, in_keys=["f", second], out_keys=["features", ("next", second)]),
        TensorDictModule(lambda f: (f[..., 0] > 0).long(), ["features"], ["action"]),
    )


def test_two_modules_keep_two_states() -> None:
    """Under one key each would start from the other's; one module in two places is still one."""
    policy = two_modules("a", "b")
    batch = next(Collector(make(), policy, frames_per_batch=30))
    check_features(policy, batch)
    for nested in (two_modules("a", "a"), TensorDictSequential(two_modules("a", "b"), two_modules("c", "b"))):
        with pytest.raises(ValueError, match=r"two modules .* recurrent state under '[ab]': .*its own keys"):
            Collector(make(), nested, frames_per_batch=30)
        with pytest.raises(ValueError, match="two modules"):
            as_vector_env(make(), policy=nested)
    assert len(TensorDictSequential(policy[0], policy).out_keys) == len(policy.out_keys)
    Collector(make(), TensorDictSequential(policy[0], policy), frames_per_batch=30)


# --- few states -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compact", [False, True])
@pytest.mark.parametrize("stride", [2, 3, 100])
@pytest.mark.parametrize("which", MODES)
def test_states_stand_where_runs_begin_and_in_every_mth_row(which: str, stride: int, compact: bool) -> None:
    """Only the states of slice starts are read, so only every ``state_stride``-th row stores one."""
    options: Any = {"frames_per_batch": 11, "total_frames": 66, "compact_obs": compact}
    full = list(Collector(make(which), Declared(), **options))
    few = list(Collector(make(which), Declared(), **options, state_stride=stride))
    for batch, thin in zip(full, few, strict=True):
        kept = thin["collector", "has_state"]
        age = batch["observation"][:, 2]
        assert torch.equal(kept, (age % stride == 0) | run_starts(batch))
        assert torch.equal(thin["state"], batch["state"] * kept[:, None])
        assert ("next", "state") not in thin.keys(True, True)
        rest = thin.exclude("state", ("collector", "has_state"))
        assert (rest == batch.exclude("state", ("next", "state"))).all()


def test_joined_trajectories_keep_them_too() -> None:
    collector = Collector(
        make(), Declared(), frames_per_batch=7, total_frames=70, state_stride=4, trajs_per_batch=2
    )
    for batch in collector:
        kept, age = batch["collector", "has_state"], batch["observation"][:, 2:]
        assert kept[age[:, 0] % 4 == 0].all()
        assert torch.equal(batch["state"], (7 + age) * kept[:, None])


@pytest.mark.parametrize(
    ("stride", "error", "text"),
    [
        (0, ValueError, "state_stride must be at least 1, got 0"),
        (2.5, TypeError, "state_stride must be an integer, got 2.5"),
        (True, TypeError, "state_stride must be an integer, got True"),
    ],
)
def test_strides_that_make_no_sense(stride: Any, error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        Collector(make(), Declared(), frames_per_batch=4, state_stride=stride)


def test_a_stride_needs_states() -> None:
    with pytest.raises(ValueError, match=r"state_stride=4 needs a recurrent policy"):
        Collector(make(), None, frames_per_batch=4, state_stride=4)


# --- what was recorded is computed again -----------------------------------------------------------------------


@examples(10, derandomize=True)
@given(
    lengths=st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=4),
    which=st.sampled_from(MODES),
    frames=st.integers(1, 40),
    stride=st.sampled_from([1, 3]),
    kind=st.sampled_from([GRUModule, LSTMModule]),
    layers=st.sampled_from([1, 2]),
    reset_each=st.booleans(),
)
def test_every_window_of_any_script_is_computed_again(
    lengths: Any, which: str, frames: int, stride: int, kind: Any, layers: int, reset_each: bool
) -> None:
    policy = actor(kind, layers)
    collector = Collector(
        make(which, lengths),
        policy,
        frames_per_batch=frames,
        total_frames=4 * frames,
        compact_obs=True,
        state_stride=stride,
        reset_at_each_iter=reset_each,
    )
    for batch in collector:
        check_recomputed(policy, batch)


def check_recomputed(policy: Any, batch: TensorDict) -> None:
    """Features and log-probabilities of a batch, at every row, to 1e-5: PPO's ratio is 1."""
    with set_recurrent_mode("recurrent"), torch.no_grad():
        dist = policy.get_dist(batch.clone().exclude("features", "logits"))
        again = policy[0](batch.clone().exclude("features"))
    torch.testing.assert_close(again["features"], batch["features"], atol=1e-5, rtol=0)
    ratio = (dist.log_prob(batch["action"]) - batch["action_log_prob"]).exp()
    torch.testing.assert_close(ratio, torch.ones_like(ratio), atol=1e-5, rtol=0)


def test_a_hand_written_loop_over_an_env_made_for_the_policy_is_what_a_collector_does() -> None:
    policy = TensorDictSequential(
        GRUModule(4, 8, in_key="observation", out_key="features"),
        TensorDictModule(lambda f: (f[..., 0] > 0).long(), ["features"], ["action"]),
    )
    expected = rollout(CompactObs(gym.make_vec("CartPole-v1", num_envs=2)), policy, 8, seed=3)
    env = as_vector_env(gym.make_vec("CartPole-v1", num_envs=2), policy=policy)
    obs, info = env.reset(seed=3)
    state, features = info["recurrent_state"], []
    with torch.no_grad():
        for _ in range(8):  # no episode of CartPole is shorter
            step = TensorDict({"observation": obs, "is_init": info["is_init"], "recurrent_state": state}, [2])
            policy(step)
            features.append(step["features"])
            obs, _, _, _, info = env.step(step["action"])
            state = step["next", "recurrent_state"]
    first = expected["features"].view(2, 8, -1)
    torch.testing.assert_close(torch.stack(features, 1), first)


class Counting:
    """Acts with the number of steps since the episode began, which it keeps itself."""

    def __init__(self):
        self.age = torch.zeros(3, 1, dtype=torch.long)

    def __call__(self, observation, is_init):
        assert is_init.dtype is torch.bool and is_init.shape == (3, 1)
        self.age = torch.where(is_init, 0, self.age + 1)
        return self.age.squeeze(-1) % 5


class CountingModule(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.count = Counting()

    def forward(self, observation, *, is_init=None):
        return self.count(observation, is_init)


@pytest.mark.parametrize("kind", [Counting, CountingModule])
@pytest.mark.parametrize("mode", MODES)
def test_a_function_with_a_parameter_is_init_is_told_where_episodes_begin(mode, kind):
    collector = Collector(StepCounter(make(mode)), kind(), frames_per_batch=20, total_frames=60)
    for batch in [*collector, rollout(StepCounter(make(mode)), kind(), num_steps=12)]:
        assert torch.equal(batch["action"], batch["step_count"].squeeze(-1) % 5)
