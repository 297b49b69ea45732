"""A pytest plugin, ``-p on_chip``: the process gets the emulated device before flatroll is imported."""

import chip


def pytest_load_initial_conftests() -> None:
    """Not while this file is imported, as the collection of doctests does."""
    chip.install()
