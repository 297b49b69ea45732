"""Saves named attributes of an object as plain values, and restores them."""

from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

_MOMENTS = ("mean", "var", "count")  # of Gymnasium's RunningMeanStd


def get_attributes(layer: object, names: Sequence[str]) -> dict[str, Any]:
    """Return copies of attributes as plain values.

    >>> from types import SimpleNamespace
    >>> get_attributes(SimpleNamespace(steps=3, queue=deque([1, 2])), ["steps", "queue"])
    {'steps': 3, 'queue': [1, 2]}
    """
    return {name: copy_plain(getattr(layer, name)) for name in names}


def set_attributes(layer: object, values: dict[str, Any], device: torch.device | None = None) -> None:
    """Set attributes to copies of values that `get_attributes` returned; a queue keeps its greatest length."""
    for name, value in values.items():
        now = getattr(layer, name)
        if _has_moments(now):
            for part in _MOMENTS:
                setattr(now, part, copy_plain(value[part], device))
            continue

        plain = copy_plain(value, device)
        if isinstance(now, deque):
            plain = deque(plain, maxlen=now.maxlen)
        setattr(layer, name, plain)


def copy_plain(value: Any, device: torch.device | None = None) -> Any:
    """Return a copy of a tree in which queues are lists and running moments are dicts; tensors go to ``device``."""
    if isinstance(value, np.ndarray):
        return value.copy()
    if isinstance(value, Tensor):
        return value.detach().to(device, copy=True)
    if isinstance(value, dict):
        return {key: copy_plain(part, device) for key, part in value.items()}
    if isinstance(value, tuple):
        return tuple(copy_plain(part, device) for part in value)
    if isinstance(value, list | deque):
        return [copy_plain(part, device) for part in value]
    if _has_moments(value):
        return {name: copy_plain(getattr(value, name)) for name in _MOMENTS}
    return value


def _has_moments(value: object) -> bool:
    return type(value).__name__ == "RunningMeanStd"
