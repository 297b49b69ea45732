"""These files need the emulated device, which a process gets once and for all: ``tests/test_on_chip.py`` runs them."""

import chip

collect_ignore_glob = [] if chip.installed() else ["test_*.py"]
