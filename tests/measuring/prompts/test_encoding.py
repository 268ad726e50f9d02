"""Prompts that are too long for one of the models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.commands.latency.record import LatencySettings
from harness.config.errors import SettingError
from harness.config.settings import PromptSettings
from harness.engines.door.pairs import Excess
from harness.measuring.prompts import encoding
from harness.measuring.prompts.sets import Prompt, PromptSet
from harness.servers import record as server
from some_settings import settings_of

ROOM = 10


@pytest.mark.parametrize(
    ("too_long", "lengths"),
    [(None, [3, 3]), ("skip", [3, 2 * ROOM]), ("truncate", [3, 2 * ROOM])],
)
def test_prompts_too_long_for_a_draft_with_another_tokenizer_are_refused(
    too_long: str | None, lengths: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that are left fit in the target's tokens, and not in the draft's."""
    token_ids = [[1] * length for length in lengths]
    monkeypatch.setattr(encoding, "encode", lambda *_: token_ids)
    planned: Any = SimpleNamespace(
        room=lambda new_tokens: ROOM,
        excess=lambda *_: Excess(30, "and draft=other takes 20"),
        tokenizer=SimpleNamespace(bos_token_id=0),
    )
    mine = PromptSettings(name="mine", file="mine.txt", too_long=too_long)
    settings = settings_of(LatencySettings, prompts=mine)
    prompts = tuple(Prompt(f"text {line}", line=line) for line in (1, 2))
    prompt_set = PromptSet("mine", prompts, "digest")
    with pytest.raises(SettingError) as refused:
        encoding.encode_set(planned, settings, prompt_set, prompts, new_tokens=4)
    expected = "prompts: the longest has 30 tokens; and draft=other takes 20"
    assert str(refused.value) == expected


def test_chats_with_tools_are_sent_whole_or_not_at_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encoding, "encode", lambda *_: [[1] * 3, [1] * 30])
    planned: Any = SimpleNamespace(
        room=lambda new_tokens: ROOM,
        excess=lambda *_: None,
        tokenizer=SimpleNamespace(bos_token_id=0, chat_template=None),
    )
    tool = {"type": "function", "function": {"name": "rain"}}
    prompts = tuple(
        Prompt(text, messages=({"role": "user", "content": text},), tools=(tool,), line=line)
        for line, text in enumerate(("short", "long"), start=1)
    )
    prompt_set = PromptSet("mine", prompts, "digest")

    def encoded(too_long: Any, *, chat: bool) -> encoding.Encoded:
        mine = PromptSettings(name="mine", file="mine.jsonl", too_long=too_long)
        engine = server.ServerSettings(name="server", url="http://127.0.0.1:1/v1", chat=chat)
        settings = settings_of(LatencySettings, prompts=mine, engine=engine)
        return encoding.encode_set(planned, settings, prompt_set, prompts, new_tokens=4)

    with pytest.raises(
        SettingError, match=r"truncate: 1 of 2 .*, and chats with tools are sent whole"
    ):
        encoded("truncate", chat=True)
    assert encoded("skip", chat=True).chats == [prompts[0].chat()]
    # As token ids through the template, they lose their beginning, and a line says so.
    assert [*map(len, encoded("truncate", chat=False).token_ids)] == [3, ROOM]
