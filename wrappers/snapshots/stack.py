"""Saves a whole stack, from the outermost wrapper to the single envs, and restores it."""

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

from flatroll.wrappers.plain_state import copy_plain
from flatroll.wrappers.snapshots import adapted, gym_layers
from flatroll.wrappers.snapshots.families import SnapshotFamily, find_family, inner_env
from flatroll.wrappers.source import VectorSource

_KNOWN = (*adapted.FAMILIES, *gym_layers.FAMILIES)


def snapshot_problem(env: object) -> str | None:
    """Return why the state of an env cannot be saved, as a clause that names the layer; None if it can.

    Args:
        env: an env, or a stack of wrappers around one, adapted or not.

    >>> import gymnasium as gym
    >>> snapshot_problem(gym.make("CartPole-v1"))
    >>> snapshot_problem(gym.make("FrozenLake-v1"))
    'FrozenLakeEnv has no get_snapshot and set_snapshot'
    """
    for layer, family in _walk(env):
        problem = None
        if family is None:
            problem = f"{_name(layer)} has no get_snapshot and set_snapshot"
        elif family.problem is not None:
            problem = family.problem(layer)
        if problem is not None:
            return problem
    return None


def get_snapshot(env: object) -> list[Any]:
    """Return a copy of the state of an env and of all its wrappers, layer after layer, as plain values.

    Raises:
        ValueError: a layer cannot be saved, see `snapshot_problem`.

    >>> import gymnasium as gym
    >>> env, other = (gym.make("CartPole-v1") for _ in range(2))
    >>> _ = env.reset(seed=0), other.reset(seed=1)
    >>> set_snapshot(other, get_snapshot(env))
    >>> env.step(0)[0] == other.step(0)[0]
    array([ True,  True,  True,  True])
    """
    return _read(env, lambda family: family.get)


def sketch_snapshot(env: object) -> list[Any]:
    """Return a snapshot in which layers leave open what would take long to find out; `guess_snapshots` completes it.

    Raises:
        ValueError: see `get_snapshot`.
    """
    return _read(env, lambda family: family.sketch or family.get)


def _read(env: object, reader_of: Callable[[SnapshotFamily], Callable[[Any], Any]]) -> list[Any]:
    """Return the name, the description and a copy of the state of each layer."""
    _refuse(env)
    return [
        [type(layer).__name__, _describe(layer), copy_plain(reader_of(family)(layer))]
        for layer, family in _walk(env)
        if family is not None
    ]


def guess_snapshots(env: object, sketch: Sequence[Any], actions: Sequence[int]) -> Iterator[list[Any]]:
    """Yield the snapshots that a sketch may stand for, the most probable first.

    Args:
        env: made as the one of the sketch.
        sketch: what `sketch_snapshot` returned.
        actions: numbers of the last actions, the last one first.

    Raises:
        ValueError: the sketch has another number of layers.
    """
    choices: list[Sequence[Any]] = []
    layers = list(_walk(env))
    for (layer, family), (name, described, state) in zip(layers, sketch, strict=True):
        states: Sequence[Any] = [state]
        if family is not None and family.guesses is not None:
            states = family.guesses(layer, state, actions)
        choices.append([[name, described, one] for one in states])
    for chosen in product(*choices):
        yield list(chosen)


def set_snapshot(env: object, snapshot: Sequence[Any]) -> None:
    """Restore a state that `get_snapshot` returned, in an env that was made alike and reset.

    Raises:
        ValueError: a layer cannot be saved, the layers are others, or one has another number of envs, autoreset mode or
            shape of observations; nothing has changed.
    """
    _refuse(env)
    layers = [(layer, family) for layer, family in _walk(env) if family is not None]
    names = [type(layer).__name__ for layer, _ in layers]
    saved = [name for name, _, _ in snapshot]
    if names != saved:
        raise ValueError(
            f"the snapshot is one of {' > '.join(saved)}, and the env is {' > '.join(names)}: make the env as the "
            "one that was saved"
        )

    for (layer, _), (name, described, _) in zip(layers, snapshot, strict=True):
        here = _describe(layer)
        if here != described:
            raise ValueError(
                f"the {name} of the snapshot has {described}, and that of the env has {here}: make the env as the one "
                "that was saved"
            )

    for (layer, family), (_, _, state) in zip(layers, snapshot, strict=True):
        family.set(layer, copy_plain(state))  # the layer may keep and change what it is given


def _describe(layer: Any) -> str:
    """Return in words what a layer must share with the one that was saved, besides its class."""
    metadata = getattr(layer, "metadata", None) or {}
    mode = metadata.get("autoreset_mode")
    space = getattr(layer, "observation_space", None)

    facts = {
        "num_envs": getattr(layer, "num_envs", None),
        "autoreset_mode": getattr(mode, "value", mode),
        "shape of observations": getattr(space, "shape", None),
    }
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


def _name(layer: object) -> str:
    """Return the name of a layer's class; of an adapter, that of its env."""
    if isinstance(layer, VectorSource) and layer.env is not None:
        return type(layer.env).__name__
    return type(layer).__name__


def _refuse(env: object) -> None:
    problem = snapshot_problem(env)
    if problem is not None:
        raise ValueError(f"the state of the env cannot be saved: {problem}")


def _walk(env: object) -> Iterator[tuple[Any, SnapshotFamily | None]]:
    """Yield each layer and its family, outermost first; nothing inside a layer without one."""
    family = find_family(env, _KNOWN)
    yield env, family
    if family is None:
        return

    if family.inner is None:
        inside = inner_env(env)
    else:
        inside = family.inner(env)
    for layer in inside:
        yield from _walk(layer)
