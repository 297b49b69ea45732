"""The names of a flat batch's columns, and the functions that read a column by its name.

A key is a string, or a tuple of strings for an entry of a nested tensordict. The results of a row's action (reward,
terminated, truncated, done, the next observation) are under ``"next"``.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias, cast

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDictBase
from torch import Tensor

from flatroll.layout.checks import as_text, check_flags, check_key_names, check_keys, check_rows, did_you_mean

#: The name of an entry: a string, or a tuple of strings for an entry of a nested tensordict.
NestedKey: TypeAlias = str | tuple[str, ...]

NEXT = "next"  #: The parent of the action's results: reward, flags and next observation.
OBSERVATION = "observation"  #: The policy's input; under ``"next"`` the observation after the action.
ACTION = "action"  #: The policy's action.
IS_INIT = "is_init"  #: Bool: the row is the first of its episode.
STEP_COUNT = "step_count"  #: Rows of the episode before this one.
EPISODE_REWARD = "episode_reward"  #: Under ``"next"``: the sum of rewards of the episode so far.
DELTA = ("next", "delta")  #: Differences of observations, stored in place of next observations.
REWARD = ("next", "reward")  #: The reward of the action.
TERMINATED = ("next", "terminated")  #: Bool: the episode ended, and its next value is 0.
TRUNCATED = ("next", "truncated")  #: Bool: the episode was stopped from outside, and its next value counts.
DONE = ("next", "done")  #: Bool: terminated or truncated.
TRAJ_IDS = ("collector", "traj_ids")  #: The number of the trajectory.
#: The low bits of a trajectory's number, which count episodes; those above are the writer's number.
ID_BITS = 40
AGENT = ("collector", "agent")  #: The number of the row's agent among those of its game.
GAME = ("collector", "game")  #: The number of the row's game among those that the collector plays.
GAME_STEP = ("collector", "game_step")  #: A number shared by the rows of one game step.
NUM_AGENTS = ("collector", "num_agents")  #: Number of agents that acted in the row's game step.
ENV = ("collector", "env")  #: The number of the env that made the row, in all collectors.
ENV_STEP = ("collector", "env_step")  #: Rows of that env before this one, over all of its episodes.
MASK = ("collector", "mask")  #: Bool: False at padded rows.
NEXT_KNOWN = ("collector", "next_known")  #: Bool: False where the env hid the last observation.
HAS_STATE = ("collector", "has_state")  #: Bool: the row keeps its recurrent state.
POLICY_VERSION = ("collector", "policy_version")  #: Number of policy updates before the row.
STEPS_TO_NEXT_OBS = "steps_to_next_obs"  #: Of n-step transitions: steps from the observation to the next one.
#: Bool: a loss may use the row; written by estimators that exclude rows (torchrl's name).
VALID = "shifted_valid"

#: The entry of an observation or of info with the legal actions.
ACTION_MASK = "action_mask"
#: Root names that the package writes itself. An entry of a Dict observation with such a name would overwrite one of
#: these columns, so its column gets an underscore: ``"step_count_"``.
RESERVED: frozenset[str] = frozenset(
    {ACTION, NEXT, IS_INIT, STEP_COUNT, "collector", "reward", "terminated", "truncated", "done", "delta"}
)

#: Column -> what writes it: the hint in the error for a missing column.
_WRITTEN_BY: dict[NestedKey, str] = {
    OBSERVATION: "the collector writes it",
    ACTION: "the policy writes it",
    IS_INIT: "wrap the env in flatroll.wrappers.InitTracker (Collector and rollout do it automatically)",
    STEP_COUNT: "wrap the env in flatroll.wrappers.StepCounter",
    TRAJ_IDS: "wrap the env in flatroll.wrappers.TrajId (Collector and rollout do it automatically)",
    POLICY_VERSION: "the collector writes it with track_policy_version=True",
    AGENT: "collectors write it for multi-agent games (PettingZoo, VMAS)",
    GAME: "collectors write it for multi-agent games (PettingZoo, VMAS)",
    GAME_STEP: "collectors write it for multi-agent games (PettingZoo, VMAS)",
    NUM_AGENTS: "collectors write it for multi-agent games (PettingZoo, VMAS)",
    ENV: "the collector writes it with track_envs=True",
    ENV_STEP: "the collector writes it with track_envs=True",
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


class KeyNames(dict[str, NestedKey]):
    """The entries of an estimator or loss: name to key, by index or as an attribute.

    >>> KeyNames(reward="score").reward
    'score'
    """

    def __getattr__(self, name: str) -> NestedKey:
        if name in self:
            return self[name]
        raise AttributeError(f"no key is called {name}; the keys are {', '.join(sorted(self))}")


def is_entry(kind: type) -> bool:
    """Whether a value of this class is an entry (``is_leaf`` of ``batch.keys``), tensor or not, but no tensordict."""
    return not issubclass(kind, TensorDictBase) or issubclass(kind, NonTensorData | NonTensorStack)


def as_tuple(key: NestedKey) -> tuple[str, ...]:
    """Return the key as a tuple of names.

    >>> as_tuple("reward"), as_tuple(("next", "reward"))
    (('reward',), ('next', 'reward'))
    """
    if isinstance(key, str):
        return (key,)
    return tuple(key)


def plain_key(key: NestedKey) -> NestedKey:
    """Return a key as a string if it has one name, else as a tuple.

    >>> plain_key(("reward",)), plain_key(("next", "reward"))
    ('reward', ('next', 'reward'))
    """
    names = as_tuple(key)
    if len(names) == 1:
        return names[0]
    return names


def key_list(keys: NestedKey | Sequence[NestedKey] | None) -> list[NestedKey]:
    """Return one key, a string or a tuple, or a list of keys as a list; None is not a key.

    >>> key_list("action"), key_list(["arm", ("leg", "action")])
    (['action'], ['arm', ('leg', 'action')])
    """
    if keys is None:
        return []
    if isinstance(keys, list):
        return list(keys)
    return [cast(NestedKey, keys)]


def next_key(key: NestedKey) -> tuple[str, ...]:
    """Return ``key`` under ``"next"``: the key of the same entry one step later.

    >>> next_key("observation"), next_key(("agents", "pos"))
    (('next', 'observation'), ('next', 'agents', 'pos'))
    """
    return (NEXT, *as_tuple(key))


def is_hidden(key: NestedKey) -> bool:
    """Return whether the name of an entry begins with ``_``: collectors never store it.

    >>> is_hidden("_cache"), is_hidden(("next", "_cache")), is_hidden("cache")
    (True, True, False)
    """
    return as_tuple(key)[-1].startswith("_")


def under_next(key: NestedKey) -> tuple[str, ...]:
    """Return ``key`` with a leading ``"next"``, which is added if it is missing.

    >>> under_next("reward"), under_next(("next", "reward"))
    (('next', 'reward'), ('next', 'reward'))
    """
    names = as_tuple(key)
    if names[0] == NEXT:
        return names
    return (NEXT, *names)


def without_next(key: NestedKey) -> NestedKey:
    """Return ``key`` without a leading ``"next"``: the key of the same entry at the root.

    >>> without_next(("next", "reward")), without_next("observation")
    ('reward', 'observation')
    """
    names = as_tuple(key)
    if names[0] == NEXT:
        names = names[1:]
    return plain_key(names)


def renamed(keys: Mapping[str, NestedKey], changes: Mapping[str, NestedKey | None]) -> dict[str, NestedKey]:
    """Return a copy of ``keys`` (name to key) updated with ``changes``; a change to None is ignored.

    A list of one key is replaced by that key.

    Raises:
        ValueError: ``changes`` has a name that ``keys`` does not have.
        TypeError: a key is neither a string, nor a tuple or a list of strings.

    >>> renamed({"reward": "reward", "done": "done"}, {"reward": "score", "done": None})
    {'reward': 'score', 'done': 'done'}
    """
    unknown = sorted(set(changes) - set(keys))
    if unknown:
        near = did_you_mean(unknown[0], keys)
        suggestion = f": {near}" if near else ""
        raise ValueError(
            f"no key is called {', '.join(unknown)}; the keys are {', '.join(sorted(keys))}{suggestion}"
        )

    for name, key in changes.items():
        if isinstance(key, list) and key:
            check_key_names(name, key)
        else:
            check_keys(optional=True, **{name: key})

    new = dict(keys)
    for name, key in changes.items():
        if isinstance(key, list) and len(key) == 1:
            key = key[0]
        if key is not None:
            new[name] = key
    return new


def missing_marker(
    key: NestedKey, available: Iterable[NestedKey], default: NestedKey | None = None
) -> KeyError:
    """Return the error for a missing column, with what writes it and which columns exist.

    The error is returned, not raised: write ``raise missing_marker(key, batch.keys(True, True))``. A *marker* is
    a column that marks where trajectories begin or end, such as ``is_init``; the error works for any column.

    Args:
        key: the missing column.
        available: the columns that are there.
        default: the column's default name, which determines its writer. Default: ``key``.

    >>> print(missing_marker("is_init", ["action", "observation"]).args[0])  # doctest: +ELLIPSIS
    batch has no entry 'is_init': wrap the env in ... Entries present: 'action', 'observation'
    """
    available = list(available)
    writer = _WRITTEN_BY.get(plain_key(default or key), "nothing in this batch wrote it")
    near = did_you_mean(plain_key(key), available)
    if near:
        writer += f"; {near}"
    else:
        writer += "."

    present = ", ".join(sorted(map(repr, available))) or "none"
    return KeyError(f"batch has no entry {plain_key(key)!r}: {writer} Entries present: {present}")


def require(batch: TensorDictBase, key: NestedKey, default: NestedKey | None = None) -> Tensor:
    """Return the column ``key`` of ``batch``; if missing, raise a KeyError that names what writes it.

    Args:
        batch: any tensordict.
        key: the column.
        default: its default name, for the error. Default: ``key``.

    Raises:
        KeyError: the column is missing, see :func:`missing_marker`.
        TypeError: ``batch`` is not a tensordict, or ``key`` is not a key.
    """
    try:
        column: Tensor | None = batch.get(key, None)
    except (AttributeError, KeyError, TypeError, RuntimeError):
        check_rows(batch)
        check_keys(key=key)
        raise

    if column is None:
        check_rows(batch)
        raise missing_marker(key, batch.keys(True, True), default)
    return column


def marker(batch: TensorDictBase, key: NestedKey) -> Tensor:
    """Return the bool column ``key``, such as ``is_init``, as ``[*B]``.

    Args:
        batch: tensordict of batch size ``[*B]``.
        key: a bool column ``[*B]`` or ``[*B, 1]``.

    Raises:
        KeyError: the column is missing; the message names what writes it.
        TypeError: the column is not bool (an int mask used as an index corrupts silently).
        ValueError: the column has another shape.

    >>> from tensordict import TensorDict
    >>> marker(TensorDict({"is_init": torch.tensor([[True], [False]])}, [2]), "is_init")
    tensor([ True, False])
    """
    return flat_column(require(batch, key), batch, key, flag=True)


def optional_marker(batch: TensorDictBase, key: NestedKey) -> Tensor | None:
    """Return :func:`marker`, or None if the batch has no column ``key``."""
    column = batch.get(key, None)
    if column is None:
        return None
    return flat_column(column, batch, key, flag=True)


def flat_column(column: Tensor, batch: TensorDictBase, key: NestedKey, *, flag: bool = False) -> Tensor:
    """Return a column ``[*B]`` or ``[*B, 1]`` as ``[*B]``: one value per row.

    Args:
        column: values of the rows of ``batch``.
        batch: tensordict of batch size ``[*B]``.
        key: the column's name, for the error.
        flag: whether it must be bool. Default: any dtype will do.

    Raises:
        TypeError: the column is not a tensor, or a flag is not bool.
        ValueError: it has another shape.
    """
    if not isinstance(column, Tensor):
        raise TypeError(f"batch[{key!r}] must be a tensor, got {as_text(column)}")
    if flag and column.dtype is not torch.bool:
        check_flags(flag=flag)
        raise TypeError(f"batch[{key!r}] must be bool, got {column.dtype}: cast it with .bool()")

    try:
        if column.shape == batch.batch_size:
            return column
        if column.shape == (*batch.batch_size, 1):
            return column.squeeze(-1)
    except AttributeError:
        check_rows(batch)
        raise
    except NotImplementedError as error:
        raise TypeError(f"batch[{key!r}] must be a dense tensor, got {as_text(column)}") from error

    way_out = ""
    if not batch.batch_size and column.ndim:  # as of a module that is called by keyword
        way_out = f": call it with a TensorDict of batch size [{column.shape[0]}]"
    raise ValueError(
        f"batch[{key!r}] must have shape {tuple(batch.batch_size)} or {(*batch.batch_size, 1)}, "
        f"got {tuple(column.shape)}{way_out}"
    )


def observation_keys(batch: TensorDictBase) -> list[NestedKey]:
    """List the keys of the observations: root entries that are also under ``"next"``.

    For a compact batch (no ``("next", <obs>)``), ``"observation"`` if present. Recurrent states
    (``"recurrent_state..."``) are excluded.

    >>> from tensordict import TensorDict
    >>> column = torch.zeros(2)
    >>> observation_keys(TensorDict({"pos": column, "next": {"pos": column, "reward": column}}, [2]))
    ['pos']
    """
    check_rows(batch)
    next_entries = batch.get(NEXT, None)
    next_names = set()
    if next_entries is not None:
        next_names = {as_tuple(key) for key in next_entries.keys(True, True)}

    roots: list[NestedKey] = []
    for key in batch.keys(True, True):
        names = as_tuple(key)
        if names[0] in (*RESERVED, EPISODE_REWARD) or names[-1].startswith("recurrent_state"):
            continue  # no observation
        if names in next_names or names[0] == OBSERVATION:
            roots.append(plain_key(names))
    return roots
