"""Simulates 1,000 actors that feed one learner: one owner of the buffer, or shards on nodes.

``python -m flatroll bench fleet`` prints one table within seconds. Actors, owners, network cards and the learner are
simulated; what a window or a sample costs is given by ``COSTS``, measured with real Ray on two cores
(``python -m benchmarks.measure.ray_ways``). Between the measured window sizes, costs are linear in bytes.

The model: an actor collects a window with the newest weights at its start, sends it, and collects at most one more
while the last one waits. An owner, a shard and each network card serve one window after the other. The learner updates
at a fixed rate and publishes weights after each ``PUBLISH`` updates; they travel once per node.
"""

import heapq
import random
from dataclasses import dataclass
from statistics import mean
from typing import NamedTuple

from benchmarks.measure.timing import table

ACTORS, PER_NODE, SECONDS = 1000, 50, 20.0
ROW_RATE = 200.0  # rows/s of an actor
UPDATES, BATCH, PUBLISH = 50.0, 256, 10  # of the learner: updates/s, rows per update, updates per version
WEIGHTS = 2e6  # bytes
CARD = 25e9 / 8  # bytes/s of a network card, each way
IN_FLIGHT = 2


class Costs(NamedTuple):
    """Seconds per window of 0.23 MB and of 14 MB."""

    small: float
    large: float

    def of(self, size: float) -> float:
        """Seconds for a window of ``size`` bytes."""
        slope = (self.large - self.small) / (14.3e6 - 0.23e6)
        return max(self.small, self.small + (size - 0.23e6) * slope)


COSTS = {
    "owner": Costs(4.06e-3, 19.4e-3),  # a window of an actor to the driver, and `extend` there
    "shard": Costs(5.94e-3, 20.1e-3),  # a window of an actor to a buffer actor, by reference
}


@dataclass
class Found:
    """What a run gives."""

    rows: float  # per second
    wanted: float  # rows/s that the actors could give
    lag: float  # versions between the weights of a window's first row and its storing, in the mean
    worst: int
    inward: float  # bytes/s through the learner's card
    outward: float
    busy: float  # share of the time in which the busiest owner or shard works
    card: float  # the same of the busiest network card that windows pass


def simulate(row_bytes: int, window: int, shards: int, seed: int = 0) -> Found:
    """Run the actors for 16 windows, at least ``SECONDS``; ``shards`` = 0 is one owner in the learner's process."""
    draw = random.Random(seed)
    size, servers = row_bytes * window, max(1, shards)
    cost = COSTS["shard" if shards else "owner"].of(size)
    served, carried = [0.0] * servers, [0.0] * servers  # until when a server, or its card, is taken
    busy, sent = [0.0] * servers, [0.0] * servers
    version_at = UPDATES / PUBLISH
    seconds = max(SECONDS, 16 * window / ROW_RATE)

    def collected(begun: float, actor: int) -> tuple[float, float, int]:
        return begun + window / ROW_RATE * draw.uniform(0.8, 1.2), begun, actor

    ends = [collected(draw.random() * window / ROW_RATE, actor) for actor in range(ACTORS)]
    heapq.heapify(ends)
    freed: list[list[float]] = [[] for _ in range(ACTORS)]  # when an actor's windows were stored
    lags, stored = [], 0
    while ends:
        ended, begun, actor = heapq.heappop(ends)
        if ended > seconds:
            break
        server = actor % servers
        arrived = max(carried[server], ended) + size / CARD
        carried[server], sent[server] = arrived, sent[server] + size / CARD
        served[server] = done = max(served[server], arrived) + cost
        busy[server] += cost
        freed[actor].append(done)
        # The next window begins now, unless too many of this actor still wait.
        waits = freed[actor][-IN_FLIGHT] if len(freed[actor]) >= IN_FLIGHT else 0.0
        heapq.heappush(ends, collected(max(ended, waits), actor))
        if seconds / 2 < done <= seconds:
            stored += window
            lags.append(int(done * version_at) - int(begun * version_at))
    took = seconds / 2
    rows = stored / took
    nodes = ACTORS / PER_NODE + shards
    samples = UPDATES * BATCH * row_bytes if shards else 0.0
    return Found(
        rows=rows,
        wanted=ACTORS * ROW_RATE,
        lag=mean(lags),
        worst=max(lags),
        inward=samples if shards else rows * row_bytes,
        outward=nodes * WEIGHTS * version_at,
        busy=min(1.0, max(busy) / seconds),
        card=min(1.0, max(sent) / seconds),
    )


def main() -> None:
    """Print the table."""
    rows = []
    for row_bytes, window in ((56, 256), (56, 4096), (7_056, 256), (56_000, 256)):
        for shards in (0, 4, 16):
            f = simulate(row_bytes, window, shards)
            rows.append(
                [
                    f"{window:,} rows of {row_bytes:,} B",
                    f"{shards} shards" if shards else "one owner",
                    f"{f.rows:,.0f} ({f.rows / f.wanted:.0%})",
                    f"{f.lag:.1f} ({f.worst})",
                    f"{f.inward / 1e6:,.0f}",
                    f"{f.outward / 1e6:,.0f}",
                    f"{f.busy:.0%}",
                    f"{f.card:.0%}",
                ]
            )
    print(
        f"{ACTORS:,} actors of {ROW_RATE:,.0f} rows/s on {ACTORS // PER_NODE} nodes; "
        f"{UPDATES:.0f} updates/s of {BATCH} rows; "
        f"{WEIGHTS / 1e6:.0f} MB of weights every {PUBLISH} updates; cards of {CARD * 8 / 1e9:.0f} Gbit/s\n"
    )
    header = ["window", "buffer", "rows/s (of those wanted)", "lag in versions, mean (most)"]
    card = ["MB/s into the learner", "out of it", "busiest owner or shard", "its network card"]
    print(table([*header, *card], rows))


if __name__ == "__main__":
    main()
