"""`recovery`: is this pair, with these settings, on this machine, lossless?

First the greedy texts of both arms are compared. Then, above temperature 0, the speculative arm
continues a few contexts, beginnings that are cut from the prompts (`contexts`), many times each: its
draws. A test looks at the draws at one K, 1 or the run's own. A check is its result after one
context, or after all of them together (`lossless`), and becomes a row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from harness.config.errors import RunError, VerdictError
from harness.config.settings import DecodingSettings, NumDraftTokens
from harness.engines.batches import in_batches
from harness.engines.divergence import Divergence, first_divergence
from harness.engines.protocol import Arm, Question, Reference
from harness.engines.requests import RequestRecord
from harness.engines.timing import Generation, generate, quick_collections
from harness.experiments.contexts import CONTEXT_TOKENS, Context, choose_contexts, last_contexts
from harness.experiments.encoding import Encoded
from harness.experiments.interleaving import Answers, ask_all
from harness.experiments.load import LoadTest
from harness.experiments.lossless import (
    MIN_EXPECTED,
    REQUIRED_POWER,
    SampledCheck,
    SampledTest,
    greedy_columns,
    require_token_ids,
    sampled_columns,
    together,
)
from harness.experiments.outcomes import Outcomes, exact_outcomes
from harness.experiments.progress import progress, say
from harness.experiments.prompts import load_prompts
from harness.experiments.references import References
from harness.experiments.session import Session
from harness.experiments.workload import FOLLOW_UP
from harness.menu.commands.recovery import EXIT_CODES, RecoverySettings
from harness.menu.experiment import Experiment
from harness.menu.records import engine_of
from harness.report.recovery import recovery_document, summarise
from harness.results.rows.recovery import RecoveryRow

# Multiples of the number of draws that are tried. Each costs another computation of the exact
# outcomes, because with more draws rarer continuations count.
_FACTORS = (2, 4, 8, 16, 32, 64)
# Draws of `num_draws=auto` over all tests, where so few are enough.
_FEWEST_DRAWS = 60_000


class _TestOfK(NamedTuple):
    """The test of the draws at one K: 1, or the run's own."""

    num_draft_tokens: NumDraftTokens
    test: SampledTest


class _DrawPlan(NamedTuple):
    """The draws that `recovery` takes.

    Attributes:
        num_draws: after each context, for each test.
    """

    decoding: DecodingSettings
    contexts: Sequence[Context]
    tests: Sequence[_TestOfK]
    num_draws: int

    def streams_of(self, place: int) -> list[range]:
        """The streams of random numbers of a test's draws: one range for each context.

        With 2 contexts, 2 tests and 3 draws, test 0 has 0-2 and 6-8, and test 1 has 3-5 and 9-11.
        """
        streams: list[range] = []
        for context_place in range(len(self.contexts)):
            first = (context_place * len(self.tests) + place) * self.num_draws
            streams.append(range(first, first + self.num_draws))
        return streams


