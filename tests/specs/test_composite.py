"""A Composite is a mapping of specs."""

import warnings

import pytest
import torch
from tensordict import TensorDict, tensorclass

import flatroll.specs
from flatroll.specs import OLD_NAMES, Bounded, Categorical, Composite, Unbounded


def test_keys_items_and_nesting() -> None:
    spec = Composite({"a": Categorical(2), "b": {"c": Unbounded((3,)), "none": None}}, d=Bounded(0, 1, (1,)))
    assert spec.keys() == ["a", "b", "d"] and len(spec) == 3 and list(spec) == ["a", "b", "d"]
    assert spec.keys(True) == ["a", ("b", "c"), ("b", "none"), "b", "d"]  # in the order of a tensordict's
    assert [key for key in spec.zero().keys(True) if key != "a"] == [("b", "c"), "b", "d"]
    assert spec.keys(True, True) == ["a", ("b", "c"), ("b", "none"), "d"]
    assert spec["b", "c"] is spec["b"]["c"] and spec.get(("b", "x"), 3) == 3 and ("b", "c") in spec
    spec["b", "e", "f"] = Categorical(4)
    assert spec["b", "e"].keys() == ["f"]
    assert spec.pop(("b", "e", "f")).n == 4 and spec.pop("zzz", None) is None
    with pytest.raises(KeyError):
        spec["zzz"]
    spec.update({"b": {"c": Unbounded((5,))}, "new": Categorical(2)})
    assert spec["b", "c"].shape == (5,) and ("b", "none") in spec
    assert spec.is_in(spec.rand()) and set(spec.rand().keys()) == {"a", "b", "d", "new"}
    assert spec.empty().is_empty() and not spec.is_empty() and Composite(a=Composite()).is_empty(recurse=True)


def test_shapes_begin_with_its_own() -> None:
    spec = Composite(shape=(4,))
    spec["inner"] = Composite(shape=())
    assert spec["inner"].shape == (4,)
    spec["inner", "x"] = Unbounded((4, 2))
    with pytest.raises(ValueError, match=r"must begin with .* \(4,\), got \(3,\)"):
        spec["y"] = Unbounded((3,))
    assert spec[1]["inner", "x"].shape == (2,) and spec.expand(5, 4)["inner", "x"].shape == (5, 4, 2)
    assert spec.squeeze() == spec and len(spec.unbind()) == 4 and spec.unsqueeze(0)["inner"].shape == (1, 4)
    assert spec.rand((7,)).batch_size == (7, 4)


def test_locks() -> None:
    spec = Composite(a={"b": Categorical(2)}).lock_()
    assert spec.is_locked and spec["a"].is_locked
    for change in (lambda: spec.update({"a": None}), lambda: spec["a"].set("c", None), lambda: spec.pop("a")):
        with pytest.raises(RuntimeError, match="locked"):
            change()
    assert not spec.clone().is_locked
    spec.unlock_()["a", "c"] = Categorical(3)


def test_values_in_place_and_dicts() -> None:
    spec = Composite(a=Bounded(0, 1, (2,)), b={"c": Categorical(3)})
    value = TensorDict({"a": torch.tensor([0.5, 7.0]), "b": {"c": torch.tensor(9)}, "more": torch.zeros(1)})
    assert spec.project(value) is value and value["a"].tolist() == [0.5, 1.0] and value["b", "c"].item() == 2
    assert spec.to_numpy(value)["b"]["c"] == 2 and spec.is_in(value.to_dict())
    with pytest.raises(KeyError, match="'b'"):
        spec.project(TensorDict({"a": torch.zeros(2)}))


def test_names_and_data_classes() -> None:
    @tensorclass
    class Pair:
        a: torch.Tensor

    assert isinstance(Composite(a=Categorical(2, (3,)), shape=(3,), data_cls=Pair).rand(), Pair)
    spec = Composite(a=Categorical(2, (3, 1)), shape=(3, 1), names=["time", "env"])
    assert (
        spec.rand().names == ["time", "env"]
        and spec[0].names == ["env"]
        and spec.unsqueeze(0).names == [None, "time", "env"]
    )
    with pytest.raises(ValueError, match="names"):
        Composite(shape=(3,), names=["a", "b"])


def test_old_names_warn() -> None:
    assert len(OLD_NAMES) == 13
    for old, new in OLD_NAMES.items():
        with pytest.warns(DeprecationWarning, match=f"{old} is now called {new.__name__}"):
            assert getattr(flatroll.specs, old) is new
    with warnings.catch_warnings(), pytest.raises(AttributeError):
        flatroll.specs.NoSuchSpec  # noqa: B018
