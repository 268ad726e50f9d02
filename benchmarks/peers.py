"""Compares other tools and `harness`: each answers one question about the same servers, and its answers are compared
with the servers' own times.

    python benchmarks/peers.py PROGRAM                       # a llama-server
    python benchmarks/peers.py PROGRAM --rounds 4 --environments DIR --tools guidellm,harness

The question: how much faster are 12 prompts of 64 tokens, greedy and one at a time, with a draft? guidellm, AIPerf,
llama-benchy and `vllm bench serve` measure one server at a time, and their user divides the results; `harness latency`
measures both servers. In every round each tool gets two fresh llama-servers with the tiny pair, and then two servers
whose times are sleeps and so are known (`tests/support/echo_server.py`). In every second round, the order of tools and
arms is reversed.

The true times of a llama-server are in its log; the other servers record theirs. They are computed by the tool's own
definition: the whole time of a request divided by its tokens, or the same without the first token.

Then each tool measures servers with a trouble: a busy machine, warm caches, different prompts, and a server that drafts
nothing. The first line of its output that matches a pattern in `SAYS` is printed. Each tool is in its own environment,
which is made with pip. Two rounds take about half an hour on two cores.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from peer_tools import ARMS, NUM_PROMPTS, NUM_TOKENS, TOOLS, Server, Tool, install, write_questions

from harness.config.machine import cpu_name
from recipes.tiny_gguf import write_pair

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from echo_server import EchoServer, serving

ROOT = Path(__file__).parents[1]
# Drafted and accepted tokens of the known server's iterations.
DRAFTS = ((3, 0), (3, 3), (3, 1), (3, 2))
# For each trouble, a pattern that is searched in the output of a tool that measured a server with this trouble. The
# pattern `interval` is searched in its output without a trouble.
SAYS = {
    "interval": r"\d ?± ?\d|% interval|confidence interval",
    "busy machine": r"quiet|busy|bottleneck|too long to run",
    "warm caches": r"prompt cache|from (a|the) cache|caches cold|cache hit",
    "unlike prompts": r"(prompt|input|template).*(differ|unlike|other|another|mismatch)|different.*prompt",
    "drafts nothing": r"drafted nothing|no draft|accept",
}


@contextmanager
def llama_server(command: Sequence[str], log: Path) -> Iterator[Server]:
    """Run a llama-server within the block. Its true times come from its log."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"http://127.0.0.1:{free.getsockname()[1]}"

    def answered() -> list[tuple[float, float]]:
        pattern = r"prompt eval time = +([\d.]+) ms.*\n.*eval time = +([\d.]+) ms / +(\d+) tokens"
        found = re.findall(pattern, log.read_text(encoding="utf-8", errors="replace"))
        return [(float(first), float(rest)) for first, rest, n in found if int(n) == NUM_TOKENS]

    with log.open("w") as file:
        process = subprocess.Popen(
            [*command, "--port", url.rpartition(":")[2]], stdout=file, stderr=subprocess.STDOUT
        )
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"{url}/health"):
                    break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.1)
        yield Server(url, answered)
    finally:
        process.kill()
        process.wait()


class KnownServer(EchoServer):
    """An echo server that also answers requests without a stream, which some tools send before they measure."""

    async def _complete(self, body: dict[str, Any], *streams: Any) -> bool:
        if body.get("stream"):
            return await super()._complete(body, *streams)
        chunks = [chunk async for chunk in self._chunks(body) if chunk]
        choices = [choice for chunk in chunks for choice in chunk["choices"]]
        texts = [choice.get("text") or choice["delta"]["content"] for choice in choices]
        message = {"role": "assistant", "content": "".join(texts)}
        choice = {"index": 0, "text": message["content"], "message": message}
        whole = {**chunks[-1], "choices": [choice | {"finish_reason": "length"}]}
        self._send(streams[-1], 200, whole)
        return True


@contextmanager
def known_server(**settings: Any) -> Iterator[Server]:
    """Run a server with known times: 20 ms to the first token, and then as the settings say (see `Bench.servers`)."""
    known = KnownServer(
        metrics=True, drafts_until="end", slots=1, first_s=0.02, **{"num_read": 30, **settings}
    )

    def answered() -> list[tuple[float, float]]:
        times = [noted.seconds for noted in known.noted if noted.num_tokens == NUM_TOKENS]
        return [(1000 * seconds[0], 1000 * (seconds[-1] - seconds[0])) for seconds in times]

    with serving(known) as url:
        yield Server(url.removesuffix("/v1"), answered)


@contextmanager
def burners(number: int) -> Iterator[None]:
    """Run processes that compute without end, within the block."""
    running = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@dataclass
