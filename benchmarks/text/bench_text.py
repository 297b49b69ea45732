"""Times flat text rollouts beside padded ones: ``python -m benchmarks.text.bench_text``.

Thread time, contenders in turns in one process. TorchRL is left out where it is not installed, or with ``--alone``.
"""

import argparse
import importlib
import importlib.util
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.text import PromptData, RolloutFromModel

TEXTS, PROMPT, STEPS = 32, 256, 128
END = 50256  # TorchRL knows no other token that ends a text


def no_score(input_ids: Tensor, attention_mask: Tensor) -> tuple[None, Tensor]:
    return None, torch.zeros(len(input_ids))


def full_prompts(texts: int, length: int) -> PromptData:
    """Prompts that fill their rows."""
    ids = torch.randint(END, (texts, length), generator=torch.Generator().manual_seed(0))
    return PromptData(ids, torch.ones_like(ids), torch.full((texts,), length - 1), batch_size=[texts])


def bytes_of(batch: TensorDict, rollout: RolloutFromModel | None = None) -> int:
    """Bytes of all columns, and of the texts that a flat batch refers to."""
    kept = [] if rollout is None else list(rollout.sequences.state_dict().values())
    return sum(column.nbytes for column in [*batch.values(True, True), *kept] if isinstance(column, Tensor))


def assembly(peer: Any) -> str:
    """From tokens, log-probabilities and scores to a batch; no text ends early, so no row is padding."""
    prompts = full_prompts(TEXTS, PROMPT)
    model = SimpleNamespace(
        config=SimpleNamespace(
            eos_token_id=END, pad_token_id=None, vocab_size=END + 1, is_encoder_decoder=False
        )
    )
    generated = torch.cat([prompts.input_ids, torch.randint(END, (TEXTS, STEPS))], 1)
    drawn = (generated, torch.randn(TEXTS, STEPS, 1), torch.randn(TEXTS, STEPS))
    rollouts = {
        name: RolloutFromModel(model, None, no_score, max_new_tokens=STEPS, flat=name == "flat")
        for name in ("flat", "flatroll, [B, T, L]")
    }
    made: dict[str, Any] = {}

    def run_ours(name: str) -> None:
        rollouts[name].sequences.forget()
        made[name] = rollouts[name].create_rollout_td(prompts, *drawn)

    case: dict[str, Callable[[], object]] = {name: lambda name=name: run_ours(name) for name in rollouts}  # type: ignore[misc]
    if peer:
        theirs = peer.RolloutFromModel(None, None, no_score, max_new_tokens=STEPS)

        def run_theirs() -> None:
            made["torchrl, [B, T, L]"] = theirs.create_rollout_td(prompts, *drawn)

        case["torchrl, [B, T, L]"] = run_theirs
    times = take_turns(case, turns=9, calls=20, clock=time.thread_time)
    flat = bytes_of(made["flat"], rollouts["flat"])
    rows = []
    for name, timing in times.items():
        size = flat if name == "flat" else bytes_of(made[name])
        rows.append(
            [
                name,
                f"{timing.median * 1e3:.2f}",
                f"{ratio(timing, times['flat']):.0f} x",
                f"{size / 1e6:.2f}",
                f"{size / flat:.0f} x",
            ]
        )
    return table(["", "ms", "of flat", "MB", "of flat"], rows)


def drawing(peer: Any) -> str:
    """A whole rollout of a two-layer model with random weights: tokens, log-probabilities, KL, batch."""
    from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel

    size: dict[str, Any] = {"n_positions": 256, "n_embd": 64, "n_layer": 2, "n_head": 2}
    prompts, steps = full_prompts(16, 64), 48
    rows = []
    for vocabulary in (1000, END + 1):
        config = GPT2Config(
            vocab_size=vocabulary, eos_token_id=None, bos_token_id=None, pad_token_id=0, **size
        )
        models: list[Any] = [GPT2LMHeadModel(config).train(False) for _ in range(2)]
        batch = prompts.clone()
        batch.input_ids %= vocabulary
        options: dict[str, Any] = {"max_new_tokens": steps, "flat": True, "eos_token_id": []}
        plain: Any = GenerationConfig()  # type: ignore[no-untyped-call]
        own = RolloutFromModel(models[0], models[1], no_score, **options)
        by_generate = RolloutFromModel(models[0], models[1], no_score, **options, generation_config=plain)
        case: dict[str, Callable[[], object]] = {
            "flat": lambda own=own, batch=batch: own.rollout_from_data(batch),  # type: ignore[misc]
            "flat, by the model's generate": lambda r=by_generate, batch=batch: r.rollout_from_data(batch),  # type: ignore[misc]
        }
        if peer and vocabulary > END:
            theirs = peer.RolloutFromModel(*models, no_score, max_new_tokens=steps)
            case["torchrl, [B, T, L]"] = lambda batch=batch, theirs=theirs: theirs.rollout_from_data(batch)  # type: ignore[misc]
        times = take_turns(case, turns=3, clock=time.thread_time)
        for name, timing in times.items():
            own.sequences.forget()
            speed = f"{16 * steps / timing.median:,.0f}"
            rows.append([f"{vocabulary:,}", name, speed, f"{ratio(timing, times['flat']):.2f} x"])
    return table(["tokens known", "", "tokens/s", "time, of flat"], rows)


def main(arguments: list[str] | None = None) -> int:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--alone", action="store_true", help="without TorchRL")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    peer = None
    if not args.alone and importlib.util.find_spec("torchrl"):
        peer = importlib.import_module("torchrl.data.llm.utils")
    title = f"From tokens to a batch: {TEXTS} texts, prompts of {PROMPT} tokens, {STEPS} drawn ones"
    for name, case in (
        (title, assembly),
        ("Whole rollouts: 16 prompts of 64 tokens, 48 drawn ones", drawing),
    ):
        print(f"**{name}**\n\n{case(peer)}\n", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
