"""Scripted torch environments with the habits of GPU simulators: duck-typed, buffers reused, SAME_STEP.

Every step is elementwise tensor code, so they run on ``device="meta"`` too, where anything that would
read a value on the host raises: a test of "no host sync" that needs no GPU.
"""

from collections.abc import Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict
from torch import Tensor

from flatroll.wrappers.arrays import map_tree, select
from flatroll.wrappers.testing.scripted import Clock, Script, overwrite, row

TorchFinalObs: TypeAlias = Literal["dense", "absent", "ids"]


class ScriptedTorchEnv:
    """A script as a torch vector env in Isaac Lab's manner; neither a ``VectorEnv`` nor a ``gymnasium.Env``.

    SAME_STEP by default. Reward and flags live in buffers that every step overwrites, and one ``extras``
    dict is returned again and again, so what a caller keeps without a clone changes under it.

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
        self.script, self.num_envs, self.device = script, script.num_envs, torch.device(device)
        self.single_observation_space, self.single_action_space = (
            script.observation_space,
            script.action_space,
        )
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        mode = AutoresetMode.SAME_STEP if autoreset else AutoresetMode.DISABLED
        self.metadata = {"autoreset_mode": mode} if declare else {}
        self.actions: list[Any] = []
        self.closed = False
        self._shown, self._reuse, self._autoreset = final_obs, reuse_obs, autoreset
        self._clock = Clock(script, lambda x: torch.from_numpy(np.ascontiguousarray(x)).to(self.device))
        self._obs, self._final = self._clock.observe(), self._clock.observe()
        self.extras: dict[str, Any] = {"log": {}}
        self.reward_buf = torch.zeros(self.num_envs, device=self.device)
        self.terminated_buf = torch.zeros(self.num_envs, dtype=torch.bool, device=self.device)
        self.truncated_buf = torch.zeros_like(self.terminated_buf)
        if final_obs == "dense":
            self.extras["final_obs"] = self._final

    @property
    def unwrapped(self) -> "ScriptedTorchEnv":
        """The env itself."""
        return self

    def reset(
        self,
        seed: int | None = None,
        env_ids: Sequence[int] | Tensor | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Any, dict[str, Any]]:
        """Begin the next episode everywhere, or of the envs in ``env_ids``; a seed restarts the script."""
        if seed is not None:
            self._clock.restart()
        mask = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)
        if env_ids is not None:
            mask = torch.zeros_like(mask)
            mask[torch.as_tensor(env_ids, device=self.device)] = True
        self._clock.begin(mask)
        return self._observe(), self.extras

    def step(self, action: Any) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        """One vector step; with ``autoreset``, ended envs are reset before it returns."""
        self.actions.append(action)
        clock = self._clock
        reward, terminated, truncated = clock.advance(torch.ones_like(self.terminated_buf))
        # As simulators do: one memory for all steps.
        self.reward_buf.copy_(reward)
        self.terminated_buf.copy_(terminated)
        self.truncated_buf.copy_(truncated)
        done = terminated | truncated
        if self._autoreset:
            final = clock.observe()
            if (
                self._shown == "dense"
            ):  # in place: rows that did not end keep the observations of earlier ends
                map_tree(lambda kept, new: kept.copy_(select(done, new, kept)), self._final, final)
            elif self._shown == "ids":
                ids = done.nonzero().squeeze(-1)
                self.extras["terminal"] = {"env_ids": ids, "observations": row(final, ids)}
            clock.begin(done)
        return self._observe(), self.reward_buf, self.terminated_buf, self.truncated_buf, self.extras

    def close(self) -> None:
        """Remember that it was closed."""
        self.closed = True

    def _observe(self) -> Any:
        obs = self._clock.observe()
        if not self._reuse:
            return obs
        self._obs = overwrite(self._obs, obs)
        return self._obs


class ScriptedRslEnv:
    """A script behind rsl_rl's ``VecEnv``: no spaces, 4-tuples, and ``dones`` that include the time-outs.

    ``extras["time_outs"]`` (float, reused in place) tells which of the ended rows were only cut off; the
    final observation is lost. An episode that the script ends with ``"both"`` is reported as a time-out.

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
        self.num_envs, self.device = script.num_envs, self._env.device
        self.num_obs, self.num_actions = 3, 2
        self.max_episode_length = max(max(row) for row in script.table("lengths"))
        self.cfg: dict[str, Any] = {}
        self.dones_buf = torch.zeros(self.num_envs, dtype=torch.int64, device=self.device)
        self.extras: dict[str, Any] = {"time_outs": torch.zeros(self.num_envs, device=self.device)}
        self._obs, _ = self._env.reset()

    @property
    def episode_length_buf(self) -> Tensor:
        """Steps made in the running episode, int64 ``[E]``."""
        steps: Tensor = self._env._clock.step
        return steps

    def get_observations(self) -> Any:
        """The current observations."""
        obs = self._wrap(self._obs)
        return obs if self._style == "tensordict" else (obs, self.extras)

    def reset(self) -> Any:
        """Begin the next episode everywhere: (obs, extras)."""
        self._obs, _ = self._env.reset()
        return self._wrap(self._obs), self.extras

    def step(self, actions: Tensor) -> tuple[Any, Tensor, Tensor, dict[str, Any]]:
        """(obs, reward, dones, extras)."""
        self._obs, reward, terminated, truncated, _ = self._env.step(actions)
        self.dones_buf.copy_(terminated | truncated)
        self.extras["time_outs"].copy_(truncated)
        return self._wrap(self._obs), reward, self.dones_buf, self.extras

    def close(self) -> None:
        """Nothing to release."""

    def _wrap(self, obs: Tensor) -> Any:
        return TensorDict({"policy": obs}, [self.num_envs]) if self._style == "tensordict" else obs