class Bench:
    """Directories, commands of llama-servers, and values for the names in braces in the tools' commands."""

    work: Path
    environments: Path
    real: Sequence[Sequence[str]]
    words: Mapping[str, object]

    def servers(self, stack: ExitStack, kind: str, **change: Any) -> list[Server]:
        """Start two servers, without and with a draft.

        Args:
            kind: `real` for llama-servers; `known` for servers that take 8 ms for a token, or 10 ms for an iteration
                with three draft tokens.
            change: other settings for the second server of kind `known`.
        """
        if kind == "known":
            plain, drafting = ({"delay_s": 0.008}, {"delay_s": 0.01, "drafts": DRAFTS, **change})
            return [stack.enter_context(known_server(**each)) for each in (plain, drafting)]
        made = []
        for command in self.real:
            log = Path(tempfile.mkdtemp(dir=self.work)) / "server.log"
            made.append(stack.enter_context(llama_server(command, log)))
        return made

    def run(self, tool: Tool, servers: Sequence[Server], arms: Sequence[str] = ARMS) -> list[Path]:
        """Let a tool measure both servers, the arms in this order. Return the directories in which it ran.

        The tool's output is then in `tool.output`.
        """
        urls = {arm: server.url for arm, server in zip(ARMS, servers, strict=True)}
        # Settings of the hub's library are removed, because HF_HUB_OFFLINE changes how tools find tokenizers.
        inherited = {name: text for name, text in os.environ.items() if not name.startswith("HF_")}
        environment = inherited | {"HOME": str(self.work), "COLUMNS": "160", "PYTHONPATH": ""}
        program = [str(self.environments / tool.name / "bin" / tool.name)]
        if not tool.pip:
            environment["PYTHONPATH"] = str(ROOT)
            program = [sys.executable, "-m", "harness"]
        places = []
        tool.output = ""
        for arm in arms[:1] if tool.asks_both else arms:
            place = Path(tempfile.mkdtemp(dir=self.work))
            words = shlex.split(tool.command.format(url=urls[arm], **urls, **self.words))[1:]
            process = subprocess.run(
                [*program, *words], cwd=place, env=environment, capture_output=True, text=True
            )
            (place / "output.txt").write_text(process.stdout, encoding="utf-8")
            tool.output += process.stdout + process.stderr
            places.append(place)
        return places

    def ask(self, tool: Tool, kind: str, servers: Sequence[Server], arms: Sequence[str]) -> None:
        """Let a tool measure both servers, and add the printed and the true times to its answers."""
        began = time.perf_counter()
        places = self.run(tool, servers, arms)
        minutes = (time.perf_counter() - began) / 60
        try:
            values = [value for place in places for value in tool.read(place)]
            printed = dict(zip(ARMS if tool.asks_both else arms, values, strict=True))
            true = {
                f"true_{arm}": tool.true_ms(each) for arm, each in zip(ARMS, servers, strict=True)
            }
        except (LookupError, OSError, ValueError) as error:
            print(f"{kind} {tool.name}: {error!r}; {tool.output[-500:]}", flush=True)
            return
        lost = [max(0, NUM_PROMPTS - len(server.answered())) for server in servers]
        about = {"kind": kind, "minutes": minutes, "lost": sum(lost)}
        tool.answers.append({**about, **printed, **true})
        print(tool.name, tool.answers[-1], flush=True)

    def trouble(self, tool: Tool, name: str, servers: Sequence[Server], otherwise: str) -> None:
        """Let a tool measure servers with a trouble, and keep the line of its output about it.

        Args:
            name: the trouble, a key of `SAYS`.
            otherwise: the tool's output without the trouble.
        """
        self.run(tool, servers)
        (self.work / f"{tool.name}, {name}.txt").write_text(tool.output, encoding="utf-8")
        tool.said[name] = says(name, tool.output, otherwise)


def says(trouble: str, output: str, otherwise: str = "") -> str:
    """The first line of an output about a trouble, with `(always)` if the tool also prints this line without the
    trouble; `nothing` if there is none.
    """
    usual = {re.sub(r"[\d.]+", "", line) for line in otherwise.splitlines()}
    for line in output.splitlines():
        if re.search(SAYS[trouble], line, re.IGNORECASE):
            text = " ".join(re.sub(r"[│|╭╰╮╯━┃]+", " ", line).split())[:110]
            return f"“{text}”{' (always)' if re.sub(r'[0-9.]+', '', line) in usual else ''}"
    return "nothing"


def percents(values: pd.Series[Any]) -> str:
    """The range of the values: `+0.5 to +1.2 %`."""
    ends = dict.fromkeys(f"{100 * value:+.1f}" for value in (values.min(), values.max()))
    return f"{' to '.join(ends)} %"


