"""Tokenizers, tokenized data sets with their cache, and loaders."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_text import train_tokenizer

from flatroll.text import (
    PairwiseDataset,
    PromptData,
    PromptTensorDictTokenizer,
    TensorDictTokenizer,
    TokenizedDatasetLoader,
    create_infinite_iterator,
    get_dataloader,
)

TEXTS = ["the cat sat on", "I like tea and milk", "honey in the morning .", "you sat on a mat"]


def save(folder: Path, rows: int = 12, splits: tuple[str, ...] = ("train", "valid"), shift: int = 0) -> str:
    """A data set of prompts, labels, and pairs of texts, as ``save_to_disk`` writes it."""
    from datasets import Dataset, DatasetDict

    columns = {
        "prompt": [TEXTS[(i + shift) % 4] for i in range(rows)],
        "label": [f" a mat and {'tea ' * (i % 3)}milk" for i in range(rows)],
        "chosen": ["I like tea with honey and milk"] * rows,
        "rejected": [
            "you like milk with the cat" if i % 3 else "I like tea with honey and milk" for i in range(rows)
        ],
    }
    data = Dataset.from_dict(columns)
    DatasetDict(dict.fromkeys(splits, data)).save_to_disk(str(folder))
    return str(folder)


def loader(data: str, cache: Path, tokenizer: Any, **options: Any) -> TokenizedDatasetLoader:
    settings = {
        "split": "train",
        "max_length": 24,
        "tokenizer_fn": PromptTensorDictTokenizer,
        "from_disk": True,
    }
    return TokenizedDatasetLoader(
        dataset_name=data, root_dir=cache, tokenizer=tokenizer, **(settings | options)
    )


# Tokenizers


def test_texts_are_padded_on_the_right_and_cut(tokenizer: Any) -> None:
    batch = TensorDictTokenizer(tokenizer, 4)({"text": TEXTS})
    assert batch.batch_size == (4,) and batch["input_ids"].shape == (4, 4)
    assert batch["input_ids"].dtype == batch["attention_mask"].dtype == torch.int64
    tokenizer.padding_side, side = "left", tokenizer.padding_side
    try:
        single = TensorDictTokenizer(tokenizer, 9)({"text": TEXTS[0]})
    finally:
        tokenizer.padding_side = side
    assert single.batch_size == () and single["attention_mask"].tolist() == [1] * 4 + [0] * 5
    assert tokenizer.decode(single["input_ids"][:4]) == TEXTS[0]
    lists = TensorDictTokenizer(tokenizer, 9, padding=False, return_tensordict=False)({"text": TEXTS})
    assert [len(row) for row in lists["input_ids"]] == [4, 5, 6, 5]
    with pytest.raises(ValueError, match="do not fit one tensor"):
        TensorDictTokenizer(tokenizer, 9, padding=False)({"text": TEXTS})
    with pytest.raises(KeyError, match="no entry 'text': it has 'prompt'"):
        TensorDictTokenizer(tokenizer, 9)({"prompt": TEXTS})


def test_a_prompt_ends_with_its_last_token(tokenizer: Any) -> None:
    sample = {"prompt": ["the cat sat on", "I like"], "label": [" a mat", " tea"]}
    batch = PromptTensorDictTokenizer(tokenizer, 12)(sample)
    data = PromptData(**batch.exclude("valid_sample").to_dict(), batch_size=batch.batch_size)
    masked = data.mask_label(pad_token_id=tokenizer.pad_token_id)
    assert masked.batch_size == (2,)
    for row, prompt in enumerate(sample["prompt"]):
        real = masked.input_ids[row][masked.attention_mask[row] > 0]
        assert tokenizer.decode(real) == prompt
        whole = data.input_ids[row][data.attention_mask[row] > 0]
        assert tokenizer.decode(whole) == prompt + sample["label"][row]


def test_a_token_across_the_seam_belongs_to_the_label(tokenizer: Any) -> None:
    """ "I li" alone has four tokens, "I like tea" three: only "I" is common."""
    batch = PromptTensorDictTokenizer(tokenizer, 12)({"prompt": "I li", "label": "ke tea"})
    assert batch["input_ids"][:3].tolist() == tokenizer("I like tea")["input_ids"]
    assert int(batch["prompt_rindex"]) == 0 and bool(batch["valid_sample"])
    batch = PromptTensorDictTokenizer(tokenizer, 12)({"prompt": ["th"], "label": ["e cat"]})
    assert batch["prompt_rindex"].tolist() == [-1] and batch["valid_sample"].tolist() == [False]


@pytest.mark.parametrize("pad", ["<pad>", "<eos>"])
def test_a_sample_is_valid_if_it_was_not_cut(pad: str) -> None:
    tokenizer = train_tokenizer()
    tokenizer.pad_token = pad
    sample = {"prompt": ["the cat", "the cat", "the cat"], "label": [" sat", " sat on a mat", " sat on<eos>"]}
    batch = PromptTensorDictTokenizer(tokenizer, 5)(sample)
    assert batch["valid_sample"].tolist() == [True, False, True]
    assert batch["attention_mask"].sum(1).tolist() == [3, 5, 5]


def test_tokenizers_that_cannot_serve_are_refused() -> None:
    tokenizer = train_tokenizer()
    with pytest.raises(ValueError, match="1 texts in 'prompt' do not match 2 in 'label'"):
        PromptTensorDictTokenizer(tokenizer, 5)({"prompt": ["a"], "label": ["b", "c"]})
    tokenizer.truncation_side = "left"
    with pytest.raises(ValueError, match="truncation_side is 'left'"):
        PromptTensorDictTokenizer(tokenizer, 5)
    tokenizer.pad_token = None
    with pytest.raises(ValueError, match="has no pad token"):
        TensorDictTokenizer(tokenizer, 5)


# The cache


def test_rows_come_in_order_without_those_that_were_cut(tokenizer: Any, tmp_path: Path) -> None:
    data = loader(save(tmp_path / "data"), tmp_path / "cache", tokenizer, max_length=9).load()
    assert 0 < len(data) < 12 and "valid_sample" not in data
    assert sorted(data.keys()) == ["attention_mask", "input_ids", "prompt_rindex"]
    first = data[0]
    assert (
        tokenizer.decode(first["input_ids"][first["attention_mask"] > 0]) == "the cat sat on a mat and milk"
    )
    assert [path.name[0] for path in (tmp_path / "cache").iterdir()] != ["."]  # nothing half-written is left
    with pytest.raises(ValueError, match="all texts are longer than max_length=2"):
        loader(str(tmp_path / "data"), tmp_path / "cache", tokenizer, max_length=2).load()
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_cache_is_used_for_the_same_alone(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    data, cache = save(tmp_path / "data-v1"), tmp_path / "cache"
    before = loader(data, cache, tokenizer).load()

    def written(*args: Any) -> None:
        raise AssertionError("tokenized again")

    with monkeypatch.context() as patch:
        patch.setattr(TokenizedDatasetLoader, "_write", written)
        assert torch.equal(loader(data, cache, train_tokenizer()).load()["input_ids"], before["input_ids"])
        other = save(tmp_path / "data-v2", shift=1)
        for changed in (
            loader(other, cache, tokenizer),
            loader(data, cache, train_tokenizer(40)),
            loader(data, cache, tokenizer, max_length=25),
            loader(data, cache, tokenizer, split="valid", valid_size=5),
            loader(data, cache, tokenizer, tokenizer_fn=Prompts),
        ):
            with pytest.raises(AssertionError, match="tokenized again"):
                changed.load()
    after = loader(other, cache, tokenizer).load()
    assert not torch.equal(after["input_ids"], before["input_ids"])


class Prompts(TensorDictTokenizer):
    """Another function over the same tokenizer."""


def test_a_short_validation_split_is_taken_whole(tokenizer: Any, tmp_path: Path) -> None:
    data = save(tmp_path / "data")
    assert len(loader(data, tmp_path, tokenizer, split="valid").load()) == 12
    assert len(loader(data, tmp_path, tokenizer, split="valid", valid_size=7).load()) == 7
    with pytest.raises(KeyError, match="no split 'test': it has 'train', 'valid'"):
        loader(data, tmp_path, tokenizer, split="test").load()


def test_a_tokenizer_class_is_used(tokenizer: Any, tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer.save_pretrained(str(tmp_path / "tokenizer"))
    made = TokenizedDatasetLoader(
        "train",
        24,
        save(tmp_path / "data"),
        PromptTensorDictTokenizer,
        root_dir=tmp_path / "cache",
        from_disk=True,
        tokenizer_class=PreTrainedTokenizerFast,
        tokenizer_model_name=str(tmp_path / "tokenizer"),
    )
    expected = loader(str(tmp_path / "data"), tmp_path / "other", tokenizer).load()
    assert torch.equal(made.load()["input_ids"], expected["input_ids"])
    with pytest.raises(ValueError, match="either tokenizer="):
        loader("data", tmp_path, tokenizer, tokenizer_model_name="gpt2")


def test_a_missing_package_is_named(tokenizer: Any, tmp_path: Path, monkeypatch: Any) -> None:
    made = loader("data", tmp_path, tokenizer)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=r'pip install "flatroll\[text\]"'):
        made.load()


# Loaders


def test_a_loader_gives_each_row_once_a_pass(tokenizer: Any, tmp_path: Path) -> None:
    options: dict[str, Any] = {"dataset_name": save(tmp_path / "data"), "root_dir": tmp_path / "cache"}
    options |= {"from_disk": True, "tokenizer": tokenizer}
    once = get_dataloader(4, 24, PromptData, "cpu", infinite=False, **options)
    batches = list(once)
    assert [type(batch) for batch in batches] == [PromptData] * 3 and batches[0].batch_size == (4,)
    assert torch.equal(batches[0].labels, batches[0].input_ids) and batches[0].loss is None
    prompts = [tuple(row) for batch in batches for row in batch.mask_label().input_ids.tolist()]
    assert sorted(prompts.count(row) for row in set(prompts)) == [3, 3, 3, 3]
    endless = get_dataloader(5, 24, PromptData, "cpu", **options)
    assert len(list(itertools.islice(endless, 7))) == 7
    with pytest.raises(ValueError, match="at most the 12 rows"):
        get_dataloader(13, 24, PromptData, "cpu", **options)


def test_pairs_stand_side_by_side(tokenizer: Any, tmp_path: Path) -> None:
    data = save(tmp_path / "data")
    pairs = PairwiseDataset.from_dataset(
        "train", data, max_length=24, root_dir=tmp_path, from_disk=True, tokenizer=tokenizer
    )
    assert pairs.batch_size == (8,)  # the equal ones are left out
    for kind, text in (("chosen", "I like tea"), ("rejected", "you like milk")):
        rows = getattr(pairs, f"{kind}_data")[1]
        assert tokenizer.decode(rows.input_ids[rows.attention_mask > 0]).partition("\n")[2].startswith(text)
    batch = next(
        get_dataloader(
            2, 24, PairwiseDataset, "cpu", data, root_dir=tmp_path, from_disk=True, tokenizer=tokenizer
        )
    )
    assert batch.chosen_data.input_ids.shape == (2, 24) == batch.rejected_data.input_ids.shape


def test_an_infinite_iterator_never_hangs() -> None:
    assert list(itertools.islice(create_infinite_iterator([1, 2]), 5)) == [1, 2, 1, 2, 1]
    with pytest.raises(ValueError, match="is empty or exhausted"):
        next(create_infinite_iterator([]))
    generator = create_infinite_iterator(i for i in range(2))
    assert [next(generator), next(generator)] == [0, 1]
    with pytest.raises(ValueError, match="can be restarted"):
        next(generator)
    assert next(create_infinite_iterator(create_infinite_iterator([3]))) == 3
