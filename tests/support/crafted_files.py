"""Files of this library's own form, damaged or made up at random: the script of `test_crafted_files`.

    python crafted_files.py [MUTATIONS PER FORM] [SEED] [FORM ...]

A mutated file is an error of a known kind that names the file or folder, or it gives rows: those of the good file where
the form has checksums, any where it has none. Each takes at most two seconds of processor time and 200 MB, and nothing
is written outside of the folder. A form is read in a process of its own: what ends that process is reported.

Forms that another library parses (Parquet, HDF5, PNG, pickles, archives) are not mutated: our own checks of them are
tested with sound files that claim or name too much.
"""

import faulthandler
import json
import mmap
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, NamedTuple

import torch
from crafted_states import same
from tensordict import TensorDict

from flatroll.buffers import DiskStorage, LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.datasets import (
    BaseDatasetExperienceReplay,
    TrajectoryReplayBuffer,
    convert,
)
from flatroll.disk import Checkpoint

SECONDS, MEGABYTES = 2.0, 200
REFUSALS = (ValueError, TypeError, KeyError, UnpicklingError, FileNotFoundError)


class Form(NamedTuple):
    """A form of files.

    Args:
        write: makes a good one under a path, a file or a folder.
        read: returns what it holds.
        checked: whether every byte of it is covered by a checksum, so that it gives the good rows or none unless the
            checksums were made anew, too.
        inner: packs bytes that were changed inside of a container; None if there is none.
        log: whether it ends with its last file of rows, whichever that is: without it, it has fewer rows.
    """

    write: Callable[[Path], Any]
    read: Callable[[Path], Any]
    checked: bool = False
    inner: Callable[[bytes, random.Random], bytes] | None = None
    log: bool = False


def sealed(data: bytes, draw: random.Random) -> bytes:
    """A text of JSON with one value changed; the checksum of a manifest, or of a file of tensors, is right again."""
    begin, text, end = b"", data, b""
    if not data.startswith(b"{"):
        size = int.from_bytes(data[:8], "little")
        begin, text, end = data[:8], data[8 : 8 + size], data[8 + size :]
    try:
        value = json.loads(text)
    except ValueError:
        return changed(data, draw)
    places: list[tuple[Any, Any]] = []

    def walk(part: Any) -> None:
        for key, item in part.items() if isinstance(part, dict) else enumerate(part):
            places.append((part, key))
            if isinstance(item, dict | list) and item:
                walk(item)

    walk(value)
    part, key = draw.choice(places)
    odd = [
        None,
        True,
        -1,
        0,
        1,
        5,
        2**31,
        2**40,
        2**63,
        2**64,
        1e300,
        "",
        "x",
        "../x",
        "/x",
        "a" * 10**6,
        [],
        {},
        [[]],
    ]
    if draw.random() < 0.15:
        del part[key]
    elif draw.random() < 0.2 and isinstance(part, list):
        part.insert(0, part[key])
    else:
        part[key] = draw.choice(odd)
    text = json.dumps(value, separators=(",", ":")).encode()
    at = text.find(b'"checksum":"')
    if at >= 0:
        at += len(b'"checksum":"')
        text = text[:at] + b"00000000" + text[at + 8 :]
        if begin:
            text += b" " * (-(8 + len(text)) % 64)
        text = text[:at] + f"{zlib.crc32(text):08x}".encode() + text[at + 8 :]
    return (len(text).to_bytes(8, "little") if begin else b"") + text + end


def buffer_of(**options: Any) -> ReplayBuffer:
    storage = LazyTensorStorage(64, codec={"observation": "zstd"}, frame_stack={"stack": 2})
    sampler = SliceSampler(slice_len=2)
    return ReplayBuffer(
        storage=storage, sampler=sampler, batch_size=4, generator=torch.Generator().manual_seed(0), **options
    )


