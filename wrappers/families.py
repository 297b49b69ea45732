"""The families of envs: which envs belong to one, what it refuses, and the adapter its envs get.

`adapt_env` asks the registered families in order, and then those that it knows itself: envpool's, Gymnasium's and
torch's. So the core imports no adapter of the outer ring: ``wrappers/on_jax`` and ``wrappers/games`` describe their
families, and ``wrappers/__init__.py`` registers them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium.vector import AutoresetMode

from flatroll.wrappers.source import VectorSource


@dataclass(frozen=True, kw_only=True)
class Request:
    """An env to adapt, and what the user said about it; see `as_vector_env`."""

    env: Any
    num_envs: int | None
    device: torch.device | None
    mode: AutoresetMode | None
    own_buffers: bool | str

    @property
    def base(self) -> Any:
        """The env inside its wrappers."""
        return getattr(self.env, "unwrapped", self.env)


@dataclass(frozen=True, kw_only=True)
class Family:
    """Envs that have one adapter.

    Args:
        name: of the family, in words.
        recognises: returns what the adapter takes, mostly the env itself; None for an env of another family.
        refuse: raises for an env of the family that cannot be adapted as it is, or as the user asks.
        adapt: returns the adapter of what was recognised, and the autoreset mode.
        adapt_list: returns the adapter of a list of envs, or of functions that make them, and whether it made all of
            them; None if they are not of this family. Default: a list never is.
    """

    name: str
    recognises: Callable[[Request], Any]
    refuse: Callable[[Request], None] | None = None
    adapt: Callable[[Request, Any], tuple[VectorSource, AutoresetMode]]
    adapt_list: Callable[[Sequence[Any]], tuple[VectorSource, bool] | None] | None = None


_registered: list[Family] = []


def register(*families: Family) -> None:
    """Add families; one that is registered already stays as it is."""
    _registered.extend(family for family in families if family not in _registered)


def adapt_by(families: Sequence[Family], request: Request) -> tuple[VectorSource, AutoresetMode] | None:
    """Return the adapter and the mode that the first family gives which recognises the env; None if none does."""
    for family in families:
        found = family.recognises(request)
        if found is None:
            continue

        if family.refuse is not None:
            family.refuse(request)
        return family.adapt(request, found)
    return None


def adapt_registered(request: Request) -> tuple[VectorSource, AutoresetMode] | None:
    """Ask the registered families, see `adapt_by`."""
    return adapt_by(_registered, request)


def adapt_list(envs: Sequence[Any]) -> tuple[VectorSource, bool] | None:
    """Return the adapter of a list of envs, and whether it made all of them; None if no family takes the list."""
    for family in _registered:
        if family.adapt_list is not None and (adapted := family.adapt_list(envs)) is not None:
            return adapted
    return None
