"""Conditions under which acceptance is measured again where it is little, by the names of `causes`, the cheapest first.

Of some the same answers are read again, as an engine would have drafted them that differs from the run as typed; of
others new answers are asked for.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from harness.config.installation import is_installed
from harness.engines.door.reading import DraftMistake

CAUSES = (
    "last",
    "positions",
    "layers",
    "vocabulary",
    "temperature",
    "template",
    "quantization",
    "length",
    "texts",
)
# Prompts are cut to this many tokens.
SHORT_PROMPT = 512
_FAULTS: tuple[tuple[str, DraftMistake, str], ...] = (
    ("positions", "late", "hidden states one position late"),
    ("layers", "layers before", "hidden states of the layers before"),
    ("layers", "layers behind", "hidden states of the layers behind"),
    ("layers", "usual layers", "hidden states of EAGLE-3's usual layers"),
    ("layers", "last layer", "hidden states of the last layer"),
    ("vocabulary", "no mapping", "the draft's tokens read as the target's"),
)


@dataclass(frozen=True)
class Condition:
    """What differs from the run as typed.

    Attributes:
        cause: its name in `causes`; None for the run as typed, `command` for another one.
        words: for the page.
        settings: with which answers are asked for, or read.
        fault: with which the draft is read.
        num_unused: draft tokens of each proposal that are left out.
        most_prompt_tokens: to which prompts are cut.
        why: it cannot be measured; empty where it can.
    """

    cause: str | None
    words: str | None
    settings: Any
    fault: DraftMistake | None = None
    num_unused: int = 0
    most_prompt_tokens: int | None = None
    why: str = ""


def readings(settings: Any, has_template: bool) -> list[Condition]:
    """Ways in which an engine may have drafted the answers that are there, other than as typed."""
    conditions = [Condition("last", "the last draft token left out", settings, num_unused=1)]
    conditions += [Condition(cause, words, settings, fault) for cause, fault, words in _FAULTS]
    for temperature in (0.0, 1.0):
        if settings.decoding.temperature != temperature:
            changed = _at(settings, temperature)
            conditions.append(
                Condition("temperature", f"texts of temperature {temperature:g}", changed)
            )
    conditions.append(_template(settings, has_template))
    why = "" if is_installed("bitsandbytes") else "needs bitsandbytes"
    if settings.model.quantization == "none":
        for bits in ("8bit", "4bit"):
            model = dataclasses.replace(settings.model, quantization=bits)
            changed = dataclasses.replace(settings, model=model)
            words = f"the target in {bits[0]} bit"
            conditions.append(Condition("quantization", words, changed, why=why))
    return [condition for condition in conditions if condition.cause in settings.chosen_causes]


def drafted_greedily(condition: Condition) -> Condition:
    """The condition with the draft's likeliest tokens, as most servers take them."""
    draft = dataclasses.replace(condition.settings.draft, sampling="greedy")
    settings = dataclasses.replace(condition.settings, draft=draft)
    words = f"{condition.words}, drafted greedily"
    return dataclasses.replace(condition, settings=settings, words=words)


def askings(
    settings: Any, has_template: bool, longest: int, trained: int | None, is_given: bool
) -> list[Condition]:
    """Conditions that get answers of their own.

    Args:
        longest: tokens of the longest prompt.
        trained: tokens of the longest text that the draft was trained on, as its configuration says; None where it
            does not.
        is_given: whether the answers as typed are recorded ones.
    """
    conditions = []
    if settings.decoding.temperature > 0:
        conditions.append(Condition("temperature", "with temperature 0", _at(settings, 0.0)))
    conditions.append(_template(settings, has_template))
    room = (trained or 0) - settings.decoding.max_new_tokens
    why = "chats are sent whole" if settings.engine.asks_chats else ""
    for most in sorted({SHORT_PROMPT, room}):
        if 0 < most < longest:
            words = f"with prompts cut to {most} tokens"
            conditions.append(Condition("length", words, settings, None, 0, most, why))
    if is_given:
        conditions.append(Condition("texts", "with the target's own answers", settings))
    return [condition for condition in conditions if condition.cause in settings.chosen_causes]


def _at(settings: Any, temperature: float) -> Any:
    decoding = dataclasses.replace(settings.decoding, temperature=temperature)
    return dataclasses.replace(settings, decoding=decoding)


def _template(settings: Any, has_template: bool) -> Condition:
    """The prompts without the chat template, or with it where they are read without."""
    if not has_template:
        why = "the tokenizer has no chat template"
        return Condition("template", "the chat template", settings, why=why)
    is_used = settings.chat_template != "never"
    changes: dict[str, Any] = {"chat_template": "never" if is_used else "always"}
    if settings.engine.asks_chats:
        changes["engine"] = dataclasses.replace(settings.engine, chat=False)
    words = f"{'without' if is_used else 'with'} the chat template"
    return Condition("template", words, dataclasses.replace(settings, **changes))
