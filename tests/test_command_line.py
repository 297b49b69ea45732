"""The command line: what it prints, where errors go, its exit codes."""

import pkgutil
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest
import torch
from tensordict import TensorDict

from flatroll.__main__ import benchmarks_by_name, main, run_and_keep


def flat_batch(*, done_matches: bool = True) -> TensorDict:
    """Five rows: an episode of three that terminates, then a run of two cut at the end."""
    terminated = torch.tensor([0, 0, 1, 0, 0], dtype=torch.bool).unsqueeze(-1)
    done = terminated if done_matches else torch.zeros_like(terminated)
    observation = torch.tensor([[0.0, 0], [0, 1], [0, 2], [1, 0], [1, 1]])
    following = torch.tensor([[0.0, 1], [0, 2], [0, 3], [1, 1], [1, 2]])
    return TensorDict(
        {
            "observation": observation,
            "action": torch.zeros(5, dtype=torch.int64),
            "is_init": torch.tensor([1, 0, 0, 1, 0], dtype=torch.bool).unsqueeze(-1),
            "collector": {"traj_ids": torch.tensor([0, 0, 0, 1, 1])},
            "next": {
                "observation": following,
                "reward": torch.ones(5, 1),
                "terminated": terminated,
                "truncated": torch.zeros_like(terminated),
                "done": done,
            },
        },
        batch_size=[5],
    )


def test_inspect_describes_a_sound_batch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat_batch().memmap(tmp_path / "batch")
    assert main(["inspect", str(tmp_path / "batch")]) == 0
    printed = capsys.readouterr().out
    assert "is_init" in printed
    assert printed.endswith("audit: 0 findings in 5 rows\n")


def test_inspect_names_the_row_that_breaks_a_rule(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat_batch(done_matches=False).memmap(tmp_path / "batch")
    assert main(["inspect", str(tmp_path / "batch")]) == 1
    assert "row 2 [done] terminated is True but done is False\n" in capsys.readouterr().out


class RunsCode:
    """Prints when it is unpickled."""

    def __reduce__(self) -> Any:
        return print, ("code of the folder ran",)


def test_inspect_runs_no_code_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    batch = flat_batch()
    batch.set_non_tensor("note", RunsCode())
    batch.memmap(tmp_path / "batch")
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "batch")]) == 2
    printed = capsys.readouterr()
    assert "ran" not in printed.out
    assert "has pickled entries, which can run code" in printed.err


