"""The private parts of tensordict that flatroll reads, all in this file, each with the public way as a fall-back.

Measured with tensordict 0.14.3, one core: :func:`nest` takes 3 µs of the 15 that the public constructor takes for six
columns, :func:`get_entry` 0.3 µs of 1.3 to 2.4, and a call of the function that :func:`plain_function` returns 60 to
90 µs less than a call of its module. A small network's update takes a millisecond.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictModuleBase,
    TensorDictSequential,
    skip_existing,
)
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from flatroll.layout.keys import NestedKey

#: Whether the private ways are taken: both are there. The tests also run with False.
USES_PRIVATES = hasattr(TensorDict, "_new_unsafe") and isinstance(
    getattr(TensorDict({}), "_tensordict", None), dict
)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
#: Hooks on every module of the process.
_GLOBAL_HOOKS = tuple(getattr(torch_module, f"_global{name}", {}) for name in _HOOKS)
# The attributes of a module that does nothing but call its function, or its parts in turn. A version of tensordict
# that names them otherwise has no plain modules: all are called.
_PLAIN_MODULE: dict[str, Any] = {
    "_kwargs": None,
    "method": None,
    "method_kwargs": {},
    "_get_kwargs": {},
    "inplace": True,
}
_PLAIN_SEQUENCE: dict[str, Any] = {"partial_tolerant": False, "inplace": None}
_SELECTING_NOTHING = _PLAIN_SEQUENCE | {"_select_before_return": False}
_PLAIN_ACTOR: dict[str, Any] = {"partial_tolerant": False, "return_composite": False}
_SAMPLING_ACTOR: dict[str, Any] = {"inplace": None, "_requires_sample": True}


def nest(
    columns: Mapping[NestedKey, Tensor] | Mapping[str, Tensor], *rows: int, device: torch.device | None = None
) -> TensorDict:
    """Build a tensordict ``[*rows]`` from columns with nested keys; nothing is checked.

    >>> nest({"a": torch.zeros(2), ("next", "a"): torch.ones(2)}, 2)["next", "a"]
    tensor([1., 1.])
    """
    tree: dict[str, Any] = {}
    for key, value in columns.items():
        place = tree
        if not isinstance(key, str):
            for parent in key[:-1]:
                place = place.setdefault(parent, {})
            key = key[-1]
        place[key] = value
    make = TensorDict._new_unsafe if USES_PRIVATES else TensorDict
    return make(tree, batch_size=torch.Size(rows), device=device)


def get_entry(batch: TensorDictBase, key: NestedKey) -> Any:
    """Return ``batch.get(key, None)``.

    >>> batch = TensorDict({"next": {"reward": torch.ones(2)}}, [2])
    >>> get_entry(batch, ("next", "reward")), get_entry(batch, ("next", "done"))
    (tensor([1., 1.]), None)
    """
    place: Any = batch
    for name in (key,) if type(key) is str else key:
        if type(place) is not TensorDict or not USES_PRIVATES:
            return None if place is None else batch.get(key, None)
        place = place._tensordict.get(name)
    return place if place is None or isinstance(place, Tensor) else batch.get(key, None)


def plain_function(network: TensorDictModuleBase) -> Callable[..., Any] | None:
    """Return the function of a module that does nothing but call it on its inputs; None of any other module."""
    if type(network) is not TensorDictModule or not _is_plain(network, _PLAIN_MODULE):
        return None
    own = network.__dict__  # network.module takes longer than all else here
    function: Callable[..., Any] = own["module"] if "module" in own else own["_modules"]["module"]
    return function


def plain_parts(network: object, *, keep_all: bool = False) -> list[TensorDictModuleBase] | None:
    """Return the parts of a sequence that does nothing but call them in turn; None of any other module.

    With ``keep_all``, a sequence that selects some of its outputs counts, too, as if it did not.
    """
    if type(network) is TensorDictSequential:
        return _parts_if(network, _PLAIN_SEQUENCE if keep_all else _SELECTING_NOTHING)
    return None


def plain_actor_parts(network: object, *, samples: bool = False) -> list[TensorDictModuleBase] | None:
    """Return the parts of a plain actor, the sampling one last; None of any other module.

    With ``samples``, the actor must draw an action when it is called.
    """
    if type(network) is not ProbabilisticTensorDictSequential:
        return None
    return _parts_if(network, _PLAIN_ACTOR | _SAMPLING_ACTOR if samples else _PLAIN_ACTOR)


def _parts_if(network: TensorDictModuleBase, plain: Mapping[str, Any]) -> list[TensorDictModuleBase] | None:
    if not _is_plain(network, plain):
        return None
    parts: Any = network.__dict__["_modules"]["module"]
    return list(parts.values() if isinstance(parts, nn.ModuleDict) else parts)


def _is_plain(network: TensorDictModuleBase, plain: Mapping[str, Any]) -> bool:
    """Whether calling the network calls its ``forward`` and nothing else, and its attributes are plain."""
    # tensordict's wrapping is what skips existing entries, and what hooks and torch.compile expect
    if not USES_PRIVATES or torch.compiler.is_compiling() or skip_existing() or any(_GLOBAL_HOOKS):
        return False
    own = cast(dict[str, Any], network.__dict__)
    if (
        own["_forward_hooks"]
        or own["_forward_pre_hooks"]
        or own["_backward_hooks"]
        or own["_backward_pre_hooks"]
    ):
        return False
    # network.compile() sets _compiled_call_impl
    return own.get("_compiled_call_impl") is None and plain.items() <= own.items()
