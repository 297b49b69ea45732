"""A table of the tokens of trajectories, and modules that run a language model over the texts of rows."""

from collections.abc import Mapping
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
from flatroll.text.packing import Texts
from flatroll.text.passes import Passes


class Sequences:
    """The texts that rows of flat batches refer to: prompt and generated tokens, each sequence once.

    A row's observation ``(number, length)`` means: the first ``length`` tokens of sequence ``number``. Numbers rise by
    one and are never used again. A prompt that several sequences of one `add` begin with is stored once.

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
        # The tokens bounds[k] to bounds[k + 1] are stored for sequence k: all of it, or what is behind its prompt where
        # a sequence before it stores the prompt.
        self._bounds = torch.zeros(1, dtype=torch.int64)
        # Where its prompt begins, and how many tokens that has; bounds[k] and 0 where nothing is known of a prompt.
        self._heads = torch.zeros(0, dtype=torch.int64)
        self._shared = torch.zeros(0, dtype=torch.int64)

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def __deepcopy__(self, memo: dict[int, Any]) -> "Sequences":
        """Share the table with copied modules (target networks): a copy would lack later texts."""
        return self

    def __getitem__(self, number: int) -> Tensor:
        """All tokens of a sequence, int64 ``[length]``."""
        place = self._places(torch.tensor([check_whole_number("number", number, -(2**63))]))
        head, shared, start, stop = (int(bound) for bound in self._stretches(place))
        if start == head + shared:
            return self._tokens[head:stop]
        return torch.cat([self._tokens[head : head + shared], self._tokens[start:stop]])

    @property
    def numbers(self) -> range:
        """Numbers of the sequences that are kept."""
        return range(self._first, self._first + len(self))

    def add(self, tokens: Tensor, lengths: Tensor, prompts: Tensor | None = None) -> Tensor:
        """Add K sequences; return their numbers, int64 ``[K]``.

        Args:
            tokens: int64 ``[M]``, one sequence behind the other.
            lengths: int64 ``[K]``, tokens of each; M together.
            prompts: int64 ``[K]``, how many tokens of each are its prompt. Equal prompts are stored once, and a
                `TextModule` runs them once. Default: None, nothing is shared.

        Raises:
            ValueError: lengths do not fit the tokens, a token is negative, or a prompt has no token or more than its
                sequence.

        >>> table = Sequences()
        >>> texts = torch.tensor([5, 6, 7, 1, 5, 6, 7, 2])  # two answers to the prompt 5, 6, 7
        >>> table.add(texts, lengths=torch.tensor([4, 4]), prompts=torch.tensor([3, 3]))
        tensor([0, 1])
        >>> table[1], table.state_dict()["tokens"]
        (tensor([5, 6, 7, 2]), tensor([5, 6, 7, 1, 2]))
        """
        tokens = _whole_numbers("tokens", tokens).to(torch.int64)
        lengths = _whole_numbers("lengths", lengths, tokens.device).to(torch.int64)
        if len(tokens) and int(tokens.min()) < 0:
            raise ValueError(f"tokens must not be negative, got {int(tokens.min())}: leave padding out")
        if int(lengths.sum()) != len(tokens):
            raise ValueError(f"lengths sum to {int(lengths.sum())}, but there are {len(tokens)} tokens")

        known = len(self)
        base = self._bounds[-1].to(tokens.device)
        owner = torch.arange(len(lengths), device=tokens.device)
        stored = lengths
        shared = torch.zeros_like(lengths)
        if prompts is not None:
            shared = _check_prompts(prompts, lengths)
            owner = _first_equal(tokens, lengths, shared)
            again = owner != torch.arange(len(lengths), device=tokens.device)
            known_before = shared.masked_fill(~again, 0)
            stored = lengths - known_before
            skipped = known_before.repeat_interleave(lengths)
            tokens = tokens[_within(lengths) >= skipped]

        bounds = base + stored.cumsum(0)
        starts = bounds - stored
        self._tokens = torch.cat([self._tokens.to(tokens.device), tokens])
        self._bounds = torch.cat([self._bounds.to(tokens.device), bounds])
        self._heads = torch.cat([self._heads.to(tokens.device), starts[owner]])
        self._shared = torch.cat([self._shared.to(tokens.device), shared])
        return torch.arange(self._first + known, self._first + len(self), device=tokens.device)

    def forget(self, before: int | None = None) -> None:
        """Drop the sequences with numbers below ``before``. Default: all.

        A prompt that a kept sequence shares with them stays, and what was added between the two.
        Rows that refer to them cannot be read any more. With a replay buffer, ``before`` is the lowest number in it.
        """
        if before is None:
            stop = self._first + len(self)
        else:
            stop = check_whole_number("before", before, -(2**63))
        count = min(max(stop - self._first, 0), len(self))
        heads = self._heads[count:]
        start = self._bounds[count]
        if len(heads):
            start = torch.minimum(start, heads.min())

        # A clone, so that the memory of the dropped tokens is freed.
        self._tokens = self._tokens[int(start) :].clone()
        self._bounds = self._bounds[count:] - start
        self._heads = heads - start
        self._shared = self._shared[count:].clone()
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

        head, shared, start, stop = (bound.unsqueeze(1) for bound in self._stretches(places))
        lengths = stop - start + shared
        if length is None:
            length = int(lengths.max()) if len(numbers) else 0

        column = torch.arange(length, device=start.device)
        # [K, length], indices into the flat tokens
        index = torch.where(column < shared, head, start - shared) + column
        mask = column < lengths
        tokens = self._tokens[index.clamp(max=len(self._tokens) - 1)].masked_fill(~mask, 0)
        return tokens, mask.to(torch.int64)

    def texts(self, numbers: Tensor) -> tuple[Texts, Tensor]:
        """Where the tokens of these sequences are, for a pass over them, and their lengths, int64 ``[K]``.

        Args:
            numbers: int64 ``[K]``.

        Raises:
            KeyError: a sequence is not kept.
        """
        head, shared, start, stop = self._stretches(self._places(_whole_numbers("numbers", numbers)))
        return Texts(self._tokens, head, shared, start), stop - start + shared

    def state_dict(self) -> dict[str, Any]:
        """The table as tensors and a number."""
        return {
            "first": self._first,
            "tokens": self._tokens,
            "bounds": self._bounds,
            "heads": self._heads,
            "shared": self._shared,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a table, or one saved before prompts were shared."""
        check_type("state", state, Mapping, "the state_dict() of a Sequences table")
        if not state.keys() >= {"first", "tokens", "bounds"}:
            raise ValueError(f"state must have entries first, tokens and bounds, got {list(state.keys())}")

        bounds = _whole_numbers("state['bounds']", state["bounds"])
        heads = _whole_numbers("state['heads']", state.get("heads", bounds[:-1]))
        shared = _whole_numbers("state['shared']", state.get("shared", torch.zeros_like(heads)))
        tokens = state["tokens"]
        check_dense_tensor("state['tokens']", tokens)
        if not _fit(tokens, bounds, heads, shared):
            raise ValueError(
                "state has bounds that do not fit its tokens: it is not the state of a Sequences table"
            )

        # Together, as the parts of one table: an interrupt must not come between.
        self._first, self._tokens, self._bounds = int(state["first"]), tokens, bounds
        self._heads, self._shared = heads, shared

    def _stretches(self, places: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of sequences: where the prompt begins, its tokens, where the rest begins, and its end, int64 ``[K]`` each."""
        head = self._heads[places]
        shared = self._shared[places]
        stored = self._bounds[places]
        start = torch.where(head == stored, stored + shared, stored)
        return head, shared, start, self._bounds[places + 1]

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


def _check_prompts(prompts: Tensor, lengths: Tensor) -> Tensor:
    """Return numbers of tokens of prompts ``[K]`` after checking them against those of the sequences."""
    prompts = _whole_numbers("prompts", prompts, lengths.device).to(torch.int64)
    if prompts.shape != lengths.shape:
        raise ValueError(
            f"prompts must have shape {list(lengths.shape)} as lengths, got {list(prompts.shape)}"
        )
    wrong = (prompts < 1) | (prompts > lengths)
    if bool(wrong.any()):
        place = int(wrong.nonzero()[0, 0])
        raise ValueError(
            f"prompts must be at least 1 token and at most the sequence, got {int(prompts[place])} for sequence "
            f"{place} of {int(lengths[place])} tokens"
        )
    return prompts


def _within(lengths: Tensor) -> Tensor:
    """Place of each token in its sequence, int64 ``[M]``."""
    first = lengths.cumsum(0) - lengths
    total = int(lengths.sum())
    return torch.arange(total, device=lengths.device) - first.repeat_interleave(lengths)


def _first_equal(tokens: Tensor, lengths: Tensor, prompts: Tensor) -> Tensor:
    """Index of the first sequence with the same prompt, int64 ``[K]``."""
    count = len(lengths)
    device = tokens.device
    index = torch.arange(count, device=device)
    if count < 2:
        return index

    # A sum of tokens times odd numbers by place tells prompts apart; it wraps around, as a hash may.
    column = torch.arange(int(prompts.max()), device=device)
    first = lengths.cumsum(0) - lengths
    own = column < prompts.unsqueeze(1)
    table = tokens[(first.unsqueeze(1) + column).clamp(max=len(tokens) - 1)].where(own, -1)  # [K, longest]
    factor = (column + 1) * 0x9E3779B97F4A7C1 * 2 + 1
    factor = (factor ^ (factor >> 29)) * 0x1B873593CC9E2D51 | 1
    hashes = (table * factor).sum(1)

    _, group = torch.unique(hashes, return_inverse=True)
    owner = torch.full_like(index, count).scatter_reduce_(0, group, index, "amin")[group]
    same = (table == table[owner]).all(1)
    return owner.where(same, index)


def _fit(tokens: Tensor, bounds: Tensor, heads: Tensor, shared: Tensor) -> bool:
    """Whether these are the parts of one table: no stretch leaves the tokens."""
    count = len(bounds) - 1
    if len(heads) != count or len(shared) != count:
        return False
    if int(bounds[-1]) != len(tokens) or int(bounds[0]) < 0 or bool((bounds.diff() < 0).any()):
        return False
    if count == 0 or not bool(shared.any()):
        return int(bounds[0]) == 0 and torch.equal(heads, bounds[:-1])

    own = heads == bounds[:-1]
    room = torch.where(own, bounds[1:], bounds[:-1])  # a prompt ends in its own sequence, or before it
    return bool(((heads >= 0) & (shared >= 0) & (heads + shared <= room)).all())


class TextModule(TensorDictModuleBase):
    """Runs a causal language model over the texts of rows, and writes its output at each row.

    Each token of the texts is run once, for any number of their rows: whole runs, slices or single rows in any order.
    Short texts share the rows of a packed pass, with positions that begin anew; texts with the same prompt run it once
    and see it all. How texts are laid out is chosen by what it costs for their lengths and the model's size; texts of
    equal length that share nothing are one batch.

    Whether a model keeps texts of a packed pass apart is found out by a comparison with separate passes, at the first
    one and, as weights change, at passes 2, 4, 8 and so on. A model that does not gets texts padded on the right, and a
    warning names it.

    Args:
        model: a model of transformers whose output has ``logits`` ``[K, L, F]``: a causal language model, or, for
            values, a token classifier with one label.
        sequences: the table that rows refer to (``RolloutFromModel.sequences``).
        out_key: entry for the output ``[N, F]``. Default: ``"logits"``; for values ``"state_value"``.
        in_key: entry ``[N, 2]`` with the number of a sequence and how many of its tokens are known. Default:
            ``"observation"``.
        row_length: tokens up to which texts share a row of a pass; 0 pads each text, and runs prompts once for each
            answer. Default: None, what costs least, or one flat row of all texts where attention takes cumulative
            lengths (flash attention, for which another length is a ValueError).

    Raises:
        KeyError: a row's sequence is not in the table.
        ValueError: a row's length is below 1, or more than its sequence has or the model reads.
    """

    def __init__(
        self,
        model: nn.Module,
        sequences: Sequences,
        out_key: NestedKey = "logits",
        in_key: NestedKey = OBSERVATION,
        *,
        row_length: int | None = None,
    ) -> None:
        super().__init__()
        check_type("model", model, nn.Module, "a model of transformers")
        check_type(
            "sequences", sequences, Sequences, "a table of sequences, such as RolloutFromModel.sequences"
        )
        check_keys(out_key=out_key, in_key=in_key)
        if row_length is not None:
            check_whole_number("row_length", row_length, 0)

        self.model = model
        self.sequences = sequences
        read = [in_key]
        written = [out_key]
        self.in_keys = read  # pyright: ignore[reportAttributeAccessIssue]
        self.out_keys = written  # pyright: ignore[reportAttributeAccessIssue]
        self._in_key = in_key
        self._out_key = out_key
        self._passes = Passes(model, row_length)

    def forward(self, batch: TensorDictBase) -> TensorDictBase:
        """Write the model's output for each row of ``batch`` ``[*B]``."""
        check_rows(batch)
        observation = require(batch, self._in_key)
        if observation.shape != (*batch.batch_size, 2) or observation.dtype != torch.int64:
            raise ValueError(
                f"batch[{self._in_key!r}] must be int64 of shape {[*batch.batch_size, 2]}, got {as_text(observation)}"
            )

        check_dense_tensor(f"batch[{self._in_key!r}]", observation)
        if observation.is_meta:
            raise ValueError(f"batch[{self._in_key!r}] must have values, got {as_text(observation)}")

        number, length = observation.reshape(-1, 2).unbind(1)
        distinct, sequence = torch.unique(number, return_inverse=True)
        texts, known = self.sequences.texts(distinct)
        wrong = (length < 1) | (length > known.to(length.device)[sequence])
        if bool(wrong.any()):
            row = int(wrong.nonzero()[0, 0])
            raise ValueError(
                f"batch[{self._in_key!r}] has a row of {int(length[row])} tokens of sequence {int(number[row])}, which "
                f"has {int(known[sequence[row]])}: a row needs at least one token, and at most all of them"
            )

        if self._passes.model is not self.model:
            self._passes = Passes(self.model, self._passes.row_length)
        rows = self._passes.outputs(texts, sequence, length)
        batch.set(self._out_key, rows.reshape(*batch.batch_size, *rows.shape[1:]))
        return batch
