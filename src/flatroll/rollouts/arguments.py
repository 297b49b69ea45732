"""Checks a collector's arguments and creates its envs."""

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import index
from typing import Any, NamedTuple, SupportsIndex, TypeAlias

import torch
from gymnasium.vector import AsyncVectorEnv
from tensordict.nn import InteractionType

from flatroll.layout.checks import as_text, check_choice, check_device, check_flags, check_usable_device
from flatroll.rollouts.options import CollectorOptions
from flatroll.wrappers.adapt_env import adapt_env, find_stream
from flatroll.wrappers.families import adapt_list
from flatroll.wrappers.gym_source import split_async
from flatroll.wrappers.markers import StepCounter, TrajId, find_wrapper
from flatroll.wrappers.source import EnvLike
from flatroll.wrappers.stream import Moves, shared_moves

#: An env, a function that makes one, or a list of them for ``splits``.
EnvSource: TypeAlias = EnvLike | Callable[[], EnvLike] | Sequence[EnvLike | Callable[[], EnvLike]]


def env_function(create_env_fn: EnvSource) -> Callable[[], Any] | None:
    """Return the function, or class, that makes the env; None if an env was given."""
    if isinstance(create_env_fn, type) or (callable(create_env_fn) and not hasattr(create_env_fn, "step")):
        return create_env_fn
    return None


