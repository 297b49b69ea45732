"""n-step transitions, of a collector's batch or of a buffer's samples."""

from collections.abc import Sequence

from tensordict import TensorDictBase
from torch import Tensor

from flatroll.buffers.columns.base import Columns
from flatroll.buffers.transforms.n_step import STEPS, Get, NStep
from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import IS_INIT, TRAJ_IDS, NestedKey


class MultiStep(NStep):
    """n-step transitions of a collector's batch, looking ahead within the batch only.

    What is written is said at :class:`MultiStepTransform`. A run ends where `flatroll.layout.run_ends` says; the
    windows of the last n - 1 rows of a run are shorter, at the end of the batch too, and bootstrap from what the
    batch knows last. `MultiStepTransform` sees the rows of the batches that follow and loses none of them.

    Args:
        gamma: discount in [0, 1].
        n_steps: rows to look ahead, at least 1. 1 leaves rewards and next entries as they are.
        reward_keys: entries under ``"next"`` to sum, default ``["reward"]``.
        done_key: bool entry under ``"next"`` that ends a trajectory, default ``"done"``.
        mask_key: bool entry, False at padding, default ``("collector", "mask")``; used if it is there.
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
        super().__init__(n_steps, gamma, reward_keys, done_key, mask_key)
        self.traj_key = traj_key
        self.is_init_key = is_init_key

    def forward(self, td: TensorDictBase, final: TensorDictBase | None = None) -> TensorDictBase:
        """The n-step batch; ``td`` is left as it was.

        Args:
            td: flat batch ``[N]``.
            final: the next observations that no row of a compact batch holds (``collector.final``).

        Raises:
            KeyError: a reward is missing, or there is no boundary marker at all.
            TypeError: done is not bool.
            ValueError: ``td`` is not flat, lacks next observations, or consists of n-step transitions.
        """
        _check_flat(td, type(self).__name__)
        ends = run_ends(
            td,
            is_init_key=self.is_init_key,
            done_key=self.done_key,
            traj_key=self.traj_key,
            mask_key=self.mask_key,
        )
        return self.within(td, final, ends)

    __call__ = forward


class MultiStepTransform(NStep):
    """n-step transitions of a replay buffer, made when rows are sampled.

    The buffer stores single steps and loses none; each sampled row looks ahead through the trajectory index, past
    the end of its slice, of the batch it was collected in and of the ring. So ``n_steps`` and ``gamma`` may change
    at any time, and the storage may be compact.

    With ``k = min(n_steps, rows to the first done row, rows stored)`` a sample's row t has

    * ``("next", "reward")``: ``sum(gamma**j * reward[t + j] for j < k)``; the reward of row t alone is in
      ``("next", "original_reward")`` (``original_<key>`` for each of several reward keys);
    * every other entry under ``"next"``, next observations and the done flags among them: that of row t + k - 1.
      ``("collector", "next_known")`` moves with them;
    * ``"steps_to_next_obs"``: k, int64 ``[N, 1]``; ``"gamma"``: ``gamma**k``, ``[N, 1]``, float32 (float64 for
      float64 rewards); ``"nonterminal"``: bool ``[N, 1]``, False where row t + k - 1 is done, and at padding.

    So ``reward + gamma**k * value(next observation) * ~terminated`` is the n-step target at every row: nothing is
    bootstrapped beyond a terminal state, and truncated, cut and newest rows bootstrap from the last observation
    known. Deltas, ``("next", "delta", <obs>)``, are decoded on the way: leave `NextObservationDelta` out. What other
    transforms do to samples, they do to n-step transitions: these are made first.

    The sampler marks its rows afterwards: the last row of a slice is done and truncated unless it is terminated.
    Rows whose window ends the episode are done in mid-slice, and whoever splits at ``done`` splits there. The rows' own
    flag is in ``("next", "original_done")``: to run over n-step slices as sequences, give it to a recurrent module
    (and to `flatroll.modules.BurnIn`) as ``done_key``.

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

    def __init__(
        self,
        n_steps: int,
        gamma: float,
        *,
        reward_keys: NestedKey | Sequence[NestedKey] | None = None,
        done_key: NestedKey | None = None,
        mask_key: NestedKey | None = None,
    ) -> None:
        super().__init__(n_steps, gamma, reward_keys, done_key, mask_key)

    wants_ends = True

    @property
    def look_ahead(self) -> int:
        """How many rows, itself included, the buffer finds for each sampled row."""
        return self.n_steps

    def read(self, columns: Columns, ahead: Tensor, get: Get) -> Columns:
        """The columns of a sample as n-step transitions; the buffer calls it before the sampler marks the rows.

        Args:
            columns: of the N sampled rows.
            ahead: int64 ``[N, n]``, slots of each row and of those after it in its trajectory, -1 for none.
            get: gives the named columns of the stored rows in slots int64 ``[M]``.

        Raises:
            KeyError: a reward is missing.
            TypeError: done is not bool.
            ValueError: next observations are not stored, or the rows are n-step transitions already.
        """
        return self.written(columns, ahead, get)

    def forward(self, td: TensorDictBase, ends: Tensor | None = None) -> TensorDictBase:
        """A sample that :meth:`read` made as it is; of another flat batch, what `MultiStep` makes of it.

        ``ends`` (bool ``[N]``) adds run ends.
        """
        if td.get(STEPS, None) is not None:
            return td
        _check_flat(td, type(self).__name__)
        found = run_ends(td, done_key=self.done_key, mask_key=self.mask_key)
        return self.within(td, None, found if ends is None else found | ends.to(found.device))

    __call__ = forward


def _check_flat(td: TensorDictBase, name: str) -> None:
    if td.batch_dims != 1:
        raise ValueError(
            f"{name} needs a flat batch [N], got {list(td.batch_size)}: batch.reshape(-1) lays [envs, time] end to "
            'end, and ("collector", "traj_ids") or "is_init" tells the trajectories apart'
        )
