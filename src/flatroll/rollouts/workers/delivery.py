"""`Delivery`: joins the windows of workers into batches and writes them to a replay buffer if there is one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.tensordict_seam import nest
from flatroll.layout.transfers import move_batch
from flatroll.rollouts.workers.gather import Filled
from flatroll.rollouts.workers.transport import Note, RowsElsewhere, WorkerWindow

Columns = Mapping[Any, Tensor]


class Delivery:
    """Joins the windows of several workers into a batch that owns its memory.

    Args:
        buffer: receives the batches with ``extend(batch, final=...)``; None to return them.
        storing: device of the batches; None: the CPU, where workers write them.
        stack: whether batches are ``[workers, T]``.
    """

    def __init__(self, buffer: Any, storing: torch.device | None, stack: bool) -> None:
        self._buffer = buffer
        self._storing = storing
        self._stack = stack
        #: Next observations that no row of the last batch holds, see `Collector`; None if a buffer has taken them.
        self.final: TensorDict | None = None
        self._columns: dict[Any, Any] = {}  # columns of the first batch, see _join_tables
        self._finals: dict[Any, Any] = {}

    def batch(self, filled: Sequence[Filled]) -> TensorDict:
        """Concatenate the rows of these windows in new memory and release the windows."""
        windows = [window for _, window, _ in filled]
        names = [member.link.name for member, _, _ in filled]
        shape = _joint_shape([window.note for window in windows])
        columns = _join_tables(
            [window.tables[0] for window in windows],
            names,
            self._columns,
            padded=len(shape) > 1,
            owned=windows[0].owned,
        )
        final = self._join_finals(windows, names)

        if self._stack:
            steps = (len(windows), shape[0] // len(windows))
            columns = {key: column.view(*steps, *column.shape[1:]) for key, column in columns.items()}
            shape = (*steps, *shape[1:])

        batch = nest(columns, *shape)
        if self._storing is not None:
            batch = move_batch(batch, self._storing)
            if final is not None:
                final = move_batch(final, self._storing)

        self.final = final
        for window in windows:
            window.release()
        return batch

    def _join_finals(self, windows: Sequence[WorkerWindow], names: Sequence[str]) -> TensorDict | None:
        """Return the *final* of all windows, whose rows are counted in the whole batch; None if there is none."""
        finals = []
        first = 0  # the window's first row in the batch
        for window in windows:
            if len(window.tables) > 1:
                table = window.tables[1]
                finals.append({**table, "row": table["row"] + first})
            first += window.note.rows

        if not finals:
            return None
        columns = _join_tables(finals, names, self._finals, owned=windows[0].owned)
        return nest(columns, len(columns["row"]))

    def takes_windows(self) -> bool:
        """Return whether `extend` can be used: the buffer copies rows, and no batch has to be made first."""
        copies = getattr(self._buffer, "copies_rows", False) or hasattr(self._buffer, "extend_reference")
        return copies and not self._stack and self._storing is None

    def extend(self, filled: Filled) -> bool:
        """Extend the buffer with a window in place, which saves a copy of all rows; the caller releases it.

        Returns:
            False, without effect, if the buffer might keep references to that memory.
        """
        member, window, _ = filled
        self.final = None
        if isinstance(window, RowsElsewhere):
            self._buffer.extend_reference(window.reference, place=member.place)
            return True
        if not getattr(self._buffer, "copies_rows", False):
            return False

        columns, *finals = window.tables
        final = {}
        if finals:
            final = {"final": nest(finals[0], len(finals[0]["row"]))}
        try:
            self._buffer.extend(nest(columns, *window.note.shape), **final)
        except (KeyError, TypeError, ValueError) as error:
            error.add_note(f"in the rows of {member.link.name}")
            raise
        return True

    def hand_over(self, batch: TensorDict) -> TensorDict | None:
        """Return the batch, or None if the buffer takes it."""
        if self._buffer is None:
            return batch
        if self.final is None:
            self._buffer.extend(batch)
        else:
            self._buffer.extend(batch, final=self.final)
        self.final = None
        return None


def _joint_shape(notes: Sequence[Note]) -> tuple[int, ...]:
    """Return the batch size of all windows' rows: padded ones ``[n, T]`` get the longest T."""
    rows = sum(note.shape[0] for note in notes)
    padded = zip(*(note.shape[1:] for note in notes), strict=True)
    return (rows, *map(max, padded))


