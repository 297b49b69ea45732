"""A table of the tokens of trajectories, and modules that run a language model over the texts of rows."""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from tensordict import TensorDictBase
from tensordict.nn import TensorDictModuleBase
from torch import Tensor, nn

from flatroll.layout import OBSERVATION, NestedKey, require
from flatroll.layout.checks import (
    as_text,
    check_dense_tensor,
    check_keys,
    check_rows,
    check_type,
    check_whole_number,
)


class Sequences:
    """The texts that rows of flat batches refer to: prompt and generated tokens, each sequence once.

    A row's observation ``(number, length)`` means: the first ``length`` tokens of sequence ``number``. Numbers rise by
    one and are never used again.

    Args:
        first: number of the first sequence. Default: 0.

    >>> table = Sequences()
    >>> table.add(torch.tensor([5, 6, 7, 8, 9]), lengths=torch.tensor([3, 2]))
    tensor([0, 1])
    >>> table[0], table.padded(torch.tensor([1, 0]))[0]
    (tensor([5, 6, 7]), tensor([[8, 9, 0],
            [5, 6, 7]]))
    """

    def __init__(self, first: int = 0) -> None:
        self._first = check_whole_number("first", first, 0)
        self._tokens = torch.zeros(0, dtype=torch.int64)
        # Sequence k has the tokens bounds[k] to bounds[k + 1].
        self._bounds = torch.zeros(1, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sequences":
        """Share the table with copied modules (target networks): a copy would lack later texts."""
        return self

    def __getitem__(self, number: int) -> Tensor:
        """All tokens of a sequence, int64 ``[length]``."""
        place = int(self._places(torch.tensor([check_whole_number("number", number, -(2**63))]))[0])
        start, stop = self._bounds[place : place + 2].tolist()
        return self._tokens[start:stop]

    @property
    def numbers(self) -> range:
        """Numbers of the sequences that are kept."""
        return range(self._first, self._first + len(self))

    def add(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Add K sequences; return their numbers, int64 ``[K]``.

        Args:
            tokens: int64 ``[M]``, one sequence behind the other.
            lengths: int64 ``[K]``, tokens of each; M together.
        """
        _whole_numbers("tokens", tokens)
        if int(_whole_numbers("lengths", lengths, tokens.device).sum()) != len(tokens):
            raise ValueError(f"lengths sum to {int(lengths.sum())}, but there are {len(tokens)} tokens")

        known = len(self)
        self._tokens = torch.cat([self._tokens.to(tokens.device), tokens])
        bounds = self._bounds.to(tokens.device)
        self._bounds = torch.cat([bounds, bounds[-1] + lengths.cumsum(0)])
        return torch.arange(self._first + known, self._first + len(self), device=tokens.device)

    def forget(self, before: int | None = None) -> None:
        """Drop the sequences with numbers below ``before``. Default: all.

        Rows that refer to them cannot be read any more. With a replay buffer, ``before`` is the lowest number in it.
        """
        if before is None:
            stop = self._first + len(self)
        else:
            stop = check_whole_number("before", before, -(2**63))
        count = min(max(stop - self._first, 0), len(self))
        start = self._bounds[count]

        # A clone, so that the memory of the dropped tokens is freed.
        self._tokens = self._tokens[int(start) :].clone()
        self._bounds = self._bounds[count:] - start
        self._first += count

    def padded(self, numbers: Tensor, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Tokens of these sequences, right-padded with 0, and their mask: int64 ``[K, length]``.

        Args:
            numbers: int64 ``[K]``.
            length: number of tokens to cut to. Default: that of the longest one.

        Raises:
            KeyError: a sequence is not kept.
        """
        places = self._places(_whole_numbers("numbers", numbers))
        if length is not None:
            check_whole_number("length", length, 0)

        start = self._bounds[places].unsqueeze(1)
        stop = self._bounds[places + 1].unsqueeze(1)
        if length is None:
            length = int((stop - start).max()) if len(numbers) else 0

        index = start + torch.arange(length, device=start.device)  # [K, length], indices into the flat tokens
        mask = index < stop
        tokens = self._tokens[index.clamp(max=len(self._tokens) - 1)].masked_fill(~mask, 0)
        return tokens, mask.to(torch.int64)

    def state_dict(self) -> dict[str, Any]:
        """The table as tensors and a number."""
        return {"first": self._first, "tokens": self._tokens, "bounds": self._bounds}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a table."""
        check_type("state", state, Mapping, "the state_dict() of a Sequences table")
        if not state.keys() >= {"first", "tokens", "bounds"}:
            raise ValueError(f"state must have entries first, tokens and bounds, got {list(state.keys())}")

        bounds = _whole_numbers("state['bounds']", state["bounds"])
        check_dense_tensor("state['tokens']", state["tokens"])
        if int(bounds[-1]) != len(state["tokens"]) or int(bounds[0]) != 0 or bool((bounds.diff() < 0).any()):
            raise ValueError(
                "state has bounds that do not fit its tokens: it is not the state of a Sequences table"
            )

        # Together, as the parts of one table: an interrupt must not come between.
        self._first, self._tokens, self._bounds = int(state["first"]), state["tokens"], bounds

    def _places(self, numbers: Tensor) -> Tensor:
        """Places of sequences in the table; KeyError if one is not there."""
        places = numbers.to(self._bounds.device) - self._first
        unknown = (places < 0) | (places >= len(self))
        if bool(unknown.any()):
            if len(self):
                kept = f"{self._first} to {self._first + len(self) - 1}"
            else:
                kept = "none"
            raise KeyError(
                f"sequence {int(numbers[unknown.nonzero()[0, 0]])} is not in the table (kept: {kept}): it was "
                "forgotten, or its row comes from another rollout"
            )
        return places


def _whole_numbers(name: str, column: Tensor, device: torch.device | None = None) -> Tensor:
    """Return a column after checking that it is one of integers."""
    check_dense_tensor(name, column, device)
    if column.ndim != 1 or column.is_floating_point() or column.dtype is torch.bool or column.is_meta:
        raise TypeError(f"{name} must be integers of shape [K], got {as_text(column)}")
    return column


class TextModule(TensorDictModuleBase):
    """Runs a causal language model over the texts of rows, and writes its output at each row.

    Each distinct sequence is passed through the model once, for any number of its rows: whole runs, slices or single
    rows in any order. Sequences are padded on the right in this pass; the padding has no effect.

    Args:
        model: a model of transformers whose output has ``logits`` ``[K, L, F]``: a causal language model, or, for
            values, a token classifier with one label.
        sequences: the table that rows refer to (``RolloutFromModel.sequences``).
        out_key: entry for the output ``[N, F]``. Default: ``"logits"``; for values ``"state_value"``.
        in_key: entry ``[N, 2]`` with the number of a sequence and how many of its tokens are known. Default:
            ``"observation"``.

    Raises:
        KeyError: a row's sequence is not in the table.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: Sequences,
        out_key: NestedKey = "logits",
        in_key: NestedKey = OBSERVATION,
    ) -> None:
        super().__init__()
        check_type("model", model, nn.Module, "a model of transformers")
        check_type(
            "sequences", sequences, Sequences, "a table of sequences, such as RolloutFromModel.sequences"
        )
        check_keys(out_key=out_key, in_key=in_key)

        self.model = model
        self.sequences = sequences
        read = [in_key]
        written = [out_key]
        self.in_keys = read  # pyright: ignore[reportAttributeAccessIssue]
        self.out_keys = written  # pyright: ignore[reportAttributeAccessIssue]
        self._in_key = in_key
        self._out_key = out_key

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the model's output for each row of ``batch`` ``[*B]``."""
        check_rows(batch)
        observation = require(batch, self._in_key)
        if observation.shape != (*batch.batch_size, 2) or observation.dtype != torch.int64:
            raise ValueError(
                f"batch[{self._in_key!r}] must be int64 of shape {[*batch.batch_size, 2]}, got {as_text(observation)}"
            )

        number, length = observation.reshape(-1, 2).unbind(1)
        distinct, sequence = torch.unique(number, return_inverse=True)
        longest = 1
        shortest = 1
        if len(length):
            longest = int(length.max())
            shortest = int(length.min())

        tokens, mask = self.sequences.padded(distinct, longest)
        logits = last_logits(self.model, longest - shortest + 1, input_ids=tokens, attention_mask=mask)
        # Logits are kept from position shortest - 1 on: a text of n tokens is read at index n - shortest.
        rows = logits[sequence, length - shortest]

        batch.set(self._out_key, rows.reshape(*batch.batch_size, *rows.shape[1:]))
        return batch


@contextmanager
def noted(note: str) -> Iterator[None]:
    """Add a note to what a user's model raises."""
    try:
        yield
    except Exception as error:
        error.add_note(note)
        raise


def last_logits(model: nn.Module, count: int, **inputs: Tensor) -> Tensor:
    """Outputs ``[B, count, F]`` of a model at the last ``count`` tokens of each row."""
    options: dict[str, Any] = {"use_cache": False}
    accepted = inspect.signature(model.forward).parameters
    if "logits_to_keep" in accepted:
        options["logits_to_keep"] = count
    if "use_cache" not in accepted:
        del options["use_cache"]
    with noted("In the model (model, ref_model) that reads the texts of a batch"):
        logits: Tensor = model(**inputs, **options).logits
    return logits[:, -count:]
