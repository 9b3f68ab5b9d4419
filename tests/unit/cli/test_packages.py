# SPDX-License-Identifier: Apache-2.0
"""The package to serve: found, or added by a process of its own."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest

from server.cli import packages
from server.cli.options import CommandError
from server.core.config import Config, EngineConfig
from server.models.package import PackageError


@pytest.fixture
def world(monkeypatch, tmp_path):
    """Packages by name that exist, and the commands that were run; `world.adds` is what a command leaves."""
    state = SimpleNamespace(home=tmp_path, found={}, ran=[], adds=None, status=0)

    def find(_home, model_id, quantization):
        if (model_id, quantization) not in state.found:
            raise PackageError("not there")
        return state.found[model_id, quantization]

    def run(command, **_):
        state.ran.append(command)
        if state.adds:
            state.found[state.adds] = "new"
        return SimpleNamespace(returncode=state.status)

    monkeypatch.setattr(packages, "find_package", find)
    monkeypatch.setattr(subprocess, "run", run)
    return state


def test_what_is_there_is_served(world):
    """Nothing is fetched for a package that is there."""
    world.found["m", "w8"] = "package"
    assert packages.served_package(world.home, "m", "w8") == "package"
    assert world.ran == []


def test_what_is_missing_is_added(world, capsys):
    """A missing one is added by `sampan model add` in a process of its own, and the user is told."""
    world.adds = ("m", "w8")
    assert packages.served_package(world.home, "m", "w8") == "new"
    ((interpreter, *words),) = world.ran
    assert interpreter == sys.executable
    assert words[:4] == ["-m", "server", "model", "add"]
    assert words[4:] == ["m", "--quantization", "w8", "--home", str(world.home)]
    assert "fetching and converting" in capsys.readouterr().err


def test_what_cannot_be_added_ends_the_start(world):
    """When adding fails there is nothing to serve."""
    world.status = 1
    with pytest.raises(CommandError, match=r"without the model m \(w8\)"):
        packages.served_package(world.home, "m", "w8")


def test_a_damaged_package_is_not_replaced(world):
    """What is there and damaged is the user's to mend: it may be their own conversion."""
    (world.home / "models" / "m" / "w8").mkdir(parents=True)
    with pytest.raises(PackageError, match="not there"):
        packages.served_package(world.home, "m", "w8")
    assert world.ran == []


def package_of(context):
    shape = SimpleNamespace(context_length=context)
    return SimpleNamespace(manifest=SimpleNamespace(shape=shape, model_id="m"))


def test_the_context_fits_the_model():
    """A default longer than the model's context is lowered to it; a shorter one stays."""
    assert packages.fit_to_model(Config(), package_of(1024)).engine.max_model_len == 1024
    assert packages.fit_to_model(Config(), package_of(8192)).engine.max_model_len == 2048


def test_a_context_that_was_asked_for_is_not_lowered_in_silence():
    """Who asked for more than the model has is told where, and how much there is."""
    asked = Config(engine=EngineConfig(max_model_len=4096), sources={"engine.max_model_len": "flag --x"})
    with pytest.raises(CommandError, match=r"\(flag --x\): is 4096, but m reads 1024"):
        packages.fit_to_model(asked, package_of(1024))


def test_what_builds_ends_with_the_server_that_asked_for_it(tmp_path):
    """SIGTERM during the first conversion ends the converting process as well, with the signal's status."""
    note = str(tmp_path / "pid")
    child = f"import os, pathlib, time; pathlib.Path({note!r}).write_text(str(os.getpid())); time.sleep(60)"
    parent = f"import sys; from server.cli.packages import _run; _run([sys.executable, '-c', {child!r}])"
    with subprocess.Popen([sys.executable, "-c", parent]) as process:
        while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
            os.sched_yield()
        process.terminate()
        assert 128 + signal.SIGTERM == process.wait(20)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
