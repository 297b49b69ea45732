"""The fourteen fixtures: scripted envs, and the right values, computed from the script alone.

The observation of a scripted env is (env, episode, step), its reward names the row. A `Plan` says how long each episode
is and how it ends, so every right value follows from the row's name. No library takes part here but Gymnasium's
base class of envs and its vector envs.

A fixture never assumes that a library begins with episode 0 or plays them one after another: a value is looked up by
the (env, episode, step) that the library's own observation says.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import gymnasium as gym
import numpy as np
import numpy.typing as npt

End: TypeAlias = Literal["terminated", "truncated", "both"]
Key: TypeAlias = tuple[int, int, int]  # (env, episode, step)
Array: TypeAlias = npt.NDArray[Any]

GAMMA = 0.5
LAMBDA = 0.5
N_STEP = 3
STACK = 3
SLICE = 4
#: A linear value function, which a library can hold in a layer without hidden units: V(obs) = weights @ obs + bias.
VALUE_WEIGHTS = (100.0, 10.0, 1.0)
VALUE_BIAS = 50.0


@dataclass(frozen=True)
class Fixture:
    """The name of a fixture, and what is counted in it."""

    name: str
    counts: str


FIXTURES = {
    fixture.name: fixture
    for fixture in (
        Fixture(
            "truncated_end", "targets of rows that end by truncation: reward + gamma V(last observation)"
        ),
        Fixture("both_ends", "targets of rows that are terminated and truncated: the reward alone"),
        Fixture("last_observation", "next observations of rows that end an episode, in each autoreset mode"),
        Fixture("dead_rows", "stored rows that are no transition: the step after an end that only resets"),
        Fixture("n_step", "n-step targets of all rows, at ends and at the write head of a ring"),
        Fixture(
            "slices", "sampled sequences that join rows of two episodes, envs or laps of a ring unmarked"
        ),
        Fixture("frame_stacks", "stacks of frames (observation and next) across resets and in a ring"),
        Fixture("hidden_state", "outputs of a recurrent network in acting and in training, across resets"),
        Fixture("advantages", "advantages (GAE, V-trace) of the rows of a window with ends"),
        Fixture("episode_statistics", "returns and lengths of episodes if envs are reset by a mask"),
        Fixture("normaliser", "observations counted not once in the statistics; scaled rewards"),
        Fixture("saved_buffer", "rows and samples of a saved, loaded and continued buffer"),
        Fixture("passes", "rows not drawn exactly once in a pass without replacement"),
        Fixture("last_info", "info entries of the last step of an episode"),
    )
}


class Row(NamedTuple):
    """One transition, from (env, episode, step) to (env, episode, step + 1)."""

    env: int
    episode: int
    step: int
    terminated: bool
    truncated: bool

    @property
    def key(self) -> Key:
        return self.env, self.episode, self.step

    @property
    def observation(self) -> Array:
        return np.array(self.key, np.float32)

    @property
    def next_observation(self) -> Array:
        return np.array((self.env, self.episode, self.step + 1), np.float32)

    @property
    def reward(self) -> float:
        return reward_of(self.key)

    @property
    def action(self) -> int:
        return self.step % 2

    @property
    def first(self) -> bool:
        return self.step == 0

    @property
    def done(self) -> bool:
        return self.terminated or self.truncated


def reward_of(key: Key) -> float:
    """Return the reward that names a row: unique below 8 steps and 16 episodes, in float32 exact."""
    env, episode, step = key
    return float(1 + step + 8 * episode + 128 * env)


def key_of(observation: npt.ArrayLike) -> Key:
    """Return the (env, episode, step) that an observation says."""
    env, episode, step = (round(float(number)) for number in np.asarray(observation).reshape(-1))
    return env, episode, step


def value(observation: npt.ArrayLike) -> Array:
    """Return V(obs) in float64: ``[..., 3]`` to ``[...]``."""
    numbers = np.asarray(observation, np.float64)
    result: Array = numbers @ np.array(VALUE_WEIGHTS) + VALUE_BIAS
    return result


def follows(one: npt.ArrayLike, other: npt.ArrayLike) -> bool:
    """Return whether the second observation is the one right after the first: same env, same episode, next step."""
    env, episode, step = key_of(one)
    return key_of(other) == (env, episode, step + 1)


@dataclass(frozen=True)
class Plan:
    """The script: for each env its episodes in turn, each with its steps and how it ends; then from the front.

    >>> plan = Plan((((3, "truncated"), (1, "both")), ((2, "terminated"),)))
    >>> plan.num_envs, plan.row((0, 1, 0)).terminated, plan.row((0, 2, 2)).truncated
    (2, True, True)
    """

    envs: tuple[tuple[tuple[int, End], ...], ...]

    @property
    def num_envs(self) -> int:
        return len(self.envs)

    def episode(self, env: int, episode: int) -> tuple[int, End]:
        """Return the number of steps of an episode and how it ends."""
        episodes = self.envs[env]
        return episodes[episode % len(episodes)]

    def row(self, key: Key) -> Row:
        """Return the row that begins at (env, episode, step)."""
        env, episode, step = key
        length, end = self.episode(env, episode)
        if not 0 <= step < length:
            raise ValueError(f"no row begins at {key}: the episode has {length} steps")

        last = step == length - 1
        return Row(env, episode, step, last and end != "truncated", last and end != "terminated")

    def has_row(self, key: Key) -> bool:
        """Return whether a row begins at (env, episode, step)."""
        env, episode, step = key
        return 0 <= env < self.num_envs and episode >= 0 and 0 <= step < self.episode(env, episode)[0]

    def rows(self, steps: int) -> list[list[Row]]:
        """Return the rows ``[steps][envs]`` of vector steps that are all transitions (SAME_STEP, or resets between)."""
        table: list[list[Row]] = []
        keys: list[Key] = [(env, 0, 0) for env in range(self.num_envs)]
        for _ in range(steps):
            table.append([self.row(key) for key in keys])
            keys = [self.key_after(row) for row in table[-1]]
        return table

    def played(self, steps: int, mode: str = "NextStep") -> list[list[Row | None]]:
        """Return the rows ``[steps][envs]`` of vector steps in an autoreset mode of Gymnasium.

        Under ``"NextStep"`` the step after an end only resets that env: there None stands for the row.
        """
        if mode != "NextStep":
            return [list(step) for step in self.rows(steps)]

        table: list[list[Row | None]] = []
        keys: list[Key] = [(env, 0, 0) for env in range(self.num_envs)]
        resetting = [False] * self.num_envs
        for _ in range(steps):
            step = [None if resetting[env] else self.row(key) for env, key in enumerate(keys)]
            keys = [self.key_after(row) if row else keys[env] for env, row in enumerate(step)]
            resetting = [row is not None and row.done for row in step]
            table.append(step)
        return table

    def key_after(self, row: Row) -> Key:
        """Return where the env's next row begins."""
        if row.done:
            return row.env, row.episode + 1, 0
        return row.env, row.episode, row.step + 1

    def target(self, row: Row) -> float:
        """Return the one-step target: reward + gamma V(next observation), without the value where it terminated."""
        return self.n_step_target(row.key, 1)

    def n_step_target(self, key: Key, n: int = N_STEP, newest: Key | None = None) -> float:
        """Return the n-step target of a row: rewards up to n rows on, then gamma^m V(observation after the m-th).

        The sum stops early, at m < n, with the episode's last row and with ``newest``, the env's newest stored row:
        the value is then that of the observation reached, and there is none where it terminated.
        """
        row = self.row(key)
        total = 0.0
        discount = 1.0
        for _ in range(n):
            total += discount * row.reward
            discount *= GAMMA
            if row.done or row.key == newest:
                break
            row = self.row((row.env, row.episode, row.step + 1))
        else:
            # n rows were added; `row` is the one after them.
            return total + discount * float(value(row.observation))

        if row.terminated:
            return total
        return total + discount * float(value(row.next_observation))

    def stack(
        self, key: Key, k: int = STACK, pad: Literal["first", "zero"] = "first", first: int = 0
    ) -> Array:
        """Return the ``k`` frames up to (env, episode, step), oldest first: float32 ``[k, 3]``.

        Frames before the episode's first one repeat it or are zeros, as the library documents. ``first`` is the
        oldest step of the episode that a ring still has.
        """
        env, episode, step = key
        frames = []
        for at in range(step - k + 1, step + 1):
            if at >= first:
                frames.append((env, episode, at))
            elif pad == "first":
                frames.append((env, episode, first))
            else:
                frames.append((0, 0, 0))
        return np.array(frames, np.float32)

    def episode_return(self, env: int, episode: int) -> tuple[float, int]:
        """Return the sum of an episode's rewards and its number of steps."""
        length, _ = self.episode(env, episode)
        return sum(reward_of((env, episode, step)) for step in range(length)), length


