"""Files of data sets in the real forms that published sets have, tiny."""

import gzip
import io
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


def write_d4rl(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        file["observations"] = np.arange(14, dtype=np.float32).reshape(7, 2)
        file["actions"], file["rewards"] = np.ones((7, 1), np.float32), np.arange(7.0)
        file["terminals"] = np.array([0, 0, 1, 0, 0, 0, 0], bool)
        file["timeouts"] = np.array([0, 0, 0, 0, 1, 0, 0], bool)
        file["infos/qpos"] = np.zeros((7, 3))


ENDS = {0: [4, 5, 11], 7: [2, 8]}  # of each part of 12 steps, the last steps of games


def write_atari(folder: Path) -> None:
    for part, ends in ENDS.items():
        terminal = np.zeros(12, np.uint8)
        terminal[ends] = 1
        arrays = {
            "observation": (np.arange(12, dtype=np.uint8) + 1 + 100 * (part > 0))[:, None, None]
            * np.ones((1, 6, 5), np.uint8),
            "action": np.arange(12, dtype=np.int32),
            "reward": np.arange(12, dtype=np.float32),
            "terminal": terminal,
        }
        for name, array in arrays.items():
            with gzip.open(folder / f"$store$_{name}_ckpt.{part}.gz", "wb") as file:
                np.save(file, array)
        with gzip.open(folder / f"add_count_ckpt.{part}.gz", "wb") as file:
            np.save(file, np.array(12))


def trajectory(length: int, *, done: bool = True) -> dict[str, Any]:
    dones = np.zeros(length, bool)
    dones[-1] = done
    return {
        "observations": np.arange(length + 1)[:, None] * np.ones((1, 3), np.uint8),
        "actions": np.arange(length),
        "rewards": np.ones(length, np.float32),
        "dones": dones,
    }


def write_archive(path: Path, members: dict[str, bytes | tarfile.TarInfo]) -> Path:
    with tarfile.open(path, "w:xz") as archive:
        for name, content in members.items():
            if isinstance(content, tarfile.TarInfo):
                archive.addfile(content)
                continue
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return path


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array(value, dtype=object), allow_pickle=True)
    return file.getvalue()


def pixels(length: int) -> dict[str, Any]:
    flags = np.zeros((3, length), bool)
    flags[0, 0] = flags[1, -1] = flags[2, -1] = True
    steps = np.arange(length)
    return {
        "image": (steps[:, None, None, None] * np.ones((1, 8, 8, 3))).astype(np.uint8),
        "action": steps[:, None].astype(np.float32),
        "reward": steps.astype(np.float32),
        "position": steps[:, None] / 2,
        "is_first": flags[0],
        "is_last": flags[1],
        "is_terminal": flags[2],
    }


def write_trials(path: Path) -> None:
    import h5py

    with h5py.File(path, "w") as file:
        for trial, length in {"Trial0": 3, "Trial1": 2, "Trial10": 1}.items():
            group = file.create_group(trial)
            group["observations"] = np.arange(1, length + 1, dtype=np.float32)[:, None]
            group["env_infos/qpos"] = np.arange(1, length + 1, dtype=np.float32)[:, None] * 10
            group["actions"], group["rewards"] = np.ones((length, 2)), np.ones(length)
            group["done"] = np.arange(length) == (length - 1 if trial == "Trial0" else -1)


def rlds(lengths: tuple[int, ...] = (3, 2)) -> Iterator[dict[str, Any]]:
    for length in lengths:
        yield {
            "steps": [
                {
                    "observation": {"state": np.float32([t]), "text": "reach"},
                    "action": np.float32([t, t]),
                    "reward": np.float32(t),
                    "is_first": t == 0,
                    "is_last": t == length,
                    "is_terminal": t == length and length == 3,
                    "language_instruction": b"reach",
                }
                for t in range(length + 1)
            ]
        }
