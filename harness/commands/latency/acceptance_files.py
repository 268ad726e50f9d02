"""Writes the acceptance of a run of `latency` as a file for other tools, into its directory.

`speculation_profile.json` has NVIDIA's schema, which Dynamo's mocker reads; `docs/acceptance.md`
describes it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.commands.latency.speculation_profile import (
    PROFILE_FILE,
    MeasuredAcceptance,
    speculation_profile,
)
from harness.config.run import PromptedSettings
from harness.config.settings import ModelSettings
from harness.config.synthetic import RATES_BY_RANK
from harness.engines.pair import PlannedPair
from harness.measuring.session import Session
from harness.results.environment import package_version
from harness.results.locked_files import replace_file


def write_acceptance(
    session: Session,
    settings: PromptedSettings,
    measured: MeasuredAcceptance,
    rates_by_rank: Sequence[float] = (),
) -> None:
    """Write the file, unless nothing was drafted.

    Args:
        rates_by_rank: acceptance of a tree's children by their rank, which `draft.rates` reads;
            none for chains.
    """
    draft = settings.draft
    if draft is None or not measured.drafted:
        return
    planned = session.planned
    own: dict[str, Any] = {"version": package_version("harness"), "run": session.run}
    if rates_by_rank:
        own[RATES_BY_RANK] = rates_by_rank
    profile = speculation_profile(
        measured,
        method=_method(planned, draft.method),
        is_block=settings.decoding.rule == "block",
        about={
            "target_model": _checkpoint(settings.model),
            "draft_checkpoint": _checkpoint(draft) if draft.HAS_WEIGHTS else None,
            "measurement_conditions": _conditions(settings, measured),
        },
        own=own,
    )
    content = json.dumps(profile, indent=2) + "\n"
    replace_file(session.directory / PROFILE_FILE, content.encode())


def smaller_k_follow(planned: PlannedPair, settings: PromptedSettings) -> bool:
    """Whether a smaller K would accept the beginnings of what was accepted.

    A smaller tree or a smaller block is not the beginning of a larger one, and what a server drafts
    is unknown.
    """
    if settings.num_levels is not None or settings.decoding.rule == "block":
        return False
    if planned.draft_plan is None:
        return False
    return not any(sketch.drafts_in_one_pass for sketch in planned.sketches[1:])


def _method(planned: PlannedPair, method: str) -> str:
    """The way to draft: the kind of a head, `draft_model`, or what `draft=` calls it."""
    if method != "model":
        return method
    if planned.head is not None:
        return planned.head.kind.name
    return "draft_model"


def _checkpoint(model: ModelSettings) -> dict[str, Any]:
    """A checkpoint for readers elsewhere: of a directory's path the last part alone."""
    local = Path(model.repository).is_dir()
    name = Path(model.repository).name if local else model.repository
    return {"id": name, "revision": model.revision, "quantization": model.quantization}


def _conditions(settings: PromptedSettings, measured: MeasuredAcceptance) -> dict[str, Any]:
    """The settings under the schema's names: `osl` is the output sequence length."""
    decoding = settings.decoding
    draft = settings.draft
    names = ("temperature", "top_k", "top_p", "rule", "num_draft_tokens", "ignore_eos")
    return {
        "dataset": settings.prompts.name,
        "osl": decoding.max_new_tokens,
        "num_samples": len(measured.requests),
        **{name: getattr(decoding, name) for name in names},
        "nodes_of_trees": None if draft is None else draft.most_nodes or None,
        "chat_template": settings.chat_template,
        "batch_size": settings.batch_size,
        "engine": settings.engine.name,
        "seed": settings.seed,
        "synthetic": decoding.synthetic_acceptance is not None,
    }
