// SPDX-License-Identifier: Apache-2.0
/** What a server says, in the order the protocol has. */

let numEvents = 0;

function named(event) {
  numEvents += 1;
  return { event_id: `event_${numEvents}`, ...event };
}

export const SESSION = { type: "realtime", id: "sess_1", model: "m", instructions: "", temperature: 0.7 };

export function sessionCreated(session = SESSION) {
  return named({ type: "session.created", session });
}

export function failure(error, eventId = null) {
  return named({ type: "error", error: { type: "server_error", message: "no", ...error, event_id: eventId } });
}

/** All events of one response to a `response.create` frame: `pieces` make its text. */
export function response(request, pieces, { id = "resp_1", itemId = "srv_1", status = "completed", reason, error } = {}) {
  const text = pieces.join("");
  const place = { response_id: id, item_id: itemId, output_index: 0, content_index: 0 };
  const metadata = request?.response?.metadata ?? null;
  const details = status === "completed" ? null : { type: status, reason, error };
  return [
    named({ type: "response.created", response: { id, status: "in_progress", metadata } }),
    named({ type: "response.output_item.added", response_id: id, output_index: 0, item: { id: itemId } }),
    named({ type: "response.content_part.added", ...place, part: { type: "text", text: "" } }),
    ...pieces.map((delta) => named({ type: "response.output_text.delta", ...place, delta })),
    named({ type: "response.output_text.done", ...place, text }),
    named({ type: "response.content_part.done", ...place, part: { type: "text", text } }),
    named({ type: "response.output_item.done", response_id: id, output_index: 0, item: { id: itemId } }),
    named({ type: "response.done", response: { id, status, status_details: details, metadata } }),
  ];
}
