"""A state is data, never trusted: it is refused with a Python error, and then nothing has changed, or it works."""

from forms import scaled
from scripts import run_script


def test_damaged_states_are_refused_or_work() -> None:
    run_script("crafted_states", scaled(quick=4, long=60))
