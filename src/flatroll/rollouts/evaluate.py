"""`evaluate` plays an exact number of episodes, `Evaluator` does so during training; `interquartile_mean`."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypedDict, Unpack

import numpy as np
import torch
from tensordict.nn import InteractionType
from torch import Tensor, nn

from flatroll.layout.checks import (
    as_numbers,
    check_choice,
    check_key_names,
    check_number,
    check_seed,
    check_type,
    check_whole_number,
)
from flatroll.layout.keys import REWARD, TERMINATED, TRUNCATED, NestedKey, as_tuple, next_key
from flatroll.rollouts.arguments import check_exploration_type, make_devices, make_env
from flatroll.rollouts.env_facts import read_env
from flatroll.rollouts.policies import Policy
from flatroll.rollouts.pool_runner import PoolRunner, make_runner
from flatroll.rollouts.runner import Runner, RunnerOptions
from flatroll.wrappers.adapt_env import wrappers_within
from flatroll.wrappers.arrays import Array, to_torch
from flatroll.wrappers.markers import MarkerWrapper, StepCounter
from flatroll.wrappers.source import EnvLike, layers

#: Vector steps between checks for ended episodes on a device, where each check syncs.
_STEPS_BETWEEN_LOOKS = 16
#: Maximum number of values drawn by one pass of the bootstrap.
_DRAWN_AT_ONCE = 1 << 22


class Estimate(NamedTuple):
    """A statistic and its bootstrap interval.

    >>> print(Estimate(10.0, 9.5, 10.25))
    10 [9.5, 10.25]
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return "{:.4g} [{:.4g}, {:.4g}]".format(*self)


@dataclass(frozen=True, eq=False)
class Evaluation:
    """The episodes of an `evaluate` call, ordered by sub-env and time.

    Attributes:
        returns: undiscounted sums of the rewards, float64 ``[episodes]``.
        lengths: steps, int64 ``[episodes]``.
        envs: the sub-env of each episode, int64 ``[episodes]``.
        info: for each of ``info_keys`` the values in the last step of each episode, ``[episodes, ...]``; 0 where
            missing. Of a marker the value that the last row of the episode has.
        seconds: wall time without creating the env.
        film: the frames of the chosen episode, uint8 ``[frames, H, W, C]``, or None.

    >>> found = Evaluation(torch.tensor([10.0, 12.0]), torch.tensor([10, 12]), torch.tensor([0, 1]), {}, 0.5)
    >>> found.mean, found.interval.low, len(found)
    (11.0, 10.0, 2)
    """

    returns: Tensor
    lengths: Tensor
    envs: Tensor
    info: dict[NestedKey, Tensor]
    seconds: float
    film: Tensor | None = field(default=None, repr=False)

    def __len__(self) -> int:
        return len(self.returns)

    @property
    def mean(self) -> float:
        """The mean return."""
        return float(self.returns.mean())

    @property
    def interval(self) -> Estimate:
        """The mean return with its 95 % bootstrap interval; see `bootstrap_mean`."""
        return bootstrap_mean(self.returns)

    def __str__(self) -> str:
        lengths = self.lengths.double().mean()
        return (
            f"return {self.interval} over {len(self)} episodes of {lengths:.4g} steps, {self.seconds:.2g} s"
        )


class EvaluateOptions(TypedDict, total=False):
    """Keyword arguments of `evaluate` that `Evaluator` passes on."""

    seed: int | None
    info_keys: Sequence[NestedKey]
    max_steps: int | None
    exploration_type: InteractionType | str
    film: Literal["best", "worst", "first"] | None
    policy_device: torch.device | str | None
    obs_dtype: torch.dtype | None


