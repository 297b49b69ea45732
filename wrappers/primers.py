"""Recurrent states on the side of the env: what a policy's episodes start from."""

from collections.abc import Iterator
from typing import Any

import torch
from gymnasium.vector import VectorEnv
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn

from flatroll.layout.keys import NestedKey, as_tuple
from flatroll.wrappers.arrays import Array, Tree
from flatroll.wrappers.as_vector_env import as_vector_env
from flatroll.wrappers.markers import InitTracker, MarkerWrapper, StepResult, find_wrapper

States = dict[NestedKey, Tensor]


def recurrent_states(policy: Any) -> States:
    """The states that the recurrent parts of ``policy`` declare: the value of one row at an episode's start, by key.

    A recurrent part has ``make_tensordict_primer()``. Empty for a policy without one.

    Raises:
        TypeError: a part draws the state that episodes start from, so that it could not be computed again.
        ValueError: two parts declare one state with different values, or two modules of one sequence declare the
            same one.

    >>> recurrent_states(nn.Linear(2, 2))
    {}
    """
    parts = policy.modules() if isinstance(policy, nn.Module) else (policy,)
    in_order = set(_steps(policy)) if isinstance(policy, nn.Module) else set()
    states: States = {}
    owners: dict[NestedKey, Any] = {}
    for part in parts:
        if not hasattr(part, "make_tensordict_primer"):
            continue
        primer: Any = part.make_tensordict_primer  # any object may have one, not only nn.Module
        for key, value in _defaults(primer()):
            _check_same(key, states.get(key), value)
            states[key] = value
            if part in in_order and owners.setdefault(key, part) is not part:
                raise ValueError(
                    f"two modules of the policy keep their recurrent state under {key!r}: each would go on from what "
                    "the other one left. Give each state keys of its own (in_keys, out_keys)"
                )
    return states


def _steps(module: nn.Module) -> Iterator[nn.Module]:
    """The modules of a sequence of tensordict modules, in order."""
    if isinstance(module, TensorDictSequential):
        for part in module.module.children():
            yield from _steps(part)
    else:
        yield module


def _defaults(primer: Any) -> Iterator[tuple[NestedKey, Tensor]]:
    """Our primers have ``defaults``; torchrl's a spec for each key and one number, or one for each key."""
    if hasattr(primer, "defaults"):
        yield from primer.defaults.items()
        return
    for key in primer.primers.keys(True, True):
        default, spec = primer.default_value, primer.primers[key]
        value = default.get(key, 0.0) if hasattr(default, "get") else default
        if primer.random or callable(value):
            raise TypeError(
                f"the recurrent state {key!r} must start from fixed values, and its primer draws them: give the "
                "primer a default_value"
            )
        yield key, torch.as_tensor(value, dtype=spec.dtype).expand(spec.shape).clone()


def _check_same(key: NestedKey, there: Tensor | None, value: Tensor) -> None:
    """Refuse a second, different value of one state."""
    if there is None:
        return
    if there.shape != value.shape or not torch.equal(there.to(value), value):
        raise ValueError(
            f"the recurrent state {key!r} is declared twice: {tuple(there.shape)} and {tuple(value.shape)} per row, "
            "or with other values: give each recurrent module state keys of its own (in_keys, out_keys)"
        )


class RecurrentPrimer(MarkerWrapper):
    """Adds the states that a policy's episodes start from to the ``info`` of each reset, one row for each env.

    A state under a nested key stands in dicts: ``info["agent"]["h"]`` for ``("agent", "h")``.

    For loops written by hand: the first step reads its states there, and every later one the states that the policy
    wrote under ``"next"``; recurrent modules restart them by themselves where ``is_init`` is set. A collector keeps
    the states itself, and takes what they start from here if its policy does not say.
    `set_recurrent_primers_from` adds this wrapper.

    Args:
        env: anything `as_vector_env` takes.
        policy: a policy with recurrent parts.

    Raises:
        ValueError: the policy has none.
    """

    def __init__(self, env: Any, policy: Any) -> None:
        states = recurrent_states(policy)
        if not states:
            raise ValueError("policy has no recurrent part: no module of it has make_tensordict_primer()")
        super().__init__(env, next(iter(states)))
        self.states = states

    def _on_reset(self, obs: Tree, info: dict[str, Any], rows: Array) -> None:
        device = self.stream.capabilities.device
        for key, value in self.states.items():
            primed = value.to(device).expand(self.num_envs, *value.shape).clone()
            *parents, name = as_tuple(key)
            place = info
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = primed

    def step(self, actions: Tree) -> StepResult:
        """Step; the states go from the policy to itself."""
        result: StepResult = self.env.step(actions)
        return result


def set_recurrent_primers_from(env: Any, policy: Any) -> VectorEnv[Any, Any, Any]:
    """Give ``env`` what the recurrent parts of ``policy`` need: ``is_init``, and the states that episodes start from.

    Asked again it changes nothing; so it does for a policy without recurrent parts.

    Args:
        env: anything `as_vector_env` takes, or a stack of wrappers around it.
        policy: a module, or an object with ``make_tensordict_primer()``.

    Returns:
        The env, adapted, with an InitTracker and a `RecurrentPrimer` in its stack where they were missing.

    Raises:
        TypeError, ValueError: see `recurrent_states`; the stack has a state of that key that starts otherwise.

    >>> import gymnasium as gym
    >>> class Memory(nn.Module):
    ...     def make_tensordict_primer(self):
    ...         from types import SimpleNamespace
    ...         return SimpleNamespace(defaults={"state": torch.zeros(5)})
    >>> env = set_recurrent_primers_from(gym.make_vec("CartPole-v1", num_envs=2), Memory())
    >>> obs, info = env.reset(seed=0)
    >>> info["is_init"], info["state"].shape, set_recurrent_primers_from(env, Memory()) is env
    (array([ True,  True]), torch.Size([2, 5]), True)
    """
    adapted: VectorEnv[Any, Any, Any] = as_vector_env(env)
    states = recurrent_states(policy)
    if states and find_wrapper(adapted, InitTracker) is None:
        adapted = InitTracker(adapted)
    primer = find_wrapper(adapted, RecurrentPrimer)
    if primer is None:
        return RecurrentPrimer(adapted, policy) if states else adapted
    for key, value in states.items():
        _check_same(key, primer.states.get(key), value)
    primer.states |= states
    return adapted
