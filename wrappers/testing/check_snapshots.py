"""Check that an env goes on from its snapshots."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from flatroll.layout.checks import check_seed, check_whole_number
from flatroll.wrappers.adapt_env import adapt_env, find_stream
from flatroll.wrappers.arrays import map_tree
from flatroll.wrappers.snapshots.stack import get_snapshot, set_snapshot, snapshot_problem
from flatroll.wrappers.source import EnvLike
from flatroll.wrappers.testing.check_env import ContractError, copied, same

_PLAIN = (type(None), bool, int, float, str, bytes, np.ndarray, np.generic, Tensor)
_NAMES = ("observation", "reward", "terminated", "truncated")


def check_snapshots(make_env: Callable[[], EnvLike], *, steps: int = 50, seed: int = 0) -> None:
    """Play an env and others that take over from its snapshots; raise `ContractError` if what follows differs.

    Each env that takes over is a new one, reset with another seed. Snapshots are taken after 0, 1, 2, 4, 8, ... steps,
    so choose enough for several episodes to end.

    Args:
        make_env: makes anything that `flatroll.wrappers.as_vector_env` accepts; called several times.
        steps: vector steps to play, default 50.
        seed: seed of the env and of the random actions, default 0.

    Raises:
        ContractError: the env cannot save its state, a snapshot has a value that no file holds, or what follows a
            snapshot is something else.

    >>> from flatroll.wrappers.testing import Script, ScriptedVectorEnv
    >>> check_snapshots(lambda: ScriptedVectorEnv(Script(2, lengths=[[3, 4], [5]])))
    """
    check_whole_number("steps", steps)
    seed = check_seed("seed", seed)
    env = adapt_env(make_env())
    problem = snapshot_problem(env)
    if problem is not None:
        raise ContractError(f"the env cannot be saved: {problem}")

    _reset(env, seed)
    env.action_space.seed(seed)
    actions = []
    results = []
    saved: dict[int, Any] = {}
    for step in range(steps):
        if step & (step - 1) == 0:
            snapshot = get_snapshot(env)
            odd = _find_odd(snapshot)
            if odd is not None:
                raise ContractError(
                    f"the snapshot has a value of type {odd}: return numbers, strings, bytes, arrays, tensors, None, "
                    "and dicts, lists and tuples of them"
                )
            saved[step] = copy.deepcopy(snapshot)
        actions.append(env.action_space.sample())
        results.append(_step(env, actions[-1]))

    for start, snapshot in saved.items():
        other = adapt_env(make_env())
        _reset(other, seed + 1)
        set_snapshot(other, snapshot)
        for step in range(start, steps):
            for name, again, before in zip(_NAMES, _step(other, actions[step]), results[step], strict=True):
                if not same(again, before):
                    raise ContractError(
                        f"step {step - start} after the snapshot at step {start} returns another {name} than the env "
                        "that went on: save all that changes in a step or reset, the random generator included"
                    )


def _reset(env: Any, seed: int) -> None:
    stream = find_stream(env)
    if stream is not None and not stream.capabilities.seedable:
        env.reset()
    else:
        env.reset(seed=seed)


def _step(env: Any, action: Any) -> list[Any]:
    """Return copies of the observation, the reward and the flags."""
    return [map_tree(copied, part) for part in env.step(action)[:4]]


def _find_odd(value: Any) -> str | None:
    """Return the name of the type of a value in a tree that is not plain; None if all are."""
    if isinstance(value, dict):
        parts = list(value.values())
    elif isinstance(value, list | tuple):
        parts = list(value)
    elif isinstance(value, np.ndarray) and value.dtype == object:
        return "array of objects"
    elif isinstance(value, _PLAIN):
        return None
    else:
        return type(value).__name__
    return next((odd for odd in map(_find_odd, parts) if odd is not None), None)
