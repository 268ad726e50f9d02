"""`eval`: how many questions each arm answers correctly; the same questions, batched, and resumed where a run ended."""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from harness.config.model_names import without_suffixes
from harness.engines.protocol import Question
from harness.engines.timing import Generation
from harness.experiments.encoding import origin
from harness.experiments.lm_eval_tasks import LmEvalTask
from harness.experiments.progress import say
from harness.experiments.prompts import Prompt
from harness.experiments.questions import (
    Problem,
    check_answer_length,
    draw_problems,
    read_answer,
    tokens_with,
)
from harness.experiments.session import Session, in_batches
from harness.experiments.task_sets import SETS
from harness.experiments.tasks import TASKS
from harness.menu.commands.eval import LM_EVAL, EvalSettings
from harness.menu.experiment import Experiment
from harness.report.accuracy import eval_document
from harness.results.acceptance import Acceptance
from harness.results.files import append_rows, read_answers
from harness.results.measurement import Measurement, identify
from harness.results.schema import AnswerRow, EvalRow
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    mcnemar_p_value,
    wald_interval,
    wilson_interval,
)

PROMPTS_FILE = "eval_prompts.csv"

# Settings that say how much is asked, and do not change an answer.
_NOT_OF_AN_ANSWER = ("seed", "seeds", "num_prompts")

# Operands that the published accuracies are for.
_PUBLISHED_OPERANDS = (1, 99)

# By seed and index of the question: the answer of each arm.
Answers = dict[tuple[int, int], dict[str, AnswerRow]]


