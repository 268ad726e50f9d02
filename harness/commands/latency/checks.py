"""The checks of a run of `latency`, as a table with one row for each check. They find reasons to doubt the result, give
notes on what the figures cover, and list what was in order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, NamedTuple
from urllib.parse import urlsplit

from harness.commands.latency.answer import has_verdict
from harness.config.amounts import counted, percent
from harness.config.machine import is_loopback
from harness.config.run import NO_GRAPHS
from harness.measuring.figures.machine import QUIET
from harness.measuring.rows import LatencyRow
from harness.reporting.words import (
    LOSSY,
    lossy_rule,
    synthetic_value,
    too_long,
)
from harness.results.judging.acceptance import LITTLE
from harness.results.runs import Run, num_covered
from harness.results.schema import NO_VERDICT
from harness.results.verdict import MOST_READ_OTHERWISE

# A share of tokens after the ends of their texts up to this is not mentioned.
_MOST_AFTER_END = 0.05
# A first token was delayed on its way from the server if it took over _SLOW_HERE times as long as by the server's own
# clock, plus _NEAR_MS milliseconds.
_SLOW_HERE = 1.5
_NEAR_MS = 10
# The speed-up with equal weights for all answers is mentioned if it differs from the speed-up over all tokens by this
# factor.
_OTHERWISE_BY_ANSWER = 1.2
# Runners that execute the models without compiling them. Other runners take less time for the same step.
_SLOW_RUNNERS = ("eager", "static")
# A share of an iteration's time that this program's own host code takes is not mentioned up to this.
_MOST_OF_HOST = 0.1

_Run = Run[LatencyRow]
# The consequence of a finding for the figures of a run:
#
#     unchecked     only leaves words out of the line *Checked*; whether the arms are compared is decided by
#                   `results.verdict.refusal`
#     comparison    the speed-up, if there is one, should not be believed as it stands
#     against       none of the figures should be believed as they stand
#     note          the figures are right, but a reader should know the finding
#
# All findings are printed for a single run. For many runs only those with `setting` are printed: `setting against`
# above their tables, and `setting note` below them, in files.
Consequence = Literal[
    "unchecked", "comparison", "against", "setting against", "setting note", "note"
]


class Check(NamedTuple):
    """A check for something that may spoil the figures of a run.

    Attributes:
        consequence: what a finding means for the figures; the comment above explains the values.
        find: returns the finding in a run, or a falsy value. None leaves the check out of the line *Checked*, because a
            figure is unknown on which the finding depends; other falsy values mean that nothing was found. (For a check
            without `clean`, both are the same.) The run's rows are those of the regular arm and, with a draft, of the
            speculative arm.
        text: the sentence about a finding: a template with `row`, the last row of the run, and `found`. Empty if the
            verdict, or another check, states the finding; such a check is only for the line *Checked*.
        clean: the words in the line *Checked* if nothing is found; empty to leave the check out of that line.
    """

    consequence: Consequence
    find: Callable[[_Run], Any]
    text: str
    clean: str = ""


def doubts(run: _Run) -> list[str]:
    """Reasons not to believe the figures of a run as they stand, with the most serious first."""
    return findings([run], ("comparison", "against", "setting against"))


def checked(run: _Run) -> list[str]:
    """A line that lists everything that was found to be in order.

    [] if nothing was, for a run without a verdict or a speed-up, and for a simulated engine. For a pooled run, each of
    its runs must be in order, because means over runs may be equal in both arms by chance.
    """
    row = run.last
    if not has_verdict(run.rows) or not row.speedup or row.is_simulated:
        return []
    runs = run.parts if row.repeat == "all" else [run]
    clean = []
    for check in CHECKS:
        found = [check.find(part) for part in runs]
        if check.clean and found and None not in found and not any(found):
            clean.append(check.clean)
    return [" · ".join(clean)] if clean else []


def notes(run: _Run) -> list[str]:
    """Notes about what the figures of a run cover and do not cover."""
    return findings([run], ("setting note", "note"))


def findings(runs: Iterable[_Run], consequences: Sequence[Consequence]) -> list[str]:
    """The sentences for all findings with these consequences in any of the runs, each sentence once."""
    sentences: dict[str, None] = {}
    for run in runs:
        is_compared = run.last.speedup is not None
        for check in CHECKS:
            is_asked = check.text and check.consequence in consequences
            if is_asked and (is_compared or check.consequence != "comparison"):
                found = check.find(run)
                if found:
                    sentences[check.text.format(row=run.last, found=found)] = None
    return list(sentences)


def disturbed_runs(runs: Iterable[_Run]) -> list[str]:
    """`1 of 5 runs drifted and 2 of 5 runs got less than 90 % of the CPU time they wanted (at worst 84.0 %): unsteady.`
    [] if neither. Of a pooled run, each of its runs counts. Simulated runs do not, because no other program can disturb
    them.
    """
    measured = [part for run in runs for part in run.parts or [run] if not part.last.is_simulated]
    num_drifted = sum(bool(run.last.drifted) for run in measured)
    shares = [run.last.processor_share or 0.0 for run in measured if run.last.was_starved]
    of_runs = f"of {counted(len(measured), 'run')}"
    parts = []
    if num_drifted:
        parts.append(f"{num_drifted} {of_runs} drifted")
    if shares:
        worst = percent(min(shares), 1)
        parts.append(
            f"{len(shares)} {of_runs} got less than {percent(QUIET)} of the CPU time they wanted (at worst {worst})"
        )
    return [f"{' and '.join(parts)}: unsteady."] if parts else []


def _each_arm(find: Callable[[LatencyRow], str | None]) -> Callable[[_Run], str | None]:
    """Turn a function that finds something in one arm into a function that finds it in a run.

    Words about several arms are joined by `and`. If nothing is found in any arm, but an arm is unknown (None), the
    result is None.
    """

    def of_run(run: _Run) -> str | None:
        found = [find(row) for row in run.rows]
        words = " and ".join(filter(None, found))
        return None if not words and None in found else words

    return of_run


def _unequal_work(run: _Run) -> bool | None:
    """Whether the arms generated different numbers of tokens; None if a number is unknown."""
    numbers = [row.num_tokens for row in run.rows]
    return None if None in numbers else len(set(numbers)) > 1


def _unequal_texts(run: _Run) -> bool | None:
    """Whether the arms wrote different texts for any prompt; None if texts were not compared."""
    row = run.last
    return None if row.identical_prompts is None else row.identical_prompts != row.num_prompts


def _regular_drafts(run: _Run) -> bool | None:
    """Whether the regular arm drafted, or the speculative arm did not; None if this is unknown."""
    regular, row = run.rows[0], run.last
    # Tokens that arrive several at a time were drafted, or held back so that nobody can see whether they were.
    if None in (regular.drafted, row.drafted) or regular.held_back:
        return None
    return bool(regular.drafted or not row.drafted)


@_each_arm
def _finished(row: LatencyRow) -> str | None:
    """How many prompts an arm answered, if the run ended early; otherwise None."""
    if row.status in (None, "ok", NO_VERDICT):
        return None
    return f"{num_covered(row)} {row.arm}"


@_each_arm
def _failed(row: LatencyRow) -> str | None:
    """How many of an arm's requests failed; None if none did."""
    return f"{row.num_failed} of {row.num_prompts} {row.arm}" if row.num_failed else None


