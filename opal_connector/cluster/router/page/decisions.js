// The last requests: where each was sent, why, and what it would have cost elsewhere.

import { byId, element, number, reconcile, setClass, setText, table, text } from "./dom.js";
import { clock, count, seconds } from "./units.js";

const COLUMNS = 9;
const TERMS = [
  ["Queue", "queue_seconds"],
  ["Fetch", "fetch_seconds"],
  ["Compute", "compute_seconds"],
  ["Decode", "decode_seconds"],
  ["Evenness", "evenness_seconds"],
];
const CANDIDATES = [
  {
    isHead: true,
    show(node, row) {
      setText(node, row.worker + (row.isChosen ? " (chosen)" : ""));
      setClass(node.parentElement, row.isChosen ? "chosen" : "");
    },
  },
  number((row) => count(row.device_tokens)),
  text((row) => tiersOf(row)),
  ...TERMS.map(([, field]) => number((row) => seconds(row[field]))),
  number((row) => seconds(row.weighted_seconds)),
];

function tiersOf(row) {
  const parts = Object.entries(row.tier_tokens).map(([tier, tokens]) => `${tier} ${count(tokens)}`);
  return parts.join(", ") || "–";
}

/** What became of it, and whether that is good. */
function result(one) {
  if (one.failure === "cancelled") return ["client left", "quiet"];
  if (one.failure !== null) return [`broke: ${one.failure}`, "bad"];
  if (!one.is_over) return [one.status === 0 ? "computing" : "answering", "busy"];
  return [String(one.status), one.status < 400 ? "good" : "bad"];
}

function make() {
  const button = element("button", { type: "button", class: "unfold", "aria-expanded": "false" });
  const cells = Array.from({ length: COLUMNS - 1 }, (_, place) =>
    element("td", { class: place >= 3 && place <= 6 ? "number" : null }),
  );
  const row = element("tr", {}, element("td", {}, button), ...cells);
  const detail = element("tr", { class: "detail", hidden: true });
  button.addEventListener("click", () => {
    detail.hidden = !detail.hidden;
    button.setAttribute("aria-expanded", String(!detail.hidden));
    body.show();
  });
  const body = element("tbody", {}, row, detail);
  body.show = () => {};
  return body;
}

function update(body, one) {
  const [row, detail] = body.children;
  const [fold, when, worker, why, prompt, expected, cached, first, what] = row.children;
  const button = fold.firstElementChild;
  button.setAttribute("aria-label", `Costs of decision ${one.number}`);
  setText(when, clock(one.sent_at));
  setText(worker, one.worker);
  setText(why, one.attempt > 1 ? `${one.reason}, attempt ${one.attempt}` : one.reason);
  setText(prompt, count(one.prompt_tokens));
  setText(expected, one.expected_tokens === null ? "–" : count(one.expected_tokens));
  setText(cached, one.cached_tokens === null ? "–" : count(one.cached_tokens));
  const isShort = one.cached_tokens !== null && one.expected_tokens - one.cached_tokens > 64;
  setClass(cached, isShort ? "number short" : "number");
  setText(first, seconds(one.first_byte_seconds));
  const [words, mood] = result(one);
  setText(what, words);
  setClass(what, `result ${mood}`);
  body.show = () => showDetail(detail, one);
  body.show();
}

function showDetail(detail, one) {
  if (detail.hidden) return;
  if (detail.firstElementChild === null) detail.append(detailCell());
  const [note, wrap] = detail.firstElementChild.children;
  const more = one.candidate_count - one.candidates.length;
  const about = [
    one.expected_tokens === null ? "The prompt's tokens were not known: load alone decided." : "",
    one.predicted_tokens > 0
      ? `${count(one.predicted_tokens)} of the expected tokens were still being computed for others.`
      : "",
    more > 0 ? `${more} more were weighed.` : "",
  ];
  setText(note, about.filter((words) => words !== "").join(" "));
  note.hidden = note.textContent === "";
  const rows = one.candidates.map((found) => ({ ...found, isChosen: found.worker === one.worker }));
  table(wrap.querySelector("tbody"), CANDIDATES, rows, (row) => row.worker, "Nothing was weighed.");
}

function detailCell() {
  const heads = ["Candidate", "Device tokens", "Tier tokens", ...TERMS.map(([name]) => name), "Weighed"];
  const head = element(
    "tr",
    {},
    ...heads.map((name, place) => {
      const isNumber = place === 1 || place > 2;
      return element("th", { scope: "col", class: isNumber ? "number" : null }, name);
    }),
  );
  const inner = element("table", {}, element("thead", {}, head), element("tbody"));
  const note = element("p", { class: "note" });
  return element("td", { colspan: COLUMNS }, note, element("div", {}, inner));
}

export function showDecisions(state) {
  const key = (one) => `${state.process} ${one.number}`;
  const rows = state.decisions.map((one) => one);
  reconcile(byId("decisions"), rows, key, make, update);
}
