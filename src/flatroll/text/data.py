"""Batches of tokenized text: prompts, sequences with rewards, and pairs of a better and a worse sequence."""

from pathlib import Path
from typing import Any

import torch
from tensordict import TensorClass
from torch import Tensor

from flatroll.text.dataset import TokenizedDatasetLoader
from flatroll.text.tokenize import PromptTensorDictTokenizer, TensorDictTokenizer

_PROMPTS = "CarperAI/openai_summarize_tldr"
_COMPARISONS = "CarperAI/openai_summarize_comparisons"


class PromptData(TensorClass):
    """Prompts with continuations, right-padded.

    Args:
        input_ids: int64 ``[B, L]``, prompt, label and padding.
        attention_mask: int64 ``[B, L]``, 0 at padding.
        prompt_rindex: int64 ``[B]``, index of the prompt's last token.
        labels: ``[B, L]``, or None.
        logits: a model's outputs, or None.
        loss: of each sequence, or None.

    >>> ids = torch.tensor([[5, 6, 7, 8, 0]])
    >>> data = PromptData(ids, (ids > 0).long(), torch.tensor([1]), batch_size=[1])
    >>> data.mask_label().input_ids.tolist(), data.mask_label().attention_mask.tolist()
    ([[5, 6, 0, 0, 0]], [[1, 1, 0, 0, 0]])
    """

    written_doc = __doc__
    input_ids: Tensor
    attention_mask: Tensor
    prompt_rindex: Tensor
    labels: Tensor | None = None
    logits: Tensor | None = None
    loss: Tensor | None = None

    def mask_label(self, pad_token_id: int = 0) -> "PromptData":
        """Return only the prompts: continuations are replaced by padding, with mask 0.

        Args:
            pad_token_id: token at padding. Default: 0; masked tokens are never read.
        """
        places = torch.arange(self.input_ids.shape[-1], device=self.input_ids.device)
        # [B, L]; the index points to the last prompt token.
        prompt = places <= self.prompt_rindex.unsqueeze(-1)
        return PromptData(
            input_ids=self.input_ids.where(prompt, pad_token_id),
            attention_mask=prompt.to(torch.int64),
            prompt_rindex=self.prompt_rindex,
            loss=self.loss,
            batch_size=self.batch_size,
        )

    @classmethod
    def from_dataset(
        cls,
        split: str,
        dataset_name: str | None = None,
        max_length: int = 550,
        root_dir: str | Path | None = None,
        from_disk: bool = False,
        num_workers: int | None = None,
        *,
        tokenizer: Any = None,
    ) -> "PromptData":
        """Load a data set with entries ``prompt`` and ``label``; see `TokenizedDatasetLoader` for the arguments.

        Args:
            split: such as ``"train"`` or ``"valid"``.
            dataset_name: default ``"CarperAI/openai_summarize_tldr"``.
            max_length: tokens of a row. Default: 550. Longer texts are left out.
            root_dir: folder of the cache.
            from_disk: whether ``dataset_name`` is a folder written by ``save_to_disk``. Default: False.
            num_workers: processes that tokenize. Default: one.
            tokenizer: default GPT-2's.
        """
        loader = TokenizedDatasetLoader(
            split,
            max_length,
            dataset_name or _PROMPTS,
            PromptTensorDictTokenizer,
            root_dir=root_dir,
            from_disk=from_disk,
            num_workers=num_workers,
            tokenizer=tokenizer,
        )
        data = loader.load()
        columns: dict[str, Any] = dict(data.items())
        return cls(**columns, labels=data["input_ids"], batch_size=data.batch_size)


class RewardData(TensorClass):
    """Sequences for training reward models, right-padded.

    Args:
        input_ids: int64 ``[B, L]``.
        attention_mask: int64 ``[B, L]``, 0 at padding.
        rewards: of each token ``[B, L]``, or None.
        end_scores: of each sequence ``[B]``, or None.
    """

    written_doc = __doc__
    input_ids: Tensor
    attention_mask: Tensor
    rewards: Tensor | None = None
    end_scores: Tensor | None = None


class PairwiseDataset(TensorClass):
    """Pairs of texts, one of which is preferred.

    Args:
        chosen_data: `RewardData` of the better ones, batch size ``[B]``.
        rejected_data: of the worse ones.
    """

    written_doc = __doc__
    chosen_data: RewardData
    rejected_data: RewardData

    @classmethod
    def from_dataset(
        cls,
        split: str,
        dataset_name: str | None = None,
        max_length: int = 550,
        root_dir: str | Path | None = None,
        from_disk: bool = False,
        num_workers: int | None = None,
        *,
        tokenizer: Any = None,
    ) -> "PairwiseDataset":
        """Load a data set with entries ``prompt``, ``chosen`` and ``rejected``.

        A text is the prompt, a line break, and one of the two. Pairs of equal ones, and pairs with one of less than
        five words, are left out. The arguments are those of `PromptData.from_dataset`; ``dataset_name`` is
        ``"CarperAI/openai_summarize_comparisons"`` by default.
        """
        loader = TokenizedDatasetLoader(
            split,
            max_length,
            dataset_name or _COMPARISONS,
            TensorDictTokenizer,
            _comparisons_as_texts,
            root_dir=root_dir,
            from_disk=from_disk,
            num_workers=num_workers,
            tokenizer=tokenizer,
        )
        data = loader.load()

        half = len(data) // 2  # the chosen texts come first, then the rejected ones
        chosen: dict[str, Any] = {key: column[:half] for key, column in data.items()}
        rejected: dict[str, Any] = {key: column[half:] for key, column in data.items()}
        return cls(
            chosen_data=RewardData(**chosen, batch_size=[half]),
            rejected_data=RewardData(**rejected, batch_size=[half]),
            batch_size=[half],
        )


def _comparisons_as_texts(dataset: Any, min_words: int = 5) -> Any:
    """The texts of the pairs worth comparing: first all chosen ones, then all rejected ones in the same order."""
    pairs = [
        (row["prompt"] + "\n" + row["chosen"], row["prompt"] + "\n" + row["rejected"])
        for row in dataset
        if row["chosen"] != row["rejected"]
        and min(len(row["chosen"].split()), len(row["rejected"].split())) >= min_words
    ]
    if not pairs:
        raise ValueError(f"the data set has no pair of different texts with at least {min_words} words")
    chosen, rejected = zip(*pairs, strict=True)
    return type(dataset).from_dict({"text": [*chosen, *rejected]})


for _kind in (PromptData, RewardData, PairwiseDataset):  # tensordict replaces their docstrings by signatures
    _kind.__doc__ = _kind.written_doc