class _Need(NamedTuple):
    """What an engine must have room for; the names are those of `Session.place`."""

    num_rows: int
    prompt_length: int
    new_tokens: int

    @property
    def num_slots(self) -> int:
        return self.num_rows * (self.prompt_length + self.new_tokens)


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
        # Shared, so that an interrupted test keeps the rows of its finished checks.
        self.checks = test.checks
        test.run()

    def _measure_one_by_one(self, session: Session) -> None:
        settings = self.settings
        decoding = self.settings.decoding
        num_counted = num_counted_tokens(decoding.num_draft_tokens)
        new_tokens = max(decoding.max_new_tokens, num_counted)
        encoded = session.encode_set(self.prompt_set, self.prompts, new_tokens)
        self.prompts = encoded.prompts
        greedy = _Need(
            min(settings.batch_size, len(encoded.prompts)),
            encoded.longest,
            decoding.max_new_tokens,
        )
        needs = [greedy]
        if decoding.temperature > 0:
            needs.append(_Need(settings.batch_size, CONTEXT_TOKENS, num_counted))
        references = References(session)
        session.place(*max(needs, key=lambda need: need.num_slots))

        if settings.draft is None:
            session.open(greedy.num_rows, greedy.prompt_length)
        else:
            self._compare_greedy_texts(session, references, encoded, greedy)
        if decoding.temperature > 0:
            self._compare_draws(session, references, encoded.token_ids)

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
        self, session: Session, references: References, encoded: Encoded, need: _Need
    ) -> None:
        """The speculative arm against the regular arm at temperature 0, on every prompt, in ragged batches."""
        arms = self.settings.arms
        decoding = dataclasses.replace(self.settings.decoding, temperature=0.0, ignore_eos=True)
        engine = session.open(
            need.num_rows, need.prompt_length, decoding, fault=self.settings.fault
        )
        divergences: list[Divergence | None] = []

        def after_question(question: Question, generations: Answers) -> None:
            if engine.reports_token_ids:
                require_token_ids([each for name in arms for each in generations[name].requests])
            answers = [generations[name].requests for name in arms]
            for prompt, *pair in zip(question.prompts, *answers, strict=True):
                divergences.append(self._divergence(references, prompt, *pair))

        questions = []
        for places in in_batches(range(len(encoded.prompts)), self.settings.batch_size):
            part = encoded.part(places)
            questions.append(session.ask(part.token_ids, places, decoding, chats=part.chats))
        ask_all(session, questions, after_question)
        # No text ends before its last token.
        num_tokens = len(encoded.prompts) * decoding.max_new_tokens
        self.checks.append(greedy_columns(divergences, num_tokens))

    def _divergence(
        self,
        references: References,
        prompt: Sequence[int],
        regular: RequestRecord,
        speculative: RequestRecord,
    ) -> Divergence | None:
        """Where greedy texts of both arms part; of one without token ids, where it leaves the reference's."""
        if regular.token_ids == speculative.token_ids:
            return None
        if not speculative.from_text:
            # The ids are those that were decided, so the reference can tell the margin between them.
            return first_divergence(
                references.for_tokens(), prompt, regular.token_ids, speculative.token_ids
            )
        if references.for_texts() is None:
            # Ids of a text, which may have been decided as others: the position alone is known.
            return first_divergence(None, prompt, regular.token_ids, speculative.token_ids)
        most = self.settings.decoding.max_new_tokens
        return references.text_divergence(prompt, speculative.text, most)

    def _compare_draws(
        self, session: Session, references: References, token_ids: Sequence[Sequence[int]]
    ) -> None:
        """Test after a few contexts with each number of draft tokens, and finally all contexts together.

        With one draft token, acceptance, rejection, bonus and what follows a roll-back all fall on the second and third
        token already. With the run's own number the whole first proposal and its bonus token are generated. Each test
        counts as many tokens as it draws.
        """
        plan = self._plan_draws(references.for_tokens(), token_ids)
        batches_each = len(in_batches(range(plan.num_draws), self.settings.batch_size))
        num_batches = batches_each * len(plan.contexts) * len(plan.tests)
        num_drawn = plan.num_draws * len(plan.contexts) * len(plan.tests)
        say(f"drawing {num_drawn:,} continuations in {num_batches:,} batches")
        if references.for_tokens() is None:
            say("without the exact distribution: answers are compared with each other")
            # Both arms draw.
            num_batches *= 2
        checks = []
        with progress("drawing", num_batches) as advance, quick_collections():
            exact = self._exact_outcomes(references.for_tokens(), plan)
            for place in range(len(plan.tests)):
                checks.append(self._draw_and_check(session, plan, place, exact, advance))
        for test, of_contexts in zip(plan.tests, checks, strict=True):
            check = together(of_contexts)
            num_needed = None
            if check.verdict == "undecided":
                num_needed = self._total_draws_needed(references.for_tokens(), plan, test.test)
            self._add_sampled(test.num_draft_tokens, check, num_draws_needed=num_needed)

    def _total_draws_needed(
        self, reference: Reference | None, plan: _DrawPlan, test: SampledTest
    ) -> int | None:
        """The setting `num_draws` that would be enough for a test; None if that is not known."""
        if reference is None:
            return None
        say("working out how many draws would be enough")
        each = draws_needed(reference, plan.contexts, plan.decoding, test, plan.num_draws)
        return None if each is None else each * len(plan.contexts) * len(plan.tests)

    def _plan_draws(
        self, reference: Reference | None, token_ids: Sequence[Sequence[int]]
    ) -> _DrawPlan:
        settings = self.settings
        decoding = dataclasses.replace(settings.decoding, ignore_eos=True)
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
            _TestOfK(number, SampledTest(num_counted_tokens(number), level, settings.shift))
            for number in numbers
        ]
        sampled = [test.test for test in tests]
        num_draws = self._num_draws_each(reference, contexts, decoding, sampled)
        return _DrawPlan(decoding, contexts, tests, num_draws)

    def _exact_outcomes(
        self, reference: Reference | None, plan: _DrawPlan
    ) -> list[Outcomes | None]:
        """The exact distribution after each context; None where there is no reference."""
        if reference is None:
            return [None] * len(plan.contexts)
        # For the longest test; `SampledTest.check` cuts them to the tokens that it counts.
        num_tokens = num_counted_tokens(plan.decoding.num_draft_tokens)
        outcomes = outcomes_after(
            reference, plan.contexts, plan.decoding, num_tokens, plan.num_draws
        )
        return list(outcomes)

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
                if engine.reports_token_ids:
                    require_token_ids(generation.requests)
                    require_lengths(generation, asked.max_new_tokens)
                yield generation
                advance(None)

        checks = []
        per_context = zip(plan.contexts, exact, plan.streams_of(place), strict=True)
        for context, outcomes, streams in per_context:
            draws = draw(engine.arms[-1], context, streams)
            if outcomes is None:
                check = test.compare(list(draw(engine.arms[0], context, streams)), list(draws))
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
        """Draws after each context for each test, computed before drawing, so that the bar has an end."""
        asked = self.settings.num_draws
        parts = len(contexts) * len(tests)
        if asked != "auto":
            return asked // parts
        fewest = _FEWEST_DRAWS // parts
        if reference is None:
            return fewest
        say("working out how many draws are enough")
        numbers: list[int] = []
        for test in tests:
            outcomes = outcomes_after(reference, contexts, decoding, test.num_tokens, fewest)
            if has_power(test, outcomes, fewest):
                numbers.append(fewest)
            else:
                # If even 64 times as many are not enough, draw the fewest: the verdict stays open.
                needed = draws_needed(reference, contexts, decoding, test, fewest)
                numbers.append(needed or fewest)
        return max(numbers)

    def _add_sampled(
        self, num_draft_tokens: NumDraftTokens, check: SampledCheck, **context: int | None
    ) -> None:
        figures = sampled_columns(check)
        if self.settings.draft is not None and engine_of(self.settings).computes_here:
            figures["num_draft_tokens"] = num_draft_tokens
        self.checks.append(figures | context)


