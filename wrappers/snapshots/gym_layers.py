"""The state of Gymnasium's own vector envs, wrappers and envs of classic control.

The tables name the attributes that change while an env is stepped. A class that is in no table, or that derives from
one that is, may hold more, so it is not saved.
"""

import dis
from collections.abc import Sequence
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np
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

#: What such a function may read outside of itself, and the steps of its code with which it would keep something there.
_STATELESS = (
    *(ModuleType, FunctionType, BuiltinFunctionType, type(np.clip), np.ufunc, type),
    *(str, bytes, int, float, complex, type(None), np.generic),
)
_SETS_OUTSIDE = ("STORE_GLOBAL", "STORE_ATTR", "DELETE_GLOBAL", "DELETE_ATTR")

#: Attributes of envs that change, by module and class; each also has a random generator.
_ENVS: dict[tuple[str, str], tuple[str, ...]] = {
    ("acrobot", "AcrobotEnv"): ("state",),
    ("cartpole", "CartPoleEnv"): ("state", "steps_beyond_terminated"),
    ("cartpole", "CartPoleVectorEnv"): (
        "state",
        "steps",
        "prev_done",
        "steps_beyond_terminated",
        "low",  # of the states after a reset, from its options
        "high",
    ),
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

    if _is_stateless(getattr(layer, "func", None)):
        return None
    return f"{kind.__name__} calls a function that may keep a state of its own"


def _is_stateless(function: object, seen: frozenset[object] = frozenset()) -> bool:
    """Return whether a function surely keeps nothing: it sets nothing outside of itself and reads only constants there.

    So must the functions of its module that it calls (except those in ``seen``); those of other modules are trusted.
    """
    if not isinstance(function, FunctionType) or function.__closure__ or vars(function):
        return False

    codes = _codes_in(function.__code__)
    if any(step.opname in _SETS_OUTSIDE for code in codes for step in dis.get_instructions(code)):
        return False

    outside = function.__globals__
    read = [outside[name] for code in codes for name in code.co_names if name in outside]
    read += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    seen |= {function}
    for value in read:
        if isinstance(value, FunctionType) and value.__globals__ is outside:
            kept = value not in seen and not _is_stateless(value, seen)
        else:
            kept = not isinstance(value, _STATELESS)
        if kept:
            return False
    return True


def _codes_in(code: CodeType) -> list[CodeType]:
    """Return the code of a function and of those defined in it."""
    codes = [code]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            codes += _codes_in(constant)
    return codes


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
