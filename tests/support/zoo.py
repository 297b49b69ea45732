"""Environments of other packages, and what they do in a plain loop, without flatroll."""

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode
from tensordict import TensorDictBase

#: Steps after which every episode is truncated, so that short runs have ends.
LIMIT = 17
#: What a step gave: observation, next observation, reward, terminated, truncated.
Row = tuple[Any, Any, float, bool, bool]
Make = Callable[[], Any]


@dataclass(frozen=True)
class Entry:
    """An environment of a package.

    Args:
        package: name of its distribution.
        name: its id, or how it is made.
        make: makes it; imports its package.
    """

    package: str
    name: str
    make: Make

    def __str__(self) -> str:
        return f"{self.package}, {self.name}"


def registered(package: str, module: str, *names: str, wrapper: str = "", **options: Any) -> list[Entry]:
    """Entries of ids that a module registers with Gymnasium; ``wrapper`` is a class as ``module:Class``."""

    def maker(name: str) -> Make:
        def make() -> Any:
            importlib.import_module(module)
            env = gym.make(name, max_episode_steps=LIMIT, disable_env_checker=True, **options)
            if wrapper:
                place, _, kind = wrapper.partition(":")
                env = getattr(importlib.import_module(place), kind)(env)
            return env

        return make

    note = wrapper.partition(":")[2]
    shown = ", ".join(f"{key}={value!r}" for key, value in options.items())
    suffix = "".join(f", {part}" for part in (note, shown) if part)
    return [Entry(package, name + suffix, maker(name)) for name in names]


def play(make: Make, seed: int, actions: Sequence[Sequence[Any]], mode: AutoresetMode) -> list[list[Row]]:
    """Step single envs in turn, with these actions for each; env k is reset with ``seed + k``, later without a seed.

    Ended envs are reset when a vector env of this mode would do so: some envs share Python's random numbers.
    """
    envs = [make() for _ in actions]
    seen = [env.reset(seed=seed + index)[0] for index, env in enumerate(envs)]
    rows: list[list[Row]] = [[] for _ in envs]
    ended = [False] * len(envs)
    while any(len(own) < len(given) for own, given in zip(rows, actions, strict=True)):
        for index, env in enumerate(envs):
            own = rows[index]
            if ended[index]:
                seen[index] = env.reset()[0]
                ended[index] = False
                if mode is AutoresetMode.NEXT_STEP:
                    continue  # this step only resets
            if len(own) == len(actions[index]):
                continue

            before = keep(seen[index])
            seen[index], reward, terminated, truncated, _ = env.step(actions[index][len(own)])
            own.append((before, keep(seen[index]), float(reward), bool(terminated), bool(truncated)))
            ended[index] = bool(terminated or truncated)
            if ended[index] and mode is AutoresetMode.SAME_STEP:
                seen[index] = env.reset()[0]
                ended[index] = False

        if mode is AutoresetMode.DISABLED:
            for index in (index for index, over in enumerate(ended) if over):
                seen[index] = envs[index].reset()[0]
                ended[index] = False
    for env in envs:
        env.close()
    return rows


def play_vector(env: Any, seed: int, actions: Sequence[Sequence[Any]]) -> list[list[Row]]:
    """Step a vector env by the rules of its autoreset mode, with these actions for each of its envs.

    Returns:
        the rows of each env, as many as it has actions.
    """
    mode = env.autoreset_mode
    rows: list[list[Row]] = [[] for _ in actions]
    ended = np.zeros(len(actions), bool)
    obs, _ = env.reset(seed=seed)
    while any(len(done) < len(wanted) for done, wanted in zip(rows, actions, strict=True)):
        before = obs.copy()
        # An env that only resets in this step takes no action; one that is ready plays any.
        skipped = ended if mode is AutoresetMode.NEXT_STEP else np.zeros_like(ended)
        given = [wanted[min(len(done), len(wanted) - 1)] for done, wanted in zip(rows, actions, strict=True)]
        obs, reward, terminated, truncated, info = env.step(np.asarray(given))
        ended = (terminated | truncated) & ~skipped

        for index, own in enumerate(rows):
            if skipped[index] or len(own) == len(actions[index]):
                continue
            after = obs[index]
            if ended[index] and mode is AutoresetMode.SAME_STEP:
                after = info["final_obs"][index]
            flags = bool(terminated[index]), bool(truncated[index])
            own.append((before[index].copy(), np.array(after), float(reward[index]), *flags))
        if mode is AutoresetMode.DISABLED and ended.any():
            obs = env.reset(options={"reset_mask": ended.copy()})[0]
            ended[:] = False
    env.close()
    return rows


