"""TorchRL's flat form of a storage, written by flatroll and read by TorchRL."""

import warnings
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from flatroll.layout import TED2Flat

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    data = pytest.importorskip("torchrl.data")


@pytest.mark.parametrize("on_disk", [False, True])
def test_rows_of_the_flat_form(rows: TensorDict, on_disk: bool, tmp_path: Path) -> None:
    """TorchRL takes each entry that is longer than the rows as one with next values, so `_lengths` is left out."""
    ended = rows[:5].exclude(("next", "step_count"))  # TorchRL knows runs by `done` alone
    written = TED2Flat()(ended).exclude("_lengths")
    if on_disk:
        written.memmap(str(tmp_path / "rows"))
        written = TensorDict.load_memmap(str(tmp_path / "rows"))
    read = data.Flat2TED()(written)
    flags = {"done", "terminated", "truncated"}  # of the root, which TorchRL adds
    assert set(read.keys(True, True)) == {*ended.keys(True, True), *flags}
    for key in ended.keys(True, True):
        torch.testing.assert_close(read[key], ended[key], rtol=0, atol=0)
