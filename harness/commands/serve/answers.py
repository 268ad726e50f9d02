"""One answer of `serve` while it is generated: its text, and where it stops.

The scheduler gives an answer its tokens, iteration by iteration; the answer hands pieces of text on
to the request that waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from harness.engines.protocol import Question
from harness.models.detokenizer import Detokenizer
from harness.results.acceptance import Acceptance


@dataclass(frozen=True)
class Piece:
    """The text and tokens that an answer gained in one iteration.

    Attributes:
        choice: which of a request's answers it is.
        finish_reason: `stop` or `length` in the last piece. `error` if the answer failed: the
            piece's text is then the reason.
    """

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None


@dataclass(eq=False)
class Answer:
    """The answer to a question of one prompt.

    Attributes:
        arm: `speculative` or `regular`.
        question: of one prompt.
        put: gets its pieces, in the scheduler's thread.
        choice: which of a request's answers it is.
        stops: texts that end it; they are not part of it.
        cancelled: whether nobody waits for it any more. The client's side sets it, and the
            scheduler then drops the row.
        num_tokens: so far.
        outcomes: (num_proposed, num_accepted) of each iteration that drafted something.
        asked: when, by `time.monotonic`.
        seconds_to_first_token: from then on; None while there is none.
    """

    arm: str
    question: Question
    tokenizer: PreTrainedTokenizerBase
    put: Callable[[Piece], None]
    choice: int = 0
    stops: Sequence[str] = ()
    cancelled: bool = False
    num_tokens: int = 0
    outcomes: list[tuple[int, int]] = field(default_factory=list)
    asked: float = field(default_factory=time.monotonic)
    seconds_to_first_token: float | None = None

    def __post_init__(self) -> None:
        self._detokenizer = Detokenizer(self.tokenizer, self.question.prompts[0])
        # The end of the text while it may be the beginning of a stop: `the EN` before the stop
        # `END`.
        self._held = ""

    def take(self, tokens: Sequence[int], num_proposed: int, num_accepted: int) -> bool:
        """Add the tokens of one iteration, and pass on the text that is certain.

        Args:
            tokens: one or more; the loop has cut them behind a stop token and at `max_new_tokens`.
                All are passed on, even those of a stop text and behind it.

        Returns:
            Whether the answer ends here.
        """
        if self.seconds_to_first_token is None:
            self.seconds_to_first_token = time.monotonic() - self.asked
        if num_proposed:
            self.outcomes.append((num_proposed, num_accepted))
        self.num_tokens += len(tokens)
        finish_reason = None
        if tokens[-1] in self.question.stop_tokens:
            finish_reason = "stop"
        elif self.num_tokens == self.question.decoding.max_new_tokens:
            finish_reason = "length"
        text = self._held + "".join(self._detokenizer.add(token) or "" for token in tokens)
        if finish_reason:
            text += self._detokenizer.flush()
        if found := [text.index(stop) for stop in self.stops if stop in text]:
            text = text[: min(found)]
            finish_reason = "stop"
        held = 0 if finish_reason else max((_overlap(text, stop) for stop in self.stops), default=0)
        text, self._held = text[: len(text) - held], text[len(text) - held :]
        self.put(Piece(self.choice, text, list(tokens), finish_reason))
        return finish_reason is not None

    def fail(self, reason: str) -> None:
        """End it with an error."""
        self.put(Piece(self.choice, text=reason, token_ids=[], finish_reason="error"))


def metrics(answers: Sequence[Answer]) -> dict[str, Any] | None:
    """Acceptance over these answers with vLLM's names; None where nothing was drafted."""
    outcomes = [outcome for answer in answers for outcome in answer.outcomes]
    acceptance = Acceptance.of(outcomes)
    if not acceptance.num_iterations:
        return None
    figures = {
        "mean_acceptance_length": acceptance.mean_acceptance_length,
        "draft_acceptance_rate": acceptance.acceptance_rate,
        "acceptance_histogram": acceptance.columns()["acceptance_histogram"],
        "num_spec_steps": acceptance.num_iterations,
        "num_accepted_draft_tokens": acceptance.num_accepted,
        "num_draft_tokens": acceptance.num_proposed,
        "per_step_accepted": [accepted for _, accepted in outcomes],
        "per_step_drafted": [proposed for proposed, _ in outcomes],
    }
    return {"speculative_decoding": figures}


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of the text may be the beginning of a stop."""
    sizes = range(min(len(text), len(stop) - 1), 0, -1)
    return next((size for size in sizes if text.endswith(stop[:size])), 0)
