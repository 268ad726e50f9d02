"""The command line as a user meets it: processes, exit codes, completion, and stderr; see also test_mistakes.py."""

import re
import shlex
import sys
import traceback
from pathlib import Path

import filelock
import pytest

from documented import ROOT
from harness.commands.latency.measure import LatencyExperiment
from harness.commands.registry import with_settings
from harness.config.errors import RunError
from harness.config.installation import install_command
from in_process import Harness, only
from processes import run
from shipped_copies import copy_shipped


def test_without_a_command_it_lists_them(harness: Harness) -> None:
    assert "harness latency model=30B draft=7B" in harness().stdout


def test_help_is_a_page_whatever_the_terminal_is(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for columns in (80, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        for command in with_settings():
            lines = harness(command, "--help").stdout.splitlines()
            assert max(map(len, lines)) <= columns
            assert len(lines) <= 60, command


def test_a_setting_that_is_typed_twice_is_named(harness: Harness) -> None:
    typed = "engine=simulated K=2 n=8 n=8 num_draft_tokens=8 repeats=1".split()
    outcome = harness("latency", *typed)
    twice = [line for line in outcome.stderr.splitlines() if "given twice" in line]
    assert twice == ["decoding.num_draft_tokens is given twice: 8 is used, and 2 ignored"]
    assert "K=8" in outcome.stdout


def test_short_names_are_recorded_as_settings(harness: Harness) -> None:
    harness("plan", "K=8", "T=0", "prompt_length=64", "tokens=32", "results.file=null")
    assert only("overrides.yaml").read_text().split() == (
        "- decoding.num_draft_tokens=8 - decoding.temperature=0 - prompt_length=64 "
        "- decoding.max_new_tokens=32 - results.file=null".split()
    )


def test_users_bring_their_own_presets(harness: Harness) -> None:
    """Those of docs/sweeps.md, with its commands."""
    page = (ROOT / "docs" / "sweeps.md").read_text(encoding="utf-8")
    names = re.findall("`(mine/.*?yaml)`", page)
    for name, text in zip(names, re.findall("```yaml\n(.*?)```", page, re.DOTALL), strict=True):
        file = Path(name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    nightly, quantized = re.findall("^harness (.*mine.*)", page, re.MULTILINE)
    shown = harness(*shlex.split(nightly), "--cfg", "all").stdout
    assert "name: our8b" in shown
    assert "draft: lookup,none" in shown
    shown = harness(*shlex.split(quantized), "--cfg", "job").stdout
    assert "name: our8b_8bit" in shown
    assert "quantization: 8bit" in shown
    damaged = Path("mine/model/damaged.yaml")
    damaged.write_text("name: x\nrepository: [a\n")
    refused = harness.refused("latency", "-cd", "mine", "model=damaged")
    assert refused.startswith(f"{damaged.resolve()}, line 3: is not valid YAML")


def test_several_values_are_a_sweep_wherever_the_flag_stands(harness: Harness) -> None:
    for arguments in (
        ["seed=1,2", "-m", "decoding.top_p=2"],
        ["-m", "seed=1,2", "decoding.top_p=2"],
    ):
        said = harness("latency", *arguments, code=2).stderr
        # What is wrong in every job is said once.
        assert said.count("harness: decoding.top_p=2.0: must be in (0, 1]") == 1


def test_a_wrong_setting_leaves_no_directory(harness: Harness) -> None:
    for wrong in ("K=-1", "prompts=./nothere.jsonl", "tokens=100000"):
        harness("latency", wrong, code=2)
        assert not Path("outputs").exists()
    for wrong in ("budget=soon", "prompts=./nothere.jsonl"):
        harness("latency", "-m", "K=2,4", wrong, code=2)
        assert not Path("multirun").exists()
    mine = Path("mine")
    mine.mkdir()
    (mine / "notes.txt").touch()
    for _ in range(2):
        harness("latency", "K=-1", "hydra.run.dir=mine", code=2)
        harness("latency", "K=-1", "hydra.run.dir=.", code=2)
    assert [path.name for path in mine.iterdir()] == ["notes.txt"]
    assert {path.name for path in Path().iterdir()} <= {"mine", "results"}


@pytest.mark.parametrize("directory", ["mine", ".", "", "${oc.env:PWD}"])
@pytest.mark.parametrize("name", ["summary.txt", "result.json", "log.txt", ".hydra/config.yaml"])
def test_a_run_replaces_no_files(
    directory: str, name: str, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWD", str(tmp_path))
    file = Path("mine" if directory == "mine" else ".", name)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("my own")
    typed = [f"hydra.run.dir={directory}", "engine=simulated", "num_prompts=8"]
    for further in ([], ["hydra.job.chdir=true"]):
        refused = harness.refused("latency", *typed, *further)
        assert f"contains {name.partition('/')[0]}: name a new directory" in refused
    assert file.read_text() == "my own"
    assert not Path("mine/latency.csv").exists()


def test_eight_frames_lead_from_the_command_line_to_the_measurement(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames: list[str] = []

    def measure(self: object, session: object) -> None:
        stack = [frame.filename for frame in traceback.extract_stack()]
        frames.extend(file for file in stack if Path(file).is_relative_to(ROOT / "harness"))
        raise RunError("far enough")

    monkeypatch.setattr(LatencyExperiment, "measure", measure)
    assert "far enough" in harness("latency", "engine=simulated", code=1).stderr
    # With `measure` itself.
    assert len(frames) + 1 == 8


def test_a_second_run_replaces_nothing_and_a_sweep_goes_on(harness: Harness) -> None:
    quick = ["latency", "engine=simulated", "num_prompts=8"]
    harness(*quick, "hydra.run.dir=run")
    before = Path("run/result.json").read_bytes()
    assert "run: contains .hydra" in harness.refused(*quick, "hydra.run.dir=run")
    assert Path("run/result.json").read_bytes() == before
    sweep = [*quick, "-m", "seed=1,2", "results.file=null"]
    assert "contains .hydra" in harness.refused(*sweep, "hydra.sweep.dir=run")
    Path("other/.locks").mkdir(parents=True)
    for typed in ([*quick, "hydra.run.dir=other"], [*sweep, "hydra.sweep.dir=other"]):
        with filelock.FileLock("other/.locks/run.lock"):
            assert "other: is in use by another run: name a new directory" in harness.refused(
                *typed
            )
    for num_before in (0, 2):
        ended = harness(*sweep, "hydra.sweep.dir=sweep")
        assert ended.stderr.count("measured before") == num_before
    assert len(Path("sweep/latency.csv").read_text().splitlines()) == 5


def test_a_traceback_is_shown_where_it_is_asked_for_alone(tmp_path: Path) -> None:
    result = run(
        f'"{sys.executable}" -m harness latency --help | head -n 1',
        cwd=tmp_path,
        command=["bash", "-c"],
        # Without it Python writes what is left at its end, where an error has no handler.
        PYTHONUNBUFFERED="",
    )
    assert (len(result.stdout.splitlines()), result.stderr) == (1, "")
    result = run("latency", "decoding.top_p=0", cwd=tmp_path, code=1, HYDRA_FULL_ERROR="1")
    assert "Traceback" in result.stderr
    assert "SettingError" in result.stderr


def test_the_first_line_waits_for_no_library(tmp_path: Path) -> None:
    """With libraries that end the process when they are imported, torch before pandas."""
    (tmp_path / "torch.py").write_text("raise SystemExit(7)\n")
    (tmp_path / "pandas.py").write_text("raise SystemExit(8)\n")
    result = run("latency", "draft=lookup", cwd=tmp_path, code=7)
    assert result.stderr.splitlines() == ["importing torch and transformers"]


def test_what_is_not_there_is_refused_before_torch_is_imported(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text('{"prompt": "Once"}\n')
    program = """
import sys
import harness
sys.modules["uvicorn"] = None
sys.modules["fastapi"] = None
typed = [
    "latency prompts=chats.json", "latency model=./absent", "latency draft=./absent", "latency model=tony",
    "latency decoding.top_p=0", "serve",
]
for words in typed:
    try:
        harness.run(*words.split())
    except harness.SettingError as error:
        print(error)
print("torch" in sys.modules)
"""
    done = run(program, cwd=tmp_path, command=[sys.executable, "-c"])
    assert [line.partition(";")[0] for line in done.stdout.splitlines()] == [
        "prompts=chats.json: no such file (did you mean chats.jsonl?)",
        "model=./absent: no such directory",
        "draft=./absent: no such directory",
        "model=tony: no such preset (did you mean tiny?)",
        "decoding.top_p=0.0: must be in (0, 1]",
        f"serve: needs the fastapi package: {install_command('serve')}",
        "False",
    ]


ODD = "odd é=#(~) x"


def test_a_run_reads_and_writes_there(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    model = tmp_path / ODD / "mödel=1"
    copy_shipped(model)
    (tmp_path / ODD / "p.txt").write_text("Once\nTwice\n")
    pair = [f"model={ODD}/mödel=1", f"draft=./{ODD}/mödel=1", f"prompts={ODD}/p.txt"]
    quick = ["num_prompts=2", "decoding.max_new_tokens=4"]
    places = ["results.file=~/x=1.csv", f"hydra.run.dir={ODD}/run,1"]
    outcome = harness("latency", *pair, *quick, *places)
    assert f"{ODD}/mödel=1 + mödel=1" in outcome.stdout
    assert (tmp_path / "home" / "x=1.csv").exists()
    assert not (tmp_path / "~").exists()
    assert (tmp_path / ODD / "run,1" / "latency.csv").exists()
    # What Hydra notes can be given to it again.
    noted = (tmp_path / ODD / "run,1" / ".hydra" / "overrides.yaml").read_text()
    assert f"model='{ODD}/mödel=1'" in noted


def test_a_pattern_sweeps_over_presets(harness: Harness) -> None:
    outcome = harness("plan", "-m", "model=tiny", "draft=glob(tiny_*)")
    jobs = [line.partition(":")[0] for line in outcome.stderr.splitlines() if line.startswith("[")]
    drafts = ("tiny_dflash", "tiny_draft", "tiny_eagle3", "tiny_medusa")
    assert jobs == [f"[{number}/4] draft={name}" for number, name in enumerate(drafts, 1)]
