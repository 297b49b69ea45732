"""Files that are damaged, made up or no files: an error that names them, or rows; bounded time and memory."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forms import scaled
from scripts import run_script


def test_mutated_files_of_our_own_form() -> None:
    """``python tests/support/crafted_files.py 2000 SEED`` goes on for longer."""
    pytest.importorskip("zstandard")
    run_script("crafted_files", scaled(quick=2, long=40))


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    os.mkfifo(tmp_path / "pipe.h5")
    return tmp_path / "pipe.h5"


def readers() -> list[Callable[[Path], Any]]:
    from flatroll import datasets, export

    files = [datasets.read_d4rl, datasets.read_roboset, datasets.read_vd4rl, datasets.read_gen_dgrl]
    tables = [export.import_parquet, export.import_arrow, export.import_pandas, export.import_h5]
    return [lambda path, read=read: list(read(path)) for read in files] + tables  # type: ignore[misc]


@pytest.mark.parametrize("number", range(8))
def test_a_pipe_is_no_file(number: int, pipe: Path) -> None:
    """To open it would wait for somebody who writes into it."""
    with pytest.raises(ValueError, match=r"pipe\.h5 cannot be read, or is damaged: it is not a regular file"):
        readers()[number](pipe)


def test_a_pipe_in_a_folder_is_no_file(tmp_path: Path) -> None:
    from flatroll.export import import_lerobot

    (tmp_path / "meta").mkdir()
    os.mkfifo(tmp_path / "meta/info.json")
    with pytest.raises(
        ValueError, match=r"info\.json cannot be read, or is damaged: it is not a regular file"
    ):
        import_lerobot(tmp_path)


@pytest.mark.parametrize("number", range(8))
def test_what_is_no_such_file_is_named(number: int, tmp_path: Path) -> None:
    (tmp_path / "file.h5").write_bytes(b"\x93NUMPY" + b"a" * 10**6)
    with pytest.raises(ValueError, match=r"file\.h5 cannot be read, or is damaged") as caught:
        readers()[number](tmp_path / "file.h5")
    assert len(str(caught.value)) < 1000


def test_a_header_that_python_cannot_parse_is_named(tmp_path: Path) -> None:
    """Its tokenizer fails in its own way."""
    import io
    import tarfile

    from flatroll.datasets import read_gen_dgrl

    for text in (
        "{'descr': '|O', 'fortran_order': False, 'shape': (",
        "{'descr': 'V8', 'shape': (), 'fortran_order': False}",
    ):
        content = b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text.encode()
        member = tarfile.TarInfo("0.npy")
        member.size = len(content)
        with tarfile.open(tmp_path / "set.tar", "w") as archive:
            archive.addfile(member, io.BytesIO(content))
        with pytest.raises(ValueError, match=r"set\.tar: 0\.npy (cannot be read|must hold)"):  # as NumPy is
            list(read_gen_dgrl(tmp_path / "set.tar"))
