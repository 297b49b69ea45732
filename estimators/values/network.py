"""A network that an estimator evaluates: what it reads of a batch, and one call of it."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.layout.fast_call import through
from flatroll.layout.keys import NestedKey, next_key


@dataclass(frozen=True)
class NetworkInputs:
    """What a network reads: observations, whose next ones matter, and what a memory needs.

    Attributes:
        observed: keys that have a next version in the stream.
        states: recurrent states, of which only the one at a run's first row is read.
        recurrent: the network remembers, so the rows of a run must reach it together.
    """

    observed: tuple[NestedKey, ...]
    states: tuple[NestedKey, ...]
    recurrent: bool

    @classmethod
    def of(cls, network: TensorDictModuleBase, is_init_key: NestedKey) -> "NetworkInputs":
        read: list[NestedKey] = list(network.in_keys)  # pyright: ignore[reportAssignmentType]
        written = set(network.out_keys)
        states = tuple(key for key in read if next_key(key) in written)
        observed = tuple(key for key in read if key not in states and key != is_init_key)
        recurrent = bool(states) or is_init_key in read
        if not recurrent:
            recurrent = any(hasattr(type(x), "make_tensordict_primer") for x in network.modules())
        return cls(observed, states, recurrent)


def value_of(
    network: TensorDictModuleBase,
    columns: Mapping[NestedKey, Tensor],
    shape: torch.Size,
    value_key: NestedKey,
    parameters: TensorDictBase | None = None,
) -> Tensor:
    """What the network writes under ``value_key`` ``[*shape, *F]`` for columns of a batch of that shape.

    Args:
        parameters: what to use in place of the network's own.

    Raises:
        KeyError: it writes no such entry.
        ValueError: the value has no trailing dim.
    """
    with nullcontext() if parameters is None else parameters.to_module(network):
        out = through(network, TensorDict(dict(columns), batch_size=shape))
    value: Tensor | None = out.get(value_key, None)
    if value is None:
        raise KeyError(
            f"value_network wrote no entry {value_key!r}: its out_keys are {list(network.out_keys)}; "
            "name the one that holds the value with value_key="
        )
    if value.ndim == len(shape):
        raise ValueError(
            f"value_network, given a batch of {tuple(shape)}, must write {value_key!r} of shape {(*shape, 1)}, "
            f"got {tuple(value.shape)}"
        )
    return value


def checked_network(network: object, name: str, example: str) -> None:
    """TypeError unless the network is a tensordict module."""
    if not hasattr(network, "in_keys"):
        raise TypeError(f"{name} must be a tensordict module, e.g. {example}, got {type(network).__name__}")
