"""Does the work that every command needs around its measurement: plan, encode, place, load, open an engine, write rows.

`commands/run.py` makes a session for a run, and passes it to the command's `measure`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from harness.config.demand import Demand
from harness.config.errors import HarnessError, RunError, SettingError
from harness.config.run import RunSettings
from harness.config.settings import DecodingSettings
from harness.engines.keeper import PairKeeper
from harness.engines.protocol import Chat, Engine, Request, Servers
from harness.engines.record import Preparation, engine_of
from harness.engines.tokenizer import AnyPair, Tokenizer
from harness.measuring.measurement import Measurement, further_settings, identify
from harness.measuring.progress import note, say
from harness.measuring.prompts.encoding import Encoder
from harness.measuring.prompts.sets import Prompt
from harness.results.drafts import Drafts
from harness.results.environment import environment_columns, new_run_id, write_environment
from harness.results.files import append_rows
from harness.results.row import Row
from harness.results.schema import LOCAL_PAIR_COLUMNS, REFUSED, RunRow
from harness.results.statistics.interval import Interval

if TYPE_CHECKING:
    from harness.local.drafting.method import Pair
    from harness.local.engine.pair import PlacedPair

AnyRow = TypeVar("AnyRow", bound=Row)


class HasSettings(Protocol):
    """A command's experiment, or a part of it. Its `settings` are the settings in effect: the user's, with the changes
    that the experiment made.
    """

    @property
    def settings(self) -> Any:
        """The `RunSettings` of the command's kind."""


