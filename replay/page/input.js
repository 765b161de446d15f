// Input: legends, pointer, wheel, touch and keys.

function legends() {
  const {told} = page;
  const entry = (paint, text) => {
    const it = document.createElement("span");
    const sample = document.createElement("canvas");
    sample.width = 32;
    sample.height = 24;
    sample.ariaHidden = "true";
    paint(sample.getContext("2d"));
    it.append(sample, text);
    return it;
  };
  const box = (name, height = 24) => (context) => {
    context.fillStyle = page.colours[name];
    context.fillRect(0, (24 - height) / 2, 32, height);
  };
  const glyph = (kind) => (context) => drawGlyph(context, kind, 16, 12, 2, page.colours);
  byId("pool-legend").replaceChildren(
    entry(box("held"), "held: a request uses it"),
    entry(box("cached"), "cached: kept for reuse, nobody uses it"),
    entry(box("free"), "free"),
    ...poolChoices(),
  );
  const used = told.rows.filter((name) => largest(page.columns[`step.${name}`]) > 0);
  byId("batch-legend").replaceChildren(
    ...used.map((name) => entry(box(name), PURPOSES[name])),
    ...(told.failures.length ? [entry(glyph("broken"), "a step that failed")] : []),
  );
  byId("load-legend").replaceChildren(entry(box("running", 6), "in the batch"), entry(box("waiting", 6), "waiting"));
  const dashes = (context) => {
    context.fillStyle = page.colours.preempted;
    for (let x = 0; x < 32; x += 12) context.fillRect(x, 8, 8, 8);
  };
  const marks = new Set(told.marks.filter((_, kind) => page.columns["mark.kind"].includes(kind)));
  const shown = [["adopted", "prefix found"], ["rewound", "rewound"], ["trimmed", "trimmed"], ["forked", "forked"]];
  const other = ["cancelled", "failed", "reset"].filter((it) => marks.has(it));
  byId("lane-legend").replaceChildren(
    entry(box("queued", 8), "queued"), entry(box("prefill"), "prefill"), entry(box("decoding", 16), "decode"),
    ...(marks.has("preempted") ? [entry(dashes, "preempted, waits"), entry(glyph("preempted"), "preempted")] : []),
    ...shown.filter(([kind]) => marks.has(kind)).map(([kind, text]) => entry(glyph(kind), text)),
    ...(other.length ? [entry(glyph("reset"), other.join(" or "))] : []),
    entry(glyph("end"), "ended"), entry(glyph("broken"), "ended otherwise"),
  );
}

/** Which group's pool, and to which scale. */
function poolChoices() {
  const {told} = page;
  const found = [];
  const select = (label, options, value, chosen) => {
    const it = document.createElement("select");
    it.ariaLabel = label;
    for (const [key, text] of options) it.add(new Option(text, key, false, String(key) === String(value)));
    it.addEventListener("change", () => {
      chosen(it.value);
      changed();
    });
    found.push(it);
  };
  if (told.groups.length > 1) {
    select("Group", told.groups.map((it) => [it.group, it.text]), page.group, (value) => choosePool(Number(value)));
  } else if (told.groups.length) found.push(document.createTextNode(told.groups[0].text));
  else found.push(document.createTextNode("the model holds its own caches: there are no blocks"));
  if (told.groups.length) {
    select("Scale", [["pool", "up to the whole pool"], ["used", "up to the most used"]], page.whole ? "pool" : "used", (value) => {
      page.whole = value === "pool";
    });
  }
  return found;
}

function listen() {
  byId("in").onclick = () => zoom(0.5);
  byId("out").onclick = () => zoom(2);
  byId("all").onclick = () => look({from: 0, to: page.count});
  byId("found").onclick = goToFound;
  byId("goto").onchange = () => goToStep(byId("goto").value);
  byId("which").onchange = changed;
  byId("find").oninput = changed;
  byId("scroll").addEventListener("scroll", () => {
    drawLanes();
    request();
  });
  for (const id of ["pool", "batch", "load", "lanes"]) hold(byId(id), id);
  overviewInput();
  byId("plots").addEventListener("keydown", key);
  new ResizeObserver(changed).observe(byId("plots"));
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    takeColours();
    changed();
  });
}

