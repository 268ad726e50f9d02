"""The measurement of `plan`: does a pair fit, and how fast can it be at best, before anything is downloaded?

The local wing makes sketches of the models (sizes without weights) from their configurations, and places them on this
machine or on a hypothetical one (`engines.door.plans`). This file computes the columns of a row from the bytes that
passes must read.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from harness.commands.command import Experiment
from harness.commands.plan.record import PlanSettings
from harness.commands.plan.rows import PlanRow
from harness.config.command_line import is_typed
from harness.config.errors import SettingError
from harness.config.settings import LARGEST_K
from harness.engines.door import local
from harness.engines.door.plans import Machine, PairPlan, PassBytes
from harness.measuring.session import Session


class PlanExperiment(Experiment[PlanSettings, PlanRow]):
    """Plans a pair on this machine or on a hypothetical one, without decoding anything.

    Attributes:
        figures: the columns of the row, which `measure` adds.
    """

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        self.figures: dict[str, Any] = {}
        if settings.length_at_k is None:
            return
        _, k = settings.length_at_k
        asked = settings.decoding.num_draft_tokens
        if is_typed("num_draft_tokens") and asked != k:
            rule = f"is of another K than K={asked}: leave one of them out"
            raise SettingError("acceptance", rule, settings.acceptance)
        decoding = replace(settings.decoding, num_draft_tokens=k)
        self.settings = replace(settings, decoding=decoding)

    def measure(self, session: Session) -> None:
        """Compute the columns. A pair that does not fit raises no error; the row's status says so."""
        settings = self.settings
        machine: Machine = local("engine.planning").find_machine(settings, settings.pretended)
        session.devices = [machine.name]
        num_draft_tokens = settings.most_draft_tokens
        plan: PairPlan = local("engine.planning").plan_on(machine, settings, settings.prompt_length)
        # Some heads draft at most `most` tokens, even if K is larger. `plan.reads` is already computed for these.
        most = (plan.reads and plan.reads.most_draft_tokens) or LARGEST_K
        k = min(num_draft_tokens, most)
        if k < num_draft_tokens and settings.length_at_k is not None:
            rule = f"is given at K={num_draft_tokens}, and this head drafts at most {most}: give it at K={most}"
            raise SettingError("acceptance", rule, settings.acceptance)
        if plan.misfit is not None:
            session.status, session.error = "does_not_fit", plan.misfit
            self.figures["instead"] = [vars(remedy) for remedy in plan.remedies] or None
        bandwidths = machine.bandwidths
        if settings.bandwidth is not None:
            bandwidths = {"the given bandwidth": settings.bandwidth}
        self.figures |= plan.sizes
        notes = list(filter(None, [settings.other_sizes, *(plan.sizes.get("note") or [])]))
        self.figures["bandwidths"] = bandwidths
        if plan.reads is not None:
            if k < num_draft_tokens:
                notes.append(
                    f"K={num_draft_tokens} drafts no more tokens than K={k}: the head cannot draft more"
                )
            self.figures |= _limits(plan.reads, k)
            if settings.acceptance is not None:
                tokens = _tokens_per_iteration(settings, k)
                self.figures["predicted_tokens_per_iteration"] = tokens
                self.figures["predicted_speedup"] = tokens / plan.reads.iteration_steps
            if settings.rate is not None:
                as_printed = (1 + k * settings.rate) / plan.reads.iteration_steps
                notes.append(
                    f"{settings.acceptance} is taken as the probability that a draft token is accepted if all earlier"
                    " ones were; if it is the rate that engines print (accepted ÷ proposed), type"
                    f" acceptance={100 * settings.rate:g}%@{k}: the speed-up is then at most {as_printed:.2f}×"
                )
        self.figures["note"] = notes or None

    def rows(self, session: Session) -> list[PlanRow]:
        return [session.row(PlanRow, **self.figures)]


def _limits(reads: PassBytes, num_draft_tokens: int) -> dict[str, Any]:
    """The columns about the bytes that must be read per token, and about the largest possible speed-up.

    In the best case, every draft token is accepted, and a verification only takes the time for reading its weights and
    caches. It reads more than a step if its tokens use different experts. If an iteration reads as much as 1.5 steps
    and yields up to 5 tokens, the speed-up is at most 5 / 1.5, and 1.5 tokens per iteration are needed to break even.
    """
    figures: dict[str, Any] = {"read_bytes": round(reads.step)}
    if num_draft_tokens == 0:
        return figures
    most_tokens = num_draft_tokens + 1
    steps = reads.iteration_steps
    return figures | {
        "verification_steps": reads.verification / reads.step,
        "speculative_read_bytes": round(steps * reads.step / most_tokens),
        "highest_speedup": most_tokens / steps,
        "break_even_tokens": steps,
    }


def _tokens_per_iteration(settings: PlanSettings, num_draft_tokens: int) -> float:
    """The tokens per iteration according to `acceptance`: as typed, or computed from the probability that a draft token
    is accepted if all draft tokens before it were.
    """
    if settings.length_at_k is not None:
        return settings.length_at_k[0]
    rate = settings.rate or 0.0
    return sum(rate**accepted for accepted in range(num_draft_tokens + 1))
