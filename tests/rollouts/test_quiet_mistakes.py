"""Mistakes that would go unnoticed: ids that meet, states that are forgotten, entries of another episode."""

import contextlib
import io
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.vector import SyncVectorEnv
from gymnasium.wrappers import NormalizeObservation
from gymnasium.wrappers.vector import NormalizeObservation as NormalizeVector
from gymnasium.wrappers.vector import TransformReward
from tensordict.nn import TensorDictModule, TensorDictSequential

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.modules import GRUModule
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import RewardSum, StepCounter, TrajId, as_vector_env
from flatroll.wrappers.testing import Script, ScriptedVectorEnv, make_scripted

IDS = ("collector", "traj_ids")
MODES = ["NextStep", "SameStep", "Disabled"]


def scripted(mode="SameStep", **options):
    return ScriptedVectorEnv(Script(2, lengths=[[3, 4], [2, 4]]), autoreset_mode=mode, **options)


# --- writers ------------------------------------------------------------------------------------------------


def test_collectors_and_rollouts_with_numbers_of_their_own_never_share_an_id():
    parts = [next(Collector(scripted(), frames_per_batch=12, writer=writer))[IDS] for writer in (0, 1)]
    parts.append(rollout(scripted(), num_steps=6, writer=2)[IDS])
    assert [part.unique().tolist() for part in parts] == [
        [(writer << 40) + n for n in sorted(parts[0].unique().tolist())] for writer in range(3)
    ]


def test_the_number_is_in_the_state():
    collector = Collector(scripted(), frames_per_batch=4, writer=5)
    first = next(collector)[IDS]
    other = Collector(scripted(), frames_per_batch=4)
    other.load_state_dict(collector.state_dict())
    assert (next(other)[IDS] >> 40 == 5).all() and (first >> 40 == 5).all()


def test_a_number_that_would_not_come_into_the_ids_is_refused():
    with pytest.raises(
        ValueError,
        match="writer=1 conflicts with the TrajId in the env's stack, which has writer=0: give that TrajId writer=1",
    ):
        Collector(TrajId(scripted()), frames_per_batch=4, writer=1)
    with pytest.raises(ValueError, match="writer=1 needs track_traj_ids=True"):
        Collector(scripted(), frames_per_batch=4, writer=1, track_traj_ids=False)
    with pytest.raises(TypeError, match=r"writer must be an integer, got 1\.5"):
        rollout(scripted(), num_steps=2, writer=1.5)
    Collector(TrajId(scripted(), writer=1), frames_per_batch=4, writer=1)


# --- scales -------------------------------------------------------------------------------------------------

SCALES = "NormalizeObservation scales each row by the statistics of its step, so the rows of a buffer differ"


def normalized_inside():
    return SyncVectorEnv([lambda: NormalizeObservation(gym.make("CartPole-v1"))] * 2)


@pytest.mark.parametrize(
    "make_env",
    [
        lambda: NormalizeVector(scripted("NextStep")),
        lambda: StepCounter(NormalizeVector(as_vector_env(scripted("NextStep")))),
        lambda: NormalizeObservation(gym.make("CartPole-v1")),
        normalized_inside,
    ],
    ids=["vector", "around the adapted env", "single", "sub-envs"],
)
def test_a_buffer_of_running_normalisation_warns(make_env):
    with pytest.warns(UserWarning, match=SCALES):
        Collector(make_env(), frames_per_batch=8, replay_buffer=ReplayBuffer(storage=LazyTensorStorage(50)))
    for parts in ({"compact_obs": True}, {"sampler": SliceSampler(slice_len=2)}):
        sampler = parts.pop("sampler", None)
        buffer = ReplayBuffer(storage=LazyTensorStorage(50, **parts), sampler=sampler, batch_size=4)
        collector = Collector(make_env(), frames_per_batch=8)
        with pytest.warns(UserWarning, match=SCALES):
            buffer.extend(next(collector))
        buffer.extend(next(collector))  # once


def test_frozen_statistics_and_batches_used_at_once_do_not_warn():
    env = NormalizeVector(scripted("NextStep"))
    next(Collector(env, frames_per_batch=8))
    env.update_running_mean = False
    compact = LazyTensorStorage(50, compact_obs=True)
    next(Collector(env, frames_per_batch=8, replay_buffer=ReplayBuffer(storage=compact)))


# --- states -------------------------------------------------------------------------------------------------


def test_a_policy_that_drops_its_state_is_refused():
    gru = GRUModule(3, 4, in_key="observation", out_key="features")
    act = TensorDictModule(lambda f: f.argmax(-1), ["features"], ["action"])

    def policy(*keys):
        return TensorDictSequential(gru, act).select_out_keys(*keys)

    with pytest.raises(ValueError, match="lose its state at every step") as error:
        Collector(scripted(), policy("action"), frames_per_batch=4)
    assert "('next', 'recurrent_state')" in str(error.value)
    batch = rollout(scripted(), policy("action", ("next", "recurrent_state")), num_steps=6)
    assert batch["recurrent_state"].abs().sum() > 0


