"""The programs in docs/ run as they stand, in order, as one program for each document."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))


def source(path):
    """The Python blocks of a document, on the lines where they stand."""
    lines = path.read_text().splitlines()
    inside = False
    for index, line in enumerate(lines):
        if line.startswith("```"):
            inside = line == "```python"
            lines[index] = ""
        elif not inside:
            lines[index] = ""
    return "\n".join(lines)


def run(path):
    """Run them in a process of their own: what they register lasts as long as the process."""
    code = f"exec(compile({source(path)!r}, {str(path)!r}, 'exec'))"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_programs_run(path):
    ran = run(path)
    assert ran.returncode == 0, ran.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_a_block_that_fails_is_found_on_its_line(tmp_path):
    path = tmp_path / "one.md"
    path.write_text("Text\n\n```python\nx = 1\nassert x == 2\n```\n\n```sh\nnot python\n```\n")
    ran = run(path)
    assert ran.returncode == 1
    assert f'File "{path}", line 5' in ran.stderr
