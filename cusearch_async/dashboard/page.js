"use strict";
// Every text of a run, a model or a passage becomes a text node: nothing here parses HTML.

const data = JSON.parse(document.getElementById("data").textContent);

function make(tag, given = {}, ...children) {
  const { text, ...attributes } = given;
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const share = (value) => (isNumber(value) ? `${Math.round(100 * value)} %` : "–");
const fixed = (value, digits = 2) => (isNumber(value) ? value.toFixed(digits) : "–");
const precise = (value) => (isNumber(value) ? (value && Math.abs(value) < 0.001 ? value.toExponential(1) : value.toFixed(3)) : "–");
const signed = (value, digits = 2) => (isNumber(value) ? (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits) : "–");
function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 90) return `${fixed(value, value < 10 ? 1 : 0)} s`;
  return value < 5400 ? `${Math.round(value / 60)} min` : `${fixed(value / 3600, 1)} h`;
}

// ---- the columns of metrics.jsonl -----------------------------------------------------------------

const column = (name) => data.rows.values[name] || data.rows.step.map(() => null);
const last = (name) => column(name).at(-1);
const first = (name) => column(name).find(isNumber);
const ofDepth = (name, depth) => column(name).map((list) => (Array.isArray(list) ? list[depth] ?? null : null));
const deepest = () => Math.max(5, ...(data.groups?.groups ?? []).flatMap((group) => group.episodes.map((one) => one.depth)));
const depths = () => [...Array((data.bounds?.s_max ?? deepest()) + 1).keys()];
const depthColour = (depth) => `depth${Math.min(depth, 5)}`;

function shares(name) {
  return column(name).map((list) => {
    if (!Array.isArray(list)) return null;
    const total = list.reduce((sum, one) => sum + (one ?? 0), 0);
    return total ? list.map((one) => (one ?? 0) / total) : null;
  });
}

const isTrained = (score) => score.what !== "the baseline";

// The scored versions, each at the step that it was sampled from; versions beyond the last step get a place after it.
function heldOut(name) {
  const steps = axis();
  const values = steps.map(() => null);
  for (const score of data.scores.filter(isTrained)) {
    const place = steps.findIndex((step) => step >= score.step);
    if (place >= 0) values[place] = score.categories.all?.[name] ?? null;
  }
  return values;
}
function axis() {
  const steps = data.rows.step;
  const beyond = Math.max(-1, ...data.scores.map((score) => score.step));
  return steps.length && beyond > steps.at(-1) ? [...steps, beyond] : steps;
}
const filled = (values) => (values.length < axis().length ? [...values, null] : values);

// ---- charts ---------------------------------------------------------------------------------------

const line = (metric, label, colour, more = {}) => ({ label, colour, metric, values: () => column(metric), ...more });
const byDepth = (metric) => depths().map((depth) => ({ label: `${depth}`, colour: depthColour(depth), values: () => ofDepth(metric, depth) }));
const depthShares = (metric) => depths().map((depth) => ({
  label: `${depth}`, colour: depthColour(depth), values: () => shares(metric).map((list) => list && list[depth]),
}));
const constant = (value, label) => ({ label, colour: "grey", dash: [3, 4], isBound: true, values: () => data.rows.step.map(() => value()) });

