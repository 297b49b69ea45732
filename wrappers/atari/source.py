"""The adapter for ale-py's own vector env, ``AtariVectorEnv``, and its family."""

from dataclasses import replace
from typing import Any

import numpy as np
from gymnasium.vector import AutoresetMode, VectorEnv
from typing_extensions import override

from flatroll.wrappers.adapt_env import own_mode, refuse_known_defects
from flatroll.wrappers.arrays import Array, Tree
from flatroll.wrappers.families import Family, Request
from flatroll.wrappers.gym_source import GymSource
from flatroll.wrappers.source import Info, Seed, Step, VectorSource, is_from


class AtariSource(GymSource):
    """Adapts ale-py's vector env.

    With ``life_loss_info=True`` a lost life is reported as an end, and the game goes on. Nothing of the env tells the
    option, but the frame at which a row's game began does not change then.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any], mode: AutoresetMode, own_buffers: bool | str) -> None:
        super().__init__(env, mode, own_buffers)
        self.capabilities = replace(self.capabilities, hides_final_obs=False)
        self._waits = mode is AutoresetMode.NEXT_STEP  # for the next step, which resets

        self._ended: Array = np.zeros(env.num_envs, np.bool_)
        self._began: Array = np.zeros(env.num_envs, np.int64)
        self._restarted: Array = np.zeros(env.num_envs, np.bool_)

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        if isinstance(seed, list):
            # Without a seed is -1.
            seeds: Any = np.array([-1 if one is None else one for one in seed])
        else:
            seeds = seed
        obs, info = super().reset(seeds, options, rows)

        self._began = _first_frames(info)
        self._ended = np.zeros(self.num_envs, np.bool_)
        return obs, info

    @override
    def step(self, actions: Tree) -> Step:
        obs, reward, terminated, truncated, info = super().step(actions)
        began = _first_frames(info)
        self._restarted = began != self._began
        self._began = began

        went_on = self._ended & ~self._restarted
        if self._waits and went_on.any():
            raise ValueError(
                f"{type(self.env.unwrapped).__name__} has ended an episode of env {np.flatnonzero(went_on)[0]} and "
                "then gone on with the same game, as it does with life_loss_info=True. Under NEXT_STEP such steps "
                "would count as resets: make it with autoreset_mode='SameStep', or without life_loss_info"
            )
        self._ended = np.asarray(terminated) | np.asarray(truncated)
        return obs, reward, terminated, truncated, info

    @override
    def final_obs(self, info: Info, obs: Tree, ended: Array, given: Tree | None = None) -> Tree | None:
        final = super().final_obs(info, obs, ended, given)
        if final is None:
            return None

        # A row that goes on shows its own next observation, and the one in info is not written.
        final = np.array(final)
        final[~self._restarted] = obs[~self._restarted]
        return final


def _first_frames(info: Info) -> Array:
    """Return the frame of the emulator at which the game of each row began, int64 ``[E]``."""
    frames = np.asarray(info["frame_number"], np.int64)
    return frames - np.asarray(info["episode_frame_number"], np.int64)


def _find(request: Request) -> Any:
    """Return ale-py's vector env, also in wrappers of Gymnasium; None for other envs."""
    if isinstance(request.env, VectorEnv) and is_from("ale_py", request.base):
        return request.env
    return None


def _refuse_async(request: Request) -> None:
    """Raise ValueError for the async mode, in which each step returns other envs."""
    rows = request.base.batch_size
    total = request.base.num_envs
    if rows != total:
        raise ValueError(
            f"env is {type(request.base).__name__} in async mode (batch_size={rows} of num_envs={total}), whose steps "
            "return the rows of different envs, and this is not supported: make it without batch_size, or take an "
            "envpool, whose async mode is supported"
        )


def _adapt(request: Request, env: Any) -> tuple[VectorSource, AutoresetMode]:
    mode = own_mode(env, request.mode)
    declared = request.base.autoreset_mode
    if mode is not declared:
        raise ValueError(
            f"autoreset_mode={mode.value!r} is not what {type(request.base).__name__} does, it was made with "
            f"{declared.value!r}: leave the argument out"
        )
    refuse_known_defects(env, mode)
    return AtariSource(env, mode, request.own_buffers), mode


FAMILY = Family(name="ale-py's vector env", recognises=_find, refuse=_refuse_async, adapt=_adapt)
