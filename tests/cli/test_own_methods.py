"""Ways to draft, a rule of acceptance and engines in files of the user's own: those of docs/your-own-method.md.

Sweeps run such engines in tests/cli/test_survival.py.
"""

import re
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig

from harness.config.installation import PACKAGE
from in_process import Harness, results
from traced import run_as_traced

PAGE = PACKAGE.parent / "docs" / "your-own-method.md"
QUICK = "model=tiny_draft num_prompts=2 num_warmup=0 tokens=8 decoding=greedy".split()
CORPUS = ["draft=./corpus_ngrams.py:CorpusNgrams", "draft.file=corpus.txt", "draft.ngram=2"]
HEAD = ["draft=./linear_head.py:LinearHead", "draft.weights=matrix.pt"]
RULES = """

class Lax(Likely):
    num_likeliest = 50


class Lying(Lax):
    lossless = True
"""
# Its draft is another model, which it rejects.
REJECTING = ["model=tiny", "draft=tiny_draft", "num_prompts=2", "decoding.max_new_tokens=12"]


@pytest.fixture(autouse=True)
def the_pages_files(harness: Harness, own_methods: None) -> None:
    """The code of the page in files of the working directory, forgotten afterwards."""
    blocks = re.findall(
        r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert [name for name, _ in blocks] == ["corpus_ngrams.py", "linear_head.py", "likely.py"]
    for name, code in blocks:
        assert code.count("\n") <= 62
        own_rules = RULES if name == "likely.py" else ""
        Path(name).write_text(code + own_rules, encoding="utf-8")
    Path("corpus.txt").write_text("Once upon a time there was a dog. " * 4, encoding="utf-8")
    target = AutoConfig.from_pretrained(PACKAGE / "local" / "models" / "shipped" / "tiny")
    torch.save(torch.eye(target.hidden_size), "matrix.pt")


@pytest.mark.parametrize("draft", [CORPUS, HEAD], ids=["text", "head"])
def test_it_is_measured_and_lossless(draft: list[str], harness: Harness) -> None:
    harness("latency", *QUICK, *draft, "batch_size=2")
    rows = results()
    assert {*rows["identical_prompts"].dropna()} == {2}
    assert list(rows["draft"].dropna().unique()) == [draft[0].removeprefix("draft=")]


def test_a_sweep_compares_it_with_the_others_and_measures_new_code_again(harness: Harness) -> None:
    sweep = ["latency", "-m", *QUICK, f"{CORPUS[0]},lookup", *CORPUS[1:]]
    assert f"job 1 of 2: {CORPUS[0]}" in harness(*sweep).stderr
    rows = results()
    assert set(rows["status"]) == {"ok"}
    assert set(rows["draft_method"]) == {"lookup", CORPUS[0].removeprefix("draft=")}
    file = Path("corpus_ngrams.py")
    file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    assert harness(*sweep).stderr.count("measured before") == 1
    assert len(set(results()["run"]) - set(rows["run"])) == 1


@pytest.mark.parametrize(
    ("mistake", "words"),
    [
        ("def plan(self, settings, target, weights): raise KeyError('a')", "KeyError: 'a'"),
        ("def layers(self, pair): raise KeyError('b')", "KeyError: 'b'"),
        (
            "def layers(self, pair): return (7, 99)",
            "layers() asks for layers (7, 99), and the model has 2",
        ),
        ("", "NotImplementedError: drafter()"),
        (
            "def drafter(self, settings, pair, runner): return lambda warp: 1 / 0",
            "ZeroDivisionError",
        ),
    ],
)
def test_a_mistake_in_a_method_names_it(mistake: str, words: str, harness: Harness) -> None:
    beginning = "from harness.local.drafting.method import Method\nclass Mine(Method):\n"
    Path("wrong.py").write_text(f"{beginning}    summary = 'wrong'\n    {mistake}\n")
    refused = harness("latency", *QUICK, "draft=./wrong.py:Mine", code=1)
    assert f"draft=./wrong.py:Mine: {words}" in refused.complaint


MODEL = """
from transformers import AutoModelForCausalLM
from harness.config.installation import PACKAGE
from harness.local.drafting.method import Method
class Mine(Method):
    summary = "mine"
    def huggingface(self, pair, settings, decoding):
        directory = PACKAGE / "local" / "models" / "shipped" / "tiny_draft"
        return {"assistant_model": AutoModelForCausalLM.from_pretrained(directory).eval()}
"""


def test_generate_drafts_as_many_tokens_as_the_page_states(harness: Harness) -> None:
    Path("mine.py").write_text(MODEL)
    for draft in ("tiny_draft", "./mine.py:Mine"):
        settings = [f"draft={draft}", "engine=huggingface", "K=16", "temperature=0", "tokens=24"]
        harness("latency", *settings, "prompts=tiny", "num_prompts=1", "num_warmup=0")
    rows = results()
    shipped, own = rows[rows["arm"] == "speculative"]["acceptance_rate"]
    assert own == shipped


BAD = """
from types import SimpleNamespace
from harness.local.decoding.protocols import TensorDrafter
from harness.local.drafting.method import Method
def start(*arguments): raise KeyError('mine')
class Bad(Method):
    summary = 'bad'
    def drafter(self, settings, pair, runner):
        return lambda warp: SimpleNamespace(layers=(), start=start, add=start, clear=lambda: None)
class Drafter(TensorDrafter):
    layers = ()
    def add(self, prompts, first_tokens, step): pass
    def draft(self, rows, uniforms): raise KeyError('mine')
class Worse(Method):
    summary = 'worse'
    def drafter(self, settings, pair, runner): return lambda warp: Drafter()
"""


def test_a_mistake_in_a_drafter_names_it(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("bad.py").write_text(BAD)
    run_as_traced(monkeypatch)
    for command, name, runner in (
        ("acceptance", "Bad", "eager"),
        ("latency", "Bad", "eager"),
        ("latency", "Worse", "compiled"),
    ):
        settings = ["model=tiny_draft", f"draft=./bad.py:{name}", "n=2", f"runner={runner}"]
        complaint = harness(command, *settings, code=1).complaint
        assert f"draft=./bad.py:{name}: KeyError: 'mine'" in complaint


def test_a_lossy_rule_accepts_more_and_is_called_lossy(harness: Harness) -> None:
    shown = harness("latency", *REJECTING, "decoding.rule=./likely.py:Lax")
    assert "lossy" in shown.stdout
    harness("latency", *REJECTING)
    rows = results("latency")
    drafted = rows[rows["arm"] == "speculative"]
    assert drafted["rule"].tolist() == ["./likely.py:Lax", "deepmind"]
    assert drafted["lossy"].tolist() == [True, False]
    own, exact = drafted["acceptance_rate"]
    assert own > exact


def test_a_rule_that_calls_itself_lossless_is_held_to_its_word(harness: Harness) -> None:
    lying = ["decoding.rule=./likely.py:Lying", "temperature=0"]
    refused = harness("latency", *REJECTING, *lying, code=3)
    assert re.search(r"agree on \d of 2 prompts, and part at a logit margin", refused.complaint)
    row = results("latency").iloc[-1]
    assert not row["lossy"], "it follows `lossless`"
    assert row["status"] == "no_verdict"
    assert row["margin_over_rounding"] > 1
