"""What holds for the package as a whole: what importing it costs, and the rules of its source."""

import ast
import importlib.metadata
import inspect
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

import viewtrack

ROOT = Path(__file__).resolve().parent.parent
SOURCES = sorted((ROOT / "viewtrack").rglob("*.py"))
PRIVATE_ROOMS = sorted((ROOT / "viewtrack" / "_torch").glob("*.py"))
DOCUMENTS = sorted(path for path in ROOT.glob("*.md"))
HEAVY_MODULES = ("torch._dynamo", "torch._inductor", "numpy", "rich", "jinja2")

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 40


def by_path(path):
    return path.relative_to(ROOT).as_posix()


# What importing costs.


def modules_added_by(statement):
    """The modules that a statement loads in a new interpreter where torch is loaded already."""
    program = (
        "import json, sys, torch\n"
        "before = set(sys.modules)\n"
        f"{statement}\n"
        "print(json.dumps(sorted(set(sys.modules) - before)))\n"
    )
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(run.stdout)


def heavy(modules):
    return [m for m in modules if any(m == h or m.startswith(h + ".") for h in HEAVY_MODULES)]


def test_import_loads_nothing_heavy_beyond_torch():
    added = modules_added_by("import viewtrack")
    assert "viewtrack" in added
    assert heavy(added) == []


def test_the_import_probe_sees_a_heavy_module():
    added = modules_added_by(
        "import sys, types; sys.modules['rich.console'] = types.ModuleType('r')"
    )
    assert heavy(added) == ["rich.console"]


def test_import_leaves_torch_as_it_was():
    program = "import torch; before = dict(vars(torch.Tensor)); import viewtrack; "
    program += "print(before == dict(vars(torch.Tensor)))"
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "True"


# The names and the version.


@pytest.mark.parametrize("name", sorted(viewtrack.__all__))
def test_public_name_exists_and_is_documented(name):
    public = getattr(viewtrack, name)
    if isinstance(public, type | types.ModuleType):
        assert vars(public).get("__doc__")
    elif callable(public):
        assert inspect.getdoc(public)
    else:
        assert name.startswith("__"), f"`{name}` has nowhere to carry a docstring"


def test_public_names_are_listed_once():
    assert len(set(viewtrack.__all__)) == len(viewtrack.__all__)


def test_version_is_the_one_in_the_metadata():
    declared = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    assert declared is not None
    assert viewtrack.__version__ == declared[1]
    try:
        installed = importlib.metadata.version("viewtrack")
    except importlib.metadata.PackageNotFoundError:
        return  # run from a checkout that is not installed
    assert viewtrack.__version__ == installed


def test_core_depends_on_torch_alone():
    tomllib = pytest.importorskip("tomllib", reason="tomllib comes with Python 3.11")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert project["dependencies"] == ["torch>=2.6"]


# Private torch is named in one room only.


def is_private(part):
    return part.startswith("_") and not part.endswith("__")


def private_path(dotted):
    """Whether a dotted path leads through a private name of torch; ops are not names of torch."""
    first, *rest = dotted.split(".")
    is_op = rest[:1] == ["ops"] or "".join(rest).startswith("_foreach_")  # no public name for these
    return first == "torch" and not is_op and any(map(is_private, rest))


class PrivateTorch(ast.NodeVisitor):
    """Collects the lines of a source file that name private parts of torch."""

    def __init__(self):
        self.aliases = {}
        self.found = []

    def note(self, node, dotted):
        if private_path(dotted):
            self.found.append((node.lineno, dotted))

    def visit_Import(self, node):
        for alias in node.names:
            self.note(node, alias.name)
            if alias.asname:
                self.aliases[alias.asname] = alias.name
            else:
                root = alias.name.partition(".")[0]
                self.aliases[root] = root

    def visit_ImportFrom(self, node):
        for alias in node.names:
            dotted = f"{node.module}.{alias.name}"
            if node.level == 0:
                self.note(node, dotted)
                self.aliases[alias.asname or alias.name] = dotted

    def visit_Attribute(self, node):
        dotted = self.dotted(node)
        if dotted is None:
            self.generic_visit(node)
        else:
            self.note(node, dotted)

    def visit_Call(self, node):
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name == "getattr" and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
            self.note(node, f"{self.dotted(node.args[0])}.{node.args[1].value}")
        self.generic_visit(node)

    def visit_Constant(self, node):
        # A string that is a path and nothing else is meant to be imported or looked up.
        if isinstance(node.value, str) and re.fullmatch(r"torch(\.\w+)+", node.value):
            self.note(node, node.value)

    def dotted(self, node):
        if isinstance(node, ast.Name):
            return self.aliases.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.dotted(node.value)
            return owner and f"{owner}.{node.attr}"
        return None


