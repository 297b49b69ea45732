"""`specs`: TorchRL specs of an environment's observations and actions, with the keys of flat batches.

TorchRL's losses and buffers read flat batches directly; see ``docs/torchrl.md``.
"""

from typing import Any

import torch
from gymnasium import spaces

from flatroll.layout import ACTION, OBSERVATION
from flatroll.trainers.versions import trainer_imports
from flatroll.wrappers import as_vector_env

with trainer_imports("torchrl", "0.14", "0.15", "torchrl"):
    from torchrl.data import Binary, Bounded, Categorical, Composite, MultiCategorical, Unbounded


def specs(env: Any) -> Any:
    """Return the specs of one row of this environment's batches, for TorchRL's modules and losses.

    Discrete actions are integers, as in batches: give TorchRL's losses ``action_space="categorical"`` or this spec, not
    a one-hot one.

    Args:
        env: anything `as_vector_env` takes, adapted or not; it is not stepped.

    Returns:
        A ``Composite`` without batch dimension: ``"action"`` and ``"observation"``, or the entries of a Dict
        observation.

    Raises:
        TypeError: a space is not a Box, Discrete, MultiDiscrete, MultiBinary or Dict.

    >>> import gymnasium as gym
    >>> found = specs(gym.make_vec("CartPole-v1", num_envs=3))
    >>> found["action"].n, found["observation"].shape
    (2, torch.Size([4]))
    """
    adapted = as_vector_env(env)
    found: Any = spec_of(adapted.single_observation_space)
    if not isinstance(found, Composite):
        found = Composite({OBSERVATION: found})
    found[ACTION] = spec_of(adapted.single_action_space)
    return found


def spec_of(space: Any) -> Any:
    """Return the TorchRL spec of one Gymnasium space; see `specs`.

    >>> spec_of(spaces.MultiDiscrete([3, 2])).rand().shape
    torch.Size([2])
    """
    if isinstance(space, spaces.Dict):
        return Composite({name: spec_of(one) for name, one in space.spaces.items()})
    if isinstance(space, spaces.Box):
        low = torch.as_tensor(space.low)
        high = torch.as_tensor(space.high)
        if space.is_bounded("both"):
            return Bounded(low, high, low.shape, dtype=low.dtype)
        return Unbounded(low.shape, dtype=low.dtype)

    if (
        isinstance(space, spaces.Discrete | spaces.MultiDiscrete)
        and (torch.as_tensor(space.start) != 0).any()
    ):
        raise TypeError(f"TorchRL's categorical specs start at 0, got {space}")

    if isinstance(space, spaces.Discrete):
        return Categorical(int(space.n), dtype=torch.int64)
    if isinstance(space, spaces.MultiDiscrete):
        return MultiCategorical(torch.as_tensor(space.nvec), dtype=torch.int64)
    if isinstance(space, spaces.MultiBinary):
        return Binary(shape=torch.Size(space.shape), dtype=torch.int8)
    raise TypeError(
        f"TorchRL has no spec for {space}: spaces are Box, Discrete, MultiDiscrete, MultiBinary and Dict"
    )
