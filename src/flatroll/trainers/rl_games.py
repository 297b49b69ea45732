"""`FlatVecEnv` and `register`: any environment for rl_games, and `FinalObservations` for its PPO."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flatroll.trainers.versions import trainer_imports
from flatroll.wrappers import as_vector_env, map_tree

with trainer_imports("rl-games", "1.6", "1.7", "rl-games", ", in an environment of its own"):
    # Its pins conflict with ours, so the linters run without it.
    from rl_games.common import env_configurations, vecenv  # pyright: ignore[reportMissingImports]
    from rl_games.common.ivecenv import IVecEnv  # pyright: ignore[reportMissingImports]

_KIND = "flatroll"  # the type of vector env that `register` registers


def register(name: str, make_env: Callable[..., Any]) -> None:
    """Register an environment with rl_games: ``"env_name": name`` in its configuration.

    Args:
        name: of the environment; registering a name again replaces it.
        make_env: called as ``make_env(num_envs, **env_config)``, without the ``seed`` that rl_games puts into
            ``env_config``, which the env is reset with. It returns anything `as_vector_env` takes, of ``num_envs``
            sub-envs. A player of rl_games needs ``"player": {"use_vecenv": True}``.

    >>> import gymnasium as gym
    >>> register("pendulums", lambda num_envs: gym.make_vec("Pendulum-v1", num_envs, "sync"))
    >>> env = vecenv.create_vec_env("pendulums", 3, seed=0)
    >>> env.reset().shape, env.get_env_info()["agents"]
    (torch.Size([3, 3]), 1)
    """

    def make(config_name: str, num_actors: int, **env_config: Any) -> FlatVecEnv:
        seed = env_config.pop("seed", None)
        made = env_configurations.configurations[config_name]["env_creator"](num_actors, **env_config)
        env = FlatVecEnv(made, seed=seed)
        if env.num_envs != num_actors:
            env.close()
            raise ValueError(
                f"make_env of {config_name!r} must make num_actors={num_actors} envs, got {env.num_envs}"
            )
        return env

    vecenv.register(_KIND, make)
    env_configurations.register(name, {"vecenv_type": _KIND, "env_creator": make_env})


class FlatVecEnv(IVecEnv):
    """Makes any environment an `IVecEnv` of rl_games, in torch tensors; see `register`.

    Args:
        env: anything `as_vector_env` takes; it must not have been reset yet.
        seed: of the first reset.
        **options: further arguments of `as_vector_env`.

    Raises:
        ValueError: the env hides its last observations (raised where it does), or cannot reset chosen rows.

    >>> import gymnasium as gym
    >>> env = FlatVecEnv(gym.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"), seed=0)
    >>> _ = env.reset()
    >>> observations, rewards, dones, infos = env.step(torch.zeros(2, dtype=torch.int64))
    >>> rewards.tolist(), dones, infos["time_outs"]
    ([1.0, 1.0], tensor([0, 0], dtype=torch.uint8), tensor([False, False]))
    """

    def __init__(self, env: Any, *, seed: int | None = None, **options: Any) -> None:
        self.env = as_vector_env(env, autoreset="same_step", framework="torch", **options)
        self.num_envs = self.env.num_envs
        self.observation_space = self.env.single_observation_space
        self.action_space = self.env.single_action_space
        self._seed = seed

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
        """Step all envs.

        Returns:
            Observations ``[E, ...]`` (of ended rows the next episode's first), rewards float32 ``[E]``, dones uint8
            ``[E]``, and a dict: ``"time_outs"`` bool ``[E]``, truncated and not terminated, and ``"final_obs"``,
            the last observations, meaningful where a row has ended.
        """
        observations, rewards, terminated, truncated, info = self.env.step(actions)
        infos = {
            "time_outs": truncated & ~terminated,
            "final_obs": _as_float32(info.get("final_obs", observations)),
        }
        dones: Any = terminated | truncated
        return _as_float32(observations), rewards, dones.to(torch.uint8), infos

    def reset(self) -> Any:
        """Reset all envs; the first reset and the one after `seed` use the seed."""
        observations, _ = self.env.reset(seed=self._seed)
        self._seed = None
        return _as_float32(observations)

    def seed(self, seed: int | None) -> None:
        """Use a seed at the next reset."""
        self._seed = seed

    def get_env_info(self) -> dict[str, Any]:
        """Return the spaces of one env, and that each env is one agent."""
        return {
            "observation_space": self.observation_space,
            "action_space": self.action_space,
            "agents": 1,
            "value_size": 1,
        }

    def close(self) -> None:
        """Close the env."""
        self.env.close()


class FinalObservations:
    """Base class, listed before rl_games' PPO: truncated rows are bootstrapped from their true last observations.

    Its PPO is `A2CAgent` and `DiscreteA2CAgent`.

    rl_games adds ``gamma * V(s_t)``, the value before the last step; this adds ``gamma * V(s_T)``, of
    ``infos["final_obs"]``, and only to what the agent learns from, not to the returns it reports. An agent whose
    configuration says ``value_bootstrap: False`` stays without; a configuration without the entry means True.

    >>> from rl_games.algos_torch.a2c_continuous import A2CAgent
    >>> from rl_games.torch_runner import Runner
    >>> class ExactPPO(FinalObservations, A2CAgent): ...
    >>> Runner().algo_factory.register_builder("exact_ppo", lambda **given: ExactPPO(**given))

    Raises:
        TypeError: the agent is of another kind, or has a central value network, which needs states.
    """

    gamma: float
    value_bootstrap: bool
    rewards_shaper: Any

    def __init__(self, base_name: str, params: Any) -> None:
        parent: Any = super()
        parent.__init__(base_name, params)

        agent: Any = self
        if not hasattr(agent, "get_values") or agent.has_central_value:
            raise TypeError(
                f"FinalObservations is for A2CAgent and DiscreteA2CAgent without a central value, not for "
                f"{type(self).__name__}"
            )

        if "value_bootstrap" not in agent.config:
            self.value_bootstrap = True  # also if the trainer has no default, and keeps None, which is off

        shaper = self.rewards_shaper
        self._worth: Any = 0.0  # [E, 1], bootstrap values of the last observations of the newest step
        self.rewards_shaper = lambda rewards: shaper(rewards) + self._worth

    def env_step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
        """Step the envs, see `rl_games.common.a2c_common.A2CBase`.

        Raises:
            KeyError: the envs show no ``"final_obs"``.
        """
        parent: Any = super()
        observations, rewards, dones, infos = parent.env_step(actions)
        if "final_obs" not in infos:
            raise KeyError("infos has no 'final_obs': make the env with flatroll.trainers.rl_games.register")

        # Without "time_outs" in infos, the agent adds no bootstrap value itself.
        time_outs = infos["time_outs"].to(rewards.device).unsqueeze(1)
        infos = {key: value for key, value in infos.items() if key != "time_outs"}

        self._worth = torch.zeros_like(rewards)
        if self.value_bootstrap and time_outs.any():
            agent: Any = self
            values = agent.get_values(agent.obs_to_tensors(infos["final_obs"]))
            # where(), not a product: values of other rows must not count, even if they are NaN.
            self._worth = torch.where(time_outs, self.gamma * values, self._worth)
        return observations, rewards, dones, infos


def _as_float32(observations: Any) -> Any:
    """Return observations for rl_games: float64 as float32."""

    def cast(leaf: Tensor) -> Tensor:
        if leaf.dtype is torch.float64:
            return leaf.float()
        return leaf

    return map_tree(cast, observations)
