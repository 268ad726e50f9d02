"""Tokens after the end of a text, and texts that end by themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.config.settings import ModelSettings
from harness.engines.protocol import Answered
from harness.engines.requests import RequestRecord
from harness.measuring.figures.ends import Ends
from in_process import Harness, results
from measured_runs import figures
from tiny_checkpoints import make_tokenizer

END = 9


def answer(token_ids: list[int], **known: Any) -> RequestRecord:
    return RequestRecord(0, 3, token_ids=token_ids, num_tokens=len(token_ids), **known)


def share_after_end(request: RequestRecord) -> float | None:
    answered = [Answered(requests=[request], seconds=0.0)]
    return figures(Ends, answered, end_tokens={END}).share_after_end


@pytest.mark.parametrize(
    ("token_ids", "share"),
    [([1, 2, 3], 0), ([END, 5, 5, 5], 3 / 4), ([1, 2, 3, 4, END, 5, 5, 5], 3 / 8), ([], None)],
)
def test_tokens_after_the_end_are_a_share_of_all(token_ids: list[int], share: float | None) -> None:
    assert share_after_end(answer(token_ids)) == share
    sent = answer(token_ids, from_text=True)
    assert share_after_end(sent) is None, "text has no token that ends it"


def test_answers_of_a_chat_model_end_by_themselves(
    harness: Harness, save_model: Callable[..., ModelSettings], tmp_path: Path
) -> None:
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    model = save_model("llama", "chat", tokenizer=tokenizer)
    asked = ["latency", f"model={model.name}", "draft=none", "prompts=prompts.txt", "num_prompts=2"]
    asked += ["decoding.max_new_tokens=8", "num_warmup=0"]
    harness(*asked)
    harness(*asked, "chat_template=never")
    harness(*asked, "decoding.ignore_eos=true")
    assert list(results()["ignore_eos"]) == [False, True, True]
