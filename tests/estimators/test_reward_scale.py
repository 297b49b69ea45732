"""`RewardScale` has the numbers of Stable-Baselines3 and Gymnasium, in any windows, and acts where rewards are read."""

import copy
import math
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from forms import examples
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.wrappers.vector import NormalizeReward
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential, TensorDictModule
from torch import nn

from flatroll.disk import Checkpoint
from flatroll.estimators import GAE, ClipPPOLoss, DQNLoss, RewardScale
from flatroll.rollouts import Collector
from flatroll.wrappers.testing import Script, make_scripted

MODES = ("NextStep", "SameStep", "Disabled")
TRUNCATED = Script(3, lengths=[[3, 5, 1], [2, 4], [7]], ends="truncated")
MIXED = Script(3, lengths=[[3, 5, 1], [2, 4], [7]], ends=["terminated", "truncated", "both"])


def new(gamma: float = 0.9, prior: float = 0.0) -> RewardScale:
    """A scale that starts with a count, as the other libraries' do."""
    scale = RewardScale(gamma)
    scale.statistics.count.fill_(prior)
    return scale


def updated(scale: RewardScale, script: Script, mode: str, rows: int, steps: int) -> RewardScale:
    env: Any = make_scripted(script, autoreset_mode=mode)  # type: ignore[arg-type]
    for batch in Collector(env, None, frames_per_batch=rows, total_frames=steps * script.num_envs):
        scale.update(batch)
    return scale


def returns(batches: list[TensorDict], gamma: float) -> torch.Tensor:
    """The discounted return of each row, row by row."""
    carried: dict[int, float] = {}
    out = []
    for batch in batches:
        for row in range(len(batch)):
            i = int(batch["collector", "traj_ids"][row])
            carried[i] = gamma * carried.get(i, 0.0) + batch["next", "reward"][row].item()
            out.append(carried[i])
    return torch.tensor(out, dtype=torch.float64)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [1, 4, 10, 60])
@pytest.mark.parametrize("gamma", [0.0, 0.9, 1.0])
def test_statistics_are_those_of_all_returns_in_any_windows(mode: str, rows: int, gamma: float) -> None:
    env: Any = make_scripted(MIXED, autoreset_mode=mode)  # type: ignore[arg-type]
    batches = list(Collector(env, None, frames_per_batch=rows, total_frames=60))
    expected, scale = returns(batches, gamma), new(gamma)
    for batch in batches:
        scale.update(batch)
    assert scale.statistics.count == len(expected) == 60
    torch.testing.assert_close(scale.statistics.mean[0], expected.mean(), rtol=1e-12, atol=0)
    torch.testing.assert_close(scale.statistics.var[0], expected.var(correction=0), rtol=1e-12, atol=0)


def test_windows_joined_to_one_batch_are_the_same() -> None:
    """A trajectory then stands in several pieces."""
    batches = list(Collector(make_scripted(MIXED), None, frames_per_batch=7, total_frames=42))
    one, other = new(), new()
    for batch in batches:
        one.update(batch)
    other.update(torch.cat(batches))  # type: ignore[arg-type]
    for name, value in one.state_dict().items():
        torch.testing.assert_close(value, other.state_dict()[name])


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.floats(-100, 100)), max_size=40), st.data())
@examples(60)
def test_rows_of_any_trajectories_in_any_windows(
    rows: list[tuple[int, bool, float]], data: st.DataObject
) -> None:
    """Each row has an env, whether its episode ends, and a reward; ids count up with the episodes."""
    episode, ids = [0] * 4, []
    for env, done, _ in rows:
        ids.append(4 * episode[env] + env)
        episode[env] += done
    batch = TensorDict(
        {
            "collector": {"traj_ids": torch.tensor(ids, dtype=torch.int64)},
            "next": {
                "done": torch.tensor([done for _, done, _ in rows], dtype=torch.bool).unsqueeze(-1),
                "reward": torch.tensor([x for _, _, x in rows], dtype=torch.float64).unsqueeze(-1),
            },
        },
        [len(rows)],
    )
    cuts = sorted(data.draw(st.lists(st.integers(0, len(rows)), max_size=4)))
    parts = [batch[a:b] for a, b in zip([0, *cuts], [*cuts, len(rows)], strict=True)]
    scale = new()
    for part in parts:
        scale.update(part)
    expected = returns([batch], 0.9)
    assert scale.statistics.count == len(rows)
    ended = {i for i, (_, done, _) in zip(ids, rows, strict=True) if done}
    assert scale.open_ids.tolist() == sorted({*ids} - ended)
    if rows:
        torch.testing.assert_close(scale.statistics.mean[0], expected.mean(), rtol=1e-10, atol=1e-9)
        torch.testing.assert_close(scale.statistics.var[0], expected.var(correction=0), rtol=1e-10, atol=1e-9)


