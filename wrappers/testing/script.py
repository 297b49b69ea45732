"""`Script`: the plan that scripted environments follow, and the table of transitions that it must yield.

The observation of a scripted environment *is* (env, episode, step), so all its outputs are known in advance and a
test compares whole streams with `expected_rows`. `Script` sets the length and end of each episode, `Clock` plays it
in NumPy or torch, and the environments of ``scripted_envs`` wrap it in the interfaces of several libraries.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from flatroll.layout.checks import check_type, check_whole_number
from flatroll.wrappers.arrays import Array, Tree, map_tree
from flatroll.wrappers.plain_state import copy_plain

ObsKind: TypeAlias = Literal["float32", "float64", "uint8", "int64", "discrete", "dict", "tuple"]
ActionKind: TypeAlias = Literal["discrete", "box", "dict"]
End: TypeAlias = Literal["terminated", "truncated", "both"]
Mode: TypeAlias = AutoresetMode | Literal["NextStep", "SameStep", "Disabled"]
RowTable: TypeAlias = npt.NDArray[np.void]

_ENDS: tuple[End, ...] = ("terminated", "truncated", "both")
#: The fields of `expected_rows`.
_ROW = np.dtype(
    [
        *((name, "i8") for name in ("vector_step", "env", "episode", "step", "step_count")),
        ("reward", "f4"),
        *((name, "?") for name in ("terminated", "truncated", "is_init")),
    ]
)


@dataclass(frozen=True)
class Script:
    """The plan of a scripted vector env: number of envs, episode lengths, kinds of ends, spaces.

    Args:
        num_envs: number of environments E.
        lengths: steps per episode. An int for all, one list that every env cycles through, or one list per env.
        ends: how episodes end, ``"terminated"``, ``"truncated"`` or ``"both"``; one, or lists as for ``lengths``.
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
        check_whole_number("num_envs", self.num_envs)
        for name in ("lengths", "ends"):
            value = getattr(self, name)
            check_type(name, value, (int, str, Sequence), "one value, a list of them, or one list per env")
            rows: tuple[Any, ...] = (value,) if isinstance(value, int | str) else tuple(value)
            if not rows or isinstance(rows[0], int | str):  # one list for all envs
                rows = (rows,) * self.num_envs
            elif len(rows) != self.num_envs:
                raise ValueError(
                    f"{name} must have one list for each of the {self.num_envs} envs, got {len(rows)}"
                )
            object.__setattr__(self, name, tuple(map(tuple, rows)))

        for row in self.table("lengths"):
            for length in row:
                check_whole_number("lengths", length)
        for row in self.table("ends"):
            if any(end not in _ENDS for end in row):
                raise ValueError(f"ends must be among {_ENDS}, got {row}")

    def table(self, name: Literal["lengths", "ends"]) -> tuple[tuple[Any, ...], ...]:
        """Return ``lengths`` or ``ends`` as one tuple per env."""
        rows: tuple[tuple[Any, ...], ...] = getattr(self, name)
        return rows

    def length(self, env: int, episode: int) -> int:
        """Return the number of steps of episode ``episode`` (from 0) of env ``env``."""
        row = self.table("lengths")[env]
        return int(row[episode % len(row)])

    def end(self, env: int, episode: int) -> End:
        """Return how that episode ends."""
        row: tuple[End, ...] = self.table("ends")[env]
        return row[episode % len(row)]

    @property
    def observation_space(self) -> spaces.Space[Any]:
        """The space of one env's observation."""
        image = spaces.Box(0, 255, (3, 2, 2), np.uint8)
        code = spaces.Discrete(1_000_000)
        vector = spaces.Box(-np.inf, np.inf, (3,), np.float32)
        nested = spaces.Dict({"code": code, "image": image})
        table: dict[ObsKind, spaces.Space[Any]] = {
            "float32": vector,
            "float64": spaces.Box(-np.inf, np.inf, (3,), np.float64),
            "uint8": image,
            "int64": spaces.MultiDiscrete([2**20] * 3),
            "discrete": code,
            "dict": spaces.Dict({"policy": vector, "critic": nested}),
            "tuple": spaces.Tuple((vector, code)),
        }
        return table[self.obs]

    @property
    def action_space(self) -> spaces.Space[Any]:
        """The space of one env's action."""
        discrete = spaces.Discrete(5)
        box = spaces.Box(-1.0, 1.0, (2,), np.float32)
        both = spaces.Dict({"move": box, "press": discrete})
        return {"discrete": discrete, "box": box, "dict": both}[self.action]


def encode(kind: ObsKind, env: Array, episode: Array, step: Array) -> Any:
    """Encode (env, episode, step) as an observation: NumPy or torch, any leading shape.

    >>> encode("discrete", np.array([1]), np.array([2]), np.array([3]))
    array([10203])
    """
    if kind == "dict":
        code = encode("discrete", env, episode, step)
        image = encode("uint8", env, episode, step)
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


