"""Play a marker of one's own in the three autoreset modes and compare the columns that it makes."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AutoresetMode, VectorEnv
from torch import Tensor

from flatroll.layout.checks import check_function, check_seed, check_whole_number
from flatroll.layout.keys import REWARD, NestedKey, next_key
from flatroll.wrappers.arrays import Tree, map_tree
from flatroll.wrappers.markers import MarkerWrapper
from flatroll.wrappers.source import EnvLike, layers
from flatroll.wrappers.testing.check_env import ContractError, copied, same
from flatroll.wrappers.testing.script import End, Script, row
from flatroll.wrappers.testing.scripted_envs import make_scripted

_ENDS: list[list[End]] = [["terminated", "truncated"], ["truncated", "both"]]
_SCRIPT = Script(2, lengths=[[3, 1, 2], [4, 2]], ends=_ENDS)


def check_marker(
    wrap: Callable[[Any], VectorEnv[Any, Any, Any]],
    make_env: Callable[[AutoresetMode], EnvLike] | None = None,
    *,
    steps: int = 40,
    seed: int = 0,
) -> None:
    """Play a marker in the three autoreset modes and raise `ContractError` unless its columns are equal.

    Each mode plays the same episodes with the same actions, so each row of a column must have the same value. A fourth
    run resets the first sub-env in mid-episode with ``reset_mask``, which must change nothing for the others. Rewards
    are compared, too, since a wrapper may change them.

    Args:
        wrap: function that puts the marker, or a stack of wrappers, around an env, such as the marker's class.
        make_env: function from an autoreset mode to a new vector env in that mode, whose episodes depend on the seed
            and the actions of each sub-env alone. Default: two scripted envs, whose observation is (env, episode,
            step), float32 ``[3]``, with episodes of one to four steps.
        steps: vector steps in each mode, default 40; in each mode an episode must end in them.
        seed: seed of the env and of the random actions, default 0.

    Raises:
        ContractError: an entry of ``info`` is missing, is no array with one row per sub-env, or changes after it was
            returned; a column or the reward differs between the modes. Every problem is listed.
        TypeError: ``wrap`` returns no env with a `flatroll.wrappers.MarkerWrapper` around it.
        ValueError: the env is in another mode than asked for, plays other episodes in another mode, or ends none.

    >>> from flatroll.wrappers import StepCounter
    >>> check_marker(StepCounter)
    """
    check_function("wrap", wrap, "a function that wraps an env")
    if make_env is None:
        make_env = _make_scripted
    check_function("make_env", make_env, "a function of the autoreset mode, or None")
    check_whole_number("steps", steps)
    seed = check_seed("seed", seed)

    runs: dict[str, _Run] = {}
    for mode in AutoresetMode:
        runs[mode.value] = _Run(wrap, make_env, mode).play(steps, seed)
    problems = [f"{mode}: {text}" for mode, run in runs.items() for text in run.problems]
    if not problems:
        _need_ends(runs, steps)
        _need_same_episodes(runs)
        problems = _compare(runs)
    if not problems:
        masked = _Run(wrap, make_env, AutoresetMode.DISABLED).play(steps, seed, reset_after=steps // 2)
        problems = masked.problems
        runs = {"without a reset": runs[AutoresetMode.DISABLED.value], "after a reset of env 0": masked}
    if not problems:
        _need_same_episodes(runs, first_env=1)
        problems = _compare(runs, first_env=1)

    if problems:
        raise ContractError("the marker breaks its contract:\n" + "\n".join(f"- {text}" for text in problems))


def _make_scripted(mode: AutoresetMode) -> VectorEnv[Any, Any, Any]:
    return make_scripted(_SCRIPT, autoreset_mode=mode)


@dataclass
class _Row:
    """A transition of one sub-env."""

    episode: int
    step: int
    obs: Tree
    flags: tuple[bool, bool]  # terminated, truncated
    columns: dict[NestedKey, npt.NDArray[Any]] = field(default_factory=dict)


class _Run:
    """One run of an env with markers around it, and the rows of each sub-env."""

    def __init__(
        self,
        wrap: Callable[[Any], VectorEnv[Any, Any, Any]],
        make_env: Callable[[AutoresetMode], EnvLike],
        mode: AutoresetMode,
    ) -> None:
        env = wrap(make_env(mode))
        self.markers = [
            layer for layer in layers(env) if isinstance(layer, MarkerWrapper) and layer.is_column
        ]
        if not self.markers:
            raise TypeError(
                "wrap must return an env with a flatroll.wrappers.MarkerWrapper around it, got "
                f"{type(env).__name__}"
            )

        self.env = env
        self.stream = self.markers[0].stream
        if self.stream.same_step == (mode is AutoresetMode.NEXT_STEP):
            raise ValueError(
                f"make_env must make an env in the given autoreset mode, and for {mode} it made {self.stream!r}"
            )

        self.rows: list[list[_Row]] = [[] for _ in range(env.num_envs)]
        self.problems: list[str] = []
        # Arrays of info, and copies made at once.
        self._kept: dict[str, list[tuple[Any, npt.NDArray[Any]]]] = {}

    def play(self, steps: int, seed: int, reset_after: int | None = None) -> "_Run":
        """Step the env; after ``reset_after`` steps, reset the first sub-env alone."""
        count = self.env.num_envs
        # One list of actions for each sub-env: under NEXT_STEP a sub-env makes fewer transitions in as many steps.
        self.env.action_space.seed(seed)
        plan = [self.env.action_space.sample() for _ in range(steps)]

        made = np.zeros(count, np.int64)
        episode = np.zeros(count, np.int64)
        step = np.zeros(count, np.int64)
        try:
            obs, info = self.env.reset(seed=seed)
            now = self._read(info, "reset")
            for k in range(steps):
                if k == reset_after and count > 1 and self.stream.capabilities.partial_reset:
                    obs, info = self.env.reset(options={"reset_mask": np.arange(count) == 0})
                    now = self._read(info, "reset")

                before = map_tree(copied, obs)
                obs, reward, terminated, truncated, info = self.env.step(_take(plan, made))
                after = self._read(info, "step")
                if self.problems:
                    break

                valid = np.ones(count, bool)
                if self.stream.valid is not None:
                    valid = copied(self.stream.valid)
                paid = copied(reward)
                over = copied(terminated)
                cut = copied(truncated)

                for i in np.flatnonzero(valid):
                    columns: dict[NestedKey, npt.NDArray[Any]] = {REWARD: paid[i]}
                    for marker in self.markers:
                        if marker.describes_step:
                            columns[next_key(marker.key)] = after[marker.info_name][i]
                        else:
                            columns[marker.key] = now[marker.info_name][i]
                    flags = (bool(over[i]), bool(cut[i]))
                    self.rows[i].append(
                        _Row(int(episode[i]), int(step[i]), row(before, int(i)), flags, columns)
                    )

                ended = valid & (over | cut)
                made += valid
                episode += ended
                step = np.where(ended, 0, step + valid)
                now = after
        finally:
            self.env.close()

        self.problems += self._changed()
        return self

    def _read(self, info: dict[str, Any], method: str) -> dict[str, npt.NDArray[Any]]:
        """Return copies of the markers' entries; note those that are missing or no columns."""
        found: dict[str, npt.NDArray[Any]] = {}
        for marker in self.markers:
            name = marker.info_name
            place = f"info[{name!r}] of {type(marker).__name__}"
            if name not in info:
                self.problems.append(f"{place} is missing after {method}")
                continue

            entry = info[name]
            is_array = isinstance(entry, np.ndarray | Tensor)
            numbers = is_array and (isinstance(entry, Tensor) or entry.dtype.kind in "biuf")
            if not numbers or tuple(entry.shape[:1]) != (self.env.num_envs,):
                came = type(entry).__name__
                if is_array:
                    came = f"{entry.dtype} of shape {tuple(entry.shape)}"
                self.problems.append(
                    f"{place} must be numbers with one row for each of {self.env.num_envs} envs, and is {came} after "
                    f"{method}"
                )
                continue

            found[name] = copied(entry)
            self._kept.setdefault(name, []).append((entry, found[name]))
        return found

    def _changed(self) -> Iterator[str]:
        for name, kept in self._kept.items():
            times = sum(not same(copied(entry), copy) for entry, copy in kept)
            if times:
                yield f"info[{name!r}] changed after it was returned ({times} times): put a new array into it each time"


