// Ranks × pieces: in each box a bar with a segment a contributor, and their number; arrows are the
// messages that arrived in this step. Those of one piece run beside its column, others at the right.

function draw(scene, moment, view, id) {
  const {ranks, pieces, wide, arrivals} = scene, [width, height] = scene.size;
  const left = 118, top = 122, row = (height - top - 70) / ranks, room = width - left - 20;
  const column = Math.min((room - (wide ? 160 : 0)) / pieces, arrivals ? 300 : 200);
  const gutter = wide ? 9 : Math.max(12, Math.min(40, 0.24 * column));
  const place = {
    id, left, top, row, gutter, w: column - gutter, h: row * 0.8,
    x: piece => left + piece * column, middle: rank => top + (rank + 0.5) * row};
  const cells = [...Array(ranks * pieces).keys()].map(cell => box(scene, moment, place, cell));
  const edge = place.x(pieces) - gutter;
  return [heading(moment), names(scene, place), ...cells,
    arrows(scene, moment, place, edge, width - 20 - edge), foot(scene, moment)].join('');
}

function names({ranks, pieces, looks, arrivals}, {id, left, top, row, w, h, x, middle}) {
  const size = Math.min(17, row * 0.7), narrow = w < 72 && !arrivals, above = {y: top - 4, 'font-size': 15};
  const rows = [...Array(ranks).keys()].map(rank => tag('text',
    {x: left - 32, y: middle(rank) + size * 0.36, class: 'end', 'font-size': size}, `rank ${rank}`)
    + rankBox(id, looks[rank], {x: left - 25, y: middle(rank) - h / 2, width: 13, height: h}));
  const columns = [...Array(pieces).keys()].map(piece => tag('text',
    {...above, x: x(piece) + w / 2, class: 'middle'},
    arrivals ? 'has heard from' : narrow ? piece : `piece ${piece}`));
  const once = narrow ? tag('text', {...above, x: left - 32, class: 'end'}, 'piece') : '';
  return [...rows, ...columns, once].join('');
}

// A piece on a rank. Its state: c complete, w spoilt, j still judged, a space: nobody asks.
function box({ranks, pieces, looks, wanted}, moment, {id, w, h, x, middle}, cell) {
  const rank = Math.floor(cell / pieces), left = x(cell % pieces), top = middle(rank) - h / 2;
  const state = moment.state[cell], fresh = moment.changed[cell] === '1' ? 'fresh' : 'paper';
  const of = text => [...text.slice(cell * ranks, (cell + 1) * ranks)];
  const held = of(moment.holds), asked = of(wanted).map(Number), pad = Math.min(6, 0.1 * w);
  const shown = [...held.keys()].filter(each => asked[each] || held[each] !== '0');
  const share = (w - 2 * pad) / Math.max(1, shown.length);
  const bars = shown.map((each, number) => {
    const bar = {x: left + pad + number * share, y: top + 0.56 * h, width: share, height: 0.36 * h};
    const once = '01'.includes(held[each]) ? ''
      : tag('rect', {...bar, class: 'twice', fill: hatchFill(id, 'xx')});
    return held[each] === '0' ? tag('rect', {...bar, class: 'missing'})
      : rankBox(id, looks[each], {...bar, class: 'segment'}) + once;
  });
  const goal = asked.reduce((sum, each) => sum + each, 0);
  const have = held.reduce((sum, each) => sum + (each === '-' ? -1 : Number(each)), 0);
  const mark = {c: '✓', w: '✗'}[state] ?? '', count = goal > 1 ? `${have}/${goal}` : '';
  const text = w < 56 ? mark || (goal > 1 ? have : '') : `${mark} ${count}`.trim();
  const look = state === ' ' ? 'note' : state === 'w' ? 'alarm' : mark ? 'strong' : '';
  const size = Math.min(17, h * 0.42, w / (ranks < 10 ? 4 : 5.5));
  return tag('rect', {x: left, y: top, width: w, height: h,
    class: `box ${fresh} ${{c: 'complete', w: 'spoilt'}[state] ?? ''}`}) + bars.join('')
    + (size < 6 ? '' : tag('text', {x: left + w / 2, y: top + 0.3 * h + size * 0.36,
      'font-size': size, class: `middle ${look}`}, text));
}

// [sender, receiver, column (−1: several pieces), cargo]. Two in one lane never meet.
function arrows({looks}, {arrows: all}, {middle, x, h, row, w, gutter, top}, edge, margin) {
  const out = [];
  for (const [column, ours] of byColumn(all)) {
    const lanes = [], lane = ours.map(([src, dst]) => {
      const low = Math.min(src, dst), high = Math.max(src, dst);
      let free = lanes.findIndex(taken => taken.every(([a, b]) => high < a || low > b));
      if (free < 0) free = lanes.push([]) - 1;
      lanes[free].push([low, high]);
      return free;
    });
    const cargo = new Set(ours.map(each => each[3]));
    const begin = column < 0 ? edge : x(column) + w, wide = column < 0 ? margin : gutter - 3;
    const stub = column < 0 && cargo.size > 1 ? 88 : 0;
    if (column < 0 && cargo.size === 1) {
      out.push(tag('text', {x: begin + 24, y: top - 4, 'font-size': 15}, [...cargo][0]));
    }
    const labelled = new Map();
    ours.forEach(([src, dst, , text], number) => {
      const turn = begin + stub + (wide - stub) * (lane[number] + 0.75) / (lanes.length + 0.5);
      const leave = middle(src) - 0.13 * h, enter = middle(dst) + 0.18 * h;
      const style = `--rank:${looks[src].color}`;
      const path = `M${begin + 2} ${leave}H${turn}V${enter}H${begin + 8}`;
      out.push(tag('path', {d: path, class: 'halo'}),
        tag('path', {d: path, class: 'arrow', style}),
        tag('path', {d: `M${begin + 1} ${enter}l12 -7v14z`, class: 'head', style}));
      labelled.set(src, [...labelled.get(src) ?? [], text]);
    });
    if (stub) {
      for (const [src, texts] of labelled) {
        const text = texts.length === 1 ? texts[0] : `${texts.length} messages`;
        out.push(tag('text', {x: begin + 8, y: middle(src) - 0.13 * h - 4, class: 'cargo',
          'font-size': Math.max(9, Math.min(14, row * 0.36))}, text));
      }
    }
  }
  return out.join('');
}
function byColumn(all) {
  const columns = new Map();
  for (const each of all) columns.set(each[2], [...columns.get(each[2]) ?? [], each]);
  return columns;
}

function foot({size, steps}, {step}) {
  const y = size[1] - 34, field = 360 / Math.max(1, steps), out = [];
  for (let each = 0; each < steps; each++) {
    out.push(tag('rect', {x: 20 + each * field, y, width: field * 0.94, height: 16,
      class: each < step ? 'done' : 'missing'}));
  }
  out.push(tag('text', {x: 388, y: y + 14, 'font-size': 15}, `${step}/${steps}`));
  for (const [x, name, text] of [[510, 'box fresh', 'changed now'], [670, 'box paper complete', '✓ complete']]) {
    out.push(tag('rect', {x, y: y - 2, width: 30, height: 20, class: name}),
      tag('text', {x: x + 38, y: y + 14, 'font-size': 15}, text));
  }
  out.push(tag('path', {d: `M832 ${y + 8}h30`, class: 'arrow', style: '--rank:var(--ink)'}),
    tag('path', {d: `M826 ${y + 8}l12 -7v14z`, class: 'head', style: '--rank:var(--ink)'}),
    tag('text', {x: 870, y: y + 14, 'font-size': 15}, 'message'));
  return out.join('');
}
