"""Packed passes and prompts that are run once, beside a pass for each text."""

import copy
import warnings
from collections.abc import Callable
from inspect import signature
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tiny_text import make_critic, make_model
from torch import Tensor, nn

from flatroll.text import PromptData, RolloutFromModel, Sequences, TextModule

Make = Callable[..., RolloutFromModel]

SIZE: dict[str, Any] = {"vocab_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2, "hidden_size": 16}
ENDS: dict[str, Any] = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}


def gpt2(**changes: Any) -> Any:
    return make_model(vocab_size=40, **changes)


def llama(**changes: Any) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = SIZE | {"intermediate_size": 32, "num_key_value_heads": 1, "max_position_embeddings": 64} | ENDS
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).eval()


def qwen2(**changes: Any) -> Any:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    sizes = SIZE | {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64} | ENDS
    torch.manual_seed(0)
    return Qwen2ForCausalLM(Qwen2Config(**sizes | changes)).eval()


def mistral(**changes: Any) -> Any:
    from transformers import MistralConfig, MistralForCausalLM

    sizes = SIZE | {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64} | ENDS
    torch.manual_seed(0)
    return MistralForCausalLM(MistralConfig(**sizes | {"sliding_window": 4} | changes)).eval()


def make_texts(
    prompts: list[int], answers: list[int], share: bool = True, known: int = 24
) -> tuple[Sequences, TensorDict]:
    """Answers of some lengths to each of the prompts, and a row for each token of them, in any order."""
    generator = torch.Generator().manual_seed(0)
    texts = []
    lengths = []
    for length in prompts:
        prompt = torch.randint(known, (length,), generator=generator)
        for count in answers:
            texts.append(torch.cat([prompt, torch.randint(known, (count,), generator=generator)]))
            lengths.append(length)
    sequences = Sequences(first=5)
    own = torch.tensor([len(text) for text in texts])
    numbers = sequences.add(torch.cat(texts), own, torch.tensor(lengths) if share else None)
    rows = torch.tensor(
        [
            [int(number), known]
            for number, text, length in zip(numbers, texts, lengths, strict=True)
            for known in range(length, len(text))
        ]
    )
    rows = rows[torch.randperm(len(rows), generator=generator)]
    return sequences, TensorDict({"observation": rows}, [len(rows)])


def separate(model: Any, sequences: Sequences, batch: TensorDict) -> Tensor:
    """Outputs of rows, from a pass over each text by itself."""
    outputs = {
        number: model(
            input_ids=sequences[number].unsqueeze(0),
            attention_mask=torch.ones(1, len(sequences[number]), dtype=torch.int64),
        ).logits[0]
        for number in sequences.numbers
    }
    return torch.stack([outputs[number][length - 1] for number, length in batch["observation"].tolist()])


def gradients(model: Any, output: Tensor) -> list[Tensor]:
    """Gradients of a weighted sum of log-probabilities, or of outputs that are no logits."""
    weight = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    if output.shape[-1] > 1:
        output = output.log_softmax(-1)
    parameters = [some for some in model.parameters() if some.requires_grad]
    grads = torch.autograd.grad((output * weight).sum(), parameters, allow_unused=True)
    return [torch.zeros(()) if grad is None else grad for grad in grads]


def check_equal(model: Any, module: TextModule, sequences: Sequences, batch: TensorDict) -> None:
    """Outputs, log-probabilities and gradients are those of separate passes."""
    own = module(batch.clone())[module.out_keys[0]]
    expected = separate(model, sequences, batch)
    torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(own.log_softmax(-1), expected.log_softmax(-1), atol=1e-5, rtol=1e-5)
    for one, two in zip(gradients(model, own), gradients(model, expected), strict=True):
        scale = max(float(two.abs().max()), 1.0)
        torch.testing.assert_close(one, two, atol=1e-5 * scale, rtol=1e-5)


