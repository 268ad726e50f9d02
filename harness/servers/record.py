"""Any server that speaks the OpenAI API: one that speculates, and one that does not."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

from harness.config.engines import EngineSettings
from harness.config.errors import SettingError
from harness.config.model_names import SECOND_COMMAND, SERVED
from harness.config.settings import ModelSettings, check_limits, require, require_at_least
from harness.config.synthetic import marginal_rates
from harness.engines.record import EngineRecord, Opening
from harness.servers.command import (
    CONTAINERS,
    ServerCommand,
    read_command,
    removed_words,
)
from harness.servers.dialects import DIALECTS, known_programs
from harness.servers.identity import ServerReport, server_report

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.config.settings import DraftSettings
    from harness.engines.counts import Counts
    from harness.engines.protocol import Engine

# Variables that say on which devices a server runs, and where its models are.
_OF_DEVICES = ("CUDA_VISIBLE", "HIP_VISIBLE", "HF_HOME")
# `engine.blocks=auto` where one arm after the other has the devices.
_BLOCKS = 4
# How often both servers are started where they run side by side and start quickly, and the fewest prompts of a start.
_STARTS = 8
_PROMPTS_PER_START = 2
# Blocks at most, of a run that ends as soon as it is precise enough (`precision`).
_MOST_BLOCKS = 24
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
class ServerSettings(EngineSettings):
    """Settings of `engine=server`.

    Attributes:
        url: of the server's API, `http://host:8000/v1`. With `regular_url` it is the server that speculates.
        regular_url: of a server with the same model that does not; None to measure `url` alone.
        start_command: what is typed behind `--`, as a list of words: the command that starts the server that
            speculates. The regular server is the same command without its flags of speculation. `{K}`, `{port}` and
            the names under `vary` are filled in.
        first_command: with two commands behind `--` the first one, which the second is compared with.
        vary: values for names in braces in the commands, by name; a sweep varies them: `-m vary.ubatch=512,1024`.
        model: the name under which the server that speculates serves the model, where that is not its
            repository's or file's: an alias, an adapter. None looks for the model in the server's list.
        regular_model: as `model`, of the server that does not speculate; None for the same name.
        metrics_url: the page of the Prometheus counters of `url`, where it is not /metrics or
            /prometheus/metrics on the server itself (Dynamo: on the port of a worker); of several
            pages, such as those of several workers, the counters are added up.
        rate: requests per second on average, at random (Poisson) times, however many are in flight;
            None to keep `batch_size` requests in flight.
        timeout_s: of a request, from its start to its last token.
        chat: ask the chat endpoint with the messages of each prompt, so that the server applies its
            own template and parsers; otherwise prompts are sent as token ids or text. `auto` asks for
            chats where no model is named, whose tokenizer would be needed.
        slo: the most milliseconds that a request may take, `{ttft_ms: 500, itl_ms: 50}`: to its
            first token, and on average for each token after it; None for no goodput.
        api_key_variable: name of the environment variable with the API key; None for servers
            without one.
        dialect: the kind of server, where it is not the one that its list of models names: `vllm`,
            `llamacpp`, ..., or a `Dialect` in a file, `./my_server.py:MINE`.
        extra: further entries of every request's body: `{priority: 2}`. With a grammar
            (`{response_format: {type: json_object}}`) answers are compared with those of the
            regular server, which has it too, and not with the model's own probabilities.
        start_timeout_s: until a server that is started here must be ready.
        blocks: how often each server is started, in turns on the same devices, where both at once
            do not fit: a block is the unit of the interval. 0 starts both at once, and once; `auto` is 4
            where they do not fit, with `precision` at most 24, and where they do `latency` starts both
            up to 8 times, if that takes less than 20 seconds in all.
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
    rate: float | None = None
    timeout_s: float = 600.0
    chat: bool | Literal["auto"] = "auto"
    slo: Mapping[str, float] | None = None
    api_key_variable: str | None = None
    dialect: str | None = None
    extra: Mapping[str, Any] | None = None
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
            rule = "is for servers that the harness starts, by a command behind --"
            require(not self.first_command, "first_command", rule, self.first_command)
            require(not self.vary, "vary", rule, self.vary)
            require(self.blocks == "auto", "blocks", rule, self.blocks)
        for name in ("url", "regular_url"):
            _check_url(name, getattr(self, name))
        for page in self.metrics_url:
            _check_url("metrics_url", page)
        if self.blocks != "auto":
            require_at_least(self, blocks=0)
        rule = "must be positive"
        require(self.start_timeout_s > 0, "start_timeout_s", rule, self.start_timeout_s)
        require(self.timeout_s > 0, "timeout_s", rule, self.timeout_s)
        rule = "must be positive, in requests per second"
        require(self.rate is None or self.rate > 0, "rate", rule, self.rate)
        for name, value in (self.extra or {}).items():
            place = _SET_ELSEWHERE.get(name)
            advice = f"must not hold {name}" + (f", which {place} sets" if place else "")
            is_free = place is None and name not in _NEEDED
            require(is_free, "extra", advice, f"{{{name}: {value}}}")
        check_limits(self.slo)

    @property
    def has_two(self) -> bool:
        """Whether there is a server for each arm."""
        return self.regular_url is not None or bool(self.start_command)

    @property
    def fills_in_k(self) -> bool:
        """Whether the servers are started with the K of the run."""
        return any("{K}" in word for word in (*self.first_command, *self.start_command))

    @property
    def has_rate(self) -> bool:
        return self.rate is not None

    @property
    def asks_chats(self) -> bool:
        return self.chat is True

    @property
    def is_over_itself(self) -> bool:
        is_one_name = self.regular_model in (None, self.model)
        return self.regular_url is not None and self.url == self.regular_url and is_one_name

    @property
    def beyond_model(self) -> str | None:
        if self.chat is True:
            return "engine.chat=true"
        for name, grammar in (self.extra or {}).items():
            if name in _GRAMMARS:
                return f"engine.extra={{{name}: {grammar}}}"
        return None


