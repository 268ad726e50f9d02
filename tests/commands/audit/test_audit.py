"""`audit` through what people type, good and bad."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from harness.commands.audit.command import main
from harness.config.command_line import Words
from harness.config.errors import SettingError, VerdictError

Audit = Callable[..., tuple[int, str]]


@pytest.fixture
def audit(capsys: pytest.CaptureFixture[str]) -> Audit:
    """What `audit` prints of arguments, on one line; with its exit code."""

    def run(*arguments: str) -> tuple[int, str]:
        code, message = 0, ""
        try:
            main(Words([*arguments]))
        except (SettingError, VerdictError) as error:
            code, message = error.exit_code, str(error)
            assert len(message.splitlines()) == 1
        return code, " ".join(f"{capsys.readouterr().out} {message}".split())

    return run


@pytest.mark.parametrize(
    ("arguments", "code", "expected"),
    [
        ("speedup=5.9 K=3", 1, "speed-up 5.9 is above 4: K=3 draft tokens and the target's own"),
        ("speedup=2.40 length=2.60 K=4", 0, "2.60 1.08 2.40× acceptance 4.62×"),
        ("speedup=2.0 K=3 acceptance=0.70", 0, "0.70 of proposed 3.10 1.55 (1.50 to 1.60) 2.00× (1.95"),
        ("length=6.2 k=4", 1, "tokens per iteration 6.2 is above 5"),
        ("length=0.56 K=1", 3, "is below 1: it leaves out the target's own token"),
        ("baseline=22.7 speed=40.6 acceptance=73.9% K=3", 0, "3.22 1.80 1.79×"),
        ("speedup=+34% length=1.90", 0, "1.90 1.42 1.34×"),
        # Nothing was checked, with an acceptance or without.
        ("baseline=38 speed=33.93", 3, "0.89×"),
        ("baseline=38 speed=33.93 acceptance=60%", 3, "0.89×"),
        # The ratio of what is printed, and what rounding leaves open.
        ("baseline=1 speed=2", 3, "2.00× (1.00 to 5.00)"),
        ("baseline=2 speed=3 K=4 length=3.00", 0, "2.00 (1.28 to 3.00) 1.50× (1.00 to 2.33)"),
        # Units, and commas by their digits.
        ("baseline=55.47ms speed=33.99ms length=2.3", 0, "2.30 (2.25 to 2.35) 1.41 (1.38 to 1.44) 1.63×"),
        ("baseline=41s speed=24.6s", 3, "1.67×"),
        ("baseline=22,7 speed=40,6 length=3,22", 0, "3.22 1.80 1.79×"),
        ("baseline=211.2 speed=1,022.9 length=5.9 K=7", 0, "5.90 1.22 4.84×"),
        ("baseline=211.2 speed=1,022 length=5.9", 2, "speed=1,022: may be 1022 or 1.022: write it without the comma"),
        # A name that is typed again is the next row's; one value holds for all rows.
        ("baseline=22.7 speed=40.6 baseline=88.9 speed=116.8 length=3.22", 0, "row 2 3.22 2.45 1.31×"),
        ("baseline=130 speed=161 acceptance=74% K=3 speed=118 acceptance=52% K=4", 0, "row 2 4 52% of proposed 3.08"),
        ("baseline=95 speed=600 K=4 acceptance=0.55", 1, "speed-up 6.32× by tokens/s is above 5: K=4 draft tokens"),
        # An impossible rate yields no tokens, which no other figure could be held against.
        ("baseline=20 speed=30 K=2 acceptance=180%", 1, "2 figures, 1 consistent, 1 impossible"),
        ("length=4.2 K=3 speed=50 baseline=20", 3, "2.50× (2.41 to 2.59)"),
        ("baseline=200 speed=1.5 length=3", 3, "means that an iteration costs 322 regular steps"),
        ("acceptance=0 K=3 baseline=20 speed=15", 0, "1.00 1.33"),
        ("acceptance=0", 3, "type at least two figures of a row"),
        ("acceptance=0 K=3 baseline=20 speed=15", 0, "almost no"),
        ("speedup=+0% length=2 K=3 baseline=20", 0, "1.00×"),
        ("speedup=-150% length=2 K=3 baseline=20", 2, "loses all, or more"),
        # Of 4 proposed tokens 2.60, of emitted 1.67: nothing takes less than a step.
        ("speedup=5 K=4 acceptance=0.4", 3, "is above the 2.60 (2.40 to 2.80) tokens per iteration, in no less"),
        # What holds it back: its cost or its acceptance, by which gains more; or why it is neither.
        ("baseline=50 speed=75.0 K=8 length=1.80", 0, "1.80 1.20 1.50× acceptance 7.50×"),
        ("baseline=14.5 speed=11.1 K=1 length=1.56", 0, "1 1.56 2.04 0.77× cost, even with all accepted 0.98×"),
        ("baseline=14.20 speed=38.30 K=2 length=2.51", 3, "2.51 0.93 2.70× less than one step"),
        ("baseline=14.20 speed=38.30 K=2 length=2.70", 0, "2.70 1.00 2.70× almost free, or computed 3.00×"),
        ("baseline=14.20 speed=8.30 K=2 length=1.01", 0, "1.01 1.73 0.58× almost nothing is accepted 1.74×"),
        # A user's gain, not the server's.
        (
            "baseline=400 regular_user_tokens_per_second=50.0 speed=600 user_tokens_per_second=150.0 K=8 length=3.30",
            0, "3.30 1.10 3.00×",
        ),
        # Of trees and fewer drafts than K, nobody knows what a rate gives.
        ("baseline=20 speed=40 K=8 p_min=0.75 acceptance=84%", 0, "8 84% 2.00× (1.93 to 2.08)"),
        # A share of 15 draft tokens, or of all tokens: 1 ÷ (1 - 0.8516).
        ("tool=dflash baseline=74.72 speed=194.80 K=15 acceptance=85.16%", 0, "of emitted 6.74 2.58 2.61×"),
        ("baseline=74.72 speed=194.80 K=15 acceptance=85.16%", 0, "85.16% of proposed 13.77 5.28 2.61× cost 3.03×"),
        ("baseline=74.72 speed=194.80 K=15 acceptance=85.16%", 0, "by other readings: of emitted 6.74 tokens"),
        ("tool=sglang K=15 acceptance=85.16%", 2, "tool=sglang: must be llama.cpp or vllm or dflash"),
        ("K=4 length=2.5", 0, "1 figure, 1 consistent"),
        ("speed=365 baseline=187 speedup=2.70", 3, "unlikely: the figure: speed-up 2.70 is not the ratio"),
        ("speed=74.1 baseline=41.2 speedup=2.1x", 3, "speed-up 2.1x is not the ratio of both speeds, 1.80×"),
        # What cannot be heads no page.
        ("K=4 length=6.2 speed=20 baseline=10", 1, "2 figures"),
    ],
)  # fmt: skip
def test_bare_figures(audit: Audit, arguments: str, code: int, expected: str) -> None:
    found, printed = audit(*arguments.split())
    assert (found, expected in printed) == (code, True), printed
    assert "nan" not in printed


def test_a_bad_argument_ends_in_one_line(audit: Audit) -> None:
    row = "takes figures, as a table has them in a row: audit baseline=22.7 speed=40.6 acceptance=73.9% K=3"
    for arguments, expected in (
        ([], row),
        (["table.md"], row),
        (["-"], row),
        (["K=4", "speedup=2", "table.md"], row),
        (["K=4", "lenght=3"], "lenght: no such argument (did you mean length?)"),
        (["K=-1", "speedup=2"], "K=-1: is no such number"),
        (["baseline=0", "speed=2"], "baseline=0: is no such number"),
        (
            ["acceptance=72", "speedup=2"],
            "acceptance=72: is no share: write 72% if it is in percent",
        ),
        (
            ["speedup=2,3,4"],
            "speedup=2,3,4: is no such number; write 40.6, 24.6ms, 73.9%, 1.79x or +79%, and type a name again",
        ),
        (
            ["speedup=2", "K=3", "speedup=3", "K=4", "K=5"],
            "speedup=2 and 3: must have one value, or one for each of 3 rows",
        ),
        (["speedup=34%"], "speedup=34%: may be a part: write +34% for a gain"),
    ):
        code, message = audit(*arguments)
        assert (code, expected in message) == (2, True), (arguments, message)