EXPERIMENT = Recovery


def outcomes_after(
    reference: Reference,
    contexts: Sequence[Context],
    decoding: DecodingSettings,
    num_tokens: int,
    num_draws: int,
) -> list[Outcomes]:
    """The exact distribution after each context, as finely as so many draws can test it."""
    rare = MIN_EXPECTED / num_draws
    return [
        exact_outcomes(reference, context.token_ids, decoding, num_tokens, rare)
        for context in contexts
    ]


def has_power(test: SampledTest, outcomes: Sequence[Outcomes], num_draws: int) -> bool:
    """Whether so many draws after each context are enough for a verdict.

    Args:
        outcomes: after each context.
    """
    expected = together([test.expected(each, num_draws) for each in outcomes])
    return expected.power >= REQUIRED_POWER


def draws_needed(
    reference: Reference,
    contexts: Sequence[Context],
    decoding: DecodingSettings,
    test: SampledTest,
    num_draws: int,
) -> int | None:
    """How many draws after each context are enough for a verdict, if `num_draws` are not.

    With num_draws=1000 it tries 2000, 4000, ..., 64000. If 4000 are enough and 2000 are not, it
    returns the smallest of 2100, 2200, ..., 4000 that is. None if 64000 are not enough.
    """
    for factor in _FACTORS:
        most = factor * num_draws
        outcomes = outcomes_after(reference, contexts, decoding, test.num_tokens, most)
        if has_power(test, outcomes, most):
            # Twentieths of the last step.
            fewer = [round(most * (0.5 + step / 40)) for step in range(1, 20)]
            return next((number for number in fewer if has_power(test, outcomes, number)), most)
    return None


def require_lengths(generation: Generation, num_tokens: int) -> None:
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
