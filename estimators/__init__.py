"""Value estimators, advantages and losses for flat batches."""

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
from flatroll.estimators.losses.action_values import OffPolicyLoss, critic_ensemble
from flatroll.estimators.losses.base import (
    HardUpdate,
    LossInputs,
    LossModule,
    SoftUpdate,
    frozen,
    target_copy,
)
from flatroll.estimators.losses.dqn import DQNLoss
from flatroll.estimators.losses.policy_gradient import (
    A2CLoss,
    ClipPPOLoss,
    KLPENPPOLoss,
    PolicyGradientLoss,
    PPOLoss,
    ReinforceLoss,
)
from flatroll.estimators.losses.sac import DiscreteSACLoss, SACLoss
from flatroll.estimators.updates import UpdateStep, update_step
from flatroll.estimators.values.estimators import (
    GAE,
    TD0Estimator,
    TD1Estimator,
    TDLambdaEstimator,
    ValueEstimators,
    VTrace,
)
from flatroll.estimators.values.group_advantage import GroupAdvantage
from flatroll.modules.reward_scale import RewardScale

__all__ = [
    "GAE",
    "A2CLoss",
    "ClipPPOLoss",
    "DQNLoss",
    "DiscreteSACLoss",
    "GroupAdvantage",
    "HardUpdate",
    "KLPENPPOLoss",
    "LossInputs",
    "LossModule",
    "OffPolicyLoss",
    "PPOLoss",
    "PolicyGradientLoss",
    "ReinforceLoss",
    "RewardScale",
    "SACLoss",
    "SoftUpdate",
    "TD0Estimator",
    "TD1Estimator",
    "TDLambdaEstimator",
    "UpdateStep",
    "VTrace",
    "ValueEstimators",
    "critic_ensemble",
    "frozen",
    "generalized_advantage_estimate",
    "reward2go",
    "target_copy",
    "td0_advantage_estimate",
    "td0_return_estimate",
    "td1_advantage_estimate",
    "td1_return_estimate",
    "td_lambda_advantage_estimate",
    "td_lambda_return_estimate",
    "update_step",
    "vec_generalized_advantage_estimate",
    "vec_td1_advantage_estimate",
    "vec_td1_return_estimate",
    "vec_td_lambda_advantage_estimate",
    "vec_td_lambda_return_estimate",
    "vtrace_advantage_estimate",
]
