"""The records of engines, and the registry that finds them by name. A record contains everything that commands need to
know about an engine before they open it.

Each engine has a subclass of `EngineRecord`, in the folder with the engine's code or in a file that a user wrote
(`engine=./my_engine.py:MyEngine`). Records import torch only inside functions, so that names, settings and help need no
torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.demand import Demand
from harness.config.engines import Abilities, EngineSettings
from harness.config.errors import SettingError
from harness.config.installation import CONF, require_local
from harness.config.registry import RecordWithSettings, SettingsRegistry
from harness.config.settings import require

if TYPE_CHECKING:
    from harness.config.run import RunnerName, RunSettings
    from harness.config.settings import DecodingSettings
    from harness.engines.protocol import Engine
    from harness.engines.tokenizer import AnyPair
    from harness.local.drafting.method import Pair


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The questions for which an engine is prepared.

    Attributes:
        decoding: the decoding settings of the questions.
        runner: the runner that is tried first. A model that does not support it gets a simpler runner.
        gpu_runner: the runner that `auto` means on a GPU.
        batch_size: the largest number of prompts in a question; for an engine with a queue, the largest number of
            requests in flight.
        longest_prompt: the largest number of tokens in a prompt.
        samplings: further decoding settings, whose temperature, top-k and top-p requests may have.
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
        """The numbers on which the sizes of caches depend."""
        decoding = self.decoding
        return Demand(
            self.batch_size,
            prompt_tokens=self.longest_prompt,
            new_tokens=decoding.max_new_tokens,
            num_draft_tokens=decoding.most_draft_tokens,
            runner=self.runner,
        )


@dataclass(frozen=True, kw_only=True)
class Opening(Preparation):
    """Everything that an engine needs when it is opened.

    Attributes:
        settings: the settings of the run.
        planned: the pair, whose weights are not loaded yet.
        load: returns the loaded pair; loads it if necessary.
        directory: the run's directory, where the engine may write files.
    """

    settings: RunSettings
    planned: AnyPair
    load: Callable[[], Pair]
    directory: Path = Path()


@dataclass(frozen=True)
class ServerIdentity:
    """What a server reports about itself.

    Attributes:
        about: facts that do not change while the server runs. The key `models` has a text for each model. All other
            keys consist of a page and a field on it, such as `/version version`.
        started: a text that changes when the server restarts; None if the server reports no such text.
    """

    about: Mapping[str, Any]
    started: str | None


@dataclass(frozen=True)
class ServerSetup:
    """The servers of a run. A later run compares this to find out whether it repeats the same measurement.

    Attributes:
        servers: what the servers that are already running report about themselves; empty if one of them reports
            nothing.
        all_answer: whether every running server reported something.
        commands: the words of each command that starts a server, by the label of the command. The contents of files
            that the words name count as part of the words.
        variables: the environment variables that decide how and on which devices the started servers run. Secret keys
            are left out.
    """

    servers: Sequence[ServerIdentity] = ()
    all_answer: bool = True
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


class EngineRecord(RecordWithSettings, Abilities):
    """The record of an engine.

    Attributes:
        name: the engine's name in `engine=`.
        summary: a phrase about the engine, at most half a line long, for help.
        settings: the dataclass of the settings under `engine.`.
        has_schedule: whether the engine can choose a new K in every iteration (`decoding.num_draft_tokens=auto`).
    """

    summary: ClassVar[str]
    settings: ClassVar[type[EngineSettings]] = EngineSettings
    has_schedule: ClassVar[bool] = False

    def adapted(self, run: RunSettings) -> RunSettings:
        """Return the settings of the run, completed by settings that this engine implies."""
        return run

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError if this engine cannot carry out the run.

        An engine without `own_loop` refuses settings that only this project's decoding loop supports.
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
        """Raise a SettingError if the configurations of the models show that this engine cannot run them.

        Args:
            pair: a `PlannedPair`, whose weights are not loaded yet; for an engine in another process, a `ServedPair`.
        """

    def check_installed(self, run: RunSettings) -> None:
        """Raise a SettingError if a package or program that the run needs is missing. Nothing is imported or
        started for this check.
        """
        if self.in_process:
            instead = "; servers need none of them: harness latency -- llama-server ..."
            require_local("engine", self.name, instead)

    def server_setup(self, run: RunSettings) -> ServerSetup:
        """Return the servers of a run, with all facts about them that may change the measurement."""
        return ServerSetup()

    def columns(self, run: RunSettings) -> Mapping[str, Any]:
        """Return columns that describe a pair that is not loaded in this process, such as K from a server's command."""
        return {}

    def open(self, opening: Opening) -> Engine:
        """Open an engine that is ready for questions.

        Raises:
            SettingError: the engine cannot do what the settings require.
            RunError: the engine does not start.
        """
        raise NotImplementedError


class Engines(SettingsRegistry[EngineRecord]):
    """The registry of engines. The setting `engine.name` names one; without it, the engine is `local`."""

    key = "name"
    default = "local"


# For each engine's name, the place of its record. The simulated engine is in a file, like an engine that a user wrote.
_BUILT_IN = {
    "huggingface": "harness.local.engine.records:HuggingFace",
    "local": "harness.local.engine.records:Local",
    "server": "harness.servers.record:ServerRecord",
    "simulated": f"{CONF / 'engine' / 'simulated_engine.py'}:Simulated",
}
ENGINES = Engines("engine", EngineRecord, _BUILT_IN)


def engine_of(settings: RunSettings) -> EngineRecord:
    """Return the record of the engine that a run uses."""
    return ENGINES[settings.engine.name]


def default_draft(engine: str) -> str | None:
    """Return the draft that an engine uses if the user names none; None for the usual default.

    The result is also None for an unknown engine. Its name is refused later.
    """
    try:
        return ENGINES[engine].default_draft
    except SettingError:
        return None


def pair_key(settings: RunSettings) -> tuple[object, ...]:
    """Return a key that is equal for two runs if one process can carry out both with the same loaded models.

    Two engines can share them if `loads_pair` and `in_process` are equal, as for `local` and `huggingface`.
    """
    engine = engine_of(settings)
    return *settings.pair_identity, engine.loads_pair, engine.in_process
