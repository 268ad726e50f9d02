"""Do predictions hold? What an iteration costs on one prompt set, times what `acceptance` says that others yield,
beside what is measured on those: three drafts × three prompt sets × loads of 1 to 4 in flight, behind `harness serve`
or a llama-server.

    python benchmarks/prediction_coverage.py serve
    python benchmarks/prediction_coverage.py PROGRAM      # a llama-server; three drafts are the tiny one with noise

Of each cell of the second and third set it prints the prediction with its interval, and the measured speed-up of
decoding with its own. *Inside* counts measured speed-ups in predicted intervals, *alike* those whose difference from
the prediction is within both intervals together, in logarithms: a measurement has noise of its own, which no
prediction knows. About 12 minutes for each engine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from transformers import AutoModelForCausalLM

import harness
from recipes.tiny_gguf import SHIPPED, write

SETS = Path(harness.__file__).parent / "measuring" / "prompts" / "prompt_sets"
NUM_PROMPTS = 16
NUM_TOKENS = 48
K = 4
LOADS = (1, 2, 3, 4)
# Of the weights of the draft, relative to their size: three drafts of one cost and three acceptances.
NOISE = (0.0, 0.4, 0.8)


def prompt_sets(directory: Path) -> dict[str, Path]:
    """Stories as the target has learned them, English that it has not, and stories with their words shuffled."""
    texts = {}
    for name in ("tiny", "english"):
        lines = (SETS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts[name] = [json.loads(line)["prompt"] for line in lines]
    rng = random.Random(0)
    shuffled = [" ".join(rng.sample(words, len(words))) for words in map(str.split, texts["tiny"])]
    chosen = {
        "stories": texts["tiny"][:NUM_PROMPTS],
        "english": [" ".join(text.split()[:14]) for text in texts["english"][:NUM_PROMPTS]],
        "shuffled": shuffled[-NUM_PROMPTS:],
    }
    files = {}
    for name, prompts in chosen.items():
        files[name] = directory / f"{name}.jsonl"
        lines = [json.dumps({"prompt": prompt}) for prompt in prompts]
        files[name].write_text("\n".join(lines) + "\n", encoding="utf-8")
    return files


@contextmanager
def serving(command: Sequence[str]) -> Iterator[str]:
    """The address of a server, with `{port}` filled in, once it answers."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    words = [word.replace("{port}", str(port)) for word in command]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    address = f"http://127.0.0.1:{port}"
    try:
        while process.poll() is None:
            try:
                with urllib.request.urlopen(f"{address}/health"):
                    break
            except (urllib.error.URLError, ConnectionError):
                time.sleep(0.2)
        yield f"{address}/v1"
    finally:
        process.kill()
        process.wait()


def measure(urls: Sequence[str], prompts: Path, load: int, file: Path) -> pd.Series[Any]:
    """The speculative arm's row of a run of `latency`, whose rows go to a file."""
    rows = harness.run(
        "latency",
        "engine=server",
        f"engine.regular_url={urls[0]}",
        f"engine.url={urls[1]}",
        f"prompts={prompts}",
        f"num_prompts={2 * NUM_PROMPTS}",
        f"K={K}",
        f"batch_size={load}",
        f"tokens={NUM_TOKENS}",
        "temperature=0",
        "chat=false",
        "resume=false",
        f"results.file={file}",
    )
    return rows[rows.arm == "speculative"].iloc[0]


def noisy_drafts(directory: Path) -> dict[str, Path]:
    """The tiny draft with more and more noise in its weights, as directories with a GGUF file beside each."""
    found = {}
    for noise in NOISE:
        place = directory / f"draft_{100 * noise:.0f}"
        shutil.copytree(SHIPPED / "tiny_draft", place)
        model = AutoModelForCausalLM.from_pretrained(place)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                random_values = torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise * parameter.std() * random_values)
        model.save_pretrained(place)
        write(place, place.with_suffix(".gguf"))
        found[f"noise {noise:g}"] = place
    return found


