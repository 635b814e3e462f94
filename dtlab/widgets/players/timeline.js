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
  if (view.scene !== scene) Object.assign(view, {scene, from: 0, to: scene.end});
  view.cursor = moment.time;
  if (moment.time !== null && (moment.time < view.from || moment.time > view.to)) {
    move(view, scene, moment.time - (view.to - view.from) / 2, view.to - view.from);
  }
  const {from, to} = view, [width, height] = scene.size;
  const left = 150, top = 88, right = width - 30, bottom = height - 92;
  const lane = (bottom - top) / scene.lanes.length, share = 0.84 / scene.tracks.length;
  const x = time => left + (time - from) / (to - from) * (right - left);
  const y = (number, part) => top + (number + part) * lane;
  const place = {id, from, to, left, right, top, bottom, lane, share, x, y};
  const cursor = moment.time === null ? ''
    : tag('path', {d: `M${x(moment.time)} ${top - 6}V${bottom + 4}`, class: 'cursor'});
  return [`<clipPath id="${id}clip"><rect x="${left}" y="${top - 8}" width="${right - left}" `
    + `height="${bottom - top + 16}"/></clipPath>`, heading({...moment, note: scene.note}),
  axis(scene, place), names(scene, place), bars(scene, place), view.bare ? '' : arrows(scene, place),
  cursor, legend(scene, place, height - 26)].join('');
}

function names({lanes, looks}, {id, left, right, lane, y}) {
  return lanes.map(([label, rank], number) => {
    const size = Math.min(15, lane * 0.9 + 3), every = Math.ceil(13 / lane);
    return (number % 2 ? '' : tag('rect', {
      x: left, y: y(number, 0), width: right - left, height: lane, class: 'stripe'}))
      + (number % every ? '' : tag('text', {
        x: left - 26, y: y(number, 0.5) + 5, class: 'end', 'font-size': size}, label))
      + rankBox(id, looks[rank], {x: left - 19, y: y(number, 0.08), width: 12, height: lane * 0.84});
  }).join('');
}

function bars({bars: all, tracks, looks, kinds}, {id, from, to, left, right, lane, share, x, y}) {
  const inside = time => Math.max(left, Math.min(right, x(time)));
  const seen = all.filter(([, , , begin, end]) => end >= from && begin <= to);
  return seen.map(([number, track, kind, begin, end, tint, text, slot, slots]) => {
    const at = 0.08 + tracks.indexOf(track) * share + slot * share / slots, x1 = inside(begin);
    const box = {x: x1, y: y(number, at), width: Math.max(1.5, inside(end) - x1),
      height: share / slots * lane};
    const size = Math.min(14, box.height * 0.8), {hatch} = kinds[kind];
    const fits = text && size >= 8 && text.length * size * 0.62 < box.width - 4;
    return tag('rect', {...box, class: `bar ${kind}`, style: `--rank:${looks[tint].color}`})
      + (hatch && seen.length < 1500 ? tag('rect', {...box, fill: hatchFill(id, hatch)}) : '')
      + (fits ? tag('text', {x: box.x + box.width / 2, y: box.y + box.height / 2 + size * 0.36,
        'font-size': size, class: `middle on ${kind}`, style: `--on:${looks[tint].ink}`}, text) : '');
  }).join('');
}

// Each message from when it left to when it had arrived, by the nearer edges of the two lanes.
function arrows({messages, looks}, {id, from, to, left, right, share, x, y}) {
  const shown = messages.filter(([, , begin, end]) => end >= from && begin <= to);
  return shown.map(([src, dst, begin, end, rank]) => {
    const down = src < dst, style = `--rank:${looks[rank].color}`;
    const [x1, y1] = [x(begin), y(src, down ? 0.08 + share : 0.08)];
    const [x2, y2] = [x(end), y(dst, down ? 0.92 - share : 0.92)];
    const turn = Math.atan2(y2 - y1, x2 - x1) * 180 / Math.PI;
    const head = tag('path', {d: 'M0 0l-11 -4v8z', class: 'head', style,
      transform: `translate(${x2} ${y2}) rotate(${turn})`});
    return tag('path', {d: `M${x1} ${y1}L${x2} ${y2}`, class: 'message', style,
      'clip-path': `url(#${id}clip)`}) + (x2 >= left && x2 <= right ? head : '');
  }).join('');
}

function legend({present, kinds}, {id, left}, y) {
  let x = left - 60;
  return present.map(kind => {
    const {name, hatch} = kinds[kind], box = {x, y, width: 26, height: 16};
    x += 48 + name.length * 8;
    return tag('rect', {...box, class: `bar ${kind}`, style: '--rank:var(--quiet)'})
      + (hatch ? tag('rect', {...box, fill: hatchFill(id, hatch)}) : '')
      + tag('text', {x: box.x + 32, y: y + 13, 'font-size': 14}, name);
  }).join('');
}

function axis({unit: [scale, name]}, {from, to, x, bottom, top}) {
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
