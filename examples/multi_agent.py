"""Multi-agent PPO with shared weights and a central critic.

``python -m flatroll run multi_agent`` trains on VMAS' balance (``pip install "flatroll[agents]"``), ``--env NAME`` on
another VMAS scenario, ``--env mpe2.simple_spread_v3:parallel_env`` on a PettingZoo game, given by the function that
creates it. Each agent of each game has its own rows. The policy sees its own observation, the critic those of the whole
team: `agents_of` finds the rows of one game at one time. To resume a run, repeat the command.
"""

import argparse
from importlib import import_module
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from tensordict import TensorDict
from torch import Tensor

from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.examples.common import Run, parse
from flatroll.layout import agents_of
from flatroll.modules import actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import PettingZooSource, RewardSum, as_vector_env

OPTIONS = {
    "env": ("balance", "a VMAS scenario, or MODULE:FUNCTION of a PettingZoo parallel env"),
    "frames": (400_000, "number of rows, one per agent and step"),
    "games": (32, "number of games"),
    "agents": (3, "agents per VMAS game"),
    "steps": (100, "steps per game in a batch"),
    "max_steps": (100, "maximum steps of a VMAS episode"),
    "epochs": (10, "passes over a batch"),
    "minibatch": (1_200, "rows per gradient step"),
    "lr": (5e-4, "initial learning rate"),
    "last_lr": (1.0, "final learning rate as a fraction of the initial one; it falls linearly"),
    "gamma": (0.99, "discount"),
    "lmbda": (0.95, "lambda of GAE"),
    "clip": (0.2, "clipping range of probability ratios"),
    "entropy": (0.001, "weight of the entropy"),
    "max_grad_norm": (1.0, "maximum norm of the gradients"),
    "hidden": (128, "width of the networks"),
    "episodes": (60, "agent episodes per evaluation, with the most probable actions"),
    "film": None,
}


def make_env(args: argparse.Namespace, games: int, seed: int) -> RewardSum:
    """Create games, whose agents are the rows of one vector env."""
    if ":" in args.env:
        module, function = args.env.split(":")
        make = getattr(import_module(module), function)
        return RewardSum(as_vector_env(PettingZooSource([make() for _ in range(games)])))
    try:
        import vmas  # type: ignore[import-not-found]
    except ImportError as error:
        raise ImportError(f'--env {args.env} needs VMAS: pip install "flatroll[agents]"') from error
    options: Any = {"max_steps": args.max_steps, "terminated_truncated": True, "clamp_actions": True}
    made = vmas.make_env(args.env, num_envs=games, n_agents=args.agents, seed=seed, **options)
    return RewardSum(as_vector_env(made))


def add_team(batch: TensorDict, agents: int) -> TensorDict:
    """Write the joint observation into each row: ``"team"`` and ``("next", "team")``, ``[N, agents * obs]``."""
    rows = agents_of(batch, max_num_agents=agents, partial=True)  # [J, agents], -1 for an absent agent
    there = rows >= 0
    for key, source in (("team", "observation"), (("next", "team"), ("next", "observation"))):
        seen = cast(Tensor, batch[source])
        joint = (seen[rows] * there[..., None]).flatten(1)  # [J, agents * obs], zeros for absent agents
        team = seen.new_empty(len(batch), joint.shape[1])
        team[rows[there]] = joint[:, None].expand(-1, agents, -1)[there]
        batch.set(key, team)
    return batch


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    torch.manual_seed(args.seed)
    env = make_env(args, args.games, args.seed)
    agents = int(env.stream.source.agents[0].max()) + 1  # type: ignore[index]
    size = agents * env.single_observation_space.shape[0]  # type: ignore[index]
    team = spaces.Dict(team=spaces.Box(-np.inf, np.inf, (size,), np.float32))
    seen = SimpleNamespace(single_observation_space=team, single_action_space=env.single_action_space)
    body: Any = {"hidden": 2 * (args.hidden,), "norm": False, "device": args.device}
    policy, value = actor(env, squash=False, **body), critic(seen, **body)
    gae = GAE(gamma=args.gamma, lmbda=args.lmbda, value_network=value)
    options: Any = {"clip_epsilon": args.clip, "entropy_coeff": args.entropy, "normalize_advantage": True}
    loss = ClipPPOLoss(policy, value, diagnostics=False, **options)
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr)
    precision = torch.bfloat16 if args.bfloat16 else None
    step = update_step(
        loss, optimizer, max_grad_norm=args.max_grad_norm, compile=args.compile, autocast=precision
    )

    rows = args.steps * env.num_envs
    total = -(-args.frames // rows) * rows
    collected: Any = {"frames_per_batch": rows, "total_frames": total, "device": args.device}
    collector = Collector(env, policy, seed=args.reset_seed, **collected)
    test_env = make_env(args, max(1, args.episodes // agents), args.seed + 1)
    run = Run(args, policy, test_env, collector, policy=loss, optimizer=optimizer)

    for batch in collector:
        frames = collector.frames
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (1 - args.last_lr) * frames / total)
        data = gae(add_team(batch, agents)).exclude("next")
        losses = step.epochs(data, epochs=args.epochs, minibatch=args.minibatch)[-1]
        stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], **losses)
        run.save(frames, rows, now=stop or frames == total)
        if stop:
            break
    return run.finish()


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    train(parse("multi_agent", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
