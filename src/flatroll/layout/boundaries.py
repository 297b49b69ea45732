"""The boundary rule: where the runs of a flat batch begin and end."""

import torch
from tensordict import TensorDictBase
from torch import Tensor

from flatroll.layout.checks import check_keys, check_rows
from flatroll.layout.keys import (
    DONE,
    ENV,
    ENV_STEP,
    IS_INIT,
    MASK,
    TRAJ_IDS,
    NestedKey,
    flat_column,
    missing_marker,
    require,
)
from flatroll.layout.tensordict_seam import get_entry


def run_ends(
    batch: TensorDictBase,
    *,
    is_init_key: NestedKey = IS_INIT,
    done_key: NestedKey | None = DONE,
    traj_key: NestedKey | None = TRAJ_IDS,
    mask_key: NestedKey = MASK,
) -> Tensor:
    """Mark the last row of every run of consecutive rows.

    Row ``i`` ends a run if it is done, if row ``i + 1`` is an ``is_init`` row or has another trajectory id,
    or if it is the last row. A run that ends without done was *cut*: its value is bootstrapped, its trace
    stops. Markers missing from the batch are ignored; at least one must be present. In a padded batch a run also ends
    where the mask changes, so padding never continues a run. No host sync.

    Args:
        batch: tensordict of batch size ``[N]`` or ``[*B, T]``; time is the last batch dim, and no run goes
            from one row of the leading dims to the next.
        is_init_key: bool ``[*B, T]`` or ``[*B, T, 1]``, True on the first row of a trajectory or slice.
        done_key: bool of the same shape, True on the last row of an episode. None: not read.
        traj_key: integer of the same shape, constant within a trajectory. None: not read.
        mask_key: bool of the same shape, True on real rows; it ends runs but does not replace the others.

    Returns:
        bool tensor of the batch's shape.

    Raises:
        KeyError: none of the three markers is in the batch.
        TypeError: ``is_init`` or ``done`` is not bool; the batch is not a tensordict, or a key is not a string or
            tuple of strings.
        ValueError: the batch has no batch dimension.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> done = torch.tensor([False, True, False, False])
    >>> run_ends(TensorDict({"next": {"done": done}}, [4]))
    tensor([False,  True, False,  True])
    """
    try:
        if batch.batch_dims < 1:
            raise ValueError(
                "batch must have at least one batch dimension (time is the last), got batch size []"
            )

        flags: list[Tensor | None] = []
        for key in (done_key, is_init_key, mask_key):
            column = None
            if key is not None:
                column = get_entry(batch, key)
                if column is not None:
                    column = flat_column(column, batch, key, flag=True)
            flags.append(column)
        done, is_init, mask = flags

        ids: Tensor | None = None
        if traj_key is not None:
            ids = get_entry(batch, traj_key)
            if ids is not None:
                ids = flat_column(ids, batch, traj_key)
    except (AttributeError, KeyError, TypeError, RuntimeError):
        check_rows(batch)
        check_keys(is_init_key=is_init_key, mask_key=mask_key)
        check_keys(optional=True, done_key=done_key, traj_key=traj_key)
        raise

    if done is None and is_init is None and ids is None:
        raise no_markers_error(batch, is_init_key, done_key, traj_key)
    return ends_from(done, is_init, ids, mask)


def no_markers_error(
    batch: TensorDictBase, is_init_key: NestedKey, done_key: NestedKey | None, traj_key: NestedKey | None
) -> KeyError:
    """Return the error for a batch without any of the markers from which :func:`run_ends` finds runs."""
    error = missing_marker(is_init_key, batch.keys(True, True))
    return KeyError(f"{error.args[0]}. Any one of {is_init_key!r}, {done_key!r}, {traj_key!r} is enough")


def ends_from(
    done: Tensor | None, is_init: Tensor | None, ids: Tensor | None, mask: Tensor | None = None
) -> Tensor:
    """Return the last rows of runs (:func:`run_ends`), given the markers ``[*B, T]`` that there are, at least one.

    The mask alone is not enough.

    >>> import torch
    >>> ends_from(None, None, torch.tensor([7, 7, 9, 9]))
    tensor([False,  True, False,  True])
    """
    any_marker = next(column for column in (ids, is_init, done) if column is not None)

    if done is None:
        ends = torch.zeros(any_marker.shape, dtype=torch.bool, device=any_marker.device)
    else:
        ends = done.to(any_marker.device, copy=True)  # a copy, because the lines below write into it

    inner = ends[..., :-1]  # a view of all rows but the last
    if is_init is not None:  # row i ends a run if row i + 1 begins one
        inner |= is_init[..., 1:].to(any_marker.device)
    for column in (ids, mask):
        if column is not None:
            inner |= (column[..., 1:] != column[..., :-1]).to(any_marker.device)
    ends[..., -1:] = True
    return ends


def goes_on_in_env(batch: TensorDictBase) -> Tensor:
    """Mark the rows whose next row is the next step of the same env, of whichever episode.

    Row ``i`` is marked if row ``i + 1`` has the same ``("collector", "env")`` and one more ``("collector",
    "env_step")``; the last row never is. No host sync.

    Args:
        batch: tensordict of batch size ``[N]`` or ``[*B, T]``; time is the last batch dim.

    Returns:
        bool tensor of the batch's shape.

    Raises:
        KeyError: the batch lacks one of the two, which ``Collector(track_envs=True)`` writes.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> env = {"env": torch.tensor([0, 0, 0, 1]), "env_step": torch.tensor([4, 5, 7, 8])}
    >>> goes_on_in_env(TensorDict({"collector": env}, [4]))
    tensor([ True, False, False, False])
    """
    env = flat_column(require(batch, ENV), batch, ENV)
    step = flat_column(require(batch, ENV_STEP), batch, ENV_STEP)

    follows = torch.zeros(env.shape, dtype=torch.bool, device=env.device)
    follows[..., :-1] = (env[..., 1:] == env[..., :-1]) & (step[..., 1:] == step[..., :-1] + 1)
    return follows


def run_starts(
    batch: TensorDictBase,
    *,
    is_init_key: NestedKey = IS_INIT,
    done_key: NestedKey = DONE,
    traj_key: NestedKey = TRAJ_IDS,
    mask_key: NestedKey = MASK,
) -> Tensor:
    """Mark the first row of every run: row 0, and each row after a run end (:func:`run_ends`).

    Args, shapes and errors as for :func:`run_ends`.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> ids = torch.tensor([7, 7, 9, 9])
    >>> run_starts(TensorDict({"collector": {"traj_ids": ids}}, [4]))
    tensor([ True, False,  True, False])
    """
    ends = run_ends(batch, is_init_key=is_init_key, done_key=done_key, traj_key=traj_key, mask_key=mask_key)
    return starts_from(ends)


def starts_from(ends: Tensor) -> Tensor:
    """Return the first rows of runs, given their last rows; time is the last dim.

    >>> import torch
    >>> starts_from(torch.tensor([False, True, False, True]))
    tensor([ True, False,  True, False])
    """
    starts = torch.ones_like(ends)
    starts[..., 1:] = ends[..., :-1]
    return starts


def steps_into_run(starts: Tensor) -> Tensor:
    """Return each row's position within its run, from 0, int64; time is the last dim.

    >>> import torch
    >>> steps_into_run(torch.tensor([True, False, False, True]))
    tensor([0, 1, 2, 0])
    """
    # The row number minus that of the last start at or before the row, which cummax carries forward.
    at = torch.arange(starts.shape[-1], device=starts.device).expand(starts.shape)
    return at - torch.where(starts, at, 0).cummax(-1).values
