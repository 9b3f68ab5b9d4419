// SPDX-License-Identifier: Apache-2.0
/** A connection that comes back: one socket, jitter, patience; in virtual time. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { Connection, ConnectionMachine, LIMITS, isRetryable } from "../../../static/connection.js";

function machine(options = {}) {
  return new ConnectionMachine({ random: () => 0.5, ...options });
}

/** A machine with an open socket at time 0. */
function opened(options) {
  const made = machine(options);
  made.handle({ type: "start" }, 0);
  made.handle({ type: "opened", socket: made.socket }, 0);
  return made;
}

function lose(made, now, code = 1006) {
  return made.handle({ type: "closed", socket: made.socket, code }, now);
}

/** Numbers in [0, 1) that are the same in every run. */
function seeded(seed) {
  let state = seed;
  return () => {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    return state / 2 ** 32;
  };
}

test("it opens one socket, and only at the start", () => {
  const made = machine();
  assert.deepEqual(made.handle({ type: "start" }, 0), [{ type: "open", socket: 1 }]);
  assert.deepEqual(made.handle({ type: "start" }, 1), []);
  assert.deepEqual(made.handle({ type: "retry" }, 1_000), []);
  assert.deepEqual(made.handle({ type: "visible" }, 1_000), []);
});

test("what an older socket says is not heard", () => {
  const made = opened();
  const old = made.socket;
  lose(made, 1_000);
  made.handleTimeout(made.nextDeadline());
  assert.equal(made.state, "connecting");
  for (const type of ["opened", "frame", "closed"]) {
    assert.deepEqual(made.handle({ type, socket: old, code: 4505 }, 9_000), []);
    assert.equal(made.state, "connecting");
  }
});

test("each wait is drawn from floor to a window that doubles up to its greatest", () => {
  for (const [random, waits] of [
    [0, [500, 500, 500, 500, 500]],
    [1, [4_000, 8_000, 16_000, 20_000, 20_000]],
  ]) {
    const made = machine({ random: () => random });
    made.handle({ type: "start" }, 0);
    let now = 0;
    for (const wait of waits) {
      lose(made, now);
      assert.equal(made.nextDeadline() - now, wait);
      now = made.nextDeadline();
      made.handleTimeout(now);
    }
  }
});

test("only a life of ten seconds makes the next wait the first again", () => {
  const made = machine({ random: () => 1 });
  made.handle({ type: "start" }, 0);
  lose(made, 0);
  made.handleTimeout(4_000);
  made.handle({ type: "opened", socket: made.socket }, 4_000);
  lose(made, 4_000 + LIMITS.stableMs - 1);
  assert.equal(made.nextDeadline() - (4_000 + LIMITS.stableMs - 1), 8_000);
  made.handleTimeout(made.nextDeadline());
  made.handle({ type: "opened", socket: made.socket }, 30_000);
  lose(made, 30_000 + LIMITS.stableMs);
  assert.equal(made.nextDeadline() - (30_000 + LIMITS.stableMs), 4_000);
});

test("two hundred clients of a server that restarts do not come in one tenth of a second", () => {
  for (const downMs of [0, 3_000, 30_000]) {
    const attempts = [];
    const random = seeded(7);
    for (let client = 0; client < 200; client += 1) {
      const made = opened({ random });
      lose(made, 60_000, 1012);
      while (made.state !== "open") {
        const now = made.nextDeadline();
        made.handleTimeout(now);
        attempts.push(now);
        if (now >= 60_000 + downMs) made.handle({ type: "opened", socket: made.socket }, now);
        else lose(made, now + 5);
      }
    }
    const slots = new Map();
    for (const at of attempts) slots.set(Math.floor(at / 100), (slots.get(Math.floor(at / 100)) ?? 0) + 1);
    assert.ok(Math.max(...slots.values()) <= 20, `${Math.max(...slots.values())} of 200 after ${downMs} ms down`);
  }
});

test("a wait the server names comes on top, once", () => {
  const made = opened();
  made.handle({ type: "retryAfter", ms: 5_000 }, 20_000);
  lose(made, 20_000, 1013);
  assert.equal(made.nextDeadline(), 20_000 + 5_000 + 500 + 0.5 * 3_500);
  made.handleTimeout(made.nextDeadline());
  lose(made, 40_000);
  assert.equal(made.nextDeadline(), 40_000 + 500 + 0.5 * 7_500);
});

