"""Train the heads that ship for the tiny model: `python -m recipes.tiny_heads OUTPUT_DIRECTORY`.

Each is trained by `harness distill` on the model's own answers to beginnings of texts in its language, and measured on
fifteen of them before and after. It takes one to two hours on one core; after a kill it goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import random
from itertools import islice
from pathlib import Path

import harness
from recipes.tiny_pair.language import END_OF_TEXT, documents

PROMPTS = 915
EPOCHS = {"eagle3": 6, "dflash": 5, "medusa": 3}
SETTINGS = [
    *("decoding=greedy", "decoding.ignore_eos=true", "temperatures=[0.0,0.6]", "answer_tokens=121"),
    *("texts_per_step=16", "learning_rate=0.002", "chain=4"),
]


def write_prompts(file: Path) -> None:
    """Stories, products and sums that break off within their first words."""
    rng = random.Random(5)
    with file.open("w", encoding="utf-8") as lines:
        for text in islice(documents(seed=5, products=0.25, additions=0.15), PROMPTS):
            words = text.removesuffix(END_OF_TEXT).split(" ")
            begin = " ".join(words[: rng.randint(2, min(20, len(words) - 1))])
            lines.write(json.dumps({"prompt": begin}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path, help="a directory; tiny_eagle3/ and the others go below it")
    parser.add_argument("--only", choices=[*EPOCHS], help="train one of them")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    prompts = arguments.output / "prompts.jsonl"
    write_prompts(prompts)
    for kind, epochs in EPOCHS.items():
        output = arguments.output / f"tiny_{kind}"
        if arguments.only in (None, kind) and not (output / "config.json").exists():
            made = [f"draft={kind}", f"prompts={prompts}", f"output={output}", f"epochs={epochs}"]
            harness.run("distill", "model=tiny", *made, *SETTINGS, verbose=True)


if __name__ == "__main__":
    main()
