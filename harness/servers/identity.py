"""Asks servers for their version, models and start time, and chooses the model that each is asked for: the one that was
typed, or the only one.

A URL does not identify the server behind it, which may have been restarted with other flags.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, NamedTuple

from harness.config.errors import SettingError, from_outside
from harness.engines.record import ServerIdentity
from harness.servers.dialects import DIALECTS, Dialect, known_pages
from harness.servers.http import KEY_REFUSED, MISDIRECTED, RequestFailed, page, root_of

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

# Prometheus's name for the start of a process, in seconds since the epoch. A pattern, because parsing the whole page
# takes long.
_START = re.compile(r"^process_start_time_seconds(?:\{.*\})? (\S+)", re.MULTILINE)
# A larger number is not a start time.
_MOST_SECONDS = 1e11
# Statuses for a page that a server does not have, or not for GET.
_NO_PAGE = (404, 405, 501)
# An error lists at most this many models of a server.
_MOST_NAMED = 8


class ListedModel(NamedTuple):
    """A model in a server's list.

    Attributes:
        name: the name under which it is asked for, `id` in the list.
        root: where its weights are; None if the server does not report it.
        owner: `owned_by`, by which the kind of server is recognised; None if the server does not report it.
        context: the most tokens of a prompt together with its answer; None if the server does not report it.
        is_listed: False for a name that is not in the server's list, or if the server has no list.
    """

    name: str
    root: str | None = None
    owner: str | None = None
    context: int | None = None
    is_listed: bool = True

    def __str__(self) -> str:
        name = from_outside(self.name)
        if self.root is None or PurePosixPath(self.root).name == PurePosixPath(self.name).name:
            return name
        return f"{name} ({from_outside(self.root)})"


class AskedServer(NamedTuple):
    """A server, as a run asks it.

    Attributes:
        model: the model that it is asked for.
        dialect: its kind, which determines how it is asked.
        server: its name and version, as it reports them; None if it does not.
    """

    model: ListedModel
    dialect: Dialect
    server: str | None


@dataclass(frozen=True)
class ServerReport(ServerIdentity):
    """A server's description of itself, with its models.

    Attributes:
        models: the models in its list; empty if it has no list.
    """

    models: Sequence[ListedModel] = ()


def server_report(url: str, key: str | None) -> ServerReport | None:
    """Describe the server of an API such as `http://host:8000/v1`. None if nothing answers, or if it does not list its
    models now, because it is still loading (503) or refuses the key (401).

    Args:
        key: key of the API; None without one.

    Raises:
        RequestFailed: if the list is on another server.
    """
    root = root_of(url)
    about: dict[str, Any] = {}
    try:
        models = _models(_answer(f"{url.rstrip('/')}/models", key))
        for path, names in known_pages().items():
            answer = _as_mapping(_answer(root + path, key, is_optional=True))
            about |= {f"{path} {name}": answer[name] for name in names if name in answer}
            # llama.cpp's list has the training's context, and no max_model_len; /props has the context of a request.
            settings = answer.get("default_generation_settings")
            context = settings.get("n_ctx") if isinstance(settings, dict) else None
            if _is_count(context):
                models = [model._replace(context=model.context or context) for model in models]
        metrics = _answer(f"{root}/metrics", key, is_optional=True) or ""
    except RequestFailed as failed:
        if failed.code == MISDIRECTED:
            raise
        return None
    about["models"] = sorted(f"{model.name} {model.root}" for model in models)
    return ServerReport(about, start_time(metrics), models)


def why_not_ready(url: str, key: str | None) -> str | None:
    """Why a server is not ready: None if it is ready, empty if nothing answers. Its health page decides or, if it has
    none, its list of models.

    While llama.cpp loads models it lists them already, but its health page answers 503. mlx_lm may list no models
    although it answers.

    Raises:
        SettingError: if it requires a key, or another one.
    """
    health = f"{root_of(url)}/health"
    models = f"{url.rstrip('/')}/models"
    place = health
    try:
        if _answer(health, key) is not None:
            return None
        place = models
        body = _answer(models, key)
    except RequestFailed as failed:
        if not failed.code:
            return ""
        answer = f"{place} answers {from_outside(str(failed))}"
        if failed.code not in KEY_REFUSED:
            return f"it answers, but {answer}"
        rule = "must name the environment variable with the server's key"
        raise SettingError("engine.api_key_variable", f"{rule}: {answer}") from failed
    return None if _models(body) else f"it answers, but {models} lists no model"


def start_time(counters: str) -> str | None:
    """The start of the process whose page of counters this is, in seconds since the epoch, as text; None if unknown."""
    for text in _START.findall(counters):
        with suppress(ValueError):
            if 0 < float(text) < _MOST_SECONDS:
                return text
    return None


def samples(counters: str) -> list[Sample]:
    """The samples on a page of counters in Prometheus's format; [] if it is any other page."""
    # Imported here, because it imports web servers, which takes a tenth of a second.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = text_string_to_metric_families(counters)
        return [sample for family in families for sample in family.samples]
    # The page is damaged: the parser raises all three errors.
    except (ValueError, IndexError, OverflowError):
        return []


