"""`Layout`: metadata of the rows in a `DiskStorage`'s folder."""

from collections.abc import Collection
from typing import Any, NamedTuple

import torch

from flatroll.buffers.storages.disk.forms import FORMS, Form
from flatroll.disk import column_key, column_name
from flatroll.disk.tensor_file import DTYPES, dtype_name
from flatroll.layout.keys import NestedKey, next_key

_KIND = "flatroll.DiskStorage"


class Layout(NamedTuple):
    """Metadata of a folder's rows.

    Args:
        forms: of the entries, by key.
        pairs: root keys of the entries whose next values are stored separately (``compact_obs``).
        seams: row numbers at which a run began to write; trajectories open before are cut there.
    """

    forms: dict[NestedKey, Form]
    pairs: list[NestedKey]
    seams: list[int]

    def to_json(self) -> dict[str, Any]:
        """Return what :meth:`from_json` reads."""
        entries = [
            [column_name(key), dtype_name(form.dtype), list(form.shape), form.name]
            for key, form in self.forms.items()
        ]
        return {
            "kind": _KIND,
            "entries": entries,
            "pairs": [column_name(key) for key in self.pairs],
            "seams": [*self.seams],
        }

    @classmethod
    def from_json(cls, noted: Any) -> "Layout":
        """Read the layout that a folder records; ValueError if it is not a folder of a `DiskStorage`."""
        if not isinstance(noted, dict):
            raise ValueError(
                "this is not the folder of a DiskStorage or a data set: load a saved buffer with "
                "buffer.loads or Checkpoint"
            )

        try:
            if noted["kind"] != _KIND:
                raise ValueError(noted["kind"])

            forms: dict[NestedKey, Form] = {
                column_key(name): FORMS[form](DTYPES[dtype], torch.Size(shape))
                for name, dtype, shape, form in noted["entries"]
            }

            pairs = [column_key(name) for name in noted["pairs"]]
            seams = sorted(set(noted["seams"]))

            if not all(key in forms for key in pairs) or not all(type(row) is int for row in seams):
                raise ValueError("pairs or seams")

            for form in forms.values():
                form.check_shape()
        except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
            raise ValueError(f"this is not the folder of a DiskStorage ({str(error)[:200]})") from None
        return cls(forms, pairs, seams)

    def row_bytes(self) -> int:
        """Bytes of a row in memory."""
        return sum(form.row_bytes for form in self.forms.values())


def columns_differ(columns: Collection[str], layout: Layout) -> str | None:
    """Describe how column names differ from those of ``layout``; None if they match."""
    expected = {column_name(key) for key in (*layout.forms, *map(next_key, layout.pairs))}
    found = set(columns)

    if not found or found == expected:
        return None
    return f"it has the columns {str(sorted(found))[:400]}, but describes {str(sorted(expected))[:400]}"
