"""What the figures of a row imply about an iteration: it costs tokens per iteration ÷ speed-up, in regular steps.

An iteration of K draft tokens yields 1 + K × rate tokens on average, if all K are drafted in every iteration and an
answer's first token, which comes from reading the prompt, is left out. If that makes decoding s times as fast, an
iteration takes (1 + K × rate) ÷ s times as long as a regular step. This is arithmetic on printed figures.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from harness.results.printed.figures import SPEEDS, UNKNOWN, PrintedFigure, is_regular_arm
from harness.results.printed.reader import PrintedRow

# Noise of single runs, in which an iteration that costs a step may seem to cost less.
NOISE = 0.05
# Tokens of an answer, as few as may be: its last iterations propose less than K.
ANSWER = 16
# Draft tokens that the ends of few answers may lose, by those that they lose on average.
_WORST_ENDS = 1.5
# How far the speed-ups of one row may be apart before no cost follows from them.
_APART = 1.25
# How far the lengths of prompts and answers of two arms may be apart.
_SAME_LENGTH = 1.1
# Rows in which a speed-up is what its acceptance gives, to the last digit, before it counts as computed.
_FEWEST_COMPUTED = 3
_EXACT = 0.02
# Settings that say which arm a row is of.
_ARMS = ("name", "draft")
# Drafts without a fixed K, and those that propose a block at once.
_VARYING = re.compile(
    r"lookup|n-?gram|pld|suffix|\bsam\b|\brest\b|\bauto\b|tree|p[-_ ]?min\W*[.0]*[1-9]",
    re.IGNORECASE,
)
_BLOCKS = re.compile(r"flash|dspark|p-?eagle|pard|medusa|domino|jetspec|block", re.IGNORECASE)
PRINTED = "as printed"
_SPEEDUPS = (
    ("ms/token", "regular_ms_per_token", "ms_per_token"),
    ("tokens/s per user", "user_tokens_per_second", "regular_user_tokens_per_second"),
    (PRINTED, "speedup", "itself"),
    ("tokens/s", "tokens_per_second", "regular_tokens_per_second"),
    ("latency", "regular_latency_s", "latency_s"),
)


@dataclass(frozen=True)
class AuditRow(PrintedRow):
    """The figures that a row states, and what they imply; `UNKNOWN` or NaN for nothing."""

    def figure(self, name: str) -> PrintedFigure:
        """The figure of this name, where it is stated."""
        return self.figures.get(name, UNKNOWN)

    @property
    def is_regular(self) -> bool:
        """Whether it is a row of regular decoding alone."""
        called = any(is_regular_arm(self.settings.get(name, "")) for name in _ARMS)
        length, rate = self.figure("tokens_per_iteration"), self.figure("acceptance_rate")
        # `baseline (old head)` accepts drafts.
        return (self.k == 0 or called) and not (length.low > 1 or rate.low > 0.01)

    @property
    def circumstances(self) -> dict[str, str]:
        """The settings that it shares with the row of its regular arm, and the load."""
        # Without a column of arms, the first one has their names.
        arms = ("draft",) if "draft" in self.settings else _ARMS
        texts = {name: text for name, text in self.settings.items() if name not in arms}
        return {**texts, "load": self.figure("batch_size").text}

    @property
    def k(self) -> float:
        return self.figure("num_draft_tokens").low

    @property
    def load(self) -> float:
        """Requests in flight."""
        return self.figure("batch_size").low

    @property
    def name(self) -> str:
        """The name in the table: the row's own, and those of its draft and prompts."""
        parts = map(self.settings.get, ("name", "devices", "draft", "prompts"))
        return ", ".join(dict.fromkeys(filter(None, parts)))

    @property
    def label(self) -> str:
        """`row 7 (DSpark, code, K=7, 8 in flight)`."""
        k, load = f"K={self.k:g}" * (self.k >= 1), f"{self.load:g} in flight" * (self.load > 1)
        about = ", ".join(filter(None, [self.name, k, load]))
        return f"{self.place} ({about})" if about else self.place

    @property
    def _draft_words(self) -> str:
        return " ".join(self.settings.get(name, "") for name in ("draft", "name", "model"))

    @property
    def is_tree(self) -> bool:
        """Whether it drafts a tree whose depth is K."""
        return self.figure("topk").low > 1 or self.figure("num_nodes").low > self.k + 1

    @property
    def varies_by_text(self) -> bool:
        """Whether its draft has no fixed K, so that K is a limit."""
        return bool(_VARYING.search(self._draft_words))

    @property
    def proposes_k(self) -> bool:
        """Whether K tokens are drafted in every iteration but the last ones of an answer."""
        has_mean = "mean_num_draft_tokens" in self.figures
        is_limit = self.varies_by_text or has_mean or self.figure("p_min").low > 0.01
        return self.k >= 1 and not is_limit and not self.is_tree

    @property
    def drafts_blocks(self) -> bool:
        """Whether its draft proposes a block at once."""
        return bool(_BLOCKS.search(self._draft_words))

    @property
    def tokens(self) -> PrintedFigure:
        """Tokens per iteration: those that are stated, or what the acceptance gives."""
        stated = self.figure("tokens_per_iteration")
        if stated.is_known:
            return stated.plus(1 if self.is_without_own_token else 0)
        if not self._accepted.is_known:
            return UNKNOWN
        fewest = self.drafted.high if self.proposes_k else self.drafted.low
        return PrintedFigure(
            1 + fewest * self.figure("acceptance_rate").low, 1 + self._accepted.high
        )

    @property
    def is_without_own_token(self) -> bool:
        """Whether its length is of accepted draft tokens, without the target's own, as some are by their rate."""
        stated = self.figure("tokens_per_iteration")
        accepted = self._accepted
        return stated.high < 1 or (
            stated.overlaps(accepted) and not stated.overlaps(accepted.plus(1))
        )

    @property
    def _accepted(self) -> PrintedFigure:
        """Draft tokens accepted in an iteration, by the rate."""
        rate, drafted = self.figure("acceptance_rate"), self.drafted
        if not rate.low <= 1:
            return UNKNOWN
        return PrintedFigure(drafted.middle * rate.low, drafted.high * min(rate.high, 1))

    @property
    def drafted(self) -> PrintedFigure:
        """Draft tokens per iteration: if iterations begin anywhere, those at the end of an answer lose K (K + 1) / 2
        together; few answers may end badly.
        """
        lost = _WORST_ENDS * self.k * (self.k + 1) / 2 / (ANSWER - 1)
        chain = (
            PrintedFigure(max(self.k - lost, self.k / 4), self.k) if self.proposes_k else UNKNOWN
        )
        return self.figures.get("mean_num_draft_tokens", chain)

    @property
    def speedups(self) -> dict[str, PrintedFigure]:
        """Each speed-up that it has, by what it is of: those of one user come first."""
        figures = {**self.figures, "itself": PrintedFigure(1, 1)}
        return {
            what: figures[above].over(figures[below])
            for what, above, below in _SPEEDUPS
            if above in figures and below in figures
        }

    @property
    def speedup(self) -> PrintedFigure:
        """The speed-up of one user, narrowed to the values that all speed-ups in agreement with it allow."""
        speedup, *others = self.speedups.values() or [UNKNOWN]
        for other in others:
            if speedup.overlaps(other):
                speedup = PrintedFigure(max(speedup.low, other.low), min(speedup.high, other.high))
        return speedup

    @property
    def is_apart(self) -> bool:
        """Whether the gain of a user and that of the server are too far apart: then requests queue."""
        gains = [gain.middle for what, gain in self.speedups.items() if what != "latency"]
        return self.load != 1 and bool(gains) and max(gains) > _APART * min(gains)

    @property
    def steps(self) -> PrintedFigure:
        """The cost of an iteration, in regular steps."""
        return UNKNOWN if self.is_apart else self.tokens.over(self.speedup)

    @property
    def is_possible(self) -> bool:
        """Whether an iteration costs a step, or more."""
        return self.steps.high >= 1 - NOISE

    @property
    def rate(self) -> float:
        """Accepted ÷ drafted: the printed rate, unless the length says that it is another share."""
        rate = self.figure("acceptance_rate")
        by_length = self.tokens.plus(-1).over(self.drafted)
        is_another_share = by_length.is_known and not rate.overlaps(by_length)
        if rate.is_known and not self.is_tree and not is_another_share:
            return rate.middle
        return (self.tokens.middle - 1) / (self.most_tokens - 1) if self.proposes_k else math.nan

    @property
    def most_tokens(self) -> float:
        """Tokens per iteration if all draft tokens were accepted; NaN where more are stated."""
        most = self.k + 1 if self.proposes_k or self.is_tree else math.nan
        return math.nan if self.tokens.middle > most else most

    @property
    def speedup_at_most(self) -> float:
        """The speed-up if all draft tokens were accepted."""
        return self.speedup_at(1) if self.is_possible else math.nan

    def speedup_at(self, rate: float) -> float:
        """The speed-up if this share of draft tokens were accepted, at the same cost."""
        return (1 + (self.most_tokens - 1) * rate) / self.steps.middle


