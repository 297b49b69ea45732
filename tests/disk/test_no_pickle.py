"""Nothing that reads files can run code that is in them: read from the sources, however it is written."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2] / "src" / "flatroll"
PLACES = ["disk", "buffers", "datasets", "layout", "trees", "export.py"]
UNPICKLERS = {
    "pickle",
    "_pickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "jsonpickle",
    "pandas.io.pickle",
}
CALLS = {"eval", "exec", "__import__", "read_pickle", "load_memmap", "import_module"}
#: Where files in the forms of others are read: by an unpickler that admits arrays only, and if the user allows code.
READERS = {
    ("datasets/formats/gen_dgrl.py", "pickle"),
    ("datasets/trajectories/rlinf_folder.py", "pickle"),
}
READER_OF_CODE = "datasets/trajectories/rlinf_folder.py"
#: What sends buffers to other processes of the same run, and imports the packages of extras.
OTHERS = {
    ("buffers/sharing.py", "pickle"),
    ("datasets/preprocess.py", "pickle"),  # an error's name
    ("datasets/formats/episodes.py", "pickle"),  # an error's name
    ("datasets/formats/d4rl.py", "import_module"),
    ("datasets/replay_log/recipe.py", "import_module"),  # of the packages and wrappers that it lists
    ("layout/checks.py", "import_module"),
}


def ways_to_run_code(source: str) -> Iterator[str]:
    """What in a source can unpickle or run text: names of modules and functions."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (name.name for name in names if name.name in UNPICKLERS)
            case ast.ImportFrom(module=str(module)) if module in UNPICKLERS:
                yield module
            case ast.Constant(value=str(text)) if text in UNPICKLERS:  # for importlib, or getattr
                yield text
            case ast.Call(func=function, keywords=keywords):
                name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
                given = {keyword.arg: getattr(keyword.value, "value", None) for keyword in keywords}
                if name in CALLS:
                    yield name
                if given.get("allow_pickle", False) is not False:
                    yield "allow_pickle"
                if given.get("weights_only", True) is not True or (
                    name == "load" and "weights_only" not in given and ast.unparse(function) == "torch.load"
                ):
                    yield "torch.load"


def test_no_reader_of_files_can_unpickle() -> None:
    files = [file for place in PLACES for file in (ROOT / place).rglob("*.py")] + [ROOT / PLACES[-1]]
    found = {
        (str(file.relative_to(ROOT)), way) for file in files for way in ways_to_run_code(file.read_text())
    }
    assert len(files) > 100
    assert found == READERS | OTHERS
    texts = {file: (ROOT / file).read_text() for file, _ in READERS}
    loads = {file: text.count("pickle.load") for file, text in texts.items()}
    assert {file: count for file, count in loads.items() if count} == {READER_OF_CODE: 1}
    assert texts[READER_OF_CODE].index('== ".pt"') < texts[READER_OF_CODE].index("pickle.load")


@pytest.mark.parametrize(
    "source",
    [
        "import pickle as p",
        "from cloudpickle import loads",
        "import importlib\nimportlib.import_module(name)",
        "getattr(modules, 'dill')",
        "torch.load(path)",
        "torch.load(path, weights_only=trusted)",
        "np.load(path, allow_pickle=True)",
        "np.load(path, allow_pickle=flag)",
        "pandas.read_pickle(path)",
        "TensorDict.load_memmap(path)",
        "eval(text)",
    ],
)
def test_the_test_is_not_fooled(source: str) -> None:
    assert list(ways_to_run_code(source))
    assert not list(
        ways_to_run_code("torch.load(path, weights_only=True)\nnp.load(path, allow_pickle=False)")
    )
