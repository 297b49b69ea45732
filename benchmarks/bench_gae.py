"""GAE on flat rows: against the memory floor, over rows and runs, and against torchrl's vectorized one.

The *floor* is one loop that reads what GAE reads (reward, value, next value, two flags) and writes the two
columns that it writes. The value network is the identity, so a module's time is all its own.
"""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import numba
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import TensorDictModule
from torch import Tensor, nn

from flatroll.benchmarks.timing import Timing, ratio, table, take_turns
from flatroll.estimators import GAE, generalized_advantage_estimate

ROWS = 1_000_000
PEER_ROWS = 100_000
RUN = 200  # rows of a run, on average
FACTORS = (0.99, 0.95)  # gamma, lmbda


def read_and_write(
    reward: Any, value: Any, next_value: Any, terminated: Any, ends: Any, first: Any, second: Any
) -> None:
    """Touch each array of GAE once."""
    for i in range(reward.shape[0]):
        first[i] = reward[i] + (value[i] if terminated[i] else next_value[i])
        second[i] = reward[i] if ends[i] else value[i]


compiled: Callable[..., None] = numba.njit(nogil=True)(read_and_write)


def columns(rows: int, runs: int) -> tuple[Tensor, ...]:
    """Value, next value, reward, done, terminated; half of the ``runs`` terminated, the others truncated."""
    generator = torch.Generator().manual_seed(0)
    reward, value, next_value = torch.randn(3, rows, 1, generator=generator)
    done = torch.zeros(rows, 1, dtype=torch.bool)
    done[torch.randperm(rows, generator=generator)[: runs - 1]] = True
    done[-1] = True
    terminated = done & (torch.rand(rows, 1, generator=generator) < 0.5)
    return value, next_value, reward, done, terminated


def floor_of(data: tuple[Tensor, ...]) -> Callable[[], object]:
    value, next_value, reward, done, terminated = (column.numpy().ravel() for column in data)
    arrays = reward, value, next_value, terminated, done
    return lambda: compiled(*arrays, np.empty_like(reward), np.empty_like(reward))


def estimate(
    data: tuple[Tensor, ...], function: Callable[..., object] = generalized_advantage_estimate
) -> Callable[[], object]:
    return lambda: function(*FACTORS, *data)


def batch_of(data: tuple[Tensor, ...]) -> TensorDict:
    """A batch whose observation is its value."""
    value, next_value, reward, done, terminated = data
    after = {"observation": next_value, "reward": reward, "done": done, "terminated": terminated}
    return TensorDict({"observation": value, "next": after}, [len(reward)])


def module(kind: Callable[..., Any], **options: Any) -> Any:
    """An estimator whose value network costs nothing."""
    gamma, lmbda = FACTORS
    identity = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["state_value"])
    return kind(gamma=gamma, lmbda=lmbda, value_network=identity, **options)


def milliseconds(timing: Timing) -> str:
    return f"{1e3 * timing.median:.2f}"


def against_floor() -> str:
    """One million rows: the function and the module, over reading and writing the arrays once."""
    data = columns(ROWS, ROWS // RUN)
    batch, two, one = batch_of(data), module(GAE), module(GAE, shifted=True)
    times = take_turns(
        {
            "read and write once": floor_of(data),
            "generalized_advantage_estimate": estimate(data),
            "GAE, two calls": lambda: two(batch),
            "GAE, shifted": lambda: one(batch),
        },
        turns=21,
    )
    least = times["read and write once"]
    rows = [[name, milliseconds(t), f"{ratio(t, least):.2f}"] for name, t in times.items()]
    return table(["", "ms", "x read and write once"], rows)


def over_rows_and_runs() -> str:
    """Nanoseconds per row: flat from ten thousand to ten million rows, and from one run to as many as rows."""
    rows = []
    sizes = [(10**k, 10**k // RUN) for k in (4, 5, 6, 7)] + [(ROWS, 10**k) for k in (0, 2, 4, 6)]
    for n, runs in sizes:
        data = columns(n, runs)
        calls = max(1, 10**5 // n)
        times = take_turns({"floor": floor_of(data), "estimate": estimate(data)}, turns=9, calls=calls)
        per_row = 1e9 * times["estimate"].median / n
        rows.append(
            [f"{n:,}", f"{runs:,}", f"{per_row:.2f}", f"{ratio(times['estimate'], times['floor']):.2f}"]
        )
    return table(["rows", "runs", "ns per row", "x read and write once"], rows)


def against_peer() -> str:
    """torchrl's vectorized function, and its module with it and as it comes, on a tenth of the rows."""
    if not importlib.util.find_spec("torchrl"):
        return "torchrl is not installed: no comparison."
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # importing it warns about packages that are not there
        from torchrl.objectives.value import GAE as PeerGAE
        from torchrl.objectives.value.functional import vec_generalized_advantage_estimate as peer_function

    data = columns(PEER_ROWS, PEER_ROWS // RUN)
    batch, ours = batch_of(data), module(GAE)
    vectorized, as_it_comes = module(PeerGAE, vectorized=True), module(PeerGAE)
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {
        "function": (estimate(data), estimate(data, peer_function), 7),
        "module": (lambda: ours(batch), lambda: vectorized(batch), 7),
        "module, torchrl's default (a loop)": (lambda: ours(batch), lambda: as_it_comes(batch), 3),
    }
    rows = []
    for name, (our_call, peer_call, turns) in pairs.items():
        times = take_turns({"ours": our_call, "peer": peer_call}, turns, calls=3)
        mine, peer = times["ours"], times["peer"]
        rows.append([name, milliseconds(mine), milliseconds(peer), f"{ratio(peer, mine):.0f}"])
    return table(["", "ours, ms", "torchrl, ms", "torchrl / ours"], rows)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)  # on a busy machine a second thread that waits is timed, not the work
    print(f"{ROWS:,} rows in {ROWS // RUN:,} runs, float32, one core\n")
    print(against_floor())
    print("\nOver rows and runs\n")
    print(over_rows_and_runs())
    print(f"\nAgainst torchrl, {PEER_ROWS:,} rows\n")
    print(against_peer())


if __name__ == "__main__":
    main()
