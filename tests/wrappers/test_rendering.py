"""What belongs to the sub-envs goes through the stack: frames, calls, attributes; and RecordVideo around it."""

import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv

from flatroll.rollouts import Collector
from flatroll.wrappers import CompactObs, InitTracker, StepCounter, as_vector_env


class Screen(gym.Env[Any, Any]):
    """Ends after 4 steps; its frame is 2 x 3 pixels of (env, episode, step)."""

    metadata: dict[str, Any] = {"render_modes": ["rgb_array"], "render_fps": 5}  # noqa: RUF012
    observation_space = spaces.Box(-1, 100, (1,))
    action_space = spaces.Discrete(2)
    render_mode = "rgb_array"

    def __init__(self, number: int = 0) -> None:
        self.number, self.episode, self.at = number, -1, 0

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.episode, self.at = self.episode + 1, 0
        return np.zeros(1, np.float32), {}

    def step(self, action: Any) -> Any:
        self.at += 1
        return np.full(1, self.at, np.float32), 1.0, self.at == 4, False, {}

    def render(self) -> Any:
        return np.tile(np.array([self.number, self.episode, self.at], np.uint8), (2, 3, 1))

    def add(self, one: int, two: int = 0) -> int:
        return self.number + one + two


def screens(mode: AutoresetMode | str, kind: Any = SyncVectorEnv) -> VectorEnv[Any, Any, Any]:
    makes: list[Callable[[], Screen]] = [lambda number=n: Screen(number) for n in range(2)]  # type: ignore[misc]
    env: VectorEnv[Any, Any, Any] = kind(makes, autoreset_mode=mode)
    return env


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_the_stack_passes_on_what_its_sub_envs_have(mode: AutoresetMode) -> None:
    env = CompactObs(StepCounter(InitTracker(screens(mode))))
    env.reset(seed=0)
    env.step([0, 1])
    frames = env.render()
    assert isinstance(frames, tuple) and [frame[0, 0].tolist() for frame in frames] == [[0, 0, 1], [1, 0, 1]]
    for layer in (env, env.env, env.stream):
        assert layer.call("add", 5, two=10) == (15, 16)  # type: ignore[attr-defined]
        assert layer.get_attr("number") == (0, 1)  # type: ignore[attr-defined]
    env.set_attr("number", [7, 9])
    assert env.get_attr("number") == (7, 9) and env.call("number") == (7, 9)
    env.set_attr("number", 3)
    assert env.get_attr("number") == (3, 3)


def test_workers_and_envs_inside_wrappers_are_reached() -> None:
    env = InitTracker(screens(AutoresetMode.NEXT_STEP, AsyncVectorEnv))
    try:
        env.reset(seed=0)
        assert env.get_attr("at") == (0, 0)
    finally:
        env.close()
    wrapped = gym.wrappers.vector.RescaleObservation(screens("NextStep"), np.float32(0), np.float32(1))
    assert as_vector_env(wrapped).get_attr("number") == (0, 1)  # type: ignore[attr-defined]


def test_one_single_env_and_frames_that_are_tensors() -> None:
    one = InitTracker(Screen(4))
    one.reset(seed=0)
    assert one.get_attr("number") == (4,)
    assert [frame.shape for frame in one.render() or ()] == [(2, 3, 3)]

    class Device:
        """An env of tensors, as Isaac Lab's and ManiSkill's."""

        num_envs, device, render_mode = 2, torch.device("cpu"), "rgb_array"
        single_observation_space, single_action_space = spaces.Box(-1, 1, (1,)), spaces.Discrete(2)
        metadata: dict[str, Any] = {"autoreset_mode": AutoresetMode.DISABLED}  # noqa: RUF012

        def reset(self, seed: Any = None, options: Any = None, env_ids: Any = None) -> Any:
            return torch.zeros(2, 1), {}

        def step(self, actions: Any) -> Any:
            never = torch.zeros(2, dtype=torch.bool)
            return torch.zeros(2, 1), torch.zeros(2), never, never, {}

        def render(self) -> Any:
            return torch.full((2, 4, 5, 3), 9, dtype=torch.uint8)

    stream: Any = as_vector_env(Device())
    frames = stream.render()
    assert [type(frame) for frame in frames] == [np.ndarray] * 2 and frames[0].shape == (4, 5, 3)
    assert stream.get_attr("render_mode") == ("rgb_array", "rgb_array")  # asked once, for all rows
    stream.set_attr("colour", "red")
    assert stream.call("colour") == ("red", "red")
    with pytest.raises(AttributeError, match="number"):
        stream.get_attr("number")


@pytest.fixture
def videos(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[Any]]]:
    """RecordVideo's clips as lists of frames by name; moviepy need not be there."""
    clips: dict[str, list[Any]] = {}

    class Clip:
        def __init__(self, frames: list[Any], fps: int) -> None:
            self.frames = frames

        def write_videofile(self, path: str, **options: Any) -> None:
            clips[Path(path).stem] = self.frames

    package, clip = types.ModuleType("moviepy"), types.ModuleType("moviepy.video.io.ImageSequenceClip")
    clip.ImageSequenceClip = Clip  # type: ignore[attr-defined]
    modules = {"moviepy": package, "moviepy.video.io.ImageSequenceClip": clip}
    for name in ("moviepy.video", "moviepy.video.io"):
        modules[name] = types.ModuleType(name)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    yield clips


def film(env: Any, folder: Path, **options: Any) -> Any:
    wrappers: Any = gym.wrappers.vector
    if not hasattr(wrappers, "RecordVideo"):
        pytest.skip("Gymnasium films vector envs from 1.1.1 on")
    return wrappers.RecordVideo(
        env, str(folder), episode_trigger=lambda episode: True, disable_logger=True, **options
    )


def test_episodes_are_filmed_while_a_collector_collects(videos: dict[str, list[Any]], tmp_path: Path) -> None:
    env = film(StepCounter(screens(AutoresetMode.NEXT_STEP)), tmp_path / "videos")
    collector = Collector(env, frames_per_batch=24, seed=0)
    plain = next(Collector(StepCounter(screens(AutoresetMode.NEXT_STEP)), frames_per_batch=24, seed=0))
    batch = next(collector)
    assert (batch["next", "observation"] == plain["next", "observation"]).all()  # filming changes no row
    collector.shutdown()
    # pixels: (env, episode, step) of env 0 at the left, env 1 at the right; the last frame is the terminal one
    first = [frame[0, ::3].tolist() for frame in videos["rl-video-episode-0"]]
    assert first == [[[0, 0, step], [1, 0, step]] for step in range(5)]
    assert "rl-video-episode-1" in videos


@pytest.mark.filterwarnings("ignore:.*same-step:UserWarning")
def test_same_step_reset_films_without_the_last_frame(videos: dict[str, list[Any]], tmp_path: Path) -> None:
    env = film(InitTracker(screens(AutoresetMode.SAME_STEP)), tmp_path / "videos", record_first_only=True)
    env.reset(seed=0)
    for _ in range(9):
        env.step(np.zeros(2, int))
    env.close()
    assert [frame[0, 0].tolist() for frame in videos["rl-video-episode-0"]] == [
        [0, 0, step] for step in range(4)
    ]
