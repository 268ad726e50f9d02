"""Prompts and recorded conversations as token ids: with and without a chat template, and those that are too long."""

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from harness.commands.latency.record import LatencySettings
from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings, PromptSettings
from harness.engines.protocol import Chat
from harness.measuring.prompts import encoding
from harness.measuring.prompts.chat_templates import Template
from harness.measuring.prompts.sets import Prompt, PromptSet
from harness.measuring.prompts.transcripts import Reading, readings_of
from some_settings import settings_of
from tiny_checkpoints import make_tokenizer


@pytest.fixture
def by_letters(monkeypatch: pytest.MonkeyPatch) -> Callable[..., encoding.Encoder]:
    """An encoder whose tokens are the places of letters, for models that have room for so many before four new ones."""

    def encode(_: object, prompts: Sequence[Prompt]) -> list[list[int]]:
        chats = [prompt.chat().messages for prompt in prompts]
        return [[*range(sum(len(message["content"]) for message in chat))] for chat in chats]

    def encoder(room: int, too_long: Any = None, **changes: Any) -> encoding.Encoder:
        def excess(longest: int, *_: object) -> str | None:
            return f"models take {room + 4}" if longest > room else None

        tokenizer = SimpleNamespace(bos_token_id=0, chat_template=None)
        planned: Any = SimpleNamespace(room=lambda _: room, excess=excess, tokenizer=tokenizer)
        mine = PromptSettings(name="mine", file="mine.txt", too_long=too_long)
        return encoding.Encoder(planned, settings_of(LatencySettings, prompts=mine, **changes))

    monkeypatch.setattr(encoding.Encoder, "encode", encode)
    return encoder


def encode_set(
    encoder: encoding.Encoder, *prompts: Prompt, num_others: int = 0, num_measured: int = 9
) -> encoding.Encoded:
    numbered = tuple(replace(one, index=place, line=place + 1) for place, one in enumerate(prompts))
    prompt_set = PromptSet("mine", numbered, "digest")
    return encoder.encode_set(prompt_set, numbered[:num_measured], 4, num_others=num_others)


@pytest.mark.parametrize(
    ("lengths", "room", "too_long", "expected", "num_skipped"),
    [
        ([3, 10], 10, "skip", [3, 10], 0),
        ([11, 3, 10], 10, "skip", [3, 10], 1),
        ([1], 1, None, [1], 0),
        ([3, 11], 10, None, "1 of 2 prompts are too long .line 2 of mine.txt.; the longest has 11 tokens; ", 0),
        ([3, 11], 10, None, "prompts.too_long=skip leaves them out", 0),
        ([11], 10, "skip", "prompts.too_long=skip leaves none", 0),
        ([2], 1, None, "the longest has 2 tokens; models take 5", 0),
        ([1], 0, None, "leaves no room for a prompt: the context has 4 tokens, and 4 are new", 0),
    ],
)  # fmt: skip
def test_prompts_that_are_too_long_are_refused_or_left_out(
    by_letters: Any, lengths: Any, room: int, too_long: str | None, expected: Any, num_skipped: int
) -> None:
    prompts = [Prompt("a" * length) for length in lengths]
    if isinstance(expected, str):
        with pytest.raises(SettingError, match=expected):
            encode_set(by_letters(room, too_long), *prompts)
        return
    encoded = encode_set(by_letters(room, too_long), *prompts)
    assert (encoded.num_skipped, [*map(len, encoded.token_ids)]) == (num_skipped, expected)
    assert (encoded.longest, encoded.longest_turn) == (max(expected), max(expected))
    assert len(encoded.chats) == len(expected)


@pytest.mark.parametrize(
    ("count", "bos_token", "expected"), [(4, 1, [1, 5, 6, 7]), (3, 1, [1, 6, 7]), (3, 5, [5, 6, 7])]
)
def test_the_last_tokens_come_behind_the_one_that_begins_the_text(
    count: int, bos_token: int, expected: list[int]
) -> None:
    assert encoding.last([1, 5, 6, 7], count, bos_token) == expected


def test_a_conversation_needs_room_for_the_answers_before_its_last_turn(by_letters: Any) -> None:
    """Each of two answers has four tokens, and may grow by eight when it is read again."""
    talk = Prompt("ab", turns=("ab", "c", "de"))
    assert encode_set(by_letters(29), talk, Prompt("a")).longest_turn == 5 + 2 * (4 + 8)
    with pytest.raises(SettingError, match="has 29 tokens, with the answers before its last turn;"):
        encode_set(by_letters(28), talk)
    skipped = encode_set(by_letters(28, "skip"), talk, Prompt("a"))
    assert (skipped.num_skipped, len(skipped.prompts)) == (1, 1)


def test_a_warm_up_reads_short_prompts_that_are_not_measured(by_letters: Any) -> None:
    """At most four are looked at for each one that it takes."""
    prompts = [Prompt("a" * length) for length in (5, 6, 5, 3, 7, 1)]
    others = encode_set(by_letters(10), *prompts, num_measured=1, num_others=1).others
    assert others.indices == [2, 3]
    assert [*map(len, others.token_ids)] == [5, 3]


