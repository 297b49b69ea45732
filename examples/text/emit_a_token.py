"""Teaches a randomly initialised two-layer language model to emit a token, with PPO on flat batches without padding.

``python -m flatroll.examples.text.emit_a_token`` trains a tokenizer and a GPT-2 of two layers, downloads nothing, and
saves the learning curve as ``out/emit_a_token.png``. It needs ``pip install "flatroll[text,plot]"``.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from tensordict.nn import ProbabilisticTensorDictModule as Sampler
from tensordict.nn import ProbabilisticTensorDictSequential, TensorDictModuleBase
from torch import Tensor
from torch.distributions import Categorical

from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.text import PromptData, PromptTensorDictTokenizer, RolloutFromModel, TextModule

SENTENCE = "the cat sat on a mat . I like tea and you like milk with honey in the morning"
PROMPTS = [
    "I like",
    "the cat",
    "you like milk and",
    "in the morning I sat on",
    "a mat with",
    "honey and tea .",
]


def train_tokenizer() -> Any:
    """Train a byte-level BPE whose tokens are the words of one sentence."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=80, special_tokens=["<eos>", "<pad>"], show_progress=False)
    bpe.train_from_iterator([SENTENCE] * 100, trainer)
    kind: Any = PreTrainedTokenizerFast
    return kind(tokenizer_object=bpe, eos_token="<eos>", pad_token="<pad>")


def make_models(tokenizer: Any) -> tuple[Any, Any, Any]:
    """Create policy, reference (a copy of it) and critic."""
    from transformers import GPT2Config, GPT2ForTokenClassification, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=32,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=tokenizer.eos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    config.num_labels = 1  # the critic writes one number for each token
    models: list[Any] = [
        kind(config) for kind in (GPT2LMHeadModel, GPT2LMHeadModel, GPT2ForTokenClassification)
    ]
    # Disables dropout, also in the losses.
    policy, reference, critic = (model.train(False) for model in models)
    reference.load_state_dict(policy.state_dict())
    return policy, reference, critic


class Counter:
    """Stands in for a reward model: the score of a text is how often it has a token."""

    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[None, Tensor]:
        return None, ((input_ids == self.token) * attention_mask).sum(1).float()


def make_agent(policy: Any, critic: Any, rollout: RolloutFromModel) -> tuple[Any, TensorDictModuleBase]:
    """Make both models read the texts that rows of a flat batch refer to."""
    sampler = Sampler(["logits"], ["action"], distribution_class=Categorical, return_log_prob=True)
    parts: list[Any] = [TextModule(policy, rollout.sequences), sampler]
    actor = ProbabilisticTensorDictSequential(*parts)
    return actor, TextModule(critic, rollout.sequences, "state_value")


def train(updates: int = 40, texts: int = 48, tokens: int = 8, seed: int = 0) -> dict[str, Any]:
    """Train; return the mean score of each update's texts, the last batch and some of its texts."""
    torch.manual_seed(seed)
    tokenizer = train_tokenizer()
    rewarded = tokenizer.encode(" tea")[0]
    policy, reference, critic = make_models(tokenizer)
    scores = Counter(rewarded)
    rollout = RolloutFromModel(policy, reference, scores, kl_coef=0.02, max_new_tokens=tokens, flat=True)
    actor, value = make_agent(policy, critic, rollout)
    gae = GAE(gamma=1.0, lmbda=0.95, value_network=value)
    loss = ClipPPOLoss(actor, value, entropy_coeff=0.01, critic_coeff=0.5, normalize_advantage=True)
    optimizer = torch.optim.Adam(loss.parameters(), lr=2e-3)
    sample = {"prompt": [PROMPTS[i % len(PROMPTS)] for i in range(texts)], "label": [""] * texts}
    data = PromptTensorDictTokenizer(tokenizer, 8)(sample).exclude("valid_sample")
    prompts = PromptData(**dict(data.items()), batch_size=[texts])
    curve: list[float] = []
    batch: Any = None
    for _ in range(updates):
        rollout.sequences.forget()  # the texts of the previous update
        batch = gae(rollout.rollout_from_data(prompts))
        curve.append(float(batch["next", "reward_raw"].sum()) / texts)
        number = batch["collector", "traj_ids"]
        for _ in range(3):
            # Whole texts, so that each is read once.
            for some in number.unique()[torch.randperm(texts)].chunk(2):
                losses = loss(batch[torch.isin(number, some)])
                optimizer.zero_grad()
                (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
                torch.nn.utils.clip_grad_norm_(list(loss.parameters()), 1.0)
                optimizer.step()
    shown = [tokenizer.decode(rollout.sequences[i]) for i in list(rollout.sequences.numbers)[: len(PROMPTS)]]
    words = tokenizer.convert_ids_to_tokens(batch["action"].tolist())
    return {"curve": curve, "batch": batch, "texts": shown, "words": words, "most": tokens}


def save_curve(result: dict[str, Any], path: Path) -> None:
    """Draw the mean score over updates."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError('the curve needs matplotlib: pip install "flatroll[plot]"') from error
    figure = Figure(figsize=(7, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(result["curve"], color="#0072B2")
    axes.axhline(result["most"], color="0.6", linewidth=1, linestyle=":")
    axes.set(xlabel="update", ylabel='" tea" per text', ylim=(0, result["most"] * 1.05))
    axes.set_title(f"Rewarded token in texts of at most {result['most']} tokens", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def main(arguments: list[str] | None = None) -> dict[str, Any]:
    """Train, print what the model writes, and save the curve."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=40, help="default: %(default)s")
    parser.add_argument(
        "--seed", type=int, default=0, help="seed of weights and tokens (default: %(default)s)"
    )
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the picture")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)  # these networks are small: a second thread costs more than it gains
    start = time.perf_counter()
    result = train(args.updates, seed=args.seed)
    first, last = result["curve"][0], result["curve"][-1]
    print(f'" tea" per text: {first:.2f} before, {last:.2f} after {args.updates} updates', end="")
    print(f" ({time.perf_counter() - start:.0f} s). Its last texts:", *result["texts"], sep="\n  ")
    save_curve(result, args.out / "emit_a_token.png")
    return result


if __name__ == "__main__":
    main()
