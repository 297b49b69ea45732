"""Pages on the layout, agents, CleanRL's loops, trees, TorchRL, text, specs, performance: values computed by hand."""

import gymnasium as gym
import numpy as np
import page_blocks
import pytest
import torch
from plain_loop import assert_as_played, assert_equal_but, ends_of, per_env, plain_gae, position_of
from tensordict import TensorDict

from flatroll.rollouts import Collector, rollout
from flatroll.wrappers.testing import ScriptedGame

CLEANRL = "docs/cleanrl.md"
TREES = "docs/trees.md"
TORCHRL = "docs/torchrl.md"
AGENTS = "docs/agents.md"

# docs/layout.md and docs/layout/inspect.md: env 0 terminates after 3 and 4 steps, env 1 is truncated after 2 and 4.
FIVE_STEPS = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1)]
FIVE_STEPS += [(1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1), (1, 1, 2)]


@pytest.mark.parametrize("page", ["docs/layout.md", "docs/layout/inspect.md"])
def test_the_toy_batch(page: str, until) -> None:
    batch = until(page, "batch = rollout(")["batch"]
    assert [tuple(row) for row in batch["observation"].int().tolist()] == FIVE_STEPS
    following = [tuple(row) for row in batch["next", "observation"].int().tolist()]
    assert following == [(e, k, t + 1) for e, k, t in FIVE_STEPS]
    assert batch["next", "reward"].flatten().tolist() == [100 * k + t + 1 for _, k, t in FIVE_STEPS]
    assert batch["step_count"].flatten().tolist() == [t for *_, t in FIVE_STEPS]
    assert batch["is_init"].flatten().tolist() == [t == 0 for *_, t in FIVE_STEPS]
    assert batch["next", "terminated"].flatten().tolist() == [row == (0, 0, 2) for row in FIVE_STEPS]
    assert batch["next", "truncated"].flatten().tolist() == [row == (1, 0, 1) for row in FIVE_STEPS]


def test_three_rules_of_ends(until) -> None:
    space = until("docs/layout.md", "_, _, third = next(collector), next(collector), next(collector)")
    third, run_ends = space["third"], space["run_ends"]
    assert run_ends(third).flatten().tolist() == ends_of(third)


def test_the_drawn_batch(until) -> None:
    """Two batches of 180 rows, truncated after 20 steps, from a bare env that has this limit itself."""
    pytest.importorskip("matplotlib")
    space = until("docs/layout/inspect.md", "first, second = next(collector), next(collector)")
    rows = torch.cat([space["first"], space["second"]])
    bare = gym.make_vec("CartPole-v1", num_envs=3, vectorization_mode="sync", max_episode_steps=20)
    assert_as_played(rows, bare, seed=0)


# agents.md


def play_games(batch: TensorDict, groups: list[ScriptedGame]) -> None:
    """Each row of the batch is what the bare games return when the agents take the rows' actions."""
    names = groups[0].possible_agents
    rows = {}
    for row in batch.unbind(0):
        who = (int(row["collector", "game"]), int(row["collector", "agent"]))
        rows.setdefault(who, []).append(row)
    taken = dict.fromkeys(rows, 0)
    for number, game in enumerate(groups):
        shown, _ = game.reset(seed=number)
        open_rows = sum(len(own) for who, own in rows.items() if who[0] == number)
        fresh = set(game.agents)
        while open_rows:
            present = {name: rows.get((number, names.index(name)), []) for name in game.agents}
            now = {}
            for name, own in present.items():
                at = taken.get((number, names.index(name)), 0)
                if at < len(own):
                    now[name] = own[at]
            actions = {name: int(now[name]["action"]) if name in now else 0 for name in game.agents}
            state = game.state()
            after, rewards, terminated, truncated, _ = game.step(actions)
            for name, row in now.items():
                assert row["observation"].tolist() == shown[name].tolist()
                assert row["next", "observation"].tolist() == after[name].tolist()
                assert row["next", "reward"].item() == rewards[name]
                assert row["next", "terminated"].item() == terminated[name]
                assert row["next", "truncated"].item() == truncated[name]
                assert row["is_init"].item() == (name in fresh)
                if "state" in row:
                    assert row["state"].tolist() == state.tolist()
                taken[number, names.index(name)] += 1
                open_rows -= 1
            gone = {name for name in actions if terminated[name] or truncated[name]}
            fresh = set(game.agents) - (set(actions) - gone)
            shown = after
            if not game.agents and open_rows:
                shown, _ = game.reset()
                fresh = set(game.agents)


