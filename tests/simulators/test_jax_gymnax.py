"""gymnax, and Gymnasium's phys2d: rows of a collector against the equations of CartPole and Pendulum."""

from typing import Any

import gymnasium as gym
import pytest
import torch
from jax_trace import check_simulator, count_false

from flatroll.wrappers import as_functional

jax = pytest.importorskip("jax")
E, T = 16, 250


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Catch-bsuite"])
def test_gymnax(name: str, report: Any) -> None:
    gymnax = pytest.importorskip("gymnax")
    env, params = gymnax.make(name)
    if name != "Catch-bsuite":  # episodes that end in time
        params = params.replace(max_steps_in_episode=40)

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        obs, after, reward, done, _ = env.step_env(jax.random.key(0), state, action, params)
        if hasattr(env, "is_truncated"):
            return obs, reward, done, env.is_truncated(after, params)
        return obs, reward, None, None  # before 1.0

    def false(batch: Any, states: Any) -> int:
        return count_false(batch, states, own, E)

    adapted = report.start(lambda: as_functional(env, params=params), num_envs=E)
    check_simulator(adapted, report, f"gymnax {name}", "gymnax", false, steps=T, ends=50)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v0"])
def test_phys2d(name: str, report: Any) -> None:
    pytest.importorskip("flax")
    physics = cartpole if name == "CartPole-v1" else pendulum

    def false(batch: Any, _: Any) -> int:
        obs, reward, terminated = physics(batch["observation"].double(), batch["action"].double())
        wrong = ~torch.isclose(batch["next", "observation"].double(), obs, atol=1e-5).all(-1)
        wrong |= ~torch.isclose(batch["next", "reward"].squeeze(-1).double(), reward, atol=1e-4)
        wrong |= batch["next", "terminated"].squeeze(-1) != terminated
        return int(wrong.sum())

    env = report.start(lambda: gym.make_vec(f"phys2d/{name}", num_envs=E))
    check_simulator(env, report, f"phys2d/{name}", "gymnasium", false, steps=T, ends=E)


def cartpole(obs: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step of the equations: Gymnasium's constants, masscart 1, masspole 0.1, and phys2d's moment arm."""
    x, speed, angle, spin = obs.unbind(-1)
    # phys2d multiplies nothing: its "polemass_length" is the sum of mass and length.
    arm, total, length = 0.1 + 0.5, 1.1, 0.5
    push = (torch.sign(action - 0.5) * 10 + arm * spin**2 * angle.sin()) / total
    bend = (9.8 * angle.sin() - angle.cos() * push) / (length * (4 / 3 - 0.1 * angle.cos() ** 2 / total))
    acceleration = push - arm * bend * angle.cos() / total
    after = torch.stack(
        [x + 0.02 * speed, speed + 0.02 * acceleration, angle + 0.02 * spin, spin + 0.02 * bend], -1
    )
    over = (after[:, 0].abs() > 2.4) | (after[:, 2].abs() > 12 * 2 * torch.pi / 360)
    return after, torch.ones_like(x), over


def pendulum(obs: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    angle, spin = torch.atan2(obs[:, 1], obs[:, 0]), obs[:, 2]
    torque = action[:, 0].clamp(-2, 2)
    cost = angle**2 + 0.1 * spin**2 + 0.001 * torque**2
    spin = (spin + (15 * angle.sin() + 3 * torque) * 0.05).clamp(-8, 8)
    angle = angle + spin * 0.05
    return torch.stack([angle.cos(), angle.sin(), spin], -1), -cost, torch.zeros_like(cost, dtype=torch.bool)


def test_the_example_learns(tmp_path: Any, capsys: Any) -> None:
    from flatroll.examples import jax_ppo

    jax_ppo.main(["--frames", "40000", "--picture", str(tmp_path / "curve.png")])
    assert float(capsys.readouterr().out.split("return ")[1].split()[0]) > 30  # random play: about 22
    assert (tmp_path / "curve.png").stat().st_size > 5000
