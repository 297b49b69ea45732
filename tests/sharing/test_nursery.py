"""Workers: how they start, what their errors look like in the parent, and how they end."""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import cloudpickle
import numpy as np
import pytest
import torch
from waits import wait_not_in_vain

from flatroll.sharing import Channel, Inbox, Nursery, Outbox, Worker, WorkerDied, WorkerTraceback

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks at processes through /proc")

# Else each worker would import this file, and pytest with it.
cloudpickle.register_pickle_by_value(sys.modules[__name__])


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):  # gone before the file was opened, or before it was read
        return False


def until_gone(pid: int) -> None:
    deadline = time.monotonic() + 600
    while running(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def echo(channel: Channel, **arguments: Any) -> None:
    channel.send("echo", arguments)
    channel.receive("never")


def facts(channel: Channel) -> None:
    tasks = len(os.listdir("/proc/self/task"))
    drawn = (torch.rand(1).item(), np.random.random())
    sockets = sum(entry.is_socket() for entry in Path("/proc/self/fd").iterdir())
    channel.send("facts", (os.getpgid(0) == os.getpid(), tasks, torch.get_num_threads(), drawn, sockets))


def fill(channel: Channel, count: int) -> None:
    outbox = Outbox(channel)
    for number in range(count):
        outbox.put({"step": torch.arange(number * 10, number * 10 + 10)})


def hang(channel: Channel) -> None:
    channel.send("hanging")
    time.sleep(1000)


def count_to(channel: Channel, count: int) -> None:
    for number in range(count):
        channel.send("number", number)
    channel.send("done")
    channel.receive("never")


def test_messages_that_were_read_cost_no_system_call(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = nursery.start(count_to, count=50)
    worker.receive("done")
    reads = []
    receive = socket.recv_fds
    monkeypatch.setattr(socket, "recv_fds", lambda *args: reads.append(1) or receive(*args))
    for number in range(50):
        assert worker.has_news() and worker.receive() == ("number", number)
    assert not reads
    assert not worker.has_news() and len(reads) == 2  # its channel, and the report of its end
    nursery.end([worker])


def test_a_worker_is_alone_in_its_process(nursery: Nursery) -> None:
    workers = [nursery.start(facts) for _ in range(3)]
    told = [worker.receive("facts", timeout=600) for worker in workers]
    assert all(leads and tasks == threads == sockets == 1 for leads, tasks, threads, _, sockets in told)
    assert len({drawn for *_, drawn, _ in told}) == 3  # each has random numbers of its own


def test_two_workers_fill_their_mailboxes(nursery: Nursery) -> None:
    workers = [nursery.start(fill, count=50) for _ in range(2)]
    boxes = {worker: Inbox(worker.channel) for worker in workers}
    steps: dict[Worker, list[int]] = {worker: [] for worker in workers}
    while waiting := [worker for worker in workers if len(steps[worker]) < 500]:
        for worker in nursery.wait(waiting, timeout=300):
            with boxes[worker].take() as window:
                steps[worker] += window.tables[0]["step"].tolist()
    assert all(taken == list(range(500)) for taken in steps.values())
    assert nursery.wait(workers, timeout=300)  # their end is news, too
    with pytest.raises(WorkerDied, match="ended with status 0"):
        workers[0].receive("more")


class Stubborn(Exception):
    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} {other}")


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (ValueError("wrong action"), ValueError),
        (KeyboardInterrupt("as such"), WorkerDied),
        (SystemExit("enough"), WorkerDied),
        (GeneratorExit("closed"), WorkerDied),
        (Stubborn("needs", "two"), RuntimeError),  # it cannot be unpickled
        (OSError(threading.Lock()), RuntimeError),  # nor pickled
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_an_error_in_a_worker_is_raised_in_the_parent(nursery: Nursery, error: Any, raised: Any) -> None:
    kind, text = type(error).__name__, str(error)

    def fail(channel: Channel, number: int) -> None:
        channel.send("before", number)
        made = {"Stubborn": lambda: Stubborn("needs", "two"), "OSError": lambda: OSError(threading.Lock())}
        raise made.get(kind, lambda: getattr(__import__("builtins"), kind)(text))()

    worker = nursery.start(fail, number=4, name="the fourth")
    assert worker.receive("before", timeout=600) == 4
    with pytest.raises(raised) as caught:
        worker.receive("after", timeout=600)
    expected = text.partition(" object")[0]
    assert expected in str(caught.value) and (raised is ValueError or kind in str(caught.value))
    assert caught.value.__notes__ == [f"raised in the fourth (pid {worker.pid})"]
    assert isinstance(caught.value.__cause__, WorkerTraceback)
    assert "in fail" in str(caught.value.__cause__)
    with pytest.raises(WorkerDied, match="ended with status 1"):
        worker.receive("after", timeout=600)


class NoText(Exception):
    def __str__(self) -> str:
        raise ZeroDivisionError


class NoPickle(Exception):
    def __reduce__(self) -> Any:
        raise ZeroDivisionError


def raise_here(channel: Channel, which: str, folder: str) -> None:
    if which != "OnlyThere":
        raise {"NoText": NoText, "NoPickle": NoPickle}[which]("fell over")
    sys.path.insert(0, folder)
    raise __import__("only_there").OnlyThere("fell over")


@pytest.mark.parametrize("which", ["NoText", "NoPickle", "OnlyThere"])
def test_an_error_of_any_class_arrives_with_type_text_and_traceback(
    nursery: Nursery, tmp_path: Path, which: str
) -> None:
    (tmp_path / "only_there.py").write_text("class OnlyThere(Exception): pass")
    worker = nursery.start(raise_here, which=which, folder=str(tmp_path))
    with pytest.raises(RuntimeError, match=f"^{which}: ") as caught:
        worker.receive("x", timeout=600)
    assert which == "NoText" or str(caught.value) == f"{which}: fell over"
    assert "in raise_here" in str(caught.value.__cause__)
    assert caught.value.__notes__ == [f"raised in worker {worker.name.split()[1]} (pid {worker.pid})"]


def test_a_real_time_signal_has_no_name(nursery: Nursery) -> None:
    worker = nursery.start(echo)
    worker.receive("echo", timeout=600)
    os.kill(worker.pid, signal.SIGRTMIN + 6)
    with pytest.raises(
        WorkerDied, match=rf"was killed by signal {signal.SIGRTMIN + 6} \(Real-time signal 6\)"
    ):
        worker.receive("more", timeout=600)


def test_signals_that_the_parent_blocks_are_not_blocked_in_the_helper() -> None:
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
    try:
        nursery = Nursery(preload=())
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    with nursery:
        worker = nursery.start(echo)
        worker.receive("echo", timeout=600)
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            worker.receive("more", timeout=600)


def test_another_process_is_refused_and_ends_nobody(nursery: Nursery) -> None:
    worker = nursery.start(echo)
    worker.receive("echo", timeout=600)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            worker.kill()
            nursery.close()
            nursery.start(echo)
        except RuntimeError as error:
            status = 0 if "belongs to process" in str(error) else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert nursery.wait([worker], timeout=0.2) == []
    nursery.end([worker])


def test_a_killed_worker_is_told_at_once_after_what_it_sent(
    nursery: Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("flatroll.sharing.nursery.wait_for_any", wait_not_in_vain)
    worker, silent = nursery.start(echo, x=1), nursery.start(echo)
    assert nursery.wait([worker], timeout=600) == [worker]
    silent.receive("echo", timeout=600)
    for killed in (worker, silent):
        os.kill(killed.pid, signal.SIGKILL)
    assert nursery.wait([silent], timeout=300) == [silent]
    while not worker.has_ended():
        nursery.wait([worker], timeout=600)
    assert worker.receive("echo") == {"x": 1}
    with pytest.raises(
        WorkerDied, match=rf"worker \d+ \(pid {worker.pid}\) was killed by signal 9 \(Killed: SIGKILL\)"
    ):
        worker.receive("echo", timeout=600)
    worker.send("into nothing")  # no error
    worker.kill()
    assert worker.exitcode == -signal.SIGKILL


def test_an_end_that_is_read_while_another_worker_is_looked_at_is_not_waited_for(nursery: Nursery) -> None:
    workers = [nursery.start(echo) for _ in range(3)]
    for worker in workers:
        worker.receive("echo")
    workers[0].kill()
    workers[0].report.wait()
    for worker in workers[1:]:
        assert not worker.has_news()
    assert nursery.wait(workers) == workers[:1]
    assert nursery.wait(workers) == workers[:1]  # it stays so
    nursery.end(workers, timeout=600)
    assert [worker.exitcode for worker in workers] == [-signal.SIGKILL, 0, 0]


def test_threads_with_workers_of_their_own_do_not_disturb_each_other(nursery: Nursery) -> None:
    """Both start, wait for and lose workers all the time; what one reads is never the other's."""
    left = []

    def use() -> None:
        for _ in range(40):
            worker = nursery.start(echo, x=1)
            assert worker.receive("echo", timeout=600) == {"x": 1}
            worker.kill()
            while not worker.has_ended():
                assert nursery.wait([worker], timeout=600)
            assert worker.exitcode == -signal.SIGKILL
            nursery.end([worker], timeout=0)
        left.append("done")

    threads = [threading.Thread(target=use, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert left == ["done"] * 2


def with_child(channel: Channel) -> None:
    pid = os.fork()  # as an env with processes of its own
    if pid == 0:
        time.sleep(1000)
    channel.send("child", pid)
    time.sleep(1000)


def test_the_children_of_a_killed_worker_go_with_it(nursery: Nursery) -> None:
    worker = nursery.start(with_child)
    child = worker.receive("child", timeout=600)
    worker.kill()
    with pytest.raises(
        WorkerDied, match="SIGKILL"
    ):  # although the child holds the worker's end of the channel
        worker.receive("more", timeout=600)
    until_gone(child)


def test_forty_workers_leave_no_file_and_no_process(nursery: Nursery) -> None:
    for _ in range(40):
        worker = nursery.start(hang)
        worker.receive("hanging", timeout=600)
        worker.kill()
        with pytest.raises(WorkerDied):
            worker.receive("more", timeout=600)
        worker.channel.close()
        if worker is nursery.workers[0] or _ == 1:
            files = len(os.listdir("/proc/self/fd"))
            theirs = len(os.listdir(f"/proc/{nursery.helper.pid}/fd"))
    assert len(os.listdir("/proc/self/fd")) <= files
    # The helper closes its end of a report after it has said what became of a worker, and a worker of the test before
    # may still be ending.
    deadline = time.monotonic() + 600
    while len(os.listdir(f"/proc/{nursery.helper.pid}/fd")) > theirs or children(nursery.helper.pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_what_cannot_be_sent_is_named(nursery: Nursery) -> None:
    with pytest.raises(
        TypeError, match="env and other cannot be sent to a process, because pickling fails: cannot"
    ):
        nursery.start(echo, env=threading.Lock(), fine=1, other=threading.Lock())
    locked = threading.Lock()
    with pytest.raises(TypeError, match="function cannot be sent to a process"):
        nursery.start(lambda channel: locked.acquire())


@pytest.mark.parametrize("how", ["tidy", "hanging", "stopped", "dead"])
def test_close_ends_all_in_bounded_time(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    nursery = Nursery(preload=())
    workers = [nursery.start(echo, x=1), nursery.start(hang if how == "hanging" else echo)]
    for worker in workers:
        nursery.wait([worker], timeout=600)
    if how in ("stopped", "dead"):
        os.kill(workers[1].pid, signal.SIGSTOP if how == "stopped" else signal.SIGKILL)
    if how in ("hanging", "stopped"):
        # The time is over as soon as the first one has ended, however long that takes.
        monkeypatch.setattr(
            "flatroll.sharing.nursery.monotonic", lambda: 1.0 if workers[0].report.ended else 0.0
        )
    else:
        monkeypatch.setattr("flatroll.sharing.nursery.wait_for_any", wait_not_in_vain)
    nursery.close(timeout=0.3 if how in ("hanging", "stopped") else 300)
    nursery.close()
    for worker in workers:
        until_gone(worker.pid)
    assert nursery.helper.poll() is not None
    with pytest.raises(RuntimeError, match="the process that starts workers is gone"):
        nursery.start(echo)
    assert workers[0].exitcode == 0 and (how != "tidy" or workers[1].exitcode == 0)


def test_a_killed_helper_takes_its_workers_along() -> None:
    nursery = Nursery(preload=())
    worker = nursery.start(hang)
    worker.receive("hanging", timeout=600)
    nursery.helper.kill()
    with pytest.raises(WorkerDied, match="was killed, since the process that starts workers is gone"):
        worker.receive("more", timeout=600)
    until_gone(worker.pid)
    nursery.close()


def test_a_nursery_that_is_dropped_ends_its_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    nursery = Nursery(preload=())
    worker = nursery.start(hang)
    worker.receive("hanging", timeout=600)
    process = nursery.helper
    wait = process.wait
    monkeypatch.setattr(process, "wait", lambda *limit: wait(600))  # however slow the system is
    del nursery
    assert not running(worker.pid)
    with pytest.raises(WorkerDied):
        worker.receive("more", timeout=600)


def test_preloading_what_cannot_be_forked_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "busy.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for name, kind, message in [
        ("busy", RuntimeError, '2 threads run after busy were imported.*start_method="spawn"'),
        ("no_such_module", ModuleNotFoundError, "No module named 'no_such_module'"),
    ]:
        with Nursery("fork", preload=[name]) as nursery, pytest.raises(kind, match=message) as caught:
            nursery.start(echo)
        assert caught.value.__notes__ == ["raised in the process that starts workers"]


def facts_and_windows(channel: Channel) -> None:
    facts(channel)
    fill(channel, 3)


def test_a_spawned_worker_does_the_same() -> None:
    with Nursery("spawn", num_threads=2) as nursery:
        worker = nursery.start(facts_and_windows)
        leads, _, threads, _, sockets = worker.receive("facts", timeout=600)
        assert leads and threads == 2 and sockets == 1
        box = Inbox(worker.channel)
        steps = []
        for _ in range(3):
            with box.take(timeout=300) as window:
                steps += window.tables[0]["step"].tolist()
        assert steps == list(range(30))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"start_method": "forkserver"}, "start_method must be .*, got 'forkserver'"),
        ({"num_threads": 0}, "num_threads must be"),
    ],
)
def test_arguments_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Nursery(**options)


def test_elsewhere_workers_are_spawned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with Nursery() as nursery:
        assert nursery.start_method == "spawn"


def test_closing_does_not_wait_for_imports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "slow_to_import.py").write_text("import time; time.sleep(1000)")
    monkeypatch.syspath_prepend(tmp_path)
    nursery = Nursery(preload=["slow_to_import"])
    process, calls = nursery.helper, list[str]()
    for name in ("kill", "wait"):
        call = getattr(process, name)
        monkeypatch.setattr(process, name, lambda *given, n=name, c=call: (calls.append(n), c(*given))[1])
    nursery.close()
    assert calls[:2] == ["kill", "wait"]  # and no wait before; where the system is slow, another kill follows
