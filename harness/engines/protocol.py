"""The seam between experiments and what generates: a question, the arms that answer it, and their engine."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from harness.config.settings import DecodingSettings
from harness.decoding.protocols import Iteration


@dataclass(frozen=True)
class Question:
    """What to generate, the same for every arm.

    Attributes:
        prompts: token ids of B prompts, none empty.
        decoding: how tokens are chosen and how many; a row ends with `max_new_tokens`,
        stop_tokens: or with the first of these; none to generate exactly `max_new_tokens`.
        seed, indices: of each prompt; together they determine its random numbers, whatever batch it is in.
    """

    prompts: Sequence[Sequence[int]]
    decoding: DecodingSettings
    seed: int
    indices: Sequence[int]
    stop_tokens: frozenset[int] = frozenset()


class Arm(Protocol):
    """One way of generating, `regular` or `speculative`.

    Attributes:
        tells: what its records hold beyond tokens: `origins`, `proposals`, `probabilities`.
    """

    tells: frozenset[str]

    @property
    def name(self) -> str: ...

    def stream(self, question: Question) -> Iterator[Iteration]:
        """Records as they are decided; the first one holds every row's first token.

        Everything that is not decoding is done before the iterator is returned. Nothing is decoded until its first
        `next`, where a clock may start.
        """


class Engine(Protocol):
    """A pair of models, or whatever generates with and without speculation.

    Attributes:
        arms: `regular`, and `speculative` where there is a draft.
        tells: what it can report: `phases`, `logits`, `memory`, `seeds`.
        runner: what runs the models, for the column `runner`.
        setup_seconds: what preparing took.
    """

    tells: frozenset[str]

    @property
    def arms(self) -> Sequence[Arm]: ...

    @property
    def runner(self) -> str | None: ...

    @property
    def setup_seconds(self) -> float | None: ...

    def synchronize(self) -> None:
        """Wait until everything that was queued is done."""

    def check(self, tokens: list[list[int]]) -> None:
        """Raise a RunError unless all processes that share the models generated these tokens."""

    def close(self) -> None:
        """Give back what the engine holds."""
