"""Does the work of every command around its measurement: plan, encode, place, load, open an engine,
and write rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import PreTrainedTokenizerBase

from harness.config.errors import HarnessError, RunError
from harness.config.machine import cpu_name, gpu_names
from harness.config.run import RunSettings
from harness.config.settings import DecodingSettings
from harness.engines.divergence import Divergence, text_divergence
from harness.engines.keeper import PairKeeper
from harness.engines.pair import Pair, PlacedPair, PlannedPair, plan_pair
from harness.engines.protocol import Arm, Engine, Question, Reference
from harness.engines.reference import open_reference
from harness.engines.timing import Generation, generate, quick_collections
from harness.experiments.encoding import Chat, Encoded, encode, encode_set, origin
from harness.experiments.pace import pace
from harness.experiments.progress import progress, say
from harness.experiments.prompts import Prompt, PromptSet
from harness.menu.records import engine_of
from harness.models.case import Demand
from harness.models.failures import as_run_error
from harness.models.tokenizers import uses_template
from harness.results.acceptance import Acceptance
from harness.results.environment import environment_columns, new_run_id, write_environment
from harness.results.files import append_lines, append_rows
from harness.results.measurement import Measurement, further_settings, identify
from harness.results.row import Row
from harness.results.schema import OF_A_PAIR_HERE, PromptedRow, RunRow
from harness.results.weights import weights_identity

# The largest question to a reference that is loaded for an engine without one: rows, and tokens of
# each.
REFERENCE_BATCH = 64
REFERENCE_TOKENS = 128
# Seconds before each lap of an engine that keeps requests in flight. What is written between two
# laps is not the same before both arms, and slows the first requests after it: without a rest the
# first tokens of one of two identical arms came 0.25 ms later (`benchmarks/identical_arms.py`).
_REST_S = 0.02

AnyRow = TypeVar("AnyRow", bound=Row)
AnySettings = TypeVar("AnySettings", bound=RunSettings)
Item = TypeVar("Item")


class Session:
    """One run of a command.

    Args:
        asked: the settings as they were given, without the command's own changes.
        keeper: holds the pair where several runs follow each other.
        run_id: of the run; None for a new one.

    Attributes:
        run: the id that all its rows carry.
        status, error: `ok`, `failed` or `interrupted`, and why.
        placed, engine, devices: once there are any; of the devices that compute, the names.
    """

    def __init__(
        self,
        settings: RunSettings,
        asked: RunSettings,
        directory: Path,
        keeper: PairKeeper | None = None,
        run_id: str | None = None,
    ) -> None:
        self.settings = settings
        self.asked = asked
        self.directory = directory
        self.run = run_id or new_run_id()
        self.status = "ok"
        self.error: str | None = None
        self.placed: PlacedPair | None = None
        self.engine: Engine | None = None
        self.devices: list[str] = []
        self._measurement: Measurement | None = None
        self._counts = {"num_skipped": 0, "num_truncated": 0}
        self._origin_said = False
        self._keeper = keeper or PairKeeper()

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Note what ends the block early. A failure that is known leaves it as a RunError."""
        try:
            yield
        except KeyboardInterrupt as interrupt:
            self.status, self.error = "interrupted", str(interrupt) or "stopped by the user"
            raise
        except Exception as exception:
            explained = as_run_error(exception)
            self.status = "failed"
            self.error = " ".join(str(explained or exception or type(exception).__name__).split())
            raise explained or exception from exception

    @property
    def pair(self) -> Pair:
        """The loaded pair, for a command that changes its weights."""
        return self._keeper.load()

    @property
    def planned(self) -> PlannedPair:
        """The pair before its weights load; for engines elsewhere its tokenizer alone."""
        return self._keeper.plan(self.settings)

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer that the pair shares."""
        return self.planned.tokenizer

    @property
    def measurement(self) -> Measurement:
        """The identity of the measurement, determined before the weights load.

        Two measurements are the same if the same was asked for: the command's own changes do not
        count.
        """
        if self._measurement is None:
            self._measurement = identify(self.asked)
        return self._measurement

    @functools.cached_property
    def _weights(self) -> dict[str, str | None]:
        """The identities of the weights, by column."""
        if self.settings.weights == "random":
            return {}
        models = {"": self.settings.model, "draft_": self.settings.draft}
        return {
            f"{prefix}weights_identity": weights_identity(model)
            for prefix, model in models.items()
            if model is not None
        }

    @property
    def kept_in(self) -> Path:
        """The directory of what outlives the run; the run's own where nothing is collected."""
        file = self.settings.results.file
        return self.directory if file is None else Path(file).parent

    def encode(
        self, prompts: Sequence[Prompt], setting: str = "prompts", new_tokens: int | None = None
    ) -> list[list[int]]:
        """Token ids of each prompt, through the chat template where setting and tokenizer agree on
        it.

        Args:
            setting: where the prompts come from.
            new_tokens: that follow each prompt; `decoding.max_new_tokens` by default.

        Raises:
            SettingError: a prompt does not fit into a model's context with its new tokens.
        """
        planned = self._keeper.plan(self.settings)
        token_ids = encode(planned.tokenizer, prompts, self.settings.chat_template)
        planned.check_context(
            token_ids, new_tokens or self.settings.decoding.max_new_tokens, setting
        )
        return token_ids

    def encode_unchecked(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        """Token ids of prompts that may be too long for the models; otherwise see `encode`."""
        return encode(self.tokenizer, prompts, self.settings.chat_template)

    def encode_set(
        self, prompt_set: PromptSet, prompts: tuple[Prompt, ...], new_tokens: int
    ) -> Encoded:
        """Encode prompts of a set; those that are too long are refused, skipped or truncated as
        `prompts.too_long` says, and rows count them.
        """
        planned = self._keeper.plan(self.settings)
        settings: Any = self.settings
        about = origin(settings.prompts)
        if about is not None and not self._origin_said:
            say(about)
        self._origin_said = True
        encoded = encode_set(planned, settings, prompt_set, prompts, new_tokens)
        self._counts = {
            "num_skipped": encoded.num_skipped,
            "num_truncated": encoded.num_truncated,
        }
        return encoded

    def place(
        self, batch_size: int, prompt_tokens: int, new_tokens: int | None = None
    ) -> PlacedPair | None:
        """Place the pair with its caches, for prompts of at most so many tokens; say where, write
        `environment.json`.

        None where the engine needs no pair in this process.

        Raises:
            RunError: the pair does not fit.
        """
        settings = self.settings
        decoding = self.settings.decoding
        # Configurations have been read, so that a hub's commit is known, and no server was asked.
        self._measurement = self.measurement
        engine = engine_of(settings)
        advice = engine.advice(settings)
        if advice is not None:
            say(advice)
        if not engine.loads_pair:
            here = gpu_names() or [cpu_name() or "unknown CPU"]
            elsewhere = engine.place(settings.engine)
            self.devices = here if elsewhere is None else [elsewhere]
            write_environment(self.directory, self.devices)
            return None
        new_tokens = new_tokens or decoding.max_new_tokens
        demand = Demand(
            batch_size,
            prompt_tokens,
            new_tokens,
            num_draft_tokens=settings.most_verified,
            runner=settings.runner,
        )
        placed = self._keeper.place(settings, demand)
        if placed is not self.placed:
            say(placed.describe())
        self.placed, self.devices = placed, placed.device_names()
        write_environment(self.directory, self.devices)
        return placed

    def open(
        self,
        batch_size: int,
        longest_prompt: int,
        decoding: DecodingSettings | None = None,
        **options: Any,
    ) -> Engine:
        """Open the engine, with the pair loaded if it needs one; `options` are those of
        `Opening`.
        """
        # Before the next engine allocates its caches, those of the one before are given back.
        self.close()
        asked = self.settings, decoding or self.settings.decoding, batch_size, longest_prompt
        self.engine = self._keeper.open(*asked, say=say, **options)
        return self.engine

    def reference(self) -> Reference | None:
        """The probabilities of the models that generate: the engine's own, else of the same
        weights, loaded for that.

        None, which is said, for a server whose model cannot be loaded here, or that tells no token
        ids.

        Raises:
            RunError: models of an engine that computes here do not fit.
        """
        assert self.engine is not None
        return self.engine.reference or self._told_reference

    def text_reference(self) -> Reference | None:
        """The same for greedy texts, whose tokens need not be told; None where the server makes
        chats of prompts.
        """
        assert self.engine is not None
        if getattr(self.settings.engine, "chat", False):
            return None
        return self.engine.reference or self._loaded_reference

    def text_divergence(
        self, prompt: Sequence[int], text: str, num_tokens: int
    ) -> Divergence | None:
        """Where a greedy text of the last arm leaves that of the text reference, which must be there.

        Args:
            num_tokens: the most that the text has.
        """
        assert self.engine is not None
        reference = self.text_reference()
        assert reference is not None
        read = self.engine.arms[-1].as_read(prompt)
        return text_divergence(reference, self.tokenizer, read, text, num_tokens)

    @functools.cached_property
    def _told_reference(self) -> Reference | None:
        assert self.engine is not None
        if self.engine.tells_tokens and self._loaded_reference is not None:
            return self._loaded_reference
        say("without the exact distribution: answers are compared with each other")
        return None

    @functools.cached_property
    def _loaded_reference(self) -> Reference | None:
        computes_here = engine_of(self.settings).computes_here
        try:
            return self._load_reference(computes_here)
        except HarnessError as error:
            if computes_here:
                raise
            say(f"model={self.settings.model.name} cannot be loaded here: {error}")
            return None

    def _load_reference(self, computes_here: bool) -> Reference:
        settings = self.settings
        target_alone = settings.model, None, settings.placement, settings.dtype
        planned = self._keeper.plan(settings) if computes_here else plan_pair(*target_alone)
        demand = Demand(
            batch_size=REFERENCE_BATCH,
            prompt_tokens=REFERENCE_TOKENS,
            new_tokens=0,
            num_draft_tokens=0,
            runner="eager",
        )
        pair = planned.place(demand, force=settings.force).load()
        assert self.engine is not None
        never_drawn = set().union(*(arm.never_drawn for arm in self.engine.arms))
        return open_reference(pair, settings.decoding, never_drawn=never_drawn)

    def close(self) -> None:
        """Close the engine, if one is open."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None

    def ask(
        self,
        token_ids: Sequence[Sequence[int]],
        indices: Sequence[int],
        decoding: DecodingSettings | None = None,
        *,
        chats: Sequence[Chat] = (),
        seed: int | None = None,
        stop_tokens: frozenset[int] = frozenset(),
        repeats: Sequence[int] = (),
        ends: Sequence[str] = (),
    ) -> Question:
        """The question of one batch; the settings say the rest.

        Args:
            indices: of the prompts; with the seed they determine the random numbers.
            stop_tokens: that end a row besides those at which the target ends a text.
            chats, repeats, ends: see `Question`.
        """
        if decoding is None:
            decoding = self.settings.decoding
        if seed is None:
            seed = self.settings.seed
        if not decoding.ignore_eos:
            stop_tokens = stop_tokens | self.end_tokens()
        return Question(token_ids, decoding, seed, indices, stop_tokens, chats, repeats, ends)

    def race(
        self,
        questions: Sequence[Question],
        note: Callable[[Question, dict[str, Generation]], str | None],
        warmups: Sequence[Question] = (),
        *,
        arms: Sequence[Arm] | None = None,
        allow_failures: bool = False,
        warmed: Callable[[str], None] = lambda arm: None,
        ended: Callable[[Question, dict[str, Generation]], None] = lambda question, answers: None,
        for_arm: Callable[[Question, str], Question] = lambda question, arm: question,
    ) -> None:
        """Give every arm every question, in turns, with a progress bar.

        Args:
            note: gets the answers to a question before the next one; returns a text for the bar.
            warmups: what each arm answers first, unmeasured.
            arms: the engine's by default.
            allow_failures: see `run_lap`.
            warmed: gets the name of an arm that has warmed up.
            ended: gets the answers to a question so far whenever an arm has ended.
            for_arm: the question as an arm of this name is asked it.

        Raises:
            RunError: an arm was given up; the answers until then were noted.
        """
        engine = self.engine
        assert engine is not None
        arms = engine.arms if arms is None else arms
        warm: set[str] = set()
        with (
            progress("warming up" if warmups else "measuring", len(questions)) as advance,
            pace(len(questions), say) as answered,
            quick_collections(),
        ):
            for question, in_turn in zip(questions, _alternating(arms), strict=False):
                generations: dict[str, Generation] = {}
                for arm in in_turn:
                    # Just before its question, because an engine may hold one arm at a time.
                    if arm.name not in warm or not engine.is_loaded(arm):
                        for warmup in warmups:
                            generate(engine, arm, warmup, allow_failures=allow_failures)
                        warm.add(arm.name)
                        warmed(arm.name)
                    asked = for_arm(question, arm.name)
                    generations[arm.name] = self._generate(engine, arm, asked, allow_failures)
                    ended(question, generations)
                advance(note(question, generations) or "measuring")
                answered()
                _check_answering(arms)

    def _generate(
        self, engine: Engine, arm: Arm, question: Question, allow_failures: bool
    ) -> Generation:
        """Let an arm answer, and write its requests in the form of other tools."""
        if engine.queues:
            time.sleep(_REST_S)
        generation = generate(engine, arm, question, allow_failures=allow_failures)
        lines = [request.aiperf() for request in generation.requests]
        append_lines(self.directory / f"profile_export_{arm.name}.jsonl", lines)
        return generation

    def row(
        self, kind: type[AnyRow], acceptance: Acceptance | None = None, **figures: Any
    ) -> AnyRow:
        """A row with settings, circumstances and figures; of acceptance, those that this kind of
        row has.

        Raises:
            TypeError: a circumstance or a figure that the kind of row has no column for.
        """
        columns: dict[str, Any] = {"run": self.run}
        if issubclass(kind, RunRow):
            columns |= kind.asked(self.settings) | self._circumstances()
            columns["settings"] = further_settings(self.settings, kind)
            if self.settings.draft is None or figures.get("arm") == "regular":
                columns["num_draft_tokens"] = None
            if not engine_of(self.settings).computes_here:
                columns |= dict.fromkeys(kind.columns().keys() & OF_A_PAIR_HERE)
        if issubclass(kind, PromptedRow):
            columns |= self._counts
        if acceptance is not None:
            about_acceptance = acceptance.columns(self.settings.num_levels)
            for name in about_acceptance.keys() & kind.columns().keys():
                columns[name] = about_acceptance[name]
        return kind(**(columns | figures))

    def append(self, name: str, rows: Sequence[Row]) -> None:
        """Append rows to a file in the run's directory, at once, so that nothing measured is
        lost.
        """
        append_rows(self.directory / name, rows)

    def write_rows(self, rows: Sequence[RunRow]) -> str | None:
        """Append rows to the run's own file and to the one that collects all runs; says where."""
        if not rows:
            return None
        self.append(f"{rows[0].kind}.csv", rows)
        own = f"written to {self.directory}/"
        collected = self.settings.results.file
        if not collected:
            return own
        try:
            file = append_rows(collected, rows)
        except HarnessError as error:
            raise RunError(f"{error}; the rows are in {self.directory}/") from error
        note = "" if file == Path(collected) else f" ({collected} has other columns)"
        return f"{own} and {file}{note}"

    def settled(self, settings: AnySettings) -> AnySettings:
        """The run's settings with `decoding.ignore_eos=auto` decided: texts go on after their end,
        but not in chats.
        """
        if settings.decoding.ignore_eos != "auto":
            return settings
        is_chat = uses_template(self.tokenizer, settings.chat_template)
        decoding = dataclasses.replace(settings.decoding, ignore_eos=not is_chat)
        settled = dataclasses.replace(settings, decoding=decoding)
        self.settings = settled
        return settled

    def end_tokens(self) -> frozenset[int]:
        """The tokens at which the target ends a text by itself."""
        if engine_of(self.settings).loads_pair:
            return self._keeper.load().stop_tokens()
        ends = self.tokenizer.eos_token_id
        return frozenset() if ends is None else frozenset({int(ends)})

    def _circumstances(self) -> dict[str, Any]:
        columns: dict[str, Any] = {
            "status": self.status,
            "error": self.error,
            **environment_columns(self.devices),
            **self._weights,
            "measurement": self.measurement.digest,
            "server_started": self.measurement.server_started,
            "directory": str(self.directory),
        }
        if self.engine is not None:
            columns["runner"] = self.engine.runner
            columns["server"] = self.engine.server
            columns["setup_s"] = self.engine.setup_seconds
        if self.placed is not None:
            columns |= _columns_of_weights(self.placed)
        return columns


def _columns_of_weights(placed: PlacedPair) -> dict[str, Any]:
    """The columns about the weights of a pair and their places."""
    columns: dict[str, Any] = {"draft_layers": getattr(placed.draft_settings, "layers", None)}
    if placed.translation is not None:
        columns["translation"] = placed.translation.method
    target = placed.models[0]
    columns |= _weights_of_model("", target.dtype, target.placement.bytes_per_device)
    if placed.head is not None:
        # A head is beside the target's first layers, in the target's format.
        head_bytes = {str(placed.devices[0]): placed.sketches[1].weight_bytes}
        columns |= _weights_of_model("draft_", target.dtype, head_bytes)
    elif placed.shared or len(placed.models) > 1:
        draft = placed.models[-1]
        columns |= _weights_of_model("draft_", draft.dtype, draft.placement.bytes_per_device)
    return columns


def _weights_of_model(prefix: str, dtype: torch.dtype, sizes: dict[str, int]) -> dict[str, Any]:
    return {
        f"{prefix}dtype": str(dtype).removeprefix("torch."),
        f"{prefix}weight_bytes": sizes,
    }


def _alternating(arms: Sequence[Arm]) -> Iterator[Sequence[Arm]]:
    """The arms in their order, then in reverse, and so on.

    So neither always runs after the other has warmed the caches.
    """
    return itertools.cycle([arms, arms[::-1]])


def _check_answering(arms: Sequence[Arm]) -> None:
    """Raise a RunError for an arm that gets no more requests: the other's answers would have no partners."""
    for arm in arms:
        if arm.given_up is not None:
            raise RunError(f"{arm.name}: {arm.given_up}")


def in_batches(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """The same in lists of at most this size."""
    return [items[first : first + size] for first in range(0, len(items), size)]
