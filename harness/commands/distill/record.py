"""`distill`: a draft learns from its target, and is measured before and after."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from harness.commands.distill.rows import DistillRow
from harness.commands.latency.record import LatencySettings
from harness.config.engines import Abilities
from harness.config.settings import (
    ModelSettings,
    require,
    require_at_least,
    require_possible_path,
)
from harness.menu.command import Command

if TYPE_CHECKING:
    from harness.tables.table import Document


@dataclass(frozen=True, kw_only=True)
class DistillSettings(LatencySettings):
    """`distill`: train a draft model or a head on the target's own answers to a prompt file.

    Attributes:
        num_prompts: the first of the set, on which the draft is measured before and after; the others are learned.
        output: directory for the trained draft, which `draft=` takes; None for one named after the pair in `drafts/`,
            and in a sweep after what jobs differ in.
        temperatures: of the answers; each prompt is answered once at each.
        answer_tokens: the most tokens of an answer.
        epochs: how often each answer is learned.
        texts_per_step: answers of one batch.
        learning_rate: the highest; it warms up, then falls to a tenth.
        chain: tokens ahead that an EAGLE-3 head is trained to draft.
        save_every: steps after which the state is kept, to go on from after a kill.
    """

    output: str | None = None
    temperatures: tuple[float, ...] = (0.0, 0.7)
    answer_tokens: int = 128
    epochs: int = 3
    texts_per_step: int = 16
    learning_rate: float = 1e-3
    chain: int = 4
    save_every: int = 100

    TRAINS = True
    ANSWERS_TURNS = False
    # What the trained weights depend on: a training with other values does not go on from a checkpoint.
    LEARNED = (
        *("model", "draft", "prompts", "num_prompts", "decoding", "dtype", "seed"),
        *("chat_template", "temperatures", "answer_tokens", "epochs", "texts_per_step"),
        *("learning_rate", "chain"),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, answer_tokens=2, epochs=1, texts_per_step=1, chain=1, save_every=1)
        ends = self.decoding.ignore_eos
        require(ends != "auto", "decoding.ignore_eos", "must be true or false", ends)
        require(self.repeats == 1, "repeats", "must be 1: a draft is trained once", self.repeats)
        require(not self.tensor_parallel, "placement", "must not be tensor_parallel", self.strategy)
        rule = "must be stored: random ones have nothing to teach"
        require(self.weights == "stored", "weights", rule, self.weights)
        rule = "must be a model, a head, or eagle3, dflash, dflash2, jetspec or medusa"
        require(self.draft is not None, "draft", rule, "none")
        assert self.draft is not None
        if isinstance(self.draft, ModelSettings):
            plain = self.draft.quantization == "none" and self.draft.gguf_file is None
            require(plain, "draft", "must not be quantized to be trained", self.draft.name)
            own = self.draft.repository != self.model.repository
            require(own, "draft", "must not be the target itself", self.draft.name)
        require(self.learning_rate > 0, "learning_rate", "must be positive", self.learning_rate)
        lowest = min(self.temperatures, default=-1)
        rule = "must be a list of at least one, none negative"
        require(lowest >= 0, "temperatures", rule, self.temperatures)
        require_possible_path("output", self.directory)

    def of_job(self, overrides: Sequence[str]) -> Self:
        """Each job trains a draft of its own."""
        others = [one for one in overrides if not one.startswith(("model=", "draft=", "+pair="))]
        if self.output or not others:
            return self
        label = _file_name(" ".join(others))
        return dataclasses.replace(self, output=f"{self.directory}-{label}")

    def check_engine(self, engine: Abilities) -> None:
        super().check_engine(engine)
        rule = "must be local: others cannot be trained"
        require(engine.own_loop, "engine", rule, self.engine.name)

    @property
    def pair_identity(self) -> tuple[object, ...]:
        """A trained draft serves no other run."""
        return *super().pair_identity, self.directory

    @property
    def directory(self) -> str:
        """The directory of the trained draft."""
        if self.output:
            return self.output
        assert self.draft is not None
        names = [_file_name(model.name) for model in (self.model, self.draft)]
        return f"drafts/{'-'.join(names)}"


def _file_name(name: str) -> str:
    """`meta-llama/Llama-3.2-1B` -> `meta-llama-Llama-3.2-1B`."""
    return re.sub(r"[^A-Za-z0-9_.]+", "-", name).strip("-.")


class Distill(Command):
    """Trains a draft between two measurements of latency."""

    name = "distill"
    summary = (
        "train a draft model or a head on the model's own answers, and measure it before and after"
    )
    example = "model=30B draft=eagle3 prompts=questions.jsonl"
    examples = (
        ("model=30B draft=7B prompts=questions.jsonl", "a draft model"),
        (
            "model=30B draft=eagle3 prompts=q.jsonl",
            "a new head; also dflash, dflash2, jetspec, medusa",
        ),
        ("model=30B draft=./head output=./better prompts=q.jsonl", "train a head further"),
    )
    notes = (
        "After Ctrl-C or a kill the same command goes on. "
        "The result is a directory that draft= takes."
    )
    question = "Did training help?"
    help_order = 5
    settings = DistillSettings
    experiment = "harness.commands.distill.measure"
    row = DistillRow

    def line(self, rows: Sequence[Any]) -> str:
        """The speed-up after the training; the speculative arm's row of the second stage is the last."""
        from harness.commands.latency.tables.run import result_line

        return result_line(rows[-1])

    def tables(self, runs: Sequence[Any]) -> Document:
        from harness.commands.distill.tables import trained_table

        return [trained_table(runs)]


RECORD = Distill()