def check_counts(**counts: int | None) -> None:
    """Check the counts given to a `Collector`; warn if the total is not a whole number of batches."""
    optional = {"trajs_per_batch", "max_frames_per_traj"}
    for name, count in counts.items():
        if count is None and name in optional:
            continue

        count = _integer(name, count)
        if name == "total_frames":
            if count == 0 or count < -1:
                raise ValueError(f"total_frames must be positive, or -1 for no limit, got {count}")
        elif count < (least := 0 if name == "init_random_frames" else 1):
            otherwise = " or None" if name in optional else ""
            raise ValueError(f"{name} must be at least {least}{otherwise}, got {count}")

    total = counts["total_frames"]
    frames = counts["frames_per_batch"]
    assert total is not None and frames is not None

    if total > 0 and total % frames:
        whole = -(-total // frames) * frames  # rounded up to whole batches
        warnings.warn(
            f"total_frames={total} is not a multiple of frames_per_batch={frames}: {whole} frames will be collected",
            stacklevel=3,
        )


def _integer(name: str, value: object) -> int:
    """Return an argument as an integer, which a tensor or an array of one may be; TypeError if it is none."""
    try:
        if isinstance(value, SupportsIndex) and not isinstance(value, bool):
            return index(value)
    except (TypeError, RuntimeError):  # a tensor of several numbers has __index__, too
        pass

    raise TypeError(f"{name} must be an integer, got {as_text(value)}")


@dataclass(frozen=True, kw_only=True)
class Devices:
    """The devices of the env, of the policy and of finished batches.

    Attributes:
        env: device of the env's arrays and of the columns.
        policy: device of the policy's input; None for the env's.
        storing: device of finished batches; None for the env's.
        blocking: whether to wait for copies of batches to the CPU.
    """

    env: torch.device
    policy: torch.device | None = None
    storing: torch.device | None = None
    blocking: bool = True


def make_devices(
    env: torch.device,
    device: torch.device | str | None = None,
    env_device: torch.device | str | None = None,
    policy_device: torch.device | str | None = None,
    storing_device: torch.device | str | None = None,
    no_cuda_sync: bool = False,
) -> Devices:
    """Choose a collector's devices; ``env`` is the device of the env's arrays, the rest as in `Collector`.

    Raises:
        ValueError: ``env_device`` is of another type than ``env``, or torch cannot use one of the others here.
    """
    given = {"device": device, "policy_device": policy_device, "storing_device": storing_device}
    where = {name: None if one is None else usable_device(name, one) for name, one in given.items()}
    check_flags(no_cuda_sync=no_cuda_sync)
    if env_device is not None and check_device("env_device", env_device).type != env.type:
        raise ValueError(
            f"env_device={str(env_device)!r}, but the env's arrays are on {env}: move the env, "
            "or wrap it with as_vector_env(env, framework='torch', device=...)"
        )

    policy = where["policy_device"] or where["device"]
    storing = where["storing_device"] or where["device"]
    if policy == env:
        own_policy = None
    else:
        own_policy = policy

    return Devices(
        env=env,
        policy=own_policy,
        storing=storing,
        blocking=not no_cuda_sync,
    )


def check_exploration_type(exploration_type: InteractionType | str) -> InteractionType:
    """Return how probabilistic modules choose; ValueError for a name that tensordict does not have."""
    if isinstance(exploration_type, InteractionType):
        return exploration_type
    kinds: Any = InteractionType
    return InteractionType(check_choice("exploration_type", exploration_type, [kind.value for kind in kinds]))


def check_together(options: CollectorOptions, trajs: int | None, buffer: object, interruptor: object) -> None:
    """Check arguments that depend on one another; warn about ``split_trajs``.

    Raises:
        ValueError: an option needs trajectory ids and there are none, or ``split_trajs`` with a replay buffer.
        TypeError: ``interruptor`` has no ``is_set()``.
    """
    ids = options.track_traj_ids
    split = options.split_trajs
    if interruptor is not None and not callable(getattr(interruptor, "is_set", None)):
        raise TypeError(
            "interruptor must have a method is_set(), as threading.Event and multiprocessing.Event have, got "
            f"{type(interruptor).__name__}"
        )
    if trajs is not None and not ids:
        raise ValueError("trajs_per_batch needs track_traj_ids=True: trajectories are joined by their ids")
    if split and not ids:
        raise ValueError("split_trajs=True needs track_traj_ids=True: trajectories are found by their ids")
    if options.track_envs and not ids:
        raise ValueError(
            "track_envs=True needs track_traj_ids=True: the ids tell the envs of several collectors apart"
        )
    if split and buffer is not None:
        raise ValueError(
            "split_trajs=True cannot be combined with a replay_buffer: buffers hold flat rows, and their "
            "samplers find the "
            "trajectories in them. Leave split_trajs out"
        )

    if split:
        warnings.warn(
            "split_trajs=True pads every trajectory to the longest of the batch and cuts them at its end; "
            "flat batches need neither (flatroll.layout.split_trajectories does it afterwards)",
            stacklevel=3,
        )


def check_writer(writer: int, ids: bool, marker: TrajId | None) -> None:
    """Raise ValueError if the ids would not contain ``writer``; ``marker`` is the env's own TrajId."""
    writer = _integer("writer", writer)
    if not writer:
        return
    if marker is not None and marker.writer != writer:
        raise ValueError(
            f"writer={writer} conflicts with the TrajId in the env's stack, which has writer={marker.writer}: "
            f"give that TrajId writer={writer} instead"
        )
    if marker is None and not ids:
        raise ValueError(f"writer={writer} needs track_traj_ids=True: it is a part of the trajectory ids")


def make_env(
    create_env_fn: EnvSource,
    obs_dtype: torch.dtype | None,
    device: torch.device | str | None,
    max_steps: int | None,
    undo: ExitStack,
) -> tuple[Any, bool]:
    """Return the adapted env (cast, moved to ``device``, with a step limit) and whether it was created here.

    ``undo`` closes an env that was created here; the caller closes its own.
    """
    env, made = _create_env(create_env_fn, undo)
    if obs_dtype is not None:
        env = adapt_env(env, dtype=obs_dtype)
    if device is not None and check_device("env_device", device).type != "cpu":
        env = adapt_env(env)
        stream = find_stream(env)
        if stream is not None and stream.capabilities.framework == "numpy":
            stream.move(usable_device("env_device", device))

    if max_steps is None:
        return env, made
    if find_wrapper(env, StepCounter) is not None:
        raise ValueError(
            f"max_frames_per_traj={max_steps} cannot be combined with a StepCounter in the env's stack: give "
            "the StepCounter max_steps instead"
        )
    return StepCounter(env, max_steps=index(max_steps)), made


def _create_env(create_env_fn: EnvSource, undo: ExitStack) -> tuple[Any, bool]:
    """Return the env, or what the function makes, and whether it was created here, which ``undo`` closes."""
    env: Any = create_env_fn
    made = False
    if isinstance(env, (list, tuple)):
        adapted = adapt_list(env)
        if adapted is None:
            raise TypeError(
                f"create_env_fn must be one env or one function that makes it, got a list of {len(env)}: make one "
                f"gymnasium.vector.SyncVectorEnv of them, or step parts of one pool in turn with splits={len(env)}"
            )
        env, made = adapted
        if made:
            undo.callback(env.close)

    if not isinstance(env, type) and hasattr(env, "step") and hasattr(env, "reset"):
        return env, made
    if not callable(env):
        raise TypeError(f"create_env_fn must be an env or a function that makes one, got {env!r}")

    env = env()
    if hasattr(env, "close"):
        undo.callback(env.close)
    return env, True


def usable_device(name: str, device: torch.device | str) -> torch.device:
    """Return the argument as a `torch.device`; ValueError if torch cannot use it here."""
    wanted = check_usable_device(name, device)
    if wanted.type == "meta":
        raise ValueError(f"{name}='meta' cannot be used here: tensors on it have no values")
    return wanted


class MadeEnvs(NamedTuple):
    """The env of a collector.

    Attributes:
        envs: the env, or its parts with ``splits``.
        moves: of an env that was split.
        here: whether they were created here; the caller closes its own.
    """

    envs: list[Any]
    moves: Moves | None
    here: bool


def make_envs(create_env_fn: EnvSource, options: CollectorOptions, undo: ExitStack) -> MadeEnvs:
    """Return the adapted env or its parts; ``undo`` closes those that were created here."""
    splits = options.splits

    def make(source: Any) -> tuple[Any, bool]:
        return make_env(source, options.obs_dtype, options.env_device, options.max_frames_per_traj, undo)

    if splits == 1:
        env, here = make(create_env_fn)
        return MadeEnvs([env], None, here)

    if isinstance(create_env_fn, (list, tuple)):
        if len(create_env_fn) != splits:
            raise ValueError(
                f"splits={splits} needs a list of {splits} envs or functions, got a list of {len(create_env_fn)}"
            )

        parts = [make(one) for one in create_env_fn]
        here = all(made for _, made in parts)
        if any(made for _, made in parts) != here:
            raise TypeError("create_env_fn must be a list of envs or a list of functions, got some of each")
        return MadeEnvs([env for env, _ in parts], None, here)

    whole, here = make_env(create_env_fn, None, None, None, undo)
    if not isinstance(whole, AsyncVectorEnv):
        raise ValueError(
            f"splits={splits} can divide only a gymnasium.vector.AsyncVectorEnv, got "
            f"{type(whole).__name__}: pass a list of {splits} envs (the parts of a pool) or of functions "
            "that make them"
        )
    if splits > whole.num_envs:
        raise ValueError(f"splits={splits} needs at least {splits} envs, got {whole.num_envs}")

    moves = shared_moves(whole)
    return MadeEnvs([make(part)[0] for part in split_async(whole, splits)], moves, here)
