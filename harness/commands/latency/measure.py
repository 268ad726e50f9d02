"""The measurement of `latency`: regular and speculative decoding of the same prompts, alternately."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections import defaultdict
from collections.abc import Sequence

from harness.commands.command import Experiment
from harness.commands.latency.record import LatencySettings
from harness.config.amounts import counted
from harness.config.errors import RunError
from harness.config.machine import gpu_names
from harness.config.settings import require
from harness.engines.protocol import Answered, Engine, Question
from harness.engines.record import engine_of
from harness.engines.tokenizer import text_of
from harness.measuring.asking import batches_to_ask, first_turns, laps_to_ask, warmup_question
from harness.measuring.figures.measured import MeasuredArm, MeasuredRun, StoppedBy, figures_of
from harness.measuring.figures.paired import paired_times
from harness.measuring.figures.texts import compare_texts
from harness.measuring.interleaving import ask_in_turns
from harness.measuring.progress import say
from harness.measuring.prompts.encoding import Encoded, Encoder, decide_ignore_eos
from harness.measuring.prompts.sets import Prompt, PromptSet, load_prompts
from harness.measuring.quietness import Quietness
from harness.measuring.rows import LatencyRow
from harness.measuring.session import Session
from harness.results.rows.prompts import PROMPTS_FILE, LatencyPromptRow
from harness.results.statistics.interval import (
    CONFIDENCE,
    FEWEST_BLOCKS,
    FEWEST_FOR_INTERVAL,
    Coverage,
    fewest_units,
)
from harness.results.statistics.stopping import (
    CONFIDENCE_OF_LOOKS,
    FIRST_LOOK,
    FIRST_LOOK_AT_BLOCKS,
    is_precise,
    looks,
)
from harness.results.verdict import ArmEvidence, judged, too_many_failures

# At the beginning and end of a lap, fewer requests are in flight than intended. So laps are long: a lap has up to about
# _LONGEST_LAP times as many requests as are in flight, as long as there remain _MANY_LAPS laps, which are the units of
# the interval.
_MANY_LAPS = 16
_LONGEST_LAP = 4


def choose_num_laps(num_prompts: int, batch_size: int) -> int:
    """Return the number of laps for this many prompts. With one request in flight, each prompt is a lap.

    For example, 128 prompts with batch_size=4 make 16 laps with 8 prompts each. Prompts that remain after the division
    make some laps longer by one: 130 prompts make 16 laps, too.

    Args:
        batch_size: number of requests in flight. A lap has at least this many, if there are enough prompts.
    """
    if batch_size == 1:
        return num_prompts
    rounds = num_prompts // (_MANY_LAPS * batch_size)
    lap_size = batch_size * min(max(rounds, 1), _LONGEST_LAP)
    return max(1, num_prompts // lap_size)


def asks_again(settings: LatencySettings, prompt_set: PromptSet) -> bool:
    """Whether prompts are sent more than once, because more answers are wanted than the set has prompts."""
    return settings.num_asked > len(prompt_set.prompts)


def lap_count(settings: LatencySettings, engine: Engine, num_prompts: int) -> int:
    """Return the number of laps for this many prompts.

    an engine with blocks                     one lap for each block
    a single arm, several requests in flight  1
    otherwise                                 grows with the prompts (`choose_num_laps`)
    """
    if engine.blocks is not None:
        return engine.blocks.number
    # Laps let the arms alternate, but fewer requests are in flight at the ends of laps. A single arm needs one lap.
    if len(engine.arms) == 1 and settings.batch_size > 1:
        return 1
    return choose_num_laps(num_prompts, settings.batch_size)


def questions_to_ask(
    session: Session,
    engine: Engine,
    settings: LatencySettings,
    prompt_set: PromptSet,
    encoded: Encoded,
    conversations: Conversations,
) -> tuple[Question, list[Question]]:
    """Return the question for the warm-up, and the questions to measure, in order: one for each batch or lap, each
    followed by a question for every later turn of its conversations.

    Args:
        encoded: the measured prompts.
        conversations: makes the questions about later turns.
    """
    num_prompts = len(encoded.prompts)
    unused_index = prompt_set.first_unused(settings.num_asked, num_prompts)
    warmup = warmup_question(session, encoded, settings.batch_size, unused_index)
    num_asked = settings.num_asked if asks_again(settings, prompt_set) else num_prompts
    if engine_of(settings).queues:
        num_laps = functools.partial(lap_count, settings, engine)
        parts = laps_to_ask(num_prompts, num_asked, num_laps, settings.seed)
    else:
        parts = batches_to_ask(num_prompts, num_asked, settings.batch_size, settings.seed)
    questions = []
    for question in first_turns(session, settings.seed_of_run, prompt_set, encoded, parts, warmup):
        questions += [question, *conversations.follow_ups(question)]
    return warmup, questions


class Conversations:
    """The later turns of conversations, as questions whose prompts depend on the arm.

    Each turn has its own index: the index of the conversation, plus the number of prompts in the set for every earlier
    turn. With 10 prompts, the turns of the fourth conversation have the indices 3, 13 and 23.

    Args:
        longest: the most tokens of a prompt. For a model in this process, a longer later turn loses its oldest turns;
            the last turn by itself is never longer. For a server, nothing is left out.
    """

    def __init__(self, encoder: Encoder, prompt_set: PromptSet, longest: int) -> None:
        self._encoder = encoder
        self._tokenizer = encoder.planned.tokenizer
        self._prompt_set = prompt_set
        # The text of each answer, by arm and index of the turn.
        self._answers: dict[tuple[str, int], str] = {}
        self._said_cut = False
        self._is_limited = engine_of(encoder.settings).in_process
        self._longest = longest

    def follow_ups(self, first: Question) -> list[Question]:
        """The questions about later turns of the conversations that a question begins, one for each turn.

        The answers in their prompts are empty until `for_arm` fills them in.
        """
        prompts = self._prompt_set.prompts
        questions = []
        for turn in itertools.count(1):
            requests = []
            for request in first.requests:
                occurrence = self._prompt_set.occurrence(request.index)
                prompt = prompts[occurrence.place]
                if turn < len(prompt.turns):
                    [token_ids] = self._encoder.encode([prompt.after([""] * turn)])
                    index = self._prompt_set.index(occurrence._replace(turn=turn))
                    later = dataclasses.replace(
                        request, prompt=token_ids, index=index, chat=None, follows_up=True
                    )
                    requests.append(later)
            if not requests:
                break
            questions.append(dataclasses.replace(first, requests=requests))
        return questions

    def for_arm(self, question: Question, arm: str) -> Question:
        """The question with this arm's own answers to the earlier turns; the question itself for first turns."""
        if self._prompt_set.at(question.requests[0].index).turn in (None, 1):
            return question
        requests = []
        for request in question.requests:
            prompt, ids = self._so_far(request.index, arm)
            requests.append(dataclasses.replace(request, prompt=ids, chat=prompt.chat()))
        return dataclasses.replace(question, requests=requests)

    def keep(self, generation: Answered) -> None:
        """Remember an arm's answers, for later turns."""
        for request in generation.requests:
            text = text_of(request, self._tokenizer, skip_special_tokens=True)
            self._answers[generation.arm, request.index] = text

    def _so_far(self, index: int, arm: str) -> tuple[Prompt, list[int]]:
        """The conversation up to a turn, with an arm's answers, and its token ids.

        The tokenizer may split an answer's text into more tokens than were generated, so turns may have to be left out
        although room was planned for all (`Conversations`).
        """
        occurrence = self._prompt_set.occurrence(index)
        conversation = self._prompt_set.prompts[occurrence.place]
        # The indices of the earlier turns.
        earlier = [
            self._prompt_set.index(occurrence._replace(turn=turn))
            for turn in range(occurrence.turn)
        ]
        answers = [self._answers[arm, index_before] for index_before in earlier]
        # Leave out no turn, then the oldest one, then the two oldest ones, until the rest is short enough. The last
        # turn alone always is: `longest` has room for all turns, with empty answers.
        for left_out in range(occurrence.turn + 1):
            prompt = conversation.after(answers, left_out)
            [ids] = self._encoder.encode([prompt])
            if not self._is_limited or len(ids) <= self._longest:
                break
        if left_out and not self._said_cut:
            self._said_cut = True
            say(
                f"turn {occurrence.turn + 1} of the prompt in line {conversation.line} is sent without its first"
                f" turns ({left_out}), because with the answers it is too long; this is reported once"
            )
        return prompt, ids


