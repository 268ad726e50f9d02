"""`draft=mtp` through the command lines of all commands."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest

from in_process import Harness, results
from mtp_models import mtp_target, save_with_mtp
from tiny_checkpoints import make_tokenizer

GREEDY = [
    "num_prompts=2",
    "num_warmup=0",
    "batch_size=2",
    "decoding=greedy",
    "decoding.max_new_tokens=12",
]
# Of 258 tokens, all about equally likely, two, so that their texts can be counted.
DRAWS = "num_prompts=1 decoding.max_new_tokens=4 num_draws=1000 batch_size=32 decoding.num_draft_tokens=1".split()
DRAWS += ["decoding.top_k=2", "samplings=[as_asked]"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("mtp")
    save_with_mtp(*mtp_target("deepseek_v3", vocab_size=258, num_mtp_layers=2), directory)
    make_tokenizer().save_pretrained(directory)
    (directory / "prompts.txt").write_text("once upon a time\n2 + 2 =\nthe end\n")
    return directory


def test_every_command(harness: Harness, directory: Path) -> None:
    pair = [f"model={directory}", "draft=mtp"]
    prompts = f"prompts={directory}/prompts.txt"
    assert "draft mtp: mtp head, 0.1 MB" in harness("latency", *pair, prompts, *GREEDY).stderr
    row = results().iloc[-1]
    assert (row["draft_method"], row["runner"], row["identical_prompts"]) == ("mtp", "static", 2)
    compared = harness(
        "compare",
        *pair,
        "prompt=Once",
        "json=true",
        "decoding=greedy",
        "decoding.max_new_tokens=12",
    )
    assert json.loads(compared.stdout)["identical"] is True
    short = ["num_prompts=2", "decoding.temperature=0", "decoding.max_new_tokens=6", "runner=eager"]
    harness("eval", *pair, *short)
    assert results("eval")["identical_prompts"].iloc[-1] == 2
    # A loss would be found and end with 1; these few draws cannot rule out a small one.
    harness("recovery", *pair, prompts, *DRAWS, code=3)
    greedy, *sampled = results("recovery").to_dict("records")
    assert greedy["verdict"] == "lossless"
    for test in sampled:
        assert test["verdict"] != "lossy"
    harness("plan", *pair, "results.file=plan.csv")
    plan = pd.read_csv("plan.csv").iloc[-1]
    assert plan["draft_cache_bytes"] > 0
    assert plan["cache_bytes"] > 0
