"""`plan` through the command line: published pairs on pretended GPUs, and the mistakes of a hurried person."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import gguf
import numpy as np
import pandas as pd
import pytest
import torch

from harness.config.demand import Demand
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.engine import planning
from harness.local.engine.planning import capacity
from harness.local.models.checkpoints import Checkpoint
from harness.local.models.fit import PlacementProblem
from harness.local.models.sketch import LayerCache, Sketch, TensorSketch, sketch_model
from in_process import Harness
from wording import mentions


class Planned(NamedTuple):
    """The printed text, and the row if there is one."""

    stdout: str
    stderr: str
    row: dict[str, Any]


Plan = Callable[..., Planned]
_sketches: dict[str, Sketch] = {}


def sketch_once(checkpoint: Checkpoint, dtype: torch.dtype) -> Sketch:
    """The sketch of a model, which takes seconds and depends on nothing but these."""
    key = repr((checkpoint.role, checkpoint.settings, dtype))
    if key not in _sketches:
        _sketches[key] = sketch_model(checkpoint, dtype)
    return _sketches[key]


@pytest.fixture
def plan(harness: Harness, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Plans with no way to a network."""
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr("harness.local.engine.pair.sketch_model", sketch_once)
    number = iter(range(100))

    def run(*arguments: str, code: int = 0) -> Planned:
        directory = tmp_path / f"run{next(number)}"
        directory_and_details = (f"hydra.run.dir={directory}", "details=true")
        ended = harness("plan", *arguments, *directory_and_details, code=code)
        file = directory / "plan.csv"
        row = pd.read_csv(file, keep_default_na=False).iloc[0].to_dict() if file.exists() else {}
        return Planned(ended.stdout, ended.stderr, row)

    return run


def test_a_bound_on_unequal_gpus_is_that_of_the_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ["NVIDIA GeForce RTX 3090", "NVIDIA H100 80GB HBM3", "NVIDIA GeForce RTX 3090"]
    monkeypatch.setattr(planning, "visible_gpus", lambda: [0, 1, 2])
    monkeypatch.setattr(planning, "free_memory", lambda gpus: dict.fromkeys(gpus, 24 * 10**9))
    monkeypatch.setattr(torch.cuda, "get_device_name", names.__getitem__)
    settings = SimpleNamespace(placement=PlacementSettings(), models={})
    machine = planning.find_machine(settings, None)
    assert machine.name == "2 × NVIDIA GeForce RTX 3090; NVIDIA H100 80GB HBM3"
    assert list(machine.bandwidths) == ["NVIDIA H100 80GB HBM3"]


def test_verification_by_a_mixture_of_experts_costs_more_than_a_step(plan: Plan) -> None:
    outcome = plan("model=gpt-oss-20b", "draft=lookup", "gpus=1", "gpu_memory=80GB")
    # 4 of 32 experts for a token, 15.6 for five; what is not in experts is read as before.
    assert 2 < outcome.row["verification_steps"] < 15.6 / 4
    assert outcome.row["highest_speedup"] == pytest.approx(5 / outcome.row["verification_steps"])
    dense = plan("model=7B", "draft=lookup", "gpus=1", "gpu_memory=80GB")
    assert dense.row["verification_steps"] == 1
    # A method without weights takes none.
    assert dense.row["draft_bytes"] == ""
    assert dense.row["highest_speedup"] == 5


def test_the_figures_of_a_pair(plan: Plan) -> None:
    pair = ["model=7B", "draft=7B_8bit", "batch_size=2"]
    row = plan(*pair, "gpus=4", "gpu_memory=12GB", "bandwidth=1000").row
    assert row["num_parameters"] == 6_738_415_616
    assert row["model_bytes"] == pytest.approx(2 * 6_738_415_616, rel=1e-3)
    # Linear layers in a byte each; embedding and output layer in two.
    assert row["draft_bytes"] == pytest.approx(6_738_415_616 + 2 * 4096 * 32000, rel=2e-3)
    # Slots are rounded up to 128, and the prompt is read into a cache of its own, which is rounded up as well.
    token = 32 * 2 * 4096 * 2
    assert row["cache_bytes"] == 2 * (256 + 128) * token
    devices = json.loads(row["devices_bytes"])
    assert list(devices) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]
    assert sum(device["model"] for device in devices.values()) == row["model_bytes"]
    caches = row["cache_bytes"] + row["draft_cache_bytes"]
    assert sum(device["cache"] for device in devices.values()) == caches
    # A forward looks its embeddings up, and reads the cache as it is halfway.
    read = row["model_bytes"] - 2 * 4096 * 32000 + 2 * 160 * token
    assert row["read_bytes"] == pytest.approx(read, rel=1e-4)
    best = row["read_bytes"] / row["speculative_read_bytes"]
    assert row["highest_speedup"] == pytest.approx(best)
    assert row["break_even_tokens"] == pytest.approx(5 / best)


