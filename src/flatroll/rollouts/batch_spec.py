"""Which columns a collected batch has, as a spec."""

from typing import Any

import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv

from flatroll.layout.keys import DELTA, DONE, REWARD, TERMINATED, TRUNCATED, as_tuple, next_key
from flatroll.rollouts.batch_columns import ColumnKeys
from flatroll.specs import Categorical, Composite, TensorSpec, Unbounded, as_spec
from flatroll.wrappers.adapt_env import adapt_env, find_stream


def batch_spec(env: Any) -> Composite:
    """Return the spec of the batches that an env, as it is wrapped, gives a collector with random actions.

    Its shape is ``(-1,)``: it takes batches of any number of rows. Columns that it does not name, such as a policy's
    outputs, may have any values.

    Args:
        env: anything `flatroll.wrappers.as_vector_env` takes, or wrappers around it. It is not stepped.

    >>> import gymnasium as gym
    >>> from flatroll.wrappers import InitTracker
    >>> spec = batch_spec(InitTracker(gym.make_vec("CartPole-v1", num_envs=2)))
    >>> spec["next", "reward"], sorted(spec.keys())
    (UnboundedContinuous(shape=(-1, 1), dtype=torch.float32), ['action', 'is_init', 'next', 'observation'])
    """
    adapted = adapt_env(env)
    return spec_of_columns(ColumnKeys(adapted, ()), adapted)


def spec_of_columns(keys: ColumnKeys, env: VectorEnv[Any, Any, Any], compact: bool = False) -> Composite:
    """The spec of batches with these columns; ``compact`` ones have no next observations."""
    rows: list[tuple[Any, TensorSpec]] = []  # the key, and the spec of one row
    stream = find_stream(env)
    unknown = stream is not None and stream.hides_final_obs  # last observations are made up
    for key, path in zip(keys.obs, keys.obs_paths, strict=True):
        spec = as_spec(_at(env.single_observation_space, path))
        rows.append((key, spec))
        if key in keys.deltas:
            rows.append(((*DELTA, *as_tuple(key)), Unbounded(spec.shape, dtype=keys.delta_dtype)))
        elif not compact and not unknown:
            rows.append((next_key(key), spec))
    for key, path in zip(keys.actions, keys.action_paths, strict=True):
        rows.append((key, as_spec(_at(env.single_action_space, path))))
    flag, count = Categorical(2, (1,), dtype=torch.bool), Unbounded((1,), dtype=torch.int64)
    rows += [(REWARD, Unbounded((1,), dtype=torch.float32))]
    rows += [(key, flag) for key in (TERMINATED, TRUNCATED, DONE)]
    rows += [(keys.init, flag)] if keys.init in keys.roots else []
    rows += [(key, count) for own in keys.counts for key in (own, next_key(own))]
    rows += [(keys.traj, Unbounded((), dtype=torch.int64))] if keys.has_ids else []
    rows += [(keys.returns, Unbounded((1,), dtype=torch.float32))] if keys.returns is not None else []
    batch = Composite(shape=(-1,))
    for key, spec in rows:
        batch[key] = spec.expand(-1, *spec.shape)
    return batch


def _at(space: spaces.Space[Any], path: tuple[Any, ...]) -> spaces.Space[Any]:
    """The part of a space at a path of keys and positions."""
    for name in path:
        space = space[name]  # type: ignore[index]
    return space
