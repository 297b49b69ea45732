"""Tokenized data sets, cached in memory-mapped files, and batch loaders."""

import hashlib
import importlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict

from flatroll.buffers import ReplayBuffer, SamplerWithoutReplacement, TensorStorage
from flatroll.layout.checks import (
    as_text,
    check_device,
    check_flags,
    check_function,
    check_path,
    check_type,
    check_whole_number,
)


class TokenizedDatasetLoader:
    """Tokenizes a data set once, and caches the tokens in memory-mapped files.

    A cached copy is used again only for the same data, tokenizer and arguments: its folder's name is a hash of them
    all. It is written beside its place and renamed when whole.

    Args:
        split: such as ``"train"`` or ``"valid"``.
        max_length: tokens of a row.
        dataset_name: name of a data set for ``datasets.load_dataset``, or a folder (see ``from_disk``).
        tokenizer_fn: `TensorDictTokenizer`, `PromptTensorDictTokenizer`, or a class called with ``(tokenizer,
            max_length=, return_tensordict=False)`` whose objects turn a batch of examples into lists.
        pre_tokenization_hook: called with the data set before it is tokenized; returns a data set. Default: None.
        root_dir: folder of the cache. Default: ``~/.cache/flatroll/text``.
        from_disk: whether ``dataset_name`` is a folder written by ``save_to_disk``. Default: False.
        valid_size: maximum number of rows of a split whose name begins with "valid". Default: 2000.
        num_workers: number of processes that tokenize. Default: only this one.
        tokenizer_class: its ``from_pretrained`` gives the tokenizer. Default: ``transformers.AutoTokenizer``.
        tokenizer_model_name: name or folder it is called with. Default: ``"gpt2"``.
        tokenizer: the tokenizer itself, in place of the two arguments before.

    Raises:
        ImportError: datasets or transformers is missing.
        ValueError: ``tokenizer`` and one of the arguments it replaces are both given.
    """

    def __init__(
        self,
        split: str,
        max_length: int,
        dataset_name: str,
        tokenizer_fn: Callable[..., Any],
        pre_tokenization_hook: Callable[[Any], Any] | None = None,
        root_dir: str | Path | None = None,
        from_disk: bool = False,
        valid_size: int = 2000,
        num_workers: int | None = None,
        tokenizer_class: Any = None,
        tokenizer_model_name: str | None = None,
        *,
        tokenizer: Any = None,
    ) -> None:
        check_type("split", split, str, "the name of a split")
        check_whole_number("max_length", max_length)
        check_type("dataset_name", dataset_name, (str, Path), "the name of a data set or a folder")
        check_function("tokenizer_fn", tokenizer_fn, "a class such as TensorDictTokenizer")

        if pre_tokenization_hook is not None:
            check_function("pre_tokenization_hook", pre_tokenization_hook)
        if root_dir is not None:
            check_path("root_dir", root_dir)
        check_flags(from_disk=from_disk)
        check_whole_number("valid_size", valid_size, 0)
        if num_workers is not None:
            check_whole_number("num_workers", num_workers, 0)

        if tokenizer is not None and not hasattr(tokenizer, "pad_token"):
            raise TypeError(f"tokenizer must be a tokenizer of transformers, got {as_text(tokenizer)}")
        if tokenizer is not None and (tokenizer_class is not None or tokenizer_model_name is not None):
            raise ValueError("pass either tokenizer=, or tokenizer_class and tokenizer_model_name")

        self.split = split
        self.max_length = max_length
        if from_disk:
            self.dataset_name = str(Path(dataset_name).absolute())
        else:
            self.dataset_name = dataset_name

        self.tokenizer_fn = tokenizer_fn
        self.pre_tokenization_hook = pre_tokenization_hook
        self.root_dir = Path(root_dir or Path.home() / ".cache/flatroll/text").absolute()
        self.from_disk = from_disk
        self.valid_size = valid_size
        self.num_workers = num_workers

        if tokenizer is None:
            source = tokenizer_class or _import_extra("transformers").AutoTokenizer
            tokenizer = source.from_pretrained(tokenizer_model_name or "gpt2")
        if tokenizer.pad_token is None:
            tokenizer.pad_token = tokenizer.eos_token
        self.tokenizer = tokenizer

    def load(self) -> TensorDict:
        """Return the tokens, rows in the data set's order, memory-mapped: a tensordict of batch size ``[rows]``.

        Rows that a `PromptTensorDictTokenizer` marks as not valid are left out.

        Raises:
            KeyError: the data set on disk has no such split.
            ValueError: no row is left.
        """
        dataset = self._dataset()
        folder = self.root_dir / self._cache_key(dataset)
        if not folder.exists():
            self._write(dataset, folder)
        return TensorDict.load_memmap(folder, allow_pickle=False)

    def _dataset(self) -> Any:
        """The texts: one split of the data set, shortened and changed as asked."""
        datasets = _import_extra("datasets")
        if self.from_disk:
            dataset = datasets.load_from_disk(self.dataset_name)
            if isinstance(dataset, dict):
                if self.split not in dataset:
                    raise KeyError(
                        f"{self.dataset_name} has no split {self.split!r}: it has {', '.join(map(repr, dataset))}"
                    )
                dataset = dataset[self.split]
        else:
            dataset = datasets.load_dataset(self.dataset_name, split=self.split)

        if self.split.startswith("valid"):
            dataset = dataset.select(range(min(self.valid_size, len(dataset))))
        if self.pre_tokenization_hook is None:
            return dataset
        return self.pre_tokenization_hook(dataset)

    def _cache_key(self, dataset: Any) -> str:
        """Hash of all that the tokens depend on."""
        function = self.tokenizer_fn
        parts = {
            "data": dataset._fingerprint,  # a hash by datasets of the rows and all operations on them
            "tokenizer": tokenizer_state(self.tokenizer),
            "function": [
                getattr(function, "__module__", ""),
                getattr(function, "__qualname__", repr(function)),
            ],
            "max_length": self.max_length,
            "format": 1,
        }
        return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:32]

    def _write(self, dataset: Any, folder: Path) -> None:
        """Tokenize into a temporary folder and rename it; if another process was first, use its result."""
        self.root_dir.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(dir=self.root_dir, prefix=".writing-"))
        try:
            tokenized = dataset.map(
                self.tokenizer_fn(self.tokenizer, max_length=self.max_length, return_tensordict=False),
                batched=True,
                num_proc=self.num_workers,
                remove_columns=dataset.column_names,
                cache_file_name=str(staging / "tokens.arrow"),
                new_fingerprint=folder.name,
                desc="Tokenizing",
            ).with_format("numpy")

            columns = {key: torch.as_tensor(tokenized[:][key]) for key in tokenized.column_names}
            valid = columns.pop("valid_sample", torch.ones(len(tokenized), dtype=torch.bool)).bool()
            if not bool(valid.any()):
                raise ValueError(
                    f"no row of {self.dataset_name} is left: all texts are longer than max_length={self.max_length}, "
                    "or have no prompt"
                )

            if not bool(valid.all()):
                columns = {key: column[valid] for key, column in columns.items()}
            TensorDict(columns, [int(valid.sum())]).memmap(str(staging / "rows"))

            try:
                os.rename(staging / "rows", folder)
            except OSError:
                if not folder.exists():
                    raise
        finally:
            shutil.rmtree(staging)


