// A cluster at work: each link as thick and dark as it is loaded; below, loads over time.

function draw(scene, moment, view, id) {
  const [width, height] = scene.size, {lanes, nodes, looks, labels} = scene;
  const out = [heading(moment)], shape = number => `M${lanes[number].map(at => at.join(' ')).join('L')}`;
  const loaded = number => moment.loads[number] ?? 0, numbers = Object.keys(lanes);
  numbers.sort((a, b) => loaded(a) - loaded(b));
  for (const number of numbers) {
    const load = loaded(number), wide = (1.6 + 7.2 * load) * scene.thin;
    out.push(tag('path', {d: shape(number), class: `link ${level(load)}`, 'stroke-width': wide}));
    if (load > 0) {
      const [at, along] = middle(lanes[number]), size = (5 + 5 * load) * scene.thin;
      const turn = Math.atan2(along[1], along[0]) * 180 / Math.PI;
      out.push(tag('path', {d: `M${1.5 * size} 0L${-size} ${size}V${-size}z`, class: `flow ${level(load)}`,
        transform: `translate(${at.join(' ')}) rotate(${turn})`}));
    }
  }
  for (const [x, y, text] of moment.shares) {
    out.push(tag('text', {x, y: y + 5, class: 'middle cargo', 'font-size': 15}, text));
  }
  for (const [name, x, y, rank] of nodes) {
    if (rank >= 0) {
      const half = scene.node / 2;
      out.push(rankBox(id, looks[rank], {x: x - half, y: y - half, width: 2 * half, height: 2 * half,
        class: 'host'}), tag('text', {x, y: y + half * 0.36, class: 'middle strong on',
        'font-size': half, style: `--on:${looks[rank].ink}`}, name));
    } else {
      const wide = name.length * scene.letters * 0.62 + 16;
      out.push(tag('rect', {x: x - wide / 2, y: y - 14, width: wide, height: 28, rx: 6, class: 'switch'}),
        tag('text', {x, y: y + scene.letters * 0.36, class: 'middle switch-name',
          'font-size': scene.letters}, name));
    }
  }
  out.push(strip(scene, moment, height - 150, width), legend(height, width));
  return out.join('');
}
const level = load => load === 0 ? 'idle' : load <= 0.5 ? 'half' : load < 1 - 1e-6 ? 'more' : 'full';

function middle(lane) {
  const at = 0.5 * (lane.length - 1), step = Math.min(Math.floor(at), lane.length - 2);
  const [[x1, y1], [x2, y2]] = [lane[step], lane[step + 1]], share = at - step;
  return [[x1 + share * (x2 - x1), y1 + share * (y2 - y1)], [x2 - x1, y2 - y1]];
}

const DASHES = ['', '10 4', '3 3'];
function strip({series, times, last, end}, moment, top, width) {
  const left = 90, right = width - 30, high = 76, out = [];
  const x = time => left + (end ? time / end : 0) * (right - left), y = load => top + high * (1 - load);
  for (const load of [0, 0.5, 1]) {
    out.push(tag('path', {d: `M${left} ${y(load)}H${right}`, class: 'grid'}),
      tag('text', {x: left - 8, y: y(load) + 5, class: 'end note', 'font-size': 13}, `${load * 100} %`));
  }
  let place = left;
  series.forEach(([name, loads, color], number) => {
    const points = loads.map((load, each) => `${each ? 'L' : 'M'}${x(times[each])} ${y(load)}H${x(times[each + 1])}`);
    out.push(tag('path', {d: points.join(''), class: 'series', style: `--rank:${color}`,
      'stroke-dasharray': DASHES[number], 'stroke-width': 4 - number}),
    tag('path', {d: `M${place} ${top - 14}h34`, class: 'series', style: `--rank:${color}`,
      'stroke-dasharray': DASHES[number], 'stroke-width': 4 - number}),
    tag('text', {x: place + 40, y: top - 9, 'font-size': 13}, name));
    place += 64 + name.length * 7.6;
  });
  out.push(tag('path', {d: `M${x(moment.time)} ${top - 4}V${top + high + 4}`, class: 'cursor'}),
    tag('text', {x: right, y: top + high + 20, class: 'end note', 'font-size': 13}, `time, to ${last}`));
  return out.join('');
}

function legend(height, width) {
  const kinds = [['idle', 'idle link', 2], ['half', 'up to half', 5], ['more', 'more than half', 7],
    ['full', 'full', 9]];
  return kinds.map(([name, text, wide], number) =>
    tag('path', {d: `M${110 + number * 200} ${height - 14}h40`, class: `link ${name}`, 'stroke-width': wide})
    + tag('text', {x: 158 + number * 200, y: height - 9, class: 'note', 'font-size': 14}, text)).join('');
}