def _join_tables(
    tables: Sequence[Columns],
    names: Sequence[str],
    agreed: dict[Any, Any],
    *,
    padded: bool = False,
    owned: bool = False,
) -> dict[Any, Tensor]:
    """Concatenate the rows of all tables in new memory.

    Args:
        tables: columns ``[N, *S]`` by key, of each worker.
        names: names of the workers, for errors.
        owned: whether a single table may be used without a copy.
        padded: whether columns are ``[n, T, *S]`` and may differ in T; shorter ones are padded with zeros.
        agreed: the columns of the collector's first table, see `_check_same_columns`.

    Raises:
        ValueError: workers return different columns.
    """
    first = 1  # the first dimension that must agree
    if padded:
        first = 2
    for table, name in zip(tables, names, strict=True):
        forms = {key: (column.dtype, list(column.shape[first:])) for key, column in table.items()}
        _check_same_columns(forms, name, agreed)

    made = {}
    for key in tables[0]:
        parts = [table[key] for table in tables]
        if padded:
            parts = _pad(parts)

        if len(parts) > 1:
            made[key] = torch.cat(parts)
        elif owned:
            made[key] = parts[0]
        else:
            made[key] = parts[0].clone()
    return made


def _check_same_columns(forms: dict[Any, Any], name: str, agreed: dict[Any, Any]) -> None:
    """Raise ValueError if a worker's columns differ from those of the collector's first table.

    Args:
        forms: ``(dtype, S)`` by key.
        name: of the worker.
        agreed: the first forms, and the name of their worker under None. The first call fills it.
    """
    if not agreed:
        agreed |= {None: name} | forms

    for key in [*agreed, *forms]:
        if key is not None and agreed.get(key) != forms.get(key):
            raise ValueError(
                f"workers must return the same columns: {key!r} of {agreed[None]} is "
                f"{_form(agreed.get(key))}, of {name} {_form(forms.get(key))}: use envs with the same "
                "spaces"
            )


def _pad(parts: Sequence[Tensor]) -> list[Tensor]:
    """Return columns ``[n, T, *S]`` with the longest T, with zeros after the last step of shorter ones."""
    longest = max(part.shape[1] for part in parts)
    padded = []
    for part in parts:
        missing = longest - part.shape[1]
        if missing:  # pad() counts dimensions from the last one
            part = torch.nn.functional.pad(part, (0, 0) * (part.ndim - 2) + (0, missing))
        padded.append(part)
    return padded


def _form(form: tuple[torch.dtype, list[int]] | None) -> str:
    if form is None:
        return "none"
    return f"{form[0]} {form[1]}"


@dataclass
class Tally:
    """Statistics of one place of the team, over all workers that occupied it."""

    frames: int = 0
    windows: int = 0
    rows: int = 0
    held: int = 0
    waited: float = 0.0
    lag_least: int | None = None
    lag_most: int | None = None
    lag_sum: float = 0.0
    lag_count: int = 0

    def count(self, note: Note, fresh: int, version: int) -> None:
        """Count a window delivered while the policy had this version."""
        self.frames += fresh
        self.windows += 1
        self.rows += note.rows
        self.held, self.waited = note.held, note.waited
        if note.versions is not None:
            oldest, mean, newest = note.versions
            least = version - newest
            most = version - oldest
            if self.lag_least is None:
                self.lag_least = least
            else:
                self.lag_least = min(self.lag_least, least)
            if self.lag_most is None:
                self.lag_most = most
            else:
                self.lag_most = max(self.lag_most, most)
            self.lag_sum += version - mean
            self.lag_count += 1

    def facts(self) -> dict[str, Any]:
        """Return the statistics by name."""
        mean = self.lag_sum / self.lag_count if self.lag_count else None
        return {
            "frames": self.frames,
            "windows": self.windows,
            "rows_held": self.held,
            "waited": self.waited,
            "policy_lag": {"min": self.lag_least, "mean": mean, "max": self.lag_most},
        }
