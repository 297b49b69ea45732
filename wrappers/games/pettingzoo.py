"""The adapter for PettingZoo's parallel envs.

A row of the vector env is one agent of one game: row ``g * A + a`` is agent ``a`` of game ``g``. PettingZoo's agents
come and go. A step in which an agent joins, is absent, or in which its game restarts only resets its row, as a
NEXT_STEP env does. Such a step is not a transition and never reaches a batch.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import create_empty_array
from typing_extensions import override

from flatroll.layout.keys import ACTION_MASK
from flatroll.layout.spaces import space_leaves
from flatroll.wrappers.arrays import Array, Tree, leaves_at, map_tree
from flatroll.wrappers.families import Family, Request
from flatroll.wrappers.source import Capabilities, EnvLike, Info, Seed, Step, VectorSource

#: The observation entry with the state of the whole game.
STATE = "state"

_ENTRIES = ("observations", "rewards", "terminations", "truncations")


def is_parallel_env(env: object) -> bool:
    """Return whether an object has PettingZoo's ``ParallelEnv`` interface: per-agent spaces, ``reset`` and ``step``.

    Raises:
        TypeError: it is a PettingZoo AEC env, whose agents act in turn.
    """
    methods = ("observation_space", "action_space", "reset", "step")
    if isinstance(env, type) or not all(callable(getattr(env, name, None)) for name in methods):
        return False

    if hasattr(env, "agent_iter"):
        raise TypeError(
            f"env is {type(env).__name__}, a PettingZoo AEC env, whose agents act in turn: "
            "pettingzoo.utils.aec_to_parallel(env) makes a ParallelEnv of it if its agents act at the same time"
        )
    return True


def parallel_envs(env: object) -> list[Any] | None:
    """Return PettingZoo games given as an env, a function that makes one, or a list of either; None if not games.

    A function is called; its result is closed if it is not a game.
    """
    made = []
    listed = env if isinstance(env, list | tuple) else [env]
    for one in listed:
        calls = callable(one) and not (hasattr(one, "step") and hasattr(one, "reset"))
        if isinstance(one, type):  # in other envs the spaces are attributes
            calls = callable(getattr(one, "observation_space", None))

        game: Any = one
        if callable(one) and calls:
            game = one()
        if not is_parallel_env(game):
            if calls and hasattr(game, "close"):
                game.close()
            return None
        made.append(game)
    return made or None


class PettingZooSource(VectorSource):
    """PettingZoo ``ParallelEnv`` games, with one row per agent and game, present or absent.

    `as_vector_env` creates it from an env, a function or a list. Create it yourself to set ``state``, or with
    :meth:`groups` if the agents' spaces differ. Batches have ``("collector", "agent")``, the agent's place in
    ``possible_agents``, ``("collector", "game")``, the game's place in ``envs``, and ``("collector", "game_step")``,
    which the rows of one game at one time share (see `flatroll.layout.agents_of`); all int64 ``[N]``.

    An agent's trajectory ends with ``terminated`` or ``truncated``; it has no rows while it is absent and begins a
    new trajectory when it joins or returns. A game without agents is reset by the next step. Game ``g`` is seeded
    with ``seed + g``. An ``action_mask`` in the observation becomes its own column, one in ``infos`` becomes
    ``info["action_mask"]``.

    Args:
        envs: a game, a function that makes one, or a list of either. ``possible_agents`` and spaces must be equal in
            all.
        state: add ``env.state()`` to the observation of each of its agents: columns ``"state"`` and
            ``("next", "state")``. Default False.

    Raises:
        TypeError: an AEC env, or not a game.
        ValueError: games that differ, agents whose spaces differ.

    >>> from flatroll.wrappers.testing import ScriptedGame
    >>> source = PettingZooSource([ScriptedGame(), ScriptedGame()], state=True)
    >>> source.num_envs, source.single_observation_space["state"].shape
    (6, (3,))
    """

    metadata: dict[str, Any]
    render_mode: str | None

    def __init__(self, envs: EnvLike | Callable[[], Any] | Sequence[Any], *, state: bool = False) -> None:
        games = Games(envs)
        self._join(games, games.names, state, "")

    @classmethod
    def groups(
        cls,
        envs: EnvLike | Callable[[], Any] | Sequence[Any],
        groups: Mapping[str, Sequence[str]],
        *,
        state: bool = False,
    ) -> dict[str, "PettingZooSource"]:
        """Create one source per group of agents with equal spaces; the groups share their games and step together.

        Send the actions of all groups before stepping the first: see `VectorStream.send`.

        Args:
            envs: as for the class.
            groups: the agent names of each group; every agent belongs to exactly one group.
            state: as for the class.

        Raises:
            ValueError: an agent in no group or in two, or agents of one group whose spaces differ.

        >>> from flatroll.wrappers.testing import ScriptedGame
        >>> parts = PettingZooSource.groups(ScriptedGame(), {"front": ["a0"], "back": ["a1", "a2"]})
        >>> {name: part.num_envs for name, part in parts.items()}
        {'front': 1, 'back': 2}
        """
        games = Games(envs)

        listed = [name for members in groups.values() for name in members]
        if sorted(map(str, listed)) != sorted(map(str, games.names)):
            raise ValueError(
                f"groups must hold each agent of {games.names} once, got {dict(groups)}: each agent belongs to "
                "one group"
            )

        sources = {}
        for label, members in groups.items():
            source = cls.__new__(cls)
            source._join(games, list(members), state, f"{label!r}: ")
            sources[label] = source
        return sources

    def _join(self, games: "Games", names: list[Any], state: bool, label: str) -> None:
        """Initialize as the source of these agents of the games."""
        first = games.envs[0]
        self._games = games
        self.names = names
        self._state = state

        # Paths of the leaves of an agent's observation, in the env's output and in the row. With a state the row is a
        # Dict of both.
        own, action = (_shared_space(kind, games.envs, names, label) for kind in ("observation", "action"))
        paths = [path for _, path in space_leaves(own, ())]
        space = own
        prefix = tuple[str, ...]()
        first = games.envs[0]
        if state:
            if not isinstance(own, spaces.Dict):
                own = spaces.Dict(observation=own)
                prefix = ("observation",)

            problem = None
            if STATE in own.spaces:
                problem = "the observations have that entry already"
            elif not hasattr(first, "state_space"):
                problem = "the env lacks state_space, the space of env.state()"
            if problem is not None:
                raise ValueError(
                    f"state=True adds the entry 'state' to the observations, but {problem}, "
                    f"in {type(first).__name__}: leave state out, or rename the entry in the env"
                )
            space = spaces.Dict({**own.spaces, STATE: first.state_space})
        self._paths = [(path, (*prefix, *path)) for path in paths]

        count = len(names)
        super().__init__(
            self,
            count * len(games.envs),
            space,
            action,
            Capabilities(torch.device("cpu"), "numpy", partial_reset=False, exact_flags=True, overlaps=True),
        )
        self.stepped = first if len(games.groups) == 0 else self
        self.metadata = {
            **(getattr(first, "metadata", None) or {}),
            "autoreset_mode": AutoresetMode.NEXT_STEP,
        }
        self.render_mode = getattr(first, "render_mode", None)

        numbers = np.array([games.names.index(name) for name in names], np.int64)
        self.agents = np.tile(numbers, len(games.envs)), np.repeat(np.arange(len(games.envs)), count)
        self.actions: Tree = None  # actions waiting for the games' next step
        self._turn = 0  # number of resets and steps of the games that this group has seen
        games.add(self)

    @override
    def reset(self, seed: Seed, options: Info | None, rows: Array | None = None) -> tuple[Tree, Info]:
        games = self._games
        # The first group resets the games; the others only read the result.
        if not games.began or self._turn == games.turn:
            games.reset(seed, options)

        self._turn = games.turn
        return self.obs, self.info

    @override
    def send(self, actions: Tree) -> None:
        self.actions = actions

    @override
    def step(self, actions: Tree) -> Step:
        games = self._games
        if self._turn == games.turn:
            if self.actions is None:
                self.actions = actions
            games.step()

        self._turn += 1
        if games.began or self._turn != games.turn:
            raise RuntimeError(
                "the groups of a game step together, but another group was stepped without this one: reset all groups"
            )
        return self.obs, self.reward, self.terminated, self.truncated, self.info

    @override
    def absent(self) -> Array:
        return self.away

    def begin(self) -> None:
        """Create the arrays of the next reset or step, with all agents absent until `Games` fills them in."""
        self.obs = create_empty_array(self.single_observation_space, self.num_envs, np.zeros)
        self.reward = np.zeros(self.num_envs, np.float32)
        self.terminated = np.zeros(self.num_envs, bool)
        self.truncated = np.zeros(self.num_envs, bool)
        self.away: npt.NDArray[np.bool_] = np.ones(self.num_envs, bool)
        self.info: Info = {}

        self._leaves = []
        arrays = leaves_at(self.obs, [place for _, place in self._paths])
        for (path, _), array in zip(self._paths, arrays, strict=True):
            if path and path[-1] == ACTION_MASK:
                array[...] = 1  # policies also receive the rows of absent agents
            self._leaves.append((path, array))

    def show(self, row: int, name: Any, shown: Mapping[Any, Any]) -> None:
        """Write an agent's observation into its row."""
        try:
            value = shown[name]
        except KeyError:
            raise _missing_part_error(name, "observations", shown) from None

        for path, array in self._leaves:
            leaf = value
            for part in path:
                leaf = leaf[part]

            if not isinstance(leaf, np.ndarray):
                leaf = np.asarray(leaf)
            if leaf.shape != array.shape[1:] or (
                leaf.dtype != array.dtype and not np.can_cast(leaf.dtype, array.dtype, "same_kind")
            ):
                entry = f"{name!r}" + "".join(f"[{part!r}]" for part in path)
                raise ValueError(
                    f"the observation of agent {entry} must be {array.dtype} of shape {array.shape[1:]}, as "
                    f"observation_space says, got {leaf.dtype} of shape {leaf.shape}"
                )
            array[row] = leaf

    def show_state(self, game: int, env: Any) -> None:
        """Write a game's state into the rows of its agents."""
        if not self._state:
            return

        count = len(self.names)
        obs: Any = self.obs
        array = obs[STATE]
        state = np.asarray(env.state())
        if state.shape != array.shape[1:]:
            raise ValueError(
                f"env.state() must have shape {array.shape[1:]}, as state_space says, got {state.shape}"
            )
        array[game * count : (game + 1) * count] = state

    def tell(self, row: int, entries: Info) -> None:
        """Add an agent's info to the rows' info, as Gymnasium's vector envs do."""
        self.info = VectorEnv._add_info(self, self.info, entries, row)  # type: ignore[arg-type]

    def finish(self) -> None:
        """Allow every action to agents that are absent or have no ``info["action_mask"]``."""
        if ACTION_MASK in self.info and isinstance(self.info[ACTION_MASK], np.ndarray):
            self.info[ACTION_MASK][~self.info[f"_{ACTION_MASK}"]] = 1

    def call(self, name: str, *args: object, **kwargs: object) -> tuple[Any, ...]:
        """Call a method or get an attribute of every game; the result is repeated for each of its agents."""
        values = []
        for env in self._games.envs:
            value = getattr(env, name)
            if callable(value):
                value = value(*args, **kwargs)
            values += [value] * len(self.names)
        return tuple(values)

    def render(self) -> tuple[Any, ...]:
        """Render each game."""
        return tuple(env.render() for env in self._games.envs)

    @override
    def close(self) -> None:
        for env in self._games.envs:
            env.close()


