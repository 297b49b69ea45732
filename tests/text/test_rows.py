"""Flat rows of texts: several turns, tools, groups, discounts over turns, and texts that begin alike."""

import warnings
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from tensordict import TensorDict
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from tiny_text import make_critic, make_model
from torch import Tensor
from torch.distributions import Categorical

from flatroll.estimators import GAE, ClipPPOLoss, GroupAdvantage, TDLambdaEstimator
from flatroll.layout import audit, run_ends
from flatroll.text import PromptData, RolloutFromModel, Sequences, TextModule, merge_prefixes, rows_of_texts
from flatroll.trees import MCTSForest

Make = Callable[..., RolloutFromModel]

#: Text, and which of its tokens the policy wrote: two turns with a tool's answer, one turn, a template behind the end.
TOKENS = [[1, 2, 20, 21, 5, 6, 22], [1, 3, 23], [1, 4, 24, 25, 9]]
OWN = [[0, 0, 1, 1, 0, 0, 1], [0, 0, 1], [0, 0, 1, 1, 0]]
LOG_PROBS = [[float("nan"), 0.0, -0.1, -0.2, 0.0, 0.0, -0.3], [0.0, 0.0, -0.4], [0.0, 0.0, -0.5, -0.6, 0.0]]


class Texts(NamedTuple):
    """Random texts of several turns."""

    tokens: list[Tensor]
    own: list[Tensor]
    log_probs: list[Tensor]
    rewards: list[Tensor]
    truncated: Tensor


def random_texts(seed: int, count: int = 6, vocabulary: int = 24) -> Texts:
    """Texts of 1 to 4 turns of 1 to 3 tokens, between prompts and answers of tools of 1 to 4 tokens."""
    generator = torch.Generator().manual_seed(seed)

    def number(least: int, most: int) -> int:
        return int(torch.randint(least, most + 1, (), generator=generator))

    own = []
    for _ in range(count):
        parts = []
        for _ in range(number(1, 4)):
            parts += [torch.zeros(number(1, 4)), torch.ones(number(1, 3))]
        if number(0, 1):
            parts.append(torch.zeros(number(1, 2)))  # behind the last turn
        own.append(torch.cat(parts).bool())
    tokens = [torch.randint(2, vocabulary, flags.shape, generator=generator) for flags in own]
    rewards = [torch.randn(flags.shape, generator=generator, dtype=torch.float64) for flags in own]
    rewards = [reward * (flags.cumsum(0) > 0) for reward, flags in zip(rewards, own, strict=True)]
    log_probs = [-torch.rand(flags.shape, generator=generator) for flags in own]
    truncated = torch.rand(count, generator=generator) < 0.5
    return Texts(tokens, own, log_probs, rewards, truncated)


def padded(texts: list[Tensor], fill: float) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(texts, batch_first=True, padding_value=fill)


def value(column: Tensor) -> list[Any]:
    return column.squeeze(-1).tolist()


def paths_of(tree: Any) -> list[TensorDict]:
    """All rows from the root to each leaf."""
    return [tree.rollout_from_path(path) for path in tree.valid_paths()]


# Rows


def test_rows_are_the_tokens_of_the_policy() -> None:
    table = Sequences(first=7)
    batch = rows_of_texts(table, TOKENS, OWN, LOG_PROBS, [1.0, 2.0, 3.0], groups=torch.tensor([4, 4, 5]))
    assert audit(batch) == []
    assert batch["action"].tolist() == [20, 21, 22, 23, 24, 25]
    assert batch["observation"].tolist() == [[7, 2], [7, 3], [7, 6], [8, 2], [9, 2], [9, 3]]
    assert batch["next", "observation"].tolist() == [[7, 3], [7, 6], [7, 7], [8, 3], [9, 3], [9, 5]]
    torch.testing.assert_close(batch["action_log_prob"], torch.tensor([-0.1, -0.2, -0.3, -0.4, -0.5, -0.6]))
    assert batch["collector", "traj_ids"].tolist() == [7, 7, 7, 8, 9, 9]
    assert batch["group"].tolist() == [4, 4, 4, 4, 5, 5]
    assert value(batch["step_count"]) == [0, 1, 2, 0, 0, 1]
    assert value(batch["is_init"]) == [True, False, False, True, True, False]
    ends = [False, False, True, True, False, True]
    assert run_ends(batch).tolist() == value(batch["next", "done"]) == ends
    assert value(batch["next", "terminated"]) == ends and not batch["next", "truncated"].any()
    assert value(batch["next", "reward"]) == [0.0, 0.0, 1.0, 2.0, 0.0, 3.0]
    assert "steps_to_next_obs" not in batch
    assert [table[number].tolist() for number in table.numbers] == TOKENS


