"""`recovery`: does speculative decoding recover the target's own distribution?"""

from __future__ import annotations

import typing
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from harness.commands.command import Command
from harness.commands.recovery.rows import RecoveryRow
from harness.config.engines import Abilities
from harness.config.faults import FAULTS, fault_names
from harness.config.run import PromptedSettings
from harness.config.settings import require, require_at_least

if TYPE_CHECKING:
    from harness.reporting.page import Page

# Sampling settings of requests under load. `sampling.py` has their values.
SamplingName = Literal[
    "as_asked",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "logit_bias",
    "logprobs",
    "logprobs_whole",
]
_SAMPLINGS: tuple[SamplingName, ...] = typing.get_args(SamplingName)
# The others are parameters of servers' APIs.
_OF_OWN_LOOP = ("as_asked", "temperature", "top_k", "top_p")

# Of `num_draws`, where it is typed.
FEWEST_DRAWS = 1000
# Requests in flight where the regular arm is the reference.
LOAD = 8
EXIT_CODES = {"lossy": 1, "undecided": 3}


@dataclass(frozen=True, kw_only=True)
class RecoverySettings(PromptedSettings):
    """`recovery`: does speculative decoding recover the target's own distribution?

    Attributes:
        draft: None tests the regular arm: under load, or of engines other than ours.
        num_prompts: of the greedy comparison; the sampled tests use the few of them that show most.
        num_draws: sampled continuations, over all tests; `auto` takes 60,000, or as many more as a
            verdict needs. Under load it counts sampled tokens.
        false_alarm_rate: chance that the sampled tests of one run call a lossless pair lossy.
        shift: change of a token's distribution, in total variation, for which the power of the tests is stated.
        fault: a mistake planted on purpose, which the same tests must catch.
        load: the number of requests in flight, to test the engine as it is used: of mixed lengths, with
            prompts that begin alike, second turns, other sampling settings beside each other, and
            some that are left midway; 1 asks these one at a time. None draws after a few places of the
            prompts; with reference=regular it is 8, or `batch_size` if that is less.
        samplings: the sampling settings of drawn requests under load; `as_asked` is the run's own.
            `logprobs` is the run's own with log-probabilities asked for, `logprobs_whole` without a
            stream. Leave out one that ends the engine.
        reference: what answers are checked against: the model's `weights`, loaded here, or the
            `regular` arm's log-probabilities of them; `auto` takes the weights where they can be
            loaded, and elsewhere those of the regular server if it has any.
        top_logprobs: with the regular arm as the reference, the likeliest tokens that it is asked for
            at each place; -1 asks for all.
        batch_size: rows generated at once.
    """

    num_prompts: int = 15
    num_draws: int | Literal["auto"] = "auto"
    false_alarm_rate: float = 1e-9
    shift: float = 0.05
    fault: str = field(default="none", metadata={"choices": fault_names})
    load: int | None = None
    samplings: tuple[SamplingName, ...] = _SAMPLINGS
    reference: Literal["auto", "weights", "regular"] = "auto"
    top_logprobs: int = 20

    @property
    def compares_texts(self) -> bool:
        """Whether the arms' texts are compared, so that both are needed; not so under load."""
        return self.load is None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference == "regular" and self.load is None:
            object.__setattr__(self, "load", min(self.batch_size, LOAD))
        require_at_least(self, load=1)
        beyond_model = self.engine.beyond_model
        rule = f"must be auto with {beyond_model}, of which log-probabilities of texts know nothing"
        require(beyond_model is None or self.reference == "auto", "reference", rule, self.reference)
        require_at_least(self, num_prompts=1)
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
        samplings = self.samplings
        under_load = self.load is not None or samplings == _SAMPLINGS
        require(under_load, "samplings", "needs load", samplings)
        require(bool(samplings), "samplings", "must name at least one", samplings)
        fits = self.top_logprobs == -1 or self.top_logprobs >= 5
        require(fits, "top_logprobs", "must be -1 or at least 5", self.top_logprobs)
        is_set = len(set(samplings)) == len(samplings)
        require(is_set, "samplings", "must not name one twice", samplings)
        self._check_fault()

    def _check_fault(self) -> None:
        """Refuse a fault that would change nothing: its run would seem to prove the tests blind."""
        if self.fault == "none":
            return
        fault = FAULTS[self.fault]
        rule = "must be none where decoding.synthetic_acceptance replaces the acceptance rule"
        by_rule = self.decoding.synthetic_acceptance is None
        require(by_rule, "fault", rule, self.fault)
        idle = fault.is_idle(self.decoding)
        require(idle is None, "fault", f"changes nothing {idle}", self.fault)
        if self.draft is not None and self.draft.most_nodes:
            of_trees = [name for name, one in FAULTS.all().items() if one.in_trees]
            rule = f"must be one of none, {', '.join(of_trees)} with draft.tree"
            require(fault.in_trees, "fault", rule, self.fault)
        rule = "needs load: without it, all rows have the same settings"
        differ = self.load is not None
        require(differ or not fault.needs_mixed_settings, "fault", rule, self.fault)
        fewest = fault.fewest_rows
        rule = f"changes nothing with fewer than {fewest} rows at once (batch_size, or load)"
        require((self.load or self.batch_size) >= fewest, "fault", rule, self.fault)

    def check_engine(self, engine: Abilities) -> None:
        """Refuse faults and loads that the engine cannot have, and a run without anything to compare.

        Texts of other engines can be compared with the target's own distribution without a draft.
        """
        planted = self.fault != "none"
        require(engine.own_loop or not planted, "fault", "needs engine=local", self.fault)
        if self.load is not None:
            rule = "needs engine=local or server, or load=1 with engine=huggingface"
            takes_all = engine.takes_load and (engine.takes_batches or self.load == 1)
            require(takes_all, "load", rule, self.load)
            rule = "must be auto or weights with engine=local, whose weights are the reference"
            is_other = not engine.own_loop or self.reference != "regular"
            require(is_other, "reference", rule, self.reference)
            rule = "changes nothing with draft=none"
            require(self.draft is not None or not planted, "fault", rule, self.fault)
            rule = f"must name one of {', '.join(_OF_OWN_LOOP)} with engine=local"
            known = not engine.own_loop or not set(_OF_OWN_LOOP).isdisjoint(self.samplings)
            require(known, "samplings", rule, self.samplings)
            return
        rule = "must be a model: without a draft nothing can be lost"
        if not engine.own_loop:
            rule = (
                "must be a model at temperature 0: "
                "greedy texts without a draft are compared with nothing"
            )
        sampled = not engine.own_loop and self.decoding.temperature > 0
        require(self.draft is not None or sampled, "draft", rule, "none")


