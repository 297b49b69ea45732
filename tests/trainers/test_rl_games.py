"""rl_games gets every env as an IVecEnv, with the true last observations, and its PPO bootstraps from them."""

import copy
from pathlib import Path
from typing import Any

import gymnasium as gym
import pytest
import torch

pytest.importorskip("rl_games", exc_type=ImportError)

from rl_games.algos_torch.a2c_continuous import A2CAgent
from rl_games.algos_torch.a2c_discrete import DiscreteA2CAgent
from rl_games.algos_torch.sac_agent import SACAgent
from rl_games.common import vecenv
from rl_games.torch_runner import Runner
from trainer_envs import ENDS, LENGTHS, envs_of

from flatroll.trainers.rl_games import FinalObservations, FlatVecEnv, register
from flatroll.wrappers.testing import Script, ScriptedTorchEnv, decode, expected_rows, make_scripted

pytestmark = pytest.mark.filterwarnings("ignore")  # what rl_games itself warns of

SCRIPT = Script(2, lengths=LENGTHS, ends=ENDS)
ENVS = envs_of(SCRIPT)


class ExactPPO(FinalObservations, A2CAgent): ...


class ExactDiscretePPO(FinalObservations, DiscreteA2CAgent): ...


class ExactSAC(FinalObservations, SACAgent): ...


def pendulums(num_envs: int, steps: int = 5) -> Any:
    return gym.make_vec("Pendulum-v1", num_envs, "sync", max_episode_steps=steps)


def configuration(tmp_path: Path, algorithm: str, env: str = "pendulums", **changes: Any) -> dict[str, Any]:
    space = {
        "continuous": {
            "mu_activation": "None",
            "sigma_activation": "None",
            "mu_init": {"name": "default"},
            "sigma_init": {"name": "const_initializer", "val": 0},
            "fixed_sigma": True,
        }
    }
    discrete = env == "cartpoles"
    return {
        "seed": 1,
        "algo": {"name": algorithm},
        "model": {"name": "discrete_a2c" if discrete else "continuous_a2c_logstd"},
        "network": {
            "name": "actor_critic",
            "separate": False,
            "space": {"discrete": {}} if discrete else space,
            "mlp": {"units": [16], "activation": "elu", "initializer": {"name": "default"}},
        },
        "config": {
            "name": "test",
            "env_name": env,
            "device": "cpu",
            "device_name": "cpu",
            "train_dir": str(tmp_path),
            "torch_compile": False,
            "reward_shaper": {"scale_value": 0.5},
            "lr_schedule": None,
            "normalize_input": True,
            "normalize_value": True,
            "normalize_advantage": True,
            "gamma": 0.9,
            "tau": 0.95,
            "learning_rate": 1e-3,
            "e_clip": 0.2,
            "entropy_coef": 0.0,
            "critic_coef": 1.0,
            "clip_value": False,
            "grad_norm": 1.0,
            "truncate_grads": False,
            "bounds_loss_coef": 0.0,
            "ppo": True,
            "num_actors": 2,
            "horizon_length": 8,
            "minibatch_size": 16,
            "mini_epochs": 1,
            "max_epochs": 2,
            "print_stats": False,
            **changes,
        },
    }


def agent_of(kind: Any, tmp_path: Path, env: str = "pendulums", **changes: Any) -> Any:
    runner = Runner()
    runner.algo_factory.register_builder("kind", lambda **given: kind(**given))
    threads = torch.get_num_threads()
    runner.load({"params": configuration(tmp_path, "kind", env, **changes)})
    torch.set_num_threads(threads)
    return runner.algo_factory.create("kind", base_name="run", params=copy.deepcopy(runner.params))


@pytest.fixture(autouse=True)
def registered() -> None:
    register("pendulums", pendulums)
    register("cartpoles", lambda num_envs: gym.make_vec("CartPole-v1", num_envs, "sync"))


@pytest.mark.parametrize("name", ENVS)
def test_every_step_is_a_true_transition(name: str) -> None:
    env = FlatVecEnv(ENVS[name](), seed=0)
    before = decode("float32", env.reset())
    rows = []
    for _ in range(30):
        observations, rewards, dones, infos = env.step(torch.zeros(2, dtype=torch.int64))
        assert (rewards.dtype, dones.dtype) == (torch.float32, torch.uint8)
        after, final = decode("float32", observations), decode("float32", infos["final_obs"])
        for i in range(2):
            e, episode, step = before[i].tolist()
            assert (final if dones[i] else after)[i].tolist() == [e, episode, step + 1]
            assert after[i].tolist() == ([e, episode + 1, 0] if dones[i] else [e, episode, step + 1])
            rows.append((e, episode, step, rewards[i].item(), bool(dones[i]), bool(infos["time_outs"][i])))
        before = after
    true = expected_rows(SCRIPT, 30)
    flags = [
        (bool(row["terminated"] | row["truncated"]), bool(~row["terminated"] & row["truncated"]))
        for row in true
    ]
    table = true[["env", "episode", "step", "reward"]].tolist()
    assert rows == [(*row, *flag) for row, flag in zip(table, flags, strict=True)]


