import pytest


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the commands draw less than a user's may: these faults are large."""
    monkeypatch.setattr("harness.commands.recovery.record.FEWEST_DRAWS", 100)
