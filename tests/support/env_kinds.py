"""Scripted envs of every kind that other software's envs were seen to be of, and the rows that each must give.

The observation of each *is*, or has an entry that is, (env, episode, step), and every other value follows from it; so a
test compares whole rows with the script. `VALID` keep the contract of `as_vector_env`, `INVALID` break it.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from flatroll.layout.keys import NestedKey
from flatroll.wrappers.testing import Script, ScriptedVectorEnv
from flatroll.wrappers.testing.script import Clock

MODES = ("NextStep", "SameStep", "Disabled")
NAN = math.nan
SCRIPT = Script(
    3,
    lengths=[[3, 1, 4], [2, 5], [6]],
    ends=[["terminated", "truncated", "both"], ["truncated", "terminated"], ["terminated"]],
)
PLACE = spaces.Box(0, 1e6, (3,), np.float32)


class Place(NamedTuple):
    """Where a sub-env is, or the row that begins there.

    Attributes:
        env, episode, step: as the observation has them.
        ended: whether the episode is over: here, or in a row's step.
        mode: the autoreset mode, in a row.
    """

    env: int
    episode: int
    step: int
    ended: bool
    mode: str = ""

    @property
    def after(self) -> "Place":
        """The place that a row leads to."""
        return self._replace(step=self.step + 1)


def place(at: Place) -> Any:
    return np.array(at[:3], np.float32)


class Told(gym.Env[Any, Any]):
    """Plays one env of `SCRIPT`; what it shows and tells are functions of the place."""

    def __init__(
        self,
        index: int,
        space: spaces.Space[Any],
        see: Callable[[Place], Any],
        tell: Callable[[Place, str], dict[str, Any]] | None = None,  # of the method, "reset" or "step"
        action_space: spaces.Space[Any] | None = None,
    ) -> None:
        self.observation_space = space
        self.action_space = spaces.Discrete(5) if action_space is None else action_space
        self.index, self.see, self.tell = index, see, tell
        self.clock = Clock(SCRIPT, np.asarray, index)

    def reset(self, *, seed: int | None = None, options: Any = None) -> Any:
        super().reset(seed=seed)
        if seed is not None:
            self.clock.restart()
        self.clock.begin(np.True_)
        return self.shown("reset", False)

    def step(self, action: Any) -> Any:
        reward, terminated, truncated = self.clock.advance(np.True_)
        obs, info = self.shown("step", bool(terminated | truncated))
        return obs, float(reward), bool(terminated), bool(truncated), info

    def shown(self, method: str, ended: bool) -> Any:
        at = Place(self.index, int(self.clock.episode), int(self.clock.step), ended)
        return self.see(at), {} if self.tell is None else self.tell(at, method)


#: An expected value of a row: a number or nested lists of numbers; None: not compared.
Value = Callable[[Place], Any]


@dataclass(frozen=True)
class EnvKind:
    """A kind of env.

    Args:
        name: of the kind.
        make: function from an autoreset mode to a new env.
        columns: the value of each column in a row.
        seen: the column that is (env, episode, step).
        modes: the modes that an env of this kind can have.
        info_keys: entries of info to store.
        warns: what a collector warns of (a regular expression).
        warns_random: what one of random actions warns of.
        shares_metadata: whether another env's mode stands in the metadata of all vector envs.
        policy: whether an actor by the spaces can play it, too.
        problem: of an invalid kind, what the contract kit says.
    """

    name: str
    make: Callable[[str], Any]
    columns: dict[NestedKey, Value]
    seen: NestedKey = "observation"
    modes: tuple[str, ...] = MODES
    info_keys: tuple[NestedKey, ...] = ()
    warns: str | None = None
    warns_random: str | None = None
    shares_metadata: bool = False
    policy: bool = True
    problem: str = ""


def sync(make: Callable[[int], gym.Env[Any, Any]], **arguments: Any) -> Callable[[str], Any]:
    """Function from a mode to a `SyncVectorEnv` of three envs; with ``processes=True`` to an `AsyncVectorEnv`."""
    kind: Any = AsyncVectorEnv if arguments.pop("processes", False) else SyncVectorEnv

    def made(mode: str) -> Any:
        fns = [lambda i=i: make(i) for i in range(SCRIPT.num_envs)]
        return kind(fns, autoreset_mode=AutoresetMode(mode), **arguments)

    return made


# --- the mode in shared metadata ----------------------------------------------------------------------------


class SharedMode(ScriptedVectorEnv):
    """Says its mode in an attribute alone; its ``metadata`` is the dict of all vector envs."""

    def __init__(self, mode: str, *, attribute: str | None = "") -> None:
        super().__init__(SCRIPT, autoreset_mode=mode, final_info=True)  # type: ignore[arg-type]
        del self.metadata
        if attribute is not None:
            self.autoreset_mode = AutoresetMode(attribute or mode)


class TwoModes(ScriptedVectorEnv):
    """Says one mode in an attribute and another in its own ``metadata``."""

    autoreset_mode = AutoresetMode.SAME_STEP


# --- entries of info ----------------------------------------------------------------------------------------


class FloatInfo(ScriptedVectorEnv):
    """Tells the step as a float, and under SAME_STEP no ``final_info``."""

    def _info(self) -> dict[str, Any]:
        return {"t": self.clock.step.astype(np.float32)}


def next_t(row: Place) -> Any:
    """Unknown where a SAME_STEP env has reset since."""
    return [NAN if row.ended and row.mode == "SameStep" else row.step + 1.0]


def tell_flags(at: Place, method: str) -> dict[str, Any]:
    """A flag as NumPy's bool; env 1 tells it in even steps only."""
    if at.env == 1 and at.step % 2:
        return {}
    return {"success": np.bool_(at.step % 4 == 2)}


