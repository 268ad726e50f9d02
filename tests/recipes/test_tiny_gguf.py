"""The shipped pair as GGUF files, in a real llama-server."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from chains import request, texts
from harness.local.runners.snapshot import SnapshotRunner
from loops import autoregressive
from real_servers import gguf_pair, llama_serving, post
from recipes.tiny_gguf import PAIR, SHIPPED

# Sums are split into digits, the umlaut into bytes.
PROMPTS = [
    "Lily has 34 apples and 7 pears.",
    "One cold evening, a kind mouse named Paul went to the meadow. More than anything, he",
    "Jörg's  cat",
]
NEW_TOKENS = 24


@pytest.mark.parametrize("name", PAIR)
def test_a_llama_server_writes_what_our_loop_writes(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED / name)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED / name, dtype=torch.float32).eval()
    prompts = [tokenizer(prompt)["input_ids"] for prompt in PROMPTS]
    end = tokenizer.eos_token_id
    loop = autoregressive(SnapshotRunner(model), request(prompts, length=NEW_TOKENS, stop=[end]))
    expected = texts(loop, len(prompts))
    with llama_serving(gguf_pair()[PAIR.index(name)]) as url:
        found: list[Any] = [post(f"{url}/tokenize", {"content": text}) for text in PROMPTS]
        assert [answer["tokens"] for answer in found] == prompts
        asked = {"n_predict": NEW_TOKENS, "temperature": 0, "return_tokens": True}
        found = [post(f"{url}/completion", {"prompt": text, **asked}) for text in PROMPTS]
        # llama.cpp leaves out the token that ends a text.
        assert [answer["tokens"] for answer in found] == [
            [token for token in text if token != end] for text in expected
        ]
        chat = {"messages": [{"role": "user", "content": PROMPTS[1]}]}
        assert post(f"{url}/apply-template", chat)["prompt"] == PROMPTS[1]
