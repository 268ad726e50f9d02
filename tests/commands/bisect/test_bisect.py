"""`bisect`: the search on planted versions without servers, and once through real processes."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from forked import Forked
from forked import command as run_command
from harness.commands.bisect.search import Outcome, Search, Version
from harness.commands.bisect.starts import Starts, commits
from harness.config.command_line import Words
from harness.config.errors import RunError, SettingError
from harness.reporting.changes import Compared, Figure, Sides
from harness.reporting.names import name_of
from harness.results.runs import Run
from harness.results.statistics.comparisons import compare
from in_process import Harness
from report_files import latency_run
from wording import mentions

SUPPORT = Path(__file__).parents[2] / "support"
NUM_VERSIONS = 12
NUM_PROMPTS = 15
TIME = Figure("ms per token", "lower", ("faster", "slower"), timed=True)
RATE = Figure("tokens per second", "higher", ("faster", "slower"), timed=True)
# Standard deviation of a prompt within a start, in logarithms; that of a start is planted.
WITHIN = 0.02


@dataclass
class Planted:
    """Versions whose times are planted: those from `first_worse` on are slower.

    Attributes:
        start_noise: how far a start of a version is off, in logarithms; a number is the standard deviation of all.
        broken: versions that do not start.
        unknown: versions whose runs have no figure, and why.
        started: versions and the numbers of their starts, in turn.
    """

    rng: np.random.Generator
    first_worse: int
    slowdown: float
    start_noise: float | Callable[[np.random.Generator, int], float]
    broken: tuple[str, ...] = ()
    figure: Figure = TIME
    unknown: dict[str, str] = field(default_factory=dict)
    times: dict[str, np.ndarray] = field(default_factory=dict)
    started: list[tuple[str, int]] = field(default_factory=list)

    def measure(self, planned: Version) -> Run | str:
        version = planned.name
        self.started.append((version, planned.num_starts + 1))
        if version in self.broken:
            return "it does not start"
        run = Run([latency_run(seed=int(version))[-1]])
        level = np.log1p(self.slowdown) if int(version) >= self.first_worse else 0.0
        if callable(self.start_noise):
            start_offset = self.start_noise(self.rng, int(version))
        else:
            start_offset = self.rng.normal(0, self.start_noise)
        prompt_offsets = self.rng.normal(0, WITHIN, NUM_PROMPTS)
        # Prompts differ by far more than anything else.
        logs = np.linspace(0, 3, NUM_PROMPTS) + level + start_offset + prompt_offsets
        self.times[run.id] = np.exp(logs if self.figure.better == "lower" else -logs)
        return run

    def changes(self, sides: Sides) -> list[Compared]:
        before, after = (
            np.array([self.times[run.id] for run in runs]) for runs in (sides.before, sides.after)
        )
        row = sides.after[-1].last
        if (version := str(row.seed)) in self.unknown:
            return [Compared(row, row, TIME, name_of(row), reason=self.unknown[version])]
        comparison = compare(before, after, self.figure.better, sides.margin)
        return [Compared(row, row, self.figure, name_of(row), comparison.verdict, comparison)]

    def found(self, most_starts: int = 24, num_versions: int = NUM_VERSIONS) -> Outcome:
        versions = [Version(str(number), str(number)) for number in range(num_versions)]
        return Search(
            versions, self.figure.name, 0.02, most_starts, self.measure, self.changes
        ).find()


def one_in_ten_disturbed(rng: np.random.Generator, version: int) -> float:
    return float(rng.normal(0, 0.01) + np.log(1.1) * (rng.random() < 0.1))


def last_is_noisy(rng: np.random.Generator, version: int) -> float:
    return float(rng.normal(0, 0.08 if version == NUM_VERSIONS - 1 else 0.01))


def odd_are_noisy(rng: np.random.Generator, version: int) -> float:
    return float(rng.normal(0, 0.05 if version % 2 else 0.005))


def name_of_first_worse(outcome: Outcome) -> str | None:
    return None if outcome.first_worse is None else outcome.first_worse.name


def searches(number: int, slowdown: float, start_noise: Any) -> list[tuple[str | None, str, int]]:
    """What was found, what was planted, and how many starts that took."""
    found = []
    for seed in range(number):
        rng = np.random.default_rng(seed)
        first_worse = int(rng.integers(1, NUM_VERSIONS))
        outcome = Planted(rng, first_worse, slowdown, start_noise).found()
        found.append((name_of_first_worse(outcome), str(first_worse), len(outcome.runs)))
    return found


@pytest.mark.slow
def test_the_guilty_one_of_twelve_is_found_in_eight_starts() -> None:
    """In 19 of 20 searches, if versions differ by 12 % and starts of one version by 1 %.

    Of 300 searches, each right with a chance of 95 %, 262 or fewer are with one of 1e-9.
    """
    found = searches(300, slowdown=0.12, start_noise=0.01)
    in_eight = sum(first == planted and starts <= 8 for first, planted, starts in found)
    assert in_eight > 262
    assert all(first == planted for first, planted, _ in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slowdown", "start_noise", "knows_noise"),
    [
        (0.05, 0.04, True),
        (0.05, 0.04, False),
        (0.12, one_in_ten_disturbed, True),
        (0.0, last_is_noisy, True),
        (0.05, odd_are_noisy, True),
    ],
)
def test_where_noise_hides_the_change_nobody_is_accused(
    slowdown: float, start_noise: Any, knows_noise: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where each search names a wrong version with a chance of 8 %, more than 19 of 50 do so with a chance of 1e-9.

    A rule that takes what is likelier, on one start, names one in most. Where nine in ten searches find a change of
    12 %, 29 or fewer of 50 find it with a chance of 1e-9.
    """
    if not knows_noise:
        monkeypatch.setattr("harness.commands.bisect.search.SURE", 0.5)
        monkeypatch.setattr("harness.commands.bisect.search._LEVEL", np.inf)
        monkeypatch.setattr("harness.commands.bisect.search._FEWEST_OF_NAMED", 1)
    found = searches(50, slowdown, start_noise)
    wrong = sum(
        first is not None and not (slowdown and first == planted) for first, planted, _ in found
    )
    assert (wrong <= 19) == knows_noise
    assert slowdown < 0.1 or sum(first == planted for first, planted, _ in found) > 29


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ({"broken": ("5", "6")}, "it does not start"),
        ({"unknown": {"5": "", "6": ""}}, "has no ms per token"),
        ({"unknown": {"5": "other prompts", "6": "other prompts"}}, "other prompts"),
        ({"unknown": {"5": "other work", "6": "other work"}, "figure": RATE}, "other work"),
    ],
)
def test_a_version_that_cannot_be_compared_is_skipped(how: dict[str, Any], reason: str) -> None:
    outcome = Planted(np.random.default_rng(0), 6, 0.5, 0.005, **how).found()
    # Whether it was 5, 6 or 7 is not known: git bisect says the same.
    assert name_of_first_worse(outcome) == "7"
    assert [version.name for version in outcome.possible] == ["5", "6", "7"]
    skipped = {one.name: one.skipped for one in outcome.versions if one.skipped}
    assert skipped.keys() <= {"5", "6"}
    assert set(skipped.values()) == {reason}
    assert not any(one.chance or one.runs for one in outcome.versions if one.skipped)


