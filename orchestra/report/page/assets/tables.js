"use strict";
// Tables that are sorted by the buttons in their heads and filtered by a line of text.

const COMPARISON = /^([^<>=]+)(<=|>=|<|>|=)(.+)$/;
const MOST_SHOWN = 200;

function compare(a, b) {
  const [noA, noB] = [a === null || a === undefined, b === null || b === undefined];
  if (noA || noB) return noA - noB;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

/** Whether a row passes one word of a filter: `lr<0.01` compares a column, any other word is looked for. */
function passes(word, row, columns, text) {
  const found = COMPARISON.exec(word);
  const column = found && columns.find((each) => [each.key, each.title].some((name) => name.toLowerCase() === found[1].toLowerCase()));
  if (!column) return text.includes(word.toLowerCase());
  const value = column.value(row);
  const wanted = Number(found[3]);
  if (found[2] === "=") return typeof value === "number" && !Number.isNaN(wanted) ? value === wanted : String(value).toLowerCase() === found[3].toLowerCase();
  if (typeof value !== "number" || Number.isNaN(wanted)) return false;
  return { "<": value < wanted, ">": value > wanted, "<=": value <= wanted, ">=": value >= wanted }[found[2]];
}

/**
 * A table. `columns`: {key, title, value(row), show(value, row), isText, isWide}. Options: caption, sortBy, isFiltered,
 * isSortable, onRows(rows): hears which rows are shown.
 */
function table(columns, rows, options = {}) {
  for (const column of columns) {
    column.value ||= (row) => row[column.key];
    column.show ||= (value) => (value === null || value === undefined ? "–" : typeof value === "number" ? format.small(value) : String(value));
  }
  const caption = el("caption", options.caption ? null : { class: "visually-hidden" }, options.caption || options.label || "Table");
  const heads = columns.map((column) => {
    const inside = options.isSortable === false ? column.title : el("button", { type: "button", onclick: () => sortBy(column) }, column.title);
    return el("th", { scope: "col", class: column.isText ? "text" : "number" }, inside);
  });
  const body = el("tbody");
  const more = el("p", { class: "quiet" });
  // What a row says, for the filter alone.
  const texts = new Map((options.isFiltered ? rows : []).map((row) => [row, columns.map((column) => el("i", null, column.show(column.value(row), row)).textContent).join(" ").toLowerCase()]));
  const state = { column: null, isDown: false, filter: "", most: options.most || MOST_SHOWN };
  const status = el("span", { role: "status", class: "quiet" });

  function sortBy(column, isDown) {
    state.isDown = isDown === undefined ? state.column === column && !state.isDown : isDown;
    state.column = column;
    draw();
  }

  function draw() {
    const words = state.filter.split(/\s+/).filter(Boolean);
    let shown = rows.filter((row) => words.every((word) => passes(word, row, columns, texts.get(row) || "")));
    if (state.column) {
      const sign = state.isDown ? -1 : 1;
      const value = state.column.value;
      const isKnown = (row) => value(row) !== null && value(row) !== undefined;
      // What is not known comes last, whichever way.
      shown = [...shown.filter(isKnown).sort((a, b) => sign * compare(value(a), value(b))), ...shown.filter((row) => !isKnown(row))];
    }
    heads.forEach((head, index) => {
      const isOwn = columns[index] === state.column;
      if (isOwn) head.setAttribute("aria-sort", state.isDown ? "descending" : "ascending");
      else head.removeAttribute("aria-sort");
    });
    body.replaceChildren(...shown.slice(0, state.most).map((row) => el("tr", null, columns.map((column, index) => {
      const cell = column.show(column.value(row), row);
      const name = index === 0 ? "th" : "td";
      return el(name, { class: column.isText ? `text${column.isWide ? " wide" : ""}` : "number", scope: index === 0 ? "row" : null }, cell);
    }))));
    status.textContent = options.isFiltered ? `${shown.length} of ${rows.length} rows` : "";
    const left = shown.length - state.most;
    more.replaceChildren(...(left > 0 ? [el("button", { type: "button", onclick: () => { state.most = Infinity; draw(); } }, `show ${left} more`)] : []));
    if (options.onRows) options.onRows(shown);
  }

  const label = options.label || options.caption || "Table";
  const parts = [el("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, el("table", null, caption, el("thead", null, el("tr", null, heads)), body)), more];
  if (options.isFiltered) {
    const id = newId("filter");
    const input = el("input", { id, type: "search", autocomplete: "off", placeholder: options.example || "", oninput: () => { state.filter = input.value; draw(); } });
    parts.unshift(el("div", { class: "tools" }, el("label", { for: id }, "Filter"), input, status));
  }
  const first = columns.find((column) => column.key === options.sortBy);
  if (first) sortBy(first, Boolean(options.isDown));
  else draw();
  return el("div", null, parts);
}