def tokenizer_state(tokenizer: Any) -> Any:
    """All that a tokenizer's ids depend on, for a hash; not what a call leaves behind in it."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        rules = [sorted(tokenizer.get_vocab().items()), getattr(tokenizer, "init_kwargs", {})]
    else:
        state = json.loads(backend.to_str())
        rules = [{key: part for key, part in state.items() if key not in ("padding", "truncation")}]
    special = [tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.truncation_side]
    return [type(tokenizer).__name__, rules, special]


def create_infinite_iterator(iterator: Iterable[Any]) -> Iterator[Any]:
    """Iterate over an iterable endlessly.

    Args:
        iterator: an iterable that can be repeated (a list, a replay buffer, a DataLoader), or an infinite iterator.

    Raises:
        ValueError: while iterating, when the iterable gives nothing, or an iterator that cannot start again has ended.

    >>> import itertools
    >>> list(itertools.islice(create_infinite_iterator([1, 2]), 5))
    [1, 2, 1, 2, 1]
    """
    if not isinstance(iterator, Iterable) or (isinstance(iterator, torch.Tensor) and not iterator.ndim):
        raise TypeError(f"iterator must be a list or another iterable, got {as_text(iterator)}")

    while True:
        empty = True
        for item in iterator:
            empty = False
            yield item
        if empty:
            raise ValueError(
                "iterator is empty or exhausted: pass an iterable that is not empty and can be restarted"
            )


def get_dataloader(
    batch_size: int,
    block_size: int,
    tensorclass_type: Any,
    device: torch.device | str,
    dataset_name: str | None = None,
    infinite: bool = True,
    prefetch: int = 0,
    split: str = "train",
    root_dir: str | Path | None = None,
    from_disk: bool = False,
    num_workers: int | None = None,
    *,
    tokenizer: Any = None,
) -> Any:
    """Load a data set and return an iterable of its batches: each row once per pass, in random order.

    Args:
        batch_size: rows of a batch; the rest of a pass that does not fill one is left out.
        block_size: tokens of a row.
        tensorclass_type: `PromptData`, `PairwiseDataset`, or another class with their ``from_dataset``.
        device: where batches are to be.
        dataset_name: default that of ``tensorclass_type``.
        infinite: whether a new pass follows each. Default: True.
        prefetch: batches that threads get ready. Default: 0.
        split: default ``"train"``.
        root_dir: folder of the cache; see `TokenizedDatasetLoader`.
        from_disk: whether ``dataset_name`` is a folder. Default: False.
        num_workers: processes that tokenize. Default: one.
        tokenizer: default GPT-2's.

    Returns:
        an iterator if ``infinite``, else a replay buffer; of ``tensorclass_type`` of batch size ``[batch_size]``.

    Raises:
        ValueError: the data set has fewer rows than a batch.
    """
    check_whole_number("batch_size", batch_size)
    check_flags(infinite=infinite)
    check_whole_number("prefetch", prefetch, 0)
    check_device("device", device)
    check_function("tensorclass_type.from_dataset", getattr(tensorclass_type, "from_dataset", None))

    given = {} if tokenizer is None else {"tokenizer": tokenizer}
    data = tensorclass_type.from_dataset(
        split=split,
        dataset_name=dataset_name,
        max_length=block_size,
        root_dir=root_dir,
        from_disk=from_disk,
        num_workers=num_workers,
        **given,
    )

    if len(data) < batch_size:
        raise ValueError(f"batch_size must be at most the {len(data)} rows of the data set, got {batch_size}")

    def stack_rows(drawn: Any) -> Any:
        return data[drawn["row"]].to(device)

    # The buffer holds only row numbers: the rows stay in their files until they are drawn.
    buffer: Any = ReplayBuffer(
        storage=TensorStorage(TensorDict({"row": torch.arange(len(data))}, [len(data)])),
        sampler=SamplerWithoutReplacement(drop_last=True),
        batch_size=batch_size,
        prefetch=prefetch,
        transform=stack_rows,
    )

    if infinite:
        return create_infinite_iterator(buffer)
    return buffer


def _import_extra(name: str) -> Any:
    """Import a package of the extra; ImportError if it is missing."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(f'tokenized data sets need {name}: pip install "flatroll[text]"') from error
