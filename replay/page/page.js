// Page: the view, the cursor, and what pointer and keys do to them.

const page = {
  view: {from: 0, to: 1}, cursor: -1, pixel: null, selected: -1, list: [], group: 0, whole: true,
};
const byId = (id) => document.getElementById(id);
const PURPOSES = {
  prompt: "prompt", decode: "decode", draft: "draft (guessed)",
  lookahead: "lookahead (issued before its token is known)", pad: "pad (no token's)",
};

async function begin() {
  if (typeof DecompressionStream === "undefined") {
    trouble("The charts need a browser of 2023 or newer. The verdict above is complete without them.");
    return;
  }
  try {
    Object.assign(page, await unpack(byId("data").textContent));
  } catch (error) {
    trouble(`The charts' data is damaged (${error.message}): make the page again.`);
    return;
  }
  page.count = page.columns["step.step"].length;
  if (!page.count) {
    trouble("There are no charts: no step was planned on this tape, or in the part of it chosen.");
    return;
  }
  page.lanes = new Lanes(page.told, page.columns, page.count);
  page.view = {from: 0, to: page.count};
  page.found = page.told.divergence;
  page.foundLane = page.found ? page.lanes.lane.request.lastIndexOf(page.found.sequence) : -1;
  page.batch = stacked(page.told.rows.map((name) => page.columns[`step.${name}`]));
  page.surfaces = {};
  for (const id of ["overview", "pool", "batch", "load", "lanes"]) page.surfaces[id] = new Surface(byId(id));
  byId("charts").hidden = false;
  byId("plots").ariaValueMax = String(page.count - 1);
  takeColours();
  choosePool(page.told.groups[0]?.group ?? -1);
  listen();
  if (page.found && page.found.place >= 0) {
    byId("found").hidden = false;
    page.cursor = page.found.place;
    page.selected = page.foundLane;
  }
  changed();
  document.documentElement.dataset.ready = "yes";
}

function trouble(text) {
  byId("trouble").textContent = text;
  byId("trouble").hidden = false;
  document.documentElement.dataset.ready = "no";
}

function choosePool(group) {
  page.group = group;
  const names = group < 0 ? [] : ["held", "cached"];
  page.pool = stacked(names.map((name) => page.columns[`step.${name}_${group}`]));
}

function takeColours() {
  page.colours = palette();
  legends();
}

/** The view or what is drawn in it changed: draw again, once, with the next frame. */
function changed() {
  page.stale = true;
  request();
}

function request() {
  if (page.waiting) return;
  page.waiting = true;
  requestAnimationFrame(() => {
    page.waiting = false;
    if (page.stale) drawAll();
    page.stale = false;
    showAll();
  });
}

function drawAll() {
  const {surfaces, view, colours} = page;
  drawOverview();
  const group = page.told.groups.find((it) => it.group === page.group);
  if (group && surfaces.pool.fit()) {
    const used = largest(page.pool[1]);
    drawStack(surfaces.pool, page.pool, ["held", "cached"], view, page.whole ? group.blocks : Math.max(1, used), colours);
    if (page.told.broken_at >= 0) hatch(surfaces.pool, page.told.broken_at);
  }
  if (surfaces.batch.fit()) {
    const top = Math.max(1, largest(bins(page.batch.at(-1), view, surfaces.batch.width)[1]));
    drawStack(surfaces.batch, page.batch, page.told.rows, view, top, colours);
    drawFailures(surfaces.batch);
  }
  if (surfaces.load.fit()) {
    const pair = [page.columns["step.waiting"], page.columns["step.sequences"]];
    const tops = pair.map((it) => largest(bins(it, view, surfaces.load.width)[1]));
    drawLines(surfaces.load, pair, ["waiting", "running"], view, Math.max(1, ...tops), colours);
  }
  page.list = page.lanes.chosen(view, byId("which").value, byId("find").value);
  page.rows = page.lanes.rows(page.list, (2 * (view.to - view.from)) / Math.max(1, surfaces.batch.width));
  drawLanes();
  const {first, last} = inView();
  const numbers = page.columns["step.step"];
  byId("range").textContent = `steps ${grouped(numbers[first])}\u2013${grouped(numbers[last])} (${grouped(last - first + 1)} of ${grouped(page.count)})`;
  const packed = page.rows.length < page.list.length ? `, in ${grouped(page.rows.length)} rows: zoom in until each has its own` : "";
  byId("shown").textContent = page.list.length ? `${grouped(page.list.length)} of ${plural(page.lanes.count, "request")}${packed}` : "no request: choose another list, or move";
}