def _answer(url: str, key: str | None, is_optional: bool = False) -> str | None:
    """The body of an answer; None if the server has no such page.

    Args:
        is_optional: whether an answer with any other error also counts as no such page.

    Raises:
        RequestFailed: if nothing answers, or the answer is an error.
    """
    try:
        return page(url, key)
    except RequestFailed as failed:
        if failed.code in _NO_PAGE or (failed.code and is_optional):
            return None
        raise


def _as_mapping(body: str | None) -> dict[str, Any]:
    try:
        content = json.loads(body or "{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _models(body: str | None) -> list[ListedModel]:
    """The models in a list. `created` is left out, because many servers put the time of the answer there."""
    listed = _as_mapping(body).get("data")
    models = []
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            continue
        texts = (entry.get(key) for key in ("root", "owned_by"))
        root, owner = (text if isinstance(text, str) else None for text in texts)
        context = entry.get("max_model_len")
        context = context if _is_count(context) else None
        models.append(ListedModel(entry["id"], root, owner, context))
    return models


def _is_count(value: object) -> bool:
    # Not isinstance, because JSON's true is an int for Python.
    return type(value) is int and value > 0


def choose_model(
    report: ServerReport | None,
    repository: str,
    name: str | None,
    typed_model: str | None,
    model_setting: str,
    place: str,
) -> ListedModel:
    """The model that a server is asked for: the one that was typed, or else the only one in its list.

    Args:
        report: None for a server that does not describe itself.
        repository: repository of the run's model. It is the name if nothing is typed and the server has no list.
        name: the name under which the model is served, if the user typed it.
        typed_model: the model that the server's command names; None if it is not known.
        model_setting: the setting for the name, `engine.model` or `engine.regular_model`.
        place: the setting with the server's address, such as `engine.url=http://host:8000/v1`.

    Raises:
        SettingError: if the server lists its models, and this one is not among them, or it is not clear which is meant.
    """
    models = [] if report is None else report.models
    typed = name or typed_model
    if typed is not None:
        places = {typed, str(Path(typed).resolve())}
        for served in models:
            if places & {served.name, served.root}:
                return served
    # A command may name a repository while the server lists a file of it.
    if name is None and len(models) == 1:
        return models[0]
    # Servers of an unknown kind may serve models that they do not list.
    lists_all = bool(models) and models[0].owner in DIALECTS.names()
    if not models or (typed is not None and not lists_all):
        return ListedModel(typed or repository, is_listed=False)
    listed = ", ".join(str(served) for served in models[:_MOST_NAMED])
    rule = f"must name a model that {place} serves: {listed}"
    raise SettingError(model_setting, rule, *filter(None, [typed]))


def check_same_weights(models: Sequence[ListedModel]) -> None:
    """Raise a SettingError if servers, the regular one first, serve different weights.

    Only for runs in which the user named no served model. A server without a list is ignored, because it may be down.
    """
    models = [model for model in models if model.is_listed]
    files = {PurePosixPath(model.root or model.name).name.lower() for model in models}
    if len(files) > 1:
        regular, speculative = models[0], models[-1]
        rule = f"the servers serve different weights, {' and '.join(map(str, models))}"
        names = f"engine.model={speculative.name} engine.regular_model={regular.name}"
        raise SettingError("engine.model", f"{rule}; to compare these, set {names}")
