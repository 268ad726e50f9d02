"""`plan`: does a pair fit, before anything is downloaded, and what would K give that nobody measured?"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from harness.commands.command import Command
from harness.commands.plan.rows import PlanRow
from harness.config.amounts import quantity
from harness.config.errors import SettingError, VerdictError
from harness.config.gpus import Gpu, gpus_named
from harness.config.machine import gpu_names
from harness.config.run import RunSettings
from harness.config.settings import LARGEST_K, require, require_at_least
from harness.engines.door.plans import PretendedGpus
from harness.results.statistics.interval import Interval

if TYPE_CHECKING:
    from harness.reporting.page import Page
    from harness.results.runs import Run


@dataclass(frozen=True, kw_only=True)
class TypedAcceptance:
    """`acceptance=` as a value: a path, or numbers.

    Attributes:
        path: of a run or a table; None for numbers.
        rates: the chance that a draft token is accepted if those before it were, by position; () for none.
        k, length: tokens per iteration at one K; the length is None for anything else.
    """

    path: str | None = None
    rates: tuple[float, ...] = ()
    k: int = 0
    length: float | None = None

    @classmethod
    def read(cls, typed: str | tuple[float, ...] | None) -> TypedAcceptance:
        """A path, `0.7`, `70%`, `[0.8,0.7]` or `3.2@4`."""
        if typed is None or isinstance(typed, tuple):
            return cls(rates=typed or ())
        at_k = re.fullmatch(r"(\d+(?:\.\d*)?)@(\d+)", typed)
        if at_k is not None:
            return cls(k=int(at_k[2]), length=float(at_k[1]))
        try:
            share = quantity(typed, {"%": 0.01})
            return cls(rates=(float(typed) if share is None else share,) * LARGEST_K)
        except ValueError:
            return cls(path=typed)

    def yields(self, most: int) -> dict[int, Interval]:
        """Tokens per iteration by K: of the one K that was typed, or by rates of each up to `most`; {} for a path."""
        if self.length is not None:
            return {self.k: Interval(self.length)}
        yields = {}
        tokens = reached = 1.0
        for k, rate in enumerate(self.rates[:most], start=1):
            reached *= rate
            tokens += reached
            yields[k] = Interval(tokens)
        return yields


@dataclass(frozen=True, kw_only=True)
class PlanSettings(RunSettings):
    """`plan`: does a pair fit, before anything is downloaded? Nothing is decoded: `seed`, `force` and the like have no
    effect, so that another command's settings can be planned unchanged.

    Attributes:
        gpus: how many GPUs to plan for, in place of those here and of the number in `gpu_memory`; `8xA100` is
            `gpu_memory=8xA100`.
        gpu_memory: of each, with its unit: `40GB` (10^9 bytes), `80GiB` (2^30 bytes); or a GPU's name, `A100` or
            `8xH100`. Of several sizes the smallest counts, unless it is named: `'A100 80GB'`.
        bandwidth: of a GPU's memory, or of main memory, in GB/s.
        prompt_length: tokens of the longest prompt; with a server's address in `costs`, of the context before its timed
            passes.
        costs: what an iteration costs: runs of `latency` or `map`, a table (`FILE`, or `FILE@WORD`
            for its rows with that word), or the address of a plain server. The speed-up is
            predicted from it and from `acceptance`, without models. None: the bytes that the pair
            reads set the cost.
        acceptance: what an iteration yields: a run of `acceptance` or, with `costs`, of `latency`,
            or a table; or the chance that a draft token is accepted if those before it were, `0.7`,
            or by position `[0.8,0.7,0.6]`; or tokens per iteration at one K, `3.2@4`.
        api_key_variable: name of the environment variable with the API key of a server in `costs`.
    """

    gpus: int | str | None = None
    gpu_memory: str | None = None
    bandwidth: float | None = None
    prompt_length: int = 128
    costs: str | None = None
    acceptance: str | tuple[float, ...] | None = None
    api_key_variable: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if isinstance(self.gpus, str):
            is_alone = self.gpu_memory is None
            require(is_alone, "gpus", "must be a number beside gpu_memory", self.gpus)
            object.__setattr__(self, "gpu_memory", self.gpus)
            object.__setattr__(self, "gpus", None)
        require_at_least(self, gpus=1, prompt_length=1)
        number, _ = self._chosen_gpus
        require(1 <= number <= 1024, "gpus", "must be from 1 to 1024", number)
        if self.gpus is not None and self.gpu_memory is None and not gpu_names():
            rule = "must say what each of the pretended GPUs has, such as gpu_memory=40GB or A100"
            raise SettingError("gpu_memory", rule)
        rule = "must be an amount with its unit, such as 40GB or 80GiB, or a GPU: A100, 8xH100"
        is_amount = self.gpu_memory is None or bool(self.gpu_memory_bytes)
        require(is_amount, "gpu_memory", rule, self.gpu_memory)
        is_finite = self.bandwidth is None or 0 < self.bandwidth < float("inf")
        require(is_finite, "bandwidth", "must be positive, in GB/s", self.bandwidth)
        for name in ("costs", "acceptance"):
            typed = getattr(self, name)
            require(typed not in ("", ()), name, "must not be empty", typed)
        rule = "needs acceptance=: what an iteration yields, such as acceptance=0.7 or a run"
        require(self.costs is None or self.acceptance is not None, "costs", rule, self.costs)
        rule = "must be null without a draft: nothing is accepted"
        needs_draft = self.acceptance is not None and self.costs is None
        require(self.draft is not None or not needs_draft, "acceptance", rule, self.acceptance)
        accepted = self.typed_acceptance
        rule = "must be above 0 and at most 1, or a run of acceptance"
        for rate in accepted.rates:
            require(0 < rate <= 1, "acceptance", rule, self.acceptance)
        if accepted.length is not None:
            k = accepted.k
            rule = f"must be from 1 to {k + 1} tokens per iteration at K={k}"
            is_possible = k >= 1 and 1 <= accepted.length <= k + 1
            require(is_possible, "acceptance", rule, self.acceptance)

    @property
    def typed_acceptance(self) -> TypedAcceptance:
        """The meaning of `acceptance` as typed."""
        return TypedAcceptance.read(self.acceptance)

    @property
    def named_paths(self) -> dict[str, str]:
        paths = {"costs": self.costs, "acceptance": self.typed_acceptance.path}
        named = {}
        for name, path in paths.items():
            if path is not None and "://" not in path:
                # `FILE@WORD` selects rows of a file.
                named[name] = path if Path(path).exists() else path.partition("@")[0]
        return named

    @property
    def pretended(self) -> PretendedGpus | None:
        """The GPUs to plan for; None for those here."""
        if self.gpus is None and self.gpu_memory is None:
            return None
        number, gpus = self._chosen_gpus
        size = None if gpus else self.gpu_memory
        return PretendedGpus(number, self.gpu_memory_bytes, size, gpus)

    @property
    def _chosen_gpus(self) -> tuple[int, Sequence[Gpu]]:
        """The number, by `gpus` or as in `8xH100`, and the kinds; no kind for an amount."""
        typed = self.gpu_memory or ""
        match = re.match(r"(\d+) ?[x×] ?", typed)
        number = int(self.gpus or (1 if match is None else match[1]))
        return number, gpus_named(typed.removeprefix(match[0] if match else ""))

    @property
    def gpu_memory_bytes(self) -> int | None:
        """`gpu_memory` in bytes; None where it is not set or is no amount."""
        _, gpus = self._chosen_gpus
        if gpus:
            return round(gpus[0].memory_gb * 10**9)
        pattern = r"(\d+(?:\.\d*)?) ?([mgt])(i?)b?"
        match = re.fullmatch(pattern, self.gpu_memory or "", re.IGNORECASE)
        if match is None:
            return None
        number, unit, binary = match.groups()
        base = 1024 if binary else 1000
        return round(float(number) * base ** {"m": 2, "g": 3, "t": 4}[unit.lower()])


class Plan(Command[PlanSettings, PlanRow]):
    """Says whether a pair fits and how fast it can be at best, or predicts from costs that were measured."""

    name = "plan"
    summary = "whether a pair fits on these GPUs, or on others, before anything is downloaded"
    example = "model=65B draft=7B_4bit gpus=4 gpu_memory=40GB"
    examples = (
        ("model=7B", "this machine's GPUs, or its main memory"),
        ("model=65B draft=7B_4bit gpus=4 gpu_memory=40GB", "other GPUs, on any machine"),
        ("model=13B gpus=1 gpu_memory=24GB batch_size=16 prompt_length=1000", "longer prompts"),
        ("model=./my-model bandwidth=300", "its config.json is enough"),
        (
            "model=30B draft=7B gpus=1 gpu_memory=80GB acceptance=outputs/acceptance/2026-11-22/09-43-39",
            "what a run of `acceptance` predicts there, and the best K",
        ),
        (
            "costs=results/latency.csv acceptance=results/acceptance.csv",
            "what a sweep over K costs and texts yield, without models",
        ),
        ("costs=costs.csv acceptance=0.8", "the same from a table (k,in_flight,ms) and a guess"),
        (
            "-m model=13B,30B,65B draft=7B,7B_4bit gpus=8 gpu_memory=40GB",
            "a table of all pairs",
        ),
    )
    notes = "Exit code 0: it fits; 1: it does not, or planning failed; 2: a wrong setting."
    help_order = 6
    settings = PlanSettings
    experiment = "harness.commands.plan.measure:PlanExperiment"
    row = PlanRow
    measures = False

    def needs_local(self, settings: PlanSettings) -> bool:
        return settings.costs is None

    def bad_answer(self, rows: Sequence[PlanRow]) -> VerdictError | None:
        """The error where the pair does not fit."""
        return None if rows[0].status != "does_not_fit" else VerdictError(str(rows[0].error), 1)

    def line(self, rows: Sequence[PlanRow]) -> str:
        from harness.commands.plan.predictions import best_in_words

        return best_in_words(rows) if rows[0].cost_source else "fits"

    def page(self, runs: Sequence[Run[PlanRow]]) -> Page | None:
        from harness.commands.plan.predictions import predictions_page
        from harness.commands.plan.tables import plan_page

        rows = [row for run in runs for row in run.rows]
        predicted = [row for row in rows if row.cost_source]
        if not predicted:
            return plan_page(rows)
        failed = [run.last for run in runs if run.status == "failed"]
        return predictions_page(predicted, failed)
