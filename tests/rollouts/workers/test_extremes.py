"""Tiny and huge windows, and what was typed at a prompt.

``python tests/support/extremes.py`` is the long form, which also fills /dev/shm and runs a notebook.
"""

from extremes import FOUND, large_windows, repl, tiny_windows

from flatroll.sharing import Nursery


def test_tiny_windows(nursery: Nursery) -> None:
    found = tiny_windows(nursery, 1000)
    assert found["wrong"] == 0 and abs(found["descriptors"]) <= 4


def test_large_windows(nursery: Nursery) -> None:
    found = large_windows(nursery, 20)
    assert found["wrong"] == 0 and found["MB"] >= 19


def test_what_was_typed_at_a_prompt_goes_to_workers() -> None:
    assert FOUND in repl()
