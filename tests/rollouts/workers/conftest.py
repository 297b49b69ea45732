"""One prepared process starts the workers of all tests of this folder."""

from collections.abc import Iterator

import pytest

from flatroll.sharing import Nursery


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    with Nursery(preload=("flatroll.rollouts", "worker_envs")) as made:
        yield made
