# SPDX-License-Identifier: Apache-2.0
"""Debian's Chromium, driven over its own debugging protocol: no driver, no package, one WebSocket.

Invariant: a browser is one process with a profile of its own that is gone afterwards; every tab has a context
of its own, so no test sees another's storage. What the page violates or throws is kept, never swallowed.
"""

import asyncio
import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time

from websockets.asyncio.client import connect

EXECUTABLE = shutil.which("chromium")
START_S = 60
WAIT_S = 20
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-extensions --disable-dev-shm-usage --lang=en-US "
    "--force-color-profile=srgb --hide-scrollbars --remote-debugging-port=0"
)


@contextlib.contextmanager
def chromium(profile):
    """Run a browser; gives the address of its debugger."""
    command = [EXECUTABLE, *FLAGS.split(), f"--user-data-dir={profile}", "about:blank"]
    log = profile / "log.txt"
    with log.open("w") as out:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=out)
    try:
        yield _debugger_of(process, log)
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _debugger_of(process, log):
    ends_at = time.monotonic() + START_S
    while time.monotonic() < ends_at and process.poll() is None:
        for line in log.read_text(errors="replace").splitlines():
            if line.startswith("DevTools listening on "):
                return line.rpartition(" ")[2]
        time.sleep(0.05)
    raise AssertionError(f"the browser did not start:\n{log.read_text(errors='replace')}")


class Debugger:
    """One connection to a browser. `async with Debugger.open(address) as debugger`."""

    def __init__(self, socket):
        self._socket = socket
        self._ids = itertools.count(1)
        self._replies = {}
        self._listeners = {}  # session id → what takes its events

    @classmethod
    @contextlib.asynccontextmanager
    async def open(cls, address):
        """Connect, and listen until left."""
        async with connect(address, max_size=None, compression=None) as socket:
            debugger = cls(socket)
            reader = asyncio.create_task(debugger._read())
            try:
                yield debugger
            finally:
                reader.cancel()
                await asyncio.gather(reader, return_exceptions=True)

    async def call(self, method, session=None, **params):
        """Call a method; the browser's error becomes ours."""
        number = next(self._ids)
        reply = self._replies[number] = asyncio.get_running_loop().create_future()
        message = {"id": number, "method": method, "params": params}
        await self._socket.send(json.dumps(message | ({"sessionId": session} if session else {})))
        return await asyncio.wait_for(reply, WAIT_S)

    async def tab(self, url, **look):
        """Open a page in a context of its own."""
        context = await self.call("Target.createBrowserContext", disposeOnDetach=True)
        target = await self.call(
            "Target.createTarget", url="about:blank", browserContextId=context["browserContextId"]
        )
        attached = await self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        tab = Tab(self, attached["sessionId"])
        self._listeners[attached["sessionId"]] = tab.hear
        await tab.prepare(**look)
        await tab.go(url)
        return tab

    async def _read(self):
        async for text in self._socket:
            message = json.loads(text)
            reply = self._replies.pop(message.get("id"), None)
            if reply is None:
                self._listeners.get(message.get("sessionId"), lambda _: None)(message)
            elif not reply.done() and "error" in message:
                reply.set_exception(AssertionError(message["error"]["message"]))
            elif not reply.done():
                reply.set_result(message["result"])


class Tab:
    """One page. `faults` holds what it threw, and what its policy refused."""

    def __init__(self, debugger, session):
        self._debugger, self._session = debugger, session
        self.faults = []

    async def call(self, method, **params):
        """Call a method on this page."""
        return await self._debugger.call(method, self._session, **params)

    def hear(self, message):
        """Keep what went wrong."""
        params = message.get("params", {})
        if message["method"] == "Runtime.exceptionThrown":
            self.faults.append(json.dumps(params["exceptionDetails"])[:2_000])
        if message["method"] == "Audits.issueAdded" and "ContentSecurityPolicy" in params["issue"]["code"]:
            self.faults.append(json.dumps(params["issue"])[:2_000])

    async def prepare(
        self, *, width=1200, height=800, scale=1, dark=False, languages="en-US", touch=False, features=()
    ):
        """Set how the page is looked at, before it loads. `features` are more CSS media features."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        for domain in ("Page", "Runtime", "Audits", "Network"):
            await self.call(f"{domain}.enable")
        await self.resize(width, height, scale, touch=touch)
        await self.call("Emulation.setEmulatedMedia", features=[scheme, *features])
        await self.call("Emulation.setTouchEmulationEnabled", enabled=touch)
        await self.call("Emulation.setFocusEmulationEnabled", enabled=True)
        agent = (await self.call("Runtime.evaluate", expression="navigator.userAgent"))["result"]["value"]
        await self.call("Emulation.setUserAgentOverride", userAgent=agent, acceptLanguage=languages)

    async def resize(self, width, height, scale=1, *, touch=False):
        """Make the window so large."""
        await self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=touch,
        )

    async def go(self, url):
        """Load a page and wait for its scripts."""
        await self.call("Page.navigate", url=url)
        await self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    async def evaluate(self, expression):
        """The value of an expression or a promise; what it throws fails the test."""
        result = await self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True, userGesture=True
        )
        assert "exceptionDetails" not in result, result["exceptionDetails"]
        return result["result"].get("value")

    async def wait(self, expression, seconds=WAIT_S):
        """Wait until an expression is true; returns its value."""
        ends_at = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < ends_at:
            if value := await self.evaluate(f"(found => found instanceof Node || found)({expression})"):
                return value
            await asyncio.sleep(0.02)
        shown = await self.evaluate("document.body.innerText")
        raise AssertionError(f"never true: {expression}\n{shown}")

    async def type(self, text):
        """Put text where the focus is, as a paste does."""
        await self.call("Input.insertText", text=text)

    async def press(self, key, code=None, modifiers=0):
        """Press and release a key."""
        known = {"Enter": (13, "\r"), "Tab": (9, ""), "PageUp": (33, ""), "Escape": (27, "")}
        number, text = known.get(key, (0, ""))
        shared = {"key": key, "code": code or key, "windowsVirtualKeyCode": number, "modifiers": modifiers}
        await self.call("Input.dispatchKeyEvent", type="keyDown", text=text, **shared)
        await self.call("Input.dispatchKeyEvent", type="keyUp", **shared)

    async def click(self, selector):
        """Press the mouse in the middle of an element."""
        place = await self.wait(
            f"(() => {{ const e = document.querySelector({json.dumps(selector)}); "
            "if (!e || e.hidden) return null; "
            "const r = e.getBoundingClientRect(); return [r.x + r.width / 2, r.y + r.height / 2]; })()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            at = {"x": place[0], "y": place[1]}
            await self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)

    async def picture(self, path):
        """Write what is seen as a PNG."""
        shot = await self.call("Page.captureScreenshot", format="png")
        path.write_bytes(base64.b64decode(shot["data"]))
