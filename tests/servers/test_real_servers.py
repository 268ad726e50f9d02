"""Real programs: the tables of their flags, and commands after `--` that start them."""

import json
import math
import re
import subprocess
from pathlib import Path

import pandas as pd
import pytest

from browser import browser
from harness.servers.command import read_command
from harness.servers.dialects import DIALECTS
from harness.servers.startup import LLAMA_CPP, VLLM, Startup
from in_process import Harness, only, results
from real_servers import gguf_pair, llama_server, llama_serving, post, vllm_python
from wording import mentions

SHORT = "num_prompts=3 tokens=16 prompts=tiny decoding=greedy".split()


def drafting() -> list[str]:
    model, draft = gguf_pair()
    return [llama_server(), "-m", model, "-md", draft, "--spec-type", "draft-simple"]


@pytest.mark.parametrize("on_github", [False, True])
def test_a_program_that_is_missing_skips_its_tests_but_fails_on_github(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, on_github: bool
) -> None:
    monkeypatch.delenv("LLAMA_SERVER", raising=False)
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("browser.CHROMIUM", None)
    ends = pytest.skip.Exception
    if on_github:
        monkeypatch.setenv("GITHUB_ACTIONS", "true")
        ends = pytest.fail.Exception
    with pytest.raises(ends):
        llama_server()
    with pytest.raises(ends), browser(tmp_path):
        pass


def test_a_verdict_from_the_command_that_starts_the_server(harness: Harness) -> None:
    asked = [*SHORT, "engine.blocks=0"]
    outcome = harness("latency", *asked, "--", *drafting(), "--spec-draft-n-max", "4")
    regular, speculative = results().to_dict("records")
    assert (regular["arm"], speculative["arm"]) == ("regular", "speculative")
    # Nothing of it is read from flags.
    assert math.isnan(speculative["num_draft_tokens"])
    # What llama.cpp counted itself.
    assert 0.2 < speculative["acceptance_rate"] < 0.9
    assert 1.5 < speculative["mean_acceptance_length"] < 4
    assert 2 < speculative["mean_proposed"] <= 4
    assert mentions(outcome.stdout, "tiny.gguf", "llama.cpp", "tiny_draft.gguf")
    # Behind the name of the processor, however long that is.
    assert mentions(outcome.stdout, "new tokens", "1 in flight")
    assert mentions(outcome.stderr, "--spec-type draft-simple --spec-draft-n-max 4")


def test_a_command_that_names_no_model_is_told_so(
    harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without models it begins as a router.
    monkeypatch.setenv("LLAMA_CACHE", str(tmp_path))
    command = [llama_server(), "--spec-type", "ngram-simple"]
    refused = harness("latency", *SHORT, "--", *command, code=1).stderr
    assert "its command names no model: add -m" in refused


def test_the_first_error_of_llama_server_is_the_reason_of_its_end(harness: Harness) -> None:
    command = [*drafting(), "-dev", "none", "-sm", "tensor"]
    refused = harness("latency", *SHORT, "--", *command, code=1).stderr
    # In one of eight runs, it ends before its last lines are in the log.
    assert "SPLIT_MODE_TENSOR" in refused


def test_what_llama_server_prints_is_beside_our_figures(harness: Harness) -> None:
    """Of a single request, because its log has a line for each."""
    asked = "num_prompts=1 num_warmup=0 tokens=40 prompts=tiny decoding=greedy engine.blocks=0"
    harness("latency", *asked.split(), "details=true", "--", *drafting(), "--spec-draft-n-max", "4")
    [log] = Path("outputs").rglob("speculative_server.log")
    *_, line = re.findall("draft acceptance = .*", log.read_text())
    printed = json.loads(only("result.json").read_text())["rows"][-1]["as_printed"]
    rate, length = printed["draft acceptance"], printed["mean len"]
    assert re.fullmatch(rf"draft acceptance = {rate} \(.*\), mean len = +{length}", line)


def test_llama_server_alone_is_counted_in_its_own_tokens(harness: Harness) -> None:
    with llama_serving(*drafting()[2:], "-c", "512", "-np", "1") as url:
        outcome = harness("acceptance", f"url={url}/v1", "K=3", *SHORT)
    assert f"engine.url={url}/v1 has 1 slot for 3 requests in flight" in outcome.stderr
    [row] = results("acceptance").to_dict("records")
    assert row["num_tokens"] == 3 * 15
    assert math.isnan(row["repeated_share"])


@pytest.mark.parametrize("flags", ["draft-simple", "none", "draft-simple none"])
def test_llama_server_drafts_where_its_command_is_read_so(flags: str) -> None:
    """`none` takes no other way to draft back."""
    model, draft = gguf_pair()
    words = ["-md", draft, "-c", "512", "-np", "1"]
    for flag in flags.split():
        words += ["--spec-type", flag]
    command = read_command([llama_server(), "-m", model, *words], {}, [DIALECTS["llamacpp"]])
    with llama_serving(model, *words) as url:
        answer = post(f"{url}/completion", {"prompt": "a b c a b c", "n_predict": 16})
    assert command.drafts == ("draft_n" in answer["timings"])


_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w.-]*")


