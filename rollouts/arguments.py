"""What a collector is given: the checks that need no env, and the env itself."""

import warnings
from typing import Any

from flatroll.wrappers.markers import StepCounter, find_wrapper


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


def check_ids(ids: bool, trajs: int | None, split: bool) -> None:
    """Refuse what needs trajectory ids without them."""
    if trajs is not None and not ids:
        raise ValueError("trajs_per_batch needs track_traj_ids=True: trajectories are joined by their ids")
    if split and not ids:
        raise ValueError("split_trajs=True needs track_traj_ids=True: pieces are told apart by their ids")


def check_splitting(final_to_buffer: bool) -> None:
    """Warn of padding; refuse it where final observations go along into a buffer."""
    if final_to_buffer:
        raise ValueError(
            "split_trajs=True cannot go with compact_obs=True and a replay_buffer: the final observations "
            "belong to rows of the flat batch. Leave split_trajs out"
        )
    warnings.warn(
        "split_trajs=True pads every trajectory to the longest of the batch and cuts them at its end; "
        "flat batches need neither (flatroll.layout.split_trajectories does it afterwards)",
        stacklevel=3,
    )


def make_env(create_env_fn: Any, max_steps: int | None) -> Any:
    """The env, or what the function (or class) makes, with a step limit; a TypeError for anything else."""
    env = _env(create_env_fn)
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
