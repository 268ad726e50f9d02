"""The measurement of `compare`: the user types a prompt and watches both arms race. `display.py` draws the texts."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness.commands.command import Experiment
from harness.commands.compare.display import Lane, print_lanes, show_race
from harness.commands.compare.race import (
    Rejection,
    arm_columns,
    comparison_columns,
    find_rejections,
)
from harness.commands.compare.record import NARROWEST_RACE, CompareSettings, View
from harness.commands.compare.rows import CompareRow
from harness.commands.compare.tables import rejections, verdict
from harness.config.errors import HarnessError, RunError, SettingError
from harness.engines.protocol import Answered, Arm, Question
from harness.engines.timing import quick_garbage_collections, timed_answer
from harness.engines.tokenizer import Tokenizer
from harness.measuring.progress import say, show
from harness.measuring.prompts.sets import Prompt, load_prompts
from harness.measuring.session import Session
from harness.reporting.table import visible
from harness.reporting.terminal import plain_console, print_document, stderr_console
from harness.reporting.words import pair_name, settings_line

# Each arm generates this many tokens before the first race, because the first tokens of a process take longer.
_WARMUP_TOKENS = 8
# The prepared calls have room for prompts of this many tokens. Longer prompts are decoded, too, but more slowly.
_LONGEST_FAST_PROMPT = 512
_WELCOME = "Type a prompt (↑ has examples). Ctrl-C stops a generation, Ctrl-D ends."


class CompareExperiment(Experiment[CompareSettings, CompareRow]):
    """Races both arms on one prompt after the other, and writes a row after each race.

    The only prompt is that of the setting `prompt`; without the setting, prompts are read from a terminal or a pipe.
    """

    def __init__(self, settings: CompareSettings) -> None:
        self.settings = settings
        # The first of these prompts is used for the warm-up. On a terminal, all of them are offered as examples.
        self._examples = load_prompts(settings.prompts).prompts
        self._interactive = settings.prompt is None and sys.stdin.isatty()
        self._console = plain_console()
        self._num_races = 0
        # The line that names the files with the rows, printed at the end; None before the first race.
        self._written: str | None = None

    def measure(self, session: Session) -> None:
        """Race the prompt of the settings, or the prompts that are typed or come from a pipe."""
        prompt = self.settings.prompt
        if prompt is not None:
            # Only to check, before the weights are loaded, that the prompt fits into the context.
            session.encode([Prompt(prompt)], "prompt")
        session.place(batch_size=1, prompt_tokens=_LONGEST_FAST_PROMPT)
        try:
            with quick_garbage_collections():
                self._warm_up(session)
                if prompt is not None:
                    self._race(session, prompt)
                elif self._interactive:
                    row = session.row(CompareRow)
                    pair = pair_name(row, " with draft ")
                    self._say(f"{pair} · {settings_line([row])} · view={self._view()}", "bold")
                    self._say(_WELCOME)
                    history = session.store_directory / ".compare_history"
                    examples = [example.text for example in self._examples]
                    self._take_lines(session, typed_lines(history, examples))
                else:
                    self._take_lines(session, piped_lines())
        finally:
            if self._written:
                say(self._written)

    def rows(self, session: Session) -> list[CompareRow]:
        """A row for the prompt of the settings if the run ended before its race; otherwise [], because each race writes
        its own row.
        """
        if session.status == "ok" or self._num_races or self.settings.prompt is None:
            return []
        return [session.row(CompareRow, prompt=self.settings.prompt)]

    def _take_lines(self, session: Session, lines: Iterable[str]) -> None:
        """Race prompts until the lines end. Errors are printed, and the next line is read.

        Raises:
            SettingError: if a pipe has only empty lines.
            RunError: if any line of a pipe failed; raised at the end. On a terminal, nothing is raised for it.
            KeyboardInterrupt: for Ctrl-C in a pipe, and for a signal that ends the process.
        """
        num_lines = num_failed = 0
        for line in lines:
            if not line.strip():
                continue
            num_lines += 1
            try:
                self._race(session, line)
                # If stdout is closed, nobody reads further races.
                if self._console.reader_has_left:
                    break
            except KeyboardInterrupt as interrupt:
                # An interrupt with a message is not the user's Ctrl-C, but a signal to end the process (`cli.signals`).
                if interrupt.args or not self._interactive:
                    raise
                self._say("Stopped. The models stay loaded; Ctrl-D ends.", "dim")
            except HarnessError as error:
                num_failed += 1
                stderr_console().print(visible(f"harness: {error}"))
        if num_lines == 0 and not self._interactive:
            rule = "must be given without a terminal: prompt=..., or one per line on stdin"
            raise SettingError("prompt", rule)
        if num_failed and not self._interactive:
            raise RunError(f"{num_failed} of {num_lines} lines failed")

    def _race(self, session: Session, prompt: str) -> None:
        """Race all arms on one prompt, show the race, and write its row, even if an error ends the race.

        Raises:
            SettingError: the prompt cannot be encoded, or is too long; there is no row then.
            HarnessError: the race failed, or its row cannot be written.
        """
        typed = Prompt(prompt)
        [token_ids] = session.encode([typed], "prompt")
        if not self._interactive:
            # A terminal already shows the prompt as typed; otherwise it is printed before its answers.
            if self._num_races:
                self._console.print()
            self._say(f"> {prompt}", "bold")
        view = self._view()
        answers: list[Answered] = []
        rejected: Sequence[Rejection] | None = None
        columns: dict[str, Any] = {
            "prompt_index": self._num_races,
            "prompt": prompt,
            "num_prompt_tokens": len(token_ids),
            "view": view,
        }
        # The row states how this race ended, and not an earlier one.
        session.status = "ok"
        session.error = None
        try:
            with session.watch():
                engine = session.engine
                assert engine is not None, "the warm-up opened it"
                # The warm-up used the random numbers of index 0.
                index = self._num_races + 1
                question = Question(
                    session.requests([token_ids], [index], chats=[typed.chat()], salts=[str(index)])
                )
                for arm in engine.arms:
                    show(f"decoding: {arm.name}")
                    answered = timed_answer(engine, arm, question)
                    show("")
                    answers.append(answered)
                    columns |= arm_columns(answered, session.tokenizer)
                    if view != "race":
                        self._show_text(answered, arm, session.tokenizer, token_ids)
                reports_drafts = engine.arms[-1].traits.reports_drafts
                if len(answers) == 2:
                    columns |= comparison_columns(
                        engine.weights, session.tokenizer, question, *answers
                    )
                    if reports_drafts:
                        rejected = find_rejections(answers[-1], session.tokenizer)
                        columns["num_rejections"] = len(rejected)
        finally:
            self._num_races += 1
            row = session.row(CompareRow, **columns)
            if row.why_no_verdict is not None:
                row = dataclasses.replace(row, speedup=None)
            self._written = session.write_rows([row])
        if view == "race" and all(answered.has_token_times for answered in answers):
            show_race(self._console, answers, session.tokenizer, token_ids, legend=reports_drafts)
        elif view == "race":
            # Most servers send text without token ids, so that no token can be shown at its time.
            for answered, arm in zip(answers, engine.arms, strict=True):
                self._show_text(answered, arm, session.tokenizer, token_ids)
        log = rejections(rejected) if view == "log" and self.settings.draft is not None else []
        document = [*log, *verdict(row)]
        if document:
            self._console.print()
            print_document(document, self._console)

    def _show_text(
        self, answered: Answered, arm: Arm, tokenizer: Tokenizer, token_ids: Sequence[int]
    ) -> None:
        """Print an arm's whole text after it has ended.

        Args:
            token_ids: those of the prompt.
        """
        if arm.name != "regular":
            self._console.print()
        legend = arm.traits.reports_drafts
        lane = Lane(self._console, arm.name, tokenizer, token_ids, legend)
        lane.show(answered)
        print_lanes([lane])

    def _view(self) -> View:
        """How to show the next race: `view` with `auto` decided by the terminal's width."""
        view: View = self.settings.view
        if view != "auto":
            return view
        has_room = self._console.is_interactive and self._console.width >= NARROWEST_RACE
        return "race" if has_room else "log"

    def _warm_up(self, session: Session) -> None:
        """Open the engine, which stays open from race to race because some runners take long to prepare. Let every arm
        generate a few tokens, and discard them.
        """
        decoding = dataclasses.replace(session.settings.decoding, max_new_tokens=_WARMUP_TOKENS)
        example = self._examples[0]
        token_ids = session.encode([example], new_tokens=_WARMUP_TOKENS)
        engine = session.open(batch_size=1, longest_prompt=_LONGEST_FAST_PROMPT)
        requests = session.requests(token_ids, [0], decoding, chats=[example.chat()])
        for arm in engine.arms:
            timed_answer(engine, arm, Question(requests))

    def _say(self, text: str, style: str = "") -> None:
        """Print a line on stdout, in place of a progress line on the terminal."""
        show("")
        self._console.print(visible(text), style=style, soft_wrap=not self._console.is_terminal)


