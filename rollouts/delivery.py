"""The way of a finished batch to whoever asked for it."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from tensordict import TensorDict

from flatroll.layout.boundaries import run_ends
from flatroll.layout.keys import DONE, TRUNCATED
from flatroll.layout.trajectories import split_trajectories
from flatroll.rollouts.batch_columns import ColumnKeys


@dataclass
class Delivery:
    """Cut marks, device, padding, postproc, hook, buffer, in this order; see `Collector` for each."""

    keys: ColumnKeys
    set_truncated: bool
    storing_device: torch.device | None
    blocking: bool
    split: bool
    postproc: Callable[[TensorDict], TensorDict] | None
    hook: Callable[[TensorDict], Any] | None
    buffer: Any

    def prepare(self, batch: TensorDict, final: TensorDict | None) -> tuple[TensorDict, TensorDict | None]:
        """The flat batch and its *final* with cut marks, where they are wanted."""
        if self.set_truncated:
            ends = run_ends(batch, is_init_key=self.keys.init, traj_key=self.keys.traj).unsqueeze(-1)
            cut = ends & ~batch.get(DONE)
            batch.set(TRUNCATED, batch.get(TRUNCATED) | cut)
            batch.set(DONE, batch.get(DONE) | cut)
        if self.storing_device is not None:
            batch = batch.to(self.storing_device, non_blocking=not self.blocking)
            if final is not None:
                final = final.to(self.storing_device, non_blocking=not self.blocking)
        return batch, final

    def finish(self, batch: TensorDict, final: TensorDict | None) -> TensorDict | None:
        """What is yielded: the batch after postproc, or None where a buffer took it."""
        if self.split:
            batch = split_trajectories(batch, trajectory_key=self.keys.traj)
        if self.postproc is not None:
            batch = self.postproc(batch)
            if batch is None:
                raise TypeError("postproc returned None: it must return the batch")
        if self.hook is not None:
            self.hook(batch)
        if self.buffer is None:
            return batch
        if final is None:
            self.buffer.extend(batch)
        else:
            self.buffer.extend(batch, final=final)
        return None
