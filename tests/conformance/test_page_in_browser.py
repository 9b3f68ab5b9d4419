# SPDX-License-Identifier: Apache-2.0
"""The page at `/` as people meet it: in a browser, under its own policy, over a real gateway.

What needs no browser is proven by tests/unit/static. A test here ends with no fault of the page: nothing
thrown, nothing its policy had to refuse.
"""

import asyncio
import json
import subprocess
from pathlib import Path

import pytest

from server.core.errors import error_of
from tests.conformance.chromium import EXECUTABLE, Debugger, chromium
from tests.fakes import FakeGenerator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(EXECUTABLE is None, reason="there is no Chromium here"),
]

ANSWER = (
    "Yes, **quite**.\n\n",
    "1. one\n2. two\n\n",
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n",
    "```python\nprint(",
    '"hi")\n```\n',
    "[more](https://x.example/more)",
)
PAYLOADS = Path(__file__).parents[1] / "unit" / "static" / "markdown" / "payloads.mjs"
LAST = "[...document.querySelectorAll('.message.assistant .text')].at(-1)"
BOX = "document.querySelector('.composer textarea')"
SCROLLER = "document.querySelector('.scroller')"
ELEMENTS = (
    "a blockquote br button code del div em h2 h3 h4 h5 h6 hr i li ol p path pre span strong svg table tbody "
    "td textarea th thead tr ul"
)
CHANGE = """(id, value) => {
    const field = document.getElementById(id);
    field.value = value;
    field.dispatchEvent(new Event("change"));
}"""
SMALL_BUTTONS = """[...document.querySelectorAll("button")].filter((button) => {
    const { width, height } = button.getBoundingClientRect();
    return button.offsetParent && (width < 44 || height < 44);
}).map((button) => button.className || button.id)"""
COUNT_DRAWINGS = """(() => {
    window.drawings = 0;
    const looked = { subtree: true, childList: true, characterData: true };
    new MutationObserver(() => (window.drawings += 1)).observe(document.querySelector(".messages"), looked);
})()"""


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    """One browser for all tests here; each tab is a stranger to the others."""
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


@pytest.fixture
async def open_page(browser):
    """Open a gateway's page and wait until it is connected; no tab may end with a fault."""
    async with Debugger.open(browser) as debugger:
        tabs = []

        async def start(house, **look):
            tab = await debugger.tab(f"{house.http}/", **look)
            tabs.append(tab)
            await tab.wait("document.getElementById('model').textContent !== ''")
            return tab

        yield start
        for tab in tabs:
            assert tab.faults == []


async def ask(tab, text):
    """Write a message, press Enter, and wait until it is on the page."""
    before = await tab.evaluate("document.querySelectorAll('.message').length")
    await tab.evaluate(f"{BOX}.focus()")
    await tab.type(text)
    await tab.press("Enter")
    await tab.wait(f"document.querySelectorAll('.message').length > {before}")


async def change(tab, name, value):
    """Set a field of the settings, as a person does."""
    await tab.evaluate(f"({CHANGE})({json.dumps(name)}, {json.dumps(value)})")


def attacks():
    """The texts that have run as code elsewhere; their one list is a module of the page's own tests."""
    script = f"import {{ATTACKS}} from '{PAYLOADS}'; console.log(JSON.stringify(ATTACKS))"
    command = ["node", "--input-type=module", "-e", script]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


async def answered(tab):
    """Wait until the last answer is over; returns its text."""
    await tab.wait("document.querySelector('.message:last-child [data-action=regenerate]')")
    return await tab.evaluate(f"{LAST}.innerText")


async def wait_requests(house, count):
    """Wait until so many questions have reached the generator."""
    async with asyncio.timeout(20):
        while len(house.generator.requests) < count:  # noqa: ASYNC110 - a fake has no event for each
            await asyncio.sleep(0.01)


def asked(house, index=-1):
    """What a request told the model, in roles and texts."""
    return [(item.role.value, item.text) for item in house.generator.requests[index].items]


