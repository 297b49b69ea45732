"""The columns of a storage that are plain tensors in host memory: one call reads or writes all of them."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flatroll.buffers.columns.base import Column, TensorColumn
from flatroll.layout.keys import NestedKey

if TYPE_CHECKING:
    from flatroll.kernels.rows.gather import HostColumns


def plain_columns(columns: Mapping[NestedKey, Column]) -> "HostColumns[NestedKey]":
    """Those of ``columns`` that are plain tensors in host memory, whose rows can be copied as bytes.

    >>> import torch
    >>> columns = plain_columns({"x": TensorColumn(torch.arange(4)), "y": TensorColumn(torch.zeros(2, 4).T)})
    >>> columns.take(torch.tensor([3, 0]))
    {'x': tensor([3, 0])}
    """
    from flatroll.kernels.rows.gather import HostColumns  # numba

    return HostColumns(
        {
            key: column.data
            for key, column in columns.items()
            if isinstance(column, TensorColumn)
            and (type(column).take, type(column).write) == (TensorColumn.take, TensorColumn.write)
            and column.flat is not None
        }
    )
