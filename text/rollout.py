"""Rollouts of causal language models, as flat batches or padded."""

from collections import deque
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor

from flatroll.layout import ACTION, DONE, IS_INIT, MASK, OBSERVATION, REWARD, STEP_COUNT, TERMINATED, TRAJ_IDS
from flatroll.layout import TRUNCATED, next_key
from flatroll.text.kl import KLControllerBase, KLEstimator, kl_estimate
from flatroll.text.sampling import (
    check_config,
    evaluating,
    generate_tokens,
    left_padded,
    sample_tokens,
    token_log_probs,
)
from flatroll.text.sequences import Sequences

_ID_BITS = 40  # a trajectory id is writer * 2**40 + number, as TrajId has it


class RolloutFromModel:
    """Lets a language model continue prompts, and returns what it did with rewards.

    A step is a token. The reward is ``-kl_coef * KL`` at each token (see `kl_estimate`), plus, at the last one, the score of
    the text minus that of the data's own text, clipped. A text is terminated by an end-of-sequence token, or truncated
    after ``max_new_tokens`` tokens; its last token alone is done.

    Tokens are drawn from the model's whole distribution, and log-probabilities are those of that distribution. Dropout is
    off during a rollout.

    Args:
        model: causal language model of transformers.
        ref_model: the model to stay close to, with the same tokens.
        reward_model: called with ``input_ids=, attention_mask=`` ``[B, L]``; returns rewards of tokens, which are not
            used, and scores ``[B]`` or ``[B, 1]``.
        kl_coef: weight of the KL penalty. Default: 0.1.
        max_new_tokens: T, the most tokens of a continuation. Default: 50.
        score_clip: the difference of scores is clipped to this, on both sides. Default: 10.
        kl_scheduler: what `step_scheduler` asks for the next ``kl_coef``. Default: None, it stays.
        num_steps: `step_scheduler` looks at the last so many rollouts. Default: at all since it was called.
        eos_token_id: token, or list of tokens, that ends a text; an empty list for none. Default: what the model's
            configuration says.
        pad_token_id: token behind the end of texts. Default: what the model's configuration says, or else 0.
        generation_config: transformers' GenerationConfig; tokens then come from ``model.generate``. Default: None.
        flat: whether `rollout_from_data` returns a flat batch ``[N]``, a row for each token, or a padded one
            ``[B, T]``. Default: False.
        kl_estimator: ``"k1"`` (default), ``"k2"`` or ``"k3"``.
        allow_off_policy: whether ``generation_config`` may change the distribution (top-k, temperature, greedy).
            Log-probabilities are those of the model all the same. Default: False.
        generator: source of randomness. Default: torch's own.
        writer: number that keeps the trajectory ids of several objects apart. Default: 0.

    Attributes:
        sequences: the texts that rows of flat batches refer to.

    Raises:
        ValueError: an argument is out of range, ``generation_config`` changes the distribution unasked, or nobody says
            what ends a text.
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
    ) -> None:
        for name, value in (("max_new_tokens", max_new_tokens), ("num_steps", num_steps)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if score_clip < 0 or writer < 0:
            raise ValueError(f"score_clip and writer must not be negative, got {score_clip} and {writer}")
        kl_estimate(torch.zeros(0), kl_estimator)  # refuses an unknown name
        self.model, self.ref_model, self.reward_model = model, ref_model, reward_model
        self.kl_coef, self.max_new_tokens, self.score_clip = float(kl_coef), max_new_tokens, score_clip
        self.kl_scheduler, self.flat, self.kl_estimator = kl_scheduler, flat, kl_estimator
        self.eos_token_ids = _eos_of(model, eos_token_id)
        self.pad_token_id = _pad_of(model, pad_token_id)
        self.generation_config, self.allow_off_policy = generation_config, allow_off_policy
        if generation_config is not None:
            check_config(generation_config, model, max_new_tokens, allow_off_policy)
        self.generator = generator
        self.sequences = Sequences(writer << _ID_BITS)
        self._kls: deque[float] = deque(maxlen=num_steps)

    @torch.no_grad()
    def rollout_from_data(self, batch: Any) -> TensorDict:
        """Continue the prompts of a `PromptData` ``[B]``; see `create_rollout_td` for what comes back.

        Raises:
            ValueError: the batch is not right-padded prompts of at least one token, or a text may become longer than
                the model can read.
        """
        return self.create_rollout_td(batch, *self.generate(batch))

    @torch.no_grad()
    def generate(self, batch: Any, generation_config: Any = None) -> tuple[Tensor, Tensor, Tensor]:
        """Continue prompts.

        Args:
            batch: `PromptData` ``[B]`` with texts of L tokens.
            generation_config: in place of the object's own. Default: None.

        Returns:
            texts int64 ``[B, L + T]``, each prompt followed by its continuation, and padding; log-probabilities of the T
            tokens ``[B, T, 1]``; and log-ratios between model and reference ``[B, T]``. Both are 0 behind a text's end.
        """
        lengths = self._prompt_lengths(batch)
        config = generation_config
        if config is None:
            config = self.generation_config
        else:
            check_config(config, self.model, self.max_new_tokens, self.allow_off_policy)
        prompts, mask = left_padded(batch.input_ids, lengths, self.pad_token_id)
        ends: dict[str, Any] = {"eos": self._eos(prompts.device), "pad": self.pad_token_id}
        with evaluating(self.model, self.ref_model):
            if config is None:
                tokens, log_probs = sample_tokens(
                    self.model, prompts, mask, self.max_new_tokens, **ends, generator=self.generator
                )
            else:
                tokens = generate_tokens(
                    self.model, prompts, mask, self.max_new_tokens, **ends, config=config
                )
            real = self._real(tokens)
            count = int(real.sum(1).max())  # no text is longer
            whole = torch.cat([prompts, tokens[:, :count]], 1)
            whole_mask = torch.cat([mask, real[:, :count].to(mask.dtype)], 1)
            if config is not None or next(self.model.parameters()).dtype.itemsize < 4:
                # Half precision through the cache differs from a pass over the whole text, which losses do.
                log_probs = torch.zeros(tokens.shape, device=tokens.device)
                log_probs[:, :count] = token_log_probs(self.model, whole, whole_mask, count)
            log_ratio = torch.zeros_like(log_probs)
            log_ratio[:, :count] = log_probs[:, :count] - token_log_probs(
                self.ref_model, whole, whole_mask, count
            )
        log_probs, log_ratio = log_probs.masked_fill(~real, 0.0), log_ratio.masked_fill(~real, 0.0)
        rows, length = batch.input_ids.shape
        place = torch.arange(length + self.max_new_tokens, device=tokens.device).expand(rows, -1)
        own = place < lengths.unsqueeze(1)  # the prompt's own tokens; others are padding until they are drawn
        generated = torch.nn.functional.pad(batch.input_ids, (0, self.max_new_tokens)).where(own, self.pad_token_id)
        generated.scatter_(1, self._places(lengths), tokens)
        return generated, log_probs.unsqueeze(-1), log_ratio

    @torch.no_grad()
    def create_rollout_td(self, batch: Any, generated: Tensor, log_probs: Tensor, log_ratio: Tensor) -> TensorDict:
        """Turn what `generate` returned into a batch of steps.

        With ``flat=True``, a flat marked batch ``[N]`` with a row for each generated token, texts end to end:

        * ``observation``, int64 ``[N, 2]``: what was known, as the number of the text in ``self.sequences`` and how many
          of its tokens; a `TextModule` reads it. ``("next", "observation")`` likewise.
        * ``action``, int64 ``[N]``: the token; ``action_log_prob`` ``[N]``.
        * ``("next", "reward")``, and its parts ``("next", "reward_raw")`` (score) and ``("next", "reward_kl")`` ``[N, 1]``.
        * the marks ``is_init``, ``step_count``, trajectory ids, and ``terminated``, ``truncated``, ``done`` under ``"next"``.

        With ``flat=False``, a batch ``[B, T]`` with the whole text at each token: ``input_ids`` and ``attention_mask``
        ``[B, T, L + T]`` and those under ``"next"``; ``action`` ``[B, T]``, ``sample_log_prob`` ``[B, T, 1]``; rewards and
        flags as above ``[B, T, 1]``. Tokens behind a text's end are padding, without reward and not done:
        ``("collector", "mask")`` ``[B, T]`` is False there.

        Args:
            batch: the `PromptData` ``[B]``.
            generated: int64 ``[B, L + T]``.
            log_probs: ``[B, T, 1]``.
            log_ratio: ``[B, T]``.
        """
        lengths = self._prompt_lengths(batch)
        action = generated.gather(1, self._places(lengths))
        real = self._real(action)
        counts = real.sum(1)
        raw = torch.zeros(log_ratio.shape, device=generated.device)
        raw.scatter_(1, counts.unsqueeze(1) - 1, self._scores(batch, generated, lengths + counts).unsqueeze(1))
        kl = kl_estimate(log_ratio, self.kl_estimator)
        reward_kl = -self.kl_coef * kl
        self._kls.append(float(kl[real].mean()))
        last = torch.zeros_like(real).scatter_(1, counts.unsqueeze(1) - 1, True)
        terminated = last & torch.isin(action, self._eos(action.device))
        columns = {
            ACTION: action,
            REWARD: (raw + reward_kl).unsqueeze(-1),
            next_key("reward_raw"): raw.unsqueeze(-1),
            next_key("reward_kl"): reward_kl.unsqueeze(-1),
            TERMINATED: terminated.unsqueeze(-1),
            TRUNCATED: (last & ~terminated).unsqueeze(-1),
            DONE: last.unsqueeze(-1),
        }
        if self.flat:
            rows = {key: column[real] for key, column in columns.items()}
            rows["action_log_prob"] = log_probs.squeeze(-1)[real]
            return _tensordict(rows | self._marks(generated, lengths, counts), [int(counts.sum())])
        columns |= _whole_texts(generated, lengths, counts, self.pad_token_id, action.shape[1])
        columns |= {"sample_log_prob": log_probs, MASK: real}
        return _tensordict(columns, list(action.shape))

    def step_scheduler(self) -> float:
        """Ask the scheduler for the next ``kl_coef``, by the mean KL of the rollouts since the last call.

        Without a scheduler the coefficient stays as it is.

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

    def _eos(self, device: torch.device) -> Tensor:
        return torch.tensor(self.eos_token_ids, dtype=torch.int64, device=device)

    def _places(self, lengths: Tensor) -> Tensor:
        """Where the T tokens of each continuation stand, int64 ``[B, T]``: behind the prompt."""
        return lengths.unsqueeze(1) + torch.arange(self.max_new_tokens, device=lengths.device)

    def _real(self, tokens: Tensor) -> Tensor:
        """Which of the tokens ``[B, T]`` belong to the continuation: all up to the first EOS, itself included."""
        ends = torch.isin(tokens, self._eos(tokens.device))
        return (ends.cumsum(1) - ends.to(torch.int64)) == 0  # no EOS stands before

    def _marks(self, generated: Tensor, lengths: Tensor, counts: Tensor) -> dict[Any, Tensor]:
        """Marks and observations of a flat batch; the texts go into the table."""
        places = torch.arange(generated.shape[1], device=generated.device)
        whole = lengths + counts
        numbers = self.sequences.add(generated[places < whole.unsqueeze(1)], whole)
        text = torch.arange(len(counts), device=counts.device).repeat_interleave(counts)  # of each row
        first = counts.cumsum(0) - counts  # row at which each text begins
        step = torch.arange(len(text), device=text.device) - first[text]
        observation = torch.stack([numbers[text], lengths[text] + step], 1)
        return {
            OBSERVATION: observation,
            next_key(OBSERVATION): observation + observation.new_tensor([0, 1]),
            IS_INIT: (step == 0).unsqueeze(1),
            STEP_COUNT: step.unsqueeze(1),
            TRAJ_IDS: numbers[text],
        }

    def _scores(self, batch: Any, generated: Tensor, lengths: Tensor) -> Tensor:
        """Scores of the texts over those of the data's own, clipped: ``[B]``."""
        mask = torch.arange(generated.shape[1], device=generated.device) < lengths.unsqueeze(1)
        with evaluating(self.reward_model):
            both = [
                self.reward_model(input_ids=ids, attention_mask=known.to(torch.int64))[-1]
                for ids, known in ((generated, mask), (batch.input_ids, batch.attention_mask))
            ]
        for score in both:
            if score.shape not in ((len(lengths),), (len(lengths), 1)):
                raise ValueError(
                    f"reward_model must return (rewards, scores) with scores [{len(lengths)}], got {tuple(score.shape)}"
                )
        score, own = (score.reshape(-1).to(generated.device, torch.float32) for score in both)
        if not bool((score - own).isfinite().all()):
            raise ValueError("reward_model returned a score that is not finite")
        return (score - own).clamp(-self.score_clip, self.score_clip)

    def _prompt_lengths(self, batch: Any) -> Tensor:
        """Tokens of each prompt, int64 ``[B]``, checked."""
        rindex, (rows, length) = batch.prompt_rindex, batch.input_ids.shape
        if rindex.shape != (rows,) or rows == 0:
            raise ValueError(f"prompt_rindex must have shape {(rows,)} with a row or more, got {tuple(rindex.shape)}")
        if int(rindex.min()) < 0 or int(rindex.max()) >= length:
            raise ValueError(
                f"prompt_rindex must be the index of a token, 0 to {length - 1}, got {rindex.min()} to {rindex.max()}"
            )
        if not bool(batch.attention_mask.gather(1, rindex.unsqueeze(1)).all() and batch.attention_mask[:, 0].all()):
            raise ValueError("prompts must be right-padded: attention_mask is 0 in the prompt of a row")
        most = getattr(getattr(self.model, "config", None), "max_position_embeddings", None)
        longest = int(rindex.max()) + 1 + self.max_new_tokens
        if most is not None and longest > most:
            raise ValueError(
                f"prompts of up to {int(rindex.max()) + 1} tokens and max_new_tokens={self.max_new_tokens} make texts "
                f"of {longest}, but the model reads {most}"
            )
        return rindex + 1


