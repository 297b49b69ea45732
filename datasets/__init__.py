"""Offline data sets as replay buffers, and trajectories that are kept on disk."""

from flatroll.datasets.exporting import (
    export,
    import_arrow,
    import_h5,
    import_lerobot,
    import_minari,
    import_pandas,
    import_parquet,
)
from flatroll.datasets.formats.h5 import read_h5
from flatroll.datasets.formats.lerobot import read_lerobot
from flatroll.datasets.formats.minari import read_minari
from flatroll.datasets.formats.tables import read_arrow, read_pandas, read_parquet

__all__ = [
    "export",
    "import_arrow",
    "import_h5",
    "import_lerobot",
    "import_minari",
    "import_pandas",
    "import_parquet",
    "read_arrow",
    "read_h5",
    "read_lerobot",
    "read_minari",
    "read_pandas",
    "read_parquet",
]
