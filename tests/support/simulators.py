"""Torch simulators by their own interfaces, each a stub of what its source does; they observe (env, episode, step).

The reward of a step to (env, episode, t) is ``100 * episode + t``, as everywhere in scripted envs, so `check_rows`
knows each row of a batch from its observation alone. What a stub keeps of its model: signatures, shapes, dtypes, which
arrays are written again, and when an entry of ``extras`` is there.
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.layout.keys import NEXT_KNOWN, next_key
from flatroll.wrappers.testing import Script
from flatroll.wrappers.testing.script import Clock

try:
    from rsl_rl.env import VecEnv
except ImportError:
    VecEnv = object

#: Of lengths 1 to 5, so that rows end alone, together and in the first step.
LENGTHS = [[3, 1, 4], [2, 5], [4]]
ENDS = [["terminated", "truncated"], ["truncated"], ["terminated"]]
SCRIPT = Script(3, lengths=LENGTHS, ends=ENDS, action="box")


def check_rows(batch: TensorDictBase, key: str, script: Script = SCRIPT, *, hidden: bool = False) -> int:
    """Check every row of a batch against the script; return how many ends have an unknown last observation."""
    rows = batch[key].long().tolist()
    after, next_known = batch[next_key(key)], batch.get(NEXT_KNOWN, None)
    known = [True] * len(rows) if next_known is None else next_known.reshape(-1).tolist()
    reward, terminated, truncated = (
        batch["next", name].reshape(-1).tolist() for name in ("reward", "terminated", "truncated")
    )
    assert len({tuple(row) for row in rows}) == len(rows), "a transition occurs twice"
    for i, (env, episode, step) in enumerate(rows):
        last = step + 1 == script.length(env, episode)
        ends = script.end(env, episode) if last else None
        assert (terminated[i], truncated[i]) == (ends == "terminated", ends == "truncated"), rows[i]
        assert reward[i] == 100 * episode + step + 1, rows[i]
        assert known[i] == (not (last and hidden)), rows[i]
        if known[i]:
            assert after[i].tolist() == [env, episode, step + 1], rows[i]
        else:
            assert after[i].isnan().all()
    return known.count(False)


class Simulated:
    """The state of all stubs: a clock, buffers that every step writes into again, and one dict of extras."""

    def __init__(self, script: Script = SCRIPT, device: str = "cpu") -> None:
        self.script, self.num_envs = script, script.num_envs
        self._where = torch.device(device)
        self.clock = Clock(script, lambda x: torch.from_numpy(x).to(self._where))
        self.clock.begin(self._all())
        self.obs_buf = self.clock.observe()
        self.rew_buf = torch.zeros(self.num_envs, device=self._where)
        self.extras: dict[str, Any] = {}

    def _all(self) -> Tensor:
        return torch.ones(self.num_envs, dtype=torch.bool, device=self._where)

    def _move(self, live: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """One step of the rows that live; terminated and truncated."""
        reward, terminated, truncated = self.clock.advance(self._all() if live is None else live)
        self.rew_buf.copy_(reward)
        return terminated, truncated

    def _observe(self) -> Tensor:
        self.obs_buf.copy_(self.clock.observe())
        return self.obs_buf

    def _mask(self, env_ids: Any) -> Tensor:
        mask = ~self._all()
        mask[env_ids] = True
        return mask


class IsaacManagerEnv(Simulated, gym.Env[Any, Any]):
    """Isaac Lab 3's ManagerBasedRLEnv: both modes, final observations by ``compute_final_obs``.

    The key ``final_obs`` comes with the first step that ends an episode, and stays, stale, in the steps after.
    DISABLED: an ended row shows its last observation, reward 0 and no flags until it is reset.
    """

    is_vector_env = True

    def __init__(self, mode: AutoresetMode = AutoresetMode.SAME_STEP, final_obs: bool = False) -> None:
        super().__init__()
        self.device = "cpu"
        self.cfg = SimpleNamespace(autoreset_mode=mode, compute_final_obs=final_obs)
        self.metadata = {"render_modes": [None], "autoreset_mode": mode}
        box = spaces.Box(-np.inf, np.inf, (3,))
        self.single_observation_space = spaces.Dict(policy=box, critic=box)
        self.single_action_space = spaces.Box(-np.inf, np.inf, (2,))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)
        self.reset_terminated, self.reset_time_outs = ~self._all(), ~self._all()
        self.active_episode_mask = ~self._all()

    def _obs(self) -> dict[str, Tensor]:
        return {"policy": self._observe(), "critic": self.obs_buf}

    def reset(self, env_ids: Any = slice(None), *, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.clock.restart()
        mask = self._mask(env_ids)
        if not mask.any():
            raise ValueError("empty selection")
        self.clock.begin(mask)
        self.active_episode_mask |= mask
        self.extras["log"] = {}
        return self._obs(), self.extras

    def step(self, action: Tensor) -> Any:
        terminated, truncated = self._move(self.active_episode_mask)
        self.reset_terminated.copy_(terminated)
        self.reset_time_outs.copy_(truncated)
        done = terminated | truncated
        if self.cfg.autoreset_mode is AutoresetMode.DISABLED:
            self.active_episode_mask &= ~done
        elif done.any():
            if self.cfg.compute_final_obs:
                last = self.clock.observe()
                self.extras["final_obs"] = {"policy": last, "critic": last}
            self.clock.begin(done)
            self.extras["log"] = {}
        return self._obs(), self.rew_buf, self.reset_terminated, self.reset_time_outs, self.extras


class IsaacDirectEnv(IsaacManagerEnv):
    """Isaac Lab 3's DirectRLEnv: no reset of chosen rows."""

    def reset(self, seed: Any = None, options: Any = None) -> Any:  # type: ignore[override]
        return super().reset(seed=seed, options=options)


