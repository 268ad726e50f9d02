"""Checkpoints of a training: does a draft still pay, said so that it holds however often one looks?"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import NamedTuple

from harness.commands.acceptance.figures import best_row, curve_names, estimate_of, texts_of
from harness.reporting.table import interval
from harness.results.rows.acceptance import AcceptanceRow
from harness.results.runs import Run
from harness.results.statistics.confidence_sequences import anytime_tokens_per_iteration
from harness.results.statistics.interval import CONFIDENCE, Interval
from harness.results.statistics.ratios import totals_by_unit
from harness.results.verdict import Conclusion, judge

# `./step_100`, `runs/a/checkpoint-200`: a directory whose name ends with a number.
_CHECKPOINT = re.compile(r"(.*/\D*)(\d+)/?")
# With fewer tokens per iteration, hardly any draft token is accepted.
_DEAD = 1.05
BOUNDS = (
    "95 % bounds of checkpoints hold for every K and checkpoint at once, however often one looks."
)


class Checkpoint(NamedTuple):
    """A checkpoint of a target or a draft, at the K of its training.

    Attributes:
        tokens: per iteration, with bounds that hold for every K, checkpoint and number of prompts at once.
        break_even: what an iteration costs, in target steps; None where that is unknown.
        conclusion: `faster` where the lower bound is above the break-even, `slower` where the upper one is below it.
    """

    step: int
    tokens: Interval
    break_even: float | None
    conclusion: Conclusion


class Training(NamedTuple):
    """Checkpoints of one training, by step.

    Attributes:
        k: that of the highest expected speed-up at any checkpoint: the first one's where the target moves away from its
            draft, the last one's where a draft learns.
    """

    name: str
    k: int
    checkpoints: Sequence[Checkpoint]
    runs: Sequence[Run[AcceptanceRow]]

    def finding(self) -> str:
        """`step_… with 7B no longer pays at K=4 since 40: 1.02 to 1.31 tokens per iteration at 60, break-even 1.60`."""
        last = self.checkpoints[-1]
        paid = any(one.conclusion == "faster" for one in self.checkpoints)
        if last.conclusion == "faster":
            words = "pays"
        elif last.conclusion == "cannot tell":
            words = "is not known to pay any more" if paid else "is not known to pay"
        elif last.tokens.estimate < _DEAD:
            words = "is dead"
        else:
            words = "no longer pays" if paid else "does not pay"
        alike = takewhile(lambda one: one.conclusion == last.conclusion, reversed(self.checkpoints))
        *_, since = alike
        when = "at every checkpoint" if since is self.checkpoints[0] else f"since {since.step}"
        bounds = interval(last.tokens) or f"{last.tokens.estimate:.2f}"
        text = f"{self.name} {words} at K={self.k} {when}: {bounds} tokens per iteration at {last.step}"
        return text if last.break_even is None else f"{text}, break-even {last.break_even:.2f}"


def trainings(runs: Sequence[Run[AcceptanceRow]]) -> list[Training]:
    """Those of which there are two checkpoints or more."""
    found: dict[str, dict[int, Run[AcceptanceRow]]] = defaultdict(dict)
    known = [run for run in runs if run.last.tokens_per_iteration is not None]
    for target, of_target in curve_names(known).items():
        for name, run in of_target.items():
            draft, _, details = name.partition(" · ")
            if match := _CHECKPOINT.fullmatch(draft):
                found[f"{target} with {match[1]}… {details}".strip()][int(match[2])] = run
            elif match := _CHECKPOINT.fullmatch(target):
                found[f"{match[1]}… with {name}"][int(match[2])] = run
    return [_training(name, by_step) for name, by_step in found.items() if len(by_step) > 1]


def _training(name: str, by_step: Mapping[int, Run[AcceptanceRow]]) -> Training:
    k = int(best_row([best_row(run.rows) for run in by_step.values()]).num_draft_tokens or 1)
    # In the order of measurement, so that a checkpoint that is measured later changes no bound of those before.
    looks = sorted(run.id for run in by_step.values())
    checkpoints = []
    for step, run in sorted(by_step.items()):
        row = next(row for row in run.rows if row.num_draft_tokens == k)
        # The shares of all checkpoints that may ever come, 1/2, 1/6, 1/12 and so on, sum to 1.
        look = looks.index(run.id) + 1
        alpha = (1 - CONFIDENCE) / (look * (look + 1) * len(run.rows))
        tokens = Interval(estimate_of(row.tokens_per_iteration))
        if texts := texts_of(run):
            prompts = [text.prompt_index for text in texts]
            iterations = [(text.iterations_by_num_draft_tokens or [])[k - 1] for text in texts]
            tokens = anytime_tokens_per_iteration(
                totals_by_unit([text.num_tokens or 0 for text in texts], prompts),
                totals_by_unit(iterations, prompts),
                k,
                alpha,
            )
        cost = row.iteration_cost
        pays = judge(Interval() if cost is None else tokens.scaled(1 / cost))
        checkpoints.append(Checkpoint(step, tokens, cost, pays.conclusion))
    return Training(name, k, checkpoints, [*by_step.values()])
