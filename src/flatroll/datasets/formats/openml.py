"""Tables of OpenML for contextual bandits: `read_openml`, and `OpenMLExperienceReplay`."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from tensordict import TensorDict, TensorDictBase
from typing_extensions import override

from flatroll.buffers import SamplerWithoutReplacement
from flatroll.datasets.experience_replay import BaseDatasetExperienceReplay, DatasetOptions, open_rows
from flatroll.layout.checks import check_choice, check_flags, check_type, optional_package

#: By name of the set: the table's name, its version, and the label column (None: the table's own).
_TABLES: dict[str, tuple[str, int, str | None]] = {
    "adult_num": ("adult", 1, "occupation"),
    "adult_onehot": ("adult", 1, "occupation"),
    "mushroom_num": ("mushroom", 1, None),
    "mushroom_onehot": ("mushroom", 1, None),
    "covertype": ("covertype", 3, None),
    "shuttle": ("shuttle", 1, None),
    "magic": ("MagicTelescope", 1, None),
}


def read_openml(features: Any, label: Any, *, one_hot: bool = False) -> TensorDict:
    """Return a table as a flat batch ``[N]`` of features ``"X"``, float64 ``[N, D]``, and labels ``"y"``, int64.

    Features have mean 0 and variance 1, except for those of zeros and ones.
    Rows with missing values are left out. Categories are numbered in the order of their names, the label's, too.

    Args:
        features: `pandas.DataFrame` of N rows.
        label: `pandas.Series` of N rows; its classes are int64 ``0 … K - 1``.
        one_hot: encode categories as one column of zeros and ones per value. Default False.

    Raises:
        ImportError: scikit-learn or pandas is missing; the message names the extra.
        ValueError: no rows are left.
    """
    pandas = optional_package("pandas", "openml", "OpenMLExperienceReplay")
    preprocessing = optional_package("sklearn.preprocessing", "openml", "OpenMLExperienceReplay")
    check_type("features", features, pandas.DataFrame, "a DataFrame of pandas")
    check_type("label", label, pandas.Series, "a Series of pandas")
    check_flags(one_hot=one_hot)

    complete = ~(features.isna().any(axis=1) | label.isna())
    features = features[complete]
    label = label[complete]
    if not len(features):
        raise ValueError("the table has no rows without missing values")

    numbers = []
    categories = []
    for name in features:
        column = features[name]
        if pandas.api.types.is_numeric_dtype(column.dtype):
            numbers.append(np.asarray(column, np.float64)[:, None])
        else:
            codes = np.unique(np.asarray(column.astype(str)), return_inverse=True)[1]
            if one_hot:
                categories.append(np.eye(codes.max() + 1)[codes])
            else:
                categories.append(codes[:, None].astype(np.float64))

    # Columns of zeros and ones stay as they are.
    scaled = numbers
    if not one_hot:
        scaled = numbers + categories
    columns = []
    if scaled:
        columns.append(preprocessing.StandardScaler().fit_transform(np.concatenate(scaled, 1)))
    if one_hot:
        columns += categories

    classes = np.unique(np.asarray(label.astype(str)), return_inverse=True)[1]
    return TensorDict(
        {"X": torch.from_numpy(np.concatenate(columns, 1)), "y": torch.from_numpy(classes.astype(np.int64))},
        [len(classes)],
    )


class OpenMLExperienceReplay(BaseDatasetExperienceReplay):
    """An OpenML table as data for a contextual bandit: ``"X"`` float64 ``[N, D]`` and the label ``"y"`` int64 ``[N]``.

    Rows are independent: there are no trajectories, and no samplers of slices.

    Args:
        name: one of `available_datasets`.
        batch_size, options: see `BaseDatasetExperienceReplay`. The default sampler is `SamplerWithoutReplacement`;
            ``fetch`` may give ``(features, label)``, a data frame and a series, else scikit-learn fetches them.

    Attributes:
        max_outcome_val: the largest label.

    Raises:
        ImportError: scikit-learn or pandas is missing: ``pip install "flatroll[openml]"``.
        ValueError: no such set.
    """

    kind = "openml"
    #: Names of all sets.
    available_datasets = tuple(_TABLES)

    def __init__(self, name: str, batch_size: int | None = None, **options: Unpack[DatasetOptions]) -> None:
        options["sampler"] = options.get("sampler") or SamplerWithoutReplacement()
        super().__init__(name, batch_size, **options)
        self.max_outcome_val = int(open_rows(self.data_path)[:]["y"].max())  # before any transform is applied

    @override
    def _check_id(self) -> None:
        check_choice("name", self.dataset_id, _TABLES)

    @override
    def _fetch(self, folder: Path) -> Any:
        fetch = optional_package("sklearn.datasets", "openml", type(self).__name__).fetch_openml
        optional_package("pandas", "openml", type(self).__name__)
        table, version, label = _TABLES[self.dataset_id]
        features, target = fetch(table, version=version, return_X_y=True, as_frame=True)
        if label is None:
            return (features, target)
        return (features.drop(columns=[label]), features[label])

    @override
    def _convert(self, source: Any) -> Iterator[TensorDictBase]:
        features, label = source
        yield read_openml(features, label, one_hot=self.dataset_id.endswith("_onehot"))