def missing(startup: Startup, flags: set[str]) -> set[str]:
    return flags - {*startup.speculation, *startup.switches, *startup.refused}


def test_every_flag_of_llama_server_that_is_about_speculation_is_in_the_table() -> None:
    shown = subprocess.run([llama_server(), "--help"], capture_output=True, text=True).stdout
    section = shown.partition("----- speculative params")[2].partition("\n-----")[0]
    flags = flags_of(section)
    flags |= {name for name in flags_of(shown) if re.search("spec-|-spec$|draft|lookup", name)}
    assert len(flags) > 80
    assert not missing(LLAMA_CPP, flags)
    variables = set(re.findall(r"LLAMA_ARG_\w*(?:SPEC|DRAFT)\w*", shown))
    assert len(variables) > 10
    assert all(name.startswith(LLAMA_CPP.variables) for name in variables)


def flags_of(help_text: str) -> set[str]:
    """All spellings: lines of the help begin with them, and two spaces end them."""
    lines = re.findall(r"^(-.*?)(?:(?<!,)  |$)", help_text, re.MULTILINE)
    return {flag for line in lines for flag in _FLAG.findall(line)}


def test_every_flag_of_vllm_that_is_about_speculation_is_in_the_table() -> None:
    ask = [
        "from vllm.utils.argparse_utils import FlexibleArgumentParser",
        "from vllm.entrypoints.launchers.cli_args import make_arg_parser",
        "actions = make_arg_parser(FlexibleArgumentParser())._actions",
        "print(*(name for action in actions for name in action.option_strings), sep='\\n')",
    ]
    command = [vllm_python(), "-c", "\n".join(ask)]
    shown = subprocess.run(command, capture_output=True, text=True).stdout
    flags = {name for name in shown.split() if re.search("^-+spec|spec-|draft|^-sc$", name)}
    flags -= {"--specialize-active-lora"}  # of LoRA
    assert "--speculative-config" in flags
    assert not missing(VLLM, flags)


def test_what_llama_server_holds_is_what_plan_says(harness: Harness, tmp_path: Path) -> None:
    log = tmp_path / "server.log"
    flags = f"-c 512 -np 1 --no-repack -v --log-file {log} --spec-type draft-simple".split()
    model, draft = gguf_pair()
    with llama_serving(model, "-md", draft, *flags):
        text = log.read_text()
    pair = [f"model={model}", f"draft={draft}", "prompt_length=444", "tokens=64", "K=4"]
    harness("plan", *pair, "gpu_memory=24GB", "results.file=plans.csv")
    row = pd.read_csv("plans.csv").iloc[0]
    caches = json.loads(row["request_caches"])
    # Before the pair llama.cpp loads each model once without memory, to see what it would take.
    sizes = re.findall(r"(model|KV) buffer size = +([\d.]+) MiB", text)
    held = {(kind, float(size)) for kind, size in sizes if float(size)}
    planned = {
        ("model", round(row["model_bytes"] / 2**20, 2)),
        ("model", round(row["draft_bytes"] / 2**20, 2)),
        ("KV", round(caches["model"]["16"] / 2**20, 2)),
        ("KV", round(caches["draft"]["16"] / 2**20, 2)),
    }
    assert held == planned