def _failures(run: _Run) -> str | None:
    """How many requests of each arm failed, with the first error; None if none failed."""
    failed = _failed(run)
    errors = [prompt.error for prompt in run.prompt_rows if prompt.error]
    return f"{failed} (the first: {errors[0]})" if failed and errors else failed


@_each_arm
def _empty(row: LatencyRow) -> str | None:
    """How many of an arm's answers ended without a token; None if none did."""
    return f"{row.num_empty} of {row.num_prompts} {row.arm}" if row.num_empty else None


def _has_a_slower_runner(run: _Run) -> bool:
    """Whether the draft is compiled, but the target is not. `draft_runner` is None if both have the same runner."""
    runners = [run.last.runner or "", run.last.draft_runner or ""]
    target, draft = (runner.removesuffix(NO_GRAPHS) for runner in runners)
    return target in _SLOW_RUNNERS and draft not in ("", *_SLOW_RUNNERS)


@_each_arm
def _slow_host(row: LatencyRow) -> str | None:
    """The share of an iteration or a step that this program's own host code takes, if it is large."""
    share = row.host_share or 0.0
    return f"{percent(share)} of the {row.arm} arm's time" if share > _MOST_OF_HOST else None


def _drift(run: _Run) -> str | None:
    """The speed-up of the second half as a multiple of that of the first, if they differ; "" if they do not, and None
    if that is unknown.
    """
    row = run.last
    if row.drift is None or not row.drifted:
        return "" if row.drifted is False else None
    words = f"{row.drift:.2f} times that of the first"
    if row.draft_remembers:
        words += "; the server drafts from its earlier answers, of which there are ever more"
    return words


