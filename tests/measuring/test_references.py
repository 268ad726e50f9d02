"""Which answers can be compared with the model's own probabilities."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.measuring.references import References


@pytest.mark.parametrize(
    ("settings", "reports_token_ids", "has_tokens", "has_texts"),
    [
        ({}, True, True, True),
        ({"chat": False}, False, False, True),
        # The model's distribution after a text is none of the chat that a server makes of it.
        ({"chat": True}, True, False, False),
    ],
)
def test_a_reference_is_for_what_the_model_read(
    settings: dict[str, Any], reports_token_ids: bool, has_tokens: bool, has_texts: bool
) -> None:
    own = object()
    session: Any = SimpleNamespace(
        settings=SimpleNamespace(engine=SimpleNamespace(**settings)),
        engine=SimpleNamespace(reference=own, reports_token_ids=reports_token_ids),
    )
    references = References(session)
    assert references.for_tokens() is (own if has_tokens else None)
    assert references.for_texts() is (own if has_texts else None)
