"""Explains a row of a batch: why it starts or ends a run, and where its next observation is."""

from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.boundaries import run_ends, run_starts
from flatroll.layout.checks import check_rows, check_whole_number
from flatroll.layout.inspect.text import Text
from flatroll.layout.keys import (
    DELTA,
    DONE,
    IS_INIT,
    MASK,
    NEXT_KNOWN,
    OBSERVATION,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    flat_column,
    next_key,
    observation_keys,
    optional_marker,
)


def explain(batch: TensorDictBase, i: int, *, final: TensorDictBase | None = None) -> str:
    """Explain why row ``i`` starts or ends a run, whether its value is bootstrapped, and more, in words.

    Args:
        batch: flat batch ``[N]`` with one boundary marker at least.
        i: row number, negative from the end.
        final: the observations that no row of a compact batch holds (`Collector.final`): ``"row"`` int64
            ``[K]`` and ``("next", <obs>)`` ``[K, *obs]``.

    Raises:
        ValueError: the batch is not ``[N]``.
        IndexError: there is no row ``i``.
        KeyError: no boundary marker is there.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> done = torch.tensor([False, True, False])
    >>> batch = TensorDict({"next": {"done": done, "terminated": done}}, [3])
    >>> print(explain(batch, 1))
    Row 1 of 3: the last of the 2 rows 0..1, which are one run.
    It ends the run: the env terminated the episode here.
    The value after it is 0: nothing is bootstrapped.
    Its next observation is unknown: no column, no row and no final holds it.
    """
    check_rows(batch, values=True)
    if batch.batch_dims != 1:
        raise ValueError(
            f"batch must have batch size [N], got {list(batch.batch_size)}: join() concatenates the rows"
        )

    n = batch.shape[0]
    i = check_whole_number("i", i, -(2**63))
    if not -n <= i < n:
        raise IndexError(f"i={i} is not a row: the batch has {n} rows, 0..{n - 1}")

    row = _Row(batch, i % n)
    return Text("\n".join([row.where(), *row.start(), *row.end(), row.next_observation(final)]))


