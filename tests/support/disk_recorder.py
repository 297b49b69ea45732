"""A recorder of disk operations, and the states in which a crash can leave a folder.

    python disk_recorder.py [STRIDE]

runs every save of `scenario`, and checks each STRIDE-th state (default: all) that a kill or a power loss can leave.
"""

import itertools
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from flatroll.disk import DamagedFileError, Folder, Ragged, files

Operation = tuple[Any, ...]
Contents = dict[str, bytes]


class Recorder:
    """Carries out the operations of `flatroll.disk.files` and writes them down; ``fail(operation)`` may raise instead.

    Use it as a context: inside, the functions of the module are replaced. With ``only``, operations in other folders
    are carried out alone.
    """

    REPLACED = ("create", "write", "sync", "close", "rename", "link", "remove", "sync_folder", "sync_all")

    def __init__(
        self, fail: Callable[[Operation], None] = lambda operation: None, only: Path | None = None
    ) -> None:
        self.operations: list[Operation] = []
        self.only = only
        self.paths: dict[int, str] = {}
        self.fail = fail
        self.real = {name: getattr(files, name) for name in self.REPLACED}

    def __enter__(self) -> "Recorder":
        for name in self.REPLACED:
            setattr(files, name, getattr(self, name))
        return self

    def __exit__(self, *error: object) -> None:
        for name, function in self.real.items():
            setattr(files, name, function)

    def mark(self, *what: Any) -> None:
        """Note what the program has just been told, such as that a save returned."""
        self.operations.append(("mark", *what))

    def note(self, *operation: Any) -> None:
        self.operations.append(operation)
        self.fail(operation)

    def note_in(self, folder: Path, *operation: Any) -> None:
        if self.only in (None, folder):
            self.note(*operation)

    def create(self, path: Path) -> int:
        self.note_in(path.parent, "create", path.name)
        descriptor: int = self.real["create"](path)
        if self.only in (None, path.parent):
            self.paths[descriptor] = path.name
        return descriptor

    def write(self, descriptor: int, data: Any) -> None:
        if descriptor in self.paths:
            self.note("write", self.paths[descriptor], bytes(data))
        self.real["write"](descriptor, data)

    def sync(self, descriptor: int) -> None:
        if descriptor in self.paths:  # else a file that somebody else has written, and is linked
            self.note("sync", self.paths[descriptor])

    def close(self, descriptor: int) -> None:
        self.real["close"](descriptor)
        if self.paths.pop(descriptor, None):
            self.note("close", None)

    def rename(self, source: Path, target: Path) -> None:
        self.note_in(target.parent, "rename", source.name, target.name)
        self.real["rename"](source, target)

    def link(self, source: Path, target: Path) -> None:
        """What the file holds may not be on the disk yet."""
        self.note_in(target.parent, "link", target.name, source.read_bytes())
        self.real["link"](source, target)

    def remove(self, path: Path) -> None:
        self.note_in(path.parent, "remove", path.name)
        self.real["remove"](path)

    def sync_folder(self, path: Path) -> None:
        self.note_in(path, "sync_folder", path.name)

    def sync_all(self, path: Path) -> None:
        self.note_in(path.parent, "sync", path.name)


class Disk:
    """What a folder holds in memory and on the disk, as operations go by."""

    def __init__(self) -> None:
        self.written: list[bytearray] = []  # by number of the file
        self.synced: list[bytes] = []
        self.names: dict[str, int] = {}
        self.durable: dict[str, int] = {}
        self.changes: list[Operation] = []  # of names, since the folder was synced

    def apply(self, operation: Operation) -> None:
        kind, *values = operation
        if kind == "create":
            self.written.append(bytearray())
            self.synced.append(b"")
            self.names[values[0]] = len(self.written) - 1
            self.changes.append(("set", values[0], self.names[values[0]]))
        elif kind == "link":
            self.written.append(bytearray(values[1]))
            self.synced.append(b"")
            self.names[values[0]] = len(self.written) - 1
            self.changes.append(("set", values[0], self.names[values[0]]))
        elif kind == "write":
            self.written[self.names[values[0]]] += values[1]
        elif kind == "sync":
            number = self.names[values[0]]
            self.synced[number] = bytes(self.written[number])
        elif kind == "rename":
            self.names[values[1]] = self.names.pop(values[0])
            self.changes.append(("move", values[0], values[1], self.names[values[1]]))
        elif kind == "remove":
            del self.names[values[0]]
            self.changes.append(("unset", values[0]))
        elif kind == "sync_folder":
            self.durable, self.changes = dict(self.names), []

    def killed(self) -> Contents:
        """What is there if the process dies now."""
        return {name: bytes(self.written[number]) for name, number in self.names.items()}

    def after_power_loss(self, most: int) -> Iterator[Contents]:
        """What can be there if the power goes now: any subset of new names, unsynced bytes in any of five forms."""
        changes = self.changes[-most:]
        for flags in itertools.product([True, False], repeat=len(changes)):
            names = dict(self.durable)
            for change in [
                *self.changes[: len(self.changes) - len(changes)],
                *itertools.compress(changes, flags),
            ]:
                if change[0] == "unset":
                    names.pop(change[1], None)
                else:
                    if change[0] == "move":
                        names.pop(change[1], None)
                    names[change[-2]] = change[-1]
            unsynced = [n for n in set(names.values()) if bytes(self.written[n]) != self.synced[n]]
            for damage in DAMAGES if unsynced else DAMAGES[:1]:
                yield {
                    name: damage(bytes(self.written[n]), self.synced[n]) if n in unsynced else self.synced[n]
                    for name, n in names.items()
                }