@pytest.mark.parametrize("figure", [TIME, RATE], ids=lambda figure: figure.name)
def test_worse_is_slower_or_a_lower_rate(figure: Figure) -> None:
    """Starts of a version are numbered; what became better is not searched."""
    planted = Planted(np.random.default_rng(0), 6, 0.5, 0.005, figure=figure)
    outcome = planted.found()
    assert name_of_first_worse(outcome) == "6"
    assert outcome.possible == [outcome.first_worse]
    assert outcome.ratio(outcome.versions[-1]) == pytest.approx(
        1.5 if figure is TIME else 1 / 1.5, rel=0.03
    )
    assert planted.started[:2] == [("0", 1), ("11", 1)]
    assert sum(one.chance for one in outcome.versions) == pytest.approx(1)
    better = Planted(np.random.default_rng(0), 6, -0.3, 0.005, figure=figure)
    assert (better.found().possible, len(better.started)) == ([], 6)


def test_ends_that_do_not_differ_are_not_searched() -> None:
    planted = Planted(np.random.default_rng(0), NUM_VERSIONS, 0.0, 0.002)
    outcome = planted.found()
    assert outcome.first_worse is None
    assert not outcome.possible
    assert outcome.changed.verdict == "no worse"
    assert sorted(planted.started) == [(end, number) for end in ("0", "11") for number in (1, 2, 3)]
    assert not any(one.chance for one in outcome.versions)


@pytest.mark.parametrize("first_worse", [1, 2])
def test_a_version_is_named_when_it_and_the_one_before_it_were_started_twice(
    first_worse: int,
) -> None:
    outcome = Planted(np.random.default_rng(0), first_worse, 0.12, 0.01).found(num_versions=3)
    counts = [len(one.runs) for one in outcome.versions]
    assert name_of_first_worse(outcome) == str(first_worse)
    assert min(counts[first_worse - 1 : first_worse + 1]) == 2
    assert len(outcome.runs) == 5
    assert outcome.ratio(outcome.versions[0]) == 1
    assert outcome.changed.comparison is not None
    assert 2 * outcome.changed.comparison.p_value < 0.05


