"""`MCTSForest` and `Tree`, against networkx and by hand."""

from collections import Counter
from itertools import pairwise

import networkx as nx
import pytest
import torch
from forms import scaled
from tensordict import TensorDict

from flatroll.layout import audit, run_ends, split_trajectories
from flatroll.trees import MCTSForest, QueryModule, TensorDictMap, Tree


def steps(*transitions: tuple[int, int, int], reward: float = 1.0) -> TensorDict:
    """Rows of (observation, action, next observation)."""
    seen, action, then = torch.tensor(transitions, dtype=torch.int64).reshape(-1, 3).unbind(-1)
    ones = torch.full((len(seen), 1), reward)
    after = {"observation": then, "reward": ones, "done": then == 99}
    return TensorDict({"observation": seen, "action": action, "next": after}, [len(seen)])


def at(observation: int) -> TensorDict:
    return TensorDict({"observation": torch.tensor(observation)})


def forest_of(*transitions: tuple[int, int, int], **options: object) -> MCTSForest:
    forest = MCTSForest(**options)
    forest.extend(steps(*transitions))
    return forest


def as_networkx(transitions: list[tuple[int, int, int]]) -> nx.MultiDiGraph:
    graph = nx.MultiDiGraph()
    for seen, action, then in dict.fromkeys(transitions):
        graph.add_edge(seen, then, action=action)
    return graph


@pytest.mark.parametrize("seed", scaled(quick=[0, 1, 2, 5], long=range(12)))  # the graphs grow with it
@pytest.mark.parametrize("compact", [True, False])
def test_random_graphs_against_networkx(seed: int, compact: bool) -> None:
    """Graphs with cycles, self-loops, transpositions and actions with several outcomes."""
    generator = torch.Generator().manual_seed(seed)
    states, rows = 5 + 12 * seed, 10 + 14 * seed
    drawn = torch.stack([torch.randint(n, (rows,), generator=generator) for n in (states, 3, states)], -1)
    transitions = [tuple(row) for row in drawn.tolist()]
    forest, graph, counts = MCTSForest(), as_networkx(transitions), Counter(transitions)
    for first in range(0, rows, 7):
        forest.extend(steps(*transitions[first : first + 7]))
    assert len(forest) == graph.number_of_edges() and forest.num_states == graph.number_of_nodes()
    for root in graph.nodes:
        tree = forest.get_tree(at(root), compact=compact)
        reached = graph.subgraph(nx.descendants(graph, root) | {root})
        vertices = list(tree.vertices(key_type="id").values())
        chains = [vertex.rollout for vertex in vertices if vertex.rollout is not None]
        rows_of_chains = [row for chain in chains for row in triples(chain)]
        assert Counter(rows_of_chains) == Counter(dict.fromkeys(edges_of(reached), 1))  # each transition once
        if compact:
            assert all(is_unbranched(chain, reached, root) for chain in chains)
        for vertex in vertices:
            leaving = {(a, b) for _, b, a in reached.out_edges(int(vertex.node_observation), data="action")}
            found = {(triples(c.rollout)[0][1], triples(c.rollout)[0][2]) for c in vertex.subtree or ()}
            assert found == leaving
            if vertex.node_id:
                assert vertex.count == counts[triples(vertex.rollout)[0]] == vertex.visits
                assert vertex.wins == vertex.count
        for path in tree.valid_paths():
            taken = [] if tree.rollout is None and not path else triples(tree.rollout_from_path(path))
            assert all(before[2] == after[0] for before, after in pairwise(taken))
            assert not taken or taken[0][0] == root


def triples(rollout: TensorDict) -> list[tuple[int, int, int]]:
    columns = [rollout[key].tolist() for key in ("observation", "action", ("next", "observation"))]
    return list(zip(*columns, strict=True))


def edges_of(graph: nx.MultiDiGraph) -> list[tuple[int, int, int]]:
    return [(seen, action, then) for seen, then, action in graph.edges(data="action")]


def is_unbranched(chain: TensorDict, graph: nx.MultiDiGraph, root: int) -> bool:
    """Chains go on as long as one transition enters and one leaves a state, and no further."""
    *inner, last = [then for _, _, then in triples(chain)]
    passes = [state for state in inner if graph.in_degree(state) == graph.out_degree(state) == 1]
    ends = graph.out_degree(last) != 1 or graph.in_degree(last) > 1 or last == root
    return passes == inner and ends and root not in inner


