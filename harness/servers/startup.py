"""Tables about the commands of known servers: the flags that make a server speculate, and other facts that a
measurement needs. They are values without code, one for each kind of server (`Dialect.startup`).

The flags are those of llama.cpp b10434, vLLM 0.32, mlx_lm 0.32 and SGLang 0.5.23; `command.py` applies them. The flags
of ik_llama.cpp, whose program has the same name as llama.cpp's, are from its sources and its docs/speculative.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Startup:
    """How one kind of server is started.

    `speculation` and `switches` list all flags about speculation, which the regular command must not have. `drafts_by`,
    `method` and `draft` list some of these flags again, by their meaning.

    Attributes:
        programs: the words that start it, such as `vllm serve`. If the program is a path, only its last part counts. A
            single word also stands for its variants: `llama-server` for `llama-server-vulkan`.
        images: parts of the names of container images that start it.
        speculation: flags with one value that are about speculation, and have no meaning without it.
        switches: flags without a value that are about speculation.
        drafts_by: the flags, switches and environment variables that turn speculation on. If one of these flags has
            `none` among its values each time it is typed, the command does not speculate, even if others ask for it.
        prefixes: beginnings of flags about speculation. If the regular command must be derived, a flag with such a
            beginning that is in neither `speculation` nor `switches` is refused.
        variables: beginnings of environment variables about speculation; they are removed for the regular command.
        environment: beginnings of environment variables that are part of a measurement's identity, because they affect
            how the server runs.
        refused: flags with which a server cannot be measured by its command, with the reasons.
        argparse: whether flags are read as by Python's argparse: `--flag=value` and `--config.key value` are possible.
            In the flags of any server, `_` is read as `-`.
        json_flags: the names of a single flag whose value is JSON, its main name first. `--speculative-config.method`
            stands for the entry `method` of its value.
        for_all: flags that are added to every command, unless the user typed them, with whatever value.
        for_regular: flags that are added in the same way to the regular command, because without speculation the
            server has other defaults. A flag and its value are one text: `--max-running-requests 48`.
        address: flags that determine the address on which it listens.
        listening: the flags of `address` with the values with which harness replaces them, unless the user typed
            `{port}`, which stands for a free port.
        method: flags that name the drafting method.
        draft: flags that name the draft model.
        pools: methods that draft from a pool of all earlier answers. A prompt that is sent again finds its own answer
            in the pool, whatever its salt is.
        model: flags that name the model.
        model_follows: whether the first word after the program may name the model, too.
        served_name: flags for the name under which the model is served.
        sized_by: flags that bound the memory that it takes on a GPU; any one of them is enough. Two servers share a GPU
            only if both commands have such a flag.
        without_core_binding: environment variables, as `NAME=value`, with which two of these servers can share a CPU.
            Without these variables, both bind their threads to the same cores, and wait for each other.
        note: a line for the user about further differences between a server with speculation and one without.
        example: flags that would make it speculate, for error messages.
    """

    programs: tuple[str, ...]
    images: tuple[str, ...] = ()
    speculation: tuple[str, ...] = ()
    switches: tuple[str, ...] = ()
    drafts_by: tuple[str, ...] = ()
    prefixes: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    environment: tuple[str, ...] = ()
    refused: Mapping[str, str] = field(default_factory=dict)
    argparse: bool = False
    json_flags: tuple[str, ...] = ()
    for_all: tuple[str, ...] = ()
    for_regular: tuple[str, ...] = ()
    address: tuple[str, ...] = ("--host", "--port")
    listening: tuple[str, ...] = ("--host", "127.0.0.1", "--port", "{port}")
    method: tuple[str, ...] = ()
    draft: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()
    model: tuple[str, ...] = ("--model",)
    model_follows: bool = False
    served_name: tuple[str, ...] = ("--served-model-name",)
    sized_by: tuple[str, ...] = ()
    without_core_binding: tuple[str, ...] = ()
    note: str = ""
    example: str = ""


# For a program that is not known: it is not known what any word of its command means.
NOT_KNOWN = Startup(programs=(), address=(), model=(), served_name=())

START_BOTH = "start both servers yourself, and name them by url= and regular_url="
_TLS = f"the harness asks a server that it starts without TLS: {START_BOTH}"
_PREFIX = f"the harness asks a server that it starts at /v1: {START_BOTH}"
_SEVERAL = f"starts more than one server, or a part of one: {START_BOTH}"
_PRESET = "a preset that names its port, too: type the flags that it stands for"
_CONFIG = "may set how the server speculates: type these settings as flags"

LLAMA_CPP = Startup(
    programs=("llama-server", "llama serve"),
    environment=("LLAMA_", "GGML_"),
    images=("llama.cpp:server", "llama.cpp:full"),
    speculation=tuple(
        """
        --spec-type
        --spec-draft-model -md --model-draft
        --spec-draft-hf -hfd -hfrd --hf-repo-draft
        --spec-draft-n-max --spec-draft-n-min
        --spec-draft-p-min --draft-p-min --spec-draft-p-split --draft-p-split
        --spec-draft-ngl -ngld --gpu-layers-draft --n-gpu-layers-draft
        --spec-draft-device -devd --device-draft
        --spec-draft-type-k -ctkd --cache-type-k-draft --spec-draft-type-v -ctvd --cache-type-v-draft
        --spec-draft-threads -td --threads-draft --spec-draft-threads-batch -tbd --threads-batch-draft
        --spec-draft-cpu-mask -Cd --cpu-mask-draft --spec-draft-cpu-mask-batch -Cbd --cpu-mask-batch-draft
        --spec-draft-cpu-range -Crd --cpu-range-draft --spec-draft-cpu-range-batch -Crbd --cpu-range-batch-draft
        --spec-draft-cpu-strict --cpu-strict-draft --spec-draft-cpu-strict-batch --cpu-strict-batch-draft
        --spec-draft-prio --prio-draft --spec-draft-prio-batch --prio-batch-draft
        --spec-draft-poll --poll-draft --spec-draft-poll-batch --poll-batch-draft
        --spec-draft-override-tensor -otd --override-tensor-draft
        --spec-draft-n-cpu-moe --spec-draft-ncmoe -ncmoed --n-cpu-moe-draft
        --spec-draft-ctx-size -cd --ctx-size-draft --spec-draft-replace --spec-replace
        --spec-ngram-mod-n-min --spec-ngram-mod-n-max --spec-ngram-mod-n-match
        --spec-ngram-simple-size-n --spec-ngram-simple-size-m --spec-ngram-simple-min-hits
        --spec-ngram-map-k-size-n --spec-ngram-map-k-size-m --spec-ngram-map-k-min-hits
        --spec-ngram-map-k4v-size-n --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-min-hits
        --spec-ngram-size-n --spec-ngram-size-m --spec-ngram-min-hits
        --spec-ckpt-mode --spec-draft-adaptive-length-threshold --spec-dflash-cross-ctx
        -lcs --lookup-cache-static -lcd --lookup-cache-dynamic
        --draft --draft-n --draft-max --draft-min --draft-n-min
        -mtprot --mtp-requantize-output-tensor
        --spec-stage -draft --spec-synth-len --spec-synth-rates
        """.split()
    ),
    switches=tuple(
        """
        -mtp --spec-autotune --no-spec-type
        --spec-draft-cpu-moe -cmoed --cpu-moe-draft
        --spec-draft-backend-sampling --no-spec-draft-backend-sampling
        --spec-default
        """.split()
    ),
    # Old builds, without --spec-type, speculate with --draft-max alone. A draft without further flags speculates if its
    # file is a head.
    drafts_by=tuple(
        """
        --spec-type --spec-default --draft --draft-n --draft-max LLAMA_ARG_SPEC_TYPE
        -mtp --spec-stage
        --spec-draft-model -md --model-draft --spec-draft-hf -hfd -hfrd --hf-repo-draft
        """.split()
    ),
    prefixes=("--spec-", "--draft-"),
    variables=(
        "LLAMA_ARG_SPEC_",
        "LLAMA_ARG_DRAFT_",
        "LLAMA_ARG_MODEL_DRAFT",
        "LLAMA_ARG_N_GPU_LAYERS_DRAFT",
    ),
    refused={
        "--fim-qwen-7b-spec": _PRESET,
        "--fim-qwen-14b-spec": _PRESET,
        "--models-dir": _SEVERAL,
        "--models-preset": _SEVERAL,
        "--ssl-key-file": _TLS,
        "--ssl-cert-file": _TLS,
        "--api-prefix": _PREFIX,
        "--api-key-file": "no one else reaches a server that the harness starts: leave the key out",
    },
    for_all=("--metrics",),
    method=("--spec-type", "--spec-stage"),
    draft=(
        "--spec-draft-model",
        "-md",
        "--model-draft",
        "--spec-draft-hf",
        "-hfd",
        "-hfrd",
        "--hf-repo-draft",
    ),
    # ggml-org/llama.cpp, issue 27852: one table for all slots, and one for each slot.
    pools=("ngram-mod", "ngram-cache"),
    model=("-m", "--model", "-hf", "-hfr", "--hf-repo", "-mu", "--model-url"),
    served_name=("-a", "--alias"),
    sized_by=("-ngl", "--gpu-layers", "--n-gpu-layers"),
    note=(
        "llama-server chooses layers on the GPU (-ngl) and the context (-c) by the memory that is free,"
        " less of it beside a draft: set both, so that the arms differ in nothing else"
    ),
    example="--spec-type draft-simple -md DRAFT.gguf, --spec-type draft-mtp, or --spec-type ngram-simple",
)

VLLM = Startup(
    programs=("vllm serve", "-m vllm.entrypoints.openai.api_server"),
    environment=("VLLM_",),
    images=("vllm-openai", "vllm/vllm"),
    speculation=(
        "--speculative-config",
        "-sc",
        "--spec-method",
        "--spec-model",
        "--spec-tokens",
        # vLLM refuses to start with this flag if it does not speculate.
        "--per-request-spec-decode-metrics",
    ),
    drafts_by=("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"),
    # Not `--spec`, because `--specialize-active-lora` does not concern speculation. vLLM also accepts abbreviated
    # flags, such as `--speculative-c`.
    prefixes=("--spec-", "--speculative", "--per-request-s"),
    refused={
        "--config": _CONFIG,
        "--uds": "it would listen on no port",
        **dict.fromkeys(
            "--headless --nnodes --node-rank --data-parallel-size-local --kv-transfer-config".split(),
            _SEVERAL,
        ),
        "--ssl-keyfile": _TLS,
        "--root-path": _PREFIX,
    },
    argparse=True,
    json_flags=("--speculative-config", "-sc"),
    for_all=("--enable-prompt-tokens-details",),
    method=("--speculative-config.method", "--spec-method"),
    draft=("--speculative-config.model", "--spec-model"),
    pools=("suffix",),
    model_follows=True,
    sized_by=("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--kv-cache-memory"),
    without_core_binding=("VLLM_CPU_OMP_THREADS_BIND=nobind",),
    note=(
        "with a draft vLLM has fewer blocks for keys and values, and with some methods (ngram, medusa, suffix)"
        " no asynchronous scheduling: that is part of what is measured"
    ),
    example='--speculative-config \'{"method": "ngram", "num_speculative_tokens": 4}\'',
)

SGLANG = Startup(
    programs=("-m sglang.launch_server", "sglang serve"),
    environment=("SGLANG_",),
    speculation=tuple(
        """
        --speculative-algorithm --speculative-draft-model-path --speculative-draft-model
        --speculative-draft-model-revision --speculative-draft-load-format
        --speculative-draft-model-quantization --speculative-draft-kv-cache-dtype
        --speculative-draft-attention-backend --speculative-draft-window-size --speculative-draft-sink-size
        --speculative-num-steps --speculative-eagle-topk --speculative-num-draft-tokens
        --speculative-dflash-block-size --speculative-domino-candidate-pool-size
        --speculative-dspark-block-size --speculative-dspark-sps-table-path
        --speculative-dspark-confidence-sts-path
        --speculative-accept-threshold-single --speculative-accept-threshold-acc
        --speculative-token-map --speculative-attention-mode --speculative-dsa-topk-backend
        --speculative-moe-runner-backend --speculative-moe-a2a-backend --speculative-adaptive-config
        --speculative-ngram-min-bfs-breadth --speculative-ngram-max-bfs-breadth
        --speculative-ngram-match-type --speculative-ngram-max-trie-depth --speculative-ngram-capacity
        --speculative-ngram-external-corpus-path --speculative-ngram-external-sam-budget
        --speculative-ngram-external-corpus-max-tokens
        --uno-lora-path --spec-trace-dir --decrypted-draft-config-file
        --decoupled-spec-bind-endpoint --decoupled-spec-connect-endpoints --decoupled-spec-rank
        --decoupled-spec-role
        """.split()
    ),
    switches=tuple(
        """
        --speculative-use-rejection-sampling --speculative-use-block-verification --speculative-adaptive
        --speculative-dspark-align-verify-tokens-to-graph-tier
        --speculative-enable-w4a4-mxfp4-megamoe --no-speculative-enable-w4a4-mxfp4-megamoe
        --enable-multi-layer-eagle --enable-draft-weights-cpu-backup
        """.split()
    ),
    drafts_by=("--speculative-algorithm",),
    prefixes=("--spec-", "--speculative", "--decoupled-spec"),
    variables=("SGLANG_SIMULATE_ACC_",),
    refused={
        "--config": _CONFIG,
        "--smg-grpc-mode": "it would have no HTTP",
        "--ssl-keyfile": _TLS,
        "--fastapi-root-path": _PREFIX,
        **dict.fromkeys(("--disaggregation-mode", "--nnodes", "--node-rank"), _SEVERAL),
    },
    argparse=True,
    for_all=("--enable-metrics", "--enable-cache-report"),
    # This is SGLang's default limit when it speculates; it is set so that both arms have the same limit.
    for_regular=("--max-running-requests 48",),
    method=("--speculative-algorithm",),
    draft=("--speculative-draft-model-path", "--speculative-draft-model"),
    pools=("NGRAM",),
    model=("--model-path", "--model"),
    sized_by=("--mem-fraction-static",),
    example="--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT",
)

MLX_LM = Startup(
    programs=("mlx_lm.server", "-m mlx_lm.server", "-m mlx_lm server"),
    speculation=("--draft-model", "--num-draft-tokens"),
    drafts_by=("--draft-model",),
    prefixes=("--draft", "--num-d"),
    argparse=True,
    draft=("--draft-model",),
    served_name=(),
    example="--draft-model DRAFT",
)
