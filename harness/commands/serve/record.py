"""The record and the settings of `serve`, which offers the pair over HTTP."""

from __future__ import annotations

from dataclasses import dataclass

from harness.commands.command import Service
from harness.config.engines import Abilities
from harness.config.errors import SettingError
from harness.config.installation import install_command, is_installed
from harness.config.machine import is_loopback
from harness.config.run import RunSettings
from harness.config.settings import require, require_at_least


@dataclass(frozen=True, kw_only=True)
class ServeSettings(RunSettings):
    """`serve`: the pair over HTTP. The settings in `decoding` are the defaults for what a request does not specify.

    Attributes:
        host: address to listen on.
        port: port to listen on; 0 takes a free one.
        api_key_variable: name of the environment variable with the key that requests must bring.
        max_waiting: number of answers that may wait for the one being generated.
        max_prompt_tokens: the most tokens of a prompt.
        max_new_tokens: the most new tokens of an answer.
    """

    host: str = "127.0.0.1"
    port: int = 5000
    api_key_variable: str | None = None
    max_waiting: int = 64
    max_prompt_tokens: int = 256
    max_new_tokens: int = 256

    # K=0 is allowed (`RunSettings`): the draft is loaded, and requests are answered without it.
    MAY_IDLE = True

    def __post_init__(self) -> None:
        super().__post_init__()
        require_at_least(self, max_waiting=0, max_prompt_tokens=1, max_new_tokens=1)
        self.require_single_rows("must be 1: serve answers one prompt at a time")
        require(0 <= self.port < 2**16, "port", "must be from 0 to 65535", self.port)
        default = self.decoding.max_new_tokens
        rule = f"must be at most max_new_tokens={self.max_new_tokens}"
        require(default <= self.max_new_tokens, "decoding.max_new_tokens", rule, default)
        rule = "must name a variable with a key, because others can reach this host"
        require(
            is_loopback(self.host) or bool(self.api_key_variable),
            "api_key_variable",
            rule,
            self.api_key_variable,
        )

    @property
    def most_prompts(self) -> int:
        """The most prompts of a request; each of them gets its own answer."""
        return 1 + self.max_waiting

    def check_engine(self, engine: Abilities) -> None:
        rule = "must be local: serve runs harness's own decoding loop"
        require(engine.own_loop, "engine", rule, self.engine.name)


class Serve(Service[ServeSettings]):
    """The record of `serve`, which serves a pair until Ctrl-C."""

    name = "serve"
    summary = "the pair as a service with OpenAI's API, with and without speculation"
    example = "model=13B draft=7B"
    examples = (
        ("", "the shipped tiny pair on http://127.0.0.1:5000/"),
        ("host=0.0.0.0 api_key_variable=KEY", "for other machines"),
    )
    notes = """\
Ctrl-C ends it. A question to it:
  curl localhost:5000/v1/completions -H 'Content-Type: application/json' \\
    -d '{"prompt": "Once upon a time"}'"""
    settings = ServeSettings
    program = "harness.commands.serve.command"

    def needs_local(self, settings: ServeSettings) -> bool:
        return True

    def check_installed(self) -> None:
        for package in ("fastapi", "uvicorn"):
            if not is_installed(package):
                rule = f"needs the {package} package: {install_command('serve')}"
                raise SettingError("serve", rule)
