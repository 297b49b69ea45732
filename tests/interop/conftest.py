"""Files that flatroll writes, read by the libraries whose formats they are: `make interop`."""

from pathlib import Path
from typing import Any

import pytest
from interop_rows import episodes
from tensordict import TensorDict


def pytest_collection_modifyitems(items: list[Any]) -> None:
    """Mark what stands in this folder, which hears of all tests."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.interop)
            item.add_marker(pytest.mark.filterwarnings("ignore"))  # of these libraries


@pytest.fixture
def rows() -> TensorDict:
    """All episodes, end to end."""
    return TensorDict.cat(list(episodes()))
