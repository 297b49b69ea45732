"""The rows of a step writer that wait to be stored, and the window size."""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.index.ring import Array
from flatroll.layout.checks import check_whole_number
from flatroll.layout.keys import DONE, IS_INIT, REWARD, TERMINATED, TRAJ_IDS, TRUNCATED, NestedKey, as_tuple

FLAGS = (IS_INIT, DONE, TERMINATED, TRUNCATED)
# Maximum window by default, in steps and in rows; minimum in steps.
_MOST_STEPS = 64
_MOST_ROWS = 8192
_FEWEST_STEPS = 8


class StagedColumn:
    """One entry of the waiting rows, ``data`` ``[E, L, *shape]``, with views ``rows`` (NumPy) and ``flat``.

    Args:
        key: key of the entry.
        dtype: dtype of the values.
        shape: shape of one row's value.
        num_envs: E.
        window: L.

    >>> column = StagedColumn.like("action", np.zeros((2, 3)), num_envs=2, window=4)
    >>> column.put(0, torch.ones(2, 3, dtype=torch.float64))
    >>> column.window(1)
    tensor([[1., 1., 1.],
            [1., 1., 1.]], dtype=torch.float64)
    """

    def __init__(
        self, key: NestedKey, dtype: torch.dtype, shape: torch.Size, num_envs: int, window: int
    ) -> None:
        self.key = key
        self.dtype = dtype
        self.data = torch.empty((num_envs, window, *shape), dtype=dtype)
        self.flat = self.data.flatten(0, 1)  # row (env, step) is row env * L + step

        # NumPy writes small arrays much faster than torch. Dtypes that it lacks are written as integers.
        self._word = None
        try:
            self.rows: Array = self.data.numpy()
        except TypeError:
            self._word = {1: torch.int8, 2: torch.int16}[dtype.itemsize]
            self.rows = self.data.view(self._word).numpy()

        # One number per row may be given as [E] or [E, 1], and is stored as [E, L, 1].
        if tuple(shape) == (1,) and (key in FLAGS or key == REWARD):
            self.rows = self.rows[..., 0]
        self.shape = (num_envs, *self.rows.shape[2:])
        self._kind = self.rows.dtype

    @classmethod
    def like(cls, key: NestedKey, value: Any, num_envs: int, window: int) -> Self:
        """Create the column for values like the first one, ``[E, ...]``.

        Raises:
            TypeError: the value is not a tensor or array of numbers, or a marker has the wrong dtype.
            ValueError: the number of envs differs.
        """
        first = _as_tensor(key, value, num_envs)
        dtype = first.dtype
        shape = first.shape[1:]
        if (key in FLAGS or key == REWARD) and not len(shape):
            shape = torch.Size([1])

        if key in FLAGS and (dtype is not torch.bool or tuple(shape) != (1,)):
            raise TypeError(f"step[{key!r}] must be bool [{num_envs}], got {dtype} {list(first.shape)}")
        if key == TRAJ_IDS and (dtype is not torch.int64 or len(shape)):
            raise TypeError(f"step[{key!r}] must be int64 [{num_envs}], got {dtype} {list(first.shape)}")
        if key == REWARD:
            if dtype.is_complex:
                raise TypeError(f"step[{key!r}] must be real, got {dtype}")
            dtype = torch.float32

        return cls(key, dtype, shape, num_envs, window)

    def put(self, step: int, value: Any) -> None:
        """Write a step's ``value`` ``[E, *shape]`` to the waiting rows ``step``.

        Raises:
            TypeError: the dtype differs from the first step's.
            ValueError: the shape differs.
        """
        usual = isinstance(value, np.ndarray) and value.dtype == self._kind and value.shape == self.shape
        if not usual:
            value = self._convert(value)
        self.rows[:, step] = value

    def _convert(self, value: Any) -> Array:
        """Check a step's ``value`` and return it as an array ``[E, *shape]``, see :meth:`put`."""
        if isinstance(value, Tensor):
            if self._word is not None and value.dtype is self.dtype:
                value = value.view(self._word)
            array: Array = value.numpy(force=True)
        else:
            array = np.asarray(value)

        if array.dtype != self._kind and not (self.key == REWARD and array.dtype.kind in "fiub"):
            raise TypeError(f"step[{self.key!r}] is {array.dtype}, the first step's was {self.dtype}")
        if array.shape != self.shape:
            if array.shape == (*self.shape, 1) and len(self.shape) == 1 and self.data.ndim == 3:
                return array[:, 0]

            rows = len(array) if array.ndim else 0
            if rows != self.shape[0]:
                raise ValueError(
                    f"step[{self.key!r}] has rows of {rows} envs, this writer takes {self.shape[0]}"
                )
            raise ValueError(
                f"step[{self.key!r}] is {list(array.shape)}, the first step's was {list(self.shape)}"
            )

        return array

    def window(self, steps: int) -> Tensor:
        """Return the first ``steps`` waiting steps, env after env, ``[E * steps, *shape]``; all of them without a
        copy."""
        if steps == self.data.shape[1]:
            return self.flat
        return self.data[:, :steps].flatten(0, 1)


