"""Rollouts of language models: flat and padded, and what estimators, losses and buffers make of the flat ones."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest_text import make_model, score
from tensordict.nn import ProbabilisticTensorDictModule, ProbabilisticTensorDictSequential
from torch.distributions import Categorical

from flatroll.buffers import LazyTensorStorage, ReplayBuffer, SliceSampler
from flatroll.estimators import GAE, ClipPPOLoss
from flatroll.layout import audit, join, run_ends
from flatroll.text import PromptData, RolloutFromModel, Sequences, TextModule