test("a final code stops it until a person asks", () => {
  for (const code of [1000, 1008, 1009, 3000, 4500, 4505, 4999]) {
    assert.equal(isRetryable(code), false);
    const made = opened();
    lose(made, 20_000, code);
    assert.equal(made.state, "stopped");
    assert.equal(made.nextDeadline(), null);
    made.handle({ type: "visible" }, 30_000);
    made.handle({ type: "network", isOnline: true }, 30_000);
    assert.equal(made.state, "stopped");
    assert.equal(made.handle({ type: "retry" }, 30_000)[0].type, "open");
  }
  for (const code of [1001, 1006, 1011, 1012, 1013, 4000, 4008, 4499]) assert.ok(isRetryable(code), code);
});

test("a handshake that takes too long is given up", () => {
  const made = machine();
  made.handle({ type: "start" }, 0);
  assert.deepEqual(made.handleTimeout(LIMITS.handshakeMs - 1), []);
  assert.deepEqual(made.handleTimeout(LIMITS.handshakeMs), [{ type: "close", socket: 1, code: 4012 }]);
  assert.equal(made.state, "waiting");
});

test("without a network it tries seldom, as its server may be near, and with one at once", () => {
  const made = machine({ isOnline: false, random: () => 0.75 });
  assert.equal(made.handle({ type: "start" }, 0)[0].type, "open");
  lose(made, 100);
  assert.deepEqual([made.state, made.snapshot().retryAt], ["offline", null]);
  assert.equal(made.nextDeadline(), 100 + 500 + 0.75 * 19_500);
  assert.equal(made.handle({ type: "network", isOnline: true }, 5_000)[0].type, "open");
  made.handle({ type: "network", isOnline: false }, 5_100);
  lose(made, 5_200);
  assert.equal(made.state, "offline");
  assert.equal(made.handleTimeout(made.nextDeadline())[0].type, "open");
});

test("a loss of the network does not close a socket that may live through it", () => {
  const made = opened();
  made.handle({ type: "network", isOnline: false }, 1_000);
  assert.equal(made.state, "open");
  assert.deepEqual(made.handle({ type: "network", isOnline: true }, 2_000), [{ type: "probe", socket: 1 }]);
  made.handle({ type: "frame", socket: 1 }, 2_100);
  assert.equal(made.nextDeadline(), null);
});

test("seen again after a long silence, it asks whether anybody is there, and leaves who is not", () => {
  const made = opened();
  assert.deepEqual(made.handle({ type: "visible" }, LIMITS.silenceMs), []);
  const probed = LIMITS.silenceMs + 1;
  assert.deepEqual(made.handle({ type: "visible" }, probed), [{ type: "probe", socket: 1 }]);
  assert.deepEqual(made.handle({ type: "visible" }, probed + 1), []);
  assert.deepEqual(made.handleTimeout(probed + LIMITS.probeMs), [{ type: "close", socket: 1, code: 4012 }]);
  assert.equal(made.state, "waiting");
});

test("while an answer is awaited, silence is asked about sooner; the silence before does not count", () => {
  const made = opened();
  made.handle({ type: "busy", isBusy: true }, 100_000);
  assert.equal(made.nextDeadline(), 100_000 + LIMITS.busySilenceMs);
  made.handle({ type: "frame", socket: 1 }, 110_000);
  assert.deepEqual(made.handleTimeout(110_000 + LIMITS.busySilenceMs), [{ type: "probe", socket: 1 }]);
  made.handle({ type: "frame", socket: 1 }, 131_000);
  made.handle({ type: "busy", isBusy: false }, 132_000);
  assert.equal(made.nextDeadline(), null);
});

test("seen again while it waits, it tries at once, but never twice in half a second", () => {
  const made = opened({ random: () => 1 });
  lose(made, 20_000);
  assert.equal(made.handle({ type: "visible" }, 20_100)[0].type, "open");
  lose(made, 20_200);
  assert.deepEqual(made.handle({ type: "visible" }, 20_300), []);
  assert.equal(made.nextDeadline(), 20_100 + LIMITS.attemptGapMs);
});