class Stream:
    """What the script's env gives at each vector step, for the other libraries' wrappers."""

    def __init__(self, script: Script) -> None:
        self.env = make_scripted(script, autoreset_mode="SameStep")
        self.env.reset()

    def step(self) -> tuple[Any, ...]:
        return self.env.step(np.zeros(self.env.num_envs, np.int64))


@pytest.mark.parametrize("script", [TRUNCATED, MIXED])
def test_equal_to_stable_baselines3(script: Script) -> None:
    vec = pytest.importorskip("stable_baselines3.common.vec_env")
    stream, n = Stream(script), script.num_envs

    class Steps(vec.VecEnv):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__(n, gym.spaces.Box(-1, 1, (1,)), gym.spaces.Discrete(5))

        def reset(self) -> Any:
            return np.zeros((n, 1), np.float32)

        def step_async(self, actions: Any) -> None: ...

        def step_wait(self) -> Any:
            _, reward, terminated, truncated, _ = stream.step()
            return np.zeros((n, 1), np.float32), reward, terminated | truncated, [{} for _ in range(n)]

        def close(self) -> None: ...
        def get_attr(self, name: str, indices: Any = None) -> Any:
            return [None] * n

        def set_attr(self, name: str, value: Any, indices: Any = None) -> None: ...
        def env_method(self, name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any: ...
        def env_is_wrapped(self, kind: Any, indices: Any = None) -> Any:
            return [False] * n

    other = vec.VecNormalize(Steps(), norm_obs=False, gamma=0.9)
    other.reset()
    last: Any = None
    for _ in range(20):
        _, last, _, _ = other.step(np.zeros(n))
    scale = updated(new(prior=1e-4), script, "SameStep", rows=12, steps=20)
    assert scale.statistics.mean.item() == pytest.approx(other.ret_rms.mean, rel=1e-12)
    assert scale.statistics.var.item() == pytest.approx(other.ret_rms.var, rel=1e-12)
    raw = torch.as_tensor(other.get_original_reward())
    torch.testing.assert_close(scale.scaled(raw), torch.as_tensor(last), rtol=1e-6, atol=0, check_dtype=False)


def test_equal_to_gymnasium_where_episodes_are_truncated() -> None:
    class Steps(VectorEnv[Any, Any, Any]):
        def __init__(self, script: Script) -> None:
            self.num_envs, self._script = script.num_envs, script
            self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}

        def reset(self, *, seed: Any = None, options: Any = None) -> Any:
            self._stream = Stream(self._script)
            return np.zeros(self.num_envs), {}

        def step(self, actions: Any) -> Any:
            return self._stream.step()

    def moments(script: Script) -> tuple[float, float]:
        other = NormalizeReward(Steps(script), gamma=0.9)
        other.reset()
        for _ in range(20):
            other.step(np.zeros(script.num_envs, np.int64))
        return float(other.return_rms.mean), float(other.return_rms.var)

    if not hasattr(NormalizeReward(Steps(TRUNCATED)), "_autoreset_mode"):
        pytest.skip("this Gymnasium carries returns over the ends of truncated episodes")
    scale = updated(new(prior=1e-4), TRUNCATED, "SameStep", rows=12, steps=20)
    mean, var = moments(TRUNCATED)  # from returns in float32
    assert scale.statistics.mean.item() == pytest.approx(mean, rel=1e-6)
    assert scale.statistics.var.item() == pytest.approx(var, rel=1e-6)
    # The row that terminates has but its own reward there.
    scale = updated(new(prior=1e-4), MIXED, "SameStep", rows=12, steps=20)
    assert scale.statistics.mean.item() > 1.02 * moments(MIXED)[0]


def rows_of(script: Script = MIXED) -> TensorDict:
    batch = next(iter(Collector(make_scripted(script), None, frames_per_batch=30, total_frames=30)))
    batch["action_log_prob"] = torch.full((30,), -1.6)
    return batch


