"""Makes the questions of `latency`: prompts in batches or laps, in order, and the later turns of conversations."""

from __future__ import annotations

import dataclasses
import functools
import itertools

from harness.commands.latency.record import LatencySettings
from harness.engines.protocol import Answered, Engine, Question
from harness.engines.registry import engine_of
from harness.engines.tokenizer import text_of
from harness.measuring.asking import batches_to_ask, first_turns, laps_to_ask, warmup_question
from harness.measuring.progress import say
from harness.measuring.prompts.encoding import Encoded, Encoder, last
from harness.measuring.prompts.sets import Prompt, PromptSet
from harness.measuring.session import Session

# A lap begins and ends with fewer requests in flight than it should have, so laps are long: up to
# _LONGEST_LAP times the requests in flight, if there are still _MANY_LAPS laps then.
_MANY_LAPS = 16
_LONGEST_LAP = 4


def choose_num_laps(num_prompts: int, batch_size: int) -> int:
    """Return a number of laps; with one request in flight at a time, each prompt is a lap.

    128 prompts with batch_size=4 make 16 laps of 8.

    Args:
        batch_size: requests in flight at once; a lap has at least this many, if there are enough prompts.
    """
    if batch_size == 1:
        return num_prompts
    rounds = num_prompts // (_MANY_LAPS * batch_size)
    lap_size = batch_size * min(max(rounds, 1), _LONGEST_LAP)
    return max(1, num_prompts // lap_size)


def asks_again(settings: LatencySettings, prompt_set: PromptSet) -> bool:
    """Whether prompts are asked more than once, because more answers are wanted than the set has prompts."""
    return settings.num_asked > len(prompt_set.prompts)


def lap_count(settings: LatencySettings, engine: Engine, num_prompts: int) -> int:
    """Return the number of laps for this many prompts."""
    if settings.laps != "auto":
        return settings.laps
    if engine.blocks is not None:
        return engine.blocks.number
    # Laps let arms take turns, but fewer requests are in flight at their ends. One arm alone needs no turns.
    if len(engine.arms) == 1 and settings.batch_size > 1:
        return 1
    return choose_num_laps(num_prompts, settings.batch_size)


def questions_to_ask(
    session: Session,
    engine: Engine,
    settings: LatencySettings,
    prompt_set: PromptSet,
    encoded: Encoded,
    conversations: Conversations,
) -> tuple[Question, list[Question]]:
    """Return the question of the warm-up, and those that are measured, in order: one for each batch or lap, and one
    for each later turn of it.

    Args:
        encoded: the prompts that are measured.
        conversations: has the later turns.
    """
    unused_index = prompt_set.first_unused(settings.num_asked)
    warmup = warmup_question(session, encoded, settings.batch_size, unused_index)
    num_prompts = len(encoded.prompts)
    num_asked = settings.num_asked if asks_again(settings, prompt_set) else num_prompts
    if engine_of(settings).queues:
        num_laps = functools.partial(lap_count, settings, engine)
        parts = laps_to_ask(num_prompts, num_asked, num_laps, settings.seed)
    else:
        parts = batches_to_ask(num_prompts, num_asked, settings.batch_size, settings.seed)
    questions = []
    for question in first_turns(session, settings.seed_of_run, prompt_set, encoded, parts, warmup):
        questions += [question, *conversations.follow_ups(question)]
    return warmup, questions


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
