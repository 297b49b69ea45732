"""Checks and groups the arguments of a collector with several workers."""

from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from operator import index
from typing import Any

import numpy as np
from torch import nn

from flatroll.layout.checks import check_whole_number, check_writer_number
from flatroll.rollouts.arguments import check_counts, check_together, env_function
from flatroll.rollouts.workers.options import FOR_WORKERS, Plan, TeamOptions

#: A function that makes a policy, or None.
Factory = Callable[[], Any] | None


def read_options(given: Mapping[str, Any]) -> TeamOptions:
    """Read the keyword arguments that collectors with workers share; TypeError for others."""
    if "interruptor" in given:
        raise TypeError(
            "interruptor works only in the process that collects: use preemptive_threshold, pause() or shutdown()"
        )
    if unknown := sorted(given.keys() - TeamOptions.__dataclass_fields__):
        raise TypeError(
            f"unknown arguments {', '.join(unknown)}: of Collector's arguments, workers accept "
            f"{sorted(FOR_WORKERS)}"
        )
    return TeamOptions(**given)


def check_plan(plan: Plan, writers: int) -> None:
    """Raise ValueError or TypeError if arguments contradict one another; each worker uses ``writers`` numbers."""
    options = plan.options
    check_counts(
        frames_per_batch=plan.frames_per_batch,
        total_frames=options.total_frames,
        trajs_per_batch=options.trajs_per_batch,
        init_random_frames=options.init_random_frames or 0,
    )
    check_together(options, options.trajs_per_batch, options.replay_buffer, None)

    writer = options.writer
    for number in (writer, writer + plan.workers * writers - 1):
        check_writer_number(number)
    if writer and not options.track_traj_ids:
        raise ValueError(f"writer={writer} needs track_traj_ids=True: it is a part of the trajectory ids")

    _check_failures(plan)
    _check_shares(plan)
    _check_threshold(plan)
    _check_stacking(plan)


def _check_failures(plan: Plan) -> None:
    """Check the mode, what to do about failures, and limits of time and windows."""
    options = plan.options
    if not isinstance(plan.sync, bool):
        raise TypeError(f"sync must be True or False, got {plan.sync!r}")
    if options.on_failure not in ("raise", "drop", "replace"):
        raise ValueError(f'on_failure must be "raise", "drop" or "replace", got {options.on_failure!r}')

    counts: dict[str, tuple[Any, int]] = {"max_failures": (options.max_failures, 0), "slots": (plan.slots, 1)}
    for name, (count, least) in counts.items():
        if isinstance(count, bool) or not hasattr(count, "__index__") or count < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {count!r}")

    limits: dict[str, float | None] = {
        "step_timeout": options.step_timeout,
        "start_timeout": plan.start_timeout,
    }
    for name, seconds in limits.items():
        if seconds is not None and not (isinstance(seconds, Real) and seconds > 0):
            raise ValueError(f"{name} must be a positive number of seconds or None, got {seconds!r}")


def _check_shares(plan: Plan) -> None:
    """Check that each worker has a part of a joint batch."""
    frames = plan.frames_per_batch
    trajs = plan.options.trajs_per_batch
    if plan.sync and frames < plan.workers:
        raise ValueError(
            f"frames_per_batch={frames} is less than one row for each of {plan.workers} workers: use more rows, or "
            "fewer workers"
        )
    if plan.sync and trajs is not None and trajs < plan.workers:
        raise ValueError(
            f"trajs_per_batch={trajs} is less than one trajectory for each of {plan.workers} workers: use more "
            "trajectories, fewer workers, or sync=False, with which each batch comes from one worker"
        )


def _check_threshold(plan: Plan) -> None:
    """Check the share of the workers for which a batch waits."""
    threshold = plan.options.preemptive_threshold
    if threshold is None:
        return
    if not plan.sync:
        raise ValueError(
            "preemptive_threshold needs sync=True: asynchronous workers do not wait for one another"
        )
    if not (isinstance(threshold, Real) and 0 < threshold <= 1):
        raise ValueError(f"preemptive_threshold must be a share of the workers in (0, 1], got {threshold!r}")


def _check_stacking(plan: Plan) -> None:
    """Check that batches can be stacks, if they shall be."""
    options = plan.options
    if options.cat_results not in (0, "stack"):
        raise ValueError(f'cat_results must be 0 or "stack", got {options.cat_results!r}')
    if options.cat_results != "stack":
        return

    frames = plan.frames_per_batch
    against = {
        "sync=False": not plan.sync,
        "preemptive_threshold": options.preemptive_threshold is not None,
        "trajs_per_batch": options.trajs_per_batch is not None,
        "split_trajs": options.split_trajs,
        'on_failure="drop"': options.on_failure == "drop",
        f"frames_per_batch={frames} (not a multiple of {plan.workers} workers)": frames % plan.workers,
    }

    if found := [name for name, is_given in against.items() if is_given]:
        raise ValueError(
            'cat_results="stack" needs the same number T of rows from each worker in every batch, which is not '
            f"possible with {' and '.join(found)}: change one of these arguments"
        )


def list_env_functions(
    create_env_fn: Any, num_workers: int | None, splits: int, name: str = "num_workers"
) -> list[Callable[[], Any]]:
    """Return the env function of each worker; ``name`` is the argument that sets their number."""
    functions = create_env_fn
    if num_workers is None:
        count = None
    else:
        count = check_whole_number(name, num_workers)

    if not isinstance(functions, (list, tuple)):
        functions = [functions] * (count or 1)
    if not functions:
        raise ValueError("create_env_fn must be a function or a list of functions, got an empty list")
    if count not in (None, len(functions)):
        raise ValueError(f"{name} must be the number of functions, {len(functions)}, got {num_workers}")

    for function in functions:
        parts: Sequence[Any] = [function]
        if splits > 1 and isinstance(function, (list, tuple)):
            parts = function
        for part in parts:
            if env_function(part) is None:
                raise TypeError(
                    "create_env_fn must be a function that makes an env, since each worker creates its own, got "
                    f"{part!r}: write lambda: gymnasium.make(...)"
                )

    return list(functions)


def list_factories(policy_factory: Any, workers: int) -> list[Factory]:
    """Return the policy function of each worker."""
    factories = policy_factory
    if not isinstance(factories, (list, tuple)):
        factories = [factories] * workers
    if len(factories) != workers:
        raise ValueError(
            f"policy_factory must be one function or one for each of {workers} workers, got {len(factories)}"
        )

    for factory in factories:
        if factory is not None and not callable(factory):
            raise TypeError(f"policy_factory must be a function that makes a policy, got {factory!r}")
    return list(factories)


def policy_here(policy: Any, factories: Sequence[Any], update_at_each_batch: bool, made_there: bool) -> Any:
    """Return this process's policy with the initial weights; TypeError if it has no weights but needs them."""
    if policy is None and factories[0] is not None and not made_there:
        policy = factories[0]()
    if update_at_each_batch and not isinstance(policy, nn.Module):
        raise TypeError(f"update_at_each_batch needs a policy with weights, got {type(policy).__name__}")
    return policy


def make_seeds(seed: int | None) -> np.random.SeedSequence:
    """Return the seed sequence; worker i uses child i, each replacement the next one."""
    if seed is not None and (isinstance(seed, bool) or not hasattr(seed, "__index__") or seed < 0):
        raise ValueError(f"seed must be an integer of at least 0, or None, got {seed!r}")

    if seed is None:
        entropy = None
    else:
        entropy = index(seed)
    return np.random.SeedSequence(entropy)
