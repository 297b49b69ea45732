"""Turns a buffer's state into plain values, which files hold, and back."""

from typing import Any

import torch
from torch.utils import _pytree as pytree

from flatroll.buffers.index.fragments import BoundaryKeys
from flatroll.buffers.index.saved_tables import damaged
from flatroll.buffers.storages.item_kinds import Structure, TensorDicts, Trees

_NAMES = ("is_init", "done", "traj", "step_count")  # of BoundaryKeys: each one key


def to_plain(state: dict[str, Any]) -> dict[str, Any]:
    """Return a buffer's ``state`` with the names of its markers and the kind of its rows as plain values."""
    keys, storage = state["keys"], dict(state["storage"])
    if "structure" in storage:
        storage["structure"] = _structure_to_plain(storage["structure"])
    if keys is not None:
        names = {name: getattr(keys, name) for name in _NAMES}
        keys = {**names, "more_done": list(keys.more_done), "in_order": keys.in_order}
    return {**state, "storage": storage, "keys": keys}


def from_plain(plain: Any) -> dict[str, Any]:
    """Return the state of which `to_plain` made ``plain``; ValueError if it cannot be one. The rest of it is checked by
    ``load_state_dict``.

    >>> from_plain(["storage"])
    Traceback (most recent call last):
    ...
    ValueError: the state is damaged: it is a list. Nothing was loaded; use another copy of it
    """
    if plain is None:
        raise ValueError("a run without a buffer was saved: load it with a Checkpoint without buffer=")
    if isinstance(plain, dict) and "members" in plain:
        raise ValueError("an ensemble was saved: load it into a ReplayBufferEnsemble of as many members")
    if not isinstance(plain, dict) or not isinstance(plain.get("storage"), dict):
        raise damaged(f"it is a {type(plain).__name__}")
    storage = dict(plain["storage"])
    if "structure" in storage:
        storage["structure"] = _structure_from_plain(storage["structure"])
    return {**plain, "storage": storage, "keys": _keys_from_plain(plain.get("keys"))}


def _keys_from_plain(names: Any) -> BoundaryKeys | None:
    if names is None:
        return None
    if not isinstance(names, dict) or names.keys() != {*_NAMES, "more_done", "in_order"}:
        raise damaged("its markers have other names")
    more = names["more_done"]
    if not isinstance(more, list) or type(names["in_order"]) is not bool:
        raise damaged("its markers have other names")
    for key in (*more, *(names[name] for name in _NAMES)):
        parts = key if isinstance(key, tuple) else (key,)
        if not parts or not all(isinstance(part, str) for part in parts):
            raise damaged(f"one of its markers is named {key!r}")
    return BoundaryKeys(**{**names, "more_done": tuple(more)})


def _structure_to_plain(structure: Structure | None) -> Any:
    if structure is None:
        return None
    if isinstance(structure, TensorDicts):
        return ["tensordicts", structure.inner]
    if isinstance(structure, Trees):  # an example tree, as its leaves' numbers
        return ["tree", pytree.tree_unflatten(list(range(structure.spec.num_leaves)), structure.spec)]
    return ["tensors"]


def _structure_from_plain(plain: Any) -> Structure | None:
    match plain:
        case None:
            return None
        case ["tensordicts", torch.Size() as inner]:
            return TensorDicts(inner)
        case ["tensors"]:
            return Structure.of(0)
        case ["tree", tree] if isinstance(tree, (dict, list, tuple)):
            return Trees(pytree.tree_structure(tree))
    raise damaged(f"its rows are of no known kind, {str(plain)[:40]}")
