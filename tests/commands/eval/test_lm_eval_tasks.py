"""Tasks of `eval` from lm-evaluation-harness, in a file with its rows beside it."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.commands.eval.lm_eval_tasks import LmEvalTask
from harness.config.errors import SettingError
from in_process import Harness, only, results
from wording import mentions

TASK = "lm_eval:./task.yaml"
NUM_ROWS = 12


def write_task(**changes: Any) -> None:
    """`task.yaml`, which asks for sums, and its rows."""
    rows = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(NUM_ROWS)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    data = {"data_files": {"test": str(Path("rows.jsonl").resolve())}}
    config = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {**data, "cache_dir": str(Path("cache").resolve())},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}} =",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", ";"], "max_gen_toks": 6},
        "filter_list": [
            {
                "name": "number",
                "filter": [
                    {"function": "regex", "regex_pattern": "(-?[0-9]+)"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [metric("exact_match")],
    }
    # JSON is YAML.
    Path("task.yaml").write_text(json.dumps(config | changes), encoding="utf-8")


def metric(name: str, higher_is_better: bool = True) -> dict[str, Any]:
    return {"metric": name, "aggregation": "mean", "higher_is_better": higher_is_better}


@pytest.fixture
def lm_eval(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("lm_eval", reason="specharness[lm-eval] is not installed")
    monkeypatch.chdir(tmp_path)
    write_task()


@pytest.mark.parametrize("task", ["gsm8k", "lm_eval:gsm8k"])
def test_absent_lm_eval_is_told_with_the_command_that_brings_it(
    harness: Harness, monkeypatch: pytest.MonkeyPatch, task: str
) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    complaint = harness.refused("eval", f"task={task}")
    rule = "needs lm-evaluation-harness: pip install 'specharness[lm-eval]'"
    assert complaint == f"task={task}: {rule}"


def test_data_out_of_reach_are_no_wrong_setting(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clients of the hub raise errors of their own."""
    httpx = pytest.importorskip("httpx2")

    class Unreachable:
        all_tasks = ("gsm8k",)

        def __init__(self, **_: object) -> None:
            pass

        def load(self, _: list[str]) -> None:
            raise httpx.ConnectError("Name or service not known")

    fake = types.ModuleType("lm_eval.tasks")
    vars(fake)["TaskManager"] = Unreachable
    monkeypatch.setitem(sys.modules, "lm_eval", types.ModuleType("lm_eval"))
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", fake)
    outcome = harness("eval", "task=lm_eval:gsm8k", code=1)
    assert "data of lm_eval:gsm8k are out of reach: Name or service not known" in outcome.stderr


def test_a_name_is_needed(harness: Harness) -> None:
    assert "must be one of" in harness.refused("eval", "task='lm_eval:'")
    assert "addition, gsm8k, lm_eval:NAME" in harness.refused("eval", "task=math500")
    refused = harness.refused("eval", "task=gsm8k", "replacement=true")
    assert refused.startswith("replacement=true: must be false with task=gsm8k")


@pytest.mark.usefixtures("lm_eval")
def test_prompts_are_the_contexts_of_the_task_drawn_by_seed() -> None:
    task = LmEvalTask(TASK)
    problems = task.problems(seed=0, count=NUM_ROWS)
    assert {problem.prompt for problem in problems} == {f"{n} + 1 =" for n in range(NUM_ROWS)}
    assert all(problem.expected == str(problem.source_row + 1) for problem in problems)
    assert task.problems(seed=0, count=3) == problems[:3]
    assert task.problems(seed=1, count=3) != problems[:3]
    assert (task.ends, task.max_tokens) == (("\n", ";"), 6)
    with pytest.raises(SettingError, match=r"num_prompts=13: .* has only 12 questions"):
        task.problems(seed=0, count=13)


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize(
    ("completion", "kept", "answer", "correct"),
    [
        (" {}", " {}", "{}", True),
        (" it is {}; 5", " it is {}", "{}", True),
        (" \n{}", " ", None, False),
        (" 99", " 99", "99", False),
        ("", "", None, False),
    ],
)
def test_completions_are_filtered_and_scored_by_lm_eval(
    completion: str, kept: str, answer: str | None, correct: bool
) -> None:
    task = LmEvalTask(TASK)
    for problem in task.problems(seed=0, count=3):
        right = str(problem.expected)
        wanted = kept.format(right), answer and answer.format(right), correct
        assert task.judge(completion.format(right), problem) == wanted