const CHARTS = {
  redis: { title: "Redis", note: "MiB of the server", series: () => [{ label: "server", colour: "blue", values: () => column("buffer/server_bytes").map((one) => isNumber(one) ? one / 2 ** 20 : null) },
    { label: "buffered payloads", colour: "orange", values: () => column("buffer/bytes").map((one) => isNumber(one) ? one / 2 ** 20 : null) }] },
  host: { title: "The learner's machine", note: "share used", range: [0, 1], series: () => [line("machine/memory_used_share", "memory", "blue"), line("machine/gpu_memory_share", "GPU memory", "orange"),
    line("machine/gpu_used_share", "GPUs", "green")] },
  reward: { title: "Reward and exact match", note: "of the pool, of the trained; ◆ held-out", range: [0, 1], series: () => [
    line("reward/all", "reward", "blue"), line("reward/trained", "trained", "blue", { dash: [4, 4] }), line("reward/em", "EM", "orange"),
    { label: "held-out EM", colour: "green", points: true, values: () => heldOut("em") }] },
  pool: { title: "Searches of an episode", note: "share of the pool by depth", range: [0, 1], stacked: true, series: () => depthShares("depth/generated") },
  selected: { title: "What is trained on", note: "share of the selected by depth", range: [0, 1], stacked: true, series: () => depthShares("depth/selected") },
  ofDepth: { title: "Reward by depth", note: "mean of the pool's trajectories", range: [0, 1], series: () => byDepth("by_depth/reward") },
  emOfDepth: { title: "Exact match by depth", range: [0, 1], series: () => byDepth("by_depth/em") },
  groups: { title: "Groups", note: "by exact match of their answers", range: [0, 1], stacked: true, series: () => [
    line("groups/solved_share", "all right", "green"), line("groups/mixed_share", "mixed", "blue"), line("groups/hopeless_share", "none right", "red")] },
  equal: { title: "Groups of equal rewards", note: "share of the selected", range: [0, 1], series: () => [
    line("groups/zero_variance_share", "equal rewards", "red"), line("groups/singleton_share", "alone in their group", "violet"), line("selection/usable_share", "usable", "green")] },
  depth: { title: "Mean search depth", series: () => [line("depth/mean", "pool", "blue"), line("depth/mean_trained", "trained", "orange"),
    { label: "held-out", colour: "green", points: true, values: () => heldOut("depth") }] },
  mass: { title: "Weight in the gradient", note: "Σ a·|A| by depth", range: [0, 1], stacked: true, series: () => byDepth("by_depth/advantage_mass") },
  tokens: { title: "Trained tokens", note: "share by depth", range: [0, 1], stacked: true, series: () => byDepth("by_depth/token_share") },
  phase: { title: "Phase of SDGA", series: () => [line("selection/phase", "phase", "green", { stepped: true }), line("selection/phase_trapped", "trapped", "red")] },
  coverage: { title: "Coverage of search tokens", note: "of the best selection of that size", range: [0, 1], series: () => [line("selection/coverage_of_best", "coverage", "blue")] },
  format: { title: "Answers and format", range: [0, 1], series: () => [line("reward/answered", "answered", "blue"), line("reward/format_valid", "format valid", "orange"),
    line("reward/f1", "F1", "green"), line("episode/cut_turns", "turns cut", "red")] },
  recall: { title: "What searches show", note: "share of the evidence, where it is known; of answers as before in the episode", range: [0, 1], series: () => [line("episode/recall", "evidence shown", "green"), line("episode/repeated_observations", "repeated", "orange")] },
  entropy: { title: "Entropy and KL", note: "nats", series: () => [line("train/entropy", "entropy", "blue"), line("train/kl_reference", "KL to the reference", "orange")] },
  gradient: { title: "Gradient norm", series: () => [line("train/grad_norm", "norm", "blue"), constant(() => data.bounds.grad_clip, "clipped at")] },
  clip: { title: "Clipped and bounded tokens", note: "share", series: () => [line("train/clip_fraction", "ratio clipped", "blue"), line("off_policy/weight_bounded_share", "weight bounded", "orange")] },
  staleness: { title: "Staleness", note: "steps", series: () => [line("staleness/min", "least", "grey"), line("staleness/mean", "mean", "blue"),
    line("staleness/max", "most", "orange"), constant(() => data.bounds.staleness, "bound")] },
  mismatch: { title: "Engine against learner", note: "k3, nats", series: () => [line("off_policy/mismatch_kl", "mismatch", "blue")] },
  ess: { title: "Effective sample size", note: "share", series: () => [line("off_policy/ess", "all", "blue"), ...byDepth("by_depth/ess").map((one) => ({ ...one, dash: [2, 3] }))] },
  stale: { title: "Staleness by depth", note: "deep trajectories take longer", series: () => byDepth("by_depth/staleness") },
  time: { title: "Where the time goes", note: "seconds a step", stacked: true, series: () => [line("time/wait_s", "wait", "grey"), line("time/update_s", "update", "blue"),
    line("time/publish_s", "publish", "orange"), line("time/checkpoint_s", "checkpoint", "violet")] },
  idle: { title: "Idle", note: "share of time", range: [0, 1], series: () => [line("learner/idle_share", "learner", "orange"), line("rollout/idle_share", "engines", "blue")] },
  speed: { title: "Tokens a second", series: () => [line("learner/tokens_per_s", "learner", "orange"), line("rollout/tokens_per_s", "engines", "blue")] },
  searches: { title: "Searches since the last step", series: () => [line("rollout/searches", "answered", "blue"), line("rollout/search_failures", "attempts failed", "red")] },
  latency: { title: "A search, an episode", note: "seconds, 99th percentile", series: () => [line("rollout/search_p99_s", "search", "blue"), line("episode/seconds_p99", "episode", "orange")] },
  buffered: { title: "Buffered trajectories", series: () => [line("buffer/buffered", "buffered", "blue")] },
  troubles: { title: "Troubles, in total", series: () => [line("buffer/requeued", "requeued", "blue"), line("buffer/incomplete_groups", "incomplete groups", "orange"),
    line("buffer/quarantined", "quarantined", "red"), line("buffer/lost", "lost", "violet")] },
};

function chart(name) {
  const spec = CHARTS[name];
  const series = spec.series().map((one) => ({ ...one, raw: filled(one.values()) })).filter((one) => one.raw.some(isNumber));
  if (!series.length) return null;
  if (!spec.stacked) series.push(...healthyBand(series));
  const place = make("div", { role: "img", "aria-label": `${spec.title}: ${series.map((one) => `${one.label} ${precise(one.raw.filter(isNumber).at(-1))}`).join(", ")}` });
  requestAnimationFrame(() => draw(place, spec, series));
  return panel(spec.title, spec.note, place);
}

// The first metric of a chart in healthy runs of the same world and method, where they are known: from low to high.
function healthyBand(series) {
  const metric = series.map((one) => one.metric).find((name) => data.healthy?.[name]);
  const band = data.healthy?.[metric];
  return band ? ["high", "low"].map((side) => ({ label: `healthy, ${side}`, colour: "grey", isBound: true, isBand: true, raw: axis().map((step) => band[side][step] ?? null) })) : [];
}

