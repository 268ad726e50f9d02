"""Wrong settings of every command: one line that names setting, rule and value, exit code 2, and no weights loaded."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from harness.local.engine.pair import PlacedPair
from in_process import Harness

URL = "engine=server engine.url=http://h/v1"
LONG = 300 * "x"
VERY_LONG = "/".join(50 * ["x" * 100])
# What is typed, and how the line begins: one or two of each kind, and rules that no other test has.
MISTAKES = {
    # The command line
    "latncy": "latncy: no such command (did you mean latency?); there are: latency,",
    "foo=8": "foo=8: no such command; there are: latency,",
    "latency 7B": "7B: cannot be read as setting=value; a server's command is typed behind --",
    "latency model = 7B": "model: cannot be read as setting=value",
    "latency =3": "=3: is a value without its setting",
    "latency numprompts=3 temprature=0 K=4": "numprompts: no such setting (did you mean num_prompts?);"
    " temprature: no such setting (did you mean decoding.temperature?); harness help latency all lists them",
    "latency model.temperature=2": "model.temperature: no such setting (did you mean decoding.temperature?)",
    "latency command=eval": "command: no such setting",
    "latency launcher=ray": "launcher: no such setting (did you mean +launcher?)",
    "latency quantization=4bit": "quantization: may be model.quantization or draft.quantization: type one of them",
    "latency --num-prompt 30": "--num-prompt: no such option (did you mean num_prompts?); harness help latency all",
    "latency --temperature -m": "--temperature: needs a value: decoding.temperature=...",
    "latency --num-prompts 0 --test": "num_prompts=0: must be at least 1",
    "latency --cfg nope": "--cfg=nope: is followed by one of job, hydra, all",
    "latency -cd": "-cd: is followed by a value",
    "latency --resolve": "--resolve: needs --cfg job, or --help",
    "latency K=2,4": "settings: Ambiguous value for argument 'decoding.num_draft_tokens=2,4' 1. To use it as a list",
    "latency hydra.run.dir=null": "settings: Error merging override hydra.run.dir=null: field 'hydra.run.dir' is not",
    "latency ~draft": "draft: must be set",
    f"latency seed={5000 * '9'}": "seed: a number is too long, or brackets are nested too deeply",
    f"latency placement.device_map={3000 * '['}{3000 * ']'}": "placement.device_map: a number is too long, or",
    "bisect versions=1,2 -- a {x} -- b {x}": "--: is followed by one command",
    "latency -- llama-server -m a.gguf -md b.gguf":
        "the command behind --: nothing in it makes llama.cpp speculate, -md alone does not: "
        "add --spec-type draft-simple",
    "latency -m K=2,4 -- sh -c 'exec vllm serve A --port {port} --n {K} --api-key X'":
        "the command behind --: --api-key: what is typed is written into files",
    "bisect versions=1,2 -- sh -c 'HF_TOKEN=x exec a {port} {x}'":
        "the command behind --: HF_TOKEN: what is typed is written into files",
    # Names of presets, and paths
    "latency model=7C": "model=7C: no such preset (did you mean 7B?)",
    "latency model=null": "model=null: must be a preset",
    "latency draft=null": "draft=null: must be a preset; draft=none measures the target alone",
    "latency model='{dtype: float16}'": "model={dtype: float16}: no such preset",
    "latency +pair=7B+tiny_draf": "draft=tiny_draf: no such preset (did you mean tiny_draft?)",
    "latency draft=tiny_draf_8bit": "draft=tiny_draf: no such preset (did you mean tiny_draft?)",
    "latency model=llama": "model=llama: no such preset (did you mean ./llama?)",
    "latency model=tiny_eagle3": "model=tiny_eagle3: is a head that drafts for another model: draft=tiny_eagle3",
    "latency draft=./mine.py": "draft=./mine.py: must name a class of the file too: ./mine.py:Mine",
    "latency draft=./mine.py:Mine": "draft=./mine.py:Mine: must inherit from harness.local.drafting.method.Method or",
    "latency model=./weights.bin": "model=./weights.bin: is a file; the model is named by its directory, .",
    "latency model=.": "model=.: the directory holds no config.json (did you mean ./trained?)",
    "latency draft=owner/name/tree/main": "draft=owner/name/tree/main: must be the repository's name alone: owner/name",
    f"latency model=./{LONG}": f"model=./{LONG}: must not have a name of more than 255 bytes",
    f"latency model=./{VERY_LONG}": f"model=./{VERY_LONG}: must have at most 4,095 bytes",
    "latency prompts=./deep.jsonl": "prompts=./deep.jsonl: line 2 has a number that is too long, or brackets nested",
    "latency results.file=results/.csv": "results.file=results/.csv: has nothing before .csv",
    "latency results.file=none": "results.file=none: must name a file; null collects no rows",
    "latency results.file=./fifo": "results.file=fifo: cannot be written: it is not a regular file",
    "latency results.file=./loop.csv": "results.file=loop.csv: cannot be written: Too many levels of symbolic links",
    "latency hydra.run.dir=results": "hydra.run.dir=results: must be another directory than that of results.file=",
    # Values
    "latency batch_size=two": "batch_size=two: must be a whole number",
    "latency num_prompts=many": "num_prompts=many: must be a whole number or auto",
    "latency seed=true": "seed=true: must be a whole number",
    "latency test=yes": "test=yes: must be true or false",
    "latency decoding.top_p=nan": "decoding.top_p=nan: must be a number",
    f"eval seeds=[{10**400}]": f"seeds=[{10**400}]: must be below 2^63",
    "latency placement.device_map=[1]": "placement.device_map=[1]: must be a mapping",
    "latency weights=randm": "weights=randm: must be one of stored, random (did you mean random?)",
    "latency temperature=-1": "decoding.temperature=-1.0: must not be negative",
    "latency decoding.max_new_tokens=600": "decoding.max_new_tokens=600: leaves no room for a prompt: the context",
    "latency precision=2% budget=soon": "budget=soon: must be a time, such as 10min, 90s or 2h",
    "plan gpu_memory=40": "gpu_memory=40: must be an amount with its unit, such as 40GB or 80GiB (did you mean 40GB?)",
    "plan gpus=4": "gpu_memory: must say what each of the pretended GPUs has, such as gpu_memory=40GB",
    # What has no meaning together
    "latency job_timeout_s=60": "job_timeout_s=60.0: needs -m: it ends jobs of a sweep",
    "latency draft=lookup threshold=0.5": "draft.threshold=0.5: is for models, heads and suffix, not for draft=lookup",
    "latency weights=random model=gpt2 draft=7B": "draft=7B: must have the vocabulary of model=gpt2",
    "latency decoding.synthetic_acceptance=5.5":
        "decoding.synthetic_acceptance=5.5: must be in [0, 1], or a mean length of at most K + 1 = 5",
    "recovery fault=residual_warped_twice decoding.temperature=1":
        "fault=residual_warped_twice: changes nothing at decoding.temperature=1",
    "latency engine=local engine.url=http://h/v1": "engine.url: needs engine=server",
    "latency engine=huggingface runner=static": "runner=static: needs engine=local",
    "latency engine=huggingface draft=tiny_medusa": "draft=tiny_medusa: must be a model, a DFlash head, mtp",
    "plan draft=7B_2GPUs gpus=2 gpu_memory=40GB": "draft.gpus=2: must be 1: a draft is whole on one GPU",
    # Servers
    "latency engine=server": "engine.url=null: must be set, or a server's command typed last",
    "latency engine=server \"engine.url='http://h/v1?key=x'\"": "engine.url=***: must hold no user, password or query",
    "latency engine=server engine.url=gpu1:8000": "engine.url=gpu1:8000: must be an address",
    f"latency {URL} engine.dialect=vlm": "engine.dialect=vlm: no such name (did you mean vllm?)",
    f"latency {URL} engine.blocks=4": "engine.blocks=4: is for servers that the harness starts",
    f"latency {URL} 'engine.extra={{temperature: 1}}'": "engine.extra={temperature: 1}: must not hold",
    "serve host=127.evil.example": "api_key_variable=null: must name a variable with a key, because others can reach",
    # bisect
    "bisect versions=1,2 -- llama-server": "the command: must have {version} or {commit} where that goes",
    "bisect versions=1,2,1 -- a {x}": "versions=1,2,1: must name each version once",
    "bisect versions=1,2 good=2 bad=1 -- a {x}": "bad=1: must come after good=2 in versions=",
    "bisect -- a {commit}": "good: must be a commit: harness bisect good=v1.2 bad=HEAD",
}  # fmt: skip


@pytest.mark.slow  # all together
@pytest.mark.parametrize("typed", MISTAKES, ids=lambda typed: typed[:80])
def test_a_mistake_is_one_line(
    typed: str, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(PlacedPair, "load", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name in ("llama", "trained"):
        (tmp_path / name).mkdir()
    (tmp_path / "trained" / "config.json").write_text("{}")
    (tmp_path / "weights.bin").touch()
    (tmp_path / "mine.py").write_text("class Mine:\n    def propose(self): ...\n")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    (tmp_path / "deep.jsonl").write_text(
        '{"prompt": "x"}\n{"prompt": ' + 200_000 * "[" + 200_000 * "]" + "}\n"
    )
    assert harness.refused(*shlex.split(typed)).startswith(MISTAKES[typed])
