"""Recurrent modules refuse runs whose rows do not follow one another, on the host, and nothing else."""

import copy
from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.modules import GRUModule, LSTMModule, set_recurrent_mode

ROWS, LENGTH = 64, 16


def played(key: Any = "observation") -> TensorDict:
    """Runs of 16 rows whose observation is (episode, step)."""
    t = torch.arange(ROWS)
    number, step = t // LENGTH, t % LENGTH
    batch = TensorDict({}, [ROWS])
    batch[key] = torch.stack([number, step], 1).float()
    batch["next", *((key,) if isinstance(key, str) else key)] = torch.stack([number, step + 1], 1).float()
    batch["is_init"] = (step == 0)[:, None]
    batch["next", "done"] = (step == LENGTH - 1)[:, None]
    return batch


def module(kind: Any = GRUModule, key: Any = "observation") -> Any:
    return kind(2, 3, in_key=key, out_key="out", state="zero", default_recurrent_mode="recurrent")


@pytest.mark.parametrize("kind", [GRUModule, LSTMModule])
@pytest.mark.parametrize("series", [False, True])
def test_filtered_rows_are_refused(kind: Any, series: bool) -> None:
    batch = played()
    batch = batch.view(4, 16)[:, ::2] if series else batch[::2]
    if series:
        batch["next", "done"][:, -1] = True
    text = (
        r"row 1 does not follow row 0 in its run: its next observation is not the observation of row 1\. Call"
    )
    with pytest.raises(ValueError, match=text):
        module(kind)(batch.clone())
    module(kind)(played())


def test_step_counts_are_compared_in_every_row() -> None:
    batch = played()
    batch["step_count"] = batch["observation"][:, 1:].long()
    whole = batch.clone()
    module()(whole)
    rows = torch.cat([torch.arange(40), torch.arange(41, 64)])
    with pytest.raises(
        ValueError, match="row 40 does not follow row 39 in its run: 'step_count' is 9 after 7"
    ):
        module()(batch[rows])


@pytest.mark.parametrize("key", ["observation", ("observation", "x"), "x"], ids=str)
def test_shuffled_rows_are_refused(key: Any) -> None:
    batch = played(key)[torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))]
    with pytest.raises(ValueError, match="its next observation is that of row "):
        module(key=key)(batch)


def half(batch: TensorDict, **entries: torch.Tensor) -> TensorDict:
    return batch[::2].clone().update(entries)


RIGHT: dict[str, Any] = {
    "runs of one row": lambda: half(played(), is_init=torch.ones(32, 1, dtype=torch.bool)),
    "n steps": lambda: half(played(), steps_to_next_obs=torch.full((32, 1), 2)),
    "not known": lambda: half(played(), collector={"next_known": torch.zeros(32, dtype=torch.bool)}),
    "unknown": lambda: half(played(), next={"observation": torch.full((32, 2), torch.nan)}),
    "no next": lambda: played()[::2].exclude(("next", "observation")),
    "augmented entries": lambda: augmented(played(("observation", "x"))),
    "padding": lambda: padded(),
}


def augmented(batch: TensorDict) -> TensorDict:
    """As random crops of Dict observations leave it: next observations match no row."""
    batch["next", "observation", "x"] += 0.5
    return batch


def padded() -> TensorDict:
    batch = TensorDict.cat([played(), played()[::2]]).clone()
    batch["collector", "mask"] = torch.arange(96) < 64
    batch["step_count"] = batch["observation"][:, 1:].long()
    batch["is_init"][64] = True
    return batch


@pytest.mark.parametrize("kind", RIGHT)
def test_rows_that_are_right_are_used(kind: str) -> None:
    batch = RIGHT[kind]()
    key = "observation" if kind != "augmented entries" else ("observation", "x")
    module(key=key)(batch)


def test_samples_of_slices_are_used() -> None:
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(100, compact_obs=True), sampler=SliceSampler(slice_len=5), batch_size=30
    )
    buffer.extend(played())
    gru = module()
    for _ in range(8):
        gru(buffer.sample())


def test_steps_are_not_compared() -> None:
    """Outside of recurrent mode each row is a step of an env of its own."""
    gru = GRUModule(2, 3, in_key="observation", out_key="out")
    with set_recurrent_mode(False):
        gru(half(played(), is_init=torch.ones(32, 1, dtype=torch.bool)))


def test_a_module_that_lacks_the_counter_counts_from_zero() -> None:
    gru = copy.deepcopy(module())
    assert isinstance(gru, nn.Module) and "_calls" not in vars(gru)
    gru(played())
    assert gru._calls == 1
