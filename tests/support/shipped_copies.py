"""Copies of the shipped `tiny_draft`, and the one with a single layer, a draft for tests where any model will do."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

from harness.config.installation import PACKAGE

SHIPPED = PACKAGE / "local" / "models" / "shipped"
# `conftest` saves it once, for all processes.
ONE_LAYER = Path(os.environ["HARNESS_TESTS_SHARED"]) / "one_layer"


def copy_shipped(directory: Path, **changes: Any) -> None:
    """Copy the model with changes to its configuration; weights of layers that it then lacks are not read."""
    shutil.copytree(SHIPPED / "tiny_draft", directory)
    file = directory / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))
