"""Scripted environments whose observation *is* (env, episode, step), in NumPy.

Everything such an environment will ever return is known beforehand, so a test compares whole streams with
``expected_rows`` instead of looking for plausible numbers. One :class:`Script` says how long each episode
is and how it ends; :class:`ScriptedEnv` plays one env of it, the vector envs of the neighbouring modules
all of them at once.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from torch import Tensor

from flatroll.wrappers.arrays import map_tree

ObsKind: TypeAlias = Literal["float32", "float64", "uint8", "int64", "discrete", "dict", "tuple"]
ActionKind: TypeAlias = Literal["discrete", "box", "dict"]
End: TypeAlias = Literal["terminated", "truncated", "both"]

_ENDS: tuple[End, ...] = ("terminated", "truncated", "both")


@dataclass(frozen=True)
class Script:
    """What every environment of a scripted vector env will do.

    Args:
        num_envs: number of environments E.
        lengths: steps per episode. An int for all, one list that every env cycles through, or one list
            per env.
        ends: how episodes end, ``"terminated"``, ``"truncated"`` or ``"both"``; given as ``lengths`` is.
        obs: kind of observation. ``"float32"``, ``"float64"`` and ``"int64"`` hold (env, episode, step);
            ``"uint8"`` is a ``[3, 2, 2]`` image of them modulo 256; ``"discrete"`` is ``env*10000 +
            episode*100 + step`` (each modulo 100); ``"dict"`` nests three of these, ``"tuple"`` two.
        action: ``"discrete"`` (5 actions), ``"box"`` (float32 ``[2]`` in -1 … 1) or ``"dict"`` of both.

    Raises:
        ValueError: a length below 1, an unknown end, or a list per env of the wrong number.

    >>> script = Script(2, lengths=[[3], [2, 4]], ends=["terminated", "truncated"])
    >>> [script.length(1, episode) for episode in range(3)], script.end(0, 1)
    ([2, 4, 2], 'truncated')
    """

    num_envs: int = 2
    lengths: int | Sequence[int] | Sequence[Sequence[int]] = (3, 5, 2)
    ends: End | Sequence[End] | Sequence[Sequence[End]] = ("terminated", "truncated")
    obs: ObsKind = "float32"
    action: ActionKind = "discrete"

    def __post_init__(self) -> None:
        object.__setattr__(self, "lengths", _per_env("lengths", self.lengths, self.num_envs))
        object.__setattr__(self, "ends", _per_env("ends", self.ends, self.num_envs))
        for row in self.table("lengths"):
            if any(int(length) < 1 for length in row):
                raise ValueError(f"lengths must be at least 1, got {row}")
        for row in self.table("ends"):
            if any(end not in _ENDS for end in row):
                raise ValueError(f"ends must be among {_ENDS}, got {row}")

    def table(self, name: Literal["lengths", "ends"]) -> tuple[tuple[Any, ...], ...]:
        """``lengths`` or ``ends`` as one tuple per env."""
        rows: tuple[tuple[Any, ...], ...] = getattr(self, name)
        return rows

    def length(self, env: int, episode: int) -> int:
        """Number of steps of episode ``episode`` (from 0) of env ``env``."""
        row = self.table("lengths")[env]
        return int(row[episode % len(row)])

    def end(self, env: int, episode: int) -> End:
        """How that episode ends."""
        row: tuple[End, ...] = self.table("ends")[env]
        return row[episode % len(row)]

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The space of one env's observation."""
        box = {kind: spaces.Box(-np.inf, np.inf, (3,), kind) for kind in (np.float32, np.float64)}
        image, code = spaces.Box(0, 255, (3, 2, 2), np.uint8), spaces.Discrete(1_000_000)
        nested = spaces.Dict({"code": code, "image": image})
        table: dict[ObsKind, spaces.Space[Any]] = {
            "float32": box[np.float32],
            "float64": box[np.float64],
            "uint8": image,
            "int64": spaces.MultiDiscrete([2**20] * 3),
            "discrete": code,
            "dict": spaces.Dict({"policy": box[np.float32], "critic": nested}),
            "tuple": spaces.Tuple((box[np.float32], code)),
        }
        return table[self.obs]

    @property
    def action_space(self) -> spaces.Space[Any]:
        """The space of one env's action."""
        discrete, box = spaces.Discrete(5), spaces.Box(-1.0, 1.0, (2,), np.float32)
        both = spaces.Dict({"move": box, "press": discrete})
        return {"discrete": discrete, "box": box, "dict": both}[self.action]


