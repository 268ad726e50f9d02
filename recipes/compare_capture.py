"""Makes the picture of `compare` in the README from a real run: docs/compare.svg.

    python recipes/compare_capture.py [--model DIR] [--draft DIR] [--prompt TEXT] [--out docs/compare.svg]

The pair runs as with `python -m harness compare`, through the command itself; its output is recorded by rich and
rendered as SVG. The figures in the picture are those of the machine that made it.
"""

from __future__ import annotations

import argparse
import io
import re
import sys
import tempfile
from pathlib import Path
from unittest import mock

from rich.console import Console
from rich.text import Text

from harness.cli import main as cli
from harness.cli.menu.names import CONF
from harness.commands.compare import measure as compare

PROMPT = "Once upon a time there was a"
WIDTH = 92


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="a directory; the shipped tiny pair unless given")
    parser.add_argument("--draft")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--out", type=Path, default=CONF.parent / "docs" / "compare.svg")
    options = parser.parse_args()

    # Not interactive: the picture shows how a race ends, not the frames on the way there.
    screen = Console(
        record=True,
        width=WIDTH,
        file=io.StringIO(),
        force_terminal=True,
        force_interactive=False,
        color_system="truecolor",
        highlight=False,
    )
    pair = [
        f"{role}={path}"
        for role, path in (("model", options.model), ("draft", options.draft))
        if path
    ]
    typed = f"python -m harness compare {' '.join(pair)}".rstrip()
    screen.print(Text.assemble(("$ ", "dim"), typed))
    with tempfile.TemporaryDirectory() as directory:
        settings = [
            *pair,
            "prompts=tiny",
            f"prompt={options.prompt}",
            f"seed={options.seed}",
            f"decoding.max_new_tokens={options.tokens}",
            f"results.file={directory}/compare.csv",
            f"hydra.run.dir={directory}",
        ]
        with (
            mock.patch.object(sys, "argv", ["harness", "compare", *settings]),
            mock.patch.object(compare, "plain_console", return_value=screen),
        ):
            try:
                cli.main()
            except SystemExit as end:
                if end.code:
                    raise
    options.out.parent.mkdir(parents=True, exist_ok=True)
    picture = screen.export_svg(title="compare")
    # The picture must not send its readers' browsers elsewhere for a font.
    picture = re.sub(r"@font-face\s*\{.*?\}\s*", "", picture, flags=re.DOTALL)
    picture = picture.replace("Fira Code, monospace", "ui-monospace, Menlo, Consolas, monospace")
    options.out.write_text(picture, encoding="utf-8")
    print(f"{options.out}: {len(picture)} bytes")


if __name__ == "__main__":
    main()
