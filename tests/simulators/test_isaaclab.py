"""Isaac Lab's own episode code, with its managers, with a fake simulator of carts that are pushed."""

from typing import Any

import pytest
import torch

pytest.importorskip("isaaclab")
from isaaclab.envs import (
    DirectRLEnv,
    DirectRLEnvCfg,
    ManagerBasedRLEnv,
    ManagerBasedRLEnvCfg,
    direct_rl_env,
    manager_based_env,
)
from isaaclab.envs.mdp import time_out
from isaaclab.managers import (
    ActionTerm,
    ActionTermCfg,
    EventTermCfg,
    ObservationGroupCfg,
    ObservationTermCfg,
    RewardTermCfg,
    TerminationTermCfg,
)
from isaaclab.scene import InteractiveSceneCfg
from isaaclab.sim import SimulationCfg
from isaaclab.utils import configclass
from pxr import Usd
from traces import assert_same, compare, trace_of

from flatroll.layout import audit, describe
from flatroll.rollouts import Collector, rollout
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import check_vector_env

ENVS, STEPS, LIMIT, EDGE = 6, 70, 12, 0.5


class Scene:
    """A cart in each env: place and speed, and the force on it."""

    def __init__(self, cfg: Any) -> None:
        self.cfg, self.num_envs, self.keys = cfg, cfg.num_envs, list
        self.state, self.force = torch.zeros(ENVS, 2), torch.zeros(ENVS)

    def __getitem__(self, name: str) -> "Scene":
        return self

    def write_data_to_sim(self) -> None: ...

    def reset(self, env_ids: Any) -> None:
        self.force[env_ids] = 0

    def update(self, dt: float) -> None: ...


class Simulation:
    """What the envs ask of `SimulationContext`; it keeps the state after the last physics step."""

    is_rendering = has_gui = False
    visualizers: tuple[()] = ()
    vis_marker_registry = None

    def __init__(self, cfg: Any) -> None:
        self.cfg, self.device, self.stage = cfg, cfg.device, Usd.Stage.CreateInMemory()
        self.physics_manager, self.asked = self, False

    @classmethod
    def instance(cls) -> None: ...

    def register_interactive_scene(self, scene: Scene) -> None:
        self.scene = scene

    def step(self, render: bool) -> None:
        place, speed = self.scene.state.unbind(1)
        speed = speed + self.scene.force * self.cfg.dt
        self.after = torch.stack([place + speed * self.cfg.dt, speed], 1)
        self.scene.state = self.after.clone()

    def consume_reset_request(self) -> bool:
        """A reset asked for in the visualizer's window."""
        asked, self.asked = self.asked, False
        return asked

    def is_playing(self) -> bool:
        return True

    def handles_decimation(self) -> bool:
        return False

    def get_setting(self, name: str) -> None: ...

    def set_decimation(self, decimation: int) -> None: ...

    def reset(self) -> None: ...

    def forward(self) -> None: ...

    def stop(self) -> None: ...

    def clear_instance(self) -> None: ...


def state(env: Any) -> torch.Tensor:
    return env.scene.state


def reward(env: Any) -> torch.Tensor:
    return -env.scene.state.abs().sum(1)


def over_the_edge(env: Any) -> torch.Tensor:
    return env.scene.state[:, 0].abs() > EDGE


def place(env: Any, env_ids: Any) -> None:
    env.scene.state[env_ids] = torch.rand_like(env.scene.state[env_ids]) - 0.5


class Staggered:
    """Episodes of different ages at the start, so that they do not all end in one step."""

    def _reset_idx(self: Any, env_ids: Any) -> None:
        super()._reset_idx(env_ids)  # type: ignore[misc]
        if isinstance(env_ids, slice) or len(env_ids) == ENVS:
            self.episode_length_buf.copy_(torch.arange(ENVS))


class Manager(Staggered, ManagerBasedRLEnv): ...


class Push(ActionTerm):
    action_dim = 1

    def process_actions(self, actions: torch.Tensor) -> None:
        self.raw_actions = self.processed_actions = actions

    def apply_actions(self) -> None:
        self._asset.force[:] = 4 * self.processed_actions[:, 0]

    raw_actions = processed_actions = torch.zeros(ENVS, 1)


@configclass
class PushCfg(ActionTermCfg):
    class_type: type = Push
    asset_name: str = "cart"


@configclass
class Actions:
    push: PushCfg = PushCfg()


@configclass
class Observations:
    @configclass
    class Seen(ObservationGroupCfg):
        state: ObservationTermCfg = ObservationTermCfg(func=state)

    policy: Seen = Seen()
    critic: Seen = Seen()


