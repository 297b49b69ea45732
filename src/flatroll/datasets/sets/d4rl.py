"""`D4RLExperienceReplay` and `VD4RLExperienceReplay`: D4RL's steps, and its pixels."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Unpack

from tensordict import TensorDictBase
from typing_extensions import override

from flatroll.buffers import Compose, Resize, ToTensorImage
from flatroll.datasets import ids
from flatroll.datasets.base import BaseDatasetExperienceReplay, DatasetOptions
from flatroll.datasets.formats.d4rl import read_d4rl
from flatroll.datasets.formats.robots import files_in
from flatroll.datasets.formats.vd4rl import read_vd4rl
from flatroll.layout.keys import TRAJ_IDS


class D4RLExperienceReplay(BaseDatasetExperienceReplay):
    """A set of D4RL, or any HDF5 file of that form (`read_d4rl`).

    Where the file has no ``next_observations``, that of an episode's last step is in no file: its row has its own
    observation there, and ``("collector", "next_known")`` is False.

    Args:
        dataset_id: its name, such as ``"maze2d-umaze-v1"``, one of `available_datasets`; with ``fetch`` any.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the HDF5 file.
        from_env: take the arrays that ``env.get_dataset()`` returns, where ``fetch`` gives the env (or the arrays by
            name). Without ``fetch`` the env is ``gym.make(dataset_id)`` after ``import d4rl``: D4RL's own library,
            which needs the Gym and MuJoCo of 2021 and a Python of that time. Default False.
        use_truncated_as_done: ``("next", "done")`` of a timeout is True. With False episodes end with terminals alone,
            as far as done tells; where they are in the file tells ``is_init``. Default True.
        direct_download: for the references' sake: None or True; ``d4rl.qlearning_dataset`` is not called, since what it
            returns does not say where episodes were cut.
        terminate_on_end: leave out last rows whose next observation is unknown, but for terminal ones, as
            `d4rl.qlearning_dataset` does. Default False (None).

    Raises:
        ImportError: h5py is missing: ``pip install "flatroll[h5]"``; with ``from_env``, gym or d4rl.
        ValueError: no such set; the text has names like it.
    """

    kind = "d4rl"
    #: Names of all sets.
    available_datasets = ids.D4RL

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        from_env: bool = False,
        use_truncated_as_done: bool = True,
        direct_download: bool | None = None,
        terminate_on_end: bool | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        if direct_download is False and not from_env:
            raise ValueError(
                "direct_download=False would take d4rl.qlearning_dataset, whose rows do not say where episodes were "
                "cut: give from_env=True, or leave it out"
            )
        if direct_download and from_env:
            raise ValueError("from_env=True takes the rows from the env: leave out direct_download")
        self._from_env = from_env
        self._truncated_is_done, self._drop_unknown = use_truncated_as_done, bool(terminate_on_end)
        super().__init__(dataset_id, batch_size, **options)

    @override
    def _facts(self) -> dict[str, Any]:
        ends = {"use_truncated_as_done": self._truncated_is_done, "terminate_on_end": self._drop_unknown}
        return super()._facts() | {"options": ends}

    @override
    def _fetch(self, folder: Path) -> Any:
        if not self._from_env:
            return super()._fetch(folder)
        self._check_known()
        try:
            import_module("d4rl")  # it tells gym of its envs
            gym = import_module("gym")
        except ImportError as error:
            raise ImportError(
                f"from_env=True needs gym and D4RL's own library, which only old versions of Python can install "
                f"({error}): leave it out and give the HDF5 file by fetch=, or give the env by fetch="
            ) from error
        return gym.make(self.dataset_id)

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        episodes = 0
        for rows in self._sources(source):
            first = episodes
            for episode in read_d4rl(rows, drop_unknown=self._drop_unknown):
                episode[TRAJ_IDS] = episode[TRAJ_IDS] + first
                episodes = int(episode[TRAJ_IDS][-1]) + 1
                if not self._truncated_is_done:
                    episode["next", "done"] = episode["next", "terminated"].clone()
                yield episode

    def _sources(self, source: Any) -> Iterable[Any]:
        """What `read_d4rl` reads, one after the other."""
        if not self._from_env:
            return files_in(source, (".hdf5", ".h5"))
        if isinstance(source, Mapping):
            return [source]
        env = source if hasattr(source, "get_dataset") else getattr(source, "unwrapped", source)
        if not hasattr(env, "get_dataset"):
            raise TypeError(
                "from_env=True takes an env of D4RL, with get_dataset(), or the arrays that it returns, got "
                f"{type(source).__name__}"
            )
        return [env.get_dataset()]


class VD4RLExperienceReplay(BaseDatasetExperienceReplay):
    """A set of V-D4RL: episodes of pixels, in ``.npz`` or HDF5 files (`read_vd4rl`).

    Args:
        dataset_id: its name, such as ``"main/walker_walk/random/64px"``.
        batch_size, options: see `BaseDatasetExperienceReplay`; ``fetch`` gives the files or their folder.
        totensor: samples have float pixels in [0, 1], channels first. Default True.
        image_size: height and width to which samples are resized. Default None.

    Raises:
        ImportError: h5py is missing, and the files are HDF5: ``pip install "flatroll[h5]"``.
    """

    kind = "vd4rl"

    def __init__(
        self,
        dataset_id: str,
        batch_size: int | None = None,
        *,
        totensor: bool = True,
        image_size: int | Sequence[int] | None = None,
        **options: Unpack[DatasetOptions],
    ) -> None:
        images: list[Any] = ["pixels", ("next", "pixels")]
        given = options.get("transform")
        transforms: list[Any] = [] if given is None else [given]
        if totensor:
            transforms.append(ToTensorImage(in_keys=images, shape_tolerant=True))
        if image_size is not None:
            height, width = (image_size, image_size) if isinstance(image_size, int) else image_size
            transforms.append(Resize(height, width, in_keys=images))
        options["transform"] = Compose(*transforms) if transforms else None
        super().__init__(dataset_id, batch_size, **options)

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        return iter(read_vd4rl(source))
