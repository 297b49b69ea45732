"""The rules of `audit`: each checks a whole batch at once and returns the rows that break it.

``x[:-1]`` and ``x[1:]`` side by side are each row and the row after it; where a flag of that form names the later row,
``shift=1`` turns it into row numbers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, cast

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.boundaries import ends_from, starts_from
from flatroll.layout.inspect.repeats import firsts_are_rare, number_kinds
from flatroll.layout.keys import (
    ACTION,
    DELTA,
    DONE,
    IS_INIT,
    MASK,
    NEXT_KNOWN,
    POLICY_VERSION,
    REWARD,
    STEP_COUNT,
    STEPS_TO_NEXT_OBS,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    next_key,
)

Severity = Literal["error", "suspicious"]
WHOLE_BATCH = -1

#: The contract of each marker: its dims after the batch's, and its dtype.
CONTRACT: dict[NestedKey, tuple[tuple[int, ...], torch.dtype]] = {
    IS_INIT: ((1,), torch.bool),
    STEP_COUNT: ((1,), torch.int64),
    next_key(STEP_COUNT): ((1,), torch.int64),
    REWARD: ((1,), torch.float32),
    TERMINATED: ((1,), torch.bool),
    TRUNCATED: ((1,), torch.bool),
    DONE: ((1,), torch.bool),
    TRAJ_IDS: ((), torch.int64),
    MASK: ((), torch.bool),
    NEXT_KNOWN: ((), torch.bool),
    POLICY_VERSION: ((), torch.int64),
}


@dataclass(frozen=True)
class Breach:
    """A broken rule: the batch rows that break it, ascending, and an explanation."""

    rule: str
    rows: Sequence[int]
    text: str
    severity: Severity = "error"


class UnpaddedRows:
    """The N rows of a batch without padding, and their markers.

    Attributes:
        numbers: int64 ``[N]``, their row numbers in the batch.
        batch: tensordict ``[N]`` of these rows.
        keys: root keys of the observations.
        is_init, done, terminated, truncated: bool ``[N]``; None where missing or unusable.
        said_done: ``done`` as the batch has it; of n-step rows the three above are those of the row's own step.
        ids, step: integer ``[N]``, trajectory ids and step counts; None likewise.
        has_marker: whether a boundary marker is usable; without one there are no runs.
        steps: integer ``[N]``, the steps from each row to its ``"next"`` entries; None if it is one step everywhere.
        ends: bool ``[N]``, the last rows of runs.
        in_slices: whether the batch looks like sampled slices.
    """

    def __init__(self, batch: TensorDictBase, keys: Sequence[NestedKey], device: torch.device | None) -> None:
        self.numbers = torch.arange(batch.shape[0], device=device)
        mask = usable(batch, MASK)
        if mask is not None:
            self.numbers = mask.nonzero().squeeze(-1)
            batch = cast(TensorDictBase, batch[self.numbers])

        self.batch: TensorDictBase = batch
        self.keys = keys

        self.is_init = usable(batch, IS_INIT)
        self.done = usable(batch, DONE)
        self.terminated = usable(batch, TERMINATED)
        self.truncated = usable(batch, TRUNCATED)
        self.ids = usable(batch, TRAJ_IDS)
        self.step = usable(batch, STEP_COUNT)

        self.said_done = self.done

        self.steps = _n_steps(batch)
        if self.steps is not None:
            # The flags of n-step rows are those of a later row, except where it is the row itself.
            own = self.steps == 1
            if self.done is not None:
                self.done = self.done & own
            if self.terminated is not None:
                self.terminated = self.terminated & own
            if self.truncated is not None:
                self.truncated = self.truncated & own

        self.has_marker = any(column is not None for column in (self.is_init, self.done, self.ids))
        if self.has_marker:
            self.ends = ends_from(self.done, self.is_init, self.ids)
        else:
            self.ends = torch.ones_like(self.numbers, dtype=torch.bool)
        # Only a slice sampler marks every run's first row; a collector's windows begin anywhere.
        starts = starts_from(self.ends)
        self.in_slices = self.is_init is not None and bool((self.is_init | ~starts).all())

    def breach(
        self, rule: str, flags: Tensor, text: str, *, shift: int = 0, severity: Severity = "error"
    ) -> Breach:
        """Return the breach of a rule at the rows where bool ``flags`` is True (``shift=1``: at the next rows)."""
        return Breach(rule, self.numbers[flags.nonzero().squeeze(-1) + shift].tolist(), text, severity)

    def pairs(self) -> list[tuple[NestedKey, Tensor, Tensor]]:
        """Keys of observations that exist at the root and under "next" with the same shape and dtype.

        None in n-step rows, whose next observations are not those of the rows after.
        """
        pairs: list[tuple[NestedKey, Tensor, Tensor]] = []
        if self.steps is not None:
            return pairs
        for key in self.keys:
            now = self.batch.get(key, None)
            later = self.batch.get(next_key(key), None)
            if now is None or later is None:
                continue
            if now.shape == later.shape and now.dtype == later.dtype:
                pairs.append((key, now, later))
        return pairs


def _n_steps(batch: TensorDictBase) -> Tensor | None:
    """Return the ``steps_to_next_obs`` of n-step rows as ``[N]``; None if the batch has none."""
    steps = batch.get(STEPS_TO_NEXT_OBS, None)
    if not isinstance(steps, Tensor) or steps.numel() != batch.shape[0]:
        return None
    return steps.reshape(-1)


def same(x: Tensor, y: Tensor) -> Tensor:
    """Return where two columns are equal (NaN equals NaN): bool ``[N]``."""
    equal = x == y
    if x.is_floating_point():
        equal = equal | (x.isnan() & y.isnan())
    if equal.dim() > 1:
        return equal.flatten(1).all(1)
    return equal


def usable(batch: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Return the marker ``key`` as ``[N]``; None if it is missing or has a wrong shape or dtype."""
    column = batch.get(key, None)
    if not isinstance(column, Tensor) or column.shape not in (batch.batch_size, (*batch.batch_size, 1)):
        return None

    wants_bool = CONTRACT[key][1] is torch.bool
    is_bool = column.dtype is torch.bool
    is_real = not (column.is_floating_point() or column.is_complex())
    if wants_bool != is_bool or not is_real:
        return None

    flat: Tensor = column.reshape(batch.batch_size)
    return flat


