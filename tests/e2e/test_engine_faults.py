# SPDX-License-Identifier: Apache-2.0
"""The front of the engine and a real engine process of a tiny model: killed, stopped, deserted, crowded."""

import asyncio
import os
import random
import signal
import sys
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from server.core.ports import GenerationFinished, TextDelta
from server.core.types import ContentPart, FinishReason, GenerationRequest, Item, Role, SamplingParams
from server.engine.engine import Engine
from server.engine.process.supervisor import Supervisor, engine_command
from server.models.package import MANIFEST, ModelPackage
from tests.checkpoints import tiny_checkpoint, tiny_package

pytestmark = pytest.mark.slow

MAX_LEN = 2048
LIMITS = ("--engine.max-num-seqs=4", f"--engine.max-model-len={MAX_LEN}", "--engine.num-threads=1")

GATEWAY = """
import asyncio
from server.engine.process.supervisor import Supervisor

async def main():
    supervisor = Supervisor({command!r}, hang_timeout_s=60)
    supervisor.start(lambda: None)
    while supervisor.snapshot().pid is None:
        await asyncio.sleep(0.001)
    print(supervisor.snapshot().pid, flush=True)
    await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    """A random model with a long context that never ends by itself."""
    home = tmp_path_factory.mktemp("home")
    made = tiny_package(home, tiny_checkpoint(home, {"max_position_embeddings": MAX_LEN}))
    endless = replace(made.manifest, end_token_ids=())
    (made.path / MANIFEST).write_text(endless.to_json())
    return ModelPackage.load(made.path)


def command(package, address, *more):
    flags = ("--config", os.devnull, f"--package={package.path}", f"--engine.listen={address}", *LIMITS, *more)
    return engine_command(*flags, "--child")


@asynccontextmanager
async def running(package, folder, *more, hang_timeout_s=2.0):
    """An Engine with a process of its own."""
    address = f"ipc://{folder}/engine"
    supervisor = Supervisor(command(package, address, *more), hang_timeout_s=hang_timeout_s)
    engine = Engine(
        package, address, max_model_len=MAX_LEN, supervisor=supervisor, hang_timeout_s=hang_timeout_s
    )
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()
        assert engine.snapshot().process.pid is None
        assert engine.snapshot().num_pending == 0


def request(name, text="Tell me.", **sampling):
    item = Item(id="", role=Role.USER, parts=(ContentPart(text=text),))
    params = {"temperature": 0.8, "seed": 5, "max_tokens": 300} | sampling
    return GenerationRequest(id=name, model="tiny", items=(item,), sampling=SamplingParams(**params))


async def answer(engine, asked, after=None, action=lambda: None):
    """The whole text, its end, and after how many deltas `action` was called."""
    text, num_deltas, end = "", 0, None
    async for event in engine.generate(asked):
        if isinstance(event, GenerationFinished):
            end = event
            continue
        assert isinstance(event, TextDelta)
        text += event.text
        num_deltas += 1
        if num_deltas == after:
            action()
    return text, end


def is_alive(pid):
    try:
        return b"engine" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return False


async def wait_until(is_true, seconds=30):
    async with asyncio.timeout(seconds):
        while not is_true():  # noqa: ASYNC110 - another process sets no event of ours
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(("sig", "num_hangs"), [(signal.SIGKILL, 0), (signal.SIGSTOP, 1)])
async def test_a_death_or_a_hang_changes_no_text(package, tmp_path, sig, num_hangs):
    """Killed or stopped in mid-answer: every running request goes on with the text it would have had."""
    async with running(package, tmp_path) as engine:
        asked = [request(f"r{seed}", seed=seed) for seed in range(6)]  # more than run at once
        alone = await asyncio.gather(*(answer(engine, each) for each in asked))
        assert all(len(text) > 100 for text, _ in alone)
        first_pid = engine.snapshot().process.pid

        def hit():
            assert engine.snapshot().num_pending == 6
            os.kill(engine.snapshot().process.pid, sig)

        again = await asyncio.gather(answer(engine, asked[0], 20, hit), *(answer(engine, e) for e in asked[1:]))
        assert [text for text, _ in again] == [text for text, _ in alone]
        assert [end.usage.output_tokens for _, end in again] == [end.usage.output_tokens for _, end in alone]
        process = engine.snapshot().process
        assert process.pid != first_pid
        assert (process.num_starts, process.num_hangs) == (2, num_hangs)
        assert engine.snapshot().num_resubmitted >= 4


async def test_readiness_follows_the_engine(package, tmp_path):
    """Not ready before the model is loaded, ready then, not ready once it has died, and ready again."""
    async with running(package, tmp_path) as engine:
        assert not engine.status().is_ready
        assert engine.status().reason
        await wait_until(lambda: engine.status().is_ready)
        os.kill(engine.snapshot().process.pid, signal.SIGKILL)
        await wait_until(lambda: not engine.status().is_ready, 2)
        assert "started again" in engine.status().reason
        await wait_until(lambda: engine.status().is_ready)


async def test_a_gateway_takes_its_engine_along(package, tmp_path):
    """Killed in cold blood while its engine loads, or later, a gateway leaves no engine behind."""
    for has_loaded in (False, True):
        program = GATEWAY.format(command=command(package, f"ipc://{tmp_path}/e{has_loaded}"))
        gateway = await asyncio.create_subprocess_exec(
            sys.executable, "-c", program, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
        )
        pid = int(await gateway.stdout.readline())
        if has_loaded:
            await wait_until(lambda name=f"e{has_loaded}": (tmp_path / name).exists())
        gateway.kill()
        await gateway.wait()
        await wait_until(lambda engine=pid: not is_alive(engine))


async def test_two_hundred_clients_that_leave(package, tmp_path):
    """Left at any moment, by closing, cancelling a task or asking to, nothing stays behind, here or there."""
    dice = random.Random(7)
    async with running(package, tmp_path) as engine:
        await wait_until(lambda: engine.status().is_ready)

        async def one(number):
            name, way = f"r{number}", dice.choice(["close", "task", "cancel"])
            if way == "task":
                with pytest.raises(TimeoutError):
                    async with asyncio.timeout(dice.random() * 0.2):
                        await answer(engine, request(name, max_tokens=2000))
                return
            async with aclosing(engine.generate(request(name, max_tokens=2000))) as events:
                left = dice.randrange(1, 30)
                async for event in events:
                    left -= 1
                    if way == "close" and not left:
                        return
                    if way == "cancel" and not left:
                        engine.cancel(name)
                    if isinstance(event, GenerationFinished):
                        assert event.reason is FinishReason.CANCELLED

        await asyncio.gather(*(one(number) for number in range(200)))
        assert engine.snapshot().num_pending == 0
        await wait_until(lambda: engine.snapshot().heartbeat.num_free_slots == 4, 2)
        beat = engine.snapshot().heartbeat
        assert (beat.num_running, beat.num_waiting, beat.num_waiting_tokens) == (0, 0, 0)
        text, end = await answer(engine, request("after"))
        assert text
        assert end.reason is FinishReason.LENGTH