#: The plan of most fixtures: every kind of end, episodes of one row, and ends of two envs in one step.
PLAN = Plan(
    (
        ((3, "truncated"), (1, "both"), (4, "terminated"), (2, "truncated"), (1, "truncated"), (5, "both")),
        (
            (2, "both"),
            (1, "truncated"),
            (5, "truncated"),
            (1, "terminated"),
            (4, "truncated"),
            (3, "terminated"),
        ),
    )
)
#: Vector steps of most fixtures. No env has more than 16 episodes in them.
STEPS = 24


def columns(rows: Sequence[Sequence[Row]]) -> dict[str, Array]:
    """Return the columns of rows ``[T][E]``: arrays ``[T, E]``, observations ``[T, E, 3]``.

    Keys: observation, next_observation, reward (float32), action (int64), terminated, truncated, done, first (bool).
    """

    def column(name: str, dtype: Any) -> Array:
        return np.array([[getattr(row, name) for row in step] for step in rows], dtype)

    floats = {name: column(name, np.float32) for name in ("observation", "next_observation", "reward")}
    flags = {name: column(name, np.bool_) for name in ("terminated", "truncated", "done", "first")}
    return {**floats, **flags, "action": column("action", np.int64)}


def advantages(rows: Sequence[Sequence[Row]], gamma: float = GAMMA, lmbda: float = LAMBDA) -> Array:
    """Return GAE of a window of rows ``[T][E]`` in float64, by its definition; the window's end is bootstrapped.

    ``delta = r + gamma (1 - terminated) V(next) - V``, ``A = delta + gamma lambda (1 - done) A(next row)``.
    """
    result = np.zeros((len(rows), len(rows[0])))
    for env in range(len(rows[0])):
        later = 0.0
        for t in reversed(range(len(rows))):
            row = rows[t][env]
            bootstrap = gamma * float(value(row.next_observation))
            if row.terminated:
                bootstrap = 0.0
            if row.done:
                later = 0.0
            delta = row.reward + bootstrap - float(value(row.observation))
            later = delta + gamma * lmbda * later
            result[t, env] = later
    return result


