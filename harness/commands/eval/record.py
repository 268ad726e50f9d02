"""The record and the settings of `eval`, which counts correct answers of both arms to the same questions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.commands.command import Command
from harness.commands.eval.rows import AnswerRow, EvalRow
from harness.config.amounts import percent
from harness.config.engines import Abilities
from harness.config.errors import CANNOT_TELL, VerdictError
from harness.config.run import RunSettings
from harness.config.settings import require

# The most questions of a seed. All of them are in memory at once.
MOST_QUESTIONS = 10**6


@dataclass(frozen=True, kw_only=True)
class EvalSettings(RunSettings):
    """`eval`: correct answers of both arms to the same questions.

    Attributes:
        operands: the smallest and the largest operand of a question.
        replacement: draw questions with replacement, as for published tables.
        seeds: seeds of the questions and of sampling; each seed has its own questions.
        num_prompts: number of questions per seed.
        margin: a difference in accuracy that matters; *no significant difference* excludes it.
        resume: also reuse the answers of an earlier run with the same settings.
    """

    operands: tuple[int, ...] = (1, 99)
    replacement: bool = False
    seeds: tuple[int, ...] = (0,)
    num_prompts: int = 1000
    margin: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        lowest, highest = self.operands[0], self.operands[-1]
        are_bounds = len(self.operands) == 2 and 0 <= lowest <= highest <= 10**9
        are_seeds = min(self.seeds, default=-1) >= 0 and len(set(self.seeds)) == len(self.seeds)
        for is_met, setting, rule in (
            (
                are_bounds,
                "operands",
                "must be the lowest and the highest operand, such as [1,99], from 0 to 10^9",
            ),
            (are_seeds, "seeds", "must be one or more different numbers of 0 or more"),
            (self.num_prompts >= 1, "num_prompts", "must be at least 1"),
            (0 < self.margin <= 1, "margin", "must be in (0, 1]"),
            (self.num_prompts <= MOST_QUESTIONS, "num_prompts", "must be at most 10^6"),
            (self.weights == "stored", "weights", "must be stored: random weights know no answers"),
        ):
            require(is_met, setting, rule, getattr(self, setting))
        rates = self.decoding.synthetic_acceptance
        rule = "must be null: with tokens accepted at random the answers mean nothing"
        require(rates is None, "decoding.synthetic_acceptance", rule, rates)

    def check_engine(self, engine: Abilities) -> None:
        rule = "must decode a model: simulated texts answer nothing"
        require(not engine.own_clock, "engine", rule, self.engine.name)


class Eval(Command[EvalSettings, EvalRow]):
    """The record of `eval`, which counts correct answers."""

    name = "eval"
    summary = "whether speculative decoding answers as many questions correctly as the model alone"
    example = "model=13B draft=7B 'seeds=[0,1,2,3]' num_prompts=1000"
    examples = (
        ("", "the shipped tiny pair, on any machine"),
        ("model=13B draft=7B 'seeds=[0,1,2,3]'", "four seeds, and all of them merged"),
        ("decoding=greedy", "both arms must give the same answers"),
        ("'operands=[1,999]' batch_size=256", "harder questions"),
        ("model=./my-model draft=none", "a directory or a hub repository; without a draft"),
    )
    notes = (
        "Answers are kept in eval_prompts.csv next to results.file: after Ctrl-C or a crash the same "
        "command goes on from them."
    )
    question = "Is it as accurate?"
    settings = EvalSettings
    experiment = "harness.commands.eval.measure:EvalExperiment"
    row = EvalRow
    shown_by = "harness.commands.eval.page:eval_page"
    further_rows = (AnswerRow,)

    def bad_answer(self, rows: Sequence[EvalRow]) -> VerdictError | None:
        """The error if speculation answers significantly fewer questions correctly, or if nothing can be concluded;
        otherwise None.
        """
        from harness.results.judging.answers import judged_differences, rows_over_all_seeds

        statements = judged_differences(
            [row for row in rows_over_all_seeds(rows) if row.difference]
        )
        if any(statement.relation == "below" for statement in statements):
            return VerdictError("speculation is less accurate", exit_code=1)
        for statement in statements:
            if not statement.is_judged:
                return VerdictError(f"cannot tell: {statement.why}", CANNOT_TELL)
        return None

    def line(self, rows: Sequence[EvalRow]) -> str:
        """The accuracy of each arm over all seeds, in a few words; empty if nothing was answered."""
        from harness.results.judging.answers import rows_over_all_seeds

        merged = [row for row in rows_over_all_seeds(rows) if row.accuracy is not None]
        return ", ".join(f"{row.arm} {percent(row.accuracy or 0.0, digits=1)}" for row in merged)
