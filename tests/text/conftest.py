"""Models, prompts and rollouts for the tests of this folder, which no test may go online for."""

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_text import make_model, score, train_tokenizer

from flatroll.text import PromptData, RolloutFromModel


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test of this folder may open a connection, or look up an address."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError(f"a connection was tried: {args}")

    for owner, name in ((socket.socket, "connect"), (socket.socket, "connect_ex"), (socket, "getaddrinfo")):
        monkeypatch.setattr(owner, name, refuse)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    return train_tokenizer()


@pytest.fixture(scope="session")
def model() -> Any:
    return make_model(0)


@pytest.fixture(scope="session")
def ref_model() -> Any:
    return make_model(1)


@pytest.fixture(scope="session")
def prompts() -> PromptData:
    """Eight prompts of 1 to 8 tokens, with labels of 4, in rows of 12."""
    ids = torch.randint(2, 24, (8, 12), generator=torch.Generator().manual_seed(3))
    rindex = torch.arange(8)
    mask = (torch.arange(12) <= (rindex + 4).unsqueeze(1)).long()
    return PromptData(ids.where(mask > 0, 1), mask, rindex, batch_size=[8])


@pytest.fixture
def make_rollout(model: Any, ref_model: Any) -> Callable[..., RolloutFromModel]:
    """RolloutFromModel around the two models and `score`, with a seeded generator."""

    def make(**options: Any) -> RolloutFromModel:
        options = {"max_new_tokens": 10, "generator": torch.Generator().manual_seed(0)} | options
        return RolloutFromModel(
            options.pop("model", model), ref_model, options.pop("reward_model", score), **options
        )

    return make
