// SPDX-License-Identifier: Apache-2.0
/**
 * The page at `/`: joins connection, conversation and view. A shell without rules of its own.
 *
 * Invariant: whatever happens is told to the machine it concerns, and the page is drawn from their state at the next
 * frame. It must never draw from inside an event.
 */
import { Connection } from "../connection.js";
import { Conversation, LIMITS } from "../conversation.js";
import { LANGUAGES, chooseLanguage, loadWords } from "../strings/choose.js";
import { ChatView } from "../view/chat.js";
import { FrameClock } from "../view/frames.js";
import { SettingsDrawer } from "./settings.js";
import { describe } from "./status.js";
import { Store, storageOf } from "./store.js";

const SAVE_MS = 2_000;

class Page {
  constructor(document, words, language) {
    this._document = document;
    this._words = words;
    this._language = language;
    this._store = new Store(storageOf("localStorage"), storageOf("sessionStorage"));
    this._settings = this._store.loadSettings();
    this._clock = new FrameClock(() => this._draw());
    this._conversation = new Conversation({
      newId,
      messages: this._store.loadMessages(),
      settings: { instructions: this._settings.instructions, temperature: this._settings.temperature },
    });
    this._connection = new Connection({
      url: socketUrl(document.baseURI),
      protocols: ["realtime"],
      onFrame: (text) => this._received(text),
      onState: (snapshot) => this._connectionChanged(snapshot),
      onProbe: () => this._transmit(this._conversation.probe()),
    });
    this._view = new ChatView(document.getElementById("chat"), {
      charsMax: LIMITS.messageCharsMax,
      on: {
        send: (text) => this._asked((now) => this._conversation.send(text, now)),
        regenerate: () => this._asked((now) => this._conversation.regenerate(now)),
        retry: () => this._asked((now) => this._conversation.regenerate(now)),
        continue: () => this._asked((now) => this._conversation.send(this._words.continueText, now)),
        stop: () => this._stopped(),
      },
    });
    this._drawer = new SettingsDrawer(document.getElementById("settings"), {
      onChange: (changes) => this._configured(changes),
      onLanguage: (tag) => this._speak(tag),
    });
    this._savedAt = 0;
    this._drawTimer = null;
    this._wasTroubled = false;
    this._bannerText = "";
    this._listen();
    this._showWords();
  }

  start() {
    this._connection.tell({ type: "start" });
    if (matchMedia("(pointer: fine)").matches) this._view.focus();
  }

  _listen() {
    const byId = (id) => this._document.getElementById(id);
    byId("new-chat").addEventListener("click", () => this._cleared());
    byId("open-settings").addEventListener("click", () => this._openSettings());
    byId("banner-action").addEventListener("click", () => this._connection.tell({ type: "retry" }));
    addEventListener("pagehide", () => this._save());
    this._document.addEventListener("visibilitychange", () => this._document.hidden && this._save());
    // Where a keyboard covers the page instead of shrinking it, what can be seen tells how tall we are.
    globalThis.visualViewport?.addEventListener("resize", () => this._fit(visualViewport));
  }

  _fit({ height, offsetTop, scale }) {
    if (scale > 1.01) return; // someone looks closer: the page stays as it is
    this._document.documentElement.style.setProperty("--seen-height", `${height}px`);
    if (offsetTop > 0) scrollTo(0, 0);
  }

  _asked(ask) {
    this._transmit(ask(Date.now()));
    if (this._connection.snapshot().state !== "open") this._connection.tell({ type: "retry" });
    this._changed();
  }

  _stopped() {
    const { frames, takenBack } = this._conversation.stop();
    this._transmit(frames);
    if (takenBack !== null) this._view.takeBack(takenBack);
    this._changed();
  }

  _cleared() {
    this._conversation.clear();
    this._save();
    this._changed();
    this._view.focus();
  }

  _configured(changes) {
    this._settings = { ...this._settings, ...changes };
    this._store.saveSettings(this._settings);
    this._transmit(this._conversation.configure(changes));
  }

  async _speak(tag) {
    this._words = await loadWords(tag);
    this._language = tag;
    this._settings = { ...this._settings, language: tag };
    this._store.saveSettings(this._settings);
    this._showWords();
    this._openSettings();
    this._document.getElementById("language").focus();
  }

