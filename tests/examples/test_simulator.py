"""The example that trains on a torch simulator: on a stub here, on mjlab itself in `make simulators`."""

from pathlib import Path

import pytest
from simulators import MjlabEnv

from flatroll.examples import simulator


def test_it_trains_on_the_interface_of_mjlab(tmp_path: Path) -> None:
    curve = simulator.train(MjlabEnv(auto_reset=False), 192, 0, 100.0)
    assert [frames for frames, _ in curve] == [96, 192]
    pytest.importorskip("matplotlib")
    simulator.save(curve, tmp_path)
    assert {file.name for file in tmp_path.iterdir()} == {"simulator_curve.csv", "simulator_curve.png"}


def test_it_is_short_enough_to_read() -> None:
    assert len(Path(simulator.__file__).read_text().splitlines()) <= 150
