"""`recovery` of our own servers by the regular one's log-probabilities: false alarms, and faults beside the verdict by
weights.

    python benchmarks/recovery_served.py [--runs 50] [--fault-runs 1] [--draws 1000] [--fault-draws 2500] [FAULT ...]

Both servers of a pair answer in one `harness serve`, the speculative one with a planted fault or none. The target has
two layers, and its first one is the draft. Each honest run has its own seed, and one of three temperatures in turn.

With `--url`, `--regular-url` and `--fault-file` the servers are two of vLLM's that run already with the shipped pair
(`faulty_vllm.py` has the commands), and the faults are those of that file.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from pathlib import Path

import common

import harness
from harness.commands.recovery.rows import RecoveryRow
from harness.commands.recovery.tables import Checks
from harness.results.files import read_rows

FAULTS = (
    "bonus_from_wrong_position",
    "residual_warped_twice",
    "draft_probabilities_ignored",
    "rollback_off_by_one",
)
FAULTS_OF_VLLM = (
    "as_built",
    "rejected_draft_kept",
    "verified_greedily",
    "verified_hotter",
    "bonus_of_neighbour",
    "residual_of_target",
    # Drafts that count as certain are accepted less often, and change nothing.
    "draft_probabilities_ignored",
)
TEMPERATURES = (1.0, 1.5, 0.7)
SMALL = (
    "engine=server",
    "num_prompts=3",
    "decoding.max_new_tokens=16",
    "batch_size=16",
    "false_alarm_rate=1e-6",
    "top_logprobs=20",
)
SAMPLINGS = "samplings=[as_asked]"


def main() -> None:
    parser = common.parser(__doc__, runs=50, fault_runs=1, draws=1000, fault_draws=2500, shift=0.3)
    parser.add_argument("--references", default="regular,weights", help="of runs with a fault")
    parser.add_argument("--url", help="of a speculative server of vLLM's")
    parser.add_argument("--regular-url")
    parser.add_argument("--fault-file", type=Path, help="that this server reads")
    parser.add_argument("faults", nargs="*")
    options = parser.parse_args()
    own_faults = FAULTS if options.url is None else FAULTS_OF_VLLM
    rows = []
    for fault in options.faults or ["none", *own_faults]:
        num_runs = options.runs if fault == "none" else options.fault_runs
        num_draws = options.draws if fault == "none" else options.fault_draws
        references = ["regular"] if fault == "none" else options.references.split(",")
        with contextlib.ExitStack() as stack:
            if options.url is None:
                url = stack.enter_context(common.served(fault, "batch_size=16", "max_logprobs=-1"))
                addresses = [f"engine.url={url}/v1", f"engine.regular_url={url}/regular/v1"]
                addresses.append("model=tiny_draft")
            else:
                options.fault_file.write_text(fault)
                addresses = [f"engine.url={options.url}"]
                addresses += [f"engine.regular_url={options.regular_url}", "model=tiny"]
            for reference in references:
                settings = [f"num_draws={num_draws}", f"shift={options.shift}", SAMPLINGS]
                settings += [*addresses, f"reference={reference}"]
                rows.append((fault, reference, *tried(num_runs, settings)))
                print(*rows[-1], flush=True)
    common.show(
        f"{options.draws:,} drawn tokens, {options.fault_draws:,} for each fault; {common.versions()}",
        ["fault", "reference", "lossless", "lossy", "cannot tell", "greedy texts that differ", "smallest p",
         "largest p", "power", "s/run"],
        rows,
    )  # fmt: skip


def tried(num_runs: int, settings: list[str]) -> tuple[object, ...]:
    """The figures of runs with seeds of their own."""
    directory = Path(tempfile.mkdtemp())
    file = directory / "recovery.csv"
    started = time.perf_counter()
    for seed in range(num_runs):
        temperature = TEMPERATURES[seed % len(TEMPERATURES)]
        own = [f"seed={seed}", f"decoding.temperature={temperature}"]
        own += [f"results.file={file}", f"hydra.run.dir={directory}/{seed}"]
        # A verdict that is not the good one is an error; its rows are in the file.
        with contextlib.suppress(harness.HarnessError):
            harness.run("recovery", *SMALL, *settings, *own)
    seconds = time.perf_counter() - started
    runs: dict[str, list[RecoveryRow]] = {}
    for row in read_rows(file, RecoveryRow):
        runs.setdefault(str(row.run), []).append(row)
    checks = [Checks(run) for run in runs.values()]
    verdicts = [run.verdict for run in checks]
    greedy = [run.greedy for run in checks if run.greedy is not None]
    differ = sum((one.num_prompts or 0) - (one.identical_prompts or 0) for one in greedy)
    sampled = [run.sampled for run in checks if run.sampled is not None]
    p_values = [row.p_value for row in sampled if row.p_value is not None]
    powers = [row.power for row in sampled if row.power is not None]
    return (
        *(verdicts.count(verdict) for verdict in ("lossless", "lossy", "undecided")),
        f"{differ} of {sum(one.num_prompts or 0 for one in greedy)}",
        f"{min(p_values, default=1):.1e}", f"{max(p_values, default=1):.1e}",
        f"{min(powers, default=0):.3f}", f"{seconds / num_runs:.0f}",
    )  # fmt: skip


if __name__ == "__main__":
    main()
