"""The record and the settings of `compare`, which races both arms on prompts that the user types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from harness.commands.command import Command
from harness.commands.compare.rows import CompareRow
from harness.config.engines import Abilities
from harness.config.run import PromptedSettings
from harness.config.settings import require

View = Literal["auto", "race", "log"]
# `auto` shows a race, in which two texts are side by side, on terminals with at least this many columns.
NARROWEST_RACE = 80


@dataclass(frozen=True, kw_only=True)
class CompareSettings(PromptedSettings):
    """`compare`: both arms on prompts that the user types.

    Attributes:
        view: `race` replays both arms side by side; `log` prints one after the other, and lists every rejection that
            the engine reports; `auto` is a race in a terminal of at least 80 columns, else a log.
        prompt: the only prompt; None reads prompts from the terminal, or from a pipe, one per line.
        prompts: a set whose prompts are examples in the session's history; the first one also serves as warm-up.
    """

    view: View = "auto"
    prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_single_rows("must be 1: compare decodes one prompt at a time")
        is_empty = self.prompt is not None and not self.prompt.strip()
        require(not is_empty, "prompt", "must hold text", self.prompt)

    def check_engine(self, engine: Abilities) -> None:
        rule = "must decode a model: simulated texts mean nothing"
        require(not engine.own_clock, "engine", rule, self.engine.name)


class Compare(Command[CompareSettings, CompareRow]):
    """The record of `compare`, which shows a race of both arms."""

    name = "compare"
    summary = "type a prompt and watch both decoders race, each token coloured by who wrote it"
    example = "model=13B draft=7B"
    examples = (
        ("", "the shipped tiny pair; Ctrl-D ends"),
        ("model=13B draft=7B", "a pair of presets; names as in latency"),
        ('view=log prompt="Once upon a"', "one prompt, and every rejection"),
        ("< prompts.txt", "one prompt per line"),
    )
    question = "What did single races show?"
    settings = CompareSettings
    experiment = "harness.commands.compare.measure:CompareExperiment"
    row = CompareRow
    shown_by = "harness.commands.compare.tables:races_page"
    sweeps = False

    def needs_local(self, settings: CompareSettings) -> bool:
        return True
