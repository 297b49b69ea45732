"""``final=`` is read in one place: what it holds, and what is wrong with it."""

import re
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.layout.final import check_final, read_final


def final_of(rows: Any, **entries: Any) -> TensorDict:
    return TensorDict({"row": rows, "next": entries}, [len(rows)])


def test_all_entries_or_those_asked_for() -> None:
    pos, speed = torch.ones(2, 3), torch.zeros(2)
    final = final_of(torch.tensor([1, 4]), agent={"pos": pos}, speed=speed)
    everything = read_final(final)
    assert list(everything.next) == [("agent", "pos"), "speed"]
    assert torch.equal(everything.next["agent", "pos"], pos)
    assert list(read_final(final, ["speed", "height"]).next) == ["speed"]
    columns = {("agent", "pos"): torch.zeros(5, 3), "speed": torch.zeros(5)}
    assert check_final(everything, columns, 5).tolist() == [1, 4]


@pytest.mark.parametrize(
    ("final", "error", "text"),
    [
        ({"row": 1}, TypeError, "final must be a tensordict, collector.final, got dict"),
        (
            TensorDict({"reward": torch.ones(1)}, [1]),
            ValueError,
            "final has an entry 'reward', expected only 'row' and ('next', <entry of",
        ),
        (
            TensorDict({"next": {"pos": torch.ones(1)}}, [1]),
            ValueError,
            'entry "row" of shape [K], got nothing',
        ),
        (final_of(torch.tensor([1.0]), pos=torch.ones(1)), ValueError, "got torch.float32 (1,)"),
        (final_of(torch.tensor([2, 1]), pos=torch.ones(2)), ValueError, "must ascend within the 3 rows"),
        (final_of(torch.tensor([3]), pos=torch.ones(1)), ValueError, "must ascend within the 3 rows"),
        (final_of(torch.tensor([1]), speed=torch.ones(1)), ValueError, "final[('next', 'speed')] must be"),
        (final_of(torch.tensor([1]), pos=torch.ones(1, 2)), ValueError, "is torch.float32 (2,) per row"),
        (final_of(torch.tensor([1]), pos=torch.ones(1).double()), ValueError, "is torch.float64 () per row"),
    ],
    ids=["dict", "reward", "no row", "float row", "order", "range", "unknown", "shape", "dtype"],
)
def test_what_is_wrong_is_named(final: Any, error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        check_final(read_final(final), {"pos": torch.zeros(3)}, 3)
