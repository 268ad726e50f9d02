"""Conversations of several turns (`prompts.turns=all`): each arm reads its own answers before its
next prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.engines.protocol import Question
from harness.engines.timing import Generation
from harness.experiments.prompts import Occurrence, Prompt, PromptSet
from harness.experiments.session import Session

# Tokens by which an answer may grow when it is read again as text.
_MARGIN = 8


class Conversations:
    """The later turns of conversations, as questions whose prompts depend on the arm.

    A turn has an index of its own: that of the conversation, and the number of prompts in the set
    for every turn before it. Of 10 prompts, the turns of the fourth one have the indices 3, 13 and
    23.

    Args:
        first: the question about the first turns of all conversations.

    Attributes:
        longest: the most tokens that the prompt of a later turn can have; 0 without later turns.

    Raises:
        SettingError: a conversation does not fit into a model's context.
    """

    def __init__(self, session: Session, prompt_set: PromptSet, first: Question) -> None:
        self._session = session
        self._prompt_set = prompt_set
        # By arm and index.
        self._answers: dict[tuple[str, int], str] = {}
        self.longest = 0
        for turn, question in enumerate(self.follow_ups(first), start=1):
            without_answers = max(map(len, question.prompts))
            length = without_answers + _most_answered(turn, question)
            self.longest = max(self.longest, length)

    def follow_ups(self, first: Question) -> list[Question]:
        """The questions about the later turns of those conversations that a question begins, one
        for each turn.

        Their prompts have empty answers until `for_arm` fills them in.
        """
        conversations = [self._prompt_set.occurrence(index) for index in first.indices]
        num_turns = max(self._num_turns(occurrence) for occurrence in conversations)
        questions = []
        for turn in range(1, num_turns):
            going_on = [
                occurrence for occurrence in conversations if turn < self._num_turns(occurrence)
            ]
            questions.append(self._later(first, going_on, turn))
        return questions

    def _later(self, first: Question, conversations: Sequence[Occurrence], turn: int) -> Question:
        """The question about one turn of some conversations."""
        indices = [
            self._prompt_set.index(occurrence._replace(turn=turn)) for occurrence in conversations
        ]
        prompts = [self._so_far(index, None) for index in indices]
        new_tokens = _most_answered(turn, first) + first.decoding.max_new_tokens
        token_ids = self._session.encode(prompts, new_tokens=new_tokens)
        salts = [str(occurrence.repeat) for occurrence in conversations] if first.salts else ()
        return dataclasses.replace(first, prompts=token_ids, indices=indices, salts=salts, chats=())

    def for_arm(self, question: Question, arm: str) -> Question:
        """The question with this arm's own answers to the turns before."""
        if self._prompt_set.at(question.indices[0]).turn in (None, 1):
            return question
        prompts = [self._so_far(index, arm) for index in question.indices]
        token_ids = []
        for ids in self._session.encode_unchecked(prompts):
            # Text that is read again may have more tokens than it had when it was generated.
            token_ids.append(ids[-self.longest :])
        chats = [prompt.chat() for prompt in prompts]
        return dataclasses.replace(question, prompts=token_ids, chats=chats)

    def keep(self, generations: dict[str, Generation]) -> None:
        """Remember what the arms have answered."""
        tokenizer = self._session.tokenizer
        for arm, generation in generations.items():
            for request in generation.requests:
                text = tokenizer.decode(request.token_ids, skip_special_tokens=True)
                self._answers[arm, request.index] = str(text)

    def _num_turns(self, occurrence: Occurrence) -> int:
        return len(self._prompt_set.prompts[occurrence.place].turns)

    def _so_far(self, index: int, arm: str | None) -> Prompt:
        """The conversation up to a turn, with the answers of an arm; with empty ones for None."""
        occurrence = self._prompt_set.occurrence(index)
        first = self._prompt_set.prompts[occurrence.place]
        chat = first.chat()
        for number, text in enumerate(first.turns[1 : occurrence.turn + 1]):
            answered = self._prompt_set.index(occurrence._replace(turn=number))
            answer = "" if arm is None else self._answers[arm, answered]
            chat.append({"role": "assistant", "content": answer})
            chat.append({"role": "user", "content": text})
        return dataclasses.replace(first, text=chat[-1]["content"], messages=tuple(chat))


def _most_answered(turn: int, question: Question) -> int:
    """The most tokens of all answers before a turn, which is counted from 0."""
    return turn * (question.decoding.max_new_tokens + _MARGIN)
