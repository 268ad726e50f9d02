"""`recovery`: is this pair, with these settings, on this machine, lossless?

First the greedy texts of both arms are compared. Then, above temperature 0, the speculative arm
continues a few contexts, beginnings that are cut from the prompts, many times each: its draws. A
test looks at the draws at one K, 1 or the run's own (`draw_plan`). A check is its result after one
context, or after all of them together (`lossless`), and becomes a row.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from harness.commands.recovery.draw_plan import (
    CONTEXT_TOKENS,
    DrawPlan,
    PlannedTest,
    draws_needed,
    num_counted_tokens,
    plan_draws,
)
from harness.commands.recovery.load import checks_under_load
from harness.commands.recovery.lossless import (
    GreedyTexts,
    SampledCheck,
    require_token_ids,
    together,
)
from harness.commands.recovery.prefix_distribution import PrefixDistribution
from harness.commands.recovery.record import EXIT_CODES, RecoverySettings
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import recovery_answer, recovery_details, summarise
from harness.commands.recovery.workload import FOLLOW_UP
from harness.config.errors import RunError, VerdictError
from harness.engines.protocol import Arm, Engine, Question, in_batches
from harness.engines.registry import engine_of
from harness.engines.timing import Generation, generate, quick_garbage_collections
from harness.measuring.encoding import Encoded
from harness.measuring.interleaving import ask_all
from harness.measuring.progress import progress, say
from harness.measuring.references import References
from harness.measuring.session import Session
from harness.prompts.sets import load_prompts
from harness.records.command import Experiment


class Recovery(Experiment):
    """A greedy comparison, then draws compared with the target's exact distribution."""

    document = staticmethod(recovery_answer)
    details = staticmethod(recovery_details)

    def __init__(self, settings: RecoverySettings) -> None:
        self.settings = settings
        self.prompt_set = load_prompts(settings.prompts)
        self.prompts = self.prompt_set.take(settings.num_prompts)
        self.checks: list[dict[str, Any]] = []

    def measure(self, session: Session) -> None:
        settings = self.settings
        decoding = settings.decoding
        num_counted = num_counted_tokens(decoding.num_draft_tokens)
        new_tokens = max(decoding.max_new_tokens, num_counted)
        if settings.load is not None:
            # A second turn reads a first answer, and has another.
            new_tokens = 2 * decoding.max_new_tokens + FOLLOW_UP + 1
        encoded = session.encode_set(self.prompt_set, self.prompts, new_tokens)
        self.prompts = encoded.prompts
        if settings.load is not None:
            for check in checks_under_load(session, settings, encoded.token_ids):
                self.checks.append(check)
            return

        # Rows, tokens of a prompt and new tokens: of the greedy texts, and of the draws.
        num_rows = min(settings.batch_size, len(encoded.prompts))
        needs = [(num_rows, encoded.longest, decoding.max_new_tokens)]
        if decoding.temperature > 0:
            needs.append((settings.batch_size, CONTEXT_TOKENS, num_counted))
        references = References(session)
        session.place(*max(needs, key=lambda need: need[0] * (need[1] + need[2])))
        if settings.draft is None:
            # No texts to compare, but `references` asks the open engine.
            session.open(num_rows, encoded.longest)
        else:
            self._compare_greedy_texts(session, references, encoded)
        if decoding.temperature > 0:
            self._compare_draws(session, references, encoded.token_ids)

    def rows(self, session: Session) -> list[RecoveryRow]:
        """One row per check, or one without a check."""
        arm = self.settings.arms[-1]
        if session.engine is not None:
            arm = session.engine.arms[-1].name  # of a server alone, known since it was asked
        common: dict[str, Any] = {
            "arm": arm,
            "prompts_digest": self.prompt_set.digest,
        }
        if self.settings.load is not None:
            common["batch_size"] = self.settings.load
        return [session.row(RecoveryRow, **common | check) for check in self.checks or [{}]]

    def judge(self, rows: Sequence[RecoveryRow]) -> None:
        """Raises VerdictError if the pair is lossy (exit code 1), or if nothing can be told (3)."""
        summary = summarise(rows)
        if summary.verdict != "lossless":
            raise VerdictError(summary.in_short, EXIT_CODES[summary.verdict])

    def _compare_greedy_texts(
        self, session: Session, references: References, encoded: Encoded
    ) -> None:
        """Compare both arms at temperature 0, on every prompt, in batches of unequal lengths."""
        settings = self.settings
        decoding = dataclasses.replace(settings.decoding, temperature=0.0, ignore_eos=True)
        num_rows = min(settings.batch_size, len(encoded.prompts))
        engine = session.open(num_rows, encoded.longest, decoding, fault=settings.fault)
        texts = GreedyTexts(session.end_tokens())
        questions = []
        for places in in_batches(range(len(encoded.prompts)), settings.batch_size):
            part = encoded.part(places)
            questions.append(session.ask(part.token_ids, places, decoding, chats=part.chats))
        for question, generations in ask_all(session, questions):
            answers = [generations[name].requests for name in settings.arms]
            if engine.reports_token_ids:
                require_token_ids([*itertools.chain(*answers)])
            for prompt, regular, speculative in zip(question.prompts, *answers, strict=True):
                texts.compare(
                    references, prompt, decoding.max_new_tokens, speculative, expected=regular
                )
        self.checks.append(texts.columns())

    def _compare_draws(
        self, session: Session, references: References, token_ids: Sequence[Sequence[int]]
    ) -> None:
        """Test after each context with each K of the plan, and finally all contexts together."""
        # No reference is kept here: it would keep the memory of its engine while the next one opens.
        plan = plan_draws(self.settings, references.for_tokens(), token_ids)
        batches_each = len(in_batches(range(plan.num_draws), self.settings.batch_size))
        num_batches = batches_each * plan.num_parts
        num_drawn = plan.num_draws * plan.num_parts
        say(f"drawing {num_drawn:,} continuations in {num_batches:,} batches")
        if references.for_tokens() is None:
            say("without the exact distribution: answers are compared with each other")
            # Both arms draw.
            num_batches *= 2
        checks = []
        with progress("drawing", num_batches) as advance, quick_garbage_collections():
            exact = plan.exact(references.for_tokens())
            for test_number in range(len(plan.tests)):
                checks.append(self._draw_and_check(session, plan, test_number, exact, advance))
        for planned, of_contexts in zip(plan.tests, checks, strict=True):
            check = together(of_contexts)
            num_needed = None
            reference = references.for_tokens()
            if check.verdict == "undecided" and reference is not None:
                say("working out how many draws would be enough")
                each = draws_needed(
                    reference, plan.contexts, plan.decoding, planned.test, plan.num_draws
                )
                num_needed = None if each is None else each * plan.num_parts
            self._add_sampled(
                planned, check, num_prompts=len(of_contexts), num_draws_needed=num_needed
            )

    def _draw_and_check(
        self,
        session: Session,
        plan: DrawPlan,
        test_number: int,
        exact: Sequence[PrefixDistribution] | None,
        advance: Callable[[str | None], None],
    ) -> list[SampledCheck]:
        """Open an engine for the K of one test, and check its draws after each context.

        Args:
            exact: the distribution after each context; None where it is unknown, and both arms'
                draws are compared.
            advance: called after each batch.
        """
        planned = plan.tests[test_number]
        decoding = dataclasses.replace(
            plan.decoding,
            num_draft_tokens=planned.num_draft_tokens,
            max_new_tokens=planned.test.num_tokens,
        )
        engine = session.open(
            self.settings.batch_size, CONTEXT_TOKENS, decoding, fault=self.settings.fault
        )
        checks = []
        for number, context in enumerate(plan.contexts):
            streams = plan.streams(number, test_number)
            questions = []
            for batch in in_batches(streams, self.settings.batch_size):
                prompts = [context.token_ids] * len(batch)
                questions.append(session.ask(prompts, batch, decoding))
            draws = _answers(engine, engine.arms[-1], questions, advance)
            if exact is None:
                # Of servers, which are refused without a second arm.
                assert len(engine.arms) > 1
                # Our own service takes the seed. With the same one, draws would not be independent.
                asked = [dataclasses.replace(each, seed=each.seed + 1) for each in questions]
                regular_draws = list(_answers(engine, engine.arms[0], asked, advance))
                check = planned.test.compare(regular_draws, list(draws))
            else:
                check = planned.test.check(draws, exact[number])
            checks.append(check)
            self._add_sampled(
                planned,
                check,
                num_prompts=1,
                prompt_index=self.prompts[context.prompt_index].index,
                context_end=context.end,
            )
        return checks

    def _add_sampled(
        self, planned: PlannedTest, check: SampledCheck, **figures: int | None
    ) -> None:
        """Add the columns of a check of draws."""
        columns = check.columns() | {"num_tokens": planned.test.num_tokens} | figures
        # A server has a K of its own.
        if self.settings.draft is not None and engine_of(self.settings).computes_here:
            columns["num_draft_tokens"] = planned.num_draft_tokens
        self.checks.append(columns)


EXPERIMENT = Recovery


def _answers(
    engine: Engine, arm: Arm, questions: Sequence[Question], advance: Callable[[str | None], None]
) -> Iterator[Generation]:
    """The draws of an arm, one question after the other."""
    for question in questions:
        generation = generate(engine, arm, question)
        # Otherwise ids are those of the text, which may be others, and more or fewer, than were drawn.
        if engine.reports_token_ids:
            require_token_ids(generation.requests)
            # Missing tokens would look like a loss.
            asked = question.decoding.max_new_tokens
            shortest = min(map(len, generation.tokens))
            if shortest < asked:
                raise RunError(
                    f"{generation.arm}: an answer ended after {shortest} of {asked} tokens, and draws"
                    " of different lengths cannot be compared: the engine must know ignore_eos"
                )
        yield generation
        advance(None)
