# SPDX-License-Identifier: Apache-2.0
"""The front of the engine: whatever the engine does, a request ends once, with its text, and is gone."""

import asyncio
import subprocess
import sys
from contextlib import aclosing

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from server.core.clock import ManualClock
from server.core.errors import ServerError
from server.core.ports import TextDelta
from server.core.types import ContentPart, FinishReason, GenerationRequest, Item, Role, SamplingParams
from server.engine import engine as module
from server.engine.engine import CRASHES_MAX, RETRY_MS, Engine
from server.engine.process import connection
from server.engine.process.connection import TICK_S
from server.engine.process.messages import Cancel, Hello, Outputs, Ready, Refused, Submit
from server.engine.sequence import StepOutput
from server.engine.text.tokenizer import Tokenizer
from server.models.package import CHAT_TEMPLATE, MANIFEST, FileEntry, GraphShape, Manifest, ModelPackage
from tests.data.tiny_tokenizers import BOS, END, EOS, write

TEMPLATE = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}<|start|>assistant"
)
CONTEXT = 64


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("package")
    write("byte_level", folder)
    (folder / CHAT_TEMPLATE).write_text(TEMPLATE)
    (folder / "model.onnx").write_bytes(b"")
    shape = GraphShape(
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=1,
        hidden_size=1,
        vocab_size=300,
        context_length=CONTEXT,
        topk=1,
    )
    files = {each.name: FileEntry(size=each.stat().st_size, sha256="0" * 64) for each in folder.iterdir()}
    manifest = Manifest(
        model_id="m", quantization="fp32", family="llama", source={}, license=None, created=7, shape=shape,
        num_tokens=300, bos_token_id=BOS, eos_token_id=EOS, adds_bos=False, end_token_ids=(EOS, END),
        files=files, fingerprint="fp_1",
    )  # fmt: skip
    (folder / MANIFEST).write_text(manifest.to_json())
    return ModelPackage.load(folder)


@pytest.fixture(scope="module")
def tokenizer(package):
    return Tokenizer.of(package)


class FakeLink:
    """The engine as the test plays it: what it was told stands in `sent`."""

    current = None

    def __init__(self, address, receive, fault):
        self.receive, self.fault = receive, fault
        self.sent, self.can_send = [], True
        FakeLink.current = self

    def send(self, message):
        if self.can_send and not isinstance(message, Hello):
            self.sent.append(message)
        return self.can_send

    def close(self):
        self.can_send = False

    def ready(self, epoch=1, engine_id="e1", max_model_len=CONTEXT, fingerprint="fp_1"):
        self.epoch = epoch
        self.receive(
            Ready(epoch=epoch, engine_id=engine_id, model_id="m", quantization="fp32", fingerprint=fingerprint,
                  max_model_len=max_model_len, num_slots=2)
        )  # fmt: skip

    def output(self, request_id, *token_ids, **more):
        output = StepOutput(request_id=request_id, token_ids=token_ids, **more)
        self.receive(Outputs(epoch=self.epoch, outputs=(output,)))

    def refuse(self, request_id, code, retry_after_ms=None):
        self.receive(
            Refused(epoch=self.epoch, request_id=request_id, code=code, message="no", param=None,
                    retry_after_ms=retry_after_ms)
        )  # fmt: skip

    def submissions(self):
        return [message.submission for message in self.sent if isinstance(message, Submit)]

    def cancels(self):
        return [message.request_id for message in self.sent if isinstance(message, Cancel)]


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def engine(package, clock, monkeypatch):
    """An engine's front that has not been started; the test ticks."""
    monkeypatch.setattr(connection, "Link", FakeLink)
    engine = Engine(
        package, "ipc:///e", max_model_len=CONTEXT, supervisor=None, hang_timeout_s=10,
        unavailable_timeout_s=30, now=clock.now,
    )  # fmt: skip
    engine._connection.start()
    return engine


@pytest.fixture
def link(engine):
    link = FakeLink.current
    link.ready()
    return link


def request(name="r", text="hi", **sampling):
    items = (Item(id="", role=Role.USER, parts=(ContentPart(text=text),)),)
    return GenerationRequest(id=name, model="m", items=items, sampling=SamplingParams(**sampling), tenant="t")