# --- info entries -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["sync", "native"])
@pytest.mark.parametrize("mode", MODES)
def test_a_step_limit_keeps_the_last_entries_of_rows_that_the_env_ends(mode, backend):
    """Env 0 ends by itself in the step in which env 1 reaches the limit."""
    script = Script(2, lengths=[[3], [9]])
    try:
        env = StepCounter(make_scripted(script, backend=backend, autoreset_mode=mode), max_steps=3)
    except ValueError:
        pytest.skip("this env cannot reset chosen rows")
    batch = rollout(env, num_steps=7, info_keys=["t"])
    assert torch.equal(batch["next", "t"].double(), batch["t"].double() + 1)
    if mode == "SameStep":
        env.reset()
        info = [env.step(np.zeros(2, np.int64))[4] for _ in range(3)][-1]
        assert info["_final_info"].tolist() == [True, True] and info["final_info"]["t"].tolist() == [3, 3]


class Telling(gym.Env):
    """An entry ``first`` only from reset, ``even`` (bool) only from steps."""

    observation_space = gym.spaces.Box(0, 9, (1,))
    action_space = gym.spaces.Discrete(2)

    def reset(self, seed=None, options=None):
        self.time = 0
        return np.zeros(1, np.float32), {"first": 10.0}

    def step(self, action):
        self.time += 1
        even = self.time % 2 == 0
        return np.full(1, self.time, np.float32), 1.0, self.time == 3, False, {"even": even}


@pytest.mark.parametrize("mode", MODES)
def test_an_entry_of_the_next_reset_is_not_one_of_the_last_step(mode):
    env = SyncVectorEnv([Telling, partial(Telling)], autoreset_mode=mode)
    batch = rollout(env, num_steps=7, info_keys=["first", "even"])
    assert batch["next", "first"].tolist() == [0.0] * 14
    assert batch["first"].tolist() == [10.0, 0, 0, 10.0, 0, 0, 10.0] * 2
    assert batch["even"].dtype is batch["next", "even"].dtype is torch.bool
    assert batch["next", "even"].tolist() == [False, True, False, False, True, False, False] * 2


# --- rewards ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.int64])
@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_rewards_are_float32_whatever_a_wrapper_makes_of_them(framework, dtype):
    def cast(reward):
        if isinstance(reward, torch.Tensor):
            return reward.to(torch.from_numpy(np.zeros(0, dtype)).dtype)
        return reward.astype(dtype)

    env = RewardSum(TransformReward(as_vector_env(scripted(), framework=framework), cast))
    batch = next(Collector(env, frames_per_batch=12))
    assert batch["next", "reward"].dtype is batch["next", "episode_reward"].dtype is torch.float32


def test_the_progress_bar_reads_returns_under_their_own_key():
    text = io.StringIO()
    with contextlib.redirect_stderr(text):
        env = RewardSum(scripted(), out_key="gain")
        list(Collector(env, frames_per_batch=20, total_frames=20, progress=True))
    assert "return=" in text.getvalue()


# --- construction -------------------------------------------------------------------------------------------


def test_padded_batches_into_a_buffer_are_refused_before_an_env_is_made():
    buffer = ReplayBuffer(storage=LazyTensorStorage(10))
    with pytest.raises(
        ValueError, match="split_trajs=True cannot be combined with a replay_buffer: buffers hold flat rows"
    ):
        Collector(pytest.fail, frames_per_batch=4, split_trajs=True, replay_buffer=buffer)


class Closing(ScriptedVectorEnv):
    closed = 0

    def close_extras(self, **options):
        self.closed += 1
        super().close_extras(**options)


@pytest.mark.parametrize(
    "options",
    [{"policy": 3}, {"env_device": "no"}, {"info_keys": "t"}, {"writer": 2**23}, {"storing_device": "no"}],
    ids=lambda options: next(iter(options)),
)
def test_a_collector_that_fails_closes_the_env_it_made_and_no_other(options):
    made = []

    def factory():
        made.append(Closing(Script(2), autoreset_mode="SameStep"))
        return made[0]

    with pytest.raises((ValueError, TypeError, RuntimeError)):
        Collector(factory, frames_per_batch=4, **options)
    assert made[0].closed == 1
    mine = Closing(Script(2), autoreset_mode="SameStep")
    with pytest.raises((ValueError, TypeError, RuntimeError)):
        Collector(mine, frames_per_batch=4, **options)
    assert mine.closed == 0


class PaysAtResets(ScriptedVectorEnv):
    """Under NEXT_STEP it pays 7 in steps that only reset, and tells what they were."""

    def step(self, actions):
        ended = self._done.copy()
        obs, reward, *rest = super().step(actions)
        return obs, np.where(ended, 7, reward), *rest


@pytest.mark.parametrize("framework", ["numpy", "torch"])
def test_rewards_in_rows_that_only_reset_are_told_once(framework):
    script = Script(2, lengths=[[2, 3], [4]])
    env = as_vector_env(PaysAtResets(script), framework=framework)
    collector = Collector(env, frames_per_batch=12, total_frames=36, seed=0)
    with pytest.warns(
        UserWarning, match=r"PaysAtResets paid rewards \(the first is 7\) .* only reset"
    ) as told:
        batches = list(collector)
    assert len(told) == 1
    right = list(Collector(ScriptedVectorEnv(script), frames_per_batch=12, total_frames=36, seed=0))
    for batch, other in zip(batches, right, strict=True):
        assert (batch["next", "reward"] == other["next", "reward"]).all()


def test_rewards_that_a_wrapper_shifts_are_not_told():
    env = TransformReward(ScriptedVectorEnv(Script(2, lengths=2)), lambda reward: reward - 1)
    assert len(rollout(env, num_steps=9)) == 18
    assert len(rollout(as_vector_env(env), num_steps=9)) == 18
