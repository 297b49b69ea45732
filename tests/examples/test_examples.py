"""The examples run: the demo in small, the notebook from top to bottom."""

import importlib
import importlib.util
from pathlib import Path

import pytest

from flatroll.examples import report

needs_zstd = pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="needs zstandard")
needs_sb3 = pytest.mark.skipif(
    importlib.util.find_spec("stable_baselines3") is None, reason="needs stable_baselines3"
)
ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("arguments", [[], ["--memoryless"]])
def test_the_demo_prints_its_tables_and_saves_its_pictures(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = [
        "--frames",
        "1024",
        "--num-envs",
        "8",
        "--steps",
        "64",
        "--hidden",
        "8",
        "--epochs",
        "1",
        "--quiet",
    ]
    code = report.demo([*small, *arguments, "--out", str(tmp_path)])
    assert code == (0 if arguments else 1)  # 1,024 frames do not reach the target
    printed = capsys.readouterr().out
    assert "mean return of the last 100 episodes" in printed
    assert "where the time went" in printed and "collect" in printed
    assert "bytes per transition" in printed
    assert ("recurrent_state" in printed) is not bool(arguments)
    for picture in ("learning_curve.png", "timeline.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


def test_the_bar_says_what_the_first_batch_waits_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--frames", "64", "--num-envs", "4", "--steps", "16", "--hidden", "8", "--epochs", "1"]
    report.demo([*small, "--memoryless", "--out", str(tmp_path)])
    assert "first batch; kernels are compiled, once" in capsys.readouterr().err


def test_the_demo_runs_on_envpool(tmp_path: Path) -> None:
    pytest.importorskip("envpool")
    small = [
        "--env",
        "envpool:CartPole-v1",
        "--frames",
        "256",
        "--num-envs",
        "4",
        "--steps",
        "64",
        "--hidden",
        "8",
    ]
    assert report.demo([*small, "--quiet", "--out", str(tmp_path)]) == 1


def test_the_training_script_is_short_enough_to_read() -> None:
    assert len((ROOT / "examples" / "recurrent_ppo.py").read_text().splitlines()) <= 150


# jupyter's own modules warn of their paths and event loops
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    ("name", "printed", "shown"),
    [
        ("markers", "episodes", "image/png"),
        ("first_rollout", "row 14 [done] terminated is True but done is False", "text/html"),
        ("own_env", "obs has values outside its space|rows of each worker: [50, 50]", "text/html"),
        pytest.param("frames", "and compressed", "", marks=needs_zstd),
        ("memory", "mean return of the last 50 episodes", "text/html"),
        pytest.param("from_sb3", "our loop: return", "text/html", marks=needs_sb3),
    ],
)
def test_the_notebooks_run(name: str, printed: str, shown: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The site shows what ran: the code being the same, a notebook that `make docs` ran does not run again."""
    for needed in ("jupytext", "nbclient"):
        pytest.importorskip(needed)
    monkeypatch.delenv("MPLBACKEND", raising=False)  # the kernel is to choose its own
    monkeypatch.syspath_prepend(ROOT / "docs" / "site")
    executed = importlib.import_module("notebooks").executed

    source = ROOT / "examples" / "notebooks" / f"{name}.py"
    notebook = executed([source], ROOT / "out" / "notebooks")[source]

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    for text in printed.split("|"):
        assert any(text in output.get("text", "") for output in outputs)
    assert not shown or any(shown in output.get("data", {}) for output in outputs)
    pictures = [output["data"]["text/html"] for output in outputs if "text/html" in output.get("data", {})]
    assert shown != "text/html" or any(page.startswith("<svg") for page in pictures)
