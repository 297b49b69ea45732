"""Functions that turn examples of text into tokens."""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from tensordict import TensorDict

from flatroll.layout.checks import (
    as_text,
    check_choice,
    check_device,
    check_flags,
    check_function,
    check_type,
    check_whole_number,
)


class TensorDictTokenizer:
    """Tokenizes one entry of an example, or of a batch of examples.

    Args:
        tokenizer: a tokenizer of transformers.
        max_length: number of tokens to which longer texts are cut and shorter ones padded on the right.
        key: entry with the text, a string or a list of B strings. Default: ``"text"``.
        padding: ``"max_length"`` (default), or another option of transformers: ``"longest"`` (of this batch), False.
        truncation: whether texts are cut. Default: True.
        return_tensordict: whether to return a tensordict of tensors, or else a dict of lists. Default: True.
        device: device of the tensors. Default: the CPU.

    Calling it returns int64 entries ``input_ids`` and ``attention_mask`` ``[B, max_length]``, batch size ``[B]``
    (``[max_length]`` and ``[]`` for a single string).

    Raises:
        KeyError: an example lacks the entry.
        ValueError: the tokenizer has nothing to pad with, or a tensordict is asked for of texts of unequal length.

    >>> class Letters:  # stands in for a tokenizer of transformers
    ...     pad_token_id, eos_token_id = 0, 0
    ...     def __call__(self, texts, max_length, **options):
    ...         ids = [[ord(letter) - 96 for letter in text][:max_length] for text in texts]
    ...         return {"input_ids": [row + [0] * (max_length - len(row)) for row in ids],
    ...                 "attention_mask": [[1] * len(row) + [0] * (max_length - len(row)) for row in ids]}
    >>> TensorDictTokenizer(Letters(), max_length=4)({"text": ["abc", "d"]})["input_ids"].tolist()
    [[1, 2, 3, 0], [4, 0, 0, 0]]
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        key: str = "text",
        padding: str | bool = "max_length",
        truncation: bool = True,
        return_tensordict: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        check_function("tokenizer", tokenizer, "a tokenizer of transformers")
        check_whole_number("max_length", max_length)
        check_type("key", key, str, "the name of an entry")
        check_choice("padding", padding, (True, False, "longest", "max_length", "do_not_pad"))
        check_choice(
            "truncation", truncation, (True, False, "longest_first", "only_first", "do_not_truncate")
        )
        check_flags(return_tensordict=return_tensordict)
        if device is not None:
            check_device("device", device)
        if padding and getattr(tokenizer, "pad_token_id", None) is None:
            raise ValueError(
                "tokenizer has no pad token: set tokenizer.pad_token = tokenizer.eos_token, or pass padding=False"
            )

        self.tokenizer = tokenizer
        self.max_length = max_length
        self.key = key
        self.padding = padding if isinstance(padding, str) else bool(padding)
        self.truncation = truncation if isinstance(truncation, str) else bool(truncation)
        self.return_tensordict = return_tensordict
        self.device = device

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        """Tokenize ``sample[key]``."""
        return self._result(self.columns(_texts(sample, self.key)), isinstance(sample[self.key], str))

    def columns(self, texts: list[str]) -> dict[str, list[Any]]:
        """Token ids and masks of B texts, as lists."""
        encoded = self.tokenizer(
            texts,
            max_length=self.max_length,
            padding=self.padding,
            truncation=self.truncation,
            padding_side="right",
        )
        return {key: list(encoded[key]) for key in ("input_ids", "attention_mask")}

    def _result(self, columns: dict[str, list[Any]], single: bool) -> Any:
        """The columns as the caller wants them; ``single`` drops the batch dim."""
        if not self.return_tensordict:
            if single:
                return {key: column[0] for key, column in columns.items()}
            return columns

        lengths = {len(row) for row in columns["input_ids"]}
        if len(lengths) > 1:
            raise ValueError(
                f"texts of {min(lengths)} to {max(lengths)} tokens do not fit one tensor: pass "
                'padding="max_length", or return_tensordict=False'
            )

        tensors = {}
        for key, column in columns.items():
            dtype = torch.bool if key == "valid_sample" else torch.int64
            tensors[key] = torch.tensor(column, dtype=dtype)

        batch = TensorDict(tensors, [len(columns["input_ids"])], device=self.device)
        if single:
            return batch[0]
        return batch


class PromptTensorDictTokenizer(TensorDictTokenizer):
    """Tokenizes prompts with their continuations, and marks where the prompt ends.

    Token ids are those of the joined text, ``sample[key] + sample["label"]``. Joining can change tokens at the
    seam ("I li" + "ke tea" has a token " like"), so the prompt is the longest prefix of tokens that the joined text and
    the prompt alone have in common.

    Args:
        tokenizer: a tokenizer of transformers that cuts texts on the right.
        max_length: as for `TensorDictTokenizer`, as are the arguments below.
        key: entry with the prompt. Default: ``"prompt"``.
        padding: default ``"max_length"``.
        truncation: default True.
        return_tensordict: default True.
        device: default the CPU.

    Calling it returns, besides ``input_ids`` and ``attention_mask``:

    * ``prompt_rindex``, int64 ``[B]``: index of the prompt's last token, -1 if the prompt has no token.
    * ``valid_sample``, bool ``[B]``: the prompt has a token, and the text was not cut: it is shorter than
      ``max_length``, or its last token is the end-of-sequence token.

    Raises:
        KeyError: an example lacks an entry.
        ValueError: as for `TensorDictTokenizer`; the two entries have different lengths; or the tokenizer cuts on the
            left, which removes prompts.
    """

    def __init__(
        self,
        tokenizer: Any,
        max_length: int,
        key: str = "prompt",
        padding: str | bool = "max_length",
        truncation: bool = True,
        return_tensordict: bool = True,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__(tokenizer, max_length, key, padding, truncation, return_tensordict, device)
        if truncation and getattr(tokenizer, "truncation_side", "right") != "right":
            raise ValueError(
                "tokenizer.truncation_side is 'left', which would cut prompts: set it to 'right'"
            )

    def __call__(self, sample: Mapping[str, Any]) -> Any:
        """Tokenize ``sample[key] + sample["label"]``."""
        prompts = _texts(sample, self.key)
        labels = _texts(sample, "label")
        if len(prompts) != len(labels):
            raise ValueError(
                f"{len(prompts)} texts in {self.key!r} do not match {len(labels)} in 'label': pass one for each text"
            )

        columns = self.columns([prompt + label for prompt, label in zip(prompts, labels, strict=True)])
        own = self.tokenizer(prompts, max_length=self.max_length, truncation=self.truncation)["input_ids"]
        columns["prompt_rindex"] = []
        columns["valid_sample"] = []
        for ids, mask, alone in zip(columns["input_ids"], columns["attention_mask"], own, strict=True):
            count = sum(mask)
            pairs = zip(ids[:count], alone, strict=False)
            shared = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
            whole = count < self.max_length or ids[count - 1] == self.tokenizer.eos_token_id
            columns["prompt_rindex"].append(shared - 1)
            columns["valid_sample"].append(whole and shared > 0)

        return self._result(columns, isinstance(sample[self.key], str))


def _texts(sample: Mapping[str, Any], key: str) -> list[str]:
    """The entry as a list; KeyError that names those that are there."""
    check_type("sample", sample, Mapping, "a mapping of entries to texts")
    if key not in sample.keys():  # noqa: SIM118 (a tensordict has no other way)
        raise KeyError(
            f"the example has no entry {key!r}: it has {', '.join(sorted(map(repr, sample.keys())))}"
        )

    value: str | Sequence[str] = sample[key]
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or not all(isinstance(text, str) for text in texts):
        raise TypeError(f"sample[{key!r}] must be a text or a list of texts, got {as_text(value)}")
    return list(texts)
