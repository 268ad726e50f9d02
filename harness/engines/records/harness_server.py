"""Our own `serve`, started for each arm."""

from __future__ import annotations

import sys
from dataclasses import fields
from typing import TYPE_CHECKING

from harness.config.settings import DraftSettings, ModelSettings, require
from harness.engines.record import Opening
from harness.engines.records.server import PresetServer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from harness.config.run import RunSettings


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
            *_of_model("model", run.model),
            f"dtype={run.dtype}",
            f"batch_size={opening.batch_size}",
            f"max_waiting={8 * opening.batch_size}",
            f"max_prompt_tokens={opening.longest_prompt}",
            # `serve` has a limit, and the length of answers to requests that name none, which must be within it.
            f"max_new_tokens={opening.decoding.max_new_tokens}",
            f"decoding.max_new_tokens={opening.decoding.max_new_tokens}",
        ]
        if run.placement.gpus is not None:
            shared.append(f"placement.gpus={run.placement.gpus}")
        arms = {"regular": [*shared, "draft=none"]}
        if run.draft is not None:
            drafting = [*shared, *_of_model("draft", run.draft)]
            arms["idle"] = [*drafting, "decoding.num_draft_tokens=0"]
            number = f"decoding.num_draft_tokens={run.decoding.num_draft_tokens}"
            arms["speculative"] = [*drafting, number]
        return arms


def _of_model(role: str, model: ModelSettings | DraftSettings) -> Iterator[str]:
    """The settings of a model or a draft as they are typed.

    Where the name is a preset's, what it stands for is among them: any of that may have been set beside it.
    """
    yield f"{role}={model.name}"
    for field in fields(model):
        value = getattr(model, field.name)
        is_typed = field.name != "name" and isinstance(value, str | int | float)
        if is_typed and value != field.default:
            yield f"{role}.{field.name}={value}"


RECORD = HarnessServer()