def evaluate(
    env: EnvLike | Callable[[], EnvLike],
    policy: Policy | None = None,
    *,
    episodes: int,
    seed: int | None = None,
    info_keys: Sequence[NestedKey] = (),
    max_steps: int | None = None,
    exploration_type: InteractionType | str = InteractionType.DETERMINISTIC,
    film: Literal["best", "worst", "first"] | None = None,
    policy_device: torch.device | str | None = None,
    obs_dtype: torch.dtype | None = None,
) -> Evaluation:
    """Play exactly ``episodes`` whole episodes with a policy, an equal number in each sub-env.

    Counting the episodes that end first would over-represent short ones. Here each sub-env plays ``episodes / E``
    episodes; if that is not a whole number, the last sub-envs play one more.

    Probabilistic modules return modes or means, recurrent states are carried, and nothing is trained: an
    ``nn.Module`` is in eval mode, and the statistics of Gymnasium's NormalizeObservation and NormalizeReward around
    the env or inside a SyncVectorEnv are frozen. Use a separate env for evaluation: it is reset first and left in the
    middle of episodes.

    Args:
        env: anything `flatroll.wrappers.as_vector_env` takes, wrappers around it, or a function that makes one,
            in which case it is closed afterwards.
        policy: as for `Collector`; None for random actions.
        episodes: number of episodes, at least 1.
        seed: seed of the env's reset and of sampled actions; torch's random state is restored afterwards. Default
            None: actions are sampled from torch's random state.
        info_keys: entries of ``info`` to return, such as ``"is_success"``; ``("episode", "r")`` for one in a dict; or
            the key of a marker's column, such as ``"episode_reward"`` of a `flatroll.wrappers.RewardSum` in the stack.
        max_steps: truncate episodes after this many steps (adds a StepCounter). Default None: an env whose
            episodes never end is stepped forever.
        exploration_type: how probabilistic modules choose actions. Default: modes or means; ``"random"``: they
            sample.
        film: return the frames of the ``"best"``, ``"worst"`` or ``"first"`` episode; needs an env with
            ``render_mode="rgb_array"``. The last frame of the episode is included unless the env resets in the same
            step. Default None.
        policy_device: device of the policy's input. Default: that of the env's arrays.
        obs_dtype: dtype of the floating observations, as for `Collector`. Default: the env's.

    Raises:
        ValueError: ``episodes`` is not an integer of at least 1; with ``film``, the env renders no arrays.
        KeyError: no step's info had an entry of ``info_keys``.

    >>> import gymnasium as gym
    >>> found = evaluate(gym.make_vec("CartPole-v1", num_envs=4), episodes=10, seed=0)
    >>> found.returns.shape, found.envs.tolist()
    (torch.Size([10]), [0, 0, 1, 1, 2, 2, 2, 3, 3, 3])
    """
    check_whole_number("episodes", episodes)
    if max_steps is not None:
        check_whole_number("max_steps", max_steps)
    if film is not None:
        check_choice("film", film, ("best", "worst", "first"))
    if seed is not None:
        seed = check_seed("seed", seed)

    exploration = check_exploration_type(exploration_type)

    with ExitStack() as undo:
        made, is_own = make_env(env, obs_dtype, None, max_steps, undo)
        if not is_own:
            undo.pop_all()
        names = check_key_names("info_keys", info_keys)
        marked = _columns_of_markers(made, names)
        facts = read_env(made, info_keys=[name for name in names if name not in marked])
        devices = make_devices(facts.device, policy_device=policy_device)

        # Only random actions need a seed: without one their generator would draw it from torch's global one.
        random_seed = seed if policy is None else 0
        options = RunnerOptions(devices=devices, exploration=exploration, seed=random_seed)
        runner = make_runner(facts, policy, _STEPS_BETWEEN_LOOKS, options)

        # Env e plays (episodes + e) // E episodes, as in SB3.
        goal = (episodes + np.arange(runner.num_envs)) // runner.num_envs
        play = _Play(runner, goal, names, marked, film)
        began = time.perf_counter()
        with torch.no_grad(), _freeze(made, policy), _seed(seed):
            play.run(seed)
        return play.evaluation(time.perf_counter() - began)


class _MarkerColumn(NamedTuple):
    """Where a window has a marker's value of a row.

    Attributes:
        key: of the window's column.
        more: added to its numbers.
    """

    key: NestedKey
    more: int


def _columns_of_markers(env: object, names: Sequence[NestedKey]) -> dict[NestedKey, _MarkerColumn]:
    """Return the columns of those names that are the key or the info entry of a marker in this stack of wrappers."""
    found: dict[NestedKey, _MarkerColumn] = {}
    for marker in layers(env):
        if not isinstance(marker, MarkerWrapper) or not marker.is_column:
            continue

        for name in names:
            if as_tuple(name) in (as_tuple(marker.key), (marker.info_name,)):
                key = next_key(marker.key) if marker.describes_step else marker.key
                # A counter's column is the number before the step.
                found[name] = _MarkerColumn(key, more=int(isinstance(marker, StepCounter)))

    return found


