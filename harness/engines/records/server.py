"""Any server that speaks the OpenAI API: one that speculates, and one that does not."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import SplitResult, urlsplit

from harness.config.engines import EngineSettings
from harness.config.errors import SettingError
from harness.config.settings import require
from harness.config.synthetic import for_llama_cpp, for_vllm, marginal_rates
from harness.engines.record import Addresses, EngineRecord, Opening

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.engines.protocol import Engine

# The times that `engine.slo` may bound.
SLO = ("ttft_ms", "itl_ms")


@dataclass(frozen=True, kw_only=True)
class ServerSettings(EngineSettings):
    """Settings of `engine=server`.

    Attributes:
        url: of the server's API, `http://host:8000/v1`. With `regular_url` it is the server that
            speculates.
        regular_url: of a server with the same model that does not; None to measure `url` alone.
        model: the name under which `url` serves the model, where that is not its repository's or
            file's: an alias, an adapter. None looks for the model in the server's list.
        regular_model: the same of `regular_url`; None for the same name.
        rate: requests per second on average, at random (Poisson) times, however many are in flight;
            None to keep `batch_size` requests in flight.
        timeout_s: of a request, from its start to its last token.
        chat: ask the chat endpoint with the messages of each prompt, so that the server applies its
            own template and parsers; otherwise prompts are sent as token ids or text.
        slo: the most milliseconds that a request may take, `{ttft_ms: 500, itl_ms: 50}`: to its
            first token, and on average for each token after it; None for no goodput.
        metrics_url: the page of the server's Prometheus counters, where it is not /metrics or
            /prometheus/metrics on the server itself (Dynamo: on the port of a worker).
        api_key_variable: name of the environment variable with the API key; None for servers
            without one.
    """

    name: str = "server"
    url: str | None = None
    regular_url: str | None = None
    model: str | None = None
    regular_model: str | None = None
    rate: float | None = None
    timeout_s: float = 600.0
    chat: bool = False
    slo: Mapping[str, float] | None = None
    metrics_url: str | None = None
    api_key_variable: str | None = None

    def __post_init__(self) -> None:
        require(self.url is not None, "url", "must be set with engine=server", self.url)
        _check_url("url", self.url)
        _check_url("regular_url", self.regular_url)
        _check_url("metrics_url", self.metrics_url)
        _check_slo(self.slo)
        require(self.timeout_s > 0, "timeout_s", "must be positive", self.timeout_s)
        rule = "must be positive, in requests per second"
        require(self.rate is None or self.rate > 0, "rate", rule, self.rate)


class Server(EngineRecord):
    """Two servers with the same model, of which one speculates, or any one server."""

    name = "server"
    summary = "servers with an OpenAI API: vLLM, SGLang, llama.cpp or another"
    settings = ServerSettings
    computes_here = False
    may_queue = True
    takes_load = True
    # By flags that a server is started with; `advice` names them.
    has_synthetic_acceptance = True
    default_draft = "server"

    def adapted(self, run: RunSettings) -> RunSettings:
        """Leave out the default draft where there is one address, and so only the regular arm.

        Whether that server speculates, and with what, is not known here.
        """
        if _settings_of(run).regular_url is not None or run.draft is None:
            return run
        rule = (
            "needs engine.regular_url, a server without speculation to compare with; "
            "engine.url alone is measured as it is"
        )
        require(run.draft.name == self.default_draft, "draft", rule, run.draft.name)
        return dataclasses.replace(run, draft=None)

    def check(self, run: RunSettings) -> None:
        super().check(run)
        has_two = _settings_of(run).regular_url is not None
        rule = (
            "must not be none: engine.url speculates, and draft names with what in tables "
            "(draft=server)"
        )
        require(not has_two or run.draft is not None, "draft", rule, "none")
        rule = "must be set for recovery, which compares with its texts"
        require(has_two or not run.compares_texts, "engine.regular_url", rule, None)

    def location(self, settings: Any) -> str:
        """The address that rows show, of the server that speculates if there are two."""
        return str(settings.url)

    def addresses(self, settings: Any) -> Addresses:
        """Both addresses, the regular one first, and the variable with their API key."""
        urls = [url for url in (settings.regular_url, settings.url) if url is not None]
        return Addresses(tuple(urls), settings.api_key_variable)

    def advice(self, run: RunSettings) -> str | None:
        """The flags of llama.cpp and vLLM for `decoding.synthetic_acceptance`.

        No request sets it, only the start of a server.
        """
        rates = run.decoding.synthetic_rates
        if rates is None:
            return None
        k = run.decoding.most_draft_tokens
        marginal = marginal_rates(rates, k)
        of_vllm = json.dumps(for_vllm(marginal))
        return (
            f"decoding.synthetic_acceptance labels how engine.url was started, here with K={k}:"
            f" llama-server {for_llama_cpp(marginal)},"
            f" or vLLM with {of_vllm} in --speculative-config"
        )

    def open(self, opening: Opening) -> Engine:
        from harness.engines.server.engine import ServerEngine

        return ServerEngine(
            _settings_of(opening.settings),
            opening.planned.tokenizer,
            opening.settings.model,
            opening.batch_size,
            opening.say,
            opening.longest_prompt,
            opening.decoding.max_new_tokens,
        )


def _settings_of(run: RunSettings) -> ServerSettings:
    assert isinstance(run.engine, ServerSettings)
    return run.engine


_ADDRESS_RULE = "must be an address such as http://host:8000/v1"


def _check_url(setting: str, url: str | None) -> None:
    if url is None:
        return
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise SettingError(setting, _ADDRESS_RULE, "***") from error
    # Settings are written into rows, so the message must not repeat a password either.
    rule = "must hold no user, password or query: use engine.api_key_variable"
    require("@" not in parts.netloc and not parts.query, setting, rule, "***")
    require(_is_address(parts), setting, _ADDRESS_RULE, url)


def _is_address(parts: SplitResult) -> bool:
    """Whether a URL is one of HTTP, with a host and at most a port that exists."""
    try:
        has_port = parts.port is None or parts.port > 0
    except ValueError:  # no number, or one that is too large
        return False
    return parts.scheme in ("http", "https") and bool(parts.hostname) and has_port


def _check_slo(slo: Mapping[str, float] | None) -> None:
    rule = f"must be milliseconds by name, of {' and '.join(SLO)}"
    for name, most in (slo or {}).items():
        is_number = isinstance(most, int | float) and not isinstance(most, bool)
        is_possible = name in SLO and is_number and 0 < most < math.inf
        require(is_possible, "slo", rule, f"{{{name}: {most}}}")


RECORD = Server()