def print_row(cells: Iterable[str]) -> None:
    print(f"| {' | '.join(cells)} |")


def print_tables(tools: Sequence[Tool]) -> None:
    """Print two tables in Markdown: the figures, and the lines about troubles.

    The error of a speed-up on llama-servers is relative to the true speed-up over all rounds, of all tools that define
    the time per token in the same way.
    """
    frames = []
    for tool in tools:
        about = {"tool": tool.name, "with_first": tool.with_first}
        frames.append(pd.DataFrame(tool.answers).assign(**about))
    answers = pd.concat(frames)
    for column in ("", "true_"):
        ratio = answers[f"{column}regular"] / answers[f"{column}speculative"]
        answers[f"{column}speedup"] = ratio
    for column in (*ARMS, "speedup"):
        answers[f"{column}_error"] = answers[column] / answers[f"true_{column}"] - 1
    headings = ["tool", "commands", "minutes", "time of a token", "ms", "error", "known server"]
    headings += ["speed-up by round", "error", "known server"]
    print_row(headings)
    print_row(["---"] * len(headings))
    for tool in tools:
        real, known = (
            answers[(answers.tool == tool.name) & (answers.kind == kind)]
            for kind in ("real", "known")
        )
        if real.empty or known.empty:
            print_row([tool.name, "no answer"])
            continue
        alike = answers[(answers.with_first == tool.with_first) & (answers.kind == "real")]
        pooled = alike.true_regular.sum() / alike.true_speculative.sum()
        cells = [tool.name, "1" if tool.asks_both else "2, divide", f"{real.minutes.mean():.1f}"]
        cells += ["all" if tool.with_first else "after the first"]
        lost = f" ({real.lost.sum()} of {len(real) * 2 * NUM_PROMPTS} requests lost)"
        times = " / ".join(f"{real[arm].mean():.2f}" for arm in ARMS)
        cells += [times + (lost if real.lost.any() else "")]
        for rows in (real, known):
            cells += [" / ".join(percents(rows[f"{arm}_error"]) for arm in ARMS)]
        cells += [", ".join(f"{speedup:.2f}" for speedup in real.speedup)]
        cells += [percents(real.speedup / pooled - 1), percents(known.speedup_error)]
        print_row(cells)
    print()
    print_row(["tool", *SAYS])
    print_row(["---"] * (1 + len(SAYS)))
    for tool in tools:
        print_row([tool.name, *(tool.said[trouble] for trouble in SAYS)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("program", help="a llama-server")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--environments", type=Path, default=Path("peers"))
    parser.add_argument("--tools", default=",".join(tool.name for tool in TOOLS))
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="peers-"))
    write_pair(work)
    plain = [options.program, "-m", f"{work}/tiny.gguf", "-np", "1", "-c", "512", "-t", "1"]
    draft = [
        "-md",
        f"{work}/tiny_draft.gguf",
        "--spec-type",
        "draft-simple",
        "--spec-draft-n-max",
        "4",
    ]
    environments = options.environments.resolve()
    bench = Bench(work, environments, (plain, [*plain, *draft]), write_questions(work))
    tools = [tool for tool in TOOLS if tool.name in options.tools.split(",")]
    for tool in tools:
        install(tool, environments)
    print(f"{os.cpu_count()} cores of {cpu_name()}, load {os.getloadavg()[0]:.1f}", flush=True)
    for number in range(options.rounds):
        turn = -1 if number % 2 else 1
        for tool in tools[::turn]:
            for kind in ("real", "known"):
                with ExitStack() as stack:
                    bench.ask(tool, kind, bench.servers(stack, kind), ARMS[::turn])
    for tool in tools:
        with ExitStack() as stack:
            servers = bench.servers(stack, "real")
            bench.run(tool, servers)
            usual = tool.output
            (work / f"{tool.name}.txt").write_text(usual, encoding="utf-8")
            tool.said["interval"] = says("interval", usual)
            bench.trouble(tool, "warm caches", servers, usual)
            with burners(os.cpu_count() or 1):
                bench.trouble(tool, "busy machine", servers, usual)
        with ExitStack() as stack:
            bench.run(tool, bench.servers(stack, "known"))
            usual = tool.output
        with ExitStack() as stack:
            bench.trouble(tool, "unlike prompts", bench.servers(stack, "known", num_read=90), usual)
        with ExitStack() as stack:
            idle = bench.servers(stack, "known", drafts=[(0, 0)])
            bench.trouble(tool, "drafts nothing", idle, usual)
    print(f"load {os.getloadavg()[0]:.1f} at the end; all output: {work}/*.txt\n")
    print_tables(tools)


if __name__ == "__main__":
    main()
