"""Flat marked batches for reinforcement learning: no padding, no masks, no observation stored twice.

The rooms are sub-packages; import what you need from them::

    from flatroll.wrappers import InitTracker, StepCounter, TrajId
    from flatroll.rollouts import Collector, rollout
    from flatroll.buffers import ReplayBuffer, LazyTensorStorage, SliceSampler
    from flatroll.modules import GRUModule, set_recurrent_mode
    from flatroll.estimators import GAE, ClipPPOLoss

`flatroll.export_policy` writes a trained policy to a file.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatroll.deploy.export_policy import export_policy as export_policy

__all__ = ["__version__", "export_policy"]

__version__ = "0.9.0"


def __getattr__(name: str) -> Any:
    """Import `export_policy` when it is first asked for: ``import flatroll`` loads no room."""
    if name == "export_policy":
        from flatroll.deploy.export_policy import export_policy

        return export_policy
    raise AttributeError(f"module 'flatroll' has no attribute {name!r}")
