"""Every command with every choice of every group becomes settings."""

import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path

import pytest
from hydra import compose
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode

from composing import composed, composed_line, composing
from documented import ROOT, typed_lines, words_of
from harness.cli.manifest import Manifest
from harness.cli.names import CONF
from harness.commands.registry import COMMANDS, with_settings
from recipes import described
from recipes.reference_pages import departures

# model/ has its own test, launchers are tried in tests/cli/test_launchers.py; hydra/ is no menu for users.
# What may stand in place of a command.
NO_COMMANDS = ("help", "SETTINGS")
CHOICES = [
    f"{group.name}={preset.stem}"
    for group in sorted(CONF.iterdir())
    if group.is_dir() and group.name in ("decoding", "placement", "prompts")
    for preset in sorted(group.glob("*.yaml"))
]


@pytest.fixture(autouse=True)
def _hydra() -> Iterator[None]:
    with composing():
        yield


def test_every_documented_command_line_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_methods: None
) -> None:
    monkeypatch.chdir(tmp_path)
    # In a job of Slurm's.
    monkeypatch.setenv("SLURM_JOB_ID", "17")
    # The files that command lines read before anything is measured.
    pages = [ROOT / "docs" / f"{name}.md" for name in ("your-own-method", "losslessness")]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for code in re.findall("```python\n(.*?)```", text, re.DOTALL):
        name = re.match("# (.*)", code)[1]
        (tmp_path / name).write_text(code)
    lines = typed_lines()
    assert len(lines) > 130
    wrong = []
    for line in lines:
        command, *words = words_of(line)
        is_known = command in NO_COMMANDS or command.startswith(("-", "./"))
        if not is_known and command not in COMMANDS.names():
            wrong.append(f"{line}: no such command")
        # Other commands take paths, or stand for one in a file. Presets alone have a test of their own.
        presets_alone = len(words) == 1 and words[0].startswith("+experiment=")
        # tests/test_cli.py runs those with presets of one's own.
        own_presets = "--config-dir" in words
        if command not in with_settings() or presets_alone or own_presets or "--help" in words:
            continue
        try:
            composed_line(command, words)
        except Exception as error:
            wrong.append(f"{line}: {error}")
    assert wrong == [], "\n".join(wrong)


@pytest.mark.parametrize("choice", CHOICES)
def test_every_choice_composes(choice: str) -> None:
    group, _, name = choice.partition("=")
    chosen = composed("latency", choice)
    assert getattr(chosen, group) != name


@pytest.mark.parametrize(
    "name", [preset.stem for preset in sorted((CONF / "experiment").glob("*.yaml"))]
)
def test_every_job_of_every_experiment_composes(name: str) -> None:
    command = "eval" if "accuracy" in name else "latency"
    config = compose(command, [f"+experiment={name}"], return_hydra_config=True)
    assert config.hydra.mode is RunMode.MULTIRUN
    choices = {key: str(values).split(",") for key, values in config.hydra.sweeper.params.items()}
    first = {key: values[0] for key, values in choices.items()}
    jobs = [first | {key: value} for key, values in choices.items() for value in values]
    for job in jobs:
        overrides = [f"{key}={value}" for key, value in job.items()]
        chosen = composed(command, f"+experiment={name}", *overrides)
        if pair := job.get("+pair"):
            assert chosen.model.name + (f"+{chosen.draft.name}" if chosen.draft else "") == pair
        if prompts := job.get("prompts"):
            assert chosen.prompts.name == prompts


def test_what_is_typed_replaces_the_list_of_an_experiment(tmp_path: Path) -> None:
    typed = ["decoding.num_draft_tokens=1,auto", "seed=1,2"]
    overrides = ["+experiment=tiny", f"hydra.sweep.dir={tmp_path}", *typed]
    loader = GlobalHydra.instance().config_loader()
    config = loader.load_configuration("latency", overrides, run_mode=RunMode.MULTIRUN)
    manifest = Manifest.of(config, loader)
    varying = ["decoding.temperature", "decoding.num_draft_tokens", "seed"]
    assert (list(manifest.choices), manifest.num_jobs) == (varying, 8)
    # Hydra has this many.
    arguments = [f"{key}={value}" for key, value in config.hydra.sweeper.params.items()] + typed
    typed_settings = OverridesParser.create().parse_overrides(arguments)
    (jobs,) = BasicSweeper.split_arguments(typed_settings, None)
    assert len(jobs) == 8


@pytest.mark.parametrize("command", with_settings())
def test_a_setting_that_is_not_typed_has_the_default_of_its_class(command: str) -> None:
    chosen = composed(command)
    differing = {**departures("common"), **departures(command)}
    settings = described.described(type(chosen))
    for group in ("decoding", "placement"):
        settings += described.group_settings(group)
    for setting in settings:
        default = differing.get(setting.name, setting.value)
        assert attrgetter(setting.name)(chosen) == default, setting.name
    # A plan is no measurement, and a service none either: they are collected only in a file that is named.
    is_collected = command not in ("plan", "serve")
    assert chosen.results.file == (f"results/{command}.csv" if is_collected else None)


def test_what_is_left_out_follows_the_model() -> None:
    for model, draft, prompts in [
        ("tiny", "tiny_draft", "tiny"),
        ("tiny_8bit", "tiny_draft", "tiny"),
        ("tiny_draft", None, "tiny"),
        ("7B", None, "english"),
        ("./tiny", None, "english"),
    ]:
        chosen = composed("latency", f"model={model}")
        assert (chosen.draft and chosen.draft.name) == draft
        assert chosen.prompts.name == prompts


@pytest.mark.parametrize(
    ("path", "directory"), [("./files/llama.Q4.gguf", "files"), ("llama.Q4.gguf", ".")]
)
def test_a_gguf_file_is_a_model(path: str, directory: str) -> None:
    chosen = composed("latency", f"model={path}").model
    assert (chosen.repository, chosen.gguf_file) == (directory, "llama.Q4.gguf")


def test_a_prompt_file_is_a_prompt_set() -> None:
    chosen = composed("latency", "prompts=questions.jsonl").prompts
    assert (chosen.name, chosen.file) == ("questions", "questions.jsonl")