def stacked() -> TensorDict:
    row = torch.arange(20)
    stacks = row[:, None].clamp(min=1) + torch.arange(-1, 1)
    ids = {"traj_ids": row // 10}
    done = (row % 10 == 9)[:, None]
    after = {"reward": torch.ones(20, 1), "done": done}
    root = {"observation": row[:, None].expand(-1, 600).contiguous(), "stack": stacks[:, :, None].float()}
    return TensorDict({**root, "next": after, "collector": ids}, [20])


def write_buffer(path: Path, **options: Any) -> None:
    buffer = buffer_of(**options)
    buffer.extend(stacked())
    Checkpoint(path, buffer=buffer, rng=False).save(step=1)


def read_buffer(path: Path, **options: Any) -> Any:
    buffer = buffer_of(**options)
    extra = Checkpoint(path, buffer=buffer, rng=False).load()
    return extra, buffer[:].to_dict(), buffer.sample().to_dict()


def write_rows(path: Path) -> None:
    with_files = ReplayBuffer(
        storage=DiskStorage(64, path, codec={"observation": "zstd"}, frame_stack={"stack": 2}, flush_rows=5)
    )
    with_files.extend(stacked())
    with_files.storage.close()  # type: ignore[attr-defined]


def read_rows(path: Path) -> Any:
    return ReplayBuffer(storage=DiskStorage(path=path, read_only=True, verify=True))[:].to_dict()


def write_trajectories(path: Path) -> None:
    with_files = TrajectoryReplayBuffer(auto_save=True, auto_save_path=path)
    with_files.add_trajectories([{"rewards": torch.arange(6.0).view(3, 2)} for _ in range(3)])
    with_files.close()


def read_trajectories(path: Path) -> Any:
    buffer = TrajectoryReplayBuffer()
    try:
        buffer.load_checkpoint(path)
        return [buffer.trajectory(number) for number in buffer.trajectory_ids]
    finally:
        buffer.close()


def write_set(path: Path) -> None:
    convert([stacked()], path, progress=False)


FORMS: dict[str, Form] = {
    "trajectories": Form(write_trajectories, read_trajectories, True, inner=sealed),
    "buffer": Form(write_buffer, read_buffer, True, inner=sealed),
    "rows": Form(write_rows, read_rows, True, inner=sealed, log=True),
    "set": Form(write_set, lambda path: BaseDatasetExperienceReplay(path)[:].to_dict(), inner=sealed),
}


def changed(data: bytes, draw: random.Random) -> bytes:
    """The bytes with a few of them changed, in a way that damage or somebody who means harm would."""
    changes = bytearray(data)
    for _ in range(draw.choice([1, 1, 1, 2, 4])):
        if not changes:
            break
        at = draw.randrange(len(changes))
        way = draw.randrange(7)
        if way == 0:
            changes[at] ^= 1 << draw.randrange(8)
        elif way == 1:
            changes[at] = draw.choice([0, 1, 127, 128, 255, draw.randrange(256)])
        elif way == 2:  # a number, of which many are sizes, counts and places
            size = draw.choice([1, 2, 4, 8])
            number = draw.choice(
                [0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**62, 2**63, 2**64 - 1, len(data), at]
            )
            changes[at : at + size] = (number % 2 ** (8 * size)).to_bytes(
                size, draw.choice(["little", "big"])
            )  # type: ignore[arg-type]
        elif way == 3:
            del changes[at : at + draw.choice([1, 4, 64, len(changes)])]
        elif way == 4:
            piece = draw.randrange(len(changes))
            changes[at:at] = changes[piece : piece + draw.choice([1, 8, 100])]
        elif way == 5:
            piece = draw.randrange(len(changes))
            count = draw.choice([1, 8, 64])
            changes[at : at + count] = changes[piece : piece + count]
        else:
            changes[at : at + draw.choice([4, 32, 512])] = bytes(draw.choice([4, 32, 512]))
    return bytes(changes)


def spoil(path: Path, form: Form, draw: random.Random) -> str:
    """Change a file, or one of a folder; return what was done."""
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.name != "lock") or [path]
    file = draw.choice(files)
    data = file.read_bytes()
    kind = draw.random()
    if kind < 0.02:
        file.unlink()
        os.mkfifo(file)
        return f"{file.name} is a pipe"
    if kind < 0.03 and file != path:
        file.unlink()
        return f"{file.name} is gone"
    inside = form.inner is not None and kind < 0.6
    if inside and form.inner is not None:
        try:
            file.write_bytes(form.inner(data, draw))
        except RecursionError:
            inside = False
    if not inside:
        file.write_bytes(changed(data, draw))
    return f"{file.name}{' inside' * inside}"