class Reader:
    """Reads one generation in a task: `text`, `end`, `error`."""

    def __init__(self, engine, asked):
        self.text, self.end, self.error = "", None, None
        self.task = asyncio.create_task(self._read(engine, asked))

    async def _read(self, engine, asked):
        try:
            async for event in engine.generate(asked):
                assert self.end is None
                if isinstance(event, TextDelta):
                    assert event.text
                    self.text += event.text
                else:
                    self.end = event
        except ServerError as error:
            self.error = error


async def settle():
    """Let every task do what it can."""
    for _ in range(10):
        await asyncio.sleep(0)


async def start(engine, asked=None):
    reader = Reader(engine, asked or request())
    await settle()
    return reader


async def test_ids_go_out_and_text_comes_back(engine, link, tokenizer):
    """The prompt goes as ids with the parameters; the text comes as its tokens do; the engine's end is ours."""
    reader = await start(engine, request(temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, seed=11, max_tokens=9))
    (sent,) = link.submissions()
    assert sent.token_ids == tuple(tokenizer.encode_prompt("<|start|>user\nhi<|end|>\n<|start|>assistant"))
    assert (sent.request_id, sent.tenant, sent.output_ids) == ("r", "t", ())
    params = sent.params
    assert (params.temperature, params.top_k, params.top_p, params.min_p, params.seed) == (0.5, 3, 0.9, 0.1, 11)
    assert (params.max_tokens, params.end_token_ids) == (9, (EOS, END))
    for token in tokenizer.encode("the 龘"):
        link.output("r", token, num_cached_tokens=4)
        await settle()
    assert reader.text == "the 龘"
    link.output("r", reason=FinishReason.STOP)
    await reader.task
    assert reader.end.reason is FinishReason.STOP
    usage = reader.end.usage
    assert (usage.input_tokens, usage.output_tokens, usage.cached_tokens) == (
        len(sent.token_ids), len(tokenizer.encode("the 龘")), 4,
    )  # fmt: skip
    assert link.cancels() == []
    assert engine.snapshot().num_pending == 0


async def test_bounds_follow_the_context(engine, link, tokenizer):
    """Without a bound an answer may fill the context; with one it may not exceed it; a seed is drawn."""
    await start(engine, request("a"))
    await start(engine, request("b", max_tokens=10_000))
    await start(engine, request("c", seed=0))
    a, b, c = link.submissions()
    room = CONTEXT - len(a.token_ids)
    assert (a.params.max_tokens, b.params.max_tokens, c.params.max_tokens) == (room, room, room)
    assert a.params.seed != b.params.seed
    assert c.params.seed == 0


async def refusal(engine, asked):
    reader = await start(engine, asked)
    async with asyncio.timeout(5):
        await reader.task
    assert reader.text == ""
    assert engine.snapshot().num_pending == 0
    return reader.error


async def test_refusals_before_the_engine(engine, link, tokenizer):
    """Another model, a prompt that leaves no room, no messages and half a character are refused here."""
    asked = request()
    assert (
        await refusal(engine, GenerationRequest(id="r", model="gpt", items=asked.items))
    ).code == "model_not_found"
    error = await refusal(engine, request(text="x " * 300))
    num_tokens = len(tokenizer.encode_prompt("<|start|>user\n" + "x " * 300 + "<|end|>\n<|start|>assistant"))
    assert error.code == "context_length_exceeded"
    assert str(num_tokens) in error.message
    assert str(CONTEXT) in error.message
    assert (await refusal(engine, GenerationRequest(id="r", model="m", items=()))).param == "messages"
    assert (await refusal(engine, request(text="\ud800"))).code == "invalid_value"
    assert link.sent == []


async def test_an_id_is_used_once_at_a_time(engine, link):
    """A second request by the same id is refused and does not disturb the first."""
    reader = await start(engine)
    second = await start(engine)
    assert second.error.code == "invalid_value"
    link.output("r", 70, reason=FinishReason.LENGTH)
    await reader.task
    assert reader.end.reason is FinishReason.LENGTH


async def test_long_texts_are_encoded_off_the_loop(engine, link, monkeypatch):
    """A long chat is rendered on a thread: while it is, the loop turns."""
    threads = []
    real = asyncio.to_thread

    async def noting(function, *args):
        threads.append(len(args[0][0].text))
        return await real(function, *args)

    monkeypatch.setattr(asyncio, "to_thread", noting)
    assert await engine.num_tokens("m", request(text="x" * module.INLINE_CHARS_MAX).items) > 100
    assert threads == []
    assert await engine.num_tokens("m", request(text="x" * 600).items) > 600
    assert threads == [600]
    with pytest.raises(ServerError):
        await engine.num_tokens("gpt", request().items)


