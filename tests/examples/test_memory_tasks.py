"""The memory tasks: their rules by hand, and that PPO learns them; the benchmark of the memories prints its table."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import memory_tasks as bench
from flatroll.examples import memory_ppo
from flatroll.examples.common import parse
from flatroll.examples.memory_tasks import TASKS, Autoencode, CountRecall, MemoryTask, Recall, RepeatPrevious
from flatroll.wrappers.testing import vector_env_problems


def play(env: MemoryTask, answers: Any) -> tuple[Any, list[list[float]]]:
    """What an episode shows, ``[steps + 1, E, ...]``, and its rewards under answers ``[steps, E]``."""
    obs, _ = env.reset(seed=0)
    shown, rewards = [obs], []
    for step, answer in enumerate(answers, 1):
        obs, reward, terminated, truncated, info = env.step(answer)
        assert reward.dtype == np.float32
        assert terminated.tolist() == [step == env.steps] * env.num_envs and not truncated.any()
        shown.append(info["final_obs"] if terminated[0] else obs)
        rewards.append(reward.tolist())
    assert len(rewards) == env.steps
    return np.stack(shown), rewards


def with_cards(env: MemoryTask, *decks: list[list[int]]) -> Any:
    """The env, with these cards ``[cards, E]`` in place of shuffled ones."""
    dealt = iter([*decks, *decks])  # and again after the end of the episode
    env.shuffled = lambda kinds, cards: np.array(next(dealt))  # type: ignore[method-assign]
    return env


def test_repeat_previous_by_hand() -> None:
    """Two envs: the first one is right where the second one is wrong."""
    env = with_cards(RepeatPrevious(2, k=2, cards=6), [[0, 0], [1, 3], [2, 2], [3, 1], [0, 0], [1, 2]])
    shown, rewards = play(env, np.array([[3, 3], [2, 2], [0, 1], [1, 0], [0, 2]]))
    assert shown.tolist() == [[0, 0], [1, 3], [2, 2], [3, 1], [0, 0], [1, 2]]
    assert np.array(rewards) == pytest.approx(np.array([[0, 0], [0, 0], [1, -1], [1, -1], [-1, 1]]) / 3)


def test_autoencode_by_hand() -> None:
    """The last card is asked for while it is shown, then the ones before it, to the first."""
    env = with_cards(Autoencode(1, cards=4), [[2], [0], [3], [1]])
    shown, rewards = play(env, np.array([[0], [0], [0], [1], [3], [0], [0]]))
    assert shown[:, 0].tolist() == [[1, 2], [1, 0], [1, 3], [0, 1], [0, 0], [0, 0], [0, 0], [0, 0]]
    assert rewards == [[0], [0], [0], [0.25], [0.25], [0.25], [-0.25]]


def test_count_recall_by_hand() -> None:
    """The present card counts; cards of the other colour do not."""
    env = with_cards(CountRecall(1, cards=4), [[0], [1], [1], [0]], [[0], [0], [1], [1]])
    shown, rewards = play(env, np.array([[1], [1], [1]]))
    assert shown[:, 0].tolist() == [[0, 0], [1, 0], [1, 1], [0, 1]]
    assert rewards == [pytest.approx([1 / 3]), pytest.approx([1 / 3]), pytest.approx([-1 / 3])]  # it was 2


def test_recall_by_hand() -> None:
    env = Recall(3, delay=4)
    first, _ = env.reset(seed=0)
    answers = np.array([first, first, first, first, [first[0], *(first[1:] + 1) % 4]])
    shown, rewards = play(env, answers)
    assert shown[:, 0].tolist() == [first[0], 4, 4, 4, 5, 5]
    assert rewards == [[0, 0, 0]] * 4 + [[1, -1, -1]]


@pytest.mark.parametrize("name", TASKS)
def test_perfect_memory_returns_one(name: str) -> None:
    env = TASKS[name](5)
    env.reset(seed=0)  # as `play` does
    _, rewards = play(env, env.right)
    assert np.sum(rewards, 0) == pytest.approx(np.ones(5), abs=1e-5)


def test_a_deck_has_equally_many_cards_of_each_kind() -> None:
    env = RepeatPrevious(7)
    env.reset(seed=1)
    cards = env.shuffled(4, 52)
    assert cards.shape == (52, 7)
    assert [np.bincount(column).tolist() for column in cards.T] == [[13] * 4] * 7
    assert not (cards[:, :1] == cards[:, 1:]).all(0).any()  # each env has a deck of its own


def test_sizes_are_those_of_popgyms_easy_tasks() -> None:
    found = {
        name: (env.steps, int(env.single_action_space.n))
        for name, env in ((name, make(1)) for name, make in TASKS.items())
    }
    assert found["RepeatPrevious"] == (51, 4)
    assert found["Autoencode"] == (103, 4)
    assert found["CountRecall"] == (51, 27)
    assert found["Recall"] == (101, 4)


@pytest.mark.parametrize("name", TASKS)
def test_they_keep_the_contract_of_vector_envs(name: str) -> None:
    found = vector_env_problems(TASKS[name](3), steps=250)
    # Such as: all episodes end at the same length, as they should, and what is shown first is shown again.
    assert all(text.startswith("suspicion: ") for text in found)


def train(folder: Path, options: str) -> dict[str, Any]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return memory_ppo.train(parse("memory_ppo", [*options.split(), "--folder", str(folder)]))
    finally:
        torch.set_num_threads(threads)


def test_a_memory_learns_to_repeat(tmp_path: Path) -> None:
    """The fastest of the table."""
    result = train(tmp_path, "--memory lru --layers 1 --frames 20000 --minibatches 4")
    assert result["evaluation"] > 0.5  # guesses return -0.5


@pytest.mark.long
def test_a_transformer_learns_to_repeat(tmp_path: Path) -> None:
    assert train(tmp_path, "--memory transformer")["evaluation"] >= 0.99


@pytest.mark.parametrize("name", ["env", "memory"])
def test_an_unknown_name_is_an_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="got 'chess'"):
        train(tmp_path, f"--{name} chess")


def test_the_benchmark_writes_its_table_and_its_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "TASKS", [task._replace(num_envs=2) for task in bench.TASKS])
    monkeypatch.setattr(torch, "set_num_threads", lambda threads: None)
    page = tmp_path / "memory.md"
    page.write_text(f"above\n{bench.MARK}old\n{bench.MARK}below\n")
    (tmp_path / "img").mkdir()
    words = [str(tmp_path / "runs"), "--memories", "gru", "lru", "--seeds", "1", "--frames", "100"]
    for _ in range(2):  # the second time nothing is trained
        assert bench.main([*words, "--page", str(page)]) == 0
        above, found, below = page.read_text().split(bench.MARK)
        assert (above, below) == ("above\n", "below\n")
        header, _, *rows = found.strip().splitlines()[:4]
        assert "RepeatPrevious, 102 frames" in header
        assert [row.split(" | ")[0] for row in rows] == ["| GRU", "| LRU"]
    printed = capsys.readouterr().out
    assert printed.count('"program"') == 2 * (1 + 3)  # a warm-up of each memory, and its tasks
    assert printed.count(rows[0]) == 2
    assert (tmp_path / "img" / "memory_tasks.png").stat().st_size > 5_000
