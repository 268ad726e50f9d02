"""The record and the settings of `plan`, which shows whether a pair fits, before anything is downloaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from harness.commands.command import Command
from harness.commands.plan.rows import PlanRow
from harness.config.amounts import quantity, rates_by_position
from harness.config.errors import SettingError, VerdictError
from harness.config.gpus import Gpu, gpus_named
from harness.config.machine import gpu_names
from harness.config.model_names import SERVED
from harness.config.run import RunSettings
from harness.config.settings import require, require_at_least
from harness.engines.door.plans import PretendedGpus

# Matches an amount of memory: `40GB`, `80 GiB`, `1.5t`.
_AMOUNT = re.compile(r"(\d+(?:\.\d*)?) ?([mgt])(i?)b?", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class PlanSettings(RunSettings):
    """`plan`: does a pair fit, before anything is downloaded? Nothing is decoded: `seed`, `force` and the like have no
    effect, so that another command's settings can be planned unchanged.

    Attributes:
        gpus: number of GPUs to plan for, instead of those of this machine or the number in `gpu_memory`; `8xA100` is
            `gpu_memory=8xA100`.
        gpu_memory: memory of each GPU with its unit, `40GB` (10^9 bytes), `80GiB` (2^30 bytes) or `8x40GB`; or a GPU's
            name, `A100` or `8xH100`. Of several sizes the smallest counts, unless it is named: `'A100 80GB'`.
        bandwidth: bandwidth of a GPU's memory, or of main memory, in GB/s.
        prompt_length: tokens of the longest prompt.
        acceptance: the assumed acceptance, for a predicted speed-up: the probability that a draft token is accepted if
            the earlier ones were, `0.7` or `70%`; or as engines print it at one K: tokens per iteration, `3.2@4`, or
            the rate accepted ÷ proposed, `56%@4`.
    """

    # A preset may have settings of other commands (`RunSettings`).
    IGNORES_OTHERS = True

    gpus: int | str | None = None
    gpu_memory: str | None = None
    bandwidth: float | None = None
    prompt_length: int = 128
    acceptance: str | tuple[float | str, ...] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model.repository == SERVED:
            rule = "must be named, and draft= too: plan starts no server and asks none"
            raise SettingError("model", rule)
        if isinstance(self.gpus, str):
            is_alone = self.gpu_memory is None
            require(is_alone, "gpus", "must be a number beside gpu_memory", self.gpus)
            # `gpus=8xA100` becomes `gpu_memory=8xA100`.
            object.__setattr__(self, "gpu_memory", self.gpus)
            object.__setattr__(self, "gpus", None)
        require_at_least(self, gpus=1, prompt_length=1)
        number, _, _ = self._chosen_gpus
        require(1 <= number <= 1024, "gpus", "must be from 1 to 1024", number)
        if self.gpus is not None and self.gpu_memory is None and not gpu_names():
            rule = (
                "must say what each of the hypothetical GPUs has, such as gpu_memory=40GB or A100"
            )
            raise SettingError("gpu_memory", rule)
        rule = "must be an amount with its unit, such as 40GB or 80GiB, or a GPU: A100, 8xH100"
        is_amount = self.gpu_memory is None or bool(self.gpu_memory_bytes)
        require(is_amount, "gpu_memory", rule, self.gpu_memory)
        is_finite = self.bandwidth is None or 0 < self.bandwidth < float("inf")
        require(is_finite, "bandwidth", "must be positive, in GB/s", self.bandwidth)
        if self.acceptance is not None:
            self._check_acceptance(self.acceptance)

    def _check_acceptance(self, typed: str | tuple[float | str, ...]) -> None:
        """Raise a SettingError unless `acceptance` has one of its forms, and there is a draft.

        Args:
            typed: the value, which is not None. A list is always wrong; if it may be of rates, the error says what to
                type.
        """
        rule = "must be null without a draft: nothing is accepted"
        require(self.draft is not None, "acceptance", rule, typed)
        if self.length_at_k is not None:
            length, k = self.length_at_k
            rule = f"must be from 1 to {k + 1} tokens per iteration at K={k}, or a rate of proposed tokens, 56%@{k}"
            require(k >= 1 and 1 <= length <= k + 1, "acceptance", rule, typed)
            return
        by_position = typed if isinstance(typed, str) else ",".join(map(str, typed))
        rule = rates_by_position(by_position, "acceptance={:.3f}@{}") or (
            "must be the probability that a draft token is accepted if the earlier ones were, 0.7 or 70%, or as"
            " engines print it at one K:"
            " tokens per iteration, 3.24@4, or the rate accepted ÷ proposed, 56%@4"
        )
        rate = self.rate
        require(rate is not None and 0 < rate <= 1, "acceptance", rule, typed)

    @property
    def length_at_k(self) -> tuple[float, int] | None:
        """The tokens per iteration and the K in `acceptance=3.24@4` or `acceptance=56%@4`; None for any other form."""
        match = re.fullmatch(r"(\d+(?:\.\d*)?)(%?)@(\d+)", str(self.acceptance))
        if match is None:
            return None
        number, k = float(match[1]), int(match[3])
        return (1 + k * number / 100 if match[2] else number), k

    @property
    def rate(self) -> float | None:
        """The probability in `acceptance=0.7` or `acceptance=70%`; None for any other form."""
        typed = str(self.acceptance)
        try:
            share = quantity(typed, {"%": 0.01})
            return float(typed) if share is None else share
        except ValueError:
            return None

    @property
    def pretended(self) -> PretendedGpus | None:
        """The hypothetical GPUs to plan for; None to plan for this machine's GPUs."""
        if self.gpus is None and self.gpu_memory is None:
            return None
        number, name, gpus = self._chosen_gpus
        size = None if gpus else name
        # Several products may have the smallest memory that is sold under this name, with different bandwidths.
        smallest = [gpu for gpu in gpus if gpu.memory_gb == gpus[0].memory_gb]
        return PretendedGpus(number, self.gpu_memory_bytes, size, smallest)

    @property
    def other_sizes(self) -> str:
        """A note if GPUs of several sizes have the given name: `A100 is planned with 40 GB each;
        gpu_memory='A100 PCIe 80GB' has 80 GB`. Otherwise empty.
        """
        number, _, gpus = self._chosen_gpus
        if not gpus or gpus[-1].memory_gb == gpus[0].memory_gb:
            return ""
        count = f"{number}x" if number > 1 and self.gpus is None else ""
        planned = f"{self.gpu_memory} is planned with {gpus[0].memory_gb:g} GB each"
        return f"{planned}; gpu_memory='{count}{gpus[-1].name}' has {gpus[-1].memory_gb:g} GB"

    @property
    def _chosen_gpus(self) -> tuple[int, str, Sequence[Gpu]]:
        """The number of GPUs (from `gpus`, or the 8 in `8xH100` and `8x40GB`); the name or the amount of memory; and
        the GPUs with this name, the smallest first, or [] for an amount.
        """
        typed = self.gpu_memory or ""
        match = re.match(r"(\d+) ?[x×] ?", typed)
        number = int(self.gpus or (1 if match is None else match[1]))
        name = typed.removeprefix(match[0] if match else "")
        # An amount, `80GB`, must not be looked up as part of a name, `A100 80GB`.
        return number, name, [] if _AMOUNT.fullmatch(name) else gpus_named(name)

    @property
    def gpu_memory_bytes(self) -> int | None:
        """The memory of each GPU in bytes, from an amount or a GPU's name; None if `gpu_memory` is neither."""
        _, name, gpus = self._chosen_gpus
        if gpus:
            return round(gpus[0].memory_gb * 10**9)
        match = _AMOUNT.fullmatch(name)
        if match is None:
            return None
        number, unit, binary = match.groups()
        base = 1024 if binary else 1000
        return round(float(number) * base ** {"m": 2, "g": 3, "t": 4}[unit.lower()])


