// A player: controls, a drawing that steps through moments, and its words below. `model` is
// anywidget's, or `pageModel` where no kernel is. `draw(scene, moment, view)` returns SVG, as text.

const escaped = text => String(text).replace(/[&<>"]/g, sign => `&#${sign.charCodeAt(0)};`);

function element(tag, attributes, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === 'function') made.addEventListener(name, value);
    else if (value !== false) made.setAttribute(name, value === true ? '' : value);
  }
  made.append(...children);
  return made;
}

// Tags as text: tag('rect', {x: 1}), tag('text', {x: 1}, 'rank 0').
function tag(name, attributes, text) {
  const written = Object.entries(attributes).map(([key, value]) => ` ${key}="${escaped(value)}"`);
  return `<${name}${written.join('')}>${text === undefined ? '' : escaped(text)}</${name}>`;
}

function play(model, root, draw) {
  let show = model.get('show'), timer = 0, asked = 0;
  const view = {};  // what a drawing keeps for itself, such as the stretch of time it shows
  const id = `dtlab${Math.random().toString(36).slice(2)}`;
  const controls = new Map();
  const rows = element('div', {class: 'dtlab-controls'});
  const words = element('div', {class: 'dtlab-words', role: 'status'});
  const picture = element('div', {class: 'dtlab-drawing', tabindex: 0, role: 'img'});
  const button = (text, title, click) =>
    element('button', {class: 'dtlab-button', type: 'button', title, click}, text);
  const playing = button('▶', 'play or pause', () => timer ? pause() : start());
  const back = button('◀ back', 'one back', () => { pause(); go(at() - 1); });
  const forward = button('forward ▶', 'one forward', () => { pause(); go(at() + 1); });
  const place = element('input', {
    type: 'range', min: 0, step: 1, 'aria-label': 'moment',
    input: () => { pause(); go(Number(place.value)); }});
  const readout = element('output', {});
  const full = button('full screen', 'show this alone, and larger; Esc ends it', () =>
    document.fullscreenElement ? document.exitFullscreen() : box.requestFullscreen());
  const tools = (draw.tools ?? []).map(({text, title, change}) =>
    button(text, title, () => { change(view, show.scene); redraw(); }));
  const moving = element('div', {class: 'dtlab-row'}, playing, back, forward,
    element('label', {class: 'dtlab-place'}, place), readout, ...tools, full);
  const box = element('div', {class: 'dtlab-player', keydown: onKey}, rows, moving, picture, words);
  root.replaceChildren(box);

  const at = () => Math.min(model.get('at'), show.moments.length - 1);
  function go(number) {
    const next = Math.max(0, Math.min(number, show.moments.length - 1));
    if (next === at()) return;
    model.set('at', next);
    model.save_changes();
    redraw();
  }
  function start() {
    if (at() === show.moments.length - 1) go(0);
    timer = setInterval(
      () => at() < show.moments.length - 1 ? go(at() + 1) : pause(), show.scene.interval_ms ?? 1000);
    playing.textContent = '⏸';
  }
  function pause() {
    clearInterval(timer);
    timer = 0;
    playing.textContent = '▶';
  }

  // In JupyterLab's command mode, b inserts a cell and an arrow goes to another one: keys pressed in
  // here mean something here; those that save or run are still the notebook's.
  function onKey(event) {
    if (event.ctrlKey || event.metaKey || (event.shiftKey && event.key === 'Enter')) return;
    event.stopPropagation();
    if (event.key === 'Escape' && document.fullscreenElement === box) document.exitFullscreen();
    if (event.target !== picture) return;
    const keys = {ArrowLeft: () => go(at() - 1), ArrowRight: () => go(at() + 1), Home: () => go(0),
      End: () => go(Infinity), ' ': () => timer ? pause() : start()};
    if (!keys[event.key]) return;
    event.preventDefault();
    if (event.key !== ' ') pause();
    keys[event.key]();
  }

  function choose(name, value) {
    pause();
    clearTimeout(asked);
    asked = setTimeout(() => say('No answer: run this cell again, or start its kernel.', true), 5000);
    model.set('choice', {...model.get('choice'), [name]: value});
    model.save_changes();
  }
  function control({name, label, kind, options}) {
    const value = () => options[made.kind === 'slider' ? input.value : input.selectedIndex][1];
    const out = element('output', {});
    const change = {
      select: () => choose(name, value()), slider: () => choose(name, value()),
      text: () => choose(name, input.value), check: () => choose(name, input.checked)}[kind];
    const input = {
      select: () => element('select', {change}),
      slider: () => element('input', {type: 'range', min: 0, step: 1, input: change}),
      text: () => element('textarea', {change, rows: 8, spellcheck: 'false'}),
      check: () => element('input', {type: 'checkbox', change})}[kind]();
    const made = {kind, input, out, update(now) {
      options = now.options;
      const chosen = model.get('choice')[name];
      const number = options?.findIndex(([, each]) => each === chosen);
      if (kind === 'select') {
        if (JSON.stringify(options) !== made.listed) {
          input.replaceChildren(...options.map(([text]) => element('option', {}, text)));
          made.listed = JSON.stringify(options);
        }
        input.selectedIndex = number;
      } else if (kind === 'slider') {
        input.max = options.length - 1;
        input.value = number;
        out.textContent = options[number]?.[0] ?? chosen;
        input.setAttribute('aria-valuetext', out.textContent);
      } else if (kind === 'text') input.value = chosen;
      else input.checked = chosen;
      input.disabled = Boolean(now.disabled);
    }};
    const field = element('label', {class: `dtlab-${kind}`}, element('span', {}, label), input);
    if (kind === 'slider') field.append(out);
    rows.append(field);
    return made;
  }

  function say(text, alarm) {
    words.classList.toggle('dtlab-alarm', Boolean(alarm));
    if (words.textContent !== text) words.textContent = text;
  }
  function redraw() {
    const moment = show.moments[at()], {size} = show.scene, last = show.moments.length - 1;
    picture.innerHTML = `<svg viewBox="0 0 ${size[0]} ${size[1]}" aria-hidden="true">`
      + `${hatches(id)}${draw(show.scene, moment, view, id)}</svg>`;
    picture.setAttribute('aria-label', moment.title);
    say(moment.words);
    moving.classList.toggle('dtlab-still', last === 0);
    place.max = last;
    place.value = at();
    readout.textContent = moment.label;
    place.setAttribute('aria-valuetext', moment.label);
    back.disabled = at() === 0;
    forward.disabled = at() === last;
    playing.disabled = place.disabled = last === 0;
  }
  function answer() {
    clearTimeout(asked);
    show = model.get('show');
    for (const each of show.controls) {
      if (!controls.has(each.name)) controls.set(each.name, control(each));
      controls.get(each.name).update(each);
    }
    redraw();
    if (show.alarm) say(show.alarm, true);
  }
  const onFull = () => {
    full.textContent = document.fullscreenElement === box ? 'leave full screen' : 'full screen';
  };
  document.addEventListener('fullscreenchange', onFull);
  model.on('change:show', answer);
  model.on('change:answers', answer);
  model.on('change:at', redraw);
  answer();
  return () => {
    pause();
    document.removeEventListener('fullscreenchange', onFull);
    model.off('change:show', answer);
    model.off('change:answers', answer);
    model.off('change:at', redraw);
  };
}

