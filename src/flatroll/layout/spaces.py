"""The leaves of Gymnasium spaces: which batch key and which path in a tree each has."""

from typing import Any

from gymnasium import spaces

from flatroll.layout.keys import OBSERVATION, RESERVED, NestedKey


def space_leaves(
    space: "spaces.Space[Any]", key: tuple[str, ...], path: tuple[Any, ...] = ()
) -> list[tuple[NestedKey, tuple[Any, ...]]]:
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


def observation_leaves(space: "spaces.Space[Any]") -> list[tuple[NestedKey, tuple[Any, ...]]]:
    """List the batch key and the tree path of each observation entry; see `column_name`.

    >>> from gymnasium.spaces import Box, Dict
    >>> observation_leaves(Box(0, 1, (2,)))
    [('observation', ())]
    >>> observation_leaves(Dict(eye=Box(0, 1, (2,)), body=Dict(leg=Box(0, 1))))
    [('eye', ('eye',)), (('body', 'leg'), ('body', 'leg'))]
    """
    if not isinstance(space, spaces.Dict):
        return space_leaves(space, (OBSERVATION,))
    names = {key: column_name(key) for key in space.spaces}
    if len(set(names.values())) < len(names):
        raise ValueError(
            f"observation entries {list(names)} would become columns of the same name, {[*names.values()]}: rename "
            "one with gymnasium.wrappers.TransformObservation"
        )
    return [
        leaf for key, child in space.spaces.items() for leaf in space_leaves(child, (names[key],), (key,))
    ]


def column_name(entry: object) -> str:
    """Return the name of an entry of a Dict observation in a batch; one that batches reserve gets an underscore.

    >>> column_name("eye"), column_name("step_count")
    ('eye', 'step_count_')
    """
    return f"{entry}_" if entry in RESERVED else str(entry)


def part_of(space: "spaces.Space[Any]", path: tuple[Any, ...]) -> "spaces.Space[Any]":
    """Return the part of a space at a path of keys and positions.

    >>> part_of(spaces.Dict(a=spaces.Tuple((spaces.Discrete(2), spaces.Discrete(3)))), ("a", 1))
    Discrete(3)
    """
    for name in path:
        space = space[name]  # type: ignore[index]
    return space
