// SPDX-License-Identifier: Apache-2.0
/**
 * The connection in words. Pure.
 *
 * Invariant: a loss that mends itself within PATIENCE_MS is not mentioned. It must never show a number where a
 * word is possible.
 */
import { errorWords, secondsUntil } from "../view/message.js";

export const PATIENCE_MS = 2_000;

const FINAL = { 3000: "closedAuth", 4503: "closedAuth", 4505: "closedOrigin" };
const CAUSES = { 1012: "restarting", 1013: "busy", 4013: "busy" };

/**
 * @param snapshot a connection's · notice an error that belongs to no message · now the connection's time
 * @returns {{word: string, banner: null | {text: string, action: string}, changesAt: number | null}} a word for
 *   always, a banner for trouble, and when both are to be asked for again
 */
export function describe(snapshot, notice, now, words) {
  const { state, closeCode, retryAt, troubledSince } = snapshot;
  const quietUntil = troubledSince === null ? null : troubledSince + PATIENCE_MS;
  const isQuiet = quietUntil !== null && now < quietUntil;
  if (state === "open") return { word: words.online, banner: null, changesAt: null };
  if (state === "stopped") {
    const text = notice ? errorWords(notice, words) : words[FINAL[closeCode] ?? "closed"];
    return { word: words.disconnected, banner: { text, action: words.reconnect }, changesAt: null };
  }
  if (state === "offline") {
    const banner = isQuiet ? null : { text: words.youAreOffline, action: words.tryNow };
    return { word: words.offline, banner, changesAt: isQuiet ? quietUntil : null };
  }
  const isFirst = closeCode === null;
  const word = isFirst ? words.connecting : words.reconnecting;
  if (isQuiet || isFirst) return { word, banner: null, changesAt: isQuiet ? quietUntil : null };
  const seconds = secondsUntil(retryAt, now);
  const cause = words[CAUSES[closeCode] ?? "lost"];
  const next = seconds > 0 ? words.nextTry.replace("{seconds}", seconds) : words.connecting;
  return { word, banner: { text: `${cause} ${next}`, action: words.tryNow }, changesAt: now + 500 };
}
