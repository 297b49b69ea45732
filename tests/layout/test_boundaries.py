from itertools import combinations

import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from torch.utils._python_dispatch import TorchDispatchMode

from flatroll.layout import DONE, IS_INIT, MASK, TRAJ_IDS, run_ends, run_starts

MARKERS = (IS_INIT, DONE, TRAJ_IDS)
SUBSETS = [set(keys) for k in (1, 2, 3) for keys in combinations(MARKERS, k)]


def loop_ends(columns: dict, length: int) -> list[bool]:
    """The rule of the contract, one row at a time."""
    ends = []
    for i in range(length):
        end = i == length - 1
        if DONE in columns:
            end |= columns[DONE][i]
        if IS_INIT in columns and i + 1 < length:
            end |= columns[IS_INIT][i + 1]
        for key in (TRAJ_IDS, MASK):
            if key in columns and i + 1 < length:
                end |= columns[key][i] != columns[key][i + 1]
        ends.append(bool(end))
    return ends


def test_the_table_of_the_contract():
    #                        done      init after          id changes       last
    batch = TensorDict(
        {
            "is_init": torch.tensor([1, 0, 1, 0, 1, 0, 0, 0]).bool(),
            "collector": {"traj_ids": torch.tensor([5, 5, 6, 6, 6, 6, 7, 7])},
            "next": {"done": torch.tensor([0, 1, 0, 0, 0, 0, 0, 0]).bool()},
        },
        [8],
    )
    assert run_ends(batch).int().tolist() == [0, 1, 0, 1, 0, 1, 0, 1]
    assert run_starts(batch).int().tolist() == [1, 0, 1, 0, 1, 0, 1, 0]


@examples(100)
@given(data=st.data())
def test_any_subset_of_the_markers_in_any_shape(data):
    lead = data.draw(st.sampled_from([(), (1,), (3,), (2, 2)]))
    length = data.draw(st.integers(1, 8))
    shape = (*lead, length)
    keys = data.draw(st.sampled_from(SUBSETS))
    masked = data.draw(st.booleans())
    size = int(torch.tensor(shape).prod())
    columns = {}
    for key in sorted(keys, key=str) + ([MASK] if masked else []):
        top = 3 if key == TRAJ_IDS else 1
        values = data.draw(st.lists(st.integers(0, top), min_size=size, max_size=size))
        column = torch.tensor(values).view(shape)
        columns[key] = column if key == TRAJ_IDS else column.bool()
    trailing = data.draw(st.booleans())
    batch = TensorDict(
        {key: column[..., None] if trailing else column for key, column in columns.items()}, shape
    )
    ends = run_ends(batch)
    assert ends.shape == shape and ends.dtype == torch.bool
    for row in torch.cartesian_prod(*(torch.arange(n) for n in lead)).view(-1, len(lead)) if lead else [()]:
        at = tuple(int(i) for i in row)
        wanted = loop_ends({key: column[at] for key, column in columns.items()}, length)
        assert ends[at].tolist() == wanted
        assert run_starts(batch)[at].tolist() == [True, *wanted[:-1]]


def test_the_markers_are_left_as_they_were():
    batch = TensorDict({DONE: torch.tensor([False, False])}, [2])
    run_ends(batch)
    assert batch[DONE].tolist() == [False, False]


def test_other_names():
    batch = TensorDict({"first": torch.tensor([True, False, True])}, [3])
    assert run_ends(batch, is_init_key="first").tolist() == [False, True, True]
    batch = TensorDict({"episode": torch.tensor([1, 1, 2])}, [3])
    assert run_ends(batch, traj_key="episode").tolist() == [False, True, True]
    batch = TensorDict({"stop": torch.tensor([True, False, False])}, [3])
    assert run_starts(batch, done_key="stop").tolist() == [True, True, False]


def test_padding_never_continues_a_run():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]]).bool()
    batch = TensorDict({DONE: torch.zeros(2, 3, dtype=torch.bool), MASK: mask}, [2, 3])
    assert run_ends(batch).int().tolist() == [[0, 1, 1], [0, 0, 1]]


def test_no_rows():
    batch = TensorDict({DONE: torch.zeros(0, dtype=torch.bool)}, [0])
    assert run_ends(batch).shape == run_starts(batch).shape == (0,)


def test_no_marker_is_an_error_that_names_a_wrapper():
    batch = TensorDict({MASK: torch.ones(3, dtype=torch.bool)}, [3])
    with pytest.raises(KeyError) as error:
        run_ends(batch)
    assert "InitTracker" in error.value.args[0]
    assert (
        "Any one of 'is_init', ('next', 'done'), ('collector', 'traj_ids') is enough" in error.value.args[0]
    )


def test_a_batch_without_a_batch_dimension():
    with pytest.raises(ValueError, match="at least one batch dimension"):
        run_ends(TensorDict({DONE: torch.tensor([True])}, []))


def test_int_markers_are_refused():
    with pytest.raises(TypeError, match=r"must be bool, got torch\.int64"):
        run_ends(TensorDict({DONE: torch.tensor([0, 1])}, [2]))


class _NoSync(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        assert not any(
            word in name for word in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero")
        )
        return func(*args, **(kwargs or {}))


def test_no_host_sync(batch):
    with _NoSync():
        run_starts(batch)
    meta = batch.to("meta")
    assert run_ends(meta).device.type == "meta"
