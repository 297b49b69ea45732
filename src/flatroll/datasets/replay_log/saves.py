"""States from which an env begins an episode again: that of its generator, and of an emulator with its own."""

from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv

from flatroll.datasets.replay_log.windows import Restart, generator_words
from flatroll.rollouts.env_facts import EnvFacts
from flatroll.wrappers.source import SourceView


def generator_of(env: Any) -> list[int] | None:
    """Return the words of a single env's generator; None if it has none of Gymnasium's kind."""
    generator = getattr(getattr(env, "unwrapped", env), "np_random", None)
    if not isinstance(generator, np.random.Generator):
        return None
    return generator_words(generator.bit_generator.state)


def single_envs(facts: EnvFacts) -> list[Any]:
    """Return the single envs of a stack in this process; empty if it has none."""
    source: Any = facts.stream.source
    while isinstance(source, SourceView):
        source = source.source
    if isinstance(source.env, SyncVectorEnv):
        return list(source.env.envs)
    return []


def restore(facts: EnvFacts, restart: Restart) -> None:
    """Set the state of the only env of a stack, before the reset that begins the episode."""
    (env,) = single_envs(facts)
    env.unwrapped.np_random.bit_generator.state = restart.generator
