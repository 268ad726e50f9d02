"""llama.cpp's server, started for each arm."""

from __future__ import annotations

from typing import TYPE_CHECKING

from harness.config.settings import require
from harness.engines.record import Opening
from harness.engines.records.server import PresetServer, path_of

if TYPE_CHECKING:
    from harness.config.run import RunSettings


class LlamaServer(PresetServer):
    """GGUF files, of the model and of the draft."""

    name = "llama_server"
    summary = "starts llama.cpp's llama-server, with and without the draft"
    program = ("llama-server",)

    def check(self, run: RunSettings) -> None:
        super().check(run)
        is_file = "must be a GGUF file with engine=llama_server"
        is_plain = "must be none with engine=llama_server: the GGUF file decides it"
        for role, model in run.models.items():
            require(model.gguf_file is not None, role, is_file, model.name)
            quantization = model.quantization
            require(quantization == "none", f"{role}.quantization", is_plain, quantization)
        if run.draft is not None:
            require("draft" in run.models, "draft", is_file, run.draft.name)

    def arguments(self, opening: Opening, num_blocks: int) -> dict[str, list[str]]:
        run = opening.settings
        shared = ["--model", path_of(run.model), "--host", "127.0.0.1", "--port", "{port}"]
        # llama-server divides its context among the slots.
        size = opening.batch_size * opening.context
        shared += ["--parallel", str(opening.batch_size), "--ctx-size", str(size), "--metrics"]
        on_gpu = bool(opening.planned.gpus)
        if on_gpu:
            shared += ["--n-gpu-layers", "999"]
        arms = {"regular": shared}
        draft = run.models.get("draft")
        if draft is not None:
            most = str(run.decoding.num_draft_tokens)
            drafting = ["--model-draft", path_of(draft), "--spec-draft-n-max", most]
            if on_gpu:
                drafting += ["--n-gpu-layers-draft", "999"]
            arms["speculative"] = [*shared, *drafting]
            # No probability reaches this one, so that each draft is dropped after its first token. K=0
            # ends the server (b11549), and requests cannot set it.
            arms["idle"] = [*shared, *drafting, "--spec-draft-p-min", "1.1"]
        return arms


RECORD = LlamaServer()