function draw(place, spec, series, steps = axis()) {
  if (!place.isConnected) return; // the screen was left before it was drawn
  const grid = { stroke: css("line"), width: 1 };
  const ticks = { stroke: css("faint"), grid, ticks: { show: false }, font: "11px system-ui" };
  const short = (_, values) => values.map((value) => (value && Math.abs(value) < 0.01 ? value.toExponential(0) : `${Number(value.toPrecision(6))}`));
  let below = series[0].raw.map(() => 0);
  const drawn = series.map((one) => {
    if (!spec.stacked) return one.raw;
    below = below.map((sum, place) => (isNumber(one.raw[place]) ? sum + one.raw[place] : sum));
    return below.map((sum, place) => (series.some((other) => isNumber(other.raw[place])) ? sum : null));
  });
  const colours = series.map((one) => css(one.colour));
  const smooth = series.map((one) => steps.length >= SMOOTHED_FROM && !spec.stacked && !one.points && !one.isBound && !one.stepped);
  const raw = series.flatMap((one) => one.raw), limits = extent(spec.stacked ? [0, ...drawn.flat()] : raw);
  const isOutside = spec.range && !spec.stacked && raw.some((value) => isNumber(value) && (value < spec.range[0] || value > spec.range[1]));
  const order = series.map((_, number) => number);
  if (spec.stacked) order.reverse(); // the highest sum first, so that lower areas cover it
  const high = series.findIndex((one) => one.isBand) + 1;
  const options = {
    width: Math.max(place.clientWidth, 200), height: 190,
    cursor: { sync: { key: "steps" } },
    bands: high ? [{ series: [high, high + 1], fill: `${css("grey")}30` }] : [],
    scales: { x: { time: false }, y: { range: spec.range && !isOutside ? spec.range : limits } },
    hooks: { drawClear: [(plot) => series.forEach((one, number) => smooth[number] && drawFaintly(plot, steps, one.raw, colours[number]))] },
    axes: [{ ...ticks, size: 26, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000] }, { ...ticks, size: 46, values: short }],
    series: [{ label: "step" }, ...order.map((number) => ({
      label: series[number].label, stroke: colours[number], width: series[number].points || series[number].isBand ? 0 : 1.6, dash: series[number].dash,
      fill: spec.stacked ? colours[number] : undefined,
      paths: series[number].stepped ? uPlot.paths.stepped({ align: 1 }) : undefined,
      spanGaps: Boolean(series[number].points || series[number].gaps),
      points: series[number].points ? { show: true, size: 8, fill: css("paper"), stroke: colours[number], width: 2 } : { show: steps.length < 3 },
      value: (_, __, ___, index) => (index === null || index === undefined ? "–" : precise(series[number].raw[index])),
    }))],
  };
  const view = (views[spec.title] ??= { hidden: new Set() });
  options.hooks.setScale = [(plot, key) => {
    const { min, max } = plot.scales.x;
    if (key === "x") view.zoom = min > steps[0] || max < steps.at(-1) ? { min, max } : null;
  }];
  options.hooks.setSeries = [(plot, number) => {
    const one = number && plot.series[number];
    if (one) view.hidden[one.show ? "delete" : "add"](one.label);
  }];
  order.forEach((number, place) => { options.series[place + 1].show = !view.hidden.has(series[number].label); });
  const zoom = view.zoom;
  const plot = new uPlot(options, [steps, ...order.map((number) => (smooth[number] ? average(drawn[number]) : drawn[number]))], place);
  if (zoom) plot.setScale("x", zoom);
  const observer = new ResizeObserver(() => plot.setSize({ width: Math.max(place.clientWidth, 200), height: 190 }));
  observer.observe(place);
  plots.push({ destroy: () => { observer.disconnect(); plot.destroy(); } });
}
const plots = [];
const views = {}; // how a chart was zoomed, and which of its curves are hidden, while it is drawn anew at each step

// A long curve is drawn as its moving average, with its own values faintly behind.
const SMOOTHED_FROM = 30;
function average(values) {
  let now = null;
  return values.map((value) => {
    if (!isNumber(value)) return null;
    now = now === null ? value : 0.2 * value + 0.8 * now;
    return now;
  });
}
function extent(values) {
  const known = values.filter(isNumber);
  const [low, high] = [known.reduce((a, b) => Math.min(a, b), Infinity), known.reduce((a, b) => Math.max(a, b), -Infinity)];
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
function drawFaintly(plot, steps, values, colour) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.beginPath();
  ctx.rect(bbox.left, bbox.top, bbox.width, bbox.height);
  ctx.clip();
  Object.assign(ctx, { globalAlpha: 0.35, strokeStyle: colour, lineWidth: devicePixelRatio });
  ctx.beginPath();
  let isOpen = false;
  values.forEach((value, place) => {
    if (isNumber(value)) ctx[isOpen ? "lineTo" : "moveTo"](plot.valToPos(steps[place], "x", true), plot.valToPos(value, "y", true));
    isOpen = isNumber(value);
  });
  ctx.stroke();
  ctx.restore();
}

const charts = (...names) => names.map(chart);

// ---- panels ---------------------------------------------------------------------------------------

function panel(title, note, ...children) {
  return make("section", { class: "panel" }, make("h2", { text: title }, note ? make("small", { text: note }) : null), ...children);
}

function ofNow(name, section) {
  section.dataset.now = name;
  return section;
}

function table(head, rows, numbers = []) {
  const cell = (tag, value, place) => {
    const kind = numbers.includes(place) ? "number" : null;
    return value instanceof Node ? make(tag, { class: kind }, value) : make(tag, { class: kind, text: value });
  };
  return make("div", { class: "scroll" }, make("table", { class: "table" },
    head ? make("thead", {}, make("tr", {}, ...head.map((one, place) => cell("th", one, place)))) : null,
    make("tbody", {}, ...rows.map((row) => make("tr", {}, ...row.map((one, place) => cell("td", one, place)))))));
}

function tiles() {
  const scored = data.scores.filter(isTrained);
  const [before, after] = [scored[0]?.categories.all, scored.at(-1)?.categories.all];
  const change = (name, digits) => (isNumber(first(name)) ? `${signed(last(name) - first(name), digits)} since step ${data.rows.step[0]}` : "");
  const tile = (name, value, note) => make("div", { class: "tile" }, make("span", { text: name }), make("b", { text: value }), make("small", { text: note }));
  return make("div", { class: "wide tiles" },
    tile("held-out EM", fixed(after?.em), after ? `${scored[0].step === 0 ? `${fixed(before.em)} before; ` : ""}${after.count} questions` : "not scored yet"),
    tile("EM, sampled", fixed(last("reward/em")), change("reward/em", 2)),
    tile("searches", fixed(last("depth/mean")), change("depth/mean", 2)),
    isNumber(last("selection/phase")) ? tile("phase", fixed(last("selection/phase"), 0), `of ${(data.bounds.s_max ?? 1) - 1}`)
      : tile("usable", share(isNumber(last("selection/usable_share")) ? last("selection/usable_share") : null), "of what is trained on"),
    tile("learner idle", share(last("learner/idle_share")), `engines ${share(column("rollout/idle_share").filter(isNumber).at(-1))}`),
    tile("staleness", fixed(last("staleness/mean"), 1), `at most ${fixed(last("staleness/max"), 0)}, bound ${data.bounds.staleness ?? "–"}`));
}

