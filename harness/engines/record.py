"""Records of engines: everything that commands need to know about an engine before they open it.

Each engine has a subclass of `EngineRecord`, in the room that does its work or in a file of the user's
(`engine=./my_engine.py:MyEngine`). Records import torch only inside functions, so that names, settings and help do not
need it.
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
        decoding: decoding settings of the questions.
        runner: the runner to try first; a model that cannot use it gets a plainer one.
        gpu_runner: the runner that `auto` means on a GPU.
        batch_size: the most prompts of a question; for an engine with a queue, the most requests in flight.
        longest_prompt: the most tokens of a prompt.
        samplings: further settings whose temperature, top-k and top-p the requests of a question may have.
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
        """The quantities that the sizes of caches depend on."""
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
        settings: settings of the run.
        planned: the pair before its weights load.
        load: returns the pair, and loads it first if necessary.
        directory: the run's directory, where the engine may write files.
    """

    settings: RunSettings
    planned: AnyPair
    load: Callable[[], Pair]
    directory: Path = Path()


@dataclass(frozen=True)
class ServerIdentity:
    """A server's description of itself.

    Attributes:
        about: facts that do not change while it runs: `models`, with a text for each, and values from its pages, under
            the page and the key, such as `/version version`.
        started: a text that changes when the server restarts; None if it reports none.
    """

    about: Mapping[str, Any]
    started: str | None


@dataclass(frozen=True)
class ServerSetup:
    """The servers of a run, by which a later run can tell whether it repeats the same measurement.

    Attributes:
        servers: descriptions of the servers that already run; empty if any of them gave none.
        all_answer: whether every running server described itself.
        commands: the words of each command that starts a server, by the label of the command. Files that the words name
            count as part of them.
        variables: environment variables that decide how and on which devices the started servers run; secret keys are
            left out.
    """

    servers: Sequence[ServerIdentity] = ()
    all_answer: bool = True
    commands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    variables: Mapping[str, str] = field(default_factory=dict)


class EngineRecord(RecordWithSettings, Abilities):
    """One engine, with the class of its settings.

    Attributes:
        name: the engine's name in `engine=`.
        summary: half a line about the engine, for help.
        settings: the dataclass of the settings under `engine.`.
        has_schedule: whether it can choose K anew in every iteration (`decoding.num_draft_tokens=auto`).
    """

    summary: ClassVar[str]
    settings: ClassVar[type[EngineSettings]] = EngineSettings
    has_schedule: ClassVar[bool] = False

    def adapted(self, run: RunSettings) -> RunSettings:
        """Return the run's settings, completed by those that this engine implies."""
        return run

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError if this engine cannot do the run.

        An engine without `own_loop` refuses the settings that only this project's decoding loop supports.
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
            pair: a `PlannedPair` of the local wing, whose weights are not loaded yet, or a `ServedPair`.
        """

    def check_installed(self, run: RunSettings) -> None:
        """Raise a SettingError if a package or program is missing; nothing is imported or started."""
        if self.in_process:
            instead = "; servers need none of them: harness latency -- llama-server ..."
            require_local("engine", self.name, instead)

    def server_setup(self, run: RunSettings) -> ServerSetup:
        """Return the servers of a run, with everything about them that decides what is measured."""
        return ServerSetup()

    def columns(self, run: RunSettings) -> Mapping[str, Any]:
        """Return columns about a pair that is not loaded in this process, such as K from a server's command."""
        return {}

    def open(self, opening: Opening) -> Engine:
        """Open an engine that is ready for questions.

        Raises:
            SettingError: the engine cannot do what the settings ask.
            RunError: the engine does not start.
        """
        raise NotImplementedError
