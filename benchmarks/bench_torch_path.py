"""Benchmarks the collector on torch envs against hand-written loops that make the same flat batches.

``python -m flatroll bench torch_path``

The env is like a GPU simulator: tensors in and out, ended rows reset in the same step, their last observations in
``extras["final_obs"]``, all in memory that every step overwrites. Here it runs on one CPU thread; ``bench gpu`` runs it
on a GPU.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from gymnasium import spaces
from tensordict import TensorDict
from tensordict.nn import TensorDictModule, TensorDictSequential
from torch import Tensor, nn

from benchmarks.measure.operations import CountOperations
from benchmarks.measure.timing import ratio, table, take_turns, waited
from flatroll.modules import GRUModule
from flatroll.rollouts import Collector
from flatroll.wrappers import InitTracker, StepCounter, TrajId, as_vector_env

STEPS, OBSERVATION, ACTION = 32, 48, 12
#: Numbers of the entries of a Dict observation, and of a recurrent state.
ENTRIES, STATE = {"joints": 32, "height": 12, "command": 4}, 16

Loop = Callable[[], object]
Columns = dict[Any, Tensor]


class Simulator:
    """Walks at random; episodes of many lengths."""

    is_vector_env = True

    def __init__(
        self, num_envs: int, entries: dict[str, int] | None = None, device: torch.device | str = "cpu"
    ) -> None:
        self.num_envs, self.device, self.unwrapped = num_envs, torch.device(device), self
        self.metadata = {"autoreset_mode": "SameStep"}
        boxes: dict[str, spaces.Space[Any]] = {
            name: spaces.Box(-torch.inf, torch.inf, (size,)) for name, size in (entries or {}).items()
        }
        self.single_observation_space = (
            spaces.Dict(boxes) if boxes else spaces.Box(-torch.inf, torch.inf, (OBSERVATION,))
        )
        self.single_action_space = spaces.Box(-torch.inf, torch.inf, (ACTION,))
        zeros = partial(torch.zeros, device=device)
        self.obs, self.final, self.start = (zeros(num_envs, OBSERVATION) for _ in range(3))
        self.reward = zeros(num_envs)
        self.age = torch.randint(0, 200, (num_envs,), generator=torch.Generator().manual_seed(0)).to(device)
        self.limit = torch.full_like(self.age, 200)
        self.terminated, self.truncated = (zeros(num_envs, dtype=torch.bool) for _ in range(2))
        self.extras: dict[str, Any] = {"final_obs": self._shown(self.final, entries)}
        self.shown = self._shown(self.obs, entries)

    def _shown(self, obs: Tensor, entries: dict[str, int] | None) -> Any:
        if not entries:
            return obs
        return dict(zip(entries, torch.split(obs, list(entries.values()), 1), strict=True))

    def reset(self, seed: int | None = None) -> tuple[Any, dict[str, Any]]:
        self.obs.zero_()
        return self.shown, self.extras

    def step(self, action: Tensor) -> tuple[Any, Tensor, Tensor, Tensor, dict[str, Any]]:
        self.age.add_(1)
        self.obs[:, :ACTION].add_(action)
        torch.ge(self.age, self.limit, out=self.truncated)
        torch.gt(self.obs[:, 0], 100.0, out=self.terminated)
        torch.sum(action, 1, out=self.reward)
        self.final.copy_(self.obs)
        ended = self.terminated | self.truncated
        torch.where(ended[:, None], self.start, self.obs, out=self.obs)
        self.age.masked_fill_(ended, 0)
        return self.shown, self.reward, self.terminated, self.truncated, self.extras


def hand_written(env: Simulator, policy: Callable[[Any, Tensor], Tensor], states: dict[Any, Tensor]) -> Loop:
    """Time-major columns written in place, transposed once for each batch, with three markers.

    ``policy`` takes the observation and which rows begin an episode, and writes the next states into ``states``.
    """
    num_envs = env.num_envs
    ids = torch.arange(num_envs, device=env.device)
    first = torch.ones(num_envs, dtype=torch.bool, device=env.device)
    now: dict[str, Any] = {"obs": env.reset()[0], "first": first, "ids": ids}
    now["count"] = torch.zeros_like(ids)
    columns: Columns = {}

    def put(t: int, key: Any, value: Tensor) -> None:
        if key not in columns:
            columns[key] = torch.zeros(STEPS, *value.shape, dtype=value.dtype, device=value.device)
        columns[key][t] = value

    def put_all(t: int, where: str, obs: Any) -> None:
        for name, leaf in obs.items() if isinstance(obs, dict) else [("observation", obs)]:
            put(t, (where, name), leaf)

    def run() -> Columns:
        obs, first, count, ids = (now[name] for name in ("obs", "first", "count", "ids"))
        for t in range(STEPS):
            put_all(t, "root", obs)
            put(t, "is_init", first)
            put(t, "step_count", count)
            put(t, "ids", ids)
            for key, state in states.items():
                put(t, ("root", key), state)
            action = policy(obs, first)
            put(t, "action", action)
            for key, state in states.items():
                put(t, ("next", key), state)
            obs, reward, terminated, truncated, extras = env.step(action)
            first = terminated | truncated
            put_all(t, "next", extras["final_obs"])
            put(t, "reward", reward)
            put(t, "terminated", terminated)
            put(t, "truncated", truncated)
            put(t, "done", first)
            count = count + 1
            put(t, "next_count", count)
            count.masked_fill_(first, 0)
            ids = ids + first * num_envs
        now.update(obs=obs, first=first, count=count, ids=ids)
        # [T, E, ...] -> [E * T, ...]
        return {key: column.transpose(0, 1).flatten(0, 1) for key, column in columns.items()}

    return run


def ours(env: Simulator, policy: Any) -> Loop:
    """A collector of the same columns."""
    stack = InitTracker(StepCounter(TrajId(as_vector_env(env))))
    collector = Collector(stack, policy, frames_per_batch=STEPS * env.num_envs)
    return collector.rollout


def plain(num_envs: int, device: str = "cpu") -> dict[str, Loop]:
    """One observation of 48 numbers, and a policy that costs nothing."""
    chosen = torch.full((num_envs, ACTION), 0.1, device=device)
    loop, collected = (Simulator(num_envs, device=device) for _ in range(2))
    return {
        "loop": hand_written(loop, lambda obs, first: chosen, {}),
        "collector": ours(collected, lambda obs: chosen),
    }


def recurrent(num_envs: int, device: str = "cpu") -> dict[str, Loop]:
    """A Dict observation of three entries, and a small recurrent policy, whose states are columns."""
    gru: Any = GRUModule(ENTRIES["joints"], STATE, in_key="joints", out_key="_embed")
    actor: Any = TensorDictModule(nn.Linear(STATE, ACTION), in_keys=["_embed"], out_keys=["action"])
    module = TensorDictSequential(gru, actor).to(device)
    (key,) = (key for key in gru.in_keys if key not in ("joints", "is_init"))
    states = {key: torch.zeros(num_envs, 1, STATE, device=device)}

    @torch.no_grad()
    def policy(obs: Any, first: Tensor) -> Tensor:
        data = TensorDict({**obs, key: states[key], "is_init": first.unsqueeze(-1)}, [num_envs])
        module(data)
        states[key] = data["next", key]
        action: Tensor = data["action"]
        return action

    loop, collected = (Simulator(num_envs, ENTRIES, device) for _ in range(2))
    return {"loop": hand_written(loop, policy, states), "collector": ours(collected, module)}


CASES = {"48 numbers": plain, "Dict of three, recurrent": recurrent}


def operations(device: str = "cpu", num_envs: int = 64) -> str:
    """Operations, allocations and bytes written for each vector step."""
    rows = []
    for case, make in CASES.items():
        for name, run in make(num_envs, device).items():
            for _ in range(2):
                run()
            with CountOperations() as counted:
                run()
            rows.append(
                [
                    case,
                    name,
                    f"{counted.operations / STEPS:.1f}",
                    f"{counted.allocations / STEPS:.1f}",
                    f"{counted.written / STEPS / num_envs:,.0f}",
                ]
            )
    return table(["observation", "", "operations", "allocations", "bytes written a row"], rows)


def times(
    turns: int = 41,
    sizes: tuple[int, ...] = (64, 1024, 4096),
    device: str = "cpu",
    clock: Callable[[], float] = time.thread_time,
) -> str:
    """Median µs for a vector step, of processor time unless there is another clock."""
    rows = []
    for case, make in CASES.items():
        for num_envs in sizes:
            runs = {name: waited(run) for name, run in make(num_envs, device).items()}
            result = take_turns(runs, turns, clock=clock)
            cells = [f"{timing.median / STEPS * 1e6:,.0f}" for timing in result.values()]
            share = ratio(result["collector"], result["loop"])
            rows.append([case, f"{num_envs:,}", *cells, f"{share:.2f}"])
    return table(["observation", "envs", "loop, µs", "collector, µs", "collector over loop"], rows)


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    print(
        f"Collector on a torch env, {STEPS} vector steps a batch, per vector step of 64 envs: what torch has to do\n"
    )
    print(operations())
    print("\nProcessor time of the thread\n")
    print(times())


if __name__ == "__main__":
    main()