def keep(obs: Any) -> Any:
    """A copy of an observation, whose arrays the env may write into again."""
    if isinstance(obs, dict):
        return {key: keep(value) for key, value in obs.items()}
    if isinstance(obs, tuple):
        return tuple(keep(value) for value in obs)
    return np.array(obs)


def actions_of(space: gym.Space[Any], column: Any) -> list[Any]:
    """The actions of the rows of one env, as the env's space has them."""
    if isinstance(space, gym.spaces.Dict):
        parts = {key: actions_of(part, column[key]) for key, part in space.items()}
        count = len(next(iter(parts.values())))
        return [{key: values[row] for key, values in parts.items()} for row in range(count)]
    if isinstance(space, gym.spaces.Tuple):
        columns = [actions_of(part, column[str(index)]) for index, part in enumerate(space)]
        return list(zip(*columns, strict=True))
    values = column.numpy()
    if isinstance(space, gym.spaces.Discrete):
        return [int(value) for value in values]
    return [np.asarray(value, space.dtype) for value in values]


def count_wrong(rows: TensorDictBase, expected: Sequence[Row]) -> int:
    """How many rows of one env differ from those of a plain loop, in any entry."""
    wrong = 0
    for index, (obs, following, reward, terminated, truncated) in enumerate(expected):
        row = rows[index]
        after = row["next"]
        same = bool(after["terminated"]) == terminated and bool(after["truncated"]) == truncated
        same &= np.array_equal(after["reward"].numpy().reshape(()), np.float32(reward), equal_nan=True)
        same &= equal(row, obs) and equal(after, following)
        wrong += not same
    return wrong


def equal(row: TensorDictBase, obs: Any) -> bool:
    """Whether the row's entries have this observation: a Dict's entries stand in the row itself."""
    if isinstance(obs, dict):
        return all(equal_entry(find(row, str(key)), value) for key, value in obs.items())
    return equal_entry(row["observation"], obs)


def equal_entry(entry: Any, value: Any) -> bool:
    if isinstance(value, dict):
        return all(equal_entry(entry[str(key)], part) for key, part in value.items())
    if isinstance(value, tuple):
        return all(equal_entry(entry[str(index)], part) for index, part in enumerate(value))
    stored = entry.numpy()
    floating = np.issubdtype(stored.dtype, np.floating)
    # Gymnasium's vector envs convert what an env returns to the dtype of its space.
    return np.array_equal(stored, np.asarray(value).astype(stored.dtype), equal_nan=floating)


def find(row: TensorDictBase, key: str) -> Any:
    """An entry, or the one with an underscore that stands for a name that flatroll uses itself."""
    renamed = f"{key}_"
    names = set(row.keys())
    return row[renamed] if renamed in names else row[key]


def same_rows(one: Sequence[Row], other: Sequence[Row]) -> int:
    """How many rows from the first on two plain loops have in common: not all envs are reproducible."""
    pairs = zip(one, other, strict=True)
    return next((index for index, (left, right) in enumerate(pairs) if flat(left) != flat(right)), len(one))


def flat(value: Any) -> list[bytes]:
    """The bytes of all arrays of a tree."""
    if isinstance(value, dict):
        return [part for key in sorted(value) for part in flat(value[key])]
    if isinstance(value, tuple):
        return [part for each in value for part in flat(each)]
    array = np.asarray(value)
    return [repr(value).encode() if array.dtype == object else array.tobytes()]
