"""`to_batch`, `to_buffer` and `from_buffer`: flat batches for Tianshou, and Tianshou's buffers as flat batches."""

from typing import Any, Literal

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.buffers import ReplayBuffer
from flatroll.layout import (
    ACTION,
    DONE,
    IS_INIT,
    MASK,
    NEXT,
    NEXT_KNOWN,
    OBSERVATION,
    REWARD,
    STEP_COUNT,
    TERMINATED,
    TRAJ_IDS,
    TRUNCATED,
    as_tuple,
    flat_column,
    mark_cuts,
    marker,
    next_key,
    observation_keys,
    require,
    run_ends,
)
from flatroll.layout.checks import check_choice, check_writer_number
from flatroll.layout.export import to_numpy
from flatroll.layout.final import check_final, next_values, read_final
from flatroll.layout.keys import ID_BITS
from flatroll.layout.spaces import column_name
from flatroll.trainers.versions import trainer_imports

with trainer_imports("tianshou", "2", "3", "tianshou", ", in an environment of its own"):
    import tianshou.data as peer  # pyright: ignore[reportMissingImports]  # its pins clash with ours

Cuts = Literal["mark", "refuse"]
_SEPARATOR = "\0"  # occurs in no entry's name


def to_batch(batch: TensorDictBase, *, final: TensorDictBase | None = None, cuts: Cuts = "mark") -> Any:
    """Return a flat batch as Tianshou's `Batch`, of arrays that share the batch's memory.

    (`Batch(batch)` itself is empty, without an error.) Tianshou knows the end of a run by ``done`` alone, so rows that
    the batch cuts are marked truncated, see `flatroll.layout.mark_cuts`.

    Args:
        batch: flat batch ``[N]``; padding is left out.
        final: next observations at run ends, ``collector.final``, if the batch is compact.
        cuts: ``"mark"`` (default), or ``"refuse"`` to raise if there are any.

    Returns:
        ``obs``, ``act``, ``rew`` float64 ``[N]``, ``terminated``, ``truncated``, ``done`` bool ``[N]``, ``obs_next``
        and an empty ``info``. Observations and actions of Dict spaces are Batches.

    Raises:
        KeyError: an entry is missing.
        ValueError: ``cuts="refuse"`` and a run is cut, the batch is not ``[N]``, a row that bootstraps has no next
            observation, or a reward is not one number.
        TypeError: an entry is not a tensor, or of a dtype that NumPy does not have.

    >>> import gymnasium as gym
    >>> from flatroll.rollouts import rollout
    >>> rows = to_batch(rollout(gym.make_vec("CartPole-v1", num_envs=2), num_steps=5, seed=0))
    >>> rows.obs.shape, rows.rew.dtype, rows.truncated.tolist()[-1]
    ((10, 4), dtype('float64'), True)
    """
    check_choice("cuts", cuts, ("mark", "refuse"))
    if batch.batch_dims != 1:
        raise ValueError(
            f"batch must have batch size [N], got {list(batch.batch_size)}: join() concatenates the rows"
        )

    if batch.get(MASK, None) is not None:
        batch = batch[marker(batch, MASK)]

    marked = mark_cuts(batch)
    cut = marker(marked, DONE) & ~marker(batch, DONE)
    if cuts == "refuse" and cut.any():
        raise ValueError(
            f"{int(cut.sum())} runs of the batch are cut, the first at row {int(cut.nonzero()[0])}, and Tianshou would "
            "treat the next row as their next step: collect whole episodes (trajs_per_batch=), or cuts='mark'"
        )

    keys = _add_next_observations(marked, final)
    arrays = to_numpy(marked.select(*keys, *map(next_key, keys), ACTION), separator=_SEPARATOR)
    tree = _nest(arrays)
    roots = dict.fromkeys(as_tuple(key)[0] for key in keys)

    def observations(entries: dict[str, Any]) -> Any:
        if list(roots) == [OBSERVATION]:
            return entries[OBSERVATION]
        return {name: entries[name] for name in roots}

    reward = flat_column(require(marked, REWARD), marked, REWARD)
    return peer.Batch(
        obs=observations(tree),
        act=tree[ACTION],
        rew=reward.detach().cpu().numpy().astype(np.float64),
        terminated=marker(marked, TERMINATED).cpu().numpy(),
        truncated=marker(marked, TRUNCATED).cpu().numpy(),
        done=marker(marked, DONE).cpu().numpy(),
        obs_next=observations(tree[NEXT]),
        info=peer.Batch(),
    )


