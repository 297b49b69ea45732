"""The row index, against a Python dict."""

import subprocess
import sys

import pytest
import torch
from torch import Tensor

from flatroll.kernels.rows.row_index import HashedRows, RowIndex, SortedRows, occurrences
from flatroll.kernels.rows.words import hash_by_torch, hash_words, pack_rows

KINDS = [HashedRows, SortedRows]


@pytest.fixture(params=KINDS, ids=lambda kind: kind.__name__)
def make_index(request: pytest.FixtureRequest):
    return lambda width: request.param(width, torch.device("cpu"))


def numbers_by_dict(known: dict[tuple[int, ...], int], rows: Tensor) -> list[int]:
    return [known.setdefault(tuple(row), len(known)) for row in rows.tolist()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_thousand_random_keys(kind: type) -> None:
    generator = torch.Generator().manual_seed(0)
    index, known = kind(3, torch.device("cpu")), {}
    left = 100_000
    while left:
        size = min(left, int(torch.randint(1, 9000, (), generator=generator)))
        rows = torch.randint(-20, 20, (size, 3), generator=generator)
        rows[::3] *= 2**58  # high bits, too
        expected = numbers_by_dict(known, rows)
        assert index.insert(rows).tolist() == expected
        assert len(index) == len(known)
        left -= size
    queries = torch.randint(-40, 40, (5000, 3), generator=generator)
    assert index.find(queries).tolist() == [known.get(tuple(row), -1) for row in queries.tolist()]
    assert [tuple(row) for row in index.words.tolist()] == list(known)


def test_rows_of_one_hash_are_told_apart(make_index, monkeypatch: pytest.MonkeyPatch) -> None:
    """With all hashes equal, which the sorted index can be made to see."""
    monkeypatch.setattr(
        "flatroll.kernels.rows.row_index.hash_words", lambda words: torch.zeros(len(words), dtype=torch.int64)
    )
    index, known = make_index(2), {}
    for seed in range(3):
        rows = torch.randint(5, (40, 2), generator=torch.Generator().manual_seed(seed))
        assert index.insert(rows).tolist() == numbers_by_dict(known, rows)
    assert index.find(torch.tensor([[9, 9], [1, 1]])).tolist() == [-1, known[1, 1]]


def test_rows_that_share_a_place_in_the_table_are_told_apart() -> None:
    rows = torch.arange(100_000).unsqueeze(-1)
    crowded = rows[(hash_words(rows) & 0xFFF) == 7]  # these all begin their search at place 7
    assert len(crowded) > 10
    index = HashedRows(1)
    assert index.insert(crowded).tolist() == list(range(len(crowded)))
    assert index.find(crowded).tolist() == list(range(len(crowded)))


def test_empty_batches_and_rows_without_words(make_index) -> None:
    index = make_index(2)
    assert index.insert(torch.empty(0, 2, dtype=torch.int64)).tolist() == []
    assert index.find(torch.tensor([[1, 2]])).tolist() == [-1]
    nothing = make_index(0)
    assert nothing.insert(torch.empty(3, 0, dtype=torch.int64)).tolist() == [0, 0, 0]
    assert nothing.find(torch.empty(1, 0, dtype=torch.int64)).tolist() == [0]


def test_the_number_of_words_is_checked() -> None:
    index = RowIndex(2)
    with pytest.raises(ValueError, match=r"int64 of shape \[N, 2\], got torch.int64 \[1, 3\]"):
        index.insert(torch.ones(1, 3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"got torch.float32"):
        index.find(torch.ones(1, 2))
    assert len(index) == 0


def test_the_newest_rows_can_be_forgotten(make_index) -> None:
    index, rows = make_index(1), torch.arange(300).unsqueeze(-1)
    index.insert(rows)
    index.truncate(200)
    assert len(index) == len(index.words) == 200
    assert index.find(rows).tolist() == [*range(200), *[-1] * 100]
    assert index.insert(rows.flip(0)).tolist() == [*range(200, 300), *range(199, -1, -1)]
    index.truncate(0)
    assert len(index) == 0 and index.insert(rows[2:3]).tolist() == [0]


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64], ids=str
)
def test_zeros_and_nans_are_normalised(dtype: torch.dtype) -> None:
    quiet = -torch.tensor(float("nan"))
    rows = torch.tensor([[0.0, float("nan")], [-0.0, quiet], [1.0, float("inf")], [1.0, -float("inf")]])
    words = pack_rows([rows.to(dtype)])
    assert words[0].equal(words[1])
    assert len(words.unique(dim=0)) == 3


def test_neighbouring_values_differ() -> None:
    assert len(pack_rows([torch.tensor([[1e5], [2e5]], dtype=torch.bfloat16)]).unique()) == 2
    counter = torch.arange(20_000, dtype=torch.float32).unsqueeze(-1).expand(-1, 40)
    assert len(pack_rows([counter]).unique(dim=0)) == 20_000


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int16, torch.int32, torch.float32], ids=str)
@pytest.mark.parametrize("features", [0, 1, 3, 8, 17])
def test_words_differ_just_where_rows_do(dtype: torch.dtype, features: int) -> None:
    rows = torch.randint(2, (300, features), generator=torch.Generator().manual_seed(1)).to(dtype)
    words = pack_rows([rows, rows[:, :1].flip(1)])
    assert torch.equal((words[:, None] == words).all(-1), (rows[:, None] == rows).all(-1))
    apart = pack_rows([rows[1:], rows[1:]])  # from another address
    assert apart.equal(pack_rows([rows, rows])[1:])


def test_compiled_and_torch_hashes_agree() -> None:
    words = torch.randint(-(2**62), 2**62, (1000, 5))
    assert hash_words(words).equal(hash_by_torch(words))


def test_hashes_are_the_same_in_every_process() -> None:
    script = (
        "import torch\nfrom flatroll.kernels.rows.words import hash_words\n"
        "print(hash_words(torch.tensor([[1, 2]])).item())"
    )
    runs = {subprocess.check_output([sys.executable, "-c", script], text=True) for _ in range(2)}
    assert runs == {f"{hash_words(torch.tensor([[1, 2]])).item()}\n"}


def test_occurrences() -> None:
    ids = torch.tensor([3, 1, 3, 3, 1, 0])
    assert occurrences(ids).tolist() == [0, 0, 1, 2, 1, 0]
    assert occurrences(ids[:0]).tolist() == []


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_the_gpu() -> None:
    rows = torch.randint(50, (2000, 2))
    index, known = RowIndex(2, "cuda"), {}
    assert index.insert(rows.cuda()).tolist() == numbers_by_dict(known, rows)
    assert hash_words(rows.cuda()).cpu().equal(hash_words(rows))