  _openSettings() {
    this._document.getElementById("settings").close();
    this._drawer.open({
      settings: this._settings,
      defaults: this._conversation.defaults,
      language: this._language,
      words: this._words,
    });
  }

  _transmit(frames) {
    for (const frame of frames) this._connection.send(JSON.stringify(frame));
  }

  _received(text) {
    let event;
    try {
      event = JSON.parse(text);
    } catch {
      return; // no frame of this protocol
    }
    this._transmit(this._conversation.receive(event, Date.now()));
    const wait = event.error?.retry_after_ms;
    if (Number.isFinite(wait) && this._conversation.notice) this._connection.tell({ type: "retryAfter", ms: wait });
    this._changed();
  }

  _connectionChanged({ state }) {
    if (state !== "open") this._conversation.disconnected(Date.now());
    this._changed();
  }

  /** After anything: keep the machines in step, and draw soon. */
  _changed() {
    if (this._conversation.takeRestart()) {
      this._conversation.disconnected(Date.now());
      this._connection.tell({ type: "restart" });
    }
    const isBusy = ["asked", "answering", "stopping"].includes(this._conversation.phase);
    this._connection.tell({ type: "busy", isBusy });
    if (!isBusy || Date.now() - this._savedAt > SAVE_MS) this._save();
    this._clock.schedule();
  }

  _save() {
    this._savedAt = Date.now();
    this._store.saveMessages(this._conversation.messages);
  }

  _draw() {
    const { messages, phase } = this._conversation;
    const now = Date.now();
    this._view.render({ messages, phase, now });
    // Seconds that count down are drawn twice a second: none is shown late.
    const wait = messages.some((message) => message.error?.retryAt > now) ? 500 : Infinity;
    this._drawLater(Math.min(wait, this._drawStatus()));
  }

  _drawStatus() {
    const now = this._connection.now();
    const { word, banner, changesAt } = describe(this._connection.snapshot(), this._conversation.notice, now, this._words);
    const model = this._conversation.session?.model ?? this._conversation.defaults?.model ?? "";
    this._setText("model", model);
    this._setText("link", word);
    const text = banner?.text ?? "";
    if (text !== this._bannerText) this._drawBanner(banner);
    this._bannerText = text;
    return changesAt === null ? Infinity : changesAt - now;
  }

  _setText(id, text) {
    const shown = this._document.getElementById(id);
    if (shown.textContent !== text) shown.textContent = text;
  }

  _drawBanner(banner) {
    this._document.getElementById("banner").hidden = banner === null;
    this._setText("banner-text", banner?.text ?? "");
    this._setText("banner-action", banner?.action ?? "");
    // The countdown is for the eye; the ear is told once that it began, and once that it is over.
    if (banner !== null && !this._wasTroubled) this._view.say(banner.text);
    if (banner === null && this._wasTroubled) this._view.say(this._words.backOnline);
    this._wasTroubled = banner !== null;
  }

  _drawLater(wait) {
    clearTimeout(this._drawTimer);
    if (wait === Infinity) return;
    this._drawTimer = setTimeout(() => this._clock.schedule(), Math.max(50, wait));
  }

  _showWords() {
    const words = this._words;
    this._document.documentElement.lang = this._language;
    for (const id of ["new-chat", "open-settings"]) {
      const button = this._document.getElementById(id);
      const label = id === "new-chat" ? words.newChat : words.settings;
      button.setAttribute("title", label);
      button.querySelector("span").textContent = label;
    }
    this._view.setWords(words, this._language);
    this._clock.schedule();
  }
}

/** The door beside this page, wherever that is. */
function socketUrl(base) {
  const url = new URL("v1/realtime", base);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url.href;
}

/** Unique enough for one browser's conversations; `crypto.randomUUID` is missing on pages without TLS. */
function newId(prefix) {
  const bytes = crypto.getRandomValues(new Uint8Array(12));
  return `${prefix}_${Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("")}`;
}

const kept = new Store(storageOf("localStorage"), null).loadSettings().language;
const language = LANGUAGES[kept] ? kept : chooseLanguage(navigator.languages);
new Page(document, await loadWords(language), language).start();
