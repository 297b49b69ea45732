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
from flatroll.rollouts.workers.transport import Note, RowsElsewhere

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
        notes: list[Note] = [window.note for _, window, _ in filled]
        names = [member.link.name for member, _, _ in filled]
        columns = _join_tables(
            [window.tables[0] for _, window, _ in filled],
            names,
            self._columns,
            padded=len(notes[0].shape) > 1,
            owned=filled[0].window.owned,
        )
        shape = (
            sum(note.shape[0] for note in notes),
            *map(max, zip(*(n.shape[1:] for n in notes), strict=True)),
        )
        final: TensorDict | None = None
        finals = []
        first = 0
        for (_, window, _), note in zip(filled, notes, strict=True):
            if len(window.tables) > 1:
                finals.append({**window.tables[1], "row": window.tables[1]["row"] + first})
            first += note.rows
        if finals:
            last = _join_tables(finals, names, self._finals, owned=filled[0].window.owned)
            final = nest(last, len(last["row"]))
        if self._stack:
            steps = (len(filled), shape[0] // len(filled))
            columns = {key: column.view(*steps, *column.shape[1:]) for key, column in columns.items()}
            shape = (*steps, *shape[1:])
        batch = nest(columns, *shape)
        if self._storing is not None:
            batch = move_batch(batch, self._storing)
            if final is not None:
                final = move_batch(final, self._storing)
        self.final = final
        for _, window, _ in filled:
            window.release()
        return batch

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
        if finals:
            final = {"final": nest(finals[0], len(finals[0]["row"]))}
        else:
            final = {}
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
        self._buffer.extend(batch, **({} if self.final is None else {"final": self.final}))
        self.final = None
        return None


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
        agreed: the columns of the collector's first table, which all later ones must match: ``(dtype, S)`` by key,
            and its worker's name under None. The first call fills it.

    Raises:
        ValueError: workers return different columns.
    """
    at = 2 if padded else 1  # the first dimension that must agree
    for table, name in zip(tables, names, strict=True):
        given = {key: (column.dtype, list(column.shape[at:])) for key, column in table.items()}
        if not agreed:
            agreed |= {None: name} | given
        for key in [*agreed, *given]:
            if key is not None and agreed.get(key) != given.get(key):
                raise ValueError(
                    f"workers must return the same columns: {key!r} of {agreed[None]} is "
                    f"{_form(agreed.get(key))}, of {name} {_form(given.get(key))}: use envs with the same "
                    "spaces"
                )
    made = {}
    for key in tables[0]:
        parts = [table[key] for table in tables]
        if padded and len({part.shape[1] for part in parts}) > 1:
            longest = max(part.shape[1] for part in parts)
            # Zeros after the last step: pad() counts dimensions from the last one.
            parts = [
                torch.nn.functional.pad(part, (0, 0) * (part.ndim - 2) + (0, longest - part.shape[1]))
                for part in parts
            ]
        made[key] = torch.cat(parts) if len(parts) > 1 else parts[0] if owned else parts[0].clone()
    return made


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
