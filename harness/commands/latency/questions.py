"""Makes the questions of `latency`: prompts in batches or laps, in order, and the later turns of conversations."""

from __future__ import annotations

import functools

from harness.commands.latency.conversations import Conversations
from harness.commands.latency.record import OPEN_LOOP_LAP, LatencySettings
from harness.engines.protocol import Engine, Question
from harness.engines.registry import engine_of
from harness.measuring.asking import batches_to_ask, first_turns, laps_to_ask, warmup_question
from harness.measuring.prompts.encoding import Encoded
from harness.measuring.prompts.sets import PromptSet
from harness.measuring.session import Session

# A lap begins and ends with fewer requests in flight than it should have, so laps are long: up to
# _LONGEST_LAP times the requests in flight, if there are still _MANY_LAPS laps then.
_MANY_LAPS = 16
_LONGEST_LAP = 4


def choose_num_laps(num_prompts: int, batch_size: int, open_loop: bool) -> int:
    """Return a number of laps; with one request in flight at a time, each prompt is a lap.

    128 prompts with batch_size=4 make 16 laps of 8.

    Args:
        batch_size: requests in flight at once; a lap has at least this many, if there are enough prompts.
        open_loop: whether requests are sent at a rate, whatever is in flight.
    """
    in_flight = max(batch_size, OPEN_LOOP_LAP) if open_loop else batch_size
    if in_flight == 1:
        return num_prompts
    rounds = num_prompts // (_MANY_LAPS * in_flight)
    lap_size = in_flight * min(max(rounds, 1), _LONGEST_LAP)
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
    has_rate = settings.engine.rate is not None
    # Laps let arms take turns, but fewer requests are in flight at their ends. One arm alone needs no turns.
    if len(engine.arms) == 1 and (settings.batch_size > 1 or has_rate):
        return 1
    return choose_num_laps(num_prompts, settings.batch_size, has_rate)


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