class LatencyExperiment(Experiment[LatencySettings, LatencyRow]):
    """Sends the same prompts to both arms, alternately: batch by batch, or lap by lap if the engine keeps requests in
    flight (`Abilities.queues`).

    Attributes:
        run: everything that has been measured so far; the figures of the rows are computed from it. It is empty until
            the engine is open. Each answer is then added to its arm in place, so that a run that ends early has the
            figures of the answers before.
        num_skipped: how many prompts of the set were too long.
        unwritten: for each arm, its answers to questions that the other arm has not answered yet. They are measured
            already, but their rows are only made when both arms have answered.
    """

    def __init__(self, settings: LatencySettings) -> None:
        self.prompt_set = load_prompts(settings.prompts)
        available = len(self.prompt_set.prompts)
        self.settings = _settled(settings, available)
        self.prompts = self.prompt_set.take(min(self.settings.num_asked, available))
        self._check_batch(len(self.prompts))
        # A run that fails before it measures anything has rows, too, but without figures.
        arms = {name: MeasuredArm(name) for name in settings.arms}
        self.run = MeasuredRun(self.settings, self.prompt_set, arms)
        self.num_skipped = 0
        self.unwritten: defaultdict[str, list[Answered]] = defaultdict(list)

    def outlook(self) -> tuple[str, str]:
        """What will be sent, and the reason why this is too little for an interval, if it is known to be.

        An interval needs enough units, and how many there are depends on how the prompts are sent.
        """
        settings, engine, size = self.settings, self.settings.engine, self.settings.batch_size
        num_different = num_asked = len(self.prompts)
        asked = counted(num_different, "prompt")
        if asks_again(settings, self.prompt_set):
            num_asked = settings.num_asked
            asked = f"{num_asked} requests of {asked}"
        is_server_alone = engine.url is not None and not engine.has_two
        # Only engine=server has these settings. Its class is in `servers`, which this module need not import.
        is_started = bool(vars(engine).get("start_command"))
        blocks = vars(engine)["blocks"] if is_started else 0
        # A single arm has no speed-up, and so no interval. On GPUs, `blocks=auto` gives enough blocks if the servers do
        # not fit side by side, which is only known once they are started.
        if settings.draft is None or is_server_alone or (blocks == "auto" and gpu_names()):
            return asked, ""
        enough = f"num_prompts={FEWEST_FOR_INTERVAL * size}"
        if blocks not in ("auto", 0):
            covers, enough = Coverage(blocks, "block"), f"engine.blocks={FEWEST_BLOCKS}"
        elif size == 1:
            covers = Coverage(num_different, "prompt")
        elif engine_of(settings).queues:
            covers = Coverage(choose_num_laps(num_asked, size), "lap")
        else:
            batches = batches_to_ask(num_different, num_asked, size, settings.seed)
            covers = Coverage(len({batch.unit for batch in batches}), "batch")
        if covers.num_units >= fewest_units(covers.unit):
            return asked, ""
        num_in_set = len(self.prompt_set.prompts)
        if covers.unit == "prompt" and num_in_set < FEWEST_FOR_INTERVAL:
            # The set has too few prompts for an interval, no matter how often they are sent.
            return asked, f"{covers.why_no_interval}: the set has {num_in_set}"
        return asked, f"{covers.why_no_interval}: {enough} has one"

    def measure(self, session: Session) -> None:
        """Encode the prompts, open the engine, and ask both arms all questions.

        Raises:
            SettingError: for prompts that are too long or too few, and for `precision` with a single arm.
            RunError: if the pair does not fit, the engine fails, or too many requests fail for a verdict.
        """
        self.settings = settings = decide_ignore_eos(self.settings, session.tokenizer)
        new_tokens = settings.decoding.max_new_tokens
        encoder = session.encoder
        encoded = encoder.encode_set(
            self.prompt_set, self.prompts, new_tokens, num_others=settings.batch_size
        )
        self.num_skipped = encoded.num_skipped
        # Checked again, because prompts that are too long may have been skipped.
        self._check_batch(len(encoded.prompts))
        # The longest prompt; of conversations, with room for the answers to the turns before the last one.
        longest = encoded.longest_turn
        conversations = Conversations(encoder, self.prompt_set, longest)
        session.place(settings.batch_size, longest)
        engine = session.open(settings.batch_size, longest)
        self._check_engine(engine)
        warmup, questions = questions_to_ask(
            session, engine, settings, self.prompt_set, encoded, conversations
        )
        gpus = () if engine.weights is None else engine.weights.gpus
        known_salts = [arm.traits.salts for arm in engine.arms if arm.traits.salts is not None]
        self.run = MeasuredRun(
            settings=settings,
            prompt_set=self.prompt_set,
            # The engine names its arms: the only arm of a single server may be the speculative one.
            arms={arm.name: MeasuredArm(arm.name) for arm in engine.arms},
            in_blocks=engine.blocks is not None,
            salted=all(known_salts) if known_salts else None,
            end_tokens=session.end_tokens() if settings.weights == "stored" else frozenset(),
            # Other programs on this machine do not slow an engine that has its own clock.
            quietness=None if engine_of(settings).own_clock else Quietness(gpus),
            confidence=CONFIDENCE if settings.precision is None else CONFIDENCE_OF_LOOKS,
        )
        self._ask(session, engine, warmup, questions, conversations)
        _check_failures(self.run)

    def _ask(
        self,
        session: Session,
        engine: Engine,
        warmup: Question,
        questions: Sequence[Question],
        conversations: Conversations,
    ) -> None:
        """Ask the arms the questions, alternately, until all are answered, the run is precise or its budget is spent.

        Each answer is added to `run` as soon as it arrives. Rows are only written when all arms have answered a
        question, because the rows of the speculative arm record where its texts differ from the regular ones. The
        precision and the budget are checked after a question or, with blocks, after a block.
        """
        settings = self.settings
        run = self.run
        reference = None if engine.weights is None else engine.weights.reference
        num_answered = 0
        stopped_by: StoppedBy | None = None
        for generation in ask_in_turns(
            engine,
            questions,
            [warmup] * settings.num_warmup,
            allow_failures=True,
            question_for=conversations.for_arm,
        ):
            measured = run.arms[generation.arm]
            measured.generations.append(generation)
            measured.phases.add(generation.phases)
            self.unwritten[generation.arm].append(generation)
            conversations.keep(generation)
            if run.quietness is not None:
                run.quietness.look()
            waiting = [self.unwritten[arm.name] for arm in engine.arms]
            if not all(waiting):
                continue
            # The arms answer the questions in the same order, so their first answers are to the same question.
            if len(waiting) > 1:
                compare_texts(run, reference, session.tokenizer, *[of_arm[0] for of_arm in waiting])
            self._write(session, waiting)
            num_answered += 1
            # Not within a block, in which one arm has answered further questions already (`ask_in_turns`); and not
            # after the last question, where nothing is left to stop.
            if num_answered < len(questions) and not any(waiting):
                stopped_by = _why_stop(run, settings)
            if stopped_by is not None:
                break
        # If all questions were answered, neither the precision nor the budget has ended the run.
        if settings.precision is not None and num_answered == len(questions):
            has_asked_all = settings.num_asked == len(self.prompt_set.prompts)
            stopped_by = "prompts" if has_asked_all else "num_prompts"
            if run.in_blocks:
                stopped_by = "blocks"
        for arm in engine.arms:
            run.arms[arm.name].between = arm.between_questions()
        self.run = dataclasses.replace(run, stopped_by=stopped_by)

    def _write(self, session: Session, waiting: Sequence[list[Answered]]) -> None:
        """Make and write the rows of the first answer in each of these lists, and remove it from its list."""
        rows: list[LatencyPromptRow] = []
        for of_arm in waiting:
            rows += prompt_rows(self.run, of_arm[0], session)
        # Removed only now: if an error or Ctrl-C ends the lines above, `rows` still finds the answers here.
        for of_arm in waiting:
            del of_arm[0]
        self.run.prompt_rows.extend(rows)
        if rows:
            session.append(PROMPTS_FILE, rows)

    def _check_batch(self, num_measured: int) -> None:
        """Raise a SettingError if a batch has more prompts than are sent.

        Args:
            num_measured: number of different prompts.
        """
        again = asks_again(self.settings, self.prompt_set)
        size = self.settings.batch_size
        number = self.settings.num_asked if again else num_measured
        rule = f"needs num_prompts={size} or more: {number} are measured"
        require(size <= number, "batch_size", rule, size)

    def _check_engine(self, engine: Engine) -> None:
        """Raise a SettingError for `precision` if there is no second arm."""
        precision = self.settings.precision
        rule = "needs two arms: it is about the speed-up, which a single server does not have"
        has_two = any(arm.name == "regular" for arm in engine.arms)
        require(precision is None or has_two, "precision", rule, precision)

    def rows(self, session: Session) -> Sequence[LatencyRow]:
        """One row per arm, with None for everything that was not measured."""
        # If the run ended after only one arm had answered a question, this arm's figures include the answer.
        for of_arm in self.unwritten.values():
            while of_arm:
                self._write(session, [of_arm])
        rows = []
        for measured in self.run.arms.values():
            row = session.row(
                LatencyRow,
                **figures_of(LatencyRow, self.run, measured),
                num_skipped=self.num_skipped,
                arm=measured.name,
                seed=self.settings.seed_of_run,
                prompts_digest=self.prompt_set.digest,
            )
            rows.append(row)
        return judged(rows, {name: arm.evidence for name, arm in self.run.arms.items()})