function drawLanes() {
  const scroll = byId("scroll");
  const most = Math.max(120, Math.round(window.innerHeight * 0.6));
  const height = Math.max(LANE, Math.min(page.rows.length * LANE, most));
  byId("spacer").style.height = `${page.rows.length * LANE}px`;
  const surface = page.surfaces.lanes;
  if (surface.fit(height)) {
    page.lanes.draw(surface, page.rows, page.view, scroll.scrollTop, page.colours, page.selected, page.foundLane);
  }
}

/** All steps in one strip; what is in view is framed. */
function drawOverview() {
  const surface = page.surfaces.overview;
  if (!surface.fit()) return;
  const all = {from: 0, to: page.count};
  const context = surface.base.getContext("2d");
  context.clearRect(0, 0, surface.base.width, surface.base.height);
  const values = page.batch.at(-1);
  const [low, high] = bins(values, all, surface.width);
  const top = Math.max(1, largest(values));
  context.fillStyle = page.colours.panel;
  context.fillRect(surface.left, 0, surface.width, surface.height);
  for (let pixel = 0; pixel < low.length; pixel++) {
    for (const [edge, colour] of [[high, page.colours.line], [low, page.colours.dim]]) {
      const size = (edge[pixel] / top) * surface.height;
      context.fillStyle = colour;
      context.fillRect(surface.left + pixel, surface.height - size, 1, size);
    }
  }
}

/** A cross at the top of each pixel with a step that failed. */
function drawFailures(surface) {
  let before = -Infinity;
  for (const [place] of page.told.failures) {
    const x = surface.x(place + 0.5, page.view);
    if (x < surface.left || x > surface.left + surface.width || x - before < 6 * surface.ratio) continue;
    before = x;
    drawGlyph(surface.base.getContext("2d"), "broken", x, 7 * surface.ratio, surface.ratio, page.colours);
  }
}

/** What is not known, from a place on. */
function hatch(surface, place) {
  const context = surface.base.getContext("2d");
  const from = Math.max(surface.left, surface.x(place, page.view));
  if (from >= surface.left + surface.width) return;
  const foot = surface.height - 16 * surface.ratio;
  context.save();
  context.beginPath();
  context.rect(from, 0, surface.left + surface.width - from, foot);
  context.clip();
  context.strokeStyle = page.colours.line;
  context.lineWidth = surface.ratio;
  context.beginPath();
  for (let x = from - foot; x < surface.left + surface.width; x += 9 * surface.ratio) {
    context.moveTo(x, foot);
    context.lineTo(x + foot, 0);
  }
  context.stroke();
  surface.font(context, 12);
  context.fillStyle = page.colours.text;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText("not known from here on", from + 8 * surface.ratio, foot / 2);
  context.restore();
}

function showAll() {
  const all = {from: 0, to: page.count};
  for (const [id, surface] of Object.entries(page.surfaces)) {
    const view = id === "overview" ? all : page.view;
    surface.show((context) => {
      if (id === "overview") frame(context, surface);
      else stripe(context, surface, page.cursor, page.colours.focus, view, false);
      if (page.found && page.found.place >= 0) {
        stripe(context, surface, page.found.place, page.colours.found, view, id === "pool");
      }
    });
  }
  say();
}

function frame(context, surface) {
  const all = {from: 0, to: page.count};
  const from = surface.x(page.view.from, all);
  const to = surface.x(page.view.to, all);
  context.strokeStyle = page.colours.focus;
  context.lineWidth = 2 * surface.ratio;
  context.strokeRect(from + 1, 1, Math.max(3, to - from - 2), surface.height - 2);
}

/** A step's place, from top to bottom. The divergence has its name beside it. */
function stripe(context, surface, place, colour, view, named) {
  if (place < 0 || place + 0.5 < view.from || place >= view.to) return;
  const x = surface.x(place + 0.5, view);
  const ratio = surface.ratio;
  context.fillStyle = colour;
  const axis = ["overview", "lanes"].includes(surface.canvas.id) ? 0 : 16 * ratio;
  context.fillRect(x - ratio, 0, 2 * ratio, surface.height - axis);
  if (!named) return;
  surface.font(context, 12);
  const text = `diverged: step ${grouped(page.found.step)}`;
  const width = context.measureText(text).width + 10 * ratio;
  const left = x + width < surface.left + surface.width ? x : x - width;
  context.fillRect(left, 0, width, 17 * ratio);
  context.fillStyle = page.colours.page;
  context.textAlign = "left";
  context.textBaseline = "middle";
  context.fillText(text, left + 5 * ratio, 9 * ratio);
}

