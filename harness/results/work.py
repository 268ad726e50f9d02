"""Whether both arms of a comparison did the same work. If not, no figure compares them.

For example, no speed-up follows from a regular arm with 960 tokens and a speculative one with 700.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

from harness.results.rows.compare import CompareRow
from harness.results.rows.latency import LatencyRow

AnyLatencyRow = TypeVar("AnyLatencyRow", bound=LatencyRow)

# Share of an arm's requests that may fail.
MOST_FAILURES = 0.01
# Relative difference of the arms' numbers of tokens. Times are per token, so that only the share of
# them that does not grow with the text is off by as much.
MOST_DIFFERENCE = 0.1
# The same of texts that are drawn and end by themselves, some early and some late. Where every
# token may be the last, lengths are geometric, and honest arms differ by more than half in 6 % of
# the runs with 15 prompts and in 0.8 % with 30: the ratio of their totals follows F with 2n and 2n
# degrees of freedom.
MOST_DIFFERENCE_OF_DRAWN = 0.5


class Work(NamedTuple):
    """The work of an arm: its requests, how many of them failed, and the tokens of all others."""

    arm: str
    num_requests: int
    num_failed: int
    num_tokens: int

    @classmethod
    def of(cls, row: LatencyRow) -> Work:
        """The work behind a row."""
        return cls(
            arm=str(row.arm),
            num_requests=row.num_prompts or 0,
            num_failed=row.num_failed or 0,
            num_tokens=row.num_tokens or 0,
        )

    @property
    def failures(self) -> str:
        return f"{self.num_failed} of {self.num_requests} {self.arm} requests failed"


def too_many_failures(arms: Sequence[Work]) -> str | None:
    """The failures, where they are more than 1 % or differ between the arms; else None."""
    too_many = any(work.num_failed > MOST_FAILURES * work.num_requests for work in arms)
    unequal = len({work.num_failed for work in arms}) > 1
    return " and ".join(work.failures for work in arms) if too_many or unequal else None


def no_verdict(
    regular: Work, speculative: Work, most_difference: float = MOST_DIFFERENCE
) -> str | None:
    """Why the arms cannot be compared; None where they can."""
    if failed := too_many_failures((regular, speculative)):
        return failed
    numbers = regular.num_tokens, speculative.num_tokens
    if max(numbers) - min(numbers) > most_difference * max(numbers):
        tokens = f"{regular.num_tokens} tokens, speculative {speculative.num_tokens}"
        return f"the arms did not do the same work: regular generated {tokens}"
    return None


def why_no_verdict(rows: Sequence[LatencyRow]) -> str | None:
    """Why the arms of a run cannot be compared; None where they can, or where one is missing."""
    if [row.arm for row in rows] != ["regular", "speculative"] or not rows[1].num_prompts:
        return None
    regular, speculative = map(Work.of, rows)
    if rows[0].ignore_eos is False and rows[0].temperature:
        return no_verdict(regular, speculative, MOST_DIFFERENCE_OF_DRAWN)
    return no_verdict(regular, speculative)


def why_no_verdict_of_race(row: CompareRow) -> str | None:
    """Why the arms of a race cannot be compared; None where they can, or where one is missing."""
    regular = row.regular_num_tokens
    speculative = row.speculative_num_tokens
    if regular is None or speculative is None or row.num_compared is not None:
        return None
    return no_verdict(
        Work(arm="regular", num_requests=1, num_failed=0, num_tokens=regular),
        Work(arm="speculative", num_requests=1, num_failed=0, num_tokens=speculative),
    )


def judged(rows: Sequence[AnyLatencyRow]) -> list[AnyLatencyRow]:
    """The rows of a run, without a speed-up where its arms cannot be compared."""
    if why_no_verdict(rows) is None:
        return list(rows)
    names = [
        f"{what}{end}" for what in ("speedup", "decode_speedup") for end in ("", "_low", "_high")
    ]
    return [replace(row, **dict.fromkeys(names)) for row in rows]
