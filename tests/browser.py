"""A page in headless Chromium."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needed = pytest.mark.skipif(CHROMIUM is None, reason="no chromium here (apt-get install chromium)")


def plots_drawn(page: Path, folder: Path) -> int:
    """How many of its images are decoded and have a size. The console must be free of errors."""
    script = (
        "<script>addEventListener('load', () => { document.title = 'drawn ' + "
        "[...document.images].filter(i => i.complete && i.naturalWidth > 500).length })</script>"
    )
    probe = folder / "probe.html"
    probe.write_text(page.read_text().replace("</body>", script + "</body>"))
    words = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    words += [f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=5000", "--dump-dom"]
    done = subprocess.run([*words, probe.as_uri()], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    found = re.search(r"<title>drawn (\d+)</title>", done.stdout)
    assert found is not None, done.stderr
    return int(found[1])
