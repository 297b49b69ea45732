"""Samples tokens from a causal language model, and computes log-probabilities of tokens."""

from copy import deepcopy
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from flatroll.text.passes import REFUSALS, Passes, agree
from flatroll.text.sequences import Sequences

#: Entries of a generation config that never change the model's distribution.
_HARMLESS = {
    "max_new_tokens", "max_length", "eos_token_id", "pad_token_id", "bos_token_id", "decoder_start_token_id",
    "use_cache", "cache_implementation", "cache_config", "max_cache_len", "prefill_chunk_size", "compile_config",
    "disable_compile", "low_memory", "output_attentions", "output_hidden_states", "output_scores", "output_logits",
    "return_dict_in_generate", "transformers_version", "_from_model_config", "is_assistant",
}  # fmt: skip
#: What transformers calls a model's cache of keys and values, since 5.24 and before.
_CACHE_NAMES = ("cache", "past_key_values")
#: Values with which these entries have no effect.
_PLAIN = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0}
#: Entries that stop generation by other criteria than EOS and length, or change the number of rows.
_REFUSED = ("max_time", "stop_strings", "num_return_sequences", "num_beams")


def pad_left(input_ids: Tensor, lengths: Tensor, pad: int) -> tuple[Tensor, Tensor]:
    """Move the first ``lengths`` tokens of each row to its right end.

    Args:
        input_ids: int64 ``[B, L]``.
        lengths: int64 ``[B]``.
        pad: token for padding on the left.

    Returns:
        tokens and mask, int64 ``[B, longest]``.

    >>> pad_left(torch.tensor([[5, 6, 7], [8, 9, 9]]), torch.tensor([2, 1]), pad=0)
    (tensor([[5, 6],
            [0, 8]]), tensor([[1, 1],
            [0, 1]]))
    """
    longest = int(lengths.max())
    # Position j of the result holds token j - (longest - length) of the row, or padding where that is negative.
    place = torch.arange(longest, device=input_ids.device) - (longest - lengths).unsqueeze(1)
    mask = place >= 0
    return input_ids.gather(1, place.clamp(min=0)).masked_fill(~mask, pad), mask.to(torch.int64)


class CachedSteps:
    """Runs a causal language model over texts that grow by a token, with its cache of keys and values.

    The cache's argument is called ``past_key_values``, and ``cache`` since transformers 5.24. The name comes from the
    signature of ``model.forward``; a forward that takes any keyword gets the name of the output that holds the cache.
    Such a forward could ignore the name, so the first step that uses the cache is compared with a pass over the whole
    text, once.

    Args:
        model: causal language model of transformers.
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._accepted = frozenset(signature(model.forward).parameters)
        self._compared = False
        # Whether rows of the cache may be copied to other rows; None until that was tried.
        self.copies: bool | None = None

    def first(self, tokens: Tensor, mask: Tensor, position: Tensor) -> tuple[Tensor, tuple[str, Any]]:
        """Logits ``[B, V]`` behind the texts ``[B, L]``, and the cache. Equal texts are run once."""
        real = tokens.where(mask.bool(), -1)
        distinct, index = torch.unique(real, dim=0, return_inverse=True)
        if len(distinct) == len(tokens) or not self._can_copy(tokens, mask):
            return self._run(tokens, mask, position)

        # One row of each kind: which of equal ones does not matter.
        row = index.new_empty(len(distinct))
        row[index] = torch.arange(len(tokens), device=index.device)
        logits, cache = self._run(tokens[row], mask[row], position[row])
        return logits[index], _copied(cache, index)

    def next(
        self, tokens: Tensor, mask: Tensor, position: Tensor, cache: tuple[str, Any]
    ) -> tuple[Tensor, tuple[str, Any]]:
        """Logits ``[B, V]`` behind ``tokens`` ``[B, L]``, and the cache, which held all but the last of them."""
        logits, after = self._run(tokens[:, -1:], mask, position[:, -1:], cache)

        if not self._compared:
            self._compare(logits, tokens, mask, position, cache[0])
            self._compared = True
        return logits, after

    def _can_copy(self, tokens: Tensor, mask: Tensor) -> bool:
        """Whether rows of the model's cache may be copied to other rows, tried once, with two short texts."""
        if self.copies is None:
            text = tokens[-1:, -16:]
            other = (text - 1).where(text > 0, 1)
            index = torch.tensor([1, 0, 1], device=tokens.device)
            short = torch.cat([text, other])
            real = mask[-1:, -16:].expand(2, -1)
            longer = torch.cat([short, text[:, -1:].expand(2, -1)], 1)[index]  # the same token behind both
            after = torch.cat([real, torch.ones_like(real[:, :1])], 1)[index]
            place = (after.cumsum(1) - 1).clamp(min=0)
            last = (longer[:, -1:], after, place[:, -1:])

            _, whole = self._run(longer[:, :-1], after[:, :-1], place[:, :-1])
            expected, _ = self._run(*last, whole)
            _, cache = self._run(short, real, place[:2, :-1])
            try:
                found, _ = self._run(*last, _copied(cache, index))
            except REFUSALS:
                self.copies = False
                return False

            self.copies = agree(found, expected, reach=expected[0] - expected[1])
        return bool(self.copies)

    def _run(
        self, tokens: Tensor, mask: Tensor, position: Tensor, cache: tuple[str, Any] | None = None
    ) -> tuple[Tensor, tuple[str, Any]]:
        options: dict[str, Any] = {"use_cache": True}
        if "logits_to_keep" in self._accepted:
            options["logits_to_keep"] = 1
        if cache is not None:
            name, value = cache
            options[self._argument(name)] = value

        output = self.model(input_ids=tokens, attention_mask=mask, position_ids=position, **options)
        return output.logits[:, -1], self._find_cache(output)

    def _argument(self, written: str) -> str:
        """Name of the argument for a cache, which the output calls ``written``."""
        return next((name for name in _CACHE_NAMES if name in self._accepted), written)

    def _find_cache(self, output: Any) -> tuple[str, Any]:
        """The output's cache, with the name that it has there."""
        for name in _CACHE_NAMES:
            value = getattr(output, name, None)
            if value is not None:
                return name, value
        raise ValueError(
            "model must return a cache of keys and values when it is called with use_cache=True, as cache or "
            f"past_key_values, but {type(self.model).__name__} returned none: pass a generation_config, so that "
            "tokens come from model.generate"
        )

    def _compare(self, logits: Tensor, tokens: Tensor, mask: Tensor, position: Tensor, name: str) -> None:
        """Raise if logits ``[B, V]`` are those of the last token alone rather than those of the whole text."""
        row = int(mask.sum(1).argmax())  # the longest text, which has no padding
        own = slice(row, row + 1)
        whole, _ = self._run(tokens[own], mask[own], position[own])
        alone, _ = self._run(tokens[own, -1:], mask[own, -1:], position[own, -1:])

        drawn_from, expected, without = (
            some[0].float().softmax(-1) for some in (logits[own], whole, alone)
        )  # [V] each
        # Half of the sum of absolute differences: the share of draws that could differ, 0 to 1.
        to_whole = float((drawn_from - expected).abs().sum() / 2)
        to_alone = float((drawn_from - without).abs().sum() / 2)
        rounding = torch.finfo(logits.dtype).eps ** 0.5

        if to_whole > rounding and to_alone < to_whole:
            raise ValueError(
                f"model ignores its cache: {type(self.model).__name__}.forward got it as "
                f"{self._argument(name)}=, but its probabilities of the second token are those of the "
                f"first token alone, without the prompt (they differ by {to_alone:.2g} from those, and by "
                f"{to_whole:.2g} from those of the whole text). Name the argument in forward "
                "(cache or past_key_values), or pass a generation_config, so that tokens come from model.generate"
            )