def test_a_sweep_gives_each_method_its_settings_and_shows_plans_that_differ_in_the_gpu(
    plan: Plan,
) -> None:
    own = ["draft.max_ngram=2", "draft.sampling=greedy"]
    assert "2 of 2 fit" in plan("-m", "draft=lookup,tiny_draft", *own).stdout
    refused = plan("draft=lookup", *own, code=2)
    assert "draft.sampling=greedy: is for" in refused.stderr
    shown = plan("-m", "model=7B", "draft=none", "gpu_memory=A100 80GB,H100 SXM,80GB").stdout
    assert "3 of 3 fit" in shown


def test_what_would_fit_instead(plan: Plan) -> None:
    outcome = plan("model=13B", "draft=tinyllama", "gpu_memory=24GB", code=1)
    assert json.loads(outcome.row["instead"]) == [
        {"change": "model=13B_8bit", "size": "13.4 GB", "num_gpus": None},
        {"change": "model=13B_4bit", "size": "7.20 GB", "num_gpus": None},
        {"change": "model=13B_2GPUs", "size": "", "num_gpus": 2},
    ]
    plan("model=13B_2GPUs", "gpus=2", "draft=tinyllama", "gpu_memory=24GB")


def test_a_cache_beyond_the_reserve_counts(plan: Plan) -> None:
    asked = ["model=gpt2-xl", "gpu_memory=12GB", "prompt_length=900"]
    outcome = plan(*asked, "batch_size=60", code=1)
    # Keys and values of 48 layers, 1600 wide, in two bytes: 1024 slots, and the prompt's own. Graphs take little.
    cache_gb = 60 * (1024 + 900) * 48 * 2 * 1600 * 2 / 1e9
    assert f"and KV caches {cache_gb:.1f} GB" in outcome.stderr
    batch = json.loads(outcome.row["instead"])[0]["change"]
    plan(*asked, batch)
    plan(*asked, f"batch_size={int(batch.partition('=')[2]) + 1}", code=1)


def test_a_plan_is_collected_only_where_asked(plan: Plan, tmp_path: Path) -> None:
    plan()
    assert not (tmp_path / "results").exists()
    for _ in range(2):
        plan("results.file=results/plans.csv")
    assert len(pd.read_csv(tmp_path / "results" / "plans.csv")) == 2


def test_vocabularies_that_differ_need_an_engine_with_two_tokenizers(plan: Plan) -> None:
    typed = ["model=gpt2", "draft=llama_68m", "gpu_memory=24GB"]
    refused = plan(*typed, code=2)
    assert mentions(refused.stderr, "model=gpt2", "32000", "50257", "engine=huggingface")
    by_generate = plan(*typed, "engine=huggingface", "T=0")
    command = "harness latency model=gpt2 draft=llama_68m engine=huggingface T=0"
    assert command in by_generate.stdout
    # One family pads to different numbers of rows.
    plan("model=pythia-6.9b", "draft=pythia-160m", "gpu_memory=24GB")


def test_what_cannot_be_decoded_is_refused(
    plan: Plan, save_model: Callable[..., ModelSettings]
) -> None:
    without_cache = save_model("openai-gpt", n_embd=32, n_layer=2, n_head=4)
    assert "keeps no KV cache" in plan(f"model={without_cache.name}", code=2).stderr
    recurrent = save_model("mamba", hidden_size=32, num_hidden_layers=2, state_size=8)
    planned = plan(f"model={recurrent.name}", "draft=none")
    # Of two layers: the last four inputs of the convolution, and 8 numbers of state for each of 64 channels.
    assert planned.row["cache_bytes"] == 2 * 64 * (4 + 8) * 4


def test_early_exit_has_no_bound_and_a_k_above_a_heads_block_drafts_no_more(plan: Plan) -> None:
    asked = ["model=7B", "draft=early_exit", "gpus=1", "gpu_memory=24GB"]
    planned = plan(*asked, "engine=huggingface")
    assert not planned.row["highest_speedup"]
    assert "an early exit" in planned.stdout
    assert "KV cache of unknown size" not in planned.stdout
    planned = plan("draft=tiny_dflash", "acceptance=0.95", "K=9")
    assert planned.row["predicted_tokens_per_iteration"] < 5
    assert planned.row["highest_speedup"] < 5
    assert "K=9 drafts no more tokens than K=4" in planned.stdout


