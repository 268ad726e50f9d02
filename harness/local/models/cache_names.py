"""The names of a model's cache in transformers: `cache` since 5.24, and `past_key_values` before and in others'
code.
"""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from torch import nn

_IS_RENAMED = Version(transformers.__version__) >= Version("5.24")
# The name in the library's own modules, such as a layer.
CACHE = "cache" if _IS_RENAMED else "past_key_values"
# The names for keys and values, and for recurrent states, in any version.
CACHES = ("cache", "past_key_values", "cache_params")


def cache_name(model: nn.Module) -> str:
    """Return the name of the argument by which a model's forward pass takes its cache."""
    is_of_library = type(model).__module__.startswith("transformers.models.")
    return CACHE if is_of_library else "past_key_values"


def cache_of(output: Any) -> Any:
    """Return the cache in the output of a forward pass, with keys and values or recurrent states; None without one."""
    found = (getattr(output, name, None) for name in CACHES)
    return next((cache for cache in found if cache is not None), None)
