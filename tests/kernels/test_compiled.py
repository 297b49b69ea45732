"""Machine code that is kept on disk is that of the sources as they are."""

import ast
import importlib.util
import os
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import interpreters
import pytest

from flatroll.kernels import compiled as kept

SOURCES = Path(__file__).parents[2] / "src"
SOURCE = """
from flatroll.kernels.compiled import compiled

@compiled()
def twice(x):
    return 2 * x
"""


def doubling(folder: Path) -> Any:
    """A module with a kernel."""
    path = folder / "doubling.py"
    if not path.exists():  # a file that is written anew has another time, and its code is compiled again
        path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("doubling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_machine_code_is_kept_under_a_hash_of_all_kernels(tmp_path: Path) -> None:
    """Numba looks at the file of a kernel only, not at the files of the functions that it calls."""
    module = doubling(tmp_path)
    assert module.twice(21) == 42
    assert module.twice.__qualname__ == module.twice.py_func.__qualname__ == "twice"
    assert list(Path(module.twice.stats.cache_path).glob(f"doubling.twice-{kept._HASH}-*.nbi"))


@pytest.mark.parametrize("step", ["_save_data", "_save_index"])
@pytest.mark.parametrize("before", [False, True])
def test_no_process_finds_the_machine_code_of_other_types(
    step: str, before: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two compile a kernel at the same time: the second one looked before the first one had saved anything."""
    first, second, third = (doubling(tmp_path).twice._cache._cache_file for _ in range(3))
    monkeypatch.setattr(second, "_load_index", dict)
    real = getattr(first, step)

    def beside(*arguments: Any) -> None:
        if before:
            second.save("float", "code for float")
        real(*arguments)
        if not before:
            second.save("float", "code for float")

    monkeypatch.setattr(first, step, beside)
    first.save("int", "code for int")
    found = {key: third.load(key) for key in ("int", "float")}
    assert found["int"] in ("code for int", None) and found["float"] in ("code for float", None)
    assert any(found.values())


@pytest.mark.parametrize("missing", ["_cache_file", "_source_stamp", "_cache_path", "_index_name"])
def test_other_files_of_numba_stay_as_they_are(missing: str) -> None:
    """A later version may keep its machine code in another way."""
    attributes = {"_source_stamp": 1, "_cache_path": "here", "_index_name": "twice.nbi"}
    numbered = SimpleNamespace(**{name: value for name, value in attributes.items() if name != missing})
    cache = SimpleNamespace()
    if missing != "_cache_file":
        cache._cache_file = numbered

    kept._CacheFiles.take_place(SimpleNamespace(_cache=cache))
    assert getattr(cache, "_cache_file", None) in (numbered, None)


def test_no_kernel_has_more_than_eight_parameters() -> None:
    found = 0
    for file in (SOURCES / "flatroll/kernels").rglob("*.py"):
        for function in ast.walk(ast.parse(file.read_text())):
            if not isinstance(function, ast.FunctionDef):
                continue
            decorated = any(ast.unparse(line).startswith("compiled(") for line in function.decorator_list)
            if decorated or function.name.endswith("_loop"):  # loops are compiled at their first call
                found += 1
                assert len(function.args.args) <= 8, f"{file}: {function.name}"
    assert found > 40


def test_compiling_is_told_once_with_its_time_and_loading_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text(SOURCE + SOURCE.replace("twice", "double"))
    program = (
        "import numba; numba.njit(lambda x: x)(1); from doubling import *; twice(2); double(2); twice(2.0)"
    )

    def told() -> str:
        paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(SOURCES)])
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
        run = [sys.executable, "-c", program]
        return interpreters.run(run, kind=interpreters.OfLibraries, env=environment, check=True).stderr

    first, last = told().splitlines()
    assert first == (
        "flatroll: compiling kernels that were not used on this machine before (some seconds; "
        "`flatroll compile` compiles all ahead)"
    )
    # twice and double, and twice of another type; other packages' kernels do not count
    assert re.fullmatch(r"flatroll: compiling took \d+\.\d s in all \(kernels: 3\)", last)
    assert told() == ""