def _in_two_places(run: _Run) -> str | None:
    """The addresses of two servers whose speeds may differ for reasons other than speculation; None for a single
    address, or if both are this machine's.
    """
    row = run.last
    if row.url is None or row.regular_url is None:
        return None
    addresses = [urlsplit(url) for url in (row.regular_url, row.url)]
    are_here = all(is_loopback(address.hostname or "") for address in addresses)
    places = [address.netloc for address in addresses]
    return None if are_here or places[0] == places[1] else " and ".join(places)


def _busy(run: _Run) -> str | None:
    """The share of CPU time that the run got, if other programs or its own processes left it too little. "" if they did
    not, and None if that is unknown for an arm, as for a server that was already running.
    """
    # Figures of the machine are the same in all rows of a run.
    row = run.last
    share = row.processor_share
    if not row.was_starved or share is None:
        return None if row.url is not None or share is None else ""
    load = f"{row.load or 0:.1f} on {row.num_cores} cores, its own included"
    got = f"{percent(share, 1)} of the CPU time"
    if row.repeat == "all":
        # A pooled row has the smallest share and the largest load of its runs.
        return f"the {row.repeats} runs got at least {got} they wanted (load up to {load})"
    who = "this run" if row.url is None else "this program"
    return f"{who} got {got} it wanted (load {load})"


def _low_acceptance(run: _Run) -> str | None:
    """The share of tested draft tokens that an engine in another process accepted, if it is small; otherwise None."""
    row = run.last
    rate = row.conditional_acceptance_rate
    if rate is None or rate > LITTLE or row.synthetic or not row.was_served:
        return None
    return percent(rate, digits=1)


def _busy_gpus(run: _Run) -> str | None:
    """How the GPUs were busy with other programs, or slowed by heat or power. "" if they were not, and None if nothing
    was found but their clocks or other programs on them are unknown.
    """
    row = run.last
    parts = []
    if row.other_gpu_processes:
        parts.append(f"{counted(row.other_gpu_processes, 'other process')} computed on them")
    if row.gpu_throttled or row.num_throttled_units:
        # A pooled row has no reason if its runs have different ones, or only some have one.
        reason = f" ({row.gpu_throttled})" if row.gpu_throttled else ""
        clock = f" to {row.lowest_gpu_clock_mhz} MHz" if row.lowest_gpu_clock_mhz else ""
        parts.append(f"clocks were lowered{clock}{reason}")
    watched = (row.other_gpu_processes, row.lowest_gpu_clock_mhz, row.num_throttled_units)
    if not parts and None in watched:
        return None
    return " and ".join(parts)


@_each_arm
def _slow_here(row: LatencyRow) -> str | None:
    """The times to the first token here and by the server's clock, if the difference is large; otherwise None."""
    here = row.time_to_first_token_ms
    there = row.server_time_to_first_token_ms
    if not here or not there or row.foreign_tokens or here <= _SLOW_HERE * there + _NEAR_MS:
        return None
    return f"{here:.0f} ms in the {row.arm} arm, {there:.0f} ms by the server's clock"


@_each_arm
def _impossible(row: LatencyRow) -> str | None:
    """What cannot be true of a server's counts, in words; None if nothing is wrong with them."""
    return f"{row.impossible_counts} in the {row.arm} arm" if row.impossible_counts else None


@_each_arm
def _held_back(row: LatencyRow) -> str | None:
    """How many tokens arrive together, if the server holds tokens back; otherwise None."""
    if not row.held_back:
        return None
    return f"{row.tokens_per_arrival:.1f} at a time in the {row.arm} arm"


@_each_arm
def _cached(row: LatencyRow) -> str | None:
    """The share of the prompts' tokens that came from a cache; "" if none did, None if that is unknown."""
    if not row.cached_tokens:
        return None if row.cached_tokens is None else ""
    if not row.read_prompt_tokens:
        return None
    # Some servers do not count cached tokens as read.
    num_prompt_tokens = max(row.read_prompt_tokens, row.num_prompt_tokens or 0)
    return f"{percent(row.cached_tokens / num_prompt_tokens)} in the {row.arm} arm"


@_each_arm
def _foreign_tokens(row: LatencyRow) -> str | None:
    """The number of tokens that a server read and generated for other clients during the run; "" if there were
    none, None if that is unknown.
    """
    if not row.foreign_tokens:
        return None if row.foreign_tokens is None else ""
    return f"at least {counted(row.foreign_tokens, 'token')} on the {row.arm} server"


