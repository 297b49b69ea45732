"""Policies: a tensordict module, any callable from observation to action, or None, behind one call."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor, nn

from flatroll.layout.keys import ACTION, NEXT, NestedKey, as_tuple

#: Random actions are drawn in chunks of so many steps; a fixed size, so that windows change no draw.
_CHUNK = 64

Columns = dict[NestedKey, Tensor]


class RandomPolicy:
    """Uniform actions from the action space (normal where a Box has no bounds), reproducible from a seed."""

    def __init__(
        self, space: spaces.Space[Any], num_envs: int, device: torch.device, seed: int | None
    ) -> None:
        self._space = space
        self._num_envs = num_envs
        self._device = device
        self.generator = torch.Generator(device=device if device.type == "cuda" else "cpu")
        if seed is None:
            # torch.manual_seed reproduces the run, and two collectors do not draw alike.
            seed = int(torch.randint(2**62, ()).item())
        self.generator.manual_seed(seed)
        self._chunk: Any = None
        self._used = _CHUNK

    def __call__(self) -> Any:
        if self._used == _CHUNK:
            self._chunk, self._used = self._draw(self._space), 0
        self._used += 1
        return _at(self._chunk, self._used - 1)

    def state_dict(self) -> dict[str, Any]:
        """The random state and the actions drawn ahead."""
        return {"generator": self.generator.get_state(), "chunk": self._chunk, "used": self._used}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on drawing where `state_dict` was taken."""
        self.generator.set_state(state["generator"])
        self._chunk, self._used = state["chunk"], state["used"]

    def _draw(self, space: spaces.Space[Any]) -> Any:
        if isinstance(space, spaces.Dict):
            return {key: self._draw(child) for key, child in space.spaces.items()}
        if isinstance(space, spaces.Tuple):
            return tuple(self._draw(child) for child in space.spaces)
        assert space.shape is not None
        shape = (_CHUNK, self._num_envs, *space.shape)
        if isinstance(space, spaces.Discrete):
            return self._integers(int(space.n), shape) + int(space.start)
        if isinstance(space, spaces.MultiBinary):
            return self._integers(2, shape).to(torch.int8)
        if isinstance(space, spaces.MultiDiscrete):
            sizes = torch.from_numpy(space.nvec).to(self._device)
            return (self._uniform(shape) * sizes).long() + torch.from_numpy(space.start).to(self._device)
        assert isinstance(space, spaces.Box)
        low, high = (
            torch.from_numpy(space.low).to(self._device),
            torch.from_numpy(space.high).to(self._device),
        )
        bounded = torch.from_numpy(space.bounded_below & space.bounded_above).to(self._device)
        uniform = torch.where(bounded, low + self._uniform(shape) * (high - low), 0.0)
        if not low.is_floating_point():
            return uniform.floor().to(low.dtype)
        normal = torch.randn(shape, generator=self.generator, device=self.generator.device).to(self._device)
        return torch.where(bounded, uniform, normal.clamp(low, high)).to(low.dtype)

    def _uniform(self, shape: tuple[int, ...]) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.generator.device).to(self._device)

    def _integers(self, n: int, shape: tuple[int, ...]) -> Tensor:
        return torch.randint(n, shape, generator=self.generator, device=self.generator.device).to(
            self._device
        )


def _at(chunk: Any, i: int) -> Any:
    if isinstance(chunk, dict):
        return {key: _at(child, i) for key, child in chunk.items()}
    if isinstance(chunk, tuple):
        return tuple(_at(child, i) for child in chunk)
    return chunk[i]


class CallablePolicy:
    """A module or function from the observation (a tensor, or a dict of tensors) to the action.

    Args:
        policy: the callable.
        device: where it wants the observation; None leaves it.
        blocking: wait for copies between devices.
    """

    def __init__(self, policy: Any, device: torch.device | None, blocking: bool) -> None:
        self._policy = policy
        self._device = device
        self._blocking = blocking
        self.defaults: Columns = {}

    def __call__(self, columns: Callable[[], Columns], obs: Any) -> tuple[Any, Columns]:
        if self._device is not None:
            obs = _moved(obs, self._device, self._blocking)
        action = self._policy(obs)
        if action is None or (isinstance(action, tuple) and action and not _is_array(action[0])):
            raise _no_action(self._policy, type(action).__name__)
        return action, {}


