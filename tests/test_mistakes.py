"""Wrong settings of every command: one line that names setting, rule and value, exit code 2, and no weights loaded."""

import os
import pickle
import shlex
from pathlib import Path

import pytest

from composing import composed_line, composing
from harness.local.engine.pair import PlacedPair
from in_process import Harness
from report_files import latency_run, write
from wicked_engine import FILE

URL = "engine=server engine.url=http://h/v1"
LONG = 300 * "x"
# What is typed, and how the line begins: one or two of each kind, and rules that no other test has.
MISTAKES = {
    # The command line
    "latncy": "latncy: no such command (did you mean latency?); there are: latency,",
    "-- llama-server": "--: no such command; there are: latency,",
    "latency 7B": "7B: must be setting=value, in quotes if it has spaces; a server's command is typed after --",
    "latency model = 7B": "model: must be setting=value",
    "latency numprompts=3 temprature=0 K=4": "numprompts: no such setting (did you mean num_prompts?);"
    " temprature: no such setting (did you mean decoding.temperature?); harness help latency all lists them",
    "latency quantization=4bit": "quantization: may be model.quantization or draft.quantization: type one of them",
    "latency --num-prompts 30": "--num-prompts: settings are typed as num_prompts=VALUE",
    "latency --tempratur=0": "--tempratur=0: no such option (did you mean decoding.temperature?); for all settings",
    "latency --experimental-rerun made.pickle": "--experimental-rerun: no such option",
    "latency -cn map": "-cn: no such option",
    "latency --wat": "--wat: no such option; for all settings type harness help latency all",
    "latency tokens=1": "decoding.max_new_tokens=1: must be at least 2 with a draft: it proposes nothing",
    "latency -m K=2,4 --cfg job": "-m: cannot be combined with --cfg: leave one of them out",
    "latency --cfg job -- a -- b -- c": "--cfg: shows one run: type at most two commands after --",
    "latency -m 'seed=range(0,3,0)'": "settings: range() arg 3 must not be zero",
    "latency prompts='One day, in a/b'": "prompts=One day, in a/b: a text goes into a file, one prompt on each line:",
    "latency prompts=./": "prompts=./: must be a file, or the directory of a run with acceptance_texts.csv or",
    "latency ~draft": "~draft: cannot be deleted: draft=none measures without one",
    "latency -m ~prompts K=2,4": "~prompts: cannot be deleted: type prompts=VALUE",
    "latency K=2,4": "decoding.num_draft_tokens=2,4: has several values: -m measures each",
    "latency hydra/launcher=joblib -m K=2,4": "hydra/launcher=joblib: is not installed, only basic, submitit_local,"
    " submitit_slurm; pip install hydra-joblib-launcher brings it",
    "latency -m K=2, 4": "K=2,: ends in a comma: type no spaces between values, K=2,4",
    "latency -m repeats=1,3": "repeats=1,3: has one value for all jobs of a sweep",
    "latency repeats=5 repeat=2 dry_run=true": "repeats=5: must be typed as repeats=NUMBER, without repeat=",
    "latency -m 'draft=glob(nothing_*)' dry_run=true": "-m: there are no jobs, because glob(...) matches no preset",
    "latency -- llama-server -m a.gguf":
        "the command after --: no flag of it makes llama.cpp speculate: "
        "add --spec-type draft-simple -md DRAFT.gguf",
    "latency -m K=2,4 -- sh -c 'exec vllm serve A --port {port} --n {K} --api-key X'":
        "the command after --: --api-key: what is typed is written into files: leave it out, or set it in the"
        " environment; engine.api_key_variable names",
    "report 2026": "2026: no such file or directory, and no id of a run (its first 8 digits, or",
    "report empty": "empty: holds no CSV file of latency",
    "report notes.csv": "notes.csv: is no CSV file of latency",
    "report latency.csv output=notes.csv": "output=notes.csv: cannot be written to",
    "report latency.csv --pdf": "--pdf: no such argument; --help lists them",
    "report": "results: no such directory here",
    "latency --": "--: must be followed by the command of a server",
    "latency -m K=3,4 -- ./serve.sh {port}": "K=3,4: the command after -- has no {K}",
    "latency K=8 -- llama-server -m a -md b --spec-draft-n-max 4": "K=8: the command after -- has no {K}",
    "latency engine=local -- llama-server -m a.gguf": "--: requires engine=server",
    "latency -- sh ./serve.sh {port}": "the command after --: sh is not known here, nor what makes it speculate",
    "latency -- ./serve.sh {port}": "./serve.sh: no such program on this machine",
    "latency draft=lookup -- llama-server -m a -md b": "draft=lookup: the command after -- drafts with b",
    "latency -- llama-server -m a -md b K=4": "K=4: is a setting: type it before --",
    "latency -- OMP_NUM_THREADS=1 prompts=tiny llama-server -m a": "prompts=tiny: is a setting: type it before --",
    "plan -- llama-server -m a -md b": "model: must be named, and draft= too: plan starts no server and asks none",
    "latency draft=none -- sh {port} -- sh {port}": "draft=none: must not be none with two servers",
    "latency url=http://h/v1 -- sh {port} -- sh {port}": "engine.url=http://h/v1: is for a server that runs already",
    "serve -m seed=1": "-m: serve has no sweeps: leave it out",
    # Names of presets, and paths
    "latency model=7C": "model=7C: no such preset (did you mean 7B?)",
    "latency model=tiny_eagle3": "model=tiny_eagle3: is a head that drafts for another model: draft=tiny_eagle3",
    "latency engine=./nothing.py:Parrot": "engine=./nothing.py:Parrot: cannot be loaded: there is no file",
    f"latency 'engine={FILE}:FILE'": f"engine={FILE}:FILE: must inherit from harness.engines.record.EngineRecord",
    "latency draft=./mine.py:Other": "draft=./mine.py:Other: cannot be loaded: module 'mine' has no attribute",
    "latency draft=./script.py:Method": "draft=./script.py:Method: cannot be loaded: SystemExit",
    "latency engine=./unmade.py:Mine": "engine=./unmade.py:Mine: cannot be loaded: TypeError: Mine.__init__() missing",
    "latency draft=./mine.py:Mine": "draft=./mine.py:Mine: must inherit from harness.local.drafting.method.Method or",
    "latency model=./weights.bin": "model=./weights.bin: is a file; the model is named by its directory, .",
    f"latency model=./{LONG}": f"model=./{LONG}: must not have a name of more than 255 bytes",
    "latency prompts=./deep.jsonl": "prompts=deep.jsonl: line 2 has a number that is too long, or brackets nested",
    "latency results.file=./loop.csv": "results.file=loop.csv: cannot be written: Too many levels of symbolic links",
    "latency hydra.run.dir=results": "hydra.run.dir=results: must be another directory than that of results.file=",
    f"latency {9000 * 'x'}=1": f"{500 * 'x'}… (9,000 characters): no such setting",
    f"latency batch_size={9000 * 'x'}": f"batch_size={500 * 'x'}… (9,000 characters): must be a whole number",
    "eval +experiment=spec_bench_2024": "prompts: is a setting of latency, acceptance, compare, recovery alone",
    # Values
    "latency batch_size=two": "batch_size=two: must be a whole number",
    "latency weights=randm": "weights=randm: must be one of stored, random (did you mean random?)",
    "latency decoding.max_new_tokens=600": "decoding.max_new_tokens=600: leaves no room for a prompt: the context",
    "latency -m seed=range(1,10000000000)": "-m: makes more than 10,000 jobs: divide the sweep",
    "acceptance num_prompts=9999": "num_prompts=9999: the prompt set tiny has only ",
    "latency precision=2% budget=soon": "budget=soon: must be a time above 0 with its unit, such as 10min, 90s or 2h",
    "latency format=yaml": "results.format=yaml: must be one of text, json",
    "latency model=1e3": "model=1e3: ",
    "plan gpus=0xA100": "gpus=0: must be from 1 to 1024",
    "latency results.file=./.bash_aliases": "results.file=./.bash_aliases: must name a file that ends in .csv",
    "plan acceptance=0.56@4": "acceptance=0.56@4: must be from 1 to 5 tokens per iteration at K=4, or a rate",
    "plan acceptance=0%": "acceptance=0%: must be the probability that a draft token",
    "plan acceptance=3@4 K=2": "acceptance=3@4: is of another K than K=2: leave one of them out",
    "plan acceptance=0.7 draft=none": "acceptance=0.7: must be null without a draft",
    "recovery samplings=[]": "samplings=[]: must name at least one",
    "recovery samplings=[min_p]": "samplings=min_p: each must be one of as_asked, temperature, top_k, top_p",
    "latency engine=simulated num_prompts=4 batch_size=5": "batch_size=5: needs num_prompts=5 or more: 4 are measured",
    "plan acceptance=76.3%,62.3%,45.9%": 
        "acceptance=76.3%,62.3%,45.9%: has a rate for each position: type acceptance=2.845@3",
    "plan acceptance=0,7": "acceptance=0,7: has several values: -m measures each",
    "acceptance card=0.8,0.7": "card=0.8,0.7: has a rate for each position: type card=2.500 K=2, 1 +",
    "acceptance card=182%": "card=182%: must be an acceptance length, 3.24, or a rate of proposed tokens, 56% or 0.56",
    "plan gpu_memory=40": "gpu_memory=40: must be an amount with its unit, such as 40GB or 80GiB, or a GPU: A100",
    f"latency 'engine={FILE}:Wicked' engine.step_ms=0": "engine.step_ms=0.0: must be at least",
    f"latency 'engine={FILE}:Wicked' engine.stp_ms=2": "engine.stp_ms: no such setting (did you mean",
    # What has no meaning together
    f"latency 'engine={FILE}:Wicked' runner=static": "runner=static: needs engine=local",
    f"latency 'engine={FILE}:Wicked' engine.url=http://h/v1": "engine.url: needs engine=server",
    "latency K=auto": "decoding.num_draft_tokens=auto: must be a number with engine=local; engine=huggingface has",
    "plan draft=early_exit_8": "draft=early_exit_8: needs engine=huggingface",
    "latency draft=lookup sampling=greedy": "draft.sampling=greedy: is for models, heads and mtp, not for draft=lookup",
    "latency weights=random model=gpt2 draft=7B": "draft=7B: must have the vocabulary of model=gpt2",
    "latency decoding.synthetic_acceptance=5.5": "decoding.synthetic_acceptance=5.5: must be in [0, 1]",
    "recovery tokens=1": "decoding.max_new_tokens=1: must be at least 2: speculation decides no first token",
    "latency draft=server": "draft=server: needs engine=server with engine.regular_url",
    "acceptance causes=template,wether": "causes=template,wether: must be auto, all, none, or some of last,positions,",
    "acceptance card=0": "card=0.0: must be above 0",
    f"acceptance {URL} draft=tiny_draft": "model=served: must be named, as the draft's weights",
    "latency engine=simulated decoding.synthetic_acceptance=0.5":
        "decoding.synthetic_acceptance=0.5: needs engine=local",
    "recovery url=http://127.0.0.1:9/v1": "decoding.temperature=0.5: must be 0 with engine.chat=true: T=0 compares",
    "recovery url=http://127.0.0.1:9/v1 chat=false": "decoding.temperature=0.5: must be 0 with no model=: T=0 compares",
    "recovery engine=simulated": "engine=simulated: must decode a model",
    "latency engine=huggingface draft=tiny_medusa": "draft=tiny_medusa: must be a model, lookup or early_exit",
    "plan draft=7B_2GPUs gpus=2 gpu_memory=40GB": "draft.gpus=2: must be 1: a draft is whole on one GPU",
    "latency placement.gpus=4": "placement.gpus=4: must not exceed the number of GPUs, 0",
    # Servers
    "latency engine=simulated decoding.max_new_tokens=999999999999":
        "decoding.max_new_tokens=999999999999: must be at most 100,000: each is simulated",
    "latency regular_url=http://h/v1": "engine.regular_url: needs engine=server: name a server by url=, or type its",
    "latency engine=server": "engine.url=null: must be set, or a server's command typed last",
    "latency engine=server \"engine.url='http://h/v1?key=x'\"": "engine.url: key: what is typed is written into",
    "latency url=http://h/v1/v1/": "engine.url=http://h/v1/v1/: must be the base address, http://h/v1",
    "latency url=http://h/v1/chat/completions":
        "engine.url=http://h/v1/chat/completions: must be the base address, http://h/v1",
    "latency -- 'llama-server -m a.gguf'": "the command after --: is one quoted word: type it without quotes, -- ll",
    "audit baseline=8.76 speed=8.04ms": "speed: must have the same unit as baseline=",
    "audit speed=36 tok/s": "tok/s: is typed after a space: a figure and its unit are one word",
    "latency 'engine.url=http://h\n/v1'": r"engine.url='http://h\n/v1': must be an address such as",
    f"latency {URL} engine.dialect=vlm": "engine.dialect=vlm: no such name (did you mean vllm?)",
    f"latency {URL} 'engine.extra={{temperature: 1}}'": "engine.extra={temperature: 1}: must not hold",
    "serve host=127.evil.example": "api_key_variable=null: must name a variable with a key, because others can reach",
}  # fmt: skip


