"""`CollectorOptions`: the options that all collectors take, with their types and defaults in one place.

A constructor takes them as typed keywords, ``**options: Unpack[CollectorKeywords]``, and reads them into one record.
`takes_options` shows them, with their defaults, in its signature.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Self, TypedDict, TypeVar

import torch
from tensordict import TensorDict
from tensordict.nn import InteractionType

from flatroll.layout.checks import check_flags, check_function
from flatroll.layout.keys import NestedKey

Device = torch.device | str | None
Function = TypeVar("Function", bound=Callable[..., Any])


class CollectorKeywords(TypedDict, total=False):
    """The fields of `CollectorOptions` as keyword arguments; `Collector` documents them."""

    env_device: Device
    policy_device: Device
    no_cuda_sync: bool
    obs_dtype: torch.dtype | None
    compact_obs: bool
    track_traj_ids: bool
    set_truncated: bool
    max_frames_per_traj: int | None
    reset_at_each_iter: bool
    split_trajs: bool
    postproc: Callable[[TensorDict], TensorDict] | None
    pre_collect_hook: Callable[[], Any] | None
    post_collect_hook: Callable[[TensorDict], Any] | None
    auto_register_policy_transforms: bool | None
    state_stride: int
    info_keys: Sequence[NestedKey]
    exploration_type: InteractionType | str
    splits: int
    track_policy_version: bool
    track_envs: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectorOptions:
    """How a collector steps its envs, and what its rows hold; `Collector` documents the fields.

    Collectors with workers pass them on to the `Collector` of each worker.
    """

    env_device: Device = None
    policy_device: Device = None
    no_cuda_sync: bool = False
    obs_dtype: torch.dtype | None = None
    compact_obs: bool = False
    track_traj_ids: bool = True
    set_truncated: bool = False
    max_frames_per_traj: int | None = None
    reset_at_each_iter: bool = False
    split_trajs: bool = False
    postproc: Callable[[TensorDict], TensorDict] | None = None
    pre_collect_hook: Callable[[], Any] | None = None
    post_collect_hook: Callable[[TensorDict], Any] | None = None
    auto_register_policy_transforms: bool | None = True
    state_stride: int = 1
    info_keys: Sequence[NestedKey] = ()
    exploration_type: InteractionType | str = InteractionType.RANDOM
    splits: int = 1
    track_policy_version: bool = False
    track_envs: bool = False

    @classmethod
    def read(cls, caller: str, given: Mapping[str, Any]) -> Self:
        """Read keyword arguments of ``caller``; TypeError for one that is no option."""
        for name in given:
            if name not in cls.__dataclass_fields__:
                raise TypeError(f"{caller}() got an unexpected keyword argument {name!r}")
        return cls(**given)

    def check(self) -> None:
        """Raise TypeError for flags that are no flags and hooks that are no functions."""
        check_flags(
            compact_obs=self.compact_obs,
            track_traj_ids=self.track_traj_ids,
            set_truncated=self.set_truncated,
            reset_at_each_iter=self.reset_at_each_iter,
            split_trajs=self.split_trajs,
            track_policy_version=self.track_policy_version,
            track_envs=self.track_envs,
        )
        if self.auto_register_policy_transforms is not None:
            check_flags(auto_register_policy_transforms=self.auto_register_policy_transforms)

        hooks = {
            "postproc": self.postproc,
            "pre_collect_hook": self.pre_collect_hook,
            "post_collect_hook": self.post_collect_hook,
        }
        for name, hook in hooks.items():
            if hook is not None:
                check_function(name, hook)


def takes_options(kind: type[CollectorOptions]) -> Callable[[Function], Function]:
    """Show the fields of these options in a constructor's signature instead of its ``**options``.

    >>> @takes_options(CollectorOptions)
    ... def collect(env, **options):
    ...     pass
    >>> inspect.signature(collect).parameters["state_stride"]
    <Parameter "state_stride: int = 1">
    """

    def show(function: Function) -> Function:
        signature = inspect.signature(function)
        own = [one for one in signature.parameters.values() if one.kind is not one.VAR_KEYWORD]
        shown: Any = function
        shown.__signature__ = signature.replace(parameters=[*own, *_parameters_of(kind)])
        return function

    return show


def _parameters_of(kind: type[CollectorOptions]) -> list[inspect.Parameter]:
    """Return the fields as keyword parameters, those of subclasses before those of their bases."""
    parameters = inspect.signature(kind).parameters
    names = [field.name for field in fields(kind)]
    inherited = len(fields(CollectorOptions))
    return [parameters[name] for name in (*names[inherited:], *names[:inherited])]
