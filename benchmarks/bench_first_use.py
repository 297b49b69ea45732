"""Benchmarks the first use on a machine: the first ``extend``, ``sample`` and GAE with no compiled kernel on disk.

Each turn is a new process with an empty cache of Numba; processor time. With the folder of another checkout as
argument, its turns alternate with this one's.

``python -m flatroll bench first_use``, or ``python -m benchmarks.bench_first_use [CHECKOUT]``
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from benchmarks.measure.timing import table

TURNS = 5
HERE = Path(__file__).parent.parent
STORAGES = {"full": False, "compact": True}

# It must run on checkouts of earlier versions, so it uses nothing of this folder.
PROGRAM = """
import json, sys, time
import torch
from tensordict import TensorDict
import flatroll.kernels.compiled  # numba's own import is not counted
from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import generalized_advantage_estimate

torch.set_num_threads(1)
steps = torch.arange(4096.0)
done = (steps % 20 == 19)[:, None]
batch = TensorDict({
    "observation": steps[:, None].repeat(1, 4),
    "next": {
        "observation": steps[:, None].repeat(1, 4) + 1,
        "reward": steps[:, None],
        "done": done,
        "terminated": done,
    },
}, [4096])
buffer = ReplayBuffer(
    storage=LazyTensorStorage(10_000, compact_obs=sys.argv[1] == "True"),
    sampler=SliceSampler(slice_len=64, strict_length=False),
    batch_size=2048,
)
value = torch.zeros(4096, 1)

def gae():
    generalized_advantage_estimate(0.99, 0.95, value, value, steps[:, None], done=done, terminated=done)

times = {}
for name, call in {"extend": lambda: buffer.extend(batch), "sample": buffer.sample, "GAE": gae}.items():
    start = time.process_time()
    call()
    first = time.process_time()
    call()
    times[name] = 2 * first - start - time.process_time()  # the first call's time without that of a second one
print(json.dumps(times))
"""


def first_use(checkout: Path, compact: bool) -> dict[str, float]:
    """Return the seconds that the first call of each kind takes in a new process with an empty cache."""
    with TemporaryDirectory() as cache:
        path = os.pathsep.join([str(checkout / "src"), str(checkout)])
        environment = {**os.environ, "NUMBA_CACHE_DIR": cache, "PYTHONPATH": path}
        command = [sys.executable, "-c", PROGRAM, str(compact)]
        output = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, cwd=cache
        ).stdout
    times: dict[str, float] = json.loads(output)
    times["extend + sample"] = times["extend"] + times["sample"]
    return times


def main() -> None:
    """Print the table."""
    checkouts = [HERE]
    if len(sys.argv) > 1:
        checkouts.append(Path(sys.argv[1]))

    rows = []
    for storage, compact in STORAGES.items():
        turns = [[first_use(checkout, compact) for checkout in checkouts] for _ in range(TURNS)]
        for name in turns[0][0]:
            seconds = [median(turn[i][name] for turn in turns) for i in range(len(checkouts))]
            row = [storage, name, f"{seconds[0]:.2f}"]
            if len(seconds) > 1:
                row += [f"{seconds[1]:.2f}", f"{seconds[0] / seconds[1]:.2f}"]
            rows.append(row)

    header = ["storage", "first call of", "s"]
    if len(checkouts) > 1:
        header += ["the other's, s", "of it"]
    print(f"Processor time with an empty cache, median of {TURNS} processes\n")
    print(table(header, rows))


if __name__ == "__main__":
    main()
