// The tables of instances, tiers, sources of events, and sums.

import { bar, byId, number, pill, table, text } from "./dom.js";
import { bytes, count, rate, seconds, share } from "./units.js";

const orNone = (value, format) => (value === null ? "–" : format(value));

const INSTANCES = [
  {
    isHead: true,
    show(node, one) {
      if (node.children.length === 0) {
        const line = (name) => Object.assign(document.createElement("div"), { className: name });
        node.append(line("name"), line("under"));
      }
      const [name, under] = node.children;
      if (name.textContent !== one.name) name.textContent = one.name;
      const ranks = one.workers.length > 1 ? [`${one.workers.length} ranks`] : [];
      const models = one.models.length > 0 ? [one.models.join(", ")] : [];
      const words = [one.url.replace(/^http:\/\//, ""), ...models, ...ranks].join(" · ");
      if (under.textContent !== words) under.textContent = words;
    },
  },
  pill((one) => one.state),
  pill((one) => one.breaker),
  number((one) => count(one.in_flight)),
  number((one) => count(one.queued_tokens)),
  number((one) =>
    one.running === null ? "–" : `${count(one.running)} / ${count(one.waiting)}`,
  ),
  bar((one) => one.device_usage, (one) => orNone(one.device_usage, share)),
  number((one) => orNone(one.prefill_tokens_per_second, count)),
  number((one) => orNone(one.trust, share)),
];

const TIERS = [
  text((tier) => tier.name, { isHead: true }),
  text((tier) => tier.workers.join(", ")),
  text((tier) => kind(tier)),
  bar(
    (tier) => tier.used_share,
    (tier) =>
      tier.capacity_bytes === null
        ? orNone(tier.used_share, share)
        : `${bytes(tier.used_bytes)} of ${bytes(tier.capacity_bytes)}`,
  ),
  number((tier) => count(tier.blocks)),
  number((tier) => orNone(tier.load_bytes_per_second, (value) => `${bytes(value)}/s`)),
  number((tier) => orNone(tier.store_bytes_per_second, (value) => `${bytes(value)}/s`)),
];

function kind(tier) {
  const life = tier.is_persistent ? "persistent" : "volatile";
  return tier.is_shared ? `shared, ${life}` : life;
}

const SOURCES = [
  text((source) => source.name, { isHead: true }),
  pill((source) => source.state),
  text((source) => source.workers.join(", ") || "–"),
  number((source) => count(source.events)),
  number((source) => count(source.gaps)),
  number((source) => count(source.snapshots)),
  number((source) => count(source.mismatches)),
  number((source) => count(source.purges)),
  number((source) => count(source.restarts)),
];

const HITS = [
  {
    isHead: true,
    show(node, row) {
      if (node.children.length === 0) {
        node.append(document.createElement("span"), document.createElement("span"));
      }
      node.children[0].className = `swatch ${row.class}`;
      if (node.children[1].textContent !== row.name) node.children[1].textContent = row.name;
    },
  },
  number((row) => count(row.last)),
  bar((row) => row.lastShare, (row) => share(row.lastShare), (row) => row.class),
  number((row) => count(row.all)),
  bar((row) => row.allShare, (row) => share(row.allShare), (row) => row.class),
];

/** The sources of tokens in the order of the charts; what an instance named cannot collide. */
export function tokenSources(state) {
  const names = new Set(state.tiers.map((tier) => tier.name));
  const seen = Object.keys(state.since_start.tier_tokens);
  const tiers = [...names, ...seen].filter((name, place, all) => all.indexOf(name) === place);
  const used = tiers.filter((name) => seen.includes(name));
  return [
    { name: "device", class: "c-device", of: (period) => period.device_tokens },
    ...used.map((name, place) => ({
      name,
      class: `c-tier-${place % 4}`,
      of: ({ tier_tokens: tokens }) => (Object.hasOwn(tokens, name) ? tokens[name] : 0),
    })),
    ...(state.since_start.unforeseen_tokens > 0
      ? [{ name: "not foreseen", class: "c-unforeseen", of: (period) => period.unforeseen_tokens }]
      : []),
    { name: "computed", class: "c-computed", of: (period) => period.computed_tokens },
  ];
}

export function allTokens(period) {
  const tiers = Object.values(period.tier_tokens).reduce((sum, tokens) => sum + tokens, 0);
  return period.device_tokens + tiers + period.unforeseen_tokens + period.computed_tokens;
}

function hits(state) {
  const [last, all] = [state.last_minute, state.since_start];
  const [lastTokens, allOfThem] = [allTokens(last), allTokens(all)];
  const rows = tokenSources(state).map((source) => ({
    name: source.name,
    class: source.class,
    last: source.of(last),
    all: source.of(all),
    lastShare: lastTokens > 0 ? source.of(last) / lastTokens : null,
    allShare: allOfThem > 0 ? source.of(all) / allOfThem : null,
  }));
  table(byId("hits"), HITS, rows, (row) => row.class + row.name, "");
  byId("uncounted").textContent = count(all.uncounted);
  byId("hits-note").hidden = all.uncounted === 0;
}

const TIMES = [
  text((row) => row.name, { isHead: true }),
  number((row) => row.show(row.last)),
  number((row) => row.show(row.all)),
];

function times(state) {
  const [last, all] = [state.last_minute, state.since_start];
  const rows = [
    { name: "Ended", of: (period) => period.requests, show: count },
    { name: "Per second", of: (period) => period.requests / (period.seconds || 1), show: rate },
    { name: "Failed attempts", of: (period) => period.faults, show: count },
    ...[50, 90, 99].map((percent, place) => ({
      name: `First byte, p${percent}`,
      of: (period) => period.first_byte_seconds[place],
      show: seconds,
    })),
  ].map((row) => ({ ...row, last: row.of(last), all: row.of(all) }));
  table(byId("times"), TIMES, rows, (row) => row.name, "");
}

export function showTables(state) {
  table(byId("instances"), INSTANCES, state.instances, (one) => one.name, "No instance is known.");
  const key = (tier) => `${tier.is_shared} ${tier.name} ${tier.is_shared ? "" : tier.workers[0]}`;
  table(byId("tiers"), TIERS, state.tiers, key, "No instance has told of its tiers.");
  table(byId("sources"), SOURCES, state.sources, (one) => one.name, "No events are followed.");
  hits(state);
  times(state);
}
