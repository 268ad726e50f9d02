"""Our own `serve`, started for each arm."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from harness.config.settings import DraftSettings, ModelSettings, PlacementSettings, require
from harness.engines.record import Opening
from harness.engines.records.server import PresetServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.config.run import RunSettings


# New tokens that the engine's first request asks for, to find out how the server is asked.
_OF_FIRST_REQUEST = 8


class HarnessServer(PresetServer):
    """Runs what `engine=local` runs, behind HTTP."""

    name = "harness_server"
    summary = "starts this project's own server, with and without the draft"
    program = (sys.executable, "-m", "harness", "serve")

    def check(self, run: RunSettings) -> None:
        super().check(run)
        is_chain = run.draft is None or run.draft.most_nodes == 0
        rule = "must be chain with engine=harness_server"
        require(is_chain, "draft.tree", rule, getattr(run.draft, "tree", None))

    def arguments(self, opening: Opening, num_blocks: int) -> dict[str, list[str]]:
        run = opening.settings
        shared = [
            "port={port}",
            # What a preset stands for is typed too: any of that may have been set beside it.
            f"model={run.model.name}",
            *_typed("model", run.model),
            f"dtype={run.dtype}",
            f"batch_size={opening.batch_size}",
            # At `engine.rate` requests come however many wait.
            f"max_waiting={8 * opening.batch_size}",
            f"max_prompt_tokens={opening.longest_prompt}",
            # `serve` has a limit, and the length of answers to requests that name none, which must be within it.
            f"max_new_tokens={max(_OF_FIRST_REQUEST, opening.decoding.max_new_tokens)}",
            f"decoding.max_new_tokens={opening.decoding.max_new_tokens}",
        ]
        shared += _typed("placement", run.placement)
        arms = {"regular": [*shared, "draft=none"]}
        if run.draft is not None:
            drafting = [*shared, f"draft={run.draft.name}", *_typed("draft", run.draft)]
            arms["idle"] = [*drafting, "decoding.num_draft_tokens=0"]
            number = f"decoding.num_draft_tokens={run.decoding.num_draft_tokens}"
            arms["speculative"] = [*drafting, number]
        return arms


def _typed(
    group: str, settings: ModelSettings | DraftSettings | PlacementSettings
) -> Iterator[str]:
    """The settings of a group that are not as by default, as they are typed, but for its name."""
    for field in fields(settings):
        value = getattr(settings, field.name)
        is_typed = field.name != "name" and isinstance(value, str | int | float)
        if is_typed and value != field.default:
            yield f"{group}.{field.name}={value}"


RECORD = HarnessServer()
