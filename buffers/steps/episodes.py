"""Tracks the episodes of a step writer's envs: starts, ids, and whether consecutive rows belong together."""

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import TypeAlias

import numpy as np
import torch

from flatroll.buffers.columns.column import differ
from flatroll.buffers.index.ring import Array
from flatroll.buffers.steps.staging import FLAGS, StagedColumn
from flatroll.layout.inspect.repeats import firsts_are_rare
from flatroll.layout.keys import (
    DONE,
    ID_BITS,
    IS_INIT,
    OBSERVATION,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)

_REMEMBERED = 256  # rows whose observations show how often observations repeat
_COMPARED = 2**21  # bytes of observations compared at a time: few calls, small temporary arrays
# Bytes of a step, and of a row, up to which two copies are compared faster than the arrays in place.
_SMALL_STEP = 2**15
_SHORT_ROW = 512
Staged: TypeAlias = Mapping[NestedKey, StagedColumn]


class Episodes:
    """The current episodes of E envs.

    Args:
        num_envs: E.
        writer: number of the writer; episode k of env e has the id ``writer * 2**40 + k * E + e``, as in `TrajId`.
        first: number of the first episode.

    Attributes:
        fresh: bool ``[E]``, whether the next row of each env begins an episode.
        ids: int64 ``[E]``, episode ids of the last rows; both refer to the last marked row.
    """

    def __init__(self, num_envs: int, writer: int, first: int = 0) -> None:
        self.num_envs = num_envs
        self.fresh: Array = np.ones(num_envs, np.bool_)
        # Ids grow by E per episode. The first row of each episode adds E, even in the very first episode.
        self.ids: Array = np.arange(num_envs) + (writer << ID_BITS) + (first - 1) * num_envs

        self._warned: set[str] = set()
        # Ended rows that a next row followed, and those of them whose next observation was that row's.
        self._ends_seen = 0
        self._ends_alike = 0
        # Hashes of the first `_REMEMBERED` rows' observations, and whether each began an episode.
        self._hashes: list[tuple[int, bool]] = []
        self._hashed: tuple[NestedKey, ...] = ()
        self.begin((), ())

    def begin(self, given: Collection[NestedKey], keys: Iterable[NestedKey]) -> None:
        """Begin with rows that do not continue earlier rows and have the entries ``given``.

        The values of ``keys`` are compared with the next values of the previous row; all except observations must
        have matched once before they count.
        """
        self._given = frozenset(given)
        self._pairs = [(key, next_key(key)) for key in keys]
        self._trusted = {key for key, _ in self._pairs if as_tuple(key)[0] == OBSERVATION}
        # The compared values of the last row before the waiting ones.
        self._before: dict[NestedKey, Array] = {}

        self._ends = [key for key in (TERMINATED, TRUNCATED, DONE) if key in self._given]

    def check(self, given: Staged, row: int) -> bool:
        """Return whether to warn about an env's waiting row ``row``: it does not continue the previous one.

        Raises:
            ValueError: ``done`` contradicts terminated and truncated.
        """
        if DONE in self._given and len(self._ends) > 1:
            done, *kinds = (given[key].rows[:, row] for key in reversed(self._ends))
            # If only one of terminated and truncated is given, ``done`` determines the other.
            either = np.logical_or.reduce(kinds) | (done & (len(kinds) < 2))
            if (done != either).any():
                raise ValueError(
                    f"the step's {DONE!r} is {done.tolist()}, but terminated or truncated is {either.tolist()}: leave "
                    "it out, and it is filled in"
                )

        if IS_INIT in self._given or "left" in self._warned or not (row or self._before):
            return False

        if row:
            pairs = [(given[later].rows[:, row - 1], given[key].rows[:, row]) for key, later in self._pairs]
        else:
            pairs = [(self._before[later], given[key].rows[:, row]) for key, later in self._pairs]
        if all(_same_bits(said, now) for said, now in pairs):
            return False

        ended = self.fresh
        if row:
            ended = np.logical_or.reduce([given[key].rows[:, row - 1] for key in self._ends])
        return any(not _same_bits(said[~ended], now[~ended]) for said, now in pairs)

    def mark(self, staged: Staged, first: int, stop: int) -> None:
        """Fill in the missing markers of the waiting rows ``first ... stop - 1``; earlier rows already have them."""
        flags = {key: staged[key].rows[:, first:stop] for key in FLAGS if key in staged}
        done = flags[DONE]
        ids = staged[TRAJ_IDS].rows[:, first:stop]

        for missing, other in ((TERMINATED, TRUNCATED), (TRUNCATED, TERMINATED)):
            if missing in flags and missing not in self._given:
                # If terminated or truncated is missing, derive it from ``done``.
                if DONE in self._given:
                    flags[missing][:] = done & ~flags[other]
                else:
                    flags[missing][:] = False
        if TERMINATED in flags:
            np.logical_or(flags[TERMINATED], flags[TRUNCATED], out=done)

        fresh = np.concatenate([self.fresh[:, None], done[:, :-1]], 1)
        starts = self._starts(staged, fresh, first, stop)
        if IS_INIT in self._given:
            starts |= flags[IS_INIT]
        flags[IS_INIT][:] = starts  # including those that the steps set

        own = self.ids[:, None] + starts.cumsum(1) * self.num_envs
        if TRAJ_IDS not in self._given:
            ids[:] = own
        # Together: an interrupt must not come between.
        self.fresh, self.ids = done[:, -1].copy(), own[:, -1]

    def keep(self, staged: Staged, last: int) -> None:
        """Save the waiting rows ``last`` before the arrays are overwritten."""
        keys = [TRAJ_IDS, *(later for _, later in self._pairs)]
        self._before = {key: staged[key].rows[:, last].copy() for key in keys}

    def _starts(self, staged: Staged, fresh: Array, first: int, stop: int) -> Array:
        """Return which waiting rows begin a trajectory, bool ``[E, n]``, by comparing them with the previous rows."""
        starts = fresh.copy()
        begin = 0 if first or self._before else 1  # the very first row continues no other
        every_fresh = fresh
        fresh = fresh[:, begin:]
        inside = ~fresh

        same = None
        for key, later in list(self._pairs):
            agrees = ~self._differ(staged, key, later, first, stop)
            if key not in self._trusted:
                if not inside.any():
                    continue
                at = int(inside.any(0).argmax())  # the first step with a row that does not begin an episode
                if not (agrees & inside)[:, at].any():
                    self._pairs.remove((key, later))  # its next values are not the values of the next rows
                    continue
                self._trusted.add(key)
                agrees[:, :at] = False  # in earlier steps every row begins an episode
            same = agrees if same is None else same & agrees

        if same is not None:
            alike = same & fresh
            self._ends_seen += int(np.count_nonzero(fresh))
            self._ends_alike += int(np.count_nonzero(alike))

            if len(self._hashes) < _REMEMBERED:
                goes_on = np.zeros_like(every_fresh)
                goes_on[:, begin:] = same & inside
                self._remember(staged, every_fresh, goes_on, first)

            # Right rows of an env with few observations may look so, too.
            if alike.any() and "ended" not in self._warned and 2 * self._ends_alike >= self._ends_seen:
                begun = np.zeros_like(every_fresh)
                begun[:, begin:] = alike
                if self._firsts_are_rare(staged, begun, first):
                    self._warn_of_end(alike)

            self._warn_of_reset(~same & inside)
            starts[:, begin:] |= ~same

        if TRAJ_IDS in self._given:
            starts[:, begin:] |= self._differ(staged, TRAJ_IDS, TRAJ_IDS, first, stop)
        return starts

    def _differ(self, staged: Staged, key: NestedKey, later: NestedKey, first: int, stop: int) -> Array:
        """Compare ``key`` with the previous row's ``later``, bit for bit: bool ``[E, n]``, or ``[E, n - 1]`` for
        first rows."""
        now = staged[key].data
        said = staged[later].data
        begin = max(first, 1)
        wrong = [torch.zeros(self.num_envs, 0, dtype=torch.bool)]

        if not first and self._before:
            before = torch.from_numpy(self._before[later]).view_as(now[:, 0])
            wrong.append(differ(before, now[:, 0])[:, None])

        many = max(1, _COMPARED // (now[:, 0].numel() * now.element_size() + 1))
        for t in range(begin, stop, many):
            u = min(t + many, stop)
            wrong.append(differ(said[:, t - 1 : u - 1], now[:, t:u], 2))

        return np.asarray(torch.cat(wrong, 1))

    def _remember(self, staged: Staged, fresh: Array, goes_on: Array, first: int) -> None:
        """Note the observations of the waiting rows that begin or continue an episode, bool ``[E, n]`` each."""
        keys = tuple(key for key, _ in self._pairs if key in self._trusted)
        if keys != self._hashed:
            self._hashed = keys
            self._hashes.clear()

        room = _REMEMBERED - len(self._hashes)
        env, step = (fresh | goes_on).nonzero()
        flags = fresh[env[:room], step[:room]].tolist()
        self._hashes += zip(self._hash(staged, env[:room], first + step[:room]), flags, strict=True)

    def _hash(self, staged: Staged, env: Array, at: Array) -> list[int]:
        """Return a hash of each waiting row's observation, bit for bit."""
        rows = [staged[key].rows for key in self._hashed]
        return [
            hash(b"".join(column[e, t].tobytes() for column in rows)) for e, t in zip(env, at, strict=True)
        ]

    def _firsts_are_rare(self, staged: Staged, begun: Array, first: int) -> bool:
        """Return whether first observations, those of these rows ``[E, n]`` included, are rare inside of episodes."""
        env, step = begun.nonzero()
        known = [*self._hashes, *((code, True) for code in self._hash(staged, env, first + step))]
        codes, begins = (torch.tensor(column) for column in zip(*known, strict=True))
        return firsts_are_rare(codes, begins, ~begins)

    def _warn_of_end(self, ended: Array) -> None:
        """Warn where an episode continues after its end, bool ``[E, n]``."""
        self._warn(
            "ended",
            f"env {ended.T.nonzero()[1][0]} continues after its episode ended, from the observation that "
            f"was given as the episode's last one ({self._ends_alike} of {self._ends_seen} ended episodes so far). "
            "Either that was the reset's observation, in place of the episode's final one (final_obs), or this row is "
            "the reset itself (autoreset NEXT_STEP), which is not a transition and must not be written. If all "
            "episodes of this env begin where they end, ignore this",
        )

    def _warn_of_reset(self, left: Array) -> None:
        """Warn where an episode is abandoned before its end, bool ``[E, n]``."""
        if left.any() and IS_INIT not in self._given:
            self._warn(
                "left",
                f"env {left.T.nonzero()[1][0]} does not continue from the next observation of its last row, which was "
                "neither terminated nor truncated: a new trajectory begins there. If the env was reset, pass "
                f"{IS_INIT!r}; otherwise pass observations as the env returned them",
            )

    def _warn(self, what: str, text: str) -> None:
        if what in self._warned:
            return
        self._warned.add(what)
        # The caller of write; (_store), _mark, mark, _starts and _warn_of_end or _warn_of_reset are in between.
        level = 8 if what == "ended" else 7
        warnings.warn(f"{text}. (Shown once per writer)", stacklevel=level)


def _same_bits(left: Array, right: Array) -> bool:
    """Return whether two arrays of one shape and dtype ``[E, ...]`` hold the same bits."""
    if left.nbytes <= _SMALL_STEP or left[0].nbytes <= _SHORT_ROW:
        return left.tobytes() == right.tobytes()

    rows = left.reshape(len(left), -1)
    others = right.reshape(len(right), -1)
    word = "i8" if rows[0].nbytes % 8 == 0 else "u1"
    return bool((rows.view(word) == others.view(word)).all())
