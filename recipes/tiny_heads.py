"""Train the heads that ship for the tiny model: `python -m recipes.tiny_heads OUTPUT_DIRECTORY`.

Each is trained by `harness distill` on the model's own answers to beginnings of texts in its language, and measured on
fifteen of them before and after. No text that asks what the prompt set `tiny` asks is among them. After a kill the same
command goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from itertools import islice
from pathlib import Path

import harness
from harness.menu.names import PACKAGE
from recipes.tiny_pair.language import END_OF_TEXT, documents

MEASURED = 15
EPOCHS = {"eagle3": 8, "dflash": 7, "medusa": 7}
SETTINGS = [
    *("decoding=greedy", "decoding.ignore_eos=true", "temperatures=[0.0,0.6]", "answer_tokens=121"),
    *("texts_per_step=16", "learning_rate=0.002", "chain=4", f"num_prompts={MEASURED}"),
]


def held_out() -> list[str]:
    """What the prompt set `tiny` asks: each beginning of a story, and the sum after each prompt's solved examples."""
    lines = (
        (PACKAGE / "prompts" / "prompt_sets" / "tiny.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    return [json.loads(line)["prompt"].splitlines()[-1] for line in lines]


def write_prompts(file: Path, count: int) -> None:
    """Stories, products and sums that break off within their first words."""
    rng, asked = random.Random(5), held_out()
    texts = (
        text.removesuffix(END_OF_TEXT) for text in documents(seed=5, products=0.25, additions=0.15)
    )
    unseen = (text for text in texts if not any(question in text for question in asked))
    with file.open("w", encoding="utf-8") as lines:
        for text in islice(unseen, count):
            words = text.split(" ")
            begin = " ".join(words[: rng.randint(2, min(20, len(words) - 1))])
            lines.write(json.dumps({"prompt": begin}) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "output", type=Path, help="a directory; tiny_eagle3/ and the others go below it"
    )
    parser.add_argument("--only", choices=[*EPOCHS], help="train one of them")
    parser.add_argument("--prompts", type=int, default=900, help="how many to learn from")
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    prompts = arguments.output / "prompts.jsonl"
    write_prompts(prompts, MEASURED + arguments.prompts)
    for kind, epochs in EPOCHS.items():
        output = arguments.output / f"tiny_{kind}"
        if arguments.only in (None, kind) and not (output / "config.json").exists():
            # The model answers the first head's prompts, and the others learn from the same answers.
            training, answers = output / "training", arguments.output / "answers.jsonl"
            training.mkdir(parents=True, exist_ok=True)
            if answers.exists() and not (training / "answers.jsonl").exists():
                shutil.copy(answers, training)
            made = [f"draft={kind}", f"prompts={prompts}", f"output={output}", f"epochs={epochs}"]
            rows = harness.run("distill", "model=tiny", *made, *SETTINGS, verbose=True)
            for row in rows[rows.arm == "speculative"].itertuples():
                print(
                    f"tiny_{kind} {row.stage} training: {row.tokens_per_iteration:.2f} tokens an iteration",
                    flush=True,
                )
            shutil.copy(output / "answers.jsonl", answers)


if __name__ == "__main__":
    main()
