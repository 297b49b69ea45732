"""Samples of several buffers put together."""

from typing import Any

import torch
from tensordict import TensorDictBase
from torch import Tensor
from torch.utils import _pytree as pytree

from flatroll.buffers.storages.item_kinds import leaves, nest

Form = dict[Any, tuple[Any, torch.Size]]  # dtype and shape of all that a sample consists of, by key


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
    join: Any = torch.stack if stack else torch.cat
    first = parts[0]
    if not all(isinstance(part, TensorDictBase) for part in parts):
        _check_alike([_form(part) for part in parts], members, stack)
        return pytree.tree_map(lambda *of_parts: join(of_parts), *parts)
    try:
        columns = [leaves(part) for part in parts]
    except TypeError:  # entries that are no tensors
        _check_alike([_form(part) for part in parts], members, stack)
        return join(parts)
    _check_alike([{k: (c.dtype, c.shape) for k, c in each.items()} for each in columns], members, stack)
    joined = {key: join([each[key] for each in columns]) for key in columns[0]}
    rows = (len(parts), len(first)) if stack else (sum(map(len, parts)),)
    made = nest(joined, torch.Size([*rows, *first.batch_size[1:]]))
    return made if first.device is None else made.to(first.device)


def _check_alike(forms: list[Form], members: list[int], stack: bool) -> None:
    first = members[0]
    for member, form in zip(members, forms, strict=True):
        if form == forms[0]:
            continue
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
                    f"member {first} gives {here[1][0]} rows, member {member} {there[1][0]} rows, which cannot be "
                    "stacked: stack=False lays them end to end"
                )


def _form(part: Any) -> Form:
    if isinstance(part, TensorDictBase):
        entries: Any = part.items(True, True)
    else:
        entries = pytree.tree_flatten_with_path(part)[0]
    return {
        key: (value.dtype, value.shape)
        if isinstance(value, Tensor)
        else (type(value).__name__, torch.Size([]))
        for key, value in entries
    }


def _shown(key: Any) -> str:
    if isinstance(key, str) or (key and isinstance(key[0], str)):
        return f"the entry {key!r}"
    return f"the entry {pytree.keystr(key)}" if key else "its data"
