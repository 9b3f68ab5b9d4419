// SPDX-License-Identifier: Apache-2.0
/**
 * What the browser keeps: the conversation and the settings.
 *
 * A tab's own conversation is in its session storage, so that two tabs do not write over each other; a new tab
 * begins with the newest one of all. Invariant: what is read back has the shape that was written, or is nothing; a
 * browser that keeps nothing is no error. It must never keep more than LIMITS, and never an error's text.
 */

export const LIMITS = Object.freeze({ messagesMax: 200, charsMax: 200_000 });

const CHAT = "sampan.chat.1";
const SETTINGS = "sampan.settings.1";
const ROLES = new Set(["user", "assistant"]);

export class Store {
  /** @param {Storage | null} local @param {Storage | null} session either may be refused by the browser */
  constructor(local, session) {
    this._local = local;
    this._session = session;
  }

  loadMessages() {
    const kept = read(this._session, CHAT) ?? read(this._local, CHAT);
    return Array.isArray(kept?.messages) ? kept.messages.filter(isMessage).map(bare) : [];
  }

  saveMessages(messages) {
    const kept = messages.length > 0 ? { messages: newest(messages).map(bare) } : null;
    for (const storage of [this._session, this._local]) write(storage, CHAT, kept);
  }

  /** {instructions, temperature, language}; what was never set is null. */
  loadSettings() {
    const kept = read(this._local, SETTINGS) ?? {};
    return {
      instructions: typeof kept.instructions === "string" ? kept.instructions : null,
      temperature: Number.isFinite(kept.temperature) ? kept.temperature : null,
      language: typeof kept.language === "string" ? kept.language : null,
    };
  }

  saveSettings(settings) {
    write(this._local, SETTINGS, settings);
  }
}

/** A storage of the browser, or null where it is refused: reading the name alone may throw. */
export function storageOf(name) {
  try {
    return globalThis[name];
  } catch {
    return null;
  }
}

function bare({ key, itemId, role, text, status, at }) {
  return { key, itemId, role, text, status, at };
}

function isMessage(kept) {
  const texts = [kept?.key, kept?.itemId, kept?.text, kept?.status];
  return texts.every((text) => typeof text === "string") && ROLES.has(kept.role) && Number.isFinite(kept.at);
}

/** As many of the newest messages as are within the limits. */
function newest(messages) {
  let chars = 0;
  let from = messages.length;
  while (from > 0 && messages.length - from < LIMITS.messagesMax) {
    chars += messages[from - 1].text.length;
    if (chars > LIMITS.charsMax) break;
    from -= 1;
  }
  return messages.slice(from);
}

function read(storage, name) {
  try {
    return JSON.parse(storage.getItem(name));
  } catch {
    return null;
  }
}

function write(storage, name, value) {
  try {
    if (value === null) storage.removeItem(name);
    else storage.setItem(name, JSON.stringify(value));
  } catch {
    // Full or refused: the conversation goes on without being kept.
  }
}