DAMAGES: list[Callable[[bytes, bytes], bytes]] = [
    lambda written, synced: written,
    lambda written, synced: synced,
    lambda written, synced: synced + written[len(synced) :][: (len(written) - len(synced)) // 2],
    lambda written, synced: synced + bytes(len(written) - len(synced)),
    lambda written, synced: written[:-1],
]


def states(operations: list[Operation], most: int = 6) -> Iterator[tuple[str, list[Operation], Contents]]:
    """Each state that a crash during the operations can leave, with its kind and the marks before it, once."""
    disk, marks, seen = Disk(), [], set()
    for operation in operations:
        before = {"kill": [disk.killed()], "power": disk.after_power_loss(most)}
        if operation[0] == "write" and len(operation[2]) > 1:
            half = {
                **disk.killed(),
                operation[1]: disk.killed()[operation[1]] + operation[2][: len(operation[2]) // 2],
            }
            before["kill"] = [disk.killed(), half]
        for kind, found in before.items():
            for contents in found:
                # Marks only add to what must be there, so a state seen before new marks is another one after them.
                key = (kind == "power", len(marks), tuple(sorted((n, hash(c)) for n, c in contents.items())))
                if key not in seen:
                    seen.add(key)
                    yield kind, list(marks), contents
        if operation[0] == "mark":
            marks.append(operation)
        disk.apply(operation)
    yield "kill", list(marks), disk.killed()
    for contents in disk.after_power_loss(most):
        yield "power", list(marks), contents


def rows(first: int, end: int, epoch: int = 0) -> dict[str, Any]:
    """Rows that say which they are; edited ones also how often they were edited."""
    number = torch.arange(first, end)
    lengths = number % 3
    return {
        "number": number,
        "next/flag": number % 2 == 0,
        "epoch": torch.full((end - first,), epoch),
        "wide": number[:, None].double() + torch.arange(5) / 8,
        "words": Ragged(number.repeat_interleave(lengths).to(torch.int16), lengths),
    }


def check_rows(got: dict[str, Any], first: int, end: int, epochs: dict[int, int] | None = None) -> None:
    """All columns are those of `rows`."""
    for name, column in rows(first, end).items():
        if name == "epoch":
            expected = torch.tensor([(epochs or {}).get(row, 0) for row in range(first, end)])
            assert torch.equal(got[name], expected), (name, first, end)
        elif isinstance(column, Ragged):
            assert torch.equal(got[name].values, column.values), (name, first, end)
            assert torch.equal(got[name].lengths, column.lengths), (name, first, end)
        else:
            assert torch.equal(got[name], column), (name, first, end)


def saves(recorder: Recorder, path: Path, *, sync: bool, count: int, log: bool = True) -> None:
    """Versions of growing rows, with merges, drops and edits; marks tell when each begins and when it returned."""
    head = end = 0
    epochs: dict[int, int] = {}
    with Folder(path, write=True, sync=sync, log=log, segment_bytes=1500) as folder:
        for number in range(1, count + 1):
            added, head = 3 + number * 5 % 11, max(head, end - 24)
            plan = {"head": head, "end": end + added, "epochs": dict(epochs)}
            edited = folder.segments[-1] if number % 4 == 0 else None
            if edited:
                plan["epochs"] |= dict.fromkeys(range(edited.first, edited.end), number)
            recorder.mark("begin", number, plan)
            if edited:
                folder.replace(rows(edited.first, edited.end, number), edited.first)
            folder.append(rows(end, end + added), end)
            folder.publish(plan["end"], {"state": torch.full((7,), number)}, head=head)
            end, epochs = plan["end"], plan["epochs"]
            recorder.mark("done", number)


def links(recorder: Recorder, path: Path, *, count: int) -> None:
    """Versions of the rows of another folder, which never syncs; its files are linked, merged ones anew."""
    head = end = 0
    with (
        Folder(path.parent / "linked", write=True, sync=False, segment_bytes=1500) as source,
        Folder(path, write=True, log=False) as folder,
    ):
        for number in range(1, count + 1):
            added, head = 3 + number * 5 % 11, max(head, end - 24)
            plan = {"head": head, "end": end + added, "epochs": {}}
            source.append(rows(end, end + added), end)
            source.drop_before(head)
            recorder.mark("begin", number, plan)
            folder.adopt(source.segments)
            folder.publish(plan["end"], {"state": torch.full((7,), number)}, head=head)
            end = end + added
            recorder.mark("done", number)


def check_version(path: Path, marks: list[Operation], *, exact: bool) -> int:
    """The folder holds the last acknowledged version or the one that was under way; returns its number, 0 for none."""
    plans = {mark[2]: mark[3] for mark in marks if mark[1] == "begin"}
    acknowledged = max((mark[2] for mark in marks if mark[1] == "done"), default=0)
    try:
        folder = Folder(path)
        loaded, got = folder.load_with(lambda loaded: (loaded, folder.read_rows()))
    except FileNotFoundError:
        assert acknowledged == 0 or not exact, f"version {acknowledged} is gone"
        return 0
    except DamagedFileError:
        assert not exact
        return 0
    number = loaded.version.number
    assert number in (acknowledged, acknowledged + 1) or (not exact and number <= acknowledged + 1), number
    plan = plans[number]
    assert (loaded.head, loaded.end, loaded.json) == (plan["head"], plan["end"], plan["end"])
    assert torch.equal(loaded.tensors["state"], torch.full((7,), number))
    check_rows(got, loaded.head, loaded.end, plan["epochs"])
    return number


def log(recorder: Recorder, path: Path, *, count: int) -> None:
    """Rows without versions: appended, merged and dropped."""
    head = end = 0
    with Folder(path, write=True, segment_bytes=1200) as folder:
        for number in range(1, count + 1):
            added = 2 + number * 7 % 9
            recorder.mark("begin", number, end + added)
            folder.append(rows(end, end + added), end)
            end += added
            recorder.mark("done", number, end)
            if number % 3 == 0:
                head = max(head, end - 20)
                recorder.mark("drop", number, head)
                folder.drop_before(head)


def check_log(path: Path, marks: list[Operation]) -> int:
    """All acknowledged rows are there, but those dropped, and of the append under way all or none."""
    known = {
        kind: max((m[3] for m in marks if m[1] == kind), default=0) for kind in ("begin", "done", "drop")
    }
    folder = Folder(path)
    found = folder.recover()
    assert found.stop in (known["begin"], known["done"]), (found, known)
    assert found.start <= known["drop"], (found, known)
    if found:
        check_rows(folder.read_rows(), found.start, found.stop)
    return found.stop


def go_on(path: Path) -> None:
    """A writer goes on from what is there."""
    with Folder(path, write=True) as folder:
        if folder.versions():
            folder.load()
        else:
            folder.recover()
        first = folder.end
        folder.append(rows(first, first + 4))
        folder.publish(first, {})
    assert Folder(path).load().end == first + 4
    assert not [name for name in os.listdir(path) if name.endswith(files.TEMPORARY)]


def check_all(stride: int, *, count: int = 13, most: int = 6) -> dict[str, int]:
    """Record and check; returns how many states there were of each kind, and of how many nothing could be loaded."""
    kinds = ("versions", "versions, no log", "links", "unsynced", "log")
    counts = dict.fromkeys([*kinds, "unsynced, none to load"], 0)
    warnings.simplefilter("ignore", RuntimeWarning)  # of damage, which is what most of the states are
    memory = "/dev/shm" if os.path.isdir("/dev/shm") else None  # nothing here depends on a real disk
    with tempfile.TemporaryDirectory(dir=memory) as place:
        for kind in kinds:
            path = Path(place) / kind
            with Recorder(only=path) as recorder:
                if kind == "links":
                    links(recorder, path, count=count)
                elif kind == "log":
                    log(recorder, path, count=2 * count)
                else:
                    saves(recorder, path, sync=kind != "unsynced", log=kind == "versions", count=count)
            for i, (crash, marks, contents) in enumerate(states(recorder.operations, most)):
                if i % stride:
                    continue
                state = Path(place) / "state"
                shutil.rmtree(state, ignore_errors=True)
                state.mkdir()
                for name, data in contents.items():
                    (state / name).write_bytes(data)
                counts[kind] += 1
                if kind == "log":
                    check_log(state, marks)
                else:
                    exact = kind != "unsynced" or crash == "kill"
                    number = check_version(state, marks, exact=exact)
                    counts["unsynced, none to load"] += number == 0 and not exact
                if i % (7 * stride) == 0 and (kind != "unsynced" or crash == "kill"):
                    go_on(state)
    return counts


if __name__ == "__main__":
    print(check_all(int(sys.argv[1]) if len(sys.argv) > 1 else 1))
