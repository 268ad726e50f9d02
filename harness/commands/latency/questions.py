"""The questions of `latency`: in how many laps prompts are asked, and in which order, with the later turns of
conversations.
"""

from __future__ import annotations

import dataclasses
import functools

from harness.commands.latency.conversations import Conversations
from harness.commands.latency.record import OPEN_LOOP_LAP, LatencySettings
from harness.engines.protocol import Engine, Question
from harness.engines.registry import engine_of
from harness.measuring.asking import batches_to_ask, first_turns, laps_to_ask, warmup_question
from harness.measuring.prompts.encoding import Encoded
from harness.measuring.prompts.sets import PromptSet

# A lap begins and ends with fewer requests in flight than it should have, so laps are long where
# that leaves _MANY_LAPS of them: up to _LONGEST_LAP times the requests that are in flight at once.
_MANY_LAPS = 16
_LONGEST_LAP = 4


def choose_num_laps(num_prompts: int, batch_size: int, open_loop: bool) -> int:
    """Return how many laps there are: as many as prompts where one request is in flight at a time.

    128 prompts with batch_size=4 make 16 laps of 8.

    Args:
        batch_size: requests in flight at once; a lap has at least as many prompts, if there are so
            many.
        open_loop: whether requests are sent at a rate, whatever is in flight.
    """
    in_flight = max(batch_size, OPEN_LOOP_LAP) if open_loop else batch_size
    if in_flight == 1:
        return num_prompts
    turns = num_prompts // (_MANY_LAPS * in_flight)
    lap_size = in_flight * min(max(turns, 1), _LONGEST_LAP)
    return max(1, num_prompts // lap_size)


def asks_again(settings: LatencySettings, prompt_set: PromptSet) -> bool:
    """Whether some prompts are asked more than once: more answers are wanted than the set has prompts."""
    return settings.num_asked > len(prompt_set.prompts)


def num_laps_of(settings: LatencySettings, engine: Engine, num_prompts: int) -> int:
    """The number of laps in which this many prompts are asked."""
    if settings.laps != "auto":
        return settings.laps
    if engine.blocks is not None:
        return engine.blocks.number
    has_rate = settings.engine.rate is not None
    # The last requests of a lap have fewer beside them, which one arm alone can do without.
    if len(engine.arms) == 1 and (settings.batch_size > 1 or has_rate):
        return 1
    return choose_num_laps(num_prompts, settings.batch_size, has_rate)


def questions_to_ask(
    like: Question,
    engine: Engine,
    settings: LatencySettings,
    prompt_set: PromptSet,
    encoded: Encoded,
    conversations: Conversations,
) -> tuple[Question, list[Question]]:
    """The question of the warm-up, and the questions that both arms are asked, in their order: each is about a
    batch, a lap, or a later turn of one.

    Args:
        like: a question without prompts, with the run's decoding, seed and stop tokens.
        encoded: the prompts that are measured.
        conversations: has the later turns.
    """
    unused = prompt_set.first_unused(settings.num_asked)
    warmup = warmup_question(like, encoded, settings.batch_size, unused)
    num_prompts = num_asked = len(encoded.prompts)
    if asks_again(settings, prompt_set):
        num_asked = settings.num_asked
    if engine_of(settings).queues:
        num_laps = functools.partial(num_laps_of, settings, engine)
        parts = laps_to_ask(num_prompts, num_asked, num_laps, settings.seed)
    else:
        parts = batches_to_ask(num_prompts, num_asked, settings.batch_size, settings.seed)
    question = dataclasses.replace(like, seed=settings.seed_of_run)
    questions = []
    for first in first_turns(question, settings, prompt_set, encoded, parts, warmup):
        questions += [first, *conversations.follow_ups(first)]
    return warmup, questions