@dataclass
class MjlabBox:
    """mjlab's own space class; Gymnasium is not among what it installs."""

    shape: tuple[int, ...]
    low: float = float("-inf")
    high: float = float("inf")
    dtype: str = "float32"


@dataclass
class MjlabDict:
    """mjlab's own Dict."""

    spaces: dict[str, MjlabBox]


class MjlabEnv(Simulated):
    """mjlab 1.6's ManagerBasedRlEnv: no mode declared; without ``auto_reset`` a step of an ended row raises."""

    is_vector_env = True

    def __init__(self, auto_reset: bool = True) -> None:
        super().__init__()
        self.device = "cpu"
        self.cfg = SimpleNamespace(auto_reset=auto_reset)
        self.metadata: dict[str, Any] = {"render_modes": [None, "rgb_array"]}
        self.single_observation_space = MjlabDict({"actor": MjlabBox((3,)), "critic": MjlabBox((3,))})
        self.single_action_space = MjlabBox((2,))
        self.reset_buf = ~self._all()
        self.terminated_buf, self.time_out_buf = ~self._all(), ~self._all()

    @property
    def unwrapped(self) -> "MjlabEnv":
        return self

    def _obs(self) -> dict[str, Tensor]:
        last = self.clock.observe()
        return {"actor": last, "critic": last.clone()}

    def reset(self, *, seed: Any = None, env_ids: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.clock.restart()
        mask = self._all() if env_ids is None else self._mask(env_ids)
        self.clock.begin(mask)
        self.reset_buf &= ~mask
        return self._obs(), self.extras

    def step(self, action: Tensor) -> Any:
        if not self.cfg.auto_reset and self.reset_buf.any():
            raise RuntimeError("step of environments that have ended: reset them first")
        terminated, truncated = self._move()
        self.terminated_buf.copy_(terminated)
        self.time_out_buf.copy_(truncated)
        self.reset_buf.copy_(terminated | truncated)
        if self.cfg.auto_reset:
            self.clock.begin(self.reset_buf)
        return self._obs(), self.rew_buf, self.terminated_buf, self.time_out_buf, self.extras


class ManiSkillBase(Simulated, gym.Env[Any, Any]):
    """ManiSkill 3's BaseEnv: resets nothing by itself, and knows no time limit."""

    def __init__(self, script: Script = SCRIPT) -> None:
        super().__init__(script)
        self.device = torch.device("cpu")
        self.single_observation_space = spaces.Box(-np.inf, np.inf, (3,))
        self.single_action_space = spaces.Box(-1, 1, (2,))
        self.observation_space = batch_space(self.single_observation_space, self.num_envs)
        self.action_space = batch_space(self.single_action_space, self.num_envs)

    def reset(self, seed: Any = None, options: Any = None) -> Any:
        if seed is not None:
            self.clock.restart()
        self.clock.begin(self._mask((options or {}).get("env_idx", slice(None))))
        return self.clock.observe(), {"reconfigure": False}

    def step(self, action: Tensor) -> Any:
        terminated, truncated = self._move()
        self.limit_hit = truncated  # what the time limit's wrapper will say
        return self.clock.observe(), self.rew_buf.clone(), terminated, torch.zeros_like(truncated), {}


ManiSkillBase.__module__ = "mani_skill.envs.sapien_env"


class TimeLimitWrapper(gym.Wrapper[Any, Any, Any, Any]):
    """ManiSkill's wrapper that `gym.make` puts around each of its envs."""

    def step(self, action: Any) -> Any:
        obs, reward, terminated, _, info = self.env.step(action)
        return obs, reward, terminated, self.env.unwrapped.limit_hit, info  # type: ignore[attr-defined]


TimeLimitWrapper.__module__ = "mani_skill.utils.registration"


class ManiSkillVectorEnv(VectorEnv[Any, Any, Any]):
    """ManiSkill 3's own vector env: SAME_STEP, its final observations under the old name, in ending steps only."""

    def __init__(self, env: Any, auto_reset: bool = True) -> None:
        self.metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}
        self._env, self.base, self.auto_reset = env, env.unwrapped, auto_reset
        self.num_envs, self.device = self.base.num_envs, self.base.device
        self.single_observation_space = self.base.single_observation_space
        self.single_action_space = self.base.single_action_space
        self.observation_space, self.action_space = self.base.observation_space, self.base.action_space

    @property
    def unwrapped(self) -> Any:
        return self.base

    def reset(self, *, seed: Any = None, options: Any = None) -> Any:
        return self._env.reset(seed=seed, options={} if options is None else options)

    def step(self, actions: Tensor) -> Any:
        obs, reward, terminated, truncated, infos = self._env.step(actions)
        done = terminated | truncated
        if done.any() and self.auto_reset:
            last, last_infos = obs.clone(), dict(infos)
            obs, infos = self.reset(options={"env_idx": torch.arange(self.num_envs)[done]})
            infos = {**infos, "final_observation": last, "final_info": last_infos}
            infos |= dict.fromkeys(("_final_observation", "_final_info", "_elapsed_steps"), done)
        return obs, reward, terminated, truncated, infos


