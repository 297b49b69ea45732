"""What takes a device gives the CPU's numbers on an emulated one, `chip`, in processes of their own."""

import os
import subprocess
import sys
from pathlib import Path

import chip
import pytest

ROOT = Path(__file__).parent.parent
#: What a process runs; each loads all files of the folder, since one of them looks at the cases of the others.
PARTS = {
    "buffers": ["tests/on_chip", "-k", "test_buffers"],
    "collecting": ["tests/on_chip", "-k", "test_collecting"],
    "learning": ["tests/on_chip", "-k", "test_learning"],
    "others": [
        "tests/test_devices.py",
        "tests/on_chip",
        "-k",
        "not (test_buffers or test_collecting or test_learning)",
    ],
}
#: Runs on the CPU.
LEFT_OUT = "tests/test_devices.py::test_the_benchmark_of_a_gpu_runs"
#: The emulator itself resizes results that torch's operators pass to it.
IGNORED = "ignore:An output with one or more elements was resized:UserWarning"


@pytest.mark.parametrize("plugin", ["on_chip", "on_chip_as_cuda"])
@pytest.mark.parametrize("part", PARTS)
def test_on_the_emulated_device(plugin: str, part: str) -> None:
    """As a device that flatroll has never heard of, and in the place of CUDA."""
    if (lacking := chip.lacks()) is not None:
        pytest.skip(f"this torch has no {lacking}")

    paths = [str(ROOT / name) for name in ("tests/support", "src", ".")]
    options = ["-q", "-p", plugin, "-p", "no:cacheprovider", "-W", IGNORED, "--deselect", LEFT_OUT]
    command = [sys.executable, "-m", "pytest", *options, *PARTS[part]]
    run = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    assert " passed" in run.stdout
