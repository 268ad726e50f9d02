"""`compare`: type a prompt and watch both decoders race."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

from rich.console import Console

from harness.config.commands import CompareSettings
from harness.config.errors import HarnessError, RunError, SettingError
from harness.config.settings import DecodingSettings
from harness.decoding.loops import Request
from harness.decoding.randomness import uniforms
from harness.experiments.arms import Arm, Players, players, warp
from harness.experiments.compare_display import LiveLane, show_race
from harness.experiments.compare_race import Lap, parting, rejections, run_lap
from harness.experiments.compare_rows import Race, race_record, race_row, rejection_rows
from harness.experiments.compare_session import describe, hold, piped_lines, typed_lines
from harness.experiments.progress import say
from harness.experiments.prompts import Prompt, load_prompts
from harness.experiments.setup import (
    PairKeeper,
    RunRecord,
    append_run,
    check_context,
    device_names,
    encode,
    stop_tokens,
)
from harness.experiments.timing import quick_collections
from harness.models.loading import Pair, PlannedPair
from harness.results import compare_report
from harness.results.environment import write_environment
from harness.results.files import check_appendable

# New tokens of each arm before the first race, so that it does not pay for what a process does only once.
_WARMUP_TOKENS = 8

# Prompts of more tokens are decoded as well, by a prepared runner more slowly.
_LONGEST_FAST_PROMPT = 512

# Without a terminal the tables go into a file or a log.
_PLAIN_WIDTH = 110


def run(settings: CompareSettings, directory: Path, keeper: PairKeeper | None = None) -> float | None:
    """Load the pair once and race every prompt; return the last race's speed-up (None without a draft).

    Args:
        directory: of this run; `compare.csv` and `environment.json` are written there.
        keeper: holds the pair where several runs follow each other.

    Raises:
        SettingError: a mistake that only the models' configurations reveal, or a refused `prompt`.
        RunError: the run failed, or lines from a pipe came to nothing.
    """
    check_appendable(settings.results.file)
    # The first one serves as warm-up, all of them as examples.
    examples = load_prompts(settings.prompts).prompts
    keeper = keeper or PairKeeper()
    planned = keeper.plan(settings)
    if settings.prompt is not None:
        _token_ids(planned, settings, settings.prompt)
    say(planned.describe())
    arena = Arena(planned, keeper.load(), directory)
    write_environment(directory, arena.devices)
    try:
        with quick_collections():
            arena.warm_up(settings, examples[0])
            if settings.prompt is not None:
                arena.race(settings, settings.prompt)
            else:
                _hold_session(settings, arena, [prompt.text for prompt in examples])
    finally:
        if arena.written is not None:
            say(f"written to {directory}/ and {arena.written}")
    return arena.speedup


class Arena:
    """A loaded pair, and every race it has run.

    Attributes:
        devices: their names.
        speedup: of the last race.
        written: the cumulative file, once it has a row.
    """

    def __init__(self, planned: PlannedPair, pair: Pair, directory: Path) -> None:
        self._planned = planned
        self._pair = pair
        self._directory = directory
        self._num_races = 0
        self.devices = device_names(pair.devices)
        self.console = compare_report.plain_console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        self._prepared: tuple[DecodingSettings, Players] | None = None
        self.speedup: float | None = None
        self.written: Path | None = None

    def warm_up(self, settings: CompareSettings, prompt: Prompt) -> None:
        """Run both arms for a few tokens and forget it."""
        decoding = dataclasses.replace(settings.decoding, max_new_tokens=_WARMUP_TOKENS)
        short = dataclasses.replace(settings, decoding=decoding)
        request = self._request(short, encode(self._pair.tokenizer, [prompt], settings.chat_template)[0])
        for arm in self._arms(settings):
            run_lap(arm, request, self._pair.devices)

    def race(self, settings: CompareSettings, prompt: str) -> None:
        """Run one prompt through every arm, show it, and write its row, however it ends.

        Raises:
            SettingError: the prompt is too long; nothing ran.
            RunError: a lap failed; its row says so.
        """
        race = Race(self._num_races, prompt, _token_ids(self._planned, settings, prompt))
        if not settings.json and not (sys.stdin.isatty() and settings.prompt is None):
            self.console.print(f"> {prompt}", style="bold", soft_wrap=True)
        self._num_races += 1
        taking_part = self._players(settings)
        record = RunRecord(settings, self._directory, self.devices, taking_part.runner, taking_part.setup_seconds)
        try:
            with record.watch():
                self._run_laps(settings, race)
        finally:
            row = race_row(settings, self._planned, race, record)
            self.speedup = row["speedup"]
            self.written = append_run(settings, self._directory / "compare.csv", [row])
        if settings.json:
            print_record(race_record(row, self._pair.tokenizer, race))
            return
        if settings.view == "race":
            show_race(self.console, list(race.laps.values()), self._pair.tokenizer, race.prompt_tokens)
        if settings.view == "log" and settings.draft is not None:
            self.console.print(compare_report.rejections(rejection_rows(self._pair.tokenizer, race.rejections)))
        for line in compare_report.verdict(row):
            self.console.print(line)

    def _run_laps(self, settings: CompareSettings, race: Race) -> None:
        request = self._request(settings, race.prompt_tokens)
        for arm in self._arms(settings):
            race.laps[arm.name] = self._lap(settings, arm, request)
        if speculative := race.laps.get("speculative"):
            race.rejections = rejections(speculative)
            race.parting = parting(self._players(settings).target, request, race.laps["regular"], speculative)

    def _lap(self, settings: CompareSettings, arm: Arm, request: Request) -> Lap:
        if settings.json or settings.view == "race":
            return run_lap(arm, request, self._pair.devices)
        with LiveLane(self.console, arm.name, self._pair.tokenizer, request.prompts[0]) as watcher:
            lap = run_lap(arm, request, self._pair.devices, watcher)
            watcher.finish(lap)
        return lap

    def _request(self, settings: CompareSettings, token_ids: list[int]) -> Request:
        decoding = settings.decoding
        return Request(
            prompts=[token_ids],
            uniforms=uniforms(
                settings.seed, [self._num_races], decoding.max_new_tokens + 1, self._pair.target.input_device
            ),
            warp=warp(decoding),
            max_new_tokens=decoding.max_new_tokens,
            stop_tokens=frozenset() if decoding.ignore_eos else stop_tokens(self._pair),
        )

    def _arms(self, settings: CompareSettings) -> list[Arm]:
        return self._players(settings).arms(settings.decoding)

    def _players(self, settings: CompareSettings) -> Players:
        """The same until a setting of decoding changes: some runners take long to prepare."""
        if self._prepared is None or self._prepared[0] != settings.decoding:
            taking_part = players(
                self._pair, settings.decoding, runner=settings.runner, longest_prompt=_LONGEST_FAST_PROMPT
            )
            self._prepared = settings.decoding, taking_part
        return self._prepared[1]


def print_record(record: dict[str, object]) -> None:
    """One JSON record on a line of stdout, at once: a program may wait for it."""
    print(json.dumps(record, ensure_ascii=False), flush=True)


def complain(error: HarnessError) -> None:
    """An error within a session, as the command line prints one that ends it."""
    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    console.print(f"harness: {error}", soft_wrap=not console.is_terminal)


def _hold_session(settings: CompareSettings, arena: Arena, examples: list[str]) -> None:
    """Race what is typed, or what comes from a pipe."""
    interactive = sys.stdin.isatty()
    # With json=true stdout is for records alone.
    console = Console(stderr=True, highlight=False, markup=False, emoji=False) if settings.json else arena.console

    def refuse(line: str, error: HarnessError) -> None:
        complain(error)
        if settings.json and not line.startswith(":"):
            print_record({"prompt": line, "status": "failed", "error": str(error)})

    if interactive:
        console.print(describe(settings), style="bold")
        console.print("Type a prompt (↑ has examples). :help lists commands, Ctrl-C stops a generation, Ctrl-D ends.")
        lines = typed_lines(Path(settings.results.file).parent / ".compare_history", examples)
    else:
        lines = piped_lines()
    num_lines, num_refused = hold(settings, lines, arena.race, refuse, console, interactive)
    if interactive:
        return
    if num_lines == 0:
        raise SettingError("prompt", "must be given where there is no terminal: prompt=..., or a line each on stdin")
    if num_refused:
        raise RunError(f"{num_refused} of {num_lines} lines came to nothing")


def _token_ids(planned: PlannedPair, settings: CompareSettings, prompt: str) -> list[int]:
    token_ids = encode(planned.tokenizer, [Prompt(prompt)], settings.chat_template)
    check_context(planned, token_ids, settings.decoding.max_new_tokens, "prompt")
    return token_ids[0]
