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
from typing import Any
from urllib.parse import urlsplit

_TIMEOUT_S = 5.0
_MOST_BYTES = 4_000_000
# Pages where servers tell their version, with the keys of what does not change while one runs.
_ABOUT = {
    "/version": ("version", "started"),
    "/props": ("build_info", "model_path", "total_slots", "chat_template"),
    "/server_info": ("version", "model_path", "speculative_algorithm"),
}
# Prometheus's name for it, in seconds.
_START = re.compile(r"^process_start_time_seconds(?:\{[^}]*\})? (\S+)$", re.MULTILINE)
# Exceptions where nothing answers, or what answers is malformed.
_NO_ANSWER = (OSError, http.client.HTTPException, ValueError, RecursionError)
# Statuses of a page that a server does not have, or not for GET.
_NO_PAGE = (404, 405, 501)


@dataclass(frozen=True)
class ServerReport:
    """A server as it describes itself.

    Attributes:
        about: version, models and files, by path and key.
        started: text that changes when the server is restarted; None where it tells no such thing.
    """

    about: dict[str, Any]
    started: str | None


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
        about["models"] = _models(_answer(f"{url.rstrip('/')}/models", key, may_refuse=False))
        for path, names in _ABOUT.items():
            answer = _as_mapping(_answer(root._replace(path=root.path + path).geturl(), key))
            about |= {f"{path} {name}": answer[name] for name in names if name in answer}
        metrics = _answer(root._replace(path=root.path + "/metrics").geturl(), key) or ""
    except _NO_ANSWER:
        return None
    found = _START.search(metrics)
    started = about.pop("/version started", None)
    if started is None and found:
        started = found[1]
    return ServerReport(about, None if started is None else str(started))


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


def _models(body: str | None) -> list[str]:
    """Names and paths of the models. `created` is left out: many servers put the time of the answer there."""
    models = _as_mapping(body).get("data")
    if not isinstance(models, list):
        return []
    named = [model for model in models if isinstance(model, dict)]
    return sorted(f"{model.get('id')} {model.get('root')}" for model in named)
