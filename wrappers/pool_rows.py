"""`PoolRows`: an envpool in async mode as an env of ``batch_size`` rows, which are other envs at every step."""

from typing import Any

import numpy as np
from gymnasium.vector import VectorEnv, VectorWrapper
from gymnasium.vector.utils import create_empty_array

from flatroll.wrappers.adapt_env import find_stream
from flatroll.wrappers.arrays import Array, Tree, map_tree
from flatroll.wrappers.envpool_source import AsyncPoolSource
from flatroll.wrappers.markers import MarkerWrapper
from flatroll.wrappers.source import Info, Seed, Step, layers
from flatroll.wrappers.stream import VectorStream


class PoolRows(VectorWrapper):
    """Goes around a stack over an async pool: what it remembers of each env comes and goes with the env's rows.

    `reset` and `step` return rows ``[B, ...]`` of the envs `ids`; the stream's row facts and its ``actions`` are
    theirs, too. For each step the markers of the stack get the part ``[B]`` of their arrays ``[E]`` that these envs
    need, and the pool's first rows after a reset, which come one by one with the steps of other envs, leave it as the
    reset has made it.

    Args:
        env: a stack of markers over an adapted async pool.

    Raises:
        ValueError: another wrapper is in the stack, a marker that does not say what it remembers (``row_state``), or
            a view of the pool as tensors.
    """

    def __init__(self, env: VectorEnv[Any, Any, Any]) -> None:
        super().__init__(env)
        stream = find_stream(env)
        assert stream is not None
        self.stream: VectorStream = stream
        source: Any = stream.source
        while not isinstance(source, AsyncPoolSource):  # a view of its observations
            source = source._source
        if stream.capabilities.framework != "numpy":
            raise ValueError(
                "an envpool in async mode stays in NumPy: leave framework='torch' out, policies get tensors anyway"
            )
        self._source: AsyncPoolSource = source
        source.led = True
        self._markers = [layer for layer in layers(env) if isinstance(layer, MarkerWrapper)]
        for layer in layers(env):
            if not isinstance(layer, VectorStream) and getattr(layer, "row_state", None) is None:
                raise ValueError(
                    f"{type(layer).__name__} does not go with an envpool in async mode, where each step is one of some "
                    "of the envs: only flatroll's markers do, and your own with row_state = names of the arrays [E] "
                    "that it keeps. Do its work in the policy or in postproc, or take a pool in sync mode"
                )
        assert source.capabilities.batch_size is not None
        #: B, the number of rows of a step.
        self.batch_size = source.capabilities.batch_size
        #: How often the pool was reset here.
        self.resets = 0
        #: The envs that the last step's actions were for, int64 ``[B]``.
        self.acted: Array = np.zeros(0, np.int64)
        self._actions: Tree = create_empty_array(env.single_action_space, self.num_envs, np.zeros)
        self._ended = np.zeros(self.num_envs, bool)  # the env's next row is the first of an episode
        self._awaited = np.zeros(self.num_envs, bool)  # ... and the pool's reset has made it
        self._reset_info: Info = {}  # the markers' entries [E] of the last reset
        self._lent: list[tuple[MarkerWrapper, str, Array]] = []  # arrays [E] in whose place a marker has [B]

    def __del__(self) -> None:
        """Before 1.3 Gymnasium closes a dropped wrapper's env, which is the caller's."""

    @property
    def ids(self) -> Array:
        """The envs whose rows were returned last, int64 ``[B]``, in the order in which they came."""
        return self._source.ids

    def reset(self, *, seed: Seed = None, options: Info | None = None) -> tuple[Tree, Info]:
        """Reset all envs; return the first B of them. The others' first rows come with later steps."""
        self._give_back()
        env: Any = self.env
        obs, info = env.reset(seed=seed, options=options)
        self.resets += 1
        self._ended[:] = self._awaited[:] = True
        self._reset_info = {
            marker.info_name: info[marker.info_name] for marker in self._markers if marker.info_name in info
        }
        self._begin(info, np.ones(self.batch_size, bool))
        stream = self.stream
        stream.first, stream.ended = np.ones(self.batch_size, bool), np.zeros(self.batch_size, bool)
        self._ended[self.ids] = False
        return obs, info

    def step(self, actions: Tree) -> Step:
        """Step the envs of the rows returned last; return the next B rows that are done."""
        self._give_back()
        stream, source = self.stream, self._source
        self.acted = acted = source.ids
        sent = stream.send(actions)
        map_tree(lambda whole, part: whole.__setitem__(acted, part), self._actions, sent)
        source.receive()
        ids = source.ids
        stream.ended = self._ended[ids]  # what the stream knows of the step before decides on first rows
        stream.any_ended = bool(stream.ended.any())
        for marker in self._markers:
            for name in marker.row_state or ():
                whole = getattr(marker, name)
                self._lent.append((marker, name, whole))
                setattr(marker, name, whole[ids])
        result: Step = self.env.step(sent)
        self._ended[ids] = stream.ended
        stream.actions = map_tree(lambda whole: whole[ids], self._actions)
        new = self._awaited[ids]
        for marker, name, whole in self._lent:
            whole[ids[~new]] = getattr(marker, name)[~new]
        self._give_back()
        if new.any():
            self._begin(result[4], new)
        return result

    def _begin(self, info: Info, new: Array) -> None:
        """Put the reset's entries into the rows where bool ``new`` ``[B]`` is True, which are awaited no more."""
        ids = self.ids
        for name, whole in self._reset_info.items():
            if isinstance(whole, np.ndarray):
                rows = whole[ids]
                info[name] = rows if new.all() else np.where(_like(new, rows), rows, info[name])
        self._awaited[ids] = False

    def _give_back(self) -> None:
        """Let the markers have their arrays ``[E]`` again."""
        while self._lent:
            marker, name, whole = self._lent.pop()
            setattr(marker, name, whole)


def _like(mask: Array, rows: Array) -> Array:
    """Bool ``[B]`` as ``[B, 1, ...]``, to go with rows ``[B, ...]``."""
    return mask.reshape(-1, *(1,) * (rows.ndim - 1))