// The metric that tells an alarm, with the steps at which it has fired.
function sparkline(one) {
  const [width, height] = [180, 36];
  const known = column(one.metric).map((value, place) => [data.rows.step[place], value]).filter(([, value]) => isNumber(value));
  if (known.length < 2) return null;
  const [begin, end] = [data.rows.step[0], data.rows.step.at(-1)];
  const [low, high] = extent(known.map(([, value]) => value));
  const across = (step) => width * Math.min(1, Math.max(0, (step - begin) / (end - begin)));
  const points = known.map(([step, value]) => `${across(step).toFixed(1)},${(height * (high - value) / (high - low)).toFixed(1)}`).join(" ");
  const draw = (tag, given, ...children) => {
    const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(given)) element.setAttribute(name, value);
    element.append(...children);
    return element;
  };
  return draw("svg", { class: "spark", viewBox: `0 0 ${width} ${height}`, width, height, role: "img", "aria-label": `${one.metric}, now ${precise(known.at(-1)[1])}` },
    draw("rect", { x: across(one.first - 0.5), y: 0, width: across(one.last + 0.5) - across(one.first - 0.5), height }), draw("polyline", { points }));
}

function alarmList(alarms) {
  return alarms.map((one) => make("div", { class: one.firing ? "alarm" : "alarm over" }, sparkline(one),
    make("p", {}, make("b", { class: one.firing ? "bad" : "faint", text: one.name.replaceAll("_", " ") }),
      ` ${one.first === one.last ? `step ${one.first}` : `steps ${one.first} to ${one.last}`}: ${one.evidence}`),
    make("p", { text: `${one.cause} ${one.remedy}` }), make("code", { text: one.look })));
}

function alarmPanel() {
  if (!data.alarms) return ofNow("alarms", panel("Alarms", null, make("p", { class: "faint", text: "not known: the folder has no whole config.toml" })));
  const firing = data.alarms.filter((one) => one.firing);
  const isOpen = data.progress.outcome.startsWith("running");
  const troubles = isOpen ? [...(data.live?.troubles ?? []), data.lag].filter(Boolean) : [];
  const over = data.alarms.filter((one) => !one.firing);
  const count = firing.length + troubles.length;
  const note = `${data.rules.length} rules, ${count ? `${count} fire` : "none fires"}`;
  const now = troubles.map((one) => make("div", { class: "alarm" }, make("p", {}, make("b", { class: "bad", text: one.name.replaceAll("_", " ") }), ` ${one.text}`)));
  const body = count ? [...now, ...alarmList(firing)] : [make("p", { class: "ok", text: data.rows.step.length ? "✓ nothing looks wrong" : "no step is done yet" })];
  if (over.length) body.push(make("p", { class: "faint", text: `earlier: ${data.alarms_over}` }), ...alarmList(over));
  return ofNow("alarms", panel("Alarms", note, ...body));
}

function bufferPanel() {
  const live = data.live;
  if (!live) return null; // a page that does not watch Redis
  if (live.problem && !data.progress.outcome.startsWith("running")) return null; // its Redis has ended with it
  if (live.problem) return ofNow("buffer", panel("Buffer", "depth × staleness", make("p", { class: "faint", text: live.problem })));
  const most = Math.max(1, ...live.cells.flat());
  const ages = live.cells[0].map((_, age) => age);
  const grid = make("table", { class: "table heat" },
    make("thead", {}, make("tr", {}, ...["depth", ...ages, "all"].map((text) => make("th", { text, class: "number" })))),
    make("tbody", {}, ...live.cells.map((row, depth) => make("tr", {}, make("th", { text: depth, class: "number" }),
      ...row.map((count) => {
        const cell = make("td", { text: count || "·" });
        cell.style.background = count ? `rgb(${css("heat")} / ${0.12 + 0.68 * (count / most)})` : "";
        return cell;
      }), make("td", { text: row.reduce((sum, one) => sum + one, 0) })))));
  const trains = live.pool > live.state.step ? `the learner trains on pool ${live.state.step} · ` : "";
  const { queues, ledger } = live;
  const taken = ledger.claimed + ledger.trained + ledger.unselected;
  return ofNow("buffer", panel("Buffer", "depth × staleness, now", grid,
    make("p", { text: `${trains}pool ${live.pool}: ${queues.ready_of_pool} of ${queues.needed} groups ready · ${queues.leased} leased · ${ledger.buffered} of ${ledger.limit} buffered` }),
    make("p", {}, `finished ${ledger.finished} = buffered ${ledger.buffered} + taken ${taken} + quarantined ${ledger.quarantined} + lost ${ledger.lost}, `,
      make("span", { class: ledger.closes ? "ok" : "bad", text: ledger.closes ? "closes" : "DOES NOT CLOSE" }))));
}

