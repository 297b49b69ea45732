"""Weights with a version: each reader gets whole versions, and never an older one than before."""

from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

from flatroll.sharing import Channel, Nursery, SharedWeights


def filled(value: float) -> dict[str, torch.Tensor]:
    matrix = torch.full((100, 50), float(value))
    return {"weight": matrix, "bias": torch.tensor(float(value)), "count": torch.tensor(int(value))}


def test_a_reader_gets_the_newest_version() -> None:
    weights, mine = SharedWeights(filled(0)), filled(-1)
    assert weights.fetch_into(mine) == 0 == weights.version
    for version in range(1, 6):
        assert weights.publish(filled(version)) == version
        if version != 3:
            assert weights.fetch_into(mine) == version
            assert {float(value.mean()) for value in mine.values() if value.is_floating_point()} == {version}
            assert mine["count"] == version


def test_a_module_acts_with_what_it_fetched() -> None:
    learner = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    learner(torch.randn(5, 3))
    actor = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    weights = SharedWeights(learner.state_dict())
    weights.fetch_into(actor.state_dict())
    x = torch.randn(5, 3)
    assert torch.equal(learner.eval()(x), actor.eval()(x))
    assert SharedWeights(nn.ReLU().state_dict()).fetch_into({}) == 0  # nothing to share is shared


def test_a_writer_that_stops_in_the_middle_leaves_the_version_before() -> None:
    weights, mine = SharedWeights(filled(0)), filled(-1)
    weights.publish(filled(1))
    weights._header[0] = 2  # begun
    weights._copies[0]["weight"][:50].fill_(2)
    assert weights.fetch_into(mine) == 1
    assert (mine["weight"] == 1).all()


@pytest.mark.parametrize("updates", [1, 2, 3])
def test_updates_while_weights_are_read_give_no_mixture(updates: int) -> None:
    weights, mine, reads = SharedWeights(filled(0)), filled(-1), 0

    class Reader(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            nonlocal reads
            reads += 1
            if reads == 5:  # three are checked, and the first of three was copied
                for version in range(1, updates + 1):
                    weights.publish(filled(version))
            return super().__getitem__(name)

    version = weights.fetch_into(Reader(mine))
    assert version == (0 if updates == 1 else updates)  # version 0 was still whole after one update
    assert {float(value.double().mean()) for value in mine.values()} == {version}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"weight": torch.zeros(100, 51)},
            r"'weight' was shared as float32 \[100, 50\], got float32 \[100, 51\]: a policy",
        ),
        (
            {"bias": torch.zeros((), dtype=torch.float64)},
            r"'bias' was shared as float32 \[\], got float64 \[\]",
        ),
        ({"new": torch.zeros(1)}, r"other names than the shared ones: missing \[\], new \['new'\]"),
    ],
)
def test_other_shapes_are_refused_and_change_nothing(change: dict[str, Any], message: str) -> None:
    weights, mine = SharedWeights(filled(0)), filled(-1)
    for use in (weights.publish, weights.fetch_into):
        with pytest.raises(ValueError, match=message):
            use(filled(1) | change)
    assert weights.fetch_into(mine) == 0 and (mine["weight"] == 0).all()


def test_what_has_no_shape_is_refused() -> None:
    with pytest.raises(TypeError, match=r"weight 'weight' is of type UninitializedParameter: only tensors"):
        SharedWeights(nn.LazyLinear(3).state_dict())
    with pytest.raises(TypeError, match=r"weight 'extra' is of type int"):
        SharedWeights({"extra": 3})  # type: ignore[dict-item]


def read_until_told(channel: Channel, weights: SharedWeights) -> None:
    """Fetch all the time; say when there were more than ten versions. At the end report the number of versions seen,
    of mixtures, of steps back, and the last version."""
    mine, seen, mixed, back = filled(-1), {-1}, 0, 0
    while not channel.hung_up():
        version = weights.fetch_into(mine)
        mixed += any((value != version).any() for value in mine.values())
        back += version < max(seen)
        if version not in seen and len(seen) == 11:
            channel.send("many")
        seen.add(version)
    channel.send("seen", (mixed, back, weights.fetch_into(mine)))


def test_ten_thousand_updates_are_never_read_as_a_mixture(nursery: Nursery) -> None:
    weights = SharedWeights(filled(0))
    reader = nursery.start(read_until_told, weights=weights)
    version, many = 0, False
    while version < 10_000 or not many:  # a reader may be late: it is to read while weights are published
        version += 1
        weights.publish(filled(version))
        if version % 1000 == 0 and not many:
            with suppress(TimeoutError):
                reader.receive("many", timeout=0.0)
                many = True
    reader.channel.finish()
    assert reader.receive("seen", timeout=600) == (0, 0, version)
