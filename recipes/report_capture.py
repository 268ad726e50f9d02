"""Makes docs/report.png, the picture of a sweep's page, from real runs, which takes about five minutes:

    python recipes/report_capture.py [--sweep DIRECTORY]

Needs Chromium. The picture contains measured figures, so the machine must be otherwise idle: if the page has doubts, no
picture is made.
"""

from __future__ import annotations

import argparse
import base64
import io
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from harness.config.installation import CONF

ROOT = CONF.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
from browser import Page, browser  # noqa: E402

SWEEP = ["draft=tiny_draft,tiny_eagle3,lookup", "K=2,4,8", "num_prompts=10"]
# Words that must not be on the page.
DOUBTS = ("busy", "are not ordered", "Without a verdict")
# So many colours are enough for the pages' colours and the edges of letters, and take a third of the bytes.
COLOURS = 256
# Pixels.
WIDTH = 1240
MARGIN_ABOVE, MARGIN_BELOW = 24, 8


def harness(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "harness", *arguments]


def picture(page: Page, name: str, first: str, last: str) -> None:
    """Write docs/NAME.png, a picture of the page from the top of one element to the bottom of another.

    Args:
        first, last: JavaScript expressions for the two elements.
    """
    top = float(page.evaluate(f"{first}.getBoundingClientRect().top + scrollY"))
    bottom = float(page.evaluate(f"{last}.getBoundingClientRect().bottom + scrollY"))
    start = max(0.0, top - MARGIN_ABOVE)
    height = bottom + MARGIN_BELOW - start
    clip = {"x": 0, "y": start, "width": WIDTH, "height": height, "scale": 1.0}
    shot = page.call("Page.captureScreenshot", format="png", captureBeyondViewport=True, clip=clip)
    file = ROOT / "docs" / f"{name}.png"
    image = Image.open(io.BytesIO(base64.b64decode(shot["data"]))).convert("RGB")
    palette = image.quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
    palette.save(file, optimize=True)
    print(f"{file}: {file.stat().st_size} bytes")


def report_picture(directory: Path, page: Page) -> None:
    """Make a picture of a sweep's speed-ups."""
    file = directory / "report" / "report.html"
    command = harness("report", str(directory), f"output={file.parent}")
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    page.open(file.as_uri(), WIDTH)
    page.wait_for("document.readyState == 'complete'")
    shown = page.evaluate("document.body.innerText")
    doubts = [doubt for doubt in DOUBTS if doubt in shown]
    if doubts:
        sys.exit(f"{file} says {', '.join(doubts)}: measure again on an idle machine")
    pairs = "document.querySelector('.pairs').closest('section')"
    picture(page, "report", "document.body", pairs)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sweep", type=Path, help="the directory of a sweep that was measured")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        if options.sweep:
            directory = options.sweep.resolve()
        else:
            directory = Path(place, "sweep")
            arguments = [*SWEEP, f"hydra.sweep.dir={directory}", "results.file=null"]
            subprocess.run(harness("latency", "-m", *arguments), check=True)
        with browser(Path(place), "--hide-scrollbars") as page:
            report_picture(directory, page)


if __name__ == "__main__":
    main()