def vtrace(
    rows: Sequence[Sequence[Row]], log_ratios: Array, gamma: float = GAMMA, clip: float = 1.0
) -> tuple[Array, Array]:
    """Return V-trace's targets and advantages of a window of rows ``[T][E]`` in float64 (Espeholt et al., 2018).

    ``log_ratios`` [T, E]: log of the policy's probability over the behaviour's; both clips are ``clip``.
    """
    ratios = np.minimum(np.exp(np.asarray(log_ratios, np.float64)), clip)
    targets = np.zeros((len(rows), len(rows[0])))
    gains = np.zeros_like(targets)
    for env in range(len(rows[0])):
        correction = 0.0  # target minus value, of the next row
        for t in reversed(range(len(rows))):
            row = rows[t][env]
            after = float(value(row.next_observation))
            if row.terminated:
                after = 0.0
            if row.done:
                correction = 0.0
            here = float(value(row.observation))
            gains[t, env] = ratios[t, env] * (row.reward + gamma * (after + correction) - here)
            correction = (
                ratios[t, env] * (row.reward + gamma * after - here) + gamma * ratios[t, env] * correction
            )
            targets[t, env] = here + correction
    return targets, gains


def ring_keys(rows: Sequence[Row], capacity: int) -> list[Key]:
    """Return the keys that a ring of ``capacity`` rows still holds after the rows were written, oldest first."""
    return [row.key for row in rows[-capacity:]]