def whole(rule: str, text: str, severity: Severity = "error") -> Breach:
    """Create a `Breach` that concerns the whole batch instead of rows."""
    return Breach(rule, [WHOLE_BATCH], text, severity)


def shapes_and_dtypes(batch: TensorDictBase, keys: Sequence[NestedKey]) -> Iterator[Breach]:
    """Rules ``shape`` and ``dtype``: markers have the documented ones, next observations those of the root entries."""
    n = batch.shape[0]
    wanted = {key: ((n, *tail), dtype) for key, (tail, dtype) in CONTRACT.items()}
    for key in keys:
        root = batch.get(key, None)
        if root is not None:
            wanted[next_key(key)] = (tuple(root.shape), root.dtype)

    for key, (shape, dtype) in wanted.items():
        column = batch.get(key, None)
        if column is None:
            continue
        if tuple(column.shape) != shape:
            yield whole("shape", f"{key!r} has shape {tuple(column.shape)}, expected {shape}")
        # Collectors write float32; rewards from a data set's files keep their dtype.
        if column.dtype != dtype and not (key == REWARD and column.is_floating_point()):
            yield whole("dtype", f"{key!r} is {column.dtype}, expected {dtype}")


def padding(batch: TensorDictBase) -> Iterator[Breach]:
    """Rule ``padding``: padded rows come after a real row, and are not ``is_init``."""
    mask = usable(batch, MASK)
    is_init = usable(batch, IS_INIT)
    if mask is None:
        return

    if len(mask) and not bool(mask[0]):
        yield Breach("padding", [0], "padding stands before the first real row")
    if is_init is not None:
        marked = (is_init & ~mask).nonzero().squeeze(-1).tolist()
        yield Breach("padding", marked, "a padded row is marked is_init")


