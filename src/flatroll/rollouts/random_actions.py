"""Random actions for any action space, reproducible from a seed."""

import math
import warnings
from typing import Any

import torch
from gymnasium import spaces
from gymnasium.vector import VectorEnv
from tensordict import TensorDictBase

from flatroll.layout.checks import check_options
from flatroll.layout.keys import ACTION, ACTION_MASK, NestedKey, as_tuple
from flatroll.layout.spaces import first_options, mask_form, mask_shapes, option_counts, space_leaves
from flatroll.specs import Composite, TensorSpec, as_spec
from flatroll.specs.arithmetic import draw_masked
from flatroll.wrappers.arrays import Tree, leaves_at, to_torch

#: Actions are drawn in chunks of this many steps; a fixed size, so that the batch size does not affect the draws.
_CHUNK = 64


class RandomPolicy:
    """A policy that takes random actions, distributed as Gymnasium's ``space.sample`` draws them.

    As a collector's policy it is the same as None; its draws are reproducible from the collector's ``seed``. It
    respects an ``action_mask`` in the observation or, in a collector, in ``info``: see `RandomActions.legal`.

    Args:
        action_spec: the action space of one env or of the collecting vector env. Default: the env's.
        action_key: key under which a call with a tensordict writes the actions. Default ``"action"``.

    >>> from tensordict import TensorDict
    >>> RandomPolicy(spaces.Discrete(3))(TensorDict({}, [4]))["action"].shape
    torch.Size([4])
    """

    def __init__(self, action_spec: spaces.Space[Any] | None = None, action_key: NestedKey = ACTION) -> None:
        if action_spec is not None and not isinstance(action_spec, spaces.Space):
            raise TypeError(
                f"action_spec must be a gymnasium space, got {type(action_spec).__name__}: pass env.action_space"
            )

        self.action_spec = action_spec
        self.action_key = action_key
        self._draws: RandomActions | None = None

    def space_in(self, env: VectorEnv[Any, Any, Any]) -> spaces.Space[Any]:
        """Return the single action space that the policy draws from in this vector env."""
        if self.action_spec is None or self.action_spec == env.action_space:
            return env.single_action_space
        return self.action_spec

    def __call__(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write one action for each element of a tensordict ``[*B]``, and return the tensordict."""
        if self.action_spec is None:
            raise ValueError(
                "RandomPolicy() does not know the actions outside of a collector: pass the action space"
            )

        rows = tensordict.batch_size.numel()
        if self._draws is None or self._draws.num_envs != rows:
            self._draws = RandomActions(self.action_spec, rows, torch.device("cpu"), None)
        keys, paths = zip(*space_leaves(self.action_spec, as_tuple(self.action_key)), strict=True)
        drawn = self._draws()

        mask = tensordict.get(ACTION_MASK, None)
        if mask is not None:
            if isinstance(mask, TensorDictBase):
                mask = mask.reshape(rows).to_dict()
            else:
                mask = mask.reshape(rows, *mask.shape[tensordict.batch_dims :])
            drawn = self._draws.legal(drawn, mask)

        for key, leaf in zip(keys, leaves_at(drawn, paths), strict=True):
            action = leaf.reshape((*tensordict.batch_size, *leaf.shape[1:]))
            tensordict.set(key, action.to(tensordict.device))  # to(None) is a no-op
        return tensordict


class RandomActions:
    """Draws random actions for all envs at once, with the distributions of Gymnasium's ``space.sample``.

    Discrete, MultiDiscrete, MultiBinary and Boxes with two bounds are uniform (integer Boxes include both bounds); a
    Box with one bound is exponential, one without bounds normal.

    Args:
        space: the action space of one env.
        num_envs: E.
        device: device of the actions.
        seed: seed of the generator. None draws one from torch's global generator, so `torch.manual_seed` makes a run
            reproducible and two policies draw differently.

    >>> RandomActions(spaces.Discrete(3, start=5), 4, torch.device("cpu"), seed=0)()
    tensor([7, 5, 7, 5])
    """

    def __init__(
        self, space: spaces.Space[Any], num_envs: int, device: torch.device, seed: int | None
    ) -> None:
        self.space = space
        self.num_envs = num_envs
        self._device = device
        # Metal has no float64, which draws take, and "meta" no generator.
        place = "cpu" if device.type in ("mps", "meta") else device
        self.generator = torch.Generator(device=place)
        if seed is None:
            seed = int(torch.randint(2**62, ()).item())

        self.generator.manual_seed(seed)
        self._spec = as_spec(space, device=self.generator.device)

        #: Whether the actions are NumPy arrays.
        self.as_numpy = False
        self._chunk: Any = None
        self._steps: list[Any] = []
        self._used = _CHUNK
        self._ignored: set[tuple[int, ...]] = set()  # shapes of masks that do not fit, named in a warning
        # The first options of parts of the space on the generator's device, by their bytes: uploaded once.
        self._firsts: dict[bytes, torch.Tensor] = {}

    def seed(self, seed: int) -> None:
        """Restart the draws from this seed."""
        self.generator.manual_seed(seed)
        self._used = _CHUNK

    def __call__(self) -> Any:
        """Return the actions of the next vector step, a tree with the structure of the space."""
        if self._used == _CHUNK:
            self._chunk, self._used = self._draw(self.space, self._spec), 0
            self._steps = _unbind(self._chunk, self.as_numpy)
        self._used += 1
        return self._steps[self._used - 1]

    def _draw(self, space: Any, spec: TensorSpec) -> Any:
        """Draw actions ``[_CHUNK, E, ...]`` for a chunk of steps, a tree nested as the space is."""
        if isinstance(spec, Composite):
            if spec.of_tuple:
                names = range(len(space.spaces))
            else:
                names = space.spaces
            parts = {name: self._draw(space[name], spec[str(name)]) for name in names}
            if spec.of_tuple:
                return tuple(parts.values())
            return parts

        return spec.rand((_CHUNK, self.num_envs), generator=self.generator).to(self._device)

    def legal(self, drawn: Tree, mask: Tree) -> Tree:
        """Redraw actions uniformly among those that a mask allows.

        Discrete, MultiDiscrete and MultiBinary actions and integer Boxes with few values are choices that can be
        masked, see `flatroll.layout.spaces.option_counts`.

        Args:
            drawn: actions of the space; parts without a mask are unchanged.
            mask: True (or 1) where an action is legal: ``[E, n]`` for Discrete, ``[E, sum(nvec)]`` for MultiDiscrete
                (parts concatenated; ``[E, *shape, n]`` if all have n options), ``[E, 2 n]`` for the n flags of a
                MultiBinary (each off, on); ``[E, *nvec]`` for combinations of all choices; for a Dict or Tuple space
                a tree of masks. A mask of several dims that fits none of these is ignored, with one warning.

        Raises:
            ValueError: a mask ``[E, k]`` has another length, a tree names parts that the space lacks, or a row has no
                legal action (checked on the CPU only; on other devices such a row allows all actions).

        >>> actions = RandomActions(spaces.Discrete(3, start=5), 2, torch.device("cpu"), seed=0)
        >>> actions.legal(actions(), torch.tensor([[0, 1, 0], [1, 0, 0]]))
        tensor([6, 5])
        """
        return self._legal(self.space, drawn, mask)

    def _legal(self, space: spaces.Space[Any], drawn: Tree, mask: Tree) -> Tree:
        if isinstance(space, spaces.Dict | spaces.Tuple):
            return self._legal_parts(space, drawn, mask)
        if isinstance(mask, dict | tuple):
            raise ValueError(f"{ACTION_MASK} must be one array for {space}, got a {type(mask).__name__}")

        allowed = to_torch(mask, self.generator.device)
        counts = option_counts(space)
        if counts is None:
            form = None
        else:
            form = mask_form(counts, allowed.shape[1:])

        if counts is None or form is None:
            self._refuse_or_warn(space, tuple(allowed.shape))
            return drawn

        drawn = to_torch(drawn)
        allowed = allowed.flatten(1)
        if form == "options":
            options = check_options(ACTION_MASK, allowed, counts, each="env")
            picks = [draw_masked(part, torch.Size(), self.generator) for part in options]
        else:
            (combinations,) = check_options(ACTION_MASK, allowed, (math.prod(counts),), each="env")
            drawn_at = draw_masked(combinations, torch.Size(), self.generator)
            picks = list(torch.unravel_index(drawn_at, counts))

        numbers = first_options(space)
        first = self._firsts.get(numbers.tobytes())
        if first is None:
            first = torch.from_numpy(numbers).to(self.generator.device)
            self._firsts[numbers.tobytes()] = first
        legal = (torch.stack(picks, -1) + first).view(drawn.shape)
        return legal.to(drawn.device, drawn.dtype)

    def _legal_parts(self, space: Any, drawn: Tree, mask: Tree) -> Tree:
        """Redraw the parts of a Dict or Tuple action that have a mask."""
        names: list[Any] = list(space.spaces)
        if isinstance(space, spaces.Tuple):
            names = list(range(len(space.spaces)))
        if not isinstance(mask, dict | tuple):
            raise ValueError(
                f"{ACTION_MASK} must have one mask for each part of {space}, in a dict or tuple, got "
                f"{type(mask).__name__}"
            )

        given: dict[Any, Any] = mask if isinstance(mask, dict) else dict(enumerate(mask))
        # Gymnasium's vector envs add "_name", which tells the envs that reported "name".
        known = {*names, *map(str, names), *(f"_{name}" for name in names)}
        unknown = [name for name in given if name not in known]
        if unknown:
            raise ValueError(
                f"{ACTION_MASK} has masks for {unknown}, but the parts of the action space are {names}: name the "
                "masks as the parts"
            )

        parts = {}
        for name in names:
            own = given.get(name, given.get(str(name)))
            parts[name] = drawn[name] if own is None else self._legal(space[name], drawn[name], own)

        if isinstance(space, spaces.Dict):
            return parts
        return tuple(parts.values())

    def _refuse_or_warn(self, space: spaces.Space[Any], shape: tuple[int, ...]) -> None:
        """Raise ValueError for a mask of the wrong length; warn once about an array that is no mask of the space."""
        counts = option_counts(space)
        if counts is not None and len(shape) <= 2:
            wanted = (*shape[:1], sum(counts))
            raise ValueError(f"{ACTION_MASK} must have shape {wanted} for {space}, got {shape}")
        if shape in self._ignored:
            return

        self._ignored.add(shape)
        warnings.warn(
            f"{ACTION_MASK} has shape {shape[1:]} for each env, which is no mask of {space} (possible: "
            f"{mask_shapes(space)}), so random actions ignore it: give it one of these shapes, or another name",
            stacklevel=2,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the generator's state and the actions drawn in advance."""
        return {"generator": self.generator.get_state(), "chunk": self._chunk, "used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; the same actions follow."""
        self.generator.set_state(state["generator"])
        self._chunk, self._used = state["chunk"], state["used"]
        if self._chunk is None:
            self._steps = []
        else:
            self._steps = _unbind(self._chunk, self.as_numpy)


def _unbind(chunk: Tree, as_numpy: bool) -> list[Tree]:
    """Split a chunk into the actions of each step, as trees."""
    if isinstance(chunk, dict):
        parts = {key: _unbind(child, as_numpy) for key, child in chunk.items()}
        return [{key: part[i] for key, part in parts.items()} for i in range(_CHUNK)]
    if isinstance(chunk, tuple):
        return list(zip(*(_unbind(child, as_numpy) for child in chunk), strict=True))

    if as_numpy:
        rows = chunk.numpy()
    else:
        rows = chunk.unbind()
    return list(rows)
