"""`MultiCollector`: runs a `Collector` in each of several worker processes."""

import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Literal, Unpack

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from flatroll.layout.checks import warn_of_scales
from flatroll.layout.inspect.text import Facts
from flatroll.rollouts.arguments import usable_device
from flatroll.rollouts.options import takes_options
from flatroll.rollouts.policies import as_state, refuse_hidden_weights
from flatroll.rollouts.workers.arguments import (
    check_plan,
    list_env_functions,
    list_factories,
    make_seeds,
    policy_here,
    read_options,
)
from flatroll.rollouts.workers.delivery import Delivery
from flatroll.rollouts.workers.gather import Gatherer, InStep, InTurn
from flatroll.rollouts.workers.jobs import make_jobs
from flatroll.rollouts.workers.options import FOR_WORKERS, Plan, TeamKeywords, TeamOptions
from flatroll.rollouts.workers.processes import Processes
from flatroll.rollouts.workers.supply import Supply
from flatroll.rollouts.workers.team import Interrupts, Team
from flatroll.rollouts.workers.transport import Transport
from flatroll.sharing.nursery import Nursery


class MultiCollector(Facts):
    """Steps envs in several processes and yields flat marked batches, as `Collector` does.

    Each worker is a `Collector` with its own envs, random state and copy of the policy.

    * With ``sync=True`` all workers collect their share of a batch and wait for the next request: worker i
      contributes ``frames_per_batch // W`` rows, or one more, and the batch is in worker order. New weights apply to
      all steps of the next batch requested after they were published. A row collected beyond a worker's share comes
      first in its next share, and was chosen with the weights of that time, as its policy version says. With a
      ``seed``, two runs yield the same batches bit for bit.
    * With ``sync=False`` a batch is a window of ``frames_per_batch`` rows of one worker; finished windows are served
      in turn. Workers continue meanwhile, up to ``slots`` windows ahead, and use new weights from their next vector
      step: a row is at most ``slots + 1`` windows of its worker old.

    No row is lost or duplicated, whatever the speed of workers and learner. Trajectory ids differ between workers, so
    a replay buffer accepts windows in any order.

    Args:
        create_env_fn: a function that makes an env, called once in each worker; or a list, one per worker. Lambdas
            and functions defined in ``__main__`` are allowed.
        policy: as in `Collector`. Workers act with copies of it; see `update_policy_weights_`.
        num_workers: W. Default: the number of functions, or 1.
        sync: see above. Default True.
        frames_per_batch: rows per batch; with ``sync=True`` at least one per worker.
        total_frames: total number of rows, rounded up to whole batches. Default -1: no limit.
        policy_factory: function that makes the policy in the worker, if it is costly to send or cannot be pickled; or
            a list, one per worker. Without ``policy`` it is also called once in this process for the initial weights.
            Default None.
        cat_results: 0 concatenates the shares; ``"stack"`` returns a batch ``[W, T]`` (``sync=True`` only).
        preemptive_threshold: fraction p of the workers, in (0, 1]: once ``ceil(p * W)`` of them have delivered, the
            others deliver the rows collected so far, at least one; the batch is then shorter. ``sync=True`` only.
            Default None.
        update_at_each_batch: publish the weights of ``policy`` before each batch is requested. Default False.
        slots: finished windows that a worker may hold. Default 2.
        num_threads: number of torch threads per worker. Default 1.
        seed: worker i uses child i of ``numpy.random.SeedSequence(seed)`` for its envs, random actions, torch, NumPy
            and ``random``; a replacement uses a new child. `seeds` lists them. Default None: different in each run.
        writer: number of worker 0 in the trajectory ids; worker i has ``writer + i``, a replacement the next unused
            number. Default 0.
        on_failure: what to do if a worker dies, or its env, policy or hook raises. ``"raise"`` (default): raise the
            error here, with the worker's traceback, and close. ``"drop"``: continue with the others. ``"replace"``:
            continue with a new process in its place. Its undelivered rows are lost, and its open trajectories are
            cut. An error while the collector is created is always raised.
        max_failures: raise anyway if more workers fail within 60 s. Default 3.
        step_timeout: kill a worker whose vector step (including resets and hooks) takes longer than this many
            seconds; it counts as a failure with TimeoutError. Default None: never.
        start_timeout: the same for the creation of the env. Default None: no limit for the first workers,
            ``step_timeout`` for replacements.
        start_method: ``"fork"`` or ``"spawn"``, see `flatroll.sharing.Nursery`. Default None: the system default.
        nursery: the process that starts workers, if several collectors share it; it stays open. Default: a new one.
        transport: starts workers and transfers windows, see `flatroll.rollouts.workers.transport`. Default: local
            processes.
        replay_buffer: batches are written into it with ``extend(batch, final=...)``, and None is yielded; see `start`.
        init_random_frames: number of rows with random actions, divided among the workers, rounded up. Default None:
            0.
        trajs_per_batch: complete trajectories per batch; with ``sync=True`` each worker contributes a share.
            ``total_frames`` is then divided among the workers, and their remaining trajectories form smaller batches.
            Default None.
        device: shorthand for ``policy_device`` and ``storing_device``.
        storing_device: device of the batches. Default: the CPU.
        progress: show a bar over all workers. Default False.
        options: further arguments of `Collector`, such as ``compact_obs``, ``info_keys``,
            ``set_truncated``, ``split_trajs``, ``state_stride``, ``splits``, ``track_policy_version``, ``track_envs``.
            Hooks and ``postproc`` run in the workers, on their part of the batch.

    Raises:
        ValueError, TypeError: arguments contradict one another or cannot be sent to a process.
        BaseException: raised by a worker while it created its env, with the worker's traceback as the cause.

    >>> import gymnasium as gym
    >>> with MultiCollector(
    ...     lambda: gym.make("CartPole-v1"), num_workers=2, sync=True, frames_per_batch=5, total_frames=10, seed=0
    ... ) as collector:
    ...     [batch.batch_size for batch in collector]
    [torch.Size([5]), torch.Size([5])]
    """

    _supply: Supply

    @takes_options(TeamOptions)
    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Any],
        policy: Any = None,
        *,
        num_workers: int | None = None,
        sync: bool = True,
        frames_per_batch: int,
        slots: int = 2,
        start_timeout: float | None = None,
        start_method: Literal["fork", "spawn"] | None = None,
        nursery: Nursery | None = None,
        transport: Transport | None = None,
        **options: Unpack[TeamKeywords],
    ) -> None:
        chosen = read_options(options)
        functions = list_env_functions(create_env_fn, num_workers, chosen.splits)
        factories = list_factories(chosen.policy_factory, len(functions))
        plan = Plan(
            workers=len(functions),
            frames_per_batch=frames_per_batch,
            sync=sync,
            slots=slots,
            start_timeout=start_timeout,
            options=chosen,
        )
        self._writers = 1
        made_there = False
        if transport is not None:
            self._writers = transport.writers_of_each
            made_there = transport.makes_policies

        check_plan(plan, self._writers)
        policy = policy_here(policy, factories, chosen.update_at_each_batch, made_there)
        seeds = make_seeds(chosen.seed)
        storing = _storing_device(chosen)

        self.num_workers = plan.workers
        self.frames_per_batch = frames_per_batch
        self.policy = policy
        self._total = chosen.total_frames
        self._plan = plan
        self._buffer = chosen.replay_buffer
        self._whole = chosen.trajs_per_batch is not None
        self._storing = storing
        for_workers = {name: value for name, value in options.items() if name in FOR_WORKERS}
        self._jobs = make_jobs(plan, functions, factories, policy, for_workers)

        self._transport = transport or Processes(plan.workers, nursery, start_method, chosen.num_threads)
        try:
            weights = policy.state_dict() if isinstance(policy, nn.Module) else {}
            self._transport.share(weights)
        except BaseException:
            self._transport.close()
            raise

        self._begin(0, chosen.writer, seeds)
        if self._buffer is not None and self._supply.gatherer.team.scaled:
            warn_of_scales(stacklevel=2)

    def _begin(self, frames: int, writer: int, seeds: np.random.SeedSequence) -> None:
        """Start the workers after ``frames`` collected rows, with the next free ``writer`` and ``seeds``."""
        interrupts = Interrupts()
        team = None
        self._seed_sequence = seeds
        self._begun_at = frames

        try:
            # Allow Ctrl-C only while waiting: elsewhere a worker that was just started could be lost.
            with interrupts:
                team = self._make_team(writer, seeds, frames, interrupts)
                self._make_supply(team, interrupts)
        except BaseException:
            if team is not None:
                team.end(0)
            self._transport.close()
            raise

    def _make_team(
        self, writer: int, seeds: np.random.SeedSequence, frames: int, interrupts: Interrupts
    ) -> Team:
        if self._plan.options.track_traj_ids:
            writers = self._writers
        else:
            writers = 0
        return Team(
            self._transport,
            self._jobs,
            self._plan,
            first_writer=writer,
            writers=writers,
            seeds=seeds,
            frames=frames,
            interrupts=interrupts,
        )

    def _make_supply(self, team: Team, interrupts: Interrupts) -> None:
        options = self._plan.options
        given = team, self.frames_per_batch, self._total, self._whole
        gatherer: Gatherer
        if self._plan.sync:
            gatherer = InStep(*given, enough=options.preemptive_threshold)
        else:
            gatherer = InTurn(*given)

        publish = None
        if options.update_at_each_batch:
            publish = self._publisher()
        self._supply = Supply(
            gatherer,
            Delivery(self._buffer, self._storing, options.cat_results == "stack"),
            self._transport,
            interrupts,
            publish=publish,
            buffer=self._buffer,
            whole=self._whole,
            progress=options.progress,
        )

        # Also runs when the collector is garbage-collected and when the interpreter exits.
        self._end = weakref.finalize(self, self._supply.close, 1.0)

    def _publisher(self) -> Callable[[], None]:
        """Return a function that publishes the policy's weights without a reference to the collector."""
        policy = self.policy
        transport = self._transport
        return lambda: transport.publish(policy.state_dict())

    def __iter__(self) -> Iterator[Any]:
        """Yield batches (or None with a replay buffer) until ``total_frames`` are collected."""
        supply = self._open()
        while not supply.closed and (made := supply.next(limited=True)):
            yield made[0]

    def iterator(self) -> Iterator[Any]:
        """The same as ``iter(collector)``."""
        return iter(self)

    def __next__(self) -> Any:
        """Collect the next batch; StopIteration after ``total_frames``."""
        made = self._open().next(limited=True)
        if made is None:
            raise StopIteration
        return made[0]

    def rollout(self) -> TensorDict | None:
        """Collect one more batch, even after ``total_frames``.

        Returns:
            The batch; None if a replay buffer took it.
        """
        made = self._open().next(limited=False)
        assert made is not None  # without a total there is always a next batch
        return made[0]

    @property
    def final(self) -> TensorDict | None:
        """The next observations that no row of the last batch holds, with ``compact_obs=True``; see `Collector.final`.

        ``"row"`` counts the rows of the whole batch. None if a replay buffer took the batch.
        """
        return self._supply.delivery.final

    @property
    def frames(self) -> int:
        """Number of rows collected so far."""
        return self._supply.gatherer.team.frames

    @property
    def total_frames(self) -> int:
        """Total number of rows to collect; -1: no limit."""
        return self._total

    @total_frames.setter
    def total_frames(self, total: int) -> None:
        self._total = total
        self._supply.gatherer.set_total(total)

    @property
    def seeds(self) -> list[int]:
        """The seed of each worker."""
        return list(self._supply.gatherer.team.seeds)

    @property
    def policy_version(self) -> int:
        """Number of weight updates. ``track_policy_version`` stores the version that chose each row's action."""
        return self._transport.version

    def update_policy_weights_(self, policy_or_weights: Any = None) -> None:
        """Publish new weights to all workers and increment `policy_version`.

        It does not wait: workers load the newest weights at their next vector step, with ``sync=True`` at the next
        batch.

        Args:
            policy_or_weights: a module, its state dict, or a tensordict of its parameters. Default: ``policy`` with
                its current weights.

        Raises:
            TypeError: the policy is not an ``nn.Module``, and weights were given or it uses a module.
            ValueError: names, shapes or dtypes differ from the policy's; nothing is changed.
        """
        self._raise_error()
        if not isinstance(self.policy, nn.Module):
            refuse_hidden_weights(self.policy)
        if policy_or_weights is not None and not isinstance(self.policy, nn.Module):
            raise TypeError(
                f"the policy, {type(self.policy).__name__}, is not an nn.Module: it has no weights to update"
            )

        if policy_or_weights is None:
            policy_or_weights = self.policy
        self._publish(policy_or_weights)

    def _publish(self, given: Any) -> None:
        """Publish weights as the next version; without weights only increment the version."""
        with self._supply.lock:
            if isinstance(given, nn.Module | Mapping | TensorDictBase):
                weights = as_state(given)
            else:
                weights = {}
            self._transport.publish(weights)

    def start(self) -> None:
        """Collect into the replay buffer in a thread of this process, up to ``total_frames``, and return at once.

        After that only ``replay_buffer.sample()`` is needed, once there are rows. An error in the thread is raised by
        the next use of the buffer, `stats`, `pause`, `update_policy_weights_` or `shutdown`, whichever comes first.

        Raises:
            RuntimeError: there is no replay buffer, or the thread is already running.
        """
        supply = self._open()
        if self._buffer is None:
            raise RuntimeError(
                f"start() collects into a replay buffer: create {type(self).__name__}(replay_buffer=...)"
            )
        supply.start()

    def pause(self) -> ExitStack:
        """Stop the thread of `start` between two batches; workers wait once their slots are full.

        Returns:
            A context manager: ``with collector.pause(): ...`` resumes at its end. Without ``with``, call `start` to
            resume.
        """
        running = self._supply.is_running
        self._supply.stop()
        self._raise_error()
        resume = ExitStack()
        if running:
            resume.callback(self.start)
        return resume

    def stats(self) -> dict[str, Any]:
        """Return counts of collected rows, failures and waiting times.

        Returns:
            ``frames``; ``policy_version``; ``failures`` of workers; ``waited``, seconds this process waited for
            workers; ``running``, whether the thread of `start` is running; and ``workers``, for each worker: its
            ``seed``, ``frames``, ``windows``, ``rows_held`` (collected, for later windows), ``waited`` (seconds it
            waited for this process), and ``policy_lag``, the number of versions between a step and the delivery of
            its window (``min``, ``mean`` and ``max``).
        """
        self._raise_error()
        supply = self._supply
        team = self._supply.gatherer.team
        with supply.lock:
            workers = [
                {"worker": place, "seed": seed} | tally.facts()
                for place, (tally, seed) in enumerate(zip(supply.tallies, self.seeds, strict=True))
            ]
            return {
                "frames": self.frames,
                "policy_version": self.policy_version,
                "failures": team.failures,
                "waited": team.waited,
                "running": supply.is_running,
                "workers": workers,
            }

    def state_dict(self) -> dict[str, Any]:
        """Return the row count, used seeds and writer numbers, the weights and their version.

        It does not contact workers. It does not contain rows that workers hold or the states of envs: after loading,
        new trajectories begin.
        """
        with self._supply.lock:
            if isinstance(self.policy, nn.Module):
                policy = self._published()
            else:
                policy = None

            return {
                "frames": self.frames,
                "next_writer": self._supply.gatherer.team.next_writer,
                "seed": {
                    "entropy": self._seed_sequence.entropy,
                    "n_children_spawned": self._seed_sequence.n_children_spawned,
                },
                "policy": policy,
                "policy_version": self.policy_version,
            }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`: workers restart with unused seeds and writer numbers.

        It also loads the weights into the policy.
        """
        self._open()
        self._end.detach()
        self._supply.close(1.0, keep_transport=True)
        if isinstance(self.policy, nn.Module) and state["policy"] is not None:
            self.policy.load_state_dict(state["policy"])
            self._transport.publish(state["policy"])

        self._transport.version = state["policy_version"]
        writer = max(self._supply.gatherer.team.next_writer, state["next_writer"])
        self._begin(state["frames"], writer, np.random.SeedSequence(**state["seed"]))

    def _published(self) -> dict[str, Any]:
        """Return the weights that workers use."""
        assert self.policy is not None
        weights = {name: value.detach().clone() for name, value in self.policy.state_dict().items()}
        self._transport.fetch_into(weights)
        return weights

    def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the workers at their next step; a second call does nothing, or finishes what Ctrl-C interrupted.

        Workers that take longer than ``timeout`` seconds to end a step and close their envs are killed.

        Raises:
            BaseException: an error of `start`'s thread that was not raised before.
        """
        if os.getpid() == self._supply.owner:
            self._supply.close(timeout)
            self._end.detach()
            self._raise_error()

    def async_shutdown(self, timeout: float = 5.0) -> None:
        """The same as `shutdown`."""
        self.shutdown(timeout)

    def __getstate__(self) -> Any:
        """Refuse to pickle or copy a collector: its workers belong to this process."""
        raise TypeError(
            f"a {type(self).__name__} cannot be pickled or copied, since its workers belong to this process: pickle "
            "its state_dict(), and load it into a new one"
        )

    def _check_open(self) -> None:
        """Raise RuntimeError if the collector is closed."""
        self._raise_error()
        if self._supply.closed:
            raise RuntimeError("the collector is closed (by shutdown, or by an error in it): make a new one")

    def _raise_error(self) -> None:
        """Raise an error of `start`'s thread that was not raised before; RuntimeError in another process."""
        if os.getpid() != self._supply.owner:
            raise RuntimeError(
                f"this collector belongs to process {self._supply.owner}, which created it: rows taken here would "
                "be missing there. Create another one in this process"
            )
        self._supply.raise_error()

    def _open(self) -> Supply:
        """Return the supply; RuntimeError if the caller may not read from it."""
        self._check_open()
        if self._supply.is_running:
            raise RuntimeError(
                "the thread of start() is collecting: sample from the replay buffer, or call pause() first"
            )
        return self._supply

    def _facts(self) -> dict[str, Any]:
        """Return what `repr` and notebooks show."""
        if self.total_frames >= 0:
            total = f" of {self.total_frames:,}"
        else:
            total = ""

        if self.policy is None:
            policy = "random actions"
        else:
            policy = type(self.policy).__name__

        if self.policy is None and self._jobs[0].policy_factory is not None:
            policy = "of a policy_factory"
        facts: dict[str, Any] = {
            "": f"{self.frames:,}{total} frames",
            "workers": self.num_workers,
            "policy": policy,
            "frames_per_batch": f"{self.frames_per_batch:,}",
        }

        if self._buffer is not None:
            facts["replay_buffer"] = self._buffer
        if self._supply.closed:
            state = {"state": "closed"}
        else:
            state = {}
        return facts | state

    def __enter__(self) -> "MultiCollector":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()


def _storing_device(options: TeamOptions) -> torch.device | None:
    """Return the device of the batches, if one is given."""
    if options.storing_device:
        return usable_device("storing_device", options.storing_device)
    if options.device is not None:
        return usable_device("device", options.device)
    return None


class MultiSyncCollector(MultiCollector):
    """`MultiCollector` with ``sync=True``: each batch holds the shares of all workers.

    >>> import gymnasium as gym
    >>> with MultiSyncCollector(
    ...     lambda: gym.make("CartPole-v1"), num_workers=2, frames_per_batch=6, total_frames=6, cat_results="stack"
    ... ) as collector:
    ...     next(collector).batch_size
    torch.Size([2, 3])
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **arguments: Any) -> None:
        super().__init__(create_env_fn, policy, sync=True, **arguments)


class MultiAsyncCollector(MultiCollector):
    """`MultiCollector` with ``sync=False``: each batch is a window of one worker.

    >>> import gymnasium as gym
    >>> with MultiAsyncCollector(
    ...     lambda: gym.make("CartPole-v1"), num_workers=2, frames_per_batch=6, total_frames=18
    ... ) as collector:
    ...     [batch.batch_size for batch in collector]
    [torch.Size([6]), torch.Size([6]), torch.Size([6])]
    """

    def __init__(self, create_env_fn: Any, policy: Any = None, **arguments: Any) -> None:
        super().__init__(create_env_fn, policy, sync=False, **arguments)
