"""Puts rows and samples together for a `torch.utils.data.DataLoader`."""

from typing import Any

import torch
from tensordict import TensorDictBase

from flatroll.buffers.storages.item_kinds import stacked


def collate(samples: Any) -> Any:
    """Make one batch of what a dataset gives, for ``DataLoader(collate_fn=collate)``; torch's own knows no tensordicts.

    Args:
        samples: with ``DataLoader(batch_size=None)`` a sample, returned as it is; else a list: batches (tensordicts
            with a batch size) are laid end to end, rows, tensors and trees of tensors stacked. Other items stay a list.

    >>> from tensordict import TensorDict
    >>> rows = [TensorDict({"x": torch.tensor(i)}, []) for i in range(3)]
    >>> collate(rows)["x"], collate([collate(rows), collate(rows[:1])])["x"]
    (tensor([0, 1, 2]), tensor([0, 1, 2, 0]))
    """
    if not isinstance(samples, list):
        return samples
    if samples and all(isinstance(sample, TensorDictBase) and sample.batch_dims for sample in samples):
        return torch.cat(samples)
    return stacked(samples)
