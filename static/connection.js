// SPDX-License-Identifier: Apache-2.0
/**
 * One connection that comes back by itself: a pure machine that decides, and a shell of timers and sockets.
 *
 * Owns when to open, when to give up and how long to wait. Invariant: at most one socket is alive, and what an
 * older one still says is not heard. It must never read what the frames mean, and never retry without jitter.
 *
 *     idle        start  → connecting
 *     connecting  opened → open          closed, handshake too long → waiting, offline or stopped
 *     open        closed, no answer to a probe → waiting, offline or stopped
 *     waiting     deadline, retry, visible, online → connecting
 *     offline     online, retry, deadline → connecting (a browser that says "offline" may still reach its own machine)
 *     stopped     retry → connecting
 *     any         restart → connecting at once with a new socket;  stop → idle
 */

/** Milliseconds. A server may be restarted under thousands of pages; these spread their return. */
export const LIMITS = Object.freeze({
  backoffFloorMs: 500,
  /** The first wait is drawn from floor…this: 200 clients then share 35 tenths of a second, about 6 in each. */
  backoffFirstMs: 4_000,
  backoffMaxMs: 20_000,
  /** A connection that lived so long is sound, and the next loss starts from the first wait again. */
  stableMs: 10_000,
  handshakeMs: 10_000,
  /** Twice a server's heartbeat, which a page cannot see: after so long a silence a socket may be dead. */
  silenceMs: 50_000,
  /** While an answer is awaited, silence is suspicious sooner. */
  busySilenceMs: 20_000,
  probeMs: 5_000,
  /** However often one asks for it, attempts start no closer together than this. */
  attemptGapMs: 500,
});

/** 4000–4499 and these ask a client to come back; other codes are final until a person says otherwise. */
const RETRY_CODES = new Set([1001, 1005, 1006, 1011, 1012, 1013, 1015]);

export function isRetryable(code) {
  return RETRY_CODES.has(code) || (code >= 4000 && code <= 4499);
}

/** Decides. Every verb takes the time in milliseconds and returns effects: `open`, `close`, `probe`. */
export class ConnectionMachine {
  /** @param {{random: () => number, isOnline?: boolean, limits?: typeof LIMITS}} options */
  constructor({ random, isOnline = true, limits = LIMITS }) {
    this.state = "idle";
    this.socket = 0;
    this._random = random;
    this._limits = limits;
    this._isOnline = isOnline;
    this._isBusy = false;
    this._numFailures = 0;
    this._retryAfterMs = 0;
    this._closeCode = null;
    this._startedAt = -Infinity; // of the newest attempt
    this._openedAt = null;
    this._heardAt = 0;
    this._probedAt = null;
    this._retryAt = null;
    this._troubledSince = null;
  }

  /** What a person may want to know. `troubledSince` is when it was last open, null while it is. */
  snapshot() {
    return {
      state: this.state,
      retryAt: this.state === "waiting" ? this._retryAt : null, // offline, the network decides, and no countdown
      closeCode: this._closeCode,
      troubledSince: this._troubledSince,
    };
  }

  /** Take one input: its `type` is a method's name below; inputs of a socket carry its number. */
  handle(input, now) {
    if (input.socket !== undefined && input.socket !== this.socket) return [];
    return INPUTS[input.type].call(this, input, now);
  }

  /** Act on a deadline that has come; too early is harmless. */
  handleTimeout(now) {
    const deadline = this.nextDeadline();
    if (deadline === null || now < deadline) return [];
    if (this.state === "waiting" || this.state === "offline") return this._open(now);
    if (this.state === "connecting") return this._drop(now);
    if (this._probedAt !== null) return this._drop(now);
    return this._probe(now);
  }

  /** When `handleTimeout` has something to do, or null. */
  nextDeadline() {
    const limits = this._limits;
    if (this.state === "waiting" || this.state === "offline") return this._retryAt;
    if (this.state === "connecting") return this._startedAt + limits.handshakeMs;
    if (this.state !== "open") return null;
    if (this._probedAt !== null) return this._probedAt + limits.probeMs;
    return this._isBusy ? this._heardAt + limits.busySilenceMs : null;
  }

