"""Benchmarks a collector with the policy that `actor` makes, against hand-written loops with the same network.

``python -m flatroll bench actor``; processor time of one thread.

The loops are those of a PPO program in one file: they call the network's layers without tensordicts and keep what PPO's
update reads (observation, action, log-probability, reward, and whether an episode has ended). One draws with torch's
distributions, as such programs do, the other with the fewest operations (log_softmax, multinomial, gather). The
collector also stores next observations, both kinds of ends, and the numbers of trajectories.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from torch import Tensor, nn
from torch.distributions import Categorical, Normal

from benchmarks.bench_collector import FreeEnv
from benchmarks.measure.timing import ratio, table, take_turns
from flatroll.modules import RunningNorm, actor
from flatroll.rollouts import Collector
from flatroll.wrappers import as_vector_env

#: Rows of one batch; at least 64 vector steps.
FRAMES, TURNS = 2048, 7
SIZES = (1, 16, 64, 1024)

#: Draws actions from what the head makes; returns them and their log-probabilities.
Draw = Callable[..., tuple[Tensor, Tensor]]


class TorchCartPole(gym.vector.VectorEnv[Any, Any, Any]):
    """CartPole's equations in torch; an env that ends begins anew in the same step."""

    def __init__(self, num_envs: int) -> None:
        single: Any = gym.make("CartPole-v1")
        self.num_envs = num_envs
        self.single_observation_space = single.observation_space
        self.single_action_space = single.action_space
        self.observation_space = gym.vector.utils.batch_space(single.observation_space, num_envs)
        self.action_space = gym.vector.utils.batch_space(single.action_space, num_envs)
        self.metadata = {"autoreset_mode": gym.vector.AutoresetMode.SAME_STEP}
        self.device = torch.device("cpu")
        self._never = torch.zeros(num_envs, dtype=torch.bool)
        self._one = torch.ones(num_envs)

    def reset(self, **kwargs: Any) -> tuple[Any, dict[str, Any]]:
        self._state = torch.rand(self.num_envs, 4).sub_(0.5).mul_(0.1)
        return self._state, {}

    def step(self, actions: Any) -> tuple[Any, Any, Any, Any, dict[str, Any]]:
        x, speed, angle, turn = self._state.unbind(1)
        force = actions * 20.0 - 10.0
        cosine = angle.cos()
        sine = angle.sin()
        pushed = (force + 0.05 * turn * turn * sine) / 1.1
        twist = (9.8 * sine - cosine * pushed) / (0.5 * (4.0 / 3.0 - 0.1 * cosine * cosine / 1.1))
        push = pushed - 0.05 * twist * cosine / 1.1
        final = torch.stack(
            [x + 0.02 * speed, speed + 0.02 * push, angle + 0.02 * turn, turn + 0.02 * twist], 1
        )

        over = (final[:, 0].abs() > 2.4) | (final[:, 2].abs() > 0.2095)
        fresh = torch.rand(self.num_envs, 4).sub_(0.5).mul_(0.1)
        self._state = torch.where(over.unsqueeze(1), fresh, final)
        return self._state, self._one, over, self._never, {"final_obs": final}


class Case(NamedTuple):
    """One kind of actor.

    Attributes:
        make_env: makes the env, from E.
        draw: what the loop with distributions does with what the head makes.
        bare: what the other loop does with it.
        options: of `actor`.
    """

    make_env: Callable[[int], Any]
    draw: Draw
    bare: Draw
    options: dict[str, Any]


def free(action: Any, *, masked: bool = False) -> Callable[[int], Any]:
    """Return a function that makes a `FreeEnv` with these actions."""
    return lambda num_envs: FreeEnv(num_envs, action, masked=masked)


