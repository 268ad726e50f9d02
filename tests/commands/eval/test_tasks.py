"""The questions of `eval`, and how completions are read."""

from __future__ import annotations

from collections import Counter

import pytest

from harness.commands.eval.tasks import (
    Problem,
    check_answer_length,
    drawn_problems,
    parse_answer,
    tokens_with,
)
from harness.config.errors import SettingError
from tiny_checkpoints import make_tokenizer


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
    assert all(
        abs(count - 1000) < 6 * (9000 * (1 / 9) * (8 / 9)) ** 0.5 for count in counts.values()
    )


def test_every_token_with_a_line_break_ends_the_line() -> None:
    tokenizer = make_tokenizer(("\n\n", ".\n", " \n 7", "\r"))
    ends = {tokenizer.convert_ids_to_tokens(token) for token in tokens_with(tokenizer, "\n")}
    assert ends == {"Ċ", "\n\n", ".\n", " \n 7"}


def test_a_limit_that_cuts_answers_off_is_refused() -> None:
    questions = drawn_problems((98, 99), 0, 20)
    check_answer_length(make_tokenizer(), questions, 5)
    with pytest.raises(
        SettingError, match=r"decoding.max_new_tokens=4: the answer 9\d\d\d takes 5 tokens"
    ):
        check_answer_length(make_tokenizer(), questions, 4)
