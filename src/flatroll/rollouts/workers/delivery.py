"""`Delivery`: turns the windows of workers into batches, and hands them to a replay buffer if there is one."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.tensordict_seam import nest
from flatroll.rollouts.workers.gather import Filled
from flatroll.rollouts.workers.messages import Note

Columns = Mapping[Any, Tensor]


class Delivery:
    """Makes one batch, in memory of its own, of the windows of several workers.

    Args:
        buffer: what takes the batches, with ``extend(batch, final=...)``; None to hand them out.
        storing: the device to put them on; None: the CPU, where workers leave them.
        wait: whether to wait for that copy.
        stack: whether batches are ``[workers, T]``.
    """

    def __init__(self, buffer: Any, storing: torch.device | None, wait: bool, stack: bool) -> None:
        self._buffer, self._storing, self._wait, self._stack = buffer, storing, wait, stack
        #: Of the last batch: the next observations that no row of it holds, see `Collector`; None if a buffer took it.
        self.final: TensorDict | None = None
        self._columns: dict[
            Any, Any
        ] = {}  # what the first rows had, which all later ones must have, see _joined
        self._finals: dict[Any, Any] = {}

    def batch(self, filled: Sequence[Filled]) -> TensorDict:
        """The rows of these windows, one behind the other; the windows are given back to their workers."""
        notes: list[Note] = [window.note for _, window, _ in filled]
        names = [member.worker.name for member, _, _ in filled]
        columns = _joined(
            [window.tables[0] for _, window, _ in filled], names, len(notes[0].shape) > 1, self._columns
        )
        shape = (
            sum(note.shape[0] for note in notes),
            *map(max, zip(*(n.shape[1:] for n in notes), strict=True)),
        )
        final: TensorDict | None = None
        finals, first = [], 0
        for (_, window, _), note in zip(filled, notes, strict=True):
            if len(window.tables) > 1:
                finals.append({**window.tables[1], "row": window.tables[1]["row"] + first})
            first += note.rows
        if finals:
            last = _joined(finals, names, False, self._finals)
            final = nest(last, len(last["row"]))
        for _, window, _ in filled:
            window.release()
        if self._stack:
            steps = (len(filled), shape[0] // len(filled))
            columns = {key: column.view(*steps, *column.shape[1:]) for key, column in columns.items()}
            shape = (*steps, *shape[1:])
        batch = nest(columns, *shape)
        if self._storing is not None:
            batch = batch.to(self._storing, non_blocking=not self._wait)
            final = None if final is None else final.to(self._storing, non_blocking=not self._wait)
        self.final = final
        return batch

    def extend(self, filled: Sequence[Filled]) -> bool:
        """Let the buffer copy each window from where its worker wrote it, which saves a copy of all rows.

        Returns:
            False, and nothing is done, if there is no buffer, or one that might keep references to that memory.
        """
        if self._stack or self._storing is not None or not getattr(self._buffer, "copies_rows", False):
            return False
        for member, window, _ in filled:
            with window:
                columns, *finals = window.tables
                final = {"final": nest(finals[0], len(finals[0]["row"]))} if finals else {}
                try:
                    self._buffer.extend(nest(columns, *window.note.shape), **final)
                except (KeyError, TypeError, ValueError) as error:
                    error.add_note(f"in the rows of {member.worker.name}")
                    raise
        self.final = None
        return True

    def hand_over(self, batch: TensorDict) -> TensorDict | None:
        """The batch; None if the buffer takes it."""
        if self._buffer is None:
            return batch
        self._buffer.extend(batch, **({} if self.final is None else {"final": self.final}))
        self.final = None
        return None


def _joined(
    tables: Sequence[Columns], names: Sequence[str], padded: bool, agreed: dict[Any, Any]
) -> dict[Any, Tensor]:
    """The rows of all tables one behind the other, in new memory.

    Args:
        tables: columns ``[N, *S]`` by key, of each worker.
        names: of the workers, for errors.
        padded: whether columns are ``[n, T, *S]`` and may differ in T: shorter ones are then filled up with zeros.
        agreed: what the collector's first table had, which all later ones must have, too: ``(dtype, S)`` by key, and
            the name of its worker by None. The first call fills it in.

    Raises:
        ValueError: workers give different columns.
    """
    at = 2 if padded else 1  # the first dimension in which all must be alike
    for table, name in zip(tables, names, strict=True):
        given = {key: (column.dtype, list(column.shape[at:])) for key, column in table.items()}
        if not agreed:
            agreed |= {None: name} | given
        for key in [*agreed, *given]:
            if key is not None and agreed.get(key) != given.get(key):
                raise ValueError(
                    f"workers must give the same columns: of {key!r}, {agreed[None]} gives "
                    f"{_form(agreed.get(key))} and {name} {_form(given.get(key))}: give all of them envs with the same "
                    "spaces"
                )
    made = {}
    for key, column in tables[0].items():
        parts = [table[key] for table in tables]
        if padded and len({part.shape[1] for part in parts}) > 1:
            longest = max(part.shape[1] for part in parts)
            parts = [_filled_up(part, longest) for part in parts]
        made[key] = torch.cat(parts) if len(parts) > 1 else column.clone()
    return made


def _form(form: tuple[torch.dtype, list[int]] | None) -> str:
    return "none" if form is None else f"{form[0]} {form[1]}"


def _filled_up(column: Tensor, length: int) -> Tensor:
    """``[n, T, *S]`` as ``[n, length, *S]``, zeros at the end."""
    made = column.new_zeros(len(column), length, *column.shape[2:])
    made[:, : column.shape[1]] = column
    return made
