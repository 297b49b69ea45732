"""Rollouts of language models: flat and padded, and what estimators, losses and buffers make of the flat ones."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDictBase
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tiny_text import make_critic, make_model, score
from torch.distributions import Categorical

from benchmarks.text.bench_text import bytes_of, full_prompts
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.layout import audit, join, run_ends
from flatroll.text import PromptData, RolloutFromModel, Sequences, TextModule

Make = Callable[..., RolloutFromModel]


def texts(rollout: RolloutFromModel) -> list[torch.Tensor]:
    return [rollout.sequences[number] for number in rollout.sequences.numbers]


def actor_of(model: Any, rollout: RolloutFromModel) -> ProbabilisticTensorDictSequential:
    sampler = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    return ProbabilisticTensorDictSequential(TextModule(model, rollout.sequences), sampler)


def alone(model: Any, text: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of each token of a text behind the first, from the text by itself."""
    with torch.no_grad():
        log_probs = model(input_ids=text.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
    return log_probs.gather(1, text[1:, None]).squeeze(1)


def value_of(batch: TensorDictBase, key: Any) -> Any:
    return batch[key].squeeze(-1)


@pytest.fixture
def flat(make_rollout: Make, prompts: PromptData) -> tuple[RolloutFromModel, TensorDictBase]:
    rollout = make_rollout(flat=True)
    return rollout, rollout.rollout_from_data(prompts)


# The batch


def test_a_flat_batch_has_a_row_for_each_generated_token_and_no_finding(
    flat: Any, prompts: PromptData
) -> None:
    rollout, batch = flat
    assert audit(batch) == []
    ends = run_ends(batch).nonzero().flatten().tolist()
    assert len(ends) == 8
    first = 0
    for text, rindex, ids, last in zip(
        texts(rollout), prompts.prompt_rindex.tolist(), prompts.input_ids, ends, strict=True
    ):
        rows = batch[first : last + 1]
        assert torch.equal(text[: rindex + 1], ids[: rindex + 1])
        assert torch.equal(text[rindex + 1 :], rows["action"])
        assert rows["observation"][:, 1].tolist() == list(range(rindex + 1, len(text)))
        assert torch.equal(rows["next", "observation"][:, 1], rows["observation"][:, 1] + 1)
        first = last + 1
    assert first == len(batch)


def test_eos_terminates_and_length_truncates(flat: Any) -> None:
    _, batch = flat
    terminated, truncated = (value_of(batch, ("next", key)) for key in ("terminated", "truncated"))
    assert torch.equal(terminated, torch.isin(batch["action"], torch.tensor([0, 3, 7])))
    assert torch.equal(truncated, (value_of(batch, "step_count") == 9) & ~terminated)
    assert terminated.sum() >= 2 and truncated.sum() >= 1  # both kinds are there


def test_eos_as_last_token_is_terminated(make_rollout: Make, prompts: PromptData) -> None:
    rollout = make_rollout(max_new_tokens=1, eos_token_id=list(range(24)), flat=True)
    batch = rollout.rollout_from_data(prompts)
    assert batch["next", "terminated"].all() and not batch["next", "truncated"].any()


@pytest.mark.parametrize("flat", [False, True])
def test_each_text_is_done_once_and_its_score_is_paid_once(
    make_rollout: Make, prompts: PromptData, flat: bool
) -> None:
    rollout = make_rollout(flat=flat, score_clip=2.0)
    batch = rollout.rollout_from_data(prompts)
    own = score(prompts.input_ids, prompts.attention_mask)[1]
    flat_batch = batch if flat else join(batch)
    ends = run_ends(flat_batch)
    assert int(batch["next", "done"].sum()) == 8
    raw = value_of(flat_batch, ("next", "reward_raw"))
    if not flat:
        rollout = make_rollout(flat=True)
        rollout.rollout_from_data(prompts)
    expected = torch.stack([(text % 2).sum() for text in texts(rollout)]) - own
    assert torch.equal(raw[ends], expected.clamp(-2, 2)) and not raw[~ends].any()
    parts = flat_batch["next", "reward_raw"] + flat_batch["next", "reward_kl"]
    torch.testing.assert_close(flat_batch["next", "reward"], parts)


def test_the_padded_form_joined_is_the_flat_one(make_rollout: Make, prompts: PromptData) -> None:
    padded = make_rollout().rollout_from_data(prompts)
    flat = make_rollout(flat=True).rollout_from_data(prompts)
    assert padded.batch_size == (8, 10) and padded["input_ids"].shape == (8, 10, 22)
    assert padded["sample_log_prob"].shape == (8, 10, 1)
    joined = join(padded)
    for key in ("action", *(("next", x) for x in ("reward", "reward_kl", "done", "terminated", "truncated"))):
        assert torch.equal(joined[key], flat[key]), key
    assert torch.equal(joined["sample_log_prob"].squeeze(-1), flat["action_log_prob"])
    # Each row has the text so far, and after it the text with the action.
    length = padded["attention_mask"].sum(-1)
    mask = padded["collector", "mask"]
    assert torch.equal(length[mask], flat["observation"][:, 1])
    place = length.unsqueeze(-1)
    drawn = padded["next", "input_ids"].gather(-1, place.clamp(max=21)).squeeze(-1)
    assert torch.equal(drawn[mask], padded["action"][mask])
    assert (padded["input_ids"].gather(-1, place.clamp(max=21)).squeeze(-1)[mask] == 1).all()


def test_nothing_is_nan_behind_the_end_of_all_texts(make_rollout: Make, prompts: PromptData) -> None:
    batch = make_rollout(eos_token_id=list(range(2, 24))).rollout_from_data(prompts)  # ends at once, mostly
    assert not batch["collector", "mask"].all()
    for column in batch.values(True, True):
        assert torch.isfinite(column.float()).all()
    behind = ~batch["collector", "mask"]
    for key in ("sample_log_prob", ("next", "reward"), ("next", "done")):
        assert not batch[key][behind].any()


# Log-probabilities and KL


@pytest.mark.parametrize("with_config", [False, True])
def test_log_probs_are_of_the_whole_distribution(
    make_rollout: Make, prompts: PromptData, model: Any, ref_model: Any, with_config: bool
) -> None:
    """Also where transformers would draw from the 50 best tokens by itself."""
    from transformers import GenerationConfig

    rollout = make_rollout(flat=True, generation_config=GenerationConfig() if with_config else None)
    torch.manual_seed(0)
    batch = rollout.rollout_from_data(prompts)
    expected, log_ratio = [], []
    for text, rindex in zip(texts(rollout), prompts.prompt_rindex.tolist(), strict=True):
        expected.append(alone(model, text)[rindex:])
        log_ratio.append(expected[-1] - alone(ref_model, text)[rindex:])
    torch.testing.assert_close(batch["action_log_prob"], torch.cat(expected), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(
        value_of(batch, ("next", "reward_kl")), -0.1 * torch.cat(log_ratio), atol=1e-5, rtol=1e-5
    )


def test_tokens_are_drawn_from_the_distribution_of_the_log_probs(make_rollout: Make, model: Any) -> None:
    ids = torch.full((4000, 1), 5)
    data = PromptData(ids, torch.ones_like(ids), torch.zeros(4000, dtype=torch.int64), batch_size=[4000])
    batch = make_rollout(max_new_tokens=1, flat=True).rollout_from_data(data)
    drawn = torch.bincount(batch["action"], minlength=24) / 4000
    with torch.no_grad():
        expected = model(input_ids=ids[:1]).logits[0, -1].softmax(-1)
    # Six standard deviations of a share of 4000 draws.
    assert ((drawn - expected).abs() <= 6 * (expected * (1 - expected) / 4000).sqrt() + 1e-3).all()


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 5}, {"top_p": 0.9}, {"temperature": 0.7}, {"do_sample": False}, {"repetition_penalty": 1.2}],
)
def test_another_distribution_is_an_error_unless_asked(
    make_rollout: Make, prompts: PromptData, changes: dict[str, Any]
) -> None:
    from transformers import GenerationConfig

    config = GenerationConfig(**changes)
    with pytest.raises(ValueError, match=f"generation_config has .*{next(iter(changes))}.*allow_off_policy"):
        make_rollout(generation_config=config)
    with pytest.raises(ValueError, match="the model's own distribution"):
        make_rollout().generate(prompts, config)
    if "top_k" in changes:
        batch = make_rollout(generation_config=config, allow_off_policy=True, flat=True).rollout_from_data(
            prompts
        )
        assert audit(batch) == []


