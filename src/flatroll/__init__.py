"""Flat marked batches for reinforcement learning: no padding, no masks, no observation stored twice.

The rooms are sub-packages; import what you need from them::

    from flatroll.wrappers import InitTracker, StepCounter, TrajId
    from flatroll.rollouts import Collector, rollout
    from flatroll.buffers import ReplayBuffer, LazyTensorStorage, SliceSampler
    from flatroll.modules import GRUModule, set_recurrent_mode
    from flatroll.estimators import GAE, ClipPPOLoss
"""

__all__ = ["__version__"]

__version__ = "0.9.0"
