"""A pytest plugin, ``-p on_chip``: the process gets the emulated device before flatroll is imported."""

import chip

chip.install()
