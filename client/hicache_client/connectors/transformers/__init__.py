"""Connector for Hugging Face transformers on the CPU: `HiCacheConnector(model).generate(input_ids)`."""

from .batch import Counters, RowStats
from .cache import HiCache, UncachedCache
from .connector import GenerateResult, HiCacheConnector
from .spec import UnsupportedModel, weights_digest

__all__ = [
    "Counters",
    "GenerateResult",
    "HiCache",
    "HiCacheConnector",
    "RowStats",
    "UncachedCache",
    "UnsupportedModel",
    "weights_digest",
]