ManiSkillVectorEnv.__module__ = "mani_skill.vector.wrappers.gymnasium"


class GenesisEnv(Simulated):
    """An env as Genesis' examples write it: ``reset() -> (obs, None)``, int dones, float time-outs made anew."""

    def __init__(self, as_tensordict: bool = False, final_obs: bool = False) -> None:
        super().__init__()
        self.device = torch.device("cpu")
        self.num_obs, self.num_privileged_obs, self.num_actions = 3, None, 2
        self._td, self._final = as_tensordict, final_obs
        self.reset_buf = self._all().int()

    def _obs(self) -> Any:
        obs = self._observe()
        return TensorDict({"policy": obs}, [self.num_envs]) if self._td else obs

    def reset(self) -> tuple[Any, None]:
        self.clock.begin(self._all())
        return self._obs(), None

    def get_observations(self) -> Any:
        return self._obs()

    def get_privileged_observations(self) -> None:
        return None

    def step(self, actions: Tensor) -> Any:
        terminated, truncated = self._move()
        self.reset_buf.copy_(terminated | truncated)
        self.extras["time_outs"] = torch.zeros(self.num_envs)
        self.extras["time_outs"][truncated.nonzero().flatten()] = 1.0
        if self._final:
            last = self.clock.observe()
            self.extras["final_obs"] = TensorDict({"policy": last}, [self.num_envs]) if self._td else last
        self.clock.begin(self.reset_buf.bool())
        return self._obs(), self.rew_buf, self.reset_buf, self.extras