def _per_env(name: str, value: Any, num_envs: int) -> tuple[tuple[Any, ...], ...]:
    if isinstance(value, int | str):
        return ((value,),) * num_envs
    items = tuple(value)
    if items and not isinstance(items[0], int | str):
        if len(items) != num_envs:
            raise ValueError(f"{name} must have one list for each of the {num_envs} envs, got {len(items)}")
        return tuple(tuple(row) for row in items)
    return (items,) * num_envs


def encode(kind: ObsKind, env: Any, episode: Any, step: Any) -> Any:
    """The observation of (env, episode, step): NumPy or torch, any leading shape.

    >>> encode("discrete", np.array([1]), np.array([2]), np.array([3]))
    array([10203])
    """
    if kind == "dict":
        code, image = encode("discrete", env, episode, step), encode("uint8", env, episode, step)
        return {"policy": encode("float32", env, episode, step), "critic": {"code": code, "image": image}}
    if kind == "tuple":
        return encode("float32", env, episode, step), encode("discrete", env, episode, step)
    if kind == "discrete":
        return (env % 100) * 10_000 + (episode % 100) * 100 + step % 100
    if isinstance(step, Tensor):
        vector = torch.stack([env, episode, step], -1)
        if kind != "uint8":
            return vector.to(getattr(torch, kind))
        # [..., 3] to an image [..., 3, 2, 2] of constant planes
        return (vector % 256).to(torch.uint8)[..., None, None].expand(*vector.shape, 2, 2).clone()
    array = np.stack([env, episode, step], -1)
    if kind == "uint8":
        return (array % 256).astype(np.uint8)[..., None, None].repeat(2, -1).repeat(2, -2)
    return array.astype(kind)


