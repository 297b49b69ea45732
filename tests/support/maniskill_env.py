"""ManiSkill's PickCube on the CPU, with episodes of 20 steps; also where there is no Vulkan."""

import warnings
from typing import Any

import gymnasium as gym

LIMIT = 20


class Material:
    """Stands in for a material of the renderer, which needs a Vulkan device even where nothing is drawn."""

    def __init__(self, base_color: Any = (1.0, 1.0, 1.0, 1.0), **_: object) -> None:
        self.base_color = base_color


def bare() -> Any:
    """What ManiSkill's users call an env: `gym.make`, which sets the time limit."""
    import sapien
    import sapien.wrapper.actor_builder as builder

    with warnings.catch_warnings(action="ignore"):
        import mani_skill.envs  # noqa: F401
    if not sapien.Device("cpu").can_render():
        sapien.render.RenderMaterial = builder.sapien.render.RenderMaterial = Material
    return gym.make(
        "PickCube-v1",
        num_envs=1,
        obs_mode="state",
        sim_backend="physx_cpu",
        render_backend="none",
        max_episode_steps=LIMIT,
        enhanced_determinism=True,
    )


def make(auto_reset: bool = True) -> Any:
    made = bare()
    from mani_skill.vector.wrappers.gymnasium import ManiSkillVectorEnv

    return ManiSkillVectorEnv(made, auto_reset=auto_reset)