def settle(module: TextModule, batch: TensorDict) -> None:
    """Run two passes, after which the third asks nothing of the model."""
    with torch.no_grad():
        for _ in range(2):
            module(batch.clone())


class Shapes:
    """Shapes of the tokens that a model is called with."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.seen: list[tuple[int, ...]] = []
        self.named: list[set[str]] = []
        model.register_forward_pre_hook(self._note, with_kwargs=True)

    def _note(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.seen.append(tuple(kwargs["input_ids"].shape))
        self.named.append(set(kwargs))


# Equal to separate passes


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [gpt2, llama, qwen2])
@pytest.mark.parametrize("row_length", [None, 0, 48, 10_000])
def test_packed_texts_equal_separate_passes(kind: Any, attention: str, row_length: int | None) -> None:
    model = kind(attn_implementation=attention)
    sequences, batch = make_texts([1, 5, 3, 9, 2, 14], [11], share=False)
    module = TextModule(model, sequences, row_length=row_length)
    shapes = Shapes(model)
    check_equal(model, module, sequences, batch)
    settle(module, batch)
    module(batch.clone())
    if row_length == 10_000:
        # One flat sequence, with positions alone; the last token of a text predicts nothing.
        assert shapes.seen[-1] == (1, sum([1, 5, 3, 9, 2, 14]) + 6 * 10)
        assert shapes.named[-1].isdisjoint({"attention_mask"})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", [gpt2, llama, qwen2])
@pytest.mark.parametrize("row_length", [None, 200])
def test_answers_to_one_prompt_equal_separate_passes(
    kind: Any, attention: str, row_length: int | None
) -> None:
    model = kind(attn_implementation=attention)
    sequences, batch = make_texts([40, 3, 25], [1, 7, 4, 12])
    module = TextModule(model, sequences, row_length=row_length)
    check_equal(model, module, sequences, batch)


def test_a_critic_reads_packed_texts() -> None:
    critic = make_critic()
    sequences, batch = make_texts([40, 30], [6, 9, 12])
    module = TextModule(critic, sequences, "state_value")
    shapes = Shapes(critic)
    check_equal(critic, module, sequences, batch)
    module(batch.clone())
    shapes.seen.clear()
    assert module(batch.clone())["state_value"].shape == (len(batch), 1)
    assert sum(rows * width for rows, width in shapes.seen) < 3 * 49


def test_a_part_of_the_rows_runs_what_they_read_alone() -> None:
    model = gpt2()
    sequences, batch = make_texts([40, 30], [12, 12, 12])
    module = TextModule(model, sequences)
    shapes = Shapes(model)
    some = batch[batch["observation"][:, 1] <= 33]
    torch.testing.assert_close(
        module(some.clone())["logits"], separate(model, sequences, some), atol=1e-5, rtol=1e-5
    )
    assert max(width for _, width in shapes.seen[-2:]) < 45
    assert module(batch[:0].clone())["logits"].shape == (0, 40)


def test_eight_answers_run_their_prompt_once() -> None:
    model = gpt2(n_positions=512)
    sequences, batch = make_texts([256], [64] * 8)
    alone, _ = make_texts([256], [64] * 8, share=False)
    module = TextModule(model, sequences)
    shapes = Shapes(model)
    settle(module, batch)
    shapes.seen.clear()
    logits = module(batch.clone())["logits"]
    assert shapes.seen == [(1, 256 + 8 * 63)]
    torch.testing.assert_close(
        logits, TextModule(model, alone)(batch.clone())["logits"], atol=1e-5, rtol=1e-5
    )

    sizes = [
        sum(value.nbytes for value in table.state_dict().values() if isinstance(value, Tensor))
        for table in (sequences, alone)
    ]
    assert sizes[0] <= 0.35 * sizes[1]


def test_texts_of_equal_length_are_one_batch() -> None:
    model = gpt2()
    sequences, batch = make_texts([5, 5, 5, 5], [8], share=False)
    shapes = Shapes(model)
    TextModule(model, sequences)(batch.clone())
    assert shapes.seen == [(4, 12)]  # and no pass to compare


def test_windows_of_attention_are_kept() -> None:
    """A mask for all layers would let tokens see more than their window; positions do not."""
    model = mistral()
    sequences, batch = make_texts([30, 20], [6, 9, 3])
    for row_length in (None, 10_000):
        check_equal(model, TextModule(model, sequences, row_length=row_length), sequences, batch)


# The comparison


class Mixing(nn.Module):
    """Runs a model as if each row were one text, with the positions that it is given."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self.config = model.config

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **others: Any
    ) -> Any:
        if attention_mask is None or attention_mask.ndim == 4:
            attention_mask = torch.ones_like(input_ids)
        return self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids)