# -- by hand -----------------------------------------------------------------------------------------------------


def test_a_branching_run() -> None:
    forest = MCTSForest()
    forest.extend(steps((0, 1, 123), (123, 2, 392), (392, 3, 989), (989, 4, 99)))
    forest.extend(steps((0, 1, 123), (123, 2, 392), (392, 6, 235), (235, 7, 38)))
    tree = forest.get_tree(at(0))
    assert (tree.count, tree.hash, tree.node_id, tree.parent, tree.wins) == (2, None, 0, None, 0.0)
    assert triples(tree.rollout) == [(0, 1, 123), (123, 2, 392)] and tree.num_steps == 2
    assert tree.node_observation.item() == tree.node_data["observation"].item() == 392
    assert tree.selected_actions.tolist() == [3, 6] and tree.num_children == 2
    left, right = tree.subtree
    assert triples(left.rollout) == [(392, 3, 989), (989, 4, 99)]
    assert (left.branching_action.item(), left.prev_action.item()) == (3, 4)
    assert (left.is_terminal, right.is_terminal, tree.is_terminal) == (True, False, False)
    assert left.parent == tree and left.parents == (tree,) and left.subtree is None
    assert left.selected_actions is None
    assert (
        list(tree.valid_paths()) == [(0,), (1,)] == list(MCTSForest.valid_paths(tree))
        and tree.max_length() == 1
    )
    assert (
        triples(tree.rollout_from_path((1,)))[-1] == (235, 7, 38) and len(tree.rollout_from_path((1,))) == 4
    )
    assert tree.edges() == [(0, 1), (0, 2)] and tree.num_vertices() == 3
    assert forest.edges.count.tolist() == [2, 2, 1, 1, 1, 1]
    assert tree.index.tolist() == [2, 4] and forest.rows(tree.index)["action"].tolist() == [3, 6]
    assert (
        right in tree and tree.get_vertex_by_id(2) == right and tree.get_vertex_by_hash(right.hash) == right
    )
    assert right not in left and tree in tree
    assert tree.fully_expanded(2) and not tree.fully_expanded(3) and not left.fully_expanded(1)
    for call in (lambda: tree.get_vertex_by_id(7), lambda: tree.get_vertex_by_hash(7)):
        with pytest.raises(ValueError, match="no vertex"):
            call()
    with pytest.raises(IndexError, match=r"path\[0\] is 5, but there are 2 children"):
        tree.rollout_from_path((5,))
    with pytest.raises(ValueError, match="key_type"):
        tree.vertices(key_type="number")
    assert list(tree.vertices()) == [None, left.hash, right.hash]
    assert list(tree.vertices(key_type="path")) == [(), (0,), (1,)]


def test_uncompacted_trees_and_depth() -> None:
    forest = forest_of((0, 0, 1), (1, 0, 2), (2, 0, 3), (3, 0, 99), (2, 1, 5))
    tree = forest.get_tree(at(0), compact=False)
    assert tree.rollout is None and tree.num_vertices() == 6 and tree.max_length() == 4
    assert [forest.get_tree(at(0), compact=False, max_depth=depth).max_length() for depth in range(5)] == [
        1,
        2,
        3,
        4,
        4,
    ]
    with pytest.raises(ValueError, match="max_depth"):
        forest.get_tree(at(0), max_depth=-1)


def test_the_end_of_a_run_as_root() -> None:
    tree = forest_of((0, 0, 99)).get_tree(at(99))
    assert tree.node_observation.item() == 99 and (tree.count, tree.rollout, tree.subtree) == (0, None, None)
    assert list(tree.valid_paths()) == [()] and tree.max_length() == 0 and tree.rollout_from_path(()) is None
    assert tree.to_string() == ""


def test_two_outcomes_of_an_action() -> None:
    forest = forest_of((0, 1, 5), (0, 1, 6), (0, 1, 6))
    tree = forest.get_tree(at(0))
    assert tree.selected_actions.tolist() == [1, 1] and [child.count for child in tree.subtree] == [1, 2]
    assert len({child.hash for child in tree.subtree}) == 2 and not tree.fully_expanded(2)
    both = at(0).set("action", torch.tensor(1))
    assert forest.get_child(both)["next", "observation"].item() == 6  # the more frequent one
    with pytest.raises(KeyError, match="1 of 1 pairs of observation and action are not in the forest"):
        forest.get_child(at(0).set("action", torch.tensor(2)))


