"use strict";
// The sections of a page of a plan: one layout predicted, or the layouts that a search found.

const COMPONENTS = ["parameters", "gradients", "accumulation", "masters", "optimizer", "activations", "logits", "buffers", "framework"];
const COMPONENT_NAMES = { accumulation: "fp32 gradients", masters: "master weights", optimizer: "optimizer state", logits: "logits and loss", buffers: "communication buffers" };
const PART_NAMES = { tensor_parallel: "collectives in the layers", host: "waiting for the host", hand_over: "between stages", bubble: "pipeline bubble", reduction: "reducing gradients" };

function layoutWords(row) {
  const degrees = ["dp", "tp", "pp", "cp", "ep"].filter((name) => row[name] > 1).map((name) => `${name} ${row[name]}`);
  return [...(degrees.length ? degrees : ["one device"]), row.zero ? `ZeRO-${row.zero}` : null].filter(Boolean).join(", ");
}

function planFigures(items) {
  return el("dl", { class: "figures" }, items.map(([title, value, note]) => el("div", null, el("dt", null, title), el("dd", null, value, note ? el("small", null, note) : null))));
}

function oneLayoutSections(plan) {
  const sizes = plan.stages.map((stage) => COMPONENTS.reduce((sum, name) => sum + stage[`${name}_bytes`], 0));
  const fullest = sizes.indexOf(Math.max(...sizes));
  const items = COMPONENTS.map((name) => ({ name: COMPONENT_NAMES[name] || name, value: plan.stages[fullest][`${name}_bytes`], className: "f0" })).filter((item) => item.value > 0);
  items.push({ name: "in all", value: plan.peak_memory_bytes, className: plan.fits ? "f2" : "f1" });
  const over = plan.memory_over_time_bytes;
  const times = [["built", over.built], ["first step", over.first_step], ["later steps", over.later_steps]].map(([name, value]) => ({ name, value, className: "f0" }));
  const rule = { value: plan.device_memory_bytes, text: `device ${format.bytes(plan.device_memory_bytes)}` };
  const parts = Object.entries(plan.step_time_parts_s).map(([name, value]) => ({ name: PART_NAMES[name] || name, value, className: "f0" })).filter((part) => part.value > 0);
  const stage = plan.stages.length > 1 ? `, stage ${fullest + 1} of ${plan.stages.length}` : "";
  const tableOf = (rows, show, label) => behind("Table", () => table([{ key: "name", title: "part", isText: true }, { key: "value", title: "size", show }], rows, { label }));
  return [
    planFigures([
      ["Memory", format.bytes(plan.peak_memory_bytes), plan.fits ? "fits" : "does not fit"],
      ["Step", format.seconds(plan.step_time_s), plan.step_time_range_s.if_stages_wait > plan.step_time_s * 1.001 ? `${format.seconds(plan.step_time_range_s.if_stages_wait)} if stages wait` : null],
      ["Speed", `${format.quantity(plan.tokens_per_s)} tok/s`, `${format.quantity(plan.tokens_per_s_per_device)} a device`],
      ["MFU", format.percent(plan.mfu), `HFU ${format.percent(plan.hfu)}`],
      ["Run", format.seconds(plan.run_s), `${plural(plan.steps, "step")}`],
      ["GPU-hours", digits(plan.gpu_hours), null],
      ["Goodput", format.percent(plan.failures.goodput), "expected with failures"],
    ]),
    section("memory", `Memory of a rank${stage}`, bars({ title: "Memory by component", items, show: format.bytes, rule }), tableOf(items, format.bytes, "Memory by component")),
    section("memory-over-time", "Memory over time", bars({ title: "Memory over time", items: times, show: format.bytes, rule }), el("p", { class: "quiet" }, `Host memory ${format.bytes(over.host)} a rank, disk ${format.bytes(over.disk)}.`)),
    section("step-time", "A step", bars({ title: "Parts of a step", items: parts, show: format.seconds }), tableOf(parts, format.seconds, "Parts of a step")),
    section("sources", "What it rests on", el("p", { class: "quiet" }, `Device: ${plan.device_sources.figures || "a measured profile"}; shares of its peak: ${plan.device_sources.reached}.`)),
  ];
}

