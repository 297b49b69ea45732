"""`GroupAdvantage`: advantages of whole runs, compared with the other runs of their group."""

import warnings
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor

from flatroll.layout.boundaries import run_ends, starts_from
from flatroll.layout.checks import check_flags, check_keys, check_number
from flatroll.layout.keys import (
    DONE,
    IS_INIT,
    MASK,
    REWARD,
    STEP_COUNT,
    TRAJ_IDS,
    NestedKey,
    flat_column,
    optional_marker,
    plain_key,
    require,
)


class GroupAdvantage(TensorDictModuleBase):
    """Compares each run of a flat batch ``[N]`` or ``[*B, T]`` with the other runs of its group; no critic is needed.

    With ``R`` the sum of a run's rewards, every row of the run gets ``(R - mean) / (deviation + epsilon)``: mean and
    deviation are those of its group, the runs with the same number under ``group_key`` (answers to one prompt,
    episodes from one seed). This is GRPO's advantage; without ``std`` it is the one of Dr. GRPO, and with
    ``leave_one_out`` as well that of RLOO, where the mean is over the other runs of the group.

    The losses `ClipPPOLoss` and `A2CLoss` read it without a critic: ``critic_coeff=None``.

    Args:
        group_key: integers, one for each row, the same in all rows of a run. Default: ``"group"``.
        std: divide by the deviation of the group's ``R`` (with n - 1 in its denominator). Default: True.
        leave_one_out: subtract the mean of the group's other runs. Default: False.
        epsilon: added to the deviation. Default: 1e-4.
        reward_key: floating, one for each row. Default: ``("next", "reward")``.
        advantage_key: the column that it writes, in the shape and dtype of the reward. Default: ``"advantage"``.
        is_init_key, done_key, traj_key: the markers, see :func:`flatroll.layout.run_ends`.

    Rows of padding belong to no group and get 0. A run that is alone in its group has nothing to be compared with: its
    advantage is 0, with one warning. Runs must be whole episodes: a part of one has only a part of its rewards.

    Raises:
        KeyError: the batch lacks the group, the reward or all markers.
        TypeError: the group is not an integer column, or the reward not a floating one.
        ValueError: the rows of a run are of different groups; a run does not end with its episode (done), or does not
            begin with it (``"step_count"``).

    >>> from tensordict import TensorDict
    >>> end = torch.tensor([False, True, True, True])
    >>> batch = TensorDict({"group": torch.zeros(4, dtype=torch.int64), "next": {
    ...     "reward": torch.tensor([[1.0], [1.0], [0.0], [4.0]]), "done": end}}, [4])
    >>> GroupAdvantage(std=False)(batch)["advantage"].squeeze(-1)
    tensor([ 0.,  0., -2.,  2.])
    >>> GroupAdvantage(std=False, leave_one_out=True)(batch)["advantage"].squeeze(-1)
    tensor([ 0.,  0., -3.,  3.])

    References:
        Z. Shao et al., DeepSeekMath, https://arxiv.org/abs/2402.03300; A. Ahmadian et al., Back to basics,
        https://arxiv.org/abs/2402.14740
    """

    def __init__(
        self,
        *,
        group_key: NestedKey = "group",
        std: bool = True,
        leave_one_out: bool = False,
        epsilon: float = 1e-4,
        reward_key: NestedKey = REWARD,
        advantage_key: NestedKey = "advantage",
        is_init_key: NestedKey = IS_INIT,
        done_key: NestedKey = DONE,
        traj_key: NestedKey = TRAJ_IDS,
    ) -> None:
        super().__init__()
        check_flags(std=std, leave_one_out=leave_one_out)
        check_keys(
            group_key=group_key,
            reward_key=reward_key,
            advantage_key=advantage_key,
            is_init_key=is_init_key,
            done_key=done_key,
            traj_key=traj_key,
        )

        self.std = std
        self.leave_one_out = leave_one_out
        self.epsilon = float(check_number("epsilon", epsilon, least=0))
        self.group_key = plain_key(group_key)
        self.reward_key = plain_key(reward_key)
        self.advantage_key = plain_key(advantage_key)
        self.is_init_key = is_init_key
        self.done_key = done_key
        self.traj_key = traj_key
        self.in_keys: list[Any] = [self.group_key, self.reward_key]
        self.out_keys: list[Any] = [self.advantage_key]
        self._warned = False

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:
        """Write the advantages; return the batch."""
        reward = require(tensordict, self.reward_key)
        if not reward.numel():
            return tensordict.set(self.advantage_key, torch.zeros_like(reward))

        if not reward.is_floating_point():
            raise TypeError(f"batch[{self.reward_key!r}] must be floating, got {reward.dtype}: cast it")
        flat_reward = flat_column(reward, tensordict, self.reward_key).reshape(-1)
        starts, run, group_of_run = self._read_runs(tensordict)

        # Sums are of float64: a group's returns may be large and close to each other.
        total = torch.zeros(len(group_of_run), dtype=torch.float64, device=reward.device)
        total.index_add_(0, run, flat_reward.double())
        mask = optional_marker(tensordict, MASK)
        real = torch.ones_like(group_of_run, dtype=torch.bool)
        if mask is not None:
            real = torch.zeros_like(real).index_fill_(0, run[mask.reshape(-1)], True)
        self._check_whole(tensordict, starts, real)

        advantage = torch.zeros_like(total)
        advantage[real] = self._compare(total[real], group_of_run[real])
        of_rows = advantage.index_select(0, run).to(reward.dtype)
        tensordict.set(self.advantage_key, of_rows.reshape(reward.shape))
        return tensordict

    def _read_runs(self, batch: TensorDictBase) -> tuple[Tensor, Tensor, Tensor]:
        """Return whether a run starts at each row, bool ``[N]``, the number of its run, int64 ``[N]``, and the group of
        each run, int64 ``[R]``."""
        ends = run_ends(batch, is_init_key=self.is_init_key, done_key=self.done_key, traj_key=self.traj_key)
        starts = starts_from(ends).reshape(-1)
        run = starts.cumsum(0) - 1

        column = require(batch, self.group_key)
        if column.is_floating_point() or column.is_complex() or column.dtype is torch.bool:
            raise TypeError(f"batch[{self.group_key!r}] must be an integer column, got {column.dtype}")
        group = flat_column(column, batch, self.group_key).reshape(-1)
        group_of_run = group[starts]

        strange = group != group_of_run.index_select(0, run)
        if bool(strange.any()):
            row = int(strange.nonzero()[0])
            first = int(group_of_run[run[row]])
            raise ValueError(
                f"row {row} is of group {int(group[row])}, but its run began in group {first}: batch"
                f"[{self.group_key!r}] must be the same in all rows of a run"
            )
        return starts, run, group_of_run

    def _check_whole(self, batch: TensorDictBase, starts: Tensor, real: Tensor) -> None:
        """Raise ValueError if a run is known to be a part of its episode only.

        Args:
            batch: ``[*B]``.
            starts: bool ``[N]``, first rows of runs.
            real: bool ``[R]``, runs that are not padding.
        """
        firsts = starts.nonzero().squeeze(1)
        lasts = torch.cat([firsts[1:], firsts.new_tensor([len(starts)])]) - 1
        way_out = (
            "the sum of its rewards would be that of a part only: collect whole episodes (trajs_per_batch= of a "
            "Collector), or leave this run out"
        )

        done = optional_marker(batch, self.done_key)
        if done is not None:
            unfinished = real & ~done.reshape(-1)[lasts]
            if bool(unfinished.any()):
                row = int(lasts[unfinished][0])
                raise ValueError(
                    f"row {row} is the last one of its run, but batch[{self.done_key!r}] is False there; {way_out}"
                )

        steps = batch.get(STEP_COUNT, None)
        if steps is not None and steps.numel() == len(starts):
            late = real & (steps.reshape(-1)[firsts] > 0)
            if bool(late.any()):
                row = int(firsts[late][0])
                count = int(steps.reshape(-1)[row])
                raise ValueError(
                    f"row {row} is the first one of its run, but batch[{STEP_COUNT!r}] is {count} there; {way_out}"
                )

    def _compare(self, total: Tensor, group: Tensor) -> Tensor:
        """Return the advantage of each run, float64 ``[R]``, from the sum of its rewards and its group."""
        member: Tensor
        size: Tensor
        _, member, size = torch.unique(group, return_inverse=True, return_counts=True)
        count = size.double()

        def per_group(values: Tensor) -> Tensor:
            return values.new_zeros(len(size)).index_add_(0, member, values)

        alone = size == 1
        if not self._warned and bool(alone.any()):
            self._warned = True
            warnings.warn(
                f"{int(alone.sum())} of {len(size)} groups have one run, whose advantage is 0: collect several runs "
                f"with the same batch[{self.group_key!r}] (said once)",
                stacklevel=3,
            )

        mean = per_group(total) / count
        centred = total - mean[member]
        advantage = centred
        if self.leave_one_out:
            # R - (sum - R) / (n - 1) = (R - mean) * n / (n - 1)
            others = (count - 1).clamp(min=1)
            advantage = centred * (count / others)[member]
        if self.std:
            deviation = (per_group(centred.square()) / (count - 1).clamp(min=1)).sqrt()
            advantage = advantage / (deviation + self.epsilon)[member]
        return advantage.masked_fill(alone[member], 0.0)
