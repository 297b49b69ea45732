"""`write_beside`: a new file or folder that appears when it is complete."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from flatroll.disk import files


@contextmanager
def write_beside(path: str | Path, *, replace: bool = False) -> Iterator[Path]:
    """Yield a temporary path for a new file or folder, which is renamed to ``path`` when complete.

    On an error, what was written is removed, and ``path`` is as it was.

    Args:
        path: of the file or folder.
        replace: whether the new file replaces one of this name. Default False.

    Raises:
        FileExistsError: ``path`` exists, and is not to be replaced.
        FileNotFoundError: its parent folder does not exist.
    """
    target = Path(path).absolute()  # Minari needs absolute paths
    if not replace and (target.exists() or target.is_symlink()):
        raise FileExistsError(f"{target} exists: remove it first, or choose another path")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target.parent} is not a folder: create it first")

    beside = Path(tempfile.mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent))
    try:
        yield beside / target.name
        files.sync_all(beside / target.name)
        files.rename(beside / target.name, target)
        files.sync_folder(target.parent)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
