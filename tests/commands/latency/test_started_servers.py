"""Servers that the harness starts: from nothing running to a verdict, and no process left, however the run ends."""

from __future__ import annotations

import math
import os
import random
import re
import shutil
import signal
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from forked import begin
from in_process import Harness, results
from processes import wait_for
from wording import mentions

SUPPORT = Path(__file__).parents[2] / "support"
SHIPPED = Path(__file__).parents[3] / "harness" / "models" / "shipped"
ECHO = f"{sys.executable} {SUPPORT / 'echo_server.py'} --port {{port}}"
STUBBORN = f"{sys.executable} {SUPPORT / 'stubborn_server.py'}"
QUICK = ["num_prompts=9", "decoding.max_new_tokens=8", "decoding=greedy"]


def started(regular: str = ECHO, speculative: str = f"{ECHO} -k {{K}}") -> list[str]:
    """The settings that start these commands."""
    commands = {"regular": regular, "speculative": speculative}
    named = [f"engine.start.{arm}='{command}'" for arm, command in commands.items()]
    return ["engine=server", *named]


def processes_of(mark: str) -> list[psutil.Process]:
    """The processes that have this text in their command."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def test_both_servers_are_started_compared_and_ended(harness: Harness, tmp_path: Path) -> None:
    mark = str(tmp_path)
    commands = [f"{ECHO} --mark {{directory}}", f"{ECHO} --mark {mark} -k {{K}}"]
    # With any exit code: on a busy machine the speed-up of such short answers may be an impossible one.
    harness("latency", *started(*commands), *QUICK, "K=3", code=None)
    regular, speculative = results().to_dict("records")
    assert (regular["num_failed"], speculative["num_failed"], speculative["drafted"]) == (
        0,
        0,
        True,
    )
    assert speculative["mean_proposed"] == 3
    assert "-k 3" in speculative["server_command"]
    directory = Path(regular["directory"])
    logs = [directory / f"{arm}_server.log" for arm in ("regular", "speculative")]
    # Outgoing connections get higher ports, and could have taken it.
    assert all(
        re.search(r"http://127.0.0.1:(1[5-9]|2\d|3[0-2])\d{3}/", log.read_text()) for log in logs
    )
    assert str(directory) in logs[0].read_text()
    assert not processes_of(mark)


def test_a_sweep_goes_on_past_servers_that_do_not_start(harness: Harness, tmp_path: Path) -> None:
    """Each has a row with the line of its log that says why; flags are swept over."""
    fails = tmp_path / "fails.py"
    fails.write_text(
        "import sys, runpy\n"
        "if '--broken' in sys.argv:\n"
        "    print('loading', flush=True)\n"
        "    print('RuntimeError: 3 GB are needed, and 2 are free', file=sys.stderr)\n"
        "    print('(APIServer pid=7)     raise RuntimeError(')\n"
        "    print('Engine core initialization failed. See root cause above.')\n"
        "    sys.exit(7)\n"
        f"runpy.run_path({str(SUPPORT / 'echo_server.py')!r}, run_name='__main__')\n"
    )
    echo = f"{sys.executable} {fails} --port {{port}}"
    flags = "engine.flags=[],[--broken],[--delay,0.002]"
    outcome = harness("latency", "-m", *started(echo, f"{echo} -k {{K}}"), *QUICK, flags, code=1)
    rows = results()
    assert list(rows["status"]) == ["ok", "ok", "failed", "failed", "ok", "ok"]
    reason = rows["error"].dropna().unique()
    assert len(reason) == 1
    assert "exit code 7: RuntimeError: 3 GB are needed, and 2 are free" in reason[0]
    assert rows["measurement"].nunique() == 3
    # In a cell of a table, whose lines break anywhere.
    assert "3 GB are needed" in " ".join(outcome.stdout.replace("│", " ").split())


def test_a_program_that_does_not_exist_is_refused(harness: Harness) -> None:
    refused = harness.refused("latency", *started("no-such-server {port}"), *QUICK)
    assert mentions(refused, "no-such-server", "no such program")


def test_commands_that_cannot_be_split_are_refused(harness: Harness) -> None:
    refused = harness.refused("latency", *started(f'"{ECHO}'), *QUICK)
    assert mentions(refused, "engine.start.regular")
    assert mentions(refused, "must be a command", "No closing quotation")
    refused = harness.refused("latency", "engine=harness_server", "engine.program='\"x'", *QUICK)
    assert mentions(refused, "engine.program", "must be a command", "No closing quotation")


@pytest.mark.parametrize("setting", ["regular_url", "idle_url", "metrics_url"])
def test_addresses_beside_commands_are_refused(harness: Harness, setting: str) -> None:
    """They were ignored: the server that speculates was measured alone."""
    address = "http://127.0.0.1:9/v1"
    value = f"[{address}]" if setting == "metrics_url" else address
    refused = harness.refused("latency", *started(), f"engine.{setting}={value}", *QUICK)
    assert mentions(refused, f"engine.{setting}", "not beside engine.start")


def test_started_servers_are_asked_for_the_models_that_are_named(
    harness: Harness, tmp_path: Path
) -> None:
    names = ["engine.model=tiny_draft", "engine.regular_model=tiny"]
    harness("latency", *started(), *QUICK, "K=3", *names, code=None)
    assert set(results()["served_model"]) == {"tiny; tiny_draft"}
    copy = shutil.copytree(SHIPPED / "tiny", tmp_path / "other")
    refused = harness.refused("latency", *started(), *QUICK, f"model={copy}")
    assert mentions(refused, "engine.model: must name a model", "engine.start.regular=")
    assert refused.rstrip().endswith("other: engine.model=tiny")


def test_blocks_start_each_server_afresh_in_turns(harness: Harness) -> None:
    """An interval takes two blocks, and is over them."""
    outcome = harness("latency", *started(), *QUICK, "engine.blocks=3")
    assert mentions(outcome.stderr, "engine.blocks=3", "6 starts")
    regular, speculative = results().to_dict("records")
    assert speculative["speedup_covers"] == "3 blocks"
    assert speculative["speedup_low"] < speculative["speedup"] < speculative["speedup_high"]
    directory = Path(regular["directory"])
    for arm in ("regular", "speculative"):
        assert (directory / f"{arm}_server.log").read_text().count("$ ") == 3
    # Regular, speculative, speculative, regular, ...: the sixth start is the speculative one's third.
    assert mentions(outcome.summary, "over 3 blocks")
    assert mentions(outcome.summary, "start to start", "over 3 of each server")


def test_the_speed_up_is_its_price_times_its_gain(harness: Harness) -> None:
    """A third server could draft and does not."""
    idle = f"engine.start.idle='{ECHO} --delay 0.004'"
    outcome = harness("latency", *started(), idle, *QUICK, "engine.slo={ttft_ms: 500}")
    regular, speculative = results().to_dict("records")
    assert speculative["tax_low"] < speculative["tax"] < speculative["tax_high"]
    product = speculative["tax"] * speculative["gain"]
    assert product == pytest.approx(speculative["speedup"], rel=1e-6)
    assert speculative["idle_ms_per_token"] > 0
    assert "--delay 0.004" in speculative["server_command"]
    assert "with the draft loaded" in outcome.stdout
    assert mentions(outcome.summary, "undrafted", "by drafting")
    assert set(pd.read_csv(Path(regular["directory"]) / "latency_prompts.csv")["arm"]) == {
        "regular",
        "speculative",
    }


def test_a_price_with_restarts_is_over_blocks(harness: Harness) -> None:
    idle = f"engine.start.idle='{ECHO}'"
    outcome = harness("latency", *started(), idle, *QUICK, "engine.blocks=2")
    assert mentions(outcome.stderr, "engine.blocks=2", "6 starts")
    speculative = results().to_dict("records")[1]
    assert speculative["tax_low"] < speculative["tax"] < speculative["tax_high"]


def test_a_server_that_was_to_draft_nothing_and_drafts_has_no_price(harness: Harness) -> None:
    idle = f"engine.start.idle='{ECHO} -k {{K}}'"
    outcome = harness("latency", *started(), idle, *QUICK)
    speculative = results().to_dict("records")[1]
    assert math.isnan(speculative["tax"])
    assert mentions(speculative["tax_refused"], "was to draft nothing")
    assert mentions(outcome.summary, "was to draft nothing")
    assert speculative["speedup"] > 0


def test_each_server_is_started_in_each_place(harness: Harness, tmp_path: Path) -> None:
    """A place that is slower than the other makes no arm slower, unless the arms keep their places."""
    server = tmp_path / "placed.py"
    server.write_text(
        "import os, runpy, sys\n"
        "print('in', os.environ['PLACE'], flush=True)\n"
        "sys.argv += ['--delay', os.environ['PLACE']]\n"
        f"runpy.run_path({str(SUPPORT / 'echo_server.py')!r}, run_name='__main__')\n"
    )
    command = f"{sys.executable} {server} --port {{port}}"
    commands = started(command, f"{command} -k 3")
    places = ["engine.places=[{PLACE: 0.001},{PLACE: 0.008}]", "engine.blocks=2"]
    outcome = harness("latency", *commands, *QUICK, *places)
    assert mentions(outcome.stderr, "engine.blocks=2", "in each place", "8 starts")
    regular, speculative = results().to_dict("records")
    assert speculative["speedup_covers"] == "2 blocks"
    directory = Path(regular["directory"])
    for arm, in_order in (("regular", "1818"), ("speculative", "8181")):
        log = (directory / f"{arm}_server.log").read_text()
        assert "".join(re.findall(r"in 0\.00(\d)", log)) == in_order
    refused = harness.refused("latency", *commands, *QUICK, places[0], "engine.blocks=0")
    assert mentions(refused, "engine.places", "must be 2", "engine.blocks of 1 or more")


@pytest.mark.parametrize(
    ("settings", "blocks", "stopped_by"),
    [
        (["engine.blocks=6", "precision=99%"], 4, "precision"),
        (["engine.blocks=2", "precision=99%"], 2, "blocks"),
        (["engine.blocks=3", "precision=99%", "budget=0.001s"], 1, "budget"),
    ],
)
def test_a_run_over_blocks_ends_after_a_whole_block(
    harness: Harness,
    monkeypatch: pytest.MonkeyPatch,
    settings: list[str],
    blocks: int,
    stopped_by: str,
) -> None:
    # However noisy the machine is.
    monkeypatch.setattr("harness.commands.latency.measure.is_precise", lambda *_: True)
    outcome = harness("latency", *started(), *QUICK, *settings)
    assert mentions(outcome.stderr, settings[0], "each server is started up to")
    row = results().iloc[-1]
    assert row["stopped_by"] == stopped_by
    assert row["speedup_covers"].startswith(f"{blocks} block")


def test_a_run_over_places_ends_when_every_server_was_in_every_place(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ["engine.places=[{PLACE: 1},{PLACE: 2}]", "engine.blocks=5", "precision=99%"]
    monkeypatch.setattr("harness.commands.latency.measure.is_precise", lambda *_: True)
    harness("latency", *started(), *QUICK, *settings, "num_prompts=10")
    row = results().iloc[-1]
    assert (row["speedup_covers"], row["num_prompts"]) == ("4 blocks", 8)


def test_one_block_has_no_interval(harness: Harness) -> None:
    outcome = harness("latency", *started(), *QUICK, "engine.blocks=1")
    assert "engine.blocks=4" in outcome.stdout
    assert results()["speedup_low"].isna().all()


@pytest.mark.parametrize(
    ("engine", "expected"),
    [
        ("vllm_server engine.tax=true", '"num_speculative_tokens_per_batch_size": [[1, 1, 0]]'),
        ("vllm_server", '"num_speculative_tokens": 3'),
        ("vllm_server", "VLLM_CPU_OMP_THREADS_BIND=nobind"),
        ("sglang_server", "--speculative-algorithm STANDALONE"),
    ],
)
def test_presets_make_commands_from_the_settings_of_the_run(
    harness: Harness, engine: str, expected: str
) -> None:
    """The program is one that takes any option."""
    program = f"{sys.executable} {SUPPORT / 'echo_server.py'}"
    flags = [f"engine.program='{program}'", "engine.flags=[--one]", "engine.blocks=0"]
    harness("latency", *f"engine={engine}".split(), *QUICK, "K=3", *flags)
    command = results()["server_command"][0]
    assert expected in command
    assert "--one" in command


def test_vllms_module_gets_the_model_by_name(harness: Harness) -> None:
    """It ignores one that stands first, and serves its default."""
    program = f"{sys.executable} {SUPPORT / 'echo_server.py'} vllm.entrypoints.openai.api_server"
    asked = ["engine=vllm_server", f"engine.program='{program}'", "engine.blocks=0"]
    harness("latency", *asked, *QUICK)
    assert f"api_server --model {SHIPPED / 'tiny'} --host" in results()["server_command"][0]


def test_another_version_of_a_program_is_another_measurement(
    harness: Harness, tmp_path: Path
) -> None:
    program = tmp_path / "serve"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {SUPPORT / "echo_server.py"} "$@"\n')
    program.chmod(0o755)
    command = f"{program} --port {{port}}"
    settings = ["-m", *started(command, f"{command} -k {{K}}"), *QUICK]
    harness("latency", *settings)
    outcome = harness("latency", *settings)
    assert "measured before" in outcome.stdout + outcome.stderr
    os.utime(program, (1, 1))
    harness("latency", *settings)
    assert results()["measurement"].nunique() == 2


def test_our_own_server_is_started(harness: Harness, tmp_path: Path) -> None:
    """With the model that is set beside a preset, for fewer tokens than its first request asks for, and once more with
    its draft loaded and nothing drafted.
    """
    copy = shutil.copytree(SHIPPED / "tiny", tmp_path / "copy")
    few = ["num_prompts=4", "decoding.max_new_tokens=4", "decoding=greedy", "K=3"]
    price = ["engine.blocks=0", "engine.tax=true"]
    harness("latency", "engine=harness_server", f"model.repository={copy}", *few, *price)
    regular, speculative = results().to_dict("records")
    assert f"model.repository={copy}" in regular["server_command"]
    command = speculative["server_command"]
    assert "draft=none" in command
    assert "decoding.num_draft_tokens=0" in command
    assert speculative["tax"] * speculative["gain"] == pytest.approx(speculative["speedup"])
    assert "draft=tiny_draft" in command
    assert (regular["drafted"], speculative["drafted"]) == (False, True)
    assert speculative["identical_prompts"] == 4


def test_a_price_that_cannot_be_had_is_refused(harness: Harness) -> None:
    refused = harness.refused("latency", "engine=sglang_server", "engine.tax=true", *QUICK)
    assert mentions(refused, "engine.tax", "no way to draft nothing")
    refused = harness.refused("latency", "engine=harness_server", "engine.tax=true", "draft=none")
    assert mentions(refused, "engine.tax", "the price of a draft")
    refused = harness.refused("latency", "K=0")
    assert "decoding.num_draft_tokens=0: must be at least 1" in refused


def test_a_server_that_dies_is_the_reason(harness: Harness, tmp_path: Path) -> None:
    dies = tmp_path / "dies.py"
    dies.write_text(
        f"import os, sys, threading, runpy\n"
        "threading.Timer(1.5, lambda: (os.write(2, b'Fatal error: out of pages\\n'), os._exit(9))).start()\n"
        f"runpy.run_path({str(SUPPORT / 'echo_server.py')!r}, run_name='__main__')\n"
    )
    slow = ["num_prompts=200", "engine.timeout_s=20"]
    command = f"{sys.executable} {dies} --port {{port}} --delay 0.02 -k {{K}}"
    outcome = harness("latency", *started(speculative=command), *QUICK, *slow, code=1)
    assert mentions(
        outcome.complaint, "the speculative server ended with exit code 9", "out of pages"
    )


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_however_the_harness_ends(tmp_path: Path, number: int) -> None:
    """Not of a server that ignores SIGTERM, nor what it has put into a session of its own.

    All other signals have one handler, which tests/cli/test_signals.py tries with each.
    """
    mark = f"{tmp_path}-{number}"
    commands = [f"{STUBBORN} {mark} --port {{port}} --delay 0.05" for _ in range(2)]
    process = begin("latency", *started(*commands), *QUICK, cwd=tmp_path)
    wait_for(process, tmp_path, "outputs/**/latency_prompts.csv")
    # Anywhere in what follows: a request, between two, with both servers or one of them.
    time.sleep(random.random())
    assert len(processes_of(mark)) >= 4
    process.send_signal(number)
    process.wait()
    until = time.monotonic() + 60
    while left := processes_of(mark):
        assert time.monotonic() < until, left
        time.sleep(0.05)
