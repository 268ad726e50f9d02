"""Records of engines: everything that commands need to know about an engine before they open it.

Each engine has a subclass of `EngineRecord`, in the room that does its work, or in a file of the user's
(`engine=./my_engine.py:MyEngine`). Torch is imported only inside functions, so that names, settings and
help need none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.demand import Demand
from harness.config.engines import Abilities, EngineSettings
from harness.config.installation import require_local
from harness.config.registry import RecordWithSettings
from harness.config.settings import require

if TYPE_CHECKING:
    from harness.config.run import RunnerName, RunSettings
    from harness.config.settings import DecodingSettings
    from harness.engines.protocol import Engine
    from harness.engines.tokenizer import AnyPair
    from harness.local.drafting.method import Pair


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The work that an engine is prepared for.

    Attributes:
        decoding: settings of the questions.
        runner: to try first; a model that cannot have it gets a plainer one.
        gpu_runner: what `auto` is on a GPU.
        batch_size: the most prompts of a question; for an engine that queues, the most in flight.
        longest_prompt: the most tokens of a prompt.
        samplings: settings of which requests of a question may have the temperature, top-k and top-p, too.
        say: shows a line to the user.
    """

    decoding: DecodingSettings
    runner: RunnerName = "auto"
    gpu_runner: RunnerName = "static"
    batch_size: int = 1
    longest_prompt: int = 0
    samplings: Sequence[DecodingSettings] = ()
    say: Callable[[str], None] = lambda message: None

    @property
    def demand(self) -> Demand:
        """The settings that the sizes of caches depend on."""
        decoding = self.decoding
        return Demand(
            self.batch_size,
            self.longest_prompt,
            decoding.max_new_tokens,
            decoding.most_draft_tokens,
            self.runner,
        )


@dataclass(frozen=True, kw_only=True)
class Opening(Preparation):
    """Everything that an engine is opened with.

    Attributes:
        settings: of the run.
        planned: the pair before its weights load.
        load: returns the loaded pair, and loads it if necessary.
        directory: of the run, for files that the engine writes.
    """

    settings: RunSettings
    planned: AnyPair
    load: Callable[[], Pair]
    directory: Path = Path()


@dataclass(frozen=True)
class ServerIdentity:
    """A server as it describes itself.

    Attributes:
        about: facts that do not change while it runs: `models` with a text for each, and values of its
            pages by page and key, such as `/version version`.
        started: a text that changes when the server restarts; None if it reports none.
    """

    about: Mapping[str, Any]
    started: str | None


@dataclass(frozen=True)
class ServerSetup:
    """The servers of a run, by which a measurement is recognised again.

    Attributes:
        servers: those that are running already, as they describe themselves now; empty if one did not.
        all_answer: whether all running servers described themselves.
        commands: the words of each command that starts a server; files named in them count, too.
        variables: environment variables that decide how started servers run and on which devices; without keys.
    """

    servers: Sequence[ServerIdentity] = ()
    all_answer: bool = True
    commands: Sequence[Sequence[str]] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


class EngineRecord(RecordWithSettings, Abilities):
    """One engine, with the class of its settings.

    Attributes:
        name: of the engine in `engine=`.
        summary: half a line about it, for help.
        settings: the dataclass of the settings under `engine.`.
        has_schedule: whether it can choose K in every iteration (`decoding.num_draft_tokens=auto`).
    """

    summary: ClassVar[str]
    settings: ClassVar[type[EngineSettings]] = EngineSettings
    has_schedule: ClassVar[bool] = False

    def adapted(self, run: RunSettings) -> RunSettings:
        """Return the settings of a run, with those that this engine implies."""
        return run

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError for a run that this engine cannot do.

        An engine without `own_loop` refuses settings that only this project's loop supports.
        """
        decoding = run.decoding
        number = decoding.num_draft_tokens
        rule = f"must be a number with engine={self.name}; engine=huggingface has a schedule"
        require(number != "auto" or self.has_schedule, "decoding.num_draft_tokens", rule, number)
        if self.own_loop:
            return
        rule = "needs engine=local"
        require(run.runner in ("auto", "eager"), "runner", rule, run.runner)
        require(decoding.rule == "deepmind", "decoding.rule", rule, decoding.rule)
        rates = decoding.synthetic_acceptance
        require(rates is None, "decoding.synthetic_acceptance", rule, rates)
        rule = f"must be stored with engine={self.name}"
        require(self.loads_pair or run.weights == "stored", "weights", rule, run.weights)

    def check_pair(self, pair: Any, run: RunSettings) -> None:
        """Raise a SettingError for models whose configurations show that this engine cannot run them.

        Args:
            pair: a `PlannedPair` of the local wing; its weights are not loaded yet.
        """

    def check_installed(self, run: RunSettings) -> None:
        """Raise a SettingError if a package or a program is missing, without importing or starting it."""
        if self.in_process:
            instead = "; servers need none of them: harness latency -- llama-server ..."
            require_local("engine", self.name, instead)

    def server_setup(self, run: RunSettings) -> ServerSetup:
        """Return the servers of a run, as far as they decide what is measured."""
        return ServerSetup()

    def columns(self, run: RunSettings) -> Mapping[str, Any]:
        """Return columns about a pair that is not loaded here, such as K from a server's command."""
        return {}

    def open(self, opening: Opening) -> Engine:
        """Open an engine that is ready for questions.

        Raises:
            SettingError: the engine cannot do what the settings ask.
            RunError: the engine does not start.
        """
        raise NotImplementedError
