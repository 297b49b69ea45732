"""What a collector is given: the checks that need no env, and the env itself."""

import warnings
from contextlib import ExitStack
from typing import Any

from flatroll.wrappers.markers import StepCounter, TrajId, find_wrapper


def check_counts(frames: int, total: int, trajs: int | None, random: int, max_steps: int | None) -> None:
    """Refuse counts that make no sense; warn where ``total`` is no whole number of batches."""
    counts = {
        "frames_per_batch": frames,
        "total_frames": total,
        "trajs_per_batch": trajs,
        "init_random_frames": random,
        "max_frames_per_traj": max_steps,
    }
    for name, count in counts.items():
        if isinstance(count, bool) or not (count is None or hasattr(count, "__index__")):
            raise TypeError(f"{name} must be an integer, got {count!r}")
    if frames <= 0:
        raise ValueError(f"frames_per_batch must be at least 1, got {frames}")
    if total == 0 or total < -1:
        raise ValueError(f"total_frames must be positive, or -1 for no end, got {total}")
    if trajs is not None and trajs <= 0:
        raise ValueError(f"trajs_per_batch must be at least 1 or None, got {trajs}")
    if random < 0:
        raise ValueError(f"init_random_frames must be at least 0, got {random}")
    if max_steps is not None and max_steps <= 0:
        raise ValueError(f"max_frames_per_traj must be at least 1 or None, got {max_steps}")
    if total > 0 and total % frames:
        whole = -(-total // frames) * frames
        warnings.warn(
            f"total_frames={total} is no multiple of frames_per_batch={frames}: {whole} frames will be collected",
            stacklevel=3,
        )


def check_stride(stride: int) -> None:
    """Refuse a distance between kept states that is no number of rows."""
    if isinstance(stride, bool) or not hasattr(stride, "__index__"):
        raise TypeError(f"state_stride must be an integer, got {stride!r}")
    if stride < 1:
        raise ValueError(f"state_stride must be at least 1, got {stride}")


def check_ids(ids: bool, trajs: int | None, split: bool) -> None:
    """Refuse what needs trajectory ids without them."""
    if trajs is not None and not ids:
        raise ValueError("trajs_per_batch needs track_traj_ids=True: trajectories are joined by their ids")
    if split and not ids:
        raise ValueError("split_trajs=True needs track_traj_ids=True: pieces are told apart by their ids")


def check_writer(writer: int, ids: bool, marker: TrajId | None) -> None:
    """Refuse a writer number that would not come into the ids; ``marker`` is the TrajId in the env's stack."""
    if isinstance(writer, bool) or not hasattr(writer, "__index__"):
        raise TypeError(f"writer must be an integer, got {writer!r}")
    if not writer:
        return
    if marker is not None and marker.writer != writer:
        raise ValueError(
            f"writer={writer} and a TrajId with writer={marker.writer} in the env's stack: give the TrajId "
            f"writer={writer} instead"
        )
    if marker is None and not ids:
        raise ValueError(f"writer={writer} needs track_traj_ids=True: it is a part of the trajectory ids")


def check_splitting(to_buffer: bool) -> None:
    """Warn of padding; refuse it on the way into a buffer."""
    if to_buffer:
        raise ValueError(
            "split_trajs=True cannot go with a replay_buffer: buffers hold flat rows, and their samplers find the "
            "trajectories in them. Leave split_trajs out"
        )
    warnings.warn(
        "split_trajs=True pads every trajectory to the longest of the batch and cuts them at its end; "
        "flat batches need neither (flatroll.layout.split_trajectories does it afterwards)",
        stacklevel=3,
    )


def make_env(create_env_fn: Any, max_steps: int | None, undo: ExitStack) -> Any:
    """The env, or what the function (or class) makes, with a step limit; a TypeError for anything else.

    ``undo`` closes an env that was made here; one that the caller made is the caller's to close.
    """
    env = _env(create_env_fn)
    if env is not create_env_fn and hasattr(env, "close"):
        undo.callback(env.close)
    if max_steps is None:
        return env
    if find_wrapper(env, StepCounter) is not None:
        raise ValueError(
            f"max_frames_per_traj={max_steps} and a StepCounter in the env's stack: give the StepCounter "
            "max_steps instead"
        )
    return StepCounter(env, max_steps=max_steps)


def _env(create_env_fn: Any) -> Any:
    if isinstance(create_env_fn, (list, tuple)):
        raise TypeError(
            f"create_env_fn must be one env or one function that makes it, got a list of {len(create_env_fn)}: "
            "put them into one gymnasium.vector env, or use a multi-process collector"
        )
    is_class = isinstance(create_env_fn, type)
    if not is_class and hasattr(create_env_fn, "step") and hasattr(create_env_fn, "reset"):
        return create_env_fn
    if not callable(create_env_fn):
        raise TypeError(f"create_env_fn must be an env or a function that makes one, got {create_env_fn!r}")
    return create_env_fn()
