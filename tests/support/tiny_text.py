"""A tokenizer trained on the fly, and models with two layers and random weights: nothing is downloaded."""

from typing import Any

import pytest
import torch

SENTENCE = "the cat sat on a mat . I like tea and you like milk with honey in the morning"


def train_tokenizer(size: int = 120) -> Any:
    """A byte-level BPE with <eos> = 0 and <pad> = 1."""
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<eos>", "<pad>"], show_progress=False, initial_alphabet=["Ġ", "Ċ"]
    )
    bpe.train_from_iterator([SENTENCE] * 200, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")


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


def make_critic(seed: int = 0) -> Any:
    """A GPT-2 of two layers with one number for each token."""
    from transformers import GPT2Config, GPT2ForTokenClassification

    torch.manual_seed(seed)
    size: dict[str, Any] = {"vocab_size": 24, "n_positions": 64, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2ForTokenClassification(GPT2Config(**size, num_labels=1, bos_token_id=0, eos_token_id=0)).eval()


def score(input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[None, torch.Tensor]:
    """Stands in for a reward model: how many tokens are odd."""
    return None, ((input_ids % 2) * attention_mask).sum(1).float()
