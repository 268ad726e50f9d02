"""Files that a run's settings name, looked for before anything is imported that takes seconds."""

from __future__ import annotations

from pathlib import Path

from harness.config.run import RunSettings
from harness.engines.registry import engine_of
from harness.models.places import check_place
from harness.prompts.sets import load_prompts


def require_files(settings: RunSettings) -> None:
    """Raise a SettingError for the directory of a model, or a file of prompts, that is not there."""
    if engine_of(settings).computes_here:
        for role, model in settings.models.items():
            is_built_here = settings.weights == "random" and model.architecture is not None
            if not is_built_here:
                check_place(role, model.repository)
    prompts = getattr(settings, "prompts", None)
    if prompts is None or prompts.repository is not None:
        return
    if not all(Path(file).expanduser().exists() for file in prompts.files):
        load_prompts(prompts)
