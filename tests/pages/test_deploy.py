"""The page "Deploy": its program runs an exported policy where torch and flatroll cannot be imported."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import page_blocks
import pytest
import torch

from flatroll.modules import set_recurrent_mode

PAGE = "docs/deploy.md"
PROGRAM = "class Policy:"
REFUSES = """
import sys
from importlib.abc import MetaPathFinder

class Refuse(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "flatroll", "tensordict", "onnx"):
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
"""
PLAYS = """
data = np.load("rows.npz")
policy = Policy("policy.onnx")
actions = []
for observation, is_init in zip(data["observation"], data["is_init"]):
    policy.ended(is_init)
    actions.append(policy.act(observation=observation[None])["action"][0])
np.save("actions.npy", np.array(actions))
"""


def test_the_program_acts_as_the_policy_does(until: Any, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    page = until(PAGE, 'flatroll.export_policy(policy, "policy.pt2"', marked=True)
    rows = page["rows"]
    assert page["exported"].rows == len(rows)

    program = page_blocks.blocks_of((page_blocks.ROOT / PAGE).read_text())
    text = next(block.text for block in program if PROGRAM in block.text)
    assert len(text.splitlines()) <= 40
    np.savez(tmp_path / "rows.npz", observation=rows["observation"].numpy(), is_init=rows["is_init"].numpy())
    done = subprocess.run(
        [sys.executable, "-c", REFUSES + text + PLAYS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr

    with torch.no_grad(), set_recurrent_mode("recurrent"):
        scores = page["policy"](rows.clone())["logits"]
    actions = torch.from_numpy(np.load(tmp_path / "actions.npy"))
    lost = scores.amax(-1) - scores.gather(-1, actions[:, None]).squeeze(-1)
    assert float(lost.max()) < 1e-5