def success(at: Place) -> Any:
    silent = at.env == 1 and at.step % 2
    return [not silent and at.step % 4 == 2]


def tell_steps(at: Place, method: str) -> dict[str, Any]:
    return {"made": at.step} if method == "step" else {}


# --- masks --------------------------------------------------------------------------------------------------


class Masked(NamedTuple):
    """A mask that leaves one legal action at each place, and none at the end of an episode.

    Attributes:
        space: the action space.
        shape: of the mask.
        counts: options of each choice; the mask is about combinations of them if ``combined``.
    """

    space: spaces.Space[Any]
    shape: tuple[int, ...]
    counts: tuple[int, ...]
    combined: bool = False

    def options(self, at: Place) -> list[int]:
        """The legal option of each choice."""
        return [(at.env + 2 * at.episode + at.step + k) % n for k, n in enumerate(self.counts)]

    def mask(self, at: Place) -> Any:
        if at.ended:
            return np.zeros(self.shape, np.int8)
        if self.combined:
            mask = np.zeros(self.shape, np.int8)
            mask[tuple(self.options(at))] = 1
            return mask
        parts = [np.eye(n, dtype=np.int8)[k] for k, n in zip(self.options(at), self.counts, strict=True)]
        return np.concatenate(parts).reshape(self.shape)

    def action(self, row: Place) -> Any:
        """The only legal action of a row."""
        options = np.array(self.options(row._replace(ended=False))).reshape(self.space.shape or ())
        return options.tolist()

    def told(self, row: Place) -> Any:
        """The mask that the policy saw."""
        return self.mask(row._replace(ended=False)).tolist()

    def told_after(self, row: Place) -> Any:
        return self.mask(row.after).tolist()


# Three envs: masks with as many parts as envs, and with other numbers.
MASKS = {
    "[5] of Discrete": Masked(spaces.Discrete(5), (5,), (5,)),
    "[7] of MultiDiscrete": Masked(spaces.MultiDiscrete([3, 4]), (7,), (3, 4)),
    "[4] of MultiBinary": Masked(spaces.MultiBinary(2), (4,), (2, 2)),
    "[3, 4], three parts": Masked(spaces.MultiDiscrete([4, 4, 4]), (3, 4), (4, 4, 4)),
    "[2, 4], two parts": Masked(spaces.MultiDiscrete([4, 4]), (2, 4), (4, 4)),
    "[5, 3], five parts": Masked(spaces.MultiDiscrete([3] * 5), (5, 3), (3,) * 5),
    "[3, 2] combinations": Masked(spaces.MultiDiscrete([3, 2]), (3, 2), (3, 2), combined=True),
    "[2, 5] combinations": Masked(spaces.MultiDiscrete([2, 5]), (2, 5), (2, 5), combined=True),
    "[3, 2, 4], three rows of parts": Masked(spaces.MultiDiscrete(np.full((3, 2), 4)), (3, 2, 4), (4,) * 6),
    "[2, 2, 3], two rows of parts": Masked(spaces.MultiDiscrete(np.full((2, 2), 3)), (2, 2, 3), (3,) * 4),
    "[3, 2, 2] combinations": Masked(spaces.MultiDiscrete([3, 2, 2]), (3, 2, 2), (3, 2, 2), combined=True),
    "[2, 3, 4] combinations": Masked(spaces.MultiDiscrete([2, 3, 4]), (2, 3, 4), (2, 3, 4), combined=True),
}


