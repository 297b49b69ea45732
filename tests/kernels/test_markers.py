"""The compiled boundary rule is the rule of the layout; the compiled marks are those in torch."""

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch import Tensor

from flatroll.kernels.rows.run_marks import fragments
from flatroll.kernels.slices.drawing import mark
from flatroll.layout import run_ends


@examples(150)
@given(data=st.data())
def test_pieces_end_where_runs_end_and_where_they_are_cut(data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 12))

    def flags() -> Tensor:
        return torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))

    ids = torch.tensor(data.draw(st.lists(st.integers(0, 2), min_size=rows, max_size=rows)))
    present = data.draw(st.sets(st.sampled_from(["done", "init", "ids"]), min_size=1))
    columns = {"done": flags(), "init": flags(), "ids": ids, "mask": flags(), "cuts": flags()}
    present |= data.draw(st.sets(st.sampled_from(["mask", "cuts", "repeats"])))
    step = torch.arange(100, 100 + rows)
    keys = {"done": ("next", "done"), "init": "is_init", "ids": ("collector", "traj_ids")}
    keys["mask"] = ("collector", "mask")
    batch = TensorDict({keys[name]: columns[name] for name in present & keys.keys()}, [rows])
    ends = run_ends(batch)
    cut = ends | columns["cuts"] if "cuts" in present else ends
    # next observations: those of the row after, but for the fresh rows in one of the two entries
    fresh = flags()
    now = torch.arange(rows, dtype=torch.uint8), torch.arange(2.0 * rows).reshape(rows, 2)
    later = tuple(observation.roll(-1, 0) for observation in now)
    later[data.draw(st.integers(0, 1))][fresh] += 1
    if "repeats" in present:
        cut = cut | fresh
    pairs = zip(now, later, strict=True) if "repeats" in present else ()
    compared = [(a.data_ptr(), b.data_ptr(), a[0].nbytes) for a, b in pairs]
    cut[-1] = True

    address = {name: column.data_ptr() if name in present else 0 for name, column in columns.items()}
    address["step"] = step.data_ptr()
    whole, marks = np.empty((5, rows), np.int64), np.empty((3, rows), np.bool_)
    count = fragments(
        rows,
        tuple(address[name] for name in ("done", "init", "ids", "step", "mask", "cuts")),
        tuple(np.array(compared, np.int64).reshape(-1, 3).T.copy()),
        True,
        whole,
        marks,
    )
    lasts = cut.nonzero()[:, 0].tolist()
    firsts = [0, *(i + 1 for i in lasts[:-1])]
    assert whole[1, :count].tolist() == lasts
    assert whole[0, :count].tolist() == firsts
    if "ids" in present:
        assert whole[2, :count].tolist() == ids[firsts].tolist()
    assert whole[3, :count].tolist() == step[firsts].tolist()
    assert whole[4, :count].tolist() == step[lasts].tolist()
    assert marks[0, :count].tolist() == [i > 0 and not bool(ends[i - 1]) for i in firsts]
    assert marks[1, :count].tolist() == ["init" in present and bool(columns["init"][i]) for i in firsts]
    assert marks[2, :count].tolist() == ["done" in present and bool(columns["done"][i]) for i in lasts]


@pytest.mark.parametrize("in_order", [True, False])
def test_step_counts_that_do_not_go_up_by_one(in_order: bool) -> None:
    #                    a run,   a done row, is_init,   padding,   a row missing
    step = torch.tensor([4, 5, 6, 9, 10, 3, 4, 0, 0, 0, 20, 22])
    done, init, mask = (torch.zeros(12, dtype=torch.bool) for _ in range(3))
    done[2], init[5], mask[:] = True, True, True
    mask[7:10] = False
    whole, marks = np.empty((5, 12), np.int64), np.empty((3, 12), np.bool_)
    markers = done.data_ptr(), init.data_ptr(), 0, step.data_ptr(), mask.data_ptr(), 0
    pairs = tuple(np.empty((3, 0), np.int64))
    count = fragments(12, markers, pairs, in_order, whole, marks)
    assert count == (-11 if in_order else 5)
    step[11] = 21
    assert fragments(12, markers, pairs, in_order, whole, marks) == 5


def test_marks_at_both_ends_of_slices() -> None:
    init, done, truncated = (torch.zeros(6, dtype=torch.bool) for _ in range(3))
    terminated = torch.tensor([False, False, True, False, False, False])
    firsts, lasts = torch.tensor([0, 3]), torch.tensor([2, 5])
    columns = (init, done, terminated, truncated, firsts, lasts)
    mark(*(column.data_ptr() for column in columns), 2)
    assert init.tolist() == [True, False, False, True, False, False]
    assert done.tolist() == [False, False, True, False, False, True]
    assert truncated.tolist() == [False, False, False, False, False, True]
    mark(0, 0, 0, 0, firsts.data_ptr(), lasts.data_ptr(), 2)  # nothing is there to be marked