class RslVecEnv(Simulated, VecEnv):  # type: ignore[misc, valid-type]
    """rsl_rl 5.5's VecEnv with what its abstract class asks for, which is no reset."""

    def __init__(self, device: str = "cpu") -> None:
        super().__init__(device=device)
        self.num_actions, self.max_episode_length = 2, 5
        self.episode_length_buf = torch.zeros(self.num_envs, dtype=torch.long)
        self.device, self.cfg = device, {}

    def get_observations(self) -> TensorDict:
        return TensorDict({"policy": self._observe()}, [self.num_envs])

    def step(self, actions: Tensor) -> Any:
        terminated, truncated = self._move()
        self.extras["time_outs"] = truncated
        self.clock.begin(terminated | truncated)
        return self.get_observations(), self.rew_buf, (terminated | truncated).long(), self.extras


class LeggedRobot(Simulated):
    """legged_gym's LeggedRobot: 5-tuples ``(obs, privileged, reward, reset, extras)``; `reset` makes a step, too.

    ``extras["time_outs"]`` is set where some row ends, and stale in the steps after.
    """

    def __init__(self, privileged: bool = True) -> None:
        super().__init__()
        self.device = "cpu"
        self.num_obs, self.num_actions = 3, 2
        self.num_privileged_obs = 4 if privileged else None
        self._time_outs = ~self._all()
        self.compute_observations()

    def compute_observations(self) -> None:
        self._observe()
        more = torch.full((self.num_envs, 1), 7.0)
        self.privileged_obs_buf = torch.cat([self.obs_buf, more], 1) if self.num_privileged_obs else None

    def get_observations(self) -> Tensor:
        return self.obs_buf

    def get_privileged_observations(self) -> Tensor | None:
        return self.privileged_obs_buf

    def reset_idx(self, env_ids: Tensor) -> None:
        if len(env_ids):
            self.clock.begin(self._mask(env_ids))
            self.extras["episode"] = {"rew_alive": torch.zeros(())}
            self.extras["time_outs"] = self._time_outs

    def reset(self) -> tuple[Tensor, Tensor | None]:
        self.reset_idx(torch.arange(self.num_envs))
        obs, privileged, _, _, _ = self.step(torch.zeros(self.num_envs, self.num_actions))
        return obs, privileged

    def step(self, actions: Tensor) -> Any:
        terminated, self._time_outs = self._move()
        reset_buf = terminated | self._time_outs
        self.reset_idx(reset_buf.nonzero().flatten())
        self.compute_observations()
        return self.obs_buf, self.privileged_obs_buf, self.rew_buf, reset_buf, self.extras


class PlaygroundEnv(Simulated):
    """MuJoCo playground's RSLRLBraxWrapper on the CPU: no ``device``, float dones, and get_observations is reset."""

    def __init__(self, asymmetric: bool = False) -> None:
        super().__init__()
        self.asymmetric_obs = asymmetric
        self.num_obs: Any = (3,) if asymmetric else 3
        self.num_privileged_obs = (3,) if asymmetric else None
        self.num_actions, self.max_episode_length, self.resets = 2, 5, 0

    def _obs(self) -> TensorDict:
        obs = self.clock.observe()
        named = {"state": obs, "privileged_state": obs} if self.asymmetric_obs else {"state": obs}
        return TensorDict(named, [self.num_envs])

    def reset(self) -> TensorDict:
        self.resets += 1
        self.clock.begin(self._all())
        return self._obs()

    def get_observations(self) -> TensorDict:
        return self.reset()

    def step(self, action: Tensor) -> Any:
        terminated, truncated = self._move()
        extras = {"time_outs": truncated.float(), "observations": {"critic": None}, "log": {}}
        reward, done = self.rew_buf.clone(), (terminated | truncated).float()
        self.clock.begin(terminated | truncated)
        return self._obs(), reward, done, extras


PlaygroundEnv.__module__ = "mujoco_playground._src.wrapper_torch"
