"""What a storage knows of its columns while their memory does not move."""

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from flatroll.buffers.columns.column import Column, TensorColumn, plain_columns
from flatroll.buffers.index.ring import Array
from flatroll.buffers.storages.continuity import Compared
from flatroll.buffers.storages.next_pool import NextPool
from flatroll.kernels.rows.spans import Spans
from flatroll.layout.keys import NestedKey

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import HostColumns


class ColumnFacts:
    """Cached facts about a storage's columns, valid while their memory does not move.

    Attributes:
        compiled: `Storage.compiled` when it was found.
        host: columns copied by one call; None if the storage is not on the host, or not ``compiled``, so that random
            sampling does not need numba.
        arriving: the form of batches that one call copies whole: ``host`` if all columns are there, in a compact
            storage with the next observations after them; None if there are no such batches.
        now: compact storage: indices in ``host`` of the columns that have next observations, int64.
        memory: memory of all tensor columns.
        compared: what :meth:`ColumnStorage.link` compares; None until it is needed.
    """

    def __init__(
        self,
        columns: Mapping[NestedKey, Column],
        device: torch.device,
        compiled: bool,
        pool: NextPool | None,
    ) -> None:
        self.compiled = compiled
        self.memory = Spans.of(
            [column.data for column in columns.values() if isinstance(column, TensorColumn)]
        )
        self.compared: Compared | None = None

        self.host: HostColumns[NestedKey] | None = None
        if compiled and columns and device.type == "cpu":
            next_keys = pool.next_keys if pool is not None and pool.plain else None
            self.host = plain_columns(columns, next_keys)

        self.arriving: HostColumns[NestedKey] | None = None
        self.now: Array = np.zeros(0, np.int64)
        if self.host is None or self.host.columns.keys() != columns.keys():
            return
        if pool is None:
            self.arriving = self.host
        elif pool.plain:
            later = {name: columns[key] for key, name in pool.next_keys.items()}
            self.arriving = plain_columns({**columns, **later})
            self.now = np.array([list(columns).index(key) for key in pool.pairs], np.int64)

    def compared_without(self, not_compared: Collection[NestedKey]) -> Compared | None:
        """Return what is compared, or None if it is not known since the keys in ``not_compared`` were left out."""
        compared = self.compared
        if compared is None or compared.not_compared != len(not_compared):
            return None
        return compared
