# SPDX-License-Identifier: Apache-2.0
"""The repository's shape, as tests: what a reader may rely on, and what a review need not argue about.

What ruff, mypy and import-linter can say, they say, and run here; the rest stands below. Ceilings count lines
of *code*: blank lines, comments and docstrings are free, so nobody deletes one to pass. Each rule is a pure
function of a text and is itself tested on a planted fault. Raise a number only with the reason in the commit.
"""

import ast
import gc
import io
import re
import subprocess
import sys
import tokenize
from pathlib import Path, PurePath

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("server", "static", "tests", "deploy", "nginx")
ENTRIES_MAX = 10  # one glance, one screen of `ls`
FILE_LINES_MAX = 300
FUNCTION_LINES_MAX = 50
PACKAGE_LINES_MAX = 12_000  # a new feature is weighed against a deletion

SPDX = "SPDX-License-Identifier: Apache-2.0"
HEADED = {".py", ".js", ".mjs", ".css", ".html", ".conf", ".yaml", ".yml", ".sh", ".service", ".socket"}
VAGUE = {"base", "common", "helper", "helpers", "impl", "lib", "manager", "misc", "stuff", "util", "utils"}
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
SILENT = {
    tokenize.COMMENT, tokenize.DEDENT, tokenize.ENDMARKER, tokenize.INDENT, tokenize.NEWLINE, tokenize.NL,
}  # fmt: skip
UNBOUNDED = re.compile(
    r"\b(?:Simple|Lifo|Priority)?Queue(?:\[[^\]]*\])?\(\)"
)  # a deque's owner states its bound
SUPPRESSION = re.compile(r"#\s*(?:noqa: [A-Z0-9, ]+|type: ignore\[[a-z, -]+\])")
# In pieces, so that this file does not hold them.
PLACES = re.compile(
    "|".join(
        (
            "/wo" + "rk/",
            "/ro" + "ot/",
            "/home/[a-z]",
            "pypi" + r"\.org",
            "python" + "hosted",
            "npm" + r"js\.(?:org|com)",
        )
    )
)


# ---- rules: a text in, its faults out --------------------------------------------------------------------


def code_lines(text, tree):
    """The numbers of the lines that hold code."""
    lines = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, *FUNCTIONS)) and ast.get_docstring(node) is not None:
            lines.difference_update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return lines


def shape_faults(path, text):
    """What is wrong with a module's shape."""
    tree = ast.parse(text)
    code = code_lines(text, tree)
    if not ast.get_docstring(tree):
        yield "no docstring: say what it owns and what it must never do"
    if len(code) > FILE_LINES_MAX:
        yield f"{len(code)} code lines, at most {FILE_LINES_MAX}"
    if VAGUE & set(PurePath(path).with_suffix("").parts):
        yield "vague name: a module is a noun of the field"
    if UNBOUNDED.search(text):
        yield "a queue without a bound"
    for node in ast.walk(tree):
        if isinstance(node, FUNCTIONS):
            length = len(code & set(range(node.lineno, node.end_lineno + 1)))
            if length > FUNCTION_LINES_MAX:
                yield f"{node.name} has {length} code lines, at most {FUNCTION_LINES_MAX}"


def suppression_faults(text):
    """Suppressed findings without a reason, beside them or in the line above."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        found = SUPPRESSION.search(line)
        above = lines[number - 1].strip() if number else ""
        if found and not line[found.end() :].strip(" #-–—:") and not above.startswith("#"):
            yield f"line {number + 1}: a suppression without its reason"


def test_faults(text):
    """Tests that do not say their rule, or that sleep."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, FUNCTIONS) and node.name.startswith("test_") and not ast.get_docstring(node):
            yield f"{node.name} does not say the rule it proves"
        is_sleep = isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "sleep"
        if is_sleep and ast.unparse(node.args[0]) != "0":
            yield f"line {node.lineno}: a unit test sleeps"


test_faults.__test__ = False


@pytest.fixture(autouse=True, scope="module")
def _nothing_left():
    """Python 3.11 can't parse while a collection prints a traceback: collect what other tests left, first."""
    gc.collect()


# ---- the repository --------------------------------------------------------------------------------------


def modules(folder="server"):
    return sorted((ROOT / folder).rglob("*.py"))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def tracked():
    """Every file of ours that git knows or would take, as it lies on disk."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=ROOT, capture_output=True, check=True, text=True).stdout.split("\0")
    return [ROOT / name for name in names if name and (ROOT / name).is_file()]


def text_of(path):
    """A file's text; None if it is no text."""
    data = path.read_bytes()
    return None if b"\0" in data else data.decode("utf-8")


def by_name(faults_of, paths):
    """Every fault of every file, as sentences."""
    return [f"{name_of(path)}: {fault}" for path in paths for fault in faults_of(path)]


def test_modules_are_tidy():
    """Each module is small, opens with its purpose and has no unbounded queue."""
    assert [] == by_name(lambda path: shape_faults(name_of(path), path.read_text()), modules())


def test_suppressions_have_reasons():
    """Nobody silences a tool without saying why."""
    assert [] == by_name(lambda path: suppression_faults(path.read_text()), modules())