def done_flags(rows: UnpaddedRows) -> Iterator[Breach]:
    """``done``, ``done_without_reason``: done is terminated or truncated."""
    if rows.done is None:
        return
    for name, flag in (("terminated", rows.terminated), ("truncated", rows.truncated)):
        if flag is not None:
            yield rows.breach("done", flag & ~rows.done, f"{name} is True but done is False")
    if rows.terminated is not None and rows.truncated is not None:
        text = "done is True but neither terminated nor truncated is"
        yield rows.breach("done_without_reason", rows.done & ~rows.terminated & ~rows.truncated, text)


def step_counts(rows: UnpaddedRows) -> Iterator[Breach]:
    """Rules ``step_count``, ``next_step_count``: counts are not negative and rise by one along a run."""
    if rows.step is None:
        return

    # rows i that do not end their run, and whose step is not one below that of row i + 1
    jumps = ~rows.ends[:-1] & (rows.step[1:] != rows.step[:-1] + 1)
    yield rows.breach("step_count", jumps, "step_count is not one more than in the row before", shift=1)
    yield rows.breach("step_count", rows.step < 0, "step_count is negative")

    next_step = usable(rows.batch, next_key(STEP_COUNT))
    if next_step is not None:
        more: int | Tensor = 1
        said = "1"
        if rows.steps is not None:
            more = rows.steps
            said = STEPS_TO_NEXT_OBS
        text = f"('next', 'step_count') is not step_count + {said}"
        yield rows.breach("next_step_count", next_step != rows.step + more, text)


def first_rows(rows: UnpaddedRows) -> Iterator[Breach]:
    """Rule ``is_init``: set in every row of step 0 and, except in slices, in no other row.

    A run of a sampled slice may begin in mid-episode. A batch is taken for slices if each of its runs
    starts with ``is_init``, which a collector's windows do not do.
    """
    if rows.is_init is None or rows.step is None:
        return

    yield rows.breach("is_init", (rows.step == 0) & ~rows.is_init, "step_count is 0 but is_init is False")
    if not rows.in_slices:
        text = "is_init is True in mid-episode, and the batch is no batch of slices"
        yield rows.breach("is_init", (rows.step > 0) & rows.is_init, text)


def after_done(rows: UnpaddedRows) -> Iterator[Breach]:
    """Rule ``after_done``: the row after a done row starts a new episode.

    If the next row has another id or step, it may be the middle of another env's window, which needs no ``is_init``.
    Without ids and steps this is undecidable, hence only ``suspicious``.
    """
    if rows.is_init is None or rows.done is None:
        return

    # row i is done and row i + 1 is not a first row
    candidate = rows.done[:-1] & ~rows.is_init[1:]
    severity: Severity = "error"
    if rows.ids is not None:
        candidate &= rows.ids[1:] == rows.ids[:-1]
    elif rows.step is not None:
        candidate &= rows.step[1:] == rows.step[:-1] + 1
    else:
        severity = "suspicious"
    yield rows.breach(
        "after_done", candidate, "the row before is done, but is_init is False", shift=1, severity=severity
    )


def silent_resets(rows: UnpaddedRows) -> Iterator[Breach]:
    """Rule ``silent_reset``: no trajectory restarts unless the row before is done.

    Slices sampled without truncation marks look the same, so in a batch of slices it is only ``suspicious``, and a
    start at a step other than 0, which a reset cannot produce, is not reported.
    """
    if rows.is_init is None or rows.said_done is None or rows.ids is None:
        return

    # row i + 1 is a first row of the trajectory of row i, which is not done
    again = rows.is_init[1:] & ~rows.said_done[:-1] & (rows.ids[1:] == rows.ids[:-1])
    if rows.step is not None:
        again &= (rows.step[1:] == 0) | ((rows.step[1:] == rows.step[:-1] + 1) & rows.in_slices)

    text = "is_init in the trajectory of the row before, which is not done: a reset that nothing announced"
    severity: Severity = "error"
    if rows.in_slices:
        text += " (or two slices sampled with truncated_key=None)"
        severity = "suspicious"
    yield rows.breach("silent_reset", again, text, shift=1, severity=severity)


