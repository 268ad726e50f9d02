"""The record and the settings of `recovery`, which tests whether speculative decoding recovers the target's
distribution.
"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.commands.command import Command
from harness.commands.recovery.rows import RecoveryRow, RecoveryTextRow
from harness.config.engines import Abilities
from harness.config.errors import CANNOT_TELL, VerdictError
from harness.config.model_names import SERVED
from harness.config.run import PromptedSettings
from harness.config.settings import require, require_at_least

# Names of sampling settings; `sampling.py` has their values.
SamplingName = Literal["as_asked", "temperature", "top_k", "top_p"]
_SAMPLINGS: tuple[SamplingName, ...] = typing.get_args(SamplingName)

# The fewest `num_draws` that can be typed.
FEWEST_DRAWS = 1000
_EXIT_CODES = {"lossy": 1, "undecided": CANNOT_TELL}


@dataclass(frozen=True, kw_only=True)
class RecoverySettings(PromptedSettings):
    """`recovery`: does speculative decoding recover the target's own distribution?

    Attributes:
        draft: None tests the regular arm.
        num_prompts: number of prompts for the requests; a set that has fewer is taken whole. Besides drawn texts, each
            prompt gets four greedy ones, after the prompt and after three variants of it; and if the reference reads
            texts, a fifth one after an answer.
        num_draws: number of sampled tokens over all sampling settings and prompts; `auto` plans as many as a verdict
            needs without rounding, and at least 2,000; a run ends before them if it finds a loss.
        false_alarm_rate: the largest probability that the sampled tests of one run call a lossless pair lossy.
        shift: the smallest change of the tokens' distribution that the tests must detect, as the share of the drawn
            tokens that moves from some parts of the distribution to others.
        samplings: the sampling settings of the sampled requests; `as_asked` means those of the run.
        reference: what answers are checked against: the model's `weights`, loaded here, or the log-probabilities that
            the `regular` arm reports; `auto` takes the weights if they can be loaded, else the regular arm.
        top_logprobs: number of likeliest tokens whose log-probabilities are requested at each position, if the regular
            arm is the reference; -1 requests all.
        batch_size: number of requests in flight; they have mixed lengths, prompts that begin alike, second turns and
            different sampling settings, and some are left midway; 1 sends them one at a time.
    """

    # The runner that `latency` times by default, so that its kernels are tested (`RunSettings`).
    GPU_RUNNER = "compiled"

    num_prompts: int = 15
    num_draws: int | Literal["auto"] = "auto"
    false_alarm_rate: float = 1e-9
    shift: float = 0.05
    samplings: tuple[SamplingName, ...] = _SAMPLINGS
    reference: Literal["auto", "weights", "regular"] = "auto"
    top_logprobs: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        beyond_model = self.engine.beyond_model
        rule = f"must be auto with {beyond_model}: neither weights nor log-probabilities of plain texts show its effect"
        require(beyond_model is None or self.reference == "auto", "reference", rule, self.reference)
        require_at_least(self, num_prompts=1)
        most = self.decoding.max_new_tokens
        rule = "must be at least 2: speculation decides no first token"
        require(most > 1, "decoding.max_new_tokens", rule, most)
        rule = f"must be auto or at least {FEWEST_DRAWS}, and at most 10^8"
        fits = self.num_draws == "auto" or FEWEST_DRAWS <= self.num_draws <= 10**8
        require(fits, "num_draws", rule, self.num_draws)
        require(
            0 < self.false_alarm_rate < 1,
            "false_alarm_rate",
            "must be in (0, 1)",
            self.false_alarm_rate,
        )
        require(0 < self.shift <= 0.5, "shift", "must be in (0, 0.5]", self.shift)
        require(bool(self.samplings), "samplings", "must name at least one", self.samplings)
        fits = self.top_logprobs == -1 or self.top_logprobs >= 5
        require(fits, "top_logprobs", "must be -1 or at least 5", self.top_logprobs)

    def check_engine(self, engine: Abilities) -> None:
        """Raise a SettingError for an engine that decodes no model, or whose sampled texts cannot be tested; and for
        `reference=regular` if harness decodes the arms itself.
        """
        rule = "must decode a model: simulated texts prove nothing"
        require(not engine.own_clock, "engine", rule, self.engine.name)
        untested = self.engine.beyond_model
        if untested is None and self.model.repository == SERVED:
            untested = "no model="
        temperature = self.decoding.temperature
        rule = (
            f"must be 0 with {untested}: T=0 compares greedy texts, and sampled texts are only tested with model=,"
            " chat=false and no change of probabilities in engine.extra"
        )
        is_tested = untested is None or temperature == 0
        require(is_tested, "decoding.temperature", rule, temperature)
        if not engine.own_loop:
            return
        rule = "must be auto or weights with engine=local, whose weights are the reference"
        require(self.reference != "regular", "reference", rule, self.reference)


class Recovery(Command[RecoverySettings, RecoveryRow]):
    """The record of `recovery`, which tests whether a pair is lossless."""

    name = "recovery"
    summary = (
        "whether speculative decoding changes the output of a pair: "
        "exit code 0 lossless, 1 lossy, 3 cannot tell"
    )
    example = "model=30B draft=7B"
    examples = (
        ("", "the shipped tiny pair, on any machine"),
        ("model=30B draft=7B", "a pair of presets"),
        ("temperature=1 top_p=0.9", "with other settings"),
        ("decoding=greedy", "only the greedy comparison"),
    )
    notes = (
        "Exit code 0: lossless; 1: lossy, or the run failed; 2: a wrong setting; 3: cannot tell."
    )
    question = "Is it lossless?"
    settings = RecoverySettings
    experiment = "harness.commands.recovery.measure:RecoveryExperiment"
    row = RecoveryRow
    further_rows = (RecoveryTextRow,)
    shown_by = "harness.commands.recovery.tables:recovery_page"

    def needs_local(self, settings: RecoverySettings) -> bool:
        return bool(settings.reference == "weights")

    def line(self, rows: Sequence[RecoveryRow]) -> str:
        """The verdict in one word."""
        from harness.commands.recovery.tables import Checks

        return Checks(rows).verdict

    def bad_answer(self, rows: Sequence[RecoveryRow]) -> VerdictError | None:
        """The error if the pair is lossy, or nothing can be concluded. None if it is lossless, or if the run did not
        finish.
        """
        from harness.commands.recovery.tables import Checks

        checks = Checks(rows)
        if checks.verdict not in _EXIT_CODES:
            return None
        message = f"{checks.verdict}: {checks.statement.reason}"
        return VerdictError(message, _EXIT_CODES[checks.verdict])
