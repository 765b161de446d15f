// Stacks: the charts of counts over steps. Each draws all but the cursor once for a view.

/** The colours of the page's style, by name, and a mix of each with the page for "up to". */
function palette() {
  const style = getComputedStyle(document.documentElement);
  const colours = {};
  const names = ["page", "text", "dim", "line", "panel", "found", "focus", "mark", "select", "stripe"];
  const layers = ["held", "cached", "free", "prompt", "decode", "draft", "lookahead", "pad"];
  const lanes = ["running", "waiting", "queued", "prefill", "decoding", "preempted"];
  for (const name of [...names, ...layers, ...lanes]) {
    colours[name] = style.getPropertyValue(`--${name}`).trim();
  }
  colours.pale = (name) => mixed(colours[name], colours.page, 0.5);
  return colours;
}

/** Two #rrggbb colours in one; `share` of the first. */
function mixed(one, other, share) {
  const parts = [1, 3, 5].map((at) => {
    const pair = [one, other].map((it) => parseInt(it.slice(at, at + 2), 16));
    return Math.round(pair[0] * share + pair[1] * (1 - share));
  });
  return `rgb(${parts.join(",")})`;
}

/** A canvas that fits its place on the screen; sizes in its own pixels. */
class Surface {
  constructor(canvas) {
    this.canvas = canvas;
    this.base = document.createElement("canvas");
  }

  /** Whether there is room to draw in. */
  fit(height) {
    const ratio = window.devicePixelRatio || 1;
    this.ratio = ratio;
    const width = Math.round(this.canvas.clientWidth * ratio);
    const high = Math.round((height ?? this.canvas.clientHeight) * ratio);
    for (const it of [this.canvas, this.base]) {
      if (it.width !== width) it.width = width;
      if (it.height !== high) it.height = high;
    }
    if (height) this.canvas.style.height = `${height}px`;
    this.left = Math.round(gutter() * ratio);
    this.width = width - this.left;
    this.height = high;
    return this.width > 0 && high > 0;
  }

  /** What was drawn for the view, and on it what `over` draws. */
  show(over) {
    const context = this.canvas.getContext("2d");
    context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    if (this.base.width && this.base.height) context.drawImage(this.base, 0, 0);
    over(context, this);
  }

  x(place, view) {
    return this.left + ((place - view.from) / (view.to - view.from)) * this.width;
  }

  font(context, size) {
    context.font = `${size * this.ratio}px system-ui, "DejaVu Sans", sans-serif`;
  }
}

/** Pixels of the screen left of all charts, for what stands on their axes. */
function gutter() {
  return window.innerWidth < 600 ? 40 : 56;
}

/** Layers on each other: solid up to the smallest value in a pixel, pale up to the largest. */
function drawStack(surface, edges, names, view, top, colours) {
  const context = surface.base.getContext("2d");
  context.clearRect(0, 0, surface.base.width, surface.base.height);
  const foot = surface.height - 16 * surface.ratio;
  const y = (value) => foot - (Math.min(value, top) / top) * (foot - 4 * surface.ratio);
  for (let layer = edges.length - 1; layer >= 0; layer--) {
    const [low, high] = bins(edges[layer], view, surface.width);
    fill(context, surface, high, y, foot, colours.pale(names[layer]));
    fill(context, surface, low, y, foot, colours[names[layer]]);
  }
  drawAxes(context, surface, view, top, foot, colours);
}

function fill(context, surface, values, y, foot, colour) {
  context.fillStyle = colour;
  context.beginPath();
  context.moveTo(surface.left, foot);
  for (let pixel = 0; pixel < values.length; pixel++) {
    const at = y(values[pixel]);
    context.lineTo(surface.left + pixel, at);
    context.lineTo(surface.left + pixel + 1, at);
  }
  context.lineTo(surface.left + values.length, foot);
  context.fill();
}

/** Lines: from the smallest to the largest value of each pixel. */
function drawLines(surface, columns, names, view, top, colours) {
  const context = surface.base.getContext("2d");
  context.clearRect(0, 0, surface.base.width, surface.base.height);
  const foot = surface.height - 16 * surface.ratio;
  const y = (value) => foot - (Math.max(0, value) / top) * (foot - 4 * surface.ratio);
  columns.forEach((values, number) => {
    const [low, high] = bins(values, view, surface.width);
    const thick = (number ? 1.5 : 2.5) * surface.ratio;
    context.fillStyle = colours[names[number]];
    let before = null;
    for (let pixel = 0; pixel < low.length; pixel++) {
      const upper = Math.max(high[pixel], before ? Math.min(before[0], before[1]) : -1);
      const lower = Math.min(low[pixel], before ? Math.max(before[0], before[1]) : Infinity);
      const from = y(Math.max(upper, high[pixel]));
      context.fillRect(surface.left + pixel, from - thick / 2, 1, y(lower) - from + thick);
      before = [low[pixel], high[pixel]];
    }
  });
  drawAxes(context, surface, view, top, foot, colours);
}

function drawAxes(context, surface, view, top, foot, colours) {
  const ratio = surface.ratio;
  surface.font(context, 11);
  context.fillStyle = colours.dim;
  context.textAlign = "right";
  context.textBaseline = "top";
  context.fillText(grouped(top), surface.left - 5 * ratio, 1 * ratio);
  context.textBaseline = "bottom";
  context.fillText("0", surface.left - 5 * ratio, foot + 1);
  context.fillStyle = colours.line;
  context.fillRect(surface.left, foot, surface.width, ratio);
  context.textBaseline = "top";
  for (const [place, text] of ticks(view, surface.width / ratio)) {
    const x = surface.x(place + 0.5, view);
    if (x > surface.left + surface.width) continue;
    context.fillStyle = colours.line;
    context.fillRect(Math.round(x), foot, ratio, 4 * ratio);
    context.fillStyle = colours.dim;
    const half = context.measureText(text).width / 2;
    const inside = Math.min(x, surface.left + surface.width - half);
    context.textAlign = "center";
    context.fillText(text, Math.max(surface.left + half - 4, inside), foot + 4 * ratio);
  }
}

/** Places with a mark on the axis, and the step's number in words. */
function ticks(view, width) {
  const numbers = page.columns["step.step"];
  const each = roundStep((view.to - view.from) / Math.max(1, width / 80));
  const found = [];
  const first = numbers[0] % each;
  const begin = Math.ceil((view.from + first) / each) * each - first;
  for (let place = begin; place < view.to; place += each) {
    if (place >= 0 && place < numbers.length) found.push([place, grouped(numbers[place])]);
  }
  return found;
}
