"""Batches and buffers for other tools, and back: NumPy, pandas, Arrow, Parquet, HDF5, Minari and LeRobot.

The module can be called: after ``from flatroll import export``, ``export(buffer, "rows.parquet")`` is `export.export`.

>>> import torch
>>> from tensordict import TensorDict
>>> from flatroll.export import to_numpy
>>> list(to_numpy(TensorDict({"next": {"done": torch.zeros(3, 1, dtype=torch.bool)}}, [3])))
['next.done']
"""

import sys
from types import ModuleType
from typing import Any

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
from flatroll.layout.export import from_arrow, from_numpy, from_pandas, to_arrow, to_numpy, to_pandas

__all__ = [
    "export",
    "from_arrow",
    "from_numpy",
    "from_pandas",
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
    "to_arrow",
    "to_numpy",
    "to_pandas",
]


class _Callable(ModuleType):
    def __call__(self, *arguments: Any, **options: Any) -> None:
        export(*arguments, **options)


sys.modules[__name__].__class__ = _Callable
