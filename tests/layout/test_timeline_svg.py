"""The timeline as SVG: valid, small, script-free, and drawn from the same plan as the picture of matplotlib."""

import re
import sys
from pathlib import Path
from xml.etree import ElementTree

import interpreters
import pytest
import torch

from flatroll.layout import TRAJ_IDS, timeline_svg

SPACE = "{http://www.w3.org/2000/svg}"


def tooltips(svg: str) -> list[str]:
    return [title.text for title in ElementTree.fromstring(svg).iter(f"{SPACE}title")]


def texts(svg: str) -> list[str]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SPACE}text")]


def test_each_run_tells_about_itself(batch):
    assert tooltips(timeline_svg(batch)) == [
        "rows 0..3 (4), trajectory 0, steps 0..3: episode begins, terminated",
        "rows 4..6 (3), trajectory 1, steps 0..2: episode begins, cut",
        "rows 7..9 (3), trajectory 100, steps 5..7: begins in mid-episode, truncated",
        "rows 10..13 (4), trajectory 101, steps 0..3: episode begins, cut",
    ]


def test_title_legend_and_row_numbers(batch):
    shown = texts(timeline_svg(batch))
    assert shown[0] == "14 rows in 4 runs"
    assert shown[1:6] == [
        "episode begins (3)",
        "begins in mid-episode (1)",
        "terminated (1)",
        "truncated (1)",
        "cut (2)",
    ]
    assert shown[6:10] == ["0", "4", "7", "10"]
    assert shown[-1] == "step of the episode"
    assert texts(timeline_svg(batch, title="a < b & c"))[0] == "a < b & c"
    assert texts(timeline_svg(batch, max_runs=2))[0] == "14 rows in 4 runs, the first 2 shown"


def test_marks_over_ribbons_do_not_take_the_colour_of_the_page(batch):
    """On a dark page they would be light on a light ribbon."""
    marks = [line for line in timeline_svg(batch).splitlines() if 'fill="none"' in line or "#333" in line]
    rings = [line for line in marks if "a3.5 3.5" in line or "l6 4l-6 4z" in line]
    assert len(rings) == 4 and all('fill="#fff" stroke="#333"' in line for line in rings)  # and in the legend


def test_the_scale_stands_in_one_line(batch):
    batch["value"] = torch.arange(14.0) / 7
    svg = timeline_svg(batch, color_by="value")
    heights = {
        text.get("y")
        for text in ElementTree.fromstring(svg).iter(f"{SPACE}text")
        if text.text in ("value 0", "1.857")
    }
    assert heights == {"17"}


def test_4096_rows_are_small(make):
    lengths = [10 + (7 * k) % 23 for k in range(196)]
    batch = make([(0, k, 0, length, "terminated") for k, length in enumerate(lengths)])[:4096]
    assert len(batch) == 4096
    svg = timeline_svg(batch)
    assert len(svg) < 60_000
    assert "<script" not in svg and "<style" not in svg
    # a run that is broken across lines is one entry with several strokes
    broken = [path for path in re.findall(r'<path d="([^"]+)"><title>', svg) if path.count("M") > 1]
    assert broken and len(tooltips(svg)) == len(set(tooltips(svg)))
    batch["value"] = torch.arange(4096.0) % 50
    assert len(timeline_svg(batch, color_by="value")) < 120_000


def test_every_row_has_the_shade_of_its_value(batch):
    batch["value"] = torch.tensor([0.0, 0, 8, 8, 8, 8, 0, 0, 0, 0, float("nan"), 8, 8, 8])
    svg = timeline_svg(batch, color_by="value")
    drawn = dict(re.findall(r'<path d="([^"]+)" stroke="(#31557f|#f2df3b)"', svg))
    assert sorted(drawn.values()) == ["#31557f", "#f2df3b"]
    # low: rows 0..1, 6, 7..9 and the NaN; high: 2..3, 4..5, 11..13; steps 0..7 over 830 pixels
    low, high = sorted(drawn, key=drawn.get)
    assert low.startswith("M58 ") and (low.count("M"), high.count("M")) == (4, 3)
    assert "value 0" in texts(svg) and "8" in texts(svg)
    by_id = timeline_svg(batch, color_by=TRAJ_IDS)
    assert {c for c in ("#6fa8d6", "#dfa94e", "#6db48e", "#cf87ad") if c in by_id} == {
        "#6fa8d6",
        "#dfa94e",
        "#6db48e",
        "#cf87ad",
    }


def test_a_column_of_infinite_and_missing_values_is_drawn(batch):
    batch["value"] = torch.full((14,), float("nan"))
    assert len(tooltips(timeline_svg(batch, color_by="value"))) == 4
    batch["value"][3] = float("inf")
    assert len(tooltips(timeline_svg(batch, color_by="value"))) == 4


def test_padding_is_left_out_and_rows_keep_their_numbers(batch):
    batch["collector", "mask"] = torch.tensor([True] * 3 + [False] + [True] * 10)
    assert tooltips(timeline_svg(batch))[1].startswith("rows 4..6 (3)")


def test_without_ids_and_steps(batch):
    svg = timeline_svg(batch.select("is_init", ("next", "done")))
    assert tooltips(svg)[0] == "rows 0..3 (4): episode begins, truncated"
    assert texts(svg)[-1] == "row within the run"


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"max_runs": 0}, ValueError, "max_runs must be an integer of at least 1, got 0"),
        ({"color_by": "nothing"}, KeyError, "no entry 'nothing'"),
        ({"color_by": "observation"}, ValueError, "one value per row"),
    ],
)
def test_bad_arguments(batch, arguments, error, text):
    with pytest.raises(error, match=text):
        timeline_svg(batch, **arguments)
    with pytest.raises(ValueError, match="no rows"):
        timeline_svg(batch[:0])


def test_notebooks_show_the_picture_and_terminals_a_line(batch):
    class Printer:
        def text(self, text):
            self.said = text

    svg, printer = timeline_svg(batch), Printer()
    svg._repr_pretty_(printer, False)
    assert svg._repr_html_() == svg and isinstance(svg, str)
    assert re.fullmatch(r"<a timeline, [\d,]+ characters of SVG>", printer.said)


def test_no_package_is_needed():
    program = (
        "import sys; sys.modules['matplotlib'] = None\n"
        "import torch; from tensordict import TensorDict; from flatroll.layout import timeline_svg\n"
        "print(timeline_svg(TensorDict({'next': {'done': torch.tensor([False, True])}}, [2]))[:4])"
    )
    source = str(Path(__file__).parents[2] / "src")
    done = interpreters.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {source!r})\n{program}"],
        kind=interpreters.OfLibraries,
    )
    assert done.stdout.strip() == "<svg", done.stderr