function workerPanel() {
  const live = data.live;
  if (!live || live.problem) return null;
  const rows = live.workers.map((one) => [one.name,
    make("span", { class: one.is_alive ? "ok" : "bad", text: `${fixed(one.heartbeat_age_s, 0)} s ago` }),
    one.starting || (one.retriever_down_s ? `retriever down ${seconds(one.retriever_down_s)}` : `version ${one.version}`), one.in_flight, one.episodes,
    one.busy_s ? fixed(one.sampled_tokens / one.busy_s, 0) : "–",
    make("span", { text: one.failed_episodes, title: [one.failed_episodes_by_kind, one.most_frequent_failure, one.search_failures_by_kind && `searches: ${one.search_failures_by_kind}`].filter(Boolean).join("\n") })]);
  const learner = live.learner ? `${live.learner.host}, process ${live.learner.pid}, epoch ${live.learner.epoch}` : "none is alive";
  return ofNow("workers", panel("Workers and learner", null, table(["worker", "seen", "state", "in flight", "episodes", "tokens/s", "failed"], rows, [3, 4, 5, 6]),
    make("p", {}, "learner: ", make("span", { class: live.learner || live.state.finished ? "" : "bad", text: learner })), make("p", { class: "faint", text: `buffer at ${live.redis}` })));
}

// Changes need the token of the run: who can read its folder may make them. The same panel is kept while steps go by.
let changing = null;
function changePanel() {
  if (!data.watches || !data.live || data.live.problem || data.live.state.finished) return null;
  changing ??= makeChangePanel();
  return changing;
}

function makeChangePanel() {
  const field = (label, type) => make("input", { type, placeholder: label, "aria-label": label, autocomplete: "off" });
  const [token, what] = [field("token", "password"), field("ticket, or ticket:rollout", "text")];
  const kept = `token of ${location.pathname}`;
  token.value = sessionStorage.getItem(kept) ?? "";
  const said = make("p", { class: "faint", role: "status", text: "The token is in the file page-token of the run's folder, or in CUSEARCH_PAGE_TOKEN." });
  let isBusy = false; // a second click would be refused, or undo what a worker has begun meanwhile
  const change = async (action) => {
    if (isBusy) return;
    isBusy = true;
    said.className = "faint";
    said.textContent = `${action} …`;
    sessionStorage.setItem(kept, token.value);
    try {
      const headers = { "Content-Type": "application/json", Authorization: `Bearer ${token.value}` };
      const answer = await (await fetch("act", { method: "POST", headers, body: JSON.stringify({ action, what: what.value }) })).json();
      said.className = answer.done ? "ok" : "bad";
      said.textContent = answer.done ?? answer.error;
    } catch (error) {
      said.className = "bad";
      said.textContent = `the server of this page does not answer: ${error.message}`;
    }
    isBusy = false;
  };
  const buttons = (...actions) => actions.map((action) => make("button", { type: "button", text: action, onclick: () => change(action) }));
  return panel("Change the run", "kept in actions.jsonl", make("div", { class: "controls" }, token, ...buttons("pause", "resume")),
    make("div", { class: "controls" }, what, ...buttons("requeue", "quarantine")), said);
}

// ---- held-out -------------------------------------------------------------------------------------

function scoreTable() {
  if (!data.scores.length) return panel("Held-out questions", null, make("p", { class: "faint", text: "no version is scored yet: eval.every, or `cusearch eval`" }));
  const categories = [...new Set(data.scores.flatMap((one) => Object.keys(one.categories)))];
  const rows = categories.map((name) => [name, ...data.scores.map((one) => {
    const found = one.categories[name];
    return found ? `${fixed(found.em)} [${found.em_interval.map((value) => fixed(value)).join(", ")}]  ${fixed(found.depth)} searches` : "–";
  })]);
  const section = panel("Exact match", "95 % intervals; mean searches", table(["", ...data.scores.map((one) => one.what)], rows));
  section.classList.add("wide");
  return section;
}

// Exact match by the searches that an episode made, of each version.
function bySearches() {
  const scored = data.scores.filter((one) => one.each.right.length);
  if (!scored.length) return null;
  const counts = scored.map((one) => {
    const found = [];
    one.each.depth.forEach((depth, place) => {
      found[depth] ??= { right: 0, all: 0 };
      found[depth].right += one.each.right[place] ? 1 : 0;
      found[depth].all += 1;
    });
    return found;
  });
  const most = Math.max(...counts.map((found) => found.length));
  const rows = [...Array(most).keys()].map((depth) => [depth, ...counts.map((found) => (found[depth] ? `${fixed(found[depth].right / found[depth].all)} of ${found[depth].all}` : "–"))]);
  const section = panel("By searches made", "exact match of the episodes with so many searches", table(["searches", ...scored.map((one) => one.what)], rows));
  section.classList.add("wide");
  return section;
}

function comparison() {
  const scored = data.scores.filter((one) => one.each.right.length);
  if (scored.length < 2) return null;
  const rightOf = ({ each }) => new Map(data.questions[each.ids].map((id, place) => [id, Boolean(each.right[place])]));
  const choose = (chosen) => make("select", { onchange: show }, ...scored.map((one, place) => make("option", { value: place, text: one.what, selected: place === chosen })));
  const [from, to] = [choose(scored.findIndex(isTrained)), choose(scored.findLastIndex(isTrained))];
  const body = make("div");
  function show() {
    const [a, b] = [rightOf(scored[from.value]), rightOf(scored[to.value])];
    const both = [...a.keys()].filter((id) => b.has(id));
    const gained = both.filter((id) => !a.get(id) && b.get(id));
    const lost = both.filter((id) => a.get(id) && !b.get(id));
    const difference = (gained.length - lost.length) / Math.max(1, both.length);
    const list = (title, ids) => make("details", { class: "plain" }, make("summary", { text: `${title}: ${ids.length}` }), make("p", { class: "text", text: ids.join("\n") }));
    body.replaceChildren(make("p", { text: `${both.length} questions: ${signed(difference, 3)}, sign test p = ${signTest(gained.length, lost.length).toPrecision(2)}` }), list("gained", gained), list("lost", lost));
  }
  show();
  return panel("Gained and lost", null, make("p", { class: "controls" }, make("label", {}, "from ", from), make("label", {}, "to ", to)), body);
}

