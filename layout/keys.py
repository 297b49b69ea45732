"""The one key table: every column of a flat batch, and who writes it (docs/layout.md)."""

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import torch
from tensordict import TensorDictBase
from torch import Tensor

NestedKey: TypeAlias = str | tuple[str, ...]

NEXT = "next"
OBSERVATION = "observation"
ACTION = "action"
IS_INIT = "is_init"
STEP_COUNT = "step_count"
EPISODE_REWARD = "episode_reward"
DELTA = ("next", "delta")
REWARD = ("next", "reward")
TERMINATED = ("next", "terminated")
TRUNCATED = ("next", "truncated")
DONE = ("next", "done")
TRAJ_IDS = ("collector", "traj_ids")
MASK = ("collector", "mask")
NEXT_KNOWN = ("collector", "next_known")
HAS_STATE = ("collector", "has_state")
#: Rows that a loss may use, as an estimator that leaves some out says (the references' name for it).
VALID = "shifted_valid"

#: Root names that an entry of a Dict observation may not take.
RESERVED: frozenset[str] = frozenset(
    {ACTION, NEXT, IS_INIT, STEP_COUNT, "collector", "reward", "terminated", "truncated", "done", "delta"}
)

#: Entries under ``"next"`` that are no observation.
_NEXT_MARKERS: frozenset[str] = frozenset(
    {IS_INIT, STEP_COUNT, EPISODE_REWARD, "reward", "terminated", "truncated", "done", "delta"}
)

_WRITTEN_BY: dict[NestedKey, str] = {
    OBSERVATION: "the collector writes it",
    ACTION: "the policy writes it",
    IS_INIT: "wrap the env in flatroll.wrappers.InitTracker (Collector and rollout do it by themselves)",
    STEP_COUNT: "wrap the env in flatroll.wrappers.StepCounter",
    TRAJ_IDS: "wrap the env in flatroll.wrappers.TrajId (Collector and rollout do it by themselves)",
    MASK: "split_trajectories and SliceSampler(pad_output=True) write it",
    REWARD: "the collector writes it (under another name: set_keys(reward=...) of the estimator or loss)",
    TERMINATED: "the collector writes it (under another name: set_keys(terminated=...) of the estimator or loss)",
    TRUNCATED: "the collector writes it",
    DONE: "the collector writes it (under another name: done_key=, or set_keys(done=...))",
    "advantage": "call an estimator on the batch, e.g. flatroll.estimators.GAE",
    "value_target": "call an estimator on the batch, e.g. flatroll.estimators.GAE",
    "state_value": "the value network writes it; call an estimator on the batch, e.g. flatroll.estimators.GAE",
    "priority_weight": "a buffer with a PrioritizedSampler writes it into its samples",
    "action_log_prob": "the policy writes it when it acts (return_log_prob=True)",
    ("next", EPISODE_REWARD): "wrap the env in flatroll.wrappers.RewardSum",
    ("next", OBSERVATION): (
        "the collector writes it unless compact_obs=True; a compact batch comes with collector.final, "
        "and flatroll.buffers.NextStateReconstructor rebuilds it in samples"
    ),
}


def as_tuple(key: NestedKey) -> tuple[str, ...]:
    """The key as a tuple of names.

    >>> as_tuple("reward"), as_tuple(("next", "reward"))
    (('reward',), ('next', 'reward'))
    """
    return (key,) if isinstance(key, str) else tuple(key)


def next_key(key: NestedKey) -> tuple[str, ...]:
    """The key of the same entry one step later.

    >>> next_key("observation"), next_key(("agents", "pos"))
    (('next', 'observation'), ('next', 'agents', 'pos'))
    """
    return (NEXT, *as_tuple(key))


def under_next(key: NestedKey) -> tuple[str, ...]:
    """``key`` below ``"next"``, whether or not it was written with it.

    >>> under_next("reward"), under_next(("next", "reward"))
    (('next', 'reward'), ('next', 'reward'))
    """
    names = as_tuple(key)
    return names if names[0] == NEXT else next_key(names)


