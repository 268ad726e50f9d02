from __future__ import annotations

import dataclasses

import pytest

from echo_questions import TOKENIZER, ask
from harness.servers.dialects import DIALECTS, UNKNOWN
from harness.servers.request_form import RequestForm

# Our parameters that TensorRT-LLM 1.3 knows (serve/openai_protocol.py, `extra="forbid"`); any other one is refused.
TENSORRT_LLM = set(
    "model prompt messages max_tokens temperature top_p stream stream_options top_k min_p repetition_penalty"
    " ignore_eos stop_token_ids".split()
)


@pytest.mark.parametrize("chat", [False, True])
def test_a_strict_server_gets_what_it_knows(chat: bool) -> None:
    form = RequestForm(TOKENIZER, "tiny", DIALECTS["tensorrt_llm"], chat, True, True, False)
    body = form.body(dataclasses.replace(ask(top_k=0), salts=("a",)).requests[0])
    # Its chats have a salt, its completions have none.
    assert body.keys() - TENSORRT_LLM == ({"cache_salt"} if chat else set())
    assert form.salts == chat
    # It refuses -1 for all tokens, as vLLM and SGLang have it.
    assert body["top_k"] == 0
    assert body["ignore_eos"] is True


def test_a_request_without_extensions_has_texts_to_stop_at() -> None:
    form = RequestForm(TOKENIZER, "tiny", DIALECTS["tensorrt_llm"], False, False, False)
    body = form.body(dataclasses.replace(ask(top_k=0), ends=("m",)).requests[0])
    assert body["stop"] == ["m"]


def test_a_server_that_refuses_a_top_p_of_1_does_not_get_it() -> None:
    # Text Generation Inference: "`top_p` must be > 0.0 and < 1.0", with status 422.
    form = RequestForm(TOKENIZER, "tiny", UNKNOWN, False, False, False)
    assert "top_p" not in form.body(ask(top_k=0).requests[0])
    assert form.body(ask(top_k=0, top_p=0.9).requests[0])["top_p"] == 0.9