// Two-sided exact sign test of the discordant questions. Logarithms: 2 ** -n is 0 from 1,075 questions on.
function signTest(gained, lost) {
  const n = gained + lost;
  let [term, below] = [-n * Math.LN2, 0];
  for (let k = 0; k <= Math.min(gained, lost); k += 1) {
    below += Math.exp(term);
    term += Math.log((n - k) / (k + 1));
  }
  return Math.min(1, 2 * below);
}

// ---- episodes -------------------------------------------------------------------------------------

// What the server of this page answers; `error` where it does not.
async function fetched(path) {
  const answer = await fetch(path).catch(() => null);
  return (answer && await answer.json().catch(() => null)) ?? { error: "the server of this page does not answer" };
}

let shownStep = null;
function episodes() {
  const steps = data.recorded ?? [];
  const section = panel("Episodes", data.groups?.counted ?? "the groups of a step side by side, those that taught most first");
  section.classList.add("wide");
  if (!steps.length && !data.groups) {
    section.append(make("p", { class: "faint", text: "no step is recorded: run.records_mib" }));
    return section;
  }
  const known = data.groups?.step;
  if (!steps.includes(shownStep)) shownStep = data.groups && (!data.watches || steps.includes(known)) ? known : steps.at(-1);
  const body = make("div", { "aria-live": "polite" });
  const step = make("select", { onchange: () => { shownStep = Number(step.value); load(); } },
    ...steps.map((number) => make("option", { value: number, text: number, selected: number === shownStep })));
  step.disabled = !data.watches;
  const word = make("input", { type: "search", oninput: filter });
  const outcome = make("select", { onchange: filter }, ...["all", "right", "wrong"].map((text) => make("option", { text })));
  const depth = make("select", { onchange: filter }, make("option", { text: "any" }), ...depths().map((text) => make("option", { text })));
  const taught = make("input", { type: "checkbox", onchange: filter });
  const count = make("span", { class: "faint" });
  section.append(make("p", { class: "controls" }, steps.length ? make("label", {}, "step ", step) : null, make("label", {}, "show ", outcome), make("label", {}, "depth ", depth),
    make("label", {}, "has the word ", word), steps.length ? make("label", {}, taught, " only groups that taught") : null, count), body);

  function filter() {
    let shown = 0;
    for (const group of body.querySelectorAll(".group")) {
      let some = 0;
      for (const one of group.querySelectorAll(":scope > .siblings > details")) {
        one.hidden = (outcome.value !== "all" && outcome.value !== one.dataset.outcome) || (depth.value !== "any" && depth.value !== one.dataset.depth)
          || !`${group.dataset.question} ${one.textContent}`.toLowerCase().includes(word.value.toLowerCase());
        some += !one.hidden;
      }
      group.hidden = !some || (taught.checked && group.dataset.taught === "0");
      shown += group.hidden ? 0 : some;
    }
    count.textContent = `${shown} shown`;
  }
  async function load() {
    if (data.groups?.step !== shownStep) {
      const asked = shownStep;
      body.replaceChildren(make("p", { class: "faint", text: `reading step ${asked} …` }));
      const found = await fetched(`step/${asked}`);
      if (asked !== shownStep) return; // another step was chosen meanwhile
      if (!found.groups) {
        body.replaceChildren(make("p", { class: "bad", text: found.error }));
        return;
      }
      data.groups = found;
    }
    body.replaceChildren(make("p", { class: "controls" }, ...legend(data.groups.colours)), ...data.groups.groups.map(groupShown));
    filter();
  }
  load();
  return section;
}

function summaryTable() {
  if (!data.table) return null;
  const [names, ...rows] = data.table;
  const section = panel("Summary", null, table(names, rows, names.map((_, place) => place).slice(1)));
  section.classList.add("wide");
  return section;
}

function groupShown(group) {
  return make("section", { class: "group", "data-question": group.question, "data-taught": group.taught ? "1" : "0" },
    make("h3", {}, `${group.number}: ${group.question} `, make("span", { class: "faint", text: `gold: ${group.gold}` })),
    siblings(group), data.watches ? earlierOf(group, data.groups.step) : null);
}

const legend = (colours) => Object.entries(colours).map(([name, kind]) => make("span", { class: kind, text: name }));
const siblings = (group) => make("div", { class: "siblings" }, ...group.episodes.map(episodeShown));

// The same question in earlier steps: read when it is asked for.
function earlierOf(group, step) {
  const place = make("div");
  const button = make("button", { type: "button", text: "the same question earlier", onclick: async () => {
    button.disabled = true;
    const found = await fetched(`step/${step}/earlier?question=${encodeURIComponent(group.id)}`);
    const shown = (found.groups ?? []).flatMap((one) => [make("p", { class: "controls" }, `step ${one.step}, ticket ${one.number}`, ...legend(one.colours)), siblings(one)]);
    const nothing = make("p", { class: found.error ? "bad" : "faint", text: found.error ?? "no earlier step that is recorded has it" });
    button.remove();
    place.append(...(shown.length ? shown : [nothing]));
  } });
  place.append(button);
  return place;
}

