"""`Snapshots`, the two methods of an env that can save its state, and the families of envs and wrappers without them.

A stack of wrappers is saved layer by layer: each layer saves what it holds itself. `find_family` asks the registered
families, then the layer's own methods, then the families that the core knows. So the core imports no simulator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import gymnasium
from gymnasium.vector import VectorWrapper


@runtime_checkable
class Snapshots(Protocol):
    """An env, vector env or wrapper that can save its state and go on from it, in the middle of an episode.

    After ``set_snapshot(snapshot)``, in this object or in one that was made alike, in this process or another, all that
    follows must be what would have followed ``get_snapshot()``: also the resets, so the random generator belongs to the
    snapshot. A wrapper saves only what it holds itself. A class inherits the methods: one that holds more extends them.
    `flatroll.wrappers.testing.check_snapshots` tests the two methods.

    >>> import gymnasium as gym
    >>> import numpy as np
    >>> class Walk(gym.Env):
    ...     observation_space, action_space = gym.spaces.Box(-9, 9, (1,)), gym.spaces.Discrete(2)
    ...     def reset(self, *, seed=None, options=None):
    ...         super().reset(seed=seed)
    ...         self.at = self.np_random.random(1, np.float32)
    ...         return self.at.copy(), {}
    ...     def step(self, action):
    ...         self.at += 2 * int(action) - 1
    ...         return self.at.copy(), 1.0, bool(abs(self.at[0]) > 3), False, {}
    ...     def get_snapshot(self):
    ...         return {"at": self.at.copy(), "random": self.np_random.bit_generator.state}
    ...     def set_snapshot(self, snapshot):
    ...         self.at = snapshot["at"].copy()
    ...         self.np_random.bit_generator.state = snapshot["random"]
    >>> isinstance(Walk(), Snapshots)
    True
    """

    def get_snapshot(self) -> Any:
        """Return the state: numbers, strings, bytes, arrays, tensors, None, and dicts, lists and tuples of them."""
        ...

    def set_snapshot(self, snapshot: Any, /) -> None:
        """Go on from a state that `get_snapshot` returned; called after a reset."""
        ...


@dataclass(frozen=True, kw_only=True)
class SnapshotFamily:
    """How layers of one kind save their state, for those without the methods of `Snapshots`.

    Args:
        name: of the family, in words.
        recognises: whether a layer (an env, a vector env or a wrapper) belongs to it.
        get: returns what the layer holds itself, as `Snapshots.get_snapshot`.
        set: restores it.
        inner: returns the layers inside. Default: the env of a wrapper, none of other layers.
        problem: returns why this layer cannot be saved, as a clause; None if it can. Default: it always can.
        sketch: as ``get``, in less time: it may leave open what would take long to find out. Default: ``get``.
        guesses: returns what a sketch may stand for, the most probable first, given the layer and the numbers of the
            last actions, the last one first. Default: only the sketch itself.

    >>> import gymnasium as gym
    >>> def get(env): return env.state.copy()
    >>> def put(env, state): env.state = state.copy()
    >>> is_simple = lambda env: type(env).__name__ == "SimpleEnv"
    >>> SnapshotFamily(name="simple envs", recognises=is_simple, get=get, set=put).name
    'simple envs'
    """

    name: str
    recognises: Callable[[Any], bool]
    get: Callable[[Any], Any]
    set: Callable[[Any, Any], None]
    inner: Callable[[Any], Sequence[Any]] | None = None
    problem: Callable[[Any], str | None] | None = None
    sketch: Callable[[Any], Any] | None = None
    guesses: Callable[[Any, Any, Sequence[int]], Sequence[Any]] | None = None


_registered: list[SnapshotFamily] = []


def register_snapshots(*families: SnapshotFamily) -> None:
    """Add families; one that is registered already stays as it is.

    >>> family = SnapshotFamily(name="none", recognises=lambda env: False, get=repr, set=setattr)
    >>> register_snapshots(family)
    """
    _registered.extend(family for family in families if family not in _registered)


def find_family(layer: object, known: Sequence[SnapshotFamily]) -> SnapshotFamily | None:
    """Return the family that saves a layer: a registered one, its own methods, or one of ``known``; None if none."""
    for family in (*_registered, _OWN_METHODS, *known):
        if family.recognises(layer):
            return family
    return None


def inner_env(layer: Any) -> Sequence[Any]:
    """Return the env of a wrapper, in a list; nothing for other layers."""
    if isinstance(layer, gymnasium.Wrapper | VectorWrapper):
        return [layer.env]
    return []


def _has_methods(layer: object) -> bool:
    """Return whether the layer's class has the two methods; what its ``__getattr__`` passes on does not count."""
    kind = type(layer)
    return callable(getattr(kind, "get_snapshot", None)) and callable(getattr(kind, "set_snapshot", None))


_OWN_METHODS = SnapshotFamily(
    name="layers with get_snapshot and set_snapshot",
    recognises=_has_methods,
    get=lambda layer: layer.get_snapshot(),
    set=lambda layer, snapshot: layer.set_snapshot(snapshot),
)