def _tensordict(columns: dict[Any, Tensor], batch_size: list[int]) -> TensorDict:
    """A tensordict of columns by key, nested ones by tuples."""
    roots: dict[str, Any] = {}
    for key, column in columns.items():
        folder = roots
        *path, name = (key,) if isinstance(key, str) else key
        for part in path:
            folder = folder.setdefault(part, {})
        folder[name] = column
    device = columns[ACTION].device
    return TensorDict(roots, batch_size, device=None if device.type == "cpu" else device)


def _whole_texts(generated: Tensor, lengths: Tensor, counts: Tensor, pad: int, steps: int) -> dict[Any, Tensor]:
    """The text known before and after each of T steps, ``[B, T, L + T]``, with padding behind it."""
    place = torch.arange(generated.shape[1], device=generated.device)
    step = torch.arange(steps + 1, device=generated.device)
    known = lengths.unsqueeze(1) + step.minimum(counts.unsqueeze(1))  # [B, T + 1] tokens
    mask = place < known.unsqueeze(2)
    texts = generated.unsqueeze(1).where(mask, pad)
    return {
        "input_ids": texts[:, :-1].clone(),
        "attention_mask": mask[:, :-1].clone(),
        next_key("input_ids"): texts[:, 1:].clone(),
        next_key("attention_mask"): mask[:, 1:].clone(),
    }


def _configured(model: Any, name: str) -> Any:
    """What the model's generation configuration, or else its configuration, says."""
    for config in (getattr(model, "generation_config", None), getattr(model, "config", None)):
        if getattr(config, name, None) is not None:
            return getattr(config, name)
    return None


def _in_vocabulary(model: Any, name: str, token: int) -> int:
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    if token < 0 or (size is not None and token >= size):
        raise ValueError(f"{name} {token} is not a token of the model ({size}): pass {name}=tokenizer.{name}")
    return int(token)


def _eos_of(model: Any, eos: int | list[int] | None) -> list[int]:
    eos = _configured(model, "eos_token_id") if eos is None else eos
    if eos is None:
        raise ValueError(
            "eos_token_id is neither given nor in the model's configuration: pass eos_token_id=tokenizer.eos_token_id, or "
            "[] if no token ends a text"
        )
    return [_in_vocabulary(model, "eos_token_id", token) for token in ([eos] if isinstance(eos, int) else eos)]


def _pad_of(model: Any, pad: int | None) -> int:
    pad = _configured(model, "pad_token_id") if pad is None else pad
    return _in_vocabulary(model, "pad_token_id", 0 if pad is None else pad)
