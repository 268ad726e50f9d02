"""Recorded conversations as token ids: every answer follows exactly what the model was asked."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness.config.errors import SettingError
from harness.engines.protocol import Chat
from harness.measuring.prompts.chat_templates import Template
from harness.measuring.prompts.sets import Prompt
from harness.measuring.prompts.transcripts import Reading, readings_of
from tiny_checkpoints import make_tokenizer

# As templates of Qwen have it: calls as JSON, and thoughts only behind the user's last message.
QWEN = """\
{%- for t in tools or [] %}<tool>{{ t | tojson }}</tool>\n{% endfor -%}
{%- set ns = namespace(last=-1) -%}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor -%}
{%- for m in messages -%}
{{- '<|' + m.role + '|>\n' -}}
{%- if m.reasoning_content and loop.index0 > ns.last -%}
{{- '<think>\n' + m.reasoning_content + '\n</think>\n\n' -}}
{%- endif -%}
{{- m.content -}}
{%- for call in m.tool_calls or [] %}
<call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</call>
{%- endfor -%}
{{- '<|end|>\n' -}}
{%- endfor -%}
{%- if add_generation_prompt %}<|assistant|>\n{{ '<think>\n\n</think>\n\n' if no_thoughts }}{% endif -%}"""
PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def call(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}


ASKED = {"role": "user", "content": "Where is a?"}
FOUND = {"role": "tool", "content": "b/a", "tool_call_id": "1"}
CALLS = [call("find", {"path": "a", "most": 3})]
CALLED = {"role": "assistant", "content": "", "tool_calls": CALLS}
SAID = {"role": "assistant", "content": "Here:\n```\ncd b\n```\nDone."}
MORE = {"role": "user", "content": "And c?"}
TOOLS = ({"type": "function", "function": {"name": "find"}},)


def thinking(message: dict[str, Any], thought: str) -> dict[str, Any]:
    return {**message, "reasoning_content": thought}


def conversation(*messages: dict[str, Any]) -> Prompt:
    return Prompt("", messages=messages, tools=TOOLS, line=7)


def read(prompt: Prompt, tokenizer: Any, **arguments: Any) -> list[Reading]:
    """The readings of a conversation, each answer of which follows what the model was asked."""
    readings = readings_of(prompt, template := Template(tokenizer, "auto", arguments))
    messages = prompt.conversation.messages
    places = [place for place, message in enumerate(messages) if message["role"] == "assistant"]
    for reading in readings:
        for answer, turn in zip(reading.transcript.answers, reading.turns, strict=True):
            asked = Chat(messages[: places[turn - 1]], prompt.tools)
            [before] = template.encode([asked])
            assert list(reading.transcript.token_ids[: answer.start]) == before
    assert sorted(turn for one in readings for turn in one.turns) == [*range(1, len(places) + 1)]
    return readings


def texts(reading: Reading, tokenizer: Any) -> list[str]:
    return [
        tokenizer.decode(reading.transcript.token_ids[answer.start : answer.stop])
        for answer in reading.transcript.answers
    ]


def test_answers_of_a_conversation_are_in_one_text() -> None:
    tokenizer = make_tokenizer(chat_template=QWEN)
    [reading] = read(conversation(ASKED, CALLED, FOUND, SAID, MORE, CALLED), tokenizer)
    called = '<call>\n{"name": "find", "arguments": {"path": "a", "most": 3}}\n</call><|end|>'
    said = f"{SAID['content']}<|end|>"
    assert [text.lstrip() for text in texts(reading, tokenizer)] == [called, said, called]


def test_where_a_template_drops_thoughts_each_turn_is_read_with_its_own() -> None:
    """The answers to one question share a text; that of the whole conversation has none of the first one's thoughts."""
    tokenizer = make_tokenizer(chat_template=QWEN)
    first = [ASKED, thinking(CALLED, "Look."), FOUND, thinking(SAID, "So b.")]
    then = [MORE, thinking(CALLED, "Again."), FOUND, SAID]
    readings = read(conversation(*first, *then), tokenizer)
    assert [list(one.turns) for one in readings] == [[1, 2], [3, 4]]
    assert "Look." in texts(readings[0], tokenizer)[0]
    assert "Again." in texts(readings[1], tokenizer)[0]
    assert "Look." not in tokenizer.decode(readings[1].transcript.token_ids)


def test_answers_do_not_begin_with_a_space_that_the_tokenizer_adds() -> None:
    """As SentencePiece of Llama 2 and Mistral does at the beginning of a text."""
    names = ["<s>", "</s>", "▁", *sorted(set(PLAIN + "Where is a?And c"))]
    tokenizer = Tokenizer(models.BPE({name: place for place, name in enumerate(names)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    spaced = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    spaced.chat_template = PLAIN
    said = {"role": "assistant", "content": "is"}
    [reading] = read(conversation(ASKED, said, MORE, said), spaced)
    for answer in reading.transcript.answers:
        answered = reading.transcript.token_ids[answer.start : answer.stop]
        assert spaced.convert_ids_to_tokens(answered) == [*"is</s>"]


def test_a_template_that_asks_for_thoughts_and_drops_them_is_refused() -> None:
    """As that of DeepSeek R1: the prompt opens a thought, and the answer would be read as one."""
    drops = PLAIN.replace("<assistant>", "<assistant><think>\n")
    with pytest.raises(SettingError, match="leaves out those of message 2 of line 7"):
        read(conversation(ASKED, SAID), make_tokenizer(chat_template=drops))


def test_a_transcript_ends_where_the_context_does() -> None:
    tokenizer = make_tokenizer(chat_template=PLAIN)
    [reading] = read(conversation(ASKED, SAID, MORE, SAID), tokenizer)
    second = reading.transcript.answers[1]
    cut = reading.until(second.start + 3)
    whole = len(reading.transcript.answers[0])
    assert [len(answer) for answer in cut.transcript.answers] == [whole, 3]
    one = reading.until(second.start + 1)
    assert len(one.turns) == 1
    assert reading.until(5) is None
