"""Tasks of `eval` from lm-evaluation-harness, in a file with its rows beside it."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.commands.eval.lm_eval_tasks import LmEvalTask
from harness.config.errors import SettingError
from in_process import Harness, only, results

TASK = "lm_eval:./task.yaml"
NUM_ROWS = 12
EXACT_MATCH = {"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}


def write_task(**changes: Any) -> None:
    """`task.yaml`, which asks for sums, and its rows."""
    rows = [{"question": f"{number} + 1", "answer": str(number + 1)} for number in range(NUM_ROWS)]
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    files = {"test": str(Path("rows.jsonl").resolve())}
    regex = {"function": "regex", "regex_pattern": "(-?[0-9]+)"}
    config = {
        "task": "sums",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": files, "cache_dir": str(Path("cache").resolve())},
        "test_split": "test",
        "output_type": "generate_until",
        "doc_to_text": "{{question}} =",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["\n", ";"], "max_gen_toks": 6},
        "filter_list": [{"name": "number", "filter": [regex, {"function": "take_first"}]}],
        "metric_list": [EXACT_MATCH],
    }
    # JSON is YAML.
    Path("task.yaml").write_text(json.dumps(config | changes), encoding="utf-8")


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
@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"metric_list": [EXACT_MATCH | {"metric": "bleu"}]}, r"needs a metric that is 0 or 1 .* has bleu"),
        ({"repeats": 4}, "asks each question 4 times"),
        ({"unsafe_code": True}, "would run code that a model wrote"),
        ({"doc_to_text": "{% broken"}, "lm-evaluation-harness cannot load it"),
    ],
)  # fmt: skip
def test_what_eval_cannot_ask_is_refused(changes: dict[str, Any], rule: str) -> None:
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
    assert set(merged.num_prompts) == {4}
    assert merged.mcnemar_p_value.iloc[1] == 1
    assert merged.identical_prompts.iloc[1] == 4
    answers = pd.read_csv(only("eval_prompts.csv"))
    assert (answers.expected == answers.source_row + 1).all()
    assert "8 of 8 answers are in" in harness(*asked).stderr
    write_task(doc_to_text="What is {{question}}?")
    assert "answers are in" not in harness(*asked).stderr
