"""Random actions for any action space, reproducible from a seed."""

from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor

#: Actions are drawn in chunks of so many steps; a fixed size, so that windows change no draw.
_CHUNK = 64


class RandomPolicy:
    """Draws random actions for all envs at once, with the distributions of Gymnasium's ``space.sample``.

    Discrete, MultiDiscrete, MultiBinary and Boxes with two bounds are uniform (integer Boxes with both ends);
    a Box with one bound is exponential from there, one without bounds normal.

    Args:
        space: the action space of one env.
        num_envs: E.
        device: where the actions go.
        seed: of the generator. None draws one from torch's global generator, so that `torch.manual_seed`
            reproduces a run and two policies do not draw alike.

    >>> RandomPolicy(spaces.Discrete(3, start=5), 4, torch.device("cpu"), seed=0)()
    tensor([7, 5, 7, 5])
    """

    def __init__(
        self, space: spaces.Space[Any], num_envs: int, device: torch.device, seed: int | None
    ) -> None:
        self._space = space
        self._num_envs = num_envs
        self._device = device
        self.generator = torch.Generator(device=device if device.type == "cuda" else "cpu")
        self.generator.manual_seed(int(torch.randint(2**62, ()).item()) if seed is None else seed)
        self._drawing: dict[str, Any] = {"generator": self.generator, "device": self.generator.device}
        self._chunk: Any = None
        self._steps: list[Any] = []
        self._used = _CHUNK

    def __call__(self) -> Any:
        """The actions of the next vector step, a tree as the space is."""
        if self._used == _CHUNK:
            self._chunk, self._used = self._draw(self._space), 0
            self._steps = _unbound(self._chunk)
        self._used += 1
        return self._steps[self._used - 1]

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state and the actions drawn in advance."""
        return {"generator": self.generator.get_state(), "chunk": self._chunk, "used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, so that the same actions follow."""
        self.generator.set_state(state["generator"])
        self._chunk, self._used = state["chunk"], state["used"]
        self._steps = [] if self._chunk is None else _unbound(self._chunk)

    def _draw(self, space: spaces.Space[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._draw(child) for key, child in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._draw(child) for child in space.spaces)
        assert space.shape is not None and space.dtype is not None
        shape = (_CHUNK, self._num_envs, *space.shape)
        if isinstance(space, spaces.Discrete):
            drawn = torch.randint(int(space.n), shape, **self._drawing) + int(space.start)
        elif isinstance(space, spaces.MultiBinary):
            drawn = torch.randint(2, shape, **self._drawing)
        elif isinstance(space, spaces.MultiDiscrete):
            uniform = torch.rand(shape, **self._drawing, dtype=torch.float64)
            drawn = (uniform * self._here(space.nvec)).floor() + self._here(space.start)
        else:
            assert isinstance(space, spaces.Box)
            drawn = self._box(space, shape)
        return drawn.to(dtype=torch.from_numpy(np.zeros(0, space.dtype)).dtype, device=self._device)

    def _box(self, space: spaces.Box, shape: tuple[int, ...]) -> Tensor:
        """In float64, so that the widest bounds of narrower dtypes do not overflow."""
        low, high = self._here(space.low), self._here(space.high)
        below, above = self._here(space.bounded_below) > 0, self._here(space.bounded_above) > 0
        whole = np.issubdtype(space.dtype, np.integer)
        uniform = torch.rand(shape, **self._drawing, dtype=torch.float64)
        # Weighted ends, not low + (high - low) * u, which overflows for the widest bounds. Whole numbers reach high
        # because the floor is taken below one more.
        drawn = torch.where(below & above, low * (1 - uniform) + (high + int(whole)) * uniform, 0.0)
        if not bool((below & above).all()):
            away = -torch.log1p(-uniform)  # exponential with mean 1
            drawn = torch.where(below & ~above, low + away, drawn)
            drawn = torch.where(above & ~below, high - away, drawn)
            normal = torch.randn(shape, **self._drawing)
            drawn = torch.where(below | above, drawn, normal.double())
        return (drawn.floor() if whole else drawn).clamp(low, high)

    def _here(self, bounds: Any) -> Tensor:
        return torch.from_numpy(np.asarray(bounds, np.float64)).to(self.generator.device)


def _unbound(chunk: Any) -> list[Any]:
    """The actions of each step of a chunk, as trees."""
    if isinstance(chunk, dict):
        parts = {key: _unbound(child) for key, child in chunk.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(_CHUNK)]
    if isinstance(chunk, tuple):
        return list(zip(*map(_unbound, chunk), strict=True))
    return list(chunk.unbind())
