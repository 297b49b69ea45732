"""The keys of a collected batch's columns, and which component writes each column."""

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
    plain_key,
)
from flatroll.specs.spaces import space_leaves
from flatroll.wrappers.markers import InitTracker, MarkerWrapper, RewardSum, StepCounter, TrajId
from flatroll.wrappers.source import layers
from flatroll.wrappers.stream import observation_leaves

#: Column of the rows on which the env only reset; never in a batch.
DEAD = ("collector", "_dead")


class ColumnKeys:
    """The keys of a collected batch, read from the env's wrappers; ensures that each has a single writer.

    Raises:
        ValueError: two parts write one column; the text names both.
    """

    def __init__(
        self,
        env: VectorEnv[Any, Any, Any],
        info_keys: Sequence[NestedKey],  # the entries of info to store
        deltas: Sequence[NestedKey] = (),  # the observations whose next one is stored as a difference
        delta_dtype: torch.dtype = torch.float16,  # of the differences
    ) -> None:
        if isinstance(info_keys, str):
            raise TypeError(
                f"info_keys must be a list of names, got the string {info_keys!r}: write [{info_keys!r}]"
            )
        markers = [layer for layer in layers(env) if isinstance(layer, MarkerWrapper) and layer.is_column]
        # The key, and the path in the tree, of every observation entry and of every part of the action.
        self.obs, self.obs_paths = zip(*observation_leaves(env.single_observation_space), strict=True)
        self.actions, self.action_paths = zip(*space_leaves(env.single_action_space, (ACTION,)), strict=True)
        # The key, and the name in info, of the markers that describe the observation a row starts from ...
        self.roots: list[NestedKey] = [m.key for m in markers if not m.describes_step]
        self.root_names = [m.info_name for m in markers if not m.describes_step]
        # ... and of those that describe the step.
        self.nexts: list[NestedKey] = [next_key(m.key) for m in markers if m.describes_step]
        self.next_names = [m.info_name for m in markers if m.describes_step]
        # Step counters: ("next", key) is one more.
        self.counts = [m.key for m in markers if isinstance(m, StepCounter)]
        self.traj: NestedKey = next((m.key for m in markers if isinstance(m, TrajId)), TRAJ_IDS)
        self.init: NestedKey = next((m.key for m in markers if isinstance(m, InitTracker)), IS_INIT)
        self.has_ids = any(isinstance(m, TrajId) for m in markers)
        self.returns = next((next_key(m.key) for m in markers if isinstance(m, RewardSum)), None)
        # Columns that are float32 whatever a wrapper makes of them.
        self.float32: set[NestedKey] = {REWARD} if self.returns is None else {REWARD, self.returns}
        self.deltas, self.delta_dtype = deltas, delta_dtype
        self.infos = tuple(info_keys)
        self.states: list[NestedKey] = []  # the recurrent states of the policy, once there is one
        self.strided = False  # whether only some rows keep them: ("collector", "has_state") says which
        # Columns that stand as [N, 1] if they are one number for each row.
        self.trailing: set[NestedKey] = {REWARD, TERMINATED, TRUNCATED, *self.nexts, *self.roots} - {
            self.traj
        }
        self.next_of = {key: next_key(key) for key in (*self.obs, *self.roots)}
        self._writers: dict[tuple[str, ...], str] = {}
        self.claim("the collector", REWARD, TERMINATED, TRUNCATED, DONE, NEXT_KNOWN, DEAD)
        self.claim("the policy's action", ACTION)
        self.claim("the observation", *self.obs, *(self.next_of[key] for key in self.obs))
        for marker in markers:
            key = next_key(marker.key) if marker.describes_step else marker.key
            counted = (next_key(key),) if isinstance(marker, StepCounter) else ()
            self.claim(type(marker).__name__, key, *counted)
        if deltas:
            self.claim("NextObservationDelta", DELTA)
        for name in self.infos:
            self.claim("info_keys", name, next_key(name))

    def claim(self, writer: str, *keys: NestedKey) -> None:
        """Register ``writer`` as the writer of ``keys``; ValueError if one has a writer already."""
        for key in map(as_tuple, keys):
            for other, owner in self._writers.items():
                if key[: len(other)] == other[: len(key)]:  # the same, or one inside the other
                    raise ValueError(
                        f"two parts write one column: {owner} writes {plain_key(other)!r}, {writer} writes "
                        f"{plain_key(key)!r}. Rename one: the marker wrappers take a key argument, policies "
                        "out_keys, observations gymnasium.wrappers.TransformObservation"
                    )
        self._writers.update((as_tuple(key), writer) for key in keys)
