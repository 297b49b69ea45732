"""`Transform`, `Compose` and the way buffers and collectors apply any transform."""

import copy
import pickle
from typing import Any

import gymnasium as gym
import pytest
import torch
from tensordict import TensorDict, TensorDictBase
from torch import Tensor, nn

from flatroll.buffers import (
    Compose,
    ExcludeTransform,
    LazyTensorStorage,
    ListStorage,
    MultiStep,
    MultiStepTransform,
    NextStateReconstructor,
    RandomCropTensorDict,
    RenameTransform,
    ReplayBuffer,
    ReplayBufferEnsemble,
    Resize,
    SelectTransform,
    SliceSampler,
    TensorDictReplayBuffer,
    ToTensorImage,
    Transform,
)
from flatroll.rollouts import Collector


class Shift(Transform):
    """Adds ``by`` on the way out and subtracts it on the way in."""

    def __init__(self, by: float, key: Any = "observation") -> None:
        super().__init__([key], in_keys_inv=[key])
        self.by = nn.Parameter(torch.tensor(by), requires_grad=False)

    def _apply_transform(self, value: Tensor) -> Tensor:
        return value + self.by

    def _inv_apply_transform(self, value: Tensor) -> Tensor:
        return value - self.by


class Times(Transform):
    """Doubles on the way out, halves on the way in; by whole batches."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("observation", td["observation"] * 2)

    def inv(self, td: TensorDictBase) -> TensorDictBase:
        return td.clone(recurse=False).set("observation", td["observation"] / 2)


class Plain:
    """No `Transform`: only has the two methods."""

    def forward(self, td: TensorDictBase) -> TensorDictBase:
        return td.set("seen", td["observation"] > 0)

    def inv(self, td: TensorDictBase) -> TensorDictBase:
        return td.exclude("junk")


def rows(n: int = 12, trajectories: int = 3) -> TensorDict:
    """Trajectories of equal length; the observation is the row's number."""
    done = torch.zeros(n, 1, dtype=torch.bool)
    done[n // trajectories - 1 :: n // trajectories] = True
    obs = torch.arange(n).float()
    return TensorDict(
        {
            "observation": obs,
            "collector": {"traj_ids": torch.arange(n) // (n // trajectories)},
            "next": {
                "observation": obs + 1,
                "reward": torch.ones(n, 1),
                "done": done,
                "terminated": done.clone(),
            },
        },
        [n],
    )


def buffer_of(transform: Any = None, n: int = 12, **options: Any) -> ReplayBuffer:
    buffer = ReplayBuffer(storage=LazyTensorStorage(n), transform=transform, batch_size=6, **options)
    buffer.extend(rows(n))
    return buffer


# -- Transform ---------------------------------------------------------------------------------------------------------


def test_keys_of_a_transform() -> None:
    transform = Transform("a", [("b", "c")], in_keys_inv=["d"])
    assert (transform.in_keys, transform.out_keys) == (["a"], [("b", "c")])
    assert (transform.in_keys_inv, transform.out_keys_inv) == (["d"], ["d"])
    assert Transform([("x",)]).out_keys == ["x"]
    assert Transform().in_keys == Transform().out_keys_inv == []
    for name in ("in_keys", "out_keys", "in_keys_inv", "out_keys_inv"):
        with pytest.raises(ValueError, match=rf"{name}=\('a', 'b'\) may mean one nested key or 2 keys"):
            Transform(**{"in_keys": ["x"], "in_keys_inv": ["x"], name: ("a", "b")})


def test_forward_writes_in_place_and_inv_leaves_the_batch() -> None:
    td = rows()
    assert Shift(1.0)(td) is td and td["observation"][0] == 1
    stored = Shift(1.0).inv(td)
    assert stored["observation"][0] == 0 and td["observation"][0] == 1
    assert Transform(["observation"]).inv(td) is td
    nested = Shift(5.0, ("next", "observation"))(rows())
    assert nested["next", "observation"][0] == 6


def test_missing_entries_are_named_and_nothing_is_written() -> None:
    td = rows()
    both = Shift(1.0)
    both.in_keys = both.out_keys = ["observation", ("agents", "obs")]
    with pytest.raises(
        KeyError, match=r"Shift: batch has no entry \('agents', 'obs'\).*Entries present: .*'reward'"
    ):
        both(td)
    with pytest.raises(KeyError, match="Shift: batch has no entry 'observation'"):
        Shift(1.0).inv(TensorDict({"x": torch.zeros(2)}, [2]))
    assert torch.equal(td["observation"], rows()["observation"])
    with pytest.raises(TypeError, match="Shift needs tensordicts, got Tensor"):
        Shift(1.0)(torch.zeros(3))
    shapes = Shift(1.0)
    shapes.out_keys = ["a", "b"]
    with pytest.raises(ValueError, match=r"Shift has 1 entries for the keys"):
        shapes(td)
    with pytest.raises(NotImplementedError, match=r"Transform must define forward\(td\) or _apply_transform"):
        Transform(["observation"])(td)


@pytest.mark.parametrize(
    "transform",
    [
        Shift(2.0),
        Compose(Shift(2.0), Times()),
        ToTensorImage(),
        Resize(3),
        RenameTransform(["a"], ["b"]),
        SelectTransform("a"),
        ExcludeTransform("a"),
        MultiStep(0.9, 3),
        MultiStepTransform(3, 0.9),
        NextStateReconstructor(),
        RandomCropTensorDict(3, generator=torch.Generator().manual_seed(0)),
    ],
    ids=lambda transform: type(transform).__name__,
)
def test_every_transform_is_a_module_that_can_be_copied(transform: Transform) -> None:
    assert isinstance(transform, Transform) and callable(transform)
    for other in (copy.deepcopy(transform), pickle.loads(pickle.dumps(transform))):
        assert repr(other) == repr(transform)
        assert {**other.__dict__}.keys() == {**transform.__dict__}.keys()
    assert transform.to("cpu") is transform


# -- Compose -----------------------------------------------------------------------------------------------------------


def test_forward_in_order_and_inv_in_reverse() -> None:
    compose = Compose(Shift(1.0), Times())
    assert compose(rows())["observation"][3] == 8  # (3 + 1) * 2
    assert compose.inv(rows())["observation"][8] == 3  # 8 / 2 - 1
    assert torch.equal(compose(compose.inv(rows()))["observation"], rows()["observation"])


def test_compose_is_a_list_of_its_members() -> None:
    first, second, function = Shift(1.0), Times(), lambda td: td
    compose = Compose(first, second)
    compose.append(function)
    compose.insert(0, Plain())
    assert len(compose) == 4 and compose[1] is first and compose[-1] is function
    assert list(compose)[2] is second and compose.transforms[1:3] == (first, second)
    part = compose[1:3]
    assert isinstance(part, Compose) and part[0] is first and len(part) == 2
    assert compose.pop() is function and compose.pop(0) is not None and len(compose) == 2
    compose.insert(2, function)
    assert compose[2] is function
    assert [*Compose([first, second])] == [first, second] == [*Compose(transforms=[first, second])]
    assert list(compose.parameters()) == [first.by]
    compose.pop(0)
    assert list(compose.parameters()) == []
    assert Compose()(rows())["observation"][3] == 3


def test_compose_takes_transforms_only() -> None:
    for wrong, got in ((3, "int"), (Times, "the class Times")):
        with pytest.raises(TypeError, match=rf"must have forward\(td\) or be a function of td, got {got}"):
            Compose(Shift(1.0), wrong)  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=got):
            Compose().append(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="not both"):
        Compose(Times(), transforms=[Times()])
    with pytest.raises(ValueError, match="within the 1 members, got 2"):
        Compose(Times()).insert(2, Times())


def test_plain_objects_and_functions_are_members() -> None:
    compose = Compose(Plain(), lambda td: td.set("more", td["observation"] + 1))
    td = rows().set("junk", torch.zeros(12))
    assert "junk" not in compose.inv(td) and "junk" in td
    assert {"seen", "more"} <= set(compose(td).keys())


@pytest.mark.parametrize("nested", [False, True])
def test_members_that_look_ahead_or_want_ends_get_what_they_need(nested: bool) -> None:
    """n-step and next observations in a Compose are those of the transforms given one by one."""
    members = [MultiStepTransform(3, 0.9), Shift(0.5), NextStateReconstructor(fill_value=-1.0)]
    composed = Compose(members[0], Compose(*members[1:])) if nested else Compose(*members)
    samples = []
    for transforms in (members, [composed]):
        buffer = ReplayBuffer(
            storage=LazyTensorStorage(12),
            sampler=SliceSampler(slice_len=3),
            transform=transforms[0],
            batch_size=6,
            generator=torch.Generator().manual_seed(1),
        )
        for transform in transforms[1:]:
            buffer.append_transform(transform)
        buffer.extend(rows())
        samples.append([buffer.sample() for _ in range(5)] + [buffer[:]])
    for one, other in zip(*samples, strict=True):
        assert set(one.keys(True, True)) == set(other.keys(True, True))
        assert all(torch.equal(one[key], other[key]) for key in one.keys(True, True))
        assert (one["steps_to_next_obs"] > 1).any()


def test_appending_a_compose_that_looks_ahead_needs_the_index() -> None:
    buffer = ReplayBuffer(storage=LazyTensorStorage(12), batch_size=6)
    buffer.extend(rows())
    with pytest.raises(
        RuntimeError, match=r"Compose follows trajectories.*append it before the first extend"
    ):
        buffer.append_transform(Compose(Times(), MultiStepTransform(3, 0.9)))
    with pytest.raises(RuntimeError, match="MultiStepTransform follows trajectories"):
        buffer.insert_transform(0, MultiStepTransform(3, 0.9))


# -- in buffers and collectors ---------------------------------------------------------------------------------------


def test_append_and_insert_in_a_buffer() -> None:
    buffer = buffer_of(Times())  # stores half of each
    assert buffer[:]["observation"].tolist() == list(range(12))
    assert buffer.insert_transform(0, lambda td: td.set("observation", td["observation"] + 1)) is buffer
    assert buffer[:]["observation"].tolist() == [i + 2 for i in range(12)]
    buffer.append_transform(lambda td: td.set("observation", td["observation"] + 1))
    assert buffer[3]["observation"] == 6
    buffer.insert_transform(-1, Shift(100.0))
    assert buffer[3]["observation"] == 106
    with pytest.raises(ValueError, match="within the 4 transforms, got 5"):
        buffer.insert_transform(5, Times())
    with pytest.raises(TypeError, match="got the class Times"):
        buffer.append_transform(Times)


def test_inverted_transforms_do_their_work_once() -> None:
    calls = []

    def slow(td: TensorDictBase) -> TensorDictBase:
        calls.append(len(td))
        return td.set("observation", td["observation"] * 10)

    buffer = ReplayBuffer(storage=LazyTensorStorage(12), batch_size=6)
    buffer.append_transform(slow, invert=True).append_transform(Times(), invert=True)
    data = rows()
    buffer.extend(data)
    assert data["observation"][3] == 3  # the caller's batch
    assert buffer.sample().batch_size == (6,) and buffer[3]["observation"] == 30 and calls == [12]
    for wrong in (MultiStepTransform(3, 0.9), NextStateReconstructor(), Compose(NextStateReconstructor())):
        with pytest.raises(ValueError, match=r"follows trajectories of samples .* leave invert=True out"):
            buffer.append_transform(wrong, invert=True)


def test_none_is_no_batch() -> None:
    for transform in (lambda td: None, Compose(lambda td: None)):
        buffer = buffer_of(transform)
        for use in (lambda rb: rb.sample(), lambda rb: rb[2]):
            with pytest.raises(TypeError, match="<lambda> returned None: a transform must return the batch"):
                use(buffer)

    class Swallows(Transform):
        def inv(self, td: TensorDictBase) -> None:  # type: ignore[override]
            return None

    buffer = ReplayBuffer(storage=LazyTensorStorage(12), transform=Swallows(), batch_size=6)
    with pytest.raises(TypeError, match="Swallows returned None"):
        buffer.extend(rows())
    assert len(buffer) == 0
    with pytest.raises(TypeError, match="postproc returned None"):
        next(
            iter(
                Collector(
                    gym.make("CartPole-v1"), frames_per_batch=4, total_frames=4, postproc=lambda td: None
                )
            )
        )


def test_rows_dropped_before_a_transform_that_must_know_them() -> None:
    def only_even(td: TensorDictBase) -> TensorDictBase:
        return td[::2]

    for transform in ([only_even, NextStateReconstructor()], [Compose(only_even, NextStateReconstructor())]):
        buffer = buffer_of(sampler=SliceSampler(slice_len=3))
        for each in transform:
            buffer.append_transform(each)
        with pytest.raises(
            ValueError, match=r"changed the sample's rows from \[6\] to \[3\]: put that one after it"
        ):
            buffer.sample()
    assert len(buffer_of(Compose(NextStateReconstructor(), only_even)).sample()) == 3  # in this order it may
    with pytest.raises(ValueError, match=r"transforms \(<lambda>\) turned 1 rows into \[2\]"):
        buffer_of(lambda td: torch.cat([td, td]))[3]
    assert len(buffer_of(only_even)[2:8]) == 3


def test_rows_changed_on_the_way_in_do_not_go_with_final() -> None:
    class Drop(Transform):
        def inv(self, td: TensorDictBase) -> TensorDictBase:
            return td[4:]

    buffer = ReplayBuffer(storage=LazyTensorStorage(12, compact_obs=True), transform=Drop(), batch_size=6)
    data = rows()
    at = torch.tensor([3, 7, 11])
    final = TensorDict({"row": at, "next": {"observation": data["next", "observation"][at]}}, [3])
    with pytest.raises(
        ValueError, match=r"final refers to the rows of the batch, \[12\], .* changed them to \[8\]"
    ):
        buffer.extend(data.exclude(("next", "observation")), final=final)
    assert len(buffer) == 0
    other = ReplayBuffer(storage=LazyTensorStorage(12, compact_obs=True), transform=Times(), batch_size=6)
    with pytest.raises(
        ValueError, match=r"inv changes 'observation' and leaves final\[\('next', 'observation'\)\]"
    ):
        other.extend(data.exclude(("next", "observation")), final=final)
    assert len(other) == 0
    other = ReplayBuffer(
        storage=LazyTensorStorage(12, compact_obs=True), transform=Compose(Plain()), batch_size=6
    )
    other.extend(data.exclude(("next", "observation")), final=final)
    assert torch.equal(other[:]["next", "observation"], data["next", "observation"])
    buffer.extend(data)
    assert len(buffer) == 8
    with pytest.raises((ValueError, IndexError, RuntimeError)):
        buffer[0:6] = rows(12)[:6]


def test_samples_of_any_kind() -> None:
    tensors = ReplayBuffer(storage=LazyTensorStorage(4), transform=lambda x: x * 2, batch_size=2)
    tensors.extend(torch.arange(4))
    assert tensors[:].tolist() == [0, 2, 4, 6]
    items = ReplayBuffer(
        storage=ListStorage(4), transform=Compose(lambda x: x), collate_fn=list, batch_size=2
    )
    items.extend(["a", "b"])
    assert set(items.sample()) <= {"a", "b"}
    with pytest.raises(TypeError, match="ToTensorImage needs tensordicts, got Tensor"):
        tensors.insert_transform(0, ToTensorImage()).sample()


def test_tensordict_buffers_and_ensembles() -> None:
    transform = Compose(Shift(0.5), RenameTransform(["observation"], ["obs"]))
    members = []
    for _ in range(2):
        member = TensorDictReplayBuffer(storage=LazyTensorStorage(12), transform=transform)
        member.extend(rows())
        members.append(member)
    both = ReplayBufferEnsemble(*members, batch_size=8)
    both.append_transform(RenameTransform(["obs"], ["x"], create_copy=True)).insert_transform(
        0, Shift(0.25, "obs")
    )
    sample = both.sample()
    assert sample.batch_size == (2, 4) and torch.equal(sample["x"] % 1, torch.full((2, 4), 0.25))


@pytest.mark.parametrize(
    "postproc",
    [
        Compose(RenameTransform(["observation"], ["obs"], create_copy=True), lambda td: td),
        MultiStep(0.9, 2),
        Compose(
            MultiStepTransform(2, 0.9), SelectTransform("observation", "obs", "next", "steps_to_next_obs")
        ),
        ExcludeTransform("action"),
    ],
    ids=["compose", "multi step", "multi step transform", "exclude"],
)
def test_as_postproc_of_a_collector(postproc: Any) -> None:
    collector = Collector(
        gym.make("CartPole-v1"), frames_per_batch=8, total_frames=16, seed=0, postproc=postproc
    )
    plain = Collector(gym.make("CartPole-v1"), frames_per_batch=8, total_frames=16, seed=0)
    for batch, expected in zip(collector, plain, strict=True):
        expected = postproc(expected)
        assert set(batch.keys(True, True)) == set(expected.keys(True, True))
        assert torch.equal(batch["observation"], expected["observation"])
        assert torch.equal(batch["next", "reward"], expected["next", "reward"])


def test_foreign_modules_go_on_working() -> None:
    class Module(nn.Module):
        def forward(self, td: TensorDictBase) -> TensorDictBase:
            return td.set("doubled", 2 * td["observation"])

    sample = buffer_of(Compose(Module())).sample()
    assert torch.equal(sample["doubled"], 2 * sample["observation"])


def test_crops_in_a_compose() -> None:
    crop = RandomCropTensorDict(3, generator=torch.Generator().manual_seed(0))
    whole = rows().reshape(3, 4)
    buffer = ReplayBuffer(storage=LazyTensorStorage(3), transform=Compose(Shift(1.0), crop), batch_size=5)
    buffer.extend(whole)
    assert buffer.sample().batch_size == (5, 3)
    with pytest.raises(ValueError, match=r"RandomCropTensorDict needs samples \[\*B, T\]"):
        buffer_of(Compose(crop)).sample()


def test_torchrl_transforms_work_in_our_buffers() -> None:
    torchrl = pytest.importorskip("torchrl.envs")
    theirs = torchrl.Compose(torchrl.RenameTransform(["observation"], ["obs"], ["observation"], ["obs"]))
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(12), transform=Compose(theirs, Shift(1.0, "obs")), batch_size=6
    )
    data = RenameTransform(["observation"], ["obs"])(rows())
    data["obs"] += 1
    buffer.extend(data)
    assert torch.equal(buffer[:]["obs"], rows()["observation"] + 1)


@pytest.mark.parametrize("foreign", [False, True])
def test_items_of_a_list_go_through_inv_one_by_one(foreign: bool) -> None:
    transform: Any
    if foreign:
        theirs = pytest.importorskip("torchrl.envs.transforms")
        transform = theirs.Compose(theirs.UnsqueezeTransform(-1, in_keys=["x"], in_keys_inv=["x"]))
    else:
        transform = Squeezed(in_keys_inv=["x"], out_keys_inv=["x"])
    buffer = ReplayBuffer(storage=ListStorage(4), transform=transform)
    items = [TensorDict({"x": torch.full((2, 1), float(i))}, []) for i in range(3)]
    buffer.add(items[0])
    buffer.extend(items[1:])
    assert [tuple(buffer[i]["x"].shape) for i in range(3)] == [(2,)] * 3


class Squeezed(Transform):
    def forward(self, td: Any) -> Any:
        return td

    def _inv_apply_transform(self, value: Any) -> Any:
        return value.squeeze(-1)
