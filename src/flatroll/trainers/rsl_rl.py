"""`FlatVecEnv`: any environment as a `VecEnv` of rsl_rl, and `FinalObservations` for its PPO."""

from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from flatroll.trainers.versions import trainer_imports
from flatroll.wrappers import StepCounter, as_vector_env

with trainer_imports("rsl-rl-lib", "5.5", "6", "rsl-rl"):
    from rsl_rl.env import VecEnv  # pyright: ignore[reportMissingImports]  # an extra


class FlatVecEnv(VecEnv):
    """Makes any environment with one Box of actions a `VecEnv`, so that rsl_rl trains on it.

    Observations are a tensordict ``[E]``: the entries of a Dict observation, or ``"policy"``. ``extras`` has
    ``"time_outs"``, float32 ``[E]`` (truncated and not terminated), and ``"final_obs"``, a tensordict ``[E]`` that is
    meaningful where a row has ended. rsl_rl's PPO does not read it: see `FinalObservations`.

    Args:
        env: anything `as_vector_env` takes; it must not have been reset yet, and is reset here.
        max_episode_length: at which episodes are truncated. Default None: the env's own limit, if its ``spec``
            names it. The runner's ``init_at_random_ep_len`` only shows in the first rows of ``episode_length_buf``.
        cfg: what rsl_rl logs as the env's configuration.
        seed: of the reset.
        **options: further arguments of `as_vector_env`.

    Raises:
        TypeError: the actions are not one Box of one dimension.
        ValueError: no limit is given and none is known, or the env hides its last observations.

    >>> import gymnasium as gym
    >>> env = FlatVecEnv(gym.make_vec("Pendulum-v1", num_envs=2, vectorization_mode="sync"))
    >>> observations, rewards, dones, extras = env.step(torch.zeros(2, 1))
    >>> env.num_actions, env.max_episode_length, observations["policy"].shape
    (1, 200, torch.Size([2, 3]))
    """

    def __init__(
        self,
        env: Any,
        *,
        max_episode_length: int | None = None,
        cfg: Any = None,
        seed: int | None = None,
        **options: Any,
    ) -> None:
        adapted = as_vector_env(env, autoreset="same_step", framework="torch", **options)
        actions = adapted.single_action_space
        if not isinstance(actions, spaces.Box) or len(actions.shape) != 1:
            raise TypeError(f"rsl_rl needs a one-dimensional Box as action space, got {actions}")

        limit = max_episode_length or getattr(adapted.spec, "max_episode_steps", None)
        if limit is None:
            raise ValueError(
                "max_episode_length is needed: the env's spec has no time limit. Use FlatVecEnv(env, "
                "max_episode_length=...), which truncates episodes there"
            )

        # The counter also applies the limit, if one was given.
        self.env = StepCounter(adapted, max_steps=max_episode_length)

        self.num_envs = self.env.num_envs
        self.num_actions = int(actions.shape[0])
        self.max_episode_length = limit
        self.cfg = cfg
        if cfg is None:
            self.cfg = {}
        self.device = self.env.stream.capabilities.device

        observations, info = self.env.reset(seed=seed)
        self._observations = self._as_groups(observations)
        self.episode_length_buf = info["step_count"]

    def get_observations(self) -> TensorDict:
        """The observations shown last."""
        return self._observations

    def step(self, actions: Tensor) -> tuple[TensorDict, Tensor, Tensor, dict[str, Any]]:
        """Step all envs: observations, rewards float32 ``[E]``, dones int64 ``[E]``, extras."""
        observations, reward, terminated, truncated, info = self.env.step(actions)
        self._observations = self._as_groups(observations)
        self.episode_length_buf = info["step_count"]

        extras = {
            "time_outs": (truncated & ~terminated).float(),
            "final_obs": self._as_groups(info.get("final_obs", observations)),
        }
        dones: Any = terminated | truncated
        return self._observations, reward, dones.long(), extras

    def close(self) -> None:
        """Close the env."""
        self.env.close()

    def _as_groups(self, observations: Any) -> TensorDict:
        if isinstance(observations, dict):
            groups = observations
        else:
            groups = {"policy": observations}
        return TensorDict(groups, [self.num_envs], device=self.device)


class FinalObservations:
    """Base class, listed before rsl_rl's PPO: truncated rows are bootstrapped from their true last observations.

    rsl_rl adds ``gamma * V(s_t)``, the value before the last step; this adds ``gamma * V(s_T)``, of
    ``extras["final_obs"]``, so the return of a truncated row is as if its episode went on. Not for recurrent critics.

    >>> from rsl_rl.algorithms import PPO
    >>> class ExactPPO(FinalObservations, PPO): ...
    """

    gamma: float
    critic: Any

    def process_env_step(
        self, obs: TensorDict, rewards: Tensor, dones: Tensor, extras: dict[str, Any]
    ) -> None:
        """Record one step, see `rsl_rl.algorithms.PPO`.

        Raises:
            KeyError: ``extras`` has no ``"final_obs"``.
            TypeError: the critic is recurrent, so the value of one observation is not known.
        """
        if "final_obs" not in extras:
            raise KeyError("extras has no 'final_obs': make the env with flatroll.trainers.rsl_rl.FlatVecEnv")
        if getattr(self.critic, "is_recurrent", False):
            raise TypeError(
                "FinalObservations does not support recurrent critics, whose states it would advance"
            )

        time_outs = extras["time_outs"].to(rewards.device)
        if time_outs.any():
            with torch.no_grad():
                values = self.critic(extras["final_obs"].to(rewards.device)).squeeze(-1)
            # where(), not a product: values of other rows must not count, even if they are NaN.
            rewards = rewards + torch.where(time_outs > 0, self.gamma * values, 0.0)

        others = {key: value for key, value in extras.items() if key != "time_outs"}
        parent: Any = super()
        parent.process_env_step(obs, rewards, dones, others)
