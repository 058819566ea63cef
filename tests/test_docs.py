"""The programs in docs/ run as they stand, in order, as one program for each document."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted((ROOT / "docs").glob("*.md"))


def program(path):
    """The Python blocks of a document, on the lines where they stand."""
    lines = path.read_text().splitlines()
    inside = False
    for index, line in enumerate(lines):
        if line.startswith("```"):
            inside = line == "```python"
            lines[index] = ""
        elif not inside:
            lines[index] = ""
    return compile("\n".join(lines), str(path), "exec")


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_the_programs_run(path):
    exec(program(path), {"__name__": "__main__"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_links_to_files_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


def test_a_block_that_fails_is_found_on_its_line(tmp_path):
    path = tmp_path / "one.md"
    path.write_text("Text\n\n```python\nx = 1\nassert x == 2\n```\n\n```sh\nnot python\n```\n")
    with pytest.raises(AssertionError) as caught:
        exec(program(path), {})
    assert caught.traceback[-1].lineno == 4  # counted from 0