test("a restart leaves the old socket for a new one; while one is coming it waits for that", () => {
  const made = opened();
  assert.deepEqual(made.handle({ type: "restart" }, 30_000), [
    { type: "close", socket: 1, code: 1000 },
    { type: "open", socket: 2 },
  ]);
  assert.deepEqual(made.handle({ type: "restart" }, 30_001), []);
});

test("stopped by the page, it closes and stays closed", () => {
  const made = opened();
  assert.deepEqual(made.handle({ type: "stop" }, 1_000), [{ type: "close", socket: 1, code: 1000 }]);
  assert.equal(made.nextDeadline(), null);
  assert.deepEqual(made.handle({ type: "stop" }, 1_001), []);
});

test("it is troubled from the loss on, not from each new attempt", () => {
  const made = opened();
  assert.equal(made.snapshot().troubledSince, null);
  lose(made, 20_000);
  made.handleTimeout(made.nextDeadline());
  assert.equal(made.snapshot().troubledSince, 20_000);
  made.handle({ type: "opened", socket: made.socket }, 24_000);
  assert.deepEqual(made.snapshot(), { state: "open", retryAt: null, closeCode: null, troubledSince: null });
});

/** The browser, with a clock one turns by hand. */
function fakeBrowser() {
  const browser = { time: 0, timers: new Map(), sockets: [], tell: null, heard: [], states: [], numProbes: 0 };
  class WebSocket {
    constructor(url, protocols) {
      if (browser.refuses) throw new Error("refused");
      Object.assign(this, { url, protocols, sent: [], closedWith: null });
      browser.sockets.push(this);
    }
    send(text) {
      this.sent.push(text);
    }
    close(code) {
      this.closedWith = code;
    }
  }
  let numTimers = 0;
  const environment = {
    WebSocket,
    random: () => 0,
    now: () => browser.time,
    isOnline: () => true,
    soon: (run) => run(),
    setTimeout: (run, wait) => (browser.timers.set((numTimers += 1), { run, at: browser.time + wait }), numTimers),
    clearTimeout: (number) => browser.timers.delete(number),
    listen: (tell) => (browser.tell = tell),
  };
  browser.connection = new Connection({
    url: "ws://x.example/v1/realtime",
    protocols: ["realtime"],
    onFrame: (text) => browser.heard.push(text),
    onState: ({ state }) => browser.states.push(state),
    onProbe: () => (browser.numProbes += 1),
    environment,
  });
  browser.pass = (ms) => {
    browser.time += ms;
    for (const [number, timer] of [...browser.timers]) {
      if (timer.at <= browser.time && browser.timers.delete(number)) timer.run();
    }
  };
  return browser;
}

test("the shell opens, sends, hears, and comes back on a new socket alone", () => {
  const browser = fakeBrowser();
  const { connection, sockets } = browser;
  connection.tell({ type: "start" });
  assert.deepEqual(sockets[0].protocols, ["realtime"]);
  assert.equal(connection.send("early"), false);
  sockets[0].onopen();
  assert.equal(connection.send("hello"), true);
  sockets[0].onmessage({ data: "hi" });
  sockets[0].onclose({ code: 1006 });
  sockets[0].onmessage({ data: "ghost" });
  browser.pass(LIMITS.backoffFloorMs);
  assert.equal(sockets.length, 2);
  sockets[1].onopen();
  assert.deepEqual(browser.heard, ["hi"]);
  assert.deepEqual(sockets[0].sent, ["hello"]);
  assert.deepEqual(browser.states, ["connecting", "open", "waiting", "connecting", "open"]);
});

test("the shell closes what it gives up, and never hears from it again", () => {
  const browser = fakeBrowser();
  browser.connection.tell({ type: "start" });
  browser.sockets[0].onopen();
  browser.time = LIMITS.silenceMs + 1;
  browser.tell({ type: "visible" });
  assert.equal(browser.numProbes, 1);
  browser.pass(LIMITS.probeMs);
  assert.equal(browser.sockets[0].closedWith, 4012);
  assert.equal(browser.sockets[0].onmessage, null);
});

test("a socket that cannot even be made counts as lost", () => {
  const browser = fakeBrowser();
  browser.refuses = true;
  browser.connection.tell({ type: "start" });
  assert.equal(browser.connection.snapshot().state, "waiting");
});
