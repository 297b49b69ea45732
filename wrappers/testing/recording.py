"""Play an environment, record all that it returns, and name what looks wrong in it without being proof."""

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from flatroll.wrappers.arrays import Tree, map_tree

#: Entries of ``info`` that say in some dialect that an episode has ended in a row.
_SAYS_DONE = ("done", "_final_obs", "_final_observation", "_final_info", "_episode")
#: At most so many numbers of an observation are looked at (images are large).
_FEATURES = 64
#: A step is a jump if it is so many times as long as the median step.
_JUMP = 4.0


@dataclass
class Record:
    """What a played env returned: NumPy copies, one entry per vector step (``obs`` has one more, the first).

    Attributes:
        mode: the declared autoreset mode.
        seeded: whether ``reset(seed=...)`` has an effect.
        obs: observations; ``obs[k + 1]`` came back from step k.
        final: ``info["final_obs"]``, or None where there was none.
        infos: the info dicts, not copied.
        returned: (what it was, the object returned, a copy made at once).
    """

    mode: AutoresetMode
    seeded: bool
    obs: list[Tree] = field(default_factory=list)
    reward: list[npt.NDArray[Any]] = field(default_factory=list)
    terminated: list[npt.NDArray[Any]] = field(default_factory=list)
    truncated: list[npt.NDArray[Any]] = field(default_factory=list)
    final: list[Tree | None] = field(default_factory=list)
    infos: list[dict[str, Any]] = field(default_factory=list)
    returned: list[tuple[str, Tree, Tree]] = field(default_factory=list)

    def ended(self) -> npt.NDArray[np.bool_]:
        """bool ``[steps, E]``: terminated or truncated."""
        ended: npt.NDArray[np.bool_] = np.stack(self.terminated) | np.stack(self.truncated)
        return ended

    def first(self) -> npt.NDArray[np.bool_]:
        """bool ``[steps + 1, E]``: ``obs[k]`` begins an episode in that row."""
        ended = self.ended()
        starts = np.zeros((len(self.obs), ended.shape[1]), np.bool_)
        starts[0] = True
        # obs[k + 1] came back from step k: SAME_STEP shows the first observation at once, NEXT_STEP one step later.
        if self.mode == AutoresetMode.SAME_STEP:
            starts[1:] = ended
        else:
            starts[2:] = ended[:-1]
        return starts

    def keep(self, name: str, tree: Tree) -> Tree:
        """Remember the returned object and give a NumPy copy of it."""
        copy = map_tree(copied, tree)
        self.returned.append((name, tree, copy))
        return copy


def play(
    env: VectorEnv[Any, Any, Any], steps: int, seed: int, actions: Callable[[int], Any] | None, seedable: bool
) -> Record:
    """Reset an adapted env with ``seed``, step it ``steps`` times, keep everything."""
    # A warning at reset(seed=...) says that the seed has no effect.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        obs, _ = env.reset(seed=seed)
    env.action_space.seed(seed)
    record = Record(AutoresetMode(env.metadata["autoreset_mode"]), seeded=seedable and not caught)
    record.obs.append(record.keep("obs", obs))
    for k in range(steps):
        action = env.action_space.sample() if actions is None else actions(k)
        obs, reward, terminated, truncated, info = env.step(action)
        record.obs.append(record.keep("obs", obs))
        for name, flag in (("reward", reward), ("terminated", terminated), ("truncated", truncated)):
            getattr(record, name).append(record.keep(name, flag))
        final = info.get("final_obs") if record.mode == AutoresetMode.SAME_STEP else None
        record.final.append(None if final is None else record.keep("info['final_obs']", final))
        record.infos.append(info)
    return record


def copied(leaf: Any) -> npt.NDArray[Any]:
    """The values of an array or tensor, in NumPy memory of their own."""
    return np.array(leaf.detach().cpu().numpy() if isinstance(leaf, Tensor) else leaf)


def same(one: Tree, other: Tree) -> bool:
    """Whether two trees hold the same values (NaN equals NaN)."""
    equal: list[bool] = []
    map_tree(lambda a, b: equal.append(bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))), one, other)
    return all(equal)


def suspicions(record: Record) -> Iterator[str]:
    """What looks like an env that hides or misnames the ends of its episodes; each text says why."""
    if not record.ended().any():
        yield f"no episode ended in {len(record.reward)} steps, so no end was checked: take more steps"
    yield from _silent_resets(record)
    yield from _unflagged_ends(record)
    yield from _one_length(record)


def _silent_resets(record: Record) -> Iterator[str]:
    """Ordinary steps that lead from outside the box of all first observations far away into it."""
    obs = np.stack([_features(tree) for tree in record.obs])
    first, ended = record.first(), record.ended()
    starts = obs[first]
    # bool [steps + 1, E]: in the box around all first observations; and how far each step leads, [steps, E]
    inside = ((obs >= starts.min(0)) & (obs <= starts.max(0))).all(-1)
    length = np.linalg.norm(np.diff(obs, axis=0), axis=-1)
    ordinary = ~ended & ~first[1:]
    if not ordinary.any():
        return
    far = length > _JUMP * np.median(length[ordinary])
    jump = ordinary & inside[1:] & ~inside[:-1] & far
    if jump.any():
        k, i = np.argwhere(jump)[0]
        yield (
            f"the observation of row {i} jumps back to a first one in step {k}, which is neither terminated "
            f"nor truncated there ({int(jump.sum())} such jumps): does the env reset without saying so?"
        )


def _features(tree: Tree) -> npt.NDArray[np.float64]:
    """About `_FEATURES` numbers of each row, evenly spaced over its leaves: ``[E, F]``."""
    leaves: list[npt.NDArray[Any]] = []
    map_tree(lambda leaf: leaves.append(leaf.reshape(len(leaf), -1)), tree)
    stride = -(-max(leaf.shape[1] for leaf in leaves) * len(leaves) // _FEATURES)
    return np.concatenate([leaf[:, ::stride].astype(np.float64) for leaf in leaves], 1)


def _unflagged_ends(record: Record) -> Iterator[str]:
    for k, (info, ended) in enumerate(zip(record.infos, record.ended(), strict=True)):
        for key in _SAYS_DONE:
            if key not in info:
                continue
            said = copied(info[key])
            if said.shape == ended.shape and (said.astype(bool) & ~ended).any():
                yield (
                    f"info[{key!r}] is set in a row of step {k} that is neither terminated nor truncated: "
                    "an end without a reason"
                )
                return


def _one_length(record: Record) -> Iterator[str]:
    elapsed = np.zeros(record.ended().shape[1], np.int64)  # steps made in each row's episode
    lengths: list[int] = []
    starts = record.first()[:-1]
    for first, terminated, truncated in zip(starts, record.terminated, record.truncated, strict=True):
        if truncated.any():
            return
        elapsed = np.where(first, 0, elapsed) + 1
        lengths += elapsed[terminated].tolist()
    if len(lengths) >= 5 and len(set(lengths)) == 1 and lengths[0] > 1:
        yield (
            f"all {len(lengths)} episodes terminated after {lengths[0]} steps, none was truncated: "
            "is a time limit reported as terminated?"
        )
