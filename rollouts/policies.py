"""Policies: a tensordict module, any callable from observation to action, or None, behind one call."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.layout.fast_call import acted
from flatroll.layout.keys import ACTION, NEXT, NestedKey, as_tuple, next_key
from flatroll.rollouts.batch_columns import plain_key
from flatroll.wrappers.primers import recurrent_states

Columns = dict[NestedKey, Tensor]
#: From (the columns a policy may read, made when asked; the observation tree) to (action, further columns).
Act = Callable[[Callable[[], Columns], Any], tuple[Any, Columns]]


def as_act(
    policy: Any,
    space: spaces.Space[Any],
    num_envs: int,
    env_device: torch.device,
    *,
    device: torch.device | str | None = None,
    blocking: bool = True,
    recurrent: bool = True,
    primed: Mapping[NestedKey, Tensor] | None = None,
) -> "CallablePolicy | ModulePolicy":
    """A tensordict module, or any callable from observation to action, as one function: an `Act`.

    Args:
        policy: the policy.
        space: the action space of one env.
        num_envs: E.
        env_device: where the env's arrays live, and so the columns.
        device: where the policy wants its input. Default: there too.
        blocking: wait for copies between devices.
        recurrent: wire the recurrent states that the policy declares.
        primed: states that the env's stack declares (`RecurrentPrimer`), for a policy that does not say.

    Raises:
        TypeError: the policy is neither.
    """
    apart = None if device is None or torch.device(device) == env_device else torch.device(device)
    if is_tensordict_module(policy):
        return ModulePolicy(policy, space, num_envs, apart, env_device, blocking, recurrent, primed)
    if callable(policy):
        return CallablePolicy(policy, space, apart, blocking)
    raise TypeError(
        "policy must be a tensordict module, a callable from observation to action, or None, got "
        f"{type(policy).__name__}"
    )


class CallablePolicy:
    """A module or function from the observation (a tensor, or a dict or tuple of them) to the action.

    Args:
        policy: the callable.
        space: the action space of one env.
        device: where it wants the observation; None leaves it.
        blocking: wait for copies between devices.
    """

    def __init__(
        self, policy: Any, space: spaces.Space[Any], device: torch.device | None, blocking: bool
    ) -> None:
        self._policy = policy
        self._one_action = not isinstance(space, spaces.Dict | spaces.Tuple)
        self._device = device
        self._blocking = blocking
        self.defaults: Columns = {}
        self.writes: list[NestedKey] = []

    def __call__(self, columns: Callable[[], Columns], obs: Any) -> tuple[Any, Columns]:
        if self._device is not None:
            obs = _moved(obs, self._device, self._blocking)
        action = self._policy(obs)
        if action is None or (self._one_action and isinstance(action, (tuple, dict, TensorDictBase))):
            raise _no_action(self._policy, type(action).__name__)
        return action, {}


class ModulePolicy:
    """A tensordict module: reads and writes a tensordict of batch size ``[E]``.

    It is given the observation, the markers, the chosen info entries and its recurrent states. What it
    writes under its ``out_keys`` besides ``"action"`` becomes columns of the batch; names that begin with
    ``_`` do not.

    Args:
        policy: the module, with ``in_keys`` and ``out_keys``.
        space: the action space of one env.
        num_envs: E.
        device: where it wants its input; None leaves it.
        env_device: where the env's arrays live, and so the columns.
        blocking: wait for copies between devices.
        recurrent: read the recurrent states it declares (``make_tensordict_primer``).
        primed: further states; those that it does not write under ``"next"`` are left out.

    Raises:
        ValueError: the module declares a state and does not write its ``("next", key)``.
    """

    def __init__(
        self,
        policy: Any,
        space: spaces.Space[Any],
        num_envs: int,
        device: torch.device | None,
        env_device: torch.device,
        blocking: bool,
        recurrent: bool = True,
        primed: Mapping[NestedKey, Tensor] | None = None,
    ) -> None:
        self._policy = policy
        self._space = space
        self._num_envs = num_envs
        self._device = device
        self._env_device = env_device
        self._blocking = blocking
        states = recurrent_states(policy) if recurrent else {}
        self.defaults: Columns = {key: value.to(env_device) for key, value in states.items()}
        #: The columns it may write.
        self.writes: list[NestedKey] = [
            key
            for key in dict.fromkeys(policy.out_keys)
            if as_tuple(key)[0] != ACTION and not as_tuple(key)[-1].startswith("_")
        ]
        for key in self.defaults:
            if next_key(key) not in map(as_tuple, self.writes):
                raise ValueError(
                    f"the policy declares the recurrent state {key!r} (make_tensordict_primer) but does not keep "
                    f"{next_key(key)!r} among its out_keys {list(policy.out_keys)}: it would forget at every step. "
                    f"Keep it: select_out_keys(..., {next_key(key)!r}); names that begin with '_' are not kept"
                )
        self.prime(primed if recurrent and primed else {})
        self._written: list[NestedKey] | None = None  # those of them that it does write

    def prime(self, states: Mapping[NestedKey, Tensor]) -> None:
        """Read these states too, as far as the policy writes them under ``"next"`` and did not declare them."""
        written = set(map(as_tuple, self.writes))
        for key, value in states.items():
            if next_key(key) in written:
                self.defaults.setdefault(key, value.to(self._env_device))

    def __call__(self, columns: Callable[[], Columns], obs: Any) -> tuple[Any, Columns]:
        data = TensorDict(_nested(columns()), batch_size=[self._num_envs])
        if self._device is not None:
            data = data.to(self._device, non_blocking=not self._blocking)
        out = acted(self._policy, data)
        if not isinstance(out, TensorDictBase):
            raise _no_action(self._policy, type(out).__name__)
        action = out.get(ACTION, None)
        if action is None:
            raise _no_action(self._policy, f"entries {sorted(map(str, out.keys(True, True)))}")
        if self._written is None:
            self._written = [key for key in self.writes if out.get(key, None) is not None]
        # A key that is there once and missing later is a KeyError here.
        written = {
            key: out[key].to(self._env_device, non_blocking=not self._blocking) for key in self._written
        }
        for key in self.defaults:  # what the step started from, in first rows too
            used = data.get(key) if (own := out.get(key, None)) is None else own
            written[key] = used.to(self._env_device, non_blocking=not self._blocking)
        if isinstance(action, TensorDictBase):
            action = _tuples(self._space, action.to_dict())
        return action, written


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
    return plain_key(names[1:])


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


def _tuples(space: spaces.Space[Any], tree: Any) -> Any:
    """A tree of dicts with tuples where the space has them (a tensordict names their parts "0", "1", ...)."""
    if isinstance(tree, dict) and isinstance(space, spaces.Tuple):
        parts = enumerate(space.spaces)
        return tuple(_tuples(child, tree[str(i)]) for i, child in parts if str(i) in tree)
    if isinstance(tree, dict) and isinstance(space, spaces.Dict):
        return {key: _tuples(space.spaces.get(key, space), child) for key, child in tree.items()}
    return tree


def _no_action(policy: Any, came: str) -> TypeError:
    name = getattr(policy, "__name__", type(policy).__name__)
    return TypeError(
        f"policy {name} returned no action: expected a tensor with one row for each env (a tensordict module: "
        f"a tensordict with an 'action' entry), got {came}"
    )
