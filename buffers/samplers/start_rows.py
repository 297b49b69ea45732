"""Rows at which slices may begin: those that an entry of the storage marks."""

from typing import Any

from tensordict import TensorDictBase

from flatroll.buffers.columns.base import Column, TensorColumn
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.base import Storage
from flatroll.layout.keys import HAS_STATE, NestedKey, marker, require

__all__ = ["HAS_STATE", "StartRows"]


class StartRows:
    """Reads a sampler's ``start_key`` in its storage, so that the marks live and die with the rows.

    Args:
        key: a bool entry, True where a slice may begin; `HAS_STATE` is used if it is there, another one must be;
            None: slices begin anywhere.
    """

    def __init__(self, key: NestedKey | None) -> None:
        self.key = key
        self._storage: Storage | None = None

    def attach(self, storage: Storage) -> None:
        """See `Sampler`."""
        self._storage = storage

    def check(self, batch: TensorDictBase, sampler: str, why_not: str) -> None:
        """Refuse marks that are no bools, and any marks if ``why_not`` says why ``sampler`` cannot heed them.

        Raises:
            KeyError: the entry that was asked for is missing.
            TypeError: it is not bool.
            ValueError: the sampler cannot heed it.
        """
        if self.key is None:
            return
        if self.key != HAS_STATE:
            require(batch, self.key)
        if batch.get(self.key, None) is None:
            return
        marker(batch, self.key)
        if why_not:
            raise ValueError(
                f"{sampler} cannot begin its slices at the rows that {self.key!r} marks: {why_not}. Use "
                "SliceSampler(slice_len=...) alone, collect with state_stride=1, or, to begin anywhere, leave the "
                f"entry out: batch.exclude({self.key!r})"
            )

    def marks(self) -> Array | None:
        """The marks by slot, bool ``[capacity]`` in host memory; None if slices begin anywhere."""
        columns: dict[NestedKey, Column] = getattr(self._storage, "columns", {})
        column: Any = None if self.key is None else columns.get(self.key)
        if not isinstance(column, TensorColumn):
            return None
        marks: Array = column.data.view(-1).numpy(force=True)
        return marks
