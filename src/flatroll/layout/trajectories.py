"""Converts a flat batch to one entry per trajectory (padded or nested tensors), and back."""

from collections.abc import Sequence
from typing import cast

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from flatroll.layout.boundaries import run_ends, run_starts
from flatroll.layout.checks import as_text, check_iterable, check_keys, check_rows, check_type
from flatroll.layout.delta import signed
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    MASK,
    TRAJ_IDS,
    TRUNCATED,
    NestedKey,
    as_tuple,
    marker,
    missing_marker,
    under_next,
)


def split_trajectories(
    batch: TensorDictBase,
    *,
    prefix: NestedKey | None = None,
    trajectory_key: NestedKey | None = None,
    done_key: NestedKey | None = None,
    as_nested: bool | torch.layout = False,
) -> TensorDict:
    """Split a flat batch into one padded (or nested) entry for each run.

    Runs are those of `run_starts`: an id that occurs again later, or two adjacent slices of one trajectory, are
    two runs. Padded form: ``[n, T_max]``, zeros after the end, and always a bool mask, True on
    real rows. Nested form: nested tensors, no padding, no mask. Prefer the flat batch itself, which every other room
    accepts.

    Args:
        batch: ``[N]`` or ``[*B, T]`` (a run never goes from one row of the leading dims to the next). Rows
            that are padding by its mask are left out.
        prefix: ids and mask are ``(prefix, "traj_ids")`` and ``(prefix, "mask")``. Default ``"collector"``; without
            ids there, ``"traj_ids"`` at the root is read.
        trajectory_key: key of the ids; the mask goes beside it. Not together with ``prefix``.
        done_key: name of the done flag under ``"next"``. Default ``"done"``.
        as_nested: True or ``torch.jagged`` for nested tensors of batch size ``[n]`` that share the batch's
            memory; ``torch.strided`` for strided ones of batch size ``[n, -1]``, copied, of which
            ``.to_padded_tensor(mask_key=("collector", "mask"))`` makes the padded form. Default False, the padded form.

    Raises:
        KeyError: a key asked for by name is missing, or no marker is there at all.
        ValueError: both ``prefix`` and ``trajectory_key`` are given, the batch has no batch dimension, or an
            empty batch is to be nested in the strided layout.
        TypeError: ``as_nested`` is neither bool nor one of the two layouts, or an entry is not a tensor, or has a
            dtype (uint16, uint32, uint64) that the strided layout cannot hold.

    >>> ids = torch.tensor([4, 4, 9, 4])
    >>> batch = TensorDict({"x": torch.arange(1, 5), "collector": {"traj_ids": ids}}, [4])
    >>> padded = split_trajectories(batch)
    >>> padded["x"]
    tensor([[1, 2],
            [3, 0],
            [4, 0]])
    >>> padded["collector", "mask"].sum(-1)
    tensor([2, 1, 1])
    >>> [x.tolist() for x in split_trajectories(batch, as_nested=True)["x"].unbind()]
    [[1, 2], [3], [4]]
    """
    check_rows(batch, values=True)
    check_keys(optional=True, prefix=prefix, trajectory_key=trajectory_key, done_key=done_key)
    if not any(as_nested is one for one in (True, False, torch.jagged, torch.strided)):
        raise TypeError(
            f"as_nested must be True, False, torch.jagged or torch.strided, got {as_text(as_nested)}"
        )

    traj_key, mask_key = _keys(prefix, trajectory_key)
    if (
        traj_key == TRAJ_IDS
        and batch.get(TRAJ_IDS, None) is None
        and batch.get(TRAJ_IDS[-1], None) is not None
    ):
        traj_key = TRAJ_IDS[-1]
    done = DONE if done_key is None else under_next(done_key)

    for asked, key in ((trajectory_key, traj_key), (done_key, done)):
        if asked is not None and batch.get(key, None) is None:
            raise missing_marker(key, batch.keys(True, True))

    starts = run_starts(batch, done_key=done, traj_key=traj_key, mask_key=mask_key).reshape(-1)
    flat = batch.reshape(starts.numel())
    if flat.get(mask_key, None) is not None:
        rows = marker(flat, mask_key).nonzero().squeeze(-1)
        flat = flat[rows].exclude(mask_key)
        starts = starts[rows]

    tensors = set(flat.keys(True, True))
    for key in flat.keys(True, True, is_leaf=is_leaf_nontensor):
        if key not in tensors:
            raise TypeError(
                f"batch[{key!r}] is not a tensor and cannot be split: leave it out with .exclude({key!r})"
            )

    # run r is the rows offsets[r] ... offsets[r + 1] - 1
    first = starts.nonzero().squeeze(-1)
    offsets = torch.cat([first, first.new_tensor([starts.numel()])])

    if as_nested is False:
        return _pad(flat, starts, offsets, mask_key)
    if as_nested is torch.strided:
        return _nest(flat, offsets, torch.strided)
    return _nest(flat, offsets, torch.jagged)