def test_a_truncated_text_is_bootstrapped_from_all_that_was_read() -> None:
    batch = rows_of_texts(Sequences(), TOKENS, OWN, None, [0.0] * 3, truncated=[True, False, True])
    assert value(batch["next", "truncated"]) == [False, False, True, False, False, True]
    assert value(batch["next", "terminated"]) == [False, False, False, True, False, False]
    assert batch["next", "observation"][-1].tolist() == [2, 5]  # behind the tool's answer
    assert "action_log_prob" not in batch and "group" not in batch


def test_what_a_tool_earns_is_of_the_row_before() -> None:
    rewards = [[0.0, 0.0, 1.0, 2.0, 4.0, 8.0, 16.0], [0.0, 0.0, 32.0], [0.0, 0.0, 64.0, 128.0, 256.0]]
    batch = rows_of_texts(Sequences(), TOKENS, OWN, None, rewards)
    assert value(batch["next", "reward"]) == [1.0, 14.0, 16.0, 32.0, 64.0, 384.0]


def test_a_step_may_be_a_turn() -> None:
    batch = rows_of_texts(Sequences(), TOKENS, OWN, None, [0.0] * 3, step="turn")
    assert value(batch["steps_to_next_obs"]) == [0, 1, 1, 1, 0, 1]
    assert audit(batch) == []


@pytest.mark.parametrize("seed", range(4))
def test_padded_texts_are_the_same_rows(seed: int) -> None:
    texts = random_texts(seed)
    groups = torch.arange(6) // 3
    options: dict[str, Any] = {"truncated": texts.truncated, "groups": groups, "step": "turn"}
    expected = rows_of_texts(Sequences(), *texts[:4], **options)
    lengths = torch.tensor([len(text) for text in texts.tokens])
    fills = (1, 1, float("nan"), float("nan"))
    columns = [padded(column, fill) for column, fill in zip(texts[:4], fills, strict=True)]
    table = Sequences()
    batch = rows_of_texts(table, *columns, lengths=lengths, **options)
    assert audit(batch) == [] and (batch == expected).all()
    assert all(
        torch.equal(table[number], text) for number, text in zip(table.numbers, texts.tokens, strict=True)
    )


def test_models_read_what_the_policy_read() -> None:
    """Log-probabilities of the rows are those of a pass over each text, whatever stands between the turns."""
    model = make_model(0)
    texts = random_texts(0)
    expected = []
    for tokens, own in zip(texts.tokens, texts.own, strict=True):
        with torch.no_grad():
            log_probs = model(input_ids=tokens.unsqueeze(0)).logits[0, :-1].log_softmax(-1)
        expected.append(log_probs.gather(1, tokens[1:, None]).squeeze(1)[own[1:]])
    table = Sequences()
    batch = rows_of_texts(table, *texts[:4])
    sampler = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    parts: list[Any] = [TextModule(model, table), sampler]
    actor = ProbabilisticTensorDictSequential(*parts)
    found = actor.get_dist(batch).log_prob(batch["action"])
    torch.testing.assert_close(found, torch.cat(expected), atol=1e-5, rtol=1e-5)


