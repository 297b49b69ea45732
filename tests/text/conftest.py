"""A tokenizer trained on the fly, and models with two layers and random weights: nothing is downloaded."""

import socket
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from flatroll.text import PromptData

WORDS = "the cat sat on a mat . I like tea and you like milk with honey in the morning".split()


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test of this folder may open a connection."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    yield


def train_tokenizer(size: int = 120, texts: int = 200) -> Any:
    """A byte-level BPE with <eos> = 0 and <pad> = 1."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=["<eos>", "<pad>"],
        show_progress=False,
        initial_alphabet=sorted({letter for word in WORDS for letter in word} | {"Ġ"}),
    )
    bpe.train_from_iterator([" ".join(WORDS)] * texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer()


def make_model(seed: int = 0, **changes: Any) -> Any:
    """A GPT-2 of two layers over 24 tokens, three of which end a text."""
    pytest.importorskip("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(seed)
    settings: dict[str, Any] = {"vocab_size": 24, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    settings |= {"bos_token_id": 0, "eos_token_id": [0, 3, 7], "pad_token_id": 1} | changes
    model = GPT2LMHeadModel(GPT2Config(**settings))
    with torch.no_grad():
        model.lm_head.weight.mul_(40)  # far from uniform
    return model.eval()


@pytest.fixture(scope="session")
def model() -> Any:
    return make_model(0)


@pytest.fixture(scope="session")
def ref_model() -> Any:
    return make_model(1)


def score(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[None, torch.Tensor]:
    """Stands in for a reward model: how many tokens are odd."""
    return None, ((input_ids % 2) * attention_mask).sum(1).float()


@pytest.fixture(scope="session")
def prompts() -> PromptData:
    """Eight prompts of 1 to 8 tokens, with labels of up to 4, in rows of 12."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(2, 24, (8, 12), generator=generator)
    rindex = torch.arange(8)
    mask = (torch.arange(12) <= (rindex + 4).unsqueeze(1)).long()
    return PromptData(ids.where(mask > 0, 1), mask, rindex, batch_size=[8])


@pytest.fixture
def make_rollout(model: Any, ref_model: Any) -> Callable[..., Any]:
    """RolloutFromModel around the two models and `score`, with a seeded generator."""

    def make(**options: Any) -> Any:
        from flatroll.text import RolloutFromModel

        options = {"max_new_tokens": 10, "generator": torch.Generator().manual_seed(0)} | options
        return RolloutFromModel(options.pop("model", model), ref_model, options.pop("reward", score), **options)

    return make
