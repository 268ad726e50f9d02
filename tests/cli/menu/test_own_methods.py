"""Ways to draft that are not part of the project: in files of the user's own, and in installed packages."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, PreTrainedConfig

from harness.cli.menu.names import PACKAGE
from harness.commands.report.command import main as report
from harness.config.methods import METHODS
from harness.local.decoding.protocols import Drafter
from harness.local.drafting.checked import CheckedDrafter
from harness.local.drafting.text import TextDrafter
from in_process import Harness, results

PAGE = PACKAGE.parent / "docs" / "your-own-method.md"
QUICK = (
    "model=tiny_draft num_prompts=2 num_warmup=0 decoding.max_new_tokens=8 decoding=greedy".split()
)
CORPUS = ["draft=./corpus_ngrams.py:CorpusNgrams", "draft.file=corpus.txt", "draft.ngram=2"]
HEAD = ["draft=./linear_head.py:LinearHead", "draft.weights=matrix.pt"]


@pytest.fixture(autouse=True)
def the_pages_files(harness: Harness, own_methods: None) -> None:
    """The code of the page in files of the working directory, forgotten afterwards."""
    blocks = re.findall(
        r"```python\n# (\S+)\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    assert [name for name, _ in blocks] == ["corpus_ngrams.py", "linear_head.py", "likely.py"]
    for name, code in blocks:
        assert code.count("\n") <= 62
        Path(name).write_text(code, encoding="utf-8")
    Path("corpus.txt").write_text("Once upon a time there was a dog. " * 4, encoding="utf-8")
    torch.save(torch.eye(_target().hidden_size), "matrix.pt")


def _target() -> PreTrainedConfig:
    return AutoConfig.from_pretrained(PACKAGE / "local" / "models" / "shipped" / "tiny")


@pytest.mark.parametrize("draft", [CORPUS, HEAD], ids=["text", "head"])
@pytest.mark.parametrize("batch_size", [1, 2])
def test_it_is_measured_and_lossless(draft: list[str], batch_size: int, harness: Harness) -> None:
    outcome = harness("latency", *QUICK, *draft, f"batch_size={batch_size}")
    assert "identical token for token on 2 of 2 prompts" in outcome.summary
    rows = results()
    assert list(rows["draft"].dropna().unique()) == [draft[0].removeprefix("draft=")]


def test_a_sweep_compares_it_with_the_others_and_measures_other_code_again(
    harness: Harness,
) -> None:
    sweep = ["latency", "-m", *QUICK, f"{CORPUS[0]},lookup", *CORPUS[1:]]
    harness(*sweep)
    rows = results()
    assert set(rows["status"]) == {"ok"}
    assert set(rows["draft_method"]) == {"lookup", CORPUS[0].removeprefix("draft=")}
    report(["results"])
    assert "2 of 2" in harness(*sweep).stderr
    runs = set(rows["run"])
    assert set(results()["run"]) == runs
    file = Path("corpus_ngrams.py")
    file.write_text(file.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    harness(*sweep)
    assert len(set(results()["run"]) - runs) == 1


def test_it_is_planned_and_its_losslessness_tested(harness: Harness) -> None:
    assert "fits  " in harness("plan", *CORPUS).stdout
    harness("recovery", "num_prompts=1", "decoding=greedy", "decoding.max_new_tokens=8", *HEAD)


def test_an_installed_package_offers_one_by_name(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    package = tmp_path / "site"
    information = package / "corpus-1.0.dist-info"
    information.mkdir(parents=True)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: corpus\nVersion: 1.0\n")
    points = "[harness.methods]\ncorpus = corpus_ngrams:CorpusNgrams\n"
    (information / "entry_points.txt").write_text(points)
    (package / "corpus_ngrams.py").write_text(Path("corpus_ngrams.py").read_text())
    monkeypatch.syspath_prepend(str(package))
    harness("latency", *QUICK, "draft=corpus", "draft.file=corpus.txt")
    assert set(results()["draft"].dropna()) == {"corpus"}


WRONG = """
import torch
from harness.local.decoding.protocols import Drafter, Proposal
from harness.local.drafting.method import Method

class Wrong(Drafter):
    layers = ()
    def start(self, prompts, first_tokens, step): self.rows = len(prompts)
    def add(self, prompts, first_tokens, step): self.rows += len(prompts)
    def observe(self, num_accepted, next_tokens, step): pass
    def select(self, rows): self.rows = len(rows)
    def propose(self, num_draft_tokens, uniforms):
        tokens = torch.zeros(self.rows, 1, dtype=torch.long)
        even = torch.full((self.rows, 1, 320), 1 / 320)
        {body}

class Method(Method):
    def drafter(self, settings, pair, runner):
        return lambda warp: Wrong()