# Errors


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"tokens": []}, "at least one text, got none"),
        ({"tokens": [[], [], []]}, "at least two tokens"),
        ({"tokens": [[1.5, 2.0], *TOKENS[1:]]}, "tokens must be integers, got torch.float32"),
        ({"tokens": torch.tensor([1, 2])}, r"a list of texts \[L\], or a padded tensor \[K, L\]"),
        ({"tokens": 3}, "tokens must be a list of texts"),
        ({"tokens": [1, 2, 3]}, r"tokens\[0\] must be one-dimensional, got shape \(\)"),
        ({"own": OWN[:2]}, "own must have one entry for each of the 3 texts, got 2"),
        ({"own": [OWN[0], OWN[1], [0, 1]]}, r"text 2 has 5 tokens, own\[2\] has 2"),
        ({"own": [OWN[0], [0, 0, 0], OWN[2]]}, "own is False for all tokens of text 1: .*leave it out"),
        (
            {"own": [OWN[0], [1, 0, 1], OWN[2]]},
            "first token of text 1, whose prompt has no tokens.*bos_token_id",
        ),
        ({"own": [OWN[0], [0, 0, 2], OWN[2]]}, "own must be bool, or integers 0 and 1"),
        ({"log_probs": [[0.0]] * 3}, r"text 0 has 7 tokens, log_probs\[0\] has 1"),
        ({"log_probs": OWN[:0]}, "log_probs must have one entry for each of the 3 texts, got 0"),
        (
            {"rewards": [1.0, 2.0]},
            r"one number for each of the 3 texts, or one for each token, got shape \(2,\)",
        ),
        ({"rewards": [[0.0], *OWN[1:]]}, r"text 0 has 7 tokens, rewards\[0\] has 1"),
        ({"rewards": [1.0, float("nan"), 0.0]}, "rewards must be finite, got nan"),
        (
            {"rewards": [OWN[0], [0.0, 1.0, 1.0], OWN[2]]},
            "0 before the policy's first token, .*: those of text 1",
        ),
        ({"lengths": torch.tensor([7, 3, 5])}, "lengths is only for a padded tensor"),
        ({"truncated": [True]}, "truncated must have one value for each of the 3 texts, got 1"),
        ({"truncated": [0.0, 0.5, 1.0]}, "truncated must be bool"),
        ({"groups": [0, 1]}, "groups must have one value for each of the 3 texts, got 2"),
        ({"groups": [0.0, 1.0, 1.0]}, "groups must be integers"),
        ({"step": "word"}, "step must be 'token' or 'turn', got 'word'"),
        ({"sequences": {}}, "sequences must be a table of sequences"),
    ],
)
def test_wrong_texts_are_refused_and_nothing_is_kept(changes: dict[str, Any], text: str) -> None:
    table = Sequences()
    arguments: dict[str, Any] = {"sequences": table, "tokens": TOKENS, "own": OWN, "log_probs": LOG_PROBS}
    arguments |= {"rewards": [0.0, 0.0, 0.0]} | changes
    with pytest.raises((TypeError, ValueError), match=text):
        rows_of_texts(**arguments)
    assert len(table) == 0


def test_padded_columns_have_the_shape_of_the_tokens() -> None:
    tokens, own = torch.full((2, 3), 5), torch.tensor([[0, 1, 1], [0, 0, 1]])
    batch = rows_of_texts(Sequences(), tokens, own, None, torch.tensor([1, 0]))
    assert value(batch["next", "reward"]) == [0.0, 1.0, 0.0]
    with pytest.raises(ValueError, match=r"own must be a tensor of the shape of tokens \(2, 3\)"):
        rows_of_texts(Sequences(), tokens, own[:, :2], None, torch.zeros(2))
    for lengths in ([3], [3, 4], [-1, 3]):
        with pytest.raises(
            ValueError, match="lengths must be one number from 0 to 3 for each of the 2 texts"
        ):
            rows_of_texts(Sequences(), tokens, own, None, torch.zeros(2), lengths=torch.tensor(lengths))


# Discounts over turns


def advantages_of_loop(
    texts: Texts, values: list[Tensor], gamma: float, lmbda: float, step: str, lmbda_per: str
) -> Tensor:
    """GAE in float64, text by text, written without rows: from the last token of the policy back to the first."""
    found = []
    for number, own in enumerate(texts.own):
        places = own.nonzero().flatten().tolist()
        gains: list[float] = []
        trace = 0.0
        for place, following in reversed(list(pairwise([*places, len(own)]))):
            last = following == len(own)
            # The turn ends where a token of somebody else, or nothing, follows.
            ends_turn = last or following != place + 1
            passes = step == "token" or ends_turn
            discount = gamma if passes else 1.0
            decay = lmbda if passes or lmbda_per == "row" else 1.0
            # The policy reads a text up to a token, and so the value of n tokens is at place n - 1.
            ahead = float(values[number][following - 1])
            if last and not texts.truncated[number]:
                ahead = 0.0
            reward = float(texts.rewards[number][place:following].sum())
            delta = reward + discount * ahead - float(values[number][place - 1])
            trace = delta + discount * decay * trace * (not last)
            gains.append(trace)
        found += gains[::-1]
    return torch.tensor(found, dtype=torch.float64)


