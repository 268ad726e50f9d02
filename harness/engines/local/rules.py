"""From decoding settings to what the loops take: warp, rule of acceptance, prepared decisions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from harness.config.settings import DecodingSettings, Fault
from harness.decoding.decisions import Decision, Draw, Judge
from harness.decoding.rules import AcceptByCoin, verify_block, verify_typical
from harness.decoding.tree_rules import TreeRule, verify_eagle, verify_rounds, verify_traversal
from harness.decoding.verify import verify
from harness.decoding.warp import Warp
from harness.engines.local.faults import (
    LENIENCE,
    TreeBonusFromWrongPosition,
    Verification,
    faulty_verification,
)

# Values of `decoding.rule`. `deepmind` and `google` are `verify` for chains, where `google` alone may
# have a lenience, and `verify_rounds` for trees. Settings refuse `typical` with trees, and `eagle`
# with chains (`menu.trees.check_trees`).
_RULES: dict[str, Verification] = {"block": verify_block, "typical": verify_typical}
_TREE_RULES: dict[str, TreeRule] = {"block": verify_traversal, "eagle": verify_eagle}


class AcceptanceRule(NamedTuple):
    """A rule of acceptance. Equal for equal settings.

    Attributes:
        lenience: l in (0, 1]; a token is accepted with min(1, target / (l draft)). 1 is lossless.
    """

    verification: Verification
    lenience: float


def warp_of(decoding: DecodingSettings) -> Warp:
    """The warp that target and drafter share."""
    return Warp(decoding.temperature, decoding.top_k, decoding.top_p)


def rule_of(decoding: DecodingSettings, fault: Fault) -> AcceptanceRule:
    """The rule of these settings, with the fault in it."""
    rates = decoding.synthetic_rates
    rule = _RULES.get(decoding.rule, verify) if rates is None else AcceptByCoin(rates)
    lenience = LENIENCE if fault == "lenience" else decoding.lenience
    # One of the faults warps twice.
    return AcceptanceRule(faulty_verification(fault, warp_of(decoding), rule), lenience)


def tree_rule_of(decoding: DecodingSettings, fault: Fault) -> TreeRule:
    """The rule of these settings for trees, with the fault in it.

    Settings refuse lenience and synthetic rates with trees (`menu.trees.check_trees`), and all faults
    but `bonus_from_wrong_position` and one of the caches (`RecoverySettings`).
    """
    rule = _TREE_RULES.get(decoding.rule, verify_rounds)
    return TreeBonusFromWrongPosition(rule) if fault == "bonus_from_wrong_position" else rule


def decisions_of(
    decoding: DecodingSettings,
    fault: Fault,
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
    rule = rule_of(decoding, fault)
    judges = [
        Judge(warp, rule.verification, rule.lenience, is_deterministic=kind) for kind in kinds
    ]
    return {width: judges if width > 1 else [Draw(warp)] for width in widths}
