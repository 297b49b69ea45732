"""Checks what the envs inside a `SyncVectorEnv` return; errors name the env, the entry and the value.

Gymnasium's own errors there come from NumPy ("Output array is the wrong shape") and name neither.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import numpy as np
from gymnasium import spaces
from gymnasium.vector import SyncVectorEnv

from flatroll.layout.checks import as_text
from flatroll.wrappers.arrays import Tree, map_tree

_STEP = "(observation, reward, terminated, truncated, info)"


@contextmanager
def checked_returns(env: SyncVectorEnv, method: str) -> Iterator[None]:
    """Check what ``method`` (``"reset"`` or ``"step"``) of each sub-env returns, in the ``with`` block.

    Rewards that are arrays of one number are converted from then on, as an AsyncVectorEnv converts them.

    Raises:
        TypeError: a sub-env returned something else than Gymnasium's tuple, or an info that is no dict.
        ValueError: it returned a tuple of another length, or a reward of more than one number.
    """
    check = _check_reset if method == "reset" else _check_step
    before: list[tuple[dict[str, Any], Any]] = []
    for number, part in enumerate(env.envs):
        own = getattr(part, "__dict__", None)
        if own is None:
            continue

        before.append((own, own.get(method)))
        where = f"{method} of {_name(part)} (env {number})"
        # In the instance's dict: an env's __setattr__ may pass attributes on.
        own[method] = partial(check, env, where, getattr(part, method))

    try:
        yield
    finally:
        for own, method_before in reversed(before):
            if method_before is None:
                del own[method]
            else:
                own[method] = method_before


class LastObservations:
    """Keeps a copy of each sub-env's last observation as the step that ended the episode returned it.

    Created before the first step of a SAME_STEP env, whose reset may write into that observation's arrays.

    Args:
        env: the vector env; each sub-env's ``step`` is shadowed until `forget`.
    """

    def __init__(self, env: SyncVectorEnv) -> None:
        #: The copies, by the env's number; None before the end of its first episode.
        self.copies: list[Tree | None] = [None] * env.num_envs

        self._holders: list[dict[str, Any] | None] = [getattr(part, "__dict__", None) for part in env.envs]
        self._before = [None if own is None else own.get("step") for own in self._holders]
        self._shadows = [partial(self._step, number, part.step) for number, part in enumerate(env.envs)]

        for own, shadow in zip(self._holders, self._shadows, strict=True):
            if own is not None:
                own["step"] = shadow

    def _step(self, number: int, step: Callable[..., Any], *action: Any) -> Any:
        result = step(*action)
        if len(result) == 5 and (result[2] or result[3]):
            self.copies[number] = map_tree(np.array, result[0])
        return result

    def forget(self, number: int) -> None:
        """Copy no more observations of an env."""
        own = self._holders[number]
        if own is None or own.get("step") is not self._shadows[number]:
            return  # of another adapter around the same env, which calls this one's

        self._holders[number] = None
        if self._before[number] is None:
            del own["step"]
        else:
            own["step"] = self._before[number]


def explain_observations(env: SyncVectorEnv, error: Exception) -> None:
    """Raise ValueError, from the given error, if the last observation of a sub-env does not fit its space."""
    for number, obs in enumerate(env._env_obs):
        if obs is None:
            continue

        problem = misfit(env.single_observation_space, obs)
        if problem is not None:
            name = _name(env.envs[number])
            raise ValueError(f"the observation of {name} (env {number}) {problem}") from error


def misfit(space: spaces.Space[Any], obs: Tree, rows: tuple[int, ...] = ()) -> str | None:
    """Say which entry of an observation lacks in it, or has another shape than in its space; None if all fit.

    Args:
        space: the space of one observation.
        obs: the observation, or a batch of observations.
        rows: the batch's size; empty for one observation.

    >>> misfit(spaces.Dict(goal=spaces.Box(-1, 1, (2,))), {"goal": np.zeros(3)})
    "has shape (3,) at 'goal', and its space has (2,)"
    """
    return _misfit(space, obs, rows, "")


def one_reward(came: str) -> str:
    """Return the error message for a reward that is not a number."""
    return (
        f"reward must be one number for each env and step, got {came}: weigh the parts of a vector, as with "
        "gymnasium.wrappers.TransformReward(env, lambda r: float(r @ weights)), and keep it in info (info_keys=). If "
        "there is one reward per agent: sum them, or play the game as agents (flatroll.wrappers.PettingZooSource)"
    )


def _name(env: object) -> str:
    return type(getattr(env, "unwrapped", env)).__name__


class _OneNumbers(np.ndarray[Any, Any]):
    """An array ``(E,)`` whose elements can be set to arrays of one number."""

    def __setitem__(self, at: Any, value: Any) -> None:
        super().__setitem__(at, np.asarray(value).reshape(()))


def _check_reset(env: SyncVectorEnv, where: str, reset: Callable[..., Any], **arguments: Any) -> Any:
    result = reset(**arguments)
    if not isinstance(result, tuple | list):
        raise TypeError(
            f"{where} must return (observation, info), got {as_text(result)}: gymnasium's API has two values, "
            "gym's before 0.26 had one"
        )
    if len(result) != 2:
        raise ValueError(f"{where} must return (observation, info), got {len(result)} values")

    _check_info(where, result[1])
    return result


def _check_step(env: SyncVectorEnv, where: str, step: Callable[..., Any], *action: Any) -> Any:
    result = step(*action)
    if not isinstance(result, tuple | list):
        raise TypeError(f"{where} must return {_STEP}, got {as_text(result)}")
    if len(result) != 5:
        way_out = ""
        if len(result) == 4:
            way_out = ": split done into terminated and truncated"
        raise ValueError(f"{where} returned {len(result)} values: Gymnasium's API has 5, {_STEP}{way_out}")

    _check_reward(env, where, result[1])
    _check_info(where, result[4])
    return result


def _check_reward(env: SyncVectorEnv, where: str, reward: Any) -> None:
    try:
        number = np.asarray(reward, np.float64)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ValueError(one_reward(f"{as_text(reward)} from {where}")) from error

    if number.size != 1:
        raise ValueError(one_reward(f"shape {number.shape} from {where}"))

    if number.ndim and isinstance(getattr(env, "_rewards", None), np.ndarray):
        env._rewards = env._rewards.view(_OneNumbers)


def _check_info(where: str, info: object) -> None:
    if not isinstance(info, Mapping):
        raise TypeError(f"info must be a dict, got {as_text(info)} from {where}: return {{}} for no entries")


def _misfit(space: spaces.Space[Any], obs: Tree, rows: tuple[int, ...], at: str) -> str | None:
    place = f" at {at}" if at else ""
    if isinstance(space, spaces.Dict):
        if not isinstance(obs, Mapping):
            return f"must be a dict{place}, as its space is, got {as_text(obs)}"
        parts: Iterable[tuple[Any, spaces.Space[Any]]] = space.spaces.items()
        present: Any = obs
    elif isinstance(space, spaces.Tuple):
        if not isinstance(obs, tuple | list):
            return f"must be a tuple{place}, as its space is, got {as_text(obs)}"
        parts = enumerate(space.spaces)
        present = range(len(obs))
    else:
        return _misfit_of_leaf(space, obs, rows, place)

    values: Any = obs
    for key, child in parts:
        inner = f"{at}[{key!r}]" if at else repr(key)
        if key not in present:
            return f"lacks the entry {inner} of its space"
        problem = _misfit(child, values[key], rows, inner)
        if problem is not None:
            return problem
    return None


def _misfit_of_leaf(space: spaces.Space[Any], obs: Any, rows: tuple[int, ...], place: str) -> str | None:
    try:
        shape = tuple(np.shape(obs))
    except ValueError:  # a ragged list
        return f"must be an array{place}, got {as_text(obs)}"

    assert space.shape is not None
    if shape == (*rows, *space.shape):
        return None
    return f"has shape {shape}{place}, and its space has {(*rows, *space.shape)}"