class ModulePolicy:
    """A tensordict module: reads and writes a tensordict of batch size ``[E]``.

    It is given the observation, the markers, the chosen info entries and its recurrent states. What it
    writes besides ``"action"`` becomes columns of the batch.

    Args:
        policy: the module, with ``in_keys`` and ``out_keys``.
        num_envs: E.
        device: where it wants its input; None leaves it.
        env_device: where the env's arrays live, and so the columns.
        blocking: wait for copies between devices.
        recurrent: read the recurrent states it declares (``make_tensordict_primer``).
    """

    def __init__(
        self,
        policy: Any,
        num_envs: int,
        device: torch.device | None,
        env_device: torch.device,
        blocking: bool,
        recurrent: bool = True,
    ) -> None:
        self._policy = policy
        self._num_envs = num_envs
        self._device = device
        self._env_device = env_device
        self._blocking = blocking
        self._action_keys: list[NestedKey] | None = None
        self.defaults: Columns = dict(_recurrent_defaults(policy)) if recurrent else {}
        self.defaults = {key: value.to(env_device) for key, value in self.defaults.items()}

    def __call__(self, columns: Callable[[], Columns], obs: Any) -> tuple[Any, Columns]:
        data = TensorDict(_nested(columns()), batch_size=[self._num_envs])
        if self._device is not None:
            data = data.to(self._device, non_blocking=not self._blocking)
        out = self._policy(data)
        written: Columns = {}
        for key in self._policy.out_keys:
            value = out.get(key, None)
            if value is not None and not as_tuple(key)[-1].startswith("_"):
                written[key] = value.to(self._env_device, non_blocking=not self._blocking)
        action = out.get(ACTION, None)
        if action is None:
            raise _no_action(self._policy, f"entries {sorted(map(str, out.keys(True, True)))}")
        for key in [key for key in written if as_tuple(key)[0] == ACTION]:
            del written[key]
        return (action.to_dict() if hasattr(action, "to_dict") else action), written


def _recurrent_defaults(policy: Any) -> Iterator[tuple[NestedKey, Tensor]]:
    """The states that the recurrent parts of a policy declare, with their values at an episode's start."""
    parts = policy.modules() if isinstance(policy, nn.Module) else (policy,)
    for part in parts:
        if hasattr(part, "make_tensordict_primer"):
            primer: Any = part.make_tensordict_primer  # any object may have one, not only nn.Module
            yield from primer().defaults.items()


def is_tensordict_module(policy: Any) -> bool:
    """Whether the policy reads and writes tensordicts."""
    return hasattr(policy, "in_keys") and hasattr(policy, "out_keys")


def state_key(key: NestedKey) -> NestedKey | None:
    """The root key of a ``("next", key)`` output, or None for an output of this step.

    >>> state_key(("next", "recurrent_state")), state_key("logits")
    ('recurrent_state', None)
    """
    names = as_tuple(key)
    if names[0] != NEXT:
        return None
    return names[1] if len(names) == 2 else names[1:]


def _nested(columns: Columns) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in columns.items():
        *parents, name = as_tuple(key)
        place = out
        for parent in parents:
            place = place.setdefault(parent, {})
        place[name] = value
    return out


def _moved(obs: Any, device: torch.device, blocking: bool) -> Any:
    if isinstance(obs, dict):
        return {key: _moved(value, device, blocking) for key, value in obs.items()}
    if isinstance(obs, tuple):
        return tuple(_moved(value, device, blocking) for value in obs)
    return obs.to(device, non_blocking=not blocking)


def _is_array(value: Any) -> bool:
    return hasattr(value, "shape") or isinstance(value, (int, float, list, tuple, dict))


def _no_action(policy: Any, came: str) -> TypeError:
    return TypeError(
        f"policy {type(policy).__name__} returned no action: expected a tensor with one row for each env, or a "
        f"tensordict with an 'action' entry, got {came}"
    )