@pytest.mark.parametrize("shifted", [False, True])
@pytest.mark.parametrize(
    ("step", "lmbda_per"), [("token", "row"), ("token", "step"), ("turn", "row"), ("turn", "step")]
)
def test_gae_jumps_over_tools_as_a_loop_does(step: Any, lmbda_per: Any, shifted: bool) -> None:
    critic = make_critic().double()
    for seed in range(3):
        texts = random_texts(seed)
        with torch.no_grad():
            values = [critic(input_ids=tokens.unsqueeze(0)).logits.flatten() for tokens in texts.tokens]
        table = Sequences()
        batch = rows_of_texts(table, *texts[:4], truncated=texts.truncated, step=step)
        network = TextModule(critic, table, "state_value")
        factors: dict[str, Any] = {"gamma": 0.9, "lmbda": 0.8, "lmbda_per": lmbda_per}
        options: dict[str, Any] = {"value_network": network, "shifted": shifted}
        expected = advantages_of_loop(texts, values, 0.9, 0.8, step, lmbda_per)
        found = GAE(**factors, **options)(batch.clone())["advantage"].squeeze(-1)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)
        # The same from lambda-returns.
        found = TDLambdaEstimator(**factors, **options)(batch.clone())["advantage"].squeeze(-1)
        torch.testing.assert_close(found, expected, atol=1e-10, rtol=1e-10)


def test_without_a_critic_a_turn_is_one_step() -> None:
    """Returns per turn, by hand: rewards of a turn count whole, those of the next one times gamma."""
    rewards = [[0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 10.0]]
    batch = rows_of_texts(Sequences(), TOKENS[:1], OWN[:1], None, rewards, step="turn")
    zero = torch.zeros(3, 1)
    batch["state_value"], batch["next", "state_value"] = zero, zero.clone()
    options: dict[str, Any] = {"value_network": None, "gamma": 0.5}
    returns = GAE(lmbda=1.0, **options)(batch.clone())["advantage"]
    assert value(returns) == [7.0, 6.0, 10.0]
    per_turn = GAE(lmbda=0.5, lmbda_per="step", **options)(batch.clone())["advantage"]
    assert value(per_turn) == [4.5, 3.5, 10.0]
    per_token = GAE(lmbda=0.5, **options)(batch.clone())["advantage"]
    assert value(per_token) == [2.75, 3.5, 10.0]


def test_lmbda_per_is_row_or_step() -> None:
    with pytest.raises(ValueError, match="lmbda_per must be 'row' or 'step', got 'turn'"):
        GAE(gamma=1.0, lmbda=1.0, value_network=None, lmbda_per="turn")  # type: ignore[arg-type]


# Groups


