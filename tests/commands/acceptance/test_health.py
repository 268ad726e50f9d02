"""Does a server accept what the weights of its draft say? Our own `serve`, honest and with planted faults.

A healthy drafter is called broken in one run of a million.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import echo_server
from echo_server import EchoServer
from echo_server import serving as echoing
from harness.local.drafting.heads.unread import UnreadFeatures
from in_process import Harness, results
from served import serving

SHIPPED = Path(__file__).parents[3] / "harness" / "local" / "models" / "shipped"
ASKED = [
    *["num_prompts=10", "texts_per_prompt=1", "batch_size=10"],
    *["decoding.max_new_tokens=64", "up_to=4"],
]

# Settings of the server and of the client.
Planted = tuple[list[str], list[str]]


def copied(name: str, directory: Path) -> Path:
    shutil.copytree(SHIPPED / name, directory)
    return directory


def changed(directory: Path, **changes: object) -> Path:
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | changes))
    return directory


def off_by_one(directory: Path) -> Planted:
    """A head that reads the target's states of the token before."""
    return ["draft=tiny_eagle3"], ["draft=tiny_eagle3"]


def read_the_token_before() -> None:
    """Plant that in the server's process."""
    observe = UnreadFeatures.observe
    add = UnreadFeatures.add
    UnreadFeatures.observe = lambda self, hidden, *rest: observe(self, hidden.roll(1, 1), *rest)  # type: ignore[method-assign]
    UnreadFeatures.add = lambda self, hidden, *rest: add(self, hidden.roll(1, 1), *rest)  # type: ignore[method-assign]


def without_its_window(directory: Path) -> Planted:
    """A draft with a sliding window, which the server reads as full attention."""
    window = {"model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 2}
    changed(copied("tiny_draft", directory), **window)
    return ["draft=tiny_draft"], [f"draft={directory}"]


def other_template(directory: Path) -> Planted:
    """A server that puts prompts into another chat template than the model's."""
    for name, template in (("server", " 7 * 8 ="), ("client", "")):
        model = copied("tiny", directory / name)
        config = json.loads((model / "tokenizer_config.json").read_text())
        written = f"{{{{ messages[-1]['content'] }}}}{template}"
        (model / "tokenizer_config.json").write_text(
            json.dumps(config | {"chat_template": written})
        )
    server = [f"model={directory}/server", "draft=tiny_draft"]
    client = [f"model={directory}/client", f"engine.model={directory}/server", "draft=tiny_draft"]
    return server, [*client, "engine.chat=true", "prompts=tiny"]


def honest(directory: Path) -> Planted:
    return ["draft=tiny_eagle3"], ["draft=tiny_eagle3"]


def greedily(directory: Path) -> Planted:
    """A server that drafts greedily, as most do; the client does not know."""
    return ["draft=tiny_draft", "draft.sampling=greedy"], ["draft=tiny_draft"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plant", "health"),
    [
        (honest, "as its weights say"),
        (greedily, "as its weights say"),
        (off_by_one, "broken"),
        (without_its_window, "broken"),
        (other_template, "other texts"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_planted_fault_is_seen(
    harness: Harness, tmp_path: Path, plant: Callable[[Path], Planted], health: str
) -> None:
    of_server, of_client = plant(tmp_path / "planted")
    before = read_the_token_before if plant is off_by_one else None
    with serving(tmp_path, *of_server, before=before) as (url, _):
        address = [f"engine.url={url}/v1", "engine=server"]
        outcome = harness("acceptance", *address, *of_client, *ASKED, code=None)
    assert outcome.exit_code == (0 if health == "as its weights say" else 1), outcome
    rows = results("acceptance").set_index("num_draft_tokens")
    assert rows.health[4] == health, outcome
    assert rows.health[[1, 2, 3]].isna().all()
    assert (rows.draft_sampling == "greedy").all() == (plant is greedily)


def test_a_server_that_reports_nothing_cannot_be_judged(harness: Harness) -> None:
    with echoing(EchoServer()) as url:
        asked = ["engine=server", f"engine.url={url}", "model=tiny_draft", "draft=lookup"]
        outcome = harness("acceptance", *asked, *ASKED, "decoding.max_new_tokens=4", code=None)
    # An echo writes nothing that a model would.
    assert outcome.exit_code == 1
    assert "texts are not" in outcome.complaint


def test_only_the_server_that_is_judged_is_started(harness: Harness) -> None:
    echo = [sys.executable, str(Path(echo_server.__file__)), "--port", "{port}", "-k", "4"]
    asked = ["model=tiny_draft", "draft=lookup", *ASKED, "decoding.max_new_tokens=4"]
    outcome = harness("acceptance", *asked, "--", *echo, code=1)
    assert "texts are not" in outcome.complaint
