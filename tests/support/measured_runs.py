"""What a run of `latency` has measured, from answers made by hand, for the groups of figures."""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from harness.commands.latency.measure import prompt_rows
from harness.commands.latency.record import LatencySettings
from harness.config.settings import DecodingSettings
from harness.engines.divergence import Divergence
from harness.engines.protocol import Answered
from harness.engines.tokenizer import TextTokenizer
from harness.measuring.figures.measured import Group, MeasuredArm, MeasuredRun
from harness.measuring.prompts.sets import Prompt, PromptSet
from harness.measuring.session import Session
from some_questions import question_of
from some_settings import settings_of


def figures(
    group: type[Group],
    regular: Sequence[Answered],
    speculative: Sequence[Answered] | None = None,
    units: Sequence[int] | None = None,
    *,
    settings: dict[str, Any] | None = None,
    **evidence: Any,
) -> Any:
    """The figures of the speculative arm, or of the regular one where it is alone.

    Args:
        units: of the questions; each generation answers its own by default.
        settings, evidence: what is changed of the settings, and of what was measured.
    """
    run = run_of(regular, speculative, units, settings=settings, **evidence)
    return group.measured(run, list(run.arms.values())[-1])


def run_of(
    regular: Sequence[Answered],
    speculative: Sequence[Answered] | None = None,
    units: Sequence[int] | None = None,
    *,
    settings: dict[str, Any] | None = None,
    divergences: Mapping[int, Divergence | None] | None = None,
    **evidence: Any,
) -> MeasuredRun:
    """The run that measured these answers; the other arguments are those of `figures`.

    Args:
        divergences: of the speculative arm's greedy texts, by index.
    """
    arms = {"regular": MeasuredArm("regular", asked(regular, units))}
    if speculative is not None:
        arms["speculative"] = MeasuredArm("speculative", asked(speculative, units))
        arms["speculative"].divergences.update(divergences or {})
    chosen = settings_of(LatencySettings, **(settings or {}))
    run = MeasuredRun(chosen, PromptSet("many", (Prompt("Once"),) * 100, ""), arms, **evidence)
    session: Any = SimpleNamespace(run_id="run", tokenizer=TextTokenizer())
    session.row = functools.partial(Session.row, session)
    for arm in arms.values():
        for generation in arm.generations:
            generation.arm = arm.name
            run.prompt_rows.extend(prompt_rows(run, generation, session))
    return run


def asked(generations: Sequence[Answered], units: Sequence[int] | None = None) -> list[Answered]:
    """The same, each as the answer to a question."""
    answers = []
    for moment, generation in enumerate(generations):
        indices = [request.index for request in generation.requests]
        unit = moment if units is None else units[moment]
        question = question_of([[1]] * len(indices), DecodingSettings(), indices=indices)
        question = dataclasses.replace(question, unit=unit, moment=moment)
        answers.append(dataclasses.replace(generation, question=question))
    return answers
