"""`RayCollector`: collects in the actors of a Ray cluster."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Unpack

from torch import nn

from flatroll.layout.checks import check_whole_number
from flatroll.rollouts.options import takes_options
from flatroll.rollouts.policies import as_state, copy_weights
from flatroll.rollouts.workers.arguments import list_env_functions, read_options
from flatroll.rollouts.workers.multi_collector import MultiCollector
from flatroll.rollouts.workers.on_ray.actors import Actors
from flatroll.rollouts.workers.options import TeamKeywords, TeamOptions
from flatroll.sharing.block import dtype_name
from flatroll.sharing.on_ray.calls import Calls, RayCalls


class RayCollector(MultiCollector):
    """Collects in the actors of a Ray cluster and yields batches like `Collector`.

    It is a `MultiCollector` over actors, including `start`, `pause`, preemption, stacking and timeouts. Each actor
    holds an ordinary `Collector`. Its windows pass through the object store to this process, the *driver*, which
    copies them and yields them or writes them to its replay buffer. With ``sync`` each batch has rows of all actors,
    in order, collected with the weights at the time of the request; otherwise a batch is one actor's window, and
    actors continue meanwhile. Requires Ray: ``pip install 'flatroll[ray]'``.

    Args:
        create_env_fn: a function that makes an env, or a list, one per actor. Arguments are sent to actors by
            cloudpickle; flatroll must be installed on all nodes.
        policy: as in `Collector`. It is sent once, and new weights once per version.
        num_collectors: number of actors W. Default: the length of the list, else 1.
        sync: see above. Default False.
        remote_configs: options of ``ray.remote`` for the actors, such as ``{"num_cpus": 2, "num_gpus": 0.5}``, or a
            list of W. Default: one CPU each. Ray must not restart actors (``max_restarts`` stays 0): this process
            replaces them, because a restarted actor would reuse ids.
        ray_init_config: arguments of ``ray.init`` if Ray is not running. By default it joins the cluster that the
            environment names (see Ray's ``address="auto"``), or starts a local one that listens on the loopback
            interface only, with an object store of at most 1 GiB.
        max_in_flight: without ``sync``, windows per actor that are being collected or wait in the object store.
            Default 2. With 1 an actor waits while its window is used. Rows are at most this many windows of their
            actor old.
        frames_per_batch: as in `Collector`.
        policy_factory: a function that makes the policy in each actor, instead of ``policy``.
        on_failure: what to do if an actor dies, or its env, policy or hook raises: ``"raise"`` its error here;
            ``"drop"`` it and continue with the others; or ``"replace"`` it by one with a new writer number and seed.
            Its pending windows are lost. An error while the collector is created is always raised. Default "raise".
        max_failures: raise anyway if more actors fail within 60 s. Default 3.
        workers_per_actor: with more than 1, each actor holds a `MultiCollector` with this many processes and requests
            as many CPUs; it returns their windows, or with ``sync`` one joint share. Default 1.
        num_threads: torch threads in each worker. Default 1.
        start_timeout: seconds until an actor must be placed on a node and have its env. Default 300.
        step_timeout, cat_results, preemptive_threshold, update_at_each_batch: as in `MultiCollector`. Stacks and
            preemption need ``workers_per_actor=1``.
        seed: each actor derives its own seeds from it for env, torch, NumPy and random actions. With ``sync`` runs
            are reproducible bit for bit. Default None.
        writer: number of the first actor in trajectory ids. Further actors and replacements get the next free
            numbers. Default 0.
        init_random_frames, trajs_per_batch, total_frames: divided among the actors, as in `MultiCollector`.
        device: shorthand for ``policy_device``, in the actors, and ``storing_device``.
        storing_device: device of the batches, in this process.
        replay_buffer: a buffer of this process, or a `flatroll.buffers.RayReplayBuffer`, which receives rows directly
            from the actors unless ``sync`` joins them first. Iteration then yields None.
        progress: show a bar over all actors. Default False.
        calls: runs the actors. Default: Ray.
        options: further arguments of the `Collector` in each actor.

    Raises:
        ImportError: Ray is not installed.
        ValueError, TypeError: arguments are wrong or cannot be pickled; the message names them.
        MemoryError: the windows in flight may exceed the object store; the message gives both sizes.
        TimeoutError: an actor was not ready in time, for example for lack of resources.
        WorkerDied: an actor died (`flatroll.sharing`).

    >>> import gymnasium as gym
    >>> with RayCollector(  # doctest: +SKIP
    ...     lambda: gym.make("CartPole-v1"), num_collectors=2, frames_per_batch=10, total_frames=20
    ... ) as collector:
    ...     [batch.batch_size for batch in collector]
    [torch.Size([10]), torch.Size([10])]
    """

    @takes_options(TeamOptions)
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
        workers_per_actor: int = 1,
        start_timeout: float = 300.0,
        calls: Calls | None = None,
        **options: Unpack[TeamKeywords],
    ) -> None:
        chosen = read_options(options)
        functions = list_env_functions(create_env_fn, num_collectors, chosen.splits, "num_collectors")
        workers = check_whole_number("workers_per_actor", workers_per_actor)
        configs = actor_options(remote_configs, len(functions), workers)
        check_whole_number("max_in_flight", max_in_flight)
        if sync and workers > 1:
            check_parts(frames_per_batch, chosen.trajs_per_batch, len(functions) * workers)
        check_for_actors(chosen, policy, workers)
        self._made_there = chosen.policy_factory is not None

        if calls is None:
            calls = RayCalls(ray_init_config, sum(config["num_cpus"] for config in configs) + 1)
        in_flight = max_in_flight
        if sync:
            in_flight = 1
        self._actors = transport = Actors(
            calls,
            configs,
            in_flight=in_flight,
            workers=workers,
            own=arguments_of_many(chosen, workers),
            by_reference=not sync and takes_references(chosen),
            with_signals=chosen.step_timeout is not None or chosen.preemptive_threshold is not None,
        )

        try:
            super().__init__(
                functions,
                policy,
                sync=sync,
                frames_per_batch=frames_per_batch,
                slots=max_in_flight,
                start_timeout=start_timeout,
                transport=transport,
                **options,
            )
        except BaseException:
            transport.close()
            raise

    def update_policy_weights_(self, policy_or_weights: Any = None) -> None:
        """Send weights to the actors, for windows that begin after the next batch is requested.

        Args:
            policy_or_weights: a module, its state dict, or a tensordict of its parameters, copied into the policy.
                Default: the policy's current weights.

        Raises:
            TypeError: the policy is not an ``nn.Module``, and weights are given or it uses a module; or the policy is
                created in the actors, and no weights are given.
            ValueError: the shapes of the weights have changed; nothing is copied.
            RuntimeError: their names have changed (see ``load_state_dict`` of ``nn.Module``).
        """
        self._check_open()
        if self._made_there:
            if policy_or_weights is None:
                raise TypeError("pass the weights: the policy is created in the actors, by policy_factory")
            self._publish(as_state(policy_or_weights))
            return

        if policy_or_weights not in (None, self.policy) and isinstance(self.policy, nn.Module):
            own = self.policy.state_dict()
            for name, value in as_state(policy_or_weights).items():  # check all before copying any
                if name in own and own[name].shape != value.shape:
                    raise ValueError(
                        f"weight {name!r} was shared as {dtype_name(own[name])} {list(own[name].shape)}, got "
                        f"{dtype_name(value)} {list(value.shape)}: a policy that changes its shape needs new actors"
                    )

            copy_weights(self.policy, policy_or_weights)
            policy_or_weights = None

        super().update_policy_weights_(policy_or_weights)

    def stats(self) -> dict[str, Any]:
        """Return `MultiCollector.stats` and statistics of the actors.

        Returns:
            The entries of `MultiCollector.stats`; ``rows_held``, ``windows`` and ``policy_lag`` over all actors;
            ``actors_made`` and ``actors_lost``; and ``collectors``, for each actor: its ``writer``, ``frames`` and
            ``windows``, and ``in_flight``, its windows that are being collected or wait in the object store.
        """
        stats = super().stats()
        team = self._supply.gatherer.team
        tallies = self._supply.tallies
        seen = [tally for tally in tallies if tally.lag_count]
        lag_sum = sum(tally.lag_sum for tally in seen)
        count = sum(tally.lag_count for tally in seen)

        return stats | {
            "rows_held": max(0, self.frames - self._begun_at - sum(tally.rows for tally in tallies)),
            "windows": sum(tally.windows for tally in tallies),
            "actors_made": team.started,
            "actors_lost": team.failures,
            "policy_lag": {
                "min": min((tally.lag_least or 0 for tally in seen), default=0),
                "mean": lag_sum / max(1, count),
                "max": max((tally.lag_most or 0 for tally in seen), default=0),
            },
            "collectors": [
                {
                    "writer": member.writer,
                    "frames": tallies[member.place].frames,
                    "windows": tallies[member.place].windows,
                    "in_flight": self._actors.under_way(member.link),
                }
                for member in team.members
            ],
        }

    def state_dict(self) -> dict[str, Any]:
        """Return the row count, used writer numbers and seeds, policy parameters and version.

        It does not wait for actors, and does not contain pending rows or the states of envs.
        """
        state = super().state_dict()
        return state | {"seeds_used": state.pop("seed")["n_children_spawned"]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict` with new actors, unused writer numbers and seeds."""
        self._check_open()
        used = max(state["seeds_used"], self._seed_sequence.n_children_spawned)
        seed = {"entropy": self._seed_sequence.entropy, "n_children_spawned": used}
        super().load_state_dict(state | {"seed": seed})


def check_parts(frames_per_batch: int, trajs_per_batch: int | None, workers: int) -> None:
    """Raise ValueError if a joint batch has no part for each of all workers."""
    parts = {"frames_per_batch": frames_per_batch, "trajs_per_batch": trajs_per_batch}
    for name, count in parts.items():
        if count is not None and count < workers:
            raise ValueError(
                f"{name}={count} is less than the number of workers, {workers}: with sync=True each collects a part"
            )


def check_for_actors(options: TeamOptions, policy: Any, workers: int) -> None:
    """Raise ValueError for options that actors, each of ``workers`` workers, do not support."""
    if policy is not None and options.policy_factory is not None:
        raise ValueError("pass a policy or a policy_factory, not both")
    if options.split_trajs:
        raise ValueError(
            "split_trajs=True is not supported, because actors deliver flat batches: "
            "flatroll.layout.split_trajectories(batch) pads a batch afterwards"
        )

    needs_one = {
        'on_failure="drop"': options.on_failure == "drop",
        "preemptive_threshold": options.preemptive_threshold is not None,
        'cat_results="stack"': options.cat_results != 0,
    }
    found = [name for name, is_given in needs_one.items() if is_given]
    if workers > 1 and found:
        raise ValueError(
            f"{' and '.join(found)} needs workers_per_actor=1, got {workers}: an actor cannot take over "
            'the rows of another one\'s workers, nor cut its own workers short. on_failure="replace" works'
        )


def arguments_of_many(options: TeamOptions, workers: int) -> dict[str, Any]:
    """Return arguments of the `MultiCollector` in an actor that are not those of its job."""
    own: dict[str, Any] = {"num_threads": options.num_threads}
    if workers > 1 and options.step_timeout is not None:
        own["step_timeout"] = options.step_timeout
    return own


def takes_references(options: TeamOptions) -> bool:
    """Return whether the buffer can fetch rows from the object store, where they stay as they are."""
    stays = options.storing_device is None and options.device is None
    return stays and hasattr(options.replay_buffer, "extend_reference")


def actor_options(configs: Any, count: int, cpus: int) -> list[dict[str, Any]]:
    """Return the options of ``ray.remote`` for each actor: ``cpus`` CPUs and the caller's options.

    Raises:
        ValueError: the list has a wrong length, or an option lets Ray restart actors.
    """
    if configs is None or isinstance(configs, Mapping):
        given = [configs or {}] * count
    else:
        given = list(configs)

    if len(given) != count:
        raise ValueError(
            f"remote_configs has {len(given)} entries for {count} collectors: pass one, or one for each"
        )

    for options in given:
        if options.get("max_restarts") or options.get("max_task_retries"):
            raise ValueError(
                "remote_configs must leave max_restarts and max_task_retries at 0: an actor that Ray restarts would "
                'reuse ids. on_failure="replace" starts another one with new ids'
            )

    own = ("max_restarts", "max_task_retries")
    return [
        {"num_cpus": cpus, **{name: value for name, value in options.items() if name not in own}}
        for options in given
    ]