def join(parts: TensorDictBase | Sequence[TensorDictBase], *, mask_key: NestedKey = MASK) -> TensorDictBase:
    """Concatenate trajectories into a flat batch: the inverse of `split_trajectories`, bit for bit.

    Args:
        parts: the result of `split_trajectories` (padded with its mask, or nested), or a sequence of tensordicts
            ``[T_i]``, one per trajectory.
        mask_key: where the padded form has its mask.

    Returns:
        the flat batch ``[N]``, without the mask. Of nested tensors in the jagged layout it shares the memory.

    Raises:
        KeyError: a padded tensordict without its mask.
        ValueError: an empty sequence, or a part of it that is not one-dimensional.

    >>> ids = torch.tensor([4, 4, 9, 4])
    >>> batch = TensorDict({"x": torch.arange(1, 5), "collector": {"traj_ids": ids}}, [4])
    >>> join(split_trajectories(batch))["x"]
    tensor([1, 2, 3, 4])
    """
    if not isinstance(parts, TensorDictBase):
        trajectories = list(check_iterable("parts", parts, "a tensordict or a sequence of them"))
        if not trajectories:
            raise ValueError("parts must hold at least one trajectory, got an empty sequence")
        for i, part in enumerate(trajectories):
            check_type(f"parts[{i}]", part, TensorDictBase, "a tensordict")
            if part.batch_dims != 1:
                raise ValueError(f"parts[{i}] must have batch size [T], got {list(part.batch_size)}")
        return cast(TensorDictBase, TensorDict.cat(trajectories))

    check_keys(mask_key=mask_key)
    check_rows(parts, values=True)
    if any(leaf.is_nested for leaf in parts.values(True, True)):
        return _unnest(parts)

    mask = marker(parts, mask_key)
    # numbers of the real rows in the padded table, seen flat: run by run, in time order
    rows = mask.reshape(-1).nonzero().squeeze(-1)
    return cast(TensorDictBase, parts.exclude(mask_key).reshape(mask.numel())[rows])


def mark_cuts(
    batch: TensorDictBase,
    *,
    is_init_key: NestedKey = IS_INIT,
    done_key: NestedKey = DONE,
    truncated_key: NestedKey = TRUNCATED,
    traj_key: NestedKey = TRAJ_IDS,
    mask_key: NestedKey = MASK,
) -> TensorDictBase:
    """Return a copy in which the last row of every run that the batch cuts is marked as truncated and done.

    For code that finds run ends by ``done`` alone, such as other libraries' buffers: without the marks it takes the
    first row of the next run for the step after a cut one. With the marks the cut row is bootstrapped from its own
    next observation. Keep the original batch: the copy does not distinguish cut rows from truncated ones.

    Args:
        batch: ``[N]`` or ``[*B, T]``, with ``("next", "done")`` and ``("next", "truncated")``; runs are those of
            `run_ends`, which also says what the keys mean. Rows that are padding by its mask are not marked.

    Returns:
        A tensordict with the same columns, but two new ones for ``done`` and ``truncated``.

    Raises:
        KeyError: one of the two is missing.

    >>> done, ids = torch.tensor([False, False, True]), torch.tensor([3, 3, 5])
    >>> flags = {"done": done, "truncated": torch.zeros(3, dtype=torch.bool)}
    >>> marked = mark_cuts(TensorDict({"next": flags, "collector": {"traj_ids": ids}}, [3]))
    >>> marked["next", "done"], marked["next", "truncated"]
    (tensor([False,  True,  True]), tensor([False,  True, False]))
    """
    check_rows(batch)
    check_keys(done_key=done_key, truncated_key=truncated_key, mask_key=mask_key)

    done = marker(batch, done_key)
    truncated = marker(batch, truncated_key)

    ends = run_ends(batch, is_init_key=is_init_key, done_key=done_key, traj_key=traj_key, mask_key=mask_key)
    cut = ends.to(done.device) & ~done
    if batch.get(mask_key, None) is not None:
        cut &= marker(batch, mask_key)

    marked = batch.copy()  # of the structure: the columns are shared
    marked.set(done_key, (done | cut).view_as(batch.get(done_key)))
    marked.set(truncated_key, (truncated | cut).view_as(batch.get(truncated_key)))
    return marked


