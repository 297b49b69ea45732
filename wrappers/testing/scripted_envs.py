"""Scripted environments with the interfaces of Gymnasium, torch simulators and rsl_rl.

The torch envs behave like GPU simulators: duck-typed, reused buffers, SAME_STEP. Their steps are elementwise tensor
code, so they also run on ``device="meta"``, where reading a value on the host raises. That tests "no host sync"
without a GPU.
"""

import gc
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal, TypeAlias

import gymnasium
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout.checks import check_choice, check_flags, check_type
from flatroll.wrappers.arrays import Tree, map_tree, select
from flatroll.wrappers.source import Info, Seed
from flatroll.wrappers.testing.script import Clock, Mode, Script, overwrite, row

Backend: TypeAlias = Literal["sync", "async", "native"]
FinalObs: TypeAlias = Literal["object", "dense", "absent"]
TorchFinalObs: TypeAlias = Literal["dense", "absent", "ids"]


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
        self.script = script
        self.index = index
        self.observation_space = script.observation_space
        self.action_space = script.action_space
        self.actions: list[Any] = []
        self._record = record_actions
        self.clock = Clock(script, np.asarray, index, reuse_buffer)

    def reset(self, *, seed: int | None = None, options: Info | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        if seed is not None:
            self.clock.restart()
        self.clock.begin(np.True_)  # not Python's True: the clock inverts it with ~
        return self._observe(), {"t": 0}

    def step(self, action: Tree) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        if self._record:
            self.actions.append(action)

        reward, terminated, truncated = self.clock.advance(np.True_)
        info = {"t": int(self.clock.step)}
        return self._observe(), float(reward), bool(terminated), bool(truncated), info

    def get_snapshot(self) -> Any:
        """Return the episode and the step, see `flatroll.wrappers.Snapshots`."""
        return self.clock.get_snapshot()

    def set_snapshot(self, snapshot: Any) -> None:
        """Go on from an episode and step."""
        self.clock.set_snapshot(snapshot)

    def _observe(self) -> Any:
        return self.clock.show()


class ScriptedVectorEnv(VectorEnv[Any, Any, Any]):
    """Plays a script as one NumPy vector env, in any autoreset mode; fast for thousands of envs.

    Its ``reset(options={"reset_mask": mask})`` works in every mode; the adapted env (`as_vector_env`) allows it only
    under DISABLED, as for any unknown env class. It refuses a wrong number of actions and, under DISABLED, a step of
    an ended env.

    Args:
        script: the script.
        autoreset_mode: a gymnasium mode, or None for an env that declares none (and resets in the same step).
        final_obs: how SAME_STEP returns the last observation. ``"object"``: Gymnasium's object array on steps with an
            ended row; ``"dense"``: a full batch on such steps; ``"absent"``: not at all.
        final_info: whether SAME_STEP also returns the last entries of info on steps with an ended row, in
            ``info["final_info"]``. Default False: they are lost.
        reuse_buffer: the next call overwrites every returned array.
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
        final_info: bool = False,
        reuse_buffer: bool = False,
        record_actions: bool = False,
    ) -> None:
        check_type("script", script, Script, "a Script")
        check_flags(final_info=final_info, reuse_buffer=reuse_buffer, record_actions=record_actions)

        self.script = script
        self.num_envs = script.num_envs
        self.single_observation_space = script.observation_space
        self.single_action_space = script.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        if autoreset_mode is None:
            self._mode = AutoresetMode.SAME_STEP
            self.metadata = {}
        else:
            if not isinstance(autoreset_mode, AutoresetMode):
                check_choice("autoreset_mode", autoreset_mode, [mode.value for mode in AutoresetMode])
            self._mode = AutoresetMode(autoreset_mode)
            self.metadata = {"autoreset_mode": self._mode}

        self.actions: list[Any] = []
        self._final_obs = final_obs
        self._reuse = reuse_buffer
        self._record = record_actions
        self._final_info = final_info

        self.clock = Clock(script, np.asarray)
        self._done = np.zeros(self.num_envs, np.bool_)
        # The last returned observation, reward, terminated, truncated and final observation.
        self._shown: list[Any] = [None] * 5

    def reset(self, *, seed: Seed = None, options: Info | None = None) -> tuple[Any, Info]:
        """Start the next episode in all envs, or where ``reset_mask`` is True; a seed restarts the script."""
        mask = np.ones(self.num_envs, np.bool_)
        if options is not None and "reset_mask" in options:
            mask = options["reset_mask"]
        if seed is not None:
            self.clock.restart()

        self.clock.begin(mask)
        self._done = self._done & ~mask
        return self._show(0, self.clock.observe()), self._info()

    def step(self, actions: Tree) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        """Make one vector step in the declared mode."""
        leaf = actions  # with one row for each env
        if self.script.action == "dict":
            leaf = actions["press"]
        if len(leaf) != self.num_envs:
            raise ValueError(f"expected actions for {self.num_envs} envs, got {len(leaf)}")
        if self._record:
            self.actions.append(actions)

        clock = self.clock
        pending = self._done
        if self._mode == AutoresetMode.DISABLED and pending.any():
            raise AssertionError(f"envs {np.flatnonzero(pending).tolist()} have ended and were not reset")
        if self._mode == AutoresetMode.NEXT_STEP:
            clock.begin(pending)

        # Rows that ended in the previous step do not move: NEXT_STEP only resets them.
        reward, terminated, truncated = clock.advance(~pending)
        done = terminated | truncated

        last = {}
        if self._mode == AutoresetMode.SAME_STEP:
            # Before the next episodes begin.
            final: Any = clock.observe()
            if done.any() and self._final_info:
                last = {"final_info": self._info(), "_final_info": done.copy()}
            clock.begin(done)
            if done.any() and self._final_obs != "absent":
                if self._final_obs == "dense":
                    final = self._show(4, final)
                else:
                    trees = final
                    final = np.full(self.num_envs, None, dtype=object)
                    for i in np.flatnonzero(done):
                        final[i] = row(trees, int(i))
                last |= {"final_obs": final, "_final_obs": done.copy()}
        else:
            self._done = done

        returned = clock.observe(), reward.astype(np.float32), terminated, truncated
        obs, reward, terminated, truncated = (self._show(i, value) for i, value in enumerate(returned))
        return obs, reward, terminated, truncated, self._info() | last

    def get_snapshot(self) -> Any:
        """Return the episodes, the steps, and which envs have ended, see `flatroll.wrappers.Snapshots`."""
        return self.clock.get_snapshot() | {"done": self._done.copy()}

    def set_snapshot(self, snapshot: Any) -> None:
        """Go on from these episodes and steps."""
        self.clock.set_snapshot(snapshot)
        self._done = snapshot["done"].copy()

    def _info(self) -> dict[str, Any]:
        return {"t": self.clock.step.copy(), "_t": np.ones(self.num_envs, np.bool_)}

    def _show(self, i: int, value: Tree) -> Tree:
        """Return the value, or with ``reuse_buffer`` the array of the last call overwritten with it."""
        if self._reuse:
            value = overwrite(self._shown[i], value)
        self._shown[i] = value
        return value


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
    """Create a Gymnasium vector env that plays ``script``.

    Args:
        script: the script.
        backend: ``"sync"`` and ``"async"`` put single envs into gymnasium's vector envs (close an async
            one: it holds a process per env); ``"native"`` is a :class:`ScriptedVectorEnv`.
        autoreset_mode: any of gymnasium's three.
        reuse_buffer: the single envs (or the native env) write into the arrays they returned.
        record_actions: the envs keep their actions; read them with ``env.get_attr("actions")`` or ``env.actions``.
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

    gc.freeze()  # a forked worker may crash when it collects the parent's garbage, such as an envpool
    try:
        return AsyncVectorEnv(fns, copy=copy, shared_memory=shared_memory, autoreset_mode=mode)
    finally:
        gc.unfreeze()