@pytest.mark.usefixtures("lm_eval")
def test_prompts_and_accuracy_are_those_of_lm_eval_itself() -> None:
    from lm_eval import simple_evaluate
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    class Answering(LM):
        """Says a number that is right for some questions, and then goes on as models do."""

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[str]:
            return [answer_of(request.args[0]).split("\n")[0] for request in requests]

        def loglikelihood(self, requests: Any) -> Any:
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    def answer_of(prompt: str) -> str:
        number = int(prompt.splitlines()[-1].split()[0])
        return f" {number + number % 3}\n7"

    write_task(num_fewshot=2, fewshot_split="test")
    evaluated = simple_evaluate(
        model=Answering(),
        tasks=["./task.yaml"],
        task_manager=TaskManager(include_defaults=False),
        bootstrap_iters=0,
    )
    (samples,) = evaluated["samples"].values()
    task = LmEvalTask(TASK)
    problems = task.problems(seed=0, count=NUM_ROWS)
    ours = {problem.prompt: task.judge(answer_of(problem.prompt), problem) for problem in problems}
    theirs = {sample["arguments"][0][0]: bool(sample["exact_match"]) for sample in samples}
    assert {prompt: correct for prompt, (_, _, correct) in ours.items()} == theirs
    assert set(theirs.values()) == {True, False}
    assert all(prompt.count("=") == 3 for prompt in theirs)


@pytest.mark.usefixtures("lm_eval")
def test_overlapping_ends_cut_where_a_generation_would_stop() -> None:
    for ends in (["bc", "ab"], ["ab", "bc"]):
        write_task(generation_kwargs={"until": ends, "max_gen_toks": 6})
        task = LmEvalTask(TASK)
        (problem,) = task.problems(seed=0, count=1)
        assert task.judge("7 abc", problem)[0] == "7 "


@pytest.mark.usefixtures("lm_eval")
def test_a_task_with_a_function_as_filter_has_one_digest() -> None:
    """A result is found again by it, also by another process, where functions are elsewhere."""
    function = {"function": "custom", "filter_fn": "FUNCTION"}
    write_task(filter_list=[{"name": "own", "filter": [function, {"function": "take_first"}]}])
    config = Path("task.yaml").read_text(encoding="utf-8")
    digests = set()
    for body in ("responses", "responses", "list(responses)"):
        module = f"def chosen(responses, docs):\n    return {body}\n"
        Path("own_filters.py").write_text(module, encoding="utf-8")
        tagged = config.replace('"FUNCTION"', "!function own_filters.chosen")
        Path("task.yaml").write_text(tagged, encoding="utf-8")
        digests.add(LmEvalTask(TASK).digest)
    assert len(digests) == 2


@pytest.mark.usefixtures("lm_eval")
def test_the_first_metric_that_is_0_or_1_counts() -> None:
    first = {"name": "whole", "filter": [{"function": "take_first"}]}
    write_task(filter_list=[first], metric_list=[metric("bleu"), metric("exact_match")])
    assert "scored by exact_match (filter whole)" in LmEvalTask(TASK).origin
    write_task(metric_list=[metric("bleu")])
    with pytest.raises(SettingError, match=r"needs a metric that is 0 or 1 .* has bleu"):
        LmEvalTask(TASK)


@pytest.mark.usefixtures("lm_eval")
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        (
            {"output_type": "multiple_choice", "doc_to_choice": ["1", "2"]},
            "must be a task with output_type generate_until, not multiple_choice",
        ),
        ({"repeats": 4}, "asks each question 4 times"),
        ({"unsafe_code": True}, "would run code that a model wrote"),
        ({"doc_to_text": "{% broken"}, "lm-evaluation-harness cannot load it"),
    ],
)
def test_what_eval_cannot_ask_is_refused(changes: dict[str, Any], rule: str) -> None:
    if "doc_to_choice" in changes:
        changes = {**changes, "metric_list": [metric("acc")], "filter_list": None}
    write_task(**changes)
    with pytest.raises(SettingError, match=rule):
        LmEvalTask(TASK)


@pytest.mark.usefixtures("lm_eval")
def test_eval_asks_both_arms_and_resumes_unless_the_task_changed(harness: Harness) -> None:
    write_task()
    asked = ("eval", f"task={TASK}", "num_prompts=4", "decoding=greedy", "batch_size=4")
    complaint = harness.refused(*asked, "decoding.max_new_tokens=5")
    assert complaint == f"decoding.max_new_tokens=5: must be at least 6, the max_gen_toks of {TASK}"
    outcome = harness(*asked)
    assert "12 questions by lm-evaluation-harness" in outcome.stderr
    merged = results("eval").query("seed == 'all'")
    assert list(merged.arm) == ["regular", "speculative"]
    assert set(merged.task) == {TASK}
    assert set(merged.metric) == {"exact_match, number"}
    assert mentions(outcome.stdout, TASK, "scored by exact_match, number")
    assert set(merged.num_prompts) == {4}
    assert merged.mcnemar_p_value.iloc[1] == 1
    assert merged.identical_prompts.iloc[1] == 4
    answers = pd.read_csv(only("eval_prompts.csv"))
    assert (answers.expected == answers.source_row + 1).all()
    assert "8 of 8 answers are in" in harness(*asked).stderr
    write_task(doc_to_text="What is {{question}}?")
    assert "answers are in" not in harness(*asked).stderr
