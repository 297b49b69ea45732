"""One game of ale-py, preprocessed as its vector env does, frame by frame in NumPy."""

import importlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

SCREEN = (210, 160)  # of Breakout; a vector env with this size does not scale


class SingleAtari:
    """Steps ale-py's emulator: 4 frames per step, the maximum of the last two, stacks of 4.

    Args:
        game: name of the ROM.
        sticky: probability that a frame repeats the action of the frame before.
        most_frames: an episode is truncated after these frames, without those of the reset.
        lives_end: whether a lost life is reported as an end; the game goes on.
    """

    def __init__(
        self, game: str, *, sticky: float = 0.0, most_frames: int = 108_000, lives_end: bool = False
    ) -> None:
        ale_py: Any = importlib.import_module("ale_py")
        self._rom = importlib.import_module("ale_py.roms").get_rom_path(game)
        self._fire = ale_py.Action.FIRE
        self.ale: Any = ale_py.ALEInterface()
        self.ale.setLoggerMode(ale_py.LoggerMode.Error)
        self.ale.setFloat("repeat_action_probability", sticky)
        self._most = most_frames
        self._lives_end = lives_end

    def reset(self, seed: int | None = None) -> NDArray[np.uint8]:
        if seed is not None:
            self.ale.setInt("random_seed", seed)
            self.ale.loadROM(self._rom)
        self.ale.reset_game()
        self._actions = self.ale.getMinimalActionSet()
        self.ale.act(self._fire)

        shown = self.ale.getScreenGrayscale()
        self._frames = [np.zeros(SCREEN, np.uint8)] * 3 + [shown]
        self._last = [shown, np.zeros(SCREEN, np.uint8)]
        self.lives = self.ale.lives()
        self._begun = self.ale.getEpisodeFrameNumber()
        return np.stack(self._frames)

    def step(self, action: int) -> tuple[NDArray[np.uint8], float, bool, bool, bool]:
        """Return the stack, the reward, terminated, truncated, and whether the game is over."""
        reward = 0.0
        for frame in range(4):
            reward += self.ale.act(self._actions[action])
            if self._is_over():
                break
            if frame >= 2:
                self._last[3 - frame] = self.ale.getScreenGrayscale()

        self._last[0] = np.maximum(*self._last)
        self._frames = [*self._frames[1:], self._last[0]]
        terminated = self.ale.game_over() or (self._lives_end and self.ale.lives() < self.lives)
        self.lives = self.ale.lives()
        return np.stack(self._frames), reward, terminated, self._is_long(), self._is_over()

    def _is_over(self) -> bool:
        return bool(self.ale.game_over()) or self._is_long()

    def _is_long(self) -> bool:
        return int(self.ale.getEpisodeFrameNumber()) - self._begun >= self._most


def play_singles(
    games: list[SingleAtari], seed: int, actions: NDArray[np.int64]
) -> list[list[tuple[Any, Any, float, bool, bool]]]:
    """Play games with actions ``[E, T]``; return the rows of each: observation, next one, reward and flags."""
    played = []
    for number, game in enumerate(games):
        rows = []
        obs = game.reset(seed + number)
        for action in actions[number]:
            after, reward, terminated, truncated, over = game.step(int(action))
            rows.append((obs, after, reward, terminated, truncated))
            obs = after
            if over:
                obs = game.reset()
        played.append(rows)
    return played
