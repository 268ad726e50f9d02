"""Recorded conversations as token ids: every answer in as few texts as the chat template allows.

A template may write an earlier turn in another way once the conversation has gone on: those of thinking models drop its
thoughts. What the model answered to is then no beginning of the whole text, and the answer is read in a text that ends
with it. From the last answer to the first, each one that its own prompt precedes in the text at hand shares that text.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal

from harness.config.errors import SettingError
from harness.engines.chat import Chat, Message
from harness.engines.door.reading import Transcript
from harness.engines.tokenizer import Tokenizer
from harness.measuring.prompts.sets import Prompt

Kind = Literal["thinking", "text", "code", "tool name", "tool arguments", "markup"]
# Messages -> their text, and with True the beginning of the answer to them.
Render = Callable[[Chat, bool], str]

_FENCED = re.compile(r"```.*?(```|$)", re.DOTALL)
# Of the private use area: no template writes it.
_OTHER_ANSWER = {"role": "assistant", "content": "\ue000"}


@dataclass(frozen=True)
class Turn:
    """An answer of a conversation.

    Attributes:
        number: from 1; None for the one answer to a prompt.
        kinds: of each of its tokens; none where they are not known.
    """

    number: int | None
    kinds: Sequence[Kind] = ()


@dataclass(frozen=True)
class Reading:
    """A transcript of a prompt, and the turns that its answers are."""

    prompt: Prompt
    transcript: Transcript
    turns: Sequence[Turn]

    def until(self, num_tokens: int) -> Reading | None:
        """The part that so many tokens hold; None without an answer of two tokens."""
        answers = []
        turns = []
        for answer, turn in zip(self.transcript.answers, self.turns, strict=True):
            held = range(answer.start, min(answer.stop, num_tokens))
            # An iteration decides the tokens after the first one.
            if len(held) > 1:
                answers.append(held)
                turns.append(dataclasses.replace(turn, kinds=turn.kinds[: len(held)]))
        if not answers:
            return None
        transcript = Transcript(self.transcript.token_ids[: answers[-1].stop], answers)
        return Reading(self.prompt, transcript, turns)


def readings_of(
    prompt: Prompt, tokenizer: Tokenizer, render: Render, *, adds_special_tokens: bool
) -> list[Reading]:
    """The transcripts of a conversation, which have each answer once.

    Args:
        adds_special_tokens: whether the tokenizer begins a text as it does by itself.

    Raises:
        SettingError: a template whose text of a conversation does not go on with an answer.
    """
    chat = prompt.conversation

    def tokens_of(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=adds_special_tokens)["input_ids"])

    answers = [
        place
        for place, message in enumerate(chat.messages)
        if place > 0 and message["role"] == "assistant"
    ]
    readings = []
    for text, spans in _texts(prompt, chat, answers, render):
        _, first = spans[0]
        begin = first.start
        token_ids = tokens_of(text[:begin])
        places: list[range] = []
        turns: list[Turn] = []
        for place, characters in spans:
            between, _ = _behind_others(tokenizer, text[begin : characters.start])
            token_ids += between
            answer = text[characters.start : characters.stop]
            own, offsets = _behind_others(tokenizer, answer)
            places.append(range(len(token_ids), len(token_ids) + len(own)))
            kinds = _kinds(chat.messages[place], answer, offsets)
            turns.append(Turn(answers.index(place) + 1, kinds))
            token_ids += own
            begin = characters.stop
        if len(spans) == 1 or token_ids == tokens_of(text[:begin]):
            readings.append(Reading(prompt, Transcript(token_ids, places), turns))
            continue
        # Some token has characters on both sides of where an answer begins or ends.
        for (_, characters), own_places, turn in zip(spans, places, turns, strict=True):
            answered = token_ids[own_places.start : own_places.stop]
            transcript = Transcript.of(tokens_of(text[: characters.start]), answered)
            readings.append(Reading(prompt, transcript, [turn]))
    return readings


def _behind_others(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    """Token ids of a text that follows another, and the characters of each token; none from slow tokenizers.

    By itself a text may begin with a space that the tokenizer adds.
    """
    options = {
        "add_special_tokens": False,
        "return_offsets_mapping": getattr(tokenizer, "is_fast", False),
    }
    line_break = list(tokenizer("\n", **options)["input_ids"])
    encoded = tokenizer("\n" + text, **options)
    num_before = len(line_break)
    shift = 1
    if list(encoded["input_ids"])[:num_before] != line_break:
        # A token has the line break and some of the text.
        encoded = tokenizer(text, **options)
        num_before = shift = 0
    offsets = encoded.get("offset_mapping", ())[num_before:]
    characters = [(begin - shift, end - shift) for begin, end in offsets]
    return list(encoded["input_ids"])[num_before:], characters


def _texts(
    prompt: Prompt, chat: Chat, answers: Sequence[int], render: Render
) -> list[tuple[str, list[tuple[int, range]]]]:
    """Texts, each with the answers that it ends: the place of each message, and its characters."""
    texts: list[tuple[str, list[tuple[int, range]]]] = []
    for place in reversed(answers):
        asked = Chat(chat.messages[:place], chat.tools)
        before = render(asked, True)
        # What ends a message is the model's own, but not the line break behind it.
        after = render(Chat(chat.messages[: place + 1], chat.tools), False).rstrip()
        if texts:
            text, spans = texts[-1]
            if text.startswith(after) and text.startswith(before):
                if len(after) > len(before):
                    spans.insert(0, (place, range(len(before), len(after))))
                continue
        begin = len(before)
        if not after.startswith(before):
            # The prompt ends with an empty thought that the message lacks. The answer begins where prompt, text and a
            # text with another answer part. Without the third one, the "<" of "<html>" would be that of "<think>".
            other = render(Chat((*asked.messages, _OTHER_ANSWER), chat.tools), False)
            characters = zip(before, after, other, strict=False)
            begin = len(list(takewhile(lambda three: len(set(three)) == 1, characters)))
            where = f"message {place + 1} of line {prompt.line}"
            if begin < len(render(asked, False).rstrip()):
                rule = f"this model's template hides the answer in {where}"
                raise SettingError("prompts", rule)
            if before.rfind("<think>", begin) > before.rfind("</think>", begin):
                rule = f"this model's template asks for thoughts, and leaves out those of {where}"
                raise SettingError("prompts", rule)
        if answer := after[begin:]:
            # What the model read, its empty thought too, and then the answer.
            whole = before + answer
            texts.append((whole, [(place, range(len(before), len(whole)))]))
    return texts[::-1]


def _kinds(message: Message, answer: str, offsets: Sequence[tuple[int, int]]) -> Sequence[Kind]:
    """The kind of each token of an answer, by what its message says."""
    of_character: list[Kind] = ["markup"] * len(answer)
    for begin, end, kind in _marked(message, answer):
        of_character[begin:end] = [kind] * (end - begin)
    last = len(answer) - 1
    return [of_character[min((begin + end) // 2, last)] for begin, end in offsets]


def _marked(message: Message, answer: str) -> Iterator[tuple[int, int, Kind]]:
    """Where the parts of a message are in its text; what the template adds is in none of them."""
    thought = message.get("reasoning_content", "")
    content = message["content"]
    if not thought and "</think>" in content:
        thought, _, content = content.partition("</think>")
        thought = thought.replace("<think>", "")
    end = 0
    parts: list[tuple[str, Kind]] = [(thought.strip(), "thinking"), (content.strip(), "text")]
    for part, kind in parts:
        begin = answer.find(part, end)
        if part and begin >= 0:
            end = begin + len(part)
            yield begin, end, kind
            if kind == "text":
                for code in _FENCED.finditer(answer, begin, end):
                    yield code.start(), code.end(), "code"
    for call in message.get("tool_calls", ()):
        name = call["function"]["name"]
        begin = answer.find(name, end)
        if begin >= 0:
            end = begin + len(name)
            yield begin, end, "tool name"
        first = None
        for value in _values(json.loads(call["function"]["arguments"])):
            # As JSON, or as it is: templates that write arguments as XML do not escape them.
            for written in (json.dumps(value, ensure_ascii=False)[1:-1], value):
                begin = answer.find(written, end)
                if begin >= 0:
                    first = begin if first is None else first
                    end = begin + len(written)
                    break
        if first is not None:
            yield first, end, "tool arguments"


def _values(value: Any) -> Iterator[str]:
    """The names and values of arguments."""
    if isinstance(value, dict):
        for name, own in value.items():
            yield name
            yield from _values(own)
    elif isinstance(value, list):
        for own in value:
            yield from _values(own)
    else:
        yield value if isinstance(value, str) else json.dumps(value)
