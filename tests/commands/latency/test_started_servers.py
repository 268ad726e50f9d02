"""Servers that the harness starts: from nothing running to a verdict, and no process left, however the run ends."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import signal
import sys
import time
from functools import partial
from pathlib import Path

import pandas as pd
import psutil
import pytest

from composing import composed_line, composing
from forked import begin
from harness.servers import launch
from in_process import Harness, covered, only, results
from processes import wait_for
from wording import mentions

SUPPORT = Path(__file__).parents[2] / "support"
# In a shell's quotes, because a folder of either may have a space in its name.
SERVER = shlex.join([sys.executable, str(SUPPORT / "echo_server.py")])
ECHO = f"{SERVER} --port {{port}}"
STUBBORN = shlex.join([sys.executable, str(SUPPORT / "stubborn_server.py")])
QUICK = ["num_prompts=9", "decoding.max_new_tokens=8", "decoding=greedy", "model=tiny"]
QUICK += ["engine.blocks=0"]
TALKS = ["prompts=./talks.jsonl", "prompts.turns=all", "chat_template=never"]
# By which the harness reads the echo server's command.
KNOWN = f"engine.dialect={SUPPORT / 'echo_dialect.py'}:ECHO"


def behind(*commands: str) -> list[str]:
    """These commands as they are typed, each behind a `--`."""
    return [word for command in commands for word in ["--", *shlex.split(command)]]


def processes_of(mark: str) -> list[psutil.Process]:
    """The processes that have this text in their command."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(mark in part for part in process.info["cmdline"] or ()):
            found.append(process)
    return [process for process in found if process.pid != os.getpid()]


def test_one_command_starts_both_servers_and_ends_them(harness: Harness, tmp_path: Path) -> None:
    """The regular one is the same command without the flag that makes it draft, which may be typed as it has it."""
    mark = str(tmp_path)
    command = f"{SERVER} --mark {mark} --port 1 -k 3"
    asked = [*QUICK, KNOWN, f"draft={mark}"]
    outcome = harness("latency", *asked, *behind(command))
    regular, speculative = results().to_dict("records")
    assert (regular["num_failed"], speculative["num_failed"]) == (0, 0)
    assert speculative["drafted"]
    assert pd.isna(regular["acceptance_rate"])
    assert speculative["mean_proposed"] == 3
    assert pd.isna(speculative["num_draft_tokens"]), "nobody typed K=3"
    assert "3.0 drafted per iteration, " in outcome.stdout
    regular_command, speculative_command = json.loads(speculative["server_command"])
    assert "-k 3" not in regular_command
    assert "-k 3" in speculative_command
    assert "regular: " in outcome.stderr
    directory = Path(regular["directory"])
    logs = [directory / f"{arm}_server.log" for arm in ("regular", "speculative")]
    # Outgoing connections get higher ports, and could have taken it.
    assert all(
        re.search(r"http://127.0.0.1:(1[5-9]|2\d|3[0-2])\d{3}/", log.read_text()) for log in logs
    )
    assert not processes_of(mark)
    assert harness.as_reported(outcome)


def test_names_and_k_are_those_of_the_command(harness: Harness) -> None:
    """Without model= no tokenizer is needed: texts are compared, and the server counts their tokens."""
    quick = [each for each in QUICK if each != "model=tiny"]
    command = f"{SERVER} --mark {{head}} -k {{K}}"
    filled = ["K=3", "vary.head=small", "engine.chat=false"]
    harness("latency", *filled, *quick, KNOWN, *behind(command))
    row = results().iloc[-1]
    assert (row["num_draft_tokens"], row["draft"], row["num_tokens"]) == (3, "small", 72)
    assert row["model"] == "tiny", "as the server calls it"


def test_a_sweep_over_k_of_two_commands_of_any_program_has_its_k(harness: Harness) -> None:
    quick = [each for each in QUICK if each != "model=tiny"] + ["engine.chat=false"]
    commands = behind(ECHO, f"{ECHO} -k {{K}}")
    page, _, _ = harness("latency", "-m", "K=1,3", *quick, *commands).stdout.partition("Next")
    rows = results().query("arm == 'speculative'")
    assert rows["num_draft_tokens"].tolist() == rows["mean_proposed"].tolist() == [1, 3]
    # The step that follows on a busy machine is a command, which holds both.
    names = [line for line in page.splitlines() if "against" in line]
    assert names
    assert "echo_server" not in "".join(names), "the commands differ in K alone"


def test_three_commands_are_a_sweep_against_the_first(harness: Harness) -> None:
    words = behind("first {port}", "second {port}", "third {port}")
    said = harness("latency", *QUICK, *words, code=2).stderr
    assert mentions(said, "2 jobs", "first: no such program")
    with composing():
        engine = composed_line("latency", words).engine
    assert (engine.first_command, engine.start_command) == (
        ("first", "{port}"),
        ("third", "{port}"),
    )


def test_a_sweep_goes_on_past_servers_that_do_not_start(harness: Harness, tmp_path: Path) -> None:
    """Each has a row with the line of its log that says why; any word of the command is swept over."""
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
    echo = f"{shlex.quote(sys.executable)} {fails} --port {{port}} --{{flag}} 0.002"
    flags = ["vary.flag=broken,mark", "engine.blocks=0"]
    harness("latency", "-m", *QUICK, *flags, *behind(echo, f"{echo} -k 3"), code=1)
    rows = results()
    assert list(rows["status"]) == ["failed", "failed", "ok", "ok"]
    reason = rows["error"].dropna().unique()
    assert len(reason) == 1
    assert "exit code 7: RuntimeError: 3 GB are needed, and 2 are free" in reason[0]
    assert rows["measurement"].nunique() == 2