def cut(house):
    """Let every connection of a gateway fall, as a broken line does."""
    for connection in list(house.server.server_state.connections):
        connection.transport.abort()


async def test_a_conversation(serve, open_page):
    """A question is answered as it streams, drawn as markup; the next one knows the first."""
    house = await serve(*ANSWER)
    tab = await open_page(house)
    await ask(tab, "Is it?")
    await answered(tab)
    tags = await tab.evaluate(f"[...{LAST}.querySelectorAll('*')].map((e) => e.localName).join(' ')")
    for tag in ("strong", "ol", "li", "table", "th", "pre", "code", "button", "a"):
        assert tag in tags.split()
    assert await tab.evaluate("document.querySelector('.message pre').innerText") == 'print("hi")'
    await ask(tab, "Really?")
    await wait_requests(house, 2)
    assert [role for role, _ in asked(house)] == ["user", "assistant", "user"]


async def test_the_policy_is_strict(serve, open_page):
    """What a page may do is said by its headers, and this one needs no more."""
    house = await serve("x")
    tab = await open_page(house)
    policy = await tab.evaluate("fetch('/').then((reply) => reply.headers.get('content-security-policy'))")
    assert "default-src 'none'" in policy
    assert "require-trusted-types-for 'script'" in policy
    assert "unsafe" not in policy
    await tab.click("#open-settings")
    await tab.wait("document.getElementById('settings').open")


async def test_attacks_from_a_model_and_from_a_store_are_text(serve, open_page):
    """Whatever is written, streamed or restored: only known elements, nothing run, nothing fetched."""
    texts = attacks()
    text = "\n\n".join(texts)
    pieces = (text[at : at + 3] for at in range(0, len(text), 3))
    house = await serve(generator=FakeGenerator(*pieces, context_length=100_000))
    tab = await open_page(house)
    await tab.evaluate("window.alert = () => (window.hit = true)")
    await ask(tab, "\n".join(texts))
    streamed = await answered(tab)
    found = "[...document.querySelectorAll('#chat *')].map((each) => each.localName)"
    assert set(await tab.evaluate(found)) <= set(ELEMENTS.split())
    await tab.go(f"{house.http}/")
    await tab.wait("document.querySelector('.message.assistant')")
    assert await tab.evaluate(f"{LAST}.innerText") == streamed
    assert set(await tab.evaluate(found)) <= set(ELEMENTS.split())
    loaded = await tab.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert [name for name in loaded if not name.startswith(f"{house.http}/")] == []
    assert await tab.evaluate("window.hit === undefined")


async def test_a_real_composition_is_not_sent(serve, open_page):
    """The Enter that confirms a word stays with the input method; the next one sends, once."""
    house = await serve("ok")
    tab = await open_page(house)
    await tab.evaluate(f"{BOX}.focus()")
    await tab.call("Input.imeSetComposition", text="nihao", selectionStart=5, selectionEnd=5)
    await tab.call(
        "Input.dispatchKeyEvent", type="rawKeyDown", key="Enter", code="Enter", windowsVirtualKeyCode=229
    )
    assert await tab.evaluate(f"{BOX}.value") == "nihao"
    await tab.call("Input.insertText", text="你好")
    assert house.generator.requests == []
    await tab.press("Enter")
    await answered(tab)
    assert len(house.generator.requests) == 1
    assert asked(house) == [("user", "你好")]


