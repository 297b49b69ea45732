"""`MinariExperienceReplay`: sets of Minari, and those that its library has made here."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

from typing_extensions import override

from flatroll.datasets.base import BaseDatasetExperienceReplay, DatasetOptions
from flatroll.datasets.formats.minari import open_minari, read_minari_columns
from flatroll.disk import Folder
from flatroll.layout.export import Array, optional_package


class MinariExperienceReplay(BaseDatasetExperienceReplay):
    """A set of Minari, in any of its formats (hdf5, arrow, parquet), read by Minari's own library.

    Observations of a Dict space stand at the root by name, of another space under ``"observation"``; parts of a Tuple
    by number. Rewards are float32; episodes have ``("collector", "traj_ids")``, their number in the set. Infos of
    numbers, one a step, are ``("info", name)`` and ``("next", "info", name)``; others are left out (`read_minari`).
    Minari stores images as JPEG unless told not to (``jpeg_encoding=False``): these are what comes.

    Args:
        dataset_id: as Minari has it, ``"[namespace/]name-v<number>"``; or the path of a set's folder, where its library
            has put one.
        batch_size, options: see `BaseDatasetExperienceReplay`.
        load_from_local_minari: take the set from the folder in which Minari keeps those that were made or fetched here,
            and never fetch it. Default False: fetch it, unless it is there.
        infos: False leaves infos out, as is needed where episodes differ in them. Default True.

    Attributes:
        metadata: what Minari knows of the set, in words and numbers.

    Raises:
        ImportError: Minari is missing: ``pip install "flatroll[minari]"``.
        FileNotFoundError: Minari does not have the set here, and was not to fetch it.
        ValueError: Minari knows no set of that name.
    """

    kind = "minari"

    def __init__(
        self,
        dataset_id: str | Path,
        batch_size: int | None = None,
        *,
        load_from_local_minari: bool = False,
        infos: bool = True,
        **options: Unpack[DatasetOptions],
    ) -> None:
        self._local, self._infos = load_from_local_minari, infos
        self.metadata: dict[str, Any] | None = None
        super().__init__(dataset_id, batch_size, **options)
        if self.metadata is None:  # converted by an earlier object
            facts = Folder(self.data_path).load().extra
            self.metadata = facts.get("metadata", {}) if isinstance(facts, dict) else {}

    @override
    def _fetch(self, folder: Path) -> Any:
        minari = optional_package("minari", "minari", type(self).__name__)
        if self._local and self.dataset_id not in minari.list_local_datasets():
            raise FileNotFoundError(
                f"Minari has no set {self.dataset_id!r} here, but {sorted(minari.list_local_datasets()) or 'none'}: "
                "MINARI_DATASETS_PATH names its folder, and without load_from_local_minari=True it is downloaded"
            )
        try:
            return minari.load_dataset(self.dataset_id, download=not self._local)
        except (KeyError, FileNotFoundError) as error:
            raise ValueError(f"Minari knows no set {self.dataset_id!r}: {error}") from None

    @override
    def _convert(self, source: Any) -> Iterator[dict[str, Array]]:
        data = open_minari(source)
        # Spaces and the like as text: what JSON can say.
        self.metadata = json.loads(json.dumps(data.storage.metadata, default=str))
        return read_minari_columns(data, infos=self._infos)

    @override
    def _facts(self) -> dict[str, Any]:
        return super()._facts() | {"metadata": self.metadata}