def decode(kind: ObsKind, obs: Tree) -> npt.NDArray[np.int64]:
    """Decode observations to (env, episode, step), int64 ``[*leading, 3]``, modulo the dtype's range.

    >>> decode("discrete", np.array([10203])).tolist()
    [[1, 2, 3]]
    """
    if kind == "dict":
        return decode("float32", obs["policy"])
    if kind == "tuple":
        return decode("float32", obs[0])

    array = np.asarray(obs)
    if kind == "discrete":
        # The digits of env * 10,000 + episode * 100 + step.
        return np.stack([array // 10_000, array // 100 % 100, array % 100], -1).astype(np.int64)

    if kind == "uint8":
        array = array[..., 0, 0]
    return array.astype(np.int64)


class Clock:
    """The (episode, step) of all envs of a script, ``[E]``, or of one of them; NumPy or torch, elementwise only."""

    def __init__(
        self,
        script: Script,
        # Converts the NumPy working arrays, for example moves them to a device.
        put: Callable[[npt.NDArray[Any]], Any],
        index: int | None = None,  # the env to play; None plays all
        reuse: bool = False,  # return every observation in the same memory, as some envs do
    ) -> None:
        self.obs: ObsKind = script.obs
        self._reuse = reuse
        self._shown = None
        if index is None:
            self.env = put(np.arange(script.num_envs))
        else:
            self.env = put(np.array(index))

        codes = [[_ENDS.index(end) for end in row] for row in script.table("ends")]
        # Episode k of env e is entry k % period[e] of row e of a table [E, longest row] padded with zeros.
        tables: list[Any] = []
        for rows in (script.table("lengths"), codes):
            width = max(map(len, rows))
            tables.append(put(np.array([[*row, *[0] * (width - len(row))] for row in rows])))
            tables.append(put(np.array([len(row) for row in rows]))[self.env])
        self._lengths, self._length_period, self._ends, self._end_period = tables

        self.restart()

    def restart(self) -> None:
        """Reset the counters to before the first episode of every env."""
        self.episode = self.env * 0 - 1
        self.step = self.env * 0

    def get_snapshot(self) -> dict[str, Any]:
        """Return the counters."""
        counters: dict[str, Any] = copy_plain({"episode": self.episode, "step": self.step})
        return counters

    def set_snapshot(self, snapshot: dict[str, Any]) -> None:
        """Restore the counters."""
        device = None
        if isinstance(self.env, Tensor):
            device = self.env.device
        counters = copy_plain(snapshot, device)
        self.episode = counters["episode"]
        self.step = counters["step"]

    def begin(self, mask: Array) -> None:
        """Start the next episode where ``mask`` is True."""
        self.episode = self.episode + mask  # a new array: the caller keeps the old one
        self.step = self.step * ~mask

    def advance(self, live: Array) -> tuple[Any, Any, Any]:
        """Make one step where ``live`` is True; return (integer reward, terminated, truncated)."""
        self.step = self.step + live
        # Elementwise operations and indexing only: nothing reads a value on the host.
        ended = live & (self.step >= self._lengths[self.env, self.episode % self._length_period])
        end = self._ends[self.env, self.episode % self._end_period]
        reward = (100 * self.episode + self.step) * live
        return reward, ended & (end != _ENDS.index("truncated")), ended & (end != _ENDS.index("terminated"))

    def observe(self) -> Any:
        """Return the observations of all envs in new memory."""
        return encode(self.obs, self.env, self.episode, self.step)

    def show(self) -> Any:
        """Return the observations of all envs; with ``reuse``, in the arrays of the last call."""
        obs = self.observe()
        if self._reuse:
            obs = overwrite(self._shown, obs)
        self._shown = obs
        return obs


def overwrite(buffer: Tree, value: Tree) -> Tree:
    """Write the tree ``value`` into the arrays of ``buffer``, as a careless env does, and return them."""

    def write(old: Array, new: Array) -> Array:
        if old is None or not (isinstance(new, np.ndarray | Tensor) and new.ndim):
            return new
        old[...] = new
        return old

    return map_tree(write, buffer, value)


def row(tree: Tree, i: Array | int) -> Tree:
    """Return sub-env ``i`` (or several) of every leaf of a batched observation."""
    return map_tree(lambda leaf: leaf[i], tree)


def expected_rows(
    script: Script,
    steps: int,
    *,
    autoreset_mode: Mode = AutoresetMode.SAME_STEP,
    max_steps: int | None = None,
) -> RowTable:
    """Return the true transitions of ``steps`` vector steps after a first reset, in order of vector step, then env.

    Each row leads from (env, episode, step) to (env, episode, step + 1). Under NEXT_STEP the vector step
    after an episode's end only resets that env and is no transition.

    Args:
        script: the script.
        steps: number of vector steps.
        autoreset_mode: a gymnasium mode; DISABLED means that ended envs are reset right after the step.
        max_steps: truncate episodes at this many steps, as ``StepCounter(max_steps)`` does.

    Returns:
        A structured array with the fields vector_step, env, episode, step, reward, terminated, truncated,
        is_init and step_count (of the observation acted on).

    >>> rows = expected_rows(Script(1, lengths=2), 4, autoreset_mode="NextStep")
    >>> rows[["vector_step", "episode", "step"]].tolist()
    [(0, 0, 0), (1, 0, 1), (3, 1, 0)]
    """
    gap = AutoresetMode(autoreset_mode) == AutoresetMode.NEXT_STEP
    table: list[tuple[Any, ...]] = []
    for env in range(script.num_envs):
        at = 0
        episode = 0
        step = 0
        while at < steps:
            length = script.length(env, episode)
            end = script.end(env, episode)
            over = step + 1 == length
            cut = step + 1 == max_steps
            terminated = over and end != "truncated"
            truncated = (over and end != "terminated") or cut
            reward = 100 * episode + step + 1  # as in `Clock.advance`
            table.append((at, env, episode, step, step, reward, terminated, truncated, step == 0))

            at += 1
            step += 1
            if over or cut:
                episode += 1
                step = 0
                if gap:  # the vector step after an end is not a transition
                    at += 1

    rows = np.array(table, _ROW)
    # lexsort's last key is the primary one: vector step, then env.
    return rows[np.lexsort((rows["env"], rows["vector_step"]))]
