"""`Collector`: turns env steps into flat marked batches of an exact number of rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from time import perf_counter
from typing import Any, Protocol, cast

import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType
from torch import Tensor, nn

from flatroll.layout.checks import SCALED, flags, function, seed_number, warn_of_scales
from flatroll.layout.inspect.text import Facts
from flatroll.layout.keys import DONE, NestedKey, marker, require
from flatroll.layout.trajectories import mark_cuts, split_trajectories
from flatroll.rollouts.arguments import (
    EnvSource,
    check_counts,
    check_together,
    exploration_of,
    make_devices,
    make_envs,
)
from flatroll.rollouts.batch_columns import spec_of_columns
from flatroll.rollouts.policies import Policy, Weights, copy_weights
from flatroll.rollouts.pool_runner import PoolRunner, lead_pool
from flatroll.rollouts.progress import ProgressBar
from flatroll.rollouts.runner import Runner
from flatroll.rollouts.splits import SplitRunner
from flatroll.rollouts.window import compact_batch
from flatroll.specs import Composite
from flatroll.wrappers.adapt_env import scales_by_running_statistics
from flatroll.wrappers.markers import TrajId, find_wrapper, recurrent_states

Device = torch.device | str | None


class Sink(Protocol):
    """Takes the batches of a collector, as a replay buffer does."""

    @property
    def extend(self) -> Callable[..., Any]: ...


class Interruptor(Protocol):
    """Says whether a batch is to end early, as a `threading.Event` does."""

    def is_set(self) -> bool: ...


class Collector(Facts):
    """Steps an env with a policy and yields flat marked batches of exactly ``frames_per_batch`` rows.

    Each batch is a plain tensordict ``[frames_per_batch]``: the rows of each trajectory follow one another in time
    order, env after env, with the columns that `flatroll.layout.describe` lists. Rows on which an env only
    resets never appear; rows beyond ``frames_per_batch`` come first in the next batch. Cutting the stream into other
    windows changes no row, flag or id of it. Yielded batches own their memory.

    InitTracker and TrajId are added where the env's stack lacks them; a recurrent policy (one with parts that
    have ``make_tensordict_primer()``) gets its states and ``is_init`` automatically.

    Args:
        create_env_fn: an env (anything `flatroll.wrappers.as_vector_env` takes, or wrappers around it), or a
            function that makes one; with ``splits`` also a list of them (the attribute ``env`` is then a tuple). After
            an error an env that was made here is closed; one that was given stays open, see `reset`.
        policy: a tensordict module, a module or callable from observation (tensor, or dict of tensors) to
            action, or None or a `RandomPolicy` for random actions. A callable with a parameter named ``is_init``
            is also given, by that name, which rows begin an episode, bool ``[E, 1]``.
        frames_per_batch: rows of a batch.
        total_frames: rows in all; a whole number of batches is collected. Default -1: no end.
        device: shorthand for ``policy_device`` and ``storing_device``.
        env_device: where the env's arrays are to be. What a NumPy env returns is copied there in each step, and the
            actions back; a torch env must be there already. Default: where the env has them.
        policy_device: where the policy wants its input. Default: where the env's arrays are.
        storing_device: where batches are put. Default: where the env's arrays are.
        no_cuda_sync: do not wait for copies between devices. Default False.
        obs_dtype: dtype of the floating observations, as ``dtype`` of `flatroll.wrappers.as_vector_env`; for MuJoCo's,
            which are float64, ``torch.float32``. Default None: as the env gives them.
        compact_obs: leave ``("next", obs)`` out; `final` then has the observations that no row holds.
        track_traj_ids: write ``("collector", "traj_ids")``. Default True. Without them ``is_init`` also marks
            the first row of each env in the batch, so that cut runs of neighbouring envs stay apart.
        trajs_per_batch: yield batches of this many complete trajectories instead (``frames_per_batch`` is then
            how much is collected between looks), in the order in which they end. At the end of
            ``total_frames`` those left over make a smaller batch; trajectories still open are not yielded.
        set_truncated: mark the last row of each run that the batch cuts as truncated and done.
        max_frames_per_traj: truncate episodes after this many steps (adds a StepCounter).
        init_random_frames: take random actions in the first rows, this many, up to the end of the vector step
            that the last of them is in; the policy's other outputs are recorded as they are. Default 0.
        reset_at_each_iter: reset the env before each batch that it is stepped for.
        split_trajs: yield padded ``[n, T_max]`` batches with a mask. Discouraged: warns. Not with a ``replay_buffer``.
        postproc: function of the batch; its result is yielded. `final` counts the rows before it.
        pre_collect_hook: called without arguments before each batch is collected.
        post_collect_hook: called with each batch before it is yielded; what it returns is ignored.
        replay_buffer: batches are written into it with ``extend(batch, final=...)``, and None is yielded. With
            ``trajs_per_batch`` its method ``note_waiting(rows)``, if it has one, hears how many rows wait here for the
            end of their trajectories; ``note_spec``, if it has one, hears the :attr:`spec`.
        auto_register_policy_transforms: wire recurrent states. Default True (None is the same).
        state_stride: keep recurrent states only in every ``state_stride``-th row of a trajectory, from its first,
            and in the first row of each run of a batch. ``("collector", "has_state")`` marks these rows, the states
            of others are zeros, and there are none under ``"next"``. Default 1: in every row, unmarked.
        info_keys: entries of ``info`` to store: ``key`` as the policy saw it, ``("next", key)`` as the step
            gave it; 0 in steps that came without it.
        exploration_type: how probabilistic modules choose. Default: they sample.
        splits: number of parts in which the envs are stepped, in turn: while the policy acts for one part, the steps of
            the others are under way. The env is a gymnasium AsyncVectorEnv (or a function that makes one), whose
            worker processes are divided; or a list of ``splits`` envs (or functions), the parts of one pool:
            AsyncVectorEnvs, envpools, other vector envs with ``step_async`` and ``step_wait``. Rows, ids and seeds
            are those of the whole pool. Default 1: all envs at once.
        seed: seeds the env's first reset and the random actions.
        writer: number of this collector in the trajectory ids, 0 to 2**23 - 1. Default 0. Give each collector that
            writes into one buffer its own: equal ids would join their trajectories.
        track_policy_version: write ``("collector", "policy_version")``, int64 ``[N]``: the `policy_version` at the step
            that made the row, also for rows that a later batch brings. Default False.
        interruptor: anything with ``is_set()``, a ``threading.Event`` say, asked before each vector step. Once it says
            True, the batch is yielded with the rows that there are, at least one; with ``trajs_per_batch``, with the
            complete trajectories that there are, at least one. Nothing is lost: the next batch goes on from there.
            Default None.
        progress: show a tqdm bar: rows, steps a second while collecting, and with RewardSum the mean return.

    Raises:
        ValueError, TypeError: arguments that contradict one another; the text says which.

    >>> import gymnasium as gym
    >>> collector = Collector(gym.make_vec("CartPole-v1", num_envs=3), frames_per_batch=10, total_frames=20)
    >>> for batch in collector:
    ...     print(batch.batch_size, sorted(batch.keys()))
    torch.Size([10]) ['action', 'collector', 'is_init', 'next', 'observation']
    torch.Size([10]) ['action', 'collector', 'is_init', 'next', 'observation']
    """

    #: With ``compact_obs=True``: of the last batch, the next observations that no row of it holds. A
    #: tensordict ``[K]`` with ``"row"`` (int64, ascending) and the ``("next", obs)`` entries.
    final: TensorDict | None = None
    _closed = True  # until the env is there
    _frames = 0  # rows collected so far
    _version = 0  # of the policy
    _runner: Runner | SplitRunner | PoolRunner

    def __init__(
        self,
        create_env_fn: EnvSource,
        policy: Policy | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        device: Device = None,
        env_device: Device = None,
        policy_device: Device = None,
        storing_device: Device = None,
        no_cuda_sync: bool = False,
        obs_dtype: torch.dtype | None = None,
        compact_obs: bool = False,
        track_traj_ids: bool = True,
        trajs_per_batch: int | None = None,
        set_truncated: bool = False,
        max_frames_per_traj: int | None = None,
        init_random_frames: int = 0,
        reset_at_each_iter: bool = False,
        split_trajs: bool = False,
        postproc: Callable[[TensorDict], TensorDict] | None = None,
        pre_collect_hook: Callable[[], Any] | None = None,
        post_collect_hook: Callable[[TensorDict], Any] | None = None,
        replay_buffer: Sink | None = None,
        auto_register_policy_transforms: bool | None = True,
        state_stride: int = 1,
        info_keys: Sequence[NestedKey] = (),
        exploration_type: InteractionType | str = InteractionType.RANDOM,
        splits: int = 1,
        seed: int | None = None,
        writer: int = 0,
        track_policy_version: bool = False,
        interruptor: Interruptor | None = None,
        progress: bool = False,
    ) -> None:
        exploration = exploration_of(exploration_type)
        flags(
            compact_obs=compact_obs,
            track_traj_ids=track_traj_ids,
            set_truncated=set_truncated,
            reset_at_each_iter=reset_at_each_iter,
            split_trajs=split_trajs,
            track_policy_version=track_policy_version,
            progress=progress,
        )
        hooks = {
            "postproc": postproc,
            "pre_collect_hook": pre_collect_hook,
            "post_collect_hook": post_collect_hook,
        }
        for name, hook in hooks.items():
            if hook is not None:
                function(name, hook)
        if auto_register_policy_transforms is not None:
            flags(auto_register_policy_transforms=auto_register_policy_transforms)
        if seed is not None:
            seed_number("seed", seed)
        check_counts(
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            trajs_per_batch=trajs_per_batch,
            init_random_frames=init_random_frames,
            max_frames_per_traj=max_frames_per_traj,
            state_stride=state_stride,
            splits=splits,
        )
        check_together(track_traj_ids, trajs_per_batch, split_trajs, replay_buffer is not None, interruptor)
        with ExitStack() as undo:
            envs, moves, self._made_env = make_envs(
                create_env_fn, splits, obs_dtype, env_device, max_frames_per_traj, undo
            )
            parts = [Runner(env, info_keys, track_traj_ids, writer, track_policy_version) for env in envs]
            runner = lead_pool(parts[0]) if splits == 1 else SplitRunner(parts, moves)
            given = device, env_device, policy_device, storing_device, no_cuda_sync
            devices = make_devices(runner.device, *given)
            steps = -(-frames_per_batch // runner.num_envs)  # rounded up
            wire = auto_register_policy_transforms is not False
            runner.start(
                policy,
                steps,
                devices=devices,
                exploration=exploration,
                seed=seed,
                recurrent=wire,
                state_stride=state_stride,
            )
            undo.pop_all()
        self._runner, self._devices, self.env, self.policy = runner, devices, runner.env, policy
        self.frames_per_batch, self.total_frames = frames_per_batch, total_frames
        self._random_frames, self._reset_each_iter = init_random_frames, reset_at_each_iter
        self._set_truncated, self._split_trajs = set_truncated, split_trajs
        if replay_buffer is not None and not hasattr(replay_buffer, "extend"):
            wanted = "have a method extend, as a ReplayBuffer has"
            raise TypeError(f"replay_buffer must {wanted}, got {type(replay_buffer).__name__}")
        self._postproc, self._buffer, self._interruptor = postproc, replay_buffer, interruptor
        self._pre_hook, self._post_hook = pre_collect_hook, post_collect_hook
        self._compact = compact_obs or runner.asks_compact
        self._scaled = any(map(scales_by_running_statistics, runner.envs))
        if self._scaled and replay_buffer is not None:
            warn_of_scales(stacklevel=2)
        self._joiner = TrajectoryJoiner(trajs_per_batch, runner.keys.traj) if trajs_per_batch else None
        self._bar = ProgressBar(total_frames, runner.keys.returns)
        self._seed, self._seeded_at, self._progress, self._closed = seed, 0, progress, False
        note_spec = getattr(replay_buffer, "note_spec", None)
        if note_spec is not None:
            note_spec(self.spec)

    def __iter__(self) -> Iterator[Any]:
        """Yield batches (or None with a replay buffer) until ``total_frames`` are collected."""
        self._check_open()
        while not self._closed and (made := self._make_batch(self.total_frames)):
            yield made[0]
        self._bar.close()

    def iterator(self) -> Iterator[Any]:
        """The same as ``iter(collector)``."""
        return iter(self)

    def __next__(self) -> Any:
        """The next batch, without a loop; StopIteration after ``total_frames``."""
        # No generator is kept: it would refer to the collector, whose env then outlived it until the next collection of
        # garbage, which may come in a forked child. envpool's pools crash there.
        self._check_open()
        made = self._make_batch(self.total_frames)
        if made is None:
            self._bar.close()
            raise StopIteration
        return made[0]

    def rollout(self) -> TensorDict | None:
        """Collect one more batch, as the iteration does, whether or not ``total_frames`` are reached.

        Returns:
            The batch; None if a replay buffer took it.

        >>> import gymnasium as gym
        >>> collector = Collector(gym.make("CartPole-v1"), frames_per_batch=5, total_frames=5)
        >>> len(list(collector)), collector.rollout().batch_size
        (1, torch.Size([5]))
        """
        self._check_open()
        made = self._make_batch(total=-1)
        assert made is not None  # without a total there is always a next one
        return made[0]

    @property
    def spec(self) -> Composite:
        """The spec of its batches, shape ``(-1,)``; ``collector.spec.assert_is_in(batch)`` names the first bad row."""
        # The parts of one pool have equal columns.
        return spec_of_columns(self._runner.keys, self._runner.envs[0], self._compact)

    @property
    def frames(self) -> int:
        """Number of rows collected so far."""
        return self._frames

    @property
    def rows_held(self) -> int:
        """Number of rows that were collected and that no batch has taken yet; they come in later ones."""
        return self._runner.window.count() + (0 if self._joiner is None else self._joiner.waiting)

    def stats(self) -> dict[str, int]:
        """Return ``frames``, ``rows_held`` and ``policy_version``, to be logged as those of `MultiCollector.stats`."""
        return {"frames": self._frames, "rows_held": self.rows_held, "policy_version": self._version}

    @property
    def policy_version(self) -> int:
        """How often the policy has been updated: `update_policy_weights_` counts it, and whoever counts otherwise
        sets it. With ``track_policy_version`` each row has the number of the vector step in which it was chosen."""
        return self._version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._version = version
        self._runner.set_version(version)

    def set_recurrent_primers_from(self, policy: Policy) -> None:
        """Carry ``policy``'s recurrent states between steps, if the collector's policy writes them.

        For a policy that hides its recurrent parts; one that shows them is wired automatically. A second call changes
        nothing.

        Raises:
            RuntimeError: rows were collected without these states.
        """
        self._runner.prime(recurrent_states(policy))

    def reset(self) -> None:
        """Reset the env before the next batch: open trajectories end as cuts, rows not yet yielded are dropped.

        Call it after stepping or resetting the bare env by hand, which no collector can see (steps through flatroll
        are noticed). An error (or Ctrl-C) in env, policy, hook or buffer does the same if the env is the caller's:
        the batch at work is lost, and the next one begins with new episodes under new ids. An env that the collector
        made is closed instead.
        """
        self._runner.forget()
        if self._joiner is not None:
            self._joiner.drop_open()

    def set_seed(self, seed: int) -> int:
        """Seed the random actions and the env, which is reset for it before the next batch (see `reset`).

        Returns:
            ``seed + E``, the first number with which no env is seeded (Gymnasium's env ``e`` takes ``seed + e``).
        """
        self._seed, self._seeded_at = seed, self._frames
        self._runner.random.seed(seed)
        self.reset()
        return seed + self._runner.num_envs

    def update_policy_weights_(self, policy_or_weights: Weights | None = None) -> None:
        """Copy weights into the policy, and count the update in `policy_version`.

        Without an argument it only counts: the collector acts with the policy itself, which the caller has changed.

        Args:
            policy_or_weights: a module, its state dict, or a tensordict of its parameters.

        Raises:
            TypeError: the policy is no ``nn.Module``.
        """
        if policy_or_weights is not None and policy_or_weights is not self.policy:
            copy_weights(self.policy, policy_or_weights)
        self.policy_version += 1

    def shutdown(self) -> None:
        """Close the env; a second call does nothing, and iterating afterwards raises an error."""
        self._bar.close()
        if not self._closed:
            self._closed = True
            for env in self._runner.envs:
                env.close()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to pickle or copy a collector that has begun."""
        if self._runner.started:
            raise TypeError(
                "a collector that has begun cannot be pickled or copied, as its env cannot: pickle "
                "collector.state_dict(), and load it into a new Collector(make_env, ...)"
            )
        return self.__dict__

    def _facts(self) -> dict[str, Any]:
        """What `repr` and notebooks show."""
        total = f" of {self.total_frames:,}" if self.total_frames >= 0 else ""
        policy = "random actions" if self.policy is None else getattr(self.policy, "__name__", None)
        facts = {
            "": f"{self._frames:,}{total} frames",
            "env": self.env,
            "policy": policy or type(self.policy).__name__,
        }
        facts["frames_per_batch"] = f"{self.frames_per_batch:,}"
        if self._buffer is not None:
            facts["replay_buffer"] = self._buffer
        return facts | ({"state": "closed"} if self._closed else {})

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs: row count, last trajectory id, random state, policy parameters and version.

        The env's own state is not in it, nor are rows not yet yielded: on loading, open trajectories are cut and
        the env is reset.
        """
        ids = [marker.state_dict() for marker in self._id_markers()]
        return {
            "frames": self._frames,
            "traj_ids": max(ids, key=lambda state: state["episode"]) if ids else None,
            "random": self._runner.random.state_dict(),
            "policy": self.policy.state_dict() if isinstance(self.policy, nn.Module) else None,
            "policy_version": self._version,
            "vector_steps": self._runner.window.before + self._runner.window.steps,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`: new ids follow the old ones, the next batch starts with a reset.

        A collector with a seed resets the env with a seed made of its own and the rows collected, so that a
        run that goes on does not meet its first episodes again.
        """
        runner = self._runner
        self._frames = state["frames"]
        if state["traj_ids"] is not None:
            for marker in self._id_markers():
                marker.load_state_dict(state["traj_ids"])
        runner.random.load_state_dict(state["random"])
        if isinstance(self.policy, nn.Module) and state["policy"] is not None:
            self.policy.load_state_dict(state["policy"])
        self.policy_version = state.get("policy_version", 0)
        runner.forget()
        runner.window.before = state.get("vector_steps", 0)
        if self._joiner is not None:
            self._joiner = TrajectoryJoiner(self._joiner.per_batch, runner.keys.traj)

    def _id_markers(self) -> list[TrajId]:
        """The wrappers that give the ids, one for each part of the env; none without ids."""
        found = [find_wrapper(env, TrajId) for env in self._runner.envs]
        return [marker for marker in found if marker is not None]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the collector is closed (by shutdown, or by an error in it): make a new one")

    def _make_batch(self, total: int) -> tuple[TensorDict | None] | None:
        """What is yielded next, in a tuple; None if ``total`` rows are collected."""
        final = self.final
        try:
            collected = self._next_batch(total)
            return None if collected is None else (self._deliver(*collected),)
        except BaseException:
            # A batch was lost: rows after it must not come as the continuation of rows before it.
            self.final = final
            self.reset()
            if self._made_env:
                self.shutdown()
            self._bar.close()
            raise

    def _next_batch(self, total: int) -> tuple[TensorDict, TensorDict | None] | None:
        """The next window, or the next joined trajectories, with its *final*; None after the last."""
        joiner, keys = self._joiner, self._runner.keys
        note = getattr(self._buffer, "note_waiting", None)
        reset_first = self._reset_each_iter
        while True:
            ends = 0 < total <= self._frames
            if joiner is not None:
                joined = joiner.pop(
                    last=ends or (self._interruptor is not None and self._interruptor.is_set())
                )
                if joined is not None:
                    return compact_batch(joined, keys) if self._compact else (joined, None)
                if note is not None:
                    note(joiner.waiting)
            if ends:
                return None
            batch, final = self._collect(reset_first)
            if joiner is None:
                return batch, final
            # Windows of one batch go on: episodes longer than a window must end in some of them.
            reset_first = False
            joiner.add(batch)
            joiner.drop_open_but(self._runner.open_ids())  # a reset may have cut others

    def _collect(self, reset_first: bool) -> tuple[TensorDict, TensorDict | None]:
        """One window of ``frames_per_batch`` rows, less if interrupted; of new episodes if ``reset_first``."""
        if self._pre_hook is not None:
            self._pre_hook()
        began = perf_counter()
        runner, frames, random_frames = self._runner, self.frames_per_batch, self._random_frames
        with torch.no_grad():
            if not runner.started:
                seed = self._seed
                if seed is not None and self._frames != self._seeded_at:
                    # A run that goes on meets other episodes than its first ones.
                    seed = int(np.random.SeedSequence((seed, self._frames)).generate_state(1)[0] >> 1)
                runner.reset(seed)
            elif reset_first and runner.window.count() < frames:
                runner.reset()
            may_be_random, stop = self._frames < random_frames, self._interruptor
            while (missing := frames - runner.window.count()) > 0:
                # So many vector steps are needed at least; rows on which an env only resets may need more.
                for _ in range(-(-missing // runner.num_envs)):
                    if stop is not None and stop.is_set() and (count := runner.window.count()):
                        frames = count
                        break
                    # Counting the rows may wait for the device: it is done only while some have to be random.
                    random = may_be_random and self._frames + runner.window.count() < random_frames
                    runner.step(random)
            # The first rows in order of time; the rest of the last vector step stays, for the next batch.
            mask, reached = runner.window.first_cells(frames)
            batch, final = runner.lay_out(mask, self._compact and self._joiner is None)
            runner.window.restart(reached)
        if self._progress:
            self._bar.show(batch, self._frames, began)
        self._frames += frames
        return batch, final

    def _deliver(self, batch: TensorDict, final: TensorDict | None) -> TensorDict | None:
        """What is yielded: the batch with cut marks, moved and processed; None where a buffer took it."""
        keys = self._runner.keys
        if self._set_truncated:
            batch = mark_cuts(batch, is_init_key=keys.init, traj_key=keys.traj)
        storing, wait = self._devices.storing, not self._devices.blocking
        if storing is not None:
            batch = batch.to(storing, non_blocking=wait)
            final = None if final is None else final.to(storing, non_blocking=wait)
        self.final = final
        if self._scaled:
            setattr(batch, SCALED, self._buffer is None)  # else its buffer was warned of
        if self._split_trajs:
            batch = split_trajectories(batch, trajectory_key=keys.traj)
        if self._postproc is not None:
            batch = self._postproc(batch)
            if batch is None:
                raise TypeError("postproc returned None: it must return the batch")
        if self._post_hook is not None:
            self._post_hook(batch)
        if self._buffer is None:
            return batch
        self._buffer.extend(batch, **({} if final is None else {"final": final}))
        return None


class TrajectoryJoiner:
    """Keeps the rows of unfinished trajectories until they end, and returns complete trajectories.

    Complete trajectories come in the order of the windows that ended them, within one window by id. So the
    first ones of a run are the short ones; over a whole run none is left out but those still open.

    Args:
        per_batch: how many complete trajectories make a batch.
        traj_key: the key of the trajectory ids.
    """

    def __init__(self, per_batch: int, traj_key: NestedKey) -> None:
        self.per_batch = per_batch
        self._traj_key = traj_key
        self._open: TensorDict | None = None
        self._ready: list[TensorDict] = []

    @property
    def waiting(self) -> int:
        """Number of rows that no batch has taken yet."""
        return sum(map(len, self._ready)) + (0 if self._open is None else len(self._open))

    def add(self, batch: TensorDict) -> None:
        """Add a flat batch; trajectories that it completes become available to :meth:`pop`."""
        rows = batch if self._open is None else cast(TensorDict, TensorDict.cat([self._open, batch]))
        # Stable: the rows of one trajectory keep their order in time.
        rows = rows[require(rows, self._traj_key).argsort(stable=True)]
        ids = require(rows, self._traj_key)
        # Rows are sorted by id: the last row of each trajectory, bool [N], and how many rows each has.
        last = torch.ones_like(ids, dtype=torch.bool)
        last[:-1] = ids[1:] != ids[:-1]
        lengths = last.nonzero().squeeze(-1).diff(prepend=ids.new_tensor([-1]))
        complete = marker(rows, DONE)[last]
        if not bool(complete.any()):
            self._open = rows
            return
        mask = complete.repeat_interleave(lengths)  # from one bool per trajectory to one per row
        self._open = rows[~mask]
        pieces: Any = rows[mask].split(lengths[complete].tolist())
        self._ready.extend(pieces)

    def pop(self, last: bool) -> TensorDict | None:
        """The next batch of ``per_batch`` complete trajectories, or of those left over if it is the last; or None."""
        if len(self._ready) < (1 if last else self.per_batch):
            return None
        ready, self._ready = self._ready[: self.per_batch], self._ready[self.per_batch :]
        return cast(TensorDict, TensorDict.cat(ready))

    def drop_open_but(self, ids: Tensor) -> None:
        """Drop unfinished trajectories whose id is not in ``ids``: a reset has cut them."""
        if self._open is not None:
            self._open = self._open[torch.isin(require(self._open, self._traj_key), ids)]

    def drop_open(self) -> None:
        """Drop all unfinished trajectories."""
        self._open = None
