"""The other tools and `harness`: one question, the same servers, and each answer beside the servers' own times.

    python benchmarks/peers.py PROGRAM                       # a llama-server
    python benchmarks/peers.py PROGRAM --rounds 4 --environments DIR --tools guidellm,harness

The question: how much faster are 12 prompts of 64 tokens, greedy and one at a time, with a draft? guidellm, AIPerf,
llama-benchy and `vllm bench serve` measure one server each time, and their user divides; `harness latency` measures
both. In every round each tool gets two fresh llama-servers with the tiny pair, then two servers whose times are sleeps
(`tests/support/echo_server.py`). Tools and arms come in the reverse order in every second round.

Of a llama-server the truth is its log of the requests that count, of the others the times that they noted, by the
tool's own definition: all of a request over its tokens, or without the first one. What a tool says of a busy machine,
warm caches, unlike prompts and a server that drafts nothing is the first line of its output that a pattern of `SAYS`
finds where that trouble was made. Each tool is in an environment of its own, made here with pip. About half an hour
for two rounds on two cores.
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
# What is looked for in a tool's output where that trouble was made; of the interval in any.
SAYS = {
    "interval": r"\d ?± ?\d|% interval|confidence interval",
    "busy machine": r"quiet|busy|bottleneck|too long to run",
    "warm caches": r"prompt cache|from (a|the) cache|caches cold|cache hit",
    "unlike prompts": r"(prompt|input|template).*(differ|unlike|other|another|mismatch)|different.*prompt",
    "drafts nothing": r"drafted nothing|no draft|accept",
}


@contextmanager
def llama_server(command: Sequence[str], log: Path) -> Iterator[Server]:
    """A llama-server that answers, with its log as the truth."""
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
    """It also answers without a stream, as some tools ask before they measure."""

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
    """A server of known times: 20 ms, then 8 ms for a token, or 10 ms for an iteration with three draft tokens."""
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
    """Processes that compute without end."""
    running = [subprocess.Popen([sys.executable, "-c", "while 1: pass"]) for _ in range(number)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@dataclass
class Bench:
    """Where everything is, and the words that commands are filled with."""

    work: Path
    environments: Path
    real: Sequence[Sequence[str]]
    words: Mapping[str, object]

    def servers(self, stack: ExitStack, kind: str, **change: Any) -> list[Server]:
        """Two fresh ones, without and with a draft; of known ones the second may be changed."""
        if kind == "known":
            plain, drafting = ({"delay_s": 0.008}, {"delay_s": 0.01, "drafts": DRAFTS, **change})
            return [stack.enter_context(known_server(**each)) for each in (plain, drafting)]
        made = []
        for command in self.real:
            log = Path(tempfile.mkdtemp(dir=self.work)) / "server.log"
            made.append(stack.enter_context(llama_server(command, log)))
        return made

    def run(self, tool: Tool, servers: Sequence[Server], arms: Sequence[str] = ARMS) -> list[Path]:
        """Ask both servers, the arms in this order; returns where the tool ran, and keeps its output."""
        urls = {arm: server.url for arm, server in zip(ARMS, servers, strict=True)}
        # A setting of the hub's library, such as to be offline, changes how tokenizers are found.
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
        """One answer of a tool, kept with its times and the servers' own."""
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
        """Ask servers with a trouble, and keep what the tool says of it."""
        self.run(tool, servers)
        (self.work / f"{tool.name}, {name}.txt").write_text(tool.output, encoding="utf-8")
        tool.said[name] = says(name, tool.output, otherwise)


def says(trouble: str, output: str, otherwise: str = "") -> str:
    """The first line about it, and whether the tool has the same line without that trouble."""
    usual = {re.sub(r"[\d.]+", "", line) for line in otherwise.splitlines()}
    for line in output.splitlines():
        if re.search(SAYS[trouble], line, re.IGNORECASE):
            text = " ".join(re.sub(r"[│|╭╰╮╯━┃]+", " ", line).split())[:110]
            return f"“{text}”{' (always)' if re.sub(r'[0-9.]+', '', line) in usual else ''}"
    return "nothing"


def percents(values: pd.Series[Any]) -> str:
    """`+0.5 to +1.2 %`."""
    ends = dict.fromkeys(f"{100 * value:+.1f}" for value in (values.min(), values.max()))
    return f"{' to '.join(ends)} %"


def print_row(cells: Iterable[str]) -> None:
    print(f"| {' | '.join(cells)} |")


def print_tables(tools: Sequence[Tool]) -> None:
    """In Markdown: the figures, then what each tool says. An error of a real speed-up is from that of the logs of all
    tools with the same definition, in all rounds together.
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
