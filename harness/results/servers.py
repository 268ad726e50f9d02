"""Ask servers who they are: version, models, and since when they run. Never imports torch.

A URL says nothing about the server behind it, which may have been restarted with other flags.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from harness.config.errors import from_outside

_TIMEOUT_S = 5.0
_MOST_BYTES = 4_000_000
# Pages where servers tell their version, with the keys of what does not change while one runs.
_ABOUT = {
    "/version": ("version", "started"),
    "/props": ("build_info", "model_path", "total_slots", "chat_template"),
    "/server_info": ("version", "model_path", "speculative_algorithm"),
}
# Names of servers by `owned_by` in their list of models, and where their versions are.
_SERVERS = {
    "vllm": ("vLLM", "/version version"),
    "llamacpp": ("llama.cpp", "/props build_info"),
    "sglang": ("SGLang", "/server_info version"),
    "tensorrt_llm": ("TensorRT-LLM", "/version version"),
    "harness": ("harness", "/version version"),
}
_LONGEST_VERSION = 60
# Prometheus's name for it, in seconds.
_START = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
# Exceptions where nothing answers, or what answers is malformed.
_NO_ANSWER = (OSError, http.client.HTTPException, ValueError, RecursionError)
# Statuses of a page that a server does not have, or not for GET.
_NO_PAGE = (404, 405, 501)


class ServedModel(NamedTuple):
    """A model in a server's list.

    Attributes:
        root: where its weights are; None where the server does not tell.
        owner: `owned_by`, which tells the kind of server.
        context: the most tokens of a prompt with its answer; None where the server does not tell.
    """

    name: str
    root: str | None = None
    owner: str | None = None
    context: int | None = None

    def __str__(self) -> str:
        name = from_outside(self.name)
        if self.root is None or PurePosixPath(self.root).name == PurePosixPath(self.name).name:
            return name
        return f"{name} ({from_outside(self.root)})"


@dataclass(frozen=True)
class ServerReport:
    """A server as it describes itself.

    Attributes:
        about: version, models and files, by path and key.
        started: text that changes when the server is restarted; None where it tells no such thing.
        models: that it lists; empty where it has no such list.
    """

    about: dict[str, Any]
    started: str | None
    models: Sequence[ServedModel] = ()

    @property
    def owner(self) -> str | None:
        """The kind of server, `owned_by` of its first model; None where it does not tell."""
        return self.models[0].owner if self.models else None

    @property
    def name(self) -> str | None:
        """`vLLM 0.32.0`, or the name alone where the version is not told; None for an unknown
        server.
        """
        if self.owner not in _SERVERS:
            return None
        name, place = _SERVERS[self.owner]
        version = self.about.get(place)
        if not isinstance(version, str) or not version.isprintable():
            return name
        return f"{name} {version[:_LONGEST_VERSION]}".strip()


def server_reports(urls: Sequence[str], key: str | None) -> list[ServerReport] | None:
    """Describe these servers; None where one does not answer.

    Args:
        key: of their API.
    """
    servers = []
    for url in dict.fromkeys(urls):
        report = server_report(url, key)
        if report is None:
            return None
        servers.append(report)
    return servers


def server_report(url: str, key: str | None = None) -> ServerReport | None:
    """Describe the server of an API such as `http://host:8000/v1`; None where nothing answers, or it
    does not tell its models now: it is still loading (503), or refuses the key (401).

    Args:
        key: of the API.
    """
    address = urlsplit(url)
    root = address._replace(path=address.path.rstrip("/").removesuffix("/v1"))
    about: dict[str, Any] = {}
    try:
        models = _models(_answer(f"{url.rstrip('/')}/models", key, may_refuse=False))
        for path, names in _ABOUT.items():
            answer = _as_mapping(_answer(root._replace(path=root.path + path).geturl(), key))
            about |= {f"{path} {name}": answer[name] for name in names if name in answer}
            if path == "/props":
                models = [_with_context(model, answer) for model in models]
        metrics = _answer(root._replace(path=root.path + "/metrics").geturl(), key) or ""
    except _NO_ANSWER:
        return None
    about["models"] = sorted(f"{model.name} {model.root}" for model in models)
    started = about.pop("/version started", None)
    if started is None:
        started = start_time(metrics)
    return ServerReport(about, None if started is None else str(started), models)


def start_time(page: str) -> str | None:
    """When the process behind a page of counters was started; None where it does not tell."""
    found = _START.search(page)
    return found[1] if found else None


def page_of(url: str, key: str | None) -> str | None:
    """The body of a page of a server; None where it has no such page, or nothing answers.

    Args:
        key: of the server's API.
    """
    try:
        return _answer(url, key)
    except _NO_ANSWER:
        return None


def _answer(url: str, key: str | None, may_refuse: bool = True) -> str | None:
    """Return the body of an answer; None where the server has no such page. Raises one of `_NO_ANSWER`.

    Args:
        may_refuse: whether an answer with another error counts as no such page, too.
    """
    request = urllib.request.Request(url)
    if key:
        # Not sent on where another server is pointed to.
        request.add_unredirected_header("Authorization", f"Bearer {key}")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            return str(response.read(_MOST_BYTES).decode(errors="replace"))
    except urllib.error.HTTPError as error:
        error.close()
        if may_refuse or error.code in _NO_PAGE:
            return None
        raise


def _as_mapping(body: str | None) -> dict[str, Any]:
    try:
        content = json.loads(body or "{}")
    except (ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _with_context(model: ServedModel, props: dict[str, Any]) -> ServedModel:
    """A model of llama.cpp, whose list has the context of its training, not that of a request."""
    settings = props.get("default_generation_settings")
    context = settings.get("n_ctx") if isinstance(settings, dict) else None
    if model.context is not None or not isinstance(context, int) or context <= 0:
        return model
    return model._replace(context=context)


def _models(body: str | None) -> list[ServedModel]:
    """The models in a list. `created` is left out: many servers put the time of the answer there."""
    listed = _as_mapping(body).get("data")
    models = []
    for entry in listed if isinstance(listed, list) else []:
        if not isinstance(entry, dict) or not isinstance(entry.get("id"), str):
            continue
        texts = (entry.get(key) for key in ("root", "owned_by"))
        root, owner = (text if isinstance(text, str) else None for text in texts)
        context = entry.get("max_model_len")
        is_number = isinstance(context, int) and context > 0
        models.append(ServedModel(entry["id"], root, owner, context if is_number else None))
    return models
