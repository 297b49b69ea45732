"""Benchmarks the collector against a hand-written loop and against TorchRL's collector.

``python -m flatroll bench collector``
"""

import importlib.util
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from tensordict.nn import TensorDictModule

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, StepCounter, TrajId, as_vector_env

Policy: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
#: Vector steps of a batch of the peer's, which takes longer.
PEER_STEPS = 16


def batch_frames(num_envs: int) -> int:
    """Return the rows of a batch: 16,384 (256 steps of 64 envs), or 64 steps per env if that is more."""
    return max(16_384, 64 * num_envs)


def make_pool(num_envs: int) -> Any:
    """Create envpool's CartPole if envpool is installed, else Gymnasium's native vector env."""
    if importlib.util.find_spec("envpool"):
        import envpool

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, num_threads=2, seed=0)
    return gym.make_vec("CartPole-v1", num_envs=num_envs)


def make_peer(num_envs: int) -> Any:
    """Create TorchRL's collector for the same task, with its own markers; None if it is not installed."""
    if not importlib.util.find_spec("torchrl"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.collectors import Collector as PeerCollector
        from torchrl.envs import Compose, GymEnv, SerialEnv, TransformedEnv
        from torchrl.envs import InitTracker as PeerInit
        from torchrl.envs import StepCounter as PeerCount

        markers: list[Any] = [PeerInit(), PeerCount()]
        env = TransformedEnv(SerialEnv(num_envs, lambda: GymEnv("CartPole-v1")), Compose(*markers))
        return iter(PeerCollector(env, None, frames_per_batch=num_envs * PEER_STEPS, total_frames=-1))


def hand_written(env: Any, num_envs: int, policy: Policy | None = None) -> Callable[[], None]:
    """Run a typical hand-written loop: NEXT_STEP env, three markers, preallocated time-major columns.

    Args:
        env: a vector env.
        num_envs: its rows.
        policy: gives the actions of observations. Default None: random actions.
    """
    steps = batch_frames(num_envs) // num_envs
    obs = np.zeros((steps, num_envs, 4), np.float32)
    action = np.zeros((steps, num_envs), np.int64)
    reward = np.zeros((steps, num_envs), np.float32)
    next_obs = np.zeros((steps, num_envs, 4), np.float32)
    terminated, truncated, ended, valid, is_init = (np.zeros((steps, num_envs), bool) for _ in range(5))
    count, next_count, ids = (np.zeros((steps, num_envs), np.int64) for _ in range(3))
    state: dict[str, Any] = {
        "obs": env.reset()[0],
        "done": np.zeros(num_envs, bool),
        "first": np.ones(num_envs, bool),
        "count": np.zeros(num_envs, np.int64),
        "ids": np.arange(num_envs),
    }
    rng = np.random.default_rng(0)

    def run() -> None:
        o, done, first, n, i = (state[k] for k in ("obs", "done", "first", "count", "ids"))
        for t in range(steps):
            obs[t] = o
            is_init[t] = first
            count[t] = n
            ids[t] = i
            a = rng.integers(0, 2, num_envs) if policy is None else policy(torch.from_numpy(o)).numpy()
            action[t] = a
            o, r, te, tr, _ = env.step(a)
            reward[t] = r
            terminated[t] = te
            truncated[t] = tr
            next_obs[t] = o
            valid[t] = ~done
            first = done
            ended[t] = done = te | tr
            next_count[t] = n = n + 1
            if first.any():
                n[first] = 0
                i = i + first * num_envs
        state.update(obs=o, done=done, first=first, count=n, ids=i)

    return run


def free_policy(num_envs: int) -> Policy:
    """Return a policy without cost, which always gives the same constant action."""
    chosen = torch.zeros(num_envs, dtype=torch.int64)
    return lambda obs: chosen


def ours(env: Any, num_envs: int, policy: Any = None) -> Callable[[], object]:
    """Return a function that collects the next batch with flatroll, three markers and the same policy."""
    env = InitTracker(StepCounter(TrajId(env)))
    batches = iter(Collector(env, policy, frames_per_batch=batch_frames(num_envs), total_frames=-1))
    return lambda: next(batches)


class FreeEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """An env without cost, to measure the overhead of wrappers and collectors.

    Every observation is the same (of a masked env a Dict, in which option 1 is illegal), and env 0 ends each 20th step.

    Args:
        num_envs: its rows.
        action: the action space of one env. Default None: two choices.
        masked: whether observations have an ``"action_mask"`` of a Discrete space. Default False.
    """

    def __init__(self, num_envs: int, action: Any = None, *, masked: bool = False) -> None:
        self.num_envs = num_envs
        self.single_observation_space: Any = spaces.Box(-1, 1, (4,))
        self.single_action_space: Any = spaces.Discrete(2) if action is None else action
        self._obs: Any = np.zeros((num_envs, 4), np.float32)
        if masked:
            options = int(self.single_action_space.n)
            mask = spaces.MultiBinary(options)
            self.single_observation_space = spaces.Dict(
                {"observation": self.single_observation_space, "action_mask": mask}
            )
            legal = np.ones((num_envs, options), np.int8)
            legal[:, 1] = 0
            self._obs = {"observation": self._obs, "action_mask": legal}

        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        self._reward = np.zeros(num_envs, np.float32)
        self._none = np.zeros(num_envs, bool)
        self._one = np.zeros(num_envs, bool)
        self._one[0] = True
        self._steps = 0

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        return self._obs, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        self._steps += 1
        done = self._one if self._steps % 20 == 0 else self._none
        return self._obs, self._reward, done, self._none, {}


def overhead(sizes: tuple[int, ...] = (1, 8, 64, 256, 1024)) -> str:
    """Extra µs per vector step of the wrapper stack, and of the whole collector over the hand-written loop."""
    rows = []
    for n in sizes:
        bare, wrapped = (
            FreeEnv(n),
            InitTracker(StepCounter(TrajId(as_vector_env(FreeEnv(n), own_buffers=False)))),
        )
        wrapped.reset()
        action = np.zeros(n, np.int64)
        stack = take_turns(
            {
                "bare": partial(bare.step, action),
                "stack": partial(wrapped.step, action),
            },
            calls=1000,
        )
        whole = take_turns(
            {
                "hand": hand_written(FreeEnv(n), n),
                "ours": ours(as_vector_env(FreeEnv(n), own_buffers=False), n),
            }
        )
        steps = batch_frames(n) // n
        hand, collector = whole["hand"].median / steps * 1e6, whole["ours"].median / steps * 1e6
        extra = (stack["stack"].median - stack["bare"].median) * 1e6
        rows.append([f"{n:,}", f"{extra:.1f}", f"{hand:.1f}", f"{collector:.1f}", f"{collector - hand:.1f}"])
    return table(["envs", "wrapper stack, extra µs", "loop, µs", "collector, µs", "extra µs"], rows)


class Chooser(torch.nn.Module):
    """A small network that chooses the action of the larger output."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.Tanh(), torch.nn.Linear(64, 2))

    def forward(self, observation: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(observation)
        return scores.argmax(-1)


def one_env() -> str:
    """Processor time of one thread per step of one env that costs nothing, for several policies."""
    network = Chooser()
    module: Any = TensorDictModule(network, ["observation"], ["action"])
    cases: dict[str, tuple[Policy | None, Any]] = {
        "random actions": (None, None),
        "a function that costs nothing": (free_policy(1), free_policy(1)),
        "a network": (network, network),
        "a network as a `TensorDictModule`": (network, module),
    }
    rows, steps = [], batch_frames(1)
    with torch.no_grad():
        for name, (theirs, policy) in cases.items():
            env = as_vector_env(FreeEnv(1), own_buffers=False)
            runs = {"hand": hand_written(FreeEnv(1), 1, theirs), "ours": ours(env, 1, policy)}
            times = take_turns(runs, turns=4, clock=time.thread_time)
            hand, mine = (times[key].median / steps * 1e6 for key in runs)
            rows.append([name, f"{hand:.1f}", f"{mine:.1f}", f"{mine - hand:.1f}"])
    return table(["policy", "loop, µs", "collector, µs", "extra µs"], rows)


def small_batches(sizes: tuple[int, ...] = (1, 4, 16)) -> str:
    """Processor time of one thread, in µs, for a batch of a few rows of one env and a policy that cost nothing."""
    rows = []
    for frames in sizes:
        cells = [f"{frames}"]
        for compact in (False, True):
            env = as_vector_env(FreeEnv(1), own_buffers=False)
            batches = iter(Collector(env, free_policy(1), frames_per_batch=frames, compact_obs=compact))
            times = []
            for _ in range(2000):
                start = time.thread_time_ns()
                next(batches)
                times.append(time.thread_time_ns() - start)
            least, middle = np.quantile(times, [0.05, 0.5]) / 1e3
            cells.append(f"{least:.0f} ({middle:.0f})")
        rows.append(cells)
    return table(["rows of a batch", "next(collector), µs", "compact, µs"], rows)


def against_loop(num_envs: int = 64) -> str:
    """Measure steps per second on envpool's CartPole, for the hand-written loop and for flatroll."""
    frames, rows = batch_frames(num_envs), []
    for name, policy in (
        ("random actions", None),
        ("a torch policy that costs nothing", free_policy(num_envs)),
    ):
        # One pool for both: two pools of threads differ by more than what is measured. (Whoever takes over
        # finds rows of the other's last step; that changes no time.)
        pool = make_pool(num_envs)
        contenders = {"hand": hand_written(pool, num_envs, policy), "ours": ours(pool, num_envs, policy)}
        result = take_turns(contenders, turns=25)
        # A call of the loop makes `frames` rows, dead ones included; one of ours makes as many real rows, and
        # so takes more vector steps. The share of real rows under each policy is measured.
        real = real_share(num_envs, policy is None)
        hand, mine = frames / result["hand"].median, frames / result["ours"].median / real
        share = ratio(result["hand"], result["ours"]) / real
        rows.append([name, f"{hand:,.0f}", f"{mine:,.0f}", f"{share:.2f}", f"{mine * real:,.0f}"])
    header = [
        f"CartPole x {num_envs}",
        "loop, steps/s",
        "flatroll, steps/s",
        "ratio",
        "flatroll, transitions/s",
    ]
    return table(header, rows)


def against_peer(num_envs: int = 64) -> str:
    """Measure transitions per second on CartPole, for flatroll on two vector envs and for TorchRL."""
    native = as_vector_env(gym.make_vec("CartPole-v1", num_envs=num_envs))
    contenders: dict[str, tuple[Callable[[], object], int]] = {
        "flatroll, gymnasium's native vector env": (ours(native, num_envs), batch_frames(num_envs)),
        "flatroll, envpool": (ours(make_pool(num_envs), num_envs), batch_frames(num_envs)),
    }
    peer = make_peer(num_envs)
    if peer is None:
        return "torchrl is not installed: nothing to compare with"
    name = "torchrl, SerialEnv of GymEnv"
    contenders[name] = (lambda: next(peer), num_envs * PEER_STEPS)
    result = take_turns({key: run for key, (run, _) in contenders.items()}, turns=5)
    rates = {key: frames / result[key].median for key, (_, frames) in contenders.items()}
    rows = [[key, f"{rate:,.0f}", f"{rate / rates[name]:,.1f} x"] for key, rate in rates.items()]
    return table([f"CartPole x {num_envs}", "transitions/s", "ratio"], rows)


class SlowEnv(gym.Env[Any, Any]):
    """An env whose step takes a while, asleep or at work."""

    observation_space = gym.spaces.Box(-1, 1, (4,))
    action_space = gym.spaces.Discrete(2)

    def __init__(self, seconds: float, works: bool) -> None:
        self._wait = partial(spend, seconds, works)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        super().reset(**kwargs)
        return np.zeros(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        self._wait()
        return np.zeros(4, np.float32), 0.0, False, False, {}


def spend(seconds: float, works: bool) -> None:
    """Sleep, or use so much time of a core."""
    if not works:
        time.sleep(seconds)
        return
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def in_turn(num_envs: int = 8, steps: int = 20) -> str:
    """Vector steps per second of an AsyncVectorEnv stepped at once, and in two halves in turn."""

    def act(seconds: float, per_row: bool, works: bool, obs: torch.Tensor) -> torch.Tensor:
        spend(seconds * len(obs) / num_envs if per_row else seconds, works)
        return torch.zeros(len(obs), dtype=torch.int64)

    rows = []
    for works in (False, True):
        for at_once in (None, num_envs // 2):
            for per_row in (False, True):
                # Asleep, each env of 4 ms; at work, all envs together 4 ms of one core.
                seconds = 0.004 / num_envs if works else 0.004
                make = partial(SlowEnv, seconds, works)
                runs, collectors = {}, []
                for splits in (1, 2):
                    env = gym.vector.AsyncVectorEnv([make] * num_envs, max_concurrency=at_once)
                    policy = partial(act, 0.004, per_row, works)
                    collectors.append(
                        Collector(env, policy, frames_per_batch=steps * num_envs, splits=splits)
                    )
                    runs[str(splits)] = collectors[-1].rollout
                result = take_turns(runs, turns=5)
                for collector in collectors:
                    collector.shutdown()
                rates = [f"{steps / result[name].median:,.0f}" for name in runs]
                what = "works" if works else "sleeps"
                rows.append(
                    [
                        f"{what}, {at_once or num_envs} at once",
                        f"{what}, {'each row' if per_row else 'each call'}",
                        *rates,
                        f"{ratio(result['1'], result['2']):.2f}",
                    ]
                )
    return table(["env", "policy", "at once, steps/s", "splits=2, steps/s", "ratio"], rows)


def real_share(num_envs: int, random: bool) -> float:
    """Measure the share of a NEXT_STEP env's outputs that are transitions, not resets."""
    env, rng, dead, steps = make_pool(num_envs), np.random.default_rng(0), 0, 2000
    env.reset()
    done = np.zeros(num_envs, bool)
    for _ in range(steps):
        dead += int(done.sum())
        actions = rng.integers(0, 2, num_envs) if random else np.zeros(num_envs, np.int64)
        _, _, te, tr, _ = env.step(actions)
        done = te | tr
    return 1 - dead / (steps * num_envs)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    print("Collector against a hand-written loop that stores the same columns time-major\n")
    print(against_loop())
    print("\nCollector against the peer's\n")
    print(against_peer())
    print("\nExtra time per vector step around an env that costs nothing\n")
    print(overhead())
    print("\nOne env that costs nothing: processor time of a step\n")
    print(one_env())
    print("\nTwo halves in turn: 8 env processes and a policy that each take 4 ms for a vector step\n")
    print(in_turn())
    print("\nBatches of a few rows: the fastest of 20 (the median)\n")
    print(small_batches())


if __name__ == "__main__":
    main()
