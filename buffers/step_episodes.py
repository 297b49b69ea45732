"""Follows the episodes of a step writer's envs: where they begin, their ids, and whether rows go on from rows."""

import warnings
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np

from flatroll.buffers.index.ring import Array
from flatroll.buffers.step_rows import StagedColumn
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    OBSERVATION,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)

Arrays: TypeAlias = dict[NestedKey, Array]
Staged: TypeAlias = Mapping[NestedKey, StagedColumn]


class Episodes:
    """The episodes that E envs are in.

    Args:
        num_envs: E.
        writer: number of the writer; episode k of env e has the id ``writer * 2**40 + k * E + e``, as in `TrajId`.
        first: number of the first episode.

    Attributes:
        fresh: bool ``[E]``, whether an env's next row begins an episode.
        ids: int64 ``[E]``, ids of the episodes that the last rows are of.
    """

    def __init__(self, num_envs: int, writer: int, first: int = 0) -> None:
        self.num_envs = num_envs
        self.fresh: Array = np.ones(num_envs, np.bool_)
        # Adding E gives an env its next episode; the first row of each adds it, that of the very first one too.
        self.ids: Array = np.arange(num_envs) + (writer << 40) + (first - 1) * num_envs
        self._pairs: list[tuple[NestedKey, NestedKey]] = []
        self._trusted: set[NestedKey] = set()
        self._warned: set[str] = set()

    def compare(self, keys: Iterable[NestedKey]) -> None:
        """Compare the values of ``keys`` with the next values of the row before; all but observations must have
        been right once before they count."""
        self._pairs = [(key, next_key(key)) for key in keys]
        self._trusted = {key for key, _ in self._pairs if as_tuple(key)[0] == OBSERVATION}

    def mark(self, arrays: Arrays, staged: Staged, last: int) -> None:
        """Add the markers that a step lacks to its ``arrays``, and move on.

        Args:
            arrays: the step's entries ``[E, ...]``.
            staged: the waiting rows.
            last: where among them the row before is, -1 for nowhere.
        """
        fresh = self._starts(arrays, staged, last)
        done = arrays.get(DONE)
        if TERMINATED in arrays or TRUNCATED in arrays:
            # Of an end for which there are two words, one of them missing, ``done`` may tell.
            ends: Array = np.zeros(self.num_envs, np.bool_) if done is None else done
            terminated, truncated = arrays.get(TERMINATED), arrays.get(TRUNCATED)
            terminated = ends & ~arrays[TRUNCATED] if terminated is None else terminated
            truncated = ends & ~terminated if truncated is None else truncated
            either = terminated | truncated
            if done is not None and not np.array_equal(done, either):
                raise ValueError(
                    f"the step's {DONE!r} is {done.tolist()}, but terminated or truncated is {either.tolist()}: leave "
                    "it out, and it is filled in"
                )
            arrays[TERMINATED], arrays[TRUNCATED], arrays[DONE] = terminated, truncated, either
        self.fresh = np.array(arrays[DONE])
        if fresh.any():
            self.ids = self.ids + fresh * self.num_envs
        arrays[IS_INIT] = fresh  # those that the step says among them
        arrays.setdefault(TRAJ_IDS, self.ids)

    def _starts(self, arrays: Arrays, staged: Staged, last: int) -> Array:
        """Which envs' rows begin a trajectory, bool ``[E]``; compares them with what the rows before said."""
        fresh = self.fresh
        same: Array | None = None
        for key, later in list(self._pairs) if last >= 0 else []:
            agrees = staged[later].agrees(last, arrays[key])
            if key not in self._trusted:
                inside = ~fresh
                if not inside.any():
                    continue
                if not (agrees & inside).any():
                    self._pairs.remove((key, later))  # says something else than the next row's value
                    continue
                self._trusted.add(key)
            same = agrees if same is None else same & agrees
        if same is not None and (same == fresh).any():
            fresh = self._disagree(same, fresh, IS_INIT in arrays)
        if IS_INIT in arrays:
            fresh = fresh | arrays[IS_INIT]
        if TRAJ_IDS in arrays and last >= 0:
            fresh = fresh | (staged[TRAJ_IDS].rows[:, last] != arrays[TRAJ_IDS])
        return fresh

    def _disagree(self, same: Array, fresh: Array, told: bool) -> Array:
        """Warn where an episode goes on from its end, or is left before it; trajectories begin at the latter."""
        ended, left = same & fresh, ~same & ~fresh
        if ended.any():
            self._warn(
                "ended",
                f"env {int(ended.argmax())} goes on, after its episode ended, from the very observation that was the "
                "last one's next. Either that was the reset's observation, where the episode's final one belongs "
                "(final_obs), or this row is the reset itself (autoreset NEXT_STEP), which is no transition and should "
                "not be written. If all episodes of this env begin where they end, all is well",
            )
        if left.any() and not told:
            self._warn(
                "left",
                f"env {int(left.argmax())} does not go on from the next observation of its last row, which was neither "
                "terminated nor truncated: a new trajectory begins there. If the env was reset, say so with "
                f"{IS_INIT!r}; else see that observations are given as the env returned them",
            )
        return fresh | left

    def _warn(self, what: str, text: str) -> None:
        if what not in self._warned:
            self._warned.add(what)
            warnings.warn(f"{text}. (Said once for each writer)", stacklevel=6)
