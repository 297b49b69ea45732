"""Collectors: ours against a hand-written loop that stores the same arrays, and against the peer's.

``python -m flatroll bench collector``
"""

import importlib.util
import warnings
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch

from flatroll.benchmarks.timing import ratio, table, take_turns
from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, StepCounter, TrajId, as_vector_env

STEPS = 256


def make_pool(num_envs: int) -> Any:
    """envpool's CartPole where it is installed, else Gymnasium's native one."""
    if importlib.util.find_spec("envpool"):
        import envpool

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return envpool.make_gymnasium("CartPole-v1", num_envs=num_envs, num_threads=2, seed=0)
    return gym.make_vec("CartPole-v1", num_envs=num_envs)


def make_peer(num_envs: int) -> Any:
    """The peer's collector over the same task, with its own markers; None where it is not installed."""
    if not importlib.util.find_spec("torchrl"):
        return None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torchrl.collectors import Collector as PeerCollector
        from torchrl.envs import Compose, GymEnv, SerialEnv, TransformedEnv
        from torchrl.envs import InitTracker as PeerInit
        from torchrl.envs import StepCounter as PeerCount

        env = TransformedEnv(
            SerialEnv(num_envs, lambda: GymEnv("CartPole-v1")), Compose(PeerInit(), PeerCount())
        )
        return iter(PeerCollector(env, None, frames_per_batch=num_envs * 16, total_frames=-1))


def hand_written(env: Any, num_envs: int) -> Callable[[], None]:
    """The loop one would write: NEXT_STEP env, the same columns time-major in place, three markers."""
    obs = np.zeros((STEPS + 1, num_envs, 4), np.float32)
    action = np.zeros((STEPS, num_envs), np.int64)
    reward = np.zeros((STEPS, num_envs), np.float32)
    terminated, truncated, valid, is_init = (np.zeros((STEPS, num_envs), bool) for _ in range(4))
    count, ids = (np.zeros((STEPS, num_envs), np.int64) for _ in range(2))
    state: dict[str, Any] = {
        "obs": env.reset()[0],
        "done": np.zeros(num_envs, bool),
        "first": np.ones(num_envs, bool),
        "count": np.zeros(num_envs, np.int64),
        "ids": np.arange(num_envs),
    }
    chosen = torch.zeros(num_envs, dtype=torch.int64)

    def policy(obs: torch.Tensor) -> torch.Tensor:
        return chosen

    def run() -> None:
        o, done, first, n, i = (state[k] for k in ("obs", "done", "first", "count", "ids"))
        for t in range(STEPS):
            obs[t] = o
            is_init[t] = first
            count[t] = n
            ids[t] = i
            a = policy(torch.from_numpy(o)).numpy()
            action[t] = a
            o, r, te, tr, _ = env.step(a)
            reward[t] = r
            terminated[t] = te
            truncated[t] = tr
            valid[t] = ~done
            first = done
            done = te | tr
            n = n + 1
            if first.any():
                n[first] = 0
                i = i + first * num_envs
        obs[STEPS] = o
        state.update(obs=o, done=done, first=first, count=n, ids=i)

    return run


def ours(env: Any, num_envs: int, frames: int) -> Callable[[], object]:
    """The collector with the three markers; the same constant action."""
    chosen = torch.zeros(num_envs, dtype=torch.int64)
    env = InitTracker(StepCounter(TrajId(env)))
    batches = iter(Collector(env, lambda obs: chosen, frames_per_batch=frames, total_frames=-1))
    return lambda: next(batches)


class FreeEnv(gym.vector.VectorEnv[Any, Any, Any]):
    """An env that costs nothing: what is measured on it is the overhead of what is around it."""

    def __init__(self, num_envs: int) -> None:
        self.num_envs = num_envs
        self.single_observation_space = gym.spaces.Box(-1, 1, (4,))
        self.single_action_space = gym.spaces.Discrete(2)
        self.observation_space = gym.vector.utils.batch_space(self.single_observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.NEXT_STEP}
        self._obs = np.zeros((num_envs, 4), np.float32)
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
                "bare": lambda env=bare, a=action: env.step(a),
                "stack": lambda env=wrapped, a=action: env.step(a),
            },
            calls=1000,
        )
        whole = take_turns(
            {
                "hand": hand_written(FreeEnv(n), n),
                "ours": ours(as_vector_env(FreeEnv(n), own_buffers=False), n, n * STEPS),
            }
        )
        hand, collector = whole["hand"].median / STEPS * 1e6, whole["ours"].median / STEPS * 1e6
        extra = (stack["stack"].median - stack["bare"].median) * 1e6
        rows.append([f"{n:,}", f"{extra:.1f}", f"{hand:.1f}", f"{collector:.1f}", f"{collector - hand:.1f}"])
    return table(["envs", "wrapper stack, extra µs", "loop, µs", "collector, µs", "extra µs"], rows)


def against_loop_and_peer(num_envs: int = 64) -> str:
    """Steps per second on CartPole, 64 envs: hand-written loop, ours, the peer's."""
    frames = num_envs * STEPS
    hand, mine = hand_written(make_pool(num_envs), num_envs), ours(make_pool(num_envs), num_envs, frames)
    result = take_turns({"hand": hand, "ours": mine}, turns=15)
    # A call of the loop makes `frames` rows with the dead ones; one of ours makes as many real rows. The
    # share of dead rows of this policy (one constant action) is measured on the loop's own arrays.
    rows = [["hand-written loop (rows with dead ones)", f"{frames / result['hand'].median:,.0f}", "1.00"]]
    real = real_share(num_envs)
    share = ratio(result["hand"], result["ours"]) / real
    rows.append(["flatroll, vector steps", f"{frames / real / result['ours'].median:,.0f}", f"{share:.2f}"])
    rows.append(["flatroll, real rows", f"{frames / result['ours'].median:,.0f}", ""])
    if (peer := make_peer(num_envs)) is not None:
        peer_run = take_turns({"peer": lambda: next(peer), "ours": mine}, turns=3)
        peer_rate = num_envs * 16 / peer_run["peer"].median
        mine_rate = frames / peer_run["ours"].median
        rows.append(
            ["torchrl (SerialEnv)", f"{peer_rate:,.0f}", f"flatroll is {mine_rate / peer_rate:,.0f} x"]
        )
    return table([f"CartPole x {num_envs}", "steps/s", "ratio to the loop"], rows)


def real_share(num_envs: int) -> float:
    """The share of a NEXT_STEP env's rows that are transitions, under the benchmark's policy."""
    env, total, dead = make_pool(num_envs), 0, 0
    env.reset()
    done = np.zeros(num_envs, bool)
    for _ in range(2000):
        dead += int(done.sum())
        total += num_envs
        _, _, te, tr, _ = env.step(np.zeros(num_envs, np.int64))
        done = te | tr
    return 1 - dead / total


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    print("Collector against a hand-written loop and the peer\n")
    print(against_loop_and_peer())
    print("\nExtra time per vector step around an env that costs nothing\n")
    print(overhead())


if __name__ == "__main__":
    main()
