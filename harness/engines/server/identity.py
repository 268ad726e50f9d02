"""Chooses the model that each server is asked for: the one that the run names, and no other."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from harness.config.errors import SettingError, from_outside
from harness.config.settings import ModelSettings
from harness.results.servers import ServedModel, ServerReport

# `-Q4_K_M.gguf`, `.BF16-00001-of-00003.gguf`: llama.cpp serves files, whose names say more.
_GGUF = re.compile(r"([-._](ud|i?q\d\w*|b?f16|f32|mxfp4))*(-\d+-of-\d+)?\.gguf$")
_MOST_NAMED = 8


def choose_model(
    report: ServerReport | None,
    model: ModelSettings,
    name: str | None,
    address_setting: str,
    address: str,
) -> ServedModel:
    """The model that a server is asked for.

    Args:
        report: None for a server that does not describe itself.
        name: under which it is served; None to look for the run's model.

    Raises:
        SettingError: the server lists models, and this one is not among them.
    """
    models = [] if report is None else report.models
    if not models:
        return ServedModel(name or model.repository)
    exact = (model.repository, model.name) if name is None else (name,)
    chosen = [each for each in models if each.name in exact]
    if name is None:
        chosen += [each for each in models if _is_model(each, model)]
    if chosen:
        return chosen[0]
    setting = address_setting.replace("url", "model")
    place = f"{address_setting}={address}"
    names = ", ".join(str(each) for each in models[:_MOST_NAMED])
    if name is not None:
        raise SettingError(setting, f"must be one that {place} serves: {names}", name)
    rule = f"must name a model of {place}, which serves {names} and not {model.name}"
    raise SettingError(setting, f"{rule}: {setting}={from_outside(models[0].name)}")


def check_same_weights(models: Sequence[ServedModel]) -> None:
    """Raise a SettingError where servers serve different weights and nobody named them."""
    files = {PurePosixPath(each.root or each.name).name.lower() for each in models}
    if len(files) > 1:
        regular, speculative = models
        rule = f"the servers serve different weights, {regular} and {speculative}"
        names = f"engine.model={speculative.name} engine.regular_model={regular.name}"
        raise SettingError("engine.model", f"{rule}; to compare these, set {names}")


def _is_model(served: ServedModel, model: ModelSettings) -> bool:
    """Whether a served name or place is that of the model, wherever its files are there."""
    directory = Path(model.repository)
    places = [model.repository, model.name, model.gguf_file or model.name]
    if directory.is_dir():
        places.append(str(directory.resolve()))
    wanted = {_bare(place) for place in places}
    return any(_bare(place) in wanted for place in (served.name, served.root) if place)


def _bare(place: str) -> str:
    """`llama-3.1-8b` of `meta-llama/Llama-3.1-8B` and `/models/Llama-3.1-8B-Q4_K_M.gguf`."""
    return _GGUF.sub("", PurePosixPath(place).name.lower())
