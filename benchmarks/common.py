"""Shared parts of the benchmarks: options, pairs of models, contenders that alternate, and tables of ratios."""

from __future__ import annotations

import argparse
import math
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from harness.cli import names
from harness.cli.conversion import from_config
from harness.commands.latency.record import LatencySettings
from harness.config.demand import Demand
from harness.config.machine import cpu_name
from harness.config.settings import DecodingSettings
from harness.engines.keeper import PairKeeper
from harness.engines.protocol import Question
from harness.engines.timing import quick_garbage_collections, without_garbage_collection
from harness.local.drafting.method import Pair
from harness.local.engine.pair import PlacedPair
from harness.local.models.devices import synchronize
from harness.measuring.prompts.chat_templates import Template
from harness.measuring.prompts.sets import load_prompts
from harness.reporting.table import Column, Table, TableRow
from harness.reporting.terminal import plain_console, print_document
from harness.results.environment import environment_columns
from harness.results.statistics.interval import Interval
from harness.results.statistics.ratios import ratio_of_totals

Item = TypeVar("Item")
Result = TypeVar("Result")


def parser(description: str | None, **numbers: float) -> argparse.ArgumentParser:
    """Make a parser with options for the pair, and one option per number: `tokens=64` makes `--tokens`."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--model", default="tiny", help="a preset, a directory or a repository")
    made.add_argument("--draft", default="tiny_draft")
    add_numbers(made, **numbers)
    return made


def add_numbers(parser: argparse.ArgumentParser, **numbers: float) -> None:
    """Add one option per number, with the number as its default."""
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)


def settings(*overrides: str) -> LatencySettings:
    """The settings of `latency` with these overrides."""
    names.register()
    with initialize_config_dir(str(names.CONF), version_base="1.3"):
        plain: Any = OmegaConf.to_container(compose("latency", list(overrides)), resolve=True)
    plain.pop("command")
    return from_config(LatencySettings, plain)


def cpu_settings(options: argparse.Namespace, *overrides: str) -> LatencySettings:
    """The settings for the pair that the options name, on the CPU."""
    return settings(f"model={options.model}", f"draft={options.draft}", "placement=cpu", *overrides)


def place(settings: LatencySettings, prompt_tokens: int) -> PlacedPair:
    """Find devices for the settings' pair and its caches."""
    decoding = settings.decoding
    demand = Demand(
        settings.batch_size,
        prompt_tokens,
        decoding.max_new_tokens,
        decoding.most_draft_tokens,
        settings.runner,
    )
    return PairKeeper().place(settings, demand)


def load(settings: LatencySettings, prompt_tokens: int = 128) -> Pair:
    """Place and load the settings' pair."""
    return place(settings, prompt_tokens).load()


def read_prompts(settings: LatencySettings, pair: Pair, count: int) -> list[list[int]]:
    """Token ids of the first prompts of the settings' prompt set."""
    prompts = [prompt.chat() for prompt in load_prompts(settings.prompts).take(count)]
    return Template(pair.tokenizer, settings.chat_template).encode(prompts)


def timed(
    call: Callable[[], object],
    devices: Sequence[torch.device] = (),
    clock: Callable[[], float] = time.perf_counter,
) -> float:
    """Return the seconds that a call takes, without garbage collection. Devices are synchronised before and after."""
    with without_garbage_collection():
        synchronize(devices)
        started = clock()
        call()
        synchronize(devices)
        return clock() - started


def take_turns(
    contenders: Mapping[str, Callable[[Item], Result]],
    items: Sequence[Item],
    warm_up: Sequence[Item] | None = None,
) -> dict[str, list[Result]]:
    """Return the results of each contender for all items, in the order of the items; see `turns`."""
    results: dict[str, list[Result]] = {name: [] for name in contenders}
    for so_far in turns(contenders, items, warm_up):
        results = so_far
    return results


def turns(
    contenders: Mapping[str, Callable[[Item], Result]],
    items: Sequence[Item],
    warm_up: Sequence[Item] | None = None,
) -> Iterator[dict[str, list[Result]]]:
    """Run every contender on one item before the next item begins. The order of the contenders rotates.

    Yields all results so far, by contender, after each item.

    Args:
        warm_up: items that run first and do not count; None for the first item.
    """
    order = list(contenders)
    results: dict[str, list[Result]] = {name: [] for name in order}
    with quick_garbage_collections():
        for item in items[:1] if warm_up is None else warm_up:
            for contender in contenders.values():
                contender(item)
        for index, item in enumerate(items):
            for name in order[index % len(order) :] + order[: index % len(order)]:
                results[name].append(contenders[name](item))
            yield results


