"""Checks and shares out the arguments of a `RayCollector`, and joins what actors give."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from tensordict import TensorDict
from torch import nn

from flatroll.layout.checks import whole_number


def env_functions(create_env_fn: Any, count: int | None, splits: int) -> list[Any]:
    """Return one function, or with ``splits`` a list of them, for each actor.

    Raises:
        TypeError: an env, or anything else that is no function.
        ValueError: ``count`` is not the length of the list.
    """
    if count is not None:
        whole_number("num_collectors", count)
    listed = isinstance(create_env_fn, Sequence)
    functions = list(create_env_fn) if listed else [create_env_fn] * (count or 1)
    for function in functions:
        parts = function if splits > 1 and isinstance(function, Sequence) else [function]
        for part in parts:
            if not callable(part) or (hasattr(part, "step") and not isinstance(part, type)):
                raise TypeError(
                    "create_env_fn must be a function that makes an env, or a list of them, one for each collector: "
                    f"envs are made in the actors, got {type(part).__name__}"
                )
    if not functions or (count is not None and count != len(functions)):
        raise ValueError(
            f"num_collectors={count} and {len(functions)} functions in create_env_fn: give one for each collector, or "
            "one function for all"
        )
    return functions


def actor_options(configs: Any, count: int, cpus: int) -> list[dict[str, Any]]:
    """Return the options of ``ray.remote`` for each actor: so many CPUs, and what the caller says.

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
        {"num_cpus": cpus, **{name: value for name, value in options.items() if name not in own}}
        for options in given
    ]


def check_modes(
    policy: Any, policy_factory: Any, on_failure: str, max_failures: int, workers: int, split_trajs: Any
) -> None:
    """Raise ValueError for modes that there are not, or that contradict one another."""
    if policy is not None and policy_factory is not None:
        raise ValueError("give a policy or a policy_factory, not both")
    if on_failure not in ("raise", "drop", "replace"):
        raise ValueError(f'on_failure must be "raise", "drop" or "replace", got {on_failure!r}')
    whole_number("max_failures", max_failures, 0)
    if on_failure == "drop" and workers > 1:
        raise ValueError(
            f'on_failure="drop" needs workers_per_actor=1, got {workers}: the workers of other actors cannot take over '
            'what a dropped one was to give. on_failure="replace" goes'
        )
    if split_trajs:
        raise ValueError(
            "split_trajs=True pads batches, which actors deliver flat: "
            "flatroll.layout.split_trajectories(batch) pads one afterwards"
        )


def check_parts(parts: int, **counts: int | None) -> None:
    """Raise ValueError for counts of a batch of which not each of its ``parts`` would have one."""
    for name, count in counts.items():
        if count is not None and count < parts:
            raise ValueError(
                f"{name}={count} is less than the {parts} workers: with sync=True each gives its part of a batch"
            )


def on_cpu(policy: Any) -> Any:
    """The policy, or a copy on the CPU of a module that has parameters elsewhere: nodes may have no such device."""
    if isinstance(policy, nn.Module) and any(
        value.device.type != "cpu" for value in policy.state_dict().values()
    ):
        return copy.deepcopy(policy).cpu()
    return policy


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
