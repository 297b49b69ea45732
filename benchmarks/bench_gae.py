"""Benchmarks GAE and returns on flat rows: against reading and writing the arrays, and against TorchRL.

The *floor* is one loop that reads the inputs of GAE (reward, value, next value, two flags) and writes two output
columns. The value network is the identity, so only the module's own time is measured. Times are the best of
several turns; ratios are computed from them.
"""

import importlib
import importlib.util
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numba
import numpy as np
import torch
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
)
from torch import Tensor, nn
from torch.distributions import Categorical

from benchmarks.measure.live_bytes import peak_of
from benchmarks.measure.timing import Timing, table, take_turns, waited
from flatroll import estimators

ROWS = 1_000_000
PEER_ROWS = 100_000
RUN = 200  # rows of a run, on average
GAMMA, LMBDA = 0.99, 0.95
FUNCTIONS = ("generalized_advantage_estimate", "td_lambda_return_estimate", "vtrace_advantage_estimate")
MORE_FUNCTIONS = (*FUNCTIONS, "td1_return_estimate", "td0_return_estimate", "reward2go")
MODULES = ("GAE", "TDLambdaEstimator", "TD1Estimator", "TD0Estimator", "VTrace")


def read_and_write(
    reward: Any, value: Any, next_value: Any, terminated: Any, ends: Any, first: Any, second: Any
) -> None:
    """Read or write each array of GAE once: the least time any implementation can take."""
    for i in range(reward.shape[0]):
        first[i] = reward[i] + (value[i] if terminated[i] else next_value[i])
        second[i] = reward[i] if ends[i] else value[i]


compiled: Callable[..., None] = numba.njit(nogil=True)(read_and_write)


@dataclass(frozen=True)
class Data:
    """Test columns ``[N, 1]``, in which half of the runs are terminated and the others truncated."""

    value: Tensor
    next_value: Tensor
    reward: Tensor
    log_pi: Tensor
    log_mu: Tensor
    done: Tensor
    terminated: Tensor

    @classmethod
    def of(cls, rows: int, runs: int | list[int]) -> "Data":
        """Create ``rows`` rows in ``runs`` runs of random lengths, or in runs of the given lengths."""
        generator = torch.Generator().manual_seed(0)
        numbers = torch.randn(5, rows, 1, generator=generator)
        done = torch.zeros(rows, 1, dtype=torch.bool)
        if isinstance(runs, int):
            done[torch.randperm(rows, generator=generator)[: runs - 1]] = True
        else:
            done[torch.tensor(runs).cumsum(0) - 1] = True
        done[-1] = True
        terminated = done & (torch.rand(rows, 1, generator=generator) < 0.5)
        value, next_value, reward, log_pi, log_mu = numbers
        return cls(value, next_value, reward, log_pi, log_mu, done, terminated)

    def to(self, device: str) -> "Data":
        """Copy the columns to a device."""
        return Data(**{field.name: getattr(self, field.name).to(device) for field in fields(self)})

    def batch(self) -> TensorDict:
        """Create a batch whose observations equal their values, with one of two actions taken."""
        after = {"observation": self.next_value, "reward": self.reward}
        after |= {"done": self.done, "terminated": self.terminated}
        acted = {
            "action": torch.zeros_like(self.reward[:, 0], dtype=torch.int64),
            "action_log_prob": self.log_mu[:, 0],
        }
        return TensorDict({"observation": self.value, "next": after, **acted}, [len(self.reward)])


def floor_of(data: Data) -> Callable[[], object]:
    columns = data.reward, data.value, data.next_value, data.terminated, data.done
    arrays = [column.numpy().ravel() for column in columns]
    return lambda: compiled(*arrays, np.empty_like(arrays[0]), np.empty_like(arrays[0]))


def call_of(name: str, data: Data, library: Any = estimators) -> Callable[[], object]:
    """Return a call of the function ``name``, flatroll's or another library's, on these columns."""
    function = getattr(library, name)
    d, after = data, (data.next_value, data.reward, data.done, data.terminated)
    arguments: dict[str, tuple[Any, ...]] = {
        "generalized_advantage_estimate": (GAMMA, LMBDA, d.value, *after),
        "td_lambda_return_estimate": (GAMMA, LMBDA, *after),
        "td1_return_estimate": (GAMMA, *after),
        "td0_return_estimate": (GAMMA, d.next_value, d.reward, d.terminated),
        "vtrace_advantage_estimate": (GAMMA, d.log_pi, d.log_mu, d.value, *after),
        "reward2go": (d.reward, d.done, GAMMA),
    }
    given = arguments[name.removeprefix("vec_")]
    return lambda: function(*given)


