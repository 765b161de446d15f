// Lanes: one line a request, those that concern the view; what stands under a point of them.

const LANE = 18;
const LANES_ALONE = 60;
const IN_ORDER = new Set(["", "stop", "length"]);
const THICK = {queued: 4, prefill: 12, decode: 8, preempted: 4};
const COLOUR = {queued: "queued", prefill: "prefill", decode: "decoding", preempted: "preempted"};

class Lanes {
  constructor(told, columns, steps) {
    this.told = told;
    this.steps = steps;
    for (const [name, values] of Object.entries(columns)) {
      const [owner, field] = name.split(".");
      if (owner !== "step") (this[owner] ??= {})[field] = values;
    }
    this.count = this.lane.request.length;
    this.spans = starts(this.span.lane, this.count);
    this.marks = starts(this.mark.lane, this.count);
    this.places = byPlace(this.mark.place, Math.max(1, steps));
    this.rewound = told.marks.indexOf("rewound");
  }

  /** The place behind a lane's last step. */
  end(lane) {
    return this.lane.end[lane] < 0 ? this.steps : this.lane.end[lane];
  }

  /** Lanes to draw: `which` as the page's list has them, `text` in number or name. */
  chosen(view, which, text) {
    const found = [];
    const wanted = text.trim().toLowerCase();
    for (let lane = 0; lane < this.count; lane++) {
      if (wanted) {
        const name = this.told.names[lane].toLowerCase();
        if (String(this.lane.request[lane]) !== wanted && !name.includes(wanted)) continue;
      } else if (!this.shown(lane, view, which)) continue;
      found.push(lane);
    }
    return found;
  }

  shown(lane, view, which) {
    if (which === "all") return true;
    if (which === "preempted") return this.lane.preemptions[lane] > 0;
    if (which === "ended") return !IN_ORDER.has(this.reason(lane));
    if (which === "rewound") {
      for (let at = this.marks[lane]; at < this.marks[lane + 1]; at++) {
        if (this.mark.kind[at] === this.rewound) return true;
      }
      return false;
    }
    return this.lane.start[lane] < view.to && Math.max(this.end(lane), this.lane.start[lane] + 1) > view.from;
  }

  reason(lane) {
    return this.told.reasons[this.lane.ended[lane]];
  }

  called(lane) {
    const name = this.told.names[lane];
    return `request ${this.lane.request[lane]}` + (name ? ` \u201c${name}\u201d` : "");
  }

  /** "decode, from step 33", of a lane at a place. */
  phase(lane, place) {
    for (let at = this.spans[lane]; at < this.spans[lane + 1]; at++) {
      if (this.span.first[at] <= place && place < this.span.last[at]) {
        const since = page.columns["step.step"][this.span.first[at]];
        return `${this.told.phases[this.span.phase[at]]}, since step ${grouped(since)}`;
      }
    }
    if (place < this.lane.start[lane]) return "not here yet";
    return place >= this.end(lane) ? "gone" : "admitted";
  }

  /** A request in words, line by line. */
  words(lane) {
    const it = this.lane;
    const found = it.adopted[lane] ? ` (${grouped(it.adopted[lane])} found in the prefix index)` : "";
    const lines = [`prompt of ${plural(it.prompt_tokens[lane], "token")}${found}`];
    const answer = it.answer_tokens[lane];
    const most = grouped(it.max_tokens[lane]);
    lines[0] += answer < 0 ? `, answer of at most ${most}` : `, answer of ${grouped(answer)} of at most ${most}`;
    if (it.parent[lane] >= 0) lines.push(`a copy of request ${it.parent[lane]}`);
    if (!it.arrived[lane]) lines.push("it was there before the steps shown");
    if (it.preemptions[lane]) lines.push(`preempted ${plural(it.preemptions[lane], "time")}`);
    if (it.end[lane] < 0) lines.push("still live at the end");
    else {
      const last = page.columns["step.step"][Math.max(0, Math.min(this.steps, it.end[lane]) - 1)];
      lines.push(`ended: ${this.reason(lane)}, by step ${grouped(last)}`);
    }
    return lines;
  }

