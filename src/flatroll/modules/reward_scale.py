"""`RewardScale`: divides rewards by the running deviation of the discounted return."""

import math
from typing import Any, NamedTuple

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase, dispatch
from torch import Tensor
from typing_extensions import override

from flatroll.kernels.scan import segmented_scan
from flatroll.layout.boundaries import ends_from, starts_from
from flatroll.layout.checks import (
    as_text,
    check_dense_tensor,
    check_flags,
    check_keys,
    check_number,
    check_rows,
)
from flatroll.layout.keys import (
    DONE,
    ENV,
    IS_INIT,
    MASK,
    REWARD,
    TRAJ_IDS,
    NestedKey,
    flat_column,
    marker,
    optional_marker,
    plain_key,
    require,
    under_next,
)
from flatroll.layout.moments import Moments

#: If the rows of a batch and the open trajectories are more than this in total, stale trajectories are dropped.
_MOST_OPEN = 2**20
#: On a device at least so many trajectories stay open. Their number is not known there without waiting.
_PLACES = 2**14
#: Marks a row without a trajectory, and an unused place for one.
_NO_ID = torch.iinfo(torch.int64).min


class _Rows(NamedTuple):
    """Rows of trajectories, each ``[N]``.

    Attributes:
        reward: float64; of an open trajectory, its return so far.
        ids: int64, the trajectory, or ``_NO_ID``.
        done, is_init: bool, the last and first rows of episodes.
        counted: bool, rows of a batch, in contrast to padding and open trajectories.
    """

    reward: Tensor
    ids: Tensor
    done: Tensor
    is_init: Tensor
    counted: Tensor

    def behind(self, earlier: "_Rows") -> "_Rows":
        """Return these rows behind ``earlier`` ones, on the device of these."""
        home = self.reward.device
        pairs = zip(earlier, self, strict=True)
        return _Rows(*[torch.cat([x.to(home), y.reshape(-1).to(home)]) for x, y in pairs])

    def at(self, index: Tensor) -> "_Rows":
        """Return the rows of an index or a mask."""
        return _Rows(*[x[index] for x in self])