def _unknown_clients(run: _Run) -> str | None:
    """The reason why it is unknown if other clients used a server that was already running; None if it is known."""
    if run.last.url is None or all(arm.foreign_tokens is not None for arm in run.rows):
        return None
    if run.last.has_one_server:
        return "both arms asked one server"
    if run.last.status != "ok":
        return "the run ended early"
    return "no counters of the server show it (llama.cpp: `--metrics`)"


@_each_arm
def _other_prompts(row: LatencyRow) -> str | None:
    """The numbers of prompt tokens that were sent and that the server read, if they differ by more than one per prompt
    plus the share `MOST_READ_OTHERWISE` of all; otherwise None.
    """
    sent = row.num_prompt_tokens or 0
    read = sent if row.read_prompt_tokens is None else row.read_prompt_tokens
    if abs(read - sent) <= (row.num_prompts or 0) + MOST_READ_OTHERWISE * sent:
        return None
    return f"{read} prompt tokens in the {row.arm} arm, where {sent} are known here"


def _after_the_end(run: _Run) -> str | None:
    """The share of tokens after the ends of their texts, if it is large; otherwise None."""
    row = run.last
    share = row.share_after_end or 0.0
    return percent(share) if row.ignore_eos and share > _MOST_AFTER_END else None


def _otherwise_by_answer(run: _Run) -> str | None:
    """The speed-up with equal weights for all answers, if it differs much from the one over all tokens; or None."""
    regular, row = run.rows[0], run.last
    speedup = row.speedup.estimate if row.speedup else 0.0
    if not (speedup > 0 and regular.ms_per_token_per_answer and row.ms_per_token_per_answer):
        return None
    by_answer = regular.ms_per_token_per_answer / row.ms_per_token_per_answer
    if 1 / _OTHERWISE_BY_ANSWER < by_answer / speedup < _OTHERWISE_BY_ANSWER:
        return None
    return f"over all tokens the speed-up is {speedup:.2f}×, with equal weights for all answers {by_answer:.2f}×"


@_each_arm
def _unseen(row: LatencyRow) -> str | None:
    """How many of an arm's tokens the server's counters include, if some are missing there; otherwise None."""
    if not row.unseen_tokens:
        return None
    return f"{row.server_tokens} of {row.num_tokens} tokens of the {row.arm} arm"


def _split_over_gpus(run: _Run) -> int | None:
    """How many GPUs the target's layers are split over, if there are several and a speed-up; otherwise None."""
    number = sum(device.startswith("cuda") for device in run.last.weight_bytes or ())
    return number if run.last.speedup is not None and number > 1 else None


