"""`recovery`: is this pair, with these settings, on this machine, lossless?"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from harness.config.errors import RunError, VerdictError
from harness.config.settings import DecodingSettings, NumDraftTokens
from harness.engines.divergence import Divergence, first_divergence
from harness.engines.protocol import Arm, Question, Reference
from harness.engines.requests import RequestRecord
from harness.engines.timing import Generation, generate, quick_collections
from harness.experiments.contexts import CONTEXT_TOKENS, Context, choose_contexts, last_contexts
from harness.experiments.encoding import Encoded
from harness.experiments.load import LoadTest
from harness.experiments.lossless import (
    MIN_EXPECTED,
    REQUIRED_POWER,
    SampledCheck,
    SampledTest,
    check_told,
    greedy_columns,
    sampled_columns,
    together,
)
from harness.experiments.outcomes import Outcomes, exact_outcomes
from harness.experiments.progress import progress, say
from harness.experiments.prompts import load_prompts
from harness.experiments.session import Session, in_batches
from harness.experiments.workload import FOLLOW_UP
from harness.menu.commands.recovery import EXIT_CODES, RecoverySettings
from harness.menu.experiment import Experiment
from harness.menu.records import engine_of
from harness.report.recovery import recovery_document, summarise
from harness.results.schema import RecoveryRow

# By how much more draws than there were: each has further continuations to look up.
_FACTORS = (2, 4, 8, 16, 32, 64)
# Draws of `num_draws=auto` over all tests, where so few are enough.
_FEWEST_DRAWS = 60_000


class _NumberTest(NamedTuple):
    """The test of draws with one number of draft tokens."""

    num_draft_tokens: NumDraftTokens
    test: SampledTest


class _DrawPlan(NamedTuple):
    """The draws: the number of continuations after each context, for each test."""

    decoding: DecodingSettings
    contexts: Sequence[Context]
    tests: Sequence[_NumberTest]
    num_draws: int

    @property
    def streams(self) -> Sequence[Sequence[int]]:
        """The streams of random numbers: every draw has its own."""
        num_parts = len(self.contexts) * len(self.tests)
        return in_batches(range(self.num_draws * num_parts), self.num_draws)


class Recovery(Experiment):
    """A greedy comparison, then draws compared with the target's exact distribution."""

    document = staticmethod(recovery_document)

    def __init__(self, settings: RecoverySettings) -> None:
        self.settings = settings
        self.prompt_set = load_prompts(settings.prompts)
        self.prompts = self.prompt_set.take(settings.num_prompts)
        self.checks: list[dict[str, Any]] = []

    def measure(self, session: Session) -> None:
        if self.settings.load is not None:
            self._measure_under_load(session)
        else:
            self._measure_one_by_one(session)

    def _measure_under_load(self, session: Session) -> None:
        # A second turn reads a first answer, and has another.
        new_tokens = 2 * self.settings.decoding.max_new_tokens + FOLLOW_UP + 1
        encoded = session.encode_set(self.prompt_set, self.prompts, new_tokens)
        self.prompts = encoded.prompts
        test = LoadTest(session, self.settings, encoded.token_ids)
        self.checks = test.checks
        test.run()

    def _measure_one_by_one(self, session: Session) -> None:
        settings = self.settings
        decoding = self.settings.decoding
        num_counted = num_counted_tokens(decoding.num_draft_tokens)
        new_tokens = max(decoding.max_new_tokens, num_counted)
        encoded = session.encode_set(self.prompt_set, self.prompts, new_tokens)
        self.prompts = encoded.prompts
        # Rows, prompt and new tokens: of the greedy texts, and of the sampled ones.
        greedy = (
            min(settings.batch_size, len(self.prompts)),
            encoded.longest,
            decoding.max_new_tokens,
        )
        shapes = [greedy, (settings.batch_size, CONTEXT_TOKENS, num_counted)][
            : 2 if decoding.temperature > 0 else 1
        ]
        session.place(*max(shapes, key=lambda shape: shape[0] * sum(shape[1:])))

        if settings.draft is None:
            session.open(*greedy[:2])
        else:
            self._compare_greedy_texts(session, encoded, *greedy[:2])
        if decoding.temperature > 0:
            self._compare_draws(session, encoded.token_ids)

    def rows(self, session: Session) -> list[RecoveryRow]:
        """One row per check, or one without a check."""
        common: dict[str, Any] = {
            "arm": self.settings.arms[-1],
            "prompts_digest": self.prompt_set.digest,
        }
        if self.settings.load is not None:
            common["batch_size"] = self.settings.load
        return [session.row(RecoveryRow, **common, **check) for check in self.checks or [{}]]

    def judge(self, rows: Sequence[RecoveryRow]) -> None:
        """Raises VerdictError if the pair is lossy (exit code 1), or if nothing can be told (3)."""
        summary = summarise(rows)
        if summary.verdict != "lossless":
            raise VerdictError(summary.in_short, EXIT_CODES[summary.verdict])

    def _compare_greedy_texts(
        self, session: Session, encoded: Encoded, num_rows: int, longest: int
    ) -> None:
        """The speculative arm against the regular arm at temperature 0, on every prompt, in ragged batches."""
        arms = self.settings.arms
        decoding = dataclasses.replace(self.settings.decoding, temperature=0.0, ignore_eos=True)
        engine = session.open(num_rows, longest, decoding, fault=self.settings.fault)
        divergences: list[Divergence | None] = []

        def note(question: Question, generations: dict[str, Generation]) -> None:
            if engine.tells_tokens:
                check_told([each for name in arms for each in generations[name].requests])
            answers = [generations[name].requests for name in arms]
            for prompt, *pair in zip(question.prompts, *answers, strict=True):
                divergences.append(self._divergence(session, prompt, *pair))

        questions = []
        for places in in_batches(range(len(encoded.prompts)), self.settings.batch_size):
            part = encoded.part(places)
            questions.append(session.ask(part.token_ids, places, decoding, chats=part.chats))
        session.race(questions, note)
        # No text ends before its last token.
        num_tokens = len(encoded.prompts) * decoding.max_new_tokens
        self.checks.append(greedy_columns(divergences, num_tokens))

    def _divergence(
        self,
        session: Session,
        prompt: Sequence[int],
        regular: RequestRecord,
        speculative: RequestRecord,
    ) -> Divergence | None:
        """Where greedy texts of both arms part; of one without token ids, where it leaves the reference's."""
        texts = regular.token_ids, speculative.token_ids
        if texts[0] == texts[1]:
            return None
        if not speculative.from_text:
            return first_divergence(session.reference(), prompt, *texts)
        if session.text_reference() is None:
            return first_divergence(None, prompt, *texts)
        most = self.settings.decoding.max_new_tokens
        return session.text_divergence(prompt, speculative.text, most)

    def _compare_draws(self, session: Session, token_ids: Sequence[Sequence[int]]) -> None:
        """Test after a few contexts with each number of draft tokens, and finally all contexts together.

        With one draft token, acceptance, rejection, bonus and what follows a roll-back all fall on the second and third
        token already. With the run's own number the whole first proposal and its bonus token are generated. Both are
        counted as deep as the draws reach.
        """
        plan = self._plan_draws(session, token_ids)
        batches_each = len(in_batches(range(plan.num_draws), self.settings.batch_size))
        num_batches = batches_each * len(plan.contexts) * len(plan.tests)
        has_reference = session.reference() is not None
        if not has_reference:
            # Both arms draw.
            num_batches *= 2
        checks = []
        with progress("drawing", num_batches) as advance, quick_collections():
            exact = self._exact_outcomes(session, plan)
            for place in range(len(plan.tests)):
                checks.append(self._draw_and_check(session, plan, place, exact, advance))
        for test, found in zip(plan.tests, checks, strict=True):
            check = together(found)
            needed = None
            reference = session.reference()
            if check.verdict == "undecided" and reference is not None:
                say("working out how many draws would be enough")
                enough = draws_needed(
                    reference, plan.contexts, plan.decoding, test.test, plan.num_draws
                )
                needed = enough and enough * len(plan.contexts) * len(plan.tests)
            self._add_sampled(test.num_draft_tokens, check, num_draws_needed=needed)

    def _plan_draws(self, session: Session, token_ids: Sequence[Sequence[int]]) -> _DrawPlan:
        settings = self.settings
        decoding = dataclasses.replace(settings.decoding, ignore_eos=True)
        reference = session.reference()
        # Without a draft the number says no more than how many tokens are counted.
        own_number = decoding.num_draft_tokens
        # A server's own number cannot be changed.
        fixed = settings.draft is None or not engine_of(settings).computes_here
        numbers = [own_number] if fixed else list(dict.fromkeys((1, own_number)))
        contexts = (
            last_contexts(token_ids)
            if reference is None
            else choose_contexts(reference, token_ids, decoding)
        )
        # The tests of all contexts together count as well.
        level = settings.false_alarm_rate / ((len(contexts) + 1) * len(numbers))
        tests = [
            _NumberTest(number, SampledTest(num_counted_tokens(number), level, settings.shift))
            for number in numbers
        ]
        sampled = [test.test for test in tests]
        num_draws = self._num_draws_each(reference, contexts, decoding, sampled)
        return _DrawPlan(decoding, contexts, tests, num_draws)

    def _exact_outcomes(self, session: Session, plan: _DrawPlan) -> list[Outcomes | None]:
        """The exact distribution after each context; None where there is no reference."""
        reference = session.reference()
        if reference is None:
            return [None] * len(plan.contexts)
        num_counted = num_counted_tokens(plan.decoding.num_draft_tokens)
        rare = MIN_EXPECTED / plan.num_draws
        return [
            exact_outcomes(reference, context.token_ids, plan.decoding, num_counted, rare)
            for context in plan.contexts
        ]

    def _draw_and_check(
        self,
        session: Session,
        plan: _DrawPlan,
        place: int,
        exact: Sequence[Outcomes | None],
        advance: Callable[[str | None], None],
    ) -> list[SampledCheck]:
        """Open an engine for one number of draft tokens, and test its draws after each context."""
        number, test = plan.tests[place]
        asked = dataclasses.replace(
            plan.decoding, num_draft_tokens=number, max_new_tokens=test.num_tokens
        )
        size = self.settings.batch_size
        engine = session.open(size, CONTEXT_TOKENS, asked, fault=self.settings.fault)

        def draw(arm: Arm, context: Context, streams: Sequence[int]) -> Iterator[Generation]:
            for batch in in_batches(streams, size):
                question = session.ask([context.token_ids] * len(batch), batch, asked)
                generation = generate(engine, arm, question)
                # The tokens of a text are not those that were drawn, nor as many.
                if engine.tells_tokens:
                    check_told(generation.requests)
                    check_lengths(generation, asked.max_new_tokens)
                yield generation
                advance(None)

        checks = []
        streams = plan.streams[place :: len(plan.tests)]
        for context, outcomes, drawn in zip(plan.contexts, exact, streams, strict=True):
            draws = draw(engine.arms[-1], context, drawn)
            if outcomes is None:
                check = test.compare(list(draw(engine.arms[0], context, drawn)), list(draws))
            else:
                check = test.check(draws, outcomes)
            checks.append(check)
            prompt_index = self.prompts[context.prompt_index].index
            self._add_sampled(number, check, prompt_index=prompt_index, context_end=context.end)
        return checks

    def _num_draws_each(
        self,
        reference: Reference | None,
        contexts: Sequence[Context],
        decoding: DecodingSettings,
        tests: Sequence[SampledTest],
    ) -> int:
        """Draws after each context for each test. Known before the first one, as is the bar's end."""
        asked = self.settings.num_draws
        parts = len(contexts) * len(tests)
        if asked != "auto":
            return asked // parts
        fewest = _FEWEST_DRAWS // parts
        if reference is None:
            return fewest
        say("working out how many draws are enough")
        # Where no number is enough, more draws would change nothing.
        found = [
            draws_needed(reference, contexts, decoding, test, fewest, (1, *_FACTORS))
            for test in tests
        ]
        return max(number or fewest for number in found)

    def _add_sampled(
        self, num_draft_tokens: NumDraftTokens, check: SampledCheck, **context: int | None
    ) -> None:
        figures = sampled_columns(check)
        if self.settings.draft is not None and engine_of(self.settings).computes_here:
            figures["num_draft_tokens"] = num_draft_tokens
        self.checks.append(figures | context)


