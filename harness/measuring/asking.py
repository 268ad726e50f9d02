"""Questions about a prompt set: prompts in batches, or in laps if the engine keeps requests in flight; and a warm-up.

If more answers are wanted than the set has prompts, prompts are asked again, in another order. Requests that are in
flight together are not independent of each other. So both arms take turns lap by lap, and intervals are over laps.

With 4 prompts in batches of 2, of which 8 are asked (`batches_to_ask(4, 8, 2, seed)`):

    places     0, 1    2, 3    2, 3    0, 1
    repeats    0, 0    0, 0    1, 1    1, 1
    unit        0       1       1       0

With 3 prompts in batches of 4, of which 8 are asked, both batches share prompts. Each batch is then a unit by itself,
so an interval over units does not cover other prompts (`results.prompt_times.share_prompts`):

    places     0, 1, 2, 1    2, 0, 1, 0
    repeats    0, 0, 0, 1    1, 1, 2, 2
    unit            0             1

Batches also share prompts if there would otherwise be too few units for an interval, and laps if their number is fixed.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from harness.engines.protocol import Question, Request
from harness.engines.registry import engine_of
from harness.measuring.prompts.encoding import Encoded
from harness.measuring.prompts.sets import Occurrence, PromptSet
from harness.measuring.session import Session
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL


class Part(NamedTuple):
    """Prompts that are asked together: a batch, or a lap of requests.

    Attributes:
        prompts: (place, repeat) for each: its place among the measured prompts (`Encoded`), and how often it was
            asked before, from 0.
        unit: a number that is the same whenever the same prompts are asked, because their answers are not independent.
    """

    prompts: Sequence[tuple[int, int]]
    unit: int


def batches_to_ask(num_prompts: int, num_asked: int, size: int, seed: int) -> list[Part]:
    """Batches with at most `size` prompts each, until `num_asked` prompts have been asked.

    Each batch has the same prompts whenever it is asked, and is one unit. Batches share prompts instead, and each is a
    unit by itself, if the set is smaller than one batch, or if the set has too few batches for an interval while
    `num_asked` prompts make enough.

    Args:
        seed: determines the order in which batches, or prompts, are asked again.
    """
    too_few = size > 1 and num_prompts < FEWEST_FOR_INTERVAL * size <= num_asked
    if size > num_prompts or too_few:
        return _sharing(num_prompts, num_asked, math.ceil(num_asked / size), seed)
    firsts = range(0, num_prompts, size)
    units = [range(first, min(first + size, num_prompts)) for first in firsts]
    return _same_again(units, num_asked, seed)


def laps_to_ask(
    num_prompts: int, num_asked: int, num_laps: Callable[[int], int], seed: int
) -> list[Part]:
    """Laps of requests, until `num_asked` prompts have been asked.

    Each lap has the same prompts whenever it is asked, and is one unit, if any of three conditions holds: every prompt
    is asked once; each lap is a single prompt; or the set makes enough laps for an interval, and repeating prompts adds
    laps. Otherwise laps share prompts, and each is a unit by itself, so that an interval does not cover other prompts.

    A fixed number of laps (blocks) is such a case: repeating the same laps would make more of them. With 20
    prompts, 40 asked, and `num_laps` always 10, there are ten laps of four prompts that share prompts. With `num_laps`
    dividing by two, there are ten laps of two prompts, each asked twice.

    Args:
        num_laps: the number of laps that a number of prompts makes.
        seed: determines the order in which laps, or prompts, are asked again.
    """
    number = min(num_prompts, num_laps(num_prompts))
    # A fixed number of laps gives no more of them for more prompts, so the second part of each condition fails.
    one_prompt_each = number == num_prompts and num_laps(num_asked) == num_asked
    has_interval = FEWEST_FOR_INTERVAL <= number < num_laps(num_asked)
    if num_asked == num_prompts or one_prompt_each or has_interval:
        return _same_again(in_laps(num_prompts, number), num_asked, seed)
    return _sharing(num_prompts, num_asked, min(num_asked, num_laps(num_asked)), seed)


def _same_again(units: Sequence[range], num_asked: int, seed: int) -> list[Part]:
    """Return the units in order, and then repeatedly in new orders, until they have `num_asked` prompts."""
    parts: list[Part] = []
    num_left = num_asked
    for unit, repeat in _again_and_again(len(units), seed):
        if not num_left:
            break
        places = units[unit][:num_left]
        num_left -= len(places)
        parts.append(Part([(index, repeat) for index in places], unit))
    return parts


def _sharing(num_prompts: int, num_asked: int, num_parts: int, seed: int) -> list[Part]:
    """Return parts that take the prompts one after another, and repeatedly; each part is a unit by itself."""
    prompts = list(itertools.islice(_again_and_again(num_prompts, seed), num_asked))
    laps = in_laps(num_asked, num_parts)
    return [Part(prompts[lap.start : lap.stop], unit) for unit, lap in enumerate(laps)]


def _again_and_again(number: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield the places from 0 to `number` - 1 repeatedly and without end, each with how often it came before.

    They come in order the first time, and then in a new random order each time. For 2 places that may be (0, 0), (1,
    0), (1, 1), (0, 1), (0, 2) and so on.
    """
    for repeat in itertools.count():
        order = list(range(number))
        if repeat:
            random.Random(f"{seed} {repeat}").shuffle(order)
        for index in order:
            yield index, repeat


