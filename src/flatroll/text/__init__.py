"""Tokenized text, and rollouts of language models as flat batches."""

from flatroll.text.data import PairwiseDataset, PromptData, RewardData
from flatroll.text.dataset import TokenizedDatasetLoader, create_infinite_iterator, get_dataloader
from flatroll.text.kl import (
    AdaptiveKLController,
    ConstantKLController,
    KLControllerBase,
    KLEstimator,
    kl_estimate,
)
from flatroll.text.rollout import RolloutFromModel
from flatroll.text.rows import merge_prefixes, rows_of_texts
from flatroll.text.sequences import Sequences, TextModule
from flatroll.text.tokenize import PromptTensorDictTokenizer, TensorDictTokenizer

__all__ = [
    "AdaptiveKLController",
    "ConstantKLController",
    "KLControllerBase",
    "KLEstimator",
    "PairwiseDataset",
    "PromptData",
    "PromptTensorDictTokenizer",
    "RewardData",
    "RolloutFromModel",
    "Sequences",
    "TensorDictTokenizer",
    "TextModule",
    "TokenizedDatasetLoader",
    "create_infinite_iterator",
    "get_dataloader",
    "kl_estimate",
    "merge_prefixes",
    "rows_of_texts",
]
