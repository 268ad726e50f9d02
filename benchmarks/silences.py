"""Planted silences: kinds of requests that `harness serve` answers without drafts, and what `recovery` says of them.

    python benchmarks/silences.py [--runs 10] [--honest 20]

The server is one of the tiny draft with its first layer as the draft. A run is right if it names all kinds that were
planted as without drafts.
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
import time
from pathlib import Path

import common
import pandas as pd

import harness

sys.path.append(str(Path(__file__).parents[1] / "tests" / "support"))
from planted_faults import planted

SMALL = (
    *("engine=server", "model=tiny_draft", "num_prompts=4", "decoding.max_new_tokens=24"),
    *("decoding=greedy", "batch_size=1"),
)
# The kinds that each silence is about.
EXPECTED: dict[str, set[str]] = {
    "none": set(),
    "SilentWithLogprobs": {"log-probabilities", "log-probabilities, no stream"},
    "SilentWithLongPrompts": {"long cached prompt"},
    "SilentWithStops": {"stop texts"},
    "SilentWithTopK": {"top_k=5"},
    "SilentWithTopP": {"top_p=0.8"},
    "SilentWhenDrawn": {
        *("temperature=1", "top_k=5", "top_p=0.8"),
        *("log-probabilities", "log-probabilities, no stream"),
    },
    "SilentBeside": {"beside another"},
}


def main() -> None:
    parser = common.parser(__doc__, runs=10, honest=20)
    parser.add_argument("faults", nargs="*")
    options = parser.parse_args()
    rows = []
    for fault in options.faults or EXPECTED:
        expected = EXPECTED[fault]
        num_runs = options.honest if fault == "none" else options.runs
        num_right = num_others = 0
        began = time.perf_counter()
        name = fault if fault == "none" else planted(fault)
        settings = ("batch_size=8", "max_logprobs=20")
        with common.served(name, *settings) as url, tempfile.TemporaryDirectory() as directory:
            for seed in range(num_runs):
                file = Path(directory) / f"{seed}.csv"
                with contextlib.suppress(harness.HarnessError):
                    harness.run(
                        "recovery", *SMALL, f"seed={seed}", f"engine.url={url}/v1",
                        f"engine.regular_url={url}/regular/v1", f"results.file={file}",
                        f"hydra.run.dir={directory}/{seed}",
                    )  # fmt: skip
                found = pd.read_csv(file).query(
                    "check == 'kind' and verdict in ('no drafts', 'some drafts')"
                )
                silent = set(found.sampling)
                num_right += silent >= expected
                num_others += bool(silent - expected)
        seconds = (time.perf_counter() - began) / num_runs
        rows.append((fault, f"{num_right} of {num_runs}", num_others, f"{seconds:.0f}"))
        print(*rows[-1], sep=" | ", flush=True)
    common.show(
        f"Planted silences, {common.versions()}",
        ["planted", "all planted kinds named", "others named", "s/run"],
        rows,
    )


if __name__ == "__main__":
    main()
