"""Repositories that cannot be read, and models that cannot be taken back, are refused before any weights load. And
how tokenizers load.
"""

import json
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoTokenizer

from harness.config.errors import RunError, SettingError
from harness.config.settings import ModelSettings, PlacementSettings
from harness.local.engine.pair import check_outputs
from harness.local.models.checkpoints import check_decoder, is_recurrent, read_checkpoint
from harness.local.models.sketch import sketch_model
from harness.local.models.tokenizers import load_tokenizer, max_context
from tiny_checkpoints import VOCABULARY_SIZE, as_checkpoint, load_pair, make_config, make_tokenizer

SaveModel = Callable[..., ModelSettings]


def settings_of(directory: Path | str, **settings: Any) -> ModelSettings:
    return ModelSettings(name=str(directory), repository=str(directory), **settings)


class Hub(BaseHTTPRequestHandler):
    """Answers as the hub does for repositories that cannot be had; the repository's name says why."""

    refusals: ClassVar = {
        "gated": (403, "GatedRepo"),
        "absent": (404, "RepoNotFound"),
        "private": (401, "RepoNotFound"),
    }

    def do_GET(self) -> None:
        repository = self.path.split("/")[4 if self.path.startswith("/api") else 2]
        status, code = self.refusals.get(repository, (404, "EntryNotFound"))
        body = b""
        if repository == "gated" and self.path.startswith(
            "/api"
        ):  # a gated repository is described, not handed out
            status, code, body = 200, "", json.dumps({"id": "someone/gated"}).encode()
        if "/revision/" in self.path:
            status, code = 404, "RevisionNotFound"
        if repository == "broken":
            status, code = 418, ""
        self.send_response(status)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET

    def log_message(self, *_: object) -> None:
        pass


def point_hub_at(monkeypatch: pytest.MonkeyPatch, cache: Path, endpoint: str) -> None:
    constants = huggingface_hub.constants
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, endpoint)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    point_hub_at(monkeypatch, tmp_path, f"http://127.0.0.1:{server.server_port}")
    yield
    server.shutdown()
    server.server_close()


@pytest.mark.usefixtures("hub")
@pytest.mark.parametrize(
    ("repository", "says"),
    [
        ("someone/gated", "ask for access at https://huggingface.co/someone/gated, then log in"),
        ("someone/absent", "not on the hub, or is private"),
        ("someone/private", "HF_TOKEN"),
        ("someone/broken", "the hub refuses someone/broken"),
    ],
)
def test_hub_refusal_says_what_to_do(repository: str, says: str) -> None:
    with pytest.raises(RunError) as raised:
        read_checkpoint("draft", settings_of(repository))
    assert str(raised.value).startswith("draft: ")
    assert says in str(raised.value)
    assert len(str(raised.value).splitlines()) <= 2


@pytest.mark.usefixtures("hub")
def test_absent_revisions_and_tokenizers_are_named(save_model: SaveModel) -> None:
    with pytest.raises(SettingError, match=r"^model\.revision=v9: must be a branch"):
        read_checkpoint("model", settings_of("someone/model", revision="v9"))
    settings = save_model(settings={"tokenizer": "someone/absent"})
    with pytest.raises(RunError, match=r"^model\.tokenizer: someone/absent is not on the hub"):
        load_pair(settings, None, PlacementSettings())


def test_no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    point_hub_at(monkeypatch, tmp_path, "http://127.0.0.1:9")  # the discard port: nobody listens
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="the hub is out of reach") as refused:
        read_checkpoint("model", settings_of("someone/model"))
    first, second = str(refused.value).splitlines()
    # What was typed may have been meant as a directory, though not the repository of a preset.
    assert first.endswith(f"nor is there a directory someone/model in {tmp_path}")
    assert "HF_HUB_OFFLINE=1" in second
    with pytest.raises(RunError, match="check the network\n"):
        read_checkpoint("model", ModelSettings(name="7B", repository="someone/model"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RunError, match="HF_HUB_OFFLINE forbids"):
        read_checkpoint("model", settings_of("someone/model"))


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        (None, "is not a valid JSON file"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_act": "nope"}, "nope"),
        ({"num_attention_heads": 0}, "config"),
    ],
)
def test_a_damaged_configuration_is_one_line(
    changes: dict[str, object] | None, cause: str, save_model: SaveModel
) -> None:
    model = save_model()
    file = Path(model.repository) / "config.json"
    text = file.read_text()
    file.write_text(json.dumps(json.loads(text) | changes) if changes else text[:40])
    with pytest.raises(RunError, match=r"^model: ") as caught:
        sketch_model(read_checkpoint("model", model), torch.float32)
    assert cause in str(caught.value)
    assert "\n" not in str(caught.value)