class Evaluation(Experiment):
    """Both arms on the questions of each seed.

    Answers are appended batch by batch to a store, a CSV file named after a digest of everything that determines an
    answer and its time. So however a run ends, the same command continues from there.
    """

    document = staticmethod(eval_document)

    def __init__(self, settings: EvalSettings) -> None:
        # A batch has one seed, so that none is larger.
        self.settings = dataclasses.replace(
            settings, batch_size=min(settings.batch_size, settings.num_prompts)
        )
        self.lm_eval = LmEvalTask(settings.task) if settings.task.startswith(LM_EVAL) else None
        if self.lm_eval is not None:
            self.lm_eval.check_answer_length(settings.decoding.max_new_tokens)
        self.problems = [problem for seed in settings.seeds for problem in self._problems(seed)]
        self.published = _published(settings)
        self.answers: Answers = {}
        self.resumed: set[tuple[int, int]] = set()
        self.smallest_batch: int | None = None

    def measure(self, session: Session) -> None:
        settings, problems = self.settings, self.problems
        if (said := self._origin()) is not None:
            say(said)
        token_ids = session.encode([Prompt(problem.prompt) for problem in problems], "task")
        if settings.task in TASKS:
            check_answer_length(session.tokenizer, problems, settings.decoding.max_new_tokens)
        session.place(settings.batch_size, max(map(len, token_ids)))
        measurement = identify(session.asked, leaving_out=_NOT_OF_AN_ANSWER)
        # The settings name a task of lm-evaluation-harness and do not tell what it asks.
        suffix = "" if self.lm_eval is None else f"-{self.lm_eval.digest}"
        store = session.kept_in / "eval_answers" / f"{measurement.digest}{suffix}.csv"
        if settings.resume and (found := self._answered(store, measurement)):
            given = [
                dataclasses.replace(row, run=session.run)
                for arms in found.values()
                for row in arms.values()
            ]
            wanted = len(problems) * len(settings.arms)
            say(
                f"{len(given)} of {wanted} answers are in {store} already; resume=false measures again"
            )
            session.append(PROMPTS_FILE, given)
            self.answers |= found
            self.resumed = set(found)
        if len(self.answers) < len(problems):
            self._answer(session, token_ids, store)

    def rows(self, session: Session) -> list[EvalRow]:
        """One row per seed and arm, then one per arm over all seeds, with `seed=all`.

        A seed without an answer, because the run ended before, has no row.
        """
        # A process that died left its answers in its file.
        answers = self.answers or self._answered(session.directory / PROMPTS_FILE)
        rows = []
        for seed in (*self.settings.seeds, "all"):
            problems = [problem for problem in self.problems if seed in ("all", problem.seed)]
            keys = [problem.key for problem in problems if problem.key in answers]
            if not keys and seed != "all":
                continue
            for arm in self.settings.arms:
                mine = [answers[key][arm] for key in keys]
                columns: dict[str, Any] = {
                    "arm": arm,
                    "seed": str(seed),
                    "published_accuracy": self.published.get(arm),
                    "operands": self._operands,
                    "prompts_digest": hashlib.sha256(
                        "\n".join(p.prompt for p in problems).encode()
                    ).hexdigest()[:12],
                    "smallest_batch": self.smallest_batch,
                    "num_resumed": sum(key in self.resumed for key in keys),
                }
                # Where an arm failed, the other may have done more work.
                if arm != "regular" and mine and session.status != "failed":
                    regular = [answers[key]["regular"] for key in keys]
                    columns |= _against(
                        regular, mine, greedy=self.settings.decoding.temperature == 0
                    )
                rows.append(session.row(EvalRow, **columns, **_figures(mine)))
        return rows

    def _answer(self, session: Session, token_ids: Sequence[Sequence[int]], store: Path) -> None:
        """Give every arm, batch by batch, the questions without an answer.

        Both arms answer a batch before the next begins, and then it is written: a question is answered by all arms or
        by none.
        """
        size = self.settings.batch_size
        session.open(size, max(map(len, token_ids)), share_prefix=True)
        asked = {
            problem.key: (problem, prompt)
            for problem, prompt in zip(self.problems, token_ids, strict=True)
        }
        ends = ("\n",) if self.settings.task in TASKS else ()
        if self.lm_eval is not None:
            ends = self.lm_eval.until
        stop = tokens_with(session.tokenizer, ends) if ends else frozenset()
        questions = []
        # A batch has one seed, because its random numbers have.
        for seed in self.settings.seeds:
            pending = [key for key in asked if key[0] == seed and key not in self.answers]
            for keys in in_batches(pending, size):
                prompts = [asked[key][1] for key in keys]
                indices = [index for _, index in keys]
                questions.append(session.ask(prompts, indices, seed=seed, stop_tokens=stop))

        def note(question: Question, generations: dict[str, Generation]) -> str:
            problems = [asked[question.seed, index][0] for index in question.indices]
            self.smallest_batch = min(self.smallest_batch or size, len(problems))
            rows: list[AnswerRow] = []
            for arm, generation in generations.items():
                rows += self._read(session, arm, problems, generation)
            session.append(PROMPTS_FILE, rows)
            append_rows(store, rows)
            self.answers |= _by_question(rows)
            accuracies = []
            for arm in self.settings.arms:
                correct = [of_question[arm].correct for of_question in self.answers.values()]
                accuracies.append(f"{arm} {statistics.fmean(correct):.1%}")
            return ", ".join(accuracies)

        session.race(questions, note, num_warmup=1)

    def _problems(self, seed: int) -> list[Problem]:
        """The questions of a seed."""
        settings = self.settings
        if self.lm_eval is not None:
            return self.lm_eval.problems(seed, settings.num_prompts)
        if settings.task in SETS:
            return SETS[settings.task].problems(seed, settings.num_prompts)
        return draw_problems(TASKS[settings.task], settings.operands, seed, settings.num_prompts)

    def _origin(self) -> str | None:
        """Where the questions come from, in one line; None for drawn ones."""
        if self.lm_eval is not None:
            return self.lm_eval.about
        task = self.settings.task
        return origin(SETS[task].settings) if task in SETS else None

    def _judge(self, text: str, problem: Problem) -> tuple[str, int | str | None, bool]:
        """The part of a completion that counts, the answer in it, and whether it is correct."""
        task = self.settings.task
        if self.lm_eval is not None:
            return self.lm_eval.judge(text, problem)
        if task in SETS:
            completion, answer = SETS[task].read(text)
            return completion, answer, SETS[task].is_correct(answer, str(problem.expected))
        line, number = read_answer(text)
        return line, number, number == problem.expected

    def _read(
        self, session: Session, arm: str, batch: Sequence[Problem], generation: Generation
    ) -> Iterator[AnswerRow]:
        """An arm's answers to a batch of questions, each with an equal share of the batch's time."""
        for problem, request in zip(batch, generation.requests, strict=True):
            text = session.tokenizer.decode(
                request.token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
            )
            completion, answer, correct = self._judge(str(text), problem)
            yield session.row(
                AnswerRow,
                Acceptance.of(request.outcomes),
                prompt_index=problem.index,
                seed=problem.seed,
                arm=arm,
                a=problem.a,
                b=problem.b,
                source_row=problem.source_row,
                expected=str(problem.expected),
                completion=completion,
                answer=None if answer is None else str(answer),
                correct=correct,
                num_tokens=len(request.token_ids),
                time_ms=1000 * generation.seconds / len(batch),
                outcomes=[list(outcome) for outcome in request.outcomes],
                answered_at=datetime.now(UTC).isoformat(timespec="seconds"),
                server_started=session.measurement.server_started,
            )

    @property
    def _operands(self) -> str | None:
        """The column: empty for questions from a data set."""
        if self.settings.task not in TASKS:
            return None
        return "-".join(map(str, self.settings.operands))

    def _answered(self, file: Path, measurement: Measurement | None = None) -> Answers:
        """The answers in a file to these questions, where every arm has answered.

        Of two answers the later one counts.

        Args:
            measurement: that answers have to be of; None for any.
        """
        rows = read_answers(file)
        if measurement is not None:
            rows = [row for row in rows if measurement.includes(row)]
        found = _by_question(rows)
        arms = set(self.settings.arms)
        return {p.key: found[p.key] for p in self.problems if arms.issubset(found.get(p.key, ()))}