  _open(now) {
    this.state = "connecting";
    this.socket += 1;
    this._startedAt = now;
    this._retryAt = null;
    this._troubledSince ??= now;
    return [{ type: "open", socket: this.socket }];
  }

  /** Open now, or as soon as the last attempt is long enough ago. */
  _openSoon(now) {
    const earliest = this._startedAt + this._limits.attemptGapMs;
    if (now >= earliest) return this._open(now);
    this.state = "waiting";
    this._retryAt = earliest;
    return [];
  }

  _probe(now) {
    this._probedAt = now;
    return [{ type: "probe", socket: this.socket }];
  }

  /** Give up on a silent socket. */
  _drop(now) {
    const socket = this.socket;
    return [{ type: "close", socket, code: 4012 }, ...this._lost(1006, now)];
  }

  _lost(code, now) {
    const { backoffFloorMs, backoffFirstMs, backoffMaxMs, stableMs } = this._limits;
    if (this._openedAt !== null && now - this._openedAt >= stableMs) this._numFailures = 0;
    this._openedAt = null;
    this._probedAt = null;
    this._closeCode = code;
    this._troubledSince ??= now;
    this.socket += 1; // whatever the old one says from now on is not heard
    if (!isRetryable(code)) {
      this.state = "stopped";
    } else {
      const window = this._isOnline ? Math.min(backoffMaxMs, backoffFirstMs * 2 ** this._numFailures) : backoffMaxMs;
      this.state = this._isOnline ? "waiting" : "offline";
      this._retryAt = now + this._retryAfterMs + backoffFloorMs + this._random() * (window - backoffFloorMs);
      this._numFailures = Math.min(this._numFailures + 1, 16);
    }
    this._retryAfterMs = 0;
    return [];
  }
}

/** What each input does, by its `type`; a method of the machine. */
const INPUTS = {
  start(_input, now) {
    return this.state === "idle" ? this._open(now) : [];
  },

  opened(_input, now) {
    this.state = "open";
    this._openedAt = now;
    this._heardAt = now;
    this._closeCode = null;
    this._troubledSince = null;
    return [];
  },

  frame(_input, now) {
    this._heardAt = now;
    this._probedAt = null;
    return [];
  },

  closed({ code }, now) {
    return this._lost(code, now);
  },

  /** The server named a wait; it comes on top of our own, so that all who were told the same still spread. */
  retryAfter({ ms }) {
    this._retryAfterMs = Math.min(Math.max(ms, 0), 60_000);
    return [];
  },

  network({ isOnline }, now) {
    this._isOnline = isOnline;
    if (!isOnline) {
      // An open socket may outlive a change of networks; its own end, or a probe, will tell.
      if (this.state === "waiting") this.state = "offline";
      return [];
    }
    if (this.state === "open") return this._probedAt === null ? this._probe(now) : [];
    return this.state === "waiting" || this.state === "offline" ? this._openSoon(now) : [];
  },

  visible(_input, now) {
    if (this.state === "waiting") return this._openSoon(now);
    const isSilent = now - this._heardAt > this._limits.silenceMs;
    return this.state === "open" && isSilent && this._probedAt === null ? this._probe(now) : [];
  },

  /** A person asks, or has something to say. */
  retry(_input, now) {
    return ["waiting", "offline", "stopped"].includes(this.state) ? this._openSoon(now) : [];
  },

  busy({ isBusy }, now) {
    if (isBusy && !this._isBusy) this._heardAt = now; // the silence before a question means nothing
    this._isBusy = isBusy;
    return [];
  },

  /** Begin a new session on a new socket. */
  restart(_input, now) {
    if (this.state === "connecting") return [];
    const old = this.state === "open" ? [{ type: "close", socket: this.socket, code: 1000 }] : [];
    this._openedAt = null;
    this._probedAt = null;
    return [...old, ...this._open(now)];
  },

  stop() {
    const isAlive = this.state === "open" || this.state === "connecting";
    const effects = isAlive ? [{ type: "close", socket: this.socket, code: 1000 }] : [];
    this.state = "idle";
    this.socket += 1;
    this._openedAt = null;
    this._probedAt = null;
    return effects;
  },
};

