// SPDX-License-Identifier: Apache-2.0
/**
 * When the page scrolls by itself: a rule that decides, and the shell that asks it.
 *
 * Invariant: a reader who moved up is never moved. It must never use scrollIntoView, which scrolls the pages around
 * ours too.
 *
 *     following  the new answer stays in view until its first line reaches the top; then → free
 *     pinned     the end stays in view, as the reader asked for it
 *     free       nothing moves; so it begins
 *     up: wheel, touch, key or scroll bar → free    sent → following    jump, scrolled to the end → pinned
 */

/** So near to the end counts as there, in CSS pixels. */
const NEAR = 24;
const MARGIN_ABOVE = 12;

export class FollowRule {
  constructor() {
    this.mode = "free";
    this._seen = { top: 0, height: 0, client: 0 };
    this._ownTop = null;
  }

  /** The reader said something, and wants to see what comes. */
  sent() {
    this.mode = "following";
  }

  /** The reader asked for the end. */
  jumped() {
    this.mode = "pinned";
  }

  /** The reader moves up, or means to. Nothing is up there when all is in view. */
  movedUp() {
    if (this._seen.height > this._seen.client + 1) this.mode = "free";
  }

  /** It scrolled: by us, by the reader, or because the content or the window changed its size. */
  scrolled(size) {
    const before = this._seen;
    this._seen = size;
    if (this._ownTop !== null && Math.abs(size.top - this._ownTop) <= 1) return;
    const hasGrown = size.height > before.height || size.client > before.client;
    if (size.top < before.top - 1 && !hasGrown) this.mode = "free";
    else if (size.top > before.top && this.isNearEnd) this.mode = "pinned";
  }

  /** Content or window changed: where to scroll to, or null. `answerTop` is the running answer's first line. */
  place(size, answerTop) {
    this._seen = size;
    if (this.mode === "free") return null;
    const end = Math.max(0, size.height - size.client);
    const limit = Math.max(0, (answerTop ?? Infinity) - MARGIN_ABOVE);
    const isFull = this.mode === "following" && end > limit;
    if (isFull) this.mode = "free";
    const top = isFull ? Math.max(limit, size.top) : end;
    if (Math.abs(top - size.top) < 1) return null;
    this._ownTop = top;
    this._seen = { ...size, top };
    return top;
  }

  get isNearEnd() {
    const { top, height, client } = this._seen;
    return height - client - top <= NEAR;
  }
}

const KEYS_UP = new Set(["PageUp", "Home", "ArrowUp"]);

/** The shell round one scroller. `onChange()` is told when `isAway` may have changed. */
export class Follower {
  constructor(scroller, { onChange, answerTop }) {
    this._scroller = scroller;
    this._onChange = onChange;
    this._answerTop = answerTop;
    this._rule = new FollowRule();
    this._listen();
  }

  /** Whether the end is out of sight. */
  get isAway() {
    return !this._rule.isNearEnd;
  }

  /** Begin with a conversation that is there already, at its end; unless the reader has just begun it. */
  enter() {
    if (this._rule.mode === "free") this._rule.jumped();
  }

  /** Nothing is there to follow. */
  rest() {
    this._rule.mode = "free";
  }

  sent() {
    this._rule.sent();
    this.place();
  }

  jump() {
    this._rule.jumped();
    this.place();
  }

  /** Call after the content changed. */
  place() {
    const top = this._rule.place(this._size(), this._answerTop());
    if (top !== null) this._scroller.scrollTop = top;
    this._onChange();
  }

  _size() {
    const { scrollTop: top, scrollHeight: height, clientHeight: client } = this._scroller;
    return { top, height, client };
  }

  _listen() {
    const scroller = this._scroller;
    const quiet = { passive: true };
    let touchY = null;
    scroller.addEventListener("wheel", (event) => event.deltaY < 0 && this._rule.movedUp(), quiet);
    scroller.addEventListener("touchstart", (event) => (touchY = event.touches[0].clientY), quiet);
    scroller.addEventListener("touchmove", (event) => this._touched(event.touches[0].clientY - touchY), quiet);
    scroller.addEventListener("keydown", (event) => KEYS_UP.has(event.key) && this._rule.movedUp());
    scroller.addEventListener("scroll", () => {
      this._rule.scrolled(this._size());
      this._onChange();
    }, quiet);
    new ResizeObserver(() => this.place()).observe(scroller);
  }

  _touched(distance) {
    if (distance > 4) this._rule.movedUp();
  }
}
