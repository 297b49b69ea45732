"""unpadded: sb3-contrib's RecurrentPPO gets the gradients of its padded minibatches from flat rows."""

import io
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch

pytest.importorskip("sb3_contrib")

from sb3_contrib import RecurrentPPO
from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
from stable_baselines3 import PPO
from stable_baselines3.common.callbacks import BaseCallback

from flatroll.trainers.sb3 import FlatVecEnv
from flatroll.trainers.sb3_recurrent import FlatRolloutBuffer, RowStates, process_sequence, unpadded
from flatroll.wrappers.testing import Script, make_scripted

OBSERVATIONS = {"float32": "MlpLstmPolicy", "dict": "MultiInputLstmPolicy"}
POLICIES: dict[str, dict[str, Any]] = {
    "actor and critic": {},
    "shared": {"shared_lstm": True, "enable_critic_lstm": False},
    "actor alone": {"enable_critic_lstm": False},
    "two layers": {"n_lstm_layers": 2},
}


def model_of(lengths: Any, policy: dict[str, Any], obs: Any = "float32", epochs: int = 1) -> Any:
    env: Any = make_scripted(Script(4, lengths=lengths, ends="truncated", obs="float32"))
    if obs == "dict":
        env = gym.wrappers.vector.VectorizeTransformObservation(
            env,
            wrapper=gym.wrappers.TransformObservation,
            func=lambda one: {"one": one / 9, "other": -one[:2] / 9},
            observation_space=gym.spaces.Dict(
                one=gym.spaces.Box(-9, 9, (3,)), other=gym.spaces.Box(-9, 9, (2,))
            ),
        )
    return RecurrentPPO(
        OBSERVATIONS[obs],
        FlatVecEnv(env),
        n_steps=24,
        batch_size=40,
        n_epochs=epochs,
        policy_kwargs={"lstm_hidden_size": 8, "net_arch": [8], **policy},
        seed=1,
        device="cpu",
    )


class Collected(BaseCallback):
    """Ends `learn` when the first rollout is collected."""

    def _on_step(self) -> bool:
        return self.num_timesteps < 24 * 4


def gradients(model: Any, samples: Any) -> Any:
    actions = samples.actions.long().flatten()
    values, log_prob, entropy = model.policy.evaluate_actions(
        samples.observations, actions, samples.lstm_states, samples.episode_starts
    )
    rows = samples.mask > 0
    ratio = torch.exp(log_prob - samples.old_log_prob)
    loss = (samples.advantages * ratio)[rows].mean() + (samples.returns - values.flatten())[
        rows
    ].square().mean()
    loss = loss - 0.01 * entropy[rows].mean()
    model.policy.zero_grad()
    loss.backward()
    return torch.cat([p.grad.flatten() for p in model.policy.parameters() if p.grad is not None])


@pytest.mark.parametrize("obs", OBSERVATIONS)
@pytest.mark.parametrize("lengths", [[5, 3, 40], [1], [1000]], ids=["mixed", "one step", "endless"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_gradients_of_every_minibatch_are_the_same(policy: str, lengths: Any, obs: str) -> None:
    model = model_of(lengths, POLICIES[policy], obs)
    model.learn(24 * 4)
    buffer = model.rollout_buffer
    np.random.seed(0)
    padded = [gradients(model, samples) for samples in buffer.get(40)]
    unpadded(model)
    np.random.seed(0)
    batches = list(buffer.get(40))
    assert [len(samples.actions) for samples in batches] == [40, 40, 16]
    for samples, old in zip(batches, padded, strict=True):
        new = gradients(model, samples)
        assert old.norm() > 0
        assert (new - old).norm() <= 1e-6 * old.norm()


def test_training_goes_the_same_way() -> None:
    """With SGD: Adam makes much of rounding errors."""

    def weights(change: Any) -> Any:
        model = change(model_of([5, 3, 40], {"optimizer_class": torch.optim.SGD}, epochs=3))
        model.learn(24 * 4 * 3)
        return torch.nn.utils.parameters_to_vector(model.policy.parameters())

    torch.testing.assert_close(weights(unpadded), weights(lambda model: model), rtol=1e-4, atol=1e-6)


def test_it_is_used_in_training_and_left_alone_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    model = unpadded(model_of([5, 3, 40], {}, epochs=2))
    assert unpadded(model) is model
    assert type(model.rollout_buffer) is FlatRolloutBuffer
    model.learn(200)
    monkeypatch.setattr(
        RecurrentActorCriticPolicy, "_process_sequence", staticmethod(lambda *a: pytest.fail("padded"))
    )
    model.train()
    monkeypatch.undo()
    state: Any = None
    obs = model.env.reset()
    for _ in range(3):
        action, state = model.predict(obs, state, episode_start=np.ones(4, bool))
    assert action.shape == (4,)
    assert state[0].shape == (1, 4, 8)
    assert process_sequence.__module__ == "flatroll.trainers.sb3_recurrent"


def test_saving_and_loading() -> None:
    model = unpadded(model_of([5], {}))
    model.learn(100)
    file = io.BytesIO()
    model.save(file)
    file.seek(0)
    loaded = RecurrentPPO.load(file, env=model.env, device="cpu")
    assert type(loaded.rollout_buffer) is not FlatRolloutBuffer
    unpadded(loaded).learn(100)


def test_what_it_cannot_change_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"model must be a sb3_contrib\.RecurrentPPO with its policy, got PPO"
    ):
        unpadded(PPO("MlpPolicy", "CartPole-v1", device="cpu"))
    model = model_of([5], {})
    kind = type("Own", (type(model.policy),), {"_process_sequence": staticmethod(lambda *a: None)})
    model.policy.__class__ = kind
    with pytest.raises(TypeError, match="Own has a _process_sequence of its own"):
        unpadded(model)
    model = model_of([5], {})
    model.rollout_buffer = object()
    with pytest.raises(
        TypeError, match=r"rollout buffer must be one of \['RecurrentRolloutBuffer'.*got object"
    ):
        unpadded(model)


def test_states_are_read_at_first_rows_only() -> None:
    lstm = torch.nn.LSTM(3, 4)
    rows, starts = torch.randn(5, 3), torch.tensor([1.0, 0, 0, 1, 0])
    states = RowStates(torch.randn(5, 1, 4), torch.randn(5, 1, 4))
    out, _ = process_sequence(rows, states, starts, lstm)
    for begin, end in ((0, 3), (3, 5)):
        first = tuple(state[begin][:, None] for state in states)
        true, _ = lstm(rows[begin:end, None], first)
        torch.testing.assert_close(out[begin:end], true[:, 0])
