"""Set-up for tests of the wing with the models."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    """What is tested runs as an arm runs it."""
    with torch.inference_mode():
        yield