class Games:
    """Copies of a PettingZoo game, stepped together once all groups of agents have sent their actions.

    Args:
        envs: see `PettingZooSource`.
    """

    def __init__(self, envs: EnvLike | Callable[[], Any] | Sequence[Any]) -> None:
        games = parallel_envs(envs)
        if games is None:
            raise TypeError(
                f"envs must be PettingZoo ParallelEnvs or functions that make them, got {type(envs).__name__}"
            )
        if len({id(env) for env in games}) < len(games):
            raise ValueError(
                "envs must be different games, got one of them twice: make a copy for each place"
            )

        self.envs = games
        for env in games:
            if not getattr(env, "possible_agents", None):
                raise ValueError(
                    f"{type(env).__name__} must have possible_agents, the names of all agents that it may ever have: "
                    "they are the rows of the vector env"
                )

        #: The names of all agents, in the order of ``possible_agents``.
        self.names: list[Any] = list(games[0].possible_agents)
        for number, env in enumerate(games):
            if list(env.possible_agents) != self.names:
                raise ValueError(
                    f"all games must have the same possible_agents, got {self.names} in game 0 and "
                    f"{list(env.possible_agents)} in game {number}: give them the same agents, or use one "
                    "collector for each kind"
                )

        self.groups: list[PettingZooSource] = []
        #: Number of resets and steps of the games; whether the last of them was a reset.
        self.turn = 0
        self.began = False

        # By name: the agent's group and its position there.
        self._places: dict[Any, tuple[PettingZooSource, int]] = {}
        self._living: list[list[Any]] = [[] for _ in games]  # the live agents of each game

    def add(self, group: PettingZooSource) -> None:
        """Register a group and the rows of its agents."""
        self.groups.append(group)
        self._places |= {name: (group, place) for place, name in enumerate(group.names)}

    def reset(self, seed: Seed, options: Info | None) -> None:
        """Reset all games; game ``g`` is seeded with ``seed + g``, or with ``seed[g]`` of a list."""
        if seed is None:
            seeds: list[int | None] = [None] * len(self.envs)
        elif isinstance(seed, int):
            seeds = [seed + number for number in range(len(self.envs))]
        else:
            seeds = seed
        if len(seeds) != len(self.envs):
            raise ValueError(
                f"seed must be one number, or one for each of {len(self.envs)} games, got {len(seeds)}"
            )

        # Together: an interrupt must not come between.
        self.turn, self.began = self.turn + 1, True
        for group in self.groups:
            group.begin()
            group.actions = None
        for game, game_seed in enumerate(seeds):
            self._begin(game, game_seed, options)

        for group in self.groups:
            group.finish()

    def step(self) -> None:
        """Step each game with the actions sent to the groups; reset games without agents."""
        waits = sum(group.actions is None for group in self.groups)
        if waits:
            raise RuntimeError(
                f"{waits} of {len(self.groups)} groups have no actions yet: collect them all with a GroupCollector, or "
                "send(actions) to each group, then step each"
            )

        # Together: an interrupt must not come between.
        self.turn, self.began = self.turn + 1, False
        for group in self.groups:
            group.begin()

        places = self._places
        for game, env in enumerate(self.envs):
            living = self._living[game]
            if not living:
                self._begin(game, None, None)
                continue

            moves = {}
            for name in living:
                group, place = places[name]
                row = game * len(group.names) + place
                tree = group.actions
                if isinstance(tree, np.ndarray):
                    moves[name] = tree[row]
                else:
                    moves[name] = map_tree(lambda leaf, row=row: leaf[row], tree)
            shown, paid, terminated, truncated, infos = env.step(moves)

            ended = []
            for name in living:
                group, place = places[name]
                row = game * len(group.names) + place
                try:
                    group.reward[row] = paid[name]
                    over = terminated[name]
                    group.terminated[row] = over
                    cut = truncated[name]
                    group.truncated[row] = cut
                except KeyError:
                    results = zip(_ENTRIES, (shown, paid, terminated, truncated), strict=True)
                    lacking, result = next((kind, by) for kind, by in results if name not in by)
                    raise _missing_part_error(name, lacking, result) from None

                if over or cut:
                    ended.append(name)
                group.show(row, name, shown)

            now = env.agents
            if not ended and now == living:
                now = living
            else:
                now = self._check_living(living, ended, now)
            self._living[game] = now
            self._place(game, now, living, shown, infos)

        for group in self.groups:
            group.actions = None
            group.finish()

    def _begin(self, game: int, seed: int | None, options: Info | None) -> None:
        """Reset a game."""
        env = self.envs[game]
        result = env.reset(seed=seed, options=options)
        shown = result
        infos: Mapping[Any, Any] = {}
        if isinstance(result, tuple):
            shown, infos = result

        now = self._check_living([], [], env.agents)
        if not now:
            raise ValueError(
                f"{type(env).__name__} has no agents after reset: it must begin with at least one"
            )

        self._living[game] = now
        self._place(game, now, (), shown, infos)

    def _check_living(self, living: Sequence[Any], ended: Sequence[Any], now: Iterable[Any]) -> list[Any]:
        """Return the agents left in a game after a step, checked against those before it."""
        now = list(now)
        if unknown := [name for name in now if name not in self._places]:
            raise ValueError(
                f"env.agents has {unknown}, which possible_agents {self.names} lacks: name all that may join there"
            )
        if dead := [name for name in ended if name in now]:
            raise ValueError(
                f"agents {dead} were terminated or truncated and are still in env.agents: remove them; an agent "
                "that comes back joins in a later step"
            )
        if lost := [name for name in living if name not in now and name not in ended]:
            raise ValueError(
                f"agents {lost} left env.agents and were neither terminated nor truncated: set one of the two in the "
                "step in which they leave"
            )

        return now

    def _place(
        self,
        game: int,
        now: Sequence[Any],
        before: Sequence[Any],
        shown: Mapping[Any, Any],
        infos: Mapping[Any, Any],
    ) -> None:
        """Record which agents are present and write the observations of those that joined."""
        for name in now:
            group, place = self._places[name]
            row = game * len(group.names) + place
            group.away[row] = False
            if now is not before and name not in before:
                group.show(row, name, shown)

        for name, entries in infos.items():
            if entries and name in self._places and isinstance(entries, dict):
                group, place = self._places[name]
                group.tell(game * len(group.names) + place, entries)

        for group in self.groups:
            group.show_state(game, self.envs[game])


