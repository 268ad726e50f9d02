"""Asks servers for their version, models and start time, and chooses the model for requests: the model that the user
typed, or the only one.

A URL does not identify the server at this address, because the server may have been restarted with other flags.
"""

from __future__ import annotations

import json
import math
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

# Prometheus's name for the start time of a process, in seconds since the epoch. It is found by a pattern, because
# parsing the whole page takes long.
_START = re.compile(r"^process_start_time_seconds(?:\{.*\})? (\S+)", re.MULTILINE)
# A larger number cannot be a start time.
_MOST_SECONDS = 1e11
# HTTP statuses for a page that a server does not have, or does not offer for GET.
_NO_PAGE = (404, 405, 501)
# An error message lists at most this many models of a server.
_MOST_NAMED = 8


class ListedModel(NamedTuple):
    """A model in a server's list.

    Attributes:
        name: its name in requests, `id` in the list.
        root: the place of its weights; None if the server does not report it.
        owner: `owned_by`, by which the kind of server is recognised; None if the server does not report it.
        context: the most tokens of a prompt together with its answer; None if the server does not report it.
        is_listed: whether the server's list contains the model. If not, it is only a name to try (`choose_model`).
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
    """A server, and the way in which a run sends requests to it.

    Attributes:
        model: the model in requests.
        dialect: the kind of server, which determines the form of requests.
        server: its name and version, as it reports them; None if it does not report them.
        slots: how many requests it answers at the same time; infinite if it does not report this.
    """

    model: ListedModel
    dialect: Dialect
    server: str | None
    slots: float = math.inf


@dataclass(frozen=True)
class ServerReport(ServerIdentity):
    """A server's description of itself, with its models.

    Attributes:
        models: the models in its list; empty if it has no list.
    """

    models: Sequence[ListedModel] = ()


def server_report(url: str, key: str | None) -> ServerReport | None:
    """Describe the server of an API such as `http://host:8000/v1`.

    None if a page gets no answer in time or a malformed one, or if the list of models is an error other than a missing
    page. For example, the server is still loading (503) or refuses the key (401). A server without such a list (404) is
    described, without models. Any other page may be missing or an error.

    Args:
        key: key of the API; None without one.

    Raises:
        RequestFailed: if the list of models is a redirect to another server.
        SettingError: as `page` does.
    """
    root = root_of(url)
    # The values of `Dialect.about` by page and key: {"/version version": "0.32.0"}.
    about: dict[str, Any] = {}
    try:
        models = _models(_answer(f"{url.rstrip('/')}/models", key))
        for path, names in known_pages().items():
            answer = _as_mapping(_answer(root + path, key, is_optional=True))
            about |= {f"{path} {name}": answer[name] for name in names if name in answer}
            settings = answer.get("default_generation_settings")
            context = settings.get("n_ctx") if isinstance(settings, dict) else None
            # Only llama.cpp's page /props contains this: the context of a request. Its list of models has only the
            # context of the training, and no max_model_len.
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
    """The reason why a server is not ready: None if it is ready, empty if nothing answers.

    If the server has a health page, this page decides, otherwise the list of models does. While llama.cpp loads its
    models, it already lists them, but its health page answers 503. mlx_lm may answer requests although it lists no
    models.

    Raises:
        SettingError: if the server requires a key, or another key; and as `page` does.
    """
    health_url = f"{root_of(url)}/health"
    list_url = f"{url.rstrip('/')}/models"
    asked_url = health_url
    try:
        if _answer(health_url, key) is not None:
            return None
        asked_url = list_url
        body = _answer(list_url, key)
    except RequestFailed as failed:
        if not failed.code:
            return ""
        answer = f"{asked_url} answers {from_outside(str(failed))}"
        if failed.code not in KEY_REFUSED:
            return f"it answers, but {answer}"
        rule = "must name the environment variable with the server's key"
        raise SettingError("engine.api_key_variable", f"{rule}: {answer}") from failed
    return None if _models(body) else f"it answers, but {list_url} lists no model"


def start_time(counters: str) -> str | None:
    """The start time of a process, from its page of counters: in seconds since the epoch, as text. None if it is not
    known.
    """
    for text in _START.findall(counters):
        with suppress(ValueError):
            if 0 < float(text) < _MOST_SECONDS:
                return text
    return None


def samples(counters: str) -> list[Sample]:
    """The samples on a page of counters in Prometheus's format; [] for any other page."""
    # Imported here, because the package also imports web servers, which takes a tenth of a second.
    from prometheus_client.parser import text_string_to_metric_families

    try:
        families = text_string_to_metric_families(counters)
        return [sample for family in families for sample in family.samples]
    # The page is damaged: the parser raises all three errors.
    except (ValueError, IndexError, OverflowError):
        return []