def test_agents(until) -> None:
    space = until(AGENTS, "team = (q[rows] * present).sum(-1)")
    batch = space["batch"]
    play_games(batch, [ScriptedGame(0), ScriptedGame(1)])

    sums: dict[int, float] = {}
    acting: dict[int, int] = {}
    for row in batch.unbind(0):
        step = int(row["collector", "game_step"])
        sums[step] = sums.get(step, 0.0) + row["next", "reward"].item()
        acting[step] = acting.get(step, 0) + 1
    complete = {}
    for row in batch.unbind(0):
        step, whole = int(row["collector", "game_step"]), int(row["collector", "num_agents"])
        if acting[step] == whole:
            complete[step] = sums[step]
    assert sorted(space["team"].tolist()) == sorted(complete.values())


def test_groups_of_agents(until) -> None:
    """The rear group's policy: the step of this life, modulo 5."""
    space = until(AGENTS, "groups = PettingZooSource.groups(")
    again = space["GroupCollector"](
        space["PettingZooSource"].groups(ScriptedGame(), {"front": ["a0"], "rear": ["a1", "a2"]}),
        {"rear": lambda seen: seen[:, 3].long() % 5},
        steps_per_batch=4,
        seed=0,
    )
    batches = again.rollout()
    rear = batches["rear"]
    assert torch.equal(rear["action"], rear["observation"][:, 3].long() % 5)
    for batch in batches.values():
        reward = batch["action"] + 10 * batch["observation"][:, 1]
        assert torch.equal(batch["next", "reward"].flatten(), reward.float())
    assert rear["observation"].tolist() == [
        [0, 1, 0, 0],
        [0, 1, 0, 1],
        [0, 1, 1, 0],
        [0, 2, 0, 0],
        [0, 2, 0, 1],
    ]


# cleanrl.md


def test_ppo_in_cleanrls_style(until) -> None:
    """flatroll's rows and advantages, from the bare env and the critic's float64 values."""
    space = until(CLEANRL, "gae(next(collector))  # once for each iteration")
    batch, critic = space["batch"], space["critic"]
    bare = gym.make_vec("CartPole-v1", 4, vectorization_mode="sync")
    assert_as_played(batch, bare, seed=0)
    critic = critic.double()
    with torch.no_grad():
        value = critic(batch["observation"].double()).flatten()
        following = critic(batch["next", "observation"].double()).flatten()
    plain = plain_gae(batch, value, following, 0.99, 0.95)
    np.testing.assert_allclose(space["advantage"].flatten(), plain, atol=1e-5)
    np.testing.assert_allclose(space["returns"].flatten(), plain + value, atol=1e-5)


def test_ppo_lstm_in_cleanrls_style(until) -> None:
    """Stepped by torch's LSTM, one row after the other: the logits in the update, and the log-probabilities."""
    space = until(CLEANRL, "memory = LSTMModule(4, 16")
    batch, memory = space["batch"], space["memory"].lstm
    state = (torch.zeros(1, 1, 16), torch.zeros(1, 1, 16))
    for i, row in enumerate(batch.unbind(0)):
        if row["is_init"]:
            state = (torch.zeros(1, 1, 16), torch.zeros(1, 1, 16))
        with torch.no_grad():
            out, state = memory(row["observation"][None, None], state)
            logits = space["head"].module(out.flatten()).log_softmax(-1)
        np.testing.assert_allclose(space["logits"][i].detach().log_softmax(-1), logits, atol=1e-5)
        np.testing.assert_allclose(row["action_log_prob"], logits[row["action"]], atol=1e-5)


def test_dqns_replay_buffer_in_cleanrls_style(until) -> None:
    space = until(CLEANRL, "# one update for every ten steps, as in dqn.py")
    rows = space["buffer"][:]
    assert_as_played(rows, gym.make_vec("CartPole-v1", 1, vectorization_mode="sync"), seed=0)
    sample = space["sample"]
    assert_equal_but(sample, rows[torch.tensor(position_of(rows, sample))], "is_init")


