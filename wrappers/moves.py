"""Counts the steps and resets of an env, so that whoever shares it notices those of others."""

from typing import Any
from weakref import WeakValueDictionary


class Moves:
    """Counts the steps and resets of one env object by all adapted envs around it; made by `moves_of`.

    Attributes:
        env: the env object.
        count: how often it was stepped or reset.
    """

    def __init__(self, env: Any) -> None:
        self.env = env
        self.count = 0

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy counts the moves of the copied env, and goes on from the same number."""
        return moves_of, (self.env,), {"count": self.count}


# By id, since an env need not be hashable or weakly referable. An entry holds its env, so that no other env gets the
# id, and lives as long as an adapted env holds the entry: one that nobody holds has nobody to tell.
_MOVES: WeakValueDictionary[int, Moves] = WeakValueDictionary()


def moves_of(env: Any) -> Moves:
    """The one `Moves` of an env object, shared by all who ask while any of them keeps it."""
    return _MOVES.setdefault(id(env), Moves(env))