def in_observation(masked: Masked) -> Callable[[int], gym.Env[Any, Any]]:
    space = spaces.Dict(seen=PLACE, action_mask=spaces.Box(0, 1, masked.shape, np.int8))
    see = lambda at: {"seen": place(at), "action_mask": masked.mask(at)}  # noqa: E731
    return lambda i: Told(i, space, see, action_space=masked.space)


def in_info(masked: Masked, *, resets_too: bool = True) -> Callable[[int], gym.Env[Any, Any]]:
    def tell(at: Place, method: str) -> dict[str, Any]:
        return {"action_mask": masked.mask(at)} if resets_too or method == "step" else {}

    return lambda i: Told(i, PLACE, place, tell, masked.space)


MASK_KINDS = [
    kind
    for name, masked in MASKS.items()
    for kind in (
        EnvKind(
            f"a mask {name}, in the observation",
            sync(in_observation(masked)),
            {
                "action": masked.action,
                "action_mask": masked.told,
                ("next", "action_mask"): masked.told_after,
            },
            seen="seen",
        ),
        EnvKind(
            f"a mask {name}, in info",
            sync(in_info(masked)),
            {
                "action": masked.action,
                "action_mask": masked.told,
                ("next", "action_mask"): masked.told_after,
            },
            info_keys=("action_mask",),
            policy=False,
        ),
    )
]
FIVE = MASKS["[5] of Discrete"]


# --- spaces -------------------------------------------------------------------------------------------------


def own_bounds(index: int) -> gym.Env[Any, Any]:
    """Bounds and numbers of options that differ between the envs, and that only this env's values fill."""
    most = 10 * (index + 1)
    space = spaces.Dict(
        seen=PLACE,
        code=spaces.Discrete(most),
        level=spaces.Box(-most, most, (2,), np.float32),
        pair=spaces.MultiDiscrete([most, 2]),
    )

    def see(at: Place) -> Any:
        return {"seen": place(at), "code": np.int64(most - 1), "level": level(at), "pair": pair(at)}

    return Told(index, space, see)


def level(at: Place) -> Any:
    return np.array([-10 * (at.env + 1), at.step], np.float32)


def pair(at: Place) -> Any:
    return np.array([10 * (at.env + 1) - 1, at.step % 2])


EMPTY = spaces.Dict(seen=PLACE, none=spaces.Box(-1, 1, (0,)), flat=spaces.Box(-1, 1, (3, 0), np.float64))


def see_empty(at: Place) -> Any:
    return {"seen": place(at), "none": np.zeros(0, np.float32), "flat": np.zeros((3, 0))}


GOAL = np.array([7.0, 8.0], np.float32)  # one array for all observations, as some envs have it
CONSTANT = spaces.Dict(seen=PLACE, goal=spaces.Box(0, 9, (2,)))

NUMBERED = spaces.Dict({0: PLACE, 1: spaces.Discrete(100), 7: spaces.Dict({2: PLACE, 3: spaces.Discrete(9)})})


def see_numbered(at: Place) -> Any:
    return {0: place(at), 1: np.int64(at.step), 7: {2: place(at), 3: np.int64(at.env)}}


BOX = spaces.Box(-1, 1, (2,))


def _see_no_mask(at: Place) -> Any:
    return {"seen": place(at), "action_mask": place(at)}


def _see_nothing(at: Place) -> Any:
    return np.zeros(0, np.float32)


def _see_constant(at: Place) -> Any:
    return {"seen": place(at), "goal": GOAL}


# --- rewards of steps that only reset -----------------------------------------------------------------------


class PaysForResets(ScriptedVectorEnv):
    """Pays 5 in each row that only resets."""

    def step(self, actions: Any) -> Any:
        pending = self._done.copy()
        obs, reward, *rest = super().step(actions)
        return obs, np.where(pending, np.float32(5), reward), *rest


# --- the table ----------------------------------------------------------------------------------------------

