"""Batches for other tools, and back: NumPy, pandas, Arrow and Parquet.

>>> import torch
>>> from tensordict import TensorDict
>>> from flatroll.export import to_numpy
>>> list(to_numpy(TensorDict({"next": {"done": torch.zeros(3, 1, dtype=torch.bool)}}, [3])))
['next.done']
"""

from flatroll.layout.export import from_arrow, from_numpy, from_pandas, to_arrow, to_numpy, to_pandas

__all__ = ["from_arrow", "from_numpy", "from_pandas", "to_arrow", "to_numpy", "to_pandas"]
