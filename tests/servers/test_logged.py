"""Acceptance from lines of a server's log, where neither its answers nor its counters tell it."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

import pandas as pd
import pytest

from in_process import Harness, results

SUPPORT = Path(__file__).parents[1] / "support"

# It writes what its answers would have told; the harness is to find the same in the log.
SILENT = """
import json, runpy, sys
sys.path.insert(0, {support!r})
import echo_server

def told(event):
    drafts = event.pop("metrics", {{}}).get("speculative_decoding")
    if drafts:
        numbers = drafts["num_accepted_draft_tokens"], drafts["num_draft_tokens"]
        print("\\x1b[32mrequest done\\x1b[0m: kept %d of %d drafted" % numbers, flush=True)
        with open({truth!r}, "a") as truth:
            truth.write(json.dumps(numbers) + "\\n")
    return event

class Silent(echo_server.EchoServer):
    def __init__(self, **more):
        super().__init__(**more, twist=told)

echo_server.EchoServer = Silent
echo_server.asyncio.run(echo_server._main())
"""
DIALECT = """
import dataclasses
from echo_dialect import ECHO

LOGS = dataclasses.replace(ECHO, name="logs", logs=r"kept (?P<accepted>\\d+) of (?P<proposed>\\d+) drafted")
"""


def test_a_server_that_tells_it_in_its_log_alone(harness: Harness, tmp_path: Path) -> None:
    truth = tmp_path / "truth"
    program = tmp_path / "silent.py"
    program.write_text(SILENT.format(support=str(SUPPORT), truth=str(truth)))
    (tmp_path / "logs.py").write_text(DIALECT)
    command = f"{sys.executable} {program} --port {{port}}"
    words = ["num_prompts=4", "tokens=9", "decoding=greedy", "model=tiny", "engine.blocks=0"]
    words += [f"engine.dialect={tmp_path / 'logs.py'}:LOGS", "--", *shlex.split(command)]
    harness("latency", *words, "--", *shlex.split(f"{command} -k 4"), code=None)
    regular, speculative = results().to_dict("records")
    # Of the four answers; what was asked before them found out how to ask.
    told = [json.loads(line) for line in truth.read_text().splitlines()][-4:]
    accepted, proposed = map(sum, zip(*told, strict=True))
    assert speculative["acceptance_source"] == "metrics"
    assert speculative["acceptance_rate"] == pytest.approx(accepted / proposed, abs=1e-9)
    # Iterations of three, three and two tokens, behind the first one.
    assert speculative["tokens_per_iteration"] == pytest.approx(8 / 3, abs=1e-9)
    assert pd.isna(regular["acceptance_rate"])
