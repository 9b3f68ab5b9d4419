// SPDX-License-Identifier: Apache-2.0
/**
 * The drawer with the page's settings.
 *
 * Invariant: what it shows is what is in force; a change is told when it is made. It must never keep a setting.
 */
import { element, iconButton } from "../view/dom.js";
import { LANGUAGES } from "../strings/choose.js";

const TEMPERATURE_MAX = 2;
const INSTRUCTIONS_CHARS_MAX = 8_000;

export class SettingsDrawer {
  /** `onChange({instructions, temperature})`: null is the server's own. `onLanguage(tag)`. */
  constructor(dialog, { onChange, onLanguage }) {
    this._dialog = dialog;
    this._document = dialog.ownerDocument;
    this._onChange = onChange;
    this._onLanguage = onLanguage;
    // A press beside the drawer closes it; Escape does by itself, and gives the focus back.
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }

  /** Show it with the settings in force; `defaults` are the server's. */
  open({ settings, defaults, language, words }) {
    this._words = words;
    this._defaults = defaults;
    this._build(language);
    this._show(settings);
    this._dialog.showModal();
  }

  _build(language) {
    const words = this._words;
    const document = this._document;
    const title = element(document, "h2", { id: "settings-title" }, words.settings);
    const close = iconButton(document, "close", words.close, "close");
    close.addEventListener("click", () => this._dialog.close());
    const reset = element(document, "button", { type: "button", class: "text-button" }, words.useDefaults);
    reset.addEventListener("click", () => {
      this._show({ instructions: null, temperature: null });
      this._onChange({ instructions: null, temperature: null });
    });
    const head = element(document, "div", { class: "drawer-head" }, title, close);
    const privacy = element(document, "p", { class: "help" }, words.privacy);
    this._dialog.setAttribute("aria-labelledby", "settings-title");
    this._dialog.replaceChildren(head, this._languageField(language), ...this._modelFields(), reset, privacy);
  }

  _languageField(language) {
    const document = this._document;
    const select = element(document, "select", { id: "language" });
    for (const [tag, name] of Object.entries(LANGUAGES)) {
      select.append(element(document, "option", { value: tag, lang: tag, selected: tag === language }, name));
    }
    select.addEventListener("change", () => this._onLanguage(select.value));
    return this._field("language", this._words.language, null, select);
  }

  _modelFields() {
    const document = this._document;
    const words = this._words;
    this._instructions = element(document, "textarea", {
      id: "instructions",
      rows: "5",
      dir: "auto",
      maxlength: String(INSTRUCTIONS_CHARS_MAX),
      placeholder: words.systemPromptPlaceholder,
      "aria-describedby": "instructions-help",
    });
    this._instructions.addEventListener("change", () => this._onChange({ instructions: this._instructions.value }));
    const range = { id: "temperature", type: "range", min: "0", max: String(TEMPERATURE_MAX), step: "0.1" };
    this._temperature = element(document, "input", { ...range, "aria-describedby": "temperature-help" });
    this._output = element(document, "output", { for: "temperature" });
    this._temperature.addEventListener("input", () => this._showTemperature());
    this._temperature.addEventListener("change", () => this._onChange({ temperature: Number(this._temperature.value) }));
    const line = element(document, "div", { class: "range" }, this._temperature, this._output);
    return [
      this._field("instructions", words.systemPrompt, words.systemPromptHelp, this._instructions),
      this._field("temperature", words.temperature, words.temperatureHelp, line),
    ];
  }

  _field(id, name, help, control) {
    const document = this._document;
    const label = element(document, "label", { for: id }, name);
    const kids = help === null ? [label, control] : [label, control, element(document, "p", { class: "help", id: `${id}-help` }, help)];
    return element(document, "div", { class: "field" }, ...kids);
  }

  _show({ instructions, temperature }) {
    this._instructions.value = instructions ?? this._defaults?.instructions ?? "";
    this._temperature.value = String(temperature ?? this._defaults?.temperature ?? 1);
    this._showTemperature();
  }

  _showTemperature() {
    this._output.textContent = Number(this._temperature.value).toFixed(1);
  }
}
