"""Runs in which the acceptance of a given text follows from its probabilities, without decoding it."""

from __future__ import annotations

from harness.config.run import RunSettings
from harness.config.settings import require

# Rules whose acceptance of a given text is known at any temperature, and those for greedy decoding alone.
_RULES = ("deepmind", "google", "block")
_GREEDY_RULES = ("typical",)


def require_closed_form(settings: RunSettings) -> None:
    """Raise a SettingError for a run whose acceptance has no closed form."""
    rule = "must be set: without one nothing is accepted"
    draft = settings.draft
    require(draft is not None, "draft", rule, "none")
    assert draft is not None
    decoding = settings.decoding
    rates = decoding.synthetic_acceptance
    rule = "must be null: a coin accepts as often on any text"
    require(rates is None, "decoding.synthetic_acceptance", rule, rates)
    rule = "below 1 has no closed form: its texts are not the target's, and how likely they are depends on K"
    plain = decoding.lenience == 1 or decoding.temperature == 0
    require(plain, "decoding.lenience", rule, decoding.lenience)
    # Greedily the lossy rules keep the same tokens.
    known_rules = [*_RULES, *(_GREEDY_RULES if decoding.temperature == 0 else ())]
    rule = f"must be one of {', '.join(known_rules)}: of others no closed form is known at this temperature"
    require(decoding.rule in known_rules, "decoding.rule", rule, decoding.rule)
    rule = "must be stored: how often random weights agree means nothing"
    require(settings.weights == "stored", "weights", rule, settings.weights)