def test_shared_vertices() -> None:
    """Two ways into a state whose continuation branches."""
    tree = forest_of((0, 0, 1), (0, 1, 2), (1, 0, 3), (2, 0, 3), (3, 0, 4), (3, 1, 5)).get_tree(at(0))
    left, right = tree.subtree
    assert left.subtree == right.subtree and left.subtree[0].parents == (left, right)
    assert list(tree.valid_paths()) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert tree.num_vertices() == 5 and tree.num_vertices(count_repeat=True) == 7
    assert [triples(tree.rollout_from_path(path))[-1] for path in tree.valid_paths()] == [
        (3, 0, 4), (3, 1, 5), (3, 0, 4), (3, 1, 5),
    ]  # fmt: skip


def test_text() -> None:
    tree = forest_of((0, 0, 1), (0, 1, 2), (1, 0, 3), (1, 1, 0)).get_tree(at(0))
    assert tree.to_string() == "\n".join(
        [
            "(0,) {'observation': tensor(1)}",
            " (0, 0) {'observation': tensor(3)}",
            " (0, 1) {'observation': tensor(0)}",
            "  (0, 1, 0) {'observation': tensor(1)} (as (0,))",
            "  (0, 1, 1) {'observation': tensor(2)}",
            "(1,) {'observation': tensor(2)} (as (0, 1, 1))",
        ]
    )
    assert tree.to_string(lambda vertex: vertex.count).splitlines()[0] == "(0,) 1"
    assert "children=2" in repr(tree)


def test_hashes_are_the_same_in_all_forests() -> None:
    one, other = forest_of((0, 0, 1), (0, 1, 2)), forest_of((7, 7, 7), (0, 1, 2), (0, 0, 1))
    assert {v.hash for v in one.get_tree(at(0)).subtree} == {v.hash for v in other.get_tree(at(0)).subtree}


# -- what it takes and refuses ---------------------------------------------------------------------------------------


def test_any_flat_batch(make_rollout) -> None:
    batch = make_rollout()
    flat, lanes, compact, padded = MCTSForest(), MCTSForest(), MCTSForest(), MCTSForest()
    flat.extend(batch)
    lanes.extend(batch.reshape(10, -1))
    padded.extend(split_trajectories(batch))
    assert len(flat) == len(batch) and flat.num_states > len(batch)
    for forest in (lanes, padded):
        assert forest.get_tree(batch[0]).to_string() == flat.get_tree(batch[0]).to_string()
        assert sorted(forest.hashes.tolist()) == sorted(flat.hashes.tolist())
    left = batch.copy()
    del left["next", "observation"]
    with pytest.raises(ValueError, match=r"next observation of [0-9]+ rows is not known, the first is row"):
        compact.extend(left)
    assert len(compact) == compact.num_states == 0
    ends = run_ends(batch).nonzero().squeeze(-1)
    final = TensorDict(
        {"row": ends, "next": {"observation": batch["next", "observation"][ends]}}, [len(ends)]
    )
    compact.extend(left, final=final)
    assert all(a.equal(b) for a, b in zip(compact.edges, flat.edges, strict=True))
    root = batch[0].select("observation")
    assert compact.get_tree(root).to_string() == flat.get_tree(root).to_string()


def test_hidden_next_observations_are_refused() -> None:
    batch = steps((0, 0, 1), (1, 0, 2))
    batch["collector", "next_known"] = torch.tensor([True, False])
    with pytest.raises(ValueError, match="of 1 rows is not known, the first is row 1"):
        MCTSForest().extend(batch)


def test_a_refused_batch_leaves_nothing() -> None:
    forest = forest_of((0, 0, 1), (1, 0, 2), max_size=3)
    before = [column.clone() for column in forest.edges]
    bad = [
        (steps((1, 0, 2), (2, 0, 3), (3, 0, 4)), RuntimeError, "2 new transitions do not fit: .* 2 of at most 3"),
        (steps((7, 0, 8)).exclude("action"), KeyError, "'action'"),
        (steps((7, 0, 8)).exclude("observation"), KeyError, "'observation'"),
        (steps((7, 0, 8)).exclude(("next", "reward")), KeyError, "reward"),
        (steps((7, 0, 8)).float(), TypeError, "'observation' must be torch.int64"),
        (steps((7, 0, 8))[0], ValueError, "single row: use add"),
    ]  # fmt: skip
    for batch, kind, message in bad:
        with pytest.raises(kind, match=message):
            forest.extend(batch)
        assert all(a.equal(b) for a, b in zip(forest.edges, before, strict=True))
        assert forest.num_states == 3 and forest.states(steps((7, 0, 8))).tolist() == [-1]
    forest.extend(steps((2, 0, 3), (0, 0, 1)))
    assert forest.edges.count.tolist() == [2, 1, 1]


