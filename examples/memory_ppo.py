"""PPO with any memory of flatroll, on tasks that need one: three of POPGym's, and a recall over 100 steps.

``python -m flatroll run memory_ppo --memory transformer`` names the card suit shown three steps ago. With ``--env
Recall --context 128 --layers 1 --minibatches 4 --frames 300000`` it names at step 100 what it saw at step 0. Guessing
returns -0.5, perfect memory 1. The rules are in ``flatroll/examples/memory_tasks.py``. To resume a run that was
stopped, repeat the command.
"""

from typing import Any

import torch

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss, update_step
from flatroll.examples import common
from flatroll.examples.memory_tasks import TASKS
from flatroll.layout.checks import check_choice
from flatroll.modules import TransformerModule, actor, critic
from flatroll.rollouts import Collector
from flatroll.wrappers import RewardSum

OPTIONS = {
    "env": ("RepeatPrevious", "RepeatPrevious, Autoencode, Autoencode12 (cards), CountRecall or Recall"),
    "memory": ("transformer", "gru, lstm, mingru, linear, lru, s6, ffm, deltanet or transformer"),
    "frames": (100_000, "maximum number of frames"),
    "num_envs": (64, "environments; a batch is one episode of each"),
    "hidden": (64, "width of the networks"),
    "layers": (2, "layers of the memory"),
    "context": (64, "rows that a layer of the transformer sees"),
    "epochs": (4, "passes over a batch, on average"),
    "minibatches": (2, "minibatches per pass"),
    "gamma": (0.5, "discount; each answer is paid at once, and changes nothing"),
    "entropy": (0.01, "weight of the entropy bonus"),
    "lr": (3e-3, "initial learning rate; it falls linearly"),
    "log_every": (10_000, "frames between two lines of the log, at least one batch"),
    "episodes": (64, "episodes per evaluation, with the most probable actions"),
    "film": None,  # nothing to draw
    "compile": None,  # one mask over all rows would replace attention by runs
}


def make_policy(env: Any, args: Any) -> Any:
    """Build an actor whose memory has the layers and the context asked for."""
    policy = actor(env, hidden=2 * (args.hidden,), recurrent=args.memory, norm=False)
    _, memory, *_ = policy.module  # behind the encoder, in front of the head
    more: dict[str, Any] = {}
    if isinstance(memory, TransformerModule):
        more = {"context": args.context, "gate": "gtrxl"}
    keys = {"in_keys": memory.in_keys, "out_keys": memory.out_keys}
    policy.module[1] = type(memory)(args.hidden, args.hidden, num_layers=args.layers, **keys, **more)
    return policy.to(args.device)


def train(args: Any) -> dict[str, Any]:
    """Collect an episode of each env, estimate, update from whole episodes; return the result."""
    torch.manual_seed(args.seed)
    check_choice("env", args.env, tuple(TASKS))
    task = TASKS[args.env](args.num_envs)
    env = RewardSum(task)
    policy = make_policy(env, args)
    value = critic(env, actor=policy, shared=True, device=args.device)
    rows = args.num_envs * task.steps
    total = -(-args.frames // rows) * rows
    collected: Any = {"frames_per_batch": rows, "total_frames": total, "compact_obs": True}
    collector = Collector(env, policy, seed=args.reset_seed, device=args.device, **collected)
    gae = GAE(gamma=args.gamma, lmbda=0.95, value_network=value, shifted=True)
    loss = ClipPPOLoss(
        policy, value[-1], entropy_coeff=args.entropy, loss_critic_type="l2", normalize_advantage=True
    )
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr, eps=1e-5)
    precision = torch.bfloat16 if args.bfloat16 else None
    step = update_step(loss, optimizer, max_grad_norm=0.5, autocast=precision)
    sampler = SliceSampler(slice_len=task.steps, fill=False)  # whole episodes
    buffer = ReplayBuffer(storage=LazyTensorStorage(rows, device=args.device), sampler=sampler)
    test_env = TASKS[args.env](args.episodes)
    run = common.Run(args, policy, test_env, collector, policy=loss, optimizer=optimizer, buffer=buffer)
    losses: Any = {}
    for batch in collector:
        gae(batch, final=collector.final)
        buffer.extend(batch)
        for _ in range(args.epochs * args.minibatches):
            losses = step(buffer.sample(rows // args.minibatches))
        frames = collector.frames
        optimizer.param_groups[0]["lr"] = args.lr * (1 - frames / (1.02 * total))
        stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], **losses)
        run.save(frames, rows, now=stop or frames == total)
        if stop:
            break
    return run.finish()


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    train(common.parse("memory_ppo", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
