"""The scripted environments as vector envs, and the table of transitions that they must yield."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space

from flatroll.wrappers.testing.scripted import Clock, Script, ScriptedEnv, overwrite, row

Backend: TypeAlias = Literal["sync", "async", "native"]
Mode: TypeAlias = AutoresetMode | Literal["NextStep", "SameStep", "Disabled"]
FinalObs: TypeAlias = Literal["object", "dense", "absent"]
Rows: TypeAlias = npt.NDArray[np.void]

ROW = np.dtype(
    [
        *((name, "i8") for name in ("vector_step", "env", "episode", "step", "step_count")),
        ("reward", "f4"),
        *((name, "?") for name in ("terminated", "truncated", "is_init")),
    ]
)


class ScriptedVectorEnv(VectorEnv[Any, Any, Any]):
    """All envs of a script in one, in NumPy, for any autoreset mode; quick up to thousands of envs.

    It supports ``reset(options={"reset_mask": mask})`` in every mode, refuses a wrong number of actions
    and, under DISABLED, a step of an env that has ended.

    Args:
        script: the script.
        autoreset_mode: a gymnasium mode, or None for an env that declares none (and resets in the same step).
        final_obs: where SAME_STEP shows the last observation. ``"object"``, Gymnasium's object array on
            steps with an ended row; ``"dense"``, a full batch on such steps; ``"absent"``, nowhere.
        reuse_buffer: every array returned is written into again by the next call.
        record_actions: keep every action batch in ``self.actions``.

    >>> env = ScriptedVectorEnv(Script(2, lengths=[[1], [4]]), autoreset_mode="SameStep")
    >>> _ = env.reset()
    >>> obs, reward, terminated, truncated, info = env.step([0, 0])
    >>> obs.tolist(), info["final_obs"][0].tolist()
    ([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]], [0.0, 0.0, 1.0])
    """

    def __init__(
        self,
        script: Script,
        *,
        autoreset_mode: Mode | None = AutoresetMode.NEXT_STEP,
        final_obs: FinalObs = "object",
        reuse_buffer: bool = False,
        record_actions: bool = False,
    ) -> None:
        self.script, self.num_envs = script, script.num_envs
        self.single_observation_space, self.single_action_space = (
            script.observation_space,
            script.action_space,
        )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self._mode = AutoresetMode.SAME_STEP if autoreset_mode is None else AutoresetMode(autoreset_mode)
        self.metadata = {} if autoreset_mode is None else {"autoreset_mode": self._mode}
        self.actions: list[Any] = []
        self._final_obs, self._reuse, self._record = final_obs, reuse_buffer, record_actions
        self._clock = Clock(script, np.asarray)
        self._final = self._clock.observe()
        self._done = np.zeros(self.num_envs, np.bool_)
        self._buffers: tuple[Any, ...] | None = None

    def reset(
        self, *, seed: int | list[int | None] | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode everywhere, or where ``reset_mask`` says; a seed restarts the script."""
        mask = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            mask = options["reset_mask"]
        if seed is not None:
            self._clock.restart()
        self._clock.begin(mask)
        self._done = self._done & ~mask
        return self._owned((self._clock.observe(),))[0], self._info()

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """One vector step of the declared mode."""
        leaf = actions["press"] if self.script.action == "dict" else actions
        if len(leaf) != self.num_envs:
            raise ValueError(f"expected actions for {self.num_envs} envs, got {len(leaf)}")
        if self._record:
            self.actions.append(actions)
        clock, pending = self._clock, self._done
        live = ~pending  # rows that ended one step ago do not move: NEXT_STEP only resets them
        if self._mode == AutoresetMode.DISABLED and pending.any():
            raise AssertionError(f"envs {np.flatnonzero(pending).tolist()} have ended and were not reset")
        if self._mode == AutoresetMode.NEXT_STEP:
            clock.begin(pending)
        reward, terminated, truncated = clock.advance(live)
        done = terminated | truncated
        final = clock.observe()  # before SAME_STEP begins the next episodes
        self._done = done if self._mode != AutoresetMode.SAME_STEP else np.zeros_like(done)
        info = self._info()
        if self._mode == AutoresetMode.SAME_STEP:
            clock.begin(done)
            info = self._info() | self._show_final(final, done)
        obs = clock.observe()
        obs, reward, terminated, truncated = self._owned(
            (obs, reward.astype(np.float32), terminated, truncated)
        )
        return obs, reward, terminated, truncated, info

    def _info(self) -> dict[str, Any]:
        return {"t": self._clock.step.copy(), "_t": np.ones(self.num_envs, np.bool_)}

    def _show_final(self, final: Any, done: npt.NDArray[np.bool_]) -> dict[str, Any]:
        if self._final_obs == "absent" or not done.any():
            return {}
        if self._final_obs == "dense":
            self._final = overwrite(self._final, final) if self._reuse else final
            return {"final_obs": self._final, "_final_obs": done.copy()}
        rows = np.full(self.num_envs, None, dtype=object)
        for i in np.flatnonzero(done):
            rows[i] = row(final, int(i))
        return {"final_obs": rows, "_final_obs": done.copy()}

    def _owned(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The values (observation, reward, flags), or the buffers that they overwrite."""
        if not self._reuse:
            return values
        if self._buffers is None:
            flags = [np.zeros(self.num_envs, np.bool_) for _ in range(2)]
            self._buffers = (self._clock.observe(), np.zeros(self.num_envs, np.float32), *flags)
        return tuple(overwrite(self._buffers[: len(values)], values))


def make_scripted(
    script: Script,
    *,
    backend: Backend = "sync",
    autoreset_mode: Mode = AutoresetMode.NEXT_STEP,
    reuse_buffer: bool = False,
    record_actions: bool = False,
    copy: bool = True,
    shared_memory: bool = True,
) -> VectorEnv[Any, Any, Any]:
    """A gymnasium vector env that plays ``script``.

    Args:
        script: the script.
        backend: ``"sync"`` and ``"async"`` put single envs into gymnasium's vector envs (close an async
            one: it holds a process per env); ``"native"`` is a :class:`ScriptedVectorEnv`.
        autoreset_mode: any of gymnasium's three.
        reuse_buffer: the single envs (or the native env) write into the arrays they returned.
        record_actions: the envs keep their actions; read them with ``env.get_attr("actions")`` or
            ``env.actions``.
        copy: as for gymnasium's vector envs; ``copy=False`` makes the native env reuse its buffers.
        shared_memory: as for ``AsyncVectorEnv``.

    >>> env = make_scripted(Script(3), autoreset_mode="Disabled")
    >>> env.reset()[0].tolist()
    [[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [2.0, 0.0, 0.0]]
    """
    mode = AutoresetMode(autoreset_mode)
    if backend == "native":
        reuse_buffer = reuse_buffer or not copy
        return ScriptedVectorEnv(
            script, autoreset_mode=mode, reuse_buffer=reuse_buffer, record_actions=record_actions
        )
    fns: list[Callable[[], ScriptedEnv]] = [
        partial(ScriptedEnv, script, i, reuse_buffer=reuse_buffer, record_actions=record_actions)
        for i in range(script.num_envs)
    ]
    if backend == "sync":
        return SyncVectorEnv(fns, copy=copy, autoreset_mode=mode)
    gc.freeze()  # a forked worker that collects its parent's garbage (an envpool, say) dies of it
    try:
        return AsyncVectorEnv(fns, copy=copy, shared_memory=shared_memory, autoreset_mode=mode)
    finally:
        gc.unfreeze()


def expected_rows(
    script: Script,
    steps: int,
    *,
    autoreset_mode: Mode = AutoresetMode.SAME_STEP,
    max_steps: int | None = None,
) -> Rows:
    """The true transitions of ``steps`` vector steps after a first reset, in order of vector step, then env.

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
        at, episode, step = 0, 0, 0
        while at < steps:
            length, end = script.length(env, episode), script.end(env, episode)
            over, cut = step + 1 == length, step + 1 == max_steps
            terminated, truncated = over and end != "truncated", (over and end != "terminated") or cut
            reward = 100 * episode + step + 1
            table.append((at, env, episode, step, step, reward, terminated, truncated, step == 0))
            done = over or cut
            at += 2 if done and gap else 1  # the vector step after an end is no transition
            episode, step = (episode + 1, 0) if done else (episode, step + 1)
    rows = np.array(table, ROW)
    return rows[np.lexsort((rows["env"], rows["vector_step"]))]
