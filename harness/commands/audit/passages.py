"""Figures in sentences and in logs of llama.cpp, vLLM and SGLang, as rows of a table whose columns have our names."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator

_NUMBER = r"\d+(?:\.\d+)?"
# Words before a figure that make it a bound and no measurement.
_HEDGED = r"(?<!up to )(?<!over )(?<!than )(?<!least )(?<!nearly )(?<!almost )(?<!under )(?<![<>≥≤\d.])(?<![<>≥≤] )"
_IS = r"(?:\s+(?:rate|ratio|of|is|was|at|about|around|only|averaged?|averaging))*\s*[:=≈~]?\s*"
_PATTERNS = {
    "speedup": (
        rf"{_HEDGED}({_NUMBER}\s*[×x])\s*(?:faster|(?:decod\w* |overall )?speed-?ups?|the speed|as fast)",
        rf"{_HEDGED}({_NUMBER}) times (?:faster|as fast)",
        rf"{_HEDGED}({_NUMBER}\s*% (?:faster|slower))",
        rf"speed-?up{_IS}{_HEDGED}({_NUMBER}\s*[×x])",
    ),
    "acceptance_rate": (
        rf"\baccept(?:ance|ed|s|ing)?\b{_IS}({_NUMBER}\s*%)",
        rf"{_HEDGED}({_NUMBER}\s*%)(?: of (?:the )?draft\w*(?: tokens)?)?(?: (?:are|is|were))? accept",
        rf"\bacceptance\b{_IS}(0\.\d+|1\.0+)(?![\d.]*\s*[%×x])",
    ),
    "tokens_per_iteration": (
        rf"\baccept\w* len\w*{_IS}({_NUMBER})(?!\s*%)",
        rf"(?:\btau\b|τ){_IS}({_NUMBER})",
        rf"{_HEDGED}({_NUMBER}) (?:accepted )?tokens (?:per|/) (?:iteration|step|round|verification|forward)",
    ),
    "num_draft_tokens": (
        r"\bk\s*=\s*(\d+)",
        r"(?:γ|\bgamma)\s*=\s*(\d+)",
        r"\bn[-_ ]?max\W{0,2}(\d+)",
        r"num_speculative_tokens\W{1,4}(\d+)",
        r"(\d+) (?:draft(?:ed)?|speculative) tokens",
        r"\bdraft(?:ing)? (?:len\w*|depth|size)(?: of)?\W{0,2}(\d+)",
    ),
    "regular_tokens_per_second": (
        rf"({_NUMBER})(?: ?(?:tok\w*|t|tk)/s)? ?(?:→|->|to) ?{_NUMBER} ?(?:tok\w*|t|tk)/s",
    ),
    "tokens_per_second": (
        rf"{_NUMBER}(?: ?(?:tok\w*|t|tk)/s)? ?(?:→|->|to) ?({_NUMBER}) ?(?:tok\w*|t|tk)/s",
    ),
}
# Figures that a row needs two of, one of them a claim.
_CLAIMS = {"speedup", "acceptance_rate", "tokens_per_iteration"}


def rows_of_sentences(text: str) -> list[dict[str, str]]:
    """The figures of each paragraph, or of its sentences where it has two of a kind.

    A row has a claim and something that it can be held against: `3× faster, acceptance 70 % at 4 draft tokens`.
    """
    rows = []
    # Commands and code claim nothing.
    prose = re.sub(r"^(```|~~~).*?^\1", "", text, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\s*\n|\n(?=[-*#|>]|\d+\.)", prose):
        parts = [" ".join(paragraph.split())]
        if any(len(values) > 1 for values in _figures(parts[0]).values()):
            parts = re.split(r"(?<=[.;!?])\s+", parts[0])
        for part in parts:
            found = _figures(part)
            if any(len(values) > 1 for values in found.values()):
                continue
            row = {name: values[0] for name, values in found.items() if values}
            if len(row) > 1 and not _CLAIMS.isdisjoint(row):
                rows.append(row)
    return rows


def _figures(text: str) -> dict[str, list[str]]:
    """All figures of each kind, without those that were found twice at one place."""
    found = {}
    for name, patterns in _PATTERNS.items():
        places = {}
        for pattern in patterns:
            for match in re.finditer(pattern, text, re.IGNORECASE):
                places[match.start(1)] = re.sub(r" times$", "×", match[1])
        found[name] = list(places.values())
    return found


_EVAL_TIME = re.compile(rf"(?<!prompt )eval time =\s*({_NUMBER}) ms /\s*(\d+) (?:tokens|runs)")
_ACCEPTED = re.compile(
    rf"draft acceptance(?: rate)? =\s*{_NUMBER}\s*\(\s*(\d+) accepted\s*/\s*(\d+) generated"
)
# `mtp-bench.py`, which threads about llama.cpp quote.
_BENCH = re.compile(
    rf"^\s*(\w+)\s+pred=\s*(\d+)\s+draft=\s*(\d+)\s+acc=\s*(\d+).*?tok/s=\s*({_NUMBER})",
    re.MULTILINE,
)
_VLLM = re.compile(
    rf"Mean acceptance length: ({_NUMBER}).*?(?:Accepted: (\d+) tokens, Drafted: (\d+) tokens, )?"
    rf"Per-position acceptance rate: ([\d., ]+), Avg Draft acceptance rate: ({_NUMBER})%"
)
_VLLM_SPEED = re.compile(rf"Avg generation throughput: ({_NUMBER}) tokens/s")
_SGLANG = re.compile(rf"(?:accept len: ({_NUMBER}),.*?)?gen throughput \(token/s\): ({_NUMBER})")


def rows_of_log(text: str) -> list[dict[str, str]]:
    """A row for each arm of a server's log, or for each line of a benchmark's."""
    return [*_of_benches(text), *_of_llama_cpp(text), *_of_vllm(text), *_of_sglang(text)]


def _counted(accepted: int, drafted: int, tokens: int) -> dict[str, str]:
    """Figures by counts: the first token comes from the prompt, and each iteration has one of the target's own."""
    if not drafted or tokens - 1 <= accepted:
        return {}
    iterations = tokens - 1 - accepted
    return {
        "num_accepted": str(accepted),
        "num_drafted": str(drafted),
        "acceptance_rate": f"{100 * accepted / drafted:.1f} %",
        "tokens_per_iteration": f"{1 + accepted / iterations:.3f}",
        "mean_num_draft_tokens": f"{drafted / iterations:.3f}",
    }