def _copied(cache: tuple[str, Any], index: Tensor) -> tuple[str, Any]:
    """The rows ``index`` of a cache: a cache of transformers, a tensor, or tuples of tensors."""
    name, value = cache
    if hasattr(value, "reorder_cache"):
        value.reorder_cache(index)
        return name, value
    return name, _rows(value, index)


def _rows(value: Any, index: Tensor) -> Any:
    if isinstance(value, (tuple, list)):
        return tuple(_rows(part, index) for part in value)
    if not isinstance(value, Tensor):
        raise TypeError(f"a cache of {type(value).__name__} cannot be copied")
    return value.index_select(0, index)


def sample_tokens(
    steps: CachedSteps,
    prompts: Tensor,
    mask: Tensor,
    max_new_tokens: int,
    *,
    eos: list[int],
    pad: int,
    generator: torch.Generator | None = None,
) -> tuple[Tensor, Tensor]:
    """Draw tokens from the model's whole distribution until EOS or ``max_new_tokens``.

    Args:
        steps: the model.
        prompts: int64 ``[B, L]``, left-padded.
        mask: int64 ``[B, L]``, 0 at padding.
        max_new_tokens: T, maximum number of tokens to draw.
        eos: tokens that end a row.
        pad: token after the end of a row.
        generator: source of randomness. Default: torch's own.

    Returns:
        tokens int64 ``[B, T]`` and their log-probabilities ``[B, T]``, 0 after the end.

    Raises:
        ValueError: the model returns no cache, or ignores the one it gets.
    """
    rows, length = prompts.shape
    texts = torch.full((rows, length + max_new_tokens), pad, device=prompts.device)
    texts[:, :length] = prompts
    log_probs = torch.zeros((rows, max_new_tokens), device=prompts.device)
    mask = torch.cat([mask, mask.new_ones(rows, max_new_tokens)], 1)
    position = (mask.cumsum(1) - 1).clamp(min=0)
    ended = torch.zeros(rows, dtype=torch.bool, device=prompts.device)

    logits, cache = steps.first(prompts, mask[:, :length], position[:, :length])
    for step in range(max_new_tokens):
        log_prob = logits.float().log_softmax(-1)
        drawn = torch.multinomial(log_prob.exp(), 1, generator=generator)  # [B, 1]
        texts[:, length + step] = drawn.squeeze(1).masked_fill(ended, pad)
        log_probs[:, step] = log_prob.gather(1, drawn).squeeze(1).masked_fill(ended, 0.0)

        ended = ended | is_end(drawn.squeeze(1), eos)
        if step + 1 == max_new_tokens or bool(ended.all()):
            break
        known = length + step + 1
        logits, cache = steps.next(texts[:, :known], mask[:, :known], position[:, :known], cache)
    return texts[:, length:], log_probs


