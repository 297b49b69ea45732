"""Maps and forests at their edges: overwrites, cycles, diamonds, wide observations, equal hashes."""

import sys
from collections.abc import Callable

import matplotlib.pyplot as plt
import pytest
import torch
from counting import count_calls
from tensordict import TensorDict

from flatroll.buffers import LazyTensorStorage
from flatroll.trees import (
    BinaryToDecimal,
    HashToInt,
    MCTSForest,
    QueryModule,
    RandomProjectionHash,
    SipHash,
    TensorDictMap,
    best_edges,
    puct,
    ucb,
)


def keys(*rows: float) -> TensorDict:
    return TensorDict({"key": torch.tensor(rows)}, [len(rows)])


def values(*rows: float) -> TensorDict:
    return TensorDict({"value": torch.tensor(rows)}, [len(rows)])


def steps(*transitions: tuple[int, int, int]) -> TensorDict:
    seen, action, then = torch.tensor(transitions).unbind(-1)
    return TensorDict({"observation": seen, "action": action, "next": {"observation": then}}, [len(seen)])


def at(observation: int) -> TensorDict:
    return TensorDict({"observation": torch.tensor(observation)})


def calls_in(work: Callable[[], object]) -> int:
    """How many functions, of Python and of C, are called."""
    return count_calls(work, "call", "c_call")


# 1
@pytest.mark.parametrize("storage", [None, LazyTensorStorage(100)])
def test_an_overwrite_adds_no_key(storage) -> None:
    mapped = TensorDictMap(query_module=QueryModule(["key"]), storage=storage)
    for _ in range(4):
        mapped[keys(*range(9))] = values(*range(9))
    assert len(mapped) == 9
    assert mapped.contains(keys(8, 9, 10)).tolist() == [True, False, False]
    with pytest.raises(KeyError):
        mapped[keys(9)]


# 2
def test_equal_keys_of_a_batch_are_summed_once_each() -> None:
    mapped = TensorDictMap(
        query_module=QueryModule(["key"]), write_fn=lambda new, old=None: new if old is None else new + old
    )
    mapped[keys(1, 1, 3)] = values(1.0, 2.0, 3.0)
    assert mapped[keys(1, 3)]["value"].tolist() == [3.0, 3.0]
    mapped[keys(3, 1, 3)] = values(1.0, 1.0, 1.0)
    assert mapped[keys(1, 3)]["value"].tolist() == [4.0, 5.0]


# 3
def test_each_child_has_its_own_hash() -> None:
    forest = MCTSForest()
    order = torch.randperm(500, generator=torch.Generator().manual_seed(0)).tolist()
    forest.extend(steps(*((0, action, 1000 + action) for action in order)))
    for child in forest.get_tree(at(0)).subtree:
        alone = MCTSForest()
        action = child.branching_action.item()
        alone.extend(steps((0, action, 1000 + action), (0, 600, 1)))
        assert child.hash == alone.get_tree(at(0)).subtree[0].hash
        assert child.node_observation.item() == 1000 + action


# 4
def test_visits_are_counted() -> None:
    forest = MCTSForest()
    for _ in range(3):
        forest.extend(steps((0, 0, 1), (1, 0, 2)))
    forest.extend(steps((0, 1, 3)))
    tree = forest.get_tree(at(0))
    assert tree.count == tree.visits == 4 and [child.count for child in tree.subtree] == [3, 1]


# 5
@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("max_depth", [None, 3])
@pytest.mark.parametrize(
    "transitions",
    [
        [(0, 0, 0)],
        [(0, 0, 1), (1, 0, 0)],
        [(0, 0, 1), (1, 0, 1)],
        [(0, 0, 1), (1, 0, 2), (2, 0, 1), (2, 1, 0)],
    ],
)
def test_cycles_end(transitions: list[tuple[int, int, int]], max_depth: int | None, compact: bool) -> None:
    forest = MCTSForest()
    forest.extend(steps(*transitions))
    tree = forest.get_tree(at(0), max_depth=max_depth, compact=compact)
    shown = [
        row
        for vertex in tree.vertices().values()
        if vertex.rollout is not None
        for row in vertex.rollout["action"]
    ]
    assert len(shown) == len(transitions)
    for path in tree.valid_paths():
        tree.rollout_from_path(path)
    assert tree.to_string() and tree.edges() and tree.max_length() >= 1 and tree.plot() is not None


