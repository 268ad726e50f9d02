"""The cost of watching: `compare`'s times with the display on against off, and how soon the first token is shown.

    python benchmarks/compare_display.py [--model DIR] [--draft DIR] [--prompts 15] [--tokens 64] [--repeats 3]

The screen is a real pseudo-terminal, emptied by another process, as a terminal emulator does. Each prompt runs through
each arm with the view on and with the view off, one right after the other, in an order that alternates; the ratio of
total times has a paired bootstrap interval. The times are those that `compare` shows: the ratio is the error of a user
who watches. The seconds that watching adds to the wait are printed as well.
"""

from __future__ import annotations

import argparse
import functools
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence

import torch
from rich.console import Console
from rich.table import Table

from harness.commands.compare.display import Lane, live, plain_console
from harness.config.settings import (
    DecodingSettings,
    ModelSettings,
    PlacementSettings,
    PromptSettings,
)
from harness.drafting.methods.model import ModelDraftSettings
from harness.engines.local.engine import LocalEngine
from harness.engines.pair import plan_pair
from harness.engines.protocol import Question
from harness.engines.record import Preparation
from harness.engines.timing import Generation, run_lap
from harness.menu.names import PACKAGE
from harness.models.case import Demand
from harness.prompts.sets import load_prompts
from harness.results.environment import environment_columns
from harness.results.statistics.ratios import ratio_of_totals

SHIPPED = PACKAGE / "models" / "shipped"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default=str(SHIPPED / "tiny"))
    parser.add_argument("--draft", default=str(SHIPPED / "tiny_draft"))
    parser.add_argument("--prompts", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()

    master, slave = os.openpty()
    emulator = subprocess.Popen(
        [sys.executable, "-c", "import os\nwhile os.read(0, 65536): pass"],
        stdin=master,
        stderr=subprocess.DEVNULL,
    )
    with open(slave, "w", encoding="utf-8") as terminal:
        screen = plain_console(
            file=terminal, width=80, height=24, force_terminal=True, color_system="truecolor"
        )
        seconds, frames, first_frames = measure(options, screen)
    emulator.kill()
    emulator.wait()
    report(options, seconds, frames, first_frames)


def measure(
    options: argparse.Namespace, screen: Console
) -> tuple[dict[tuple[str, str], list[float]], list[float], list[float]]:
    """Seconds by (arm, view) on `compare`'s clock; seconds each frame took; those of the first frames."""
    planned = plan_pair(
        ModelSettings(name="tiny", repository=options.model),
        ModelDraftSettings(name="tiny_draft", repository=options.draft),
        PlacementSettings(),
        "auto",
    )
    decoding = DecodingSettings(max_new_tokens=options.tokens)
    demand = Demand(
        batch_size=1,
        prompt_tokens=64,
        new_tokens=options.tokens,
        num_draft_tokens=decoding.num_draft_tokens,
        runner="auto",
    )
    preparation = Preparation(decoding=decoding, longest_prompt=64)
    engine = LocalEngine(planned.place(demand).load(), preparation)
    prompt_set = load_prompts(
        PromptSettings(name="tiny", file=str(PACKAGE / "prompts/prompt_sets/tiny.jsonl"))
    )
    seconds: dict[tuple[str, str], list[float]] = {
        (arm.name, view): [] for arm in engine.arms for view in ("on", "off")
    }
    frames: list[float] = []
    first_frames: list[float] = []
    runs = [
        (prompt, repeat)
        for repeat in range(options.repeats)
        for prompt in prompt_set.take(options.prompts)
    ]
    # One run more than is counted: the first is a warm-up.
    for number, (prompt, _) in enumerate([runs[0], *runs]):
        question = Question([planned.tokenizer(prompt.text)["input_ids"]], decoding, 0, [number])
        for arm in engine.arms:
            for view in ("on", "off") if number % 2 else ("off", "on"):
                shown: list[float] = []
                if view == "on":
                    lane = Lane(screen, arm.name, planned.tokenizer, question.prompts[0])
                    with live(lane) as draw:
                        assert draw is not None  # a terminal
                        lap = run_lap(engine, arm, question, functools.partial(timed, draw, shown))
                        lane.show(lap)
                else:
                    lap = run_lap(engine, arm, question)
                if number == 0:
                    continue
                seconds[arm.name, view].append(lap.seconds)
                frames += shown
                first_frames += shown[:1]
    return seconds, frames, first_frames


def timed(draw: Callable[[Generation], None], frames: list[float], lap: Generation) -> None:
    """Draw a frame, and note how long the screen took."""
    began = time.perf_counter()
    draw(lap)
    frames.append(time.perf_counter() - began)


def report(
    options: argparse.Namespace,
    seconds: dict[tuple[str, str], list[float]],
    frames: Sequence[float],
    first_frames: Sequence[float],
) -> None:
    """Print the ratios."""
    versions = environment_columns()
    table = Table(
        title=f"{options.repeats} × {options.prompts} prompts × {options.tokens} tokens, {torch.get_num_threads()}"
        f" threads, torch {versions['torch_version']}, {platform.machine()}"
    )
    for heading in ("time with the view on over off", "estimate", "95 % interval"):
        table.add_column(heading)
    for arm in dict.fromkeys(arm for arm, _ in seconds):
        ratio = ratio_of_totals(seconds[arm, "on"], seconds[arm, "off"], 10_000, 0)
        table.add_row(arm, f"{ratio.estimate:.4f}", f"{ratio.low:.4f} to {ratio.high:.4f}")
    speedups = [
        [
            slow / fast
            for slow, fast in zip(
                seconds["regular", view], seconds["speculative", view], strict=True
            )
        ]
        for view in ("on", "off")
    ]
    ratio = ratio_of_totals(speedups[0], speedups[1], 10_000, 0)
    table.add_row("speed-up", f"{ratio.estimate:.4f}", f"{ratio.low:.4f} to {ratio.high:.4f}")
    console = Console(width=110)
    console.print(table)
    watched = sum(sum(seconds[arm, view]) for arm, view in seconds if view == "on")
    console.print(
        f"a frame takes {1000 * statistics.median(frames):.1f} ms (median; at most {1000 * max(frames):.1f} ms), which"
        f" adds {sum(frames) / watched:.1%} to the wait\n"
        f"the first token is on the screen {1000 * statistics.median(first_frames):.1f} ms after it was decided"
        f" (median; at most {1000 * max(first_frames):.1f} ms)"
    )


if __name__ == "__main__":
    main()