def test_with_too_few_starts_it_says_which_are_possible() -> None:
    planted = Planted(np.random.default_rng(1), 8, 0.5, 0.005)
    outcome = planted.found(most_starts=4)
    assert outcome.first_worse is None
    assert "8" in {version.name for version in outcome.possible}
    assert 1 < len(outcome.possible) < NUM_VERSIONS - 1
    assert len(outcome.runs) == 4


def test_starts_with_too_few_prompts_for_an_interval_end_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(f"{__name__}.NUM_PROMPTS", 7)
    planted = Planted(np.random.default_rng(0), 6, 0.5, 0.005)
    with pytest.raises(RunError):
        planted.found()
    assert len(planted.started) == 2


def test_a_start_that_is_measured_again_is_another_run(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    codes = [0, 0, 1]

    def run(command: Sequence[str], printed: Path) -> int:
        printed.parent.mkdir(parents=True, exist_ok=True)
        printed.write_text("harness: out of memory")
        return codes.pop(0) or harness(*command[3:]).exit_code

    monkeypatch.setattr("harness.commands.bisect.starts._run", run)

    def start(*, resumes: bool) -> Run | str:
        words = Words(["engine=simulated", "engine.step_ms={ms}", "num_prompts=2"])
        return Starts("ms", words, resumes=resumes).measure(Version("10", "10"))

    runs = [start(resumes=resumes) for resumes in (True, True, False, False, True)]
    ids = [run if isinstance(run, str) else run.id for run in runs]
    assert ids == [ids[0], ids[0], ids[2], "out of memory", ids[2]]
    assert ids[0] != ids[2]


@pytest.mark.slow
def test_a_slower_version_of_a_server_is_found_and_its_starts_are_kept(
    harness: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Versions are the delays of a server's tokens, in seconds; one is no number, so that it does not start.

    The first start is a new interpreter, the others are forked.
    """
    new_interpreters = [subprocess.Popen]

    def popen(command: list[str], *, stdout: Any, **options: Any) -> Any:
        if new_interpreters:
            return new_interpreters.pop()(command, stdout=stdout, **options)
        assert options["start_new_session"]
        return Forked(
            partial(run_command, command[3:]),
            environment=dict(os.environ),
            streams=dict.fromkeys((1, 2), stdout.fileno()),
            new_session=True,
        )

    patched = SimpleNamespace(**vars(subprocess) | {"Popen": popen})
    monkeypatch.setattr("harness.commands.bisect.starts.subprocess", patched)
    delays = "0.0010,broken,0.0100"
    server = f"{sys.executable} {SUPPORT / 'echo_server.py'} --port {{port}} --delay {{version}}"
    line = ["bisect", f"versions={delays}", "model=tiny", "num_prompts=9", "tokens=4"]
    line += ["decoding=greedy", "--", *shlex.split(server)]
    first = harness(*line)
    for expected in ("0.0100, or broken (skipped), is the first one slower", "over 99 % sure"):
        assert mentions(first.stdout, expected)
    assert "invalid float value: 'broken'" in first.stderr
    rows = list(Path("outputs/bisect").rglob("latency_prompts.csv"))
    assert len(rows) >= 2

    # Typed again it measures nothing but what failed, and says the same.
    again = harness(*line)
    assert again.stdout == first.stdout
    assert again.stderr.count("measured before") == len(rows)
    assert list(Path("outputs/bisect").rglob("latency_prompts.csv")) == rows


def test_commits_are_those_between_both_in_their_order(tmp_path: Path) -> None:
    def git(*words: str) -> str:
        command = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b", *words]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    git("init", "-q")
    hashes = []
    for number in range(4):
        git("commit", "-q", "--allow-empty", "-m", f"Change {number}")
        hashes.append(git("rev-parse", "HEAD"))
    found = commits(str(tmp_path), "HEAD~2", "HEAD")
    assert [version.name for version in found] == hashes[1:]
    assert found[-1].label.endswith(" Change 3")
    with pytest.raises(SettingError, match="must be a commit after good=HEAD"):
        commits(str(tmp_path), "HEAD", "HEAD~1")
    git("checkout", "-q", "-b", "aside", "HEAD~2")
    git("commit", "-q", "--allow-empty", "-m", "Aside")
    with pytest.raises(SettingError, match="must be a commit after good=aside"):
        commits(str(tmp_path), "aside", hashes[3])
    precious = tmp_path / "precious"
    for wrong in ("no-such", f"--output={precious}"):
        with pytest.raises(SettingError, match=f"good={wrong}: no commits"):
            commits(str(tmp_path), wrong, "HEAD")
    assert list(tmp_path.iterdir()) == [tmp_path / ".git"]
