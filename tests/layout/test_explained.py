"""Errors of public calls name the argument that is at fault."""

import pickle
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from flatroll import estimators, layout
from flatroll.layout.explained import explained


@explained
def cut(
    values: torch.Tensor, at: int | None = None, *, key: layout.NestedKey = "x", path: str | Path = "."
) -> object:
    """Anything that fails inside torch, or in Python."""
    return torch.stack([values, values[:at]]), Path(path)


def test_a_call_that_works_is_as_before() -> None:
    assert cut(torch.zeros(2))[0].shape == (2, 2)  # type: ignore[index]
    assert cut.__doc__ == "Anything that fails inside torch, or in Python."


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        (([1, 2],), TypeError, "values must be a tensor, got [1, 2]"),
        ((torch.zeros(2), "1"), TypeError, "at must be an integer or None, got '1'"),
        (
            (torch.zeros(2), 1),
            RuntimeError,
            "cut cannot work with values=a tensor float32 [2], at=1: stack expects each tensor to be equal size",
        ),
    ],
)
def test_an_error_says_what_the_argument_must_be_and_what_came(
    arguments: tuple[object, ...], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind) as told:
        cut(*arguments)  # type: ignore[arg-type]
    assert str(told.value).startswith(text)
    assert told.value.__cause__ is not None


def test_a_path_and_a_key_are_told_in_words() -> None:
    with pytest.raises(TypeError, match=r"^path must be a path, got 3$"):
        cut(torch.zeros(2), path=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^key must be a key \(a string, or a tuple of strings\), got 1j$"):
        layout.require(TensorDict({"is_init": torch.ones(2, 1)}, [2]), 1j)  # type: ignore[arg-type]


def test_errors_of_the_callers_code_and_of_the_signature_stay() -> None:
    @explained
    def apply(function: object, times: int = 1) -> object:
        return function()  # type: ignore[operator]

    def fails() -> None:
        raise ValueError("mine")

    with pytest.raises(ValueError, match=r"^mine$"):
        apply(fails, times="2")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"unexpected keyword argument .time."):
        apply(fails, time=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: layout.TED2Flat(done_key=3),
            r"^done_key must be a key \(a string, or a tuple of strings\), got 3$",
        ),
        (lambda: layout.TED2Flat(reward_keys=[None]), r"^reward_keys must be a list of a key"),
        (lambda: estimators.RewardScale(in_key=1j), r"^in_key must be a key"),
    ],
)
def test_a_constructor_refuses_what_would_fail_later(make: Callable[[], object], text: str) -> None:
    with pytest.raises(TypeError, match=text):
        make()


def test_public_functions_can_be_pickled_and_keep_their_names() -> None:
    for function in (layout.run_ends, estimators.generalized_advantage_estimate):
        assert pickle.loads(pickle.dumps(function)) is function
    assert layout.run_ends.__name__ == "run_ends"


def test_public_functions_compile_to_one_graph() -> None:
    rows = torch.rand(6, 1)
    ends = torch.tensor([0, 0, 1, 0, 0, 1], dtype=torch.bool)[:, None]
    compiled = torch.compile(estimators.reward2go, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(rows, ends, 0.9), estimators.reward2go(rows, ends, 0.9))
