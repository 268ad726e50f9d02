"""Which answers can be compared with the model's own probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.config.engines import EngineSettings
from harness.engines.protocol import Traits
from harness.measuring.references import References
from harness.servers.settings import ServerSettings

URL = "http://localhost:8000/v1"
GRAMMAR = {"response_format": {"type": "json_object"}}


@pytest.mark.parametrize(
    ("settings", "reports_token_ids", "has_tokens", "has_texts"),
    [
        (EngineSettings(), True, True, True),
        (ServerSettings(url=URL), False, False, True),
        # The model's distribution after a text is none of the chat that a server makes of it.
        (ServerSettings(url=URL, chat=True), True, False, False),
        (ServerSettings(url=URL, extra=GRAMMAR), True, False, False),
    ],
)
def test_a_reference_is_for_what_the_model_read(
    settings: EngineSettings, reports_token_ids: bool, has_tokens: bool, has_texts: bool
) -> None:
    own = object()
    arm = SimpleNamespace(traits=Traits(reports_token_ids=reports_token_ids))
    engine: Any = SimpleNamespace(weights=SimpleNamespace(reference=own), arms=[arm])
    run: Any = SimpleNamespace(engine=settings)
    planned: Any = None
    references = References(run, planned, engine)
    assert references.for_tokens() is (own if has_tokens else None)
    assert references.for_texts() is (own if has_texts else None)
