// Numbers as people read them, always with their unit.

const NONE = "–";
const SIZES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const GREAT = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]];

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);

/** Three digits of a number, without needless zeros. */
function digits(value) {
  if (value === 0) return "0";
  return Number(value.toPrecision(3)).toLocaleString("en-US", { maximumFractionDigits: 3 });
}

/** A count: whole while it is short, then with a prefix. */
export function count(value) {
  if (!isNumber(value)) return NONE;
  for (const [size, name] of GREAT) {
    if (value >= size) return digits(value / (name === "k" ? 1e3 : size)) + name;
  }
  return Math.round(value).toLocaleString("en-US");
}

/** A count in a second. */
export function rate(value) {
  if (!isNumber(value)) return NONE;
  return (value >= 1e4 ? count(value) : digits(value)) + "/s";
}

export function bytes(value) {
  if (!isNumber(value)) return NONE;
  let step = 0;
  while (value >= 1024 && step < SIZES.length - 1) {
    value /= 1024;
    step += 1;
  }
  return `${digits(value)} ${SIZES[step]}`;
}

export function seconds(value) {
  if (!isNumber(value)) return NONE;
  if (value === 0) return "0 s";
  if (value < 1e-3) return `${digits(value * 1e6)} µs`;
  if (value < 1) return `${digits(value * 1e3)} ms`;
  if (value < 120) return `${digits(value)} s`;
  return duration(value);
}

/** A long time in its two greatest units. */
export function duration(value) {
  const whole = Math.floor(value);
  const parts = [
    [Math.floor(whole / 86400), "d"],
    [Math.floor(whole / 3600) % 24, "h"],
    [Math.floor(whole / 60) % 60, "min"],
    [whole % 60, "s"],
  ];
  const first = parts.findIndex(([amount]) => amount > 0);
  if (first < 0) return "0 s";
  return parts
    .slice(first, first + 2)
    .filter(([amount]) => amount > 0)
    .map(([amount, unit]) => `${amount} ${unit}`)
    .join(" ");
}

export function share(value) {
  if (!isNumber(value)) return NONE;
  const percent = 100 * value;
  return `${percent >= 99.95 || percent === 0 ? Math.round(percent) : percent.toFixed(1)} %`;
}

export function clock(wallSeconds) {
  return new Date(1e3 * wallSeconds).toLocaleTimeString("en-GB", { hour12: false });
}
