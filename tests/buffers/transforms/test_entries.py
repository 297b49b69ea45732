"""`RenameTransform`, `SelectTransform` and `ExcludeTransform`, alone and in buffers."""

import pytest
import torch
from tensordict import TensorDict

from flatroll.buffers import (
    ExcludeTransform,
    LazyTensorStorage,
    RenameTransform,
    ReplayBuffer,
    SelectTransform,
)


def batch(rows: int = 4) -> TensorDict:
    count = torch.arange(rows).float()
    flag = torch.zeros(rows, 1, dtype=torch.bool)
    return TensorDict(
        {
            "a": count,
            "b": {"c": count + 10, "d": count + 20},
            "done": flag,
            "next": {
                "reward": count[:, None],
                "done": flag,
                "terminated": flag,
                "truncated": flag,
                "a": count + 1,
            },
        },
        [rows],
    )


def names(td: TensorDict) -> set[object]:
    return set(td.keys(True, True))


def test_rename_to_and_from_nested_entries() -> None:
    td = RenameTransform([("b", "c"), "a"], ["flat", ("deep", "er")])(batch())
    assert torch.equal(td["flat"], batch()["b", "c"]) and torch.equal(td["deep", "er"], batch()["a"])
    assert ("b", "c") not in names(td) and "a" not in names(td)
    whole = RenameTransform(["b"], ["nested"])(batch())
    assert {("nested", "c"), ("nested", "d")} <= names(whole)
    text = RenameTransform(["note"], ["remark"])(TensorDict({"note": "yes"}))
    assert text["remark"] == "yes"


def test_a_copy_owns_its_memory() -> None:
    td = RenameTransform(["a"], ["z"], create_copy=True)(batch())
    td["z"].add_(100)
    assert torch.equal(td["a"], batch()["a"])


def test_inv_renames_what_is_stored_and_leaves_the_batch_alone() -> None:
    transform = RenameTransform(["stored"], ["a"], ["stored"], ["a"])
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=transform, batch_size=2)
    data = batch()
    before = names(data)
    buffer.extend(data)
    assert names(data) == before
    assert buffer[:]["a"].tolist() == [0, 1, 2, 3] and "stored" not in names(buffer[:])
    plain = transform.inv(data)
    assert "stored" in names(plain) and "a" not in names(plain)
    copied = RenameTransform([], [], ["stored"], ["a"], create_copy=True).inv(data)
    assert {"a", "stored"} <= names(copied)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((["a"], ["b", "c"]), r"in_keys=\['a'\] and out_keys=\['b', 'c'\] must be of equal length"),
        ((["a"], ["b"], ["c"], []), r"in_keys_inv=.* and out_keys_inv=.* must be of equal length"),
        ((["a", "b"], ["c", "c"]), "a key occurs twice"),
        ((["a", "a"], ["c", "d"]), "a key occurs twice"),
        (
            (["a", "b"], ["b", "a"]),
            "is both an old and a new name, so the order is ambiguous: use two transforms",
        ),
        ((("a", "b"), ["c"]), r"in_keys=\('a', 'b'\) may mean one nested key or 2 keys"),
    ],
)
def test_rename_checks_its_names(arguments: tuple[object, ...], error: str) -> None:
    with pytest.raises(ValueError, match=error):
        RenameTransform(*arguments)  # type: ignore[arg-type]


def test_rename_loses_nothing() -> None:
    td = batch()
    with pytest.raises(ValueError, match=r"RenameTransform cannot write \('b', 'd'\).*ExcludeTransform"):
        RenameTransform(["a"], [("b", "d")])(td)
    with pytest.raises(KeyError, match=r"RenameTransform: batch has no entry 'q'.* Entries present: 'a'"):
        RenameTransform(["a", "q"], ["z", "y"])(td)
    assert names(td) == names(batch())
    with pytest.raises(TypeError, match="RenameTransform needs tensordicts, got Tensor"):
        RenameTransform(["a"], ["b"])(torch.zeros(3))


def test_select_keeps_rewards_and_flags() -> None:
    flags = {"done", *(("next", flag) for flag in ("done", "terminated", "truncated"))}
    assert names(SelectTransform("a")(batch())) == {"a", ("next", "reward")} | flags
    assert names(SelectTransform("a", keep_rewards=False)(batch())) == {"a"} | flags
    bare = SelectTransform("b", ("next", "a"), "absent", keep_rewards=False, keep_dones=False)
    assert names(bare(batch())) == {("b", "c"), ("b", "d"), ("next", "a")}


def test_exclude_in_samples_or_in_what_is_stored() -> None:
    assert {"a", ("b", "c")}.isdisjoint(names(ExcludeTransform("a", ("b", "c"), "absent")(batch())))
    assert {("b", "c"), ("b", "d")}.isdisjoint(names(ExcludeTransform("b")(batch())))
    inverse = ExcludeTransform("a", inverse=True)
    assert "a" in names(inverse(batch())) and "a" not in names(inverse.inv(batch()))
    buffer = ReplayBuffer(storage=LazyTensorStorage(4), transform=inverse, batch_size=2)
    data = batch()
    buffer.extend(data)
    assert "a" not in names(buffer.sample()) and "a" in names(data)


def test_keys_are_given_one_by_one() -> None:
    for kind in (SelectTransform, ExcludeTransform):
        with pytest.raises(TypeError, match=r"one by one, got \['a', 'b'\]"):
            kind(["a", "b"])
        with pytest.raises(TypeError, match=f"{kind.__name__} needs tensordicts, got Tensor"):
            kind("a")(torch.zeros(3))


def test_empty_samples() -> None:
    td = batch(0)
    for transform in (RenameTransform(["a"], ["z"]), SelectTransform("a"), ExcludeTransform("a")):
        assert transform(td.clone()).batch_size == (0,)
