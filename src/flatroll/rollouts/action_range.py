"""`ActionRange`: looks whether a policy's actions lie in the env's action space, once for each batch."""

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
    """Raises ValueError for whole numbers outside the space (Discrete, MultiDiscrete, MultiBinary), and warns once of
    numbers outside a Box, which may be meant: the env was given them.

    Nothing waits for actions on another device than the CPU: their ends are copied, and looked at with a later batch.

    Args:
        space: the actions of one env.
        keys, paths: of its leaves, in a batch and in a tree of actions.
        device: of the batches.

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
        if device.type == "meta":  # no values there
            self._limits = []
        self._later = device.type != "cpu"
        self._ends: dict[NestedKey, tuple[Tensor, Tensor]] = {}  # seen so far: there, and as copied here

    def look(self, batch: TensorDict) -> None:
        """Look at the actions of a batch."""
        for key, limits in list(self._limits):
            actions: Tensor = batch.get(key)
            problem = limits.problem(self._copied(key, actions) if self._later else actions.numpy())
            if problem is None:
                continue
            if not isinstance(limits.space, spaces.Box):
                raise ValueError(problem)
            self._limits.remove((key, limits))
            warnings.warn(
                f"{problem}: the env was given them as they are. Put gymnasium.wrappers.ClipAction or RescaleAction "
                "around the env, or bound what the policy gives",
                stacklevel=2,
            )

    def _copied(self, key: NestedKey, actions: Tensor) -> "np.ndarray[Any, Any]":
        """The least and greatest actions ``[2, *S]`` of batches whose copies have come; this batch's are sent for."""
        ends = torch.stack([actions.amin(0), actions.amax(0)])
        if key not in self._ends:
            here = torch.empty(ends.shape, dtype=ends.dtype, pin_memory=actions.is_cuda)
            limits = next(limits for own, limits in self._limits if own == key)
            # Until the first copy has come.
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
