"""Compares the clipped loss on texts with that of TRL, an optional package: ``python -m benchmarks.peers.trl_grpo``.

The same model, answers to the same prompts, log-probabilities of the policy that wrote them, and advantages. TRL's
``GRPOTrainer`` computes its loss (``loss_type="bnpo"``: the mean over tokens, as ours) on prompts padded on the left
and answers padded on the right. Losses and gradients are compared, and timed forward and backward in turns in one
process, with the thread's clock. TRL's loss also computes entropies, without gradient.
"""

import argparse
import importlib
import importlib.util
import tempfile
import time
from typing import Any

import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch import Tensor
from torch.distributions import Categorical

from benchmarks.measure.timing import ratio, table, take_turns
from benchmarks.text.bench_passes import VOCABULARY, make_model
from flatroll.estimators import ClipPPOLoss
from flatroll.text import Sequences, TextModule

CLIP = 0.2


class Texts:
    """Answers of many lengths to some prompts: what the policy wrote, with log-probabilities and advantages.

    Args:
        model: the policy; its log-probabilities now, a little changed, are those of the policy that wrote.
        prompts: tokens of each prompt.
        answers: how many to each.
        longest: most tokens of an answer; the shortest has half of them.
    """

    def __init__(self, model: Any, prompts: list[int], answers: int, longest: int) -> None:
        draw = torch.Generator().manual_seed(0)
        texts = []
        for length in prompts:
            prompt = torch.randint(2, VOCABULARY, (length,), generator=draw)
            for _ in range(answers):
                count = int(torch.randint(longest // 2, longest + 1, (1,), generator=draw))
                texts.append((prompt, torch.randint(2, VOCABULARY, (count,), generator=draw)))
        self.texts = texts
        self.advantage = torch.randn(len(texts), generator=draw)

        self.old = []
        for prompt, answer in texts:
            with torch.no_grad():
                logits = model(input_ids=torch.cat([prompt, answer])[None]).logits[0, len(prompt) - 1 : -1]
            now = logits.log_softmax(-1).gather(1, answer[:, None]).squeeze(1)
            self.old.append(now + 0.2 * torch.randn(len(answer), generator=draw))

    def flat(self) -> tuple[Sequences, TensorDict]:
        """The table of texts, and a row for each token of the answers."""
        sequences = Sequences()
        whole = [torch.cat(pair) for pair in self.texts]
        lengths = torch.tensor([len(text) for text in whole])
        prompts = torch.tensor([len(prompt) for prompt, _ in self.texts])
        counts = lengths - prompts
        numbers = sequences.add(torch.cat(whole), lengths, prompts)

        within = torch.cat([torch.arange(int(count)) for count in counts])
        columns = {
            "observation": torch.stack(
                [numbers.repeat_interleave(counts), prompts.repeat_interleave(counts) + within], 1
            ),
            "action": torch.cat([answer for _, answer in self.texts]),
            "action_log_prob": torch.cat(self.old),
            "advantage": self.advantage.repeat_interleave(counts).unsqueeze(1),
        }
        return sequences, TensorDict(columns, [int(counts.sum())])

    def padded(self) -> dict[str, Tensor]:
        """The inputs of TRL's loss."""
        prompts = [prompt for prompt, _ in self.texts]
        answers = [answer for _, answer in self.texts]

        def left(rows: list[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side="left")

        def right(rows: list[Tensor]) -> Tensor:
            return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

        return {
            "prompt_ids": left(prompts),
            "prompt_mask": left([torch.ones_like(row) for row in prompts]),
            "completion_ids": right(answers),
            "completion_mask": right([torch.ones_like(row) for row in answers]),
            "old_per_token_logps": right(self.old),
            "advantages": self.advantage,
        }


def make_trainer(model: Any, folder: str) -> Any:
    """TRL's trainer around a model; its data set and reward are never used."""
    from datasets import Dataset

    from flatroll.examples.text.emit_a_token import train_tokenizer

    trl = importlib.import_module("trl")
    config = trl.GRPOConfig(
        folder,
        loss_type="bnpo",
        beta=0.0,
        epsilon=CLIP,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        num_generations=8,
        per_device_train_batch_size=8,
    )
    data = Dataset.from_dict({"prompt": ["I like"] * 8})
    trainer = trl.GRPOTrainer(
        model,
        lambda completions, **_: [0.0] * len(completions),
        config,
        data,
        processing_class=train_tokenizer(),
    )
    model.train(False)
    return trainer


def make_loss(model: Any, sequences: Sequences) -> ClipPPOLoss:
    """The clipped loss of a model on rows of texts."""
    sampler = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    parts: list[Any] = [TextModule(model, sequences), sampler]
    actor = ProbabilisticTensorDictSequential(*parts)
    return ClipPPOLoss(actor, clip_epsilon=CLIP, entropy_bonus=False)


def compare(model: Any, trainer: Any, name: str, texts: Texts, turns: int) -> list[str]:
    """One line: both losses, the largest difference of gradients, and times."""
    sequences, batch = texts.flat()
    loss = make_loss(model, sequences)
    inputs = texts.padded()
    found: dict[str, tuple[float, list[Tensor]]] = {}

    def step(name: str, value: Tensor) -> None:
        parameters = list(model.parameters())
        found[name] = (float(value.detach()), list(torch.autograd.grad(value, parameters)))

    times = take_turns(
        {
            "trl": lambda: step("trl", trainer._compute_loss(model, inputs)),
            "ours": lambda: step("ours", loss(batch.clone())["loss_objective"]),
        },
        turns=turns,
        clock=time.thread_time,
    )
    pairs = list(zip(found["ours"][1], found["trl"][1], strict=True))
    apart = max(float((ours - theirs).abs().max()) for ours, theirs in pairs)
    scale = max(float(theirs.abs().max()) for _, theirs in pairs)
    if abs(found["ours"][0] - found["trl"][0]) > 1e-5 or apart > 1e-5 * max(scale, 1.0):
        raise AssertionError(
            f"{name}: losses {found['ours'][0]} and {found['trl'][0]}, gradients {apart} apart"
        )
    return [
        name,
        f"{found['ours'][0]:.6f}",
        f"{found['trl'][0]:.6f}",
        f"{apart:.0e}",
        f"{times['ours'].median * 1e3:.0f}",
        f"{times['trl'].median * 1e3:.0f}",
        f"{ratio(times['trl'], times['ours']):.2f} x",
    ]


def main(arguments: list[str] | None = None) -> int:
    """Print the table, or why there is none."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args(arguments)
    if importlib.util.find_spec("trl") is None:
        print("skipped: trl is not installed (pip install trl)")
        return 0

    torch.set_num_threads(1)
    model = make_model()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, folder)
        for name, prompts, answers, longest in (
            ("8 answers to a prompt of 256", [256], 8, 64),
            ("4 answers to each of 4 prompts of 20 to 200", [20, 60, 120, 200], 4, 64),
            ("16 prompts of 32, an answer to each", [32] * 16, 1, 64),
        ):
            texts = Texts(model, prompts, answers, longest)
            rows.append(compare(model, trainer, name, texts, args.turns))
    header = ["", "loss", "trl's", "gradients apart", "ms", "trl's", "faster"]
    print(table(header, rows))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
