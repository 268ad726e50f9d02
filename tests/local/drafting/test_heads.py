"""Heads in every format: written to a directory, recognised, checked against the target, loaded."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from harness.config.errors import HarnessError, RunError, SettingError
from harness.config.settings import ModelSettings
from harness.local.drafting.heads.block import DFlash
from harness.local.drafting.heads.checkpoint import KINDS, HeadCheckpoint, read_head
from harness.local.models.checkpoints import Checkpoint
from tiny_checkpoints import as_checkpoint, make_config

VOCABULARY, REDUCED, WIDTH, LAYERS = 320, 100, 128, 8

OWN = {
    "model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": WIDTH, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
}  # fmt: skip
QWEN3 = OWN | {"model_type": "qwen3", "num_hidden_layers": 2, "num_target_layers": LAYERS}
SPECULATORS = {
    "speculators_model_type": "eagle3",
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": REDUCED,
    "transformer_layer_config": OWN,
    "speculators_config": {"verifier": {"name_or_path": "nobody/13B"}},
}
DFLASH = SPECULATORS | {
    "speculators_model_type": "dflash",
    "transformer_layer_config": OWN | {"num_hidden_layers": 2},
    "block_size": 5,
    "mask_token_id": 319,
    "aux_hidden_state_layer_ids": [1, 4, 6],
}
DEEPSPEC = QWEN3 | {"target_layer_ids": [-1, 3, 5], "block_size": 5, "mask_token_id": 319}
# SpecForge's DSpark: the anchor predicts too, though z-lab's format says nothing.
SHIFTED = {
    "target_layer_ids": [1, 4], "mask_token_id": 319, "projector_type": "dspark", "markov_rank": 8,
    "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip

# The raw configuration, the kind, and some of what must have been understood.
FORMATS: dict[str, tuple[dict[str, Any], str, dict[str, Any]]] = {
    "speculators eagle3": (
        SPECULATORS | {"norm_before_residual": True}, "eagle3",
        {"target_layers": (2, 4, 5), "norm_before_residual": True, "own_embedding": True, "own_output": True},
    ),
    "speculators eagle3.1": (
        SPECULATORS | {"fc_norm": True, "norm_output": True, "eagle_aux_hidden_state_layer_ids": [1, 3, 6]}, "eagle3",
        {"target_layers": (1, 3, 6), "fc_norm": True, "norm_output": True},
    ),
    "SafeAILab": (
        OWN | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": REDUCED}, "eagle3",
        {"target_layers": (2, 4, 5), "own_embedding": False, "draft_vocabulary_size": REDUCED},
    ),
    "SafeAILab, full vocabulary": (
        OWN | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": VOCABULARY}, "eagle3",
        {"draft_vocabulary_size": VOCABULARY},
    ),
    "DeepSpec eagle3": (
        QWEN3 | {"architectures": ["Qwen3Eagle3Model"], "num_hidden_layers": 1, "target_layer_ids": [1, 3, 4, 5]},
        "eagle3", {"target_layers": (2, 4, 5, 6)},
    ),
    "speculators dflash": (
        DFLASH, "dflash",
        {"target_layers": (1, 4, 6), "from_anchor": False, "block_size": 5}
        | {"causal_windows": True, "windows_follow": False},
    ),
    "z-lab dflash": (
        QWEN3 | {"block_size": 16, "dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": 319}}, "dflash",
        {"target_layers": (2, 5), "from_anchor": False, "own_output": False, "block_size": 16}
        | {"causal": False, "causal_windows": True, "windows_follow": True},
    ),
    # Unless it says otherwise, a head of z-lab is causal in windows.
    "z-lab dflash, causal": (
        QWEN3 | {"block_size": 16, "is_causal": True}
        | {"dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": 319, "causal": False}}, "dflash",
        {"causal": True, "causal_windows": False},
    ),
    "z-lab dflash, not causal": (
        QWEN3 | {"block_size": 16, "is_causal": None}
        | {"dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": 319, "causal": False}}, "dflash",
        {"causal": False, "causal_windows": False},
    ),
    # transformers forgets the window of a Qwen3, and the head's own settings say it again.
    "MiMo": (
        QWEN3 | {"block_size": 16, "layer_types": ["sliding_attention"] * 2}
        | {"dflash_config": {"target_layer_ids": [1, 4], "mask_token_id": 319, "use_swa": True, "swa_window_size": 12}},
        "dflash", {"windows_follow": True},
    ),
    "DeepSpec dflash": (
        DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": False}, "dflash",
        {"target_layers": (0, 4, 6), "from_anchor": True},
    ),
    "speculators dspark": (
        DFLASH | {"speculators_model_type": "dspark", "markov_rank": 8}, "dspark",
        {"target_layers": (1, 4, 6), "from_anchor": True, "markov_rank": 8},
    ),
    "DeepSpec dspark": (
        DEEPSPEC | {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": True}
        | {"confidence_head_with_markov": False}, "dspark",
        {"target_layers": (0, 4, 6), "from_anchor": True, "markov_rank": 8},
    ),
    "SpecForge dspark": (
        QWEN3 | {"block_size": 16, "dflash_config": SHIFTED}, "dspark",
        {"target_layers": (2, 5), "from_anchor": True, "markov_rank": 8},
    ),
    "DeepSpec dspark without a Markov head": (
        DEEPSPEC | {"markov_rank": 0, "enable_confidence_head": True}, "dspark",
        {"target_layers": (0, 4, 6), "markov_rank": 0},
    ),
    "Medusa": (
        {"medusa_num_heads": 2, "medusa_num_layers": 1, "base_model_name_or_path": "nobody/13B"}, "medusa",
        {"target_layers": (LAYERS,), "num_heads": 4, "num_blocks": 1, "output_per_head": True},
    ),
}  # fmt: skip
# Where the tensors are, if not in model.safetensors.
FILES = {"SafeAILab": "pytorch_model.bin", "Medusa": "medusa_lm_head.pt"}


def target() -> Checkpoint:
    return as_checkpoint(make_config("llama", vocab_size=VOCABULARY, num_hidden_layers=LAYERS))


def usual_head(name: str, tmp_path: Path) -> HeadCheckpoint:
    """The one that planning assumes without weights; Medusa with as many heads as the weights will have."""
    raw, _, understood = FORMATS[name]
    if name == "Medusa":
        raw = raw | {"medusa_num_heads": understood["num_heads"]}
    return planned_head(raw, tmp_path)


def planned_head(raw: Mapping[str, Any], tmp_path: Path) -> HeadCheckpoint:
    """The head of a configuration without weights."""
    (tmp_path / "config.json").write_text(json.dumps(raw))
    head = read_head(settings(tmp_path), target(), weights=False)
    assert head is not None
    return head


def settings(directory: Path, **changes: Any) -> ModelSettings:
    return ModelSettings(name="head", repository=str(directory), **changes)


def write_head(
    name: str, tmp_path: Path, edit: Callable[[dict[str, Tensor]], object] = lambda state: None
) -> ModelSettings:
    """A directory in that format, with other tensors in it that are of no use; `edit` changes the tensors."""
    raw, file = FORMATS[name][0], FILES.get(name, "model.safetensors")
    generator = torch.Generator().manual_seed(0)
    planned = usual_head(name, tmp_path).build().state_dict()
    numbers = {key: torch.randn(one.shape, generator=generator) for key, one in planned.items()}
    state = {key: tensor.bfloat16() for key, tensor in numbers.items()}
    if "d2t" in state:
        state["d2t"] = torch.arange(REDUCED) * 2
    if "dspark" in name:
        state["confidence_head.proj.weight"] = torch.ones(1, WIDTH)
    if name.startswith("SafeAILab"):
        state = {key.replace("layers.0.", "midlayer."): tensor for key, tensor in state.items()}
    if name.startswith("speculators"):
        state["t2d"] = torch.zeros(VOCABULARY, dtype=torch.bool)
        state["verifier_norm.weight"] = torch.ones(WIDTH)
    edit(state)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    if file.endswith("safetensors"):
        save_file(state, tmp_path / file)
    else:
        torch.save(state, tmp_path / file)
    return settings(tmp_path)


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_recognised_loaded_and_sized(name: str, tmp_path: Path) -> None:
    state: dict[str, Tensor] = {}
    head = read_head(write_head(name, tmp_path, lambda stored: state.update(stored)), target())
    _, kind, understood = FORMATS[name]
    assert head.kind is KINDS[kind]
    assert [path.name for path in head.files] == [FILES.get(name, "model.safetensors")]
    assert {key: getattr(head.config, key) for key in understood} == understood
    loaded = head.load(torch.device("cpu"), torch.float32)
    for key, tensor in loaded.state_dict().items():
        is_renamed = name.startswith("SafeAILab")
        stored = state[key.replace("layers.0.", "midlayer.") if is_renamed else key]
        assert tensor.dtype == (torch.int64 if key == "d2t" else torch.float32)
        assert tensor.equal(stored.to(tensor.dtype))
    assert name != "MiMo" or head.config.transformer.sliding_window == 12
    assert not any(tensor.is_meta for tensor in [*loaded.parameters(), *loaded.buffers()])

    sketch = head.sketch(torch.bfloat16)
    planned = usual_head(name, tmp_path).sketch(torch.bfloat16)
    assert sketch == planned
    held = loaded.to(torch.bfloat16).state_dict().values()
    assert sketch.weight_bytes == sum(tensor.nbytes for tensor in held)
    num_layers = 0 if name == "Medusa" else head.config.transformer.num_hidden_layers
    assert sum(sketch.cache_sizes(1, 0)) == num_layers * 2 * 2 * 16 * 2
    seen = [1000 if window is None else window for window in getattr(loaded, "windows", [])]
    assert sketch.row_bytes(1000) == sum(seen) * 2 * 2 * 16 * 2
    assert (
        dataclasses.replace(sketch, borrowed_tensors=()).read_bytes() < sketch.weight_bytes
        or name.split(",")[0] in ("Medusa", "z-lab dflash", "MiMo")
        or "full" in name
    )


STATED = {"num_hidden_layers": 24, "layer_types": ["full_attention"] * 24}


@pytest.mark.parametrize("stated", [STATED, {"num_hidden_layers": 24}, {"num_hidden_layers": 1}])
def test_the_stored_layers_count_and_not_the_number_that_is_stated(
    stated: Mapping[str, Any], tmp_path: Path
) -> None:
    where = write_head("z-lab dflash", tmp_path)
    honest = read_head(where, target())
    (tmp_path / "config.json").write_text(json.dumps(FORMATS["z-lab dflash"][0] | stated))
    head = read_head(where, target())
    assert head.sketch(torch.bfloat16) == honest.sketch(torch.bfloat16)
    assert len(head.load(torch.device("cpu"), torch.float32).windows) == 2
    # SafeAILab's has one layer.
    eagle = FORMATS["SafeAILab"][0] | {"model_type": "qwen3"}
    [alone, many] = [planned_head(raw, tmp_path) for raw in (eagle, eagle | stated)]
    assert many.sketch(torch.bfloat16) == alone.sketch(torch.bfloat16)


def test_layer_ids_can_be_overridden(tmp_path: Path) -> None:
    where = write_head("speculators eagle3", tmp_path)
    assert read_head(where, target(), layers=[3, 5, 7]).config.target_layers == (3, 5, 7)
    where = write_head("Medusa", tmp_path)
    with pytest.raises(SettingError, match="reads one layer of the target, not 3"):
        read_head(where, target(), layers=[1, 2, 3])


def test_shards_are_read_together(tmp_path: Path) -> None:
    where = write_head("DeepSpec dspark", tmp_path)
    whole = read_head(where, target())
    expected = whole.load(torch.device("cpu"), torch.float32).state_dict()
    names = sorted(expected)
    shards = {f"model-{i}.safetensors": names[i::2] for i in range(2)}
    for file, part in shards.items():
        save_file({name: expected[name].contiguous() for name in part}, tmp_path / file)
    index = {"weight_map": {name: file for file, part in shards.items() for name in part}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "model.safetensors").unlink()
    sharded = read_head(where, target())
    assert len(sharded.files) == 2
    loaded = sharded.load(torch.device("cpu"), torch.float32).state_dict()
    assert all(loaded[name].equal(expected[name]) for name in names)
    (tmp_path / "model-1.safetensors").unlink()
    lacking = r"lacks model-1\.safetensors, which model\.safetensors\.index\.json names"
    with pytest.raises(RunError, match=lacking):
        read_head(where, target())


def test_planning_needs_no_weights_and_random_ones_no_files(tmp_path: Path) -> None:
    head = usual_head("speculators dspark", tmp_path)
    assert head.files == ()
    assert head.load(torch.device("cpu"), torch.float32).fc.weight.std() > 0
    preset = settings(tmp_path / "nowhere", architecture=FORMATS["z-lab dflash"][0])
    from_preset = read_head(preset, target(), weights=False)
    assert from_preset.kind is DFlash


@pytest.mark.parametrize("raw", [{"model_type": "llama", "hidden_size": 32}, None])
def test_other_repositories_are_no_heads(raw: Mapping[str, Any] | None, tmp_path: Path) -> None:
    if raw is not None:
        (tmp_path / "config.json").write_text(json.dumps(raw))
    assert read_head(settings(tmp_path), target()) is None


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda state: state.pop(name)


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda state: state.update({name: tensor})


@pytest.mark.parametrize(
    ("name", "edit", "message"),
    [
        ("SafeAILab", drop("d2t"), 'Missing key(s) in state_dict: "d2t"'),
        ("speculators dflash", put("layers.0.self_attn.g_proj.weight", torch.ones(2)), "Unexpected key(s)"),
        ("z-lab dflash", put("norm.weight", torch.ones(3)), "size mismatch for norm.weight"),
        ("Medusa", drop("3.0.linear.bias"), 'Missing key(s) in state_dict: "3.0.linear.bias"'),
        ("speculators eagle3", put("norm.weight", torch.zeros(WIDTH, dtype=torch.int32)), "norm.weight"),
    ],
)  # fmt: skip
def test_other_tensors_are_one_line(
    name: str, edit: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    where = write_head(name, tmp_path, edit)
    with pytest.raises(SettingError) as caught:
        read_head(where, target())
    check_line(caught.value, message)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("speculators eagle3", {"target_hidden_size": 64}, "model of hidden size 64; model=13B has 128"),
        ("SafeAILab", {"vocab_size": 333}, "vocabulary size 333"),
        ("z-lab dflash", {"num_target_layers": 36}, "number of layers 36"),
        ("speculators eagle3", {"eagle_aux_hidden_state_layer_ids": [1, 9]}, "reads layer 9"),
        ("speculators eagle3", {"speculators_model_type": "mlp"}, "kind mlp"),
        ("speculators eagle3", {"speculators_model_type": [1]}, "kind [1]"),
        ("SafeAILab", {"model_type": "gemma4"}, "gemma4"),
        ("speculators dspark", {"markov_head_type": "rnn"}, "rnn"),
        ("speculators dflash", {"mask_token_id": None}, "mask_token_id"),
        ("SafeAILab", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state"),
        ("z-lab dflash", {"dflash_config": {"mask_token_id": 319}}, "does not state target_layer_ids"),
        ("SafeAILab", {"architectures": ["LlamaForCausalLM"], "bias": True, "draft_vocab_size": None}, "kind EAGLE"),
        ("SafeAILab", {"hidden_size": "128"}, "no head can be built"),
        ("SafeAILab", {"hidden_act": "nope"}, "no head can be built"),
        ("z-lab dflash", {"dflash_config": [1]}, "no head can be built"),
        # SpecForge's MTP heads look like a Qwen3 of one layer, others like kinds that are read.
        ("SafeAILab", {"architectures": ["EdsdDraftModel"]}, "EdsdDraftModel"),
        ("z-lab dflash", {"architectures": ["DSpineDraftModel"]}, "DSpineDraftModel"),
        ("DeepSpec eagle3", {"architectures": ["Qwen3_5MTPDraftModel"]}, "Qwen3_5MTPDraftModel"),
    ],
)  # fmt: skip
def test_another_target_or_format_is_one_line(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError) as caught:
        planned_head(FORMATS[name][0] | changes, tmp_path).sketch(torch.float32)
    check_line(caught.value, message)


BLOCKS = {"target_layer_ids": [1, 4], "mask_token_id": 319}
DOMINO = BLOCKS | {"projector_type": "domino"}


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (SPECULATORS | {"speculators_model_type": "peagle", "mask_token_id": 319}, "peagle"),
        (SPECULATORS | {"mask_token_id": 319}, "P-EAGLE"),
        (OWN | {"architectures": ["LlamaForCausalLMEagle3"], "mask_token_id": 319}, "P-EAGLE"),
        (OWN | {"architectures": ["PEagleDraftModel"]}, "P-EAGLE"),
        (DFLASH | {"speculators_model_type": "pard2"}, "pard2"),
        (DFLASH | {"speculators_model_type": "dflash2"}, "dflash2"),
        (QWEN3 | {"architectures": ["DFlash2DraftModel"], "dflash_config": BLOCKS | {"selector_rank": 4}}, "DFlash 2"),
        (QWEN3 | {"dflash_config": DOMINO}, "Domino"),
        (QWEN3 | {"architectures": ["DominoDraftModel"], "dflash_config": DOMINO}, "Domino"),
        (QWEN3 | {"dflash_config": BLOCKS | {"causal_head": True}}, "JetSpec"),
        (OWN | {"architectures": ["LlamaForCausalLM"], "pard_token": 319}, "PARD"),
        (OWN | {"architectures": ["Qwen3ForCausalLM"], "ptd_token_id": 319}, "PARD"),
    ],
)  # fmt: skip
def test_what_only_servers_run_is_one_line(
    raw: Mapping[str, Any], kind: str, tmp_path: Path
) -> None:
    with pytest.raises(SettingError) as caught:
        planned_head(raw, tmp_path)
    how = "which can only be measured with a server that runs it: harness latency -- COMMAND"
    check_line(caught.value, f"is a draft of kind {kind}, {how}")


@pytest.mark.parametrize("held", [[1, 2], {1: torch.ones(1)}, {"fc.weight": 3}])
def test_a_file_without_tensors_by_name_is_one_line(held: object, tmp_path: Path) -> None:
    write_head("Medusa", tmp_path)
    torch.save(held, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(RunError) as caught:
        read_head(settings(tmp_path), target())
    check_line(caught.value, "medusa_lm_head.pt of ")


def test_no_weights_and_weights_in_another_format_are_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(SPECULATORS))
    with pytest.raises(SettingError, match="holds no weights"):
        read_head(settings(tmp_path), target())
    with pytest.raises(SettingError, match=r"draft\.quantization=4bit: must be none"):
        read_head(settings(tmp_path, quantization="4bit"), target())
    with pytest.raises(SettingError, match=r"draft\.dtype=float16: is for draft models"):
        read_head(settings(tmp_path, dtype="float16"), target())


def test_a_file_that_holds_code_is_not_run(tmp_path: Path) -> None:
    write_head("Medusa", tmp_path)
    torch.save({"0.0.linear.weight": Path("anything")}, tmp_path / "medusa_lm_head.pt")
    with pytest.raises(HarnessError) as caught:
        read_head(settings(tmp_path), target())
    check_line(caught.value, "holds pickled code")


@pytest.mark.parametrize(
    "offsets", [torch.zeros(REDUCED).long() - torch.arange(REDUCED), torch.arange(REDUCED) * 3]
)
def test_a_table_of_tokens_must_be_a_map_into_the_vocabulary(
    offsets: Tensor, tmp_path: Path
) -> None:
    head = read_head(write_head("speculators eagle3", tmp_path, put("d2t", offsets)), target())
    with pytest.raises(RunError) as caught:
        head.load(torch.device("cpu"), torch.float32)
    check_line(caught.value, "no map into the target's vocabulary")


def check_line(error: HarnessError, message: str) -> None:
    assert message in str(error)
    assert str(error).startswith("draft")
    assert "\n" not in str(error)
