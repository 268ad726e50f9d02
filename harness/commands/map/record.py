"""`map`: where speculation pays, over batch size, context and K."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from harness.commands.command import Command
from harness.commands.map.rows import MapRow
from harness.config.engines import Abilities
from harness.config.run import PromptedSettings
from harness.config.settings import LARGEST_K, DecodingSettings, require, require_at_least

# The K of a grid whose settings name none, where the engine takes any.
DRAFT_TOKENS = (1, 3, 5)


@dataclass(frozen=True, kw_only=True)
class MapSettings(PromptedSettings):
    """`map`: where speculation pays, over batch size, context and K.

    Attributes:
        batch_sizes: of the grid; of a server, requests in flight.
        contexts: lengths of the prompts in tokens, to which texts of the set are cut; none takes the prompts as they
            are.
        draft_tokens: the K of the grid; None is 1, 3 and 5, or a server's own K, as far as it reports it.
        num_prompts: how many prompts a cell measures at least, in whole batches, of which there are
            at least 8; a smaller set is asked again.
        num_warmup: batches that every arm decodes first and that are not counted.
    """

    batch_sizes: tuple[int, ...] = (1, 4, 16)
    contexts: tuple[int, ...] = ()
    draft_tokens: tuple[int, ...] | None = None
    num_prompts: int = 8
    num_warmup: int = 1

    # So `decoding.ignore_eos=auto` is allowed.
    COMPARES_TIMES = True
    GPU_RUNNER = "compiled"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, num_prompts=1, num_warmup=0)
        for name in ("batch_sizes", "contexts", "draft_tokens"):
            values = getattr(self, name) or ()
            rises = all(value >= 1 for value in values) and sorted(set(values)) == [*values]
            require(rises, name, "must be numbers from 1 on that rise", values)
        for name in ("batch_sizes", "draft_tokens"):
            require(getattr(self, name) != (), name, "must have a number", [])
        largest = max(self.draft_tokens or (1,))
        require(largest <= LARGEST_K, "draft_tokens", f"must be at most {LARGEST_K}", largest)
        rule = "must be set: without one there is no map (with engine=server: engine.regular_url)"
        require(self.draft is not None, "draft", rule, "none")
        # Settings of a single cell, which the grid replaces.
        k = self.decoding.num_draft_tokens
        rule = "changes nothing: draft_tokens=[...] has the K of the grid"
        require(k == DecodingSettings.num_draft_tokens, "decoding.num_draft_tokens", rule, k)
        rule = "changes nothing: batch_sizes=[...] has those of the grid"
        require(self.batch_size == 1, "batch_size", rule, self.batch_size)

    def require_single_rows(self, rule: str) -> None:
        require(self.batch_sizes == (1,), "batch_sizes", rule, self.batch_sizes)

    def check_engine(self, engine: Abilities) -> None:
        name = self.engine.name
        rule = f"must be null with engine={name}, unless a command behind -- has {{K}}: a server drafts with its own K"
        numbers = self.draft_tokens
        takes_k = engine.computes_here or self.engine.takes_k
        require(takes_k or numbers is None, "draft_tokens", rule, numbers)
        rule = "must be another server than engine.url: a server over itself has no map"
        require(not self.engine.is_over_itself, "engine.regular_url", rule, self.engine.url)


class Map(Command[MapSettings, MapRow]):
    """Measures the cells of a grid, and says where speculation pays."""

    name = "map"
    summary = "where speculation pays, over batch size, context and K, and a schedule for vLLM"
    example = "model=30B draft=7B 'batch_sizes=[1,4,16,64]'"
    examples = (
        ("", "the shipped tiny pair"),
        ("model=30B draft=7B 'batch_sizes=[1,2,4,8,16]' 'draft_tokens=[1,2,4]'", "a finer grid"),
        ("model=30B draft=7B prompts=lengths 'contexts=[512,4096]'", "over the context too"),
    )
    notes = "Writes a schedule for vLLM into the run's directory, from the cells that can tell."
    question = "Up to which load?"
    help_order = 2
    settings = MapSettings
    experiment = "harness.commands.map.measure:MapExperiment"
    row = MapRow
    shown_by = "harness.commands.map.page:map_page"

    def line(self, rows: Sequence[MapRow]) -> str:
        """The highest speed-up."""
        from harness.commands.map.page import highest_in_words
        from harness.results.judging.grid import cells_of
        from harness.results.judging.series import judged_at_once

        return highest_in_words(judged_at_once(cells_of(rows)))
