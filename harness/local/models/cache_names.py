"""Names of a transformers model's cache: `cache` since 5.24, `past_key_values` before, and in code of others."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from torch import nn

_IS_RENAMED = Version(transformers.__version__) >= Version("5.24")
# Of the library's own modules, such as a layer.
CACHE = "cache" if _IS_RENAMED else "past_key_values"
# Of models with keys and values, and of those with recurrent states, in any version.
CACHES = ("cache", "past_key_values", "cache_params")


def cache_name(model: nn.Module) -> str:
    """The argument of a model's forward pass that takes its cache."""
    is_of_library = type(model).__module__.startswith("transformers.models.")
    return CACHE if is_of_library else "past_key_values"


def cache_of(output: Any) -> Any:
    """The cache that a forward pass returns, of keys and values or of recurrent states."""
    found = (getattr(output, name, None) for name in CACHES)
    return next((cache for cache in found if cache is not None), None)