# The checks in the order in which their sentences are printed, the most serious first. To add a check, add a row.
CHECKS = (
    # First, because no model in production is served like this, so none of the figures apply there.
    Check(
        "setting against",
        _split_over_gpus,
        "The target's layers are split over {found} GPUs, which work one after the other: with tensor parallelism a"
        " step is several times as fast, and the same draft gains less.",
    ),
    # Before the others, because a busy machine explains several of the findings below.
    Check(
        "against",
        _busy,
        "Processes waited for a core: {found}.",
        clean="got its CPU time",
    ),
    Check(
        "against",
        _finished,
        "{row.status}: the figures cover {found} prompts.",
    ),
    Check(
        "setting against",
        lambda run: run.last.is_simulated,
        "engine=simulated: costs and acceptance are made up, and nothing was measured.",
    ),
    Check("setting against", lambda run: lossy_rule(run.last), f"{{found}}: {LOSSY}."),
    Check(
        "setting against",
        lambda run: run.last.synthetic and synthetic_value(run.last),
        "decoding.synthetic_acceptance={found}: draft tokens were accepted at random with this probability.",
    ),
    Check(
        "setting against",
        lambda run: NO_GRAPHS in (run.last.runner or ""),
        "Neither arm runs in CUDA graphs (runner {row.runner}): each kernel is launched separately, and a draft costs"
        " more.",
    ),
    Check(
        "setting against",
        _has_a_slower_runner,
        "The draft has a faster runner ({row.draft_runner}) than the target ({row.runner}), which inflates the"
        " speed-up.",
    ),
    Check(
        "against",
        _slow_host,
        "This program's host code takes {found}: the speed-up may differ on another engine.",
    ),
    Check(
        "setting against",
        lambda run: (
            isinstance(run.last.num_draft_tokens, int)
            and (run.last.mean_proposed or 0) > run.last.num_draft_tokens
        ),
        "The server drafted {row.mean_proposed:.1f} tokens per iteration that drafted, where K={row.num_draft_tokens}:"
        " it does not use this K.",
    ),
    Check("against", _failures, "Requests failed: {found}."),
    Check("against", _empty, "Answers without a token are left out: {found}."),
    Check(
        "comparison",
        lambda run: run.last.has_one_server or run.last.has_same_command,
        "Both URLs or both commands are the same: the ratio only shows how far apart identical servers are.",
    ),
    Check(
        "setting against",
        # Two names if the servers' models have different ones.
        lambda run: " and ".join(names) if len(names := run.last.served_model or []) > 1 else None,
        "The servers call their models {found}: if these are different weights, the ratio compares the models, too.",
    ),
    Check(
        "comparison",
        _in_two_places,
        "The servers at {found} may be different machines or devices: a slower one would look like a slower arm."
        " `harness latency -- COMMAND` starts both on the same devices.",
    ),
    Check(
        "against",
        _busy_gpus,
        "The GPUs were busy: {found}.",
        clean="GPUs otherwise idle",
    ),
    Check(
        "comparison",
        _drift,
        "The speed-up changed during the run: that of the second half is {found}.",
        clean="no significant drift",
    ),
    Check("unchecked", _unequal_work, "", clean="equal token counts"),
    Check("unchecked", _unequal_texts, "", clean="equal texts"),
    Check("note", _cached, "Prompt tokens from a cache: {found}.", clean="caches cold"),
    Check(
        "against",
        _foreign_tokens,
        "Other clients used the servers: {found}.",
        clean="no other client",
    ),
    Check("unchecked", _regular_drafts, "", clean="regular arm drafted nothing"),
    Check(
        "against",
        _impossible,
        "The server's counts cannot be true: {found}. No figure follows from them.",
    ),
    Check(
        "against",
        _slow_here,
        "First tokens took {found}: this machine or the network was the bottleneck.",
    ),
    Check(
        "comparison",
        _other_prompts,
        "The servers read {found}: they use another chat template, or they cut the prompts.",
    ),
    Check(
        "comparison",
        # With one prompt there is nothing to alternate.
        lambda run: run.last.interleaved is False and run.last.num_prompts != 1,
        "The arms did not alternate (interleaved=false): a machine that slowed down would look like a slower arm.",
    ),
    Check(
        "comparison",
        _after_the_end,
        "{found} of the tokens come after the natural end of their text; decoding.ignore_eos=false stops there.",
    ),
    Check(
        "against",
        lambda run: run.last.draft_remembers and run.last.num_different_prompts,
        "{found} prompts were sent in {row.num_prompts} requests, and the server drafts from its earlier answers: new"
        " prompts gain less.",
    ),
    Check(
        "against",
        _otherwise_by_answer,
        "Answers have {row.shortest_answer} to {row.longest_answer} tokens: {found}.",
    ),
    Check(
        "against",
        lambda run: (
            run.last.ignore_eos and run.last.longest_answer not in (None, run.last.max_new_tokens)
        ),
        "No answer has {row.max_new_tokens} tokens, although decoding.ignore_eos=true: the context may be too short, or"
        " the server ignores ignore_eos.",
    ),
    Check("setting note", lambda run: too_long(run.last), "{found} (too long for the context)."),
    Check(
        "against",
        _held_back,
        "Tokens arrive {found}: the cost of an iteration and the time per token after the first are unknown.",
    ),
    Check(
        "comparison",
        # A conversation has several prompts, one for each turn, but is one prompt of its set.
        lambda run: 1 in (run.last.num_different_prompts, run.last.num_prompts_in_set),
        "There was only one prompt: the speed-up and its interval are for this prompt alone.",
    ),
    Check(
        "setting note",
        lambda run: run.last.salted is False,
        "This kind of server takes no cache salt: its prefix cache may have seen the prompts before.",
    ),
    Check(
        "setting note",
        lambda run: run.last.url,
        "The servers were already running: their share of CPU time is unknown.",
    ),
    Check(
        "against",
        _unknown_clients,
        "Whether other clients used the servers during the run is unknown: {found}.",
    ),
    Check(
        "note",
        _low_acceptance,
        "Acceptance is low: {found} of the tested draft tokens. `harness acceptance` on the same server shows whether"
        " the draft or the engine is bad: docs/low-acceptance.md.",
    ),
    Check(
        "note",
        _unseen,
        "The server's counters saw only {found}: they probably belong to one of several workers, and are ignored.",
    ),
)
