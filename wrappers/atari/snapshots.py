"""The state of ale-py's single envs, with the action that sticks."""

import math
from typing import Any

from flatroll.wrappers.snapshots.families import SnapshotFamily

_UNSURE = 1e-12  # the probability that an action which is to be held is not
_STICKIEST = 0.95  # above, it would take thousands of frames to be sure


def _is_atari(layer: object) -> bool:
    kind = type(layer)
    return (kind.__module__, kind.__name__) == ("ale_py.env", "AtariEnv")


def _problem(env: Any) -> str | None:
    sticks = _stickiness(env)
    if sticks > 0 and env.continuous:
        return "AtariEnv with sticky continuous actions does not tell the action that it holds"
    if sticks > _STICKIEST:
        return f"AtariEnv repeats actions with a probability above {_STICKIEST}"
    return None


def _get(env: Any) -> dict[str, Any]:
    ale = env.ale
    state = ale.cloneState(include_rng=True)
    held = None
    if _stickiness(env) > 0 and not ale.game_over():
        held = _find_held(env, state)
    return {"state": state.serialize(), "held": held, "random": env.np_random.bit_generator.state}


def _set(env: Any, snapshot: dict[str, Any]) -> None:
    ale = env.ale
    state = type(ale.cloneState())(snapshot["state"])
    held = snapshot["held"]
    if held is not None:
        ale.restoreState(state)
        _hold(env, env._action_set[held])
    ale.restoreState(state)
    env.np_random.bit_generator.state = snapshot["random"]


def _stickiness(env: Any) -> float:
    return float(env.ale.getFloat("repeat_action_probability"))


def _find_held(env: Any, state: Any) -> int:
    """Return the number of the action that a sticky frame would repeat, and leave the env as it was.

    The emulator keeps this action outside of the states that it clones. But a state contains its random generator, and
    with it which of the next frames repeat the held action. So the action is found by trial: the one with which the
    next frames are those that the env itself plays. Where several give the same frames, each will do: at the first
    frame that does not repeat it, the held action is replaced.
    """
    ale = env.ale
    frames = _trail(env, state)
    for number, action in enumerate(env._action_set):
        ale.restoreState(state)
        _hold(env, action)
        if _trail(env, state) == frames:
            ale.restoreState(state)
            _hold(env, action)
            ale.restoreState(state)
            return number
    raise RuntimeError("no action of AtariEnv gives the frames that follow: has other code set its actions?")


def _trail(env: Any, state: Any) -> list[Any]:
    """Play from a state until the held action is certainly replaced; return all rewards, states and screens."""
    ale = env.ale
    ale.restoreState(state)
    trail = []
    for _ in range(_enough_frames(env)):
        reward = ale.act(env._action_set[0])
        trail.append((reward, ale.cloneState(include_rng=True).serialize(), ale.getScreenRGB().tobytes()))
        if ale.game_over():
            break
    return trail


def _hold(env: Any, action: Any) -> None:
    """Let the emulator hold an action: play it until one frame has certainly not repeated the one before."""
    ale = env.ale
    # Without its generator: each trial draws anew, and the game does not go on.
    place = ale.cloneState()
    for _ in range(_enough_frames(env)):
        ale.restoreState(place)
        ale.act(action)


def _enough_frames(env: Any) -> int:
    return math.ceil(math.log(_UNSURE) / math.log(_stickiness(env)))


FAMILY = SnapshotFamily(
    name="ale-py's single envs", recognises=_is_atari, get=_get, set=_set, problem=_problem
)
