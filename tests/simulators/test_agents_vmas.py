"""VMAS' scenarios: every row against what the games themselves returned, over ends of both kinds."""

import warnings
from typing import Any

import pytest
import torch
from traces import Counts, assert_same

pytest.importorskip("vmas")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import vmas

from flatroll.layout import agents_of, audit
from flatroll.rollouts import Collector
from flatroll.wrappers import as_vector_env
from flatroll.wrappers.testing import check_vector_env

GAMES = 4


def make(scenario: str, **kwargs: Any) -> Any:
    options = {"max_steps": 60, "terminated_truncated": True, "seed": 0, **kwargs}
    return vmas.make_env(scenario, num_envs=GAMES, n_agents=3, **options)


class Recorder:
    """What a VMAS env was given and returned, step by step."""

    def __init__(self, env: Any) -> None:
        self.steps: list[tuple[Any, ...]] = []
        step = env.step

        def recorded(actions: Any) -> Any:
            given = torch.stack([action.clone() for action in actions], 1)
            shown, paid, terminated, truncated, infos = step(actions)
            kept = (
                torch.stack(shown, 1).clone(),
                torch.stack(paid, 1).clone(),
                terminated.clone(),
                truncated.clone(),
            )
            self.steps.append((given, *kept))
            return shown, paid, terminated, truncated, infos

        env.step = recorded


@pytest.mark.parametrize(
    ("scenario", "options"),
    [("balance", {}), ("simple_spread", {"continuous_actions": False, "dict_spaces": False})],
)
def test_rows_are_what_the_games_returned(scenario: str, options: Any, report: Any) -> None:
    env = report.start(lambda: make(scenario, **options))
    recorder = Recorder(env.source.env)
    collector = Collector(env, frames_per_batch=720, seed=1)
    first: Any = collector.rollout()
    batches: list[Any] = [first, collector.rollout()]
    batch: Any = torch.cat(batches)
    agents = 3
    assert len(recorder.steps) == len(batch) // (GAMES * agents)
    rows = agents_of(batch)  # [steps * games, agents], ascending
    assert rows.shape == (len(recorder.steps) * GAMES, agents) and (rows >= 0).all()
    rows = rows.view(-1, GAMES, agents)
    false = ends = 0
    for step, (given, shown, paid, terminated, truncated) in enumerate(recorder.steps):
        mine = batch[rows[step].flatten()].view(GAMES, agents)
        wrong = (
            mine["action"].float().flatten(2) if mine["action"].ndim > 2 else mine["action"][..., None]
        ) != given
        bad = wrong.any(-1)
        bad |= (mine["next", "observation"] != shown).any(-1) | (mine["next", "reward"][..., 0] != paid)
        bad |= mine["next", "terminated"][..., 0] != terminated[:, None]
        bad |= mine["next", "truncated"][..., 0] != truncated[:, None]
        if step:
            before = batch[rows[step - 1].flatten()].view(GAMES, agents)
            goes_on = ~before["next", "done"]
            bad |= (goes_on & (mine["observation"] != before["next", "observation"])).any(-1)
            bad |= (mine["is_init"] == goes_on)[..., 0]
        false += int(bad.sum())
        ends += int((terminated | truncated).sum()) * agents
    report.add(f"VMAS, {scenario}", "vmas", "Disabled", Counts(len(batch), false, ends))
    assert false == 0 and ends >= GAMES * agents
    assert audit(batch) == []
    again: Any = Collector(make(scenario, **options), frames_per_batch=720, seed=1).rollout()
    assert_same(first, again)


def test_the_contract_kit() -> None:
    for scenario, options in (
        ("balance", {}),
        ("balance", {"continuous_actions": False, "dict_spaces": True}),
    ):
        check_vector_env(make(scenario, **options), steps=150)


def test_what_is_refused() -> None:
    with pytest.raises(ValueError, match="terminated_truncated=True"):
        as_vector_env(make("balance", terminated_truncated=False))
    unlike = vmas.make_env("simple_adversary", num_envs=2, terminated_truncated=True)
    with pytest.raises(ValueError, match="all agents must have the same"):
        as_vector_env(unlike)
    env = as_vector_env(make("balance"))
    env.reset()
    mask = torch.arange(GAMES * 3) == 0
    with pytest.raises(ValueError, match="a game is reset as a whole"):
        env.reset(options={"reset_mask": mask})
