import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import NonTensorStack, TensorDict

from flatroll.layout import audit, join, mark_cuts, run_ends, split_trajectories

MASK = ("collector", "mask")


def ids_batch(ids, **more) -> TensorDict:
    ids = torch.as_tensor(ids)
    return TensorDict(
        {"x": torch.arange(1, len(ids) + 1), "collector": {"traj_ids": ids}, **more}, [len(ids)]
    )


def test_padded_by_hand(batch):
    padded = split_trajectories(batch)
    assert padded.batch_size == (4, 4)
    assert padded[MASK].int().tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert padded["step_count"].squeeze(-1).tolist() == [
        [0, 1, 2, 3],
        [0, 1, 2, 0],
        [5, 6, 7, 0],
        [0, 1, 2, 3],
    ]
    assert padded["next", "observation"][1].tolist() == [[0, 1, 1], [0, 1, 2], [0, 1, 3], [0, 0, 0]]
    for key in batch.keys(True, True):
        assert padded[key].dtype == batch[key].dtype
        assert not padded[key][~padded[MASK]].any()


@pytest.mark.parametrize("ids", [[3], [3, 3, 3], [1, 1, 2, 2], [0, 1, 0], [0, 0, 1, 0, 0, 0]])
def test_the_schema_never_changes(ids):
    padded = split_trajectories(ids_batch(ids))
    assert set(padded.keys(True, True)) == {"x", ("collector", "traj_ids"), MASK}
    assert padded[MASK].dtype == torch.bool and padded[MASK].shape == padded.batch_size


def test_an_id_that_comes_back_is_a_run_of_its_own():
    padded = split_trajectories(ids_batch([0, 0, 1, 0]))
    assert padded["x"].tolist() == [[1, 2], [3, 0], [4, 0]]


def test_slices_of_one_trajectory_side_by_side(slices):
    padded = split_trajectories(slices)
    assert padded["step_count"].squeeze(-1).tolist() == [[2, 3, 4], [5, 6, 7], [2, 3, 4], [0, 1, 2]]


def test_leading_dims_are_never_joined():
    batch = ids_batch([7] * 12).reshape(2, 2, 3)
    padded = split_trajectories(batch)
    assert padded["x"].tolist() == [[1, 2, 3], [4, 5, 6], [7, 8, 9], [10, 11, 12]]
    assert join(padded)["x"].tolist() == list(range(1, 13))


@pytest.mark.parametrize("lead", [[], [3], [2, 2]])
@pytest.mark.parametrize("shape", ["[*B, T]", "[*B, T, 1]"])
@pytest.mark.parametrize("by", ["ids", "ids at the root", "done", "is_init"])
def test_every_shape_of_mask_and_marker_against_a_loop(lead, shape, by):
    """Runs of float64 rows, listed by a loop over the rows of each leading element."""
    generator = torch.Generator().manual_seed(len(lead))
    time = 9
    real = torch.arange(time) < torch.randint(1, time + 1, lead, generator=generator).unsqueeze(-1)
    starts = torch.rand([*lead, time], generator=generator) < 0.3
    starts[..., 0] = True
    ends = torch.cat([starts[..., 1:], torch.zeros([*lead, 1], dtype=torch.bool)], -1)
    markers = {
        "ids": {"collector": {"traj_ids": starts.cumsum(-1)}},
        "ids at the root": {"traj_ids": starts.cumsum(-1)},
        "done": {"next": {"done": ends}},
        "is_init": {"is_init": starts},
    }[by]
    x = torch.randn([*lead, time, 2], generator=generator, dtype=torch.float64)
    batch = TensorDict({"x": x, **markers}, [*lead, time])
    if shape.endswith("1]"):  # flags and ids with a last dimension of 1, too
        batch = TensorDict(
            {key: c if key == "x" else c.unsqueeze(-1) for key, c in batch.items(True, True)}, [*lead, time]
        )
    batch[MASK] = real.unsqueeze(-1) if shape.endswith("1]") else real
    runs = []
    for b in range(starts.reshape(-1, time).shape[0]):
        for t in range(time):
            if not real.reshape(-1, time)[b, t]:
                continue
            row = x.reshape(-1, time, 2)[b, t]
            if starts.reshape(-1, time)[b, t]:
                runs.append([])
            runs[-1].append(row)
    padded = split_trajectories(batch)
    assert padded[MASK].sum(-1).tolist() == [len(run) for run in runs]
    for row, run in enumerate(runs):
        assert torch.equal(padded["x"][row, : len(run)], torch.stack(run))
        assert not padded["x"][row, len(run) :].any()
    nested = split_trajectories(batch, as_nested=True)
    assert [part["x"].tolist() for part in nested.unbind(0)] == [torch.stack(run).tolist() for run in runs]
    assert torch.equal(join(padded)["x"], torch.cat([torch.stack(run) for run in runs]))


def test_splitting_twice_changes_nothing(batch):
    padded = split_trajectories(batch)
    again = split_trajectories(padded)
    assert (padded == again).all() and again.batch_size == padded.batch_size


