"""The seam between `serve`, which speaks HTTP, and the loop in the wing with the models that batches its requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import NamedTuple, Protocol, TypeVar

from harness.engines.protocol import Engine, Request

Result = TypeVar("Result")

# Why a request is refused, or not answered any further, once the service ends.
ENDING = "the service is ending"


class Refusal(Exception):
    """A request that is not answered, or no further; the message is for the client.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, reason: str) -> None:
        super().__init__(reason)
        self.status = status


class TokenLogprob(NamedTuple):
    """A token of a text, and what the target expected in its place.

    Attributes:
        place: of the token among those that were asked about together.
        rank: 1 for the likeliest token.
        top: the likeliest tokens with their log-probabilities, the likeliest first.
    """

    place: int
    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


@dataclass(frozen=True)
class ScoredToken:
    """A token of an answer's text with its log-probability.

    Attributes:
        offset: where the token's text begins, in characters of the answer.
    """

    offset: int
    logprob: TokenLogprob


@dataclass(frozen=True)
class Piece:
    """The text and tokens that an answer gained in one iteration.

    Attributes:
        choice: the answer's number among those of its request, from 0.
        finish_reason: `stop` or `length` in the last piece. `error` if the answer failed: the
            piece's text is then the reason.
        scored: one entry per token, where a request asks for log-probabilities.
    """

    choice: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    scored: Sequence[ScoredToken] = ()


class Answer(Protocol):
    """An answer while it is generated.

    Attributes:
        request: that it answers.
        cancelled: whether nobody waits for it any more. The client's side sets it, and the answer
            then leaves the batch.
        prompt_logprobs: one entry per token of the prompt but the first; None where they were not
            asked for, or not read yet.
        token_ids: so far.
        outcomes: (num_proposed, num_accepted) of each iteration that drafted something.
    """

    request: Request
    cancelled: bool
    prompt_logprobs: Sequence[TokenLogprob] | None
    token_ids: list[int]
    outcomes: list[tuple[int, int]]


class Service(Protocol):
    """A loaded pair that answers requests in one batch, from a thread that alone touches the models."""

    @property
    def num_running(self) -> int:
        """Answers that are generated now."""
        ...

    def is_running(self) -> bool:
        """Whether it takes requests; long work should end once it does not."""
        ...

    def ask(
        self,
        arm: str,
        requests: Sequence[Request],
        put: Callable[[Piece], None],
        *,
        stops: Sequence[str] = (),
        num_prompt_logprobs: int | None = None,
    ) -> Sequence[Answer]:
        """Have requests answered, all of them or none.

        Args:
            arm: `regular` or `speculative`.
            put: called with each piece, in the service's thread.
            stops: texts that end an answer; they are not part of it.
            num_prompt_logprobs: how many of the likeliest tokens are asked for at each position of
                the prompts; None for no log-probabilities there.

        Raises:
            Refusal: too many wait already, or the service is ending.
        """
        ...

    def alone(self, work: Callable[[Engine], Result]) -> Future[Result]:
        """Call `work`, such as a race, in the service's thread while no answer is generated.

        Errors in `work` come as a `Refusal`.

        Raises:
            Refusal: as `ask` does.
        """
        ...

    def close(self, grace_s: float = 0.0) -> None:
        """Fail what waits now, and what still runs after `grace_s`; then end the thread."""
