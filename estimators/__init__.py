"""Values, advantages and losses on flat marked batches."""

from flatroll.estimators.a2c import A2CLoss
from flatroll.estimators.dqn import DQNLoss
from flatroll.estimators.functional import (
    generalized_advantage_estimate,
    reward2go,
    td0_advantage_estimate,
    td0_return_estimate,
    td1_advantage_estimate,
    td1_return_estimate,
    td_lambda_advantage_estimate,
    td_lambda_return_estimate,
    vec_generalized_advantage_estimate,
    vec_td1_advantage_estimate,
    vec_td1_return_estimate,
    vec_td_lambda_advantage_estimate,
    vec_td_lambda_return_estimate,
    vtrace_advantage_estimate,
)
from flatroll.estimators.gae import GAE
from flatroll.estimators.kinds import ValueEstimators
from flatroll.estimators.ppo import ClipPPOLoss, KLPENPPOLoss, PPOLoss
from flatroll.estimators.reinforce import ReinforceLoss
from flatroll.estimators.sac import DiscreteSACLoss, SACLoss
from flatroll.estimators.targets import HardUpdate, SoftUpdate
from flatroll.estimators.td import TD0Estimator, TD1Estimator, TDLambdaEstimator
from flatroll.estimators.vtrace import VTrace

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
    "TD0Estimator",
    "TD1Estimator",
    "TDLambdaEstimator",
    "VTrace",
    "ValueEstimators",
    "generalized_advantage_estimate",
    "reward2go",
    "td0_advantage_estimate",
    "td0_return_estimate",
    "td1_advantage_estimate",
    "td1_return_estimate",
    "td_lambda_advantage_estimate",
    "td_lambda_return_estimate",
    "vec_generalized_advantage_estimate",
    "vec_td1_advantage_estimate",
    "vec_td1_return_estimate",
    "vec_td_lambda_advantage_estimate",
    "vec_td_lambda_return_estimate",
    "vtrace_advantage_estimate",
]