  /** Words for the marks of a lane from a first to a last place. */
  happened(lane, first, last, most) {
    const lines = [];
    for (let at = this.marks[lane]; at < this.marks[lane + 1]; at++) {
      const place = this.mark.place[at];
      if (place < first || place > last) continue;
      if (lines.length === most) {
        lines.push("and more: zoom in");
        break;
      }
      lines.push(`step ${grouped(page.columns["step.step"][Math.min(place, this.steps - 1)])}: ${this.markWords(at)}`);
    }
    return lines;
  }

  markWords(at) {
    const kind = this.told.marks[this.mark.kind[at]];
    const rows = this.mark.rows[at];
    if (kind === "forked") return `forked, shares its rows with request ${rows}`;
    if (kind === "adopted") return `took over ${plural(rows, "row")} from the prefix index`;
    return rows ? `${kind} ${plural(rows, "row")}` : kind;
  }

  /** "request 3 preempted; ..." of all requests, for the steps from first to last. */
  events(first, last, most) {
    const {begin, order} = this.places;
    const count = begin[last + 1] - begin[first];
    const parts = [];
    for (let at = begin[first]; at < begin[last + 1] && parts.length < most; at++) {
      const mark = order[at];
      parts.push(`request ${this.lane.request[this.mark.lane[mark]]} ${this.markWords(mark)}`);
    }
    if (count > parts.length) parts.push(`and ${plural(count - parts.length, "more")}`.replace(/mores$/, "more"));
    return parts.join("; ");
  }

  /** Lanes by row: one each, or where there are many, those that follow each other in one. */
  rows(list, gap) {
    if (list.length <= LANES_ALONE) return list.map((lane) => [lane]);
    const rows = [];
    const ends = [];
    for (const lane of list) {
      let row = ends.findIndex((end) => end <= this.lane.start[lane]);
      if (row < 0) row = rows.push([]) - 1;
      rows[row].push(lane);
      ends[row] = Math.max(this.end(lane), this.lane.start[lane] + 1) + gap;
    }
    return rows;
  }

  /** The lane of a row at a place, or close to it. */
  at(row, place, near) {
    if (row === undefined) return undefined;
    if (row.length === 1) return row[0];
    const distance = (lane) => Math.max(this.lane.start[lane] - place, place - this.end(lane) + 1, 0);
    const found = row.reduce((one, other) => (distance(other) < distance(one) ? other : one));
    return distance(found) <= near ? found : undefined;
  }

  /** Rows of lanes, from the one at `top` (CSS pixels), on a surface. */
  draw(surface, rows, view, top, colours, selected, found) {
    const context = surface.base.getContext("2d");
    const ratio = surface.ratio;
    context.clearRect(0, 0, surface.base.width, surface.base.height);
    const first = Math.floor(top / LANE);
    const last = Math.min(rows.length - 1, Math.ceil((top + surface.height / ratio) / LANE));
    for (let number = first; number <= last; number++) {
      const row = rows[number];
      const y = (number * LANE - top) * ratio;
      const alone = row.length === 1;
      if (number % 2 || (alone && row[0] === selected)) {
        context.fillStyle = alone && row[0] === selected ? colours.select : colours.stripe;
        context.fillRect(0, y, surface.base.width, LANE * ratio);
      }
      for (const lane of row) {
        this.drawLane(context, surface, lane, view, y + (LANE / 2) * ratio, colours, alone);
      }
      context.fillStyle = colours.page;
      context.fillRect(0, y, surface.left - 1, LANE * ratio);
      if (alone) this.drawName(context, surface, row[0], y, colours, selected, found);
      for (const [lane, colour] of [[selected, colours.text], [found, colours.found]]) {
        if (row.includes(lane) && (lane === found || !alone)) this.outline(context, surface, lane, view, y, colour, alone);
      }
    }
  }

  drawLane(context, surface, lane, view, middle, colours, alone) {
    const size = surface.x(this.end(lane), view) - surface.x(this.lane.start[lane], view);
    this.drawSpans(context, surface, lane, view, middle, colours);
    if (alone || size > 40 * surface.ratio) this.drawMarks(context, surface, lane, view, middle, colours);
  }

  drawName(context, surface, lane, y, colours, selected, found) {
    const diverged = lane === found;
    surface.font(context, 11);
    context.fillStyle = diverged ? colours.found : lane === selected ? colours.text : colours.dim;
    context.textAlign = "right";
    context.textBaseline = "middle";
    const x = surface.left - 5 * surface.ratio;
    context.fillText(`${diverged ? "\u25b8 " : ""}${this.lane.request[lane]}`, x, y + (LANE / 2) * surface.ratio);
  }