def commands(engine: str, draft: Path, target: Path) -> list[list[str]]:
    """The commands of the servers without and with a draft; one where it answers both."""
    if engine == "serve":
        words = [sys.executable, "-m", "harness", "serve", "model=tiny", f"draft={draft}"]
        words += ["port={port}", f"K={K}", f"batch_size={max(LOADS)}", "temperature=0"]
        return [words]
    plain = [engine, "-m", str(target), "-np", str(max(LOADS)), "-c", "1024", "-t", "1"]
    plain += ["--port", "{port}", "--metrics"]
    drafting = ["-md", str(draft.with_suffix(".gguf")), "--spec-type", "draft-simple"]
    return [plain, [*plain, *drafting, "--spec-draft-n-max", str(K)]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("engine", help="serve, or the program of a llama-server")
    engine = parser.parse_args().engine
    directory = Path(tempfile.mkdtemp(prefix="prediction-coverage-"))
    sets = prompt_sets(directory)
    target = directory / "tiny.gguf"
    write(SHIPPED / "tiny", target)
    counts: Counter[str] = Counter()
    header = f"{'draft':10} {'prompts':9} {'load':4}  predicted            measured"
    print(header, flush=True)
    for name, draft in noisy_drafts(directory).items():
        yields = {}
        for prompts in sets:
            yields[prompts] = directory / f"{draft.name}_{prompts}.csv"
            words = ["model=tiny", f"draft={draft}", f"prompts={sets[prompts]}", f"K={K}"]
            words += ["temperature=0", f"tokens={NUM_TOKENS}", f"num_prompts={NUM_PROMPTS}"]
            harness.run("acceptance", *words, f"results.file={yields[prompts]}")
        with ExitStack() as stack:
            urls = [
                stack.enter_context(serving(words)) for words in commands(engine, draft, target)
            ]
            if len(urls) == 1:
                urls = [urls[0].replace("/v1", "/regular/v1"), urls[0]]
            measured = {}
            # All sets of a load one after the other: the machine is shared.
            for load, prompts in itertools.product(LOADS, sets):
                file = directory / f"{draft.name}_{prompts}_measured.csv"
                measured[load, prompts] = measure(urls, sets[prompts], load, file)
        costs = directory / f"{draft.name}_stories_measured.csv"
        for prompts in list(sets)[1:]:
            file = directory / f"{draft.name}_{prompts}_measured.csv"
            predicted, decoded = (
                harness.run("plan", f"costs={costs}", f"acceptance={source}")
                for source in (yields[prompts], file)
            )
            predicted = predicted[predicted.num_draft_tokens == K].set_index("batch_size")
            decoded = decoded[decoded.num_draft_tokens == K].set_index("batch_size")
            for load in LOADS:
                row = predicted.loc[load].copy()
                row["measured_speedup"] = decoded.measured_speedup[load]
                compare(name, prompts, load, row, measured[load, prompts], counts)
    cells = counts["cells"]
    print(f"{cells} cells: {counts['inside']} inside, {counts['alike']} alike")
    print(f"{counts['near']} within 5 %")


def compare(
    name: str,
    prompts: str,
    load: int,
    predicted: pd.Series[Any],
    measured: pd.Series[Any],
    counts: Counter[str],
) -> None:
    """Print one cell, and count what it shows."""
    low, high = predicted.predicted_speedup_low, predicted.predicted_speedup_high
    estimate = predicted.predicted_speedup
    # Of decoding, as wide as the interval of the whole speed-up.
    speedup = predicted.measured_speedup
    own_low = speedup * measured.speedup_low / measured.speedup
    own_high = speedup * measured.speedup_high / measured.speedup
    half = math.hypot(math.log(high / low) / 2, math.log(own_high / own_low) / 2)
    counts["cells"] += 1
    counts["inside"] += low <= speedup <= high
    counts["alike"] += abs(math.log(speedup / estimate)) <= half
    counts["near"] += abs(speedup / estimate - 1) <= 0.05
    print(
        f"{name:10} {prompts:9} {load:4}  {estimate:.2f} ({low:.2f} to {high:.2f})"
        f"  {speedup:.2f} ({own_low:.2f} to {own_high:.2f})",
        flush=True,
    )


if __name__ == "__main__":
    main()
