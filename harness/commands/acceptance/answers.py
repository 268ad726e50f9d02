"""The answers that `acceptance` reads: recorded ones that come with the prompts, or new ones that it asks for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np

from harness.commands.acceptance.causes import Condition
from harness.commands.acceptance.record import AcceptanceSettings
from harness.commands.acceptance.served import Share, expected, reported
from harness.config.amounts import counted
from harness.engines.counts import ImpossibleCounts
from harness.engines.door.reading import ReadText, Transcript, num_together
from harness.engines.protocol import Answered, Question, in_batches
from harness.engines.record import engine_of
from harness.engines.requests import RequestRecord
from harness.measuring.acceptance import counted_drafts
from harness.measuring.interleaving import ask_in_turns
from harness.measuring.progress import say
from harness.measuring.prompts.encoding import Encoded, completion_ids, last
from harness.measuring.prompts.sets import Occurrence, Prompt, load_prompts
from harness.measuring.prompts.transcripts import Reading
from harness.measuring.session import Session

# How many prompts num_prompts=auto takes from a set without answers, and from a set with recorded answers.
WRITTEN = 15
GIVEN = 256


@dataclass
class Answers:
    """Answers to prompts.

    Attributes:
        readings: prompts with their answers.
        requests: for answers of an engine in another process, its record of each answer; otherwise [].
        read: the acceptance of each answer as computed from the weights; [] without weights.
    """

    readings: Sequence[Reading]
    requests: Sequence[RequestRecord] = ()
    read: Sequence[ReadText] = ()

    @property
    def spans(self) -> list[tuple[Reading, range, int | None]]:
        """For each answer: its reading, the range of the answer's tokens in the reading, and the turn in which it was
        given (None outside a conversation).
        """
        return [
            (reading, answer, turn)
            for reading in self.readings
            for answer, turn in zip(reading.transcript.answers, reading.turns, strict=True)
        ]

    @property
    def token_ids(self) -> list[Sequence[int]]:
        """The tokens of each answer, in the order of `spans`."""
        return [
            reading.transcript.token_ids[answer.start : answer.stop]
            for reading, answer, _ in self.spans
        ]

    def shares(self, num_draft_tokens: int, offset: int | None = None) -> dict[int, Share]:
        """The share of each prompt, by the prompt's index; a prompt's answers are added up.

        If an engine's records are known, the shares are those that the engine reports (`reported`); {} if it reports
        none. Otherwise they are computed from the weights (`expected`); {} without weights.

        Args:
            num_draft_tokens: the K for which shares are computed from the weights, or the engine's K.
            offset: the position of a draft token, from 0, for its acceptance rate; None for tokens per iteration.
        """
        if self.requests:
            shares = reported(self.requests, num_draft_tokens, offset)
        else:
            shares = [expected(text.cut, num_draft_tokens, offset) for text in self.read]
        by_prompt: dict[int, list[Share]] = {}
        if shares:
            for (reading, _, _), share in zip(self.spans, shares, strict=True):
                by_prompt.setdefault(reading.prompt.index, []).append(share)
        return {index: Share.total(shares) for index, shares in by_prompt.items()}


class AnswerSource:
    """Provides the answers that are read: recorded ones, or new ones.

    Attributes:
        kind: where the answers of the run as typed come from: `given` with the prompts, `written` now by the target in
            this process, or `served` by an engine in another process.
        prompt_set: the set from which prompts are taken; if only some of its prompts have answers, the others are
            left out, unless the answers are `served`.
        prompts: the prompts taken from the set, before those that are too long are left out.
        num_skipped: how many prompts of the run as typed were too long.
        num_sent: how many requests the run as typed sent to each command; 0 for given texts.
    """

    def __init__(self, settings: AcceptanceSettings) -> None:
        self.prompt_set = load_prompts(settings.prompts, with_answers=True)
        # The prompts that come with recorded answers.
        answered = [prompt for prompt in self.prompt_set.prompts if prompt.has_answers]
        self.kind = "given" if answered else "written"
        if not engine_of(settings).own_loop:
            # An engine in another process answers all prompts anew, even prompts that have recorded answers.
            self.kind, answered = "served", []
        if 0 < len(answered) < len(self.prompt_set.prompts):
            without = counted(len(self.prompt_set.prompts) - len(answered), "prompt")
            say(f"{without} without an answer left out")
            self.prompt_set = replace(self.prompt_set, prompts=tuple(answered))
        wanted = settings.num_prompts
        automatic = min(len(self.prompt_set.prompts), GIVEN if answered else WRITTEN)
        self.prompts = self.prompt_set.take(automatic if wanted == "auto" else wanted)
        self.num_skipped = 0
        self.num_sent = 0

    def given(self, session: Session) -> Answers:
        """The recorded answers of the prompts. Also places the pair in memory.

        If a prompt and its answer do not fit into the context, the answer is cut. An answer of fewer than two tokens is
        left out, because drafts begin after the first.
        """
        whole = {prompt.index: prompt for prompt in self.prompts}
        openings = tuple(prompt.opening for prompt in self.prompts)
        encoder = session.encoder
        encoded = encoder.encode_set(
            self.prompt_set, openings, new_tokens=2, answers="two tokens of an answer"
        )
        self.num_skipped = encoded.num_skipped
        readings: list[Reading] = []
        for opening, token_ids in zip(encoded.prompts, encoded.token_ids, strict=True):
            prompt = whole[opening.index]
            if opening.following:
                readings += encoder.transcribe(prompt)
            else:
                # A plain text with its completion.
                answer = completion_ids(session.tokenizer, prompt)
                readings.append(of_one_answer(prompt, token_ids, answer))
        longest = max((len(reading.transcript.token_ids) for reading in readings), default=1)
        # The models' context; None if it is not known.
        room = session.planned.room(new_tokens=0) or longest
        if num_long := sum(len(reading.transcript.token_ids) > room for reading in readings):
            say(f"{num_long} of {len(readings)} texts are read up to the context of {room} tokens")
        readings = [*filter(None, (reading.until(room) for reading in readings))]
        longest = min(longest, room)
        prompt_tokens = max((len(each.transcript.prompt) for each in readings), default=1)
        session.place(num_together(longest), prompt_tokens, max(1, longest - prompt_tokens))
        return Answers(readings)

    def asked(self, session: Session, condition: Condition) -> list[Answers]:
        """Send the prompts under a condition, and return the answers.

        If a prompt is sent several times, its random numbers differ each time. Answers with a single token are left
        out, because no iteration decides that token.

        Returns:
            For a server, an `Answers` for each of its commands, in the order of the engine's arms. If the target in
            this process writes the answers, a single `Answers`.
        """
        settings = condition.settings
        new_tokens = settings.decoding.max_new_tokens
        prompts = self.prompts
        if self.kind == "given":
            prompts = tuple(prompt.opening for prompt in prompts)
        # Within the block, the condition takes the place of the experiment, from which the session reads its settings.
        experiment, session.experiment = session.experiment, condition
        try:
            encoded = session.encoder.encode_set(self.prompt_set, prompts, new_tokens)
            if condition.most_prompt_tokens is not None:
                most, bos_token = condition.most_prompt_tokens, session.tokenizer.bos_token_id
                short = [last(ids, most, bos_token) for ids in encoded.token_ids]
                encoded = replace(encoded, token_ids=short, is_cut=True)
            # The row counts the prompts that were too long in the run as typed.
            if condition.cause is None:
                self.num_skipped = encoded.num_skipped
            if settings.decoding.temperature > 0:
                # Put the texts of a prompt next to each other, so that they are read together: prompts 0 and 1 with two
                # texts each become 0, 0, 1, 1.
                repeated = np.repeat(range(len(encoded.prompts)), settings.texts_per_prompt)
                encoded = encoded.part(repeated.tolist())
            if condition.cause is None:
                self.num_sent = len(encoded.prompts)
            num_rows = min(settings.batch_size, len(encoded.prompts))
            session.place(num_rows, encoded.longest, new_tokens)
            engine = session.open(num_rows, encoded.longest)
            questions = []
            # How often each prompt was sent so far: a prompt that is sent again has another index (`PromptSet.index`).
            num_asked: Counter[int] = Counter()
            for batch in in_batches(range(len(encoded.prompts)), settings.batch_size):
                part = encoded.part(batch)
                indices = []
                for index in part.indices:
                    occurrence = Occurrence(index, repeat=num_asked[index])
                    indices.append(self.prompt_set.index(occurrence))
                    num_asked[index] += 1
                requests = session.requests(part.token_ids, indices, chats=part.chats)
                questions.append(Question(requests))
            # In this process, the regular arm writes the texts: they are the target's own.
            arms = engine.arms if self.kind == "served" else engine.arms[:1]
            records: dict[str, list[RequestRecord]] = {arm.name: [] for arm in arms}
            for answered in ask_in_turns(engine, questions, (), arms=arms):
                _fill_in_drafts(answered)
                records[answered.arm] += answered.requests
            session.close()
        finally:
            session.experiment = experiment
        return [self._whole(encoded, requests) for requests in records.values()]

    def _whole(self, encoded: Encoded, records: Sequence[RequestRecord]) -> Answers:
        """The answers with two tokens or more, as `Answers`. `num_tokens` may count a token that ends the text, and is
        not among `token_ids`, so both must exceed 1.

        Args:
            encoded: the prompts that were sent.
            records: the record of the answer to each of them.
        """
        kept = [
            (of_one_answer(prompt, token_ids, request.token_ids), request)
            for prompt, token_ids, request in zip(
                encoded.prompts, encoded.token_ids, records, strict=True
            )
            if min(request.num_tokens, len(request.token_ids)) > 1
        ]
        if num_short := len(records) - len(kept):
            say(
                f"{counted(num_short, 'short answer')} left out: speculation decides no first token"
            )
        requests = [request for _, request in kept] if self.kind == "served" else []
        return Answers([reading for reading, _ in kept], requests)


def _fill_in_drafts(answered: Answered) -> None:
    """If a request was the only one in flight, and its record has no drafts by position, take its drafts from the
    server's counters.
    """
    [request, *others] = answered.requests
    drafts = request.drafts
    if others or answered.counted is None or request.outcomes or (drafts and drafts.accepted_at):
        return
    with suppress(ImpossibleCounts):
        counted_now = counted_drafts(answered.counted, answered.requests)
        # An answer's own totals are replaced only if the counters are by position.
        if counted_now is not None and (drafts is None or counted_now.accepted_at):
            request.drafts = counted_now


def of_one_answer(prompt: Prompt, asked: Sequence[int], answer: Sequence[int]) -> Reading:
    """The reading of a prompt with a single answer.

    Args:
        asked: token ids of the prompt.
        answer: token ids of the answer.
    """
    return Reading(prompt, Transcript.of(asked, answer), [None])
