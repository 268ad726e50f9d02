"""From decoding settings to what the loops take: warp, rule of acceptance, prepared decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from harness.config.acceptance_rules import RULES
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings
from harness.local.decoding.decisions import Decision, Draw, Judge
from harness.local.decoding.rules import AcceptByCoin
from harness.local.decoding.tree_rules import TreeRule
from harness.local.decoding.verify import Offer, Verdict
from harness.local.decoding.warp import Warp
from harness.local.drafting.checked import blaming
from harness.local.engine.fault import FaultyRule, fault_of


def warp_of(decoding: DecodingSettings) -> Warp:
    """The warp that target and drafter share."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)


@dataclass(frozen=True)
class CheckedRule:
    """A rule that is not built in. A malformed verdict ends the run with an error that names the rule.

    Shapes and types are checked at every call, which needs no synchronisation with the device.

    Attributes:
        reads_values: whether the numbers are checked too, which waits for the device. Such a rule equals none that is
            prepared.
    """

    name: str
    rule: Callable[[Offer], Verdict]
    reads_values: bool = False

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
        for part in ("num_accepted", "next_token"):
            if getattr(verdict, part).is_floating_point():
                wrong = f"must give whole numbers as {part}"
                raise RunError(f"decoding.rule={self.name}: verify() {wrong}")
        if self.reads_values:
            self._check_values(offer, verdict)
        return verdict

    def _check_values(self, offer: Offer, verdict: Verdict) -> None:
        """Raise a RunError for a count or a token that cannot be; rows whose logits are nan have another error."""
        num_rows, num_draft_tokens = offer.draft_tokens.shape
        lengths = [num_draft_tokens] * num_rows if offer.lengths is None else offer.lengths.tolist()
        vocabulary_size = offer.target_probabilities.shape[-1]
        is_nan = offer.target_probabilities.isnan().flatten(1).any(-1).tolist()
        num_accepted = verdict.num_accepted.tolist()
        next_tokens = verdict.next_token.tolist()
        for row, length in enumerate(lengths):
            if is_nan[row]:
                continue
            if not 0 <= num_accepted[row] <= length:
                wrong = (
                    f"must accept 0 to {length} of {length} draft tokens, not {num_accepted[row]}"
                )
                raise RunError(f"decoding.rule={self.name}: verify() {wrong}")
            if not 0 <= next_tokens[row] < vocabulary_size:
                wrong = f"gives the token {next_tokens[row]}, outside the vocabulary of {vocabulary_size}"
                raise RunError(f"decoding.rule={self.name}: verify() {wrong}")


def rule_of(
    decoding: DecodingSettings, fault: str, *, reads_values: bool = False
) -> tuple[Callable[[Offer], Verdict], float]:
    """The rule of these settings with the fault in it, the same for equal settings, and the lenience l in (0, 1].

    A token is accepted with min(1, target / (l draft)); 1 is lossless.

    Args:
        reads_values: whether the numbers of a rule that is not built in are checked.
    """
    rates = decoding.synthetic_rates
    rule = RULES[decoding.rule].verification() if rates is None else AcceptByCoin(rates)
    if rates is None and not RULES.is_built_in(decoding.rule):
        rule = CheckedRule(decoding.rule, rule, reads_values)
    if fault == "none":
        return rule, decoding.lenience
    planted = fault_of(fault)
    lenience = decoding.lenience if planted.lenience is None else planted.lenience
    return FaultyRule(planted.verdict, rule, warp_of(decoding)), lenience


def tree_rule_of(decoding: DecodingSettings, fault: str) -> TreeRule:
    """The rule of these settings for trees, with the fault in it."""
    rule = RULES[decoding.rule].tree_verification()
    if fault == "none":
        return rule
    return FaultyRule(fault_of(fault).tree_verdict, rule, warp_of(decoding))


def decisions_of(
    decoding: DecodingSettings,
    fault: str,
    widths: Sequence[int],
    *,
    deterministic: bool | None,
) -> dict[int, Sequence[Decision]]:
    """The decisions that the loops make after a pass of the target, by its width: runners prepare
    them.

    A pass over one token is a step of regular decoding, which draws the next token; a wider one
    verifies a proposal, of which every row has all tokens.

    Args:
        widths: the numbers of tokens of the passes.
        deterministic: whether proposals come without probabilities, which another `Judge` verifies;
            None where both kinds occur.
    """
    warp = warp_of(decoding)
    kinds = [False, True] if deterministic is None else [deterministic]
    verification, lenience = rule_of(decoding, fault)
    judges = [Judge(warp, verification, lenience, is_deterministic=kind) for kind in kinds]
    return {width: judges if width > 1 else [Draw(warp)] for width in widths}
