"""The tools that `peers.py` compares, `harness` among them: their environments, commands and results."""

from __future__ import annotations

import functools
import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

import harness
from recipes.tiny_gguf import SHIPPED

PROMPTS = Path(harness.__file__).parent / "measuring" / "prompts" / "prompt_sets" / "tiny.jsonl"
NUM_PROMPTS = 12
NUM_TOKENS = 64
ARMS = ("regular", "speculative")


class Server(NamedTuple):
    """A server.

    Attributes:
        url: its address.
        answered: returns, for each request of 64 tokens so far, the milliseconds to the first token, and those from the
            first to the last.
    """

    url: str
    answered: Callable[[], list[tuple[float, float]]]


@dataclass
class Tool:
    """A tool, its command and its answers.

    Attributes:
        pip: the arguments of each call of `pip install` that makes its environment; () for harness.
        command: the command, with the address of one server, `{url}`, or of both, `{regular}` and `{speculative}`.
        with_first: whether its time per token is the whole time of a request divided by its tokens; if not, the first
            token is left out.
        read: reads the milliseconds per token from the directory in which the tool ran: for one arm, or for both.
        answers: for each round and `kind` of servers, the milliseconds per token of both arms, printed and true.
        said: for each trouble, the line of the tool's output about it.
        output: the output of the last run.
    """

    name: str
    pip: Sequence[str]
    command: str
    with_first: bool
    read: Callable[[Path], list[float]]
    answers: list[dict[str, Any]] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    output: str = ""

    @property
    def asks_both(self) -> bool:
        return "{url}" not in self.command

    def true_ms(self, server: Server) -> float:
        """The milliseconds per token by the server's own times, over the last `NUM_PROMPTS` requests, because warm-ups
        come before. There are fewer if requests were lost.
        """
        answered = server.answered()[-NUM_PROMPTS:]
        first_ms, rest_ms = map(sum, zip(*answered, strict=True))
        if self.with_first:
            return (first_ms + rest_ms) / len(answered) / NUM_TOKENS
        return rest_ms / len(answered) / (NUM_TOKENS - 1)


def result(place: Path, name: str = "result.json") -> Any:
    return json.loads((place / name).read_text(encoding="utf-8"))


def our_times(place: Path) -> list[float]:
    rows = pd.read_csv(place / "results" / "latency.csv").set_index("arm")
    return [float(rows.ms_per_token[arm]) for arm in ARMS]


TOOLS = (
    Tool(
        "guidellm",
        ["guidellm==0.8.1 torch==2.13.0"],
        "guidellm run --profile kind=synchronous --backend kind=openai_http,target={url},model=tiny,"
        "max_tokens={tokens},request_format=/v1/completions,extras.body.temperature=0,extras.body.ignore_eos=true"
        " --data kind=json_file,path={prompts} --constraint kind=max_requests,count={n} --output kind=console"
        " --output kind=json,path=result.json --disable-console-interactive",
        True,
        lambda place: [
            result(place)["benchmarks"][0]["metrics"]["time_per_output_token_ms"]["successful"][
                "mean"
            ]
        ],
    ),
    Tool(
        "aiperf",
        ["aiperf==0.13.0"],
        "aiperf profile -m tiny -u {url} --endpoint-type completions --streaming --tokenizer {tokenizer} --input-file"
        " {texts} --custom-dataset-type single_turn --request-count {n} --concurrency 1 --use-legacy-max-tokens"
        " --use-server-token-count --extra-inputs temperature:0 ignore_eos:true --ui none --artifact-dir .",
        False,
        lambda place: [result(place, "profile_export_aiperf.json")["inter_token_latency"]["avg"]],
    ),
    Tool(
        "llama-benchy",
        ["llama-benchy==0.4.0"],
        "llama-benchy --base-url {url}/v1 --model tiny --tokenizer {tokenizer} --book-url {book} --pp 32 --tg {tokens}"
        " --exact-tg --runs {n} --no-cache --skip-coherence --extra-body temperature=0",
        False,
        lambda place: [
            1000 / float(re.findall(r"tg64 +\| +([\d.]+)", (place / "output.txt").read_text())[0])
        ],
    ),
    # Only vLLM's client is used. Most of vLLM's dependencies are for GPUs, so only those that the client imports are
    # installed.
    Tool(
        "vllm",
        [
            "torch==2.13.0 fastapi<0.137 transformers<5.20 llguidance<1.8 xgrammar==0.2.8 aiohttp blake3 cachetools"
            " cbor2 cloudpickle einops msgspec openai openai-harmony oss-harmony pandas partial-json-parser pillow"
            " psutil prometheus_client py-cpuinfo pybase64 pyyaml pyzmq regex requests uvloop uvicorn watchfiles",
            "--no-deps vllm==0.32.0",
        ],
        "vllm bench serve --backend openai --base-url {url} --model tiny --tokenizer {tokenizer} --dataset-name custom"
        " --dataset-path {prompts} --disable-shuffle --skip-chat-template --custom-output-len {tokens} --ignore-eos"
        " --temperature 0 --num-prompts {n} --max-concurrency 1 --save-result --result-filename result.json",
        False,
        lambda place: [result(place)["mean_tpot_ms"]],
    ),
    Tool(
        "harness",
        [],
        "harness latency url={speculative}/v1 regular_url={regular}/v1 prompts={prompts} num_prompts={n}"
        " tokens={tokens} chat=false temperature=0",
        True,
        our_times,
    ),
)


def write_questions(work: Path) -> dict[str, object]:
    """Write the prompts into files, in the form that each tool reads.

    Returns:
        The values for the names in braces in commands.
    """
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["prompt"] for line in lines]
    plain = [{"text": text, "output_length": NUM_TOKENS} for text in texts[:NUM_PROMPTS]]
    (work / "prompts.jsonl").write_text("\n".join(lines[:NUM_PROMPTS]) + "\n", encoding="utf-8")
    (work / "texts.jsonl").write_text("\n".join(map(json.dumps, plain)) + "\n", encoding="utf-8")
    # llama-benchy downloads a book, and takes its prompts from this book.
    (work / "book").mkdir()
    (work / "book" / "book.txt").write_text("\n".join(texts), encoding="utf-8")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=work / "book")
    library = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=library.serve_forever, daemon=True).start()
    return {
        "prompts": work / "prompts.jsonl",
        "texts": work / "texts.jsonl",
        "book": f"http://127.0.0.1:{library.server_port}/book.txt",
        "tokenizer": SHIPPED / "tiny",
        "n": NUM_PROMPTS,
        "tokens": NUM_TOKENS,
    }


def install(tool: Tool, environments: Path) -> None:
    """Make the environment of a tool, unless it exists or the tool needs none."""
    if not tool.pip or (environments / tool.name).exists():
        return
    subprocess.run([sys.executable, "-m", "venv", environments / tool.name], check=True)
    for arguments in tool.pip:
        python = environments / tool.name / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", *arguments.split()], check=True)