def test_empty_batches_and_roots() -> None:
    forest = MCTSForest()
    assert len(forest) == 0 and forest.edges.count.shape == (0,)
    with pytest.raises(KeyError, match="the forest is empty"):
        forest.get_tree(at(0))
    for unused in (forest, MCTSForest(observation_keys=["observation"])):
        assert steps((0, 0, 1)) not in unused.node_map and steps((0, 0, 1)) not in unused.data_map
        assert unused.find_edges(steps((0, 0, 1))).tolist() == [-1] and unused.hashes.shape == (0,)
    forest.extend(steps())
    assert len(forest) == 0 and forest.children(-1).tolist() == []
    forest.extend(steps((0, 0, 1)))
    forest.extend(steps())
    assert forest.children(0).tolist() == [0] and forest.children(1).tolist() == []
    with pytest.raises(ValueError, match="root must be one observation"):
        forest.get_tree(steps((0, 0, 1), (1, 0, 1)))
    assert forest.get_tree(steps((0, 0, 1))).count == 1


def test_single_steps_and_the_node_they_lead_to() -> None:
    forest = MCTSForest()
    assert forest.add(steps((0, 0, 1))[0]) is None
    tree = forest.extend(steps((0, 1, 2), (2, 1, 3)), return_node=True)
    assert isinstance(tree, Tree) and tree.num_children == 2
    assert forest.add(steps((2, 0, 4))[0], return_node=True).node_observation.item() == 2
    assert len(forest.to_string(at(0)).splitlines()) == 4


def test_names_of_keys() -> None:
    batch = steps((0, 0, 1), (1, 1, 2))
    batch = batch.rename_key_("observation", "pos").rename_key_(("next", "observation"), ("next", "pos"))
    batch = batch.rename_key_("action", "move").rename_key_(("next", "reward"), ("next", "score"))
    batch["big"] = torch.zeros(2, 100)
    forest = MCTSForest(
        observation_keys="pos",
        action_keys=["move"],
        reward_keys="score",
        done_keys=["done"],
        excluded_keys=["big"],
    )
    forest.extend(batch)
    tree = forest.get_tree(batch[0])
    assert tree.wins == 0.0 and tree.rollout["move"].tolist() == [0, 1] and "big" not in tree.rollout
    assert forest.edges.reward.tolist() == [1.0, 1.0]
    with pytest.raises(ValueError, match="excluded_keys"):
        MCTSForest(excluded_keys=["observation"])


def test_several_entries_make_a_state() -> None:
    batch = steps((0, 0, 1), (1, 1, 2), (1, 1, 2))
    batch["level"], batch["next", "level"] = torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    batch["next", "observation"][2] = 1
    forest = MCTSForest()
    forest.extend(batch)
    assert forest.num_states == 4 and set(forest.observation_keys) == {"observation", "level"}
    assert set(forest.get_tree(batch[0]).node_observation.keys()) == {"observation", "level"}


def test_maps_name_the_keys() -> None:
    def tens(column: torch.Tensor) -> torch.Tensor:
        return column // 10

    node_map = TensorDictMap(query_module=QueryModule(["observation"], hash_module=tens))
    data_map = TensorDictMap(query_module=QueryModule(["observation", "action"]), max_size=5)
    forest = MCTSForest(data_map=data_map, node_map=node_map)
    forest.extend(steps((0, 0, 11), (12, 0, 25), (21, 0, 5)))
    assert forest.num_states == 3 and forest.max_size == 5 and forest.action_keys == ["action"]
    with pytest.raises(ValueError, match=r"max_size must be equal|maps' max_size"):
        MCTSForest(data_map=data_map, node_map=node_map, max_size=6)
    with pytest.raises(ValueError, match="data_map also needs"):
        MCTSForest(data_map=data_map)


