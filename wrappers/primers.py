"""Collects the initial recurrent states that the modules of a policy declare."""

from collections.abc import Iterator
from typing import Any

import torch
from tensordict.nn import TensorDictSequential
from torch import Tensor, nn

from flatroll.layout.keys import NestedKey

States = dict[NestedKey, Tensor]


def recurrent_states(policy: Any) -> States:
    """Return the initial recurrent states of one env that ``policy``'s modules declare, by key.

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
            check_same(key, states.get(key), value)
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


def check_same(key: NestedKey, known: Tensor | None, value: Tensor) -> None:
    """Raise ValueError if a state is declared twice with different initial values."""
    if known is None:
        return
    if known.shape != value.shape or not torch.equal(known.to(value), value):
        raise ValueError(
            f"the recurrent state {key!r} is declared twice: {tuple(known.shape)} and {tuple(value.shape)} per row, "
            "or with other values: give each recurrent module state keys of its own (in_keys, out_keys)"
        )
