"""The settings of `engine=server`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from harness.config.engines import EngineSettings
from harness.config.run import RunSettings
from harness.config.settings import check_address, require, require_at_least

# Entries of a request's body that other settings determine, with the names of these settings.
_SET_ELSEWHERE = {
    "model": "engine.model",
    "max_tokens": "decoding.max_new_tokens",
    "max_completion_tokens": "decoding.max_new_tokens",
    "temperature": "decoding.temperature",
    "top_p": "decoding.top_p",
    "top_k": "decoding.top_k",
    "ignore_eos": "decoding.ignore_eos",
    "seed": "seed",
    **dict.fromkeys(("prompt", "messages"), "prompts"),
}
# Entries of a request's body that the measurement sets, and that users must not change.
_NEEDED = ("n", "stream", "stream_options", "stop", "stop_token_ids", "return_token_ids")
# Entries with which OpenAI's API, vLLM, SGLang and llama.cpp constrain an answer by a grammar, or change the
# probabilities of tokens otherwise than by temperature, top-k and top-p.
_BEYOND_MODEL = (
    "response_format",
    "structured_outputs",
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "json_schema",
    "regex",
    "ebnf",
    "grammar",
    "logit_bias",
    "min_p",
    "repetition_penalty",
    "repeat_penalty",
    "presence_penalty",
    "frequency_penalty",
    "min_tokens",
    "bad_words",
    "allowed_token_ids",
    "samplers",
    "mirostat",
    "dynatemp_range",
)


@dataclass(frozen=True, kw_only=True)
class ServerSettings(EngineSettings):
    """Settings of `engine=server`.

    Attributes:
        url: address of the server's API, `http://host:8000/v1`. With `regular_url` it is the server that speculates.
        regular_url: address of a server with the same model that does not speculate; None to measure `url` alone.
        start_command: what is typed after `--`, as a list of words: the command of the server that speculates. Without
            `first_command`, the regular server has the same command without its flags of speculation. `{K}`, `{port}`
            and the names under `vary` are filled in.
        first_command: with two commands after `--`, the first one, with which the second is compared.
        vary: values for the names in braces in the commands; a sweep varies them: `-m vary.ubatch=512,1024`.
        model: the name under which the server that speculates serves the model; None for the one in its command, or the
            only one in its list.
        regular_model: as `model`, for the server that does not speculate; None for the same name.
        metrics_url: the page with the Prometheus counters of `url`, if it is not /metrics or /prometheus/metrics on the
            server itself (Dynamo: on the port of a worker); counters of several pages are added up.
        timeout_s: time limit of a request, from its start to its last token.
        chat: use the chat endpoint, so that the server applies its own template and parsers; otherwise prompts are sent
            as token ids or text. `auto` uses it if no model is named.
        api_key_variable: name of the environment variable with the API key; None for servers
            without one.
        dialect: the kind of server, if it is not the one that its list of models names: `vllm`,
            `llamacpp`, ..., or a `Dialect` in a file, `./my_server.py:MINE`.
        extra: further entries of every request's body: `{priority: 2}`. With a grammar
            (`{response_format: {type: json_object}}`) greedy answers are compared with the regular
            server's.
        lossy: whether the flags or the draft of the server that speculates let it write texts that do not follow the
            target's distribution.
        start_timeout_s: how long a started server may take to become ready.
        blocks: number of blocks, which are the units of the interval. In each block, each server is started once, one
            after the other on the same devices. 0 starts both servers once, side by side. `auto` means 4 blocks (with
            `precision`, at most 24) if the servers cannot run side by side, and on GPUs unless both commands bound
            their memory. Side by side, `latency` starts both at least 4 and at most 8 times if the further starts take
            20 seconds at most and there are enough prompts (never with `precision`), otherwise once.
    """

    name: str = "server"
    url: str | None = None
    regular_url: str | None = None
    start_command: tuple[str, ...] = ()
    first_command: tuple[str, ...] = ()
    vary: Mapping[str, Any] | None = None
    model: str | None = None
    regular_model: str | None = None
    metrics_url: tuple[str, ...] = ()
    timeout_s: float = 600.0
    chat: bool | Literal["auto"] = "auto"
    api_key_variable: str | None = None
    dialect: str | None = None
    extra: Mapping[str, Any] | None = None
    lossy: bool = False
    start_timeout_s: float = 600.0
    blocks: int | Literal["auto"] = "auto"

    def __post_init__(self) -> None:
        rule = "must be set, or a server's command typed last: harness latency -- llama-server ..."
        require(self.url is not None or bool(self.start_command), "url", rule, self.url)
        if self.start_command:
            rule = "is for a server that runs already, and not beside a command"
            for name in ("url", "regular_url", "metrics_url"):
                value = getattr(self, name)
                require(not value, name, rule, value)
        else:
            rule = "is for servers that the harness starts, by a command after --"
            require(not self.first_command, "first_command", rule, self.first_command)
            require(not self.vary, "vary", rule, self.vary)
            require(self.blocks == "auto", "blocks", rule, self.blocks)
        for name in ("url", "regular_url"):
            url = getattr(self, name)
            check_address(name, url)
            # People paste an endpoint, `…/v1/completions`, or type `/v1` twice.
            base = re.sub("((?<=/v1)/v1|(/chat)?/completions)/?$", "", url or "")
            require(not url or url == base, name, f"must be the base address, {base}", url)
        for page in self.metrics_url:
            check_address("metrics_url", page)
        if self.blocks != "auto":
            require_at_least(self, blocks=0)
        rule = "must be positive"
        require(self.start_timeout_s > 0, "start_timeout_s", rule, self.start_timeout_s)
        require(self.timeout_s > 0, "timeout_s", rule, self.timeout_s)
        for name, value in (self.extra or {}).items():
            setting = _SET_ELSEWHERE.get(name)
            rule = f"must not hold {name}" + (f", which {setting} sets" if setting else "")
            is_free = setting is None and name not in _NEEDED
            require(is_free, "extra", rule, f"{{{name}: {value}}}")

    @classmethod
    def of(cls, run: RunSettings) -> ServerSettings:
        """Return the engine settings of a run with `engine=server`."""
        assert isinstance(run.engine, cls)
        return run.engine

    @property
    def has_two(self) -> bool:
        """Whether there may be a server for each arm: two addresses, or a command, from which the regular command is
        derived.
        """
        return self.regular_url is not None or bool(self.start_command)

    @property
    def asks_chats(self) -> bool:
        return self.chat is True

    @property
    def beyond_model(self) -> str | None:
        if self.chat is True:
            return "engine.chat=true"
        for name, grammar in (self.extra or {}).items():
            if name in _BEYOND_MODEL:
                return f"engine.extra={{{name}: {grammar}}}"
        return None
