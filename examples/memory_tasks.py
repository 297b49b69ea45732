"""Small vectorised tasks that need memory: three of POPGym's, with its easy sizes, and a recall over 100 steps.

The rules of ``RepeatPrevious``, ``Autoencode`` and ``CountRecall`` are those of POPGym's easy versions (Morad et al.,
POPGym: Benchmarking partially observable reinforcement learning, 2023, https://arxiv.org/abs/2303.01859). Perfect
memory returns 1 in all tasks.
"""

from functools import partial
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
from gymnasium.vector import AutoresetMode

SUITS = 4
#: Cards of a deck.
DECK = 52


class MemoryTask(gym.vector.VectorEnv[Any, Any, Any]):
    """Shows something at each step and asks, at some of them, for what only memory tells.

    A right answer gives 1 / (number of questions in an episode), and a wrong one takes as much, so that returns lie
    between -1 and 1. All envs end together, and are reset in the same step.

    A subclass passes the spaces of one env and the steps of an episode, and implements :meth:`deal`.
    """

    metadata = {"autoreset_mode": AutoresetMode.SAME_STEP}  # noqa: RUF012  # gymnasium's form

    def __init__(self, num_envs: int, observation: Any, answers: int, steps: int) -> None:
        self.num_envs, self.steps = num_envs, steps
        self.single_observation_space = observation
        self.observation_space = gym.vector.utils.batch_space(observation, num_envs)
        self.single_action_space = gym.spaces.Discrete(answers)
        self.action_space = gym.vector.utils.batch_space(self.single_action_space, num_envs)

    def deal(self) -> tuple[Any, Any]:
        """Draw an episode of each env from ``self.random``.

        Returns:
            What is shown at each step and after the last one, ``[steps + 1, E, ...]``, and the right answers,
            ``[steps, E]``, -1 where nothing is asked.
        """
        raise NotImplementedError

    def reset(self, *, seed: Any = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        if seed is not None or not hasattr(self, "random"):
            self.random = np.random.default_rng(seed)
        self.at = 0
        self.shown, self.right = self.deal()
        return self.shown[0].copy(), {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        right = self.right[self.at]
        sign = np.where(np.asarray(actions) == right, 1, -1) * (right >= 0)
        reward = (sign / (self.right[:, 0] >= 0).sum()).astype(np.float32)
        self.at += 1
        obs, info = self.shown[self.at].copy(), {}
        ended = np.full(self.num_envs, self.at == self.steps)
        if ended[0]:
            info = {"final_obs": obs, "_final_obs": ended}
            obs, _ = self.reset()
        return obs, reward, ended, np.zeros(self.num_envs, np.bool_), info

    def shuffled(self, kinds: int, cards: int) -> Any:
        """The kinds of the cards of a shuffled deck, which has equally many of each, int64 ``[cards, E]``."""
        deck = np.repeat(np.arange(cards)[:, None] % kinds, self.num_envs, 1)
        return self.random.permuted(deck, axis=0)


class RepeatPrevious(MemoryTask):
    """Shows the cards of a deck, suit by suit; from step ``k`` on the right answer is the suit shown ``k`` steps ago.

    An episode has 51 steps. POPGym counts the present card, too: its ``k=4`` is 3 here.
    """

    def __init__(self, num_envs: int, k: int = 3, cards: int = DECK) -> None:
        self.k, self.cards = k, cards
        super().__init__(num_envs, gym.spaces.Discrete(SUITS), SUITS, steps=cards - 1)

    def deal(self) -> tuple[Any, Any]:
        cards = self.shuffled(SUITS, self.cards)
        right = np.full((self.steps, self.num_envs), -1)
        right[self.k :] = cards[: self.steps - self.k]
        return cards, right


class Autoencode(MemoryTask):
    """Shows the cards of a deck, and then asks for their suits in reverse order, the last card first.

    The observation is (1, suit) until the last card, (0, suit) with it and (0, 0) after it. An episode has 103 steps,
    with an answer in each of the last 52.
    """

    def __init__(self, num_envs: int, cards: int = DECK) -> None:
        self.cards = cards
        super().__init__(num_envs, gym.spaces.MultiDiscrete([2, SUITS]), SUITS, steps=2 * cards - 1)

    def deal(self) -> tuple[Any, Any]:
        cards = self.shuffled(SUITS, self.cards)
        shown = np.zeros((self.steps + 1, self.num_envs, 2), np.int64)
        shown[: self.cards - 1, :, 0] = 1
        shown[: self.cards, :, 1] = cards
        right = np.full((self.steps, self.num_envs), -1)
        right[self.cards - 1 :] = cards[::-1]
        return shown, right


class CountRecall(MemoryTask):
    """Shows a card's colour and names a colour at each step; the right answer is how many of it were shown so far.

    Cards and questions are two decks. The present card counts. An episode has 51 steps and an answer in each, 0 to 26.
    """

    colours: ClassVar[int] = 2

    def __init__(self, num_envs: int, cards: int = DECK) -> None:
        self.cards = cards
        space = gym.spaces.MultiDiscrete([self.colours, self.colours])
        super().__init__(num_envs, space, cards // self.colours + 1, steps=cards - 1)

    def deal(self) -> tuple[Any, Any]:
        shown = np.stack([self.shuffled(self.colours, self.cards) for _ in range(2)], -1)
        cards, asked = shown[..., 0], shown[..., 1]
        counts = np.cumsum(cards[..., None] == np.arange(self.colours), 0)
        right = np.take_along_axis(counts, asked[..., None], -1)[..., 0]
        return shown, right[: self.steps]


class Recall(MemoryTask):
    """A corridor: shows a suit in the first step, then nothing new, and asks for the suit ``delay`` steps later.

    The observation is the suit, then 4, and 5 in the last of ``delay + 1`` steps, the only one with an answer.
    """

    def __init__(self, num_envs: int, delay: int = 100) -> None:
        super().__init__(num_envs, gym.spaces.Discrete(SUITS + 2), SUITS, steps=delay + 1)

    def deal(self) -> tuple[Any, Any]:
        shown = np.full((self.steps + 1, self.num_envs), SUITS)
        shown[0] = self.random.integers(0, SUITS, self.num_envs)
        shown[self.steps - 1 :] = SUITS + 1
        right = np.full((self.steps, self.num_envs), -1)
        right[-1] = shown[0]
        return shown, right


#: The tasks by name.
TASKS: dict[str, Any] = {
    "RepeatPrevious": RepeatPrevious,
    "Autoencode": Autoencode,
    "CountRecall": CountRecall,
    "Autoencode12": partial(Autoencode, cards=12),  # POPGym's has 52
    "Recall": Recall,
}