def test_each_prompt_has_its_answers_one_after_another(make_rollout: Make, prompts: PromptData) -> None:
    rollout = make_rollout(flat=True, num_answers=3)
    batch = rollout.rollout_from_data(prompts)
    assert audit(batch) == []
    ids, group = batch["collector", "traj_ids"], batch["group"]
    assert torch.equal(group, ids - ids % 3) and len(group.unique()) == 8 and len(ids.unique()) == 24
    for number in rollout.sequences.numbers:
        length = int(prompts.prompt_rindex[number // 3]) + 1
        assert torch.equal(rollout.sequences[number][:length], prompts.input_ids[number // 3, :length])
    again = rollout.rollout_from_data(prompts)
    assert not torch.isin(again["group"], group).any()


def test_groups_are_compared_and_trained_without_a_critic(
    make_rollout: Make, prompts: PromptData, model: Any
) -> None:
    rollout = make_rollout(flat=True, num_answers=4, kl_coef=0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        batch = GroupAdvantage()(rollout.rollout_from_data(prompts))
    ends = run_ends(batch)
    scores = batch["next", "reward_raw"][ends].view(8, 4)
    deviation = scores.std(1, keepdim=True) + 1e-4
    expected = ((scores - scores.mean(1, keepdim=True)) / deviation).flatten()
    torch.testing.assert_close(batch["advantage"][ends].flatten(), expected, atol=1e-5, rtol=1e-5)

    sampler = ProbabilisticTensorDictModule(
        ["logits"], ["action"], distribution_class=Categorical, return_log_prob=True
    )
    parts: list[Any] = [TextModule(make_model(0), rollout.sequences), sampler]
    loss = ClipPPOLoss(ProbabilisticTensorDictSequential(*parts), critic_coeff=None)
    losses = loss(batch)
    assert abs(float(losses["kl_approx"])) < 1e-5
    losses["loss_objective"].backward()
    assert parts[0].model.transformer.wte.weight.grad.abs().sum() > 0


def test_groups_of_one_are_0_and_said_once(make_rollout: Make, prompts: PromptData) -> None:
    rollout = make_rollout(flat=True)
    compare = GroupAdvantage()
    with pytest.warns(UserWarning, match="8 of 8 groups have one run, whose advantage is 0"):
        assert not compare(rollout.rollout_from_data(prompts))["advantage"].any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        compare(rollout.rollout_from_data(prompts))


def test_padded_answers_have_groups(make_rollout: Make, prompts: PromptData) -> None:
    batch = make_rollout(num_answers=2, kl_coef=0.0).rollout_from_data(prompts)
    assert batch.batch_size == (16, 10) and batch["group"][:, 0].tolist() == [i - i % 2 for i in range(16)]
    flat = GroupAdvantage()(make_rollout(num_answers=2, kl_coef=0.0, flat=True).rollout_from_data(prompts))
    padded_rows = GroupAdvantage()(batch)
    mask = padded_rows["collector", "mask"]
    torch.testing.assert_close(padded_rows["advantage"][mask], flat["advantage"])


def test_a_reward_model_gets_what_its_signature_names(make_rollout: Make, prompts: PromptData) -> None:
    labels = torch.arange(8) * 10
    asked = prompts.clone()
    asked.labels = labels.unsqueeze(1)
    calls = []

    def count(
        input_ids: Tensor,
        attention_mask: Tensor,
        prompt_numbers: Tensor,
        prompt_lengths: Tensor,
        prompt_labels: Tensor,
    ) -> tuple[None, Tensor]:
        calls.append((prompt_numbers, prompt_lengths, prompt_labels))
        return None, (attention_mask.sum(1) - prompt_lengths).float()

    batch = make_rollout(reward_model=count, num_answers=2, flat=True, score_clip=100).rollout_from_data(
        asked
    )
    answers, own = calls
    assert answers[0].tolist() == [i // 2 for i in range(16)] and own[0].tolist() == list(range(8))
    assert torch.equal(answers[1], asked.prompt_rindex[answers[0]] + 1)
    assert torch.equal(answers[2], asked.labels[answers[0]]) and torch.equal(own[2], asked.labels)
    ends = run_ends(batch)
    generated = batch["step_count"][ends].flatten() + 1
    assert torch.equal(batch["next", "reward_raw"][ends].flatten(), generated - 4.0)  # labels have 4 tokens

    with pytest.raises(
        ValueError, match=r"reward_model asks for prompt_labels, but .* pass labels= to PromptData"
    ):
        make_rollout(reward_model=count).rollout_from_data(prompts)


class Named(torch.nn.Module):
    """A reward model that takes any keyword, and names one."""

    def forward(self, input_ids: Tensor, prompt_numbers: Tensor, **others: Any) -> tuple[None, Tensor]:
        assert set(others) == {"attention_mask"}
        return None, prompt_numbers.float()


def test_modules_are_asked_by_their_forward(make_rollout: Make, prompts: PromptData) -> None:
    batch = make_rollout(reward_model=Named(), num_answers=2, flat=True).rollout_from_data(prompts)
    assert not batch["next", "reward_raw"].any()  # the data's own texts have the same score


def test_answers_must_be_of_the_prompts(make_rollout: Make, prompts: PromptData) -> None:
    generated = make_rollout(num_answers=2).generate(prompts)
    with pytest.raises(
        ValueError, match=r"generated must have 3 texts \(num_answers\) for each of the 8 prompts"
    ):
        make_rollout(num_answers=3).create_rollout_td(prompts, *generated)
    with pytest.raises(ValueError, match="num_answers must be an integer of at least 1"):
        make_rollout(num_answers=0)


# Trees of branches

BRANCHES = [[1, 2, 30, 31, 32], [1, 2, 30, 31, 33, 34], [1, 2, 30, 40], [1, 3, 50]]
OF_BRANCHES = [[0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1], [0, 0, 1, 1], [0, 0, 1]]


def test_branches_go_into_a_forest_and_come_out_as_rows() -> None:
    table = Sequences()
    batch = rows_of_texts(table, BRANCHES, OF_BRANCHES, None, [1.0, 2.0, 3.0, 4.0])
    merged = merge_prefixes(batch, table)
    assert audit(merged) == [] and batch["observation"][3].tolist() == [1, 2]  # the batch is not changed

    forest = MCTSForest()
    forest.extend(merged)
    # Of ten rows, three are shared: the first two of two texts, the first of a third one.
    assert len(batch) == 10 and len(forest) == 7
    assert forest.edges.count.tolist() == [3, 2, 1, 1, 1, 1, 1]

    paths = paths_of(forest.get_tree(merged[0]))
    read = []
    for path in paths:
        assert audit(path) == []
        number, length = path["next", "observation"][-1].tolist()
        read.append(table[number][:length].tolist())
        assert path["action"].tolist() == read[-1][2:]
    assert sorted(read) == sorted(BRANCHES[:3])  # the fourth has another root
    assert sorted(float(path["next", "reward"].sum()) for path in paths) == [1.0, 2.0, 3.0]


def test_a_tree_is_trained_on_each_shared_token_once() -> None:
    """The distinct rows of a forest have the log-probabilities that the rows of all texts have."""
    model, table = make_model(0), Sequences()
    texts = [[token % 24 for token in text] for text in BRANCHES]
    batch = rows_of_texts(table, texts, OF_BRANCHES, None, [0.0] * 4)
    forest = MCTSForest()
    forest.extend(merge_prefixes(batch, table))
    rows = forest.rows(torch.arange(len(forest)))
    module = TextModule(model, table)
    with torch.no_grad():
        of_rows = module(rows)["logits"]
        of_batch = module(batch)["logits"]
    expected = of_batch[[0, 1, 2, 5, 6, 8, 9]]
    torch.testing.assert_close(of_rows, expected, atol=1e-5, rtol=1e-5)


def test_later_branches_find_the_earlier_ones() -> None:
    table, forest = Sequences(first=5), MCTSForest()
    for text, own in zip(BRANCHES, OF_BRANCHES, strict=True):
        forest.extend(merge_prefixes(rows_of_texts(table, [text], [own], None, [0.0]), table))
    assert len(forest) == 7 and forest.num_states == 9


@pytest.mark.parametrize("seed", range(3))
def test_merged_rows_mean_what_they_meant(seed: int) -> None:
    """Compared with a search for the first text that begins so."""
    texts = random_texts(seed, count=30, vocabulary=4)
    ends = ([torch.tensor([end])] * 30 for end in (9, True, 0.0, 0.0))  # a token of its own ends each
    columns = [
        [torch.cat(both) for both in zip(column, end, strict=True)]
        for column, end in zip(texts[:4], ends, strict=True)
    ]
    texts = Texts(*columns, texts.truncated)  # type: ignore[arg-type]
    table = Sequences()
    batch = rows_of_texts(table, *columns)  # type: ignore[arg-type]
    merged = merge_prefixes(batch, table)
    for key in ("observation", ("next", "observation")):
        for (number, length), (first, same) in zip(batch[key].tolist(), merged[key].tolist(), strict=True):
            begin = texts.tokens[number][:length].tolist()
            expected = next(i for i, text in enumerate(texts.tokens) if text[:length].tolist() == begin)
            assert (first, same) == (expected, length)
    assert (merged["observation"][:, 0] != batch["observation"][:, 0]).any()


def test_merged_rows_must_be_of_the_table() -> None:
    table = Sequences()
    batch = rows_of_texts(table, BRANCHES, OF_BRANCHES, None, [0.0] * 4)
    wrong = batch.clone()
    wrong["observation"][0, 1] = 6
    with pytest.raises(ValueError, match=r"'observation'.* has a length beyond the end of its text"):
        merge_prefixes(wrong, table)
    with pytest.raises(ValueError, match=r"batch\['step_count'\] must be int64 \[\.\.\., 2\]"):
        merge_prefixes(batch, table, observation_key="step_count")
    with pytest.raises(KeyError, match="none"):
        merge_prefixes(batch, table, observation_key="none")
    table.forget(before=1)
    with pytest.raises(KeyError, match="sequence 0 is not in the table"):
        merge_prefixes(batch, table)
    assert (merge_prefixes(batch[-1:], table) == batch[-1:]).all()


def test_a_text_that_ends_where_another_goes_on_is_refused() -> None:
    """Their common row would be the end of one and the middle of the other, with one reward."""
    table = Sequences()
    own = [[False, True, True], [False, True, True, True]]
    batch = rows_of_texts(table, [[1, 5, 6], [1, 5, 6, 7]], own, None, [1.0, 0.0])
    with pytest.raises(ValueError, match="text 0 ends where another one goes on"):
        merge_prefixes(batch, table)
    assert len(merge_prefixes(batch[2:], table)) == 3  # the longer one alone


def test_only_the_last_row_of_a_path_is_done() -> None:
    """The first text of a row decides its flags, but a path goes on behind it."""
    table = Sequences()
    forest = MCTSForest()
    first = None
    for text, score in (([1, 5, 6], 1.0), ([1, 5, 6, 7], 0.0)):
        rows = rows_of_texts(table, [text], [[False] + [True] * (len(text) - 1)], None, [score])
        rows["observation"][:, 0] = rows["next", "observation"][:, 0] = 0  # as if merged one by one
        first = rows[0] if first is None else first
        forest.extend(rows)
    assert first is not None
    [path] = [path for path in paths_of(forest.get_tree(first)) if len(path) == 3]
    assert path["next", "done"].flatten().tolist() == [False, False, True]
    assert audit(path) == []


def test_rewards_are_summed_in_float32_at_least_and_may_be_a_column() -> None:
    own = [[False, True, *[False] * 300]]
    rewards = [torch.cat([torch.zeros(1), torch.full((301,), 0.01)]).bfloat16()]
    batch = rows_of_texts(Sequences(), [[1] * 302], own, None, rewards)
    assert batch["next", "reward"].dtype is torch.float32
    assert float(batch["next", "reward"]) == pytest.approx(301 * float(rewards[0][1]), rel=1e-5)
    scores = torch.tensor([[2.0]])  # as reward models return them
    assert float(rows_of_texts(Sequences(), [[1, 2]], [[False, True]], None, scores)["next", "reward"]) == 2.0
    with pytest.raises(ValueError, match="log_probs of the policy's tokens must be finite, got nan"):
        rows_of_texts(Sequences(), [[1, 2]], [[False, True]], [[0.0, float("nan")]], scores)


def test_prompts_of_another_class_are_repeated(make_rollout: Make, prompts: PromptData) -> None:
    """Whatever has the attributes of `PromptData`."""
    other: Any = SimpleNamespace(
        input_ids=prompts.input_ids,
        attention_mask=prompts.attention_mask,
        prompt_rindex=prompts.prompt_rindex,
    )
    rollout = make_rollout(num_answers=2)
    texts, _, _ = rollout.generate(other)
    assert len(texts) == 2 * len(prompts.input_ids)
    lengths = prompts.prompt_rindex + 1
    for k in range(2):
        for text, prompt, length in zip(texts[k::2], prompts.input_ids, lengths.tolist(), strict=True):
            assert torch.equal(text[:length], prompt[:length])


@pytest.mark.parametrize("flat", [True, False])
def test_groups_of_several_rollouts_differ(make_rollout: Make, prompts: PromptData, flat: bool) -> None:
    rollout = make_rollout(num_answers=2, flat=flat)
    first, second = (rollout.rollout_from_data(prompts)["group"].flatten() for _ in range(2))
    assert not set(first.tolist()) & set(second.tolist())


def test_labels_are_passed_where_there_are_some(make_rollout: Make, prompts: PromptData) -> None:
    seen: list[Any] = []

    def reward(input_ids: Tensor, attention_mask: Tensor, prompt_labels: Any = None) -> Any:
        seen.append(prompt_labels)
        return None, torch.zeros(len(input_ids))

    without = PromptData(
        prompts.input_ids,
        prompts.attention_mask,
        prompts.prompt_rindex,
        batch_size=[len(prompts.input_ids)],
    )
    make_rollout(reward_model=reward).rollout_from_data(without)
    make_rollout(reward_model=partial(reward, prompt_labels="mine")).rollout_from_data(prompts)
    assert seen == [None, None, "mine", "mine"]


def test_prompts_of_bytes_are_told_apart_and_negative_tokens_refused() -> None:
    table = Sequences()
    tokens = torch.tensor([5, 1, 5, 255, 2], dtype=torch.uint8)
    table.add(tokens, torch.tensor([2, 3], dtype=torch.int32), torch.tensor([1, 2], dtype=torch.int32))
    assert table[0].tolist() == [5, 1] and table[1].tolist() == [5, 255, 2]
    assert table[1].dtype is torch.int64
    with pytest.raises(ValueError, match="tokens must not be negative, got -100: leave padding out"):
        table.add(torch.tensor([5, -100]), torch.tensor([2]))
