"""Flat rows of texts, one for each token that the policy wrote, and rows of texts that begin alike."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor

from flatroll.layout import ACTION, IS_INIT, NEXT, OBSERVATION, STEP_COUNT, NestedKey, next_key, require
from flatroll.layout.checks import (
    as_text,
    check_choice,
    check_dense_tensor,
    check_keys,
    check_rows,
    check_type,
)
from flatroll.layout.keys import DONE, marker
from flatroll.text.sequences import Sequences

#: One tensor or list ``[L]`` for each text, or a padded tensor ``[K, L]``.
PerToken: TypeAlias = Tensor | Sequence[Tensor | Sequence[float]]
Step: TypeAlias = Literal["token", "turn"]


def rows_of_texts(
    sequences: Sequences,
    tokens: PerToken,
    own: PerToken,
    log_probs: PerToken | None,
    rewards: PerToken | Sequence[float],
    *,
    lengths: Tensor | None = None,
    truncated: Tensor | None = None,
    groups: Tensor | None = None,
    step: Step = "token",
) -> TensorDict:
    """Turn K texts into a flat marked batch ``[N]`` with a row for each token that the policy wrote.

    Tokens of prompts, templates and tools have no row. They are read: a row's ``observation`` is what the policy read
    before its token. So where a tool answers, the length in the observation jumps, in ``("next", "observation")`` of
    the row before as well: the next state is the one in which the policy writes again, or the whole text at its end.

    Args:
        sequences: the table that the texts are added to, and that a `TextModule` reads.
        tokens: integers. Like the other arguments for tokens, a list of K tensors or lists ``[L]``, or a padded tensor
            ``[K, L]`` with ``lengths``.
        own: bool (or 0 and 1), whether the policy wrote the token. A stretch of such tokens is a *turn*.
        log_probs: floating, the log-probability of each token; read where ``own``. None: no such column.
        rewards: one number for each text, which its last row gets; or one for each token. What a token that the policy
            did not write earns (a tool's answer) goes to the row before it.
        lengths: int64 ``[K]``, the tokens of each text in a padded tensor. Default: all are L long.
        truncated: bool ``[K]``, the texts that were cut off, whose next value is bootstrapped. Default: none, all
            texts are terminated.
        groups: int64 ``[K]``, equal for answers to one prompt; written for `flatroll.estimators.GroupAdvantage`.
            Default: no such column.
        step: what ``gamma`` of an estimator discounts. ``"token"`` (default): each row. ``"turn"``: each turn, by a
            column ``steps_to_next_obs``, 1 at the last row of a turn and 0 elsewhere.

    Returns:
        ``observation`` int64 ``[N, 2]`` (number of the text, tokens read), ``action`` int64 ``[N]``,
        ``action_log_prob`` ``[N]``, ``is_init``, ``step_count`` (rows before this one in the text), trajectory ids
        (the number of the text), ``group`` int64 ``[N]``, ``steps_to_next_obs`` int64 ``[N, 1]``, and under ``"next"``
        ``observation``, ``reward`` ``[N, 1]``, ``terminated``, ``truncated``, ``done``. `flatroll.layout.audit`
        accepts it.

    Raises:
        TypeError: an argument has another type or dtype.
        ValueError: there is no text, arguments differ in length, a text has no token of the policy or none before the
            first of them (a prompt of no tokens), or a reward is not finite or stands before the first row.

    >>> table = Sequences()
    >>> tokens = [[1, 2, 30, 31, 5, 6, 32], [1, 3, 33]]  # a tool wrote 5 and 6
    >>> own = [[False, False, True, True, False, False, True], [False, False, True]]
    >>> batch = rows_of_texts(table, tokens, own, None, rewards=[1.0, 0.0])
    >>> batch["action"], batch["observation"][:, 1], batch["next", "observation"][:, 1]
    (tensor([30, 31, 32, 33]), tensor([2, 3, 6, 2]), tensor([3, 6, 7, 3]))
    >>> batch["next", "reward"].squeeze(-1), batch["next", "done"].squeeze(-1)
    (tensor([0., 0., 1., 0.]), tensor([False, False,  True,  True]))
    """
    check_type("sequences", sequences, Sequences, "a table of sequences")
    check_choice("step", step, ("token", "turn"))

    # The columns of tokens, one text behind the other.
    flat_tokens, lengths = _flat_tokens(tokens, lengths)
    flat_own = _flags("own", _like_tokens("own", own, tokens, lengths))
    flat_log_probs = None
    if log_probs is not None:
        flat_log_probs = _floating("log_probs", _like_tokens("log_probs", log_probs, tokens, lengths))

    places = _find_rows(flat_own, lengths)
    if flat_log_probs is not None:
        _check_finite("log_probs of the policy's tokens", flat_log_probs.index_select(0, places.token))
    reward = _row_rewards(rewards, tokens, lengths, places)
    cut = _per_text("truncated", truncated, lengths, torch.bool)
    group = _per_text("groups", groups, lengths, torch.int64)

    # The columns of rows. The table is written last, when nothing can be wrong any more.
    done = places.last
    terminated = done
    if cut is not None:
        terminated = done & ~cut.index_select(0, places.text)

    columns: dict[str, Any] = {ACTION: flat_tokens.index_select(0, places.token)}
    if flat_log_probs is not None:
        columns["action_log_prob"] = flat_log_probs.index_select(0, places.token)
    if group is not None:
        columns["group"] = group.index_select(0, places.text)
    if step == "turn":
        ends_turn = places.last | (places.read_next != places.read + 1)
        columns["steps_to_next_obs"] = ends_turn.to(torch.int64).unsqueeze(1)

    prompts = places.read[places.first]
    number = sequences.add(flat_tokens, lengths, prompts).index_select(0, places.text)
    columns |= {
        OBSERVATION: torch.stack([number, places.read], 1),
        IS_INIT: places.first.unsqueeze(1),
        STEP_COUNT: places.step.unsqueeze(1),
        "collector": {"traj_ids": number},
    }
    after = {
        OBSERVATION: torch.stack([number, places.read_next], 1),
        "reward": reward.unsqueeze(1),
        "terminated": terminated.unsqueeze(1),
        "truncated": (done ^ terminated).unsqueeze(1),
        "done": done.unsqueeze(1).clone(),
    }
    size = [len(number)]
    return TensorDict(columns | {NEXT: TensorDict(after, size, number.device)}, size, number.device)


class _Places(NamedTuple):
    """Where the N rows of K texts of M tokens are.

    Attributes:
        token: int64 ``[N]``, index of each row's token among all M.
        text: int64 ``[N]``, the text of each row, 0 to K - 1.
        read: int64 ``[N]``, tokens of the text before this one.
        read_next: int64 ``[N]``, tokens before the text's next row, or all of its tokens.
        step: int64 ``[N]``, rows of the text before this one.
        first, last: bool ``[N]``, the first and the last row of each text.
        row_of_token: int64 ``[M]``, the row at or before each token; that of another text if it has none, and then
            -1 for the first text.
        text_of_token: int64 ``[M]``.
    """

    token: Tensor
    text: Tensor
    read: Tensor
    read_next: Tensor
    step: Tensor
    first: Tensor
    last: Tensor
    row_of_token: Tensor
    text_of_token: Tensor


def _find_rows(own: Tensor, lengths: Tensor) -> _Places:
    """Find the rows of texts by the flags of their tokens, bool ``[M]``.

    Raises:
        ValueError: a text has no row, or begins with one.
    """
    count = len(lengths)
    starts = lengths.cumsum(0) - lengths
    text_of_token = torch.arange(count, device=own.device).repeat_interleave(lengths, output_size=len(own))

    token = own.nonzero().squeeze(1)
    text = text_of_token.index_select(0, token)
    rows = torch.bincount(text, minlength=count)
    if bool((rows == 0).any()):
        raise ValueError(
            f"own is False for all tokens of text {int((rows == 0).nonzero()[0])}: a text without a token of the "
            "policy has no row, leave it out"
        )

    read = token - starts.index_select(0, text)
    if bool((read == 0).any()):
        raise ValueError(
            f"own is True for the first token of text {int(text[read == 0][0])}, whose prompt has no tokens: begin "
            "each text with a token that the policy reads, such as the tokenizer's bos_token_id"
        )

    last = torch.ones_like(text, dtype=torch.bool)
    last[:-1] = text[1:] != text[:-1]
    first = torch.ones_like(last)
    first[1:] = last[:-1]
    read_next = torch.where(last, lengths.index_select(0, text), read.roll(-1))
    step = torch.arange(len(text), device=own.device) - (rows.cumsum(0) - rows).index_select(0, text)

    return _Places(token, text, read, read_next, step, first, last, own.cumsum(0) - 1, text_of_token)


def _row_rewards(rewards: Any, tokens: PerToken, lengths: Tensor, places: _Places) -> Tensor:
    """The reward of each row, floating ``[N]``, from one for each text, or one for each token."""
    if not isinstance(rewards, Tensor) and not _is_list_of_texts(rewards):
        rewards = _as_column("rewards", rewards, lengths.device)

    if isinstance(rewards, Tensor) and rewards.shape == (len(lengths), 1):  # as reward models return scores
        rewards = rewards.squeeze(1)

    if isinstance(rewards, Tensor) and rewards.ndim <= 1:
        scores = _floating("rewards", check_dense_tensor("rewards", rewards, lengths.device))
        if scores.shape != lengths.shape:
            raise ValueError(
                f"rewards must have one number for each of the {len(lengths)} texts, or one for each token, got shape "
                f"{tuple(scores.shape)}"
            )
        _check_finite("rewards", scores)
        return torch.where(places.last, scores.index_select(0, places.text), 0.0)

    each = _floating("rewards", _like_tokens("rewards", rewards, tokens, lengths))
    _check_finite("rewards", each)
    row = places.row_of_token
    # Of the tokens before the first row of their text, the row before is one of another text.
    before = (row < 0) | (places.text[row.clamp(min=0)] != places.text_of_token)
    if bool((before & (each != 0)).any()):
        text = int(places.text_of_token[before & (each != 0)][0])
        raise ValueError(
            f"rewards must be 0 before the policy's first token, as no action has led to them: those of text {text} "
            "are not"
        )
    return each.new_zeros(len(places.token)).index_add_(0, row.clamp(min=0), each.masked_fill(before, 0.0))


def _check_finite(name: str, column: Tensor) -> None:
    if not bool(column.isfinite().all()):
        raise ValueError(f"{name} must be finite, got {float(column[~column.isfinite()][0])}")


def _flat_tokens(tokens: Any, lengths: Tensor | None) -> tuple[Tensor, Tensor]:
    """All tokens int64 ``[M]``, one text behind the other, and the length of each text, int64 ``[K]``."""
    if isinstance(tokens, Tensor):
        check_dense_tensor("tokens", tokens)
        if tokens.ndim != 2:
            raise ValueError(
                f"tokens must be a list of texts [L], or a padded tensor [K, L], got shape {tuple(tokens.shape)}"
            )
        count, longest = tokens.shape
        if lengths is None:
            lengths = torch.full((count,), longest, device=tokens.device)
        lengths = _integers("lengths", check_dense_tensor("lengths", lengths, tokens.device))
        if lengths.shape != (count,) or bool(((lengths < 0) | (lengths > longest)).any()):
            raise ValueError(
                f"lengths must be one number from 0 to {longest} for each of the {count} texts, got {as_text(lengths)}"
            )
        flat = tokens[_within(lengths, longest)]
    else:
        if lengths is not None:
            raise ValueError(
                "lengths is only for a padded tensor [K, L] of tokens: a list of texts has its own"
            )
        texts = _list_of_texts("tokens", tokens, None)
        flat = _end_to_end(texts)
        lengths = torch.tensor([len(text) for text in texts], dtype=torch.int64, device=flat.device)

    if not len(lengths):
        raise ValueError("tokens must be at least one text, got none")
    if not len(flat):
        raise ValueError("tokens must be texts of at least two tokens, got only empty ones")
    return _integers("tokens", flat), lengths


def _like_tokens(name: str, values: Any, tokens: PerToken, lengths: Tensor) -> Tensor:
    """Values for tokens, one text behind the other, ``[M]``; ValueError unless they have the texts' lengths."""
    if isinstance(tokens, Tensor):
        shape = tuple(tokens.shape)
        if not isinstance(values, Tensor) or values.shape != tokens.shape:
            raise ValueError(f"{name} must be a tensor of the shape of tokens {shape}, got {as_text(values)}")
        check_dense_tensor(name, values, tokens.device)
        return values[_within(lengths, shape[1])]

    texts = _list_of_texts(name, values, lengths.device)
    if len(texts) != len(lengths):
        raise ValueError(f"{name} must have one entry for each of the {len(lengths)} texts, got {len(texts)}")
    for number, (text, length) in enumerate(zip(texts, lengths.tolist(), strict=True)):
        if len(text) != length:
            raise ValueError(
                f"{name} must have one value for each token: text {number} has {length} tokens, {name}[{number}] has "
                f"{len(text)}"
            )
    return _end_to_end(texts)


def _end_to_end(texts: list[Tensor]) -> Tensor:
    """All values of the texts ``[M]``; empty texts have no dtype to mix in."""
    written = [text for text in texts if len(text)]
    if not written:
        return torch.zeros(0, dtype=torch.int64)
    return torch.cat(written)


def _within(lengths: Tensor, longest: int) -> Tensor:
    """Which places of a padded tensor hold a token, bool ``[K, longest]``."""
    return torch.arange(longest, device=lengths.device) < lengths.unsqueeze(1)


def _is_list_of_texts(values: Any) -> bool:
    """Whether it is a list whose entries are themselves columns, and not numbers."""
    if not isinstance(values, (list, tuple)) or not values:
        return False
    one = values[0]
    return isinstance(one, (list, tuple)) or (isinstance(one, Tensor) and one.ndim > 0)


def _list_of_texts(name: str, values: Any, device: torch.device | None) -> list[Tensor]:
    """The texts of a list as tensors ``[L]`` of one dtype and device."""
    if not isinstance(values, (list, tuple)):
        raise TypeError(
            f"{name} must be a list of texts, or a padded tensor [K, L] as all others, got {as_text(values)}"
        )

    texts = [_as_column(f"{name}[{number}]", text, device) for number, text in enumerate(values)]
    return [text.to(texts[0].device) for text in texts]


def _as_column(name: str, values: Any, device: torch.device | None) -> Tensor:
    """A list of numbers or a tensor as a tensor ``[L]``."""
    if not isinstance(values, Tensor):
        try:
            column = torch.tensor(values, device=device)
        except (TypeError, ValueError, RuntimeError):
            raise TypeError(f"{name} must be numbers, a list or tensor [L], got {as_text(values)}") from None
    else:
        column = check_dense_tensor(name, values)
    if device is not None:
        column = column.to(device)
    if column.ndim != 1:
        raise ValueError(f"{name} must be one-dimensional, got shape {tuple(column.shape)}")
    return column


def _flags(name: str, column: Tensor) -> Tensor:
    """A column of bool, or of 0 and 1 as masks often are, as bool."""
    if column.dtype is torch.bool:
        return column
    if column.is_floating_point() or bool(((column != 0) & (column != 1)).any()):
        raise TypeError(f"{name} must be bool, or integers 0 and 1, got {as_text(column)}")
    return column.to(torch.bool)


def _integers(name: str, column: Tensor) -> Tensor:
    if column.is_floating_point() or column.dtype is torch.bool:
        raise TypeError(f"{name} must be integers, got {column.dtype}")
    return column.to(torch.int64)


def _floating(name: str, column: Tensor) -> Tensor:
    """Numbers in float32, or in float64 as they came: sums of many in less would be far off."""
    if column.dtype is torch.bool:
        raise TypeError(f"{name} must be numbers, got {column.dtype}")
    if column.dtype is torch.float64:
        return column
    return column.to(torch.float32)


def _per_text(name: str, values: Any, lengths: Tensor, dtype: torch.dtype) -> Tensor | None:
    """An argument with one value for each text, ``[K]``, or None."""
    if values is None:
        return None
    column = _as_column(name, values, lengths.device)
    if column.shape != lengths.shape:
        raise ValueError(
            f"{name} must have one value for each of the {len(lengths)} texts, got {len(column)}"
        )
    if dtype is torch.bool:
        return _flags(name, column)
    return _integers(name, column)


def merge_prefixes(
    batch: TensorDictBase, sequences: Sequences, *, observation_key: NestedKey = OBSERVATION
) -> TensorDictBase:
    """Let equal partial texts be equal observations: rows refer to the first text of the table that begins so.

    Answers to one prompt, and branches of one text, share a beginning, but each is a text of its own. After this their
    rows are equal as far as they share it, in the batch and in later ones, so that a `flatroll.trees.MCTSForest` makes
    one tree of them. What a row means does not change. Time and memory are those of all texts of the table, padded.

    Args:
        batch: rows ``[*B]``; it is not changed.
        sequences: the table that they refer to.
        observation_key: entry int64 ``[*B, 2]``; the one under ``"next"`` is changed as well, if it is there.
            Default: ``"observation"``.

    Returns:
        a batch with new observations that shares the other columns.

    Raises:
        KeyError: the batch has no observation, or a text was forgotten.
        ValueError: observations that are no pairs of number and length, or a length beyond the end of its text; a text
            that ends where another one goes on, as one row cannot be the end of one and the middle of the other.

    >>> table = Sequences()
    >>> own = [[False, True, True], [False, True, True]]
    >>> batch = rows_of_texts(table, [[1, 5, 6], [1, 5, 7]], own, None, rewards=[1.0, 0.0])
    >>> batch["observation"].tolist(), merge_prefixes(batch, table)["observation"].tolist()
    ([[0, 1], [0, 2], [1, 1], [1, 2]], [[0, 1], [0, 2], [0, 1], [0, 2]])
    """
    check_rows(batch)
    check_type("sequences", sequences, Sequences, "a table of sequences")
    check_keys(observation_key=observation_key)

    first = _FirstTexts(sequences)
    merged = batch.copy()
    merged.set(observation_key, first.of(require(batch, observation_key), observation_key))
    key = next_key(observation_key)
    following = batch.get(key, None)
    if following is not None:
        after: Any = batch.get(NEXT)
        merged.set(NEXT, after.copy())
        merged.set(key, first.of(following, key))
        if batch.get(DONE, None) is not None:
            first.check_ends(following[marker(batch, DONE).reshape(batch.batch_size)])
    return merged


class _FirstTexts:
    """For each beginning of each text of a table, the first text that begins so."""

    def __init__(self, sequences: Sequences) -> None:
        self.sequences = sequences
        numbers = torch.tensor(list(sequences.numbers), dtype=torch.int64)
        padded, mask = sequences.padded(numbers)
        self.lengths = mask.sum(1)
        padded = padded.masked_fill(mask == 0, -1)

        # The distinct texts in lexicographic order: those with a common beginning stand next to each other.
        sorted_texts, self.place = torch.unique(padded, dim=0, return_inverse=True)
        common = (sorted_texts[1:] == sorted_texts[:-1]).cumprod(1).to(torch.bool)  # [D - 1, L]
        new = torch.ones_like(sorted_texts, dtype=torch.bool)
        new[1:] = ~common
        # At [d, n - 1] the number of the class of texts that share n tokens with text d.
        self.classes = new.cumsum(0) - 1

        # The smallest place in the table in each class.
        count, longest = sorted_texts.shape
        smallest = torch.full((count, longest), len(numbers), device=padded.device)
        places = torch.arange(len(numbers), device=padded.device).unsqueeze(1).expand(-1, longest)
        self.smallest = smallest.scatter_reduce_(0, self.classes[self.place], places, "amin")

        # The length of the longest one.
        reached = self.lengths.unsqueeze(1).expand(-1, longest)
        self.longest = torch.zeros_like(smallest).scatter_reduce_(
            0, self.classes[self.place], reached, "amax"
        )

    def check_ends(self, ended: Tensor) -> None:
        """Raise ValueError if another text goes on where one ends; ``ended`` are the last observations, ``[n, 2]``."""
        number, length = ended.to(self.lengths.device).unbind(-1)
        depth = (length - 1).clamp(min=0)
        classes = self.classes[self.place[number - self.sequences.numbers.start], depth]
        goes_on = self.longest[classes, depth] > length
        if bool(goes_on.any()):
            raise ValueError(
                f"text {int(number[goes_on][0])} ends where another one goes on: their common row would be an end and "
                "none. Leave one of them out, or let texts end with a token of their own"
            )

    def of(self, observation: Tensor, key: NestedKey) -> Tensor:
        """Pairs ``[*B, 2]`` of number and length that refer to the first such text."""
        if observation.dtype != torch.int64 or observation.shape[-1:] != (2,) or observation.is_meta:
            raise ValueError(f"batch[{key!r}] must be int64 [..., 2], got {as_text(observation)}")

        number, length = observation.unbind(-1)
        place = (number - self.sequences.numbers.start).to(self.lengths.device)
        unknown = (place < 0) | (place >= len(self.lengths))
        if bool(unknown.any()):
            self.sequences[int(number[unknown.to(number.device)][0])]  # raises KeyError
        length = length.to(place.device)
        if bool(((length < 0) | (length > self.lengths[place])).any()):
            raise ValueError(f"batch[{key!r}] has a length beyond the end of its text")

        depth = (length - 1).clamp(min=0)
        first = self.smallest[self.classes[self.place[place], depth], depth]
        # All texts share the beginning of no tokens.
        first = torch.where(length > 0, first, 0) + self.sequences.numbers.start
        return torch.stack([first, length], -1).to(observation.device)