def test_a_deep_graph_of_diamonds_takes_time_in_its_transitions() -> None:
    """2 ** 200 ways lead down."""

    def diamonds(depth: int) -> tuple[int, int]:
        rows = [(2 * d + i, a, 2 * (d + 1) + a) for d in range(depth) for i in range(2) for a in range(2)]
        forest = MCTSForest()
        forest.extend(steps(*rows[0:1], *rows))

        def look() -> None:
            tree = forest.get_tree(at(0))
            vertices.append(tree.num_vertices())
            paths = list(tree.valid_paths())
            assert all(tree.rollout_from_path(path) is not None for path in paths[:5])

        vertices: list[int] = []
        return calls_in(look), vertices[0]

    diamonds(2)  # imports and compiles
    few, _ = diamonds(100)
    many, vertices = diamonds(200)
    assert vertices == 4 * 200 - 1 and (many < 2.2 * few), (few, many)


def test_two_ways_into_a_state() -> None:
    forest = MCTSForest()
    forest.extend(steps((0, 0, 1), (0, 1, 2), (1, 0, 3), (2, 0, 3), (3, 0, 4)))
    tree = forest.get_tree(at(0))
    ends = [tree.rollout_from_path(path)["next", "observation"].tolist() for path in tree.valid_paths()]
    assert ends == [[1, 3, 4], [2, 3, 4]]


# 6
def test_both_outcomes_of_an_action_are_kept() -> None:
    forest = MCTSForest()
    forest.extend(steps((0, 0, 1), (0, 0, 2)))
    assert [child.node_observation.item() for child in forest.get_tree(at(0)).subtree] == [1, 2]


# 7
def test_more_than_a_thousand_transitions_and_refused_batches() -> None:
    forest = MCTSForest()
    forest.extend(steps(*((i, 0, i + 1) for i in range(2500))))
    assert len(forest) == 2500
    mapped = TensorDictMap(query_module=QueryModule(["key"]), storage=LazyTensorStorage(3))
    mapped[keys(1, 2)] = values(1, 2)
    with pytest.raises(
        RuntimeError, match=r"2 new keys do not fit: the map has 2 of at most 3. Nothing was written"
    ):
        mapped[keys(1, 5, 6)] = values(9, 9, 9)
    assert len(mapped) == 2 and not mapped.contains(keys(5, 6)).any() and mapped[keys(1)]["value"].item() == 1


# 8
def test_wide_observations_are_told_apart() -> None:
    frames = torch.rand(1, 84).repeat(20_000, 1)
    frames[:, 7] = torch.arange(20_000.0)
    mapped = TensorDictMap.from_tensordict_pair(
        TensorDict({"o": frames}, [20_000]), values(*range(20_000)), ["o"]
    )
    mapped[TensorDict({"o": frames}, [20_000])] = values(*range(20_000))
    assert len(mapped) == 20_000
    pixels = torch.zeros(400, 20, 20, dtype=torch.uint8)
    pixels.view(400, 400)[torch.arange(400), torch.arange(400)] = 1
    assert QueryModule(["o"])(TensorDict({"o": pixels}, [400]))["_index"].tolist() == list(range(400))


def test_a_random_projection_can_be_loaded() -> None:
    one, other = RandomProjectionHash(), RandomProjectionHash()
    rows = torch.randn(5, 30)
    hashes = one(rows)
    other.load_state_dict(one.state_dict())
    assert other(rows).equal(hashes)


# 9
def test_hashes_do_not_change_between_processes() -> None:
    assert SipHash()(torch.tensor([[0.1, 2.0]])).tolist() == [-910936274932194541]  # as it was written down


def test_zeros_are_equal_and_close_numbers_are_not() -> None:
    zero, minus = SipHash()(torch.tensor([[0.0], [-0.0]]))
    assert zero == minus
    large = SipHash()(torch.tensor([[1e5], [2e5]], dtype=torch.bfloat16))
    assert large[0] != large[1]


