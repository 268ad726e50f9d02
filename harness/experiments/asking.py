"""The questions of `latency`: prompts in batches or laps, asked again if need be, and a warm-up."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from harness.engines.protocol import Engine, Question
from harness.experiments.conversations import Conversations
from harness.experiments.laps import num_laps
from harness.experiments.prompts import Asked, Prompt, PromptSet
from harness.experiments.repetition import Part, batches_to_ask, laps_to_ask, share_prompts
from harness.experiments.session import Session
from harness.menu.commands.latency import LatencySettings

# Batches of prompts that are read to find one for the warm-up.
_MOST_WARMUP = 4


def asks_again(settings: LatencySettings, prompt_set: PromptSet) -> bool:
    """Whether more answers are wanted than the set has prompts."""
    return settings.num_prompts > len(prompt_set.prompts)


class Asking:
    """The questions that both arms are asked.

    Args:
        prompts: those that are measured, with their `token_ids`.
        conversations: ask for later turns.

    Attributes:
        questions: one for each batch, or lap of an engine that queues, and for its later turns.
        units: of each question: the same for all turns, and whenever the same prompts are asked.
        moments: the number of its batch or lap in time.
        share_prompts: whether units share prompts, so that an interval over them covers no prompts.
    """

    def __init__(
        self,
        session: Session,
        settings: LatencySettings,
        prompt_set: PromptSet,
        prompts: Sequence[Prompt],
        token_ids: Sequence[Sequence[int]],
        conversations: Conversations,
    ) -> None:
        self.questions: list[Question] = []
        self.units: list[int] = []
        self.moments: list[int] = []
        self.share_prompts = False
        self.conversations = conversations
        self._session = session
        self._settings = settings
        self._prompt_set = prompt_set
        self._prompts = prompts
        self._token_ids = token_ids
        self._again = asks_again(settings, prompt_set)

    def plan(self, engine: Engine) -> None:
        """Make the questions."""
        parts = self._parts(engine)
        self.share_prompts = share_prompts(parts)
        for number, part in enumerate(parts):
            first = self._first_question(part)
            turns = [first, *self.conversations.follow_ups(first)]
            self.questions += turns
            self.units += [part.unit] * len(turns)
            self.moments += [number] * len(turns)

    @functools.cached_property
    def warmup(self) -> Question:
        """Prompts that are not measured, because caches would know those that are.

        They are others of the set that are no longer than the longest measured one; where there are
        too few, the tokens of measured prompts in reverse.
        """
        size = self._settings.batch_size
        longest = max(map(len, self._token_ids))
        measured = {prompt.index for prompt in self._prompts}
        others = [prompt for prompt in self._prompt_set.prompts if prompt.index not in measured]
        encoded = self._session.tokens_of(others[: _MOST_WARMUP * size])
        pairs = [
            (prompt.index, ids)
            for prompt, ids in zip(others, encoded, strict=False)
            if len(ids) <= longest
        ][:size]
        if len(pairs) < size:
            reversed_ids = [[*ids[:1], *reversed(ids[1:])] for ids in self._token_ids]
            unused = self._prompt_set.first_unused(self._settings.num_prompts)
            pairs = list(enumerate(itertools.islice(itertools.cycle(reversed_ids), size), unused))
        indices, prompts = zip(*pairs, strict=True)
        return self._session.ask(prompts, indices)

    def _parts(self, engine: Engine) -> list[Part]:
        """The prompts as batches or laps."""
        settings = self._settings
        number = len(self._prompts)
        num_asked = settings.num_prompts if self._again else number
        if engine.queues:
            laps = functools.partial(self._num_laps, engine)
            return laps_to_ask(number, num_asked, laps, settings.seed)
        return batches_to_ask(number, num_asked, settings.batch_size, settings.seed)

    def _num_laps(self, engine: Engine, num_prompts: int) -> int:
        settings = self._settings
        if settings.laps != "auto":
            return settings.laps
        # The last requests of a lap have fewer beside them, which one arm alone can do without.
        in_flight = settings.batch_size > 1 or engine.has_rate
        if not engine.alternates or (len(engine.arms) == 1 and in_flight):
            return 1
        return num_laps(num_prompts, settings.batch_size, engine.has_rate)

    def _first_question(self, part: Part) -> Question:
        """The question of a batch or lap, about first turns."""
        places = [self._prompts[place].index for place in part.places]
        pairs = zip(places, part.repeats, strict=True)
        indices = [self._prompt_set.index(Asked(place, 0, repeat)) for place, repeat in pairs]
        options: dict[str, Any] = {}
        if self._again:
            self._session.note_chats([self._prompt_set.at(index) for index in indices])
            options["repeats"] = part.repeats
        token_ids = [self._token_ids[place] for place in part.places]
        return self._session.ask(token_ids, indices, seed=self._settings.seed_of_run, **options)
