import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.export import to_numpy
from flatroll.layout import audit, describe, explain, timeline_svg


def says(batch, i, **kwargs):
    return explain(batch, i, **kwargs).splitlines()


@pytest.mark.parametrize("look", [describe, lambda rows: explain(rows, 0), audit, timeline_svg, to_numpy])
def test_a_buffer_is_no_batch_and_the_error_says_where_its_rows_are(look):
    buffer = ReplayBuffer(storage=LazyTensorStorage(4))
    for no_batch in (buffer, SimpleNamespace(observations=torch.zeros(3, 4))):
        with pytest.raises(
            TypeError, match=r"batch must be a tensordict of rows, got .*the rows of a buffer are b"
        ):
            look(no_batch)


def test_every_kind_of_row_in_a_collected_batch(batch):
    own = "Its next observation is in its own column ('next', 'observation')"
    assert says(batch, 0) == [
        "Row 0 of 14 (trajectory 0, step 0): the first of the 4 rows 0..3, which are one run.",
        "It starts the run: an episode begins here (first row of the batch).",
        "It is inside the run: returns and advantages continue to row 1.",
        f"{own}, a copy of the observation of row 1.",
    ]
    assert says(batch, 3)[1:] == [
        "It ends the run: the env terminated the episode here.",
        "The value after it is 0: nothing is bootstrapped.",
        f"{own}.",
    ]
    assert says(batch, 4)[1] == (
        "It starts the run: an episode begins here "
        "(row 3 is done, row 4 is is_init, the trajectory id changes from 0 to 1)."
    )
    assert (
        says(batch, 5)[0] == "Row 5 of 14 (trajectory 1, step 1): one of the 3 rows 4..6, which are one run."
    )
    assert says(batch, 6)[1:3] == [
        "It ends the run: cut here (the trajectory id changes from 1 to 100), the episode went on.",
        "The value after it is bootstrapped, the trace stops.",
    ]
    assert says(batch, 7)[1] == (
        "It starts the run: it continues from step 4, which is not in this batch: its head was cut off "
        "(the trajectory id changes from 1 to 100)."
    )
    assert says(batch, 9)[1:3] == [
        "It ends the run: truncated here (a time limit, or the end of a sampled slice).",
        "The value after it is bootstrapped, the trace stops.",
    ]
    assert "cut here (last row of the batch)" in explain(batch, 13)
    assert says(batch, -1) == says(batch, 13)


def test_all_entries_of_a_dict_observation_are_named(batch):
    column = batch["observation"]
    after = batch["next"].exclude("observation").update({"goal": column, "lidar": column})
    rows = batch.exclude("observation", "next").update({"goal": column, "lidar": column, "next": after})
    assert (
        says(rows, 3)[-1]
        == "Its next observation is in columns of its own, ('next', 'goal'), ('next', 'lidar')."
    )


def test_slices(slices):
    assert says(slices, 3)[1] == (
        "It starts the run: a slice begins here, in mid-episode at step 5 (row 2 is done, row 3 is is_init)."
    )
    assert says(slices, 5)[1] == "It ends the run: truncated here (the end of a slice, or a time limit)."
    assert says(slices, 11)[1] == (
        "It ends the run: the env terminated the episode here, and truncated it on the same step: terminated wins."
    )


def test_less_than_all_markers(batch):
    assert says(batch.select("is_init"), 4)[1] == (
        "It starts the run: an episode or a slice begins here (row 4 is is_init)."
    )
    assert says(batch.select("is_init"), 3)[1:3] == [
        "It ends the run (row 4 is is_init); no column says whether the episode ended here.",
        "Whether the value after it is bootstrapped cannot be told.",
    ]
    done = batch.select(("next", "done"))
    assert says(done, 3)[1] == "It ends the run: done, and no column says whether it terminated."
    assert says(done, 4)[1] == "It starts the run: an episode or a window of one begins here (row 3 is done)."
    done["next", "terminated"] = torch.zeros(14, 1, dtype=torch.bool)
    assert says(done, 3)[1:3] == [
        "It ends the run: done, but not terminated.",
        "The value after it is bootstrapped, the trace stops.",
    ]
    ids = batch.select(("collector", "traj_ids"), "is_init")
    assert "its head was cut off" in says(ids, 7)[1]
    assert says(batch[4:5], 0)[0] == "Row 0 of 1 (trajectory 1, step 0): a run of its own."