class Plan(Command[PlanSettings, PlanRow]):
    """The record of `plan`, which shows whether a pair fits, and how fast it can be at best."""

    name = "plan"
    summary = "whether a pair fits on these GPUs, or on others, before anything is downloaded"
    example = "model=65B draft=7B_4bit gpus=4 gpu_memory=40GB"
    examples = (
        ("model=7B", "this machine's GPUs, or its main memory"),
        ("model=65B draft=7B_4bit gpus=4 gpu_memory=40GB", "other GPUs, on any machine"),
        ("model=13B gpus=1 gpu_memory=24GB batch_size=16 prompt_length=1000", "longer prompts"),
        ("model=./my-model bandwidth=300", "its config.json is enough"),
        (
            "model=30B draft=7B gpus=1 gpu_memory=80GB acceptance=0.7",
            "the highest speed-up there if so many draft tokens are accepted",
        ),
        (
            "-m model=13B,30B,65B draft=7B,7B_4bit gpus=8 gpu_memory=40GB",
            "a table of all pairs",
        ),
    )
    notes = "Exit code 0: it fits; 1: it does not, or planning failed; 2: a wrong setting."
    settings = PlanSettings
    experiment = "harness.commands.plan.measure:PlanExperiment"
    row = PlanRow
    shown_by = "harness.commands.plan.tables:plan_page"
    measures = False

    def needs_local(self, settings: PlanSettings) -> bool:
        return True

    def bad_answer(self, rows: Sequence[PlanRow]) -> VerdictError | None:
        """The error if the pair does not fit; None if it does."""
        return None if rows[0].status != "does_not_fit" else VerdictError(str(rows[0].error), 1)

    def line(self, rows: Sequence[PlanRow]) -> str:
        return "fits"
