"""The door to the wing with the models, whose modules are imported by name, when they are needed; and the values that
come back. Types of that wing are imported under TYPE_CHECKING alone.

    planned = local("engine.pair").plan_pair(model, draft, placement)
"""

from __future__ import annotations

import importlib
from typing import Any

# It imports torch and transformers. A process that is going to need them loads it at a time of its choice.
SLOWEST_MODULE = "harness.local.engine.engine"


def local(name: str) -> Any:
    """A module of `harness.local`."""
    return importlib.import_module(f"harness.local.{name}")