def test_the_plain_dqn_loop_stores_what_the_page_says(until) -> None:
    """Its rows are steps of the bare env; a row after an end is dead, as the page says of such loops."""
    stored = until(CLEANRL, "true_next[row] = infos")["stored"]
    env = gym.make_vec("CartPole-v1", 1, vectorization_mode="sync")
    obs, _ = env.reset(seed=0)
    for step in range(200):
        after, reward, terminated, *_ = env.step(stored["action"][step : step + 1].astype(int))
        assert stored["obs"][step].tolist() == obs[0].tolist()
        assert stored["next_obs"][step].tolist() == after[0].tolist()
        assert (stored["reward"][step], stored["terminated"][step]) == (reward[0], terminated[0])
        obs = after


# trees.md


def test_counts(until) -> None:
    space = until(TREES, "bonus = counter.add(batch[:1]) ** -0.5")
    # The state (0, 1) was seen three times: twice in the batch, once more now.
    np.testing.assert_allclose(space["bonus"], [3**-0.5], rtol=1e-6)


def test_rows_of_rare_states(until) -> None:
    buffer = until(TREES, 'sampler=CountSampler("cell")')["buffer"]
    drawn = torch.cat([buffer.sample(return_info=True)[1]["index"] for _ in range(100)])
    share = torch.bincount(drawn, minlength=100) / len(drawn)
    np.testing.assert_allclose(share[:90], 0.5 / 90, rtol=0.2)
    np.testing.assert_allclose(share[90:], 0.5 / 10, rtol=0.1)


def test_a_forest(until) -> None:
    """Transitions, counts and children by dictionaries over the rows of the bare lake."""
    space = until(TREES, "tree = forest.get_tree(batch[0])")
    batch, forest = space["batch"], space["forest"]
    bare = gym.make_vec("FrozenLake-v1", num_envs=8, is_slippery=False)
    assert_as_played(batch, bare, seed=0)
    counted: dict[tuple[int, int, int], int] = {}
    pairs = zip(
        batch["observation"].tolist(),
        batch["action"].tolist(),
        batch["next", "observation"].tolist(),
        strict=True,
    )
    for transition in pairs:
        counted[transition] = counted.get(transition, 0) + 1
    assert len(forest) == len(counted)
    assert forest.num_states == len({state for a, _, b in counted for state in (a, b)})
    assert sorted(forest.edges.count.tolist()) == sorted(counted.values())

    root = int(batch["observation"][0])
    actions = space["tree"].selected_actions.flatten().tolist()
    children = [child.count for child in space["tree"].subtree]
    expected = [
        sum(n for (a, action, _), n in counted.items() if (a, action) == (root, each)) for each in actions
    ]
    assert [int(count) for count in children] == expected
    assert sorted(actions) == sorted({action for a, action, _ in counted if a == root})


def test_a_search(until) -> None:
    """Values 1 and 3, halved at each step up; of equal counts the larger mean is best."""
    space = until(TREES, "backup(torch.tensor([0, 2]), value=1.0")
    assert space["count"].tolist() == [1, 1, 1]
    # The edge nearest to the simulation's end gets half of its value, the one before a quarter.
    assert space["total"].tolist() == [0.25, 1.5, 0.5]


# torchrl.md


def test_torchrls_buffer_holds_our_rows(until) -> None:
    space = until(TORCHRL, 'traj_key=("collector", "traj_ids"), strict_length=False)')
    rows = space["buffer"][:]
    bare = gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync")
    assert len(rows) == 256
    assert_as_played(rows, bare, seed=0)
    sample = space["sample"]
    at = position_of(rows, sample)
    ids = rows["collector", "traj_ids"][torch.tensor(at)]
    ended = sample["next", "done"].flatten()
    for i in range(len(at) - 1):
        assert ended[i] or (at[i + 1] == at[i] + 1 and ids[i + 1] == ids[i])