  outline(context, surface, lane, view, y, colour, alone) {
    const ratio = surface.ratio;
    const right = surface.left + surface.width - ratio;
    const from = alone ? surface.left : Math.max(surface.left, surface.x(this.lane.start[lane], view) - 2 * ratio);
    const to = alone ? right : Math.min(right, surface.x(this.end(lane), view) + 2 * ratio);
    context.strokeStyle = colour;
    context.lineWidth = (alone ? 1 : 2) * ratio;
    if (to > from) context.strokeRect(from, y + ratio, to - from, (LANE - 2) * ratio);
  }

  drawSpans(context, surface, lane, view, middle, colours) {
    const ratio = surface.ratio;
    for (let at = this.spans[lane]; at < this.spans[lane + 1]; at++) {
      if (this.span.last[at] <= view.from || this.span.first[at] >= view.to) continue;
      const phase = this.told.phases[this.span.phase[at]];
      const from = Math.max(surface.left, surface.x(this.span.first[at], view));
      const to = Math.min(surface.left + surface.width, surface.x(this.span.last[at], view));
      const thick = THICK[phase] * ratio;
      context.fillStyle = colours[COLOUR[phase]];
      if (phase === "preempted") {
        for (let x = from; x < to; x += 6 * ratio) {
          context.fillRect(x, middle - thick / 2, Math.min(4 * ratio, Math.max(1, to - x)), thick);
        }
      } else context.fillRect(from, middle - thick / 2, Math.max(1, to - from), thick);
    }
  }

  drawMarks(context, surface, lane, view, middle, colours) {
    const before = {};
    let last = -Infinity;
    const right = surface.left + surface.width;
    for (let at = this.marks[lane]; at < this.marks[lane + 1]; at++) {
      const x = surface.x(this.mark.place[at] + 0.5, view);
      if (x < surface.left || x > right) continue;
      const kind = this.told.marks[this.mark.kind[at]];
      if (before[kind] !== undefined && x - before[kind] < 5 * surface.ratio) continue;
      before[kind] = x;
      last = x - last < 8 * surface.ratio ? last + 10 * surface.ratio : x;
      drawGlyph(context, kind, last, middle, surface.ratio, colours);
    }
    if (this.lane.end[lane] >= 0) {
      const x = Math.max(surface.x(this.lane.end[lane], view), surface.x(this.lane.start[lane], view) + 1);
      if (x >= surface.left && x <= right + 2) {
        const order = IN_ORDER.has(this.reason(lane));
        drawGlyph(context, order ? "end" : "broken", Math.min(x, right - 2), middle, surface.ratio, colours);
      }
    }
  }
}

/** A small shape for what happened: told apart by form, not by colour. */
function drawGlyph(context, kind, x, y, ratio, colours) {
  const size = 4.5 * ratio;
  const lines = {
    rewound: [[-1, 0], [1, -1], [1, 1]],
    trimmed: [[-1, -1], [1, -1], [0, 1]],
    forked: [[0, -1.2], [1.2, 0], [0, 1.2], [-1.2, 0]],
    adopted: [[-1, 1], [1, 1], [0, -1]],
  }[kind];
  context.fillStyle = context.strokeStyle = colours.mark;
  context.lineWidth = 2 * ratio;
  context.beginPath();
  if (lines) {
    lines.forEach(([dx, dy], at) => context[at ? "lineTo" : "moveTo"](x + dx * size, y + dy * size));
    context.closePath();
    context.fill();
    context.lineWidth = ratio;
    context.strokeStyle = colours.page;
    context.stroke();
  } else if (kind === "end") context.fillRect(x - ratio, y - 7 * ratio, 2 * ratio, 14 * ratio);
  else if (kind === "preempted") {
    context.fillRect(x - 4 * ratio, y - 6 * ratio, 2.5 * ratio, 12 * ratio);
    context.fillRect(x + 1.5 * ratio, y - 6 * ratio, 2.5 * ratio, 12 * ratio);
  } else if (kind === "broken") {
    context.strokeStyle = colours.found;
    for (const way of [-1, 1]) {
      context.moveTo(x - size, y - way * size);
      context.lineTo(x + size, y + way * size);
    }
    context.stroke();
  } else {
    context.arc(x, y, size, 0, 2 * Math.PI);
    context.stroke();
  }
}
