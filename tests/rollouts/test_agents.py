"""Agents that come and go are rows: each row of a scripted game is known beforehand, whoever collects it."""

from collections import defaultdict
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from forms import examples
from hypothesis import given
from hypothesis import strategies as st
from tensordict import TensorDict
from tensordict.nn import (
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import Tensor, nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.layout import agents_of, audit
from flatroll.modules import GRUModule, set_recurrent_mode
from flatroll.rollouts import Collector, GroupCollector, check_env_specs, rollout
from flatroll.wrappers import PettingZooSource, StepCounter, as_vector_env
from flatroll.wrappers.testing import ScriptedGame, check_vector_env

# An agent that is there all the time, one that dies and comes back, one that joins late, one of the second episode.
EPISODES: Any = (
    {"a": [(0, 6, "truncated")], "b": [(0, 2, "terminated"), (3, 1, "terminated"), (5, 1, "truncated")]},
    {"a": [(0, 1, "terminated")], "c": [(0, 4, "truncated")], "d": [(2, 2, "terminated")]},
    {"b": [(0, 2, "terminated")], "c": [(0, 2, "terminated")]},
)


def games(count: int, episodes: Any = EPISODES, **kwargs: Any) -> list[ScriptedGame]:
    """Games of which each begins its cycle of episodes with another one, so that they do not end together."""
    turned = [episodes[i % len(episodes) :] + episodes[: i % len(episodes)] for i in range(count)]
    return [ScriptedGame(number, plans, **kwargs) for number, plans in enumerate(turned)]


def place_of(game: ScriptedGame, agent: str, life: int) -> tuple[int, Any]:
    """The episode of an agent's life, and its plan."""
    episode = 0
    while True:
        lives = game.episodes[episode % len(game.episodes)].get(agent, ())
        if life < len(lives):
            return episode, lives[life]
        life, episode = life - len(lives), episode + 1


def check_rows(batches: list[TensorDict], played: list[ScriptedGame]) -> None:
    """Every entry of every row, and that no row is missing or there twice."""
    batch: Any = torch.cat(batches)
    assert len(batch)
    rows = {key if isinstance(key, str) else key[-2:]: batch[key].tolist() for key in batch.keys(True, True)}
    ids: dict[tuple[int, ...], int] = {}
    times: dict[int, tuple[int, ...]] = {}
    streams: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for i, seen in enumerate(rows["observation"]):
        number, agent, life, step = map(int, seen)
        game = played[number]
        name = game.possible_agents[agent]
        episode, (join, steps, end) = place_of(game, name, life)
        assert rows["next", "observation"][i] == [number, agent, life, step + 1]
        assert 0 <= step < steps  # in particular no row of an agent that is not there
        assert (rows["collector", "game"][i], rows["collector", "agent"][i]) == (number, agent)
        assert rows["is_init"][i] == [step == 0]
        if "step_count" in rows:
            assert rows["step_count"][i] == [step] and rows["next", "step_count"][i] == [step + 1]
        last = step == steps - 1
        assert rows["next", "terminated"][i] == [last and end == "terminated"]
        assert rows["next", "truncated"][i] == [last and end == "truncated"]
        assert rows["next", "done"][i] == [last]
        assert rows["next", "reward"][i] == [rows["action"][i] + 10 * agent]
        plan = game.episodes[episode % len(game.episodes)]
        there = sum(j <= join + step < j + s for lives in plan.values() for j, s, _ in lives)
        assert rows["collector", "num_agents"][i] == there
        if "state" in rows:
            assert rows["state"][i] == [number, episode, join + step]
            assert rows["next", "state"][i] == [number, episode, join + step + 1]
        # One id for each life, one number for each step of each game.
        assert (
            ids.setdefault((number, agent, life), rows["collector", "traj_ids"][i])
            == rows["collector", "traj_ids"][i]
        )
        moment = (number, episode, join + step)
        assert times.setdefault(rows["collector", "game_step"][i], moment) == moment
        streams[number, agent].append((life, step))
    assert len(set(ids.values())) == len(ids) and len(set(times.values())) == len(times)
    for (number, agent), stream in streams.items():
        name = played[number].possible_agents[agent]
        assert stream[0] == (0, 0)
        for (life, step), after in pairwise(
            stream
        ):  # the batches one after another: an agent's rows in order of time
            steps = place_of(played[number], name, life)[1][1]
            assert after == ((life, step + 1) if step + 1 < steps else (life + 1, 0))


@pytest.mark.parametrize("frames", [1, 7, 12, 64, 501])
@pytest.mark.parametrize("state", [False, True])
def test_every_row_is_right(frames: int, state: bool) -> None:
    played = games(3)
    env = StepCounter(as_vector_env(PettingZooSource(played, state=state)))
    collector = Collector(env, frames_per_batch=frames, seed=1)
    batches: list[Any] = [collector.rollout() for _ in range(-(-150 // frames))]
    assert all(len(batch) == frames and not audit(batch) for batch in batches)
    check_rows(batches, played)


def test_windows_change_no_row() -> None:
    one, many = (Collector(games(2), frames_per_batch=n, seed=3) for n in (90, 9))
    windows: list[Any] = [many.rollout() for _ in range(10)]
    whole, parts = one.rollout(), torch.cat(windows)
    assert whole is not None

    def in_order(batch: Any) -> Any:
        return batch[(batch["collector", "game_step"] * 10 + batch["collector", "agent"]).argsort()]

    assert (in_order(whole) == in_order(parts)).all()


@st.composite
def plans(draw: st.DrawFn) -> tuple[dict[str, list[Any]], ...]:
    """Random episodes: who is there when; a life is a run of steps in which an agent is there."""
    agents = draw(st.integers(1, 4))
    made = []
    for _ in range(draw(st.integers(1, 3))):
        steps = draw(st.integers(1, 6))
        there = np.array(draw(st.lists(st.booleans(), min_size=agents * steps, max_size=agents * steps)))
        there = there.reshape(agents, steps)
        there[0, ~there.any(0)] = True
        plan: dict[str, list[Any]] = {}
        for agent, line in enumerate(there):
            edges = np.flatnonzero(np.diff(np.concatenate([[0], line, [0]])))
            ends = draw(st.lists(st.sampled_from(["terminated", "truncated"]), min_size=4, max_size=4))
            lives = zip(edges[::2].tolist(), edges[1::2].tolist(), ends, strict=False)
            plan[f"agent_{agent}"] = [(join, leave - join, end) for join, leave, end in lives]
        made.append(plan)
    return tuple(made)


@examples(25, derandomize=True, database=None)
@given(plans(), st.integers(1, 3), st.integers(1, 40), st.booleans())
def test_every_row_of_random_scripts(episodes: Any, count: int, frames: int, mask: bool) -> None:
    played = games(count, episodes, mask=mask)
    env = StepCounter(as_vector_env(PettingZooSource(played, state=True)))
    collector = Collector(env, frames_per_batch=frames)
    batches: list[Any] = [collector.rollout() for _ in range(3)]
    check_rows(batches, played)
    for batch in batches if mask else ():
        legal = torch.nn.functional.one_hot(batch["observation"][:, 3].long() % 5, 5)
        assert torch.equal(batch["action_mask"].long(), legal)
        assert batch["action_mask"].gather(1, batch["action"][:, None]).all()


def test_contract() -> None:
    for source in (games(1), games(3), PettingZooSource(games(2, mask=True), state=True)):
        check_vector_env(source)  # type: ignore[arg-type]
        check_env_specs(source)  # type: ignore[arg-type]


def test_rollout_gives_each_agent_its_steps() -> None:
    played = [ScriptedGame(), ScriptedGame(1)]
    batch = rollout(played, num_steps=20, seed=0)  # type: ignore[arg-type]
    check_rows([batch], played)
    assert len(batch) == 6 * 20


def test_slices_of_a_compact_buffer() -> None:
    played = games(3)
    buffer = ReplayBuffer(
        storage=LazyTensorStorage(400, compact_obs=True),
        sampler=SliceSampler(slice_len=3, strict_length=False),
        batch_size=96,
        generator=torch.Generator().manual_seed(0),
    )
    collector = Collector(
        PettingZooSource(played, state=True),
        frames_per_batch=50,
        total_frames=600,
        compact_obs=True,
        replay_buffer=buffer,
    )
    for _ in collector:  # the ring wraps
        pass
    for _ in range(20):
        sample: Any = buffer.sample()
        here, after = sample["observation"], sample["next", "observation"]
        assert torch.equal(after, here + torch.tensor([0.0, 0, 0, 1]))
        assert torch.equal(sample["next", "state"], sample["state"] + torch.tensor([0.0, 0, 1]))
        goes_on = ~sample["next", "done"][:-1, 0]
        assert torch.equal(here[1:][goes_on], after[:-1][goes_on])  # slices: the next row follows


def reference_gae(batch: TensorDict, value: Any, gamma: float, lmbda: float) -> Tensor:
    """The advantage of each row, by a loop back in time over each life."""
    now, then = value(batch["observation"]), value(batch["next", "observation"])
    reward, done, dead = (batch["next", key] for key in ("reward", "done", "terminated"))
    ids, advantage = batch["collector", "traj_ids"], torch.zeros_like(now)
    for i in reversed(range(len(batch))):
        advantage[i] = reward[i] + gamma * then[i] * ~dead[i] - now[i]
        if i + 1 < len(batch) and ids[i + 1] == ids[i] and not done[i]:
            advantage[i] += gamma * lmbda * advantage[i + 1]
    return advantage


@pytest.mark.parametrize("shifted", [False, True])
def test_gae_and_ppo_of_each_agent(shifted: bool) -> None:
    critic = TensorDictModule(nn.Linear(4, 1), ["observation"], ["state_value"])
    actor = ProbabilisticTensorDictSequential(
        TensorDictModule(nn.Linear(4, 5), ["observation"], ["logits"]),
        ProbabilisticTensorDictModule(
            ["logits"], ["action"], distribution_class=torch.distributions.Categorical, return_log_prob=True
        ),
    )
    batch: Any = Collector(games(3), actor, frames_per_batch=61).rollout()
    GAE(gamma=0.9, lmbda=0.8, value_network=critic, shifted=shifted)(batch)
    with torch.no_grad():
        expected = reference_gae(batch, critic.module, 0.9, 0.8)
    torch.testing.assert_close(batch["advantage"], expected)
    losses = ClipPPOLoss(actor, critic)(batch)
    assert all(value.isfinite().all() for value in losses.values())


def test_recurrent_states_are_each_agents_own() -> None:
    gru = GRUModule(4, 8, in_key="observation", out_key="hidden")
    head = TensorDictModule(nn.Linear(8, 5), in_keys=["hidden"], out_keys=["logits"])
    choose = TensorDictModule(lambda logits: logits.argmax(-1), in_keys=["logits"], out_keys=["action"])
    policy = TensorDictSequential(gru, head, choose)
    batch: Any = Collector(games(3), policy, frames_per_batch=80).rollout()
    # Step by step, each life from zeros ...
    state: dict[int, Any] = {}
    with torch.no_grad(), set_recurrent_mode(False):
        for i in range(len(batch)):
            row = batch[i : i + 1].select("observation", "is_init")
            life = int(batch["collector", "traj_ids"][i])
            assert bool(row["is_init"]) == (life not in state)
            row["recurrent_state"] = state.get(life, torch.zeros_like(batch["recurrent_state"][i : i + 1]))
            policy(row)
            state[life] = row["next", "recurrent_state"]
            torch.testing.assert_close(row["logits"], batch["logits"][i : i + 1])
    # ... and all at once, as a loss does.
    with torch.no_grad(), set_recurrent_mode(True):
        again = policy(batch.clone())
    torch.testing.assert_close(again["logits"], batch["logits"])


def test_the_rows_of_the_others() -> None:
    played = games(3)
    collector = Collector(PettingZooSource(played, state=True), frames_per_batch=101)
    first, second = collector.rollout(), collector.rollout()
    assert first is not None and second is not None
    batch: Any = torch.cat([first, second])[torch.randperm(202, generator=torch.Generator().manual_seed(0))]
    rows = agents_of(batch, max_num_agents=5)
    assert rows.shape[1] == 5
    for line in rows:
        there = line[line >= 0]
        states, agents = batch["state"][there], batch["collector", "agent"][there]
        assert (states == states[0]).all()  # one game at one time
        game = played[int(states[0, 0])]
        plan = game.episodes[int(states[0, 1]) % len(game.episodes)]
        time = int(states[0, 2])
        names = [name for name, lives in plan.items() if any(j <= time < j + n for j, n, _ in lives)]
        assert sorted(names) == [game.possible_agents[agent] for agent in agents]  # all of them, in order
        assert torch.equal(line[agents], there)
        moment = int(batch["collector", "game_step"][there[0]])
        assert torch.equal(agents_of(batch, moment), there)
    # A sum over the team at all times at once, as VDN has it, beside a loop.
    there, value = rows >= 0, batch["observation"][:, 3] + 1
    total = (value[rows] * there).sum(-1)
    numbers = batch["collector", "game_step"]
    moments = numbers[rows.max(-1).values]
    assert total.tolist() == [float(value[numbers == moment].sum()) for moment in moments]
    back = torch.zeros(len(batch))
    back[rows[there]] = total[:, None].expand_as(rows)[there]
    assert all(back[i] == value[numbers == numbers[i]].sum() for i in rows[there])


def test_a_game_step_in_two_batches_is_partial() -> None:
    collector = Collector(ScriptedGame(), frames_per_batch=3)
    first, second = collector.rollout(), collector.rollout()
    assert first is not None and second is not None
    # Two agents act, then three, and the second step is cut behind the first of them.
    split = int(first["collector", "game_step"].max())
    assert len(agents_of(first)) == 1 and len(agents_of(first, partial=True)) == 2
    with pytest.raises(ValueError, match="another batch the rest: pass partial=True"):
        agents_of(first, split)
    assert len(agents_of(first, split, partial=True)) == 1
    assert len(agents_of(torch.cat([first, second]), split)) == 3


def test_agents_of_refuses_what_it_cannot_tell() -> None:
    batch: Any = Collector(ScriptedGame(), frames_per_batch=12).rollout()
    with pytest.raises(ValueError, match="an agent must have one row at one game step"):
        agents_of(torch.cat([batch, batch[:1]]))
    with pytest.raises(
        ValueError, match="max_num_agents must be at least 3, as the batch has agent 2, got 2"
    ):
        agents_of(batch, max_num_agents=2)
    with pytest.raises(ValueError, match="t must be game steps of the batch"):
        agents_of(batch, -5)
    with pytest.raises(KeyError, match="collectors write it for multi-agent games"):
        agents_of(batch.exclude(("collector", "agent")))
    moments = agents_of(batch)
    numbers = batch["collector", "game_step"][moments.max(-1).values]
    assert torch.equal(agents_of(batch, numbers.flip(0)), moments.flip(0))
    assert agents_of(batch[:0]).shape == (0, 0)


def test_game_steps_stay_unique_after_a_restart_and_over_writers() -> None:
    collector = Collector(ScriptedGame(), frames_per_batch=10, writer=3)
    before: Any = collector.rollout()
    resumed = Collector(ScriptedGame(), frames_per_batch=10, writer=3)
    resumed.load_state_dict(collector.state_dict())
    after: Any = resumed.rollout()
    for name in ("game_step", "traj_ids"):
        assert before["collector", name].max() < after["collector", name].min()
        assert (before["collector", name] >> 40 == 3).all() and (after["collector", name] >> 40 == 3).all()
    collector.reset()
    again: Any = collector.rollout()
    assert before["collector", "game_step"].max() < again["collector", "game_step"].min()


def test_two_runs_with_one_seed_are_equal() -> None:
    one, two = (Collector(games(2), frames_per_batch=50, seed=5).rollout() for _ in range(2))
    assert one is not None and two is not None and (one == two).all()


GROUPS = {"one": ["a", "c"], "two": ["b", "d"]}


def by_step(observation: Tensor) -> Tensor:
    return (observation.sum(-1) % 5).long()


def test_groups_have_the_rows_that_all_agents_have() -> None:
    played = games(3)
    together = PettingZooSource.groups(played, {"all": ["a", "b", "c", "d"]})
    whole = GroupCollector(together, {"all": by_step}, steps_per_batch=9)
    apart = GroupCollector(
        PettingZooSource.groups(games(3), GROUPS), dict.fromkeys(GROUPS, by_step), steps_per_batch=9
    )
    alls: list[Any] = [whole.rollout()["all"] for _ in range(8)]
    check_rows(alls, played)
    for expected in alls:
        for name, batch in apart.rollout().items():
            assert audit(batch) == []
            places = torch.tensor([played[0].possible_agents.index(agent) for agent in GROUPS[name]])
            mine: Any = expected[torch.isin(expected["collector", "agent"], places)]
            left_out = {("collector", "traj_ids"), ("collector", "num_agents")}
            for key in set(mine.keys(True, True)) - left_out:
                assert torch.equal(mine[key], batch[key]), (name, key)
    absent = GroupCollector(
        PettingZooSource.groups(games(1), {"d": ["d"], "rest": ["a", "b", "c"]}), steps_per_batch=2
    )
    assert {name: len(batch) for name, batch in absent.rollout().items()} == {"d": 0, "rest": 4}


def test_groups_go_on_after_an_error() -> None:
    class Fails(ScriptedGame):
        steps = 0

        def step(self, actions: Any) -> Any:
            self.steps += 1
            if self.steps == 5:
                raise RuntimeError("the game failed")
            return super().step(actions)

    collector = GroupCollector(PettingZooSource.groups(Fails(0, EPISODES), GROUPS), steps_per_batch=4, seed=0)
    collector.rollout()
    with pytest.raises(RuntimeError, match="the game failed"):
        collector.rollout()
    for batch in collector.rollout().values():
        assert batch["is_init"][0] and audit(batch) == []


def test_group_collector_refuses() -> None:
    groups = PettingZooSource.groups(ScriptedGame(0, EPISODES), GROUPS)
    with pytest.raises(ValueError, match=r"policies must name groups of \['one', 'two'\], got \['three'\]"):
        GroupCollector(groups, {"three": None}, steps_per_batch=4)
    with pytest.raises(ValueError, match="steps_per_batch must be an integer of at least 1, got 0"):
        GroupCollector(groups, steps_per_batch=0)
    one = as_vector_env(PettingZooSource.groups(ScriptedGame(0, EPISODES), GROUPS)["one"])
    with pytest.raises(RuntimeError, match="GroupCollector"):
        Collector(one, frames_per_batch=4).rollout()