def module(name: str, library: Any = estimators, **options: Any) -> Any:
    """Create an estimator with an identity as value network, which costs nothing."""
    identity = TensorDictModule(nn.Identity(), in_keys=["observation"], out_keys=["state_value"])
    if name in ("GAE", "TDLambdaEstimator"):
        options |= {"lmbda": LMBDA}
    if name == "VTrace":
        logits = TensorDictModule(lambda x: torch.cat([x, -x], -1), ["observation"], ["logits"])
        choose = ProbabilisticTensorDictModule(
            ["logits"],
            ["action"],
            distribution_class=Categorical,
            distribution_kwargs={"validate_args": False},  # a check waits for the device
        )
        parts: list[Any] = [logits, choose]
        options |= {"actor_network": ProbabilisticTensorDictSequential(*parts)}
    return getattr(library, name)(gamma=GAMMA, value_network=identity, **options)


def best(timing: Timing) -> float:
    return min(timing.turns)


def milliseconds(timing: Timing) -> str:
    return f"{1e3 * best(timing):.2f}"


def against_floor() -> str:
    """Time functions and GAE's module on one million rows, relative to reading and writing GAE's arrays."""
    data = Data.of(ROWS, ROWS // RUN)
    batch, two, one = data.batch(), module("GAE"), module("GAE", shifted=True)
    times = take_turns(
        {
            "read and write once": floor_of(data),
            **{name: call_of(name, data) for name in MORE_FUNCTIONS},
            "GAE, two calls": lambda: two(batch),
            "GAE, shifted": lambda: one(batch),
        },
        turns=31,
    )
    least = best(times["read and write once"])
    rows = [[name, milliseconds(t), f"{best(t) / least:.2f}"] for name, t in times.items()]
    return table(["", "ms", "x read and write once"], rows)


def over_rows_and_runs() -> str:
    """Time ns per row from ten thousand to ten million rows, and from one run to one run per row."""
    rows = []
    sizes = [(10**k, 10**k // RUN) for k in (4, 5, 6, 7)] + [(ROWS, 10**k) for k in (0, 2, 4, 6)]
    for n, runs in sizes:
        data = Data.of(n, runs)
        calls = max(1, 10**5 // n)
        contenders = {"floor": floor_of(data), **{name: call_of(name, data) for name in FUNCTIONS}}
        times = take_turns(contenders, turns=15, calls=calls)
        rows.append([f"{n:,}", f"{runs:,}", *(f"{1e9 * best(t) / n:.2f}" for t in times.values())])
    return table(["rows", "runs", "read and write once", "GAE", "TD(lambda)", "V-trace"], rows)


def against_peer(peer: Any) -> str:
    """Time TorchRL's functions, vectorized where possible, and its modules beside flatroll's."""
    data = Data.of(PEER_ROWS, PEER_ROWS // RUN)
    batch = data.batch()
    pairs: dict[str, tuple[Callable[[], object], Callable[[], object], int]] = {}
    for name in MORE_FUNCTIONS:
        theirs = f"vec_{name}" if hasattr(peer.functional, f"vec_{name}") else name
        turns = 3 if name == "vtrace_advantage_estimate" else 7
        pairs[name] = call_of(name, data), call_of(theirs, data, peer.functional), turns
    for name in MODULES:
        ours, theirs_ = module(name), module(name, peer, **({"vectorized": True} if name == "GAE" else {}))
        pairs[name] = partial(ours, batch), partial(theirs_, batch), 3 if name == "VTrace" else 7
    pairs["GAE, torchrl's default (a loop)"] = pairs["GAE"][0], partial(module("GAE", peer), batch), 3
    rows = []
    for name, (our_call, peer_call, turns) in pairs.items():
        times = take_turns({"ours": our_call, "peer": peer_call}, turns)
        alone = take_turns({"ours": our_call}, turns=50)  # it costs nothing to look more often
        mine, other = min(best(times["ours"]), best(alone["ours"])), best(times["peer"])
        rows.append([name, f"{1e3 * mine:.2f}", f"{1e3 * other:.2f}", f"{other / mine:.1f}"])
    return table(["", "ours, ms", "torchrl, ms", "torchrl / ours"], rows)


def uneven_runs(peer: Any) -> str:
    """Time 3,000 rows in one long run and 1,500 of one row, which TorchRL pads to 1,501 x 1,500."""
    rows = []
    for name, runs in (("300 runs of 10", [10] * 300), ("1,500 + 1,500 runs of 1", [1500] + [1] * 1500)):
        data = Data.of(3000, runs)
        ours = call_of("generalized_advantage_estimate", data)
        theirs = call_of("vec_generalized_advantage_estimate", data, peer.functional)
        times = take_turns({"ours": ours, "peer": theirs}, turns=7)
        kilobytes = [f"{peak_of(call) / 1e3:,.0f}" for call in (ours, theirs)]
        rows.append([name, *map(milliseconds, times.values()), *kilobytes])
    return table(["3,000 rows", "ours, ms", "torchrl, ms", "ours, kB at most", "torchrl, kB at most"], rows)


def memory() -> str:
    """Measure the peak MB of a call with a network 256 wide, whole and in chunks of 4,096 rows."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(1, 256), nn.Tanh(), nn.Linear(256, 1))
    critic = TensorDictModule(net, in_keys=["observation"], out_keys=["state_value"])
    rows = []
    ways: list[dict[str, Any]] = [{}, {"value_chunk_size": 4096}, {"value_chunk_size": 4096, "shifted": True}]
    for n in (10**4, 10**5, 10**6):
        batch = Data.of(n, n // RUN).batch()
        peaks = []
        for options in ways:
            gae: Any = estimators.GAE(gamma=GAMMA, lmbda=LMBDA, value_network=critic, **options)
            peaks.append(peak_of(partial(gae, batch)))
        rows.append([f"{n:,}", *(f"{peak / 1e6:.1f}" for peak in peaks)])
    return table(["rows", "whole", "two calls, in chunks", "shifted, in chunks"], rows)


def on_gpu(peer: Any, rows: int, device: str) -> str:
    """Time GAE on a GPU, relative to copying its arrays there, beside TorchRL; asserts no host sync."""
    data = Data.of(rows, rows // RUN).to(device)
    batch, ours = data.batch(), module("GAE")
    theirs = module("GAE", peer, vectorized=True) if peer else None
    arrays = [data.value, data.next_value, data.reward, data.done, data.terminated]
    runs: dict[str, Callable[[], object]] = {
        "a copy of the arrays": lambda: [array.clone() for array in arrays],
        **{name: unwaiting(call_of(name, data)) for name in FUNCTIONS},
        "GAE": unwaiting(lambda: ours(batch)),
    }
    if theirs is not None:
        runs["torchrl's GAE"] = lambda: theirs(batch)
    times = take_turns({name: waited(run) for name, run in runs.items()}, turns=7)
    least = best(times["a copy of the arrays"])
    cells = [[name, milliseconds(t), f"{best(t) / least:.2f}"] for name, t in times.items()]
    return table(["", "ms", "x a copy"], cells)


def unwaiting(run: Callable[[], object]) -> Callable[[], object]:
    """Wrap a call so that it raises an error if it synchronises with the GPU."""
    if not torch.cuda.is_available():
        return run

    def whole() -> None:
        torch.cuda.set_sync_debug_mode("error")
        try:
            run()
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return whole


@contextmanager
def quiet() -> Iterator[None]:
    """Context manager that hides TorchRL's import warnings about missing packages."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)  # on a busy machine a second thread that waits is timed, not the work
    print(f"{ROWS:,} rows in {ROWS // RUN:,} runs, float32, one core\n")
    print(against_floor())
    print("\nOver rows and runs: nanoseconds per row\n")
    print(over_rows_and_runs())
    print("\nMegabytes of tensors at most, by rows\n")
    print(memory())
    peer: Any = None
    if importlib.util.find_spec("torchrl"):
        with quiet():
            peer = importlib.import_module("torchrl.objectives.value")
            importlib.import_module("torchrl.objectives.value.functional")
    if peer is None:
        print("\ntorchrl is not installed: no comparison.")
        return
    print(f"\nAgainst torchrl, {PEER_ROWS:,} rows\n")
    print(against_peer(peer))
    print("\nUneven runs\n")
    print(uneven_runs(peer))


if __name__ == "__main__":
    main()
