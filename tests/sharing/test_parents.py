"""Programs with workers that are killed, interrupted or badly written: none leaves anything behind."""

import os
import signal
import subprocess
import sys
import textwrap
import time
from contextlib import suppress
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes through /proc")

SOURCE = Path(__file__).parents[2] / "src"

# No guard of __main__, a lambda, and an exception class of the program: all of it must work in a worker.
HEAD = f"""
import sys
sys.path.insert(0, {str(SOURCE)!r})
import os, signal, threading, time
from flatroll.sharing import *

class OwnError(Exception):
    pass

def long_step(channel):
    channel.send("pid", os.getpid())
    time.sleep(1000)

def busy(channel):
    channel.send("pid", os.getpid())
    while True:
        pass

def nursery_of(*functions, method="fork", then=lambda: None):
    nursery = Nursery(method, preload=())
    workers = [nursery.start(function) for function in functions]
    then()
    print(nursery.helper.pid, *(worker.receive("pid", timeout=600) for worker in workers), flush=True)
    return nursery, workers
"""

KILLED = {
    "in a long step": "kept = nursery_of(long_step, busy); time.sleep(1000)",
    "with fresh interpreters": "kept = nursery_of(long_step, busy, method='spawn'); time.sleep(1000)",
    "while a forked child holds the sockets": """
        def fork():
            if os.fork() == 0:
                time.sleep(1000); os._exit(0)
        kept = nursery_of(long_step, then=fork)
        time.sleep(1000)
        """,
}

ENDS = {
    "a forgotten close": "kept = nursery_of(long_step)",
    "an error": "kept = nursery_of(busy); raise SystemExit(0)",
    "an exception class of the program": """
        def fail(channel): raise OwnError("mine")
        nursery, _ = nursery_of()
        try: nursery.start(fail).receive("x", timeout=600)
        except OwnError as error: assert str(error) == "mine"
        else: raise AssertionError
        """,
    "a lambda": """
        nursery, _ = nursery_of()
        assert nursery.start(lambda channel: channel.send("x", 5)).receive("x", timeout=600) == 5
        """,
    "a fork that closes its copy": """
        nursery, workers = nursery_of(long_step)
        if os.fork() == 0:
            nursery.close(); os._exit(0)
        os.wait()
        assert nursery.wait(workers, timeout=0.2) == []
        """,
}


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or before it was read
        return False


def start(program: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-W", "error", "-c", HEAD + textwrap.dedent(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def assert_gone(pids: list[int]) -> None:
    deadline = time.monotonic() + 600
    while (left := [pid for pid in pids if running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not left


@pytest.mark.parametrize("name", KILLED)
def test_after_a_killed_parent_nothing_is_left(name: str) -> None:
    with start(KILLED[name]) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
        process.wait()
        try:
            assert len(pids) >= 2
            assert_gone(pids)
        finally:
            with suppress(ProcessLookupError):  # else a forked child is there
                os.killpg(process.pid, signal.SIGKILL)


def test_a_killed_parent_and_helper_leave_no_worker() -> None:
    with start("kept = nursery_of(long_step, busy); time.sleep(1000)") as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        os.kill(process.pid, signal.SIGSTOP)  # so that it cannot do anything about it
        os.kill(pids[0], signal.SIGKILL)
        process.kill()
        assert_gone(pids)


@pytest.mark.parametrize("name", ENDS)
def test_a_program_ends_and_its_workers_with_it(name: str) -> None:
    with start(ENDS[name]) as process:
        output, errors = process.communicate(timeout=600)
    assert (process.returncode, errors) == (0, "")
    assert_gone([int(pid) for pid in output.split()])


def test_ctrl_c_is_the_parent_s_alone() -> None:
    program = """
        try:  # around all of it: the signal comes as soon as the numbers are printed
            nursery, workers = nursery_of(long_step, busy)
            workers[0].receive("never")
        except KeyboardInterrupt: print("interrupted")
        """
    with start(program) as process:
        assert process.stdout is not None
        pids = [int(pid) for pid in process.stdout.readline().split()]
        os.killpg(process.pid, signal.SIGINT)
        output, errors = process.communicate(timeout=600)
    assert (process.returncode, output, errors) == (0, "interrupted\n", "")
    assert_gone(pids)


def test_a_parent_that_is_killed_while_the_helper_imports(tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(1000)")
    program = f"""
        sys.path.insert(0, {str(tmp_path)!r})
        kept = Nursery(preload=["slow_to_import"])
        if os.fork() == 0:  # which holds a copy of the parent's end of the channel
            time.sleep(8); os._exit(0)
        print(kept.helper.pid, flush=True)
        time.sleep(1000)
        """
    with start(program) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        process.kill()
        process.wait()
        assert_gone([pid])


def test_too_few_file_descriptors_are_named() -> None:
    program = """
        import resource
        nursery = Nursery(preload=())
        nursery.start(lambda channel: channel.receive("never"))
        used = len(os.listdir("/dev/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 2, 4096))
        try: nursery.start(long_step)
        except OSError as error: print(error)
        """
    with start(program) as process:
        output, errors = process.communicate(timeout=600)
    assert "8 more file descriptors are needed" in output and "ulimit -n" in output, (output, errors)


def test_the_fence_of_weights_is_remade_after_a_fork() -> None:
    """A thread of the parent may be inside when another one forks."""
    program = """
        import torch
        from flatroll.sharing import weights
        shared = SharedWeights({"a": torch.zeros(3)})
        with weights._FENCE:
            pid = os.fork()
            if pid == 0:
                signal.alarm(600)
                shared.publish({"a": torch.ones(3)})
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
        """
    with start(program) as process:
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
