"""The initial recurrent state of a policy's episodes."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.checks import check_number, check_type
from flatroll.layout.keys import NestedKey


class TensorDictPrimer:
    """Holds the initial recurrent states of episodes, by state key.

    It is not a TorchRL env transform; TorchRL's class of this name needs the env's specs. There write
    ``torchrl.envs.TensorDictPrimer({key: Unbounded(x.shape) for key, x in primer.defaults.items()},
    expand_specs=True)``, and the modules of this package run in that env.

    Args:
        primers: for each state key the value of one row, such as ``[num_layers, hidden_size]``; or an object with its
            ``shape`` and ``dtype``, such as a Gymnasium space or a spec.
        default_value: fill value of entries given by shape; or a dict with one per key. Default: 0.

    Attributes:
        defaults: for each state key the value of one row.

    Raises:
        TypeError: something in ``primers`` has no shape.
        ValueError: ``default_value`` has other keys than the shapes in ``primers``.

    >>> primer = TensorDictPrimer({"recurrent_state": torch.zeros(1, 8)})
    >>> primer.expand(3)["recurrent_state"].shape
    torch.Size([3, 1, 8])
    >>> import gymnasium as gym
    >>> space = gym.spaces.Box(-1.0, 1.0, (2,))
    >>> TensorDictPrimer({"recurrent_state": space}, default_value=0.5).defaults["recurrent_state"]
    tensor([0.5000, 0.5000])
    """

    def __init__(
        self,
        primers: Mapping[NestedKey, Any],
        *,
        default_value: float | Mapping[NestedKey, float] = 0.0,
    ) -> None:
        check_type("primers", primers, Mapping, "a dict of initial states by key")

        shaped = [key for key, value in primers.items() if not isinstance(value, Tensor)]
        if isinstance(default_value, Mapping):
            numbers = dict(default_value)
        else:
            numbers = dict.fromkeys(shaped, default_value)
        for key, start in numbers.items():
            check_number("default_value", start, hint=f"it fills primers[{key!r}]")
        if set(numbers) != set(shaped):
            raise ValueError(
                f"default_value must have a number for each of {shaped}, the primers that are not tensors, "
                f"got {list(numbers)}"
            )

        self.defaults: dict[NestedKey, Tensor] = {}
        for key, value in primers.items():
            if key in numbers:
                value = _fill(key, value, numbers[key])
            self.defaults[key] = value

    def __repr__(self) -> str:
        return f"TensorDictPrimer({ {key: tuple(value.shape) for key, value in self.defaults.items()} })"

    def expand(self, batch_size: int | Sequence[int], device: torch.device | str | None = None) -> TensorDict:
        """Return copies of the initial states for a whole batch.

        Args:
            batch_size: number of rows, or a batch shape ``[*B]``.
            device: target device; default: their own.
        """
        shape = (batch_size,) if isinstance(batch_size, int) else tuple(batch_size)
        primed = TensorDict({}, batch_size=shape, device=device)
        for key, value in self.defaults.items():
            primed.set(key, value.to(device).expand(*shape, *value.shape).clone())
        return primed


def _fill(key: NestedKey, like: Any, number: float) -> Tensor:
    """A tensor of the shape and dtype of a space or spec, filled with a number."""
    shape = getattr(like, "shape", None)
    dtype = getattr(like, "dtype", None)
    if shape is None:
        raise TypeError(f"primers[{key!r}] must be a tensor, a space or a spec, got {type(like).__name__}")

    # A NumPy dtype, as spaces have; None means torch's default.
    if dtype is not None and not isinstance(dtype, torch.dtype):
        dtype = getattr(torch, str(dtype))
    return torch.full(tuple(shape), number, dtype=dtype)
