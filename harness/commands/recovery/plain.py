"""`recovery` without load: one question after the other.

First the greedy texts of both arms are compared. Then, above temperature 0, the speculative arm
continues a few contexts, beginnings that are cut from the prompts, many times each. Its draws are
tested at one K, 1 or the run's own, after one context or after all of them together.

For example, num_draws=60000 with K=4 means 5 contexts and 2 tests, of the draws with one draft
token and of those with four. That leaves 6,000 draws after each context for each test.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any

from harness.commands.recovery.contexts import CONTEXT_TOKENS, Context, choose_contexts
from harness.commands.recovery.drawn import (
    SampledCheck,
    TokenTest,
    draws_needed,
    together,
)
from harness.commands.recovery.greedy import GreedyTexts, require_token_ids
from harness.commands.recovery.load import checks_under_load
from harness.commands.recovery.record import LOAD, RecoverySettings
from harness.commands.recovery.sampling import Sampling
from harness.commands.recovery.scores import Scores
from harness.commands.recovery.workload import PlannedRequest
from harness.config.errors import RunError
from harness.config.settings import DecodingSettings, NumDraftTokens
from harness.engines.protocol import in_batches
from harness.engines.registry import engine_of
from harness.engines.requests import RequestRecord
from harness.engines.timing import generate, quick_garbage_collections
from harness.measuring.interleaving import ask_all
from harness.measuring.progress import progress, say
from harness.measuring.prompts.encoding import Encoded
from harness.measuring.references import References
from harness.measuring.session import Session
from harness.results.acceptance import Acceptance

# Draws of `num_draws=auto` over all contexts and tests, where so few are enough.
_FEWEST_DRAWS = 60_000

Checks = Iterator[dict[str, Any]]


def checks_one_by_one(session: Session, settings: RecoverySettings, encoded: Encoded) -> Checks:
    """Yield the columns of each check."""
    decoding = settings.decoding
    # Rows, tokens of a prompt and new tokens: of the greedy texts, and of the draws.
    num_rows = min(settings.batch_size, len(encoded.prompts))
    needs = [(num_rows, encoded.longest, decoding.max_new_tokens)]
    if decoding.temperature > 0:
        counted = num_counted_tokens(decoding.num_draft_tokens)
        needs.append((settings.batch_size, CONTEXT_TOKENS, counted))
    session.place(*max(needs, key=lambda need: need[0] * (need[1] + need[2])))
    references = References(session)
    greedy = []
    # One by one, draws after a few places would take hours: of whole texts every token counts.
    draws_one_by_one = decoding.temperature > 0 and not engine_of(settings).takes_batches
    why_as_load = f"{settings.engine.name} draws one text at a time" if draws_one_by_one else None
    if settings.draft is None:
        # No texts to compare, but `references` asks the open engine.
        session.open(num_rows, encoded.longest)
    elif not draws_one_by_one:
        greedy = [_greedy_check(session, settings, references, encoded, num_rows)]
    needs_reference = decoding.temperature > 0
    for check in greedy:
        differ = check["identical_prompts"] < check["num_prompts"]
        needs_reference |= differ and check["verdict"] == "undecided"
    if why_as_load is None and needs_reference and references.for_tokens() is None:
        why_as_load = "without the weights"
    if why_as_load is not None:
        # There any reference scores requests of any kind.
        load = min(LOAD, settings.batch_size)
        asked = dataclasses.replace(settings, load=load, samplings=("as_asked",))
        say(f"{why_as_load}: recovery goes on as with load={load}")
        for check in checks_under_load(session, asked, encoded.token_ids, references):
            yield check | {"load": load, "batch_size": load}
        return
    yield from greedy
    if decoding.temperature > 0:
        yield from _sampled_checks(session, settings, references, encoded)


def num_counted_tokens(num_draft_tokens: NumDraftTokens) -> int:
    """The first token, which is the target's own, then a whole proposal, then its bonus token.

    Of `auto` a proposal of four.
    """
    return (4 if num_draft_tokens == "auto" else num_draft_tokens) + 2


def _greedy_check(
    session: Session,
    settings: RecoverySettings,
    references: References,
    encoded: Encoded,
    num_rows: int,
) -> dict[str, Any]:
    """Compare both arms at temperature 0, on every prompt, in batches of unequal lengths."""
    decoding = dataclasses.replace(settings.decoding, temperature=0.0, ignore_eos=True)
    engine = session.open(num_rows, encoded.longest, decoding, fault=settings.fault)
    texts = GreedyTexts(session.end_tokens())
    questions = []
    for places in in_batches(range(len(encoded.prompts)), settings.batch_size):
        part = encoded.part(places)
        questions.append(session.ask(part.token_ids, places, decoding, chats=part.chats))
    for question, generations in ask_all(session, questions):
        answers = [generations[name].requests for name in settings.arms]
        if all(arm.traits.reports_token_ids for arm in engine.arms):
            require_token_ids([*itertools.chain(*answers)])
        for prompt, regular, speculative in zip(question.prompts, *answers, strict=True):
            texts.compare(
                references, prompt, decoding.max_new_tokens, speculative, expected=regular
            )
    return texts.columns()


def _sampled_checks(
    session: Session, settings: RecoverySettings, references: References, encoded: Encoded
) -> Checks:
    """Test after each context with each K, and finally all contexts together."""
    # No text ends before its last token.
    decoding = dataclasses.replace(settings.decoding, ignore_eos=True)
    # No reference is kept here: it would keep the memory of its engine while the next one opens.
    weights = references.for_tokens()
    assert weights is not None
    contexts = choose_contexts(weights, encoded.token_ids, decoding)
    del weights
    own_number = decoding.num_draft_tokens
    numbers: list[NumDraftTokens] = [own_number]
    # A server's own K cannot be changed. Without a draft it says only how many tokens are counted.
    has_known_k = settings.draft is not None and engine_of(settings).computes_here
    if has_known_k and own_number != 1:
        numbers = [1, own_number]
    # One test after each context, and one of all contexts together.
    level_share = settings.false_alarm_rate / ((len(contexts) + 1) * len(numbers))
    test = TokenTest(level_share, settings.shift)
    num_parts = len(contexts) * len(numbers)

    def power(num_draws: int) -> float:
        """About that of the test of all contexts, with so many draws in all of both tests."""
        most_tokens = num_counted_tokens(own_number)
        after_one = test.expected_continuations(num_draws // num_parts, most_tokens)
        return together([after_one] * len(contexts)).power

    if settings.num_draws != "auto":
        num_draws = settings.num_draws // num_parts
    else:
        num_draws = (draws_needed(power, _FEWEST_DRAWS) or _FEWEST_DRAWS) // num_parts
    num_batches = len(in_batches(range(num_draws), settings.batch_size)) * num_parts
    say(f"drawing {num_draws * num_parts:,} continuations in {num_batches:,} batches")
    overall = []
    with progress("drawing", num_batches) as advance, quick_garbage_collections():
        for test_number, number in enumerate(numbers):
            num_tokens = num_counted_tokens(number)
            asked = dataclasses.replace(
                decoding, num_draft_tokens=number, max_new_tokens=num_tokens
            )
            figures: dict[str, Any] = {"num_tokens": num_tokens}
            if has_known_k:
                figures["num_draft_tokens"] = number
            session.open(settings.batch_size, CONTEXT_TOKENS, asked, fault=settings.fault)
            checks = []
            for context_number, context in enumerate(contexts):
                # Streams of random numbers of their own.
                part = context_number * len(numbers) + test_number
                streams = range(part * num_draws, (part + 1) * num_draws)
                check = _context_check(session, references, test, context, asked, streams, advance)
                checks.append(check)
                yield (
                    check.columns()
                    | figures
                    | {
                        "num_prompts": 1,
                        "prompt_index": encoded.prompts[context.prompt_index].index,
                        "context_end": context.end,
                    }
                )
            overall.append((together(checks), figures))
    for check, figures in overall:
        needed = None
        if check.verdict == "undecided":
            needed = draws_needed(power, round(1.5 * num_draws * num_parts))
        columns = {"num_prompts": len(contexts), "num_draws_needed": needed}
        yield check.columns() | figures | columns


def _context_check(
    session: Session,
    references: References,
    test: TokenTest,
    context: Context,
    decoding: DecodingSettings,
    streams: range,
    advance: Callable[[str | None], None],
) -> SampledCheck:
    """Draw after one context, once for each stream of random numbers, and test the draws."""
    engine = session.engine
    assert engine is not None
    settings = session.settings
    num_tokens = decoding.max_new_tokens
    answers: list[RequestRecord] = []
    for batch in in_batches(streams, settings.batch_size):
        question = session.ask([context.token_ids] * len(batch), batch, decoding)
        generation = generate(engine, engine.arms[-1], question)
        require_token_ids(generation.requests)
        # Missing tokens would look like a loss.
        shortest = min(map(len, generation.tokens))
        if shortest < num_tokens:
            raise RunError(
                f"{generation.arm}: an answer ended after {shortest} of {num_tokens} tokens, and draws"
                " of different lengths cannot be compared: the engine must know ignore_eos"
            )
        answers += generation.requests
        advance(None)
    reference = references.for_tokens()
    assert reference is not None
    sampling = Sampling("as asked", decoding)
    scores = Scores(reference, frozenset(), settings.batch_size, [settings.seed, 1, streams.start])
    asked = [PlannedRequest(context.token_ids, sampling, num_tokens, stream) for stream in streams]
    scores.add(list(zip(asked, answers, strict=True)))
    check = test.check_continuations(scores.drawn, scores.two_routes)
    acceptance = Acceptance.of(pair for answer in answers for pair in answer.outcomes)
    return dataclasses.replace(check, acceptance=acceptance)
