"""rsl_rl gets every env as a VecEnv, with the true last observations, and its PPO bootstraps from them."""

from typing import Any

import gymnasium as gym
import pytest
import torch

pytest.importorskip("rsl_rl.algorithms", exc_type=ImportError)

from rsl_rl.algorithms import PPO
from rsl_rl.runners import OnPolicyRunner
from trainer_envs import ENDS, LENGTHS, envs_of

from flatroll.trainers.rsl_rl import FinalObservations, FlatVecEnv
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, decode, expected_rows, make_scripted

SCRIPT = Script(2, lengths=LENGTHS, ends=ENDS, action="box")
ENVS = envs_of(SCRIPT)


class ExactPPO(FinalObservations, PPO): ...


def pendulum() -> FlatVecEnv:
    return FlatVecEnv(gym.make_vec("Pendulum-v1", 2, "sync"), max_episode_length=5, seed=0)


def runner(algorithm: Any) -> OnPolicyRunner:
    network = {"class_name": "MLPModel", "hidden_dims": [8], "activation": "elu"}
    noise = {"class_name": "GaussianDistribution", "init_std": 1.0}
    settings = {
        "num_steps_per_env": 12,
        "save_interval": 100,
        "obs_groups": {"actor": ["policy"], "critic": ["policy"]},
        "actor": {**network, "distribution_cfg": noise},
        "critic": dict(network),
        "algorithm": {"class_name": algorithm, "num_learning_epochs": 1, "num_mini_batches": 2},
    }
    return OnPolicyRunner(pendulum(), settings, log_dir=None, device="cpu")


@pytest.mark.parametrize("name", ENVS)
def test_every_step_is_a_true_transition(name: str) -> None:
    env = FlatVecEnv(ENVS[name](), max_episode_length=100, seed=0)
    rows = []
    for _ in range(30):
        before, steps = decode("float32", env.get_observations()["policy"]), env.episode_length_buf.tolist()
        observations, rewards, dones, extras = env.step(torch.zeros(2, 2))
        after, final = (
            decode("float32", observations["policy"]),
            decode("float32", extras["final_obs"]["policy"]),
        )
        for i in range(2):
            e, episode, step = before[i].tolist()
            assert steps[i] == step
            assert (final if dones[i] else after)[i].tolist() == [e, episode, step + 1]
            assert after[i].tolist() == ([e, episode + 1, 0] if dones[i] else [e, episode, step + 1])
            rows.append((e, episode, step, rewards[i].item(), bool(dones[i]), bool(extras["time_outs"][i])))
    true = expected_rows(SCRIPT, 30)
    flags = [
        (bool(row["terminated"] | row["truncated"]), bool(~row["terminated"] & row["truncated"]))
        for row in true
    ]
    table = true[["env", "episode", "step", "reward"]].tolist()
    assert rows == [(*row, *flag) for row, flag in zip(table, flags, strict=True)]


def test_the_length_limit_and_dict_observations() -> None:
    env = FlatVecEnv(make_scripted(Script(2, lengths=[50], obs="dict", action="box")), max_episode_length=3)
    timed_out = [env.step(torch.zeros(2, 2))[3]["time_outs"].tolist() for _ in range(6)]
    assert timed_out == [[0, 0], [0, 0], [1, 1]] * 2
    assert set(env.get_observations().keys()) == {"policy", "critic"}
    assert pendulum().max_episode_length == 5
    assert FlatVecEnv(gym.make_vec("Pendulum-v1", 2, "sync")).max_episode_length == 200


@pytest.mark.parametrize("algorithm", [PPO, ExactPPO])
def test_the_runner_learns(algorithm: Any, capsys: Any) -> None:
    run = runner(algorithm)
    before = [parameter.clone() for parameter in run.alg.critic.parameters()]
    run.learn(2)
    assert any((new != old).any() for new, old in zip(run.alg.critic.parameters(), before, strict=True))


def test_a_time_out_is_worth_the_value_of_its_last_observation(capsys: Any) -> None:
    algorithm = runner(ExactPPO).alg
    env = pendulum()
    for step in range(5):
        with torch.inference_mode():
            observations, rewards, dones, extras = env.step(algorithm.act(env.get_observations()))
            algorithm.process_env_step(observations, rewards, dones, extras)
            stored = algorithm.storage.rewards[step].squeeze(-1)
            worth = algorithm.gamma * algorithm.critic(extras["final_obs"]).squeeze(-1)
    assert dones.tolist() == [1, 1]
    torch.testing.assert_close(stored, rewards + worth)


def test_what_is_refused(capsys: Any) -> None:
    with pytest.raises(TypeError, match=r"a one-dimensional Box as action space, got Discrete\(5\)"):
        FlatVecEnv(make_scripted(Script(2)))
    with pytest.raises(ValueError, match="max_episode_length is needed"):
        FlatVecEnv(make_scripted(SCRIPT))
    hiding = FlatVecEnv(ScriptedTorchEnv(SCRIPT, final_obs="absent"), max_episode_length=100)
    with pytest.raises(ValueError, match="does not show their last observations"):
        for _ in range(5):
            hiding.step(torch.zeros(2, 2))
    algorithm = runner(ExactPPO).alg
    flags = torch.zeros(2)
    with pytest.raises(KeyError, match="extras has no 'final_obs'"):
        algorithm.process_env_step(None, flags, flags, {"time_outs": flags})
    algorithm.critic.is_recurrent = True
    with pytest.raises(TypeError, match="does not support recurrent critics"):
        algorithm.process_env_step(None, flags, flags, {"time_outs": flags, "final_obs": None})
