"""The cache of a language model, under the names that transformers gives it before and since 5.24."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flatroll.text import PromptData, RolloutFromModel

Make = Callable[..., RolloutFromModel]


class Counting(nn.Module):
    """Its logits are 24 numbers that depend on all tokens so far; its cache is their sum ``[B, 24]``."""

    returned = "past_key_values"

    def __init__(self, context: float = 1.0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.table = nn.Parameter(torch.randn(24, 24, generator=generator))
        self.context = context
        self.config = SimpleNamespace(vocab_size=24, eos_token_id=0, pad_token_id=1)
        self.calls: list[tuple[int, ...]] = []

    def read(self, input_ids: Tensor, attention_mask: Tensor, cache: Tensor | None) -> Any:
        self.calls.append(tuple(input_ids.shape))
        real = attention_mask[:, -input_ids.shape[1] :].unsqueeze(-1)
        rows = self.table[input_ids] * real
        before = 0 if cache is None else cache.unsqueeze(1)
        total = rows.cumsum(1) + before
        logits = rows + self.context * (total - rows)
        output = {"logits": logits, "cache": None, "past_key_values": None} | {self.returned: total[:, -1]}
        return SimpleNamespace(**output)


class Old(Counting):
    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any, past_key_values: Any = None, **_: Any
    ) -> Any:
        return self.read(input_ids, attention_mask, past_key_values)


class New(Counting):
    returned = "cache"

    def forward(
        self, input_ids: Any, attention_mask: Any, position_ids: Any, cache: Any = None, **_: Any
    ) -> Any:
        return self.read(input_ids, attention_mask, cache)


class NewOutput(Old):
    """Code for an older transformers, whose output a newer one renames."""

    returned = "cache"


class AnyOld(Counting):
    """Names no cache, as the wrapper of an adapter does."""

    def forward(self, input_ids: Any, attention_mask: Any, **others: Any) -> Any:
        return self.read(input_ids, attention_mask, others.get("past_key_values"))


class AnyNew(Counting):
    returned = "cache"

    def forward(self, input_ids: Any, attention_mask: Any, **others: Any) -> Any:
        return self.read(input_ids, attention_mask, others.get("cache"))


class Ignoring(Counting):
    """Takes the old name among any keywords, and does not look at it."""

    def forward(self, input_ids: Any, attention_mask: Any, **_: Any) -> Any:
        return self.read(input_ids, attention_mask, None)


class Forgetful(Ignoring):
    returned = "logits"  # no cache at all

    def read(self, input_ids: Tensor, attention_mask: Tensor, cache: Tensor | None) -> Any:
        output = super().read(input_ids, attention_mask, cache)
        output.logits = self.table[input_ids]
        return output


def by_whole_texts(model: Counting, prompts: PromptData, steps: int) -> list[list[int]]:
    """Tokens drawn from passes over whole texts, all rows at once, as the generator's order wants it."""
    generator = torch.Generator().manual_seed(0)
    texts = [ids[: r + 1] for ids, r in zip(prompts.input_ids, prompts.prompt_rindex.tolist(), strict=True)]
    drawn: list[list[int]] = [[] for _ in texts]
    ended = [False] * len(texts)
    for _ in range(steps):
        logits = [
            model.read(text[None], torch.ones_like(text)[None], None).logits[0, -1].detach() for text in texts
        ]
        tokens = torch.multinomial(torch.stack(logits).softmax(-1), 1, generator=generator)
        for row, token in enumerate(tokens):
            if not ended[row]:
                drawn[row].append(int(token))
            ended[row] |= int(token) == 0
            texts[row] = torch.cat([texts[row], token])
    return drawn


@pytest.mark.parametrize("kind", [Old, New, NewOutput, AnyOld, AnyNew])
def test_each_name_of_the_cache_gives_the_tokens_of_whole_texts(
    make_rollout: Make, prompts: PromptData, kind: Any
) -> None:
    rollout = make_rollout(model=kind(), flat=True)
    batch = rollout.rollout_from_data(prompts)
    drawn = [
        batch["action"][batch["collector", "traj_ids"] == number].tolist()
        for number in rollout.sequences.numbers
    ]
    assert drawn == by_whole_texts(kind(), prompts, 10)


def test_a_model_is_compared_with_whole_texts_once(make_rollout: Make, prompts: PromptData) -> None:
    model = Old()
    rollout = make_rollout(model=model, eos_token_id=[], max_new_tokens=4)
    rollout.generate(prompts)
    # Prompts of up to 8 tokens, their first tokens, the comparison with a text of 9 tokens and its last one alone.
    assert model.calls == [(8, 8), (8, 1), (1, 9), (1, 1), (8, 1), (8, 1)]

    model.calls.clear()
    rollout.generate(prompts)
    assert model.calls == [(8, 8), (8, 1), (8, 1), (8, 1)]
    rollout.model = Ignoring()
    with pytest.raises(ValueError, match="ignores its cache"):
        rollout.generate(prompts)


def test_a_text_of_one_token_needs_no_comparison(make_rollout: Make, prompts: PromptData) -> None:
    model = Ignoring()
    make_rollout(model=model, max_new_tokens=1).generate(prompts)
    assert model.calls == [(8, 8)]


def test_a_model_that_ignores_its_cache_is_an_error(make_rollout: Make, prompts: PromptData) -> None:
    match = r"Ignoring.forward got it as past_key_values=.*without the prompt.*Name the argument.*generation_config"
    for kind in (torch.float32, torch.bfloat16):
        with pytest.raises(ValueError, match=match):
            make_rollout(model=Ignoring().to(kind)).rollout_from_data(prompts)


def test_a_model_whose_tokens_depend_on_the_last_one_alone_is_right(
    make_rollout: Make, prompts: PromptData
) -> None:
    generated = make_rollout(model=Ignoring(context=0.0)).generate(prompts)
    expected = make_rollout(model=Old(context=0.0)).generate(prompts)
    assert torch.equal(generated[0], expected[0])


def test_a_model_without_a_cache_is_an_error(make_rollout: Make, prompts: PromptData) -> None:
    with pytest.raises(
        ValueError, match=r"must return a cache.*Forgetful returned none: pass a generation_config"
    ):
        make_rollout(model=Forgetful()).rollout_from_data(prompts)
