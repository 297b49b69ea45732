"""Spaces: which ones become tensors, how broken bounds are mended, how actions are checked."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

from flatroll.layout.keys import OBSERVATION, RESERVED, NestedKey
from flatroll.wrappers.arrays import Array, Tree

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


def observation_leaves(space: spaces.Space[Any]) -> list[tuple[NestedKey, tuple[Any, ...]]]:
    """The batch key and the place in the tree of each observation entry.

    >>> from gymnasium.spaces import Box, Dict
    >>> observation_leaves(Box(0, 1, (2,)))
    [('observation', ())]
    >>> observation_leaves(Dict(eye=Box(0, 1, (2,)), body=Dict(leg=Box(0, 1))))
    [('eye', ('eye',)), (('body', 'leg'), ('body', 'leg'))]
    """
    if not isinstance(space, spaces.Dict):
        return _leaves(space, (OBSERVATION,), ())
    taken = sorted(RESERVED & set(space.spaces))
    if taken:
        raise ValueError(
            f"observation entries {taken} have names that the batch layout reserves ({sorted(RESERVED)}): "
            "rename them with gymnasium.wrappers.TransformObservation"
        )
    return [leaf for key, child in space.spaces.items() for leaf in _leaves(child, (key,), (key,))]


def _leaves(
    space: spaces.Space[Any], key: tuple[str, ...], path: tuple[Any, ...]
) -> list[tuple[NestedKey, tuple[Any, ...]]]:
    if isinstance(space, spaces.Dict):
        items: Any = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        items = enumerate(space.spaces)
    else:
        return [(key[0] if len(key) == 1 else key, path)]
    return [leaf for name, child in items for leaf in _leaves(child, (*key, str(name)), (*path, name))]


class ActionCheck:
    """Turns what a policy gave into what the env takes, or says what is wrong with it.

    Accepts NumPy arrays, torch tensors and lists; casts to the single space's dtype where that loses no kind
    (int to float, float64 to float32, never float to int); checks the row count and the shape.

    Args:
        space: the single action space.
        num_envs: how many rows an action has.
        framework: ``"numpy"`` or ``"torch"``, what the env takes.
        device: where a torch env wants its actions; None leaves them.
        check_range: refuse discrete actions outside the space (for envs that would read out of bounds).

    >>> ActionCheck(spaces.Discrete(2), 3, "numpy")(torch.tensor([0, 1, 1]))
    array([0, 1, 1])
    """

    def __init__(
        self,
        space: spaces.Space[Any],
        num_envs: int,
        framework: str,
        device: torch.device | None = None,
        check_range: bool = False,
    ) -> None:
        self._space = space
        self._num_envs = num_envs
        self._framework = framework
        self._device = device
        self._children: list[tuple[Any, ActionCheck]] = []
        if isinstance(space, (spaces.Dict, spaces.Tuple)):
            items = space.spaces.items() if isinstance(space, spaces.Dict) else enumerate(space.spaces)
            self._children = [
                (key, ActionCheck(child, num_envs, framework, device, check_range)) for key, child in items
            ]
            return
        assert space.shape is not None and space.dtype is not None
        self._shape = (num_envs, *space.shape)
        self._dtype = np.dtype(space.dtype)
        self._torch_dtype = torch.from_numpy(np.zeros(0, self._dtype)).dtype
        self._limit = int(space.n) if check_range and isinstance(space, spaces.Discrete) else 0
        self._start = int(space.start) if isinstance(space, spaces.Discrete) else 0
        self._unsigned = f"u{self._dtype.itemsize}"

    def __call__(self, actions: Tree) -> Tree:
        if self._children:
            return self._nested(actions)
        if self._framework == "torch":
            return self._torch(actions)
        if isinstance(actions, Tensor):
            plain = actions.is_cpu and not actions.requires_grad
            array = actions.numpy() if plain else actions.numpy(force=True)
        else:
            array = np.asarray(actions)
        if array.shape != self._shape:
            raise self._shape_error(array.shape)
        if array.dtype != self._dtype:
            whole = (
                array.dtype.kind in "iu" and self._dtype.kind in "iu"
            )  # argmax is int64, spaces may be uint8
            if not (whole or np.can_cast(array.dtype, self._dtype, "same_kind")):
                raise self._dtype_error(array.dtype)
            array = array.astype(self._dtype)
        if self._limit:
            self._check_range(array)
        return array

    def _torch(self, actions: Array) -> Tensor:
        tensor = actions if isinstance(actions, Tensor) else torch.as_tensor(actions)
        if tensor.shape != self._shape:
            raise self._shape_error(tuple(tensor.shape))
        if tensor.dtype != self._torch_dtype and not torch.can_cast(tensor.dtype, self._torch_dtype):
            raise self._dtype_error(tensor.dtype)
        return tensor.detach().to(device=self._device, dtype=self._torch_dtype)

    def _nested(self, actions: Tree) -> Tree:
        if isinstance(self._space, spaces.Dict):
            if not isinstance(actions, dict) or set(actions) != set(self._space.spaces):
                came = sorted(actions) if isinstance(actions, dict) else type(actions).__name__
                raise ValueError(f"actions must be a dict with keys {sorted(self._space.spaces)}, got {came}")
            return {key: check(actions[key]) for key, check in self._children}
        if not isinstance(actions, tuple) or len(actions) != len(self._children):
            raise ValueError(
                f"actions must be a tuple of {len(self._children)} arrays, got {type(actions).__name__}"
            )
        return tuple(check(actions[i]) for i, check in self._children)

    def _check_range(self, array: Array) -> None:
        shifted = array - self._start if self._start else array
        # Seen as unsigned, what is below the range is far above it: one pass finds both.
        if np.maximum.reduce(shifted.view(self._unsigned), axis=None) >= self._limit:
            low, high = self._start, self._start + self._limit - 1
            raise ValueError(
                f"actions must lie in [{low}, {high}] for {self._space}, got {array.min()} to {array.max()}"
            )

    def _shape_error(self, came: tuple[int, ...]) -> ValueError:
        hint = "one row for each env"
        if isinstance(self._space, spaces.Discrete) and len(came) == 2 and came[0] == self._num_envs:
            hint = "one integer for each env: take .argmax(-1) of one-hot actions, .squeeze(-1) of [E, 1]"
        return ValueError(f"actions must have shape {self._shape} ({hint}), got {tuple(came)}")

    def _dtype_error(self, came: object) -> TypeError:
        return TypeError(f"actions must be castable to {self._dtype} for {self._space}, got {came}")
