"""A pytest plugin, ``-p on_chip_as_cuda``: as ``on_chip``, and flatroll takes the emulated device for CUDA's."""

import chip


def pytest_load_initial_conftests() -> None:
    """Not while this file is imported, as the collection of doctests does."""
    chip.install()
    chip.translate("flatroll")
