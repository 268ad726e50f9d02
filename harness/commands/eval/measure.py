"""The measurement of `eval`: how many questions each arm answers correctly.

Both arms get the same questions, in batches. A run continues where an earlier run of the same command ended.
"""

from __future__ import annotations

import dataclasses
import hashlib
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from harness.commands.command import Experiment
from harness.commands.eval.record import EvalSettings
from harness.commands.eval.rows import AnswerRow, EvalRow
from harness.commands.eval.tasks import (
    ENDS,
    Problem,
    check_answer_length,
    drawn_problems,
    parse_answer,
    published_accuracies,
    tokens_with,
)
from harness.engines.protocol import Answered, Question, in_batches
from harness.engines.tokenizer import text_of
from harness.measuring.interleaving import ask_in_turns
from harness.measuring.measurement import identify, rows_of
from harness.measuring.progress import say
from harness.measuring.prompts.sets import Prompt
from harness.measuring.session import Session
from harness.results.drafts import Drafts
from harness.results.files import append_rows, read_rows
from harness.results.runs import grouped
from harness.results.statistics.interval import Coverage
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    mcnemar_p_value,
    wald_interval,
    wilson_interval,
)

PROMPTS_FILE = "eval_prompts.csv"

# Settings that change no answer: they choose how many questions are asked and what difference matters. `seed` is
# not used: each answer's row has one of `seeds`.
_NOT_OF_AN_ANSWER = ("seed", "seeds", "num_prompts", "margin")

# The answer of each arm by the arm's name, for each question by its seed and index.
StoredAnswers = dict[tuple[int, int], dict[str, AnswerRow]]


