"""Saves an ensemble: each member in a folder of its own, and a version that names those of the members."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flatroll.buffers.checkpointers.saveable import Apply, Others, Saves
from flatroll.buffers.index.saved_tables import damaged
from flatroll.disk import DamagedFileError, Folder, LoadedVersion, Version
from flatroll.disk.checkpoint import SaveOptions, read_tree, tree_of
from flatroll.disk.manifest import read_manifest


def save_members(
    path: Path,
    members: Sequence[Any],
    state: dict[str, Any],
    others: Others,
    options: SaveOptions,
    records: Saves,
) -> Version:
    """Publish a version of ``members`` and of the ensemble's own ``state``."""
    log = records.log(path)
    with Folder(path, write=True, resume=log.version, **options._asdict()) as folder:
        if folder.version is None and folder.versions() and not options.overwrite:
            raise FileExistsError(
                f"{path} holds version {folder.versions()[0]}, which this ensemble has neither loaded nor saved: load "
                "it first, save to another folder, or begin anew with overwrite=True"
            )
        saved = []
        for number, member in enumerate(members):
            inner = member_path(path, number)
            # Versions that the ensemble's versions name must stay until the new one is there.
            needed = _needed(folder, path, number)
            there = Folder(inner).versions() if inner.is_dir() else []
            keep = max(1, sum(version >= min(needed, default=0) for version in there) + 1)
            saved.append(list(member.save_version(inner, dict, options._replace(keep=keep, overwrite=True))))
        value, tensors = tree_of({**state, "members": saved}, others)
        numbers = [number for number, _ in saved]
        log.version = folder.publish(value, tensors, extra={"kind": "ensemble", "members": numbers})
        return log.version


def load_members(
    path: Path, members: Sequence[Any], number: int | None, strict: bool
) -> tuple[dict[str, Any], dict[str, Any], Version, list[Apply]]:
    """Read a version: the ensemble's own state, what was saved along with it, which version it is, and what loads the
    members."""
    rows = sum(member.storage.max_size for member in members)

    def read(version: LoadedVersion) -> tuple[dict[str, Any], dict[str, Any], Version, list[Apply]]:
        tree = read_tree(version, rows)
        state = tree["buffer"]
        if state is None or (isinstance(state, dict) and "ring" in state):
            raise ValueError(
                f"{'no' if state is None else 'one'} buffer was saved, and no ensemble: load it as that"
            )
        if not isinstance(state, dict) or not isinstance(state.get("members"), list):
            raise damaged("it is the state of no ensemble")
        saved = state["members"]
        if len(saved) != len(members):
            raise ValueError(f"the state has {len(saved)} members, this ensemble has {len(members)}")
        try:
            applies = [
                member.load_version(member_path(path, i), each[0], True)[1]
                for i, (member, each) in enumerate(zip(members, saved, strict=True))
            ]
        except FileNotFoundError as error:  # the version before may have all of its files
            raise DamagedFileError(f"a member is not there: {error}") from None
        return state, tree["others"], version.version, applies

    if not path.is_dir():
        raise FileNotFoundError(f"there is no folder {path}: ensemble.dumps(path) makes one")
    return Folder(path).load_with(read, number, strict=strict)


def member_path(path: Path, number: int) -> Path:
    """The folder of a member."""
    return path / f"member-{number}"


def _needed(folder: Folder, path: Path, member: int) -> list[int]:
    """The member's versions that the ensemble's versions name."""
    extras = [read_manifest(path, version).extra for version in folder.versions()]
    return [extra["members"][member] for extra in extras if extra and member < len(extra.get("members", []))]
