"""`EnvFacts`: what a runner must know of its env before it knows its policy."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gymnasium.vector import VectorObservationWrapper, VectorRewardWrapper

from flatroll.layout.checks import check_key_names
from flatroll.layout.keys import NestedKey
from flatroll.layout.spaces import find_part
from flatroll.rollouts.arguments import check_writer
from flatroll.rollouts.batch_columns import ColumnKeys
from flatroll.wrappers.adapt_env import adapt_env, find_stream
from flatroll.wrappers.compact import CompactObs
from flatroll.wrappers.markers import (
    InitTracker,
    MarkerWrapper,
    RecurrentPrimer,
    RewardSum,
    StepCounter,
    TrajId,
    find_wrapper,
)
from flatroll.wrappers.source import EnvLike, layers
from flatroll.wrappers.stream import VectorStream

#: If a step has at most this many bytes of observations, all next observations are written, not only those of
#: ended rows.
_FEW_BYTES = 1 << 17

#: Markers that keep no reference to the arrays of a step.
_KEEP_NOTHING = (InitTracker, StepCounter, TrajId, RewardSum, CompactObs, RecurrentPrimer)

#: Layers that pass actions on unchanged.
_PASS_ACTIONS = (VectorStream, MarkerWrapper, VectorObservationWrapper, VectorRewardWrapper)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvFacts:
    """What an env's stack of wrappers tells; made by `read_env`.

    Attributes:
        env: the stack, with InitTracker and TrajId.
        stream: the adapted env in it.
        num_envs: E, the rows of a step.
        device: of the env's arrays.
        on_host: whether they are NumPy's.
        keys: of the env's columns; a runner adds those of its policy.
        passes_actions: whether the env receives actions as they were chosen; a wrapper in between may change them.
        lends: whether no layer keeps the arrays of a step, as unknown wrappers may.
        whole_finals: whether the env gives the true next observation of every row, in arrays that may be kept.
        dense_finals: whether to record the true next observations of all rows in columns of their own. (A SAME_STEP
            env returns the reset observation in an ended row, and the final one separately. For small observations
            writing all rows is as fast as finding the ended ones, which on a device would sync.)
        shows_lost_rewards: whether a reward in a step that only resets means that the env has paid it.
    """

    env: Any
    stream: VectorStream
    num_envs: int
    device: torch.device
    on_host: bool
    keys: ColumnKeys
    passes_actions: bool
    lends: bool
    whole_finals: bool
    dense_finals: bool
    shows_lost_rewards: bool

    @property
    def asks_compact(self) -> bool:
        """Whether the stack has a CompactObs."""
        return find_wrapper(self.env, CompactObs) is not None


def read_env(
    env: EnvLike,  # anything as_vector_env takes, or a stack of wrappers
    info_keys: Sequence[NestedKey] = (),  # stored entries: key before the step, ("next", key) after it
    track_traj_ids: bool = True,
    writer: int = 0,  # makes ids unique among the writers of a buffer
) -> EnvFacts:
    """Adapt an env, add InitTracker and TrajId if they are missing, and read what its stack tells."""
    info_keys = check_key_names("info_keys", info_keys)
    stack = _add_markers(env, track_traj_ids, writer)
    stream = find_stream(stack)
    assert stream is not None

    keys = ColumnKeys(stack, info_keys)
    can = stream.capabilities
    on_host = can.framework == "numpy"
    wrappers = list(layers(stack))
    lends = all(type(layer) in (VectorStream, *_KEEP_NOTHING) for layer in wrappers)

    whole_finals = lends and stream.whole_finals
    leaves: Any = [find_part(stack.observation_space, path) for path in keys.obs_paths]
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    few = whole_finals and size <= _FEW_BYTES

    # Under SAME_STEP no step only resets. A wrapper may add a constant to all rewards; an async pool's window has cells
    # without values. On a device the question would sync once a batch.
    shifts = any(isinstance(layer, VectorRewardWrapper) for layer in (*wrappers, *layers(stream.source.env)))
    has_resets = not stream.same_step and can.batch_size is None
    shows_lost_rewards = has_resets and not shifts and can.device.type == "cpu"

    return EnvFacts(
        env=stack,
        stream=stream,
        num_envs=stack.num_envs,
        device=can.device,
        on_host=on_host,
        keys=keys,
        passes_actions=all(isinstance(layer, _PASS_ACTIONS) for layer in wrappers),
        lends=lends,
        whole_finals=whole_finals,
        dense_finals=stream.same_step and (not on_host or few),
        shows_lost_rewards=shows_lost_rewards,
    )


def _add_markers(env: EnvLike, track_traj_ids: bool, writer: int) -> Any:
    """Return the adapted env with InitTracker and, with ``track_traj_ids``, TrajId."""
    env = adapt_env(env)
    if find_wrapper(env, InitTracker) is None:
        env = InitTracker(env)

    marker = find_wrapper(env, TrajId)
    check_writer(writer, track_traj_ids, marker)
    if track_traj_ids and marker is None:
        env = TrajId(env, writer=writer)
    return env


def check_overlaps(facts: EnvFacts) -> None:
    """Raise ValueError if steps of the env cannot be started and awaited separately."""
    base = facts.stream.source.env
    if not facts.stream.capabilities.overlaps:
        raise ValueError(
            "splits= needs envs whose steps can be started and awaited separately (AsyncVectorEnv, envpool "
            "in sync mode), "
            f"without gymnasium's wrappers around them, got {base}: put wrappers around the single envs"
        )

    if not facts.passes_actions:
        raise ValueError(
            f"splits= sends the actions straight to {base}, and a wrapper in its stack may change them: put it "
            "around the single envs"
        )
