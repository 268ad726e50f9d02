"""The tables of `eval`, of one run and of several compared; its questions, and how completions are read."""

import re
import signal
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from forked import HALTED, halting, run, start
from harness.cli.conversion import from_config
from harness.commands.eval.page import eval_page
from harness.commands.eval.record import EvalSettings
from harness.commands.eval.tasks import (
    Problem,
    check_answer_length,
    drawn_problems,
    parse_answer,
    tokens_with,
)
from harness.commands.run import record_failure, run_command
from harness.config.command_line import Words
from harness.config.errors import RunError, SettingError
from harness.engines.tokenizer import TextTokenizer
from harness.measuring import interleaving
from harness.results.runs import Run
from harness.results.statistics.interval import Interval
from harness.results.statistics.proportions import (
    difference_of_paired_proportions,
    wald_interval,
    wilson_interval,
)
from processes import end
from report_files import eval_run
from taught_pair import OPERANDS, TARGET_SAYS, save_taught_pair
from tiny_checkpoints import make_tokenizer

PUBLISHED = {"regular": 0.429, "speculative": 0.431}
Evaluate = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]


@pytest.fixture(scope="session")
def taught(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return save_taught_pair(tmp_path_factory.mktemp("taught"))


@pytest.fixture
def configuration(taught: tuple[Path, Path], tmp_path: Path) -> dict[str, Any]:
    return {
        "model": {"name": "taught", "repository": str(taught[0])},
        "draft": {"name": "taught_draft", "repository": str(taught[1])},
        "decoding": {"temperature": 0, "max_new_tokens": 6, "ignore_eos": False},
        "placement": {"strategy": "cpu"},
        "results": {"file": str(tmp_path / "results" / "eval.csv"), "details": True},
        "chat_template": "never",
        "operands": list(OPERANDS),
        "seeds": [0, 1],
        "num_prompts": 20,
        "batch_size": 6,
    }


@pytest.fixture
def evaluate(configuration: dict[str, Any], tmp_path: Path) -> Evaluate:
    """Run with changed settings; gives this run's arm rows and prompt rows."""
    runs: list[Path] = []

    def run(**changes: Any) -> tuple[pd.DataFrame, pd.DataFrame]:
        directory = tmp_path / f"run{len(runs)}"
        runs.append(directory)
        run_command("eval", from_config(EvalSettings, configuration | changes), directory)
        return pd.read_csv(directory / "eval.csv"), pd.read_csv(directory / "eval_prompts.csv")

    return run


def test_every_question_is_answered_as_it_was_taught(evaluate: Evaluate) -> None:
    arms, prompts = evaluate()
    assert len(prompts) == 2 * 2 * 20
    for row in prompts.itertuples():
        says = TARGET_SAYS[row.a, row.b]
        assert row.completion == says
        assert row.expected == row.a * row.b
        assert row.correct == (says == f" {row.expected}")
        assert pd.isna(row.answer) == (says == " six")
        assert row.num_tokens == len(says) + 1  # the line break is the last
        assert row.time_ms > 0
    assert set(prompts["correct"]) == {True, False}
    assert list(arms["status"]) == ["ok"] * 6
    # A batch shares its time.
    first = prompts[(prompts["arm"] == "regular") & (prompts["seed"] == 0)]
    batches = first.groupby("time_ms", sort=False)["prompt_index"].apply(list).tolist()
    assert batches == [[*range(6)], [*range(6, 12)], [*range(12, 18)], [18, 19]]
    assert set(arms["batch_size"]) == {6}
    assert list(zip(arms["seed"], arms["arm"], strict=True)) == [
        (seed, arm) for seed in ("0", "1", "all") for arm in ("regular", "speculative")
    ]
    for row in arms.to_dict("records"):
        is_own = prompts["seed"].astype(str).eq(row["seed"]) | (row["seed"] == "all")
        mine = prompts[(prompts["arm"] == row["arm"]) & is_own]
        correct, total = int(mine["correct"].sum()), len(mine)
        assert row["num_prompts"] == total == (40 if row["seed"] == "all" else 20)
        assert row["num_correct"] == correct
        assert row["num_parsed"] == mine["answer"].notna().sum() < total
        # The others are copies of these.
        different = mine.drop_duplicates(["a", "b"])
        assert row["num_different_prompts"] == len(different) == 9
        correct, total = int(different["correct"].sum()), 9
        wald, wilson = wald_interval(correct, total), wilson_interval(correct, total)
        assert [
            row[name] for name in ("accuracy", "wald_low", "wald_high", "wilson_low", "wilson_high")
        ] == pytest.approx([correct / total, wald.low, wald.high, wilson.low, wilson.high])
        assert row["ms_per_answer"] == pytest.approx(mine["time_ms"].mean())
    speculative = arms[arms["arm"] == "speculative"]
    assert (speculative["difference"] == 0).all()
    # Arms that answer alike may still differ on other questions.
    assert (speculative["difference_low"] < 0).all()
    assert (speculative["difference_high"] > 0).all()
    assert (speculative["mcnemar_p_value"] == 1).all()
    assert (speculative["identical_prompts"] == speculative["num_prompts"]).all()
    assert arms[arms["arm"] == "regular"]["difference"].isna().all()
    # The draft was taught other answers: it is often correct, and not always. Answers are short, and what is drafted
    # behind their ends counts as proposed.
    assert speculative["acceptance_rate"].between(0.15, 0.95).all()


@pytest.mark.parametrize(("temperature", "counted"), [(0, 9), (5.0, 18)])
def test_only_greedy_repetitions_are_copies(
    evaluate: Evaluate, temperature: float, counted: int
) -> None:
    decoding = {"temperature": temperature, "max_new_tokens": 6, "ignore_eos": False}
    arms, prompts = evaluate(decoding=decoding, seeds=[0], num_prompts=18)
    assert set(arms["num_different_prompts"]) == {9}
    assert not prompts[prompts["prompt_index"] < 9].duplicated(["arm", "a", "b"]).any()
    for row in arms.itertuples():
        mine = prompts[(prompts["arm"] == row.arm) & (prompts["prompt_index"] < counted)]
        wilson = wilson_interval(int(mine["correct"].sum()), counted)
        assert [row.wilson_low, row.wilson_high] == pytest.approx([wilson.low, wilson.high])
    assert arms["num_prompts"].tolist() == [18] * 4
    # Sampled arms are not held to identity.
    identical = arms[arms["arm"] == "speculative"]["identical_prompts"]
    assert identical.isna().all() == (temperature > 0)


def test_the_same_command_takes_over_what_was_answered(
    evaluate: Evaluate, configuration: dict[str, Any]
) -> None:
    first_arms, first = evaluate()
    assert (first_arms["num_resumed"] == 0).all()
    arms, prompts = evaluate(num_prompts=30, seeds=[1, 0, 2])
    merged = arms[arms["seed"] == "all"]
    assert list(merged["num_resumed"]) == [40, 40]
    assert list(merged["num_prompts"]) == [90, 90]
    keys = ["arm", "seed", "prompt_index"]
    before = first.set_index(keys).drop(columns="run")
    taken_over = prompts.set_index(keys).loc[before.index].drop(columns="run")
    pd.testing.assert_frame_equal(taken_over, before, check_dtype=False)
    assert not prompts.duplicated(keys).any()
    assert set(prompts["run"]) == set(arms["run"]) != set(first["run"])


def test_other_circumstances_ask_every_question_again(evaluate: Evaluate, tmp_path: Path) -> None:
    few = {"num_prompts": 6, "seeds": [0]}
    evaluate(**few)
    # Of 4 questions, batches are smaller than of 6.
    for changes in (
        {"resume": False},
        {"batch_size": 5},
        {"replacement": True},
        {"num_prompts": 4},
    ):
        arms, _ = evaluate(**few | changes)
        assert (arms["num_resumed"] == 0).all(), changes
    alone, prompts = evaluate(**few, draft={"name": "none"})
    assert (alone["num_resumed"] == 0).all()
    assert set(alone["arm"]) == set(prompts["arm"]) == {"regular"}
    assert alone["draft"].isna().all()
    assert alone["acceptance_rate"].isna().all()
    # A server that is measured alone has another name as soon as it drafts.
    store = tmp_path / "results" / "eval_prompts.csv"
    store.write_text(store.read_text().replace("regular", "speculative"))
    later, _ = evaluate(**few | {"num_prompts": 9}, draft={"name": "none"})
    assert [*later["arm"], *later["num_resumed"]] == ["speculative"] * 2 + [6, 6]


def test_published_accuracies_are_in_rows(evaluate: Evaluate, taught: tuple[Path, Path]) -> None:
    preset = {"name": "13B_2GPUs", "repository": str(taught[0])}
    few = {"num_prompts": 4, "seeds": [0]}
    arms, _ = evaluate(**few, model=preset, operands=[1, 99])
    assert arms.set_index("arm")["published_accuracy"].to_dict() == PUBLISHED
    assert evaluate(**few, model=preset)[0]["published_accuracy"].isna().all()
    assert evaluate(**few, operands=[1, 99])[0]["published_accuracy"].isna().all()


def test_a_failed_run_is_a_row_and_keeps_its_answers(
    evaluate: Evaluate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer, calls = interleaving.timed_answer, []

    def out_of_memory_later(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        if len(calls) > 6:  # two to warm up, two batches of two arms
            raise MemoryError
        return answer(*arguments, **options)

    monkeypatch.setattr(interleaving, "timed_answer", out_of_memory_later)
    with pytest.raises(Exception, match="out of main memory"):
        evaluate()
    monkeypatch.undo()
    arms = pd.read_csv(tmp_path / "run0" / "eval.csv")
    assert set(arms["status"]) == {"failed"}
    assert list(arms["seed"]) == ["0", "0", "all", "all"]
    assert list(arms["num_prompts"]) == [12] * 4
    assert len(pd.read_csv(tmp_path / "results" / "eval.csv")) == 4
    resumed, _ = evaluate()
    assert list(resumed[resumed["seed"] == "all"]["num_resumed"]) == [12, 12]


def test_a_process_that_died_has_rows_with_its_answers(
    evaluate: Evaluate, configuration: dict[str, Any], tmp_path: Path
) -> None:
    evaluate()
    died = tmp_path / "died"
    died.mkdir()
    prompts = pd.read_csv(tmp_path / "run0" / "eval_prompts.csv", dtype=str, keep_default_na=False)
    earlier = prompts[24:].assign(run="an earlier run in this directory")
    pd.concat([earlier, prompts[:24]]).to_csv(died / "eval_prompts.csv", index=False)
    settings = from_config(EvalSettings, configuration)
    record_failure("eval", settings, died, RunError("killed by signal 9"), run_id=prompts["run"][0])
    arms = pd.read_csv(died / "eval.csv")
    assert list(arms["num_prompts"]) == [12] * 4
    assert set(arms["error"]) == {"killed by signal 9"}
    assert arms["num_resumed"].isna().all()


@pytest.mark.slow
def test_a_question_that_a_killed_run_answered_is_never_asked_again(
    tmp_path: Path, taught: tuple[Path, Path]
) -> None:
    pair = f"model={taught[0]}", f"draft={taught[1]}"
    arguments = ["eval", *pair, "num_prompts=20", "batch_size=2", "operands=[1,3]"]
    # Each arm has warmed up and answered two batches.
    halt = halting("harness.measuring.interleaving.timed_answer", after=2 + 2 * 2)
    running = start(*arguments, cwd=tmp_path, until=HALTED, before=halt)
    end(running, signal.SIGKILL, -signal.SIGKILL)
    store = tmp_path / "results" / "eval_prompts.csv"
    stopped = pd.read_csv(store, dtype=str).drop(columns="run")
    assert len(stopped) == 2 * 2 * 2
    # 20 questions cannot exclude a difference of 5 points.
    finished = run(*arguments, cwd=tmp_path, code=3)
    assert f"{len(stopped)} of 40 answers are in {store.relative_to(tmp_path)}" in finished.stderr
    last = max(tmp_path.glob("outputs/eval/*/*/eval_prompts.csv"))
    prompts = pd.read_csv(last, dtype=str).drop(columns="run")
    keys = ["arm", "prompt_index"]
    assert len(prompts) == len(prompts[keys].drop_duplicates()) == 2 * 20
    taken_over = prompts.set_index(keys).loc[stopped.set_index(keys).index]
    pd.testing.assert_frame_equal(taken_over, stopped.set_index(keys))
    arms = pd.read_csv(tmp_path / "results" / "eval.csv")
    finished = arms[(arms["status"] == "ok") & (arms["seed"] == "all")]
    assert 2 * next(iter(finished["num_resumed"])) == len(stopped)


def test_answers_that_cannot_be_read_are_asked_again(evaluate: Evaluate, tmp_path: Path) -> None:
    evaluate()
    file = tmp_path / "results" / "eval_prompts.csv"
    header, first, *others = file.read_text().splitlines()
    assert re.search("True|False", first)
    file.write_text("\n".join([header, re.sub("True|False", "", first), *others])[:-20])
    arms, _ = evaluate()
    # The first question, and that of the last line, which was cut.
    num_asked = arms[arms["seed"] == "all"]["num_prompts"].iloc[-1]
    assert list(arms[arms["seed"] == "all"]["num_resumed"])[-2:] == [num_asked - 2] * 2


def test_the_answer_is_the_first_integer_of_the_first_line() -> None:
    for completion, answer in [
        ("96\n12 * 3 = 36\n", 96), (" 3145.0", 3145), (" 1,234,567 or so", 1234567), (" 1,2", 1), (" 1,2345", 1),
        (" -12", -12), (" 5-12", 5), (" the answer is 7 and not 8", 7), ("007", 7), ("0", 0), ("", None),
        ("\n96", None), (" .\n96", None), ("٣", None), ("9" * 10_000, int("9" * 4000)),
    ]:  # fmt: skip
        assert parse_answer(completion) == (completion.split("\n")[0], answer)


def test_the_solved_lines_are_the_published_ones_and_correct() -> None:
    """And have the form of the question."""
    published = "8 * 12 = 96\n25 * 4 = 100\n37 * 85 = 3145\n14 * 2 ="
    assert Problem(0, 0, 14, 2).prompt == published
    for line in published.split("\n")[:3]:
        a, _, b, _, answer = line.split()
        problem = Problem(0, 0, int(a), int(b))
        assert problem.expected == int(answer)
        assert problem.prompt.split("\n")[3] + f" {answer}" == line


@pytest.mark.parametrize("replacement", [False, True])
def test_questions_are_a_function_of_the_seed(replacement: bool) -> None:
    def drawn(seed: int, count: int) -> list[Problem]:
        return drawn_problems((1, 99), seed, count, replacement)

    first = drawn(0, 50)
    assert first == drawn(0, 80)[:50]
    assert first == drawn(0, 9000)[:50]
    assert [(q.a, q.b) for q in first] != [(q.a, q.b) for q in drawn(1, 50)]
    # Held here, because published rows name a seed: another generator would ask other questions.
    assert [(q.a, q.b) for q in first[:3]] == [(14, 2), (93, 26), (39, 47)]


def test_no_question_is_asked_twice_before_all_were_asked() -> None:
    pairs = [(q.a, q.b) for q in drawn_problems((3, 5), 0, 23)]
    everything = {(a, b) for a in (3, 4, 5) for b in (3, 4, 5)}
    assert set(pairs[:9]) == set(pairs[9:18]) == everything
    assert len(set(pairs[18:])) == 5
    many = drawn_problems((1, 99), 0, 99 * 99)
    assert len({problem.prompt for problem in many}) == 99 * 99


def test_operands_are_uniform_with_both_ends() -> None:
    questions = drawn_problems((3, 5), 0, 9000, replacement=True)
    counts = Counter((question.a, question.b) for question in questions)
    assert set(counts) == {(a, b) for a in (3, 4, 5) for b in (3, 4, 5)}
    # Six standard deviations of a binomial count: false alarm below 1e-8 over the nine cells.
    deviation = (9000 * (1 / 9) * (8 / 9)) ** 0.5
    assert all(abs(count - 1000) < 6 * deviation for count in counts.values())


def test_a_line_break_ends_an_answer_and_a_limit_that_cuts_one_off_is_refused() -> None:
    tokenizer = make_tokenizer(("\n\n", ".\n", " \n 7", "\r"))
    ends = {tokenizer.convert_ids_to_tokens(token) for token in tokens_with(tokenizer, "\n")}
    assert ends == {"Ċ", "\n\n", ".\n", " \n 7"}
    questions = drawn_problems((98, 99), 0, 20)
    check_answer_length(make_tokenizer(), questions, 5)
    with pytest.raises(SettingError, match=r"=4: must be at least 5: the answer 9\d\d\d would"):
        check_answer_length(make_tokenizer(), questions, 4)
    # Only the server knows its tokens: each character may be one.
    with pytest.raises(SettingError, match=r"=4: must be at least 5: the answer 9\d\d\d would"):
        check_answer_length(TextTokenizer(), questions, 4)


def next_changes(difference: Interval, **row: Any) -> str:
    """What the page of a run proposes to type."""
    Words.divide(["eval"]).note()
    bounds = {"difference_low": difference.low, "difference_high": difference.high}
    row |= bounds | {"difference": difference.estimate, "mcnemar_p_value": 1.0}
    page = eval_page([Run(eval_run((0,), **row))])
    assert page is not None
    return " ".join(step.changes for step in page.next)


@pytest.mark.parametrize(
    ("accuracy", "alike", "first"), [(0.82, 0.5, 48), (0.6, 0.5, 100), (0.5, 0.0, 200)]
)
def test_as_many_questions_as_next_says_end_most_runs_of_equal_arms(
    accuracy: float, alike: float, first: int
) -> None:
    generator = np.random.default_rng(0)

    def difference(number: int) -> Interval:
        quantiles = generator.random((2, number))
        is_alike = generator.random(number) < alike
        answers = np.where(is_alike, quantiles[0], quantiles) < accuracy
        return difference_of_paired_proportions(*answers)

    ended = []
    while len(ended) < 100:
        found = difference(first)
        if found.low < 0 < found.high and max(-found.low, found.high) > 0.05:
            changes = next_changes(found, num_prompts=first, num_different_prompts=first)
            again = difference(int(changes.removeprefix("num_prompts=")))
            ended.append(max(-again.low, again.high) <= 0.05)
    # 80 % are meant; fewer than 70 of 100 come once in 150 such tests.
    assert sum(ended) >= 70


def test_next_counts_different_questions() -> None:
    """At most 81 exist. Sampled answers to the same question are all counted."""
    for replacement, temperature, proposed in [
        (False, 0.0, "num_prompts=81"),
        (True, 0.0, "replacement=false num_prompts=81"),
        (True, 1.0, "num_prompts=84"),
    ]:
        asked = {"replacement": replacement, "temperature": temperature, "operands": "1-9"}
        found = Interval(0.0, -0.05, 0.05)
        assert next_changes(found, num_prompts=40, margin=0.06, **asked) == proposed