def everything(path: Path) -> set[str]:
    return {str(one) for one in path.rglob("*")}


def check(form: Form, place: Path, spoiled: str, expected: Any) -> str:
    """Read a mutated file; return whether it was refused or read. What is wrong is an AssertionError, or ends us."""
    began, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        got = form.read(place)
    except REFUSALS as error:
        verdict = "refused"
        text = "\n".join([str(error), *getattr(error, "__notes__", [])])
        names = {str(place), *(file.name for file in place.rglob("*.rows")), spoiled.split()[0]}
        assert any(one in text for one in names), f"no file is named: {error!r}"
        assert len(text) < 2000, f"an error of {len(text)} characters"
    else:
        verdict = "read"
        shorter = form.log and spoiled.endswith("is gone")
        right = not form.checked or spoiled.endswith("inside") or shorter or same(got, expected)
        assert right, "other rows without a word"
    took = time.process_time() - began
    more = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak) / 1024
    assert took < SECONDS, f"{took:.1f} s"
    assert more < MEGABYTES, f"{more:.0f} MB"
    return verdict


def run(name: str, count: int, seed: int, at: memoryview) -> None:
    """Mutate a form ``count`` times, from number ``at[0]`` on; add how many were refused, and read, to ``at[1:]``."""
    form = FORMS[name]
    with tempfile.TemporaryDirectory() as folder:
        good, outside = Path(folder) / "good" / name, Path(folder) / "outside"
        good.parent.mkdir()
        outside.mkdir()
        form.write(good)
        expected = form.read(good)  # compiles what is compiled, too
        while (number := at[0]) < count:
            at[0] += 1
            draw = random.Random(f"{name} {seed} {number}")
            place = outside / str(number) / name
            place.parent.mkdir()
            shutil.copytree(good, place) if good.is_dir() else shutil.copy(good, place)
            spoiled = spoil(place, form, draw)
            what = f"{name} {seed} {number} {spoiled}"
            print(what, file=sys.stderr, flush=True)  # of the one that ends the process
            before = everything(Path(folder))
            try:
                at[VERDICTS.index(check(form, place, spoiled, expected))] += 1
                new = everything(Path(folder)) - before
                assert not [one for one in new if not one.startswith(str(place))], new
            except BaseException as error:
                error.add_note(what)
                raise
            shutil.rmtree(place.parent)


VERDICTS = ("number", "refused", "read")


def in_processes(name: str, count: int, seed: int) -> int:
    """Run a form in a process of its own, and in another one after each that failed; return how many failed."""
    at, wrong = memoryview(mmap.mmap(-1, 8 * len(VERDICTS))).cast("q"), 0
    while at[0] < count:
        reader, writer = os.pipe()
        child = os.fork()
        if not child:
            text = ""
            try:
                faulthandler.dump_traceback_later(150 + count, exit=True)
                run(name, count, seed, at)
            except BaseException:
                text = traceback.format_exc()
            finally:
                os.write(writer, text.encode()[-4000:])
                os._exit(bool(text))
        os.close(writer)
        with open(reader, "rb") as pipe:
            text = pipe.read().decode(errors="replace")
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        if code:
            wrong += 1
            print(text or f"{name} {seed} {at[0] - 1} ended with {code}", flush=True)
    print(name, {"refused": at[1], "read": at[2], "wrong": wrong}, flush=True)
    return wrong


def main(count: int, seed: int, names: list[str]) -> None:
    faulthandler.enable()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    wrong = sum(in_processes(name, count, seed) for name in names or FORMS)
    print("all right" if not wrong else f"{wrong} wrong")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    count, seed = [*map(int, sys.argv[1:3]), *[3, 0][len(sys.argv) - 1 :]]
    main(count, seed, sys.argv[3:])
