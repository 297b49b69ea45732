"""A device gives the numbers that the CPU gives, and is not waited for: ``make gpu`` runs this on a GPU.

Without one, tests/test_on_chip.py runs it on an emulated device.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import chip
import pytest
import torch
from tensordict import TensorDict

from benchmarks import bench_gpu, bench_updates
from benchmarks.bench_gae import Data, call_of, module
from flatroll.buffers import LazyTensorStorage, PrioritizedSliceSampler, ReplayBuffer, SliceSampler
from flatroll.modules import (
    DeltaNetModule,
    FFMModule,
    GRUModule,
    LRUModule,
    LSTMModule,
    MinGRUModule,
    RunningNorm,
    S6Module,
    set_recurrent_mode,
)
from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, RewardSum, StepCounter, TrajId
from flatroll.wrappers.testing import Script, ScriptedTorchEnv

#: Of these a process has one at most besides the CPU; tests/test_on_chip.py runs "chip" in one of its own.
DEVICES: list[Any] = ["cpu", pytest.param("cuda", marks=pytest.mark.cuda)]
if chip.installed():
    DEVICES = [chip.NAME]
#: Products on a GPU may be rounded otherwise than on the CPU.
CLOSE: dict[str, Any] = {"rtol": 1e-4, "atol": 1e-5}

pytestmark = pytest.mark.filterwarnings("ignore:Synchronization debug mode")


@contextmanager
def never_waited_for(device: str) -> Iterator[None]:
    """Waiting for the device is an error within."""
    if device == chip.NAME:
        with chip.watch("strict"):
            yield
        return

    if device == "cuda":
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        if device == "cuda":
            torch.cuda.set_sync_debug_mode("default")


def rows_of(device: str, reuse_obs: bool) -> list[dict[Any, torch.Tensor]]:
    """Three batches of a scripted env with all markers, collected on a device."""
    script = Script(5, lengths=[[3, 1], [7], [2, 5, 1], [1], [11]])
    env = ScriptedTorchEnv(script, device=device, reuse_obs=reuse_obs)
    stack = RewardSum(InitTracker(StepCounter(TrajId(env))))
    weights = torch.arange(3.0, device=device)
    collector = Collector(
        stack, lambda obs: (obs @ weights > 4).long(), frames_per_batch=40, total_frames=120, seed=0
    )
    batches = []
    for batch in collector:
        assert {leaf.device.type for leaf in batch.values(True, True)} == {device}
        batches.append({key: leaf.cpu().clone() for key, leaf in batch.items(True, True)})
    return batches


@pytest.mark.parametrize("reuse_obs", [False, True])
@pytest.mark.parametrize("device", DEVICES)
def test_rows(device: str, reuse_obs: bool) -> None:
    torch.testing.assert_close(rows_of(device, reuse_obs), rows_of("cpu", False), rtol=0, atol=0)


@pytest.mark.parametrize(
    "name", ["generalized_advantage_estimate", "td_lambda_return_estimate", "vtrace_advantage_estimate"]
)
@pytest.mark.parametrize("device", DEVICES)
def test_estimates(device: str, name: str) -> None:
    data = Data.of(3_000, 100)
    moved = data.to(device)
    call_of(name, moved)()  # compiles
    with never_waited_for(device):
        found: Any = call_of(name, moved)()
    expected: Any = call_of(name, data)()
    for ours, theirs in zip(*(x if isinstance(x, tuple) else (x,) for x in (found, expected)), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, **CLOSE)


@pytest.mark.parametrize("name", ["GAE", "TDLambdaEstimator", "TD0Estimator", "VTrace"])
@pytest.mark.parametrize("device", DEVICES)
def test_estimators(device: str, name: str) -> None:
    data = Data.of(3_000, 100)
    estimator = module(name)
    expected, batch = estimator(data.batch()), data.to(device).batch()
    with never_waited_for(device):
        found = estimator(batch)
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(found[key].cpu(), expected[key], **CLOSE)


@pytest.mark.parametrize("name", bench_updates.CASES)
@pytest.mark.parametrize("device", DEVICES)
def test_losses_and_gradients(device: str, name: str) -> None:
    torch.manual_seed(0)
    loss = bench_updates.CASES[name]().ours
    batch = bench_updates.rows(64, continuous=name == "SACLoss")
    found = []
    for place in ("cpu", device):
        loss.to(place).zero_grad()
        given = batch.clone().to(place)
        losses = loss(given)
        if name == "SACLoss":  # draws actions: the numbers differ from device to device
            assert all(value.isfinite().all() for value in losses.values())
            return
        sum(value for key, value in losses.items() if key.startswith("loss")).backward()
        # copies: on the CPU the gradient itself, which loss.to() moves in place
        gradients = {key: x.grad.cpu().clone() for key, x in loss.named_parameters() if x.grad is not None}
        found.append(({key: value.detach().cpu() for key, value in losses.items()}, gradients))
    torch.testing.assert_close(found[1], found[0], **CLOSE)


@pytest.mark.parametrize("kind", [SliceSampler, PrioritizedSliceSampler])
@pytest.mark.parametrize("device", DEVICES)
def test_samples(device: str, kind: Any) -> None:
    options = {"max_capacity": 256, "alpha": 0.7, "beta": 0.5} if kind is PrioritizedSliceSampler else {}
    samples = []
    for place in ("cpu", device):
        torch.manual_seed(0)
        sampler = kind(slice_len=4, fill=False, **options)
        storage = LazyTensorStorage(256, device=place)
        buffer = ReplayBuffer(storage=storage, sampler=sampler, batch_size=32)
        env = TrajId(ScriptedTorchEnv(Script(4, lengths=[[5, 2], [9], [1, 3], [6]]), device=place))
        for batch in Collector(env, frames_per_batch=64, total_frames=384, seed=0):
            index = buffer.extend(batch)
            if options:
                buffer.update_priority(index, torch.arange(1.0, 1.0 + len(index), device=place))
        torch.manual_seed(1)
        sample = buffer.sample()
        assert {leaf.device.type for leaf in sample.exclude("index").values(True, True)} == {place}
        rows = sample.select("observation", "action", ("next", "observation"), ("next", "done"))
        samples.append({key: leaf.cpu() for key, leaf in rows.items(True, True)})
    torch.testing.assert_close(samples[1], samples[0], rtol=0, atol=0)


@pytest.mark.parametrize(
    "kind", [GRUModule, LSTMModule, MinGRUModule, LRUModule, S6Module, FFMModule, DeltaNetModule]
)
@pytest.mark.parametrize("device", DEVICES)
def test_recurrent_modules(device: str, kind: Any) -> None:
    torch.manual_seed(0)
    net = kind(6, 16, in_key="observation", out_key="features")
    starts = torch.rand(200, 1) < 0.1
    batch = TensorDict({"observation": torch.randn(200, 6), "is_init": starts}, [200])
    for key, zero in net.make_tensordict_primer().defaults.items():
        batch[key] = torch.randn(200, *zero.shape)
    found = []
    for place in ("cpu", device):
        net.to(place).zero_grad()
        with set_recurrent_mode("recurrent"):
            features = net(batch.clone().to(place))["features"]
        features.square().sum().backward()
        gradients = {name: x.grad.cpu().clone() for name, x in net.named_parameters()}
        found.append((features.detach().cpu(), gradients))
    torch.testing.assert_close(found[1], found[0], rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("device", DEVICES)
def test_running_statistics(device: str) -> None:
    norms = []
    for place in ("cpu", device):
        norm = RunningNorm("observation", shape=(3,), device=place)
        for batch in rows_of("cpu", False):
            given = TensorDict({key: leaf.to(place) for key, leaf in batch.items()}, [len(batch["action"])])
            with never_waited_for(place):
                norm.update(given)
        norms.append({key: value.cpu() for key, value in norm.state_dict().items()})
    torch.testing.assert_close(norms[1], norms[0], rtol=1e-9, atol=1e-9)


@pytest.mark.filterwarnings("ignore")  # of the peer
@pytest.mark.parametrize("part", sorted(set(bench_gpu.PARTS) - {"Recurrent networks"}))
def test_the_benchmark_of_a_gpu_runs(part: str) -> None:
    """But for the Triton kernels, which tests/modules/test_triton.py interprets."""
    assert bench_gpu.PARTS[part]("cpu", bench_gpu.SIZES["cpu"]).count("\n") > 2
