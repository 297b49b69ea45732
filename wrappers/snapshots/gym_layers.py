"""The state of Gymnasium's own vector envs, wrappers and envs of classic control.

The tables name the attributes that change while an env is stepped. A class that is in no table, or that derives from
one that is, may hold more, so it is not saved.
"""

from collections.abc import Sequence
from types import FunctionType
from typing import Any

from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv

from flatroll.wrappers.adapt_env import OneEnv
from flatroll.wrappers.plain_state import get_attributes, set_attributes
from flatroll.wrappers.snapshots.families import SnapshotFamily

_SYNC = ("_env_obs", "_observations", "_rewards", "_terminations", "_truncations", "_autoreset_envs")
_EPISODES = ("episode_count", "time_queue", "return_queue", "length_queue")

#: Attributes of wrappers that change, by the class's name.
_WRAPPERS: dict[str, tuple[str, ...]] = {
    "AtariPreprocessing": ("lives", "game_over", "obs_buffer"),
    "Autoreset": ("autoreset",),
    "ClipAction": (),
    "ClipReward": (),
    "DelayObservation": ("observation_queue",),
    "DtypeObservation": (),
    "FilterObservation": (),
    "FlattenObservation": (),
    "FrameStackObservation": ("obs_queue", "padding_value"),
    "GrayscaleObservation": (),
    "MaxAndSkipObservation": ("_obs_buffer",),
    "NormalizeObservation": ("obs_rms", "_update_running_mean"),
    "NormalizeReward": ("return_rms", "discounted_reward", "_update_running_mean"),
    "OrderEnforcing": ("_has_reset",),
    "PassiveEnvChecker": ("checked_reset", "checked_step"),
    "RecordEpisodeStatistics": (*_EPISODES, "episode_returns", "episode_lengths"),
    "RepeatAction": (),
    "RescaleAction": (),
    "RescaleObservation": (),
    "ReshapeObservation": (),
    "ResizeObservation": (),
    "StickyAction": ("last_action", "is_sticky_actions", "num_repeats", "repeats_taken"),
    "TimeAwareObservation": ("timesteps",),
    "TimeLimit": ("_elapsed_steps",),
    "TransformAction": (),
    "TransformObservation": (),
    "TransformReward": (),
}

#: Wrappers that call a function of the user.
_CALLERS = ("TransformAction", "TransformObservation", "TransformReward")

#: Attributes of envs that change, by module and class; each also has a random generator.
_ENVS: dict[tuple[str, str], tuple[str, ...]] = {
    ("acrobot", "AcrobotEnv"): ("state",),
    ("cartpole", "CartPoleEnv"): ("state", "steps_beyond_terminated"),
    ("cartpole", "CartPoleVectorEnv"): ("state", "steps", "prev_done", "steps_beyond_terminated"),
    ("continuous_mountain_car", "Continuous_MountainCarEnv"): ("state",),
    ("mountain_car", "MountainCarEnv"): ("state",),
    ("pendulum", "PendulumEnv"): ("state", "last_u"),
}


def _state_of_wrapper(layer: object) -> tuple[str, ...] | None:
    kind = type(layer)
    if kind.__module__.rpartition(".")[0] != "gymnasium.wrappers":
        return None
    return _WRAPPERS.get(kind.__name__)


def _state_of_env(layer: object) -> tuple[str, ...] | None:
    kind = type(layer)
    package, _, module = kind.__module__.rpartition(".")
    if package != "gymnasium.envs.classic_control":
        return None
    return _ENVS.get((module, kind.__name__))


def _get_of_wrapper(layer: object) -> Any:
    names = _state_of_wrapper(layer) or ()
    return get_attributes(layer, names)


def _problem_of_wrapper(layer: Any) -> str | None:
    """Return why a wrapper cannot be saved: the user's function in it may keep something."""
    kind = type(layer)
    if kind.__name__ not in _CALLERS:
        return None

    function = getattr(layer, "func", None)
    if isinstance(function, FunctionType) and function.__closure__ is None:
        return None
    return f"{kind.__name__} calls a function that may keep a state of its own"


def _get_of_env(layer: Any) -> Any:
    names = _state_of_env(layer) or ()
    return {
        "attributes": get_attributes(layer, names),
        "random": layer.np_random.bit_generator.state,
    }


def _set_of_env(layer: Any, snapshot: Any) -> None:
    set_attributes(layer, snapshot["attributes"])
    layer.np_random.bit_generator.state = snapshot["random"]


def _envs_of(layer: Any) -> Sequence[Any]:
    return list(layer.envs)


FAMILIES = (
    SnapshotFamily(
        name="Gymnasium's SyncVectorEnv",
        recognises=lambda layer: type(layer) in (SyncVectorEnv, OneEnv),
        get=lambda layer: get_attributes(layer, _SYNC),
        set=set_attributes,
        inner=_envs_of,
    ),
    SnapshotFamily(
        name="Gymnasium's AsyncVectorEnv",
        recognises=lambda layer: isinstance(layer, AsyncVectorEnv),
        get=lambda layer: None,
        set=lambda layer, snapshot: None,
        problem=lambda layer: "the envs of AsyncVectorEnv are in other processes (SyncVectorEnv's are not)",
    ),
    SnapshotFamily(
        name="Gymnasium's wrappers",
        recognises=lambda layer: _state_of_wrapper(layer) is not None,
        get=_get_of_wrapper,
        set=set_attributes,
        problem=_problem_of_wrapper,
    ),
    SnapshotFamily(
        name="Gymnasium's classic control",
        recognises=lambda layer: _state_of_env(layer) is not None,
        get=_get_of_env,
        set=_set_of_env,
    ),
)