def _missing_part_error(name: object, entry: str, given: Mapping[Any, Any]) -> ValueError:
    return ValueError(
        f"the env's {entry} must have an entry for each agent that acted or is in env.agents, but {name!r} is "
        f"not in {list(given)}: return it, also in the step that ends the agent"
    )


def _shared_space(kind: str, envs: Sequence[Any], names: Sequence[Any], label: str) -> spaces.Space[Any]:
    """Return the common space of these agents in all games."""
    found: list[spaces.Space[Any]] = [getattr(env, f"{kind}_space")(name) for env in envs for name in names]
    for at, space in enumerate(found):
        if space != found[0]:
            game, place = divmod(at, len(names))
            raise ValueError(
                f"{label}all agents must have the same {kind}_space, got {found[0]} for {names[0]!r} and {space} for "
                f"{names[place]!r} of game {game}: put agents with equal spaces into groups, "
                "PettingZooSource.groups(envs, {'a': [...], 'b': [...]}), or pad the spaces (SuperSuit)"
            )
    return found[0]


def _games(request: Request) -> list[Any] | None:
    """The games, if the env is a game, a function that makes one, or a list of either."""
    if isinstance(request.env, VectorEnv):
        return None
    return parallel_envs(request.env)


def _adapt_list(envs: Sequence[Any]) -> tuple[VectorSource, bool] | None:
    games = parallel_envs(envs)
    if games is None:
        return None
    made = all(game is not one for game, one in zip(games, envs, strict=True))
    return PettingZooSource(games), made


FAMILY = Family(
    name="games of PettingZoo",
    recognises=_games,
    adapt=lambda request, games: (PettingZooSource(games), AutoresetMode.NEXT_STEP),
    adapt_list=_adapt_list,
)