EXPERIMENT = Recovery


def draws_needed(
    reference: Reference,
    contexts: Sequence[Context],
    decoding: DecodingSettings,
    test: SampledTest,
    num_draws: int,
    factors: Sequence[int] = _FACTORS,
) -> int | None:
    """How many draws after each context would be enough for a verdict.

    From the power that they would have. None where even the most that are looked at would not do.

    Args:
        num_draws: that were not enough, or with 1 among the `factors` may be.
    """
    for draws in (num_draws * factor for factor in factors):
        rare = MIN_EXPECTED / draws
        known = [
            exact_outcomes(reference, one.token_ids, decoding, test.num_tokens, rare)
            for one in contexts
        ]

        def decides(number: int, known: Sequence[Outcomes] = known) -> bool:
            return (
                together([test.expected(outcomes, number) for outcomes in known]).power
                >= REQUIRED_POWER
            )

        if decides(draws):
            if draws == num_draws:
                return draws
            # Twentieths of the last step are exact enough.
            candidates = (round(draws * (0.5 + step / 40)) for step in range(1, 21))
            return next(number for number in candidates if number >= draws or decides(number))
    return None


def check_lengths(generation: Generation, num_tokens: int) -> None:
    """Raises RunError where an answer ended early: its missing tokens would look like a loss."""
    shortest = min(map(len, generation.tokens))
    if shortest < num_tokens:
        reason = "draws of different lengths cannot be compared: the engine must know ignore_eos"
        ended = f"an answer ended after {shortest} of {num_tokens} tokens"
        raise RunError(f"{generation.arm}: {ended}, and {reason}")


def num_counted_tokens(num_draft_tokens: NumDraftTokens) -> int:
    """The first token, which is the target's own, then a whole proposal, then its bonus token.

    Of `auto` a proposal of four: longer ones would spread the draws over more outcomes than they can test.
    """
    return (4 if num_draft_tokens == "auto" else num_draft_tokens) + 2