def difference(row: AuditRow, arm: AuditRow) -> str | None:
    """What differs between a row and one of the regular arm, with both names: then they are not two arms of one
    comparison. What only one of them states does not differ.
    """
    for name, text in row.circumstances.items():
        if arm.circumstances.get(name, text) != text:
            return f"{name} {text or 'unknown'} and {arm.circumstances[name] or 'unknown'}"
    for name in ("input_tokens", "output_tokens"):
        shorter, longer = sorted((row.figure(name).middle, arm.figure(name).middle))
        if longer > _SAME_LENGTH * shorter:
            return f"{name} {row.figures[name].text} and {arm.figures[name].text}"
    return None


def speculative_rows(rows: Sequence[AuditRow]) -> list[AuditRow]:
    """The rows with speculation, with the speeds of the regular arm where it has one row of the same circumstances."""
    regular = [row for row in rows if row.is_regular]
    joined = []
    for row in rows:
        if row.is_regular:
            continue
        arms = [arm for arm in regular if arm.circumstances == row.circumstances] or regular
        figures = dict(row.figures)
        if len(arms) == 1 and not difference(row, arms[0]):
            for name in {*SPEEDS} & arms[0].figures.keys():
                figures.setdefault(f"regular_{name}", arms[0].figures[name])
        joined.append(replace(row, figures=figures))
    return joined


def computed_speedups(tables: Sequence[Sequence[AuditRow]]) -> set[str]:
    """Places of rows whose speed-up is what the acceptance gives, to the last digit, in all rows of their table."""
    places: set[str] = set()
    for rows in tables:
        with_both = [row for row in rows if "speedup" in row.figures and row.tokens.is_known]
        if all(map(_is_computed, with_both)):
            places |= {row.place for row in with_both}
    return places if len(places) >= _FEWEST_COMPUTED else set()


def _is_computed(row: AuditRow) -> bool:
    speedup, tokens = row.figures["speedup"], row.tokens
    # Small ones, and few digits, may be alike by chance.
    width = max(figure.high - figure.low for figure in (speedup, tokens))
    is_exact = width < _EXACT * (min(speedup.middle, tokens.middle) - 1)
    return is_exact and speedup.overlaps(tokens)