class Server(EngineRecord):
    """Two servers with the same model, of which one speculates, or any one server."""

    name = "server"
    summary = "servers with an OpenAI API: vLLM, SGLang, llama.cpp or another"
    settings = ServerSettings
    computes_here = False
    queues = True
    takes_load = True
    starts_slowly = True
    # By flags that a server is started with; `advice` names them.
    has_synthetic_acceptance = True
    default_draft: ClassVar[str | None] = "server"

    def adapted(self, run: RunSettings) -> RunSettings:
        """Read a command for what it says of model, draft and K; leave out the default draft where there is one
        address, and so only the regular arm.

        Whether that server speculates, and with what, is not known here.
        """
        settings = run.engine
        assert isinstance(settings, ServerSettings)
        if settings.chat == "auto":
            chat = run.model.repository == SERVED
            run = dataclasses.replace(run, engine=dataclasses.replace(settings, chat=chat))
        if settings.start_command:
            return _labelled(run, _commands(run))
        if settings.has_two or run.draft is None or run.JUDGES_DRAFT:
            return run
        rule = (
            "needs engine.regular_url, a server without speculation to compare with;"
            " one server alone is measured as it is"
        )
        require(run.draft.name == self.default_draft, "draft", rule, run.draft.name)
        return dataclasses.replace(run, draft=None)

    def check(self, run: RunSettings) -> None:
        super().check(run)
        settings = run.engine
        assert isinstance(settings, ServerSettings)
        has_two = settings.has_two
        rule = (
            "must not be none: engine.url speculates, and draft names with what in tables "
            "(draft=server)"
        )
        has_draft = run.draft is not None or bool(settings.start_command)
        require(not has_two or has_draft, "draft", rule, "none")

    def columns(self, run: RunSettings) -> Mapping[str, Any]:
        settings = run.engine
        assert isinstance(settings, ServerSettings)
        if not settings.start_command or run.draft is None:
            return {}
        measured = _commands(run)[-1]
        if measured.dialect is None:
            return {}
        return {
            "num_draft_tokens": measured.num_draft_tokens,
            "draft_method": measured.method,
            "draft_remembers": measured.has_pool,
        }

    def typed_command(self, words: Sequence[str]) -> list[str]:
        """Without the words that add a port."""
        words = list(words)
        for dialect in DIALECTS.all().values():
            added = [] if dialect.startup is None else list(dialect.startup.listening)
            for place in range(len(words) - len(added) + 1):
                if added and words[place : place + len(added)] == added:
                    return words[:place] + words[place + len(added) :]
        return words

    def commands(self, run: RunSettings) -> Sequence[Sequence[str]]:
        settings = run.engine
        assert isinstance(settings, ServerSettings)
        return [command.words for command in _commands(run)] if settings.start_command else []

    def identities(self, settings: Any) -> Sequence[ServerReport] | None:
        key = os.environ.get(settings.api_key_variable or "")
        reports = []
        # The regular one first; both may be the same.
        for url in dict.fromkeys([settings.regular_url, settings.url]):
            if url is None:
                continue
            report = server_report(url, key)
            if report is None:
                return None
            reports.append(report)
        return reports

    def is_program(self, word: str) -> bool:
        known = {program.partition(" ")[0] for program in known_programs()}
        return PurePosixPath(word).name in {*known, *CONTAINERS}

    def variables(self, environment: Mapping[str, str]) -> dict[str, str]:
        startups = [one.startup for one in DIALECTS.all().values() if one.startup is not None]
        beginnings = (*_OF_DEVICES, *(name for one in startups for name in one.environment))
        return {
            name: value
            for name, value in environment.items()
            if name.startswith(beginnings) and not name.endswith(("_KEY", "_TOKEN"))
        }

    def how_to_report(self, server: str | None) -> str:
        for one in DIALECTS.all().values():
            if one.reports_by and (server is None or one.title in server):
                return f"{one.title} reports it when started with {one.reports_by}"
        return ""

    def counted(self, url: str) -> Counts | None:
        from harness.servers.counters import CounterPage

        return CounterPage(url, None).read()

    def pass_times(self, url: str, prefix_length: int) -> Sequence[Mapping[int, float]]:
        from harness.servers.passes import pass_times

        return pass_times(url, prefix_length)

    def open(self, opening: Opening) -> Engine:
        """Start the servers, or only connect them."""
        from harness.servers.engine import ServerEngine
        from harness.servers.launch import Served

        settings = opening.settings.engine
        assert isinstance(settings, ServerSettings)
        rates = opening.decoding.synthetic_rates
        if rates is not None:
            opening.say(_synthetic_flags(rates, opening.decoding.most_draft_tokens))
        if settings.start_command:
            return _started(opening, settings)
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
        arm = "speculative" if served else "regular"
        # Its counters alone may be elsewhere; those of the others are below their addresses.
        served.append(Served(arm, "engine.url", model, settings.url, settings.metrics_url))
        return ServerEngine(opening, served)