def test_by_done_alone_and_under_other_names():
    done = torch.tensor([0, 1, 0, 0]).bool()
    batch = TensorDict({"x": torch.arange(1, 5), "next": {"done": done, "stop": ~done}}, [4])
    assert split_trajectories(batch)["x"].tolist() == [[1, 2], [3, 4]]
    assert split_trajectories(batch, done_key="stop")["x"].tolist() == [[1, 0], [2, 3], [4, 0]]
    assert split_trajectories(batch, done_key=("next", "stop")).batch_size == (3, 2)


def test_prefix_and_trajectory_key_put_the_mask_beside_the_ids():
    batch = TensorDict({"x": torch.arange(1, 4), "data": {"traj_ids": torch.tensor([0, 0, 1])}}, [3])
    for names in ({"prefix": "data"}, {"trajectory_key": ("data", "traj_ids")}):
        padded = split_trajectories(batch, **names)
        assert padded["x"].tolist() == [[1, 2], [3, 0]]
        assert join(padded, mask_key=("data", "mask"))["x"].tolist() == [1, 2, 3]
    batch["episode"] = torch.tensor([0, 1, 1])
    padded = split_trajectories(batch, trajectory_key="episode")
    assert padded[MASK].tolist() == [[True, False], [True, True]]


def test_a_prefix_without_ids_says_where_the_mask_goes(batch):
    padded = split_trajectories(batch.exclude("collector"), prefix="data")
    assert padded["data", "mask"].sum(-1).tolist() == [4, 6, 4]  # nothing but ids tells the cut at row 6


@pytest.mark.parametrize("layout", [True, torch.jagged])
def test_jagged(batch, layout):
    nested = split_trajectories(batch, as_nested=layout)
    assert nested.batch_size == (4,)
    assert nested["observation"].layout is torch.jagged
    assert nested["observation"].values().data_ptr() == batch["observation"].data_ptr()
    padded = split_trajectories(batch)
    for key in batch.keys(True, True):
        assert torch.equal(nested[key].to_padded_tensor(0), padded[key])
    assert [len(part["action"]) for part in nested.unbind(0)] == [4, 3, 3, 4]
    assert MASK not in nested.keys(True)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
def test_strided(batch):
    nested = split_trajectories(batch, as_nested=torch.strided)
    padded = split_trajectories(batch)
    for key in batch.keys(True, True):
        assert nested[key].layout is torch.strided and nested[key].is_nested
        assert torch.equal(nested[key].to_padded_tensor(0), padded[key])
    assert (join(nested) == batch).all()
    assert nested.batch_size == (4, -1)
    again = nested.to_padded_tensor(mask_key=MASK)  # as tensordict pads by itself
    assert again.batch_size == padded.batch_size and (again == padded).all()
    with pytest.raises(ValueError, match=r"cannot hold zero trajectories, use torch\.jagged"):
        split_trajectories(batch[:0], as_nested=torch.strided)


def test_one_trajectory_stays_nested():
    nested = split_trajectories(ids_batch([2, 2]), as_nested=True)
    assert nested["x"].is_nested and nested.batch_size == (1,)


@examples(100)
@given(data=st.data())
def test_join_undoes_split_bit_for_bit(data):
    ids = data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=20))
    n = len(ids)
    done = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))[:, None]
    is_init = torch.tensor(data.draw(st.lists(st.booleans(), min_size=n, max_size=n)))[:, None]
    bits = torch.randint(0, 2**32, (n, 3), generator=torch.Generator().manual_seed(n)).int()
    batch = ids_batch(
        ids, is_init=is_init, next={"done": done, "pixels": bits.view(torch.uint8).view(n, 2, 6)}
    )
    batch["observation"] = bits.view(torch.float32)  # any bits: NaNs with payloads among them
    for layout in (False, True):
        joined = join(split_trajectories(batch, as_nested=layout))
        assert set(joined.keys(True, True)) == set(batch.keys(True, True))
        assert joined.batch_size == batch.batch_size
        for key in batch.keys(True, True):
            assert torch.equal(joined[key].view(torch.uint8), batch[key].view(torch.uint8))
    lengths = run_ends(batch).nonzero().squeeze(-1).diff(prepend=torch.tensor([-1])).tolist()
    padded = split_trajectories(batch)
    assert padded[MASK].sum(-1).tolist() == lengths
    at = 0
    for row, length in enumerate(lengths):  # the slow loop
        assert padded["x"][row].tolist() == [*range(at + 1, at + length + 1), *[0] * (max(lengths) - length)]
        at += length
    assert (join(batch.split(lengths))["x"] == batch["x"]).all()


