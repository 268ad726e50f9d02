"""`latency`: regular against speculative decoding on the same prompts, with the interval and the
reason.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from harness.commands.command import Experiment
from harness.commands.latency.conversations import Conversations
from harness.commands.latency.own_texts import follows_from_answers, tokens_by_k
from harness.commands.latency.questions import asks_again, questions_to_ask
from harness.commands.latency.record import LatencySettings
from harness.commands.latency.tables.figures import profile_table
from harness.config.errors import RunError, SettingError
from harness.config.settings import require
from harness.config.synthetic import length_in_answers
from harness.engines.door import wing
from harness.engines.protocol import Answered, Arm, Engine, Question
from harness.engines.registry import engine_of
from harness.engines.requests import RequestRecord
from harness.engines.text_tokenizer import text_of
from harness.engines.timing import timed_answer
from harness.measuring.acceptance import acceptance_columns
from harness.measuring.figures.measured import MeasuredArm, MeasuredRun, StoppedBy, figures_of
from harness.measuring.figures.paired import paired_times
from harness.measuring.figures.texts import compare_texts
from harness.measuring.interleaving import Answers, ask_in_turns
from harness.measuring.prices import iteration_cost
from harness.measuring.progress import note, say
from harness.measuring.prompts.encoding import decide_ignore_eos
from harness.measuring.prompts.sets import load_prompts
from harness.measuring.quietness import Quietness
from harness.measuring.rows import LatencyRow
from harness.measuring.session import Session
from harness.reporting.table import Table
from harness.results.price.value import write_costs
from harness.results.rows.prompts import PROMPTS_FILE, LatencyPromptRow
from harness.results.runs import Run
from harness.results.statistics.interval import CONFIDENCE, Interval
from harness.results.statistics.stopping import (
    CONFIDENCE_OF_LOOKS,
    FIRST_LOOK,
    FIRST_LOOK_AT_BLOCKS,
    is_precise,
    looks,
)
from harness.results.verdict import judged, require_verdict, too_many_failures

# `test=true`: enough to see that a pair works at all; of prompts at least one batch.
_TEST_PROMPTS = 2
_TEST_TOKENS = 16


class Latency(Experiment[LatencySettings, LatencyRow]):
    """Both arms on the same prompts, in turns: batch by batch, or lap by lap where an engine keeps
    requests in flight (`Engine.queues`).

    Stopwatches split the time of an arm into drafting and verifying. Where they cost nothing, as on
    a CPU, they run while an arm is timed. Elsewhere each arm answers a batch once more under
    stopwatches, after both were timed, so that drift of the machine hits the times and their split
    alike.

    Attributes:
        run: everything that was measured by now, from which the figures of the rows follow. Each step of `measure`
            ends with a new value, so that a run that ends early has the figures of the steps before.
        unwritten: answers that count already, and whose rows wait for those of the regular arm.
        prompt_rows: the rows of the prompts file so far.
        more: tables of the slowest kernels, with `profile=true`.
        warmup, questions, conversations: what the arms are asked, once `measure` has opened an
            engine; the conversations have each arm's answers to earlier turns.
    """

    def __init__(self, settings: LatencySettings) -> None:
        self.prompt_set = load_prompts(settings.prompts)
        available = len(self.prompt_set.prompts)
        self.settings = _settled(settings, available)
        self.prompts = self.prompt_set.take(min(self.settings.num_asked, available))
        self._check_batch()
        # A run that fails before it measures has rows too, without figures.
        arms = {name: MeasuredArm(name) for name in settings.arms}
        self.run = MeasuredRun(self.settings, self.prompt_set, arms)
        self.unwritten: Answers = {}
        self.prompt_rows: list[LatencyPromptRow] = []
        self.more: Sequence[Table] = ()

    def measure(self, session: Session) -> None:
        self.settings = settings = decide_ignore_eos(self.settings, session.tokenizer)
        new_tokens = settings.decoding.max_new_tokens
        encoded = session.encode_set(
            self.prompt_set, self.prompts, new_tokens, num_others=settings.batch_size
        )
        # Prompts that are too long may have been skipped.
        self.prompts = encoded.prompts
        self._check_batch()
        first_turns = Question(encoded.token_ids, settings.decoding, settings.seed, encoded.indices)
        self.conversations = Conversations(settings, session.planned, self.prompt_set, first_turns)
        longest = max(encoded.longest, self.conversations.longest)
        placed = session.place(settings.batch_size, longest)
        if settings.profile:
            devices = [] if placed is None else placed.devices
            rule = "needs a model on a GPU of this machine: it lists kernels"
            require(any(device.type == "cuda" for device in devices), "profile", rule, True)
        engine = session.open(settings.batch_size, longest)
        if settings.precision is not None:
            rule = "needs two arms: it is about the speed-up, which a single server does not have"
            has_two = any(arm.name == "regular" for arm in engine.arms)
            require(has_two, "precision", rule, settings.precision)
        self.warmup, self.questions = questions_to_ask(
            session.question(), engine, settings, self.prompt_set, encoded, self.conversations
        )
        gpus = () if engine.weights is None else engine.weights.gpus
        quietness = Quietness(gpus, say)
        self.run = self._unmeasured(session, engine, quietness)
        stopped_by = self._time_arms(session, engine, quietness)
        if stopped_by is not None:
            self.run = dataclasses.replace(self.run, stopped_by=stopped_by)
        self._check_failures()

        example = self.questions[0]
        # An average step reads the prompt and half of the new tokens.
        context = round(encoded.mean_length + new_tokens / 2)
        watches = engine.stopwatches
        self.run = dataclasses.replace(
            self.run,
            pass_ms=None if watches is None else watches.pass_ms(example),
            roofs=() if placed is None else wing.roofs(placed, settings.batch_size, context),
        )
        if settings.profile:
            profiles = wing.profile_arms(engine, example, session.directory)
            self.more = [profile_table(profile) for profile in profiles]
        self._read_answers(session, engine)

    def _unmeasured(self, session: Session, engine: Engine, quietness: Quietness) -> MeasuredRun:
        """The run before the first question: what follows from its settings and its engine."""
        settings = self.settings
        known_salts = [arm.traits.salts for arm in engine.arms if arm.traits.salts is not None]
        # With `precision`, what ends the run after the last question.
        stopped_by: StoppedBy | None = None
        if settings.precision is not None:
            has_asked_all = settings.num_asked == len(self.prompt_set.prompts)
            stopped_by = "prompts" if has_asked_all else "num_prompts"
            if engine.blocks is not None:
                stopped_by = "blocks"
        return MeasuredRun(
            settings=settings,
            prompt_set=self.prompt_set,
            # A server alone may be the speculative arm.
            arms={arm.name: MeasuredArm(arm.name) for arm in engine.arms},
            in_blocks=engine.blocks is not None,
            salted=all(known_salts) if known_salts else None,
            end_tokens=session.end_tokens() if settings.weights == "stored" else frozenset(),
            # A clock of the engine's own does not pass on this machine.
            quietness=None if engine_of(settings).own_clock else quietness,
            stopped_by=stopped_by,
            confidence=CONFIDENCE if settings.precision is None else CONFIDENCE_OF_LOOKS,
        )

    def _read_answers(self, session: Session, engine: Engine) -> None:
        """Read the answers once more for what every smaller K would have yielded, which closes the engine."""
        settings = self.settings
        if settings.draft is None or len(self.run.arms) < 2:
            return
        by_k: list[Interval] | None = None
        rates = settings.decoding.synthetic_rates
        if rates is not None:
            length = statistics.fmean(self.run.arms["speculative"].lengths.values())
            ks = range(1, settings.decoding.most_draft_tokens + 1)
            by_k = [Interval(length_in_answers(rates, k, length)) for k in ks]
        elif follows_from_answers(settings, session.planned):
            # Its memory is free for the reading.
            engine.close()
            try:
                by_k = tokens_by_k(session.pair, settings, self.run)
            except RunError as error:
                note(f"nothing is predicted of a smaller K: {error}")
        self.run = dataclasses.replace(self.run, tokens_by_k=by_k)

    def rows(self, session: Session) -> list[LatencyRow]:
        """One row per arm, with None for anything that was not measured."""
        # Where the run ended before the regular arm's answers: figures follow from these too.
        unwritten = [*self.unwritten.values()]
        self.unwritten = {}
        self._write(unwritten, session)
        rows = []
        for measured in self.run.arms.values():
            figures = figures_of(LatencyRow, self.run, measured)
            figures |= {
                "arm": measured.name,
                "seed": self.settings.seed_of_run,
                "prompts_digest": self.prompt_set.digest,
            }
            rows.append(session.row(LatencyRow, **figures))
        judged_rows = judged(rows, {name: arm.lengths for name, arm in self.run.arms.items()})
        self.keep_price(session, judged_rows)
        return judged_rows

    def keep_price(self, session: Session, rows: Sequence[LatencyRow]) -> None:
        """Write what an iteration costs, for `costs=` of `plan`."""
        run = Run([*rows])
        run.prompt_rows = self.prompt_rows
        cost = iteration_cost([run])
        if cost.points and rows[-1].status == "ok":
            write_costs(session.directory, dataclasses.replace(cost, source=str(session.run)))

    def judge(self, rows: Sequence[LatencyRow]) -> None:
        require_verdict(rows)

    def _time_arms(
        self, session: Session, engine: Engine, quietness: Quietness
    ) -> StoppedBy | None:
        """Time both arms, and the phases of their iterations under stopwatches.

        Returns what ended this before the last question; None if nothing did.
        """
        settings = self.settings
        timed: Sequence[Arm] = engine.arms
        watched: Sequence[Arm] = []
        if engine.stopwatches is not None:
            watched = engine.stopwatches.arms()
            if engine.stopwatches.are_free:
                timed = watched
                watched = []

        seconds: defaultdict[str, float] = defaultdict(float)
        num_tokens: defaultdict[str, int] = defaultdict(int)

        def so_far() -> str | None:
            """The estimate of the speed-up so far; None before there is one."""
            arms = list(self.run.arms)
            if len(arms) < 2 or not all(seconds[name] and num_tokens[name] for name in arms):
                return None
            regular, speculative = (seconds[name] / num_tokens[name] for name in arms)
            return f"{regular / speculative:.2f}× so far"

        started = time.monotonic()
        budget_s = settings.budget_s or math.inf
        num_answered = 0
        units: set[int] = set()
        first_look = FIRST_LOOK_AT_BLOCKS if self.run.in_blocks else FIRST_LOOK
        answers: Answers = {}
        for generation in ask_in_turns(
            engine,
            self.questions,
            [self.warmup] * settings.num_warmup,
            arms=timed,
            allow_failures=True,
            so_far=so_far,
            question_for=self.conversations.for_arm,
        ):
            self.conversations.keep(generation)
            name = generation.arm
            answers[name] = generation
            self.run.arms[name].phases.add(generation.phases)
            seconds[name] += generation.seconds
            num_tokens[name] += sum(request.num_tokens for request in generation.requests)
            quietness.look()
            # A lap may take long: it must not be lost with the other arm's.
            self._keep(session, answers, name)
            if len(answers) < len(timed):
                continue
            question = self.questions[num_answered]
            for arm in watched:
                # Once more, under stopwatches.
                again = timed_answer(engine, arm, self.conversations.for_arm(question, arm.name))
                self.run.arms[arm.name].phases.add(again.phases)
            answers = {}

            units.add(question.unit)
            num_answered += 1
            if settings.half_width is None or num_answered == len(self.questions):
                continue
            if time.monotonic() - started > budget_s:
                return "budget"
            if len(units) in looks(len(units), first_look):
                times = paired_times(self.run, *self.run.arms.values())
                speedup = times.speedup(settings.seed, self.run.confidence)
                if is_precise(speedup, settings.half_width):
                    return "precision"
        return None

    def _check_batch(self) -> None:
        """Raise a SettingError for a batch of more prompts than are asked, and for repetitions whose
        answers a draft would know.
        """
        again = asks_again(self.settings, self.prompt_set)
        if again and self.settings.finds_own_answers:
            rule = (
                f"must be at most {len(self.prompt_set.prompts)}, the prompts of the set, with"
                " draft.shared=true, which finds its own answer to a prompt that is asked again"
            )
            raise SettingError("num_prompts", rule, self.settings.num_asked)
        size = self.settings.batch_size
        number = len(self.prompts)
        if again:
            number = self.settings.num_asked
        rule = f"needs as many prompts: num_prompts={size}, where {number} are measured"
        require(size <= number, "batch_size", rule, size)

    def _keep(self, session: Session, answers: Answers, name: str) -> None:
        """Keep the newest answer to a question, and write the rows of those that are complete.

        A speculative row has the position at which its text differs from the regular one. So it is written once the
        regular arm has answered.

        Args:
            answers: the generation of each arm that has answered this question, by arm.
            name: of the arm that answered last.
        """
        self.run.arms[name].generations.append(answers[name])
        # The regular one, unless a server that speculates is alone.
        first = next(iter(self.run.arms))
        if first not in answers:
            self.unwritten = dict(answers)
            return
        self.unwritten = {}
        if len(answers) > 1:
            assert session.engine is not None
            weights = session.engine.weights
            reference = None if weights is None else weights.reference
            compare_texts(self.run, reference, session.tokenizer, answers)
        # The regular answer also completes a speculative one that came before it.
        complete = self.run.arms if name == first else [name]
        self._write([answers[arm] for arm in complete if arm in answers], session)

    def _write(self, generations: Sequence[Answered], session: Session) -> None:
        rows = [
            self._prompt_row(session, generation, request)
            for generation in generations
            for request in generation.requests
        ]
        self.prompt_rows += rows
        if rows:
            self.keep_prompts(session, rows)

    def keep_prompts(self, session: Session, rows: Sequence[LatencyPromptRow]) -> None:
        """Write rows of the prompts file."""
        session.append(PROMPTS_FILE, rows)

    def _check_failures(self) -> None:
        """Raise a RunError if too many requests failed for a verdict from the others."""
        evidence = []
        failures: list[RequestRecord] = []
        for name, measured in self.run.arms.items():
            requests = measured.requests
            failed = [request for request in requests if not request.answered]
            if len(failed) == len(requests):
                number = f"all {len(failed)} requests failed"
                raise RunError(f"{name}: {number}, the first with {failed[0].error}")
            evidence.append(measured.evidence({"num_prompts": len(requests)}))
            failures += failed
        reason = too_many_failures(evidence)
        if reason is not None:
            restarted = [name for name, arm in self.run.arms.items() if arm.num_restarts]
            restarts = "".join(f"; the {name} server was restarted meanwhile" for name in restarted)
            raise RunError(f"no verdict: {reason}, the first with {failures[0].error}{restarts}")

    def _prompt_row(
        self, session: Session, generation: Answered, request: RequestRecord
    ) -> LatencyPromptRow:
        """An arm's answer to a prompt, which was a row of a batch or a request."""
        arm = generation.arm
        prompt = self.prompt_set.at(request.index)
        occurrence = self.prompt_set.occurrence(request.index)
        gpu = generation.gpu
        throttled = gpu.throttled if gpu else ()
        divergence = self.run.arms[arm].divergences.get(request.index)
        return session.row(
            LatencyPromptRow,
            **_acceptance_of_prompt(request),
            prompt_index=request.index,
            prompt_place=occurrence.place,
            asked_before=occurrence.repeat,
            category=prompt.category,
            turn=prompt.turn,
            prompt=prompt.text,
            arm=arm,
            completion=text_of(request, session.tokenizer, skip_special_tokens=False),
            num_tokens=request.num_tokens,
            time_ms=1000 * generation.seconds_of(request),
            time_to_first_token_ms=request.time_to_first_token_ms,
            cached_tokens=request.num_cached,
            unit=generation.question and generation.question.unit,
            joules=gpu and gpu.joules,
            gpu_throttled=", ".join(throttled) or None,
            error=request.error and str(request.error),
            divergence_position=divergence and divergence.position,
            logit_margin=divergence and divergence.logit_margin,
            logit_tolerance=divergence and divergence.logit_tolerance,
        )


