"""`latency`: regular against speculative decoding on the same prompts, with the interval and the reason."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from harness.config.errors import RunError, SettingError
from harness.config.machine import gpu_names
from harness.config.settings import require
from harness.engines.divergence import first_divergence
from harness.engines.protocol import Arm, Engine, Question
from harness.engines.requests import RequestRecord
from harness.engines.roofline import Roof, roofs
from harness.engines.timing import Generation, generate
from harness.experiments.acceptance_files import write_acceptance
from harness.experiments.asking import Asking, asks_again
from harness.experiments.conversations import Conversations
from harness.experiments.energy import energy_columns, energy_ratio_columns
from harness.experiments.experts import ExpertsRead, experts_read
from harness.experiments.goodput import goodput_columns, goodput_ratio_columns
from harness.experiments.laps import Twin
from harness.experiments.measured_arm import MeasuredArm, prediction
from harness.experiments.paired import drift_columns, paired_times, reach_columns
from harness.experiments.profiling import profile_arms
from harness.experiments.progress import say
from harness.experiments.prompts import load_prompts
from harness.experiments.quietness import Quietness
from harness.experiments.rates import rate_columns
from harness.experiments.session import Session
from harness.experiments.suspicion import suspicion
from harness.menu.commands.latency import LatencySettings
from harness.menu.experiment import Experiment
from harness.menu.records import engine_of
from harness.report.latency import latency_document
from harness.report.table import Document, Table
from harness.results.acceptance import Acceptance
from harness.results.files import LATENCY_PROMPTS_FILE
from harness.results.schema import LatencyPromptRow, LatencyRow
from harness.results.speculation_profile import Measured, length_columns
from harness.results.work import Work, judged, too_many_failures

# `test=true`: enough to see that a pair works at all; of prompts at least one batch.
TEST_PROMPTS = 2
TEST_TOKENS = 16


class Latency(Experiment):
    """Both arms on the same prompts, in turns: batch by batch, or lap by lap where an engine queues.

    On a CPU stopwatches run in the timed runs. Where they would slow these, each arm runs once more under stopwatches
    after the timed runs of a batch, so that drift of the machine hits the times and their split alike.
    """

    def __init__(self, settings: LatencySettings) -> None:
        self.settings = settings
        self.overridden = ""
        if settings.test:
            self.settings, self.overridden = _shortened(settings)
        self.prompt_set = load_prompts(settings.prompts)
        available = len(self.prompt_set.prompts)
        self.prompts = self.prompt_set.take(min(self.settings.num_prompts, available))
        self._check_batch()
        self.measured = {name: MeasuredArm(name) for name in settings.arms}
        self.prompt_rows: list[LatencyPromptRow] = []
        self.suspicion: dict[str, Any] = {}
        self.identical: dict[str, float | None] = {}
        self.quietness: Quietness | None = None
        self.experts: ExpertsRead | None = None
        self.pass_ms: list[float | None] | None = None
        # The unit and the moment of each question; see `Asking`.
        self.units: list[int] = []
        self.moments: list[int] = []
        self.share_prompts = False
        # Whether a server's prefix cache distinguishes repetitions; None where there is none.
        self.salted: bool | None = None
        self.end_tokens: frozenset[int] = frozenset()
        self.roofs: list[Roof] = []
        self.profiles: list[Table] = []

    def measure(self, session: Session) -> None:
        settings = self.settings = session.settled(self.settings)
        token_ids = self._encode(session)
        conversations = Conversations(session, self.prompt_set)
        indices = [prompt.index for prompt in self.prompts]
        conversations.follow_ups(Question(token_ids, settings.decoding, settings.seed, indices))
        lengths = [len(ids) for ids in token_ids]
        longest = max(*lengths, conversations.longest)
        batch_size = settings.batch_size
        if not asks_again(settings, self.prompt_set):
            # No more than are measured, where some were skipped.
            batch_size = min(batch_size, len(token_ids))

        placed = session.place(settings.batch_size, longest)
        engine = session.open(batch_size, longest)
        if settings.weights == "stored":
            self.end_tokens = session.end_tokens()
        asking = Asking(session, settings, self.prompt_set, self.prompts, token_ids, conversations)
        self._plan(asking, engine)
        if settings.engine.aa:
            self._compare_identical(session, engine, asking)
        self._race(session, engine, asking)
        self._check_failures()
        self._suspect(engine)
        self._write_acceptance(session)

        example = asking.questions[0]
        self.experts = experts_read(engine, example)
        self.pass_ms = engine.pass_ms(example)
        if placed is not None:
            # On average half of the new tokens are there.
            context = statistics.fmean(lengths) + settings.decoding.max_new_tokens / 2
            self.roofs = roofs(placed, batch_size, round(context))
            if settings.profile:
                self.profiles = profile_arms(engine, example, session.directory)

    def _encode(self, session: Session) -> list[list[int]]:
        """Token ids of the prompts that are measured; says what else is not as it was asked for."""
        settings = self.settings
        self.prompts, token_ids = session.encode_set(
            self.prompt_set, self.prompts, settings.decoding.max_new_tokens
        )
        self._check_batch()
        if self.overridden:
            say(self.overridden)
        if asks_again(settings, self.prompt_set):
            again = f"the {len(self.prompts)} prompts of {self.prompt_set.name} are asked again"
            say(f"num_prompts={settings.num_prompts}: {again}, in another order each time")
        return token_ids

    def _plan(self, asking: Asking, engine: Engine) -> None:
        asking.plan(engine)
        self.units = asking.units
        self.moments = asking.moments
        self.share_prompts = asking.share_prompts
        self.salted = engine.salts

    def _write_acceptance(self, session: Session) -> None:
        """Write what other tools read of the acceptance, where it was told."""
        if "speculative" in self.measured:
            of_arm = [row for row in self.prompt_rows if row.arm == "speculative"]
            texts = [row.completion or "" for row in of_arm]
            rates = self.measured["speculative"].rates_by_rank
            write_acceptance(session, self.settings, self._by_prompt(), texts, rates)

    def _by_prompt(self) -> Measured:
        """The acceptance of each prompt that the speculative arm answered."""
        by_place: dict[int, Acceptance] = {}
        for request in self.measured["speculative"].answered:
            # Turns of a conversation are not independent, nor are repetitions of a prompt.
            place = self.prompt_set.asked(request.index).place
            so_far = by_place.get(place, Acceptance())
            by_place[place] = so_far + Acceptance.of(request.outcomes)
        return Measured(
            list(by_place.values()),
            [self.prompt_set.at(place).category for place in by_place],
            *self._resampling,
            self.settings.num_levels,
        )

    def rows(self, session: Session) -> list[LatencyRow]:
        """One row per arm, with None for anything that was not measured."""
        rows = []
        for measured in self.measured.values():
            figures = self._figures(measured)
            rows.append(session.row(LatencyRow, measured.acceptance, **figures))
        return judged(rows)

    def document(self, rows: Sequence[LatencyRow]) -> Document:
        """The report of this run, and its profiles."""
        if not self.prompt_rows:
            return []
        return [*latency_document(rows, self.prompt_rows), *self.profiles]

    def _race(self, session: Session, engine: Engine, asking: Asking) -> None:
        """Time both arms, and what they spend their time on."""
        on_gpus = engine_of(self.settings).computes_here and bool(gpu_names())
        quietness = self.quietness = Quietness(on_gpus, say)
        conversations = asking.conversations
        watched: list[Arm] = []
        for arm, phases in engine.watched():
            self.measured[arm.name].phases = phases
            watched.append(arm)
        # The arms of the timed runs, and those that run once more after them.
        arms: Sequence[Arm] = engine.arms
        again: Sequence[Arm] = watched
        if engine.watches_freely:
            arms = watched
            again = []

        def warmed(name: str) -> None:
            self.measured[name].phases.clear()

        def note(question: Question, generations: dict[str, Generation]) -> None:
            for arm in again:
                generate(engine, arm, conversations.for_arm(question, arm.name))
            if not engine.queues:
                self._keep(session, generations, list(generations))

        def ended(question: Question, generations: dict[str, Generation]) -> None:
            quietness.look()
            conversations.keep(generations)
            # A lap may take long: it must not be lost with the other arm's.
            if engine.queues:
                self._keep(session, generations, list(generations)[-1:])

        self._ask(session, asking, note, arms=arms, warmed=warmed, ended=ended)

    def _ask(
        self,
        session: Session,
        asking: Asking,
        note: Callable[[Question, dict[str, Generation]], None],
        **options: Any,
    ) -> None:
        """Give every arm every question; `options` are those of `Session.race`."""
        session.race(
            asking.questions,
            note,
            warmups=[asking.warmup] * self.settings.num_warmup,
            allow_failures=True,
            for_arm=asking.conversations.for_arm,
            **options,
        )

    def _suspect(self, engine: Engine) -> None:
        """Ask whether another engine's sampling looks right."""
        settings = self.settings
        sampled = settings.decoding.temperature > 0
        if engine_of(settings).own_loop or not sampled or len(engine.arms) == 1:
            return
        regular, speculative = self.measured.values()
        answers = regular.generations
        questions = [answer.question for answer in answers if answer.question is not None]
        self.suspicion = suspicion(engine, questions, answers, speculative.acceptance)

    def _compare_identical(self, session: Session, engine: Engine, asking: Asking) -> None:
        """Measure the regular arm against itself: how far apart are identical arms?"""
        twins = [Twin(name, engine.arms[0]) for name in ("aa_first", "aa_second")]
        answers: dict[str, list[Generation]] = {twin.name: [] for twin in twins}

        def note(question: Question, generations: dict[str, Generation]) -> None:
            for name, generation in generations.items():
                answers[name].append(generation)
            asking.conversations.keep(generations)

        self._ask(session, asking, note, arms=twins)
        first, second = answers.values()
        times = paired_times(first, second, self.units)
        self.identical = times.speedup(*self._resampling).columns("aa_ratio")

    @property
    def _resampling(self) -> tuple[int, int]:
        """Samples and seed of every bootstrap."""
        return self.settings.num_resamples, self.settings.seed

    def _check_batch(self) -> None:
        """Refuse a batch of more prompts than are asked, and repetitions whose answers a draft would know."""
        again = asks_again(self.settings, self.prompt_set)
        if again and getattr(self.settings.draft, "shared", False):
            rule = (
                f"must be at most {len(self.prompt_set.prompts)}, the prompts of the set, with"
                " draft.shared=true, which finds its own answer to a prompt that is asked again"
            )
            raise SettingError("num_prompts", rule, self.settings.num_prompts)
        size = self.settings.batch_size
        number = len(self.prompts)
        if again:
            number = self.settings.num_prompts
        rule = f"needs as many prompts: num_prompts={size}, where {number} are measured"
        require(size <= number, "batch_size", rule, size)

    def _keep(
        self,
        session: Session,
        generations: dict[str, Generation],
        new: Sequence[str],
    ) -> None:
        """Keep the answers of the arms that are `new`, and write those that are complete.

        Rows of the speculative arm say where its text parts from the regular one: they wait for it.
        """
        for name in new:
            self.measured[name].generations.append(generations[name])
        if "regular" not in generations:
            return
        if len(generations) > 1:
            self._compare_texts(session.engine, generations)
        number = self.units[len(self.measured["regular"].generations) - 1]
        complete = list(new) if "regular" not in new else list(generations)
        rows = []
        for name in self.measured:
            if name in complete:
                for request in generations[name].requests:
                    rows.append(self._prompt_row(session, name, generations[name], request, number))
        self.prompt_rows += rows
        session.append(LATENCY_PROMPTS_FILE, rows)

    def _check_failures(self) -> None:
        """Raise a RunError if too many requests failed for a verdict from the others."""
        arms = []
        failures: list[RequestRecord] = []
        for name, measured in self.measured.items():
            requests = measured.requests
            failed = [request for request in requests if not request.answered]
            if len(failed) == len(requests):
                number = f"all {len(failed)} requests failed"
                raise RunError(f"{name}: {number}, the first with {failed[0].error}")
            arms.append(Work(name, len(requests), len(failed), 0))
            failures += [request for request in failed if request.error is not None]
        reason = too_many_failures(arms)
        if reason is not None:
            raise RunError(f"no verdict: {reason}, the first with {failures[0].error}")

    def _compare_texts(self, engine: Engine | None, generations: dict[str, Generation]) -> None:
        """Greedy speculative output must be the regular one: note where the texts of a batch part.

        A turn before which the arms' answers differ already is not compared.
        """
        decoding = self.settings.decoding
        if decoding.temperature > 0 or decoding.synthetic_acceptance is not None:
            return
        assert engine is not None
        divergences = self.measured["speculative"].divergences
        regular, speculative = (generations[name] for name in self.measured)
        assert regular.question is not None
        assert speculative.question is not None
        prompts = zip(regular.question.prompts, speculative.question.prompts, strict=True)
        requests = zip(regular.requests, speculative.requests, strict=True)
        for (prompt, other_prompt), (request, other) in zip(prompts, requests, strict=True):
            if request.answered and other.answered and prompt == other_prompt:
                divergences[request.index] = first_divergence(
                    engine.reference, prompt, request.token_ids, other.token_ids
                )

    def _prompt_row(
        self,
        session: Session,
        arm: str,
        generation: Generation,
        request: RequestRecord,
        unit: int,
    ) -> LatencyPromptRow:
        """An arm's answer to a prompt, which was a row of a batch or a request."""
        prompt = self.prompt_set.at(request.index)
        asked = self.prompt_set.asked(request.index)
        # A row of a batch takes as long as its batch.
        seconds = request.seconds if generation.sent else generation.seconds
        figures: dict[str, Any] = {}
        if generation.gpu is not None:
            figures["joules"] = generation.gpu.joules
            figures["gpu_throttled"] = ", ".join(generation.gpu.throttled) or None
        if request.error is not None:
            figures["error"] = str(request.error)
        parted = self.measured[arm].divergences.get(request.index)
        if parted is not None:
            figures["divergence_position"] = parted.position
            figures["logit_margin"] = parted.logit_margin
        return session.row(
            LatencyPromptRow,
            Acceptance.of(request.outcomes),
            num_iterations=len(request.outcomes) or None,
            prompt_index=request.index,
            prompt_place=asked.place,
            asked_before=asked.repeat,
            category=prompt.category,
            turn=prompt.turn,
            prompt=prompt.text,
            arm=arm,
            completion=session.tokenizer.decode(request.token_ids, skip_special_tokens=False),
            num_tokens=request.num_tokens,
            time_ms=1000 * seconds,
            time_to_first_token_ms=request.time_to_first_token_ms,
            cached_tokens=request.num_cached,
            unit=unit,
            **figures,
        )

    def _figures(self, measured: MeasuredArm) -> dict[str, Any]:
        """The columns of an arm."""
        figures: dict[str, Any] = {
            "arm": measured.name,
            "seed": self.settings.seed_of_run,
            "prompts_digest": self.prompt_set.digest,
        }
        if self.quietness is not None:
            figures |= self.quietness.columns()
        figures |= measured.columns(self.end_tokens)
        figures |= energy_columns(measured.generations, self.units)
        figures |= rate_columns(measured.generations, self.units, *self._resampling)
        slo = self._slo
        if slo:
            figures |= goodput_columns(measured.generations, slo)
        if self.roofs:
            target = self.roofs[0]
            figures["step_bytes"] = target.step_bytes
            figures["floor_ms"] = target.floor_ms
            figures["copy_bandwidth_bytes_per_s"] = target.bandwidth
        if measured.name == "speculative":
            figures |= self._against_regular(measured)
        if asks_again(self.settings, self.prompt_set):
            figures |= self._repetition_columns(measured)
        return figures

    def _repetition_columns(self, measured: MeasuredArm) -> dict[str, Any]:
        """The columns about prompts that were asked again."""
        prompts = set()
        for request in measured.requests:
            asked = self.prompt_set.asked(request.index)
            prompts.add((asked.place, asked.turn))
        return {"num_different_prompts": len(prompts), "salted": self.salted}

    @property
    def _slo(self) -> Mapping[str, float] | None:
        """The times that were asked for, of an engine that takes requests."""
        return getattr(self.settings.engine, "slo", None)

    def _decode_columns(self, speculative: MeasuredArm) -> dict[str, Any]:
        """The speed-up without the time until the first tokens."""
        regular = self.measured["regular"].generations
        paired = paired_times(regular, speculative.generations, self.units, decode_only=True)
        return paired.speedup(*self._resampling).columns("decode_speedup")

    def _against_regular(self, speculative: MeasuredArm) -> dict[str, Any]:
        """Columns of the speculative arm alone."""
        regular = self.measured["regular"]
        arms = regular.generations, speculative.generations
        paired = paired_times(*arms, self.units)
        in_time = paired_times(*arms, self.moments)
        # With equal token counts this is the ratio of total times.
        speedup = paired.speedup(*self._resampling)
        columns: dict[str, Any] = {
            **self.suspicion,
            **self.identical,
            **reach_columns(paired),
            **drift_columns(in_time),
            **speedup.columns("speedup"),
            **self._decode_columns(speculative),
            # Units with the same prompts do not allow for other texts.
            "speedup_covers": f"{speedup.covers}{' of the same texts' * self.share_prompts}",
            "interleaved": len(set(self.moments)) > 1,
            "predicted_speedup": prediction(regular, speculative),
            "pass_ms_by_width": self.pass_ms,
            **length_columns(self._by_prompt()),
        }
        columns |= energy_ratio_columns(*arms, self.units, *self._resampling)
        slo = self._slo
        if slo:
            columns |= goodput_ratio_columns(*arms, self.units, slo, *self._resampling)
        if self.experts is not None:
            columns["num_experts"] = self.experts.num_experts
            columns["experts_per_step"] = self.experts.step
            columns["experts_per_verification"] = self.experts.verification
        if len(self.roofs) > 1:
            draft = self.roofs[1]
            columns["draft_step_bytes"] = draft.step_bytes
            columns["draft_floor_ms"] = draft.floor_ms
        settings = self.settings
        if settings.engine.name == "local":
            decoding = settings.decoding
            chosen = decoding.num_draft_tokens == "auto" and decoding.temperature > 0
            columns["reproducible"] = not chosen
        return columns


def _shortened(settings: LatencySettings) -> tuple[LatencySettings, str]:
    """Settings of a short trial, and a message about those that it changes."""
    prompts = settings.num_prompts
    tokens = settings.decoding.max_new_tokens
    fewer = min(max(TEST_PROMPTS, settings.batch_size), prompts)
    shorter = min(TEST_TOKENS, tokens)
    changes = []
    if fewer != prompts:
        changes.append(f"num_prompts={fewer} in place of {prompts}")
    if shorter != tokens:
        changes.append(f"decoding.max_new_tokens={shorter} in place of {tokens}")
    decoding = dataclasses.replace(settings.decoding, max_new_tokens=shorter)
    shortened = dataclasses.replace(settings, num_prompts=fewer, decoding=decoding)
    return shortened, f"test=true: {' and '.join(changes)}" if changes else ""


EXPERIMENT = Latency
