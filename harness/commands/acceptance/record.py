"""`acceptance`: how often would this draft be accepted on these texts, for every K?"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.commands.command import Command
from harness.config.closed_form import require_closed_form
from harness.config.engines import Abilities
from harness.config.errors import CANNOT_TELL, VerdictError
from harness.config.run import PromptedSettings
from harness.config.settings import LARGEST_K, require, require_at_least
from harness.results.rows.acceptance import AcceptancePartRow, AcceptanceRow, AcceptanceTextRow

_EXIT_CODES = {"accepts less": 1, "accepts more": 1, "other texts": 1, "cannot tell": CANNOT_TELL}


@dataclass(frozen=True, kw_only=True)
class AcceptanceSettings(PromptedSettings):
    """`acceptance`: how often would this draft be accepted on these texts, for every K?

    Attributes:
        num_prompts: how many prompts of the set are taken; `auto` is 15, or the first 256 that have answers.
        texts_per_prompt: texts that are written for each prompt where the set has no answers; one at temperature 0,
            where all would be the same.
        up_to: K from 1 to this number.
        batch_size: texts that the target writes together, where there are no answers.
    """

    ASKS_SPECULATIVE_ALONE = True

    num_prompts: int | Literal["auto"] = "auto"
    texts_per_prompt: int = 4
    up_to: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, texts_per_prompt=1, up_to=1)
        require(self.up_to <= LARGEST_K, "up_to", f"must be at most {LARGEST_K}", self.up_to)
        if self.num_prompts != "auto":
            require(
                self.num_prompts >= 1, "num_prompts", "must be auto or at least 1", self.num_prompts
            )
        require_closed_form(self)

    def check_engine(self, engine: Abilities) -> None:
        rule = "must be local or server: transformers does not report what it accepted"
        named = self.engine.name
        require(engine.own_loop or engine.queues, "engine", rule, named)
        rule = "must be local or server: there are no weights whose acceptance could be planted"
        require(not engine.own_clock, "engine", rule, named)
        assert self.draft is not None
        rule = (
            "must be the draft whose weights the server is said to have, to be loaded here;"
            " harness latency measures what a server accepts without them"
        )
        require(self.draft.method != "server", "draft", rule, self.draft.name)


class Acceptance(Command[AcceptanceSettings, AcceptanceRow]):
    """Computes what would be accepted from one pass of both models over texts."""

    name = "acceptance"
    summary = "how often a draft would be accepted on your texts, for every K, without decoding"
    example = "model=30B draft=7B prompts=./my_logs.jsonl"
    examples = (
        ("", "the shipped tiny pair, on texts that the target writes now"),
        (
            "model=30B draft=7B prompts=./my_logs.jsonl",
            "a prompt and a completion per line, or conversations, of which all answers",
        ),
        ("prompts=outputs/latency/2026-11-22/09-43-39/", "the texts of an earlier run"),
        ("-m model=30B draft=7B,lookup,./my-eagle3-head", "several drafts on the same texts"),
        (
            "engine=server engine.url=http://gpu1:8000/v1 model=30B draft=7B",
            "does this server accept what its weights say? exit code 1 if not",
        ),
    )
    notes = "It warns of texts that the target is unlikely to have written at this temperature."
    question = "How often is a draft right?"
    help_order = 2
    settings = AcceptanceSettings
    experiment = "harness.commands.acceptance.measure:AcceptanceExperiment"
    row = AcceptanceRow
    shown_by = "harness.commands.acceptance.page:acceptance_page"
    further_rows = (AcceptanceTextRow, AcceptancePartRow)

    def needs_local(self, settings: AcceptanceSettings) -> bool:
        return True

    def bad_answer(self, rows: Sequence[AcceptanceRow]) -> VerdictError | None:
        """The error where an engine does not accept what its weights say, or where this is unknown."""
        from harness.commands.acceptance.health import health_in_words

        for row in rows:
            if row.health in _EXIT_CODES:
                return VerdictError(health_in_words(row), _EXIT_CODES[row.health])
        return None

    def line(self, rows: Sequence[AcceptanceRow]) -> str:
        """Tokens per iteration at the best K."""
        from harness.commands.acceptance.page import summary

        return summary(rows)