function look(view) {
  page.view = within(view, page.count);
  page.pixel = null;
  byId("tip").hidden = true;
  changed();
}

function zoom(factor, at) {
  const middle = (page.view.from + page.view.to) / 2;
  const seen = page.cursor >= page.view.from && page.cursor < page.view.to;
  look(zoomed(page.view, at ?? (seen ? page.cursor + 0.5 : middle), factor, page.count));
}

/** The cursor on a step; the view follows where it must. */
function moveTo(place) {
  page.cursor = Math.max(0, Math.min(page.count - 1, place));
  page.pixel = null;
  byId("tip").hidden = true;
  const {from, to} = page.view;
  if (page.cursor < from || page.cursor + 1 > to) look({from: page.cursor - (to - from) / 2, to: page.cursor + (to - from) / 2});
  request();
}

function goToFound() {
  if (!page.found || page.found.place < 0) return;
  const half = Math.min(40, page.count / 2);
  page.selected = page.foundLane;
  look({from: page.found.place - half, to: page.found.place + half});
  moveTo(page.found.place);
  requestAnimationFrame(showSelected);
}

function goToStep(text) {
  const wanted = Number(text.replaceAll(",", "").trim());
  const field = byId("goto");
  const place = text.trim() && Number.isInteger(wanted) ? page.columns["step.step"].indexOf(wanted) : -1;
  field.setAttribute("aria-invalid", String(place < 0));
  field.setCustomValidity(place < 0 ? "there is no such step here" : "");
  field.reportValidity();
  if (place < 0) return;
  const half = Math.min(40, (page.view.to - page.view.from) / 2);
  look({from: place - half, to: place + half});
  moveTo(place);
}

/** The chosen lane, scrolled to where it can be seen. */
function showSelected() {
  const row = page.rows.findIndex((it) => it.includes(page.selected));
  const scroll = byId("scroll");
  if (row < 0) return;
  const top = row * LANE;
  if (top < scroll.scrollTop || top + LANE > scroll.scrollTop + scroll.clientHeight) {
    scroll.scrollTop = top - scroll.clientHeight / 2;
  }
}

function choose(by) {
  if (!page.list.length) return;
  const row = page.list.indexOf(page.selected);
  const next = row < 0 ? 0 : Math.max(0, Math.min(page.list.length - 1, row + by));
  page.selected = page.list[next];
  if (page.cursor < 0) page.cursor = Math.max(0, Math.min(page.count - 1, page.lanes.lane.start[page.selected]));
  showSelected();
  changed();
}

function key(event) {
  if (["INPUT", "SELECT"].includes(event.target.tagName) || event.ctrlKey || event.metaKey || event.altKey) return;
  const span = Math.max(1, Math.round((page.view.to - page.view.from) / (event.shiftKey ? 1 : Infinity)));
  const start = page.cursor < 0 ? Math.floor(page.view.from) - 1 : page.cursor;
  const actions = {
    ArrowLeft: () => moveTo(page.cursor < 0 ? Math.ceil(page.view.to) - 1 : start - span),
    ArrowRight: () => moveTo(start + span),
    PageUp: () => moveTo(start - Math.round(page.view.to - page.view.from)),
    PageDown: () => moveTo(start + Math.round(page.view.to - page.view.from)),
    Home: () => moveTo(0),
    End: () => moveTo(page.count - 1),
    ArrowUp: () => choose(-1),
    ArrowDown: () => choose(1),
    "+": () => zoom(0.5), "=": () => zoom(0.5), "-": () => zoom(2),
    "0": () => look({from: 0, to: page.count}),
    d: goToFound,
    Escape: () => {
      page.cursor = page.selected = -1;
      page.pixel = null;
      byId("tip").hidden = true;
      changed();
    },
  };
  const action = actions[event.key];
  if (!action) return;
  event.preventDefault();
  action();
}