class Recovery(Command):
    """Tests whether a pair is lossless."""

    name = "recovery"
    summary = (
        "whether speculative decoding changes the output of a pair: "
        "exit code 0 lossless, 1 lossy, 3 not enough draws"
    )
    example = "model=30B draft=7B"
    examples = (
        ("", "the shipped tiny pair, on any machine"),
        ("model=30B draft=7B", "a pair of presets"),
        ("temperature=1 top_p=0.9", "with other settings"),
        ("decoding=greedy", "only the greedy comparison"),
        ("load=8", "as it is used: eight concurrent requests of different kinds"),
        ("fault=rollback_off_by_one", "a control: the same tests must fail"),
        (
            "-m fault=residual_warped_twice,bonus_from_wrong_position,rollback_off_by_one",
            "several controls",
        ),
    )
    notes = (
        "Exit code 0: lossless; 1: lossy, or the run failed; 2: a wrong setting; 3: cannot tell."
    )
    question = "Is it lossless?"
    help_order = 4
    settings = RecoverySettings
    experiment = "harness.commands.recovery.measure"
    row = RecoveryRow

    def needs_local(self, settings: Any) -> bool:
        return bool(settings.reference == "weights")

    def line(self, rows: Sequence[Any]) -> str:
        """The verdict."""
        from harness.commands.recovery.tables import summarise

        return summarise(rows).verdict

    def exit_code(self, rows: Sequence[Any]) -> int:
        return EXIT_CODES.get(self.line(rows), 0)

    def page(self, runs: Sequence[Any]) -> Page | None:
        from harness.commands.recovery.tables import recovery_page

        return recovery_page(runs)


RECORD = Recovery()
