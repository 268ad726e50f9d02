"""Pages about many runs, and that every command that an answer names as the next one would run."""

import json
import shlex
from pathlib import Path
from typing import Any

from composing import all_accepted, collected
from harness.commands.report.command import build
from harness.config.command_line import Words
from harness.reporting import words
from harness.reporting.files import markdown, on_terminal
from harness.reporting.terminal import as_text
from in_process import QUICK_MODELS, QUICKEST_PAIR, Harness
from report_files import latency_run, over, write

SURE = {"speedup_covers": over(15)}


def test_a_terminal_shows_five_series(tmp_path: Path) -> None:
    runs: list[Any] = [
        latency_run(k, 2.0, model=f"model{number}", **SURE) for number in range(8) for k in (2, 4)
    ]
    # A file of another name is found in the directory itself alone.
    write(tmp_path / "mine.csv", *runs)
    write(tmp_path / "deeper" / "mine.csv", latency_run(model="another"))
    report = build([tmp_path])
    shown = as_text(on_terminal(report))
    assert shown.count("Best significant speed-up") == 5
    assert "3 more (other series, single runs): report.md" in shown
    assert markdown(report, "").count("\n### ") == 8
    # Made-up runs that were interrupted have no table.
    for k in (2, 4):
        write(tmp_path / "mine.csv", latency_run(k, weights="random", status="interrupted"))
    assert "Made up" not in build([tmp_path]).pages


def test_a_command_is_typed_again_with_changes() -> None:
    for line, changes, again in [
        # Of two settings with one last name only the one that is typed goes.
        ("prompts.file=a.jsonl results.file=b.csv", "results.file=c.csv", "prompts.file=a.jsonl results.file=c.csv"),
        ("-m draft=a draft.b=2 K=2,4", "decoding.K=8", "-m draft=a draft.b=2 decoding.K=8"),
        ("-m 'draft=glob(tiny*)' n=8", "num_prompts=32", "-m 'draft=glob(tiny*)' num_prompts=32"),
        ("+launcher=slurm --multirun K=range(2,5)", "K=8", "+launcher=slurm --multirun K=8"),
        ("draft.max_ngram=2 hydra.run.dir=x details=true", "draft=suffix", "draft=suffix"),
        ("vary.k=2 hydra/launcher=joblib hydra.launcher.verbose=1", "K=8", "vary.k=2 K=8"),
        ("-m K=2,4 T=0,1", "-m K=2,4,8", "T=0,1 -m K=2,4,8"),
        ("gamma=4 decoding.num_draft_tokens=4 seed=1", "-m K=2,4,8", "seed=1 -m K=2,4,8"),
        ("K=2 -- llama-server -m 'my model' {K}", "K=8", "K=8 -- llama-server -m 'my model' '{K}'"),
    ]:  # fmt: skip
        Words.divide(["latency", *shlex.split(line)]).note()
        assert words.typed_again(changes) == f"harness latency {again}"


def test_the_steps_of_runs_are_accepted_and_one_runs(harness: Harness) -> None:
    lines = [json.dumps({"prompt": f"Count {n}.", "completion": "one two"}) for n in range(3)]
    Path("mine.jsonl").write_text("\n".join(lines))
    models = [*QUICK_MODELS, "tokens=4", "num_warmup=0"]
    texts = [*QUICKEST_PAIR, "up_to=2", "texts_per_prompt=1"]
    with collected() as steps:
        harness("acceptance", *texts, "prompts=./mine.jsonl", "T=0")
        harness("latency", *models, "num_prompts=2")
        harness("latency", "-m", *models, "num_prompts=2", "K=1,2")
        harness("plan", *QUICKEST_PAIR)
        harness(
            "recovery", *QUICKEST_PAIR, "num_draws=1000", "num_prompts=2", "tokens=4", code=None
        )
    all_accepted(steps)
    measure = next(step for step in steps if step.text == "measure it")
    asked = shlex.split(measure.command)[1:]
    assert {"prompts=./mine.jsonl", "T=0"} < set(asked)
    # It runs as it was typed, but for its length.
    harness(*asked, "tokens=4", "num_prompts=2", "num_warmup=0")