class _Row:
    """Row ``i`` with the run it belongs to."""

    def __init__(self, batch: TensorDictBase, i: int) -> None:
        self.batch = batch
        self.i = i

        # the nearest start up to row i, and the nearest end from it on
        starts = run_starts(batch)
        ends = run_ends(batch)
        self.first = int(starts[: i + 1].nonzero()[-1])
        self.last = i + int(ends[i:].nonzero()[0])

    def flag(self, key: NestedKey, i: int) -> bool | None:
        """The bool column ``key`` at row ``i``; None if the batch does not have it."""
        column = optional_marker(self.batch, key)
        if column is None:
            return None
        return bool(column[i])

    def number(self, key: NestedKey, i: int) -> int | None:
        """The integer column ``key`` at row ``i``; None if the batch does not have it."""
        column = self.batch.get(key, None)
        if column is None:
            return None

        numbers = flat_column(column, self.batch, key)
        if numbers.is_floating_point() or numbers.is_complex():
            raise TypeError(f"batch[{key!r}] must hold integers, got {numbers.dtype}")
        return int(numbers[i])

    def where(self) -> str:
        """Describe the row's number, markers and position in the run."""
        i = self.i
        first = self.first
        last = self.last
        which = {first: "the first of", last: "the last of"}.get(i, "one of")
        place = f"{which} the {last - first + 1} rows {first}..{last}, which are one run"
        if first == last:
            place = "a run of its own"

        names = []
        if (identity := self.number(TRAJ_IDS, i)) is not None:
            names.append(f"trajectory {identity}")
        if (step := self.number(STEP_COUNT, i)) is not None:
            names.append(f"step {step}")
        if self.flag(MASK, i) is False:
            names.append("padding")

        named = f" ({', '.join(names)})" if names else ""
        return f"Row {i} of {self.batch.shape[0]}{named}: {place}."

    def start(self) -> list[str]:
        """Explain why a run begins at this row; empty if it does not."""
        i = self.i
        if i != self.first:
            return []

        step = self.number(STEP_COUNT, i)
        is_init = self.flag(IS_INIT, i)
        if is_init and not step:
            if step == 0:
                what = "an episode begins here"
            else:
                what = "an episode or a slice begins here"
        elif is_init:
            what = f"a slice begins here, in mid-episode at step {step}"
        elif step == 0:
            what = "an episode begins here (step 0, though it is not marked is_init)"
        elif step is not None:
            what = f"it continues from step {step - 1}, which is not in this batch: its head was cut off"
        elif is_init is False:
            what = "it continues from rows that are not in this batch: its head was cut off"
        else:
            what = "an episode or a window of one begins here"
        return [f"It starts the run: {what} ({self._why(i - 1)})."]

    def _why(self, i: int) -> str:
        """Return the marker that separates row ``i`` from the next one."""
        if i < 0:
            return "first row of the batch"
        if i == self.batch.shape[0] - 1:
            return "last row of the batch"

        before = self.number(TRAJ_IDS, i)
        after = self.number(TRAJ_IDS, i + 1)
        marks = {
            f"row {i} is done": self.flag(DONE, i),
            f"row {i + 1} is is_init": self.flag(IS_INIT, i + 1),
            f"the trajectory id changes from {before} to {after}": before != after,
            "padding begins or ends": self.flag(MASK, i) != self.flag(MASK, i + 1),
        }
        return ", ".join(text for text, holds in marks.items() if holds)

    def end(self) -> list[str]:
        """Explain why the run ends at this row, and whether its value is bootstrapped."""
        i = self.i
        if i != self.last:
            return [f"It is inside the run: returns and advantages continue to row {i + 1}."]

        done, terminated, truncated = (self.flag(key, i) for key in (DONE, TERMINATED, TRUNCATED))
        bootstrapped = "The value after it is bootstrapped, the trace stops."
        unknown = "Whether the value after it is bootstrapped cannot be told."
        if done is terminated is truncated is None:
            why = f"It ends the run ({self._why(i)}); no column says whether the episode ended here."
            return [why, unknown]
        if not (done or terminated or truncated):
            return [f"It ends the run: cut here ({self._why(i)}), the episode went on.", bootstrapped]

        if terminated:
            also = ", and truncated it on the same step: terminated wins" if truncated else ""
            return [
                f"It ends the run: the env terminated the episode here{also}.",
                "The value after it is 0: nothing is bootstrapped.",
            ]

        if truncated:
            in_slice = self.flag(IS_INIT, self.first) and self.number(STEP_COUNT, self.first)
            who = "a time limit, or the end of a sampled slice"
            if in_slice:
                who = "the end of a slice, or a time limit"
            return [f"It ends the run: truncated here ({who}).", bootstrapped]

        if terminated is None:
            return ["It ends the run: done, and no column says whether it terminated.", unknown]
        return ["It ends the run: done, but not terminated.", bootstrapped]

    def next_observation(self, final: TensorDictBase | None) -> str:
        """Explain where the next observation is: in a column, as a difference, in the next row, or in ``final``."""
        i = self.i
        batch = self.batch
        after = f"observation of row {i + 1}"
        # If an entry is named "observation", other entries that also exist under "next", such as values, are
        # not observations.
        roots = observation_keys(batch)
        roots = [key for key in roots if as_tuple(key)[0] == OBSERVATION] or roots
        keys = [key for key in roots if batch.get(next_key(key), None) is not None]

        if keys:
            if self.flag(NEXT_KNOWN, i) is False:
                return f"Its next observation is unknown: the env hides it ({NEXT_KNOWN!r} is False)."
            for key in keys:
                value: Tensor = batch.get(next_key(key))[i]
                if value.is_floating_point() and bool(value.isnan().any()):
                    return f"Its next observation is unknown: {next_key(key)!r} holds NaN here."

            own = "its own column" if len(keys) == 1 else "columns of its own,"
            columns = ", ".join(repr(next_key(key)) for key in keys)
            copy = f", a copy of the {after}" if i != self.last else ""
            return f"Its next observation is in {own} {columns}{copy}."

        deltas = batch.get(DELTA, None)
        if deltas is not None and (leaves := list(deltas.keys(True, True))):
            dtype = str(deltas.get(leaves[0]).dtype).removeprefix("torch.")
            return f"Its next observation is its observation plus the {dtype} difference in {DELTA!r}."

        if i != self.last:
            return f"Its next observation is the {after}."
        if final is None:
            return "Its next observation is unknown: no column, no row and no final holds it."

        # the entry of final that follows row i, if there is one
        entry = (final.get("row") == i).nonzero()
        if len(entry):
            return f"Its next observation is entry {int(entry[0])} of final."
        return "Its next observation is unknown: final has no entry for this row."