def _keys(prefix: NestedKey | None, trajectory_key: NestedKey | None) -> tuple[NestedKey, NestedKey]:
    """The keys of the trajectory ids and of the mask."""
    if prefix is not None and trajectory_key is not None:
        raise ValueError(f"pass prefix or trajectory_key, not both (got {prefix!r} and {trajectory_key!r})")
    if trajectory_key is not None:
        parents = as_tuple(trajectory_key)[:-1]
        if not parents:
            return trajectory_key, MASK
        return trajectory_key, (*parents, MASK[-1])

    if prefix is not None:
        return (*as_tuple(prefix), TRAJ_IDS[-1]), (*as_tuple(prefix), MASK[-1])
    return TRAJ_IDS, MASK


def _pad(flat: TensorDictBase, starts: Tensor, offsets: Tensor, mask_key: NestedKey) -> TensorDict:
    """Scatter every row to (its run, its place in the run): one pass over each column, no loop over runs."""
    n = offsets.numel() - 1
    longest = int(offsets.diff().max()) if n else 0

    # the run of each row, its place in that run, and its slot in the padded table [n * T_max]
    run = starts.cumsum(0) - 1
    place = torch.arange(starts.numel(), device=starts.device) - offsets[run]
    slot = run * longest + place

    def scatter(column: Tensor) -> Tensor:
        target = column.new_zeros((n * longest, *column.shape[1:]))
        signed(target).index_copy_(0, slot, signed(column))
        return target.view(n, longest, *column.shape[1:])

    padded = cast(TensorDict, flat.apply(scatter, batch_size=[n, longest]))
    padded.set(mask_key, scatter(torch.ones_like(starts)))
    return padded


def _nest(flat: TensorDictBase, offsets: Tensor, layout: torch.layout) -> TensorDict:
    """Cut every column at ``offsets`` into a nested tensor: a view in the jagged layout, a copy in the strided one."""
    lengths = offsets.diff().tolist()
    if layout is torch.jagged:
        # One offsets tensor for all columns: torch compares jagged shapes by the identity of their offsets.
        shortest = min(lengths, default=0)
        longest = max(lengths, default=0)
        return flat.apply(
            lambda c: torch.nested.nested_tensor_from_jagged(
                c, offsets, min_seqlen=shortest, max_seqlen=longest
            ),
            batch_size=[len(lengths)],
        )

    if not lengths:
        raise ValueError("as_nested=torch.strided cannot hold zero trajectories, use torch.jagged")

    for key, column in flat.items(True, True):
        if signed(column) is not column:
            raise TypeError(
                f"batch[{key!r}] is {column.dtype}, for which torch has no strided nested tensors: "
                "use as_nested=torch.jagged"
            )

    # Time is a batch dimension, so that tensordict's to_padded_tensor(mask_key=...) can write the mask. Its
    # size is what torch reports for such nested tensors: -1 if the lengths differ, else the common length.
    length = lengths[0] if len(set(lengths)) == 1 else -1
    return flat.apply(
        lambda c: torch.nested.as_nested_tensor(list(c.split(lengths)), layout=torch.strided),
        batch_size=[len(lengths), length],
    )


def _unnest(parts: TensorDictBase) -> TensorDictBase:
    """Nested tensors to the flat batch; in the jagged layout their values are its columns."""
    # total number of rows, from any column
    first = next(iter(parts.values(True, True)))
    if first.layout is torch.jagged:
        rows = len(first.values())
    else:
        rows = sum(map(len, first.unbind()))
    return cast(TensorDictBase, parts.apply(nested_values, batch_size=[rows]))


def nested_values(column: Tensor) -> Tensor:
    """Return the values ``[N, *F]`` of a nested tensor, end to end; for the jagged layout, its own memory."""
    if column.layout is torch.jagged:
        return column.values()
    return torch.cat(column.unbind())