def test_where_the_next_observation_is(batch):
    compact = batch.exclude(("next", "observation"))
    assert says(compact, 4)[-1] == "Its next observation is the observation of row 5."
    assert says(compact, 6)[-1] == "Its next observation is unknown: no column, no row and no final holds it."
    rows = torch.tensor([3, 6, 13])
    final = batch[rows].select(("next", "observation")).set("row", rows)
    assert says(compact, 6, final=final)[-1] == "Its next observation is entry 1 of final."
    assert (
        says(compact, 9, final=final)[-1]
        == "Its next observation is unknown: final has no entry for this row."
    )
    assert says(compact, 4, final=final)[-1] == "Its next observation is the observation of row 5."
    compact["state_value"] = compact["next", "state_value"] = torch.zeros(14, 1)  # as GAE writes them
    assert says(compact, 4)[-1] == "Its next observation is the observation of row 5."
    compact["next", "delta", "observation"] = torch.ones(14, 3, dtype=torch.float16)
    assert says(compact, 6)[-1] == (
        "Its next observation is its observation plus the float16 difference in ('next', 'delta')."
    )
    batch["next", "observation"][3] = torch.nan
    assert says(batch, 3)[-1] == "Its next observation is unknown: ('next', 'observation') holds NaN here."
    batch["collector", "next_known"] = torch.arange(14) != 9
    assert says(batch, 9)[-1] == (
        "Its next observation is unknown: the env hides it (('collector', 'next_known') is False)."
    )


def test_padding(slices):
    slices["collector", "mask"] = torch.arange(12) < 11
    assert "padding): a run of its own." in says(slices, 11)[0]
    assert "padding begins or ends" in says(slices, 11)[1]


@pytest.mark.parametrize("i", [14, -15, 99])
def test_there_is_no_such_row(batch, i):
    with pytest.raises(IndexError, match=rf"i={i} is not a row: the batch has 14 rows, 0\.\.13"):
        explain(batch, i)


def test_bad_input(batch):
    with pytest.raises(IndexError, match="i=0 is not a row: the batch has 0 rows"):
        explain(batch[:0], 0)
    with pytest.raises(ValueError, match=r"must have batch size \[N\], got \[2, 7\]"):
        explain(batch.reshape(2, 7), 0)
    with pytest.raises(KeyError, match="InitTracker"):
        explain(batch.select("observation"), 0)


def test_describe(batch):
    assert (
        describe(batch)
        == """\
14 rows, 896 bytes (64 a row)
4 runs: 1 terminated, 1 truncated, 2 cut
run length: 3 shortest, 3.5 median, 4 longest

column              shape  dtype    bytes/row  bytes
action              []     int64            8    112
collector.traj_ids  []     int64            8    112
is_init             [1]    bool             1     14
next.done           [1]    bool             1     14
next.observation    [3]    float32         12    168
next.reward         [1]    float32          4     56
next.step_count     [1]    int64            8    112
next.terminated     [1]    bool             1     14
next.truncated      [1]    bool             1     14
observation         [3]    float32         12    168
step_count          [1]    int64            8    112"""
    )


def test_describe_counts_real_rows_and_both_flags_once(slices):
    slices["collector", "mask"] = torch.arange(12) != 2
    assert describe(slices).splitlines()[1:3] == [
        "4 runs: 1 terminated, 2 truncated, 1 cut",
        "run length: 2 shortest, 3 median, 3 longest",
    ]


def test_describe_what_is_hardly_a_batch(batch):
    assert describe(batch.select("observation")).splitlines()[:2] == [
        "14 rows, 168 bytes (12 a row)",
        "no boundary marker, so no runs",
    ]
    assert describe(batch[:0]).splitlines()[:2] == ["0 rows, 0 bytes (0 a row)", "0 runs"]
    assert describe(batch[:1]).splitlines()[1] == "1 run: 0 terminated, 0 truncated, 1 cut"
    assert describe(batch.reshape(2, 7)).splitlines()[1].startswith("4 runs:")


@pytest.mark.parametrize("tell", [lambda batch: explain(batch, 3), describe], ids=["explain", "describe"])
def test_a_notebook_shows_lines_and_not_a_quoted_string(batch, tell):
    shown = []
    words = tell(batch)
    words._repr_pretty_(SimpleNamespace(text=shown.append), False)
    assert shown == [str(words)] and isinstance(words, str) and words.count("\n") > 1
    pretty = pytest.importorskip("IPython.lib.pretty").pretty
    assert pretty(words) == str(words) == "\n".join(words.splitlines())


def test_notebooks_show_the_lines_and_the_table(batch, make):
    from flatroll.layout import describe

    assert explain(batch, 3)._repr_html_().startswith("<div>Row 3 of 14 (trajectory 0, step 3): the last of")
    page = describe(batch)._repr_html_()
    assert page.startswith("<div>14 rows, ") and page.count("<tr>") == 1 + len(list(batch.keys(True, True)))
    assert '<td style="text-align:left">next.reward</td>' in page
    odd = make([(0, 0, 0, 2, "terminated")])
    odd["a<b"] = odd["action"]
    assert "a&lt;b" in describe(odd)._repr_html_() and "a<b" in describe(odd)


def test_texts_are_strings_through_pickle_and_copy(batch):
    text = explain(batch, 3)
    again = pickle.loads(pickle.dumps(text))
    assert isinstance(again, str) and again == text and again._repr_html_() == text._repr_html_()
    assert copy.deepcopy(text) == text


def test_entries_that_are_no_tensors_are_listed():
    text = describe(TensorDict({"task": ["x", "y"], "a": torch.zeros(2)}, [2]))
    assert [line.split() for line in text.splitlines()[-2:]] == [
        ["a", "[]", "float32", "4", "8"],
        ["task", "no", "tensor"],
    ]
