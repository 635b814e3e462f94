// Ranks × pieces: in each box a bar with a segment a contributor, and their number; arrows are the
// messages that arrived in this step. Those of one piece run beside its column, others at the right.

function draw(scene, moment, view, id) {
  const {ranks, pieces, looks, wide, arrivals} = scene, [width, height] = scene.size;
  const left = 118, top = 122, row = (height - top - 70) / ranks, room = width - left - 20;
  const margin = wide ? 160 : 0;
  const column = Math.min((room - margin) / pieces, arrivals ? 300 : 200);
  const gutter = wide ? 9 : Math.max(12, Math.min(40, 0.24 * column));
  const w = column - gutter, h = row * 0.8, small = w < 56;
  const middle = rank => top + (rank + 0.5) * row, x0 = piece => left + piece * column;
  const out = [heading(moment)];
  const size = Math.min(17, row * 0.7);
  for (let rank = 0; rank < ranks; rank++) {
    out.push(tag('text', {x: left - 32, y: middle(rank) + size * 0.36, class: 'end', 'font-size': size},
      `rank ${rank}`));
    out.push(rankBox(id, looks[rank], {x: left - 25, y: middle(rank) - h / 2, width: 13, height: h}));
  }
  for (let piece = 0; piece < pieces; piece++) {
    const name = arrivals ? 'has heard from' : w < 72 ? piece : `piece ${piece}`;
    out.push(tag('text', {x: x0(piece) + w / 2, y: top - 4, class: 'middle', 'font-size': 15}, name));
  }
  if (w < 72 && !arrivals) {
    out.push(tag('text', {x: left - 32, y: top - 4, class: 'end', 'font-size': 15}, 'piece'));
  }
  const letters = Math.min(17, h * 0.42, w / (ranks < 10 ? 4 : 5.5));
  for (let rank = 0; rank < ranks; rank++) {
    for (let piece = 0; piece < pieces; piece++) {
      const cell = rank * pieces + piece, x = x0(piece), y = middle(rank) - h / 2;
      const state = moment.state[cell];  // c: complete, w: spoilt, j: still judged, space: not
      const fresh = moment.changed[cell] === '1' ? 'fresh' : 'paper';
      out.push(tag('rect', {x, y, width: w, height: h,
        class: `box ${fresh} ${{c: 'complete', w: 'spoilt'}[state] ?? ''}`}));
      const part = text => text.slice(cell * ranks, (cell + 1) * ranks);
      const held = part(moment.holds), wanted = part(scene.wanted), shown = [];
      let goal = 0, have = 0;
      for (let each = 0; each < ranks; each++) {
        goal += wanted[each] === '1';
        have += held[each] === '-' ? -1 : Number(held[each]);
        if (wanted[each] === '1' || held[each] !== '0') shown.push(each);
      }
      const pad = Math.min(6, 0.1 * w), share = (w - 2 * pad) / Math.max(1, shown.length);
      shown.forEach((each, number) => {
        const bar = {x: x + pad + number * share, y: y + 0.56 * h, width: share, height: 0.36 * h};
        if (held[each] === '0') out.push(tag('rect', {...bar, class: 'missing'}));
        else out.push(rankBox(id, looks[each], {...bar, class: 'segment'}));
        if (!'01'.includes(held[each])) {
          out.push(tag('rect', {...bar, class: 'twice', fill: hatchFill(id, 'xx')}));
        }
      });
      const mark = {c: '✓', w: '✗'}[state] ?? '', count = goal > 1 ? `${have}/${goal}` : '';
      const text = small ? mark || (goal > 1 ? have : '') : `${mark} ${count}`.trim();
      if (letters >= 6) {
        out.push(tag('text', {x: x + w / 2, y: y + 0.3 * h + letters * 0.36, 'font-size': letters,
          class: `middle ${state === ' ' ? 'note' : state === 'w' ? 'alarm' : mark ? 'strong' : ''}`},
        text));
      }
    }
  }
  out.push(arrows(moment.arrows, {scene, middle, x0, h, row, w, gutter, top,
    edge: x0(pieces) - gutter, margin: width - 20 - x0(pieces) + gutter}), foot(scene, moment));
  return out.join('');
}

// [sender, receiver, column (−1: several pieces), cargo]. Two in one lane never meet.
function arrows(all, {scene, middle, x0, h, row, w, gutter, top, edge, margin}) {
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
    const begin = column < 0 ? edge : x0(column) + w, wide = column < 0 ? margin : gutter - 3;
    const stub = column < 0 && cargo.size > 1 ? 88 : 0;
    if (column < 0 && cargo.size === 1) {
      out.push(tag('text', {x: begin + 24, y: top - 4, 'font-size': 15}, [...cargo][0]));
    }
    const labelled = new Map();
    ours.forEach(([src, dst, , text], number) => {
      const x = begin + stub + (wide - stub) * (lane[number] + 0.75) / (lanes.length + 0.5);
      const leave = middle(src) - 0.13 * h, enter = middle(dst) + 0.18 * h;
      const style = `--rank:${scene.looks[src].color}`;
      const path = `M${begin + 2} ${leave}H${x}V${enter}H${begin + 8}`;
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
