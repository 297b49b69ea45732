"""`Collector`: turns env steps into flat marked batches of an exact number of rows."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType, set_interaction_type
from torch import nn

from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import DONE, TRUNCATED
from flatroll.layout.trajectories import split_trajectories
from flatroll.rollouts.policies import (
    CallablePolicy,
    Columns,
    ModulePolicy,
    RandomPolicy,
    is_tensordict_module,
)
from flatroll.rollouts.runner import Act, Runner
from flatroll.rollouts.trajectories import TrajectoryJoiner
from flatroll.wrappers.markers import StepCounter, TrajId, find_wrapper

Device = torch.device | str | None


class Collector:
    """Steps an env with a policy and yields flat marked batches of exactly ``frames_per_batch`` rows.

    Each batch is a plain tensordict ``[frames_per_batch]``: the rows of each trajectory stand together in time
    order, env after env, with the columns of DESIGN section 1. Rows on which an env only resets never appear;
    rows beyond ``frames_per_batch`` come first in the next batch. Cutting the stream into other windows changes
    no row, flag or id of it. Yielded batches own their memory.

    InitTracker and TrajId are added where the env's stack lacks them; a recurrent policy (one with parts that
    have ``make_tensordict_primer()``) gets its states and ``is_init`` without a word.

    Args:
        create_env_fn: an env (anything `flatroll.wrappers.as_vector_env` takes, or wrappers around it), or a
            function that makes one.
        policy: a tensordict module, a module or callable from observation (tensor, or dict of tensors) to
            action, or None for random actions.
        frames_per_batch: rows of a batch.
        total_frames: rows in all; a whole number of batches is collected. Default -1: no end.
        device: shorthand for the three devices below.
        env_device: where the env's arrays live. Default: the env knows.
        policy_device: where the policy wants its input. Default: where the env's arrays are.
        storing_device: where batches are put. Default: where the env's arrays are.
        no_cuda_sync: do not wait for copies between devices. Default False.
        compact_obs: leave ``("next", obs)`` out; `final` then has the observations that no row holds.
        track_traj_ids: write ``("collector", "traj_ids")``. Default True.
        trajs_per_batch: yield batches of so many complete trajectories instead (``frames_per_batch`` is then
            how much is collected between looks). Trajectories still open at the end are not yielded.
        set_truncated: mark the last row of each run that the batch cuts as truncated and done.
        max_frames_per_traj: truncate episodes after so many steps (adds a StepCounter).
        init_random_frames: take random actions in the first so many rows; the policy's other outputs are
            recorded as they are.
        reset_at_each_iter: reset the env before each batch.
        split_trajs: yield padded ``[n, T_max]`` batches with a mask. Discouraged: warns.
        postproc: function of the batch; its result is yielded.
        pre_collect_hook: called without arguments before each batch is collected.
        post_collect_hook: called with each batch before it is yielded; what it returns is ignored.
        replay_buffer: batches are written into it, and None is yielded.
        auto_register_policy_transforms: wire recurrent states. Default None means True; False leaves them.
        info_keys: entries of ``info`` to store: ``key`` as the policy saw it, ``("next", key)`` as the step
            gave it.
        exploration_type: how probabilistic modules choose. Default: they sample.
        seed: seeds the env's first reset and the random actions.
        progress: show a tqdm bar.

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
    final: TensorDict | None

    def __init__(
        self,
        create_env_fn: Any,
        policy: Any = None,
        *,
        frames_per_batch: int,
        total_frames: int = -1,
        device: Device = None,
        env_device: Device = None,
        policy_device: Device = None,
        storing_device: Device = None,
        no_cuda_sync: bool = False,
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
        replay_buffer: Any = None,
        auto_register_policy_transforms: bool | None = None,
        info_keys: Sequence[str] = (),
        exploration_type: InteractionType = InteractionType.RANDOM,
        seed: int | None = None,
        progress: bool = False,
    ) -> None:
        self._closed = True  # until the env is there
        self.final = None
        _check_counts(frames_per_batch, total_frames, trajs_per_batch, init_random_frames)
        if split_trajs:
            if not track_traj_ids:
                raise ValueError(
                    "split_trajs=True needs track_traj_ids=True: pieces are told apart by their ids"
                )
            warnings.warn(
                "split_trajs=True pads every trajectory to the longest of the batch and cuts them at its end; "
                "flat batches need neither (flatroll.layout.split_trajectories does it afterwards)",
                stacklevel=2,
            )
        if trajs_per_batch is not None and not track_traj_ids:
            raise ValueError(
                "trajs_per_batch needs track_traj_ids=True: trajectories are joined by their ids"
            )
        self.frames_per_batch = frames_per_batch
        self.total_frames = total_frames
        self.policy = policy
        env = _make_env(create_env_fn)
        if max_frames_per_traj is not None:
            if find_wrapper(env, StepCounter) is not None:
                raise ValueError(
                    f"max_frames_per_traj={max_frames_per_traj} and a StepCounter in the env's stack: give the "
                    "StepCounter max_steps instead"
                )
            env = StepCounter(env, max_steps=max_frames_per_traj)
        self._runner = Runner(env, info_keys=info_keys, track_traj_ids=track_traj_ids)
        if env_device is not None and torch.device(env_device).type != self._runner.device.type:
            raise ValueError(
                f"env_device={str(env_device)!r}, but the env's arrays are on {self._runner.device}: move the env, "
                "or wrap it with as_vector_env(env, framework='torch', device=...)"
            )
        self.env = self._runner.env
        self._closed = False
        target = storing_device or device
        self._storing_device = None if target is None else torch.device(target)
        self._no_sync = no_cuda_sync
        act, defaults = make_act(
            self._runner,
            policy,
            policy_device or device,
            seed=seed,
            blocking=not no_cuda_sync,
            recurrent=auto_register_policy_transforms is not False,
        )
        self._runner.start(act, defaults, -(-frames_per_batch // self._runner.num_envs))
        self._compact = compact_obs or self._runner.asks_compact
        self._joiner = TrajectoryJoiner(trajs_per_batch, self._runner.traj_key) if trajs_per_batch else None
        self._set_truncated = set_truncated
        self._random_frames = init_random_frames
        self._reset_each = reset_at_each_iter
        self._split = split_trajs
        self._postproc = postproc
        self._pre_hook = pre_collect_hook
        self._post_hook = post_collect_hook
        self._buffer = replay_buffer
        self._exploration = exploration_type
        self._seed = seed
        self._progress = progress
        self._bar: Any = None
        self._frames = 0
        self._iterator: Iterator[TensorDict | None] | None = None

    def __iter__(self) -> Iterator[TensorDict | None]:
        """Yield batches (or None with a replay buffer) until ``total_frames`` are collected."""
        if self._closed:
            raise RuntimeError("the collector is closed: make a new one")
        while not self._closed and (self.total_frames < 0 or self._frames < self.total_frames):
            yield from self._guarded(self._collect)
        if self._joiner is not None and not self._closed:
            joiner = self._joiner
            yield from self._guarded(lambda: self._deliver_all(joiner.rest()))

    def __next__(self) -> TensorDict | None:
        """The next batch, without a loop; StopIteration after ``total_frames``."""
        if self._iterator is None:
            self._iterator = iter(self)
        return next(self._iterator)

    @property
    def frames(self) -> int:
        """Rows collected so far."""
        return self._frames

    def shutdown(self) -> None:
        """Close the env. Iterating afterwards is an error; calling it twice is not."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
        if not self._closed:
            self._closed = True
            self.env.close()

    def __enter__(self) -> "Collector":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()

    def state_dict(self) -> dict[str, Any]:
        """What is needed to go on: counters, the ids handed out, random state, the policy's parameters.

        The env's own state is not in it: on loading, open trajectories are cut and the env is reset.
        """
        runner = self._runner
        ids = find_wrapper(self.env, TrajId)
        return {
            "frames": self._frames,
            "traj_ids": None if ids is None else ids.state_dict(),
            "random": None if runner.random is None else runner.random.state_dict(),
            "policy": self.policy.state_dict() if isinstance(self.policy, nn.Module) else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue after a `state_dict`: new ids follow the old ones, the env is reset at the next batch."""
        runner = self._runner
        self._frames = state["frames"]
        ids = find_wrapper(self.env, TrajId)
        if ids is not None and state["traj_ids"] is not None:
            ids.load_state_dict(state["traj_ids"])
        if runner.random is not None and state["random"] is not None:
            runner.random.load_state_dict(state["random"])
        if isinstance(self.policy, nn.Module) and state["policy"] is not None:
            self.policy.load_state_dict(state["policy"])
        runner.forget()
        if self._joiner is not None:
            self._joiner.forget()

    def _guarded(self, work: Callable[[], list[TensorDict | None]]) -> list[TensorDict | None]:
        """Do the work; whatever goes wrong in env, policy, hook or buffer closes the collector."""
        try:
            return work()
        except BaseException:
            self.shutdown()
            raise

    def _collect(self) -> list[TensorDict | None]:
        """Collect one window and deliver what it completes."""
        if self._pre_hook is not None:
            self._pre_hook()
        runner = self._runner
        with torch.no_grad(), set_interaction_type(self._exploration):
            if not runner.started:
                runner.reset(self._seed)
            elif self._reset_each:
                runner.reset()
            while (missing := self.frames_per_batch - runner.count()) > 0:
                for _ in range(-(-missing // runner.num_envs)):
                    runner.step(
                        random=self._frames + runner.window.steps * runner.num_envs < self._random_frames
                    )
            batch, final = runner.take(self.frames_per_batch, self._compact and self._joiner is None)
        self._frames += self.frames_per_batch
        self._show(batch)
        if self._joiner is None:
            return self._deliver_all([(batch, final)])
        return self._deliver_all((joined, None) for joined in self._joiner.add(batch))

    def _deliver_all(self, batches: Any) -> list[TensorDict | None]:
        return [self._deliver(batch, final) for batch, final in batches]

    def _deliver(self, batch: TensorDict, final: TensorDict | None) -> TensorDict | None:
        """The way of a finished batch: cut marks, compaction, device, postproc, hook, buffer."""
        runner = self._runner
        if self._joiner is not None and self._compact:
            batch, final = runner.compact(batch)
        if self._set_truncated:
            ends = run_ends(batch, is_init_key=runner.init_key, traj_key=runner.traj_key).unsqueeze(-1)
            cut = ends & ~batch.get(DONE)
            batch.set(TRUNCATED, batch.get(TRUNCATED) | cut)
            batch.set(DONE, batch.get(DONE) | cut)
        if self._storing_device is not None:
            batch = batch.to(self._storing_device, non_blocking=self._no_sync)
            final = None if final is None else final.to(self._storing_device, non_blocking=self._no_sync)
        self.final = final
        if self._split:
            batch = split_trajectories(batch, trajectory_key=runner.traj_key)
        if self._postproc is not None:
            batch = self._postproc(batch)
        if self._post_hook is not None:
            self._post_hook(batch)
        if self._buffer is None:
            return batch
        if final is None:
            self._buffer.extend(batch)
        else:
            self._buffer.extend(batch, final=final)
        return None

    def _show(self, batch: TensorDict) -> None:
        if not self._progress:
            return
        if self._bar is None:
            from tqdm.auto import tqdm

            total = None if self.total_frames < 0 else self.total_frames
            self._bar = tqdm(total=total, unit="frame", unit_scale=True, initial=self._frames - len(batch))
        self._bar.update(self.frames_per_batch)
        returns = batch.get(("next", "episode_reward"), None)
        if returns is not None:
            ended = returns[batch.get(DONE)]
            if len(ended):
                self._bar.set_postfix({"return": f"{ended.mean().item():.1f}"})


def make_act(
    runner: Runner,
    policy: Any,
    policy_device: Device = None,
    *,
    seed: int | None = None,
    blocking: bool = True,
    recurrent: bool = True,
) -> tuple[Act, Columns]:
    """Any kind of policy as one function, and the states it starts an episode with."""
    device = None if policy_device is None else torch.device(policy_device)
    if device == runner.device:
        device = None
    runner.random = RandomPolicy(runner.env.single_action_space, runner.num_envs, runner.device, seed)
    if policy is None:
        random = runner.random
        return (lambda columns, obs: (random(), {})), {}
    if is_tensordict_module(policy):
        module = ModulePolicy(policy, runner.num_envs, device, runner.device, blocking, recurrent)
        return module, module.defaults
    if not callable(policy):
        raise TypeError(
            "policy must be a tensordict module, a callable from observation to action, or None, got "
            f"{type(policy).__name__}"
        )
    plain = CallablePolicy(policy, device, blocking)
    return plain, plain.defaults


def _make_env(create_env_fn: Any) -> Any:
    if isinstance(create_env_fn, (list, tuple)):
        raise TypeError(
            f"create_env_fn must be one env or one function that makes it, got a list of {len(create_env_fn)}: "
            "put them into one gymnasium.vector env, or use a multi-process collector"
        )
    if hasattr(create_env_fn, "step") and hasattr(create_env_fn, "reset"):
        return create_env_fn
    if not callable(create_env_fn):
        raise TypeError(f"create_env_fn must be an env or a function that makes one, got {create_env_fn!r}")
    return create_env_fn()


def _check_counts(frames: int, total: int, trajs: int | None, random: int) -> None:
    if frames <= 0:
        raise ValueError(f"frames_per_batch must be at least 1, got {frames}")
    if total == 0 or total < -1:
        raise ValueError(f"total_frames must be positive, or -1 for no end, got {total}")
    if trajs is not None and trajs <= 0:
        raise ValueError(f"trajs_per_batch must be at least 1 or None, got {trajs}")
    if random < 0:
        raise ValueError(f"init_random_frames must be at least 0, got {random}")
    if total > 0 and total % frames:
        whole = -(-total // frames) * frames
        warnings.warn(
            f"total_frames={total} is no multiple of frames_per_batch={frames}: {whole} frames will be collected",
            stacklevel=3,
        )
