"""Divides a prompt set into questions for both arms, and makes the question of the warm-up.

A question is a batch of prompts or, if the engine has a queue of requests, a lap: a group of requests of which
`batch_size` are in flight at a time. If more answers are wanted than the set has prompts, prompts are sent again, in a
new order. Requests that are in flight together are not independent of each other. So the arms alternate lap by lap, and
intervals are computed over laps.

For example, 8 prompts are sent from a set of 4, in batches of 2 (`batches_to_ask(4, 8, 2, seed)`). Each column is a
batch:

    places     0, 1    2, 3    2, 3    0, 1
    repeats    0, 0    0, 0    1, 1    1, 1
    unit        0       1       1       0

If 8 prompts are sent from a set of 3, in batches of 4, both batches contain the same prompts. Each batch is then a
separate unit, and an interval over units holds only for these prompts (`results.prompt_times.share_prompts`):

    places     0, 1, 2, 1    2, 0, 1, 0
    repeats    0, 0, 0, 1    1, 1, 2, 2
    unit            0             1

Batches also share prompts if there would otherwise be too few units for an interval. Laps share prompts if prompts are
sent again and the number of laps is fixed (`laps_to_ask` has the exact conditions).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from harness.engines.protocol import Question, Request
from harness.engines.record import engine_of
from harness.measuring.prompts.encoding import Encoded
from harness.measuring.prompts.sets import Occurrence, PromptSet
from harness.measuring.session import Session
from harness.results.statistics.interval import FEWEST_FOR_INTERVAL


class Part(NamedTuple):
    """Prompts that are sent together: a batch, or a lap of requests.

    Attributes:
        prompts: (place, repeat) of each prompt: its place among the measured prompts (`Encoded`), from 0, and how often
            it was sent before.
        unit: number of the unit. Parts with the same prompts have the same number, because answers to the same prompts
            are not independent.
    """

    prompts: Sequence[tuple[int, int]]
    unit: int


def batches_to_ask(num_prompts: int, num_asked: int, size: int, seed: int) -> list[Part]:
    """Plan batches of at most `size` prompts, until `num_asked` prompts have been sent.

    Usually the set is divided into batches once, and whole batches (the last one perhaps shortened) are sent again; all
    repetitions of a batch are one unit. In two cases, batches are filled with repeated prompts instead, so that they
    share prompts, and each batch is a separate unit: if the set is smaller than one batch; and if the set makes too
    few whole batches for an interval, but `num_asked` prompts make enough.

    Args:
        seed: determines the order in which batches, or prompts, are sent again.
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
    """Plan laps of requests, until `num_asked` prompts have been sent.

    The set is divided into laps once, whole laps are sent again, and all repetitions of a lap are one unit, if one of
    these conditions holds:

    - every prompt is sent once;
    - each lap is a single prompt;
    - the set makes enough laps for an interval, and more prompts make more laps.

    Otherwise, laps are filled with repeated prompts. They then share prompts, and each lap is a unit of its own, so
    that an interval does not cover other prompts. This happens, for example, with a fixed number of laps (blocks):
    sending the same laps again would make more laps.

    For example, the set has 20 prompts, and 40 are sent:

        num_laps                 laps
        always 10                10 laps of 4 prompts; each prompt occurs in two different laps
        number of prompts / 2    10 laps of 2 prompts; each lap is sent twice

    Args:
        num_laps: computes the number of laps into which a number of prompts is divided.
        seed: determines the order in which laps, or prompts, are sent again.
    """
    # If the number of laps is fixed, both are equal: more prompts make no more laps.
    num_once, num_in_all = num_laps(num_prompts), num_laps(num_asked)
    # The number of laps if the set is sent once.
    number = min(num_prompts, num_once)
    one_prompt_each = number == num_prompts and num_in_all == num_asked
    has_interval = number >= FEWEST_FOR_INTERVAL and num_once < num_in_all
    if num_asked == num_prompts or one_prompt_each or has_interval:
        return _same_again(in_laps(num_prompts, number), num_asked, seed)
    return _sharing(num_prompts, num_asked, min(num_asked, num_in_all), seed)


