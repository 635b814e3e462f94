// A pipeline schedule: ranks × time, a block an action. What has begun by the moment is strong.

function draw(scene, moment, view, id) {
  const {rows, kinds, end} = scene, [width, height] = scene.size;
  const left = 92, right = width - 150, top = 104, row = Math.min(84, (height - top - 50) / rows.length);
  const x = time => left + time / end * (right - left), out = [heading({...moment, note: scene.note})];
  let place = left;
  for (const kind of scene.present) {
    const {name, color} = kinds[kind];
    out.push(tag('rect', {x: place, y: 74, width: 16, height: 14, fill: color}),
      tag('text', {x: place + 22, y: 86, 'font-size': 14}, `${kind}: ${name}`));
    place += 70 + name.length * 8;
  }
  if (scene.chunks > 1) {
    out.push(tag('text', {x: place, y: 86, 'font-size': 14, class: 'note'}, 'darker: a later chunk'));
  }
  out.push(tag('text', {x: right + 12, y: 86, 'font-size': 14}, 'holds (most)'));
  rows.forEach((actions, rank) => {
    const y = top + rank * row, high = row * 0.86;
    out.push(tag('text', {x: left - 10, y: y + high / 2 + 5, class: 'end', 'font-size': 15}, `rank ${rank}`),
      tag('rect', {x: left, y, width: right - left, height: high, class: 'stripe'}));
    for (const [kind, micro, begin, stop, color, ink] of actions) {
      const box = {x: x(begin), y, width: x(stop) - x(begin), height: high};
      const state = moment.time < begin ? 'later' : moment.time < stop ? 'now' : 'past';
      out.push(tag('rect', {...box, fill: color, class: `block ${state}`}));
      const text = box.width > 26 ? `${kind}${micro}` : `${micro}`;
      const size = Math.min(14, high * 0.6);
      if (text.length * size * 0.62 < box.width) {
        out.push(tag('text', {x: box.x + box.width / 2, y: y + high / 2 + size * 0.36, 'font-size': size,
          class: `middle on ${state}`, style: `--on:${ink}`}, text));
      }
    }
    out.push(tag('text', {x: right + 12, y: y + high / 2 + 5, 'font-size': 15},
      `${moment.holds[rank]} (${scene.most[rank]})`));
  });
  const bottom = top + rows.length * row;
  if (moment.time < end) {
    out.push(tag('path', {d: `M${x(moment.time)} ${top - 6}V${bottom}`, class: 'cursor'}));
  }
  const step = [1, 2, 5, 10, 20, 50, 100].find(each => end / each <= 12) ?? 200;
  for (let time = 0; time <= end; time += step) {
    out.push(tag('text', {x: x(time), y: bottom + 16, class: 'middle note', 'font-size': 14}, time));
  }
  out.push(tag('text', {x: right, y: bottom + 36, class: 'end note', 'font-size': 14}, 'time (s)'));
  return out.join('');
}
