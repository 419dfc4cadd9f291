"use strict";
// Plots as SVG. Each is a figure with a caption, drawn again when its width changes. Pointer and arrow keys move
// the same cursor, which is a slider to assistive technology and says the values under it.

const MARGIN = { top: 8, right: 14, bottom: 26, left: 58 };

/** Round values between two limits, about `count` of them. */
function ticks(low, high, count) {
  if (!(high > low)) return [low];
  const rough = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  const found = [];
  for (let index = Math.ceil(low / step - 1e-9); index * step <= high + step * 1e-9; index++) found.push(Number((index * step).toPrecision(12)));
  return found;
}

function secondTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count);
  const step = [10, 15, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 21600, 43200, 86400, 172800, 604800].find((each) => each >= rough);
  if (rough < 5 || !step) return ticks(low, high, count);
  const found = [];
  for (let value = Math.ceil(low / step) * step; value <= high; value += step) found.push(value);
  return found;
}

function logTicks(low, high, count) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const factors = last - first > 3 ? [1] : last - first > 1 ? [1, 3] : [1, 2, 3, 5];
  const found = [];
  for (let power = first; power <= last; power++) for (const factor of factors) found.push(factor * 10 ** power);
  const inside = found.filter((value) => value >= low * 0.999 && value <= high * 1.001);
  return inside.length < 2 ? ticks(low, high, count) : inside;
}

function scale(low, high, begin, end, isLog) {
  const map = isLog ? Math.log10 : (value) => value;
  const [a, b] = [map(low), map(high)];
  const scaled = (value) => (b === a ? (begin + end) / 2 : begin + ((map(value) - a) / (b - a)) * (end - begin));
  return scaled;
}