EXPERIMENT = Evaluation


def _published(settings: EvalSettings) -> Mapping[str, float]:
    """Accuracies that others measured for this model, by arm."""
    same = settings.operands == _PUBLISHED_OPERANDS and settings.model.quantization == "none"
    if settings.task not in TASKS or not same:
        return {}
    return TASKS[settings.task].published.get(without_suffixes(settings.model.name), {})


def _by_question(rows: Sequence[AnswerRow]) -> Answers:
    answers: Answers = {}
    for row in rows:
        answers.setdefault((row.seed, row.prompt_index), {})[row.arm] = row
    return answers


def _figures(answers: Sequence[AnswerRow]) -> dict[str, Any]:
    """Figures of one arm; what cannot be had without an answer is None."""
    correct, total = sum(answer.correct for answer in answers), len(answers)
    return {
        "acceptance": Acceptance.of(outcome for answer in answers for outcome in answer.outcomes),
        "num_prompts": total,
        "num_correct": correct,
        "num_parsed": sum(answer.answer is not None for answer in answers),
        "num_tokens": sum(answer.num_tokens for answer in answers),
        "ms_per_answer": statistics.fmean(answer.time_ms for answer in answers)
        if answers
        else None,
        **wald_interval(correct, total).columns("accuracy", "wald_low", "wald_high"),
        **wilson_interval(correct, total).columns("accuracy", "wilson_low", "wilson_high"),
    }


def _against(
    regular: Sequence[AnswerRow], other: Sequence[AnswerRow], greedy: bool
) -> dict[str, Any]:
    """The other arm's answers compared with the regular arm's answers to the same questions."""
    first, second = [answer.correct for answer in regular], [answer.correct for answer in other]
    difference = difference_of_paired_proportions(first, second)
    pairs = list(zip(first, second, strict=True))
    same = sum(
        mine.completion == theirs.completion for mine, theirs in zip(regular, other, strict=True)
    )
    return {
        **difference.columns("difference", "difference_low", "difference_high"),
        "mcnemar_p_value": mcnemar_p_value(pairs.count((True, False)), pairs.count((False, True))),
        # Sampled texts may differ; greedy ones must not.
        "identical_prompts": same if greedy else None,
    }
