"""Asks a server for its name and version; anything that it does not tell stays unknown."""

from __future__ import annotations

from typing import Any, NamedTuple
from urllib.parse import urlsplit

_TIMEOUT_S = 10.0
_LONGEST_VERSION = 60


class _Known(NamedTuple):
    """A server's name, and where its version is."""

    name: str
    path: str
    key: str


# By `owned_by` in the list of models.
_SERVERS = {
    "vllm": _Known("vLLM", "/version", "version"),
    "llamacpp": _Known("llama.cpp", "/props", "build_info"),
    "sglang": _Known("SGLang", "/server_info", "version"),
    "tensorrt_llm": _Known("TensorRT-LLM", "/version", "version"),
    "harness": _Known("harness", "/version", "version"),
}


async def reported_name(client: Any, owned_by: str | None) -> str | None:
    """`vLLM 0.32.0`, or the name alone where the version is not told; None for an unknown server.

    Args:
        client: OpenAI's, for the server's API.
        owned_by: as the server's list of models says.
    """
    server = _SERVERS.get(owned_by or "")
    if server is None:
        return None
    address = urlsplit(str(client.base_url))
    # Beside the API, not below it.
    root = address.path.rstrip("/").removesuffix("/v1")
    url = address._replace(path=root + server.path).geturl()
    try:
        about = await client.get(url, cast_to=dict[str, Any], options={"timeout": _TIMEOUT_S})
        version = about[server.key]
    except Exception:  # the name is for tables: no answer of a server may end a run here
        return server.name
    if not isinstance(version, str) or not version.isprintable():
        return server.name
    return f"{server.name} {version[:_LONGEST_VERSION]}".strip()