async def test_the_engines_refusal_is_passed_on(engine, link):
    """A full queue keeps its retry time."""
    reader = await start(engine)
    link.refuse("r", "queue_full", 700)
    await reader.task
    assert (reader.error.code, reader.error.retry_after_ms) == ("queue_full", 700)
    assert link.cancels() == []
    link.refuse("r", "queue_full", 700)  # nobody has it any more


async def test_the_engines_failure_is_an_error(engine, link, tokenizer):
    """A row that failed ends as an error after its text; an error without a code is one too."""
    reader = await start(engine)
    link.output("r", *tokenizer.encode("the"))
    link.output("r", reason=FinishReason.ERROR, error_code="queue_timeout", error_message="waited too long")
    await reader.task
    assert (reader.text, reader.error.code, reader.end) == ("the", "queue_timeout", None)
    reader = await start(engine)
    link.output("r", reason=FinishReason.ERROR)
    await reader.task
    assert reader.error.code == "engine_error"


async def test_a_stop_string_ends_it(engine, link, tokenizer):
    """The text ends before it, the tokens up to it are counted, and the engine is told to stop."""
    reader = await start(engine, request(stop=("STOP",)))
    ids = tokenizer.encode("the STOP and more")
    link.output("r", *ids)
    await reader.task
    assert reader.text == "the "
    assert reader.end.reason is FinishReason.STOP
    assert reader.end.usage.output_tokens == len(tokenizer.encode("the STOP"))
    assert link.cancels() == ["r"]


@pytest.mark.parametrize("more", [{"reason": FinishReason.LENGTH}, {"reason": FinishReason.ERROR}])
async def test_a_stop_string_wins_over_the_engines_end(engine, link, tokenizer, more):
    """When both come together the client sees the stop; an engine that has ended needs no Cancel."""
    reader = await start(engine, request(stop=("STOP",)))
    link.output("r", *tokenizer.encode("the STOP"), **more)
    await reader.task
    assert (reader.text, reader.end.reason, reader.error) == ("the ", FinishReason.STOP, None)
    assert link.cancels() == []


async def test_what_is_held_comes_at_the_end(engine, link, tokenizer):
    """The beginning of a stop string that never came, and half a character, are shown when the text ends."""
    reader = await start(engine, request(stop=("STOP",)))
    link.output("r", *tokenizer.encode("the STO"), tokenizer.encode("龘")[0])
    await settle()
    assert reader.text == "the "
    link.output("r", reason=FinishReason.LENGTH)
    await reader.task
    assert reader.text == "the STO\ufffd"


async def test_cancel_ends_it_at_once(engine, link, tokenizer):
    """A cancelled request ends with what it had, without waiting for the engine, which is told once."""
    reader = await start(engine)
    link.output("r", *tokenizer.encode("the"))
    engine.cancel("r")
    engine.cancel("r")
    engine.cancel("unknown")
    link.output("r", *tokenizer.encode(" more"), reason=FinishReason.LENGTH)
    await reader.task
    assert (reader.text, reader.end.reason) == ("the", FinishReason.CANCELLED)
    assert reader.end.usage.output_tokens == len(tokenizer.encode("the"))
    assert link.cancels() == ["r"]


async def test_leaving_is_cancelling(engine, link):
    """An iterator closed early, or a task cancelled while it waits, tells the engine and leaves nothing."""
    async with aclosing(engine.generate(request("a"))) as events:
        first = asyncio.create_task(anext(events))
        await settle()
        link.output("a", 70)
        await first
    waiting = await start(engine, request("b"))
    waiting.task.cancel()
    await asyncio.gather(waiting.task, return_exceptions=True)
    assert link.cancels() == ["a", "b"]
    assert engine.snapshot().num_pending == 0


# ---- an engine that dies ---------------------------------------------------------------------------------


async def test_a_new_engine_goes_on(engine, link, tokenizer):
    """After a Ready each running request is submitted again as it was, with the ids that came."""
    reader = await start(engine)
    ids = tokenizer.encode("the rain")
    link.output("r", *ids[:3])
    await settle()
    link.ready(epoch=2, engine_id="e2")
    link.receive(Outputs(epoch=1, outputs=(StepOutput(request_id="r", token_ids=(70,)),)))  # the old one's last
    first, second = link.submissions()
    assert second.output_ids == tuple(ids[:3])
    assert (second.token_ids, second.params) == (first.token_ids, first.params)
    link.output("r", *ids[3:], reason=FinishReason.STOP)
    await reader.task
    assert reader.text == "the rain"
    assert reader.end.usage.output_tokens == len(ids)
    assert engine.snapshot().num_resubmitted == 1