def private_torch(source):
    visitor = PrivateTorch()
    visitor.visit(ast.parse(source))
    return visitor.found


@pytest.mark.parametrize("path", SOURCES, ids=by_path)
def test_only_one_room_names_private_torch(path):
    found = private_torch(path.read_text())
    if path in PRIVATE_ROOMS:
        assert found, "the probe sees nothing in the room that is made of private torch"
    else:
        assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch._C import _disabled",
        "from torch import _C",
        "from torch.utils import _pytree",
        "from torch.utils._python_dispatch import TorchDispatchMode",
        "import torch\ntorch._C._dispatch_tls_local_exclude_set()",
        "import torch as t\nt.autograd._unsafe_set_version_counter(x, 1)",
        "import torch.utils as u\nu._pytree.tree_map(f, x)",
        "from torch import Tensor\nTensor._make_subclass(c, x)",
        "import torch\nx = getattr(torch, '_C')",
        "import importlib\nimportlib.import_module('torch._dynamo')",
    ],
)
def test_private_torch_is_found(source):
    assert private_torch(source)


@pytest.mark.parametrize(
    "source",
    [
        '"""Mirrors torch._C._dispatch."""',
        "import torch\ntorch.__version__",
        "import torch\ntorch.ops.aten._unsafe_view.default",
        "import torch\ntorch._foreach_add_([x], 1)",
        "from viewtrack import _torch\n_torch.plan(x)",
        "from . import _torch\n_torch.plan(x)",
        "import torch\nx = torch.ones(2)\nx._version",
        "raise ValueError('use torch._foo.bar instead')",
    ],
)
def test_public_torch_is_let_through(source):
    assert private_torch(source) == []


# Small rooms.


def long_functions(source):
    """Functions over the limit, not counting their docstrings."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            docstring = ast.get_docstring(node) is not None
            described = first.end_lineno - first.lineno + 1 if docstring else 0
            lines = node.end_lineno - node.lineno + 1 - described
            if lines >= MAX_FUNCTION_LINES:
                found.append((node.name, lines))
    return found


@pytest.mark.parametrize("path", SOURCES, ids=by_path)
def test_a_file_is_one_idea(path):
    source = path.read_text()
    assert len(source.splitlines()) < MAX_FILE_LINES
    assert long_functions(source) == []


def test_a_long_function_is_found_and_its_docstring_is_free():
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    docstring = '    """' + "\n" * MAX_FUNCTION_LINES + '    """\n'
    assert [name for name, _ in long_functions(f"def f():\n{body}")] == ["f"]
    assert long_functions(f"def f():\n{docstring}    x = 1\n") == []


# The documents.


def test_readme_gives_the_command_that_the_check_runs():
    setup, tests = "bash .ci/setup", ".venv/bin/python -m pytest"
    assert f"\n{setup} && {tests}\n" in (ROOT / "README.md").read_text()
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert lines.index(setup) + 1 == lines.index(tests)


def test_readme_names_every_public_name():
    readme = (ROOT / "README.md").read_text()
    public = [name for name in viewtrack.__all__ if not name.startswith("__")]
    assert [name for name in public if not re.search(rf"`(vt\.)?{name}\b", readme)] == []


def test_examples_of_the_readme_hold():
    blocks = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    assert blocks
    exec(compile("\n".join(blocks), "README.md", "exec"), {"__name__": "readme"})


@pytest.mark.parametrize("path", DOCUMENTS, ids=by_path)
def test_links_to_files_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)", path.read_text())
    local = [link for link in links if "://" not in link]
    assert [link for link in local if not (path.parent / link).exists()] == []
