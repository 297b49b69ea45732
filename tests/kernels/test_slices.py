"""The kernels of the trajectory index, one at a time."""

from typing import Any

import numpy as np
import pytest

from flatroll.kernels.compiled import compiled
from flatroll.kernels.rows.records import CHAIN, ENTRY, FRAGMENT, STATE
from flatroll.kernels.slices import links, publishing

# Helpers have no entry point of their own for calls from Python.
step_back = compiled()(links.step_back)
entry = compiled()(publishing._entry)


@pytest.fixture
def interleaved() -> dict[str, Any]:
    """Chain 0 and chain 1 written in turn, one row at a time: 700 fragments each."""
    tables = {
        "state": np.zeros(1, STATE),
        "fragments": np.zeros(2048, FRAGMENT),
        "chains": np.zeros(64, CHAIN),
        "table": np.zeros(64, ENTRY),
    }
    none = np.zeros(0, np.int64)
    index = tables["state"], 1401, tables["fragments"], tables["chains"]
    first = np.zeros(1, np.int64)
    no = np.zeros(1, np.bool_)
    for i in range(1400):
        before = np.full(1, i % 2 if i >= 2 else -1)
        new = 1, first, first, no, np.full(1, i % 2), no, no, none, none
        publishing.publish(
            index, tables["table"], new, before, np.full(1, -1), none, none, np.zeros(1, np.int64)
        )
    return tables


def locate(tables: dict[str, Any], chain: int, offset: int) -> tuple[int, int]:
    """Fragment that holds ``offset``, and the links followed to it."""
    number, count = int(tables["chains"]["last"][chain]), 0
    while (back := step_back(tables["state"], tables["fragments"], number, offset)) != number:
        number, count = back, count + 1
    return number, count


def test_every_offset_is_found_in_few_hops(interleaved: dict[str, Any]) -> None:
    fragments = interleaved["fragments"]
    for chain in (0, 1):
        for offset in range(700):
            number, hops = locate(interleaved, chain, offset)
            assert hops <= 3 * np.floor(np.log2(701))
            assert fragments["chain"][number] == chain
            assert fragments["offset"][number] == offset
            assert fragments["first"][number] == 2 * offset + chain


def test_spans_are_those_of_a_skew_binary_number(interleaved: dict[str, Any]) -> None:
    """1, then 1, 3, 1, 1, 3, 7, ...: the weight of the last digit of the depth (Myers 1983)."""
    fragments = interleaved["fragments"]
    assert fragments["span"][:32:2].tolist() == [0, 1, 1, 3, 1, 1, 3, 7, 1, 1, 3, 1, 1, 3, 7, 15]
    for number in range(2, 1400):
        assert fragments["jump"][number] == 2 * fragments["span"][number]


def test_dropped_fragments_are_never_visited(interleaved: dict[str, Any]) -> None:
    state, fragments, chains, _ = interleaved.values()
    touched = np.zeros(2048, np.int64)
    publishing.claim((state, 1401, fragments, chains), 801, np.zeros(0, np.int64), touched)
    assert state["head"][0] == 800 and state["first"][0] == 800
    fragments[:800] = -(2**30)  # whoever reads them goes astray
    for offset in range(400, 700):
        assert locate(interleaved, 1, offset)[0] == 2 * offset + 1


def test_hash_table_finds_what_was_put_whatever_the_ids() -> None:
    ids = np.concatenate([np.arange(-50, 50), np.arange(1, 101) << 40, [2**63 - 1, -(2**63)]])
    table = np.zeros(512, ENTRY)
    chains = np.zeros(256, CHAIN)
    for i, key in enumerate(ids):
        at = entry(table, key)
        assert table["chain"][at] == 0
        table[at] = (key, i + 1)
        chains[i] = (key, 1, 0, 0, 0, i % 2)
    found = [int(table["chain"][entry(table, key)]) - 1 for key in ids]
    assert found == list(range(len(ids)))
    larger = np.zeros(1024, ENTRY)
    assert publishing.rehash(table, chains, larger) == sum(i % 2 for i in range(len(ids)))
    kept = [int(larger["chain"][entry(larger, key)]) - 1 for key in ids]
    assert kept == [i if i % 2 else -1 for i in range(len(ids))]


@pytest.mark.parametrize("start", [False, True])
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("span", [0, 3])
def test_fenwick_tree_holds_the_sums_of_the_weights(start: bool, strict: bool, span: int) -> None:
    chains = np.zeros(64, CHAIN)
    weight, tree = np.zeros(64, np.int64), np.zeros(65, np.int64)
    random = np.random.default_rng(0)
    for _ in range(50):
        touched = random.integers(0, 64, 10)
        chains["total"][touched] = random.integers(0, 20, 10)
        publishing.weigh(chains, touched, 10, weight, tree, (6, start, strict, span))
        n = chains["total"]
        places = np.maximum(n - 6 + 1 + span, 1) if start else np.ones_like(n)
        expected = np.where(n >= (6 if strict else 1), places, 0)
        assert (weight == expected).all()
        sums = np.concatenate([[0], np.cumsum(expected)])
        for at in range(1, 65):
            assert tree[at] == sums[at] - sums[at - (at & -at)]
