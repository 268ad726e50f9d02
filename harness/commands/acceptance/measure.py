"""`acceptance`: one pass of the target over texts, one of the draft for each depth at most, and what follows."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from statistics import fmean
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.commands.acceptance.health import (
    drafted_k,
    health_columns,
    likelihood_columns,
)
from harness.commands.acceptance.record import AcceptanceSettings
from harness.commands.command import Experiment
from harness.config.amounts import counted
from harness.config.demand import Demand
from harness.config.errors import SettingError
from harness.engines.door import local
from harness.engines.door.plans import PassBytes
from harness.engines.door.reading import TOGETHER, ReadText, Transcript, num_together
from harness.engines.protocol import Question, in_batches
from harness.engines.registry import engine_of
from harness.engines.requests import RequestRecord
from harness.engines.timing import timed_answer
from harness.measuring.progress import progress, say
from harness.measuring.prompts.encoding import completion_ids
from harness.measuring.prompts.sets import Occurrence, Prompt, lines_in_words, load_prompts
from harness.measuring.prompts.transcripts import Reading
from harness.measuring.session import Session
from harness.results.price.value import IterationCost
from harness.results.rows.acceptance import (
    PARTS_FILE,
    TEXTS_FILE,
    AcceptancePartRow,
    AcceptanceRow,
    AcceptanceTextRow,
)
from harness.results.runs import grouped
from harness.results.statistics import iterations

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


class AcceptanceExperiment(Experiment[AcceptanceSettings, AcceptanceRow]):
    """Texts, read by both models of a pair.

    Attributes:
        texts: a row for each text that was read.
        read: of the same texts.
        too_long: how many prompts were too long, by column.
        costs: of an iteration in target steps, by the bytes that it must read; of no K where these are unknown.
        health: columns about an engine elsewhere, which wrote the texts; empty otherwise.
        served_k: the K that it drafts with.
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
        self.read: list[ReadText] = []
        self.too_long: Counter[str] = Counter()
        self.costs = IterationCost()
        self.health: dict[str, Any] = {}
        self.served_k: int | None = None
        self.most = settings.up_to

    def measure(self, session: Session) -> None:
        settings = self.settings
        is_elsewhere = not engine_of(settings).own_loop
        requests: list[RequestRecord] = []
        if is_elsewhere or self.source == "written":
            # The answers of an engine that speculates, or the target's own.
            readings, requests = self._answered(session, arm=-1 if is_elsewhere else 0)
        else:
            readings = self._given(session)
        if not readings:
            rule = "has no answer of two tokens or more"
            raise SettingError("prompts", rule, settings.prompts.name)
        if is_elsewhere:
            self.source = "served"
            typed = engine_of(settings).columns(settings).get("num_draft_tokens")
            self.served_k = drafted_k(requests, typed) or settings.decoding.most_draft_tokens
            self.most = max(settings.up_to, self.served_k)
        placed = session.placed or self._placed_here(readings)
        pair = session.pair if session.placed is not None else placed.load()
        self.read = self._read(pair, readings)
        if self.served_k is not None:
            self._judge_health(pair, readings, requests, self.served_k)
        answers = [
            (reading, answer, turn)
            for reading in readings
            for answer, turn in zip(reading.transcript.answers, reading.turns, strict=True)
        ]
        self.costs = self._costs(placed, round(fmean(answer.start for _, answer, _ in answers)))
        self.texts = self._text_rows(session, answers)
        session.append(TEXTS_FILE, self.texts)
        if self._has_turns:
            session.append(PARTS_FILE, self._part_rows(session))

    @property
    def _has_turns(self) -> bool:
        return any(text.turn for text in self.texts)

    def _placed_here(self, readings: Sequence[Reading]) -> PlacedPair:
        """The draft's and the target's weights, to read what an engine elsewhere has written."""
        settings = self.settings
        planned: PlannedPair = local("engine.pair").plan_pair(
            settings.model, settings.draft, settings.placement, settings.dtype
        )
        demand = Demand(
            min(TOGETHER, len(readings)),
            max(len(reading.transcript.prompt) for reading in readings),
            settings.decoding.max_new_tokens,
            settings.up_to,
            "eager",
        )
        return planned.place(demand, force=settings.force)

    def _judge_health(
        self,
        pair: Pair,
        readings: Sequence[Reading],
        requests: Sequence[RequestRecord],
        served_k: int,
    ) -> None:
        """Whether the engine accepted what its weights do."""
        settings = self.settings
        self.health = health_columns(self.read, requests, served_k)
        draft = settings.draft
        assert draft is not None
        # Most servers draft greedily, which changes what is accepted where the target draws.
        may_be_greedy = not engine_of(settings).computes_here and draft.sampling == "target"
        is_explained = self.health["health"] in ("as its weights say", "other texts")
        if may_be_greedy and settings.decoding.temperature > 0 and not is_explained:
            read = self._read(pair, readings, greedy_draft=True)
            health = health_columns(read, requests, served_k)
            if health["health"] == "as its weights say":
                say("the server drafts greedily, as draft.sampling=greedy: so do the figures")
                self.read, self.health = read, health | {"draft_sampling": "greedy"}

    def _answered(self, session: Session, arm: int) -> tuple[list[Reading], list[RequestRecord]]:
        """The answers of an arm to equal prompts with different random numbers, and their records; without answers of
        a single token, which no iteration decides.
        """
        settings = self.settings
        new_tokens = settings.decoding.max_new_tokens
        encoded = session.encoder.encode_set(self.prompt_set, self.prompts, new_tokens)
        self.too_long.update(encoded.too_long)
        if settings.decoding.temperature > 0:
            # Texts of a prompt follow each other: they are read together.
            places = np.repeat(range(len(encoded.prompts)), settings.texts_per_prompt)
            encoded = encoded.part(places.tolist())
        num_rows = min(settings.batch_size, len(encoded.prompts))
        session.place(num_rows, encoded.longest, new_tokens)
        engine = session.open(settings.batch_size, encoded.longest)
        num_asked: Counter[int] = Counter()
        requests: list[RequestRecord] = []
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
                requests += timed_answer(engine, engine.arms[arm], question).requests
                advance(None)
        session.close()
        answered = [
            (_of_one_answer(prompt, token_ids, request.token_ids), request)
            for prompt, token_ids, request in zip(
                encoded.prompts, encoded.token_ids, requests, strict=True
            )
            if len(request.token_ids) > 1
        ]
        return [reading for reading, _ in answered], [request for _, request in answered]

    def _text_rows(self, session: Session, answers: Sequence[Answer]) -> list[AcceptanceTextRow]:
        rows = []
        # Texts of equal prompts are counted together, by the index of the first.
        first_index: dict[str, int] = {}
        for (reading, answer, turn), text in zip(answers, self.read, strict=True):
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
                num_tokens=text.cut.num_tokens,
                iterations_by_num_draft_tokens=text.cut.iterations.round(6).tolist(),
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

    def _part_rows(self, session: Session) -> list[AcceptancePartRow]:
        """A row for each range of turns and K."""
        rows = []
        by_turn = sorted(
            zip(self.texts, self.read, strict=True), key=lambda answer: answer[0].turn or 1
        )
        for name, turns in grouped(
            by_turn, lambda answer: _turn_range(answer[0].turn or 1)
        ).items():
            cuts = [read.cut for _, read in turns]
            conversations = [text.prompt_index for text, _ in turns]
            intervals = iterations.tokens_per_iteration(cuts, conversations, "conversation")
            for k, tokens in enumerate(intervals, start=1):
                is_priced = k in self.costs.ks()
                row = session.row(
                    AcceptancePartRow,
                    part=name,
                    num_conversations=len({*conversations}),
                    num_tokens=sum(cut.num_tokens for cut in cuts),
                    num_draft_tokens=k,
                    tokens_per_iteration=tokens,
                    expected_speedup=self.costs.speedup(tokens, k) if is_priced else None,
                )
                rows.append(row)
        return rows

    def _read(
        self,
        pair: Pair,
        readings: Sequence[Reading],
        *,
        greedy_draft: bool = False,
    ) -> list[ReadText]:
        """Read the answers of transcripts."""
        reader: PairReader = local("engine.reading").PairReader(
            pair, self.settings.decoding, self.most, greedy_draft=greedy_draft
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
        mean_answer = sum(text.num_tokens for text in self.read) // len(self.read)
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
        if not self.read:
            return [session.row(AcceptanceRow, **common)]
        cuts = [text.cut for text in self.read]
        num_tokens = sum(text.num_tokens for text in cuts)
        common |= {"num_texts": len(cuts), "num_tokens": num_tokens}
        common |= likelihood_columns(self.read)
        if "draft_sampling" in self.health:
            common["draft_sampling"] = self.health["draft_sampling"]
        rows = []
        unit = "conversation" if self._has_turns else "prompt"
        intervals = iterations.tokens_per_iteration(
            cuts, [text.prompt_index for text in self.texts], unit
        )
        for number, tokens in enumerate(intervals, start=1):
            figures = common | {"num_draft_tokens": number, "tokens_per_iteration": tokens}
            figures |= iterations.expected_acceptance(cuts, number)
            if number in self.costs.ks():
                figures["expected_speedup"] = self.costs.speedup(tokens, number)
                figures["iteration_cost"] = self.costs.point(number).steps.estimate
            if number == self.served_k:
                figures |= self.health
            rows.append(session.row(AcceptanceRow, **figures))
        return rows


def _of_one_answer(prompt: Prompt, asked: Sequence[int], answer: Sequence[int]) -> Reading:
    return Reading(prompt, Transcript.of(asked, answer), [None])


def _turn_range(turn: int) -> str:
    """The range that a turn is in: `1`, `2 to 3`, `4 to 7` and so on."""
    first = 2 ** (turn.bit_length() - 1)
    return f"{first:,} to {2 * first - 1:,}" if turn > 1 else "1"
