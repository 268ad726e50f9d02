"""Measures how often the 95 % intervals of `acceptance` contain the true value, on the texts of one long run.

    harness acceptance prompts=tiny n=40 texts_per_prompt=16 batch_size=16 up_to=8
    python benchmarks/acceptance_coverage.py outputs/acceptance/DAY/TIME [--prompts 15] [--texts 2]

Each repetition (`--worlds`) draws prompts with replacement, and for each prompt some of its texts. The true value is
the ratio over all texts of all prompts.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import common
import numpy as np

from harness.results.files import rows_in
from harness.results.rows.acceptance import TEXTS_FILE, AcceptanceTextRow
from harness.results.statistics.iterations import expected_tokens_per_iteration


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", type=Path)
    common.add_numbers(parser, prompts=15, texts=2, worlds=2000)
    options = parser.parse_args()
    texts: dict[int, list[Any]] = defaultdict(list)
    for row in rows_in(options.directory / TEXTS_FILE, AcceptanceTextRow):
        iterations = np.array(row.iterations_by_num_draft_tokens)
        cut = SimpleNamespace(num_tokens=row.num_tokens, iterations=iterations)
        texts[row.prompt_index or 0].append(cut)
    every = [cut for cuts in texts.values() for cut in cuts]
    truth = sum(cut.num_tokens for cut in every) / sum(cut.iterations for cut in every)
    random = np.random.default_rng(0)
    held = np.zeros(len(truth))
    for _ in range(options.worlds):
        drawn, places = [], []
        for place, prompt in enumerate(random.choice([*texts], options.prompts)):
            for index in random.choice(len(texts[prompt]), options.texts, replace=False):
                drawn.append(texts[prompt][index])
                places.append(place)
        intervals = expected_tokens_per_iteration(drawn, places)
        held += [
            interval.low <= mean <= interval.high
            for interval, mean in zip(intervals, truth, strict=True)
        ]
    for k, share in enumerate(held / options.worlds, start=1):
        print(f"K={k}: {truth[k - 1]:.3f} tokens per iteration, held in {100 * share:.1f} %")


if __name__ == "__main__":
    main()
