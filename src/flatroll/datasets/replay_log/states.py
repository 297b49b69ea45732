"""The state of a collector's env between two rows, as plain values, and an env that goes on from it."""

from collections.abc import Iterator, Sequence
from numbers import Number
from typing import Any

import numpy as np
from torch import Tensor

from flatroll.datasets.replay_log.generators import single_envs
from flatroll.disk.tensor_file import DamagedFileError
from flatroll.rollouts.env_facts import EnvFacts
from flatroll.rollouts.runner import Runner
from flatroll.wrappers.markers import MarkerWrapper
from flatroll.wrappers.plain_state import copy_plain, get_attributes, set_attributes
from flatroll.wrappers.snapshots.stack import (
    get_snapshot,
    guess_snapshots,
    set_snapshot,
    sketch_snapshot,
    snapshot_problem,
)
from flatroll.wrappers.source import layers

#: Rows before a state whose actions say what a sketch leaves open.
RECENT = 32


def states_problem(facts: EnvFacts, *, alone: bool) -> str | None:
    """Return why the state of an env cannot be saved; None if it can, that of each single env if they are alone."""
    if not alone:
        return snapshot_problem(facts.env)
    singles = single_envs(facts)
    if not singles:
        return "its single envs are in other processes"
    for env in singles:
        if (problem := snapshot_problem(env)) is not None:
            return problem
    return None


def state_of(facts: EnvFacts, runner: Runner, env: int | None) -> dict[str, Any]:
    """Return the state of one env in the middle of an episode, as if it were alone, or of all envs.

    That of one env is without its observation, which would be most of it: the env makes the next ones.
    """
    if env is None:
        return {"env": get_snapshot(facts.env), "shown": runner.get_shown()}

    held = {
        type(marker).__name__: _of_env(get_attributes(marker, marker.row_state or ()), env, runner.num_envs)
        for marker in _markers(facts)
    }
    elapsed = _of_env(copy_plain(facts.stream.elapsed), env, runner.num_envs)
    single = single_envs(facts)[env]
    return {
        "env": sketch_snapshot(single),
        "markers": held,
        "elapsed": elapsed,
    }


def base_state(facts: EnvFacts, runner: Runner, env: int | None) -> dict[str, Any]:
    """Return the state that others were stored as differences from, see `state_of`.

    Raises:
        DamagedFileError: the state of this env cannot be saved, as that of the log's could.
    """
    try:
        return state_of(facts, runner, env)
    except ValueError as error:
        raise _damaged(error) from None


def can_save(facts: EnvFacts, env: int) -> bool:
    """Return whether an env is in the middle of an episode: its last step was a row, and the next one will be."""
    stream = facts.stream
    return not bool(stream.first[env]) and not bool(stream.ended[env])


def states_from(facts: EnvFacts, state: Any, actions: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the states of one env alone that a state may stand for, given the last actions, the last one first.

    Raises:
        DamagedFileError: it is not the state of such an env.
    """
    (env,) = single_envs(facts)
    try:
        for snapshot in guess_snapshots(env, state["env"], actions):
            yield {**state, "env": snapshot}
    except (KeyError, TypeError, ValueError) as error:
        raise _damaged(error) from None


def put_state(facts: EnvFacts, runner: Runner, state: Any, *, alone: bool) -> None:
    """Let an env that was reset go on from a state: one env alone, whose next row has a wrong observation, or all.

    Raises:
        DamagedFileError: it is not the state of such an env.
    """
    env = facts.env
    if alone:
        (env,) = single_envs(facts)
    try:
        _check_form(sketch_snapshot(env), state["env"])
        set_snapshot(env, state["env"])
        if alone:
            _put_one(facts, state)
        else:
            _check_form(runner.get_shown()["observation"], state["shown"]["observation"])
            runner.set_shown(state["shown"])
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        raise _damaged(error) from None


def _put_one(facts: EnvFacts, state: Any) -> None:
    """Set what the adapter and the markers hold of one env in the middle of an episode."""
    stream = facts.stream
    device = stream.capabilities.device
    for marker in _markers(facts):
        held = state["markers"][type(marker).__name__]
        _check_form(get_attributes(marker, marker.row_state or ()), held)
        set_attributes(marker, held, device)

    _check_form(copy_plain(stream.elapsed), state["elapsed"])
    stream.enter_episodes(state["elapsed"])


def _markers(facts: EnvFacts) -> list[MarkerWrapper]:
    return [layer for layer in layers(facts.env) if isinstance(layer, MarkerWrapper)]


def _of_env(value: Any, env: int, num_envs: int) -> Any:
    """Return the part of one env of plain values ``[E, ...]``: ``[1, ...]``."""
    if isinstance(value, dict):
        return {name: _of_env(part, env, num_envs) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(_of_env(part, env, num_envs) for part in value)
    if isinstance(value, np.ndarray | Tensor) and value.ndim and len(value) == num_envs:
        return copy_plain(value[env : env + 1])
    if isinstance(value, list) and len(value) == num_envs:
        return value[env : env + 1]
    return value


def _check_form(own: Any, given: Any) -> None:
    """Raise ValueError unless plain values have the form of the env's own: names, dtypes, shapes.

    Files must not set other attributes than those that belong to a state. Values that are None now may be others.
    """
    if isinstance(own, dict):
        if not isinstance(given, dict) or set(given) != set(own):
            raise ValueError(f"a state has the entries {str(list(given))[:100]}, expected {list(own)}")
        for name, part in own.items():
            _check_form(part, given[name])
    elif isinstance(own, np.ndarray | Tensor):
        if not _is_like(own, given):
            raise ValueError(f"a state has {type(given).__name__}, expected {own.dtype} {list(own.shape)}")
    elif isinstance(own, str | bytes):
        if type(given) is not type(own):
            raise ValueError(f"a state has {type(given).__name__}, expected {type(own).__name__}")
    elif isinstance(own, list | tuple):
        if type(given) is not type(own):
            raise ValueError(f"a state has {type(given).__name__}, expected {type(own).__name__}")
        # Queues have any length.
        for part, other in zip(own, given, strict=False):
            _check_form(part, other)
    elif isinstance(own, Number | np.generic):
        if given is not None and not isinstance(given, Number | np.generic):
            raise ValueError(f"a state has {type(given).__name__}, expected a number")
    elif isinstance(given, dict):
        raise ValueError("a state has entries where the env has none")


def _is_like(own: Any, given: Any) -> bool:
    """Return whether an array has the shape of the env's own, and values of its kind.

    Some envs hold values of higher precision after a reset than after a step, or after a step a tuple or a number.
    """
    if isinstance(own, np.ndarray) and isinstance(given, tuple | Number | np.generic):
        parts = given if isinstance(given, tuple) else [given]
        if not all(isinstance(part, Number | np.generic) for part in parts):
            return False
        given = np.array(given)
    if type(given) is not type(own) or given.shape != own.shape:
        return False

    if isinstance(own, Tensor):
        return bool(given.dtype == own.dtype)
    return bool(given.dtype.kind == own.dtype.kind)


def _damaged(error: Exception) -> DamagedFileError:
    return DamagedFileError(f"a state of the log cannot be restored: {str(error)[:200]}")


def actions_before(columns: Sequence[Tensor]) -> list[int]:
    """Return the numbers of the last actions, the last one first; none if they are not single numbers."""
    if len(columns) != 1 or columns[0].is_floating_point() or columns[0].ndim != 1:
        return []
    numbers: list[int] = columns[0].flip(0).tolist()
    return numbers
