"""What is in a folder, by the names of its files; which files go, and in which order."""

import errno
import os
from collections.abc import Set
from pathlib import Path
from typing import NamedTuple

from flatroll.disk import files
from flatroll.disk.names import LOCK, RowsName, is_own, manifest_name, version_of_manifest


class Listing(NamedTuple):
    """The names in a folder.

    Args:
        rows: names of files of rows.
        versions: numbers of the manifests, the newest first.
        others: all other files that belong to such a folder: states, temporaries, the lock.
        foreign: files that do not belong to it.
    """

    rows: frozenset[RowsName]
    versions: list[int]
    others: list[str]
    foreign: list[str]

    @classmethod
    def of(cls, path: Path) -> "Listing":
        """List a folder; FileNotFoundError or NotADirectoryError if it is none."""
        rows, versions, others, foreign = [], [], [], []
        for name in files.names(path):
            rows_name, version = RowsName.parse(name), version_of_manifest(name)
            if rows_name is not None:
                rows.append(rows_name)
            elif version is not None:
                versions.append(version)
            elif is_own(name):
                others.append(name)
            elif not name.endswith("/"):
                foreign.append(name)
        return cls(frozenset(rows), sorted(versions, reverse=True), others, foreign)

    @property
    def is_empty(self) -> bool:
        """Whether there are neither rows nor versions."""
        return not self.rows and not self.versions

    def check_own(self, path: Path) -> None:
        """Raise ValueError if there are foreign files only."""
        if self.foreign and self.is_empty and not self.others:
            shown = ", ".join(self.foreign[:3]) + (", ..." if len(self.foreign) > 3 else "")
            raise ValueError(
                f"path must be a folder of rows and versions, or an empty or new one; {path} holds other files: {shown}"
            )


class Lock(NamedTuple):
    """The lock of a folder's writer.

    Args:
        descriptor: of the file that is locked.
        process: number of the process that locked it.
    """

    descriptor: int
    process: int

    def release(self) -> None:
        """Give it back, also if processes that were forked meanwhile have the descriptor, too; those do not."""
        if self.process == os.getpid():
            files.unlock(self.descriptor)
        files.close(self.descriptor)


def lock_folder(path: Path) -> Lock:
    """Lock a folder for a writer.

    Raises:
        BlockingIOError: another writer has it.
        PermissionError: the folder cannot be written to.
    """
    try:
        return Lock(files.lock(path / LOCK), os.getpid())
    except BlockingIOError:
        text = f"another writer has {path}: close it first, or write to another folder"
        raise BlockingIOError(errno.EWOULDBLOCK, text) from None
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise
        text = f"{path} cannot be written to ({error.strerror}): choose another folder"
        raise PermissionError(error.errno, text) from None


def covered(names: Set[RowsName], present: Set[RowsName]) -> set[RowsName]:
    """Those of ``names`` whose rows another file of ``present`` has, too, which is larger or not in ``names``.

    >>> a, b, c = (RowsName(*rows, "0badcafe", 1) for rows in [(0, 9), (0, 4), (9, 12)])
    >>> covered({b, c}, {a, b, c}) == {b}
    True
    """
    found = set()
    largest: RowsName | None = None
    # By first row, the longest first, and of equal ones those that stay: what covers a file comes before it, and of the
    # files before it the one that ends last covers it if any does.
    for name in sorted(present, key=lambda name: (name.first, -name.end, name in names, name)):
        if largest is not None and name.end <= largest.end:
            if name in names:
                found.add(name)
        else:
            largest = name
    return found


def remove_all_but(path: Path, needed: Set[str], *, synced: bool) -> None:
    """Remove what belongs to a folder of rows and versions and is not needed; what cannot be removed now stays.

    Rows are found by listing, up to the first hole. So that no crash leaves a hole before rows that are needed, files
    inside larger ones go first, and the others from the lowest on, each for good before the next.

    Args:
        path: of the folder.
        needed: names of the files that stay.
        synced: wait until each step with rows is on the disk before the next.
    """

    def remove(names: list[str]) -> None:
        for name in names:
            files.remove(path / name)

    listing = Listing.of(path)
    unused = {name for name in listing.rows if str(name) not in needed}
    inside = covered(unused, listing.rows)
    try:
        # Manifests before their files: a kill leaves no version that misses some. A power loss may, of those that are
        # not kept: they need no sync of their own.
        remove([name for name in map(manifest_name, listing.versions) if name not in needed])
        remove([name for name in listing.others if name not in needed])
        for step in [sorted(inside), *([name] for name in sorted(unused - inside))]:
            remove([str(name) for name in step])
            if step and synced:
                files.sync_folder(path)
    except OSError:
        return
