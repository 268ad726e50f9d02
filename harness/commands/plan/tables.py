"""The page of `plan`, about one pair or many: the memory that each pair needs, and how fast it can be at best.

A row is the plan of one pair. Sizes are in bytes. `devices_bytes` contains the sizes on each device:
`{"cuda:0": {"free": 40e9, "model": 30e9, "draft": 0, "cache": 1e9}}`.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from operator import attrgetter

from harness.commands.plan.rows import PlanRow
from harness.config.amounts import amount, capitalised
from harness.config.demand import Remedy
from harness.reporting.names import named_runs
from harness.reporting.page import NextStep, Page, heading, title_of_many
from harness.reporting.table import Column, Line, Table, TableRow, number, times
from harness.reporting.words import setting_in_words, typed_again
from harness.results.runs import Run

_NO_GPU = "Which GPU? This machine has none, so main memory is planned for: give gpu_memory=4xA100, or 40GB."
# A verification that reads over this many times the bytes of a step costs noticeably more than a step.
_COSTLY_VERIFICATION = 1.2
# Above this ratio of a verification's bytes to those of a step, the verification uses further experts. The figures are
# then expectations, because different tokens may use the same experts.
_OTHER_EXPERTS = 1.01
# Number formats for which any implementation reads the same bytes of weights.
_HALF = ("bfloat16", "float16")
# Part of the column `program` if a server would run the pair.
_IN_SERVER = "a server"
# If plans are equal in these columns, only one of them is shown.
_IDENTITY = attrgetter(
    *"model draft num_draft_tokens batch_size devices devices_bytes read_bytes bandwidths"
    " predicted_speedup error".split()
)
# Settings that `latency` does not have.
_OWN_SETTINGS = ("gpus", "gpu_memory", "bandwidth", "prompt_length", "acceptance")


def plan_page(runs: Sequence[Run[PlanRow]]) -> Page | None:
    """The page that shows whether a pair fits, or how many of several pairs do; None if nothing was planned."""
    # Jobs that differ only in settings that `plan` ignores, such as prompts, have the same plan.
    runs = [*{str(_IDENTITY(run.last)): run for run in runs}.values()]
    rows = [run.last for run in runs]
    fitting = [row for row in rows if row.status == "ok"]
    # The next step is about the pair with the largest speed-up among those that fit or, if none fits, among all.
    fastest = max(
        fitting or rows, key=lambda row: row.predicted_speedup or row.highest_speedup or 0.0
    )
    steps = [*_steps(fastest, len(rows))]
    if len(rows) > 1:
        programs = sorted({f"in {row.program.partition(',')[0]}" for row in rows if row.program})
        num_fitting = f"{len(fitting)} of {len(rows)} fit"
        finding = Line(num_fitting, "good" if fitting else "bad", " or ".join(programs))
        # The names of the GPUs or memories for which the table's times hold. GPUs that are sold under one name may have
        # different bandwidths.
        slowest = sorted({_rates(row)[-1][0] for row in rows if row.bandwidths})
        least = f"the least time for reading weights and caches on {' or '.join(slowest)}"
        if any((row.num_gpus or 0) > 1 for row in rows):
            least += ", one GPU at a time"
        fastest_gpus = [rates[0][0] for row in rows if len(rates := _rates(row)) > 1]
        if fastest_gpus:
            least += f", the slowest GPU of its size: gpu_memory='{fastest_gpus[0]}' names another"
        why = [("Time", least)] if slowest else []
        table = Table.of("plans", "", named_runs(runs), _PLANS, look="bare")
        notes = dict.fromkeys(note for row in rows for note in _notes(row))
        return Page(
            title_of_many(rows),
            finding=[finding],
            doubts=[*notes],
            tables=[table],
            why=why,
            next=steps,
        )
    (row,) = rows
    if not row.devices_bytes:
        return None
    doubts = [] if row.num_gpus or row.placement == "cpu" else [_NO_GPU]
    doubts += _notes(row)
    title, tables = heading(row, _settings(row)), [_devices(row), _models(row)]
    return Page(
        title,
        finding=[_finding(row)],
        doubts=doubts,
        tables=tables,
        why=[*_why(row)],
        next=steps,
    )


def _notes(row: PlanRow) -> list[str]:
    """The notes of a plan as sentences."""
    return [f"{capitalised(note)}." for note in row.note or []]


def _settings(row: PlanRow) -> str:
    """`batch 4 · 128 prompt + 64 new tokens · K=4`, for the title."""
    settings = [
        f"batch {row.batch_size}" if (row.batch_size or 1) > 1 else "",
        f"{row.prompt_length} prompt + {row.max_new_tokens} new tokens",
        setting_in_words(row, "num_draft_tokens"),
        "" if row.placement == "auto" else f"placement {row.placement}",
    ]
    return " · ".join(filter(None, settings))


def _finding(row: PlanRow) -> Line:
    """Whether the pair fits, and how much memory is left on the device that has least to spare."""
    # A device that the pair does not use comes last.
    tightest, used, free = min(_uses(row), key=lambda use: (not use[1], use[2] - use[1]))
    where = "in main memory" if tightest == "cpu" else f"on {_device(tightest)}"
    stays = f"{amount(free - used)} remain free {where}"
    program = f"in {row.program}: " if row.program else ""
    needed = f"{amount((row.model_bytes or 0) + (row.draft_bytes or 0))} of weights"
    if row.needed_bytes is not None:
        needed = f"{amount(row.needed_bytes)} of weights and KV cache"
    if row.status != "ok":
        # `free_bytes` is the least that any of the GPUs has.
        is_least = len({size for _, _, size in _uses(row)}) > 1
        count = f"{'at least ' if is_least else ''}{row.num_gpus} × " if row.num_gpus else ""
        text = f"{program}{needed}, and {count}{gigabytes(row.free_bytes or 0)} GB are free"
        if row.num_gpus and row.reserve_bytes:
            text += f" less {amount(row.reserve_bytes)} reserve"
        return Line("does not fit", "bad", text)
    if row.needed_bytes is None:
        return Line("the weights fit", "strong", f"{stays}, for a KV cache of unknown size")
    return Line("fits", "good", f"{program}{needed}; {stays}")


def _why(row: PlanRow) -> Iterator[tuple[str, str]]:
    """Sentences, each with the name of its line: how many requests there is room for, the bytes that must be read per
    token, and the least times and the largest gain that follow from these.
    """
    if row.most_requests:
        alone = f" ({row.regular_most_requests:,} without the draft)" if row.draft else ""
        yield (
            "Load",
            f"a server has room for {row.most_requests:,} such requests at a time next to the weights{alone}",
        )
    if row.request_caches:
        at_16, at_8 = (
            [amount(size[bits]) for size in row.request_caches.values()] for bits in ("16", "8")
        )
        roles = [f"{size} ({role})" for role, size in zip(row.request_caches, at_16, strict=True)]
        caches = f"{' and '.join(roles)} at 16 bits, {' and '.join(at_8)} at 8 bits"
        yield "Cache", f"one such request needs {caches}"
    if row.read_bytes is None:
        reason = f"the size of the KV cache of {row.model} is not known"
        if row.needed_bytes is not None:
            reason = "how much an early exit reads is not computed"
        yield "Time", f"unknown: {reason}"
        return
    batch = f" for the {row.batch_size} rows of a batch" if (row.batch_size or 1) > 1 else ""
    is_mixture = (row.verification_steps or 1) > _OTHER_EXPERTS
    about = "about " if is_mixture and batch else ""
    reader = f" in {row.program}" if row.program else ""
    if row.dtype in _HALF and row.quantization == "none":
        reader = " in any implementation with 16-bit caches"
    yield "Time", f"one forward pass must read {about}{amount(row.read_bytes)}{batch}{reader}"
    num_gpus = row.num_gpus or 1
    at_a_time = ", with one GPU working at a time" if num_gpus > 1 else ""
    # The highest first. GPUs that are sold under one name may have different bandwidths.
    rates = _rates(row) or [("assuming 100 GB/s: bandwidth= says it", 100.0)]
    for name, rate in rates:
        least = f"regular decoding takes at least {least_ms(row.read_bytes, rate):.2f} ms/token{at_a_time}"
        if row.speculative_read_bytes is not None:
            with_draft = least_ms(row.speculative_read_bytes, rate)
            least += (
                f"; speculative decoding at least {with_draft:.2f} if all draft tokens are accepted"
            )
        basis = f"{name}, {rate:g} GB/s" if row.bandwidths else name
        yield "Time", f"{least} ({basis})"
    if num_gpus > 1:
        at_once = f"at least {least_ms(row.read_bytes, num_gpus * rates[0][1]):.2f} ms/token"
        yield (
            "Time",
            f"{at_once} with each layer split over all {num_gpus} (tensor parallelism, {rates[0][0]})",
        )
    if row.highest_speedup is not None:
        gain = "about" if is_mixture else "at most"
        if row.predicted_speedup is not None:
            tokens = f"{row.predicted_tokens_per_iteration:.2f} tokens per iteration"
            gain += f" {times(row.predicted_speedup)} at the given acceptance ({tokens}),"
        yield (
            "Gain",
            f"{gain} {times(row.highest_speedup)} if all draft tokens are accepted{at_a_time}",
        )
        yield "Gain", f"pays off only above {row.break_even_tokens:.2f} tokens per iteration"
    if (row.verification_steps or 1) > _COSTLY_VERIFICATION:
        cause = "the tokens that it checks take different experts"
        yield (
            "Gain",
            f"a verification reads {row.verification_steps:.1f} times what a step reads: {cause}",
        )


def _steps(row: PlanRow, num_plans: int) -> Iterator[NextStep]:
    """The next step: measure the pair, or change what keeps it from fitting. None for a pair that cannot gain, that no
    known change makes fit, or that a server would run without a GGUF draft.
    """
    if row.highest_speedup is not None and row.highest_speedup < 1:
        return
    if row.status != "ok":
        for remedy in _remedies(row)[:1]:
            # If the change needs more GPUs than there are, suggest to plan for hypothetical ones.
            change = remedy.change if remedy.num_gpus is None else f"gpus={remedy.num_gpus}"
            yield NextStep("would fit", change)
        return
    if _IN_SERVER in (row.program or ""):
        if row.draft is not None and row.draft.endswith(".gguf"):
            files = shlex.join(["-m", str(row.model), "-md", row.draft])
            flags = f"--spec-type draft-simple --spec-draft-n-max {row.num_draft_tokens}"
            command = f"harness latency -- llama-server {files} {flags}"
            yield NextStep("measure it", command=command)
        return
    changes = []
    leaving_out = [*_OWN_SETTINGS]
    if num_plans > 1:
        # Name the pair, because the preset on the command line may name other pairs, too.
        changes = [f"model={row.model}", f"draft={row.draft or 'none'}"]
        leaving_out += ["experiment", "pair"]
    # K is named if `acceptance=3.2@4` may have set it, or if it may distinguish this plan from others.
    if row.predicted_speedup is not None or (num_plans > 1 and row.draft):
        changes.append(f"K={row.num_draft_tokens}")
    command = typed_again(shlex.join(changes), command="latency", leaving_out=leaving_out)
    yield NextStep("measure it", command=command)


def _remedies(row: PlanRow) -> list[Remedy]:
    """Changes with which the pair would fit, in the order of the plan; [] if none is known."""
    return [Remedy(**change) for change in row.instead or []]


def _fits(row: PlanRow) -> str:
    """`yes`, `no; model=65B_4bit`, or `weights only` if the size of the KV cache is unknown; the status and the error
    of a plan that failed.
    """
    if row.status == "ok":
        return "yes" if row.needed_bytes is not None else "weights only"
    if row.status != "does_not_fit":
        return f"{row.status}: {row.error}"
    remedies = _remedies(row)
    return f"no; {remedies[0].change}" if remedies else "no"


def _models(row: PlanRow) -> Table:
    """A table with the sizes of each model."""
    columns = (
        Column("model", text=True),
        Column("parameters", _parameters),
        Column("held in"),
        Column("weights", lambda size: amount(size) if size else "the model's"),
        Column("KV cache"),
    )
    rows = []
    for role, prefix in (("model", ""), ("draft", "draft_")):
        parameters = getattr(row, f"{prefix}num_parameters")
        # A drafting method without weights has no sizes.
        if parameters is not None:
            quantization = getattr(row, f"{prefix}quantization")
            held_in = getattr(row, f"{prefix}dtype") if quantization == "none" else quantization
            cache = getattr(row, f"{prefix}cache_bytes")
            cached = "unknown" if cache is None else amount(cache)
            weights = getattr(row, f"{role}_bytes")
            rows.append(TableRow((getattr(row, role), parameters, held_in, weights, cached)))
    return Table("models", "", columns, tuple(rows), look="plain")


def _devices(row: PlanRow) -> Table:
    """A table with the bytes on each device: weights, cache and the memory that was free before. If the pair does not
    fit, a note lists changes with which it would.
    """
    rows = []
    for name, sizes in (row.devices_bytes or {}).items():
        draft = sizes["draft"] if row.draft else None
        rows.append(
            TableRow((_device(name), sizes["model"], draft, sizes["cache"], sizes["free"] or None))
        )
    columns = (
        Column("GB", text=True),
        Column("model", gigabytes),
        Column("draft", gigabytes, optional=True),
        Column("KV cache", gigabytes),
        Column("free\nbefore", gigabytes),
    )
    instead: list[str] = []
    if row.status != "ok":
        remedies = _remedies(row)
        beginning = ["What would fit instead:"] if remedies else []
        instead = [*beginning, *(f"  {remedy}" for remedy in remedies)]
    return Table("devices", "", columns, tuple(rows), notes=tuple(instead), look="plain")


def _uses(row: PlanRow) -> list[tuple[str, int, int]]:
    """For each device with free memory: its name, the bytes that the pair needs there (weights, caches and a GPU's
    reserve), and the bytes that were free before.
    """
    uses = []
    for name, sizes in (row.devices_bytes or {}).items():
        used = sizes["model"] + sizes["draft"] + sizes["cache"]
        if name.startswith("cuda") and used:
            used += row.reserve_bytes or 0
        if sizes["free"]:
            uses.append((name, used, sizes["free"]))
    return uses


def _rates(row: PlanRow) -> list[tuple[str, float]]:
    """The known bandwidths, as names and GB/s, the highest first; [] if none is known."""
    return sorted((row.bandwidths or {}).items(), key=lambda rate: -rate[1])


def _slowest_ms(row: PlanRow, num_bytes: float | None) -> float | None:
    """Milliseconds to read this many bytes at the lowest known bandwidth; None if either is unknown."""
    return least_ms(num_bytes, _rates(row)[-1][1]) if row.bandwidths and num_bytes else None


def least_ms(num_bytes: float, rate: float) -> float:
    """Milliseconds to read this many bytes at a rate in GB/s."""
    return num_bytes / rate / 1e6


def _device(name: str) -> str:
    """`GPU 0` for `cuda:0`, `main memory` for `cpu`."""
    return "main memory" if name == "cpu" else name.replace("cuda:", "GPU ")


def gigabytes(size: float) -> str:
    """A number of bytes in units of 10^9, without the unit: `40.0`, `0.031`."""
    return f"{size / 1e9:.1f}" if size >= 0.1e9 else f"{size / 1e9:.2g}"


def _parameters(count: float) -> str:
    return f"{count / 1e9:.2f} billion" if count >= 0.1e9 else f"{count / 1e6:.1f} million"


# One row per plan. The title of the page contains the settings that all plans share.
_PLANS = (
    Column("pair", of="name.cell", text=True, varies=True),
    Column("K", of="row.num_draft_tokens", varies=True),
    Column("fits", of=_fits, text=True).at("row"),
    Column("needs\nGB", gigabytes, "row.needed_bytes"),
    Column("ms/token\nat least", number(), lambda row: _slowest_ms(row, row.read_bytes)).at("row"),
    Column("at that\nacceptance", times, "row.predicted_speedup", optional=True),
    Column("all drafts\naccepted", times, "row.highest_speedup"),
    Column(
        "ms/token\nthen",
        number(),
        lambda row: _slowest_ms(row, row.speculative_read_bytes),
    ).at("row"),
)