function inView() {
  const last = Math.min(page.count, Math.ceil(page.view.to)) - 1;
  return {first: Math.max(0, Math.floor(page.view.from)), last};
}

/** The step or steps that the cursor is on, in words. */
function say() {
  const readout = byId("readout");
  const plots = byId("plots");
  if (page.cursor < 0) {
    readout.textContent = "Point at a step, or give the charts the focus and use the arrow keys.";
    plots.ariaValueText = "no step chosen";
    return;
  }
  const [first, last] = page.pixel ?? [page.cursor, page.cursor];
  const text = stepWords(first, last);
  const lane = page.selected < 0 ? "" : laneLine(page.selected, page.cursor);
  readout.textContent = lane ? `${text}\n${lane}` : text;
  plots.ariaValueNow = String(page.cursor);
  plots.ariaValueText = lane ? `${lane}. ${text}` : text;
}

function laneLine(lane, place) {
  return [`${page.lanes.called(lane)}: ${page.lanes.phase(lane, place)}`, ...page.lanes.words(lane)].join("; ");
}

function stepWords(first, last) {
  const {columns, told} = page;
  const numbers = columns["step.step"];
  const parts = [];
  const of = (name) => range(columns[`step.${name}`], first, last);
  if (page.group >= 0) {
    const blocks = told.groups.find((it) => it.group === page.group).blocks;
    const where = told.groups.length > 1 ? ` of group ${page.group}` : "";
    const [held, cached] = [`held_${page.group}`, `cached_${page.group}`].map((name) => columns[`step.${name}`]);
    const free = Array.from({length: last - first + 1}, (_, at) => held[first + at] < 0 ? -1 : blocks - held[first + at] - cached[first + at]);
    parts.push(`blocks${where}: ${range(held, first, last)} held, ${range(cached, first, last)} cached, ${range(free, 0, free.length - 1)} free of ${grouped(blocks)}`);
  }
  const rows = told.rows.filter((name) => largest(columns[`step.${name}`].subarray(first, last + 1)) > 0);
  const kinds = rows.map((name) => `${of(name)} ${name}`).join(", ");
  parts.push(`rows: ${range(page.batch.at(-1), first, last)}${kinds ? ` (${kinds})` : ""}`);
  parts.push(`requests: ${of("sequences")} in the batch, ${of("waiting")} waiting`);
  if (largest(columns["step.time_us"].subarray(first, last + 1)) > 0) {
    const times = columns["step.time_us"].subarray(first, last + 1);
    const least = Math.max(0, times.reduce((one, other) => Math.min(one, other)));
    const most = largest(times);
    parts.push(`took ${least === most ? "" : `${duration(least)}\u2013`}${duration(most)}`);
  }
  parts.push(...troubles(first, last));
  const events = page.lanes.events(first, last, 5);
  if (events) parts.push(events);
  const name = first === last ? `step ${grouped(numbers[first])}` : `steps ${grouped(numbers[first])}\u2013${grouped(numbers[last])}, under this pixel`;
  return `${name}: ${parts.join(" \u00b7 ")}`;
}

function troubles(first, last) {
  const parts = [];
  const flags = page.columns["step.flags"];
  let all = 0;
  for (let at = first; at <= last; at++) all |= flags[at];
  const failure = page.told.failures.find(([place]) => place >= first && place <= last);
  if (failure) parts.push(`FAILED at ${failure[1]}: ${failure[2]}`);
  if (all & 2) parts.push("the pages were lost");
  if (all & 4) parts.push("never answered on this tape");
  if (all & 8) parts.push("records are missing before it");
  if (page.found && page.found.place >= first && page.found.place <= last) parts.push(`DIVERGED here (${page.found.kind})`);
  if (page.told.broken_at >= first && page.told.broken_at <= last) parts.push(page.told.broken);
  return parts;
}

begin().catch((error) => trouble(`The charts cannot be drawn (${error.message}). The verdict above is complete without them.`));
