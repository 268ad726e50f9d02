"""`acceptance`: one pass of the target over texts, one of the draft for each depth at most, and what follows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.commands.acceptance.causes import Condition, askings, readings
from harness.commands.acceptance.record import AcceptanceSettings
from harness.commands.acceptance.served import (
    are_own,
    drafted_k,
    likelihood_columns,
    position_rows,
    repeated_share,
    served_columns,
)
from harness.commands.command import Experiment
from harness.config.amounts import counted
from harness.config.demand import Demand
from harness.config.errors import SettingError
from harness.config.settings import DecodingSettings
from harness.engines.counts import ImpossibleCounts
from harness.engines.door import local
from harness.engines.door.plans import PassBytes
from harness.engines.door.reading import TOGETHER, ReadText, Transcript, num_together
from harness.engines.protocol import Answered, Question, in_batches
from harness.engines.registry import engine_of
from harness.engines.requests import RequestRecord
from harness.engines.timing import timed_answer
from harness.measuring.acceptance import acceptance_columns, counted_drafts, tokens_in_burst
from harness.measuring.progress import progress, say
from harness.measuring.prompts.encoding import Encoded, Encoder, completion_ids, last
from harness.measuring.prompts.sets import Occurrence, Prompt, lines_in_words, load_prompts
from harness.measuring.prompts.transcripts import Reading
from harness.measuring.session import Session
from harness.results.judging.acceptance import LITTLE, engine_statement, finding_of
from harness.results.price.value import IterationCost
from harness.results.rows.acceptance import (
    CAUSES_FILE,
    TEXTS_FILE,
    AcceptanceCauseRow,
    AcceptanceRow,
    AcceptanceTextRow,
)
from harness.results.statistics import iterations
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import ratio_of_totals
from harness.results.texts import best_row

if TYPE_CHECKING:
    from harness.engines.door.pairs import AnyPair
    from harness.local.drafting.method import Pair
    from harness.local.engine.pair import PlacedPair, PlannedPair
    from harness.local.engine.reading import PairReader

# Texts that are taken where nothing is said: written now, or those that a file has.
WRITTEN = 15
GIVEN = 256
# An answer, where it is: in a reading, at these tokens, in this turn of a conversation or in none.
Answer = tuple[Reading, range, int | None]


@dataclass
class Answers:
    """Answers to prompts.

    Attributes:
        readings: prompts with their answers.
        requests: the same as an engine elsewhere reported them; [] of others.
        read: the same by the weights; [] where these are not here.
    """

    readings: Sequence[Reading]
    requests: Sequence[RequestRecord] = ()
    read: Sequence[ReadText] = ()

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(reading.transcript.prompt) for reading in self.readings]

    def iterations(self, num_draft_tokens: int) -> dict[int, tuple[float, float]]:
        """Tokens and iterations by prompt: as an engine reports, else by the weights; {} where neither is known."""
        totals: dict[int, tuple[float, float]] = {}
        for place, reading in enumerate(self.readings):
            number: float | None = None
            num_tokens = sum(len(answer) - 1 for answer in reading.transcript.answers)
            if self.requests:
                number = self.requests[place].num_iterations
                num_tokens = self.requests[place].num_tokens - 1
            elif len(self.read) == len(self.readings):
                number = float(self.read[place].cut.iterations[num_draft_tokens - 1])
            if not number:
                return {}
            before = totals.get(reading.prompt.index, (0.0, 0.0))
            totals[reading.prompt.index] = (before[0] + num_tokens, before[1] + number)
        return totals


class AcceptanceExperiment(Experiment[AcceptanceSettings, AcceptanceRow]):
    """Texts, read by both models of a pair.

    Attributes:
        texts: a row for each text that was read.
        answers: as typed.
        causes: a row for each condition and draft position.
        too_long: how many prompts were too long, by column.
        costs: of an iteration in target steps, by the bytes that it must read; of no K where these are unknown.
        served: columns about an engine elsewhere, which wrote the texts; empty otherwise.
        fits: what the draft's files say of the target; None without weights.
        compared_k: the K that it drafts with, or that a card is about.
        most: the largest K that is computed.
    """

    def __init__(self, settings: AcceptanceSettings) -> None:
        self.settings = settings
        self.prompt_set = load_prompts(settings.prompts)
        answered = [prompt for prompt in self.prompt_set.prompts if prompt.has_answers]
        self.source = "given" if answered else "written"
        if 0 < len(answered) < len(self.prompt_set.prompts):
            without = counted(len(self.prompt_set.prompts) - len(answered), "prompt")
            say(f"{without} without an answer left out")
            self.prompt_set = dataclasses.replace(self.prompt_set, prompts=tuple(answered))
        asked = settings.num_prompts
        automatic = min(len(answered), GIVEN) or min(len(self.prompt_set.prompts), WRITTEN)
        self.prompts = self.prompt_set.take(automatic if asked == "auto" else asked)
        self.texts: list[AcceptanceTextRow] = []
        self.answers = Answers([])
        self.causes: list[AcceptanceCauseRow] = []
        self.too_long: Counter[str] = Counter()
        self.costs = IterationCost()
        self.served: dict[str, Any] = {}
        self.fits: str | None = None
        typed_k = settings.decoding.most_draft_tokens
        self.most = settings.up_to if settings.card is None else max(settings.up_to, typed_k)
        self.compared_k = min(typed_k, self.most)

    def measure(self, session: Session) -> None:
        settings = self.settings
        is_elsewhere = not engine_of(settings).own_loop
        if is_elsewhere:
            # Of two commands the first is what the other is compared with.
            self.answers, *others = reversed(self._asked(session, Condition("", "", settings)))
        elif self.source == "written":
            [self.answers] = self._asked(session, Condition("", "", settings))
            others = []
        else:
            self.answers = Answers(self._given(session))
            others = []
        if not self.answers.readings:
            rule = "has no answer of two tokens or more"
            raise SettingError("prompts", rule, settings.prompts.name)
        if is_elsewhere:
            self.source = "served"
            typed = engine_of(settings).columns(settings).get("num_draft_tokens")
            self.compared_k = drafted_k(self.answers.requests, typed) or self.compared_k
            self.most = max(settings.up_to, self.compared_k)
        placed: PlacedPair | None = None
        if settings.has_weights:
            placed = session.placed or self._placed_here(settings)
            self._read_as_typed(session.pair if session.placed is not None else placed.load())
            self.fits = local("engine.fitting").fitting(placed, self.pair, self._token_ids)
            prompt_tokens = [answer.start for _, answer, _ in self._answer_places]
            self.costs = self._costs(placed, round(fmean(prompt_tokens)))
        self.texts = self._text_rows(session, self._answer_places)
        session.append(TEXTS_FILE, self.texts)
        self._add_cause(session, None, self.answers)
        for first in others:
            command = Condition("command", "with the first command", settings)
            self._add_cause(session, command, first, is_asked=True)
        self._find_causes(session, placed)

    @property
    def _has_turns(self) -> bool:
        return any(text.turn for text in self.texts)

    @property
    def _token_ids(self) -> list[Sequence[int]]:
        """The tokens of each answer."""
        return [
            reading.transcript.token_ids[answer.start : answer.stop]
            for reading, answer, _ in self._answer_places
        ]

    @property
    def _answer_places(self) -> list[Answer]:
        return [
            (reading, answer, turn)
            for reading in self.answers.readings
            for answer, turn in zip(reading.transcript.answers, reading.turns, strict=True)
        ]

    def _placed_here(self, settings: AcceptanceSettings) -> PlacedPair:
        """The draft's and the target's weights, to read what an engine elsewhere has written."""
        planned: PlannedPair = local("engine.pair").plan_pair(
            settings.model, settings.draft, settings.placement, settings.dtype
        )
        demand = Demand(
            min(TOGETHER, len(self.answers.readings)),
            max(self.answers.lengths),
            settings.decoding.max_new_tokens,
            settings.up_to,
            "eager",
        )
        return planned.place(demand, force=settings.force)

    def _read_as_typed(self, pair: Pair) -> None:
        """Read the answers, and compare an engine elsewhere with its weights."""
        self.pair = pair
        self.answers.read = self._read(pair, self.answers.readings)
        if self.source != "served":
            return
        requests = self.answers.requests
        self.served = served_columns(self.answers.read, requests, self.compared_k)
        if not self._may_be_greedy or not self._is_in_doubt:
            return
        read = self._read(pair, self.answers.readings, greedy_draft=True)
        served = served_columns(read, requests, self.compared_k)
        engine = engine_statement(AcceptanceRow(**served))
        if engine is not None and engine.is_judged and not engine.is_conclusion:
            say("the server drafts greedily, as draft.sampling=greedy: so do the figures")
            self.answers.read = read
            self.served = served | {"draft_sampling": "greedy"}

    @property
    def _may_be_greedy(self) -> bool:
        """Whether the engine may take the draft's likeliest tokens, as most servers do, which changes what is accepted
        where the target draws.
        """
        settings = self.settings
        draws = settings.draft is not None and settings.draft.sampling == "target"
        is_elsewhere = not engine_of(settings).computes_here
        return is_elsewhere and draws and settings.decoding.temperature > 0

    @property
    def _is_in_doubt(self) -> bool:
        """Whether an engine elsewhere did other than its weights, or it is not known."""
        if not self.served:
            return False
        engine = engine_statement(AcceptanceRow(**self.served))
        return engine is not None and (engine.is_conclusion or not engine.is_judged)

    def _find_causes(self, session: Session, placed: PlacedPair | None) -> None:
        """Measure under other conditions what may explain little acceptance, where there is a reason to."""
        settings = self.settings
        always = settings.causes not in ("auto", "none")
        has_template = bool(getattr(session.tokenizer, "chat_template", None))
        row = best_row(self.rows(session))
        finding = finding_of([row], row, self.causes)
        if placed is not None and self.source == "served" and (always or self._is_in_doubt):
            conditions = readings(settings, settings.chosen_causes, has_template)
            for is_greedy in (False, True):
                if is_greedy and (finding.named or not self._may_be_greedy):
                    break
                for condition in conditions:
                    self._read_otherwise(session, condition, is_greedy)
                finding = finding_of([row], row, self.causes)
        is_missed = finding.card is not None and finding.card.relation == "below"
        is_little = (row.acceptance_rate or 0.0) < LITTLE or is_missed
        is_unexplained = self._is_in_doubt and not finding.named
        if always or (settings.causes == "auto" and (is_little or is_unexplained)):
            longest = max(self.answers.lengths)
            trained = local("engine.fitting").trained_length(placed) if placed else None
            for condition in askings(
                settings, settings.chosen_causes, has_template, longest, trained, self.source
            ):
                if condition.why:
                    self._add_cause(session, condition, Answers([]), is_asked=True)
                    continue
                answers = self._asked(session, condition)[-1]
                if placed is not None:
                    answers.read = self._read(
                        self.pair,
                        answers.readings,
                        decoding=condition.settings.decoding,
                        most=self.compared_k,
                    )
                self._add_cause(session, condition, answers, is_asked=True)
        session.append(CAUSES_FILE, self.causes)

    def _read_otherwise(self, session: Session, condition: Condition, is_greedy: bool) -> None:
        """Read the same answers as an engine that differs from the run as typed would have drafted them.

        Args:
            is_greedy: whether its draft takes the likeliest tokens.
        """
        pair: Pair | None = self.pair
        readings = self.answers.readings
        changed = condition.settings
        if not condition.why and condition.cause == "quantization":
            pair = self._placed_here(changed).load()
        if not condition.why and condition.cause == "template":
            if self._has_turns:
                condition = dataclasses.replace(condition, why="conversations are read as typed")
            else:
                asked = Encoder(session.planned, changed).encode([r.prompt for r in readings])
                readings = [
                    _of_one_answer(reading.prompt, prompt, _only_answer(reading))
                    for reading, prompt in zip(readings, asked, strict=True)
                ]
        if condition.fault is not None:
            pair = local("engine.otherwise").with_fault(self.pair, condition.fault)
        if pair is None or (condition.fewer and self.compared_k < 2):
            return
        read: Sequence[ReadText] = []
        if not condition.why:
            read = self._read(
                pair,
                readings,
                decoding=changed.decoding,
                most=self.compared_k,
                is_late=condition.fault == "late",
                greedy_draft=is_greedy,
            )
        if is_greedy:
            condition = dataclasses.replace(condition, words=f"{condition.words}, drafted greedily")
        answers = Answers(readings, self.answers.requests, read)
        self._add_cause(session, condition, answers)

    def _add_cause(
        self,
        session: Session,
        condition: Condition | None,
        answers: Answers,
        *,
        is_asked: bool = False,
    ) -> None:
        """Add the rows about a condition; None for the run as typed."""
        k = self.compared_k
        columns: dict[str, Any] = {}
        if condition is not None:
            columns = {"cause": condition.cause, "condition": condition.words}
            columns |= {"is_asked": is_asked, "why": condition.why or None}
            k -= condition.fewer
            if condition.cause == "command":
                k = drafted_k(answers.requests, None) or k
        if answers.read:
            columns["own_texts"] = are_own(answers.read)
        by_position = position_rows(
            answers.read, answers.requests, k, k + condition.fewer if condition else k
        )
        if is_asked:
            by_position[0]["relative"] = _relative(answers, self.answers, k)
        self.causes += [session.row(AcceptanceCauseRow, **columns, **row) for row in by_position]

    def _asked(self, session: Session, condition: Condition) -> list[Answers]:
        """The answers of each arm that speculates, or the target's own, to equal prompts with different random numbers,
        and their records; without answers of a single token, which no iteration decides.
        """
        typed, self.settings = self.settings, condition.settings
        settings = self.settings
        new_tokens = settings.decoding.max_new_tokens
        prompts = self.prompts
        if condition.cause and self.source == "given":
            prompts = tuple(prompt.opening for prompt in prompts)
        encoded = session.encoder.encode_set(self.prompt_set, prompts, new_tokens)
        if condition.most_prompt_tokens is not None:
            most, bos_token = condition.most_prompt_tokens, session.tokenizer.bos_token_id
            short = [last(ids, most, bos_token) for ids in encoded.token_ids]
            encoded = dataclasses.replace(encoded, token_ids=short, chats=[])
        if not condition.cause:
            self.too_long.update(encoded.too_long)
        if settings.decoding.temperature > 0:
            # Texts of a prompt follow each other: they are read together.
            places = np.repeat(range(len(encoded.prompts)), settings.texts_per_prompt)
            encoded = encoded.part(places.tolist())
        num_rows = min(settings.batch_size, len(encoded.prompts))
        session.place(num_rows, encoded.longest, new_tokens)
        engine = session.open(settings.batch_size, encoded.longest)
        is_elsewhere = not engine_of(settings).own_loop
        arms = engine.arms if is_elsewhere else engine.arms[:1]
        requests: list[list[RequestRecord]] = [[] for _ in arms]
        num_asked: Counter[int] = Counter()
        batches = in_batches(range(len(encoded.prompts)), settings.batch_size)
        with progress("writing texts", len(batches)) as advance:
            for batch in batches:
                part = encoded.part(batch)
                indices = []
                for index in part.indices:
                    occurrence = Occurrence(index, repeat=num_asked[index])
                    indices.append(self.prompt_set.index(occurrence))
                    num_asked[index] += 1
                question = Question(session.requests(part.token_ids, indices, chats=part.chats))
                for arm, records in zip(arms, requests, strict=True):
                    answered = timed_answer(engine, arm, question)
                    _count(answered)
                    records += answered.requests
                advance(None)
        session.close()
        self.settings = typed
        return [_answers(encoded, records, is_elsewhere) for records in requests]

    def _text_rows(self, session: Session, answers: Sequence[Answer]) -> list[AcceptanceTextRow]:
        rows = []
        # Texts of equal prompts are counted together, by the index of the first.
        first_index: dict[str, int] = {}
        read: Sequence[ReadText | None] = self.answers.read or [None] * len(answers)
        for (reading, answer, turn), text in zip(answers, read, strict=True):
            prompt = reading.prompt
            token_ids = list(reading.transcript.token_ids[answer.start : answer.stop])
            row = session.row(
                AcceptanceTextRow,
                prompt_index=first_index.setdefault(repr(prompt.opening.chat()), prompt.index),
                category=prompt.category,
                turn=turn,
                context=answer.start,
                prompt=prompt.text if turn is None else None,
                completion=session.tokenizer.decode(token_ids, skip_special_tokens=True),
                token_ids=token_ids,
                num_tokens=len(answer) - 1,
                iterations_by_num_draft_tokens=text and text.cut.iterations.round(6).tolist(),
            )
            rows.append(row)
        return rows

    def _given(self, session: Session) -> list[Reading]:
        """Prompts with their answers; those that do not fit into a context together are refused, left out, or lose
        the end of the answers, as `prompts.too_long` says.
        """
        whole = {prompt.index: prompt for prompt in self.prompts}
        openings = tuple(prompt.opening for prompt in self.prompts)
        encoder = session.encoder
        encoded = encoder.encode_set(self.prompt_set, openings, 1, "one token of an answer")
        self.too_long.update(encoded.too_long)
        readings: list[Reading] = []
        for opening, token_ids in zip(encoded.prompts, encoded.token_ids, strict=True):
            prompt = whole[opening.index]
            if opening.following:
                readings += encoder.transcribe(prompt)
            else:
                answer = completion_ids(session.tokenizer, prompt)
                readings.append(_of_one_answer(prompt, token_ids, answer))
        readings = self._fitted(session.planned, readings)
        transcripts = [reading.transcript for reading in readings]
        longest_prompt = max((len(transcript.prompt) for transcript in transcripts), default=1)
        longest = max((len(transcript.token_ids) for transcript in transcripts), default=1)
        session.place(num_together(longest), longest_prompt, max(1, longest - longest_prompt))
        return readings

    def _fitted(self, planned: AnyPair, readings: Sequence[Reading]) -> list[Reading]:
        """The readings that fit, with answers of two tokens or more."""

        def is_long(reading: Reading) -> bool:
            prompt = reading.transcript.prompt
            num_answered = len(reading.transcript.token_ids) - len(prompt)
            return planned.excess([prompt], num_answered) is not None

        longest = max((len(reading.transcript.token_ids) for reading in readings), default=0)
        num_read = longest
        prompts = {reading.prompt.index for reading in readings}
        long = {
            reading.prompt.index: reading.prompt.line for reading in readings if is_long(reading)
        }
        if long:
            where = lines_in_words(long.values(), self.settings.prompts)
            problem = (
                f"{len(long)} of {len(prompts)} prompts are too long with their answers ({where})"
            )
            too_long = self.settings.prompts.too_long
            room = planned.room(0)
            if too_long == "skip" and len(long) < len(prompts):
                say(f"{problem} and are left out")
                self.too_long["num_skipped"] += len(long)
                readings = [reading for reading in readings if reading.prompt.index not in long]
            elif too_long == "truncate" and room is not None:
                say(f"{problem}: the answers are read as far as they fit")
                self.too_long["num_truncated"] += len(long)
                num_read = room
            else:
                rule = f"the longest has {longest} tokens, and the context {room}"
                advice = "prompts.too_long=skip leaves them out, truncate reads answers as far as they fit"
                raise SettingError("prompts", f"{problem}; {rule}; {advice}")
        held = [reading.until(num_read) for reading in readings]
        return [reading for reading in held if reading is not None]

    def _read(
        self,
        pair: Pair,
        readings: Sequence[Reading],
        *,
        decoding: DecodingSettings | None = None,
        most: int | None = None,
        greedy_draft: bool = False,
        is_late: bool = False,
    ) -> list[ReadText]:
        """Read the answers of transcripts.

        Args:
            most: the largest K; that of the run by default.
            is_late: whether a head gets the hidden states of the token before.
        """
        kind = (
            local("engine.otherwise").LateReader if is_late else local("engine.reading").PairReader
        )
        reader: PairReader = kind(
            pair, decoding or self.settings.decoding, most or self.most, greedy_draft=greedy_draft
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

    def _costs(self, placed: PlacedPair, prompt_tokens: int) -> IterationCost:
        """An iteration of each K in target steps, by the bytes that it must read."""
        numbers = range(1, self.most + 1)
        read = self.answers.read
        mean_answer = sum(text.num_tokens for text in read) // len(read)
        demand = Demand(1, prompt_tokens, mean_answer, num_draft_tokens=self.most, runner="eager")
        reads: PassBytes | None = local("engine.planning").pass_bytes(placed, demand, numbers)
        if reads is None:
            return IterationCost()
        return IterationCost.from_steps({k: reads.iteration_steps(k) for k in numbers})

    def rows(self, session: Session) -> list[AcceptanceRow]:
        common: dict[str, Any] = {
            "prompts_digest": self.prompt_set.digest,
            "text_source": self.source,
            **self.too_long,
        }
        if not self.answers.readings:
            return [session.row(AcceptanceRow, **common)]
        token_ids = self._token_ids
        num_tokens = sum(map(len, token_ids)) - len(token_ids)
        common |= {"num_texts": len(token_ids), "num_tokens": num_tokens}
        common |= {"repeated_share": repeated_share(token_ids), "fits": self.fits}
        if not self.answers.read:
            return [session.row(AcceptanceRow, **common, **self._counted())]
        cuts = [text.cut for text in self.answers.read]
        common |= likelihood_columns(self.answers.read)
        served = dict(self.served)
        if "draft_sampling" in served:
            common["draft_sampling"] = served.pop("draft_sampling")
        rows = []
        unit = "conversation" if self._has_turns else "prompt"
        prompts = [text.prompt_index for text in self.texts]
        intervals = iterations.tokens_per_iteration(cuts, prompts, unit)
        for number, tokens in enumerate(intervals, start=1):
            figures = common | {"num_draft_tokens": number, "tokens_per_iteration": tokens}
            figures |= iterations.expected_acceptance(cuts, number)
            if number == 1:
                guess = iterations.relative_to_guess(cuts, token_ids, prompts, unit)
                figures["relative_to_guess"] = guess
            if number in self.costs.ks():
                figures["expected_speedup"] = self.costs.speedup(tokens, number)
                figures["iteration_cost"] = self.costs.point(number).steps.estimate
            if number == self.compared_k:
                figures |= served | {"card_tokens_per_iteration": self.settings.promised_tokens}
            rows.append(session.row(AcceptanceRow, **figures))
        return rows

    def _counted(self) -> dict[str, Any]:
        """The columns that an engine's own counts give, of a run without weights."""
        columns = acceptance_columns(self.answers.requests)
        totals = self.answers.iterations(self.compared_k)
        tokens = Interval()
        if totals:
            num_tokens, num_iterations = np.array([*totals.values()]).T
            tokens = ratio_of_totals([num_tokens], [num_iterations])
        names = ("acceptance_rate", "mean_acceptance_length", "marginal_acceptance_by_position")
        return {name: columns.get(name) for name in names} | {
            "num_draft_tokens": self.compared_k,
            "tokens_per_iteration": tokens,
            "served_tokens_per_iteration": tokens.estimate if totals else None,
            "arrived_tokens_per_iteration": tokens_in_burst(self.answers.requests) or None,
            "card_tokens_per_iteration": self.settings.promised_tokens,
        }


