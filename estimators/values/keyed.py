"""Entry names that a module's user can change."""

from collections.abc import Mapping

from flatroll.layout.keys import NEXT, NestedKey, as_tuple, next_key

#: Rows that a loss may use, as an estimator that leaves some out says (the references' name for it).
VALID = "shifted_valid"


def renamed(keys: Mapping[str, NestedKey], changes: Mapping[str, NestedKey | None]) -> dict[str, NestedKey]:
    """``keys`` with ``changes`` put in; None leaves a key as it is.

    >>> renamed({"reward": "reward"}, {"reward": "score"})
    {'reward': 'score'}
    """
    unknown = sorted(set(changes) - set(keys))
    if unknown:
        raise ValueError(f"no key is called {', '.join(unknown)}; the keys are {', '.join(sorted(keys))}")
    return {**keys, **{name: key for name, key in changes.items() if key is not None}}


def under_next(key: NestedKey) -> tuple[str, ...]:
    """``key`` below ``"next"``, whether or not it was written with it.

    >>> under_next("reward"), under_next(("next", "reward"))
    (('next', 'reward'), ('next', 'reward'))
    """
    names = as_tuple(key)
    return names if names[0] == NEXT else next_key(names)