def unmarked_joint(observations: npt.ArrayLike, cut_after: npt.ArrayLike) -> bool:
    """Return whether a sequence has two adjacent rows that do not follow one another, without a mark between them.

    Args:
        observations: ``[L, 3]``, the rows' observations.
        cut_after: bool ``[L]`` or ``[L - 1]``: True after a row where the sample itself says that the next row does
            not continue it (done, terminated, truncated, the next row's first-flag, a mask).
    """
    frames = np.asarray(observations)
    cuts = np.asarray(cut_after, np.bool_)
    return any(not cuts[i] and not follows(frames[i], frames[i + 1]) for i in range(len(frames) - 1))


def episodes_of(rows: Iterable[Row]) -> list[list[Row]]:
    """Return the rows of each (env, episode) in order of steps; a network run over one of them meets no reset."""
    found: dict[tuple[int, int], list[Row]] = {}
    for row in rows:
        found.setdefault((row.env, row.episode), []).append(row)
    return list(found.values())


def discounted_returns(rows: Iterable[Row], gamma: float = GAMMA) -> Array:
    """Return each row's discounted return so far, float64 ``[N]``: rows of an episode in order, from 0 at its start."""
    gains: dict[tuple[int, int], float] = {}
    result = []
    for row in rows:
        before = gains.get((row.env, row.episode), 0.0)
        gains[row.env, row.episode] = gamma * before + row.reward
        result.append(gains[row.env, row.episode])
    return np.array(result)


def scaled_rewards(rows: Sequence[Sequence[Row]], gamma: float = GAMMA, epsilon: float = 1e-8) -> Array:
    """Return `scaled_rewards_by_key` of rows ``[T][E]`` as an array, float64 ``[T, E]``."""
    found = scaled_rewards_by_key(rows, gamma, epsilon)
    return np.array([[found[row.key] for row in step] for step in rows])


def scaled_rewards_by_key(
    steps: Iterable[Iterable[Row | None]], gamma: float = GAMMA, epsilon: float = 1e-8
) -> dict[Key, float]:
    """Return rewards over the deviation of the discounted returns so far, by the rows of vector steps.

    Each env's return so far restarts after an end. The statistics are those of all returns up to and with this step,
    of Welford's kind with one value per row (population variance), as Gymnasium, SB3 and others document.
    """
    gains: dict[tuple[int, int], float] = {}
    seen: list[float] = []
    found: dict[Key, float] = {}
    for step in steps:
        rows = [row for row in step if row is not None]
        for row in rows:
            episode = (row.env, row.episode)
            gains[episode] = gamma * gains.get(episode, 0.0) + row.reward
            seen.append(gains[episode])
        deviation = float(np.sqrt(np.var(seen) + epsilon))
        found |= {row.key: row.reward / deviation for row in rows}
    return found