def _count(answered: Answered) -> None:
    """Give the only answer to a question the draft tokens by position that the server's counters have of it."""
    [request, *others] = answered.requests
    if others or answered.counted is None or request.outcomes:
        return
    with suppress(ImpossibleCounts):
        counted_now = counted_drafts(answered.counted, answered.requests)
        if counted_now is not None and (request.drafts is None or counted_now.accepted_at):
            request.drafts = counted_now
            request.outcomes = list(counted_now.outcomes)
            request.count_undrafted()


def _answers(encoded: Encoded, records: Sequence[RequestRecord], is_elsewhere: bool) -> Answers:
    kept = [
        (_of_one_answer(prompt, token_ids, request.token_ids), request)
        for prompt, token_ids, request in zip(
            encoded.prompts, encoded.token_ids, records, strict=True
        )
        if len(request.token_ids) > 1
    ]
    requests = [request for _, request in kept] if is_elsewhere else []
    return Answers([reading for reading, _ in kept], requests)


def _relative(answers: Answers, typed: Answers, num_draft_tokens: int) -> Interval:
    """Tokens per iteration over those as typed, of the prompts that both have."""
    totals, typed_totals = (one.iterations(num_draft_tokens) for one in (answers, typed))
    prompts = sorted(totals.keys() & typed_totals.keys())
    if not prompts:
        return Interval()
    tokens, counts = np.array([totals[prompt] for prompt in prompts]).T
    typed_tokens, typed_counts = np.array([typed_totals[prompt] for prompt in prompts]).T
    return ratio_of_totals([tokens, typed_counts], [counts, typed_tokens])


def _only_answer(reading: Reading) -> Sequence[int]:
    [answer] = reading.transcript.answers
    return reading.transcript.token_ids[answer.start : answer.stop]


def _of_one_answer(prompt: Prompt, asked: Sequence[int], answer: Sequence[int]) -> Reading:
    return Reading(prompt, Transcript.of(asked, answer), [None])
