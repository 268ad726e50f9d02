"""Memory and time of `acceptance` on one long conversation: `python benchmarks/long_trajectory.py [NUM_TOKENS ...]`.

A target of two layers and an EAGLE-3 head, with random weights and a vocabulary of 32,000 tokens, so that logits weigh
as much as a small model's do. A conversation asks for 900 tokens and has answers of 64, again and again.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

import harness

SHIPPED = Path(harness.__file__).parent / "local" / "models" / "shipped"
VOCABULARY = 32000
ASKED = 900
ANSWERED = 64
TEMPLATE = "{% for m in messages %}{{ m.content + '\n' }}{% endfor %}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("num_tokens", type=int, nargs="*", default=[8192, 16384, 32768, 65536])
    with tempfile.TemporaryDirectory() as directory:
        for num_tokens in parser.parse_args().num_tokens:
            measure(Path(directory), num_tokens)


def measure(directory: Path, num_tokens: int) -> None:
    write_pair(directory, num_tokens)
    write_conversation(directory / "long.jsonl", num_tokens)
    command = [sys.executable, "-m", "harness", "acceptance", "model=./target", "draft=./head"]
    command += ["prompts=./long.jsonl", "up_to=4", "results.file=null"]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    outcome = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if outcome.returncode:
        raise SystemExit(outcome.stderr)
    processor = after.ru_utime - before.ru_utime
    peak = after.ru_maxrss / 2**20
    print(
        f"{num_tokens:,} tokens: peak {peak:.2f} GiB, {seconds:.0f} s, {processor:.0f} s of processor time",
        flush=True,
    )


def write_pair(directory: Path, num_tokens: int) -> None:
    """A target and a head with random weights; the tokenizer is the shipped one."""
    shutil.copytree(SHIPPED / "tiny", directory / "target", dirs_exist_ok=True)
    (directory / "target" / "chat_template.jinja").write_text(TEMPLATE)
    shutil.copytree(SHIPPED / "tiny_eagle3", directory / "head", dirs_exist_ok=True)
    sizes: dict[str, object] = {"vocab_size": VOCABULARY, "max_position_embeddings": 2 * num_tokens}
    config = directory / "target" / "config.json"
    change(config, sizes | {"num_hidden_layers": 2})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(directory / "target"))
    model.save_pretrained(directory / "target")
    head = directory / "head" / "config.json"
    layers = json.loads(head.read_text())["transformer_layer_config"] | sizes
    of_head = {"eagle_aux_hidden_state_layer_ids": [0, 1, 2], "draft_vocab_size": VOCABULARY}
    change(head, of_head | {"transformer_layer_config": layers})
    weights = load_file(directory / "head" / "model.safetensors")
    weights["lm_head.weight"] = torch.randn(VOCABULARY, 192).bfloat16() / 14
    save_file(weights, directory / "head" / "model.safetensors")


def change(file: Path, values: dict[str, object]) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def write_conversation(file: Path, num_tokens: int) -> None:
    """Digits, each of which is a token."""
    rng = random.Random(0)

    def digits(count: int) -> str:
        return "".join(rng.choice("0123456789") for _ in range(count))

    messages = []
    for _ in range(num_tokens // (ASKED + ANSWERED + 2)):
        messages.append({"role": "user", "content": digits(ASKED)})
        messages.append({"role": "assistant", "content": digits(ANSWERED)})
    file.write_text(json.dumps({"messages": messages}))


if __name__ == "__main__":
    main()
