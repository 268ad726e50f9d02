"""Exact tokens per iteration of every smaller K, from the chances of acceptance along the run's own answers.

Iterations of a run with K=8 begin where K=8 leaves off, and those of K=1 elsewhere. So cutting K=8 proposals short does
not give what K=1 would have yielded: simulated errors were -11 to +33 %, depending on whether hard tokens cluster. The
answers say it exactly (`results.statistics.iterations`): both models read each once more, after everything is timed.
"""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from harness.config.acceptance_math import length_in_answers
from harness.config.closed_form import require_closed_form
from harness.config.errors import HarnessError, RunError
from harness.config.failures import as_run_error
from harness.engines.door import local
from harness.engines.door.reading import Transcript
from harness.engines.protocol import Engine
from harness.engines.registry import engine_of
from harness.measuring.figures.measured import MeasuredRun
from harness.measuring.progress import note
from harness.measuring.session import Session
from harness.results.statistics.interval import Interval
from harness.results.statistics.iterations import expected_tokens_per_iteration

if TYPE_CHECKING:
    from harness.local.drafting.method import Pair
    from harness.local.engine.reading import PairReader

# Of each K up to this one.
_MOST_K = 32


def tokens_of_smaller_ks(
    run: MeasuredRun, engine: Engine, session: Session
) -> list[Interval] | None:
    """Tokens per iteration for K = 1, 2, ..., by the rates of acceptance that were set, or else by the answers, which
    are read once more: that closes the engine. None where they say nothing of a smaller K.
    """
    settings = run.settings
    if len(run.arms) < 2:
        return None
    rates = settings.decoding.synthetic_rates
    if rates is not None:
        length = statistics.fmean(run.arms["speculative"].lengths.values())
        ks = range(1, settings.decoding.most_draft_tokens + 1)
        return [Interval(length_in_answers(rates, k, length)) for k in ks]
    # Not where another engine decoded them, or a shorter proposal is not the beginning of a longer one.
    is_prefix = engine_of(settings).own_loop and session.planned.short_proposals_are_prefixes
    if not is_prefix:
        return None
    try:
        require_closed_form(settings)
        note("reading the answers again, for the yields of smaller K")
        # Its memory is free for the reading.
        engine.close()
        return _read_again(session.pair, run)
    except Exception as exception:
        error = exception if isinstance(exception, HarnessError) else as_run_error(exception)
        if error is None:
            raise
        note(f"nothing is predicted of a smaller K: {error}")
        return None


def _read_again(pair: Pair, run: MeasuredRun) -> list[Interval]:
    """Both models read each prompt's first answer of the speculative arm.

    Raises:
        HarnessError: for a draft that gives no probabilities to a text.
    """
    asked: list[Transcript] = []
    places: list[int] = []
    for generation in run.arms["speculative"].generations:
        for prompt, request in generation.with_prompts:
            occurrence = run.prompt_set.occurrence(request.index)
            if request.answered and len(request.token_ids) > 1 and occurrence.repeat == 0:
                asked.append(Transcript.of(prompt, request.token_ids))
                places.append(occurrence.place)
    if not asked:
        raise RunError("no answer has two tokens")
    decoding = run.settings.decoding
    most = min(decoding.most_draft_tokens, _MOST_K)
    reader: PairReader = local("engine.reading").PairReader(pair, decoding, most)
    try:
        cuts = [text.cut for [text] in reader.read(asked)]
    finally:
        reader.close()
    return expected_tokens_per_iteration(cuts, places)
