"""gymnax, and Gymnasium's phys2d: rows of a collector against the equations of CartPole and Pendulum."""

import time
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import pytest
import torch
from jax_trace import count_false, record_states

from flatroll.layout import audit
from flatroll.rollouts import Collector
from flatroll.wrappers import as_functional, as_vector_env
from flatroll.wrappers.testing import check_vector_env

jax = pytest.importorskip("jax")
E, T = 16, 250


def collect(make: Callable[[], Any]) -> tuple[Any, Any, float]:
    """T steps of E envs, the states before each of them, and the seconds of the first batch of a row."""
    env = make()
    states = record_states(env.source)
    start = time.perf_counter()
    env.reset(seed=0)
    env.step(env.action_space.sample())
    first = time.perf_counter() - start
    states.clear()
    batch = next(iter(Collector(env, frames_per_batch=E * T, seed=0)))
    return batch, states, first


def same_again(make: Callable[[], Any], batch: Any) -> None:
    again = next(iter(Collector(make(), frames_per_batch=E * T, seed=0)))
    assert all(torch.equal(value, again[key]) for key, value in batch.items(True, True))


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1", "MountainCar-v0", "Catch-bsuite"])
def test_gymnax(name: str, report: Any) -> None:
    gymnax = pytest.importorskip("gymnax")
    env, params = gymnax.make(name)
    if name != "Catch-bsuite":  # episodes that end in time
        params = params.replace(max_steps_in_episode=40)

    def make() -> Any:
        return as_vector_env(as_functional(env, params=params), num_envs=E)

    def own(state: Any, action: Any) -> tuple[Any, ...]:
        obs, after, reward, done, _ = env.step_env(jax.random.key(0), state, action, params)
        if hasattr(env, "is_truncated"):
            return obs, reward, done, env.is_truncated(after, params)
        return obs, reward, None, None  # before 1.0

    batch, states, first = collect(make)
    false = count_false(batch, states, own, E)
    ends = int(batch["next", "done"].sum())
    report(
        f"gymnax {name}",
        "gymnax",
        mode="SAME_STEP",
        rows=E * T,
        false=false,
        known=ends,
        unknown=0,
        first_seconds=first,
    )
    assert false == 0 and audit(batch) == [] and ends > 50
    check_vector_env(make(), steps=100)
    same_again(make, batch)


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v0"])
def test_phys2d(name: str, report: Any) -> None:
    pytest.importorskip("flax")

    def make() -> Any:
        return as_vector_env(gym.make_vec(f"phys2d/{name}", num_envs=E))

    batch, _, first = collect(make)
    physics = cartpole if name == "CartPole-v1" else pendulum
    obs, reward, terminated = physics(batch["observation"].double(), batch["action"].double())
    wrong = ~torch.isclose(batch["next", "observation"].double(), obs, atol=1e-5).all(-1)
    wrong |= ~torch.isclose(batch["next", "reward"].squeeze(-1).double(), reward, atol=1e-4)
    wrong |= batch["next", "terminated"].squeeze(-1) != terminated
    false, ends = int(wrong.sum()), int(batch["next", "done"].sum())
    report(
        f"phys2d/{name}",
        "gymnasium",
        mode="SAME_STEP",
        rows=E * T,
        false=false,
        known=ends,
        unknown=0,
        first_seconds=first,
    )
    assert false == 0 and audit(batch) == [] and ends >= E
    check_vector_env(make(), steps=100)
    same_again(make, batch)


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
