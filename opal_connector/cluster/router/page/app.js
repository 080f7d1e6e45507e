// Asks the router for its state every second and shows it; says so when it cannot.

import { Chart } from "./charts.js";
import { showDecisions } from "./decisions.js";
import { byId, element, reconcile, setClass, setText } from "./dom.js";
import { allTokens, showTables, tokenSources } from "./tables.js";
import { bytes, clock, count, duration, rate, seconds, share } from "./units.js";

const EVERY_MILLISECONDS = 1000;
const PATIENCE_MILLISECONDS = 4000;
const KEY_HEADER = "X-Opal-Admin-Key";
const KEPT_AS = "opal-admin-key";
const STATE = new URL("dashboard/state", document.baseURI);

const charts = {
  times: new Chart(byId("ttft-chart"), { title: "Time to first byte", unit: seconds }),
  tokens: new Chart(byId("tokens-chart"), {
    title: "Prompt tokens by source",
    unit: count,
    isStacked: true,
  }),
};
const PERCENTILES = [
  { name: "p50", class: "c-p50" },
  { name: "p90", class: "c-p90" },
  { name: "p99", class: "c-p99" },
];
let key = sessionStorage.getItem(KEPT_AS) ?? "";
let lastSeen = null;
let timer = null;

// ---- asking ----

async function ask() {
  const headers = key === "" ? {} : { [KEY_HEADER]: key };
  const signal = AbortSignal.timeout(PATIENCE_MILLISECONDS);
  const answer = await fetch(STATE, { headers, signal, cache: "no-store", redirect: "error" });
  if (answer.ok) return { state: await answer.json() };
  const said = await answer.json().catch(() => null);
  return { status: answer.status, text: said?.error?.message ?? `status ${answer.status}` };
}

async function turn() {
  clearTimeout(timer);
  const began = performance.now();
  const { state, status, text, error } = await ask().catch((thrown) => ({ error: thrown }));
  clearTimeout(timer);
  if (status !== 401 && !document.hidden) { // else until there is a key, or somebody looks
    timer = setTimeout(turn, Math.max(0, EVERY_MILLISECONDS - (performance.now() - began)));
  }
  if (error !== undefined) lost(error);
  else if (state === undefined) refused(status, text);
  else show(state);
}

function show(state) {
  lastSeen = state.at;
  connection("live", "Live");
  setText(byId("clock"), clock(state.at));
  byId("notice").hidden = true;
  byId("key-form").hidden = true;
  byId("main").hidden = false;
  document.body.classList.remove("lost");
  const facts = [
    `policy ${state.policy}`,
    `up ${duration(state.up_seconds)}`,
    `process ${state.process}`,
  ];
  setText(byId("facts"), (state.is_draining ? ["draining", ...facts] : facts).join(" · "));
  tiles(state);
  showTables(state);
  counts(state);
  showDecisions(state);
  drawCharts(state);
}

function lost(error) {
  const since = lastSeen === null ? "" : ` The figures are those of ${clock(lastSeen)}.`;
  const what = error.name === "TimeoutError" ? "does not answer" : "cannot be reached";
  connection("lost", "Connection lost");
  document.body.classList.add("lost");
  notice(`The router ${what}; trying again every second.${since}`);
}

function refused(status, text) {
  connection("lost", "Not allowed");
  byId("main").hidden = true;
  byId("key-form").hidden = status !== 401;
  if (status === 401 && key === "") {
    byId("notice").hidden = true;
    byId("key").focus();
    return;
  }
  notice(status === 401 ? "The router does not take this key." : `The router refuses: ${text}.`);
}

function notice(text) {
  setText(byId("notice"), text);
  byId("notice").hidden = false;
}

function connection(kind, text) {
  setClass(byId("connection"), `connection ${kind}`);
  if (kind === "lost") setText(byId("clock"), "");
  setText(byId("connection-text"), text);
}

// ---- what is not a table ----

function tiles(state) {
  const last = state.last_minute;
  const all = allTokens(last);
  const [p50, , p99] = last.first_byte_seconds;
  const taking = state.instances.filter((one) => one.takes_requests).length;
  const shown = [
    ["Instances taking requests", `${taking} of ${state.instances.length}`, taking < state.instances.length],
    ["Requests", rate(last.requests / (last.seconds || 1)), false],
    ["Under way", count(state.under_way), false],
    ["Waiting for room", `${count(state.waiting)} of ${count(state.max_waiting)}`, state.waiting > 0],
    ["First byte, p50", seconds(p50), false],
    ["First byte, p99", seconds(p99), false],
    ["Prompt tokens cached", all > 0 ? share(1 - last.computed_tokens / all) : "–", false],
    ["Failed attempts", count(last.faults), last.faults > 0],
  ];
  reconcile(
    byId("tiles"),
    shown,
    ([name]) => name,
    ([name]) => element("div", {}, element("dt", {}, name), element("dd")),
    (node, [, value, isBad]) => {
      setClass(node, isBad ? "tile bad" : "tile");
      setText(node.lastElementChild, value);
    },
  );
}

function counts(state) {
  const words = (name, none) =>
    Object.entries(state.counts[name] ?? {})
      .sort(([one], [other]) => one.localeCompare(other))
      .map(([what, number]) => `${what.replaceAll("_", " ")}: ${count(number)}`)
      .join(", ") || none;
  const shown = [
    ["Answers", words("answers", "none")],
    ["Decided by", words("reasons", "none")],
    ["Retries, by status", words("retries", "none")],
    ["Broken attempts", words("broken", "none")],
    ["Broken off answers", words("truncated", "none")],
    ["Refused", words("refused", "none")],
    ["Tokens of prompts", words("prompts", "none")],
    ["Deaths of instances", count(state.deaths)],
    ["Sessions", count(state.sessions)],
    ["Index", `${count(state.index_blocks)} blocks, ${bytes(state.index_bytes)}`],
  ];
  reconcile(
    byId("counts"),
    shown,
    ([name]) => name,
    ([name]) => element("div", {}, element("dt", {}, name), element("dd")),
    (node, [, value]) => setText(node.lastElementChild, value),
  );
}

function drawCharts(state) {
  charts.times.draw(
    PERCENTILES,
    state.points.map(({ ago_seconds, period }) => ({
      ago: ago_seconds,
      values: period.first_byte_seconds,
    })),
  );
  const sources = tokenSources(state);
  charts.tokens.draw(
    sources,
    state.points.map(({ ago_seconds, period }) => ({
      ago: ago_seconds,
      values: sources.map((source) => source.of(period)),
    })),
  );
}

// ---- begin ----

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const given = byId("key").value.trim();
  byId("key").value = "";
  if (!/^[\x20-\x7e]+$/.test(given)) {
    notice("A key has printable ASCII characters only.");
    return;
  }
  key = given;
  sessionStorage.setItem(KEPT_AS, key);
  turn();
});
document.addEventListener("visibilitychange", () => {
  if (!document.hidden && byId("key-form").hidden) turn();
});
turn();