def decode(kind: ObsKind, obs: Any) -> npt.NDArray[np.int64]:
    """The (env, episode, step) of observations as int64 ``[*leading, 3]``; modulo what the kind can hold.

    >>> decode("discrete", np.array([10203])).tolist()
    [[1, 2, 3]]
    """
    if kind == "dict":
        return decode("float32", obs["policy"])
    if kind == "tuple":
        return decode("float32", obs[0])
    array = np.asarray(obs)
    if kind == "discrete":
        return np.stack([array // 10_000, array // 100 % 100, array % 100], -1).astype(np.int64)
    return (array[..., 0, 0] if kind == "uint8" else array).astype(np.int64)


def overwrite(buffer: Any, value: Any) -> Any:
    """The tree ``value``, written into the arrays of ``buffer`` as a careless env does; scalars as they are."""

    def write(old: Any, new: Any) -> Any:
        if isinstance(new, Tensor):
            return old.copy_(new)
        if not (isinstance(new, np.ndarray) and new.ndim):
            return new
        np.copyto(old, new)
        return old

    return map_tree(write, buffer, value)


def row(tree: Any, i: Any) -> Any:
    """Row ``i``, or rows ``i``, of every leaf of a batched observation.

    >>> row({"a": np.arange(4).reshape(2, 2), "b": (np.eye(2),)}, 1)
    {'a': array([2, 3]), 'b': (array([0., 1.]),)}
    """
    return map_tree(lambda leaf: leaf[i], tree)


class ScriptedEnv(gymnasium.Env[Any, Any]):
    """One env of a script. The reward of step t (from 0) of episode e is ``100 * e + t + 1``.

    ``reset(seed=...)`` starts the script again at episode 0, ``reset()`` begins the next episode.

    Args:
        script: the script.
        index: which of its envs to play.
        reuse_buffer: return the same arrays from every call and write into them in place.
        record_actions: keep every action in ``self.actions``.

    >>> env = ScriptedEnv(Script(2, lengths=2), index=1)
    >>> env.reset()[0].tolist(), env.step(0)[0].tolist()
    ([1.0, 0.0, 0.0], [1.0, 0.0, 1.0])
    """

    def __init__(
        self, script: Script, index: int = 0, *, reuse_buffer: bool = False, record_actions: bool = False
    ) -> None:
        self.script, self.index = script, index
        self.observation_space, self.action_space = script.observation_space, script.action_space
        self.actions: list[Any] = []
        self._record, self._reuse = record_actions, reuse_buffer
        self._buffer: Any = None
        self._episode, self._step = -1, 0

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self._episode = 0 if seed is not None else self._episode + 1
        self._step = 0
        return self._observe(), {"t": 0}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._record:
            self.actions.append(action)
        self._step += 1
        ended = self._step >= self.script.length(self.index, self._episode)
        end = self.script.end(self.index, self._episode)
        reward = float(100 * self._episode + self._step)
        terminated, truncated = ended and end != "truncated", ended and end != "terminated"
        return self._observe(), reward, terminated, truncated, {"t": self._step}

    def _observe(self) -> Any:
        obs = encode(self.script.obs, *(np.int64(x) for x in (self.index, self._episode, self._step)))
        if not self._reuse:
            return obs
        self._buffer = obs if self._buffer is None else overwrite(self._buffer, obs)
        return self._buffer


class Clock:
    """The (episode, step) of all envs of a script as arrays; NumPy or torch, elementwise only.

    Args:
        script: the script.
        put: makes the working arrays from NumPy ones (``np.asarray``, or a torch constructor on a device).
    """

    def __init__(self, script: Script, put: Callable[[npt.NDArray[Any]], Any]) -> None:
        self.script = script
        lengths, ends = script.table("lengths"), script.table("ends")
        # Episode k of env e is entry k % period[e] of row e of a table padded with zeros.
        codes = [[_ENDS.index(end) for end in row] for row in ends]
        self.env = put(np.arange(script.num_envs))
        self._lengths, self._length_period = (put(x) for x in _padded(lengths))
        self._ends, self._end_period = (put(x) for x in _padded(codes))
        self.restart()

    def restart(self) -> None:
        """Before the first episode of every env."""
        self.episode, self.step = self.env * 0 - 1, self.env * 0

    def begin(self, mask: Any) -> None:
        """Start the next episode where ``mask`` is True."""
        self.episode = self.episode + mask  # bool counts as 0 or 1; new arrays, so that shown ones stay
        self.step = self.step * ~mask

    def advance(self, live: Any) -> tuple[Any, Any, Any]:
        """One step where ``live`` is True: (reward as integers, terminated, truncated)."""
        self.step = self.step + live
        # Elementwise and by index only: nothing here reads a value on the host.
        ended = live & (self.step >= self._lengths[self.env, self.episode % self._length_period])
        end = self._ends[self.env, self.episode % self._end_period]
        reward = (100 * self.episode + self.step) * live
        return reward, ended & (end != _ENDS.index("truncated")), ended & (end != _ENDS.index("terminated"))

    def observe(self) -> Any:
        """The observations of all envs."""
        return encode(self.script.obs, self.env, self.episode, self.step)


def _padded(rows: Sequence[Sequence[int]]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    width = max(len(row) for row in rows)
    table = [[*row, *[0] * (width - len(row))] for row in rows]
    return np.array(table, np.int64), np.array([len(row) for row in rows], np.int64)