def _take(plan: list[Tree], at: npt.NDArray[np.int64]) -> Tree:
    """Return the batched action in which sub-env ``i`` takes its action of step ``at[i]`` of the plan."""
    return map_tree(lambda *leaves: np.stack([leaves[k][i] for i, k in enumerate(at)]), *plan)


def _need_ends(runs: dict[str, _Run], steps: int) -> None:
    """Raise ValueError if no episode ended in a run."""
    for name, run in runs.items():
        if not any(any(row.flags) for rows in run.rows for row in rows):
            raise ValueError(f"steps={steps} must be enough for an episode to end, and none did in {name}")


def _need_same_episodes(runs: dict[str, _Run], first_env: int = 0) -> None:
    """Raise ValueError if the env itself plays different episodes in two runs, from this sub-env on."""
    (first, one), *others = runs.items()
    for name, other in others:
        for i in range(first_env, len(one.rows)):
            # The runs make different numbers of transitions.
            for a, b in zip(one.rows[i], other.rows[i], strict=False):
                if a.flags != b.flags or not same(a.obs, b.obs):
                    raise ValueError(
                        "make_env must make envs whose sub-envs play the same episodes for the same seed and actions, "
                        f"and env {i} plays others ({name}) than before ({first}), from episode {a.episode}, step "
                        f"{a.step} on"
                    )


def _compare(runs: dict[str, _Run], first_env: int = 0) -> list[str]:
    """Return a text for each column that differs between runs, from this sub-env on."""
    problems = []
    some = next(iter(runs.values()))
    for key in some.rows[0][0].columns:
        different: list[str] = []
        total = 0
        for i in range(first_env, len(some.rows)):
            for each in zip(*(run.rows[i] for run in runs.values()), strict=False):
                values = [row.columns[key] for row in each]
                total += 1
                if all(same(values[0], value) for value in values[1:]):
                    continue

                end = ""
                if any(each[0].flags):
                    end = ", whose step ended the episode,"
                listed = ", ".join(
                    f"{value.tolist()} ({name})" for name, value in zip(runs, values, strict=True)
                )
                different.append(f"env {i}, episode {each[0].episode}, step {each[0].step}{end} has {listed}")
        if different:
            problems.append(f"column {key!r} differs in {len(different)} of {total} rows: {different[0]}")

    if problems:
        problems.append(
            "where self.stream.ended is True, obs and info of a step may be those of the next episode: "
            "self.stream.true_next(obs, info) and self.stream.step_info(info) are the step's own. An episode begins "
            "where self.stream.first is True, and rows in _on_reset"
        )
    return problems
