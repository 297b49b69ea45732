"""`ActionRange`: checks once per batch that a policy's actions lie in the env's action space."""

import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.keys import NestedKey
from flatroll.wrappers.arrays import action_limits


class ActionRange:
    """Raises ValueError for discrete actions outside the space and warns once about actions outside a Box.

    A Box's limits may be exceeded on purpose: the env receives the actions unchanged. Actions on a GPU cause no sync:
    their minimum and maximum are copied asynchronously and checked with a later batch.

    Args:
        space: the actions of one env.
        keys, paths: of the space's leaves, in a batch and in a tree of actions.
        device: device of the batches.

    >>> batch = TensorDict({"action": torch.tensor([0, 2])}, [2])
    >>> ActionRange(spaces.Discrete(2), ["action"], [()], torch.device("cpu")).look(batch)
    Traceback (most recent call last):
    ...
    ValueError: actions must lie in [0, 1] for Discrete(2), got 0 to 2
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        keys: Sequence[NestedKey],
        paths: Sequence[tuple[Any, ...]],
        device: torch.device,
    ) -> None:
        key_of = dict(zip(paths, keys, strict=True))
        self._limits = [(key_of[path], limits) for path, limits in action_limits(space)]
        if device.type == "meta":  # meta tensors have no values
            self._limits = []
        self._later = device.type != "cpu"
        self._ends: dict[NestedKey, tuple[Tensor, Tensor]] = {}  # minimum and maximum, and their host copy

    def look(self, batch: TensorDict) -> None:
        """Check the actions of a batch."""
        for key, limits in list(self._limits):
            actions: Tensor = batch.get(key)
            if self._later:
                values = self._copy_extrema(key, actions)
            else:
                values = actions.numpy()
            problem = limits.problem(values)
            if problem is None:
                continue
            if not isinstance(limits.space, spaces.Box):
                raise ValueError(problem)

            self._limits.remove((key, limits))
            warnings.warn(
                f"{problem}: the env received them unchanged. Put gymnasium.wrappers.ClipAction or "
                "RescaleAction around the env, or bound the policy's output",
                stacklevel=2,
            )

    def _copy_extrema(self, key: NestedKey, actions: Tensor) -> "np.ndarray[Any, Any]":
        """Return minimum and maximum ``[2, *S]`` of batches already copied, and start the copy of this batch's."""
        ends = torch.stack([actions.amin(0), actions.amax(0)])
        if key not in self._ends:
            here = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=actions.is_cuda)
            limits = next(limits for own, limits in self._limits if own == key)

            # The values until the first copy has finished.
            for end, limit in zip(here, (limits.low, limits.high), strict=True):
                end.copy_(torch.from_numpy(np.array(limit)))
            self._ends[key] = ends, here
            ends = ends.clone()

        there, here = self._ends[key]
        came = here.numpy().copy()
        torch.minimum(there[0], ends[0], out=there[0])
        torch.maximum(there[1], ends[1], out=there[1])
        here.copy_(there, non_blocking=True)

        return came
