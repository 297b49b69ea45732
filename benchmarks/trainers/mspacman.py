"""Ms. Pacman, played well: the frames of many games, far from their beginnings.

The player looks ahead. Every fourth step it tries each direction on a second emulator for 60 frames, and takes the one
that scores most without losing a life; one decision in ten is random. Games of ALE/MsPacman-v5 (sticky actions) are
preprocessed as usual: a frame of 84 x 84 gray bytes every four frames of the emulator, up to 30 no-ops at first, stacks
of four.
"""

import importlib
import multiprocessing
import random
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

GAME, ROM = "ALE/MsPacman-v5", "ms_pacman"
DIRECTIONS = {1: 4, 2: 3, 3: 2, 4: 1}  # up, right, left, down, and the opposite of each
HOLD, LOOK_AHEAD, RANDOM = 4, 60, 0.1
STACK, SIZE = 4, 84


class Stream(NamedTuple):
    """What one env played, T steps.

    Attributes:
        frames: uint8 ``[F, 84, 84]``, each once.
        now: int64 ``[T]``, the newest frame of each step's observation; that of its next observation comes after it.
        first: int64 ``[T]``, the first frame of each step's game, which fills the stacks at its beginning.
        action: int64 ``[T]``.
        done: bool ``[T]``.
        scores: of the games that ended.
    """

    frames: NDArray[np.uint8]
    now: NDArray[np.int64]
    first: NDArray[np.int64]
    action: NDArray[np.int64]
    done: NDArray[np.bool_]
    scores: NDArray[np.float64]

    def stacks(self, steps: slice, later: int = 0) -> NDArray[np.uint8]:
        """Return the observations ``[n, 4, 84, 84]`` of steps, or with ``later=1`` their next observations."""
        newest = self.now[steps] + later
        ages = np.arange(STACK - 1, -1, -1)
        stacks: NDArray[np.uint8] = self.frames[np.maximum(newest[:, None] - ages, self.first[steps, None])]
        return stacks


class Planner:
    """Chooses directions by trying them on an emulator of its own."""

    def __init__(self, seed: int) -> None:
        ale_py: Any = importlib.import_module("ale_py")
        roms: Any = importlib.import_module("ale_py.roms")

        self.random = random.Random(seed)
        self.emulator: Any = ale_py.ALEInterface()
        self.emulator.setFloat("repeat_action_probability", 0.0)
        self.emulator.loadROM(roms.get_rom_path(ROM))
        self.actions = list(self.emulator.getMinimalActionSet())

    def choose(self, emulator: Any, last: int) -> int:
        """Return the direction that scores most from where the game stands; turning back only if it scores more."""
        if self.random.random() < RANDOM:
            return self.random.choice(list(DIRECTIONS))

        state = emulator.cloneState()
        worths = {}
        for direction in DIRECTIONS:
            turns_back = DIRECTIONS.get(last) == direction
            worths[direction] = (self.worth(state, direction), not turns_back, self.random.random())
        return max(worths, key=worths.__getitem__)

    def worth(self, state: Any, direction: int) -> float:
        """Return the score of 60 frames in this direction, the early ones worth up to twice as much."""
        self.emulator.restoreState(state)
        lives = self.emulator.lives()
        worth = 0.0
        for frame in range(LOOK_AHEAD):
            share = 1.0 - frame / (2 * LOOK_AHEAD)
            worth += float(self.emulator.act(self.actions[direction])) * share
            if self.emulator.lives() < lives or self.emulator.game_over():
                return worth - 1000.0 * share
        return worth


def play(seed: int, steps: int, plans: bool = True) -> Stream:
    """Play games one after another; without ``plans`` at random."""
    import gymnasium as gym
    from gymnasium.wrappers import AtariPreprocessing

    gym.register_envs(importlib.import_module("ale_py"))
    env = AtariPreprocessing(gym.make(GAME, frameskip=1))
    planner = Planner(seed)
    frame, _ = env.reset(seed=seed)
    frames = [frame]
    first = 0
    score = 0.0
    action = 1

    rows: list[tuple[int, int, int, bool]] = []
    scores: list[float] = []
    for step in range(steps):
        if not plans:
            action = planner.random.randrange(len(planner.actions))
        elif step % HOLD == 0:
            action = planner.choose(env.unwrapped.ale, action)  # type: ignore[attr-defined]

        frame, reward, terminated, truncated, _ = env.step(action)
        rows.append((len(frames) - 1, first, action, terminated or truncated))
        frames.append(frame)
        score += float(reward)

        if terminated or truncated:
            scores.append(score)
            score = 0.0
            first = len(frames)
            frames.append(env.reset()[0])

    env.close()
    now, begun, actions, done = (np.array(column) for column in zip(*rows, strict=True))
    return Stream(np.stack(frames), now, begun, actions, done, np.array(scores))


def play_all(folder: Path, envs: int, steps: int) -> list[float]:
    """Play in two processes, and save each env's stream to a file of the folder; return the scores."""
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        return [
            score for scores in pool.map(partial(save, folder, steps), range(envs), 1) for score in scores
        ]


def save(folder: Path, steps: int, seed: int) -> list[float]:
    """Play, and save the stream; return the scores."""
    stream = play(seed, steps)
    np.savez(folder / f"{seed}.npz", **stream._asdict())
    return [float(score) for score in stream.scores]


def load_all(folder: Path) -> list[Stream]:
    """Load the streams of a folder, env after env."""
    streams = []
    for seed in range(len(list(folder.glob("*.npz")))):
        with np.load(folder / f"{seed}.npz") as file:
            streams.append(Stream(**{name: file[name] for name in Stream._fields}))
    return streams