@pytest.mark.parametrize(
    ("typed", "k", "tokens"),
    [
        (["acceptance=0.5", "K=3"], 3, 1.875),
        (["acceptance=50%", "K=3"], 3, 1.875),
        (["acceptance=3.2@6"], 6, 3.2),
        (["acceptance=56%@4"], 4, 3.24),
    ],
)
def test_one_typed_acceptance_gives_a_speedup(
    plan: Plan, typed: list[str], k: int, tokens: float
) -> None:
    asked = ["model=7B", "draft=7B_4bit", "gpus=1", "gpu_memory=80GB"]
    planned = plan(*asked, *typed)
    row = planned.row
    as_printed = f"{(1 + 3 * 0.5) / row['break_even_tokens']:.2f}×"
    is_share = "@" not in typed[0]
    assert mentions(planned.stdout, "acceptance=50%@3", as_printed) == is_share
    assert row["num_draft_tokens"] == k
    assert row["predicted_tokens_per_iteration"] == pytest.approx(tokens)
    # Over what an iteration costs, which is K + 1 tokens of which all were accepted over the highest speed-up.
    assert row["predicted_speedup"] == pytest.approx(tokens / row["break_even_tokens"])
    assert row["highest_speedup"] == pytest.approx((k + 1) / row["break_even_tokens"])


