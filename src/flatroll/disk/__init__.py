"""The on-disk format: segments of rows, versions of all state, and crash recovery."""

from flatroll.disk.checkpoint import Checkpoint
from flatroll.disk.folder import Folder, LoadedVersion
from flatroll.disk.manifest import Version
from flatroll.disk.segments import ColumnSchema, Ragged, Segment, column_key, column_name
from flatroll.disk.tensor_file import DamagedFileError

__all__ = [
    "Checkpoint",
    "ColumnSchema",
    "DamagedFileError",
    "Folder",
    "LoadedVersion",
    "Ragged",
    "Segment",
    "Version",
    "column_key",
    "column_name",
]
