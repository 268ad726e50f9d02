"""Answers of an engine that loads the weights itself, read once more by weights that are loaded here: does it accept as
much as they say?
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.commands.acceptance.record import AcceptanceSettings
from harness.commands.latency.figures.acceptance import Health
from harness.commands.latency.record import LatencySettings
from harness.config.errors import RunError, SettingError
from harness.engines.registry import engine_of
from harness.engines.requests import RequestRecord
from harness.measuring.progress import say


def can_be_read(settings: LatencySettings) -> bool:
    """Whether the weights that the engine loads can be read here too, and how often they agree has a closed form."""
    if settings.draft is None or settings.test or not engine_of(settings).loads_weights:
        return False
    names = [field.name for field in dataclasses.fields(AcceptanceSettings)]
    shared = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    try:
        AcceptanceSettings(**shared)
    except SettingError:
        return False
    return True


def read_again(
    settings: LatencySettings, answered: Sequence[tuple[Sequence[int], RequestRecord]]
) -> Health | None:
    """Load the weights and read answers, each after its prompt; None, with a line, where memory does not hold them."""
    # torch, which a run that only sends requests needs not wait for.
    from harness.engines.local.reading import TextReader, health_columns, most_drafted
    from harness.engines.pair import plan_pair
    from harness.models.case import Demand

    long_enough = [one for one in answered if len(one[1].token_ids) > 1]
    if not long_enough:
        return None
    answers = [answer for _, answer in long_enough]
    most = most_drafted(answers) or settings.decoding.most_draft_tokens
    longest = max(len(prompt) for prompt, _ in long_enough)
    demand = Demand(1, longest, settings.decoding.max_new_tokens, most, "eager")
    say("reading the answers with the weights of the draft")
    try:
        planned = plan_pair(settings.model, settings.draft, settings.placement, settings.dtype)
        pair = planned.place(demand, force=settings.force).load()
    except RunError as error:
        say(f"not compared with what the draft's weights say: {error}")
        return None
    reader = TextReader(pair, settings.decoding, most)
    read = [reader.read(prompt, answer.token_ids) for prompt, answer in long_enough]
    reader.close()
    return Health(**health_columns(read, answers, most))
