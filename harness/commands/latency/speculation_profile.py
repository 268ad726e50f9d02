"""Writes the acceptance of a run as other tools read it: `speculation_profile.json` in its directory.

It has the schema 1.0 of NVIDIA's Model-Optimizer (pull requests 2247, 2313 and 2315), which
Dynamo's mocker and vLLM's synthetic acceptance read; under `harness` it has what that schema lacks, the
intervals among them. `docs/acceptance.md` describes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from harness.commands.latency.figures.acceptance import (
    MOST_INTERVALS,
    MeasuredAcceptance,
    acceptance_by_prompt,
)
from harness.commands.latency.figures.measured import MeasuredRun
from harness.config.acceptance_rules import tests_each_token
from harness.config.run import PromptedSettings
from harness.config.settings import ModelSettings
from harness.config.synthetic import RATES_BY_RANK, TESTED_SHARES
from harness.engines.pair import PlannedPair
from harness.measuring.session import Session
from harness.results.acceptance import mean_length_per_request
from harness.results.environment import package_version
from harness.results.locked_files import replace_file
from harness.results.statistics.interval import Interval

PROFILE_FILE = "speculation_profile.json"

_SCHEMA_VERSION = "1.0"
_DECIMALS = 6


def write_acceptance(session: Session, run: MeasuredRun) -> None:
    """Write the file, unless nothing was drafted."""
    settings = run.settings
    draft = settings.draft
    arm = run.arms.get("speculative")
    if draft is None or arm is None:
        return
    measured = acceptance_by_prompt(run)
    if not measured.drafted:
        return
    method = draft.method
    if method == "model":
        head = session.planned.head
        method = "draft_model" if head is None else head.kind.name
    own: dict[str, Any] = {"version": package_version("harness"), "run": session.run}
    if arm.rates_by_rank:
        # Of a tree's children, which `draft.rates` reads.
        own[RATES_BY_RANK] = arm.rates_by_rank
    decoding = settings.decoding
    names = ("temperature", "top_k", "top_p", "rule", "num_draft_tokens", "ignore_eos")
    # Under the schema's names: `osl` is the output sequence length.
    conditions = {
        "dataset": settings.prompts.name,
        "osl": decoding.max_new_tokens,
        "num_samples": len(measured.requests),
        **{name: getattr(decoding, name) for name in names},
        "nodes_of_trees": draft.most_nodes or None,
        "chat_template": settings.chat_template,
        "batch_size": settings.batch_size,
        "engine": settings.engine.name,
        "seed": settings.seed,
        "synthetic": decoding.synthetic_acceptance is not None,
    }
    profile = {
        "method": method,
        "target_model": _checkpoint(settings.model),
        "draft_checkpoint": _checkpoint(draft) if isinstance(draft, ModelSettings) else None,
        "measurement_conditions": conditions,
        **speculation_profile(measured, is_block=decoding.rule == "block"),
    }
    profile["harness"] |= own
    content = json.dumps(profile, indent=2) + "\n"
    replace_file(session.directory / PROFILE_FILE, content.encode())


def smaller_k_follow(planned: PlannedPair, settings: PromptedSettings) -> bool:
    """Whether a smaller K would accept the beginnings of what was accepted.

    A smaller tree or a smaller block is not the beginning of a larger one, and what a server drafts
    is unknown.
    """
    if settings.num_levels is not None or not tests_each_token(settings.decoding.rule):
        return False
    if planned.draft_plan is None:
        return False
    return not any(sketch.drafts_in_one_pass for sketch in planned.sketches[1:])


def _checkpoint(model: ModelSettings) -> dict[str, Any]:
    """A checkpoint for readers elsewhere: of a directory's path the last part alone."""
    local = Path(model.repository).is_dir()
    name = Path(model.repository).name if local else model.repository
    return {"id": name, "revision": model.revision, "quantization": model.quantization}