VALID: list[EnvKind] = [
    EnvKind("a mode in shared metadata", SharedMode, {}, shares_metadata=True),
    *(
        EnvKind(
            f"final_obs without final_info ({form})",
            lambda mode, form=form: FloatInfo(SCRIPT, autoreset_mode=mode, final_obs=form),
            {"t": lambda row: [float(row.step)], ("next", "t"): next_t},
            info_keys=("t",),
        )
        for form in ("object", "dense")
    ),
    *MASK_KINDS,
    EnvKind(
        "a mask that only steps tell",
        sync(in_info(FIVE, resets_too=False)),
        {"action": lambda row: FIVE.action(row) if row.step else None},
        info_keys=("action_mask",),
        policy=False,
    ),
    EnvKind(
        "an entry called action_mask that is none",
        sync(lambda i: Told(i, spaces.Dict(seen=PLACE, action_mask=PLACE), _see_no_mask, None, BOX)),
        {"action_mask": lambda row: [1.0 * x for x in row[:3]]},
        seen="seen",
        warns_random=r"action_mask has shape \(3,\) for each env, which is no mask of Box",
    ),
    EnvKind(
        "other bounds in each env",
        sync(own_bounds, observation_mode="different"),
        {
            "code": lambda row: 10 * (row.env + 1) - 1,
            "level": lambda row: level(row).tolist(),
            ("next", "level"): lambda row: level(row.after).tolist(),
            "pair": lambda row: pair(row).tolist(),
        },
        seen="seen",
    ),
    EnvKind(
        "empty Boxes in a Dict",
        sync(lambda i: Told(i, EMPTY, see_empty)),
        {
            "none": lambda row: [],
            ("next", "none"): lambda row: [],
            "flat": lambda row: [[], [], []],
            ("next", "flat"): lambda row: [[], [], []],
        },
        seen="seen",
    ),
    EnvKind(
        "an empty Box alone",
        sync(lambda i: Told(i, spaces.Box(-1, 1, (0,)), _see_nothing, lambda at, method: {"at": place(at)})),
        {"observation": lambda row: [], ("next", "observation"): lambda row: []},
        seen="at",
        info_keys=("at",),
        policy=False,
    ),
    EnvKind(
        "infos of np.bool_",
        sync(lambda i: Told(i, PLACE, place, tell_flags)),
        {"success": success, ("next", "success"): lambda row: success(row.after)},
        info_keys=("success",),
    ),
    *(
        EnvKind(
            f"constant entries, {where}",
            sync(lambda i: Told(i, CONSTANT, _see_constant), processes=where == "processes"),
            {"goal": lambda row: [7.0, 8.0], ("next", "goal"): lambda row: [7.0, 8.0]},
            seen="seen",
        )
        for where in ("one process", "processes")
    ),
    EnvKind(
        "entries that only steps tell",
        sync(lambda i: Told(i, PLACE, place, tell_steps)),
        {"made": lambda row: [row.step], ("next", "made"): lambda row: [row.step + 1]},
        info_keys=("made",),
    ),
    EnvKind(
        "rewards of steps that only reset",
        lambda mode: PaysForResets(SCRIPT, autoreset_mode=mode),  # type: ignore[arg-type]
        {},
        modes=("NextStep",),
        warns=r"paid rewards \(the first is 5\) in steps in which it only reset",
        problem="pays a reward in row",
    ),
    EnvKind(
        "integer keys",
        sync(lambda i: Told(i, NUMBERED, see_numbered)),
        {
            "1": lambda row: row.step,
            ("next", "1"): lambda row: row.step + 1,
            ("7", "2"): lambda row: [1.0 * x for x in row[:3]],
            ("7", "3"): lambda row: row.env,
        },
        seen="0",
    ),
]

# --- envs that break the contract ---------------------------------------------------------------------------


class Spoilt(gym.vector.VectorWrapper):
    """A scripted env whose info, or observation, is spoilt in each step."""

    def __init__(self, spoil: Callable[[Any, dict[str, Any]], tuple[Any, Any]], mode: str) -> None:
        super().__init__(ScriptedVectorEnv(SCRIPT, autoreset_mode=mode, final_info=True))  # type: ignore[arg-type]
        self.spoil = spoil

    def step(self, actions: Any) -> Any:
        obs, *result, info = self.env.step(actions)
        obs, info = self.spoil(obs, info)
        return obs, *result, info


