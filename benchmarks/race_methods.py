"""`+experiment=methods` as a race (`race=true`) against the whole sweep, in turns: time, tokens, and the verdicts.

    OMP_NUM_THREADS=1 python benchmarks/race_methods.py --pairs 2

Times are of the whole command with all processes that it starts: by the clock, and of the processor, for a machine
that others use too. The second pair runs in the other order. The last table compares every race with every sweep, and
the sweeps with each other: two sweeps need not agree either.
"""

from __future__ import annotations

import argparse
import itertools
import resource
import subprocess
import sys
import time
from pathlib import Path

import common
import pandas as pd

from harness.commands.latency.rows import LatencyPromptRow, LatencyRow
from harness.results.files import read_rows
from harness.results.statistics.multiplicity import ranking

ROUNDS = {"sweep": [], "race": ["race=true"]}


def main() -> None:
    """Run all sweeps and races, and print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--directory", type=Path, default=Path("race_methods"))
    parser.add_argument("--overrides", nargs="*", default=[], help="further settings of both")
    common.add_numbers(parser, pairs=2, prompts=40)
    options = parser.parse_args()
    figures = []
    answers: dict[str, pd.DataFrame] = {}
    for pair in range(options.pairs):
        costs = {}
        for kind in list(ROUNDS)[:: -1 if pair % 2 else 1]:
            directory = options.directory.resolve() / f"{kind}-{pair}"
            directory.mkdir(parents=True)
            costs[kind] = run(directory, [*ROUNDS[kind], *options.overrides], options.prompts)
            answers[f"{kind} {pair}"] = answers_of(directory)
            costs[kind]["tokens"] = answers[f"{kind} {pair}"]["num_tokens"].sum()
        shares = [f"{costs['race'][cost] / costs['sweep'][cost]:.0%}" for cost in costs["race"]]
        seconds = [f"{costs[kind]['clock']:.0f}" for kind in ("sweep", "race")]
        figures.append([str(pair), *shares, *seconds])
    headings = ["pair", "clock", "processor", "tokens", "sweep, s", "race, s"]
    common.show("a race as a share of the sweep", headings, figures)

    verdicts = {name: verdicts_of(rows) for name, rows in answers.items()}
    compared = []
    for first, second in itertools.combinations(verdicts, 2):
        if "race" in first and "race" in second:
            continue
        one, other = verdicts[first], verdicts[second].reindex(verdicts[first].index)
        compared.append(
            (
                f"{first}, {second}",
                (one["against regular"] == other["against regular"]).sum(),
                len(one),
                one.index[0] == other["speedup"].idxmax(),
                " | ".join(one.index[one["may be best"]]),
                " | ".join(other.index[other["may be best"]]),
            )
        )
    headings = ["", "same against regular", "jobs", "same first", "may be best", "in the other"]
    common.show("verdicts", headings, compared)


def run(directory: Path, overrides: list[str], num_prompts: int) -> dict[str, float]:
    """Seconds of the command by the clock, and of the processor."""
    command = [sys.executable, "-m", "harness", "latency", "-m", "+experiment=methods"]
    command += [f"num_prompts={num_prompts}", "hydra.sweep.dir=sweep", *overrides]
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    with (directory / "log.txt").open("w") as log:
        subprocess.run(command, cwd=directory, stdout=log, stderr=log, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "clock": time.monotonic() - started,
        "processor": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
    }


def answers_of(directory: Path) -> pd.DataFrame:
    """The answers to all prompts, with the name of their job as `job`."""
    tables = []
    for row in read_rows(directory / "sweep" / "latency.csv", LatencyRow):
        if row.arm == "speculative" and row.status == "ok" and row.job is not None:
            answers = read_rows(Path(row.directory or "") / "latency_prompts.csv", LatencyPromptRow)
            table = pd.DataFrame([answer.values() for answer in answers])
            tables.append(table.assign(job=f"{row.draft} K={row.num_draft_tokens}"))
    return pd.concat(tables)


def verdicts_of(answers: pd.DataFrame) -> pd.DataFrame:
    """For each job, the best first: speed-up, verdict against regular decoding, and whether it may be the best."""
    rows = {}
    asked = answers.groupby("job")["prompt_index"].nunique()
    finalists = asked.index[asked == asked.max()]
    times = answers.assign(ms=answers["time_ms"] / answers["num_tokens"]).pivot_table(
        index="prompt_index", columns=["arm", "job"], values="ms", sort=False
    )
    for job in asked.index:
        both = times.xs(job, axis="columns", level="job").dropna()
        speedup = common.ratio(both["regular"].tolist(), both["speculative"].tolist())
        verdict = "cannot tell"
        if speedup.excludes(1):
            verdict = "faster" if speedup.estimate > 1 else "slower"
        rows[job] = {"speedup": speedup.estimate, "against regular": verdict, "may be best": False}
    common_prompts = times[
        [(arm, job) for arm in ("regular", "speculative") for job in finalists]
    ].dropna()
    ranked = ranking(common_prompts["regular"].T, common_prompts["speculative"].T)
    for one in ranked:
        rows[finalists[one.index]]["may be best"] = not one.worse
    return pd.DataFrame(rows).T.sort_values("speedup", ascending=False)


if __name__ == "__main__":
    main()