def _why_stop(run: MeasuredRun, settings: LatencySettings) -> StoppedBy | None:
    """Return why a run with `precision` or a `budget` ends after a question; None if it continues."""
    if settings.budget_s is not None:
        times = [answered.seconds for arm in run.arms.values() for answered in arm.generations]
        if sum(times) > settings.budget_s:
            return "budget"
    if settings.half_width is None:
        return None
    # The number of batches or laps that were sent. If the set is sent again, it still grows.
    num_sent = len({row.moment for row in run.prompt_rows})
    if num_sent not in looks(num_sent, FIRST_LOOK_AT_BLOCKS if run.in_blocks else FIRST_LOOK):
        return None
    speedup = paired_times(run).speedup(run.confidence)
    return "precision" if is_precise(speedup, settings.half_width) else None


def _check_failures(run: MeasuredRun) -> None:
    """Raise a RunError if so many requests failed that no verdict is possible."""
    evidence = []
    for name, arm in run.arms.items():
        num_failed = sum(request.has_failed for request in arm.requests)
        if arm.requests and not arm.answered:
            # None of the arm's answers has a token, so every request counts as failed.
            num_failed = len(arm.requests)
        evidence.append(ArmEvidence(arm=name, num_prompts=len(arm.requests), num_failed=num_failed))
    reason = too_many_failures(evidence)
    if reason is not None:
        requests = [request for arm in run.arms.values() for request in arm.requests]
        # An error says more than an answer without a token does.
        failed = [request for request in requests if request.has_failed]
        empty = [request for request in requests if not request.answered]
        first = (failed or empty)[0]
        raise RunError(f"{reason}, the first with {first.error}")


