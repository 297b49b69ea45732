"""Processes that save and are killed, and readers beside them.

    python kill_savers.py [KILLS]

Each kill must leave the acknowledged version or the one after it, whole; a reader that looks all the while must see
whole versions only, never an older one after a newer one.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path

import torch
from disk_recorder import check_rows, rows

from flatroll.disk import Folder


def save_for_ever(path: Path, acknowledge: int) -> None:
    """Go on from what is there; tell the number of each version once it is published."""
    with Folder(path, write=True, segment_bytes=4000) as folder:
        if folder.versions():
            folder.load()
        while True:
            first, count = folder.end, 2 + folder.end % 7
            folder.append(rows(first, first + count), first)
            version = folder.publish(
                first + count, {"state": torch.full((9,), first)}, head=max(0, first - 40)
            )
            os.write(acknowledge, version.number.to_bytes(8, "little"))


def check(path: Path, least: int, most: int | None = None) -> int:
    """The newest version is whole, and between two numbers."""
    folder = Folder(path)
    loaded, got = folder.load_with(lambda loaded: (loaded, folder.read_rows()))
    number = loaded.version.number
    assert number >= least and (most is None or number <= most), (number, least, most)
    assert loaded.json == loaded.end, loaded
    check_rows(got, loaded.head, loaded.end)
    return number


class Reader(threading.Thread):
    """Looks at a folder until it is told to stop; ``checked`` counts versions, ``error`` is what went wrong."""

    def __init__(self, path: Path, first: int) -> None:
        super().__init__()
        self.path, self.newest, self.checked = path, first, 0
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                if Folder(self.path).versions():
                    self.newest = check(self.path, self.newest)
                    self.checked += 1
        except BaseException as error:
            self.error = error


def kill_once(path: Path, acknowledged: int, seconds: float) -> tuple[int, int]:
    """Let a process save for a while and kill it; the newest version it told of, and versions read meanwhile."""
    mine, its = os.pipe()
    child = os.fork()
    if not child:
        os.close(mine)
        try:
            save_for_ever(path, its)
        finally:
            os._exit(1)
    os.close(its)
    try:
        told = os.read(mine, 8)  # it works
        reader = Reader(path, int.from_bytes(told, "little"))
        reader.start()
        time.sleep(seconds)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    reader.ended.set()
    reader.join()
    if reader.error is not None:
        raise reader.error
    while True:  # what was told before the end
        more = os.read(mine, 8)
        if not more:
            break
        told = more
    os.close(mine)
    assert told, "the process ended by itself"
    number = int.from_bytes(told, "little")
    assert number > acknowledged
    return number, reader.checked


def main(kills: int, seed: int = 0) -> dict[str, int]:
    """Kill so many processes; counts."""
    draw = random.Random(seed)
    counts = {"kills": kills, "acknowledged": 0, "one newer": 0, "versions": 0, "read beside": 0}
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "folder"
        newest = 0
        for kill in range(kills):
            if kill % 20 == 19:
                shutil.rmtree(path)
                newest = 0
            number, checked = kill_once(path, newest, draw.random() * 0.1)
            before, newest = newest, check(path, number, number + 1)
            counts["versions"] += newest - before
            counts["acknowledged" if newest == number else "one newer"] += 1
            counts["read beside"] += checked
    return counts


if __name__ == "__main__":
    print(main(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
