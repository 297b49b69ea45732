"""The rows that collecting from a scripted env must give, and those of a batch in the same form."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from flatroll.wrappers.testing import Script, decode, expected_rows

LENGTHS = [[3, 1, 4], [2, 5], [6]]
ENDS = [["terminated", "truncated", "both"], ["truncated", "terminated"], ["terminated"]]


def script(**arguments: Any) -> Script:
    return Script(3, **{"lengths": LENGTHS, "ends": ENDS, **arguments})


def shown(batch: TensorDict, kind: str) -> list[Any]:
    """(env, episode, step) of each row's observation, by the entry that holds it."""
    name: Any = {"dict": ("policy",), "tuple": ("observation", "0")}.get(kind, ("observation",))
    inner: Any = "float32" if kind in ("dict", "tuple") else kind
    roots, nexts = (decode(inner, batch[(*prefix, *name)]) for prefix in ((), ("next",)))
    return [tuple(a) + tuple(b) for a, b in zip(roots.tolist(), nexts.tolist(), strict=True)]


def rows_of(batch: TensorDict, kind: str = "float32") -> list[tuple[Any, ...]]:
    """Each row as (env, episode, step, its next observation, reward, flags, marks, id)."""
    for key in ("reward", "terminated", "truncated", "done"):
        assert batch["next", key].shape == (*batch.shape, 1)
    assert batch["is_init"].shape == batch["step_count"].shape == (*batch.shape, 1)
    assert torch.equal(batch["next", "step_count"], batch["step_count"] + 1)
    assert batch["collector", "traj_ids"].dtype is batch["step_count"].dtype is torch.int64
    keys: tuple[Any, ...] = (
        *(("next", name) for name in ("reward", "terminated", "truncated", "done")),
        *("is_init", "step_count", ("collector", "traj_ids")),
    )
    columns = [batch[key].reshape(-1).tolist() for key in keys]
    return [(*seen, *rest) for seen, *rest in zip(shown(batch, kind), *columns, strict=True)]


def table(script: Script, mode: Any, frames: int, batches: int, max_steps: Any = None) -> list[Any]:
    """The true rows of each batch: the stream in order of time, cut, each piece laid out env after env."""
    steps = 3 * (frames * batches // script.num_envs + 2)
    true = expected_rows(script, steps, autoreset_mode=mode, max_steps=max_steps)
    out = []
    for b in range(batches):
        piece = true[b * frames : (b + 1) * frames]
        piece = piece[np.argsort(piece["env"], kind="stable")]
        columns = ["env", "episode", "step", "reward", "terminated", "truncated", "is_init", "step_count"]
        out.append(
            [
                (i, e, t, i, e, t + 1, r, a, b, a or b, first, count, e * script.num_envs + i)
                for i, e, t, r, a, b, first, count in piece[columns].tolist()
            ]
        )
    return out
