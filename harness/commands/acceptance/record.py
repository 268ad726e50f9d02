"""The record of `acceptance`: its settings, its help and its exit code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from harness.commands.command import Command
from harness.config.acceptance_rules import RULES
from harness.config.amounts import as_share
from harness.config.engines import Abilities
from harness.config.errors import CANNOT_TELL, VerdictError
from harness.config.model_names import SERVED
from harness.config.run import PromptedSettings
from harness.config.settings import LARGEST_K, require, require_at_least
from harness.results.rows.acceptance import (
    AcceptanceCauseRow,
    AcceptanceRow,
    AcceptanceTextRow,
    row_in_question,
)

# The causes of low acceptance that can be examined; for each there are conditions under which acceptance is measured
# again (`causes.py`).
CAUSES = (
    "last",
    "positions",
    "layers",
    "vocabulary",
    "temperature",
    "template",
    "quantization",
    "length",
    "texts",
)


@dataclass(frozen=True, kw_only=True)
class AcceptanceSettings(PromptedSettings):
    """`acceptance`: how often would this draft be accepted on these texts, for every K?

    Attributes:
        num_prompts: number of prompts to take from the set; `auto` takes at most 15, or at most 256 if they have
            answers.
        texts_per_prompt: number of texts that the target generates for each prompt without an answer; one at
            temperature 0, because all would be identical.
        up_to: the largest K for which acceptance is computed; a larger K that is typed, or with which a server drafts,
            is computed, too.
        batch_size: number of texts that the target generates together, for prompts without answers.
        card: what the draft's card promises at K: the acceptance length, or a rate, `82.2%` or below 1; None for none.
        causes: conditions to measure as well: names separated by commas, `all` or `none`; `auto` measures all if an
            engine does not accept what its weights predict, if a card is missed, or if less than 20 % is accepted.
    """

    # `RunSettings` explains the names in capitals.
    ASKS_SPECULATIVE_ALONE = True

    num_prompts: int | Literal["auto"] = "auto"
    texts_per_prompt: int = 4
    up_to: int = 16
    card: float | str | None = None
    causes: str = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, texts_per_prompt=1, up_to=1)
        require(self.up_to <= LARGEST_K, "up_to", f"must be at most {LARGEST_K}", self.up_to)
        if self.num_prompts != "auto":
            require(
                self.num_prompts >= 1, "num_prompts", "must be auto or at least 1", self.num_prompts
            )
        if isinstance(self.card, str):
            rate = as_share(self.card)
            rule = "must be an acceptance length, 3.24, or a rate of proposed tokens, 56% or 0.56"
            require(rate is not None and 0 < rate <= 1, "card", rule, self.card)
        else:
            require(self.card is None or self.card > 0, "card", "must be above 0", self.card)
        rule = f"must be auto, all, none, or some of {','.join(CAUSES)}"
        is_known = self.causes in ("auto", "all", "none") or {*self.causes.split(",")} <= {*CAUSES}
        require(is_known, "causes", rule, self.causes)
        if self.has_weights:
            rule = "must be named, as the draft's weights are loaded here; for a server's own counts name neither"
            require(self.model.repository != SERVED, "model", rule, self.model.name)
            self._require_closed_form()

    def _require_closed_form(self) -> None:
        """Raise a SettingError if the acceptance of a text does not follow from the models' probabilities."""
        rule = "must be set: without one nothing is accepted"
        require(self.draft is not None, "draft", rule, "none")
        decoding = self.decoding
        rates = decoding.synthetic_acceptance
        rule = "must be null: a coin accepts as often on any text"
        require(rates is None, "decoding.synthetic_acceptance", rule, rates)
        # Greedily, a lenience changes nothing.
        is_lossless = decoding.lenience == 1 or decoding.temperature == 0
        rule = "must be left out: texts of a lossy rule are not the target's"
        require(is_lossless, "decoding.lenience", rule, decoding.lenience)
        known_rules = [name for name, record in RULES.all().items() if record.closed_form]
        rule = f"must be one of {', '.join(known_rules)}: of others no closed form is known"
        require(RULES[decoding.rule].closed_form, "decoding.rule", rule, decoding.rule)
        rule = "must be stored: how often random weights agree means nothing"
        require(self.weights == "stored", "weights", rule, self.weights)

    @property
    def has_weights(self) -> bool:
        """Whether the models' weights are to be loaded here; otherwise only a server's counts are known. True without a
        draft, which `_require_closed_form` then refuses.
        """
        return self.draft is None or self.draft.method != "server"

    def promised_tokens(self, num_draft_tokens: int) -> float | None:
        """The tokens per iteration that the draft's card promises at this K; None without a card."""
        rate = as_share(self.card)
        if rate is None or (rate >= 1 and not isinstance(self.card, str)):
            # No card, or an acceptance length such as 3.24.
            return rate
        return 1 + rate * num_draft_tokens

    @property
    def chosen_causes(self) -> set[str]:
        """The names of the causes that may be measured."""
        if self.causes in ("auto", "all"):
            return {*CAUSES}
        return {*self.causes.split(",")} - {"none"}

    def check_engine(self, engine: Abilities) -> None:
        rule = "must report what it accepted, as local and server do"
        named = self.engine.name
        require(engine.own_loop or engine.queues, "engine", rule, named)
        rule = "must be local or server: simulated acceptance is a setting, so there is nothing to compute"
        require(not engine.own_clock, "engine", rule, named)


