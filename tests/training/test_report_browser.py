"""The report page in a browser: no errors, nothing wider than a phone, headings that sort."""

from __future__ import annotations

import html
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from test_report import explanation, result, trial

from routepilot.training.report import render

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("chrome")

QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    "--enable-logging=stderr",
)

#: Widths of a small phone and of a desktop, CSS pixels.
WIDTHS = (320, 1280)

#: Sorts the first table by its fourth column, twice, and tells what came of it.
PROBE = """<script>
const page = document.documentElement, table = document.querySelector("table.sortable");
let order = "";
if (table) {
  const head = table.tHead.rows[0].cells[3];
  head.firstElementChild.click(); head.firstElementChild.click();
  order = [...table.tBodies[0].rows].map(r => r.cells[3].textContent.trim()).join("|");
}
parent.document.title += `[${page.scrollWidth} ${innerWidth} ${order}]`;
</script></body>"""


def long_run() -> dict[str, Any]:
    words = "Could not find any implementation for node {ForeignNode[onnx::MatMul_1234...Add_1]} "
    route = "-mha_fusion:v2:causal_mask=on -builder_optimization_level=5 -precision=fp16"
    trials = [trial(f"{route} -peep:max={i}", speedup=0.5 + i / 10) for i in range(30)]
    trials += [{**trial(route, "build_failed", None), "reason": words * 3}]
    return result(
        model="m" * 200, route=route, trials=trials, trtexec=f"trtexec --setBuildRoute={route}" * 3
    )


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
@pytest.mark.parametrize(
    "page",
    [
        render(result()),
        render(result(is_default=True, route="", trials=[])),
        render(result(is_default=True, route="", state="searching")),
        render(long_run(), None, explanation()),
    ],
    ids=["winner", "nothing built", "unfinished", "long"],
)
def test_in_a_browser(page: str, tmp_path: Path) -> None:
    probed = html.escape(page.replace("</body>", PROBE), quote=True)
    frames = "".join(f'<iframe width={w} height=500 srcdoc="{probed}"></iframe>' for w in WIDTHS)
    (tmp_path / "frames.html").write_text(f"<title></title>{frames}", encoding="utf-8")
    command = [str(CHROMIUM), *QUIET, f"--user-data-dir={tmp_path / 'profile'}"]
    done = subprocess.run(
        [*command, "--dump-dom", f"file://{tmp_path / 'frames.html'}"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    title = re.search("<title>(.*?)</title>", done.stdout, re.S)
    assert title is not None
    seen = re.findall(r"\[(\d+) (\d+) ([^\]]*)\]", title.group(1))
    assert sorted(int(inner) for _, inner, _ in seen) == sorted(WIDTHS)
    for width, inner, order in seen:
        assert int(width) <= int(inner), "the page is wider than the window"
        shown = [float(text.rstrip("x")) for text in order.split("|") if text]
        assert shown == sorted(shown, reverse=True)
        assert not order.startswith("|"), "what has no figure stands at the end"