class _Play:
    """Steps a runner until each env has played its episodes, and collects their results."""

    def __init__(
        self,
        runner: Runner | PoolRunner,
        goal: Array,  # episodes to play in each env, int64 [E]
        names: Sequence[NestedKey],  # of the entries to return
        marked: dict[NestedKey, _MarkerColumn],  # those of them that are columns of markers
        film: str | None,
    ) -> None:
        self._runner = runner
        self._goal = goal
        self._choice = film
        self._names = tuple(names)
        self._marked = marked
        self._count = np.zeros_like(goal)  # episodes played so far in each env

        # of the running episodes
        self._return = np.zeros(len(goal))
        self._length = np.zeros_like(goal)

        # Finished episodes (env, index within the env, return, length), and their info entries.
        self._episodes: list[tuple[int, int, float, int]] = []
        self._infos: list[dict[NestedKey, Tensor]] = []
        self._frames: list[list[Array]] = [[] for _ in goal]  # of the running episodes
        self._film: list[Array] = []
        self._filmed: tuple[int, float] | None = None  # env and return of the filmed episode

    def run(self, seed: int | None) -> None:
        """Reset the env and play."""
        runner = self._runner
        runner.reset(seed)
        if self._choice is not None:
            self._frames = [[frame] for frame in self._render()]
        looks_each = isinstance(runner, PoolRunner) or runner.device.type == "cpu" or self._choice is not None

        while (self._count < self._goal).any():
            if looks_each:
                steps = 1
            else:
                steps = _STEPS_BETWEEN_LOOKS
            for _ in range(steps):
                runner.step()
            self._look()

    def _look(self) -> None:
        """Read the steps since the last check from the runner's window."""
        window = self._runner.window
        valid = window.valid()
        if isinstance(self._runner, Runner):
            self._runner.check_infos()
        rewards, terminated, truncated = (
            to_torch(window.columns[key][: len(valid)]).numpy(force=True)
            for key in (REWARD, TERMINATED, TRUNCATED)
        )
        frames = None if self._choice is None else self._render()

        for step, steps_of_envs in enumerate(valid):
            self._return += np.where(steps_of_envs, rewards[step], 0.0)
            self._length += steps_of_envs
            ends = steps_of_envs & (terminated[step] | truncated[step])
            if frames is not None:
                self._film_frames(frames, steps_of_envs, ends)

            for env in np.flatnonzero(ends).tolist():
                if self._count[env] < self._goal[env]:
                    self._finish(env, step)
                self._return[env] = self._length[env] = 0
                if frames is not None:  # an env that reset in this step has rendered its new episode
                    self._frames[env] = [frames[env]] if window.same_step else []

        window.restart(self._runner.num_envs)

    def _finish(self, env: int, step: int) -> None:
        """Record an episode that ended in this step of the window."""
        columns = self._runner.window.columns
        total = float(self._return[env])
        self._episodes.append((env, int(self._count[env]), total, int(self._length[env])))
        self._count[env] += 1

        info: dict[NestedKey, Tensor] = {}
        for name in self._names:
            at = self._marked.get(name, _MarkerColumn(next_key(name), more=0))
            if at.key in columns:
                value = to_torch(columns[at.key][step, env])
                info[name] = value + at.more if at.more else value.clone()

        self._infos.append(info)
        if self._choice is None:
            return

        better = self._filmed is None
        if self._filmed is not None:
            filmed_env, filmed = self._filmed
            better = {
                "best": total > filmed,
                "worst": total < filmed,
                "first": env < filmed_env,
            }[self._choice]

        if better:
            self._filmed, self._film = (env, total), self._frames[env]

    def _film_frames(self, frames: list[Array], steps_of_envs: Array, ends: Array) -> None:
        """Add the frames after a step to the open episodes."""
        for env, frame in enumerate(frames):
            if not steps_of_envs[env]:  # the env only reset
                self._frames[env] = [frame]
            elif not (ends[env] and self._runner.window.same_step):
                self._frames[env].append(frame)

    def _render(self) -> list[Array]:
        """Render each sub-env, uint8 ``[H, W, C]``."""
        try:
            frames: list[Any] = list(self._runner.env.render() or ())
        except NotImplementedError:
            frames = []

        if len(frames) != self._runner.num_envs or any(np.ndim(frame) != 3 for frame in frames):
            raise ValueError(
                f"film={self._choice!r} needs an env that renders one picture [H, W, C] for each sub-env: make it "
                "with render_mode='rgb_array'"
            )
        return [np.array(frame, dtype=np.uint8) for frame in frames]

    def evaluation(self, seconds: float) -> Evaluation:
        """Return the result, ordered by env."""
        order = sorted(range(len(self._episodes)), key=lambda i: self._episodes[i][:2])
        envs, _, returns, lengths = zip(*(self._episodes[i] for i in order), strict=True)

        infos: dict[NestedKey, Tensor] = {}
        for name in self._names:
            like = next((info[name] for info in self._infos if name in info), None)
            if like is None:
                raise KeyError(
                    f"info_keys has {name!r}, which was in no step's info: leave it out, or name an entry "
                    "that the env reports"
                )
            infos[name] = torch.stack([self._infos[i].get(name, torch.zeros_like(like)) for i in order])

        if self._film:
            film = torch.from_numpy(np.stack(self._film))
        else:
            film = None

        return Evaluation(
            torch.tensor(returns, dtype=torch.float64),
            torch.tensor(lengths),
            torch.tensor(envs),
            infos,
            seconds,
            film,
        )