def test_directories_that_hold_no_model_or_no_weights(
    tmp_path: Path, save_model: SaveModel
) -> None:
    for absent in ("./absent", "~/absent", "a/b/c"):
        with pytest.raises(SettingError, match="no such directory"):
            read_checkpoint("model", settings_of(absent))
    with pytest.raises(SettingError, match=r"holds no config\.json$"):
        read_checkpoint("model", settings_of(tmp_path))
    (tmp_path / "model.gguf").touch()
    with pytest.raises(SettingError, match="gguf_file"):
        read_checkpoint("model", settings_of(tmp_path))
    (tmp_path / "model.gguf").unlink()
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(SettingError, match="adapter"):
        read_checkpoint("model", settings_of(tmp_path))
    settings = save_model()
    Path(settings.repository, "model.safetensors").unlink()
    with pytest.raises(SettingError, match="holds no weights"):
        read_checkpoint("model", settings)
    assert not read_checkpoint("model", settings, needs_weights=False).random


@pytest.mark.parametrize("number", [10_000_000, 0, -1])
def test_a_number_of_layers_that_no_model_has_is_refused(
    save_model: SaveModel, number: int
) -> None:
    """Each would be built before anything else is looked at."""
    settings = save_model()
    config = Path(settings.repository, "config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_hidden_layers": number}))
    with pytest.raises(SettingError, match=rf"has num_hidden_layers: {number}, and 1 to 1000"):
        read_checkpoint("model", settings)


