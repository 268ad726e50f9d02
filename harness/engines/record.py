"""The record of an engine: everything that the rest of the house needs to know about it.

An engine's record is a subclass of `EngineRecord` in the room that does its work, or in a file of the
user's (`engine=./my_engine.py:MyEngine`). What needs torch is imported inside functions: names, settings
and help are known without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from harness.config.engines import Abilities, EngineSettings
from harness.config.packages import require_local
from harness.config.registry import RecordWithSettings
from harness.config.settings import require

if TYPE_CHECKING:
    from harness.config.run import RunnerName, RunSettings
    from harness.config.settings import DecodingSettings
    from harness.engines.door.pairs import AnyPair, Pair
    from harness.engines.protocol import Engine


# The numbers of draft tokens that `auto` chooses from where each takes time to compile.
_AUTO_PREPARED = (1, 2, 4, 8)


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """The work that an engine is prepared for.

    Attributes:
        decoding: of the questions.
        runner: to try first; a model that cannot have it gets a plainer one.
        batch_size: the most prompts of a question; for an engine that queues, the most in flight.
        longest_prompt: the most tokens of a prompt.
        fault: a mistake to plant in the speculative arm, for engines with `own_loop`.
        say: shows the user a line.
    """

    decoding: DecodingSettings
    runner: RunnerName = "auto"
    batch_size: int = 1
    longest_prompt: int = 0
    fault: str = "none"
    say: Callable[[str], None] = lambda message: None

    @property
    def num_slots(self) -> int:
        """The most tokens of a row: prompt, answer, a proposal beyond its end, and one more."""
        decoding = self.decoding
        return self.longest_prompt + decoding.max_new_tokens + decoding.most_draft_tokens + 1

    @property
    def numbers_drafted(self) -> list[int]:
        """The numbers of draft tokens that runners are compiled for; none for a draft that drafts nothing."""
        if self.decoding.num_draft_tokens == "auto":
            return [*_AUTO_PREPARED]
        most = self.decoding.most_draft_tokens
        return [most] if most else []


@dataclass(frozen=True, kw_only=True)
class Opening(Preparation):
    """Everything that an engine is opened with.

    Attributes:
        settings: of the run.
        planned: the pair before its weights load.
        load: loads the pair, or gives the one that is loaded.
        directory: of the run, for files of the engine's.
    """

    settings: RunSettings
    planned: AnyPair
    load: Callable[[], Pair]
    directory: Path = Path()


@dataclass(frozen=True)
class ServerIdentity:
    """A server as it describes itself.

    Attributes:
        about: what does not change while it runs: `models`, a text for each, and the answers of its pages
            by page and key, `/version version`.
        started: text that changes when the server is restarted; None where it reports none.
    """

    about: Mapping[str, Any]
    started: str | None


@dataclass(frozen=True)
class Elsewhere:
    """The servers of a run, which are part of what is measured.

    Attributes:
        servers: those that run already, as they describe themselves now.
        answers: whether each of these did.
        commands: of those that are started, each as its words: the files that they name count, too.
        variables: of the environment, which say how such servers run and on which devices, without keys.
    """

    servers: Sequence[ServerIdentity] = ()
    answers: bool = True
    commands: Sequence[Sequence[str]] = ()
    variables: Mapping[str, str] = field(default_factory=dict)


class EngineRecord(RecordWithSettings, Abilities):
    """One engine, with the class of its settings.

    Attributes:
        name: what `engine=` calls it.
        summary: who generates, in half a line, for help.
        settings: the dataclass of what can be set under `engine.`.
    """

    summary: ClassVar[str]
    settings: ClassVar[type[EngineSettings]] = EngineSettings

    def adapted(self, run: RunSettings) -> RunSettings:
        """The settings of a run with what this engine implies."""
        return run

    def check(self, run: RunSettings) -> None:
        """Raise a SettingError for a run that this engine is not for.

        An engine without `own_loop` refuses what only this project's loop does.
        """
        if self.own_loop:
            return
        decoding = run.decoding
        rule = "needs engine=local"
        require(run.runner in ("auto", "eager"), "runner", rule, run.runner)
        require(decoding.rule == "deepmind", "decoding.rule", rule, decoding.rule)
        require(decoding.lenience == 1, "decoding.lenience", rule, decoding.lenience)
        rates = decoding.synthetic_acceptance
        require(rates is None, "decoding.synthetic_acceptance", rule, rates)
        rule = f"must be stored with engine={self.name}"
        require(self.loads_pair or run.weights == "stored", "weights", rule, run.weights)
        number = decoding.num_draft_tokens
        rule = f"must be a number with engine={self.name}"
        require(number != "auto", "decoding.num_draft_tokens", rule, number)

    def check_pair(self, pair: Any, run: RunSettings) -> None:
        """Raise a SettingError for models that this engine cannot run, as far as their configurations
        show. It is called before weights load.

        Args:
            pair: a `PlannedPair` of the other wing.
        """

    def check_installed(self) -> None:
        """Raise a SettingError if a package that it needs is not installed, without importing it."""
        if self.computes_here:
            instead = "; servers need none of them: harness latency -- llama-server ..."
            require_local("engine", self.name, instead)

    def elsewhere(self, run: RunSettings) -> Elsewhere:
        """Who answers a run outside of this process, as far as that decides what is measured."""
        return Elsewhere()

    def columns(self, run: RunSettings) -> Mapping[str, Any]:
        """Columns about the pair that are known of an engine that does not load it, such as K in a server's command."""
        return {}

    def open(self, opening: Opening) -> Engine:
        """An engine that is ready for questions.

        Raises:
            SettingError: for what the engine cannot do.
            RunError: the engine does not start.
        """
        raise NotImplementedError