def to_buffer(
    rows: TensorDictBase | ReplayBuffer,
    *,
    size: int | None = None,
    final: TensorDictBase | None = None,
    cuts: Cuts = "mark",
) -> Any:
    """Return a Tianshou `ReplayBuffer` with a copy of these rows, such as a data set for its offline algorithms.

    Its `next` and `prev` stop at the ends of runs and at both ends of the buffer. (Those of
    `ReplayBuffer.from_data` do not: there the last row is followed by the first.)

    Args:
        rows: flat batch ``[N]``, or a buffer of flatroll's with trajectory ids and ``"step_count"``, whose rows are
            grouped by trajectory.
        size: capacity. Default: the number of rows.
        final, cuts: see `to_batch`.

    Raises:
        KeyError, ValueError, TypeError: see `to_batch`; there are no rows, or more than ``size``; a buffer has no such
            markers, or no tensordicts.

    >>> import gymnasium as gym
    >>> from flatroll.rollouts import rollout
    >>> buffer = to_buffer(rollout(gym.make_vec("CartPole-v1", num_envs=2), num_steps=5, seed=0))
    >>> len(buffer), buffer.next(np.array([0, 4, 9])).tolist()
    (10, [1, 4, 9])
    """
    if isinstance(rows, ReplayBuffer):
        rows = _trajectory_by_trajectory(rows)
    batch = to_batch(rows, final=final, cuts=cuts)

    count = len(batch.rew)
    capacity = count if size is None else size
    if not count or count > capacity:
        given = "" if size is None else f", size={size}"
        raise ValueError(
            "there must be at least one row, and size must be at least the number of rows: "
            f"got {count} rows{given}"
        )

    columns = ("obs", "act", "rew", "terminated", "truncated", "done", "obs_next")
    whole = peer.ReplayBuffer.from_data(*(batch[name] for name in columns))
    buffer = peer.ReplayBuffer(capacity)
    buffer.update(whole)  # unlike from_data, update() records the position of the newest row
    return buffer


def from_buffer(buffer: Any, *, writer: int = 0) -> TensorDict:
    """Return the rows of a Tianshou buffer as a flat batch ``[N]``, run after run, oldest first.

    Env after env, each from its oldest row to its newest, also where the ring has wrapped. A run begins after every
    done row and in every sub-buffer; ``is_init`` is True where that is known to be an episode's first row, which the
    first of a sub-buffer that is full is not. What Tianshou stores besides (``info``, ``policy``) is left out; actions
    are those the policy chose, before Tianshou maps them to the env's range.

    Args:
        buffer: a `ReplayBuffer`, `VectorReplayBuffer`, or a prioritized or cached one.
        writer: number in the ids' high bits, as `flatroll.wrappers.TrajId` has it; give another than those of rows that
            shall go into the same buffer. Default 0.

    Returns:
        The columns of a flat batch, with ``is_init`` and trajectory ids. Of a buffer with ``ignore_obs_next``, the
        next observation of the last row of a run is not known: ``("collector", "next_known")`` is False there, as for
        an env that hides it, and the row repeats its own observation.

    Raises:
        TypeError: it is no Tianshou buffer, a hindsight buffer (whose goals are rewritten when they are read), or an
            observation or action is not an array of numbers.
        ValueError: it is empty, hides rows (``sample_avail``), has several rewards a row, a Dict observation has an
            entry of a name that flat batches use otherwise, or ``writer`` is out of range.

    >>> ring = peer.ReplayBuffer(3)
    >>> for step in range(5):
    ...     row = dict(obs=step, act=0, rew=1.0, terminated=step == 3, truncated=False, obs_next=step + 1)
    ...     _ = ring.add(peer.Batch(**row, info={}))
    >>> batch = from_buffer(ring)
    >>> batch["observation"].tolist(), batch["is_init"].flatten().tolist()
    ([2, 3, 4], [False, False, True])
    """
    if not isinstance(buffer, peer.ReplayBuffer):
        raise TypeError(f"buffer must be a Tianshou buffer, got {type(buffer).__name__}")
    if isinstance(buffer, peer.HERReplayBuffer | peer.HERReplayBufferManager):
        raise TypeError(
            f"{type(buffer).__name__} rewrites goals when it is read: pass a plain buffer with the same rows"
        )

    slots = buffer.sample_indices(0)  # all slots, oldest first, one sub-buffer after another
    if not len(slots) or len(slots) < len(buffer):
        raise ValueError(
            f"buffer returns {len(slots)} of its {len(buffer)} rows: it must have rows, and sample_avail=False"
        )

    rows = buffer[slots]
    flags = {key: np.asarray(rows[key[-1]], np.bool_) for key in (TERMINATED, TRUNCATED, DONE)}
    reward = np.asarray(rows.rew)
    if reward.shape != (len(slots),):
        raise ValueError(f"buffer must have one reward for each row, got shape {reward.shape[1:]} per row")

    lane = np.searchsorted(buffer.subbuffer_edges, slots, side="right") - 1
    # Whether a row is the first of its sub-buffer, and whether it follows a done row.
    first, after_end = np.ones((2, len(slots)), np.bool_)
    first[1:] = lane[1:] != lane[:-1]
    after_end[1:] = flags[DONE][:-1]
    full = np.bincount(lane, minlength=len(buffer.subbuffer_edges) - 1) == np.diff(buffer.subbuffer_edges)
    is_init = np.where(first, ~full[lane], after_end)

    batch = TensorDict({}, [len(slots)])
    for root, name in ((), "obs"), ((NEXT,), "obs_next"):
        for names, column in _columns(rows[name], name):
            names = names or (OBSERVATION,)
            batch.set((*root, column_name(names[0]), *names[1:]), column)

    for names, column in _columns(rows.act, "act"):
        batch.set((ACTION, *names), column)
    for key, flag in (*flags.items(), (IS_INIT, is_init)):
        batch.set(key, torch.from_numpy(flag).unsqueeze(-1))

    batch.set(REWARD, torch.from_numpy(reward.astype(np.float32)).unsqueeze(-1))
    ids = (first | after_end).cumsum() - 1 + (check_writer_number(writer) << ID_BITS)
    batch.set(TRAJ_IDS, torch.from_numpy(ids))
    if buffer.options["ignore_obs_next"]:
        batch.set(NEXT_KNOWN, ~run_ends(batch))
    return batch


