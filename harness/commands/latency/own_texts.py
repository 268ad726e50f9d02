"""What every smaller K would have yielded, exactly: from the chances of acceptance along the run's own answers.

Iterations of a run with K=8 begin where K=8 leaves off, and those of K=1 elsewhere. So cutting K=8 proposals short does
not give what K=1 would have yielded: simulated errors were -11 to +33 %, depending on whether hard tokens cluster. The
answers say it exactly (`results.statistics.iterations`): both models read each once more, after everything is timed.
"""

from __future__ import annotations

from harness.commands.latency.record import LatencySettings
from harness.config.closed_form import require_closed_form
from harness.config.errors import HarnessError, RunError, SettingError
from harness.engines.door import wing
from harness.engines.door.pairs import AnyPair, Pair
from harness.engines.door.reading import Transcript
from harness.engines.registry import engine_of
from harness.measuring.figures.measured import MeasuredRun
from harness.results.statistics.interval import Interval

# Of each K up to this one.
_MOST_K = 32


def follows_from_answers(settings: LatencySettings, planned: AnyPair) -> bool:
    """Whether the answers of a run with a draft say what a smaller K would have yielded.

    Not where another engine decoded them, a shorter proposal is not the beginning of a longer one, what is proposed
    depends on earlier answers, or the rule has no closed form.
    """
    if not engine_of(settings).own_loop or not planned.shorter_proposals_follow:
        return False
    if settings.finds_own_answers:
        return False
    try:
        require_closed_form(settings)
    except SettingError:
        return False
    return True


def tokens_by_k(pair: Pair, settings: LatencySettings, run: MeasuredRun) -> list[Interval]:
    """Tokens per iteration for K = 1, 2, ...: both models read each prompt's first answer of the speculative arm.

    Raises:
        RunError: for a draft that gives no probabilities to a text, or too little memory.
    """
    from harness.config.failures import as_run_error
    from harness.results.statistics.iterations import tokens_per_iteration

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
    most = min(settings.decoding.most_draft_tokens, _MOST_K)
    try:
        reader = wing.open_reader(pair, settings.decoding, most)
        try:
            cuts = [text.cut for [text] in reader.read(asked)]
        finally:
            reader.close()
    except HarnessError as error:
        raise RunError(str(error)) from error
    except Exception as exception:
        explained = as_run_error(exception)
        if explained is None:
            raise
        raise explained from exception
    return tokens_per_iteration(cuts, places)
