"""Any server that speaks the OpenAI API: one that speculates, and one that does not."""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from harness.config.engines import EngineSettings
from harness.config.errors import SettingError
from harness.config.settings import require, require_at_least
from harness.config.synthetic import for_llama_cpp, for_vllm, marginal_rates
from harness.engines.record import EngineRecord, Opening

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.config.settings import ModelSettings
    from harness.engines.protocol import Engine

# The times that `engine.slo` may bound.
SLO = ("ttft_ms", "itl_ms")
# The servers that are asked, in their order. `idle` could speculate and drafts nothing.
SERVERS = ("regular", "idle", "speculative")
# `engine.blocks=auto` where one arm after the other has the devices.
_BLOCKS = 4
# The same at most, of a run that ends as soon as it is precise enough (`precision`).
_MOST_BLOCKS = 24
_ABOUT_TIMES = "is for latency and map: it is about times"
# Entries of a request's body that other settings decide.
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
# Entries that the measurement needs as they are.
_NEEDED = ("n", "stream", "stream_options", "stop", "stop_token_ids", "return_token_ids")
# Entries by which OpenAI's API, vLLM, SGLang and llama.cpp hold an answer to a grammar.
_GRAMMARS = (
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
)


@dataclass(frozen=True, kw_only=True)
class ServersSettings(EngineSettings):
    """Settings of every engine whose arms are servers.

    Attributes:
        model: the name under which the server that speculates serves the model, where that is not its
            repository's or file's: an alias, an adapter. None looks for the model in the server's list.
        rate: requests per second on average, at random (Poisson) times, however many are in flight;
            None to keep `batch_size` requests in flight.
        timeout_s: of a request, from its start to its last token.
        chat: ask the chat endpoint with the messages of each prompt, so that the server applies its
            own template and parsers; otherwise prompts are sent as token ids or text.
        slo: the most milliseconds that a request may take, `{ttft_ms: 500, itl_ms: 50}`: to its
            first token, and on average for each token after it; None for no goodput.
        api_key_variable: name of the environment variable with the API key; None for servers
            without one.
        dialect: the kind of server, where it is not the one that its list of models names: `vllm`,
            `llamacpp`, ..., or a `Dialect` in a file, `./my_server.py:MINE`.
        extra: further entries of every request's body: `{priority: 2}`. With a grammar
            (`{response_format: {type: json_object}}`) answers are compared with those of the
            regular server, which has it too, and not with the model's own probabilities.
        flags: further arguments of the servers that are started here.
        environment: variables of the servers that are started here, by name.
        start_timeout_s: until a server that is started here must be ready.
        blocks: how often each server is started, in turns on the same devices, where both at once
            do not fit: a block is the unit of the interval. 0 starts both at once; `auto` is 0 where
            memory holds both, else 4; with `precision` at most that often, and `auto` at most 24 times.
        places: of servers that are started here, the variables of the environment that give each
            one its devices, `[{CUDA_VISIBLE_DEVICES: 0}, {CUDA_VISIBLE_DEVICES: 1}]`. They run side
            by side, and in each block every one is started in every place, so that a slower
            device is no slower arm.
    """

    model: str | None = None
    rate: float | None = None
    timeout_s: float = 600.0
    chat: bool = False
    slo: Mapping[str, float] | None = None
    api_key_variable: str | None = None
    dialect: str | None = None
    extra: Mapping[str, Any] | None = None
    flags: tuple[str, ...] = ()
    environment: Mapping[str, Any] | None = None
    start_timeout_s: float = 600.0
    blocks: int | Literal["auto"] = "auto"
    places: tuple[Mapping[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.blocks != "auto":
            require_at_least(self, blocks=0)
        rule = "must be positive"
        require(self.start_timeout_s > 0, "start_timeout_s", rule, self.start_timeout_s)
        require(self.timeout_s > 0, "timeout_s", rule, self.timeout_s)
        rule = "must be positive, in requests per second"
        require(self.rate is None or self.rate > 0, "rate", rule, self.rate)
        number = 2 + self.has_idle
        rule = f"must be {number}, one for each server that is started, with engine.blocks of 1 or more"
        fits = not self.places or (len(self.places) == number and self.blocks != 0)
        require(fits, "places", rule, self.places)
        for name, value in (self.extra or {}).items():
            place = _SET_ELSEWHERE.get(name)
            advice = f"must not hold {name}" + (f", which {place} sets" if place else "")
            is_free = place is None and name not in _NEEDED
            require(is_free, "extra", advice, f"{{{name}: {value}}}")
        rule = f"must be milliseconds by name, of {' and '.join(SLO)}"
        for name, most in (self.slo or {}).items():
            is_number = isinstance(most, int | float) and not isinstance(most, bool)
            is_possible = name in SLO and is_number and 0 < most < math.inf
            require(is_possible, "slo", rule, f"{{{name}: {most}}}")

    @property
    def has_idle(self) -> bool:
        """Whether there is a server that could speculate and drafts nothing."""
        return False

    @property
    def beyond_model(self) -> str | None:
        if self.chat:
            return "engine.chat=true"
        for name, grammar in (self.extra or {}).items():
            if name in _GRAMMARS:
                return f"engine.extra={{{name}: {grammar}}}"
        return None


@dataclass(frozen=True, kw_only=True)
class ServerSettings(ServersSettings):
    """Settings of `engine=server`.

    Attributes:
        url: of the server's API, `http://host:8000/v1`. With `regular_url` it is the server that
            speculates.
        regular_url: of a server with the same model that does not; None to measure `url` alone.
        idle_url: of a server with the same model that could speculate and drafts nothing (K of 0),
            to divide the speed-up into its price and its gain.
        regular_model: as `model`, of the server that does not speculate; None for the same name.
        metrics_url: the page of the Prometheus counters of `url`, where it is not /metrics or
            /prometheus/metrics on the server itself (Dynamo: on the port of a worker); of several
            pages, such as those of several workers, the counters are added up.
        start: commands that start the server of each arm here, `{regular: ..., speculative: ...}`,
            each a text or a list. `{port}`, `{model}`, `{draft}`, `{K}` and `{directory}` (the
            run's) are filled in. They end with the run, however it ends. `idle` is a third one,
            which could speculate and drafts nothing.
    """

    name: str = "server"
    url: str | None = None
    regular_url: str | None = None
    idle_url: str | None = None
    regular_model: str | None = None
    metrics_url: tuple[str, ...] = ()
    start: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        rule = "must be set with engine=server, or engine.start, and not both"
        require((self.url is None) == bool(self.start), "url", rule, self.url)
        for arm, command in (self.start or {}).items():
            setting = f"start.{arm}"
            require(arm in SERVERS, "start", f"must have commands for {', '.join(SERVERS)}", arm)
            words = _words(setting, command) if isinstance(command, str) else command
            is_list = isinstance(words, Sequence) and all(isinstance(word, str) for word in words)
            require(is_list and bool(words), setting, "must be a command", command)
            has_port = any("{port}" in word for word in words)
            require(has_port, setting, "must say where {port} goes", command)
        rule = "is for servers that the harness starts: engine.start, or engine=vllm_server"
        if self.url is not None:
            require(not self.flags, "flags", rule, self.flags)
            require(not self.environment, "environment", rule, self.environment)
            require(self.blocks == "auto", "blocks", rule, self.blocks)
            require(not self.places, "places", rule, self.places)
        else:
            rule = "is for a server that runs already, and not beside engine.start"
            for name in ("regular_url", "idle_url", "metrics_url"):
                value = getattr(self, name)
                require(not value, name, rule, value)
        rule = "needs a server of each arm beside it"
        require(self.has_two or not self.has_idle, "idle_url", rule, self.idle_url or "started")
        for name in ("url", "regular_url", "idle_url"):
            _check_url(name, getattr(self, name))
        for page in self.metrics_url:
            _check_url("metrics_url", page)
        super().__post_init__()

    @property
    def has_two(self) -> bool:
        """Whether there is a server for each arm."""
        return self.regular_url is not None or {"regular", "speculative"} <= set(self.start or ())

    @property
    def has_idle(self) -> bool:
        return self.idle_url is not None or "idle" in (self.start or ())


@dataclass(frozen=True, kw_only=True)
class PresetSettings(ServersSettings):
    """Settings of servers whose commands follow from those of the run.

    Attributes:
        program: that is started, where it is not found under its usual name: `/opt/bin/llama-server`,
            or a command such as `python -m vllm.entrypoints.openai.api_server`.
        tax: also measure the server with its draft loaded and nothing drafted: what being able to
            speculate costs, and what drafting gains.
    """

    program: str | None = None
    tax: bool = False

    def __post_init__(self) -> None:
        if self.program is not None:
            require(
                bool(_words("program", self.program)), "program", "must be a command", self.program
            )
        super().__post_init__()

    @property
    def has_idle(self) -> bool:
        return self.tax


class Servers(EngineRecord):
    """An engine whose arms are servers."""

    may_queue = True
    takes_load = True
    starts_slowly = True

    def commands(self, opening: Opening, num_blocks: int) -> dict[str, list[str]]:
        """The command of each server that is started here, by arm, with `{port}` in it."""
        raise NotImplementedError

    def variables(self, opening: Opening, num_blocks: int) -> dict[str, str]:
        """Variables of the servers that are started here, unless the user sets them."""
        return {}

    def fit_together(self, opening: Opening) -> bool:
        """Whether memory holds the servers of both arms at once."""
        raise NotImplementedError

    def open(self, opening: Opening) -> Engine:
        """Start the servers."""
        from harness.engines.server.engine import ServerEngine
        from harness.engines.server.launch import Launch, Served

        settings: Any = opening.settings.engine
        num_blocks = 0
        if opening.settings.draft is not None and not opening.settings.JUDGES_DRAFT:
            is_precise = getattr(opening.settings, "precision", None) is not None
            num_blocks = _MOST_BLOCKS if is_precise else _BLOCKS
            if settings.blocks != "auto":
                num_blocks = settings.blocks
            elif not settings.places and self.fit_together(opening):
                num_blocks = 0
        environment = self.variables(opening, num_blocks) | _texts(settings.environment or {})
        # Servers of a preset load the same model by the same name.
        models = {"regular": getattr(settings, "regular_model", None)}
        served = []
        for name, command in self.commands(opening, num_blocks).items():
            log = opening.directory.resolve() / f"{name}_server.log"
            command = [*command, *settings.flags]
            launch = Launch(command, environment, log, settings.start_timeout_s)
            model = models.get(name) or settings.model
            served.append(Served(name, f"engine.start.{name}", model, launch=launch))
        places = [_texts(place) for place in settings.places] if num_blocks else []
        return ServerEngine(opening, served, num_blocks, places)


class Server(Servers):
    """Two servers with the same model, of which one speculates, or any one server."""

    name = "server"
    summary = "servers with an OpenAI API: vLLM, SGLang, llama.cpp or another"
    settings = ServerSettings
    computes_here = False
    # By flags that a server is started with; `advice` names them.
    has_synthetic_acceptance = True
    default_draft: ClassVar[str | None] = "server"

    def adapted(self, run: RunSettings) -> RunSettings:
        """Leave out the default draft where there is one address, and so only the regular arm.

        Whether that server speculates, and with what, is not known here.
        """
        settings: Any = run.engine
        if settings.has_two or run.draft is None or run.JUDGES_DRAFT:
            return run
        rule = (
            "needs engine.regular_url (or engine.start.regular), a server without speculation to"
            " compare with; one server alone is measured as it is"
        )
        require(run.draft.name == self.default_draft, "draft", rule, run.draft.name)
        return dataclasses.replace(run, draft=None)

    def check(self, run: RunSettings) -> None:
        super().check(run)
        settings: Any = run.engine
        has_two = settings.has_two
        rule = (
            "must not be none: engine.url speculates, and draft names with what in tables "
            "(draft=server)"
        )
        require(not has_two or run.draft is not None, "draft", rule, "none")
        needs_draft = any("{draft}" in str(command) for command in (settings.start or {}).values())
        is_named = run.draft is not None and run.draft.name != self.default_draft
        rule = "must name what {draft} stands for in engine.start"
        require(is_named or not needs_draft, "draft", rule, run.draft and run.draft.name)
        may_idle = run.COMPARES_TIMES or not settings.has_idle
        require(may_idle, "engine.idle_url", _ABOUT_TIMES, settings.idle_url)
        rule = "must be set for recovery, which compares with its texts"
        require(has_two or not run.compares_texts, "engine.regular_url", rule, None)

    def programs(self, settings: Any) -> list[str]:
        commands = (settings.start or {}).values()
        return [(shlex.split(one) if isinstance(one, str) else one)[0] for one in commands]

    def location(self, settings: Any) -> str | None:
        """The address that rows show, of the server that speculates if there are two; None for
        servers that are started here.
        """
        return settings.url and str(settings.url)

    def addresses(self, settings: Any) -> list[str]:
        """All addresses, the regular one first."""
        urls = (settings.regular_url, settings.idle_url, settings.url)
        return [url for url in urls if url is not None]

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

    def commands(self, opening: Opening, num_blocks: int) -> dict[str, list[str]]:
        run = opening.settings
        values: dict[str, object] = {"model": path_of(run.model), "directory": opening.directory}
        if run.draft is not None:
            draft = run.models.get("draft")
            draft_path = run.draft.name if draft is None else path_of(draft)
            values |= {"draft": draft_path, "K": run.decoding.num_draft_tokens}
        settings: Any = run.engine
        commands = {}
        for arm in SERVERS:
            template = (settings.start or {}).get(arm, ())
            parts = shlex.split(template) if isinstance(template, str) else list(template)
            for name, value in values.items():
                parts = [part.replace(f"{{{name}}}", str(value)) for part in parts]
            if parts:
                commands[arm] = parts
        return commands

    def fit_together(self, opening: Opening) -> bool:
        """Whether there is no GPU: without one, the user's own commands take only what they need."""
        from harness.config.machine import gpu_names

        return not gpu_names()

    def open(self, opening: Opening) -> Engine:
        from harness.engines.server.engine import ServerEngine
        from harness.engines.server.launch import Served

        settings: Any = opening.settings.engine
        if settings.start:
            return super().open(opening)
        model = settings.model
        served = []
        if settings.regular_url is not None:
            regular = Served(
                "regular",
                "engine.regular_url",
                settings.regular_model or model,
                settings.regular_url,
                model_setting="engine.regular_model",
            )
            served.append(regular)
        if settings.idle_url is not None:
            served.append(Served("idle", "engine.idle_url", model, settings.idle_url))
        arm = "speculative" if served else "regular"
        # Its counters alone may be elsewhere; those of the others are below their addresses.
        served.append(Served(arm, "engine.url", model, settings.url, settings.metrics_url))
        return ServerEngine(opening, served)


class PresetServer(Servers):
    """A kind of server that is started for each arm, by the settings of the run.

    Attributes:
        program: the command that usually starts it.
        can_idle: whether it can have its draft loaded and draft nothing.
    """

    settings = PresetSettings
    program: tuple[str, ...]
    can_idle: ClassVar[bool] = True

    def check(self, run: RunSettings) -> None:
        super().check(run)
        settings: Any = run.engine
        has_idle = settings.has_idle
        rule = f"cannot be measured with engine={self.name}, which has no way to draft nothing"
        require(self.can_idle or not has_idle, "engine.tax", rule, has_idle)
        require(run.COMPARES_TIMES or not has_idle, "engine.tax", _ABOUT_TIMES, has_idle)
        rule = "is the price of a draft, and there is none"
        require(run.draft is not None or not has_idle, "engine.tax", rule, has_idle)

    def arguments(self, opening: Opening, num_blocks: int) -> dict[str, list[str]]:
        """The arguments of each arm's server, and of `idle` with a draft, behind the program.

        Raises:
            SettingError: the server cannot run these settings.
        """
        raise NotImplementedError

    def _program(self, settings: Any) -> list[str]:
        return shlex.split(settings.program) if settings.program else list(self.program)

    def programs(self, settings: Any) -> list[str]:
        return self._program(settings)[:1]

    def commands(self, opening: Opening, num_blocks: int) -> dict[str, list[str]]:
        settings: Any = opening.settings.engine
        program = self._program(settings)
        by_arm = self.arguments(opening, num_blocks)
        names = [name for name in SERVERS if name in by_arm and (name != "idle" or settings.tax)]
        return {name: [*program, *by_arm[name]] for name in names}

    def fit_together(self, opening: Opening) -> bool:
        """Whether memory holds weights and caches of all servers at once."""
        from harness.models.devices import free_memory

        planned = opening.planned
        target, *others = planned.sketches
        if planned.shared:
            others.append(target)
        num_slots = opening.batch_size * opening.context
        models = [target, target, *others]
        num_servers = 2
        settings: Any = opening.settings.engine
        if settings.has_idle:
            models += [target, *others]
            num_servers = 3
        needed = sum(model.weight_bytes + num_slots * model.cache_bytes for model in models)
        free = free_memory(planned.gpus)
        room = sum(free[gpu] for gpu in planned.gpus) if planned.gpus else free["cpu"]
        # Each server keeps the reserve.
        reserve_bytes = 1e9 * opening.settings.placement.reserve_gb * max(1, len(planned.gpus))
        reserve = num_servers * reserve_bytes
        return bool(needed + reserve <= room)


def path_of(model: ModelSettings) -> str:
    """The file or directory of a model here, or its name on the hub."""
    if model.gguf_file is not None:
        return str(Path(model.repository) / model.gguf_file)
    return model.repository


def _words(setting: str, command: str) -> list[str]:
    """The words of a command, as a shell splits it. Raises a SettingError where a quotation mark has no other half."""
    try:
        return shlex.split(command)
    except ValueError as error:
        raise SettingError(setting, f"must be a command: {error}", command) from error


def _texts(variables: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(value) for name, value in variables.items()}


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
    try:
        is_possible = parts.port is None or parts.port > 0
    except ValueError:  # no number, or one that is too large
        is_possible = False
    is_address = parts.scheme in ("http", "https") and bool(parts.hostname) and is_possible
    require(is_address, setting, _ADDRESS_RULE, url)


RECORD = Server()