def test_tests_say_their_rule():
    """Each test says in a sentence what it proves; none of the unit tests sleeps."""
    assert [] == by_name(lambda path: test_faults(path.read_text()), modules("tests/unit"))


def test_folders_fit_one_glance():
    """No folder of ours has more than ENTRIES_MAX entries."""
    entries = {}
    for path in tracked():
        parts = path.relative_to(ROOT).parts
        if parts[0] in FOLDERS:
            for depth in range(1, len(parts)):
                entries.setdefault("/".join(parts[:depth]), set()).add(parts[depth])
    assert {} == {folder: len(names) for folder, names in entries.items() if len(names) > ENTRIES_MAX}


def mirror_of(path):
    """Where a module's own test lies."""
    name = "test_init.py" if path.name == "__init__.py" else f"test_{path.name}"
    return ROOT / "tests/unit" / path.relative_to(ROOT / "server").with_name(name)


def has_code(path):
    """Whether a package's `__init__` does more than describe and re-export."""
    return any(isinstance(node, (ast.ClassDef, *FUNCTIONS)) for node in ast.parse(path.read_text()).body)


def test_every_module_has_its_own_test():
    """server/a/b.py is tested by tests/unit/a/test_b.py."""
    own = [
        path
        for path in modules()
        if path.name != "__main__.py" and (path.name != "__init__.py" or has_code(path))
    ]
    assert [] == [name_of(mirror_of(path)) for path in own if not mirror_of(path).exists()]


def test_package_stays_small():
    """The whole package keeps within its budget."""
    texts = [path.read_text() for path in modules()]
    assert sum(len(code_lines(text, ast.parse(text))) for text in texts) <= PACKAGE_LINES_MAX


def test_files_name_their_licence():
    """Each source file says in its first lines under which licence it is."""
    own = [path for path in tracked() if path.suffix in HEADED or name_of(path) in ("Makefile", ".ci/run")]
    assert [] == [name_of(path) for path in own if SPDX not in "\n".join(path.read_text().splitlines()[:4])]


def test_files_name_no_private_place():
    """No file holds a path of somebody's machine or the host of a package registry."""
    texts = [(path, text_of(path)) for path in tracked()]
    assert [] == [name_of(path) for path, text in texts if text and PLACES.search(text)]


# ---- the tools -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [["ruff", "check"], ["mypy"], ["lint-imports", "--no-cache"]], ids=lambda command: command[0]
)
def test_tool_finds_nothing(command):
    """ruff, mypy --strict and the import contracts of pyproject.toml are content."""
    program = Path(sys.executable).parent / command[0]
    done = subprocess.run([program, *command[1:]], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_gateway_carries_no_arrays():
    """A process that serves has neither numpy nor ONNX Runtime in memory: they cost more than it does."""
    code = "import server.gateway.app, sys; print({'numpy', 'onnxruntime', 'onnx'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


# ---- the rules themselves --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "text", "fault"),
    [
        ("server/a.py", "x = 1", "no docstring"),
        ("server/utils/a.py", '"""Head."""', "vague name"),
        ("server/a.py", '"""Head."""\nq = asyncio.Queue()', "without a bound"),
        ("server/a.py", '"""Head."""\n' + "x = 1\n" * 301, "301 code lines"),
        ("server/a.py", '"""Head."""\ndef f():\n' + "    x = 1\n" * 50, "f has 51 code lines"),
    ],
)
def test_shape_rule_bites(path, text, fault):
    """Each rule of shape finds its planted fault, and no other rule fires."""
    (found,) = shape_faults(path, text)
    assert fault in found


@pytest.mark.parametrize(
    "text",
    [
        '"""Head."""\n' + "# why\n" * 400,
        '"""Head."""\ndef f():\n    """\n' + "    why\n" * 100 + '    """\n',
        '"""Head."""\nq = asyncio.Queue(maxsize=8)\nd = deque()',
    ],
)
def test_comments_docstrings_and_bounds_are_free(text):
    """What we want more of costs nothing."""
    assert [] == list(shape_faults("server/a.py", text))


@pytest.mark.parametrize(
    ("text", "num_faults"),
    [
        ("x = 1  # noqa: E501", 1),
        ("x = 1  # type: ignore[misc]", 1),
        ("x = 1  # noqa: E501 - a table", 0),
        ("# A table.\nx = 1  # noqa: E501", 0),
    ],
)
def test_suppression_rule_bites(text, num_faults):
    """A suppression alone is a fault, one with a reason is none."""
    assert num_faults == len(list(suppression_faults(text)))


@pytest.mark.parametrize(
    ("text", "num_faults"),
    [
        ("def test_a():\n    pass", 1),
        ('def test_a():\n    """Rule."""\n    time.sleep(0.1)', 1),
        ('async def test_a():\n    """Rule."""\n    await asyncio.sleep(0)', 0),
    ],
)
def test_test_rule_bites(text, num_faults):
    """A test without a rule and one that sleeps are found; giving way to the loop is no sleep."""
    assert num_faults == len(list(test_faults(text)))
