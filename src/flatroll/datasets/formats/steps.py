"""What readers of files without marks of ours have in common: an episode's columns from its steps."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from tensordict import TensorDict

from flatroll.layout.export import Array, from_numpy


def episode_of(
    number: int,
    states: Mapping[str, Array],
    others: Mapping[str, Any],
    reward: Array | None,
    terminated: Array,
    truncated: Array,
) -> TensorDict:
    """Return an episode of T steps as a flat batch ``[T]`` with all markers.

    Args:
        number: of the episode in the set, its trajectory id.
        states: by dotted name, ``[T + 1, ...]``; or ``[T, ...]`` where the last next one is in no file: then it is the
            last state again, and ``("collector", "next_known")`` is False there.
        others: further columns ``[T, ...]`` by dotted name.
        reward: ``[T]``; None if there is none.
        terminated, truncated: ``[T]``.

    >>> batch = episode_of(0, {"observation": np.arange(3)}, {}, np.ones(2), np.array([0, 1]), np.zeros(2))
    >>> batch["next", "observation"], batch["next", "done"].squeeze(-1)
    (tensor([1, 2]), tensor([False,  True]))
    """
    length = len(terminated)
    flags = {
        name: np.asarray(flag).reshape(length, 1).astype(bool)
        for name, flag in (("terminated", terminated), ("truncated", truncated))
    }
    columns: dict[str, Any] = dict(others)
    unknown = [name for name, values in states.items() if len(values) == length]
    for name, values in states.items():
        columns[name] = values[:length]
        columns[f"next.{name}"] = (
            values[1:] if name not in unknown else np.concatenate([values[1:], values[-1:]])
        )
    if unknown:
        columns["collector.next_known"] = np.arange(length) < length - 1
    is_init = np.zeros((length, 1), bool)
    is_init[:1] = True
    columns |= {"is_init": is_init, "collector.traj_ids": np.full(length, number)}
    if reward is not None:
        columns["next.reward"] = np.asarray(reward, np.float32).reshape(length, 1)
    columns |= {f"next.{name}": flag for name, flag in flags.items()}
    columns["next.done"] = flags["terminated"] | flags["truncated"]
    return from_numpy(columns)
