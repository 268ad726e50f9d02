"""Tasks of `eval`: arithmetic that is drawn, and those of lm-evaluation-harness in a file with its rows beside it."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from harness.commands.eval.lm_eval_tasks import LmEvalTask
from harness.commands.eval.tasks import (
    OPERATIONS,
    DrawnTask,
    Judgement,
    read_answer,
    tokens_with,
)
from harness.config.errors import SettingError
from in_process import Harness, only, results
from tiny_checkpoints import make_tokenizer

MULTIPLICATION = OPERATIONS["multiplication"]


@pytest.mark.parametrize(
    ("completion", "answer"),
    [
        ("96\n12 * 3 = 36\n", 96), (" 3145.0", 3145), (" 1,234,567 or so", 1234567), (" 1,2", 1), (" 1,2345", 1),
        (" -12", -12), (" 5-12", 5), (" the answer is 7 and not 8", 7), ("007", 7), ("0", 0), ("", None),
        ("\n96", None), (" .\n96", None), ("٣", None), ("9" * 10_000, int("9" * 4000)),
    ],
)  # fmt: skip
def test_the_answer_is_the_first_integer_of_the_first_line(
    completion: str, answer: int | None
) -> None:
    assert read_answer(completion) == (completion.split("\n")[0], answer)


@pytest.mark.parametrize("task", OPERATIONS)
def test_the_solved_lines_of_every_task_are_correct(task: str) -> None:
    """And have the form of the question; those of multiplication are the published ones."""
    published = "8 * 12 = 96\n25 * 4 = 100\n37 * 85 = 3145\n14 * 2 ="
    assert MULTIPLICATION.prompt(14, 2) == published
    lines = OPERATIONS[task].prompt(1, 1).split("\n")
    assert len(lines) == 4
    for line in lines[:3]:
        a, _, b, _, answer = line.split()
        assert OPERATIONS[task].expected(int(a), int(b)) == int(answer)
        assert OPERATIONS[task].prompt(int(a), int(b)).split("\n")[3] + f" {answer}" == line


@pytest.mark.parametrize("replacement", [False, True])
def test_questions_are_a_function_of_the_seed(replacement: bool) -> None:
    task = DrawnTask(MULTIPLICATION, (1, 99), replacement)
    first = task.problems(0, 50)
    assert first == task.problems(0, 80)[:50]
    assert first == task.problems(0, 9000)[:50]
    assert [(q.a, q.b) for q in first] != [(q.a, q.b) for q in task.problems(1, 50)]
    # Held here, because published rows name a seed: another generator would ask other questions.
    assert [(q.a, q.b) for q in first[:3]] == [(14, 2), (93, 26), (39, 47)]


def test_no_question_is_asked_twice_before_all_were_asked() -> None:
    pairs = [(q.a, q.b) for q in DrawnTask(MULTIPLICATION, (3, 5)).problems(0, 23)]
    everything = {(a, b) for a in (3, 4, 5) for b in (3, 4, 5)}
    assert set(pairs[:9]) == set(pairs[9:18]) == everything
    assert len(set(pairs[18:])) == 5
    many = DrawnTask(MULTIPLICATION, (1, 99)).problems(0, 99 * 99)
    assert len({problem.prompt for problem in many}) == 99 * 99


def test_operands_are_uniform_with_both_ends() -> None:
    questions = DrawnTask(MULTIPLICATION, (3, 5), replacement=True).problems(0, 9000)
    counts = Counter((question.a, question.b) for question in questions)
    assert set(counts) == {(a, b) for a in (3, 4, 5) for b in (3, 4, 5)}
    # Six standard deviations of a binomial count: false alarm below 1e-8 over the nine cells.
    assert all(
        abs(count - 1000) < 6 * (9000 * (1 / 9) * (8 / 9)) ** 0.5 for count in counts.values()
    )


def test_every_token_with_a_line_break_ends_the_line() -> None:
    tokenizer = make_tokenizer(("\n\n", ".\n", " \n 7", "\r"))
    ends = {tokenizer.convert_ids_to_tokens(token) for token in tokens_with(tokenizer, "\n")}
    assert ends == {"Ċ", "\n\n", ".\n", " \n 7"}


def test_a_completion_is_judged_by_its_answer() -> None:
    task = DrawnTask(MULTIPLICATION, (12, 12))
    (problem,) = task.problems(0, 1)
    assert (problem.expected, task.operands_column) == ("144", "12-12")
    assert task.judge(" 144.\n5", problem) == Judgement(" 144.", "144", True)
    assert task.judge(" 0144", problem) == Judgement(" 0144", "144", True)
    assert task.judge(" -144", problem) == Judgement(" -144", "-144", False)
    assert task.judge(" many", problem) == Judgement(" many", None, False)


def test_a_limit_that_cuts_answers_off_is_refused() -> None:
    task = DrawnTask(MULTIPLICATION, (98, 99))
    questions = task.problems(0, 20)
    task.check_answer_length(make_tokenizer(), questions, 5)
    with pytest.raises(
        SettingError, match=r"decoding.max_new_tokens=4: the answer 9\d\d\d takes 5 tokens"
    ):
        task.check_answer_length(make_tokenizer(), questions, 4)


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
