"""Learns the tasks of ``benchmarks.learning`` with stable-baselines3, an optional package."""

import time
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
from torch import nn


def part(module: str, name: str) -> Any:
    """Import an object of an optional package by name, hidden from type checkers."""
    return getattr(import_module(module), name)


def run(task: str, frames: int, seed: int) -> dict[str, float]:
    """Train for ``frames`` frames; return the mean return of the last episodes and the seconds."""
    base: Any = part("stable_baselines3.common.callbacks", "BaseCallback")

    class Returns(base):
        """A callback that records the return of every episode."""

        def __init__(self) -> None:
            super().__init__()
            self.found: list[float] = []

        def _on_step(self) -> bool:
            self.found += [info["episode"]["r"] for info in self.locals["infos"] if "episode" in info]
            return True

    model = MODELS[task](seed, frames)
    returns = Returns()
    start = time.perf_counter()
    model.learn(frames, callback=returns)
    seconds = time.perf_counter() - start
    last = 20 if task.startswith("sac") else 100
    return {"return": float(np.mean(returns.found[-last:])), "frames": frames, "s": seconds}


def cartpole(seed: int, frames: int) -> Any:
    return part("stable_baselines3", "PPO")(
        "MlpPolicy",
        part("stable_baselines3.common.env_util", "make_vec_env")("CartPole-v1", n_envs=32, seed=seed),
        n_steps=16,
        batch_size=128,
        n_epochs=4,
        learning_rate=lambda left: 2.5e-4 * left,
        ent_coef=0.01,
        clip_range_vf=0.2,
        seed=seed,
        device="cpu",
    )


class FromEnvpool:
    """Makes an envpool env into a stable-baselines3 ``VecEnv``, whose class is imported only when needed."""

    @staticmethod
    def make(name: str, num_envs: int, seed: int) -> Any:
        import envpool

        vec_env = import_module("stable_baselines3.common.vec_env")
        base: Any = vec_env.VecEnv
        pool = envpool.make_gymnasium(name, num_envs=num_envs, seed=seed)

        class Pool(base):
            def __init__(self) -> None:
                seen = gym.spaces.Box(-np.inf, np.inf, pool.observation_space.shape, np.float32)
                super().__init__(num_envs, seen, pool.action_space)

            def reset(self) -> Any:
                return pool.reset()[0].astype(np.float32)

            def step_async(self, actions: Any) -> None:
                self.actions = actions

            def step_wait(self) -> Any:
                seen, reward, terminated, truncated, _ = pool.step(self.actions.astype(np.float64))
                done = terminated | truncated
                infos: list[dict[str, Any]] = [{} for _ in done]
                for i in np.flatnonzero(done):
                    infos[i] = {"TimeLimit.truncated": bool(truncated[i]), "terminal_observation": seen[i]}
                if done.any():
                    seen = seen.copy()
                    seen[done] = pool.reset(np.flatnonzero(done))[0]
                return seen.astype(np.float32), reward.astype(np.float32), done, infos

            def close(self) -> None:
                pool.close()

            def get_attr(self, attr_name: str, indices: Any = None) -> Any:
                return [None] * num_envs

            def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None: ...

            def env_method(self, method_name: str, *args: Any, indices: Any = None, **kwargs: Any) -> Any: ...

            def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> Any:
                return [False] * num_envs

        return vec_env.VecNormalize(vec_env.VecMonitor(Pool()))


def cheetah(seed: int, frames: int) -> Any:
    return part("stable_baselines3", "PPO")(
        "MlpPolicy",
        FromEnvpool.make("HalfCheetah-v4", 16, seed),
        n_steps=128,
        batch_size=64,
        n_epochs=10,
        learning_rate=lambda left: 3e-4 * left,
        clip_range_vf=0.2,
        policy_kwargs={"net_arch": [64, 64], "activation_fn": nn.Tanh},
        seed=seed,
        device="cpu",
    )


class HideVelocities(gym.ObservationWrapper[Any, Any, Any]):
    """A wrapper that shows only the positions of cart and pole."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = gym.spaces.Box(-10, 10, (2,))

    def observation(self, observation: Any) -> Any:
        return observation[::2] / np.array([2.4, 0.21], np.float32)


def memory(seed: int, frames: int) -> Any:
    env = part("stable_baselines3.common.env_util", "make_vec_env")(
        "CartPole-v1", n_envs=1, seed=seed, wrapper_class=HideVelocities
    )
    return part("stable_baselines3", "DQN")(
        "MlpPolicy",
        part("stable_baselines3.common.vec_env", "VecFrameStack")(env, 4),
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=0.16,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
    )


def pendulum(seed: int, frames: int) -> Any:
    return part("stable_baselines3", "SAC")(
        "MlpPolicy",
        part("stable_baselines3.common.env_util", "make_vec_env")("Pendulum-v1", n_envs=4, seed=seed),
        learning_rate=1e-3,
        learning_starts=1000,
        gradient_steps=4,
        buffer_size=frames,
        seed=seed,
        device="cpu",
    )


MODELS = {"ppo-cartpole": cartpole, "ppo-cheetah": cheetah, "dqn-memory": memory, "sac-pendulum": pendulum}
