"""What the programs that train language models share: small models, and runs that are judged by their answers."""

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential
from torch import Tensor
from torch.distributions import Categorical

from flatroll.examples.common import Run
from flatroll.rollouts import Evaluation, Evaluator
from flatroll.text import Sequences, TextModule


def make_model(words: int, hidden: int, device: str = "cpu", values: bool = False) -> Any:
    """Create a GPT-2 of two layers without dropout, with random weights; with ``values``, a critic."""
    try:
        from transformers import GPT2Config, GPT2ForTokenClassification, GPT2LMHeadModel
    except ImportError as error:
        raise ImportError('language models need transformers: pip install "flatroll[text]"') from error
    size: Any = {"vocab_size": words, "n_positions": 32, "n_embd": hidden, "n_layer": 2, "n_head": 2}
    config = GPT2Config(**size, bos_token_id=words - 1, eos_token_id=words - 1)
    config.num_labels = 1  # of a critic
    kind: Any = GPT2ForTokenClassification if values else GPT2LMHeadModel
    return kind(config).eval().to(device)


def make_actor(model: Any, sequences: Sequences) -> ProbabilisticTensorDictSequential:
    """Let a language model read the texts that rows refer to, and draw the next tokens."""
    sampler = Sampler(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True)
    parts: list[Any] = [TextModule(model, sequences), sampler]
    return ProbabilisticTensorDictSequential(*parts)


class TextRun(Run):
    """A run whose model answers prompts, in place of a policy in an env.

    Args:
        args: of `parse`.
        model: what is evaluated.
        judge: function of a number of episodes; returns the reward of each, ``[episodes]``.
        parts: what else a run needs to continue.
    """

    def __init__(
        self, args: argparse.Namespace, model: Any, judge: Callable[[int], Tensor], /, **parts: Any
    ) -> None:
        super().__init__(args, model, judge, **parts)

    def make_check(self) -> Any:
        every: Any = {"every": self.args.eval_every, "stop_at": self.args.stop_at}
        return _Judged(self.evaluate, self.policy, episodes=self.args.episodes, **every)

    def evaluate(self, **options: Any) -> Any:
        begun = time.perf_counter()
        returns = self.env(options.get("episodes", self.args.episodes)).double().cpu()
        numbers = torch.arange(len(returns))
        return Evaluation(returns, torch.ones_like(numbers), numbers, {}, time.perf_counter() - begun)


class _Judged(Evaluator):
    """An evaluator whose ``env`` is the function that evaluates."""

    def _evaluate(self) -> Evaluation:
        judge: Any = self.env
        found: Evaluation = judge(episodes=self.episodes)
        return found
