"""`wrap_env` and `FinalObservations`: skrl's agents on any environment, with true next observations."""

from typing import Any

import torch
from torch import Tensor

from flatroll.trainers.versions import trainer_imports
from flatroll.wrappers import as_vector_env, find_stream

with trainer_imports("skrl", "2.1", "3", "skrl"):
    from skrl.agents.torch.a2c import A2C_RNN
    from skrl.agents.torch.ppo import PPO_RNN
    from skrl.agents.torch.rpo import RPO_RNN
    from skrl.agents.torch.trpo import TRPO_RNN
    from skrl.envs.wrappers.torch import wrap_env as wrap_adapted
    from skrl.utils.spaces.torch import flatten_tensorized_space, tensorize_space

# Agents that bootstrap a truncated row from the value before its last step, and compute returns across its end.
_BOOTSTRAP_BEFORE_THE_STEP = (A2C_RNN, PPO_RNN, RPO_RNN, TRPO_RNN)


def wrap_env(env: Any, **options: Any) -> Any:
    """Adapt any environment to skrl's trainers: every step is a transition, and ended rows restart in the same step.

    Agents must take `FinalObservations` as a base, or they take the first observation of the next episode for the last.

    Args:
        env: anything `as_vector_env` takes, and which returns NumPy arrays; it must not have been reset yet.
        **options: further arguments of `as_vector_env`.

    Returns:
        skrl's wrapper around the adapted env.

    Raises:
        ValueError: the env returns torch tensors, or cannot reset chosen rows.

    >>> import gymnasium as gym
    >>> env = wrap_env(gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync"))
    >>> observations, infos = env.reset()
    >>> observations.shape, env.num_envs
    (torch.Size([4, 4]), 4)
    """
    adapted = as_vector_env(env, autoreset="same_step", **options)
    stream = find_stream(adapted)
    if stream is not None and stream.capabilities.framework != "numpy":
        raise ValueError(f"env must return NumPy arrays, but {type(env).__name__} returns torch tensors")
    return wrap_adapted(adapted, wrapper="gymnasium", verbose=False)


class FinalObservations:
    """Base class, listed before the class of a skrl agent, which then records the true next observation of ended rows.

    It takes it from ``infos["final_obs"]``, where the envs of `wrap_env` have it, so what an agent stores and what
    ``time_limit_bootstrap`` values is right. A row that was terminated and truncated counts as terminated.

    Agents that compute returns along their rollouts (PPO, A2C, RPO, TRPO, AMP) must set
    ``cfg.time_limit_bootstrap=True``. With False, which is skrl's default, the return of a truncated row continues
    with the rewards of the next episode.

    Args:
        arguments, named: those of the agent.

    Raises:
        ValueError: the agent's configuration has ``time_limit_bootstrap=False``.
        TypeError: the agent is skrl's A2C_RNN, PPO_RNN, RPO_RNN or TRPO_RNN, which never value last observations.

    >>> from skrl.agents.torch.ppo import PPO, PPO_CFG
    >>> class ExactPPO(FinalObservations, PPO): ...
    >>> agent = ExactPPO(models={}, cfg=PPO_CFG(time_limit_bootstrap=True), device="cpu")
    """

    observation_space: Any
    cfg: Any

    def __init__(self, *arguments: Any, **named: Any) -> None:
        name = type(self).__name__
        if isinstance(self, _BOOTSTRAP_BEFORE_THE_STEP):
            raise TypeError(
                f"FinalObservations is not for {name}: skrl's recurrent on-policy agents bootstrap a truncated row "
                "from the value before its step, and continue its return with the next episode. Use the agent without "
                "_RNN, or flatroll's recurrent networks and PPO loss"
            )

        parent: Any = super()
        parent.__init__(*arguments, **named)

        if not getattr(self.cfg, "time_limit_bootstrap", True):
            raise ValueError(
                f"{name} needs cfg.time_limit_bootstrap=True, got False, skrl's default: without it, the return of a "
                "truncated row continues with the rewards of the next episode"
            )

    def record_transition(
        self,
        *,
        next_observations: Tensor,
        terminated: Tensor,
        truncated: Tensor,
        infos: Any,
        **others: Any,
    ) -> None:
        """Record a transition, see `skrl.agents.torch.Agent`.

        Raises:
            KeyError: a row has ended, and there is no ``infos["final_obs"]``.
        """
        ended = terminated | truncated
        if ended.any():
            if "final_obs" not in infos:
                raise KeyError(
                    "infos has no 'final_obs' although an episode has ended: make the env with "
                    "flatroll.trainers.skrl.wrap_env"
                )

            last = tensorize_space(
                self.observation_space, infos["final_obs"], device=next_observations.device
            )
            flat: Any = flatten_tensorized_space(last)
            # A new tensor: the trainer continues from its own.
            next_observations = torch.where(ended, flat, next_observations)

        parent: Any = super()
        parent.record_transition(
            next_observations=next_observations,
            terminated=terminated,
            truncated=truncated & ~terminated,
            infos=infos,
            **others,
        )
