"""Recurrent modules for flat batches: single steps in rollouts, unpadded runs in training; normalisation."""

from flatroll.modules.backends.choice import register_by_row
from flatroll.modules.backends.on_triton.scan import on_device
from flatroll.modules.burn_in import BurnIn
from flatroll.modules.by_space import ActionMask, EpsilonGreedy, actor, critic, q_network, set_epsilon
from flatroll.modules.check_memory import check_memory
from flatroll.modules.delta_net import DeltaNetModule
from flatroll.modules.distributions import (
    CombinedCategorical,
    Gaussian,
    JointBernoulli,
    JointCategorical,
    SquashedGaussian,
)
from flatroll.modules.forgetful import FFMModule
from flatroll.modules.linear import LinearRecurrentModule, MinGRUModule
from flatroll.modules.lru import LRUModule
from flatroll.modules.mode import recurrent_mode, set_recurrent_mode
from flatroll.modules.networks import GRU, LSTM, GRUCell, LSTMCell
from flatroll.modules.primer import TensorDictPrimer
from flatroll.modules.recurrent import GRUModule, LSTMModule
from flatroll.modules.rnd import RND
from flatroll.modules.running_norm import RunningNorm, update_norms
from flatroll.modules.selective import S6Module
from flatroll.modules.transformer import TransformerModule

# A backend of the outer ring: the core asks for it and does not import it.
register_by_row("triton", on_device)

__all__ = [
    "GRU",
    "LSTM",
    "RND",
    "ActionMask",
    "BurnIn",
    "CombinedCategorical",
    "DeltaNetModule",
    "EpsilonGreedy",
    "FFMModule",
    "GRUCell",
    "GRUModule",
    "Gaussian",
    "JointBernoulli",
    "JointCategorical",
    "LRUModule",
    "LSTMCell",
    "LSTMModule",
    "LinearRecurrentModule",
    "MinGRUModule",
    "RunningNorm",
    "S6Module",
    "SquashedGaussian",
    "TensorDictPrimer",
    "TransformerModule",
    "actor",
    "check_memory",
    "critic",
    "q_network",
    "recurrent_mode",
    "set_epsilon",
    "set_recurrent_mode",
    "update_norms",
]
