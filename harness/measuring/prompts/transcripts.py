"""Recorded conversations as token ids: every answer in as few texts as the chat template allows.

A template may write an earlier turn in another way once the conversation has gone on: those of thinking models drop its
thoughts. What the model answered to is then no beginning of the whole text, and the answer is read in a text that ends
with it. From the last answer to the first, each one that its own prompt precedes in the text at hand shares that text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.config.amounts import length_in_common
from harness.config.errors import SettingError
from harness.engines.door.reading import Transcript
from harness.engines.protocol import Chat
from harness.engines.tokenizer import tokens_behind
from harness.measuring.prompts.chat_templates import Template
from harness.measuring.prompts.sets import Prompt

# Of the private use area: no template writes it.
_OTHER_ANSWER = {"role": "assistant", "content": "\ue000"}


@dataclass(frozen=True)
class Reading:
    """A transcript of a prompt.

    Attributes:
        turns: for each of its answers the turn of the conversation, from 1; None for the one answer to a prompt.
    """

    prompt: Prompt
    transcript: Transcript
    turns: Sequence[int | None]

    def until(self, num_tokens: int) -> Reading | None:
        """The first `num_tokens` of it; None without an answer of two tokens."""
        answers = []
        turns = []
        for answer, turn in zip(self.transcript.answers, self.turns, strict=True):
            held = range(answer.start, min(answer.stop, num_tokens))
            # An iteration decides the tokens after the first one.
            if len(held) > 1:
                answers.append(held)
                turns.append(turn)
        if not answers:
            return None
        transcript = Transcript(self.transcript.token_ids[: answers[-1].stop], answers)
        return Reading(self.prompt, transcript, turns)


def readings_of(prompt: Prompt, template: Template) -> list[Reading]:
    """The transcripts of a conversation, which have each answer once.

    Raises:
        SettingError: a template whose text of a conversation does not go on with an answer.
    """
    chat = prompt.conversation
    tokenizer = template.tokenizer

    def tokens_of(text: str) -> list[int]:
        # A template has written the special tokens itself.
        return list(tokenizer(text, add_special_tokens=not template.is_used)["input_ids"])

    answers = [
        index
        for index, message in enumerate(chat.messages)
        if index > 0 and message["role"] == "assistant"
    ]
    readings = []
    for text, spans in _texts(prompt, chat, answers, template):
        _, first = spans[0]
        begin = first.start
        token_ids = tokens_of(text[:begin])
        places: list[range] = []
        turns: list[int] = []
        for place, characters in spans:
            token_ids += tokens_behind(tokenizer, text[begin : characters.start])
            answer_ids = tokens_behind(tokenizer, text[characters.start : characters.stop])
            places.append(range(len(token_ids), len(token_ids) + len(answer_ids)))
            turns.append(answers.index(place) + 1)
            token_ids += answer_ids
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


def _texts(
    prompt: Prompt, chat: Chat, answers: Sequence[int], template: Template
) -> list[tuple[str, list[tuple[int, range]]]]:
    """Texts, each with the answers that it ends: the place of each message, and its characters."""
    texts: list[tuple[str, list[tuple[int, range]]]] = []
    for place in reversed(answers):
        asked = Chat(chat.messages[:place], chat.tools)
        before = template.text(asked, asks=True)
        # What ends a message is the model's own, but not the line break behind it.
        after = template.text(Chat(chat.messages[: place + 1], chat.tools), asks=False).rstrip()
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
            other = template.text(Chat((*asked.messages, _OTHER_ANSWER), chat.tools), asks=False)
            begin = length_in_common(before, after, other)
            where = f"message {place + 1} of line {prompt.line}"
            if begin < len(template.text(asked, asks=False).rstrip()):
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
