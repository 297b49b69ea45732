"""`unpadded`: trains sb3-contrib's RecurrentPPO on flat rows instead of padded sequences."""

from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from flatroll.modules import LSTMModule
from flatroll.modules.networks import share_weights
from flatroll.trainers.versions import trainer_imports

with trainer_imports("sb3-contrib", "2.7", "3", "sb3"):
    from sb3_contrib.common.recurrent.buffers import RecurrentDictRolloutBuffer, RecurrentRolloutBuffer
    from sb3_contrib.common.recurrent.policies import RecurrentActorCriticPolicy
    from sb3_contrib.common.recurrent.type_aliases import (
        RecurrentDictRolloutBufferSamples,
        RecurrentRolloutBufferSamples,
        RNNStates,
    )

Model = TypeVar("Model")


def unpadded(model: Model) -> Model:
    """Make a RecurrentPPO train on its rollouts without padding sequences.

    sb3-contrib pads the sequences of a minibatch to the longest, and where one begins with an episode it steps through
    time in Python. Here the rows stay flat, ``[N, ...]``, and `LSTMModule` runs over them. Minibatches, losses and
    gradients are the same (to rounding); the rollout and `predict` are sb3-contrib's own.

    Args:
        model: a ``sb3_contrib.RecurrentPPO`` of any policy; changed in place. One that was loaded from a file has to
            be given again.

    Returns:
        The model.

    Raises:
        TypeError: it is another kind of model, or its rollout buffer or policy overrides a method replaced here.

    >>> from sb3_contrib import RecurrentPPO
    >>> model = unpadded(RecurrentPPO("MlpLstmPolicy", "CartPole-v1", n_steps=64, batch_size=32, device="cpu"))
    >>> _ = model.learn(128)
    """
    buffer = getattr(model, "rollout_buffer", None)
    policy = getattr(model, "policy", None)

    if not isinstance(policy, RecurrentActorCriticPolicy):
        raise TypeError(
            f"model must be a sb3_contrib.RecurrentPPO with its policy, got {type(model).__name__}"
        )
    if type(buffer) not in (*_FLAT, *_FLAT.values()):
        raise TypeError(
            f"the model's rollout buffer must be one of {[kind.__name__ for kind in _FLAT]}, got "
            f"{type(buffer).__name__}"
        )
    if type(policy)._process_sequence is not RecurrentActorCriticPolicy._process_sequence:
        raise TypeError(
            f"{type(policy).__name__} has a _process_sequence of its own, which would not be called"
        )

    # The subclass keeps the buffer's arrays but reads them differently; pickling is unchanged.
    buffer.__class__ = _FLAT.get(type(buffer), type(buffer))
    changed: Any = policy
    changed._process_sequence = process_sequence
    return model


class RowStates(NamedTuple):
    """The states of an LSTM in flat rows, which tells `process_sequence` that rows are not padded sequences."""

    hidden: Tensor  # [N, layers, H], read at the first row of each sequence
    cell: Tensor


def process_sequence(
    features: Tensor, lstm_states: tuple[Tensor, Tensor] | RowStates, episode_starts: Tensor, lstm: nn.LSTM
) -> tuple[Tensor, Any]:
    """What the policy calls for its LSTMs: flat rows ``[N, ...]`` in training, else as sb3-contrib does it.

    Args:
        features: ``[N, input_size]``.
        lstm_states: `RowStates`, or sb3-contrib's ``[layers, sequences, H]``.
        episode_starts: with `RowStates`, 1.0 at the first row of each sequence, ``[N]``.
        lstm: the policy's LSTM.

    Returns:
        Outputs ``[N, H]`` and states, which are not used in training.
    """
    if not isinstance(lstm_states, RowStates):
        padded: tuple[Tensor, Any] = RecurrentActorCriticPolicy._process_sequence(
            features, lstm_states, episode_starts, lstm
        )
        return padded

    # The policy's LSTM is time-major, which must not matter for flat rows: make another LSTM with the same
    # parameters.
    sharing: Any = share_weights(nn.LSTM, lstm)
    module = LSTMModule(lstm=sharing, in_key="features", out_key="latent")
    latent, _ = module.over_runs(features, lstm_states, episode_starts > 0)
    return latent, lstm_states


def flat_samples(buffer: Any, batch_inds: Any, env_change: Any, env: Any = None) -> Any:
    """The rows of a minibatch in the order of the buffer, env after env, instead of padded sequences.

    Args:
        buffer: sb3-contrib's, its arrays as ``[rows, ...]``, env after env.
        batch_inds: int ``[N]``, the rows; consecutive, with at most one wrap-around.
        env_change: ``[rows, 1]``, 1.0 at the first row of each env.
        env: not used.

    Returns:
        sb3-contrib's samples, with `RowStates` for its states and a mask that is all ones.
    """

    def rows(array: Any) -> Tensor:
        taken: Tensor = buffer.to_torch(array[batch_inds])
        return taken

    episode_starts = buffer.episode_starts[batch_inds].flatten() > 0
    starts = episode_starts | (env_change[batch_inds].flatten() > 0)
    starts[0] = True  # a minibatch may begin inside a sequence
    first = np.flatnonzero(starts)
    went_on = ~episode_starts[first]  # of each sequence: whether its episode began earlier

    def states(stored: Any) -> Tensor:
        # stored: [rows of the buffer, layers, H]. Only the states at the first rows of sequences are read;
        # the rest stays zero.
        at_first = stored[batch_inds[first]] * went_on[:, None, None]
        by_row = torch.zeros(len(batch_inds), *stored.shape[1:], device=buffer.device)
        by_row[torch.from_numpy(first).to(buffer.device)] = buffer.to_torch(at_first)
        return by_row

    kept = buffer.observations
    if isinstance(kept, dict):
        make: Any = RecurrentDictRolloutBufferSamples
        observations: Any = {key: rows(obs) for key, obs in kept.items()}
    else:
        make = RecurrentRolloutBufferSamples
        observations = rows(kept)
    return make(
        observations=observations,
        actions=rows(buffer.actions),
        old_values=rows(buffer.values).flatten(),
        old_log_prob=rows(buffer.log_probs).flatten(),
        advantages=rows(buffer.advantages).flatten(),
        returns=rows(buffer.returns).flatten(),
        lstm_states=RNNStates(
            RowStates(states(buffer.hidden_states_pi), states(buffer.cell_states_pi)),
            RowStates(states(buffer.hidden_states_vf), states(buffer.cell_states_vf)),
        ),
        episode_starts=buffer.to_torch(starts.astype(np.float32)),
        mask=torch.ones(len(batch_inds), device=buffer.device),
    )


class FlatRolloutBuffer(RecurrentRolloutBuffer):
    """sb3-contrib's recurrent rollout buffer with flat rows; made by `unpadded`."""

    _get_samples: Any = flat_samples


class FlatDictRolloutBuffer(RecurrentDictRolloutBuffer):
    """The same for observations that are dicts."""

    _get_samples: Any = flat_samples


_FLAT: dict[type, type] = {
    RecurrentRolloutBuffer: FlatRolloutBuffer,
    RecurrentDictRolloutBuffer: FlatDictRolloutBuffer,
}
