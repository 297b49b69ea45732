"""PPO on vector observations: discrete actions (CartPole) or continuous ones (MuJoCo), in one file.

``python -m flatroll.examples.ppo`` balances CartPole. ``--env envpool:HalfCheetah-v4 --frames 1000000`` takes the
settings for continuous control: observations and rewards normalised on the way, a Gaussian policy, more epochs.
"""

import argparse
import time
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.wrappers import vector as wrap
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModule
from torch import Tensor, nn
from torch.distributions import Categorical, Independent, Normal
from tqdm.auto import tqdm

from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum, as_vector_env

SETTINGS = {  # for discrete actions, and for continuous ones
    True: {"rows": 1024, "minibatches": 4, "epochs": 4, "lr": 5e-4, "entropy": 0.01},
    False: {"rows": 2048, "minibatches": 16, "epochs": 10, "lr": 5e-4, "entropy": 0.0},
}
READ = ("observation", "action", "action_log_prob", "advantage", "value_target", "state_value")


def make_env(name: str, num_envs: int, seed: int) -> Any:
    """Create a Gymnasium env, or ``envpool:ID``; continuous ones get normalised observations and rewards."""
    if name.startswith("envpool:"):
        import envpool

        name = name.removeprefix("envpool:")
        env: Any = as_vector_env(envpool.make_gymnasium(name, num_envs=num_envs, seed=seed))
    else:
        env = as_vector_env(gym.make_vec(name, num_envs=num_envs))
    env = RewardSum(env)
    if isinstance(env.single_action_space, gym.spaces.Discrete):
        return env
    space = gym.spaces.Box(-10, 10, env.single_observation_space.shape, np.float32)
    env = wrap.NormalizeObservation(wrap.ClipAction(env))
    env = wrap.TransformObservation(
        env, lambda seen: np.clip(seen, -10, 10).astype(np.float32), single_observation_space=space
    )
    return wrap.TransformReward(wrap.NormalizeReward(env), lambda reward: np.clip(reward, -10, 10))


def mlp(inputs: int, outputs: int, gain: float) -> nn.Sequential:
    """Create an MLP with two hidden layers and orthogonal weights, the last layer's scaled by ``gain``."""
    layers = [nn.Linear(inputs, 64), nn.Linear(64, 64), nn.Linear(64, outputs)]
    for layer, scale in zip(layers, (2**0.5, 2**0.5, gain), strict=True):
        nn.init.orthogonal_(layer.weight, scale)
        nn.init.zeros_(layer.bias)
    return nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])


class Gaussian(Independent):  # type: ignore[type-arg]  # at run time it takes none
    """A normal distribution over actions, independent per dim, with one log-probability for all dims."""

    def __init__(self, loc: Tensor, scale: Tensor, validate_args: bool) -> None:
        super().__init__(Normal(loc, scale, validate_args), 1, validate_args)


class LocScale(nn.Module):
    """Outputs a mean from a network, and a learned standard deviation that ignores the observation."""

    def __init__(self, net: nn.Module, size: int) -> None:
        super().__init__()
        self.net, self.log_scale = net, nn.Parameter(torch.zeros(size))

    def forward(self, observation: Tensor) -> tuple[Tensor, Tensor]:
        loc = self.net(observation)
        return loc, self.log_scale.exp().expand_as(loc)


def make_agent(env: Any) -> tuple[ProbabilisticTensorDictSequential, TensorDictModule]:
    """Create actor and critic, with separate networks."""
    inputs, space = env.single_observation_space.shape[0], env.single_action_space
    discrete = isinstance(space, gym.spaces.Discrete)
    size = int(space.n) if discrete else space.shape[0]
    read: Any = ["logits"] if discrete else ["loc", "scale"]
    net: nn.Module = mlp(inputs, size, 0.01) if discrete else LocScale(mlp(inputs, size, 0.01), size)
    kind: Any = {"distribution_class": Categorical if discrete else Gaussian}
    kind["distribution_kwargs"] = {"validate_args": False}  # a check costs as much as a small network
    parts: list[Any] = [
        TensorDictModule(net, ["observation"], read),
        Sampler(read, ["action"], return_log_prob=True, **kind),
    ]
    critic = TensorDictModule(mlp(inputs, 1, 1.0), ["observation"], ["state_value"])
    return ProbabilisticTensorDictSequential(*parts), critic


def train(name: str, frames: int, seed: int, num_envs: int = 32) -> dict[str, float]:
    """Train for ``frames`` frames; return the mean return of the last 100 episodes and the seconds."""
    torch.manual_seed(seed)
    env = make_env(name, num_envs, seed)
    args = argparse.Namespace(**SETTINGS[isinstance(env.single_action_space, gym.spaces.Discrete)])
    actor, critic = make_agent(env)
    total = -(-frames // args.rows) * args.rows
    own_seed = None if name.startswith("envpool:") else seed  # envpool has its seed already
    collector = Collector(env, actor, frames_per_batch=args.rows, total_frames=total, seed=own_seed)
    gae = GAE(gamma=0.99, lmbda=0.95, value_network=critic)
    critic_options: Any = {"critic_coeff": 0.25, "loss_critic_type": "l2", "clip_value": 0.2}
    loss = ClipPPOLoss(actor, critic, entropy_coeff=args.entropy, normalize_advantage=True, **critic_options)
    weights = list(loss.parameters())
    optimizer = torch.optim.Adam(weights, lr=args.lr, eps=1e-5, fused=True)
    returns: list[float] = []
    start = time.perf_counter()
    for batch in tqdm(collector, total=total // args.rows, unit=" batches", disable=None):
        returns += batch["next", "episode_reward"][batch["next", "done"]].tolist()
        rows = gae(batch).select(*READ)
        for _ in range(args.epochs):
            for some in torch.randperm(args.rows).chunk(args.minibatches):
                losses = loss(rows[some])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                nn.utils.clip_grad_norm_(weights, 0.5, foreach=True)
                optimizer.step()
        optimizer.param_groups[0]["lr"] = args.lr * (1 - collector.frames / (total + args.rows))
    collector.shutdown()
    return {
        "return": float(np.mean(returns[-100:] or [0.0])),
        "frames": total,
        "s": time.perf_counter() - start,
    }


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--env", default="CartPole-v1", help="an id, or envpool:ID (default: %(default)s)")
    parser.add_argument("--num-envs", type=int, default=32, help="stepped at once (default: %(default)s)")
    parser.add_argument("--frames", type=int, default=500_000, help="to learn from (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of weights, actions and envs (%(default)s)")
    args = parser.parse_args(argv)
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gives
    result = train(args.env, args.frames, args.seed, args.num_envs)
    shown = ", ".join(f"{key} {value:,.1f}".removesuffix(".0") for key, value in result.items())
    print(f"{args.env}, seed {args.seed}: {shown}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
