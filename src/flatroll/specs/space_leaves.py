"""The leaves of a Gymnasium space."""

from typing import Any

from gymnasium import spaces


def space_leaves(
    space: "spaces.Space[Any]", key: tuple[str, ...], path: tuple[Any, ...] = ()
) -> list[tuple[str | tuple[str, ...], tuple[Any, ...]]]:
    """List the batch key (starting with ``key``) and the tree path (with ``path``) of each leaf of a space.

    >>> space_leaves(spaces.Tuple((spaces.Discrete(2), spaces.Dict(a=spaces.Discrete(3)))), ("action",))
    [(('action', '0'), (0,)), (('action', '1', 'a'), (1, 'a'))]
    """
    if isinstance(space, spaces.Dict):
        items: Any = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        items = enumerate(space.spaces)
    else:
        return [(key[0] if len(key) == 1 else key, path)]
    return [leaf for name, child in items for leaf in space_leaves(child, (*key, str(name)), (*path, name))]