@pytest.mark.parametrize("order", ["chromium", "safari"])
async def test_both_orders_of_composition_events(serve, open_page, order):
    """Safari ends the composition before the key that did it arrives: keyCode 229 is what is left to see."""
    house = await serve("ok")
    tab = await open_page(house)

    def key(**more):
        init = {"key": "Enter", "bubbles": True, "cancelable": True, "keyCode": 13} | more
        return f"{BOX}.dispatchEvent(new KeyboardEvent('keydown', {json.dumps(init)}))"

    begin, end = (
        f"{BOX}.dispatchEvent(new CompositionEvent('composition{when}'))" for when in ("start", "end")
    )
    confirm = key(keyCode=229, isComposing=order == "chromium")
    steps = [confirm, end] if order == "chromium" else [end, confirm]
    for step in (f"{BOX}.value = '字'", begin, *steps, key(shiftKey=True)):
        await tab.evaluate(step)
    assert await tab.evaluate("document.querySelectorAll('.message').length") == 0
    await tab.evaluate(f"{key()}, {key()}")
    await answered(tab)
    assert len(house.generator.requests) == 1


async def test_stop_keeps_what_came(serve, open_page):
    """The button that sent now stops; the answer says so and may be asked for again."""
    house = await serve(generator=FakeGenerator("one ", "two ", "three", is_held=True))
    tab = await open_page(house)
    await ask(tab, "count")
    await wait_requests(house, 1)
    house.generator.release(2)
    await tab.wait(f"{LAST}.innerText.trim() === 'one two'")
    await tab.click(".send")
    await tab.wait("document.querySelector('.assistant .note').innerText.includes('stopped')")
    house.generator.is_held = False
    await tab.click("[data-action=regenerate]")
    await tab.wait(f"{LAST}.innerText === 'one two three'")
    assert asked(house) == [("user", "count")]


async def test_a_cut_line_heals(serve, open_page):
    """In the middle of an answer the line falls: what came stays, the page comes back, and goes on if told."""
    house = await serve(generator=FakeGenerator("one ", "two ", "three", is_held=True))
    tab = await open_page(house)
    await ask(tab, "count")
    await wait_requests(house, 1)
    house.generator.release(2)
    await tab.wait(f"{LAST}.innerText.trim() === 'one two'")
    cut(house)
    await tab.wait("document.querySelector('[data-action=continue]')")
    assert (await tab.evaluate(f"{LAST}.innerText")).strip() == "one two"
    house.generator.is_held = False
    await tab.click("[data-action=continue]")
    await wait_requests(house, 2)
    await answered(tab)
    assert asked(house) == [("user", "count"), ("assistant", "one two "), ("user", "Please continue.")]
    assert await tab.evaluate("document.getElementById('link').innerText") == "connected"


async def test_a_question_without_a_line_waits_and_is_sent_once(serve, open_page):
    """Written while the line is down, it brings the line back and is asked there."""
    house = await serve("ok")
    tab = await open_page(house)
    cut(house)
    await tab.wait("document.getElementById('link').innerText !== 'connected'")
    await ask(tab, "still there?")
    assert await answered(tab) == "ok"
    assert len(house.generator.requests) == 1


async def test_a_refusal_says_why_and_when(serve, open_page):
    """A full queue is told in words, with the wait; another try is a press away."""
    house = await serve(generator=FakeGenerator(error_of("queue_full", "12 wait", retry_after_ms=9_000)))
    tab = await open_page(house)
    await ask(tab, "now?")
    note = await tab.wait("document.querySelector('.message.assistant .note').innerText")
    assert note.startswith("The server has too much to do just now. You can try again in ")
    house.generator.steps = ("better",)
    await tab.click("[data-action=retry]")
    assert await answered(tab) == "better"