def test_torchrls_sac_gets_rows_whose_ends_are_marked(until) -> None:
    space = until(TORCHRL, "loss.make_value_estimator(gamma=0.99)")
    batch = space["batch"]
    ends = torch.tensor(ends_of(batch))
    assert torch.equal(batch["next", "done"].flatten(), ends)
    assert torch.equal(batch["next", "truncated"].flatten(), ends)
    cut = batch.clone()
    cut["next", "truncated"][:] = cut["next", "done"][:] = False  # 16 steps of Pendulum end nothing
    bare = gym.make_vec("Pendulum-v1", num_envs=4, vectorization_mode="sync")
    assert_as_played(cut, bare, seed=0)


def test_torchrls_dqn_loss_of_our_rows(until) -> None:
    """The mean squared error of the targets, from the network's layer in float64."""
    space = until(TORCHRL, "q_network = QValueActor(")
    batch, layer = space["batch"], space["q_network"].module[0].module
    with torch.no_grad():
        q, following = (
            batch[key].double() @ layer.weight.double().T + layer.bias.double()
            for key in ("observation", ("next", "observation"))
        )
    chosen = q.gather(1, batch["action"][:, None]).flatten()
    assert torch.equal(batch["action"], q.argmax(1))
    goes_on = 1 - batch["next", "terminated"].flatten().double()
    target = batch["next", "reward"].flatten().double() + 0.99 * goes_on * following.max(1).values
    plain = (chosen - target).square().mean()
    np.testing.assert_allclose(space["loss"](batch)["loss"].item(), plain.item(), rtol=1e-4)


def test_torchrls_sac_reads_our_rows(until) -> None:
    """The normalised sample, by the mean and deviation of the observations seen."""
    space = until(TORCHRL, "following.statistics = norm.statistics")
    bare = gym.make_vec("Pendulum-v1", num_envs=4, vectorization_mode="sync")
    rows = space["buffer"][:]
    assert_as_played(rows, bare, seed=0)
    # Each observation of the env once: the first of each episode, and the next of every row.
    firsts = rows["observation"][rows["is_init"].flatten()]
    seen = torch.cat([firsts, rows["next", "observation"]]).double()
    mean, deviation = seen.mean(0), seen.std(0, correction=0)
    sample = space["sample"]
    for before, after in (
        ("observation", "observation_norm"),
        (("next", "observation"), ("next", "observation_norm")),
    ):
        plain = ((sample[before].double() - mean) / deviation).clamp(-10, 10)
        np.testing.assert_allclose(sample[after], plain, atol=1e-3)


# specs.md, performance.md, jax.md, text.md


def test_the_batch_of_a_spec(until) -> None:
    batch = until("docs/specs.md", 'batch["action"][17] = 3.0')["batch"]
    env = gym.make_vec("Pendulum-v1", num_envs=2)
    rows = rollout(env, num_steps=50, seed=0)
    assert_as_played(rows, gym.make_vec("Pendulum-v1", num_envs=2), seed=0)
    assert batch["action"][17].item() == 3.0
    assert_equal_but(batch, rows, "action")


def test_the_timed_loop(until) -> None:
    space = until("docs/performance.md", "seconds = dict.fromkeys(")
    rows = space["buffer"][:]
    assert len(rows) == 4 * 2048
    again = Collector(gym.make_vec("CartPole-v1", num_envs=64), frames_per_batch=2048, seed=0)
    assert_equal_but(torch.cat([next(again) for _ in range(4)]), rows)
    assert_as_played(rows, gym.make_vec("CartPole-v1", num_envs=64), seed=0)


@pytest.mark.simulators
def test_functions_of_jax(until) -> None:
    """Each row from its own observation and action."""
    batch = until("docs/jax.md", "walk = FunctionalEnv(")["batch"]
    after = batch["observation"] + (2 * batch["action"][:, None].float() - 1) * 0.25
    torch.testing.assert_close(batch["next", "observation"], after)
    torch.testing.assert_close(batch["next", "reward"], -after.abs())
    assert torch.equal(batch["next", "terminated"], after.abs() > 1)
    starts = batch["observation"][batch["is_init"].flatten()]
    assert (starts.abs() <= 0.5).all()
    for stream in per_env(batch, 1024)[:50]:
        same = (stream["next", "observation"][:-1] == stream["observation"][1:]).flatten()
        assert torch.equal(same, ~stream["next", "done"][:-1].flatten())


