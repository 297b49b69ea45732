import builtins

import matplotlib
import numpy as np
import pytest
import torch

from flatroll.layout import TRAJ_IDS, timeline
from flatroll.layout.inspect.timeline import MOST_LINES, find_runs, lay_out

matplotlib.use("Agg")


@pytest.fixture(autouse=True)
def close_figures():
    yield
    matplotlib.pyplot.close("all")


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_runs_get_a_lane_each(batch):
    ax = timeline(batch)
    assert ax.get_title("left") == "14 rows in 4 runs"
    assert legend(ax) == [
        "episode begins (3)",
        "begins in mid-episode (1)",
        "terminated (1)",
        "truncated (1)",
        "cut (2)",
    ]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "4", "7", "10"]
    assert ax.get_xlabel() == "step of the episode"
    ax.figure.canvas.draw()


def test_marks_stand_at_the_ends_of_their_runs(batch):
    ax = timeline(batch)
    offsets = {
        c.get_label().split(" (")[0]: c.get_offsets().tolist() for c in ax.collections if c.get_label()
    }
    assert offsets["terminated"] == [[4, 0]]
    assert offsets["cut"] == [[3, 1], [4, 3]]
    assert offsets["begins in mid-episode"] == [[5, 2]]


def test_many_runs_stand_end_to_end_in_lines(make):
    lengths = [1 + (7 * k) % 23 for k in range(200)]
    batch = make([(0, k, 0, length, "terminated") for k, length in enumerate(lengths)])
    ax = timeline(batch)
    assert ax.get_xlabel() == "row within the line"
    lanes = lay_out(find_runs(batch)[0])
    assert lanes.count <= MOST_LINES
    line = int((lanes.x + lanes.width).max())
    covered = np.zeros(lanes.count * line, int)  # every row is drawn once, at its place
    for lane, x, width in zip(lanes.lane, lanes.x, lanes.width, strict=True):
        covered[lane * line + x : lane * line + x + width] += 1
    assert covered[: len(batch)].tolist() == [1] * len(batch)
    assert not covered[len(batch) :].any()
    lasts = np.cumsum(lengths) - 1
    x, lane = lanes.at(np.arange(200), np.array(lengths) - 1)
    assert (lane * line + x - 0.5).tolist() == lasts.tolist()


def test_only_so_many_runs(batch):
    ax = timeline(batch, max_runs=2)
    assert ax.get_title("left") == "14 rows in 4 runs, the first 2 shown"
    assert legend(ax) == ["episode begins (2)", "terminated (1)", "cut (1)"]


def test_slices_far_into_long_episodes_are_drawn_by_row(make):
    ax = timeline(make([(0, k, 10_000 * k, 5, "truncated") for k in range(4)]))
    assert ax.get_xlabel() == "row within the run"


def test_given_axes_and_title(batch):
    figure, ax = matplotlib.pyplot.subplots()
    assert timeline(batch, ax, title="mine") is ax
    assert ax.get_title("left") == "mine"
    assert matplotlib.pyplot.get_fignums() == [figure.number]


@pytest.mark.parametrize("key", [("next", "reward"), TRAJ_IDS])
def test_colours(batch, make, key):
    for drawn in (batch, make([(0, k, 0, 3, "truncated") for k in range(60)])):
        ax = timeline(drawn, color_by=key)
        assert len(ax.figure.axes) == (2 if key != TRAJ_IDS else 1)  # a colour bar
        ax.figure.canvas.draw()


@pytest.mark.parametrize("keys", [["is_init"], [("next", "done")], [TRAJ_IDS], ["is_init", "step_count"]])
def test_any_subset_of_the_markers(batch, keys):
    timeline(batch.select(*keys)).figure.canvas.draw()


def test_padding_is_left_out_and_row_numbers_count_it(slices):
    padded = torch.cat([slices[:3], slices[:2], slices[3:]])
    padded["collector", "mask"] = (torch.arange(14) < 3) | (torch.arange(14) > 4)
    ax = timeline(padded)
    assert ax.get_title("left") == "12 rows in 4 runs"
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "5", "8", "11"]


def test_a_leading_dimension(batch):
    assert timeline(batch.reshape(2, 7)).get_title("left") == "14 rows in 4 runs"


def test_bad_input(batch):
    with pytest.raises(ValueError, match="max_runs must be an integer of at least 1, got 0"):
        timeline(batch, max_runs=0)
    with pytest.raises(ValueError, match="batch has no rows to draw"):
        timeline(batch[:0])
    with pytest.raises(
        ValueError, match=r"color_by='observation' must have one value per row, got shape \(14, 3\)"
    ):
        timeline(batch, color_by="observation")
    with pytest.raises(KeyError, match="'foo'"):
        timeline(batch, color_by="foo")
    with pytest.raises(KeyError, match="InitTracker"):
        timeline(batch.select("observation"))


def test_without_matplotlib(batch, monkeypatch):
    real = builtins.__import__

    def no_matplotlib(name, *args, **kwargs):
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_matplotlib)
    with pytest.raises(ImportError, match=r'pip install "flatroll\[plot\]"'):
        timeline(batch)