class RewardScale(TensorDictModuleBase):
    """Divides rewards by the running deviation of the discounted return, so that values have one scale.

    ``R[t] = gamma * R[t - 1] + reward[t]``, from 0 at the start of an episode (or of an env, see ``episodic``), and
    ``out = clip(reward / sqrt(var(R) + epsilon))``. Only :meth:`update` changes the statistics, which cover
    the rows of all batches. The return of a trajectory continues in the next batch.

    Rewards are scaled where they are read, never in storage: give it to an estimator (``GAE(reward_scale=scale)``) or a
    loss (``loss.make_value_estimator(gamma=0.99, reward_scale=scale)``). For other libraries' losses, call it on the
    sample, and have the loss read what it writes. Either way the batch keeps its raw reward, and old rows of a replay
    buffer get the current scale.

    The formula is that of Stable-Baselines3's ``VecNormalize``, and of Gymnasium's ``NormalizeReward`` except in rows
    that terminate, where Gymnasium drops the return so far. Both start with a count of 1e-4 instead of 0 and scale
    each reward by the statistics at its own step, so their numbers differ slightly.

    Args:
        gamma: discount in [0, 1], that of the estimator. Default: 0.99.
        clip: largest absolute value of a scaled reward. Default: 10. None: no limit.
        epsilon: added to the variance. Default: 1e-8.
        episodic: the return starts anew with each episode. False: it runs on over the ends of an env's episodes, for
            estimators with ``episodic=False``; rows then name their env (``Collector(track_envs=True)``), and
            ``open_ids`` are envs. Default: True.
        in_key: the reward, under ``"next"``; floating, one for each row. Default: ``"reward"``.
        out_key: the scaled reward, under ``"next"``. Default: ``in_key`` with the suffix ``"_scaled"``.
        device: device of the statistics. Default: torch's.

    Attributes:
        statistics: ``count``, ``mean`` and ``var`` of the return, float64 ``[1]``; 0, 0 and 1 before the first update.
        open_ids, open_returns: int64 and float64 ``[K]``, the trajectories that have not ended, and their returns. On a
            device K is larger: ids of unused places are -2**63.

    Raises:
        ValueError: a number out of range.

    >>> from tensordict import TensorDict
    >>> reward = torch.tensor([[1.0], [1.0], [4.0]])
    >>> ids, done = torch.tensor([0, 0, 1]), torch.tensor([[False], [True], [False]])
    >>> rows = TensorDict({"next": {"reward": reward, "done": done}, "collector": {"traj_ids": ids}}, [3])
    >>> scale = RewardScale(gamma=0.5)
    >>> scale.update(rows)  # returns 1, 1.5 and 4
    >>> scale.statistics.mean, scale.open_ids, scale(rows)["next", "reward_scaled"].squeeze(-1)
    (tensor([2.1667], dtype=torch.float64), tensor([1]), tensor([0.7620, 0.7620, 3.0480]))
    """

    open_ids: Tensor
    open_returns: Tensor

    def __init__(
        self,
        gamma: float = 0.99,
        *,
        clip: float | None = 10.0,
        epsilon: float = 1e-8,
        episodic: bool = True,
        in_key: NestedKey = "reward",
        out_key: NestedKey | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()

        self.gamma = float(check_number("gamma", gamma, least=0, most=1))
        self.clip = None
        if clip is not None:
            self.clip = float(check_number("clip", clip, above=0))
        self.epsilon = float(check_number("epsilon", epsilon, above=0, below=math.inf))
        check_flags(episodic=episodic)
        self.episodic = episodic

        check_keys(in_key=in_key)
        check_keys(optional=True, out_key=out_key)
        *folders, name = under_next(in_key)
        self.in_key: NestedKey = plain_key((*folders, name))
        if out_key is None:
            out_key = (*folders, f"{name}_scaled")
        self.out_key: NestedKey = under_next(out_key)

        self.in_keys: list[Any] = [self.in_key]
        self.out_keys: list[Any] = [self.out_key]

        self.statistics = Moments((), device)
        self.register_buffer("open_ids", torch.zeros(0, dtype=torch.int64, device=device))
        self.register_buffer("open_returns", torch.zeros(0, dtype=torch.float64, device=device))

    # accepts a tensordict, or the reward as a keyword argument
    @dispatch  # type: ignore[untyped-decorator]  # an untyped class, which makes forward an attribute
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, tensordict: TensorDictBase
    ) -> TensorDictBase:
        """Write the scaled reward beside the raw one; return the batch."""
        reward = require(tensordict, self.in_key, REWARD)
        tensordict.set(self.out_key, self.scaled(reward))
        return tensordict

    def scaled(self, reward: Tensor) -> Tensor:
        """Scale rewards of any shape, keeping their dtype.

        >>> RewardScale(clip=1.0).scaled(torch.tensor([0.5, 7.0]))
        tensor([0.5000, 1.0000])
        """
        return self.statistics.scaled(check_dense_tensor("reward", reward), self.epsilon, self.clip)

    @torch.no_grad()
    def update(self, batch: TensorDictBase) -> None:
        """Update the statistics with a collected batch; does nothing after ``eval()``.

        Call it with every batch, in the order in which they were collected. Batches on the device of the statistics are
        not waited for. There as many trajectories stay open as the largest batch had rows, 16,384 at least: first those
        with rows in the last batch.

        Args:
            batch: rows ``[*B]``, time last, with the reward and ``("collector", "traj_ids")`` (not episodic:
                ``("collector", "env")``); the rows of a trajectory in their order, apart or together.

        Raises:
            KeyError: one of the two is missing, or ``("next", "done")``.
            TypeError: the reward is not floating.
            ValueError: more than one reward in a row; NaN or infinite rewards, on the host: nothing has changed then.
        """
        if not self.training:
            return

        rows, mask = self._read(batch)
        count = rows.reward.numel()
        # On a device no shape may depend on values: rows and trajectories are marked instead of left out.
        home = rows.reward.device
        leaves_out = home.type == "cpu" or self.open_ids.device != home

        if mask is not None and leaves_out:
            rows = rows.at(mask)
        elif mask is not None:
            rows = rows._replace(
                reward=rows.reward.masked_fill(~mask, 0),
                ids=rows.ids.masked_fill(~mask, _NO_ID),
                counted=mask,
            )

        # Prepend each open trajectory as one row whose reward is its return so far. Sorting by id makes
        # trajectories contiguous.
        rows = rows.behind(self._open_rows(leaves_out))
        ids, order = rows.ids.sort(stable=True)
        if not len(ids):
            return
        rows = rows.at(order)

        # The scan runs backward in time: on flipped rows the starts of runs are their ends.
        starts = starts_from(ends_from(rows.done, rows.is_init, rows.ids))
        returns = segmented_scan(self.gamma, rows.reward.flip(0), starts.flip(0)).flip(0)
        self.statistics.add((f"the return of batch[{self.in_key!r}]", returns, rows.counted))

        # together: an interrupt must not come between
        self.open_ids, self.open_returns = self._still_open(rows, returns, leaves_out, count)

    def _read(self, batch: TensorDictBase) -> tuple[_Rows, Tensor | None]:
        """Return the rows ``[*B]`` of a batch, and its mask."""
        check_rows(batch)
        key = self.in_key
        reward = require(batch, key, REWARD)
        if reward.is_meta:
            raise ValueError(f"batch[{key!r}] must hold numbers, got {as_text(reward)}")
        if not reward.is_floating_point():
            raise TypeError(f"batch[{key!r}] must be floating, got {reward.dtype}: cast it with .float()")

        rewards = flat_column(reward, batch, key).double()
        if self.episodic:
            ids = flat_column(require(batch, TRAJ_IDS), batch, TRAJ_IDS).long()
            done = marker(batch, DONE)
            is_init = optional_marker(batch, IS_INIT)
        else:  # an env is one trajectory, which does not end
            ids = flat_column(require(batch, ENV), batch, ENV).long()
            done = torch.zeros_like(ids, dtype=torch.bool)
            is_init = None
        if is_init is None:
            is_init = torch.zeros_like(done)

        return _Rows(rewards, ids, done, is_init, torch.ones_like(done)), optional_marker(batch, MASK)

    def _open_rows(self, leaves_out: bool) -> _Rows:
        """Return a row for each open trajectory."""
        ids = self.open_ids
        returns = self.open_returns
        if leaves_out:
            used = ids != _NO_ID  # of a state that was saved on a device
            ids = ids[used]
            returns = returns[used]

        none = torch.zeros_like(ids, dtype=torch.bool)
        return _Rows(returns, ids, none, none, none)

    def _still_open(
        self, rows: _Rows, returns: Tensor, leaves_out: bool, count: int
    ) -> tuple[Tensor, Tensor]:
        """Return ids and returns of the trajectories that go on, given rows in the order of their ids, from a batch
        of ``count``."""
        ids = rows.ids
        goes_on = ~rows.done
        goes_on[:-1] &= ids[1:] != ids[:-1]  # the newest row of each trajectory

        if leaves_out:
            if len(ids) > _MOST_OPEN:
                goes_on &= rows.counted  # trajectories without rows in this batch may never continue
            kept = goes_on
        else:
            goes_on &= ids != _NO_ID
            ids = ids.masked_fill(~goes_on, _NO_ID)
            returns = returns.masked_fill(~goes_on, 0)  # else unused places, which are one run, would add up
            # first those with rows in this batch, then the others, then rows after which nothing goes on
            rank = goes_on.byte() + (goes_on & rows.counted)
            places = max(_PLACES, len(self.open_ids), count)
            kept = rank.argsort(descending=True, stable=True)[:places]

        return ids[kept].to(self.open_ids), returns[kept].to(self.open_returns)

    @override
    def _load_from_state_dict(
        self, state_dict: dict[str, Tensor], prefix: str, *rest: Any, **more: Any
    ) -> None:
        for name in ("open_ids", "open_returns"):  # the number of open trajectories may differ
            saved = state_dict.get(prefix + name)
            if saved is not None:
                setattr(self, name, getattr(self, name).new_empty(saved.shape))
        super()._load_from_state_dict(state_dict, prefix, *rest, **more)