function episodeShown(one) {
  const isSelected = one.advantage !== null;
  const isTrained = Boolean(data.recorded?.length);
  return make("details", { class: `${one.right ? "right" : "wrong"}${isTrained && !isSelected ? " unselected" : ""}`, "data-outcome": one.right ? "right" : "wrong", "data-depth": one.depth },
    make("summary", {}, make("span", { class: one.right ? "ok" : "bad", text: one.right ? "✓" : "✗" }), make("span", { class: "chip", title: "depth", text: one.depth }),
      make("span", { class: "answer-of", text: one.prediction ?? "no answer" }), isTrained ? make("span", { class: isSelected ? "" : "faint", text: isSelected ? `A ${signed(one.advantage)}` : "not selected" }) : null),
    make("p", { class: "note", text: one.summary }),
    ...one.parts.map(([author, pieces]) => make("div", { class: `text ${author}` }, ...pieces.map(([kind, text]) => (kind ? make("span", { class: kind, text }) : text)))));
}

// ---- settings -------------------------------------------------------------------------------------

function settings() {
  const word = make("input", { type: "search", oninput: () => {
    for (const row of body.querySelectorAll("tbody tr")) row.hidden = !row.textContent.toLowerCase().includes(word.value.toLowerCase());
  } });
  const body = table(null, data.settings.map(([key, value]) => [make("code", { text: key }), make("code", { text: value })]));
  const all = panel("Settings", `${data.settings.length}`, make("p", { class: "controls" }, make("label", {}, "find ", word)), body);
  const starts = data.starts.map((one) => [one.epoch, one.step, one.time, one.host, one.commit ?? "–", one.ended ?? "running, or killed", make("code", { text: one.command })]);
  const begun = panel("Starts", null, table(["epoch", "from step", "began", "host", "commit", "ended", "command"], starts, [0, 1]));
  begun.classList.add("wide");
  const newest = data.starts.at(-1);
  const facts = newest ? [...Object.entries(newest.machine), ...Object.entries(newest.versions)].map(([key, value]) => [key, `${value}`]) : [];
  return [begun, panel("Commands", null, ...data.commands.map((text) => make("p", {}, make("code", { text })))), all, panel("Machine and packages", null, table(null, facts))];
}

// ---- the list of runs -----------------------------------------------------------------------------

let ticked = null;
const OVER = { "reward/em": "Exact match, sampled", "depth/mean": "Mean search depth", "reward/all": "Reward", "groups/mixed_share": "Groups with mixed answers", "staleness/mean": "Staleness", "train/entropy": "Entropy" };
const PALETTE = ["blue", "orange", "green", "violet", "red", "grey"];

function runs() {
  const known = data.runs.filter((one) => !one.problem);
  ticked ??= new Set(known.slice(0, PALETTE.length).map((one) => one.address));
  const rows = data.runs.map((one) => {
    if (one.problem) return ["", one.name, make("span", { class: "bad", text: one.problem }), "", "", "", "", ""];
    const tick = make("input", { type: "checkbox", "aria-label": `show the curves of ${one.name}`, checked: ticked.has(one.address),
      onchange: () => { tick.checked ? ticked.add(one.address) : ticked.delete(one.address); show(); } });
    const { done, steps, outcome, error } = one.progress;
    return [tick, make("a", { href: one.address, text: one.name }), make("span", { class: error ? "bad" : "", text: error ?? outcome }), one.about.method, `${done} of ${steps}`,
      fixed(one.values["reward/em"].at(-1)), fixed(one.last_em), one.firing === null ? make("span", { class: "faint", text: "not known" }) : make("span", one.firing ? { class: "bad", text: `${one.firing}` } : { class: "ok", text: "none" })];
  });
  const list = panel("Runs", "tick those whose curves are to be laid over each other", table(["", "run", "outcome", "method", "steps", "EM, sampled", "held-out EM", "alarms"], rows, [4, 5, 6]));
  list.classList.add("wide");
  return [list, ...Object.entries(OVER).map(([metric, title]) => over(metric, title, known.filter((one) => ticked.has(one.address))))];
}

function over(metric, title, chosen) {
  const steps = [...new Set(chosen.flatMap((one) => one.step))].sort((a, b) => a - b);
  const series = chosen.map((one, number) => {
    const at = new Map(one.step.map((step, place) => [step, one.values[metric][place]]));
    return { label: one.name, colour: PALETTE[number % PALETTE.length], raw: steps.map((step) => at.get(step) ?? null), gaps: true };
  }).filter((one) => one.raw.some(isNumber));
  if (!series.length) return null;
  const place = make("div", { role: "img", "aria-label": `${title} of ${series.map((one) => one.label).join(", ")}` });
  requestAnimationFrame(() => draw(place, { title }, series, steps));
  return panel(title, null, place);
}

async function refreshRuns() {
  const found = await fetched("runs.json");
  document.getElementById("head").replaceChildren(...(found.error ? [make("span", { class: "bad", text: found.error })] : []));
  if (!found.error && !document.hidden && JSON.stringify(found) !== JSON.stringify(data.runs)) {
    data.runs = found;
    show();
  }
  setTimeout(refreshRuns, 10000);
}

// ---- screens --------------------------------------------------------------------------------------

const SCREENS = {
  now: ["Now", () => [data.rows.step.length ? tiles() : null, alarmPanel(), bufferPanel(), workerPanel(), changePanel(), ...charts("reward", "pool", "ofDepth", "groups", "entropy", "time")]],
  learning: ["Learning", () => charts("reward", "groups", "equal", "format", "recall", "entropy", "gradient", "clip")],
  depth: ["Depth", () => charts("depth", "pool", "selected", "ofDepth", "emOfDepth", "mass", "tokens", "phase", "coverage")],
  policy: ["Off policy", () => charts("staleness", "ess", "mismatch", "clip", "stale")],
  machines: ["Machines", () => [workerPanel(), ...charts("time", "idle", "speed", "searches", "latency", "buffered", "redis", "host", "troubles")]],
  episodes: ["Episodes", () => [summaryTable(), episodes()]],
  heldout: ["Held-out", () => [scoreTable(), bySearches(), comparison()]],
  settings: ["Settings", settings],
  runs: ["Runs", runs],
};