class Session:
    """One run of a command. Its steps are, in this order: `encode` (or `encoder`), `place`, `open`, `requests` and
    `interleaving.ask_in_turns`.

    However the run ends, `row` and `write_rows` follow.

    Args:
        directory: directory of the run.
        keeper: keeps the loaded pair from run to run; None for a single run, which gets a new keeper.
        run_id: id of the run; None for a new id.

    Attributes:
        experiment: its `settings` are in effect. `acceptance` replaces it to measure under another condition.
        original_settings: the settings without the command's own changes; they identify the measurement.
        run_id: the `run` of all its rows.
        status, error: the status is `ok`, `failed`, `interrupted` or `refused`, and for `plan` also `does_not_fit`; the
            error is the reason, or None for `ok`.
        placed: the pair with its devices, after `place`; None if the engine loads no pair here.
        engine: the open engine; None before `open` and after `close`.
        servers: the servers of the engine that was opened last, also after `close`.
        devices: product names, such as ['NVIDIA A100-SXM4-40GB']; [] before `place` (`plan` sets them itself), and if a
            server runs on another machine.
        written: the rows that `write_rows` has written so far.
    """

    def __init__(
        self,
        experiment: HasSettings,
        original_settings: RunSettings,
        directory: Path,
        keeper: PairKeeper | None = None,
        run_id: str | None = None,
    ) -> None:
        self.experiment = experiment
        self.original_settings = original_settings
        self.directory = directory
        self.run_id = run_id or new_run_id()
        self.status = "ok"
        self.error: str | None = None
        self.placed: PlacedPair | None = None
        self.engine: Engine | None = None
        self.servers = Servers()
        self.devices: list[str] = []
        self.written: list[RunRow] = []
        self._measurement: Measurement | None = None
        self._keeper = keeper or PairKeeper()

    @property
    def settings(self) -> RunSettings:
        """The settings in effect."""
        settings: RunSettings = self.experiment.settings
        return settings

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Record the error that ends the block, as `status` and `error`, and raise it.

        A known failure is raised as a RunError that explains it; any other error is raised unchanged, and so is a
        RunError. `BaseException` is caught because a panic in a library written in Rust is not an `Exception`.
        """
        try:
            yield
        except KeyboardInterrupt as interrupt:
            self.status, self.error = "interrupted", str(interrupt) or "stopped by the user"
            raise
        except BaseException as exception:
            # Recorded before the error is explained. If explaining failed, the row would otherwise look like that of a
            # successful run.
            self.status, self.error = "failed", _message(exception)
            from harness.config.failures import as_run_error

            explained = as_run_error(exception)
            self.error = _message(explained or exception)
            if explained is None or explained is exception:
                raise
            raise explained from exception

    @property
    def pair(self) -> Pair:
        """The pair with its weights, which are loaded now if they are not yet; for commands that read texts with its
        models.
        """
        return self._keeper.load()

    @property
    def planned(self) -> AnyPair:
        """The pair before its weights are loaded. If a server has the weights, it is only a tokenizer
        (`ServedPair`).
        """
        return self._keeper.plan(self.settings)

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of both models."""
        return self.planned.tokenizer

    @property
    def served_instead(self) -> Sequence[str]:
        """The names of the models that the servers report, if none of them matches `model=`; otherwise []."""
        self._look_at_servers()
        served = self.servers.models
        return [] if any(map(self.settings.model.is_served_as, served)) else served

    @property
    def encoder(self) -> Encoder:
        """A new encoder of prompts for the pair."""
        return Encoder(self.planned, self.settings)

    def identify(self) -> Measurement:
        """Return the identity of the measurement, by which `resume` finds earlier rows. It is determined once per
        session.

        Only the user's settings count: runs with the same original settings are the same measurement, whatever settings
        the command itself changes.
        """
        if self._measurement is None:
            self._measurement = identify(self.original_settings)
        return self._measurement

    @property
    def store_directory(self) -> Path:
        """The directory of files that later runs read: the directory of `results.file`, or the run's own if none is
        set.
        """
        file = self.settings.results.file
        return self.directory if file is None else Path(file).parent

    def encode(
        self, prompts: Sequence[Prompt], setting: str = "prompts", new_tokens: int | None = None
    ) -> list[list[int]]:
        """Return the token ids of each prompt, through the chat template if there is one and the settings use it.

        Args:
            setting: name of the setting that contains the prompts, for the error.
            new_tokens: number of tokens that follow each prompt, at least 1; None for `decoding.max_new_tokens`.

        Raises:
            SettingError: if a prompt and its new tokens do not fit into a model's context, and for prompts that
                `Encoder.encode` refuses.
        """
        token_ids = self.encoder.encode(prompts)
        longest = max(map(len, token_ids))
        # A sentence about the context that is too small; None if all contexts are large enough.
        answers = None if new_tokens is None else f"{new_tokens} new tokens"
        most = new_tokens or self.settings.decoding.max_new_tokens
        rule = self.planned.excess(longest, most, answers)
        if rule is not None:
            raise SettingError(setting, f"it has {longest} tokens; {rule}")
        return token_ids

    def place(
        self,
        batch_size: int,
        prompt_tokens: int,
        new_tokens: int | None = None,
    ) -> None:
        """Decide where the pair and its caches are placed, show the devices, and write `environment.json`.

        Only the first call of a run decides, so it must state the largest demand of the run. Later calls only write
        `environment.json` again. If the engine loads no pair, nothing is placed.

        Args:
            batch_size: number of rows that are decoded together.
            prompt_tokens: length of the longest prompt.
            new_tokens: the most tokens that follow a prompt, at least 1; None for `decoding.max_new_tokens`.

        Raises:
            RunError: if the pair does not fit.
        """
        # Identified now, because planning has found the commit on the hub, and servers have answered no question yet: a
        # server that restarts from now on is noticed.
        self.identify()
        settings = self.settings
        engine = engine_of(settings)
        # The devices of a server are known only once it has answered.
        if engine.loads_pair and self.placed is None:
            demand = Demand(
                batch_size,
                prompt_tokens,
                new_tokens or settings.decoding.max_new_tokens,
                num_draft_tokens=settings.most_draft_tokens,
                runner=settings.runner,
            )
            self.placed = self._keeper.place(settings, demand)
            note(self.placed.describe())
            self.devices = self.placed.device_names()
        write_environment(self.directory, self.devices)

    def open(
        self, batch_size: int, longest_prompt: int, samplings: Sequence[DecodingSettings] = ()
    ) -> Engine:
        """Open the engine. The pair's weights are loaded if the engine needs them. An engine that is open already is
        closed first.

        Args:
            batch_size: the most prompts of a question, or the most requests in flight.
            longest_prompt: length of the longest prompt.
            samplings: further decoding settings whose temperature, top-k and top-p requests may have.

        Raises:
            SettingError, RunError: if the models cannot be loaded, or a server cannot be started or asked.
        """
        # Frees the caches of an open engine before the next engine allocates its own.
        self.close()
        preparation = Preparation(
            decoding=self.settings.decoding,
            runner=self.settings.runner,
            gpu_runner=self.settings.GPU_RUNNER,
            batch_size=batch_size,
            longest_prompt=longest_prompt,
            samplings=samplings,
            say=say,
        )
        self.engine = self._keeper.open(self.settings, preparation, self.directory)
        self._look_at_servers()
        if self.engine.servers is not None:
            write_environment(self.directory, self.devices)
        return self.engine

    def _look_at_servers(self) -> None:
        """Update `servers` and `devices`. If servers run alternately, the second one starts only after `open`."""
        if self.engine is not None and self.engine.servers is not None:
            self.servers = self.engine.servers
            self.devices = list(self.servers.devices)

    def close(self) -> None:
        """Close the engine, if one is open."""
        if self.engine is not None:
            self._look_at_servers()
            self.engine.close()
            self.engine = None

    def requests(
        self,
        token_ids: Sequence[Sequence[int]],
        indices: Sequence[int],
        decoding: DecodingSettings | None = None,
        *,
        chats: Sequence[Chat] = (),
        salts: Sequence[str] = (),
        seed: int | None = None,
    ) -> list[Request]:
        """Return a request for each prompt, in their order.

        Args:
            token_ids: token ids of each prompt.
            indices: index of each prompt. The index and the seed determine the random numbers of the answer.
            decoding, seed: None to take them from the settings.
            chats, salts: one for each prompt; empty for none.
        """
        decoding = decoding or self.settings.decoding
        if seed is None:
            seed = self.settings.seed
        # With `ignore_eos`, no token ends an answer.
        stop_tokens = frozenset() if decoding.ignore_eos else self.end_tokens()
        none = [None] * len(token_ids)
        parts = zip(token_ids, indices, chats or none, salts or none, strict=True)
        return [
            Request(prompt, decoding, seed, index, stop_tokens, chat=chat, salt=salt)
            for prompt, index, chat, salt in parts
        ]

    def row(self, kind: type[AnyRow], acceptance: Drafts | None = None, **figures: Any) -> AnyRow:
        """Return a row of this run, with its settings, its circumstances (status, machine, server) and its figures.

        If a column is filled more than once, `figures` override `acceptance`, and both override the rest.

        Args:
            acceptance: fills the columns about acceptance that this kind of row has; None leaves them empty.
            figures: values of columns, by name; an Interval without an estimate is stored as None.

        Raises:
            TypeError: if this kind of row has no column of the name of a circumstance or a figure.
        """
        columns: dict[str, Any] = {"run": self.run_id}
        if issubclass(kind, RunRow):
            columns |= kind.setting_columns(self.settings) | self._circumstances()
            columns["settings"] = further_settings(self.settings, kind)
            engine = engine_of(self.settings)
            if not engine.in_process:
                # The server's models are not known here; the settings only give them names. The engine's own columns,
                # such as the address, take the place of the columns about a local pair.
                columns |= dict.fromkeys(kind.columns().keys() & LOCAL_PAIR_COLUMNS)
                columns |= _selected(engine.columns(self.settings), kind)
            if self.settings.draft is None or figures.get("arm") == "regular":
                columns["num_draft_tokens"] = None
            # `model=` may name another model than the server's; only its tokenizer is then used.
            if served := self.served_instead:
                # The regular arm's model comes first; with one entry, both arms have it.
                columns["model"] = served[0 if figures.get("arm") == "regular" else -1]
        if acceptance is not None:
            columns |= _selected(acceptance.count_columns() | acceptance.columns(), kind)
        for name, value in figures.items():
            is_unknown = isinstance(value, Interval) and not value.is_known
            columns[name] = None if is_unknown else value
        return kind(**columns)

    def append(self, name: str, rows: Sequence[Row]) -> None:
        """Append rows to a file in the run's directory immediately, so that no measurement is lost."""
        append_rows(self.directory / name, rows)

    def write_rows(self, rows: Sequence[RunRow]) -> str | None:
        """Append rows to the run's own file and, unless the run was refused, to the file that collects all runs.

        Returns:
            A line for the user that names the files; None without rows.

        Raises:
            RunError: if a file cannot be written. If only the collecting file cannot, the message names the directory
                that has the rows.
        """
        if not rows:
            return None
        self.append(f"{rows[0].kind}.csv", rows)
        self.written += rows
        directory = self.directory.resolve()
        if directory.is_relative_to(Path.cwd()):
            directory = directory.relative_to(Path.cwd())
        line = f"  Saved  {directory}/"
        collected = self.settings.results.file
        if not collected or self.status == REFUSED:
            return line
        try:
            file = append_rows(collected, rows)
        except HarnessError as error:
            raise RunError(f"{error}; the rows are in {directory}/") from error
        why = (
            ""
            if file == Path(collected)
            else f" ({collected} has other columns, or ends inside a cell)"
        )
        return f"{line} and {file}{why}"

    def end_tokens(self) -> frozenset[int]:
        """Return the ids of the tokens that end a text of the target; empty if none is known. Loads a local pair's
        weights, which `place` must have placed.
        """
        if engine_of(self.settings).loads_pair:
            return self.pair.stop_tokens()
        ends = self.tokenizer.eos_token_id
        return frozenset() if ends is None else frozenset({int(ends)})

    def _circumstances(self) -> dict[str, Any]:
        """The columns about the run's status, machine, weights and servers, by name; what is unknown so far is None or
        left out. Also updates `devices`.
        """
        measurement = self.identify()
        self._look_at_servers()
        columns: dict[str, Any] = {
            "status": self.status,
            "error": self.error,
            **environment_columns(self.devices),
            "server": "; ".join(self.servers.names) or None,
            "served_model": [*self.servers.models] or None,
            "server_command": [*self.servers.commands] or None,
            "measurement": measurement.digest,
            "server_started": measurement.server_started,
            "directory": str(self.directory),
        }
        if self.settings.weights == "stored":
            columns["weights_identity"] = measurement.weights.get("model")
            columns["draft_weights_identity"] = measurement.weights.get("draft")
        if self.engine is not None:
            columns["runner"] = self.engine.runner
            columns["draft_runner"] = self.engine.draft_runner
            columns["setup_s"] = self.engine.setup_seconds
        if self.placed is not None:
            columns |= self.placed.columns()
        # Simulated times come from no device.
        if engine_of(self.settings).own_clock:
            columns["devices"] = None
        return columns


def _selected(columns: Mapping[str, Any], kind: type[Row]) -> dict[str, Any]:
    """Return the entries of `columns` for which this kind of row has a column."""
    return {name: value for name, value in columns.items() if name in kind.columns()}


def _message(exception: BaseException) -> str:
    """Return the message of an exception in one line, or its type if it has no message."""
    return " ".join(str(exception).split()) or type(exception).__name__