def test_requests_that_fit_beside_the_weights(plan: Plan) -> None:
    """Llama 7B: 32 layers of 2 × 4,096 numbers in two bytes for each token, and a reserve of 2 GB on each GPU."""
    asked = ["model=7B", "gpus=2", "gpu_memory=24GB", "prompt_length=1000"]
    outcome = plan(*asked, "draft=7B_4bit", "K=4")
    row = outcome.row
    token = 32 * 2 * 4096 * 2
    alone = (2 * (24e9 - 2e9) - row["model_bytes"]) // (1064 * token)
    # Each request has both caches then, K tokens longer.
    left = 2 * (24e9 - 2e9) - row["model_bytes"] - row["draft_bytes"]
    assert row["model_bytes"] == pytest.approx(2 * 6.738e9, rel=1e-3)
    beside = left // (1068 * 2 * token)
    assert (row["regular_most_requests"], row["most_requests"]) == (alone, beside)
    said = (
        f"{row['most_requests']} such requests at a time next to the weights ({alone:.0f} without"
    )
    assert mentions(outcome.stdout, said)
    # In a server neither a batch nor the reading of its prompts changes them.
    in_batches = plan(*asked, "draft=7B_4bit", "K=4", "batch_size=8", code=None).row
    assert in_batches["most_requests"] == row["most_requests"]
    assert in_batches["regular_most_requests"] == row["regular_most_requests"]
    caches = json.loads(row["request_caches"])
    assert caches["model"] == {"16": 1068 * token, "8": 1068 * token // 2}
    assert caches["draft"] == caches["model"]


def test_requests_of_a_published_server() -> None:
    """Apertus 8B on one GH200 by vLLM (swiss-ai/apertus-speculative-decoding, docs/loadtest-8b.md, 2026-09-30): a pool
    of 469,792 tokens, and at most 171 requests in flight; 129 with a DSpark head of 3.3 GiB, whose five layers have a
    window of 2,048 tokens. vLLM pads groups of layers: 139 with a patch that does not. Bytes alone allow 144.
    """
    numbers = 2 * 8 * 128
    weights = TensorSketch(count=int(17.23 * 2**30) // 2)
    layers = (LayerCache(numbers),) * 32
    settings = ModelSettings(name="apertus", repository="x/y")
    target = Sketch("model", settings, torch.bfloat16, (weights,), layers)
    head_layers = (LayerCache(numbers, window=2048),) * 5
    head_weights = TensorSketch(count=int(3.3 * 2**30) // 2)
    head = Sketch("draft", settings, torch.bfloat16, (head_weights,), head_layers, is_head=True)
    free = target.weight_bytes + 469_792 * 32 * numbers * 2
    demand = Demand(1, 469_792 // 171 - 200, 200, 7, "eager")
    placement = PlacementSettings(reserve_gb=0.0)
    problem = PlacementProblem((target, head), placement, {0: free, "cpu": 0}, demand)
    assert problem.reserve_bytes == 0
    assert capacity(problem) == (171, 144)


@pytest.mark.parametrize(
    ("typed", "gigabytes", "gpus"),
    [
        (["gpu_memory=8xH100"], 80, {"H100 SXM", "H100 PCIe"}),
        (["gpu_memory=8x40GB"], 40, {"A100 40GB"}),
        (["gpus=8xA100"], 40, {"A100 40GB"}),
        (["gpu_memory=A100"], 40, {"A100 40GB"}),
        (["gpu_memory=a100-80gb", "gpus=2"], 80, {"A100 SXM 80GB", "A100 PCIe 80GB"}),
        (["gpu_memory=4090"], 24, {"RTX 4090"}),
    ],
)
def test_gpus_by_their_names(plan: Plan, typed: list[str], gigabytes: int, gpus: set[str]) -> None:
    """Of several sizes the smallest."""
    row = plan("model=7B", *typed).row
    numbers = {
        "gpu_memory=8xH100": 8,
        "gpu_memory=8x40GB": 8,
        "gpus=8xA100": 8,
        "gpu_memory=a100-80gb": 2,
    }
    assert row["num_gpus"] == numbers.get(typed[0], 1)
    assert row["free_bytes"] == gigabytes * 10**9
    assert set(json.loads(row["bandwidths"])) == gpus


# Layers, width, inner width, heads, key heads, head size: of Llama 3.1 8B, Llama 3.2 1B and Qwen3 30B-A3B.
SHAPES = {
    "8B": ("llama", 32, 4096, 14336, 32, 8, 128),
    "1B": ("llama", 16, 2048, 8192, 32, 8, 64),
    "30B": ("qwen3moe", 48, 2048, 768, 32, 4, 128),
}
VOCABULARY = 128256
NUM_EXPERTS, NUM_USED = 128, 8


def write_gguf(
    file: Path, shape: str, kind: str, *, is_tied: bool = False, has_mtp: bool = False
) -> dict[str, int]:
    """Writes the header of a GGUF file of a published shape, and no weights -> the bytes of its tensors."""
    architecture, layers, width, inner, heads, key_heads, head_size = SHAPES[shape]
    is_mixture = architecture == "qwen3moe"
    writer = gguf.GGUFWriter(file, architecture)
    writer.add_block_count(layers + has_mtp)
    writer.add_context_length(131072)
    writer.add_embedding_length(width)
    writer.add_feed_forward_length(inner)
    writer.add_head_count(heads)
    writer.add_head_count_kv(key_heads)
    writer.add_key_length(head_size)
    writer.add_value_length(head_size)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_vocab_size(VOCABULARY)
    experts = (NUM_EXPERTS,) if is_mixture else ()
    if is_mixture:
        writer.add_expert_count(NUM_EXPERTS)
        writer.add_expert_used_count(NUM_USED)
        writer.add_expert_feed_forward_length(inner)
    sizes = {}
    numbers_per_block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]

    def add(name: str, *dimensions: int) -> None:
        if len(dimensions) == 1:
            sizes[name] = 4 * dimensions[0]
            writer.add_tensor_info(name, dimensions, np.dtype(np.float32), sizes[name])
            return
        row_bytes = dimensions[-1] // numbers_per_block * block_bytes
        sizes[name] = int(np.prod(dimensions[:-1])) * row_bytes
        stored = (*dimensions[:-1], row_bytes)
        quantization = gguf.GGMLQuantizationType[kind]
        writer.add_tensor_info(name, stored, np.dtype(np.uint8), sizes[name], quantization)

    add("token_embd.weight", VOCABULARY, width)
    if not is_tied:
        add("output.weight", VOCABULARY, width)
    add("output_norm.weight", width)
    suffix = "_exps" if is_mixture else ""
    for layer in range(layers + has_mtp):
        add(f"blk.{layer}.attn_q.weight", heads * head_size, width)
        add(f"blk.{layer}.attn_k.weight", key_heads * head_size, width)
        add(f"blk.{layer}.attn_v.weight", key_heads * head_size, width)
        add(f"blk.{layer}.attn_output.weight", width, heads * head_size)
        add(f"blk.{layer}.attn_norm.weight", width)
        add(f"blk.{layer}.ffn_norm.weight", width)
        add(f"blk.{layer}.ffn_gate{suffix}.weight", *experts, inner, width)
        add(f"blk.{layer}.ffn_up{suffix}.weight", *experts, inner, width)
        add(f"blk.{layer}.ffn_down{suffix}.weight", *experts, width, inner)
    if has_mtp:
        add(f"blk.{layers}.nextn.eh_proj.weight", width, 2 * width)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    os.truncate(file, file.stat().st_size + sum(sizes.values()) + 64 * len(sizes))
    return sizes


@pytest.mark.parametrize(
    ("shape", "kind", "options"),
    [
        ("8B", "IQ4_NL", {}),
        ("8B", "Q8_0", {"has_mtp": True}),
        ("1B", "F16", {"is_tied": True}),
        ("30B", "Q4_0", {}),
    ],
)
def test_a_gguf_file_counts_as_it_is_stored(
    plan: Plan, tmp_path: Path, shape: str, kind: str, options: dict[str, bool]
) -> None:
    _, layers, *_, key_heads, head_size = SHAPES[shape]
    sizes = write_gguf(tmp_path / "target.gguf", shape, kind, **options)
    draft_sizes = write_gguf(tmp_path / "draft.gguf", "1B", "Q8_0", is_tied=True)
    files = [f"model={tmp_path}/target.gguf", f"draft={tmp_path}/draft.gguf"]
    typed = [*files, "gpu_memory=5090", "prompt_length=936", "batch_size=2"]
    planned = plan(*typed)
    row = planned.row
    assert row["model_bytes"] == sum(sizes.values())
    assert row["draft_bytes"] == sum(draft_sizes.values())
    assert row["dtype"] == kind
    # Prompt, 64 new tokens and K; each once, of both requests, in two bytes.
    token = layers * 2 * key_heads * head_size
    assert row["cache_bytes"] == 2 * 1004 * token * 2
    caches = json.loads(row["request_caches"])
    assert caches["model"] == {"16": 1004 * token * 2, "8": 1004 * token * 34 // 32}
    read = 2 * 968 * token * 2
    for name, size in sizes.items():
        is_read = not name.startswith((f"blk.{layers}.", "token_embd"))
        share = 1 - (1 - NUM_USED / NUM_EXPERTS) ** 2 if "_exps" in name else 1
        read += share * size * (is_read or "output.weight" not in sizes)
    assert row["read_bytes"] == pytest.approx(read, rel=1e-6)
    assert "any implementation" not in planned.stdout
    assert mentions(planned.stdout, "llama-server -m", "target.gguf -md")
    # Over several GPUs by layers; one of them has the draft, too.
    room = (row["model_bytes"] // 2 + 2**31) // 10**6
    shared = plan(*files, "gpus=4", f"gpu_memory={room}MB", "K=1").row
    parts = [device["model"] for device in json.loads(shared["devices_bytes"]).values()]
    assert sum(parts) == row["model_bytes"]
    assert max(parts) < row["model_bytes"]


def test_a_divided_gguf_file_counts_whole(plan: Plan, tmp_path: Path) -> None:
    first = write_gguf(tmp_path / "a-00001-of-00002.gguf", "1B", "Q8_0")
    second = write_gguf(tmp_path / "a-00002-of-00002.gguf", "8B", "IQ4_NL")
    row = plan(f"model={tmp_path}/a-00001-of-00002.gguf", "draft=none", "gpu_memory=24GB").row
    assert row["model_bytes"] == sum(first.values()) + sum(second.values())


def test_whether_a_gguf_file_fits_is_said_of_a_server(plan: Plan, tmp_path: Path) -> None:
    """4.5 and 1.3 GB with caches of 0.3 GB, in this program 16.1 and 2.5 GB with 0.7 GB."""
    write_gguf(tmp_path / "target.gguf", "8B", "IQ4_NL")
    write_gguf(tmp_path / "draft.gguf", "1B", "Q8_0", is_tied=True)
    files = [f"model={tmp_path}/target.gguf", f"draft={tmp_path}/draft.gguf"]
    planned = plan(*files, "gpu_memory=8GB", "prompt_length=2000")
    assert mentions(planned.stdout, "fits in a server that reads the GGUF file", "6.17 GB")
    own = ["own decoding loop", "bfloat16", "16.1 GB + 2.47 GB", "not fit"]
    assert mentions(planned.stdout, *own)
    # llama.cpp's margin is a GiB; another is typed.
    plan(*files, "gpu_memory=8GB", "prompt_length=2000", "placement.reserve_gb=1.9", code=1)


def test_a_size_of_no_card_lists_none_and_a_pair_without_gain_is_no_next_step(plan: Plan) -> None:
    planned = plan("gpu_memory=3.012GB")
    assert mentions(planned.stdout, "assuming 100 GB/s: bandwidth= says it")
    assert not json.loads(planned.row["bandwidths"] or "{}")
    planned = plan("model=tinyllama", "draft=7B", "gpu_memory=24GB")
    assert planned.row["highest_speedup"] < 1
    assert "Next" not in planned.stdout