async def test_a_reader_is_not_moved(serve, open_page):
    """Who scrolled up stays there while the answer grows, with a way down; who asks for the end gets it."""
    house = await serve(generator=FakeGenerator(*(f"line {n}\n\n" for n in range(80)), is_held=True))
    tab = await open_page(house, width=600, height=500)
    await ask(tab, "long")
    await wait_requests(house, 1)
    top = f"{SCROLLER}.scrollTop"
    house.generator.release(40)
    await tab.wait(f"{LAST}.innerText.includes('line 39')")
    tops = [await tab.evaluate(f"{each}.getBoundingClientRect().top") for each in (LAST, SCROLLER)]
    assert 0 <= tops[0] - tops[1] < 60, "it followed until the first line reached the top, and no further"
    before = await tab.evaluate(top)
    at = {"x": 300, "y": 250}
    await tab.call("Input.dispatchMouseEvent", type="mouseWheel", deltaX=0, deltaY=-60, **at)
    await tab.wait(f"{top} === {before - 60}")
    house.generator.release(20)
    await tab.wait(f"{LAST}.innerText.includes('line 59')")
    assert await tab.evaluate(top) == before - 60
    await tab.click(".pill")
    gap = f"{SCROLLER}.scrollHeight - {SCROLLER}.clientHeight - {SCROLLER}.scrollTop"
    assert await tab.evaluate(gap) < 2
    house.generator.release(100)
    await answered(tab)
    assert await tab.evaluate(gap) < 2
    assert await tab.evaluate("document.querySelector('.pill').hidden")


async def test_it_opens_at_the_start_and_returns_to_the_end(serve, open_page):
    """On a small screen a new reader sees the greeting, and one who comes back the last answer."""
    house = await serve("word " * 400)
    tab = await open_page(house, width=320, height=400)
    assert await tab.evaluate(f"{SCROLLER}.scrollHeight > {SCROLLER}.clientHeight")
    assert await tab.evaluate(f"{SCROLLER}.scrollTop") == 0
    await ask(tab, "go")
    await answered(tab)
    await tab.go(f"{house.http}/")
    gap = f"{SCROLLER}.scrollHeight - {SCROLLER}.clientHeight - {SCROLLER}.scrollTop"
    await tab.wait(f"{SCROLLER}.scrollTop > 100 && {gap} < 2")


async def test_right_to_left_text_runs_from_the_right(serve, open_page):
    """A list's marks and a table's columns follow the language of what is in them."""
    house = await serve("1. أولا\n2. ثانيا\n\n| ا | ب |\n|---|---|\n| 1 | 2 |\n\n> كلام\n\nPlain.")
    tab = await open_page(house)
    await ask(tab, "go")
    await answered(tab)
    blocks = f"[...{LAST}.querySelectorAll('ol, li, table, blockquote, p')]"
    ways = await tab.evaluate(f"{blocks}.map((each) => getComputedStyle(each).direction)")
    assert ways == ["rtl"] * 6 + ["ltr"]


async def test_a_reload_brings_the_conversation_back(serve, open_page):
    """History is the browser's; a new session is told of it when it is asked. A new chat erases it."""
    house = await serve("fine")
    tab = await open_page(house)
    await ask(tab, "how are you?")
    await answered(tab)
    await tab.go(f"{house.http}/")
    await tab.wait("document.querySelectorAll('.message').length === 2")
    await ask(tab, "and now?")
    await answered(tab)
    assert asked(house) == [("user", "how are you?"), ("assistant", "fine"), ("user", "and now?")]
    await tab.click("#new-chat")
    await tab.wait("document.querySelector('.suggestion')")
    await ask(tab, "hello")
    await answered(tab)
    assert asked(house) == [("user", "hello")]
    assert await tab.evaluate("JSON.parse(localStorage.getItem('sampan.chat.1')).messages.length") == 2


async def test_settings_reach_the_model_and_stay(serve, open_page):
    """Instructions and temperature are in force from the next question on, also after a reload."""
    house = await serve("ok")
    tab = await open_page(house)
    await tab.click("#open-settings")
    await change(tab, "instructions", "Be brief.")
    await change(tab, "temperature", "0.2")
    await tab.press("Escape")
    await tab.wait("!document.getElementById('settings').open")
    for number in (1, 2):
        await ask(tab, "go")
        await wait_requests(house, number)
        await answered(tab)
        assert asked(house)[0] == ("system", "Be brief.")
        assert house.generator.requests[-1].sampling.temperature == 0.2
        await tab.go(f"{house.http}/")


