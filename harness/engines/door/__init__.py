"""The door to `harness.local`, the part of the code that runs models: `local` imports one of its modules by name, when
the module is needed.

    planned = local("engine.pair").plan_pair(model, draft, placement)

The modules of this package define the classes of the values that come back. Types of `harness.local` are imported under
TYPE_CHECKING only. There is one other way in, for classes that import no torch: `engines/record.py`,
`config/methods.py` and `config/acceptance_rules.py` contain the names of some classes in `harness.local`, and import
these classes when they are looked up.
"""

from __future__ import annotations

import importlib
from typing import Any

# Importing this module takes seconds, because it imports torch and transformers. A process that will need them can
# import it early.
SLOWEST_MODULE = "harness.local.engine.engine"


def local(name: str) -> Any:
    """Import and return the module `harness.local.<name>`."""
    return importlib.import_module(f"harness.local.{name}")
