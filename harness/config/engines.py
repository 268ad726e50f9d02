"""The settings of what generates: our own loop, another library, or a server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal
from urllib.parse import urlsplit

from harness.config.settings import require, require_at_least

EngineName = Literal["local", "huggingface", "vllm", "server"]
Schedule = Literal["constant", "adaptive"]
Backend = Literal["mp", "ray"]

# Settings that only some engines have.
_ONLY: dict[str, EngineName] = {
    "url": "server",
    "regular_url": "server",
    "rate": "server",
    "api_key_variable": "server",
    "schedule": "huggingface",
    "tensor_parallel_size": "vllm",
    "pipeline_parallel_size": "vllm",
    "distributed_executor_backend": "vllm",
}


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Who generates.

    Attributes:
        name: `local` is our own loop, `huggingface` transformers' `generate`, `vllm` vLLM in this process, `server`
            any server that speaks the OpenAI API.
        schedule: how many tokens Hugging Face's assistant drafts: `constant` is `decoding.num_draft_tokens`;
            `adaptive` starts there, changes with the acceptance and stops where the assistant is unsure.
        url: of the server's API, `http://host:8000/v1`. With `regular_url` it is the server that speculates.
        regular_url: of a server with the same model that does not; None to measure `url` alone.
        rate: requests per second on average, at random (Poisson) times, however many are in flight; None to keep
            `batch_size` requests in flight.
        timeout_s: of a request to a server, from its start to its last token.
        api_key_variable: name of the environment variable with the API key; None for servers without one.
        tensor_parallel_size: GPUs that each layer is split over, and
        pipeline_parallel_size: groups of such GPUs that the layers are divided among.
        aa: first measure the regular arm against itself, to see how far apart identical arms are.
        distributed_executor_backend: `mp` for processes of one machine, `ray` for several machines; None lets vLLM
            choose.
    """

    name: EngineName = "local"
    aa: bool = False
    schedule: Schedule = "constant"
    url: str | None = None
    regular_url: str | None = None
    rate: float | None = None
    timeout_s: float = 600.0
    api_key_variable: str | None = None
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    distributed_executor_backend: Backend | None = None

    @property
    def loads_pair(self) -> bool:
        """Whether it generates with a pair that is loaded in this process; the others need no more than a tokenizer."""
        return self.name in ("local", "huggingface")

    @property
    def computes_here(self) -> bool:
        """Whether it computes on this machine."""
        return self.name != "server"

    @property
    def may_crash(self) -> bool:
        """Whether it can end its process without an exception, and changes how others compute in it."""
        return self.name == "vllm"

    @property
    def environment(self) -> dict[str, str]:
        """Variables that its process needs before torch loads, unless the user sets them."""
        # vLLM's build for CPUs warns about NUMA from C++ whenever it starts, beyond the reach of
        # Python's filters: the level is all that can be chosen.
        return {"TORCH_CPP_LOG_LEVEL": "ERROR"} if self.name == "vllm" else {}

    def __post_init__(self) -> None:
        require_at_least(self, tensor_parallel_size=1, pipeline_parallel_size=1)
        for setting, engine in _ONLY.items():
            value, default = (
                getattr(self, setting),
                type(self).__dataclass_fields__[setting].default,
            )
            require(
                value == default or self.name == engine, setting, f"needs engine={engine}", value
            )
        require(
            self.name != "server" or self.url is not None,
            "url",
            "must be set with engine=server",
            self.url,
        )
        for setting in ("url", "regular_url"):
            self._check_url(setting)
        require(0 < self.timeout_s < float("inf"), "timeout_s", "must be positive", self.timeout_s)
        rate_is_positive = self.rate is None or 0 < self.rate < float("inf")
        require(rate_is_positive, "rate", "must be positive, in requests per second", self.rate)

    def _check_url(self, setting: str) -> None:
        url = getattr(self, setting)
        if url is None:
            return
        parts = urlsplit(url)
        # Settings are written into rows, so that the message must not repeat a password either.
        rule = "must hold no user, password or query: use engine.api_key_variable"
        require("@" not in parts.netloc and not parts.query, setting, rule, "***")
        is_http = parts.scheme in ("http", "https") and bool(parts.netloc)
        require(is_http, setting, "must be an address such as http://host:8000/v1", url)