// Where no kernel is: the same model over answers computed before, each under its choice's values.
function pageModel(data, runs) {
  const heard = {}, call = name => heard[name]?.forEach(each => each());
  const held = (name, value) => runs?.some(run => run.choice[name] === value);
  const fixed = show => ({...show, controls: show.controls.map(each => {
    const options = runs ? each.options?.filter(([, value]) => held(each.name, value)) : each.options;
    return {...each, options, disabled: !runs || !options || options.length < 2};
  })});
  const state = {choice: data.choice, show: fixed(data.show), at: data.show.at};
  function answer(before) {
    const names = Object.keys(state.choice);
    const changed = names.find(name => state.choice[name] !== before[name]);
    const agree = choice => names.filter(name => choice[name] === state.choice[name]).length;
    const possible = runs.filter(run => run.choice[changed] === state.choice[changed]);
    const best = possible.sort((a, b) => agree(b.choice) - agree(a.choice))[0];
    if (!best) {
      state.choice = before;
      state.show = {...state.show, alarm: 'This page does not hold that; the notebook computes it.'};
    } else Object.assign(state, {choice: best.choice, show: fixed(best.show), at: best.show.at});
    call('change:show');
  }
  return {
    get: name => state[name],
    set(name, value) {
      const before = state[name];
      state[name] = value;
      if (name === 'choice') answer(before);
    },
    save_changes() {},
    on: (name, each) => (heard[name] ??= []).push(each),
    off: (name, each) => { heard[name] = heard[name]?.filter(other => other !== each); },
  };
}

// Patterns for ranks whose colour is another rank's, lighter or darker.
const HATCHES = {'//': 'M-1 9L9 -1M-1 1L1 -1M7 9L9 7', '..': 'M2 2h1M6 6h1', 'xx': 'M0 0L8 8M8 0L0 8',
  '\\': 'M-1 -1L9 9', '...': 'M1 1h1M5 3h1M3 6h1', '////': 'M-1 5L5 -1M3 9L9 3', '+++': 'M4 0V8M0 4H8'};
const hatches = id => `<defs>${Object.entries(HATCHES).map(([name, path], number) =>
  `<pattern id="${id}h${number}" width="8" height="8" patternUnits="userSpaceOnUse"><path d="${path}"`
  + ' stroke="#1c2833" stroke-opacity=".55" fill="none"/></pattern>').join('')}</defs>`;
const hatchFill = (id, hatch) => `url(#${id}h${Object.keys(HATCHES).indexOf(hatch)})`;

// A rectangle in a rank's look.
function rankBox(id, look, attributes) {
  const hatched = look.hatch
    ? tag('rect', {...attributes, class: '', fill: hatchFill(id, look.hatch), stroke: 'none'}) : '';
  return tag('rect', {...attributes, fill: look.color}) + hatched;
}
const heading = ({title, note}) => tag('text', {x: 20, y: 34, class: 'title'}, title)
  + tag('text', {x: 20, y: 60, class: 'note'}, note ?? '');