def generate_tokens(
    model: Any, prompts: Tensor, mask: Tensor, max_new_tokens: int, *, eos: list[int], pad: int, config: Any
) -> Tensor:
    """Draw tokens ``[B, T]`` by the model's own ``generate``, ``pad`` where it stopped before ``max_new_tokens``."""
    config = deepcopy(config)
    # Otherwise the defaults of the model's config and of transformers apply.
    for name, value in _PLAIN.items():
        if getattr(config, name, None) is None:
            setattr(config, name, value)
    config.max_new_tokens = max_new_tokens
    config.pad_token_id = pad
    config.eos_token_id = eos or None
    config.return_dict_in_generate = False

    texts = model.generate(input_ids=prompts, attention_mask=mask, generation_config=config)
    drawn = texts[:, prompts.shape[1] :]
    tokens = torch.full((len(prompts), max_new_tokens), pad, device=prompts.device)
    tokens[:, : drawn.shape[1]] = drawn
    return tokens


def is_end(tokens: Tensor, eos: list[int]) -> Tensor:
    """Return which tokens end a text: bool of the shape of ``tokens``."""
    ends = torch.zeros_like(tokens, dtype=torch.bool)
    for token in eos:  # for the few tokens there are, faster than torch.isin
        ends |= tokens == token
    return ends


def check_config(config: Any, model: object, max_new_tokens: int, allow_off_policy: bool) -> None:
    """Refuse a generation config that changes the model's token distribution.

    Args:
        config: transformers' GenerationConfig.
        model: its own config fills the gaps of ``config``.
        max_new_tokens: what the rollout has.
        allow_off_policy: whether another distribution is wanted.

    Raises:
        ValueError: it is another distribution and not wanted, or rows could end by other things than EOS and length.
    """
    own = getattr(model, "generation_config", None)
    changes = config.to_diff_dict()
    if own is not None:
        filled = own.to_diff_dict()
        changes = {
            name: value
            for name, value in filled.items()
            if name not in _PLAIN and getattr(config, name, None) is None
        } | changes

    unlike = {
        name: value
        for name, value in changes.items()
        if name not in _HARMLESS and value is not None and value != _PLAIN.get(name, ())
    }
    refused = {name: value for name, value in unlike.items() if name in _REFUSED}
    if refused:
        raise ValueError(
            f"generation_config has {_as_text(refused)}: a rollout draws one text for each prompt, which ends "
            "at EOS or after max_new_tokens; pass num_answers= to draw several"
        )

    if config.max_new_tokens not in (None, max_new_tokens):
        raise ValueError(
            f"generation_config.max_new_tokens is {config.max_new_tokens}, but max_new_tokens is {max_new_tokens}: "
            "pass only max_new_tokens"
        )
    if unlike and not allow_off_policy:
        raise ValueError(
            f"generation_config has {_as_text(unlike)}: tokens would not be drawn from the model's own "
            "distribution, whose log-probabilities a rollout records. Leave it out (top_k=0, top_p=1.0), or "
            "pass allow_off_policy=True"
        )


def token_log_probs(passes: Passes, tokens: Tensor, mask: Tensor, prompts: Tensor, count: int) -> Tensor:
    """Log-probabilities ``[B, count]`` of the last ``count`` tokens by the whole distribution; 0 where there are none.

    Args:
        passes: of a causal language model of transformers.
        tokens: int64 ``[B, L]``, padded.
        mask: int64 ``[B, L]``, 0 at padding.
        prompts: int64 ``[B]``, tokens of each prompt, which are run once where rows share them.
        count: how many tokens at the right end.
    """
    table = Sequences()
    lengths = mask.sum(1)
    numbers = table.add(tokens[mask.bool()], lengths, prompts)
    texts, _ = table.texts(numbers)

    drawn = mask[:, -count:].bool()
    text, _ = drawn.nonzero().unbind(1)
    known = (mask.cumsum(1)[:, -count:] - 1)[drawn]  # how many tokens are before the drawn one
    chosen = tokens[:, -count:][drawn]

    def read(logits: Tensor, rows: Tensor) -> Tensor:
        return -cross_entropy(logits.float(), chosen[rows].to(logits.device), reduction="none")

    found = passes.outputs(texts, text, known, read)
    log_probs = torch.zeros(drawn.shape, device=tokens.device)
    return log_probs.masked_scatter_(drawn, found.to(tokens.device))


def _as_text(entries: dict[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in entries.items())