def test_estimators_read_scaled_rewards_and_leave_the_raw_ones() -> None:
    batch, scale, critic = (
        rows_of(),
        new(),
        TensorDictModule(nn.Linear(3, 1), ["observation"], ["state_value"]),
    )
    scale.update(batch)
    by_hand = batch.clone()
    by_hand["next", "reward"] = scale(batch.clone())["next", "reward_scaled"]
    assert not by_hand["next", "reward"].equal(batch["next", "reward"])
    raw = batch["next", "reward"].clone()
    one = GAE(gamma=0.9, lmbda=0.8, value_network=critic, reward_scale=scale)(batch)
    two = GAE(gamma=0.9, lmbda=0.8, value_network=critic)(by_hand)
    assert one["advantage"].equal(two["advantage"]) and one["next", "reward"].equal(raw)
    assert one.get(("next", "reward_scaled"), None) is None

    actor = TensorDictModule(nn.Linear(3, 5), ["observation"], ["logits"])

    head = ProbabilisticTensorDictModule(
        in_keys=["logits"],
        out_keys=["action"],
        distribution_class=torch.distributions.Categorical,
        return_log_prob=True,
    )
    policy = ProbabilisticTensorDictSequential(*[actor, head])
    ready = ["advantage", "value_target", "state_value", ("next", "state_value")]
    loss = ClipPPOLoss(policy, critic).make_value_estimator("gae", gamma=0.9, lmbda=0.8, reward_scale=scale)
    plain = ClipPPOLoss(policy, critic).make_value_estimator("gae", gamma=0.9, lmbda=0.8)
    one, two = loss(batch.exclude(*ready)), plain(by_hand.exclude(*ready))
    assert one["loss_critic"].equal(two["loss_critic"]) and one["loss_objective"].equal(two["loss_objective"])


@pytest.mark.parametrize("kind", ["td0", "td_lambda"])
def test_losses_of_action_values_read_scaled_rewards(kind: str) -> None:
    batch, scale = rows_of(), new()
    scale.update(batch)
    by_hand = batch.clone()
    by_hand["next", "reward"] = scale.scaled(batch["next", "reward"])
    network = TensorDictModule(nn.Linear(3, 5), ["observation"], ["action_value"])
    loss = DQNLoss(network).make_value_estimator(kind, gamma=0.9, reward_scale=scale)
    plain = DQNLoss(network).make_value_estimator(kind, gamma=0.9)
    assert loss(batch)["loss"].equal(plain(by_hand)["loss"])
    assert not loss(batch)["loss"].equal(plain(batch)["loss"])


def test_a_run_goes_on_bit_for_bit(tmp_path: Any) -> None:
    batches = list(Collector(make_scripted(MIXED), None, frames_per_batch=7, total_frames=42))
    one, other = new(), new()
    for batch in batches[:3]:
        one.update(batch)
    Checkpoint(tmp_path, scale=one).save()
    Checkpoint(tmp_path, scale=other).load()
    for batch in batches[3:]:
        one.update(batch)
        other.update(batch)
    state = other.state_dict()
    assert len(one.open_ids) and all(value.equal(state[name]) for name, value in one.state_dict().items())


def test_eval_freezes_and_copies_are_apart() -> None:
    scale, batch = new(), rows_of()
    other = copy.deepcopy(scale)
    scale.eval()
    scale.update(batch)
    other.update(batch)
    assert (scale.statistics.count, other.statistics.count) == (0, 30)


def test_trajectories_that_get_no_more_rows_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flatroll.modules.reward_scale._MOST_OPEN", 40)
    scale = new()
    for first in range(0, 1000, 5):
        ids = torch.arange(first, first + 5)
        next_ = {"reward": torch.ones(5, 1), "done": torch.zeros(5, 1, dtype=torch.bool)}
        scale.update(TensorDict({"collector": {"traj_ids": ids}, "next": next_}, [5]))
    assert len(scale.open_ids) <= 40 and scale.open_ids[-1] == 999


def test_bad_input() -> None:
    scale, batch = new(), rows_of()
    scale.update(batch)
    before = copy.deepcopy(scale.state_dict())

    def changed(**entries: Any) -> TensorDict:
        other = batch.clone()
        for name, value in entries.items():
            other["next", name] = value
        return other

    reward = batch["next", "reward"]
    for bad in (math.nan, math.inf):
        spoiled = reward.clone()
        spoiled[3] = bad
        with pytest.raises(ValueError, match=rf"batch\[.*reward.*\] must be finite, got {bad}"):
            scale.update(changed(reward=spoiled))
    with pytest.raises(TypeError, match="must be floating"):
        scale.update(changed(reward=reward.long()))
    with pytest.raises(ValueError, match="must have shape"):
        scale.update(changed(reward=reward.expand(-1, 2)))
    with pytest.raises(KeyError, match="TrajId"):
        scale.update(batch.exclude(("collector", "traj_ids")))
    with pytest.raises(KeyError, match="done"):
        scale.update(batch.exclude(("next", "done")))
    assert all(before[name].equal(value) for name, value in scale.state_dict().items())
    wrong: dict[str, Any] = {"gamma": 1.5, "clip": 0.0, "epsilon": 0.0}
    for name, number in wrong.items():
        with pytest.raises(ValueError, match=name):
            RewardScale(**{name: number})