@configclass
class Rewards:
    near: RewardTermCfg = RewardTermCfg(func=reward, weight=1.0)


@configclass
class Terminations:
    late: TerminationTermCfg = TerminationTermCfg(func=time_out, time_out=True)
    out: TerminationTermCfg = TerminationTermCfg(func=over_the_edge)


@configclass
class Events:
    place: EventTermCfg = EventTermCfg(func=place, mode="reset")


@configclass
class SceneCfg(InteractiveSceneCfg):
    class_type: Any = Scene
    num_envs: int = ENVS
    env_spacing: float = 1.0


@configclass
class ManagerCfg(ManagerBasedRLEnvCfg):
    sim: SimulationCfg = SimulationCfg(device="cpu", dt=0.05, render_interval=2)
    decimation: int = 2
    episode_length_s: float = LIMIT * 0.1
    scene: Any = SceneCfg()
    actions: Actions = Actions()
    observations: Observations = Observations()
    rewards: Rewards = Rewards()
    terminations: Terminations = Terminations()
    events: Events = Events()


@configclass
class DirectCfg(DirectRLEnvCfg):
    sim: SimulationCfg = SimulationCfg(device="cpu", dt=0.05, render_interval=2)
    decimation: int = 2
    episode_length_s: float = LIMIT * 0.1
    scene: Any = SceneCfg()
    events: Events = Events()
    observation_space: int = 2
    action_space: int = 1
    state_space: int = 2


class Direct(Staggered, DirectRLEnv):
    clones = True

    def _pre_physics_step(self, actions: torch.Tensor) -> None:
        self.actions = actions

    def _apply_action(self) -> None:
        self.scene.force[:] = 4 * self.actions[:, 0]

    def _get_observations(self) -> Any:
        seen = state(self).clone() if self.clones else state(self)
        return {"policy": seen, "critic": seen}

    def _get_rewards(self) -> torch.Tensor:
        return reward(self)

    def _get_dones(self) -> Any:
        return over_the_edge(self), time_out(self)


@pytest.fixture(autouse=True)
def double(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_based_env, "SimulationContext", Simulation)
    monkeypatch.setattr(manager_based_env, "InteractiveScene", Scene)
    monkeypatch.setattr(direct_rl_env, "SimulationContext", Simulation)


def make(kind: str, final_obs: bool) -> Any:
    env, cfg = (Manager, ManagerCfg()) if kind == "manager" else (Direct, DirectCfg())
    cfg.seed, cfg.compute_final_obs = 0, final_obs
    return env(cfg)


def policy(obs: Any) -> torch.Tensor:
    return (9 * obs["policy"].sum(1, keepdim=True)).sin()


@pytest.mark.parametrize("final_obs", [True, False])
@pytest.mark.parametrize("kind", ["manager", "direct"])
def test_rows_are_the_states_of_the_double(kind: str, final_obs: bool, report: Any) -> None:
    stream = report.start(lambda: make(kind, final_obs))
    env = stream.source.env
    trace = trace_of(env, lambda: env.sim.after)
    batch = rollout(stream, policy, num_steps=STEPS, seed=0)
    counts = compare(batch, "policy", trace, ENVS)
    name = f"Isaac Lab, {kind} env, fake simulator" + (", compute_final_obs" if final_obs else "")
    report.add(name, "isaaclab", "SameStep", counts)
    assert (counts.rows, counts.false) == (ENVS * STEPS, 0)
    assert counts.known + counts.unknown > 4 * ENVS
    assert (counts.unknown if final_obs else counts.known) == 0
    assert int(batch["next", "truncated"].sum()) > 3 and int(batch["next", "terminated"].sum()) > 3
    assert audit(batch) == [] and ("no last observation" in describe(batch)) != final_obs
    assert_same(batch, rollout(as_vector_env(make(kind, final_obs)), policy, num_steps=STEPS, seed=0))


@pytest.mark.parametrize("kind", ["manager", "direct"])
def test_the_contract_kit(kind: str) -> None:
    check_vector_env(make(kind, True), steps=60)


def test_a_direct_env_whose_observations_are_the_state_itself() -> None:
    """Isaac Lab keeps them as final_obs, while the reset writes into the state."""
    env = make("direct", True)
    env.clones = False
    with pytest.raises(ValueError, match="the reset has overwritten them: clone them"):
        rollout(env, policy, num_steps=STEPS)


def test_a_reset_from_the_window_ends_every_episode() -> None:
    env = make("manager", True)
    batches = iter(Collector(env, policy, frames_per_batch=ENVS, seed=0))
    next(batches)
    env.sim.asked = True
    assert next(batches)["next", "terminated"].all() and next(batches)["is_init"].all()