/** Drag, pinch, wheel, double click and hover on one chart. */
function hold(canvas, id) {
  const surface = page.surfaces[id];
  const held = new Map();
  let moved = 0;
  const placeAt = (x) => page.view.from + ((x - gutter()) / (surface.width / surface.ratio)) * (page.view.to - page.view.from);
  canvas.addEventListener("pointerdown", (event) => {
    held.set(event.pointerId, event.offsetX);
    moved = 0;
    canvas.setPointerCapture(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (!held.has(event.pointerId)) {
      hover(event, surface, id);
      return;
    }
    const before = [...held.values()];
    held.set(event.pointerId, event.offsetX);
    const after = [...held.values()];
    moved += Math.abs(event.movementX);
    if (held.size === 1) {
      const by = placeAt(before[0]) - placeAt(after[0]);
      look({from: page.view.from + by, to: page.view.to + by});
    } else if (held.size === 2) {
      const [old, now] = [before, after].map(([one, other]) => Math.max(8, Math.abs(one - other)));
      zoom(old / now, placeAt((after[0] + after[1]) / 2));
    }
  });
  const release = (event) => {
    if (held.delete(event.pointerId) && moved < 4 && event.type === "pointerup") hover(event, surface, id, true);
  };
  canvas.addEventListener("pointerup", release);
  canvas.addEventListener("pointercancel", release);
  canvas.addEventListener("pointerleave", () => { byId("tip").hidden = true; });
  canvas.addEventListener("dblclick", (event) => zoom(0.25, placeAt(event.offsetX)));
  canvas.addEventListener("wheel", (event) => {
    const sideways = event.shiftKey ? event.deltaY : event.deltaX;
    if (event.ctrlKey || event.metaKey) zoom(2 ** (event.deltaY / 120), placeAt(event.offsetX));
    else if (Math.abs(sideways) > Math.abs(event.shiftKey ? 0 : event.deltaY)) {
      const by = placeAt(sideways) - placeAt(0);
      look({from: page.view.from + by, to: page.view.to + by});
    } else return;
    event.preventDefault();
  }, {passive: false});
}

/** What is under the pointer: the steps of its pixel, and on the lanes the request. */
function hover(event, surface, id, click = false) {
  const pixel = Math.round((event.offsetX - gutter()) * surface.ratio);
  if (pixel < 0 || pixel >= surface.width) return;
  page.pixel = under(page.view, surface.width, pixel, page.count);
  page.cursor = page.pixel[0];
  const row = page.rows[Math.floor((event.offsetY + byId("scroll").scrollTop) / LANE)];
  const near = (4 * (page.view.to - page.view.from)) / surface.width;
  const lane = id === "lanes" ? page.lanes.at(row, page.cursor, near) : undefined;
  if (lane !== undefined) {
    if (click) {
      page.selected = page.selected === lane ? -1 : lane;
      page.stale = true;
    }
    tip(event, laneTip(lane));
  } else byId("tip").hidden = true;
  request();
}

function laneTip(lane) {
  const {lanes} = page;
  // A few pixels around: marks are wider than one.
  const around = Math.ceil((5 * (page.view.to - page.view.from)) / page.surfaces.lanes.width);
  const near = around > 1 ? around : 0;
  return [
    lanes.called(lane), ...lanes.words(lane),
    `at step ${grouped(page.columns["step.step"][page.cursor])}: ${lanes.phase(lane, page.cursor)}`,
    ...lanes.happened(lane, page.pixel[0] - near, page.pixel[1] + near, 6),
  ].join("\n");
}

function tip(event, text) {
  const box = byId("tip");
  const plots = byId("plots").getBoundingClientRect();
  box.textContent = text;
  box.hidden = false;
  const left = event.clientX - plots.left + 14;
  const top = event.clientY - plots.top + 16;
  box.style.left = `${Math.max(0, Math.min(left, plots.width - box.offsetWidth - 4))}px`;
  const below = event.clientY + 16 + box.offsetHeight < window.innerHeight;
  box.style.top = `${below ? top : top - box.offsetHeight - 30}px`;
}

/** Press or drag on the strip: that part comes into view. */
function overviewInput() {
  const canvas = byId("overview");
  const surface = page.surfaces.overview;
  const go = (event) => {
    const place = ((event.offsetX - gutter()) / (surface.width / surface.ratio)) * page.count;
    const half = (page.view.to - page.view.from) / 2;
    look({from: place - half, to: place + half});
  };
  canvas.addEventListener("pointerdown", (event) => {
    canvas.setPointerCapture(event.pointerId);
    go(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (event.buttons) go(event);
  });
}