def prompt_rows(run: MeasuredRun, generation: Answered, session: Session) -> list[LatencyPromptRow]:
    """The rows of an arm's answers to a question, one for each prompt."""
    assert generation.question is not None
    divergences = run.arms[generation.arm].divergences
    rows = []
    for request in generation.requests:
        prompt = run.prompt_set.at(request.index)
        occurrence = run.prompt_set.occurrence(request.index)
        divergence = divergences.get(request.index)
        # Values that mean "does not apply" (0, False, empty text) become None, an empty cell of the file.
        row = session.row(
            LatencyPromptRow,
            request.as_drafts,
            prompt_index=request.index,
            prompt_place=occurrence.place,
            category=prompt.category,
            turn=prompt.turn,
            prompt=prompt.text,
            arm=generation.arm,
            completion=text_of(request, session.tokenizer, skip_special_tokens=False),
            num_tokens=request.num_tokens,
            # A row of a batch takes as long as the whole batch.
            time_ms=1000 * (request if generation.has_request_times else generation).seconds,
            time_to_first_token_ms=request.time_to_first_token_ms,
            last_token_ms=1000 * request.arrivals[-1] if request.arrivals else None,
            num_arrivals=len(request.bursts) or None,
            cached_tokens=request.num_cached,
            unit=generation.question.unit,
            moment=generation.question.moment,
            lap_ms=1000 * generation.seconds,
            num_prompt_tokens=request.num_prompt_tokens,
            read_tokens=request.num_read,
            compared=request.index in divergences or None,
            error=None if request.error is None else str(request.error),
            impossible_counts=request.impossible or None,
            **({} if divergence is None else divergence.columns),
        )
        rows.append(row)
    return rows


def _settled(settings: LatencySettings, available: int) -> LatencySettings:
    """The settings, in which `num_prompts=auto` is replaced by a number if the number depends on the prompt set.

        precision=                                     all prompts of the set
        a server that drafts from earlier answers      at most as many as the set has

    Args:
        available: number of prompts in the set.
    """
    if settings.num_prompts != "auto":
        return settings
    if settings.precision is not None:
        return dataclasses.replace(settings, num_prompts=available)
    if engine_of(settings).columns(settings).get("draft_remembers"):
        # No prompt may be sent twice, because the server would draft from its own earlier answer to it.
        return dataclasses.replace(settings, num_prompts=min(settings.num_asked, available))
    return settings
