"""Random hostile inputs: servers that lie, draft heads, and files for a report, each damaged somewhere."""

from __future__ import annotations

import copy
import csv
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from echo_server import EchoServer
from report_files import eval_run, latency_run, prompt_rows, write

SHIPPED = Path(__file__).parents[2] / "harness/local/models/shipped"
HEADS = ("tiny_eagle3", "tiny_medusa", "tiny_dflash")
VALUES: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 0.5, -7.5, 1e30, 1e308, float("nan"), float("inf"), 10**9, 10**30,
    "", "7", "text", "漢", "\x1b[2J\x1b]0;title\x07", "\u202e", "=1+1", "x" * 100_000, "../../x", "\ud800",
    [], [1], [-1, 0.5], [None], ["x", {}], [[[1]]], [10**9] * 3, {}, {"a": 1}, {"": None}, {"a": {"b": [1]}},
]  # fmt: skip
CELLS = [
    "", "fast", "-7", "0", "1e300", "nan", "inf", "true", "[", "[]", "{}", "[1, null]", "[-1, 1e300]", '["x", {}]',
    '{"a": {"b": [1]}}', "[" * 100_000, "漢", "\x1b[2J", "=1+1", "<script>", "[a](javascript:b)", "x" * 10_000,
    "regular", "speculative", "ok", "failed", "all", "2", "0.5", "2026-11-20T10:00:00+00:00",
]  # fmt: skip


def damaged(value: Any, rng: random.Random, count: int = 1) -> Any:
    """A copy of a JSON value with so many places changed, removed or added."""
    value = copy.deepcopy(value)
    for _ in range(count):
        places = [(holder, key) for holder in _holders(value) for key in _keys(holder)]
        if not places:
            return rng.choice(VALUES)
        holder, key = rng.choice(places)
        action = rng.random()
        if action < 0.15:
            del holder[key]
        elif action < 0.25 and isinstance(holder, list):
            holder.append(holder[key])
        else:
            holder[key] = _other(holder[key], rng)
    return value


def _holders(value: Any) -> list[Any]:
    """All dictionaries and lists in a JSON value, itself included."""
    if not isinstance(value, dict | list):
        return []
    inner = value.values() if isinstance(value, dict) else value
    return [value, *(holder for item in inner for holder in _holders(item))]


def _keys(holder: Any) -> list[Any]:
    return list(holder) if isinstance(holder, dict) else list(range(len(holder)))


def _other(value: Any, rng: random.Random) -> Any:
    """Another value: a near one where it is a number, else any."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number and rng.random() < 0.4:
        return rng.choice([-value, value + 1, value - 1, value * 10, value / 2, str(value)])
    return rng.choice(VALUES)


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    """A file that is cut off, empty, or has other bytes in one place."""
    place = rng.randrange(len(content) + 1)
    noise = bytes(rng.randrange(256) for _ in range(rng.choice([1, 8, 100])))
    return rng.choice(
        [b"", content[:place], content[:place] + noise + content[place + len(noise) :]]
    )


def lying_server(rng: random.Random) -> EchoServer:
    """A server whose events or connections go wrong, always or now and then."""
    server = EchoServer(
        dialect=rng.choice(["vllm", "vllm_histogram", "sglang", "llama.cpp", "openai"]),
        num_draft_tokens=rng.choice([None, 1, 4]),
        version=rng.choice([None, "1.0", "\x1b[2J", "x" * 100_000]),
    )
    server.error_text = rng.choice(
        ["no", "\x1b[2J" + "\u202eno\n" * 50_000, "", "[bold]x[/nothing]"]
    )
    every = rng.choice([2, 3, 7])
    for name, value in (
        ("fail_every", every), ("break_every", every), ("die_after", rng.randint(1, 9)),
        ("stop_after", rng.randint(0, 4)), ("drop_reused", True),
    ):  # fmt: skip
        if rng.random() < 0.15:
            setattr(server, name, value)
    if rng.random() < 0.7:
        server.twist = _twist(rng)
    return server


def _twist(rng: random.Random) -> Callable[[Any], Any]:
    """A change of events; the first request, which asks how a server is to be used, mostly gets through."""
    share, quiet_events = rng.choice([0.02, 0.2, 1.0]), rng.choice([0, 3, 10])
    kind = rng.choice(["any", "usage", "ids", "text", "more"])
    count = 0

    def twist(event: Any) -> Any:
        nonlocal count
        count += 1
        if not isinstance(event, dict) or count <= quiet_events or rng.random() > share:
            return event
        if kind == "any":
            return damaged(event, rng)
        if kind == "usage":
            return event | {"usage": {"completion_tokens": rng.choice(VALUES)}}
        for choice in event["choices"]:
            if kind == "ids":
                choice["token_ids"] = rng.choice([*VALUES, [10**6], [-1], [0.5], [True], ["a"]])
            elif kind == "text":
                choice["text"] = ""
            else:
                choice["token_ids"] = 9 * choice.get("token_ids", [5])
        return event

    return twist


def write_head(directory: Path, rng: random.Random) -> None:
    """A shipped head whose configuration, index or weights are damaged."""
    shutil.copytree(SHIPPED / rng.choice(HEADS), directory)
    config = directory / "config.json"
    [weights] = directory.glob("*.safetensors")
    part = rng.choice(["config", "config", "config", "config bytes", "index", "weights"])
    if part == "config":
        changed = damaged(json.loads(config.read_text()), rng, rng.choice([1, 1, 2, 4]))
        config.write_text(json.dumps(changed))
    elif part == "index":
        index = {"metadata": {"total_size": 7}, "weight_map": {"fc.weight": weights.name}}
        text = json.dumps(damaged(index, rng)).encode()
        text = damaged_bytes(text, rng) if rng.random() < 0.3 else text
        (directory / "model.safetensors.index.json").write_bytes(text)
    else:
        file = config if part == "config bytes" else weights
        file.write_bytes(damaged_bytes(file.read_bytes(), rng))


def write_results(directory: Path, rng: random.Random) -> None:
    """Files of several runs, one of them damaged in several places."""
    directory.mkdir()
    run = latency_run(2)
    write(
        directory / "latency.csv", run, latency_run(4, batch_size=2), latency_run(status="failed")
    )
    write(directory / "latency_prompts.csv", prompt_rows(run, [("math", 50.0), ("", 80.0)]))
    write(directory / "eval.csv", eval_run())
    file = rng.choice([*directory.glob("*.csv")])
    times = rng.randint(1, 4)
    if rng.random() < 0.2:
        file.write_bytes(damaged_bytes(file.read_bytes(), rng))
    elif file.suffix == ".csv":
        _damage_table(file, rng, times)


def _damage_table(file: Path, rng: random.Random, times: int) -> None:
    """Change cells, columns and lines of a CSV file."""
    rows = list(csv.reader(file.read_text().splitlines()))
    for _ in range(times):
        row = rng.choice(rows[1:])
        place = rng.randrange(len(row))
        action = rng.random()
        if action < 0.1:
            rows.remove(row)
            rows.insert(1, row[:place])
        elif action < 0.2:
            for each in rows:
                del each[place : place + 1]
        else:
            row[place] = rng.choice(CELLS)
    with file.open("w", newline="") as stream:
        csv.writer(stream).writerows(rows)
