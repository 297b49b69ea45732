"""Times converting a Minari set beside Minari's own iteration: ``python -m benchmarks.disk.bench_datasets``.

Processor time of the process, contenders in turns. Each conversion is a first one: into a new folder.
"""

import argparse
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.datasets import BaseDatasetExperienceReplay, MinariExperienceReplay
from flatroll.export import read_minari

LENGTH, WIDTH = 200, 17


def make(folder: Path, data_format: str, episodes: int, images: bool) -> Any:
    """A set of Minari as its own library writes it."""
    storage_of = __import__("minari.dataset.minari_storage", fromlist=["MinariStorage"]).MinariStorage
    buffer_of = __import__("minari.data_collector", fromlist=["EpisodeBuffer"]).EpisodeBuffer
    rng = np.random.default_rng(0)
    shape, kind = ((64, 64, 3), np.uint8) if images else ((WIDTH,), np.float64)
    folder.mkdir()
    low, high = (0, 255) if images else (-np.inf, np.inf)
    storage = storage_of.new(
        folder,
        observation_space=gym.spaces.Box(low, high, shape, kind),
        action_space=gym.spaces.Box(-1, 1, (6,), np.float32),
        data_format=data_format,
        jpeg_encoding=False,
    )

    def episode(number: int) -> Any:
        seen = rng.integers(0, 255, (LENGTH + 1, *shape)) if images else rng.normal(size=(LENGTH + 1, *shape))
        return buffer_of(
            id=number,
            observations=seen.astype(kind),
            actions=rng.uniform(-1, 1, (LENGTH, 6)).astype(np.float32),
            rewards=rng.normal(size=LENGTH),
            terminations=np.zeros(LENGTH, bool),
            truncations=np.arange(LENGTH) == LENGTH - 1,
            infos={},
        )

    storage.update_metadata({"dataset_id": "bench/set-v0", "minari_version": "0.5.4"})
    storage.update_episodes(map(episode, range(episodes)))
    return __import__("minari").MinariDataset(folder)


def main() -> None:
    """Print a table: milliseconds of an episode, and the ratio to Minari's iteration."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    rows = []
    for data_format, images in [("hdf5", False), ("hdf5", True), ("arrow", False), ("parquet", False)]:
        episodes = options.episodes // (10 if images else 1)
        with tempfile.TemporaryDirectory() as name:
            data = make(Path(name, "set"), data_format, episodes, images)

            def iterate(data: Any = data) -> None:
                for _ in data.iterate_episodes():
                    pass

            def read(data: Any = data) -> None:
                for _ in read_minari(data):
                    pass

            def take_in(data: Any = data, name: str = name) -> None:
                number = sum(
                    1 for path in Path(name).glob("converted-*")
                )  # a new folder each time, as for a first use
                MinariExperienceReplay(f"converted-{number}", root=name, fetch=lambda *_: data)

            contenders = {"iterate": iterate, "read": read, "convert": take_in}
            timings = take_turns(contenders, options.turns, clock=time.process_time)
            assert len(BaseDatasetExperienceReplay(Path(name, "converted-0"))) == episodes * LENGTH
            times = [f"{timing.median / episodes * 1e3:.2f}" for timing in timings.values()]
            share = f"{ratio(timings['convert'], timings['iterate']):.2f}"
            rows.append([f"{data_format}{', images' * images}", *times, share])
    header = ["set", "Minari's iteration, ms an episode", "read_minari", "read and converted", "ratio"]
    print(table(header, rows))


if __name__ == "__main__":
    main()