def renamed(keys: Mapping[str, NestedKey], changes: Mapping[str, NestedKey | None]) -> dict[str, NestedKey]:
    """``keys`` by their names, with ``changes`` put in; None leaves a key as it is.

    >>> renamed({"reward": "reward"}, {"reward": "score"})
    {'reward': 'score'}
    """
    unknown = sorted(set(changes) - set(keys))
    if unknown:
        raise ValueError(f"no key is called {', '.join(unknown)}; the keys are {', '.join(sorted(keys))}")
    return {**keys, **{name: key for name, key in changes.items() if key is not None}}


def missing_marker(
    key: NestedKey, available: Iterable[NestedKey], default: NestedKey | None = None
) -> KeyError:
    """The error for a column that is not there: which one, who writes it, what there is instead.

    ``default`` is the name that the column has where nobody renamed it.
    """
    shown = _plain(key)
    writer = _WRITTEN_BY.get(shown if default is None else _plain(default), "nothing in this batch wrote it")
    there = sorted((repr(k) for k in available), key=str)
    return KeyError(f"batch has no entry {shown!r}: {writer}. Entries present: {', '.join(there) or 'none'}")


def _plain(key: NestedKey) -> NestedKey:
    names = as_tuple(key)
    return names[0] if len(names) == 1 else names


def require(batch: TensorDictBase, key: NestedKey, default: NestedKey | None = None) -> Tensor:
    """The column ``key`` of ``batch`` (called ``default`` where nobody renamed it).

    Raises:
        KeyError: it is missing; the text names what writes it.
    """
    value = batch.get(key, None)
    if value is None:
        raise missing_marker(key, batch.keys(True, True), default)
    column: Tensor = value
    return column


def marker(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """The bool column ``key`` in the batch's own shape ``[*B]`` (a trailing singleton is dropped).

    Raises:
        KeyError: the column is missing; the text names what writes it.
        TypeError: the column is not bool (an int mask used as an index corrupts silently).
    """
    column = require(batch, key)
    if column.dtype is not torch.bool:
        raise TypeError(f"batch[{key!r}] must be bool, got {column.dtype}: cast it with .bool()")
    return flat_column(column, batch, key)


def observation_keys(batch: TensorDictBase) -> list[NestedKey]:
    """The root keys of the observations: entries at the root that stand under ``"next"`` too.

    Of a compact batch (no ``("next", <obs>)``), ``"observation"`` if it is there. Recurrent states, by the
    names ``"recurrent_state..."``, are not counted.

    >>> from tensordict import TensorDict
    >>> column = torch.zeros(2)
    >>> observation_keys(TensorDict({"pos": column, "next": {"pos": column, "reward": column}}, [2]))
    ['pos']
    """
    following = batch.get(NEXT, None)
    later = set() if following is None else {as_tuple(key) for key in following.keys(True, True)}
    roots: list[NestedKey] = []
    for key in batch.keys(True, True):
        names = as_tuple(key)
        marks = names[0] in RESERVED or names[0] in _NEXT_MARKERS or names[-1].startswith("recurrent_state")
        if not marks and (names in later or names[0] == OBSERVATION):
            roots.append(names[0] if len(names) == 1 else names)
    return roots


def flat_column(column: Tensor, batch: TensorDictBase, key: NestedKey) -> Tensor:
    """``column`` of shape ``[*B]`` or ``[*B, 1]`` seen in the batch's shape ``[*B]``."""
    if column.shape == batch.batch_size:
        return column
    if column.shape == (*batch.batch_size, 1):
        return column.squeeze(-1)
    raise ValueError(
        f"batch[{key!r}] must have shape {tuple(batch.batch_size)} or {(*batch.batch_size, 1)}, "
        f"got {tuple(column.shape)}"
    )
