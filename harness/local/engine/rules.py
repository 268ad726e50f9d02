"""From decoding settings to what the loops take: warp and rule of acceptance."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.config.acceptance_rules import RULES
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.local.decoding.verify import AcceptByCoin, Offer, Verdict
from harness.local.decoding.warp import Warp
from harness.local.drafting.checked import blaming
from harness.local.engine.fault import Fault


def warp_of(decoding: DecodingSettings) -> Warp:
    """The warp that target and drafter share."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)


@dataclass(frozen=True)
class CheckedRule:
    """A rule that is not built in. A verdict of other shapes ends the run with an error that names the rule."""

    name: str
    rule: Callable[[Offer], Verdict]

    def __call__(self, offer: Offer) -> Verdict:
        with blaming(self.name, "verify", "decoding.rule"):
            verdict = self.rule(offer)
        if not isinstance(verdict, Verdict):
            wrong = f"must return a Verdict, not {type(verdict).__name__}"
            raise RunError(f"decoding.rule={self.name}: verify() {wrong}")
        num_rows, num_draft_tokens = offer.draft_tokens.shape
        shapes = {
            "num_accepted": (num_rows,),
            "next_token": (num_rows,),
            "target_probability": (num_rows, num_draft_tokens),
            "draft_probability": (num_rows, num_draft_tokens),
        }
        for part, shape in shapes.items():
            actual = tuple(getattr(verdict, part).shape)
            if actual != shape:
                wrong = f"must give a {part} of shape {list(shape)}, not {list(actual)}"
                raise RunError(f"decoding.rule={self.name}: verify() {wrong}")
        return verdict


def rule_of(decoding: DecodingSettings, fault: Fault) -> tuple[Callable[[Offer], Verdict], float]:
    """The rule of these settings with the fault in it, and the lenience l in (0, 1].

    A token is accepted with min(1, target / (l draft)); 1 is lossless.
    """
    rates = decoding.synthetic_rates
    rule = RULES[decoding.rule].verification() if rates is None else AcceptByCoin(rates)
    if rates is None and not RULES.is_built_in(decoding.rule):
        rule = CheckedRule(decoding.rule, rule)
    lenience = decoding.lenience if fault.lenience is None else fault.lenience
    warp = warp_of(decoding)
    return lambda offer: fault.verdict(rule, offer, warp), lenience
