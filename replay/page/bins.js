// Bins: from steps to pixels and back, and numbers as words. Draws nothing.

const SPAN_MIN = 4;

/** Smallest and largest value of the steps under each of `width` pixels; [low, high]. */
function bins(values, view, width) {
  const low = new Float64Array(width);
  const high = new Float64Array(width);
  for (let pixel = 0; pixel < width; pixel++) {
    const [first, last] = under(view, width, pixel, values.length);
    let least = values[first];
    let most = least;
    for (let at = first + 1; at <= last; at++) {
      const value = values[at];
      if (value < least) least = value;
      if (value > most) most = value;
    }
    low[pixel] = least;
    high[pixel] = most;
  }
  return [low, high];
}

/** First and last step (places) under a pixel. */
function under(view, width, pixel, count) {
  const scale = (view.to - view.from) / width;
  const first = Math.floor(view.from + pixel * scale);
  const last = Math.ceil(view.from + (pixel + 1) * scale) - 1;
  const inside = (at) => Math.max(0, Math.min(count - 1, at));
  return [inside(first), inside(Math.max(first, last))];
}

/** A view moved and scaled so that it lies within all steps. */
function within(view, count) {
  const least = Math.min(SPAN_MIN, count);
  const span = Math.max(least, Math.min(count, view.to - view.from));
  const from = Math.max(0, Math.min(count - span, view.from));
  return {from, to: from + span};
}

/** Zoomed by a factor (2: twice as many steps), with the step `at` kept where it is. */
function zoomed(view, at, factor, count) {
  const least = Math.min(SPAN_MIN, count);
  const span = view.to - view.from;
  const wanted = Math.max(least, Math.min(count, span * factor));
  const from = at - ((at - view.from) * wanted) / span;
  return within({from, to: from + wanted}, count);
}

/** Sums of the first columns, as many as there are: the edges of a stack. Unknown counts as 0. */
function stacked(columns) {
  const edges = [];
  for (const values of columns) {
    const below = edges.at(-1);
    const edge = new Int32Array(values.length);
    for (let at = 0; at < values.length; at++) {
      edge[at] = Math.max(0, values[at]) + (below ? below[at] : 0);
    }
    edges.push(edge);
  }
  return edges;
}

/** A round distance between marks of an axis: 1, 2 or 5 times a power of ten. */
function roundStep(least) {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, least)));
  return [1, 2, 5, 10].map((it) => it * power).find((it) => it >= least);
}

function largest(values) {
  let most = 0;
  for (const value of values) if (value > most) most = value;
  return most;
}

/** "7" or "7-9"; of a column over some steps. */
function range(values, first, last) {
  let least = values[first];
  let most = least;
  for (let at = first + 1; at <= last; at++) {
    least = Math.min(least, values[at]);
    most = Math.max(most, values[at]);
  }
  if (most < 0) return "unknown";
  return least === most ? grouped(most) : `${grouped(Math.max(0, least))}\u2013${grouped(most)}`;
}

/** Thousands apart. */
function grouped(number) {
  return String(number).replace(/\B(?=(\d{3})+$)/g, ",");
}

function plural(count, noun) {
  return `${grouped(count)} ${noun}${count === 1 ? "" : "s"}`;
}

function duration(microseconds) {
  if (microseconds < 1000) return `${microseconds} \u00b5s`;
  if (microseconds < 1e6) return `${(microseconds / 1000).toPrecision(3)} ms`;
  return `${(microseconds / 1e6).toPrecision(3)} s`;
}