class ScriptedTorchEnv:
    """Plays a script as an Isaac Lab-like torch vector env; neither ``VectorEnv`` nor ``gymnasium.Env``.

    SAME_STEP by default. Every step overwrites the reward and flag buffers and returns the same ``extras`` dict, so
    whatever a caller keeps without cloning changes.

    Args:
        script: the script.
        device: any torch device, ``"meta"`` included.
        final_obs: where the last observation of an ended row is. ``"dense"``: ``extras["final_obs"]``, a
            full batch whose rows are overwritten only where an episode ended and are stale elsewhere;
            ``"ids"``: ``extras["terminal"] = {"env_ids", "observations"}``, with the ended rows only
            (reads values on the host: not for ``"meta"``); ``"absent"``: nowhere.
        reuse_obs: observations are overwritten in place too.
        autoreset: False for an env that leaves ended rows to ``reset(env_ids=...)`` (DISABLED).
        declare: whether ``metadata`` declares the autoreset mode.

    >>> env = ScriptedTorchEnv(Script(2, lengths=[[1], [4]]))
    >>> _ = env.reset()
    >>> obs, reward, terminated, truncated, extras = env.step(torch.zeros(2, dtype=torch.int64))
    >>> obs.tolist(), extras["final_obs"][0].tolist()
    ([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]], [0.0, 0.0, 1.0])
    """

    is_vector_env = True

    def __init__(
        self,
        script: Script,
        *,
        device: torch.device | str = "cpu",
        final_obs: TorchFinalObs = "dense",
        reuse_obs: bool = False,
        autoreset: bool = True,
        declare: bool = True,
    ) -> None:
        self.script = script
        self.num_envs = script.num_envs
        self.device = torch.device(device)
        self.single_observation_space = script.observation_space
        self.single_action_space = script.action_space
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        mode = AutoresetMode.SAME_STEP if autoreset else AutoresetMode.DISABLED
        self.metadata = {"autoreset_mode": mode} if declare else {}

        self.unwrapped = self
        self.actions = list[Any]()
        self.closed = False
        self._final_obs = final_obs
        self._autoreset = autoreset

        self.clock = Clock(script, lambda x: torch.from_numpy(x).to(self.device), reuse=reuse_obs)
        self._final = self.clock.observe()

        self.extras: dict[str, Any] = {"log": {}}
        self.reward_buf = torch.zeros(self.num_envs, device=self.device)
        self.terminated_buf = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.truncated_buf = torch.zeros_like(self.terminated_buf)
        if final_obs == "dense":
            self.extras["final_obs"] = self._final

    def reset(
        self,
        seed: int | None = None,
        env_ids: Sequence[int] | Tensor | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Start the next episode in all envs, or in ``env_ids``; a seed restarts the script."""
        if seed is not None:
            self.clock.restart()
        mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if env_ids is not None:
            mask = torch.zeros_like(mask)
            mask[torch.as_tensor(env_ids, device=self.device)] = True

        self.clock.begin(mask)
        return self.clock.show(), self.extras

    def step(self, action: Tree) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Make one vector step; with ``autoreset``, envs that ended are reset in the same step."""
        self.actions.append(action)
        clock = self.clock
        reward, terminated, truncated = clock.advance(torch.ones_like(self.terminated_buf))

        # One buffer for all steps, as in simulators.
        self.reward_buf.copy_(reward)
        self.terminated_buf.copy_(terminated)
        self.truncated_buf.copy_(truncated)

        done = terminated | truncated
        if self._autoreset:
            final = clock.observe()
            if self._final_obs == "dense":
                # In place: rows that did not end keep older final observations.
                map_tree(lambda old, new: old.copy_(select(done, new, old)), self._final, final)
            elif self._final_obs == "ids":
                ids = done.nonzero().squeeze(-1)
                self.extras["terminal"] = {"env_ids": ids, "observations": row(final, ids)}
            clock.begin(done)
        return clock.show(), self.reward_buf, self.terminated_buf, self.truncated_buf, self.extras

    def get_snapshot(self) -> Any:
        """Return the episodes and the steps, see `flatroll.wrappers.Snapshots`."""
        return self.clock.get_snapshot()

    def set_snapshot(self, snapshot: Any) -> None:
        """Go on from these episodes and steps."""
        self.clock.set_snapshot(snapshot)

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True


class ScriptedRslEnv:
    """Plays a script as rsl_rl's ``VecEnv``: no spaces, 4-tuples, ``dones`` that include time-outs.

    ``extras["time_outs"]`` (float, reused in place) marks the ended rows that were only truncated; the final
    observation is lost. An episode that the script ends with ``"both"`` is reported as a time-out.

    Args:
        script: the script; ``obs`` must be ``"float32"`` and ``action`` ``"box"``.
        device: any torch device.
        style: ``"tensordict"``, observations as ``TensorDict({"policy": ...})``; ``"tensor"``, as the
            plain tensor, with ``get_observations()`` and ``reset()`` giving ``(obs, extras)``.

    >>> env = ScriptedRslEnv(Script(2, lengths=[[1], [4]], ends="truncated", action="box"))
    >>> obs, reward, dones, extras = env.step(torch.zeros(2, 2))
    >>> dones.tolist(), extras["time_outs"].tolist(), obs["policy"].tolist()
    ([1, 0], [1.0, 0.0], [[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    """

    def __init__(
        self,
        script: Script,
        *,
        device: torch.device | str = "cpu",
        style: Literal["tensordict", "tensor"] = "tensordict",
    ) -> None:
        if script.obs != "float32" or script.action != "box":
            raise ValueError(
                f"needs obs='float32' and action='box', got {script.obs!r} and {script.action!r}"
            )

        self._env = ScriptedTorchEnv(script, device=device, final_obs="absent")
        self._style = style
        self.num_envs = script.num_envs
        self.device = self._env.device
        self.num_obs = 3
        self.num_actions = 2
        self.max_episode_length = max(max(row) for row in script.table("lengths"))

        self.cfg: dict[str, Any] = {}
        self.dones_buf = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.extras: dict[str, Any] = {"time_outs": torch.zeros(self.num_envs, device=self.device)}
        self.reset()

    @property
    def episode_length_buf(self) -> Tensor:
        """Number of steps made in the current episodes, int64 ``[E]``."""
        steps: Tensor = self._env.clock.step
        return steps

    def get_observations(self) -> Any:
        """Return the current observations."""
        if self._style == "tensordict":
            return self._obs
        return self._obs, self.extras

    def reset(self) -> Any:
        """Start the next episode in all envs; return (obs, extras)."""
        return self._show(self._env.reset()[0]), self.extras

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
        """Make one step; return (obs, reward, dones, extras)."""
        obs, reward, terminated, truncated, _ = self._env.step(actions)
        self.dones_buf.copy_(terminated | truncated)
        self.extras["time_outs"].copy_(truncated)
        return self._show(obs), reward, self.dones_buf, self.extras

    def _show(self, obs: Tensor) -> Any:
        if self._style == "tensordict":
            self._obs = TensorDict({"policy": obs}, [self.num_envs])
        else:
            self._obs = obs
        return self._obs

    def close(self) -> None:
        """Do nothing: there is nothing to release."""
