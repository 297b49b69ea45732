"""Workers for the tests of this folder, from one prepared process."""

from collections.abc import Iterator

import pytest

from flatroll.sharing import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as made:
        yield made
