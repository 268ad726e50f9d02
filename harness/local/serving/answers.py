"""One answer of `serve` while it is generated: its text, and where it stops.

The service gives an answer its tokens, iteration by iteration, and hands the pieces of text that become
certain on to the request that waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from harness.engines.detokenizer import Detokenizer
from harness.engines.door.serving import Piece, ScoredToken, TokenLogprob
from harness.engines.protocol import Request
from harness.engines.tokenizer import Tokenizer
from harness.local.engine.engine import LocalArm
from harness.results.acceptance import outcome_of


@dataclass(eq=False)
class Answer:
    """The answer to a request.

    Attributes:
        arm: that generates it.
        put: called with each piece, in the service's thread.
        choice: its number among the request's answers, from 0.
        stops: texts that end it; they are not part of it.
        num_prompt_logprobs: how many of the likeliest tokens are asked for at each position of the
            prompt; None for no log-probabilities there.
        prompt_logprobs: one entry per token of the prompt but the first; None until it joins a batch.
        cancelled: whether nobody waits for it any more. The client's side sets it, and its row is then
            dropped.
        token_ids: so far.
        outcomes: (num_proposed, num_accepted) of each iteration that drafted something.
        asked: when the request came, by `time.monotonic`.
        seconds_to_first_token: since then; None before the first token.
    """

    arm: LocalArm
    request: Request
    tokenizer: Tokenizer
    put: Callable[[Piece], None]
    choice: int = 0
    stops: Sequence[str] = ()
    num_prompt_logprobs: int | None = None
    prompt_logprobs: Sequence[TokenLogprob] | None = None
    cancelled: bool = False
    token_ids: list[int] = field(default_factory=list)
    outcomes: list[tuple[int, int]] = field(default_factory=list)
    asked: float = field(default_factory=time.monotonic)
    seconds_to_first_token: float | None = None

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, self.request.prompt)
        # The end of the text while it may be the beginning of a stop: `the EN` before the stop
        # `END`.
        self._held = ""
        self._num_characters = 0

    def take(
        self,
        tokens: Sequence[int],
        num_proposed: int,
        num_accepted: int,
        logprobs: Sequence[TokenLogprob] = (),
    ) -> Piece:
        """Add the tokens of one iteration -> the text that is certain.

        Args:
            tokens: one or more; the loop has cut them behind a stop token and at `max_new_tokens`.
                All are passed on, even those of a stop text and behind it.
            logprobs: of these tokens, if they are asked for.
        """
        if self.seconds_to_first_token is None:
            self.seconds_to_first_token = time.monotonic() - self.asked
        outcome = outcome_of(num_proposed, num_accepted, len(tokens))
        if outcome[0]:
            self.outcomes.append(outcome)
        self.token_ids += tokens
        finish_reason = None
        if tokens[-1] in self.request.stop_tokens:
            finish_reason = "stop"
        elif len(self.token_ids) == self.request.decoding.max_new_tokens:
            finish_reason = "length"
        texts = [self._detokenizer.add(token) or "" for token in tokens]
        *offsets, self._num_characters = accumulate(map(len, texts), initial=self._num_characters)
        scored = [ScoredToken(offsets[found.place], found) for found in logprobs]
        text = self._held + "".join(texts)
        if finish_reason:
            text += self._detokenizer.flush()
        if found := [text.index(stop) for stop in self.stops if stop in text]:
            text = text[: min(found)]
            finish_reason = "stop"
        held = 0 if finish_reason else max((_overlap(text, stop) for stop in self.stops), default=0)
        text, self._held = text[: len(text) - held], text[len(text) - held :]
        return Piece(self.choice, text, list(tokens), finish_reason, scored)

    def fail(self, reason: str) -> None:
        """End it with an error."""
        self.put(Piece(self.choice, text=reason, token_ids=[], finish_reason="error"))


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of a stop."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