"""


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("return [tokens]", "must return a Proposal, not list"),
        ("return Proposal(tokens.float())", "must give tokens as a tensor of int64"),
        (
            "return Proposal(tokens.expand(self.rows, 99))",
            r"tokens \[1, at most 4\], not \[1, 99\]",
        ),
        ("return Proposal(tokens + 10**6)", "tokens outside the vocabulary of"),
        ("return Proposal(tokens, None, [7])", r"lengths from 0 to 1, one per row, not \[7\]"),
        ("return Proposal(tokens, None, [0.5])", r"lengths from 0 to 1, one per row, not \[0.5\]"),
        ("return Proposal(tokens, even[..., :7])", r"must give probabilities \[1, 1, \d+\]"),
        ("raise KeyError('lost')", r"propose\(\) raised KeyError: 'lost'"),
    ],
)
def test_a_mistake_is_one_line_with_its_name(body: str, words: str, harness: Harness) -> None:
    Path("wrong.py").write_text(WRONG.replace("{body}", body), encoding="utf-8")
    complaint = harness("latency", *QUICK, "draft=./wrong.py:Method", code=1).complaint
    assert re.search(rf"draft=\./wrong\.py:Method: .*{words}", complaint), complaint


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("even * 2", "no distributions"),
        ("even.clone().index_fill_(-1, torch.tensor([5]), 2.0).softmax(-1)", "do not draw"),
    ],
)
def test_wrong_probabilities_are_told(body: str, words: str, harness: Harness) -> None:
    size = f"import torch\n{WRONG}".replace("320", str(_target().vocab_size))
    source = size.replace("{body}", f"return Proposal(tokens + 3, {body})")
    Path("wrong.py").write_text(source, encoding="utf-8")
    complaint = harness("latency", *QUICK, "draft=./wrong.py:Method", code=1).complaint
    assert words in complaint


def test_what_a_row_is_not_offered_is_not_checked(harness: Harness) -> None:
    size = f"import torch\n{WRONG}".replace("320", str(_target().vocab_size))
    body = "return Proposal(tokens, even * 0, [0] * self.rows)"
    Path("wrong.py").write_text(size.replace("{body}", body), encoding="utf-8")
    harness("latency", *QUICK, "draft=./wrong.py:Method")
    assert set(results()["status"]) == {"ok"}


TEXT = """
from harness.local.drafting.methods.lookup import Lookup, LookupText

class Text(LookupText):
    num_made = 0
    def __init__(self, *sizes):
        super().__init__(*sizes)
        Text.num_made += 1
    {method}

class Texts(Lookup):
    def texts(self, settings, tokenizer):
        return lambda: Text(settings.max_ngram, settings.min_ngram)
"""
ANSWER = "def continuation(self, most): return {value}"


def own_text(method: str) -> str:
    """`draft=` for a copy of `lookup` in a file, with one method changed."""
    Path("own_text.py").write_text(TEXT.replace("{method}", method), encoding="utf-8")
    return "draft=./own_text.py:Texts"


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (ANSWER.replace("{value}", "None"), "continuation() must return a list .* not NoneType"),
        (ANSWER.replace("{value}", "(token for token in [1])"), "a list .* not generator"),
        (ANSWER.replace("{value}", "[1, 1.5]"), "continuation() .* whole numbers.* not 1.5"),
        (ANSWER.replace("{value}", "[10**6]"), "continuation() .* outside the vocabulary of"),
        (ANSWER.replace("{value}", "{}[0]"), "continuation() raised KeyError: 0"),
        ("def extend(self, tokens): tokens.sort(2)", "extend() raised TypeError"),
    ],
)
def test_a_mistake_of_a_text_names_the_call_that_its_author_wrote(
    method: str, words: str, harness: Harness
) -> None:
    complaint = harness("latency", *QUICK, own_text(method), code=1).complaint
    pattern = words.replace("()", r"\(\)")
    assert re.search(rf"draft=\./own_text\.py:Texts: .*{pattern}", complaint), complaint


def test_only_the_first_question_is_checked(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is timed behind the warm-up is as fast as a method that is built in."""
    batches: list[type] = []

    def noting(kind: type[Drafter]) -> None:
        def start(self: Drafter, *arguments: Any, original: Any = kind.start) -> None:
            batches.append(kind)
            original(self, *arguments)

        monkeypatch.setattr(kind, "start", start)

    noting(CheckedDrafter)
    noting(TextDrafter)
    harness("latency", *QUICK, "num_warmup=1", own_text(""))
    # Those that follow read the answers again, when all is measured.
    assert batches[:4] == [CheckedDrafter, *[TextDrafter] * 3]


@pytest.mark.parametrize("answer", ["{}[0]", "None"])
def test_a_mistake_in_a_later_question_names_the_method_too(answer: str, harness: Harness) -> None:
    late = f"return super().continuation(most) if Text.num_made < 3 else {answer}"
    method = f"def continuation(self, most): {late}"
    complaint = harness("latency", *QUICK, "num_warmup=1", own_text(method), code=1).complaint
    assert re.search(r"draft=\./own_text\.py:Texts: (Key|Type)Error: ", complaint), complaint


@pytest.mark.parametrize(
    ("draft", "words"),
    [
        ("./corpus_ngrams.py:Other", "has no attribute 'Other'"),
        ("./missing.py:Method", "there is no file missing.py"),
        (
            "./corpus_ngrams.py:CorpusText",
            "must inherit from harness.local.drafting.method.Method or TextMethod",
        ),
        ("./corpus_ngrams.py:CorpusNgrams", "draft.file: must be set"),
        ("./script.py:Method", "cannot be loaded: SystemExit"),
    ],
)
def test_a_name_that_holds_no_method_is_told(draft: str, words: str, harness: Harness) -> None:
    Path("script.py").write_text("raise SystemExit(0)")
    assert words in harness("latency", *QUICK, f"draft={draft}", code=2).complaint


def test_a_path_may_have_a_plus(harness: Harness) -> None:
    folder = Path("a+b")
    folder.mkdir()
    Path("corpus_ngrams.py").rename(folder / "corpus_ngrams.py")
    METHODS.forget()
    said = harness("plan", "draft=./a+b/corpus_ngrams.py:CorpusNgrams", CORPUS[1])
    assert "fits  " in said.stdout
