"""The row index, against a Python dict."""

import pytest
import torch
from torch import Tensor

from flatroll.kernels.rows.row_index import HashedRows, RowIndex, SortedRows, occurrences
from flatroll.kernels.rows.words import hash_by_torch, hash_words, pack_rows, view_rows

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


def unmixed(word: int) -> int:
    """The word whose mix (`flatroll.kernels.rows.hash_table`) is ``word``; both in 64 bits."""
    for shift, factor in ((31, 0x94D049BB133111EB), (27, 0xBF58476D1CE4E5B9)):
        word ^= word >> shift ^ word >> 2 * shift
        word = word * pow(factor, -1, 2**64) % 2**64
    return word ^ word >> 30 ^ word >> 60


def test_different_rows_of_one_hash_have_numbers_of_their_own(make_index) -> None:
    """A row's hash is the mix of a sum of mixes: what one word adds to the sum, the other can take off."""
    step = 0x9E3779B97F4A7C15
    words = [[unmixed(1000 + i) - step, unmixed(1000 - i) - 2 * step] for i in range(6)]
    rows = torch.tensor([[(word + 2**63) % 2**64 - 2**63 for word in row] for row in words])
    assert len(hash_words(rows).unique()) == 1 and len(rows.unique()) == 12
    index = make_index(2)
    assert index.insert(rows[:4]).tolist() == [0, 1, 2, 3]
    assert index.find(rows).tolist() == [0, 1, 2, 3, -1, -1]
    assert index.insert(rows.flip(0)).tolist() == [4, 5, 3, 2, 1, 0]


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


def test_room_is_made_for_the_first_row_that_does_not_fit(make_index) -> None:
    index, rows = make_index(1), torch.arange(1000).unsqueeze(-1)
    for count in (63, 64, 65, 127, 128, 129, 257):
        index.insert(rows[len(index) : count])
        assert index.words.equal(rows[:count]) and index.find(rows[:count]).equal(rows[:count, 0])


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


def test_hashes_are_the_same_in_every_process_and_version() -> None:
    """Numbers that were written down: hashes are stored, and compared between machines."""
    rows = torch.tensor([[1, 2], [-1, 2**62]])
    assert (
        hash_words(rows).tolist()
        == hash_by_torch(rows).tolist()
        == [
            -4498564503783439789,
            -6290478446292816599,
        ]
    )


def test_occurrences() -> None:
    ids = torch.tensor([3, 1, 3, 3, 1, 0])
    assert occurrences(ids).tolist() == [0, 0, 1, 2, 1, 0]
    assert occurrences(ids[:0]).tolist() == []


#: Rows that are not equal as bytes, but some of which are as numbers: zeros of both signs, NaNs of several bits.
BITS_4 = [0, 1 << 31, 0x7FC00000, -0x400000, 0x7F800001, 0x7F800000, -0x800000, 0x3F800000, 1]
BITS_8 = [0, 1 << 63, 0x7FF8 << 48, -(8 << 48), (0x7FF << 52) + 1, 0x7FF << 52, -(16 << 48), 0x3FF << 52, 1]


def odd_floats(dtype: torch.dtype, rows: int, width: int, generator: torch.Generator) -> Tensor:
    bits, words = (BITS_4, torch.int32) if dtype is torch.float32 else (BITS_8, torch.int64)
    size = 8 * dtype.itemsize
    signed = torch.tensor([(x + (1 << size - 1)) % (1 << size) - (1 << size - 1) for x in bits], dtype=words)
    return signed[torch.randint(len(bits), (rows, width), generator=generator)].view(dtype)


def values_of(rows: Tensor) -> list[tuple[float | str, ...]]:
    return [tuple("nan" if x != x else x for x in row) for row in rows.detach().tolist()]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("width", [0, 1, 2, 3, 4])
def test_rows_that_are_not_copied_have_the_numbers_of_packed_ones(
    kind: type, dtype: torch.dtype, width: int
) -> None:
    """Also rows of other memory: with gaps, backwards, of odd addresses, with gradients, from an expanded row."""
    generator = torch.Generator().manual_seed(width)
    many = odd_floats(dtype, 3000, width, generator)
    wider = odd_floats(dtype, 40, width + 1, generator)
    batches = [
        many,
        many[:0],
        many[::7],
        many.flip(0)[:50],
        many[:1].expand(5, width),
        many[:50].clone().requires_grad_(),
        wider[:, :width],
        wider[:, 1:],
        wider.view(-1)[1 : 1 + 39 * width].view(39, width),  # of float32, off the words' addresses
    ]
    viewed, packed = (kind(pack_rows([many]).shape[1], torch.device("cpu")) for _ in range(2))
    known: dict[tuple[float | str, ...], int] = {}
    for rows in batches:
        words, floats = view_rows([rows])
        numbers, hashes = viewed.number(words, floats)
        assert numbers.equal(packed.insert(pack_rows([rows])))
        assert numbers.tolist() == [known.setdefault(row, len(known)) for row in values_of(rows)]
        assert hashes.equal(hash_words(pack_rows([rows])))
        assert viewed.number(words, floats, extend=False)[0].equal(numbers)
    assert viewed.words.equal(packed.words) and len(viewed) == len(known)


@pytest.mark.cuda
def test_on_the_gpu() -> None:
    rows = torch.randint(50, (2000, 2))
    index, known = RowIndex(2, "cuda"), {}
    assert index.insert(rows.cuda()).tolist() == numbers_by_dict(known, rows)
    assert index.find(rows).tolist() == [known[tuple(row)] for row in rows.tolist()]  # from host memory
    assert hash_words(rows.cuda()).cpu().equal(hash_words(rows))
