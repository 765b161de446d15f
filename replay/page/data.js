"use strict";
// Data: what the page was given, as typed arrays by name. replay/page_data.py writes it.

/** The described columns: {told, columns}; columns are Int32Array, or Float64Array where wide. */
async function unpack(text) {
  const packed = atob(text.trim());
  const bytes = new Uint8Array(packed.length);
  for (let at = 0; at < packed.length; at++) bytes[at] = packed.charCodeAt(at);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return parse(await new Response(stream).arrayBuffer());
}

function parse(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const told = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const columns = {};
  let at = 4 + length;
  for (const [name, [width, count]] of Object.entries(told.columns)) {
    columns[name] = column(buffer.slice(at, at + width * count), width);
    at += width * count;
  }
  return {told, columns};
}

/** Differences, zigzag, as values. Two-byte and wider numbers are little-endian, as machines are. */
function column(buffer, width) {
  const kinds = {1: Uint8Array, 2: Uint16Array, 4: Uint32Array, 8: BigUint64Array};
  const raw = new kinds[width](buffer);
  const values = width < 8 ? new Int32Array(raw.length) : new Float64Array(raw.length);
  let wide = null;
  let sum = 0;
  for (let at = 0; at < raw.length; at++) {
    const it = Number(raw[at]);
    sum += it % 2 ? -(it + 1) / 2 : it / 2;
    if (wide === null && (sum > 0x7fffffff || sum < -0x80000000)) wide = Float64Array.from(values);
    (wide ?? values)[at] = sum;
  }
  return wide ?? values;
}

/** Where each of `count` owners' entries begin, for entries that are sorted by owner. */
function starts(owners, count) {
  const found = new Int32Array(count + 1);
  for (const owner of owners) found[owner + 1]++;
  for (let at = 0; at < count; at++) found[at + 1] += found[at];
  return found;
}

/** Entries in the order of their places, and where each place's begin. */
function byPlace(places, count) {
  const clamped = places.map((place) => Math.max(0, Math.min(count - 1, place)));
  const begin = starts(clamped, count);
  const next = begin.slice();
  const order = new Int32Array(places.length);
  for (let at = 0; at < places.length; at++) order[next[clamped[at]]++] = at;
  return {begin, order};
}
