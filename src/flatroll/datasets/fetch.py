"""`fetch_url`: one file from an address that the caller gives."""

import urllib.request
from pathlib import Path

from flatroll.datasets.progress import progress_bar


def fetch_url(
    url: str, path: str | Path, *, max_bytes: int, timeout: float = 60.0, progress: bool | None = None
) -> Path:
    """Download a URL to a file and return its path, for use in ``fetch`` functions.

    Args:
        url: the address, ``http``, ``https`` or ``file``.
        path: the new file; or a folder, in which the file gets the last name of the address.
        max_bytes: refuse to write more.
        timeout: seconds without any response until it fails. Default 60.
        progress: show a bar. Default: if stderr is a terminal.

    Raises:
        ValueError: there are more bytes than ``max_bytes``, or the kind of address is not supported.
        OSError: the server does not respond, or the response is an error or incomplete; no file is left.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     source = Path(folder, "source")
    ...     size = source.write_bytes(b"rows")
    ...     fetch_url(source.as_uri(), f"{folder}/copy", max_bytes=10).read_bytes()
    b'rows'
    """
    if url.partition(":")[0] not in ("http", "https", "file"):
        raise ValueError(f"url must begin with http:, https: or file:, got {url!r}")
    target = Path(path)
    if target.is_dir():
        target = target / url.rstrip("/").rpartition("/")[2]
    beside = target.with_name(f".{target.name}.part")

    try:
        with urllib.request.urlopen(url, timeout=timeout) as answer, open(beside, "wb") as file:
            claimed = answer.headers.get("Content-Length")
            done = 0
            total = int(claimed) if claimed else None
            with progress_bar(total, progress, target.name, "B") as bar:
                while piece := answer.read(1 << 20):
                    done += len(piece)
                    if max(done, int(claimed or 0)) > max_bytes:
                        raise ValueError(f"{url} has more than max_bytes={max_bytes}")
                    file.write(piece)
                    bar.update(len(piece))
        if claimed is not None and done != int(claimed):
            raise OSError(f"{url} ended after {done} of {claimed} bytes")
        return beside.rename(target)
    finally:
        beside.unlink(missing_ok=True)