def draw_choice(logits: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One choice, among the legal ones."""
    if mask is not None:
        logits = torch.where(mask.bool(), logits, -1e8)
    dist: Any = Categorical(logits=logits)
    action = dist.sample()
    return action, dist.log_prob(action)


def draw_choices(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Several choices, one distribution for each."""
    parts = torch.split(logits, [3, 4, 5], 1)
    dists: list[Any] = [Categorical(logits=part) for part in parts]
    actions = [dist.sample() for dist in dists]
    scores = [dist.log_prob(action) for dist, action in zip(dists, actions, strict=True)]
    return torch.stack(actions, 1), torch.stack(scores).sum(0)


def draw_numbers(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Normal numbers."""
    dist: Any = Normal(loc, scale)
    action = dist.sample()
    return action, dist.log_prob(action).sum(1)


def draw_squashed(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Normal numbers squashed by tanh, in the form of a SAC program in one file."""
    normal = Normal(loc, scale)
    base = normal.rsample()
    squashed = torch.tanh(base)
    score = normal.log_prob(base) - torch.log(1 - squashed.pow(2) + 1e-6)  # type: ignore[no-untyped-call]
    return squashed, score.sum(1)


def bare_choice(logits: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """One choice, among the legal ones."""
    if mask is not None:
        logits = torch.where(mask.bool(), logits, -1e8)
    scores = logits.log_softmax(1)
    choice = torch.multinomial(scores.exp(), 1)
    return choice.squeeze(1), scores.gather(1, choice).squeeze(1)


def bare_choices(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Several choices."""
    drawn = [bare_choice(part) for part in torch.split(logits, [3, 4, 5], 1)]
    return torch.stack([action for action, _ in drawn], 1), torch.stack([score for _, score in drawn]).sum(0)


def bare_numbers(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Normal numbers."""
    noise = torch.randn_like(loc)
    return loc + scale * noise, (-0.5 * noise * noise - scale.log() - 0.9189385).sum(1)


def bare_squashed(loc: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Normal numbers squashed by tanh."""
    noise = torch.randn_like(loc)
    squashed = torch.tanh(loc + scale * noise)
    score = -0.5 * noise * noise - scale.log() - 0.9189385 - torch.log(1 - squashed * squashed + 1e-6)
    return squashed, score.sum(1)


def cases() -> dict[str, Case]:
    """The kinds of actors by name."""
    unbounded = spaces.Box(-np.inf, np.inf, (3,), np.float32)
    bounded = spaces.Box(-1.0, 1.0, (3,), np.float32)
    choice = spaces.Discrete(6)
    choices = spaces.MultiDiscrete([3, 4, 5])
    cartpole = partial(gym.make_vec, "CartPole-v1", vectorization_mode="vector_entry_point")
    return {
        "categorical, CartPole": Case(lambda n: cartpole(num_envs=n), draw_choice, bare_choice, {}),
        "categorical": Case(free(choice), draw_choice, bare_choice, {}),
        "categorical, masked": Case(free(choice, masked=True), draw_choice, bare_choice, {}),
        "multi-discrete": Case(free(choices), draw_choices, bare_choices, {}),
        "Gaussian": Case(free(unbounded), draw_numbers, bare_numbers, {}),
        "Gaussian, squashed": Case(free(bounded), draw_squashed, bare_squashed, {}),
        "categorical, GRU": Case(free(choice), draw_choice, bare_choice, {"recurrent": "gru"}),
        "categorical, LSTM": Case(free(choice), draw_choice, bare_choice, {"recurrent": "lstm"}),
        "categorical, CartPole in torch": Case(TorchCartPole, draw_choice, bare_choice, {}),
    }


class Layers:
    """The layers of an actor, called one after the other as a program in one file does."""

    def __init__(self, policy: Any, num_envs: int) -> None:
        parts = list(policy.module)
        norm = next(part for part in parts if isinstance(part, RunningNorm))
        self.moments = norm.statistics
        written = {tuple(part.out_keys): part for part in parts if hasattr(part, "module")}
        self.body = (written.get(("_embedding",)) or written["_features",]).module
        self.head = (written.get(("logits",)) or written["loc", "scale"]).module
        memory: Any = next((part.net for part in parts if hasattr(part, "net")), None)
        self.cell: Any = None
        if memory is not None:
            kind = nn.GRUCell if isinstance(memory, nn.GRU) else nn.LSTMCell
            self.cell = kind(memory.input_size, memory.hidden_size)
            for mine, theirs in zip(self.cell.parameters(), memory.parameters(), strict=True):
                mine.data = theirs.data
            self.states = [
                torch.zeros(num_envs, memory.hidden_size) for _ in range(1 + (kind is nn.LSTMCell))
            ]

    def __call__(self, obs: Any, done: Tensor) -> tuple[Tensor, ...]:
        """Return what the draw takes."""
        mask: tuple[Tensor, ...] = ()
        if isinstance(obs, dict):
            mask = (obs["action_mask"],)
            obs = obs["observation"]
        features = self.body(self.moments.normalized(obs, 1e-8, 10.0))

        if self.cell is not None:
            states = [state * (1.0 - done).unsqueeze(1) for state in self.states]
            if len(states) == 1:
                self.states = [self.cell(features, states[0])]
            else:
                self.states = list(self.cell(features, tuple(states)))
            features = self.states[0]

        made = self.head(features)
        if isinstance(made, Tensor):
            made = (made,)
        return (*made, *mask)


def as_tensor(obs: Any) -> Any:
    """Arrays of an observation as tensors, without a copy."""
    if isinstance(obs, dict):
        return {key: as_tensor(value) for key, value in obs.items()}
    return torch.as_tensor(obs)


def by_hand(env: Any, policy: Any, draw: Draw) -> Callable[[], None]:
    """Return a function that fills arrays ``[T, E]`` with the next steps, as PPO programs in one file do."""
    num_envs = env.num_envs
    steps = max(64, FRAMES // num_envs)
    network = Layers(policy, num_envs)
    in_torch = isinstance(env, TorchCartPole)
    space = env.single_observation_space
    shapes: dict[str, Any] = {"observation": space}
    if isinstance(space, spaces.Dict):
        shapes = dict(space.spaces)

    seen = {name: torch.zeros(steps, num_envs, *part.shape) for name, part in shapes.items()}
    shape = env.single_action_space.shape
    kind = torch.float32 if isinstance(env.single_action_space, spaces.Box) else torch.int64
    actions = torch.zeros(steps, num_envs, *shape, dtype=kind)
    scores, rewards, dones = (torch.zeros(steps, num_envs) for _ in range(3))
    now: dict[str, Any] = {"obs": as_tensor(env.reset()[0]), "done": torch.zeros(num_envs)}

    def run() -> None:
        obs = now["obs"]
        done = now["done"]
        for t in range(steps):
            if isinstance(obs, dict):
                for name, column in seen.items():
                    column[t] = obs[name]
            else:
                seen["observation"][t] = obs
            dones[t] = done

            with torch.no_grad():
                action, score = draw(*network(obs, done))
            actions[t] = action
            scores[t] = score

            obs, reward, terminated, truncated, _ = env.step(action if in_torch else action.numpy())
            rewards[t] = torch.as_tensor(reward)
            obs = as_tensor(obs)
            done = torch.as_tensor(terminated | truncated).float()
        now.update(obs=obs, done=done)

    return run


def collected(env: Any, policy: Any) -> Callable[[], object]:
    """Return a function that collects the next batch."""
    frames = max(64, FRAMES // env.num_envs) * env.num_envs
    batches = iter(Collector(as_vector_env(env), policy, frames_per_batch=frames, total_frames=-1))
    return lambda: next(batches)


def measured(name: str, case: Case, num_envs: int) -> list[str]:
    """One row of the table."""
    policy = actor(case.make_env(num_envs), **case.options)
    space = case.make_env(num_envs).single_action_space
    fixed = torch.from_numpy(np.stack([space.sample()] * num_envs))
    runs = {
        "hand": by_hand(case.make_env(num_envs), policy, case.draw),
        "bare": by_hand(case.make_env(num_envs), policy, case.bare),
        "ours": collected(case.make_env(num_envs), policy),
        "function": collected(case.make_env(num_envs), lambda obs: fixed),
    }
    turns = take_turns(runs, TURNS, clock=time.thread_time)
    steps = max(64, FRAMES // num_envs)
    cells = [f"{turns[key].median / steps * 1e6:.0f}" for key in runs]
    ratios = [f"{ratio(turns['ours'], turns[key]):.2f}" for key in ("hand", "bare")]
    return [name, f"{num_envs:,}", *cells, *ratios]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    rows = [measured(name, case, num_envs) for name, case in cases().items() for num_envs in SIZES]
    header = [
        "actor",
        "envs",
        "loop, µs",
        "bare loop, µs",
        "collector, µs",
        "with a function",
        "of the loop",
        "of the bare loop",
    ]
    print(table(header, rows))


if __name__ == "__main__":
    main()
