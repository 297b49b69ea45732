"""Tables of OpenML for contextual bandits: features and a label for each row."""

from typing import Any

import numpy as np
import torch
from tensordict import TensorDict

from flatroll.layout.export import optional_package


def read_openml(features: Any, label: Any, *, one_hot: bool = False) -> TensorDict:
    """Return a table as a flat batch ``[N]`` of features ``"X"``, float64 ``[N, D]``, and labels ``"y"``, int64.

    Features have mean 0 and variance 1, but for those of zeros and ones.
    Rows with missing values are left out. Categories are numbered in the order of their names, the label's, too.

    Args:
        features: `pandas.DataFrame` of N rows.
        label: `pandas.Series` of N rows; its classes are int64 ``0 … K - 1``.
        one_hot: give a category as many columns as it has values, of zeros and ones. Default False.

    Raises:
        ImportError: scikit-learn or pandas is missing; the text names the extra.
        ValueError: no rows are left.
    """
    pandas = optional_package("pandas", "openml", "OpenMLExperienceReplay")
    preprocessing = optional_package("sklearn.preprocessing", "openml", "OpenMLExperienceReplay")
    complete = ~(features.isna().any(axis=1) | label.isna())
    features, label = features[complete], label[complete]
    if not len(features):
        raise ValueError("the table has no rows without missing values")
    numbers, categories = [], []
    for name in features:
        column = features[name]
        if pandas.api.types.is_numeric_dtype(column.dtype):
            numbers.append(np.asarray(column, np.float64)[:, None])
        else:
            codes = np.unique(np.asarray(column.astype(str)), return_inverse=True)[1]
            categories.append(
                np.eye(codes.max() + 1)[codes] if one_hot else codes[:, None].astype(np.float64)
            )
    scaled = numbers + ([] if one_hot else categories)
    columns = [preprocessing.StandardScaler().fit_transform(np.concatenate(scaled, 1))] if scaled else []
    columns += categories if one_hot else []
    classes = np.unique(np.asarray(label.astype(str)), return_inverse=True)[1]
    return TensorDict(
        {"X": torch.from_numpy(np.concatenate(columns, 1)), "y": torch.from_numpy(classes.astype(np.int64))},
        [len(classes)],
    )
