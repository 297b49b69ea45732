"""Benchmarks the collector on torch simulators against a plain loop that stores the same columns, in turns.

``python -m flatroll bench simulators``, in an environment of `make simulators`:
``.venv-versions/simulators-mjlab/bin/python -m flatroll bench simulators``
"""

import importlib
import importlib.util
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.rollouts import Collector
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.arrays import map_tree

STEPS, TURNS = 40, 9


def mjlab(auto_reset: bool) -> Any:
    """mjlab's Cartpole with episodes of 20 steps."""
    import mjlab.tasks.cartpole  # pyright: ignore[reportMissingImports] # noqa: F401
    from mjlab.envs import ManagerBasedRlEnv  # pyright: ignore[reportMissingImports]
    from mjlab.tasks.registry import load_env_cfg  # pyright: ignore[reportMissingImports]

    cfg = load_env_cfg("Mjlab-Cartpole-Balance")
    cfg.scene.num_envs, cfg.auto_reset, cfg.episode_length_s = 8, auto_reset, 1.0
    return ManagerBasedRlEnv(cfg, device="cpu")


def plain_loop(env: Any, policy: Callable[[Any], Tensor]) -> Callable[[], object]:
    """A loop that writes ``[T, E, ...]`` columns, and resets the rows that ended if the env does not."""
    first, _ = env.reset(seed=0)
    num_envs = env.num_envs
    resets = not getattr(getattr(env, "cfg", None), "auto_reset", True)

    def column(leaf: Tensor) -> Tensor:
        return torch.zeros(STEPS, num_envs, *leaf.shape[1:], dtype=leaf.dtype)

    def put(columns: Any, t: int, tree: Any) -> None:
        if isinstance(tree, dict):
            for key, leaf in tree.items():
                columns[key][t] = leaf
        else:
            columns[t] = tree

    obs, after = map_tree(column, first), map_tree(column, first)
    actions = column(policy(first))
    reward, ids = torch.zeros(STEPS, num_envs), torch.zeros(STEPS, num_envs, dtype=torch.long)
    flags = torch.zeros(4, STEPS, num_envs, dtype=torch.bool)  # terminated, truncated, done, is_init
    now: dict[str, Any] = {"obs": first, "first": torch.ones(num_envs, dtype=torch.bool)}
    now["ids"] = torch.arange(num_envs)

    def run() -> None:
        seen, begun, episode = now["obs"], now["first"], now["ids"]
        for t in range(STEPS):
            put(obs, t, seen)
            flags[3, t], ids[t] = begun, episode
            action = policy(seen)
            actions[t] = action
            seen, paid, terminated, truncated, infos = env.step(action)
            begun = terminated | truncated
            reward[t], flags[0, t], flags[1, t], flags[2, t] = paid, terminated, truncated, begun
            put(after, t, infos.get("final_observation", seen))
            if begun.any():
                episode = episode + begun * num_envs
                if resets:
                    seen, _ = env.reset(env_ids=begun.nonzero().squeeze(-1))
        now.update(obs=seen, first=begun, ids=episode)

    return run


def contenders(make: Callable[[], Any], size: int, **adapt: Any) -> dict[str, Callable[[], object]]:
    """The loop and a collector, each with an env of its own; ``size`` is that of an action."""
    env, other = make(), make()

    def policy(_: Any) -> Tensor:
        return torch.rand(env.num_envs, size)

    collector = Collector(as_vector_env(other, **adapt), policy, frames_per_batch=STEPS * env.num_envs)
    return {"loop": plain_loop(env, policy), "collector": collector.rollout}


def main() -> None:
    """Print the table of the simulators that are installed."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    rows = []
    games: dict[str, Callable[[], dict[str, Callable[[], object]]]] = {}
    if importlib.util.find_spec("mjlab"):
        games["mjlab, Cartpole x 8"] = lambda: contenders(lambda: mjlab(True), 1, autoreset_mode="SameStep")
        games["mjlab, Cartpole x 8, auto_reset=False"] = lambda: contenders(lambda: mjlab(False), 1)
    if importlib.util.find_spec("mani_skill"):
        maniskill = importlib.import_module("tests.support.maniskill_env").make
        games["ManiSkill, PickCube x 1"] = lambda: contenders(maniskill, 8)
    for name, make in games.items():
        result = take_turns(make(), TURNS, clock=time.process_time)
        cells = [f"{result[who].median / STEPS * 1e6:,.0f}" for who in ("loop", "collector")]
        rows.append([name, *cells, f"{ratio(result['loop'], result['collector']):.2f}"])
    print("**Collector on torch simulators against a plain loop: processor time of a vector step**\n")
    print(table(["simulator", "loop, µs", "collector, µs", "ratio"], rows))


if __name__ == "__main__":
    main()
