"""Checks whether this checkout decides the same tokens as another one.

    python benchmarks/texts.py OLD            # 540 combinations
    python benchmarks/texts.py OLD --quick    # 180 of them: those in batches of 3
    python benchmarks/texts.py --write FILE   # the texts of this checkout, as JSON

OLD is another checkout, or a file that `--write` made. `OLD NEW` compares any two of these. For each checkout, this
script runs in a process that imports the checkout's `harness`.

A combination consists of a draft, a runner, a rule, a sampling setting and a batch size. The target is the shipped one,
in float32 on the CPU. All token ids of both arms must be equal: on one machine with one version of torch, only a change
of the code can change a token.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import common

import harness
from harness.engines.protocol import Request
from harness.engines.record import Preparation
from harness.local.engine.engine import LocalEngine

ROOT = Path(__file__).resolve().parents[1]
DRAFTS = ("tiny_draft", "tiny_eagle3", "tiny_dflash", "tiny_medusa", "lookup")
RUNNERS = ("eager", "static", "compiled")
# Each rule with its lenience. At lenience 1, `google` would be the same as `deepmind`.
RULES = (("deepmind", 1.0), ("google", 0.7), ("block", 1.0))
# Temperature, top-k and top-p.
SAMPLINGS = ((0.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 0, 1.0), (1.0, 20, 0.9))
# With batches of 3, the fourth prompt is in a batch by itself.
NUM_PROMPTS = 4
BATCH_SIZES = (1, 3, 4)
NUM_TOKENS = 12

Answers = list[list[int]]  # token ids, by prompt


def main() -> None:
    """Write texts or compare them. The exit code is 1 if texts differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("places", nargs="*", type=Path, metavar="OLD [NEW]")
    parser.add_argument("--write", type=Path)
    parser.add_argument("--runners", default=",".join(RUNNERS))
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.write is not None:
        answers = dict(answers_of_checkout(options.runners.split(","), options.quick))
        options.write.write_text(json.dumps(answers, indent=0), encoding="utf-8")
        return
    arguments = ["--runners", options.runners, *["--quick"] * options.quick]
    old, new = (read(place, arguments) for place in [*options.places, ROOT][:2])
    names = old.keys() | new.keys()
    different = sorted(name for name in names if old.get(name) != new.get(name))
    for name in different:
        print(f"{name}: {old.get(name)} and {new.get(name)}")
    print(f"{len(names) - len(different)} of {len(names)} combinations have equal texts")
    sys.exit(bool(different))


def read(place: Path, arguments: list[str]) -> dict[str, Any]:
    """Return the answers in a file, or run this script for a checkout and return the checkout's answers."""
    if place.is_file():
        found: dict[str, Any] = json.loads(place.read_text(encoding="utf-8"))
        return found
    file = Path(tempfile.mkdtemp()) / "texts.json"
    command = [sys.executable, __file__, "--write", str(file), *arguments]
    subprocess.run(command, env=os.environ | {"PYTHONPATH": str(place.resolve())}, check=True)
    return read(file, arguments)


def answers_of_checkout(
    runners: list[str], quick: bool
) -> Iterator[tuple[str, dict[str, Answers]]]:
    """Yield the name of each combination with the answers of both arms."""
    print(f"harness of {Path(harness.__file__).parents[1]}", flush=True)
    batch_sizes = (3,) if quick else BATCH_SIZES
    for draft in DRAFTS:
        settings = common.settings("model=tiny", f"draft={draft}", "placement=cpu")
        pair = common.load(settings)
        prompts = common.read_prompts(settings, pair, NUM_PROMPTS)
        for runner, (rule, lenience), size in product(runners, RULES, batch_sizes):
            usual = replace(
                settings.decoding, rule=rule, lenience=lenience, max_new_tokens=NUM_TOKENS
            )
            samplings = {
                sampling: replace(
                    usual, temperature=sampling[0], top_k=sampling[1], top_p=sampling[2]
                )
                for sampling in SAMPLINGS
            }
            preparation = Preparation(
                decoding=usual, runner=runner, batch_size=size, longest_prompt=max(map(len, prompts)),
                samplings=tuple(samplings.values()),
            )  # fmt: skip
            engine = LocalEngine(pair, preparation)
            print(f"{draft} {runner} {rule} {size}: prepared as {engine.runner}", flush=True)
            for sampling, decoding in samplings.items():
                requests = [Request(prompt, decoding, 0, i) for i, prompt in enumerate(prompts)]
                answers = {arm.name: arm.answer(requests, size).tokens for arm in engine.arms}
                yield f"{draft} {runner} {rule} {size} {sampling}", answers
            engine.close()


if __name__ == "__main__":
    main()
