"""The backend "triton": its kernels in Triton's interpreter and, where there is one, on a GPU; and what it refuses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode
from flatroll.modules.backends.on_triton import scan as triton_scan

KEYS = {"in_key": "observation", "out_key": "features", "recurrent_backend": "triton"}
CASES = Path(__file__).with_name("triton_cases.py")


def printed(*command, **environment):
    """What a process of its own prints: triton reads the environment when it is imported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    source = str(Path(__file__).parents[2] / "src")
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        check=False,
        env={**kept, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", **environment},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.triton
def test_outputs_states_and_gradients_in_the_interpreter():
    # Triton's interpreter before 3.7 turns arrays of one number into an int; torch warns on Python 3.13.0 alone.
    of_triton = "ignore:Conversion of an array with ndim:DeprecationWarning"
    of_torch = "ignore:Guards may run slower on Python 3.13.0:RuntimeWarning"
    found = printed("-W", "error", "-W", of_triton, "-W", of_torch, CASES, "cpu", TRITON_INTERPRET="1")
    assert len(found) > 25
    assert not {case: off for case, off in found.items() if not off <= 1}


@pytest.mark.triton
@pytest.mark.cuda
def test_outputs_states_and_gradients_on_a_gpu():
    found = printed(CASES, "cuda")
    assert not {case: off for case, off in found.items() if not off <= 1}


COMPILE = """
import json, torch, triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from flatroll.kernels.recurrent import gru_triton
from flatroll.kernels.recurrent import lstm_triton
from flatroll.modules.backends.on_triton.scan import kernel_options

NUMBERS = {"count": "*i64", "firsts": "*i64", "lengths": "*i32", "hidden": "i32"}
NUMBERS |= dict.fromkeys(("initial_stride", "cell_stride"), "i32")
TYPES = {torch.float32: ("*fp32", "*fp32"), torch.float64: ("*fp64", "*fp64"), torch.bfloat16: ("*bf16", "*fp32")}

def shared_memory(kernel, dtype, **used):
    given = {**kernel_options(512, dtype), **used}
    signature, constants, aligned = {}, {}, {}
    for place, parameter in enumerate(kernel.params):
        if parameter.is_constexpr:
            signature[parameter.name], constants[place,] = "constexpr", given.pop(parameter.name)
            continue
        pointer = TYPES[dtype][parameter.name.startswith("carry")]
        signature[parameter.name] = NUMBERS.get(parameter.name, pointer)
        aligned[place,] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, aligned)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=given)
    assert "ld.global.nc" not in compiled.asm["ptx"]  # states are written and read by one launch
    assert compiled.asm["cubin"]
    return compiled.metadata.shared

grads = {"GRAD": True, "GRAD_CELL": True}
found = {
    "GRU": shared_memory(gru_triton.gru_forward, torch.float32),
    "GRU backward": shared_memory(gru_triton.gru_backward, torch.float32),
    "LSTM": shared_memory(lstm_triton.lstm_forward, torch.float32),
    "LSTM backward": shared_memory(lstm_triton.lstm_backward, torch.float32, **grads),
}
for dtype in (torch.float64, torch.bfloat16):
    found[str(dtype)] = shared_memory(gru_triton.gru_backward, dtype)
print(json.dumps(found))
"""


@pytest.mark.triton
def test_the_kernels_compile_without_a_gpu(tmp_path):
    """What the interpreter forgives, the compiler does not; and shared memory suffices on small devices, too."""
    found = printed("-W", "error", "-c", COMPILE, TRITON_CACHE_DIR=str(tmp_path))
    assert max(found.values()) <= 99 * 1024


@pytest.mark.parametrize("seed", range(5))
def test_runs_are_listed_longest_first(seed):
    starts = torch.rand(40, generator=torch.Generator().manual_seed(seed)) < 0.1 * (seed + 1)
    starts[0] = True
    count, firsts, lengths = triton_scan.run_list(starts)
    first = starts.nonzero().squeeze(1)
    expected = first.diff(append=torch.tensor([40]))
    assert count == len(first) and not lengths[count:].any()
    assert lengths[:count].tolist() == sorted(expected.tolist(), reverse=True)
    assert dict(zip(firsts[:count].tolist(), lengths.tolist(), strict=False)) == dict(
        zip(first.tolist(), expected.tolist(), strict=True)
    )


@pytest.mark.triton
@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
def test_tensors_off_the_gpu_are_refused(kind):
    module = kind(3, 5, **KEYS)
    batch = TensorDict({"observation": torch.zeros(4, 3), "is_init": torch.ones(4, 1, dtype=torch.bool)}, [4])
    batch.update(module.make_tensordict_primer().expand(4))
    with (
        set_recurrent_mode("recurrent"),
        pytest.raises(ValueError, match=r"needs CUDA tensors, got rows on cpu: move"),
    ):
        module(batch)
    assert module(batch)["features"].shape == (4, 5)  # single steps need no kernel


def test_refused_when_built(monkeypatch):
    with pytest.raises(ValueError, match=r"recurrent_backend='triton' does not support bidirectional"):
        GRUModule(3, 5, bidirectional=True, **KEYS)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r'needs triton: pip install "flatroll\[triton\]"'):
        GRUModule(3, 5, **KEYS)


def test_refused_rows():
    net = torch.nn.GRU(3, 5, batch_first=True)
    with pytest.raises(ValueError, match=r"at least one row, got batch size \[0\]"):
        triton_scan.in_runs(net, torch.zeros(0, 3), (torch.zeros(0, 1, 5),), torch.zeros(0, dtype=torch.bool))
    with pytest.raises(TypeError, match=r"rows must be one of torch.float32, .*, got torch.int64"):
        triton_scan.in_runs(net, torch.zeros(1, 3).long(), (torch.zeros(1, 1, 5),), torch.ones(1).bool())


def test_products_follow_the_switch_of_torch():
    kept = torch.get_float32_matmul_precision()
    try:
        for name, expected in (("highest", "ieee"), ("high", "tf32")):
            torch.set_float32_matmul_precision(name)
            assert triton_scan.precision() == expected
    finally:
        torch.set_float32_matmul_precision(kept)
