"""The measurement of `acceptance`: the target reads each text in one pass. A draft model reads it, too; any other draft
makes a proposal after each of its tokens. To estimate rounding, or under another condition, texts are read again.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.commands.acceptance.answers import Answers, AnswerSource, of_one_answer
from harness.commands.acceptance.causes import (
    Condition,
    asked_conditions,
    drafted_greedily,
    reread_conditions,
)
from harness.commands.acceptance.record import AcceptanceSettings
from harness.commands.acceptance.served import (
    Share,
    are_own,
    likelihood_columns,
    limits,
    repeated_share,
    served_columns,
    why_impossible,
)
from harness.commands.command import Experiment
from harness.config.command_line import is_typed
from harness.config.demand import Demand
from harness.config.errors import HarnessError, RunError, SettingError
from harness.engines.divergence import check_known
from harness.engines.door import local
from harness.engines.door.reading import ReadText, num_together
from harness.engines.record import engine_of
from harness.measuring.acceptance import longest_of, tokens_in_burst
from harness.measuring.progress import progress, say
from harness.measuring.prompts.encoding import Encoder
from harness.measuring.prompts.transcripts import Reading
from harness.measuring.session import Session
from harness.results.drafts import Drafts
from harness.results.judging.acceptance import (
    AcceptanceFinding,
    engine_statement,
    finding_of,
)
from harness.results.rows.acceptance import (
    CAUSES_FILE,
    TEXTS_FILE,
    AcceptanceCauseRow,
    AcceptanceRow,
    AcceptanceTextRow,
    row_in_question,
)
from harness.results.statistics import iterations
from harness.results.statistics.interval import Interval
from harness.results.statistics.proportions import wilson_interval
from harness.results.statistics.ratios import ExtraIterations, ratio_of_totals

if TYPE_CHECKING:
    from harness.local.drafting.method import Pair
    from harness.local.engine.pair import PlacedPair, PlannedPair
    from harness.local.engine.reading import PairReader

# The predicted acceptance rate of a draft token that is never verified.
_NEVER = Interval(0.0, 0.0, 0.0)


class AcceptanceExperiment(Experiment[AcceptanceSettings, AcceptanceRow]):
    """Reads texts with both models of a pair, and computes what is accepted for every K.

    Attributes:
        source: provides the answers.
        texts: a row for each text that was read.
        answers: the answers of the run as typed.
        causes: a row for each condition and draft position.
        served: columns about the engine in another process that wrote the texts; empty if there is none, or without
            weights.
        compared_k: the K for which engine and weights are compared: the K of an engine in another process, otherwise
            the settings' K (at most `most`).
        most: the largest K for which acceptance is computed.
        pair: the models; only set after `_read_as_typed`, and never without weights.
    """

    def __init__(self, settings: AcceptanceSettings) -> None:
        self.settings = settings
        self.source = AnswerSource(settings)
        self.texts: list[AcceptanceTextRow] = []
        self.answers = Answers([])
        self.causes: list[AcceptanceCauseRow] = []
        self.served: dict[str, Any] = {}
        typed_k = settings.decoding.most_draft_tokens
        is_elsewhere = self.source.kind == "served"
        asks_for_k = is_elsewhere or settings.card is not None or is_typed("num_draft_tokens")
        self.most = max(settings.up_to, typed_k) if asks_for_k else settings.up_to
        self.compared_k = min(typed_k, self.most)

    def measure(self, session: Session) -> None:
        """Get the answers, read them with the weights (if there are any), and then measure causes of low acceptance."""
        settings = self.settings
        as_typed = Condition(None, None, settings)
        first_command: list[Answers] = []
        if self.source.kind == "given":
            self.answers = self.source.given(session)
        else:
            # With two commands, the second one is the run as typed; the first one is a condition to compare it with.
            *first_command, self.answers = self.source.asked(session, as_typed)
        if not self.answers.readings:
            rule = (
                "has no answer of two tokens or more: raise decoding.max_new_tokens, or take others"
            )
            raise SettingError("prompts", rule, settings.prompts.name)
        if self.source.kind == "served":
            # The longest draft that was seen.
            drafted = longest_of(self.answers.requests)
            if settings.has_weights:
                # The weights are compared at the typed K, unless longer drafts were seen.
                drafted = max(self._typed_k or 0, drafted or 0) or None
            elif drafted is None:
                if impossible := why_impossible(self.answers.requests):
                    raise RunError(impossible)
                reason = "it drafts nothing, or does not count them"
                if settings.batch_size > 1:
                    reason += ", or counts them for all requests together: batch_size=1 reads these counters"
                raise RunError(f"the server reported no draft tokens: {reason}")
            if drafted is None:
                raise SettingError("K", "must be typed (K=4): the server reported no draft tokens")
            self.compared_k = drafted
            self.most = max(settings.up_to, self.compared_k)
        placed: PlacedPair | None = None
        if settings.has_weights:
            # With an engine in this process, the session has placed the pair, and loads it. Otherwise the pair is only
            # needed to read a server's answers.
            placed = session.placed or self._placed_here(settings)
            self._read_as_typed(session.pair if session.placed is not None else placed.load())
        self.texts = self._text_rows(session)
        session.append(TEXTS_FILE, self.texts)
        self._add_cause(session, as_typed, self.answers)
        for answers in first_command:
            words = "with the first command"
            longest = longest_of(answers.requests)
            if longest not in (None, self.compared_k):
                words += f", which drafts up to {longest} tokens"
            condition = Condition("command", words, settings)
            self._add_cause(session, condition, answers, is_asked=True)
        try:
            if settings.causes != "none":
                self._find_causes(session, placed)
        finally:
            session.append(CAUSES_FILE, self.causes)

    def _placed_here(self, settings: AcceptanceSettings) -> PlacedPair:
        """The pair with room for its weights in this process, to read the answers of an engine in another process."""
        planned: PlannedPair = local("engine.pair").plan_pair(
            settings.model, settings.draft, settings.placement, settings.dtype
        )
        transcripts = [reading.transcript for reading in self.answers.readings]
        longest = max(len(transcript.token_ids) for transcript in transcripts)
        demand = Demand(
            batch_size=min(num_together(longest), len(transcripts)),
            prompt_tokens=max(len(transcript.prompt) for transcript in transcripts),
            new_tokens=settings.decoding.max_new_tokens,
            num_draft_tokens=self.most,
            runner="eager",
        )
        return planned.place(demand, force=settings.force)

    def _read_as_typed(self, pair: Pair) -> None:
        """Read the answers, and compare an engine in another process with its weights.

        If the engine accepts as much as predicted only for greedy drafting, the settings are changed to greedy
        drafting.
        """
        self.pair = pair
        as_typed = Condition(None, None, self.settings)
        readings, requests = self.answers.readings, self.answers.requests
        self.answers.read = self._read(pair, readings, as_typed, self.most)
        if self.source.kind != "served":
            return
        k, k_is_typed = self.compared_k, self._typed_k == self.compared_k
        self.served = served_columns(self.answers.read, requests, k, is_typed=k_is_typed)
        if not self._may_be_greedy or self._is_as_weights(self.served):
            return
        # Only the settings of this condition are used.
        greedy = drafted_greedily(as_typed)
        read = self._read(pair, readings, greedy, self.most)
        served = served_columns(read, requests, k, is_typed=k_is_typed)
        if self._is_as_weights(served):
            say("the server drafts greedily, as draft.sampling=greedy: so do the figures")
            self.settings, self.answers.read, self.served = greedy.settings, read, served

    @property
    def _typed_k(self) -> int | None:
        """The K of an engine in another process, if it was typed as a setting or fills `{K}` in the server's command;
        otherwise None.
        """
        k: int | None = engine_of(self.settings).columns(self.settings).get("num_draft_tokens")
        return k

    def _is_as_weights(self, served: dict[str, Any]) -> bool:
        """Whether the engine accepts as much as its weights predict; False if that is unknown."""
        engine = engine_statement(AcceptanceRow(**served))
        return engine is not None and engine.is_judged_open

    @property
    def _may_be_greedy(self) -> bool:
        """Whether the engine may propose the draft's likeliest tokens, as most servers do, although the settings are
        for drawn ones. This changes what is accepted only if the target samples.
        """
        settings = self.settings
        draws = settings.draft_sampling == "target"
        return self.source.kind == "served" and draws and settings.decoding.temperature > 0

    def _finding(self, session: Session) -> AcceptanceFinding:
        """What the measurements so far show about the acceptance."""
        row = row_in_question(self.rows(session))
        return finding_of(row, self.causes)

    def _find_causes(self, session: Session, placed: PlacedPair | None) -> None:
        """Measure acceptance under other conditions that may explain it, if the settings ask for that, or if acceptance
        is low or not as predicted.

        The conditions that read the same answers come first, because they need no new answers.
        """
        settings = self.settings
        is_asked_for = settings.causes != "auto"
        has_template = bool(getattr(session.tokenizer, "chat_template", None))
        finding = self._finding(session)
        # Only an engine in another process may have drafted in another way than its weights here.
        if self.served and (is_asked_for or finding.is_in_doubt):
            tried = [
                self._read_otherwise(session, condition)
                for condition in reread_conditions(settings, has_template)
            ]
            finding = self._finding(session)
            if self._may_be_greedy and not finding.explaining:
                for condition in tried:
                    # A condition with `why_not` has its rows already.
                    if not condition.why_not:
                        self._read_otherwise(session, drafted_greedily(condition))
                finding = self._finding(session)
        is_unexplained = finding.is_in_doubt and not finding.explaining
        if not (is_asked_for or finding.is_little or is_unexplained):
            return
        longest = max(len(reading.transcript.prompt) for reading in self.answers.readings)
        trained = local("engine.planning").trained_length(placed) if placed else None
        is_given = self.source.kind == "given"
        for condition in asked_conditions(settings, has_template, longest, trained, is_given):
            answers = Answers([])
            if not condition.why_not:
                # Of two commands, the second one is the run as typed.
                answers = self.source.asked(session, condition)[-1]
                if placed is not None:
                    answers.read = self._read(
                        self.pair, answers.readings, condition, self.compared_k
                    )
            self._add_cause(session, condition, answers, is_asked=True)

    def _read_otherwise(self, session: Session, condition: Condition) -> Condition:
        """Read the same answers as if an engine under this condition had drafted them, and add the condition's rows, if
        it applies to this draft and K. Return the condition, with the reason if it cannot be measured.
        """
        pair: Pair | None = self.pair
        readings, requests = self.answers.readings, self.answers.requests
        if condition.num_unused >= self.compared_k:
            return condition
        if condition.cause == "quantization" and not condition.why_not:
            try:
                pair = self._placed_here(condition.settings).load()
            except HarnessError as error:
                # Such as weights that are quantized already, or that do not fit beside the others.
                condition = replace(condition, why_not=str(error).partition("\n")[0])
        if condition.why_not:
            self._add_cause(session, condition, Answers(readings, requests))
            return condition
        if condition.fault is not None:
            pair = local("engine.reading").drafting_wrong(self.pair, condition.fault)
        elif condition.cause == "template":
            encoder = Encoder(session.planned, condition.settings)
            asked = encoder.encode([reading.prompt for reading in readings])
            readings = [
                of_one_answer(reading.prompt, token_ids, answer)
                for reading, token_ids, answer in zip(
                    readings, asked, self.answers.token_ids, strict=True
                )
            ]
        # `drafting_wrong` returns None if this kind of draft cannot have the fault.
        if pair is not None:
            read = self._read(pair, readings, condition, self.compared_k)
            self._add_cause(session, condition, Answers(readings, requests, read))
        return condition

    def _add_cause(
        self, session: Session, condition: Condition, answers: Answers, *, is_asked: bool = False
    ) -> None:
        """Add the rows about a condition: one for all draft tokens together, and one for each position.

        Args:
            answers: those under the condition. If it cannot be measured: no answers or, for a condition that reads the
                same answers, these answers without what the weights predict.
            is_asked: whether new answers were generated under this condition.
        """
        k = self.compared_k
        if condition.cause == "command":
            k = longest_of(answers.requests) or k
        num_used = k - condition.num_unused
        own_texts = are_own(answers.read) if answers.read else None
        for offset in (None, *range(k)):
            figures: dict[str, Any] = {}
            total = Share.total([*answers.shares(k, offset).values()])
            if answers.requests and total.whole:
                figures["served"] = Interval(total.part / total.whole)
                if offset is not None:
                    figures["served"] = wilson_interval(round(total.part), round(total.whole))
            if answers.read:
                is_used = offset is None or offset < num_used
                # If the engine's counts are not known, the number of tests is the one that the weights predict.
                num_tested = total.whole if figures else np.inf
                figures["weights"] = (
                    limits(answers.read, num_used, offset, num_tested) if is_used else _NEVER
                )
            if is_asked:
                figures["relative"] = self._relative(answers, k, offset)
            row = session.row(
                AcceptanceCauseRow,
                cause=condition.cause,
                condition=condition.words,
                is_asked=is_asked,
                why=condition.why_not or (None if answers.readings else "no answer has two tokens"),
                own_texts=own_texts,
                position=None if offset is None else offset + 1,
                **figures,
            )
            self.causes.append(row)

    def _relative(self, answers: Answers, num_draft_tokens: int, offset: int | None) -> Interval:
        """Return the share (`Answers.shares`) of these answers divided by the share of the answers as typed.

        Only prompts with answers of both kinds count. With too few, the ratio has no bounds or is unknown.

        Args:
            num_draft_tokens: the K for `answers`; for the answers as typed it is `compared_k`.
            offset: as for `Answers.shares`.
        """
        shares = answers.shares(num_draft_tokens, offset)
        typed = self.answers.shares(self.compared_k, offset)
        both = [(*shares[index], *typed[index]) for index in sorted(shares.keys() & typed.keys())]
        # [4, num_prompts]: in each column the part and the whole of one prompt's share here, and then as typed.
        totals = np.array(both).T
        if not both or not totals.sum(axis=1).all():
            return Interval()
        part, whole, typed_part, typed_whole = totals
        # (part / whole) / (typed_part / typed_whole) is computed as a product of totals over a product of totals. At a
        # single position, a prompt may have no accepted draft token.
        with np.errstate(divide="ignore", invalid="ignore"):
            return ratio_of_totals([part, typed_whole], [whole, typed_part])

    def _text_rows(self, session: Session) -> list[AcceptanceTextRow]:
        """A row for each answer. Its `num_tokens` leaves out the first token, which no iteration decides."""
        rows = []
        # Texts of equal prompts get the index of the first such prompt, because they are one unit of an interval. If
        # weights did not read the texts, or no engine answered, `read` or `requests` is empty.
        first_index: dict[str, int] = {}
        answers = self.answers
        for (reading, answer, turn), token_ids, text, request in itertools.zip_longest(
            answers.spans, answers.token_ids, answers.read, answers.requests
        ):
            prompt = reading.prompt
            known_ids: list[int] | None = [*token_ids]
            num_tokens = len(answer)
            if text is None and request is not None:
                # No model here has read the text, so its number of tokens is the server's count.
                num_tokens = request.num_tokens
                known_ids = None if request.from_text else known_ids
            row = session.row(
                AcceptanceTextRow,
                prompt_index=first_index.setdefault(repr(prompt.opening.chat()), prompt.index),
                category=prompt.category,
                turn=turn,
                context=answer.start,
                prompt=prompt.text if turn is None else None,
                completion=session.tokenizer.decode([*token_ids], skip_special_tokens=True),
                token_ids=known_ids,
                num_tokens=num_tokens - 1,
                iterations_by_num_draft_tokens=text and text.cut.iterations.round(6).tolist(),
            )
            rows.append(row)
        return rows

    def _read(
        self, pair: Pair, readings: Sequence[Reading], condition: Condition, most: int
    ) -> list[ReadText]:
        """Compute, for each K up to `most`, what is accepted of the transcripts' answers if an engine drafts under this
        condition.

        Raises:
            RunError: a token is not in the models' vocabulary.
        """
        settings = condition.settings
        for reading in readings:
            check_known(reading.transcript.token_ids, pair.vocabulary_size)
        is_greedy = settings.draft_sampling == "greedy"
        reader: PairReader = local("engine.reading").PairReader(
            pair,
            settings.decoding,
            most,
            greedy_draft=is_greedy,
            with_rounding=self.source.kind == "served",
            is_late=condition.fault == "late",
        )
        read: list[ReadText] = []
        try:
            with progress("reading texts", len(readings)) as advance:
                for texts in reader.read(reading.transcript for reading in readings):
                    read += texts
                    advance(None)
        finally:
            reader.close()
        return read

    def rows(self, session: Session) -> list[AcceptanceRow]:
        """With weights, one row for each K up to `most`; otherwise a single row, with the counts of a server if it has
        answered.
        """
        common: dict[str, Any] = {
            "prompts_digest": self.source.prompt_set.digest,
            "text_source": self.source.kind,
            "num_skipped": self.source.num_skipped,
        }
        if not self.answers.readings:
            return [session.row(AcceptanceRow, **common)]
        token_ids = self.answers.token_ids
        num_tokens = sum(text.num_tokens or 0 for text in self.texts) or None
        common |= {"num_texts": len(token_ids), "num_tokens": num_tokens}
        # Answers of one token were sent, too, but are not among these.
        num_sent = self.source.num_sent or len(token_ids)
        common["batch_size"] = min(self.settings.batch_size, num_sent)
        known_ids = [text.token_ids for text in self.texts if text.token_ids]
        common["repeated_share"] = repeated_share(known_ids) if known_ids else None
        # An interruption may come after texts were read with the weights, and before their rows are made.
        if not (self.answers.read and self.texts):
            return [session.row(AcceptanceRow, **common, **self._counted())]
        cuts = [text.cut for text in self.answers.read]
        common |= likelihood_columns(self.answers.read)
        # Name the model whose weights read the texts, even if the server reports another name.
        common["model"] = self.settings.model.name
        if self.served:
            common["draft_sampling"] = self.settings.draft_sampling
        rows = []
        unit = "conversation" if any(text.turn for text in self.texts) else "prompt"
        prompts = [text.prompt_index for text in self.texts]
        intervals = iterations.expected_tokens_per_iteration(cuts, prompts, unit)
        for k, tokens in enumerate(intervals, start=1):
            figures = common | {"num_draft_tokens": k, "tokens_per_iteration": tokens}
            figures |= iterations.expected_acceptance(cuts, k)
            if k == self.compared_k:
                figures |= self.served | {"is_in_question": True}
                figures["card_tokens_per_iteration"] = self.settings.promised_tokens(k)
            rows.append(session.row(AcceptanceRow, **figures))
        return rows

    def _counted(self) -> dict[str, Any]:
        """The columns that follow from an engine's counts, for a run without weights, or one that ends before these
        have read the texts.
        """
        columns = Drafts.total(each.as_drafts for each in self.answers.requests).columns()
        tokens = Interval()
        if shares := self.answers.shares(self.compared_k):
            num_tokens, num_iterations = np.array([*shares.values()]).T
            fewest = iterations.fewest_iterations(num_tokens, self.compared_k)
            extra = ExtraIterations(num_iterations, fewest)
            tokens = ratio_of_totals([num_tokens], [num_iterations], extra_iterations=extra)
        arrived = None if tokens.is_known else tokens_in_burst(self.answers.requests) or None
        names = ("acceptance_rate", "mean_acceptance_length", "marginal_acceptance_by_position")
        return {name: columns.get(name) for name in names} | {
            "num_draft_tokens": self.compared_k,
            "is_in_question": True,
            "tokens_per_iteration": tokens,
            "served_tokens_per_iteration": tokens.estimate if tokens.is_known else None,
            "arrived_tokens_per_iteration": arrived,
            "card_tokens_per_iteration": self.settings.promised_tokens(self.compared_k),
        }