def _synthetic_flags(rates: Sequence[float], k: int) -> str:
    """The flags of llama.cpp and vLLM for `decoding.synthetic_acceptance`: no request sets it, only the start of a
    server.
    """
    # Both take the rates of whole prefixes. llama.cpp's flag came with pull request 27711.
    of_prefixes = marginal_rates(rates, k)
    of_llama_cpp = ",".join(f"{rate:.6g}" for rate in of_prefixes)
    of_vllm = {
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [round(rate, 6) for rate in of_prefixes],
    }
    return (
        f"decoding.synthetic_acceptance labels how engine.url was started, here with K={k}:"
        f" llama-server --spec-synth-rates {of_llama_cpp},"
        f" or vLLM with {json.dumps(of_vllm)} in --speculative-config"
    )


def _commands(run: RunSettings) -> list[ServerCommand]:
    """The commands of a run as they are started, the regular one first; one without a draft.

    Raises:
        SettingError: the server cannot be started in this way, or not without speculation.
    """
    settings = run.engine
    assert isinstance(settings, ServerSettings)
    values = dict(settings.vary or {}) | {"K": run.decoding.num_draft_tokens}
    chosen = settings.dialect
    dialects = list(DIALECTS.all().values()) if chosen is None else [DIALECTS[chosen]]
    typed = [words for words in (settings.first_command, settings.start_command) if words]
    *first, measured = [read_command(words, values, dialects).prepared() for words in typed]
    for command in (*first, measured):
        if shutil.which(command.program) is None:
            raise SettingError(command.program, "no such program, to start a server")
    if run.draft is None:
        return [measured]
    if first:
        return [*first, measured]
    if run.JUDGES_DRAFT:
        return [measured]
    return [measured.regular(), measured]