@pytest.mark.parametrize(
    ("languages", "language", "word"),
    [
        ("zh-CN", "zh-Hans", "新对话"),
        ("zh-HK", "zh-Hant", "新對話"),
        ("ja", "ja", "新しいチャット"),
        ("fr", "en", "New chat"),
    ],
)
async def test_the_page_speaks_the_readers_language(serve, open_page, languages, language, word):
    """The browser's wish is heard, and another can be chosen."""
    house = await serve("天空是蓝色的，因为空气会散射阳光。")
    tab = await open_page(house, languages=languages)
    assert await tab.evaluate("document.documentElement.lang") == language
    assert await tab.evaluate("document.querySelector('#new-chat span').textContent") == word
    await ask(tab, "为什么？")
    await answered(tab)
    assert await tab.evaluate(f"{LAST}.lang") == "zh-Hans"
    await tab.click("#open-settings")
    await change(tab, "language", "ja")
    await tab.wait("document.documentElement.lang === 'ja'")
    assert await tab.evaluate("document.querySelector('#settings h2').textContent") == "設定"


async def test_everything_can_be_named_reached_and_pressed(serve, open_page):
    """Names for all controls, 44 pixels for each, no sideways scrolling on the smallest phone, no live log."""
    house = await serve(*ANSWER)
    tab = await open_page(house, width=320, height=640, touch=True)
    await ask(tab, "Is it?")
    await answered(tab)
    tree = (await tab.call("Accessibility.getFullAXTree"))["nodes"]
    controls = {"button", "textbox", "combobox", "slider", "log", "link", "dialog"}
    named = [node for node in tree if not node["ignored"] and node["role"]["value"] in controls]
    assert {node["role"]["value"] for node in named} >= {"button", "textbox", "log"}
    assert [node["role"]["value"] for node in named if not node.get("name", {}).get("value")] == []
    assert await tab.evaluate(SMALL_BUTTONS) == []
    assert await tab.evaluate("document.documentElement.scrollWidth") == 320
    assert await tab.evaluate("document.querySelector('[role=log]').getAttribute('aria-live')") == "off"
    assert await tab.evaluate("parseFloat(getComputedStyle(document.querySelector('textarea')).fontSize)") >= 16
    heard = await tab.evaluate("document.querySelector('[data-part=announcer]').textContent")
    assert "Yes, quite." in heard
    assert "**" not in heard


async def test_copy_gives_the_text_and_the_code(serve, open_page):
    """An answer is copied as it was written, a block as code alone."""
    house = await serve(*ANSWER)
    tab = await open_page(house)
    await ask(tab, "Is it?")
    await answered(tab)
    await tab.evaluate("navigator.clipboard.writeText = async (text) => void (window.copied = text)")
    await tab.click("[data-action=copy]")
    assert await tab.wait("window.copied") == "".join(ANSWER)
    await tab.click("[data-action=copyCode]")
    await tab.wait("document.querySelector('[data-action=copyCode]').textContent === 'Copied'")
    assert await tab.evaluate("window.copied") == 'print("hi")'


async def test_many_tokens_are_few_drawings(serve, open_page):
    """However many pieces come, the page draws at most once a frame."""
    house = await serve(*(f"w{n} " for n in range(2_000)))
    tab = await open_page(house)
    await tab.evaluate(COUNT_DRAWINGS)
    start = asyncio.get_running_loop().time()
    await ask(tab, "much")
    assert (await answered(tab)).endswith("w1999")
    frames = (asyncio.get_running_loop().time() - start) * 60
    assert await tab.evaluate("window.drawings") < frames + 20


async def test_a_real_model_answers(server_process, open_page):
    """From the first press to the last word, with everything real."""
    house = type("House", (), {"http": server_process.url})
    tab = await open_page(house)
    await tab.click(".suggestion")
    await tab.wait("document.querySelector('.message:last-child [data-action=regenerate]')", seconds=120)
    assert len(await tab.evaluate(f"{LAST}.innerText")) > 20
