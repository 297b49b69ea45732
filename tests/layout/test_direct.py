"""Networks called without tensordict's wrapping do what they do with it."""

from typing import Any

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import (
    InteractionType,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
    set_interaction_type,
    set_skip_existing,
)
from tensordict.nn.probabilistic import interaction_type
from torch import Tensor, nn
from torch.distributions import Categorical

from flatroll.layout import tensordict_seam
from flatroll.layout.tensordict_seam import (
    call_for,
    call_network,
    call_plain,
    call_policy,
    get_entry,
    nest,
    shallow_copy,
)


@pytest.fixture(params=[True, False], ids=["private", "public"], autouse=True)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether tensordict's private parts are read: both ways do the same."""
    monkeypatch.setattr(tensordict_seam, "USES_PRIVATES", request.param)
    return bool(request.param)


class Doubling(TensorDictModule):
    def forward(self, tensordict: Any, *args: Any, **kwargs: Any) -> Any:
        return tensordict.set("b", 2 * tensordict["a"])


def two(a: Tensor) -> tuple[Tensor, Tensor]:
    return a + 1, a + 2


def named(*, x: Tensor) -> Tensor:
    return x + 3


def networks() -> dict[str, Any]:
    one = nn.Identity()
    chain = [TensorDictModule(two, ["a"], ["b", "c"]), TensorDictModule(one, ["c"], [("deep", "d")])]
    hooked = TensorDictModule(one, ["a"], ["b"])
    hooked.register_forward_hook(lambda module, args, out: out.set("b", out["b"] * 5))
    return {
        "one": TensorDictModule(one, ["a"], ["b"]),
        "two": TensorDictModule(two, ["a"], ["b", "c"]),
        "first": TensorDictModule(two, ["a"], ["b", "_"]),
        "nested": TensorDictModule(one, [("in", "a")], [("out", "b")]),
        "mapping": TensorDictModule(lambda a: {"b": a, "c": a + 1}, ["a"], ["b"]),
        "by name": TensorDictModule(named, {"x": "a"}, ["b"]),
        "subclass": Doubling(one, ["a"], ["b"]),
        "hook": hooked,
        "selected": TensorDictModule(two, ["a"], ["b", "c"]).select_out_keys("b"),
        "chain": TensorDictSequential(*chain),
        "chain by name": TensorDictSequential(dict(zip("xy", chain, strict=True))),
        "selected chain": TensorDictSequential(*chain, selected_out_keys=["b"]),
        "twice": TensorDictSequential(*2 * [TensorDictModule(lambda a: a + 1, ["a"], ["a"])]),
    }


def rows() -> TensorDict:
    return TensorDict({"a": torch.arange(3.0), ("in", "a"): torch.ones(3)}, [3])


@pytest.mark.parametrize("name", networks())
def test_the_same_is_written(name: str) -> None:
    network = networks()[name]
    expected = network(rows())
    found = call_network(network, rows())
    assert set(found.keys(True, True)) == set(expected.keys(True, True))
    assert (found == expected).all()
    for key in network.out_keys:
        if key != "_" and key != "a":
            batch = rows()
            torch.testing.assert_close(call_for(network, batch, key), expected[key])
            assert set(batch.keys(True, True)) == {"a", ("in", "a")}
    assert call_for(network, rows(), "nowhere") is None


@pytest.mark.parametrize("name", networks())
def test_a_plain_network_is_called_on_columns_too(name: str, way: bool) -> None:
    network = networks()[name]
    found = call_plain(network, dict(rows().items(True, True)))
    plain = way and name in ("one", "two", "first", "nested", "mapping")
    assert (found is not None) == plain
    if found is not None:
        expected = network(rows())
        for key, value in found.items():
            if key != "_":  # the name of an unused output
                torch.testing.assert_close(value, expected[key])


def test_modes_and_errors_are_those_of_the_call() -> None:
    network = TensorDictModule(nn.Identity(), ["a"], ["b"])
    with set_skip_existing(True):
        assert call_network(network, rows().set("b", torch.zeros(3)))["b"].sum() == 0
    with pytest.raises(KeyError, match="missing"):
        call_network(TensorDictModule(lambda x: x + 1, ["missing"], ["b"]), rows())
    with pytest.raises((ValueError, RuntimeError), match=r"returned 2 tensors: give each a key|more tensors"):
        call_network(TensorDictModule(two, ["a"], ["b"]), rows())


class Chosen(nn.Module):
    def forward(self, a: Tensor) -> Tensor:
        return torch.stack([a, -a, 2 * a], -1)


