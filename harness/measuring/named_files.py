"""Files that a run's settings name, looked for before anything is imported that takes seconds."""

from __future__ import annotations

from pathlib import Path

from harness.config.repositories import check_place
from harness.config.run import PromptedSettings, RunSettings
from harness.config.settings import require
from harness.engines.registry import engine_of
from harness.measuring.prompts.sets import load_prompts


def require_files(settings: RunSettings) -> None:
    """Raise a SettingError for the directory of a model, a file of prompts or of an earlier run that is not there."""
    if engine_of(settings).computes_here:
        for role, model in settings.models.items():
            is_built_here = settings.weights == "random" and model.architecture is not None
            if not is_built_here:
                check_place(role, model.repository)
    for setting, path in settings.named_paths.items():
        require(Path(path).expanduser().exists(), setting, "no such file or directory", path)
    if not isinstance(settings, PromptedSettings) or settings.prompts.repository is not None:
        return
    prompts = settings.prompts
    if not all(Path(file).expanduser().exists() for file in prompts.files):
        load_prompts(prompts)