def _add_next_observations(batch: TensorDictBase, final: TensorDictBase | None) -> list[Any]:
    """Set the next observations of a compact batch, from the rows that follow and ``final``; return the keys."""
    if final is None:
        keys = observation_keys(batch)
    else:
        keys = list(read_final(final).next)

    missing = [key for key in keys if batch.get(next_key(key), None) is None]
    if not keys or (missing and final is None):
        raise KeyError(
            f"batch has no next observations of {missing}: pass final=collector.final with a compact batch, or restore "
            "differences first, NextObservationDelta()(batch)"
        )

    known = batch.get(NEXT_KNOWN, None)
    if known is not None and bool((~known & ~marker(batch, TERMINATED)).any()):
        hidden = int((~known & ~marker(batch, TERMINATED)).nonzero()[0])
        raise ValueError(
            f"row {hidden} was not terminated and its next observation is unknown, as the env hides it: "
            "collect from an env that reports final observations"
        )

    if missing:
        columns = {key: require(batch, key) for key in missing}
        given = read_final(final, missing)

        row = check_final(given, columns, len(batch))
        if not torch.equal(row, run_ends(batch).nonzero().squeeze(-1)):
            raise ValueError(
                "final must have the next observation of the last row of each run, and of no other row"
            )

        for key, column in columns.items():
            batch.set(next_key(key), next_values(column, row, given.next[key]))
    return keys


def _trajectory_by_trajectory(buffer: ReplayBuffer) -> TensorDictBase:
    """All rows of a buffer, those of a trajectory side by side in time order."""
    rows = buffer[:]
    if not isinstance(rows, TensorDictBase):
        raise TypeError("the buffer must store tensordicts, and its storage holds other items")

    rows = rows.reshape(-1)
    for key in (TRAJ_IDS, STEP_COUNT):
        if rows.get(key, None) is None:
            raise KeyError(
                f"the buffer's rows need {key!r}: wrap the env in StepCounter, and let a Collector write them"
            )

    ids = rows.get(TRAJ_IDS)
    steps = flat_column(rows.get(STEP_COUNT), rows, STEP_COUNT)
    order = steps.argsort(stable=True)
    order = order[ids[order].argsort(stable=True)]
    rows = rows[order]
    ids = ids[order]
    steps = steps[order]

    # Dropped rows leave gaps; a run must end there.
    gap = torch.ones(len(rows), dtype=torch.bool)
    gap[1:] = (ids[1:] != ids[:-1]) | (steps[1:] != steps[:-1] + 1)
    rows.set(IS_INIT, gap.unsqueeze(-1))
    return rows


def _nest(arrays: dict[str, Any]) -> dict[str, Any]:
    """Arrays by joined names as a dict of dicts."""
    tree: dict[str, Any] = {}
    for joined, array in arrays.items():
        *folders, name = joined.split(_SEPARATOR)
        place = tree
        for folder in folders:
            place = place.setdefault(folder, {})
        place[name] = array
    return tree


def _columns(entry: Any, name: str) -> list[tuple[tuple[str, ...], Tensor]]:
    """The arrays of an entry of a Tianshou `Batch`, with their names below it (none, if it is an array)."""
    if isinstance(entry, peer.Batch):
        return [
            ((key, *names), column)
            for key, value in entry.items()
            for names, column in _columns(value, f"{name}.{key}")
        ]

    if not isinstance(entry, torch.Tensor) and np.asarray(entry).dtype.kind not in "biufc":
        raise TypeError(f"{name} must hold numbers or bools, got {np.asarray(entry).dtype}")
    return [((), torch.as_tensor(entry))]