def trajectory_ids(rows: UnpaddedRows) -> Iterator[Breach]:
    """Rule ``traj_id``: each id belongs to one trajectory, and each trajectory has one id.

    Slices repeat rows, so the same (id, step) may come back, but only as the same transition, and a
    terminated trajectory has no later step.
    """
    if rows.ids is None:
        return

    yield rows.breach("traj_id", rows.ids < 0, "the trajectory id is negative: no env wrote this row")
    if rows.step is None:
        return

    # rows sorted by id, then by step, then by place: twins are adjacent
    order = rows.step.argsort(stable=True)
    order = order[rows.ids[order].argsort(stable=True)]
    before = order[:-1]
    after = order[1:]

    # the same step of the same id, and whether it is another transition
    one_id = rows.ids[before] == rows.ids[after]
    twin = one_id & (rows.step[before] == rows.step[after])
    differs = torch.zeros_like(twin)
    for key in {ACTION, *rows.keys}:
        column = rows.batch.get(key, None)
        if isinstance(column, Tensor):
            differs |= ~same(column[before], column[after])

    text = (
        "an earlier row has this id and step_count and is another transition: the id names two trajectories"
    )
    # ``after`` holds row numbers in sorted order, so index_fill marks the rows in their original order
    other = torch.zeros_like(rows.ends).index_fill(0, after[twin & differs], True)
    yield rows.breach("traj_id", other, text)

    if rows.terminated is not None:
        # a later step of an id whose earlier step terminated
        late = one_id & (rows.step[before] < rows.step[after]) & rows.terminated[before]
        over = torch.zeros_like(rows.ends).index_fill(0, after[late], True)
        yield rows.breach("traj_id", over, "this trajectory terminated at an earlier step")

    yield rows.breach("traj_id", _id_changes(rows), "the id changes, but the trajectory continues", shift=1)


def _id_changes(rows: UnpaddedRows) -> Tensor:
    """Rows whose successor continues them in step and observation under another id."""
    pairs = rows.pairs()
    changed = torch.zeros_like(rows.ends[:-1])
    if rows.ids is None or rows.step is None or not pairs:
        return changed

    # another id, but the next step count and the expected observation
    goes_on = (rows.ids[1:] != rows.ids[:-1]) & (rows.step[1:] == rows.step[:-1] + 1)
    if rows.done is not None:
        goes_on &= ~rows.done[:-1]
    if rows.is_init is not None:
        goes_on &= ~rows.is_init[1:]

    for _, now, later in pairs:
        goes_on &= same(later[:-1], now[1:])
        changed |= ~same(now[1:], now[:-1])  # a constant observation shows nothing
    return goes_on & changed


def next_observations(rows: UnpaddedRows) -> Iterator[Breach]:
    """Rule ``next_observation``: inside a run it equals the observation of the next row."""
    for key, now, later in rows.pairs():
        # within a run, the next observation of row i differs from the observation of row i + 1
        differs = ~rows.ends[:-1] & ~same(later[:-1], now[1:])
        text = f"{next_key(key)!r} is not {key!r} of the row after, though the run continues"
        yield rows.breach("next_observation", differs, text)


def not_numbers(rows: UnpaddedRows) -> Iterator[Breach]:
    """``nan``, ``delta``: no NaN in observations and rewards, no overflow in deltas."""
    for key in (*rows.keys, REWARD):
        column = rows.batch.get(key, None)
        if column is not None and column.is_floating_point():
            holds_nan = column.isnan().reshape(len(rows.numbers), -1).any(1)
            yield rows.breach("nan", holds_nan, f"{key!r} holds NaN")

    deltas = rows.batch.get(DELTA, None)
    if deltas is None:
        return
    for key in deltas.keys(True, True):
        delta = deltas.get(key)
        name = (*DELTA, *as_tuple(key))
        if delta.is_floating_point():
            overflows = ~delta.isfinite().reshape(len(rows.numbers), -1).all(1)
            text = f"{name!r} is not finite: the difference does not fit {delta.dtype}"
            yield rows.breach("delta", overflows, text)


