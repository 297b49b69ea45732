"""`Collector`: turns env steps into flat marked batches of an exact number of rows."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from os import PathLike
from time import perf_counter
from typing import Any, Protocol, Unpack

import numpy as np
import torch
from tensordict import TensorDict
from torch import nn

from flatroll.layout.checks import SCALED, check_flags, check_seed, warn_of_scales
from flatroll.layout.inspect.text import Facts
from flatroll.layout.profiling import call_in_range, is_profiling
from flatroll.layout.trajectories import mark_cuts, split_trajectories
from flatroll.layout.transfers import move_batch
from flatroll.rollouts.arguments import (
    EnvSource,
    check_counts,
    check_exploration_type,
    check_together,
    env_function,
    make_devices,
    make_envs,
)
from flatroll.rollouts.batch_columns import spec_of_columns
from flatroll.rollouts.env_facts import EnvFacts, read_env
from flatroll.rollouts.options import CollectorKeywords, CollectorOptions, Device, takes_options
from flatroll.rollouts.policies import Policy, Weights, copy_weights
from flatroll.rollouts.pool_runner import PoolRunner
from flatroll.rollouts.progress import ProgressBar
from flatroll.rollouts.row_log import LoggedEnv, StepLog, open_log
from flatroll.rollouts.runner import Runner, RunnerOptions
from flatroll.rollouts.splits import SplitRunner, make_collector_runner
from flatroll.rollouts.trajectory_joiner import TrajectoryJoiner
from flatroll.rollouts.window import compact_batch
from flatroll.specs import Composite
from flatroll.wrappers.adapt_env import find_stream, scales_by_running_statistics
from flatroll.wrappers.markers import TrajId, find_wrapper, recurrent_states


class Sink(Protocol):
    """Receives the batches of a collector, like a replay buffer."""

    @property
    def extend(self) -> Callable[..., Any]: ...


class Interruptor(Protocol):
    """Signals that a batch should end early, like a `threading.Event`."""

    def is_set(self) -> bool: ...


class Collector(Facts):
    """Steps an env with a policy and yields flat marked batches of exactly ``frames_per_batch`` rows.

    Each batch is a plain tensordict ``[frames_per_batch]``: env after env, each trajectory in time order, with the
    columns that `flatroll.layout.describe` lists. Rows on which an env only resets are left out; rows beyond
    ``frames_per_batch`` come first in the next batch. Changing ``frames_per_batch`` only moves where batches are cut;
    rows, flags and ids stay the same. Yielded batches own their memory.

    InitTracker and TrajId are added if the env's stack lacks them. The states and ``is_init`` of a recurrent policy
    (one whose modules have ``make_tensordict_primer()``) are carried automatically.

    Args:
        create_env_fn: an env (anything `flatroll.wrappers.as_vector_env` takes, or wrappers around it), or a
            function that makes one; with ``splits`` also a list of them (the attribute ``env`` is then a tuple).
            After an error the collector closes an env that it created; yours stays open, see `reset`.
        policy: a tensordict module, a module or callable from observation (tensor, or dict of tensors) to
            action, or None or a `RandomPolicy` for random actions. A callable with a parameter named ``is_init`` also
            receives bool ``[E, 1]``, True in the first rows of episodes.
        frames_per_batch: rows per batch.
        total_frames: total number of rows, rounded up to whole batches. Default -1: no limit.
        device: shorthand for ``policy_device`` and ``storing_device``.
        env_device: device of the env's arrays. A NumPy env's outputs are copied there in each step, and actions are
            copied back; a torch env must be there already. Default: the env's own.
        policy_device: device of the policy's input. Default: that of the env's arrays.
        storing_device: device of the batches. Default: that of the env's arrays.
        no_cuda_sync: do not wait for the copies of batches from a device to the CPU: synchronise before you read
            one. What reads rows here (``postproc``, a hook, ``split_trajs``, ``replay_buffer``) gets finished ones.
            Default False.
        obs_dtype: dtype of the floating observations, as ``dtype`` of `flatroll.wrappers.as_vector_env`, for example
            ``torch.float32`` for MuJoCo's float64. Default None: the env's own.
        compact_obs: omit ``("next", obs)``; `final` then has the observations that no row holds.
        track_traj_ids: write ``("collector", "traj_ids")``. Default True. If False, ``is_init`` also marks the first
            row of each env in the batch, which separates cut runs of neighbouring envs.
        trajs_per_batch: yield batches of this many complete trajectories instead, in the order in which they end;
            ``frames_per_batch`` rows are collected at a time. After ``total_frames`` the remaining ones form a
            smaller batch; open trajectories are not yielded.
        set_truncated: mark the last row of each run that the batch cuts as truncated and done.
        max_frames_per_traj: truncate episodes after this many steps (adds a StepCounter).
        init_random_frames: take random actions in the first rows, rounded up to a whole vector step; the policy's
            other outputs are recorded unchanged. Default 0.
        reset_at_each_iter: reset the env before each batch, unless rows left over from the last one fill it.
        split_trajs: yield padded ``[n, T_max]`` batches with a mask. Discouraged: warns. Not with a ``replay_buffer``.
        postproc: function applied to each batch; its result is yielded. `final` refers to the rows before it.
        pre_collect_hook: called without arguments before each batch is collected.
        post_collect_hook: called with each batch before it is yielded; its result is ignored.
        replay_buffer: batches are written into it with ``extend(batch, final=...)``, and None is yielded. Optional
            methods of it are called: with ``trajs_per_batch``, ``note_waiting(rows)`` with the number of rows held
            back until their trajectories end, and ``note_spec`` with the :attr:`spec`.
        auto_register_policy_transforms: carry recurrent states. Default True (None means the same).
        state_stride: keep recurrent states only in every ``state_stride``-th row of a trajectory, from its first,
            and in the first row of each run of a batch. ``("collector", "has_state")`` marks these rows; other rows
            have zeros, and no states are stored under ``"next"``. Default 1: every row, without the mark.
        info_keys: entries of ``info`` to store: ``key`` is the value before the step, ``("next", key)`` the value
            after it; 0 where ``info`` lacks it.
        exploration_type: how probabilistic modules choose actions. Default: they sample.
        splits: number of parts in which the envs are stepped in turn: while the policy acts for one part, the others
            step. The env is a Gymnasium AsyncVectorEnv (or a function that makes one), whose worker processes are
            divided among the parts; or a list of ``splits`` envs (or functions): AsyncVectorEnvs, envpools, or other
            vector envs with ``step_async`` and ``step_wait``. Rows, ids and seeds are those of one pool. Default 1:
            all envs at once.
        seed: seeds the env's first reset and the random actions.
        writer: number of this collector in the trajectory ids, 0 to 2**23 - 1. Default 0. Collectors that write into
            the same buffer need different numbers; equal ids would join their trajectories.
        track_policy_version: write ``("collector", "policy_version")``, int64 ``[N]``: the `policy_version` that
            chose the row's action. Default False.
        track_envs: write ``("collector", "env")`` and ``("collector", "env_step")``, int64 ``[N]``: the number of the
            row's env, with the writer in its high bits as in the trajectory ids, and how many rows that env gave
            before, in all of its episodes. So a batch tells which episode follows which
            (``GAE(episodic=False)``). Default False.
        interruptor: an object with ``is_set()``, such as a ``threading.Event``, checked before each vector step. Once
            it returns True, the batch is yielded with the rows collected so far (with ``trajs_per_batch``, the
            complete trajectories), at least one. Nothing is lost: the next batch continues from there. Default None.
        progress: show a tqdm bar with rows, steps per second while collecting, and with RewardSum the mean return.
        log: path of a `flatroll.datasets.ReplayLog`, to which the rows' seeds and actions are appended: it makes the
            rows again, as they are before ``set_truncated``, ``storing_device`` and ``postproc``. Without ``seed``
            the env's first reset gets a seed. Not with ``splits`` and envpool's async mode. Default None.

    Raises:
        ValueError, TypeError: arguments contradict one another; the message names them.

    >>> import gymnasium as gym
    >>> collector = Collector(gym.make_vec("CartPole-v1", num_envs=3), frames_per_batch=10, total_frames=20)
    >>> for batch in collector:
    ...     print(batch.batch_size, sorted(batch.keys()))
    torch.Size([10]) ['action', 'collector', 'is_init', 'next', 'observation']
    torch.Size([10]) ['action', 'collector', 'is_init', 'next', 'observation']
    """

    #: With ``compact_obs=True``: the next observations that no row of the last batch holds, a tensordict ``[K]`` with
    #: ``"row"`` (int64, ascending) and the ``("next", obs)`` entries.
    final: TensorDict | None = None
    _closed = True  # until the env exists
    _frames = 0  # rows collected so far
    _version = 0  # policy version
    _log: StepLog | None = None
    _runner: Runner | SplitRunner | PoolRunner

    @takes_options(CollectorOptions)
    def __init__(
        self,
        create_env_fn: EnvSource,
        policy: Policy | None = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        device: Device = None,
        storing_device: Device = None,
        trajs_per_batch: int | None = None,
        init_random_frames: int = 0,
        replay_buffer: Sink | None = None,
        seed: int | None = None,
        writer: int = 0,
        interruptor: Interruptor | None = None,
        progress: bool = False,
        log: str | PathLike[str] | None = None,
        **options: Unpack[CollectorKeywords],
    ) -> None:
        chosen = CollectorOptions.read("Collector", options)
        exploration = check_exploration_type(chosen.exploration_type)
        chosen.check()
        check_flags(progress=progress)
        if seed is not None:
            seed = check_seed("seed", seed)
        check_counts(
            frames_per_batch=frames_per_batch,
            total_frames=total_frames,
            trajs_per_batch=trajs_per_batch,
            init_random_frames=init_random_frames,
            max_frames_per_traj=chosen.max_frames_per_traj,
            state_stride=chosen.state_stride,
            splits=chosen.splits,
        )
        check_together(chosen, trajs_per_batch, replay_buffer, interruptor)
        if replay_buffer is not None and not hasattr(replay_buffer, "extend"):
            wanted = "have a method extend, as a ReplayBuffer has"
            raise TypeError(f"replay_buffer must {wanted}, got {type(replay_buffer).__name__}")

        with ExitStack() as undo:
            made = make_envs(create_env_fn, chosen, undo)
            facts = [read_env(env, chosen.info_keys, chosen.track_traj_ids, writer) for env in made.envs]
            devices = make_devices(
                facts[0].device,
                device=device,
                env_device=chosen.env_device,
                policy_device=chosen.policy_device,
                storing_device=storing_device,
                no_cuda_sync=chosen.no_cuda_sync,
            )
            acting = RunnerOptions(
                devices=devices,
                exploration=exploration,
                seed=seed,
                recurrent=chosen.auto_register_policy_transforms is not False,
                state_stride=chosen.state_stride,
                track_version=chosen.track_policy_version,
                track_envs=chosen.track_envs,
            )
            runner = make_collector_runner(facts, made.moves, policy, frames_per_batch, acting)
            step_log: StepLog | None = None
            if log is not None:
                step_log = _start_log(log, create_env_fn, chosen, facts, runner)
            undo.pop_all()

        self.env = runner.env
        self.policy = policy
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self._options = chosen
        self._runner = runner
        self._log = step_log
        self._devices = devices
        self._made_env = made.here
        self._random_frames = init_random_frames
        self._buffer = replay_buffer
        self._interruptor = interruptor
        self._compact = chosen.compact_obs or facts[0].asks_compact
        self._scaled = any(map(scales_by_running_statistics, runner.envs))
        self._joiner = None
        if trajs_per_batch:
            self._joiner = TrajectoryJoiner(trajs_per_batch, runner.keys.traj)
        self._bar = ProgressBar(total_frames, runner.keys.returns)
        self._seed = seed
        self._seeded_at = 0
        self._progress = progress
        self._closed = False

        if self._scaled and replay_buffer is not None:
            warn_of_scales(stacklevel=2)
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
        """Collect the next batch; StopIteration after ``total_frames``."""
        # Keep no generator: its reference cycle would keep the env alive until the next garbage collection, which may
        # run in a forked child, where envpool's pools crash.
        self._check_open()
        made = self._make_batch(self.total_frames)
        if made is None:
            self._bar.close()
            raise StopIteration
        return made[0]

    def rollout(self) -> TensorDict | None:
        """Collect one more batch, even after ``total_frames``.

        Returns:
            The batch; None if a replay buffer took it.

        >>> import gymnasium as gym
        >>> collector = Collector(gym.make("CartPole-v1"), frames_per_batch=5, total_frames=5)
        >>> len(list(collector)), collector.rollout().batch_size
        (1, torch.Size([5]))
        """
        self._check_open()
        made = self._make_batch(total=-1)
        assert made is not None  # without a total there is always a next batch
        return made[0]

    @property
    def spec(self) -> Composite:
        """The batches' spec, shape ``(-1,)``; ``collector.spec.assert_is_in(batch)`` names the first bad row."""
        # All splits of a pool have the same columns.
        return spec_of_columns(self._runner.keys, self._runner.envs[0], self._compact)

    @property
    def frames(self) -> int:
        """Number of rows collected so far."""
        return self._frames

    @property
    def rows_held(self) -> int:
        """Number of collected rows that are not yet in a batch; later batches contain them."""
        return self._runner.window.count() + (0 if self._joiner is None else self._joiner.waiting)

    def stats(self) -> dict[str, int]:
        """Return ``frames``, ``rows_held`` and ``policy_version`` for logging, named as in `MultiCollector.stats`."""
        return {"frames": self._frames, "rows_held": self.rows_held, "policy_version": self._version}

    @property
    def policy_version(self) -> int:
        """Number of policy updates: `update_policy_weights_` increments it; you may also set it."""
        return self._version

    @policy_version.setter
    def policy_version(self, version: int) -> None:
        self._version = version
        self._runner.set_version(version)

    def set_recurrent_primers_from(self, policy: Policy) -> None:
        """Carry ``policy``'s recurrent states between steps, if the collector's policy writes them.

        Needed only if the policy hides its recurrent modules; visible ones are found automatically. A second call
        changes nothing.

        Raises:
            RuntimeError: rows were collected without these states.
        """
        self._runner.prime(recurrent_states(policy))

    def reset(self) -> None:
        """Reset the env before the next batch; open trajectories are cut, rows not yet yielded are dropped.

        Call it after stepping or resetting the bare env yourself, which a collector cannot detect (it detects steps
        through flatroll). After an error (or Ctrl-C) in env, policy, hook or buffer the collector resets the env in
        the same way if the env is yours: the batch being collected is lost, and the next one begins with new episodes
        and new ids. An env that the collector created is closed instead.
        """
        self._runner.forget()
        if self._joiner is not None:
            self._joiner.drop_open()

    @property
    def seeded(self) -> bool:
        """Whether a seed is given, and the env is one whose resets take it."""
        streams = map(find_stream, self._runner.envs)
        return self._seed is not None and any(
            stream is not None and stream.capabilities.seedable for stream in streams
        )

    def restart(self) -> None:
        """Begin new episodes at the next batch, as a collector does that has loaded this one's `state_dict`.

        With ``seed=``, both seed them alike, so the rows of a run that goes on are those of one that was stopped here.
        Open trajectories are cut, rows not yet yielded are dropped. `flatroll.disk.Checkpoint(exact=True)` calls it
        after each save.

        >>> import gymnasium as gym
        >>> one, other = (Collector(gym.make("CartPole-v1"), frames_per_batch=5, seed=0) for _ in range(2))
        >>> _ = next(one)
        >>> other.load_state_dict(one.state_dict())
        >>> one.restart()
        >>> torch.equal(next(one)["observation"], next(other)["observation"])
        True
        """
        self.load_state_dict(self.state_dict())

    def set_seed(self, seed: int) -> int:
        """Seed the random actions and the env; the env is reset before the next batch (see `reset`).

        Returns:
            ``seed + E``, the first unused seed (Gymnasium's env ``e`` uses ``seed + e``).
        """
        seed = check_seed("seed", seed)
        self._seed, self._seeded_at = seed, self._frames
        self._runner.random.seed(seed)
        self.reset()
        return seed + self._runner.num_envs

    def update_policy_weights_(self, policy_or_weights: Weights | None = None) -> None:
        """Copy weights into the policy and increment `policy_version`.

        Without an argument, only the version changes: the collector uses the policy object itself, so updates of
        its weights take effect at once.

        Args:
            policy_or_weights: a module, its state dict, or a tensordict of its parameters.

        Raises:
            TypeError: the policy is not an ``nn.Module``.
        """
        if policy_or_weights is not None and policy_or_weights is not self.policy:
            copy_weights(self.policy, policy_or_weights)
        self.policy_version += 1

    def shutdown(self) -> None:
        """Close the env; a second call does nothing, and iterating afterwards raises an error."""
        self._bar.close()
        if not self._closed:
            self._closed = True
            if self._log is not None:
                self._log.close()
            for env in self._runner.envs:
                env.close()

    def __getstate__(self) -> dict[str, Any]:
        """Refuse to pickle or copy a collector that has started."""
        if self._runner.started:
            raise TypeError(
                "a collector that has begun cannot be pickled or copied, as its env cannot: pickle "
                "collector.state_dict(), and load it into a new Collector(make_env, ...)"
            )
        return self.__dict__

    def _facts(self) -> dict[str, Any]:
        """Return what `repr` and notebooks show."""
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

    @property
    def snapshot_problem(self) -> str | None:
        """Why ``state_dict(episodes=True)`` cannot save the open episodes, as a clause; None if it can.

        >>> import gymnasium as gym
        >>> Collector(gym.make("FrozenLake-v1"), frames_per_batch=5).snapshot_problem
        'FrozenLakeEnv has no get_snapshot and set_snapshot'
        """
        if not self._runner.keys.has_ids:
            return "track_traj_ids=False leaves the episodes without a name to go on under"
        if self._log is not None:
            return "its log makes rows again from resets"
        return self._runner.snapshot_problem()

    def state_dict(self, *, episodes: bool = False) -> dict[str, Any]:
        """Return the row count, last trajectory id, random state, policy parameters and version.

        Args:
            episodes: also save the env's state, the open episodes and the rows not yet yielded, so that a loaded
                collector goes on in the middle of its episodes. `flatroll.disk.Checkpoint` writes such a state without
                pickle. Default False: loading cuts open trajectories and resets the env.

        Raises:
            ValueError: with ``episodes``, the env cannot save its state, see `snapshot_problem`.

        >>> import gymnasium as gym
        >>> one, other = (Collector(gym.make("CartPole-v1"), frames_per_batch=5, seed=seed) for seed in (0, 1))
        >>> _ = next(one)
        >>> other.load_state_dict(one.state_dict(episodes=True))
        >>> batch = next(one)
        >>> bool((batch == next(other)).all()), batch["is_init"][0].item()
        (True, False)
        """
        ids = [marker.state_dict() for marker in self._id_markers()]
        state = {
            "frames": self._frames,
            "seed": self._seed,
            "seeded_at": self._seeded_at,
            "traj_ids": max(ids, key=lambda state: state["episode"]) if ids else None,
            "random": self._runner.random.state_dict(),
            "policy": self.policy.state_dict() if isinstance(self.policy, nn.Module) else None,
            "policy_version": self._version,
            "vector_steps": self._runner.window.before + self._runner.window.steps,
            "env_steps": self._runner.window.env_steps,
        }
        if episodes:
            problem = self.snapshot_problem
            if problem is not None:
                raise ValueError(f"episodes=True needs an env whose state can be saved: {problem}")
            state["episodes"] = self._save_episodes()
        return state

    def _save_episodes(self) -> dict[str, Any] | None:
        """Return the state of the env and of its open episodes; None before the first reset."""
        saved = self._runner.get_snapshot()
        if saved is None:
            return None

        waiting = None
        if self._joiner is not None:
            waiting = self._joiner.state_dict()
        return {"runner": saved, "waiting": waiting}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`: new ids continue the old ones, the next batch starts with a reset.

        A collector with a seed resets the env with a seed derived from it and the row count, so that a resumed run
        does not repeat its first episodes. The seed is that of the state; a state without one leaves this collector's.
        A state with ``episodes=True`` goes on in the middle of them instead.

        Raises:
            ValueError: the state has episodes of another env, or of a policy with other states.
        """
        episodes = state.get("episodes")
        if episodes is not None:
            self._check_episodes(episodes)

        runner = self._runner
        self._frames = state["frames"]
        if state.get("seed") is not None:  # older states have no entry
            self._seed = state["seed"]
            self._seeded_at = state["seeded_at"]
        if state["traj_ids"] is not None:
            for marker in self._id_markers():
                marker.load_state_dict(state["traj_ids"])
        runner.random.load_state_dict(state["random"])
        if isinstance(self.policy, nn.Module) and state["policy"] is not None:
            self.policy.load_state_dict(state["policy"])
        self.policy_version = state.get("policy_version", 0)
        runner.forget()
        runner.window.before = state.get("vector_steps", 0)
        runner.window.skip_env_steps(state.get("env_steps", 0))
        if self._joiner is not None:
            self._joiner = TrajectoryJoiner(self._joiner.per_batch, runner.keys.traj)

        if episodes is not None:
            self._load_episodes(episodes)

    def _check_episodes(self, episodes: dict[str, Any]) -> None:
        """Raise ValueError if this collector cannot go on in the middle of saved episodes."""
        if self._log is not None:
            raise ValueError(
                "a collector with log= cannot go on in the middle of saved episodes: its log makes rows again from "
                "resets. Save with state_dict(), without episodes=True, or collect without log="
            )
        if (episodes["waiting"] is None) != (self._joiner is None):
            raise ValueError(
                "the saved episodes are those of a collector with and without trajs_per_batch: make this one alike"
            )

    def _load_episodes(self, episodes: dict[str, Any]) -> None:
        """Go on in the middle of saved episodes; if that fails, the next batch starts with a reset."""
        try:
            self._runner.set_snapshot(episodes["runner"])
        except BaseException:
            self._runner.forget()
            raise
        if self._joiner is not None:
            self._joiner.load_state_dict(episodes["waiting"])

    def _id_markers(self) -> list[TrajId]:
        """Return the TrajId wrappers, one per part of the env; empty without ids."""
        found = [find_wrapper(env, TrajId) for env in self._runner.envs]
        return [marker for marker in found if marker is not None]

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the collector is closed (by shutdown, or by an error in it): make a new one")

    def _make_batch(self, total: int) -> tuple[TensorDict | None] | None:
        """Collect what is yielded next, as a 1-tuple; None once ``total`` rows are collected."""
        final = self.final
        try:
            if self._joiner is not None:
                collected = self._collect_trajectories(self._joiner, total)
            elif 0 < total <= self._frames:
                collected = None
            else:
                collected = self._collect(self._options.reset_at_each_iter)

            if collected is None:
                return None
            return (self._deliver(*collected),)
        except BaseException:
            # A batch was lost: later rows must not appear to continue earlier ones.
            self.final = final
            self.reset()
            if self._made_env:
                self.shutdown()
            self._bar.close()
            raise

    def _collect_trajectories(
        self, joiner: TrajectoryJoiner, total: int
    ) -> tuple[TensorDict, TensorDict | None] | None:
        """Collect windows until they complete a batch of trajectories; return it with its *final*, None at the end."""
        reset_first = self._options.reset_at_each_iter
        stop = self._interruptor
        note = getattr(self._buffer, "note_waiting", None)

        while True:
            ends = 0 < total <= self._frames
            joined = joiner.pop(last=ends or (stop is not None and stop.is_set()))
            if joined is not None:
                if self._compact:
                    return compact_batch(joined, self._runner.keys)
                return joined, None

            if note is not None:
                note(joiner.waiting)
            if ends:
                return None

            batch, _ = self._collect(reset_first)
            # Windows of one batch continue: an episode longer than a window must be able to end.
            reset_first = False
            joiner.add(batch)
            joiner.drop_open_but(self._runner.open_ids())  # the reset may have cut some

    def _collect(self, reset_first: bool) -> tuple[TensorDict, TensorDict | None]:
        """Collect a window of ``frames_per_batch`` rows, fewer if interrupted; of new episodes if ``reset_first``."""
        if self._options.pre_collect_hook is not None:
            self._options.pre_collect_hook()
        began = perf_counter()
        if is_profiling():
            batch, final, frames = call_in_range("collector", self._fill_window, reset_first)
        else:
            batch, final, frames = self._fill_window(reset_first)

        if self._progress:
            self._bar.show(batch, self._frames, began)
        self._frames += frames
        return batch, final

    def _fill_window(self, reset_first: bool) -> tuple[TensorDict, TensorDict | None, int]:
        """Step until the window is full; return its rows, their ``final`` if compact, and how many they are."""
        runner = self._runner
        with torch.no_grad():
            if not runner.started:
                runner.reset(self._first_seed())
            elif reset_first and runner.window.count() < self.frames_per_batch:
                runner.reset()
            frames = self._step_until(self.frames_per_batch)

            # Take the first rows in time order; the rest of the last vector step stays for the next batch.
            mask, reached = runner.window.first_cells(frames)
            batch, final = runner.lay_out(mask, self._compact and self._joiner is None)
            if self._log is not None:
                self._log.note_rows(batch, final, mask)
            runner.window.restart(reached)
        return batch, final, frames

    def _first_seed(self) -> int | None:
        """Return the seed of the env's first reset, which in a resumed run must not repeat its first episodes."""
        seed = self._seed
        if seed is None or self._frames == self._seeded_at:
            return seed

        # Unseeded envs have different episodes anyway.
        if not self.seeded:
            return None
        return int(np.random.SeedSequence((seed, self._frames)).generate_state(1)[0] >> 1)

    def _step_until(self, frames: int) -> int:
        """Step until the window has ``frames`` rows; return how many it shall give, fewer if interrupted."""
        runner = self._runner
        window = runner.window
        stop = self._interruptor
        random_frames = self._random_frames
        may_be_random = self._frames < random_frames

        while (missing := frames - window.count()) > 0:
            # The minimum number of vector steps; more may be needed if envs only reset in some rows.
            for _ in range(-(-missing // runner.num_envs)):
                if stop is not None and stop.is_set() and (count := window.count()):
                    return count
                # Counting rows may sync with the device: do it only while random rows are needed.
                random = may_be_random and self._frames + window.count() < random_frames
                runner.step(random)

        return frames

    def _deliver(self, batch: TensorDict, final: TensorDict | None) -> TensorDict | None:
        """Return the batch with cut marks, moved and post-processed; None if a buffer took it."""
        options = self._options
        keys = self._runner.keys
        if options.set_truncated:
            batch = mark_cuts(batch, is_init_key=keys.init, traj_key=keys.traj)
        if self._devices.storing is not None:
            batch, final = self._store_on(self._devices.storing, batch, final)
        self.final = final

        if self._scaled:
            setattr(batch, SCALED, self._buffer is None)  # a buffer has warned already
        if options.split_trajs:
            batch = split_trajectories(batch, trajectory_key=keys.traj)
        if options.postproc is not None:
            batch = options.postproc(batch)
            if batch is None:
                raise TypeError("postproc returned None: it must return the batch")
        if options.post_collect_hook is not None:
            options.post_collect_hook(batch)

        if self._buffer is None:
            return batch
        if final is None:
            self._buffer.extend(batch)
        else:
            self._buffer.extend(batch, final=final)
        return None

    def _store_on(
        self, device: torch.device, batch: TensorDict, final: TensorDict | None
    ) -> tuple[TensorDict, TensorDict | None]:
        """Move a batch and its *final*; wait for the copies if anything here reads them."""
        options = self._options
        # Only the caller can read a batch later than it comes.
        readers = options.postproc, options.post_collect_hook, self._buffer
        read_here = options.split_trajs or any(reader is not None for reader in readers)
        wait = self._devices.blocking or read_here

        if final is not None:
            final = move_batch(final, device, wait=wait)
        return move_batch(batch, device, wait=wait), final


def _start_log(
    path: str | PathLike[str],
    create_env_fn: EnvSource,
    options: CollectorOptions,
    facts: Sequence[EnvFacts],
    runner: Runner | SplitRunner | PoolRunner,
) -> StepLog:
    """Open the log of a collector; ValueError if its rows cannot be recorded."""
    if type(runner) is not Runner or not options.track_traj_ids:
        if options.splits > 1:
            conflict = f"splits={options.splits}"
        elif not options.track_traj_ids:
            conflict = "track_traj_ids=False"
        else:
            conflict = "an envpool in async mode, whose rows come in no fixed order"
        raise ValueError(f"log= cannot be combined with {conflict}")

    logged = LoggedEnv(
        facts=facts[0],
        make=env_function(create_env_fn),
        max_frames_per_traj=options.max_frames_per_traj,
        info_keys=tuple(options.info_keys),
    )
    log = open_log(path, logged, runner)
    runner.log = log
    return log
