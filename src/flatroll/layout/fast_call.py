"""Calls networks and policies without tensordict's overhead: a small network takes less time than that.

A :class:`~tensordict.nn.TensorDictModule` that is nothing but a function of tensors is called as that function. All
others (a subclass, hooks, arguments by name, ``skip_existing``, inside ``torch.compile``) are called as ever.
"""

from collections.abc import Iterable
from typing import Any, cast

from tensordict import TensorDict, TensorDictBase
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModuleBase,
    set_interaction_type,
)
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor

from flatroll.layout.keys import NestedKey, as_tuple
from flatroll.layout.tensordict_seam import get_entry, plain_actor_parts, plain_function, plain_parts


def call_network(network: TensorDictModuleBase, batch: TensorDictBase) -> TensorDictBase:
    """Return ``network(batch)``, without tensordict's overhead; the outputs are written into ``batch``.

    >>> import torch
    >>> from tensordict.nn import TensorDictModule
    >>> net = TensorDictModule(torch.nn.Identity(), in_keys=["a"], out_keys=["b"])
    >>> call_network(net, TensorDict({"a": torch.ones(2)}, [2]))["b"]
    tensor([1., 1.])
    """
    outputs = _call_function(network, batch)
    if outputs is not None:
        for key, value in outputs.items():
            if key != "_":  # the name of an output that nobody wants
                batch.set(key, value)
        return batch
    parts = plain_parts(network)
    if parts is None:
        out: TensorDictBase = network(batch)
        return out
    for part in parts:
        batch = call_network(part, batch)
    return batch


def call_policy(policy: Any, batch: TensorDictBase) -> Any:
    """Return ``policy(batch)``, without tensordict's overhead; intermediate entries may stay in ``batch``."""
    parts = plain_parts(policy, keep_all=True)
    if parts is not None:
        for part in parts:
            batch = call_network(part, batch)
        return batch
    if plain_actor_parts(policy, samples=True) is not None:
        ready = prepare_sampling(policy, batch)
        if ready is not None:
            sampler, batch, _ = ready
            return sampler(batch)
    return call_network(policy, batch)


def prepare_sampling(
    actor: TensorDictModuleBase, batch: TensorDictBase, readers: Iterable[TensorDictModuleBase] | None = None
) -> tuple[ProbabilisticTensorDictModule, TensorDictBase, dict[NestedKey, Any]] | None:
    """Run an actor up to its last, sampling part.

    Args:
        actor: any; one that is no plain sequence, or samples in other parts, too, is left alone.
        batch: what it reads.
        readers: the networks that read the batch afterwards; then it stays as it is, and its copy, into which the
            actor's parts write, is only made where one of them may read that. Default: None, anybody; then the parts
            write into the batch itself.

    Returns:
        the last part; the batch, or its copy; and all that the last part reads, by key, where that was not written
        there, else nothing. None, and nothing has run, if the actor is another one.
    """
    found = plain_actor_parts(actor)
    if found is None:
        return None
    *parts, last = found
    sampling = (ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential)
    if not isinstance(last, ProbabilisticTensorDictModule) or any(isinstance(x, sampling) for x in parts):
        return None
    # parts may ask how the actor samples: as the block around the call says, or else as the last part does
    with set_interaction_type(interaction_type() or last.default_interaction_type):
        if readers is not None:
            made: list[Any] = parts[0].out_keys if len(parts) == 1 else []
            if made and all(key in made for key in last.in_keys) and not _reads_any(readers, made):
                outputs = _call_function(parts[0], batch)
                if outputs is not None:
                    return last, batch, outputs
            batch = batch.copy()
        for part in parts:
            batch = call_network(part, batch)
    return last, batch, {}


def _reads_any(networks: Iterable[TensorDictModuleBase], keys: Iterable[NestedKey]) -> bool:
    """Whether one of the networks may read one of the entries: one that is more than a function may read all."""
    roots = {as_tuple(key)[0] for key in keys}
    for network in networks:
        read: Any = network.in_keys
        if plain_function(network) is None or any(as_tuple(key)[0] in roots for key in read):
            return True
    return False


def call_for(network: TensorDictModuleBase, batch: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Return what the network writes under ``key``, or None if it does not write it; the batch stays as it is."""
    out_keys: list[Any] = network.out_keys
    if key not in out_keys and as_tuple(key) not in map(as_tuple, out_keys):
        return None  # what the batch holds there is another's
    outputs = _call_function(network, batch) if len(out_keys) == 1 else None
    if outputs is not None:
        value = outputs[out_keys[0]]
        if isinstance(value, Tensor):
            return value  # a plain function writes nothing into the batch, so no copy is needed
    found: Tensor | None = call_network(network, batch.copy()).get(key, None)
    return found


def _call_function(network: TensorDictModuleBase, batch: TensorDictBase) -> dict[NestedKey, Any] | None:
    """What the network's function returns, by key; None, and nothing has run, if it is more than a function."""
    function = plain_function(network)
    if function is None:
        return None
    inputs = []
    for key in cast(list[Any], network.in_keys):
        column = get_entry(batch, key)
        if not isinstance(column, Tensor):
            return None
        inputs.append(column)
    try:
        out = function(*inputs)
    except Exception as error:
        error.add_note(f"In the network with in_keys {network.in_keys} and out_keys {network.out_keys}")
        raise
    keys: list[Any] = network.out_keys
    if isinstance(out, Tensor) and len(keys) == 1:
        return {keys[0]: out}
    if isinstance(out, (dict, TensorDictBase)) and all(key in out for key in keys):
        out = tuple(out[key] for key in keys)
    elif not isinstance(out, tuple):
        out = () if out is None else (out,)
    if len(out) != len(keys):
        raise ValueError(f"a network with out_keys {keys} returned {len(out)} tensors: give each a key")
    pairs = zip(keys, out, strict=True)
    return {key: value if isinstance(value, Tensor) else TensorDict.from_any(value) for key, value in pairs}