class EvalExperiment(Experiment[EvalSettings, EvalRow]):
    """Asks both arms the questions of each seed.

    Answers are appended batch by batch to a file for all runs, with a digest of everything that determines an answer
    and its time. So the same command can continue after any end of a run.

    Attributes:
        problems: the questions of all seeds.
        answers: the answers of this run and of earlier ones. A question is included only if every arm has answered it.
        resumed: keys (seed, index) of the questions that earlier runs answered; None if not known.
    """

    def __init__(self, settings: EvalSettings) -> None:
        # All questions of a batch have the same seed, so a batch has at most as many questions as a seed.
        self.settings = dataclasses.replace(
            settings, batch_size=min(settings.batch_size, settings.num_prompts)
        )
        self.problems: list[Problem] = []
        for seed in settings.seeds:
            self.problems += drawn_problems(
                settings.operands, seed, settings.num_prompts, settings.replacement
            )
        self.answers: StoredAnswers = {}
        self.resumed: set[tuple[int, int]] | None = set()

    def measure(self, session: Session) -> None:
        """Reuse the answers of earlier runs, and ask the questions that have none."""
        settings = self.settings
        problems = self.problems
        token_ids = session.encode([Prompt(problem.prompt) for problem in problems], "operands")
        check_answer_length(session.tokenizer, problems, settings.decoding.max_new_tokens)
        session.place(settings.batch_size, max(map(len, token_ids)))
        # A digest of all that determines an answer and its time, such as the batch size that is used. Rows with an
        # equal digest can be reused. The session's own digest is not used, because it covers how many questions there
        # are.
        identified = dataclasses.replace(session.original_settings, batch_size=settings.batch_size)
        self._measurement = identify(identified, leaving_out=_NOT_OF_AN_ANSWER)
        if settings.resume:
            self._resume(session)
        if len(self.answers) < len(problems):
            self._answer_pending(session, token_ids)

    def rows(self, session: Session) -> list[EvalRow]:
        """One row per seed and arm, then one per arm over all seeds, with `seed=all`.

        A seed has no rows if the run ended before any of its questions was answered. The rows with `seed=all` are there
        in any case, if need be without figures.
        """
        if not self.answers:
            # If the process of this run died, another process makes the rows, from the answers that were written.
            written = read_rows(session.directory / PROMPTS_FILE, AnswerRow)
            self.answers = self._answered_by_all(
                [row for row in written if row.run == session.run_id]
            )
            # That process knew which of these answers it took from earlier runs.
            self.resumed = None
        arms = {arm for by_arm in self.answers.values() for arm in by_arm}
        if len(arms) > len(self.settings.arms):
            # A single server is called regular until it drafts, so its earlier answers may have that name.
            for by_arm in self.answers.values():
                by_arm["speculative"] = by_arm.popitem()[1]
            arms = {"speculative"}
        rows = []
        for seed in (*self.settings.seeds, "all"):
            problems = [problem for problem in self.problems if seed in ("all", problem.seed)]
            answered = [problem for problem in problems if problem.key in self.answers]
            if answered or seed == "all":
                texts = "\n".join(problem.prompt for problem in problems)
                columns = {
                    "seed": str(seed),
                    # The digest of the questions' texts.
                    "prompts_digest": hashlib.sha256(texts.encode()).hexdigest()[:12],
                    "num_resumed": None
                    if self.resumed is None
                    else sum(problem.key in self.resumed for problem in problems),
                }
                for arm in sorted(arms) or self.settings.arms:
                    rows.append(self._row(session, arm, answered, columns))
        return rows

    def _row(
        self, session: Session, arm: str, answered: Sequence[Problem], columns: Mapping[str, Any]
    ) -> EvalRow:
        """The row of an arm.

        Args:
            answered: the questions that all arms have answered; may be empty.
            columns: the columns that do not depend on the arm.
        """
        settings = self.settings
        is_greedy = settings.decoding.temperature == 0
        # For each text, the first question that has it: in reversed order, the first one overwrites the others.
        first_asked = {problem.prompt: problem for problem in reversed(answered)}
        # If a question is asked again, its greedy answer is a copy, which adds no evidence.
        different = [problem for problem in answered if problem is first_asked[problem.prompt]]
        evidence = different if is_greedy else answered
        arm_answers = [self.answers[problem.key][arm] for problem in answered]
        figures: dict[str, Any] = {}
        if evidence:
            correct = [self.answers[problem.key][arm].correct for problem in evidence]
            wald = wald_interval(sum(correct), len(correct))
            wilson = wilson_interval(sum(correct), len(correct))
            figures |= {"accuracy": wald.estimate, "wald_low": wald.low, "wald_high": wald.high}
            figures |= {"wilson_low": wilson.low, "wilson_high": wilson.high}
            figures["ms_per_answer"] = statistics.fmean(answer.time_ms for answer in arm_answers)
            has_regular = all("regular" in self.answers[problem.key] for problem in evidence)
            # A failed run allows no conclusion; its page says why (`judged_differences`).
            if arm != "regular" and has_regular and session.status != "failed":
                expected = [self.answers[problem.key]["regular"].correct for problem in evidence]
                # If questions were asked several times, the interval does not cover other questions.
                same_texts = len(evidence) > len(different)
                covers = Coverage(len(evidence), "question", same_texts)
                difference = difference_of_paired_proportions(expected, correct)
                figures["difference"] = dataclasses.replace(difference, covers=covers)
                figures["mcnemar_p_value"] = mcnemar_p_value(expected, correct)
                if is_greedy:
                    # Sampled texts may differ between the arms; greedy ones must not.
                    by_arm = [self.answers[problem.key] for problem in answered]
                    same = [
                        answers["regular"].completion == answers[arm].completion
                        for answers in by_arm
                    ]
                    figures["identical_prompts"] = sum(same)
        return session.row(
            EvalRow,
            arm=arm,
            published_accuracy=published_accuracies(settings.operands, settings.model).get(arm),
            operands="-".join(map(str, settings.operands)),
            num_prompts=len(arm_answers),
            num_different_prompts=len(different),
            num_correct=sum(answer.correct for answer in arm_answers),
            num_parsed=sum(answer.answer is not None for answer in arm_answers),
            num_tokens=sum(answer.num_tokens for answer in arm_answers),
            acceptance=Drafts.total(answer.drafts for answer in arm_answers),
            **columns,
            **figures,
        )

    def _resume(self, session: Session) -> None:
        """Reuse the answers that earlier runs of the same measurement wrote, and copy them to this run's own file."""
        file = session.store_directory / PROMPTS_FILE
        earlier = rows_of(file, AnswerRow, self._measurement)
        self.answers = self._answered_by_all(
            [row for row in earlier if row.is_whole and self._measurement.includes(row)]
        )
        if not self.answers:
            return
        self.resumed = set(self.answers)
        rows = []
        for by_arm in self.answers.values():
            rows += [dataclasses.replace(row, run=session.run_id) for row in by_arm.values()]
        wanted = len(self.problems) * len(self.settings.arms)
        say(f"{len(rows)} of {wanted} answers are in {file} already; resume=false measures again")
        session.append(PROMPTS_FILE, rows)

    def _answer_pending(self, session: Session, token_ids: Sequence[Sequence[int]]) -> None:
        """Ask every arm, batch by batch, the questions that have no answers yet.

        Answers are only written when all arms have answered, so in the file a question has the answers of all arms or
        of none.
        """
        engine = session.open(self.settings.batch_size, max(map(len, token_ids)))
        problems = {problem.key: problem for problem in self.problems}
        pending = self._pending(session, token_ids)
        if engine.blocks is not None:
            # Each server that takes turns is started at most `blocks.number` times. Consecutive batches with the same
            # `moment` are answered in one start, so the batches are divided evenly among the starts.
            pending = [
                dataclasses.replace(question, moment=number * engine.blocks.number // len(pending))
                for number, question in enumerate(pending)
            ]
        # The rows of each batch that not all arms have answered yet, by the key of its first question.
        incomplete: dict[tuple[int, int], list[AnswerRow]] = {}
        # The first batch is also the warm-up, whose answers are not counted.
        for answered in ask_in_turns(engine, pending, warmups=pending[:1]):
            assert answered.question is not None
            batch = [problems[asked.seed, asked.index] for asked in answered.question.requests]
            rows = [*incomplete.pop(batch[0].key, []), *self._answer_rows(session, batch, answered)]
            if len(rows) < len(batch) * len(engine.arms):
                incomplete[batch[0].key] = rows
                continue
            session.append(PROMPTS_FILE, rows)
            if session.settings.results.file is not None:
                append_rows(session.store_directory / PROMPTS_FILE, rows)
            self.answers |= _by_question(rows)

    def _pending(self, session: Session, token_ids: Sequence[Sequence[int]]) -> list[Question]:
        """The questions without answers, in batches. All requests of a batch have the same seed."""
        stop_tokens = tokens_with(session.tokenizer, ENDS)
        pending = [
            (problem, ids)
            for problem, ids in zip(self.problems, token_ids, strict=True)
            if problem.key not in self.answers
        ]
        questions = []
        for seed, same_seed in grouped(pending, lambda asked: asked[0].seed).items():
            for batch in in_batches(same_seed, self.settings.batch_size):
                problems, prompts = zip(*batch, strict=True)
                requests = session.requests(
                    prompts,
                    [problem.index for problem in problems],
                    chats=[Prompt(problem.prompt).chat() for problem in problems],
                    seed=seed,
                )
                stops = requests[0].stop_tokens | stop_tokens
                ending = [
                    dataclasses.replace(request, stop_tokens=stops, ends=ENDS)
                    for request in requests
                ]
                questions.append(Question(ending))
        return questions

    def _answer_rows(
        self, session: Session, batch: Sequence[Problem], answered: Answered
    ) -> Iterator[AnswerRow]:
        """The rows of an arm's answers to a batch of questions, each with an equal share of the batch's time.

        Args:
            batch: the questions, in the order of the answers.
        """
        for problem, request in zip(batch, answered.requests, strict=True):
            text = text_of(
                request,
                session.tokenizer,
                skip_special_tokens=True,
                clean_up_tokenization_spaces=False,
            )
            line, answer = parse_answer(text)
            yield session.row(
                AnswerRow,
                request.as_drafts,
                prompt_index=problem.index,
                seed=problem.seed,
                arm=answered.arm,
                a=problem.a,
                b=problem.b,
                expected=str(problem.expected),
                completion=line,
                answer=None if answer is None else str(answer),
                correct=answer == problem.expected,
                num_tokens=request.num_tokens,
                time_ms=1000 * answered.seconds / len(batch),
                outcomes=[list(outcome) for outcome in request.outcomes],
                impossible_counts=request.impossible or None,
                server_started=self._measurement.server_started,
                measurement=self._measurement.digest,
            )

    def _answered_by_all(self, rows: Sequence[AnswerRow]) -> StoredAnswers:
        """The answers to those questions of this run that every arm has answered.

        If an arm has answered a question twice, the later answer is used.
        """
        answers = _by_question(rows)
        # Arms are counted, not looked up by name: with a single server there is one arm, whose name may be either.
        num_arms = len(self.settings.arms)
        return {
            problem.key: answers[problem.key]
            for problem in self.problems
            if len(answers.get(problem.key, ())) == num_arms
        }


def _by_question(rows: Sequence[AnswerRow]) -> StoredAnswers:
    """The rows by question and arm; of several for one question and arm the last."""
    answers: StoredAnswers = {}
    for row in rows:
        answers.setdefault((row.seed, row.prompt_index), {})[row.arm] = row
    return answers
