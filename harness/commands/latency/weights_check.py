"""Answers of an engine that loads the weights itself, read once more by weights that are loaded here: does it accept as
much as they say?
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from harness.commands.acceptance.record import AcceptanceSettings
from harness.commands.latency.figures.acceptance import Health
from harness.commands.latency.figures.measured import MeasuredRun
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


def read_again(settings: LatencySettings, run: MeasuredRun) -> Health | None:
    """Load the weights and read the speculative answers to first turns, each after its prompt; None, with a line, where
    memory does not hold them.
    """
    # torch, which a run that only sends requests needs not wait for.
    from harness.engines.local.reading import TextReader, health_columns, most_drafted
    from harness.engines.pair import plan_pair
    from harness.models.case import Demand

    prompts: list[Sequence[int]] = []
    answers: list[RequestRecord] = []
    for generation in run.arms["speculative"].generations:
        for prompt, request in generation.with_prompts:
            is_first_turn = run.prompt_set.occurrence(request.index).turn == 0
            if is_first_turn and request.answered and len(request.token_ids) > 1:
                prompts.append(prompt)
                answers.append(request)
    if not answers:
        return None
    most = most_drafted(answers) or settings.decoding.most_draft_tokens
    demand = Demand(1, max(map(len, prompts)), settings.decoding.max_new_tokens, most, "eager")
    say("reading the answers with the weights of the draft")
    try:
        planned = plan_pair(settings.model, settings.draft, settings.placement, settings.dtype)
        pair = planned.place(demand, force=settings.force).load()
    except RunError as error:
        say(f"not compared with what the draft's weights say: {error}")
        return None
    reader = TextReader(pair, settings.decoding, most)
    texts = [answer.token_ids for answer in answers]
    read = list(reader.read(zip(prompts, texts, strict=True)))
    reader.close()
    return Health(**health_columns(read, answers, most))
