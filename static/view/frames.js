// SPDX-License-Identifier: Apache-2.0
/**
 * At most one drawing a frame, however many tokens come between.
 *
 * Invariant: after `schedule()` the drawing happens once, at the next frame, or after FALLBACK_MS where the browser
 * gives no frames because nobody looks.
 */

export const FALLBACK_MS = 50;

export class FrameClock {
  /** `environment` stands for the browser in tests. */
  constructor(draw, environment = globalThis) {
    this._draw = draw;
    this._environment = environment;
    this._frame = null;
    this._timer = null;
  }

  schedule() {
    if (this._timer !== null) return;
    this._frame = this._environment.requestAnimationFrame(() => this._run());
    this._timer = this._environment.setTimeout(() => this._run(), FALLBACK_MS);
  }

  _run() {
    this._environment.cancelAnimationFrame(this._frame);
    this._environment.clearTimeout(this._timer);
    this._timer = null;
    this._draw();
  }
}
