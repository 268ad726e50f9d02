"""The rows of `eval`: accuracies, and the answers that they count."""

from __future__ import annotations

from dataclasses import dataclass

from harness.results.drafts import DraftColumns, Drafts
from harness.results.row import Row, circumstance, figure, setting
from harness.results.schema import DecodedRow, MaybeBool, MaybeFloat, MaybeInt, MaybeText
from harness.results.statistics.interval import Interval


@dataclass(frozen=True, kw_only=True)
class EvalRow(DecodedRow):
    """`eval.csv`: one row per seed and arm, then one per arm with `seed=all`."""

    # `results.schema.RunRow` and `results.row.Row` explain these class attributes.
    kind = "eval"
    filled_if_measured = ("accuracy",)
    recognised_by = ("arm", "accuracy", "wald_low", "mcnemar_p_value")

    seed: MaybeText = setting(
        "seed of the questions and of sampling; `all` for several seeds merged"
    )
    arm: MaybeText = figure("`regular` or `speculative`")
    num_prompts: MaybeInt = figure("questions answered")
    num_different_prompts: MaybeInt = figure(
        "different questions among them; greedy answers to the same question are copies, and count once"
    )
    accuracy: MaybeFloat = figure("proportion of correct answers")
    wald_low: MaybeFloat = figure("lower end of Wald's interval")
    wald_high: MaybeFloat = figure("upper end of Wald's interval")
    wilson_low: MaybeFloat = figure("lower end of Wilson's interval")
    wilson_high: MaybeFloat = figure("upper end of Wilson's interval")
    num_correct: MaybeInt = figure("correct answers")
    num_parsed: MaybeInt = figure("completions with an answer")
    difference: Interval | None = figure(
        "accuracy of this arm minus the regular arm's, on the same questions; Newcombe's paired interval"
    )
    mcnemar_p_value: MaybeFloat = figure("exact two-sided p-value of McNemar's test")
    identical_prompts: MaybeInt = figure("greedy completions equal to the regular arm's")
    published_accuracy: MaybeFloat = figure("accuracy that others published")
    ms_per_answer: MaybeFloat = figure(
        "mean over answers of the time of the answer's batch / answers in the batch",
        "ms",
    )
    num_tokens: MaybeInt = figure("tokens generated over all questions", "tokens")
    num_resumed: MaybeInt = figure("answers taken from earlier runs")
    operands: MaybeText = setting("lowest and highest operand, `1-99`")
    replacement: MaybeBool = setting("whether questions were drawn with replacement", "replacement")
    margin: MaybeFloat = setting("difference in accuracy that matters", "margin")
    prompts_digest: MaybeText = circumstance("digest of the questions")

    @property
    def questions_in_words(self) -> str | None:
        """`multiplication of 1 to 99`, in place of the name of a prompt set."""
        operands = f" of {self.operands.replace('-', ' to ')}" if self.operands else ""
        return f"multiplication{operands}"


@dataclass(frozen=True, kw_only=True)
class AnswerRow(DraftColumns, Row):
    """`eval_prompts.csv`: one row per question and arm."""

    kind = "eval_prompts"
    recognised_by = ("prompt_index", "expected", "correct", "outcomes")

    prompt_index: int = figure("index of the question within its seed, from 0")
    seed: int = figure("seed of the question")
    arm: str = figure("`regular` or `speculative`")
    a: int = figure("first operand")
    b: int = figure("second operand")
    expected: str = figure("correct answer")
    completion: str = figure("generated text up to the end of the line")
    answer: MaybeText = figure("answer read from it; empty where there is none")
    correct: bool = figure("whether the answer is the expected one")
    num_tokens: int = figure("generated tokens", "tokens")
    time_ms: float = figure("time of the question's batch over the questions in it", "ms")
    outcomes: list[list[int]] = figure("[proposed, accepted] of each iteration")
    acceptance_rate: MaybeFloat = figure("accepted / proposed draft tokens")
    server_started: MaybeText = circumstance("start time reported by the server")
    measurement: MaybeText = circumstance(
        "digest of everything that determines an answer and its time"
    )

    @property
    def num_decoded(self) -> int:
        """The answer's tokens after the first, which iterations decided."""
        return max(0, self.num_tokens - 1)

    @property
    def drafts(self) -> Drafts:
        """The counts of drafted and accepted tokens as one value. They are computed from `outcomes` if the row has any,
        because older versions of harness wrote no other counts.
        """
        return Drafts.of(self.outcomes, self.num_decoded) if self.outcomes else super().drafts

    @property
    def is_whole(self) -> bool:
        """Whether the row has all values that the statistics need. In a damaged file any of them may be missing."""
        return None not in (
            self.prompt_index,
            self.seed,
            self.correct,
            self.num_tokens,
            self.time_ms,
            self.outcomes,
        )
