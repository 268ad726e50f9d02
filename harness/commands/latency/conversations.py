"""Conversations of several turns (`prompts.turns=all`): each arm reads its own answers before its
next prompt.
"""

from __future__ import annotations

import dataclasses
import itertools

from harness.engines.protocol import Answered, Question
from harness.engines.registry import engine_of
from harness.engines.text_tokenizer import text_of
from harness.measuring.progress import say
from harness.measuring.prompts.encoding import Encoder, last
from harness.measuring.prompts.sets import Prompt, PromptSet


class Conversations:
    """The later turns of conversations, as questions whose prompts depend on the arm.

    A turn has an index of its own: that of the conversation, and the number of prompts in the set
    for every turn before it. Of 10 prompts, the turns of the fourth one have the indices 3, 13 and
    23.

    Args:
        longest: the most tokens of a prompt. A later turn that has more when it is read goes on without its
            oldest turns.
    """

    def __init__(self, encoder: Encoder, prompt_set: PromptSet, longest: int) -> None:
        self._encoder = encoder
        self._tokenizer = encoder.planned.tokenizer
        self._prompt_set = prompt_set
        # The text of each answer, by arm and index of the turn.
        self._answers: dict[tuple[str, int], str] = {}
        self._said_cut = False
        self._is_limited = engine_of(encoder.settings).computes_here
        self._longest = longest

    def follow_ups(self, first: Question) -> list[Question]:
        """The questions about the later turns of those conversations that a question begins, one
        for each turn.

        Their prompts have empty answers until `for_arm` fills them in.
        """
        prompts = self._prompt_set.prompts
        questions = []
        for turn in itertools.count(1):
            requests = []
            for request in first.requests:
                occurrence = self._prompt_set.occurrence(request.index)
                prompt = prompts[occurrence.place]
                if turn < len(prompt.turns):
                    [token_ids] = self._encoder.encode([prompt.after([""] * turn)])
                    index = self._prompt_set.index(occurrence._replace(turn=turn))
                    later = dataclasses.replace(request, prompt=token_ids, index=index, chat=None)
                    requests.append(later)
            if not requests:
                break
            questions.append(dataclasses.replace(first, requests=requests))
        return questions

    def for_arm(self, question: Question, arm: str) -> Question:
        """The question with this arm's own answers to the turns before."""
        if self._prompt_set.at(question.requests[0].index).turn in (None, 1):
            return question
        requests = []
        for request in question.requests:
            prompt, ids = self._so_far(request.index, arm)
            requests.append(dataclasses.replace(request, prompt=ids, chat=prompt.chat()))
        return dataclasses.replace(question, requests=requests)

    def keep(self, generation: Answered) -> None:
        """Remember what an arm has answered."""
        for request in generation.requests:
            text = text_of(request, self._tokenizer, skip_special_tokens=True)
            self._answers[generation.arm, request.index] = text

    def _so_far(self, index: int, arm: str) -> tuple[Prompt, list[int]]:
        """The conversation up to a turn, with the answers of an arm, and its token ids.

        Text that is read again may have more tokens than it had when it was generated.
        """
        occurrence = self._prompt_set.occurrence(index)
        conversation = self._prompt_set.prompts[occurrence.place]
        before = [
            self._prompt_set.index(occurrence._replace(turn=turn))
            for turn in range(occurrence.turn)
        ]
        answers = [self._answers[arm, index] for index in before]
        for left_out in range(occurrence.turn + 1):
            prompt = conversation.after(answers, left_out)
            [ids] = self._encoder.encode([prompt])
            if not self._is_limited or len(ids) <= self._longest:
                break
        else:
            ids = last(ids, self._longest, self._tokenizer.bos_token_id)
        if left_out and not self._said_cut:
            self._said_cut = True
            say(
                f"turn {occurrence.turn + 1} of the prompt in line {conversation.line} is asked without its"
                f" first turns ({left_out}): with its answers it is too long (said for this one alone)"
            )
        return prompt, ids
