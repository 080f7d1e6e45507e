// Everything that touches the document. Text is always text: nothing here reads markup.

const SVG = "http://www.w3.org/2000/svg";
const shown = new WeakMap(); // parent to its children by key

export const byId = (id) => document.getElementById(id);

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children); // strings become text
  return node;
}

export const element = (tag, attributes = {}, ...children) =>
  fill(document.createElement(tag), attributes, children);

export const drawing = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

/** Change a text only where it differs, so that a selection survives. */
export function setText(node, text) {
  const wanted = String(text);
  if (node.textContent !== wanted) node.textContent = wanted;
}

export function setClass(node, name) {
  if (node.getAttribute("class") !== name) node.setAttribute("class", name);
}

/** Make a parent's children those of `items`; who stays is not touched, but updated. */
export function reconcile(parent, items, keyOf, make, update) {
  const known = shown.get(parent) ?? new Map();
  const wanted = new Map(items.map((item) => [keyOf(item), item]));
  for (const [key, node] of known) {
    if (wanted.has(key)) continue;
    node.remove();
    known.delete(key);
  }
  let place = known.size > 0 ? firstOf(parent, known) : null;
  for (const [key, item] of wanted) {
    let node = known.get(key);
    if (node === undefined) {
      node = make(item);
      known.set(key, node);
    }
    if (node === place) {
      place = place.nextElementSibling;
    } else {
      parent.insertBefore(node, place);
    }
    update(node, item);
  }
  shown.set(parent, known);
}

function firstOf(parent, known) {
  const nodes = new Set(known.values());
  for (const child of parent.children) if (nodes.has(child)) return child;
  return null;
}

/** A row of cells; each column makes its cell once and changes it later. */
export function table(body, columns, items, keyOf, emptyText) {
  const rows = items.length > 0 ? items.map((item) => ({ item })) : [{ text: emptyText }];
  reconcile(
    body,
    rows,
    (row) => (row.item === undefined ? "empty" : `row ${keyOf(row.item)}`),
    (row) =>
      row.item === undefined
        ? element("tr", {}, element("td", { class: "empty", colspan: columns.length }, row.text))
        : element("tr", {}, ...columns.map((column) => cell(column))),
    (node, row) => {
      if (row.item === undefined) return;
      columns.forEach((column, place) => column.show(node.children[place], row.item));
    },
  );
}

function cell(column) {
  const tag = column.isHead ? "th" : "td";
  return element(tag, { class: column.class, scope: column.isHead ? "row" : null });
}

/** A column of plain text, and one of numbers. */
export const text = (value, more = {}) => ({
  show: (node, item) => setText(node, value(item)),
  ...more,
});
export const number = (value) => text(value, { class: "number" });

/** A column with a word that has a colour and a sign. */
export const pill = (value) => ({
  show(node, item) {
    if (node.firstElementChild === null) node.append(element("span"));
    const word = value(item);
    setClass(node.firstElementChild, `pill pill-${word.replace(/[^a-z]/g, "-")}`);
    setText(node.firstElementChild, word.replace("_", "-"));
  },
});

/** A column with a bar for a part of one, and words beside it. */
export const bar = (part, words, colour = () => "") => ({
  show(node, item) {
    if (node.firstElementChild === null) {
      const track = element("span", { class: "track", "aria-hidden": "true" }, element("span"));
      node.append(element("div", { class: "bar" }, track, element("span", { class: "words" })));
    }
    const [track, label] = node.firstElementChild.children;
    const value = part(item);
    track.hidden = value === null;
    const level = value !== null && value > 0.95 && colour(item) === "" ? "full" : "";
    setClass(track.firstElementChild, colour(item) || level);
    track.firstElementChild.style.width = `${100 * Math.min(Math.max(value ?? 0, 0), 1)}%`;
    setText(label, words(item));
  },
});