class Acceptance(Command[AcceptanceSettings, AcceptanceRow]):
    """The record of `acceptance`. The command computes what would be accepted without decoding: from one pass of the
    target over the texts and, for each position in a proposal, at most one pass of the draft.
    """

    name = "acceptance"
    summary = "how often a draft would be accepted on your texts, for every K, without decoding"
    example = "model=30B draft=7B prompts=./my_logs.jsonl"
    examples = (
        ("", "the shipped tiny pair, on texts that the target writes now"),
        (
            "model=30B draft=7B prompts=./my_logs.jsonl",
            "a prompt and a completion per line, or conversations with their answers",
        ),
        ("prompts=outputs/latency/2026-11-22/09-43-39/", "the texts of an earlier run"),
        ("-m model=30B draft=7B,lookup,./my-eagle3-head", "several drafts on the same texts"),
        (
            "engine=server engine.url=http://gpu1:8000/v1 model=30B draft=7B",
            "does this server accept what its weights do? exit code 1 if not",
        ),
        (
            "model=30B draft=./head card=4.2 K=4 -- vllm serve ...",
            "why is acceptance low: the head, the engine or the conditions?",
        ),
        ("-- llama-server ... -- vllm serve ...", "one draft in two engines, by position"),
    )
    notes = "It warns of texts that the target is unlikely to have written at this temperature."
    question = "How often is a draft right?"
    settings = AcceptanceSettings
    experiment = "harness.commands.acceptance.measure:AcceptanceExperiment"
    row = AcceptanceRow
    shown_by = "harness.commands.acceptance.page:acceptance_page"
    further_rows = (AcceptanceTextRow, AcceptanceCauseRow)

    def needs_local(self, settings: AcceptanceSettings) -> bool:
        return settings.has_weights

    def bad_answer(self, rows: Sequence[AcceptanceRow]) -> VerdictError | None:
        """If an engine was compared with its weights: the error if it accepts more or less than they predict, if this
        cannot be judged, or if the texts are not the model's; otherwise None.
        """
        from harness.results.judging.acceptance import (
            engine_in_words,
            engine_statement,
            texts_statement,
        )

        row = row_in_question(rows)
        engine, texts = engine_statement(row), texts_statement(row)
        # A judged statement that is open finds no difference: the engine accepts as much as its weights.
        if engine is None or engine.is_judged_open:
            return None
        # Texts that the model cannot have written leave the engine unjudged, and are a bad answer by themselves.
        is_known = engine.is_conclusion or (texts is not None and texts.is_conclusion)
        return VerdictError(engine_in_words(engine), 1 if is_known else CANNOT_TELL)

    def line(self, rows: Sequence[AcceptanceRow]) -> str:
        """The tokens per iteration at the K that the run is about; empty if nothing was read."""
        from harness.commands.acceptance.page import summary

        return summary(rows)
