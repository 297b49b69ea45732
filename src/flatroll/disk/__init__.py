"""The one form on disk: segments of rows, versions of everything, and how they survive a crash."""

from flatroll.disk.checkpoint import Checkpoint
from flatroll.disk.columns import ColumnSchema, Ragged
from flatroll.disk.folder import Folder
from flatroll.disk.loading import LoadedVersion
from flatroll.disk.manifest import Version
from flatroll.disk.names import column_key, column_name
from flatroll.disk.segments import Segment
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
