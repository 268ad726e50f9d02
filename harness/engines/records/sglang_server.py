"""SGLang's server, started for each arm."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from harness.config.errors import SettingError
from harness.config.settings import ModelSettings, require
from harness.engines.record import Opening
from harness.engines.records.server import PresetServer

if TYPE_CHECKING:
    from harness.config.run import RunSettings
    from harness.config.settings import DraftSettings
    from harness.drafting.method import Method

# `--speculative-algorithm` by the kind of a head, or the method.
_ALGORITHMS = {"eagle3": "EAGLE3", "model": "STANDALONE", "lookup": "NGRAM", "mtp": "NEXTN"}


class SglangServer(PresetServer):
    """SGLang takes all memory of its GPUs, so that the arms run one after the other."""

    name = "sglang_server"
    summary = "starts SGLang's server, with and without the draft"
    program = ("python", "-m", "sglang.launch_server")
    can_idle = False

    def check(self, run: RunSettings) -> None:
        super().check(run)
        rule = "must be none with engine=sglang_server: engine.flags has SGLang's own"
        quantization = run.model.quantization
        require(quantization == "none", "model.quantization", rule, quantization)

    def check_draft(self, method: Method, draft: DraftSettings, settings: Any) -> None:
        rule = (
            f"must be a model, a head, or one of {', '.join(_ALGORITHMS)} with engine={self.name}"
        )
        require(method.name in _ALGORITHMS, "draft", rule, draft.name)

    def fit_together(self, opening: Opening) -> bool:
        return False

    def arguments(self, opening: Opening, num_blocks: int) -> dict[str, list[str]]:
        run = opening.settings
        planned = opening.planned
        dtype = str(planned.sketches[0].dtype).removeprefix("torch.")
        shared = ["--model-path", run.model.repository, "--host", "127.0.0.1", "--port", "{port}"]
        shared += ["--dtype", dtype, "--context-length", str(opening.context)]
        shared += ["--max-running-requests", str(opening.batch_size), "--enable-metrics"]
        shared += ["--tp-size", str(run.placement.gpus or 1)]
        arms = {"regular": shared}
        draft = run.draft
        if draft is not None:
            kind = draft.method if planned.head is None else planned.head.kind.name
            if kind not in _ALGORITHMS:
                raise SettingError(
                    "draft",
                    f"is a {kind} head, which engine={self.name} does not draft with",
                    draft.name,
                )
            k = run.decoding.most_draft_tokens
            drafting = ["--speculative-algorithm", _ALGORITHMS[kind]]
            if isinstance(draft, ModelSettings):
                drafting += ["--speculative-draft-model-path", draft.repository]
            drafting += ["--speculative-num-steps", str(k), "--speculative-eagle-topk", "1"]
            arms["speculative"] = [*shared, *drafting, "--speculative-num-draft-tokens", str(k + 1)]
        return arms


RECORD = SglangServer()
