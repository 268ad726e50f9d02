"""Wrong settings of every command: one line that names setting, rule and value, exit code 2, and no weights loaded."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import pytest

from harness.engines.pair import PlacedPair
from in_process import Harness

URL = "engine=server engine.url=http://h/v1"
SPLIT = "latency placement=tensor_parallel placement.gpus=2"
LONG = 300 * "x"
VERY_LONG = "/".join(50 * ["x" * 100])
# What is typed, and how the line begins. Each command has what its name says; `latency` stands for what all share.
MISTAKES = {
    # Hybrids
    "latency draft=suffix+lookup": "draft=suffix+lookup: must be lookup, suffix or another method that reads",
    "latency draft=suffix+none": "draft=suffix+none: must name a draft after the plus",
    "latency draft=lookup+tiny_eagle3 draft.tree=sequences": "draft.tree=sequences: must be chain, static or dynamic",
    "latency draft=lookup+tiny_draft draft.tree=dynamic": "draft.tree=dynamic: must be chain for draft=lookup+tiny_d",
    "latency draft=lookup+tiny_eagle3 draft.least_text=0": "draft.least_text=0: must be at least 1",
    "latency draft=suffix draft.least_text=3": "draft.least_text=3: is for hybrids, not for draft=suffix",
    "latency draft=suffix+tiny_eagle": "draft=tiny_eagle: no such preset (did you mean tiny_eagle3?)",
    # The command line
    "latncy": "latncy: no such command (did you mean latency?)",
    "reprot": "reprot: no such command (did you mean report?)",
    "latency model=7C": "model=7C: no such preset (did you mean 7B?)",
    "latency model=llama": "model=llama: no such preset (did you mean ./llama?)",
    "latency model='{dtype: float16}'": "model={dtype: float16}: no such preset",
    f"latency model={300 * 'x'}": f"model={300 * 'x'}: no such preset",
    f"latency model=./{LONG}": f"model.repository=./{LONG}: must not have a name of more than 255 bytes",
    f"latency draft=./{LONG}": f"draft.repository=./{LONG}: must not have a name of",
    f"latency model.tokenizer={LONG}": f"model.tokenizer={LONG}: must not have a name of",
    f"latency model.gguf_file={LONG}": f"model.gguf_file={LONG}: must not have a name of",
    f"latency model=./{VERY_LONG}": f"model.repository=./{VERY_LONG}: must have at most 4,095 bytes",
    f"distill output=./{LONG}": f"output=./{LONG}: must not have a name of",
    f"report {LONG}": f"{LONG}: must not have a name of",
    f"report output={LONG}": f"output={LONG}: must not have a name of",
    "latency draft='{}'": "draft={}: no such preset",
    "latency draft=tiny_draf": "draft=tiny_draf: no such preset (did you mean tiny_draft?)",
    "latency model=tiny_eagle3": "model=tiny_eagle3: is a head that drafts for another model: draft=tiny_eagle3",
    "plan model=tiny_medusa": "model=tiny_medusa: is a head that drafts for another model: draft=tiny_medusa",
    "latency draft=lokup": "draft=lokup: no such preset (did you mean lookup?)",
    "latency draft=tiny_draf_8bit": "draft=tiny_draf: no such preset (did you mean tiny_draft?)",
    "latency +pair=7B+tiny_draf": "draft=tiny_draf: no such preset (did you mean tiny_draft?)",
    "latency placement=balancd": "placement=balancd: no such preset (did you mean balanced?)",
    "latency prompts=englsh": "prompts=englsh: no such preset (did you mean english?)",
    "latency K=2": "K: no such setting (did you mean decoding.num_draft_tokens?)",
    "latency temperature=1": "temperature: no such setting (did you mean decoding.temperature?)",
    "latency decoding.top_pp=1": "decoding.top_pp: no such setting (did you mean decoding.top_p?)",
    "latency experiment=tiny": "experiment: is typed with a plus: +experiment=...",
    "latency pair=7B+tiny_draft": "pair: is typed with a plus: +pair=...",
    "latency -m launcher=joblib": "launcher: is typed with a plus: +launcher=...",
    "latency +seeds=3": "seeds: no such setting (did you mean seed?)",
    "eval prompts=english": "prompts: no such setting",
    "recovery recovery.fault=lenience": "recovery.fault: no such setting (did you mean fault?)",
    "latency decoding.k=2": "decoding.k: no such setting (did you mean decoding.num_draft_tokens?)",
    "latency --batch_size=4": "--batch_size=4: settings are typed without dashes: batch_size=4",
    "latency --model 7B": "--model: settings are typed without dashes: model=7B",
    "latency -model=7B -m": "-model=7B: settings are typed without dashes: model=7B",
    "latency --foo": "--foo: no such option",
    "latency model 7B": "model: is typed with an equals sign and no spaces: model=7B",
    "latency model = 7B": "model: is typed with an equals sign and no spaces: model=7B",
    "latency 7B": "7B: is a value without its setting: model=7B",
    "latency model=7": "model=7: must be a preset",
    "latency prompts=true": "prompts=true: must be a preset",
    "latency model=[tiny]": "model=[tiny]: must be a preset",
    "latency draft=./mine.py": "draft=./mine.py: must name a class of the file too",
    "latency model=./weights.bin": "model=./weights.bin: is a file; the model is named by its directory, .",
    "latency draft=./trained/config.json": "draft=./trained/config.json: is a file; the model is named by",
    "latency model=.": "model=.: the directory holds no config.json (did you mean ./trained?)",
    "plan model=tiny draft=./adapter": "draft=./adapter: the directory holds no config.json (it is an adapter",
    "latency target=tiny": "target: no such setting (did you mean model?)",
    "latency assistant_model=tiny": "assistant_model: no such setting (did you mean draft?)",
    "latency output=a.csv": "output: no such setting (did you mean results.file?)",
    "latency limit=3": "limit: no such setting (did you mean num_prompts?)",
    "latency gamma=2": "gamma: no such setting (did you mean decoding.num_draft_tokens?)",
    "latency device=cpu": "device: no such setting (did you mean placement?)",
    "latency decoding.max_new_tokens=600": "decoding.max_new_tokens=600: leaves no room for a prompt: the context",
    "latency draft=null": "draft=null: must be a preset; draft=none measures the target alone",
    "latency model=null": "model=null: must be a preset",
    "latency model=7B,13B": "model=7B,13B: several values need -m",
    "eval seeds=0,1": "seeds=0,1: several values need -m (a sweep) or brackets (a list)",
    "latency model": "model: cannot be read as setting=value",
    "latency batch_size=two": "batch_size=two: must be a whole number",
    "latency job_timeout_s=60": "job_timeout_s=60.0: needs -m: it ends jobs of a sweep",
    f"latency seed={5000 * '9'}": "settings: a number is too long, or brackets are nested too deeply",
    f"latency placement.device_map={3000 * '['}{3000 * ']'}": "settings: a number is too long, or brackets are nested",
    # Values
    "latency runner=graph": "runner=graph: must be one of auto, eager, static, compiled, graphs, graphs_only",
    "latency job_timeout_s=0": "job_timeout_s=0.0: must be positive",
    "latency decoding.num_draft_tokens=0": "decoding.num_draft_tokens=0: must be at least 1",
    "latency decoding.num_draft_tokens=1000000000000": "decoding.num_draft_tokens=1000000000000: must be at most 1024",
    "latency decoding.temperature=-1": "decoding.temperature=-1.0: must not be negative",
    "latency decoding.temperature=1e-300": "decoding.temperature=1e-300: must be 0 (greedy) or at least 0.0001",
    "latency decoding.top_p=1.5": "decoding.top_p=1.5: must be in (0, 1]",
    "latency decoding.rule=deepmnd": "decoding.rule=deepmnd: must be one of deepmind, google",
    "latency decoding.lenience=0.5": "decoding.lenience=0.5: below 1 needs decoding.rule=google",
    "latency decoding.top_p=nan": "decoding.top_p=nan: must be a number",
    "latency decoding.max_new_tokens=0": "decoding.max_new_tokens=0: must be at least 1",
    "latency num_prompts=0": "num_prompts=0: must be at least 1",
    "latency num_prompts=999999999999": "num_prompts=999999999999: must be at most 10^6",
    "latency seed=-1": "seed=-1: must not be negative",
    "latency seed=true": "seed=true: must be a whole number",
    "latency test=yes": "test=yes: must be true or false",
    "latency placement.strategy=even": "placement.strategy=even: must be one of auto, balanced",
    "latency placement.reserve_gb=-1": "placement.reserve_gb=-1.0: must not be negative",
    "latency placement.device_map=[1]": "placement.device_map=[1]: must be a mapping",
    "latency draft.quantization=2bit": "draft.quantization=2bit: must be one of none, 8bit, 4bit",
    "latency model.gpus=0": "model.gpus=0: must be at least 1",
    "latency placement.reserve_gb=inf": "placement.reserve_gb=inf: must be a number",
    "latency num_resamples=10000000000": "num_resamples=10000000000: must be at most 10^6",
    f"latency seed={10**30}": f"seed={10**30}: must be below 2^63",
    "latency prompts=./deep.jsonl": "prompts=./deep.jsonl: line 2 has a number that is too long, or brackets nested",
    "latency results.file=": "results.file=: must name a file; null collects no rows",
    "latency results.file=none": "results.file=none: must name a file; null collects no rows",
    "latency command=eval": "command: is the first word: python -m harness COMMAND",
    "latency ~command": "command: is the first word",
    "latency --cfg nope": "--cfg=nope: must be followed by one of job, hydra, all",
    "latency --cfg": "--cfg: is followed by a value of job, hydra, all",
    "latency -cd": "-cd: is followed by a value",
    "latency --info nope": "--info=nope: must be followed by one of all, config",
    "latency -c job -p nope": "-p=nope: must be followed by a setting or a group of settings",
    "latency -c job --package=decoding.top_pp": "--package=decoding.top_pp: must be followed by a setting or a group "
    "of settings (did you mean decoding.top_p?)",
    "latency hydra.run.dir=null": "hydra.run.dir=null: must name a directory",
    "plan -m seed=1,2 hydra.sweep.dir=null": "hydra.sweep.dir=null: must name a directory",
    "latency hydra.run.dir=results": "hydra.run.dir=results: must be another directory than that of results.file=",
    "latency --resolve": "--resolve: needs --cfg job, or --help",
    "latency 'decoding={temprature: 0}'": "decoding.temprature: no such setting (did you mean decoding.temperature?)",
    "latency results.file=/proc/x.csv": "results.file=/proc/x.csv: cannot be written: no file can be made in /proc",
    "latency results.file=./fifo": "results.file=fifo: cannot be written: it is not a regular file",
    # What has no meaning together
    "latency draft=mtp": "draft=mtp: needs multi-token-prediction layers, and model=tiny (llama)",
    "latency draft=eagle3": "draft=eagle3: is a head to be trained first: python -m harness distill",
    "latency weights=randm": "weights=randm: must be one of stored, random (did you mean random?)",
    "latency weights=random model=gpt2 draft=7B": "draft=7B: must have the vocabulary of model=gpt2",
    "eval weights=random": "weights=random: must be stored: random weights know no answers",
    "eval decoding.synthetic_acceptance=0.5": "decoding.synthetic_acceptance=0.5: must be null",
    "latency decoding.synthetic_acceptance=5.5":
        "decoding.synthetic_acceptance=5.5: must be in [0, 1], or a mean length of at most K + 1 = 5",
    "latency decoding.synthetic_acceptance=2.5 decoding.num_draft_tokens=auto":
        "decoding.synthetic_acceptance=2.5: must be in [0, 1], because a mean length",
    "latency decoding.synthetic_acceptance=[0.9,1.1]":
        "decoding.synthetic_acceptance=[0.9,1.1]: must have rates in [0, 1]",
    "latency decoding.synthetic_acceptance=often": "decoding.synthetic_acceptance=often: must be a number, a list",
    "latency decoding.synthetic_acceptance=./none.json": "decoding.synthetic_acceptance=./none.json: cannot be read",
    "latency decoding.synthetic_acceptance=-0.1": "decoding.synthetic_acceptance=-0.1: must be in [0, 1]",
    "latency decoding.synthetic_acceptance=0.5 decoding.rule=google decoding.lenience=0.5":
        "decoding.synthetic_acceptance=0.5: replaces the acceptance rule, so that lenience has no effect",
    "recovery decoding.synthetic_acceptance=0.5 fault=rollback_off_by_one":
        "fault=rollback_off_by_one: must be none where decoding.synthetic_acceptance replaces the acceptance rule",
    f"{SPLIT} decoding.num_draft_tokens=auto":
        "decoding.num_draft_tokens=auto: must be a number with tensor_parallel",
    f"{SPLIT} model=tiny_8bit": "model.quantization=8bit: cannot be combined with tensor_parallel",
    f"{SPLIT} placement.offload=cpu": "placement.offload=cpu: cannot be combined with tensor_parallel",
    f"{SPLIT} placement.device_map={{model:cpu}}": "placement.device_map={model:cpu}: cannot be combined with",
    f"{SPLIT} draft.placement=balanced": "draft.placement=balanced: cannot be combined with tensor_parallel",
    # Engines
    "latency engine=huggingface batch_size=2": "batch_size=2: must be 1 with engine=huggingface",
    "latency engine=huggingface runner=static": "runner=static: needs engine=local",
    "latency engine=huggingface draft=suffix": "draft=suffix: must be a model, lookup or early_exit with engine=h",
    "latency engine=huggingface draft=tiny_eagle3": "draft=tiny_eagle3: must be a model, lookup or early_exit with",
    "latency engine=huggingface draft=lookup engine.schedule=adaptive": "engine.schedule=adaptive: must be constant",
    "latency engine=huggingface decoding.rule=block": "decoding.rule=block: needs engine=local",
    "latency engine=huggingface decoding.rule=google decoding.lenience=0.5": "decoding.rule=google: needs engine=local",
    "latency engine=huggingface decoding.synthetic_acceptance=0.5":
        "decoding.synthetic_acceptance=0.5: needs engine=local, vllm or server",
    "latency engine=huggingface decoding.num_draft_tokens=auto":
        "decoding.num_draft_tokens=auto: must be a number with engine=huggingface",
    "recovery engine=huggingface batch_size=1 fault=lenience": "fault=lenience: needs engine=local",
    "latency engine=vllm draft=early_exit": "draft=early_exit: must be a model, a head, lookup, suffix or mtp",
    "plan engine=vllm draft=early_exit_2": "draft=early_exit_2: must be a model, a head, lookup, suffix or mtp",
    "plan engine=vllm draft=suffix+tiny_eagle3": "draft=suffix+tiny_eagle3: must be a model, a head, lookup, suffix",
    "plan engine=vllm draft=tiny_eagle3 draft.layers=[1,2,3]": "draft.layers=[1,2,3]: must be null with engine=vllm",
    "plan engine=vllm draft=tiny_draft_8bit": "draft.quantization=8bit: must be none or 4bit with engine=vllm",
    "plan engine=vllm placement=sequential": "placement=sequential: must be auto with engine=vllm",
    "plan engine=huggingface draft=lookup+tiny_draft": "draft=lookup+tiny_draft: must be a model, lookup or early_exit",
    "plan engine=huggingface draft=tiny_medusa": "draft=tiny_medusa: must be a model, lookup or early_exit",
    "plan engine=huggingface draft=lookup engine.schedule=adaptive": "engine.schedule=adaptive: must be constant",
    "latency engine=vllm model.quantization=8bit": "model.quantization=8bit: must be none or 4bit with engine=vllm",
    "latency engine=vllm placement=cpu": "placement=cpu: must be auto with engine=vllm",
    "latency engine=vllm decoding.rule=block": "decoding.rule=block: needs engine=local",
    "latency engine.tensor_parallel_size=2": "engine.tensor_parallel_size: needs engine=vllm",
    "latency engine=server": "engine.url=null: must be set with engine=server",
    "latency engine=server \"engine.url='http://h/v1?key=x'\"": "engine.url=***: must hold no user, password or query",
    f"latency {URL} engine.regular_url=http://h/v1 draft=none": "draft=none: must",
    "latency engine=server 'engine.url=\"http://[::1/v1\"'": "engine.url=***: must be an address",
    f"latency {URL} draft=lookup": "draft=lookup: needs engine.regular_url",
    f"latency {URL} engine.timeout_s=inf": "engine.timeout_s=inf: must be a number",
    f"latency {URL} engine.rate=inf": "engine.rate=inf: must be a number",
    "latency engine=server engine.url=gpu1:8000": "engine.url=gpu1:8000: must be an address",
    "latency engine.url=http://h/v1": "engine.url: needs engine=server",
    f"latency {URL} engine.rate=0": "engine.rate=0.0: must be positive",
    f"latency {URL} engine.slo={{ttft:500}}": "engine.slo={ttft: 500}: must be milliseconds by name, of ttft_ms and",
    f"latency {URL} engine.slo={{itl_ms:0}}": "engine.slo={itl_ms: 0}: must be milliseconds by name, of ttft_ms and",
    f"latency {URL} engine.metrics_url=localhost": "engine.metrics_url=localhost: must be an address",
    f"latency {URL} engine.timeout_s=0": "engine.timeout_s=0.0: must be positive",
    "latency engine=vllm engine.tensor_parallel_size=0": "engine.tensor_parallel_size=0: must be at least 1",
    "latency engine=huggingface engine.pipeline_parallel_size=2": "engine.pipeline_parallel_size: needs engine=vllm",
    "latency engine.schedule=adaptive": "engine.schedule: needs engine=huggingface",
    f"latency {URL} weights=random": "weights=random: must be stored",
    "latency draft=server": "draft=server: needs engine=server with engine.regular_url",
    # compare
    "compare 'prompt= '": "prompt= : must hold text",
    "compare prompt=a batch_size=2": "batch_size=2: must be 1",
    "compare prompt=a view=rase": "view=rase: must be one of text, race, log (did you mean race?)",
    # eval
    "eval operands=[5,1]": "operands=[5,1]: must be the lowest and the highest operand",
    "eval operands=[1]": "operands=[1]: must be",
    "eval operands=[-1,1]": "operands=[-1,1]: must be",
    "eval operands=[0,1000000001]": "operands=[0,1000000001]: must be the lowest and the highest operand",
    "eval seeds=[]": "seeds=[]: must name at least one seed",
    "eval seeds=[0,0]": "seeds=[0,0]: must not name a seed twice",
    "eval seeds=[0,-1]": "seeds=[0,-1]: must not be negative",
    "eval num_prompts=0": "num_prompts=0: must be at least 1",
    "eval task=divsion": "task=divsion: must be one of multiplication, addition",
    "eval task=../latency": "task=../latency: must be one of",
    # recovery
    "recovery draft=none": "draft=none: must be a model",
    "recovery fault=rollback": "fault=rollback: must be one of none, residual_warped_twice",
    "recovery load=1": "load=1: must be at least 2",
    "recovery engine=huggingface batch_size=1 load=4": "load=4: needs engine=local, vllm or server",
    "recovery num_draws=10": "num_draws=10: must be auto or at least 1000, and at most 10^8",
    "recovery shift=0": "shift=0.0: must be in (0, 0.5]",
    "recovery false_alarm_rate=2": "false_alarm_rate=2.0: must be in (0, 1)",
    "recovery num_prompts=0": "num_prompts=0: must be at least 1",
    # Trees
    "latency draft.tree=wide": "draft.tree=wide: must be one of chain, static, dynamic",
    "latency draft.budget=0": "draft.budget=0: must be from 1 to 256",
    "latency draft.score_temperature=0": "draft.score_temperature=0.0: must be auto or positive",
    "latency draft.rates=wide": "draft.rates=wide: must be a list of rates, or a speculation_profile.json",
    "latency draft.rates=missing.json": "draft.rates=missing.json: cannot be read: No such file",
    "latency draft.rates={a:1}": "draft.rates={a:1}: must be a list, not a mapping",
    "latency draft.rates=[2]": "draft.rates=[2.0]: must be a list of numbers in [0, 1]",
    "latency draft.tree=dynamic decoding.rule=typical": "decoding.rule=typical: must be one of deepmind, google, block",
    "latency draft.tree=static decoding.rule=eagle": "decoding.rule=eagle: is for draft.tree=dynamic",
    "latency decoding.rule=eagle": "decoding.rule=eagle: is for draft.tree=dynamic",
    "latency draft.tree=dynamic decoding.synthetic_acceptance=0.5": "decoding.synthetic_acceptance=0.5: must be null",
    "latency draft.tree=dynamic engine=huggingface": "draft.tree=dynamic: must be chain unless engine=local",
    "latency draft=none draft.tree=dynamic": "draft.tree=dynamic: needs a draft, and draft=none is none",
    "latency draft=tiny_eagle3_tree_tree": "draft=tiny_eagle3_tree_tree: no such preset",
    "latency draft=lookup draft.tree=dynamic": "draft.tree=dynamic: is for heads, not for draft=lookup",
    "recovery draft.tree=dynamic fault=lenience": "fault=lenience: must be one of none, bonus_from_wrong_position",
    "serve draft.tree=dynamic": "draft.tree=a tree: must be chain with serve",
    "recovery fault=lenience decoding=greedy": "fault=lenience: changes nothing at decoding.temperature=0",
    "recovery fault=residual_warped_twice decoding.temperature=1":
        "fault=residual_warped_twice: changes nothing at decoding.temperature=1",
    # distill
    "distill draft=none": "draft=none: must be a model, a head, or eagle3, dflash, dflash2, jetspec or medusa",
    "distill draft=lookup": "draft=lookup: has no weights to train",
    "distill draft=tiny_draft_8bit": "draft=tiny_draft_8bit: must not be quantized to be trained",
    "distill draft=tiny": "draft=tiny: must not be the target itself",
    "distill draft=eagle3 num_prompts=40": "num_prompts=40: leaves none to learn from",
    "distill draft=eagle3 temperatures=[]": "temperatures=[]: must be a list of at least one",
    "distill draft=eagle3 learning_rate=0": "learning_rate=0.0: must be positive",
    "distill draft=eagle3 weights=random": "weights=random: must be stored",
    "distill draft=eagle3 answer_tokens=600": "prompts: it has 49 tokens; with decoding.max_new_tokens=600",
    # plan
    "plan gpu_memory=40": "gpu_memory=40: must be an amount with its unit, such as 40GB or 80GiB (did you mean 40GB?)",
    "plan gpu_memory=foo": "gpu_memory=foo: must be an amount with its unit, such as 40GB or 80GiB",
    "plan gpu_memory=0GB": "gpu_memory=0GB: must be an amount",
    "plan gpus=0": "gpus=0: must be at least 1",
    "plan gpus=100000 gpu_memory=40GB": "gpus=100000: must be at most 1024",
    "plan bandwidth=-1": "bandwidth=-1.0: must be positive, in GB/s",
    "plan prompt_length=0": "prompt_length=0: must be at least 1",
    "plan model=nope": "model=nope: no such preset",
    "plan model=7B_4GPUs gpus=2 gpu_memory=40GB": "model.gpus=4: must not exceed the number of GPUs, 2",
    "plan model=7B prompt_length=4000": "prompt_length=4000: with decoding.max_new_tokens=64 that is 4064 tokens",
    "plan model=./absent": "model=./absent: no such directory",
    # serve
    "serve host=0.0.0.0": "api_key_variable=null: must name a variable with a key, because others can reach this host",
    "serve host=127.evil.example": "api_key_variable=null: must name a variable with a key, because others can reach",
    "serve host=0.0.0.0 api_key_variable=NO_KEY": "api_key_variable=NO_KEY: must name a variable of the environment",
    "serve port=70000": "port=70000: must be from 0 to 65535",
    "serve batch_size=0": "batch_size=0: must be at least 1",
    "serve max_new_tokens=32": "decoding.max_new_tokens=64: must be at most max_new_tokens=32",
    "serve engine=huggingface batch_size=1": "engine=huggingface: must be local: serve runs our own loop",
    "serve placement=tensor_parallel": "placement=tensor_parallel: is for the other commands",
}  # fmt: skip


@pytest.mark.parametrize("typed", MISTAKES, ids=lambda typed: typed[:80])
def test_a_mistake_is_one_line(
    typed: str, harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(PlacedPair, "load", None)
    monkeypatch.setattr("harness.menu.engines.vllm.Vllm.may_crash", False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    for name in ("llama", "adapter", "trained"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    (tmp_path / "trained" / "config.json").write_text("{}")
    (tmp_path / "weights.bin").touch()
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "deep.jsonl").write_text(
        '{"prompt": "x"}\n{"prompt": ' + 200_000 * "[" + 200_000 * "]" + "}\n"
    )
    assert harness.refused(*shlex.split(typed)).startswith(MISTAKES[typed])
