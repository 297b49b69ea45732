"""PPO with tools: a language model looks up what it needs, turn by turn, and answers; tools' tokens are no rows.

``python -m flatroll run tool_use`` trains a randomly initialised GPT-2 of two layers in seconds on one core
(``pip install "flatroll[text]"``). A prompt names a slot of a memory that the model does not see. If it writes the
name of a slot, a tool inserts an arrow and what the slot holds: a digit, or the name of another slot. The model should
follow the names and then write the digit, which ends the text. To resume a run, repeat the command.
"""

import argparse
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributions import Categorical

from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.examples.common import parse
from flatroll.examples.text_runs import TextRun, make_actor, make_model
from flatroll.text import Sequences, TextModule, rows_of_texts

OPTIONS = {
    "env": ("pointers", "the task: there is only this one"),
    "frames": (60_000, "number of tokens that the model writes"),
    "texts": (64, "texts per batch"),
    "epochs": (3, "passes over a batch"),
    "lr": (3e-3, "initial learning rate; it falls linearly to zero"),
    "gamma": (1.0, "discount per turn"),
    "lmbda": (0.95, "lambda of GAE, per turn"),
    "clip": (0.2, "clipping range of probability ratios"),
    "entropy": (0.01, "weight of the entropy"),
    "max_grad_norm": (1.0, "maximum norm of the gradients"),
    "hidden": (32, "width of the models"),
    "log_every": (1, "tokens between two lines of the log, at least one batch"),
    "save_every": (30_000, "tokens between two checkpoints"),
    "eval_every": (15_000, "tokens between two evaluations"),
    "episodes": (200, "texts per evaluation, with the most probable tokens"),
    "film": None,
    "bfloat16": None,
    "compile": None,
}
SLOTS = DIGITS = 6  # tokens 0 to 5 name slots, 6 to 11 are digits
ARROW, BEGIN, WORDS = 12, 13, 14
HOPS, TURNS = 3, 4  # the digit is at most three slots away; a text has one turn more


class Texts(NamedTuple):
    """Columns ``[K, L]`` of K texts, and their lengths ``[K]``."""

    tokens: Tensor
    own: Tensor
    log_probs: Tensor
    rewards: Tensor
    lengths: Tensor


def draw_memory(count: int, generator: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
    """Return what the slots of K memories hold, int64 ``[K, SLOTS]``, and the slot in each prompt, ``[K]``."""
    memory = SLOTS + torch.randint(DIGITS, (count, SLOTS), generator=generator)
    order = torch.rand(count, SLOTS, generator=generator).argsort(1)
    hops = torch.randint(1, HOPS + 1, (count,), generator=generator)
    for hop in range(1, HOPS):
        longer = (hops > hop).nonzero().squeeze(1)
        memory[longer, order[longer, hop - 1]] = order[longer, hop]
    return memory, order[:, 0]


@torch.no_grad()
def write(model: Any, memory: Tensor, slot: Tensor, greedy: bool = False) -> Texts:
    """Let the model write texts, with the answers of the tool."""
    nobody = torch.zeros_like(slot, dtype=torch.bool)
    zero = torch.zeros(len(slot), device=slot.device)
    writing = ~nobody
    expected = slot
    lengths = torch.full_like(slot, 2)
    tokens, own = [torch.full_like(slot, BEGIN), slot], [nobody, nobody]
    log_probs, rewards = [zero, zero], [zero, zero]
    for _ in range(TURNS):
        dist: Any = Categorical(logits=model(input_ids=torch.stack(tokens, 1)).logits[:, -1])
        word = dist.mode if greedy else dist.sample()
        asks = word < SLOTS
        held = memory.gather(1, word.clamp(max=SLOTS - 1).unsqueeze(1)).squeeze(1)
        right = word == expected
        earned = torch.where(right, torch.where(asks, 0.2, 1.0), -0.1) * writing

        # The tool's part of a text that has ended is behind its length.
        tokens += [word, torch.full_like(slot, ARROW), held]
        own += [writing, nobody, nobody]
        log_probs += [dist.log_prob(word), zero, zero]
        rewards += [earned * ~asks, zero, earned * asks]  # a question is judged by the tool
        lengths = lengths + writing * torch.where(asks, 3, 1)
        expected = torch.where(right & asks, held, expected)
        writing = writing & asks
    columns: Any = [torch.stack(column, 1) for column in (tokens, own, log_probs, rewards)]
    return Texts._make([*columns, lengths])


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    torch.manual_seed(args.seed)
    model = make_model(WORDS, args.hidden, args.device)
    sequences = Sequences()
    value = TextModule(make_model(WORDS, args.hidden, args.device, values=True), sequences, "state_value")
    gae = GAE(gamma=args.gamma, lmbda=args.lmbda, lmbda_per="step", value_network=value)
    options: Any = {"clip_epsilon": args.clip, "entropy_coeff": args.entropy, "normalize_advantage": True}
    loss = ClipPPOLoss(make_actor(model, sequences), value, diagnostics=False, **options)
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr)

    def judge(count: int) -> Tensor:
        memory, slot = draw_memory(count, torch.Generator().manual_seed(args.test_seed))
        return write(model, memory.to(args.device), slot.to(args.device), greedy=True).rewards.sum(1)

    run = TextRun(args, model, judge, policy=loss, optimizer=optimizer)
    while run.log.frames < args.frames:
        optimizer.param_groups[0]["lr"] = args.lr * (1 - run.log.frames / args.frames)
        memory, slot = draw_memory(args.texts)
        *columns, lengths = write(model, memory.to(args.device), slot.to(args.device))
        sequences.forget()  # the texts of the previous batch
        # The limit of turns is part of the task: texts that reach it are over, and not cut off.
        batch = gae(rows_of_texts(sequences, *columns, lengths=lengths, step="turn"))
        losses: Any = {}
        for _ in range(args.epochs):
            losses = loss(batch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), args.max_grad_norm)
            optimizer.step()
        frames = run.log.frames + len(batch)
        done = batch["next", "done"]
        batch["next", "episode_reward"] = torch.zeros_like(batch["next", "reward"]).masked_scatter_(
            done, columns[3].sum(1)
        )
        stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], **losses)
        run.save(frames, len(batch), now=stop or frames >= args.frames)
        if stop:
            break
    return run.finish()


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # the models are small: a second thread costs more than it gains
    train(parse("tool_use", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
