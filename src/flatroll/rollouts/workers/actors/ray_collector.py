"""`RayCollector`: collects in the actors of a Ray cluster."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from torch import nn

from flatroll.layout.checks import whole_number
from flatroll.layout.inspect.text import Facts
from flatroll.rollouts.policies import copy_weights, refuse_hidden_weights, state_of
from flatroll.rollouts.progress import ProgressBar
from flatroll.rollouts.workers.actors.actor import CollectorActor
from flatroll.rollouts.workers.actors.arguments import (
    actor_options,
    check_modes,
    check_parts,
    env_functions,
    join_batches,
    on_cpu,
)
from flatroll.rollouts.workers.actors.fleet import Fleet, OnFailure, Place, Taken
from flatroll.rollouts.workers.arguments import check_options, seeds_of
from flatroll.rollouts.workers.gather import shares
from flatroll.sharing.flat_weights import flatten_weights, weight_layout
from flatroll.sharing.packed import unpack
from flatroll.sharing.ray_calls import Calls, RayCalls, put_named

Device = torch.device | str | None


class RayCollector(Facts):
    """Collects in actors of a Ray cluster, on this machine or on many; yields batches as `Collector` does.

    Each actor holds an ordinary `Collector`. Its windows come through the object store to this process, the *driver*,
    which copies them out at once and yields them, or extends its own replay buffer with them. With ``sync`` each batch
    has rows of all actors, in their order, collected with the weights of the moment at which it was asked for; else a
    batch is one actor's window, first come, and actors go on meanwhile. Ray is needed: ``pip install 'flatroll[ray]'``.

    Args:
        create_env_fn: a function that makes an env, or a list of them, one for each actor. Functions and all other
            arguments go to actors by cloudpickle; flatroll has to be installed on all nodes.
        policy: as in `Collector`. It is sent once, and new weights once for each version.
        num_collectors: number of actors W. Default: the length of the list, else 1.
        sync: see above. Default False.
        remote_configs: options of ``ray.remote`` for the actors, such as ``{"num_cpus": 2, "num_gpus": 0.5}``, or a
            list of W. Default: one CPU each. Ray restarts none of them (``max_restarts`` stays 0): this process
            replaces actors, since ids would come twice otherwise.
        ray_init_config: arguments of ``ray.init``, where Ray does not run yet. By default a cluster that the
            environment names is joined (Ray's rules of ``address="auto"``), else a local one is started, which listens
            on the loopback interface only and has an object store of at most 1 GiB.
        max_in_flight: windows of an actor that are under way or wait in the object store, without ``sync``. Default 2.
            With 1 an actor waits while its window is used; rows are at most so many windows of their actor old.
        frames_per_batch: as in `Collector`.
        policy_factory: a function that makes the policy in each actor, instead of ``policy``.
        on_failure: what happens when an actor dies, or its env, policy or hook raises: ``"raise"`` its error here;
            ``"drop"`` it and go on with the others; or ``"replace"`` it by one with a new writer number and seed. What
            it had under way is lost, what was yielded is not. The error of a collector that cannot even be made is
            raised always. Default "raise".
        max_failures: raise the error of a failure that comes after so many others within 60 s. Default 3.
        workers_per_actor: with more than 1, an actor holds a `MultiCollector` of so many processes, asks for as many
            CPUs, and gives their windows, or with ``sync`` one share of them all. Default 1.
        num_threads: threads of torch in each. Default 1.
        start_timeout: seconds that an actor may take to be placed on a node and to make its env. Default 300.
        seed: actor i gets seeds of its own from it, for its env, torch, NumPy and random actions. With ``sync`` a run
            repeats itself bit by bit. Default None.
        writer: number of the first actor in trajectory ids. Each further one, replacements included, has the next free
            numbers. Default 0.
        init_random_frames, trajs_per_batch, total_frames: shared out to the actors, as in `MultiCollector`.
        device: shorthand for ``policy_device``, in the actors, and ``storing_device``.
        storing_device: where batches are put, in this process.
        replay_buffer: a buffer of this process, or a `flatroll.buffers.RayReplayBuffer`, to which rows go straight from
            the actors unless ``sync`` joins them first. None is yielded then.
        progress: show a bar over all actors. Default False.
        calls: what runs actors. Default: Ray.
        arguments: further ones of `Collector`, used in each actor.

    Raises:
        ImportError: Ray is not installed.
        ValueError, TypeError: wrong arguments, or such as cannot be pickled; the text says which.
        MemoryError: what may be under way at once is more than the object store holds; the text says how much.
        TimeoutError: an actor was not ready in time, for want of resources, say.
        WorkerDied: an actor is gone (`flatroll.sharing`).

    >>> import gymnasium as gym
    >>> with RayCollector(  # doctest: +SKIP
    ...     lambda: gym.make("CartPole-v1"), num_collectors=2, frames_per_batch=10, total_frames=20
    ... ) as collector:
    ...     [batch.batch_size for batch in collector]
    [torch.Size([10]), torch.Size([10])]
    """

    #: As `Collector.final`, of the last batch.
    final: TensorDict | None = None
    _closed = True  # until the actors are there
    _iterator: Iterator[Any] | None = None

    def __init__(
        self,
        create_env_fn: Callable[[], Any] | Sequence[Callable[[], Any]],
        policy: Any = None,
        *,
        num_collectors: int | None = None,
        sync: bool = False,
        remote_configs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        ray_init_config: Mapping[str, Any] | None = None,
        max_in_flight: int = 2,
        frames_per_batch: int,
        total_frames: int = -1,
        policy_factory: Callable[[], Any] | None = None,
        on_failure: OnFailure = "raise",
        max_failures: int = 3,
        workers_per_actor: int = 1,
        num_threads: int = 1,
        start_timeout: float = 300.0,
        seed: int | None = None,
        writer: int = 0,
        replay_buffer: Any = None,
        init_random_frames: int | None = None,
        trajs_per_batch: int | None = None,
        device: Device = None,
        storing_device: Device = None,
        progress: bool = False,
        calls: Calls | None = None,
        **arguments: Any,
    ) -> None:
        functions = env_functions(create_env_fn, num_collectors, arguments.get("splits", 1))
        count, workers = len(functions), whole_number("workers_per_actor", workers_per_actor)
        configs = actor_options(remote_configs, count, workers)
        self._in_flight = 1 if sync else whole_number("max_in_flight", max_in_flight)
        check_modes(policy, policy_factory, on_failure, max_failures, workers, arguments.get("split_trajs"))
        numbers = {"frames_per_batch": frames_per_batch, "trajs_per_batch": trajs_per_batch}
        given = {**numbers, "total_frames": total_frames, "init_random_frames": init_random_frames or 0}
        check_options(arguments, replay_buffer, writer, writer + count * workers - 1, **given)
        check_parts(count * workers if sync else 1, **numbers)
        module = isinstance(policy, nn.Module)
        self._layout = weight_layout(policy.state_dict()) if module else None
        self.policy, self._trajs, self._random_frames = policy, trajs_per_batch, init_random_frames or 0
        self.frames_per_batch, self.total_frames, self._sync = frames_per_batch, total_frames, sync
        self._buffer, self._storing = replay_buffer, storing_device or device
        self._by_reference = None if sync else getattr(self._buffer, "extend_reference", None)
        self._progress, self._bar, self._seeds = progress, ProgressBar(total_frames, None), seeds_of(seed)
        self._made_there = policy_factory is not None
        self._threads, self._workers, self._count = num_threads, workers, count
        self._frames, self._rows, self._version, self._largest = 0, 0, 0, 0
        self._windows, self._lags = 0, [0, 0, 0]  # of windows, in versions: least, sum, largest
        self._came: dict[Place, Any] = {}  # windows of a batch that is not complete yet
        cpus = sum(config["num_cpus"] for config in configs)
        self._calls = RayCalls(ray_init_config, cpus + 1) if calls is None else calls
        failures: dict[str, Any] = {
            "on_failure": on_failure,
            "max_failures": max_failures,
            "start_timeout": start_timeout,
        }
        self._fleet = Fleet(self._calls, CollectorActor, self._options_of, writer, workers, **failures)
        try:
            self._begin(functions, configs, policy_factory, {"policy_device": device, **arguments})
        except BaseException:
            self._fleet.end(0)
            self._calls.close()
            raise
        self._closed = False

    def _begin(self, functions: list[Any], configs: list[Any], policy_factory: Any, arguments: Any) -> None:
        """Send what all actors need once, and make them."""
        calls, fleet = self._calls, self._fleet
        put_named(calls, **arguments)  # one by one, for the error: they are sent together
        policy = on_cpu(self.policy)
        fleet.common = put_named(calls, policy=policy, policy_factory=policy_factory, arguments=arguments)
        # A function that stands in the list more than once is sent once.
        once = {id(function): function for function in functions}
        sent = {key: put_named(calls, create_env_fn=function)[0] for key, function in once.items()}
        fleet.places = [Place(i, sent[id(functions[i])], config) for i, config in enumerate(configs)]
        fleet.start()
        rows = shares(self.frames_per_batch, self._count)[0] if self._sync else self.frames_per_batch
        self._check_store(rows * max(place.row_bytes for place in fleet.places))

    def _options_of(self, place: Place, hired: int) -> dict[str, Any]:
        """The arguments of the collector of an actor, the one made after ``hired`` others."""
        frames, trajs, total = self.frames_per_batch, self._trajs, self._goal(place)
        if self._sync:
            frames = shares(frames, self._count)[place.number]
            trajs = None if trajs is None else shares(trajs, self._count)[place.number]
        # The child of this number, whoever was made before.
        child = np.random.SeedSequence(self._seeds.entropy, spawn_key=(hired,))
        return {
            "frames_per_batch": frames,
            "trajs_per_batch": trajs,
            "total_frames": -1 if total is None else max(1, total - place.frames),
            "init_random_frames": max(0, -(-self._random_frames // self._count) - place.frames),  # rounded up
            "seed": int(child.generate_state(1)[0] >> 1),
            "writer": place.writer,
            "workers": self._workers,
            "sync": self._sync,
            "num_threads": self._threads,
        }

    def _check_store(self, window: int) -> None:
        """Raise MemoryError if the object store cannot hold what may be under way, with windows of so many bytes."""
        self._largest = window
        weights = 0
        if isinstance(self.policy, nn.Module):  # the version in use and the next one
            weights = 2 * sum(value.nbytes for value in self.policy.state_dict().values())
        need, room = self._count * self._in_flight * window + weights, self._calls.store_bytes()
        if need > room:
            each = "" if self._sync else f" x max_in_flight={self._in_flight}"
            raise MemoryError(
                f"{self._count} collectors{each} windows of {window:,} bytes and {weights:,} bytes of weights need "
                f"{need:,} bytes of the object store, which has {room:,}: take a smaller frames_per_batch, fewer "
                f"collectors, or a larger store, ray_init_config={{'object_store_memory': {2 * need}}}"
            )

    # -- batches -----------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield batches (or None with a replay buffer) until ``total_frames`` are collected."""
        self._check_open()
        while not self._closed and (made := self._make_batch()):
            yield made[0]
        self._bar.close()

    def iterator(self) -> Iterator[Any]:
        """The same as ``iter(collector)``."""
        return iter(self)

    def __next__(self) -> Any:
        """The next batch, without a loop; StopIteration after ``total_frames``."""
        self._check_open()
        if self._iterator is None:
            self._iterator = iter(self)
        try:
            return next(self._iterator)
        except BaseException:
            self._iterator = None  # a generator that has ended or raised stays ended
            raise

    def rollout(self) -> Any:
        """Collect one more batch, whether or not ``total_frames`` are reached; None if a replay buffer took it."""
        self._check_open()
        total, self.total_frames = self.total_frames, -1
        try:
            made = self._make_batch()
        finally:
            self.total_frames = total
        assert made is not None  # without a total there is always a next one
        return made[0]

    def _make_batch(self) -> tuple[TensorDictBase | None] | None:
        """What is yielded next, in a tuple; None if ``total_frames`` are collected."""
        began = perf_counter()
        before = self._frames
        try:
            rows = self._next_joined() if self._sync else self._next_window()
            if rows is None:
                return None
            batch = self._deliver(rows)
        except KeyboardInterrupt:  # nothing is lost: what is under way comes with the next batch
            raise
        except BaseException:
            self.shutdown(0)
            raise
        if self._progress:
            self._bar.show(cast(Any, range(self._frames - before)), before, began)
        return (batch,)

    def _next_window(self) -> Any:
        """The rows of the actor that is ready first, packed or by reference; None after the last."""
        while True:
            # Only now, so that a new window begins with the weights that the last batch has led to.
            for place in self._fleet.places:
                while len(place.under_way) < self._in_flight and self._wants(place):
                    self._fleet.begin(place, total=self._goal(place))
            if all(place.head is None for place in self._fleet.places):
                return None
            taken = self._fleet.take(fetch=self._by_reference is None)
            if taken is not None and self._count_in(taken):
                return taken.rows

    def _wants(self, place: Place) -> bool:
        """Whether another window of this place would not be too much."""
        if self.total_frames < 0:
            return True
        if self._trajs:
            return place.frames < (self._goal(place) or 0) or not place.ended
        under_way = sum(len(place.under_way) for place in self._fleet.places)
        return self._frames + under_way * self.frames_per_batch < self.total_frames

    def _goal(self, place: Place) -> int | None:
        """Up to how many rows this place collects, None for no end.

        Only windows of whole trajectories, whose sizes nobody knows before, need it: each place collects its part of
        what is left, the next batch's first windows going to the first places.
        """
        if self.total_frames < 0 or not self._trajs:
            return None
        places = self._fleet.places
        rows = self.frames_per_batch
        if self._sync:
            rows = shares(rows, len(places))[places.index(place)]
            return rows * -(-self.total_frames // self.frames_per_batch)
        gone = self._frames - sum(other.frames for other in places)  # of places that were dropped
        windows = -(-(self.total_frames - gone) // rows)
        return rows * shares(windows, len(places))[places.index(place)]

    def _next_joined(self) -> Any:
        """The rows of all actors, in their order, as one batch with its *final*; None after the last."""
        fleet = self._fleet
        if not self._trajs and 0 < self.total_frames <= self._frames:
            return None
        parts = dict(zip(fleet.places, shares(self.frames_per_batch, len(fleet.places)), strict=True))
        came = self._came
        ended: set[Place] = set()
        while True:
            for place in fleet.places:  # an actor that was replaced is asked anew
                if place not in came and place not in ended and not place.under_way:
                    fleet.begin(place, parts[place], self._goal(place))
            if all(place.head is None for place in fleet.places):
                break
            taken = fleet.take()
            if taken is not None and self._count_in(taken):
                came[taken.place] = unpack(taken.rows)
            elif taken is not None:
                ended.add(taken.place)
        self._came = {}
        joined = [came[place] for place in sorted(came, key=lambda place: place.number)]
        return join_batches(joined) if joined else None

    def _count_in(self, taken: Taken) -> bool:
        """Count a window; False if it has no rows."""
        report = taken.report
        self._frames += taken.fresh
        lag = self._version - report.version
        self._rows += report.rows
        if report.rows:
            least, total, largest = self._lags
            self._lags = [min(least, lag) if self._windows else lag, total + lag, max(largest, lag)]
            self._windows += 1
        if report.nbytes > self._largest:
            self._check_store(report.nbytes)
        return report.rows > 0

    def _deliver(self, rows: Any) -> TensorDictBase | None:
        """What is yielded: the batch, on its device; None where a buffer took it."""
        note = getattr(self._buffer, "note_waiting", None)
        if note is not None and self._trajs:
            note(self._held())
        if self._by_reference is not None:
            self._by_reference(rows)
            return None
        batch, final = unpack(rows)
        if self._storing is not None:
            batch, final = (None if part is None else part.to(self._storing) for part in (batch, final))
        self.final = final
        if self._buffer is None:
            return cast(TensorDict, batch)
        self._buffer.extend(batch, **({} if final is None else {"final": final}))
        return None

    def _held(self) -> int:
        """Number of rows that actors keep until their trajectories end, if ``postproc`` changes no batch's length."""
        return max(0, self._frames - self._rows)

    # -- the policy --------------------------------------------------------------------------------------------

    @property
    def frames(self) -> int:
        """Number of rows collected so far."""
        return self._frames

    @property
    def policy_version(self) -> int:
        """How often the policy has been updated; rows with ``track_policy_version`` say with which they were chosen."""
        return self._version

    def update_policy_weights_(self, policy_or_weights: Any = None) -> None:
        """Send weights to the actors: windows that begin after the next batch was asked for have them.

        Args:
            policy_or_weights: a module, its state dict, or a tensordict of its parameters, copied into the policy.
                Default: the policy's own weights as they are now.

        Raises:
            TypeError: the policy is no ``nn.Module``, and weights are given, or it uses a module; or it is made in the
                actors, and no weights are given.
            ValueError: names or shapes of the weights have changed.
        """
        self._check_open()
        if self._made_there:
            if policy_or_weights is None:
                raise TypeError("give the weights: the policy is made in the actors, by policy_factory")
            self._publish(state_of(policy_or_weights))
            return
        if not isinstance(self.policy, nn.Module):
            refuse_hidden_weights(self.policy)
        if policy_or_weights is not None and policy_or_weights is not self.policy:
            copy_weights(self.policy, policy_or_weights)
        self._publish(self.policy.state_dict() if isinstance(self.policy, nn.Module) else None)

    def _publish(self, state: Mapping[str, Any] | None) -> None:
        """Make these weights the next version."""
        flat = None
        if state is not None:
            if self._layout is None:  # of a policy that is made in the actors
                self._layout = weight_layout(state)
            flat = (flatten_weights(state, self._layout), self._layout)
        self._version += 1
        self._fleet.publish(self._version, flat)

    # -- state -------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, Any]:
        """Counts: frames and windows, actors made and lost, how many versions behind windows began, and what each
        place did."""
        least, total, largest = self._lags
        places = [
            {
                "writer": place.writer,
                "frames": place.frames,
                "windows": place.windows,
                "in_flight": len(place.under_way),
            }
            for place in self._fleet.places
        ]
        return {
            "frames": self._frames,
            "rows_held": self._held(),
            "windows": self._windows,
            "actors_made": self._fleet.hired,
            "actors_lost": self._fleet.lost,
            "policy_lag": {"min": least, "mean": total / max(1, self._windows), "max": largest},
            "collectors": places,
        }

    def state_dict(self) -> dict[str, Any]:
        """Return what resuming needs: row count, writer numbers and seeds used up, policy parameters and version.

        Nobody waits for it: rows under way are not in it, nor is the state of an env.
        """
        return {
            "frames": self._frames,
            "next_writer": self._fleet.next_writer,
            "seeds_used": self._fleet.hired,
            "policy": self.policy.state_dict() if isinstance(self.policy, nn.Module) else None,
            "policy_version": self._version,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`: actors are made anew, with writer numbers and seeds that none had before."""
        self._check_open()
        if isinstance(self.policy, nn.Module) and state["policy"] is not None:
            self.policy.load_state_dict(state["policy"])
        self._fleet.end(0)
        self._fleet.hired = max(state["seeds_used"], self._fleet.hired)
        self._fleet.next_writer = max(state["next_writer"], self._fleet.next_writer)
        self._frames = self._rows = state["frames"]
        for place in self._fleet.places:
            # Counted as if each had collected its part; only parts of the whole are made of these numbers.
            place.frames = shares(self._frames, len(self._fleet.places))[place.number]
        self._version = state["policy_version"] - 1  # publishing counts
        self._publish(self.policy.state_dict() if isinstance(self.policy, nn.Module) else None)
        self._fleet.start()

    def shutdown(self, timeout: float = 5.0) -> None:
        """End all actors, and Ray if it was started here; a second call does nothing.

        Args:
            timeout: seconds that actors have to finish their windows and close their envs.
        """
        self._bar.close()
        if not self._closed:
            self._closed = True
            self._fleet.end(timeout)
            self._calls.close()

    def __enter__(self) -> "RayCollector":
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown(0 if error[0] else 5)

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError("the collector is closed (by shutdown, or by an error in it): make a new one")

    def _facts(self) -> dict[str, Any]:
        """What `repr` and notebooks show."""
        total = f" of {self.total_frames:,}" if self.total_frames >= 0 else ""
        places = len(self._fleet.places)
        facts = {
            "": f"{self._frames:,}{total} frames",
            "actors": f"{places}, {'in step' if self._sync else 'first come'}",
            "frames_per_batch": f"{self.frames_per_batch:,}",
        }
        return facts | ({"state": "closed"} if self._closed else {})