def _labelled(run: RunSettings, commands: Sequence[ServerCommand]) -> RunSettings:
    """The settings with the names of model and draft that the commands have."""
    settings = run.engine
    assert isinstance(settings, ServerSettings)
    measured = commands[-1]
    if run.model.repository == SERVED and measured.dialect is not None and measured.model:
        run = dataclasses.replace(run, model=dataclasses.replace(run.model, name=measured.model))
    draft = run.draft
    if draft is not None and draft.name == Server.default_draft:
        name = SECOND_COMMAND if settings.first_command else measured.draft
        if name is not None:
            return dataclasses.replace(run, draft=dataclasses.replace(draft, name=name))
    elif draft is not None and draft.name != SECOND_COMMAND and not run.JUDGES_DRAFT:
        _check_label(draft, measured)
    return run


def _check_label(draft: DraftSettings, measured: ServerCommand) -> None:
    """Raise a SettingError for a typed draft that is not the one of the command."""
    if measured.dialect is None or not measured.draft:
        return
    typed = {draft.name, draft.repository if isinstance(draft, ModelSettings) else ""}
    if typed.isdisjoint({measured.draft, measured.value(measured.startup.draft)}):
        rule = f"the command behind -- drafts with {measured.draft}: leave draft= out"
        raise SettingError("draft", rule, draft.name)


def _started(opening: Opening, settings: ServerSettings) -> Engine:
    """Both servers, or the only one, by their commands."""
    from harness.config.machine import gpu_names
    from harness.servers.engine import ServerEngine
    from harness.servers.launch import Launch, Served

    run = opening.settings
    # `map` opens an engine for each K.
    commands = _commands(dataclasses.replace(run, decoding=opening.decoding))
    has_gpus = bool(gpu_names())
    if len(commands) > 1 and settings.blocks == "auto" and not has_gpus:
        commands = [command.beside_another() for command in commands]
    names = ["regular", "speculative"][-len(commands) :] if run.draft is not None else ["regular"]
    # What the rows call the arms is not what two commands are called.
    shown = ["first", "second"] if settings.first_command else names
    served = []
    for name, label, command in zip(names, shown, commands, strict=True):
        log = opening.directory.resolve() / f"{name}_server.log"
        launch = Launch(command.words, log, settings.start_timeout_s)
        model = (settings.regular_model if name == "regular" else None) or settings.model
        served.append(Served(name, f"the {label} command", model, launch=launch, label=label))
        opening.say(f"{label}: {launch}")
    if len(commands) < 2:
        return ServerEngine(opening, served)
    removed = list(removed_words(commands[1], commands[0]))
    if not settings.first_command and removed:
        opening.say(f"the regular server is started without {shlex.join(removed)}")
    dialect = commands[1].dialect
    if dialect is not None and commands[1].startup.is_untried:
        opening.say(f"{dialect.title} is recognised by its flags, and was never tried by us")
    note = commands[1].startup.note if dialect is not None else ""
    if note and has_gpus:
        opening.say(note)
    most = _MOST_BLOCKS if run.is_until_precise else _BLOCKS
    if settings.blocks != "auto":
        return ServerEngine(opening, served, settings.blocks)
    # Servers share a GPU where flags bound the memory that each takes of it.
    share_gpus = all(
        command.dialect is not None and command.value(command.startup.sized_by)
        for command in commands
    )
    if has_gpus and not share_gpus:
        return ServerEngine(opening, served, most)
    most_starts = min(_STARTS, run.num_over_starts // (_PROMPTS_PER_START * run.batch_size))
    return ServerEngine(opening, served, blocks_if_needed=most, most_starts=most_starts)


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
