"""`eval`: how many questions each arm answers rightly, on the same questions, batched, and resumed where it ended."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from harness.config.commands import EvalSettings
from harness.decoding.loops import Request
from harness.decoding.randomness import uniforms
from harness.experiments import evaluation_rows
from harness.experiments.arms import warp
from harness.experiments.progress import progress, say
from harness.experiments.prompts import Prompt
from harness.experiments.questions import (
    Question,
    check_answer_length,
    draw_questions,
    first_line,
    line_end_tokens,
    parse_answer,
)
from harness.experiments.setup import (
    PairKeeper,
    RunRecord,
    append_run,
    check_context,
    device_names,
    encode,
    stop_tokens,
    take_part,
)
from harness.experiments.tasks import Task, load_task
from harness.experiments.timing import Generation, generate, quick_collections
from harness.models.loading import Pair
from harness.results.answers import Answer, read_answers
from harness.results.environment import write_environment
from harness.results.eval_report import print_report
from harness.results.files import append_rows, check_appendable
from harness.results.measurement import measurement_digest

# Settings that say how much is asked, and nothing about an answer.
_NOT_OF_AN_ANSWER = ("seed", "seeds", "num_prompts")

# By arm, seed and index of the question.
Answers = dict[tuple[str, int, int], Answer]


def run(settings: EvalSettings, directory: Path, keeper: PairKeeper | None = None) -> float | None:
    """Ask all questions, print the table, write the files, and return the last arm's accuracy.

    Args:
        directory: of this run; `eval.csv`, `eval_prompts.csv` and `environment.json` are written there.
        keeper: holds the pair where several runs follow each other.

    Raises:
        SettingError: a mistake that only the models' configurations reveal.
        RunError: the run failed. Its rows, with what was answered until then, are written first.
    """
    record = RunRecord(settings, directory)
    keeper = keeper or PairKeeper()
    check_appendable(settings.results.file)
    task = load_task(settings.task)
    questions = _questions(settings, task)
    answers: Answers = {}
    resumed: Answers = {}
    planned = None
    try:
        with record.watch():
            planned = keeper.plan(settings)
            check_answer_length(planned.tokenizer, questions, settings.decoding.max_new_tokens)
            token_ids = encode(
                planned.tokenizer, [Prompt(question.prompt) for question in questions], settings.chat_template
            )
            check_context(planned, token_ids, settings.decoding.max_new_tokens, "task")
            longest, rows_at_once = max(map(len, token_ids)), min(settings.batch_size, len(questions))
            planned = keeper.make_room(settings, rows_at_once, longest, settings.decoding.max_new_tokens)
            say(planned.describe())
            record.devices = device_names(planned.devices)
            write_environment(directory, record.devices)
            files = [directory / "eval_prompts.csv", answer_store(settings)]
            wanted = len(questions) * len(settings.arms)
            if settings.resume and (resumed := _answered(files[1], questions, settings.arms)):
                say(f"{len(resumed)} of {wanted} answers are in {files[1]} already; resume=false measures anew")
                append_rows(files[0], [answer.as_row() for answer in resumed.values()])
                answers |= resumed
            if len(answers) < wanted:
                measure(settings, keeper.load(), questions, token_ids, answers, files, record)
    finally:
        rows = evaluation_rows.arm_rows(settings, task, questions, answers, resumed.keys(), planned, record)
        written = append_run(settings, directory / "eval.csv", rows)
        if answers:
            print_report(rows)
            say(f"written to {directory}/ and {written}")
    return rows[-1]["accuracy"]


def record_failure(settings: EvalSettings, directory: Path, reason: str) -> None:
    """Write the rows of a run that ended before it could, with what it had answered."""
    record = RunRecord(settings, directory, status="failed", error=reason)
    task = load_task(settings.task)
    questions = _questions(settings, task)
    answers = _answered(directory / "eval_prompts.csv", questions, settings.arms)
    rows = evaluation_rows.arm_rows(settings, task, questions, answers, (), None, record)
    append_run(settings, directory / "eval.csv", rows)


def measure(
    settings: EvalSettings,
    pair: Pair,
    questions: Sequence[Question],
    token_ids: Sequence[list[int]],
    answers: Answers,
    files: Sequence[Path],
    record: RunRecord,
) -> None:
    """Ask every arm, batch by batch, what is not among the answers yet; add to `answers` and to the CSV `files`.

    Both arms answer a batch before the next begins, and it is written once both have: a question is answered by all
    arms or by none. Whatever ends this early, what was answered is in `answers` and in the files.
    """
    decoding = settings.decoding
    taking_part = take_part(settings, pair, token_ids, record, share_prefix=True)
    arms = taking_part.arms(decoding)
    stop = line_end_tokens(pair.tokenizer) | (frozenset() if decoding.ignore_eos else stop_tokens(pair))
    batches = list(_batches(settings, questions, answers))
    with quick_collections(), progress("warming up", len(batches)) as advance:
        for number, (seed, batch) in enumerate(batches):
            indices = [questions[place].index for place in batch]
            request = Request(
                prompts=[token_ids[place] for place in batch],
                uniforms=uniforms(seed, indices, decoding.max_new_tokens + 1, pair.target.input_device),
                warp=warp(decoding),
                max_new_tokens=decoding.max_new_tokens,
                stop_tokens=stop,
            )
            if number == 0:
                for arm in arms:
                    generate(arm, request, pair.devices)
            asked = [questions[place] for place in batch]
            given: list[Answer] = []
            # The order alternates, so that neither arm always runs on what the other has warmed.
            for arm in arms if number % 2 == 0 else reversed(arms):
                given += _answers(pair.tokenizer, arm.name, asked, generate(arm, request, pair.devices))
            rows = [answer.as_row() for answer in given]
            for file in files:
                append_rows(file, rows)
            answers |= {answer.key: answer for answer in given}
            advance(_running_accuracy(answers, settings.arms))


def answer_store(settings: EvalSettings) -> Path:
    """The file beside `results.file` that collects answers given under the same circumstances, whatever was asked."""
    digest = measurement_digest(settings, leaving_out=_NOT_OF_AN_ANSWER)
    return Path(settings.results.file).parent / "eval_answers" / f"{digest}.csv"


def _questions(settings: EvalSettings, task: Task) -> list[Question]:
    return [
        question
        for seed in settings.seeds
        for question in draw_questions(task, settings.operands, seed, settings.num_prompts)
    ]


def _answered(store: Path, questions: Sequence[Question], arms: Sequence[str]) -> Answers:
    """What the store holds of these questions, as far as every arm has answered; of two answers the later."""
    found = {answer.key: answer for answer in read_answers(store)}
    keys = [[(arm, question.seed, question.index) for arm in arms] for question in questions]
    return {key: found[key] for of_question in keys if all(key in found for key in of_question) for key in of_question}


def _batches(
    settings: EvalSettings, questions: Sequence[Question], answers: Mapping[tuple[str, int, int], Answer]
) -> Iterator[tuple[int, list[int]]]:
    """Seed and places in `questions` of each batch; a batch is of one seed, as its random numbers are."""
    for seed in settings.seeds:
        pending = [
            place
            for place, question in enumerate(questions)
            if question.seed == seed and ("regular", seed, question.index) not in answers
        ]
        for first in range(0, len(pending), settings.batch_size):
            yield seed, pending[first : first + settings.batch_size]


def _answers(
    tokenizer: PreTrainedTokenizerBase, arm: str, asked: Sequence[Question], generation: Generation
) -> Iterator[Answer]:
    """What an arm answered to a batch of questions. Every one of them takes an equal share of the batch's time."""
    answered_at = datetime.now(UTC).isoformat(timespec="seconds")
    for question, tokens, outcomes in zip(asked, generation.tokens, generation.outcomes, strict=True):
        text = str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False))
        completion = first_line(text)
        answer = parse_answer(completion)
        yield Answer(
            prompt_index=question.index,
            seed=question.seed,
            arm=arm,
            a=question.a,
            b=question.b,
            expected=question.expected,
            completion=completion,
            answer=answer,
            correct=answer == question.expected,
            num_tokens=len(tokens),
            time_ms=1000 * generation.seconds / len(asked),
            outcomes=tuple(outcomes),
            answered_at=answered_at,
        )


def _running_accuracy(answers: Answers, arms: Sequence[str]) -> str:
    """`regular 62.5 %, speculative 62.4 %` of what is answered so far."""
    shares = []
    for arm in arms:
        correct = [answer.correct for answer in answers.values() if answer.arm == arm]
        shares.append(f"{arm} {sum(correct) / len(correct):.1%}")
    return ", ".join(shares)
