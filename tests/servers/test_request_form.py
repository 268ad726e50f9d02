from __future__ import annotations

import dataclasses

from echo_questions import TOKENIZER, ask
from harness.servers.dialects import DIALECTS, UNKNOWN
from harness.servers.request_form import RequestForm


def test_a_request_without_extensions_has_texts_to_stop_at() -> None:
    form = RequestForm(TOKENIZER, "tiny", DIALECTS["vllm"], False, False, False)
    body = form.body(dataclasses.replace(ask(top_k=0), ends=("m",)).requests[0])
    assert body["stop"] == ["m"]


def test_a_server_that_refuses_a_top_p_of_1_does_not_get_it() -> None:
    # Text Generation Inference: "`top_p` must be > 0.0 and < 1.0", with status 422.
    form = RequestForm(TOKENIZER, "tiny", UNKNOWN, False, False, False)
    assert "top_p" not in form.body(ask(top_k=0).requests[0])
    assert form.body(ask(top_k=0, top_p=0.9).requests[0])["top_p"] == 0.9
