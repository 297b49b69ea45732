"""An env of a log that is stepped with the log's actions."""

from tensordict.nn import InteractionType

from flatroll.datasets.replay_log.feed import Feed
from flatroll.datasets.replay_log.varints import Ints
from flatroll.rollouts.arguments import make_devices
from flatroll.rollouts.env_facts import EnvFacts
from flatroll.rollouts.runner import Runner, RunnerOptions
from flatroll.wrappers.markers import TrajId, find_wrapper


class Stage:
    """An env of a log, its runner and its feed."""

    def __init__(self, facts: EnvFacts, steps: int, first: int, total: int) -> None:
        self.facts = facts
        self.feed = Feed(facts)
        options = RunnerOptions(
            devices=make_devices(facts.device), exploration=InteractionType.RANDOM, seed=0
        )
        self.runner = Runner(facts, self.feed, steps, options)
        self.runner.trust()

        marker = find_wrapper(facts.env, TrajId)
        assert marker is not None  # `read_env` adds it
        marker.number_in(first, total)
        self._marker = marker

    def reset(self, seed: int | None, ids: Ints) -> None:
        """Reset the env; the next trajectories have these ids."""
        self._marker.continue_with(ids)
        self.runner.reset(seed)

    def step_until(self, rows: int) -> None:
        """Step until the window has ``rows`` rows."""
        runner = self.runner
        while (missing := rows - runner.window.count()) > 0:
            for _ in range(-(-missing // runner.num_envs)):
                runner.step()

    def close(self) -> None:
        """Close the env."""
        self.facts.env.close()
