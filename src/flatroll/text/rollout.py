"""Rollouts of causal language models, as flat batches or padded."""

import inspect
from collections import deque
from functools import partial
from typing import Any, get_args

import torch
from tensordict import TensorDict
from torch import Tensor, nn

from flatroll.layout import ACTION, NEXT
from flatroll.layout.checks import (
    as_text,
    check_choice,
    check_flags,
    check_function,
    check_number,
    check_type,
    check_whole_number,
    check_writer_number,
)
from flatroll.layout.keys import ID_BITS
from flatroll.text.data import PromptData
from flatroll.text.kl import KLControllerBase, KLEstimator, kl_estimate
from flatroll.text.passes import Passes, evaluating, most_positions, noted
from flatroll.text.rows import rows_of_texts
from flatroll.text.sampling import (
    CachedSteps,
    check_config,
    generate_tokens,
    is_end,
    pad_left,
    sample_tokens,
    token_log_probs,
)
from flatroll.text.sequences import Sequences

#: What a reward model is passed besides texts and masks, if its signature names it.
_OF_PROMPTS = ("prompt_numbers", "prompt_lengths", "prompt_labels")


class RolloutFromModel:
    """Generates continuations of prompts with a language model and returns them with rewards.

    A step is a token. The reward is ``-kl_coef * KL`` at each token (see `kl_estimate`), plus, at the last one, the
    score of the text minus that of the data's own text, clipped. A text is terminated by an end-of-sequence token, or
    truncated after ``max_new_tokens`` tokens; its last token alone is done.

    Tokens are drawn from the model's whole distribution, and log-probabilities are those of that distribution. Dropout
    is off during a rollout.

    Args:
        model: causal language model of transformers.
        ref_model: the model to stay close to, with the same tokens.
        reward_model: called with ``input_ids=, attention_mask=`` ``[B, L]``; returns rewards of tokens, which are not
            used, and scores ``[B]`` or ``[B, 1]``. If its signature names them, it also gets ``prompt_numbers=``
            int64 ``[B]``, the index of each text's prompt in the batch of prompts, ``prompt_lengths=`` int64 ``[B]``,
            the tokens of the prompt, with which each text begins, and ``prompt_labels=`` ``[B, ...]``, the ``labels``
            of the prompt.
        kl_coef: weight of the KL penalty. Default: 0.1.
        max_new_tokens: T, maximum number of tokens of a continuation. Default: 50.
        score_clip: the difference of scores is clipped to this, on both sides. Default: 10.
        kl_scheduler: computes the next ``kl_coef`` in `step_scheduler`. Default: None, it is constant.
        num_steps: number of last rollouts that `step_scheduler` uses. Default: all since its last call.
        eos_token_id: token, or list of tokens, that ends a text; an empty list for none. Default: that of
            the model's configuration.
        pad_token_id: token after the end of texts. Default: that of the model's configuration, or else 0.
        generation_config: transformers' GenerationConfig; tokens then come from ``model.generate``. Default: None.
        flat: whether `rollout_from_data` returns a flat batch ``[N]``, a row for each token, or a padded one
            ``[B, T]``. Default: False.
        kl_estimator: ``"k1"`` (default), ``"k2"`` or ``"k3"``.
        allow_off_policy: whether ``generation_config`` may change the distribution (top-k, temperature, greedy).
            Log-probabilities are those of the model in any case. Default: False.
        generator: source of randomness. Default: torch's global one, which is always used with ``generation_config``.
        writer: number that makes the trajectory ids of several objects distinct. Default: 0.
        num_answers: K, continuations of each prompt, which follow one another and have the same number under
            ``"group"``: what `flatroll.estimators.GroupAdvantage` compares. Default: 1.

    Attributes:
        sequences: the texts that rows of flat batches refer to.

    Raises:
        ValueError: an argument is out of range, ``generation_config`` changes the distribution without
            ``allow_off_policy``, or no token that ends a text is known.
    """

    def __init__(
        self,
        model: Any,
        ref_model: Any,
        reward_model: Any,
        kl_coef: float = 0.1,
        max_new_tokens: int = 50,
        score_clip: float = 10.0,
        kl_scheduler: KLControllerBase | None = None,
        num_steps: int | None = None,
        *,
        eos_token_id: int | list[int] | None = None,
        pad_token_id: int | None = None,
        generation_config: Any = None,
        flat: bool = False,
        kl_estimator: KLEstimator = "k1",
        allow_off_policy: bool = False,
        generator: torch.Generator | None = None,
        writer: int = 0,
        num_answers: int = 1,
    ) -> None:
        if num_steps is not None:
            check_whole_number("num_steps", num_steps)
        check_choice("kl_estimator", kl_estimator, get_args(KLEstimator))
        check_flags(flat=flat, allow_off_policy=allow_off_policy)

        self.model = model
        self.ref_model = ref_model
        self.reward_model = reward_model
        self.kl_coef = float(check_number("kl_coef", kl_coef))

        if kl_scheduler is not None:
            check_function("kl_scheduler.update", getattr(kl_scheduler, "update", None))
        if generator is not None:
            check_type("generator", generator, torch.Generator, "a torch.Generator or None")

        self.max_new_tokens = check_whole_number("max_new_tokens", max_new_tokens)
        self.num_answers = check_whole_number("num_answers", num_answers)
        self.score_clip = float(check_number("score_clip", score_clip, least=0))
        self.kl_scheduler = kl_scheduler
        self.flat = flat
        self.kl_estimator: KLEstimator = kl_estimator

        self.eos_token_ids = _eos_ids(model, eos_token_id)
        if pad_token_id is None:
            pad_token_id = _config_value(model, "pad_token_id")
        if pad_token_id is None:
            pad_token_id = 0
        self.pad_token_id = _in_vocabulary(model, "pad_token_id", pad_token_id)

        self.generation_config = generation_config
        self.allow_off_policy = allow_off_policy
        if generation_config is not None and not hasattr(generation_config, "to_diff_dict"):
            raise TypeError(
                f"generation_config must be a transformers.GenerationConfig, got {type(generation_config).__name__}"
            )
        if generation_config is not None:
            check_config(generation_config, model, max_new_tokens, allow_off_policy)

        self.generator = generator
        self.sequences = Sequences(check_writer_number(writer) << ID_BITS)
        self._answers = self.sequences.numbers.start  # number of the next answer, for its group
        self._kls: deque[float] = deque(maxlen=num_steps)
        self._steps: CachedSteps | None = None
        self._passes: dict[str, Passes] = {}

    @torch.no_grad()
    def rollout_from_data(self, batch: PromptData) -> TensorDict:
        """Continue the prompts of a `PromptData` ``[B]``; see `create_rollout_td` for the result.

        Raises:
            ValueError: the batch is not right-padded prompts of at least one token, or a text may become longer than
                the model can read.
        """
        for name in ("model", "ref_model", "reward_model"):
            network = getattr(self, name)
            if isinstance(network, type) or not callable(network):
                raise TypeError(f"{name} must be a callable model, got {as_text(network)}")
        return self.create_rollout_td(batch, *self.generate(batch))

    @torch.no_grad()
    def generate(self, batch: PromptData, generation_config: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Continue each prompt ``num_answers`` times.

        Args:
            batch: `PromptData` ``[B]`` with texts of L tokens.
            generation_config: in place of the object's own. Default: None.

        Returns:
            texts int64 ``[B * K, L + T]``, each prompt followed by its continuation, and padding; log-probabilities of
            the T tokens ``[B * K, T, 1]``; and log-ratios between model and reference ``[B * K, T]``. Both are 0
            behind a text's end. The K continuations of a prompt follow one another.
        """
        batch = self._repeated(batch)
        lengths = self._prompt_lengths(batch)
        config = generation_config
        if config is None:
            config = self.generation_config
        else:
            check_config(config, self.model, self.max_new_tokens, self.allow_off_policy)

        prompts, mask = pad_left(batch.input_ids, lengths, self.pad_token_id)
        ends: dict[str, Any] = {"eos": self.eos_token_ids, "pad": self.pad_token_id}
        with evaluating(self.model, self.ref_model):
            log_probs: Tensor | None = None
            if config is None:
                tokens, log_probs = sample_tokens(
                    self._cached_steps(), prompts, mask, self.max_new_tokens, **ends, generator=self.generator
                )
            else:
                tokens = generate_tokens(
                    self.model, prompts, mask, self.max_new_tokens, **ends, config=config
                )

            real = _up_to_first(is_end(tokens, self.eos_token_ids))
            count = int(real.sum(1).max())  # length of the longest text
            whole = torch.cat([prompts, tokens[:, :count]], 1)
            whole_mask = torch.cat([mask, real[:, :count].to(mask.dtype)], 1)

            if log_probs is None or next(self.model.parameters()).dtype.itemsize < 4:
                # In half precision, log-probs computed with a cache differ from those of a pass over the
                # whole text, as in losses.
                log_probs = torch.zeros(tokens.shape, device=tokens.device)
                log_probs[:, :count] = token_log_probs(
                    self._passes_of("model"), whole, whole_mask, lengths, count
                )

            log_ratio = torch.zeros_like(log_probs)
            log_ratio[:, :count] = log_probs[:, :count] - token_log_probs(
                self._passes_of("ref_model"), whole, whole_mask, lengths, count
            )

        log_probs = log_probs.masked_fill(~real, 0.0)
        log_ratio = log_ratio.masked_fill(~real, 0.0)

        rows, length = batch.input_ids.shape
        place = torch.arange(length + self.max_new_tokens, device=tokens.device).expand(rows, -1)
        own = place < lengths.unsqueeze(1)  # the prompt's tokens; all others are padding until they are drawn
        padded = torch.nn.functional.pad(batch.input_ids, (0, self.max_new_tokens))
        generated = padded.where(own, self.pad_token_id)
        generated.scatter_(1, self._places(lengths), tokens)
        return generated, log_probs.unsqueeze(-1), log_ratio

    @torch.no_grad()
    def create_rollout_td(
        self, batch: PromptData, generated: Tensor, log_probs: Tensor, log_ratio: Tensor
    ) -> TensorDict:
        """Turn what `generate` returned into a batch of steps.

        With ``flat=True``, a flat marked batch ``[N]`` with a row for each generated token, texts end to end:

        * ``observation``, int64 ``[N, 2]``: the context, as the number of the text in ``self.sequences`` and the
          number of its tokens read so far; a `TextModule` reads it. ``("next", "observation")`` likewise.
        * ``action``, int64 ``[N]``: the token; ``action_log_prob`` ``[N]``.
        * ``group``, int64 ``[N]``: equal for the answers to one prompt, the number of the first of them.
        * under ``"next"``, ``reward`` and its parts ``reward_raw`` (the score) and ``reward_kl`` ``[N, 1]``.
        * the marks ``is_init``, ``step_count``, trajectory ids, and under ``"next"`` ``terminated``, ``truncated``,
          ``done``.

        With ``flat=False``, a batch ``[B * K, T]`` with the whole text at each token: ``input_ids`` and
        ``attention_mask`` ``[B * K, T, L + T]`` and those under ``"next"``; ``action`` and ``group`` ``[B * K, T]``,
        ``sample_log_prob`` ``[B * K, T, 1]``; rewards and flags as above ``[B * K, T, 1]``. Tokens behind a text's end
        are padding, without reward and not done: ``("collector", "mask")`` ``[B * K, T]`` is False there.

        Args:
            batch: the `PromptData` ``[B]``, each of which has ``num_answers`` K texts.
            generated: int64 ``[B * K, L + T]``.
            log_probs: ``[B * K, T, 1]``.
            log_ratio: ``[B * K, T]``.
        """
        lengths = self._prompt_lengths(self._repeated(batch))
        if len(generated) != len(lengths):
            raise ValueError(
                f"generated must have {self.num_answers} texts (num_answers) for each of the {len(batch)} prompts, "
                f"got {len(generated)}"
            )
        prompt = torch.arange(len(lengths), device=generated.device) // self.num_answers
        action = generated.gather(1, self._places(lengths))
        ends = is_end(action, self.eos_token_ids)
        real = _up_to_first(ends)

        counts = real.sum(1)
        text, step = real.nonzero().unbind(1)  # [N] each: text and position of the drawn tokens
        row = text * self.max_new_tokens + step  # [N], both as one index
        whole = lengths + counts
        written = torch.arange(generated.shape[1], device=generated.device) < whole.unsqueeze(1)  # [B, L + T]

        score = self._scores(batch, generated, written, prompt)
        final = counts.cumsum(0) - 1  # row of the last token of each text

        kl = kl_estimate(log_ratio.flatten().index_select(0, row), self.kl_estimator)
        self._kls.append(float(kl.mean()))
        reward_kl = -self.kl_coef * kl
        raw = torch.zeros_like(reward_kl).index_copy_(0, final, score)
        rewards = {"reward": raw + reward_kl, "reward_raw": raw, "reward_kl": reward_kl}
        rewards = {name: column.unsqueeze(1) for name, column in rewards.items()}
        truncated = ~(ends & real).any(1)
        # The K answers to a prompt have the number of the first one among all answers of this object.
        group = self._answers + prompt * self.num_answers
        self._answers += len(prompt)

        device = generated.device
        if self.flat:
            places = self._places(lengths)
            own = torch.zeros_like(written).scatter_(1, places, real)
            of_tokens = torch.zeros(generated.shape, device=device).scatter_(1, places, log_probs.squeeze(2))
            texts: dict[str, Any] = {"lengths": whole, "truncated": truncated, "groups": group}
            batch_of_rows = rows_of_texts(self.sequences, generated, own, of_tokens, score, **texts)
            for name, column in rewards.items():
                batch_of_rows.set((NEXT, name), column)
            return batch_of_rows

        shape = real.shape
        done = torch.zeros_like(row, dtype=torch.bool).index_fill_(0, final, True)
        cut = done & truncated.index_select(0, text)
        flags = {"terminated": done ^ cut, "truncated": cut, "done": done}
        after = rewards | {name: column.unsqueeze(1) for name, column in flags.items()}
        after = {name: _spread(column, row, shape) for name, column in after.items()}
        now, then = _whole_texts(generated, lengths, counts, self.pad_token_id, shape[1])
        now |= {ACTION: action, "sample_log_prob": log_probs}
        now["group"] = group.unsqueeze(1).repeat(1, shape[1])
        return TensorDict(now | {"collector": {"mask": real}, NEXT: after | then}, shape, device)

    def step_scheduler(self) -> float:
        """Update ``kl_coef`` by the scheduler, from the mean KL of the rollouts since the last call.

        Without a scheduler the coefficient does not change.

        Raises:
            ValueError: there is a scheduler, and no rollout since the last call.
        """
        if self.kl_scheduler is not None:
            if not self._kls:
                raise ValueError("step_scheduler needs a rollout since its last call")
            mean = sum(self._kls) / len(self._kls)
            self.kl_coef = self.kl_scheduler.update(kl=mean, n_steps=len(self._kls))
        self._kls.clear()
        return self.kl_coef

    def _cached_steps(self) -> CachedSteps:
        """The model's steps, made anew when ``self.model`` is another one, whose cache is then checked."""
        if self._steps is None or self._steps.model is not self.model:
            self._steps = CachedSteps(self.model)
        return self._steps

    def _passes_of(self, name: str) -> Passes:
        """Passes of the model that is now called ``name``."""
        model = getattr(self, name)
        if name not in self._passes or self._passes[name].model is not model:
            self._passes[name] = Passes(model)
        return self._passes[name]

    def _places(self, lengths: Tensor) -> Tensor:
        """Return the positions of the T tokens of each continuation, after the prompt, int64 ``[B, T]``."""
        return lengths.unsqueeze(1) + torch.arange(self.max_new_tokens, device=lengths.device)

    def _repeated(self, batch: PromptData) -> PromptData:
        """Each prompt ``num_answers`` times, one after the other."""
        if self.num_answers == 1 or not hasattr(batch, "prompt_rindex"):
            return batch  # without prompts, which `_prompt_lengths` refuses
        columns = [
            column.repeat_interleave(self.num_answers, 0)
            for column in (batch.input_ids, batch.attention_mask, batch.prompt_rindex)
        ]
        return PromptData(*columns, batch_size=[len(columns[0])])

    def _scores(self, batch: PromptData, generated: Tensor, written: Tensor, prompt: Tensor) -> Tensor:
        """Scores of the texts ``[B * K]`` over those of the data's own, clipped; ``prompt`` is each text's prompt."""
        numbers = torch.arange(len(batch.input_ids), device=prompt.device)
        both = []
        with evaluating(self.reward_model), noted("In reward_model(input_ids=, attention_mask=)"):
            for ids, known, of in (
                (generated, written, prompt),
                (batch.input_ids, batch.attention_mask, numbers),
            ):
                asked = self._of_prompts(batch, of)
                both.append(
                    self.reward_model(input_ids=ids, attention_mask=known.to(torch.int64), **asked)[-1]
                )

        for score, count in zip(both, (len(prompt), len(numbers)), strict=True):
            if score.shape not in ((count,), (count, 1)):
                raise ValueError(
                    f"reward_model must return (rewards, scores) with scores [{count}], got {tuple(score.shape)}"
                )
        score, own = (score.reshape(-1).to(generated.device, torch.float32) for score in both)
        own = own.index_select(0, prompt)

        if not bool((score - own).isfinite().all()):
            raise ValueError("reward_model returned a score that is not finite")
        gain: Tensor = score - own
        return gain.clamp(-self.score_clip, self.score_clip)

    def _of_prompts(self, batch: PromptData, prompt: Tensor) -> dict[str, Tensor]:
        """What the reward model's signature asks for about the prompts of texts, int64 ``[B]``."""
        function = self.reward_model
        if isinstance(function, nn.Module):
            function = function.forward
        try:
            accepted = inspect.signature(function).parameters
        except (TypeError, ValueError):  # some callables that are not written in Python have none
            return {}

        given: set[str] = set()
        if isinstance(function, partial):
            given = {*function.keywords}

        found = {}
        for name in _OF_PROMPTS:
            if name not in accepted or name in given:
                continue
            if name == "prompt_numbers":
                found[name] = prompt
                continue
            if name == "prompt_lengths":
                found[name] = (batch.prompt_rindex + 1).index_select(0, prompt)
                continue

            column = getattr(batch, "labels", None)
            has_default = accepted[name].default is not inspect.Parameter.empty
            if column is None and has_default:
                continue
            if column is None:
                raise ValueError(
                    "reward_model asks for prompt_labels, but the batch of prompts has no labels: pass labels= to "
                    "PromptData"
                )
            found[name] = column.index_select(0, prompt)
        return found

    def _prompt_lengths(self, batch: PromptData) -> Tensor:
        """Tokens of each prompt, int64 ``[B]``, checked."""
        if not hasattr(batch, "prompt_rindex"):
            raise TypeError(f"batch must be a PromptData, got {type(batch).__name__}")

        rindex = batch.prompt_rindex
        rows, length = batch.input_ids.shape
        if rindex.shape != (rows,) or rows == 0:
            raise ValueError(
                f"prompt_rindex must have shape {(rows,)}, with at least one row, got {tuple(rindex.shape)}"
            )

        if batch.attention_mask.shape != batch.input_ids.shape:
            raise ValueError(
                f"attention_mask must have the shape of input_ids, {list(batch.input_ids.shape)}, got "
                f"{list(batch.attention_mask.shape)}"
            )

        first, last = (int(index) for index in rindex.aminmax())
        if first < 0 or last >= length:
            raise ValueError(
                f"prompt_rindex must be the index of a token, 0 to {length - 1}, got {first} to {last}"
            )
        if not bool(
            batch.attention_mask.gather(1, rindex.unsqueeze(1)).all() and batch.attention_mask[:, 0].all()
        ):
            raise ValueError("prompts must be right-padded: attention_mask is 0 in the prompt of a row")

        most = most_positions(self.model)
        longest = last + 1 + self.max_new_tokens
        if most is not None and longest > most:
            raise ValueError(
                f"prompts of up to {last + 1} tokens and max_new_tokens={self.max_new_tokens} make texts "
                f"of {longest} tokens, but the model reads at most {most}"
            )

        lengths: Tensor = rindex + 1
        return lengths


def _up_to_first(ends: Tensor) -> Tensor:
    """Which entries of bool rows ``[B, T]`` have no True before them."""
    return (ends.cumsum(1) - ends.to(torch.int64)) == 0


def _spread(column: Tensor, row: Tensor, shape: torch.Size) -> Tensor:
    """The column ``[N, 1]`` in places ``row`` of a padded one ``[B, T, 1]``, zeros elsewhere."""
    return column.new_zeros(shape.numel(), 1).index_copy_(0, row, column).view(*shape, 1)


def _whole_texts(
    generated: Tensor, lengths: Tensor, counts: Tensor, pad: int, steps: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The text known before and after each of T steps, ``[B, T, L + T]``, with padding behind it."""
    place = torch.arange(generated.shape[1], device=generated.device)
    step = torch.arange(steps + 1, device=generated.device)
    known = lengths.unsqueeze(1) + step.minimum(counts.unsqueeze(1))  # [B, T + 1] tokens
    mask = place < known.unsqueeze(2)
    texts = {"input_ids": generated.unsqueeze(1).where(mask, pad), "attention_mask": mask}
    now = {key: column[:, :-1].clone() for key, column in texts.items()}
    return now, {key: column[:, 1:].clone() for key, column in texts.items()}


def _config_value(model: object, name: str) -> Any:
    """What the model's generation configuration, or else its configuration, says."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return None


def _in_vocabulary(model: object, name: str, token: int) -> int:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    check_whole_number(name, token, -(2**63))
    if token < 0 or (size is not None and token >= size):
        raise ValueError(
            f"{name} {token} is not a token of the model (vocab_size={size}): pass {name}=tokenizer.{name}"
        )
    return int(token)


def _eos_ids(model: object, eos: int | list[int] | None) -> list[int]:
    if eos is None:
        eos = _config_value(model, "eos_token_id")
    if eos is None:
        raise ValueError(
            "eos_token_id is neither given nor in the model's configuration: pass tokenizer.eos_token_id, or [] if no "
            "token ends a text"
        )

    tokens = list(eos) if isinstance(eos, (list, tuple)) else [eos]
    return [_in_vocabulary(model, "eos_token_id", token) for token in tokens]
