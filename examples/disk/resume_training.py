"""Trains DQN on CartPole, is killed with kill -9 at random, resumes, and ends with exactly the same weights.

``python -m flatroll.examples.disk.resume_training FOLDER`` trains, or resumes from the newest version in the folder.
``--demo-kill`` kills the training a few times, and compares the result with an uninterrupted run.

A resumed run equals an uninterrupted one if everything that it depends on is saved or known. The checkpoint contains
rows, weights, the optimizer's state and the random generators, and the env of each episode is seeded with the episode's
number. The state of an env that continues from episode to episode is not saved, so its episodes would differ after a
restart.
"""

import argparse
import multiprocessing
import random
import tempfile
import time
import zlib
from pathlib import Path

import gymnasium as gym
import torch
from tensordict import TensorDict
from torch import Tensor, nn

from flatroll.buffers import LazyTensorStorage, ReplayBuffer
from flatroll.disk import Checkpoint

UPDATES, BATCH, GAMMA = 20, 64, 0.99  # gradient steps per episode, rows per step, discount
KILLS, LONGEST = 3, 1.5  # number of kills, and maximum seconds before each


def train(folder: Path, episodes: int, seed: int = 0) -> int:
    """Train up to this total number of episodes, including earlier runs; return a checksum of the weights."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    q_net, target = (nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 2)) for _ in range(2))
    target.load_state_dict(q_net.state_dict())
    optimizer = torch.optim.Adam(q_net.parameters(), lr=1e-3)
    buffer = ReplayBuffer(storage=LazyTensorStorage(10_000), batch_size=BATCH)
    checkpoint = Checkpoint(folder, buffer=buffer, policy=q_net, target=target, optimizer=optimizer)
    first = checkpoint.load()["episode"] if checkpoint.versions() else 0
    env = gym.make("CartPole-v1")
    for episode in range(first, episodes):
        buffer.extend(play(env, q_net, episode))
        for _ in range(UPDATES):
            batch = buffer.sample()
            with torch.no_grad():
                following = target(batch["next", "observation"]).max(1).values
                wanted = batch["next", "reward"] + GAMMA * ~batch["next", "terminated"] * following
            value = q_net(batch["observation"]).gather(1, batch["action"][:, None])[:, 0]
            optimizer.zero_grad()
            nn.functional.smooth_l1_loss(value, wanted).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        if episode % 5 == 4:
            target.load_state_dict(q_net.state_dict())
        checkpoint.save(episode=episode + 1)
    return zlib.crc32(nn.utils.parameters_to_vector(q_net.parameters()).detach().numpy().tobytes())


def play(env: "gym.Env[object, object]", q_net: nn.Module, episode: int) -> TensorDict:
    """Play one episode with some random actions; return its rows."""
    observations, actions, rewards = [as_tensor(env.reset(seed=episode)[0])], [], []
    terminated = truncated = False
    while not (terminated or truncated):
        action = int(torch.randint(2, ()))
        if float(torch.rand(())) > 1 / (1 + episode):
            action = int(q_net(observations[-1]).argmax())
        observation, reward, terminated, truncated, _ = env.step(action)
        observations.append(as_tensor(observation))
        actions.append(action)
        rewards.append(float(reward))
    seen, ends = torch.stack(observations), torch.zeros(len(actions), dtype=torch.bool)
    ends[-1] = terminated
    following = {"observation": seen[1:], "reward": torch.tensor(rewards), "terminated": ends}
    rows = {"observation": seen[:-1], "action": torch.tensor(actions), "next": following}
    return TensorDict(rows, [len(actions)])


def as_tensor(observation: object) -> Tensor:
    """An observation, float32 ``[4]``."""
    return torch.as_tensor(observation, dtype=torch.float32)


def demo_kill(folder: Path, episodes: int) -> None:
    """Train in a process that is killed a few times; compare its weights with an uninterrupted run."""
    processes = multiprocessing.get_context("fork")
    kills = 0
    while True:
        process = processes.Process(target=train, args=(folder, episodes))
        process.start()
        process.join(random.uniform(0.1, LONGEST) if kills < KILLS else None)
        if process.exitcode is not None:
            break
        process.kill()  # kill -9: no exception, no clean-up
        process.join()
        kills += 1
        time.sleep(0.01)
        print(f"killed; versions in the folder: {Checkpoint(folder).versions()}")
    if process.exitcode:
        raise SystemExit(f"the run failed with {process.exitcode}")
    resumed = train(folder, episodes)  # nothing is left to do
    with tempfile.TemporaryDirectory() as other:
        straight = train(Path(other), episodes)
    print(f"killed {kills} times: weights {resumed:08x}; never stopped: {straight:08x}")
    if resumed != straight:
        raise SystemExit("the weights differ")


def main() -> None:
    """Train, or show that killing does no harm."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--demo-kill", action="store_true")
    options = parser.parse_args()
    if options.demo_kill:
        demo_kill(options.folder, options.episodes)
    else:
        print(f"weights {train(options.folder, options.episodes):08x}")


if __name__ == "__main__":
    main()
