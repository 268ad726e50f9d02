"""The names of a model's cache in transformers: `cache` since version 5.24, and `past_key_values` in earlier versions
and in code that others wrote.
"""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from torch import nn

_IS_RENAMED = Version(transformers.__version__) >= Version("5.24")
# The name of the cache's argument in transformers' own modules, such as layers.
CACHE = "cache" if _IS_RENAMED else "past_key_values"
# The names under which a model's output may hold its cache (keys and values, or recurrent states), in any version.
CACHES = ("cache", "past_key_values", "cache_params")


def cache_name(model: nn.Module) -> str:
    """Return the name of the argument with which a model's forward pass is given its cache."""
    is_of_library = type(model).__module__.startswith("transformers.models.")
    return CACHE if is_of_library else "past_key_values"


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a forward pass: keys and values, or recurrent states. None if the output has no
    cache.
    """
    found = (getattr(output, name, None) for name in CACHES)
    return next((cache for cache in found if cache is not None), None)
