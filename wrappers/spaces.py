"""Gymnasium spaces: which ones become arrays, and how broken bounds are mended."""

from typing import Any

import numpy as np
from gymnasium import spaces

_LEAVES = (spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary)


def check_space(space: Any, name: str) -> None:
    """Refuse spaces whose samples are not arrays of one shape.

    Raises:
        TypeError: a leaf is not Box, Discrete, MultiDiscrete or MultiBinary (inside Dict or Tuple).

    >>> check_space(spaces.Text(5), "observation_space")
    Traceback (most recent call last):
    TypeError: observation_space must be made of Box, Discrete, MultiDiscrete or MultiBinary inside Dict or \
Tuple, got Text(1, 5, charset=...): convert it with an observation or action wrapper first
    """
    if isinstance(space, spaces.Dict):
        for key, child in space.spaces.items():
            check_space(child, f"{name}[{key!r}]")
    elif isinstance(space, spaces.Tuple):
        for i, child in enumerate(space.spaces):
            check_space(child, f"{name}[{i}]")
    elif not isinstance(space, _LEAVES):
        shown = str(space)
        if isinstance(space, spaces.Text):
            shown = f"Text({space.min_length}, {space.max_length}, charset=...)"
        raise TypeError(
            f"{name} must be made of Box, Discrete, MultiDiscrete or MultiBinary inside Dict or Tuple, "
            f"got {shown}: convert it with an observation or action wrapper first"
        )


def mend_bounds(space: spaces.Space[Any]) -> spaces.Space[Any]:
    """Give "unbounded" Box spaces their infinite bounds back.

    Several envpool families declare ``low = finfo.tiny`` (the smallest *positive* number) and
    ``high = finfo.max`` where they mean no bound, so that no negative observation is inside.
    """
    if isinstance(space, spaces.Dict):
        return spaces.Dict({key: mend_bounds(child) for key, child in space.spaces.items()})
    if isinstance(space, spaces.Tuple):
        return spaces.Tuple(tuple(mend_bounds(child) for child in space.spaces))
    if not isinstance(space, spaces.Box) or not np.issubdtype(space.dtype, np.floating):
        return space
    info = np.finfo(space.dtype)
    # The bounds were written as float32 even where the space is float64.
    tiny = np.isin(space.low, (info.tiny, np.finfo(np.float32).tiny))
    if not tiny.any():
        return space
    low = np.where(tiny, -np.inf, space.low).astype(space.dtype)
    huge = np.isin(space.high, (info.max, np.finfo(np.float32).max))
    high = np.where(huge, np.inf, space.high).astype(space.dtype)
    return spaces.Box(low, high, dtype=space.dtype.type)
