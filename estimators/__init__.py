"""Values, advantages and losses on flat marked batches."""

from flatroll.estimators.a2c import A2CLoss
from flatroll.estimators.dqn import DQNLoss
from flatroll.estimators.functional import generalized_advantage_estimate
from flatroll.estimators.gae import GAE
from flatroll.estimators.kinds import ValueEstimators
from flatroll.estimators.ppo import ClipPPOLoss, KLPENPPOLoss, PPOLoss
from flatroll.estimators.reinforce import ReinforceLoss
from flatroll.estimators.sac import DiscreteSACLoss, SACLoss
from flatroll.estimators.targets import HardUpdate, SoftUpdate

__all__ = [
    "GAE",
    "A2CLoss",
    "ClipPPOLoss",
    "DQNLoss",
    "DiscreteSACLoss",
    "HardUpdate",
    "KLPENPPOLoss",
    "PPOLoss",
    "ReinforceLoss",
    "SACLoss",
    "SoftUpdate",
    "ValueEstimators",
    "generalized_advantage_estimate",
]
