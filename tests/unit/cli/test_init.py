# SPDX-License-Identifier: Apache-2.0
"""The command: verbs, faults as one line, and nothing loaded that was not asked for."""

import importlib
import subprocess
import sys

import pytest

from server import cli
from server.core.config import ConfigError, Fault
from server.core.errors import error_of
from server.models.package import PackageError


@pytest.fixture
def verb(monkeypatch):
    """Replace what `sampan config` does: `verb(error)` raises it, `verb(None)` returns 7."""

    def replace(error):
        def run(_args):
            if error is not None:
                raise error
            return 7

        monkeypatch.setattr(importlib.import_module("server.cli.config"), "run", run)

    return replace


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_verb_has_its_module(name):
    """Each verb is a module with NAME, HELP, add_arguments and run, and one line of help."""
    module = importlib.import_module(f"server.cli.{name}")
    assert name == module.NAME
    assert module.HELP == cli.COMMANDS[name]
    assert callable(module.add_arguments)
    assert callable(module.run)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_verb_explains_itself(name, capsys):
    """`sampan VERB --help` says how it is used and ends with 0."""
    assert cli.main([name, "--help"]) == 0
    assert f"usage: sampan {name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "COMMAND"),
        (["sreve"], "invalid choice: 'sreve'"),
        (["config", "--nothing"], "--nothing"),
        (["config", "--engine.queue-max"], "--engine.queue-max needs a value"),
        (["chat", "--engine.queue-max", "3"], "`sampan chat` has no settings such as --engine.queue-max"),
        (["chat", "--temperature", "hot"], "invalid float value: 'hot'"),
    ],
)
def test_a_wrong_command_is_one_line(words, said, capsys):
    """It says what is wrong and where the help is, and ends with 2."""
    assert cli.main(words) == cli.EXIT_USAGE
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err
    assert "--help" in err


def test_settings_may_stand_anywhere(capsys):
    """A setting may stand before the verb's own words, after them, with a space or an equals sign."""
    words = ["config", "--engine.queue-max", "3", "print", "--log.level=error", "--json"]
    assert cli.main(words) == 0
    assert '"value": 3' in capsys.readouterr().out


def test_faults_of_settings_come_together(capsys):
    """Unknown settings, known only to nobody, are told with all other faults, a line each."""
    assert cli.main(["config", "--engine.queue-mx", "3", "--port", "x"]) == cli.EXIT_USAGE
    assert capsys.readouterr().err.splitlines() == [
        "sampan: server.port (flag --port): must be a whole number, got 'x'",
        "sampan: engine.queue_mx (flag --engine.queue-mx): no such setting; did you mean engine.queue_max?",
    ]


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (ConfigError([Fault(name="a.b", source="file", message="bad")]), 2, "sampan: a.b (file): bad\n"),
        (PackageError("no model"), 1, "sampan: no model\n"),
        (error_of("queue_full", "busy"), 1, "sampan: busy\n"),
        (FileNotFoundError(2, "No such file", "x"), 1, "sampan: [Errno 2] No such file: 'x'\n"),
        (KeyboardInterrupt(), 130, ""),
        (None, 7, ""),
    ],
)
def test_what_users_cause_ends_as_a_line(verb, error, status, said, capsys):
    """Each known error is its own words and a status."""
    verb(error)
    assert cli.main(["config"]) == status
    assert capsys.readouterr().err == said


def test_what_we_cause_is_not_hidden(verb):
    """An error of ours keeps its traceback."""
    verb(ZeroDivisionError("ours"))
    with pytest.raises(ZeroDivisionError):
        cli.main(["config"])


def test_known_errors_exist():
    """Each error that is looked up by name is there under that name."""
    for name in cli.CLEAR:
        module, _, kind = name.rpartition(".")
        assert issubclass(getattr(importlib.import_module(module), kind), Exception)


def test_a_reader_that_left_is_no_fault():
    """`sampan config | head -1` ends in silence."""
    code = "from server.cli import main; raise SystemExit(main(['config', 'docs']))"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == ""
        assert process.wait() == cli.EXIT_FAULT


def test_help_is_instant():
    """The list of verbs loads no verb and no library: nothing but argparse."""
    code = (
        "import sys; from server.cli import main; main(['--help']);"
        "print(sorted(name for name in sys.modules if name.partition('.')[0] in "
        "{'asyncio', 'numpy', 'onnxruntime', 'rich', 'starlette', 'tokenizers', 'websockets', 'zmq'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