def hugging_face(pair: Pair, decoding: DecodingSettings) -> dict[str, Callable[..., float]]:
    """Return Hugging Face's decoders for the pair's weights, by name, as functions that return seconds.

    They decode with batch size 1, the same sampling, and exactly as many tokens as our arms. A function takes a
    question, and further arguments for `generate` such as a streamer. Attention uses the same kernels as in our arms,
    because cuDNN would make a plan for every new length, whose time would count as decoding.
    """
    target, device = pair.target.model, pair.target.input_device
    for loaded in (pair.target, pair.draft):
        if loaded is not None:
            loaded.model.generation_config.eos_token_id = None
            loaded.model.generation_config.pad_token_id = 0
    common: dict[str, Any] = {
        "do_sample": decoding.temperature > 0,
        "max_new_tokens": decoding.max_new_tokens,
    }
    if decoding.temperature > 0:
        common |= {"temperature": decoding.temperature, "top_k": 0}

    def generate(question: Question, **extra: Any) -> float:
        ids = torch.tensor(list(map(list, question.prompts)), device=device)
        mask = torch.ones_like(ids)
        return timed(
            lambda: target.generate(ids, attention_mask=mask, **common, **extra), pair.devices
        )

    def assisted(question: Question, schedule: str, threshold: float, **extra: Any) -> float:
        assert pair.draft is not None
        draft = pair.draft.model
        draft.generation_config.num_assistant_tokens = decoding.num_draft_tokens
        draft.generation_config.num_assistant_tokens_schedule = schedule
        draft.generation_config.assistant_confidence_threshold = threshold
        return generate(question, assistant_model=draft, **extra)

    found: dict[str, Callable[..., float]] = {
        "generate": generate,
        "generate, static compiled cache": partial(generate, cache_implementation="static"),
    }
    if pair.draft is not None:
        found["assisted, constant K"] = partial(assisted, schedule="constant", threshold=0.0)
        found["assisted, its own K"] = partial(assisted, schedule="heuristic", threshold=0.4)
    return found


def versions() -> str:
    """The number of threads, the versions of libraries and the machine, for a table's title."""
    found = environment_columns()
    return (
        f"{torch.get_num_threads()} threads, torch {found['torch_version']},"
        f" transformers {found['transformers_version']}, {cpu_name() or platform.machine()}"
    )


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Interval:
    """The ratio of total times, with its interval."""
    return ratio_of_totals([numerators], [denominators])


def bounds(ratio: Interval) -> dict[str, float]:
    """The three numbers of an interval, for a line of JSON. `Interval(**bounds)` makes the interval again."""
    return {"estimate": ratio.estimate, "low": ratio.low, "high": ratio.high}


def interval(ratio: Interval, digits: int = 3) -> str:
    """The bounds of an interval, `2.150 to 2.458`; empty if there was too little data for bounds."""
    return "" if math.isnan(ratio.low) else f"{ratio.low:.{digits}f} to {ratio.high:.{digits}f}"


def table(
    title: str,
    headings: Sequence[str],
    rows: Sequence[Sequence[object]],
    notes: Sequence[str] = (),
    texts: int = 1,
) -> Table:
    """A table. Empty notes are left out.

    Args:
        texts: among this many first columns, those that contain text are aligned left.
    """
    columns = tuple(
        Column(heading, text=index < texts and all(isinstance(row[index], str) for row in rows[:1]))
        for index, heading in enumerate(headings)
    )
    return Table(
        "",
        title,
        columns,
        tuple(TableRow(tuple(row)) for row in rows),
        notes=tuple(filter(None, notes)),
    )


def show(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[object]], notes: Sequence[str] = ()
) -> None:
    """Print a table."""
    print_tables(table(title, headings, rows, notes))


def print_tables(*tables: Table) -> None:
    """Print tables on stdout."""
    print_document(tables, plain_console(130))


def device_name() -> str:
    """The name of the first GPU; without a GPU, that of the CPU."""
    return (
        torch.cuda.get_device_name(0)
        if torch.cuda.is_available()
        else cpu_name() or platform.machine()
    )
