"""Samples of several buffers put together."""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils import _pytree as pytree

from flatroll.buffers.structure import batched


def together(parts: list[Any], members: list[int], stack: bool) -> Any:
    """The samples of ``members`` one above the other, or end to end.

    Raises:
        ValueError: they cannot be; the text names the members, the entry and the way out.

    >>> together([torch.zeros(2), torch.ones(2)], members=[0, 1], stack=False)
    tensor([0., 0., 1., 1.])
    """
    listed = [member for member, part in zip(members, parts, strict=True) if isinstance(part, list)]
    if listed and not stack:
        return [item for part in parts for item in part]
    if listed:
        raise ValueError(
            f"member {listed[0]} gives a list of items, which cannot be stacked: stack=False gives one list, "
            "collate_fn makes something else of the members' samples"
        )
    first, forms = members[0], [_form(part) for part in parts]
    for member, form in zip(members, forms, strict=True):
        for key in forms[0] | form:
            here, there = forms[0].get(key), form.get(key)
            if here is None or there is None:
                has, lacks = (first, member) if there is None else (member, first)
                raise ValueError(
                    f"member {has} gives {_shown(key)} and member {lacks} does not: make their samples alike with "
                    "transforms of the members (stack=False needs the same entries, too)"
                )
            if here[0] != there[0] or here[1][1:] != there[1][1:] or len(here[1]) != len(there[1]):
                raise ValueError(
                    f"member {first} gives {_shown(key)} as {here[0]} {list(here[1])}, member {member} as {there[0]} "
                    f"{list(there[1])}: make them alike with transforms of the members"
                )
            if stack and here[1] != there[1]:
                raise ValueError(
                    f"member {first} gives {_rows(here[1])}, member {member} {_rows(there[1])}, which cannot be "
                    "stacked: stack=False lays them end to end"
                )
    if stack:
        return batched(parts)
    if isinstance(parts[0], TensorDictBase):
        return torch.cat(parts)
    return pytree.tree_map(lambda *leaves: torch.cat(leaves), *parts)


def _form(part: Any) -> dict[Any, tuple[Any, torch.Size]]:
    """Dtype and shape of all that a sample consists of, by key."""
    if isinstance(part, TensorDictBase):
        entries: Any = part.items(True, True)
    else:
        entries = pytree.tree_flatten_with_path(part)[0]
    form = {}
    for key, value in entries:
        kept = value if isinstance(value, Tensor) else None
        form[key] = (type(value).__name__, torch.Size([])) if kept is None else (kept.dtype, kept.shape)
    return form


def _shown(key: Any) -> str:
    """A key of `_form`."""
    if isinstance(key, str) or (key and isinstance(key[0], str)):
        return f"the entry {key!r}"
    return f"the entry {pytree.keystr(key)}" if key else "its data"


def _rows(shape: torch.Size) -> str:
    return f"{shape[0]} rows" if shape else "no rows"