def test_bits() -> None:
    read = BinaryToDecimal(4, "cpu", torch.int32)
    assert read(torch.tensor([[0, 0, 1, 0, 0, 0, 0, 1], [0, 0, 0, 1, 0, 0, 1, 0]])).tolist() == [33, 18]
    assert read(torch.zeros(2, 3, 8)).shape == (2, 3)
    with pytest.raises(ValueError, match="at most 31"):
        BinaryToDecimal(40, "cpu", torch.int32)


# 10
def test_calls_at_the_edges(monkeypatch: pytest.MonkeyPatch) -> None:
    query = QueryModule(["key"])
    mapped = TensorDictMap(query_module=query)
    assert mapped.contains(keys(1)).tolist() == [False] and len(mapped) == 0  # an empty map
    with pytest.raises(KeyError):
        mapped[keys(1)]
    mapped[keys(1, 2)] = values(1, 2)
    mapped[keys(1, 2, 3, 4).reshape(2, 2)] = values(1, 2, 3, 4).reshape(2, 2)  # two batch dims
    assert mapped[keys(4, 3).reshape(1, 2)]["value"].tolist() == [[4, 3]]
    assert mapped.state_dict() and HashToInt().state_dict()
    mapped.clear()
    assert len(mapped) == 0
    forest = MCTSForest()
    assert forest.extend(steps((0, 0, 1)), return_node=True).count == 1
    with pytest.raises(KeyError, match="no transition of the forest begins or ends at the observation"):
        forest.get_tree(at(77))
    tree = forest.get_tree(at(0))
    plt.close(tree.plot().figure)
    boxes = tree.plot("matplotlib", "box", None, lambda vertex: f"{vertex.count} x", ax=plt.figure().gca())
    assert [text.get_text() for text in boxes.texts] == ["1 x"] and boxes.patches
    plt.close(boxes.figure)
    for options in ({"backend": "plotly"}, {"figure": "sunburst"}, {"info": ["hash"]}):
        with pytest.raises(ValueError, match="backend='matplotlib' and figure='tree' or 'box'"):
            tree.plot(**options)
    monkeypatch.setitem(sys.modules, "flatroll.trees.picture", None)  # as where matplotlib is missing
    with pytest.raises(ImportError, match=r'pip install "flatroll\[plot\]"'):
        tree.plot()


def test_the_reference_s_example_of_a_map() -> None:
    index = TensorDict(
        {"key1": torch.tensor([[-1], [1], [3], [-3]]), "key2": torch.tensor([[0], [2], [4], [-4]])}, [4]
    )
    value = TensorDict({"out": torch.tensor([[10], [20], [30], [40]])}, [4])
    mapped = TensorDictMap(
        query_module=QueryModule(in_keys=["key1", "key2"], index_key="index"), storage=LazyTensorStorage(1000)
    )
    mapped[index] = value
    assert mapped.contains(index).sum() == 4
    assert (mapped[index.clone().set("key3", torch.tensor([[4], [5], [6], [7]]))] == value).all()


def test_one_duplicate_costs_little() -> None:
    columns = torch.arange(1024)
    mapped = TensorDictMap(query_module=QueryModule(["key"]))
    mapped[TensorDict({"key": columns}, [1024])] = TensorDict({"value": columns}, [1024])
    twice = columns.clone()
    twice[-1] = 0

    def write(rows: torch.Tensor) -> None:
        mapped[TensorDict({"key": rows}, [1024])] = TensorDict({"value": rows}, [1024])

    once, more = calls_in(lambda: write(columns)), calls_in(lambda: write(twice))
    assert more < once + 100


# 11
def test_scores_of_unvisited_children() -> None:
    total, count = torch.zeros(3), torch.tensor([0, 2, 0])
    for score in (ucb(total / count, count, torch.zeros(3, dtype=torch.int64)),
                  puct(total / count, count, torch.ones(3) / 3, torch.zeros(3, dtype=torch.int64))):  # fmt: skip
        assert not score.isnan().any() and best_edges(score, torch.zeros(3, dtype=torch.int64))[
            1
        ].tolist() == [0]
