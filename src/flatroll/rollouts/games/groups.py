"""`GroupCollector`: one policy and one batch per group of agents, for games whose agents' spaces differ."""

from collections.abc import Iterator, Mapping

import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType

from flatroll.layout.checks import check_seed, check_whole_number
from flatroll.rollouts.arguments import check_exploration_type, make_devices
from flatroll.rollouts.env_facts import read_env
from flatroll.rollouts.policies import Policy
from flatroll.rollouts.runner import Runner, RunnerOptions
from flatroll.wrappers.source import EnvLike


class GroupCollector:
    """Collects one flat batch per group of agents, for games whose agents' spaces differ.

    In each vector step every group's policy acts, then the games step once. Rows of one game step have the same
    ``("collector", "game_step")`` in all groups; ``("collector", "num_agents")`` counts the agents of the row's
    group. Each batch continues where the last one ended.

    Args:
        groups: all groups of the games by name: the sources of `flatroll.wrappers.PettingZooSource.groups`, or
            wrappers around ``as_vector_env(source)``.
        policies: policies by group name, as for `Collector`. Groups without one take random actions, by default all.
        steps_per_batch: vector steps per batch. A group has at most ``steps_per_batch * num_envs`` rows, fewer where
            agents are absent or a game is reset.
        seed: seeds the games' first reset and the random actions. Default None: neither.
        exploration_type: how probabilistic modules choose actions. Default: they sample.

    Raises:
        ValueError: ``policies`` names an unknown group.

    >>> from flatroll.wrappers import PettingZooSource
    >>> from flatroll.wrappers.testing import ScriptedGame
    >>> groups = PettingZooSource.groups(ScriptedGame(), {"front": ["a0"], "rear": ["a1", "a2"]})
    >>> batches = GroupCollector(groups, steps_per_batch=4, seed=0).rollout()
    >>> {name: batch["observation"].shape for name, batch in batches.items()}
    {'front': torch.Size([4, 4]), 'rear': torch.Size([5, 4])}
    """

    def __init__(
        self,
        groups: Mapping[str, EnvLike],
        policies: Mapping[str, Policy | None] | None = None,
        *,
        steps_per_batch: int,
        seed: int | None = None,
        exploration_type: InteractionType | str = InteractionType.RANDOM,
    ) -> None:
        self.steps_per_batch = check_whole_number("steps_per_batch", steps_per_batch, 1)
        policies = policies or {}
        if unknown := set(policies) - set(groups):
            raise ValueError(f"policies must name groups of {list(groups)}, got {sorted(unknown)}")

        self._seed = None if seed is None else check_seed("seed", seed)

        exploration = check_exploration_type(exploration_type)

        self._runners: dict[str, Runner] = {}
        for name, env in groups.items():
            facts = read_env(env)
            options = RunnerOptions(
                devices=make_devices(facts.device), exploration=exploration, seed=self._seed, sends=True
            )
            self._runners[name] = Runner(facts, policies.get(name), steps_per_batch, options)

    def rollout(self) -> dict[str, TensorDict]:
        """Step all games ``steps_per_batch`` times; return each group's batch."""
        runners = self._runners.values()
        try:
            with torch.no_grad():
                if not all(runner.started for runner in runners):
                    for runner in runners:
                        runner.reset(self._seed)

                for _ in range(self.steps_per_batch):
                    for runner in runners:
                        runner.step()
                    for runner in runners:
                        runner.settle()
        except BaseException:
            # Some groups may be one step ahead of the others: begin the next batch with a reset.
            for runner in runners:
                runner.forget()
            raise

        batches = {}
        for name, runner in self._runners.items():
            batches[name], _ = runner.lay_out(runner.window.valid(), compact=False)
            runner.window.restart(runner.num_envs)
        return batches

    def __iter__(self) -> Iterator[dict[str, TensorDict]]:
        """Yield the results of `rollout` forever."""
        while True:
            yield self.rollout()