def policies() -> dict[str, Any]:
    def actor(*parts: Any, **options: Any) -> Any:
        choose = ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
        )
        return ProbabilisticTensorDictSequential(*parts, choose, **options)

    logits, copy = (
        TensorDictModule(Chosen(), ["a"], ["logits"]),
        TensorDictModule(nn.Identity(), ["a"], ["b"]),
    )
    hooked = actor(logits)
    hooked.register_forward_hook(lambda module, args, out: out.set("action", out["action"] + 10))
    return {
        "actor": actor(logits),
        "two parts": actor(copy, logits),
        "selected": actor(copy, logits).select_out_keys("action"),
        "in place": actor(logits, inplace=True),
        "hooked": hooked,
        "chain": TensorDictSequential(copy, logits),
        "selected chain": TensorDictSequential(copy, logits).select_out_keys("logits"),
        "other": lambda batch: batch.set("action", batch["a"]),
    }


@pytest.mark.parametrize("name", policies())
@pytest.mark.parametrize("kind", [None, InteractionType.DETERMINISTIC, InteractionType.RANDOM])
def test_a_policy_acts_as_it_does_when_called(name: str, kind: Any) -> None:
    policy = policies()[name]
    with set_interaction_type(kind):
        torch.manual_seed(1)
        expected = policy(rows())
        torch.manual_seed(1)
        found = call_policy(policy, rows())
    assert set(found.keys(True, True)) >= set(expected.keys(True, True))
    assert all((found[key] == expected[key]).all() for key in expected.keys(True, True))


def test_a_failing_network_is_named(way: bool) -> None:
    with pytest.raises(RuntimeError) as error:
        call_network(TensorDictModule(nn.Linear(2, 2), ["a"], ["b"]), rows())
    if way:  # called the public way, tensordict names it, in other words
        assert "in_keys ['a'] and out_keys ['b']" in error.value.__notes__[0]


def test_plain_modules_are_recognised(way: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the private parts renamed, every call would be slow, and no other test would fail."""
    wrapped: list[str] = []
    for kind in (TensorDictModule, TensorDictSequential, ProbabilisticTensorDictSequential):
        called = kind.__call__
        monkeypatch.setattr(
            kind,
            "__call__",
            lambda *args, _called=called, **named: wrapped.append("") or _called(*args, **named),
        )
    plain, acting = networks(), policies()
    for call, modules, names in (
        (
            call_network,
            plain,
            ("one", "two", "first", "nested", "mapping", "chain", "chain by name", "twice"),
        ),
        (call_policy, acting, ("actor", "two parts", "chain", "selected chain")),
    ):
        for name in names:
            wrapped.clear()
            call(modules[name], rows())
            assert (not wrapped) == way, name
    for name in ("by name", "subclass", "hook", "selected", "selected chain"):
        wrapped.clear()
        call_network(plain[name], rows())
        assert wrapped, name


def test_a_nested_batch_is_built() -> None:
    batch = nest({"a": torch.ones(2, 3), ("next", "a"): torch.zeros(2), ("next", "b", "c"): torch.ones(2)}, 2)
    assert batch.batch_size == batch["next"].batch_size == batch["next", "b"].batch_size == torch.Size([2])
    assert set(batch.keys(True, True)) == {"a", ("next", "a"), ("next", "b", "c")}
    assert nest({"a": torch.ones(())}).batch_size == torch.Size([])
    assert nest({"a": torch.ones(2)}, 2, device=torch.device("cpu")).device == torch.device("cpu")


def test_entries_are_found_as_tensordict_finds_them(tmp_path: Any) -> None:
    plain = TensorDict({"a": torch.ones(2), "next": {"a": torch.zeros(2)}}, [2], names=["time"])
    stacked = torch.stack([TensorDict({"a": torch.ones(1)}), TensorDict({"a": torch.ones(1)})])
    for batch in (plain, stacked, plain.clone().memmap(tmp_path), plain.clone().lock_()):
        for key in ("a", ("a",), ("next", "a"), ("next",), "b", ("next", "b"), ("none", "b")):
            expected, found = batch.get(key, None), get_entry(batch, key)
            assert (expected is None) == (found is None)
            assert expected is None or (expected == found).all()
    copy = shallow_copy(plain)
    assert copy.names == ["time"] and copy.batch_size == plain.batch_size
    copy["next", "b"] = copy["a"]
    assert ("next", "b") not in plain.keys(True) and copy["a"] is plain["a"]


def test_the_interaction_type_is_exchanged_by_the_public_way_too(monkeypatch):
    monkeypatch.setattr(tensordict_seam, "_TYPE", None)
    before = tensordict_seam.exchange_interaction_type(InteractionType.MODE)
    assert interaction_type() is InteractionType.MODE
    assert tensordict_seam.exchange_interaction_type(before) is InteractionType.MODE
    assert interaction_type() is before
