"""Checks and groups the arguments of a collector with several workers."""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real
from operator import index
from typing import Any

import numpy as np
from torch import nn

from flatroll.layout.checks import check_whole_number, check_writer_number
from flatroll.rollouts.arguments import check_counts, check_together
from flatroll.rollouts.collector import Collector

#: Arguments that are passed unchanged to each worker's `Collector`.
_PASSED_ON = set(inspect.signature(Collector.__init__).parameters) - {
    "self", "create_env_fn", "policy", "frames_per_batch", "total_frames", "trajs_per_batch", "init_random_frames",
    "replay_buffer", "progress", "seed", "writer", "interruptor", "device", "storing_device",
}  # fmt: skip


@dataclass(frozen=True)
class Modes:
    """How batches are made and failures handled; see the arguments of the same names."""

    sync: bool
    cat_results: Any
    preemptive_threshold: float | None
    on_failure: Any
    max_failures: int
    step_timeout: float | None
    start_timeout: float | None
    slots: int


def check_modes(modes: Modes, workers: int, frames: int, trajs: int | None, split: bool) -> None:
    """Raise ValueError or TypeError if modes contradict one another or the counts."""
    if not isinstance(modes.sync, bool):
        raise TypeError(f"sync must be True or False, got {modes.sync!r}")
    if modes.on_failure not in ("raise", "drop", "replace"):
        raise ValueError(f'on_failure must be "raise", "drop" or "replace", got {modes.on_failure!r}')

    for name, count, least in (("max_failures", modes.max_failures, 0), ("slots", modes.slots, 1)):
        if isinstance(count, bool) or not hasattr(count, "__index__") or count < least:
            raise ValueError(f"{name} must be an integer of at least {least}, got {count!r}")

    for name, seconds in (("step_timeout", modes.step_timeout), ("start_timeout", modes.start_timeout)):
        if seconds is not None and not (isinstance(seconds, Real) and seconds > 0):
            raise ValueError(f"{name} must be a positive number of seconds or None, got {seconds!r}")

    if modes.sync and frames < workers:
        raise ValueError(
            f"frames_per_batch={frames} is less than one row for each of {workers} workers: use more rows, or "
            "fewer workers"
        )
    if modes.sync and trajs is not None and trajs < workers:
        raise ValueError(
            f"trajs_per_batch={trajs} is less than one trajectory for each of {workers} workers: use more "
            "trajectories, fewer workers, or sync=False, with which each batch comes from one worker"
        )

    threshold = modes.preemptive_threshold
    if threshold is not None and not modes.sync:
        raise ValueError(
            "preemptive_threshold needs sync=True: asynchronous workers do not wait for one another"
        )
    if threshold is not None and not (isinstance(threshold, Real) and 0 < threshold <= 1):
        raise ValueError(f"preemptive_threshold must be a share of the workers in (0, 1], got {threshold!r}")
    if modes.cat_results not in (0, "stack"):
        raise ValueError(f'cat_results must be 0 or "stack", got {modes.cat_results!r}')

    if modes.cat_results == "stack":
        against = {
            "sync=False": not modes.sync,
            "preemptive_threshold": threshold is not None,
            "trajs_per_batch": trajs is not None,
            "split_trajs": split,
            'on_failure="drop"': modes.on_failure == "drop",
            f"frames_per_batch={frames} (not a multiple of {workers} workers)": bool(frames % workers),
        }

        if found := [name for name, is_given in against.items() if is_given]:
            raise ValueError(
                'cat_results="stack" needs the same number T of rows from each worker in every batch, which is not '
                f"possible with {' and '.join(found)}: change one of these arguments"
            )


def check_options(options: dict[str, Any], buffer: Any, writer: Any, last_writer: Any, **counts: Any) -> None:
    """Raise ValueError or TypeError for further arguments that a worker's `Collector` would refuse."""
    if "interruptor" in options:
        raise TypeError(
            "interruptor works only in the process that collects: use preemptive_threshold, pause() or shutdown()"
        )
    if unknown := sorted(options.keys() - _PASSED_ON):
        raise TypeError(
            f"unknown arguments {', '.join(unknown)}: of Collector's arguments, workers accept "
            f"{sorted(_PASSED_ON)}"
        )

    check_counts(**counts)
    ids = options.get("track_traj_ids", True)
    check_together(ids, counts["trajs_per_batch"], bool(options.get("split_trajs")), buffer is not None, None)
    for number in (writer, last_writer):
        check_writer_number(number)
    if not ids and writer:
        raise ValueError(f"writer={writer} needs track_traj_ids=True: it is a part of the trajectory ids")


def one_for_each(
    create_env_fn: Any, policy_factory: Any, num_workers: int | None, splits: int, name: str = "num_workers"
) -> tuple[list[Any], list[Callable[[], Any] | None]]:
    """Return the env and policy function of each worker; ``name`` is the argument that sets their number."""
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
        parts: Sequence[Any] = function if splits > 1 and isinstance(function, (list, tuple)) else [function]
        for part in parts:
            if not callable(part) or (hasattr(part, "step") and not isinstance(part, type)):
                raise TypeError(
                    "create_env_fn must be a function that makes an env, since each worker creates its own, got "
                    f"{part!r}: write lambda: gymnasium.make(...)"
                )

    factories = policy_factory
    if not isinstance(factories, (list, tuple)):
        factories = [factories] * len(functions)
    if len(factories) != len(functions):
        raise ValueError(
            f"policy_factory must be one function or one for each of {len(functions)} workers, got {len(factories)}"
        )

    for factory in factories:
        if factory is not None and not callable(factory):
            raise TypeError(f"policy_factory must be a function that makes a policy, got {factory!r}")
    return list(functions), list(factories)


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