def test_seeds_and_dtypes() -> None:
    one, other = (vecenv.create_vec_env("pendulums", 2, seed=4) for _ in range(2))
    first = one.reset()
    assert torch.equal(first, other.reset())
    assert not torch.equal(first, one.reset())  # a seed is used once
    one.seed(4)
    assert torch.equal(first, one.reset())
    double = FlatVecEnv(make_scripted(Script(2, obs="float64")))
    assert double.reset().dtype is torch.float32
    nested = FlatVecEnv(make_scripted(Script(2, obs="dict")))
    assert nested.reset()["critic"]["image"].dtype is torch.uint8


@pytest.mark.parametrize("kind", [A2CAgent, ExactPPO])
def test_ppo_learns(kind: Any, tmp_path: Path, capsys: Any) -> None:
    agent = agent_of(kind, tmp_path)
    before = [parameter.clone() for parameter in agent.model.parameters()]
    agent.train()
    assert any((new != old).any() for new, old in zip(agent.model.parameters(), before, strict=True))


def test_discrete_actions_and_a_recurrent_network(tmp_path: Path, capsys: Any) -> None:
    agent_of(ExactDiscretePPO, tmp_path, "cartpoles").train()
    runner = Runner()
    runner.algo_factory.register_builder("kind", lambda **given: ExactPPO(**given))
    params = configuration(tmp_path, "kind", seq_length=4)
    params["network"]["rnn"] = {"name": "lstm", "units": 8, "layers": 1, "before_mlp": False}
    runner.load({"params": params})
    runner.algo_factory.create("kind", base_name="run", params=copy.deepcopy(runner.params)).train()


def rewards_of(agent: Any) -> tuple[Any, Any, Any]:
    """Play one rollout: rewards as stored, as the env gave them (shaped), and what was added."""
    given = []
    step = agent.vec_env.step

    def recorded(actions: Any) -> Any:
        observations, rewards, dones, infos = step(actions)
        given.append((rewards.clone(), infos["time_outs"].clone(), infos["final_obs"].clone()))
        return observations, rewards, dones, infos

    agent.vec_env.step = recorded
    agent.init_tensors()
    agent.obs = agent.env_reset()
    agent.set_eval()
    with torch.no_grad():
        agent.play_steps()
    stored = agent.experience_buffer.tensor_dict["rewards"].squeeze(-1)
    rewards, time_outs, finals = map(torch.stack, zip(*given, strict=True))
    return stored - 0.5 * rewards, time_outs, finals


def test_a_time_out_is_worth_the_value_of_its_last_observation(tmp_path: Path, capsys: Any) -> None:
    agent = agent_of(ExactPPO, tmp_path)
    added, time_outs, finals = rewards_of(agent)
    assert time_outs.any(1).tolist() == [False] * 4 + [True] + [False] * 3
    values = torch.stack([agent.get_values({"obs": final}).squeeze(-1) for final in finals])
    torch.testing.assert_close(added, torch.where(time_outs, 0.9 * values, 0.0))
    plain, _, _ = rewards_of(agent_of(A2CAgent, tmp_path))
    assert (plain[4] != added[4]).all()  # the reason for the base


def test_no_bootstrap_where_none_is_wanted(tmp_path: Path, capsys: Any) -> None:
    added, time_outs, _ = rewards_of(agent_of(ExactPPO, tmp_path, value_bootstrap=False))
    assert time_outs.any()
    torch.testing.assert_close(added, torch.zeros_like(added))


def test_time_limits_are_bootstrapped_where_the_trainer_s_default_is_off(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer without a default for ``value_bootstrap`` keeps None."""
    begin = A2CAgent.__init__

    def begin_without(agent: Any, base_name: Any, params: Any) -> None:
        begin(agent, base_name, params)
        agent.value_bootstrap = None

    monkeypatch.setattr(A2CAgent, "__init__", begin_without)
    added, time_outs, _ = rewards_of(agent_of(ExactPPO, tmp_path))
    assert (added[time_outs] != 0).all()


def test_what_is_refused(tmp_path: Path, capsys: Any) -> None:
    register("three", lambda num_envs: pendulums(3))
    with pytest.raises(ValueError, match="make_env of 'three' must make num_actors=2 envs, got 3"):
        vecenv.create_vec_env("three", 2)
    hiding = FlatVecEnv(ScriptedTorchEnv(SCRIPT, final_obs="absent"))
    hiding.reset()
    with pytest.raises(ValueError, match="does not show their last observations"):
        for _ in range(5):
            hiding.step(torch.zeros(2, dtype=torch.int64))
    agent = agent_of(ExactPPO, tmp_path)
    agent.vec_env.step = lambda actions: (torch.zeros(2, 3), torch.zeros(2), torch.zeros(2), {})
    agent.obs_to_tensors(torch.zeros(2, 3))
    agent.init_tensors()
    agent.env_reset()
    with pytest.raises(KeyError, match="infos has no 'final_obs'"):
        agent.env_step(torch.zeros(2, 1))