const screens = data.screens ?? Object.keys(SCREENS).filter((id) => id !== "runs");
const current = () => (screens.includes(location.hash.slice(1)) ? location.hash.slice(1) : screens[0]);

function head() {
  const nav = document.getElementById("screens");
  if (!nav.children.length) nav.append(...screens.map((id) => make("a", { href: `#${id}`, text: SCREENS[id][0] })));
  [...nav.children].forEach((link, place) => {
    if (screens[place] === current()) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  });
  if (!data.progress) return; // a page of episodes alone
  const { done, steps, step_s: pace, outcome, error } = data.progress;
  const [live, isOpen] = [data.live && !data.live.problem ? data.live : null, outcome.startsWith("running")];
  const left = isOpen && isNumber(steps) && isNumber(pace) ? `, ${seconds((steps - done) * pace)} left` : "";
  const state = data.silent ? "the server of this page does not answer" : isOpen && live ? (live.state.paused ? "paused" : live.learner ? "running" : "no learner is alive") : outcome;
  const isBad = Boolean(error) || data.silent || state.startsWith("no ");
  const said = [["", `${data.about.method} · ${data.about.model} · seed ${data.about.seed}`], [isBad ? "bad" : "ok", `${state}, step ${done} of ${steps}`],
    ["", isNumber(pace) ? `${seconds(pace)} a step${left}` : ""], ["faint", data.about.said.filter(Boolean).join(" · ")], ["bad", error ?? ""]];
  const place = document.getElementById("head");
  if (place.dataset.said === JSON.stringify(said)) return;
  place.dataset.said = JSON.stringify(said);
  place.replaceChildren(...said.filter(([, text]) => text).map(([kind, text]) => make("span", { class: kind || null, text })));
}

function show() {
  head();
  const before = scrollY;
  plots.splice(0).forEach((plot) => plot.destroy());
  const panels = SCREENS[current()][1]().filter(Boolean);
  const nothing = panel(SCREENS[current()][0], null, make("p", { class: "faint", text: "no figures yet" }));
  const typed = changing?.contains(document.activeElement) ? document.activeElement : null;
  const held = document.getElementById("main").contains(document.activeElement) ? document.activeElement.getAttribute("aria-label") : null;
  const [start, end] = [typed?.selectionStart, typed?.selectionEnd];
  document.getElementById("main").replaceChildren(...(panels.length ? panels : [nothing]));
  if (typed?.isConnected) typed.focus({ preventScroll: true });
  else if (held) document.querySelector(`#main [aria-label="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
  if (typed?.isConnected && isNumber(start)) typed.setSelectionRange(start, end);
  scrollTo(0, before);
}

// What Redis holds changes all the time: its panels are drawn again, and nothing else, until a step is done.
const OF_NOW = { alarms: [alarmPanel, "now"], buffer: [bufferPanel, "now"], workers: [workerPanel, "now", "machines"] };
function showNow() {
  head();
  for (const [name, [makePanel, ...places]] of Object.entries(OF_NOW)) {
    const [there, fresh] = [document.querySelector(`[data-now="${name}"]`), makePanel()];
    if (there && fresh && there.textContent !== fresh.textContent) {
      const selected = getSelection();
      if (!selected.isCollapsed && there.contains(selected.anchorNode)) continue;
      const [before, after] = [there, fresh].map((one) => [...one.querySelectorAll(".scroll")]);
      const lefts = before.map((one) => one.scrollLeft);
      there.replaceWith(fresh);
      after.forEach((one, number) => { one.scrollLeft = lefts[number] ?? 0; });
    } else if (Boolean(there) !== Boolean(fresh) && places.includes(current())) return show();
  }
}

// After news: what is read and filtered at leisure stays as it is.
const isCalm = () => ["episodes", "settings", "heldout"].includes(current());
const showNews = () => (isCalm() ? showNow() : show());

function take(news) {
  const { rows, reset, ...others } = news;
  if (reset) {
    data.rows = rows;
    data.groups = null; // perhaps of a step that was made again
  } else if (rows) append(rows);
  Object.assign(data, others, { silent: false });
  if (!Object.keys(others).some((name) => !["live", "last", "count"].includes(name)) && !rows) showNow();
  else showNews();
}

// A hidden page follows nothing: a browser has six connections to a server, and each look costs Redis something.
let stream = null;
function follow() {
  if (stream || document.hidden) return;
  stream = new EventSource(`events?from=${data.count}&last=${encodeURIComponent(data.last)}`);
  stream.onmessage = (event) => take(JSON.parse(event.data));
  stream.onerror = () => {
    leave();
    const silent = data.progress.outcome.startsWith("running");
    const isNew = data.live !== null || data.silent !== silent;
    Object.assign(data, { silent, live: null });
    if (isNew) showNews();
    setTimeout(follow, 5000);
  };
}
function leave() {
  stream?.close();
  stream = null;
}

function append(rows) {
  const known = data.rows.step.length;
  data.rows.step.push(...rows.step);
  for (const name of Object.keys(rows.values)) data.rows.values[name] ??= Array(known).fill(null);
  for (const [name, values] of Object.entries(data.rows.values)) values.push(...(rows.values[name] ?? rows.step.map(() => null)));
}

document.addEventListener("visibilitychange", () => {
  if (document.hidden) return leave();
  if (data.watches) follow();
});
addEventListener("hashchange", show);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
show();
if (data.watches) follow();
if (data.runs) refreshRuns();
