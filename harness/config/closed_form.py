"""Runs in which the acceptance of a given text follows from its probabilities, without decoding it."""

from __future__ import annotations

from harness.config.acceptance_rules import RULES, changed_parameters
from harness.config.errors import SettingError
from harness.config.run import RunSettings
from harness.config.settings import require


def require_closed_form(settings: RunSettings) -> None:
    """Raise a SettingError for a run whose acceptance has no closed form."""
    rule = "must be set: without one nothing is accepted"
    require(settings.draft is not None, "draft", rule, "none")
    decoding = settings.decoding
    rates = decoding.synthetic_acceptance
    rule = "must be null: a coin accepts as often on any text"
    require(rates is None, "decoding.synthetic_acceptance", rule, rates)
    if decoding.temperature > 0:  # greedily the parameters change nothing
        for name, value in changed_parameters(decoding).items():
            rule = "has no closed form: texts are not the target's, and how likely they are depends on K"
            raise SettingError(f"decoding.{name}", rule, value)
    known_rules = [name for name, record in RULES.all().items() if record.closed_form]
    rule = f"must be one of {', '.join(known_rules)}: of others no closed form is known"
    require(RULES[decoding.rule].closed_form, "decoding.rule", rule, decoding.rule)
    rule = "must be stored: how often random weights agree means nothing"
    require(settings.weights == "stored", "weights", rule, settings.weights)
