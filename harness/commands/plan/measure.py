"""`plan`: does a pair fit, and how fast can it be at best, before anything is downloaded?

The wing with the models sketches them from their configurations and places them on a real or pretended machine
(`engines.door.plans`); the bytes that passes read become the least times of a row here. With `costs=` no model is
looked at: what an iteration costs was measured, and `acceptance=` says what it yields (`commands.plan.predictions`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.commands.command import Experiment
from harness.commands.plan.predictions import predictions
from harness.commands.plan.record import PlanSettings
from harness.commands.plan.rows import PlanRow
from harness.commands.read_prices import read_prices, yields_of
from harness.commands.read_runs import runs_of_pair
from harness.config.acceptance_rules import PARAMETERS
from harness.config.errors import SettingError
from harness.config.model_names import SERVED
from harness.config.settings import LARGEST_K, ModelSettings, api_key
from harness.engines.door import local
from harness.engines.door.plans import Machine, PairPlan, PassBytes
from harness.measuring.session import Session
from harness.reporting.words import is_typed
from harness.results.judging.choice import best_of
from harness.results.price.table import PriceTable
from harness.results.price.value import IterationCost, write_costs
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.schema import LOCAL_PAIR_COLUMNS
from harness.results.statistics.interval import Interval

# The largest K that is tried with a guessed chance of acceptance, where bytes price any K.
_MOST_GUESSED = 16
# Columns of a plan that mean nothing where costs were measured.
_UNUSED = (
    "dtype",
    "engine",
    "repository",
    "chat_template",
    "placement",
    "temperature",
    "prompt_length",
    "max_new_tokens",
    "runner",
    "settings",
)


class PlanExperiment(Experiment[PlanSettings, PlanRow]):
    """Plans a pair on a real or pretended machine; decodes nothing.

    Attributes:
        accepted: the tokens per iteration of each K, by `acceptance=`; empty without it.
        predictions: the columns of each, from measured costs; None without `costs=`.
        timed: costs that were measured for this prediction.
        figures: columns of the row, filled by `measure`; of predictions those that all rows have.
    """

    def __init__(self, settings: PlanSettings) -> None:
        self.settings = settings
        most = LARGEST_K if settings.costs is not None else _MOST_GUESSED
        self.accepted = settings.typed_acceptance.yields(most)
        self.predictions: Sequence[dict[str, Any]] | None = None
        self.timed: IterationCost | None = None
        self.figures: dict[str, Any] = {}
        if settings.costs is not None:
            self._predict(settings.costs)
        elif settings.typed_acceptance.path is not None:
            names = ["top_k", "top_p", "rule", *PARAMETERS] if settings.decoding.temperature else []
            drawn = {name: getattr(settings.decoding, name) for name in ("temperature", *names)}
            runs = runs_of_pair("acceptance", AcceptanceRow, settings, drawn)
            self.accepted = yields_of(runs[-1])

    def _predict(self, path: str) -> None:
        """Predict from costs that were measured, of whatever pair that was."""
        key = api_key("api_key_variable", self.settings.api_key_variable)
        costs = read_prices("costs", path, self.settings.prompt_length, key)
        if "://" in path:
            self.timed = costs.costs[""]
        typed = self.settings.typed_acceptance
        accepted = PriceTable(yields={"": self.accepted}, rates=typed.rates)
        if typed.path is not None:
            accepted = read_prices("acceptance", typed.path)
            if typed.path == path:
                # A run says nothing about a prediction that follows from it.
                accepted = replace(accepted, measured={})
        elif len(costs.costs) > 1:
            names = ", ".join(costs.costs)
            example = f"costs={path}@{next(iter(costs.costs))}"
            rule = f"is of one draft, and costs are of {names}: name it ({example})"
            raise SettingError("acceptance", rule, self.settings.acceptance)
        in_flight = self.settings.batch_size
        load = in_flight if in_flight > 1 else None
        length = self.settings.decoding.max_new_tokens if is_typed("max_new_tokens") else None
        self.predictions, notes = predictions(
            costs, accepted, load, length, other_texts=typed.path != path
        )
        asked = self.settings.decoding.num_draft_tokens
        predicted = {columns["num_draft_tokens"] for columns in self.predictions}
        if is_typed("num_draft_tokens") and asked not in predicted:
            known = ", ".join(map(str, sorted(predicted)))
            notes.append(f"no price or no yield of K={asked}, but of K={known}: measure K={asked}")
        model = ModelSettings(name=costs.origin.get("model") or Path(path).stem, repository=SERVED)
        self.settings = replace(self.settings, model=model, draft=None)
        # Settings that nothing was measured with.
        self.figures = dict.fromkeys(PlanRow.columns().keys() & {*LOCAL_PAIR_COLUMNS, *_UNUSED})
        self.figures |= {**costs.origin, "note": notes or None}
        given = self.settings.acceptance
        self.figures["cost_source"] = path
        self.figures["acceptance_source"] = json.dumps(given) if isinstance(given, tuple) else given

    def measure(self, session: Session) -> None:
        if self.timed is not None:
            write_costs(session.directory, self.timed)
        if self.predictions is not None:
            return
        settings = self.settings
        machine: Machine = local("engine.planning").find_machine(settings, settings.pretended)
        session.devices = [machine.name]
        num_draft_tokens = settings.most_draft_tokens
        plan: PairPlan = local("engine.planning").plan_on(
            machine, settings, settings.prompt_length, {num_draft_tokens, *self.accepted}
        )
        if plan.misfit is not None:
            session.status, session.error = "does_not_fit", plan.misfit
            self.figures["instead"] = [vars(remedy) for remedy in plan.remedies] or None
        bandwidths = machine.bandwidths
        if settings.bandwidth is not None:
            bandwidths = {"the given bandwidth": settings.bandwidth}
        self.figures |= plan.sizes
        self.figures["bandwidths"] = bandwidths
        if plan.reads is not None:
            most = plan.reads.most_draft_tokens or LARGEST_K
            if num_draft_tokens > most:
                note = f"K={num_draft_tokens} drafts no more tokens than K={most}: the head's block has no more"
                self.figures["note"] = [*(self.figures["note"] or []), note]
            self.figures |= _limits(plan.reads, num_draft_tokens)
            drafted = {k: tokens for k, tokens in self.accepted.items() if k <= most}
            self.figures |= _prediction(plan.reads, drafted)

    def rows(self, session: Session) -> list[PlanRow]:
        if self.predictions is not None:
            return [
                session.row(PlanRow, **self.figures | prediction) for prediction in self.predictions
            ]
        return [session.row(PlanRow, **self.figures)]


def _limits(reads: PassBytes, num_draft_tokens: int) -> dict[str, Any]:
    """The bytes that a token must read, and the most that speculation can gain.

    Speculation at its best: every draft token is accepted, and a
    verification takes as long as reading what it needs, which is more than in a step where its
    tokens take different experts.
    """
    figures: dict[str, Any] = {"read_bytes": round(reads.step)}
    if num_draft_tokens == 0:
        return figures
    most_tokens = min(num_draft_tokens, reads.most_draft_tokens or LARGEST_K) + 1
    steps = reads.iteration_steps(num_draft_tokens)
    return figures | {
        "verification_steps": reads.verification[num_draft_tokens] / reads.step,
        "speculative_read_bytes": round(steps * reads.step / most_tokens),
        "highest_speedup": most_tokens / steps,
        "break_even_tokens": steps,
    }


def _prediction(reads: PassBytes, accepted: Mapping[int, Interval]) -> dict[str, Any]:
    """The highest speed-up by the bytes that each K must read; empty where no acceptance is known.

    Args:
        accepted: the tokens per iteration of each K.
    """
    if not accepted:
        return {}
    steps = {k: reads.iteration_steps(k) for k in accepted}
    speedups = {k: tokens.scaled(1 / steps[k]) for k, tokens in accepted.items()}
    best = best_of(speedups)
    return {
        "predicted_speedup": speedups[best],
        "predicted_tokens_per_iteration": accepted[best].estimate,
        "best_num_draft_tokens": best,
    }
