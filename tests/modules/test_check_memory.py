"""check_memory finds each fault that a memory of one's own may have, and none where there is none."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from tensordict.nn import TensorDictModule, TensorDictModuleBase, TensorDictSequential
from torch import Tensor, nn

from flatroll.layout import run_starts
from flatroll.modules import GRUModule, LSTMModule, TensorDictPrimer, check_memory, recurrent_mode
from flatroll.modules.by_space import MEMORIES

KEYS: dict[str, Any] = {"in_key": "observation", "out_key": "features"}


def inputs(rows: int = 40) -> TensorDict:
    generator = torch.Generator().manual_seed(0)
    return TensorDict({"observation": torch.randn(rows, 3, generator=generator)}, [rows])


class Trace(TensorDictModuleBase):
    """A fading sum of observations, with one fault or none."""

    def __init__(self, fault: str = "", begin: float = 0.0) -> None:
        super().__init__()
        self.in_keys = ["observation", "trace", "is_init"]  # pyright: ignore[reportAttributeAccessIssue]
        self.out_keys = ["features", ("next", "trace")]  # pyright: ignore[reportAttributeAccessIssue]
        self.fault = fault
        self.begin = torch.full((3,), begin)
        self.rate = nn.Parameter(torch.tensor(0.5))

    def make_tensordict_primer(self) -> TensorDictPrimer:
        return TensorDictPrimer({"trace": self.begin})

    def forward(self, tensordict: TensorDictBase) -> TensorDictBase:  # pyright: ignore[reportIncompatibleMethodOverride]
        if recurrent_mode():
            after, following = self.over_runs(tensordict)
        else:
            after, following = self.step(tensordict)
        tensordict["features"] = after.tanh()
        tensordict["next", "trace"] = following
        return tensordict

    def step(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        observation = rows["observation"]
        if self.fault == "normalises over the batch":
            observation = observation - 0.1 * observation.sum(0)
        before = rows["trace"]
        if self.fault != "ignores is_init":
            before = torch.where(rows["is_init"], self.begin, before)
        after = self.rate * before + observation
        return after, before if self.fault == "writes the old state" else after

    def over_runs(self, rows: TensorDictBase) -> tuple[Tensor, Tensor]:
        starts = run_starts(rows)
        observation = rows["observation"]
        states: list[Tensor] = []
        for i, start in enumerate(starts.tolist()):
            before = rows["trace"][i]
            if not start or (i and self.fault == "leaks across runs"):
                before = states[-1]
            elif self.fault == "begins each run anew":
                before = self.begin
            elif self.fault == "leaks a part":
                before = before + 0.01 * observation[0]
            rate = 0.9 if self.fault == "another rate" else self.rate
            states.append(rate * before + observation[i])
        after = torch.stack(states)
        if self.fault == "leaks a gradient":
            after = after + observation.sum() - observation.sum().detach()
        if self.fault == "next states are those before":
            return after, torch.cat([after[:1], after[:-1]])
        return after, after


@pytest.mark.parametrize("begin", [0.0, 1.0])
def test_a_right_memory_passes(begin: float) -> None:
    module = Trace(begin=begin)
    check_memory(module, inputs())
    assert module.training and module.rate.grad is None


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("ignores is_init", "sequential mode: a row with is_init does not begin with the primer's state"),
        ("normalises over the batch", "sequential mode: a step depends on the other rows of its batch"),
        ("writes the old state", "recurrent mode: not what single steps compute: 'features' differs in"),
        ("leaks across runs", "recurrent mode: a run depends on other runs of its batch: 'features' differs in"),
        ("leaks a part", "recurrent mode: a run depends on other runs of its batch"),
        ("begins each run anew", "a run does not start from the state stored at its first row"),
        ("another rate", "recurrent mode: not what single steps compute"),
        ("leaks a gradient", "the outputs of a run have a gradient to 'observation' of other runs"),
        ("next states are those before", "recurrent mode: the next state is not the one after the last row of a run"),
    ],
)  # fmt: skip
def test_each_fault_is_found(fault: str, said: str) -> None:
    with pytest.raises(AssertionError, match=r"^the memory breaks its contract:\n- ") as raised:
        check_memory(Trace(fault), inputs())
    assert said in str(raised.value)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("recurrent", MEMORIES)
def test_the_memories_of_the_package_pass(recurrent: str, layers: int) -> None:
    torch.manual_seed(0)
    check_memory(MEMORIES[recurrent](3, 8, num_layers=layers, dropout=0.2 * (layers - 1), **KEYS), inputs())


def test_networks_with_two_memories_pass() -> None:
    class Both(TensorDictSequential):
        def make_tensordict_primer(self) -> TensorDictPrimer:
            first, second = (part.make_tensordict_primer().defaults for part in self)
            return TensorDictPrimer(first | second)

    gru = GRUModule(3, 8, in_key="observation", out_key="middle")
    lstm = LSTMModule(8, 4, in_key="middle", out_key="features")
    check_memory(Both(gru, lstm), inputs())


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: check_memory(nn.Linear(3, 3), inputs()), TypeError, "module must be a tensordict module"),  # type: ignore[arg-type]
        (
            lambda: check_memory(TensorDictModule(nn.Linear(3, 3), ["observation"], ["features"]), inputs()),
            TypeError,
            "module must have make_tensordict_primer()",
        ),
        (lambda: check_memory(Trace(), {}), TypeError, "inputs must be a tensordict"),  # type: ignore[arg-type]
        (lambda: check_memory(Trace(), inputs(23)), ValueError, r"inputs must be at least 24 flat rows [N], got [23]"),
        (lambda: check_memory(Trace(), inputs(24).view(2, 12)), ValueError, "got [2, 12]"),
        (lambda: check_memory(Trace(), inputs(), atol=-1.0), ValueError, "atol must be at least 0, got -1.0"),
    ],
)  # fmt: skip
def test_bad_arguments(call: Callable[[], object], error: type[Exception], said: str) -> None:
    with pytest.raises(error) as raised:
        call()
    assert said in str(raised.value)


def test_a_state_that_is_not_written() -> None:
    module = Trace()
    module.out_keys = ["features"]  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(AssertionError, match=r"out_keys must have \[\('next', 'trace'\)\]"):
        check_memory(module, inputs())
