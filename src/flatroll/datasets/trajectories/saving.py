"""Checkpoints of several ranks, and crash-safe loading of trajectories."""

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from flatroll.datasets.folders import remove_folder
from flatroll.datasets.trajectories.rows import TrajectoryRecord
from flatroll.datasets.trajectories.sources import (
    LOADING,
    NOTES,
    RANKS,
    SavedTrajectories,
    State,
    rank_folder,
    rank_versions,
)
from flatroll.disk import Folder, Version, column_name, files
from flatroll.disk.manifest import manifest_name


class RankSave:
    """A running save by several ranks.

    Each rank saves to its own folder; then rank 0 publishes a version that names theirs. A rank's version that is newer
    than the named one belongs to an unfinished save. It is removed before the next save begins, so that the folder
    still keeps the named one.

    Args:
        path: of the folder.
        rank: which one this is.
        ranks: how many save.
        barrier: returns once all ranks have called it.
        known: the version of the folder that this run saved or loaded last.

    Raises:
        FileExistsError: the folder has a version that this run has neither saved nor loaded.
    """

    def __init__(
        self, path: Path, rank: int, ranks: int, barrier: Callable[[], Any], known: Version | None
    ) -> None:
        self.path = path
        self.rank = rank
        self.ranks = ranks
        self.barrier = barrier
        self.known = known
        self.own = rank_folder(path, rank, ranks)
        self.named: list[Version] = []

        if path.is_dir() and (folder := Folder(path)).versions():
            loaded = folder.load()
            if loaded.version != known:
                raise FileExistsError(
                    f"{path} holds version {loaded.version.number}, which this buffer has neither saved nor loaded: "
                    "call load_checkpoint first, or save to another folder"
                )
            named = rank_versions(loaded.json) or []
            if len(named) == ranks:
                self.named = named

    def save(self, save: Callable[[Path], None]) -> Version:
        """Call ``save`` with the folder of this rank, and publish a version once all ranks have saved; return it.

        Raises:
            RuntimeError: another rank has not saved.
        """
        self.barrier()  # all ranks have read the existing version
        if self.rank == 0:
            self._remove_unfinished()
        self.barrier()

        held: Folder | None = None
        try:
            self.own.mkdir(parents=True, exist_ok=True)
            # Locked until all have saved: a second caller with this rank would otherwise remove the previous version.
            held = Folder(self.own / "saving", write=True)
            save(self.own)
        except BaseException:
            # Releases the other ranks, which wait for this one and raise as well.
            with suppress(RuntimeError):
                self._end()
            raise
        else:
            return self._end()
        finally:
            if held is not None:
                held.close()

    def _end(self) -> Version:
        self.barrier()
        try:
            if self.rank == 0:
                self._publish()
        finally:
            self.barrier()

        folder = Folder(self.path)
        version = folder.load().version if folder.versions() else None
        if version is None or version == self.known:
            raise RuntimeError(f"not all ranks have saved to {self.path}. The previous checkpoint is kept")
        return version

    def _remove_unfinished(self) -> None:
        """Remove the versions of ranks that no finished save names."""
        for rank in range(self.ranks):
            folder = rank_folder(self.path, rank, self.ranks)
            kept = self._number(rank)
            there = Folder(folder).versions() if folder.is_dir() else ()
            for number in there:
                if number > kept:
                    files.remove(folder / manifest_name(number))

    def _number(self, rank: int) -> int:
        """The number of the version of a rank that is named now; 0 if none is."""
        if self.named:
            return self.named[rank].number
        return 0

    def _publish(self) -> None:
        versions: list[Version] = []
        for rank in range(self.ranks):
            path = rank_folder(self.path, rank, self.ranks)
            number = 0
            if path.is_dir():
                number = next(iter(Folder(path).versions()), 0)
            if number <= self._number(rank):
                raise RuntimeError(
                    f"rank {rank} of {self.ranks} has not saved to {self.path}: each rank must call save_checkpoint "
                    "with its own local_rank. The previous checkpoint is kept"
                )
            versions.append(Folder(path).load(number).version)

        with Folder(self.path, write=True) as folder:
            if folder.versions():
                folder.load()
            # Drop the rows of an earlier checkpoint of a single rank.
            folder.publish({RANKS: [list(version) for version in versions]}, head=folder.end)


def stage(checkpoint: SavedTrajectories, folder: Path, *, sync: bool) -> None:
    """Copy the data to be loaded to the run's folder; if a crash follows, the next start finishes the load."""
    path = folder / LOADING
    records = list[TrajectoryRecord]()
    remove_folder(path)
    with Folder(path, write=True, sync=sync, keep=1) as staged:
        for rows, begun in checkpoint.read():
            staged.append({column_name(key): value for key, value in rows.items(True, True)})
            records += begun
        counter = max([checkpoint.counter, *(record.number + 1 for record in records)])
        state = State(records, counter, checkpoint.generator, staged.end)
        staged.publish({NOTES: state.to_json()})


def discard(closing: Callable[[], Any], folder: str | os.PathLike[str], process: int) -> None:
    """Close a storage in the process that opened it, and remove its folder."""
    if process == os.getpid():
        try:
            closing()
        finally:
            shutil.rmtree(folder, ignore_errors=True)