def _answer(url: str, key: str | None, is_optional: bool = False) -> str | None:
    """The body of a page; None if the server has no such page.

    Args:
        is_optional: whether the result is also None if the answer is any other error.

    Raises:
        RequestFailed: if nothing answers in time, if the answer is malformed, or if it is another error and the page
            is not optional.
    """
    try:
        return page(url, key)
    except RequestFailed as failed:
        if failed.code in _NO_PAGE or (failed.code and is_optional):
            return None
        raise


def _as_mapping(body: str | None) -> dict[str, Any]:
    """The JSON object of a page; {} for any other page, and for None."""
    try:
        content = json.loads(body or "{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _models(body: str | None) -> list[ListedModel]:
    """The models in a server's list. The entry `created` is not read, because many servers put the time of the answer
    there.
    """
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
    """Whether a value from JSON is a number of tokens that a context can have."""
    # Not isinstance, because in Python true is also an int.
    return type(value) is int and value > 0


def choose_model(
    report: ServerReport | None,
    repository: str,
    name: str | None,
    typed_model: str | None,
    model_setting: str,
    shown_server: str,
) -> ListedModel:
    """The model for requests to a server. The first rule that applies decides; *wanted* is `name` or, without it,
    `typed_model`:

        the list contains the wanted model                       this model
        the list contains one model, and `name` is not set       this model
        the server has no list                                   the wanted name or, without one, `repository`
        a model is wanted, and the server's kind is not known    the wanted name

    In the last two cases, `is_listed` is False.

    Args:
        report: the server's description of itself; None if there is none.
        repository: repository of the run's model.
        name: the name under which the model is served, if the user set it; otherwise None.
        typed_model: the model in the server's command; None if it is not known.
        model_setting: the setting for the name, `engine.model` or `engine.regular_model`.
        shown_server: the server in messages, such as `engine.url=http://host:8000/v1`.

    Raises:
        SettingError: if no rule applies: a server of a known kind does not list the wanted model, or no model is wanted
            and the server lists several.
    """
    models = [] if report is None else report.models
    wanted = name or typed_model
    if wanted is not None:
        # A command may name a directory by a link or a relative path, and the list the directory itself (`root`).
        names = {wanted, str(Path(wanted).resolve())}
        for served in models:
            if names & {served.name, served.root}:
                return served
    # A command may contain a repository, while the server lists a file of this repository.
    if name is None and len(models) == 1:
        return models[0]
    # Only servers of known kinds list all models that they serve.
    lists_all = bool(models) and models[0].owner in DIALECTS.names()
    if not models or (wanted is not None and not lists_all):
        return ListedModel(wanted or repository, is_listed=False)
    listed = ", ".join(str(served) for served in models[:_MOST_NAMED])
    rule = f"must name a model that {shown_server} serves: {listed}"
    raise SettingError(model_setting, rule, *filter(None, [wanted]))


def check_same_weights(models: Sequence[ListedModel]) -> None:
    """Raise a SettingError if servers serve different weights, according to the file names in their lists.

    Only called if the user named no served model. A model that is not listed is ignored, because its name says nothing
    about the weights.

    Args:
        models: the models of the servers, the regular server's first.
    """
    models = [model for model in models if model.is_listed]
    files = {PurePosixPath(model.root or model.name).name.lower() for model in models}
    if len(files) > 1:
        regular, speculative = models[0], models[-1]
        rule = f"the servers serve different weights, {' and '.join(map(str, models))}"
        names = f"engine.model={speculative.name} engine.regular_model={regular.name}"
        raise SettingError("engine.model", f"{rule}; to compare these, set {names}")