def _as_tensor(key: NestedKey, value: Any, num_envs: int) -> Tensor:
    """Return the first value of an entry as a tensor ``[E, ...]``; see `StagedColumn.like` for the errors."""
    try:
        first: Tensor = value
        if not isinstance(value, Tensor):
            first = torch.from_numpy(np.array(value))
    except TypeError:
        raise TypeError(f"step[{key!r}] must be a tensor or an array of numbers, got {value!r}") from None

    if not first.ndim or len(first) != num_envs:
        hint = ": add the dimension of the one env in front" if num_envs == 1 else ""
        raise ValueError(
            f"step[{key!r}] must have one row for each of the {num_envs} envs, [{num_envs}, ...], got "
            f"{list(first.shape)}{hint}"
        )
    return first


def entries(step: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[NestedKey, Any]]:
    """Yield the entries of a step by key: a mapping or a tensordict, nested or with nested keys.

    >>> [key for key, _ in entries({"action": 0, "next": {"done": True}, ("next", "reward"): 1.0})]
    ['action', ('next', 'done'), ('next', 'reward')]
    """
    if not path and not isinstance(step, (dict, Mapping, TensorDictBase)):
        raise TypeError(f"a step is a dict or a tensordict of tensors [E, ...], got {type(step).__name__}")
    for name, value in step.items():
        key = (*path, *as_tuple(name)) if path else name
        if not isinstance(value, (np.ndarray, Tensor)) and isinstance(value, (Mapping, TensorDictBase)):
            yield from entries(value, as_tuple(key))
        else:
            yield key, value


def choose_window(capacity: int, num_envs: int, window: int | None) -> int:
    """Return the number of steps per window: ``window`` or a suitable default.

    Raises:
        ValueError: ``num_envs * window`` does not divide the capacity.

    >>> choose_window(100_000, 8, None), choose_window(1000, 1, None), choose_window(2**20, 1024, None)
    (50, 50, 8)
    """
    steps, rest = divmod(capacity, num_envs)
    most = min(steps, max(_FEWEST_STEPS, min(_MOST_STEPS, _MOST_ROWS // num_envs)))

    if window is None:
        length = max((n for n in range(1, most + 1) if steps % n == 0), default=1)
        if length < min(_FEWEST_STEPS, steps):
            length = most
    else:
        length = check_whole_number("window", window)

    rows = num_envs * max(1, length)
    if rest or not steps or steps % length:
        below = capacity // rows * rows
        above = -(-capacity // rows) * rows
        nearest = f"{below} or {above}" if below else str(above)
        hint = "" if window is None else ", or change window"
        raise ValueError(
            f"a capacity of {capacity} rows is not a multiple of the {rows} rows of a window ({length} steps of "
            f"{num_envs} envs): make the storage for {nearest} rows{hint}"
        )
    return length