class Refusing(Mixing):
    """Takes neither other positions nor other masks."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:  # type: ignore[override]
        return self.model(input_ids, attention_mask=attention_mask)


class Masked(Mixing):
    """Keeps texts apart by a mask alone, of one type."""

    refused = torch.float32

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **others: Any
    ) -> Any:
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)
        if attention_mask.dtype is self.refused:
            raise ValueError(f"no masks of {self.refused}")
        return self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids)


class Leaking(Mixing):
    """Lets each token see a hundredth of all tokens before it in the row."""

    def forward(
        self, input_ids: Tensor, attention_mask: Any = None, position_ids: Any = None, **others: Any
    ) -> Any:
        mixed = Mixing.forward(self, input_ids, attention_mask, position_ids)
        apart = self.model(input_ids, attention_mask=attention_mask, position_ids=position_ids)
        return SimpleNamespace(logits=apart.logits + 0.05 * (mixed.logits - apart.logits))


@pytest.mark.parametrize("kind", [Mixing, Refusing, Leaking])
def test_a_model_that_mixes_texts_is_found_and_run_padded(kind: Any) -> None:
    model = kind(gpt2())
    sequences, batch = make_texts([30, 3, 12], [2, 9, 4])
    module = TextModule(model, sequences)
    with pytest.warns(UserWarning, match=f"{kind.__name__} does not keep the texts of a packed pass apart"):
        first = module(batch.clone())["logits"]
    expected = separate(model, sequences, batch)
    torch.testing.assert_close(first, expected, atol=1e-5, rtol=1e-5)
    check_equal(model, module, sequences, batch)  # without another warning


class Adding(Masked):
    refused = torch.bool


@pytest.mark.parametrize("kind", [Masked, Adding])
def test_a_model_gets_the_masks_that_it_takes(kind: Any) -> None:
    model = kind(gpt2())
    shapes = Shapes(model)
    sequences, batch = make_texts([40], [2, 9, 4])
    module = TextModule(model, sequences)
    check_equal(model, module, sequences, batch)
    assert (1, 40 + 1 + 8 + 3) in shapes.seen


def test_a_model_is_compared_at_few_passes_and_without_dropout() -> None:
    model = gpt2(resid_pdrop=0.5, attn_pdrop=0.5).train()
    sequences, batch = make_texts([40], [4, 9, 4])
    module = TextModule(model, sequences)
    shapes = Shapes(model)
    module(batch.clone())
    assert model.training and model.transformer.h[0].training
    compared = len(shapes.seen)
    assert compared > 1
    asked = []
    for number in range(2, 20):
        before = len(shapes.seen)
        module(batch.clone())
        if len(shapes.seen) > before + 1:
            asked.append(number)
    assert asked == [2, 4, 8, 16]
    assert model.training and model.transformer.h[0].training


def test_a_model_that_does_not_look_back_yet_is_asked_again() -> None:
    model = gpt2()
    weights = copy.deepcopy(model.state_dict())
    with torch.no_grad():
        for block in model.transformer.h:
            block.attn.c_proj.weight.zero_()
            block.attn.c_proj.bias.zero_()
    sequences, batch = make_texts([40], [9, 9, 9])
    module = TextModule(model, sequences)
    shapes = Shapes(model)
    module(batch.clone())
    assert shapes.seen[-1] == (3, 48)  # padded
    check_equal(model, module, sequences, batch)
    model.load_state_dict(weights)
    before = len(shapes.seen)
    module(batch.clone())
    assert shapes.seen[before:] == [(3, 48)]  # the third pass, which does not ask
    module(batch.clone())
    assert shapes.seen[-1] == (1, 40 + 3 * 8)


class Short(Mixing):
    """Takes rows of 64 tokens at most, whatever their positions."""

    def forward(self, input_ids: Tensor, **others: Any) -> Any:  # type: ignore[override]
        if input_ids.shape[1] > 64:
            raise RuntimeError("a buffer is too short")
        return self.model(input_ids, **others)


def test_rows_longer_than_the_model_s_positions_are_compared_apart() -> None:
    model = Short(gpt2())
    sequences, batch = make_texts([40], [9, 9, 9, 9, 9])
    module = TextModule(model, sequences)
    with pytest.warns(UserWarning, match="Short does not keep"):
        module(batch.clone())
    check_equal(model, module, sequences, batch)


def test_attention_by_cumulative_lengths_gets_one_flat_row() -> None:
    model = gpt2()
    planted = Mixing(model)
    planted.config = SimpleNamespace(_attn_implementation="flash_attention_2", vocab_size=40)
    planted.forward = lambda **inputs: model(use_cache=False, **inputs)  # type: ignore[method-assign]
    shapes = Shapes(planted)
    sequences, batch = make_texts([9, 9, 9], [2, 4])
    module = TextModule(planted, sequences)
    module(batch.clone())
    assert shapes.seen[-1] == (1, 3 * (9 + 1 + 9 + 3)) and "attention_mask" not in shapes.named[-1]
    torch.testing.assert_close(
        module(batch.clone())["logits"], separate(model, sequences, batch), atol=1e-5, rtol=1e-5
    )


def test_a_copied_module_reads_its_own_model() -> None:
    sequences, batch = make_texts([40], [4, 9, 4])
    module = TextModule(gpt2(), sequences)
    before = module(batch.clone())["logits"]
    target = copy.deepcopy(module)
    with torch.no_grad():
        module.model.transformer.wte.weight.add_(1.0)
    torch.testing.assert_close(target(batch.clone())["logits"], before)
    assert not torch.equal(module(batch.clone())["logits"], before)


# Errors


def test_rows_without_a_token_or_with_too_many_are_refused() -> None:
    sequences, _ = make_texts([4], [3])
    module = TextModule(gpt2(), sequences)
    for length in (0, -1, 8):
        batch = TensorDict({"observation": torch.tensor([[5, 4], [5, length]])}, [2])
        with pytest.raises(
            ValueError, match=f"a row of {length} tokens of sequence 5, which has 7: a row needs"
        ):
            module(batch)
    with pytest.raises(ValueError, match="row_length"):
        TextModule(gpt2(), sequences, row_length=-1)


def test_a_text_longer_than_the_model_reads_is_refused_before_the_pass() -> None:
    model = llama()
    shapes = Shapes(model)
    sequences, batch = make_texts([60, 2], [8])
    with pytest.raises(ValueError, match=r"a text of 67 tokens is longer than LlamaForCausalLM reads.*=64"):
        TextModule(model, sequences)(batch)
    assert not shapes.seen


def test_prompts_that_do_not_fit_their_texts_are_refused() -> None:
    table = Sequences()
    texts = (torch.arange(5), torch.tensor([3, 2]))
    for prompts in ([0, 2], [1, 3]):
        with pytest.raises(ValueError, match="prompts must be at least 1 token and at most the sequence"):
            table.add(*texts, torch.tensor(prompts))
    with pytest.raises(ValueError, match=r"prompts must have shape \[2\] as lengths, got \[1\]"):
        table.add(*texts, torch.tensor([1]))
    with pytest.raises(TypeError, match="prompts must be integers"):
        table.add(*texts, torch.tensor([1.0, 1.0]))
    assert len(table) == 0


def test_a_mask_of_another_length_is_refused(make_rollout: Make, prompts: PromptData) -> None:
    wrong = prompts.clone()
    wrong.attention_mask = wrong.attention_mask[:, :-1]
    with pytest.raises(
        ValueError, match=r"attention_mask must have the shape of input_ids, \[8, 12\], got \[8, 11\]"
    ):
        make_rollout().rollout_from_data(wrong)


# The table


def test_a_table_that_shares_prompts_reads_as_one_that_does_not() -> None:
    generator = torch.Generator().manual_seed(0)
    tables = [Sequences(), Sequences()]
    kept = 0
    for _ in range(12):
        prompts = [torch.randint(3, (n,), generator=generator) for n in (1, 2, 2, 3, 5)]
        texts = []
        heads = []
        for choice in torch.randint(5, (6,), generator=generator).tolist():
            count = int(torch.randint(4, (1,), generator=generator))
            texts.append(torch.cat([prompts[choice], torch.randint(3, (count,), generator=generator)]))
            heads.append(len(prompts[choice]))
        parts = (torch.cat(texts), torch.tensor([len(text) for text in texts]))
        numbers = [
            table.add(*parts, prompts)
            for table, prompts in zip(tables, (torch.tensor(heads), None), strict=True)
        ]
        assert torch.equal(*numbers)
        if torch.rand((), generator=generator) < 0.5:
            kept = int(torch.randint(kept, int(numbers[0][-1]) + 1, (1,), generator=generator))
            for table in tables:
                table.forget(kept)

        restored = Sequences()
        restored.load_state_dict(tables[0].state_dict())
        assert tables[0].numbers == tables[1].numbers == restored.numbers
        every = torch.tensor(list(tables[0].numbers))
        for table in (tables[0], restored):
            for number in every.tolist():
                assert torch.equal(table[number], tables[1][number])
            for length in (None, 2):
                for one, two in zip(
                    table.padded(every, length), tables[1].padded(every, length), strict=True
                ):
                    assert torch.equal(one, two)
    tables[0].forget()
    assert len(tables[0].state_dict()["tokens"]) == 0


def test_a_table_saved_before_prompts_were_shared_is_read() -> None:
    table = Sequences()
    table.load_state_dict({"first": 3, "tokens": torch.arange(5), "bounds": torch.tensor([0, 2, 5])})
    assert table[4].tolist() == [2, 3, 4]
    assert table.add(torch.tensor([7, 8, 7, 9]), torch.tensor([2, 2]), torch.tensor([1, 1])).tolist() == [
        5,
        6,
    ]
    assert table[6].tolist() == [7, 9]

    state = table.state_dict()
    for name, value in (
        ("heads", state["heads"] + 9),
        ("shared", state["shared"] + 9),
        ("heads", state["heads"][1:]),
    ):
        with pytest.raises(ValueError, match="bounds that do not fit"):
            Sequences().load_state_dict(state | {name: value})


# Sampling


def repeated(prompts: PromptData, times: int) -> PromptData:
    return torch.cat([prompts] * times)  # type: ignore[call-overload, no-any-return]


def test_equal_prompts_are_run_once_in_a_rollout(make_rollout: Make, prompts: PromptData, model: Any) -> None:
    model = copy.deepcopy(model)
    shapes = Shapes(model)
    rollout = make_rollout(model=model, flat=True, eos_token_id=[])
    some = repeated(prompts[4:], 3)
    rollout.rollout_from_data(some)
    shapes.seen.clear()
    batch = rollout.rollout_from_data(some)
    assert shapes.seen[:2] == [(4, 8), (12, 1)]
    log_probs = []
    for number in list(rollout.sequences.numbers)[12:]:
        text = rollout.sequences[number]
        with torch.no_grad():
            whole = model(input_ids=text[None]).logits[0, :-1].log_softmax(-1).gather(1, text[1:, None])
        log_probs.append(whole[-10:, 0])
    torch.testing.assert_close(batch["action_log_prob"], torch.cat(log_probs), atol=1e-5, rtol=1e-5)


class NoCopies:
    """A cache whose rows cannot be copied to others."""

    def __init__(self, value: Any) -> None:
        self.value = value


class Recurrent(Mixing):
    """Returns its cache in a form of its own; or copies rows wrongly."""

    def forward(self, input_ids: Tensor, past_key_values: Any = None, **others: Any) -> Any:  # type: ignore[override]
        name = "cache" if "cache" in signature(self.model.forward).parameters else "past_key_values"
        if past_key_values is not None:
            others[name] = past_key_values.value
        output = self.model(input_ids, **others)
        return SimpleNamespace(logits=output.logits, past_key_values=NoCopies(getattr(output, name)))


class Wrong(NoCopies):
    def reorder_cache(self, index: Tensor) -> None:
        self.value.reorder_cache(torch.zeros_like(index))


class WrongCopies(Recurrent):
    def forward(self, input_ids: Tensor, past_key_values: Any = None, **others: Any) -> Any:  # type: ignore[override]
        output = super().forward(input_ids, past_key_values, **others)
        output.past_key_values = Wrong(output.past_key_values.value)
        return output


@pytest.mark.parametrize("kind", [Recurrent, WrongCopies])
def test_a_cache_that_cannot_be_copied_is_computed_for_each_row(
    make_rollout: Make, prompts: PromptData, model: Any, kind: Any
) -> None:
    planted = kind(copy.deepcopy(model))
    shapes = Shapes(planted)
    some = repeated(prompts, 2)
    drawn = make_rollout(model=planted, eos_token_id=0, pad_token_id=1).generate(some)
    assert (16, 8) in shapes.seen
    expected = make_rollout(eos_token_id=0, pad_token_id=1).generate(some)
    assert torch.equal(drawn[0], expected[0])
    torch.testing.assert_close(drawn[1], expected[1], atol=1e-5, rtol=1e-5)


def test_log_ratios_do_not_depend_on_how_texts_are_run(
    make_rollout: Make, prompts: PromptData, ref_model: Any
) -> None:
    some = repeated(prompts, 3)
    expected = make_rollout().generate(some)
    planted = make_rollout()
    planted.ref_model = Refusing(ref_model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = planted.generate(some)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two, atol=1e-5, rtol=1e-5)


# What a comparison sees


class Carrying(Masked):
    """Passes a little of each token on to the tokens behind it in the row, as a state would."""

    refused = torch.complex64
    much = 1e-3

    def forward(self, input_ids: Tensor, **others: Any) -> Any:  # type: ignore[override]
        logits = Masked.forward(self, input_ids, **others).logits
        return SimpleNamespace(logits=logits + self.much * (logits.cumsum(1) - logits))


def lfm2() -> Any:
    from transformers import Lfm2Config, Lfm2ForCausalLM

    torch.manual_seed(0)
    sizes = SIZE | {"intermediate_size": 32, "num_key_value_heads": 2, "max_position_embeddings": 64} | ENDS
    return Lfm2ForCausalLM(Lfm2Config(**sizes, layer_types=["conv", "full_attention"])).eval()


def mamba() -> Any:
    from transformers import MambaConfig, MambaForCausalLM

    torch.manual_seed(0)
    return MambaForCausalLM(MambaConfig(vocab_size=40, hidden_size=16, num_hidden_layers=2, **ENDS)).eval()


def jamba() -> Any:
    from transformers import JambaConfig, JambaForCausalLM

    torch.manual_seed(0)
    sizes = SIZE | {"intermediate_size": 32, "num_key_value_heads": 2, "mamba_d_state": 4} | ENDS
    layers: dict[str, Any] = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 4}
    return JambaForCausalLM(JambaConfig(**sizes, **layers, use_mamba_kernels=False)).eval()


@pytest.mark.parametrize("kind", [lfm2, mamba, jamba])
def test_models_with_states_are_never_packed(kind: Any) -> None:
    model = kind()
    sequences, batch = make_texts([30, 3, 12], [2, 9, 4])
    module = TextModule(model, sequences)
    with pytest.warns(UserWarning, match=f"{type(model).__name__} .* the texts of a packed pass"):
        found = module(batch.clone())["logits"]
    scale = float(found.detach().abs().max())
    torch.testing.assert_close(found, separate(model, sequences, batch), atol=2e-6 * scale, rtol=0)


def test_a_small_leak_is_no_rounding() -> None:
    model = Carrying(gpt2())
    model.much = 1e-5
    sequences, batch = make_texts([30, 3, 12], [2, 9, 4], share=False)
    with pytest.warns(UserWarning, match="Carrying does not keep the texts"):
        TextModule(model, sequences)(batch)


class Growing(Carrying):
    """Passes nothing on before its weights have grown."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.gain = nn.Parameter(torch.tensor(0.5))

    def forward(self, input_ids: Tensor, **others: Any) -> Any:  # type: ignore[override]
        self.much = 1e-3 * max(float(self.gain.detach()) - 1, 0.0)
        return super().forward(input_ids, **others)


