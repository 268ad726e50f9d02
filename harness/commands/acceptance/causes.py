"""The conditions under which acceptance is measured again if it is low. Each is named after a cause in `CAUSES`.

There are two kinds of condition. For one kind the answers are read again, as if the engine had drafted them in a
different way (`reread_conditions`). For the other kind the engine gives new answers (`asked_conditions`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from harness.commands.acceptance.record import AcceptanceSettings
from harness.config.installation import is_installed
from harness.config.model_names import SERVED
from harness.engines.door.reading import DraftMistake

# The condition `length` cuts prompts to this many tokens. The number is a choice: drafts are trained on texts of at
# least this length.
_SHORT_PROMPT = 512
# Mistakes that an engine may make when it drafts: the name of the cause, the mistake, and its words for the page. Most
# are about drafts that read hidden states of the target; other drafts skip these.
_FAULTS: tuple[tuple[str, DraftMistake, str], ...] = (
    ("positions", "late", "hidden states one position late"),
    ("layers", "layers before", "hidden states of the layers before"),
    ("layers", "layers behind", "hidden states of the layers after"),
    ("layers", "usual layers", "hidden states of EAGLE-3's usual layers"),
    ("layers", "last layer", "hidden states of the last layer"),
    ("vocabulary", "no mapping", "the draft's tokens read as the target's"),
)


@dataclass(frozen=True)
class Condition:
    """A difference from the run as typed, or the run as typed itself.

    Attributes:
        cause: the name of the cause in `CAUSES`; `command` for the first of two commands; None for the run as typed.
        words: the difference in words, for the page; None for the run as typed. If the condition cannot be measured,
            this may be only what would have been changed, such as `the chat template`.
        settings: the settings with which answers are generated or read.
        fault: a mistake that is put into the draft while it reads the answers; None for no mistake.
        num_unused: how many draft tokens at the end of each proposal are never verified.
        most_prompt_tokens: the number of tokens to which prompts are cut; None for whole prompts.
        why_not: the reason why the condition cannot be measured; empty if it can.
    """

    cause: str | None
    words: str | None
    settings: AcceptanceSettings
    fault: DraftMistake | None = None
    num_unused: int = 0
    most_prompt_tokens: int | None = None
    why_not: str = ""


def reread_conditions(settings: AcceptanceSettings, has_template: bool) -> list[Condition]:
    """Ways, other than as typed, in which an engine may have drafted the existing answers.

    Only conditions whose causes the settings choose are returned.

    Args:
        has_template: whether the tokenizer has a chat template.
    """
    conditions = [Condition("last", "the last draft token left out", settings, num_unused=1)]
    conditions += [Condition(cause, words, settings, fault) for cause, fault, words in _FAULTS]
    for temperature in (0.0, 1.0):
        if settings.decoding.temperature != temperature:
            changed = _at(settings, temperature)
            conditions.append(
                Condition("temperature", f"sampled at temperature {temperature:g}", changed)
            )
    conditions.append(_template(settings, has_template))
    why = "" if is_installed("bitsandbytes") else "needs bitsandbytes"
    if settings.model.gguf_file is not None:
        why = "bitsandbytes quantizes no GGUF files"
    if settings.model.quantization == "none":
        for bits in ("8bit", "4bit"):
            model = replace(settings.model, quantization=bits)
            changed = replace(settings, model=model)
            words = f"the target in {bits[0]} bit"
            conditions.append(Condition("quantization", words, changed, why_not=why))
    return [condition for condition in conditions if condition.cause in settings.chosen_causes]


def drafted_greedily(condition: Condition) -> Condition:
    """The condition, changed so that the draft proposes its likeliest tokens, as in most servers, in place of drawn
    tokens. Its settings must have a draft model.
    """
    draft: Any = condition.settings.draft
    draft = replace(draft, sampling="greedy")
    settings = replace(condition.settings, draft=draft)
    words = f"{condition.words}, drafted greedily"
    return replace(condition, settings=settings, words=words)


def asked_conditions(
    settings: AcceptanceSettings,
    has_template: bool,
    longest: int,
    trained: int | None,
    is_given: bool,
) -> list[Condition]:
    """Conditions under which the engine gives new answers: at temperature 0, with or without the chat template, to
    shorter prompts, and in place of recorded answers.

    Only conditions whose causes the settings choose are returned.

    Args:
        has_template: whether the tokenizer has a chat template.
        longest: number of tokens of the longest prompt.
        trained: number of tokens of the longest text that the draft was trained on, according to its configuration;
            None if the configuration does not contain it.
        is_given: whether the answers of the run as typed are recorded ones.
    """
    conditions = []
    if settings.decoding.temperature > 0:
        conditions.append(Condition("temperature", "with temperature 0", _at(settings, 0.0)))
    conditions.append(_template(settings, has_template))
    # The longest prompt that, together with its answer, is as long as the texts of the training. A draft that was
    # trained on texts of 2,048 tokens, with answers of up to 256, gets prompts cut to 1,792 and to 512 tokens.
    trained_prompt = 0 if trained is None else trained - settings.decoding.max_new_tokens
    why = "chats are sent whole" if settings.engine.asks_chats else ""
    for most in sorted({_SHORT_PROMPT, trained_prompt}):
        if 0 < most < longest:
            words = f"with prompts cut to {most} tokens"
            conditions.append(
                Condition("length", words, settings, most_prompt_tokens=most, why_not=why)
            )
    if is_given:
        conditions.append(Condition("texts", "with the target's own answers", settings))
    return [condition for condition in conditions if condition.cause in settings.chosen_causes]


def _at(settings: AcceptanceSettings, temperature: float) -> Any:
    """The settings with this temperature."""
    decoding = replace(settings.decoding, temperature=temperature)
    return replace(settings, decoding=decoding)


def _template(settings: AcceptanceSettings, has_template: bool) -> Condition:
    """The condition that leaves out the chat template or, if the run uses none, that uses it."""
    server: Any = settings.engine
    # Then the server has the tokenizer, and uses the template for chats.
    is_servers = settings.model.repository == SERVED
    why = "" if has_template or is_servers else "the tokenizer has no chat template"
    if settings.prompts.lengths:
        why = "prompts.lengths cuts texts, which are no chats"
    if why:
        return Condition("template", "the chat template", settings, why_not=why)
    is_used = server.asks_chats if is_servers else settings.chat_template != "never"
    changes: dict[str, Any] = {}
    if not is_servers:
        changes["chat_template"] = "never" if is_used else "always"
    # A server applies its own template to messages.
    if is_servers or server.asks_chats:
        changes["engine"] = replace(server, chat=not server.asks_chats)
    words = f"{'without' if is_used else 'with'} the chat template"
    return Condition("template", words, replace(settings, **changes))