@pytest.mark.parametrize("place", ["../../etc/passwd", "/etc/passwd"])
@pytest.mark.parametrize("role", ["model", "draft"])
def test_an_index_opens_no_file_elsewhere(save_model: SaveModel, role: str, place: str) -> None:
    settings = save_model()
    index = Path(settings.repository, "model.safetensors.index.json")
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": place}}))
    with pytest.raises(SettingError, match=f"index.json: names {place}, which is outside"):
        read_checkpoint(role, settings)
    for damaged in ("{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {}}'):
        index.write_text(damaged)
        with pytest.raises(SettingError, match=r"model\.safetensors\.index\.json: "):
            read_checkpoint(role, settings)


def test_unknown_architecture_and_foreign_code(save_model: SaveModel) -> None:
    settings = save_model()
    config = Path(settings.repository, "config.json")
    config.write_text(json.dumps({"model_type": "thing_of_tomorrow"}))
    with pytest.raises(RunError, match="does not know the architecture"):
        read_checkpoint("model", settings)
    foreign = {"model_type": "thing", "auto_map": {"AutoConfig": "thing.Config"}}
    config.write_text(json.dumps(foreign))
    with pytest.raises(SettingError, match=r"^model\.trust_remote_code=false: must be true"):
        read_checkpoint("model", settings)


def test_the_code_of_a_tokenizer_on_the_hub_needs_the_trust_of_its_model(
    save_model: SaveModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise ValueError("contains custom code: pass trust_remote_code=True")

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", refuse)
    settings = settings_of(save_model().repository, tokenizer="org/tokenizer")
    with pytest.raises(SettingError, match=r"^model\.trust_remote_code=false: must be true"):
        load_tokenizer(settings)


def test_weights_that_are_damaged_missing_or_of_another_shape(
    save_model: SaveModel, capfd: pytest.CaptureFixture[str]
) -> None:
    settings = save_model()
    file = Path(settings.repository, "model.safetensors")
    weights = load_file(file)

    def refused() -> str:
        with pytest.raises(RunError) as raised:
            load_pair(settings, None, PlacementSettings())
        return str(raised.value)

    norm = weights.pop("model.norm.weight")
    save_file(weights, file, metadata={"format": "pt"})
    assert "1 weights are not in" in refused()
    assert "model.norm.weight" in refused()
    save_file(weights | {"model.norm.weight": norm[:7]}, file, metadata={"format": "pt"})
    assert "other shapes than its configuration says" in refused()
    file.write_bytes(b"not a safetensors file")
    assert "damaged" in refused()
    # transformers would print a table of colours.
    assert capfd.readouterr().err == ""


def test_directory_without_tokenizer(save_model: SaveModel, tmp_path: Path) -> None:
    settings = save_model()
    bare = tmp_path / "bare"
    shutil.copytree(settings.repository, bare, ignore=shutil.ignore_patterns("tokenizer*"))
    with pytest.raises(
        SettingError, match=r"^model\.tokenizer: must name .* with a tokenizer; .*bare holds none"
    ):
        load_pair(settings_of(bare), None, PlacementSettings())
    pair = load_pair(settings_of(bare, tokenizer=settings.repository), None, PlacementSettings())
    assert pair.tokenizer("a")["input_ids"] == [pair.tokenizer.get_vocab()["a"]]


@pytest.mark.parametrize(
    "model_type", "mamba rwkv jamba bamba recurrent_gemma qwen3_next zamba2 minimax xlstm".split()
)
def test_recurrent_models_are_known(model_type: str) -> None:
    config = AutoConfig.for_model(model_type)
    assert is_recurrent(config)
    check_decoder("draft", settings_of("x"), config)


def test_recurrent_layers_are_known_by_their_names() -> None:
    kinds = ["conv", "full_attention"]
    config = AutoConfig.for_model("lfm2", num_hidden_layers=2, layer_types=kinds)
    assert is_recurrent(config)
    config = make_config("llama")
    config.layer_types = ["full_attention", "attention_of_tomorrow", "full_attention"]
    assert is_recurrent(config)
    assert not is_recurrent(AutoConfig.for_model("vit"))


def test_models_of_other_kinds_are_refused() -> None:
    for model_type, says in [
        ("bert", "this is an encoder"),
        ("t5", "this is an encoder-decoder"),
        ("vit", "must be a causal language"),
        ("openai-gpt", "keeps no KV cache"),
    ]:
        with pytest.raises(SettingError, match=says):
            check_decoder("model", settings_of("a/b"), AutoConfig.for_model(model_type))


def check(target_size: int = VOCABULARY_SIZE, draft_size: int = VOCABULARY_SIZE) -> None:
    target = as_checkpoint(make_config("llama", vocab_size=target_size))
    draft = as_checkpoint(make_config("llama", vocab_size=draft_size), "draft", name="7B")
    check_outputs(target, draft, make_tokenizer())


def test_models_of_a_family_pad_their_outputs_differently_and_have_all_tokens() -> None:
    for sizes in ((320, 320), (384, 320), (320, 384), (320, 258)):
        check(*sizes)
    with pytest.raises(SettingError, match=r"^draft=7B: has 257 outputs, model=.* has 320, and"):
        check(draft_size=257)


def test_shared_vocabulary_size(save_model: SaveModel) -> None:
    target, draft = save_model("llama", vocab_size=384), save_model("gpt2", vocab_size=320)
    assert load_pair(target, draft, PlacementSettings()).vocabulary_size == 320
    assert load_pair(target, None, PlacementSettings()).vocabulary_size == 384


@pytest.mark.parametrize("model_type", ["llama", "gpt2"])
@pytest.mark.parametrize("name", ["PreTrainedTokenizerFast", "TokenizersBackend", "LlamaTokenizer"])
def test_declared_classes_load_as_transformers_would_load_them(
    save_model: SaveModel, model_type: str, name: str
) -> None:
    """Also where `AutoTokenizer`, which imports torch, is not asked."""
    settings = save_model("llama", tokenizer=make_tokenizer())
    changes = {"tokenizer_config": {"tokenizer_class": name}, "config": {"model_type": model_type}}
    for stem, change in changes.items():
        file = Path(settings.repository, f"{stem}.json")
        file.write_text(json.dumps(json.loads(file.read_text()) | change))
    tokenizer = load_tokenizer(settings)
    same = AutoTokenizer.from_pretrained(settings.repository)
    assert type(tokenizer) is type(same)
    assert tokenizer("1 + 1 = 2, größer") == same("1 + 1 = 2, größer")


def test_max_context() -> None:
    for model_type, settings, limit in [
        ("llama", {"max_position_embeddings": 4096}, 4096),
        ("gpt2", {"n_positions": 1024}, 1024),
        ("mistral", {"max_position_embeddings": 32768, "sliding_window": 4096}, 32768),
        ("bloom", {"seq_length": 2048}, None),
        ("mpt", {"max_seq_len": 2048, "attn_config": {"alibi": False}}, 2048),
        ("falcon", {"alibi": True}, None),
        ("falcon", {"alibi": False, "max_position_embeddings": 2048}, 2048),
    ]:
        assert max_context(AutoConfig.for_model(model_type, **settings)) == limit