async def test_requests_wait_for_an_engine(engine):
    """Asked while there is none, a request waits and is submitted at the Ready; it was no resubmission."""
    link = FakeLink.current
    reader = await start(engine)
    assert link.submissions() == []
    assert not engine.status().is_ready
    link.ready()
    assert len(link.submissions()) == 1
    assert engine.snapshot().num_resubmitted == 0
    link.output("r", 70, reason=FinishReason.STOP)
    await reader.task
    assert reader.end


async def test_what_the_link_does_not_take_is_not_lost(engine, link):
    """A request that could not be sent is sent with the next Ready."""
    link.can_send = False
    reader = await start(engine)
    link.can_send = True
    link.ready(epoch=2)
    assert len(link.submissions()) == 1
    reader.task.cancel()


async def test_cancelled_while_there_is_no_engine(engine):
    """Cancelled or left while it waits, a request ends and is never submitted."""
    link = FakeLink.current
    reader, left = await start(engine, request("a")), await start(engine, request("b"))
    engine.cancel("a")
    left.task.cancel()
    await settle()
    link.ready()
    assert link.sent == []
    assert reader.end.reason is FinishReason.CANCELLED


async def test_waiting_has_an_end(engine, clock, link):
    """When no engine comes for too long every request fails, later ones at once; with an engine none does."""
    reader = await start(engine, request("a"))
    for _ in range(int(45 / TICK_S)):
        clock.advance(TICK_S)
        engine.tick()
    await reader.task
    assert (reader.error.code, reader.error.retry_after_ms) == ("engine_unavailable", RETRY_MS)
    assert (await refusal(engine, request("b"))).code == "engine_unavailable"
    assert not engine.status().is_ready
    assert "does not answer" in engine.status().reason
    link.ready(epoch=2)
    engine.tick()
    reader = await start(engine, request("c"))
    assert reader.error is None
    reader.task.cancel()


async def test_a_waiting_room_is_bounded(engine, monkeypatch):
    """Without an engine only so many may wait; the others are told to come back."""
    monkeypatch.setattr(module, "WAITING_MAX", 2)
    readers = [await start(engine, request(f"r{number}")) for number in range(3)]
    assert [reader.error and reader.error.code for reader in readers] == [None, None, "queue_full"]
    for reader in readers:
        reader.task.cancel()


async def test_a_request_that_kills_engines_is_given_up(engine, link, tokenizer):
    """One that saw several engines die without a token ends as failed; one that gets tokens goes on."""
    killer, innocent = await start(engine, request("killer")), await start(engine, request("innocent"))
    for number in range(CRASHES_MAX + 1):
        link.output("innocent", *tokenizer.encode("the"))
        await settle()
        link.ready(epoch=2 + number, engine_id=f"e{2 + number}")
    await killer.task
    assert killer.error.code == "engine_error"
    assert innocent.error is None
    link.output("innocent", reason=FinishReason.STOP)
    await innocent.task
    assert innocent.text == "the" * (CRASHES_MAX + 1)


async def test_new_greetings_are_no_deaths(engine, link):
    """The same engine may greet anew as often as it likes."""
    reader = await start(engine)
    for epoch in range(2, 10):
        link.ready(epoch=epoch)
    link.output("r", 70, reason=FinishReason.STOP)
    await reader.task
    assert reader.end


async def test_a_full_queue_after_a_death_is_hidden(engine, link, clock, monkeypatch):
    """What an engine had accepted is offered again when the next one's queue is full, for a bounded time."""
    later = []
    loop = asyncio.get_running_loop()
    monkeypatch.setattr(loop, "call_later", lambda seconds, call, *args: later.append((seconds, call, args)))
    reader, left = await start(engine, request("a")), await start(engine, request("b"))
    link.ready(epoch=2, engine_id="e2")
    link.refuse("a", "queue_full", 700)
    link.refuse("b", "queue_full", 700)
    left.task.cancel()
    await settle()
    num_sent = len(link.submissions())
    for seconds, call, args in later:
        assert seconds == 0.7
        call(*args)
    assert [each.request_id for each in link.submissions()[num_sent:]] == ["a"]
    clock.advance(31)
    link.refuse("a", "queue_full", 700)
    await reader.task
    assert reader.error.code == "queue_full"


