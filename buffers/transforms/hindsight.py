"""Hindsight experience replay: relabels sampled rows with goals that their trajectory reached."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self, TypeAlias, get_args

import numpy as np
import torch
from tensordict import TensorDictBase
from torch import Tensor
from typing_extensions import override

from flatroll.buffers.columns.column import Columns, put_rows, take_rows
from flatroll.buffers.index.ring import Array
from flatroll.buffers.transforms.transform import Get, Transform, check_batch, keys_argument
from flatroll.layout.boundaries import run_ends, starts_from, steps_into_run
from flatroll.layout.checks import (
    check_choice,
    check_cpu_generator,
    check_flags,
    check_function,
    check_keys,
    check_number,
)
from flatroll.layout.keys import (
    DONE,
    OBSERVATION,
    REWARD,
    TERMINATED,
    TRUNCATED,
    NestedKey,
    missing_marker,
    next_key,
    under_next,
)
from flatroll.layout.transfers import upload

Strategy: TypeAlias = Literal["future", "final", "episode"]
GoalFunction: TypeAlias = Callable[[Any, Any, Mapping[NestedKey, Any]], Any]

RELABELLED = "relabelled"


class HindsightTransform(Transform):
    """Replaces the goals of sampled rows with goals that their trajectory reached, and recomputes rewards.

    For observations with ``"achieved_goal"`` and ``"desired_goal"``, as Gymnasium-Robotics' envs have. The buffer
    stores what happened. In a sample, each row (each slice, if slices are drawn) is relabelled with probability
    ``n_sampled_goal / (n_sampled_goal + 1)``, independently: a row of its trajectory is drawn through the trajectory
    index, and its ``("next", "achieved_goal")`` becomes ``"desired_goal"`` and ``("next", "desired_goal")``. Then
    ``("next", "reward")`` is ``reward_fn`` of the row's own next achieved goal and the new goal. ``"relabelled"``, bool
    ``[N, 1]``, says which rows these are; the others are as stored.

    Goals come from the rows of the trajectory that are stored when the sample is drawn: an unfinished one takes part
    with the rows it has so far, one whose head was overwritten with those that are left. All rows of a slice get one
    goal; ``"future"`` then counts from the slice's first row.

    ``done``, ``truncated`` and ``terminated`` stay as stored, unless ``terminated_fn`` is given. With
    `MultiStepTransform` beside it, in either order, the rewards of all n steps are those for the row's new goal.

    Args:
        reward_fn: ``reward_fn(achieved_goal, desired_goal, info)`` for M rows at once: two tensors ``[M, *goal]``, and
            a dict of the entries ``info_keys`` of the rows; returns ``[M]`` or ``[M, 1]``. That is the form of
            ``compute_reward`` of Gymnasium-Robotics' envs (``as_numpy=True``).
        goal_selection_strategy: which row gives the goal: ``"future"``, uniform from the row itself to the last one of
            its trajectory; ``"final"``, the last one; ``"episode"``, uniform over all of them.
        n_sampled_goal: relabelled rows for each row with its own goal; ``math.inf`` relabels all.
        terminated_fn: the same for ``("next", "terminated")``, bool; ``done`` follows. Default: flags stay as stored.
        info_keys: entries to hand over as ``info``, such as ``["action"]``.
        as_numpy: hand NumPy arrays to both functions.
        goal_key: entry that holds the desired goal; default ``"desired_goal"``, at the root or under ``"observation"``.
        achieved_goal_key: entry that holds the achieved goal; default likewise.
        reward_key: entry to write, default ``("next", "reward")``.
        generator: CPU generator of the draws when called on a batch, None is torch's global one; a buffer uses its own.

    Raises:
        ValueError: an unknown strategy, a negative ``n_sampled_goal``, or a generator that is not of the CPU.

    Reference: Andrychowicz et al. 2017, Hindsight Experience Replay.

    >>> from tensordict import TensorDict
    >>> now = {"achieved_goal": torch.arange(3.0)[:, None], "desired_goal": torch.full((3, 1), 9.0)}
    >>> later = {"achieved_goal": now["achieved_goal"] + 1, "reward": torch.zeros(3, 1)}
    >>> done = torch.tensor([[False], [False], [True]])
    >>> batch = TensorDict({**now, "next": {**later, "done": done}}, [3])
    >>> hindsight = HindsightTransform(lambda achieved, desired, info: (achieved == desired).float(),
    ...     goal_selection_strategy="final", n_sampled_goal=math.inf)
    >>> batch = hindsight(batch)
    >>> batch["desired_goal"].flatten(), batch["next", "reward"].flatten()
    (tensor([3., 3., 3.]), tensor([0., 0., 1.]))
    """

    wants_ends = True

    def __init__(
        self,
        reward_fn: GoalFunction,
        *,
        goal_selection_strategy: Strategy = "future",
        n_sampled_goal: float = 4,
        terminated_fn: GoalFunction | None = None,
        info_keys: NestedKey | Sequence[NestedKey] = (),
        as_numpy: bool = False,
        goal_key: NestedKey | None = None,
        achieved_goal_key: NestedKey | None = None,
        reward_key: NestedKey = REWARD,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        check_choice("goal_selection_strategy", goal_selection_strategy, get_args(Strategy))
        check_number("n_sampled_goal", n_sampled_goal, least=0)
        parameters = "a function of (achieved_goal, desired_goal, info)"
        check_function("reward_fn", reward_fn, parameters)
        if terminated_fn is not None:
            check_function("terminated_fn", terminated_fn, parameters)
        check_flags(as_numpy=as_numpy)
        check_keys(reward_key=reward_key)
        check_keys(optional=True, goal_key=goal_key, achieved_goal_key=achieved_goal_key)

        self.reward_fn = reward_fn
        self.terminated_fn = terminated_fn
        self.as_numpy = as_numpy
        self.info_keys = keys_argument("info_keys", info_keys)

        self.goal_selection_strategy = goal_selection_strategy
        self.n_sampled_goal = n_sampled_goal

        self.goal_key = goal_key
        self.achieved_goal_key = achieved_goal_key
        self.reward_key = under_next(reward_key)
        self.generator = check_cpu_generator(generator)

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.goal_selection_strategy!r}, n_sampled_goal={self.n_sampled_goal}, "
            f"reward_fn={getattr(self.reward_fn, '__name__', self.reward_fn)})"
        )

    @property
    def her_ratio(self) -> float:
        """Probability that a row is relabelled."""
        return 1.0 - 1.0 / (1.0 + self.n_sampled_goal)

    @property
    def chooser(self) -> Self:
        """This transform, which chooses rows for the buffer."""
        return self

    def choose(self, at: Array, count: Array, generator: torch.Generator | None) -> tuple[Array, Array]:
        """Choose which rows to relabel, and the rows of their trajectories that give the goals.

        Args:
            at: int64 ``[S]``, position of each row among the rows of its trajectory, from 0.
            count: int64 ``[S]``, number of these.
            generator: CPU random generator of the draws.

        Returns:
            which of the S rows, ascending, and the positions that give their goals; both int64 ``[M]``.
        """
        uniform = torch.rand(2, len(at), dtype=torch.float64, generator=generator).numpy()
        which = np.flatnonzero(uniform[0] < self.her_ratio)
        at = at[which]
        count = count[which]

        lowest_by = {"future": at, "final": count - 1, "episode": np.zeros_like(at)}
        lowest = lowest_by[self.goal_selection_strategy]
        choices = count - lowest
        # uniform * choices may round up to choices
        offsets = np.minimum((uniform[1, which] * choices).astype(np.int64), choices - 1)
        return which, lowest + offsets

    def relabel(self, columns: Columns, chosen: Tensor, read: Get, get: Get) -> tuple[Columns, Get]:
        """Return the columns of N rows with new goals, and ``get`` with these goals; a buffer calls it on a sample.

        Args:
            columns: of the rows; those that change, change in place.
            chosen: int64 ``[2, M]``, which of the N rows, and the positions of the rows that give the goals.
            read: reads the latter.
            get: reads other rows: P for each of the N, those of a row side by side, ``[N * P]``.

        Raises:
            KeyError: a goal, the reward or another entry that is needed is missing.
            ValueError: goals of different dtypes or shapes, or a function that does not return one number per row.
            TypeError: ``terminated_fn`` does not return bool, or ``reward_fn`` what the reward's dtype cannot hold.
        """
        goal_key, achieved = self._goal_keys(columns)
        device = columns[self.reward_key].device
        rows = upload(chosen[0], device)
        count = len(columns[self.reward_key])
        relabelled = torch.zeros((count, 1), dtype=torch.bool, device=device)
        columns[RELABELLED] = relabelled.index_fill_(0, rows, True)
        if not len(rows):
            return columns, get

        goals = read(chosen[1], [achieved])[achieved]
        self._set_goals(columns, rows, goals, goal_key, achieved)
        changed = {goal_key, next_key(goal_key), self.reward_key, TERMINATED, DONE} & columns.keys()

        def get_relabelled(positions: Tensor, keys: Sequence[NestedKey]) -> Columns:
            if changed.isdisjoint(keys):
                return get(positions, keys)

            each, rest = divmod(len(positions), count)
            if rest:
                raise ValueError(
                    f"a transform reads {len(positions)} rows for a sample of {count} rows with hindsight "
                    "goals: it must read the same number for each row, next to each other"
                )

            present = {TRUNCATED, *self.info_keys} & columns.keys()
            others = get(positions, list({*keys, *changed, achieved, *present}))
            # Row i has rows i * each ... i * each + each - 1 of what was read.
            at = (rows[:, None] * each + torch.arange(each, device=device)).flatten()
            self._set_goals(others, at, goals.repeat_interleave(each, 0), goal_key, achieved)
            return {key: others[key] for key in keys}

        return columns, get_relabelled

    @override
    def forward(self, td: TensorDictBase, ends: Tensor | None = None) -> TensorDictBase:
        """Return a sample from a buffer unchanged, since :meth:`relabel` has done it; relabel any other batch.

        Args:
            td: a sample; or a flat batch ``[N]``, whose goals then come from each row's own run
                (`flatroll.layout.run_ends`). It stays unchanged.
            ends: given by a buffer.

        Raises:
            ValueError: the buffer does not follow trajectories (`ReplayBufferEnsemble`), or a batch is not flat.
        """
        if check_batch(self, td).get(RELABELLED, None) is not None:
            return td
        if ends is not None:
            raise ValueError(
                "HindsightTransform draws goals when a ReplayBuffer draws rows, and this sample was not: pass it to "
                "ReplayBuffer(transform=...), in an ensemble to each member"
            )
        if td.batch_dims != 1:
            raise ValueError(
                f"HindsightTransform takes flat batches [N], got {list(td.batch_size)}: flatten it first"
            )

        ends = run_ends(td).cpu()
        at = steps_into_run(starts_from(ends))
        lasts = ends.nonzero().squeeze(1)
        rows = torch.arange(len(td))
        left = lasts[torch.searchsorted(lasts, rows)] - rows  # number of rows that follow in the run
        which, positions = self.choose(at.numpy(), (at + left + 1).numpy(), self.generator)
        goals = torch.from_numpy(positions - at.numpy()[which] + which)

        columns: Columns = {key: column.clone() for key, column in td.items(True, True)}

        def get(positions: Tensor, keys: Sequence[NestedKey]) -> Columns:
            return {key: take_rows(columns[key], upload(positions, columns[key].device)) for key in keys}

        changed, _ = self.relabel(columns, torch.stack([torch.from_numpy(which), goals]), get, get)
        result = td.clone(recurse=False)
        for key, column in changed.items():
            result.set(key, column)
        return result

    def _goal_keys(self, columns: Columns) -> tuple[NestedKey, NestedKey]:
        """The entries of the desired goal and of the next achieved goal; KeyError if one is missing, or the reward."""
        found = []
        for name, given in (("desired_goal", self.goal_key), ("achieved_goal", self.achieved_goal_key)):
            nested: NestedKey = (OBSERVATION, name)
            if given is not None:
                found.append(given)
            elif nested in columns:
                found.append(nested)
            else:
                found.append(name)

        goal = found[0]
        achieved = next_key(found[1])

        for key in (goal, achieved, self.reward_key, *self.info_keys):
            if key not in columns:
                error = missing_marker(key, columns)
                if key == achieved:
                    error.args = (
                        f"{error.args[0]}. Hindsight goals are next observations: store batches with them, or compact "
                        "ones with LazyTensorStorage(..., compact_obs=True)",
                    )
                raise error
        return goal, achieved

    def _set_goals(
        self, columns: Columns, rows: Tensor, goals: Tensor, goal_key: NestedKey, achieved: NestedKey
    ) -> None:
        """Write the goals ``[M, *goal]`` of ``rows``, and the rewards and flags that go with them, in place."""
        desired = columns[goal_key]
        if desired.shape[1:] != goals.shape[1:] or desired.dtype != goals.dtype:
            raise ValueError(
                f"batch[{goal_key!r}] holds {desired.dtype} {list(desired.shape[1:])}, batch[{achieved!r}] "
                f"{goals.dtype} {list(goals.shape[1:])}: one cannot replace the other"
            )

        for key in (goal_key, next_key(goal_key)):
            if key in columns:
                put_rows(columns[key], rows, goals)

        reached: Any = take_rows(columns[achieved], rows)
        wanted: Any = goals
        info: dict[NestedKey, Any] = {key: take_rows(columns[key], rows) for key in self.info_keys}
        if self.as_numpy:
            reached = reached.numpy(force=True)
            wanted = goals.numpy(force=True)
            info = {key: values.numpy(force=True) for key, values in info.items()}

        reward = columns[self.reward_key]
        returned = self.reward_fn(reached, wanted, info)
        values = self._check_result("reward_fn", returned, reward, len(rows))
        if not torch.can_cast(values.dtype, reward.dtype):
            raise TypeError(
                f"reward_fn must return a dtype that {self.reward_key!r} ({reward.dtype}) can hold, got {values.dtype}"
            )
        put_rows(reward, rows, values.to(reward.dtype))

        if self.terminated_fn is None:
            return

        for key in (TERMINATED, DONE):
            if key not in columns:
                raise missing_marker(key, columns)
        terminated = columns[TERMINATED]
        done = columns[DONE]
        # Without a truncated flag, a row that is done but not terminated was truncated.
        truncated = columns.get(TRUNCATED)
        if truncated is None:
            truncated = done & ~terminated

        returned = self.terminated_fn(reached, wanted, info)
        ended = self._check_result("terminated_fn", returned, terminated, len(rows))
        if ended.dtype is not torch.bool:
            raise TypeError(f"terminated_fn must return bool, got {ended.dtype}")
        put_rows(terminated, rows, ended)
        put_rows(done, rows, ended | take_rows(truncated, rows))

    def _check_result(self, name: str, returned: object, column: Tensor, rows: int) -> Tensor:
        """What a function of the caller returned for ``rows`` rows, in the shape and on the device of ``column``."""
        values = torch.as_tensor(returned, device=column.device)
        if values.shape not in ((rows,), (rows, 1)) or math.prod(column.shape[1:]) != 1:
            raise ValueError(
                f"{name} must return one number for each of the {rows} rows it is given, [{rows}], got "
                f"{list(values.shape)} for rows of {list(column.shape[1:])}: it is called once for many rows"
            )
        return values.reshape(rows, *column.shape[1:])
