"""Maps keyed by rows of tensordicts, forests of transitions for tree search, and counts of states."""

from flatroll.trees.counts import CountSampler, StateCounter, count_states, first_of_state
from flatroll.trees.forest import DataMap, Edges, MCTSForest, NodeMap
from flatroll.trees.hashes import BinaryToDecimal, HashToInt, RandomProjectionHash, SipHash
from flatroll.trees.query import QueryModule
from flatroll.trees.scores import backup, best_edges, puct, ucb
from flatroll.trees.tensor_map import TensorDictMap, TensorMap
from flatroll.trees.tree import Tree

__all__ = [
    "BinaryToDecimal",
    "CountSampler",
    "DataMap",
    "Edges",
    "HashToInt",
    "MCTSForest",
    "NodeMap",
    "QueryModule",
    "RandomProjectionHash",
    "SipHash",
    "StateCounter",
    "TensorDictMap",
    "TensorMap",
    "Tree",
    "backup",
    "best_edges",
    "count_states",
    "first_of_state",
    "puct",
    "ucb",
]