def in_laps(num_prompts: int, num_laps: int) -> list[range]:
    """The places of each lap. Sizes differ by at most one: 10 prompts in 3 laps are 0 to 2, 3 to 5 and 6 to 9."""
    ends = [num_prompts * lap // num_laps for lap in range(num_laps + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def warmup_question(session: Session, encoded: Encoded, size: int, unused_index: int) -> Question:
    """The question of a warm-up. Its prompts are not the measured ones, because caches would then know those.

    They are other prompts of the set, no longer than the longest measured one. If there are too few of these, they are
    measured prompts with all tokens after the first in reverse.

    Args:
        encoded: the measured prompts, with others (`Encoded.others`).
        size: number of prompts.
        unused_index: no prompt has this index or a larger one.
    """
    salts = ["warm-up"] * size
    others = encoded.others
    if others is None or len(others.prompts) < size:
        reversed_ids = [[*ids[:1], *reversed(ids[1:])] for ids in encoded.token_ids]
        token_ids = list(itertools.islice(itertools.cycle(reversed_ids), size))
        indices = range(unused_index, unused_index + size)
        return Question(session.requests(token_ids, indices, salts=salts))
    first = others.part(range(size))
    return Question(
        session.requests(first.token_ids, first.indices, chats=first.chats, salts=salts)
    )


def first_turns(
    session: Session,
    seed: int,
    prompt_set: PromptSet,
    encoded: Encoded,
    parts: Sequence[Part],
    warmup: Question,
) -> list[Question]:
    """The questions about first turns, one for each part, in the order of the parts.

    Args:
        seed: seed of the requests' random numbers.
        encoded: the measured prompts; the parts refer to their places in it.
        warmup: the prompts of the warm-up. If several requests are in flight, they also keep up the load, under another
            salt, until the last answer of a question has ended.
    """
    settings = session.settings
    extra: list[Request] = []
    in_flight: int | None = None
    if engine_of(settings).queues:
        in_flight = len(warmup.requests)
    if in_flight and in_flight > 1:
        extra = [dataclasses.replace(request, salt="extra") for request in warmup.requests]
    questions = []
    for moment, part in enumerate(parts):
        places, repeats = zip(*part.prompts, strict=True)
        prompts = encoded.part(places)
        # Places in `prompt_set`; the measured prompts may be a selection of it.
        pairs = list(zip(prompts.indices, repeats, strict=True))
        # A cache may keep the earlier turns of a conversation, but nothing of another conversation.
        salts = [
            f"{repeat} {index}" if len(prompt_set.prompts[index].turns) > 1 else str(repeat)
            for index, repeat in pairs
        ]
        requests = session.requests(
            prompts.token_ids,
            [prompt_set.index(Occurrence(index, 0, repeat)) for index, repeat in pairs],
            chats=prompts.chats,
            salts=salts,
            seed=seed,
        )
        questions.append(Question(requests, in_flight, extra, part.unit, moment))
    return questions
