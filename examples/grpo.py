"""GRPO: a language model learns from several answers to each prompt, compared with one another; no critic.

``python -m flatroll run grpo`` trains a randomly initialised GPT-2 of two layers to write digits in reverse order, in
seconds on one core (``pip install "flatroll[text]"``); ``--env sort`` and ``--env copy`` are other tasks. The reward of
an answer is the fraction of its digits that are right. To resume a run, repeat the command.
"""

import argparse
from typing import Any

import torch
from torch import Tensor

from flatroll.estimators import ClipPPOLoss, GroupAdvantage
from flatroll.examples.common import parse
from flatroll.examples.text_runs import TextRun, make_actor, make_model
from flatroll.text import PromptData, RolloutFromModel

OPTIONS = {
    "env": ("reverse", "what to do with the digits of a prompt: reverse, sort or copy"),
    "frames": (100_000, "number of generated tokens"),
    "digits": (3, "digits of a prompt, and of an answer"),
    "prompts": (32, "prompts per batch"),
    "answers": (8, "answers to each prompt"),
    "epochs": (2, "passes over a batch"),
    "lr": (2e-3, "initial learning rate; it falls linearly to zero"),
    "clip": (0.2, "clipping range of probability ratios"),
    "entropy": (0.01, "weight of the entropy"),
    "max_grad_norm": (1.0, "maximum norm of the gradients"),
    "hidden": (64, "width of the model"),
    "log_every": (1, "tokens between two lines of the log, at least one batch"),
    "save_every": (50_000, "tokens between two checkpoints"),
    "eval_every": (25_000, "tokens between two evaluations"),
    "episodes": (200, "answers per evaluation, with the most probable tokens"),
    "film": None,
    "bfloat16": None,
    "compile": None,
}
EQUALS, WORDS = 10, 12  # tokens 0 to 9 are digits


class Task:
    """Prompts of digits and an equals sign, and the rewards of answers."""

    def __init__(self, name: str, digits: int, device: str) -> None:
        if name not in ("reverse", "sort", "copy"):
            raise ValueError(f"--env must be reverse, sort or copy, got {name!r}")
        self.name = name
        self.digits = digits
        self.device = device

    def draw(self, count: int, generator: torch.Generator | None = None) -> PromptData:
        """Draw prompts; their labels are the right answers."""
        digits = torch.randint(10, (count, self.digits), generator=generator).to(self.device)
        labels = digits
        if self.name == "reverse":
            labels = digits.flip(1)
        if self.name == "sort":
            labels = digits.sort(1).values
        ids = torch.nn.functional.pad(digits, (0, 1), value=EQUALS)
        last = torch.full((count,), self.digits, device=self.device)
        return PromptData(ids, torch.ones_like(ids), last, labels=labels, batch_size=[count])

    def score(self, input_ids: Tensor, attention_mask: Tensor, prompt_labels: Tensor) -> tuple[None, Tensor]:
        """The fraction of right digits behind each prompt; a prompt without an answer has none."""
        answers = input_ids[:, self.digits + 1 :]
        if not answers.shape[1]:
            return None, attention_mask.new_zeros(len(input_ids), dtype=torch.float32)
        return None, (answers == prompt_labels).float().mean(1)


def train(args: argparse.Namespace) -> dict[str, Any]:
    """Train, resume where there is a checkpoint, evaluate; return the result."""
    torch.manual_seed(args.seed)
    task = Task(args.env, args.digits, args.device)
    model = make_model(WORDS, args.hidden, args.device)
    texts: Any = {
        "max_new_tokens": args.digits,
        "num_answers": args.answers,
        "eos_token_id": [],
        "flat": True,
    }
    # Without a penalty on the divergence from it, the reference is not needed.
    rollout = RolloutFromModel(model, model, task.score, kl_coef=0.0, **texts)
    compare = GroupAdvantage()
    options: Any = {"clip_epsilon": args.clip, "entropy_coeff": args.entropy, "critic_coeff": None}
    loss = ClipPPOLoss(make_actor(model, rollout.sequences), diagnostics=False, **options)
    optimizer = torch.optim.Adam(loss.parameters(), lr=args.lr)

    def judge(count: int) -> Tensor:
        prompts: Any = task.draw(count, torch.Generator().manual_seed(args.test_seed))
        ids = prompts.input_ids
        with torch.no_grad():
            for _ in range(args.digits):
                ids = torch.cat([ids, model(input_ids=ids).logits[:, -1:].argmax(-1)], 1)
        return task.score(ids, torch.ones_like(ids), prompts.labels)[1]

    run = TextRun(args, model, judge, policy=loss, optimizer=optimizer)
    rows = args.prompts * args.answers * args.digits
    total = -(-args.frames // rows) * rows
    for frames in range(run.log.frames + rows, total + 1, rows):
        optimizer.param_groups[0]["lr"] = args.lr * (1 - (frames - rows) / total)
        rollout.sequences.forget()  # the texts of the previous batch
        batch = compare(rollout.rollout_from_data(task.draw(args.prompts)))
        losses: Any = {}
        for _ in range(args.epochs):
            losses = loss(batch)
            optimizer.zero_grad()
            (losses["loss_objective"] + losses["loss_entropy"]).backward()
            torch.nn.utils.clip_grad_norm_(loss.parameters(), args.max_grad_norm)
            optimizer.step()
        batch["next", "episode_reward"] = batch["next", "reward_raw"]  # an answer is paid once, at its end
        stop = run.note(batch, frames, lr=optimizer.param_groups[0]["lr"], **losses)
        run.save(frames, rows, now=stop or frames == total)
        if stop:
            break
    return run.finish()


def main(argv: list[str] | None = None) -> int:
    """Train once and print the result."""
    torch.set_num_threads(1)  # the model is small: a second thread costs more than it gains
    train(parse("grpo", argv))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
