"""The measurement of `recovery`: is this pair, with these settings, on this machine, lossless?

The arm under test answers requests of many kinds, with `batch_size` requests in flight (`workload`). A reference scores
the texts of these answers (`scores`). The reference is the model's weights, or a regular server that reports
log-probabilities of these texts (`measuring.references`). Greedy texts must consist of the reference's likeliest tokens
(`GreedyTexts`), and drawn texts must follow its distribution (`results.statistics.drawn_tokens`). Without either
reference, only greedy texts are compared (`greedy_check`), and drawn texts stay undecided. Each check becomes a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from harness.commands.command import Experiment
from harness.commands.recovery.greedy import GreedyTexts
from harness.commands.recovery.record import RecoverySettings
from harness.commands.recovery.rows import TEXTS_FILE, RecoveryRow, RecoveryTextRow
from harness.commands.recovery.sampling import samplings
from harness.commands.recovery.scores import Scores, choose_place, is_lossy, with_ends
from harness.commands.recovery.workload import (
    FOLLOW_UP,
    Answer,
    Asking,
    Columns,
    PlannedRequest,
    Workload,
    most_drawn,
    taken_samplings,
    tokens_at_place,
)
from harness.config.amounts import counted
from harness.config.errors import RunError
from harness.config.settings import require
from harness.engines.counts import Counts
from harness.engines.door.reading import Reference
from harness.engines.protocol import Arm, in_batches
from harness.engines.tokenizer import Tokenizer
from harness.measuring.figures.server import counter_columns
from harness.measuring.figures.texts import answers_divergence
from harness.measuring.progress import say
from harness.measuring.prompts.sets import load_prompts
from harness.measuring.references import References, ReportedReference
from harness.measuring.session import Session
from harness.results.drafts import Drafts
from harness.results.statistics.drawn_tokens import NOTABLE_EVIDENCE, p_value_in_words

# The share of the drawn tokens that are drawn at the one place (`choose_place`).
_SHARE_AT_PLACE = 0.5
# With num_draws=auto, at least this many tokens are drawn.
_FEWEST_TOKENS = 2000
# The requests of the second round are sent in this many parts. Before each part, the run stops if the arm is already
# known to be lossy.
_NUM_LOOKS = 4


def scored_checks(asking: Asking, arm: Arm, reference: Reference) -> Iterator[Columns]:
    """Yield the checks of an arm's answers against the probabilities of a reference.

    If the reference is a regular arm, its own answers are checked first. If they do not follow the log-probabilities
    that it reports, it is no reference, and the arm under test is not checked.

    Raises:
        RunError: requests failed, or answers have no token ids.
        KeyboardInterrupt: the run was interrupted. The checks of the arm under test so far are yielded before; while a
            regular arm is checked, there are none.
    """
    if isinstance(reference, ReportedReference):
        regular = reference.arm
        asking_regular = replace(asking, with_logprobs=True)
        regular_scores = Scores(reference, asking_regular)
        _ask(asking_regular, regular, reference, regular_scores)
        yield _reference_check(regular, regular_scores.so_far)
        if is_lossy(regular_scores.so_far):
            return
    scores = Scores(reference, asking)
    try:
        _ask(asking, arm, reference, scores)
    except KeyboardInterrupt:
        # Before the end, a check can only show a loss. So of the checks at the last look, all others are undecided.
        if not scores.so_far:
            say(
                f"no verdict: interrupted before the first check of the {arm.name} arm was complete"
            )
        for check in scores.so_far:
            verdict = "lossy" if check["verdict"] == "lossy" else "undecided"
            yield check | {"verdict": verdict}
        raise
    yield from scores.so_far


def _ask(asking: Asking, arm: Arm, reference: Reference, scores: Scores) -> None:
    """Send an arm two rounds of requests, the second of which continues answers of the first, and score all answers.

    If the reference is this arm itself (`ReportedReference`), the first round also measures the reference's rounding.

    Args:
        scores: receives the answers. Afterwards its `so_far` contains the checks.

    Raises:
        RunError: requests failed, or answers have no token ids.
    """
    settings = asking.settings
    num_in_flight = settings.batch_size
    # The mean number of tokens of a drawn text that is not at the one place (`most_drawn`).
    mean_length = (1 + most_drawn(settings.decoding.max_new_tokens)) / 2
    length_at_place = tokens_at_place(settings.decoding)
    # The share of drawn tokens that are the first of their text and so are not tested, because speculation does not
    # decide them: 0.5 / 16.5 + 0.5 / 6 = 0.11 with K=4, for texts of 16.5 tokens on average and 6 tokens at the place.
    share_untested = (1 - _SHARE_AT_PLACE) / mean_length + _SHARE_AT_PLACE / length_at_place

    def num_needed(rounding: float) -> int:
        """The number of drawn tokens that is enough, with 5 % to spare; 0 if no number is."""
        # `needed` counts only tokens that speculation decides.
        num_decided = asking.token_test.needed(rounding) or 0
        return math.ceil(1.05 * num_decided / (1 - share_untested))

    num_enough = num_needed(rounding=0.0)
    num_tokens = max(_FEWEST_TOKENS, num_enough)
    if settings.num_draws != "auto":
        num_tokens = settings.num_draws
    tested = "greedy texts"
    too_few = ""
    if asking.samplings:
        num_settings = counted(len(asking.samplings), "sampling setting")
        tested += f" and {num_tokens:,} drawn tokens over {num_settings}"
        if num_tokens < num_enough:
            too_few = f": too few to see a shift of {settings.shift:g}, which needs {num_enough:,}"
        elif not num_enough:
            too_few = f": a shift of {settings.shift:g} is too small to be seen"
    say(f"testing the {arm.name} arm with {tested}, {num_in_flight} in flight{too_few}")
    # For each of the two rounds, the number of drawn texts that are not at the one place.
    num_mixed = math.ceil((1 - _SHARE_AT_PLACE) * num_tokens / mean_length / 2)
    workload = Workload(asking)
    first = asking.ask(arm, workload.first_turns(num_mixed), num_in_flight, "asking, first turns")
    # Drawn texts are scored before greedy ones, whose tolerances depend on the rounding that was measured before.
    scores.add([answer for answer in first if not answer.request.is_greedy])
    if isinstance(reference, ReportedReference) and arm is reference.arm:
        texts = [
            (answer.request.prompt, answer.record.token_ids)
            for answer in first
            if answer.request.is_compared and answer.record.token_ids
        ]
        # Three times, because the largest 1 % of the differences are left out of this figure. No measurement of the
        # factor is recorded.
        reference.learn_rounding(texts, 3 * scores.rounding_of_drawn())
    scores.add([answer for answer in first if answer.request.is_greedy])
    scores.look()
    at_place: Sequence[PlannedRequest] = []
    # The place is chosen from texts with the first sampling setting, with which it is then continued.
    drawn = [text for text in scores.drawn if text.answer.request.sampling in asking.samplings[:1]]
    if drawn:
        place = choose_place(drawn)
        # Draw at the place as many tokens as are left after both rounds of other texts. The second round draws about as
        # many as the first one did. (These may be fewer than planned, because some texts ended early.)
        drawn_per_round = sum(len(scored.text.tokens) for scored in scores.drawn)
        num_left = max(0, num_tokens - 2 * drawn_per_round)
        num_at_place = math.ceil(num_left / length_at_place)
        at_place = workload.at_place(place, num_at_place)
    second = workload.second_turns(first, num_mixed, at_place, num_in_flight)
    for requests in in_batches(second, max(1, math.ceil(len(second) / _NUM_LOOKS))):
        # The test may be stopped at any time (`results.statistics.bets`), so once a loss is found, no more answers are
        # needed.
        if is_lossy(scores.so_far):
            break
        scores.add(asking.ask(arm, requests, num_in_flight, "asking, second turns"))
        scores.look()
    # The check of drawn tokens is the last one, if there is any.
    last = scores.so_far[-1]
    if last["verdict"] == "undecided" and last["check"] == "sampled":
        num_wanted = num_needed(last["rounding"])
        # With some evidence of a loss, even enough power gives no verdict. Twice as many draws confirm or refute it.
        if last["evidence"] >= NOTABLE_EVIDENCE:
            num_wanted = max(num_wanted, 2 * last["num_draws"])
        if num_wanted > max(num_tokens, last["num_draws"]):
            last["num_draws_needed"] = num_wanted


def _reference_check(arm: Arm, checks: Sequence[Columns]) -> Columns:
    """A check of whether a regular arm's texts follow the log-probabilities that it reports for them.

    Args:
        checks: the checks of `Scores` for this arm: that of greedy texts; then that of drawn tokens, if the run has
            sampling settings. A regular arm has no check of kernels.
    """
    greedy, *drawn = checks
    columns = dict(greedy)
    # The check covers greedy and drawn texts, so its row keeps the temperature of the settings.
    del columns["temperature"]
    evidence = f"greedy texts: {greedy['identical_prompts']} of {greedy['num_prompts']} identical"
    for sampled in drawn:
        num_past_end = columns["num_past_end"] + sampled["num_past_end"]
        columns |= sampled | {"num_past_end": num_past_end}
        evidence += f"; drawn tokens have a p-value of {p_value_in_words(sampled['p_value'])}"
    if columns["num_past_end"]:
        evidence += f"; {counted(columns['num_past_end'], 'text')} went on past an end"
    finding = None
    if is_lossy(checks):
        finding = (
            "the regular server is no reference: its own texts do not follow the log-probabilities"
            f" that it reports of them ({evidence}); at temperature=1 the tokens whose"
            " log-probabilities it does not send matter least"
        )
    elif any(check["verdict"] != "lossless" for check in checks):
        finding = (
            "nothing shows yet that the regular server's own texts follow the log-probabilities"
            f" that it reports of them ({evidence})"
        )
    return columns | {
        "check": "reference",
        "arm": arm.name,
        "verdict": "undecided" if finding else "lossless",
        "finding": finding,
    }


_LOSSY = "by definition this is lossy, although the check shows no loss"
_REGULAR = "a server of the same model that does not speculate, by regular_url= or after --"


class RecoveryExperiment(Experiment[RecoverySettings, RecoveryRow]):
    """Sends requests to the arm under test (the engine's last one), and checks its answers against the best reference
    that is available.

    Attributes:
        refused: names of the sampling settings that the engine refused.
        num_skipped: how many prompts were too long.
        has_weights: whether the answers are compared with the model's weights.
        drafted: whether the arm under test drafted any token; None if nothing reports it.
        checks: the columns of each check so far.
    """

    def __init__(self, settings: RecoverySettings) -> None:
        self.settings = settings
        self.prompt_set = load_prompts(settings.prompts)
        available = len(self.prompt_set.prompts)
        self.prompts = self.prompt_set.take(min(settings.num_prompts, available))
        self.refused: Sequence[str] = ()
        self.num_skipped = 0
        self.has_weights = False
        self.drafted: bool | None = None
        self.checks: list[Columns] = []

    def measure(self, session: Session) -> None:
        # Checks are added one by one, so that the checks before an error have rows.
        for check in self._checks(session):
            self.checks.append(check)

    def rows(self, session: Session) -> list[RecoveryRow]:
        """One row per check; a single row without a check if none was made."""
        arm = self.settings.arms[-1]
        prepared_share = None
        finding = None
        if session.engine is not None:
            # For a single server, the arm's name is only known once it has answered.
            arm = session.engine.arms[-1].name
            prepared_share = session.engine.prepared_share
            if self.has_weights and session.served_instead:
                weights = f"compared with the weights of {self.settings.model.name}"
                finding = f"{weights}, and the servers name {' and '.join(session.served_instead)}"
        common: dict[str, Any] = {
            "arm": arm,
            "prepared_share": prepared_share,
            "finding": finding,
            "prompts_digest": self.prompt_set.digest,
            "refused": ", ".join(self.refused) or None,
            "num_skipped": self.num_skipped,
            "drafted": self.drafted,
        }
        rows = [session.row(RecoveryRow, **common | check) for check in self.checks or [{}]]
        return [
            replace(row, verdict="undecided", finding=row.finding or _LOSSY)
            if row.lossy and row.verdict == "lossless" and row.check != "reference"
            else row
            for row in rows
        ]

    def _checks(self, session: Session) -> Iterator[Columns]:
        """Open the engine, look for a reference, and yield the columns of each check."""
        settings = self.settings
        most = settings.decoding.max_new_tokens
        # In the second round, a prompt is followed by an answer, a second turn and its answer.
        answers = f"two answers of decoding.max_new_tokens={most} and the question between them"
        encoded = session.encoder.encode_set(
            self.prompt_set, self.prompts, 2 * most + FOLLOW_UP + 1, answers
        )
        self.num_skipped = encoded.num_skipped
        prompts = encoded.token_ids
        # A variant of a prompt may have one token more (`Workload.first_turns`), and a prompt of the second round also
        # contains an answer and a second turn.
        longest = encoded.longest + 1 + most + FOLLOW_UP
        session.place(settings.batch_size, longest)
        # The engine prepares its calls for all sampling settings, also for those that the user leaves out.
        tried = [sampling.decoding for sampling in samplings(settings.decoding)]
        greedy = replace(settings.decoding, temperature=0)
        engine = session.open(settings.batch_size, longest, [*tried, greedy])
        arm = engine.arms[-1]
        taken, self.refused = taken_samplings(arm, settings, prompts[0])
        references = References(settings, session.planned, engine)
        reference = self._reference(session, references, prompts)
        if isinstance(reference, ReportedReference):
            num_top = settings.top_logprobs
            known = [sampling for sampling in taken if sampling.is_known_by(num_top)]
            if len(known) < len(taken):
                names = ", ".join(sampling.name for sampling in taken if sampling not in known)
                say(f"not tested, because top_logprobs={num_top} is not enough: {names}")
            taken = known
        # Both arms get the same requests, so end tokens are used only if both arms support them.
        can_end = all(each.traits.stops_at_tokens for each in engine.arms)

        def keep(name: str, answers: Sequence[Answer], counts: Counts) -> None:
            if name == arm.name:
                proposed = Drafts.total(each.record.as_drafts for each in answers).proposed
                by_answers = None if proposed is None else proposed > 0
                for drafted in (by_answers, counter_columns(counts).get("drafted")):
                    if drafted is not None:
                        self.drafted = drafted or bool(self.drafted)
            rows = [
                session.row(
                    RecoveryTextRow,
                    arm=name,
                    sampling=request.sampling.name,
                    prompt_token_ids=[*request.prompt],
                    token_ids=None if record.from_text else [*record.token_ids],
                    is_tested=request.is_compared,
                )
                for request, record in answers
            ]
            session.append(TEXTS_FILE, rows)

        asking = Asking(settings, prompts, taken, session.end_tokens(), can_end, keep=keep)
        regular = engine.arms[0] if len(engine.arms) > 1 else None
        if reference is not None:
            self.has_weights = not isinstance(reference, ReportedReference)
            yield from scored_checks(asking, arm, reference)
            return
        self.has_weights = references.for_texts() is not None
        if regular is not None or self.has_weights:
            whose = "the weights write" if self.has_weights else "the regular server writes"
            say(f"greedy texts are compared with those that {whose}")
            yield greedy_check(asking, arm, regular, references, session.tokenizer)
            if not taken:
                return
        if taken:
            # There is no reference for tokens: the arm sends no token ids, or there are neither weights nor a regular
            # arm. (`RecoverySettings.check_engine` refuses some of these cases before.)
            why = (
                "sampled texts are tested by their token ids, against weights that load here (model=) or a regular"
                f" server's log-probabilities: vLLM (with --max-logprobs={settings.top_logprobs}) and"
                " llama.cpp send both"
            )
        else:
            why = self._nothing_known()
        yield {"check": "reference", "verdict": "undecided", "finding": why}

    def _nothing_known(self) -> str:
        """The reason why there is nothing to compare greedy texts with, and what to change."""
        beyond_model = self.settings.engine.beyond_model
        if beyond_model is not None:
            return f"weights could not predict the answers with {beyond_model}: give {_REGULAR}"
        return f"there is nothing to compare with: give {_REGULAR}, or a model= whose weights load here"

    def _reference(
        self, session: Session, references: References, prompts: Sequence[Sequence[int]]
    ) -> Reference | None:
        """The weights, or the regular arm's log-probabilities; None if neither is available. With
        `reference=weights`, only the weights count.

        Raises:
            SettingError: if the run asks for a regular arm, and there is none that may report log-probabilities of
                texts with token ids.
            RunError: if the run asks for a regular arm, and that arm refuses to report log-probabilities of a text.
        """
        settings = self.settings
        engine = session.engine
        assert engine is not None
        regular, *others = engine.arms
        reports_ids = all(arm.traits.reports_token_ids for arm in engine.arms)
        wants_regular = settings.reference == "regular"
        if not wants_regular:
            weights = references.for_texts() if reports_ids else None
            if weights is not None or settings.reference == "weights":
                return weights
        reads_ids = reports_ids and settings.engine.beyond_model is None
        if not (others and reads_ids and regular.scores):
            rule = (
                "needs model= for its tokenizer, and a second arm (engine.regular_url, or a draft) that sends token ids"
                " and log-probabilities of texts"
            )
            require(not wants_regular, "reference", rule, settings.reference)
            return None
        num_tokens = len(session.tokenizer)
        try:
            return ReportedReference(
                regular, prompts[0], num_tokens, settings.top_logprobs, settings.batch_size
            )
        except RunError as error:
            if wants_regular:
                raise
            say(f"the regular arm is no reference: {error}")
            return None


def greedy_check(
    asking: Asking, arm: Arm, regular: Arm | None, references: References, tokenizer: Tokenizer
) -> Columns:
    """The check of an arm's greedy texts against texts generated from the weights or, without weights, against the
    texts of a regular arm. The regular arm gets one request at a time.

    This check is made if no log-probabilities of texts are known: for some servers, for chats, and with a grammar.

    Args:
        regular: the regular arm, which is only used if `references` have no weights; None if there is none.

    Raises:
        RunError: requests failed.
    """
    num_in_flight = asking.settings.batch_size
    has_weights = references.for_texts() is not None
    if has_weights:
        # Servers differ in whether a text includes the token that ends it.
        asking = replace(asking, can_end=False)
    # Drawn texts are in flight at the same time to disturb the greedy ones, but they are not tested.
    requests = Workload(asking).first_turns(len(asking.prompts))
    say(f"testing the {arm.name} arm: {len(requests):,} requests, {num_in_flight} in flight")
    answers = [
        answer
        for answer in asking.ask(arm, requests, num_in_flight, "asking")
        if answer.request.is_greedy and answer.request.is_compared
    ]
    texts = GreedyTexts(asking.end_tokens)
    if has_weights:
        for planned, record in answers:
            parting = references.text_divergence(planned.prompt, record.text, planned.num_tokens)
            # `text_divergence` already reports a text that ends too early, so no length is required here.
            texts.add(parting, replace(planned, num_tokens=0), record)
    elif regular is not None:
        doing = f"asking the {regular.name} arm"
        expected = asking.ask(regular, [answer.request for answer in answers], 1, doing)
        for (planned, record), (_, wanted) in zip(answers, expected, strict=True):
            # The logits of two servers are unknown here, so a divergence has no margin.
            parting = answers_divergence(None, tokenizer, planned.prompt, wanted, record)
            texts.add(parting, planned, wanted, record)
    acceptance = Drafts.total(each.record.as_drafts for each in answers)
    return with_ends(texts.columns(), answers) | {"acceptance": acceptance}