def reset_as_next(rows: UnpaddedRows) -> Iterator[Breach]:
    """Rule ``reset_as_next`` (suspicious): an episode's last next observation is the next episode's first.

    It happens by chance where an env has few observations. So at least half of the ended rows must look so, and first
    observations must be rare.
    """
    pairs = rows.pairs()
    if rows.done is None or not pairs or (rows.step is None and rows.ids is None):
        return

    # row i is done, and row i + 1 begins an episode
    ended = rows.done[:-1].clone()
    if rows.is_init is not None:
        ended &= rows.is_init[1:]

    # A slice may be followed by the slice that continues it: its first observation is then correctly the next one.
    if rows.step is not None:
        ended &= rows.step[1:] == 0
    else:
        ended &= rows.ids[1:] != rows.ids[:-1]  # type: ignore[index]

    # ... with the next observation of row i, which is another than that of row i
    fresh = ended.clone()
    moves = torch.zeros_like(fresh)
    for _, now, later in pairs:
        fresh &= same(later[:-1], now[1:])
        moves |= ~same(now[1:], now[:-1])
    fresh &= moves
    if not bool(fresh.any()) or 2 * int(fresh.sum()) < int(ended.sum()):
        return

    first = torch.zeros_like(rows.done)
    first[1:] = ended
    if rows.is_init is not None:
        first |= rows.is_init
    if firsts_are_rare(number_kinds([now for _, now, _ in pairs]), first, ~first):
        text = "the next observation of this ended row is the first one of the next episode: a reset observation?"
        yield rows.breach("reset_as_next", fresh, text, severity="suspicious")


def jumps_to_reset(rows: UnpaddedRows) -> Iterator[Breach]:
    """Rule ``obs_jump`` (suspicious): an observation jumps to exactly a first observation inside a run.

    Decidable only where resets repeat bit for bit. The leap must be over twice the median move, so that walking or
    standing at the start is no finding. At least half of the rows that come back to a first observation must leap, and
    first observations must be rare otherwise.
    """
    if rows.is_init is None or bool(rows.is_init.all()):
        return
    for key in rows.keys:
        column = rows.batch.get(key, None)
        if column is None or not column.is_floating_point() or len(rows.numbers) < 2 or not column.numel():
            continue

        flat = column.reshape(len(rows.numbers), -1)
        # distance between the observations of adjacent rows
        move = (flat[1:] - flat[:-1]).abs().sum(1)
        inner = ~rows.ends[:-1]
        moving = inner & (move > 0)
        if not bool(moving.any()):
            continue

        kinds = number_kinds([column])
        start_like = inner & torch.isin(kinds[1:], kinds[rows.is_init])
        # large moves within a run to an observation that some first row has
        leaps = start_like & (move > 2 * move[moving].median())
        if not bool(leaps.any()) or 2 * int(leaps.sum()) < int(start_like.sum()):
            continue

        others = ~rows.is_init
        others[1:] &= ~leaps
        if firsts_are_rare(kinds, rows.is_init, others):
            text = f"{key!r} jumps to the first observation of an episode, but nothing says that the env was reset"
            yield rows.breach("obs_jump", leaps, text, shift=1, severity="suspicious")


def one_length(rows: UnpaddedRows) -> Iterator[Breach]:
    """Rule ``same_length`` (suspicious): five or more episodes, all terminated, have the same length > 1."""
    if rows.step is None or rows.terminated is None:
        return
    if rows.truncated is not None and bool(rows.truncated.any()):
        return

    # terminated rows' steps are the lengths of their episodes
    lengths = rows.step[rows.terminated] + 1
    episodes = len(lengths)
    if rows.ids is not None:
        episodes = len(torch.unique(rows.ids[rows.terminated]))

    if episodes >= 5 and bool((lengths == lengths[0]).all()) and int(lengths[0]) > 1:
        text = (
            f"all {episodes} ended episodes terminate after {int(lengths[0])} steps: is a time limit "
            "reported as termination? Then values at their ends are not bootstrapped and should be"
        )
        yield whole("same_length", text, "suspicious")


RULES: tuple[Callable[[UnpaddedRows], Iterator[Breach]], ...] = (
    done_flags,
    step_counts,
    first_rows,
    after_done,
    silent_resets,
    trajectory_ids,
    next_observations,
    not_numbers,
    reset_as_next,
    jumps_to_reset,
    one_length,
)
