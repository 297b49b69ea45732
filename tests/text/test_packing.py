"""Plans of passes: each text once, at a cost that is never above that of a padded batch."""

import importlib.util
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.peers import trl_grpo
from flatroll.text import packing
from flatroll.text.packing import Batch, Costs, Unit, Wanted, fill, lay_out, plan

COSTS = Costs(token=1000.0, pair=1.0, output=300.0, call=100.0)
#: A prompt's length, and for each answer how many tokens of the text are read, from which one on.
GROUPS = st.lists(
    st.tuples(
        st.integers(0, 20),
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=6),
    ),
    min_size=1,
    max_size=6,
)


def make(groups: list[tuple[int, list[tuple[int, int]]]]) -> Wanted:
    """Texts laid out as `Sequences` stores them: a prompt, then what follows it in each text."""
    wanted = Wanted([], [], [], [], [])
    place = 0
    for prompt, texts in groups:
        head = place
        place += prompt
        for one, two in texts:
            wanted.head.append(head)
            wanted.shared.append(prompt)
            wanted.start.append(place)
            wanted.first.append(min(one, two))
            wanted.length.append(max(one, two))
            place += max(max(one, two) - prompt, 0)
            if not prompt:
                head = place
    return wanted


def tokens_of(wanted: Wanted, text: int) -> list[int]:
    """Places of a text's tokens."""
    prompt = min(wanted.shared[text], wanted.length[text])
    behind = wanted.length[text] - prompt
    return [wanted.head[text] + i for i in range(prompt)] + [wanted.start[text] + i for i in range(behind)]


@given(
    groups=GROUPS, trees=st.booleans(), packs=st.booleans(), row_length=st.sampled_from([None, 0, 30, 10_000])
)
def test_each_text_is_in_one_row_and_sees_its_own_tokens(
    groups: Any, trees: bool, packs: bool, row_length: int | None
) -> None:
    wanted = make(groups)
    batches = plan(wanted, COSTS, trees=trees, packs=packs, row_length=row_length)
    seen = []
    for batch in batches:
        layout = lay_out(batch, wanted)
        columns = fill(batch, wanted)
        seen += layout.text
        assert trees or not batch.trees
        assert packs or all(len(row) == 1 for row in batch.rows)
        for text, row, head, own, shared in zip(*layout[:5], strict=True):
            length = wanted.length[text]
            where = [head + i if i < shared else own + i - shared for i in range(length)]
            assert columns.token[row, where].tolist() == tokens_of(wanted, text)
            assert columns.position[row, where].tolist() == list(range(length))
            assert layout.kept[row, where[wanted.first[text] - 1 :]].all()

            # What the last token sees: its segment and that before it, up to itself.
            last = where[-1]
            segments = {columns.segment[row, last], columns.before[row, last]}
            visible = np.isin(columns.segment[row, : last + 1], list(segments)).nonzero()[0]
            assert visible.tolist() == where
    assert sorted(seen) == list(range(len(wanted.length)))


@given(groups=GROUPS)
def test_no_plan_costs_more_than_padding(groups: Any) -> None:
    wanted = make(groups)
    units = [Unit(length, 0, [text]) for text, length in enumerate(wanted.length)]
    padded = COSTS.of_batch(Batch([[unit] for unit in units], max(wanted.length)), wanted)
    best = plan(wanted, COSTS, trees=False, packs=True)
    alike = min(wanted.length) * 1.25 >= max(wanted.length)
    assert alike or sum(COSTS.of_batch(batch, wanted) for batch in best) <= padded


def test_a_short_prompt_is_run_for_each_answer() -> None:
    """A row of all answers would cost the square of its length."""
    costs = Costs(token=1000.0, pair=10.0, output=0.0, call=0.0)
    short = make([(2, [(60, 60)] * 8)])
    assert all(batch.plain for batch in plan(short, costs, trees=True, packs=False))
    long = make([(200, [(230, 230)] * 8)])
    assert any(batch.trees for batch in plan(long, costs, trees=True, packs=False))


def test_the_comparison_says_that_its_peer_is_absent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert trl_grpo.main([]) == 0
    assert "skipped: trl is not installed" in capsys.readouterr().out


@pytest.mark.parametrize("row_length", [None, 10_000])
def test_masks_are_capped(monkeypatch: pytest.MonkeyPatch, row_length: int | None) -> None:
    """Also where all rows are one batch, and where one prompt has many answers."""
    cap = 300**2
    monkeypatch.setattr(packing, "MASK_ENTRIES", cap)
    costs = Costs(token=1e6, pair=1.0, output=0.0, call=1e9)
    for groups in ([(100, [(110, 110)] * 8)] * 12, [(100, [(130, 130)] * 100)], [(290, [(310, 310)] * 9)]):
        wanted = make(groups)
        batches = plan(wanted, costs, trees=True, packs=True, row_length=row_length)
        masks = [batch for batch in batches if batch.trees]
        assert all(len(batch.rows) * batch.width**2 <= cap for batch in masks)
        assert masks or groups[0][0] == 290
        texts = sorted(text for batch in batches for text in lay_out(batch, wanted).text)
        assert texts == list(range(len(wanted.length)))


def test_a_row_length_of_0_shares_nothing() -> None:
    wanted = make([(200, [(230, 230)] * 8), (10, [(20, 20)] * 3)])
    assert all(batch.plain for batch in plan(wanted, COSTS, trees=True, packs=True, row_length=0))
