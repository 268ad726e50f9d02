"""Writes recorded conversations as token ids, with all answers in as few texts as the chat template allows.

A template may write an earlier turn differently when later turns follow: the templates of thinking models drop the
thoughts of earlier turns. The text of the whole conversation then does not begin with the prompt that the model
answered. The earlier answer therefore needs a separate text, which ends with this answer. For the conversation "Hi",
"Hello" (answer), "Why?", "So" (answer), such a template writes two texts:

    Hi <think>…</think>Hello                 contains the first answer
    Hi Hello Why? <think>…</think>So         contains the second answer

If the template keeps thoughts, or there are none, the second text begins with the first text and contains both answers.
So answers are visited from the last to the first. An answer shares the text of the previously visited answer if that
text begins with the answer's prompt and the answer.
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
from harness.measuring.prompts.sets import Prompt, answers_in

# A character from the private use area, which no template writes.
_OTHER_ANSWER = {"role": "assistant", "content": "\ue000"}


@dataclass(frozen=True)
class Reading:
    """A transcript, with the prompt that it was made from.

    Attributes:
        turns: for each answer of the transcript, the number of its turn in the conversation, from 1; None for the
            single answer to a prompt.
    """

    prompt: Prompt
    transcript: Transcript
    turns: Sequence[int | None]

    def until(self, num_tokens: int) -> Reading | None:
        """Cut the transcript after `num_tokens` tokens. Answers with fewer than two tokens left are dropped; None if no
        answer remains.
        """
        answers = []
        turns = []
        for answer, turn in zip(self.transcript.answers, self.turns, strict=True):
            held = range(answer.start, min(answer.stop, num_tokens))
            # Only the tokens after an answer's first token are decided by iterations.
            if len(held) > 1:
                answers.append(held)
                turns.append(turn)
        if not answers:
            return None
        transcript = Transcript(self.transcript.token_ids[: answers[-1].stop], answers)
        return Reading(self.prompt, transcript, turns)


def readings_of(prompt: Prompt, template: Template) -> list[Reading]:
    """Make the transcripts of a conversation. Together, they contain once each recorded answer of which the
    template writes anything.

    A message of the assistant that begins the conversation is not an answer. An answer may have a single token.

    Raises:
        SettingError: if the template hides an answer; or if the template's prompt begins a thought, but the template
            then leaves the answer's thoughts out.
    """
    chat = prompt.conversation
    tokenizer = template.tokenizer

    def tokens_of(text: str) -> list[int]:
        # The template has already written the special tokens.
        return tokenizer.encode(text, add_special_tokens=not template.is_used)

    answers = answers_in(chat.messages)
    readings = []
    # The text between two answers and the text of each answer are encoded one after the other, so that the boundaries
    # of the answers are boundaries of tokens.
    for text, spans in _texts(prompt, chat, answers, template):
        _, first = spans[0]
        begin = first.start
        token_ids = tokens_of(text[:begin])
        # For each answer, its indices in `token_ids`.
        own_tokens: list[range] = []
        turns: list[int] = []
        for place, characters in spans:
            token_ids += tokens_behind(tokenizer, text[begin : characters.start])
            answer_ids = tokens_behind(tokenizer, text[characters.start : characters.stop])
            own_tokens.append(range(len(token_ids), len(token_ids) + len(answer_ids)))
            turns.append(answers.index(place) + 1)
            token_ids += answer_ids
            begin = characters.stop
        # Here `begin` is the end of the last answer.
        if len(spans) == 1 or token_ids == tokens_of(text[:begin]):
            readings.append(Reading(prompt, Transcript(token_ids, own_tokens), turns))
            continue
        # Encoded at once, this text has a token that spans the boundary between a prompt and an answer. So each answer
        # gets a transcript by itself, whose prompt is encoded at once.
        for (_, characters), own, turn in zip(spans, own_tokens, turns, strict=True):
            answered = token_ids[own.start : own.stop]
            transcript = Transcript.of(tokens_of(text[: characters.start]), answered)
            readings.append(Reading(prompt, transcript, [turn]))
    return readings


def _texts(
    prompt: Prompt, chat: Chat, answers: Sequence[int], template: Template
) -> list[tuple[str, list[tuple[int, range]]]]:
    """Texts that together contain all answers, in the order of the conversation.

    Each text is returned with its answers. An answer is the place of its message in the chat, and the range of its
    characters in the text. For example, the chat "Hi", "Hello", "Why?", "So" may give a single text with two answers:

        [("<user>Hi<bot>Hello<user>Why?<bot>So", [(1, range(13, 18)), (3, range(33, 35))])]

    Args:
        answers: the places of the messages that are answers.

    Raises:
        SettingError: as `readings_of` does.
    """
    texts: list[tuple[str, list[tuple[int, range]]]] = []
    for place in reversed(answers):
        asked = Chat(chat.messages[:place], chat.tools)
        before = template.text(asked, asks=True)
        # The token that ends a message is the model's own, but not the line break after it.
        after = template.text(Chat(chat.messages[: place + 1], chat.tools), asks=False).rstrip()
        if texts:
            # The text of the answer that was visited before, which comes later in the conversation.
            text, spans = texts[-1]
            if text.startswith(after) and text.startswith(before):
                # An answer of which the template writes nothing is left out.
                if len(after) > len(before):
                    spans.insert(0, (place, range(len(before), len(after))))
                continue
        begin = len(before)
        if not after.startswith(before):
            # Usually, the prompt ends with an empty thought that the text with the answer lacks. The answer begins
            # where three texts first differ: the prompt, the text with the answer, and a text with another answer.
            # Without the third text, the "<" of an answer "<html>" would count as part of the prompt's "<think>".
            other = template.text(Chat((*asked.messages, _OTHER_ANSWER), chat.tools), asks=False)
            begin = length_in_common(before, after, other)
            where = f"message {place + 1} of line {prompt.line}"
            # The texts differ already within the messages before the answer.
            if begin < len(template.text(asked, asks=False).rstrip()):
                rule = f"this model's template hides the answer in {where}"
                raise SettingError("prompts", rule)
            if before.rfind("<think>", begin) > before.rfind("</think>", begin):
                rule = f"this model's template asks for thoughts, and leaves out those of {where}"
                raise SettingError("prompts", rule)
        if answer := after[begin:]:
            # The model read the whole prompt, including its empty thought, and then wrote the answer.
            whole = before + answer
            texts.append((whole, [(place, range(len(before), len(whole)))]))
    return texts[::-1]