def test_servers_that_do_not_fit_together_take_turns(harness: Harness, tmp_path: Path) -> None:
    """The second finds the memory taken while the first runs; alone it starts. No turn of a conversation has a start of
    its own.
    """
    alone = tmp_path / "alone.py"
    alone.write_text(
        "import fcntl, pathlib, runpy, sys, time\n"
        f"taken = pathlib.Path({str(tmp_path / 'taken')!r})\n"
        # The first one is there before it.
        "while '-k' in sys.argv and not taken.exists(): time.sleep(0.01)\n"
        f"memory = open({str(tmp_path / 'memory')!r}, 'w')\n"
        "try:\n"
        "    fcntl.flock(memory, fcntl.LOCK_EX | fcntl.LOCK_NB)\n"
        "except OSError:\n"
        "    sys.exit('out of memory')\n"
        "taken.open('a').write('.')\n"
        f"runpy.run_path({str(SUPPORT / 'echo_server.py')!r}, run_name='__main__')\n"
    )
    command = f"{shlex.quote(sys.executable)} {alone} --port {{port}}"
    talks = [{"turns": [f"{number} dogs ran.", "They slept."]} for number in range(9)]
    Path("talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    asked = [*QUICK, "engine.blocks=auto", *TALKS]
    outcome = harness("latency", *asked, *behind(command, f"{command} -k 3"))
    assert "it is started once more, alone" in outcome.stderr
    assert covered(results().iloc[-1]["speedup_covers"]) == "4 blocks"
    # Four of each, after one of each to find out.
    assert (tmp_path / "taken").read_text() == 10 * "."
    answers = pd.read_csv(only("latency_prompts.csv"))
    assert answers.groupby(["arm", "turn"]).size().eq(9).all()
    assert harness.as_reported(outcome)
    # Questions of `eval` are asked in as many blocks as the user typed.
    evaluated = [*QUICK, "engine.blocks=2", "batch_size=2", "seeds=[0]"]
    harness("eval", *evaluated, *behind(command, f"{command} -k 3"), code=3)
    assert (tmp_path / "taken").read_text() == 14 * "."
    assert list(results("eval")["num_prompts"]) == 4 * [9]


def test_a_server_that_dies_is_the_reason(harness: Harness, tmp_path: Path) -> None:
    dies = tmp_path / "dies.py"
    dies.write_text(
        "import asyncio, os, sys\n"
        f"sys.path.insert(0, {str(SUPPORT)!r})\n"
        "import echo_server\n"
        "class DyingServer(echo_server.EchoServer):\n"
        "    async def _complete(self, *request):\n"
        "        if len(self.bodies) == 9:\n"
        "            os.write(2, b'Fatal error: out of pages\\n')\n"
        "            os._exit(9)\n"
        "        return await super()._complete(*request)\n"
        "echo_server.EchoServer = DyingServer\n"
        "asyncio.run(echo_server._main())\n"
    )
    slow = ["num_prompts=200", "engine.timeout_s=20"]
    command = f"{shlex.quote(sys.executable)} {dies} --port {{port}} -k 3"
    outcome = harness("latency", *QUICK, *slow, *behind(ECHO, command), code=1)
    assert mentions(outcome.complaint, "the second server ended with exit code 9", "out of pages")
    assert harness.as_reported(outcome)


def give_less_time(guard: Path) -> None:
    """Let servers have half a second, not five, to end by themselves."""
    program = launch._GUARD.read_text(encoding="utf-8")
    assert "_GRACE_S = 5.0" in program
    guard.write_text(program.replace("_GRACE_S = 5.0", "_GRACE_S = 0.5"), encoding="utf-8")
    launch._GUARD = guard


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_is_left_however_the_harness_ends(tmp_path: Path, number: int) -> None:
    """Not of a server that ignores SIGTERM, nor what it has put into a session of its own.

    All other signals have one handler, which tests/cli/test_signals.py tries with each.
    """
    mark = f"{tmp_path}-{number}"
    commands = [f"{STUBBORN} {mark} --port {{port}} --delay 0.02" for _ in range(2)]
    before = partial(give_less_time, tmp_path / "guard.py")
    process = begin("latency", *QUICK, *behind(*commands), cwd=tmp_path, before=before)
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


def test_a_prompt_is_asked_once_where_the_server_remembers_its_answers(harness: Harness) -> None:
    Path("ten.txt").write_text("\n".join(f"{number} + 1 =" for number in range(10)))
    command = f"{SERVER} -k 3 --spec-method pooled"
    quick = ["decoding.max_new_tokens=4", "decoding=greedy", "model=tiny", "engine.blocks=0"]
    quick += ["prompts=./ten.txt", KNOWN]
    # Eight laps of two requests would be 16 prompts.
    harness("latency", *quick, "batch_size=2", *behind(command))
    row = results().iloc[-1]
    assert (row["num_prompts"], row["draft_remembers"]) == (10, True)