/**
 * The shell: performs the machine's effects. `onFrame(text)`, `onState(snapshot)` and `onProbe()` (send anything
 * the server answers) are called from the event loop, never from inside a call made here.
 */
export class Connection {
  /** `environment` stands for the browser in tests. */
  constructor({ url, protocols = [], onFrame, onState, onProbe, environment = browserEnvironment() }) {
    this._url = url;
    this._protocols = protocols;
    this._onFrame = onFrame;
    this._onState = onState;
    this._onProbe = onProbe;
    this._environment = environment;
    this._machine = new ConnectionMachine({ random: environment.random, isOnline: environment.isOnline() });
    this._webSocket = null;
    this._timer = null;
    this._seen = "";
    environment.listen((input) => this.tell(input));
  }

  snapshot() {
    return this._machine.snapshot();
  }

  /** The time `retryAt` is on. */
  now() {
    return this._environment.now();
  }

  /** Send text on the open socket; false if there is none. */
  send(text) {
    if (this._machine.state !== "open") return false;
    this._webSocket.send(text);
    return true;
  }

  /** Give the machine an input: `start`, `retry`, `restart`, `stop`, `retryAfter`, `busy`. */
  tell(input) {
    this._perform(this._machine.handle(input, this.now()));
  }

  _perform(effects) {
    for (const effect of effects) {
      if (effect.type === "open") this._open(effect.socket);
      else if (effect.type === "close") this._close(effect.code);
      else this._onProbe();
    }
    this._arm();
    const snapshot = this.snapshot();
    const seen = JSON.stringify(snapshot);
    if (seen !== this._seen) {
      this._seen = seen;
      this._environment.soon(() => this._onState(snapshot));
    }
  }

  _arm() {
    const { setTimeout, clearTimeout } = this._environment;
    clearTimeout(this._timer);
    const deadline = this._machine.nextDeadline();
    if (deadline === null) return;
    const wait = Math.max(0, deadline - this.now());
    this._timer = setTimeout(() => this._perform(this._machine.handleTimeout(this.now())), wait);
  }

  _open(socket) {
    let webSocket;
    try {
      webSocket = new this._environment.WebSocket(this._url, this._protocols);
    } catch {
      // Refused before it began, by policy or for its address: as good as lost.
      this._environment.soon(() => this.tell({ type: "closed", socket, code: 1006 }));
      return;
    }
    this._webSocket = webSocket;
    webSocket.onopen = () => this.tell({ type: "opened", socket });
    webSocket.onclose = (event) => this.tell({ type: "closed", socket, code: event.code });
    webSocket.onmessage = (event) => {
      if (socket !== this._machine.socket) return;
      this.tell({ type: "frame", socket });
      this._onFrame(event.data);
    };
  }

  _close(code) {
    const webSocket = this._webSocket;
    this._webSocket = null;
    if (webSocket === null) return;
    webSocket.onopen = webSocket.onclose = webSocket.onmessage = null;
    webSocket.close(code);
  }
}

/** The browser as the shell needs it. Its clock counts sleep, and never runs backwards. */
function browserEnvironment() {
  let wall = Date.now();
  let elapsed = 0;
  return {
    WebSocket: globalThis.WebSocket,
    random: Math.random,
    setTimeout: globalThis.setTimeout.bind(globalThis),
    clearTimeout: globalThis.clearTimeout.bind(globalThis),
    soon: (run) => queueMicrotask(run),
    isOnline: () => navigator.onLine !== false,
    now() {
      const before = wall;
      wall = Date.now();
      elapsed += Math.max(0, wall - before);
      return elapsed;
    },
    listen(tell) {
      addEventListener("online", () => tell({ type: "network", isOnline: true }));
      addEventListener("offline", () => tell({ type: "network", isOnline: false }));
      addEventListener("pageshow", () => tell({ type: "visible" }));
      document.addEventListener("visibilitychange", () => {
        if (document.visibilityState === "visible") tell({ type: "visible" });
      });
    },
  };
}
