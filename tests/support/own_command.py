"""A command of a user's own, all of it: `python -m harness ./own_command.py:Lengths`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from harness.commands.command import Command, Experiment
from harness.config.run import PromptedSettings
from harness.config.settings import require_at_least
from harness.reporting.page import Page, title_of_many
from harness.reporting.table import Column, Table, number
from harness.results.row import figure, setting
from harness.results.runs import Run
from harness.results.schema import DecodedRow

if TYPE_CHECKING:
    from harness.measuring.session import Session


@dataclass(frozen=True, kw_only=True)
class LengthsSettings(PromptedSettings):
    """Settings of this command.

    Attributes:
        num_prompts: how many prompts of the set are answered.
        unit: what lengths are counted in.
    """

    num_prompts: int = 2
    unit: str = "tokens"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, num_prompts=1)


@dataclass(frozen=True, kw_only=True)
class LengthsRow(DecodedRow):
    """`lengths.csv`: one row per run."""

    kind = "lengths"
    recognised_by = ("mean_answer_length", "longest_answer")

    unit: str | None = setting("what lengths are counted in", "unit")
    mean_answer_length: float | None = figure("mean length of the answers", "tokens")
    longest_answer: int | None = figure("length of the longest answer", "tokens")


class AnswerLengths(Experiment[LengthsSettings, LengthsRow]):
    """Answers of both arms, and how long they are."""

    def __init__(self, settings: LengthsSettings) -> None:
        self.settings = settings
        self.lengths: list[int] = []

    def measure(self, session: Session) -> None:
        from harness.engines.protocol import Question
        from harness.measuring.interleaving import ask_all
        from harness.measuring.prompts.sets import load_prompts

        prompts = load_prompts(self.settings.prompts).take(self.settings.num_prompts)
        token_ids = session.encode(prompts)
        longest = max(map(len, token_ids))
        session.place(1, longest)
        engine = session.open(1, longest)
        questions = [
            Question(session.requests([row], [index])) for index, row in enumerate(token_ids)
        ]
        for _, answers in ask_all(engine, questions):
            self.lengths += [len(tokens) for answer in answers.values() for tokens in answer.tokens]

    def rows(self, session: Session) -> Sequence[LengthsRow]:
        if not self.lengths:
            return [session.row(LengthsRow)]
        mean = sum(self.lengths) / len(self.lengths)
        longest = max(self.lengths)
        return [session.row(LengthsRow, mean_answer_length=mean, longest_answer=longest)]


class Lengths(Command[LengthsSettings, LengthsRow]):
    """Measures how long answers are."""

    summary = "how long answers are"
    settings = LengthsSettings
    experiment = AnswerLengths
    row = LengthsRow

    def line(self, rows: Sequence[LengthsRow]) -> str:
        return f"{rows[-1].mean_answer_length:.1f} {rows[-1].unit}"

    def page(self, runs: Sequence[Run[LengthsRow]]) -> Page | None:
        rows = [run.last for run in runs if run.has_figures]
        columns = [
            Column("model", text=True, of="model"),
            Column("mean answer length", number(1), of="mean_answer_length"),
            Column("longest answer", of="longest_answer"),
        ]
        table = Table.of("lengths", "Lengths of answers", rows, columns)
        return Page(title_of_many(rows), tables=[table]) if rows else None