def test_inspect_saves_the_timeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flat_batch().memmap(tmp_path / "batch")
    picture = tmp_path / "timeline.png"
    assert main(["inspect", str(tmp_path / "batch"), "--plot", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"timeline saved to {picture}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("batch", "ending", "text"),
    [
        (flat_batch(), "nonsense", "Format 'nonsense' is not supported"),
        (
            TensorDict({"observation": torch.zeros(3, 2)}, batch_size=[3]),
            "png",
            "batch has no entry 'is_init'",
        ),
    ],
)
def test_inspect_says_why_it_cannot_draw(
    batch: TensorDict, ending: str, text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch.memmap(tmp_path / "batch")
    picture = tmp_path / f"picture.{ending}"
    assert main(["inspect", str(tmp_path / "batch"), "--plot", str(picture)]) == 2
    assert capsys.readouterr().err.startswith(f"flatroll inspect: --plot {picture}: {text}")


def test_a_missing_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flat_batch().memmap(tmp_path / "batch")
    for name in ("matplotlib", "matplotlib.figure", "matplotlib.pyplot"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["inspect", str(tmp_path / "batch"), "--plot", str(tmp_path / "timeline.png")]) == 1
    assert 'pip install "flatroll[plot]"' in capsys.readouterr().err


def test_the_demo_misses_matplotlib_before_it_trains(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flatroll.examples import recurrent_ppo

    monkeypatch.setattr(recurrent_ppo, "train", lambda args: pytest.fail("it trained"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["demo", "--quiet"]) == 1
    assert 'pip install "flatroll[plot]"' in capsys.readouterr().err


@pytest.mark.parametrize("made", [True, False])
def test_inspect_refuses_a_path_that_holds_no_batch(
    made: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path if made else tmp_path / "missing"
    assert main(["inspect", str(path)]) == 2
    expected = (
        "PATH must be a folder of rows and versions, or a directory written by TensorDict.memmap "
        "(it holds meta.json), "
    )
    reason = (
        "it holds neither rows nor versions" if made else f"[Errno 2] No such file or directory: '{path}'"
    )
    assert capsys.readouterr().err == f"flatroll inspect: {expected}got {path}: {reason}\n"


def test_bench_refuses_an_unknown_name(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "no_such_benchmark"]) == 2
    assert capsys.readouterr().err.startswith(
        "flatroll bench: no benchmark named no_such_benchmark; there are: "
    )


@pytest.mark.parametrize(("words", "meant"), [(["run", "dnq"], "dqn"), (["bench", "gea"], "gae")])
def test_an_unknown_name_gets_the_nearest_one(
    words: list[str], meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert capsys.readouterr().err.endswith(f"; did you mean {meant}?\n")


def test_bench_lists_every_benchmark_file(capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(__file__).parents[1] / "benchmarks"
    assert main(["bench", "--list"]) == 0
    listed = capsys.readouterr().out.split()
    assert listed == sorted(path.stem.removeprefix("bench_") for path in folder.rglob("bench_*.py"))


def test_bench_prints_and_keeps_what_a_benchmark_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_and_keep("small", [sys.executable, "-c", "print('rows 1')"], tmp_path / "out")
    assert (tmp_path / "out" / "small.txt").read_text() == "rows 1\n"
    assert capsys.readouterr().out.splitlines()[:2] == ["== small", "rows 1"]


def test_bench_reports_a_benchmark_that_fails(capsys: pytest.CaptureFixture[str]) -> None:
    assert not run_and_keep("broken", [sys.executable, "-c", "raise SystemExit(3)"], None)
    assert "== broken: exit code 3 after " in capsys.readouterr().out


def test_bench_names_the_module_of_a_benchmark_in_a_folder() -> None:
    known = benchmarks_by_name()
    assert (known["gae"], known["disk"]) == ("benchmarks.bench_gae", "benchmarks.disk.bench_disk")


def test_bench_without_a_checkout_says_where_benchmarks_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("flatroll.__main__.CHECKOUT", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["bench"]) == 2
    assert "benchmarks are not part of the installed package" in capsys.readouterr().err


def test_bench_runs_in_the_current_folder_if_the_package_is_installed_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clone = tmp_path / "clone"
    for folder in ("src/flatroll", "benchmarks"):
        (clone / folder).mkdir(parents=True)
    (clone / "benchmarks" / "bench_nothing.py").write_text("print('ran', __name__)")
    monkeypatch.setattr("flatroll.__main__.CHECKOUT", tmp_path)
    monkeypatch.chdir(clone)
    assert main(["bench", "nothing"]) == 0
    assert "ran __main__" in capsys.readouterr().out


def test_demo_hands_its_arguments_to_the_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["demo", "--help"])
    assert stopped.value.code == 0
    assert "--memoryless" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        (["--help"], "inspect"),
        (["demo", "--help"], "--memoryless"),
        (["run"], "recurrent_ppo"),
        (["run", "dqn", "--help"], "--lr"),
        (["inspect", "--help"], "--verify"),
        (["bench", "--list"], "collector"),
    ],
)
def test_help_imports_none_of_the_packages_that_take_seconds(words: list[str], shown: str) -> None:
    program = f"""
import sys
from flatroll.__main__ import main
try:
    main({words})
finally:
    assert not {{"torch", "tensordict", "numpy", "gymnasium", "numba"}} & set(sys.modules)
    assert len(sys.modules) < 250, len(sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert shown in done.stdout


def test_help_names_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--help"])
    assert stopped.value.code == 0
    printed = capsys.readouterr().out
    assert all(command in printed for command in ("demo", "inspect", "bench"))


def test_a_call_without_a_command_names_them(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main([])
    assert stopped.value.code == 2
    assert "{demo,run,inspect,bench,compile}" in capsys.readouterr().err


def test_compile_reaches_every_kernel(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile"]) == 0
    assert capsys.readouterr().out.startswith("compiled in ")
    from flatroll import kernels
    from flatroll.kernels import attention, delta, recurrence, scan
    from flatroll.kernels.rows import frame_rows

    known: dict[str, Any] = {}
    for info in pkgutil.walk_packages(kernels.__path__, "flatroll.kernels."):
        if "triton" not in info.name:
            known |= {
                f"{info.name}.{name}": value
                for name, value in vars(import_module(info.name)).items()
                if hasattr(value, "py_func") and value.__module__ == info.name
            }
    sources = [file.read_text() for file in Path(kernels.__path__[0]).rglob("*.py")]
    decorated = [re.findall(r"^@(?:compiled|numba\.njit)", source, re.MULTILINE) for source in sources]
    assert len(known) == sum(map(len, decorated))

    # The kernels of these files, and what a compiled one calls: kernels and helpers, which are plain functions.
    reached: set[Any] = set()
    waiting = [kernel.py_func for kernel in known.values() if kernel.signatures]
    while waiting:
        function = waiting.pop()
        if function not in reached:
            reached.add(function)
            named = (function.__globals__.get(name) for name in function.__code__.co_names)
            called = (getattr(value, "py_func", value) for value in named)
            waiting += [value for value in called if isinstance(value, FunctionType)]
    assert [name for name, kernel in known.items() if kernel.py_func not in reached] == []
    loops = [value for name, value in vars(scan).items() if name.endswith("_loop")]
    assert len(loops) == 6 and all(scan.machine_code(loop).signatures for loop in loops)  # type: ignore[attr-defined]
    loops = [recurrence._forward_loop, recurrence._gradient_loop, recurrence._selective_loop]
    assert all(scan.machine_code(loop).signatures for loop in loops)  # type: ignore[attr-defined]
    loops = [
        recurrence._selective_gradient_loop,
        delta.forward_loop,
        delta.gradient_loop,
        attention.step_loop,
    ]
    codes = [scan.machine_code(loop, sums_in_any_order=True) for loop in loops]
    assert all(code.signatures for code in codes)  # type: ignore[attr-defined]
    # Images are compared as 64-bit integers.
    assert any(str(words.dtype) == "int64" for words, *_ in frame_rows.match.signatures)
