"""Times samples with hindsight goals, against stable-baselines3's buffer."""

import importlib
import importlib.util
import time
from functools import partial
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.measure.timing import ratio, take_turns
from flatroll.buffers import HindsightTransform, LazyTensorStorage, ReplayBuffer

SIZES = {"observation": 10, "achieved_goal": 3, "desired_goal": 3}  # of FetchReach
ACTION, EPISODE, STEPS, SAMPLE = 4, 50, 10_000, 256


def sparse_reward(achieved: Any, desired: Any, info: Any) -> Any:
    """0 within 5 cm of the goal, else -1, as in Fetch."""
    return -(np.linalg.norm(achieved - desired, axis=-1) > 0.05).astype(np.float32)


class GoalEnv(gym.Env[Any, Any]):
    """Says what its spaces are, and the reward for goals, which is all that a buffer asks of it."""

    def __init__(self) -> None:
        self.observation_space = gym.spaces.Dict(
            {key: gym.spaces.Box(-10.0, 10.0, (size,), np.float32) for key, size in SIZES.items()}
        )
        self.action_space = gym.spaces.Box(-1.0, 1.0, (ACTION,), np.float32)

    compute_reward = staticmethod(sparse_reward)


def fill(buffers: dict[str, Any], num_envs: int) -> None:
    """Write the same episodes of E envs to all buffers: a step writer, or SB3's buffer."""
    random = np.random.default_rng(0)
    obs = {key: random.random((STEPS + 1, num_envs, size), np.float32) for key, size in SIZES.items()}
    obs["desired_goal"][:] = 0.5
    for t in range(STEPS):
        ended = np.full(num_envs, (t + 1) % EPISODE == 0)
        now, later = ({key: values[at] for key, values in obs.items()} for at in (t, t + 1))
        if ended.all():  # the next episode begins elsewhere
            later = {**later, **{key: later[key] + 1 for key in ("observation", "achieved_goal")}}
        action, reward = random.random((num_envs, ACTION), np.float32), np.zeros(num_envs, np.float32)
        for name, buffer in buffers.items():
            if name == "stable-baselines3":
                infos = [{"TimeLimit.truncated": bool(end)} for end in ended]
                buffer.add(now, later, action, reward, ended, infos)
                continue
            flags = {"truncated": ended, "terminated": np.zeros_like(ended)}
            buffer.write({**now, "action": action, "next": {**later, **flags, "reward": reward}})


def rows(num_envs: int, turns: int) -> list[list[str]]:
    """Rows of the table: buffer, time of a sample, ratio to the first."""
    buffers: dict[str, Any] = {}
    if importlib.util.find_spec("stable_baselines3") is not None:
        her: Any = importlib.import_module("stable_baselines3.her")
        envs: Any = importlib.import_module("stable_baselines3.common.vec_env")
        env = envs.DummyVecEnv([GoalEnv] * num_envs)
        spaces = env.observation_space, env.action_space
        size = STEPS * num_envs
        buffers["stable-baselines3"] = her.HerReplayBuffer(
            size, *spaces, env=env, device="cpu", n_envs=num_envs
        )
    for kind in ("full", "compact"):
        for name, transform in {
            "": HindsightTransform(sparse_reward, as_numpy=True),
            ", no goals": None,
        }.items():
            storage = LazyTensorStorage(STEPS * num_envs, compact_obs=kind == "compact")
            buffers[kind + name] = ReplayBuffer(storage=storage, transform=transform).writer_for(num_envs)
    fill(buffers, num_envs)
    samples = {name: partial(buffer.sample, SAMPLE) for name, buffer in buffers.items()}
    timed = take_turns(samples, turns, 20, time.thread_time)
    first = next(iter(timed))
    return [
        [name, f"{min(times.turns) * 1e6:,.0f}", f"{ratio(times, timed[first]):.2f} x"]
        for name, times in timed.items()
    ]
