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
    later = plain.take_next(torch.tensor([4, 0]), torch.tensor([0, 1]), taken, ["x", "doubled"])
    assert list(later) == ["x"] and torch.equal(later["x"], values["x"][1:])


def test_a_large_batch_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block, "_MOST", 32)
    plain = plain_columns({"x": TensorColumn(torch.zeros(20))})
    assert plain.write(0, {"x": torch.ones(9)}, 9, 20) == () and plain.write(0, {"x": torch.ones(8)}, 8, 20)
    assert torch.equal(plain.take(torch.arange(9))["x"], torch.tensor([1.0] * 8 + [0.0]))
    assert plain.take_next(torch.arange(9), torch.arange(9), {}, ["x"]) == {}


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