def test_a_model_that_leaks_only_after_its_weights_grew_is_found() -> None:
    model = Growing(gpt2(resid_pdrop=0.5))
    sequences, batch = make_texts([30, 3, 12], [2, 9, 4])
    module = TextModule(model, sequences)
    shapes = Shapes(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        module(batch.clone())
    assert shapes.seen[-1][1] > 39  # packed

    with torch.no_grad():
        model.gain.mul_(10)
    model.train()
    with pytest.warns(UserWarning, match="Growing does not keep the texts"):
        module(batch.clone())
    assert model.training and shapes.seen[-1][1] <= 39
    check_equal(model.eval(), module, sequences, batch)


class Wrapper(nn.Module):
    """Has a model and no configuration, as DistributedDataParallel."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.module = model

    def forward(self, input_ids: Tensor, use_cache: Any = None, **inputs: Any) -> Any:
        return self.module(input_ids, use_cache=use_cache, **inputs)


class Bare(Wrapper):
    """Hides the configuration of its model."""

    def __init__(self, model: Any) -> None:
        nn.Module.__init__(self)
        self.hidden = [model]
        self.weight = nn.Parameter(torch.zeros(1))

    @property
    def module(self) -> Any:
        return self.hidden[0]


def nested() -> Any:
    """A model whose configuration has the windows of its layers in a part."""
    model = mistral()
    whole = Wrapper(model)
    part = model.config
    part.vocab_size = 40
    whole.config = SimpleNamespace(get_text_config=lambda: part)  # type: ignore[assignment]
    return whole


@pytest.mark.parametrize("make", [nested, lambda: Wrapper(mistral()), lambda: Bare(mistral())])
def test_windows_of_wrapped_models_are_kept(make: Any) -> None:
    model = make()
    sequences, batch = make_texts([30, 20], [6, 9, 3])
    for row_length in (None, 10_000):
        module = TextModule(model, sequences, row_length=row_length)
        shapes = Shapes(model)
        torch.testing.assert_close(
            module(batch.clone())["logits"], separate(model, sequences, batch), atol=1e-5, rtol=1e-5
        )
        four = [named for named in shapes.named if "position_ids" in named and "attention_mask" in named]
        assert not four  # no mask for all layers


def test_a_nested_configuration_says_how_long_texts_may_be() -> None:
    sequences, batch = make_texts([60, 2], [8])
    with pytest.raises(ValueError, match="max_position_embeddings=64"):
        TextModule(Wrapper(llama()), sequences)(batch)


class Windowed(Masked):
    """Sees no more than 20 tokens back in packed rows, which texts of 7 tokens do not show."""

    refused = torch.complex64

    def forward(self, input_ids: Tensor, attention_mask: Any = None, **others: Any) -> Any:  # type: ignore[override]
        if attention_mask is not None and attention_mask.ndim == 4:
            width = input_ids.shape[1]
            near = torch.ones(width, width, dtype=torch.bool).triu(-20)
            lowest = torch.finfo(torch.float32).min
            if attention_mask.dtype is torch.bool:
                attention_mask = attention_mask & near
            else:
                attention_mask = attention_mask.masked_fill(~near, lowest)
        return Masked.forward(self, input_ids, attention_mask, **others)


def test_the_first_comparison_reads_texts_of_the_batch() -> None:
    model = Windowed(gpt2())
    sequences, batch = make_texts([40], [9, 9, 9])
    module = TextModule(model, sequences)
    with pytest.warns(UserWarning, match="Windowed does not keep"):
        found = module(batch.clone())["logits"]
    torch.testing.assert_close(found, separate(model, sequences, batch), atol=1e-5, rtol=1e-5)


class Banning(Masked):
    """Gives some tokens no chance."""

    refused = torch.complex64
    lowest = -float("inf")

    def forward(self, input_ids: Tensor, **others: Any) -> Any:  # type: ignore[override]
        logits = Masked.forward(self, input_ids, **others).logits
        return SimpleNamespace(logits=logits.index_fill(-1, torch.tensor([3, 38]), self.lowest))


@pytest.mark.parametrize("lowest", [-float("inf"), torch.finfo(torch.float32).min, -1e9])
def test_banned_tokens_are_no_fault(lowest: float) -> None:
    model = Banning(gpt2())
    model.lowest = lowest
    shapes = Shapes(model)
    sequences, batch = make_texts([40], [9, 9, 9])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        TextModule(model, sequences)(batch)
    assert shapes.seen[-1] == (1, 40 + 3 * 8)


def test_a_leak_beside_banned_tokens_is_found() -> None:
    model = Banning(Mixing(gpt2()))
    sequences, batch = make_texts([40], [9, 9, 9])
    with pytest.warns(UserWarning, match="Banning does not keep"):
        TextModule(model, sequences)(batch)


def test_a_row_length_of_0_pads_all_texts() -> None:
    model = gpt2()
    shapes = Shapes(model)
    sequences, batch = make_texts([40, 3], [9, 9, 9])
    module = TextModule(model, sequences, row_length=0)
    module(batch.clone())
    assert sorted(shapes.seen) == [(3, 11), (3, 48)]
    assert all("position_ids" not in named for named in shapes.named)
    check_equal(model, module, sequences, batch)


def test_attention_by_cumulative_lengths_takes_no_row_length() -> None:
    model = Mixing(gpt2())
    model.config = SimpleNamespace(_attn_implementation="flash_attention_2", vocab_size=40)
    sequences, batch = make_texts([9, 9], [2, 4])
    with pytest.raises(ValueError, match="leave row_length out"):
        TextModule(model, sequences, row_length=64)(batch)
    TextModule(model, sequences, row_length=0)(batch)


def test_what_cannot_be_told_is_asked_at_few_passes() -> None:
    critic = make_critic()
    with torch.no_grad():
        critic.classifier.weight.zero_()
    sequences, batch = make_texts([40], [9, 9, 9])
    module = TextModule(critic, sequences, "state_value")
    shapes = Shapes(critic)
    asked = []
    for number in range(1, 10):
        before = len(shapes.seen)
        module(batch.clone())
        if len(shapes.seen) > before + 1:
            asked.append(number)
    assert asked == [1, 2, 4, 8]
