"""Which columns a batch has, under which keys, and who writes them."""

from collections.abc import Sequence
from typing import Any

import torch
from gymnasium.vector import VectorEnv

from flatroll.layout.keys import (
    ACTION,
    DELTA,
    DONE,
    IS_INIT,
    NEXT_KNOWN,
    REWARD,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)
from flatroll.rollouts.window import DEAD
from flatroll.wrappers.arrays import Array
from flatroll.wrappers.compact import CompactObs, NextObservationDelta
from flatroll.wrappers.markers import (
    InitTracker,
    MarkerWrapper,
    RecurrentPrimer,
    RewardSum,
    StepCounter,
    TrajId,
)
from flatroll.wrappers.source import layers
from flatroll.wrappers.stream import observation_leaves


class ColumnKeys:
    """The keys of a batch, read off a stack of wrappers; no two parts may write one column.

    Attributes:
        leaves: (key, path in the observation tree) of every observation entry; ``obs`` has the keys alone.
        roots: (key, name in ``info``) of the markers that describe the observation a row starts from.
        nexts: the same of those that describe the step.
        counts: the step counters' keys, whose ``("next", key)`` is one more.
        traj, init: where the ids and first-row marks stand.
        infos: the entries of ``info`` to store.
        deltas: the observation keys that a NextObservationDelta treats, in ``delta_dtype``.
        has_ids: whether there are trajectory ids.
        returns: where a RewardSum's returns stand, or None.
        float32: the columns that are float32 whatever a wrapper makes of them.
        states: the recurrent states of the policy, once there is one.
        strided: whether only some rows keep them (``("collector", "has_state")`` says which).

    Raises:
        ValueError: two parts write one column; the text names both.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], info_keys: Sequence[str]) -> None:
        if isinstance(info_keys, str):
            raise TypeError(
                f"info_keys must be a list of names, got the string {info_keys!r}: write [{info_keys!r}]"
            )
        markers = [layer for layer in layers(env) if isinstance(layer, MarkerWrapper)]
        silent = CompactObs | NextObservationDelta | RecurrentPrimer  # they add no column of their own
        plain = [m for m in markers if not isinstance(m, silent)]
        self.leaves = observation_leaves(env.single_observation_space)
        self.obs: list[NestedKey] = [key for key, _ in self.leaves]
        self.roots = [(m.key, m.info_name) for m in plain if not m.describes_step]
        self.nexts = [(next_key(m.key), m.info_name) for m in plain if m.describes_step]
        self.counts = [m.key for m in plain if isinstance(m, StepCounter)]
        self.traj: NestedKey = next((m.key for m in plain if isinstance(m, TrajId)), TRAJ_IDS)
        self.init: NestedKey = next((m.key for m in plain if isinstance(m, InitTracker)), IS_INIT)
        self.returns = next((next_key(m.key) for m in plain if isinstance(m, RewardSum)), None)
        self.float32: set[NestedKey] = {REWARD} if self.returns is None else {REWARD, self.returns}
        delta = next((m for m in markers if isinstance(m, NextObservationDelta)), None)
        self.deltas: list[NestedKey] = [] if delta is None else delta.keys
        self.delta_dtype = torch.float16 if delta is None else delta.delta_dtype
        self.states: list[NestedKey] = []
        self.strided = False
        self.has_ids = any(isinstance(m, TrajId) for m in plain)
        self.infos = tuple(info_keys)
        #: Columns that are bool or a number for each row, and stand as ``[N, 1]``.
        self.trailing: set[NestedKey] = {REWARD, TERMINATED, TRUNCATED, *(key for key, _ in self.nexts)}
        self.trailing |= {key for key, _ in self.roots if key != self.traj}
        self._writers: dict[tuple[str, ...], str] = {}
        self.claim("the collector", REWARD, TERMINATED, TRUNCATED, DONE, NEXT_KNOWN, DEAD)
        self.claim("the policy's action", ACTION)
        self.claim("the observation", *self.obs, *(next_key(key) for key in self.obs))
        for marker in plain:
            both = isinstance(marker, StepCounter)
            key = next_key(marker.key) if marker.describes_step else marker.key
            self.claim(type(marker).__name__, key, *((next_key(key),) if both else ()))
        if delta is not None:
            self.claim("NextObservationDelta", DELTA)
        for name in self.infos:
            self.claim("info_keys", name, next_key(name))

    def claim(self, writer: str, *keys: NestedKey) -> None:
        """Say who writes the columns; a ValueError if another part writes one of them already."""
        for key in map(as_tuple, keys):
            for other, owner in self._writers.items():
                if key[: len(other)] == other[: len(key)]:
                    raise ValueError(
                        f"two parts write one column: {owner} writes {plain_key(other)!r}, {writer} writes "
                        f"{plain_key(key)!r}. Rename one: the marker wrappers take a key argument, policies "
                        "out_keys, observations gymnasium.wrappers.TransformObservation"
                    )
        self._writers.update((as_tuple(key), writer) for key in keys)


def plain_key(key: tuple[str, ...]) -> NestedKey:
    """The key as it is mostly written.

    >>> plain_key(("observation",)), plain_key(("next", "reward"))
    ('observation', ('next', 'reward'))
    """
    return key if len(key) != 1 else key[0]


def tree_leaves(key: NestedKey, tree: Any) -> list[tuple[NestedKey, Array]]:
    """The leaves of a tree under a key.

    >>> tree_leaves("action", {"move": 1, "press": (2, 3)})
    [(('action', 'move'), 1), (('action', 'press', '0'), 2), (('action', 'press', '1'), 3)]
    """
    if isinstance(tree, (dict, tuple)):
        items: Any = tree.items() if isinstance(tree, dict) else enumerate(tree)
        return [leaf for name, child in items for leaf in tree_leaves((*as_tuple(key), str(name)), child)]
    return [(key, tree)]