def test_two_thousand_trajectories_take_no_loop():
    calls = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal calls
            calls += 1
            return func(*args, **(kwargs or {}))

    counts = []
    for n in (20, 2000):
        calls = 0
        with Count():
            split_trajectories(ids_batch(torch.arange(5 * n) // 5))
        counts.append(calls)
    assert counts[0] == counts[1]


def test_no_rows():
    batch = ids_batch(torch.zeros(0, dtype=torch.int64))
    assert split_trajectories(batch).batch_size == (0, 0)
    assert join(split_trajectories(batch)).batch_size == (0,)
    assert join(split_trajectories(batch, as_nested=True)).batch_size == (0,)


def test_gradients_flow_through():
    batch = ids_batch([0, 0, 1])
    batch["w"] = torch.ones(3, requires_grad=True)
    split_trajectories(batch)["w"].square().sum().backward()
    assert batch["w"].grad.tolist() == [2.0, 2.0, 2.0]


def test_the_batch_is_left_as_it_was(batch):
    before = batch.clone()
    padded = split_trajectories(batch)
    padded["observation"] += 1
    assert (batch == before).all()


def test_bad_input(batch):
    with pytest.raises(
        TypeError, match=r"as_nested must be True, False, torch.jagged or torch.strided, got 'x'"
    ):
        split_trajectories(batch, as_nested="x")
    with pytest.raises(ValueError, match="pass prefix or trajectory_key, not both"):
        split_trajectories(batch, prefix="collector", trajectory_key="episode")
    with pytest.raises(KeyError, match="batch has no entry 'episode'"):
        split_trajectories(batch, trajectory_key="episode")
    with pytest.raises(KeyError, match="'next', 'stop'"):
        split_trajectories(batch, done_key="stop")
    with pytest.raises(KeyError, match="InitTracker"):
        split_trajectories(batch.select("observation"))
    batch["names"] = NonTensorStack(*"abcdefghijklmn")
    with pytest.raises(TypeError, match=r"batch\['names'\] is not a tensor .*\.exclude\('names'\)"):
        split_trajectories(batch)


def test_what_join_cannot_join(batch):
    with pytest.raises(KeyError, match="split_trajectories and SliceSampler"):
        join(batch)
    with pytest.raises(ValueError, match="at least one trajectory, got an empty sequence"):
        join([])
    with pytest.raises(ValueError, match=r"parts\[1\] must have batch size \[T\], got \[2, 7\]"):
        join([batch, batch.reshape(2, 7)])


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64])
def test_wide_unsigned_columns_are_padded_and_joined(dtype):
    wide = torch.tensor([[torch.iinfo(dtype).max], [1], [2], [3]], dtype=dtype)
    batch = ids_batch([4, 4, 9, 4], wide=wide)
    padded = split_trajectories(batch)
    assert padded["wide"].dtype == dtype
    assert padded["wide"][..., 0].tolist() == [[torch.iinfo(dtype).max, 1], [2, 0], [3, 0]]
    assert (join(padded) == batch).all()
    assert (join(split_trajectories(batch, as_nested=True)) == batch).all()
    with pytest.raises(TypeError, match=r"batch\['wide'\] is torch.uint\d+.*use as_nested=torch.jagged"):
        split_trajectories(batch, as_nested=torch.strided)


# --- marking cuts for others ---------------------------------------------------------------------------------


def test_cut_rows_are_marked_in_a_copy(batch):
    before = batch.clone()
    marked = mark_cuts(batch)
    assert all((batch[key] == before[key]).all() for key in before.keys(True, True))
    cut = run_ends(batch) & ~batch["next", "done"].squeeze(-1)
    assert cut.any()
    assert marked["next", "done"].squeeze(-1).tolist() == run_ends(batch).tolist()
    assert (marked["next", "truncated"] ^ batch["next", "truncated"]).squeeze(-1).tolist() == cut.tolist()
    for key in set(batch.keys(True, True)) - {("next", "done"), ("next", "truncated")}:
        assert marked[key] is batch[key]
    assert mark_cuts(marked)["next", "truncated"].tolist() == marked["next", "truncated"].tolist()


def test_a_reader_of_done_alone_then_sees_every_run(batch):
    """The markers of runs may go; the runs stay."""
    marked = mark_cuts(batch).select("x", ("next", "done"), strict=False)
    assert run_ends(marked).tolist() == run_ends(batch).tolist()
    assert not [finding for finding in audit(mark_cuts(batch)) if finding.severity == "error"]


def test_padding_is_not_marked():
    mask = torch.tensor([[True, True, False], [True, True, True]])
    flags = {
        "done": torch.zeros(2, 3, 1, dtype=torch.bool),
        "truncated": torch.zeros(2, 3, 1, dtype=torch.bool),
    }
    padded = TensorDict({"collector": {"mask": mask}, "next": flags}, [2, 3])
    marked = mark_cuts(padded)["next", "done"]
    assert marked.squeeze(-1).int().tolist() == [[0, 1, 0], [0, 0, 1]]


def test_cuts_cannot_be_marked_without_the_flags():
    with pytest.raises(KeyError, match="truncated"):
        mark_cuts(ids_batch([1, 1, 2], next={"done": torch.zeros(3, dtype=torch.bool)}))