def test_a_config_of_the_model_that_changes_the_distribution_is_an_error(
    make_rollout: Make, model: Any
) -> None:
    from transformers import GenerationConfig

    changed = copy.deepcopy(model)
    changed.generation_config.repetition_penalty = 1.3
    with pytest.raises(ValueError, match="repetition_penalty="):
        make_rollout(model=changed, generation_config=GenerationConfig())
    make_rollout(model=changed)  # drawn without generate: it has no effect


@pytest.mark.parametrize("changes", [{"num_return_sequences": 2}, {"max_time": 1.0}, {"max_new_tokens": 3}])
def test_a_config_that_changes_rows_or_their_ends_is_refused(make_rollout: Make, changes: Any) -> None:
    from transformers import GenerationConfig

    with pytest.raises(ValueError, match=next(iter(changes))):
        make_rollout(generation_config=GenerationConfig(**changes), allow_off_policy=True)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_estimator_of_the_kl_is_chosen(make_rollout: Make, prompts: PromptData, kind: Any) -> None:
    rollout = make_rollout(kl_estimator=kind, kl_coef=0.5)
    _, _, log_ratio = generated = rollout.generate(prompts)
    batch = rollout.create_rollout_td(prompts, *generated)
    expected = {"k1": log_ratio, "k2": log_ratio**2 / 2, "k3": (-log_ratio).exp() - 1 + log_ratio}[kind]
    torch.testing.assert_close(value_of(batch, ("next", "reward_kl")), -0.5 * expected)


