"""Times passes over texts beside a padded batch: ``python -m benchmarks.text.bench_passes``.

Forward and backward of a small Llama with random weights over all rows of texts; thread time, one thread, contenders in
turns in one process. The padded pass runs each text whole, on rows as long as the longest one.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.text import Sequences, TextModule
from flatroll.text.sampling import CachedSteps, sample_tokens

ANSWERS = (1, 2, 8, 16)
PROMPTS = (16, 256, 1024)
DRAWN = 64
VOCABULARY = 1000


def make_model(width: int = 256, layers: int = 2, positions: int = 2048) -> Any:
    """A Llama of two layers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=width,
        intermediate_size=4 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 64,
        max_position_embeddings=positions,
    )
    return LlamaForCausalLM(config).train(False)


def make_texts(
    prompts: list[int], drawn: list[int], answers: int, share: bool
) -> tuple[Sequences, TensorDict]:
    """Some answers to each prompt, with a row for each token of them."""
    generator = torch.Generator().manual_seed(0)
    texts: list[tuple[int, Tensor]] = []
    for length in prompts:
        prompt = torch.randint(VOCABULARY, (length,), generator=generator)
        for _ in range(answers):
            count = drawn[len(texts) % len(drawn)]
            texts.append(
                (length, torch.cat([prompt, torch.randint(VOCABULARY, (count,), generator=generator)]))
            )

    sequences = Sequences()
    lengths = torch.tensor([len(text) for _, text in texts])
    heads = torch.tensor([length for length, _ in texts])
    numbers = sequences.add(torch.cat([text for _, text in texts]), lengths, heads if share else None)
    rows = [
        torch.stack([torch.full((len(text) - length,), int(number)), torch.arange(length, len(text))], 1)
        for number, (length, text) in zip(numbers, texts, strict=True)
    ]
    observation = torch.cat(rows)
    return sequences, TensorDict({"observation": observation}, [len(observation)])


def padded(model: Any, sequences: Sequences, batch: TensorDict) -> Tensor:
    """Logits of the rows from one padded batch of all texts."""
    number, length = batch["observation"].unbind(1)
    distinct, text = number.unique(return_inverse=True)
    longest = int(length.max())
    shortest = int(length.min())
    tokens, mask = sequences.padded(distinct, longest)
    count = longest - shortest + 1
    logits = model(input_ids=tokens, attention_mask=mask, use_cache=False, logits_to_keep=count).logits
    rows: Tensor = logits[text, length - shortest]
    batch.set("logits", rows)
    return rows


def positions_of(model: Any, sequences: Sequences, batch: TensorDict) -> int:
    """Tokens that a pass of `TextModule` runs, padding included."""
    ran = []
    hook = model.get_input_embeddings().register_forward_pre_hook(
        lambda _, inputs: ran.append(inputs[0].numel())
    )
    with torch.no_grad():
        module = TextModule(model, sequences)
        module(batch)  # may compare packed passes first
        ran.clear()
        module(batch)
    hook.remove()
    return sum(ran)


def bytes_of(sequences: Sequences) -> int:
    """Bytes that a table of texts keeps."""
    return sum(value.nbytes for value in sequences.state_dict().values() if isinstance(value, Tensor))


def training(model: Any, prompts: list[int], drawn: list[int], answers: int, turns: int) -> list[str]:
    """One line: positions, time and bytes of packed and padded passes."""
    sequences, batch = make_texts(prompts, drawn, answers, share=True)
    alone, _ = make_texts(prompts, drawn, answers, share=False)
    module = TextModule(model, sequences)

    def step(rows: Callable[[], Tensor]) -> None:
        model.zero_grad()
        torch.autograd.backward(rows().logsumexp(1).mean())

    times = take_turns(
        {
            "padded": lambda: step(lambda: padded(model, alone, batch.clone())),
            "packed": lambda: step(lambda: module(batch.clone())["logits"]),
        },
        turns=turns,
        clock=time.thread_time,
    )
    longest = int(batch["observation"][:, 1].max())
    return [
        f"{positions_of(model, sequences, batch):,} of {len(alone) * longest:,}",
        f"{times['padded'].median * 1e3:.0f}",
        f"{times['packed'].median * 1e3:.0f}",
        f"{ratio(times['padded'], times['packed']):.2f} x",
        f"{bytes_of(sequences) / bytes_of(alone):.2f}",
    ]


def by_prompt(turns: int) -> str:
    """Answers of equal length to one prompt."""
    return answers_to(PROMPTS, ANSWERS, turns)


def wider(turns: int) -> str:
    """The same for a model of twice the width, where attention is a smaller part."""
    return answers_to((256,), (1, 8), turns, width=512)


def answers_to(prompts: tuple[int, ...], counts: tuple[int, ...], turns: int, width: int = 256) -> str:
    """A line for each prompt and number of answers."""
    model = make_model(width)
    rows = []
    for prompt in prompts:
        for answers in counts:
            rows.append([f"{prompt:,}", str(answers), *training(model, [prompt], [DRAWN], answers, turns)])
    return table(["prompt", "answers", "positions", "padded, ms", "packed, ms", "faster", "bytes"], rows)


def by_length(turns: int) -> str:
    """Texts that share nothing."""
    model = make_model()
    generator = torch.Generator().manual_seed(0)
    rows = []
    for name, shortest, longest, count in (
        ("32 texts of 80", 80, 80, 32),
        ("8 texts of 320", 320, 320, 8),
        ("64 texts of 18 to 68", 18, 68, 64),
        ("16 texts of 58 to 508", 58, 508, 16),
    ):
        drawn = torch.randint(shortest, longest + 1, (count,), generator=generator) - 8
        rows.append([name, *training(model, [8] * count, drawn.tolist(), 1, turns)])
    return table(["", "positions", "padded, ms", "packed, ms", "faster", "bytes"], rows)


def sampling(turns: int) -> str:
    """Answers drawn to one prompt, which is run once or once for each."""
    model = make_model()
    rows = []
    for length in PROMPTS:
        prompts = torch.randint(VOCABULARY, (1, length)).expand(8, -1)
        steps = {"once": CachedSteps(model), "each": CachedSteps(model)}
        steps["each"].copies = False

        def draw(name: str, prompts: Tensor = prompts, steps: dict[str, CachedSteps] = steps) -> None:
            with torch.no_grad():
                sample_tokens(steps[name], prompts, torch.ones_like(prompts), DRAWN, eos=[], pad=0)

        times = take_turns(
            {"each": lambda draw=draw: draw("each"), "once": lambda draw=draw: draw("once")},  # type: ignore[misc]
            turns=turns,
            clock=time.thread_time,
        )
        rows.append(
            [
                f"{length:,}",
                f"{times['each'].median * 1e3:.0f}",
                f"{times['once'].median * 1e3:.0f}",
                f"{ratio(times['each'], times['once']):.2f} x",
            ]
        )
    return table(["prompt", "for each answer, ms", "once, ms", "faster"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=5, help="default: %(default)s")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name, case in (
        (f"Answers of {DRAWN} tokens to one prompt", by_prompt),
        ("The same, a model of width 512", wider),
        ("Texts that share nothing", by_length),
        (f"8 answers of {DRAWN} tokens drawn to one prompt", sampling),
    ):
        print(f"**{name}**\n\n{case(args.turns)}\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
