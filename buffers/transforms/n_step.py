"""n-step transitions of a batch or of samples: the rewards of n steps summed, next entries n steps later."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from tensordict import TensorDict, TensorDictBase, is_leaf_nontensor
from torch import Tensor

from flatroll.buffers.columns.column import Columns, take_rows
from flatroll.buffers.storages.next_pool import check_final_covers, next_columns
from flatroll.buffers.transforms.transform import Get, Transform
from flatroll.layout.boundaries import run_ends
from flatroll.layout.checks import check_key_names, check_keys, check_number, check_whole_number
from flatroll.layout.delta import decode_delta
from flatroll.layout.final import check_final, read_final
from flatroll.layout.keys import (
    DELTA,
    IS_INIT,
    MASK,
    NEXT,
    NEXT_KNOWN,
    STEPS_TO_NEXT_OBS,
    TRAJ_IDS,
    NestedKey,
    as_tuple,
    missing_marker,
    next_key,
    observation_keys,
    plain_key,
    under_next,
)
from flatroll.layout.transfers import upload

STEPS = STEPS_TO_NEXT_OBS
GAMMA = "gamma"
NONTERMINAL = "nonterminal"


class NStep(Transform):
    """Computes n-step transitions; base of `MultiStep` and `MultiStepTransform`."""

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: NestedKey | Sequence[NestedKey] | None = None,
        done_key: NestedKey | None = None,
        mask_key: NestedKey | None = None,
    ) -> None:
        super().__init__()
        self.gamma = float(check_number("gamma", gamma, least=0, most=1))
        self._n_steps = check_whole_number("n_steps", n_steps)
        check_keys(optional=True, done_key=done_key, mask_key=mask_key)

        if reward_keys is None:
            reward_keys = "reward"
        if not isinstance(reward_keys, str):
            rewards = check_key_names("reward_keys", reward_keys)
        else:
            rewards = [reward_keys]
        if not rewards:
            raise ValueError("reward_keys must name at least one entry, got an empty list")
        self.reward_keys = [under_next(key) for key in rewards]

        if done_key is None:
            done_key = "done"
        self.done_key = under_next(done_key)
        self.mask_key = MASK if mask_key is None else mask_key
        self._checked: frozenset[NestedKey] | None = None  # entries found to be complete

    @property
    def n_steps(self) -> int:
        """Number of steps whose rewards are summed, at least 1; may be set at any time."""
        return self._n_steps

    @n_steps.setter
    def n_steps(self, n_steps: int) -> None:
        self._n_steps = check_whole_number("n_steps", n_steps)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(n_steps={self.n_steps}, gamma={self.gamma})"

    def to_n_step(self, columns: Columns, ahead: Tensor, get: Get) -> Columns:
        """The columns of N rows as n-step transitions; see :class:`MultiStepTransform`.

        A buffer calls it, as ``read``, on a sample before the sampler marks the rows.

        Args:
            columns: of the N rows.
            ahead: int64 ``[N, n]``, positions of each row and of those after it in its trajectory, -1 for none.
            get: gives the named columns of the rows at positions int64 ``[M]``.

        Raises:
            KeyError: a reward is missing.
            TypeError: done is not bool.
            ValueError: next observations are not stored, or the rows are n-step transitions already.
        """
        if STEPS in columns:
            raise ValueError(f"the rows have {STEPS!r}: they are n-step transitions already")
        # Missing rows are replaced by the first row of the window.
        positions = torch.where(ahead >= 0, ahead, ahead[:, :1]).flatten()
        steps, rewards = self._sum_rewards(columns, ahead, positions, get)

        # Entries under "next" come from the last row of the window. A delta there refers to that row's
        # observation: adding both gives the next observation.
        moved = [key for key in columns if as_tuple(key)[0] == NEXT and key not in rewards]
        deltas = {}
        for key in moved:
            if as_tuple(key)[:2] == DELTA:
                deltas[key] = plain_key(as_tuple(key)[2:])
        known = [NEXT_KNOWN] if NEXT_KNOWN in columns else []
        wanted = [*moved, *known, *deltas.values()]
        if ahead.device == steps.device:
            reached = get(ahead.gather(1, steps - 1).squeeze(1), wanted)
        else:
            # Only the device knows where windows end: read all their rows, and choose there instead of waiting for it.
            at = torch.arange(0, ahead.numel(), ahead.shape[1], device=steps.device) + steps.squeeze(1) - 1
            reached = {key: take_rows(column, at) for key, column in get(positions, wanted).items()}

        changed = {key: column for key, column in columns.items() if key not in deltas}
        for key, root in deltas.items():
            changed[next_key(root)] = decode_delta(reached[root], reached[key])
        for key in (*moved, *known):
            if key not in deltas:
                changed[key] = reached[key]

        originals = [*rewards]
        if self.done_key in columns:
            originals.append(self.done_key)
        for key in originals:
            *path, name = as_tuple(key)
            changed[(*path, f"original_{name}")] = columns[key]
        changed |= rewards

        done = changed.get(self.done_key)
        if done is None:
            nonterminal = torch.ones_like(steps, dtype=torch.bool)
        else:
            nonterminal = ~done.reshape(-1, 1)
        mask = columns.get(self.mask_key)
        if mask is not None:
            nonterminal &= mask.reshape(-1, 1)

        # gamma ** k in float64, then as float32, or float64 if the rewards are.
        dtype = torch.promote_types(next(iter(rewards.values())).dtype, torch.float32)
        changed[STEPS] = steps
        changed[GAMMA] = (self.gamma ** steps.double()).to(dtype)
        changed[NONTERMINAL] = nonterminal

        self._check_next(changed, len(steps))
        return changed

    def _sum_rewards(
        self, columns: Columns, ahead: Tensor, positions: Tensor, get: Get
    ) -> tuple[Tensor, Columns]:
        """Return the steps of each window, ``[N, 1]``, and the discounted sums of rewards.

        ``positions`` are those of all rows of windows, ``[N * n]``.
        """
        for key in self.reward_keys:
            if key not in columns:
                raise missing_marker(key, columns)

        rows, n = ahead.shape
        device = columns[self.reward_keys[0]].device
        used = upload(ahead >= 0, device)

        # Read all windows at once, [N * n] rows.
        done_keys = [self.done_key] if self.done_key in columns else []
        window = get(positions, [*self.reward_keys, *done_keys])
        if done_keys:
            done = window[self.done_key]
            if done.dtype is not torch.bool:
                raise TypeError(f"batch[{self.done_key!r}] must be bool, got {done.dtype}: use .bool()")
            if done.numel() != rows * n:
                raise ValueError(
                    f"batch[{self.done_key!r}] needs one value per row, got {list(done.shape[1:])}"
                )
            used[:, 1:] &= ~done.view(rows, n)[:, :-1]  # a window ends at a done row

        used = used.long().cumprod(1).bool()  # False from the first row on that is not in the window
        steps = used.sum(1, keepdim=True)

        sums: Columns = {}
        for key in self.reward_keys:
            values = window[key].reshape(rows, n, *window[key].shape[1:])
            dtype = torch.float32
            if values.is_floating_point():
                dtype = values.dtype
            weight = (self.gamma ** torch.arange(n, device=device, dtype=torch.float64)).to(dtype)
            shape = (-1, n, *[1] * (values.ndim - 2))
            sums[key] = torch.where(used.view(shape), values * weight.view(shape), 0.0).sum(1)

        return steps, sums

    def _check_next(self, columns: Columns, rows: int) -> None:
        """Raise ValueError unless every observation has a next one; checked once per set of entries."""
        keys = frozenset(columns)
        if keys == self._checked:
            return

        roots = observation_keys(TensorDict(dict(columns), [rows]))
        lacking = [next_key(key) for key in roots if next_key(key) not in columns]
        if lacking or not roots:
            missing = lacking[0] if lacking else ("next", "<observation>")
            raise ValueError(
                f"n-step transitions need {missing!r} at every row: store "
                "with compact_obs=True and extend(batch, final=...), or call MultiStep.forward(batch, final=...)"
            )
        self._checked = keys

    def of_batch(
        self, td: TensorDictBase, final: TensorDictBase | None, more: Tensor | None, **keys: NestedKey
    ) -> TensorDictBase:
        """Turn the batch ``td``, ``[N]`` or ``[*B, T]``, into n-step transitions that do not extend past their run.

        ``final`` holds next observations of a compact batch; ``more``, bool of the batch's shape, marks run ends
        besides those that `run_ends` finds by ``keys``.
        """
        done = td.get(self.done_key, None)
        if td.batch_dims and done is not None and done.shape[td.batch_dims :] not in ((), (1,)):
            return self._per_agent(td, done, final, more, **keys)
        if more is not None and more.shape != td.batch_size:
            raise ValueError(
                f"{type(self).__name__} needs samples of single rows, {list(more.shape)}, got {list(td.batch_size)}: "
                "extend the buffer with flat batches [N]"
            )

        ends = run_ends(td, done_key=self.done_key, mask_key=self.mask_key, **keys)
        if more is not None:
            ends = ends | more.to(ends.device)
        shape = td.batch_size
        # Row b of [*B, T] becomes rows b * T ... b * T + T - 1, and its last one ends a run.
        if td.batch_dims > 1:
            td = td.reshape(shape.numel())
            ends = ends.reshape(-1)
        columns = _read_columns(td, final, ends)

        # Row i looks at rows i ... i + n - 1, up to the last row of its run.
        at = torch.arange(len(td), device=ends.device)
        lasts = ends.nonzero().squeeze(1)
        ahead = at[:, None] + torch.arange(self.n_steps, device=ends.device)
        ahead.masked_fill_(ahead > lasts[torch.searchsorted(lasts, at)][:, None], -1)

        def get(positions: Tensor, keys: Sequence[NestedKey]) -> Columns:
            return {key: take_rows(columns[key], upload(positions, columns[key].device)) for key in keys}

        changed = self.to_n_step(columns, ahead, get)
        result = td.clone(recurse=False).exclude(DELTA)
        for key, column in changed.items():
            result.set(key, column)

        if len(shape) == 1:
            return result
        return result.reshape(shape)

    def _per_agent(
        self, td: TensorDictBase, done: Tensor, final: object, more: object, **keys: NestedKey
    ) -> TensorDictBase:
        """:meth:`of_batch` where done is ``[*B, T, *A]``: each of the A agents has its own trajectories."""
        time = td.batch_dims - 1
        shape = done.shape[:-1] if done.shape[-1] == 1 else done.shape
        lacking = [key for key, column in td.items(True, True) if column.shape[: len(shape)] != shape]
        if lacking or final is not None or more is not None:
            if lacking:
                name = lacking[0]
            elif final is not None:
                name = "final"
            else:
                name = "the sample"
            raise ValueError(
                f"batch[{self.done_key!r}] has {list(done.shape)} values in a batch {list(td.batch_size)}, but "
                f"{name!r} does not have one row for each: give each row one done flag, or leave it out with .exclude"
            )

        wide: Any = td.clone(recurse=False)
        wide.batch_size = shape
        # Move time behind the agents, [*B, *A, T], and back again.
        back = [*range(time), len(shape) - 1, *range(time, len(shape) - 1)]
        ahead = [*range(time), *range(time + 1, len(shape)), time]
        wide = self.of_batch(wide.permute(*ahead), None, None, **keys).permute(*back)

        wide.batch_size = td.batch_size
        return cast(TensorDictBase, wide)


def _read_columns(td: TensorDictBase, final: TensorDictBase | None, ends: Tensor) -> Columns:
    """Return the columns of the batch ``td`` ``[N]``, with the next observations that only ``final`` holds.

    Raises:
        TypeError: an entry under ``"next"`` is not a tensor.
    """
    columns: Columns = dict(td.items(True, True))
    for key in td.keys(True, True, is_leaf=is_leaf_nontensor):
        if key not in columns and as_tuple(key)[0] == NEXT:
            raise TypeError(f"batch[{key!r}] is not a tensor and cannot be moved: use .exclude")

    if final is not None:
        final_rows = read_final(final)
        check_final_covers(check_final(final_rows, columns, len(td)), ends, columns)
        for key, column in next_columns(columns, final_rows).items():
            columns[next_key(key)] = column
    return columns


class MultiStep(NStep):
    """Turns a collector's batch into n-step transitions, looking ahead within the batch only.

    :class:`MultiStepTransform` says what is written. A run ends where `flatroll.layout.run_ends` says; the
    windows of the last n - 1 rows of a run are shorter, at the end of the batch too, and bootstrap from what the
    batch knows last. `MultiStepTransform` sees the rows of the batches that follow and loses none of them.

    Args:
        gamma: discount in [0, 1].
        n_steps: rows to look ahead, at least 1. 1 leaves rewards and next entries as they are.
        reward_keys, done_key, mask_key: see `MultiStepTransform`.
        traj_key: integer entry, constant within a trajectory.
        is_init_key: bool entry, True at the first row of a trajectory.

    Raises:
        ValueError: ``gamma`` or ``n_steps`` out of range.

    Reference: Sutton 1988, Learning to predict by the methods of temporal differences.

    >>> import torch
    >>> from tensordict import TensorDict
    >>> done = torch.tensor([[False], [False], [True], [False]])
    >>> batch = TensorDict({"observation": torch.arange(4.0), "next": {"observation": torch.arange(1.0, 5.0),
    ...     "reward": torch.ones(4, 1), "done": done, "terminated": done}}, [4])
    >>> batch = MultiStep(gamma=0.5, n_steps=2)(batch)
    >>> batch["next", "reward"].flatten(), batch["next", "observation"], batch["gamma"].flatten()
    (tensor([1.5000, 1.5000, 1.0000, 1.0000]), tensor([2., 3., 3., 4.]), tensor([0.2500, 0.2500, 0.5000, 0.5000]))
    >>> batch["next", "terminated"].flatten()
    tensor([False,  True,  True, False])
    """

    def __init__(
        self,
        gamma: float,
        n_steps: int,
        *,
        reward_keys: NestedKey | Sequence[NestedKey] | None = None,
        done_key: NestedKey | None = None,
        mask_key: NestedKey | None = None,
        traj_key: NestedKey = TRAJ_IDS,
        is_init_key: NestedKey = IS_INIT,
    ) -> None:
        super().__init__(n_steps, gamma, reward_keys=reward_keys, done_key=done_key, mask_key=mask_key)
        self.traj_key = traj_key
        self.is_init_key = is_init_key

    def forward(self, td: TensorDictBase, final: TensorDictBase | None = None) -> TensorDictBase:
        """Return the n-step batch; ``td`` stays unchanged.

        Args:
            td: flat batch ``[N]``; or ``[*B, T]``, whose last dimension is time. No window goes from one row of the
                leading dimensions to the next, nor from real rows into padding (``("collector", "mask")``,
                ``[*B, T]`` or ``[*B, T, 1]``). With done ``[*B, T, *A]``, one for each agent, every entry must have
                these dimensions, and the columns written are ``[*B, T, *A, 1]``.
            final: the next observations that no row of a compact batch holds (``collector.final``). Its row numbers
                are those of ``td.reshape(-1)``.

        Raises:
            KeyError: a reward is missing, or there is no boundary marker at all.
            TypeError: done is not bool.
            ValueError: ``td`` has no batch dimension, lacks next observations, or consists of n-step transitions.
        """
        return self.of_batch(td, final, None, is_init_key=self.is_init_key, traj_key=self.traj_key)


class MultiStepTransform(NStep):
    """Turns the samples of a replay buffer into n-step transitions; the buffer stores single steps.

    Each sampled row looks ahead through the trajectory index, past the end of its slice, of the batch it was
    collected in and of the ring. So ``n_steps`` and ``gamma`` may change at any time, and the storage may be compact.

    With ``k = min(n_steps, rows to the first done row, rows stored)`` a sample's row t has

    * ``("next", "reward")``: ``sum(gamma**j * reward[t + j] for j < k)``; the reward of row t alone is in
      ``("next", "original_reward")`` (``original_<key>`` for each of several reward keys);
    * every other entry under ``"next"``, next observations and the done flags among them: that of row t + k - 1.
      ``("collector", "next_known")`` moves with them;
    * ``"steps_to_next_obs"``: k, int64 ``[N, 1]``; ``"gamma"``: ``gamma**k``, ``[N, 1]``, float32 (float64 for
      float64 rewards); ``"nonterminal"``: bool ``[N, 1]``, False where row t + k - 1 is done, and at padding.

    So ``reward + gamma**k * value(next observation) * ~terminated`` is the n-step target at every row: nothing is
    bootstrapped beyond a terminal state, and truncated, cut and newest rows bootstrap from the last observation
    known. Deltas, ``("next", "delta", <obs>)``, are decoded on the way, with or without a `NextObservationDelta` beside
    it. What other transforms do to samples, they do to n-step transitions: these are made first.

    The sampler marks its rows afterwards: the last row of a slice is done and truncated unless it is terminated.
    Rows whose window ends the episode are done in mid-slice, and code that splits at ``done`` splits there. The rows'
    own flag is in ``("next", "original_done")``: to run over n-step slices as sequences, give it to a recurrent
    module (and to `flatroll.modules.BurnIn`) as ``done_key``.

    Args:
        n_steps: rows to look ahead, at least 1.
        gamma: discount in [0, 1].
        reward_keys: entries under ``"next"`` to sum, default ``["reward"]``. Integer rewards are summed in float32.
        done_key: bool entry under ``"next"`` that ends a trajectory, default ``"done"``.
        mask_key: bool entry, False at padding, default ``("collector", "mask")``; used if it is there.

    Raises:
        ValueError: ``gamma`` or ``n_steps`` out of range.

    >>> import torch
    >>> rows = {("next", "reward"): torch.ones(4, 1), "obs": torch.arange(4), ("next", "obs"): torch.arange(1, 5)}
    >>> def get(slots, keys):  # what a buffer gives
    ...     return {key: rows[key][slots] for key in keys}
    >>> sample = get(torch.tensor([0, 3]), rows)
    >>> sample = MultiStepTransform(n_steps=3, gamma=0.5).read(sample, torch.tensor([[0, 1, 2], [3, -1, -1]]), get)
    >>> sample["next", "reward"].flatten(), sample["next", "obs"], sample["steps_to_next_obs"].flatten()
    (tensor([1.7500, 1.0000]), tensor([3, 4]), tensor([3, 1]))
    """

    wants_ends = True

    @property
    def look_ahead(self) -> int:
        """Number of consecutive rows the buffer looks up for each sampled row, that row included."""
        return self.n_steps

    read = NStep.to_n_step

    def forward(self, td: TensorDictBase, ends: Tensor | None = None) -> TensorDictBase:
        """Return a sample from :meth:`read` unchanged; treat any other batch as `MultiStep` does.

        ``ends`` (bool, of the batch's shape) adds run ends.
        """
        if td.get(STEPS, None) is not None:
            return td
        return self.of_batch(td, None, ends)