def spoilt(spoil: Callable[[Any, dict[str, Any]], tuple[Any, Any]]) -> Callable[[str], Any]:
    return lambda mode: Spoilt(spoil, mode)


def _list_of_finals(obs: Any, info: dict[str, Any]) -> Any:
    if "final_info" in info:
        info["final_info"] = np.array([{"t": 1}, None, None], dtype=object)
    return obs, info


def _short_mask(at: Place) -> Any:
    return {"seen": place(at), "action_mask": np.ones(4, np.int8)}


def _hopeless_mask(at: Place) -> Any:
    return {"seen": place(at), "action_mask": np.full(5, at.step != 1, np.int8)}


def _lacks_an_entry(at: Place) -> Any:
    return {"seen": place(at)} if at.step == 0 else {"seen": place(at), "goal": GOAL}


class OneArray(Told):
    """Writes each observation into the same array."""

    def shown(self, method: str, ended: bool) -> Any:
        obs, info = super().shown(method, ended)
        self.memory = getattr(self, "memory", np.zeros_like(obs))
        self.memory[...] = obs
        return self.memory, info


def masked_by(see: Callable[[Place], Any], options: int) -> Callable[[str], Any]:
    space = spaces.Dict(seen=PLACE, action_mask=spaces.Box(0, 1, (options,), np.int8))
    return sync(lambda i: Told(i, space, see))


def beyond_all_bounds(index: int) -> gym.Env[Any, Any]:
    env: Any = own_bounds(index)
    see = env.see
    env.see = lambda at: {**see(at), "level": level(at) * (4 if at.step == 1 else 1)}
    return env


INVALID: list[EnvKind] = [
    EnvKind(
        "no mode but that in shared metadata",
        lambda mode: SharedMode(mode, attribute=None),
        {},
        shares_metadata=True,
        problem="as_vector_env refuses the env: autoreset_mode is needed: SharedMode",
    ),
    EnvKind(
        "two modes",
        lambda mode: TwoModes(SCRIPT, autoreset_mode=mode),  # type: ignore[arg-type]
        {},
        modes=("NextStep", "Disabled"),
        problem="as_vector_env refuses the env: autoreset_mode is unclear: TwoModes.autoreset_mode is 'SameStep'",
    ),
    EnvKind(
        "final_info that is no dict",
        spoilt(_list_of_finals),
        {},
        modes=("SameStep",),
        problem="info['final_info'] must be a dict with an array for each entry, it is ndarray",
    ),
    EnvKind(
        "info that is a list",
        spoilt(lambda obs, info: (obs, [info] * 3)),
        {},
        problem="info must be a dict",
    ),
    EnvKind(
        "an entry's mask of another shape",
        spoilt(lambda obs, info: (obs, {**info, "_t": np.ones(2, np.bool_)})),
        {},
        problem="info['_t'] must be bool (3,), one flag for each env that has info['t'], it is bool (2,)",
    ),
    EnvKind(
        "a mask with too few options",
        masked_by(_short_mask, 4),
        {},
        problem="obs['action_mask'] must have 5 numbers for each env, one for each option of Discrete(5), it has 4",
    ),
    EnvKind(
        "a mask that forbids all",
        masked_by(_hopeless_mask, 5),
        {},
        problem="obs['action_mask'] allows no option in row",
    ),
    EnvKind(
        "values beyond the bounds of all envs",
        sync(beyond_all_bounds, observation_mode="different"),
        {},
        problem="obs['level'] has values outside its space",
    ),
    EnvKind(
        "an entry of the observation that only steps return",
        sync(lambda i: Told(i, CONSTANT, _lacks_an_entry)),
        {},
        problem="reset or step raised",
    ),
    EnvKind(
        "one array for all observations",
        sync(lambda i: OneArray(i, PLACE, place)),
        {},
        modes=("SameStep",),
        problem="reset or step raised ValueError: the env writes each observation into the same array",
    ),
    EnvKind(
        "keys that are one text",
        sync(
            lambda i: Told(i, spaces.Dict({0: PLACE, "0": PLACE}), lambda at: {0: place(at), "0": place(at)})
        ),
        {},
        problem="observation_space cannot be stored: ",
    ),
]


def close(env: VectorEnv[Any, Any, Any]) -> None:
    """Close an env; the processes of an AsyncVectorEnv end."""
    if not getattr(env, "closed", False):
        env.close()
