"""The state of ale-py's single envs, with the action that sticks."""

import math
import re
from collections.abc import Sequence
from typing import Any

from flatroll.wrappers.mersenne import find_twisters, without_twisters
from flatroll.wrappers.snapshots.families import SnapshotFamily

_UNSURE = 1e-12  # the probability that an action which is to be held is not
_STICKIEST = 0.95  # above, it would take thousands of frames to be sure
_OPEN = -1  # of a sketch: the action that is held is not known
_MOST_GUESSES = 4


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
    snapshot = _sketch(env)
    if snapshot["held"] == _OPEN:
        snapshot["held"] = _find_held(env, env.ale.cloneState(include_rng=True))
    return snapshot


def _sketch(env: Any) -> dict[str, Any]:
    """Return the state without the action that sticks, which is one of the last actions."""
    ale = env.ale
    held = None
    if _stickiness(env) > 0 and not ale.game_over():
        held = _OPEN
    state = ale.cloneState(include_rng=True).serialize()
    return {"state": state, "held": held, "random": env.np_random.bit_generator.state}


def _guesses(env: Any, sketch: dict[str, Any], actions: Sequence[int]) -> list[dict[str, Any]]:
    if sketch["held"] != _OPEN:
        return [sketch]
    known = range(len(env._action_set))
    # The frames of one step all repeat the action before it with a small probability only.
    recent = list(dict.fromkeys(action for action in actions if action in known))
    return [{**sketch, "held": held} for held in recent[:_MOST_GUESSES] or [0]]


def _check(env: Any, snapshot: dict[str, Any]) -> None:
    """Raise ValueError unless a snapshot has the form of one of this env: the emulator is given its bytes as they are.

    Apart from its generators, all states of a game have the same length, and begin with the game's checksum.
    """
    state = snapshot["state"]
    held = snapshot["held"]
    own = env.ale.cloneState(include_rng=True).serialize()
    if type(state) is not bytes or _form_of(state) != _form_of(own):
        raise ValueError("the snapshot has no state of this game's emulator")
    if held is not None and (type(held) is not int or not 0 <= held < len(env._action_set)):
        raise ValueError(f"the snapshot holds the action {held!r}, expected 0 to {len(env._action_set) - 1}")


def _form_of(state: bytes) -> tuple[int, int, bytes]:
    """Return the number of generators in a state, its length without them, and the checksum of the game in it."""
    found = find_twisters(state)
    rest = without_twisters(state, found)
    checksum = re.search(rb"[0-9a-f]{32}", rest[:128])
    return len(found), len(rest), checksum[0] if checksum else b""


def _set(env: Any, snapshot: dict[str, Any]) -> None:
    _check(env, snapshot)
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
    name="ale-py's single envs",
    recognises=_is_atari,
    get=_get,
    set=_set,
    problem=_problem,
    sketch=_sketch,
    guesses=_guesses,
)
