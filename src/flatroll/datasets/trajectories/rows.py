"""Converts trajectories ``[T, B]`` and flat batches to rows with trajectory marks, and back."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.column import RowForm
from flatroll.layout import run_starts
from flatroll.layout.checks import check_iterable
from flatroll.layout.keys import NEXT, NestedKey, as_tuple

_MARKS = "_trajectory"  # the root of the marks
LANE: NestedKey = (_MARKS, "lane")  # int64: the number of the trajectory times _LANES, plus that of the lane
PLACE: NestedKey = (_MARKS, "place")  # int32: the row's place in its trajectory, from 0
LEFT: NestedKey = (_MARKS, "left")  # int32: how many rows of the trajectory come after it
DONE: NestedKey = (_MARKS, "done")  # bool: whether an episode ends with it
_LANES = 2**20
MOST_NUMBERS = 2**43  # trajectory numbers are below this, so that lane fits into int64
_MOST_ROWS = 2**31  # rows of a trajectory are below this, so that place fits into int32
#: Fields that may also have a value before the first step: ``T + 1`` per rollout of T steps.
_ENDS = ("dones", "terminations", "truncations")
#: Fields that may also have a value after the last step, of the observation to bootstrap from.
_VALUES = ("prev_values",)
_FACTS = ("max_episode_length", "model_weights_id")


class TrajectoryRecord(NamedTuple):
    """The buffer's record of a trajectory besides its rows.

    Args:
        number: of the trajectory.
        steps: T.
        lanes: B; the rows are those of lane 0, then of lane 1, and so on.
        max_episode_length: as it was given; 0 if it was not.
        model_weights_id: as it was given.
        uuid: that no other trajectory has, in hexadecimal digits; empty until the buffer gives it one.
    """

    number: int
    steps: int
    lanes: int
    max_episode_length: int = 0
    model_weights_id: str = ""
    uuid: str = ""

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.steps * self.lanes

    def index_entry(self) -> dict[str, Any]:
        """Return the trajectory's entry of RLinf's index."""
        return {
            "uuid": self.uuid,
            "trajectory_id": self.number,
            "num_samples": self.rows,
            "shape": (self.steps, self.lanes),
            "max_episode_length": self.max_episode_length,
            "model_weights_id": self.model_weights_id,
        }


def from_trajectories(
    trajectories: Sequence[Any], number: int
) -> tuple[TensorDict | None, list[TrajectoryRecord]]:
    """Lay trajectories out as rows, one lane after the other.

    Args:
        trajectories: each an object or mapping with fields ``[T, B, ...]`` (nested mappings of them, too), a tensordict
            ``[T, B]``, or a flat batch ``[N]``, each of whose runs is a trajectory of one lane.
        number: of the first one.

    Returns:
        the rows, with marks, and a record per trajectory; None and none for no rows.

    Raises:
        TypeError: a field is neither a tensor nor a mapping of them, or ``trajectories`` is not a list.
        ValueError: a field is not ``[T, B, ...]``, or trajectories differ in their entries.
    """
    if isinstance(trajectories, Mapping | TensorDictBase) or hasattr(trajectories, "__dataclass_fields__"):
        raise TypeError(
            f"trajectories must be a list of trajectories, got one {type(trajectories).__name__}: call "
            "add_trajectories([trajectory])"
        )
    check_iterable("trajectories", trajectories, "a list of trajectories")
    parts: list[TensorDict] = []
    records: list[TrajectoryRecord] = []

    for trajectory in trajectories:
        if isinstance(trajectory, TensorDictBase) and trajectory.batch_dims == 1:
            rows, made = _flat_rows(trajectory, number)
        else:
            rows, made = _lane_rows(trajectory, number)
        if made:
            parts.append(rows)
        records += made
        number += len(made)

    if not parts:
        return None, []

    for i, part in enumerate(parts):
        if names := find_differing(find_form(parts[0]), find_form(part)):
            raise ValueError(
                f"trajectory {i} differs from the first one in the entries {names}: all must have the same "
                "entries, dtypes and shapes. Nothing was stored"
            )

    joined: Any = TensorDict.cat(parts) if len(parts) > 1 else parts[0]
    return joined, records


def find_form(rows: TensorDictBase) -> RowForm:
    """Return dtype and shape of the entries of a row, by key."""
    return {key: (value.dtype, value.shape[1:]) for key, value in rows.items(True, True)}


def find_differing(one: RowForm, other: RowForm) -> str:
    """Name the entries in which two forms of rows differ; empty if they are the same."""
    keys = one.keys() | other.keys()
    return ", ".join(sorted(str(key) for key in keys if one.get(key) != other.get(key)))


def as_fields(rows: TensorDictBase) -> dict[str, Any]:
    """Return the fields of rows as nested dicts, without the marks."""
    fields: dict[str, Any] = rows.exclude(_MARKS).to_dict()
    return fields


def trajectory_fields(rows: TensorDictBase, record: TrajectoryRecord) -> dict[str, Any]:
    """Return the fields ``[T, B, ...]`` of a whole trajectory, given its rows."""
    shaped = {
        key: value.view(record.lanes, record.steps, *value.shape[1:]).transpose(0, 1)
        for key, value in rows.exclude(_MARKS).items(True, True)
    }
    fields: dict[str, Any] = TensorDict(dict(shaped), [record.steps, record.lanes]).to_dict()
    return fields


def shift_numbers(rows: TensorDictBase, numbers: int) -> TensorDictBase:
    """Return the rows with their trajectory numbers increased by ``numbers``."""
    return rows.clone(recurse=False).set(LANE, rows.get(LANE) + numbers * _LANES)


def find_records(lane: Tensor, place: Tensor, left: Tensor) -> tuple[int, list[TrajectoryRecord]]:
    """Find the trajectories of stored rows by their marks.

    Returns:
        the position of the first row that begins a trajectory, and the records from there on; the last trajectory may
        be incomplete.

    Raises:
        ValueError: the marks are invalid.
    """
    numbers = lane // _LANES
    bounds = [*torch.nonzero(place == 0).squeeze(1).tolist(), len(lane)]
    records = []
    for first, stop in itertools.pairwise(bounds):
        count = stop - first
        lanes = int(lane[stop - 1] - lane[first]) + 1
        if int(left[stop - 1]) or lanes < 1 or count % lanes:
            lanes = 1  # its last rows are missing
        records.append(TrajectoryRecord(int(numbers[first]), count // lanes, lanes))
    check_numbers(records)

    return bounds[0], records


def check_numbers(records: Sequence[TrajectoryRecord]) -> None:
    """Raise ValueError unless the trajectories have distinct valid numbers, and each has rows but not too many."""
    numbers = {record.number for record in records}
    if len(numbers) < len(records) or not all(0 <= number < MOST_NUMBERS for number in numbers):
        raise ValueError(
            f"two trajectories have the same number, or a number is not in 0 ... {MOST_NUMBERS - 1}"
        )
    if not all(0 < record.rows < _MOST_ROWS and record.lanes > 0 for record in records):
        raise ValueError("a trajectory has no rows, or too many")


def check_marks(rows: TensorDictBase, records: Sequence[TrajectoryRecord], first: int) -> None:
    """Raise ValueError unless the marks of the rows match the recorded trajectories.

    Args:
        rows: with marks.
        records: records of the trajectories, in order.
        first: number of the trajectories' rows before these.
    """
    counts = torch.tensor([record.rows for record in records])
    at = torch.arange(first, first + len(rows))
    which = torch.searchsorted(counts.cumsum(0), at, right=True)
    place = at - (counts.cumsum(0) - counts)[which]
    number = torch.tensor([record.number for record in records])[which]

    lane = rows[LANE]
    # Within a trajectory each row is in the same lane as the row before it, or in the next lane.
    steps = torch.diff(lane)[place[1:] > 0]
    same = torch.equal(rows[PLACE].long(), place) and torch.equal(lane // _LANES, number)
    if not same or not bool(((steps == 0) | (steps == 1)).all()):
        raise ValueError("the rows do not match the recorded trajectories")


def _lane_rows(trajectory: Any, number: int) -> tuple[TensorDict, list[TrajectoryRecord]]:
    """Rows of one trajectory ``[T, B]``."""
    given = _mapping(trajectory)
    facts = {name: given.pop(name) for name in _FACTS if name in given}
    fields: dict[NestedKey, Tensor] = {}
    _collect(given, (), fields)

    if not fields:
        return TensorDict({}, [0]), []
    steps, lanes = _size(fields)
    if lanes > _LANES:
        raise ValueError(f"a trajectory has at most {_LANES:,} lanes, got {lanes:,}")

    rows: dict[NestedKey, Tensor] = {}
    for key, value in fields.items():
        name = as_tuple(key)[0]
        if name in _ENDS + _VALUES:
            value = _of_steps(value, steps, name)

        if value.shape[:2] != (steps, lanes):
            raise ValueError(
                f"{key!r} must be [T, B, ...] = [{steps}, {lanes}, ...] like the other fields, got "
                f"{list(value.shape)}. Nothing was stored"
            )
        rows[key] = value.detach().transpose(0, 1).flatten(0, 1)

    count = steps * lanes
    if not count:
        return TensorDict({}, [0]), []

    record = TrajectoryRecord(number, steps, lanes, *_facts(facts))
    check_numbers([record])
    lane = torch.arange(lanes).repeat_interleave(steps)
    batch = TensorDict(dict(rows), [count])
    return _add_marks(batch, lane + number * _LANES, torch.arange(count), _done(rows, count)), [record]


def _facts(given: Mapping[str, Any]) -> tuple[int, str]:
    """What is noted of a trajectory besides its fields."""
    length = given.get("max_episode_length") or 0
    try:
        return int(length), str(given.get("model_weights_id") or "")
    except (TypeError, ValueError):
        raise TypeError(
            f"max_episode_length must be an integer, got {length!r}. Nothing was stored"
        ) from None


def _flat_rows(batch: TensorDictBase, number: int) -> tuple[TensorDict, list[TrajectoryRecord]]:
    """Rows of a flat batch, each run a trajectory."""
    if any(name == _MARKS for name in batch.keys()):  # noqa: SIM118
        raise ValueError(f"the batch has an entry {_MARKS!r}, a name that the buffer reserves")

    starts = torch.nonzero(run_starts(batch)).squeeze(1).cpu()
    lengths = torch.diff(starts, append=torch.tensor([batch.batch_size[0]]))
    records = [TrajectoryRecord(number + i, length, 1) for i, length in enumerate(lengths.tolist())]
    run = torch.repeat_interleave(torch.arange(len(starts)), lengths)
    place = torch.arange(len(run)) - starts[run]

    done = batch.get((NEXT, "done"), None)
    if done is None:
        marks = torch.zeros(len(run), dtype=torch.bool)
    else:
        marks = done.reshape(len(run))
    left = lengths[run] - 1 - place
    return _add_marks(batch.copy(), (number + run) * _LANES, place, marks, left), records


def _add_marks(
    batch: TensorDictBase, lane: Tensor, place: Tensor, done: Tensor, left: Tensor | None = None
) -> TensorDict:
    if left is None:
        left = len(place) - 1 - place
    marks = {LANE: lane, PLACE: place.int(), LEFT: left.int(), DONE: done}
    return batch.update(TensorDict(dict(marks), batch.batch_size))


def _mapping(trajectory: Any) -> dict[str, Any]:
    """The fields of a trajectory by name, without those that are None."""
    if isinstance(trajectory, TensorDictBase):
        if trajectory.batch_dims < 1:
            raise ValueError(
                f"a trajectory must be [T, B] or a flat batch [N], got {list(trajectory.batch_size)}"
            )
        trajectory = trajectory.to_dict()

    names = getattr(trajectory, "__dataclass_fields__", None)
    if names is not None:
        trajectory = {name: getattr(trajectory, name) for name in names}

    if not isinstance(trajectory, Mapping):
        raise TypeError(
            f"a trajectory must be a mapping, a dataclass or a tensordict, got {type(trajectory).__name__}"
        )
    return {name: value for name, value in trajectory.items() if value is not None}


def is_dense(value: object) -> TypeGuard[Tensor]:
    """Whether a value is a tensor of numbers in rows: not sparse, nested or quantized."""
    if not isinstance(value, Tensor) or value.layout is not torch.strided:
        return False
    return not (value.is_nested or value.is_quantized)


def _collect(fields: Mapping[str, Any], path: tuple[str, ...], into: dict[NestedKey, Tensor]) -> None:
    for name, value in fields.items():
        if not isinstance(name, str):
            raise TypeError(f"names of fields must be strings, got {name!r}. Nothing was stored")
        key = (*path, name)
        if isinstance(value, Mapping):
            _collect(value, key, into)
        elif is_dense(value):
            place = key if path else key[0]
            into[place] = value
        else:
            kind = "another tensor" if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(
                f"the field {'/'.join(key)!r} must be a dense tensor [T, B, ...] or a mapping of them, got "
                f"{kind}. Nothing was stored"
            )
    if not path and _MARKS in fields:
        raise ValueError(f"the trajectory has a field {_MARKS!r}, a name that the buffer reserves")


def _size(fields: Mapping[NestedKey, Tensor]) -> tuple[int, int]:
    """T and B: those of the rewards, else of the first field that has a value per step and no more."""
    for key, value in fields.items():
        if value.ndim < 2:
            raise ValueError(f"{key!r} must be [T, B, ...], got {list(value.shape)}. Nothing was stored")

    usual = [key for key in fields if as_tuple(key)[0] not in _ENDS + _VALUES]
    if "rewards" in fields:
        chosen = fields["rewards"]
    else:
        chosen = fields[(usual or list(fields))[0]]
    return chosen.shape[0], chosen.shape[1]


def _of_steps(value: Tensor, steps: int, name: str) -> Tensor:
    """Values of the steps alone, where each of k rollouts has one more, before its first or after its last step."""
    more = value.shape[0] - steps
    if more <= 0 or steps % more:
        return value

    rollouts = value.reshape(more, steps // more + 1, *value.shape[1:])
    inside = rollouts[:, 1:] if name in _ENDS else rollouts[:, :-1]
    return inside.reshape(steps, *value.shape[1:])


def _done(rows: Mapping[NestedKey, Tensor], count: int) -> Tensor:
    """Where an episode ends: dones, else terminations or truncations; of several flags per row, any."""
    done = torch.zeros(count, dtype=torch.bool)
    asked: list[NestedKey] = ["dones", (NEXT, "done")]
    found = [key for key in asked if key in rows] or [key for key in _ENDS[1:] if key in rows]
    for key in found:
        done |= rows[key].reshape(count, -1).bool().any(1).cpu()
    return done