# What is typed, what its line advises, and that as words: a run with these composes.
ADVICE = {
    "eval seeds=1,2": ("'seeds=[1,2]'", "seeds=[1,2]"),
    "latency 'K=[2,4]'": (
        "must be a whole number or auto; -m decoding.num_draft_tokens=2,4 measures each",
        "-m decoding.num_draft_tokens=2,4",
    ),
    "latency device=cuda": ("placement=auto uses the GPUs here", "placement=auto"),
    "latency placement=cuda": ("placement.gpus=1 one of them", "placement.gpus=1"),
    "latency engine=hf": ("engine=huggingface is its generate()", "engine=huggingface"),
    "latency engine=vllm": (
        "harness latency -- vllm serve ...",
        "draft=none -- vllm serve a --port {port}",
    ),
    "latency engine=sglang": (
        "harness latency -- sglang serve ...",
        "draft=none -- sglang serve --model-path a",
    ),
    "latency model=7B_8bits": ("did you mean 7B_8bit?", "model=7B_8bit"),
    "latency draft=7B_3bit": ("did you mean 7B_8bit?", "draft=7B_8bit"),
}


@pytest.mark.parametrize("typed", ADVICE)
def test_what_a_mistakes_line_advises_can_be_typed(
    typed: str, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for program in ("vllm", "sglang"):
        (tmp_path / program).touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    command, *words = shlex.split(typed)
    advised, instead = ADVICE[typed]
    assert advised in harness.refused(command, *words)
    with composing():
        composed_line(command, shlex.split(instead))


class MakesDirectory:
    """Its pickle makes a directory where it is loaded."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, ("made",)


@pytest.mark.slow  # all together
@pytest.mark.parametrize("typed", MISTAKES, ids=lambda typed: typed[:80])
def test_a_mistake_is_one_line(
    typed: str, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_methods: None
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(PlacedPair, "load", None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name in ("llama", "trained"):
        (tmp_path / name).mkdir()
    (tmp_path / "trained" / "config.json").write_text("{}")
    (tmp_path / "weights.bin").touch()
    (tmp_path / "made.pickle").write_bytes(pickle.dumps(MakesDirectory()))
    (tmp_path / "mine.py").write_text("class Mine:\n    def propose(self): ...\n")
    (tmp_path / "script.py").write_text("raise SystemExit(0)")
    made = "from harness.engines.record import EngineRecord\nclass Mine(EngineRecord):\n    def __init__(self, n): ..."
    (tmp_path / "unmade.py").write_text(made)
    (tmp_path / "loop.csv").symlink_to("loop.csv")
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.csv").write_text("a,b\n1,2\n")
    write(tmp_path / "latency.csv", latency_run())
    deep = 200_000 * "[" + 200_000 * "]"
    (tmp_path / "deep.jsonl").write_text(f'{{"prompt": "x"}}\n{{"prompt": {deep}}}\n')
    assert harness.refused(*shlex.split(typed)).startswith(MISTAKES[typed])
    assert not (tmp_path / "made").exists(), "a pickle was executed"