def speculation_profile(measured: MeasuredAcceptance, *, is_block: bool) -> dict[str, Any]:
    """The figures of the profile of a run in which something was drafted.

    Args:
        is_block: whether whole blocks were verified, so that no rate by position describes it.
    """
    total = measured.total
    num_places = measured.num_places
    marginal = [rate or 0.0 for rate in total.marginal_rates[:num_places]]
    # In this schema the marginal rate of a position over that of the one before. A proposal that
    # ends early counts as a rejection here, but not in `accept_rates_of_tested`: where one
    # iteration accepted 3 of 4 tokens, and one both of 2, the third position has 1/2 here and 1 there.
    conditional = [
        rate / before if before else 0.0
        for before, rate in zip([1.0, *marginal[:-1]], marginal, strict=True)
    ]
    length_per_request = mean_length_per_request(measured.requests)
    reported = total.mean_acceptance_length or 0.0
    implied = 1 + sum(marginal)
    by_category = {
        category: {
            "mean_accept_length": round(acceptance.mean_acceptance_length or 0.0, _DECIMALS),
            "num_steps": acceptance.num_iterations,
        }
        for category, acceptance in measured.by_category().items()
        if acceptance.num_iterations
    }
    profile: dict[str, Any] = {
        "schema_version": _SCHEMA_VERSION,
        "measured": True,
        "num_speculative_tokens": num_places,
        "conditional_accept_rates": None if is_block else _rounded(conditional),
        "marginal_accept_rates": None if is_block else _rounded(marginal),
        "mean_accept_length": round(reported, _DECIMALS),
        "mean_accept_length_per_request": (
            None if length_per_request is None else round(length_per_request, _DECIMALS)
        ),
        # By the tokens of an iteration, the target's own counted: from 1 on.
        "acceptance_length_histogram": {
            str(1 + accepted): times for accepted, times in enumerate(total.histogram) if times
        },
        # Whether the lengths of smaller K follow from these rates, or are to be measured.
        "accept_length_model": "chain_analytic" if measured.extrapolates else "measured_per_k",
        "verification_method": "block" if is_block else "longest_prefix",
        "per_category": by_category or None,
        "validation": {
            "mean_consistency": {
                "passed": abs(implied - reported) < 1e-6,
                "implied_mean_accept_length": round(implied, _DECIMALS),
                "reported_mean_accept_length": round(reported, _DECIMALS),
            },
            "marginal_monotonicity": {
                "passed": all(later <= earlier for earlier, later in pairwise(marginal))
            },
        },
    }
    if is_block:
        # The entry `validation` needs no vectors: accepted counts add up for blocks, too.
        reason = "block verification does not keep the longest-prefix of accepted tokens"
        profile["vectors_unavailable_reason"] = reason
        return profile | {"harness": {"intervals_95": {}}}
    rates_of_tested = [rate or 0.0 for rate in total.conditional_rates[:num_places]]
    num_tested = [total.num_tested_at(place) for place in range(num_places)]
    # 95 % intervals over prompts; None where there are too few.
    places = range(min(num_places, MOST_INTERVALS))
    length = measured.length_with(num_places)
    profile["harness"] = {
        "accept_rates_of_tested": _rounded(rates_of_tested),
        TESTED_SHARES: _rounded([number / total.num_iterations for number in num_tested]),
        "intervals_95": {
            "covers": length.covers,
            "mean_accept_length": _bounds(length),
            "accept_rates_of_tested": [_bounds(measured.rate_of_tested(place)) for place in places],
            "marginal_accept_rates": [_bounds(measured.marginal(place)) for place in places],
        },
    }
    return profile


def _bounds(interval: Interval) -> list[float] | None:
    return _rounded([interval.low, interval.high]) if interval.has_bounds else None


def _rounded(rates: Sequence[float]) -> list[float]:
    return [round(rate, _DECIMALS) for rate in rates]