def _acceptance_of_prompt(request: RequestRecord) -> dict[str, Any]:
    """The columns about acceptance of the row of an answer."""
    columns = acceptance_columns([request])
    # One that reports nothing may have drafted nothing.
    is_reported = request.outcomes or request.num_drafted
    num_iterations = request.num_iterations if is_reported else None
    known = {name: columns[name] for name in columns.keys() & LatencyPromptRow.columns().keys()}
    return known | {"num_iterations": num_iterations}


def _settled(settings: LatencySettings, available: int) -> LatencySettings:
    """Settings with what `test=true` and the number of prompts of the set make of them."""
    if settings.test:
        fewer = min(max(_TEST_PROMPTS, settings.batch_size), settings.num_asked)
        shorter = min(_TEST_TOKENS, settings.decoding.max_new_tokens)
        decoding = dataclasses.replace(settings.decoding, max_new_tokens=shorter)
        return dataclasses.replace(settings, num_prompts=fewer, decoding=decoding)
    if settings.num_prompts != "auto":
        return settings
    if settings.precision is not None:
        return dataclasses.replace(settings, num_prompts=available)
    if engine_of(settings).columns(settings).get("draft_remembers"):
        # A prompt that is asked again finds its own answer in the server's pool.
        return dataclasses.replace(settings, num_prompts=min(settings.num_asked, available))
    return settings


EXPERIMENT = Latency