class ScriptedEnv(gym.Env[Any, Any]):
    """A Gymnasium env that plays one env of a plan. Each reset begins the next episode, the first one episode 0.

    Args:
        plan: the plan.
        env: which of its envs.
        continuous: actions of ``Box(-1, 1, (1,))`` instead of two discrete ones.
        one_hot: observations of ``one_hot_size`` numbers with a single 1 instead of (env, episode, step): the mean
            over what a normaliser counted then says how often it counted each of them (`one_hot_number`).

    ``info`` of a step is ``{"row": reward}``, of a reset ``{"row": -1.0}``.
    """

    def __init__(
        self, plan: Plan = PLAN, env: int = 0, *, continuous: bool = False, one_hot: bool = False
    ) -> None:
        self.plan = plan
        self.env = env
        self.one_hot = one_hot
        self.observation_space = gym.spaces.Box(-np.inf, np.inf, (3,), np.float32)
        if one_hot:
            self.observation_space = gym.spaces.Box(-np.inf, np.inf, (one_hot_size(plan),), np.float32)
        self.action_space = gym.spaces.Discrete(2)
        if continuous:
            self.action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.episode = -1
        self.at = 0

    def observe(self) -> Array:
        if not self.one_hot:
            return np.array((self.env, self.episode, self.at), np.float32)
        code = np.zeros(one_hot_size(self.plan), np.float32)
        code[one_hot_number(self.plan, (self.env, self.episode, self.at))] = 1.0
        return code

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode += 1
        self.at = 0
        return self.observe(), {"row": np.float64(-1.0)}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        row = self.plan.row((self.env, self.episode, self.at))
        self.at += 1
        return self.observe(), row.reward, row.terminated, row.truncated, {"row": np.float64(row.reward)}


ONE_HOT_EPISODES = 16  # of each env


def one_hot_number(plan: Plan, key: Key) -> int:
    """Return which number is 1 in the one-hot observation of (env, episode, step); ``step`` may be the last one's."""
    env, episode, step = key
    if episode >= ONE_HOT_EPISODES:
        raise ValueError(f"one-hot observations exist for {ONE_HOT_EPISODES} episodes of an env, got {key}")
    width = one_hot_size(plan) // plan.num_envs
    # An episode of L steps shows L + 1 observations.
    before = sum(plan.episode(env, earlier)[0] + 1 for earlier in range(episode))
    return env * width + before + step


def one_hot_size(plan: Plan) -> int:
    """Return how many numbers a one-hot observation has."""
    width = max(
        sum(plan.episode(env, episode)[0] + 1 for episode in range(ONE_HOT_EPISODES))
        for env in range(plan.num_envs)
    )
    return width * plan.num_envs


def counts_are_right(
    plan: Plan, counted: npt.ArrayLike, acted_on: Iterable[Key], also_seen: Iterable[Key]
) -> list[tuple[Key, bool]]:
    """Judge how often a normaliser counted each observation; see ``one_hot``.

    Args:
        plan: the plan.
        counted: ``[one_hot_size]``, count times mean of the normaliser.
        acted_on: observations that the policy acted on: each must be counted once.
        also_seen: last observations of episodes, and the one after the last step: never more than once.

    Returns:
        One (key, right) for each observation.
    """
    numbers = np.asarray(counted, np.float64)
    judged: list[tuple[Key, bool]] = []
    for key in acted_on:
        times = numbers[one_hot_number(plan, key)]
        judged.append((key, abs(times - 1) < 0.1))
    for key in also_seen:
        times = numbers[one_hot_number(plan, key)]
        judged.append((key, times < 1.1))
    return judged


def scripted_envs(plan: Plan = PLAN, **options: Any) -> list[Any]:
    """Return one function for each env of a plan that makes it, as vector envs of most libraries ask for them."""

    def make(env: int) -> Any:
        return lambda: ScriptedEnv(plan, env, **options)

    return [make(env) for env in range(plan.num_envs)]


def vector_env(mode: str = "NextStep", plan: Plan = PLAN, **options: Any) -> gym.vector.SyncVectorEnv:
    """Return Gymnasium's `SyncVectorEnv` of a plan: ``"NextStep"``, ``"SameStep"`` or ``"Disabled"``."""
    return gym.vector.SyncVectorEnv(
        scripted_envs(plan, **options), autoreset_mode=gym.vector.AutoresetMode(mode)
    )
