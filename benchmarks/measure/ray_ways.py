"""What Ray costs: a window through the object store, and a sample from a buffer in an actor, beside the same at home.

    python -m benchmarks.measure.ray_ways

Wall time, medians in ms; one actor on this machine. Collecting itself is left out: the env gives ready rows.
"""

from collections.abc import Callable
from functools import partial
from statistics import median
from time import perf_counter, sleep
from typing import Any

import torch
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage, RayReplayBuffer, ReplayBuffer
from flatroll.sharing.on_ray.calls import RayCalls, pack_batches, unpack_batches

SHAPES = {"4,096 rows of 56 bytes": (4096, 5), "256 rows of 56 KB": (256, 7000)}


class Source:
    """Gives one window again and again, as a `CollectorActor` does: a report, and packed rows."""

    def start(self, rows: int, width: int) -> None:
        """Make the window ``[rows]``."""
        self.window = make_window(rows, width)

    def collect(self) -> tuple[int, Any]:
        """The window."""
        return len(self.window), pack_batches((self.window, None))


def make_window(rows: int, width: int) -> TensorDict:
    """``width`` numbers in each observation; with 5, rows of 56 bytes."""
    columns = {"observation": torch.rand(rows, width), ("next", "observation"): torch.rand(rows, width)}
    columns |= {("next", "reward"): torch.rand(rows, 1), ("collector", "traj_ids"): torch.arange(rows)}
    return TensorDict(columns, [rows])


def timed(call: Callable[[], Any], repeats: int = 40) -> float:
    """Median wall time in ms, after some calls to warm up."""
    times = []
    for number in range(repeats + 5):
        began = perf_counter()
        call()
        times.append(perf_counter() - began)
        if number % 10 == 9:
            sleep(0.3)  # the store frees unreferenced objects
    return median(times[5:]) * 1e3


def main() -> None:
    """Print the table."""
    calls = RayCalls(cpus=3)
    try:
        for name, (rows, width) in SHAPES.items():
            actor = calls.make(Source, {"num_cpus": 1})
            calls.get(calls.call(actor, "start", rows, width))
            home = ReplayBuffer(storage=LazyTensorStorage(4 * rows), batch_size=256)
            remote = partial(
                RayReplayBuffer, storage=partial(LazyTensorStorage, 4 * rows), batch_size=256, calls=calls
            )
            there, ahead = remote(), remote(prefetch=2)
            window = make_window(rows, width)

            def fetched(actor: Any = actor) -> Any:
                report, packed = calls.call(actor, "collect", returns=2)
                calls.wait([report])
                return unpack_batches(calls.get(packed))[0]

            def by_reference(actor: Any = actor, there: Any = there) -> None:
                there.extend_reference(calls.call(actor, "collect", returns=2)[1])

            def through_the_driver(there: Any = there, fetched: Any = fetched) -> None:
                there.extend(fetched())

            for buffer in (home, there, ahead):
                buffer.extend(window)
            ways: dict[str, Callable[[], Any]] = {
                "extend at home": partial(home.extend, window),
                "window of an actor to the driver": fetched,
                "window of an actor to a buffer actor, by reference": by_reference,
                "the same through the driver": through_the_driver,
                "sample of 256 at home": home.sample,
                "sample of 256 from a buffer actor": there.sample,
                "the same with prefetch=2": ahead.sample,
            }
            print(name)
            for way, call in ways.items():
                print(f"  {way:52} {timed(call):8.2f} ms")
            for buffer in (there, ahead):
                calls.kill(buffer._actor)
            calls.kill(actor)
    finally:
        calls.close()


if __name__ == "__main__":
    main()