def _same_again(units: Sequence[range], num_asked: int, seed: int) -> list[Part]:
    """Return the units in order, and then repeatedly in new orders, until they contain `num_asked` prompts."""
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
    """Return parts of nearly equal size, filled with all prompts in order, then with all of them again in a new order,
    and so on; each part is a unit of its own.
    """
    prompts = list(itertools.islice(_again_and_again(num_prompts, seed), num_asked))
    laps = in_laps(num_asked, num_parts)
    return [Part(prompts[lap.start : lap.stop], unit) for unit, lap in enumerate(laps)]


def _again_and_again(number: int, seed: int) -> Iterator[tuple[int, int]]:
    """Yield pairs (place, repeat) without end: all places from 0 to `number` - 1, and then all of them again and again.

    `repeat` counts how often the place was yielded before. The places are in ascending order the first time, and
    afterwards in a new random order each time. For 2 places, the pairs may be (0, 0), (1, 0), (1, 1), (0, 1), (0, 2)
    and so on.
    """
    for repeat in itertools.count():
        order = list(range(number))
        if repeat:
            random.Random(f"{seed} {repeat}").shuffle(order)
        for index in order:
            yield index, repeat


def in_laps(num_prompts: int, num_laps: int) -> list[range]:
    """Divide prompts into laps, and return the places of each. The sizes of laps differ by at most one: the places of
    10 prompts in 3 laps are 0 to 2, 3 to 5 and 6 to 9.
    """
    ends = [num_prompts * lap // num_laps for lap in range(num_laps + 1)]
    return [range(begin, end) for begin, end in itertools.pairwise(ends)]


def warmup_question(session: Session, encoded: Encoded, size: int, unused_index: int) -> Question:
    """The question of a warm-up. It contains no measured prompts, because caches would then know these.

    Its prompts are other prompts of the set, no longer than the longest measured prompt (`Encoded.others`). If there
    are too few of them, it contains measured prompts instead, with all tokens after the first in reverse order.

    Args:
        encoded: the measured prompts, with other prompts for the warm-up.
        size: number of prompts.
        unused_index: an index above the indices of all prompts.
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
    """The questions, one for each part, in the order of the parts. For conversations, these contain only the first
    turns.

    Args:
        seed: seed of the requests' random numbers.
        encoded: the measured prompts; the places in `parts` count these.
        warmup: the question of the warm-up. If several requests are in flight, its requests, with another salt, also
            keep up the load until the last answer of a question has ended.
    """
    extra: list[Request] = []
    in_flight: int | None = None
    # An engine with a queue gets laps.
    if engine_of(session.settings).queues:
        in_flight = session.settings.batch_size
        if in_flight > 1:
            extra = [dataclasses.replace(request, salt="extra") for request in warmup.requests]
    questions = []
    for moment, part in enumerate(parts):
        places, repeats = zip(*part.prompts, strict=True)
        prompts = encoded.part(places)
        # Places in `prompt_set`; the measured prompts may be a selection of it.
        pairs = list(zip(prompts.indices, repeats, strict=True))
        # The salt keeps a server's prefix cache from reusing text across conversations, or across repetitions. Within
        # one conversation, the cache may reuse earlier turns.
        salts = [
            f"{repeat} {index}" if len(prompt_set.prompts[index].turns) > 1 else str(repeat)
            for index, repeat in pairs
        ]
        requests = session.requests(
            prompts.token_ids,
            [prompt_set.index(Occurrence(index, repeat=repeat)) for index, repeat in pairs],
            chats=prompts.chats,
            salts=salts,
            seed=seed,
        )
        questions.append(Question(requests, in_flight, extra, unit=part.unit, moment=moment))
    return questions