def test_texts(until) -> None:
    """Log-probabilities and rewards of every token, from one pass of each model over each text."""
    space = until("docs/text.md", "rollout = RolloutFromModel(model, reference, reward_model")
    batch, sequences = space["batch"], space["rollout"].sequences
    model, reference = space["model"].eval(), space["reference"].eval()
    for text in range(2):
        own = batch[batch["observation"][:, 0] == text]
        tokens = sequences[text]
        first = int(own["observation"][0, 1])
        assert tokens[:first].tolist() == ([5, 6, 7], [8, 9])[text]
        assert tokens[first : first + len(own)].tolist() == own["action"].tolist()
        with torch.no_grad():
            at = slice(first - 1, first - 1 + len(own))
            score = model(tokens[None]).logits[0, at].log_softmax(-1)
            other = reference(tokens[None]).logits[0, at].log_softmax(-1)
        chosen = own["action"][:, None]
        log_prob, ref = score.gather(1, chosen).flatten(), other.gather(1, chosen).flatten()
        np.testing.assert_allclose(own["action_log_prob"].flatten(), log_prob, atol=1e-4)
        coefficient = space["rollout"].kl_coef
        np.testing.assert_allclose(
            own["next", "reward_kl"].flatten(), -coefficient * (log_prob - ref), atol=1e-4
        )
        done = own["next", "done"].flatten().tolist()
        assert done == [False] * (len(own) - 1) + [True]
        assert own["next", "terminated"][-1].item() == (int(tokens[-1]) in (0, 1))
        # The score: how often token 7 is in the text, less how often it is in the prompt's own text.
        score = float((tokens == 7).sum()) - (1.0, 0.0)[text]
        raw = own["next", "reward"] - own["next", "reward_kl"]
        np.testing.assert_allclose(raw.flatten(), [0.0] * (len(own) - 1) + [score], atol=1e-6)


def test_answers_in_groups_and_tools(until) -> None:
    """The texts of the last batch of the first script, and each column of the last one of the second."""
    pytest.importorskip("transformers")
    space = until("docs/text/turns.md", "def write(*tokens):")
    answered = space["rollout"].sequences
    assert len(answered) == 32 * 8
    for place, number in enumerate(answered.numbers):
        assert answered[number][:3].tolist() == space["ids"][place // 8, :3].tolist()

    batch, sequences = space["batch"], space["sequences"]
    slot, asked, told, answer = (space[name] for name in ("slot", "asked", "told", "answer"))
    texts = torch.stack([slot, asked, told, answer], 1)
    assert [sequences[number].tolist() for number in sequences.numbers] == texts.tolist()
    assert batch["action"].view(64, 2).tolist() == texts[:, [1, 3]].tolist()
    assert batch["observation"][:, 1].view(64, 2).tolist() == [[1, 3]] * 64
    assert batch["next", "observation"][:, 1].view(64, 2).tolist() == [[3, 4]] * 64
    right = torch.stack([told == space["held"], answer == space["held"]], 1)
    torch.testing.assert_close(batch["next", "reward"].view(64, 2), right * torch.tensor([0.2, 1.0]))
    assert batch["steps_to_next_obs"].flatten().tolist() == [1] * 128
    assert batch["next", "terminated"].flatten().tolist() == [False, True] * 64
    following = batch["next", "state_value"].view(64, 2)
    assert not following[:, 1].any()
    target = batch["next", "reward"] + 0.9 * batch["next", "state_value"] - batch["state_value"]
    first, last = target.view(64, 2).unbind(1)
    expected = torch.stack([first + 0.9 * 0.95 * last, last], 1)
    torch.testing.assert_close(batch["advantage"].view(64, 2), expected, atol=1e-5, rtol=1e-4)


def test_training_with_groups_or_tools_takes_30_lines() -> None:
    blocks = page_blocks.blocks_of((page_blocks.ROOT / "docs/text/turns.md").read_text())
    scripts = [block.text for block in blocks if "optimizer.step()" in block.text]
    assert len(scripts) == 2
    for script in scripts:
        lines = [
            line for line in script.splitlines() if line.strip() and not line.startswith(("from", "import"))
        ]
        assert len(lines) <= 30