async def test_a_shorter_engine_shortens_the_context(engine, link):
    """The context is what both sides can hold; a later, longer engine gives it back."""
    link.ready(epoch=2, max_model_len=32)
    assert engine.models()[0].context_length == 32
    link.ready(epoch=3, max_model_len=10_000)
    assert engine.models()[0].context_length == CONTEXT


async def test_closing_ends_everything(engine, link):
    """At the end every request fails as such, and an engine that others share is told to drop them."""
    await engine.start()
    link = FakeLink.current
    link.ready()
    readers = [await start(engine, request(name)) for name in "ab"]
    await engine.close()
    await settle()
    assert [reader.error.code for reader in readers] == ["server_draining"] * 2
    assert engine.snapshot().num_pending == 0
    assert link.cancels() == ["a", "b"]


async def test_greeting_survives_a_fault(engine, link, monkeypatch, caplog):
    """A tick that fails is logged, and the next one comes."""
    monkeypatch.setattr(module, "TICK_S", 0)
    ticks = []

    def tick():
        ticks.append(1)
        raise RuntimeError("a bug")

    monkeypatch.setattr(engine, "tick", tick)
    await engine.start()
    await settle()
    await engine.close()
    assert len(ticks) > 2
    assert caplog.records[0].message == "tick_failed"


@given(
    moves=st.lists(
        st.sampled_from(["start", "token", "end", "refuse", "cancel", "leave", "die", "ready"]), max_size=25
    ),
    data=st.data(),
)
@settings(max_examples=60, deadline=None)
def test_any_history_ends_every_request_once(package, moves, data):
    """Whatever happens in whatever order: one end each, no token lost or doubled, and nothing kept."""
    asyncio.run(_history(package, moves, data))


async def _history(package, moves, data):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(connection, "Link", FakeLink)
        engine = Engine(package, "x", max_model_len=CONTEXT, supervisor=None, hang_timeout_s=9, now=lambda: 0.0)
        engine._connection.start()
        play = History(engine)
        for move in [*moves, "ready"]:
            live = [name for name, reader in play.readers.items() if not reader.task.done()]
            play.make(move, data.draw(st.sampled_from(live)) if live else None)
            await settle()
        await play.check()
        await engine.close()


class History:
    """Requests, what an engine did to them, and how many tokens it made for each."""

    def __init__(self, engine):
        self.engine, self.link = engine, FakeLink.current
        self.readers, self.made, self.left = {}, {}, set()
        self.link.epoch = 0

    def make(self, move, name):
        if move == "start":
            name = f"r{len(self.readers)}"
            self.readers[name], self.made[name] = Reader(self.engine, request(name, stop=("zz",))), 0
        elif move == "ready":
            self.link.ready(epoch=self.link.epoch + 1, engine_id=f"e{self.link.epoch // 2}")
        elif move == "die":
            self.engine._connection._ended()
        elif name is not None and self.engine.snapshot().ready is not None:
            getattr(self, move)(name)

    def token(self, name):
        self.link.output(name, 70)
        self.made[name] += 1

    def end(self, name):
        self.link.output(name, reason=FinishReason.STOP)

    def refuse(self, name):
        self.link.refuse(name, "queue_full")

    def cancel(self, name):
        self.engine.cancel(name)

    def leave(self, name):
        self.readers[name].task.cancel()
        self.left.add(name)

    async def check(self):
        for name in [name for name, reader in self.readers.items() if not reader.task.done()]:
            last = [each for each in self.link.submissions() if each.request_id == name][-1]
            assert len(last.output_ids) <= self.made[name]
            self.end(name)
        await asyncio.gather(*(reader.task for reader in self.readers.values()), return_exceptions=True)
        for name, reader in self.readers.items():
            assert name in self.left or (reader.end is None) != (reader.error is None)
            assert len(reader.text) == self.made[name]
        assert self.engine.snapshot().num_pending == 0


def test_a_gateway_loads_nothing_that_computes():
    """Imported in a fresh interpreter, the front brings neither numpy nor ONNX Runtime along."""
    code = "import sys, server.engine.engine; print({'numpy', 'onnx', 'onnxruntime'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True, text=True)
    assert done.stdout == "set()\n"