TEMPLATE = "{% for m in messages %}<s>{{ m['content'] }}{% endfor %}{% if add_generation_prompt %}:{% endif %}"


def said(*texts: str) -> Chat:
    """A chat in which user and assistant take turns."""
    turns = zip(itertools.cycle(("user", "assistant")), texts, strict=False)
    return Chat(tuple({"role": role, "content": text} for role, text in turns))


LOUD = "{% if loud %}b{% endif %}{{ messages[0]['content'] }}"


def test_a_chat_is_encoded_with_and_without_a_template() -> None:
    for template, mode, arguments, chat, text in [
        (None, "auto", {}, said("ab"), "ab"),
        (None, "never", {}, said("b"), "b"),
        (TEMPLATE, "auto", {}, said("a"), "<s>a:"),
        (TEMPLATE, "always", {}, said("a", "b", "a"), "<s>a<s>b<s>a:"),
        (TEMPLATE, "never", {}, said("a"), "a"),
        (TEMPLATE, "never", {}, said("a", "b", "a"), "user: a\nassistant: b\nuser: a\nassistant:"),
        (LOUD, "auto", {}, said("a"), "a"),
        (LOUD, "auto", {"loud": True}, said("a"), "ba"),
    ]:
        tokenizer = make_tokenizer(chat_template=template)
        mine = PromptSettings(name="mine", file="mine.txt", template_arguments=arguments)
        settings = settings_of(LatencySettings, prompts=mine, chat_template=mode)
        encoded, other = encoding._template(tokenizer, settings).encode([chat, said("b")])
        assert tokenizer.decode(encoded) == text
        assert tokenizer.get_vocab()["b"] in other


def test_texts_go_on_after_their_end_but_in_chats() -> None:
    for lengths, template, ignore_eos, goes_on in [
        ((), "auto", "auto", False),
        # Prompts of given lengths are cut texts, and no chats.
        ((512,), "auto", "auto", True),
        ((), "never", "auto", True),
        ((), "auto", True, True),
    ]:
        mine = PromptSettings(name="mine", file="mine.txt", lengths=lengths)
        decoding = DecodingSettings(ignore_eos=ignore_eos)
        asked = {"prompts": mine, "decoding": decoding, "chat_template": template}
        settings = settings_of(LatencySettings, **asked)
        tokenizer = make_tokenizer(chat_template=TEMPLATE)
        assert encoding.decide_ignore_eos(settings, tokenizer).decoding.ignore_eos == goes_on


SYSTEM = Chat(({"role": "system", "content": "Be brief."}, {"role": "user", "content": "a"}))


def test_a_chat_that_a_template_cannot_show_is_refused() -> None:
    for template, chat, mode, setting, word in [
        ("{{ raise_exception('no system') }}", said("a"), "auto", "chat_template", "no system"),
        ({"rag": TEMPLATE, "tool_use": TEMPLATE}, said("a"), "auto", "chat_template", "no default"),
        (
            "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
            said("a"),
            "auto",
            "chat_template",
            "recursion depth",
        ),
        (
            "{% for i in range(10 ** 9) %}{% endfor %}",
            said("a"),
            "auto",
            "chat_template",
            "Range too big",
        ),
        (None, said("a"), "always", "chat_template", "has none"),
        (None, said("a", "b", "c"), "auto", "chat_template", "of several messages"),
        (None, SYSTEM, "auto", "chat_template", "chats of several messages"),
        (None, said(""), "auto", "prompts", "has no tokens"),
    ]:
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        with pytest.raises(SettingError, match=word) as refused:
            Template(tokenizer, mode).encode([chat])
        assert refused.value.setting == setting


def test_tools_need_a_template_that_shows_them() -> None:
    find = {"type": "function", "function": {"name": "b"}}
    chat = Chat(said("a").messages, (find,))
    shows = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}" + TEMPLATE
    tokenizer = make_tokenizer(chat_template=shows)
    Template(tokenizer, "auto").check_tools([said("a"), chat])
    [ids] = Template(tokenizer, "auto").encode([chat])
    assert ids[0] == tokenizer.get_vocab()["b"]

    with pytest.raises(SettingError, match=r"^prompts: 1 of 2 prompts have tools"):
        Template(make_tokenizer(chat_template=TEMPLATE), "auto").check_tools([said("a"), chat])
    with pytest.raises(SettingError, match=r"^chat_template=never: 1 of 2 prompts have tools"):
        Template(tokenizer, "never").check_tools([said("a"), chat])
    Template(make_tokenizer(), "auto").check_tools([said("a")])


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
    transcript = reading.transcript
    parts = [transcript.token_ids[answer.start : answer.stop] for answer in transcript.answers]
    return [tokenizer.decode(part) for part in parts]


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