def piped_lines() -> Iterator[str]:
    """The lines of standard input, one prompt each; invalid UTF-8 becomes replacement characters."""
    for number, line in enumerate(sys.stdin.buffer):
        yield line.decode("utf-8-sig" if number == 0 else "utf-8", errors="replace").rstrip("\r\n")


def typed_lines(history_file: Path, examples: Sequence[str]) -> Iterator[str]:
    """The lines typed on the terminal, with line editing, history and pastes of several lines.

    Ctrl-D, or Ctrl-C on an empty line, ends the iteration. Ctrl-C on a line with text discards the text.

    Args:
        history_file: the file in which typed lines are kept for later sessions.
        examples: prompts that are offered as the oldest entries of the history.
    """
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.output import create_output

    class History(FileHistory):
        """The lines in the file and, before them, the examples."""

        def load_history_strings(self) -> Iterator[str]:  # the newest first
            yield from super().load_history_strings()
            yield from examples

    # If stdout is a file, the line to type in (`> `) is shown on stderr.
    session: PromptSession[str] = PromptSession(
        history=History(str(history_file)),
        output=create_output(always_prefer_tty=True),
        prompt_continuation="… ",
    )
    while True:
        try:
            line = session.prompt("> ")
        except EOFError:
            return
        except KeyboardInterrupt as interrupt:
            if interrupt.args:  # a signal to end, see `cli.signals`
                raise
            if not session.default_buffer.text:
                return
            continue
        # A terminal whose encoding is not UTF-8 may deliver lone surrogates, which become `?`.
        yield line.encode(errors="replace").decode()
