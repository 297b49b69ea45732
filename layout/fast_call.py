"""Networks and policies called without what tensordict does around each call, which costs more than a small network.

A :class:`~tensordict.nn.TensorDictModule` that is nothing but a function of tensors is called as that function. All
others (a subclass, hooks, arguments by name, ``skip_existing``, inside ``torch.compile``) are called as ever.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    set_interaction_type,
    skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.nn.modules import module as of_torch

from flatroll.layout.keys import NestedKey, as_tuple

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_OF_ALL = tuple(getattr(of_torch, f"_global{name}", {}) for name in _HOOKS)
#: What a TensorDictModule holds if it does nothing but call its module.
_PLAIN: dict[str, Any] = {
    "_kwargs": None,
    "method": None,
    "method_kwargs": {},
    "_get_kwargs": {},
    "inplace": True,
}
_PLAIN_SEQUENCE: dict[str, Any] = {"partial_tolerant": False, "inplace": None}
_PLAIN_ACTOR: dict[str, Any] = {"partial_tolerant": False, "return_composite": False}
_SAMPLING: dict[str, Any] = {"inplace": None, "_requires_sample": True}
_WRITING_ALL = _PLAIN_SEQUENCE | {"_select_before_return": False}


def through(network: TensorDictModuleBase, batch: TensorDictBase) -> TensorDictBase:
    """``network(batch)``: the batch, into which the network has written.

    >>> net = TensorDictModule(torch.nn.Identity(), in_keys=["a"], out_keys=["b"])
    >>> through(net, TensorDict({"a": torch.ones(2)}, [2]))["b"]
    tensor([1., 1.])
    """
    found = _outputs(network, batch)
    if found is not None:
        for key, value in found:
            if key != "_":
                batch.set(key, value if isinstance(value, Tensor) else TensorDict.from_any(value))
        return batch
    if type(network) is TensorDictSequential and _unadorned(network, _WRITING_ALL):
        return _in_turn(parts_of(network), batch)
    out: TensorDictBase = network(batch)
    return out


def acted(policy: Any, batch: TensorDictBase) -> Any:
    """``policy(batch)`` for a batch that is the caller's own: it may keep entries that the policy does not select."""
    if type(policy) is TensorDictSequential and _unadorned(policy, _PLAIN_SEQUENCE):
        return _in_turn(parts_of(policy), batch)
    if type(policy) is ProbabilisticTensorDictSequential and _unadorned(policy, _SAMPLING):
        ready = before_sampling(policy, batch)
        if ready is not None:
            last, batch = ready
            return last(batch)
    return through(policy, batch)


def before_sampling(
    actor: TensorDictModuleBase, batch: TensorDictBase
) -> tuple[ProbabilisticTensorDictModule, TensorDictBase] | None:
    """All parts of an actor but the last, which samples: that part, and the batch they have written into.

    None, and nothing is done: the actor is not such a sequence, or it samples in other parts, too.
    """
    if type(actor) is not ProbabilisticTensorDictSequential or not _unadorned(actor, _PLAIN_ACTOR):
        return None
    *parts, last = parts_of(actor)
    drawn = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
    if not isinstance(last, ProbabilisticTensorDictModule) or any(isinstance(part, drawn) for part in parts):
        return None
    with set_interaction_type(interaction_type() or last.default_interaction_type):
        return last, _in_turn(parts, batch)


def written(network: TensorDictModuleBase, batch: TensorDictBase, key: NestedKey) -> Tensor | None:
    """What the network writes under ``key``; the batch is left as it is. None: it does not write it."""
    if not writes(network, key):
        return None  # what the batch holds there is another's
    if len(network.out_keys) == 1:
        found = _outputs(network, batch)
        if found is not None and isinstance(found[0][1], Tensor):
            return found[0][1]
    value: Tensor | None = through(network, batch.copy()).get(key, None)
    return value


def writes(network: TensorDictModuleBase, key: NestedKey) -> bool:
    """Whether ``key`` is one of the network's out_keys."""
    return as_tuple(key) in {as_tuple(name) for name in cast(list[Any], network.out_keys)}


def parts_of(sequence: Any) -> list[Any]:
    """The modules of a sequence, in order."""
    held = sequence.module
    return list(held.values() if isinstance(held, nn.ModuleDict) else held)


def _in_turn(parts: list[Any], batch: TensorDictBase) -> TensorDictBase:
    for part in parts:
        batch = through(part, batch)
    return batch


def _unadorned(network: TensorDictModuleBase, plain: Mapping[str, Any]) -> bool:
    """Whether calling the network calls its ``forward`` and nothing else, and its attributes are plain."""
    if torch.compiler.is_compiling() or skip_existing() or any(_OF_ALL):
        return False
    own = network.__dict__
    if own.get("_compiled_call_impl") is not None or any(own[name] for name in _HOOKS):
        return False
    return all(own.get(name, value) == value for name, value in plain.items())


def _outputs(network: TensorDictModuleBase, batch: TensorDictBase) -> list[tuple[NestedKey, Any]] | None:
    """What the network's function returns, each with its key; None if the network is more than a function."""
    if type(network) is not TensorDictModule or not _unadorned(network, _PLAIN):
        return None
    inputs = [batch.get(key, None) for key in cast(list[Any], network.in_keys)]
    if not all(isinstance(column, Tensor) for column in inputs):
        return None
    try:
        out = network.module(*inputs)
    except Exception as error:
        error.add_note(f"In the network with in_keys {network.in_keys} and out_keys {network.out_keys}")
        raise
    keys = cast(list[Any], network.out_keys)
    if isinstance(out, (dict, TensorDictBase)) and all(key in out for key in keys):
        out = tuple(out[key] for key in keys)
    elif not isinstance(out, tuple):
        out = () if out is None else (out,)
    if len(out) != len(keys):
        raise ValueError(f"a network with out_keys {keys} returned {len(out)} tensors: give each a key")
    return list(zip(keys, out, strict=True))
