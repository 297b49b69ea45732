"""Machine code that is kept on disk is that of the sources as they are."""

import importlib.util
from pathlib import Path

from flatroll.kernels import compiled as kept

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
