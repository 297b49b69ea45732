"""Values, advantages and losses on flat marked batches."""

from flatroll.estimators.functional import generalized_advantage_estimate
from flatroll.estimators.gae import GAE
from flatroll.estimators.ppo import ClipPPOLoss

__all__ = ["GAE", "ClipPPOLoss", "generalized_advantage_estimate"]
