// Ranks × time. In each lane, from the top: what it sends, its work and its waits, what it receives.
// `view` keeps the stretch that is shown, in seconds, and whether arrows are.

function stretch(view, {end}) {
  view.from ??= 0;
  view.to ??= end;
  return view;
}
function zoom(view, scene, factor) {
  const {from, to} = stretch(view, scene), wide = Math.min(scene.end, (to - from) * factor);
  const middle = view.cursor > from && view.cursor < to ? view.cursor : (from + to) / 2;
  move(view, scene, middle - wide / 2, wide);
}
function move(view, scene, from, wide) {
  view.from = Math.max(0, Math.min(from, scene.end - wide));
  view.to = view.from + wide;
}
function shift(view, scene, share) {
  const {from, to} = stretch(view, scene);
  move(view, scene, from + share * (to - from), to - from);
}
draw.tools = [
  {text: 'zoom in', title: 'show half as much', change: (view, scene) => zoom(view, scene, 0.5)},
  {text: 'zoom out', title: 'show twice as much', change: (view, scene) => zoom(view, scene, 2)},
  {text: '◀ earlier', title: 'move to the left', change: (view, scene) => shift(view, scene, -0.5)},
  {text: 'later ▶', title: 'move to the right', change: (view, scene) => shift(view, scene, 0.5)},
  {text: 'arrows', title: 'show or hide messages', change: view => { view.bare = !view.bare; }},
];

function draw(scene, moment, view, id) {
  const {lanes, tracks, bars, messages, looks} = scene, [width, height] = scene.size;
  if (view.scene !== scene) Object.assign(view, {scene, from: 0, to: scene.end});
  view.cursor = moment.time;
  if (moment.time !== null && (moment.time < view.from || moment.time > view.to)) {
    move(view, scene, moment.time - (view.to - view.from) / 2, view.to - view.from);
  }
  const {from, to} = view, left = 150, top = 88, right = width - 30, bottom = height - 92;
  const lane = (bottom - top) / lanes.length, x = time => left + (time - from) / (to - from) * (right - left);
  const inside = time => Math.max(left, Math.min(right, x(time)));
  const y = (number, share) => top + (number + share) * lane;
  const out = [heading({...moment, note: scene.note}), axis(scene, from, to, x, bottom, top)];
  lanes.forEach(([label, rank], number) => {
    if (number % 2 === 0) {
      out.push(tag('rect', {x: left, y: y(number, 0), width: right - left, height: lane, class: 'stripe'}));
    }
    if (lane >= 13 || number % Math.ceil(13 / lane) === 0) {
      out.push(tag('text', {x: left - 26, y: y(number, 0.5) + 5, class: 'end',
        'font-size': Math.min(15, lane * 0.9 + 3)}, label));
    }
    out.push(rankBox(id, looks[rank], {x: left - 19, y: y(number, 0.08), width: 12, height: lane * 0.84}));
  });
  const seen = bars.filter(([, , , begin, end]) => end >= from && begin <= to);
  for (const [number, track, kind, begin, end, tint, text, slot, slots] of seen) {
    const place = tracks.indexOf(track), share = 0.84 / tracks.length;
    const high = share / slots, at = 0.08 + place * share + slot * high;
    const x1 = inside(begin), box = {x: x1, y: y(number, at), width: Math.max(1.5, inside(end) - x1),
      height: high * lane};
    out.push(tag('rect', {...box, class: `bar ${kind}`, style: `--rank:${looks[tint].color}`}));
    const {hatch} = scene.kinds[kind];
    if (hatch && seen.length < 1500) {
      out.push(tag('rect', {...box, fill: hatchFill(id, hatch)}));
    }
    const size = Math.min(14, box.height * 0.8);
    if (text && size >= 8 && text.length * size * 0.62 < box.width - 4) {
      out.push(tag('text', {x: box.x + box.width / 2, y: box.y + box.height / 2 + size * 0.36,
        'font-size': size, class: `middle on ${kind}`, style: `--on:${looks[tint].ink}`}, text));
    }
  }
  if (!view.bare) {
    for (const [src, dst, begin, end, rank] of messages) {
      if (end < from || begin > to) continue;
      const down = src < dst, above = 0.08 + 0.84 / tracks.length, below = 0.92 - 0.84 / tracks.length;
      const x1 = x(begin), x2 = x(end), y1 = y(src, down ? above : 0.08), y2 = y(dst, down ? below : 0.92);
      const turn = Math.atan2(y2 - y1, x2 - x1) * 180 / Math.PI;
      out.push(tag('path', {d: `M${x1} ${y1}L${x2} ${y2}`, class: 'message', 'clip-path': `url(#${id}clip)`,
        style: `--rank:${looks[rank].color}`}));
      if (x2 <= right && x2 >= left) {
        out.push(tag('path', {d: 'M0 0l-11 -4v8z', class: 'head', style: `--rank:${looks[rank].color}`,
          transform: `translate(${x2} ${y2}) rotate(${turn})`}));
      }
    }
  }
  if (moment.time !== null) {
    out.push(tag('path', {d: `M${x(moment.time)} ${top - 6}V${bottom + 4}`, class: 'cursor'}));
  }
  let place = left - 60;
  for (const kind of scene.present) {
    const {name, hatch} = scene.kinds[kind], box = {x: place, y: height - 26, width: 26, height: 16};
    out.push(tag('rect', {...box, class: `bar ${kind}`, style: '--rank:var(--quiet)'}),
      hatch ? tag('rect', {...box, fill: hatchFill(id, hatch)}) : '',
      tag('text', {x: place + 32, y: height - 13, 'font-size': 14}, name));
    place += 48 + name.length * 8;
  }
  return `<clipPath id="${id}clip"><rect x="${left}" y="${top - 8}" width="${right - left}" `
    + `height="${bottom - top + 16}"/></clipPath>${out.join('')}`;
}

function axis({unit: [scale, name]}, from, to, x, bottom, top) {
  const out = [], rough = (to - from) / scale / 6, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(each => each * power).find(each => each >= rough);
  for (let number = Math.ceil(from / scale / step); number * step <= to / scale; number++) {
    const place = x(number * step * scale), text = Number((number * step).toPrecision(6));
    out.push(tag('path', {d: `M${place} ${top}V${bottom + 5}`, class: 'grid'}),
      tag('text', {x: place, y: bottom + 22, class: 'middle note', 'font-size': 14}, text));
  }
  out.push(tag('text', {x: (x(from) + x(to)) / 2, y: bottom + 44, class: 'middle note', 'font-size': 14},
    `time (${name})`));
  return out.join('');
}