@contextmanager
def _freeze(env: object, policy: object) -> Iterator[None]:
    """Context manager: modules in eval mode, running statistics of wrappers frozen."""
    if isinstance(policy, nn.Module):
        modules = list(policy.modules())
    else:
        modules = []
    training = [module for module in modules if module.training]
    wrappers: list[Any] = [
        layer for layer in wrappers_within(env) if getattr(layer, "update_running_mean", False)
    ]

    try:
        for module in training:
            module.training = False
        for layer in wrappers:
            layer.update_running_mean = False
        yield
    finally:
        for module in training:
            module.training = True
        for layer in wrappers:
            layer.update_running_mean = True


@contextmanager
def _seed(seed: int | None) -> Iterator[None]:
    """Context manager: seed torch, and restore its random state at the end. None changes nothing."""
    started = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    devices = [torch.cuda.current_device()] if started else []
    random_state = nullcontext() if seed is None else torch.random.fork_rng(devices)

    with random_state:
        if seed is not None:
            torch.manual_seed(seed)
        yield


class Evaluator:
    """Evaluates a policy at regular intervals during training, keeps the best weights and can stop training.

    Call it after each batch with the number of frames collected so far. It evaluates once ``every`` frames have
    passed since the last evaluation, and returns whether the mean return has reached ``stop_at``.

    Args:
        env: env for `evaluate`; not the collector's.
        policy: an ``nn.Module`` that training updates in place.
        episodes: episodes per evaluation.
        every: frames between two evaluations.
        stop_at: mean return at which calls return True. Default None: never.
        options: options of `evaluate`. With a seed each evaluation plays the same episodes.

    Attributes:
        history: the frames and the `Evaluation` of each evaluation.
        best_weights: state dict of the policy (a copy) at its best mean return so far; None before the first.
        best_mean, best_frames: the best mean return and the number of frames at that time.

    Raises:
        TypeError: the policy is no ``nn.Module``.
        ValueError: ``episodes`` or ``every`` is not an integer of at least 1.

    >>> import gymnasium as gym
    >>> from tensordict.nn import TensorDictModule
    >>> push = TensorDictModule(lambda obs: (obs[:, 2] > 0).long(), ["observation"], ["action"])
    >>> check = Evaluator(gym.make_vec("CartPole-v1", num_envs=2), push, episodes=2, every=100, stop_at=20, seed=0)
    >>> [check(frames) for frames in (64, 128, 192)]
    [False, True, True]
    >>> check.best_frames, len(check.history)
    (128, 1)
    """

    def __init__(
        self,
        env: EnvLike | Callable[[], EnvLike],
        policy: nn.Module,
        *,
        episodes: int,
        every: int,
        stop_at: float | None = None,
        **options: Unpack[EvaluateOptions],
    ) -> None:
        hint = "evaluate() takes functions"
        self.policy = check_type(
            "policy", policy, nn.Module, "an nn.Module, whose weights are kept", hint=hint
        )
        self.env = env
        self.options = options
        self.episodes = check_whole_number("episodes", episodes)
        self.every = check_whole_number("every", every)

        if stop_at is None:
            self.stop_at = None
        else:
            self.stop_at = check_number("stop_at", stop_at)

        self.history: list[tuple[int, Evaluation]] = []
        self.best_weights: dict[str, Any] | None = None
        self.best_mean = -float("inf")
        self.best_frames = 0
        self._last = 0  # frames at the time of the last evaluation

    def __call__(self, frames: int) -> bool:
        """Evaluate if due; return whether the best mean return so far has reached ``stop_at``."""
        if frames - self._last >= self.every:
            self._last = frames
            found = self._evaluate()
            self.history.append((frames, found))
            if found.mean > self.best_mean:
                self.best_mean, self.best_frames = found.mean, frames
                self.best_weights = deepcopy(self.policy.state_dict())

        return self.stop_at is not None and self.best_mean >= self.stop_at

    def _evaluate(self) -> Evaluation:
        return evaluate(self.env, self.policy, episodes=self.episodes, **self.options)

    def state_dict(self) -> dict[str, Any]:
        """Return the time of the last evaluation and the best weights, without the history."""
        return {
            "last": self._last,
            "best_mean": self.best_mean,
            "best_frames": self.best_frames,
            "best_weights": self.best_weights,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a `state_dict`."""
        self._last, self.best_weights = state["last"], state["best_weights"]
        self.best_mean, self.best_frames = state["best_mean"], state["best_frames"]


def bootstrap_mean(
    values: Tensor, *, confidence: float = 0.95, resamples: int = 2000, seed: int = 0
) -> Estimate:
    """Return the mean of numbers ``[n]`` with its percentile bootstrap interval.

    Args:
        values: ``[n]`` independent values.
        confidence: of the interval, in (0, 1). Default 0.95.
        resamples: default 2000.
        seed: of the resamples, default 0.

    Reference: B. Efron, Bootstrap methods: another look at the jackknife, 1979.

    >>> bootstrap_mean(torch.tensor([1.0, 2.0, 3.0]))
    Estimate(value=2.0, low=1.0, high=3.0)
    """
    values = as_numbers("values", values, dtype=torch.float64).reshape(-1, 1)
    return _bootstrap(values, lambda x: x.mean((-2, -1)), confidence, resamples, seed)


def interquartile_mean(
    scores: Tensor | Sequence[float] | Sequence[Evaluation],
    *,
    confidence: float = 0.95,
    resamples: int = 2000,
    seed: int = 0,
) -> Estimate:
    """Return the interquartile mean over seeds with its bootstrap interval, as rliable computes it.

    Seeds are resampled with replacement, independently for each task.

    Args:
        scores: ``[seeds]``, or ``[seeds, tasks]`` normalised scores; or one `Evaluation` per seed, scored by its mean
            return.
        confidence: of the interval, in (0, 1). Default 0.95.
        resamples: default 2000.
        seed: of the resamples, default 0.

    Reference: R. Agarwal et al., Deep reinforcement learning at the edge of the statistical precipice, 2021,
    https://arxiv.org/abs/2108.13264.

    >>> interquartile_mean([0.0, 10.0, 12.0, 90.0]).value
    11.0
    """
    if isinstance(scores, Sequence) and not isinstance(scores, str):
        scores = [score.mean if isinstance(score, Evaluation) else score for score in scores]
    scores = as_numbers("scores", scores, dtype=torch.float64)
    if scores.ndim not in (1, 2):
        raise ValueError(f"scores must have shape [seeds] or [seeds, tasks], got {tuple(scores.shape)}")

    if scores.ndim == 2:
        table = scores.double()
    else:
        table = scores.double().unsqueeze(-1)

    def middle(x: Tensor) -> Tensor:
        ordered = x.flatten(-2).sort(-1).values
        cut = ordered.shape[-1] // 4  # drop a quarter at each end, rounded down
        return ordered[..., cut : ordered.shape[-1] - cut].mean(-1)

    return _bootstrap(table, middle, confidence, resamples, seed)


def _bootstrap(
    table: Tensor, statistic: Callable[[Tensor], Tensor], confidence: float, resamples: int, seed: int
) -> Estimate:
    """Compute a statistic of ``[n, tasks]`` (it maps ``[*B, n, tasks]`` to ``[*B]``) and its percentile interval."""
    if not table.numel():
        raise ValueError(f"values (or scores) must have at least one number, got shape {tuple(table.shape)}")

    seed = check_seed("seed", seed)
    check_number("confidence", confidence, above=0, below=1)
    check_whole_number("resamples", resamples)
    table = table.cpu()
    generator = torch.Generator().manual_seed(seed)
    drawn = []
    chunk = max(1, _DRAWN_AT_ONCE // table.numel())

    for start in range(0, resamples, chunk):
        shape = min(chunk, resamples - start), *table.shape
        rows = torch.randint(len(table), shape, generator=generator)
        drawn.append(statistic(table.expand(shape).gather(1, rows)))

    tail = (1 - confidence) / 2
    ends = torch.cat(drawn).quantile(torch.tensor([tail, 1 - tail], dtype=torch.float64))
    return Estimate(float(statistic(table)), *ends.tolist())
