"""Which columns are copied together, and that they come and go unchanged."""

from typing import Any

import pytest
import torch

from flatroll.buffers.columns.column import After, TensorColumn, plain_columns
from flatroll.kernels.rows import gather as block


class Doubled(TensorColumn):
    """A column in another form."""

    def write(self, slot: int, values: torch.Tensor, after: After | None = None) -> None:
        super().write(slot, 2 * values, after)

    def take(self, slots: torch.Tensor) -> torch.Tensor:
        return super().take(slots) / 2


def columns(rows: int) -> dict[Any, TensorColumn]:
    return {
        "x": TensorColumn(torch.zeros(rows)),
        ("next", "x"): TensorColumn(torch.zeros(rows, 3)),
        "doubled": Doubled(torch.zeros(rows)),
        "apart": TensorColumn(torch.zeros(3, rows).T),
    }


def test_rows_go_round_the_end_and_come_back() -> None:
    there = columns(5)
    plain = plain_columns(there)
    values: Any = {key: torch.rand(3, *column.shape) for key, column in there.items()}
    assert plain.write(4, values, 3, 5) == ("x", ("next", "x"))
    taken = plain.take(torch.tensor([4, 0, 1]))
    assert list(taken) == ["x", ("next", "x")]
    assert all(torch.equal(taken[key], values[key]) for key in taken)
    assert torch.equal(there["x"].data[2:4], torch.zeros(2))
    assert not there["doubled"].data.any() and not there["apart"].data.any()
    assert list(plain.take(torch.tensor([0]), ["doubled", ("next", "x"), "none"])) == [("next", "x")]
    assert plain.take(torch.tensor([0]), ["doubled"]) == {}


def test_rows_that_follow_are_read_with_the_others() -> None:
    there: Any = {"x": TensorColumn(torch.rand(5, 2)), "y": TensorColumn(torch.arange(5))}
    plain, pool = plain_columns(there, {"x": ("next", "x")}), [torch.rand(3, 2)]
    slots, follow = torch.tensor([3, 4, 1, 2]), torch.tensor([4, 0, 2, -1])
    taken: Any = plain.take_all(slots, follow, torch.tensor([[3], [2]]), pool)
    assert list(taken) == ["x", "y", ("next", "x")] and taken["y"].tolist() == slots.tolist()
    assert torch.equal(taken["x"], there["x"].data[slots])
    assert torch.equal(taken["next", "x"], torch.cat([there["x"].data[[4, 0, 2]], pool[0][2:]]))
    no_patch = torch.zeros(2, 0, dtype=torch.int64)
    assert torch.equal(plain.take_all(slots, follow, no_patch, pool)["next", "x"][3], there["x"].data[0])
    for wrong in ((slots + 2, follow, no_patch), (slots, follow + 1, no_patch)):
        with pytest.raises(IndexError, match="slot 5 is out of range: there are 5 slots"):
            plain.take_all(*wrong, pool)
    with pytest.raises(IndexError, match="out of range"):
        plain.take_all(slots, follow, torch.tensor([[3], [3]]), pool)
    assert (
        plain_columns({**there, "z": Doubled(torch.zeros(5))}, {"x": "later"}).take_all(
            slots, *[slots] * 2, pool
        )
        == {}
    )


def test_large_batches_and_compact_samples_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "HUGE_FROM", 32)
    plain = plain_columns({"x": TensorColumn(torch.zeros(20))})
    assert plain.write(0, {"x": torch.ones(9)}, 9, 20) == () and plain.write(0, {"x": torch.ones(8)}, 8, 20)
    assert torch.equal(plain.take(torch.arange(9))["x"], torch.tensor([1.0] * 8 + [0.0]))
    both = plain_columns({"x": TensorColumn(torch.zeros(20))}, {"x": "later"})
    no_patch, pool = torch.zeros(2, 0, dtype=torch.int64), [torch.zeros(1)]
    assert both.take_all(torch.arange(5), torch.arange(5), no_patch, pool) == {}
    assert list(both.take_all(torch.arange(4), torch.arange(4), no_patch, pool)) == ["x", "later"]


def test_a_batch_that_is_just_these_columns_is_found_and_written() -> None:
    there = {"x": TensorColumn(torch.zeros(5)), "y": TensorColumn(torch.zeros(5, 3))}
    plain = plain_columns(there)  # type: ignore[arg-type]
    rows: Any = {"x": torch.rand(3).requires_grad_(), "y": torch.rand(3, 3)}
    source = plain.find(rows, 3)
    assert source is not None and plain.write_found(4, source, 3)
    assert torch.equal(there["x"].data[[4, 0, 1]], rows["x"]) and torch.equal(
        there["y"].data[[4, 0, 1]], rows["y"]
    )
    assert not there["x"].data[2:4].any()
    for slot, count in ((5, 1), (-1, 1), (0, 6)):
        with pytest.raises(IndexError, match="do not fit"):
            plain.write_found(slot, source, count)


@pytest.mark.parametrize(
    "other",
    [
        torch.rand(3, 4),
        torch.rand(2, 3),
        torch.rand(3, 3).double(),
        torch.rand(3, 3).T,
        torch.rand(3, 3).to_sparse(),
        torch.rand(3, 3, device="meta"),
        torch._neg_view(torch.rand(3, 3)),
        None,
    ],
)
def test_what_is_not_plain_numbers_of_the_same_form_is_not_found(other: torch.Tensor | None) -> None:
    columns = {"x": TensorColumn(torch.zeros(5)), "y": TensorColumn(torch.zeros(5, 3))}
    rows = {"x": torch.rand(3)} | ({} if other is None else {"y": other})
    assert plain_columns(columns).find(rows, 3) is None  # type: ignore[arg-type]
