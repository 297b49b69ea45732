"""Machine code that is kept on disk is that of the sources as they are."""

import ast
import importlib.util
import os
import sys
from pathlib import Path

import interpreters

from flatroll.kernels import compiled as kept

SOURCES = Path(__file__).parents[2] / "src"
SOURCE = """
from flatroll.kernels.compiled import compiled

@compiled()
def twice(x):
    return 2 * x
"""


def test_machine_code_is_kept_under_a_hash_of_all_kernels(tmp_path: Path) -> None:
    """Numba looks at the file of a kernel only, not at the files of the functions that it calls."""
    path = tmp_path / "doubling.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("doubling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.twice(21) == 42
    assert module.twice.__qualname__ == module.twice.py_func.__qualname__ == "twice"
    assert list(Path(module.twice.stats.cache_path).glob(f"doubling.twice-{kept._HASH}-*.nbi"))


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


def test_the_first_kernel_that_is_compiled_says_so_once_and_loading_says_nothing(tmp_path: Path) -> None:
    (tmp_path / "doubling.py").write_text(SOURCE + SOURCE.replace("twice", "double"))
    program = (
        "import numba; numba.njit(lambda x: x)(1); from doubling import *; twice(2); double(2); twice(2.0)"
    )

    def told() -> str:
        paths = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", ""), str(SOURCES)])
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": paths}
        run = [sys.executable, "-c", program]
        return interpreters.run(run, kind=interpreters.OfLibraries, env=environment, check=True).stderr

    expected = (
        "flatroll: compiling kernels that were not used on this machine before (some seconds; "
        "`flatroll compile` compiles all ahead)\n"
    )
    assert told() == expected
    assert told() == ""
