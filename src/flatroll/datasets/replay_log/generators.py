"""States of generators, from which an env begins an episode again."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium.vector import SyncVectorEnv

from flatroll.datasets.replay_log.varints import Ints
from flatroll.datasets.replay_log.windows import Restart
from flatroll.rollouts.env_facts import EnvFacts
from flatroll.wrappers.source import innermost


def generator_of(env: Any) -> list[int] | None:
    """Return the words of a single env's generator; None if it has none of Gymnasium's kind."""
    generator = getattr(getattr(env, "unwrapped", env), "np_random", None)
    if not isinstance(generator, np.random.Generator):
        return None
    return generator_words(generator.bit_generator.state)


def single_envs(facts: EnvFacts) -> list[Any]:
    """Return the single envs of a stack in this process; empty if it has none."""
    env = innermost(facts.stream.source).env
    if isinstance(env, SyncVectorEnv):
        return list(env.envs)
    return []


def restore(facts: EnvFacts, restart: Restart) -> None:
    """Set the state of the only env of a stack, before the reset that begins the episode."""
    (env,) = single_envs(facts)
    env.unwrapped.np_random.bit_generator.state = generator_state(restart.words)


def generator_words(state: Mapping[str, object]) -> list[int] | None:
    """Return the state of a `numpy.random.PCG64` as five signed words; None for another generator."""
    if state.get("bit_generator") != "PCG64":
        return None
    inner: object = state["state"]
    assert isinstance(inner, Mapping)
    has_half = state["has_uint32"]
    half = state["uinteger"]
    assert isinstance(has_half, int) and isinstance(half, int)

    numbers: Sequence[int] = [inner["state"], inner["inc"]]
    words = []
    for number in numbers:
        words += [number >> 64, number & (2**64 - 1)]
    # The half word has 32 bits; the flag is above it.
    words.append((has_half << 32) | half)
    return [word - 2**64 if word >= 2**63 else word for word in words]


def generator_state(words: Ints) -> dict[str, object]:
    """Invert `generator_words`."""
    high, low, inc_high, inc_low, half = (int(word) % 2**64 for word in words)
    return {
        "bit_generator": "PCG64",
        "state": {"state": high << 64 | low, "inc": inc_high << 64 | inc_low},
        "has_uint32": half >> 32 & 1,
        "uinteger": half & 0xFFFFFFFF,
    }