class Doubtful(torch.nn.Module):
    """`score`, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = torch.nn.Dropout(0.9)

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, self.drop(score(input_ids, attention_mask)[1].float())


def test_dropout_is_off_in_a_rollout_and_on_again_after_it(
    make_rollout: Make, prompts: PromptData, model: Any, ref_model: Any
) -> None:
    noisy, noisy_ref, doubtful = copy.deepcopy(model).train(), copy.deepcopy(ref_model).train(), Doubtful()
    noisy.transformer.h[0].eval()
    rollout = make_rollout(model=noisy, reward_model=doubtful, flat=True)
    rollout.ref_model = noisy_ref
    batch, expected = rollout.rollout_from_data(prompts), make_rollout(flat=True).rollout_from_data(prompts)
    for key in ("action", ("next", "reward_raw"), ("next", "reward_kl")):
        assert torch.equal(batch[key], expected[key])
    assert noisy.training and noisy.transformer.h[1].training and not noisy.transformer.h[0].training
    assert noisy_ref.training and doubtful.drop.training


def test_half_precision_has_log_probs_of_a_whole_pass(
    make_rollout: Make, prompts: PromptData, model: Any
) -> None:
    half = copy.deepcopy(model).to(torch.bfloat16)
    rollout = make_rollout(model=half, flat=True)
    batch = rollout.rollout_from_data(prompts)
    assert batch["action_log_prob"].dtype == torch.float32
    expected = [alone(half, text)[r:] for text, r in zip(texts(rollout), range(8), strict=True)]
    torch.testing.assert_close(batch["action_log_prob"], torch.cat(expected).float(), atol=0.1, rtol=0.05)


# Tokens that end a text, and other arguments


def test_the_end_and_padding_come_from_the_model_s_configuration(make_rollout: Make) -> None:
    rollout = make_rollout()
    assert (rollout.eos_token_ids, rollout.pad_token_id) == ([0, 3, 7], 1)
    rollout = make_rollout(eos_token_id=4, pad_token_id=4)
    assert (rollout.eos_token_ids, rollout.pad_token_id) == ([4], 4)


def test_padding_may_be_the_end_token(make_rollout: Make, prompts: PromptData) -> None:
    plain = make_rollout(flat=True).rollout_from_data(prompts)
    for config in (None, "generate"):
        if config == "generate":
            from transformers import GenerationConfig

            config = GenerationConfig()  # type: ignore[assignment]
        rollout = make_rollout(flat=True, pad_token_id=3, generation_config=config)
        batch = rollout.rollout_from_data(prompts)
        assert audit(batch) == [] and int(batch["next", "done"].sum()) == 8
        if config is None:
            assert torch.equal(plain["action"], batch["action"])


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"eos_token_id": 50256},
            r"eos_token_id 50256 is not a token of the model \(vocab_size=24\).*tokenizer.eos_token_id",
        ),
        ({"pad_token_id": -1}, "pad_token_id -1"),
        ({"max_new_tokens": 0}, "max_new_tokens must be an integer of at least 1"),
        ({"num_steps": 0}, "num_steps must be an integer of at least 1"),
        ({"kl_estimator": "k4"}, "kl_estimator must be 'k1', 'k2' or 'k3', got 'k4'"),
        ({"score_clip": -1.0}, "score_clip must be at least 0"),
    ],
)
def test_wrong_arguments_are_refused(make_rollout: Make, options: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        make_rollout(**options)


def test_a_model_that_does_not_say_what_ends_a_text_is_refused(
    make_rollout: Make, prompts: PromptData
) -> None:
    endless = make_model(eos_token_id=None)
    with pytest.raises(ValueError, match="eos_token_id is neither given nor"):
        make_rollout(model=endless)
    batch = make_rollout(model=endless, eos_token_id=[], flat=True).rollout_from_data(prompts)
    assert len(batch) == 80 and int(batch["next", "truncated"].sum()) == 8


def test_wrong_batches_are_refused(make_rollout: Make, prompts: PromptData) -> None:
    rollout = make_rollout()
    for rindex, text in (
        (torch.full((8,), -1), "index of a token"),
        (torch.full((8,), 12), "index of a token"),
    ):
        wrong = prompts.clone()
        wrong.prompt_rindex = rindex
        with pytest.raises(ValueError, match=text):
            rollout.rollout_from_data(wrong)
    wrong = prompts.clone()
    wrong.attention_mask = wrong.attention_mask.flip(1)
    with pytest.raises(ValueError, match="right-padded"):
        rollout.rollout_from_data(wrong)
    with pytest.raises(ValueError, match="make texts of 68 tokens, but the model reads at most 64"):
        make_rollout(max_new_tokens=60).rollout_from_data(prompts)
    with pytest.raises(ValueError, match=r"scores \[8\], got \(8, 12\)"):
        make_rollout(
            reward_model=lambda input_ids, attention_mask: (None, attention_mask[:, :12])
        ).rollout_from_data(prompts)
    assert len(rollout.sequences) == 0  # nothing was kept of what was refused


# What reads flat batches


def test_a_text_module_equals_each_text_by_itself(flat: Any, model: Any) -> None:
    rollout, batch = flat
    mixed = batch[torch.randperm(len(batch))[:20]]
    log_prob = actor_of(model, rollout).get_dist(mixed).log_prob(mixed["action"])
    torch.testing.assert_close(log_prob, mixed["action_log_prob"], atol=1e-5, rtol=1e-5)


def test_gae_equals_the_recursion_on_each_text(flat: Any) -> None:
    rollout, batch = flat
    critic = make_critic()
    network = TextModule(critic, rollout.sequences, "state_value")
    results = [
        GAE(gamma=0.99, lmbda=0.9, value_network=network, shifted=shifted)(batch.clone())
        for shifted in (False, True)
    ]
    expected = []
    for text, number in zip(texts(rollout), rollout.sequences.numbers, strict=True):
        rows = batch[batch["collector", "traj_ids"] == number]
        with torch.no_grad():
            value = critic(input_ids=text.unsqueeze(0)).logits.flatten()[-len(rows) - 1 :]
        carried, gains = torch.zeros(()), []
        for t in reversed(range(len(rows))):
            following = value[t + 1] * ~rows["next", "terminated"][t]
            delta = rows["next", "reward"][t] + 0.99 * following - value[t]
            carried = delta + 0.99 * 0.9 * carried
            gains.append(carried)
        expected += gains[::-1]
    for result in results:
        torch.testing.assert_close(result["advantage"], torch.stack(expected), atol=1e-5, rtol=1e-5)


def test_a_loss_starts_at_ratio_one_and_trains_both_networks(flat: Any) -> None:
    rollout, batch = flat
    policy, critic = make_model(0), make_critic()
    network = TextModule(critic, rollout.sequences, "state_value")
    loss = ClipPPOLoss(actor_of(policy, rollout), network, normalize_advantage=True)
    batch = GAE(gamma=1.0, lmbda=0.95, value_network=network)(batch)
    losses = loss(batch)
    assert losses["kl_approx"].abs() < 1e-5 and losses["clip_fraction"] == 0
    (losses["loss_objective"] + losses["loss_critic"] + losses["loss_entropy"]).backward()
    assert policy.transformer.wte.weight.grad.abs().sum() > 0
    assert critic.classifier.weight.grad.abs().sum() > 0


@pytest.mark.parametrize("compact", [False, True])
def test_a_buffer_gives_rows_and_slices_that_read_their_texts(
    flat: Any, prompts: PromptData, model: Any, compact: bool
) -> None:
    rollout, batch = flat
    generator = torch.Generator().manual_seed(0)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(400, compact_obs=compact),
        sampler=SliceSampler(slice_len=4),
        batch_size=32,
        generator=generator,
    )
    buffer.extend(batch)
    buffer.extend(rollout.rollout_from_data(prompts))
    sample = buffer.sample()
    assert audit(sample) == [] and len(sample["collector", "traj_ids"].unique()) > 4
    log_prob = actor_of(model, rollout).get_dist(sample).log_prob(sample["action"])
    torch.testing.assert_close(log_prob, sample["action_log_prob"], atol=1e-5, rtol=1e-5)


def test_several_rollouts_have_ids_of_their_own(make_rollout: Make, prompts: PromptData) -> None:
    first, second = make_rollout(flat=True), make_rollout(flat=True, writer=2)
    ids = [rollout.rollout_from_data(prompts)["collector", "traj_ids"] for rollout in (first, first, second)]
    assert len(torch.cat(ids).unique()) == 24 and int(ids[2].min()) == 2 << 40


# The table of texts


def test_a_table_forgets_and_says_so() -> None:
    table = Sequences()
    table.add(torch.arange(10), torch.tensor([3, 0, 7]))
    table.forget(before=2)
    assert table.numbers == range(2, 3) and table[2].tolist() == list(range(3, 10))
    with pytest.raises(KeyError, match=r"sequence 1 is not in the table \(kept: 2 to 2\)"):
        table.padded(torch.tensor([2, 1]))
    restored = Sequences()
    restored.load_state_dict(table.state_dict())
    assert restored.numbers == table.numbers and torch.equal(restored[2], table[2])
    table.forget()
    assert len(table) == 0 and table.add(torch.tensor([1]), torch.tensor([1])).tolist() == [3]
    assert copy.deepcopy(table) is table
    with pytest.raises(ValueError, match="lengths sum to 2"):
        table.add(torch.tensor([1]), torch.tensor([2]))
    with pytest.raises(ValueError, match="bounds"):
        table.load_state_dict({"first": 0, "tokens": torch.zeros(3), "bounds": torch.tensor([0, 2])})


def test_the_scheduler_gets_the_kl_of_real_tokens(make_rollout: Make, prompts: PromptData) -> None:
    class Recorder:
        def update(self, *, kl: float, n_steps: int) -> float:
            self.seen = (kl, n_steps)
            return 0.7

    recorder: Any = Recorder()
    rollout = make_rollout(flat=True, kl_scheduler=recorder, num_steps=2)
    with pytest.raises(ValueError, match="needs a rollout"):
        rollout.step_scheduler()
    means = [float((rollout.rollout_from_data(prompts)["next", "reward_kl"] / -0.1).mean()) for _ in range(3)]
    assert rollout.step_scheduler() == rollout.kl_coef == 0.7
    assert recorder.seen == (pytest.approx(sum(means[1:]) / 2, rel=1e-4), 2)


def test_without_a_scheduler_the_coefficient_stays(make_rollout: Make, prompts: PromptData) -> None:
    rollout = make_rollout(kl_coef=0.3)
    rollout.rollout_from_data(prompts)
    assert rollout.step_scheduler() == 0.3


def test_a_flat_batch_takes_a_fiftieth_of_the_padded_one() -> None:
    """4 texts of 256 + 128 tokens, each text once or at each of its tokens."""
    prompts = full_prompts(4, 256)
    generated = torch.cat([prompts.input_ids, torch.full((4, 128), 5)], 1)
    parts = (generated, torch.zeros(4, 128, 1), torch.zeros(4, 128))
    sizes = []
    for flat in (True, False):
        rollout = RolloutFromModel(None, None, score, max_new_tokens=128, eos_token_id=0, flat=flat)
        batch = rollout.create_rollout_td(prompts, *parts)
        sizes.append(bytes_of(batch, rollout))
    assert sizes[1] >= 50 * sizes[0]
