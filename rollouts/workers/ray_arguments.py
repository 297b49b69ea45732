"""Checks and shares out the arguments of a `RayCollector`, and joins what actors give."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tensordict import TensorDict, TensorDictBase
from torch import nn

from flatroll.layout.checks import whole_number
from flatroll.rollouts.arguments import check_counts, check_together
from flatroll.rollouts.collector import Collector

#: Arguments of `Collector` that the driver keeps to itself.
OF_DRIVER = ("replay_buffer", "progress", "storing_device")
_GIVEN_APART = {"create_env_fn", "policy", "frames_per_batch", "total_frames", "seed", "writer", *OF_DRIVER}


def env_functions(create_env_fn: Any, count: int | None) -> list[Callable[[], Any]]:
    """Return one function for each actor.

    Raises:
        TypeError: an env, or anything else that is no function.
        ValueError: ``count`` is not the length of the list.
    """
    if count is not None:
        whole_number("num_collectors", count)
    listed = isinstance(create_env_fn, Sequence)
    functions = list(create_env_fn) if listed else [create_env_fn] * (count or 1)
    for function in functions:
        if not callable(function) or (hasattr(function, "step") and not isinstance(function, type)):
            raise TypeError(
                "create_env_fn must be a function that makes an env, or a list of them: envs are made in the actors, "
                f"got {type(function).__name__}"
            )
    if not functions or (count is not None and count != len(functions)):
        raise ValueError(
            f"num_collectors={count} and {len(functions)} functions in create_env_fn: give one for each collector, or "
            "one function for all"
        )
    return functions


def actor_options(configs: Any, count: int) -> list[dict[str, Any]]:
    """Return the options of ``ray.remote`` for each actor: one CPU, and what the caller says.

    Raises:
        ValueError: as many as actors were expected; or Ray is asked to restart them.
    """
    given = [configs or {}] * count if configs is None or isinstance(configs, Mapping) else list(configs)
    if len(given) != count:
        raise ValueError(
            f"remote_configs has {len(given)} entries for {count} collectors: give one, or one for each"
        )
    for options in given:
        if options.get("max_restarts") or options.get("max_task_retries"):
            raise ValueError(
                "remote_configs must leave max_restarts and max_task_retries at 0: an actor that Ray restarts would "
                'give ids that were there before. on_failure="replace" makes another with new ones'
            )
    own = ("max_restarts", "max_task_retries")
    return [
        {"num_cpus": 1, **{name: value for name, value in options.items() if name not in own}}
        for options in given
    ]


def check_arguments(
    arguments: Mapping[str, Any], parts: int, frames_per_batch: int, total_frames: int
) -> None:
    """Refuse wrong arguments of the collectors here, before any actor is made.

    Args:
        arguments: those that are passed on.
        parts: number of actors that make a batch together.

    Raises:
        TypeError: unknown names, or no numbers.
        ValueError: values that do not go together.
    """
    known = set(inspect.signature(Collector).parameters) - _GIVEN_APART
    unknown = [name for name in arguments if name not in known]
    if unknown:
        raise TypeError(
            f"RayCollector got an unexpected argument {unknown[0]!r}: neither it nor Collector has it"
        )
    counts = {name: arguments.get(name) for name in ("trajs_per_batch", "max_frames_per_traj")}
    check_counts(
        frames_per_batch=frames_per_batch,
        total_frames=total_frames,
        init_random_frames=arguments.get("init_random_frames") or 0,
        **counts,
    )
    for name, count in (
        ("frames_per_batch", frames_per_batch),
        ("trajs_per_batch", counts["trajs_per_batch"]),
    ):
        if count is not None and count < parts:
            raise ValueError(
                f"{name}={count} is less than the {parts} collectors: with sync=True each gives its part of a batch"
            )
    if arguments.get("split_trajs"):
        raise ValueError(
            "split_trajs=True pads batches, which actors deliver flat: "
            "flatroll.layout.split_trajectories(batch) pads one afterwards"
        )
    ids = arguments.get("track_traj_ids", True)
    check_together(ids, counts["trajs_per_batch"], False, False, arguments.get("interruptor"))


def share(count: int, parts: int) -> list[int]:
    """Divide a number into equal parts, the first ones having one more where that does not go.

    >>> share(101, 3)
    [34, 34, 33]
    """
    return [count // parts + (i < count % parts) for i in range(parts)]


def on_cpu(policy: Any) -> Any:
    """The policy, or a copy on the CPU of a module that has parameters elsewhere: nodes may have no such device."""
    if isinstance(policy, nn.Module) and any(
        value.device.type != "cpu" for value in policy.state_dict().values()
    ):
        return copy.deepcopy(policy).cpu()
    return policy


def state_of(weights: Any) -> Mapping[str, Any]:
    """The state dict of weights for a policy that only the actors have; TypeError if it has none."""
    state = weights.state_dict() if isinstance(weights, nn.Module) else weights
    if isinstance(state, TensorDictBase):
        state = state.data.flatten_keys(".").to_dict()
    if not isinstance(state, Mapping):
        raise TypeError(
            f"weights must be a module, its state dict or a tensordict of it, got {type(state).__name__}"
        )
    return state


def join_batches(parts: list[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Put batches ``[n]`` with their *finals* end to end; row numbers of a final count from the first row of all."""
    batches, finals = zip(*parts, strict=True)
    if len(parts) == 1:
        return parts[0]
    joined: Any = TensorDict.cat(list(batches))
    if finals[0] is None:
        return joined, None
    before = 0
    for batch, final in parts:
        final["row"] = final["row"] + before
        before += len(batch)
    return joined, TensorDict.cat(list(finals))


__all__ = [
    "OF_DRIVER",
    "actor_options",
    "check_arguments",
    "env_functions",
    "join_batches",
    "on_cpu",
    "share",
    "state_of",
]
