"""set_recurrent_mode(burn_in=k): the first rows of each run bring the state up to date and get no gradient."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from flatroll.modules import (
    DeltaNetModule,
    FFMModule,
    GRUModule,
    LinearRecurrentModule,
    LRUModule,
    LSTMModule,
    MinGRUModule,
    S6Module,
    recurrent_mode,
    set_recurrent_mode,
)
from flatroll.modules.mode import burn_in_rows

IN, HIDDEN, BURN_IN = 3, 4, 2
LENGTHS = [5, 1, 2, 3, 1, 6, 2]
MODULES = {
    **{f"{kind.__name__} {name}": (kind, {"recurrent_backend": name}) for kind in (GRUModule, LSTMModule)
       for name in ("auto", "packed", "scan", "pad")},
    "MinGRUModule": (MinGRUModule, {}),
    "LinearRecurrentModule": (LinearRecurrentModule, {}),
    **{kind.__name__: (kind, {}) for kind in (LRUModule, S6Module, FFMModule, DeltaNetModule)},
}  # fmt: skip


def module_of(kind: Any, layers: int = 2, **options: Any) -> Any:
    torch.manual_seed(0)
    return kind(IN, HIDDEN, num_layers=layers, in_key="observation", out_key="features", **options).double()


def batch_of(module: Any, lengths: list[int]) -> TensorDict:
    """Rows of random input, with a random state stored at every row."""
    rows, generator = sum(lengths), torch.Generator().manual_seed(1)
    batch = TensorDict({"is_init": torch.zeros(rows, 1, dtype=torch.bool)}, [rows])
    batch["is_init"][torch.tensor([0, *lengths[:-1]]).cumsum(0)] = True
    batch["observation"] = torch.randn(rows, IN, generator=generator, dtype=torch.float64)
    for key, zero in module.make_tensordict_primer().defaults.items():
        batch[key] = torch.randn(rows, *zero.shape, generator=generator, dtype=torch.float64)
    return batch


def run_by_run(module: Any, batch: TensorDict, lengths: list[int]) -> Tensor:
    """The oracle: each run alone, cut behind the rows that warm up, whose pass has no gradient."""
    states = list(module.make_tensordict_primer().defaults)
    features = []
    for part in batch.split(lengths):
        head, tail = part[:BURN_IN].clone(), part[BURN_IN:].clone()
        with torch.no_grad():
            features.append(module(head)["features"])
        if len(tail):
            tail["is_init"] = torch.arange(len(tail))[:, None] == 0
            for key in states:
                last = head["next", key][-1:].detach()
                tail[key] = torch.cat([last, tail[key][1:]])
            features.append(module(tail)["features"])
    return torch.cat(features)


def gradients(module: Any, batch: TensorDict, features: Tensor) -> tuple[Tensor, ...]:
    """Of a loss that counts every row, to the inputs, the stored states and the weights."""
    inputs = [batch["observation"], *(batch[key] for key in module.make_tensordict_primer().defaults)]
    loss = (features * torch.arange(features.numel()).view_as(features).cos()).sum()
    return torch.autograd.grad(
        loss, [*inputs, *module.parameters()], allow_unused=True, materialize_grads=True
    )


@pytest.mark.filterwarnings("ignore")  # of torch.compile
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize(
    ("name", "compiled"), [*((name, False) for name in MODULES), ("GRUModule scan", True), ("LSTMModule auto", True)]
)  # fmt: skip
def test_rows_that_warm_up_have_no_gradient_and_leave_their_state(
    name: str, compiled: bool, layers: int
) -> None:
    kind, options = MODULES[name]
    module = module_of(kind, layers, **options)
    batch = batch_of(module, LENGTHS)
    leaves = [batch["observation"], *(batch[key] for key in module.make_tensordict_primer().defaults)]
    for leaf in leaves:
        leaf.requires_grad_()
    with set_recurrent_mode("recurrent"):
        wanted = run_by_run(module, batch, LENGTHS)
        plain = module(batch.copy())["features"]
    run = module.make_python_based() if compiled else module
    if compiled:
        torch.compiler.reset()
        run = torch.compile(run, backend="eager", fullgraph=True)
    with set_recurrent_mode("recurrent", burn_in=BURN_IN):
        found = run(batch.copy())
    torch.testing.assert_close(found["features"], wanted)
    torch.testing.assert_close(found["features"], plain)  # the numbers are those of one pass
    lasts = torch.tensor(LENGTHS).cumsum(0) - 1
    for key in module.make_tensordict_primer().defaults:
        last = found["next", key][lasts]
        with torch.no_grad(), set_recurrent_mode("recurrent"):
            torch.testing.assert_close(last, module(batch.copy())["next", key][lasts])
    found_gradients = gradients(module, batch, found["features"])
    torch.testing.assert_close(found_gradients, gradients(module, batch, wanted))
    warms_up = torch.cat([torch.arange(length) < BURN_IN for length in LENGTHS])
    assert not found_gradients[0][warms_up].any() and found_gradients[0][~warms_up].any()
    for state in found_gradients[1 : len(leaves)]:
        assert not state.any()  # runs start from them, in rows that warm up
    assert gradients(module, batch, plain)[0][warms_up].any()  # the check can fail


@pytest.mark.parametrize("state", ["stored", "zero"])
def test_runs_that_are_no_longer_and_lanes(state: str) -> None:
    module = module_of(LSTMModule, state=state)
    for lengths in ([1, 2, 1], [2]):
        batch = batch_of(module, lengths)
        with set_recurrent_mode(True):
            wanted = module(batch.copy())["features"]
        with set_recurrent_mode(True, burn_in=BURN_IN):
            found = module(batch)["features"]
        torch.testing.assert_close(found, wanted.detach())
        assert not found.requires_grad
    flat = batch_of(module, [5, 1, 4])
    with set_recurrent_mode(True, burn_in=BURN_IN):
        lanes = module(flat.reshape(2, 5))["features"]
        torch.testing.assert_close(lanes.flatten(0, 1), module(flat)["features"])


def test_burn_in_belongs_to_its_block() -> None:
    @set_recurrent_mode(True, burn_in=3)
    def inside() -> int:
        return burn_in_rows()

    with set_recurrent_mode(True, burn_in=2):
        with set_recurrent_mode(True):
            assert burn_in_rows() == 0
        assert (burn_in_rows(), inside(), burn_in_rows(), recurrent_mode()) == (2, 3, 2, True)
    assert burn_in_rows() == 0


def test_bad_input() -> None:
    for wrong in (-1, 1.0, True):
        with pytest.raises(ValueError, match="burn_in must be an integer of at least 0, got"):
            set_recurrent_mode(True, burn_in=wrong)  # type: ignore[arg-type]
    for mode in (False, None):
        with pytest.raises(ValueError, match="burn_in=2 needs the recurrent mode, which has runs, got mode="):
            set_recurrent_mode(mode, burn_in=2)
    both_ways = GRUModule(
        gru=nn.GRU(IN, HIDDEN, batch_first=True, bidirectional=True), in_key="a", out_key="b"
    )
    batch = TensorDict({"a": torch.zeros(4, IN), "is_init": torch.ones(4, 1, dtype=torch.bool)}, [4])
    batch.update(both_ways.make_tensordict_primer().expand(4))
    with (
        set_recurrent_mode(True, burn_in=2),
        pytest.raises(ValueError, match="needs a unidirectional network"),
    ):
        both_ways(batch)
