"""What the tests fork in place of new interpreters is like those."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from interpreters import Interpreter, OfLibraries, run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="elsewhere interpreters are new")

REPORT = """
import json, os, signal, sys, threading
print(json.dumps({
    "arguments": sys.argv,
    "path": sys.path[:3],
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "parent": os.getppid(),
    "group": os.getpgrp() == os.getpid(),
    "session": os.getsid(0) == os.getpid(),
    "descriptors": sorted(map(int, os.listdir("/proc/self/fd"))),
    "threads": len(os.listdir("/proc/self/task")),
    "signals": [repr(signal.getsignal(each)) for each in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
    "blocked": list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "name": __name__,
    "file": globals().get("__file__"),
    "input": sys.stdin.read(),
}))
"""


# Python looks for signals between two sleeps; one that comes right before a sleep does not end it.
WAITS = "import time\nwhile True: time.sleep(0.01)"


@pytest.mark.parametrize("kind", ["code", "file", "module"])
@pytest.mark.parametrize("new_session", [False, True])
def test_a_program_finds_what_a_new_interpreter_finds(kind: str, new_session: bool, tmp_path: Path) -> None:
    (tmp_path / "report.py").write_text(REPORT)
    command = {"code": ["-c", REPORT], "file": ["report.py"], "module": ["-m", "report"]}[kind]
    options: dict[str, Any] = {
        "cwd": tmp_path,
        "env": {"ONLY": "this", "PYTHONPATH": str(tmp_path), "LC_CTYPE": "C.UTF-8"},
        "start_new_session": new_session,
        "stdout": subprocess.PIPE,
        "stdin": subprocess.PIPE,
        "text": True,
    }
    found = []
    for start in (subprocess.Popen, Interpreter):
        with start([sys.executable, *command, "first", "second"], **options) as process:
            (output, _) = process.communicate("typed")
        assert process.returncode == 0
        found.append(json.loads(output))
    assert found[1] == found[0]


@pytest.mark.parametrize(
    "program",
    [
        "import sys; sys.exit(3)",
        "raise SystemExit('a text')",
        "import atexit; atexit.register(print, 'at exit'); print('before')",
        "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()",
        "import os, signal; os.kill(os.getpid(), signal.SIGKILL)",
    ],
)
def test_a_program_ends_as_in_a_new_interpreter(program: str) -> None:
    forked = run([sys.executable, "-c", program])
    new = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (forked.returncode, forked.stdout, forked.stderr) == (new.returncode, new.stdout, new.stderr)


def test_an_error_has_its_traceback() -> None:
    done = run([sys.executable, "-c", "1 / 0"])
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        run([sys.executable, "-c", "1 / 0"], check=True)


def test_ctrl_c_and_a_kill_reach_it() -> None:
    program = f"print('begun', flush=True)\n{WAITS}"
    for number in (signal.SIGINT, signal.SIGKILL):
        with Interpreter(
            [sys.executable, "-c", program],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            assert os.getpgid(process.pid) == process.pid  # at once
            assert process.stdout is not None
            process.stdout.readline()
            os.killpg(process.pid, number)
        assert process.returncode == -number


def test_a_program_that_hangs_ends_with_its_stack(tmp_path: Path) -> None:
    program = "import sys, time\ndef hangs():\n    open(sys.argv[1], 'w').close(); time.sleep(1000)\nhangs()"
    hangs = tmp_path / "hangs"

    class Awaited(Interpreter):
        """Its time begins once it hangs."""

        def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:
            while not hangs.exists():
                time.sleep(0.001)
            return super().communicate(input, timeout)

    done = run([sys.executable, "-c", program, str(hangs)], timeout=0.01, kind=Awaited)
    assert done.returncode == -signal.SIGABRT
    assert "line 3 in hangs" in done.stderr


def test_filters_of_warnings_are_those_of_the_command() -> None:
    program = "import warnings; warnings.warn('told')"
    assert run([sys.executable, "-W", "ignore", "-c", program]).stderr == ""
    assert run([sys.executable, "-W", "error", "-c", program]).returncode == 1


def test_the_libraries_are_loaded_without_anything_of_flatroll() -> None:
    program = "import sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = set(run([sys.executable, "-c", program], kind=OfLibraries).stdout.split())
    assert {"torch", "tensordict"} <= loaded
    assert not {"flatroll", "gymnasium", "numba", "jax", "torchrl", "matplotlib", "scipy", "pytest"} & loaded


def test_flatroll_is_loaded_else() -> None:
    program = "import sys; print('flatroll.buffers' in sys.modules)"
    assert run([sys.executable, "-c", program]).stdout == "True\n"


def test_random_numbers_of_two_programs_differ() -> None:
    program = "import random, numpy; print(random.random(), numpy.random.random())"
    (first, second) = (run([sys.executable, "-c", program]).stdout.split() for _ in range(2))
    assert not set(first) & set(second)


@pytest.mark.parametrize("options", [["-i"], ["-O", "-c", "pass"], ["-X", "dev", "-c", "pass"]])
def test_other_options_start_a_new_interpreter(options: list[str]) -> None:
    program = "import os, sys; print('torch' in sys.modules)"
    words = [program if word == "pass" else word for word in options]
    done = run([sys.executable, *words], stdin=subprocess.DEVNULL)
    assert done.returncode == 0 and "True" not in done.stdout


def test_a_signal_sent_at_once_is_its_own() -> None:
    for _ in range(5):
        with Interpreter(
            [sys.executable, "-c", WAITS],
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        ) as process:
            os.killpg(os.getpgid(process.pid), signal.SIGINT)
        assert process.returncode == -signal.SIGINT
