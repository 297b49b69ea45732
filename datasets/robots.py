"""`RobosetExperienceReplay`, `OpenXExperienceReplay` and `LeRobotExperienceReplay`: robots."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

from tensordict import TensorDictBase
from typing_extensions import override

from flatroll.buffers import SamplerWithoutReplacement
from flatroll.datasets.base import BaseDatasetExperienceReplay, DatasetOptions, slices
from flatroll.datasets.formats.lerobot.reading import read_lerobot
from flatroll.datasets.formats.robots import read_rlds, read_roboset


class RobosetExperienceReplay(BaseDatasetExperienceReplay):
    """A set of RoboSet: HDF5 files of trials (`read_roboset`).

    Args:
        dataset_id: its name, such as ``"FK1-v4(expert)/FK1_MicroOpenRandom_v2d-v4"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the files or their folder.

    Raises:
        ImportError: h5py is missing: ``pip install "flatroll[h5]"``.
    """

    kind = "roboset"

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_roboset(source)


class LeRobotExperienceReplay(BaseDatasetExperienceReplay):
    """A folder of LeRobot, version 3 (`read_lerobot`), without videos.

    Args:
        dataset_id: its name, such as ``"lerobot/pusht_image"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the folder.

    Raises:
        ImportError: pyarrow is missing, or Pillow where there are images: ``pip install "flatroll[parquet,minari]"``.
    """

    kind = "lerobot"

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_lerobot(source)


class OpenXExperienceReplay(BaseDatasetExperienceReplay):
    """A set of Open X-Embodiment, or any episodes of steps as RLDS has them (`read_rlds`).

    Args:
        dataset_id: its name.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives an iterable of episodes, such as the
            one that the set's own library returns, or the path of a LeRobot folder.
        shuffle: with False rows, or slices, come in the order of the set, once each in a pass. Default True.
        num_slices, slice_len: draw slices of episodes, so many or so long, instead of single rows.
        pad: pad short slices, which needs ``strict_length=False``. Default None: do not.
        replacement: draw with replacement. Default True.
        streaming: for the references' sake: None or False, since a set is converted before it is drawn from.
        strict_length: slices of the whole ``slice_len`` only. Default True.
    """

    kind = "openx"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        num_slices: int | None = None,
        slice_len: int | None = None,
        pad: bool | None = None,
        replacement: bool | None = None,
        streaming: bool | None = None,
        strict_length: bool = True,
        **options: Unpack[DatasetOptions],
    ) -> None:
        if streaming:
            raise ValueError(
                "streaming must be False: the set is converted once, one episode at a time, and then read from disk; "
                "read_rlds(episodes) gives flat batches without a buffer"
            )
        if not shuffle:
            if (
                num_slices is not None
                or slice_len is not None
                or options.get("sampler") is not None
                or replacement
            ):
                raise ValueError(
                    "shuffle=False gives rows in order: leave out sampler, slices and replacement"
                )
            options["sampler"] = SamplerWithoutReplacement(shuffle=False)
        slices(options, num_slices, slice_len, strict_length, replacement is not False, bool(pad))
        super().__init__(dataset_id, batch_size, **options)

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return read_lerobot(source) if isinstance(source, str | Path) else read_rlds(source)