def test_the_maps_of_a_forest_are_asked_as_the_references_ask_them() -> None:
    forest = MCTSForest()
    seen, action, then = torch.tensor([0, 0, 1, 0]), torch.tensor([1, 2, 1, 2]), torch.tensor([1, 2, 2, 3])
    forest.extend(TensorDict({"observation": seen, "action": action, "next": {"observation": then}}, [4]))
    forest.extend(
        TensorDict({"observation": seen[3:], "action": action[3:], "next": {"observation": then[3:]}}, [1])
    )
    data = TensorDict({"observation": torch.tensor(0)})
    metadata = forest.node_map[data]
    assert metadata["_index"].tolist() == [0, 1, 3] and metadata["count"].tolist() == [1, 1, 2]
    assert metadata["_hash"].tolist() == [
        child.hash for child in forest.get_tree(data, compact=False).subtree or ()
    ]
    assert forest.data_map[metadata["_index"]]["next", "observation"].tolist() == [1, 2, 3]
    # Two of action 2's outcomes: the one seen twice.
    asked = TensorDict({"observation": seen[None, :2], "action": action[None, :2]}, [1, 2])
    assert forest.data_map[asked]["next", "observation"].tolist() == [[1, 3]]
    assert (len(forest.node_map), len(forest.data_map)) == (4, 4)
    unknown = TensorDict({"observation": torch.tensor([0, 9]), "action": torch.tensor([1, 1])}, [2])
    assert (
        forest.node_map.contains(unknown).tolist()
        == forest.data_map.contains(unknown).tolist()
        == [True, False]
    )
    assert data in forest.node_map and unknown not in forest.data_map
    two = forest.node_map[TensorDict({"observation": torch.tensor([1, 0])}, [2])]
    assert [len(part["_index"]) for part in two.unbind(0)] == [1, 3]
    with pytest.raises(KeyError, match="1 of 2 observations are not states of the forest"):
        forest.node_map[unknown]
    with pytest.raises(KeyError, match="1 of 2 pairs of observation and action are not in the forest"):
        forest.data_map[unknown]
    with pytest.raises(KeyError, match="1 of 2 numbers of transitions are not in the forest"):
        forest.data_map[torch.tensor([0, 4])]
    with pytest.raises(ValueError, match="must be one, or a batch"):
        forest.node_map[asked]


def test_a_tree_tells_the_specs_of_its_rows() -> None:
    forest = MCTSForest()
    after = {"observation": torch.ones(2, 3), "reward": torch.zeros(2, 1)}
    forest.extend(
        TensorDict({"observation": torch.zeros(2, 3), "action": torch.arange(2), "next": after}, [2])
    )
    tree = forest.get_tree(TensorDict({"observation": torch.zeros(3)}))
    assert tree.specs["next", "observation"].shape == (3,)
    assert tree.subtree is not None and tree.subtree[0].rollout is not None
    tree.specs.assert_is_in(tree.subtree[0].rollout[0])


def test_a_path_through_several_trajectories_is_one() -> None:
    """Markers of rows that were first seen in different trajectories, at other steps."""
    forest = MCTSForest()
    for number, (seen, step) in enumerate([([0, 1, 2], 0), ([7, 1, 3], 4), ([3, 4], 0)]):
        length = len(seen) - 1
        steps = torch.arange(step, step + length).unsqueeze(1)
        columns = {
            "observation": torch.tensor(seen[:-1]),
            "action": torch.tensor(seen[1:]),
            "is_init": steps == step,
            "step_count": steps,
            "collector": {"traj_ids": torch.full((length,), number)},
            "next": {"observation": torch.tensor(seen[1:]), "step_count": steps + 1},
        }
        forest.extend(TensorDict(columns, [length]))
    tree = forest.get_tree(TensorDict({"observation": torch.tensor(0)}))
    paths = [tree.rollout_from_path(path) for path in tree.valid_paths()]
    assert [path["action"].tolist() for path in paths] == [[1, 2], [1, 3, 4]]
    for path, number in zip(paths, (0, 2), strict=True):
        assert audit(path) == [] and int(run_ends(path).sum()) == 1
        assert path["collector", "traj_ids"].tolist() == [number] * len(path)
        assert path["step_count"].flatten().tolist() == list(range(len(path)))
    assert forest.rows(torch.arange(5))["collector", "traj_ids"].tolist() == [0, 0, 1, 1, 2]  # as first seen