function searchSections(plan) {
  const points = plan.pareto;
  const view = responsive((width) => {
    const [height, left, bottom] = [300, 66, 40];
    const [low, high] = extent([...points.map((row) => row.peak_memory_bytes), plan.usable_memory_bytes]);
    const [slow, fast] = extent(points.map((row) => row.tokens_per_s_per_device));
    const x = scale(0, high * 1.04, left, width - 16);
    const y = scale(Math.min(slow * 0.9, slow), fast * 1.05, height - bottom, 12);
    const drawn = ticks(slow * 0.9, fast * 1.05, 4).flatMap((tick) => [svg("line", { class: "grid", x1: left, x2: width - 16, y1: y(tick), y2: y(tick) }), svg("text", { x: left - 8, y: y(tick) + 4, "text-anchor": "end" }, format.quantity(tick))]);
    drawn.push(ticks(0, (high * 1.04) / 2 ** 30, Math.max(3, Math.floor(width / 140))).map((tick) => svg("text", { x: x(tick * 2 ** 30), y: height - bottom + 18, "text-anchor": "middle" }, digits(tick))));
    drawn.push(svg("text", { x: (left + width) / 2, y: height - 4, "text-anchor": "middle" }, "memory of a device, GiB"));
    drawn.push(svg("line", { class: "rule", x1: x(plan.usable_memory_bytes), x2: x(plan.usable_memory_bytes), y1: 12, y2: height - bottom }), svg("text", { class: "strong", x: x(plan.usable_memory_bytes) - 6, y: 22, "text-anchor": "end" }, "usable"));
    const sorted = [...points].sort((a, b) => a.peak_memory_bytes - b.peak_memory_bytes);
    drawn.push(svg("path", { class: "curve s0", d: `M${sorted.map((row) => `${x(row.peak_memory_bytes).toFixed(1)} ${y(row.tokens_per_s_per_device).toFixed(1)}`).join("L")}` }));
    drawn.push(sorted.map((row) => svg("circle", { class: "dot f0", cx: x(row.peak_memory_bytes), cy: y(row.tokens_per_s_per_device), r: 5 }, svg("title", null, `${layoutWords(row)}: ${format.bytes(row.peak_memory_bytes)}, ${format.quantity(row.tokens_per_s_per_device)} tokens/s a device`))));
    return svg("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `Speed against memory of the ${points.length} layouts that no other beats in both; the table has the numbers` }, drawn);
  });
  const columns = [
    { key: "layout", title: "layout", isText: true, isWide: true, value: layoutWords },
    { key: "peak_memory_bytes", title: "memory", show: format.bytes }, { key: "tokens_per_s_per_device", title: "tokens/s a device", show: format.quantity },
    { key: "mfu", title: "MFU", show: format.percent }, { key: "step_time_s", title: "step", show: format.seconds },
    { key: "micro_batch_size", title: "micro-batch", show: format.count }, { key: "accumulation", title: "accumulation", show: format.count },
    { key: "recompute", title: "recompute", isText: true },
  ];
  return [
    planFigures([["Devices", format.count(plan.num_devices), plan.device], ["Layouts", format.count(plan.num_layouts), `${format.count(plan.num_fitting)} fit`], ["Best", points.length ? `${format.quantity(plan.layouts[0].tokens_per_s)} tok/s` : "none fits", plan.layouts[0] ? layoutWords(plan.layouts[0]) : null]]),
    points.length ? section("pareto", "What memory buys", el("figure", { id: "plot-pareto" }, el("figcaption", null, el("h3", null, "Speed against memory", el("span", { class: "quiet" }, " tokens/s a device, of layouts that no other beats in both"))), view.box), table([...columns.map((column) => ({ ...column }))], points, { label: "Layouts that no other beats" })) : null,
    section("layouts", "The fastest layouts", plan.layouts.length ? table(columns, plan.layouts, { label: "The fastest layouts, table" }) : el("p", { class: "quiet" }, "none fits")),
  ];
}

function planSections(plan) {
  const parameters = plan.num_parameters === plan.num_active_parameters ? `${format.quantity(plan.num_parameters)} parameters` : `${format.quantity(plan.num_parameters)} parameters, ${format.quantity(plan.num_active_parameters)} active`;
  const words = [`plan on ${plan.device}`, parameters, plan.precision, plan.layout ? layoutWords({ ...plan.layout, zero: plan.zero }) : null, `profile ${plan.framework}`];
  return [el("h1", null, plan.model), el("p", { class: "quiet path" }, words.filter(Boolean).join(" · ")), plan.layouts ? searchSections(plan) : oneLayoutSections(plan)];
}
