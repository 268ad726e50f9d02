"""The door to `harness.local`, the wing with the models: it imports the wing's modules by name, when they are needed.

    planned = local("engine.pair").plan_pair(model, draft, placement)

The modules of this package declare the values that come back. Types of the wing are imported under TYPE_CHECKING only.
Records of the wing, which import no torch, are also named by `engines/registry.py`, `config/methods.py` and
`config/acceptance_rules.py`, and are loaded from there.
"""

from __future__ import annotations

import importlib
from typing import Any

# This module imports torch and transformers, which takes seconds. A process that will need them can import it early.
SLOWEST_MODULE = "harness.local.engine.engine"


def local(name: str) -> Any:
    """Import and return the module `harness.local.<name>`."""
    return importlib.import_module(f"harness.local.{name}")