def _of_benches(text: str) -> Iterator[dict[str, str]]:
    for name, tokens, drafted, accepted, speed in _BENCH.findall(text):
        row = {
            "prompts": name,
            "draft": "draft" if int(drafted) else "none",
            "tokens_per_second": speed,
        }
        yield row | _counted(int(accepted), int(drafted), int(tokens))


def _of_llama_cpp(text: str) -> Iterator[dict[str, str]]:
    """The sums over requests, with drafts and without; a request's counts follow its times."""
    times = [*_EVAL_TIME.finditer(text)]
    ends = [*(one.start() for one in times[1:]), len(text)]
    milliseconds: dict[str, float] = defaultdict(float)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for time, end in zip(times, ends, strict=False):
        drafts = _ACCEPTED.search(text, time.end(), end)
        arm = "draft" if drafts else "none"
        milliseconds[arm] += float(time[1])
        counts[arm].update(tokens=int(time[2]), requests=1)
        if drafts:
            counts[arm].update(accepted=int(drafts[1]), drafted=int(drafts[2]))
    for arm, count in counts.items():
        if not count["tokens"]:
            continue
        row = {"draft": arm, "ms_per_token": f"{milliseconds[arm] / count['tokens']:#.5g}"}
        # One first token for each request.
        tokens = count["tokens"] - count["requests"] + 1
        yield row | _counted(count["accepted"], count["drafted"], tokens)
    if not times:
        pairs = [(int(one[1]), int(one[2])) for one in _ACCEPTED.finditer(text)]
        accepted, drafted = sum(pair[0] for pair in pairs), sum(pair[1] for pair in pairs)
        if drafted:
            yield {
                "draft": "draft",
                "num_accepted": str(accepted),
                "num_drafted": str(drafted),
                "acceptance_rate": f"{100 * accepted / drafted:.1f} %",
            }


def _of_vllm(text: str) -> Iterator[dict[str, str]]:
    lines = _VLLM.findall(text)
    if not lines:
        return
    positions = len(lines[0][3].split(","))
    accepted = sum(int(line[1] or 0) for line in lines)
    drafted = sum(int(line[2] or 0) for line in lines)
    length = sum(float(line[0]) for line in lines) / len(lines)
    rate = sum(float(line[4]) for line in lines) / len(lines)
    row = {"draft": "draft", "num_draft_tokens": str(positions)}
    if drafted:
        length, rate = 1 + positions * accepted / drafted, 100 * accepted / drafted
        row |= {"num_accepted": str(accepted), "num_drafted": str(drafted)}
    row |= {"tokens_per_iteration": f"{length:.3f}", "acceptance_rate": f"{rate:.1f} %"}
    speeds = [float(speed) for speed in _VLLM_SPEED.findall(text) if float(speed)]
    if speeds:
        row["tokens_per_second"] = f"{sum(speeds) / len(speeds):#.5g}"
    yield row


def _of_sglang(text: str) -> Iterator[dict[str, str]]:
    lines = _SGLANG.findall(text)
    for name in ("draft", "none"):
        arm = [line for line in lines if bool(line[0]) == (name == "draft")]
        if arm:
            row = {"draft": name}
            row["tokens_per_second"] = f"{sum(float(line[1]) for line in arm) / len(arm):#.5g}"
            if name == "draft":
                length = sum(float(line[0]) for line in arm) / len(arm)
                row["tokens_per_iteration"] = f"{length:.3f}"
            yield row