function extent(values) {
  let [low, high] = [Infinity, -Infinity];
  for (const value of values) {
    if (!isNumber(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  return low <= high ? [low, high] : null;
}

/** A box that draws again whenever its width changes; `draw(width)` returns what it holds. */
function responsive(draw) {
  const box = el("div", { class: "plot" });
  let width = 0;
  const update = () => {
    const wanted = Math.round(box.clientWidth);
    if (wanted && wanted !== width) {
      width = wanted;
      box.replaceChildren(...[draw(width)].flat());
    }
  };
  // In the next frame: drawing changes the height of what is observed.
  new ResizeObserver(() => requestAnimationFrame(update)).observe(box);
  return { box, redraw: () => { width = 0; update(); } };
}

/** Where a tip stands: beside (x, y), inside of a box of this width. */
function place(tip, x, y, width) {
  tip.hidden = false;
  const own = tip.offsetWidth;
  tip.style.left = `${Math.max(0, x + 14 + own > width ? x - 14 - own : x + 14)}px`;
  tip.style.top = `${Math.max(0, y)}px`;
}

function tipLines(tip, title, lines) {
  tip.replaceChildren(el("b", null, title), ...lines.map((line) => el("div", null, line)));
}

function legend(entries) {
  return el("ul", { class: "legend" }, entries.map((entry) => el("li", null, el("span", { class: `swatch ${entry.className}`, "aria-hidden": "true" }), entry.text)));
}

function choices(name, title, options, chosen, onchange) {
  const group = newId(name);
  return el("fieldset", { class: "choices" }, el("legend", null, title), options.map((option) =>
    el("label", null, el("input", { type: "radio", name: group, value: option.key, checked: option.key === chosen, onchange: () => onchange(option.key) }), option.title)));
}

function nearest(values, wanted) {
  let best = -1;
  values.forEach((value, index) => {
    if (isNumber(value) && (best < 0 || Math.abs(value - wanted) < Math.abs(values[best] - wanted))) best = index;
  });
  return best;
}

/**
 * Curves over one x. `series`: {name, x, y, order (its colour), isVoid, isDots}; y may hold nulls, which end a stroke, as the end of
 * an attempt does where `attempts` are given.
 * `rules`: {y, text}; `marks`: {x, text}. Options: title, unit, show(y), showTick(y), showX(x), xTitle, isTime, isLog, fromZero.
 */
function curvePlot(options) {
  const settings = { isLog: false, height: 210, ...options };
  const figure = el("figure", { id: options.id });
  const current = { data: settings, cursor: null };
  const view = responsive((width) => drawCurves(current.data, width, current));
  const caption = el("figcaption", null, el("h3", null, settings.title, settings.unit ? el("span", { class: "quiet" }, ` ${settings.unit}`) : null));
  figure.append(caption, view.box);
  if (settings.key) figure.append(legend(settings.key));
  figure.append(behind("Table", () => seriesTable(current.data)));
  return { figure, caption, set: (change) => { Object.assign(current.data, change); view.redraw(); } };
}

function drawCurves(data, width, current) {
  const height = data.height;
  const inner = { left: MARGIN.left, right: width - MARGIN.right, top: MARGIN.top, bottom: height - MARGIN.bottom };
  const usable = (y) => isNumber(y) && (!data.isLog || y > 0);
  const main = data.series.filter((each) => !each.isVoid);
  const xs = extent(main.flatMap((each) => each.x.filter((_, index) => isNumber(each.y[index]))));
  let ys = extent([...main.flatMap((each) => each.y.filter(usable)), ...(data.rules || []).map((rule) => rule.y).filter(usable)]);
  if (!xs || !ys) return el("p", { class: "quiet" }, data.nothing || "nothing was measured");
  if (data.fromZero && !data.isLog) ys = [Math.min(0, ys[0]), ys[1]];
  const room = data.isLog ? 0 : (ys[1] - ys[0] || Math.abs(ys[1]) || 1) * 0.06;
  ys = [data.fromZero && ys[0] === 0 ? 0 : ys[0] - room, ys[1] + room];
  const x = scale(xs[0], xs[1], inner.left, inner.right);
  const y = scale(ys[0], ys[1], inner.bottom, inner.top, data.isLog);
  const clip = newId("clip");
  const parts = [svg("clipPath", { id: clip }, svg("rect", { x: inner.left, y: inner.top - 3, width: inner.right - inner.left, height: inner.bottom - inner.top + 6 }))];
  for (const tick of (data.isLog ? logTicks : ticks)(ys[0], ys[1], 4)) {
    parts.push(svg("line", { class: "grid", x1: inner.left, x2: inner.right, y1: y(tick), y2: y(tick) }));
    parts.push(svg("text", { x: inner.left - 8, y: y(tick) + 4, "text-anchor": "end" }, (data.showTick || data.show)(tick)));
  }
  const across = (data.isTime ? secondTicks : ticks)(xs[0], xs[1], Math.max(3, Math.floor(width / 130)));
  for (const tick of across.filter((value) => data.xTitle !== "step" || Number.isInteger(value))) {
    const anchor = x(tick) > inner.right - 20 ? "end" : x(tick) < inner.left + 20 ? "start" : "middle";
    parts.push(svg("text", { x: x(tick), y: height - 8, "text-anchor": anchor }, data.showX(tick)));
  }
  parts.push(svg("line", { class: "axis", x1: inner.left, x2: inner.right, y1: inner.bottom, y2: inner.bottom }));
  const drawn = svg("g", { "clip-path": `url(#${clip})` });
  for (const mark of data.marks || []) drawn.append(svg("line", { class: "mark", x1: x(mark.x), x2: x(mark.x), y1: inner.top, y2: inner.bottom }));
  for (const each of data.series) drawn.append(strokes(each, x, y, usable));
  for (const rule of data.rules || []) {
    drawn.append(svg("line", { class: "rule", x1: inner.left, x2: inner.right, y1: y(rule.y), y2: y(rule.y) }));
    parts.push(svg("text", { class: "strong", x: inner.right, y: Math.max(inner.top + 10, y(rule.y) - 5), "text-anchor": "end" }, rule.text));
  }
  const hair = svg("line", { class: "hair", y1: inner.top, y2: inner.bottom, visibility: "hidden" });
  const dots = svg("g");
  const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true", focusable: "false" }, parts, drawn, hair, dots);
  const tip = el("div", { class: "tip", hidden: true });
  return [drawing, curveCursor(data, current, { x, y, xs, inner, hair, dots, tip, width }), tip];
}

function strokes(series, x, y, usable) {
  const group = svg("g");
  const order = series.order || 0;
  if (series.isDots) {
    series.x.forEach((at, index) => usable(series.y[index]) && group.append(svg("circle", { class: `dot f${order}`, cx: x(at), cy: y(series.y[index]), r: 3.5 })));
    return group;
  }
  const path = [];
  let isOpen = false;
  let before = -Infinity;
  series.x.forEach((at, index) => {
    const isPoint = isNumber(at) && usable(series.y[index]);
    const isSame = !series.attempts || series.attempts[index] === series.attempts[index - 1];
    if (isPoint) path.push(`${isOpen && isSame && at >= before ? "L" : "M"}${x(at).toFixed(1)} ${y(series.y[index]).toFixed(1)}`);
    isOpen = isPoint;
    before = at;
  });
  const single = path.length === 1 ? svg("circle", { class: `f${order}`, cx: path[0].slice(1).split(" ")[0], cy: path[0].split(" ")[1], r: 3 }) : null;
  group.append(svg("path", { class: series.isVoid ? "curve void" : `curve s${order} ${series.isDashed ? `d${1 + (order % 5)}` : ""}`, d: path.join("") }));
  if (single) group.append(single);
  return group;
}

function curveCursor(data, current, view) {
  const series = data.series.filter((each) => !each.isVoid);
  const points = [...new Set(series.flatMap((each) => each.x.filter((_, index) => isNumber(each.y[index]))))].filter(isNumber).sort((a, b) => a - b);
  const last = points.length - 1;
  const cursor = el("div", { class: "cursor", tabindex: 0, role: "slider", "aria-label": `${data.title}: cursor over ${data.xTitle}`, "aria-valuemin": 0, "aria-valuemax": last, "aria-orientation": "horizontal" });

  function said(at) {
    return series.map((each) => {
      const index = nearest(each.x, at);
      return index < 0 || !isNumber(each.y[index]) ? null : `${series.length > 1 || each.isNamed ? `${each.name} ` : ""}${data.show(each.y[index])}${data.unitSaid || ""}`;
    }).filter(Boolean);
  }

  function move(index, isShown) {
    current.cursor = Math.max(0, Math.min(last, index));
    const at = points[current.cursor];
    const near = (data.marks || []).filter((mark) => Math.abs(view.x(mark.x) - view.x(at)) < 5).map((mark) => mark.text);
    const title = `${data.xTitle} ${data.showX(at)}`;
    cursor.setAttribute("aria-valuenow", current.cursor);
    cursor.setAttribute("aria-valuetext", [title, ...said(at), ...near].join(", "));
    if (!isShown) return;
    view.hair.setAttribute("x1", view.x(at));
    view.hair.setAttribute("x2", view.x(at));
    view.hair.setAttribute("visibility", "visible");
    view.dots.replaceChildren(...series.map((each) => {
      const own = nearest(each.x, at);
      return own >= 0 && isNumber(each.y[own]) && (!data.isLog || each.y[own] > 0) ? svg("circle", { class: `dot f${each.order || 0}`, cx: view.x(each.x[own]), cy: view.y(each.y[own]), r: 4 }) : null;
    }).filter(Boolean));
    tipLines(view.tip, title, [...said(at), ...near]);
    place(view.tip, view.x(at), view.inner.top, view.width);
  }

  function hide() {
    view.tip.hidden = true;
    view.hair.setAttribute("visibility", "hidden");
    view.dots.replaceChildren();
  }

  cursor.addEventListener("pointermove", (event) => {
    const at = event.clientX - cursor.getBoundingClientRect().left;
    const share = (at - view.inner.left) / (view.inner.right - view.inner.left);
    move(nearest(points, view.xs[0] + share * (view.xs[1] - view.xs[0])), true);
  });
  cursor.addEventListener("pointerleave", hide);
  cursor.addEventListener("focus", () => move(current.cursor === null ? last : current.cursor, true));
  cursor.addEventListener("blur", hide);
  onArrows(cursor, (by, isEnd) => move(isEnd ? (by < 0 ? 0 : last) : (current.cursor ?? last) + by, true), points.length);
  move(current.cursor ?? last, false);
  return cursor;
}

/** Arrow keys, Page Up and Down, Home and End as every slider has them. */
function onArrows(node, go, count, goDown) {
  const page = Math.max(1, Math.round(count / 10));
  const keys = { ArrowLeft: [-1], ArrowRight: [1], PageDown: [-page], PageUp: [page], Home: [-1, true], End: [1, true] };
  if (goDown) Object.assign(keys, { ArrowUp: null, ArrowDown: null });
  node.addEventListener("keydown", (event) => {
    if (!(event.key in keys) || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    if (keys[event.key]) go(...keys[event.key]);
    else goDown(event.key === "ArrowUp" ? -1 : 1);
  });
}

function seriesTable(data) {
  const rows = data.series.flatMap((each) => each.x.map((at, index) => ({ name: each.name, x: at, y: each.y[index] }))).filter((row) => isNumber(row.y));
  const columns = [
    { key: "x", title: data.xTitle, show: data.showX },
    { key: "y", title: data.title, show: data.show },
    ...(data.series.length > 1 ? [{ key: "name", title: "curve", isText: true }] : []),
  ];
  return table(columns, rows, { label: `${data.title}, values` });
}

/** A bar whose parts sum to a whole. `parts`: {name, value, className, words}. */
function partsBar(options) {
  const { parts, total, show, title } = options;
  const known = parts.filter((part) => part.value > 0);
  const view = responsive((width) => {
    let begin = 0;
    const rects = known.map((part) => {
      const size = (part.value / total) * width;
      const rect = svg("rect", { class: part.className, x: begin, y: 0, width: Math.max(size - (size > 3 ? 1 : 0), 0.5), height: 26 }, svg("title", null, `${part.name}: ${show(part.value)}`));
      begin += size;
      return rect;
    });
    return svg("svg", { viewBox: `0 0 ${width} 26`, width, height: 26, role: "img", "aria-label": `${title}: ${known.map((part) => `${part.name} ${show(part.value)}, ${format.percent(part.value / total)}`).join("; ")}` }, rects);
  });
  return view.box;
}

/** Horizontal bars under each other. `bars`: {name, value, className}; `rule`: {value, text} is a line over all of them. */
function bars(options) {
  const { items, show, title, most } = options;
  const row = 24;
  const view = responsive((width) => {
    const left = Math.min(170, width * 0.42);
    const top = options.rule ? 18 : 0;
    const limit = most || Math.max(...items.map((item) => item.value), options.rule ? options.rule.value : 0) || 1;
    const x = scale(0, limit, left, width - 74);
    const drawn = items.flatMap((item, index) => [
      svg("text", { class: "strong", x: left - 8, y: top + index * row + 16, "text-anchor": "end" }, item.name),
      svg("rect", { class: item.className || "f0", x: left, y: top + index * row + 4, width: Math.max(1, x(item.value) - left), height: row - 8 }),
      svg("text", { x: x(item.value) + 6, y: top + index * row + 16 }, show(item.value)),
    ]);
    const height = top + items.length * row;
    if (options.rule) {
      drawn.push(svg("line", { class: "measured", x1: x(options.rule.value), x2: x(options.rule.value), y1: top, y2: height }));
      drawn.push(svg("text", { class: "strong", x: x(options.rule.value), y: 11, "text-anchor": "end" }, options.rule.text));
    }
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${title}: ${items.map((item) => `${item.name} ${show(item.value)}`).join("; ")}` }, drawn);
  });
  return view.box;
}

const HEAT_BOUNDS = [1.02, 1.05, 1.1, 1.2, 1.35, 1.6, 2];

function heatLevel(seconds, median) {
  const ratio = median > 0 ? seconds / median : 1;
  const level = HEAT_BOUNDS.findIndex((bound) => ratio < bound);
  return level < 0 ? HEAT_BOUNDS.length : level;
}

/** Ranks × steps: one path for each colour, so that many cells draw at once. */
function heatPlot(heat) {
  const rows = heat.ranks.length;
  const row = rows <= 24 ? 16 : rows <= 96 ? 8 : Math.max(2, Math.floor(640 / rows));
  const top = 4;
  const current = { rank: 0, column: 0 };
  const view = responsive((width) => {
    const left = Math.min(132, width * 0.3);
    const cell = (width - left - 2) / heat.columns.length;
    const height = top + rows * row + 26;
    const paths = Array.from({ length: HEAT_BOUNDS.length + 1 }, () => []);
    heat.cells.forEach((cells, index) => {
      let begin = 0;
      for (let column = 1; column <= cells.length; column++) {
        const level = cells[begin] === null ? null : heatLevel(cells[begin], heat.median_s);
        const next = column === cells.length ? undefined : cells[column] === null ? null : heatLevel(cells[column], heat.median_s);
        if (next === level) continue;
        if (level !== null) paths[level].push(`M${(left + begin * cell).toFixed(2)} ${top + index * row}h${((column - begin) * cell).toFixed(2)}v${row > 4 ? row - 1 : row}H${(left + begin * cell).toFixed(2)}z`);
        begin = column;
      }
    });
    const labels = hostLabels(heat, row, top, left);
    const places = [...new Set([0, Math.floor((heat.columns.length - 1) / 2), heat.columns.length - 1])];
    const under = places.map((column, index) => svg("text", { x: left + (column + (index === places.length - 1 ? 1 : 0)) * cell, y: height - 8, "text-anchor": index === 0 ? "start" : index === places.length - 1 ? "end" : "middle" }, `step ${format.count(heat.columns[column][index === 0 ? 0 : 1])}`));
    const frame = svg("rect", { fill: "none", class: "hair", width: Math.max(cell, 3), height: row, visibility: "hidden" });
    const drawing = svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true", focusable: "false" }, paths.map((path, level) => svg("path", { class: `h${level}`, d: path.join("") })), labels, under, frame);
    const tip = el("div", { class: "tip", hidden: true });
    return [drawing, heatCursor(heat, current, { left, top, cell, row, frame, tip, width }), tip];
  });
  return view.box;
}

function hostLabels(heat, row, top, left) {
  const labels = [];
  let before = null;
  let lowest = -Infinity;
  heat.ranks.forEach((each, index) => {
    const isNew = each.host !== before;
    before = each.host;
    const at = top + index * row;
    if (isNew && index) labels.push(svg("line", { class: "axis", x1: 0, x2: left - 6, y1: at - 0.5, y2: at - 0.5 }));
    if (at - lowest < 13 || (!isNew && row < 13)) return;
    lowest = at;
    labels.push(svg("text", { class: "strong", x: left - 8, y: at + 12, "text-anchor": "end" }, row >= 13 ? `${isNew ? `${each.host}  ` : ""}${each.rank}` : each.host));
  });
  return labels;
}

function heatCursor(heat, current, view) {
  const [lastRow, lastColumn] = [heat.ranks.length - 1, heat.columns.length - 1];
  const cursor = el("div", { class: "cursor", tabindex: 0, role: "slider", "aria-label": "Own step times: arrow keys left and right go through steps, up and down through ranks", "aria-valuemin": 0, "aria-valuemax": lastColumn });

  function move(rank, column, isShown) {
    current.rank = Math.max(0, Math.min(lastRow, rank));
    current.column = Math.max(0, Math.min(lastColumn, column));
    const [each, steps, seconds] = [heat.ranks[current.rank], heat.columns[current.column], heat.cells[current.rank][current.column]];
    const where = `rank ${each.rank} on ${each.host}`;
    const when = steps[0] === steps[1] ? `step ${format.count(steps[0])}` : `slowest of steps ${format.count(steps[0])}–${format.count(steps[1])}`;
    const what = seconds === null ? "not timed" : `${format.seconds(seconds)}, ${format.ratio(seconds / heat.median_s)} the median`;
    cursor.setAttribute("aria-valuenow", current.column);
    cursor.setAttribute("aria-valuetext", [where, when, what].join(", "));
    if (!isShown) return;
    view.frame.setAttribute("x", view.left + current.column * view.cell);
    view.frame.setAttribute("y", view.top + current.rank * view.row);
    view.frame.setAttribute("visibility", "visible");
    tipLines(view.tip, where, [when, what]);
    place(view.tip, view.left + current.column * view.cell, view.top + current.rank * view.row + view.row, view.width);
  }

  const hide = () => { view.tip.hidden = true; view.frame.setAttribute("visibility", "hidden"); };
  cursor.addEventListener("pointermove", (event) => {
    const box = cursor.getBoundingClientRect();
    move(Math.floor((event.clientY - box.top - view.top) / view.row), Math.floor((event.clientX - box.left - view.left) / view.cell), true);
  });
  cursor.addEventListener("pointerleave", hide);
  cursor.addEventListener("focus", () => move(current.rank, current.column, true));
  cursor.addEventListener("blur", hide);
  onArrows(cursor, (by, isEnd) => move(current.rank, isEnd ? (by < 0 ? 0 : lastColumn) : current.column + by, true), lastColumn + 1, (by) => move(current.rank + by, current.column, true));
  move(0, 0, false);
  return cursor;
}
